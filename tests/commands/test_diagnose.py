"""Stage diagnose: from checkpoints people have to tables and JSON."""

import json
import shlex
from pathlib import Path

import pytest
import torch
from checkpoints.models import make_llama, save_three, tune
from composing import compose_config

from mergekit_lab import InputError
from mergekit_lab.checkpoints import write_tensors
from mergekit_lab.programs import start


def go(folder, *overrides: str) -> dict:
    cfg, choices = compose_config(["+experiment=diagnose", "progress=false", "device=cpu", *overrides])
    start(cfg, folder, choices, list(overrides))
    return json.loads((folder / "diagnosis.json").read_text())


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return save_three(make_llama, tmp_path_factory.mktemp("models"))


def test_two_folders_give_experts_pairs_layers_and_advice(folders, tmp_path, capsys) -> None:
    base, experts = folders
    report = go(tmp_path, f"base={base}", f"experts=[{experts['cars']},{experts['svhn']}]")
    assert report["experts"] == ["cars", "svhn"]
    (pair,) = report["pairs"]
    assert pair["experts"] == ["cars", "svhn"]
    assert abs(pair["cosine"]) < 0.1
    assert 0.4 < pair["canceling"] < 0.6
    assert sum(share for _, share in pair["where"]) <= 1
    assert len(report["layers"]) == len(make_llama().state_dict())
    wanted = sum(
        float((p - b).detach().square().sum())
        for p, b in zip(tune(make_llama(), 1).parameters(), make_llama().parameters(), strict=True)
    )
    assert report["overall"]["norms"][0] == pytest.approx(wanted**0.5, rel=1e-4)
    shown = capsys.readouterr().out
    for text in ("cars", "svhn", "Where most cancels", "merger=tsvm", "evidence", *report["commands"]):
        assert text in shown
    for command in report["commands"]:
        cfg, _ = compose_config(shlex.split(command)[3:])
        assert (cfg.base, list(cfg.experts)) == (str(base), [str(experts["cars"]), str(experts["svhn"])])


def test_fishers_add_the_predicted_harm(folders, tmp_path, capsys) -> None:
    base, experts = folders
    for name, level in (("cars", 1.0), ("svhn", 100.0)):
        write_tensors(
            tmp_path / f"{name}.safetensors",
            {n: torch.full_like(p, level) for n, p in make_llama().state_dict().items()},
        )
    report = go(
        tmp_path / "out",
        f"base={base}",
        f"experts=[{experts['cars']},{experts['svhn']}]",
        f"fishers=[{tmp_path}/cars.safetensors,{tmp_path}/svhn.safetensors]",
    )
    on_cars, on_svhn = report["pairs"][0]["harm"]
    assert on_svhn == pytest.approx(100 * on_cars, rel=0.05)
    assert any("normalize=trace" in a["text"] for a in report["advice"])
    (bound,) = (x for x in report["layers"] if x["name"] == "model.embed_tokens.weight")
    assert 0 < bound["lost_curvature"] < 1
    total = report["bound"]
    assert total["residual"] == pytest.approx(sum(x.get("residual", 0.0) for x in report["layers"]))
    assert total["bound"] == pytest.approx((total["conflict"] ** 0.5 + total["residual"] ** 0.5) ** 2 / 2)
    names = set(bound) - {"name", "shape"}
    text = (Path(__file__).parents[2] / "docs/diagnose.md").read_text()
    assert {"lost_curvature", "conflict", "residual", "bound"} <= {
        name for name in names if f"`{name}`" in text
    }
    shown = capsys.readouterr().out
    assert "harm" in shown
    assert "Theorem 2" in shown


def test_a_fisher_with_nan_is_named_by_file_and_tensor(folders, tmp_path) -> None:
    base, experts = folders
    state = {n: torch.ones_like(p) for n, p in make_llama().state_dict().items()}
    write_tensors(tmp_path / "sound.safetensors", state)
    state["model.norm.weight"] = state["model.norm.weight"].clone().fill_(float("nan"))
    write_tensors(tmp_path / "bad.safetensors", state)
    with pytest.raises(InputError, match=r"'model.norm.weight'.*\(.*bad.safetensors"):
        go(
            tmp_path / "out",
            f"base={base}",
            f"experts=[{experts['cars']},{experts['svhn']}]",
            f"fishers=[{tmp_path}/sound.safetensors,{tmp_path}/bad.safetensors]",
        )


def test_layers_are_told_apart_in_a_narrow_terminal_and_leading_singular_values_are_kept(
    folders, tmp_path, capsys, monkeypatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    base, experts = folders
    report = go(tmp_path, f"base={base}", f"experts=[{experts['cars']},{experts['svhn']}]")
    shown = capsys.readouterr().out
    assert "…" not in shown.split("Where most cancels")[1].split("1. merger")[0]
    (matrix,) = (x for x in report["layers"] if x["name"] == "model.embed_tokens.weight")
    assert len(matrix["values"]) == 2
    for values, norm, energy in zip(matrix["values"], matrix["norms"], matrix["energy"], strict=True):
        assert sorted(values, reverse=True) == values
        assert len(values) == min(16, matrix["rank"])
        assert sum(v * v for v in values) <= energy * norm**2 * 1.001


def test_the_documentation_tells_of_everything_a_layer_has(folders, tmp_path) -> None:
    base, experts = folders
    report = go(tmp_path, f"base={base}", f"experts=[{experts['cars']},{experts['svhn']}]", "include=['*mlp*']")
    text = (Path(__file__).parents[2] / "docs/diagnose.md").read_text()
    for name in {*report["layers"][0], *report["overall"]} - {"name", "shape"}:
        assert f"`{name}`" in text or f"| {name.replace('_', ' ')} |" in text, name


def test_one_expert_and_chosen_tensors(folders, tmp_path) -> None:
    base, experts = folders
    report = go(tmp_path, f"base={base}", f"experts={{only: {experts['cars']}}}", "include=['*mlp*']")
    assert report["pairs"] == []
    assert all("mlp" in layer["name"] for layer in report["layers"])


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        (["experts=[a]"], "base is not set"),
        (["base=here"], "experts is not set"),
        (["base=nowhere", "experts=[a]"], "nowhere"),
        (["base=x", "experts=[a]", "+rnak=3"], "'rnak'.*'rank'"),
    ],
)
def test_mistakes_are_named(overrides: list[str], match: str, tmp_path) -> None:
    with pytest.raises(InputError, match=match):
        go(tmp_path, *overrides)
