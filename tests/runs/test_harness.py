"""Models scored by EleutherAI's lm-evaluation-harness, and checkpoints scored alone.

Tests marked `beside` run the harness itself, on task files of their own: `make test-beside` has it.
"""

import csv
import json
import subprocess
import sys
from importlib import metadata, util
from pathlib import Path

import pytest
import torch
from composing import compose_config
from language import make_tiny_backbone, save_tiny
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file

from mergekit_lab import InputError
from mergekit_lab.evaluation import load_harness_task, score_with_harness
from mergekit_lab.evaluation.harness import read_results, run_harness
from mergekit_lab.programs import start
from mergekit_lab.reporting import read_records
from mergekit_lab.reporting.leaderboard import build_table
from mergekit_lab.runs.published_experts import import_expert, read_import_content
from mergekit_lab.runs.run import Run
from mergekit_lab.runs.settle import settle
from mergekit_lab.schema.run import check
from mergekit_lab.tasks import HarnessTask

HERE = ["progress=false", "device=cpu"]


def run_beside_harness(test):
    """A test of the harness itself; what other packages warn of is not ours."""
    there = util.find_spec("lm_eval") is not None
    marks = [
        pytest.mark.beside,
        pytest.mark.filterwarnings("ignore"),
        pytest.mark.skipif(not there, reason="lm-eval is not installed: `make test-beside` has it"),
    ]
    for mark in marks:
        test = mark(test)
    return test


