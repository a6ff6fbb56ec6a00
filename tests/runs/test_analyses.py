"""What analyses compute, without a run."""

import math

import pytest
import torch

from mergekit_lab import InputError
from mergekit_lab.analysis.plane import measure_barrier
from mergekit_lab.kept_results import keep_results
from mergekit_lab.runs.analyses import ablations, contract, paths, planes, vectors
from mergekit_lab.schema.run import Curvature


def test_rows_with_nan_are_read_back_and_written_as_null(tmp_path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('[["a", 1], {"loss": [null, 1.0]}]\n["cut')
    recall = keep_results(lambda cell: {"loss": [math.inf]}, file)
    assert math.isnan(recall(("a", 1))["loss"][0])
    assert recall(("b", 2)) == {"loss": [math.inf]}
    assert file.read_text().splitlines()[2] == '[["b", 2], {"loss": [null]}]'
    assert math.isnan(measure_barrier([1.0, math.nan, 0.0], [0.0, 0.5, 1.0]))


def test_a_plane_of_the_cloud_is_that_of_a_singular_value_decomposition() -> None:
    generator = torch.Generator().manual_seed(0)
    base = {"a": torch.randn(3, 4, generator=generator), "steps": torch.tensor(2)}
    ends = {
        t: {"a": base["a"] + torch.randn(3, 4, generator=generator), "steps": torch.tensor(2)} for t in "wxyz"
    }
    shares, coordinates, explained = planes.find_principal_plane(ends, base)
    vectors = torch.stack([(end["a"] - base["a"]).flatten().double() for end in ends.values()])
    centered = vectors - vectors.mean(dim=0)
    _, s, vh = torch.linalg.svd(centered, full_matrices=False)
    components = shares @ vectors
    torch.testing.assert_close(components @ components.T, torch.eye(2, dtype=torch.float64))
    torch.testing.assert_close(
        (components @ vh[:2].T).abs(), torch.eye(2, dtype=torch.float64), atol=1e-6, rtol=0
    )
    torch.testing.assert_close(coordinates, centered @ components.T)
    assert explained == pytest.approx((s[:2] ** 2 / (s**2).sum()).tolist())


def test_no_coefficient_is_chosen_on_test_where_fishers_shrink() -> None:
    with pytest.raises(InputError, match=r"analysis.part=test"):
        ablations.FisherFraction(coefficients=(0.5, 1.0), part="test")
    assert ablations.FisherFraction().coefficients == (1.0,)


def test_a_value_out_of_range_is_refused_where_no_configuration_gives_it() -> None:
    with pytest.raises(InputError, match=r"analysis\.rank is 0; .*1"):
        vectors.TaskVectors(rank=0)


def test_a_share_of_samples_is_whole_batches_and_one_at_least() -> None:
    curvature = Curvature(
        kind=None, samples=None, fraction=0.005, batch=64, estimate="per_sample", sampled=False, chunk=8
    )
    assert [curvature.count(images) for images in (3384, 19850, 60000)] == [64, 64, 256]


def test_what_bfloat16_rounds_away_of_a_task_vector_is_counted() -> None:
    base = torch.ones(2000, dtype=torch.bfloat16)
    moved = 1 + torch.linspace(-0.004, 0.004, 2000)
    measure = vectors.EntryDistribution(bins=11).measure_entries
    exact = measure(contract.subtract(moved, base))
    rounded = measure(contract.subtract(moved.bfloat16(), base))
    assert exact["share_unchanged"] == 0
    assert rounded["share_unchanged"] > 0.5


def test_the_mean_over_tasks_stands_beside_their_curvatures() -> None:
    points = [
        {"task": task, "at": at, "eigenvalue": value + at}
        for task, value in (("a", 1.0), ("b", 3.0))
        for at in (0.0, 1.0)
    ]
    drawing = paths.HessianPath().draw({"shares": [0.0, 1.0], "points": points})
    mean = [(p["x"], p["y"]) for p in drawing.panels[0]["data"]["values"] if p["name"] == "mean"]
    assert mean == [(0.0, 2.0), (1.0, 3.0)]
