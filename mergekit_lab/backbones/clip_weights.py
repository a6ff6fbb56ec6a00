"""Where the weights of CLIP models come from, and how they were trained.

They become one local file: a shipped one, one of open_clip's tags (downloaded once and cached), or yours.

OpenAI's weights need QuickGELU. open_clip only warns when they are loaded under a plain name (`ViT-B-32`), and
is silent when the file is loaded from a path. Here a tag trained with QuickGELU gets it under any name, and so
does a local file whose configuration says so. For a file without a configuration, choose a `-quickgelu`
architecture.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from mergekit_lab.backbones.clip_layouts import is_image_tower
from mergekit_lab.checkpoints import explain_unreachable, hash_file, open_checkpoint
from mergekit_lab.checkpoints.libraries import OPEN_CLIP
from mergekit_lab.checkpoints.plain_files import read_object
from mergekit_lab.errors import InputError, join_names, say_error, suggest

PIXELS = {"mean": (0.48145466, 0.4578275, 0.40821073), "std": (0.26862954, 0.26130258, 0.27577711)}
"""Of OpenAI's training set: what models take if nothing is said of their weights."""
REPOSITORIES = {
    ("ViT-B-32-quickgelu", "openai"): "timm/vit_base_patch32_clip_224.openai",
    ("ViT-B-16-quickgelu", "openai"): "timm/vit_base_patch16_clip_224.openai",
    ("ViT-L-14-quickgelu", "openai"): "timm/vit_large_patch14_clip_224.openai",
    ("ViT-B-32", "laion2b_s34b_b79k"): "laion/CLIP-ViT-B-32-laion2B-s34B-b79K",
    ("ViT-B-16", "laion2b_s34b_b88k"): "laion/CLIP-ViT-B-16-laion2B-s34B-b88K",
    ("ViT-L-14", "laion2b_s32b_b82k"): "laion/CLIP-ViT-L-14-laion2B-s32B-b82K",
}
"""As open_clip has them too; here so that they are known without importing it, which takes seconds."""
_ASSET = "asset:"
_ASSETS = Path(__file__).resolve().parent.parent / "assets"
_SHIPPED = {"glyph-clip": "glyph_clip"}
_TRANSFORMERS_FILES = ("model.safetensors", "pytorch_model.bin")


