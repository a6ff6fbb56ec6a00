"""What was run and what came out, in a few sentences."""

from collections.abc import Sequence

from mergekit_lab.reporting.records import Failure, Record
from mergekit_lab.reporting.tables import Row, Table


def describe(table: Table, records: Sequence[Record], failures: Sequence[Failure] = ()) -> str:
    """One paragraph of plain text: the axes, the best merger beside its references, what is missing."""
    if not table.rows:
        return f"No evaluation was recorded. {_failed(failures)}".strip()
    tasks = f"{counted(len(table.tasks), 'task')} ({', '.join(table.tasks)})"
    sentences = [
        f"Experts of {tasks} on {_values(records, 'backbone')}, trained with "
        f"{_values(records, 'finetuning')} fine-tuning and {_values(records, 'optimizer')} "
        f"over {counted(_distinct(records, 'seed'), 'seed')}, "
        + (f"were merged with {_listed(table.mergers)}." if table.mergers else "were not merged.")
    ]
    merged = [row for row in table.rows if row.kind == "merged" and row.normalized.mean is not None]
    if merged:
        best = max(merged, key=lambda row: row.normalized.mean or 0.0)
        name = best.label + (f" ({', '.join(best.group)})" if best.group else "")
        sentences.append(
            f"The best, {name}, reaches {best.normalized.text} % of its experts' accuracy "
            f"and {best.average.text} % on average{_references(table, best)}."
        )
    if failures:
        sentences.append(_failed(failures))
    return " ".join(sentences)


def _references(table: Table, best: Row) -> str:
    known = [
        f"{row.label} {row.average.text} %"
        for row in table.rows
        if row.group == best.group and row.kind != "merged" and row.average.mean is not None
    ]
    return f" (in the same group: {', '.join(known)})" if known else ""


def _failed(failures: Sequence[Failure]) -> str:
    return f"{counted(len(failures), 'failure')}: see the list." if failures else ""


def _values(records: Sequence[Record], field: str) -> str:
    return _listed(list(dict.fromkeys(str(getattr(record, field)) for record in records)))


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _distinct(records: Sequence[Record], field: str) -> int:
    return len({getattr(record, field) for record in records})


def counted(number: int, noun: str) -> str:
    """ "1 run", "2 runs"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
