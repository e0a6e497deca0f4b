"""GPUs and the network between them, from the inside out. Bytes, bytes/s, FLOP/s, seconds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Final, Literal

import msgspec

from orchestrator.values import Value

MXFP8_CAPABILITIES: Final = (10.0, 12.0)
"""Compute capabilities with MXFP8, from the first on and below the second: Transformer Engine has not all of MXFP8's products on compute
capability 12 (quantization.py, _compute_mxfp8_support; TransformerEngine issue 2668)."""
FIRST_WITH_MULTICAST: Final = 9.0
"""First compute capability whose NVSwitch has multicast (CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED)."""
FIRST_WITH_FUSED_ATTENTION: Final = 8.0
"""First compute capability with fused attention: FlashAttention 2 and Transformer Engine's need Ampere (their installation notes)."""


Vendor = Literal["nvidia", "amd"]


def is_cpu(gpu: str) -> bool:
    """Whether a GPU of this name is none: ranks on a CPU's cores, `cpu`, and in a cluster of several types `cpu-NAME`."""
    return gpu.partition("-")[0] == "cpu"


class Gpu(Value, frozen=True, kw_only=True):
    """`peak_flops` by precision, dense (without structured sparsity). `memory` is what the driver reports, not the marketing figure.
    `compute_capability` is what torch says (of AMD's the gfx version: gfx942 is 9.4)."""

    name: str
    memory: int
    peak_flops: dict[str, float]
    memory_bandwidth: float
    compute_capability: str
    source: str
    pcie: float = 0.0
    """Bytes/s of its PCIe slot, a direction; 0: not known."""
    nvlink: float = 0.0
    """Bytes/s of its NVLinks together, a direction (AMD: of its Infinity Fabric links to the node's other GPUs); 0: none, or bridges
    between pairs alone."""
    vendor: Vendor = "nvidia"

    def __hash__(self) -> int:
        return hash((self.name, self.memory))

    @property
    def generation(self) -> str:
        """GPUs of one architecture: the major number of the compute capability, with the vendor's name before it where that is AMD."""
        major = self.compute_capability.split(".")[0]
        return major if self.vendor == "nvidia" else f"{self.vendor}{major}"

    @property
    def has_mxfp8(self) -> bool:
        """Whether FP8 can be scaled by blocks of 32 elements: data-center Blackwell's tensor cores."""
        first, too_late = MXFP8_CAPABILITIES
        return first <= float(self.compute_capability) < too_late

    @property
    def has_multicast(self) -> bool:
        """Whether NVSwitch hands one GPU's stores to several (NVLink SHARP): from Hopper on."""
        return self.vendor == "nvidia" and float(self.compute_capability) >= FIRST_WITH_MULTICAST

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
    mesh: bool = False
    """Whether each pair of GPUs has a link of its own, without a switch: a group of a part of them has its own pairs' links alone."""
    ibgda: bool = True
    """Whether GPUs start transfers over it themselves (NVSHMEM's IBGDA, DOCA GPUNetIO): NVIDIA's network cards, by InfiniBand or RoCE, and
    what is inside a node. Not AWS' EFA, Google's GPUDirect-TCPXO or HPE's Slingshot."""
    stated: str = ""
    """The size in its cluster's YAML where that is another (`node`, `unlimited`, a rack that the job doesn't fill); "": it is the same."""

    @property
    def whole(self) -> int:
        """GPUs that a domain has, of which a job may leave some unused."""
        return int(self.stated) if self.stated.isdecimal() else self.size

    def share(self, members: int) -> float:
        """The share of the bandwidth that `members` of its GPUs have among themselves; all of it where one has nobody to reach here.

        >>> xgmi = Level(name="xgmi", size=8, bandwidth=448e9, latency=0.0, mesh=True)
        >>> xgmi.share(8), round(xgmi.share(2), 3), xgmi.share(1)
        (1.0, 0.143, 1.0)
        """
        return (members - 1) / (self.size - 1) if self.mesh and 1 < members < self.size else 1.0


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

    megatron_core: str = "0.19.2"
    """The newest that our rules were read for (engines/megatron_versions.py), which our image has too (docker/Dockerfile.megatron)."""
    deepspeed: str = "0.19.8"
    transformer_engine: bool = True
    flash_attention: bool = True
    apex: bool = True
    deep_ep: bool = True
    """DeepEP, or its branch HybridEP under the same name, by which Megatron's "flex" sends tokens to experts."""


Stack = Literal["tuned", "stock"]
"""How a job's software runs on the nodes. tuned: as the vendor's own benchmarks (its container and launch scripts, ranks pinned to cores,
NCCL set up for the fabric), on which the prices' constants were fitted. stock: a container as it was downloaded, on a rented node."""


