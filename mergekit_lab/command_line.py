"""Translate a command line for Hydra, and Hydra's errors for the user."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from hydra.errors import MissingConfigException
from omegaconf import OmegaConf

from mergekit_lab import __version__
from mergekit_lab.commands import COMMANDS
from mergekit_lab.errors import InputError, suggest
from mergekit_lab.paths import find_conf_dir
from mergekit_lab.yaml_files import read_yaml_text

_EXPERIMENT = "+experiment="
_ADDED = ("experiment", "protocol", "shipped", "task", "task/clip")
"""Groups that a run uses only if the command line adds one (`+group=OPTION`)."""
_SHIPPED_SUITE = "suite=glyphs8"
_CONFIG_DIR = ("--config-dir", "-cd", "--config-path", "-cp")
_CONFIG_NAME = ("--config-name", "-cn")
_WITH_VALUE = {*_CONFIG_DIR, *_CONFIG_NAME, "--package", "-p", "--cfg", "-c", "--experimental-rerun"}
"""Options of Hydra whose value may follow as the next word."""
_SEARCH_PATH = "hydra.searchpath="
_TIMES = re.compile(r"\s*[×*]\s*|\s+x\s+")
WELCOME = """\
mergekit_lab fine-tunes experts of one backbone, merges them, and shows which way keeps most.

Fine-tune four small experts, merge them seven ways, compare:
  {command} +experiment=quickstart

Compare ways to merge checkpoints that you have, on your own tasks:
  {command} +experiment=compare_mergers base=BASE experts=[A,B] texts=[a.csv,b.csv]

Merge them:
  {command} +experiment=merge_checkpoints base=BASE experts=[A,B] out=OUT merger=ties

More: {command} --help    every option and what it is; `merger=` lists those of one group
      {command} --version
Add dry_run=true to see what would be done, and how long it takes."""
"""Printed by the bare command."""
HELP = """\
mergekit_lab: fine-tune experts of one backbone, merge them, evaluate the merged model, compare.

  {command} +experiment=quickstart                 the whole path on data that ships
  {command} +experiment=NAME key=value group=OPTION
  {command} -m +experiment=quickstart optimizer=adamw,sam merger=ties,tsvm    a sweep
  {command} +experiment=merge_checkpoints base=BASE experts=[A,B] out=OUT merger=ties
                      models that are there; `--help` with it says its keys, as with diagnose and expand

Add your own with --config-dir PATH. `--cfg job` prints the composed configuration, `--info` how it
was composed. A group's file shows every key it takes.

