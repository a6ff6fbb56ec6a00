"""Change one file of what runs leave, then use it: refused, repaired, other than before, crashed or hung?

    python experiments/faults/mutate.py --tries 300 --out experiments/faults/mutations.json

A tiny run is made once: a store, the run's folder, a training that was killed (checkpoint and lock stay), an
export, and models to merge. Every try copies one of these, changes one file or folder of it as the seed says,
and does with it what its users do. All runs are forks, with a time limit, of a process that has imported
everything; figures are written as empty files. Equal seeds try equal things.

`same` is the result of the undisturbed run, bit for bit. `same, named` is that, and the fault was named on
the way: by `store.action=verify`, or by a refusal after which it was enough to remove what verify named.
`refused` is an error that says what is wrong. `other` is another result without a word, where nothing says
what was there: a flipped bit in somebody else's model, or in a run's records. `WRONG`, `crash` and `hang`
are failures.
"""

import argparse
import json
import os
import random
import shutil
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from common import describe_call, finish, hash_weights, read_rows, run_once, start
from composing import TINY
from damages import mutate

from mergekit_lab.checkpoints import ShardedWriter, hash_file, open_checkpoint, write_tensors
from mergekit_lab.errors import InputError
from mergekit_lab.owners import identify_process
from mergekit_lab.store import Store, make_key
from mergekit_lab.store.store import Workspace
from mergekit_lab.store.upkeep import find_damages, find_half_made, find_unreadable, measure_size, remove

RUN = [*TINY, "merger=task_arithmetic", "joint=false", "training.steps=12", "training.validations=4"]
HASHED = ("small", "store", "export", "cut")
"""What nobody may change without a word: manifests hold hashes."""


class Trial:
    """One copy of what was prepared, and what became of the work done with it."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self.folder = folder
        self.seconds = seconds
        self.message = ""

    def do(self, work: Callable[[], None]) -> str:
        """`done`, `refused`, `crash` or `hang`."""
        note = self.folder / "note"
        note.unlink(missing_ok=True)

        def run_guarded() -> None:
            try:
                work()
            except InputError as error:
                note.write_text(json.dumps(["refused", str(error)]))
            except BaseException:
                note.write_text(json.dumps(["crash", traceback.format_exc()]))

        code = finish(start(run_guarded, self.folder / "log"), self.seconds)
        if code is None:
            return "hang"
        outcome, self.message = json.loads(note.read_text()) if note.exists() else ("done", "")
        return "crash" if code else outcome

    def run(self, *overrides: str, run: str = "again") -> str:
        return self.do(lambda: run_once(self.folder / run, self.folder / "store", list(overrides)))

    def verify(self, *more: str) -> str:
        return self.run("stage=store", "store.action=verify", *more, run="verify")


def use_store(trial: Trial, wanted: dict) -> str:
    verified = trial.verify()
    if verified in ("crash", "hang"):
        return verified
    ended = trial.run(*RUN)
    if ended == "refused":
        if (cleared := trial.verify("store.confirm=true")) != "done":
            return cleared if cleared in ("crash", "hang") else ended
        verified, ended = "refused", trial.run(*RUN)
    if ended != "done":
        return ended
    weights = hash_weights(trial.folder / "store")  # what nobody wanted again is neither read nor made again
    sound = weights.items() <= wanted["weights"].items() or verified == "refused"
    same = sound and read_rows(trial.folder / "again") == wanted["rows"]
    return "WRONG" if not same else "same, named" if verified == "refused" else "same"


def use_cut(trial: Trial, wanted: dict) -> str:
    return use_store(trial, wanted)


def use_run(trial: Trial, wanted: dict) -> str:
    compared = trial.run(*TINY, "stage=report", f"runs=[{trial.folder / 'run'}]", run="page")
    if compared in ("crash", "hang"):
        return compared
    again = trial.run(*RUN, run="run")
    if again != "done":
        return again
    if read_rows(trial.folder / "run") != wanted["rows"]:
        return "WRONG"
    if compared == "refused":
        return "same, named"
    return "same" if read_rows(trial.folder / "page") == wanted["page"] else "other"


def use_export(trial: Trial, wanted: dict) -> str:
    shutil.rmtree(trial.folder / "store")
    ended = trial.run("stage=store", "store.action=import", f"store.path={trial.folder}/export", run="import")
    if ended != "done":
        return ended
    return "same" if list(hash_weights(trial.folder / "store").values()) == wanted["export"] else "WRONG"


def use_models(trial: Trial, wanted: dict) -> str:
    models, out = trial.folder / "models", trial.folder / "merged"
    ended = trial.do(lambda: run_once(trial.folder / "merge", None, merge_arguments(models, out)))
    if ended != "done":
        return ended
    return "same" if hash_file(out / "model.safetensors") == wanted["merged"] else "other"


def merge_arguments(models: Path, out: Path) -> list[str]:
    experts = ",".join(str(models / name) for name in ("a", "b"))
    return ["+experiment=merge_checkpoints", "progress=false", "device=cpu", f"base={models / 'base'}",
            f"experts=[{experts}]", "merger=average", f"out={out}"]  # fmt: skip


SMALL = [{"task": "small", "seed": seed} for seed in range(3)]


def make_small(seed: int) -> Callable[[Workspace], dict]:
    def make(workspace: Workspace) -> dict:
        with suppress(OSError, ValueError):  # as training, which begins again
            json.loads((workspace.resume / "last.ckpt").read_bytes())
        write_tensors(workspace.out / "model.safetensors", {"w": torch.full((8, 8), float(seed))})
        return {"value": seed / 8}

    return make


def prepare_small(root: Path) -> None:
    """A store as runs leave it, one of them killed, of a few tensors: a try takes a blink of computing."""
    for kind in ("experts", "evaluations"):
        for content in SMALL[:2]:
            Store(root).obtain(kind, content, make_small(content["seed"]))
    cut = f"experts/{make_key(SMALL[2])}"
    (root / "work" / cut / "resume").mkdir(parents=True)
    (root / "work" / cut / "resume/last.ckpt").write_text('{"step": 3}')
    (root / "locks" / cut.replace("/", "-")).mkdir()
    owner = identify_process() | {"started": "1"}
    (root / "locks" / cut.replace("/", "-") / "abc").write_text(json.dumps(owner))


def use_small(trial: Trial, wanted: dict) -> str:
    """Through the store's own functions: what lists, verifies, prunes and finds."""
    store, results = Store(trial.folder / "small", stale_after=0.5), trial.folder / "results"

    def look(removes: bool) -> None:
        everything = [*store.list_artifacts(), *find_unreadable(store), *find_half_made(store)]
        sizes = [measure_size(artifact) for artifact in everything]
        wrong = find_damages([*store.list_artifacts(), *find_unreadable(store)])
        assert len(sizes) == len(everything)
        for damage in wrong if removes else ():
            remove(store, damage.folder)
        if wrong and not removes:
            raise InputError("; ".join(damage.message for damage in wrong))

    def use() -> None:
        values = []
        for content in SMALL:
            artifact = store.obtain("experts", content, make_small(content["seed"]))
            evaluation = store.obtain("evaluations", content, make_small(content["seed"]))
            values.append((float(open_checkpoint(artifact.find_file("model.safetensors"))["w"].mean()),
                           evaluation.info["value"]))  # fmt: skip
        results.write_text(json.dumps(values))

    verified = trial.do(lambda: look(removes=False))
    if verified in ("crash", "hang"):
        return verified
    ended = trial.do(use)
    if ended == "refused":
        cleared = trial.do(lambda: look(removes=True))
        if cleared != "done":
            return cleared
        verified, ended = "refused", trial.do(use)
    if ended != "done":
        return ended
    if json.loads(results.read_text()) != [[content["seed"], content["seed"] / 8] for content in SMALL]:
        return "WRONG"
    return "same, named" if verified == "refused" else "same"


