"""Start a program on every rank: Hydra options to a checked `Config`, one process group a process, errors said once.

    from launch import boot

    def run(config, job): ...          # called on every rank with the same config
    if __name__ == "__main__":
        boot.main(run)

Rank 0 alone speaks. When every rank fails for the same reason (a bad option, a missing folder) rank 0 says so and
exits, torchrun then ends the others; a rank that fails alone waits for `QUIET_S` first and then speaks for itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import os
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import hydra
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from distdec.config import Config
from distdec.config_keys import describe
from launch.assets import cache_root

if TYPE_CHECKING:
    from distdec.mesh import Mesh

T = TypeVar("T")

CONF_DIR = Path(__file__).resolve().parent.parent / "conf"
TEXT_KEYS = ("prompt", "prompt_file", "prompts", "output", "model.path")
ONE_LINE = ("AssetError", "CacheFull", "StepStuck")
"""Errors that say all there is to say, by name, as their modules may not have been imported."""
QUIET_S = 4.0
"""How long a rank other than 0 keeps silent about its own failure: torchrun ends it sooner if rank 0 failed too."""
INTERRUPT_S = 3.0
"""After Ctrl-C a rank that is still there, waiting on a peer in a collective for example, is ended this much later."""


class LaunchError(RuntimeError):
    """What the user did or has cannot work; the message says what would."""


class LeaderFailed(RuntimeError):
    """Rank 0 has said why the run ends; this rank only ends too."""


def rank_and_world() -> tuple[int, int]:
    """Return (rank, world size) as torchrun set them; (0, 1) without torchrun."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def register_schemas() -> None:
    """Put the config dataclasses and the help text into Hydra's store. Idempotent."""
    store = ConfigStore.instance()
    schema = OmegaConf.structured(Config)
    _thaw(schema)
    store.store(group="base", name="config", package="_global_", node=schema)
    help_node = {"app_name": "distdec", "template": help_text()}
    store.store(group="hydra/help", name="distdec", node=help_node)


def _thaw(node: DictConfig) -> None:
    """Clear the read-only flag that frozen dataclasses get, so that option files and overrides can be merged in."""
    OmegaConf.set_readonly(node, None)
    for key in node:
        child = node._get_node(key)
        if isinstance(child, DictConfig):
            _thaw(child)


def help_text() -> str:
    """Return what `--help` prints: usage, option files and every key with its default and meaning."""
    lines = [
        "Decode with a KV cache that is sharded along the sequence.",
        "",
        "  torchrun --standalone --nproc-per-node N launch/generate.py [key=value ...]",
        "",
        "== Option files (group=option) ==",
        "",
    ]
    for folder in sorted(path for path in CONF_DIR.iterdir() if path.is_dir() and not path.name.startswith("_")):
        options = ", ".join(sorted(path.stem for path in folder.glob("*.yaml")))
        lines.append(f"  {folder.name}: {options}")
    lines += ["", "== Keys (key=value) ==", ""]
    rows = describe(Config)
    width = max(len(f"{key}={_shown(default)}") for key, default, _ in rows)
    lines += [f"  {f'{key}={_shown(default)}':<{width}}  {text}" for key, default, text in rows]
    lines += [
        "",
        "-m runs a sweep (parallel.merge=all_reduce,all_gather); --cfg job prints the whole configuration;",
        "--config-dir DIR adds your own option files; --hydra-help lists Hydra's own flags.",
    ]
    # Hydra fills the text in as a template and resolves interpolations in it
    return "\n".join(lines).replace("$", "") + "\n"


def _shown(default: object) -> str:
    if default is None:
        return "null"
    if isinstance(default, bool):
        return str(default).lower()
    return str(list(default) if isinstance(default, tuple) else default)


def to_config(options: DictConfig) -> Config:
    """Turn Hydra's options into the checked dataclasses.

    Raises:
        ValueError: an unknown key, or what the dataclasses refuse.
    """
    _refuse_unknown(options, Config, "")
    config = OmegaConf.to_object(options)
    assert isinstance(config, Config)
    return config


def _refuse_unknown(node: DictConfig, schema: type, prefix: str) -> None:
    fields = {item.name: item for item in dataclasses.fields(schema)}
    for key in node:
        if key not in fields:
            raise ValueError(f"unknown key {prefix}{key}; here are: {', '.join(prefix + name for name in fields)}")
        child = node._get_node(key)
        if isinstance(child, DictConfig):
            _refuse_unknown(child, fields[str(key)].default_factory().__class__, f"{prefix}{key}.")


