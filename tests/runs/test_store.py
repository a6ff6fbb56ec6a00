"""`stage=store` on a store whose experts were not trained: looking after it needs their names alone."""

import errno
import json
import logging
import os
import shutil
from pathlib import Path

import markdown_it
import pytest
import torch
from composing import TINY, compose_config
from hub_server import TOKEN, holds, serve
from huggingface_hub import ModelCard
from language import save_tiny

from mergekit_lab import InputError, open_checkpoint
from mergekit_lab.checkpoints import write_tensors
from mergekit_lab.programs import start
from mergekit_lab.runs.finetune import declare_expert
from mergekit_lab.runs.run import Run
from mergekit_lab.runs.store import make_card
from mergekit_lab.store import Artifact, Store, make_key


def run_command(folder: Path, *overrides: str, run_of=TINY) -> None:
    arguments = [*run_of, f"store.root={folder}/store", "stage=store", *overrides]
    cfg, choices = compose_config(arguments)
    start(cfg, folder / "run", choices, arguments)


def put(folder: Path, *overrides: str, run_of=TINY, task: str = "digits", state=None) -> dict:
    """An expert of this configuration; its content."""
    cfg, choices = compose_config([*run_of, f"store.root={folder}/store", *overrides])
    content = declare_expert(Run(cfg, folder, choices), task).content

    def make(workspace):
        write_tensors(workspace.out / "model.safetensors", state or {"w": torch.zeros(2)})
        return {"val_accuracy": 0.5}

    Store(folder / "store").obtain("experts", content, make)
    return content


