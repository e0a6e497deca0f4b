"""Megatron by others' hands or in other versions than the planned engine: NVIDIA's NeMo and Megatron-Bridge recipes, Megatron-core's own
functional tests, Megatron-LM of 2021 and 2022."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

from msgspec.structs import replace

from orchestrator.cost.calibration import Calibration
from orchestrator.cost.price import CostModel
from orchestrator.cost.stage import StageCost, StageSums
from orchestrator.hardware.spec import Cluster
from orchestrator.model.ops import Dispatch, Gemm, Op, Pointwise, Scan
from orchestrator.model.spec import ModelSpec
from orchestrator.model.training import Precision
from orchestrator.strategy.capabilities import StateBytes, Traits
from orchestrator.strategy.layout import LayerSpan
from orchestrator.strategy.spec import Candidate
from orchestrator.units import ITEMSIZE
from tests.validation.engines.bigscience import PartitionedBoundaries
from tests.validation.engines.engine import EAGER, FP32_STATES, MEGATRON_STATES, MeasuredEngine, all_stages, with_separate_gate

PLANNED: Final = "megatron"
NEMO_STATES: Final = StateBytes(weight=2, gradient=2, master=4, moments=8, step=4)
"""NVIDIA's performance recipes keep gradients in bf16 (grad_reduce_in_fp32 off): --grad-reduce-in-bf16, param_and_grad_buffer.py."""
BRIDGES_BUCKET: Final = 128 * 1024 * 1024
"""Parameters of a bucket in NeMo's and Bridge's recipes, whatever the group (Megatron-Bridge, training/comm_overlap.py:577)."""
FUSED_LOSS_LOGITS: Final = 10.0
"""Bytes per logit with Megatron's --cross-entropy-loss-fusion: bf16 logits 2, fp32 copy 4, and exponentials 4 that jit does not write in
place."""
IN_PLACE_LOGITS: Final = 2.0
"""Bytes per logit of Transformer Engine's loss, which Bridge's performance recipes take (cross_entropy_fusion_impl=te): it writes the
gradient over the 16-bit logits (its pytorch/cross_entropy.py)."""
CORE, FUSED_LOSS, UNFUSED = "megatron_core_tests", "megatron_core_tests_fused_loss", "megatron_core_tests_unfused"
LIBRARY, LIBRARY_UNFUSED = "bridge_library", "bridge_library_unfused"


def _traits(name: str, **more: object) -> Traits:
    shared: dict[str, object] = {
        "states": all_stages(MEGATRON_STATES, FP32_STATES),
        "gradient_bytes_on_wire": "grad_reduce_dtype",
        "reduce_scatter_from_stage": 1,
    }
    return Traits(engine=name, **(shared | more))  # type: ignore[arg-type]


UNFUSED_ROTARY: Final = (24.0, 20.0)
"""Bytes moved per element in forward and backward by rotary positions as torch's kernels (mcore models/common/embeddings/rope_utils.py,
_apply_rotary_pos_emb_bshd, in 16 bits): times the cosine 4, negated half 2, halves joined 4, times the sine 4, added 6, joined with the
part that does not turn 4; backward the same without the last."""
UNFUSED_GATE: Final = (10.0, 26.0)
"""Bytes moved per element of the product by a gate as torch's kernels (mcore transformer/mlp.py, glu): activated 4, multiplied 6; backward
12, 6, and the gradients of both halves joined 8."""


def _library_kernels(model: ModelSpec) -> ModelSpec:
    """The model as Megatron-Bridge's library recipes compute it, which fuse the loss and the gradients' sums and nothing else
    (models/gpt_provider.py, "Fusions": apply_rope_fusion and bias_activation_fusion stay at TransformerConfig's False)."""
    moved = {"rotary": UNFUSED_ROTARY, "activation": UNFUSED_GATE}

    def changed(op: Op) -> Op:
        if not isinstance(op, Pointwise) or op.role not in moved or (op.role == "activation" and not model.architecture.gated):
            return op
        forward, backward = moved[op.role]
        return replace(op, moved=forward, moved_backward=backward)

    model = with_separate_gate(model)
    runs = (replace(run, layer=replace(run.layer, ops=tuple(map(changed, run.layer.ops)))) for run in model.runs)
    return replace(model, runs=tuple(runs))


