"""Trainers of LoRA's adapters over a frozen model in 16 bits: peft under transformers' own Trainer, litgpt, fsdp_qlora.

They are priced as the planned engine `deepspeed` is, layer by layer, but for their optimizer: torch's own AdamW on 16-bit adapters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from msgspec.structs import replace

from orchestrator.cost.price import CostModel
from orchestrator.cost.stage import StageSums
from orchestrator.model.training import Precision
from orchestrator.strategy.capabilities import StateBytes, Traits
from orchestrator.strategy.layout import LayerSpan
from orchestrator.strategy.spec import Candidate
from tests.validation.engines.engine import FP32_STATES, TORCH_LOGITS, MeasuredEngine, all_stages

STATES: Final = StateBytes(weight=2, gradient=2, master=0, moments=4)
"""An adapter takes its linear's dtype (peft before 0.12, tuners/lora/layer.py, update_layer: `self.to(weight.device, dtype=weight.dtype)`;
litgpt under precision bf16-true), and the moments of torch.optim.AdamW take the adapter's."""
CHUNKED_LOSS_LOGITS: Final = 6.0
"""Bytes per logit of litgpt's chunked_cross_entropy in 16 bits (litgpt/utils.py): logits 2, their log-softmax 2, a gradient 2."""
DROPOUT: Final = 0.05
"""LoraArguments.lora_dropout of Qwen's finetune.py, and lora_dropout of litgpt's finetune/lora.py by default."""
FSDP: Final = "litgpt_fsdp"


def _traits(name: str, logits_bytes: float = TORCH_LOGITS) -> Traits:
    return Traits(
        engine=name,
        states=all_stages(STATES, FP32_STATES),
        gradient_bytes_on_wire="grad_reduce_dtype",
        reduce_scatter_from_stage=2,
        fp32_gradient_fusion=False,
        logits_bytes=logits_bytes,
        layers="hugging_face",
    )


class WholeGradients(CostModel):
    """FSDP over blocks with frozen and trained weights in one flat parameter, and several micro-batches a step.

    The gradient of a FlatParameter has the frozen elements too (torch/distributed/fsdp/_flat_param.py), and litgpt wraps whole blocks.
    Between micro-batches it runs backward under FSDP's no_sync (finetune/lora.py, fabric.no_backward_sync), which keeps gradients whole
    on every rank (torch's documentation of FullyShardedDataParallel.no_sync). So each rank holds 2 bytes for every parameter of the
    blocks; embedding and head are a flat parameter of their own, in which nothing is trained.
    """

    def sums(self, candidate: Candidate, spans: Iterable[LayerSpan] = ()) -> StageSums:
        spans = tuple(spans)
        sums = super().sums(candidate, spans)
        if candidate.num_microbatches > 1 and candidate.strategy.zero_stage:
            blocks = (span for span in spans if self.kinds[span.kind].recomputable)
            sums.gradients = float(sum(span.count * self.kinds[span.kind].local_parameters(1) for span in blocks) * STATES.gradient)
        return sums


def _by_ranks(row: Mapping[str, str], precision: Precision) -> str:
    return FSDP if "fsdp" in row.get("engine", "").lower() else LITGPT.name


PEFT: Final = MeasuredEngine(
    traits=_traits("peft"),
    printed=("transformers + peft", "ms-swift on transformers"),
    resembles="deepspeed",
    transformers=True,
    zero_stage=0,
    reduce_dtype="bf16",
    accumulate_dtype="bf16",
    adapts="transformers",
    lora_dropout=DROPOUT,
)
LITGPT: Final = replace(PEFT, traits=_traits("litgpt", CHUNKED_LOSS_LOGITS), printed=("litgpt",), variant=_by_ranks)
LITGPT_FSDP: Final = replace(LITGPT, traits=_traits(FSDP, CHUNKED_LOSS_LOGITS), printed=(), variant=None, cost=WholeGradients)
FSDP_QLORA: Final = replace(PEFT, traits=_traits("fsdp_qlora"), printed=("fsdp_qlora",), lora_dropout=0.1)
"""fsdp_qlora, whose adapters are flat parameters of their own (train.py, get_wrapping_policy), so that frozen weights have no gradients."""
