"""The vocabulary of a run: what a user asks for, and what one step does about it. Integers and strings only, no torch.

A `StepPlan` is decided by rank 0 and travels to the other ranks as a list of integers: `encode()` and `decode()` are
the whole wire format, with a version and a checksum in front, because a mismatched broadcast corrupts silently.
"""

import array
import operator
import struct
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from functools import cached_property
from numbers import Integral
from typing import NamedTuple

MAGIC = 0x64697374646563  # "distdec" in ASCII
VERSION = 6
PENDING = -1
"""Token id of a row whose token is not known yet: the one that the step before chooses, on the device."""
GREEDY_TEMPERATURE = 1e-5  # dividing logits by less overflows float32 to NaN; such a temperature means greedy


def _help(text: str) -> dict[str, str]:
    return {"help": text}


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends.

    Raises:
        ValueError: a value is out of range or NaN; the message names the field, the value and the legal range.
    """

    max_new_tokens: int = field(default=64, metadata=_help("most tokens to generate, at least 1"))
    temperature: float = field(default=0.0, metadata=_help("0 (or less than 1e-5) is greedy; higher is more random"))
    top_k: int = field(default=0, metadata=_help("sample among the k likeliest tokens; 0 is off"))
    top_p: float = field(
        default=1.0, metadata=_help("sample among the likeliest tokens of this total probability; 1 is off")
    )
    min_p: float = field(
        default=0.0, metadata=_help("drop tokens below this share of the likeliest one's probability; 0 is off")
    )
    repetition_penalty: float = field(
        default=1.0, metadata=_help("divide positive (multiply negative) logits of tokens already seen; 1 is off")
    )
    seed: int | None = field(default=None, metadata=_help("seed of the draws; null draws one and reports it"))
    stop: tuple[str, ...] = field(default=(), metadata=_help("strings that end the text; not part of the output"))
    ignore_eos: bool = field(default=False, metadata=_help("go on after the model's end-of-sequence token"))

    def __post_init__(self) -> None:
        _check_int("max_new_tokens", self.max_new_tokens, 1, None)
        _check_float("temperature", self.temperature, 0.0, None)
        _check_int("top_k", self.top_k, 0, None)
        _check_float("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        _check_float("repetition_penalty", self.repetition_penalty, 0.0, None, open_low=True)
        if self.seed is not None:
            _check_int("seed", self.seed, 0, 2**63 - 1)
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, (list, tuple)) or any(not isinstance(text, str) or not text for text in stop):
            raise ValueError(f"stop must be strings that are not empty, got {self.stop!r}")
        object.__setattr__(self, "stop", tuple(stop))
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos must be true or false, got {self.ignore_eos!r}")

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE


@dataclass(frozen=True)
class Request:
    """One prompt with its sampling parameters; `request_id` is unique for the lifetime of an engine.

    Attributes:
        priority: lower is served first; equal ones in order of arrival. See `scheduler.priority_ageing_s`.
        timeout_s: seconds from its arrival after which it is ended wherever it stands; None: never.
    """

    request_id: int
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        try:
            # not int(): "12" would be the tokens 1 and 2, and 1.7 the token 1
            ids = tuple(map(operator.index, self.prompt_ids))
        except TypeError as error:
            raise ValueError(f"request {self.request_id}: the prompt is a row of token ids: {error}") from None
        if not ids:
            raise ValueError(f"request {self.request_id}: the prompt is empty; it needs at least one token")
        object.__setattr__(self, "prompt_ids", ids)
        _check_int(f"request {self.request_id}: priority", self.priority, -1000, 1000)
        if self.timeout_s is not None:
            _check_float(f"request {self.request_id}: timeout_s", self.timeout_s, 0.0, None, open_low=True)

    @property
    def max_tokens(self) -> int:
        """Most tokens whose KV this request stores. The last generated token is never fed back."""
        return len(self.prompt_ids) + self.sampling.max_new_tokens - 1

    def check(self, vocab_size: int, max_positions: int) -> None:
        """Refuse what the model cannot run.

        Raises:
            ValueError: a token id outside the vocabulary, or prompt + max_new_tokens over the model's positions.
        """
        low, high = min(self.prompt_ids), max(self.prompt_ids)
        if low < 0 or high >= vocab_size:
            bad = low if low < 0 else high
            raise ValueError(
                f"request {self.request_id}: token id {bad} is outside the vocabulary (legal: 0 to {vocab_size - 1})"
            )
        total = len(self.prompt_ids) + self.sampling.max_new_tokens
        if total > max_positions:
            raise ValueError(
                f"request {self.request_id}: prompt ({len(self.prompt_ids)}) + max_new_tokens "
                f"({self.sampling.max_new_tokens}) = {total} tokens, over the model's limit of {max_positions}"
            )


class FinishReason(str, Enum):
    """Why a request ended."""

    LENGTH = "length"
    EOS = "eos"
    STOP = "stop"
    NUMERICS = "numerics"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"


class Row(NamedTuple):
    """One request's share of a step: `token_ids` at global positions `start, start + 1, ...` of its own sequence.

    A single `PENDING` stands for a token that the step before still has to choose. The last `num_drafts` tokens of a
    speculative row are guesses, which the logits of the tokens before them confirm or not.
    """

    request_id: int
    start: int
    token_ids: tuple[int, ...]
    needs_logits: bool
    num_drafts: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def drafts(self) -> tuple[int, ...]:
        return self.token_ids[len(self.token_ids) - self.num_drafts :]

    @property
    def num_logits(self) -> int:
        """Of its last tokens, how many need logits."""
        return 1 + self.num_drafts if self.needs_logits else 0


class PlanKind(IntEnum):
    """What the ranks do with a plan. HOLD: nothing; the step that is under way has to end first."""

    RUN = 0
    DONE = 1
    FAIL = 2
    HOLD = 3


@dataclass(frozen=True)
class Hit:
    """Where an admitted request starts: behind the cached page with this key, of 32 bytes."""

    request_id: int
    key: bytes

    def words(self) -> list[int]:
        """Return the request and the key as five integers."""
        return [self.request_id, *struct.unpack("<4q", self.key)]


@dataclass(frozen=True)
class StepPlan:
    """What every rank does in one step, in this order: keep, free, admit, reserve the rows' tokens, run the rows.

    Rows of one token that need logits come first (decode rows), then the same with drafts behind (speculative rows),
    then prefill slices. `kept` names each speculative row of the step before with the length that its sequence keeps.
    `withdraw` names those of `free` whose cached pages nobody shall find again; `hits` those of `admit` that start on
    cached pages. `offload` names those of `free` whose keys and values go to host memory, `restore` those of `admit`
    that come back from there.

    Where a plan is `followed`, another one comes before this one's tokens are read. It is `pending`: it has the same
    rows, one token further on, as `again` makes them; or it is a HOLD. The plan after it tells in `late` what those
    tokens were.
    """

    step: int
    kind: PlanKind = PlanKind.RUN
    free: tuple[int, ...] = ()
    admit: tuple[int, ...] = ()
    rows: tuple[Row, ...] = ()
    withdraw: tuple[int, ...] = ()
    hits: tuple[Hit, ...] = ()
    followed: bool = False
    late: tuple[int, ...] = ()
    offload: tuple[int, ...] = ()
    restore: tuple[int, ...] = ()
    kept: tuple[tuple[int, int], ...] = ()
    pending: bool = False

    def again(self) -> tuple[Row, ...]:
        """Return the rows of the plan behind this followed one, whose tokens this one's step chooses."""
        tokens = (PENDING,)
        return tuple([Row(row[0], row[1] + 1, tokens, True) for row in self.rows])

    @cached_property
    def num_tokens(self) -> int:
        return sum([len(row.token_ids) for row in self.rows])

    @cached_property
    def num_decode(self) -> int:
        """Leading rows that run as decode rows: those, speculative ones, and without any a slice of one token too."""
        if self.pending:
            return len(self.rows)
        count = single = 0
        for at, row in enumerate(self.rows, 1):
            if row.num_drafts:
                count = at
            elif single == at - 1 and len(row.token_ids) == 1:
                single = at
        return count or single

    @cached_property
    def q_len(self) -> int:
        """Tokens of the longest of these; the others are filled up to it."""
        return max([len(row.token_ids) for row in self.rows[: self.num_decode]], default=1)

    @cached_property
    def decode_only(self) -> bool:
        """Whether there are rows, and all of them are decode rows or speculative rows."""
        decode = bool(self.rows) and self.num_decode == len(self.rows)
        return self.pending or (decode and all(row.needs_logits for row in self.rows))

    def encode(self) -> list[int]:
        """Return the plan as integers: magic, version, checksum, then the fields, each list after its length.

        The rows of a pending plan are not told, but for -1 in place of their number: every rank has the plan before.

        Example: a decode row (request 7, position 12, token 99) alone in step 3 encodes, after the three header
        words, as `[3, 0, 0, 0, 1, 7, 12, 1, 0, 1, 99, 0, 0, 0, 0, 0, 0, 0]`.
        """
        body = [self.step, int(self.kind), len(self.free), *self.free, len(self.admit), *self.admit]
        body.append(-1 if self.pending else len(self.rows))
        for request_id, start, token_ids, needs_logits, num_drafts in () if self.pending else self.rows:
            body += (request_id, start, int(needs_logits), num_drafts, len(token_ids))
            body += token_ids
        body += [len(self.withdraw), *self.withdraw, len(self.hits)]
        for hit in self.hits:
            body += hit.words()
        body += [int(self.followed), len(self.late), *self.late]
        body += [len(self.offload), *self.offload, len(self.restore), *self.restore]
        body += [len(self.kept), *[word for pair in self.kept for word in pair]]
        return [MAGIC, VERSION, _checksum(body), *body]

    @classmethod
    def decode(cls, words: Sequence[int], before: "StepPlan | None" = None) -> "StepPlan":
        """Rebuild a plan from `encode()`'s integers.

        Args:
            words: the integers.
            before: the followed plan that a pending one comes behind.

        Raises:
            ValueError: not a plan, another version, damaged on the way, or a pending plan without one before.
        """
        if len(words) < 3 or words[0] != MAGIC:
            raise ValueError("the integers received are not a step plan: the ranks are out of step")
        if words[1] != VERSION:
            raise ValueError(f"step plan of version {words[1]}, this rank reads version {VERSION}")
        body = list(words[3:])
        if _checksum(body) != words[2]:
            raise ValueError("step plan damaged on the way: its checksum differs")
        reader = _Reader(body)
        step, kind = reader.take(2)
        free = reader.take(reader.one())
        admit = reader.take(reader.one())
        num_rows = reader.one()
        if num_rows < 0 and before is None:
            raise ValueError("a pending step plan without the one before: the ranks are out of step")
        rows = list(before.again()) if num_rows < 0 and before is not None else []
        for _ in range(num_rows):
            request_id, start, needs_logits, num_drafts, num_tokens = reader.take(5)
            rows.append(Row(request_id, start, reader.take(num_tokens), bool(needs_logits), num_drafts))
        withdraw = reader.take(reader.one())
        hits = []
        for _ in range(reader.one()):
            request_id, *words = reader.take(5)
            hits.append(Hit(request_id, struct.pack("<4q", *words)))
        followed, late = bool(reader.one()), reader.take(reader.one())
        offload, restore = reader.take(reader.one()), reader.take(reader.one())
        kept = tuple([(reader.one(), reader.one()) for _ in range(reader.one())])
        if not reader.at_end:
            raise ValueError("step plan longer than its own lengths say")
        told = (tuple(rows), withdraw, tuple(hits), followed, late, offload, restore, kept, num_rows < 0)
        return cls(step, PlanKind(kind), free, admit, *told)


