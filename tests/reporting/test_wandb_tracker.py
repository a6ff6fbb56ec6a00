"""wandb itself runs here, offline, with its home and its server replaced."""

import json
import logging
import os

import pytest
from PIL import Image
from reporting.wandb_offline import KEY, read_items, read_offline_records

from mergekit_lab.errors import InputError
from mergekit_lab.reporting import Start, WandbTracker
from mergekit_lab.reporting.leaderboard import build_table
from mergekit_lab.reporting.wandb_tracker import flatten

# wandb.Table and wandb.Image keep their files in a TemporaryDirectory that they never close
pytestmark = pytest.mark.filterwarnings("ignore:Implicitly cleaning up:ResourceWarning")
CONFIG = {
    "trainer": {"steps": 7},
    "optimizer": {"name": "sam", "rho": 0.05},
    "hub": {"token": "t0p-secret"},
    "tasks": ["dtd"],
    "seed": 3,
}


def list_warnings(caplog):
    ours = (r for r in caplog.records if r.name.startswith("mergekit_lab") and r.levelno >= logging.WARNING)
    return [record.getMessage() for record in ours]


def build_small_table(record):
    return build_table([record(value=0.6, expert_value=0.8), record(merger="average", value=0.4)])


def test_an_offline_run_holds_all_that_was_logged_and_calls_nobody(server, monkeypatch, tmp_path, record):
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    Image.new("RGB", (1, 1)).save(tmp_path / "figure.png")
    tracker = WandbTracker(project="a project", mode="offline")
    tags = ["glyph_clip", "sam", "ties", "ties", "", "x" * 90]
    tracker.start(Start(CONFIG, tmp_path / "run", name="a name", group="a group", job_type="merge", tags=tags))
    tracker.log({"loss": 2.0}, step=5)
    tracker.log({"loss": 1.0}, step=1)
    tracker.log_summary(build_small_table(record))
    tracker.log_records([record(value=0.6, expert_value=0.8), record(kind="expert", value=0.8)])
    tracker.log_figure("mergers", tmp_path / "figure.png")
    tracker.finish()

    with pytest.raises(BlockingIOError):
        server.accept()
    assert os.environ["WANDB_ERROR_REPORTING"] == "false"
    records = read_offline_records(tmp_path / "run")
    run = next(r.run for r in records if r.HasField("run"))
    assert (run.project, run.display_name, run.run_group, run.job_type) == (
        "a project",
        "a name",
        "a group",
        "merge",
    )
    assert sorted(run.tags) == ["glyph_clip", "sam", "ties", "x" * 64]
    config = read_items(run.config.update)
    assert {**config, "_wandb": None} == {**flatten(CONFIG), "_wandb": None}
    history = [read_items(r.history.item) for r in records if r.HasField("history")]
    assert [(h["step"], h["loss"]) for h in history if "loss" in h] == [(5, 2.0), (1, 1.0)]
    assert [h["leaderboard/nrows"] for h in history if "leaderboard/nrows" in h] == [2]
    assert [h["mergers/format"] for h in history if "mergers/format" in h] == ["png"]
    summary = {
        key: value
        for r in records
        if r.HasField("summary")
        for key, value in read_items(r.summary.update).items()
    }
    assert summary["ties/normalized"] == pytest.approx(0.75)
    tables = {
        file.name.partition("_")[0]: json.loads(file.read_text())
        for file in (tmp_path / "run").glob("wandb/offline-run-*/files/media/table/*.json")
    }
    evaluations, board = tables["evaluations"], tables["leaderboard"]
    lines = [dict(zip(evaluations["columns"], line, strict=True)) for line in evaluations["data"]]
    assert [(line["kind"], line["task"], line["value"]) for line in lines] == [
        ("merged", "dtd", 0.6), ("expert", "dtd", 0.8),
    ]  # fmt: skip
    assert lines[0]["normalized"] == pytest.approx(0.75)
    assert board["columns"][:2] == ["model", "dtd"]
    assert board["data"][0][:2] == ["ties", 0.6]


