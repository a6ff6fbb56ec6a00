"""The page in a real browser: what a reader does with it works, and the console stays silent."""

import json
import math
import re
import shutil
import subprocess
from dataclasses import replace
from html import escape, unescape
from importlib.resources import files
from pathlib import Path

import pytest

from mergekit_lab.reporting import Origin, RunFiles, write_report
from mergekit_lab.reporting.drawing import save_figure
from mergekit_lab.reporting.figures import chart_lines, chart_matrix, chart_mergers, chart_plane
from mergekit_lab.reporting.leaderboard import build_table
from mergekit_lab.reporting.origin import list_commands
from mergekit_lab.reporting.page import Page, render_page, write_policy

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--enable-logging=stderr", "--virtual-time-budget=9000",
)  # fmt: skip

PROBE = """
const shown = () => [...document.querySelectorAll("table.sortable tbody tr")].filter(row => !row.hidden);
const names = () => shown().map(row => row.querySelector("th").textContent);
const column = title => [...document.querySelectorAll("table.sortable thead th")]
  .findIndex(cell => cell.textContent === title);
const choose = (name, value) => {
  const select = document.querySelector(`select[data-filter="${name}"]`);
  select.value = value;
  select.dispatchEvent(new Event("change", {bubbles: true}));
};
const press = title => document.querySelectorAll("table.sortable thead button")[column(title)].click();
const wait = async until => {
  for (let tries = 0; tries < 150 && !until(); tries++) await new Promise(go => setTimeout(go, 50));
  return until();
};
const whole = () => [...document.querySelectorAll("figure.drawing")]
  .every(each => each.closest("details:not([open])") || each.querySelector(".picture").hidden);
(async () => {
  const result = JSON.stringify(await (async () => { %s })());
  if (parent !== self) parent.postMessage(result, "*");
  document.body.innerHTML = "<pre id=result></pre>";
  document.getElementById("result").textContent = result;
})();
"""
FRAME = """<body><iframe src="probe.html" width=%d height=900></iframe><pre id=result></pre>
<script>onmessage = event => { document.getElementById("result").textContent = event.data; };</script>"""


@pytest.fixture(scope="module", autouse=True)
def _pictures_of_one_pixel():
    """Pictures are looked at here."""


