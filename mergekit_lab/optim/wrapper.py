"""What the optimizers here share: a base optimizer inside, and weights that move and come back.

`WrappedOptimizer` owns the base optimizer, the state dict, closures and the copy of θ. `AscentOptimizer`
adds the two-evaluation step of the SAM family. A method is a subclass that says where the weights go.

Legend: θ the weights the base optimizer updates; P their number of entries.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from mergekit_lab.errors import InputError, listing
from mergekit_lab.optim.checks import require_number

Parameters = Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]]
BaseOptimizer = Callable[[Any], Optimizer]
Closure = Callable[[], Any]

STATE_KEY = "wrapper"


class SavedWeights:
    """A copy of θ, kept while a method has moved the weights.

    Changed in place only: Lightning hands out a stand-in whose attributes are not the optimizer's own, and a
    method called on it must still reach this copy.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[list[Tensor], list[Tensor]]] = []

    @property
    def held(self) -> bool:
        """Whether the weights are away from θ."""
        return bool(self._kept)

    def save(self, params: list[Tensor]) -> list[Tensor]:
        """Copy `params`, and return the copies (same shapes, dtypes and devices)."""
        copies = [p.detach().clone() for p in params]
        self._kept.append((list(params), copies))
        return copies

    def restore(self) -> None:
        """Put the copies back, bit for bit, and drop them. Does nothing when none is held."""
        while self._kept:
            params, copies = self._kept.pop()
            if params:
                torch._foreach_copy_(params, copies)


