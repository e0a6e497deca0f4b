"""What Megatron does with supervised samples (task=sft)."""

from __future__ import annotations

from orchestrator.engines.rules.rule import rule
from orchestrator.model.parts.experts import Experts
from orchestrator.strategy.spec import Candidate
from orchestrator.strategy.workload import Workload


@rule("sft_stack", "ours: samples with answers are of decoders", "model")
def decoder_only(_: Candidate, workload: Workload) -> str | None:
    stack = workload.model.architecture.stack
    if workload.training.task != "sft" or stack == "decoder":
        return None
    return f"task=sft is for decoders: this model is an {stack.replace('_', '-')}"


@rule("packed_thd", "core/packed_seq_params.py: sequences of several samples go through Transformer Engine's attention alone", "model")
def packed(_: Candidate, workload: Workload) -> str | None:
    """Refuses packed supervised samples: neither our worker nor the program that we start tells Megatron where they begin. (Programs of
    reinforcement learning do.)"""
    if workload.training.task != "sft" or not workload.training.packing:
        return None
    return "data.packing: under megatron each sample has a sequence of its own; data.packing=false"


@rule("padded_balance", "core/transformer/moe/router.py: the balancing loss counts every token", "model")
def padded_balance(_: Candidate, workload: Workload) -> str | None:
    """Refuses a loss that balances experts over padding too, which would be the larger part of it."""
    losses = [part.aux_loss_coeff for part in workload.model.architecture.experts if isinstance(part, Experts) and part.aux_loss_coeff]
    if workload.training.task != "sft" or not losses:
        return None
    return f"task=sft with experts.aux_loss_coeff={losses[0]:g}: Megatron would balance experts over padding too; 0 leaves it out"


SAMPLE_RULES = (decoder_only, packed, padded_balance)
