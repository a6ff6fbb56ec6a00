"""CLIP image encoders from open_clip, and the frozen zero-shot heads that go with them.

Legend: N images, C classes, D embedding width. Weights become one local file first (shipped, downloaded once or
given), then every model is built and loaded by the same lines.

OpenAI's weights need QuickGELU. open_clip itself only warns when they are loaded under a plain name
(`ViT-B-32`), and says nothing when the same file is loaded from a path: here a tag that was trained with
QuickGELU gets it under any name. A local file carries no such mark: name a `-quickgelu` architecture for it.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from mergekit_lab.backbones.classification import Crops, ImageObjective, check_crop
from mergekit_lab.backbones.clip_layouts import from_transformers, is_transformers
from mergekit_lab.backbones.heads import linear_probe_head, prototype_head
from mergekit_lab.backbones.image_encoder import ImageEncoder
from mergekit_lab.backbones.objective import Backbone
from mergekit_lab.checkpoints import open_checkpoint, unreachable, write_tensors
from mergekit_lab.errors import InputError, listing, suggestion
from mergekit_lab.tasks import ImageTask, Keeper, Task

HEADS: dict[str, Any] = {"zero_shot": None, "prototype": prototype_head, "linear_probe": linear_probe_head}
PRECISIONS = ("float32", "bfloat16")
_HUB_NAMES = {
    "ViT-B-32": "clip-vit-base-patch32",
    "ViT-B-16": "clip-vit-base-patch16",
    "ViT-L-14": "clip-vit-large-patch14",
}
_OPENAI_REPOSITORIES = {
    "ViT-B-32-quickgelu": "timm/vit_base_patch32_clip_224.openai",
    "ViT-B-16-quickgelu": "timm/vit_base_patch16_clip_224.openai",
    "ViT-L-14-quickgelu": "timm/vit_large_patch14_clip_224.openai",
}
"""As open_clip has them too; here so that they are known without importing it, which takes seconds."""
_ASSET = "asset:"
_TEXTS = 128
"""Prompts that are encoded together: one alone leaves most of a processor's cores idle."""
_HEAD_FILE = "head.safetensors"
_ASSETS = Path(__file__).resolve().parent.parent / "assets"
_SHIPPED = {"glyph-clip": "glyph_clip"}
_OPEN_CLIP_CONFIG = "open_clip_config.json"
_PIXELS = {"mean": (0.48145466, 0.4578275, 0.40821073), "std": (0.26862954, 0.26130258, 0.27577711)}
"""Of OpenAI's training set: what models take if nothing is said of their weights."""
_OPEN_CLIP_FILES = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")
_TRANSFORMERS_FILES = ("model.safetensors", "pytorch_model.bin")


