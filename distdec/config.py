"""The configuration of a run: frozen dataclasses with every check that needs no model. No torch, no Hydra.

`launch/boot.py` registers these classes as Hydra schemas and prints their help texts; a program of one's own builds
them directly. A default is written here once; the YAML options under conf/ only say where they differ.
"""

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field

from distdec.config_keys import flatten
from distdec.degrees import validate_layout
from distdec.request import SamplingParams, _check_float, _check_int, _help

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")
QUERY_MODES = ("auto", "replicate", "gather")
EXPERT_MODES = ("auto", "width", "expert")
MERGE_TRANSPORTS = ("float32", "bfloat16", "float8_e4m3")
MERGE_MODES = ("auto", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "one_shot", "one_shot_scatter")
# one way for every size of a step, partials folded in rank order; each output form has one
DETERMINISTIC_MERGES = ("all_gather", "all_to_all")
REDUCE_MODES = ("auto", "nccl", "one_shot")
OVERLAPS = ("none", "store", "fetch", "both")
BACKENDS = ("auto", "reference", "triton")
SWITCH = ("auto", "on", "off")
MODELS = ("smollm2", "path")
WORKLOADS = ("prompt", "passkey", "jsonl")
ON_ERROR = ("stop", "skip")
MAX_CHUNK_FRAMES = 8
# a decode row holds 16 tokens at most, the pending one among them
MAX_DRAFT_TOKENS = 15
# beyond any use, and still exact in the integers they become
MAX_TIMEOUT_S = 1e6
# ranks of one host meet within it; a shorter one ends in the middle of the libraries' own start
MIN_TIMEOUT_S = 1.0
MAX_MEMORY_GB = 1e6


def _one_of(name: str, value: object, legal: tuple[str, ...]) -> None:
    if value not in legal:
        raise ValueError(f"{name} must be one of {', '.join(legal)}, got {value!r}")


@dataclass(frozen=True)
class ModelConfig:
    """Which model, in which dtype, on which device."""

    name: str = field(
        default="smollm2", metadata=_help("smollm2: the small model of the quickstart; path: the folder model.path")
    )
    path: str | None = field(
        default=None, metadata=_help("folder of any Hugging Face causal language model; wins over model.name")
    )
    dtype: str = field(default="auto", metadata=_help(f"{', '.join(DTYPES)}; auto: bfloat16 on cuda, float32 on cpu"))
    device: str = field(default="auto", metadata=_help("auto (cuda where there is one), cpu or cuda"))

    def __post_init__(self) -> None:
        _one_of("model.name", self.name, MODELS)
        _one_of("model.dtype", self.dtype, DTYPES)
        _one_of("model.device", self.device, DEVICES)
        if self.name == "path" and not self.path:
            raise ValueError("model=path needs the folder: model.path=FOLDER")


