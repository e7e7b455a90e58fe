"""Options, inputs and outputs of the launch programs in this process."""

import io
import json
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from distdec.config import Config, ModelConfig
from distdec.config_keys import describe
from distdec.engine import Completion
from distdec.request import FinishReason, SamplingParams
from launch import boot, console, generate, plan
from launch.assets import byte_tokenizer, tiny_model_folder
from launch.inputs import BadLine, OutputFile, Prompt, keep_runnable, model_folder, read_prompts

ROOT = Path(__file__).resolve().parent.parent
OPTIONS = sorted(path.relative_to(boot.CONF_DIR) for path in boot.CONF_DIR.glob("*/*.yaml"))
# what an option cannot do without
COMPANIONS = {"model/path": ["model.path=somewhere"], "workload/jsonl": ["prompts=some.jsonl"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model_folder(tmp_path_factory.mktemp("model"))


def configure(*overrides):
    boot.register_schemas()
    with initialize_config_dir(version_base="1.3", config_dir=str(boot.CONF_DIR)):
        return boot.to_config(compose("config", overrides=list(overrides)))


def test_the_options_without_overrides_are_the_defaults_of_the_classes():
    assert configure() == Config()


@pytest.mark.parametrize("option", OPTIONS, ids=str)
def test_every_option_file_says_what_it_sets(option):
    group, name = option.parent.name, option.stem
    config = configure(f"{group}={name}", *COMPANIONS.get(f"{group}/{name}", []))
    section = getattr(config, group)
    for key, value in (yaml.safe_load((boot.CONF_DIR / option).read_text()) or {}).items():
        assert getattr(section, key) == value


def test_help_lists_every_key_and_every_option_file():
    text = boot.help_text()
    for key, default, meaning in describe(Config):
        assert f"  {key}={boot._shown(default)} " in text
        assert meaning.replace("$", "") in text
    for option in OPTIONS:
        line = next(line for line in text.splitlines() if line.startswith(f"  {option.parent.name}: "))
        assert option.stem in line


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("foo=1", "Could not override 'foo'. Key 'foo' not in 'Config'"),
        ("+foo=1", "unknown key foo; here are: max_new_tokens,"),
        ("+cache.fooo=1", "unknown key cache.fooo; here are: cache.max_tokens,"),
        ("parallel.kvp=many", "could not be converted to Integer"),
        ("cache=huge", "Could not find 'cache/huge'"),
        ("temperature=nan", "temperature must be a finite number, at least 0, got nan"),
        ("top_p=-1", "top_p must be a finite number, more than 0 and at most 1, got -1.0"),
        ("stop=['']", "stop must be strings that are not empty"),
        ("model=path", "model=path needs the folder: model.path=FOLDER"),
        ("parallel.merge=ring", "parallel.merge must be one of auto, all_reduce"),
        ("prompt", "missing EQUAL"),
    ],
)
def test_a_bad_override_is_one_clear_error(override, said):
    with pytest.raises((HydraException, ValueError)) as raised:
        configure(override)
    code, message = boot._report(raised.value)
    assert code == 1
    assert message.startswith("error: ")
    assert said in message
    assert "+foo" not in message
    assert "Traceback" not in message


def test_faults_of_ours_keep_their_traceback():
    try:
        raise KeyError("inner")
    except KeyError as error:
        code, message = boot._report(error)
    assert code == 1
    assert "Traceback" in message
    assert "test_launch.py" in message


@given(st.text("\\\"'${}[]=,: \n\tab\u00e9", min_size=1, max_size=14))
def test_text_given_on_the_command_line_means_itself(text):
    argument = boot.quote_text(f"prompt={text}")
    if text[0] in "\"'" or text == "null":
        assert argument == f"prompt={text}", "what is quoted already is left to Hydra"
        return
    options = OmegaConf.create({"prompt": None})
    OmegaConf.update(options, "prompt", OverridesParser.create().parse_override(argument).value())
    assert OmegaConf.to_container(options, resolve=True)["prompt"] == text


@pytest.mark.parametrize(
    "argument", ["parallel.kvp=2", "-m", "parallel.merge=all_reduce,all_gather", "prompt", "prompt="]
)
def test_other_arguments_are_left_as_they_are(argument):
    assert boot.quote_text(argument) == argument


