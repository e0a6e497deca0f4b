"""Trainers on PyTorch's own FSDP: MosaicML's Composer, torchtitan, NeMo AutoModel."""

from __future__ import annotations

from typing import Final

from orchestrator.strategy.capabilities import StateBytes, Traits
from tests.validation.engines.engine import EAGER, FP32_STATES, TORCH_LOGITS, MeasuredEngine, all_stages

STATES: Final = StateBytes(weight=4, gradient=4, master=0, moments=8)
"""PyTorch FSDP under mixed precision: the shard is fp32 (it is the master copy), gathered in 16 bits (docs: MixedPrecision)."""
TRITON_ATTENTION: Final = {"attention_backward_efficiency": 0.26}
"""MPT's attention with ALiBi is a Triton kernel. The figure is what the fit to MosaicML's own A100 runs gives (.256), not a
datasheet's: their error "from datasheets" is 10.0% without it and 5.8% with it, that of all A100-SXM-80GB runs 6.7% and 5.2%."""
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
COMPOSER: Final = MeasuredEngine(
    traits=_traits("fsdp_composer", constants=EAGER | TRITON_ATTENTION, logits_bytes=FUSED_LOGITS), printed=("fsdp(composer)",)
)
TORCHTITAN: Final = MeasuredEngine(
    traits=_traits("fsdp_torchtitan", constants=EAGER | TORCHAO, logits_bytes=TORCH_LOGITS), printed=("torchtitan",), sequence_parallel=True
)
AUTOMODEL: Final = MeasuredEngine(
    traits=_traits("fsdp_automodel", constants=EAGER | TORCHAO, logits_bytes=TORCH_LOGITS),
    printed=("pytorch fsdp2 (nemo automodel)",),
    dispatcher="flex",  # its experts are exchanged by DeepEP
    sequence_parallel=True,
)
