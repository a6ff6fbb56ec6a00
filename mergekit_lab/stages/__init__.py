"""What a run does, stage by stage, over one composed configuration."""

from mergekit_lab.stages.run import STAGES, run

__all__ = ["STAGES", "run"]
