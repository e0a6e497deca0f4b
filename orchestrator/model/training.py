"""What decides convergence. The planner reads it and never changes it."""

from __future__ import annotations

from typing import Literal

from orchestrator.values import Value

Precision = Literal["bf16", "fp16", "fp32", "fp8"]
Dtype = Literal["fp32", "bf16", "fp16"]
MomentDtype = Literal["fp32", "bf16", "fp16", "fp8"]
Fp8Recipe = Literal["delayed", "tensorwise", "blockwise", "mxfp8"]


class Training(Value, frozen=True, kw_only=True):
    """`seq_length` in tokens (an encoder's, in an encoder-decoder); `clip` 0: no clipping.

    `grad_accum_dtype` is what micro-batches are summed in, `grad_reduce_dtype` what crosses the data-parallel network.
    """

    global_batch_size: int
    seq_length: int
    decoder_seq_length: int | None = None
    precision: Precision = "bf16"
    fp8_recipe: Fp8Recipe | None = None
    """How FP8 tensors are scaled: by the maxima of steps before, by their own, by blocks, by 32 elements (Blackwell's hardware). None where
    precision is not fp8."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    lr: float = 3e-4
    min_lr: float = 0.0
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup: int = 0
    """Steps of the warm-up: step s, counted from 0, has the rate lr * s / warmup, so that the first is at 0 and step `warmup` at `lr`."""
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0
    grad_reduce_dtype: Dtype = "fp32"
    grad_accum_dtype: Dtype = "fp32"
    precision_aware_optimizer: bool = False
    """Transformer Engine's Adam that keeps of its fp32 weights only the 16 bits which the bf16 ones lack, reads gradients in their own
    type, and may keep moments in fewer bits (Megatron's --use-precision-aware-optimizer)."""
    exp_avg_dtype: MomentDtype = "fp32"
    """Of Adam's first moment; other than fp32 only with `precision_aware_optimizer`."""
    exp_avg_sq_dtype: MomentDtype = "fp32"
    """Of Adam's second moment."""
    steps: int = 20
    seed: int = 1234
