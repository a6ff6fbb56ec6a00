"""CLIP image encoders from open_clip, and their frozen zero-shot heads.

Legend: N images, C classes, D embedding width. `clip_weights.py` says where weights come from and which need
QuickGELU.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from mergekit_lab.backbones.classification import Crops, ImageEncoder, ImageObjective
from mergekit_lab.backbones.clip_layouts import as_image_tower, from_transformers, is_transformers
from mergekit_lab.backbones.clip_weights import PIXELS, ClipWeights, is_quick_gelu, register_architecture
from mergekit_lab.backbones.heads import find_head, make_linear_probe_head, make_prototype_head
from mergekit_lab.backbones.objective import Backbone
from mergekit_lab.checkpoints import Checkpoint, open_checkpoint
from mergekit_lab.errors import InputError, say_error
from mergekit_lab.ranges import check_settings, require
from mergekit_lab.tasks import ImageTask, Keeper, Task

_HEADS: dict[str, Any] = {"prototype": make_prototype_head, "linear_probe": make_linear_probe_head}
_HUB_NAMES = {
    "ViT-B-32": "clip-vit-base-patch32",
    "ViT-B-16": "clip-vit-base-patch16",
    "ViT-L-14": "clip-vit-large-patch14",
}
_CPU = torch.device("cpu")
_TEXTS = 128
"""Prompts that are encoded together: one alone leaves most of a processor's cores idle."""
_TEMPERATURE = 100.0
"""Of heads for an image tower alone: where the training of CLIP models ends, for it is bounded there."""


