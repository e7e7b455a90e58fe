"""Markdown tables and the goals' check from benchmark records; every figure in a report comes through here."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

Record = dict[str, Any]


def load(paths: Iterable[str | Path]) -> list[Record]:
    """Read JSONL files in order; of records of the same point and variant the last one stays."""
    kept: dict[str, Record] = {}
    for path in paths:
        for line in Path(path).read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            kept[identity(record)] = record
    return list(kept.values())


def identity(record: Record) -> str:
    """Return what tells a point and variant from all others; eager and replayed times are different points."""
    parts = [record.get(key) for key in ("script", "section", "name", "config", "ranks", "tables")]
    return json.dumps(parts, sort_keys=True)


def select(records: list[Record], script: str, section: str, status: str = "ok") -> list[Record]:
    """Return the records of one section with one status."""
    wanted = (script, section, status)
    return [record for record in records if (record["script"], record["section"], record["status"]) == wanted]


def markdown(header: list[str], rows: list[list[Any]]) -> str:
    """Return a markdown table; numbers get as many digits as they deserve."""

    def cell(value: Any) -> str:
        if value is None:
            return "-"
        if isinstance(value, float):
            return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.3g}"
        return str(value)

    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(cell(value) for value in row) + " |" for row in rows]
    return "\n".join(lines)


def pivot(records: list[Record], keys: list[str], value: str = "median_us") -> str:
    """Return a table of points (by config keys) against variants, `value` in the cells, ceiling last."""
    names = list(dict.fromkeys(record["name"] for record in records))
    points: dict[tuple[Any, ...], dict[str, Any]] = {}
    for record in records:
        point = tuple(record["config"].get(key) for key in keys)
        row = points.setdefault(point, {})
        row[record["name"]] = record.get(value)
        if "ceiling_us" in record and value == "median_us":
            row["read ceiling"] = record["ceiling_us"]
    if any("read ceiling" in row for row in points.values()):
        names.append("read ceiling")
    ordered = sorted(points.items(), key=lambda item: tuple((isinstance(x, str), x or 0) for x in item[0]))
    return markdown([*keys, *names], [[*point, *(row.get(name) for name in names)] for point, row in ordered])


def comparison(records: list[Record]) -> str:
    """Return ours against the fastest peer and the read ceiling, one line a point of bench_compare's grid."""
    rows = []
    for record in records:
        if record["name"] not in ("decode", "attention layer"):
            continue
        config = record["config"]
        rows.append(
            [
                config["num_q_heads"],
                config["batch"],
                config["context"],
                config["kv_mb"],
                record["name"],
                record["median_us"],
                record.get("share_of_ceiling"),
                record.get("baseline"),
                record.get("time_over_baseline"),
            ]
        )
    rows.sort(key=lambda row: (row[4], row[0], row[1], str(row[2]).zfill(9)))
    header = ["Hq", "B", "context", "KV MB", "ours", "us", "of ceiling", "fastest peer", "time / peer"]
    return markdown(header, rows)


class Section(NamedTuple):
    """How one section of one script is shown."""

    title: str
    script: str
    section: str
    keys: list[str]
    value: str = "median_us"


POINT = ("batch", "context", "prompt", "prefill_slice", "max_pending_prefills", "decode_deadline_ms", "shared")
TPOT = ["model", "layout", "batch", "context", "compile"]

