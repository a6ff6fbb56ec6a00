"""Checkpoints that are there, compared over ways to merge them on one's own texts."""

import csv

import pytest
import torch
from composing import compose_config
from language import save_tiny
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file

from mergekit_lab import InputError
from mergekit_lab.programs import start
from mergekit_lab.reporting import read_records
from mergekit_lab.runs.settle import settle


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A tiny base, two experts of it, and a table of prompts and answers for each."""
    folder = tmp_path_factory.mktemp("inputs")
    base = save_tiny(folder / "base", "llama")
    for number, name in enumerate(("sums", "names")):
        expert = save_tiny(folder / name, "llama")
        weights = load_file(expert / "model.safetensors")
        torch.manual_seed(number)
        weights = {n: t + 0.01 * torch.randn_like(t) for n, t in weights.items()}
        save_file(weights, expert / "model.safetensors", {"format": "pt"})
        with (folder / f"{name}.csv").open("w", newline="") as stream:
            rows = csv.writer(stream)
            rows.writerows([["prompt", "answer"], *([f"{name} {n} + 1 =", str(n + 1)] for n in range(16))])
    return folder, base


def test_experts_of_one_s_own_are_compared_on_one_s_own_texts(inputs, tmp_path) -> None:
    folder, base = inputs
    arguments = [
        "+experiment=compare_mergers",
        f"base={base}",
        f"experts=[{folder}/sums,{folder}/names]",
        f"texts={{sums: {{source: {folder}/sums.csv, max_new_tokens: 2}}, names: {folder}/names.csv}}",
        "search.coefficients=[1.0]",
        *(
            "backbone.max_length=64",
            "progress=false",
            "device=cpu",
            "suite.name=mine",
            f"store.root={tmp_path}",
        ),
        *(
            "~mergers.dare",
            "~mergers.ties",
            "mergers.tsvm.coefficient=1.0",
            "mergers.task_arithmetic.coefficient=1.0",
        ),
    ]
    cfg, choices = compose_config(arguments)
    start(cfg, tmp_path / "run", choices, arguments)
    records = read_records(tmp_path / "run/records.jsonl")
    assert {r.label for r in records} == {"zero-shot", "experts", "average", "task_arithmetic", "tsvm"}
    assert {r.task for r in records} == {"sums", "names"}
    expert = next((tmp_path / "experts").glob("*/model.safetensors"))
    assert any(
        torch.equal(
            load_file(expert)["model.norm.weight"],
            load_file(folder / n / "model.safetensors")["model.norm.weight"],
        )
        for n in ("sums", "names")
    )


def settle_experts(experts: str):
    cfg, _ = compose_config(["+experiment=compare_mergers", "base=B", f"experts={experts}"])
    return OmegaConf.to_container(settle(cfg).experts)


def test_a_list_a_mapping_and_a_file_name_the_same_experts(tmp_path) -> None:
    (tmp_path / "list.txt").write_text("A\nB\n")
    wanted = {"stories": "A", "quantities": "B"}
    assert (
        settle_experts("[A,B]")
        == settle_experts("{quantities: B, stories: A}")
        == settle_experts(f"@{tmp_path}/list.txt")
        == wanted
    )


def test_what_is_to_be_compared_must_be_named() -> None:
    for overrides, message in (
        (["base=B"], "experts is not set"),
        (["experts=[A,B]"], "base is not set"),
    ):
        cfg, _ = compose_config(["+experiment=compare_mergers", *overrides])
        with pytest.raises(InputError, match=message):
            settle(cfg)
    for backbone in ("glyph_clip", "clip_vit_b32"):  # names its own base
        cfg, _ = compose_config(["+experiment=compare_mergers", f"backbone={backbone}", "experts=[A,B]"])
        assert settle(cfg).experts == {"stories": "A", "quantities": "B"}


def test_a_text_encoder_chooses_among_the_answers_of_one_s_own_texts(tmp_path) -> None:
    (tmp_path / "a.csv").write_text(
        "prompt,answer\n" + "".join(f"{n},{'no' if n % 3 else 'yes'}\n" for n in range(12))
    )
    texts = f"texts={{a: {tmp_path}/a.csv, b: {{source: {tmp_path}/a.csv, choices: [yes, no]}}}}"
    overrides = ["+experiment=compare_mergers", "backbone=hf_encoder", "base=B", "experts=[A,B]", texts]
    tasks = settle(compose_config(overrides)[0]).suite.tasks
    assert [list(task.choices) for task in tasks.values()] == [["no", "yes"], ["yes", "no"]]


def test_texts_of_one_name_are_refused_for_one_would_be_lost() -> None:
    overrides = ["+experiment=compare_mergers", "base=B", "experts=[A,B]", "texts=[a/train.csv,b/train.csv]"]
    with pytest.raises(InputError, match="several files of the name train"):
        settle(compose_config(overrides)[0])


@pytest.mark.parametrize(
    ("experts", "message"),
    [("[A]", "1 experts.*for 2 tasks"), ("{a: A}", "'a'")],
)
def test_experts_that_are_not_one_a_task_are_refused(experts: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        settle_experts(experts)