{groups}"""
"""Printed by `--help` for runs. Hydra answers `--help` for commands."""
_STOPPED = "stopped; the same command goes on from here"


def answer(arguments: Sequence[str], command: str = "mergekit-lab") -> str | None:
    """The answer to a command line that needs no configuration: no arguments, help, the version, or a group's
    options.

    Raises:
        SystemExit: with the options, of a group that is left empty amid a command, as by an unset variable.
    """
    if not arguments:
        return WELCOME.format(command=command)
    if "--version" in arguments:
        return f"mergekit_lab {__version__}"
    for each in arguments:
        group = each.lstrip("+").partition("@")[0].removesuffix("=")
        if each.endswith("=") and group in _list_groups():
            text = f"{list_options(group, _list_config_dirs(arguments))}\nchoose one of these: {group}=NAME"
            settings, options = _split_options(arguments)
            if len(settings) == 1 and _list_names(options) <= {*_CONFIG_DIR, "--help", "-h"}:
                return text
            raise SystemExit(text)
    named = any(each.startswith("--config-name") for each in translate(list(arguments)))
    if named or not {"--help", "-h"} & set(arguments):
        return None
    folders = list(_list_config_dirs(arguments))
    return HELP.format(
        command=command,
        groups="\n\n".join(
            f"{'+' if group in _ADDED else ''}{group}=OPTION\n\n{list_options(group, folders)}"
            for group in _list_groups()
        ),
    )


def explain_stop(arguments: Sequence[str]) -> str:
    """The message after Ctrl-C: a run continues from the store, a command on checkpoints starts again."""
    named = [each.removeprefix("--config-name=") for each in arguments if each.startswith("--config-name=")]
    if set(named) & set(COMMANDS):
        return "stopped; nothing was written, and the same command begins anew"
    return _STOPPED


def translate(arguments: list[str]) -> list[str]:
    """The command line in a form that Hydra reads.

    - A command on checkpoints has its own configuration: `+experiment=diagnose` and `stage=diagnose` become
      `--config-name=diagnose`. So does an experiment in a user's folder whose file says `command: diagnose`.
    - A paper's figure with `suite=glyphs8` gets the option that its `shipped` names, `+shipped=…`.
    - In `table=`, `×` and ` x ` become `*`, because Hydra's grammar has no `×`.
    - Options move behind the settings, because Hydra accepts no option between two settings.
    - `experiment=` gets the plus that Hydra wants before it. A user's own main configuration (`--config-name`)
      may hold the group already.
    """
    settings, options = _split_options(arguments)
    if not _list_names(options) & {*_CONFIG_NAME}:
        settings = [f"+{each}" if each.startswith(_EXPERIMENT[1:]) else each for each in settings]
    settings = [_TIMES.sub("*", each) if each.startswith("table=") else each for each in settings]
    read = [*settings, *_add_shipped([*settings, *options]), *options]
    for position, each in enumerate(read):
        name = each.removeprefix(_EXPERIMENT).removeprefix("stage=")
        if name != each and name in COMMANDS:
            return [f"--config-name={name}", *read[:position], *read[position + 1 :]]
        if each.startswith(_EXPERIMENT) and (command := _find_command(name, read)):
            return [f"--config-name={command}", *read]
    return read


def _split_options(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Settings (`key=value`), and options with what belongs to them (`--config-dir FOLDER`)."""
    settings: list[str] = []
    options: list[str] = []
    before = ""
    for each in arguments:
        is_value = before in _WITH_VALUE or (before in ("--info", "-i") and "=" not in each)
        (options if each.startswith("-") or is_value else settings).append(each)
        before = "" if is_value else each
    return settings, options


def _list_names(options: Sequence[str]) -> set[str]:
    return {each.partition("=")[0] for each in options if each.startswith("-")}


def _find_command(experiment: str, arguments: list[str]) -> str | None:
    """The command that an experiment in a user's folder is for."""
    for folder in _list_config_dirs(arguments):
        file = folder / "experiment" / f"{experiment}.yaml"
        if file.is_file() and (match := re.search(r"^command: *(\w+)", file.read_text(errors="replace"), re.M)):
            return match[1]
    return None


def _add_shipped(arguments: Iterable[str]) -> list[str]:
    """The option that draws a paper's figure on the shipped data; it follows the experiment."""
    words = set(arguments)
    if _SHIPPED_SUITE not in words or any(each.startswith("+shipped=") for each in words):
        return []
    names = [each.removeprefix(_EXPERIMENT) for each in words if each.startswith(_EXPERIMENT)]
    files = [file for name in names if (file := find_conf_dir() / "experiment" / f"{name}.yaml").is_file()]
    matches = [re.search(r"^shipped: (\w+)$", f.read_text(), re.M) for f in files]
    return [f"+shipped={match[1]}" for match in matches if match]


def check_config_files(arguments: list[str]) -> None:
    """Refuse YAML files in a user's folders that Hydra cannot read; see `read_yaml_text`."""
    searched = [each.partition("=")[2] for each in arguments if _SEARCH_PATH in each]
    named = [Path(path) for each in searched for path in re.findall(r"(?:file://)?([^][,'\"\s]+)", each)]
    for folder in (*_list_config_dirs(arguments), *named):
        for file in sorted(folder.rglob("*.y*ml")) if folder.is_dir() else ():
            if file.is_file() and read_yaml_text(file).startswith("\ufeff"):
                raise InputError(
                    f"{file} begins with a byte-order mark, which hides `# @package` from Hydra: save it as "
                    "UTF-8 without one"
                )


