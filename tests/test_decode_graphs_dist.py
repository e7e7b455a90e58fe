"""The padded decode step of a whole model: the same tokens as without, on every rank. Without a GPU it runs eagerly."""

import dataclasses

import pytest
import torch

from distdec.config import BackendConfig, CacheConfig, Config, SchedulerConfig
from distdec.engine import Engine
from distdec.mesh import Mesh
from distdec.request import Row, SamplingParams, StepPlan
from distdec.row_tables import Padding
from distdec.runner import Runner
from launch.assets import tiny_model_folder
from launch.parity import load_reference, reference_tokens

pytestmark = pytest.mark.dist

CONFIG = Config(
    # chunks end every 4 to 16 tokens, so that decoding crosses many
    cache=CacheConfig(max_tokens=400, min_chunk=4, max_chunk=16, page_size=2),
    scheduler=SchedulerConfig(prefill_slice=16, token_budget=40, max_rows=7, decode_deadline_ms=0),
    backend=BackendConfig(graphs="on"),
)
LENGTHS = (5, 37, 1, 22, 9)
NEW = 24


def prompts():
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, 256, (length,), generator=generator).tolist() for length in LENGTHS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny_model_folder(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def expected(folder):
    model = load_reference(folder, "float32", "cpu")
    return [reference_tokens(model, prompt, NEW) for prompt in prompts()]


def generated(folder, move_on_rank):
    with Mesh.create(device="cpu", timeout_s=20) as mesh:
        captured = []
        config = dataclasses.replace(CONFIG)
        runner = Runner.load(folder, mesh, config, progress=lambda count, total: captured.append((count, total)))
        engine = Engine(runner, config.scheduler)
        engine.cache.pool.k.fill_(float("nan"))
        engine.cache.pool.v.fill_(float("nan"))
        shapes = []
        handle = runner.model.register_forward_hook(
            lambda module, args, kwargs, out: shapes.append(kwargs["input_ids"].shape[1]), with_kwargs=True
        )
        buffers = engine.cache.buffers
        addresses = {buffers.view_table.data_ptr()}
        steps = 0

        def on_step(result):
            nonlocal steps
            steps += 1
            if steps == 12 and mesh.rank == move_on_rank:
                buffers.reserve(tokens=500, rows=70, views=5000)
            addresses.add(buffers.view_table.data_ptr())

        # pairwise different numbers of tokens, so that the rows fall from five to one
        params = [SamplingParams(max_new_tokens=NEW - 3 * i, ignore_eos=True) for i in range(5)]
        done = engine.generate(list(zip(prompts(), params, strict=True)), on_step)
        handle.remove()
        stale = runner.graphs.stale
        engine.close()
        return [list(one.token_ids) for one in done], shapes, captured, len(addresses), stale


@pytest.mark.parametrize(("num_ranks", "moved"), [(2, None), (3, 1)])
def test_padded_decode_steps_give_the_same_tokens_across_chunk_borders(ranks, folder, expected, num_ranks, moved):
    results = ranks(num_ranks).run(generated, folder, moved, timeout_s=120)
    for rank, (tokens, shapes, captured, addresses, stale) in enumerate(results):
        assert tokens == [expected[i][: NEW - 3 * i] for i in range(5)]
        assert captured == [(1, 4), (2, 4), (3, 4), (4, 4)], "1, 2, 4 and 7 rows"
        # five rows run as seven, three as four
        assert {1, 2, 4, 7} <= set(shapes)
        assert not {3, 5, 6} & set(shapes[-20:])
        assert shapes == results[0][1]
        assert stale == (rank == moved)
        assert addresses == 1 + (rank == moved), "the tables moved"


def test_padding_rows_change_no_bit_of_the_others(folder):
    """The same step with 3 rows, alone and padded to 4 and 7 between poisoned rows of the pool."""
    mesh = Mesh.single()
    runner = Runner.load(folder, mesh, CONFIG)
    kv = runner.cache.kv
    runner.cache.pool.k.fill_(float("nan"))
    runner.cache.pool.v.fill_(float("nan"))
    step = 0
    for seq, prompt in enumerate(prompts()[:3]):
        kv.adopt(seq)
        plan = StepPlan(step, rows=(Row(seq, 0, tuple(prompt), False),))
        runner.run(plan, runner.cache.begin_step([(seq, len(prompt))], q_len=1))
    rows = tuple(Row(seq, LENGTHS[seq], (40 + seq,), True) for seq in range(3))
    plan = StepPlan(1, rows=rows)
    graphs, logits = runner.graphs, []
    for pad in (0, 4, 7):
        for seq in range(3):
            kv.truncate(seq, LENGTHS[seq])
        runner.graphs = graphs if pad else None
        graphs.padding = lambda plan, pad=pad: Padding(pad)
        batch = runner.cache.begin_step([(seq, 1) for seq in range(3)], q_len=1, pad=Padding(pad), derive=not pad)
        assert batch.num_tokens == (pad or 3)
        logits.append(runner.run(plan, batch).clone())
        assert logits[-1].shape[0] == 3
    assert logits[0].isfinite().all()
    for padded in logits[1:]:
        torch.testing.assert_close(padded, logits[0], rtol=1e-5, atol=1e-5)
    runner.graphs = graphs
    runner.close()
    with pytest.raises(RuntimeError, match="closed"):
        runner.run(plan, batch)


def test_steps_with_a_prompt_are_not_padded(folder):
    runner = Runner.load(folder, Mesh.single(), CONFIG)
    decode, slice_ = Row(0, 5, (1,), True), Row(1, 0, (1, 2), True)
    plans = [StepPlan(0, rows=rows) for rows in ((decode,) * 3, (decode, slice_), ())]
    assert [runner.padding(plan).decode_rows for plan in plans] == [4, 0, 0]
    off = Runner.load(folder, Mesh.single(), dataclasses.replace(CONFIG, backend=BackendConfig()))
    assert off.graphs is None
    assert off.padding(plans[0]) == Padding()
