"""Does MergOPT make the experts of a real language model merge better?

    python -m mergekit_lab.tasks.text7
    python experiments/mergopt_smollm2/study.py --out experiments/mergopt_smollm2/results.json --workers 4

SmolLM2-135M-Instruct (its 4-bit file on PyPI, dequantized), seven tasks (suite text7), 100 steps of 16 for an
expert. An arm is an optimizer with a seed: it trains seven experts and merges them. Arms are shared out to
processes, several on a GPU, in order of what matters most; what is done stands in the results, and a later call
goes on from there: of an arm that was cut it trains the experts again, from the same seed, and measures what is
missing; `earlier` of the arm says what stands from before. `arms.py` says what
an arm is.
"""

import argparse
import json
import logging
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import torch
from arms import BATCH, DECAY, LR, SEEDS, SOURCE, WITH_FISHERS, JobBench, run_job

from mergekit_lab.tasks.text import find_data_folder

TASKS = ("r8", "newsgroups", "tweets", "spam", "wordnet", "reviews", "stories")

JOBS = list(dict.fromkeys([
    ("zero_shot", 0),
    ("asam", 0), ("adamw", 0), ("mergopt", 0), ("sam", 0), ("adamw", 1), ("mergopt", 1), ("asam", 1),
    ("adamw_double", 0), ("adamw", 2), ("mergopt", 2), ("mixed", 2), ("mergopt_fit", 0), ("asam", 2),
    ("mergopt_gaussian", 2), ("sgd", 2), *[("mergopt_b5e-3", seed) for seed in SEEDS], ("sam", 1), ("sam", 2),
    *[(arm, seed) for seed in SEEDS for arm in ("mixed", "mergopt_gaussian", "sgd", "adamw_double")],
    *[("mergopt_fit", seed) for seed in SEEDS],
    *[(f"mergopt_b{b}", 0) for b in ("1e-3", "5e-5", "5e-2")],
]))  # fmt: skip
"""What is least known first. "mixed" merges experts of both kinds, which other jobs have left on disk."""
NEEDS = {"mixed": ("adamw", "mergopt"), "mergopt_fit": ("adamw",)}


def list_missing(arm: str, seed: int, options: argparse.Namespace) -> list[str]:
    """Jobs whose experts this one takes and that are not on disk."""
    wanted = [f"{a}-{seed}" for a in NEEDS.get(arm, ())]
    return [name for name in wanted if not (options.work / "experts" / f"{name}.pt").exists()]


def claim_jobs(options: argparse.Namespace) -> Iterator[tuple[str, int]]:
    """Jobs nobody has taken, the most important first, until time is up or none is left."""
    while time.time() < options.deadline:
        left = [(a, s) for a, s in options.jobs if not (options.work / f"{a}-{s}.claimed").exists()]
        ready = [(a, s) for a, s in left if not list_missing(a, s, options)]
        if not ready and not (left and is_busy(options)):
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


def is_busy(options: argparse.Namespace) -> bool:
    """Whether a job is being worked on."""
    for mark in options.work.glob("*.claimed"):
        file = mark.with_suffix(".json")
        report = json.loads(file.read_text()) if file.exists() else {}
        if not report.get("done") and "error" not in report:
            return True
    return False


def work(options: argparse.Namespace) -> None:
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    bench = JobBench(options)
    for arm, seed in claim_jobs(options):
        try:
            run_job(bench, arm, seed)
        except Exception as error:  # one arm's failure is a result too
            file = options.work / f"{arm}-{seed}.json"
            report = json.loads(file.read_text()) if file.exists() else {"job": f"{arm}-{seed}"}
            file.write_text(
                json.dumps(report | {"error": f"{type(error).__name__}: {error}"[:2000], "done": False})
            )
            print(f"{arm}-{seed}: {error}", file=sys.stderr, flush=True)


def is_finished(job: str, arm: dict[str, Any]) -> bool:
    """Whether nothing of a job is missing: some were done before more was asked of them."""
    wanted = job.rpartition("-")[0] in WITH_FISHERS
    return bool(arm.get("done")) and (not wanted or "epimer" in arm.get("mergers", {}))


def count_progress(report: dict[str, Any]) -> tuple[bool, int, int]:
    """How far a job came: what was cut does not replace what came further before."""
    merged = len(report.get("mergers", ())) + len(report.get("groups", ()))
    return bool(report.get("done")), merged, len(report.get("experts", ()))


