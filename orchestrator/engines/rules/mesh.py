"""How megatron-core's layers are cut: tensor, sequence and context parallelism."""

from __future__ import annotations

from typing import Final

from orchestrator.engines.rules.rule import divides, divides_sequences, refused, rule
from orchestrator.strategy.spec import PP_BEFORE_DP, RANK_ORDER, Candidate
from orchestrator.strategy.workload import Workload

MEGATRON_ORDERS: Final = (RANK_ORDER, PP_BEFORE_DP)
"""What initialize_model_parallel is given (training/initialize.py:378)."""


@rule("expert_order", "rank_order: core/parallel_state.py:808-816", "pp ep etp dp rank_order")
def expert_order(candidate: Candidate, _: Workload) -> str | None:
    mesh = candidate.mesh
    expert_dp = mesh.expert_dp if mesh.ep * mesh.etp > 1 else mesh.dp * mesh.cp  # Megatron's etp is tp where none is given
    if mesh.order != RANK_ORDER and mesh.pp > 1 and expert_dp != mesh.dp:
        return f"expert_dp={expert_dp} is not dp={mesh.dp}, which rank order {'-'.join(mesh.order)} with a pipeline needs"
    return None


@rule("heads_tp", "heads_tp: core/transformer/transformer_config.py:924", "tp")
def heads(candidate: Candidate, workload: Workload) -> str | None:
    return divides(candidate.mesh.tp, "tp", workload.model.architecture.num_attention_heads, "num_attention_heads")


@rule("groups_tp", "groups_tp: core/transformer/transformer_config.py:939", "tp")
def groups(candidate: Candidate, workload: Workload) -> str | None:
    tp, a = candidate.mesh.tp, workload.model.architecture
    if a.query_groups % tp and tp % a.query_groups:
        return f"tp={tp} neither divides num_query_groups={a.query_groups} nor is a multiple of it"
    return divides(
        tp, "tp", (a.num_attention_heads + 2 * a.query_groups) * a.head_dim, "(num_attention_heads + 2*num_query_groups)*kv_channels"
    )


@rule("ffn_tp", "ffn_tp: core/tensor_parallel/layers.py:842,1166", "tp")
def ffn(candidate: Candidate, workload: Workload) -> str | None:
    return divides(candidate.mesh.tp, "tp", workload.model.architecture.ffn_hidden_size, "ffn_hidden_size")


@rule("sp_seq_div", "sp_seq_div: core/tensor_parallel/mappings.py", "sequence_parallel tp cp", "sequence_parallel")
def sp_sequence(candidate: Candidate, workload: Workload) -> str | None:
    why = divides_sequences(candidate.mesh.tp * candidate.mesh.cp, "tp*cp", workload)
    return f"sequence_parallel: {why}" if why else None


@rule("sp_norm_local", "sp_norm_local: core/transformer/torch_norm.py:28-33, core/models/bert/bert_lm_head.py:5-16", "sequence_parallel",
      "sequence_parallel !cpu")  # fmt: skip
def sp_norm(_: Candidate, workload: Workload) -> str | None:
    cluster, a = workload.cluster, workload.model.architecture
    if a.stack == "encoder":
        # Its head takes Apex' norm or torch's, never Transformer Engine's (models/bert/bert_lm_head.py:5-16).
        return None if cluster.software.apex else "sequence_parallel with bert needs Apex for the norm of its head"
    if cluster.software.transformer_engine:
        return None
    if a.normalization == "LayerNorm" and cluster.software.apex:
        return None
    return f"sequence_parallel with {a.normalization} needs Transformer Engine" + (" or Apex" if a.normalization == "LayerNorm" else "")


@rule("cp_seq", "cp_seq: megatron/training/arguments.py:817", "cp", "cp")
def cp_sequence(candidate: Candidate, workload: Workload) -> str | None:
    return divides(2 * candidate.mesh.cp, "2*cp", workload.model.seq_length, "seq_length")


cp_attention = refused("cp_te", "cp_te: core/transformer/dot_product_attention.py:57", "cp", "cp !te !cpu",
                       "cp={mesh.cp} needs Transformer Engine's attention")  # fmt: skip
"""On a CPU the worker has an attention of its own (cpu/attention.py)."""
cp_family = refused("cp_family", "core/models/bert/bert_model.py:269-276, core/models/T5/t5_model.py:524-536", "cp", "cp !decoder",
                    "cp={mesh.cp}: in megatron-core every rank of {a.family} counts positions from 0")  # fmt: skip


MESH_RULES: Final = (heads, groups, ffn, sp_sequence, sp_norm)
"""The mesh rules of every engine on megatron-core's layers."""

MEGATRON_RULES: Final = (expert_order, cp_attention, cp_sequence, cp_family)
"""The rules of megatron-core's own rank orders and context parallelism."""
