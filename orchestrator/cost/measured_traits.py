"""Engines that are never started here but were measured, as Traits: data, with the source of each figure.

Bytes per parameter are before sharding (`StateBytes`). The engines that are started make their own Traits (`engines/`); the older
Megatron versions of the published tables stand here.
"""

from __future__ import annotations

from typing import Final

from orchestrator.strategy.capabilities import StateBytes, Traits

MEGATRON: Final = StateBytes(weight=2, gradient=4, master=4, moments=8)
"""Megatron-LM, mixed precision: 2 weights, 4 main gradients, 4 master weights, 8 Adam = 18 (theoretical_memory_usage.py:182);
the distributed optimizer shards the last 12."""
MEGATRON_FP32: Final = StateBytes(weight=4, gradient=4, master=0, moments=8)
NEMO: Final = StateBytes(weight=2, gradient=2, master=4, moments=8, step=4)
"""NVIDIA's performance recipes keep gradients in bf16 (grad_reduce_in_fp32 off): --grad-reduce-in-bf16, param_and_grad_buffer.py."""
NANOTRON: Final = StateBytes(weight=2, gradient=4, master=4, moments=8, backward=2)
"""nanotron with accumulate_grad_in_fp32: bf16 weights, a whole fp32 gradient buffer at every ZeRO stage, fp32 master and Adam
(optim/gradient_accumulator.py); ZeRO-1 shards master and moments. In backward the bf16 gradients as well."""
NANOTRON_LOGITS: Final = 9.0
"""Its loss: bf16 logits 2, fp32 copy 4, fp32 softmax kept for backward 4 (parallel/tensor_parallel/functional.py) are 10; its peaks with
pp=1 ask for 8 to 9.5 beside `allocator_slack`."""
FUSED_LOSS_LOGITS: Final = 10.0
"""Megatron's --cross-entropy-loss-fusion: bf16 logits 2, fp32 copy 4, and exponentials 4 that jit does not write in place."""
FSDP: Final = StateBytes(weight=4, gradient=4, master=0, moments=8)
"""PyTorch FSDP under mixed precision: the shard is fp32 (it is the master copy), gathered in 16 bits (docs: MixedPrecision)."""
INTERNEVO: Final = StateBytes(weight=2, gradient=2, master=4, moments=8, step=4)
"""InternEvo's HybridZeroOptimizer: 16-bit weights and gradients, fp32 master and Adam sharded over the zero1 group."""
DEEPSPEED_FP16: Final = StateBytes(weight=2, gradient=2, master=4, moments=8, step=6)
"""DeepSpeed ZeRO-1 in fp16: stage_1_and_2.py:557; at the step the shard's gradients are flattened in 16 bits, then cast to fp32."""
DEEPSPEED_STAGE3: Final = StateBytes(weight=2, gradient=2, master=4, moments=8, step=4)
"""Stage 3 steps by sub-group: fp32 gradients alone (stage3.py:2683)."""
DEEPSPEED_BF16: Final = StateBytes(weight=2, gradient=4, master=4, moments=8, backward=3, step=6)
"""DeepSpeed's BF16_Optimizer: a whole fp32 gradient buffer beside the transient bf16 gradients (bf16_optimizer.py:163) and a flat copy of
part of them (BLOOM's prequel: about 3 bytes beside the 6 resident ones); the step as in fp16."""
DEEPSPEED_BUCKET: Final = 500_000_000
"""reduce_bucket_size and allgather_bucket_size by default (runtime/zero/config.py); two of each are alive with overlap."""
DEEPSPEED_LIVE: Final = 1_050_000_000
"""Stage 3: stage3_max_live_parameters and stage3_prefetch_bucket_size by default: gathered weights that stay beside the current layer."""
TORCH_LOGITS: Final = 14.0
"""torch's cross_entropy on `logits.float()`: bf16 2, fp32 4, log-softmax 4, gradient 4."""

