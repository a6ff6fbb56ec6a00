"""Runs over language models: from a folder and text to a table, with what is theirs alone."""

import json

import pytest
import torch
from composing import compose_config
from language import Colors, make_tiny_backbone

from mergekit_lab import InputError
from mergekit_lab.analysis.plane import Sample, Weights, cross_task_linearity, find_blocks
from mergekit_lab.checkpoints import open_checkpoint
from mergekit_lab.programs import start
from mergekit_lab.reporting import read_records
from mergekit_lab.runs.finetune import declare_expert, plan_joint_settings, plan_settings
from mergekit_lab.runs.run import Run, load_state
from mergekit_lab.schema.run import check

SMALL = [
    *("suite=word_problems", "training=language", "joint=false", "progress=false", "device=cpu"),
    *("trainer.accelerator=cpu", "training.precision=32-true", "training.steps=2", "training.warmup_steps=0"),
    *(
        "training.batch_size=4",
        "backbone.max_length=128",
        "curvature.samples=3",
        "search.coefficients=[0.5,1.0]",
    ),
    *[
        f"suite.tasks.{task}.{part}_size={size}"
        for task in ("stories", "quantities")
        for part, size in (("train", 24), ("validation", 6), ("test", 8))
    ],
]


def configure(folder, architecture, store, *more):
    backbone = "hf_seq2seq" if architecture == "t5" else "hf_causal"
    overrides = [f"backbone={backbone}", f"backbone.source={folder}", *SMALL, f"store.root={store}", *more]
    cfg, choices = compose_config(overrides)
    check(cfg)
    return cfg, choices


@pytest.mark.parametrize("architecture", ["llama", "t5"])
def test_a_run_over_language_models_ends_in_records_of_their_metric(architecture, folders, tmp_path) -> None:
    mergers = ["backbone.note='random weights'"]
    mergers += [f"+merger@mergers.{name}={name}" for name in ("task_arithmetic", "epimer", "regmean")]
    mergers += [f"mergers.{name}.coefficient=0.5" for name in ("task_arithmetic", "epimer")]
    cfg, choices = configure(
        folders[architecture], architecture, tmp_path / "store", "training.lr=1e-2", *mergers
    )
    start(cfg, tmp_path / "run", choices, [])
    records = read_records(tmp_path / "run/records.jsonl")
    assert {r.metric for r in records} == {"accuracy"}
    assert {r.label for r in records} == {"zero-shot", "experts", "task_arithmetic", "epimer", "regmean"}
    manifests = [json.loads(f.read_text()) for f in (tmp_path / "store/evaluations").glob("*/manifest.json")]
    assert all(set(m["info"]["metrics"]) == {"accuracy", "lenient_accuracy"} for m in manifests)
    scoring = {m["content"]["scoring"]["answering"] for m in manifests}
    assert scoring == {"generate"}
    assert "(random weights)" in (tmp_path / "run/report.html").read_text()
    merged = next(r for r in records if r.merger == "task_arithmetic")
    names = set(open_checkpoint(tmp_path / "store/merged" / merged.model_key))
    assert names == set(Run(cfg, tmp_path, choices).base_state)


def test_what_is_shown_to_a_model_names_its_expert_and_how_it_answers_only_its_scores(
    folders, tmp_path
) -> None:
    def list_keys(*more):
        context = Run(*_make_args(configure(folders["llama"], "llama", tmp_path, *more), tmp_path))
        return declare_expert(context, "stories").content, context.describe_scoring("stories")

    expert, scoring = list_keys()
    assert list_keys("backbone.prompt=plain")[0] != expert
    assert list_keys("backbone.max_length=64")[0] != expert
    assert list_keys("backbone.packing=true")[0] != expert
    assert list_keys("backbone.precision=bfloat16")[0] == expert
    assert list_keys("backbone.precision=bfloat16")[1] != scoring
    assert list_keys("suite.tasks.stories.max_new_tokens=3")[0] == expert


def _make_args(composition, folder):
    cfg, choices = composition
    return cfg, folder, choices