SECTIONS = [
    Section("Decode, uniform batches, us", "bench_compare", "grid", ["num_q_heads", "batch", "context", "kv_mb"]),
    Section("Decode beside FlexAttention, us", "bench_compare", "flex", ["num_q_heads", "batch", "context"]),
    Section("Decode, ragged batch, us", "bench_compare", "ragged", ["num_q_heads", "batch", "kv_mb"]),
    Section("Host, us an eager call", "bench_compare", "host", ["batch", "context"]),
    Section("Decode op over the grid, us", "bench_ops", "grid", ["batch", "context", "kv_mb"]),
    Section("Decode op, ragged, us", "bench_ops", "ragged", ["batch", "kv_mb"]),
    Section("Chunk size, us", "bench_ops", "chunks", ["batch", "context"]),
    Section("Tokens a split, us", "bench_ops", "splits", ["context"]),
    Section("One program per row and KV head, us", "bench_ops", "nosplit", ["batch", "context"]),
    Section("Group size, us", "bench_ops", "groups", ["num_q_heads", "num_kv_heads", "context"]),
    Section("Head size, us", "bench_ops", "dims", ["head_dim", "context"]),
    Section("Query tokens a row, us", "bench_ops", "qlen", ["num_q_heads", "context"]),
    Section("Prefill slice, TFLOP/s", "bench_ops", "prefill", ["q_len", "context", "part"], "tflops"),
    Section("Deterministic schedule, us", "bench_ops", "deterministic", ["batch", "context"]),
    Section("The layer's launches one by one, us", "bench_ops", "parts", ["batch", "context"]),
    Section("Copying pages first, us", "bench_ops", "gather", ["batch", "context"]),
    Section("Host, us an eager call of the ops", "bench_ops", "host", ["batch", "context"]),
    Section("Merges in a graph, us", "bench_merge", "graph", ["payload_kb", "rows", "num_q_heads", "splits"]),
    Section("Merges eager, us", "bench_merge", "eager", ["payload_kb", "rows", "num_q_heads", "splits"]),
    Section("Bare collectives, us", "bench_merge", "floor", ["payload_kb"]),
    Section("Attention layer, us", "bench_attention", "layer", ["num_q_heads", "batch", "context", "kv_mb"]),
    Section("Attention layer, small contexts, us", "bench_attention", "breakeven", ["batch", "context"]),
    Section("Attention layer without graphs, us", "bench_attention", "eager", ["batch", "context"]),
    Section("Time per output token over its roofline", "bench_engine", "tpot", TPOT, "time_over_baseline"),
    Section("Time per output token, us", "bench_engine", "tpot", TPOT),
    Section("Host, us a decode step", "bench_engine", "host", ["layout", "batch", "context"]),
    Section("One long prompt, us", "bench_engine", "prefill", ["layout", "prompt", "prefill_slice"]),
    Section("Time to first token, us", "bench_engine", "prefix", ["layout", "prompt", "shared"]),
    Section(
        "Between tokens, us", "bench_engine", "itl", ["layout", "batch", "context", "prompt", "decode_deadline_ms"]
    ),
    Section("Between tokens after a prompt, us", "bench_engine", "generate", ["model", "prompt"]),
    Section("Decode step of many rows, us", "bench_engine", "batch64", ["layout", "batch", "context"]),
]


class Goal(NamedTuple):
    """A figure with its limit, and how the measured one follows from the records."""

    text: str
    limit: float
    at_most: bool
    measure: Callable[[list[Record]], list[float]]


def _values(
    script: str, section: str, field: str, keep: Callable[[Record], bool]
) -> Callable[[list[Record]], list[float]]:
    def measure(records: list[Record]) -> list[float]:
        return [r[field] for r in select(records, script, section) if field in r and keep(r)]

    return measure


def _ratio(
    section: str, name: str, other: str, keep: Callable[[Record], bool]
) -> Callable[[list[Record]], list[float]]:
    """Return times of variant `name` over variant `other` of the same point."""

    def measure(records: list[Record]) -> list[float]:
        found = [r for r in select(records, "bench_merge", section) if keep(r)]
        sizes = ("rows", "num_q_heads")
        times = {(r["name"], *(r["config"][key] for key in sizes)): r["median_us"] for r in found}
        return [
            time / times[(other, *size)]
            for (label, *size), time in times.items()
            if label == name and (other, *size) in times
        ]

    return measure


def _inverse(measure: Callable[[list[Record]], list[float]]) -> Callable[[list[Record]], list[float]]:
    return lambda records: [1.0 / value for value in measure(records)]


def _is(name: str, **config: Any) -> Callable[[Record], bool]:
    return lambda r: r["name"] == name and all(r["config"].get(key) == value for key, value in config.items())


def _ours(low: float = 0.0, high: float = 1e9, name: str = "decode") -> Callable[[Record], bool]:
    return lambda r: r["name"] == name and low <= r["config"]["kv_mb"] < high


def _speed_up(context: int) -> Callable[[list[Record]], list[float]]:
    keep = _is("2 GPUs one_shot", batch=1, context=context, num_q_heads=32)
    return _inverse(_values("bench_attention", "layer", "time_over_baseline", keep))


