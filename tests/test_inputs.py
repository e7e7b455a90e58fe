"""What must not happen to files of prompts and outputs: a bad byte costs the run, lines are lost or mixed."""

import pytest

from distdec.config import Config, WorkloadConfig
from distdec.engine import Completion
from distdec.request import FinishReason, SamplingParams
from launch import boot, generate
from launch.assets import byte_tokenizer, tiny_model_folder
from launch.inputs import BadLine, OutputFile, Prompt, read_prompts

DONE = Completion(0, (1, 2), FinishReason.LENGTH, 5, "text", 0.5, 0.25, 0.75)


def test_a_byte_that_is_no_utf8_spoils_its_own_line_only(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n{"prompt": "\xe9"}\n{"prompt": "b"}\n')
    prompts, bad = read_prompts(Config(prompts=str(path), on_error="skip"), byte_tokenizer())
    assert [prompt.line for prompt in prompts] == [1, 3]
    assert [one.line for one in bad] == [2]
    assert "can't decode byte 0xe9" in bad[0].reason
    with pytest.raises(boot.LaunchError, match=r"line 2: .*can't decode byte 0xe9"):
        read_prompts(Config(prompts=str(path)), byte_tokenizer())


def test_a_byte_order_mark_is_not_part_of_a_prompt(tmp_path):
    tokenizer = byte_tokenizer()
    path = tmp_path / "in"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n')
    [prompt], bad = read_prompts(Config(prompts=str(path)), tokenizer)
    assert (tokenizer.decode(prompt.token_ids), bad) == ("a", [])
    path.write_bytes(b"\xef\xbb\xbfa")
    [prompt], _ = read_prompts(Config(prompt_file=str(path)), tokenizer)
    assert tokenizer.decode(prompt.token_ids) == "a"


@pytest.mark.parametrize("field", ["prompts", "prompt_file"])
def test_the_file_of_prompts_is_not_replaced_by_the_output(tmp_path, field):
    path, link = tmp_path / "in.jsonl", tmp_path / "link"
    path.write_text('{"prompt": "a"}\n')
    link.symlink_to(path)
    config = Config(output=str(link), **{field: str(path)})
    with pytest.raises(boot.LaunchError, match="is the file that the prompts are read from"):
        generate.read_work(config, tiny_model_folder(tmp_path / "model"))
    assert path.read_text() == '{"prompt": "a"}\n'


def test_two_runs_never_write_the_same_output(tmp_path):
    path = str(tmp_path / "o.jsonl")
    first, late = OutputFile(path), OutputFile(path)
    first.write_error(BadLine(1, "first"))
    # a run that begins later finds out before its work, one that began at the same time with its first line
    with pytest.raises(boot.LaunchError, match="is being written by another run"):
        OutputFile(path)
    with pytest.raises(boot.LaunchError, match="is being written by another run"):
        late.write_error(BadLine(1, "late"))
    first.write_error(BadLine(2, "first"))
    assert (tmp_path / "o.jsonl").read_text().count("first") == 2
    first.close()
    late.write_error(BadLine(1, "late"))
    assert (tmp_path / "o.jsonl").read_text().count("\n") == 1


def test_a_full_disk_names_the_output():
    output = OutputFile("/dev/full")
    with pytest.raises(boot.LaunchError, match="cannot write output=/dev/full after 0 lines: No space left"):
        output.write(Prompt((7,), SamplingParams()), 0, DONE)
    output.close()


def test_a_passkey_longer_than_the_model_is_refused_before_its_text_is_made(tmp_path):
    config = Config(workload=WorkloadConfig(name="passkey", num_tokens=10**12))
    with pytest.raises(boot.LaunchError, match=r"workload.num_tokens=1000000000000 is over the model's limit of 4096"):
        generate.read_work(config, tiny_model_folder(tmp_path))


def test_a_model_without_a_tokenizer_is_named(tmp_path):
    folder = tiny_model_folder(tmp_path)
    for path in folder.glob("token*"):
        path.unlink()
    with pytest.raises(boot.LaunchError, match=f"the tokenizer in {folder} cannot be loaded"):
        generate.read_work(Config(prompt="a"), folder)
