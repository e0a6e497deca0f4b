"""Bytes of weights, gradients and optimizer states on one rank, by engine and ZeRO stage."""

from __future__ import annotations

from typing import Final, NamedTuple

from msgspec.structs import replace

from orchestrator.hardware.spec import Gpu
from orchestrator.model.training import EIGHT_BIT, Training
from orchestrator.strategy.axes import dp
from orchestrator.strategy.capabilities import SHARDED_FROM_STAGE, StateBytes, Traits
from orchestrator.strategy.spec import Strategy, ZeroStage

MOMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
REMAINDER_BYTES = 2
"""Bytes that the precision-aware optimizer keeps of an fp32 weight beside the bf16 one: the 16 bits that it lacks
(optimizer_config.py:192)."""

EIGHT_BIT_MOMENTS: Final = 2 * (1 + 4 / 256)
"""Bytes of both of Adam's moments in bitsandbytes' 8 bits: blocks of 256 have a scale of 32 bits (Optimizer2State.init_state of
bitsandbytes; 2.03125 measured with 0.50.2). Paged ones leave a full GPU (unified memory), and take none of it at a peak."""


def state_bytes(traits: Traits, training: Training, zero_stage: ZeroStage) -> StateBytes:
    """Bytes per parameter before sharding of this engine under this training. Raises KeyError for a stage that the engine has not.

    Plain SGD (the engines are given momentum 0) keeps no moments, paged Adam none on the GPU. Gradients of 16 bits take 2 bytes, and an
    fp32 copy of the optimizer's shard while it steps (distrib_optimizer.py:2419; stage_1_and_2.py:1020), which the precision-aware
    optimizer does without. With FP8 in another recipe than delayed scaling megatron-core keeps whole fp32 weights all the same
    (optimizer_config.py:352).
    """
    states = _state_bytes(traits, training, zero_stage)
    return replace(states, step=states.step + traits.adam_step) if training.optimizer == "adamw" else states


def _state_bytes(traits: Traits, training: Training, zero_stage: ZeroStage) -> StateBytes:
    """`state_bytes` but for what Adam's own kernels allocate in a step."""
    states = traits.state_bytes(training.precision, zero_stage)
    if training.optimizer == "sgd":
        states = replace(states, moments=0)
    if training.optimizer in EIGHT_BIT:
        states = replace(states, moments=0 if training.optimizer.startswith("paged") else EIGHT_BIT_MOMENTS)
    if training.precision == "fp32":
        return states
    buffer = {"grad_reduce_dtype": training.grad_reduce_dtype, "grad_accum_dtype": training.grad_accum_dtype}
    narrow = buffer.get(traits.gradient_buffer, "fp32") != "fp32"
    if narrow:
        states = replace(states, gradient=2, backward=0, step=4)
    if training.precision_aware_optimizer:
        moments = MOMENT_BYTES[training.exp_avg_dtype] + MOMENT_BYTES[training.exp_avg_sq_dtype]
        states = replace(states, moments=moments)
        if training.precision != "fp8" or training.fp8_recipe == "delayed":
            states = replace(states, master=REMAINDER_BYTES if training.precision != "fp16" else 4, step=0)
    return states


NVFP4_COPIES: Final = 2 * 4.5 / 8
"""Bytes per element of the NVFP4 copies of a weight: 4 bits and an 8-bit scale for each 16 elements, along rows and along columns."""

BLOCK_SCALE: Final = 1 / 32
"""Bytes of scales per element: MXFP8's 8 bits for each 32 elements, and the blockwise recipe's 32 bits for each 128 of an activation
(Transformer Engine, pytorch/csrc/quantizer.cpp: MXFP8_BLOCK_SIZE, Float8BlockQuantizer). That recipe's weights have blocks of 128 x 128."""


