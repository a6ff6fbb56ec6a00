"""Reports of synthetic records, and their pages taken apart."""

from html.parser import HTMLParser

from mergekit_lab.reporting import Origin, Timing, write_report
from mergekit_lab.reporting.run_files import RunFiles

CURVES = {"task0": [{"step": 0, "train_loss": 2.0}, {"step": 9, "train_loss": 1.0}]}
SEARCHES = {"merger0": [{"coefficient": 0.1, "normalized": 0.7, "chosen": True}]}
ORIGIN = Origin(("+experiment=a b",), "2026-01-02", {"torch": "2.9"}, "Linux x86_64, 2 cores", ("cpu",))


def report(folder, records, title="A run", **changes):
    arguments = {
        "curves": CURVES,
        "searches": SEARCHES,
        "config_yaml": "seed: 0\n",
        "origin": ORIGIN,
        "timings": {"finetune": Timing(61.0, computed=1, reused=2)},
    }
    return write_report(RunFiles(folder, records, **{**arguments, **changes}), title)


class ParsedPage(HTMLParser):
    """Elements with their attributes, the text of every table cell, and unbalanced tags."""

    void = ("meta", "img")

    def __init__(self, text):
        super().__init__()
        self.elements, self.rows, self.open = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in self.void:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and {"td", "th"} & set(self.open) and "unseen" not in str(self.elements[-1]):
            self.rows[-1][-1] += data

    def find_all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]
