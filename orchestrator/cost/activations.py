"""Bytes of activations of one layer on one rank: what forward saves for backward, and what a pass needs besides."""

from __future__ import annotations

from functools import cached_property
from typing import Final, NamedTuple

from orchestrator.cost.calibration import Calibration
from orchestrator.cost.compute import activation_itemsize
from orchestrator.cost.recompute import DROPPED, dropped
from orchestrator.model.routing import times
from orchestrator.model.spec import Enter, Gemm, LayerSpec, Pointwise, padded
from orchestrator.model.training import QUANTISED
from orchestrator.strategy.axes import cp
from orchestrator.strategy.capabilities import Traits
from orchestrator.strategy.spec import Recompute, Strategy


class Activations(NamedTuple):
    """Bytes of one micro-batch in one layer: kept from forward to backward, and alive in addition while the pass is in the layer."""

    saved: float
    transient_forward: float
    transient_backward: float


NVFP4_SAVED: Final = 4.5 / 8
"""Bytes an element that an NVFP4 product keeps of its input for backward: along columns, 4 bits and an 8-bit scale for each 16."""


def _quantised(layer: LayerSpec, strategy: Strategy, saved: float, copied: float, without: tuple[str, ...]) -> float:
    """What FP8 changes in a sample's saved bytes: products keep their quantised inputs (`saved` bytes more an element) in place of those
    themselves, but attention keeps its output anyway, beside the projection's quantised copy (`copied`). The vocabulary's stays
    bf16, and so does the router's, which is no linear of Transformer Engine."""
    mesh = strategy.mesh
    change = 0.0
    for op in layer.ops:
        if isinstance(op, Gemm) and not (op.pad_to or op.wide) and op.role != "router":
            for tensor in op.saves:
                if tensor.group not in without:
                    elements = tensor.local_elements(mesh.tp, sequence_parallel=strategy.sequence_parallel, cp=mesh.cp)
                    change += elements * (copied if tensor.group == "attention" and op.split == "row" else saved)
    return change


def _uneven(layer: LayerSpec, strategy: Strategy, itemsize: int, without: tuple[str, ...]) -> float:
    """What the rank with most tokens keeps of its experts above an even share, of a sample: the engine's own dtype for what FP8 narrows."""
    mesh, more = strategy.mesh, 0.0
    for op in layer.ops:
        if isinstance(op, Gemm | Pointwise) and op.routing is not None:
            even = sum(
                tensor.local_elements(mesh.tp, sequence_parallel=strategy.sequence_parallel, cp=mesh.cp) * (tensor.itemsize or itemsize)
                for tensor in op.saves
                if tensor.group not in without
            )
            more += (times(op.routing.fullest, mesh.ep) - 1) * mesh.etp * even
    return more