def _variant(row: Mapping[str, str], precision: Precision) -> str:
    notes = row.get("notes", "")
    if "library recipe" in row.get("engine", ""):
        return LIBRARY_UNFUSED if "attention-backend=unfused" in notes else LIBRARY
    if any(words in notes for words in ("attention-backend=unfused", "attention-backend=local", "transformer-impl=local")):
        return UNFUSED
    return FUSED_LOSS if "cross-entropy-loss-fusion=True" in notes else CORE


GRADIENTS_OF_A_CHOICE, GRADIENTS_OF_A_TOKEN = 3, 5
"""Hidden states that `HeldUntilTheChunksEnd` keeps, for each expert of a token and for the token: counted on CPU ranks, 17 with four."""


class HeldUntilTheChunksEnd(CostModel):
    """Megatron-core before 0.16, whose combined 1F1B gives back what a layer's parts hand on (gradients of the tokens sent, received and
    computed, and of what attention and the residual take) when the backward pass is through the whole chunk, beside the next forward pass
    that fills memory up again: `TransformerLayerNode._release_state` left the inputs of its base class, and the plan kept all layers
    (core/models/gpt/fine_grained_callables.py, common/model_chunk_schedule_plan.py). From pull request 2236 of January 2026 on, in 0.16.1
    and 0.19, each layer is given back when it is passed; memory then stays level on CPU ranks, but for what one layer takes."""

    def sums(self, candidate: Candidate, spans: Iterable[LayerSpan] = ()) -> StageSums:
        spans = tuple(spans)
        sums, strategy = super().sums(candidate, spans), candidate.strategy
        if strategy.overlap_moe_expert_parallel_comm:
            held = [0.0] * candidate.vpp
            for span in spans:
                held[span.chunk] += span.count * self._held(span.kind)
            shards = strategy.mesh.cp * (strategy.mesh.tp if strategy.sequence_parallel else 1)
            sums.transient_backward += max(held) * self.itemsize * candidate.micro_batch_size / shards
        return sums

    def _held(self, kind: str) -> float:
        """Elements of a sample in a layer of this kind."""
        dispatches = (op for op in self.kinds[kind].ops if isinstance(op, Dispatch))
        return sum((GRADIENTS_OF_A_CHOICE * op.topk + GRADIENTS_OF_A_TOKEN) * op.elements for op in dispatches)


def _by_release(row: Mapping[str, str]) -> type[CostModel]:
    """Containers of 2025 have megatron-core 0.14 or 0.15."""
    said = f"{row.get('software', '')} {row.get('notes', '')}"
    return HeldUntilTheChunksEnd if re.search(r"\b(NeMo |nemo:|release=)25\.", said) else CostModel


NEMO: Final = MeasuredEngine(
    # its recipes pass chunks on beside the products (Transformer Engine's user buffers)
    traits=_traits(
        "nemo",
        constants={"tp_overlap": 0.85},
        states=all_stages(NEMO_STATES, FP32_STATES),
        logits_bytes=IN_PLACE_LOGITS,
        message_parameters=(BRIDGES_BUCKET, 0),
    ),
    printed=("nemo", "bridge"),
    resembles=PLANNED,
    dispatcher="flex",  # of 110 recipes of experts 90 (expert_recipes_bridge), the others say nothing
    zero_stage=1,
    sequence_parallel=True,
    says_recompute=True,
    reduce_dtype="bf16",
    accumulate_dtype="bf16",
    adapts="megatron-core",
    cost_in=_by_release,
)
NEMO_FSDP: Final = MeasuredEngine(
    traits=_traits("nemo_megatron_fsdp", states=all_stages(NEMO_STATES, FP32_STATES), logits_bytes=IN_PLACE_LOGITS),
    printed=("megatron-fsdp",),
    zero_stage=3,
    sequence_parallel=True,
)
"""Megatron-FSDP in NVIDIA's recipes, which reduce gradients in 16 bits as the others do."""
MEGATRON_CORE: Final = MeasuredEngine(
    traits=_traits(CORE),
    printed=("megatron-core", "(te 2.", "megatron"),
    not_printed=("megatron-deepspeed",),
    resembles=PLANNED,
    zero_stage=0,
    says_recompute=True,
    variant=_variant,
)
MEGATRON_CORE_FUSED_LOSS: Final = replace(
    MEGATRON_CORE, traits=_traits(FUSED_LOSS, logits_bytes=FUSED_LOSS_LOGITS), printed=(), variant=None
)
GEODESIC, GEODESIC_WIDE = "bridge_fork", "bridge_fork_wide_scans"


