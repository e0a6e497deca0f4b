"""The values a search moves in: a mesh, a strategy on it, and the candidate that adds a schedule and a micro-batch size."""

from __future__ import annotations

from typing import Any, Final, Literal, get_args

import msgspec

from orchestrator.model.training import Dtype
from orchestrator.values import Value

Recompute = Literal[
    "none", "layernorm", "selective", "core_attn+layernorm", "mlp", "layernorm+mlp", "core_attn+mlp", "core_attn+layernorm+mlp", "full"
]
"""What of a layer is computed again in backward: nothing, modules of it, or all. "selective" is core_attn, as in Korthikanti et al."""
ZeroStage = Literal[0, 1, 2, 3]
Schedule = Literal["1f1b", "interleaved", "deepspeed_1f1b"]
RECOMPUTE_ORDER: tuple[Recompute, ...] = get_args(Recompute)
"""Weakest first; ties go to the weaker."""
RECOMPUTE_MODULES: dict[Recompute, tuple[str, ...]] = {
    mode: ("core_attn",) if mode == "selective" else tuple(mode.split("+")) for mode in RECOMPUTE_ORDER if mode not in ("none", "full")
}
"""Megatron's --recompute-modules of each mode that is one of modules (transformer_config.py:411-421)."""
CpCommType = Literal["p2p", "a2a", "all_gather", "a2a+p2p"]
CudaGraphImpl = Literal["none", "local"]
Dispatcher = Literal["alltoall", "allgather", "flex"]
RankOrder = Literal["tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"]
"""A mesh's `order` in one word, as megatron-core's initialize_model_parallel takes it."""
RANK_ORDER = ("tp", "cp", "ep", "dp", "pp")
"""Megatron's default: the first axis has adjacent ranks."""
PP_BEFORE_DP = ("tp", "cp", "ep", "pp", "dp")
"""Megatron's --use-tp-pp-dp-mapping: a pipeline's stages are near each other and its replicas far apart."""


class Mesh(Value, frozen=True, kw_only=True):
    """Dense axes tp x cp x dp x pp; experts fold ep x etp x expert_dp over tp x cp x dp.

    >>> Mesh(tp=2, pp=2, dp=4).world_size
    16
    >>> Mesh(tp=2, dp=4, ep=4, etp=1).expert_dp
    2
    """

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    order: tuple[str, ...] = RANK_ORDER

    @property
    def world_size(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    @property
    def expert_dp(self) -> int:
        return self.tp * self.cp * self.dp // (self.ep * self.etp)

    def degree(self, axis: str) -> int:
        """The size of an axis by its name."""
        return int(getattr(self, axis))

    def stride(self, axis: str) -> int:
        """Distance between neighbouring ranks of this axis' groups.

        >>> Mesh(tp=4, dp=2, pp=2).stride("dp"), Mesh(tp=4, dp=2, pp=2).stride("pp")
        (4, 8)
        """
        stride = 1
        for name in self.order:
            if name == axis:
                return stride
            if name != "ep":
                stride *= self.degree(name)
        raise KeyError(axis)


class Strategy(Value, frozen=True, kw_only=True):
    """How one layer is computed and its states are kept."""

    mesh: Mesh
    zero_stage: ZeroStage = 0
    zero_shard_size: int | None = None
    """Ranks that share one copy of the weights at ZeRO-3 (hpZ's secondary group); None: the whole data-parallel group."""
    sequence_parallel: bool = False
    recompute: Recompute = "none"
    offload_optimizer: bool = False
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = True
    grad_reduce_dtype: Dtype = "fp32"
    tp_comm_overlap: bool = False
    """Tensor-parallel traffic in chunks beside the products that make or take it (Transformer Engine's user buffers)."""
    cuda_graph_impl: CudaGraphImpl = "none"
    """local: each layer's forward and backward are one CUDA graph."""
    cp_comm_type: CpCommType = "p2p"
    moe_token_dispatcher_type: Dispatcher = "alltoall"
    megatron_fsdp: bool = False
    """ZeRO-2 or 3 by Megatron's own FSDP (--data-parallel-sharding-strategy optim_grads, optim_grads_params)."""


ENGINE_OPTIONS: Final = (
    *("overlap_grad_reduce", "overlap_param_gather", "tp_comm_overlap", "cuda_graph_impl", "cp_comm_type", "moe_token_dispatcher_type"),
    "megatron_fsdp",
)
"""Choices of the user's that the search takes as they are pinned: fields of `Strategy`, of plans and of pins by the same names."""


def options_of(value: object) -> dict[str, Any]:
    """The engine options of a strategy or a plan; of pins those that are set.

    >>> options_of(Strategy(mesh=Mesh(), tp_comm_overlap=True))["tp_comm_overlap"]
    True
    """
    found = {name: getattr(value, name) for name in ENGINE_OPTIONS}
    return {name: given for name, given in found.items() if given is not None}


def said_options(value: object) -> list[str]:
    """Those that are not as the engines are by themselves, as a line names them.

    >>> said_options(Strategy(mesh=Mesh(), cuda_graph_impl="local", overlap_param_gather=False))
    ['overlap_param_gather=false', 'cuda_graph_impl=local']
    """
    given = {name: there for name, there in options_of(value).items() if there != _DEFAULTS[name]}
    return [name if there is True else f"{name}={str(there).lower()}" for name, there in given.items()]


_DEFAULTS = {info.name: info.default for info in msgspec.structs.fields(Strategy)}


class Candidate(Value, frozen=True, kw_only=True):
    """An outer choice: everything but the split of layers over stages and their recompute. `strategy.recompute` is then the
    strongest mode that the inner search may use."""

    engine: str
    strategy: Strategy
    micro_batch_size: int
    num_microbatches: int
    vpp: int = 1
    schedule: Schedule = "1f1b"

    @property
    def mesh(self) -> Mesh:
        return self.strategy.mesh

    def label(self) -> str:
        """One line for tables and messages.

        >>> Candidate(engine="megatron", strategy=Strategy(mesh=Mesh(tp=2, pp=2, dp=4), zero_stage=1), micro_batch_size=1,
        ...           num_microbatches=8).label()
        'megatron tp=2 pp=2 dp=4 zero_stage=1 mbs=1'
        """
        mesh = self.mesh
        parts = [self.engine]
        for axis in ("tp", "pp", "cp", "ep"):
            if mesh.degree(axis) > 1:
                parts.append(f"{axis}={mesh.degree(axis)}")
        parts.append(f"dp={mesh.dp}")
        if self.vpp > 1:
            parts.append(f"vpp={self.vpp}")
        if self.schedule == "deepspeed_1f1b":
            parts.append(self.schedule)
        parts.append(f"zero_stage={self.strategy.zero_stage}")
        if self.strategy.zero_shard_size is not None:
            parts.append(f"zero_shard_size={self.strategy.zero_shard_size}")
        if self.strategy.sequence_parallel:
            parts.append("sp")
        if self.strategy.offload_optimizer:
            parts.append("offload")
        if mesh.order != RANK_ORDER:
            parts.append(f"rank_order={'-'.join(mesh.order)}")
        parts += said_options(self.strategy)
        parts.append(f"mbs={self.micro_batch_size}")
        return " ".join(parts)
