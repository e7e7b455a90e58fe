"""Loading: each rank copies its part of every tensor once; what does not fit is refused and named."""

import json
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path

import pytest
import torch
from hf_models import FAMILIES, tiny_model
from safetensors.torch import load_file, save_file

from distdec.hf.parallel import Cut
from distdec.hf.weights import Checkpoint, load_sharded
from distdec.mesh import Mesh

ROOT = Path(__file__).resolve().parent.parent


def rank_of(kvp, tp, rank):
    """A mesh that is one rank of a larger one, without its groups: enough to cut and load weights."""
    mesh = Mesh.single()
    mesh.world_size, mesh.kvp_size, mesh.tp_size, mesh.rank = kvp * tp, kvp, tp, rank
    mesh.tp_rank, mesh.kvp_rank = divmod(rank, kvp)
    return mesh


def saved(folder, family, **changes):
    """Save a tiny model of a family whose parameters are all random, biases and norms too; return it."""
    model = tiny_model(family, "eager", **changes)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    model.save_pretrained(folder)
    return model


@pytest.fixture
def reads(monkeypatch):
    """Count the reads of each tensor: (name, cut) -> times."""
    counts = Counter()
    read = Checkpoint.read

    def counting(self, name, cut, *args, **kwargs):
        counts[name, cut] += 1
        return read(self, name, cut, *args, **kwargs)

    monkeypatch.setattr(Checkpoint, "read", counting)
    return counts


VARIANTS = {
    **{family: (family, {}) for family in FAMILIES},
    "llama with biases, untied": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "cohere with norms of each head": ("cohere", {"use_qk_norm": True}),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("kvp", "tp"), [(3, 1), (2, 2)])
def test_ranks_read_their_parts_of_every_tensor_once(tmp_path, reads, variant, kvp, tp):
    from distdec.hf.parallel import shard

    family, changes = VARIANTS[variant]
    saved(tmp_path, family, **changes)
    for rank in range(kvp * tp):
        reads.clear()
        placed = []
        mesh = rank_of(kvp, tp, rank)
        loaded = load_sharded(tmp_path, mesh, dtype=torch.float32, queries="replicate", progress=placed.append)
        expected = shard(_whole(tmp_path), mesh, queries="replicate")
        want, got = dict(expected.named_parameters()), dict(loaded.named_parameters())
        assert want.keys() == got.keys()
        for name, value in want.items():
            assert torch.equal(value, got[name]), name
        assert set(reads.values()) == {1}
        # a bias that is added once over all ranks is zero, unread, on all but the first
        unread = [p.numel() for n, p in got.items() if n.endswith("experts.down_proj_bias") and rank]
        assert loaded.bytes_read == 4 * (sum(p.numel() for p in got.values()) - sum(unread))
        assert len(placed) == len(set(placed)) == len(got) - len(unread)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_ranks_read_their_own_experts_alone(tmp_path, reads, family):
    from distdec.hf.parallel import shard

    saved(tmp_path, family, **{"num_experts" if family == "qwen3_moe" else "num_local_experts": 6})
    read = 0
    for rank, own in enumerate([range(1), range(1, 3), range(3, 4), range(4, 6)]):
        reads.clear()
        mesh = rank_of(2, 2, rank)
        loaded = load_sharded(tmp_path, mesh, dtype=torch.float32, experts="expert")
        want = dict(shard(_whole(tmp_path), mesh, experts="expert").named_parameters())
        for name, value in loaded.named_parameters():
            assert torch.equal(value, want[name]), name
        assert loaded.bytes_read == 4 * sum(p.numel() for p in loaded.parameters())
        of_experts = {name: cut for name, cut in reads if ".experts." in name}
        if family == "gpt_oss":
            assert set(of_experts.values()) == {Cut(0, ((own.start, own.stop),))}
        else:
            assert {int(name.split(".experts.")[1].split(".")[0]) for name in of_experts} == set(own)
        read += sum(p.numel() for n, p in loaded.named_parameters() if ".experts." in n)
    whole = sum(p.numel() for n, p in _whole(tmp_path).named_parameters() if ".experts." in n)
    assert read == whole


def _whole(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="distdec", dtype=torch.float32).eval()


