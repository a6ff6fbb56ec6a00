"""What transformers calls the tensors of a folder in memory, and how it makes them from the tensors of files.

Files on the hub keep the names of the release that wrote them. A model in memory, and so a peft adapter or a
state dict, may have others: `language_model.model.layers.0` in the files of Gemma 3 is
`model.language_model.layers.0` in memory, and the experts of a mixture are one stack there. transformers 5 has
a mapping between both for every class. It is asked here with a model on the device meta, which takes no memory,
and only if the files' names do not fit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mergekit_lab.checkpoints.checkpoint import Checkpoint, Entry, TensorSpec, View
from mergekit_lab.checkpoints.tied_weights import read_class_name, read_config

_LAYERS = re.compile(r"^(n|num|encoder|decoder)_(\w+_)?layers?$|^depth$")


@dataclass(frozen=True)
class Made:
    """How a tensor in memory is made from tensors of a file: stack, then join, then swap dimensions.

    Attributes:
        sources: names in the file, by part. The tensors of a part are stacked, and the parts are joined.
        stacked: the dimension along which the tensors of a part are stacked. None if each part is one tensor.
        joined: the dimension along which the parts are joined. None if there is one part.
        turned: pairs of dimensions that are swapped, in order.
    """

    sources: tuple[tuple[str, ...], ...]
    stacked: int | None = None
    joined: int | None = None
    turned: tuple[tuple[int, int], ...] = ()

    @property
    def name(self) -> str | None:
        """The name of the file's tensor that is taken unchanged; None if there is more to do."""
        plain = self.stacked is None and self.joined is None and not self.turned
        return self.sources[0][0] if plain else None

    @property
    def names(self) -> list[str]:
        return [name for part in self.sources for name in part]

    def make(self, read: Callable[[str], Tensor]) -> Tensor:
        """Make the tensor in memory. `read` returns the file's tensor of a name."""
        parts = [
            torch.stack([read(name) for name in part], self.stacked)
            if self.stacked is not None
            else read(part[0])
            for part in self.sources
        ]
        whole = parts[0] if self.joined is None else torch.cat(parts, self.joined)
        for pair in self.turned:
            whole = whole.transpose(*pair)
        return whole.contiguous()

    def describe(self, specs: Mapping[str, TensorSpec]) -> TensorSpec:
        """Shape and dtype of the tensor in memory. `specs` are those of the file's tensors."""
        if self.name is not None:
            return specs[self.name]
        whole = self.make(lambda n: torch.empty(specs[n].shape, dtype=specs[n].dtype, device="meta"))
        return TensorSpec(tuple(whole.shape), whole.dtype)

    def take(self, whole: Tensor, name: str, shape_of: Callable[[str], tuple[int, ...]]) -> Tensor:
        """The inverse of `make`: cut one tensor of the file, by its name, from the tensor in memory."""
        for pair in reversed(self.turned):
            whole = whole.transpose(*pair)
        part = next(n for n, names in enumerate(self.sources) if name in names)
        if self.joined is not None:
            at = self.joined if self.stacked is None or self.joined < self.stacked else self.joined - 1
            sizes = [shape_of(names[0])[at] for names in self.sources]
            whole = whole.narrow(self.joined, sum(sizes[:part]), sizes[part])
        if self.stacked is not None:
            whole = whole.select(self.stacked, self.sources[part].index(name))
        return whole.contiguous()


