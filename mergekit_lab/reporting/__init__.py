"""Records of evaluations, and their views: tables, figures, a page, trackers.

Importing this loads neither rich, matplotlib nor wandb.
"""

from mergekit_lab.reporting.checks import find_warnings
from mergekit_lab.reporting.cross_table import parse_table, tabulate_across
from mergekit_lab.reporting.leaderboard import build_table
from mergekit_lab.reporting.origin import Origin
from mergekit_lab.reporting.paper_tables import read_published
from mergekit_lab.reporting.published import Beside, set_beside
from mergekit_lab.reporting.records import (
    Failure,
    Record,
    Timing,
    deduplicate,
    read_records,
    strip_controls,
    write_records,
)
from mergekit_lab.reporting.report import ReportPaths, compare, write_cross_table, write_report
from mergekit_lab.reporting.run_files import RunFiles
from mergekit_lab.reporting.tables import Cell
from mergekit_lab.reporting.trackers import CsvTracker, Product, Start, TensorBoardTracker, Tracker
from mergekit_lab.reporting.wandb_tracker import WandbTracker
from mergekit_lab.reporting.writing import print_table, to_csv, to_latex, to_markdown

__all__ = [
    "Beside",
    "Cell",
    "CsvTracker",
    "Failure",
    "Origin",
    "Product",
    "Record",
    "ReportPaths",
    "RunFiles",
    "Start",
    "TensorBoardTracker",
    "Timing",
    "Tracker",
    "WandbTracker",
    "build_table",
    "compare",
    "deduplicate",
    "find_warnings",
    "parse_table",
    "print_table",
    "read_published",
    "read_records",
    "set_beside",
    "strip_controls",
    "tabulate_across",
    "to_csv",
    "to_latex",
    "to_markdown",
    "write_cross_table",
    "write_records",
    "write_report",
]
