"""Artifacts of a run and what was made of what, offline, by a link afterwards, and online."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from reporting.wandb_offline import KEY, offline_records

from mergekit_lab.errors import InputError
from mergekit_lab.reporting import Product, WandbTracker
from mergekit_lab.reporting.wandb_link import link
from mergekit_lab.reporting.wandb_tracker import LINEAGE

# wandb.Table and wandb.Image keep their files in a TemporaryDirectory that they never close
pytestmark = pytest.mark.filterwarnings("ignore:Implicitly cleaning up:ResourceWarning")


def product(folder: Path, kind: str, key: str, inputs=()) -> Product:
    """An artifact of a store: weights and the manifest that names their hash."""
    place = folder / kind / key
    place.mkdir(parents=True, exist_ok=True)
    (place / "model.safetensors").write_bytes(key.encode())
    (place / "manifest.json").write_text(json.dumps({"key": key, "files": {"model.safetensors": "0" * 64}}))
    return Product(f"{kind}-{key}", kind, place, tuple(inputs))


def chain(folder: Path) -> list[Product]:
    """An expert, its Fisher, the model merged of both, its evaluation."""
    names = ["experts-a", "fishers-b", "merged-c", "evaluations-d"]
    inputs = [(), names[:1], names[:2], names[2:3]]
    return [product(folder, *name.split("-"), i) for name, i in zip(names, inputs, strict=True)]


def test_offline_artifacts_hold_manifests_and_lineage_waits_for_the_link(server, tmp_path):
    tracker = WandbTracker(project="p", entity="team", mode="offline")
    first, second = chain(tmp_path / "store")[:2], chain(tmp_path / "store")[1:]
    for job, products in (("finetune", first), ("merge", second)):
        tracker.start({}, run_dir=tmp_path / job, name="n", job_type=job, identity=f"id-{job}")
        for each in (*products, products[0]):
            tracker.log_product(each)
        tracker.finish()
    logged = [r.artifact for r in offline_records(tmp_path / "merge") if r.HasField("artifact")]
    assert [a.name for a in logged] == ["fishers-b", "merged-c", "evaluations-d"]
    assert [a.type for a in logged] == ["fishers", "merged", "evaluations"]
    assert [[e.path for e in a.manifest.contents] for a in logged] == [["manifest.json"]] * 3
    lines = [json.loads(t) for t in (tmp_path / "merge" / LINEAGE).read_text().splitlines()]
    assert {line["run"] for line in lines} == {"id-merge"}
    assert [(line["name"], line["uses"], line["digest"]) for line in lines] == [
        ("fishers-b", ["experts-a"], logged[0].digest),
        ("merged-c", ["experts-a"], logged[1].digest),  # the Fisher is this run's own
        ("evaluations-d", [], logged[2].digest),
    ]


class Api:
    """What W&B has after an upload, and the uses it was told of."""

    default_entity = "me"

    def __init__(self, digests: dict[str, str]) -> None:
        self.digests, self.told = digests, []

    def artifact(self, path: str):
        if path not in self.digests:
            raise ValueError("not found")
        return SimpleNamespace(path=path, digest=self.digests[path])

    def run(self, path: str):
        return SimpleNamespace(use_artifact=lambda artifact: self.told.append((path, artifact.path)))


def lineage(folder: Path, **changes) -> None:
    line = {
        "run": "r",
        "entity": None,
        "project": "p",
        "name": "experts-a",
        "digest": "A",
        "uses": [],
    } | changes
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LINEAGE).open("a") as file:
        file.write(json.dumps(line) + "\n")


def test_links_are_told_once_for_every_run_of_a_sweep_after_the_upload(tmp_path):
    lineage(tmp_path / "0")
    for _ in range(2):
        lineage(tmp_path / "1", run="s", name="merged-c", digest="C", uses=["experts-a"])
    api = Api({"me/p/experts-a:latest": "A"})
    assert link([tmp_path], api) == 1
    assert api.told == [("me/p/s", "me/p/experts-a:latest")]
    with pytest.raises(InputError, match="digest B, and A was made here"):
        link([tmp_path], Api({"me/p/experts-a:latest": "B"}))
    with pytest.raises(InputError, match=r"no artifact me/p/experts-a:latest .*run `wandb sync` first"):
        link([tmp_path], Api({}))
    with pytest.raises(InputError, match="no offline run of logger=wandb was here"):
        link([tmp_path / "store"], api)


def test_online_inputs_are_used_as_the_objects_that_were_logged_or_by_name(monkeypatch, tmp_path):
    used, logged = [], []
    online = SimpleNamespace(
        offline=False, id="r", define_metric=lambda *a, **k: None, finish=lambda: None,
        use_artifact=used.append,
        log_artifact=lambda a: logged.append(a.name) or SimpleNamespace(wait=lambda: f"logged {a.name}"),
    )  # fmt: skip
    asked = {}
    monkeypatch.setattr("wandb.init", lambda **arguments: asked.update(arguments) or online)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    tracker = WandbTracker(mode="online", weights=True)
    expert, fisher, *_ = chain(tmp_path / "store")
    for products in ([expert], [fisher, product(tmp_path / "store", "merged", "e", ["experts-z"])]):
        tracker.start({}, run_dir=tmp_path / "run", name="n", identity="i")
        for each in products:
            tracker.log_product(each)
    assert (asked["id"], asked["resume"]) == ("i", "allow")
    assert logged == ["experts-a", "fishers-b", "merged-e"]
    assert used == ["logged experts-a", "experts-z:latest"]
    assert not (tmp_path / "run" / LINEAGE).exists()
