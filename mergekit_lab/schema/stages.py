"""The stages of a run, as `stage` names them."""

from __future__ import annotations

from omegaconf import DictConfig

from mergekit_lab.errors import InputError, join_names, suggest

STAGES = ("finetune", "curvature", "merge", "evaluate", "analyze", "report")
"""In their order; each is `stage_NAME` of the module `runs.NAME`."""
ON_DATA = ("fetch", "check_data")
"""Those on data sets and weights alone, for which nothing is trained."""


def list_stages(cfg: DictConfig) -> list[str]:
    """The stages that `stage` names: one, or a list."""
    return [cfg.stage] if isinstance(cfg.stage, str) else list(cfg.stage or ())


def check_stages(cfg: DictConfig) -> list[str]:
    """The same, if all of them are known, and can run together.

    Raises:
        InputError: an unknown stage, none, or one that runs alone beside others.
    """
    known, wanted = [*STAGES, "store", *ON_DATA], list_stages(cfg)
    for name in wanted:
        if name not in known:
            raise InputError(f"there is no stage {name!r}{suggest(str(name), known)}")
    if not wanted:
        raise InputError(f"stage is empty; known: {join_names(known)}")
    if "store" in wanted and wanted != ["store"]:
        raise InputError("the stage store cannot run with other stages")
    others = [name for name in wanted if name not in ON_DATA]
    if 0 < len(others) < len(wanted):
        raise InputError(f"the stage {others[0]} cannot run together with {' or '.join(ON_DATA)}")
    return wanted
