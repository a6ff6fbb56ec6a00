"""When does how you train change how you merge? The cells of the study, spread over cards. See README.md.

python experiments/when_it_helps/study.py --store STORE --out results.jsonl --per-card 7 --minutes 8.5

Results are appended to `--out` as lines of JSON, as soon as they are there; cells that it has are not run
again. A cell that fails leaves a line with its error, and is tried again at the next call.
"""

import argparse
import json
import multiprocessing
import os
import signal
import sys
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from cells import WORLDS, StudyCell, list_cells

KEY = ("world", "axis", "value", "arm", "seed")
"""Of a cell and its lines."""


def work(link: Connection, store: Path, more: dict[str, list[str]], small: bool) -> None:
    """In a process of its own: one cell after the other, as they come."""
    import logging
    import warnings

    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    logging.disable(logging.INFO)
    warnings.filterwarnings("ignore")
    from measuring import run_cell, shorten_error

    link.send(None)
    while True:
        try:
            cell: StudyCell = link.recv()
        except EOFError:  # the study was killed
            return
        try:
            link.send(run_cell(cell, store, more.get(cell.world, []), small))
        except Exception as error:
            link.send(shorten_error(error))


class CardWorker:
    """A process, the cell it is at, and since when."""

    def __init__(self, card: str, *arguments: Any) -> None:
        self.card = card
        self._arguments = arguments
        self.cell: StudyCell | None = None
        self.begun = time.monotonic()
        os.environ["CUDA_VISIBLE_DEVICES"] = "" if card == "cpu" else card
        context = multiprocessing.get_context("spawn")
        self.link, other = context.Pipe()
        self.process = context.Process(target=work, args=(other, *arguments))
        self.process.start()
        other.close()

    def give(self, cell: StudyCell) -> None:
        self.cell, self.begun = cell, time.monotonic()
        self.link.send(cell)

    def renew(self) -> "CardWorker":
        """Another one in place of one that died."""
        return CardWorker(self.card, *self._arguments)


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a result; one that was cut is left out."""
    lines = []
    for text in path.read_text().splitlines() if path.exists() else []:
        try:
            lines.append(json.loads(text))
        except ValueError:
            continue
    return lines


def name_line(line: dict[str, Any]) -> str:
    """A line's cell."""
    name = f"{line['world']}/{line['axis']}/{line['value']}/{line['arm']}/{line['seed']}"
    return f"{name}/measures" if line.get("only_measures") else name


def choose(left: list[StudyCell], under_way: set[str]) -> StudyCell:
    """The first cell that would not wait for another that is under way, else the first; it is taken out."""
    index = next((i for i, cell in enumerate(left) if cell.awaits not in under_way), 0)
    return left.pop(index)


