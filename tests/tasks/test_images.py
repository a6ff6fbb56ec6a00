"""Published data sets as tasks: every layout, order of labels, parts, fingerprints, and what is decoded."""

import shutil
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from hub_repos import (
    SIZES,
    encode_picture,
    make_pictures,
    write_folders,
    write_parquet,
    write_repository,
    write_tar,
)
from hydra.utils import get_class
from PIL import Image

from mergekit_lab.errors import InputError
from mergekit_lab.paths import find_conf_dir
from mergekit_lab.tasks import HubImages, check_task
from mergekit_lab.tasks.decoding import decode

FILES = sorted((find_conf_dir() / "task" / "clip").glob("*.yaml"))
PUBLISHED_TEMPLATES = {
    **{"cars": 8, "dtd": 8, "eurosat": 3, "gtsrb": 3, "mnist": 1, "resisc45": 18, "sun397": 2, "svhn": 1},
    **{
        "cifar10": 18,
        "cifar100": 18,
        "stl10": 2,
        "pets": 1,
        "flowers102": 1,
        "pcam": 1,
        "fer2013": 6,
        "food101": 1,
    },
    **{"fashion_mnist": 2, "rendered_sst2": 1, "emnist_letters": 1, "emnist_digits": 1, "kmnist": 1},
}
PUBLISHED_CLASSES = {
    **{
        "cars": 196,
        "dtd": 47,
        "eurosat": 10,
        "gtsrb": 43,
        "mnist": 10,
        "resisc45": 45,
        "sun397": 397,
        "svhn": 10,
    },
    **{"cifar10": 10, "cifar100": 100, "stl10": 10, "pets": 37, "flowers102": 102, "pcam": 2, "fer2013": 7},
    **{"food101": 101, "fashion_mnist": 10, "rendered_sst2": 2, "emnist_letters": 26, "emnist_digits": 10},
    "kmnist": 10,
}


def configure(file: Path, **changes: object) -> HubImages:
    content = yaml.safe_load(file.read_text())
    assert get_class(content.pop("_target_")) is HubImages
    return HubImages(**{**content, "source": None, "root": None, **changes})


def make_eurosat(**changes: object) -> HubImages:
    return configure(find_conf_dir() / "task" / "clip" / "eurosat.yaml", **changes)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_task_file_states_every_field_and_its_names_are_published_with_a_license(file: Path) -> None:
    content = yaml.safe_load(file.read_text())
    assert set(content) - {"_target_"} == {field.name for field in fields(HubImages)} - {"keep"}
    assert content["source"] == f"${{sources.{file.stem}}}"
    assert file.stem in yaml.safe_load((find_conf_dir() / "main.yaml").read_text())["sources"]
    task = configure(file)
    assert task.name == file.stem
    assert len(set(task.classes)) == len(task.classes) == PUBLISHED_CLASSES[task.name]
    assert len(task.templates) == PUBLISHED_TEMPLATES[task.name]
    assets = Path(__file__).parents[2] / "mergekit_lab" / "assets" / "clip"
    for asset, name in (("classes", task.class_names), ("templates", task.prompts)):
        assert "MIT" in (assets / asset / f"{name}.txt").read_text().splitlines()[0]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_task_reads_its_repositorys_layout(file: Path, tmp_path: Path) -> None:
    task = configure(file, source=str(write_repository(configure(file), tmp_path)))
    train, validation, test = (task.load_samples(part) for part in ("train", "validation", "test"))
    assert (len(train), len(validation), len(test)) == (SIZES["train"] - 2, 2, SIZES["test"])
    assert test.images.shape == (SIZES["test"], 3, 224, 224)
    assert test.labels.tolist() == [i % len(task.classes) for i in range(SIZES["test"])]
    assert task.count("train") == len(train)
    assert len(task.fingerprint()) == 64


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return write_repository(make_eurosat(), tmp_path / "eurosat")


def test_layouts_of_the_same_pictures_are_the_same_task(repository: Path, tmp_path: Path) -> None:
    parquet = make_eurosat(source=str(repository))
    folders, tars = tmp_path / "folders", tmp_path / "tars"
    for number, (part, count) in enumerate(SIZES.items()):
        rows = make_pictures(count, 10, number)
        write_tar(tars / part / "0.tar", rows)
        write_folders(folders / part, rows, sorted(f"{i} {name}" for i, name in enumerate(parquet.classes)))
    assert make_eurosat(source=str(tars)).fingerprint() == parquet.fingerprint()
    other = make_eurosat(source=str(folders))
    assert len(other.load_samples("test")) == SIZES["test"]
    assert sorted(other.load_samples("test").labels.tolist()) == sorted(
        parquet.load_samples("test").labels.tolist()
    )