@dataclass(frozen=True)
class Architecture:
    """A class of transformers with a configuration.

    Attributes:
        name: of the class.
        shapes: of every tensor, by its name in memory.
        tied: names in memory of second names of tied weights, each with the first.
        conversions: transformers' own, of names and of tensors.
        list_pieces: returns the shapes of all tensors in files of an earlier release, which hold a mixture's
            experts one by one.
        parts: the class of every model within this one, by the prefix of its tensors' names.
        linear: weights of linear layers, by their names in memory.
    """

    name: str
    shapes: Mapping[str, tuple[int, ...]]
    tied: Mapping[str, str]
    conversions: Sequence[Any]
    prefix: str
    list_pieces: Callable[[], Mapping[str, tuple[int, ...]]] = dict
    parts: Mapping[str, str] = field(default_factory=dict)
    linear: frozenset[str] = frozenset()

    def match_names(self, names: Iterable[str]) -> dict[str, Made]:
        """How tensors in memory are made from the tensors of a file with these names, as far as they can be."""
        from transformers.core_model_loading import dot_natural_key, rename_source_key

        present: Any = dict.fromkeys(self.shapes, True)
        converters: Any = [entry for entry in self.conversions if hasattr(entry, "operations")]
        renamings: Any = [entry for entry in self.conversions if not hasattr(entry, "operations")]
        plain: dict[str, Made] = {}
        grouped: dict[tuple[str, int], dict[str, list[str]]] = {}
        for name in sorted(names, key=dot_natural_key):
            target, pattern = rename_source_key(name, renamings, converters, self.prefix, present)
            if target not in self.shapes:
                target, pattern = rename_source_key(name, [], [], self.prefix, present)
            if target not in self.shapes:
                continue
            if pattern is None:
                plain.setdefault(target, Made(((name,),)))
            else:
                number = next(n for n, c in enumerate(converters) if pattern in c.source_patterns)
                grouped.setdefault((target, number), {}).setdefault(pattern, []).append(name)
        for (target, number), by_pattern in grouped.items():
            made = _read_converter(converters[number], by_pattern)
            if made is not None:
                plain.setdefault(target, made)
        return plain

    def find_parts(self, names: Iterable[str]) -> dict[str, str]:
        """`parts`, and the same classes by the prefixes that their tensors have in a file with these names."""
        parts = dict(self.parts)
        for target, made in self.match_names(names).items():
            for head, class_name in self.parts.items():
                rest = target.removeprefix(head)
                if target.startswith(head) and made.name and made.name.endswith(f".{rest}"):
                    parts.setdefault(made.name.removesuffix(rest), class_name)
        return parts


def _read_converter(converter: Any, by_pattern: Mapping[str, Sequence[str]]) -> Made | None:
    """What one of transformers' converters does to these tensors. None if it is more than `Made` can say."""
    if len(converter.target_patterns) != 1 or set(by_pattern) != set(converter.source_patterns):
        return None
    stacked = joined = None
    turned: list[tuple[int, int]] = []
    for operation in converter.operations:
        does = type(operation).__name__
        if does == "MergeModulelist" and stacked is None and joined is None and not turned:
            stacked = operation.dim
        elif does == "Concatenate" and joined is None and not turned:
            joined = operation.dim
        elif does == "Transpose" and not getattr(operation, "check_dims", False):
            turned.append((operation.dim0, operation.dim1))
        else:
            return None
    sources = tuple(tuple(by_pattern[pattern]) for pattern in converter.source_patterns)
    odd = stacked is None and any(len(part) != 1 for part in sources)
    return (
        None if odd or (joined is None and len(sources) > 1) else Made(sources, stacked, joined, tuple(turned))
    )


def find_architecture(checkpoint: Checkpoint, name: str | None = None) -> Architecture | None:
    """The class that a checkpoint's configuration names, or the class `name` with that configuration. None if
    transformers does not know it.
    """
    folder = checkpoint.folder
    if folder is None or not (folder / "config.json").is_file():
        return None
    name = name or read_class_name(folder)
    if name is None:
        return None
    stamp = (folder / "config.json").stat().st_mtime_ns
    return _find_architecture(folder.absolute(), stamp, name, len(checkpoint))


@lru_cache(16)
def _find_architecture(folder: Path, stamp: int, name: str, tensors: int) -> Architecture | None:
    import transformers

    cls = getattr(transformers, name, None)
    if not (isinstance(cls, type) and hasattr(cls, "config_class") and hasattr(cls, "base_model_prefix")):
        return None
    if _find_largest_count(read_config(folder)) > tensors:  # of layers; a model has more tensors than those
        return None
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping

        with silence_transformers(), torch.device("meta"):
            model: Any = cls(cls.config_class.from_pretrained(folder))
            conversions = get_model_conversion_mapping(model)
    except Exception:  # a configuration from elsewhere can make a class of transformers raise anything
        return None
    shapes = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    pieces = partial(_list_pieces, model)
    parts = {
        f"{path}.": type(part).__name__
        for path, part in model.named_modules()
        if path and isinstance(part, transformers.PreTrainedModel)
    }
    kinds = (torch.nn.Linear, transformers.pytorch_utils.Conv1D)
    linear = frozenset(
        f"{path}.weight"
        for path, part in model.named_modules()
        # the projection of nn.MultiheadAttention is a subclass, which is read and never called
        if isinstance(part, kinds)
        and not isinstance(part, torch.nn.modules.linear.NonDynamicallyQuantizableLinear)
    )
    return Architecture(name, shapes, dict(tied), conversions, model.base_model_prefix, pieces, parts, linear)


@contextmanager
def silence_transformers() -> Iterator[None]:
    """Silence transformers' logger. Its remarks on a configuration are for those who load the model."""
    import transformers

    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    try:
        yield
    finally:
        transformers.logging.set_verbosity(verbosity)


