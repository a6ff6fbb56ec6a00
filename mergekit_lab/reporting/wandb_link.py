"""Tell W&B which run used which artifact, for runs that were offline when they used it.

    wandb sync outputs/RUN/wandb/offline-run-*
    python -m mergekit_lab.reporting.wandb_link outputs/RUN [outputs/SWEEP …]

It needs an API key of W&B: `wandb login`, or WANDB_API_KEY. wandb links inputs of online runs only. What an
offline run made, and of what, lies in `wandb_lineage.jsonl` of its folder with the artifacts' digests; after
the upload the same links are made through wandb's public API.
"""

import argparse
import json
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from mergekit_lab.errors import InputError
from mergekit_lab.reporting.wandb_tracker import LINEAGE, require_key


def link(folders: Iterable[Path], api: Any) -> int:
    """Link the artifacts of the offline runs under these folders; returns how many uses were told.

    Linking again changes nothing.

    Args:
        api: `wandb.Api()`.

    Raises:
        InputError: a folder without lineage, a line that is none, an artifact that is not there as it was made.
    """
    lines = [line for folder in folders for line in _read_lines(Path(folder))]
    digests = {line["name"]: line["digest"] for line in lines if line["name"]}
    uses: dict[tuple[str, str], str | None] = {}
    for line in lines:
        project = "/".join(filter(None, (line["entity"] or api.default_entity, line["project"])))
        for name in line["uses"]:
            uses[f"{project}/{line['run']}", f"{project}/{name}"] = digests.get(name)
    find_run = cache(api.run)
    for (run, path), digest in uses.items():
        artifact = _find_artifact(api, path, digest)
        find_run(run).use_artifact(artifact)
    return len(uses)


def _read_lines(folder: Path) -> list[dict[str, Any]]:
    files = sorted(folder.rglob(LINEAGE))
    if not files:
        raise InputError(f"{folder} has no {LINEAGE}: no offline run of logger=wandb was here")
    lines = []
    for file in files:
        for number, text in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
            try:
                line = json.loads(text)
                lines.append({key: line[key] for key in ("run", "entity", "project", "name", "digest", "uses")})
            except (ValueError, KeyError, TypeError):
                raise InputError(f"{file}, line {number}: not a line of lineage") from None
    return lines


def _find_artifact(api: Any, path: str, digest: str | None) -> Any:
    try:
        artifact = api.artifact(path)
    except Exception as error:  # wandb has no one class for what is not there
        raise InputError(f"W&B has no artifact {path} ({error}): run `wandb sync` first") from None
    if digest is not None and artifact.digest != digest:
        raise InputError(f"the artifact {path} has digest {artifact.digest}, and {digest} was made here")
    return artifact


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="of runs or sweeps")
    args = parser.parse_args()
    try:
        require_key()
        import wandb

        print(f"{link(args.folders, wandb.Api())} uses of artifacts linked")
    except InputError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