def test_labels_in_another_order_of_the_same_names_are_put_into_ours(repository: Path, tmp_path: Path) -> None:
    ours = make_eurosat(source=str(repository))
    turned = list(reversed(ours.classes))
    for number, (part, count) in enumerate(SIZES.items()):
        rows = [(picture, 9 - label) for picture, label in make_pictures(count, 10, number)]
        names = [name.title().replace(" ", "_") for name in turned]
        write_parquet(tmp_path / "turned" / f"{part}-00000-of-00001.parquet", rows, names=names)
    theirs = make_eurosat(source=str(tmp_path / "turned"))
    assert torch.equal(theirs.load_samples("test").labels, ours.load_samples("test").labels)
    assert theirs.fingerprint() == ours.fingerprint()


def test_a_part_of_its_own_validates_where_the_source_has_one(repository: Path) -> None:
    assert make_eurosat(source=str(repository)).count("train") == 18
    write_parquet(repository / "data" / "validation-00000-of-00001.parquet", make_pictures(3, 10, 7))
    own = make_eurosat(source=str(repository))
    assert (own.count("train"), own.count("validation")) == (20, 3)


def test_the_validation_part_is_cut_off_by_the_published_rule() -> None:
    task = make_eurosat()
    assert [task.count_validation(total) for total in (1880, 73257, 9)] == [188, 5000, 0]


def test_evaluation_sees_what_pillow_resizes_and_cuts(repository: Path) -> None:
    task = make_eurosat(source=str(repository))
    picture, _ = make_pictures(SIZES["test"], 10, 1)[3]
    image = decode(picture)
    scale = 224 / min(image.size)
    image = image.resize(
        (max(224, int(image.width * scale)), max(224, int(image.height * scale))), Image.BICUBIC
    )
    left, top = round((image.width - 224) / 2), round((image.height - 224) / 2)
    expected = np.asarray(image.crop((left, top, left + 224, top + 224))).transpose(2, 0, 1)
    assert np.array_equal(task.load_samples("test").images[3].numpy(), expected)


def test_training_keeps_the_whole_picture_with_its_shorter_side_at_most_256(tmp_path: Path) -> None:
    sizes = [(40, 30), (600, 300), (300, 700)]
    rows = [(encode_picture(i, *size), i) for i, size in enumerate(sizes)] * 4
    write_parquet(tmp_path / "train-00000-of-00001.parquet", rows)
    write_parquet(tmp_path / "test-00000-of-00001.parquet", rows)
    samples = make_eurosat(source=str(tmp_path)).load_samples("train")
    packed = samples.pack(torch.arange(len(samples)))
    pixels, kept = packed.pad(), packed.sizes
    wanted = {0: [30, 40], 1: [256, 512], 2: [597, 256]}
    assert kept.tolist() == [wanted[label] for label in samples.labels.tolist()]
    small = samples.labels.tolist().index(0)
    assert np.array_equal(pixels[small, :, :30, :40].numpy(), np.asarray(decode(rows[0][0])).transpose(2, 0, 1))
    assert samples.images[torch.tensor([small])].shape == (1, 3, 224, 224)
    for index, size in enumerate(sizes):
        row = samples.labels.tolist().index(index)
        alone = samples.pack(torch.tensor([row])).pad()[0]
        assert torch.equal(pixels[row, :, : alone.shape[1], : alone.shape[2]], alone), size


def test_the_fingerprint_is_of_pictures_and_labels_not_of_places(repository: Path, tmp_path: Path) -> None:
    first = make_eurosat(source=str(repository)).fingerprint()
    moved = shutil.copytree(repository, tmp_path / "elsewhere")
    assert make_eurosat(source=str(moved)).fingerprint() == first
    rows = [(picture, (label + 1) % 10) for picture, label in make_pictures(SIZES["test"], 10, 1)]
    for old in (moved / "data").glob("test-*"):
        old.unlink()
    write_parquet(moved / "data" / "test-00000-of-00001.parquet", rows)
    assert make_eurosat(source=str(moved)).fingerprint() != first


def test_fer2013s_archive_is_read_and_its_labels_are_put_in_order(tmp_path: Path) -> None:
    gray = np.random.default_rng(0).integers(0, 256, (21, 48 * 48))
    usage = ["Training"] * 14 + ["PublicTest"] * 4 + ["PrivateTest"] * 3
    lines = [f"{i % 7},{' '.join(map(str, gray[i]))},{usage[i]}" for i in range(21)]
    (tmp_path / "fer2013.csv").write_text("emotion,pixels,Usage\n" + "\n".join(lines) + "\n")
    task = configure(find_conf_dir() / "task" / "clip" / "fer2013.yaml", source=str(tmp_path))
    assert (task.count("train") + task.count("validation"), task.count("test")) == (14, 7)
    test = task.load_samples("test")
    shown = [task.classes[label] for label in test.labels.tolist()]
    assert shown == ["angry", "disgusted", "fearful", "happy", "sad", "surprised", "neutral"]


