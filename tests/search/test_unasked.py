"""What nobody asked for: no option that the search leaves out and that would gain is missing from a plan's list."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from orchestrator import recipe
from orchestrator.detect import machine
from orchestrator.engines import ENGINES
from orchestrator.errors import NoPlanError
from orchestrator.plan import Plan
from orchestrator.planning import AHEAD, Found, Planner
from orchestrator.search.planner import faster
from orchestrator.search.unasked import NAMED_S, WORTH_S, seconds_of
from orchestrator.strategy.choices import Choice
from orchestrator.strategy.spec import PINNED_ONLY
from orchestrator.strategy.tree import BY_NAME

ROOM = 1.0025
"""The list is made from what a search has found, not by a search for each option: of the gain at the border it may miss this share of a
step."""
RECIPES = Path(__file__).parents[2] / "recipes" / "models"


def searched(*words: str) -> Found:
    return Planner(recipe.load([*words, "launch=none"], machine(), list(ENGINES))).searched()


def fastest(*words: str) -> Plan:
    return Planner(recipe.load([*words, "launch=none"], machine(), list(ENGINES))).fastest().plan


def left_out(found: Found) -> Iterator[tuple[str, Any]]:
    """Every value that the search of this plan did not look at, by the pin's name: of options that only pins take all but the default,
    and what engines say that only pins take of the others."""
    space = found.space
    assert space is not None
    for choice in PINNED_ONLY:
        yield from ((choice.pin, value) for value in _values(choice) if value != choice.default)
    for engine in space.planned:
        yield from ((BY_NAME[name].pin, value) for name, values in engine.capabilities.pinned_values.items() for value in values)
    yield from (("zero_shard_size", 8), ("zero_shard_size", 64), ("tp_comm_overlap", True))


def _values(choice: Choice) -> tuple[Any, ...]:
    if choice.type is bool:
        return (True, False)
    if choice.name == "offload_modules":
        return ("core_attn", "qkv_linear+core_attn+attn_proj", "moe_act", "expert_fc1+moe_act")
    if choice.name == "ddp_bucket_size":
        return (10**7, 10**8)
    return (8, 64) if choice.type is int else typing.get_args(choice.type)


def missing(*words: str, only: tuple[str, ...] = ()) -> list[str]:
    """Options with which a full search finds a plan that is faster by more than WORTH_S, and that the plan's list does not have; of all, or
    of `only` these pins."""
    try:
        found = searched(*words)
    except NoPlanError:
        return []
    space, now = found.space, seconds_of(found.plan)
    assert space is not None
    listed = {one.key.split("=")[0] for one in found.unasked}
    lacking = []
    for name, value in dict.fromkeys(left_out(found)):
        if f"pin.{name}" in listed or (only and name not in only) or getattr(space.settings.pins, name) is not None:
            continue
        pinned = replace(space.settings, pins=replace(space.settings.pins, **{name: value}), top_k=1)
        other = faster(space.workload, space.planned, pinned, now * (1 - WORTH_S) / ROOM)
        if other is not None:
            lacking.append(f"{' '.join(words)}: pin.{name}={value} takes {seconds_of(other) / now - 1:+.1%}")
    return lacking


COVERING = (
    ("recipe=llama2_7b", "gpus=2048"),  # several instances of the optimizer; user buffers with another pipeline
    ("recipe=llama3_8b_128k", "gpus=64"),  # Megatron's FSDP; user buffers where the plan has no tp
    ("recipe=bert_large", "gpus=512"),  # CUDA graphs
    ("recipe=qwen3_8b_sft", "gpus=8", "cluster=dgx_a100_40gb"),  # logits in pieces, in place of an optimizer in host memory
    ("recipe=t5_11b", "gpus=8"),  # user buffers, which are of one of its two lengths
    ("recipe=bert_tiny", "gpus=64"),  # sequences shorter than the pieces that are offered
    ("recipe=llama3_70b_lora", "gpus=8"),  # checkpoints in host memory, in place of smaller micro-batches
    ("recipe=gpt3_1t", "gpus=1024"),  # attention's part in host memory, which more chunks need
)
OF_EXPERTS = ("moe_token_dispatcher_type", "overlap_moe_expert_parallel_comm")


@pytest.mark.parametrize("words", COVERING, ids=" ".join)
def test_no_option_that_would_gain_is_missing(words: tuple[str, ...]) -> None:
    assert missing(*words) == []


@pytest.mark.parametrize(("recipe", "gpus"), [("gpt_oss_120b", 512), ("qwen3_30b_a3b", 64)])
def test_no_option_of_experts_that_would_gain_is_missing(recipe: str, gpus: int) -> None:
    """Flex and the exchange beside computing, each with other degrees than the plan's; flex where gathering is better than all to all."""
    assert missing(f"recipe={recipe}", f"gpus={gpus}", only=OF_EXPERTS) == []


