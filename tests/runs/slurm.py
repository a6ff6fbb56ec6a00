"""The commands of Slurm as far as submitit needs them: jobs run at once, on this machine."""

import os
from pathlib import Path

_COMMANDS = {
    "sbatch": r"""
        cp "$1" "$SLURM_SCRIPTS/$$.sh"
        last=$(sed -n 's/^#SBATCH --array=0-\([0-9]*\)%.*/\1/p' "$1")
        export SLURM_JOB_ID=$$
        if [ -z "$last" ]; then
            bash "$1" > /dev/null 2>&1 &
        else
            export SLURM_ARRAY_JOB_ID=$$
            for task in $(seq 0 "$last"); do
                SLURM_ARRAY_TASK_ID=$task bash "$1" > /dev/null 2>&1 &
            done
        fi
        echo "Submitted batch job $$"
    """,
    "srun": r"""
        while [[ "$1" == --* ]]; do
            case "$1" in --output | --error) shift 2 ;; *) shift ;; esac
        done
        exec "$@"
    """,
    "sacct": "echo 'JobID|State|NodeList'",
}


def install(folder: Path) -> dict[str, str]:
    """Put the commands into a folder; the environment that finds them there, and that has every script kept."""
    folder.mkdir()
    for name, body in _COMMANDS.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    return {"SLURM_SCRIPTS": str(folder), "PATH": f"{folder}:{os.environ['PATH']}"}
