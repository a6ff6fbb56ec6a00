"""Along straight lines between models: coefficient sweeps, loss barriers, the Hessian's eigenvalues."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Gt, MinLen

from mergekit_lab.analysis.plane import Weights, measure_barrier
from mergekit_lab.batches import to_device
from mergekit_lab.curvature import Hessian, top_eigenvalues, trace
from mergekit_lab.errors import InputError
from mergekit_lab.ranges import Count
from mergekit_lab.reporting.figures import chart_lines, chart_mergers
from mergekit_lab.reporting.names import display_name
from mergekit_lab.runs.analyses.contract import (
    Analysis,
    Data,
    Drawing,
    OnSamples,
    check_tasks,
    choose_merger,
    choose_pairs,
    compute_each,
    describe_scores,
    make_grid,
    normalize_mean,
    read_states,
    sample,
    say_left_out,
)
from mergekit_lab.runs.analyses.sweeps import list_scaled_mergers, merge_keys
from mergekit_lab.runs.combine import merge_experts
from mergekit_lab.runs.merge import declare_merged
from mergekit_lab.runs.nodes import Node
from mergekit_lab.runs.run import Run, load_state


@dataclass(frozen=True, kw_only=True)
class AlphaSweep(OnSamples):
    """Value and loss of every merger of the run that has a coefficient, over a grid of it.

    Args:
        low, high, points: of the coefficient.
    """

    low: float = 0.0
    high: float = 2.0
    points: int = 21

    def describe_content(self, run: Run) -> dict[str, Any]:
        swept = list_scaled_mergers(run)
        if not swept:
            raise InputError("no merger of this run has a coefficient to sweep: set merger=task_arithmetic")
        alphas = make_grid(self.low, self.high, self.points)
        return self.describe(run, "alpha_sweep", alphas=alphas, mergers=merge_keys(run, swept))

    def compute(self, run: Run, resume: Path) -> Data:
        alphas = make_grid(self.low, self.high, self.points)
        own = self.score_experts(run)

        def compute(label: str) -> Any:
            unit = merge_experts(run, run.mergers[label].method.with_coefficient(1.0))
            return self.score_line(run, run.base_state, unit, alphas)

        swept = compute_each(run, resume, list_scaled_mergers(run), compute, "sweeping α")
        return {"alphas": alphas, "experts": own, "mergers": swept}

    def draw(self, data: Data) -> Drawing:
        alphas = data["alphas"]
        curves: dict[str, Any] = {}
        left_out: list[str] = []
        for label, tasks in data["mergers"].items():
            values = {t: scores["value"] for t, scores in tasks.items()}
            shares, left_out = normalize_mean(values, data["experts"])
            curves[label] = (alphas, [100 * share for share in shares])
        title = f"all tasks{say_left_out(left_out)}"
        panels = [chart_mergers(title, "α", "value (% of the experts')", curves)]
        for label, tasks in data["mergers"].items():
            each = {t: (alphas, [100 * v for v in scores["value"]]) for t, scores in tasks.items()}
            panels.append(chart_lines(display_name(label), "α", "value (%)", each))
        return Drawing(f"Coefficient sweep on {self.part}", panels)


@dataclass(frozen=True, kw_only=True)
class LossBarrier(OnSamples):
    """The loss of each task on the way from a merged model (0) to that task's expert (1).

    Args:
        merger: whose model; null: the run's first merger.
        points: on the way, both ends included.
    """

    merger: str | None = None
    points: int = 11

    def _find_label(self, run: Run) -> str:
        lacking = "a loss barrier starts at a merged model: set merger=NAME"
        return choose_merger(run.mergers, self.merger, lacking).label

    def list_needs(self, run: Run) -> tuple[Node, ...]:
        return (*super().list_needs(run), declare_merged(run, self._find_label(run)))

    def describe_content(self, run: Run) -> dict[str, Any]:
        shares, merged = make_grid(0.0, 1.0, self.points), declare_merged(run, self._find_label(run))
        return self.describe(run, "barrier", run.tasks, shares=shares, merged=merged.key)

    def compute(self, run: Run, resume: Path) -> Data:
        label, shares = self._find_label(run), make_grid(0.0, 1.0, self.points)
        start = load_state(run.need(declare_merged(run, label)))

        def compute(task: str) -> Any:
            curve = self.score_line(run, start, read_states(run, [task])[task], shares, [task])[task]
            return {**curve, "barrier": measure_barrier(curve["loss"], shares)}

        tasks = compute_each(run, resume, run.tasks, compute, "between models")
        return {"merger": label, "shares": shares, "tasks": tasks}

    def draw(self, data: Data) -> Drawing:
        curves = {
            f"{task}, barrier {entry['barrier']:.3f}": (data["shares"], entry["loss"])
            for task, entry in data["tasks"].items()
        }
        title = f"{display_name(data['merger'])} (0) to the expert (1)"
        panel = chart_lines(title, "share of the way", "loss", curves, logarithmic=True)
        return Drawing("Loss barriers", [panel])


@dataclass(frozen=True)
class HessianPath(Analysis):
    """Largest eigenvalue and trace of the loss's Hessian along `θ0 + λ τ_t`, on task t.

    Args:
        tasks: which; null: all of the run.
        points: from λ = 0 to 1, both included.
        samples: of the task's training part.
        iterations: Lanczos products at most, and vectors of the model's size in memory.
        tolerance: of the eigenvalue's residual, relative.
        products: of the trace's estimate; 0 leaves it out.
    """

    tasks: Annotated[list[str], MinLen(1)] | None = None
    points: int = 5
    samples: Count = 256
    iterations: Count = 30
    tolerance: Annotated[float, Gt(0)] = 0.01
    products: Annotated[int, Ge(0)] = 30

    def _list_tasks(self, run: Run) -> list[str]:
        names = list(run.tasks) if self.tasks is None else self.tasks
        check_tasks(run, names, "analysis.tasks")
        return names

    def describe_content(self, run: Run) -> dict[str, Any]:
        names = self._list_tasks(run)
        return self.describe(
            run, "hessian", names,
            shares=make_grid(0.0, 1.0, self.points), samples=self.samples, products=self.products,
            lanczos=[self.iterations, self.tolerance], seed=run.seed, **describe_scores(run, names),
        )  # fmt: skip

    def compute(self, run: Run, resume: Path) -> Data:
        names, shares = self._list_tasks(run), make_grid(0.0, 1.0, self.points)
        weights = Weights(run.model, run.base_state, read_states(run, names))

        def compute(cell: tuple[str, float]) -> Data:
            task, at = cell
            weights.move({task: at})
            return {"task": task, "at": at, **self._measure_point(run, task)}

        cells = [(task, at) for task in names for at in shares]
        points = compute_each(run, resume, cells, compute, "Hessian")
        return {"shares": shares, "points": list(points.values())}

    def _measure_point(self, run: Run, task: str) -> Data:
        chosen = sample(run, task, "train", self.samples)
        objective = chosen.objective
        batches = [
            to_device(objective.make_batch("train", index), run.device) for index in chosen.index.split(64)
        ]
        hessian = Hessian(objective.with_head(run.model), batches, causal=objective.causal)
        top = top_eigenvalues(
            hessian, hessian.draw_vector(run.seed), iterations=self.iterations, tolerance=self.tolerance
        )
        point: Data = {
            "eigenvalue": top.values[0],
            "residual": top.residuals[0],
            "converged": top.converged,
            "iterations": top.iterations,
        }
        if self.products:
            estimate = trace(hessian, hessian.draw_vector(), products=self.products, seed=run.seed)
            point |= {"trace": estimate.value, "trace_error": estimate.standard_error}
        return point

    def draw(self, data: Data) -> Drawing:
        panels = []
        for measure, name in (("eigenvalue", "largest eigenvalue"), ("trace", "trace (Hutch++)")):
            values: dict[str, list[float]] = {}
            spreads: dict[str, list[float]] = {}
            for point in (each for each in data["points"] if measure in each):
                values.setdefault(point["task"], []).append(point[measure])
                if measure == "trace":
                    spreads.setdefault(point["task"], []).append(point["trace_error"])
            if len(values) > 1:
                values["mean"] = [sum(each) / len(each) for each in zip(*values.values(), strict=True)]
            curves = {task: (data["shares"], each) for task, each in values.items()}
            if curves:
                at = "λ from θ0 (0) to the expert (1)"
                panels.append(chart_lines(name, at, name, curves, spreads=spreads))
        return Drawing("Curvature of the loss along fine-tuning", panels)


@dataclass(frozen=True, kw_only=True)
class JointTaskLinearity(OnSamples):
    """Joint-task loss between two experts, and `δ`, its height above the straight line (SAFT, Definition 2).

    `δ(α) = L(αθ_s + (1−α)θ_t) − αL(θ_s) − (1−α)L(θ_t)` with `L` the sum of both tasks' losses. 0 at both ends.

    Args:
        pairs: `[[a, b], …]`; null: every pair of the run.
        points: on the way, both ends included.
    """

    pairs: Annotated[list[list[str]], MinLen(1)] | None = None
    points: int = 11

    def describe_content(self, run: Run) -> dict[str, Any]:
        pairs, alphas = choose_pairs(run, self.pairs, default=None), make_grid(0.0, 1.0, self.points)
        return self.describe(run, "jtl", run.tasks, pairs=pairs, alphas=alphas)

    def compute(self, run: Run, resume: Path) -> Data:
        alphas, size = make_grid(0.0, 1.0, self.points), run.cfg.evaluation_batch_size
        weights = Weights(run.model, run.base_state, read_states(run, run.tasks))

        def compute(pair: tuple[str, str]) -> Data:
            chosen = self.take_samples(run, pair).values()
            losses = []
            for alpha in alphas:
                weights.move({pair[0]: alpha, pair[1]: 1 - alpha})
                losses.append(sum(task.score(run.model, size).loss for task in chosen))
            straight = [a * losses[-1] + (1 - a) * losses[0] for a in alphas]
            above = [loss - flat for loss, flat in zip(losses, straight, strict=True)]
            return {"pair": list(pair), "loss": losses, "delta": above}

        chosen_pairs = choose_pairs(run, self.pairs, default=None)
        pairs = compute_each(run, resume, chosen_pairs, compute, "between experts")
        return {"alphas": alphas, "pairs": list(pairs.values())}

    def draw(self, data: Data) -> Drawing:
        def make_curves(of: str) -> dict[str, Any]:
            return {" → ".join(reversed(e["pair"])): (data["alphas"], e[of]) for e in data["pairs"]}

        at, unit = "α of the first expert", "loss of both tasks (nats)"
        panels = [
            chart_lines("joint loss", at, unit, make_curves("loss"), logarithmic=True),
            chart_lines("above the straight line", at, "δ (nats)", make_curves("delta")),
        ]
        return Drawing(f"Joint-task loss linearity on {self.part}", panels)