def test_epochs_are_steps_of_each_tasks_own_data(folders, tmp_path) -> None:
    more = ["training.epochs=2", "training.epochs_of={quantities: 0.5}", "training.warmup_steps=1"]
    context = Run(*_make_args(configure(folders["llama"], "llama", tmp_path, *more), tmp_path))
    assert (plan_settings(context, "stories").steps, plan_settings(context, "stories").warmup_steps) == (12, 6)
    assert plan_settings(context, "quantities").steps == 3
    assert plan_joint_settings(context).steps == 15
    other = Run(*_make_args(configure(folders["llama"], "llama", tmp_path, "training.steps=12",
                                      "training.warmup_steps=6"), tmp_path))  # fmt: skip
    assert declare_expert(other, "stories").content == declare_expert(context, "stories").content
    equal = Run(*_make_args(configure(folders["llama"], "llama", tmp_path, *more, "optimizer=sam",
                                      "training.budget=gradient_evaluations"), tmp_path))  # fmt: skip
    settings = plan_settings(equal, "stories")
    assert (settings.steps, settings.warmup_steps, plan_settings(equal, "quantities").steps) == (6, 3, 1)


def test_epochs_may_name_tasks_that_are_left_out_but_no_slip(folders, tmp_path) -> None:
    def compose_budget(epochs):
        return Run(
            *_make_args(
                configure(folders["llama"], "llama", tmp_path, f"training.epochs_of={epochs}"), tmp_path
            )
        )

    assert (
        plan_settings(compose_budget("{stories: 2, quantities_old: 3, quantities: 1}"), "stories").steps == 12
    )
    for epochs in ("{storeis: 1}", "{storeis: 1, quantities: 2}"):
        with pytest.raises(InputError, match=r"'storeis'.*'stories'"):
            compose_budget(epochs)
    with pytest.raises(InputError, match="'elsewhere'"):
        compose_budget("{elsewhere: 1}")


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        (
            ["training.batch_size=6", "training.accumulate=2"],
            "training.batch_size.*of 4 ",
        ),
        (["training.batch_size=1"], "share 1 samples"),
        (
            ["training.accumulate=2", "backbone.packing=true"],
            "different numbers of rows",
        ),
    ],
)
def test_processes_that_would_wait_for_each_other_for_ever_are_refused(
    settings, match, folders, tmp_path
) -> None:
    composition = configure(folders["llama"], "llama", tmp_path, "trainer=fsdp", "trainer.processes=2",
                      "trainer.accelerator=cpu", *settings)  # fmt: skip
    with pytest.raises(InputError, match=match):
        Run(*_make_args(composition, tmp_path))


def test_a_linearized_model_that_would_compute_activations_again_is_refused(folders, tmp_path) -> None:
    with pytest.raises(InputError, match=r"set backbone\.checkpointing=false"):
        configure(folders["llama"], "llama", tmp_path, "finetuning=linearized", "backbone.checkpointing=true")


def test_experts_of_several_optimizers_are_merged(folders, tmp_path) -> None:
    more = ["+optimizer@optimizer_of.quantities=mergopt", "merger=average"]
    cfg, choices = configure(folders["llama"], "llama", tmp_path / "store", *more)
    start(cfg, tmp_path / "run", choices, [])
    assert {r.optimizer for r in read_records(tmp_path / "run/records.jsonl")} == {"adamw, mergopt quantities"}
    plain, _ = configure(folders["llama"], "llama", tmp_path / "store")
    mixed, alone = Run(cfg, tmp_path, choices), Run(plain, tmp_path, choices)
    assert declare_expert(mixed, "stories").content == declare_expert(alone, "stories").content
    assert declare_expert(mixed, "quantities").content != declare_expert(alone, "quantities").content


@pytest.mark.parametrize("architecture", ["llama", "t5"])
def test_padding_is_in_no_gram(architecture, folders, tmp_path) -> None:
    asked = ["stage=[finetune,curvature]", "curvature=gram", "curvature.samples=3", "only=[stories]"]
    cfg, choices = configure(folders[architecture], architecture, tmp_path / "store", *asked)
    start(cfg, tmp_path / "run", choices, [])
    context = Run(cfg, tmp_path, choices)
    (file,) = (tmp_path / "store/grams").glob("*/gram.safetensors")
    grams, objective = open_checkpoint(file), context.make_objective("stories")
    context.model.load_state_dict(load_state(context.need(declare_expert(context, "stories"))))
    order = torch.randperm(24, generator=torch.Generator().manual_seed(0))[:3]
    alone = [objective.make_batch("train", index[None]) for index in order]
    assert len({each["input_ids"].shape for each in alone}) > 1
    layer = max(n for n in grams if n.endswith(("down_proj", "wo")))  # of T5 in the encoder
    rows: list[torch.Tensor] = []
    module = context.model.get_submodule(layer)
    handle = module.register_forward_pre_hook(lambda _, args: rows.append(args[0].flatten(0, -2)))
    with torch.no_grad():
        for each in alone:
            context.model(**each)
    handle.remove()
    entered = torch.cat(rows)
    wanted = entered.T @ entered / len(entered)
    assert float((grams[layer] - wanted).norm() / wanted.norm()) < 1e-5