@pytest.mark.full
@pytest.mark.parametrize("gpus", [8, 64, 512, 2048])
@pytest.mark.parametrize("name", sorted(path.stem for path in RECIPES.glob("*.yaml") if "_tiny" not in path.stem))
def test_no_option_that_would_gain_is_missing_from_any_shipped_recipe(name: str, gpus: int) -> None:
    """All but the tiny ones, which are for a machine without GPUs."""
    assert missing(f"recipe={name}", f"gpus={gpus}") == []


def test_the_largest_gain_stands_first_and_each_line_says_what_it_asks_for() -> None:
    """DeepSeek-V3 on 2,048 H800 in fp8 without DeepEP. With it nothing that only a pin takes makes the plan faster by 5%."""
    had = ("recipe=deepseek_v3", "gpus=2048", "cluster=dgx_h800", "train.precision=fp8")
    words = (*had, "cluster.software.deep_ep=false")
    best, found = searched(*had), searched(*words)
    assert best.plan.moe_token_dispatcher_type == "flex"
    assert all(seconds_of(one.plan) > 0.95 * seconds_of(best.plan) for one in best.unasked)
    seconds = [seconds_of(one.plan) for one in found.unasked]
    assert seconds == sorted(seconds)
    first = found.unasked[0]
    assert (first.key, first.asks) == ("pin.moe_token_dispatcher_type=flex", "needs DeepEP installed on every node")
    assert seconds[0] < 0.85 * seconds_of(found.plan)
    asked = searched(*words, first.key)
    assert seconds_of(asked.plan) <= seconds[0] * (1 + 1e-9)
    assert first.key not in [one.key for one in asked.unasked]


def test_what_only_a_later_release_takes_names_it() -> None:
    """The experts' overlap of a model with a prediction layer and no pipeline: 0.19 has it, 0.16.1 has not (megatron_versions.py)."""
    words = ("recipe=deepseek_v3", "gpus=64", "engine=megatron", "model.num_layers=6", "pin.pp=1", "pin.ep=32")
    words = (*words, "cluster.software.deep_ep=false")  # whose exchange leaves little to hide
    old, new = (
        next(one for one in searched(*words, f"cluster.software.megatron_core={release}").unasked if "overlap_moe" in one.key)
        for release in ("0.16.1", "0.19.2")
    )
    assert old.asks.endswith("needs Megatron-core 0.19.2 (cluster.software.megatron_core=0.19.2)")
    assert "needs Megatron-core" not in new.asks
    assert not new.plan.moe_shared_expert_overlap, "which it takes the place of"


def test_shared_experts_are_computed_beside_the_exchange_wherever_that_is_legal() -> None:
    """Not beside the dispatcher that the release lacks it for, nor where the pinned overlap takes its place, nor without an exchange."""
    words = ("recipe=deepseek_v3", "gpus=512", "cluster.software.deep_ep=false")
    best = searched(*words).plan
    assert best.moe_shared_expert_overlap
    without = searched(*words, "pin.moe_shared_expert_overlap=false").plan
    assert seconds_of(best) < 0.98 * seconds_of(without)
    for others in (
        ("cluster.software.megatron_core=0.16.1", "pin.moe_token_dispatcher_type=flex"),
        ("pin.overlap_moe_expert_parallel_comm=true",),
    ):
        assert not searched(*words, *others).plan.moe_shared_expert_overlap
    alone = ("recipe=deepseek_tiny", "gpus=4", "cluster=dgx_h100", "pin.ep=1", "pin.tp=1")
    assert not searched(*alone, "engine=megatron").plan.moe_shared_expert_overlap


def test_a_plan_says_what_makes_it_smaller_and_no_slower() -> None:
    found = searched("recipe=llama3_70b", "gpus=64")
    (aware,) = [one for one in found.unasked if one.key == "train.precision_aware_optimizer=true"]
    assert found.plan.predicted is not None
    assert aware.plan.predicted is not None
    assert aware.plan.predicted.peak_memory_bytes < 0.98 * found.plan.predicted.peak_memory_bytes
    assert seconds_of(aware.plan) <= seconds_of(found.plan)


def test_traffic_runs_beside_products_unasked_where_user_buffers_start_and_published_runs_have_them() -> None:
    """From Hopper on; without where they don't fit, or take no such model."""
    words = ("recipe=llama3_70b", "gpus=64")
    best = fastest(*words)
    assert best.tp_comm_overlap
    assert seconds_of(best) < 0.97 * seconds_of(fastest(*words, "pin.tp_comm_overlap=false"))
    assert not fastest(*words, "cluster=dgx_a100_80gb").tp_comm_overlap
    assert not fastest(*words, "cluster=mi300x_8").tp_comm_overlap
    assert not fastest("recipe=deepseek_v3", "gpus=2048", "pin.tp=8", "pin.pp=16").tp_comm_overlap
    tight = (*words, "pin.tp=8", "pin.pp=8", "pin.layout=Et*10|(t*10|)*6t*10L", "pin.zero_stage=1", "pin.recompute=full")
    tight = (*tight, "pin.micro_batch_size=1", "memory.reserve_gib=0")
    assert fastest(*tight).tp_comm_overlap
    peaks = [fastest(*tight, f"pin.tp_comm_overlap={pin}").prediction.peak_memory_bytes for pin in ("true", "false")]
    assert peaks[1] < peaks[0]
    assert not fastest(*tight, f"memory.limit_gib={sum(peaks) / 2 / 2**30}").tp_comm_overlap


