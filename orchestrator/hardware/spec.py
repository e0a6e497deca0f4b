"""GPUs and the network between them, from the inside out. Bytes, bytes/s, FLOP/s, seconds."""

from __future__ import annotations

from orchestrator.values import Value


class Gpu(Value, frozen=True, kw_only=True):
    """`peak_flops` by precision, dense (without structured sparsity). `memory` is what the driver reports, not the marketing figure."""

    name: str
    memory: int
    peak_flops: dict[str, float]
    memory_bandwidth: float
    compute_capability: str
    source: str

    def __hash__(self) -> int:
        return hash((self.name, self.memory))


class Level(Value, frozen=True, kw_only=True):
    """One network level: `size` GPUs reach each other over it at `bandwidth` bytes/s per GPU and direction. `size` of the outermost
    level is the largest job it can hold."""

    name: str
    size: int
    bandwidth: float
    latency: float
    source: str = ""


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

    @property
    def is_cpu(self) -> bool:
        return self.gpu.name == "cpu"

    @property
    def num_nodes(self) -> int:
        return -(-self.num_gpus // self.gpus_per_node)
