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


@rule("packed_thd", "core/packed_seq_params.py; core/transformer/attention.py:1066: one sequence a micro-batch",
      "model cp micro_batch_size cuda_graph_impl")  # fmt: skip
def packed(candidate: Candidate, workload: Workload) -> str | None:
    """Refuses what megatron-core's attention over packed samples (thd) does not have, or what our worker does not prepare for it. (Programs
    of reinforcement learning prepare theirs.)"""
    if workload.training.task != "sft" or not workload.training.packing:
        return None
    software, features = workload.cluster.software, workload.model.architecture.features()
    graphs, states = candidate.strategy.cuda_graph_impl, sorted({"mamba2", "gated_delta_net"} & {*features})
    refused = (
        (not software.transformer_engine and not workload.cluster.is_cpu, "it needs Transformer Engine's attention"),
        (states, f"{', '.join(states)} would carry one sample's state to the next"),
        (candidate.mesh.cp > 1, f"cp={candidate.mesh.cp} takes samples that are padded to a multiple of 2 cp, which ours are not"),
        (candidate.micro_batch_size > 1, f"micro_batch_size={candidate.micro_batch_size}: its attention takes one sequence at a time"),
        (graphs != "none", f"cuda_graph_impl={graphs}: samples begin elsewhere in every sequence"),
    )
    return next((f"data.packing: {why}; data.packing=false pads instead" for holds, why in refused if holds), None)


@rule("padded_balance", "core/transformer/moe/router.py: the balancing loss counts every token", "model")
def padded_balance(_: Candidate, workload: Workload) -> str | None:
    """Refuses a loss that balances experts over padding too, which would be the larger part of it."""
    losses = [part.aux_loss_coeff for part in workload.model.architecture.experts if isinstance(part, Experts) and part.aux_loss_coeff]
    if workload.training.task != "sft" or not losses:
        return None
    return f"task=sft with experts.aux_loss_coeff={losses[0]:g}: Megatron would balance experts over padding too; 0 leaves it out"


SAMPLE_RULES = (decoder_only, packed, padded_balance)
