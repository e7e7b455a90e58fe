"""What a run reads and writes: the model folder, the prompts as token ids, and the file of outputs. Rank 0's part."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from distdec.config import Config
from distdec.engine import Completion
from distdec.request import Request, SamplingParams
from launch import assets
from launch.boot import LaunchError

_SAMPLING_FIELDS = {item.name for item in dataclasses.fields(SamplingParams)}


@dataclass(frozen=True)
class Prompt:
    """One prompt, ready to run. `line` is its line in prompts=FILE, else 0; `answer` what a passkey test expects."""

    token_ids: tuple[int, ...]
    sampling: SamplingParams
    line: int = 0
    answer: str | None = None


@dataclass(frozen=True)
class BadLine:
    """A prompt that cannot run, and why."""

    line: int
    reason: str


def model_folder(config: Config) -> Path:
    """Return the folder of the model, prepared if it is one that this project prepares.

    Raises:
        LaunchError: there is no such folder, or no model in it.
        AssetError: a package that the model is made from is missing.
    """
    if config.model.path is None:
        return assets.smollm2_folder()
    folder = Path(config.model.path).expanduser()
    if not folder.is_dir():
        raise LaunchError(f"there is no model folder {folder} (model.path)")
    if not (folder / "config.json").is_file():
        raise LaunchError(f"{folder} (model.path) holds no config.json: it is not a Hugging Face model folder")
    return folder


def read_prompts(config: Config, tokenizer: Any) -> tuple[list[Prompt], list[BadLine]]:
    """Return the prompts of a run and, with on_error=skip, the lines of prompts=FILE that cannot be read.

    Raises:
        ValueError, LaunchError: a prompt that cannot be read, or no prompt at all.
    """
    config.check_inputs()
    if config.workload.name == "passkey":
        load = config.workload
        text, key = assets.passkey_prompt(tokenizer, load.num_tokens, load.depth, load.seed)
        return [Prompt(_encode(tokenizer, text), config.sampling, answer=key)], []
    if config.prompts is not None:
        return _read_lines(config, tokenizer)
    text = config.prompt if config.prompt is not None else _read_text(config.prompt_file or "")
    if not text.strip():
        raise LaunchError(f"the prompt is empty: {config.prompt_file} (prompt_file) holds no text")
    content: Any = [{"role": "user", "content": text}] if config.chat else text
    return [Prompt(_encode(tokenizer, content), config.sampling)], []


def _read_text(path: str) -> str:
    try:
        # -sig: a byte order mark in front, as some editors write it, is not part of the text
        return _read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise LaunchError(f"cannot read {path}: {error}") from None


def _read_bytes(path: str) -> bytes:
    try:
        return Path(path).expanduser().read_bytes()
    except OSError as error:
        raise LaunchError(f"cannot read {path}: {error.strerror or error}") from None


def _read_lines(config: Config, tokenizer: Any) -> tuple[list[Prompt], list[BadLine]]:
    good: list[Prompt] = []
    bad: list[BadLine] = []
    path = config.prompts or ""
    # not splitlines(): U+2028 and its like are legal inside a JSON string. Decoded line by line: one bad byte is one
    # bad line
    for number, line in enumerate(_read_bytes(path).split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            good.append(_read_line(line.decode("utf-8-sig"), number, config, tokenizer))
        except ValueError as error:
            if config.on_error == "stop":
                raise LaunchError(f"{path} line {number}: {error}") from None
            bad.append(BadLine(number, str(error)))
    if not good:
        raise LaunchError(f"{path} holds no prompt that can run" + (f" ({bad[0].reason})" if bad else ""))
    return good, bad


def _read_line(line: str, number: int, config: Config, tokenizer: Any) -> Prompt:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise ValueError("lists and objects nested too deeply") from None
    if not isinstance(entry, dict):
        raise ValueError(f'expected an object with "prompt" or "messages", got {type(entry).__name__}')
    unknown = sorted(set(entry) - _SAMPLING_FIELDS - {"prompt", "messages"})
    if unknown:
        raise ValueError(
            f"unknown field {unknown[0]!r}; legal: prompt or messages, {', '.join(sorted(_SAMPLING_FIELDS))}"
        )
    if ("prompt" in entry) == ("messages" in entry):
        raise ValueError('give either "prompt" or "messages"')
    content = entry.get("prompt", entry.get("messages"))
    if not content or (isinstance(content, str) and not content.strip()):
        raise ValueError("the prompt is empty")
    if "messages" in entry and not isinstance(content, list):
        raise ValueError(f'"messages" is a list of {{"role": ..., "content": ...}}, got {type(content).__name__}')
    if "prompt" in entry and config.chat and isinstance(content, str):
        content = [{"role": "user", "content": content}]
    fields = {name: value for name, value in entry.items() if name in _SAMPLING_FIELDS}
    sampling = dataclasses.replace(config.sampling, **fields)
    return Prompt(_encode(tokenizer, content), sampling, line=number)


def _encode(tokenizer: Any, content: Any) -> tuple[int, ...]:
    """Return the token ids of a text, of chat messages through the model's template, or the ids themselves."""
    if isinstance(content, str):
        try:
            content.encode()
        except UnicodeEncodeError as error:
            # half of a surrogate pair, or a byte of the command line that is no UTF-8
            raise ValueError(f"the prompt is not valid text: {error.reason} at character {error.start}") from None
        return tuple(tokenizer(content)["input_ids"])
    if not isinstance(content, list):
        raise ValueError(f"a prompt is a text, messages or token ids, got {type(content).__name__}")
    if all(isinstance(i, int) and not isinstance(i, bool) for i in content):
        return tuple(content)
    for message in content:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise ValueError(f'each message needs "role" and "content", got {message!r}')
    if tokenizer.chat_template is None:
        raise ValueError("the model has no chat template; give plain prompts")
    try:
        return tuple(tokenizer.apply_chat_template(content, add_generation_prompt=True, return_dict=True)["input_ids"])
    except Exception as error:
        # templates raise errors of their own kinds about roles and their order
        raise ValueError(f"the model's chat template refuses the messages: {error}") from None