def _wide_experts(model: ModelSpec) -> ModelSpec:
    """The model with routed experts in 16 bits whatever its other products take: torch._grouped_mm of bf16 tensors."""

    def wide(op: Op) -> Op:
        return replace(op, wide=True) if isinstance(op, Gemm) and op.experts else op

    runs = (replace(run, layer=replace(run.layer, ops=tuple(map(wide, run.layer.ops)))) for run in model.runs)
    return replace(model, runs=tuple(runs))


def _scans_in_32_bits(model: ModelSpec) -> ModelSpec:
    """The model with state spaces computed in 32 bits and their forward again in backward: the scan is handed its inputs in fp32, in a
    checkpoint of its own (pipeline_training_patches.py of Geodesic's fork, ISAMBARD_FP32_SSM_STATE=checkpoint). Tensors of 16 bits take
    another element; seconds are by `scan_efficiency`, as the scan's own."""
    slower = Calibration().memory_efficiency / Calibration().scan_efficiency * ITEMSIZE["bf16"]

    def with_more(op: Op) -> tuple[Op, ...]:
        if not isinstance(op, Scan):
            return (op,)
        channels, shared = op.heads * op.head_dim, op.groups * op.state
        states = op.state * channels / op.chunk  # of a chunk, by token
        forward = 5 * channels + 4 * shared + 2 * states
        backward = 17 * channels + 19 * shared + 5 * states
        again = op.elements / op.tokens + forward
        moved, moved_backward = (slower * each / channels for each in (forward, backward + again))
        name = f"{op.name}.wide"
        return op, Pointwise(name=name, elements=op.tokens * channels, moved=moved, moved_backward=moved_backward, shard="tp")

    runs = (
        replace(run, layer=replace(run.layer, ops=tuple(each for op in run.layer.ops for each in with_more(op))))
        for run in _wide_experts(model).runs
    )
    return replace(model, runs=tuple(runs))


def _by_scans(row: Mapping[str, str], precision: Precision) -> str:
    notes = row.get("notes", "")
    return GEODESIC if any(words in notes for words in ("SSM state in bf16", "posture 15: all of them")) else GEODESIC_WIDE


BRIDGE_FORK: Final = MeasuredEngine(
    traits=_traits(GEODESIC, gradient_buffer="grad_accum_dtype", fp32_gradient_fusion=False),
    printed=("fork of megatron-bridge",),
    resembles=PLANNED,
    zero_stage=1,
    says_recompute=True,
    constants_of=PLANNED,
    variant=_by_scans,
    layers=_wide_experts,
)
"""Geodesic's fork of Megatron-Bridge, whose rows say what it sets. Its experts are torch._grouped_mm, whose weights' gradients a kernel of
its own adds up (E-036 of its campaign: 3,056 additions a step; of linears without experts, a tenth of the weights, products add up)."""
BRIDGE_FORK_WIDE: Final = replace(
    BRIDGE_FORK,
    traits=_traits(GEODESIC_WIDE, gradient_buffer="grad_accum_dtype", fp32_gradient_fusion=False),
    printed=(),
    variant=None,
    layers=_scans_in_32_bits,
)
BRIDGE_LIBRARY: Final = replace(
    MEGATRON_CORE,
    traits=_traits(LIBRARY, logits_bytes=FUSED_LOSS_LOGITS),
    printed=(),
    variant=None,
    constants_of=PLANNED,
    layers=_library_kernels,
)
"""Megatron-Bridge's recipes as others start them, untuned: gradients in 32 bits, nothing of tensor parallelism beside the products."""
BRIDGE_LIBRARY_UNFUSED: Final = replace(
    BRIDGE_LIBRARY, traits=_traits(LIBRARY_UNFUSED, logits_bytes=FUSED_LOSS_LOGITS, flash_attention=False)
)
MEGATRON_CORE_UNFUSED: Final = replace(
    MEGATRON_CORE, traits=_traits(UNFUSED, constants=EAGER, flash_attention=False), printed=(), variant=None
)


