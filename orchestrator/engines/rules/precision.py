"""Numbers: one gradient buffer, FP8, the precision-aware optimizer."""

from __future__ import annotations

from typing import Final

from orchestrator.engines.rules.rule import NUMBERS, SEQUENCES, first, refused, rule
from orchestrator.model.parts.gated_delta_net import GatedDeltaNet
from orchestrator.model.training import QUANTISED, Training
from orchestrator.strategy.spec import Candidate
from orchestrator.strategy.workload import Workload

MIN_FP8_COMPUTE_CAPABILITY: Final = {"delayed": 8.9, "tensorwise": 8.9, "blockwise": 9.0, "mxfp8": 10.0}
"""First compute capability for which Transformer Engine has the recipe (its pytorch/fp8.py, check_fp8_support and its like)."""
NOT_ON_ROCM: Final = {
    "blockwise": "ROCm's Transformer Engine refuses it (pytorch/quantization.py:103, check_fp8_block_scaling_support)",
    "mxfp8": "ROCm's Transformer Engine has it on gfx95x alone, in few shapes, and off (its README, MXFP8 support on ROCm)",
}
"""Recipes that AMD's GPUs have not, and why (ROCm/TransformerEngine at 01b4205e)."""
OF_FEW_BITS: Final = f"precision={'|'.join(QUANTISED)}"
MULTIPLES: Final = {"delayed": (8, 16), "tensorwise": (8, 16), "blockwise": (8, 16), "mxfp8": (32, 32), "nvfp4": (32, 32)}
"""What tokens and features of a product must be multiples of, by FP8's recipe (Transformer Engine's assert_dim_for_fp8_exec, MXFP8's
blocks), or in NVFP4: 16 bytes, which the hardware loads at least (megatron/core/fp4_utils.py:177 of 0.19)."""


def multiples(training: Training) -> tuple[int, int]:
    """What tokens and features of a product of so few bits must be multiples of."""
    return MULTIPLES[training.fp8_recipe or "delayed" if training.precision == "fp8" else training.precision]


@rule("fp8_features", "fp8: Transformer Engine, pytorch/utils.py assert_dim_for_fp8_exec", "model tp", OF_FEW_BITS)
def fp8_features(candidate: Candidate, workload: Workload) -> str | None:
    training, a, tp = workload.training, workload.model.architecture, candidate.mesh.tp
    unit = multiples(training)[1]
    heads_in = a.num_attention_heads * a.head_dim
    widths = {
        "hidden_size": a.hidden_size,
        f"ffn_hidden_size/tp={tp}": a.ffn_hidden_size * (2 if a.gated else 1) / tp,
        f"num_attention_heads*kv_channels/tp={tp}": heads_in / tp,
        f"(num_attention_heads + 2*num_query_groups)*kv_channels/tp={tp}": (heads_in + 2 * a.query_groups * a.head_dim) / tp,
    }
    for layer in a.kinds_of_layers():
        if isinstance(layer.mixer, GatedDeltaNet):
            widths[f"a gated delta net's projection/tp={tp}"] = layer.mixer.projected_size / tp
    return next(
        (f"{training.precision} products need widths that are multiples of {unit}: {k} is {v:g}" for k, v in widths.items() if v % unit),
        None,
    )


@rule("fp8_tokens", "fp8: Transformer Engine, pytorch/utils.py assert_dim_for_fp8_exec", "model tp cp sequence_parallel micro_batch_size",
      OF_FEW_BITS)  # fmt: skip
def fp8_tokens(candidate: Candidate, workload: Workload) -> str | None:
    training, mesh = workload.training, candidate.mesh
    unit = multiples(training)[0]
    parts = mesh.cp * (mesh.tp if candidate.strategy.sequence_parallel else 1)
    lengths = ((name, length) for name in SEQUENCES for length in NUMBERS[name](workload.model))
    said = f"{training.precision} products need a multiple of {unit} tokens"
    return first(
        f"{said}: {name}={length} x micro_batch_size over {parts} ranks is {tokens:g}"
        for name, length in lengths
        if (tokens := length * candidate.micro_batch_size / parts) % unit
    )


PRECISION_RULES: Final = (
    refused("one_gradient_buffer",
            "ddp grad_reduce_in_fp32: core/distributed/distributed_data_parallel_config.py:11, param_and_grad_buffer.py", "model",
            "summed_and_reduced_otherwise", "grad_accum_dtype={training.grad_accum_dtype} and "
            "grad_reduce_dtype={training.grad_reduce_dtype}: Megatron sums and reduces in one buffer of one type"),
    refused("fp8", "fp8: megatron/training/arguments.py:655-669; core/fp4_utils.py:59", "model", OF_FEW_BITS,
            ("!te", "precision={training.precision} needs Transformer Engine, on GPUs"),
            ("precision=nvfp4 !gpu.has_mxfp8", "precision=nvfp4 needs Blackwell's products of blocks; {gpu.name} has none"),
            *((f"precision=fp8 fp8_recipe={recipe} gpu.vendor=amd", f"fp8_recipe={recipe} on {{gpu.name}}: {why}")
              for recipe, why in NOT_ON_ROCM.items()),
            *((f"precision=fp8 fp8_recipe={recipe}{'|None' if recipe == 'delayed' else ''} older={least}",
               f"fp8_recipe={recipe} needs compute capability {least}; {{gpu.name}} has {{gpu.compute_capability}}")
              for recipe, least in MIN_FP8_COMPUTE_CAPABILITY.items())),
    fp8_features,
    fp8_tokens,
    refused("precision_aware", "pao: core/optimizer/optimizer_config.py:375-420", "zero_stage", "precision_aware_optimizer",
            ("!optimizer=adamw", "precision_aware_optimizer with optimizer={training.optimizer}: it is an Adam"),
            ("precision=fp32", "precision_aware_optimizer with precision=fp32: there is no narrower copy of the weights"),
            ("!te", "precision_aware_optimizer needs Transformer Engine's Adam, on GPUs"),
            ("!zero_stage", "precision_aware_optimizer needs the distributed optimizer, zero_stage=1")),
)  # fmt: skip
"""The rules of precision for megatron-core with its own optimizer."""
