"""GPUs and the network between them, from the inside out. Bytes, bytes/s, FLOP/s, seconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from orchestrator.values import Value

MXFP8_CAPABILITIES: Final = (10.0, 12.0)
"""From the first on and below the second: Transformer Engine has not all of MXFP8's products on compute capability 12 (quantization.py,
_compute_mxfp8_support; TransformerEngine issue 2668)."""
FIRST_WITH_FUSED_ATTENTION: Final = 8.0
"""FlashAttention 2 and Transformer Engine's attention need Ampere (their installation notes)."""


class Gpu(Value, frozen=True, kw_only=True):
    """`peak_flops` by precision, dense (without structured sparsity). `memory` is what the driver reports, not the marketing figure."""

    name: str
    memory: int
    peak_flops: dict[str, float]
    memory_bandwidth: float
    compute_capability: str
    source: str
    pcie: float = 0.0
    """Bytes/s of its PCIe slot, a direction; 0: not known."""
    nvlink: float = 0.0
    """Bytes/s of its NVLinks together, a direction; 0: none, or bridges between pairs alone."""

    def __hash__(self) -> int:
        return hash((self.name, self.memory))

    @property
    def has_mxfp8(self) -> bool:
        """Whether FP8 can be scaled by blocks of 32 elements: data-center Blackwell's tensor cores."""
        first, too_late = MXFP8_CAPABILITIES
        return first <= float(self.compute_capability) < too_late

    @property
    def has_fused_attention(self) -> bool:
        return float(self.compute_capability) >= FIRST_WITH_FUSED_ATTENTION

    def covers(self, other: Gpu) -> bool:
        """Whether what was planned for `other` fits and runs here, no slower."""
        peaks = self.peak_flops
        return (
            self.memory >= other.memory
            and self.memory_bandwidth >= other.memory_bandwidth
            and all(peaks.get(precision, 0.0) >= peak for precision, peak in other.peak_flops.items())
        )


def slowest(gpus: Sequence[Gpu]) -> Gpu:
    """What all of them can do: the least memory, bandwidth and peak of each precision that all have, under the name of the one with the
    lowest peak."""

    def capability(gpu: Gpu) -> tuple[int, ...]:
        return tuple(int(part) for part in gpu.compute_capability.split("."))

    common = [precision for precision in gpus[0].peak_flops if all(precision in gpu.peak_flops for gpu in gpus)]
    first = min(gpus, key=lambda gpu: [gpu.peak_flops[precision] for precision in reversed(common)])
    return msgspec.structs.replace(
        first,
        memory=min(gpu.memory for gpu in gpus),
        memory_bandwidth=min(gpu.memory_bandwidth for gpu in gpus),
        pcie=min(gpu.pcie for gpu in gpus),
        nvlink=min(gpu.nvlink for gpu in gpus),
        peak_flops={precision: min(gpu.peak_flops[precision] for gpu in gpus) for precision in common},
        compute_capability=min(gpus, key=capability).compute_capability,
    )


class Level(Value, frozen=True, kw_only=True):
    """One network level: `size` GPUs reach each other over it at `bandwidth` bytes/s per GPU and direction. `size` of the outermost
    level is the largest job it can hold."""

    name: str
    size: int
    bandwidth: float
    latency: float
    source: str = ""


def segment(size: int, node: int, num_gpus: int) -> int:
    """GPUs that a job uses of each domain of `size`, larger than a node: as many whole nodes as leave all domains alike (what Slurm's
    --segment asks for); all of it where that would be less than half of each.

    >>> segment(72, 4, 256), segment(72, 4, 288), segment(72, 4, 8), segment(72, 8, 1024), segment(24, 6, 30)
    (64, 72, 72, 64, 24)
    """
    if num_gpus <= size or num_gpus % size == 0:
        return size
    return next((used for used in range(size - size % node, (size - 1) // 2, -node) if num_gpus % used == 0), size)


class Software(Value, frozen=True, kw_only=True):
    """What decides legality and speed on the nodes. On a CPU machine nothing of it is there."""

    megatron_core: str = "0.16.1"
    deepspeed: str = "0.19.8"
    transformer_engine: bool = True
    flash_attention: bool = True
    apex: bool = True


class Cluster(Value, frozen=True, kw_only=True):
    """`num_gpus` GPUs of one type, `gpus_per_node` to a node.

    `levels` go from the inside out; their sizes are in GPUs, each a multiple of the one before.
    """

    name: str
    gpu: Gpu
    num_gpus: int
    gpus_per_node: int
    levels: tuple[Level, ...]
    host_bandwidth: float
    """GPU to host memory, bytes/s per GPU and direction (offload)."""
    host_memory: int
    """Bytes of host memory per GPU."""
    software: Software = Software()
    mixed: bool = False
    """Its GPUs are of several types, and `gpu` is what all of them can do (`slowest`)."""

    @property
    def is_cpu(self) -> bool:
        return self.gpu.name == "cpu"

    @property
    def num_nodes(self) -> int:
        return -(-self.num_gpus // self.gpus_per_node)
