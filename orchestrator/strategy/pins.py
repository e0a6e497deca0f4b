"""What the user fixes and how much memory there is: the borders of the search."""

from __future__ import annotations

from orchestrator.strategy.spec import CpCommType, CudaGraphImpl, Dispatcher, RankOrder, Recompute, Schedule, ZeroStage
from orchestrator.values import Value


class Pins(Value, frozen=True, kw_only=True):
    """Each field that is not None fixes that choice. `layout` is Megatron's pipeline layout string ("Et*7|t*9|t*9|t*7L")."""

    tp: int | None = None
    pp: int | None = None
    vpp: int | None = None
    cp: int | None = None
    ep: int | None = None
    etp: int | None = None
    dp: int | None = None
    zero_stage: ZeroStage | None = None
    micro_batch_size: int | None = None
    sequence_parallel: bool | None = None
    recompute: Recompute | None = None
    layout: str | None = None
    offload: bool | None = None
    zero_shard_size: int | None = None
    overlap_grad_reduce: bool | None = None
    overlap_param_gather: bool | None = None
    tp_comm_overlap: bool | None = None
    cuda_graph_impl: CudaGraphImpl | None = None
    cp_comm_type: CpCommType | None = None
    moe_token_dispatcher_type: Dispatcher | None = None
    megatron_fsdp: bool | None = None
    schedule: Schedule | None = None
    rank_order: RankOrder | None = None


class MemoryLimit(Value, frozen=True, kw_only=True):
    """Bytes a rank may use. `reserve` is kept free of `limit` for what no model foresees; None: the share that the engine's measured peaks
    ask for (`of`)."""

    limit: int
    reserve: int | None
    margin: float | None = None
    """The share that `reserve` is by an engine's measured peaks; None: the user's own figure."""

    def of(self, margin: float) -> MemoryLimit:
        """This limit for an engine of which `margin` is kept free where the user has not said how much.

        >>> MemoryLimit(limit=1000, reserve=None).of(0.07).usable, MemoryLimit(limit=1000, reserve=0).of(0.07).usable
        (930, 1000)
        """
        if self.reserve is not None:
            return self
        return MemoryLimit(limit=self.limit, reserve=round(self.limit * margin), margin=margin)

    @property
    def usable(self) -> int:
        assert self.reserve is not None, "an engine decides what is kept free (of)"
        return self.limit - self.reserve
