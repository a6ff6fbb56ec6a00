"""Summarize what was run and what came out, in a few sentences."""

from collections.abc import Sequence

from mergekit_lab.errors import say_bytes, say_duration
from mergekit_lab.reporting.names import display_name
from mergekit_lab.reporting.records import Failure, Record
from mergekit_lab.reporting.tables import Table


def describe(table: Table, records: Sequence[Record], failures: Sequence[Failure] = ()) -> str:
    """One paragraph of plain text: the axes, the best merger beside its references, what is missing."""
    failed = [f"{say_count(len(failures), 'failure')}: see the list."] if failures else []
    if not table.rows:
        return " ".join(["No evaluation was recorded.", *failed])
    tasks = f"{say_count(len(table.tasks), 'task')} ({', '.join(table.tasks)})"
    merged_with = f"merged with {_enumerate(list(map(display_name, table.mergers)))}" if table.mergers else ""
    backbones, finetunings, optimizers, seeds = (
        list(dict.fromkeys(str(getattr(record, name)) for record in records))
        for name in ("backbone", "finetuning", "optimizer", "seed")
    )
    checkpoints = list(dict.fromkeys(row.name for row in table.rows if row.kind == "checkpoint"))
    sentences = [
        f"{_enumerate(checkpoints)} were scored on {tasks}{f' and {merged_with}' if merged_with else ''}."
        if checkpoints
        else f"Experts of {tasks} on {_enumerate(backbones)}, trained with {_enumerate(finetunings)} "
        f"fine-tuning and {_enumerate(optimizers)} over {say_count(len(seeds), 'seed')}, were "
        f"{merged_with or 'not merged'}."
    ]
    merged = [row for row in table.rows if row.kind == "merged" and row.normalized.mean is not None]
    if merged:
        best = max(merged, key=lambda row: row.normalized.mean or 0.0)
        known = [
            f"{row.name} {row.average.text} %"
            for row in table.rows
            if row.group == best.group and row.kind != "merged" and row.average.mean is not None
        ]
        references = f" (in the same group: {', '.join(known)})" if known else ""
        name = best.name + (f" ({', '.join(best.group)})" if best.group else "")
        sentences.append(
            f"The best, {name}, reaches {best.normalized.text} % of its experts' accuracy "
            f"and {best.average.text} % on average{references}."
        )
    return " ".join([*sentences, *failed])


def _enumerate(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def say_count(number: int, noun: str) -> str:
    """ "1 run", "2 runs"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def say_cache(records: Sequence[Record]) -> str:
    """How many evaluations came from the store, what they had cost, and the largest memory peak."""
    reused = [record for record in records if record.reused]
    sentences = []
    if reused:
        how_many = f"{len(reused)} of {len(records)}" if len(reused) < len(records) else f"All {len(records)}"
        cost = say_duration(sum(record.wall_seconds for record in reused))
        sentences.append(f"{how_many} evaluations were found in the store; computing them had taken {cost}.")
    elif records:
        sentences.append(f"All {len(records)} evaluations were computed.")
    if peaks := [record.peak_memory_bytes for record in records if record.peak_memory_bytes]:
        sentences.append(f"The largest memory peak was {say_bytes(max(peaks))}.")
    return " ".join(sentences)
