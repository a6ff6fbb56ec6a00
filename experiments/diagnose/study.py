"""Does what the stage diagnose measures of two experts foretell what merging them costs?

    python -m mergekit_lab +experiment=quickstart suite=glyphs8 'stage=[finetune,curvature]' joint=false \
        curvature=fisher store.root=STORE
    python experiments/diagnose/study.py --store STORE --out experiments/diagnose/results.json

Every pair of the eight experts is merged by task arithmetic, `θ0 + α(τ_i + τ_j)`. Its cost is one minus the
mean of accuracy over the expert's own, on the test part, at the α that is best on validation. Each measure is
ranked against the cost over the 28 pairs (Spearman).
"""

import argparse
import json
from datetime import date
from itertools import combinations
from pathlib import Path

import torch
from hydra import compose, initialize_config_dir
from torch import Tensor

from mergekit_lab.analysis import Interference, measure_layers
from mergekit_lab.checkpoints import open_checkpoint
from mergekit_lab.commands.diagnose import list_pairs
from mergekit_lab.evaluation import score
from mergekit_lab.merging import TaskArithmetic
from mergekit_lab.merging.inputs import open_inputs
from mergekit_lab.paths import find_conf_dir
from mergekit_lab.runs.curvature import declare_side_input
from mergekit_lab.runs.finetune import declare_expert
from mergekit_lab.runs.run import Run, load_state
from mergekit_lab.tasks import Part

COEFFICIENTS = (0.4, 0.6, 0.8, 1.0)


def correlate_ranks(x: list[float], y: list[float]) -> float:
    ranks = [torch.tensor(v).argsort().argsort().double() for v in (x, y)]
    return float(torch.corrcoef(torch.stack(ranks))[0, 1])


def open_run(store: str) -> Run:
    overrides = ["+experiment=quickstart", "suite=glyphs8", "curvature=fisher", f"store.root={store}"]
    with initialize_config_dir(str(find_conf_dir()), version_base="1.3"):
        return Run(compose("main", overrides), Path("."), {})


def evaluate(run: Run, state: dict[str, Tensor], task: str, part: Part) -> float:
    run.model.load_state_dict(state)
    return score(run.model, run.make_objective(task), part).value


def measure(run: Run) -> Interference:
    experts = {task: run.need(declare_expert(run, task)).find_file("model.safetensors") for task in run.tasks}
    sides = {
        t: run.need(declare_side_input(run, "fisher", t)).find_file("fisher.safetensors") for t in run.tasks
    }
    fishers = {task: open_checkpoint(file, task) for task, file in sides.items()}
    interference = Interference(tuple(experts), has_fishers=True)
    for layer, traces in measure_layers(
        open_inputs(run.base_state, experts, TaskArithmetic()), fishers=fishers
    ):
        interference.add(layer, traces)
    return interference


def compute_costs(run: Run) -> dict[tuple[str, str], tuple[float, float]]:
    """Cost and coefficient of every pair."""
    base, states = run.base_state, {task: load_state(run.need(declare_expert(run, task))) for task in run.tasks}
    own = {(t, p): evaluate(run, states[t], t, p) for t in states for p in ("validation", "test")}
    cost_by_pair = {}
    for pair in combinations(states, 2):
        first, second = (states[task] for task in pair)

        def measure_kept(alpha: float, part: str, pair=pair, first=first, second=second) -> float:
            merged = {n: base[n] + alpha * (first[n] + second[n] - 2 * base[n]) for n in base}
            return sum(evaluate(run, merged, task, part) / own[task, part] for task in pair) / 2

        alpha = max(COEFFICIENTS, key=lambda a: measure_kept(a, "validation"))
        cost_by_pair[pair] = (1 - measure_kept(alpha, "test"), alpha)
        print(pair, cost_by_pair[pair], flush=True)
    return cost_by_pair


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--store", required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    run = open_run(args.store)
    cost = compute_costs(run)
    rows = []
    interference = measure(run)
    for pair in list_pairs(interference):
        loss, alpha = cost[pair.experts]
        assert pair.harm is not None
        i, j = (interference.experts.index(name) for name in pair.experts)
        norms = [float(interference.total.norms[k]) for k in (i, j)]
        harm = interference.total.harm
        own = float(harm[i, j] / harm[i, i] + harm[j, i] / harm[j, j])
        rows.append(
            {"pair": pair.experts, "cost": loss, "coefficient": alpha, "cosine": pair.cosine,
             "sign_conflict": pair.sign_conflict, "canceling": pair.canceling, "overlap": pair.overlap,
             "harm": sum(pair.harm), "harm over own": own, "shorter norm": min(norms)}
        )  # fmt: skip
    measures = ("cosine", "sign_conflict", "canceling", "overlap", "harm", "harm over own", "shorter norm")
    rank = {m: round(correlate_ranks([r[m] for r in rows], [r["cost"] for r in rows]), 3) for m in measures}
    args.out.write_text(
        json.dumps({"date": str(date.today()), "spearman": rank, "pairs": rows}, indent=1) + "\n"
    )
    print(rank)


if __name__ == "__main__":
    main()
