"""Many decode steps of the attention layer: one captured graph replayed as lengths grow, against eager calls."""

import time
from typing import Any

import torch
from bench_inputs import Shape
from bench_run import Bench
from benchlib import CheckFailed

from distdec.attention import DistributedAttention


def replay_steps(bench: Bench, merge: Any, mode: str, num_steps: int, own_apart: bool = False) -> None:
    """Record that replays equal eager calls bit by bit, with the host and device time of a step.

    Rows of different length grow by a token a step, so that steps open chunks at different times. A capture serves
    until the step's buffers move (`generation`), which doubles their capacity. Two replays run back to back.

    Args:
        own_apart: as of `ShardedCache`.

    Raises:
        CheckFailed: a step's bits differ.
    """
    rows = (300, 17, 120) if bench.smoke else (5000, 37, 1020, 250, 131, 2040, 900, 100)
    shape = Shape(rows, 8, 2, 64) if bench.smoke else Shape(rows)
    inputs = bench.inputs(shape, copies=1, own_apart=own_apart)
    layer = DistributedAttention(bench.mesh, inputs.cache, merge=merge)
    static = [inputs.q.clone(), inputs.k_new.clone(), inputs.v_new.clone()]
    replay, generation, captures, waits = None, -1, 0, []
    views = sum(len(inputs.cache.kv.local_view_table(seq, bench.mesh.kvp_rank)) for seq in range(len(rows)))
    for step in range(num_steps):
        batch = inputs.cache.begin_step([(seq, 1) for seq in range(len(rows))], q_len=1)
        for tensor in static:
            # the same new tokens on all ranks, other ones at every step
            generator = torch.Generator(device=bench.device).manual_seed(1000 + step)
            tensor.copy_(torch.randn(tensor.shape, device=bench.device, generator=generator))
        eager = layer(*static, batch, 0)
        want = eager.out.clone(), eager.lse.clone()
        if bench.device.type == "cuda":
            # buffers grow by need, and a rank that holds more views than another may have to capture anew alone
            if bench.any_rank(generation != inputs.cache.buffers.generation):
                replay = capture(lambda batch=batch: layer(*static, batch, 0))
                generation, captures = inputs.cache.buffers.generation, captures + 1
            start = time.perf_counter()
            replay()
            got = replay()
            waits.append((time.perf_counter() - start) * 1e6 / 2)
        else:
            got = layer(*static, batch, 0)
        same = torch.equal(got.out, want[0]) and torch.equal(got.lse, want[1]) and bool(want[0].isfinite().all())
        if bench.any_rank(not same):
            raise CheckFailed(f"{mode}: the bits of step {step} are not those of the eager call")
    opened = sum(len(inputs.cache.kv.local_view_table(seq, bench.mesh.kvp_rank)) for seq in range(len(rows))) - views
    value = {"steps": num_steps, "same_bits": True, "captures": captures, "chunks_opened_here": opened}
    if waits:
        value["replay_host_us"] = round(sorted(waits)[len(waits) // 2], 2)
    fields = {"merge": merge.mode, "kvp": bench.mesh.kvp_size, "backend": inputs.ops.name, **inputs.describe()}
    config = {**shape.config(), "mode": mode, "overlap": "store" if own_apart else "none"}
    bench.recorder.write("graphs", mode, config, "derived", value=value, **fields)


def capture(call):
    """Capture a call and return what replays it and gives its static result."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        result = call()

    def replay():
        graph.replay()
        return result

    return replay
