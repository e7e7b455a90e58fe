"""Generate text with a KV cache that is sharded along the sequence over the ranks that torchrun started.

    torchrun --standalone --nproc-per-node 2 launch/generate.py model.path=FOLDER prompt="Once upon a time"
    torchrun --standalone --nproc-per-node 4 launch/generate.py workload=passkey parity=true
    torchrun --standalone --nproc-per-node 2 launch/generate.py prompts=in.jsonl output=out.jsonl on_error=skip

`--help` lists every option. The steps below are those of any program that uses the engine: find the folder, read the
prompts, load the model on every rank, make the cache, generate.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# torchrun starts this file by its path, which puts launch/ on the path instead of the checkout
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from distdec.capacity import tokens_needed
from distdec.config import Config
from distdec.request import FinishReason, Request
from launch import boot, console


@dataclass
class Work:
    """What rank 0 has read before the model is loaded."""

    tokenizer: Any
    prompts: list[Any]
    output: Any


def run(config: Config, job: boot.Job) -> int:
    """Run one job on this rank; called on every rank with the same config."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    # rank 0 first: it may have to prepare the model, once a host
    job.on_leader(lambda: _folder(config))
    folder = job.together("finding the model folder", lambda: _folder(config))
    work = job.on_leader(lambda: read_work(config, folder))
    engine = make_engine(config, job, folder, work)
    prompts = job.on_leader(lambda: _fitting(config, engine, work))
    display = Display(work.output, prompts) if work and prompts else None
    try:
        completions = engine.generate(
            [(prompt.token_ids, prompt.sampling) for prompt in prompts or ()], display and display.on_step
        )
    except KeyboardInterrupt:
        if display is not None:
            display.interrupted()
        raise
    finally:
        if display is not None:
            display.close()
    report(config, job, engine, completions, prompts)
    # not after a failure: the device may be in a step that never ends, and the process ends without its help
    engine.close()
    if prompts and all(done.finish_reason is FinishReason.NUMERICS for done in completions):
        console.note(
            "error: every request ended with reason numerics: the model's logits are NaN or infinite. Are the weights "
            "whole? float16 overflows where model.dtype=bfloat16 and float32 do not"
        )
        return 1
    if prompts and config.parity:
        return check_parity(folder, engine, prompts, completions)
    return 0


def _folder(config: Config) -> Path:
    from launch.inputs import model_folder

    return model_folder(config)


def read_work(config: Config, folder: Path) -> Work:
    """Read and check everything that can be checked without the weights. Rank 0 only."""
    from transformers import AutoConfig, AutoTokenizer

    from distdec.hf.support import config_reasons
    from launch.inputs import OutputFile, keep_runnable, read_prompts

    config.check_inputs()
    output = OutputFile(config.output, (config.prompts, config.prompt_file))
    model_config = AutoConfig.from_pretrained(folder)
    if reasons := config_reasons(model_config):
        raise boot.LaunchError(f"the model in {folder} cannot run on a sharded cache: " + "; ".join(reasons))
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise boot.LaunchError(f"the tokenizer in {folder} cannot be loaded: {error}") from None
    text = model_config.get_text_config()
    limits = (text.vocab_size, text.max_position_embeddings)
    if config.workload.name == "passkey" and config.workload.num_tokens > text.max_position_embeddings:
        # before a text of any length is made
        raise boot.LaunchError(
            f"workload.num_tokens={config.workload.num_tokens} is over the model's limit of "
            f"{text.max_position_embeddings} tokens"
        )
    prompts, bad = read_prompts(config, tokenizer)
    prompts, oversized = keep_runnable(prompts, lambda request: request.check(*limits), config.on_error)
    if config.parity and not all(prompt.sampling.greedy for prompt in prompts):
        raise boot.LaunchError("parity=true compares greedy tokens: it needs temperature=0 for every prompt")
    for line in (*bad, *oversized):
        _skip(output, line)
    return Work(tokenizer, prompts, output)


def _skip(output: Any, bad: Any) -> None:
    console.note(f"skipped line {bad.line}: {bad.reason}")
    output.write_error(bad)


