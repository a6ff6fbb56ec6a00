"""From what a user writes to what Hydra reads, and from what Hydra complains of to one line."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import yaml
from hydra.errors import MissingConfigException

from mergekit_lab.commands import COMMANDS
from mergekit_lab.errors import InputError, suggestion
from mergekit_lab.paths import conf_dir

_EXPERIMENT = "+experiment="
_CONFIG_DIR = ("--config-dir", "-cd", "--config-path", "-cp")
_SEARCH_PATH = "hydra.searchpath="
_MOST_NODES = 200_000
"""Of a YAML file once its aliases are written out. Our largest configuration has some hundred."""
_DEEPEST = 64
"""Levels of a YAML file; our configurations have fewer than ten."""


def translate(arguments: list[str]) -> list[str]:
    """The command line as Hydra can read it.

    A command on checkpoints has a configuration of its own: `+experiment=diagnose`, and `stage=diagnose` too,
    becomes `--config-name=diagnose`. An experiment in a user's folder may be for a command as well: its file
    says `command: diagnose`. Hydra's grammar knows no ×, which tables are asked for with
    (`table=optimizer×merger`).
    """
    read = [each.replace("×", "*") if each.startswith("table=") else each for each in arguments]
    for position, each in enumerate(read):
        name = each.removeprefix(_EXPERIMENT).removeprefix("stage=")
        if name != each and name in COMMANDS:
            return [f"--config-name={name}", *read[:position], *read[position + 1 :]]
        if each.startswith(_EXPERIMENT) and (command := _command_of(name, read)):
            return [f"--config-name={command}", *read]
    return read


def _command_of(experiment: str, arguments: list[str]) -> str | None:
    """The command that an experiment in a user's folder is for."""
    for folder in _config_dirs(arguments):
        file = folder / "experiment" / f"{experiment}.yaml"
        if file.is_file() and (found := re.search(r"^command: *(\w+)", file.read_text(errors="replace"), re.M)):
            return found[1]
    return None


def check_config_files(arguments: list[str]) -> None:
    """Refuse YAML in a user's folders that Hydra would choke on, by the file's name.

    Raises:
        InputError: a file of more than 200,000 values, or one that contains itself, once its aliases are
            written out, as OmegaConf does; one that is nested deeper than any configuration; one with a
            byte-order mark, after which Hydra sees no `# @package`.
    """
    searched = [each.partition("=")[2] for each in arguments if _SEARCH_PATH in each]
    named = [Path(path) for each in searched for path in re.findall(r"(?:file://)?([^][,'\"\s]+)", each)]
    for folder in (*_config_dirs(arguments), *named):
        for file in sorted(folder.rglob("*.y*ml")) if folder.is_dir() else ():
            text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
            if text.startswith("\ufeff"):
                raise InputError(f"{file} begins with a byte-order mark: save it as UTF-8 without")
            if _measure_depth(text) > _DEEPEST:
                raise InputError(f"{file} is nested too deep to be read")
            if "&" in text and "*" in text and _count_nodes(text) > _MOST_NODES:
                raise InputError(
                    f"{file} has more than {_MOST_NODES} values once its aliases (*name) are written out: "
                    "write fewer"
                )


def _measure_depth(text: str) -> int:
    """How many lists and mappings of a YAML file lie in each other, up to where it can be read."""
    depth = deepest = 0
    with suppress(yaml.YAMLError):
        for event in yaml.parse(text, yaml.SafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            deepest = max(deepest, depth)
            if deepest > _DEEPEST:
                break
    return deepest


def _count_nodes(text: str) -> float:
    """Values of a YAML file with its aliases written out; what cannot be read is Hydra's to say."""
    sizes: dict[int, float] = {}

    def count(node: yaml.Node) -> float:
        if id(node) not in sizes:
            sizes[id(node)] = math.inf  # met again below itself
            parts = node.value if isinstance(node, yaml.CollectionNode) else ()
            inner = [part for pair in parts for part in (pair if isinstance(pair, tuple) else (pair,))]
            sizes[id(node)] = 1 + sum(map(count, inner))
        return sizes[id(node)]

    try:
        node = yaml.compose(text, yaml.SafeLoader)
        return count(node) if node is not None else 0
    except yaml.YAMLError:
        return 0


def _config_dirs(arguments: list[str]) -> Iterator[Path]:
    for each, following in zip(arguments, [*arguments[1:], ""], strict=True):
        option, equals, value = each.partition("=")
        if option in _CONFIG_DIR:
            yield Path(value if equals else following)


def explain(error: Exception) -> str:
    """What Hydra says of a command line, as one line with the nearest name."""
    text = str(error)
    if isinstance(error, MissingConfigException) and error.options is not None:
        group, _, option = str(error.missing_cfg_file).rpartition("/")
        options = [*error.options, *(COMMANDS if group == "experiment" else ())]
        return f"there is no {group} {option!r}{suggestion(option, options)}"
    if wrong := re.match(r"Could not override '([^']+)'", text):
        key = wrong[1].rpartition(".")[2]
        siblings = getattr(error.__cause__, "parent_node", None)
        names = _top_level_names() if siblings is None else map(str, siblings)
        known = {name for name in names if name not in ("hydra", "command") and not name.startswith("_")}
        return f"unknown key {wrong[1]!r}{suggestion(key, known)}"
    cause = error.__cause__ or error.__context__
    return f"{text}: {cause}" if text.startswith("Error merging override") and cause else text


def _top_level_names() -> Iterable[str]:
    """Groups, and keys of `main.yaml`."""
    keys = re.findall(r"^(\w+):", (conf_dir() / "main.yaml").read_text(), re.M)
    groups = [folder.name for folder in conf_dir().iterdir() if folder.is_dir()]
    return {*keys, *groups} - {"defaults"}
