"""The base class of all optimizers here: it wraps a base optimizer, and moves and restores the weights.

`WrappedOptimizer` owns the base optimizer, the state dict, closures and the copy of θ. A method is a subclass
that moves the weights. It extends `AscentOptimizer` (ascent.py) if a first gradient decides where, or
`OffsetOptimizer` (offset.py) if a random draw does. With `Averaging` (averaging.py) it keeps θ's average.

Legend: θ the weights that the base optimizer updates; P their number of entries.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from fractions import Fraction
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from mergekit_lab.errors import InputError, join_names
from mergekit_lab.optim.capturable import ReplayState
from mergekit_lab.optim.group_settings import GroupSettings
from mergekit_lab.optim.parameters import BaseOptimizer, Parameters, build, describe, split_names
from mergekit_lab.optim.precision import move_to_parameter
from mergekit_lab.optim.saved_weights import SavedWeights
from mergekit_lab.optim.sharded import is_distributed, is_sharded
from mergekit_lab.optim.spent_gradients import list_unspent, mark_spent

Closure = Callable[[], Any]

STATE_KEY = "wrapper"


class WrappedOptimizer(GroupSettings):
    """A torch optimizer around a base optimizer.

    `param_groups`, `state` and `defaults` are the base optimizer's own objects, so learning-rate schedulers,
    loggers and gradient scalers act on the base. The base steps once per step, from θ. To clip or log the
    gradient that it uses, add a hook to `optimizer.base`.

    A subclass sets its hyper-parameters, then calls this constructor, which calls `validate`. It implements
    `update`. `saved_attributes` names the hyper-parameters that belong in a checkpoint (plain types), and
    `saved_tensors` its tensors by parameter. Those named in `group_settings` may differ between groups of
    parameters, and are read with `read_setting`. These three lists add to the parents' lists.

    Args:
        named_parameters: `(name, tensor)` pairs, tensors, or groups as in torch, whose "params" hold either.
            Name all of them or none. Only real floating tensors, each once. Groups may have settings of the
            base, and those of this optimizer in `group_settings`. An option that the base has too, such as
            Adadelta's `rho`, is the base's.
        base: makes the optimizer that updates θ, e.g. `functools.partial(torch.optim.AdamW, lr=1e-5)`. It is
            called once with the same parameters or groups, without names.

    Attributes:
        evaluations_per_step: the most calls of the closure in a step.
        drops_gradients: whether a step with a closure first drops existing gradients.
        evaluation: the index of the current call of the closure in its step. Metrics updated only in evaluation
            0 count each batch once.
        batch_fraction: the part of its batch that the closure may use, in (0, 1].
        stays_in_train_mode: whether `step` in train mode moves to the next point. Set it to False in a loop
            that calls `train()` before every forward pass: `step` then ends as `eval()` does.

    Raises:
        InputError: the parameters or `base` are none of these, or parameters are sharded and this method needs
            them whole.
    """

    saved_tensors: ClassVar[tuple[str, ...]] = ()
    takes_sharded: ClassVar[bool] = False
    recordable: ClassVar[bool] = False
    """Whether a step of this very class may be recorded in a CUDA graph: `plan` then tells apart what the host
    decides of it. A subclass does not inherit it, and runs as written until it says so itself."""
    evaluations_per_step: int = 1
    drops_gradients: bool = True

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in ("saved_attributes", "saved_tensors", "group_settings"):
            listed = [each for kind in reversed(cls.__mro__) for each in vars(kind).get(name, ())]
            setattr(cls, name, tuple(dict.fromkeys(listed)))
        cls.recordable = vars(cls).get("recordable", False)

    def __init__(self, named_parameters: Parameters, base: BaseOptimizer) -> None:
        plain, names = split_names(named_parameters)
        inner = build(base, plain)
        for group in inner.param_groups:
            if names:
                group["param_names"] = [names[p] for p in group["params"]]
        super().__init__(inner.param_groups, inner.defaults)
        self.base = inner
        self._share_with_base()
        self.theta = SavedWeights()
        self.evaluation = 0
        self.batch_fraction = 1.0
        self.stays_in_train_mode = True
        self._models: list[nn.Module] = []
        self.replay: ReplayState | None = None
        for name in self.saved_tensors:
            setattr(self, name, {})
        self.refuse_sharded_parameters()
        self._check_hyper_parameters()
        mark_spent(self.parameters)

    def _share_with_base(self) -> None:
        self.param_groups = self.base.param_groups
        self.state = self.base.state
        self.defaults = self.base.defaults

    @property
    def gradient_evaluations(self) -> Fraction:
        """Gradients of a whole batch that a step costs. A part of a batch counts as that part."""
        return Fraction(self.evaluations_per_step)

    def validate(self) -> None:
        """Raise `InputError` for hyper-parameters that do not fit each other, or these parameters. Called on
        construction and after loading, when each is in its range.
        """

    def _check_hyper_parameters(self) -> None:
        self.refuse_group_settings()
        self.check_ranges()
        self.validate()

    def refuse_sharded_parameters(self) -> None:
        """Raise `InputError` if parameters are sharded and this method needs them whole."""
        if not self.takes_sharded and any(is_sharded(p) for p in self.parameters):
            raise InputError(
                f"{type(self).__name__} needs whole parameters, and fully_shard has left this process a part "
                "of each: train with DistributedDataParallel, or take an optimizer that works on parts, as SAM "
                "does (takes_sharded)"
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the base optimizer. It needs names if the others have them."""
        if not hasattr(self, "base"):
            super().add_param_group(param_group)  # torch's constructor, registering what the base already has
            return
        (plain,), names = split_names([param_group])
        if twice := {*plain["params"]} & {*self.parameters}:
            raise InputError(
                f"these parameters are in the optimizer already: {describe(twice, self.names)}; "
                "leave them out of the new group"
            )
        if bool(names) != bool(self.names):
            has, others = ("with", "without") if names else ("without", "with")
            raise InputError(
                f"a group {has} names cannot join groups {others} names: pass its parameters {others} names"
            )
        if names:
            plain["params"] = [(names[p], p) for p in plain["params"]]
        self.base.add_param_group(plain)
        try:
            self.refuse_sharded_parameters()
            self._check_hyper_parameters()
        except InputError:
            self.param_groups.pop()
            raise
        mark_spent(self.parameters)

    def attach(self, model: nn.Module) -> None:
        """Let steps handle state of the model that is not in its parameters.

        Running statistics of normalizations then change only in a step's first evaluation. An ascent with
        `sync_ascent=False` runs under the `no_sync` of a `DistributedDataParallel` model.

        Args:
            model: the model that the closure calls, including wrappers such as `DistributedDataParallel`.
        """
        self._models.append(model)

    def release(self) -> None:
        """Free every tensor except the parameters. The optimizer cannot step again. For loops that keep it
        alive after their end.
        """
        self.state.clear()
        self.theta.release()
        self._models.clear()
        for name in self.saved_tensors:
            getattr(self, name).clear()

    def allow_replay(self, device: torch.device) -> None:
        """Read what the host decides from `device` from now on, so that a step can be recorded in a CUDA graph
        and replayed. Sets `replay`.

        A loop that replays first calls `plan`. It calls `prepare_step` before a replay and `count_step` after
        it. `step` calls `prepare_step` itself, and `update` counts.
        """
        seed, factor = torch.zeros((), dtype=torch.int64, device=device), torch.zeros((), device=device)
        self.replay = ReplayState(torch.Generator(device), seed, factor)

    @property
    def replayable(self) -> bool:
        """Whether steps can be recorded and replayed."""
        return self.recordable

    def plan(self) -> Hashable:
        """What decides the next step's kernels besides tensors. Steps with the same plan launch the same
        kernels on the same memory. None means that the step needs the host and cannot be replayed.
        """
        return ()

    def prepare_step(self) -> None:
        """Write what the host decides for the next step into `replay`. The base class decides nothing."""

    def count_step(self) -> None:
        """Count a replayed step on the host, as `update` does. The base class counts nothing."""

    def train(self) -> None:
        """Move the weights to where the next gradient is taken. The base class does not move them."""

    def eval(self) -> None:
        """Set the weights to those that should be evaluated, saved or loaded. The base class does not move
        them.
        """

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        """Update once. Returns the loss of the first evaluation, or None without a closure.

        Args:
            closure: runs forward and backward and returns the loss. It may zero the gradients or leave them.

        Raises:
            InputError: a gradient is sparse; this optimizer needs a closure; or the step would drop gradients
                made since the last step.
        """
        if closure is not None and self.drops_gradients:
            self.refuse_to_drop_gradients()
        if self.replay is not None and not torch.cuda.is_current_stream_capturing():
            self.prepare_step()
        try:
            return self.update(closure)
        finally:
            mark_spent(self.parameters)

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        if not set_to_none:
            mark_spent(self.parameters)

    def refuse_to_drop_gradients(self) -> None:
        """Raise `InputError` if there are gradients that no step has used."""
        if not (unspent := list_unspent(self.parameters)):
            return
        train_mode = (
            ", or call optimizer.train() before the first of them" if self.evaluations_per_step == 1 else ""
        )
        raise InputError(
            f"{type(self).__name__}.step(closure) evaluates its batch anew and would drop gradients that "
            f"{len(unspent)} parameters already have ({describe(unspent, self.names)}). If a loop accumulates "
            "micro-batches (Lightning's accumulate_grad_batches, accelerate's gradient_accumulation_steps), go "
            f"over them inside the closure{train_mode}. If these gradients are not wanted, call "
            "optimizer.zero_grad() before step"
        )

    def update(self, closure: Closure | None) -> Any:
        """Do the work of `step`. The base class calls the base optimizer's `step`."""
        loss = self.evaluate(closure, zero=self.drops_gradients) if closure is not None else None
        self.base.step()
        return loss

    def evaluate(
        self, closure: Closure, index: int = 0, *, zero: bool = True, fraction: float = 1.0, sync: bool = True
    ) -> Any:
        """Call `closure` with gradients enabled and return its loss, detached and copied.

        It is copied because a compiled model may write its next loss into the same buffer.

        Args:
            closure: see `step`.
            index: the evaluation's index in the step.
            zero: drop the gradients first, so that only this call's remain even if the closure does not zero
                them.
            fraction: `batch_fraction` during the call.
            sync: whether processes share their gradients. False needs an attached model with `no_sync`.
        """
        if zero:
            self.zero_grad()
        torch.clear_autocast_cache()  # autocast around the whole step would reuse the weights it cast before
        self.evaluation, self.batch_fraction = index, fraction
        try:
            with ExitStack() as around:
                if index > 0:
                    around.enter_context(self._keep_statistics())
                if not sync:
                    for no_sync in self._find_no_sync():
                        around.enter_context(no_sync())
                around.enter_context(torch.enable_grad())
                loss = closure()
        finally:
            self.evaluation, self.batch_fraction = 0, 1.0
        self.refuse_sparse_gradients()
        return loss.detach().clone() if isinstance(loss, Tensor) else loss

    @contextmanager
    def _keep_statistics(self) -> Iterator[None]:
        """Undo what the block does to running statistics.

        From copies: the flags of a normalization would recompile a compiled model, and do not stop all kinds.
        """
        kept = SavedWeights()
        modules = (m for model in self._models for m in model.modules() if isinstance(m, _NormBase))
        kept.save([buffer for m in modules for buffer in m.buffers(recurse=False)])
        try:
            yield
        finally:
            with torch.no_grad():
                kept.restore()

    def _find_no_sync(self) -> list[Callable[[], Any]]:
        contexts = [model.no_sync for model in self._models if hasattr(model, "no_sync")]
        if not contexts and is_distributed() and torch.distributed.get_world_size() > 1:
            raise InputError(
                f"{type(self).__name__}(sync_ascent=False) needs the model whose gradients it must not "
                "synchronize: call optimizer.attach(model) with the DistributedDataParallel model"
            )
        return contexts  # type: ignore[return-value]

    def refuse_sparse_gradients(self) -> None:
        """Raise `InputError` naming the parameters whose gradient is sparse."""
        sparse = [p for p in self.parameters if p.grad is not None and p.grad.layout is not torch.strided]
        if sparse:
            raise InputError(
                f"{type(self).__name__} needs dense gradients, these are sparse: "
                f"{describe(sparse, self.names)}. Build the module with sparse=False, or leave its parameters "
                "out of this optimizer"
            )

    def state_dict(self) -> dict[str, Any]:
        """The base optimizer's state dict, with this class's name, attributes and tensors under "wrapper".

        It has only plain types and tensors, so `torch.load(weights_only=True)` reads it. It contains θ only if
        the model's weights are others (`Averaging`).
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        own = {name: getattr(self, name) for name in self.saved_attributes}
        for name in self.saved_tensors:
            by_parameter = getattr(self, name)
            own[name] = {i: by_parameter[p] for i, p in enumerate(self.parameters) if p in by_parameter}
        state: dict[str, Any] = {**self.base.state_dict(), STATE_KEY: {"class": type(self).__name__, **own}}
        for after in self._optimizer_state_dict_post_hooks.values():
            state = after(self, state) or state
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a `state_dict`: base moments, learning rates, hyper-parameters, counters.

        As with every torch optimizer, loaded hyper-parameters replace those given to the constructor.

        Raises:
            InputError: the state is another class's, or has missing or unknown entries, or the weights are
                moved away from θ. In that case restoring θ later would overwrite loaded weights.
        """
        if self.theta.held:
            raise InputError("the weights are away from θ: call optimizer.eval() before load_state_dict")
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        own = dict(state_dict.get(STATE_KEY, {}))
        saved_by = own.pop("class", "an optimizer of another kind")
        if saved_by != type(self).__name__:
            raise InputError(
                f"this state dict was saved by {saved_by}, not by {type(self).__name__}: "
                "build the optimizer that saved it, or start this one afresh"
            )
        if odd := own.keys() ^ {*self.saved_attributes, *self.saved_tensors}:
            raise InputError(
                f"this {saved_by} state dict and this version disagree on the entries {join_names(odd)}"
            )
        self.base.load_state_dict({key: value for key, value in state_dict.items() if key != STATE_KEY})
        self._share_with_base()
        for name in self.saved_attributes:
            setattr(self, name, own[name])
        parameters = self.parameters
        for name in self.saved_tensors:
            by_parameter = getattr(self, name)
            by_parameter.clear()
            for i, t in own[name].items():
                by_parameter[parameters[i]] = move_to_parameter(t.detach().clone(), parameters[i])
        self._check_hyper_parameters()
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        mark_spent(self.parameters)  # a copied gradient has another version than the one it is copied from

    def __getstate__(self) -> dict[str, Any]:
        """What pickle and deepcopy keep: all but hooks and a scheduler's patched `step`, as in torch."""
        return {k: v for k, v in self.__dict__.items() if k != "step" and not k.startswith("_optimizer_")}
