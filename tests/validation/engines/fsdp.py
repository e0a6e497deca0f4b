"""Trainers on PyTorch's own FSDP: MosaicML's Composer, torchtitan, NeMo AutoModel."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Final

from msgspec.structs import replace

from orchestrator.cost.calibration import Calibration, datasheet
from orchestrator.cost.compute import layer_seconds
from orchestrator.cost.price import CostModel
from orchestrator.cost.stage import StageSums
from orchestrator.hardware.spec import Cluster
from orchestrator.model.spec import Dispatch, Gemm, LayerSpec, ModelSpec, Op
from orchestrator.strategy.capabilities import StateBytes, Traits
from orchestrator.strategy.layout import LayerSpan, Prediction, Stage
from orchestrator.strategy.spec import RECOMPUTE_ORDER, Candidate, Recompute
from orchestrator.strategy.workload import Workload
from tests.validation.engines.engine import EAGER, FP32_STATES, HOPPERS_FLASH_2, TORCH_LOGITS, MeasuredEngine, all_stages

STATES: Final = StateBytes(weight=4, gradient=4, master=0, moments=8)
"""PyTorch FSDP under mixed precision: the shard is fp32 (it is the master copy), gathered in 16 bits (docs: MixedPrecision)."""
TRITON_ATTENTION: Final = {"attention_backward_efficiency": 0.26}
"""MPT's attention is HazyResearch's Triton kernel (submit_benchmarks.py of llm-foundry at b2a43a1 and 5e85bd6, attn_impl), whose authors
say that its backward is slower than CUDA's (flash_attn_triton.py). The figure is what the fit to MosaicML's own A100 runs gives (.256),
half of FlashAttention-2's there, not a datasheet's: their error "from datasheets" is 10.0% without it and 5.8% with it, that of all
A100-SXM-80GB runs 6.7% and 5.2%."""
HOPPERS_TRITON: Final = {"attention_efficiency": 0.35, "attention_backward_efficiency": 0.15}
"""The same on Hopper, by Triton's backend of 2022 (setup.py, triton_pre_mlir_sm90), which has none of its instructions: forward as
FlashAttention-2, and backward half of its share (`HOPPERS_FLASH_2`), as on A100."""
TORCHAO: Final = {"fp8_saved_bytes": 2.0}
"""torchao's Float8Linear keeps the input as it came (float8_linear.py)."""


def _traits(name: str, **more: object) -> Traits:
    shared: dict[str, object] = {
        "states": all_stages(STATES, FP32_STATES),
        "gradient_bytes_on_wire": "grad_reduce_dtype",
        "reduce_scatter_from_stage": 1,
        "fp32_gradient_fusion": False,
    }
    return Traits(engine=name, **(shared | more))  # type: ignore[arg-type]


FUSED_LOGITS: Final = 4.0
"""Bytes per logit of flash-attn's cross-entropy, MPT's loss unless a recipe says torch's (llmfoundry/models/mpt/modeling_mpt.py, loss_fn=
"fused_crossentropy"; flash_attn/losses/cross_entropy.py, inplace_backward=False): it keeps the 16-bit logits and makes their gradient."""


