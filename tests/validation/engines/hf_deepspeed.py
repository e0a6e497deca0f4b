"""Hugging Face's Trainer on DeepSpeed's ZeRO-3, with its default buffers and other people's attention and loss kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from msgspec.structs import replace

from orchestrator.cost.calibration import Calibration
from orchestrator.cost.price import CostModel
from orchestrator.model.training import Precision
from orchestrator.strategy.capabilities import StateBytes, Traits
from orchestrator.strategy.spec import RECOMPUTE_ORDER, Recompute
from orchestrator.strategy.workload import Workload
from tests.validation.engines.bigscience import BUCKET
from tests.validation.engines.engine import EAGER, FP32_STATES, TORCH_LOGITS, MeasuredEngine, all_stages

STATES: Final = StateBytes(weight=2, gradient=2, master=4, moments=8, step=4)
"""Stage 3 steps by sub-group: fp32 gradients alone (stage3.py:2683)."""
MAX_LIVE: Final = 1_000_000_000
LIVE: Final = MAX_LIVE + 50_000_000
"""Elements of gathered weights that stage 3 keeps beside the current layer: stage3_max_live_parameters and stage3_prefetch_bucket_size by
default."""
PLAIN, UNFUSED, TILED_LOSS = "hf_trainer_deepspeed", "hf_trainer_deepspeed_unfused", "hf_trainer_deepspeed_tiled_loss"
HALF_LOGITS: Final = 6.0
"""Bytes per logit of GPT-2's loss in transformers of May 2021 under DeepSpeed's fp16, which computes all of it in 16 bits
(modeling_gpt2.py: CrossEntropyLoss of shift_logits, which nothing upcasts): logits, their shifted copy and the log-softmax."""


class AutoBuckets(CostModel):
    """The core's prices, with the buckets that the Trainer writes where a ds_config of stage 3 says "auto", as BigScience's do
    (experiments/gpt2-hf-ds/*.slurm): hidden_size squared, and 0.9 of that to prefetch (transformers/integrations/deepspeed.py,
    trainer_config_finalize)."""

    def __init__(
        self, workload: Workload, traits: Traits, calibration: Calibration, modes: tuple[Recompute, ...] = RECOMPUTE_ORDER
    ) -> None:
        square = workload.model.architecture.hidden_size**2
        layer = max(run.layer.local_parameters(1) for run in workload.model.runs if run.layer.recomputable)
        live = max(square * 9 // 10, MAX_LIVE - layer)  # the current layer is one of the live ones
        super().__init__(workload, replace(traits, bucket_elements=square, live_parameter_elements=live), calibration, modes)


def _by_kernels(row: Mapping[str, str], precision: Precision) -> str:
    if row.get("flash_attention", "").startswith("no"):
        return UNFUSED
    return TILED_LOSS if "liger" in row.get("engine", "").lower() else PLAIN


HF_DEEPSPEED: Final = MeasuredEngine(
    traits=Traits(
        engine=PLAIN,
        states=all_stages(STATES, FP32_STATES),
        gradient_bytes_on_wire="weight",
        reduce_scatter_from_stage=2,
        bucket_elements=BUCKET,
        bucket_copies=2,
        live_parameter_elements=LIVE,
        logits_bytes=TORCH_LOGITS,
        fp32_gradient_fusion=False,
    ),
    printed=("hf trainer + deepspeed", "deepspeed zero-3"),
    resembles="deepspeed",
    transformers=True,
    zero_stage=3,
    variant=_by_kernels,
)
HF_DEEPSPEED_UNFUSED: Final = replace(
    HF_DEEPSPEED,
    traits=replace(HF_DEEPSPEED.traits, engine=UNFUSED, constants=EAGER, flash_attention=False, logits_bytes=HALF_LOGITS),
    printed=(),
    variant=None,
    cost=AutoBuckets,
)
HF_DEEPSPEED_TILED_LOSS: Final = replace(
    HF_DEEPSPEED, traits=replace(HF_DEEPSPEED.traits, engine=TILED_LOSS, logits_bytes=0.0), printed=(), variant=None
)
