"""A W&B report that compares the runs of a project: built from this definition, never by hand.

    pip install 'mergekit_lab[dashboard]'
    python -m mergekit_lab.reporting.wandb_dashboard --entity TEAM --project mergekit_lab [--group quickstart]

It needs an API key of W&B: `wandb login`, or WANDB_API_KEY. It shows, of the runs that `logger=wandb` tracked:
the best merge of every run by optimizer, accuracy over cost, how choices lead to it, leaderboards, evaluations,
searches, curvature, training curves and figures.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from mergekit_lab.errors import InputError
from mergekit_lab.paths import find_conf_dir
from mergekit_lab.reporting.wandb_tracker import require_key

TITLE = "mergekit_lab: experts and merges compared"
_FIGURES = ["mergers", "heatmap", "shares", "coefficients", "cost"]


def build_dashboard(project: str, entity: str, groups: Sequence[str] = (), title: str = TITLE) -> Any:
    """The report as an object of wandb_workspaces, not saved yet.

    Args:
        project, entity: whose runs.
        groups: experiments to narrow it to; all by default.

    Raises:
        InputError: wandb_workspaces is not installed.
    """
    try:
        import wandb_workspaces.reports.v2 as wr
        from wandb_workspaces import expr
    except ImportError as error:
        raise InputError(
            f"the dashboard needs wandb_workspaces ({error}): pip install 'mergekit_lab[dashboard]'"
        ) from None

    def make_run_set(job: str) -> Any:
        chosen = [expr.Metric("JobType") == job]
        if groups:
            chosen.append(expr.Metric("Group").isin(list(groups)))
        return wr.Runset(name=job, filters=expr.And(*chosen))

    best, average = wr.SummaryMetric("best/normalized"), wr.SummaryMetric("best/average")
    compared: list[Any] = [
        wr.BarPlot(
            title="Best merge, share of the experts' accuracy", metrics=["best/normalized"],
            groupby=wr.Config("optimizer"), title_x="normalized",
        ),
        wr.ScatterPlot(
            title="Accuracy over cost", x=wr.SummaryMetric("best/seconds"), y=best, log_x=True
        ),
        wr.ParallelCoordinatesPlot(
            title="From choices to accuracy",
            columns=[
                *(wr.ParallelCoordinatesPlotColumn(wr.Config(a)) for a in ("backbone", "optimizer", "seed")),
                *(wr.ParallelCoordinatesPlotColumn(metric) for metric in (average, best)),
            ],
        ),
        wr.WeavePanelSummaryTable(table_name="leaderboard"),
        wr.WeavePanelSummaryTable(table_name="evaluations"),
        wr.MediaBrowser(title="Figures", media_keys=_FIGURES),
    ]  # fmt: skip
    analyses = sorted(file.stem for file in (find_conf_dir() / "analysis").glob("*.yaml"))
    curves: list[Any] = [
        wr.LinePlot(title="Training loss", x="step", metric_regex=r".*/train_loss"),
        wr.LinePlot(title="Validation accuracy", x="step", metric_regex=r".*/val_accuracy"),
    ]
    return wr.Report(
        project=project,
        entity=entity,
        title=title,
        description="Built by mergekit_lab.reporting.wandb_dashboard.",
        blocks=[
            wr.H1("Merged models"),
            wr.PanelGrid(runsets=[make_run_set("evaluate")], panels=compared),
            wr.H1("Choice of coefficients, and curvature"),
            wr.PanelGrid(
                runsets=[make_run_set("merge"), make_run_set("curvature")],
                panels=[
                    wr.LinePlot(title="Normalized on validation", x="step", metric_regex=r".*/normalized"),
                    wr.LinePlot(title="Traces", x="step", metric_regex=r".*_trace"),
                ],
            ),
            wr.H1("Experts"),
            wr.PanelGrid(runsets=[make_run_set("finetune")], panels=curves),
            wr.H1("Analyses"),
            wr.PanelGrid(runsets=[make_run_set("analyze")], panels=[wr.MediaBrowser(media_keys=analyses)]),
        ],
        width="fluid",
    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entity", required=True)
    parser.add_argument("--project", default="mergekit_lab")
    parser.add_argument(
        "--group", action="append", default=[], help="an experiment; may be given several times"
    )
    parser.add_argument("--title", default=TITLE)
    args = parser.parse_args()
    try:
        report = build_dashboard(args.project, args.entity, args.group, args.title)
        require_key()
        print(report.save().url)
    except InputError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