class _Reader:
    def __init__(self, words: list[int]) -> None:
        self.words, self.at = words, 0

    def take(self, count: int) -> tuple[int, ...]:
        if count < 0 or self.at + count > len(self.words):
            raise ValueError("step plan shorter than its own lengths say")
        self.at += count
        return tuple(self.words[self.at - count : self.at])

    def one(self) -> int:
        return self.take(1)[0]

    @property
    def at_end(self) -> bool:
        return self.at == len(self.words)


def _checksum(words: Sequence[int]) -> int:
    return zlib.crc32(array.array("q", words).tobytes())


def _check_int(name: str, value: object, low: int, high: int | None) -> None:
    legal = f"at least {low}" if high is None else f"{low} to {high}"
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(f"{name} must be a whole number, {legal}, got {value!r}")
    if int(value) < low or (high is not None and int(value) > high):
        raise ValueError(f"{name} must be {legal}, got {value}")


def _check_float(name: str, value: object, low: float, high: float | None, open_low: bool = False) -> None:
    bound = f"more than {low:g}" if open_low else f"at least {low:g}"
    legal = f"a finite number, {bound}" + ("" if high is None else f" and at most {high:g}")
    # not math.isfinite: that fails on an integer beyond the floats, which JSON may hold
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:
        raise ValueError(f"{name} must be {legal}, got {value!r}")
    if value < low or (open_low and value == low) or (high is not None and value > high):
        raise ValueError(f"{name} must be {legal}, got {value!r}")