EAGER: Final = {"pointwise_factor": 1.8}
"""Norms, rotary, gates, residuals and casts as kernels of their own: nearly twice the memory passes of fused ones. nanotron's fit says
1.9, Composer's on A100 1.4, its H100 the same in slower products."""
TRITON_ATTENTION: Final = {"attention_backward_efficiency": 0.26}
"""MPT's attention with ALiBi is a Triton kernel. The figure is what the fit to MosaicML's own A100 runs gives (.256), not a
datasheet's: their error "from datasheets" is 10.0% without it and 5.8% with it, that of all A100-SXM-80GB runs 6.7% and 5.2%."""
TORCHAO: Final = {"fp8_saved_bytes": 2.0}
"""torchao's Float8Linear keeps the input as it came (float8_linear.py)."""
DEEPSPEED_PIPELINE: Final = {"microbatch_overhead_s": 20e-3}
"""PipelineEngine's instructions for a micro-batch: blocking sends and receives, loss scaling, gradient hooks from Python, and
for every recomputed layer the random states that are read from and put back to the device, each a wait."""
NANOTRON_HOST: Final = {"layer_floor_s": 4e-3}
"""A layer's forward and backward are never faster than its Python."""


def _all_stages(mixed: StateBytes, fp32: StateBytes = MEGATRON_FP32) -> dict[str, StateBytes]:
    return {f"{precision}/{stage}": state for precision, state in (("mixed", mixed), ("fp32", fp32)) for stage in range(4)}


