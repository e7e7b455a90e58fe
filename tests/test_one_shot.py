"""The one_shot merge without a GPU: its kernel in the interpreter, its protocol between processes, its refusals."""

import math
import os
import subprocess
import sys
import tempfile

import pytest
import torch
from merge_inputs import in_8_bits
from one_shot_inputs import NEG_INF, Workspace, random_partials, truth
from one_shot_ranks import Simulation, check
from slab_ranks import shared_slabs

from distdec.attention import DistributedAttention
from distdec.merge import column_range, make_merge
from distdec.mesh import Mesh
from distdec.one_shot import OneShotMerge
from distdec.ops.one_shot_triton import max_items
from distdec.ops.partial import Partial
from distdec.sharded_cache import ShardedCache
from distdec.slabs import Peers, why_not


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
@pytest.mark.parametrize("scatter", [False, True])
def test_partials_merge_to_the_whole_in_rank_order(num_ranks, scatter):
    # 3 heads of 20: no power of two, columns of ranks cut through heads, more rows than programs
    sim = Simulation(num_ranks)
    partials = random_partials(num_ranks, 3, 3, 20)
    check(sim.step(partials, scatter=scatter), truth(partials), scatter=scatter)


@pytest.mark.parametrize("split_tiles", [0, 2])
@pytest.mark.parametrize("scatter", [False, True])
def test_splits_of_the_workspace_are_joined_on_the_way(scatter, split_tiles):
    g = torch.Generator().manual_seed(3)
    sim = Simulation(2, channels=5)
    # other rows, other schedules on each rank; rank 1 holds nothing of the first row, rank 0 nothing of the last
    spaces = [
        Workspace(tiles, spans, 2, 2, 3, 12, g, split_tiles)
        for tiles, spans in (([7, 1, 3, 0], 5), ([0, 12, 1, 0], 4 + split_tiles))
    ]
    check(sim.step(spaces, scatter=scatter), truth([s.partial for s in spaces]), scatter=scatter)


def test_fewer_tiles_than_spans_read_no_leftover_partial():
    g = torch.Generator().manual_seed(4)
    spaces = [Workspace([2, 3], spans, 1, 2, 2, 8, g) for spans in (64, 3)]
    check(Simulation(2).step(spaces), truth([s.partial for s in spaces]))


def test_row_counts_and_shapes_may_change_from_call_to_call():
    sim = Simulation(3, channels=4)
    for step, (tokens, heads, dim) in enumerate(
        [(5, 2, 16), (1, 1, 8), (2, 3, 20), (1, 2, 16), (5, 2, 16), (3, 1, 40)]
    ):
        partials = random_partials(3, tokens, heads, dim, seed=step)
        scatter = step % 2 == 1
        check(sim.step(partials, scatter=scatter), truth(partials), scatter=scatter)
    # the first channel served every call, the last one only those of four rows or more
    assert [slab.state.tolist() for slab in sim.slabs] == [[6, 5, 4, 3, 0]] * 3


@pytest.mark.parametrize("words", [False, True])
@pytest.mark.parametrize("first_epoch", [2**16 - 2, 2**31 - 2, -2])
def test_epochs_pass_any_boundary(first_epoch, words):
    sim = Simulation(2, words=words, first_epoch=first_epoch)
    for step in range(4):
        partials = random_partials(2, 2, 2, 8, seed=step)
        check(sim.step(partials), truth(partials))


@pytest.mark.parametrize("words", [False, True])
def test_a_peer_may_be_one_use_ahead(words):
    sim = Simulation(2, words=words)
    calls = [random_partials(2, 2, 2, 8, seed=step) for step in range(4)]
    # rank 1 has merged call n and pushed call n + 1 before rank 0 looks at call n
    sim.launch(0, calls[0][0], merge=False)
    sim.launch(1, calls[0][1], merge=False)
    for step in range(3):
        second = sim.launch(1, calls[step][1], push=False)
        sim.launch(1, calls[step + 1][1], merge=False)
        first = sim.launch(0, calls[step][0], push=False)
        sim.launch(0, calls[step + 1][0], merge=False)
        check([first, second], truth(calls[step]))


@pytest.mark.parametrize("words", [False, True])
def test_a_peer_two_uses_ahead_is_an_error_not_an_answer(words):
    sim = Simulation(2, words=words)
    partials = random_partials(2, 2, 2, 8)
    sim.launch(0, partials[0], merge=False)
    for _ in range(3):
        sim.launch(1, partials[1], merge=False)
        sim.slabs[1].state[:-1] += 1
    out, lse = sim.launch(0, partials[0], push=False)
    assert out.isnan().all() and lse.isnan().all()
    # a word that is not of this use may be of any
    assert sim.alarms[0].item() == sim.slabs[0].state[-1].item() == (1 << 1 if words else 1 << 30)


