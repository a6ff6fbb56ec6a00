"""Parametrizations, budgets and fitted offsets in runs: what is trained, how it is keyed, what is evaluated."""

import json
from pathlib import Path

import pytest
import torch
from composing import TINY, compose_config, go

from mergekit_lab import InputError
from mergekit_lab.backbones import OpenClip, linearize
from mergekit_lab.checkpoints import open_checkpoint
from mergekit_lab.evaluation import score
from mergekit_lab.optim import fit_offset
from mergekit_lab.paths import find_conf_dir
from mergekit_lab.reporting import read_records
from mergekit_lab.runs.curvature import declare_side_input
from mergekit_lab.runs.finetune import declare_expert, declare_fit, plan_joint_settings
from mergekit_lab.runs.run import Run, load_state
from mergekit_lab.schema.run import check, count_evaluations_a_step
from mergekit_lab.training import TrainingSettings

BASE = OpenClip("glyph-clip", "asset:glyph_clip")
ONLY_DIGITS = ["~suite.tasks.latin", "joint=false", "training.steps=2", "training.batch_size=8"]
FINETUNINGS = [f.stem for f in sorted((find_conf_dir() / "finetuning").glob("*.yaml"))]
OPTIMIZERS = [f.stem for f in sorted((find_conf_dir() / "optimizer").glob("*.yaml"))]


def make_run(folder: Path, store: Path, *overrides: str) -> Run:
    cfg, choices = compose_config([*TINY, f"store.root={store}", *overrides])
    check(cfg)
    return Run(cfg, folder, choices)


def finish(folder: Path, store: Path, *overrides: str) -> Run:
    go(folder, store, *overrides)
    return make_run(folder, store, *overrides)


def read_manifests(store: Path, kind: str) -> list[dict]:
    return [json.loads(f.read_text()) for f in (store / kind).glob("*/manifest.json")]


@pytest.mark.parametrize("finetuning", FINETUNINGS)
def test_a_run_stores_experts_of_every_parametrization_under_the_bases_names(finetuning: str, tmp_path) -> None:
    overrides = ["stage=finetune", *ONLY_DIGITS, f"finetuning={finetuning}", "optimizer=asam"]
    run = finish(tmp_path / "run", tmp_path / "store", *overrides)
    base, expert = BASE.make_model().state_dict(), load_state(run.need(declare_expert(run, "digits")))
    assert {n: t.shape for n, t in expert.items()} == {n: t.shape for n, t in base.items()}
    moved = {n for n, t in base.items() if not torch.equal(expert[n], t)}
    projections = {n for n in base if n.endswith(("attn.in_proj_weight", "attn.out_proj.weight"))}
    assert moved == (projections if finetuning in ("attention_linear", "lora") else set(base))


def test_a_run_of_linearized_experts_evaluates_the_expansion_at_the_merged_weights(tmp_path) -> None:
    overrides = ["finetuning=linearized", "training.lr=1e-2", "merger=task_arithmetic", "joint=false"]
    run = finish(tmp_path / "run", tmp_path / "store", *overrides)
    (record,) = [r for r in read_records(tmp_path / "run/records.jsonl") if r.merger and r.task == "latin"]
    assert record.finetuning == "linearized"
    (merged,) = read_manifests(tmp_path / "store", "merged")
    assert merged["content"]["finetuning"] == {"_target_": "mergekit_lab.backbones.Linearized"}
    state = load_state(run.store.find("merged", merged["content"]))

    def evaluate_on_latin(model) -> float:
        return score(model, run.make_objective("latin"), "test").value

    assert evaluate_on_latin(linearize(BASE.make_model(), state)) == pytest.approx(record.value)
    dense = BASE.make_model()
    dense.load_state_dict(state)
    assert evaluate_on_latin(dense) != pytest.approx(record.value)


def test_fishers_of_linearized_experts_have_the_bases_names(tmp_path) -> None:
    overrides = ["finetuning=linearized", "merger=fisher", "joint=false", "training.steps=1"]
    run = finish(
        tmp_path / "run", tmp_path / "store", *overrides, "training.warmup_steps=0", "curvature.samples=4"
    )
    side = run.need(declare_side_input(run, "fisher", "digits"))
    fisher = dict(open_checkpoint(side.find_file("fisher.safetensors")))
    assert fisher.keys() == {n for n, t in BASE.make_model().state_dict().items() if t.is_floating_point()}
    assert all(float(t.max()) > 0 for t in fisher.values())


