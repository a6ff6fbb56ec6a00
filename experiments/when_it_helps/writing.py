"""Numbers and tables of the study, as Markdown has them."""

import statistics
from collections.abc import Iterable, Sequence


def show_spread(values: Sequence[float], form: str = ".1f") -> str:
    """Mean ± standard deviation."""
    if not values:
        return "–"
    text = f"{statistics.mean(values):{form}}"
    return text + (f" ± {statistics.stdev(values):{form.lstrip('+')}}" if len(values) > 1 else "")


def write_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
