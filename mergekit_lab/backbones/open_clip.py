"""CLIP image encoders from open_clip, and the frozen zero-shot heads that go with them.

Legend: N images, C classes, D embedding width. Weights become one local file first (shipped, downloaded once or
given), then every model is built and loaded by the same lines.

OpenAI's weights need QuickGELU. open_clip itself only warns when they are loaded under a plain name
(`ViT-B-32`), and says nothing when the same file is loaded from a path: here a tag that was trained with
QuickGELU gets it under any name. A local file carries no such mark: name a `-quickgelu` architecture for it.
"""

import hashlib
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, normalize

from mergekit_lab.backbones.attention import keep_differentiable
from mergekit_lab.backbones.classification import ImageObjective
from mergekit_lab.backbones.objective import Backbone
from mergekit_lab.errors import InputError, listing, suggestion
from mergekit_lab.tasks import ImageTask, Task

_ASSETS = Path(__file__).resolve().parent.parent / "assets"
_SHIPPED = {"glyph-clip": "glyph_clip"}


class ImageEncoder(nn.Module):
    """An image tower with its preprocessing: pictures in, unit vectors out.

    Parameters and buffers in `state_dict` are named as in open_clip's whole model (`visual.…`), so a
    checkpoint of this module merges with, and loads into, any other of the same architecture.

    core: the submodule that is linearised; preprocessing and the features' normalisation are not.
    """

    core: ClassVar[str] = "visual"
    mean: Tensor
    std: Tensor

    def __init__(self, visual: nn.Module, size: tuple[int, int], mean: Sequence[float], std: Sequence[float]):
        super().__init__()
        self.visual = visual
        self.size = size
        self.register_buffer("mean", torch.tensor(mean).reshape(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).reshape(3, 1, 1), persistent=False)
        self.eval()

    def train(self, mode: bool = True) -> "ImageEncoder":
        """As usual, but attention stays differentiable by `torch.func`."""
        super().train(mode)
        keep_differentiable(self)
        return self

    def forward(self, images: Tensor) -> Tensor:
        """uint8 or float in [0, 1], `[N, 3, H, W]`, to L2-normalised features `[N, D]`.

        Another size than the model's is resized (bicubic, antialiased, not keeping the aspect ratio).
        """
        if images.dtype == torch.uint8:
            images = images.to(self.mean.dtype) / 255
        if images.shape[-2:] != self.size:
            images = interpolate(images, size=self.size, mode="bicubic", antialias=True).clamp(0, 1)
        return normalize(self.visual((images - self.mean) / self.std), dim=-1)