class Job:
    """One run on one rank: its mesh, and how it agrees on failure with the other ranks."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh

    @property
    def is_leader(self) -> bool:
        return self.mesh.is_leader

    def on_leader(self, work: Callable[[], T]) -> T | None:
        """Run `work` on rank 0 only and return its result there, None elsewhere.

        Raises:
            LeaderFailed: on the other ranks, when `work` raised; rank 0 raises what `work` raised.

        Notes:
            Collective: one integer from rank 0 over the whole mesh, so it is a barrier too.
        """
        result, error = None, None
        if self.is_leader:
            try:
                result = work()
            except (Exception, KeyboardInterrupt) as raised:
                error = raised
        if self.mesh.agree([int(error is not None)] if self.is_leader else None) == [1]:
            raise error or LeaderFailed
        return result

    def together(self, name: str, work: Callable[[], T]) -> T:
        """Run `work` on every rank and fail on every rank if it fails anywhere.

        Raises:
            Exception: what `work` raised here, or the mesh's error that names the ranks where it failed.
        """
        result, error = None, None
        try:
            result = work()
        except Exception as raised:
            error = raised
        try:
            self.mesh.check_same(f"outcome of: {name}", b"ok" if error is None else b"failed")
        except Exception:
            if error is None:
                raise
        if error is not None:
            raise error
        return result


class Processes:
    """The process group of this process: made by the first job, kept for the others.

    A sweep runs several jobs in one process. Making the group anew for each hangs: the second rendezvous reads the
    first one's addresses from torchrun's store whenever ranks are some milliseconds apart.
    """

    def __init__(self) -> None:
        self.world: Mesh | None = None

    @contextlib.contextmanager
    def mesh(self, config: Config, uses_layout: bool = True) -> Iterator[Mesh]:
        """Yield this job's mesh after checking that every rank was started with the same config."""
        from distdec.mesh import Mesh

        device = None if config.model.device == "auto" else config.model.device
        if self.world is None:
            self.world = Mesh.create(device=device, timeout_s=config.parallel.timeout_s)
        assert self.world is not None, "a mesh over the whole world leaves no rank out"
        # before anything depends on the options: ranks that disagree would make different groups and hang
        check_same_config(self.world, config)
        here = (self.world.kvp_size, self.world.tp_size)
        kvp, tp = config.parallel.resolve(self.world.world_size) if uses_layout else here
        if (kvp, tp) == here:
            yield self.world
            return
        mesh = Mesh.create(kvp, tp, device=device, timeout_s=config.parallel.timeout_s)
        assert mesh is not None, "a mesh over the whole world leaves no rank out"
        yield mesh
        # not after a failure: closing a group waits for a device that may wait for a lost rank, for ever
        mesh.close()

    def close(self) -> None:
        if self.world is not None:
            self.world.close()


def check_same_config(mesh: Mesh, config: Config) -> None:
    """Refuse to go on when ranks were started with different options, naming the keys that differ.

    Raises:
        ValueError: on every rank.
    """
    digests = config.digests()
    whole = hashlib.sha256(b"".join(digests.values())).digest()
    try:
        mesh.check_same("options", whole)
        return
    except RuntimeError as error:
        first = error
    # every rank is here, since every rank saw the difference
    differing = [key for key, digest in digests.items() if _differs(mesh, key, digest)]
    raise ValueError(f"the ranks were started with different options: {', '.join(differing)} ({first})")


def _differs(mesh: Mesh, name: str, digest: bytes) -> bool:
    try:
        mesh.check_same(name, digest)
    except RuntimeError:
        return True
    return False


def main(run: Callable[[Config, Job], int | None], *, uses_layout: bool = True) -> NoReturn:
    """Compose the options, start the ranks, call `run(config, job)` on each, and exit with its code.

    Args:
        uses_layout: lay the mesh out as kvp x tp; without it (a program that only computes about layouts) all ranks
            lie along kvp.
    """
    register_schemas()
    rank, _ = rank_and_world()
    sys.argv[1:] = [quote_text(argument) for argument in sys.argv[1:]]
    processes = Processes()
    end_soon_after_interrupt()
    failure: BaseException | None = None

    @hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name="config")
    def job(options: DictConfig) -> None:
        nonlocal failure
        sys.stderr = sys.__stderr__
        code: int | None = 1
        try:
            config = to_config(options)
            with processes.mesh(config, uses_layout) as mesh:
                code = run(config, Job(mesh))
        except BaseException as error:
            # Hydra would add lines of its own about an exception; an exit passes through it, and ends a sweep too
            failure = error
        if code:
            raise SystemExit(code)

    scratch = None
    if rank != 0:
        # Hydra would make a folder and print usage and errors once per rank
        scratch = tempfile.TemporaryDirectory(prefix="distdec-rank-")
        sys.argv += [*silent_overrides(scratch.name)]
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (for the lifetime of the process)
        sys.stderr = io.StringIO()
    keep_compiled()
    # Hydra then raises what is wrong with the options instead of printing it, rank by rank
    os.environ["HYDRA_FULL_ERROR"] = "1"
    code, message = 0, ""
    try:
        job()
        processes.close()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if failure is not None:
            code, message = _report(failure)
    except BaseException as error:
        code, message = _report(error)
    _leave(code, message, rank, scratch)


