#!/usr/bin/env bash
# Run the tests; arguments go to pytest. Makes .venv first if it is missing or out of date.
#
#   bash scripts/test.sh                      # all but the slow ones; GPU tests only where there is a GPU
#   bash scripts/test.sh tests/test_merge.py -k empty
#   bash scripts/test.sh -m slow              # the soaks and large matrices
set -euo pipefail
. "$(dirname -- "${BASH_SOURCE[0]}")/env.sh"
bash scripts/setup.sh --tests

# several ranks share the cores: with more threads each they would wait for each other
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# a model or tokenizer that is asked for by a hub name is a mistake in a test, not a reason to wait for the network
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

# the caller's -m takes the place of "not slow"; without a GPU its tests are left out either way
marks="not slow"
rest=()
while [ $# -gt 0 ]; do
    case $1 in
    -m)
        [ $# -ge 2 ] || { echo "test: -m needs an expression" >&2; exit 2; }
        marks="($2)"
        shift 2
        ;;
    *)
        rest+=("$1")
        shift
        ;;
    esac
done
if ! { command -v nvidia-smi >/dev/null && "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; }; then
    marks="$marks and not gpu"
fi
# two processes, whole files each: the tests of one file share what it took long to make
exec "$python" -m pytest -n "${DISTDEC_TEST_WORKERS:-2}" --dist loadfile -m "$marks" "${rest[@]+"${rest[@]}"}"
