"""Compare logits and greedy tokens with single-process transformers (eager), for any model folder, ranks and merge.

    python scripts/check_parity.py FOLDER --ranks 1 2 3 --merge all_reduce all_gather --tokens 64 --prompt "Once upon"
    python scripts/check_parity.py --matrix --output docs/benchmarks/parity.jsonl     # SmolLM2, 1-4 ranks, 4 modes

Every number of ranks is one torchrun of this file, on CPU over gloo unless `--device cuda`. One
JSON line a combination: tokens equal or where they part, the largest difference of the logits after each generated
token (teacher-forced on the reference's tokens, so one early difference does not hide the rest), and how far apart the
two likeliest tokens were at the closest step: the margin that rounding has to stay under.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

GLOO_MODES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
PROMPTS = (
    "Once upon a time, there was a little",
    "The capital of Italy is Rome. The capital of France is",
    "A hash table is a data structure that maps keys to values. To find a value, it first",
)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", help="model folder; default: SmolLM2-135M-Instruct, prepared if needed")
    parser.add_argument("--matrix", action="store_true", help="1, 2, 3 and 4 ranks x the four modes that gloo has")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--tp", type=int, default=1, help="of the ranks, how many along the heads")
    parser.add_argument("--merge", nargs="+", default=["auto"])
    parser.add_argument("--prompt", action="append", help="may be repeated; default: three short ones")
    parser.add_argument("--tokens", type=int, default=200, help="greedy tokens to compare")
    parser.add_argument("--tokens-only", action="store_true", help="leave the logits out: half the steps")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--backend", default="auto", help="kernels: auto, reference, triton")
    parser.add_argument("--output", type=Path, help="append the JSON lines to this file too")
    parser.add_argument("--worker", nargs=2, metavar=("REFERENCE", "RESULT"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.matrix:
        args.ranks, args.merge = [1, 2, 3, 4], list(GLOO_MODES)
    args.prompt = args.prompt or list(PROMPTS)
    return args


def main() -> int:
    """Compute the reference once, then start the ranks of every combination; returns 1 if any token differs."""
    args = parse()
    if args.worker:
        return worker(args)
    if args.folder is None:
        from launch.assets import smollm2_folder

        args.folder = str(smollm2_folder())
    failed = 0
    with tempfile.TemporaryDirectory() as scratch:
        reference = Path(scratch) / "reference.pt"
        write_reference(args, reference)
        for ranks in args.ranks:
            for record in run_ranks(args, ranks, reference, Path(scratch) / "result.jsonl"):
                failed += not record.get("equal", False)
                print(json.dumps(record), flush=True)
                if args.output is not None:
                    with args.output.open("a") as file:
                        file.write(json.dumps(record) + "\n")
    print(f"{'FAILED' if failed else 'ok'}: {failed} of {len(args.ranks) * len(args.merge)} combinations differ")
    return int(failed > 0)


def write_reference(args: argparse.Namespace, path: Path) -> None:
    """Write each prompt's ids, the reference's greedy tokens and its logits at each of them."""
    import torch
    from transformers import AutoTokenizer

    from launch.parity import load_reference, reference_logits, reference_tokens

    tokenizer = AutoTokenizer.from_pretrained(args.folder)
    model = load_reference(args.folder, args.dtype, args.device)
    cases = []
    for text in args.prompt:
        ids = tokenizer(text)["input_ids"]
        tokens = reference_tokens(model, ids, args.tokens)
        logits = reference_logits(model, ids + tokens[:-1], first=len(ids) - 1)
        cases.append({"prompt": ids, "tokens": tokens, "logits": logits.float().cpu()})
    torch.save(cases, path)


def run_ranks(args: argparse.Namespace, ranks: int, reference: Path, result: Path) -> list[dict[str, Any]]:
    """Run all merge modes on this many ranks under one torchrun and return a record of each."""
    result.unlink(missing_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), __file__]
    command += [
        args.folder,
        "--tp",
        str(args.tp),
        "--merge",
        *args.merge,
        "--tokens",
        str(args.tokens),
        "--dtype",
        args.dtype,
    ]
    command += ["--tokens-only"] if args.tokens_only else []
    command += ["--device", args.device, "--backend", args.backend, "--worker", str(reference), str(result)]
    threads = str(max(1, (os.cpu_count() or 1) // ranks))
    environment = {"OMP_NUM_THREADS": threads, **os.environ}
    done = subprocess.run(command, env=environment, check=False)
    common = {
        "model": Path(args.folder).name,
        "ranks": ranks,
        "tp": args.tp,
        "dtype": args.dtype,
        "device": args.device,
        "backend": args.backend,
        "num_prompts": len(args.prompt),
        "num_tokens": args.tokens,
    }
    written = [json.loads(line) for line in result.read_text().splitlines()] if result.exists() else []
    missing = [merge for merge in args.merge if merge not in {record["merge"] for record in written}]
    written += [{"merge": merge, "equal": False, "error": f"exit code {done.returncode}"} for merge in missing]
    return [{**common, **record} for record in written]


def worker(args: argparse.Namespace) -> int:
    """One rank of one combination."""
    import torch

    from distdec.config import BackendConfig, CacheConfig, Config, ModelConfig, ParallelConfig
    from distdec.engine import Engine
    from distdec.mesh import Mesh
    from distdec.request import SamplingParams
    from distdec.runner import Runner

    cases = torch.load(args.worker[0], weights_only=True)
    sampling = SamplingParams(max_new_tokens=args.tokens, ignore_eos=True)
    with Mesh.create(tp=args.tp, device=args.device) as mesh:
        for merge in args.merge:
            started = time.perf_counter()
            config = Config(
                model=ModelConfig(dtype=args.dtype, device=args.device),
                parallel=ParallelConfig(tp=args.tp, merge=merge),
                cache=CacheConfig(max_tokens=2 * sum(len(case["prompt"]) + args.tokens + 128 for case in cases)),
                backend=BackendConfig(name=args.backend),
            )
            engine = Engine(Runner.load(args.folder, mesh, config), config.scheduler)
            # all prompts in one batch: rows of different lengths, as in use
            done = engine.generate([(case["prompt"], sampling) for case in cases])
            forced = None if args.tokens_only else force(engine, cases)
            if mesh.is_leader:
                record = {"merge": merge, **compare(cases, [list(one.token_ids) for one in done], forced)}
                record["merge_mode"] = engine.runner.attention.merge.mode
                record["wall_s"] = round(time.perf_counter() - started, 1)
                with Path(args.worker[1]).open("a") as file:
                    file.write(json.dumps(record) + "\n")
            engine.close()
            mesh.barrier()
    return 0


def force(engine: Any, cases: list[dict[str, Any]]) -> list[Any]:
    """Feed the reference's tokens of all prompts one by one and return the logits after each. Collective.

    Shapes:
        returns one tensor a prompt, [number of tokens, vocabulary] float32 on the CPU
    """
    import torch

    from distdec.request import Row, StepPlan

    # ids that the engine's own requests never have
    sequences = [(1 << 40) + i for i in range(len(cases))]
    for sequence in sequences:
        engine.cache.kv.add(sequence)
    parts, starts = [], [0] * len(cases)
    for step in range(len(cases[0]["tokens"])):
        ids = [case["prompt"] if step == 0 else [case["tokens"][step - 1]] for case in cases]
        rows = tuple(Row(s, at, tuple(new), True) for s, at, new in zip(sequences, starts, ids, strict=True))
        batch = engine.cache.begin_step([(row.request_id, row.num_tokens) for row in rows], q_len=1)
        parts.append(engine.runner.run(StepPlan(0, rows=rows), batch).float().cpu().clone())
        starts = [at + len(new) for at, new in zip(starts, ids, strict=True)]
    for sequence in sequences:
        engine.cache.kv.free(sequence)
    return list(torch.stack(parts, 1))


def compare(cases: list[dict[str, Any]], tokens: list[list[int]], logits: list[Any] | None) -> dict[str, Any]:
    """Return where tokens part and how far logits are apart, over all prompts."""
    import torch

    from launch.parity import first_difference

    parts = [first_difference(ours, case["tokens"]) for ours, case in zip(tokens, cases, strict=True)]
    errors = [float((ours - case["logits"]).abs().max()) for ours, case in zip(logits or (), cases, strict=False)]
    top = torch.cat([case["logits"] for case in cases]).topk(2, -1).values
    return {
        "equal": all(at is None for at in parts),
        "first_difference": parts,
        "max_logit_error": max(errors, default=None),
        "smallest_margin": float((top[:, 0] - top[:, 1]).min()),
    }


if __name__ == "__main__":
    sys.exit(main())