def test_the_overrides_that_silence_a_rank_are_options_of_hydra():
    boot.register_schemas()
    with initialize_config_dir(version_base="1.3", config_dir=str(boot.CONF_DIR)):
        options = compose("config", overrides=boot.silent_overrides("/nowhere"), return_hydra_config=True)
    assert options.hydra.output_subdir is None
    assert options.hydra.run.dir == "."
    assert options.hydra.job_logging.root is None or "handlers" not in options.hydra.job_logging.root


def read(tmp_path, lines, **fields):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8", newline="")
    return read_prompts(Config(prompts=str(path), **fields), byte_tokenizer())


def test_lines_bring_their_own_sampling_parameters(tmp_path):
    lines = [
        json.dumps({"prompt": "ab", "temperature": 0.5, "stop": ["x"], "max_new_tokens": 3}),
        "",
        json.dumps({"messages": [{"role": "user", "content": "hi"}]}),
        json.dumps({"prompt": [5, 6, 7]}),
        json.dumps({"prompt": "a\u2028b"}, ensure_ascii=False) + "\r",
    ]
    prompts, bad = read(tmp_path, lines, max_new_tokens=9, seed=4)
    assert bad == []
    assert [prompt.line for prompt in prompts] == [1, 3, 4, 5]
    assert prompts[0].sampling == SamplingParams(3, temperature=0.5, seed=4, stop=("x",))
    assert prompts[1].sampling == SamplingParams(9, seed=4)
    tokenizer = byte_tokenizer()
    assert tokenizer.decode(prompts[0].token_ids) == "ab"
    assert tokenizer.decode(prompts[1].token_ids) == "user: hi\nassistant: "
    assert prompts[2].token_ids == (5, 6, 7)
    assert tokenizer.decode(prompts[3].token_ids) == "a\u2028b"


BAD_LINES = [
    ('{"prompt": "a"', "not JSON: Expecting ',' delimiter at column 15"),
    ("[1]", 'expected an object with "prompt" or "messages", got list'),
    ('{"text": "a"}', "unknown field 'text'"),
    ('{"prompt": "a", "messages": []}', 'give either "prompt" or "messages"'),
    ('{"temperature": 1.0}', 'give either "prompt" or "messages"'),
    ('{"prompt": "  "}', "the prompt is empty"),
    ('{"prompt": []}', "the prompt is empty"),
    ('{"messages": []}', "the prompt is empty"),
    ('{"prompt": 5}', "a prompt is a text, messages or token ids, got int"),
    ('{"messages": [{"role": "user"}]}', 'each message needs "role" and "content"'),
    ('{"prompt": "a", "temperature": -1}', "temperature must be a finite number, at least 0, got -1"),
    ('{"prompt": "a", "temperature": NaN}', "temperature must be a finite number, at least 0, got nan"),
    ('{"prompt": "a", "max_new_tokens": "9"}', "max_new_tokens must be a whole number"),
    ('{"prompt": "a", "top_k": null}', "top_k must be a whole number"),
    ('{"prompt": "a", "stop": null}', "stop must be strings that are not empty, got None"),
    ('{"prompt": "a", "stop": 5}', "stop must be strings that are not empty, got 5"),
    ('{"prompt": "a", "stop": {"a": 1}}', "stop must be strings that are not empty, got {'a': 1}"),
    ('{"prompt": "a", "temperature": 1' + 400 * "0" + "}", "temperature must be a finite number"),
    ('{"messages": "hi"}', '"messages" is a list of {"role": ..., "content": ...}, got str'),
    ('{"prompt": "a\\ud800"}', "the prompt is not valid text: surrogates not allowed at character 1"),
    ("[" * 100_000, "nested too deeply"),
]


@pytest.mark.parametrize(("line", "said"), BAD_LINES)
def test_a_bad_line_ends_the_run_with_its_number(tmp_path, line, said):
    with pytest.raises(boot.LaunchError) as error:
        read(tmp_path, ['{"prompt": "fine"}', line])
    assert str(error.value).startswith(f"{tmp_path}/prompts.jsonl line 2: ")
    assert said in str(error.value)


