"""What the hub reads of a merged model's card, how to use the model, and how it was asked for.

Fields of the header are the hub's: https://huggingface.co/docs/hub/model-cards.
"""

from __future__ import annotations

import inspect
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from mergekit_lab.checkpoints import TRANSFORMERS
from mergekit_lab.checkpoints.libraries import OPEN_CLIP
from mergekit_lab.checkpoints.tied_weights import read_class_name
from mergekit_lab.commands.prepared import Prepared
from mergekit_lab.errors import InputError
from mergekit_lab.merging import SLERP, TIES, Method, TaskArithmetic, WeightAverage
from mergekit_lab.merging.inputs import list_patterns
from mergekit_lab.paths import find_conf_dir
from mergekit_lab.yaml_files import make_values

_CARRIED = ("license", "license_name", "license_link", "language")
"""What the base's card says and holds for a merge of its descendants too."""
_PIPELINES = (
    ("ForCausalLM", "text-generation", "AutoModelForCausalLM"),
    ("LMHeadModel", "text-generation", "AutoModelForCausalLM"),
    ("ForConditionalGeneration", "text2text-generation", "AutoModelForSeq2SeqLM"),
    ("ForSequenceClassification", "text-classification", "AutoModelForSequenceClassification"),
    ("ForTokenClassification", "token-classification", "AutoModelForTokenClassification"),
    ("ForQuestionAnswering", "question-answering", "AutoModelForQuestionAnswering"),
    ("ForMaskedLM", "fill-mask", "AutoModelForMaskedLM"),
    ("ForImageClassification", "image-classification", "AutoModelForImageClassification"),
    ("CLIPModel", "zero-shot-image-classification", "CLIPModel"),
)
"""The end of an architecture's name, the hub's task, and the class that loads it."""


def describe_for_hub(prepared: Prepared) -> dict[str, Any]:
    """Fields of the card's header: library, task, and the license from the base's card."""
    library = prepared.library
    fields: dict[str, Any] = {}
    if library is not None:
        fields["library_name"] = library.name
    if tag := _find_pipeline(prepared):
        fields["pipeline_tag"] = tag[1]
    elif library is OPEN_CLIP:
        fields["pipeline_tag"] = "zero-shot-image-classification"
    header = read_header(prepared.origin.folder)
    return fields | {name: header[name] for name in _CARRIED if header.get(name)}


def say_usage(prepared: Prepared, title: str, repo: str | None = None) -> str:
    """Lines of Python that load the model, from its repository if it has one; empty where no library does."""
    if prepared.library is OPEN_CLIP:
        name = f"hf-hub:{repo}" if repo else f"local-dir:{title}"
        return (
            "import open_clip\n\n"
            f"model, preprocess = open_clip.create_model_from_pretrained({name!r})\n"
            f"tokenizer = open_clip.get_tokenizer({name!r})"
        )
    title = repo or title
    if prepared.library is not TRANSFORMERS:
        return ""
    pipeline = _find_pipeline(prepared)
    loader = pipeline[2] if pipeline else "AutoModel"
    lines = [f"from transformers import {loader}", "", f"model = {loader}.from_pretrained({title!r})"]
    if prepared.tokenizer is not None:
        lines = [f"from transformers import {loader}, AutoTokenizer", *lines[1:]]
        lines.append(f"tokenizer = AutoTokenizer.from_pretrained({title!r})")
    return "\n".join(lines)


def say_command(prepared: Prepared, title: str, format: str) -> str:
    """The command that merges the same inputs alike, called as the card calls them; empty for a method that no
    `merger=` makes, or side inputs that no key takes."""
    merger = _say_merger(prepared.method)
    if merger is None or prepared.side.keys() - {"fisher", "gram"}:
        return ""
    experts = _say_value(prepared.sources)
    words = [f"base={prepared.base_source}", f"experts={experts}", f"out={title}", *merger]
    for kind, by_name in prepared.side.items():
        words.append(f"{kind}s={_say_value({name: side.label for name, side in by_name.items()})}")
    settings = {
        "include": None if prepared.include is None else list_patterns(prepared.include),
        "exclude": prepared.exclude or None,
        "embeddings": prepared.embeddings,
        "dtype": prepared.dtype_name,
        "format": None if format == "dense" else format,
    }
    words += [f"{name}={_say_value(value)}" for name, value in settings.items() if value is not None]
    return " ".join(["python -m mergekit_lab +experiment=merge_checkpoints", *map(shlex.quote, words)])