def run(left: list[StudyCell], workers: list[CardWorker], out: Path, ends: tuple[float, float]) -> None:
    """Give cells to workers until there are none, no more are to be begun, or all must stop."""
    begun, (no_more, stop) = time.monotonic(), ends
    ready: set[Connection] = set()
    done = failed = 0
    with out.open("a+") as stream:
        stream.seek(0)
        if not (stream.read() or "\n").endswith("\n"):  # of a process that was killed while it wrote
            stream.write("\n")
        while time.monotonic() < stop:
            for worker in workers:
                if worker.link in ready and left and time.monotonic() < no_more:
                    ready.remove(worker.link)
                    under_way = {w.cell.name for w in workers if w.cell}
                    worker.give(choose(left, under_way))
            busy = [w.link for w in workers if w.cell or w.link not in ready]
            if not any(w.cell for w in workers) and (not left or time.monotonic() >= no_more):
                return
            for link in wait(busy, timeout=1):
                worker = next(w for w in workers if w.link is link)
                cell, took = worker.cell, time.monotonic() - worker.begun
                worker.cell = None
                try:
                    answer = worker.link.recv()
                    ready.add(worker.link)
                except (EOFError, ConnectionError):
                    answer = f"the process died, exit {worker.process.exitcode}"
                    if cell is None:
                        raise SystemExit("a process died before its first cell") from None
                    workers[workers.index(worker)] = worker.renew()
                if cell is None:
                    continue
                if isinstance(answer, str):
                    failed += 1
                    if "CUDA" in answer or "OutOfMemory" in answer:  # a process may be of no use after that
                        worker.process.kill()
                        ready.discard(worker.link)
                        workers[workers.index(worker)] = worker.renew()
                    parts = {k: getattr(cell, k) for k in (*KEY, "only_measures")}
                    stream.write(json.dumps({**parts, "error": answer}) + "\n")
                    note = answer
                else:
                    done += 1
                    stream.write("".join(json.dumps(line) + "\n" for line in answer))
                    note = " ".join(f"{k} {v:.0f}" for k, v in answer[0]["seconds"].items())
                stream.flush()
                now = time.monotonic() - begun
                print(f"{now:.0f} s: {cell.name}: {took:.1f} s ({note}); {done} done, {failed} failed, "
                      f"{len(left)} left", flush=True)  # fmt: skip
    names = ", ".join(w.cell.name for w in workers if w.cell)
    print(f"stopped, and left for another time: {names}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, required=True, help="on a local disk: experts and Fishers")
    parser.add_argument("--out", type=Path, required=True, help="lines of JSON, appended to")
    parser.add_argument("--cards", nargs="+", help="numbers of GPUs, or cpu; all GPUs by default")
    parser.add_argument("--per-card", type=int, default=7, help="processes a card, or on the CPU")
    parser.add_argument("--minutes", type=float, default=1e6, help="no cell is begun after so many")
    parser.add_argument("--stop", type=float, help="cells under way are killed after so many; --minutes + 1")
    parser.add_argument("--worlds", nargs="+", choices=tuple(WORLDS), default=list(WORLDS))
    parser.add_argument("--bases", type=Path, help="folder of step_N.safetensors, as pretrain.py --keep leaves")
    parser.add_argument(
        "--only", nargs="+", help="cells whose world/axis/value/arm/seed has one of these in it"
    )
    parser.add_argument("--limit", type=int, help="cells at most")
    parser.add_argument("--glyphs", nargs="*", default=[], help="further overrides of that world")
    parser.add_argument("--minilm", nargs="*", default=[], help="further overrides of that world")
    parser.add_argument("--small", action="store_true", help="a dry run: few steps, little data")
    parser.add_argument("--list", action="store_true", help="print the cells that are left, and end")
    options = parser.parse_args()
    began = time.monotonic()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    ready = {name_line(line) for line in read(options.out) if "error" not in line}
    left = [cell for cell in list_cells(options.bases, options.worlds) if cell.name not in ready]
    if options.only:
        left = [cell for cell in left if any(word in cell.name for word in options.only)]
    left = left[: options.limit]
    if options.list:
        print("\n".join(cell.name for cell in left))
    print(f"{len(left)} cells, {len(ready)} lines are there", flush=True)
    if options.list or not left:
        return
    cards = options.cards
    if cards is None:
        import torch

        cards = list(map(str, range(torch.cuda.device_count()))) or ["cpu"]
    options.store.mkdir(parents=True, exist_ok=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    more = {"glyphs": list(options.glyphs), "minilm": list(options.minilm)}
    if cards == ["cpu"]:
        more = {world: [*lines, "device=cpu", "trainer.accelerator=cpu"] for world, lines in more.items()}
    slots = (cards * options.per_card)[: len(left)]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    workers = [CardWorker(card, options.store.resolve(), more, options.small) for card in slots]
    stop = options.stop if options.stop is not None else options.minutes + 1
    try:
        run(left, workers, options.out, (began + 60 * options.minutes, began + 60 * stop))
    finally:
        for worker in workers:
            worker.process.kill()


if __name__ == "__main__":
    main()