def test_a_parametrization_and_its_numbers_enter_the_experts_key(tmp_path) -> None:
    cases = [[f"finetuning={f}"] for f in FINETUNINGS] + [["finetuning=lora", "finetuning.rank=4"]]
    keys = {declare_expert(make_run(tmp_path, tmp_path, *case), "digits").key for case in cases}
    assert len(keys) == len(cases)


def test_records_name_the_base_of_an_optimizer_unless_it_is_adamw(tmp_path) -> None:
    assert make_run(tmp_path, tmp_path, "optimizer=sam").name_optimizer() == "sam"
    more = ["optimizer=sam", "optimizer@optimizer.base=sgd", "+optimizer@optimizer_of.digits=mergopt"]
    assert make_run(tmp_path, tmp_path, *more).name_optimizer() == "sam over sgd, mergopt digits"


def plan_settings(*overrides: str) -> TrainingSettings:
    cfg, _ = compose_config([*TINY, *overrides])
    return TrainingSettings(**cfg.training).plan(count_evaluations_a_step(cfg.optimizer))


def test_a_budget_of_gradient_evaluations_gives_every_optimizer_the_steps_it_pays_for() -> None:
    budget = ["training.budget=gradient_evaluations", "training.steps=300", "training.warmup_steps=30"]
    cfg, _ = compose_config([*TINY, *budget, *(f"+optimizer@optimizer_of.{o}={o}" for o in OPTIMIZERS)])
    settings = TrainingSettings(**cfg.training)
    steps = {o: settings.plan(count_evaluations_a_step(cfg.optimizer_of[o])).steps for o in OPTIMIZERS}
    once = {"adamw", "sgd", "mergopt", "rwp", "swa"}
    assert steps == {o: 300 if o in once else 150 for o in OPTIMIZERS}
    cases = {
        "optimizer=sam optimizer.ascent_fraction=0.25": 240,
        "optimizer=wasam optimizer.ascent_fraction=0.1": 272,
        "optimizer=sam optimizer.rho=0": 300,
        "optimizer=mergopt optimizer.worst_of=4": 60,
        "optimizer=rwp optimizer.alpha=0.5": 150,
        "optimizer=pgn training.gradient_evaluations=77": 38,
    }
    assert {case: plan_settings(*budget, *case.split()).steps for case in cases} == cases
    assert plan_settings(*budget, "optimizer=sam").warmup_steps == 15


def test_an_equal_number_of_steps_is_the_same_expert_whatever_the_budget_was(tmp_path) -> None:
    def make_expert_key(*overrides: str) -> str:
        run = make_run(tmp_path, tmp_path, "training.steps=40", "training.warmup_steps=4", *overrides)
        return declare_expert(run, "digits").key

    assert make_expert_key() == make_expert_key("training.budget=gradient_evaluations")
    assert make_expert_key("optimizer=sam") != make_expert_key(
        "optimizer=sam", "training.budget=gradient_evaluations"
    )
    halved = [*("optimizer=sam", "training.steps=20", "training.warmup_steps=2")]
    assert make_expert_key(*halved) == make_expert_key("optimizer=sam", "training.budget=gradient_evaluations")
    seconds = ["training.budget=seconds", "training.seconds=1"]
    assert (
        len({make_expert_key(), make_expert_key(*seconds), make_expert_key(*seconds[:1], "training.seconds=2")})
        == 3
    )
    assert declare_expert(make_run(tmp_path, tmp_path, *seconds), "digits").content["machine"].startswith("cpu")


def test_optimizers_that_average_plan_over_the_steps_of_their_budget(tmp_path) -> None:
    overrides = ["optimizer=wasam", "training.budget=gradient_evaluations", "training.batch_size=4"]
    go(tmp_path / "run", tmp_path / "store", *overrides, "joint=false", "stage=finetune", "training.steps=8")
    assert {m["info"]["step"] for m in read_manifests(tmp_path / "store", "experts")} <= {1, 2, 3, 4}
    assert {m["content"]["training"]["steps"] for m in read_manifests(tmp_path / "store", "experts")} == {4}