def fp8_weight_bytes(training: Training, gpu: Gpu) -> float:
    """Bytes per weight of the FP8 copies that Transformer Engine makes in the first micro-batch and keeps for the others (its workspaces
    under is_first_microbatch): one as it is and one transposed, which Blackwell needs only where blocks have scales of their own."""
    if training.precision == "nvfp4":
        return NVFP4_COPIES
    if training.precision != "fp8":
        return 0.0
    if training.fp8_recipe == "mxfp8":
        return 2 * (1 + BLOCK_SCALE)
    return 2.0 if not gpu.has_mxfp8 or training.fp8_recipe == "blockwise" else 1.0


def primary_weight_bytes(training: Training, gpu: Gpu, strategy: Strategy) -> tuple[float, float]:
    """(held, gathered) bytes of a linear's weight under `fp8_param_gather`, before sharding.

    The FP8 copies are all that is held: the one as it is in Megatron's buffer in place of the bf16 weight (core/distributed/
    param_and_grad_buffer.py:827, modify_underlying_storage), the transposed one beside it. Its own FSDP keeps no transposed one but MXFP8's
    (its README, keep_fp8_transpose_cache). What is gathered is FP8, but MXFP8 goes through the gradients' buffer in bf16 (:340,
    reuse_grad_buf_for_mxfp8_param_ag). The fp32 master stays as it is (core/optimizer/distrib_optimizer.py, get_high_precision_init_val).
    """
    blocks = training.fp8_recipe == "mxfp8"
    if strategy.megatron_fsdp:
        return (2 * (1 + BLOCK_SCALE), 1 + BLOCK_SCALE) if blocks else (1.0, 1.0)
    return fp8_weight_bytes(training, gpu), 2.0 if blocks else 1.0


KEPT_TRANSPOSED: Final = 1.0
"""Bytes that Megatron's own FSDP keeps of an FP8 weight under `keep_fp8_transpose_cache`, on every rank: the transposed copy is of the
gathered weight, and outlives it (core/distributed/fsdp/src: megatron_fsdp.py, release_module_parameters; README.md, "number of parameter x
1 Byte")."""


class States(NamedTuple):
    """Resident bytes by cause, and what is there only in backward or only in the optimizer's step."""

    weights: float
    gradients: float
    optimizer: float
    backward: float
    step: float

    @property
    def resident(self) -> float:
        return self.weights + self.gradients + self.optimizer


def states(parameters: int, per_parameter: StateBytes, strategy: Strategy) -> States:
    """Bytes of `parameters` (this rank's, before ZeRO) under the strategy's ZeRO stage (arXiv 1910.02054, figure 1).

    Offload takes master weights and moments to the host. Gradients follow them as they are reduced at stage 3 (stage3.py:791), and at
    stage 2 where they are summed in the weights' type; sums of a wider type stay on the GPU until the step (stage_1_and_2.py:1259,
    _use_compact_grad_partition_buffer in 0.19.8). hpZ keeps a second copy of the weights in the inner group
    (partition_parameters.py:1307). Gradients that are exchanged to be summed in fp32 arrive in a buffer as large as theirs, until the
    step (reduce_scatter_with_fp32_accumulation.py:75).
    """
    b = per_parameter
    weights = parameters * b.weight / dp.share("weight", strategy)
    if strategy.zero_shard_size and not dp.divides_states(strategy):
        weights += parameters * b.weight / strategy.zero_shard_size
    if strategy.keep_fp8_transpose_cache and b.weight == 1:  # a weight of 8 bits: of a linear's, as `primary_weight_bytes` has them
        weights += parameters * KEPT_TRANSPOSED
    gradients = parameters * b.gradient / dp.share("gradient", strategy)
    shard = parameters / dp.share("optimizer", strategy)
    optimizer, step = shard * (b.master + b.moments), shard * b.step
    if strategy.offload_optimizer:
        optimizer = step = 0.0
        summed_wider = b.gradient > b.weight and strategy.zero_stage < SHARDED_FROM_STAGE["weight"]
        if strategy.zero_stage >= SHARDED_FROM_STAGE["gradient"] and not summed_wider:
            gradients = 0.0
    received = gradients if strategy.reduce_scatter_with_fp32_accumulation else 0.0
    return States(weights, gradients, optimizer, parameters * b.backward + received, step)
