"""Records of evaluations, and their views: tables, figures, a page, trackers.

Importing this loads neither rich, matplotlib nor wandb.
"""

from mergekit_lab.reporting.cross_table import parse_table
from mergekit_lab.reporting.origin import Origin
from mergekit_lab.reporting.published import Beside, set_beside
from mergekit_lab.reporting.records import Record, Timing, read_records, strip_controls
from mergekit_lab.reporting.report import compare, write_cross_table, write_report
from mergekit_lab.reporting.run_files import RunFiles
from mergekit_lab.reporting.trackers import CsvTracker, Product, Start, TensorBoardTracker, Tracker
from mergekit_lab.reporting.wandb_tracker import WandbTracker
from mergekit_lab.reporting.writing import print_table

__all__ = [
    "Beside",
    "CsvTracker",
    "Origin",
    "Product",
    "Record",
    "RunFiles",
    "Start",
    "TensorBoardTracker",
    "Timing",
    "Tracker",
    "WandbTracker",
    "compare",
    "parse_table",
    "print_table",
    "read_records",
    "set_beside",
    "strip_controls",
    "write_cross_table",
    "write_report",
]
