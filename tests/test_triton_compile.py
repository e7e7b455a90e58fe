"""Every kernel, compiled for sm_80 and sm_90 without a GPU, and what the compiler made of it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
# bytes of shared memory that one program may have
SHARED = {80: 163 * 1024, 90: 227 * 1024}


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """What came out, by architecture; both compile at once, in processes without the interpreter."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS.parent), environment.get("PYTHONPATH", "")])
    runs = {
        arch: subprocess.Popen(
            [sys.executable, str(TESTS / "compile_kernels.py"), str(tmp_path_factory.mktemp(f"sm_{arch}")), str(arch)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for arch in SHARED
    }
    found = {}
    for arch, run in runs.items():
        out, err = run.communicate(timeout=600)
        assert run.returncode == 0, err[-4000:]
        found[arch] = [json.loads(line) for line in out.splitlines()]
    return found


@pytest.mark.parametrize("arch", SHARED)
def test_every_kernel_compiles(reports, arch):
    kernels = {report["kernel"] for report in reports[arch]}
    sources = [path.read_text() for path in (TESTS.parent / "distdec" / "ops").glob("*_triton.py")]
    ours = {
        line.removeprefix("def ").split("(")[0]
        for source in sources
        for line in source.splitlines()
        if line.startswith("def ") and line.split("(")[0].endswith("_kernel")
    }
    assert len(ours) >= 6
    # the merge's has a test of its own
    assert ours - {"one_shot_kernel"} <= kernels


@pytest.mark.parametrize("arch", SHARED)
def test_kernels_fit_shared_memory_and_spill_no_registers(reports, arch):
    for report in reports[arch]:
        assert report["shared"] <= SHARED[arch], report
        # without the matrix unit a word or two goes to the stack; that path is for checking, not for speed
        assert report["spilled"] <= (16 if "float32" in report["case"] else 0), report


@pytest.mark.parametrize("arch", SHARED)
def test_loops_over_keys_keep_two_buffers_in_flight(reports, arch):
    """With the tile's entry looked up inside the loop, keys and values would have one buffer each: 35 of 67 KiB."""
    loops = [r for r in reports[arch] if r["kernel"] in ("decode_kernel", "prefill_kernel")]
    assert len(loops) >= 10
    for report in loops:
        options = report["options"]
        element = 4 if "float32" in report["case"] else 2
        buffers = (options["STAGES"] - 1) * options["BLOCK_N"] * (options["BLOCK_D"] + options["BLOCK_DV"]) * element
        assert report["shared"] >= buffers, report
        assert report["cp_async"] > 0, report
        # the loop waits for all but the newest copies: more than one block is on its way
        assert max(report["wait_groups"]) == 2 * (options["STAGES"] - 2), report
        assert report["mma"] + report["wgmma"] > 0 or element == 4, report


@pytest.mark.parametrize("arch", SHARED)
def test_decode_shapes_leave_room_for_the_programs_that_their_spans_count_on(reports, arch):
    # two programs share a multiprocessor of a Hopper device
    room = 2 if arch == 90 else 1
    cases = {"decode, group 4", "decode, 8 rows", "decode, group 8, 32 rows", "decode, head size 64"}
    cases |= {"decode, 8 tokens", "decode, 8 tokens of 8"}
    seen = set()
    for report in reports[arch]:
        if report["kernel"] == "decode_kernel" and report["case"] in cases:
            seen.add(report["case"])
            assert report["shared"] * room <= SHARED[arch], report
            # registers are handed out to a warp in eights for each thread
            assert -(-report["registers"] // 8) * 8 * 32 * report["warps"] * room <= 65536, report
    assert len(seen) == (6 if arch == 90 else 5), seen


def test_long_prompts_and_wide_groups_on_hopper_leave_loads_to_the_copy_engine(reports):
    found = [r for r in reports[90] if r["case"] in ("prefill, long", "prefill, window")]
    found += [r for r in reports[90] if r["kernel"] == "decode_kernel" and r["options"]["BLOCK_M"] == 128]
    wide = {"decode, group 71", "decode, group 71, window", "decode, group 71 of 64"}
    wide |= {"decode, 5 tokens of 16", "decode, 16 tokens of 8"}
    assert {report["case"] for report in found} == wide | {"prefill, long", "prefill, window"}
    for report in found:
        # keys and values once for each buffer, before the loop or in it
        assert report["bulk"] == 2 * report["options"]["STAGES"], report
    assert not any(r["bulk"] for r in reports[80])


def test_no_barrier_parts_the_softmax_from_the_product_with_the_values(reports):
    """Between the two products of a block, one warp group shall compute while the other one multiplies."""
    for report in reports[90]:
        # decode streams its keys where it is memory that is short
        if report["wgmma"] and (report["kernel"] == "prefill_kernel" or report["bulk"]):
            assert report["order"].count("MWM") == 2, report


@pytest.mark.parametrize("arch", SHARED)
def test_the_sum_over_ranks_moves_wide_words_between_its_barriers(reports, arch):
    orders = {report["case"]: report["exchange"] for report in reports[arch] if "sum" in report["case"]}
    for num_ranks in (2, 8):
        order = orders[f"sum, {num_ranks} ranks"]
        # all is pushed before the flag is raised, with a barrier between, and nobody waits before that
        assert order.startswith("S" * num_ranks + "BRA"), order
        # after the last look at a flag one barrier tells all threads what the polling one saw, the other one is ours
        waited, read = order.rindex("A"), order.index("L")
        assert order.count("B", waited, read) >= 2, order
        assert order.count("L") == num_ranks and order.endswith("LSs"), order
    asks = {report["case"]: report["asks"] for report in reports[arch] if "sum" in report["case"]}
    assert asks.pop("sum, fetching") == ([0, 1] if arch >= 90 else [1, 0]), "one request a thread and round"
    assert set(map(tuple, asks.values())) == {(0, 0)}
    assert orders["sum, fetching"] == orders["sum, 2 ranks"]
    # a size that is no multiple of a wide word moves one number at a time
    assert "S" not in orders["sum, odd"] and "L" not in orders["sum, odd"]


@pytest.mark.parametrize("arch", SHARED)
def test_the_merge_of_few_rows_neither_fences_nor_raises_a_flag(reports, arch):
    found = {report["case"]: report for report in reports[arch] if report["case"].startswith("words")}
    assert len(found) == 4
    for report in found.values():
        order, options = report["exchange"], report["options"]
        # words of a row to each rank, then LSEs to all of them; looks at as many, of columns and LSEs
        columns = options["WIDTH"] // 32 * options["BLOCK_N"]
        pushed, looked = "W" * (columns + 1), "w" * (2 * columns)
        own = "[Ss]+" if options["OWN"] else ""
        # a barrier keeps stores in front of the first look, a loop looks again, and nothing is ordered or raised
        assert re.fullmatch(f"B*{pushed}B{own}{looked}{looked}s+", order), report
        assert report["warps"] == 1 and report["registers"] <= 128, report
