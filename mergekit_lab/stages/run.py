"""One run: check the configuration, then its stages in order."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from mergekit_lab.stages.config import check
from mergekit_lab.stages.context import Context, stage_list
from mergekit_lab.stages.curvature import stage_curvature
from mergekit_lab.stages.evaluate import stage_evaluate
from mergekit_lab.stages.finetune import stage_finetune
from mergekit_lab.stages.merge import stage_merge
from mergekit_lab.stages.report import stage_report

log = logging.getLogger(__name__)

STAGES: dict[str, Callable[[Context], None]] = {
    "finetune": stage_finetune,
    "curvature": stage_curvature,
    "merge": stage_merge,
    "evaluate": stage_evaluate,
    "report": stage_report,
}


def run(cfg: DictConfig, folder: Path, choices: Mapping[str, str], overrides: list[str]) -> None:
    """Run the stages that the configuration names.

    Args:
        cfg: the composed configuration.
        folder: where the report goes.
        choices: the option taken of each group.
        overrides: as on the command line; kept beside the error if the run fails.

    Raises:
        InputError: a user's mistake; `failure.json` in the run's folder says so too.
    """
    try:
        check(cfg)
        wanted = stage_list(cfg, STAGES)
        context = Context(cfg, folder, choices)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "failure.json").unlink(missing_ok=True)
        context.tracker.start(
            context.plain,
            run_dir=folder,
            name=folder.name,
            group=context.plain["suite"]["name"],
            job_type="run",
        )
        begun = time.monotonic()
        try:
            for name in wanted:
                with context.timed(name):
                    STAGES[name](context)
        finally:
            context.tracker.finish()
        log.info("done in %.0f s", time.monotonic() - begun)
    except Exception as error:
        folder.mkdir(parents=True, exist_ok=True)
        failure = {"overrides": overrides, "error": f"{type(error).__name__}: {error}"}
        (folder / "failure.json").write_text(json.dumps(failure, indent=1) + "\n")
        (folder / "config.yaml").write_text(OmegaConf.to_yaml(cfg))
        raise
