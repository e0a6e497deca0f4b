"""What Megatron does with supervised samples (task=sft)."""

from __future__ import annotations

from typing import Final

from orchestrator.engines.rules.rule import NEVER_TRIED, NO_BALANCE, refused, rule
from orchestrator.model.lora import MCORE_BRIDGE, MEGATRON_LINEARS
from orchestrator.strategy.spec import Candidate
from orchestrator.strategy.workload import Workload

ROWS: Final = frozenset({"linear_proj", "linear_fc2", "out_proj", "o_proj", "down_proj"})
"""Linears that tensor parallelism divides by rows, by their names in megatron-core and in transformers."""


@rule(
    "lora_bridge",
    "Megatron-Bridge 067f987, peft/utils.py, ParallelLinearAdapter: ColumnParallelLinear(in_features, dim); mcore-bridge 1.6.5, "
    "tuners/lora.py:155",
    "model tp etp",
)
def adapters(candidate: Candidate, workload: Workload) -> str | None:
    """Refuses adapters that the library which trains them does not have, or that have no price."""
    lora, a, training = workload.training.lora, workload.model.architecture, workload.training
    if lora is None:
        return None
    said, tp = f"lora.rank={lora.rank}", candidate.mesh.tp
    if a.stack != "decoder":
        return f"{said} under Megatron is of decoders: this model is an {a.stack.replace('_', '-')}"
    swift = lora.bridge == MCORE_BRIDGE
    if a.vision is not None and not swift:  # which has them on the language model alone, unless it is told otherwise
        return f"{said} of {a.vision.model_type}, which looks at images: Megatron-Bridge's adapters go to its tower too, without a price"
    if lora.bits is not None:
        return f"lora.bits={lora.bits}: Megatron's linears hold no frozen weights of so few bits; engine=deepspeed has them"
    if training.optimizer == "muon":
        return f"train.optimizer=muon with {said}: updates of adapters' matrices alone are not priced"
    roles = dict.fromkeys(op.role for run in workload.model.runs for op in run.layer.ops)
    linears = dict.fromkeys(MEGATRON_LINEARS[role] for role in roles if role in MEGATRON_LINEARS)
    if lora.fused and linears.keys().isdisjoint(lora.fused):
        return f"lora.targets={','.join(lora.fused)}: this model has {', '.join(linears)}"
    if swift and candidate.mesh.etp > 1 and a.experts:
        return f"etp={candidate.mesh.etp} with {said}: {MCORE_BRIDGE} has no adapters of divided experts"
    if not swift and lora.rank % tp and not ROWS.issuperset(lora.targets):
        return f"tp={tp} does not divide {said}: Megatron-Bridge divides an adapter's first matrix by its rank"
    return None


decoder_only = refused(
    "sft_stack", "ours: samples with answers are of decoders", "model", "task=sft",
    *((stack, f"task=sft is for decoders: this model is an {stack.replace('_', '-')}") for stack in ("encoder", "encoder_decoder")),
)  # fmt: skip
SAMPLE_RULES: Final = (
    decoder_only,
    # What megatron-core's attention over packed samples (thd) does not have, or what our worker does not prepare for it. (Programs of
    # reinforcement learning prepare theirs.) Under context parallelism each sample is padded to a multiple of 2 cp (workers/sft.py); of
    # Transformer Engine's kinds "all_gather" has them from 2.18 on, "a2a+p2p" in no release.
    refused("packed_thd", "core/packed_seq_params.py; core/transformer/attention.py:1066: one sequence a micro-batch; Transformer Engine "
            "2.10 to 2.17, attn_forward_func_with_cp", "model cp cp_comm_type micro_batch_size cuda_graph_impl", "task=sft packing",
            *((facts, f"data.packing: {why}; data.packing=false pads instead") for facts, why in (
                ("!te !cpu", "it needs Transformer Engine's attention"),
                ("mamba2 gated_delta_net", "gated_delta_net, mamba2 would carry one sample's state to the next"),
                *((states, f"{states} would carry one sample's state to the next") for states in ("mamba2", "gated_delta_net")),
                ("cp !cpu !cp_comm_type=p2p|a2a",
                 "cp_comm_type={strategy.cp_comm_type} takes no packed samples, p2p and a2a do"),
                ("!micro_batch_size=1", "micro_batch_size={candidate.micro_batch_size}: its attention takes one sequence at a time"),
                ("cuda_graph_impl", "cuda_graph_impl={strategy.cuda_graph_impl}: samples begin elsewhere in every sequence"),
            ))),
    # The padding would be the larger part of the loss that balances experts.
    refused("padded_balance", "core/transformer/moe/router.py: the balancing loss counts every token", "model",
            "task=sft experts.aux_loss_coeff", "task=sft with model.aux_loss_coeff={e.aux_loss_coeff:g}: Megatron would balance experts "
            f"over padding too; {NO_BALANCE} leaves that out"),
    adapters,
    refused("lora_fsdp", NEVER_TRIED, "model zero_stage megatron_fsdp", "megatron_fsdp lora",
            "megatron_fsdp with lora.rank={lora.rank}: never tried with frozen weights"),
)  # fmt: skip