def test_a_checkpoint_in_many_files_is_read_through_its_index(tmp_path):
    one, many = tmp_path / "one", tmp_path / "many"
    model = saved(one, "qwen3_moe")
    model.save_pretrained(many, max_shard_size="20KB")
    assert len(list(many.glob("*.safetensors"))) > 3
    mesh = rank_of(2, 1, 1)
    from_one, from_many = (load_sharded(folder, mesh, dtype=torch.float32) for folder in (one, many))
    for (name, a), (_, b) in zip(from_one.named_parameters(), from_many.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    lost = next(iter(many.glob("*.safetensors")))
    lost.unlink()
    with pytest.raises(FileNotFoundError, match=lost.name):
        load_sharded(many, mesh, dtype=torch.float32)


@pytest.mark.parametrize(("stored", "wanted"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_the_dtype_is_the_one_asked_for(tmp_path, stored, wanted):
    stored, wanted = getattr(torch, stored), getattr(torch, wanted)
    saved(tmp_path, "mixtral").to(stored).save_pretrained(tmp_path)
    model = load_sharded(tmp_path, rank_of(2, 1, 0), dtype=wanted)
    assert {p.dtype for p in model.parameters()} == {wanted}
    want = load_file(tmp_path / "model.safetensors")["model.layers.1.self_attn.k_proj.weight"]
    assert torch.equal(model.model.layers[1].self_attn.k_proj.weight, want.to(wanted))
    # bytes are those of the file
    assert model.bytes_read == stored.itemsize * sum(p.numel() for p in model.parameters())


def test_weights_do_not_follow_the_file_after_loading(tmp_path):
    saved(tmp_path, "llama")
    model = load_sharded(tmp_path, Mesh.single(), dtype=torch.float32)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    path = tmp_path / "model.safetensors"
    with path.open("r+b") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        file.seek(start)
        file.write(bytes(path.stat().st_size - start))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), name


def change(folder, edit):
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


NORM = "model.norm.weight"
EXPERT = "model.layers.2.mlp.experts.3.up_proj.weight"


@pytest.mark.parametrize(
    ("family", "edit", "told"),
    [
        ("llama", lambda t: t.pop(NORM), f"missing 1: {NORM}"),
        ("qwen3_moe", lambda t: t.pop(EXPERT), f"missing 1: {EXPERT}"),
        ("llama", lambda t: t.update(surplus=torch.zeros(2)), "not part of the model 1: surplus"),
        ("llama", lambda t: t.update({NORM: torch.zeros(47)}), rf"of another shape 1: {NORM} is \[47\].*needs \[48\]"),
        ("qwen3_moe", lambda t: t.update({EXPERT: torch.zeros(48, 32)}), rf"{EXPERT} is \[48, 32\].*needs \[32, 48\]"),
        ("llama", lambda t: [t.pop(NORM), t.update(surplus=torch.zeros(2))], "missing 1.*not part of the model 1"),
    ],
)
def test_tensors_that_do_not_fit_are_named_before_anything_is_read(tmp_path, reads, family, edit, told):
    saved(tmp_path, family)
    change(tmp_path, edit)
    with pytest.raises(ValueError, match=told):
        load_sharded(tmp_path, Mesh.single(), dtype=torch.float32)
    assert not reads


def test_tensors_that_models_compute_are_no_surplus(tmp_path):
    saved(tmp_path, "llama", tie_word_embeddings=True)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change(
        tmp_path, lambda t: t.update({name: torch.ones(8), "lm_head.weight": t["model.embed_tokens.weight"].clone()})
    )
    load_sharded(tmp_path, Mesh.single(), dtype=torch.float32)


def test_only_plain_safetensors_are_read(tmp_path):
    saved(tmp_path, "llama")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    with pytest.raises(ValueError, match=r"quantised weights \(mxfp4\)"):
        load_sharded(tmp_path, Mesh.single(), dtype=torch.float32)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=r"pytorch_model\.bin is not read: unpickling it may run code"):
        load_sharded(tmp_path, Mesh.single(), dtype=torch.float32)
    with pytest.raises(FileNotFoundError, match=r"no model\.safetensors or"):
        Checkpoint(tmp_path / "nowhere")


def test_a_file_that_was_cut_short_is_named(tmp_path):
    saved(tmp_path, "llama")
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"model.safetensors is damaged or was copied in part: "):
        load_sharded(tmp_path, Mesh.single(), dtype=torch.float32)


def test_ranges_of_any_dimension_are_copied(tmp_path):
    full = torch.randn(3, 10, 7)
    save_file({"a": full}, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path) as checkpoint:
        for dim, ranges in [(0, ((1, 3),)), (1, ((0, 2), (5, 9))), (2, ((3, 3),)), (2, ((0, 1), (4, 7)))]:
            cut = Cut(dim, ranges)
            got = checkpoint.read("a", cut)
            assert torch.equal(got, cut.of(full))
            assert got.is_contiguous()
    assert checkpoint.bytes_read == 4 * (2 * 70 + 6 * 21 + 0 + 4 * 30)


MEASURE = """
    import sys, torch
    from distdec.hf import weights
    sys.path.insert(0, "tests")
    from test_weights import rank_of
    import accelerate, transformers
    from transformers.models.llama import modeling_llama

    def status(key):
        lines = open("/proc/self/status").read().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith(key))

    small, big, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
    # what is loaded and allocated once, whatever the model
    weights.load_sharded(small, rank_of(4, 1, rank), dtype=torch.bfloat16)
    open("/proc/self/clear_refs", "w").write("5")
    before = status("VmRSS")
    model = weights.load_sharded(big, rank_of(4, 1, rank), dtype=torch.bfloat16)
    print(status("VmHWM") - before, model.bytes_read, sum(2 * p.numel() for p in model.parameters()))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("rank", [0, 3])
def test_host_memory_never_holds_the_full_model(tmp_path, rank):
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 64}
    shape |= {"num_hidden_layers": 5, "intermediate_size": 3072, "vocab_size": 12000, "tie_word_embeddings": False}
    config = AutoConfig.for_model("llama", **shape)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.to_empty(device="cpu").save_pretrained(tmp_path / "big")
    total = sum(2 * p.numel() for p in model.parameters())
    assert 150e6 < total < 200e6
    del model
    saved(tmp_path / "small", "llama")
    script = [sys.executable, "-c", textwrap.dedent(MEASURE), str(tmp_path / "small"), str(tmp_path / "big"), str(rank)]
    done = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    peak, read, held = map(int, done.stdout.split())
    assert read == held
    # queries, keys and values are the same along kvp, the rest is a quarter
    assert held < 0.32 * total
    # its own part, the largest tensor's mapped pages or the window of mapped files, and one part in flight
    assert peak < held + 30e6 < 0.5 * total, (peak, held, total)
