"""Stage curvature: make the experts' Fishers and Grams, and the side inputs that belong to one merge.

Artifacts declared here: `fishers`, `grams`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mergekit_lab.batches import Batch, to_device
from mergekit_lab.checkpoints import open_checkpoint, write_tensors
from mergekit_lab.curvature import chained_grams, diagonal_fisher, first_moment, input_grams
from mergekit_lab.memory import fit_memory
from mergekit_lab.merging import Localization, LocalizeStitch, Method, RegMeanPlusPlus, learn_masks
from mergekit_lab.runs.finetune import declare_expert
from mergekit_lab.runs.mergers import CHAINED, MASK
from mergekit_lab.runs.nodes import Node, declare
from mergekit_lab.runs.run import Run, load_state, say_seconds
from mergekit_lab.store import Workspace

log = logging.getLogger(__name__)


@declare
def declare_side_input(run: Run, kind: str, task: str) -> Node:
    """An expert's Fisher ("fisher") or Grams ("gram"), in the file `<kind>.safetensors`."""
    source = declare_expert(run, task)
    return Node(
        f"{kind}s", f"the {kind} of {task}", "curvature", task,
        decide=lambda: {
            "expert": source.key, "curvature": _describe_curvature(run, kind), "seed": run.seed
        },
        make=lambda workspace: _make_side(run, kind, task, workspace),
        needs=(source,),
        say=lambda side: f"{kind} of {task}: {say_seconds(side)}",
        list_points=lambda side: [
            {f"{kind}_trace": side.info["trace"], f"{kind}_seconds": side.info["wall_seconds"]}
        ],
    )  # fmt: skip


def _describe_curvature(run: Run, kind: str) -> dict[str, Any]:
    read = ("samples", "fraction", "batch", *(["sampled"] if kind == "fisher" else []))
    settings = run.plain["curvature"]
    content = {name: settings[name] for name in read if settings[name] is not None}
    if kind == "fisher" and settings["estimate"] != "per_sample":
        content |= {"estimate": settings["estimate"], "batch_size": run.training.batch_size}
    if kind == MASK:
        content["batch_size"] = run.training.batch_size
    if kind == "gram":
        content |= {"rows": "unpadded", "norms": "squares"}
    return content


def list_kinds(method: Method) -> list[str]:
    """The kinds of side inputs that a method reads of single experts, without those made during a merge."""
    return [kind for kind in method.side_inputs if kind not in (CHAINED, MASK)]


def list_curvature_nodes(run: Run) -> list[Node]:
    """What the stage makes: the side inputs that the run's mergers read, and those of `curvature.kind`."""
    kinds = [kind for merger in run.mergers.values() for kind in list_kinds(merger.method)]
    kinds += filter(None, [run.cfg.curvature.kind])
    return [declare_side_input(run, kind, task) for kind in dict.fromkeys(kinds) for task in run.experts]


def stage_curvature(run: Run) -> None:
    """Make the side inputs of every expert that the run's mergers read."""
    nodes = list_curvature_nodes(run)
    if not nodes:
        log.info("curvature: no merger of this run needs any")
    run.make(stage_curvature, nodes)


def _make_side(run: Run, kind: str, task: str, workspace: Workspace) -> Mapping[str, Any]:
    run.load_weights(load_state(run.need(declare_expert(run, task))))
    whole = run.make_objective(task).with_head(run.model)
    inside = find_prefix(whole, run.model)
    count = _count_samples(run, task)
    values = {name.removeprefix(inside): v for name, v in _compute(run, kind, task, whole, count).items()}
    trace = sum(float((v.diagonal() if kind == "gram" and v.dim() == 2 else v).sum()) for v in values.values())
    tensors = _fill_all_tensors(run, values) if kind == "fisher" else values
    write_tensors(workspace.out / f"{kind}.safetensors", tensors, sync=False)
    return {"samples": count, "trace": trace}


def _count_samples(run: Run, task: str) -> int:
    return run.curvature.count(run.tasks[task].count("train"))


def _compute(run: Run, kind: str, task: str, whole: nn.Module, count: int) -> dict[str, Tensor]:
    """A Fisher or Grams of the first `count` samples. If memory runs out, the chunks are halved.

    Raises:
        InputError: one sample at a time does not fit.
    """
    causal = run.make_objective(task).causal
    by_moment = kind == "fisher" and run.curvature.estimate == "first_moment"

    def compute(chunk: int) -> dict[str, Tensor]:
        batches = list_batches(run, kind, task, count, run.training.batch_size if by_moment else chunk)
        if kind == "gram":
            return input_grams(whole, batches)
        if by_moment:
            moments = first_moment(whole, batches, causal=causal, chunk=chunk)
            return {name: moment.square() for name, moment in moments.items()}
        sampled = run.curvature.sampled
        return diagonal_fisher(whole, batches, causal=causal, sampled=sampled, seed=run.seed, chunk=chunk)

    values, _ = fit_memory(
        compute,
        run.curvature.chunk,
        what=f"the {kind} of {task}",
        setting="curvature.chunk",
        way_out="take a merger that needs none, or set device=cpu",
    )
    return values


