"""A model at a sequence length: its layers in order, as weights and operations (model/ops.py)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from math import prod

from orchestrator.model.architecture import Architecture
from orchestrator.model.layer import Edge, LayerRun, LayerSpec
from orchestrator.model.ops import Attention, DeltaRule, Dispatch, Enter, Exchange, Exit, Gemm, Op, Pointwise, Saved, Scan, Weight, padded
from orchestrator.model.parts.vision import Images
from orchestrator.values import Value

__all__ = [
    "Architecture", "Attention", "DeltaRule", "Dispatch", "Edge", "Enter", "Exchange", "Exit", "Gemm", "LayerRun", "LayerSpec", "ModelSpec",
    "Op", "Pointwise", "Saved", "Scan", "Weight", "padded",
]  # fmt: skip


class ModelSpec(Value, frozen=True, kw_only=True, dict=True):
    """An architecture at a sequence length: runs of identical layers, embedding first and head last."""

    architecture: Architecture
    seq_length: int
    decoder_seq_length: int | None = None
    images: Images | None = None
    """The images of a sample; None: the model sees none."""
    runs: tuple[LayerRun, ...]
    edges: tuple[Edge, ...] = ()

    def layers(self) -> Iterator[LayerSpec]:
        """Every layer of the model in order."""
        for run in self.runs:
            for _ in range(run.count):
                yield run.layer

    @property
    def num_layers(self) -> int:
        """Number of all layers, embedding and head included."""
        return sum(run.count for run in self.runs)

    @cached_property
    def fixed_kinds(self) -> set[str]:
        """Kinds of the layers that are never recomputed."""
        return {run.layer.kind for run in self.runs if not run.layer.recomputable}

    def kind(self, name: str) -> LayerSpec:
        """The layer of this kind. Raises KeyError."""
        for run in self.runs:
            if run.layer.kind == name:
                return run.layer
        raise KeyError(name)

    @cached_property
    def parameters(self) -> int:
        """Unpadded parameters of the whole model; tied weights once. Published totals are compared with this."""
        return sum(run.layer.parameters * run.count for run in self.runs)

    @property
    def prediction_parameters(self) -> int:
        """Parameters among `parameters` that are of layers of multi-token prediction (model/describe.py names them so)."""
        weights = (weight for run in self.runs for weight in run.layer.weights if weight.name.startswith("mtp."))
        return sum(prod(weight.shape) for weight in weights if not weight.tied)

    @property
    def active_parameters(self) -> int:
        """Parameters among `parameters` that a token goes through: of each layer's experts those that it is sent to; without layers of
        multi-token prediction."""
        found = 0.0
        for run in self.runs:
            share = run.layer.visited_share
            own = (weight for weight in run.layer.weights if not (weight.tied or weight.name.startswith("mtp.")))
            found += run.count * sum(prod(weight.shape) * (share if weight.kind == "expert" else 1.0) for weight in own)
        return round(found)

    @property
    def tokens_per_sample(self) -> int:
        """What tokens/s counts: the sequence, or encoder plus decoder tokens of an encoder-decoder."""
        return self.seq_length + (self.decoder_seq_length or 0)