def write_recipe(prepared: Prepared) -> str:
    """A mergekit YAML that asks for the same merge; empty where mergekit has no such method."""
    method, experts = prepared.method, list(prepared.experts)
    if prepared.include is not None or prepared.exclude or prepared.embeddings:
        return ""
    weights = method.weigh_experts(experts)
    parameters: dict[str, Any] = {}
    if type(method) is WeightAverage:
        name, weights = "linear", [1.0] * len(experts) if method.weights is None else weights
    elif type(method) is TaskArithmetic:
        name, parameters = "task_arithmetic", {"lambda": method.scale}
    elif type(method) is TIES and (method.preset, method.election) == ("mergekit", "mass"):
        if method.aggregator == "max":
            return ""
        name = "ties"
        parameters = {
            "density": method.density,
            "lambda": method.scale,
            "normalize": method.aggregator != "sum",
        }
    elif type(method) is SLERP and len(experts) == 2:
        name, parameters, weights = "slerp", {"t": method.t}, []
    else:
        return ""
    models: list[dict[str, Any]] = [{"model": source} for source in prepared.sources.values()]
    for model, weight in zip(models, weights, strict=False):
        model["parameters"] = {"weight": float(weight)}
    recipe: dict[str, Any] = {"merge_method": name, "base_model": prepared.base_source, "models": models}
    if name == "linear":
        del recipe["base_model"]
    if parameters:
        recipe["parameters"] = parameters
    if prepared.dtype is not None:
        recipe["dtype"] = prepared.dtype_name
    return yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True)


def _find_pipeline(prepared: Prepared) -> tuple[str, str, str] | None:
    if prepared.library is not TRANSFORMERS:
        return None
    name = read_class_name(prepared.origin.folder) or ""
    return next((each for each in _PIPELINES if name.endswith(each[0])), None)


def read_header(folder: Path | None) -> Mapping[str, Any]:
    """The header of the card in a model's folder; empty without a readable one."""
    file = None if folder is None else folder / "README.md"
    if file is None or not file.is_file():
        return {}
    match = re.match(r"---\n(.*?)\n---", file.read_text(encoding="utf-8", errors="replace"), re.S)
    try:
        headers = make_values(match[1], str(file)) if match else []
    except InputError:
        return {}
    return headers[0] if headers and isinstance(headers[0], Mapping) else {}


def _say_merger(method: Method) -> list[str] | None:
    """`merger=NAME` and the fields that are not at the option's values."""
    kind = type(method)
    for file in sorted((find_conf_dir() / "merger").glob("*.yaml")):
        option = yaml.safe_load(file.read_text(encoding="utf-8"))
        if option["_target_"].rpartition(".")[2] == kind.__name__ and kind.__module__.startswith(
            "mergekit_lab.merging."
        ):
            try:
                return [f"merger={file.stem}", *_say_fields(method, option, "merger")]
            except InputError:
                return None
    return None


def _say_fields(method: Any, option: Mapping[str, Any], path: str) -> list[str]:
    words = []
    for name, parameter in inspect.signature(type(method)).parameters.items():
        value, usual = getattr(method, name), option.get(name, parameter.default)
        if isinstance(value, Method):
            if not isinstance(usual, Mapping) or not usual["_target_"].endswith(f".{type(value).__name__}"):
                raise InputError(f"{path}.{name} is another method than the option's")
            words += _say_fields(value, usual, f"{path}.{name}")
        elif name == "coefficient" and value is None:
            continue
        elif value != usual and _as_list(value) != _as_list(usual):
            words.append(f"{path}.{name}={_say_value(value)}")
    return words


def _as_list(value: Any) -> Any:
    """A sequence as YAML has it, to be compared."""
    return list(value) if isinstance(value, list | tuple) else value


def _say_value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name}: {_say_value(each)}" for name, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_say_value, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)