class LayerActivations:
    """What one layer on one rank keeps for its backward pass: saved tensors as the layer names them, divided by tp, sequence parallelism
    and cp; a full recompute keeps the input. `domain`: GPUs of the innermost network level."""

    def __init__(
        self,
        layer: LayerSpec,
        strategy: Strategy,
        micro_batch_size: int,
        precision: str,
        traits: Traits,
        calibration: Calibration,
        domain: int = 1,
    ) -> None:
        self.layer, self.strategy, self.micro_batch_size, self.precision = layer, strategy, micro_batch_size, precision
        self.traits, self.calibration, self.domain = traits, calibration, domain
        self.itemsize = activation_itemsize(precision)
        self._left: dict[Recompute, Activations] = {}

    def with_recompute(self, recompute: Recompute) -> Activations:
        """What this recompute leaves, of a layer that can be recomputed where it is any."""
        found = self._left.get(recompute)
        if found is None:
            found = self._left[recompute] = self._with_recompute(recompute)
        return found

    def _with_recompute(self, recompute: Recompute) -> Activations:
        layer, strategy = self.layer, self.strategy
        if layer.forward_only:  # each tensor goes once the next is made
            return Activations(0.0, self._working, 0.0)
        everything, working = self._everything, self._working
        without = (*self._in_pieces, *dropped(recompute, fused_norms=self.traits.fused_norms))
        if recompute == "full":
            shard = strategy.mesh.cp * (strategy.mesh.tp if strategy.sequence_parallel else 1)
            kept = min(layer.input_elements * self.itemsize * self.micro_batch_size / shard, everything)
        else:
            kept = self._saved(*without) if without else everything
        return Activations(kept, working, working + everything - kept)

    def _saved(self, *without: str) -> float:
        """Bytes that forward keeps, but for those of the groups `without`."""
        layer, strategy, mesh, itemsize = self.layer, self.strategy, self.strategy.mesh, self.itemsize
        nbytes = layer.saved_bytes(
            mesh.tp,
            sequence_parallel=strategy.sequence_parallel,
            cp=mesh.cp,
            itemsize=itemsize,
            flash_attention=self.traits.flash_attention,
            without=without,
        )
        if self.precision in QUANTISED:
            narrow = self.calibration.fp8_saved_bytes if self.precision == "fp8" else NVFP4_SAVED
            nbytes += _quantised(layer, strategy, narrow - itemsize, narrow % itemsize, without)
        if mesh.etp > 1 and "mlp" not in without:  # the tokens of all ranks that share an expert (token_dispatcher.py:700)
            gathered_tokens = sum(op.tokens * op.k for op in layer.ops if isinstance(op, Gemm) and op.experts and op.split == "column")
            nbytes += (mesh.etp - 1) * gathered_tokens * itemsize / (mesh.tp * mesh.cp)
        nbytes += _uneven(layer, strategy, itemsize, without)
        return self.micro_batch_size * nbytes

    @cached_property
    def _in_pieces(self) -> tuple[str, ...]:
        """Groups of saved tensors that are made for a piece of a sequence at a time, and again in backward."""
        return DROPPED["mlp"] if self.strategy.tiled_mlp > 1 and self.layer.recomputable else ()

    @cached_property
    def _everything(self) -> float:
        """Bytes of all that forward makes for backward and that is there at once."""
        whole = self._saved()
        return whole - (1 - 1 / self.strategy.tiled_mlp) * (whole - self._saved(*self._in_pieces)) if self._in_pieces else whole

    @cached_property
    def _working(self) -> float:
        """Bytes that either pass needs besides what is kept."""
        layer, strategy, mesh, itemsize, traits = self.layer, self.strategy, self.strategy.mesh, self.itemsize, self.traits
        micro_batch_size, sp = self.micro_batch_size, strategy.sequence_parallel
        largest = micro_batch_size * max(
            (
                tensor.local_elements(mesh.tp, sequence_parallel=sp, cp=mesh.cp)
                * (tensor.itemsize or itemsize)
                / (strategy.tiled_mlp if tensor.group in self._in_pieces else 1)
                for tensor in layer.saved(flash_attention=traits.flash_attention)
            ),
            default=0.0,
        )
        gathered = 0.0
        if sp:  # the input of a tensor-parallel region, gathered over tp (layers.py:478)
            entering = max((op.elements for op in layer.ops if isinstance(op, Enter)), default=0)
            gathered = entering * itemsize * micro_batch_size / mesh.cp
        if traits.gathers_few_query_groups:  # as they come and in order: mappings.py, _gather_along_last_dim
            few = max((op.elements for op in layer.attentions if op.kv_heads < mesh.tp), default=0)
            gathered = max(gathered, 2 * few * itemsize * micro_batch_size / mesh.cp)
        working = self.calibration.transient_activations * largest + gathered
        if mesh.cp > 1:
            inner, steps = cp.cut(strategy, traits.context_parallel, self.domain)
            held = (cp.working_bytes(op, strategy, micro_batch_size, itemsize, inner, steps) for op in layer.attentions)
            working += max(held, default=0.0)
        return working + logits_bytes(layer, strategy, micro_batch_size, traits)


FUSED_LOSS_BYTES: Final = 2.0
"""Bytes per logit of Megatron's fused loss beyond the unfused one's: 16-bit logits 2, fp32 copy 4 and exponentials 4, which jit's kernels
don't write over that copy (core/fusions/fused_cross_entropy.py; peaks of Megatron-core's own tests, validation/engines/megatron.py)."""


def logits_bytes(layer: LayerSpec, strategy: Strategy, micro_batch_size: int, traits: Traits) -> float:
    """Bytes of the logits, their fp32 copy and the softmax kept for backward, of one micro-batch over the local vocabulary
    (cross_entropy.py:28); over the whole one where the engine gathers them; of a piece of the sequence where they are computed so."""
    mesh, fused = strategy.mesh, strategy.cross_entropy_loss_fusion
    total = 0.0
    for op in layer.ops:
        if isinstance(op, Gemm) and op.pad_to:
            whole = op.split is None or traits.layers == "hugging_face"
            local = op.n if whole else padded(op.n, op.pad_to, mesh.tp) // mesh.tp
            total += op.tokens * micro_batch_size / mesh.cp * local * (traits.logits_bytes + FUSED_LOSS_BYTES * fused)
    return total / strategy.tiled_logits
