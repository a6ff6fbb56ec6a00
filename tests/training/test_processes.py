"""One expert trained by two processes: ranks that agree after every step, and the weights of one process."""

from pathlib import Path

import pytest
import torch
from language import save_tiny
from training.processes import LANGUAGE, OPTIMIZERS, RESUMED, SHARDED, train, train_all, train_language

from mergekit_lab.workers import run_together

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated")


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    folder: Path = tmp_path_factory.mktemp("models")
    for architecture in LANGUAGE:
        save_tiny(folder / architecture, architecture)
    return folder


@pytest.fixture(scope="module")
def ranks(models, tmp_path_factory) -> list[dict]:
    folder: Path = tmp_path_factory.mktemp("ranks")
    run_together(train_all, (str(folder), str(models)), ["cpu", "cpu"])
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_ranks_agree_after_every_step_and_give_what_one_process_gives(ranks, name, tmp_path) -> None:
    first, second = (rank[f"ddp {name}"] for rank in ranks)
    assert len(first["seen"]) == 6
    assert first["seen"] == second["seen"]
    assert second["done"] is None
    alone = train(name, tmp_path)
    for key, value in alone["state"].items():
        torch.testing.assert_close(first["done"]["state"][key], value, rtol=0, atol=2e-5)
    assert [p["step"] for p in first["done"]["curve"]] == [p["step"] for p in alone["curve"]]


def test_ranks_whose_clocks_differ_take_the_same_steps(ranks) -> None:
    first, second = (rank["clock"] for rank in ranks)
    assert len(first) > 3
    assert first == second


@pytest.mark.parametrize("name", SHARDED)
def test_sharded_weights_give_what_one_process_gives(ranks, name, tmp_path) -> None:
    weights = ranks[0][f"fsdp {name}"]["done"]["state"]
    for key, value in train(name, tmp_path)["state"].items():
        torch.testing.assert_close(weights[key], value, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", RESUMED)
def test_a_sharded_run_that_was_cut_goes_on_bit_for_bit(ranks, name) -> None:
    whole, resumed = (ranks[0][f"fsdp {name}{how}"]["done"] for how in ("", " resumed"))
    assert resumed["curve"] == whole["curve"]
    for key, value in whole["state"].items():
        assert torch.equal(resumed["state"][key], value), key


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("architecture", LANGUAGE)
def test_a_language_model_in_two_processes_is_that_of_one(
    ranks, models, strategy, architecture, tmp_path
) -> None:
    assert ranks[1][f"{strategy} {architecture}"] is None
    result, alone = ranks[0][f"{strategy} {architecture}"], train_language(architecture, models, tmp_path)
    assert result["state"].keys() == alone["state"].keys()
    for name, value in alone["state"].items():
        torch.testing.assert_close(result["state"][name], value, rtol=0, atol=2e-5)
    assert result["value"] == alone["value"]
