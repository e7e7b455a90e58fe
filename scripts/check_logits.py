"""Compare the engine's logits with transformers' after a long prompt, on one device and random weights.

    python3 scripts/check_logits.py --model llama-3-8b --layers 8 --prompt-len 32768 --dtype float32
    python3 scripts/check_logits.py --prompt-len 32768 --dtype bfloat16

The engine runs the prompt and some greedy steps in each way (`eager`: neither compiled nor captured; `compiled`;
`graphs`: whole steps captured; `both`), transformers its own model code with SDPA on the engine's tokens. In bfloat16
random weights part greedy tokens soon, and two right answers differ. What counts there is how far each is from
the same weights in float32: the engine may be at most `SLACK` times as far as transformers is. In float32 the logits
must agree as far as two slicings of the prompt do, with the same slack. One JSON line a way; exit status 1 where one is
further off.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import time
from dataclasses import replace
from typing import Any

import torch
from bench_generate import transformers_model
from bench_session import drive, greedy
from bench_weights import MODELS, build, sizes
from torch import Tensor

from distdec.config import BackendConfig, CacheConfig, Config, SchedulerConfig
from distdec.engine import Engine
from distdec.mesh import Mesh
from distdec.runner import Runner

WAYS = {"eager": ("off", "off"), "compiled": ("on", "off"), "graphs": ("off", "on"), "both": ("on", "on")}
SLACK, FLOOR = 2.0, 32 * torch.finfo(torch.float32).eps


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), default="llama-3-8b")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--prompt-len", type=int, default=32768)
    parser.add_argument("--tokens", type=int, default=8, help="greedy tokens behind the prompt")
    parser.add_argument("--slice", type=int, default=2048, help="tokens of the prompt a step")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--smoke", "--dry-run", action="store_true", help="a tiny model with the same heads")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(argv)


class Watched:
    """A runner that keeps the logits of its steps."""

    def __init__(self, runner: Runner, seen: list[Tensor]) -> None:
        self._runner, self._seen = runner, seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def run(self, plan: Any, batch: Any) -> Tensor:
        """Run a step, and keep its logits where a row needs them."""
        logits = self._runner.run(plan, batch)
        if any(row.needs_logits for row in plan.rows):
            self._seen.append(logits.float().clone())
        return logits


def of_engine(args: argparse.Namespace, way: str, mesh: Mesh, ids: list[int]) -> tuple[Tensor, list[int]]:
    """Return the logits behind the prompt and each token but the last, [tokens, vocabulary] float32, and the tokens."""
    compiled, graphs = WAYS[way]
    dtype = getattr(torch, args.dtype)
    model = build(args.model, mesh, dtype, smoke=args.smoke)
    steps = SchedulerConfig(max_rows=4, token_budget=args.slice, prefill_slice=args.slice, decode_deadline_ms=0.0)
    config = Config(
        cache=CacheConfig(prefix_caching=False),
        scheduler=steps,
        backend=BackendConfig(compile=compiled, graphs=graphs),
    )
    config = replace(config, model=replace(config.model, dtype=args.dtype))
    runner = Runner.build(model, mesh, config, args.prompt_len + args.tokens + 4096)
    # slots that nothing was stored to must never count
    runner.cache.pool.k.fill_(float("nan"))
    runner.cache.pool.v.fill_(float("nan"))
    seen: list[Tensor] = []
    watched: Any = Watched(runner, seen)
    engine = Engine(watched, config.scheduler, eos_ids=())
    engine.add(ids, greedy(args.tokens))
    tokens: list[int] = []
    drive(engine, lambda _, result: tokens.extend(e.token_id for e in result.events if e.token_id is not None))
    runner.close()
    return torch.cat(seen)[: args.tokens], tokens


def of_transformers(model: Any, ids: list[int], tokens: list[int], cut: int) -> Tensor:
    """Return transformers' logits at the same places."""
    from transformers import DynamicCache

    cache, logits = DynamicCache(config=model.config), []
    steps = [ids[at : at + cut] for at in range(0, len(ids), cut)] + [[token] for token in tokens[:-1]]
    with torch.no_grad():
        for number, step in enumerate(steps):
            out = model(torch.tensor([step], device=model.device), past_key_values=cache, logits_to_keep=1)
            if number >= len(steps) - len(tokens):
                logits.append(out.logits[0].float())
    return torch.cat(logits)


def apart(one: Tensor, other: Tensor) -> float:
    """Return the largest difference over the largest size; infinity where one is not finite."""
    share = float((one - other).abs().max() / other.abs().max())
    return share if share == share else float("inf")


def main(argv: list[str] | None = None) -> int:
    """Run all ways; returns 1 where one is further from the truth than it may be."""
    args = parse(argv)
    if args.layers:
        MODELS[args.model] = {**MODELS[args.model], "num_hidden_layers": args.layers}
    mesh, dtype = Mesh.single(args.device), getattr(torch, args.dtype)
    ids = random.Random(7).choices(range(sizes(args.model, args.smoke)["vocab_size"]), k=args.prompt_len)
    found = {}
    for way in args.ways:
        start = time.perf_counter()
        found[way] = (*of_engine(args, way, mesh, ids), time.perf_counter() - start)
        gc.collect()
        if mesh.device.type == "cuda":
            torch.cuda.empty_cache()
    model = transformers_model(args.model, args.smoke, dtype, mesh.device)
    told = {tuple(tokens) for _, tokens, _ in found.values()}
    own = {tokens: of_transformers(model, ids, list(tokens), args.slice) for tokens in told}
    model = model.float()
    # another slicing: in float32 it is what rounding does, in bfloat16 it makes no difference
    truth = {tokens: of_transformers(model, ids, list(tokens), args.slice // 2) for tokens in told}
    failed = 0
    for way, (logits, tokens, seconds) in found.items():
        line = compare(logits, own[tuple(tokens)], truth[tuple(tokens)], tokens)
        more = {"dtype": args.dtype, "prompt": len(ids), "layers": model.config.num_hidden_layers}
        print(json.dumps({"way": way, **more, **line, "seconds": round(seconds, 1)}), flush=True)
        failed |= not line["apart"] <= max(FLOOR, SLACK * line["transformers_apart"])
    return int(failed)


def compare(logits: Tensor, own: Tensor, truth: Tensor, tokens: list[int]) -> dict[str, Any]:
    """Return how far engine and transformers are from the truth, and how many leading tokens transformers shares."""
    best = own.topk(2, dim=-1)
    return {
        "apart": apart(logits, truth),
        "transformers_apart": apart(own, truth),
        "apart_from_transformers": apart(logits, own),
        "equal_tokens": int((best.indices[:, 0].cpu() == torch.tensor(tokens)).cumprod(0).sum()),
        "tokens": len(tokens),
        "closest_two": float(((best.values[:, 0] - best.values[:, 1]) / own.abs().max()).min()),
    }


if __name__ == "__main__":
    sys.exit(main())
