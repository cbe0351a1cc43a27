#!/usr/bin/env bash
# Trains a recipe on this machine:
#
#   NGPU=4 CONFIG_FILE=train_configs/x.toml LOG_RANK=0,1 ./run_train.sh --training.steps 20
#
# NGPU           processes; default: the CUDA devices of this machine, or 1 on a CPU
# CONFIG_FILE    recipe; default: train_configs/debug_model.toml
# LOG_RANK       ranks whose output is shown; default: 0
# MAX_RESTARTS   restarts after a rank died; default: 3 with several processes and checkpoints
# NNODES         machines that take part, each with this command: 2, or 1:2 for one or two
# RDZV_ENDPOINT  HOST:PORT on one of these machines, for the rendezvous
#
# Ctrl-C, or SIGTERM to this script, ends the run after the current step with a checkpoint.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
source scripts/environment.sh ""

CONFIG_FILE=${CONFIG_FILE:-train_configs/debug_model.toml}
LOG_RANK=${LOG_RANK:-0}
count_devices='import torch; print(max(torch.cuda.device_count(), 1))'
NGPU=${NGPU:-$(python -c "$count_devices")}

if [ "$NGPU" = 1 ] && [ -z "${MAX_RESTARTS-}${NNODES-}" ]; then
    exec python -m torchtitan train "$CONFIG_FILE" "$@"
fi
exec python -m torchtitan train "$CONFIG_FILE" --processes "$NGPU" --log-rank "$LOG_RANK" \
    ${MAX_RESTARTS:+--max-restarts "$MAX_RESTARTS"} \
    ${NNODES:+--nnodes "$NNODES"} \
    ${RDZV_ENDPOINT:+--rdzv-endpoint "$RDZV_ENDPOINT"} \
    "$@"
