"""The paper's full space (Galvatron, arXiv 2211.13878): pipeline stages outermost, and inside a stage every layer with its own tensor
parallelism, data parallelism or ZeRO-3, and recompute. No engine here can start such a plan; Hetu-Galvatron's runtime can.
"""

from __future__ import annotations

from typing import Any, Final

from orchestrator.strategy.capabilities import StateBytes, Traits
from orchestrator.strategy.layout import ENDS
from orchestrator.values import Value

NAME: Final = "layerwise"

_MIXED: Final = StateBytes(weight=2, gradient=4, master=4, moments=8)
_FULL: Final = StateBytes(weight=4, gradient=4, master=0, moments=8)
TRAITS: Final = Traits(
    engine=NAME,
    states={"mixed/0": _MIXED, "mixed/3": _MIXED, "fp32/0": _FULL, "fp32/3": _FULL},
    gradient_bytes_on_wire="grad_reduce_dtype",
    reduce_scatter_from_stage=3,
)
"""Megatron's bytes per parameter, so that it is compared with the engines on equal terms; ZeRO-3 divides them all."""


class LayerChoice(Value, frozen=True, kw_only=True):
    """How one layer is computed by its stage's ranks: dp is their number over tp."""

    tp: int = 1
    zero3: bool = False
    recompute: bool = False

    def label(self) -> str:
        """The choice in one line; what it does not have is left out.

        >>> LayerChoice(tp=2, zero3=True).label()
        'tp=2 zero3'
        """
        return f"tp={self.tp}" + " zero3" * self.zero3 + " recompute" * self.recompute


class ChosenRun(Value, frozen=True, kw_only=True):
    """`count` layers of a kind in a row, computed alike."""

    kind: str
    count: int
    choice: LayerChoice


class LayerwiseStage(Value, frozen=True, kw_only=True):
    """Seconds of one micro-batch, and once a step what of synchronisation is not hidden, and the update; bytes."""

    runs: tuple[ChosenRun, ...]
    forward_s: float
    backward_s: float
    exposed_s: float
    optimizer_s: float
    peak_bytes: float


class LayerwisePlan(Value, frozen=True, kw_only=True):
    """A plan of the full space with its price: seconds of the simulated schedule."""

    world_size: int
    pp: int
    global_batch_size: int
    num_microbatches: int
    stages: tuple[LayerwiseStage, ...]
    step_time_s: float
    peak_memory_bytes: float
    sequence_parallel: bool


def galvatron_json(plan: LayerwisePlan) -> dict[str, Any]:
    """Hetu-Galvatron 2.4's plan file: lists as comma-joined strings, one entry a transformer layer.

    Embedding and head are no layers in it: `vtp` and `embed_sdp` are theirs, one size for both, which is how they are searched.
    """
    layers: list[LayerChoice] = []
    division = []
    ends: list[LayerChoice] = []
    for stage in plan.stages:
        inner = [run for run in stage.runs if run.kind not in ENDS]
        ends += [run.choice for run in stage.runs if run.kind in ENDS]
        division.append(sum(run.count for run in inner))
        for run in inner:
            layers += [run.choice] * run.count

    def joined(values: list[int]) -> str:
        return ",".join(map(str, values))

    sharded = int(bool(ends) and ends[0].zero3)
    return {
        "pp_deg": plan.pp,
        "tp_sizes_enc": joined([choice.tp for choice in layers]),
        "tp_consecutive_flags": joined([1] * len(layers)),
        "dp_types_enc": joined([int(choice.zero3) for choice in layers]),
        "use_sp": joined([0] * len(layers)),
        "checkpoint": joined([int(choice.recompute) for choice in layers]),
        "world_size": plan.world_size,
        "global_bsz": plan.global_batch_size,
        "chunks": plan.num_microbatches,
        "pp_division": joined(division),
        "pipeline_type": "pipedream_flush",
        "default_dp_type": "ddp",
        "vtp": ends[0].tp if ends else 1,
        "vsp": 0,
        "embed_sdp": sharded,
        "vocab_sdp": sharded,
    }