class WrappedOptimizer(Optimizer):
    """A torch optimizer that steps by means of another one.

    `param_groups`, `state` and `defaults` are the base optimizer's own objects, so learning-rate schedulers,
    loggers and gradient scalers act on the base.

    A subclass sets its hyper-parameters and then calls this constructor, names in `saved_attributes` those
    that belong in a checkpoint (plain types or tensors), checks them in `validate`, and writes `step`.

    Args:
        named_parameters: what to optimize: `(name, tensor)` pairs, tensors, or groups as torch takes them,
            whose "params" hold either. Name all of them or none. Real floating tensors only.
        base: called once with the same parameters or groups, without names; returns the optimizer that
            updates θ, e.g. `functools.partial(torch.optim.AdamW, lr=1e-5)`.

    Raises:
        InputError: the parameters or `base` are none of these.
    """

    saved_attributes: ClassVar[tuple[str, ...]] = ()
    evaluations_per_step: ClassVar[int] = 1

    def __init__(self, named_parameters: Parameters, base: BaseOptimizer) -> None:
        plain, names = _without_names(named_parameters)
        inner = _build(base, plain)
        for group in inner.param_groups:
            if names:
                group["param_names"] = [names[p] for p in group["params"]]
        super().__init__(inner.param_groups, inner.defaults)
        self.base = inner
        self._share_with_base()
        self.theta = SavedWeights()
        self.validate()

    def _share_with_base(self) -> None:
        self.param_groups = self.base.param_groups
        self.state = self.base.state
        self.defaults = self.base.defaults

    @property
    def ascending(self) -> bool:
        """Whether the gradient being computed only says where to go next, and no weights will follow it.

        A training loop that clips or logs gradients leaves it alone.
        """
        return False

    def validate(self) -> None:
        """Raise `InputError` for hyper-parameters out of range. Called on construction and after loading."""

    @property
    def parameters(self) -> list[Tensor]:
        """Every parameter, in the order of the groups."""
        return [p for group in self.param_groups for p in group["params"]]

    @property
    def names(self) -> dict[Tensor, str]:
        """The name of each parameter; empty if they came without names."""
        return {
            p: name
            for group in self.param_groups
            for p, name in zip(group["params"], group.get("param_names", ()), strict=False)
        }

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, named if the others are, to the base optimizer."""
        if not hasattr(self, "base"):
            super().add_param_group(param_group)  # torch's constructor, registering what the base already has
            return
        (plain,), names = _without_names([param_group])
        if names:
            plain["params"] = [(names[p], p) for p in plain["params"]]
        self.base.add_param_group(plain)

    def evaluate(self, closure: Closure, *, zero: bool = True) -> Any:
        """Call `closure` with gradients enabled and return its loss, detached and copied.

        Gradients are dropped first unless `zero` is False, so that they are those of this one call whether
        or not the closure zeroes them itself. The copy is there because a compiled model may write its next
        loss into the same buffer.
        """
        if zero:
            self.zero_grad()
        with torch.enable_grad():
            loss = closure()
        self.refuse_sparse_gradients()
        return loss.detach().clone() if isinstance(loss, Tensor) else loss

    def refuse_sparse_gradients(self) -> None:
        """Raise `InputError` naming the parameters whose gradient is sparse."""
        sparse = [p for p in self.parameters if p.grad is not None and p.grad.layout is not torch.strided]
        if sparse:
            names = self.names
            which = listing(names.get(p, f"unnamed, shape {tuple(p.shape)}") for p in sparse)
            raise InputError(
                f"{type(self).__name__} needs dense gradients, these are sparse: {which}. Build the module "
                "with sparse=False, or leave its parameters out of this optimizer"
            )

    def state_dict(self) -> dict[str, Any]:
        """The base optimizer's state dict, and under "wrapper" this class's name and saved attributes.

        Plain types and tensors only, so `torch.load(weights_only=True)` reads it. θ is not in it.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        own = {name: getattr(self, name) for name in self.saved_attributes}
        state: dict[str, Any] = {**self.base.state_dict(), STATE_KEY: {"class": type(self).__name__, **own}}
        for after in self._optimizer_state_dict_post_hooks.values():
            state = after(self, state) or state
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned: base moments, learning rates, hyper-parameters, counters.

        As with every torch optimizer, loaded hyper-parameters replace those given to the constructor.

        Raises:
            InputError: the state is another class's, lacks or has unknown entries, or the weights are away
                from θ (restoring θ afterwards would overwrite weights loaded in between).
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
        if odd := own.keys() ^ set(self.saved_attributes):
            raise InputError(
                f"this {saved_by} state dict and this version disagree on the entries {listing(odd)}"
            )
        self.base.load_state_dict({key: value for key, value in state_dict.items() if key != STATE_KEY})
        self._share_with_base()
        for name, value in own.items():
            setattr(self, name, value)
        self.validate()
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def __getstate__(self) -> dict[str, Any]:
        """What pickle and deepcopy keep: all but hooks and a scheduler's patched `step`, as in torch."""
        return {k: v for k, v in self.__dict__.items() if k != "step" and not k.startswith("_optimizer_")}