@pytest.mark.parametrize("architecture", ["llama", "t5"])
def test_padding_is_no_feature_of_a_text(architecture, folders) -> None:
    backbone = make_tiny_backbone(folders[architecture], architecture)
    model, objective = backbone.make_model(), backbone.make_objective(Colors())
    base = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ends = {}
    for name in "ab":
        torch.manual_seed(ord(name))
        ends[name] = {n: t + 0.2 * torch.randn_like(t) for n, t in base.items()}
    weights, samples = Weights(model, base, ends), [Sample(objective, "train", torch.arange(5))]
    blocks = find_blocks(model) | ({"decoder.block.0": model.decoder.block[0]} if architecture == "t5" else {})

    def compute_ctl(size: int) -> dict[str, float]:
        return cross_task_linearity(model, blocks, weights, ("a", "b"), samples, batch_size=size)

    alone = compute_ctl(1)
    assert all(value > 1e-5 for value in alone.values())
    assert compute_ctl(5) == pytest.approx(alone, rel=1e-4)


def test_experts_of_a_language_model_are_analysed(folders, tmp_path) -> None:
    store = tmp_path / "store"
    for name, *more in (
        ("ctl", "stage=[finetune,analyze]"),
        ("landscape", "stage=analyze", "analysis.points=2"),
        ("alpha_sweep", "stage=analyze", "analysis.points=2", "merger=task_arithmetic"),
    ):
        small = [f"analysis={name}", "analysis.samples=2", "training.lr=1e-2", *more]
        cfg, choices = configure(folders["llama"], "llama", store, *small)
        start(cfg, tmp_path / name, choices, [])
        assert (tmp_path / f"{name}/analysis/{name}.png").is_file()

    def read_numbers(name):
        return json.loads((tmp_path / f"{name}/analysis/{name}.json").read_text())

    ctl, plane, sweep = (read_numbers(name) for name in ("ctl", "landscape", "alpha_sweep"))
    assert len(ctl["blocks"]) == 2
    assert all(1e-6 < value < 0.5 for value in ctl["pairs"][0]["values"])
    assert set(plane["pairs"][0]["measures"]) >= {"xi", "loss/stories", "loss/quantities"}
    losses = sweep["mergers"]["task_arithmetic"]["stories"]["loss"]
    assert losses[0] != losses[1]
    assert all(0 < loss < 10 for loss in losses)


def test_bfloat16_weights_train_as_float32_so_that_offsets_stay_and_are_stored_as_they_were(
    folders, tmp_path, monkeypatch
) -> None:
    from mergekit_lab.optim import mergopt

    seen = []
    real = mergopt.add_offset

    def watch_fit(params, *args, **named):
        before = [p.clone() for p in params]
        real(params, *args, **named)
        moved = sum(int((p != b).sum()) for p, b in zip(params, before, strict=True))
        seen.append((params[0].dtype, moved / sum(p.numel() for p in params)))

    monkeypatch.setattr(mergopt, "add_offset", watch_fit)
    more = ["backbone.dtype=bfloat16", "optimizer=mergopt", "training.lr=1e-3", "stage=finetune"]
    cfg, choices = configure(
        folders["llama"], "llama", tmp_path / "store", *more, "training.precision=bf16-mixed"
    )
    start(cfg, tmp_path / "run", choices, [])
    assert seen
    assert all(dtype == torch.float32 and share > 0.99 for dtype, share in seen)
    context = Run(cfg, tmp_path, choices)
    expert = open_checkpoint(
        context.need(declare_expert(context, "stories")).find_file("model.safetensors"), "expert"
    )
    assert {spec.dtype for spec in expert.specs.values()} == {torch.bfloat16}
    assert any(not torch.equal(expert[n], context.base_state[n]) for n in expert)
    with pytest.raises(InputError, match="MergOPT's small offsets"):
        configure(folders["llama"], "llama", tmp_path, "optimizer=mergopt", "training.precision=bf16-true")


def test_a_language_model_with_images_is_refused(folders, tmp_path) -> None:
    cfg, choices = compose_config(
        ["backbone=hf_causal", f"backbone.source={folders['llama']}", f"store.root={tmp_path}"]
    )
    with pytest.raises(InputError, match=r"'digits'.*Digits"):
        Run(cfg, tmp_path, choices)
    cfg, choices = compose_config(["suite=word_problems", f"store.root={tmp_path}"])
    with pytest.raises(InputError, match=r"glyph-clip.*'stories'.*WordProblems"):
        Run(cfg, tmp_path, choices)
