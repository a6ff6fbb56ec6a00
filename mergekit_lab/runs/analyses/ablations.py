"""What experts and merges reach with less: fewer steps of fine-tuning, fewer samples in a Fisher."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import track

from mergekit_lab.errors import InputError
from mergekit_lab.merging.contract import require
from mergekit_lab.runs.analyses.contract import Data, Drawing, keep, resumed, without
from mergekit_lab.runs.analyses.sweeps import Sweep, best_drawing
from mergekit_lab.runs.context import Context
from mergekit_lab.runs.curvature import obtain_side, stage_curvature
from mergekit_lab.store import content_key


@dataclass(frozen=True, kw_only=True)
class FisherFraction(Sweep):
    """The share of training samples that Fishers come from, for every merger of the run that reads them.

    EpiMer, Figure 3 and appendix D.4: a share is the first samples of one seeded shuffle. Fishers are artifacts
    of the store, so a share that a run asked for is found.

    Args:
        fractions: each in (0, 1].
    """

    fractions: tuple[float, ...] = (0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        fit = len(self.fractions) > 0 and all(0 < f <= 1 for f in self.fractions)
        require(fit, "analysis.fractions", self.fractions, "shares in (0, 1]")

    def _labels(self, run: Context) -> list[str]:
        found = [label for label, m in run.mergers.items() if "fisher" in m.method.side_inputs]
        if not found:
            raise InputError("no merger of this run reads Fishers: set merger=epimer or merger=fisher")
        return found

    def _variant(self, run: Context, fraction: float) -> Context:
        return run.variant({"curvature": {"samples": None, "fraction": fraction}})

    def _merges(self, run: Context, fraction: float) -> dict[str, str]:
        variant = self._variant(run, fraction)
        named = {label: variant.mergers[label] for label in self._labels(run)}
        return {label: content_key(variant.merge_content(m, m.content)) for label, m in named.items()}

    def content(self, run: Context) -> dict[str, Any]:
        return self.shared_content(run, "fisher_fraction") | {
            "merges": [[fraction, self._merges(run, fraction)] for fraction in self.fractions]
        }

    def compute(self, run: Context, resume: Path) -> Data:
        own, kept = self.own(run), resume / "fractions.jsonl"
        done = {(entry["merger"], entry["fraction"]): entry for entry in resumed(kept)}
        labels = self._labels(run)
        for fraction in track(self.fractions, "Fishers", disable=not run.cfg.progress, transient=True):
            left = [label for label in labels if (label, fraction) not in done]
            if not left:
                continue
            with closing(self._variant(run, fraction)) as variant:
                used = [obtain_side(variant, "fisher", task).info["samples"] for task in run.tasks]
                for label in left:
                    best = self.best(variant, variant.mergers[label].method, own)
                    done[label, fraction] = {"merger": label, "fraction": fraction, "samples": used, **best}
                    keep(kept, done[label, fraction])
        return {"points": [done[label, fraction] for label in labels for fraction in self.fractions]}

    def draw(self, data: Data) -> Drawing:
        points = [point | {"percent": 100 * point["fraction"]} for point in data["points"]]
        title = "Fishers from a share of the training samples"
        return best_drawing(title, "share (%)", "percent", points, self.part, logarithmic=True)


@dataclass(frozen=True, kw_only=True)
class FinetuningSteps(Sweep):
    """What experts, and the run's mergers, reach after fewer steps of fine-tuning (SAFT, Table C1).

    Every share of the steps is a training of its own, with a schedule of that length; experts are artifacts of
    the store, those of the whole number are the run's own.

    Args:
        shares: of `training.steps`, each positive; more than 1 trains longer.
    """

    shares: tuple[float, ...] = (0.25, 0.5, 1.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        fit = len(self.shares) > 0 and all(share > 0 for share in self.shares)
        require(fit, "analysis.shares", self.shares, "positive shares of training.steps")

    def _variant(self, run: Context, share: float) -> Context:
        training = run.training
        if run.cfg.experts or training.epochs is not None or training.epochs_of or training.budget != "steps":
            raise InputError(
                "analysis=steps trains experts for parts of training.steps: it needs training.budget=steps, no "
                "epochs and no experts="
            )
        steps = max(1, round(share * training.steps))
        warmup = training.warmup_steps * steps // training.steps
        return run.variant({"training": {"steps": steps, "warmup_steps": warmup}, "joint": False})

    def content(self, run: Context) -> dict[str, Any]:
        found = []
        for share in self.shares:
            variant = self._variant(run, share)
            experts = {task: content_key(variant.expert_content(task)) for task in run.tasks}
            merges = {
                label: content_key(variant.merge_content(m, m.content)) for label, m in variant.mergers.items()
            }
            found.append([experts, merges])
        return self.shared_content(run, "steps") | {"trainings": found}

    def compute(self, run: Context, resume: Path) -> Data:
        from mergekit_lab.runs.finetune import stage_finetune

        kept = resume / "shares.jsonl"
        points: list[Data] = resumed(kept)
        for share in self.shares[len(points) :]:
            with closing(self._variant(run, share)) as variant:
                stage_finetune(variant)
                stage_curvature(variant)
                own = self.own(variant)
                merged = {label: self.best(variant, m.method, own) for label, m in variant.mergers.items()}
                points.append({"steps": variant.training.steps, "experts": own, "mergers": merged})
            keep(kept, points[-1])
        return {"points": points}

    def draw(self, data: Data) -> Drawing:
        from mergekit_lab.reporting.figures import Lines

        points = data["points"]
        steps = [point["steps"] for point in points]
        mean = [100 * sum(p["experts"].values()) / len(p["experts"]) for p in points]

        def curves(of: str) -> dict[str, Any]:
            return {m: (steps, [100 * p["mergers"][m][of] for p in points]) for m in points[0]["mergers"]}

        single = {task: (steps, [100 * p["experts"][task] for p in points]) for task in points[0]["experts"]}
        panels: list[Any] = [
            Lines("mean over tasks", "steps", "value (%)", {"experts": (steps, mean), **curves("value")}),
            Lines("experts by task", "steps", "value (%)", single),
        ]
        if points[0]["mergers"]:
            best = [found for point in points for found in point["mergers"].values()]
            left_out = without(task for found in best for task in found.get("left_out", ()))
            panels.append(
                Lines(f"merged{left_out}", "steps", "value (% of the experts')", curves("normalized"))
            )
        return Drawing(f"Steps of fine-tuning, {self.part}", panels, {})