@pytest.fixture(scope="module")
def kept(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("kept")
    put(folder)
    return folder


@pytest.fixture
def folder(kept, tmp_path) -> Path:
    shutil.copytree(kept / "store", tmp_path / "store")
    return tmp_path


def list_keys(folder: Path) -> set[str]:
    return {artifact.key for artifact in Store(folder / "store").list_artifacts() if artifact.kind == "experts"}


def test_a_key_that_is_not_found_is_explained_by_the_first_difference(folder, caplog) -> None:
    with caplog.at_level(logging.INFO, "mergekit_lab"):
        run_command(folder, "store.action=explain", "training.lr=0.5", "store.kind=experts")
        digits, latin = (record.getMessage() for record in caplog.records)
        assert "(digits): the nearest is" in digits
        assert "but optimizer.lr is 0.5" in digits
        assert "(latin): the nearest is" in latin
        assert "'latin' and there 'digits'" in latin, "what differs comes before how much"
        caplog.clear()
        (folder_of_key,) = (folder / "store/experts").iterdir()
        folder_of_key.rename(folder_of_key.with_name("0" * 24))  # as another schema would call it
        run_command(folder, "store.action=explain", "store.kind=experts")
        assert "(digits): 000000000000 has the same content" in caplog.text
        run_command(folder, "store.action=explain", "store.kind=fits")
        assert caplog.messages[-1].startswith("everything that this run needs is in the store")
        run_command(
            folder, "store.action=explain", "store.kind=searches", "merger=ties", "mergers.ties.coefficient=1"
        )
        assert caplog.messages[-1].startswith("everything that this run needs is in the store")


def test_what_a_run_wants_is_kept_or_taken_and_nothing_goes_without_confirmation(folder, caplog) -> None:
    (wanted,) = list_keys(folder)
    other = make_key({"task": "other"})
    for kind in ("experts", "images"):
        Store(folder / "store").obtain(kind, {"task": "other"}, lambda workspace: {})
    with caplog.at_level(logging.INFO, "mergekit_lab"):
        run_command(folder, "store.action=prune")
    assert "set store.confirm=true" in caplog.text
    assert list_keys(folder) == {wanted, other}
    run_command(folder, "store.action=prune", "store.confirm=true", "dry_run=true")
    assert list_keys(folder) == {wanted, other}
    run_command(folder, "store.action=prune", "store.confirm=true")
    assert list_keys(folder) == {wanted}
    assert (folder / "store/images" / other).is_dir(), "decoded images are nobody's alone"
    run_command(folder, "store.action=prune", "store.confirm=true", "store.kind=images")
    assert not (folder / "store/images" / other).exists()
    run_command(folder, "store.action=prune", "store.which=run", "store.confirm=true", "store.older_than=1")
    assert list_keys(folder) == {wanted}
    run_command(folder, "store.action=prune", "store.which=run", "store.confirm=true")
    assert list_keys(folder) == set()
    assert not list((folder / "store/work/removed").iterdir())


@pytest.mark.parametrize("plus", ["", "++"])
def test_an_action_on_the_store_starts_no_run(tmp_path, plus: str) -> None:
    cfg, choices = compose_config(arguments := [f"{plus}store.action=list"])
    with pytest.raises(InputError, match="add stage=store"):
        start(cfg, tmp_path, choices, arguments)


def test_texts_and_downloads_in_a_store_are_no_damaged_artifacts(folder) -> None:
    files = [folder / "store" / name for name in ("data/mine/a.csv", "packages/model-1.0/weights.gguf")]
    for file in files:
        file.parent.mkdir(parents=True)
        file.write_text("")
    for action in (["verify"], ["prune", "store.which=all"]):
        run_command(folder, f"store.action={action[0]}", "store.confirm=true", *action[1:])
    assert all(file.exists() for file in files)


def test_damage_is_found_and_a_sound_store_is_said_to_be_so(folder, caplog) -> None:
    with caplog.at_level(logging.INFO, "mergekit_lab"):
        run_command(folder, "store.action=verify")
    assert "are intact" in caplog.text
    (weights,) = (folder / "store/experts").glob("*/model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.raises(InputError, match=rf"are damaged: .*\n.*{weights.parent.name} is damaged"):
        run_command(folder, "store.action=verify")


def test_what_is_not_sound_is_removed_when_that_is_confirmed_and_nothing_else(folder, caplog) -> None:
    store = Store(folder / "store")
    (sound,) = list_keys(folder)
    zeros = {"w": torch.zeros(2)}
    flipped, unread, other = (
        store.obtain(
            kind, {"n": kind}, lambda workspace: write_tensors(workspace.out / "w.safetensors", zeros) or {}
        )
        for kind in ("merged", "fishers", "joint")
    )
    for file in (flipped.folder / "w.safetensors", unread.folder / "manifest.json"):
        file.write_bytes(b"\0" * file.stat().st_size)
    (store.root / "experts" / ("0" * 24)).mkdir()
    before = sorted(store.root.rglob("*"))
    with pytest.raises(InputError, match=r"3 artifacts.*store.confirm=true"):
        run_command(folder, "store.action=verify")
    with pytest.raises(InputError, match=r"1 artifacts .* are damaged"):
        run_command(folder, "store.action=verify", "store.confirm=true", "store.kind=fishers", "dry_run=true")
    assert sorted(store.root.rglob("*")) == before
    run_command(folder, "store.action=verify", "store.confirm=true", f"store.key={unread.key[:9]}")
    assert not unread.folder.exists()
    assert flipped.folder.exists()
    with caplog.at_level(logging.INFO, "mergekit_lab"):
        run_command(folder, "store.action=verify", "store.confirm=true")
        assert "removed 2 damaged artifacts" in caplog.text
        run_command(folder, "store.action=verify")
        assert "2 artifacts in the store" in caplog.text
    assert (list_keys(folder), other.folder.exists()) == ({sound}, True)
    assert not list((folder / "store/work/removed").iterdir())


def test_half_made_artifacts_are_listed_and_pruned_by_age_unless_in_work(folder, caplog) -> None:
    store = Store(folder / "store")
    left = store.root / "work/experts" / make_key({"n": 1})

    def cut(workspace) -> dict:
        (workspace.resume / "last.ckpt").write_text("step 7")
        run_command(folder, "store.action=prune", "store.confirm=true")
        assert (workspace.resume / "last.ckpt").exists()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.obtain("experts", {"n": 1}, cut)
    with caplog.at_level(logging.INFO, "mergekit_lab"):
        run_command(folder, "store.action=list")
    assert "experts, half made: 1" in caplog.text
    run_command(folder, "store.action=prune", "store.confirm=true", "store.older_than=1")
    assert left.exists()
    for path in (*left.rglob("*"), left):
        os.utime(path, (0, 0))
    run_command(folder, "store.action=prune", "store.confirm=true", "store.older_than=1")
    assert not left.exists()


def test_a_list_holds_nothing_that_a_terminal_would_obey(folder, caplog) -> None:
    Store(folder / "store").obtain("experts", {"task": "digits\x1b[2J"}, lambda workspace: {})
    with caplog.at_level(logging.INFO, "mergekit_lab"):
        run_command(folder, "store.action=list", "store.kind=experts")
    assert "digits[2J" in caplog.text
    assert "\x1b" not in caplog.text


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        (["store.action=export", "store.path=OUT"], "fits 0 artifacts"),
        (["store.action=export", "store.key=zz", "store.path=OUT"], "begins with 'zz'"),
        (["store.action=export", "store.key=KEY"], "needs store.path"),
        (["store.action=export", "store.key=KEY", "store.path=FULL"], "is not an empty folder"),
        (["store.action=import", "store.path=FULL"], "has no manifest.json"),
    ],
)
def test_what_cannot_be_exported_or_imported_says_why(folder, overrides, match: str) -> None:
    (folder / "full").mkdir()
    (folder / "full/file").write_text("")
    (key,) = list_keys(folder)
    names = {"OUT": str(folder / "out"), "FULL": str(folder / "full"), "KEY": key}
    arguments = [
        o.partition("=")[0] + "=" + names.get(o.partition("=")[2], o.partition("=")[2]) for o in overrides
    ]
    with pytest.raises(InputError, match=match):
        run_command(folder, *arguments)


