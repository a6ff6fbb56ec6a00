"""What a run does, stage by stage, over one composed configuration: `run.run`."""
