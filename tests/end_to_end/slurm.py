"""The commands of Slurm as far as submitit needs them: jobs run at once, on this machine.

What a job says and its exit code lie beside the commands. One that dies is requeued once. `sacct` tells of
those that ended. `srun PYTHON … -m MODULE ARGUMENTS` runs in a fork of the server of `programs`.
"""

import os
import sys
from pathlib import Path

from programs import find_socket

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
    "sacct": r"""
        echo 'JobID|State|NodeList'
        for file in "$SLURM_SCRIPTS"/*.exit; do
            [ -e "$file" ] || continue
            [ "$(cat "$file")" = 0 ] && state=COMPLETED || state=FAILED
            echo "$(basename "$file" .exit)|$state|here"
        done
    """,
}

_SRUN = """#!{python} -IS
import json, os, socket, sys
module, *arguments = sys.argv[sys.argv.index("-m") + 1 :]
code = f"import runpy, sys; sys.argv = [''] + {{arguments!r}}; "
code += f"runpy.run_module({{module!r}}, run_name='__main__', alter_sys=True)"
said = [f"{{os.environ['SLURM_SCRIPTS']}}/{{os.getpid()}}.{{kind}}" for kind in ("out", "err")]
for path in said:
    open(path, "w").close()
channel = socket.socket(socket.AF_UNIX)
channel.connect({address!r})
request = {{"arguments": [], "code": code, "folder": os.getcwd(), "environment": dict(os.environ)}}
request |= {{"out": said[0], "err": said[1], "quick": False, "whole": False}}
channel.sendall(b" " + json.dumps(request).encode() + b"\\n")
answers = channel.makefile()
_, code = (int(answers.readline()) for _ in range(2))
sys.exit(code)
"""


def install(folder: Path) -> dict[str, str]:
    """Put the commands into a folder; the environment that finds them there, and that has every script kept."""
    folder.mkdir()
    for name, body in _COMMANDS.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
    (folder / "srun").write_text(_SRUN.format(python=sys.executable, address=str(find_socket())))
    for command in folder.iterdir():
        command.chmod(0o755)
    return {"SLURM_SCRIPTS": str(folder), "PATH": f"{folder}:{os.environ['PATH']}"}