class StopsEarly(CostModel):
    """The core's prices, with checkpoints that run again no more than backward needs: a product that a checkpoint ends with is not made
    again, as its inputs are all that is missing (torch/utils/checkpoint.py, set_checkpoint_early_stop, of checkpoints that are not
    reentrant; a compiled layer's graph has no use for it either). Here a whole block is one (torchtitan/models/llama/parallelize_llama.py,
    apply_ac)."""

    def ends(self, layer: LayerSpec) -> tuple[Op, ...]:
        """The products with which the checkpoints of a layer end."""
        return tuple(op for op in layer.ops if isinstance(op, Gemm))[-1:]

    def saved_seconds(self, candidate: Candidate, span: LayerSpan) -> float:
        """Seconds of a micro-batch that these layers don't compute again."""
        layer, w = self.kinds[span.kind], self.workload
        ops = self.ends(layer) if span.recompute == "full" else ()
        if not ops:
            return 0.0
        shape = (candidate.strategy, candidate.micro_batch_size, w.training.precision, w.cluster.gpu, w.traits, STATES, w.calibration)
        return span.count * layer_seconds(replace(layer, ops=ops), *shape).forward.compute

    def sums(self, candidate: Candidate, spans: Iterable[LayerSpan] = ()) -> StageSums:
        spans = tuple(spans)
        sums = super().sums(candidate, spans)
        for span in spans:
            sums.backward_s[span.chunk] -= self.saved_seconds(candidate, span)
        return sums

    def price(self, candidate: Candidate, stages: tuple[Stage, ...]) -> Prediction:
        plain = super().price(candidate, stages)
        saved = max(sum(self.saved_seconds(candidate, span) for span in stage.layers) for stage in stages) * candidate.num_microbatches
        if not saved:
            return plain
        moved = {"recompute": plain.by_cause["recompute"] - saved, "bubble": plain.by_cause.get("bubble", 0.0) + saved}
        return replace(plain, by_cause=plain.by_cause | moved)


class Compiled(StopsEarly):
    """torchtitan with torch.compile, which fuses what eager kernels do one after the other (`EAGER`)."""

    def __init__(
        self, workload: Workload, traits: Traits, calibration: Calibration, modes: tuple[Recompute, ...] = RECOMPUTE_ORDER
    ) -> None:
        factor = calibration.pointwise_factor / EAGER["pointwise_factor"]
        super().__init__(workload, traits, replace(calibration, pointwise_factor=factor), modes)


def _by_compiler(row: Mapping[str, str]) -> type[CostModel]:
    return Compiled if "compile" in f"{row.get('engine', '')} {row.get('precision', '')}" else StopsEarly


def _on_hopper(traits: Traits, shares: Mapping[str, float]) -> Callable[[Candidate, Cluster, Calibration], Calibration]:
    """Returns an engine's constants where its attention is by kernels written for Ampere, which reach these shares on Hopper."""

    def constants_in(candidate: Candidate, cluster: Cluster, constants: Calibration) -> Calibration:
        if cluster.gpu.compute_capability != "9.0":
            return constants
        plain = datasheet(cluster, traits)
        return replace(constants, **{name: getattr(constants, name) * share / getattr(plain, name) for name, share in shares.items()})

    return constants_in


_COMPOSERS: Final = _traits("fsdp_composer", constants=EAGER | TRITON_ATTENTION, logits_bytes=FUSED_LOGITS)
COMPOSER: Final = MeasuredEngine(traits=_COMPOSERS, printed=("fsdp(composer)",), constants_in=_on_hopper(_COMPOSERS, HOPPERS_TRITON))
_TORCHTITANS: Final = _traits("fsdp_torchtitan", constants=EAGER | TORCHAO, logits_bytes=TORCH_LOGITS)
TORCHTITAN: Final = MeasuredEngine(
    traits=_TORCHTITANS,
    printed=("torchtitan",),
    sequence_parallel=True,
    # torch's scaled_dot_product_attention was FlashAttention-2 (first in its order of backends; aten/src/ATen/native/transformers/cuda/
    # sdp_utils.cpp of December 2024) on Hopper too
    constants_in=_on_hopper(_TORCHTITANS, HOPPERS_FLASH_2),
    cost_in=_by_compiler,
)
IN_16_BITS: Final = StateBytes(weight=2, gradient=4, master=0, moments=4)
"""AutoModel's models are bf16 (initialize_weights casts them: components/models/deepseek_v3/model.py), torch's Adam keeps moments in their
type, and FSDP2 adds up gradients that it has not yet reduced in fp32, the reduction's (MixedPrecisionPolicy, reduce_dtype)."""
LOGITS_IN_16_BITS: Final = 6.0
"""Bytes per logit of its loss, which its configurations leave in 16 bits (fp32_upcast false): logits, their log-softmax, a gradient."""


