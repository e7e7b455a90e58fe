#!/usr/bin/env bash
# Run the tests of transformers models, sharded weights too, on several releases: ./scripts/test_matrix.sh [release ...]
#
# Each release gets a virtual environment of its own under $MATRIX_DIR (default: a temporary directory, removed at the
# end). torch and everything else come from the environment this is started from, so nothing large is installed twice.
# PYTHON picks that environment's interpreter, MARKS which tests run: MARKS="not gpu" for the slow ones too.
set -euo pipefail

cd "$(dirname "$0")/.."
python="${PYTHON:-python}"
# oldest that pyproject.toml allows, the newest before each change of the cache interface, newest
releases=("$@")
[ ${#releases[@]} -gt 0 ] || releases=(5.5.0 5.10.4 5.17.0 5.22.2 5.24.0)

if [ -n "${MATRIX_DIR:-}" ]; then
    mkdir -p "$MATRIX_DIR"
    dir="$(cd "$MATRIX_DIR" && pwd)"
else
    dir="$(mktemp -d)"
    trap 'rm -rf "$dir"' EXIT
fi
base="$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
tests=(tests/test_hf_*.py tests/test_parallel*.py tests/test_experts*.py tests/test_weights.py)
failed=()
for release in "${releases[@]}"; do
    venv="$dir/$release"
    if [ ! -x "$venv/bin/python" ]; then
        "$python" -m venv "$venv"
        "$venv/bin/pip" install --quiet "transformers==$release"
        # last on the path: what the release brought along wins over the base environment
        "$venv/bin/python" -c 'import sys, sysconfig; open(sysconfig.get_path("purelib") + "/base.pth", "w").write(sys.argv[1] + "\n")' "$base"
    fi
    echo "== transformers $release"
    PYTHONPATH="$PWD" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" \
        "$venv/bin/python" -m pytest "${tests[@]}" -m "${MARKS:-not slow and not gpu}" || failed+=("$release")
done
if [ ${#failed[@]} -gt 0 ]; then
    echo "failed on: ${failed[*]}"
    exit 1
fi
echo "passed on: ${releases[*]}"
