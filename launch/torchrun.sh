#!/usr/bin/env bash
# One host of GPUs (8 x A100 / H100 as it stands): the torchrun line with each setting and its reason.
#
#   PARALLEL=kvp8     bash launch/torchrun.sh model=path model.path=/models/M prompt_file=long.txt
#   PARALLEL=kvp4_tp2 bash launch/torchrun.sh ...     # the sequence over 4 ranks, the heads over 2
#   PARALLEL=kvp2     bash launch/torchrun.sh ...     # 2 GPUs
#   PARALLEL=single   bash launch/torchrun.sh ...     # 1 GPU, the yardstick
#   bash launch/torchrun.sh --dry-run-cpu             # the same with a tiny random model over gloo, no GPU needed
#
# All further arguments are Hydra overrides of launch/generate.py (see its --help). A variable that is already set in
# the environment is left as it is.
set -euo pipefail
. "$(dirname -- "${BASH_SOURCE[0]}")/../scripts/env.sh"

usage() {
    sed -n '2,/^set -/{/^set -/d;s/^# \{0,1\}//;p;}' "$root/launch/torchrun.sh"
}

dry_run=
overrides=()
for argument in "$@"; do
    case $argument in
    --dry-run-cpu) dry_run=1 ;;
    -h | --help)
        usage
        exit 0
        ;;
    *) overrides+=("$argument") ;;
    esac
done

PARALLEL=${PARALLEL:-kvp8}
case $PARALLEL in
kvp8 | kvp4_tp2) num_ranks=8 ;;
kvp2) num_ranks=2 ;;
single) num_ranks=1 ;;
*)
    printf 'torchrun.sh: PARALLEL must be kvp8, kvp4_tp2, kvp2 or single, got %s\n' "$PARALLEL" >&2
    exit 2
    ;;
esac
bash scripts/setup.sh

# no NVLink multicast (NVLS): the merges send a few KiB a rank, where it gains nothing, and its set-up can fail on hosts
# whose fabric manager or driver does not offer it, or hold resources that other jobs on the host need
export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0}
# the same for PyTorch's symmetric memory, through which the one-kernel merge writes into its peers
export TORCH_SYMM_MEM_DISABLE_MULTICAST=${TORCH_SYMM_MEM_DISABLE_MULTICAST:-1}
# a collective that failed or ran into its time-out ends the process instead of leaving all ranks waiting; 3 does so
# without aborting the communicator first, since that abort can itself hang while a captured graph holds it
export TORCH_NCCL_ASYNC_ERROR_HANDLING=${TORCH_NCCL_ASYNC_ERROR_HANDLING:-3}
# the time-out of a collective is the process group's (120 s here, given where the group is made). If the thread that
# watches for it is stuck itself, this ends the process; longer than the time-out, or it would fire first
export TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC=${TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC:-240}
# remember the last collectives and write them to a file on a time-out: says which rank did not come
export TORCH_NCCL_DUMP_ON_TIMEOUT=${TORCH_NCCL_DUMP_ON_TIMEOUT:-1}
export TORCH_FR_BUFFER_SIZE=${TORCH_FR_BUFFER_SIZE:-2000}
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
# NCCL_PROTO and NCCL_ALGO stay unset: NCCL picks by message size, and a forced protocol is unsafe on some links

# the pool is one allocation for the whole run; what comes and goes beside it are activations of ever other lengths,
# which fragment fixed segments
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
export TOKENIZERS_PARALLELISM=${TOKENIZERS_PARALLELISM:-false}
cores=$("$python" -c 'import os; print(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())')
# torchrun would set 1; host code here is short, but loading and tokenizing gain from a rank's share of the cores
threads=$((cores / num_ranks))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads < 1 ? 1 : threads > 16 ? 16 : threads))}

arguments=(--standalone --nproc-per-node "$num_ranks")
if [ -n "$dry_run" ]; then
    # gloo, whatever GPUs there are; the model is random, so the text it writes is noise and only the path is tested
    export CUDA_VISIBLE_DEVICES=
    folder=$(mktemp -d)
    trap 'rm -rf -- "$folder"' EXIT
    "$python" launch/assets.py tiny "$folder" >/dev/null
    # tiny chunks, so that even a short prompt lies on all ranks
    overrides=(model=path "model.path=$folder" cache=tiny "prompt=In the beginning there was a dry run"
        max_new_tokens=8 "${overrides[@]+"${overrides[@]}"}")
    # not exec: the folder is removed afterwards. A Ctrl-C reaches torchrun too, which ends the ranks
    "$python" -m torch.distributed.run "${arguments[@]}" \
        launch/generate.py "parallel=$PARALLEL" "${overrides[@]}"
    exit
fi

# each rank on the cores and the memory of the socket its GPU hangs on: launches and pinned copies cross no socket;
# NUMA_BINDING= (empty) leaves it out, for a virtual machine that hides the sockets
NUMA_BINDING=${NUMA_BINDING-node}
if [ -n "$NUMA_BINDING" ]; then
    arguments+=(--numa-binding "$NUMA_BINDING")
fi
exec "$python" -m torch.distributed.run "${arguments[@]}" \
    launch/generate.py "parallel=$PARALLEL" "${overrides[@]+"${overrides[@]}"}"