def _list_pieces(model: Any) -> Mapping[str, tuple[int, ...]]:
    from transformers.core_model_loading import revert_weight_conversion

    return {
        key: tuple(value.shape) for key, value in revert_weight_conversion(model, model.state_dict()).items()
    }


def list_mixtures(specs: Mapping[str, TensorSpec]) -> list[Architecture]:
    """Architectures for a mixture of unknown class, whose stacks of experts are made from single matrices, in
    each of transformers' two spellings. They leave out stacks of square matrices, which may be [in, out].
    """
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    shapes = {n: s.shape for n, s in specs.items() if len(s.shape) != 3 or s.shape[-1] != s.shape[-2]}
    return [
        Architecture(
            f"{model}'s layout of experts", shapes, {}, get_checkpoint_conversion_mapping(model) or [], ""
        )
        for model in ("qwen2_moe", "mixtral")
    ]


def _find_largest_count(config: Any) -> int:
    """The largest number of layers that a configuration asks for."""
    if not isinstance(config, dict):
        return 0
    own = [v for k, v in config.items() if _LAYERS.search(k) and type(v) is int]
    return max([0, *own, *(_find_largest_count(part) for part in config.values())])


def choose_prefix(
    prefixes: Sequence[str], class_name: str | None, whole: Architecture | None, names: Iterable[str]
) -> str | None:
    """Which of several prefixes the tensors of a class have in a larger model. None if nothing tells.

    It is the prefix of the larger model's only part of that class. If it has no such part, it is the prefix
    that transformers uses for the class. Prefixes of different depths are not compared with that, because a
    `BertModel` may be an `encoder.` beside a `decoder.bert.`.

    Args:
        class_name: of the part.
        whole: the larger model's class, if it is known.
        names: of the larger model's file.
    """
    import transformers

    if class_name is None:
        return None
    parts = {} if whole is None else whole.find_parts(names)
    fitting = [prefix for prefix in prefixes if parts.get(prefix) == class_name]
    if class_name not in parts.values() and len({prefix.count(".") for prefix in prefixes}) == 1:
        usual = getattr(getattr(transformers, class_name, None), "base_model_prefix", None)
        fitting = [prefix for prefix in prefixes if usual and f".{prefix}".endswith(f".{usual}.")]
    return fitting[0] if len(fitting) == 1 else None


def as_loaded(checkpoint: Checkpoint, architecture: Architecture) -> View:
    """A checkpoint with the names and stacks that it has in memory."""
    entries = {
        target: Entry(made.describe(checkpoint.specs), partial(made.make, checkpoint.__getitem__))
        for target, made in architecture.match_names(checkpoint).items()
    }
    return View(checkpoint, entries, architecture.tied)


def as_relaid(
    checkpoint: Checkpoint, own: Mapping[str, Made], like: Mapping[str, TensorSpec], theirs: Mapping[str, Made]
) -> View:
    """A checkpoint in the layout of another one: with its names, and its stacks or pieces.

    Args:
        checkpoint: the one to change.
        own, theirs: how each tensor in memory is made from the tensors of `checkpoint`, and of the other one. A
            tensor that only one of them has keeps its name.
        like: shape and dtype of every tensor of the other one.
    """
    entries = checkpoint.list_entries()
    source = View(checkpoint, entries)  # keeps the stack of which pieces are read one by one
    moved: dict[str, dict[str, Entry]] = {}

    def make_piece(target: str, name: str) -> Tensor:
        whole = own[target].make(source.__getitem__)
        return theirs[target].take(whole, name, lambda other: like[other].shape)

    for target, made in own.items():
        if target not in theirs:
            continue
        wanted, there = made.describe(checkpoint.specs), theirs[target]
        same = [len(part) for part in made.sources] == [len(part) for part in there.sources]
        if same and (made.name is None) == (there.name is None):
            moved |= {name: {new: entries[name]} for name, new in zip(made.names, there.names, strict=True)}
        elif there.name is not None:
            moved |= {name: {} for name in made.names}
            moved[made.names[0]] = {there.name: Entry(wanted, partial(made.make, checkpoint.__getitem__))}
        elif made.name is not None and there.describe(like).shape == wanted.shape:
            moved[made.name] = {
                name: Entry(TensorSpec(like[name].shape, wanted.dtype), partial(make_piece, target, name))
                for name in there.names
            }
    relaid: dict[str, Entry] = {}
    for name, entry in entries.items():
        relaid |= moved.get(name, {name: entry})
    new = {name: next(iter(single)) for name, single in moved.items() if len(single) == 1}
    view = View(checkpoint, relaid, {new.get(n, n): new.get(k, k) for n, k in checkpoint.find_ties().items()})
    view.untied = {new.get(n, n): new.get(k, k) for n, k in checkpoint.untied.items()}
    return view
