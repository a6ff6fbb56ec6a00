"""Every experiment over language models composes, on tiny models and a dozen rows.

One runs to its report where it is put together from anything that no earlier one had.
"""

import json
from functools import partial
from string import Formatter

import pytest
from composing import compose_config, find_pieces, to_plain
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from mergekit_lab.paths import find_conf_dir
from mergekit_lab.programs import start
from mergekit_lab.reporting import read_records
from mergekit_lab.reporting.paper_tables import find_conditions, read_published
from mergekit_lab.reporting.published import Beside, set_beside
from mergekit_lab.reporting.run_files import read_run
from mergekit_lab.runs import published
from mergekit_lab.runs.finetune import plan_settings
from mergekit_lab.runs.graph import list_nodes
from mergekit_lab.runs.run import Run
from mergekit_lab.schema.run import check

LANGUAGE = ("llama", "qwen", "flan_t5", "smollm2")
"""How experiments over language models begin."""
EXPERIMENTS = [
    f.stem for f in sorted((find_conf_dir() / "experiment").glob("*.yaml")) if f.stem.startswith(LANGUAGE)
]

SWEEPS = [
    name for name in EXPERIMENTS if "sweeper:" in (find_conf_dir() / "experiment" / f"{name}.yaml").read_text()
]
RAN: set[str] = set()
"""What experiments were put together from that ran in this process."""


def write_rows(folder, node) -> None:
    """Files as the task's source has them: its templates' columns, answers among its labels or choices."""
    folder.mkdir(parents=True)
    columns = {name for t in (node["prompt"], node["answer"]) for _, name, _, _ in Formatter().parse(t) if name}
    answer = next(name for _, name, _, _ in Formatter().parse(node["answer"]) if name)
    words = list(node["labels"] or node["choices"] or ("4", "12"))
    rows = []
    for i in range(12):
        value = words[i % len(words)]
        if ":.1f" in node["answer"]:
            value = float(value)
        rows.append({name: f"{name} number {i}" for name in columns} | {answer: value})
    splits = {part: part for part in ("train", "validation", "test")} | (node["parts"] or {})
    for name in set(splits.values()):
        (folder / f"{name}.json").write_text(json.dumps(rows))


def compose_small(name, folders, tmp_path, store):
    cfg, _ = compose_config([f"+experiment={name}"])
    check(cfg)
    overrides = []
    for task, node in to_plain(cfg)["suite"]["tasks"].items():
        if node["_target_"].endswith("TextFile"):
            write_rows(tmp_path / "data" / task, node)
            overrides.append(f"suite.tasks.{task}.source={tmp_path}/data/{task}")
            overrides.append(f"++suite.tasks.{task}.sizes={{validation: 3, test: 4}}")
        else:
            overrides += [f"suite.tasks.{task}.{part}_size=4" for part in ("train", "validation", "test")]
        overrides.append(f"suite.tasks.{task}.max_new_tokens=2")
    folder = folders["t5" if to_plain(cfg)["backbone"]["kind"] == "seq2seq" else "llama"]
    if name.endswith("table13"):
        overrides.append("mergers.task_arithmetic.coefficient=0.2")
    steps = 7 if name.endswith("table15") else 1  # a cost is of steps after the first five
    return compose_config([
        f"+experiment={name}", *overrides, f"backbone.source={folder}", "backbone.max_length=64",
        f"store.root={store}", "progress=false", "device=cpu", "trainer.accelerator=cpu",
        f"training.steps={steps}", "training.warmup_steps=0", "training.batch_size=2",
        "training.precision=32-true",
        "training.epochs=null", "training.epochs_of=null", "training.validations=1", "search.coefficients=[]",
    ])  # fmt: skip