class BlockingChunks(PartitionedBoundaries):
    """Interleaved chunks that wait for their transfers: behind each pair of a forward and a backward pass a stage sends and receives both
    ways at once, and computes nothing meanwhile (megatron/schedules.py:335 at 6985e58, p2p_communication.py:128: wait, synchronize).
    Megatron sends beside compute since 2023 (--overlap-p2p-communication)."""

    def hop_seconds(self, candidate: Candidate) -> tuple[float, ...]:
        return (0.0,) * (candidate.mesh.pp * candidate.vpp) if candidate.vpp > 1 else super().hop_seconds(candidate)

    def stage_cost(self, candidate: Candidate, sums: StageSums, index: int) -> StageCost:
        cost = super().stage_cost(candidate, sums, index)
        if candidate.vpp == 1:
            return cost
        sends, gather = self.border_seconds(candidate)
        waits = max(sends[index - 1], sends[index]) / 2 + gather
        forward, backward = (tuple(seconds + waits for seconds in passes) for passes in (cost.forward_s, cost.backward_s))
        return replace(cost, forward_s=forward, backward_s=backward)


def _reduces_behind(candidate: Candidate, cluster: Cluster, constants: Calibration) -> Calibration:
    """A pipeline has Megatron's own DDP, which reduces when all passes are over (megatron/training.py:334 and 373 at 6985e58); without one
    the paper's scripts have torch's, which reduces beside them (examples/sc21/run_table_1.sh, DDP=torch)."""
    return replace(constants, overlap_efficiency=0.0) if candidate.mesh.pp > 1 else constants


def _by_source(row: Mapping[str, str], precision: Precision) -> str:
    source = row.get("source", "")
    return LM_BIGSCIENCE if "bigscience" in source else LM_2022 if "2205.05198" in source else LM_2021


LM_2021, LM_2022, LM_BIGSCIENCE = "megatron_lm_2021", "megatron_lm_2022", "megatron_lm_bigscience"
HALF_STATES: Final = StateBytes(weight=2, gradient=2, master=4, moments=8, step=4)
"""Gradients are accumulated and reduced in 16 bits, and copied to 32 for the update, where nobody asks for
--accumulate-allreduce-grads-in-fp32 (megatron/arguments.py:575, model/distributed.py:127, optimizer/optimizer.py:316 at 6985e58)."""
SEPARATE_PASSES: Final = {"optimizer_efficiency": 0.32}
"""The update in kernels of their own moves 70 bytes a parameter, of which `_optimizer_seconds` counts 32: gradients into a flat buffer and
back 8, as fp32 6, unscaled 8, their norm 4, clipped 8, Adam 28, weights back to 16 bits 6, 2 cleared (megatron/optimizer/optimizer.py:398,
clip_grads.py at 6985e58); .70 of the bandwidth as elsewhere."""
MEGATRON_LM_2021: Final = MeasuredEngine(
    traits=_traits(
        LM_2021, constants=SEPARATE_PASSES, states=all_stages(HALF_STATES, FP32_STATES), flash_attention=False, fp32_gradient_fusion=False
    ),
    printed=("megatron-lm",),
    not_printed=("(te 2.",),
    resembles=PLANNED,
    zero_stage=0,
    says_recompute=True,
    reduce_dtype="fp16",
    variant=_by_source,
    constants_in=_reduces_behind,
    cost=BlockingChunks,
)
"""Megatron-LM of the SC21 paper (its scripts are for 6985e58938d of August 2021: examples/sc21/README.md): fused kernels, no flash
attention."""
MEGATRON_LM_2022: Final = replace(
    MEGATRON_LM_2021,
    traits=_traits(LM_2022, flash_attention=False, overlaps_input_gradient=True),
    printed=(),
    reduce_dtype="fp32",
    variant=None,
)
"""Megatron-LM of the sequence-parallel paper of May 2022, whose 18 bytes a parameter (figure 1) are fp32 gradients: their products add to
them (megatron/mpu/layers.py:290 at 739cb43dae, which also sends beside them)."""
MEGATRON_LM_BIGSCIENCE: Final = replace(MEGATRON_LM_2022, traits=_traits(LM_BIGSCIENCE, flash_attention=False), constants_in=None)
"""Megatron-LM of BigScience's runs on V100 in May 2021, on one replica each: pipelines scatter and gather since February (72e4230bb5); how
gradients were added up, and in which type, is not said."""
