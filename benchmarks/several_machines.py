"""Run the variants of a study over several machines, one after the other.

In a job of Slurm, for example, with the name of its first node in HEAD_NODE:

    python benchmarks/several_machines.py train_configs/studies/ladder_3d_405b.toml \\
        "srun --ntasks-per-node=1 python -m torchtitan train --nnodes 64 --processes 8 \\
        --rdzv-endpoint $HEAD_NODE:29500"

A finished run is not repeated; an interrupted one starts again. At the end it prints the command
that compares the runs.
"""

import argparse
import shlex
import subprocess
from pathlib import Path

from torchtitan.tools.compare.runs import set_aside
from torchtitan.tools.compare.study import prepare, read_study, tasks, write_recipe


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("study", type=Path)
    parser.add_argument("launcher", help="command that starts a run; its recipe is appended")
    arguments = parser.parse_args()
    study = read_study(arguments.study, rounds=1, trace=False)
    variants = prepare(study, is_here=False)
    for ready in variants:
        for line in ready.problems:
            print(f"{ready.name} cannot run: {line}")
    runs = tasks(study, variants)
    for run in runs:
        done = run.folder.with_name(f"{run.folder.name}.done")
        if not done.is_file():
            set_aside(run.folder)
            recipe = ["--job.config_file", str(write_recipe(run))]
            subprocess.run([*shlex.split(arguments.launcher), *recipe], check=True)
            done.touch()
    words = ["--warmup-steps", str(study.conditions.warmup_steps)]
    print(shlex.join(["torchtitan", "compare", *(str(run.folder) for run in runs), *words]))


if __name__ == "__main__":
    main()
