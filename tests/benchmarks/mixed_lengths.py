"""What torch's caching allocator reserves over samples of many lengths, beside what is in use at once, and what ms-swift printed.

    python tests/benchmarks/mixed_lengths.py [STEPS]

ms-swift's benchmark of 2024 (docs/source_en/LLM/Benchmark.md) trains on samples of 91 to 19,548 tokens (mean 3,234, deviation 2,548), drops
those above max_length, and prints torch.cuda.max_memory_reserved(). Played here: the allocator's large blocks, and one step's tensors that
grow with the length, in the order in which they come and go. Lengths are log-normal, their order is drawn: figures of three draws.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from orchestrator.commands import command, usage
from orchestrator.errors import InputError
from orchestrator.units import GIB, MIB

MEAN, DEVIATION, LEAST, LONGEST = 3234.4, 2547.5, 91, 19548
CAPS = (512, 1024, 2048, 4096, 8192)
MODELS = {
    "Qwen-1.8B": (151936, 2048, 5504, 24, 3.46, (6.99, 10.71, 16.35, 23.80, 37.03)),
    "Qwen-7B": (151936, 4096, 11008, 32, 14.46, (18.01, 21.73, 27.74, 35.31, 48.41)),
    "Yi-6B": (64000, 4096, 11008, 32, 11.36, (13.72, 15.44, 16.95, 28.25, 43.81)),
}
"""Vocabulary, hidden size, MLP width, layers, GiB of weights and states, GiB that ms-swift printed at each of `CAPS`."""


@dataclass(eq=False)
class Block:
    size: int
    before: Block | None = None
    after: Block | None = None
    free: bool = False


@dataclass
class Allocator:
    """Large blocks of c10/cuda/CUDACachingAllocator.cpp: best fit, split where more than 1 MiB is left, segments never joined."""

    free: list[Block] = field(default_factory=list)
    reserved: int = 0
    used: int = 0
    peak: int = 0

    def take(self, nbytes: int) -> Block:
        size = -(-nbytes // 512) * 512
        fitting = [block for block in self.free if block.size >= size]
        if fitting:
            block = min(fitting, key=lambda block: block.size)
            self.free.remove(block)
        else:
            segment = 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
            self.reserved += segment
            block = Block(segment)
        block.free = False
        if block.size - size > MIB:
            rest = Block(block.size - size, block, block.after, free=True)
            if block.after is not None:
                block.after.before = rest
            block.after, block.size = rest, size
            self.free.append(rest)
        self.used += block.size
        self.peak = max(self.peak, self.used)
        return block

    def give(self, block: Block) -> None:
        self.used -= block.size
        block.free = True
        before = block.before
        if before is not None and before.free:
            self.join(before, block)
            block = before
        after = block.after
        if after is not None and after.free:
            self.free.remove(after)
            self.join(block, after)
        if block not in self.free:
            self.free.append(block)

    @staticmethod
    def join(first: Block, second: Block) -> None:
        first.size += second.size
        first.after = second.after
        if second.after is not None:
            second.after.before = first


def step(allocator: Allocator, tokens: int, vocabulary: int, hidden: int, ffn: int, layers: int) -> None:
    """Forward, loss under autocast and backward with every layer recomputed: 16-bit logits, their shifted copy, fp32 logits, log-softmax,
    accelerate's fp32 copy of the output, three gradients; of a layer its inputs and products."""
    take, give = allocator.take, allocator.give
    logits, width = tokens * vocabulary, tokens * hidden
    inputs = [take(2 * width) for _ in range(layers)]
    narrow, shifted, wide, soft = take(2 * logits), take(2 * logits), take(4 * logits), take(4 * logits)
    give(wide)
    give(take(4 * logits))
    give(narrow)
    chosen, gradient = take(4 * logits), take(4 * logits)
    give(chosen)
    give(soft)
    back = take(2 * logits)
    give(gradient)
    whole = take(2 * logits)
    give(back)
    give(shifted)
    hidden_gradient = take(2 * width)
    give(whole)
    for kept in reversed(inputs):
        sizes = (4 * width, 2 * width, 6 * width, 2 * width, 2 * width, *(2 * tokens * ffn,) * 5, 4 * width, 2 * width)
        for block in [take(size) for size in sizes]:
            give(block)
        give(kept)
    give(hidden_gradient)


def reserved(cap: int, model: tuple[int, int, int, int], steps: int, seed: int) -> tuple[float, float]:
    """GiB that are reserved after so many steps, and that were in use at once at most."""
    draw, allocator = random.Random(seed), Allocator()
    variance = math.log(1 + (DEVIATION / MEAN) ** 2)
    left = steps
    while left:
        tokens = int(draw.lognormvariate(math.log(MEAN) - variance / 2, math.sqrt(variance)))
        if LEAST <= tokens <= min(cap, LONGEST):
            step(allocator, tokens, *model)
            left -= 1
    return allocator.reserved / GIB, allocator.peak / GIB


def main(words: Sequence[str]) -> None:
    if len(words) > 1 or not "".join(words or "1").isdigit():
        raise InputError("STEPS", " ".join(words), "must be one whole number")
    steps = int(words[0]) if words else 300
    for name, (vocabulary, hidden, ffn, layers, held, printed) in MODELS.items():
        for cap, gib in zip(CAPS, printed, strict=True):
            found = [reserved(cap, (vocabulary, hidden, ffn, layers), steps, seed) for seed in range(3)]
            drawn = ", ".join(f"{each:.1f}" for each, _ in found)
            print(f"{name} up to {cap}: {gib - held:.1f} GiB printed above weights; reserved {drawn}; in use {found[0][1]:.1f}", flush=True)


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:], lambda: usage(__doc__), main))
