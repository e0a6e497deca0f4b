"""Which stage holds which layers, and what that costs: the values that cost fills and the plan keeps."""

from __future__ import annotations

from orchestrator.strategy.spec import Recompute
from orchestrator.values import Value

ENDS = ("embedding", "head")
"""Kinds of layers of which a model has one; engines recompute neither."""


class LayerSpan(Value, frozen=True, kw_only=True):
    """`count` layers of one kind, `first` counted within that kind from 0, computed the same way."""

    kind: str
    first: int
    count: int
    recompute: Recompute = "none"
    chunk: int = 0
    """Virtual pipeline chunk of the stage (vpp > 1)."""


class Stage(Value, frozen=True, kw_only=True):
    """One pipeline stage: its spans in order, chunk after chunk."""

    layers: tuple[LayerSpan, ...]

    def chunk(self, index: int) -> tuple[LayerSpan, ...]:
        return tuple(span for span in self.layers if span.chunk == index)


class StagePrediction(Value, frozen=True, kw_only=True):
    """One stage: seconds of one micro-batch forward and backward (transfers inside included), peak bytes and what they are made of."""

    forward_s: float
    backward_s: float
    peak_memory_bytes: float
    memory_by_cause: dict[str, float]
    peak_phase: str = ""


class FittedOn(Value, frozen=True, kw_only=True):
    """What the runs that constants were fitted on had; a prediction beyond it is extrapolation (cost/uncertainty.py)."""

    kinds: tuple[str, ...]
    """"dense 16-bit", "dense 8-bit", "experts 16-bit", "experts 8-bit": those of them with a run; and "linear attention", if one had
    such layers, and "adapters", if one trained those alone."""
    num_gpus: int
    """GPUs of the largest run."""
    seq_length: int
    """Tokens of a sample in the run with the longest samples."""
    parameters: tuple[int, int] | None = None
    """Parameters of the smallest and of the largest model, of a user's own runs; None: published ones, of models of all sizes."""


class Prediction(Value, frozen=True, kw_only=True):
    """Step time and peak memory. `by_cause` splits `step_time_s` of the slowest stage into compute, traffic by axis, bubble, optimizer;
    it sums to `step_time_s`. `interval`: 90% (low, high) in seconds, None where nothing like it was measured; `beyond`: how it lies outside
    of what its constants were fitted on, in words (cost/uncertainty.py)."""

    step_time_s: float
    tokens_per_s_per_gpu: float
    peak_memory_bytes: float
    by_stage: tuple[StagePrediction, ...]
    by_cause: dict[str, float]
    model_flops_per_gpu: float = 0.0
    """Model FLOP/s per GPU (recompute not counted)."""
    interval: tuple[float, float] | None = None
    beyond: tuple[str, ...] = ()

    @property
    def fullest(self) -> int:
        """The stage with the highest peak."""
        return max(range(len(self.by_stage)), key=lambda index: (self.by_stage[index].peak_memory_bytes, -index))

    @property
    def busiest(self) -> int:
        """The stage whose micro-batch takes longest, which `by_cause` is of."""
        return max(range(len(self.by_stage)), key=lambda index: (self.by_stage[index].forward_s + self.by_stage[index].backward_s, -index))