MEASURED_TRAITS: Final[dict[str, Traits]] = {
    traits.engine: traits
    for traits in (
        Traits(
            engine="nanotron",
            constants=EAGER | NANOTRON_HOST,
            states=_all_stages(NANOTRON),
            gradient_bytes_on_wire="grad_accum_dtype",
            reduce_scatter_from_stage=1,
            overlaps_param_gather=False,
            fused_gate=False,
            logits_bytes=NANOTRON_LOGITS,
            fp32_gradient_fusion=False,
        ),
        Traits(
            engine="nemo",
            constants={"tp_overlap": 0.85},  # its recipes pass chunks on beside the products (Transformer Engine's user buffers)
            states=_all_stages(NEMO),
            gradient_bytes_on_wire="grad_reduce_dtype",
            reduce_scatter_from_stage=1,
        ),
        Traits(
            engine="megatron",
            states=_all_stages(MEGATRON),
            gradient_bytes_on_wire="grad_reduce_dtype",
            reduce_scatter_from_stage=1,
        ),
        Traits(
            engine="megatron_fused_loss",
            states=_all_stages(MEGATRON),
            gradient_bytes_on_wire="grad_reduce_dtype",
            reduce_scatter_from_stage=1,
            logits_bytes=FUSED_LOSS_LOGITS,
        ),
        Traits(
            engine="megatron_unfused",
            constants=EAGER,
            states=_all_stages(MEGATRON),
            gradient_bytes_on_wire="grad_reduce_dtype",
            reduce_scatter_from_stage=1,
            flash_attention=False,
        ),
        Traits(
            engine="megatron_lm",
            states=_all_stages(MEGATRON),
            gradient_bytes_on_wire="grad_reduce_dtype",
            reduce_scatter_from_stage=1,
            flash_attention=False,
        ),
        Traits(
            engine="megatron_deepspeed",
            constants=EAGER | DEEPSPEED_PIPELINE,
            states=_all_stages(DEEPSPEED_FP16),
            gradient_bytes_on_wire="grad_reduce_dtype",
            reduce_scatter_from_stage=2,
            bucket_elements=DEEPSPEED_BUCKET,
            bucket_copies=4,
            flash_attention=False,
            fp32_gradient_fusion=False,
        ),
        Traits(
            engine="megatron_deepspeed_bf16",
            constants=EAGER | DEEPSPEED_PIPELINE,
            states=_all_stages(DEEPSPEED_BF16),
            gradient_bytes_on_wire="grad_reduce_dtype",
            reduce_scatter_from_stage=2,
            bucket_elements=DEEPSPEED_BUCKET,
            bucket_copies=4,
            flash_attention=False,
            fp32_gradient_fusion=False,
        ),
        Traits(
            engine="megatron_fsdp",
            states=_all_stages(MEGATRON),
            gradient_bytes_on_wire="grad_reduce_dtype",
            reduce_scatter_from_stage=1,
        ),
        Traits(
            engine="fsdp_composer",
            constants=EAGER | TRITON_ATTENTION,
            states=_all_stages(FSDP),
            gradient_bytes_on_wire="grad_reduce_dtype",
            reduce_scatter_from_stage=1,
            fp32_gradient_fusion=False,
        ),
        Traits(
            engine="fsdp_torchtitan",
            constants=EAGER | TORCHAO,
            states=_all_stages(FSDP),
            gradient_bytes_on_wire="grad_reduce_dtype",
            reduce_scatter_from_stage=1,
            logits_bytes=TORCH_LOGITS,
            fp32_gradient_fusion=False,
        ),
        Traits(
            engine="fsdp_automodel",
            constants=EAGER | TORCHAO,
            states=_all_stages(FSDP),
            gradient_bytes_on_wire="grad_reduce_dtype",
            reduce_scatter_from_stage=1,
            logits_bytes=TORCH_LOGITS,
            fp32_gradient_fusion=False,
        ),
        Traits(
            engine="internevo",
            states=_all_stages(INTERNEVO),
            gradient_bytes_on_wire="weight",
            reduce_scatter_from_stage=1,
            fp32_gradient_fusion=False,
        ),
        Traits(
            engine="internevo_fsdp",
            states=_all_stages(INTERNEVO),
            gradient_bytes_on_wire="weight",
            reduce_scatter_from_stage=1,
            fp32_gradient_fusion=False,
        ),
        Traits(
            engine="deepspeed",
            states=_all_stages(DEEPSPEED_STAGE3),
            gradient_bytes_on_wire="weight",
            reduce_scatter_from_stage=2,
            bucket_elements=DEEPSPEED_BUCKET,
            bucket_copies=2,
            live_parameter_elements=DEEPSPEED_LIVE,
            logits_bytes=TORCH_LOGITS,
            fp32_gradient_fusion=False,
        ),
        Traits(
            engine="deepspeed_unfused",
            constants=EAGER,
            states=_all_stages(DEEPSPEED_STAGE3),
            gradient_bytes_on_wire="weight",
            reduce_scatter_from_stage=2,
            bucket_elements=DEEPSPEED_BUCKET,
            bucket_copies=2,
            live_parameter_elements=DEEPSPEED_LIVE,
            flash_attention=False,
            logits_bytes=TORCH_LOGITS,
            fp32_gradient_fusion=False,
        ),
        Traits(
            engine="deepspeed_tiled_loss",
            states=_all_stages(DEEPSPEED_STAGE3),
            gradient_bytes_on_wire="weight",
            reduce_scatter_from_stage=2,
            bucket_elements=DEEPSPEED_BUCKET,
            bucket_copies=2,
            live_parameter_elements=DEEPSPEED_LIVE,
            logits_bytes=0.0,
            fp32_gradient_fusion=False,
        ),
    )
}
"""By the names that `validate.runs.traits_name_of` gives."""

ENGINE_OF: Final[dict[str, str]] = {
    **dict.fromkeys(("megatron_unfused", "megatron_fused_loss", "megatron_lm", "nemo"), "megatron"),
    **dict.fromkeys(("megatron_deepspeed_bf16",), "megatron_deepspeed"),
    **dict.fromkeys(("deepspeed_unfused", "deepspeed_tiled_loss"), "deepspeed"),
}
"""Traits that are one engine as far as memory and the trust in a prediction go."""