def ask(
    page: Path, script: str, *options: str, print_media: bool = False, axe: bool = False, narrow: int = 0
) -> object:
    """What the script returns in the page under its own policy; an error on the console fails.

    Args:
        print_media: as the page is printed.
        axe: axe-core is there.
        narrow: the page stands in a frame so wide: the browser makes no window narrower than 500.
    """
    probe = page.with_name("probe.html")
    text = page.read_text().replace("@media print", "@media all" if print_media else "@media print")
    (style,) = re.findall("<style>(.*?)</style>", text, re.S)
    added = [PROBE % script]
    if axe:
        added.insert(0, files("axe_core_python").joinpath("axe.min.js").read_text(encoding="utf-8"))
    policy = write_policy(style, [*re.findall("<script>(.*?)</script>", text, re.S), *added])
    text = re.sub('(?<=Security-Policy" content=")[^"]*', escape(policy), text)
    body, end, rest = text.rpartition("</body>")
    probe.write_text("".join([body, *(f"<script>{each}</script>" for each in added), end, rest]))
    if narrow:
        (page.parent / "frame.html").write_text(FRAME % narrow)
        probe = page.with_name("frame.html")
    process = subprocess.run(
        [BROWSER, *OPTIONS, *options, f"--user-data-dir={page.parent / 'p'}", "--dump-dom", probe.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert "CONSOLE" not in process.stderr, [line for line in process.stderr.splitlines() if "CONSOLE" in line]
    answer = re.search(r'<pre id="result">(.+?)</pre>', process.stdout, re.S)
    assert answer, process.stdout[-2000:]
    return json.loads(unescape(answer.group(1)))


CURVE = [{"step": step, "train_loss": 2.0 / (1 + step), "val_accuracy": 0.5} for step in range(40)]
SEARCH = [{"coefficient": c, "normalized": 0.5 + c / 5, "chosen": c == 0.9} for c in (0.1, 0.5, 0.9)]
ORIGIN = Origin(("+experiment=quickstart", "seed=1"), "2026-01-02T03:04:05+00:00", {"torch": "2"}, "m")
EVIL = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def page(tmp_path_factory, study) -> Path:
    """Two optimizers, five mergers, three seeds, four tasks, with every kind of figure."""
    folder = tmp_path_factory.mktemp("page")
    records = [
        replace(record, model_seconds=1.0 + len(record.task) + 7 * (record.merger == "merger3"))
        for record in study(tasks=4, mergers=5, optimizers=2, seeds=3)
    ]
    grid = [[float(x * y) for y in range(5)] for x in range(5)]
    axis = [0.0, 1.0, 2.0, 3.0, 4.0]
    panels = [
        chart_plane(
            "a plane", [[math.nan, *row[1:]] for row in grid], (axis, axis), ("first", "second"),
            points={"here": (1.0, 1.0)}, box=(0.0, 1.0),
        ),
        chart_lines("by name", "", "loss", {"a": ([0, 1], [0.1, 0.2])}, labels=["one", EVIL], logarithmic=True),
        chart_mergers("deviations", "n", "value", {"ties": ([1, 2], [3.0, 4.0])}, spreads={"ties": [0.5, 0.0]}),
        chart_matrix("a matrix", ["a", EVIL], [[1.0, 0.2], [0.3, 1.0]]),
    ]  # fmt: skip
    (folder / "analysis").mkdir()
    save_figure(folder / "analysis" / "all.png", EVIL, panels)
    run = RunFiles(folder, records, "a: <b>", curves={"a": CURVE}, searches={"merger1": SEARCH}, origin=ORIGIN)
    return write_report(run, "A <study>").html


@pytest.fixture(scope="module")
def plain(tmp_path_factory, study) -> Path:
    """The same study without figures."""
    records = study(tasks=4, mergers=5, optimizers=2, seeds=3)
    path = tmp_path_factory.mktemp("plain") / "report.html"
    commands = list_commands([(ORIGIN, records)])
    path.write_text(render_page(Page("P", "", build_table(records), records, origin=ORIGIN, commands=commands)))
    return path


def test_at_first_the_means_over_seeds_are_shown_and_choices_narrow_them(plain) -> None:
    answers = ask(
        plain,
        """
        const selects = [...document.querySelectorAll("select")];
        const at = {first: names().length, options: selects.map(select => select.dataset.filter)};
        choose("optimizer", "optimizer1"); at.optimizer = names().length;
        choose("merger", "merger3"); at.merger = names();
        choose("seed", "2"); at.seed = names(); at.note = document.querySelector("output").textContent;
        at.values = shown().map(row => row.cells[column("average")].textContent);
        choose("seed", ""); choose("merger", ""); choose("optimizer", ""); at.last = names().length;
        return at;
        """,
    )
    assert answers["options"] == ["optimizer", "merger", "seed"]
    assert answers["first"] == answers["last"] == 2 * 8
    assert answers["optimizer"] == 8
    assert answers["merger"] == answers["seed"] == ["zero-shot", "experts", "merger3", "+joint"]
    assert answers["note"] == "4 rows"
    assert not any("±" in value for value in answers["values"])


def test_a_heading_sorts_by_number_and_again_reverses(plain) -> None:
    answers = ask(
        plain,
        """
        const values = () => shown().map(row => Number(row.cells[column("average")].dataset.value));
        const before = document.querySelectorAll("table.sortable thead th")[column("average")];
        press("average"); const down = values(), told = before.getAttribute("aria-sort");
        press("average"); return {down, up: values(), told};
        """,
    )
    assert answers["down"] == sorted(answers["down"], reverse=True)
    assert answers["up"] == sorted(answers["up"])
    assert answers["told"] == "descending"


def test_every_picture_has_a_text_and_every_control_a_name(page) -> None:
    answers = ask(
        page,
        """
        return {
          pictures: [...document.images].map(image => [image.alt.length > 0, image.naturalWidth > 0]),
          selects: [...document.querySelectorAll("select")].map(select => select.labels.length),
          buttons: [...document.querySelectorAll("button")].map(button => button.textContent.length > 0),
          title: document.title, heading: document.querySelector("h1").textContent,
        };
        """,
    )
    assert answers["pictures"]
    assert all(all(pair) for pair in answers["pictures"])
    assert all(answers["selects"])
    assert all(answers["buttons"])
    assert answers["title"] == answers["heading"] == "A <study>"


@pytest.mark.parametrize("width", [400, 1400])
def test_only_tables_and_heat_maps_scroll_sideways_and_every_figure_is_drawn(page, width) -> None:
    answers = ask(
        page,
        """
        document.querySelectorAll("details").forEach(each => { each.open = true; });
        const drawn = await wait(whole);
        const charts = [...document.querySelectorAll(".panel")].map(panel => {
          const texts = [...panel.querySelectorAll("svg text")];
          const smallest = Math.min(...texts.map(text => parseFloat(getComputedStyle(text).fontSize)));
          return {width: panel.clientWidth, inside: panel.scrollWidth, smallest, focus: panel.tabIndex};
        });
        return {page: [document.documentElement.scrollWidth, innerWidth], drawn, charts,
                figures: document.querySelectorAll("figure.drawing").length};
        """,
        f"--window-size={width if width > 500 else 600},900",
        narrow=width if width < 500 else 0,
    )
    assert answers["page"][0] <= answers["page"][1] == width
    assert answers["drawn"]
    assert len(answers["charts"]) == 2 + 2 + 1 + 2 + 2 + 2 + 4, "bars, heat maps, search, cost, shares, curves"
    assert all(chart["smallest"] >= 11 for chart in answers["charts"]), "as large as it is drawn"
    for chart in answers["charts"]:
        assert chart["inside"] <= chart["width"] or chart["focus"] == 0, "what scrolls can be scrolled by keys"
    if width > 500:
        assert all(chart["inside"] <= chart["width"] for chart in answers["charts"])


def test_a_figure_tells_its_numbers_and_opens_large(page) -> None:
    answers = ask(
        page,
        """
        await wait(whole);
        const figure = document.querySelector("figure.drawing");
        const bar = figure.querySelector(".mark-rect path");
        const box = bar.getBoundingClientRect();
        const at = {clientX: box.x + box.width / 2, clientY: box.y + box.height / 2, bubbles: true};
        for (const kind of ["pointerover", "pointermove"]) bar.dispatchEvent(new PointerEvent(kind, at));
        const tip = await wait(() => document.querySelector("#vg-tooltip-element.visible"));
        const told = tip?.textContent;
        const small = figure.querySelector("svg").getBoundingClientRect().width;
        figure.querySelector(".chart").click();
        const dialog = document.querySelector("dialog");
        await wait(() => dialog.querySelector("svg"));
        const large = dialog.querySelector("svg").getBoundingClientRect().width, open = dialog.open;
        dialog.querySelector("button").click();
        return {told, small, large, open, closed: !dialog.open};
        """,
        "--window-size=1400,900",
    )
    assert "merger" in answers["told"]
    assert "average" in answers["told"]
    assert answers["large"] > 1.2 * answers["small"]
    assert answers["open"]
    assert answers["closed"]


def test_axe_core_finds_nothing_wrong_on_the_page_nor_in_an_enlarged_figure(page) -> None:
    answers = ask(
        page,
        """
        document.querySelectorAll("details").forEach(each => { each.open = true; });
        await wait(whole);
        const say = async where => (await axe.run(where)).violations.flatMap(
          rule => rule.nodes.map(node => `${rule.id}: ${node.html.slice(0, 200)}`));
        const page = await say({exclude: [["svg > *"]]});  // marks: those of one figure are looked at below
        document.querySelector("button.enlarge").click();
        await wait(() => document.querySelector("dialog svg"));
        return [...page, ...await say(document.querySelector("dialog"))];
        """,
        axe=True,
    )
    assert answers == []


def test_each_row_has_its_command_to_copy(plain) -> None:
    answers = ask(
        plain,
        """
        document.querySelectorAll("td.made details").forEach(each => { each.open = true; });
        const rows = shown().map(row => [row.dataset.merger, row.querySelectorAll("td.made code").length]);
        const row = shown().find(row => row.dataset.merger === "merger1");
        const button = row.querySelector("button.copy");
        button.click();
        const said = await wait(() => button.textContent !== "Copy") && button.textContent;
        return {said, selected: getSelection().toString(), rows,
                text: row.querySelector("td.made code").textContent,
                page: document.querySelector("h2 ~ p .command code").textContent};
        """,
    )
    others = " ".join(f"'~mergers.merger{i}'" for i in (0, 2, 3, 4))
    assert answers["text"] == f"python -m mergekit_lab +experiment=quickstart seed=1 joint=false {others}"
    assert answers["selected"] == answers["text"]
    assert answers["said"] in ("Copied", "Selected"), "a browser copies only what a person's click asks for"
    assert answers["page"] == "python -m mergekit_lab +experiment=quickstart seed=1"
    assert all(count == 1 for _, count in answers["rows"])


def test_printing_clips_no_column_of_a_wide_table(tmp_path, study) -> None:
    table = build_table(records := study(tasks=20, mergers=3, optimizers=2, seeds=2))
    written = tmp_path / "report.html"
    written.write_text(render_page(Page("Wide", "", table, records)))
    script = """
      const wide = document.querySelector(".wide"), last = wide.querySelector("thead th:last-child");
      return [last.getBoundingClientRect().right, innerWidth, wide.scrollWidth - wide.clientWidth];
    """
    right, width, hidden = ask(written, script, "--window-size=1047,900", print_media=True)
    assert right <= width, "A4 across"
    assert hidden <= 0
    assert ask(written, script, "--window-size=1047,900")[2] > 0  # on a screen it scrolls


def test_five_thousand_records_open_at_once(tmp_path, study) -> None:
    records = study(tasks=20, mergers=22, optimizers=5, seeds=2)
    assert len(records) == 5000
    table = build_table(records)
    written = tmp_path / "report.html"
    written.write_text(render_page(Page("Large", "", table, records)))
    ask(written, "return 0;")
    opened = ask(written, "return performance.now();")
    assert opened < 3000, "a second on an idle machine, thrice that beside other tests"
