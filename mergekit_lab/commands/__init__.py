"""What can be done with checkpoints that are there: no run, no store; a file a command."""
