#!/usr/bin/env bash
#SBATCH --job-name={{name}}
#SBATCH --nodes={{nodes}}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-task={{gpus}}
#SBATCH --exclusive
#SBATCH --account={{account}}
#SBATCH --partition={{partition}}
#SBATCH --time={{time_limit_minutes}}
#SBATCH --cpus-per-task={{cpus}}
#SBATCH --mem={{memory_gib}}G
#SBATCH --output={{log_file}}
#SBATCH --signal=USR1@{{grace}}
#SBATCH --requeue
#SBATCH --open-mode=append
{{setup}} || exit
set -uo pipefail
export {{grace_variable}}={{grace}}
export PET_NPROC_PER_NODE={{processes}}
export SRUN_CPUS_PER_TASK={{cpus}}
# The highest status of all nodes; the run is saved, and can be resumed, after {{requeue}}.
srun {{preflight}} &&
srun {{train}}
status=$?
case "$status" in
    0 | {{wrong_recipe}} | {{diverged}}) ;;
    {{requeue}}) scontrol requeue "$SLURM_JOB_ID" ;;
    *) [ "${SLURM_RESTART_COUNT:-0}" -ge {{restarts}} ] ||
        scontrol requeue "$SLURM_JOB_ID" ;;
esac
exit "$status"
