"""Records of evaluations, and their views: tables, figures, a page, trackers.

Importing this loads neither rich, matplotlib nor wandb.
"""

from mergekit_lab.reporting.plots import Curves, Searches
from mergekit_lab.reporting.published import Beside, read_published, set_beside
from mergekit_lab.reporting.records import (
    KINDS,
    Failure,
    Record,
    Timing,
    deduplicate,
    printable,
    read_records,
    write_records,
)
from mergekit_lab.reporting.report import ReportPaths, compare, write_report, write_slice
from mergekit_lab.reporting.slices import (
    DIMENSIONS,
    MEASURES,
    Slice,
    asked,
    print_slice,
    sliced,
    table_csv,
    table_latex,
)
from mergekit_lab.reporting.tables import AXES, Cell, Row, Table, comparison_table, print_table, to_markdown
from mergekit_lab.reporting.tensorboard_tracker import TensorBoardTracker
from mergekit_lab.reporting.trackers import CsvTracker, Product, Tracker
from mergekit_lab.reporting.wandb_tracker import WandbTracker

__all__ = [
    "AXES",
    "DIMENSIONS",
    "KINDS",
    "MEASURES",
    "Beside",
    "Cell",
    "CsvTracker",
    "Curves",
    "Failure",
    "Product",
    "Record",
    "ReportPaths",
    "Row",
    "Searches",
    "Slice",
    "Table",
    "TensorBoardTracker",
    "Timing",
    "Tracker",
    "WandbTracker",
    "asked",
    "compare",
    "comparison_table",
    "deduplicate",
    "print_slice",
    "print_table",
    "printable",
    "read_published",
    "read_records",
    "set_beside",
    "sliced",
    "table_csv",
    "table_latex",
    "to_markdown",
    "write_records",
    "write_report",
    "write_slice",
]
