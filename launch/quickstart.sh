#!/usr/bin/env bash
# From a clone to a real model that decodes on a sharded KV cache, in one command.
#
#   bash launch/quickstart.sh                          # 2 ranks on a CPU host; all GPUs on a GPU host
#   NPROC=4 bash launch/quickstart.sh                  # four ranks
#   bash launch/quickstart.sh max_new_tokens=64        # any Hydra override of launch/generate.py
#   DISTDEC_PYTHON=/path/to/python bash launch/quickstart.sh    # an environment that already has torch
#
# On CPU: gloo, float32, reference kernels. On GPUs: NCCL, bfloat16, Triton kernels. The model is
# SmolLM2-135M-Instruct as it comes, with its 9 query and 3 KV heads: 2 or 4 ranks do not divide them and need not.
set -euo pipefail
. "$(dirname -- "${BASH_SOURCE[0]}")/../scripts/env.sh"
bash scripts/setup.sh

num_gpus=0
# asking torch costs seconds, so only where there can be a GPU
if command -v nvidia-smi >/dev/null; then
    num_gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
fi
if [ "$num_gpus" -gt 0 ]; then
    NPROC=${NPROC:-$num_gpus}
else
    NPROC=${NPROC:-2}
fi
case $NPROC in
'' | *[!0-9]* | 0*)
    printf 'quickstart: NPROC must be a number of ranks from 1 on, got %s\n' "$NPROC" >&2
    exit 2
    ;;
esac
if [ "$num_gpus" -gt 0 ] && [ "$NPROC" -gt "$num_gpus" ]; then
    printf 'quickstart: NPROC=%s ranks, but %s GPU(s) are visible\n' "$NPROC" "$num_gpus" >&2
    exit 2
fi

model_folder=$("$python" launch/assets.py smollm2)
printf 'model: %s\n' "$model_folder"

if [ -z "${OMP_NUM_THREADS:-}" ]; then
    cores=$("$python" -c 'import os; print(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())')
    threads=$((cores / NPROC))
    export OMP_NUM_THREADS=$((threads > 0 ? threads : 1))
fi
export TOKENIZERS_PARALLELISM=false

# exec: torchrun gets a Ctrl-C itself and passes it on to the ranks. --standalone: a free port of its own
exec "$python" -m torch.distributed.run --standalone --nproc-per-node "$NPROC" \
    launch/generate.py model=smollm2 workload=passkey parity=true "$@"
