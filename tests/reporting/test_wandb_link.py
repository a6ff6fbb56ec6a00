"""Artifacts of a run and what was made of what, offline, by a link afterwards, and online."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from reporting.wandb_offline import KEY, read_offline_records

from mergekit_lab.errors import InputError
from mergekit_lab.reporting import Product, Start, WandbTracker
from mergekit_lab.reporting.wandb_link import link
from mergekit_lab.reporting.wandb_tracker import LINEAGE

# wandb.Table and wandb.Image keep their files in a TemporaryDirectory that they never close
pytestmark = pytest.mark.filterwarnings("ignore:Implicitly cleaning up:ResourceWarning")


def make_product(folder: Path, kind: str, key: str, inputs=()) -> Product:
    """An artifact of a store: weights and the manifest that names their hash."""
    folder_of_key = folder / kind / key
    folder_of_key.mkdir(parents=True, exist_ok=True)
    (folder_of_key / "model.safetensors").write_bytes(key.encode())
    (folder_of_key / "manifest.json").write_text(
        json.dumps({"key": key, "files": {"model.safetensors": "0" * 64}})
    )
    return Product(
        f"{kind}-digits-adamw-s0", key, kind, folder_of_key, tuple(inputs), "What it is.", {"seed": 0}
    )


def make_reference(kind: str, key: str) -> str:
    return f"{kind}-digits-adamw-s0:{key}"


EXPERT, FISHER, MERGED = (
    make_reference("experts", "a"),
    make_reference("fishers", "b"),
    make_reference("merged", "c"),
)


def chain(folder: Path) -> list[Product]:
    """An expert, its Fisher, the model merged of both, its evaluation."""
    return [
        make_product(folder, "experts", "a"),
        make_product(folder, "fishers", "b", [EXPERT]),
        make_product(folder, "merged", "c", [EXPERT, FISHER]),
        make_product(folder, "evaluations", "d", [MERGED]),
        make_product(folder, "evaluations", "e", [MERGED]),
    ]


def test_offline_artifacts_hold_manifests_and_lineage_waits_for_the_link(server, tmp_path):
    tracker = WandbTracker(project="p", entity="team", mode="offline")
    first, second = chain(tmp_path / "store")[:2], chain(tmp_path / "store")[1:]
    for job, products in (("finetune", first), ("merge", second)):
        tracker.start(Start({}, tmp_path / job, name="n", job_type=job, identity=f"id-{job}"))
        for each in (*products, products[0]):
            tracker.log_product(each)
        tracker.finish()
    logged = [r.artifact for r in read_offline_records(tmp_path / "merge") if r.HasField("artifact")]
    (merged,) = logged  # evaluations are lines of a table, and the Fisher is of the run before
    assert (merged.name, merged.type) == ("merged-digits-adamw-s0", "merged")
    assert merged.description == "What it is."
    assert json.loads(merged.metadata) == {"seed": 0, "key": "c"}
    assert sorted(merged.aliases) == ["c", "latest"]
    assert [entry.path for entry in merged.manifest.contents] == ["manifest.json"]
    lines = [json.loads(t) for t in (tmp_path / "merge" / LINEAGE).read_text().splitlines()]
    assert {line["run"] for line in lines} == {"id-merge"}
    assert [(line["name"], line["uses"], line["digest"]) for line in lines] == [
        (None, [FISHER], None),
        (MERGED, [EXPERT], merged.digest),  # the Fisher's use was told
    ]


def test_evaluations_of_an_offline_run_tell_once_which_model_they_used(server, tmp_path):
    tracker = WandbTracker(project="p", mode="offline")
    tracker.start(Start({}, tmp_path / "run", name="n", identity="i"))
    for each in chain(tmp_path / "store")[3:]:
        tracker.log_product(each)
    tracker.finish()
    assert not [r for r in read_offline_records(tmp_path / "run") if r.HasField("artifact")]
    (line,) = [json.loads(text) for text in (tmp_path / "run" / LINEAGE).read_text().splitlines()]
    assert (line["name"], line["digest"], line["uses"]) == (None, None, [MERGED])
    api = Api({f"me/p/{MERGED}": "C"})
    assert link([tmp_path], api) == 1
    assert api.calls == [("me/p/i", f"me/p/{MERGED}")]


class Api:
    """What W&B has after an upload, and the uses it was calls of."""

    default_entity = "me"

    def __init__(self, digests: dict[str, str]) -> None:
        self.digests, self.calls = digests, []

    def artifact(self, path: str):
        if path not in self.digests:
            raise ValueError("not found")
        return SimpleNamespace(path=path, digest=self.digests[path])

    def run(self, path: str):
        return SimpleNamespace(use_artifact=lambda artifact: self.calls.append((path, artifact.path)))


def write_lineage(folder: Path, **changes) -> None:
    line = {
        "run": "r",
        "entity": None,
        "project": "p",
        "name": EXPERT,
        "digest": "A",
        "uses": [],
    } | changes
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LINEAGE).open("a") as file:
        file.write(json.dumps(line) + "\n")


def test_links_are_told_once_for_every_run_of_a_sweep_after_the_upload(tmp_path):
    write_lineage(tmp_path / "0")
    for _ in range(2):
        write_lineage(tmp_path / "1", run="s", name=MERGED, digest="C", uses=[EXPERT])
    api = Api({f"me/p/{EXPERT}": "A"})
    assert link([tmp_path], api) == 1
    assert api.calls == [("me/p/s", f"me/p/{EXPERT}")]
    with pytest.raises(InputError, match="digest B, and A"):
        link([tmp_path], Api({f"me/p/{EXPERT}": "B"}))
    with pytest.raises(InputError, match=r"me/p/experts-digits-adamw-s0:a.*`wandb sync`"):
        link([tmp_path], Api({}))
    with pytest.raises(InputError, match="logger=wandb"):
        link([tmp_path / "store"], api)


def test_online_inputs_are_used_as_the_objects_that_were_logged_or_by_name(monkeypatch, tmp_path):
    used, logged = [], []

    def log(artifact, aliases):
        logged.append((artifact.name, aliases[-1]))
        return SimpleNamespace(wait=lambda: f"logged {artifact.name}")

    online = SimpleNamespace(
        offline=False, id="r", define_metric=lambda *a, **k: None, finish=lambda: None,
        use_artifact=used.append,
        log_artifact=log,
    )  # fmt: skip
    asked = {}
    monkeypatch.setattr("wandb.init", lambda **arguments: asked.update(arguments) or online)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    tracker = WandbTracker(mode="online", weights=True)
    expert, fisher, *_ = chain(tmp_path / "store")
    for products in (
        [expert],
        [fisher, make_product(tmp_path / "store", "merged", "e", [make_reference("experts", "z")])],
    ):
        tracker.start(Start({}, tmp_path / "run", name="n", identity="i"))
        for each in products:
            tracker.log_product(each)
    assert (asked["id"], asked["resume"]) == ("i", "allow")
    assert [key for _, key in logged] == ["a", "b", "e"]
    assert used == ["logged experts-digits-adamw-s0", make_reference("experts", "z")]
    assert not (tmp_path / "run" / LINEAGE).exists()