@dataclass(frozen=True)
class OpenClip(Backbone):
    """A pretrained CLIP model by open_clip's names.

    architecture: a name from `open_clip.list_models()`, or `glyph-clip`, the small model that ships.
    weights: a tag of open_clip (`openai`, `laion2b_s34b_b79k`; downloaded once and cached), `asset:glyph_clip`
    (shipped), a local `.safetensors` or `.pt` file of the whole model (read with `weights_only`), or None:
    random values from `seed`.
    seed: used with `weights=None` alone.

    Raises `InputError`, at first use, for an unknown architecture, unknown or unobtainable weights, or weights
    that do not fit the architecture.
    """

    architecture: str
    weights: str | None
    seed: int = 0

    def model(self) -> ImageEncoder:
        """A fresh copy of the pretrained image tower, float32, evaluation mode, all parameters trainable."""
        visual = deepcopy(_model(self).visual)
        size = visual.image_size if isinstance(visual.image_size, tuple) else (visual.image_size,) * 2
        return ImageEncoder(visual.requires_grad_(True), size, visual.image_mean, visual.image_std)

    def check(self, task: Task) -> None:
        if not isinstance(task, ImageTask):
            raise InputError(
                f"{self.architecture} reads images, and task {task.name!r} is a {type(task).__name__}: "
                "take a suite of images, or a language model as the backbone"
            )

    def objective(self, task: Task) -> ImageObjective:
        """The task with its zero-shot head."""
        self.check(task)
        assert isinstance(task, ImageTask)
        return ImageObjective(task, self.zero_shot_head(task.classes, task.templates))

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

        model = _model(self)
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
        means = torch.stack([model.encode_text(row, normalize=True).mean(0) for row in rows])
        return (normalize(means, dim=-1) * model.logit_scale.exp()).float().clone()

    def identity(self) -> dict[str, str]:
        """What makes this backbone this one: architecture, weights, and their SHA-256. No path enters it."""
        if self.weights is None:
            return {"architecture": self.architecture, "weights": f"random, seed {self.seed}", "sha256": ""}
        file = self._file()
        named = self.weights.startswith("asset:") or self._tag()
        return {
            "architecture": self.architecture,
            "weights": self.weights if named else "file",
            "sha256": _sha256(file, file.stat().st_mtime_ns),
        }

    def quick_gelu(self) -> bool:
        """Whether the built model uses QuickGELU: by its architecture's name or by its weights' tag."""
        import open_clip

        config = open_clip.get_model_config(_registered(self.architecture)) or {}
        return bool(config.get("quick_gelu", False) or self._tag().get("quick_gelu", False))

    def _tag(self) -> dict[str, Any]:
        from open_clip.pretrained import get_pretrained_cfg

        return get_pretrained_cfg(_registered(self.architecture), self.weights) if self.weights else {}

    def _file(self) -> Path:
        """The weights as a local file; downloads a tag's once."""
        assert self.weights is not None
        if self.weights.startswith("asset:"):
            shipped = {f"asset:{path.stem}": path for path in _ASSETS.glob("*.safetensors")}
            if self.weights not in shipped:
                raise InputError(f"no shipped weights {self.weights!r}{suggestion(self.weights, shipped)}")
            return shipped[self.weights]
        tag = self._tag()
        if tag:
            return _download(self.architecture, self.weights, tag)
        if Path(self.weights).is_file():
            return Path(self.weights)
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


def _download(architecture: str, weights: str, tag: dict[str, Any]) -> Path:
    """A tag's file: from the cache without asking the network, else downloaded."""
    repository, _, filename = tag.get("hf_hub", "").rpartition("/")
    if repository:
        from huggingface_hub import try_to_load_from_cache

        for name in [filename] if filename else ["open_clip_model.safetensors", "open_clip_pytorch_model.bin"]:
            cached = try_to_load_from_cache(repository, name)
            if isinstance(cached, str):
                return Path(cached)
    cause = _unreachable()
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


def _unreachable() -> str | None:
    """Why the hub cannot be reached, within seconds: its own client retries for most of a minute."""
    import socket
    from urllib.parse import urlsplit
    from urllib.request import getproxies

    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    if getproxies():
        return None
    address = urlsplit(constants.ENDPOINT)
    port = address.port or (443 if address.scheme == "https" else 80)
    try:
        socket.create_connection((address.hostname or "", port), timeout=5).close()
    except OSError as error:
        return f"no connection to {address.hostname} ({error})"
    return None


@lru_cache(maxsize=1)
def _model(backbone: OpenClip) -> Any:
    """The whole model, float32 on the CPU, evaluation mode. One is kept: heads and towers ask in turn."""
    import open_clip

    name = _registered(backbone.architecture)
    file = None if backbone.weights is None else backbone._file()
    preprocess = {key: backbone._tag()[key] for key in ("mean", "std") if key in backbone._tag()}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(backbone.seed)
        try:
            model = open_clip.create_model(
                name,
                pretrained=None if file is None else str(file),
                precision="fp32",
                force_quick_gelu=backbone.quick_gelu(),
                force_preprocess_cfg=preprocess,
                weights_only=True,
            )
        except Exception as error:
            if file is None:
                raise
            raise InputError(
                f"{file.name} does not load as weights of {backbone.architecture}: "
                f"{(str(error) or type(error).__name__).splitlines()[0]} "
                "It must hold open_clip's whole model, as .safetensors or as a .pt of plain tensors"
            ) from error
    return model.eval()


@lru_cache(maxsize=32)
def _sha256(file: Path, modified: int) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
