"""What a stranger meets first: a bare command, a mistake, a folder, a dry run."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from composing import TINY, compose_config
from omegaconf import OmegaConf, open_dict

import mergekit_lab
from hydra_plugins.mergekit_lab.run_folder import RunFolder, remove_empty
from mergekit_lab.command_line import answer, explain_stop, list_options, translate
from mergekit_lab.errors import InputError
from mergekit_lab.merging import TIES, TSVM, resolve_device
from mergekit_lab.merging.inputs import open_inputs
from mergekit_lab.merging.jobs import count_work, plan_jobs
from mergekit_lab.merging.stream import open_readers
from mergekit_lab.paths import find_conf_dir
from mergekit_lab.runs.plan import describe_plan, estimate_seconds
from mergekit_lab.store import Store
from mergekit_lab.training import TrainingSettings
from mergekit_lab.training.fit import Progress
from mergekit_lab.training.module import FinetuneModule


def test_the_bare_command_says_in_fifteen_lines_what_one_can_do() -> None:
    text = answer([])
    assert text is not None
    assert len(text.splitlines()) <= 15
    for word in (
        "+experiment=quickstart",
        "+experiment=compare_mergers",
        "+experiment=merge_checkpoints",
        "--help",
    ):
        assert word in text
    assert answer(["--version"]) == f"mergekit_lab {mergekit_lab.__version__}"
    assert answer(["seed=1"]) is None
    assert "texts=[a.csv,b.csv]" in text


def test_help_says_what_every_option_is_for(tmp_path) -> None:
    (tmp_path / "merger").mkdir()
    (tmp_path / "merger/mine.yaml").write_text("# A method of my own.\n")
    text = answer(["--help", "--config-dir", str(tmp_path)])
    assert text is not None
    usage, *groups = re.split(r"^\+?([\w/]+)=OPTION$", text, flags=re.M)
    assert "+experiment=quickstart" in usage
    listed = dict(zip(groups[::2], groups[1::2], strict=True))
    files = {f.relative_to(find_conf_dir()) for f in find_conf_dir().glob("[!h]*/**/*.yaml")}
    assert set(listed) == {str(file.parent) for file in files}
    for file in files:
        (line,) = re.findall(rf"^  {file.stem} .*$", listed[str(file.parent)], re.M)
        assert len(line.split()) > 1
    assert "A method of my own." in listed["merger"]
    assert answer(["+experiment=diagnose", "--help"]) is None, "Hydra prints the keys of a command"
    experiments = list_options("experiment")
    assert experiments.index("merge_checkpoints") < experiments.index("\n\n") < experiments.index("saft_table1")


@pytest.mark.parametrize(
    "table", ["optimizer×merger", "optimizer x merger", "optimizer * merger", "optimizer*merger"]
)
def test_a_table_is_asked_for_with_any_sign_of_multiplication(table: str) -> None:
    assert translate([f"table={table}"]) == ["table=optimizer*merger"]


def test_a_stopped_merge_promises_no_more_than_it_keeps() -> None:
    assert "begins anew" in explain_stop(translate(["+experiment=merge_checkpoints"]))
    assert "goes on" in explain_stop(["+experiment=quickstart"])


@pytest.mark.parametrize("overrides", [["stage=store"], ["dry_run=true"], ["+experiment=merge_checkpoints"]])
def test_what_makes_no_results_makes_no_folder(overrides, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    cfg, _ = compose_config(overrides)
    with open_dict(cfg):
        cfg.hydra = {"run": {"dir": "outputs/now"}, "overrides": {"task": overrides, "hydra": []}}
    RunFolder().on_run_start(cfg)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("left", "named", "stays"), [("log.txt", False, False), ("log.txt", True, True),
                                                      ("records.jsonl", False, True)])  # fmt: skip
def test_a_folder_that_holds_the_log_of_a_mistake_alone_goes(left, named, stays, tmp_path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / left).write_text("")
    remove_empty(tmp_path / "run", named)
    assert (tmp_path / "run").exists() == stays


@pytest.mark.parametrize("device", ["mps", "no_such"])
def test_a_device_that_is_not_there_is_one_line(device: str) -> None:
    if device == "mps" and torch.backends.mps.is_available():
        pytest.skip("this machine has it")
    with pytest.raises(InputError) as caught:
        resolve_device(device)
    (message,) = str(caught.value).splitlines()
    assert f"'{device}'" in message
    assert "this machine has cpu" in message


def test_warm_up_is_a_share_of_the_steps_whatever_their_number() -> None:
    cfg, _ = compose_config(["+experiment=quickstart", "training.steps=10"])
    settings = TrainingSettings(**cfg.training)
    assert (settings.warmup, settings.with_steps(50).warmup) == (1, 5)
    whole = TrainingSettings(steps=100, batch_size=1, lr=1.0, weight_decay=0.0, warmup_steps=10)
    assert (whole.warmup, whole.with_steps(50).warmup) == (10, 5)
    assert (
        whole.describe_content() == TrainingSettings(**{**vars(whole), "warmup_steps": 0.1}).describe_content()
    )
    with pytest.raises(InputError, match=r"0.0.*1.0,.*\[0, training.steps = 10\]"):
        TrainingSettings(steps=10, batch_size=1, lr=1.0, weight_decay=0.0, warmup_steps=500)


class NodeInPlan:
    """What a plan reads of an artifact."""

    def __init__(self, kind: str, content: dict, seconds: float = 0.0) -> None:
        self.kind, self.content, self.info = kind, content, {"wall_seconds": seconds}


def test_a_plan_prices_a_training_by_its_gradients() -> None:
    plain, sam = (
        {"training": {"steps": 10}, "optimizer": OmegaConf.to_container(cfg.optimizer, resolve=True)}
        for cfg in (compose_config([f"optimizer={name}"])[0] for name in ("adamw", "sam"))
    )
    assert estimate_seconds(NodeInPlan("joint", sam), [NodeInPlan("joint", plain, 100.0)]) == 200.0  # type: ignore[arg-type]
    trained, imported = (
        NodeInPlan("experts", plain, 100.0),
        NodeInPlan("experts", {"imported": "0f"}, 0.1),
    )
    for node, seconds in ((trained, 100.0), (imported, 0.1)):
        assert estimate_seconds(node, [imported, imported, trained]) == seconds  # type: ignore[arg-type]
    assert estimate_seconds(imported, [trained]) is None  # type: ignore[arg-type]
    larger = NodeInPlan("experts", {**plain, "backbone": {"architecture": "ViT-L-14"}})
    assert estimate_seconds(larger, [trained]) is None  # type: ignore[arg-type]


def test_a_first_plan_does_not_say_that_it_takes_no_time(tmp_path, monkeypatch) -> None:
    node = SimpleNamespace(kind="experts", name="experts-a", needs=(), content={})
    monkeypatch.setattr("mergekit_lab.runs.plan.list_nodes", lambda run: [node])
    run = SimpleNamespace(store=Store(tmp_path), find=lambda node: None)
    line = describe_plan([run])  # type: ignore[list-item]
    assert "0 s" not in line
    assert "unknown" in line.splitlines()[-1]


def test_an_analysis_alone_ends_in_a_page_of_its_figure(tmp_path) -> None:
    frame = mergekit_lab.run(
        "quickstart",
        [
            *TINY[2:],
            "stage=[finetune,analyze]",
            f"store.root={tmp_path}/store",
            f"run_dir={tmp_path}/0",
        ],
    )
    assert frame.empty
    page = (tmp_path / "0/report.html").read_text()
    assert page.count("<figure") == 1
    assert "analyses of 2 experts" in page

    from mergekit_lab.reporting import compare

    paths = compare([tmp_path / "0"], tmp_path, title="Comparison of a sweep")
    assert not paths.failures
    assert "<img " in paths.html.read_text()


def test_python_finds_names_and_choices() -> None:
    assert {"merge", "run", "merge_state_dicts"} <= set(dir(mergekit_lab))
    import pydoc

    text = pydoc.render_doc(TIES)
    assert "mergelm" in text
    stub = Path(mergekit_lab.__file__).with_suffix(".pyi").read_text()
    assert all(f" as {name}\n" in stub for name in mergekit_lab.__all__ if name != "__version__")


def test_a_run_from_python_refuses_a_mistake_and_leaves_hydra_as_it_was() -> None:
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    GlobalHydra.instance().clear()
    with initialize_config_dir(str(find_conf_dir()), version_base="1.3"):
        with pytest.raises(InputError, match="did you mean 'quickstart'"):
            mergekit_lab.run("quikstart")
        with pytest.raises(InputError, match="a command on"):
            mergekit_lab.run("merge_checkpoints")
        with pytest.raises(InputError, match="command on checkpoints"):
            mergekit_lab.run(overrides=["experiment=merge_checkpoints"])
        with pytest.raises(InputError, match="did you mean 'quickstart'"):
            mergekit_lab.run(overrides=["experiment=quikstart"])
        assert GlobalHydra.instance().is_initialized()


def test_the_bar_counts_the_whole_training_and_shows_the_loss() -> None:
    bar = Progress()
    bar._trainer = SimpleNamespace(max_steps=60, global_step=50)  # type: ignore[assignment]
    assert bar.total_train_batches == 60
    settings = TrainingSettings(steps=60, batch_size=1, lr=1e-2, weight_decay=0.0)
    module = FinetuneModule(torch.nn.Linear(1, 1), {}, torch.optim.SGD, settings)  # type: ignore[arg-type]
    module.curve = [{"step": 50, "train_loss": 0.25}, {"step": 50, "val_accuracy": 1.0}]
    assert bar.get_metrics(bar.trainer, module) == {"loss": "0.250"}


def test_a_merge_that_factorizes_begins_with_what_is_soon_done_and_counts_by_cost() -> None:
    base = {"a": torch.zeros(64, 64), "b": torch.zeros(8, 8), "c": torch.zeros(32, 32), "d": torch.zeros(9)}
    method = TSVM()
    (reader,) = open_readers(open_inputs(base, [base, base], method), method, "cpu", None)
    assert plan_jobs(reader) == [["d"], ["b"], ["c"], ["a"]]
    assert [count_work(method, name, tensor.shape) for name, tensor in base.items()] == [
        4 * 64**3, 4 * 8**3, 4 * 32**3, 9,
    ]  # fmt: skip
    assert count_work(method, "a", (256, 64)) == (4 + 3) * 64**3
    assert count_work(TIES(), "a", (64, 64)) == 64**2