def test_a_run_under_a_clock_says_so_and_the_joint_model_has_the_budget_of_all(tmp_path, caplog) -> None:
    overrides = ["training.budget=seconds", "training.seconds=0.3", "training.batch_size=4", "stage=finetune"]
    with caplog.at_level("INFO"):
        run = finish(tmp_path / "run", tmp_path / "store", *overrides)
    assert "not reproducible bit for bit" in caplog.text
    assert plan_joint_settings(run).seconds == pytest.approx(0.6)
    assert all(m["info"]["step"] >= 1 for m in read_manifests(tmp_path / "store", "experts"))


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        (["training.budget=second"], "did you mean 'seconds'"),
        (["training.budget=seconds"], r"needs training\.seconds"),
        (["training.seconds=3"], r"training\.seconds is 3, .*set training\.budget=seconds"),
        (["training.budget=seconds", "training.seconds=-1"], "must be positive"),
        (["training.gradient_evaluations=3"], r"set training\.budget=gradient_evaluations"),
        (
            ["training.budget=gradient_evaluations", "training.gradient_evaluations=1", "optimizer=sam"],
            "step, which takes 2",
        ),
        (["training.budget=seconds", "training.seconds=3", "optimizer=swa"], "SWA must know"),
        (
            ["training.budget=seconds", "training.seconds=3", "+optimizer@optimizer_of.digits=ssamd"],
            "SSAMD must know",
        ),
        (["trainer=fsdp", "finetuning=linearized"], "Linearized.*trainer=ddp"),
        (["trainer=fsdp", "finetuning=lora"], "LoRA needs them whole"),
        (["trainer=fsdp", "+optimizer@optimizer_of.digits=rwp"], "RWP needs them whole"),
        (["training.accumulate=0"], r"training\.accumulate is 0.*least 1"),
        (["training.accumulate=17"], r"training\.batch_size = 16"),
        (["optimizer=mergopt", "optimizer.scale=fit", "finetuning=lora"], "trains factors"),
        (["optimizer=mergopt", "optimizer.scale=fit", "optimizer.loc=1e-3"], "set loc=0"),
        (["optimizer=mergopt", "optimizer.scale=fitt"], r"scale is 'fitt'.*'fit'"),
        (["finetuning.rank=3"], "rank"),
        (["finetuning=lora", "finetuning.rank=0"], r"finetuning\.rank is 0"),
        (["finetuning._target_=mergekit_lab.backbones.OpenClip", "+finetuning.architecture=a",
          "+finetuning.weights=null"], "must be a Parametrization"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused_before_any_work(overrides, match: str, tmp_path) -> None:
    with pytest.raises((InputError, Exception), match=match):
        make_run(tmp_path, tmp_path, *overrides)


def test_offsets_are_fitted_to_the_task_vectors_of_the_base_optimizers_experts(tmp_path, monkeypatch) -> None:
    store, only = tmp_path / "store", ["stage=finetune", *ONLY_DIGITS]
    fitted = [*only, "optimizer=mergopt", "optimizer.scale=fit"]
    run = finish(tmp_path / "run", store, *fitted)
    plain = make_run(tmp_path, store, *only)
    pilot = load_state(plain.need(declare_expert(plain, "digits")))
    base = BASE.make_model().state_dict()
    wanted = fit_offset({n: pilot[n] - t for n, t in base.items()})
    fit = run.need(declare_fit(run)).info
    assert (fit["loc"], fit["scale"]) == (wanted.loc, wanted.scale)
    settings = [f"optimizer.loc={wanted.loc!r}", f"optimizer.scale={wanted.scale!r}"]
    by_hand = finish(tmp_path / "run", store, *only, "optimizer=mergopt", *settings)
    expert, same = (
        load_state(run.need(declare_expert(run, "digits"))),
        load_state(by_hand.need(declare_expert(by_hand, "digits"))),
    )
    assert all(torch.equal(expert[n], t) for n, t in same.items())
    assert len(read_manifests(store, "experts")) == 3
    monkeypatch.setattr("mergekit_lab.training.fit.finetune", None)
    go(tmp_path / "run", store, *fitted)
    changed = make_run(tmp_path, store, *fitted, "optimizer.base.eps=1e-7")
    assert declare_expert(changed, "digits").key != declare_expert(run, "digits").key