@pytest.mark.parametrize("words", [False, True])
@pytest.mark.parametrize("scatter", [False, True])
def test_a_number_that_is_not_finite_fails_its_row_on_every_rank_and_no_other(scatter, words):
    # two parts a row, where they travel as words
    num_ranks, dim = (2, 40) if words else (3, 20)
    clean = random_partials(num_ranks, 4, 2, dim)
    for field, value in (("out", math.nan), ("out", math.inf), ("lse", math.nan), ("lse", math.inf)):
        partials = [Partial(p.out.clone(), p.lse.clone()) for p in clean]
        # the last column of the head: in the scattered form another rank's than the first
        getattr(partials[1], field)[(2, 1, -1)[: getattr(partials[1], field).dim()]] = value
        out, lse = truth(clean)
        out[2, 1], lse[2, 1] = math.nan, math.nan
        check(Simulation(num_ranks, words=words).step(partials, scatter=scatter), (out, lse), scatter=scatter)


def test_a_split_that_is_not_finite_fails_its_row():
    g = torch.Generator().manual_seed(5)
    spaces = [Workspace([3, 2], 4, 1, 2, 2, 8, g) for _ in range(2)]
    spaces[1].out[spaces[1].ranges[3, 0], 0, 3] = math.nan
    out, lse = truth([s.partial for s in spaces])
    out[1, 2], lse[1, 2] = math.nan, math.nan
    check(Simulation(2).step(spaces), (out, lse))


@pytest.mark.parametrize("words", [False, True])
@pytest.mark.parametrize("scatter", [False, True])
def test_sinks_count_once_and_leave_rows_without_keys_alone(scatter, words):
    sinks = torch.tensor([0.5, 9.0, NEG_INF])
    partials = random_partials(3, 4, 3, 20)
    results = Simulation(3, words=words).step(partials, scatter=scatter, sinks=sinks)
    check(results, truth(partials, sinks), scatter=scatter)


def test_bfloat16_payload_costs_one_rounding_the_same_on_every_rank():
    partials = random_partials(2, 3, 2, 20)
    # one part in 2^7, not 2^8: the interpreter cuts where a GPU rounds to nearest
    largest = max(p.out.nan_to_num().abs().max().item() for p in partials)
    check(Simulation(2).step(partials, payload=torch.bfloat16), truth(partials), rtol=0.0, atol=largest / 2**7)