def describe_own_inputs(run: Run, method: Method) -> dict[str, Any]:
    """What decides the side inputs that are made during a merge, besides the experts and the method."""
    kinds = {CHAINED: "gram", MASK: "mask"}
    return {
        kind: {"curvature": _describe_curvature(run, kinds[kind]), "seed": run.seed}
        for kind in method.side_inputs
        if kind in kinds
    }


def make_own_sides(run: Run, method: Method, experts: Mapping[str, Path]) -> dict[str, dict[str, Any]]:
    """Make the side inputs that belong to this merge of these experts, by kind and task."""
    if isinstance(method, RegMeanPlusPlus):
        return {CHAINED: _chain_grams(run, method, experts)}
    if isinstance(method, LocalizeStitch) and method.learn is not None:
        return {MASK: {task: _train_mask(run, method.learn, task, path) for task, path in experts.items()}}
    return {}


def _train_mask(run: Run, how: Localization, task: str, expert: Path) -> dict[str, Tensor]:
    """Which entries of an expert its task needs, learned on a Fisher's samples in training's batches."""
    objective = run.make_objective(task)
    whole = objective.with_head(run.model)
    inside, count = find_prefix(whole, run.model), _count_samples(run, task)
    names = _map_to_base(run.model)

    def compute_gradient(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        run.model.load_state_dict(state)
        total: dict[str, Tensor] = {}
        for batch in list_batches(run, MASK, task, count, run.training.batch_size):
            moments = first_moment(whole, [batch], causal=objective.causal, beta=0.0, chunk=run.curvature.chunk)
            for own, name in names.items():
                if (moment := moments.get(inside + own)) is not None:
                    total[name] = total[name] + moment if name in total else moment
        return total

    return learn_masks(run.base_state, expert, compute_gradient, how, run.device)


def _chain_grams(
    run: Run, method: RegMeanPlusPlus, experts: Mapping[str, Path]
) -> dict[str, dict[str, Tensor]]:
    """The Grams of RegMean++ for these experts of the run, by task."""
    opened = {task: open_checkpoint(path, task) for task, path in experts.items()}
    wholes = {task: run.make_objective(task).with_head(run.model) for task in experts}

    def compute(chunk: int) -> dict[str, dict[str, Tensor]]:
        def make_batches(task: str) -> Iterator[Batch]:
            return list_batches(run, "gram", task, _count_samples(run, task), chunk)

        run.model.load_state_dict(run.base_state)
        return chained_grams(run.model, opened, make_batches, method, wholes)

    grams, _ = fit_memory(
        compute, run.curvature.chunk, what="the Grams of RegMean++", setting="curvature.chunk",
        way_out="take RegMean, or set device=cpu",
    )  # fmt: skip
    return grams


def find_prefix(whole: nn.Module, model: nn.Module) -> str:
    """The prefix of `model`'s parameter names in `whole`, which contains it."""
    name = next(name for name, module in whole.named_modules() if module is model)
    return f"{name}." if name else ""


def list_batches(run: Run, kind: str, task: str, count: int, size: int) -> Iterator[Batch]:
    """The first `count` training samples of the run's shuffle, on its device.

    For Grams, texts come one by one, so that none is padded: every row of a batch counts in a Gram.
    """
    objective = run.make_objective(task)
    order = torch.randperm(run.tasks[task].count("train"), generator=torch.Generator().manual_seed(run.seed))
    if kind == "gram" and isinstance(objective.make_batch("train", order[:1]), Mapping):
        size = 1
    parts = order[:count].split(size)
    for part in run.track(parts, f"{kind} of {task}"):
        yield to_device(objective.make_batch("train", part), run.device)


def _map_to_base(model: nn.Module) -> dict[str, str]:
    """The base's name of each of a model's parameters."""
    names = {parameter: name for name, parameter in model.state_dict(keep_vars=True).items()}
    return {own: names[parameter] for own, parameter in model.named_parameters()}


def _fill_all_tensors(run: Run, fisher: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A Fisher under the base's names, with zeros for tensors that were not trained."""
    named = {name: fisher[own] for own, name in _map_to_base(run.model).items() if own in fisher}
    still = {
        n: torch.zeros_like(t) for n, t in run.base_state.items() if t.is_floating_point() and n not in named
    }
    return named | still