def make_engine(config: Config, job: boot.Job, folder: Path, work: Work | None) -> Any:
    """Load the model on every rank and make the engine; its cache is as large as the rank with least room allows."""
    from distdec.engine import Engine
    from distdec.hf.sharding import rank_sum_of
    from distdec.load import load_model
    from distdec.runner import Runner

    mesh = job.mesh
    started = time.perf_counter()
    model = job.together("loading the model", lambda: load_model(folder, mesh, config))
    loaded = time.perf_counter()
    wanted = 0
    if work is not None:
        requests = [Request(i, prompt.token_ids, prompt.sampling) for i, prompt in enumerate(work.prompts)]
        wanted = tokens_needed(requests, config.scheduler.max_rows, config.cache.min_chunk)
    [wanted] = mesh.agree([wanted])
    runner = Runner.build(model, mesh, config, wanted, _capture_progress() if work is not None else None)
    runner.start_s = {"load": loaded - started, **runner.start_s}
    if work is not None and mesh.kvp_size > 1:
        console.note(f"merge {runner.attention.merge.reason}")
    total = rank_sum_of(model)
    if work is not None and total is not None:
        console.note(f"sums over ranks {total.reason}")
    return Engine(runner, config.scheduler, tokenizer=work.tokenizer if work else None)


def _capture_progress() -> Any:
    """Return what shows how many decode steps are captured; the line ends with the last one."""
    bar: list[Any] = []

    def show(count: int, total: int) -> None:
        if not bar:
            bar.append(console.Progress("capture", total, "graphs").__enter__())
        bar[0].to(count)
        if count == total:
            bar[0].close()

    return show


def _fitting(config: Config, engine: Any, work: Work | None) -> list[Any]:
    """Return the prompts that the cache can hold; the others end the run, or are skipped if it says so."""
    from launch.inputs import keep_runnable

    assert work is not None, "runs on rank 0, which has read the prompts"
    good, bad = keep_runnable(work.prompts, engine.check, config.on_error)
    for line in bad:
        _skip(work.output, line)
    return good


class Display:
    """Follow the steps on rank 0: prefill progress, streamed text or a bar, and the lines of the output file."""

    def __init__(self, output: Any, prompts: list[Any]) -> None:
        self.output = output
        self.prompts = prompts
        self.alone = len(prompts) == 1
        self.finished = 0
        self.prefilled = 0
        total = sum(len(prompt.token_ids) for prompt in prompts)
        self._prefill = console.Progress("prefill", total, "tokens").__enter__() if self.alone else None
        self._bar = None if self.alone else console.Progress("requests", len(prompts), "done").__enter__()

    def on_step(self, result: Any) -> None:
        """Show what a step brought. Request ids count from 0 in the order of the prompts."""
        for row in result.plan.rows:
            if row.start < len(self.prompts[row.request_id].token_ids):
                # a prompt whose start is cached begins later
                count = row.num_tokens - row.num_drafts
                self.prefilled = row.start + count if self.alone else self.prefilled + count
        if self._prefill is not None:
            self._prefill.to(self.prefilled)
            if any(event.token_id is not None for event in result.events):
                self._prefill.close()
                self._prefill = None
        if self.alone:
            for event in result.events:
                console.say(event.text, end="")
        for done in result.completions:
            self.finished += 1
            self.output.write(self.prompts[done.request_id], done.request_id, done)
        if self._bar is not None:
            self._bar.to(self.finished)

    def interrupted(self) -> None:
        """Say what is kept after Ctrl-C."""
        self.close()
        where = f"; they are in {self.output.path}" if self.output.path and self.finished else ""
        console.note(f"\n{self.finished} of {len(self.prompts)} requests were finished{where}")

    def close(self) -> None:
        """End bars and files. Safe to call twice."""
        for progress in (self._prefill, self._bar):
            if progress is not None:
                progress.close()
        self.output.close()


