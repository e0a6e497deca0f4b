"""How experts are divided: expert parallelism folds over the ranks of tensor, context and data parallelism."""

from __future__ import annotations

from typing import Final

from orchestrator.engines.rules.rule import Undivided, refused, rule
from orchestrator.strategy.spec import Candidate
from orchestrator.strategy.workload import Workload


@rule("expert_kinds", "core/transformer/moe/moe_utils.py: topk_routing_with_score_function", "model")
def expert_kinds(_: Candidate, workload: Workload) -> str | None:
    a = workload.model.architecture
    if len(a.experts) > 1:
        return f"{len(a.experts)} kinds of experts in one model: megatron-core has one"
    for part in a.experts:
        if part.score == "sigmoid" and not part.normalized and part.topk > 1:
            return "sigmoid scores that are not made to sum to one: megatron-core's always are"
        if part.score == "softmax" and part.normalized and part.topk == 1:
            return "topk=1 with scores made to sum to one: the router would learn nothing"
        if part.expert_bias and part.score != "sigmoid":  # transformer_config.py:1593, and :2284 of core_v0.19.0
            return f"experts.expert_bias=true with score={part.score}: megatron-core has the bias beside sigmoids alone"
        if part.group_topk and part.group_topk > part.topk:
            why = "megatron-core values a group by its topk/group_topk best experts, which are none"
            return f"experts.group_topk={part.group_topk} above topk={part.topk}: {why}"
    return None


experts = refused("experts", "ep_basic: megatron/training/arguments.py:1025; core/transformer/moe/moe_layer.py:103", "ep", "ep",
                  ("!experts", "ep={mesh.ep}: a dense model has no experts"), Undivided("ep", "num_experts"))  # fmt: skip
experts_fold = refused("experts_fold", "core/parallel_state.py: expert groups fold over tp x cp x dp", "tp cp ep etp dp", "",
                       Undivided("ep*etp", "tp*cp*dp"))  # fmt: skip
EXPERT_RULES: Final = (
    experts,
    expert_kinds,
    refused("experts_etp", "core/tensor_parallel/layers.py:842,1166", "etp", "etp",
            ("!experts", "etp={mesh.etp}: a dense model has no experts"), Undivided("etp", "the experts' ffn_hidden_size")),
    refused("experts_ep1", "core/tensor_parallel/layers.py:829,886 (README, silently wrong)", "tp ep etp", "experts !ep etp_beside_tp",
            "ep=1 with etp={mesh.etp} and tp={mesh.tp}: experts' gradients are then reduced as those of other layers, silently wrong"),
    refused("experts_biases", "core/tensor_parallel/layers.py:1228 (sequence_parallel of the biases)", "tp etp", "experts add_bias_linear",
            *((axis, "tp={mesh.tp} etp={mesh.etp} with biases in experts: their gradients are summed over ranks of other experts, silently "
               "wrong") for axis in ("tp", "etp"))),
    experts_fold,
    refused("experts_sp", "core/transformer/moe/moe_layer.py:380", "tp sequence_parallel", "tp !sequence_parallel experts",
            "tp={mesh.tp}: experts with tensor parallelism train with sequence_parallel=true only"),
)  # fmt: skip