def test_user_buffers_are_left_where_they_take_room_that_saves_more_recompute() -> None:
    """Of 65,536 tokens a rank, in a step of 154 s: with them 166."""
    words = ("recipe=llama3_8b_128k", "gpus=8")
    best, beside = fastest(*words), fastest(*words, "pin.tp_comm_overlap=true")
    assert not best.tp_comm_overlap
    assert seconds_of(best) < 0.95 * seconds_of(beside)
    assert seconds_of(best) == seconds_of(fastest(*words, "pin.tp_comm_overlap=false"))


def test_an_offload_is_offered_where_it_makes_room_for_a_faster_plan_and_nowhere_else() -> None:
    """Chunks of a pipeline, of which there are four where attention leaves what it keeps to host memory. Looked at on the plan's own mesh
    alone: all others would take two thirds of the search once more (llama3_8b on 8 GPUs). It frees bytes for time: a choice that is too
    slow without it is too slow with it, as the search takes it."""
    words = ("recipe=gpt3_1t", "gpus=1024", "cluster=dgx_h100")
    found = searched(*words)
    (roomy,) = [one for one in found.unasked if "offload_modules" in one.key]
    assert roomy.key == "pin.offload_modules=core_attn"
    assert seconds_of(roomy.plan) < (1 - WORTH_S) * seconds_of(found.plan)
    assert (found.plan.vpp, roomy.plan.vpp) == (1, 4)
    assert seconds_of(searched(*words, roomy.key).plan) == pytest.approx(seconds_of(roomy.plan))
    offered = BY_NAME["offload_modules"].offered
    assert found.space is not None
    assert offered is not None
    costs = found.space.planned[found.space.index(found.plan)].costs(found.space.workload)
    for before in (one for one in found.bounds.usual if one.engine == found.plan.engine and one.mesh == found.plan.mesh):
        for modules in offered.values:
            candidate = replace(before, strategy=replace(before.strategy, offload_modules=modules))
            assert costs.time_floor(candidate) >= costs.time_floor(before)
    for none in (("recipe=llama3_70b", "gpus=64"), (*words, "cluster.software.transformer_engine=false"), (*words, "pin.vpp=1")):
        assert not any("offload_modules" in one.key for one in searched(*none).unasked)


def test_megatrons_fsdp_is_taken_where_no_plan_without_comes_near_and_its_own_loop_trains_it() -> None:
    release, pin = "cluster.software.megatron_core=0.19.2", "pin.megatron_fsdp"
    given = ("recipe=gpt3_175b", "gpus=1024", "cluster=gb200_nvl72")
    words = (*given, release)
    found = searched(*words)
    without = searched(*words, f"{pin}=false").plan
    assert found.plan.megatron_fsdp
    assert found.ahead is not None
    assert found.ahead.key == f"{pin}=true"
    assert seconds_of(found.plan) * AHEAD < seconds_of(without) == seconds_of(found.alternatives[0])
    assert seconds_of(found.plan) == pytest.approx(seconds_of(searched(*words, f"{pin}=true").plan))
    assert pin not in " ".join(one.key for one in found.unasked)
    taken = searched(*words, "take=2")
    assert (taken.plan.candidate, taken.alternatives[0].candidate) == (without.candidate, found.plan.candidate)
    for more in ((release, "program=instrument"), ("cluster.software.megatron_core=0.16.1",), (release, "write=bridge")):
        other = searched(*given, *more)
        assert not other.plan.megatron_fsdp
        assert f"{pin}=true" in [one.key for one in other.unasked]


def test_megatrons_fsdp_is_named_though_it_gains_little_where_pins_of_the_mesh_bring_it_in() -> None:
    """Else a pin of what is searched would beat the plan that is proven the fastest, and nothing said how."""
    words = ("recipe=llama3_70b", "gpus=128", "cluster=mi300x_8", "cluster.software.megatron_core=0.19.2")
    found, pinned = searched(*words), searched(*words, "pin.tp=1", "pin.pp=1").plan
    assert pinned.megatron_fsdp
    assert (1 - WORTH_S) * seconds_of(found.plan) < seconds_of(pinned) < (1 - NAMED_S) * seconds_of(found.plan)
    (named,) = [one for one in found.unasked if one.key == "pin.megatron_fsdp=true"]
    assert named.plan.candidate == pinned.candidate
    assert named.gains(found.plan)


def test_what_is_fixed_by_a_pin_is_not_offered_against_it() -> None:
    words = ("recipe=llama3_70b", "gpus=64", "cluster=dgx_a100_80gb")
    assert "pin.tp_comm_overlap=true" in [one.key for one in searched(*words).unasked]
    for pin in ("true", "false"):
        assert not any("tp_comm_overlap" in one.key for one in searched(*words, f"pin.tp_comm_overlap={pin}").unasked)