@dataclass(frozen=True)
class OpenClip(Backbone):
    """A pretrained CLIP model by open_clip's names.

    architecture: a name from `open_clip.list_models()`, or `glyph-clip`, the small model that ships.
    weights: a tag of open_clip (`openai`, `laion2b_s34b_b79k`; downloaded once and cached), `asset:glyph_clip`
    (shipped), a local `.safetensors` or `.pt` file of the whole model (read with `weights_only`), in
    open_clip's layout or in that of transformers' `CLIPModel`, a folder with one such file, or None: random
    values from `seed`.
    seed: used with `weights=None` alone.
    head: what classifies features: "zero_shot" (from class names and prompts), "prototype" (class means of
    training images) or "linear_probe" (logistic regression on them).
    crop: training pictures are random windows of this share of their area, `[from, to]`, resized to the model's
    size; None trains on what evaluation sees.
    flip: mirror every second of them, by chance.
    precision: of the forward pass in evaluation, "float32" or "bfloat16".
    keep: where heads are kept; None keeps none.

    Raises `InputError`, at first use, for an unknown architecture, unknown or unobtainable weights, or weights
    that do not fit the architecture.
    """

    architecture: str
    weights: str | None
    seed: int = 0
    head: str = "zero_shot"
    crop: Sequence[float] | None = None
    flip: bool = False
    precision: str = "float32"
    keep: Keeper | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.head not in HEADS:
            raise InputError(f"backbone.head is {self.head!r}{suggestion(self.head, HEADS)}")
        if self.precision not in PRECISIONS:
            raise InputError(
                f"backbone.precision is {self.precision!r}{suggestion(self.precision, PRECISIONS)}"
            )
        check_crop(self.crop)

    def kept_by(self, keep: Keeper) -> OpenClip:
        """The same backbone, whose heads `keep` holds."""
        return replace(self, keep=keep)

    def model(self) -> ImageEncoder:
        """A fresh copy of the pretrained image tower, float32, evaluation mode, all parameters trainable."""
        visual = deepcopy(_model(self._key).visual)
        return ImageEncoder(visual.requires_grad_(True), _size(visual), visual.image_mean, visual.image_std)

    def check(self, task: Task) -> None:
        if not isinstance(task, ImageTask):
            raise InputError(
                f"{self.architecture} reads images, and task {task.name!r} is a {type(task).__name__}: "
                "take a suite of images, or a language model as the backbone"
            )

    def objective(self, task: Task) -> ImageObjective:
        """The task with its head."""
        self.check(task)
        assert isinstance(task, ImageTask)
        crops = None
        if self.crop is not None:
            crops = Crops((self.crop[0], self.crop[1]), self.flip, max(_size(_model(self._key).visual)))
        return ImageObjective(task, self._head(task), crops, self.precision)

    def learning(self, task: Task) -> dict[str, Any]:
        found: dict[str, Any] = {} if self.head == "zero_shot" else {"head": self.head}
        return found if self.crop is None else found | {"crop": list(self.crop), "flip": self.flip}

    def scoring(self, task: Task) -> dict[str, Any]:
        found = {} if self.head == "zero_shot" else {"head": self.head}
        return found if self.precision == "float32" else found | {"precision": self.precision}

    def _head(self, task: ImageTask) -> Tensor:
        if self.keep is None:
            return self._made_head(task)
        content: dict[str, Any] = {"backbone": self.identity(), "task": task.name, "head": self.head}
        if self.head == "zero_shot":
            content |= {"classes": list(task.classes), "templates": list(task.templates)}
        else:
            content["data"] = task.fingerprint()

        def make(out: Path) -> dict[str, Any]:
            write_tensors(out / _HEAD_FILE, {"head": self._made_head(task)})
            return {"classes": len(task.classes)}

        return open_checkpoint(self.keep("heads", content, 0, make) / _HEAD_FILE)["head"]

    def _made_head(self, task: ImageTask) -> Tensor:
        if self.head == "zero_shot":
            return self.zero_shot_head(task.classes, task.templates)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        temperature = float(_model(self._key).logit_scale.detach().exp())
        return HEADS[self.head](self.model().to(device), task, temperature, device)

    @property
    def _key(self) -> tuple[str, str | None, int]:
        """What the loaded weights depend on."""
        return self.architecture, self.weights, self.seed

    @torch.no_grad()
    def zero_shot_head(self, classes: Sequence[str], templates: Sequence[str]) -> Tensor:
        """Text features of the classes as a linear head, float32 `[C, D]`.

        Per class and template the text feature is L2-normalised; their mean over templates is normalised again
        and multiplied by the model's temperature `logit_scale.exp()`. Logits are `features @ head.T`.

        templates: prompts with one `{}` each. Raises `InputError` where a template has none, or where two
        classes end up as the same tokens (the model reads `context_length` tokens and no more).
        """
        wrong = [template for template in templates if "{}" not in template]
        if wrong or not templates or not classes:
            raise InputError(
                f"a head needs classes and templates with '{{}}' for the class name; at fault: {wrong}"
            )
        import open_clip

        model = _model(self._key)
        tokenizer = open_clip.get_tokenizer(_registered(self.architecture))
        rows = [tokenizer([template.format(name) for template in templates]) for name in classes]
        seen: dict[bytes, str] = {}
        for name, row in zip(classes, rows, strict=True):
            other = seen.setdefault(row.numpy().tobytes(), name)
            if other != name:
                raise InputError(
                    f"classes {other!r} and {name!r} read the same to {self.architecture}: it sees the first "
                    f"{row.shape[1]} tokens only, so shorten the templates"
                )
        chunks = torch.cat(rows).split(_TEXTS)
        features = torch.cat([model.encode_text(chunk, normalize=True) for chunk in chunks])
        means = features.unflatten(0, (len(classes), len(templates))).mean(1)
        return (normalize(means, dim=-1) * model.logit_scale.exp()).float().clone()

    def identity(self) -> dict[str, str]:
        """What makes this backbone this one: architecture, weights, and their SHA-256. No path enters it."""
        if self.weights is None:
            return {"architecture": self.architecture, "weights": f"random, seed {self.seed}", "sha256": ""}
        file = self.file()
        named = self.shipped() or self._tag()
        return {
            "architecture": self.architecture,
            "weights": self.weights if named else "file",
            "sha256": _sha256(file, file.stat().st_mtime_ns),
        } | self._unnamed()

    def quick_gelu(self) -> bool:
        """Whether the built model uses QuickGELU: by its architecture's name or what is said of its weights."""
        return self._architecture_is_quick() or bool(self._said().get("quick_gelu", False))

    def _architecture_is_quick(self) -> bool:
        import open_clip

        return bool((open_clip.get_model_config(_registered(self.architecture)) or {}).get("quick_gelu", False))

    def _said(self) -> dict[str, Any]:
        """What is said of the weights: `quick_gelu`, and `mean` and `std` of the pixels they were trained on.

        By open_clip of a tag's; of a local file's by the configuration beside it, as open_clip or transformers
        leaves it.
        """
        tag = self._tag()
        if tag or self.weights is None or not (place := Path(self.weights).expanduser()).exists():
            return {name: tag[name] for name in ("quick_gelu", *_PIXELS) if name in tag}
        folder = place if place.is_dir() else place.parent
        if (file := folder / _OPEN_CLIP_CONFIG).is_file():
            content = _read_json(file)
            pixels = content.get("preprocess_cfg") or {}
            quick = {"quick_gelu": bool((content.get("model_cfg") or {}).get("quick_gelu", False))}
            return quick | {name: tuple(pixels[name]) for name in _PIXELS if name in pixels}
        vision = _read_json(folder / "config.json").get("vision_config")
        if not isinstance(vision, dict):
            return {}
        return {"quick_gelu": vision.get("hidden_act", "quick_gelu") == "quick_gelu"}

    def _unnamed(self) -> dict[str, str]:
        """What a local file's model computes otherwise than its architecture's name says."""
        if self.shipped() or self._tag():
            return {}
        said = self._said()
        found = {n: repr(said[n]) for n, usual in _PIXELS.items() if said.get(n, usual) != usual}
        quick = said.get("quick_gelu", False) and not self._architecture_is_quick()
        return found | ({"activation": "quick_gelu"} if quick else {})

    def save(self, folder: Path) -> Path:
        """Copy the weights into a folder, with what is said of them, so that they load there as they do here.

        Returns:
            The file, to be named as `weights`.
        """
        folder.mkdir(parents=True, exist_ok=True)
        file = self.file()
        said = self._said()
        config = {
            "model_cfg": {"quick_gelu": self.quick_gelu()},
            "preprocess_cfg": {name: list(said[name]) for name in _PIXELS if name in said},
        }
        (folder / _OPEN_CLIP_CONFIG).write_text(json.dumps(config, indent=1) + "\n")
        return Path(shutil.copyfile(file, folder / f"{self.weights_name()}{file.suffix}"))

    def hub_name(self) -> str:
        """What checkpoints of this architecture are called on the hub, `clip-vit-base-patch32`.

        Raises:
            InputError: another architecture than the three that experts are published for, or other weights
                than they started from.
        """
        here = self.weights is None or self.shipped() or Path(self.weights).expanduser().exists()
        if not here and self.weights != "openai":
            raise InputError(
                f"experts are published of OpenAI's weights, not of {self.weights!r}: take those, or name each "
                "expert (experts={TASK: SOURCE})"
            )
        plain = self.architecture.removesuffix("-quickgelu")
        if plain not in _HUB_NAMES:
            raise InputError(
                f"no experts of {self.architecture} are published under a known name: name each one"
            )
        return _HUB_NAMES[plain]

    def shipped(self) -> bool:
        """Whether the weights come with the package."""
        return self.weights is not None and self.weights.startswith(_ASSET)

    def weights_name(self) -> str:
        """The weights' name without a path."""
        return Path(self.weights or "random").stem

    def missing(self) -> str | None:
        """What would have to be downloaded, or None."""
        if self.weights is None or self.shipped() or Path(self.weights).expanduser().exists():
            return None
        known = _OPENAI_REPOSITORIES.get(self.architecture) if self.weights == "openai" else None
        tag = {"hf_hub": f"{known}/"} if known else self._tag()
        if tag and _cached(tag) is None:
            place = tag.get("hf_hub", "").rpartition("/")[0] or tag.get("url")
            return f"weights {self.weights!r} of {self.architecture} ({place}), or backbone.weights=FILE"
        return None

    def _tag(self) -> dict[str, Any]:
        from open_clip.pretrained import get_pretrained_cfg

        return get_pretrained_cfg(_registered(self.architecture), self.weights) if self.weights else {}

    def file(self) -> Path:
        """The weights as a local file; downloads a tag's once."""
        assert self.weights is not None
        if self.shipped():
            shipped = {f"{_ASSET}{path.stem}": path for path in _ASSETS.glob("*.safetensors")}
            if self.weights not in shipped:
                raise InputError(f"no shipped weights {self.weights!r}{suggestion(self.weights, shipped)}")
            return shipped[self.weights]
        tag = self._tag()
        if tag:
            return _download(self.architecture, self.weights, tag)
        place = Path(self.weights).expanduser()
        if place.is_file():
            return place
        if place.is_dir():
            return _in_folder(place)
        from open_clip import list_pretrained_tags_by_model

        known = list_pretrained_tags_by_model(_registered(self.architecture))
        raise InputError(
            f"{self.architecture} has no weights {self.weights!r}, and no such file exists; "
            f"tags of open_clip: {listing(known, 20) or 'none'}"
        )