def test_bad_lines_can_be_skipped_and_the_others_run(tmp_path):
    lines = [line for line, _ in BAD_LINES]
    prompts, bad = read(tmp_path, [*lines, '{"prompt": "fine"}'], on_error="skip")
    assert [prompt.line for prompt in prompts] == [len(lines) + 1]
    assert [one.line for one in bad] == list(range(1, len(lines) + 1))
    for one, (_, said) in zip(bad, BAD_LINES, strict=True):
        assert said in one.reason


@pytest.mark.parametrize("lines", [[], ["", " "], ["{}"]])
def test_a_file_without_a_prompt_that_can_run_is_refused(tmp_path, lines):
    with pytest.raises(boot.LaunchError, match="holds no prompt that can run"):
        read(tmp_path, lines, on_error="skip")


def test_prompt_files_are_read_whole_and_must_hold_text(tmp_path):
    path = tmp_path / "p.txt"
    path.write_text("two\nlines", encoding="utf-8")
    tokenizer = byte_tokenizer()
    [prompt], _ = read_prompts(Config(prompt_file=str(path), chat=True), tokenizer)
    assert tokenizer.decode(prompt.token_ids) == "user: two\nlines\nassistant: "
    path.write_text(" \n")
    with pytest.raises(boot.LaunchError, match=r"the prompt is empty: .*p.txt"):
        read_prompts(Config(prompt_file=str(path)), tokenizer)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(boot.LaunchError, match=r"cannot read .*p.txt"):
        read_prompts(Config(prompt_file=str(path)), tokenizer)
    with pytest.raises(boot.LaunchError, match=r"cannot read .*missing.txt: .*No such file"):
        read_prompts(Config(prompt_file=str(tmp_path / "missing.txt")), tokenizer)


def test_prompts_that_can_never_run_are_found_before_the_work():
    prompts = [Prompt((1, 2), SamplingParams(4), line=1), Prompt((1, 99), SamplingParams(4), line=3)]
    good, bad = keep_runnable(prompts, lambda request: request.check(50, 10), "skip")
    assert good == prompts[:1]
    assert bad == [BadLine(3, "token id 99 is outside the vocabulary (legal: 0 to 49)")]
    with pytest.raises(boot.LaunchError, match="line 3: token id 99"):
        keep_runnable(prompts, lambda request: request.check(50, 10), "stop")
    with pytest.raises(boot.LaunchError, match=r"line 1: .* over the model's limit of 5"):
        keep_runnable(prompts, lambda request: request.check(100, 5), "skip")


def test_a_missing_model_folder_is_named(tmp_path):
    with pytest.raises(boot.LaunchError, match="there is no model folder /nowhere/at/all"):
        model_folder(Config(model=ModelConfig(path="/nowhere/at/all")))
    with pytest.raises(boot.LaunchError, match=r"holds no config.json"):
        model_folder(Config(model=ModelConfig(path=str(tmp_path))))


def test_a_model_that_cannot_be_served_is_refused_from_its_config(tmp_path):
    from transformers import DeepseekV3Config

    DeepseekV3Config(num_hidden_layers=1).save_pretrained(tmp_path)
    with pytest.raises(boot.LaunchError, match=r"cannot run on a sharded cache: .*latent attention"):
        generate.read_work(Config(prompt="a"), tmp_path)


@pytest.mark.parametrize("fields", [{"prompt": "  "}, {}, {"prompt": "abc", "max_new_tokens": 5000}])
def test_work_that_cannot_start_writes_no_output(folder, tmp_path, fields):
    with pytest.raises((ValueError, boot.LaunchError), match=r"empty|no prompt|over the model's limit of 4096"):
        generate.read_work(Config(output=str(tmp_path / "o.jsonl"), **fields), folder)
    assert list(tmp_path.iterdir()) == []


def test_parity_needs_greedy_tokens(folder):
    with pytest.raises(boot.LaunchError, match="needs temperature=0"):
        generate.read_work(Config(prompt="a", temperature=1.0, parity=True), folder)


DONE = Completion(0, (1, 2), FinishReason.EOS, 5, "te\nxt\u2028", 0.5, 0.25, 0.75)


