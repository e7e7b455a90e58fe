"""Compiled layers give the tokens of the layers as they are, share their programs, and see attention as one operator.

The tests trace with torch.compile and run what was traced operator by operator, which needs no C++ compiler; kernels
made by Inductor are tested where a GPU is.
"""

import pytest
import torch
from hf_models import FAMILIES, tiny_model
from tp_inputs import error, lively_model, packed, truth

pytestmark = pytest.mark.dist

TIMEOUT_S = 150.0
TOLERANCE = 2e-5


def compiled_error(family, merge, want, kvp=1, tp=1, queries="auto"):
    """Relative error of the logits against eager, infinite where a token differs; programs, calls, graph breaks."""
    from torch._dynamo.utils import counters

    from distdec import shard
    from distdec.mesh import Mesh

    torch.compiler.reset()
    counters.clear()
    with Mesh.create(kvp, tp, device="cpu") if kvp * tp > 1 else Mesh.single("cpu") as mesh:
        model = lively_model(family, "distdec")
        if kvp * tp > 1:
            model = shard(model, mesh, queries=queries)
        wrong = error(packed(model, mesh, merge, compiler="aot_eager"), want)
    return wrong, counters["stats"]["unique_graphs"], dict(counters["graph_break"])


def check(ranks, family):
    [(wrong, programs, _)] = ranks(1).run(compiled_error, family, "auto", truth(family), timeout_s=TIMEOUT_S)
    assert wrong <= TOLERANCE
    assert programs >= 1


# windows that alternate, sinks, and experts
@pytest.mark.parametrize("family", ["gpt_oss"])
def test_families_equal_eager(ranks, family):
    check(ranks, family)


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_equals_eager(ranks, family):
    check(ranks, family)


@pytest.mark.parametrize(("kvp", "tp", "merge", "queries"), [(2, 1, "all_to_all", "gather"), (1, 1, "auto", "auto")])
def test_sharded_weights_equal_eager_and_layers_share_their_programs(ranks, kvp, tp, merge, queries):
    for wrong, programs, breaks in ranks(kvp * tp).run(
        compiled_error, "llama", merge, truth("llama"), kvp, tp, queries, timeout_s=TIMEOUT_S
    ):
        assert wrong <= TOLERANCE
        # three layers, steps of 1 to 26 tokens: one program for a single token, one for all other numbers
        assert programs <= 2
        assert not breaks


def summed_in_one_kernel(path, fetch, compiler):
    """Relative error of a sharded model's logits, its small sums in the kernel; programs, breaks, launches.

    A launch is told by the name of the weight that follows. Attention's calls are told likewise.
    """
    from slab_ranks import shared_slabs
    from torch._dynamo.utils import counters

    from distdec import shard
    from distdec.attention import DistributedAttention
    from distdec.hf.linears import RowLinear
    from distdec.hf.sharding import rank_sum_of
    from distdec.mesh import Mesh
    from distdec.rank_sum import OneShotSum

    torch.compiler.reset()
    counters.clear()
    with Mesh.create(2, 1, device="cpu") as mesh:
        model = shard(lively_model("llama", "distdec"), mesh)
        # prompts of 26 tokens are larger than the slab
        kernel = OneShotSum(mesh, capacity_bytes=8192, map_slabs=shared_slabs(path))
        names = {id(weight): name for name, weight in model.named_parameters()} | {id(None): None}
        launches, launch, attend = [], kernel._launch, DistributedAttention.__call__

        def launch_noting(y, out, following):
            launches.append(names[id(following)])
            launch(y, out, following=following)

        def attend_noting(self, q, *args, following, **how):
            # steps of a prompt are larger than the slab
            launches.extend([names[id(following)]] if kernel.fits(64 * len(q), q.dtype) else [])
            return attend(self, q, *args, following=following, **how)

        kernel._launch, DistributedAttention.__call__ = launch_noting, attend_noting
        rank_sum_of(model).use(kernel)
        try:
            wrong = error(packed(model, mesh, "all_to_all", compiler=compiler, fetch=fetch), truth("llama"))
        finally:
            DistributedAttention.__call__ = attend
        reduces = [m.reduce is rank_sum_of(model) for m in model.modules() if isinstance(m, RowLinear)]
        assert reduces == [True] * 6, "close() takes back what was linked"
        rank_sum_of(model).close()
    return wrong, counters["stats"]["unique_graphs"], dict(counters["graph_break"]), launches


