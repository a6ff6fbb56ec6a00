"""What experts and merges reach with less: fewer steps of fine-tuning, fewer samples in a Fisher."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Gt, MinLen

from mergekit_lab.errors import InputError
from mergekit_lab.ranges import Count, Share
from mergekit_lab.reporting.figures import Curve, chart_lines, chart_mergers
from mergekit_lab.runs.analyses.contract import Data, Drawing, compute_each, say_left_out
from mergekit_lab.runs.analyses.sweeps import Sweep, draw_best, merge_keys
from mergekit_lab.runs.curvature import declare_side_input, stage_curvature
from mergekit_lab.runs.finetune import declare_expert, stage_finetune
from mergekit_lab.runs.run import Run
from mergekit_lab.tasks import Part


@dataclass(frozen=True, kw_only=True)
class FisherFraction(Sweep):
    """The share of training samples that Fishers come from, for every merger of the run that reads them.

    EpiMer, Figure 3 and appendix D.4: a share is the first samples of one seeded shuffle, in whole batches, and
    nothing is tuned again. Fishers are artifacts of the store, so a share that a run asked for is found.

    Args:
        fractions: each in (0, 1].
        batch: of samples; null: a share is any number of them.
    """

    fractions: Annotated[tuple[Share, ...], MinLen(1)] = (0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0)
    batch: Count | None = 64
    coefficients: Annotated[tuple[float, ...], MinLen(1)] = (1.0,)
    part: Part = "test"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.part == "test" and len(self.coefficients) > 1:
            raise InputError(
                "analysis.part=test takes one coefficient, because none may be chosen on test data: set one "
                "in analysis.coefficients, or analysis.part=validation"
            )

    def _list_labels(self, run: Run) -> list[str]:
        labels = [label for label, m in run.mergers.items() if "fisher" in m.method.side_inputs]
        if not labels:
            raise InputError("no merger of this run reads Fishers: set merger=epimer or merger=fisher")
        return labels

    def _vary(self, run: Run, fraction: float) -> Run:
        return run.vary({"curvature": {"samples": None, "fraction": fraction, "batch": self.batch}})

    def describe_content(self, run: Run) -> dict[str, Any]:
        labels = self._list_labels(run)
        merges = [[f, merge_keys(self._vary(run, f), labels)] for f in self.fractions]
        return self.describe(run, "fisher_fraction", merges=merges)

    def compute(self, run: Run, resume: Path) -> Data:
        def measure(own: dict[str, float], label: str, fraction: float) -> Data:
            with closing(self._vary(run, fraction)) as variant:
                fishers = [variant.obtain(declare_side_input(variant, "fisher", task)) for task in run.tasks]
                best = self.find_best(variant, variant.mergers[label].method, own)
            return {"fraction": fraction, "samples": [each.info["samples"] for each in fishers], **best}

        return self.compute_points(run, resume, self._list_labels(run), self.fractions, measure)

    def draw(self, data: Data) -> Drawing:
        points = [point | {"percent": 100 * point["fraction"]} for point in data["points"]]
        title = "Fishers from a share of the training samples"
        return draw_best(title, "share (%)", "percent", points, self.part, logarithmic=True)


@dataclass(frozen=True, kw_only=True)
class FinetuningSteps(Sweep):
    """What experts, and the run's mergers, reach after fewer steps of fine-tuning (SAFT, Table C1).

    Every share of the steps is a training of its own, with a schedule of that length; experts are artifacts of
    the store, those of the whole number are the run's own.

    Args:
        shares: of `training.steps`, each positive; more than 1 trains longer.
    """

    shares: Annotated[tuple[Annotated[float, Gt(0)], ...], MinLen(1)] = (0.25, 0.5, 1.0)

    def _vary(self, run: Run, share: float) -> Run:
        training = run.training
        if run.cfg.experts or training.epochs is not None or training.epochs_of or training.budget != "steps":
            raise InputError(
                "analysis=steps trains experts for parts of training.steps: it needs training.budget=steps, no "
                "epochs and no experts="
            )
        scaled = training.with_steps(max(1, round(share * training.steps)))
        return run.vary(
            {"training": {"steps": scaled.steps, "warmup_steps": scaled.warmup_steps}, "joint": False}
        )

    def describe_content(self, run: Run) -> dict[str, Any]:
        variants = [self._vary(run, share) for share in self.shares]
        trainings = [
            [{t: declare_expert(v, t).key for t in v.tasks}, merge_keys(v, v.mergers)] for v in variants
        ]
        return self.describe(run, "steps", trainings=trainings)

    def compute(self, run: Run, resume: Path) -> Data:
        def compute(share: float) -> Data:
            with closing(self._vary(run, share)) as variant:
                stage_finetune(variant)
                stage_curvature(variant)
                own = self.score_experts(variant)
                merged = {label: self.find_best(variant, m.method, own) for label, m in variant.mergers.items()}
                return {"steps": variant.training.steps, "experts": own, "mergers": merged}

        points = compute_each(run, resume, self.shares, compute, "fine-tuning")
        return {"points": list(points.values())}

    def draw(self, data: Data) -> Drawing:
        points = data["points"]
        steps = [point["steps"] for point in points]
        mean = [100 * sum(p["experts"].values()) / len(p["experts"]) for p in points]

        def make_curves(of: str) -> dict[str, Curve]:
            return {m: (steps, [100 * p["mergers"][m][of] for p in points]) for m in points[0]["mergers"]}

        single = {task: (steps, [100 * p["experts"][task] for p in points]) for task in points[0]["experts"]}
        means = {"experts": (steps, mean), **make_curves("value")}
        panels = [
            chart_mergers("mean over tasks", "steps", "value (%)", means),
            chart_lines("experts by task", "steps", "value (%)", single),
        ]
        if points[0]["mergers"]:
            best = [each for point in points for each in point["mergers"].values()]
            left_out = say_left_out(task for each in best for task in each.get("left_out", ()))
            shares = make_curves("normalized")
            panels.append(chart_mergers(f"merged{left_out}", "steps", "value (% of the experts')", shares))
        return Drawing(f"Steps of fine-tuning, {self.part}", panels)
