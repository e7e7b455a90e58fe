"""Workloads of the engine's benchmark: when requests arrive, how long their prompts are, how many tokens they want."""

import argparse
import random
from collections.abc import Callable
from typing import NamedTuple

SEED = 12


class Arrival(NamedTuple):
    """One request: seconds after the start, prompt tokens, new tokens."""

    at_s: float
    prompt: list[int]
    new: int


def _prompt(chance: random.Random, length: int, vocab_size: int) -> list[int]:
    return chance.choices(range(vocab_size), k=length)


def fixed(args: argparse.Namespace, vocab_size: int) -> list[Arrival]:
    """All at once, all of the same length."""
    chance = random.Random(SEED)
    return [Arrival(0.0, _prompt(chance, args.input_len, vocab_size), args.output_len) for _ in range(args.num_prompts)]


def poisson(args: argparse.Namespace, vocab_size: int) -> list[Arrival]:
    """Of the same length, at random times."""
    chance, at, arrivals = random.Random(SEED), 0.0, []
    for _ in range(args.num_prompts):
        at += chance.expovariate(args.rate)
        arrivals.append(Arrival(at, _prompt(chance, args.input_len, vocab_size), args.output_len))
    return arrivals


def sharegpt(args: argparse.Namespace, vocab_size: int) -> list[Arrival]:
    """At random times, of log-normal lengths much like those of conversations: medians of 100 and 135 tokens."""
    chance, at, arrivals = random.Random(SEED), 0.0, []
    longest = 64 if args.smoke else 2048
    for _ in range(args.num_prompts):
        at += chance.expovariate(args.rate)
        length = min(longest, max(4, round(chance.lognormvariate(4.6, 1.2))))
        new = min(longest // 2, max(4, round(chance.lognormvariate(4.9, 0.9))))
        arrivals.append(Arrival(at, _prompt(chance, length, vocab_size), new))
    return arrivals


WORKLOADS: dict[str, Callable[[argparse.Namespace, int], list[Arrival]]] = {
    "fixed": fixed,
    "poisson": poisson,
    "sharegpt": sharegpt,
}
