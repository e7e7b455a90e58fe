"""Check that the running Python has what distdec needs, in the versions of pyproject.toml; install nothing.

For environments that somebody else made (DISTDEC_PYTHON): a container with its own torch, a cluster module.

    python scripts/check_environment.py            # what the package needs
    python scripts/check_environment.py --tests    # what its tests need, too
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import operator
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# where the name to import is not the name of the distribution
IMPORT_NAMES = {"hydra-core": "hydra", "pytest-xdist": "xdist"}
TEST_TOOLS = ("pytest", "hypothesis")
OPERATORS = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
}


def pyproject_list(name: str) -> list[str]:
    """Return the strings of one list in pyproject.toml, comments dropped.

    Read by hand: Python 3.10 has no TOML reader, and an environment that lacks everything shall get an answer, too.
    """
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    body = re.search(rf"^{name} = \[(.*?)\]$", text, re.MULTILINE | re.DOTALL)
    if body is None:
        raise SystemExit(f"setup: pyproject.toml has no list {name!r}")
    return re.findall(r'"([^"]+)"', re.sub(r"^\s*#.*$", "", body.group(1), flags=re.MULTILINE))


def requirements(with_tests: bool) -> list[tuple[str, str]]:
    """Return (name, version range) of what is required on this platform."""
    lines = pyproject_list("dependencies")
    if with_tests:
        lines += [line for line in pyproject_list("dev") if line.startswith(TEST_TOOLS)]
    wanted = []
    for line in lines:
        requirement, _, marker = (part.strip() for part in line.partition(";"))
        if marker == "sys_platform == 'linux'" and sys.platform != "linux":
            continue
        name = re.match(r"[A-Za-z0-9._-]+", requirement).group()
        wanted.append((name, requirement[len(name) :]))
    return wanted


def release(version: str) -> tuple[int, ...]:
    """Return the release numbers of a version: 2.13.0a0+nv26.7 -> (2, 13).

    Suffixes are dropped: a vendor's build of a release counts as that release. So are trailing zeros: 2.13 = 2.13.0.
    """
    numbers = [int(part) for part in re.match(r"\d+(\.\d+)*", version).group().split(".")]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def in_range(version: str, version_range: str) -> bool:
    """Say whether a version lies in a range such as `>=5.5,<6`."""
    found = release(version)
    for clause in filter(None, version_range.split(",")):
        sign, bound = re.fullmatch(r"(>=|<=|==|!=|<|>)\s*(\S+)", clause.strip()).groups()
        if not OPERATORS[sign](found, release(bound)):
            return False
    return True


def problem(name: str, version_range: str) -> str | None:
    """Say what is wrong with one requirement, or None."""
    if importlib.util.find_spec(IMPORT_NAMES.get(name, name.replace("-", "_"))) is None:
        return "not installed"
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None  # put there without a package manager: its version is not known
    return None if in_range(found, version_range) else f"{found} is installed"


def main() -> int:
    """Print what is missing and the line that installs it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", action="store_true", help="check for what the tests need, too")
    args = parser.parse_args()
    wrong = [(name, wanted, why) for name, wanted in requirements(args.tests) if (why := problem(name, wanted))]
    if not wrong:
        return 0
    print(f"setup: {sys.executable} lacks what distdec needs:", file=sys.stderr)
    for name, wanted, why in wrong:
        print(f"  {name}{wanted}: {why}", file=sys.stderr)
    names = " ".join(f"'{name}{wanted}'" for name, wanted, _ in wrong)
    print(f"nothing was installed; to add them: {sys.executable} -m pip install {names}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
