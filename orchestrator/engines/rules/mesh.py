"""How megatron-core's layers are cut: tensor, sequence and context parallelism."""

from __future__ import annotations

from typing import Final

from orchestrator.engines.rules.rule import SEQUENCES, Undivided, refused, rule
from orchestrator.strategy.spec import PP_BEFORE_DP, RANK_ORDER, Candidate
from orchestrator.strategy.workload import Workload

MEGATRON_ORDERS: Final = (RANK_ORDER, PP_BEFORE_DP)
"""What initialize_model_parallel is given (training/initialize.py:378)."""


@rule("expert_order", "rank_order: core/parallel_state.py:808-816", "pp ep etp dp rank_order", "pp rank_order")
def expert_order(candidate: Candidate, _: Workload) -> str | None:
    mesh = candidate.mesh
    expert_dp = mesh.expert_dp if mesh.ep * mesh.etp > 1 else mesh.dp * mesh.cp  # Megatron's etp is tp where none is given
    said = f"expert_dp={expert_dp} is not dp={mesh.dp}, which rank order {'-'.join(mesh.order)} with a pipeline needs"
    return None if expert_dp == mesh.dp else said


MESH_RULES: Final = (
    refused("heads_tp", "heads_tp: core/transformer/transformer_config.py:924", "tp", "", Undivided("tp", "num_attention_heads")),
    refused("groups_tp", "groups_tp: core/transformer/transformer_config.py:939", "tp", "", Undivided("tp", "num_query_groups", True),
            Undivided("tp", "(num_attention_heads + 2*num_query_groups)*kv_channels")),
    refused("ffn_tp", "ffn_tp: core/tensor_parallel/layers.py:842,1166", "tp", "", Undivided("tp", "ffn_hidden_size")),
    refused("sp_seq_div", "sp_seq_div: core/tensor_parallel/mappings.py", "sequence_parallel tp cp", "sequence_parallel",
            *(Undivided("tp*cp", length, begins="sequence_parallel: ") for length in SEQUENCES)),
    refused("sp_norm_local", "sp_norm_local: core/transformer/torch_norm.py:28-33, core/models/bert/bert_lm_head.py:5-16",
            "sequence_parallel", "sequence_parallel !cpu",
            # Its head takes Apex' norm or torch's, never Transformer Engine's (models/bert/bert_lm_head.py:5-16).
            ("encoder !software.apex", "sequence_parallel with bert needs Apex for the norm of its head"),
            ("!encoder !te !normalization=LayerNorm", "sequence_parallel with {a.normalization} needs Transformer Engine"),
            ("!encoder !te !software.apex", "sequence_parallel with LayerNorm needs Transformer Engine or Apex")),
)  # fmt: skip
"""The mesh rules of every engine on megatron-core's layers."""

MEGATRON_RULES: Final = (
    expert_order,
    # On a CPU the worker has an attention of its own (cpu/attention.py).
    refused("cp_te", "cp_te: core/transformer/dot_product_attention.py:57", "cp", "cp !te !cpu",
            "cp={mesh.cp} needs Transformer Engine's attention"),
    refused("cp_seq", "cp_seq: megatron/training/arguments.py:817", "cp", "cp", Undivided("2*cp", "seq_length")),
    refused("cp_family", "core/models/bert/bert_model.py:269-276, core/models/T5/t5_model.py:524-536", "cp", "cp !decoder",
            "cp={mesh.cp}: in megatron-core every rank of {a.family} counts positions from 0"),
)  # fmt: skip
"""The rules of megatron-core's own rank orders and context parallelism."""