def test_output_lines_are_whole_and_carry_what_was_promised(tmp_path):
    path = tmp_path / "o.jsonl"
    output = OutputFile(str(path))
    assert not path.exists(), "finding out whether it can be written must leave nothing"
    output.write(Prompt((7, 8, 9), SamplingParams(), line=4), 0, DONE)
    output.write_error(BadLine(6, "why"))
    # readable at once, before the file is closed
    first, second = map(json.loads, path.read_text().split("\n")[:2])
    assert first == {
        "index": 0,
        "line": 4,
        "text": "te\nxt\u2028",
        "token_ids": [1, 2],
        "finish_reason": "eos",
        "num_prompt_tokens": 3,
        "seed": None,
        "ttft_s": 0.5,
        "tpot_s": 0.25,
        "total_s": 0.75,
    }
    assert second == {"line": 6, "error": "why", "finish_reason": "error"}


def test_an_older_output_stays_until_there_is_a_new_one(tmp_path):
    path = tmp_path / "o.jsonl"
    path.write_text("old\n")
    output = OutputFile(str(path))
    assert path.read_text() == "old\n"
    output.write(Prompt((7,), SamplingParams(temperature=1.0)), 0, DONE)
    assert [json.loads(line)["seed"] for line in path.read_text().rstrip("\n").split("\n")] == [5]


@pytest.mark.parametrize("name", ["missing/o.jsonl", "."])
def test_a_path_that_cannot_be_written_is_found_before_the_work(tmp_path, name):
    with pytest.raises(boot.LaunchError, match="cannot write output="):
        OutputFile(str(tmp_path / name))


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_is_plain_lines_where_there_is_no_terminal():
    stream = io.StringIO()
    with console.Progress("prefill", 100, "tokens", stream) as progress:
        for value in (10, 20, 100, 100):
            progress.to(value)
    assert stream.getvalue() == "prefill 10/100 tokens\nprefill 100/100 tokens\n"


def test_a_terminal_gets_a_bar_and_no_color_is_honoured(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    for no_color, coloured in ((None, True), ("1", False)):
        if no_color is None:
            monkeypatch.delenv("NO_COLOR", raising=False)
        else:
            monkeypatch.setenv("NO_COLOR", no_color)
        stream = Terminal()
        with console.Progress("prefill", 100, "tokens", stream) as progress:
            progress.to(60)
        assert "60/100" in stream.getvalue()
        assert ("\x1b[38;5" in stream.getvalue() or "\x1b[3" in stream.getvalue()) is coloured


@pytest.mark.parametrize("make", [io.StringIO, Terminal])
def test_tables_hold_every_cell(make):
    stream = make()
    console.print_table("title", ["rank", "tokens"], [["0", "12"], ["1", "345"]], stream)
    for cell in ("title", "rank", "tokens", "12", "345"):
        assert cell in stream.getvalue()
    if make is io.StringIO:
        assert stream.getvalue() == "title\n  rank  tokens\n  0         12\n  1        345\n"


def test_bytes_are_written_for_people():
    assert [console.bytes_text(n) for n in (0, 1023, 1536, 90 * 2**20)] == ["0 B", "1023 B", "1.5 KiB", "90.0 MiB"]


def test_the_plan_says_what_fits(folder, capsys):
    options = ["model.dtype=float32", "cache.max_tokens=100000", "cache.memory_gb=0.025", f"model.path={folder}"]
    plan.report(configure(*options))
    out = capsys.readouterr().out
    # 2 layers x 2 (k, v) x 2 heads x 16 x 4 bytes
    assert "float32: 512 bytes of KV a token over all ranks; fits on 3 ranks" in out
    rows = {line.split()[1]: line.split()[-1] for line in out.splitlines() if line.startswith("  kvp")}
    assert rows["1"] == rows["2"] == "no"
    assert rows["4"] == rows["64"] == "yes"
    pays = {line.split()[1]: line.split()[-2] for line in out.splitlines() if line.startswith("  kvp")}
    # 3.5 us of merge are 3.5 x 4.56e6 bytes; of 256 a token and layer two ranks save half
    assert pays["1"] == "-"
    assert pays["2"] == str(int(3.5 * 4.56e6 * 2 / 256))
    with pytest.raises(ValueError, match=r"tp = 3 does not divide the 2 KV heads.*legal \(kvp, tp\): \(3, 1\)"):
        plan.report(configure(*options, "parallel.tp=3"))