def _registered(architecture: str) -> str:
    """The name open_clip knows the architecture by; registers the shipped ones."""
    import open_clip

    if architecture in _SHIPPED:
        name = _SHIPPED[architecture]
        if name not in open_clip.list_models():
            open_clip.add_model_config(_ASSETS / f"{name}.json")
        return name
    if architecture not in open_clip.list_models():
        known = [*open_clip.list_models(), *_SHIPPED]
        raise InputError(f"open_clip has no architecture {architecture!r}{suggestion(architecture, known)}")
    return architecture


def _cached(tag: dict[str, Any]) -> Path | None:
    """A tag's file in the cache, without asking the network."""
    repository, _, filename = tag.get("hf_hub", "").rpartition("/")
    if repository:
        from huggingface_hub import try_to_load_from_cache

        for name in [filename] if filename else _OPEN_CLIP_FILES:
            cached = try_to_load_from_cache(repository, name)
            if isinstance(cached, str):
                return Path(cached)
    return None


def _download(architecture: str, weights: str, tag: dict[str, Any]) -> Path:
    """A tag's file: from the cache, else downloaded."""
    if (cached := _cached(tag)) is not None:
        return cached
    repository = tag.get("hf_hub", "").rpartition("/")[0]
    cause = unreachable()
    if cause is None:
        from open_clip.pretrained import download_pretrained

        try:
            return Path(download_pretrained(tag))
        except Exception as error:  # the hub's client raises errors of many libraries
            cause = (str(error).strip() or type(error).__name__).splitlines()[0]
    raise InputError(
        f"cannot get weights {weights!r} of {architecture} from {repository or tag.get('url')}: {cause}. "
        "They are downloaded once and then cached (HF_HOME): run once with internet access, copy that cache "
        "here, or give a local .safetensors or .pt file as `weights`"
    )