@dataclass(frozen=True)
class ClipWeights:
    """The weights of an architecture, by name.

    Attributes:
        architecture: open_clip's name, or `glyph-clip`.
        name: a tag of open_clip, `asset:NAME`, a file or a folder. If a folder contains one with the
            architecture's name, that one is read.
    """

    architecture: str
    name: str

    @property
    def shipped(self) -> bool:
        """Whether the weights ship with the package."""
        return self.name.startswith(_ASSET)

    @property
    def local(self) -> bool:
        """Whether the weights are a local file or folder."""
        return not self.shipped and self._path.exists()

    @property
    def _path(self) -> Path:
        path = Path(self.name).expanduser()
        inside = path / self.architecture
        return inside if inside.is_dir() else path

    def find_tag(self) -> dict[str, Any]:
        """What open_clip knows about the tag; empty if the name is no tag of the architecture."""
        from open_clip.pretrained import get_pretrained_cfg

        tag: dict[str, Any] = get_pretrained_cfg(register_architecture(self.architecture), self.name)
        return tag

    def find_missing(self) -> str | None:
        """What must be downloaded first, or None.

        Raises:
            InputError: the name is unknown.
        """
        if self.shipped or self.local:
            return None
        known = REPOSITORIES.get((self.architecture, self.name))
        tag = {"hf_hub": f"{known}/"} if known else self.find_tag()
        if not tag:
            raise self._make_error()
        if _find_cached(tag) is None:
            origin = tag.get("hf_hub", "").rpartition("/")[0] or tag.get("url")
            return f"weights {self.name!r} of {self.architecture} ({origin}), or backbone.weights=FILE"
        return None

    def find_file(self) -> Path:
        """The weights as a local file. A tag's file is downloaded once.

        Raises:
            InputError: the name is unknown, or its file is missing or cannot be downloaded.
        """
        if self.shipped:
            shipped = {f"{_ASSET}{path.stem}": path for path in _ASSETS.glob("*.safetensors")}
            if self.name not in shipped:
                raise InputError(f"no shipped weights {self.name!r}{suggest(self.name, shipped)}")
            return shipped[self.name]
        if tag := self.find_tag():
            return self.download(tag)
        path = self._path
        if path.is_file():
            return path
        if path.is_dir():
            return _find_in_folder(path)
        raise self._make_error()

    def _make_error(self) -> InputError:
        from open_clip import list_pretrained, list_pretrained_tags_by_model

        own = list_pretrained_tags_by_model(register_architecture(self.architecture))
        others = [architecture for architecture, tag in list_pretrained() if tag == self.name]
        problem = f"{self.architecture} has no weights {self.name!r}, and no such file exists; "
        if not others:
            return InputError(f"{problem}tags of open_clip: {join_names(own, 20) or 'none'}")
        plain = self.architecture.removesuffix("-quickgelu")
        nearest = next((name for name in (plain, f"{plain}-quickgelu") if name in others), None)
        if nearest:
            return InputError(f"{problem}backbone.architecture={nearest} has them")
        return InputError(f"{problem}open_clip has them for {join_names(others, 20)}")

    def describe(self) -> dict[str, Any]:
        """How the weights were trained: `quick_gelu`, and `mean` and `std` of their pixels.

        open_clip knows this of its tags. For a local file the configuration next to it says so, in open_clip's
        or transformers' form.
        """
        tag = self.find_tag()
        if tag or not self.local:
            return {name: tag[name] for name in ("quick_gelu", *PIXELS) if name in tag}
        path = self._path
        folder = path if path.is_dir() else path.parent
        if (folder / OPEN_CLIP.config).is_file():
            content = read_object(folder / OPEN_CLIP.config)
            pixels = content.get("preprocess_cfg") or {}
            quick = {"quick_gelu": bool((content.get("model_cfg") or {}).get("quick_gelu", False))}
            return quick | {name: tuple(pixels[name]) for name in PIXELS if name in pixels}
        content = read_object(folder / "config.json")
        alone = content.get("model_type") == "clip_vision_model"
        vision = content if alone else content.get("vision_config")
        if not isinstance(vision, dict):
            return {}
        return {"quick_gelu": vision.get("hidden_act", "quick_gelu") == "quick_gelu"}

    def is_image_tower_alone(self) -> bool:
        """Whether a local file holds only an image tower, by its tensors' names."""
        if not self.local or self.find_tag():
            return False
        file = self.find_file()
        return _has_image_tower_alone(file, file.stat().st_mtime_ns)

    def find_published_name(self) -> str:
        """The name they are published under. For a local file, the configuration next to it says so."""
        if not self.local or self.find_tag():
            return self.name
        folder = self._path if self._path.is_dir() else self._path.parent
        return str(read_object(folder / OPEN_CLIP.config).get("pretrained") or self.name)

    def identify(self) -> dict[str, str]:
        """Name, SHA-256, and how a local file's model differs from what its architecture's name says."""
        file = self.find_file()
        digest = hash_file(file)
        if self.shipped or self.find_tag():
            return {"weights": self.name, "sha256": digest}
        settings = self.describe()
        other = {
            name: repr(settings[name]) for name, usual in PIXELS.items() if settings.get(name, usual) != usual
        }
        if settings.get("quick_gelu", False) and not is_quick_gelu(self.architecture):
            other["activation"] = "quick_gelu"
        return {"weights": "file", "sha256": digest} | other

    def save(self, folder: Path) -> Path:
        """Copy the weights and their description into a folder, from which they load the same way.

        Returns:
            The file. `weights` may also name the folder.
        """
        file, settings = self.find_file(), self.describe()
        folder.mkdir(parents=True, exist_ok=True)
        quick = is_quick_gelu(self.architecture) or settings.get("quick_gelu", False)
        pixels = {name: list(settings[name]) for name in PIXELS if name in settings}
        config = {
            "model_cfg": {"quick_gelu": quick},
            "preprocess_cfg": pixels,
            "pretrained": self.find_published_name(),
        }
        (folder / OPEN_CLIP.config).write_text(json.dumps(config, indent=1) + "\n")
        return Path(shutil.copyfile(file, folder / f"{OPEN_CLIP.stem}{file.suffix}"))

    def download(self, tag: dict[str, Any]) -> Path:
        """A tag's file: from the cache, else downloaded."""
        if (cached := _find_cached(tag)) is not None:
            return cached
        repository = tag.get("hf_hub", "").rpartition("/")[0]
        cause = explain_unreachable()
        if cause is None:
            from open_clip.pretrained import download_pretrained

            try:
                return Path(download_pretrained(tag))
            except Exception as error:  # the hub's client raises errors of many libraries
                cause = say_error(error)
        raise InputError(
            f"cannot get weights {self.name!r} of {self.architecture} from {repository or tag.get('url')}: "
            f"{cause}. They are downloaded once and then cached (HF_HOME): run once with internet access, copy "
            "that cache here, or give a local .safetensors or .pt file as `weights`"
        )


def register_architecture(architecture: str) -> str:
    """The architecture's name in open_clip, which learns the shipped ones here."""
    import open_clip

    if architecture in _SHIPPED:
        name = _SHIPPED[architecture]
        if name not in open_clip.list_models():
            open_clip.add_model_config(_ASSETS / f"{name}.json")
        return name
    if architecture not in open_clip.list_models():
        known = [*open_clip.list_models(), *_SHIPPED]
        raise InputError(f"open_clip has no architecture {architecture!r}{suggest(architecture, known)}")
    return architecture


def is_quick_gelu(architecture: str) -> bool:
    """Whether an architecture's name says QuickGELU."""
    import open_clip

    config = open_clip.get_model_config(register_architecture(architecture)) or {}
    return bool(config.get("quick_gelu", False))


def _find_cached(tag: dict[str, Any]) -> Path | None:
    """A tag's file in the cache, without asking the network."""
    repository, _, filename = tag.get("hf_hub", "").rpartition("/")
    if repository:
        from huggingface_hub import try_to_load_from_cache

        for name in [filename] if filename else OPEN_CLIP.weights:
            cached = try_to_load_from_cache(repository, name)
            if isinstance(cached, str):
                return Path(cached)
    return None


def _find_in_folder(folder: Path) -> Path:
    """The weights in a folder as open_clip or transformers leave it."""
    known = (
        *OPEN_CLIP.weights,
        *(f"{OPEN_CLIP.stem}{suffix}" for suffix in (".bin", ".pt", ".pth")),
        *_TRANSFORMERS_FILES,
    )
    files = [folder / name for name in known if (folder / name).is_file()]
    if not files:
        raise InputError(
            f"the folder {folder} holds no weights of a CLIP model: expected one of {', '.join(known)}"
        )
    return files[0]


@lru_cache(maxsize=32)
def _has_image_tower_alone(file: Path, modified: int) -> bool:
    return is_image_tower(open_checkpoint(file))