def test_no_secret_is_written_anywhere(server, monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    tracker = WandbTracker(mode="offline")
    tracker.start(Start(CONFIG, tmp_path / "run", name="n"))
    tracker.finish()
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert any(b"optimizer.rho" in content for content in written)
    assert not any(KEY.encode() in content or b"t0p-secret" in content for content in written)


def test_without_a_key_the_run_is_offline_with_one_warning_if_online_was_asked(server, tmp_path, caplog):
    for mode, warnings in ((None, 0), ("online", 1)):
        tracker = WandbTracker(mode=mode)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            tracker.start(Start({}, tmp_path / str(mode), name="n"))
        tracker.finish()
        assert len(list((tmp_path / str(mode)).glob("wandb/offline-run-*/*.wandb"))) == 1
        assert len(list_warnings(caplog)) == warnings


@pytest.fixture
def asked_modes(server, monkeypatch):
    """The modes that wandb.init is asked for; nothing is started."""
    modes = []

    def refuse(mode, **_):
        modes.append(mode)
        raise ConnectionError("no route")

    monkeypatch.setattr("wandb.init", refuse)
    return modes


@pytest.mark.parametrize("where", ["environment", "netrc"])
def test_with_a_key_the_run_is_online_unless_the_environment_says_otherwise(
    asked_modes, monkeypatch, tmp_path, server, where
):
    if where == "environment":
        monkeypatch.setenv("WANDB_API_KEY", KEY)
    else:
        host = f"127.0.0.1:{server.getsockname()[1]}"
        (tmp_path / "netrc").write_text(f"machine {host} login user password {KEY}\n")
        monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    WandbTracker().start(Start({}, tmp_path, name="n"))
    assert asked_modes == ["online", "offline"]
    import wandb

    wandb.teardown()
    monkeypatch.setenv("WANDB_MODE", "offline")
    WandbTracker().start(Start({}, tmp_path, name="n"))
    assert asked_modes[2:] == ["offline"]


def test_after_one_start_that_failed_online_a_tracker_stays_offline_and_warns_once(
    server, monkeypatch, tmp_path, caplog
):
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    asked, timeouts = [], []
    import wandb

    init = wandb.init

    def refuse(mode, **arguments):
        asked.append((mode, arguments["id"]))
        timeouts.append(arguments["settings"].init_timeout)
        if mode == "online":
            raise ConnectionError("no route")
        return init(mode=mode, **arguments)

    monkeypatch.setattr("wandb.init", refuse)
    tracker = WandbTracker()
    with caplog.at_level(logging.WARNING):
        for job in ("finetune", "merge"):
            tracker.start(Start({}, tmp_path / job, name="n", job_type=job, identity=job))
            tracker.log({"loss": 1.0}, step=1)
            tracker.finish()
    # wandb's service still holds the id of what it could not start
    assert asked == [("online", "finetune"), ("offline", "finetune-offline"), ("offline", "merge")]
    assert set(timeouts) == {15.0}
    (warning,) = list_warnings(caplog)
    assert "start failed (no route)" in warning


def test_a_broken_wandb_costs_one_warning_and_never_the_run(asked_modes, tmp_path, record, caplog):
    tracker = WandbTracker(mode="offline")
    with caplog.at_level(logging.WARNING):
        tracker.start(Start({}, tmp_path, name="n"))
        tracker.log({"loss": 1.0}, step=0)
        tracker.log_summary(build_small_table(record))
        tracker.log_figure("f", tmp_path / "none.png")
        tracker.finish()
    assert list_warnings(caplog) == ["wandb: start failed: ConnectionError: no route"]


def test_failures_after_the_start_are_one_warning_and_later_metrics_still_arrive(server, tmp_path, caplog):
    tracker = WandbTracker(mode="offline")
    tracker.start(Start({}, tmp_path, name="n"))
    with caplog.at_level(logging.WARNING):
        tracker.log_figure("f", tmp_path / "none.png")
        tracker.log_figure("f", tmp_path / "none.png")
        tracker.log({"loss": 1.0}, step=4)
    tracker.finish()
    (warning,) = list_warnings(caplog)
    assert "log_figure failed: FileNotFoundError" in warning
    assert 4 in [read_items(r.history.item).get("step") for r in read_offline_records(tmp_path)]


def test_a_run_that_was_never_finished_does_not_lend_itself_to_the_next(server, tmp_path):
    abandoned = WandbTracker(mode="offline")
    abandoned.start(Start({}, tmp_path / "a", name="a"))
    tracker = WandbTracker(mode="offline")
    tracker.start(Start({}, tmp_path / "b", name="b"))
    tracker.finish()
    abandoned.finish()
    for name in ("a", "b"):
        run = next(r.run for r in read_offline_records(tmp_path / name) if r.HasField("run"))
        assert run.display_name == name


def test_the_same_configuration_goes_on_in_the_same_run_unless_told_not_to(server, tmp_path):
    ids = []
    for resume, folder in ((True, "a"), (True, "b"), (False, "c")):
        tracker = WandbTracker(mode="offline", resume=resume)
        tracker.start(Start({}, tmp_path / folder, name="n", identity="same"))
        tracker.finish()
        ids += [r.run.run_id for r in read_offline_records(tmp_path / folder) if r.HasField("run")][:1]
    assert ids[:2] == ["same", "same"]
    assert ids[2] != "same"


def test_choices_of_groups_stand_first_under_their_own_names():
    config = {
        "seed": 1,
        "merger": None,
        "optimizer": {"rho": 0.5},
        "choices": {"optimizer": "sam", "merger": "ties"},
    }
    assert flatten(config) == {"optimizer": "sam", "merger": "ties", "optimizer.rho": 0.5, "seed": 1}
    assert next(iter(flatten(config))) == "optimizer"


def test_the_config_is_flat_with_the_axes_first_and_without_secrets():
    assert list(flatten(CONFIG).items()) == [
        ("optimizer.name", "sam"),
        ("optimizer.rho", 0.05),
        ("seed", 3),
        ("trainer.steps", 7),
        ("tasks", ["dtd"]),
    ]
    kept = {"a": {}, "b.max_tokens": 1, "b.tokenizer": "t", "b.model_key": "k"}
    assert (
        flatten(
            {
                "a": {},
                "b": {"max_tokens": 1, "tokenizer": "t", "model_key": "k", "hf_token": "x"},
                "password": "x",
            }
        )
        == kept
    )
    assert flatten({}) == {}


def test_an_unknown_mode_is_refused():
    with pytest.raises(InputError, match="wandb mode 'of'"):
        WandbTracker(mode="of")


def test_offline_runs_print_one_line_in_all(server, monkeypatch, tmp_path, capfd, caplog):
    caplog.set_level("INFO", "mergekit_lab")
    monkeypatch.delenv("WANDB_SILENT")
    tracker = WandbTracker(mode="offline")
    for job in ("finetune", "merge"):
        tracker.start(Start({}, tmp_path / "run", name=job))
        tracker.log({"loss": 1.0}, step=1)
        tracker.finish()
    assert "".join(capfd.readouterr()) == ""
    messages = [record.getMessage() for record in caplog.records if record.name.startswith("mergekit_lab")]
    assert messages == [f"W&B is offline; later: wandb sync {tmp_path / 'run'}/wandb/offline-run-*"]


@pytest.mark.parametrize("module", ["wandb_link", "wandb_dashboard"])
def test_what_needs_the_server_says_which_key_to_set(server, monkeypatch, tmp_path, module):
    from importlib import import_module

    arguments = {"wandb_link": [str(tmp_path)], "wandb_dashboard": ["--entity", "team"]}[module]
    monkeypatch.setattr("sys.argv", [module, *arguments])
    monkeypatch.setattr("mergekit_lab.reporting.wandb_dashboard.build_dashboard", lambda *_: None)
    with pytest.raises(SystemExit, match=r"`wandb login`,.*WANDB_API_KEY"):
        import_module(f"mergekit_lab.reporting.{module}").main()
    with pytest.raises(BlockingIOError):
        server.accept()