@dataclass(frozen=True)
class ParallelConfig:
    """How the ranks are arranged: world = kvp x tp."""

    kvp: int = field(
        default=0, metadata=_help("ranks along which one sequence's tokens are sharded; 0: world size / tp")
    )
    tp: int = field(default=1, metadata=_help("ranks along which the heads are sharded; divides the KV heads"))
    merge: str = field(
        default="auto", metadata=_help(f"how partial attention is merged across ranks: {', '.join(MERGE_MODES)}")
    )
    transport: str = field(
        default="float32",
        metadata=_help(f"number format between ranks: {', '.join(MERGE_TRANSPORTS)}; the last two round outputs"),
    )
    reduce: str = field(
        default="auto",
        metadata=_help(
            "sums of a layer's parts over all ranks: nccl (gloo on cpu), one_shot: small ones in one kernel, or auto: "
            "that where the GPUs reach each other"
        ),
    )
    overlap: str = field(
        default="store",
        metadata=_help(
            "what a decode step does while messages are on their way: none; store: a row's new token is attended to "
            "apart from the older ones, and stored by the kernel that joins and merges the partials; fetch: kernels "
            "that wait for other ranks ask the GPU's cache for the weight that is read next; both"
        ),
    )
    queries: str = field(
        default="auto",
        metadata=_help(
            "query projection: replicate on the kvp ranks, gather from them, or auto: the faster by estimate"
        ),
    )
    experts: str = field(
        default="auto",
        metadata=_help("mixtures of experts: a rank holds a part of each one's width, or an expert whole; auto"),
    )
    timeout_s: float = field(
        default=120.0, metadata=_help("seconds after which a collective that waits on a lost rank fails, 1 or more")
    )

    def __post_init__(self) -> None:
        _check_int("parallel.kvp", self.kvp, 0, None)
        _check_int("parallel.tp", self.tp, 1, None)
        _one_of("parallel.merge", self.merge, MERGE_MODES)
        _one_of("parallel.transport", self.transport, MERGE_TRANSPORTS)
        if self.transport == "float8_e4m3" and self.merge in ("all_reduce", "reduce_scatter"):
            legal = [mode for mode in MERGE_MODES if mode not in ("all_reduce", "reduce_scatter")]
            raise ValueError(f"parallel.transport=float8_e4m3 goes with parallel.merge {', '.join(legal)}")
        _one_of("parallel.reduce", self.reduce, REDUCE_MODES)
        _one_of("parallel.overlap", self.overlap, OVERLAPS)
        _one_of("parallel.queries", self.queries, QUERY_MODES)
        _one_of("parallel.experts", self.experts, EXPERT_MODES)
        _check_float("parallel.timeout_s", self.timeout_s, MIN_TIMEOUT_S, MAX_TIMEOUT_S)

    def resolve(self, world_size: int) -> tuple[int, int]:
        """Return (kvp, tp) for a world of `world_size` ranks.

        Raises:
            ValueError: kvp x tp is not the world size; the message holds all three numbers, and the legal layouts.
        """
        kvp = self.kvp or max(1, world_size // self.tp)
        try:
            validate_layout(world_size, kvp, self.tp)
        except ValueError as fault:
            wanted = kvp * self.tp
            raise ValueError(
                f"parallel.kvp={kvp} x parallel.tp={self.tp} = {wanted} ranks, but {world_size} were started: "
                f"start {wanted} (torchrun --standalone --nproc-per-node {wanted}) or set kvp x tp = {world_size}: "
                f"{fault}"
            ) from None
        return kvp, self.tp


@dataclass(frozen=True)
class CacheConfig:
    """Size and granularity of the sharded KV cache."""

    max_tokens: int = field(
        default=0,
        metadata=_help("tokens the cache holds over all ranks; 0: as memory_gb allows, or what the run needs"),
    )
    memory_gb: float = field(
        default=0.0,
        metadata=_help("GiB of KV a rank may hold; 0: what the run needs, within memory_fraction of free memory"),
    )
    memory_fraction: float = field(
        default=0.9,
        metadata=_help("share of what is free beside the weights for cache, largest step and graphs"),
    )
    min_chunk: int = field(default=128, metadata=_help("tokens of a frame, the unit of allocation; a power of two"))
    max_chunk: int = field(default=1024, metadata=_help("tokens of the longest chunk: min_chunk times 1, 2, 4 or 8"))
    page_size: int = field(default=16, metadata=_help("tokens of a page, the unit of prefix hits; divides min_chunk"))
    shard_min_tokens: int = field(
        default=0, metadata=_help("sequences up to this length stay on one rank; 0 shards every sequence")
    )
    prefix_caching: bool = field(
        default=True, metadata=_help("start a prompt on the pages of its longest prefix that is still in the cache")
    )
    host_gb: float = field(
        default=0.0,
        metadata=_help(
            "GiB of host memory a rank takes for the KV of preempted requests, kept there where moving it takes less "
            "time than to compute it again; 0: off"
        ),
    )
    weights: tuple[int, ...] | None = field(
        default=None, metadata=_help("share of the tokens each kvp rank takes, one integer a rank; null: even")
    )

    def __post_init__(self) -> None:
        _check_int("cache.max_tokens", self.max_tokens, 0, None)
        _check_float("cache.memory_gb", self.memory_gb, 0.0, MAX_MEMORY_GB)
        _check_float("cache.host_gb", self.host_gb, 0.0, MAX_MEMORY_GB)
        _check_float("cache.memory_fraction", self.memory_fraction, 0.0, 1.0, open_low=True)
        _check_int("cache.min_chunk", self.min_chunk, 1, None)
        _check_int("cache.page_size", self.page_size, 1, None)
        _check_int("cache.shard_min_tokens", self.shard_min_tokens, 0, None)
        if not isinstance(self.prefix_caching, bool):
            raise ValueError(f"cache.prefix_caching must be true or false, got {self.prefix_caching!r}")
        if self.min_chunk & (self.min_chunk - 1):
            raise ValueError(f"cache.min_chunk must be a power of two, got {self.min_chunk}")
        legal = [self.min_chunk << i for i in range(MAX_CHUNK_FRAMES.bit_length())]
        if self.max_chunk not in legal:
            raise ValueError(f"cache.max_chunk must be one of {legal} (min_chunk x 1, 2, 4, 8), got {self.max_chunk}")
        if self.min_chunk % self.page_size:
            raise ValueError(f"cache.page_size={self.page_size} must divide cache.min_chunk={self.min_chunk}")
        if self.weights is not None:
            weights = tuple(self.weights)
            for weight in weights:
                _check_int("cache.weights", weight, 1, None)
            object.__setattr__(self, "weights", weights)


@dataclass(frozen=True)
class SchedulerConfig:
    """How much one step does."""

    prefill_slice: int = field(
        default=512, metadata=_help("tokens of a prompt run in one step; bounds the activations of prefill")
    )
    token_budget: int = field(
        default=1024, metadata=_help("tokens of all rows of a step together; decode rows come first")
    )
    max_rows: int = field(default=64, metadata=_help("requests that run at the same time"))
    max_pending_prefills: int = field(
        default=4, metadata=_help("prompts under way at the same time; more finish later, all together")
    )
    decode_deadline_ms: float = field(
        default=50.0,
        metadata=_help("slices of prompts shrink or wait when decode rows would take longer than this; 0: they do not"),
    )
    lookahead: bool = field(
        default=True,
        metadata=_help("launch greedy decode steps before the tokens of the one before are read, so that none waits"),
    )
    num_draft_tokens: int = field(
        default=0,
        metadata=_help(
            f"most tokens guessed for a request and checked in one step, up to {MAX_DRAFT_TOKENS}; 0: none. Turns "
            "lookahead off"
        ),
    )
    ngram_min: int = field(
        default=2, metadata=_help("drafts follow an earlier place of at least so many of the last tokens")
    )
    ngram_max: int = field(default=4, metadata=_help("of such places that of the longest match counts, up to this"))
    reserve_tokens: int = field(
        default=256,
        metadata=_help("tokens a running request may still grow by when another is admitted; beyond, it is preempted"),
    )
    priority_ageing_s: float = field(
        default=30.0,
        metadata=_help("a request of priority p is overtaken by priority 0 for p times this long; nobody starves"),
    )

    def __post_init__(self) -> None:
        _check_int("scheduler.prefill_slice", self.prefill_slice, 1, None)
        _check_int("scheduler.token_budget", self.token_budget, 1, None)
        _check_int("scheduler.max_rows", self.max_rows, 1, None)
        _check_int("scheduler.max_pending_prefills", self.max_pending_prefills, 1, None)
        _check_float("scheduler.decode_deadline_ms", self.decode_deadline_ms, 0.0, None)
        if not isinstance(self.lookahead, bool):
            raise ValueError(f"scheduler.lookahead must be true or false, got {self.lookahead!r}")
        _check_int("scheduler.num_draft_tokens", self.num_draft_tokens, 0, MAX_DRAFT_TOKENS)
        _check_int("scheduler.ngram_min", self.ngram_min, 1, None)
        _check_int("scheduler.ngram_max", self.ngram_max, 1, None)
        if self.ngram_max < self.ngram_min:
            raise ValueError(
                f"scheduler.ngram_max must be at least scheduler.ngram_min={self.ngram_min}, got {self.ngram_max}"
            )
        _check_int("scheduler.reserve_tokens", self.reserve_tokens, 0, None)
        _check_float("scheduler.priority_ageing_s", self.priority_ageing_s, 0.0, None, open_low=True)
        if self.max_rows > self.token_budget:
            raise ValueError(
                f"scheduler.max_rows={self.max_rows} decode rows need a scheduler.token_budget of at least as many "
                f"tokens, got {self.token_budget}"
            )


@dataclass(frozen=True)
class BackendConfig:
    """Which kernels compute local attention, and how steps are launched."""

    name: str = field(
        default="auto",
        metadata=_help("auto: triton on cuda, reference on cpu; reference: PyTorch; triton: the kernels"),
    )
    graphs: str = field(
        default="auto",
        metadata=_help("steps as CUDA graphs, captured at the start: auto (on cuda), on, off"),
    )
    compile: str = field(
        default="auto",
        metadata=_help(
            "the model's layers through torch.compile, some 10 s at the first start: auto (on cuda), on, off"
        ),
    )
    deterministic: bool = field(
        default=False,
        metadata=_help(
            "attention of a decode row has the same bits whatever rows share its steps; prefixes are then shared in "
            f"whole frames, parallel.merge is {' or '.join(DETERMINISTIC_MERGES)}, and parallel.overlap does not store"
        ),
    )

    def __post_init__(self) -> None:
        _one_of("backend.graphs", self.graphs, SWITCH)
        _one_of("backend.compile", self.compile, SWITCH)
        if not isinstance(self.deterministic, bool):
            raise ValueError(f"backend.deterministic must be true or false, got {self.deterministic!r}")
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"backend.name must name a backend ({', '.join(BACKENDS)}), got {self.name!r}")