class AscentOptimizer(WrappedOptimizer):
    """Two evaluations a step: the gradient at θ says where to go, the base steps with the gradient there.

    The base always steps from θ, which is put back from a copy. With ρ = 0 there is one evaluation and the
    result is the base optimizer's, bit for bit. Extra memory: a copy of the parameters that have a gradient.

    Args:
        named_parameters, base: see `WrappedOptimizer`.
        rho: radius of the perturbation, ≥ 0.
    """

    saved_attributes: ClassVar[tuple[str, ...]] = ("rho",)
    evaluations_per_step = 2

    def __init__(self, named_parameters: Parameters, base: BaseOptimizer, rho: float) -> None:
        self.rho = rho
        super().__init__(named_parameters, base)

    def validate(self) -> None:
        require_number("rho", self.rho, minimum=0)

    @property
    def ascending(self) -> bool:
        """True in the first of two evaluations: the base steps with the gradient of the second."""
        return self.rho > 0 and not self.theta.held

    def perturbation(self, params: list[Tensor], grads: list[Tensor]) -> Sequence[Tensor]:
        """What to add to `params` for the second evaluation.

        Args:
            params, grads: the parameters that have a gradient, and their gradients at θ; left as they are.

        Returns:
            One tensor per parameter, same order and shapes.
        """
        raise NotImplementedError(f"{type(self).__name__} must define perturbation(params, grads)")

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        """One update; returns the loss at θ.

        Args:
            closure: runs forward and backward and returns the loss. It may zero the gradients or leave them:
                they are dropped before each of the two calls, so gradients accumulated before `step` do not
                count.

        Raises:
            InputError: no closure, or a sparse gradient.
        """
        if closure is None:
            name = type(self).__name__
            raise InputError(
                f"{name}.step() needs a closure, because {name} evaluates the loss twice: pass a function "
                "that runs forward and backward and returns the loss. Gradient scalers "
                "(torch.amp.GradScaler, Lightning's precision='16-mixed') step without one: use "
                "precision='bf16-mixed' or float32"
            )
        loss = self.evaluate(closure)
        if self.rho > 0:
            try:
                if self._ascend():
                    self.evaluate(closure)
            finally:
                self.theta.restore()
        self.base.step()
        return loss

    def _ascend(self) -> bool:
        """Move to the perturbed point; False if no parameter has a gradient.

        Apart from `step` so that the first gradients and the perturbation are freed before the second
        evaluation.
        """
        params = [p for p in self.parameters if p.grad is not None]
        if not params:
            return False
        grads = [p.grad for p in params if p.grad is not None]
        shift = self.perturbation(params, grads)
        self.theta.save(params)
        torch._foreach_add_(params, list(shift))
        return True


def global_norm(tensors: list[Tensor] | tuple[Tensor, ...]) -> float:
    """The L2 norm over all entries of all `tensors` together (any shapes, devices and floating dtypes).

    Low precisions are accumulated in float32: squares of ordinary gradients underflow in float16.
    """
    wide = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
    norms = torch._foreach_norm(tensors, 2, wide)
    return torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms])).item()


def _without_names(parameters: Parameters) -> tuple[list[Any], dict[Tensor, str]]:
    """The same tensors or groups with names taken off, and the name of each tensor that had one."""
    names: dict[Tensor, str] = {}
    tensors: list[Tensor] = []

    def strip(entry: Any) -> Any:
        if isinstance(entry, dict) and "params" in entry:
            return {**entry, "params": [strip(e) for e in _listed(entry["params"])]}
        name, tensor = entry if isinstance(entry, tuple) and len(entry) == 2 else (None, entry)
        if not isinstance(tensor, Tensor):
            raise InputError(f"cannot optimize a {type(tensor).__name__}: pass model.named_parameters()")
        if name is not None:
            names[tensor] = name
        tensors.append(tensor)
        return tensor

    plain = [strip(entry) for entry in _listed(parameters)]
    if not tensors:
        raise InputError("there are no parameters to optimize: is every parameter filtered out?")
    count = len(set(tensors))
    if names and len(names) < count:
        raise InputError(f"{len(names)} of {count} parameters have a name: name all of them or none")
    if odd := {str(t.dtype) for t in tensors if not t.is_floating_point()}:
        raise InputError(f"only real floating parameters can be optimized, not {listing(odd)}")
    return plain, names


def _listed(parameters: Any) -> list[Any]:
    if isinstance(parameters, Tensor):
        return [parameters]
    if isinstance(parameters, set | dict) or not isinstance(parameters, Iterable):
        raise InputError(
            f"parameters must come in order, not as a {type(parameters).__name__}: "
            "pass model.named_parameters()"
        )
    return list(parameters)


def _build(base: BaseOptimizer, parameters: list[Any]) -> Optimizer:
    way_out = "pass a callable such as functools.partial(torch.optim.AdamW, lr=1e-5)"
    if not callable(base):
        raise InputError(f"base is a {type(base).__name__}, not a callable: {way_out}")
    optimizer = base(parameters)
    if not isinstance(optimizer, Optimizer):
        raise InputError(f"base returned a {type(optimizer).__name__}, not a torch optimizer: {way_out}")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InputError("LBFGS evaluates the loss itself and cannot be a base: use a first-order optimizer")
    return optimizer
