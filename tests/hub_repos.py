"""Small repositories in the layouts that data sets and experts are published in."""

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from PIL import Image

from mergekit_lab.paths import find_conf_dir
from mergekit_lab.schema.check import build
from mergekit_lab.tasks import HubImages

SIZES = {"train": 20, "test": 6}


def make_published(name: str, folder: Path) -> HubImages:
    """The task of this name as configured, on the data in a folder."""
    node = yaml.safe_load((find_conf_dir() / "task" / "clip" / f"{name}.yaml").read_text())
    return build({**node, "source": str(folder), "root": None}, HubImages)


def encode_picture(seed: int, width: int = 40, height: int = 32, picture_format: str = "PNG") -> bytes:
    """A picture of noise; the same for the same arguments."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, picture_format)
    return out.getvalue()


def make_pictures(count: int, classes: int, seed: int = 0) -> list[tuple[bytes, int]]:
    """Pictures of different sizes, and labels that go round."""
    return [
        (
            encode_picture(1000 * seed + i, 24 + 5 * (i % 4), 24 + 7 * (i % 3), "JPEG" if i % 2 else "PNG"),
            i % classes,
        )
        for i in range(count)
    ]


def write_parquet(
    file: Path,
    rows: list[tuple[bytes, object]],
    label: str = "label",
    names: list[str] | None = None,
    group: int = 4,
) -> None:
    """As the hub's library writes a split: images as bytes with a path, label names in the header."""
    file.parent.mkdir(parents=True, exist_ok=True)
    images = [{"bytes": picture, "path": f"{i}.png"} for i, (picture, _) in enumerate(rows)]
    table = pa.table({"image": images, label: [value for _, value in rows]})
    if names is not None:
        features = {"image": {"_type": "Image"}, label: {"names": names, "_type": "ClassLabel"}}
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    pq.write_table(table, file, row_group_size=group)


def write_repository(task: HubImages, folder: Path, seed: int = 0, sizes: dict[str, int] = SIZES) -> Path:
    """What `task` reads, as its repository has it: parquet files by part, or a web data set's tar files."""
    classes = len(task.classes)
    for number, (part, count) in enumerate(sizes.items()):
        rows = make_pictures(count, classes, 2 * seed + number)
        name = task.parts[part][0]  # type: ignore[index]
        if task.hub and "wds_" in task.hub:
            write_tar(folder / name / "0.tar", rows)
            continue
        file = folder / (task.subset or "data")
        half = len(rows) // 2
        for shard, some in enumerate((rows[:half], rows[half:])):
            write_parquet(
                file / f"{name}-{shard:05}-of-00002.parquet", some, task.label_column, list(task.classes)
            )
    return folder


def write_tar(file: Path, rows: list[tuple[bytes, int]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, "w") as out:
        for i, (picture, label) in enumerate(rows):
            for name, content in ((f"s{i:07}.jpg", picture), (f"s{i:07}.cls", str(label).encode())):
                member = tarfile.TarInfo(name)
                member.size = len(content)
                out.addfile(member, io.BytesIO(content))


def write_folders(folder: Path, rows: list[tuple[bytes, int]], names: list[str]) -> None:
    for i, (picture, label) in enumerate(rows):
        folder_of_class = folder / names[label]
        folder_of_class.mkdir(parents=True, exist_ok=True)
        (folder_of_class / f"{i:03}.png").write_bytes(picture)
