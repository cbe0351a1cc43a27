"""Run the variants of a study over several machines, one after the other.

In a job of Slurm, for example, with the name of its first node in HEAD_NODE:

    python benchmarks/several_machines.py train_configs/studies/ladder_3d_405b.toml \\
        "srun --ntasks-per-node=1 python -m torchtitan train --nnodes 64 --processes 8 \\
        --rdzv-endpoint $HEAD_NODE:29500"

A run that is there already is not repeated. At the end it prints the comparison of the runs.
"""

import argparse
import shlex
import subprocess
from pathlib import Path

from torchtitan.tools.compare.study import prepare, read_study, tasks, write_recipe
from torchtitan.tools.history import METRICS_FILE


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("study", type=Path)
    parser.add_argument("launcher", help="command that starts a run; its recipe is appended")
    arguments = parser.parse_args()
    study = read_study(arguments.study)
    runs = tasks(study, prepare(study, is_here=False))
    for run in runs:
        if not (run.folder / METRICS_FILE).is_file():
            recipe = ["--job.config_file", str(write_recipe(run))]
            subprocess.run([*shlex.split(arguments.launcher), *recipe], check=True)
    folders = [str(run.folder) for run in runs if run.round == 1]
    print(shlex.join(["torchtitan", "compare", *folders]))


if __name__ == "__main__":
    main()