def _in_folder(folder: Path) -> Path:
    """The weights in a folder as open_clip or transformers leave it."""
    found = [folder / name for name in (*_OPEN_CLIP_FILES, *_TRANSFORMERS_FILES) if (folder / name).is_file()]
    if not found:
        names = ", ".join((*_OPEN_CLIP_FILES, *_TRANSFORMERS_FILES))
        raise InputError(f"the folder {folder} holds no weights of a CLIP model: expected one of {names}")
    return found[0]


def _read_json(file: Path) -> dict[str, Any]:
    """A configuration beside weights; empty where there is none.

    Raises:
        InputError: it is no JSON object.
    """
    try:
        content = json.loads(file.read_text()) if file.is_file() else {}
    except ValueError as error:
        raise InputError(f"{file} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise InputError(f"{file} holds no JSON object")
    return content


def _size(visual: Any) -> tuple[int, int]:
    size = visual.image_size
    return size if isinstance(size, tuple) else (size, size)


@lru_cache(maxsize=1)
def _model(key: tuple[str, str | None, int]) -> Any:
    """The whole model, float32 on the CPU, evaluation mode. One is kept: heads and towers ask in turn."""
    import open_clip

    backbone = OpenClip(*key)
    file = None if backbone.weights is None else backbone.file()
    renamed = None
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(backbone.seed)
            if file is not None and not backbone._tag():
                weights = open_checkpoint(file)
                renamed = from_transformers(dict(weights)) if is_transformers(weights) else None
            said = backbone._said()
            model = open_clip.create_model(
                _registered(backbone.architecture),
                pretrained=None if file is None or renamed is not None else str(file),
                precision="fp32",
                force_quick_gelu=backbone.quick_gelu(),
                force_preprocess_cfg={name: said[name] for name in _PIXELS if name in said},
                weights_only=True,
            )
            if renamed is not None:
                model.load_state_dict(renamed)
    except Exception as error:
        if file is None:
            raise
        raise InputError(
            f"{file.name} does not load as weights of {backbone.architecture}: "
            f"{(str(error) or type(error).__name__).splitlines()[0]} "
            "It must hold the whole CLIP model as open_clip or transformers save it, as .safetensors or as a "
            ".pt of plain tensors"
        ) from error
    return model.eval()


@lru_cache(maxsize=32)
def _sha256(file: Path, modified: int) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
