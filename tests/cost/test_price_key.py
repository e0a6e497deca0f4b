"""Prices of layers are kept by the choices that they depend on, as the choices' declarations say: nothing may be missing there."""

from __future__ import annotations

import typing
from typing import Any

import pytest
from cost_cases import DEEPSPEED, MEGATRON, a100
from msgspec.structs import asdict, replace

from orchestrator.cost.calibration import datasheet
from orchestrator.cost.price import CostModel
from orchestrator.model.families import describe
from orchestrator.model.parts.experts import Experts
from orchestrator.model.spec import Architecture, ModelSpec
from orchestrator.model.training import Training
from orchestrator.strategy.capabilities import Traits
from orchestrator.strategy.choices import Choice
from orchestrator.strategy.layout import LayerSpan, Stage
from orchestrator.strategy.spec import CHOICES, Candidate, Mesh, Strategy, price_key
from orchestrator.strategy.workload import Workload

EXPERTS = Architecture(
    **{"family": "gpt", "name": "moe", "num_layers": 4, "hidden_size": 1024, "num_attention_heads": 16, "ffn_hidden_size": 2048},
    **{"vocab_size": 51200, "max_position_embeddings": 2048},
    feed_forward=Experts(num_experts=64, topk=8, ffn_hidden_size=512),
)
BASE = Candidate(
    engine="megatron",
    strategy=Strategy(mesh=Mesh(tp=2, cp=2, dp=4, ep=4), zero_stage=1, sequence_parallel=True),
    micro_batch_size=1,
    num_microbatches=8,
)


PIPELINES = ("pp", "vpp", "microbatch_group_size_per_vp_stage", "schedule")
"""Choices that mean nothing to one stage (tests/cost/test_options.py has groups of micro-batches)."""


def others(choice: Choice) -> list[Any]:
    """Some values that the choice may have besides the base's."""
    if typing.get_origin(choice.type) is typing.Literal:
        values = [*typing.get_args(choice.type)]
    elif choice.type is bool:
        values = [False, True]
    elif choice.name == "rank_order":
        values = [("tp", "cp", "ep", "pp", "dp"), ("cp", "tp", "ep", "dp", "pp")]
    elif choice.name == "offload_modules":
        values = ["qkv_linear", "core_attn+attn_proj", "moe_act"]
    else:
        values = [1, 2, 4, 8]
    return [value for value in values if value != choice.of(BASE)]


def changed(candidate: Candidate, choice: Choice, value: Any) -> Candidate:
    *path, name = choice.path.split(".")
    strategy = candidate.strategy
    if path == ["strategy", "mesh"]:
        strategy = replace(strategy, mesh=replace(strategy.mesh, **{name: value}))
    elif path == ["strategy"]:
        strategy = replace(strategy, **{name: value})
    else:
        return replace(candidate, **{name: value})
    return replace(candidate, strategy=strategy)


def model_of(traits: Traits) -> CostModel:
    cluster = a100()
    spec: ModelSpec = describe(EXPERTS, 2048)
    workload = Workload(model=spec, training=Training(global_batch_size=64, seq_length=2048), cluster=cluster)
    return CostModel(workload, traits, datasheet(cluster, traits))


def stages(candidate: Candidate) -> tuple[Stage, ...]:
    """All layers in one stage, computed again as the strategy says."""
    spec = describe(EXPERTS, 2048)
    mode = candidate.strategy.recompute
    spans = [LayerSpan(kind=run.layer.kind, first=0, count=run.count, recompute=mode) for run in spec.runs]
    spans = [span if 0 < i < len(spans) - 1 else replace(span, recompute="none") for i, span in enumerate(spans)]
    return (Stage(layers=tuple(spans)),)


@pytest.mark.parametrize("choice", [c for c in CHOICES if c.name not in PIPELINES], ids=lambda choice: choice.name)
def test_what_is_kept_from_one_candidate_changes_no_price_of_another(choice: Choice) -> None:
    """A choice that is left out of the key (`in_layer_price`) though a layer's price depends on it would be priced as the first one was."""
    for traits in (MEGATRON, DEEPSPEED):
        for base in (BASE, changed(BASE, next(c for c in CHOICES if c.name == "recompute"), "full")):
            for value in others(choice):
                other = changed(base, choice, value)
                if f"mixed/{other.strategy.zero_stage}" not in traits.states:
                    continue
                shared, fresh, states = model_of(traits), model_of(traits), traits.states["mixed/0"]
                shared.price(base, stages(base))
                assert asdict(shared.price(other, stages(other))) == asdict(fresh.price(other, stages(other)))
                shared.floors(base, states)
                assert shared.floors(other, states) == fresh.floors(other, states)


def test_data_parallel_copies_share_what_is_kept() -> None:
    """The search prices thousands of candidates: those that differ beside the layers alone have one key."""
    beside = {"zero_stage": 3, "offload_optimizer": True, "overlap_grad_reduce": False, "cuda_graph_impl": "local", "megatron_fsdp": True}
    strategy = BASE.strategy
    assert price_key(replace(strategy, **beside, mesh=replace(strategy.mesh, dp=64, pp=8))) == price_key(strategy)
    inside = {"tp_comm_overlap": True, "cp_comm_type": "a2a", "moe_token_dispatcher_type": "flex", "sequence_parallel": False}
    for name, value in inside.items():
        assert price_key(replace(strategy, **{name: value})) != price_key(strategy)


@pytest.mark.parametrize(("ep", "etp"), [(2, 1), (1, 2), (2, 2), (8, 1)])
def test_layers_without_experts_are_priced_once_whatever_becomes_of_the_experts(ep: int, etp: int) -> None:
    costs = model_of(MEGATRON)
    mesh = replace(BASE.strategy.mesh, dp=16, ep=1)
    plain = replace(BASE, strategy=replace(BASE.strategy, mesh=mesh))
    apart = replace(plain, strategy=replace(plain.strategy, mesh=replace(mesh, ep=ep, etp=etp), moe_token_dispatcher_type="allgather"))
    for kind in ("embedding", "head"):
        assert costs.layer(apart, kind, "none") is costs.layer(plain, kind, "none")
    assert costs.with_modes(("none",)).layer(plain, "head", "none") is costs.layer(plain, "head", "none")
    assert costs.with_modes(costs.modes) is costs
    (experts,) = {*costs.kinds} - {"embedding", "head"}
    assert costs.layer(apart, experts, "none").parameters < costs.layer(plain, experts, "none").parameters