@dataclass(frozen=True)
class WorkloadConfig:
    """Where the prompts come from."""

    name: str = field(
        default="prompt",
        metadata=_help(
            "prompt: prompt=, prompt_file= or prompts=; jsonl: prompts=; passkey: a key hidden in a long text"
        ),
    )
    num_tokens: int = field(default=4096, metadata=_help("passkey: length of the prompt in tokens"))
    depth: float = field(default=0.5, metadata=_help("passkey: where the key is hidden, 0 (start) to 1 (end)"))
    seed: int = field(default=0, metadata=_help("passkey: seed of the key and of the place in the text"))

    def __post_init__(self) -> None:
        _one_of("workload.name", self.name, WORKLOADS)
        _check_int("workload.num_tokens", self.num_tokens, 1, None)
        _check_float("workload.depth", self.depth, 0.0, 1.0)
        _check_int("workload.seed", self.seed, 0, None)


@dataclass(frozen=True)
class Config(SamplingParams):
    """A whole run of launch/generate.py. The sampling parameters are keys of their own: `max_new_tokens=64`.

    Raises:
        ValueError: sections that contradict each other, with the values and what is legal.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    backend: BackendConfig = field(default_factory=BackendConfig)
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    prompt: str | None = field(default=None, metadata=_help("the prompt itself"))
    prompt_file: str | None = field(default=None, metadata=_help("file whose text is the prompt"))
    prompts: str | None = field(
        default=None,
        metadata=_help('JSON lines, one request each: {"prompt": ...} or {"messages": [...]}, and sampling parameters'),
    )
    chat: bool = field(default=False, metadata=_help("put a plain prompt through the model's chat template"))
    output: str | None = field(
        default=None, metadata=_help("JSON lines file for text, token ids, finish reason and timings of each request")
    )
    on_error: str = field(
        default="stop", metadata=_help("a request that cannot run: stop ends the run, skip reports it and goes on")
    )
    parity: bool = field(
        default=False, metadata=_help("compare the tokens with single-process transformers (eager), really run after")
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _one_of("on_error", self.on_error, ON_ERROR)
        if self.backend.deterministic and self.parallel.merge not in ("auto", *DETERMINISTIC_MERGES):
            legal = ", ".join(("auto", *DETERMINISTIC_MERGES))
            raise ValueError(f"backend.deterministic goes with parallel.merge {legal}, got {self.parallel.merge!r}")
        drafts = self.scheduler.num_draft_tokens
        if self.backend.deterministic and drafts and self.cache.prefix_caching:
            # dropped from a chunk that others share, they leave a view that begins inside a frame
            raise ValueError(
                f"backend.deterministic with scheduler.num_draft_tokens={drafts} needs cache.prefix_caching=false"
            )
        inputs = {"prompt": self.prompt, "prompt_file": self.prompt_file, "prompts": self.prompts}
        given = [f"{name}=" for name, value in inputs.items() if value is not None]
        if len(given) > 1:
            raise ValueError(f"give one of prompt=, prompt_file= and prompts=, got {' and '.join(given)}")
        if self.workload.name == "passkey" and given:
            raise ValueError(f"workload=passkey makes its own prompt; drop {given[0]} or use workload=prompt")
        if self.workload.name == "jsonl" and self.prompts is None:
            raise ValueError("workload=jsonl needs prompts=FILE.jsonl")

    @property
    def sampling(self) -> SamplingParams:
        """The sampling parameters of requests that bring none of their own."""
        return SamplingParams(**{item.name: getattr(self, item.name) for item in dataclasses.fields(SamplingParams)})

    def check_inputs(self) -> None:
        """Refuse a run without a prompt. Apart from the other checks, since other programs use the config without one.

        Raises:
            ValueError: no input at all, or an empty prompt.
        """
        if self.workload.name == "prompt" and self.prompt is None and self.prompt_file is None and self.prompts is None:
            raise ValueError("no prompt: give prompt=TEXT, prompt_file=FILE, prompts=FILE.jsonl or workload=passkey")
        if self.prompt is not None and not self.prompt.strip():
            raise ValueError("the prompt is empty: prompt= needs some text")

    def digests(self) -> dict[str, bytes]:
        """Return a 32-byte digest of each key, equal on two ranks exactly when the key's value is.

        Kept by key, so that a start with different configs can name what differs.
        """
        return {key: hashlib.sha256(json.dumps(value).encode()).digest() for key, value in flatten(self)}