def write_task(folder: Path, name: str, **fields: object) -> None:
    data = {part: str(folder / f"{part}.jsonl") for part in ("train", "test")}
    common = {
        "task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": data}, "training_split": "train",
        "fewshot_split": "train", "test_split": "test", "metadata": {"version": 1.5},
    }  # fmt: skip
    (folder / f"{name}.yaml").write_text(json.dumps(common | fields))  # JSON is YAML


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A tiny base, two experts of it with a table of prompts each, and tasks of the harness."""
    folder = tmp_path_factory.mktemp("inputs")
    save_tiny(folder / "base", "llama")
    for number, name in enumerate(("sums", "names")):
        expert = save_tiny(folder / name, "llama")
        weights = load_file(expert / "model.safetensors")
        torch.manual_seed(number)
        weights = {n: t + 0.2 * torch.randn_like(t) for n, t in weights.items()}
        save_file(weights, expert / "model.safetensors", {"format": "pt"})
        with (folder / f"{name}.csv").open("w", newline="") as stream:
            rows = [[f"{name} {n} + 1 =", str(n + 1)] for n in range(16)]
            csv.writer(stream).writerows([["prompt", "answer"], *rows])
    tasks = folder / "tasks"
    tasks.mkdir()
    for part, count in (("train", 5), ("test", 11)):
        rows = [
            {"q": f"{part} {i}, and {i % 4}", "choices": [str(i), f"{i} or more", "none"], "answer": i * 7 % 3}
            for i in range(count)
        ]
        (tasks / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    first = {"function": "take_first"}
    larger = {"aggregation": "mean", "higher_is_better": True}
    for name, sign in (("pick", "A"), ("choose", "I say")):
        write_task(
            tasks, name, output_type="multiple_choice", doc_to_text=f"Q: {{{{q}}}}\n{sign}:",
            doc_to_choice="{{choices}}", doc_to_target="answer",
            metric_list=[{"metric": "acc", **larger}, {"metric": "acc_norm", **larger}],
        )  # fmt: skip
    write_task(
        tasks, "say", output_type="generate_until", doc_to_text="{{q}} =", num_fewshot=0,
        doc_to_target="abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789",
        generation_kwargs={"max_gen_toks": 6, "until": ["\n"], "do_sample": False},
        filter_list=[
            {"name": "start", "filter": [{"function": "regex", "regex_pattern": "^(.)"}, first]},
            {"name": "all", "filter": [first]},
        ],
        metric_list=[{"metric": "chrf", "aggregation": "chrf", "higher_is_better": True}],
    )  # fmt: skip
    write_task(
        tasks, "read", output_type="loglikelihood_rolling", doc_to_text="", doc_to_target="{{q}}",
        metric_list=[{"metric": "word_perplexity"}],
    )  # fmt: skip
    (tasks / "group.yaml").write_text(
        "{group: group, task: [choose], aggregate_metric_list: [{metric: acc, weight_by_size: true}]}"
    )
    return folder


@run_beside_harness
def test_scores_are_those_of_the_harness_s_own_command_line(inputs, tmp_path, monkeypatch, capfd) -> None:
    """Models in memory, whatever their batch; the command loads the folder."""
    monkeypatch.chdir(tmp_path)
    arguments = [
        "--model", "hf", "--model_args", f"pretrained={inputs}/names,dtype=float32",
        "--tasks", "pick,say,group",
        "--include_path", f"{inputs}/tasks", "--num_fewshot", "2", "--limit", "9", "--device", "cpu",
        "--output_path", f"{tmp_path}/out.json",
    ]  # fmt: skip
    subprocess.run([sys.executable, "-m", "lm_eval", *arguments], check=True, capture_output=True, cwd=tmp_path)
    reference = json.loads(next(tmp_path.glob("out*.json")).read_text())["results"]
    backbone = make_tiny_backbone(inputs / "names", "llama")
    for name, metrics in {
        "pick": {"acc": "acc,none", "acc_norm": "acc_norm,none"},
        "say": {"chrf,start": "chrf,start", "chrf,all": "chrf,all"},
        "group": {"acc": "acc,none"},
    }.items():
        task = HarnessTask(name, num_fewshot=2, limit=9, include_path=str(inputs / "tasks"), batch_size=3)
        ours = score_with_harness(backbone.make_model(), backbone.load_tokenizer(), task)
        unit = 100 if name == "say" else 1
        assert ours.metrics == pytest.approx(
            {n: reference[name][key] / unit for n, key in metrics.items()}, abs=1e-9
        )
        assert ours.count == 9
        assert list(ours.samples) == (list(metrics) if name == "pick" else [])
    assert "fatal" not in capfd.readouterr().err, "git's, where there is no repository"
    assert len({*ours.metrics.values(), 0.0, 1.0}) == 3, "a value that a broken harness would give too"


@run_beside_harness
@pytest.mark.parametrize(
    ("architecture", "how"),
    [("llama", {"apply_chat_template": True, "num_fewshot": 1}), ("t5", {"limit": 0.5})],
)
def test_settings_and_models_mean_what_they_mean_to_the_harness(inputs, tmp_path, architecture, how) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    folder = save_tiny(tmp_path, "t5") if architecture == "t5" else inputs / "names"
    reference = simple_evaluate(
        "hf", {"pretrained": str(folder), "dtype": "float32"}, tasks=["pick"], device="cpu",
        task_manager=TaskManager(include_path=str(inputs / "tasks"), include_defaults=False), bootstrap_iters=0,
        **how,
    )  # fmt: skip
    backbone = make_tiny_backbone(folder, architecture)
    task = HarnessTask("pick", include_path=str(inputs / "tasks"), **how)
    ours = score_with_harness(backbone.make_model(), backbone.load_tokenizer(), task)
    assert ours.samples["acc"] == [sample["acc"] for sample in reference["samples"]["pick"]]
    assert ours.metrics["acc_norm"] == reference["results"]["pick"]["acc_norm,none"]
    results = run_harness(
        backbone.make_model(), backbone.load_tokenizer(), task, "auto", "float32", progress=False
    )
    samples = read_results(task, results).samples
    assert samples == ours.samples, "as on CUDA, where the harness finds how many rows fit"


@run_beside_harness
def test_what_records_cannot_hold_and_what_is_not_there_is_refused(inputs, tmp_path) -> None:
    backbone, include = make_tiny_backbone(inputs / "base", "llama"), str(inputs / "tasks")
    with pytest.raises(InputError, match="word_perplexity"):
        score_with_harness(
            backbone.make_model(), backbone.load_tokenizer(), HarnessTask("read", include_path=include)
        )
    with pytest.raises(InputError, match=r"'pik'.*'pick'"):
        HarnessTask("pik", include_path=include).describe_content()
    with pytest.raises(InputError, match=r"'ai2_arc'.*.arc_challenge, arc_easy"):
        HarnessTask("ai2_arc", include_path=include).describe_content()
    write_task(tmp_path, "gone", output_type="multiple_choice")
    with pytest.raises(InputError, match=r"cannot load 'gone'"):
        load_harness_task(HarnessTask("gone", include_path=str(tmp_path)))


def run(folder: Path, inputs: Path, *arguments: str):
    overrides = [*arguments, *HERE, f"suite.include_path={inputs}/tasks", f"store.root={inputs}/store"]
    cfg, choices = compose_config(overrides)
    start(cfg, folder, choices, overrides)
    return read_records(folder / "records.jsonl")


@pytest.mark.filterwarnings("ignore")  # peft's
def test_an_adapter_is_an_expert_and_all_its_files_are_in_its_name(inputs, tmp_path) -> None:
    from peft import LoraConfig, get_peft_model

    backbone, lora = make_tiny_backbone(inputs / "base", "llama"), tmp_path / "lora"
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    adapted = get_peft_model(backbone.make_model(), config)
    adapted.save_pretrained(lora)
    named = read_import_content(str(lora), {}, "")
    import_expert(str(lora), backbone, backbone.make_model().state_dict(), "", tmp_path)
    expert = load_file(tmp_path / "model.safetensors")
    for name, value in adapted.merge_and_unload().state_dict().items():
        torch.testing.assert_close(expert[name], value, msg=name)
    file = lora / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"lora_alpha": 3}))
    assert read_import_content(str(lora), {}, "") != named


@run_beside_harness
def test_a_run_scores_all_its_models_and_the_store_knows_each_by_its_settings(inputs, tmp_path) -> None:
    compare = [
        "+experiment=compare_mergers", f"base={inputs}/base", f"experts=[{inputs}/sums,{inputs}/names]",
        "suite=lm_eval", "suite.lm_eval_tasks=[pick]", "~mergers.dare", "~mergers.ties", "~mergers.tsvm",
        "~mergers.average", f"texts=[{inputs}/sums.csv,{inputs}/names.csv]", "backbone.max_length=64",
        "mergers.task_arithmetic.coefficient=0.5",
    ]  # fmt: skip
    records = run(tmp_path / "merged", inputs, *compare)
    by_model = {(r.label, r.task): r for r in records}
    assert {label for label, _ in by_model} == {"zero-shot", "sums", "names", "task_arithmetic"}
    assert {task for _, task in by_model} == {"pick", "sums", "names"}
    assert all(r.part == "test" and not r.reused for r in records)
    experts = [by_model[name, "pick"].value for name in ("sums", "names")]
    merged = by_model["task_arithmetic", "pick"]
    assert (merged.kind, merged.expert_value) == ("merged", max(experts))

    alone = ["+experiment=evaluate_checkpoints", "suite.lm_eval_tasks=[pick]"]
    models = f"models=[{inputs}/base,{inputs}/names]"
    again = run(tmp_path / "same", inputs, *alone, models, "suite.metric={pick: acc_norm}")
    first, second = again
    assert [r.label for r in again] == ["base", "names"]
    assert first.reused, "the base's evaluation, and another of its metrics"
    assert first.evaluation_key == by_model["zero-shot", "pick"].evaluation_key
    assert (first.metric, second.kind, second.zero_shot_value) == ("acc_norm", "checkpoint", None)
    assert by_model["names", "pick"].value == pytest.approx(
        next(r for r in run(tmp_path / "first", inputs, *alone, models) if r.label == "names").value
    )
    assert not any(r.reused for r in run(tmp_path / "other", inputs, *alone, models, "suite.limit=3"))


def test_what_a_result_says_is_a_fraction_where_larger_is_better_or_left_out() -> None:
    results = {
        "results": {
            "t": {
                "alias": "t", "bleu,none": 40.0, "acc,none": 0.5, "acc_stderr,none": "N/A", "ppl,none": 0.3,
                "score,none": 7.0, "f1,all": 0.25,
            }
        },
        "higher_is_better": {"t": {"ppl": False, "acc": True}},
        "samples": {"t": [{"filter": "none", "acc": acc, "bleu": ("a", "b")} for acc in (1.0, 0.0)]},
        "n-samples": {"t": {"original": 9, "effective": 2}},
    }  # fmt: skip
    scores = read_results(HarnessTask("t"), results)
    assert scores.metrics == {"bleu": 0.4, "acc": 0.5, "f1,all": 0.25}
    assert (scores.samples, scores.count) == ({"acc": [1.0, 0.0]}, 2)


def test_without_the_package_its_extra_is_named(monkeypatch) -> None:
    def raise_not_found(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr("mergekit_lab.tasks.harness.metadata.version", raise_not_found)
    with pytest.raises(InputError, match=r"'mergekit_lab\[lm_eval\]'"):
        HarnessTask("gsm8k").describe_content()


def settle_run(folder: Path, *arguments: str):
    cfg, choices = compose_config(
        ["suite=lm_eval", "backbone=hf_causal", "base=B", "joint=false", *HERE, *arguments]
    )
    cfg = settle(settle(cfg))
    check(cfg)
    return cfg, folder, choices


def test_tasks_and_checkpoints_are_written_out_with_settings_of_their_own(tmp_path) -> None:
    cfg, *_ = settle_run(
        tmp_path,
        "suite.lm_eval_tasks=[gsm8k,arc_easy]", "suite.num_fewshot={gsm8k: 8}", "suite.limit=10",
        "suite.metric={arc_easy: acc_norm}", "experts=[x/math,y/code]",
    )  # fmt: skip
    tasks = OmegaConf.to_container(cfg.suite.tasks)
    assert tasks["gsm8k"]["num_fewshot"] == 8
    assert "num_fewshot" not in tasks["arc_easy"]
    assert (tasks["arc_easy"]["metric"], tasks["arc_easy"]["limit"]) == ("acc_norm", 10)
    assert OmegaConf.to_container(cfg.experts) == {"math": "x/math", "code": "y/code"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["suite.num_fewshot={gsm9k: 8}"],
            "suite.num_fewshot.*'gsm9k'",
        ),
        (["suite.lm_eval_tasks=[]"], "suite.lm_eval_tasks"),
        (["suite.num_fewshot=-1"], "num_fewshot is -1.*least 0"),
        (["suite.limit=0"], "limit is 0.*positive"),
        (["suite.batch_size=most"], "batch_size is 'most'"),
        ([], "name experts="),
        (["experts=[a,b]", "joint=true"], "set joint=false"),
        (["experts=[a,b]", "merger=task_arithmetic"], "coefficient.*search.coefficients="),
        (["experts=[a,b]", "merger=fisher", "search.coefficients=[]"], "fisher reads fisher of"),
        (
            ["experts=[a,b]", "merger=emr", "search.coefficients=[]"],
            "EMR makes a model",
        ),
        (["experts=[a,b]", "stage=analyze"], "analyses read"),
        (
            ["models=[a,b]", "backbone=hf_encoder"],
            "backbone.*TextEncoder",
        ),
        (["models=[a,b]", "merger=average"], "models= are scored as"),
    ],
)
def test_what_the_harness_cannot_give_is_refused_with_the_way_out(arguments, message, tmp_path) -> None:
    with pytest.raises(InputError, match=message):
        Run(*settle_run(tmp_path, *arguments))


def test_checkpoints_of_any_architecture_are_scored_on_our_tasks_too(inputs, tmp_path) -> None:
    other = save_tiny(tmp_path / "other", "qwen2")
    arguments = [
        "+experiment=evaluate_checkpoints", f"models={{mine: {inputs}/sums, theirs: {other}}}",
        "suite=word_problems",
        f"texts=[{inputs}/sums.csv]", "backbone.max_length=64", *HERE, f"store.root={tmp_path}/store",
    ]  # fmt: skip
    cfg, choices = compose_config(arguments)
    start(cfg, tmp_path / "run", choices, arguments)
    records = read_records(tmp_path / "run/records.jsonl")
    assert [(r.label, r.kind, r.task, r.metric) for r in records] == [
        (name, "checkpoint", "sums", "accuracy") for name in ("mine", "theirs")
    ]
    assert records[0].model_key != records[1].model_key
    table = build_table(records)
    assert [row.label for row in table.rows] == ["mine", "theirs"]
    assert any("÷ the best checkpoint" in note for note in table.notes)
    assert "on 1 task (sums)." in (tmp_path / "run/summary.md").read_text()