def _list_config_dirs(arguments: Sequence[str]) -> Iterator[Path]:
    for each, following in zip(arguments, [*arguments[1:], ""], strict=True):
        option, equals, value = each.partition("=")
        if option in _CONFIG_DIR:
            yield Path(value if equals else following)


def explain(error: Exception) -> str:
    """Hydra's error about a command line as one line, with the nearest name."""
    text = str(error)
    if isinstance(error, MissingConfigException) and error.options is not None:
        group, _, option = str(error.missing_cfg_file).rpartition("/")
        options = [*error.options, *(COMMANDS if group == "experiment" else ())]
        more = "; others come with pip install 'mergekit_lab[launchers]'" if group == "hydra/launcher" else ""
        return f"there is no {group} {option!r}{suggest(option, options)}{more}"
    if wrong := re.match(r"Could not override '([^']+)'", text):
        return f"unknown key {wrong[1]!r}{_suggest_key(wrong[1], error.__cause__)}"
    cause = error.__cause__ or error.__context__
    if not text:
        return f"the configuration cannot be composed: {cause or type(error).__name__}"
    return f"{text}: {cause}" if text.startswith("Error merging override") and cause else text


def _suggest_key(key: str, cause: BaseException | None) -> str:
    """What may have been meant by a key of which Hydra found only the first parts."""
    parent, _, name = str(getattr(cause, "full_key", None) or key).rpartition(".")
    node = getattr(cause, "parent_node", None)
    values: Any = dict.fromkeys(_list_top_level_names()) if node is None else OmegaConf.to_container(node)
    if not values and parent in _list_groups():
        return f": choose one first, {parent}=NAME"
    hidden = ("hydra", "command")
    known = {k: v for k, v in (values or {}).items() if k not in hidden and not str(k).startswith("_")}
    for inner, value in known.items():
        if isinstance(value, dict) and name in value and parent:
            return f"; did you mean '{parent}.{inner}.{name}'?"
    return suggest(name, known)


def list_options(group: str, folders: Iterable[Path] = ()) -> str:
    """The options of a group, each with the first comment of its file; families of options form blocks.

    Args:
        group: as `merger`.
        folders: a user's own, beside the package's.
    """
    files = {
        f.stem: f for folder in (find_conf_dir(), *folders) for f in sorted((folder / group).glob("*.yaml"))
    }
    if group == "experiment":
        files |= {name: find_conf_dir() / f"{name}.yaml" for name in COMMANDS}
    families = [
        list(names) for _, names in groupby(sorted(files), lambda name: re.split("_|(?=[0-9])", name)[0])
    ]
    single = [name for family in families if len(family) == 1 for name in family]
    blocks = [single, *(family for family in families if len(family) > 1)]
    width = max(map(len, files), default=0)
    room = max(30, shutil.get_terminal_size((110, 24)).columns - width - 5)
    return "\n\n".join(
        "\n".join(f"  {name:<{width}}  {_read_first_comment(files[name], room)}".rstrip() for name in block)
        for block in blocks
        if block
    )


def _read_first_comment(file: Path, room: int) -> str:
    """A file's first line that says what it is for."""
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("#") and not line.startswith("# @package"):
            text = line.lstrip("# ").removeprefix("Question: ")
            return textwrap.shorten(text, room, placeholder=" …")
    return ""


def _list_groups() -> list[str]:
    """The groups: `experiment` first, and last those that a command line must add."""
    files = find_conf_dir().rglob("*.yaml")
    names = {str(file.parent.relative_to(find_conf_dir())) for file in files if file.parent != find_conf_dir()}
    mine = [name for name in names if not name.startswith("hydra")]
    return sorted(mine, key=lambda name: (name != "experiment", name in _ADDED, name))


def _list_top_level_names() -> Iterable[str]:
    """All groups, and the keys of `main.yaml`."""
    keys = re.findall(r"^(\w+):", (find_conf_dir() / "main.yaml").read_text(), re.M)
    return {*keys, *_list_groups()} - {"defaults"}
