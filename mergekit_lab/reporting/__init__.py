"""Records of evaluations, and their views: tables, figures, a page, trackers.

Importing this loads neither rich, matplotlib nor wandb.
"""

from mergekit_lab.reporting.plots import Curves, Searches
from mergekit_lab.reporting.records import (
    KINDS,
    Failure,
    Record,
    Timing,
    deduplicate,
    read_records,
    write_records,
)
from mergekit_lab.reporting.report import ReportPaths, compare, write_report
from mergekit_lab.reporting.tables import AXES, Cell, Row, Table, comparison_table, print_table, to_markdown
from mergekit_lab.reporting.trackers import CsvTracker, Tracker
from mergekit_lab.reporting.wandb_tracker import WandbTracker

__all__ = [
    "AXES",
    "KINDS",
    "Cell",
    "CsvTracker",
    "Curves",
    "Failure",
    "Record",
    "ReportPaths",
    "Row",
    "Searches",
    "Table",
    "Timing",
    "Tracker",
    "WandbTracker",
    "compare",
    "comparison_table",
    "deduplicate",
    "print_table",
    "read_records",
    "to_markdown",
    "write_records",
    "write_report",
]