def _engine(section: str, name: str, **config: Any) -> Callable[[list[Record]], list[float]]:
    return _values("bench_engine", section, "time_over_baseline", _is(name, **config))


def _itl_p99(records: list[Record]) -> list[float]:
    return [r["value"]["itl_p99_ms"] for r in select(records, "bench_engine", "itl") if "value" in r]


def _prefill_speed_up(records: list[Record]) -> list[float]:
    found = {r["config"]["layout"]: r["median_us"] for r in select(records, "bench_engine", "prefill")}
    return [found["single"] / found["kvp2"]] if {"single", "kvp2"} <= set(found) else []


def _small(r: Record) -> bool:
    return r["config"]["payload_kb"] <= 64


def _chunk(r: Record) -> bool:
    return r["config"].get("shuffled") is True and 128 <= r["config"]["chunk"] <= 1024


GOALS = [
    Goal(
        "decode / fastest peer, uniform grid",
        1.0,
        True,
        _values("bench_compare", "grid", "time_over_baseline", _ours()),
    ),
    Goal(
        "attention layer / fastest peer, uniform grid",
        1.0,
        True,
        _values("bench_compare", "grid", "time_over_baseline", _ours(name="attention layer")),
    ),
    Goal(
        "decode, share of ceiling, 512 MB up",
        0.95,
        False,
        _values("bench_compare", "grid", "share_of_ceiling", _ours(512)),
    ),
    Goal(
        "decode, share of ceiling, 128 MB",
        0.87,
        False,
        _values("bench_compare", "grid", "share_of_ceiling", _ours(128, 129)),
    ),
    Goal(
        "decode, 1 x 8K, us",
        13.0,
        True,
        _values("bench_compare", "grid", "median_us", _is("decode", batch=1, context=8192)),
    ),
    Goal(
        "decode, ragged16, share of ceiling",
        0.90,
        False,
        _values("bench_compare", "ragged", "share_of_ceiling", _ours()),
    ),
    Goal(
        "shuffled chunks 128 to 1024, of one run's speed",
        0.97,
        False,
        _inverse(_values("bench_ops", "chunks", "time_over_baseline", _chunk)),
    ),
    Goal(
        "group sizes, share of ceiling at 512 MB",
        0.80,
        False,
        _values("bench_ops", "groups", "share_of_ceiling", lambda r: True),
    ),
    Goal(
        "head sizes 64, 128, 256, share of ceiling at 512 MB",
        0.80,
        False,
        _values("bench_ops", "dims", "share_of_ceiling", lambda r: r["config"]["head_dim"] in (64, 128, 256)),
    ),
    Goal(
        "q_len 8 / q_len 1 at 128K",
        1.15,
        True,
        _values("bench_ops", "qlen", "time_over_baseline", _is("q_len 8", context=131072)),
    ),
    *(
        Goal(
            f"prefill 2048 over 128K, {part}, of the best SDPA's speed",
            0.75,
            False,
            _inverse(_values("bench_ops", "prefill", "time_over_baseline", _is("prefill", part=part, q_len=2048))),
        )
        for part in ("cached", "whole")
    ),
    Goal(
        "local ops of an eager call, host us",
        60.0,
        True,
        _values("bench_ops", "host", "median_us", _is("local ops (store_kv + decode)")),
    ),
    Goal(
        "one_shot up to 64 KB, join included, us",
        6.0,
        True,
        _values("bench_merge", "graph", "median_us", lambda r: r["name"] == "one_shot" and _small(r)),
    ),
    Goal("one_shot / two all-reduces", 0.27, True, _ratio("graph", "one_shot", "two all-reduces", _small)),
    Goal("one_shot / AG + RS", 0.35, True, _ratio("graph", "one_shot", "all-gather LSE + reduce-scatter", _small)),
    Goal("one_shot / packed all-to-all", 0.6, True, _ratio("graph", "one_shot", "packed all-to-all", _small)),
    Goal("2 GPUs over 1, 1 x 32K", 1.40, False, _speed_up(32768)),
    Goal("2 GPUs over 1, 1 x 128K", 1.80, False, _speed_up(131072)),
    Goal("2 GPUs over 1, 1 x 512K", 1.95, False, _speed_up(524288)),
    *(
        Goal(
            f"time per output token / roofline, {layout}, {context} tokens",
            limit,
            True,
            _engine("tpot", "decode step", layout=layout, context=context),
        )
        for layout, context, limit in (
            ("single", 8192, 1.55),
            ("single", 131072, 1.28),
            ("single", 524288, 1.12),
            ("kvp2", 1048576, 1.15),
        )
    ),
    Goal("transformers static cache / engine", 2.0, False, _engine("generate", "transformers static")),
    Goal("transformers dynamic cache / engine", 10.0, False, _engine("generate", "transformers dynamic")),
    Goal("host, decode step of 64 rows, us", 1000.0, True, _values("bench_engine", "host", "median_us", _is("step"))),
    Goal("between tokens beside a 128K prompt, p99, ms", 50.0, True, _itl_p99),
    Goal("prompt of 128K, 2 GPUs over 1", 1.6, False, _prefill_speed_up),
    Goal("prefix hit of 90%, time to first token", 0.2, True, _engine("prefix", "second prompt")),
]


