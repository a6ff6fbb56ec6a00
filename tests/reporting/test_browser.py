"""The page in a real browser: what a reader does with it works, and the console stays silent."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from mergekit_lab.reporting import build_table, html, write_report

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")

PROBE = """
<script>
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
const result = (() => { %s })();
document.body.innerHTML = "<pre id=result></pre>";
document.getElementById("result").textContent = JSON.stringify(result);
</script>
"""


def ask(page: Path, script: str, *options: str, print_media: bool = False) -> object:
    """What the script returns in the page, or as it is printed; an error on the console fails."""
    probe = page.with_name("probe.html")
    text = page.read_text().replace("@media print", "@media all" if print_media else "@media print")
    probe.write_text(text.replace("</body>", PROBE % script + "</body>"))
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", *options]
    found = subprocess.run(
        [*command, f"--user-data-dir={page.parent / 'profile'}", "--dump-dom", probe.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert "CONSOLE" not in found.stderr, [line for line in found.stderr.splitlines() if "CONSOLE" in line]
    text = re.search(r'<pre id="result">(.*?)</pre>', found.stdout, re.S)
    assert text, found.stdout[-2000:]
    return json.loads(text.group(1).replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))


@pytest.fixture(scope="module")
def page(tmp_path_factory, study) -> Path:
    """Two optimizers, five mergers, three seeds, four tasks."""
    folder = tmp_path_factory.mktemp("page")
    records = study(tasks=4, mergers=5, optimizers=2, seeds=3)
    return write_report(
        folder, records, curves={}, searches={}, config_yaml="a: <b>", timings={}, title="A <study>"
    ).html


def test_at_first_the_means_over_seeds_are_shown_and_choices_narrow_them(page) -> None:
    found = ask(
        page,
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
    assert found["options"] == ["optimizer", "merger", "seed"]
    assert found["first"] == found["last"] == 2 * 8
    assert found["optimizer"] == 8
    assert found["merger"] == found["seed"] == ["zero-shot", "experts", "merger3", "+joint"]
    assert found["note"] == "4 rows"
    assert not any("±" in value for value in found["values"])


def test_a_heading_sorts_by_number_and_again_reverses(page) -> None:
    found = ask(
        page,
        """
        const values = () => shown().map(row => Number(row.cells[column("average")].dataset.value));
        const before = document.querySelectorAll("table.sortable thead th")[column("average")];
        press("average"); const down = values(), told = before.getAttribute("aria-sort");
        press("average"); return {down, up: values(), told};
        """,
    )
    assert found["down"] == sorted(found["down"], reverse=True)
    assert found["up"] == sorted(found["up"])
    assert found["told"] == "descending"


def test_every_picture_has_a_text_and_every_control_a_name(page) -> None:
    found = ask(
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
    assert found["pictures"]
    assert all(all(pair) for pair in found["pictures"])
    assert all(found["selects"])
    assert all(found["buttons"])
    assert found["title"] == found["heading"] == "A <study>"


@pytest.mark.parametrize("width", [500, 1400])  # the browser makes no window narrower than 500
def test_only_the_table_scrolls_sideways(page, width) -> None:
    found = ask(
        page,
        "return [document.documentElement.scrollWidth, innerWidth];",
        f"--window-size={width},900",
    )
    assert found[1] == width
    assert found[0] <= width


def test_printing_clips_no_column_of_a_wide_table(tmp_path, study) -> None:
    table = build_table(records := study(tasks=20, mergers=3, optimizers=2, seeds=2))
    written = tmp_path / "report.html"
    written.write_text(html.render_page(html.Page("Wide", "", table, records)))
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
    written.write_text(html.render_page(html.Page("Large", "", table, records)))
    ask(written, "return 0;")
    opened = ask(written, "return performance.now();")
    assert opened < 3000, "a second on an idle machine, thrice that beside other tests"