def test_the_check_names_corrupt_images_and_those_that_stand_in_two_parts(tmp_path: Path) -> None:
    train, test = make_pictures(SIZES["train"], 10), make_pictures(SIZES["test"], 10, 1)
    test[2] = (test[2][0][:60], test[2][1])
    test[4] = train[5]
    write_parquet(tmp_path / "train-00000-of-00001.parquet", train)
    write_parquet(tmp_path / "test-00000-of-00001.parquet", test)
    task = make_eurosat(source=str(tmp_path), validation_share=0.05)
    check = check_task(task)
    assert check.parts["test"].corrupt == ["test-00000-of-00001.parquet, row 2"]
    assert sum(check.shared.values()) == 1
    assert any("test-00000-of-00001.parquet, row 4" in name for name in check.shared_names)
    assert check.wrong == ["eurosat: 1 images of test cannot be decoded"]
    assert check.parts["test"].published == 2700
    assert check.parts["train"].published == 21600 - 1080
    with pytest.raises(InputError, match=r"test-00000-of-00001.parquet, row 2.*stage=check_data"):
        task.load_samples("test")


def test_a_run_is_warned_of_test_images_that_are_trained_on(tmp_path: Path, caplog) -> None:
    train, test = make_pictures(SIZES["train"], 10), make_pictures(SIZES["test"], 10, 1)
    write_parquet(tmp_path / "train-00000-of-00001.parquet", train)
    write_parquet(tmp_path / "test-00000-of-00001.parquet", test)
    make_eurosat(source=str(tmp_path)).fingerprint()
    assert not caplog.records
    write_parquet(tmp_path / "test-00000-of-00001.parquet", [*test, *train[:3]])
    make_eurosat(source=str(tmp_path)).fingerprint()
    assert "eurosat: 3 images of" in caplog.text


def test_the_check_sets_label_names_that_differ_beside_ours(tmp_path: Path) -> None:
    names = ["AnnualCrop", "Forest", "HerbaceousVegetation", "Highway", "Industrial", "Pasture"]
    names += ["PermanentCrop", "Residential", "River", "SeaLake"]
    for number, part in enumerate(SIZES):
        write_parquet(tmp_path / f"{part}-00000-of-00001.parquet", make_pictures(10, 10, number), names=names)
    check = check_task(make_eurosat(source=str(tmp_path)))
    assert "9: SeaLake ↔ lake or sea" in check.other_labels
    assert not any("Forest" in line for line in check.other_labels)


def test_a_task_that_ships_is_checked_too() -> None:
    from mergekit_lab.tasks import Digits

    report = check_task(Digits(train_size=40, validation_size=20, test_size=30))
    assert [check.images for check in report.parts.values()] == [40, 20, 30]
    assert not any(report.shared.values())
    assert not report.wrong


def test_wrong_sources_are_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"sources.eurosat is '/nowhere'"):
        make_eurosat(source="/nowhere").load_samples("test")
    (tmp_path / "train").mkdir()
    with pytest.raises(InputError, match="holds no part test"):
        make_eurosat(source=str(tmp_path)).load_samples("test")
    write_parquet(tmp_path / "a" / "train-0.parquet", make_pictures(2, 2), label="class")
    with pytest.raises(InputError, match="no column 'label' of"):
        make_eurosat(source=str(tmp_path / "a")).load_samples("train")
    write_parquet(tmp_path / "b" / "train-0.parquet", make_pictures(40, 11))
    write_parquet(tmp_path / "b" / "test-0.parquet", make_pictures(40, 11))
    with pytest.raises(InputError, match=r"names 10 classes,.*'train' span 0 … 10"):
        make_eurosat(source=str(tmp_path / "b")).load_samples("test")
    (tmp_path / "b" / "train-0.parquet").write_bytes(b"PAR1 cut")
    with pytest.raises(InputError, match=r"train-0.parquet is not a"):
        make_eurosat(source=str(tmp_path / "b")).load_samples("train")


def test_unknown_class_names_and_prompts_are_refused_with_the_nearest() -> None:
    with pytest.raises(InputError, match=r"'eurosatt',.*'eurosat'"):
        make_eurosat(class_names="eurosatt").fingerprint()
    with pytest.raises(InputError, match="there are no templates 'phoot'"):
        make_eurosat(prompts="phoot")


def test_ones_own_class_names_and_prompts_come_from_files(tmp_path: Path) -> None:
    (tmp_path / "names.txt").write_text("# mine\nland\nwater\n")
    (tmp_path / "prompts.txt").write_text("seen from above: {}\n")
    task = make_eurosat(class_names=str(tmp_path / "names.txt"), prompts=str(tmp_path / "prompts.txt"))
    assert (task.classes, task.templates) == (("land", "water"), ("seen from above: {}",))