def collect_settings(options: argparse.Namespace) -> dict[str, Any]:
    """What decides the results."""
    sizes = ("steps", "batch", "length", "train", "validation", "test", "fisher")
    record = {
        "source": Path(options.source).name,
        "lr": LR,
        "weight_decay": DECAY,
        "tasks": list(options.tasks),
    }
    return record | {n: getattr(options, n) for n in sizes}


def collect(options: argparse.Namespace, old: dict[str, Any]) -> dict[str, Any]:
    arms = dict(old.get("arms", {}))
    for file in sorted(options.work.glob("*.json")):
        report = json.loads(file.read_text())
        if count_progress(report) >= count_progress(arms.get(report["job"], {})):
            arms[report["job"]] = report
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    setup = collect_settings(options) | {
        "card": card, "gpus": options.gpus, "processes_a_gpu": options.workers,
        "date": str(date.today()), "torch": torch.__version__,
    }  # fmt: skip
    result = {"made": [*[m for m in old.get("made", []) if m != setup], setup], "arms": arms}
    partial_file = options.out.with_suffix(".partial")
    partial_file.write_text(json.dumps(result, indent=None))
    partial_file.replace(options.out)
    return result


def make_parser() -> argparse.ArgumentParser:
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
    names = [f"{arm}-{seed}" for arm, seed in JOBS]
    parser.add_argument(
        "--jobs", nargs="+", choices=names, metavar="JOB", help="such as adamw-0, in this order; default: all"
    )
    sizes = {"steps": 100, "batch": BATCH, "length": 192, "train": 4000, "validation": 100, "test": 200}
    for name, value in (sizes | {"fisher": 64}).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser


def list_jobs_left(options: argparse.Namespace) -> list[tuple[str, int]]:
    """Those of the jobs asked for that are not finished, and those whose experts another one needs again."""
    over = {name for name, arm in options.kept.items() if is_finished(name, arm)}
    known = {f"{arm}-{seed}": (arm, seed) for arm, seed in JOBS}
    wanted = [known[name] for name in options.jobs or known]
    for arm, seed in wanted:
        if f"{arm}-{seed}" not in over:
            over -= set(list_missing(arm, seed, options))  # whose experts are gone is trained again
    return [(a, s) for a, s in wanted if f"{a}-{s}" not in over]


def start_processes(options: argparse.Namespace) -> list[subprocess.Popen[bytes]]:
    """The processes, each of which sees one GPU; what they are to do stands in a file."""
    plan = options.work / "plan"
    plan.write_text(json.dumps({n: str(v) if isinstance(v, Path) else v for n, v in vars(options).items()}))
    processes = []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(options.gpus)))
    for slot in range(max(1, options.gpus) * options.workers):
        environment = {"CUDA_VISIBLE_DEVICES": visible.split(",")[slot % options.gpus]} if options.gpus else {}
        command = [sys.executable, __file__, "--out", str(options.out), "--worker", str(plan)]
        processes.append(subprocess.Popen(command, env={**os.environ, **environment}))
    return processes


def read_plan(plan: dict[str, Any]) -> argparse.Namespace:
    """The options of the call that started this process."""
    return argparse.Namespace(**{n: Path(v) if n in ("out", "work", "data") else v for n, v in plan.items()})


def main() -> None:
    parser = make_parser()
    options = parser.parse_args()
    if options.worker:
        work(read_plan(json.loads(Path(options.worker).read_text())))
        return
    options.data = options.data or find_data_folder("text7")
    options.work.mkdir(parents=True, exist_ok=True)
    options.gpus = torch.cuda.device_count()
    earlier = options.earlier or options.out
    old = json.loads(earlier.read_text()) if earlier.exists() else {}
    for earlier_setup in old.get("made", []):
        other = [n for n, v in collect_settings(options).items() if earlier_setup.get(n) != v]
        if other:
            parser.error(f"{earlier} is of another {', '.join(other)}: name another file with --out")
    options.kept = old.get("arms", {})
    options.jobs = list_jobs_left(options)
    for mark in options.work.glob("*.claimed"):
        mark.rmdir()
    options.deadline = time.time() + options.seconds
    processes = start_processes(options)
    while any(p.poll() is None for p in processes):
        time.sleep(2)
        collect(options, old)
        if time.time() > options.deadline + 5:
            for p in processes:
                p.kill()
    arms = collect(options, old)["arms"]
    done = sum(bool(a.get("done")) for a in arms.values())
    print(f"{done} of {len(JOBS)} jobs are done: {options.out}")


if __name__ == "__main__":
    main()