def keep_runnable(
    prompts: list[Prompt], check: Callable[[Request], None], on_error: str
) -> tuple[list[Prompt], list[BadLine]]:
    """Return the prompts whose requests `check` accepts, and why it refuses the others.

    Raises:
        LaunchError: a refusal, unless `on_error` is skip and other prompts are left.
    """
    reasons = [_refusal(check, Request(index, p.token_ids, p.sampling)) for index, p in enumerate(prompts)]
    bad = [BadLine(p.line, reason) for p, reason in zip(prompts, reasons, strict=True) if reason]
    if bad and (on_error == "stop" or len(bad) == len(prompts)):
        where = f"line {bad[0].line}: " if bad[0].line else ""
        raise LaunchError(where + bad[0].reason)
    return [p for p, reason in zip(prompts, reasons, strict=True) if not reason], bad


def _refusal(check: Callable[[Request], None], request: Request) -> str:
    try:
        check(request)
    except ValueError as error:
        return str(error).removeprefix(f"request {request.request_id}: ")
    return ""


class OutputFile:
    """JSON lines, one a request, written whole when the request ends. A file without any path writes nothing.

    Construction finds out whether the path can be written, and leaves it as it was; an older file is replaced when the
    first line is written. From then on the file is locked, so that two runs never mix their lines.

    Args:
        path: of the file; None: no file.
        inputs: files that this run reads, which it must not replace.

    Raises:
        LaunchError: the path cannot be written, is an input, or is another run's output.
    """

    def __init__(self, path: str | None, inputs: Sequence[str | None] = ()) -> None:
        self.path = None if path is None else Path(path).expanduser()
        self.count = 0
        self._file: TextIO | None = None
        if self.path is not None:
            existed = self.path.exists()
            if existed and any(name and self.path.samefile(Path(name).expanduser()) for name in inputs):
                raise LaunchError(f"output={self.path} is the file that the prompts are read from")
            self._open().close()
            if not existed:
                self.path.unlink()

    def write(self, prompt: Prompt, index: int, done: Completion) -> None:
        """Write one request's line and hand it to the operating system at once."""
        record = {
            "index": index,
            **({"line": prompt.line} if prompt.line else {}),
            "text": done.text,
            "token_ids": list(done.token_ids),
            "finish_reason": done.finish_reason.value,
            "num_prompt_tokens": len(prompt.token_ids),
            "seed": None if prompt.sampling.greedy else done.seed,
            "ttft_s": round(done.ttft_s, 6),
            "tpot_s": round(done.tpot_s, 6),
            "total_s": round(done.total_s, 6),
        }
        self._write(record)

    def write_error(self, bad: BadLine) -> None:
        """Write the line of a prompt that was skipped."""
        self._write({"line": bad.line, "error": bad.reason, "finish_reason": "error"})

    def _write(self, record: dict[str, Any]) -> None:
        if self.path is None:
            return
        try:
            if self._file is None:
                self._file = self._open()
                if self.path.is_file():
                    self._file.truncate(0)
            # one write a line: whatever ends the process, no line is torn
            self._file.write(json.dumps(record, ensure_ascii=False) + "\n")
            self._file.flush()
        except OSError as error:
            reason = error.strerror or error
            raise LaunchError(f"cannot write output={self.path} after {self.count} lines: {reason}") from None
        self.count += 1

    def _open(self) -> TextIO:
        """Open the file for appending, locked; nothing is written or removed."""
        assert self.path is not None, "called where there is a path"
        try:
            file = self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise LaunchError(f"cannot write output={self.path}: {error.strerror or error}") from None
        if not self.path.is_file():
            # a device or a pipe may have several writers
            return file
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise LaunchError(f"output={self.path} is being written by another run") from None
        except OSError:
            # a file system without locks
            pass
        return file

    def close(self) -> None:
        """Close the file, if it was ever opened."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