@dataclass(frozen=True)
class OpenClip(Backbone):
    """A pretrained CLIP model by open_clip's names.

    architecture: a name from `open_clip.list_models()`, or `glyph-clip`, the small model that ships. weights: a
    tag of open_clip (`openai`, `laion2b_s34b_b79k`; downloaded once and cached), `asset:glyph_clip` (shipped),
    a local file, a folder with one such file, or None for random values from `seed`. A file is `.safetensors`
    or `.pt` (read with `weights_only`), of the whole model or its image tower, in the layout of open_clip or of
    transformers' `CLIPModel` and `CLIPVisionModel`. seed: used only with `weights=None`. head: "zero_shot"
    (from class names and prompts), "prototype" (class means of training images) or "linear_probe" (logistic
    regression on them). Weights without a text tower need one of the latter two. crop: train on random windows
    with this share of a picture's area, `[from, to]`, resized to the model's size. None trains on the images
    that evaluation sees. flip: mirror each window with probability ½. precision: arithmetic of the forward pass
    in evaluation, "float32" or "bfloat16". keep: holds heads; None keeps none.

    At first use it raises `InputError` for an unknown architecture, for weights that are unknown or cannot be
    obtained, and for weights that do not fit the architecture.
    """

    architecture: str
    weights: str | None
    seed: int = 0
    head: Literal["zero_shot", "prototype", "linear_probe"] = "zero_shot"
    crop: Sequence[float] | None = None
    flip: bool = False
    precision: Literal["float32", "bfloat16"] = "float32"
    keep: Keeper | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_settings(OpenClip, vars(self), "backbone.{}")
        is_range = self.crop is None or (len(self.crop) == 2 and 0 < self.crop[0] <= self.crop[1] <= 1)
        require(is_range, "backbone.crop", self.crop, "two shares of the area, 0 < from ≤ to ≤ 1")

    def make_model(self) -> ImageEncoder:
        """A fresh copy of the pretrained image tower, float32, evaluation mode, all parameters trainable."""
        visual = deepcopy(make_whole_model(self.key).visual)
        return ImageEncoder(
            visual.requires_grad_(True), _read_size(visual), visual.image_mean, visual.image_std
        )

    def check(self, task: Task) -> None:
        if not isinstance(task, ImageTask):
            raise InputError(
                f"{self.architecture} reads images, and task {task.name!r} is a {type(task).__name__}: "
                "take a suite of images, or a language model as the backbone"
            )
        if self.head == "zero_shot":
            self._check_text_tower()

    def _check_text_tower(self) -> None:
        if self.source is not None and self.source.is_image_tower_alone():
            raise InputError(
                f"backbone.weights={self.weights} has no text tower, which makes the zero-shot head: set "
                "backbone.head=prototype or linear_probe, or give the whole model"
            )

    def make_objective(self, task: Task) -> ImageObjective:
        """The task with its head."""
        self.check(task)
        assert isinstance(task, ImageTask)
        head = find_head(self.keep, partial(self._identify_head, task), partial(self._make_head, task))
        crops = None
        if self.crop is not None:
            crops = Crops(
                (self.crop[0], self.crop[1]), self.flip, max(_read_size(make_whole_model(self.key).visual))
            )
        return ImageObjective(task, head, crops, self.precision)

    def describe_learning(self, task: Task) -> dict[str, Any]:
        crops = {} if self.crop is None else {"crop": list(self.crop), "flip": self.flip}
        return self._describe_head() | crops

    def describe_scoring(self, task: Task) -> dict[str, Any]:
        precision = {} if self.precision == "float32" else {"precision": self.precision}
        return self._describe_head() | precision

    def _describe_head(self) -> dict[str, Any]:
        return {} if self.head == "zero_shot" else {"head": self.head}

    def _identify_head(self, task: ImageTask) -> dict[str, Any]:
        content: dict[str, Any] = {"backbone": self.identify(), "task": task.name, "head": self.head}
        if self.head == "zero_shot":
            content |= {"classes": list(task.classes), "templates": list(task.templates)}
        else:
            content["data"] = task.fingerprint()
        return content

    def _make_head(self, task: ImageTask, device: torch.device) -> Tensor:
        if self.head == "zero_shot":
            return self.make_zero_shot_head(task.classes, task.templates, device)
        temperature = float(make_whole_model(self.key).logit_scale.detach().exp())
        return _HEADS[self.head](self.make_model().to(device), task, temperature, device)

    @property
    def source(self) -> ClipWeights | None:
        """The source of the weights; None for random ones."""
        return None if self.weights is None else ClipWeights(self.architecture, self.weights)

    @property
    def key(self) -> tuple[str, str | None, int]:
        """What the loaded weights depend on."""
        return self.architecture, self.weights, self.seed

    @torch.no_grad()
    def make_zero_shot_head(
        self, classes: Sequence[str], templates: Sequence[str], device: torch.device = _CPU
    ) -> Tensor:
        """Make a linear head of the classes' text features, float32 `[C, D]`.

        A class's text feature is L2-normalized for each template. Their mean is normalized again and multiplied
        by the model's temperature `logit_scale.exp()`. Logits are `features @ head.T`.

        templates: prompts with one `{}` each. device: where texts are encoded. Raises `InputError` if a
        template has none, if the weights have no text tower, or if two classes have the same tokens (the model
        reads at most `context_length` tokens).
        """
        self._check_text_tower()
        wrong = [template for template in templates if "{}" not in template]
        if wrong or not templates or not classes:
            raise InputError(
                f"a head needs classes and templates with '{{}}' for the class name; at fault: {wrong}"
            )
        import open_clip

        tokenizer = open_clip.get_tokenizer(register_architecture(self.architecture))
        rows = [tokenizer([template.format(name) for template in templates]) for name in classes]
        seen: dict[bytes, str] = {}
        for name, row in zip(classes, rows, strict=True):
            other = seen.setdefault(row.numpy().tobytes(), name)
            if other != name:
                raise InputError(
                    f"classes {other!r} and {name!r} look the same to {self.architecture}, which reads only "
                    f"{row.shape[1]} tokens: shorten the templates"
                )
        chunks = torch.cat(rows).split(_TEXTS)
        whole = make_whole_model(self.key)

        def encode(device: torch.device) -> Tensor:
            model = whole if device.type == "cpu" else _copy_text_tower(self.key, device)
            return torch.cat([model.encode_text(chunk.to(device), normalize=True) for chunk in chunks]).cpu()

        try:
            features = encode(device)
        except torch.OutOfMemoryError:
            features = encode(_CPU)
        means = features.unflatten(0, (len(classes), len(templates))).mean(1)
        return (normalize(means, dim=-1) * whole.logit_scale.exp()).float().clone()

    def identify(self) -> dict[str, str]:
        """Architecture, weights and their SHA-256. It contains no path."""
        if self.source is None:
            return {"architecture": self.architecture, "weights": f"random, seed {self.seed}", "sha256": ""}
        return {"architecture": self.architecture} | self.source.identify()

    def uses_quick_gelu(self) -> bool:
        """Whether the model uses QuickGELU, by its architecture's name or its weights' description."""
        return is_quick_gelu(self.architecture) or bool(self._describe().get("quick_gelu", False))

    def _describe(self) -> dict[str, Any]:
        return {} if self.source is None else self.source.describe()

    def name_on_hub(self) -> str:
        """This architecture's name in checkpoints of the hub, such as `clip-vit-base-patch32`.

        Raises:
            InputError: no experts are published for this architecture, or they started from other weights.
        """
        known = self.source is None or self.source.shipped or self.source.local
        if not known and self.weights != "openai":
            raise InputError(
                f"the published experts start from OpenAI's weights, not from {self.weights!r}: take those, "
                "or name each expert (experts={TASK: SOURCE})"
            )
        plain = self.architecture.removesuffix("-quickgelu")
        if plain not in _HUB_NAMES:
            raise InputError(
                f"no experts of {self.architecture} are published under a known name: name each one"
            )
        return _HUB_NAMES[plain]


