"""Optuna chooses runs by what they return, and they end in one comparison."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from stages.conftest import composed
from stages.test_sweeps import sweep

from mergekit_lab import InputError
from mergekit_lab.reporting import read_records
from mergekit_lab.stages.config import check


def evaluated(store: Path, kind: str) -> list[float]:
    """Values on validation of all models of a kind."""
    kept = [json.loads(file.read_text()) for file in store.glob("evaluations/*/manifest.json")]
    models = {folder.name for folder in (store / kind).iterdir()}
    wanted = [e for e in kept if e["content"]["split"] == "validation" and e["content"]["model"] in models]
    return [each["info"]["value"] for each in wanted]


SEARCH = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=2", "merger=ties", "merger.density=interval(0.1,0.9)"]


@pytest.mark.slow
def test_the_better_of_two_trials_is_named_and_all_are_compared(tmp_path) -> None:
    if find_spec("optuna") is None:
        pytest.skip("optuna is not installed: it comes with the extra `sweepers`")
    told = sweep(tmp_path, *SEARCH, "merger.coefficient=1.0")
    values = [float(line.split()[1]) for line in told.splitlines() if line.startswith("objective: ")]
    found = OmegaConf.load(tmp_path / "run/optimization_results.yaml")
    assert len(values) == 2
    assert found.best_value == pytest.approx(max(values), abs=1e-4)
    assert values[found.best_job] == max(values)
    job = OmegaConf.load(tmp_path / "run" / str(found.best_job) / ".hydra/config.yaml")
    assert job.merger.density == pytest.approx(found.best_params["merger.density"])
    assert {r.merger for r in read_records(tmp_path / "run/records.jsonl")} == {None, "ties"}
    (expert,), merged = (evaluated(tmp_path / "store", kind) for kind in ("experts", "merged"))
    assert sorted(value / expert for value in merged) == pytest.approx(sorted(values), abs=1e-4)


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        (["objective=normalized", "merger=ties"], "objective is 'normalized'; did you mean 'normalised'"),
        (["objective=value"], "objective=value is that of merged models: set merger=NAME"),
    ],
)
def test_an_objective_that_cannot_be_is_refused(overrides: list[str], match: str) -> None:
    with pytest.raises(InputError, match=match):
        check(composed(overrides)[0])