def _next_to_each_other(model: ModelSpec) -> ModelSpec:
    """The model with a router that sends token i to the experts i x topk and those after it (AutoModel's FakeBalancedGate,
    components/moe/layers.py), so that all experts of a token lie in one group of `topk`: on one node, on a rank or two."""

    def layer(spec: LayerSpec) -> LayerSpec:
        experts = max((op.experts for op in spec.ops if isinstance(op, Gemm)), default=0)

        def changed(op: Op) -> Op:
            return replace(op, limit=(experts // op.topk, 1)) if isinstance(op, Dispatch) and experts % op.topk == 0 else op

        return replace(spec, ops=tuple(map(changed, spec.ops)))

    return replace(model, runs=tuple(replace(run, layer=layer(run.layer)) for run in model.runs))


@cache
def _drained(samples: int) -> type[CostModel]:
    class Drained(StopsEarly):
        """AutoModel's steps: a pipeline is filled and drained for every so many samples of a rank (0: nobody says), as each local batch
        has a schedule of its own (recipes/llm/benchmark.py, run_benchmark); a dense layer's attention and its MLP are checkpoints of their
        own (components/distributed/parallelizer.py), in a model of experts a layer is one checkpoint of Transformer Engine's products."""

        def price(self, candidate: Candidate, stages: tuple[Stage, ...]) -> Prediction:
            plain = super().price(candidate, stages)
            again = candidate.num_microbatches * candidate.micro_batch_size // samples - 1 if samples else 0
            if again < 1 or candidate.mesh.pp == 1:
                return plain
            more = again * plain.by_cause["bubble"]
            tokens = plain.tokens_per_s_per_gpu * plain.step_time_s / (plain.step_time_s + more)
            causes = plain.by_cause | {"bubble": plain.by_cause["bubble"] + more}
            return replace(plain, step_time_s=plain.step_time_s + more, tokens_per_s_per_gpu=tokens, by_cause=causes)

        def ends(self, layer: LayerSpec) -> tuple[Op, ...]:
            experts = any(isinstance(op, Dispatch) for kind in self.kinds.values() for op in kind.ops)
            return () if experts else tuple(op for op in layer.ops if isinstance(op, Gemm) and op.split == "row")

    return Drained


def _by_local_batch(row: Mapping[str, str]) -> type[CostModel]:
    local = re.search(r"\bLBS=(\d+)", row.get("notes", ""))
    return _drained(int(local[1]) if local else 0)


AUTOMODEL: Final = MeasuredEngine(
    traits=_traits("fsdp_automodel", states=all_stages(IN_16_BITS, FP32_STATES), constants=TORCHAO, logits_bytes=LOGITS_IN_16_BITS),
    printed=("pytorch fsdp2 (nemo automodel)",),
    dispatcher="flex",  # its experts are exchanged by DeepEP
    sequence_parallel=True,
    layers=_next_to_each_other,
    cost_in=_by_local_batch,
)
PURE_16_BITS: Final = StateBytes(weight=2, gradient=2, master=0, moments=4)
TRL: Final = MeasuredEngine(
    traits=_traits("fsdp_trl", states=all_stages(PURE_16_BITS, FP32_STATES), constants=EAGER, logits_bytes=0.0, layers="hugging_face"),
    printed=("trl sfttrainer",),
    resembles="deepspeed",
    transformers=True,
    zero_stage=3,
    reduce_dtype="bf16",
    accumulate_dtype="bf16",
    cp_comm_type="all_gather",
    tunes_full_lengths=True,
    cost=StopsEarly,
)
"""TRL's SFTTrainer on a model that is in bf16 as a whole, with torch's AdamW, FSDP2 by block and torch's context parallelism, which gathers
keys and values (distributed/tensor/experimental/_context_parallel/_attention.py: _AllGatherRotater is the default). Its loss is made of
pieces of a sequence (loss_type="chunked_nll")."""