def report(config: Config, job: boot.Job, engine: Any, completions: list[Any], prompts: list[Any] | None) -> None:
    """Print how the run went, from every rank's own figures. Collective."""
    from distdec.sizing import describe_start

    pool = engine.cache.pool
    slots = pool.k.shape[1]
    calls = engine.runner.attention.merge.calls
    rows = job.mesh.gather([engine.peak_tokens, pool.bytes // slots, pool.bytes, calls, engine.runner.num_forwards])
    if prompts is None:
        return
    if len(prompts) == 1:
        console.say("")
    table = []
    for rank, (tokens, token_bytes, pool_bytes, merges, forwards) in enumerate(rows):
        per_layer = merges / max(1, forwards * engine.runner.num_layers)
        held, reserved = console.bytes_text(tokens * token_bytes), console.bytes_text(pool_bytes)
        table.append([str(rank), str(tokens), held, reserved, f"{per_layer:g}"])
    header = ["rank", "tokens held", "KV bytes held", "pool", "merge collectives / layer / token"]
    merge = engine.runner.attention.merge.mode if engine.mesh.kvp_size > 1 else "none"
    title = (
        f"kvp {engine.mesh.kvp_size} x tp {engine.mesh.tp_size}, merge {merge}, {engine.runner.dtype}, "
        f"{engine.cache.backend.name} kernels on {engine.mesh.device.type}"
    )
    console.print_table(title, header, table)
    console.say(describe_start(engine.runner.start_s, engine.runner.room, pool.bytes))
    first = sorted(done.ttft_s for done in completions)
    later = sorted(done.tpot_s for done in completions if len(done.token_ids) > 1)
    tokens = sum(len(done.token_ids) for done in completions)
    reasons = ", ".join(sorted({done.finish_reason.value for done in completions}))
    line = f"{len(completions)} request{'s' if len(completions) > 1 else ''}, {tokens} tokens ({reasons}); "
    line += f"TTFT {1e3 * first[len(first) // 2]:.0f} ms"
    if later:
        line += f", TPOT {1e3 * later[len(later) // 2]:.1f} ms"
    console.say(line + (" (medians)" if len(completions) > 1 else ""))
    counts = engine.scheduler.stats
    if counts.hit_tokens or counts.preemptions:
        console.say(
            f"prefix cache: {counts.hit_tokens} of {counts.looked_up_tokens} prompt tokens hit "
            f"({100 * counts.hit_rate:.0f}%); {counts.preemptions} preemptions"
            + (f", {counts.offloads} of them to host memory" if counts.offloads else "")
        )
    if counts.drafted_tokens:
        console.say(
            f"drafts: {counts.accepted_tokens} of {counts.drafted_tokens} tokens accepted "
            f"({100 * counts.acceptance_rate:.0f}%)"
        )
    if seeds := {done.seed for done, p in zip(completions, prompts, strict=True) if not p.sampling.greedy}:
        console.say(f"seed {seeds.pop()}" if len(seeds) == 1 else "seeds are in the output file")
    for prompt, done in zip(prompts, completions, strict=True):
        if prompt.answer is not None:
            verdict = "right" if prompt.answer in done.text else f"wrong: the key is {prompt.answer}"
            console.say(f"answer:{done.text.rstrip()!r:.80} -> the pass key is {verdict}")


def check_parity(folder: Path, engine: Any, prompts: list[Any], completions: list[Any]) -> int:
    """Run the same prompts through single-process transformers and print one line. Rank 0 only; returns the exit code.

    The other ranks need not wait, so the reference may use their cores.
    """
    import torch

    from launch.parity import first_difference, load_reference, reference_tokens

    console.note("parity: running the prompts again through single-process transformers")
    torch.set_num_threads(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    reference = load_reference(folder, engine.runner.dtype, engine.mesh.device)
    total, differences = 0, []
    for index, (prompt, done) in enumerate(zip(prompts, completions, strict=True)):
        total += len(done.token_ids)
        theirs = reference_tokens(reference, prompt.token_ids, len(done.token_ids), prompt.sampling.repetition_penalty)
        at = first_difference(done.token_ids, theirs)
        if at is not None:
            differences.append(f"prompt {index} from token {at} on ({done.token_ids[at]} here, {theirs[at]} there)")
    what = f"single-process transformers (eager, {engine.runner.dtype})"
    if not differences:
        console.say(f"parity: all {total} tokens equal those of {what}")
        return 0
    console.say(f"parity: tokens DIFFER from those of {what}: {'; '.join(differences)}")
    return 1


if __name__ == "__main__":
    boot.main(run)
