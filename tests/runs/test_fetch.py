"""The hub's own client against a hub on this machine: downloading, its cache, carrying it elsewhere."""

import json
from pathlib import Path

import open_clip
import pytest
import torch
from composing import compose_config
from hub_repos import make_pictures, write_parquet, write_repository, write_tar
from hub_server import COMMIT, serve
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

import mergekit_lab.backbones.open_clip as room
from mergekit_lab import InputError
from mergekit_lab.backbones import OpenClip, to_transformers
from mergekit_lab.programs import start
from mergekit_lab.runs.fetch import list_missing
from mergekit_lab.runs.published_experts import find_expert, must_download
from mergekit_lab.schema.check import build
from mergekit_lab.tasks import HubImages
from mergekit_lab.tasks.hub import download_data, find_cached_data

NAME = "tiny-clip"
CONFIG = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 32, "layers": 1, "width": 64, "patch_size": 16},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 16, "heads": 1, "layers": 1},
}
MEAN, STD = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)
WEIGHTS = {"openai": {"hf_hub": "timm/tiny.openai/", "quick_gelu": True}}
WEIGHTS["laion2b"] = {"hf_hub": "laion/tiny.laion2b/", "mean": MEAN, "std": STD}
EXPERT = "tanganke/clip-vit-base-patch32_eurosat"
RUN = [
    "suite=clip8",
    *(f"~suite.tasks.{task}" for task in ("cars", "dtd", "gtsrb", "mnist", "resisc45", "svhn", "sun397")),
    "backbone=clip_vit_b32", f"backbone.architecture={NAME}", "backbone.precision=float32", "joint=false",
    "experts=hub:tanganke", "merger=average", "device=cpu", "progress=false",
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def tiny_clip():
    open_clip.factory._MODEL_CONFIGS[NAME] = CONFIG
    open_clip.pretrained._PRETRAINED[NAME] = WEIGHTS
    room._HUB_NAMES[NAME] = "clip-vit-base-patch32"
    yield
    del open_clip.factory._MODEL_CONFIGS[NAME], open_clip.pretrained._PRETRAINED[NAME], room._HUB_NAMES[NAME]


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    """EuroSAT, two sets of weights and an expert, with files beside them that nobody wants."""
    root = tmp_path_factory.mktemp("hub")
    data = root / "datasets/tanganke/eurosat"
    write_repository(build({**compose_config(["suite=clip8"])[0].suite.tasks.eurosat}, HubImages), data)
    write_parquet(data / "data/validation-00000-of-00001.parquet", make_pictures(5, 10, 7))
    for seed, tag in enumerate(WEIGHTS.values()):
        model_folder = root / "models" / tag["hf_hub"]
        model_folder.mkdir(parents=True)
        save_file(
            room.make_whole_model((NAME, None, seed)).state_dict(), model_folder / "open_clip_model.safetensors"
        )
    expert = root / "models" / EXPERT
    expert.mkdir(parents=True)
    renamed = to_transformers(OpenClip(NAME, None, seed=5).make_model().state_dict())
    kept = {n: t for n, t in renamed.items() if n.startswith("vision_model.")}
    save_file(kept, expert / "model.safetensors", {"format": "pt"})
    for folder in (data, expert):
        for other in ("README.md", ".gitattributes", "logs/events.log", "pytorch_model.bin"):
            (folder / other).parent.mkdir(exist_ok=True)
            (folder / other).write_text("nothing to read here")
    return root


@pytest.fixture
def online(published: Path, tmp_path: Path, monkeypatch):
    """The client asks the hub on this machine, and has an empty cache; gives what it asked."""
    with serve(published, tmp_path / "cache", monkeypatch) as asked:
        yield asked


def read_values(tmp_path: Path, *overrides: str) -> dict[str, float]:
    """Values by key of a run's evaluations."""
    cfg, choices = compose_config([*RUN, f"store.root={tmp_path}/store", *overrides])
    start(cfg, tmp_path / "run", choices, [])
    values = {}
    for file in sorted((tmp_path / "store").glob("evaluations/*/manifest.json")):
        values[file.parent.name] = json.loads(file.read_text())["info"]["value"]
    return values


def test_what_a_run_downloaded_is_found_without_asking_again(online, tmp_path, monkeypatch) -> None:
    cfg, _ = compose_config([*RUN, f"store.root={tmp_path}/store"])
    assert len(list_missing(cfg)[0]) == 3
    first = read_values(tmp_path)
    expert = load_file(next((tmp_path / "store").glob("experts/*/model.safetensors")))
    own = OpenClip(NAME, None, seed=5).make_model().state_dict()
    assert torch.equal(expert["visual.conv1.weight"], own["visual.conv1.weight"])
    assert not any("events.log" in line or "pytorch_model.bin" in line for line in online)
    files = [line.rpartition("/")[2] for line in online if line.startswith("GET /datasets")]
    assert [name.partition("-")[0] for name in files if name.endswith(".parquet")] == [
        "validation",  # first, for a download that was cut must not pass for a source that has none
        *("train", "train", "test", "test"),
    ]
    assert list_missing(cfg) == ([], [])
    online.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert read_values(tmp_path / "again") == first
    assert online == []


@pytest.mark.parametrize("weights", WEIGHTS)
def test_what_is_fetched_and_carried_gives_the_same_features_without_a_network(
    weights: str, online, tmp_path, monkeypatch
) -> None:
    asked = [*RUN, f"backbone.weights={weights}", f"experts={{eurosat: {EXPERT}}}"]
    cfg, choices = compose_config([*asked, "stage=fetch", f"fetch_to={tmp_path}/fetched"])
    start(cfg, tmp_path / "run", choices, [])
    pixels = torch.randint(0, 256, (2, 3, 32, 32), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    there = OpenClip(NAME, weights)
    with torch.no_grad():
        wanted = there.make_model()(pixels)
    (tmp_path / "fetched").rename(tmp_path / "carried")
    added = (tmp_path / "carried/USE.txt").read_text().splitlines()[-1]
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "empty"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    online.clear()
    more = added.replace("FOLDER", f"{tmp_path}/carried").split()
    here = build(compose_config([*RUN, *more])[0].backbone, OpenClip)
    assert here.uses_quick_gelu() == there.uses_quick_gelu() == (weights == "openai")
    with torch.no_grad():
        assert torch.equal(here.make_model()(pixels), wanted)
    assert len(read_values(tmp_path, *more)) == 3  # the backbone, the expert and the merged model
    assert online == []


def test_shards_without_a_count_are_whole_once_the_last_file_is_there(online, published, tmp_path) -> None:
    repository = published / "datasets/clip-benchmark/wds_fer2013"
    for number, name in enumerate(("train/0", "train/1", "test/0", "test/1")):
        write_tar(repository / f"{name}.tar", make_pictures(4, 7, number))
    (repository / ".gitattributes").touch()
    asked = "clip-benchmark/wds_fer2013", ["train", "test"]
    cached = download_data(*asked, None)
    assert find_cached_data(*asked, None) == cached
    (cached / ".gitattributes").unlink()
    (cached / "test/1.tar").unlink()  # as a download that was cut leaves them
    assert find_cached_data(*asked, None) is None
    assert len(list(download_data(*asked, None).glob("test/*.tar"))) == 2
    assert find_cached_data(*asked, None) == cached


def test_what_the_hub_does_not_have_is_named(online, tmp_path) -> None:
    more = ["sources.eurosat=tanganke/eurosta", "stage=fetch", f"fetch_to={tmp_path}/f"]
    cfg, _ = compose_config([*RUN, *more])
    with pytest.raises(InputError, match=r"tanganke/eurosta.*404"):
        start(cfg, tmp_path / "run", {}, [])
    with pytest.raises(InputError, match=r"OpenAI's.*'laion2b'"):
        read_values(tmp_path, "backbone.weights=laion2b")
    with pytest.raises(InputError, match=r"nobody/clip-vit-base-patch32_eurosat.*status 404"):
        read_values(tmp_path, "experts=hub:nobody")


@pytest.mark.parametrize("source", ["/nope", "./x", "a/b/c.pt"])
def test_an_expert_that_is_neither_a_path_nor_a_hub_id_is_named(source, tmp_path) -> None:
    for more in ([], ["stage=fetch", f"fetch_to={tmp_path}/f"]):
        asked = [*RUN, "backbone.weights=null", f"experts={{eurosat: {source}}}", "data_root=/tmp", *more]
        with pytest.raises(InputError, match=f"{source} is neither a path"):
            start(compose_config(asked)[0], tmp_path / "run", {}, [])


def test_an_expert_of_a_revision_is_asked_for_by_it(online, tmp_path) -> None:
    source = f"{EXPERT}@{COMMIT}"
    assert must_download(source)
    asked = [*RUN, "backbone.weights=null", f"experts={{eurosat: {source}}}"]
    start(compose_config([*asked, "stage=fetch", f"fetch_to={tmp_path}/f"])[0], tmp_path / "run", {}, [])
    assert (tmp_path / "f" / "experts" / NAME / "eurosat" / "model.safetensors").is_file()
    assert not must_download(source)


def test_what_is_wrong_is_listed_with_what_is_missing(online, tmp_path, monkeypatch) -> None:
    wrong = ["sources.eurosat=/no/data", "backbone.weights=/no/weights.pt", "experts=/no/experts"]
    cfg = compose_config([*(part for part in RUN if part != "~suite.tasks.dtd"), *wrong])[0]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match="4 missing for this run") as caught:
        start(cfg, tmp_path / "run", {}, [])
    for name in ("tanganke/dtd", "/no/data", "/no/weights.pt", "/no/experts"):
        assert str(caught.value).count(name) == 1
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(InputError, match=r"^sources\.eurosat is '/no/data'"):
        start(cfg, tmp_path / "run", {}, [])


def test_backbones_share_a_fetched_folder(online, tmp_path, monkeypatch) -> None:
    """Each finds its own weights and experts below the same options."""
    other = "other-clip"
    monkeypatch.setitem(open_clip.factory._MODEL_CONFIGS, other, {**CONFIG, "embed_dim": 8})
    own = [tmp_path / "own.pt", tmp_path / "expert.pt"]
    for seed, file in enumerate(own):
        torch.save(room.make_whole_model((other, None, seed)).state_dict(), file)
    jobs = {
        NAME: ["backbone.weights=openai", f"experts={{eurosat: {EXPERT}}}"],
        other: [f"backbone.weights={own[0]}", f"experts={{eurosat: {own[1]}}}"],
    }
    used = []
    for name, job in jobs.items():
        asked = [*RUN, f"backbone.architecture={name}", *job, "stage=fetch", f"fetch_to={tmp_path}/fetched"]
        start(compose_config(asked)[0], tmp_path / "run", {}, [])
        used.append((tmp_path / "fetched/USE.txt").read_text())
    assert used[0] == used[1]
    more = used[0].splitlines()[-1].replace("FOLDER", f"{tmp_path}/fetched").split()
    for name, job in jobs.items():
        carried, _ = compose_config([*RUN, f"backbone.architecture={name}", *more])
        assert list_missing(carried) == ([], [])
        backbone, task = build(carried.backbone, OpenClip), build(carried.suite.tasks.eurosat, HubImages)
        wanted = OpenClip(name, job[0].partition("=")[2])
        assert backbone.identify()["sha256"] == wanted.identify()["sha256"]
        expert = find_expert(carried.experts, backbone, task)
        assert Path(expert).parent.name == name
        assert backbone.source.find_published_name() == wanted.weights


def test_a_dry_fetch_lists_and_takes_nothing(online, tmp_path, caplog) -> None:
    cfg = compose_config([*RUN, "dry_run=true", "stage=fetch", f"fetch_to={tmp_path}/f"])[0]
    with caplog.at_level("INFO"):
        start(cfg, tmp_path / "run", {}, [])
    for what in ("eurosat: ", "weights openai: ", f"expert of eurosat, {EXPERT}: "):
        assert f"would fetch {what}{tmp_path}/f" in caplog.text
    cfg = compose_config([*RUN, "dry_run=true", "stage=check_data"])[0]
    with caplog.at_level("INFO"):
        start(cfg, tmp_path / "run", {}, [])
    assert "check_data would decode every" in caplog.text
    assert not online
    assert not list(tmp_path.iterdir())
