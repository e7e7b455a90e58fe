# shellcheck shell=bash
# Sourced by the other scripts, after `set -euo pipefail`: sets root and python, and changes to root.
# DISTDEC_PYTHON names an interpreter that already has torch; then the package is found by PYTHONPATH, not installed.
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
if [ -n "${DISTDEC_PYTHON:-}" ]; then
    python=$(command -v -- "$DISTDEC_PYTHON") || {
        printf 'setup: DISTDEC_PYTHON=%s is not an executable\n' "$DISTDEC_PYTHON" >&2
        exit 1
    }
    # not resolved further: an environment is known by the path of its link to the interpreter
    case $python in
    /*) ;;
    *) python=$PWD/$python ;;
    esac
    export DISTDEC_PYTHON=$python PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
else
    python=$root/.venv/bin/python
fi
cd -- "$root"
