"""The programs in docs/examples run as they stand, and give what one process does."""

import contextlib
import io
import runpy
from pathlib import Path

import pytest

from launch import assets

pytestmark = pytest.mark.dist

EXAMPLES = Path(__file__).resolve().parent.parent / "docs" / "examples"
TIMEOUT_S = 150.0


def run(name, *args):
    """Run an example's main; return its result and what it printed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        result = runpy.run_path(str(EXAMPLES / name))["main"](*args)
    return result, printed.getvalue()


def test_every_example_is_run_here():
    tested = Path(__file__).read_text()
    for path in EXAMPLES.glob("*.py"):
        assert f'"{path.name}"' in tested


@pytest.mark.parametrize(("num_ranks", "tp"), [(2, 1), (2, 2), (4, 2)])
def test_the_layer_in_a_model_of_ones_own(ranks, num_ranks, tp):
    results = ranks(num_ranks).run(run, "own_model.py", tp, timeout_s=TIMEOUT_S)
    held = [int(printed.split(": ")[-1].split(" tokens")[0]) for _, printed in results]
    assert sum(held) == 321 * tp
    for worst, _ in results:
        assert worst < 1e-5


def test_a_loaded_model_is_sharded_and_generates(ranks, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = str(assets.tiny_model_folder(tmp_path))
    text = "Once upon a time"
    results = ranks(2).run(run, "shard_and_generate.py", folder, text, timeout_s=TIMEOUT_S)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = model.generate(**tokenizer(text, return_tensors="pt"), max_new_tokens=20, do_sample=False)
    want = tokenizer.decode(tokens[0], skip_special_tokens=True)
    assert [answer for answer, _ in results] == [want, want]
    assert want in results[0][1]
    assert want not in results[1][1]
    whole = sum(p.numel() for p in model.parameters())
    for _, printed in results:
        assert int(printed.split(": ")[1].split(" parameters")[0]) < 0.62 * whole
