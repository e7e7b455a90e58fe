"""Turn benchmark records into plots and a markdown report.

    python3 scripts/plot_bench.py out/*.jsonl --into docs/benchmarks/2026-01-31-h200

Writes report.md and, where matplotlib is installed, PNG plots beside it. Nothing in them comes from elsewhere.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench_tables import Record, goals, load, report, select

Series = dict[str, list[tuple[float, float]]]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="+", help="JSONL files, oldest first")
    parser.add_argument("--into", required=True, help="folder of the report")
    args = parser.parse_args(argv)
    records = load(args.records)
    if not records:
        parser.error("the files hold no record")
    folder = Path(args.into)
    folder.mkdir(parents=True, exist_ok=True)
    pictures = draw_all(records, folder)
    (folder / "report.md").write_text(report(records, pictures), encoding="utf-8")
    print(goals(records))
    print(f"{folder / 'report.md'}: {len(records)} records, {len(pictures)} plots")
    return 0


def draw_all(records: list[Record], folder: Path) -> list[str]:
    """Draw every plot that has data; return their file names."""
    try:
        import matplotlib
    except ImportError:
        print("matplotlib is not installed: no plots", file=sys.stderr)
        return []
    matplotlib.use("Agg")
    plots: list[tuple[str, str, str, str, Callable[[list[Record]], Series]]] = [
        ("share", "Decode: share of the read ceiling, Hq 32", "KV MB", "share", share_series),
        ("time_over_peer", "Decode: time over the fastest peer", "KV MB", "ratio", peer_series),
        ("chunks", "Decode over one contiguous run, shuffled chunks", "tokens a chunk", "time ratio", chunk_series),
        ("chunk_overhead", "Decode: time above the read ceiling", "tokens a chunk", "us", chunk_overhead_series),
        ("splits", "Decode over the default schedule", "tokens a split", "time ratio", split_series),
        ("nosplit", "One program per row and KV head", "batch", "share of ceiling", nosplit_series),
        ("merges", "Merge of two ranks or more, in a graph", "payload KB", "us", merge_series),
        ("speed_up", "Attention layer over one GPU, batch 1", "context", "speed-up", speed_up_series),
        ("tpot", "Time per output token over its roofline", "context", "ratio", tpot_series),
        ("step_of_slices", "Decode rows beside prompts", "tokens a slice", "ms", between_series),
        ("first_token", "Prompts beside decode rows: time to first token", "tokens a slice", "ms", first_token_series),
    ]
    drawn = []
    for name, title, x, y, series in plots:
        lines = {label: sorted(points) for label, points in series(records).items() if points}
        if lines:
            draw(folder / f"{name}.png", title, x, y, lines)
            drawn.append(f"{name}.png")
    return drawn


def draw(path: Path, title: str, x: str, y: str, lines: Series) -> None:
    """Draw one plot with a logarithmic x axis."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for label, points in lines.items():
        axes.plot(*zip(*points, strict=True), marker="o", markersize=4, linewidth=1.2, label=label)
    axes.set(xscale="log", xlabel=x, ylabel=y, title=title)
    axes.set_xscale("log", base=2)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def collect(records: list[Record], label: Callable[[Record], str | None], x: str, y: Callable[[Record], Any]) -> Series:
    """Group records into lines by label; records without a label, x or y are left out."""
    lines: Series = {}
    for record in records:
        name, at, value = label(record), record["config"].get(x), y(record)
        if name is not None and isinstance(at, int | float) and value is not None:
            lines.setdefault(name, []).append((float(at), float(value)))
    return lines


def share_series(records: list[Record]) -> Series:
    grid = [r for r in select(records, "bench_compare", "grid") if r["config"]["num_q_heads"] == 32]
    return collect(
        grid, lambda r: f"{r['name']}, B {r['config']['batch']}", "kv_mb", lambda r: r.get("share_of_ceiling")
    )


def peer_series(records: list[Record]) -> Series:
    grid = [r for r in select(records, "bench_compare", "grid") if r["name"] in ("decode", "attention layer")]

    def label(r: Record) -> str:
        return f"{r['name']}, Hq {r['config']['num_q_heads']}, B {r['config']['batch']}"

    return collect(grid, label, "kv_mb", lambda r: r.get("time_over_baseline"))


def _chunk_label(r: Record) -> str | None:
    config = r["config"]
    return f"{config['batch']} x {config['context']}" if config.get("shuffled") else None


def chunk_series(records: list[Record]) -> Series:
    found = select(records, "bench_ops", "chunks")
    return collect(found, _chunk_label, "chunk", lambda r: r.get("time_over_baseline"))


def chunk_overhead_series(records: list[Record]) -> Series:
    found = [r for r in select(records, "bench_ops", "chunks") if "ceiling_us" in r]
    return collect(found, _chunk_label, "chunk", lambda r: r["median_us"] - r["ceiling_us"])


def split_series(records: list[Record]) -> Series:
    found = select(records, "bench_ops", "splits")
    return collect(found, lambda r: str(r["config"]["context"]), "split_tokens", lambda r: r.get("time_over_baseline"))


def nosplit_series(records: list[Record]) -> Series:
    found = select(records, "bench_ops", "nosplit")
    return collect(found, lambda r: r["name"], "batch", lambda r: r.get("share_of_ceiling"))


def merge_series(records: list[Record]) -> Series:
    found = [r for r in select(records, "bench_merge", "graph") if r["config"]["num_q_heads"] in (8, 32)]

    def label(r: Record) -> str | None:
        return None if r["config"].get("transport", "float32") != "float32" else r["name"]

    return collect(found, label, "payload_kb", lambda r: r["median_us"])


def speed_up_series(records: list[Record]) -> Series:
    found = select(records, "bench_attention", "layer") + select(records, "bench_attention", "breakeven")
    found = [r for r in found if r["config"]["batch"] == 1 and "time_over_baseline" in r]
    return collect(
        found,
        lambda r: f"{r['name']}, Hq {r['config']['num_q_heads']}",
        "context",
        lambda r: 1 / r["time_over_baseline"],
    )


def tpot_series(records: list[Record]) -> Series:
    found = select(records, "bench_engine", "tpot")
    return collect(
        found,
        lambda r: f"{r['config']['model']}, {r['config']['layout']}, batch {r['config']['batch']}",
        "context",
        lambda r: r["time_over_baseline"],
    )


def _of_sweep(records: list[Record], figures: tuple[str, ...]) -> Series:
    found, lines = select(records, "bench_engine", "sweep"), {}
    for figure in figures:
        lines |= collect(
            found,
            lambda r, figure=figure: f"{figure}, {r['config']['max_pending_prefills']} prompts under way",
            "prefill_slice",
            lambda r, figure=figure: r["value"].get(figure),
        )
    return lines


def between_series(records: list[Record]) -> Series:
    return _of_sweep(records, ("itl_p50_ms", "itl_p99_ms"))


def first_token_series(records: list[Record]) -> Series:
    return _of_sweep(records, ("ttft_p50_ms", "ttft_p99_ms"))


if __name__ == "__main__":
    sys.exit(main())
