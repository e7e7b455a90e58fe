"""Real ranks for tests: a reusable pool of gloo processes on one machine.

Starting torchrun costs seconds a test; here the processes are forked from a server that has torch loaded already, and
are kept. One pool serves every world size: a run of n ranks uses the first n workers, which form a new process group
(through a file, so no port can clash) whenever n changes. A test body is a module-level function; it is sent by
reference, runs on every rank with the default process group ready (so `Mesh.create` works inside, on sub-meshes too),
and what it returns comes back in rank order:

    def sum_of_ranks(scale):
        total = torch.tensor([dist.get_rank() * scale])
        dist.all_reduce(total)
        return int(total)

    def test_sum(ranks):
        assert ranks(3).run(sum_of_ranks, 10) == [30, 30, 30]

After any failure the whole pool is killed and forked anew by the next run: a collective that was left half done poisons
its process group.
"""

import atexit
import contextlib
import datetime
import multiprocessing
import multiprocessing.connection
import os
import pickle
import shutil
import sys
import tempfile
import time
import traceback

# how long peers may take to report once the first rank has failed; most of them then sit in a collective
GRACE_S = 2.0
TIMEOUT_S = 30.0


class RanksFailed(AssertionError):
    """At least one rank raised, died or did not come back; the message holds what every rank did."""


class RankPool:
    """Worker processes shared by all world sizes; `ranks(n)` narrows it to n of them."""

    def __init__(self):
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["torch", "torch.distributed"])
        self._workers = []
        self._directory = tempfile.mkdtemp(prefix="distdec_ranks_")
        self._group = 0  # number of the process group, part of its file's name
        self._group_size = 0
        atexit.register(self.close)

    def ranks(self, num_ranks):
        """Return the first `num_ranks` workers as something with a `run(function, *args)`."""
        return Ranks(self, num_ranks)

    def pids(self):
        """Process ids of the live workers, in rank order."""
        return [process.pid for process, _ in self._workers]

    def run(self, num_ranks, function, args, timeout_s):
        self._prepare(num_ranks)
        task = pickle.dumps((num_ranks, self._group_file(), function, args))
        try:
            for _, connection in self._workers[:num_ranks]:
                connection.send_bytes(task)
            outcomes = self._collect(num_ranks, timeout_s)
        except BaseException:
            self.kill()  # interrupted or broken: nobody knows what the workers are in the middle of
            raise
        if all(kind == "result" for kind, _ in outcomes):
            return [value for _, value in outcomes]
        self.kill()
        raise RanksFailed(_describe(function, outcomes))

    def _prepare(self, num_ranks):
        if any(not process.is_alive() for process, _ in self._workers):
            self.kill()
        while len(self._workers) < num_ranks:
            ours, theirs = self._context.Pipe()
            rank = len(self._workers)
            process = self._context.Process(target=_serve, args=(rank, theirs, list(sys.path)), daemon=True)
            process.start()
            theirs.close()  # so that a worker's death shows as end of file here
            self._workers.append((process, ours))
        if self._group_size != num_ranks:
            self._group += 1
            self._group_size = num_ranks

    def _group_file(self):
        return os.path.join(self._directory, f"group_{self._group}")

    def _collect(self, num_ranks, timeout_s):
        waiting = {connection: rank for rank, (_, connection) in enumerate(self._workers[:num_ranks])}
        answers = {}
        silent = f"no answer after {timeout_s:g} s; killed"
        deadline = time.monotonic() + timeout_s
        while waiting and (left := deadline - time.monotonic()) > 0:
            for connection in multiprocessing.connection.wait(list(waiting), timeout=left):
                rank = waiting.pop(connection)
                answers[rank] = self._receive(rank, connection)
                if answers[rank][0] != "result" and deadline > time.monotonic() + GRACE_S:
                    deadline = time.monotonic() + GRACE_S
                    silent = f"still running {GRACE_S:g} s after another rank had failed; killed"
        return [answers.get(rank, ("hung", silent)) for rank in range(num_ranks)]

    def _receive(self, rank, connection):
        try:
            return pickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionError):
            process = self._workers[rank][0]
            process.join(GRACE_S)
            return "died", f"process ended with exit code {process.exitcode}"

    def kill(self):
        """End all workers; the next run forks new ones."""
        for process, connection in self._workers:
            connection.close()
            process.kill()
        for process, _ in self._workers:
            process.join(GRACE_S)
        self._workers = []
        self._group_size = 0

    def close(self):
        """End the workers and remove the rendezvous files."""
        self.kill()
        shutil.rmtree(self._directory, ignore_errors=True)


class Ranks:
    """The first n workers of a pool."""

    def __init__(self, pool, num_ranks):
        self.pool = pool
        self.num_ranks = num_ranks

    def run(self, function, *args, timeout_s=TIMEOUT_S):
        """Run a module-level function on every rank and return its results in rank order.

        Raises:
            RanksFailed: a rank raised, died or ran past `timeout_s`; the message has every rank's traceback.
        """
        return self.pool.run(self.num_ranks, function, args, timeout_s)


def _describe(function, outcomes):
    kinds = ", ".join(f"rank {rank} {kind}" for rank, (kind, _) in enumerate(outcomes) if kind != "result")
    lines = [f"{function.__name__} failed on {len(outcomes)} ranks: {kinds}"]
    for rank, (kind, value) in enumerate(outcomes):
        lines.append(f"--- rank {rank}: {'returned' if kind == 'result' else value}")
    return "\n".join(lines)


def _serve(rank, connection, path):
    """Run tasks until the parent closes its end of the pipe."""
    import torch
    import torch.distributed as dist

    sys.path[:] = path
    torch.set_num_threads(1)
    group_file = None
    while True:
        try:
            task = connection.recv_bytes()
        except (EOFError, ConnectionError):
            break
        try:
            world_size, wanted_file, function, args = pickle.loads(task)
            if wanted_file != group_file:
                if dist.is_initialized():
                    dist.destroy_process_group()
                dist.init_process_group(
                    "gloo",
                    init_method=f"file://{wanted_file}",
                    rank=rank,
                    world_size=world_size,
                    timeout=datetime.timedelta(seconds=TIMEOUT_S),
                )
                group_file = wanted_file
            torch.manual_seed(0)
            # plain pickle copies tensors; multiprocessing's own would share memory with a process that may be killed
            answer = pickle.dumps(("result", function(*args)))
        except BaseException:
            answer = pickle.dumps(("raised", traceback.format_exc()))
        with contextlib.suppress(ConnectionError):
            connection.send_bytes(answer)
