"""How experts are divided: expert parallelism folds over the ranks of tensor, context and data parallelism."""

from __future__ import annotations

from orchestrator.engines.rules.rule import divides, rule
from orchestrator.model.parts.experts import Experts
from orchestrator.model.spec import Architecture
from orchestrator.strategy.capabilities import Rule, Situation
from orchestrator.strategy.spec import Candidate


def expert_counts(a: Architecture) -> list[int]:
    """The different numbers of experts of a model's layers; empty for a dense model."""
    parts = (layer.feed_forward for layer in a.kinds_of_layers())
    return sorted({part.num_experts for part in parts if isinstance(part, Experts)})


def experts(candidate: Candidate, situation: Situation) -> str | None:
    counts, ep = expert_counts(situation.model.architecture), candidate.mesh.ep
    if not counts and ep > 1:
        return f"ep={ep}: a dense model has no experts"
    return next((why for count in counts if (why := divides(ep, "ep", count, "num_experts"))), None)


def experts_whole(candidate: Candidate, situation: Situation) -> str | None:
    etp = candidate.mesh.etp
    return None if etp == 1 else f"etp={etp}: experts are priced whole, with etp=1"


def experts_fold(candidate: Candidate, _: Situation) -> str | None:
    mesh = candidate.mesh
    return divides(mesh.ep, "ep", mesh.tp * mesh.cp * mesh.dp, "tp*cp*dp")


def experts_sequence(candidate: Candidate, situation: Situation) -> str | None:
    if candidate.mesh.tp == 1 or candidate.strategy.sequence_parallel or not expert_counts(situation.model.architecture):
        return None
    return f"tp={candidate.mesh.tp}: experts with tensor parallelism train with sequence_parallel=true only"


def expert_rules() -> tuple[Rule, ...]:
    return (
        rule("experts", "ep_basic: megatron/training/arguments.py:1025; core/transformer/moe/moe_layer.py:103", experts, "ep"),
        rule("experts_whole", "ours: no price of a divided expert", experts_whole, "etp"),
        rule("experts_fold", "core/parallel_state.py: expert groups fold over tp x cp x dp", experts_fold, "tp", "cp", "ep", "dp"),
        rule("experts_sp", "core/transformer/moe/moe_layer.py:380", experts_sequence, "tp", "sequence_parallel"),
    )