def list_beside(table: str, run: Run) -> list[Beside]:
    """The published numbers that stand beside a run, had it been made: each of its own is 1."""
    axes = {axis: run.choices[axis] for axis in ("backbone", "finetuning", "optimizer")}
    return [*set_beside(table, lambda *_: 1.0, axes, partial(published.have_settings, run), run.tasks)]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_says_its_command_and_stands_beside_its_published_numbers(
    name, folders, module_store, tmp_path, monkeypatch
) -> None:
    real = published.read_setting
    whole, _ = compose_config([f"+experiment={name}"])

    def get_setting(run, key):
        """The experiment's own, where this test makes it smaller."""
        return OmegaConf.select(whole, key) if key.startswith(("training.", "search.")) else real(run, key)

    monkeypatch.setattr(published, "read_setting", get_setting)
    cfg, choices = compose_small(name, folders, tmp_path, module_store)
    if find_pieces(cfg) <= RAN:
        run = Run(cfg, tmp_path, choices)
        assert len({node.key for node in list_nodes(run)}) > len(cfg.suite.tasks)
        beside = {table: list_beside(table, run) for table in cfg.published}
    else:
        RAN.update(find_pieces(cfg))
        start(cfg, tmp_path / "run", choices, [])
        records = read_records(tmp_path / "run/records.jsonl")
        assert {r.task for r in records} == set(cfg.suite.tasks)
        assert (tmp_path / "run/report.html").is_file()
        rows = read_run(tmp_path / "run").published
        beside = {table: [row for row in rows if table.endswith(row.table)] for table in cfg.published}
    measured = {name for name, rows in beside.items() if any(row.ours is not None for row in rows)}
    assert measured == {name for name, rows in beside.items() if rows}
    assert measured or not cfg.published


@pytest.mark.parametrize("name", SWEEPS)
def test_an_experiments_own_sweep_is_accepted_with_its_recipe(name) -> None:
    """Every option of every swept key, with its budget and its epochs, which runs on tiny models leave out."""
    compose_config([f"+experiment={name}"])
    swept = {key: values.split(",") for key, values in HydraConfig.get().sweeper.params.items()}
    for index in range(max(map(len, swept.values()))):
        job = [f"{key}={values[min(index, len(values) - 1)]}" for key, values in swept.items()]
        check(compose_config([f"+experiment={name}", *job])[0])


def test_answers_on_glue_are_texts_of_the_models_own_as_in_the_paper() -> None:
    """Which has accuracies of 0 and 2 % on a task of two label words: choosing between them cannot."""
    accuracies = [row.value for row in read_published("saft_glue C6") if row.column == "rte"]
    assert min(accuracies) < 10
    cfg, _ = compose_config(["+experiment=flan_t5_glue_saft"])
    assert cfg.backbone.answering == "generate"
    assert find_conditions("saft_glue C6")[1]["backbone.answering"] == "generate"


@pytest.mark.parametrize(
    ("more", "tables"),
    [
        ([], "1 12 14 20 22 24"),
        (["optimizer=adamw"], "1 20 22 24"),
        (["optimizer.loc=-0.1"], "12"),
        (["optimizer.distribution=gaussian"], "22"),
        (["optimizer@optimizer.base=sgd", "training.lr=0.01"], "18"),
        (["training.lr=4e-5"], "24"),
    ],
)
def test_a_run_stands_beside_the_numbers_of_its_own_settings_alone(more, tables, tmp_path) -> None:
    suite = ["suite=trace2", "suite.name=c_stance+fomc"]
    cfg, choices = compose_config(["+experiment=llama32_1b_trace_mergopt", *suite, *more])
    setup = Run(cfg, tmp_path, choices)
    settings = {(row.table, row.setting) for name in cfg.published for row in list_beside(name, setup)}
    assert " ".join(sorted({table for table, _ in settings}, key=int)) == tables
    assert len([setting for table, setting in settings if table == "22"]) <= 1


def test_recipes_compose_with_the_epochs_of_their_own_tasks(tmp_path) -> None:
    """A suite's epochs by task stay where a part of the suite is run."""
    for name, steps in (("llama31_8b_trace_mergopt", 2), ("llama32_1b_mergopt_table23", 2)):
        cfg, choices = compose_config([f"+experiment={name}", f"store.root={tmp_path}"])
        for task, node in cfg.suite.tasks.items():
            write_rows(tmp_path / name / task, to_plain(node))
            node.source = f"{tmp_path}/{name}/{task}"
        context = Run(cfg, tmp_path, choices)
        steps_by_task = {task: plan_settings(context, task).steps for task in context.tasks}
        assert steps_by_task["fomc"] == round(3 * context.tasks["fomc"].count("train") / 8) >= steps
