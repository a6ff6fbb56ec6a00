"""Find what looks like a mistake in results: a wrong expert, one file for two tasks, an impossible share."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from mergekit_lab.reporting.names import display_name
from mergekit_lab.reporting.records import Record, deduplicate
from mergekit_lab.reporting.tables import AXES, to_percent

HIGHEST_SHARE = 1.5
"""Of an expert's value; what keeps more has a weak expert beside it."""


def find_warnings(records: Iterable[Record]) -> list[str]:
    """One sentence for each thing that looks wrong, with the way out; empty where all is as expected."""
    kept = deduplicate(records)
    vary = [axis for axis in (*AXES, "seed") if len({getattr(record, axis) for record in kept}) > 1]
    weak = [_say_weak(record, _name_group(record, vary)) for record in kept if record.kind == "expert"]
    return list(dict.fromkeys([*filter(None, weak), *_say_shared(kept, vary), *_say_high(kept, vary)]))


def _name_group(record: Record, vary: Sequence[str]) -> str:
    values = [f"{axis} {getattr(record, axis)}" for axis in vary]
    return f" ({', '.join(values)})" if values else ""


def _say_weak(record: Record, group: str) -> str | None:
    if record.zero_shot_value is None or record.value >= record.zero_shot_value:
        return None
    return (
        f"The expert of {record.task}{group} is worse than zero-shot on its own task: "
        f"{to_percent(record.value)} and {to_percent(record.zero_shot_value)} %. Is it this task's expert, and "
        "are the labels in its order?"
    )


def _say_high(records: Sequence[Record], vary: Sequence[str]) -> list[str]:
    high: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for record in records:
        if record.kind != "expert" and (record.normalized or 0.0) > HIGHEST_SHARE:
            high[record.task, _name_group(record, vary)].append(record)
    return [
        f"On {task}{group} {', '.join(display_name(r.label) for r in of_task)} reach up to "
        f"{100 * max(r.normalized or 0.0 for r in of_task):.0f} % of the expert's value, which is "
        f"{to_percent(of_task[0].expert_value or 0.0)} %: the expert is weak, or not this task's, and "
        "normalized values mean little."
        for (task, group), of_task in high.items()
    ]


def _say_shared(records: Sequence[Record], vary: Sequence[str]) -> list[str]:
    tasks: dict[tuple[str, str], dict[str, None]] = defaultdict(dict)
    for record in records:
        if record.kind == "expert":
            tasks[_name_group(record, vary), record.weights or record.model_key][record.task] = None
    return [
        f"The experts of {' and '.join(of_file)}{group} are the same file: is each the expert of its own task?"
        for (group, _), of_file in tasks.items()
        if len(of_file) > 1
    ]
