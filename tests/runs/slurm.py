"""The commands of Slurm as far as submitit needs them: jobs run at once, on this machine.

What a job says and its exit code lie beside the commands. One that dies is requeued once. `sacct` tells of
those that ended.
"""

import os
from pathlib import Path

_COMMANDS = {
    "sbatch": r"""
        run_job() {
            for attempt in first requeued; do
                bash "$script" > "$SLURM_SCRIPTS/$1-$attempt.out" 2>&1
                code=$?
                [ $code = 0 ] && break
            done
            echo $code > "$SLURM_SCRIPTS/$1.exit"
        }
        script=$1
        cp "$script" "$SLURM_SCRIPTS/$$.sh"
        last=$(sed -n 's/^#SBATCH --array=0-\([0-9]*\)%.*/\1/p' "$script")
        export SLURM_JOB_ID=$$
        if [ -z "$last" ]; then
            run_job $$ > /dev/null 2>&1 &
        else
            export SLURM_ARRAY_JOB_ID=$$
            for task in $(seq 0 "$last"); do
                SLURM_ARRAY_TASK_ID=$task run_job $$_$task > /dev/null 2>&1 &
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
    "sacct": r"""
        echo 'JobID|State|NodeList'
        for file in "$SLURM_SCRIPTS"/*.exit; do
            [ -e "$file" ] || continue
            [ "$(cat "$file")" = 0 ] && state=COMPLETED || state=FAILED
            echo "$(basename "$file" .exit)|$state|here"
        done
    """,
}


def install(folder: Path) -> dict[str, str]:
    """Put the commands into a folder; the environment that finds them there, and that has every script kept."""
    folder.mkdir()
    for name, body in _COMMANDS.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    return {"SLURM_SCRIPTS": str(folder), "PATH": f"{folder}:{os.environ['PATH']}"}