@pytest.mark.parametrize(("fetch", "compiler"), [(False, "aot_eager"), (True, "aot_eager"), (True, None)])
def test_sums_of_layers_run_in_the_kernel_and_compiled_layers_share_their_programs(ranks, tmp_path, fetch, compiler):
    leaves = ("self_attn.o_proj", "mlp.gate_proj", "self_attn.q_proj")
    named = [f"model.layers.{i + (leaf == leaves[2])}.{leaf}.weight" for i in range(3) for leaf in leaves]
    named[-1] = "lm_head.weight"
    for wrong, programs, breaks, launches in ranks(2).run(
        summed_in_one_kernel, str(tmp_path / "slab"), fetch, compiler, timeout_s=TIMEOUT_S
    ):
        assert wrong <= TOLERANCE
        assert programs <= 2
        assert not breaks
        # an embedding, then attention and two sums in each of three layers, in each step that fits
        step = [None, *(named if fetch else [None] * 9)]
        assert len(launches) >= 20 and launches == step * (len(launches) // 10)


def layers_after_close():
    """Whether the layers are compiled, and what their attention modules carry, while bound and after close()."""
    from distdec.attention import DistributedAttention
    from distdec.hf import bind_engine
    from distdec.mesh import Mesh
    from distdec.sharded_cache import ShardedCache

    model = tiny_model("llama", "distdec")
    cache = ShardedCache(Mesh.single("cpu"), num_layers=3, num_kv_heads=2, head_dim=16, max_tokens=64)
    binding = bind_engine(model, DistributedAttention(Mesh.single("cpu"), cache))
    binding.compile(backend="eager", options=None)
    seen = []
    for _ in range(2):
        layers = model.model.layers
        carried = sorted(name for name in vars(layers[2].self_attn) if name.startswith("_distdec"))
        seen.append(([layer._compiled_call_impl is not None for layer in layers], carried))
        binding.close()
    return seen


def test_close_leaves_the_model_as_it_was(ranks):
    [(bound, closed)] = ranks(1).run(layers_after_close, timeout_s=TIMEOUT_S)
    assert bound == ([True] * 3, ["_distdec_binding", "_distdec_handle"])
    assert closed == ([False] * 3, [])


def test_layers_that_cannot_be_compiled_end_the_start_with_the_option_that_helps(monkeypatch, folder):
    from distdec.config import BackendConfig, CacheConfig, Config, ModelConfig, SchedulerConfig
    from distdec.hf import compiled
    from distdec.mesh import Mesh
    from distdec.runner import Runner

    def refuse(graph, inputs):
        raise NotImplementedError("no such operator")

    torch.compiler.reset()
    compile_layers = compiled.compile_layers
    monkeypatch.setattr(compiled, "compile_layers", lambda layers: compile_layers(layers, backend=refuse, options=None))
    config = Config(
        model=ModelConfig(path=folder, dtype="float32"),
        cache=CacheConfig(max_tokens=256),
        scheduler=SchedulerConfig(prefill_slice=16, token_budget=16, max_rows=2),
        backend=BackendConfig(graphs="on", compile="on"),
    )
    with pytest.raises(RuntimeError, match=r"(?s)layers of LlamaForCausalLM; backend.compile=off.*no such operator"):
        Runner.load(folder, Mesh.single("cpu"), config)


@pytest.mark.gpu
def test_kernels_made_by_inductor_equal_eager_in_graphs(tmp_path):
    from distdec.config import BackendConfig, CacheConfig, Config, ModelConfig, SchedulerConfig
    from distdec.engine import Engine
    from distdec.mesh import Mesh
    from distdec.request import SamplingParams
    from distdec.runner import Runner
    from launch.assets import tiny_model_folder
    from launch.parity import load_reference, reference_tokens

    folder = str(tiny_model_folder(tmp_path))
    prompts = [list(range(3, 3 + n)) for n in (37, 5, 90)]
    reference = load_reference(folder, "float32", "cuda")
    config = Config(
        model=ModelConfig(path=folder, dtype="float32"),
        cache=CacheConfig(max_tokens=1024, min_chunk=16, max_chunk=64),
        scheduler=SchedulerConfig(prefill_slice=32, token_budget=64, max_rows=4),
        backend=BackendConfig(graphs="on", compile="on"),
    )
    engine = Engine(Runner.load(folder, Mesh.single("cuda"), config), config.scheduler)
    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    done = engine.generate([(prompt, params) for prompt in prompts])
    engine.close()
    assert [list(one.token_ids) for one in done] == [reference_tokens(reference, p, 24) for p in prompts]