def keep_compiled() -> None:
    """Keep compiled layers and kernels from run to run, where the caller has not chosen a place for them.

    Before torch is imported: it reads both places once.
    """
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_root() / "inductor"))
    os.environ.setdefault("TRITON_CACHE_DIR", str(cache_root() / "triton"))


def quote_text(argument: str) -> str:
    """Quote the value of an override that is free text, so that commas, braces and quotes in it mean themselves.

    Example: `prompt=Hello, world` becomes `prompt="Hello, world"`; without quotes Hydra reads two values of a sweep.
    """
    key, found, text = argument.partition("=")
    if not found or key not in TEXT_KEYS or text in ("", "null") or text[0] in "\"'":
        return argument
    # a backslash is special in front of "${" (for OmegaConf) and in front of a quote or the end (for Hydra)
    text = re.sub(r"(\\*)\$\{", lambda match: 2 * match[1] + "\\${", text)
    text = re.sub(r'(\\*)("|$(?!\n))', lambda match: 2 * match[1] + ('\\"' if match[2] else ""), text)
    return f'{key}="{text}"'


def silent_overrides(folder: str) -> list[str]:
    """Return the overrides that keep Hydra from writing anything on a rank other than 0. Appended ones win."""
    return [
        "hydra.output_subdir=null",
        "hydra/job_logging=none",
        "hydra/hydra_logging=none",
        "hydra.run.dir=.",
        f"hydra.sweep.dir={folder}",
        "hydra.sweep.subdir=.",
    ]


def _report(error: BaseException) -> tuple[int, str]:
    """Return (exit code, message) for an exception that ended the run."""
    if isinstance(error, KeyboardInterrupt):
        return 130, "interrupted"
    if isinstance(error, LeaderFailed):
        return 1, ""
    if isinstance(error, HydraException):
        # the hint of Hydra to append an unknown key with a plus sign leads nowhere here
        lines = str(error).split("\nTo append to your config")[0]
        cause = str(error.__cause__ or "").split("\n")[0]
        return 1, f"error: {lines}" + (f" {cause}" if cause and cause not in lines else "")
    # errors about what the user gave need no traceback; anything else is a fault of ours and does
    if isinstance(error, (ValueError, OSError, LaunchError)) or type(error).__name__ in ONE_LINE:
        return 1, f"error: {error}"
    return 1, "".join(traceback.format_exception(error)).rstrip()


def _leave(code: int, message: str, rank: int, scratch: Any) -> NoReturn:
    """Say `message`, clean up and end the process.

    A failed run ends without the interpreter's shutdown: the destructor of a process group whose peers are gone can
    wait for them until the timeout, and those of graphs and tensors for a device that is stuck.
    """
    if code == 130 and rank != 0:
        message = ""
    elif code and rank != 0:
        time.sleep(QUIET_S)
    if message:
        print(message if rank == 0 else f"rank {rank}: {message}", file=sys.__stderr__, flush=True)
    if scratch is not None:
        scratch.cleanup()
    for stream in (sys.stdout, sys.stderr, sys.__stderr__):
        with contextlib.suppress(Exception):
            stream.flush()
    if code:
        os._exit(code)
    sys.exit(0)


def end_soon_after_interrupt() -> None:
    """End the process `INTERRUPT_S` after Ctrl-C even if it waits inside a collective, where Python sees no signal.

    The C-level handler writes the signal number to a pipe at once; a thread reads it there.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)

    def watch() -> None:
        while True:
            if os.read(read, 1) == bytes([signal.SIGINT]):
                time.sleep(INTERRUPT_S)
                os._exit(130)

    threading.Thread(target=watch, name="interrupt", daemon=True).start()