USES = {
    "small": use_small,
    "store": use_store,
    "cut": use_cut,
    "run": use_run,
    "export": use_export,
    "models": use_models,
}


def must(outcome: str, trial: Trial) -> None:
    if outcome != "done":
        raise RuntimeError(f"{outcome}: {trial.message} {(trial.folder / 'log').read_text()[-2000:]}")


def prepare(folder: Path, seconds: float) -> dict:
    """What tries copy, and what they are compared with."""
    folder.mkdir(parents=True, exist_ok=True)
    trial = Trial(folder, seconds)
    must(trial.run(*RUN, run="run"), trial)
    wanted = {"rows": read_rows(folder / "run"), "weights": hash_weights(folder / "store")}
    must(trial.run(*TINY, "stage=report", f"runs=[{folder / 'run'}]", run="page"), trial)
    wanted["page"] = read_rows(folder / "page")
    expert = sorted((folder / "store/experts").iterdir())[0]
    export = ["stage=store", "store.action=export", f"store.key={expert.name}", f"store.path={folder}/export"]
    must(trial.run(*export), trial)
    wanted["export"] = [hash_file(expert / "model.safetensors")]
    prepare_models(folder / "models", sorted((folder / "store/experts").iterdir()))
    merge = merge_arguments(folder / "models", folder / "merged")
    must(trial.do(lambda: run_once(folder / "merge", None, merge)), trial)
    wanted["merged"] = hash_file(folder / "merged/model.safetensors")
    cut = start(lambda: run_once(folder / "cut-run", folder / "cut", RUN), folder / "log")
    while not any((folder / "cut").glob("work/*/*/resume/last.ckpt")):
        time.sleep(0.01)
    os.kill(cut, 9)
    os.waitpid(cut, 0)
    return wanted


