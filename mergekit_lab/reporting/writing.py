"""Tables as text: Markdown, CSV, LaTeX, and a terminal. Each writes every kind of table."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mergekit_lab.reporting.cross_table import CrossTable
from mergekit_lab.reporting.tables import MISSING, Cell, Sheet, Table

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as RichTable


def to_markdown(table: Table | CrossTable) -> str:
    """A GitHub-flavored table and its notes; the best of a column is bold."""
    sheet = table.make_sheet()
    lines = [
        _join_markdown(map(escape_cell, (*sheet.names, *sheet.columns, *sheet.texts))),
        _join_markdown(["---"] * len(sheet.names) + ["---:"] * len((*sheet.columns, *sheet.texts))),
    ]
    for line in (line for group in sheet.groups for line in group):
        cells = [f"**{cell.text}**" if cell.best else cell.text for cell in line.cells]
        lines.append(_join_markdown([*map(escape_cell, line.names), *cells, *line.texts]))
    return "\n".join([*lines, "", itemize(sheet.notes)]) + "\n"


def itemize(texts: Iterable[str]) -> str:
    """A list in Markdown."""
    return "\n".join(f"- {escape_cell(text)}" for text in texts)


def _join_markdown(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def escape_cell(text: str) -> str:
    """Escape text for a cell of a Markdown table."""
    for character, safe in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("|", "\\|"), ("\n", " ")):
        text = text.replace(character, safe)
    return text


def to_csv(table: Table | CrossTable) -> str:
    """Labels and fractions. A column is followed by its deviations and plain values if the table has any."""
    sheet = table.make_sheet(name=str)
    lines = [line for group in sheet.groups for line in group]
    ends = {
        end: attribute
        for end, attribute in (("", "mean"), (" sd", "sd"), (" value", "plain"))
        if not end or any(getattr(cell, attribute) is not None for line in lines for cell in line.cells)
    }
    out = io.StringIO()
    writer = csv.writer(out)
    columns = [f"{column}{end}" for column in sheet.columns for end in ends]
    writer.writerow(map(quote_formula, (*sheet.names, *columns, *sheet.texts)))
    for line in lines:
        numbers = [getattr(cell, attribute) for cell in line.cells for attribute in ends.values()]
        names, texts = map(quote_formula, line.names), map(quote_formula, line.texts)
        writer.writerow([*names, *("" if number is None else number for number in numbers), *texts])
    return out.getvalue()


def quote_formula(text: str) -> str:
    """Prefix text with a quote if a spreadsheet would read it as a formula. Numbers are none."""
    if not text.startswith(("=", "+", "-", "@", "\t", "\r")):
        return text
    try:
        float(text)
    except ValueError:
        return f"'{text}"
    return text


def to_latex(table: Table | CrossTable) -> str:
    """A `booktabs` table, a block per group, where a column's best is bold and its second underlined."""
    sheet = table.make_sheet()

    def join(names: Iterable[str], cells: Iterable[str], texts: Iterable[str]) -> str:
        return " & ".join([*map(_escape_latex, names), *cells, *map(_escape_latex, texts)]) + " \\\\\n"

    head = join(sheet.names, map(_escape_latex, sheet.columns), sheet.texts)
    bodies = [
        "".join(join(line.names, map(_write_latex_cell, line.cells), line.texts) for line in group)
        for group in sheet.groups
    ]
    columns = "l" * len(sheet.names) + "r" * len((*sheet.columns, *sheet.texts))
    comment = "".join(f"% {line}\n" for line in " ".join(sheet.notes).splitlines())
    return (
        f"{comment}\\begin{{tabular}}{{{columns}}}\n\\toprule\n{head}\\midrule\n"
        + "\\midrule\n".join(bodies)
        + "\\bottomrule\n\\end{tabular}\n"
    )


def _write_latex_cell(cell: Cell) -> str:
    text = _escape_latex(cell.text)
    return f"\\textbf{{{text}}}" if cell.best else f"\\underline{{{text}}}" if cell.second else text


_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{",
    "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "×": r"$\times$", "α": r"$\alpha$",
    "±": r"$\pm$", "÷": r"$\div$", MISSING: "--", "\n": " ",
}  # fmt: skip


def _escape_latex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)


def print_table(table: Table | CrossTable, console: Console | None = None) -> None:
    """Print with rich. A table too wide for the terminal is split into several."""
    from rich.console import Console

    console = console or Console()
    for drawn in _fit(table.make_sheet(), console):
        console.print(drawn)
    for note in table.make_sheet().notes:
        console.print(note, style="dim", markup=False, highlight=False)


def _fit(sheet: Sheet, console: Console) -> Iterator[RichTable]:
    """Split a table into few that fit the terminal's width, each with as many columns as fit, at least one."""
    unlimited = console.options.update(max_width=sys.maxsize)

    def fits(drawn: RichTable) -> bool:
        return console.measure(drawn, options=unlimited).maximum <= console.width

    whole = _draw(sheet, range(len(sheet.columns)))
    if fits(whole):
        yield whole
        return
    left = list(sheet.narrow)
    while left:
        end = next((n for n in range(len(left), 1, -1) if fits(_draw(sheet, left[:n]))), 1)
        yield _draw(sheet, left[:end])
        left, sheet = left[end:], replace(sheet, texts=())  # which stand in the first alone


def _draw(sheet: Sheet, columns: Sequence[int]) -> RichTable:
    """A table for rich with the columns at these positions."""
    from rich.table import Table as RichTable
    from rich.text import Text

    drawn = RichTable(header_style="bold")
    for name in sheet.names:
        drawn.add_column(Text(name), overflow="fold")
    for i in columns:
        widest = max((len(line.cells[i].text) for group in sheet.groups for line in group), default=0)
        drawn.add_column(Text(sheet.columns[i]), justify="right", overflow="fold", min_width=widest)
    for name in sheet.texts:
        drawn.add_column(Text(name), justify="right", overflow="fold")
    for group in sheet.groups:
        for line in group:
            cells: list[Any] = [Text(name) for name in line.names]
            for cell in (line.cells[i] for i in columns):
                style = "bold green" if cell.best else "underline" if cell.second else ""
                cells.append(Text(cell.text, style=style))
            cells += map(Text, line.texts[: len(sheet.texts)])
            drawn.add_row(*cells, style="dim" if line.reference else "")
        drawn.add_section()
    return drawn
