"""How experts are divided: expert parallelism folds over the ranks of tensor, context and data parallelism."""

from __future__ import annotations

from typing import Final

from orchestrator.engines.rules.rule import divides, first, refused, rule
from orchestrator.strategy.spec import Candidate
from orchestrator.strategy.workload import Workload


@rule("experts", "ep_basic: megatron/training/arguments.py:1025; core/transformer/moe/moe_layer.py:103", "ep")
def experts(candidate: Candidate, workload: Workload) -> str | None:
    counts, ep = sorted({part.num_experts for part in workload.model.architecture.experts}), candidate.mesh.ep
    if not counts and ep > 1:
        return f"ep={ep}: a dense model has no experts"
    return first(divides(ep, "ep", count, "num_experts") for count in counts)


@rule("experts_etp", "core/tensor_parallel/layers.py:842,1166", "etp")
def expert_widths(candidate: Candidate, workload: Workload) -> str | None:
    a, etp = workload.model.architecture, candidate.mesh.etp
    if not a.experts and etp > 1:
        return f"etp={etp}: a dense model has no experts"
    return first(divides(etp, "etp", part.ffn_hidden_size, "the experts' ffn_hidden_size") for part in a.experts)


@rule("experts_fold", "core/parallel_state.py: expert groups fold over tp x cp x dp", "tp cp ep etp dp")
def experts_fold(candidate: Candidate, _: Workload) -> str | None:
    mesh = candidate.mesh
    return divides(mesh.ep * mesh.etp, "ep*etp", mesh.tp * mesh.cp * mesh.dp, "tp*cp*dp")


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
    return None


@rule("experts_biases", "core/tensor_parallel/layers.py:1228 (sequence_parallel of the biases)", "tp etp")
def expert_biases(candidate: Candidate, workload: Workload) -> str | None:
    mesh, a = candidate.mesh, workload.model.architecture
    if not a.experts or not a.add_bias_linear or mesh.tp * mesh.etp == 1:
        return None
    return f"tp={mesh.tp} etp={mesh.etp} with biases in experts: their gradients are summed over ranks of other experts, silently wrong"


experts_together = refused(
    "experts_ep1", "core/tensor_parallel/layers.py:829,886 (README, silently wrong)", "tp ep etp", "experts !ep etp_beside_tp",
    "ep=1 with etp={mesh.etp} and tp={mesh.tp}: experts' gradients are then reduced as those of other layers, silently wrong",
)  # fmt: skip
experts_sequence = refused(
    "experts_sp", "core/transformer/moe/moe_layer.py:380", "tp sequence_parallel", "tp !sequence_parallel experts",
    "tp={mesh.tp}: experts with tensor parallelism train with sequence_parallel=true only",
)  # fmt: skip

EXPERT_RULES: Final = (experts, expert_kinds, expert_widths, experts_together, expert_biases, experts_fold, experts_sequence)