def goals(records: list[Record]) -> str:
    """Return the goals with the worst measured value of each."""
    rows: list[list[Any]] = []
    for goal in GOALS:
        values = goal.measure(records)
        worst = (max(values) if goal.at_most else min(values)) if values else None
        met = (
            "not measured"
            if worst is None
            else "yes"
            if (worst <= goal.limit) == goal.at_most or worst == goal.limit
            else "NO"
        )
        rows.append([goal.text, f"{'<=' if goal.at_most else '>='} {goal.limit:g}", worst, len(values), met])
    return markdown(["figure", "must", "worst measured", "points", "met"], rows)


def details(records: list[Record]) -> str:
    """Return what records of the engine say besides their times, one line a record and figure."""
    rows = []
    for record in records:
        if record["script"] == "bench_engine" and record["status"] == "ok" and "value" in record:
            config = record["config"]
            point = [f"{key} {config[key]}" for key in POINT if key in config]
            flat = {**record["value"], **record["value"].get("phases_us", {})}
            start = [record["section"], record["name"], config["layout"], ", ".join(point)]
            rows += [[*start, key, value] for key, value in flat.items() if isinstance(value, int | float)]
    return markdown(["section", "variant", "layout", "point", "figure", "value"], rows) if rows else ""


def failures(records: list[Record]) -> str:
    """Return the points without a number, and why."""
    lost = [r for r in records if r["status"] in ("check_failed", "error", "unavailable", "skipped")]
    grouped: dict[tuple[str, ...], int] = {}
    for r in lost:
        key = (r["script"], r["section"], r["name"], r["status"], r["reason"].replace("|", "/").split("\n")[0][:140])
        grouped[key] = grouped.get(key, 0) + 1
    return markdown(
        ["script", "section", "variant", "status", "reason", "points"], [[*k, n] for k, n in grouped.items()]
    )


def report(records: list[Record], pictures: list[str]) -> str:
    """Return the whole report in markdown."""
    environments = [r["env"] for r in records]
    lines = ["# Benchmark report", ""]
    for key in ("gpu", "driver", "torch", "triton", "cuda", "nccl", "commit", "dirty"):
        values = sorted({str(env.get(key)) for env in environments if env.get(key) is not None})
        lines.append(f"- {key}: {', '.join(values)}")
    lines += [f"- dates: {min(env['date'] for env in environments)} to {max(env['date'] for env in environments)}", ""]
    lines += ["Commands:", "", "```", *sorted({env["command"] for env in environments}), "```", ""]
    lines += ["## Goals", "", goals(records), ""]
    grid = select(records, "bench_compare", "grid") + select(records, "bench_compare", "ragged")
    if grid:
        lines += ["## Ours against the fastest peer", "", comparison(grid), ""]
    for title, script, section, keys, value in SECTIONS:
        found = select(records, script, section)
        if found:
            lines += [f"## {title}", "", pivot(found, keys, value), ""]
    if more := details(records):
        lines += ["## Figures of the engine", "", more, ""]
    derived = [r for r in records if r["status"] == "derived"]
    if derived:
        rows = [[r["section"], r["name"], json.dumps(r["value"])] for r in derived]
        lines += ["## Derived", "", markdown(["section", "variant", "value"], rows), ""]
    lines += ["## Points without a number", "", failures(records), ""]
    lines += [f"![{name}]({name})" for name in pictures]
    return "\n".join(lines) + "\n"
