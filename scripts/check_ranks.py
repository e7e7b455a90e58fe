"""What the checks on real GPUs share: equal bits on all ranks, captured calls, times, and delays.

Every rank makes all ranks' inputs from the same seeds, so it knows the truth without asking.
"""

import torch

from distdec.mesh import all_gather

SLEEP_CYCLES = 60_000_000  # some 35 ms: far longer than a merge


def same_on_all(mesh, *tensors):
    """Raise unless all ranks hold the same bits."""
    mine = torch.cat([t.contiguous().view(torch.uint8).flatten().cpu().to(torch.int64) for t in tensors])
    weights = torch.arange(1, mine.numel() + 1) * 0x9E3779B1 % 0x7FFFFFFF
    digest = torch.stack([mine.sum(), (mine * weights).sum()])
    rows = torch.empty(mesh.world_size * 2, dtype=torch.int64)
    all_gather(rows, digest, mesh.control_group)
    if len({tuple(row) for row in rows.view(-1, 2).tolist()}) > 1:
        raise AssertionError("ranks hold different bits")


def captured(call):
    """Capture a call after a warm one; returns (replay, what it writes)."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    stream.synchronize()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        merged = call()
    return graph.replay, merged


def raised(call):
    """Return the message of the RuntimeError that a call must raise."""
    try:
        call()
    except RuntimeError as error:
        return str(error)
    raise AssertionError("nothing was raised")


def timed(mesh, call, calls=20, samples=25):
    """Median microseconds of a call in a graph of `calls` of them, the slowest rank's."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    mesh.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(calls):
            call()
    graph.replay()
    times = []
    for _ in range(samples):
        torch.cuda.synchronize()
        mesh.barrier()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(1_000_000)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / calls)
    rows = torch.empty(mesh.world_size, dtype=torch.float64)
    all_gather(rows, torch.tensor([sorted(times)[samples // 2]], dtype=torch.float64), mesh.control_group)
    graph.reset()
    return rows.max().item()