def prepare_models(folder: Path, experts: list[Path]) -> None:
    """Two models in one file and a base in shards with an index, each with a configuration."""
    states = [dict(open_checkpoint(expert / "model.safetensors")) for expert in experts[:2]]
    for name, state in zip("ab", states, strict=True):
        (folder / name).mkdir(parents=True)
        write_tensors(folder / name / "model.safetensors", state)
    base = open_checkpoint(folder / "a")
    (folder / "base").mkdir()
    (folder / "base/config.json").write_text(json.dumps({"hidden_size": 64}, indent=1))
    with ShardedWriter(folder / "base", base.specs, max_bytes=1_500_000) as writer:
        for name in base:
            writer.write(name, base[name])
    for name in ("base", "a", "b"):
        (folder / name / "config.json").write_text(
            json.dumps({"model_type": "glyph", "hidden_size": 64}, indent=1)
        )


COPIED = {
    "small": (),
    "store": ("store",),
    "cut": (),
    "run": ("store", "run"),
    "export": ("store", "export"),
    "models": ("models",),
}


def attempt(target: str, prepared: Path, folder: Path, wanted: dict, seed: int, seconds: float) -> dict:
    folder.mkdir()
    for name in COPIED[target]:
        shutil.copytree(prepared / name, folder / name, symlinks=True)
    if target == "small":
        prepare_small(folder / "small")
    if target == "cut":
        shutil.copytree(prepared / "cut", folder / "store", symlinks=True)
    trial, begun = Trial(folder, seconds), time.monotonic()
    changed = folder / ("store" if target == "cut" else target)
    mutation, path = mutate(changed, random.Random(seed))
    outcome = USES[target](trial, wanted)
    if outcome == "other" and target in HASHED:
        outcome = "WRONG"
    return {"seed": seed, "target": target, "mutation": mutation, "path": path, "outcome": outcome,
            "message": trial.message[-300:], "seconds": round(time.monotonic() - begun, 1)}  # fmt: skip


def print_table(rows: list[dict]) -> None:
    outcomes = ["same", "same, named", "refused", "other", "WRONG", "crash", "hang"]
    print(f"| what | mutation | {' | '.join(outcomes)} |\n|---|---|{'---|' * len(outcomes)}")
    groups = defaultdict(Counter)
    for row in rows:
        groups[row["target"], row["mutation"]][row["outcome"]] += 1
    for (target, mutation), counts in sorted(groups.items()):
        print(f"| {target} | {mutation} | {' | '.join(str(counts[o] or '') for o in outcomes)} |")


def read_wanted(prepared: Path, seconds: float) -> dict:
    file = prepared / "wanted.json"
    if not file.exists():
        file.write_text(json.dumps(prepare(prepared, 10 * seconds)))
    wanted = json.loads(file.read_text())
    return wanted | {name: [tuple(row) for row in wanted[name]] for name in ("rows", "page")}


def shorten_runs() -> None:
    """What takes most of a tiny run's time is importing and drawing, and neither is tried here."""
    import vl_convert

    import mergekit_lab.commands.merge_checkpoints  # noqa: F401
    from mergekit_lab.runs import curvature, entry, evaluate, finetune, merge, report, store  # noqa: F401

    vl_convert.vegalite_to_svg = lambda *_, **__: (
        "<svg xmlns='http://www.w3.org/2000/svg' width='1' height='1'/>"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tries", type=int, default=300)
    parser.add_argument("--numbers", nargs="+", type=int, help="repeat these tries alone")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--targets", nargs="+", choices=list(USES), default=list(USES))
    parser.add_argument("--seconds", type=float, default=60, help="of computing or waiting: a hang")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/mutate"))
    parser.add_argument("--prepared", type=Path, help="of an earlier call, to begin at once")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    shorten_runs()
    shutil.rmtree(options.folder, ignore_errors=True)
    options.folder.mkdir(parents=True)
    prepared = options.prepared or options.folder / "prepared"
    wanted = {} if options.targets == ["small"] else read_wanted(prepared, options.seconds)
    rows: list[dict] = []
    for number in options.numbers or range(options.tries):
        target = options.targets[number % len(options.targets)]
        folder = options.folder / str(number)
        row = attempt(target, prepared, folder, wanted, options.seed * 100_000 + number, options.seconds)
        print(*row.values(), sep=" | ", flush=True)
        rows.append(row)
        lines = ",\n".join(json.dumps(row) for row in rows)
        options.out.write_text(f'{json.dumps(describe_call())[:-1]}, "rows": [\n{lines}\n]}}\n')
        if row["outcome"] not in ("WRONG", "crash", "hang"):
            shutil.rmtree(folder, ignore_errors=True)
    print_table(rows)


if __name__ == "__main__":
    main()