def test_an_export_that_is_cut_leaves_nothing_and_the_same_command_makes_it_whole(folder, monkeypatch) -> None:
    (key,) = list_keys(folder)
    asked = ["store.action=export", f"store.key={key[:6]}", f"store.path={folder}/my experts/out"]

    def fill_up(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("mergekit_lab.runs.store.shutil.copyfile", fill_up)
        with pytest.raises(InputError, match="the disk of"):
            run_command(folder, *asked)
    assert not list((folder / "my experts").iterdir())
    run_command(folder, *asked)
    run_command(folder / "elsewhere", "store.action=import", f"store.path={folder}/my experts/out")
    assert list_keys(folder / "elsewhere") == {key}


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # the hub client's
def test_an_exported_expert_of_a_language_model_loads_by_from_pretrained(tmp_path, caplog, monkeypatch) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base = save_tiny(tmp_path / "base", "llama")
    language = ["suite=word_problems", "backbone=hf_causal", f"backbone.source={base}", "training=language"]
    language += [f"suite.tasks.{t}.{p}_size=8" for t in ("stories", "quantities") for p in ("train", "test")]
    cfg, _ = compose_config(language)
    backbone = Run(cfg, tmp_path, {"merger": None}).backbone
    state = {name: tensor + 1 for name, tensor in backbone.make_model().state_dict().items()}
    content = put(tmp_path, run_of=language, task="stories", state=state)
    asked = ["store.action=export", f"store.key={make_key(content)}"]
    run_command(tmp_path, *asked, f"store.path={tmp_path}/out", run_of=language)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template
    assert json.loads((tmp_path / "out/manifest.json").read_text())["content"] == content

    measured = {"model": make_key(content), "task": "stories", "part": "test"}
    Store(tmp_path / "store").obtain("evaluations", measured, lambda workspace: {"metrics": {"accuracy": 0.25}})
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with serve(tmp_path / "hub", tmp_path / "cache", monkeypatch):
        run_command(
            tmp_path, *asked, f"store.path={tmp_path}/pushed", "store.push_to=me/stories", run_of=language
        )
    assert not holds(tmp_path, TOKEN)
    pushed = tmp_path / "hub/models/me/stories"
    there, here = ({file.name for file in folder.iterdir()} for folder in (pushed, tmp_path / "pushed"))
    assert there == here - {"manifest.json"}, "which may name paths of this machine"
    card = ModelCard.load(pushed / "README.md").data
    assert (card.library_name, card.model_name) == ("transformers", "pushed")
    assert [(r.dataset_name, r.metric_type, r.metric_value) for r in card.eval_results] == [
        ("stories", "accuracy", 0.25)
    ]
    run_command(tmp_path, *asked, f"store.path={tmp_path}/bare")
    assert "backbone is not this" in caplog.text
    assert set(open_checkpoint(tmp_path / "bare/model.safetensors")) == set(state)


def test_an_export_s_card_shows_names_as_they_are_and_nothing_of_them_is_markup() -> None:
    name = "<script>alert(1)</script> [x](javascript:alert(1)) `c` **b** |"
    content = {"task": f"{name}\n```\n{name}"}
    artifact = Artifact("experts", "0" * 24, Path("x"), {}, content=content, created="2026-01-02T03:04:05Z")
    card = make_card(artifact, False, name, {})
    tokens = markdown_it.MarkdownIt("gfm-like", {"linkify": False}).parse(card.partition("---\n# ")[2])
    inline = [child.type for token in tokens for child in token.children or ()]
    assert set(inline) == {"text"}
    assert [
        token.type for token in tokens if token.type not in ("inline", "paragraph_open", "paragraph_close")
    ] == ["fence"]
    assert name in tokens[1].content.replace("\\", "").replace("&lt;", "<").replace("&gt;", ">")