class Part(Value, frozen=True, kw_only=True):
    """The GPUs of one type in a cluster of several: `num_gpus` neighbouring ranks, and the network as these have it (its own NVLink)."""

    gpu: Gpu
    num_gpus: int
    levels: tuple[Level, ...]


class Cluster(Value, frozen=True, kw_only=True):
    """`num_gpus` GPUs of one type, `gpus_per_node` to a node; or of several (`parts`).

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
    stack: Stack = "tuned"
    """How that software runs; what it costs stands with the constants (`cost.calibration.STOCK_HOST`)."""
    mixed: bool = False
    """Whether its GPUs are of several types, of which `gpu` then has what all of them can do (`slowest`)."""
    parts: tuple[Part, ...] = ()
    """The GPU types in the order of ranks, where each pipeline stage is planned for the type that computes it; then `gpu` is what all can
    do, and `levels` what all have. Empty: every rank is planned for `gpu`."""

    def part_of(self, stage: int, pp: int) -> int:
        """The part that has the ranks of this pipeline stage, where pp is the outermost axis of the mesh and no stage has two types
        (strategy/legality.py).

        >>> cpu = Gpu(name="cpu", memory=1, peak_flops={}, memory_bandwidth=1.0, compute_capability="0.0", source="")
        >>> parts = (Part(gpu=cpu, num_gpus=8, levels=()), Part(gpu=cpu, num_gpus=16, levels=()))
        >>> level = Level(name="", size=24, bandwidth=1.0, latency=0.0)
        >>> two = Cluster(name="", gpu=cpu, num_gpus=24, gpus_per_node=8, levels=(level,), host_bandwidth=1.0, host_memory=1, parts=parts)
        >>> [two.part_of(stage, 3) for stage in range(3)]
        [0, 1, 1]
        """
        rank = stage * self.num_gpus // pp
        for index, part in enumerate(self.parts):
            if rank < part.num_gpus:
                return index
            rank -= part.num_gpus
        return 0

    def with_megatron(self, version: str) -> Cluster:
        """The cluster with this version of Megatron-core on it."""
        return msgspec.structs.replace(self, software=msgspec.structs.replace(self.software, megatron_core=version))

    def views(self) -> tuple[Cluster, ...]:
        """For each part, the cluster as if all of it were of that part's type."""
        return tuple(msgspec.structs.replace(self, gpu=part.gpu, levels=part.levels, mixed=False, parts=()) for part in self.parts)

    def gpu_of(self, stage: int, pp: int) -> Gpu:
        """The type that computes this pipeline stage."""
        return self.parts[self.part_of(stage, pp)].gpu if self.parts else self.gpu

    def gpu_of_rank(self, rank: int) -> Gpu:
        """The type that this rank is planned for."""
        return self.gpu_of(rank, self.num_gpus)

    def peak_flops(self, precision: str) -> float | None:
        """FLOP/s of a GPU in the mean; None where one has no figure for the precision."""
        if not self.parts:
            return self.gpu.peak_flops.get(precision)
        if any(precision not in part.gpu.peak_flops for part in self.parts):
            return None
        return sum(part.num_gpus * part.gpu.peak_flops[precision] for part in self.parts) / self.num_gpus

    @property
    def types(self) -> str:
        """What it is made of, for a reader: `16 x A100-SXM-80GB`, `8 x H100-SXM-80GB + 16 x A100-SXM-80GB`."""
        if self.parts:
            return " + ".join(f"{part.num_gpus} x {part.gpu.name}" for part in self.parts)
        return f"{self.num_gpus} x {self.gpu.name}"

    @property
    def shared_nodes(self) -> list[str]:
        """The nodes with GPUs of several types, each as `4 x H100-SXM-80GB + 4 x A100-SXM-80GB`: ranks go in the order of types."""
        ends, size = [*accumulate(part.num_gpus for part in self.parts)], self.gpus_per_node
        types = [(end - part.num_gpus, end, part.gpu.name) for end, part in zip(ends, self.parts, strict=True)]
        firsts = dict.fromkeys(end - end % size for end in ends[:-1] if end % size)
        within = [[(min(end, first + size) - max(begin, first), name) for begin, end, name in types] for first in firsts]
        return [" + ".join(f"{count} x {name}" for count, name in one if count > 0) for one in within]

    @property
    def is_cpu(self) -> bool:
        """Whether its ranks have no GPU."""
        return is_cpu(self.gpu.name)

    @property
    def num_nodes(self) -> int:
        return -(-self.num_gpus // self.gpus_per_node)