@pytest.mark.parametrize("scatter", [False, True])
def test_float8_payload_has_a_scale_a_row(scatter):
    partials = random_partials(3, 4, 2, 20)
    # rows of very different size: one scale for all would lose the small ones
    for partial in partials:
        partial.out[1] *= 1e4
        partial.out[2] *= 1e-6
    partials = in_8_bits(partials)
    out, lse = truth(partials)
    for rank, (mine, its_lse) in enumerate(Simulation(3).step(partials, payload=torch.float8_e4m3fn, scatter=scatter)):
        start, stop = column_range(40, 3, rank) if scatter else (0, 40)
        torch.testing.assert_close(mine.double(), out.flatten(1)[:, start:stop], rtol=1e-5, atol=1e-11)
        torch.testing.assert_close(its_lse.double(), lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("words", [False, True])
def test_a_lost_rank_ends_in_an_error_word_on_every_other_rank(words):
    sim = Simulation(3, words=words)
    partials = random_partials(3, 2, 2, 8)
    check(sim.step(partials), truth(partials))
    for rank in (0, 1):
        sim.launch(rank, partials[rank], merge=False)
    for rank in (0, 1):
        out, lse = sim.launch(rank, partials[rank], push=False)
        assert out.isnan().all() and lse.isnan().all()
        assert sim.alarms[rank].item() == sim.slabs[rank].state[-1].item() == 1 << 2
    # the late rank finds all it needs for the use it missed, then fails with the others: nobody pushes any more
    sim.launch(2, partials[2], merge=False)
    late = sim.launch(2, partials[2], push=False)
    check([late, late, late], truth(partials))
    before = sim.memory[2].clone()
    for rank in (0, 1):
        sim.launch(rank, partials[rank], merge=False)
    assert torch.equal(sim.memory[2], before)
    out, _ = sim.launch(2, partials[2])
    assert out.isnan().all() and sim.alarms[2].item() == 0b011


@pytest.mark.parametrize("words", [False, True])
def test_a_rank_that_has_failed_has_no_result_even_with_all_that_the_others_sent(words):
    sim = Simulation(2, words=words)
    partials = random_partials(2, 2, 2, 8)
    sim.launch(0, partials[0], merge=False)
    assert sim.launch(0, partials[0], push=False)[0].isnan().all()
    # the late rank pushes for the use that it missed and for the next one, in which it is alone
    sim.launch(1, partials[1], merge=False)
    late = sim.launch(1, partials[1], push=False)
    check([late, late], truth(partials))
    sim.launch(1, partials[1], merge=False)
    out, lse = sim.launch(0, partials[0])
    assert out.isnan().all() and lse.isnan().all()
    assert sim.alarms[0].item() == sim.slabs[0].state[-1].item() == 1 << 1


def test_a_launch_larger_than_the_slab_is_refused_and_an_empty_one_touches_nothing():
    sim = Simulation(2, channels=3, capacity=256)
    assert max_items(sim.slabs[0], 20, 4) == 3 * 2
    with pytest.raises(ValueError, match="7 rows, 6 at most"):
        sim.launch(0, random_partials(2, 7, 1, 20)[0])
    out, lse = sim.launch(0, Partial(torch.zeros(0, 4, 20), torch.zeros(0, 4)))
    assert out.shape == (0, 80) and lse.shape == (0, 4)
    assert sim.slabs[0].state.tolist() == [0] * 4


def merge_between_processes(path, kvp, scatter, seeds):
    with Mesh.create(kvp=kvp, tp=torch.distributed.get_world_size() // kvp) as mesh:
        merge = OneShotMerge(mesh, scatter=scatter, capacity_bytes=4096, map_slabs=shared_slabs(path), timeout_s=5.0)
        results = []
        for seed in seeds:
            # the last call is larger than the slab and takes the collective
            tokens = 40 if seed == seeds[-1] else 2 + seed % 2
            mine = random_partials(kvp, tokens, 3, 12, seed=seed + 100 * mesh.tp_rank)[mesh.kvp_rank]
            assert merge.fits(tokens, 3, 12) == (tokens < 40)
            results.append(merge(mine))
        merge.check()
        assert merge.calls == len(seeds)
        merge.close()
        merge.close()
        return mesh.tp_rank, results


@pytest.mark.dist
@pytest.mark.parametrize(("num_ranks", "kvp", "scatter"), [(2, 2, False), (3, 3, True), (4, 2, False)])
def test_ranks_in_processes_merge_through_shared_memory(ranks, num_ranks, kvp, scatter):
    with tempfile.TemporaryDirectory() as directory:
        outcomes = ranks(num_ranks).run(
            merge_between_processes, os.path.join(directory, "slab"), kvp, scatter, [0, 1, 2, 3]
        )
    for tp_rank in range(num_ranks // kvp):
        members = [results for rank, results in outcomes if rank == tp_rank]
        for seed in range(4):
            tokens = 40 if seed == 3 else 2 + seed % 2
            partials = random_partials(kvp, tokens, 3, 12, seed=seed + 100 * tp_rank)
            got = [(results[seed].out, results[seed].lse) for results in members]
            check(got, truth(partials), scatter=scatter)


def merge_on_some_ranks(path, members):
    """A mesh over some ranks of the world, which are neither its first nor side by side; the others have no part."""
    mesh = Mesh.create(ranks=members, device="cpu", timeout_s=20.0)
    if mesh is None:
        return None
    with mesh:
        merge = OneShotMerge(mesh, capacity_bytes=4096, map_slabs=shared_slabs(path), timeout_s=5.0)
        # the last call is larger than the slab and takes the collective
        results = [merge(random_partials(2, tokens, 3, 12, seed=tokens)[mesh.kvp_rank]) for tokens in (2, 3, 40)]
        merge.check()
        merge.close()
        return results


@pytest.mark.dist
def test_a_group_inside_a_larger_world_merges_by_its_own_ranks(ranks):
    with tempfile.TemporaryDirectory() as directory:
        outcomes = ranks(4).run(merge_on_some_ranks, os.path.join(directory, "slab"), [1, 3])
    assert outcomes[0] is None and outcomes[2] is None
    for number, tokens in enumerate((2, 3, 40)):
        got = [(outcome[number].out, outcome[number].lse) for outcome in (outcomes[1], outcomes[3])]
        check(got, truth(random_partials(2, tokens, 3, 12, seed=tokens)))


def attend_between_processes(path, own_apart):
    """Prompts, two decode steps and a mixed step through the layer, merged by `one_shot` and by `all_gather`.

    With `own_apart` the `one_shot` layer attends to new tokens apart.
    """
    with Mesh.create() as mesh:
        merges = {
            "fused": OneShotMerge(mesh, capacity_bytes=8192, map_slabs=shared_slabs(path)),
            "apart": make_merge("all_gather", mesh),
        }
        results, calls = {}, []
        for name, merge in merges.items():
            cache = ShardedCache(
                mesh, num_layers=1, num_kv_heads=2, head_dim=16, max_tokens=1024, backend="triton", page_size=1,
                min_chunk=64, max_chunk=64, own_apart=own_apart and name == "fused",
            )  # fmt: skip
            cache.pool.k.fill_(math.nan)
            cache.pool.v.fill_(math.nan)
            layer = DistributedAttention(mesh, cache, merge=merge)
            inner = merge.merge_splits if name == "fused" else None
            if inner is not None:
                merge.merge_splits = lambda splits, inner=inner, **how: (
                    calls.append((splits.ranges is not None, how.get("own") is not None)) or inner(splits, **how)
                )
            g = torch.Generator().manual_seed(0)
            results[name] = []
            for seq in (0, 1):
                cache.kv.add(seq)
            for rows in ([(0, 70), (1, 3)], [(0, 1), (1, 1)], [(0, 1), (1, 1)], [(0, 1), (1, 4)]):
                tokens = sum(n for _, n in rows)
                batch = cache.begin_step(rows)
                q, k, v = (torch.randn(tokens, heads, 16, generator=g) for heads in (4, 2, 2))
                results[name].append(layer(q, k, v, batch, 0))
        merges["fused"].close()
        return results, calls


@pytest.mark.dist
@pytest.mark.parametrize("own_apart", [False, True])
def test_the_layer_hands_its_unjoined_splits_to_the_merge(ranks, own_apart):
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "slab")
        outcomes = ranks(2).run(attend_between_processes, path, own_apart, timeout_s=120.0)
    for results, calls in outcomes:
        # the prompts are larger than the slab; steps of decode rows alone come unjoined, a mixed step joined
        assert calls == [(True, own_apart), (True, own_apart), (False, False)]
        for fused, apart in zip(results["fused"], results["apart"], strict=True):
            torch.testing.assert_close(fused.out, apart.out, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(fused.lse, apart.lse, rtol=1e-5, atol=1e-5)


def lose_a_rank(path):
    with Mesh.create() as mesh:
        merge = OneShotMerge(mesh, capacity_bytes=4096, map_slabs=shared_slabs(path), timeout_s=1e-5)
        mine = random_partials(2, 2, 3, 12)[mesh.kvp_rank]
        if mesh.kvp_rank == 1:
            merge.close()
            return None
        merged = merge(mine)
        with pytest.raises(RuntimeError) as error:
            merge(mine)
        merge.close()
        return merged.out.isnan().all().item(), str(error.value)


@pytest.mark.dist
def test_the_merge_object_tells_which_rank_was_lost(ranks):
    with tempfile.TemporaryDirectory() as directory:
        (failed, told), _ = ranks(2).run(lose_a_rank, os.path.join(directory, "slab"))
    assert failed
    assert "kvp ranks [1] did not come in time" in told


def refusals():
    with Mesh.create() as mesh:
        told = why_not(Peers.kvp(mesh))
        for build in (lambda: make_merge("one_shot", mesh), lambda: OneShotMerge(mesh, scatter=True)):
            with pytest.raises(RuntimeError, match=f"not possible here: .*{told[:14]}"):
                build()
        with pytest.raises(ValueError, match=r"float8.*float32, bfloat16"):
            OneShotMerge(mesh, transport="float8")
        return told


@pytest.mark.dist
def test_a_mesh_without_gpus_is_refused_with_the_reason_on_every_rank(ranks):
    assert ranks(2).run(refusals) == ["no CUDA device (rank 0)"] * 2


def refuse_on_faked_devices(facts, linked):
    """`why_not` as if this rank's host and GPU were those named in `facts`."""
    import distdec.slabs as module

    with Mesh.create() as mesh:
        rank = mesh.rank
        saved = {name: getattr(module, name) for name in ("_local_reason", "_host", "_gpu", "_can_push")}
        try:
            module._local_reason = lambda mesh: None
            module._host = lambda: facts[rank][0]
            module._gpu = lambda index: facts[rank][1]
            module._can_push = lambda index, gpus: linked[rank]
            return why_not(Peers.kvp(mesh))
        finally:
            for name, function in saved.items():
                setattr(module, name, function)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("facts", "linked", "want"),
    [
        ([(7, 1), (8, 1)], (True, True), "a kvp group lies on several hosts (ranks 0 to 1)"),
        ([(7, 1), (7, 1)], (True, True), "two ranks of a kvp group share one GPU (ranks 0 to 1)"),
        (
            [(7, 1), (7, 2)],
            (True, False),
            "no peer access with atomics between the GPUs of a kvp group (ranks [1])",
        ),
        ([(7, 1), (7, 2)], (True, True), None),
    ],
)
def test_all_ranks_refuse_what_the_link_cannot_do(ranks, facts, linked, want):
    assert ranks(2).run(refuse_on_faked_devices, facts, linked) == [want] * 2


def test_one_rank_has_nothing_to_merge():
    assert "nothing to merge" in why_not(Peers.kvp(Mesh.single()))


COMPILE = """
import sys
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from distdec.ops import one_shot_triton as module

kernel, names = module.one_shot_kernel, module.one_shot_kernel.arg_names
types = {name: "i32" for name in names} | {name: "*fp32" for name in names if name.startswith("p_")}
types |= {"p_out": "*bf16", "p_ranges": "*i32", "p_peers": "*i64", "p_state": "*i32", "p_slots": "*i64"}
types |= {name: "*bf16" for name in ("p_q", "p_k", "p_v", "p_k_pool", "p_v_pool")}
types |= {"score_scale": "fp32", "cap_log2": "fp32"}
common = dict(CHANNELS=528, CAPACITY=15872, HKV=8, G=4, Q_LEN=1, D=128, BLOCK_D=128, BLOCK_C=32, COLUMNS=0)
common |= dict(N=2, BLOCK_N=2, PAYLOAD=tl.float32, SCALED=False, SLOT=528, HAS_SINKS=False, PUSH=True, MERGE=True)
common |= dict(JOINED=False, FETCHERS=0, BULK=False, THREADS=128)
common |= dict(OWN=False, SOFTCAP=False, DK=1, BLOCK_DK=1, BLOCK_V=1, K_STRIDE=0, V_STRIDE=0)
own = dict(OWN=True, SOFTCAP=True, DK=128, BLOCK_DK=128, BLOCK_V=128, K_STRIDE=1024, V_STRIDE=1024)
wide = dict(D=200, BLOCK_D=256, BLOCK_C=32, SLOT=416, PAYLOAD=tl.bfloat16, HAS_SINKS=True)
changes = [{}, dict(N=8, BLOCK_N=8, COLUMNS=512, **wide), dict(N=3, BLOCK_N=4, JOINED=True)]
changes += [own, own | dict(COLUMNS=512), own | dict(FETCHERS=132, BULK=int(sys.argv[1]) >= 90)]
if int(sys.argv[1]) >= 89:
    changes.append(dict(PAYLOAD=tl.float8e4nv, SCALED=True, SLOT=144))
for change in changes:
    constants = common | change
    signature = types | {name: "constexpr" for name in constants}
    divisible = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name.startswith("p_")}
    source = ASTSource(kernel, signature, {(names.index(k),): v for k, v in constants.items()}, divisible)
    options = {"num_warps": module.NUM_WARPS, "maxnreg": module.MAX_REGISTERS}
    ptx = triton.compile(source, target=GPUTarget("cuda", int(sys.argv[1]), 32), options=options).asm["ptx"]
    release = ptx.index("atom.global.sys.release.exch")
    first_poll = ptx.index("ld.global.sys.acquire")
    # between the last store to a slab and the flag, and between the last poll and the first read, all threads meet
    assert "bar.sync" in ptx[ptx.rindex("st.global", 0, release) : release], "no barrier before the flag"
    assert first_poll > release, "waits before it pushes"
    read = ptx.index("ld.volatile")
    # one tells all threads what the polling thread saw, the other one is ours
    assert ptx.count("bar.sync", ptx.rindex("ld.global.sys.acquire"), read) >= 2, "no barrier after the wait"
    assert "multimem" not in ptx
    asks = [ptx.count(".global.L2 ["), ptx.count("cp.async.bulk.prefetch.L2.global [")]
    assert asks == [0, 0] if not constants["FETCHERS"] else max(asks) == 1, "one request a piece"
    assert ".local" not in ptx, "registers spill"
"""


@pytest.mark.parametrize("capability", ["80", "90"])
def test_the_kernel_compiles_and_its_barriers_stand_where_they_must(capability):
    pytest.importorskip("triton.backends.nvidia")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, capability], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