def _read_size(visual: Any) -> tuple[int, int]:
    size = visual.image_size
    return size if isinstance(size, tuple) else (size, size)


@lru_cache(maxsize=1)
def make_whole_model(key: tuple[str, str | None, int]) -> Any:
    """The whole model, float32 on the CPU, evaluation mode. One is kept: heads and towers ask in turn."""
    import open_clip

    backbone = OpenClip(*key)
    source = backbone.source
    file = None if source is None else source.find_file()
    weights, renamed = None, None
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(backbone.seed)
            alone = source is not None and source.is_image_tower_alone()
            if source is not None and file is not None and not source.find_tag():
                weights = open_checkpoint(file)
                renamed = from_transformers(dict(weights)) if is_transformers(weights) and not alone else None
            settings, later = backbone._describe(), alone or renamed is not None
            if later:
                logging.getLogger().addFilter(_is_other)
            model = open_clip.create_model(
                register_architecture(backbone.architecture),
                pretrained=None if file is None or later else str(file),
                precision="fp32",
                force_quick_gelu=backbone.uses_quick_gelu(),
                force_preprocess_cfg={name: settings[name] for name in PIXELS if name in settings},
                weights_only=True,
            )
            if alone and weights is not None:
                _load_image_tower(model, weights)
            elif renamed is not None:
                model.load_state_dict(renamed)
    except Exception as error:
        if file is None:
            raise
        raise InputError(
            f"{file.name} does not load as weights of {backbone.architecture}: {say_error(error)} "
            "It must hold a CLIP model, or its image tower, as open_clip or transformers save it, as "
            ".safetensors or as a .pt of plain tensors"
        ) from error
    finally:
        logging.getLogger().removeFilter(_is_other)
    return model.eval()


@lru_cache(maxsize=1)
def _copy_text_tower(key: tuple[str, str | None, int], device: torch.device) -> Any:
    """All but the image tower on a device. One is kept: tasks ask in turn."""
    whole = make_whole_model(key)
    return deepcopy(whole, {id(whole.visual): nn.Identity()}).to(device)


def _is_other(record: logging.LogRecord) -> bool:
    """Not open_clip's warning of a model without weights, which are loaded later."""
    return "No pretrained weights loaded" not in record.getMessage()


@torch.no_grad()
def _load_image_tower(model: Any, weights: Checkpoint) -> None:
    """Load an image tower alone; where it has no projection, features are what would be projected."""
    state = from_transformers(weights) if is_transformers(weights) else weights
    if not any(name.endswith("visual.proj") for name in state):
        model.visual.proj = None
    base = {f"visual.{name}": tensor for name, tensor in model.visual.state_dict().items()}
    tower = as_image_tower(state, base, weights.label)
    model.visual.load_state_dict({name.removeprefix("visual."): tensor for name, tensor in tower.items()})
    model.logit_scale.fill_(math.log(_TEMPERATURE))
