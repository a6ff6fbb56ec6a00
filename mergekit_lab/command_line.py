"""From what a user writes to what Hydra reads, and from what Hydra complains of to one line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from hydra.errors import MissingConfigException

from mergekit_lab.commands import COMMANDS
from mergekit_lab.errors import InputError, suggestion
from mergekit_lab.paths import conf_dir
from mergekit_lab.yaml_files import read_yaml_text

_EXPERIMENT = "+experiment="
_SHIPPED_SUITE = "suite=glyphs8"
_CONFIG_DIR = ("--config-dir", "-cd", "--config-path", "-cp")
_SEARCH_PATH = "hydra.searchpath="


def translate(arguments: list[str]) -> list[str]:
    """The command line as Hydra can read it.

    A command on checkpoints has a configuration of its own: `+experiment=diagnose`, and `stage=diagnose` too,
    becomes `--config-name=diagnose`. An experiment in a user's folder may be for a command as well: its file
    says `command: diagnose`. A paper's figure with `suite=glyphs8` gets what its header says of shipped data,
    `+shipped=…`. Hydra's grammar knows no ×, which tables are asked for with (`table=optimizer×merger`).
    """
    read = [each.replace("×", "*") if each.startswith("table=") else each for each in arguments]
    read += _shipped(read)
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


def _shipped(arguments: Iterable[str]) -> list[str]:
    """What draws a paper's figure on the data that ships, after its experiment."""
    given = set(arguments)
    if _SHIPPED_SUITE not in given or any(each.startswith("+shipped=") for each in given):
        return []
    names = [each.removeprefix(_EXPERIMENT) for each in given if each.startswith(_EXPERIMENT)]
    files = [file for name in names if (file := conf_dir() / "experiment" / f"{name}.yaml").is_file()]
    found = [re.search(r"^# Shipped data:.*conf/shipped/(\w+)\.yaml", f.read_text(), re.M) for f in files]
    return [f"+shipped={match[1]}" for match in found if match]


def check_config_files(arguments: list[str]) -> None:
    """Refuse YAML in a user's folders that Hydra would choke on; see `read_yaml_text`."""
    searched = [each.partition("=")[2] for each in arguments if _SEARCH_PATH in each]
    named = [Path(path) for each in searched for path in re.findall(r"(?:file://)?([^][,'\"\s]+)", each)]
    for folder in (*_config_dirs(arguments), *named):
        for file in sorted(folder.rglob("*.y*ml")) if folder.is_dir() else ():
            if file.is_file() and read_yaml_text(file).startswith("\ufeff"):
                raise InputError(
                    f"{file} begins with a byte-order mark, after which Hydra sees no `# @package`: save it as "
                    "UTF-8 without"
                )


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
