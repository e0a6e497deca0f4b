"""What a refusal says and proposes: what was missing, the nearest plan, and only what was tried and helps."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Mapping
from itertools import product
from typing import Any

import pytest
from instances import CALIBRATION, TRAITS, planned_engines
from msgspec.structs import replace
from small_engines import deepspeed_like, megatron_like
from small_models import cluster, gpt, training

from orchestrator import recipe
from orchestrator.__main__ import main
from orchestrator.asking.grid import point
from orchestrator.asking.questions import answered
from orchestrator.detect import machine
from orchestrator.engines import ENGINES
from orchestrator.errors import NoPlanError
from orchestrator.plan import Plan
from orchestrator.planning import Planner, planned
from orchestrator.recipe import Settings
from orchestrator.search.planner import search
from orchestrator.search.question import SearchSettings
from orchestrator.search.refuse import RELAX, Refused, _sized, _why_illegal
from orchestrator.strategy.capabilities import Capabilities
from orchestrator.strategy.pins import MemoryLimit, Pins
from orchestrator.strategy.spec import LAST_RESORTS
from orchestrator.strategy.tree import Outcome
from orchestrator.strategy.workload import Workload
from orchestrator.units import GIB, MIB

LEAN = {"zero_stages": (0,), "zero_stages_with_pipeline": (0,), "recompute": ("none",), "sequence_parallel": False}
"""An engine that can save memory by tp and pp alone."""


def plan(capabilities: Capabilities, limit: float = 80 * GIB, *, layers: int = 2, gpus: int = 8, **given: Any) -> Plan:
    asked = replace(training(16, seq=128), **given.pop("train", {}))
    workload = Workload(model=gpt(layers, hidden=256, seq=128, vocab=1024), training=asked, cluster=cluster(gpus))
    settings = SearchSettings(limit=MemoryLimit(limit=math.ceil(limit), reserve=0), top_k=1, **given)
    return search(workload, planned_engines([(capabilities, TRAITS)], CALIBRATION), settings).plan


def peak(capabilities: Capabilities, **given: Any) -> float:
    predicted = plan(capabilities, **given).predicted
    assert predicted is not None
    return predicted.peak_memory_bytes


def refused(capabilities: Capabilities, *args: Any, **given: Any) -> tuple[str, str, NoPlanError]:
    """(what is missing, what is proposed, the error)."""
    with pytest.raises(NoPlanError) as caught:
        plan(capabilities, *args, **given)
    why, _, proposed = str(caught.value).partition(RELAX)
    return why, proposed, caught.value


def test_each_pin_that_is_in_the_way_alone_is_named_with_the_plan_that_there_is_without_it() -> None:
    """4 GPUs' worth of splitting is needed: with pp=1 it is tp=4, with tp=1 it is pp=2 and no more: two layers."""
    able = megatron_like(**LEAN, uneven_stages=False)
    room = peak(able, pins=Pins(tp=4, pp=1, micro_batch_size=1)) * 1.02
    why, proposed, error = refused(able, room, pins=Pins(tp=1, pp=1, micro_batch_size=1))
    assert "nearest: megatron tp=1 pp=1 dp=8 zero_stage=0 mbs=1" in why
    assert proposed.startswith("leave out pin.tp (pin.tp=4: megatron tp=4 pp=1 dp=2 zero_stage=0 mbs=1 recompute=none, ")
    assert "leave out the pins" not in proposed
    assert "pin.micro_batch_size" not in proposed
    assert isinstance(error.refused, Refused)
    assert error.refused.choice == "megatron tp=1 pp=1 dp=8 zero_stage=0 mbs=1 recompute=none"


def test_a_batch_that_does_not_divide_gets_the_nearest_that_do(capsys: pytest.CaptureFixture[str]) -> None:
    """Of numbers of GPUs that a batch forbids, too: 15,625 = 5^6 ranks are in no tp, pp or cp."""
    words = ["plan", "recipe=llama3_8b", "cluster=dgx_h100"]
    proposed = {
        ("gpus=16", "train.global_batch_size=500", "pin.dp=16"): "train.global_batch_size=496 or 512",
        ("gpus=16", "train.global_batch_size=100", "pin.tp=2", "pin.pp=1", "pin.cp=1", "pin.micro_batch_size=4"): (
            "train.global_batch_size=96 or 128"
        ),
        ("gpus=1000000",): "train.global_batch_size=15625, or gpus=524288 or 1048576",
    }
    for more, said in proposed.items():
        assert main([*words, *more]) == 2
        error = capsys.readouterr().err.rstrip()
        assert error.endswith(said)
        assert RELAX in error


def test_pins_that_are_in_the_way_together_are_named_together() -> None:
    able = megatron_like(**LEAN, uneven_stages=False)
    room = peak(able, pins=Pins(tp=4, pp=2, micro_batch_size=1)) * 1.02
    assert room < peak(able, pins=Pins(tp=4, pp=1, micro_batch_size=1))
    _, proposed, _ = refused(able, room, pins=Pins(tp=1, pp=1))
    assert proposed.startswith("leave out the pins tp, pp (megatron tp=4 pp=2 dp=1")
    assert "gpus=" not in proposed


def test_a_single_pin_is_not_proposed_twice() -> None:
    """Nothing helps but more GPUs, and those only with the pin left out: the one pin is not all pins."""
    able = deepspeed_like(axes=("dp",), zero_stages=(3,), recompute=("none",), offload_optimizer=False, engine="megatron")
    room = peak(able, gpus=8, pins=Pins(micro_batch_size=1)) * 1.01
    _, proposed, _ = refused(able, room, gpus=4, pins=Pins(micro_batch_size=1))
    assert re.fullmatch(r"gpus=8 \(megatron tp=1 pp=1 dp=8 zero_stage=3 mbs=1 recompute=none, about [0-9.]+ ms a step\)", proposed)


def test_the_first_narrower_optimizer_that_fits_is_proposed() -> None:
    """Adam's states are divided by nothing: only what they take matters. The precise one that keeps 16 bits less of the weights comes
    before the one with narrow moments; SGD has none to narrow."""
    able = megatron_like(axes=("dp",), **LEAN, uneven_stages=False, precision_aware_optimizer=True)
    one = Pins(micro_batch_size=1)
    need, aware = peak(able, pins=one), peak(able, pins=one, train={"precision_aware_optimizer": True})
    narrow = peak(able, pins=one, train={"precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"})
    assert narrow < aware < need
    _, proposed, _ = refused(able, (aware + need) / 2, pins=one)
    assert proposed.startswith("train.precision_aware_optimizer=true (megatron ")
    assert "exp_avg" not in proposed
    _, proposed, _ = refused(able, (narrow + aware) / 2, pins=one)
    assert proposed.startswith("train.precision_aware_optimizer=true train.exp_avg_dtype=bf16 train.exp_avg_sq_dtype=bf16 (megatron ")
    assert refused(able, narrow * 0.5, pins=one)[1] == ""
    assert "train." not in refused(able, peak(able, pins=one, train={"optimizer": "sgd"}) * 0.9, pins=one, train={"optimizer": "sgd"})[1]


def test_a_network_grows_to_whole_domains_where_the_outermost_is_too_small() -> None:
    given = cluster(8)
    inner, outer = given.levels
    assert _sized(given, 2 * given.num_gpus).num_gpus == 16
    small = replace(given, levels=(inner, replace(outer, size=12)))
    assert [level.size for level in _sized(small, 2 * small.num_gpus).levels] == [inner.size, 24]
    assert [level.size for level in _sized(small, small.num_gpus).levels] == [inner.size, 12]
    exact = replace(given, levels=(inner, replace(outer, size=16)))
    assert [level.size for level in _sized(exact, 2 * exact.num_gpus).levels] == [inner.size, 16]


def test_what_is_kept_free_is_said_where_something_is() -> None:
    able = megatron_like(**LEAN)
    workload = Workload(model=gpt(2, hidden=256, seq=128, vocab=1024), training=training(16, seq=128), cluster=cluster(8))
    engines = planned_engines([(able, TRAITS)], CALIBRATION)
    for limit, said in (
        (MemoryLimit(limit=6 * MIB, reserve=2 * MIB), "of 4.0 MiB (6.0 MiB less 2.0 MiB kept free);"),
        (MemoryLimit(limit=4 * MIB, reserve=0), "of 4.0 MiB;"),
        (MemoryLimit(limit=6 * MIB, reserve=2 * MIB, risk=0.05), "of 4.0 MiB (6.0 MiB less 2.0 MiB kept free for memory.risk=5%);"),
    ):
        with pytest.raises(NoPlanError) as caught:
            search(workload, engines, SearchSettings(limit=limit))
        assert said in str(caught.value)


@pytest.mark.parametrize(
    ("pins", "why"),
    [
        (Pins(tp=3), "pin.tp=3 does not divide the 8 GPUs"),
        (Pins(tp=2, pp=2, cp=1, dp=1), "pin.tp=2 x pin.pp=2 x pin.cp=1 x pin.dp=1 = 4 does not divide the 8 GPUs"),
        (Pins(tp=4, pp=4), "pin.tp=4 x pin.pp=4 = 16 does not divide the 8 GPUs"),
        (Pins(tp=1, pp=2, ep=8), "pin.pp=2 x pin.ep=8 = 16 does not divide the 8 GPUs"),
        (Pins(tp=2, zero_stage=3), "zero_stage=3: illegal by rule zero_stage"),
    ],
)
def test_pins_that_no_mesh_has_are_said_with_their_product(pins: Pins, why: str) -> None:
    said, proposed, _ = refused(megatron_like(), pins=pins)
    assert said.startswith("no legal plan for ")
    assert why in said
    assert "leave out pin." in proposed


def asked(*words: str) -> Plan:
    return Planner(recipe.load([*words, "launch=none"], machine(), list(ENGINES))).fastest().plan


def test_experts_that_need_more_ranks_than_a_stage_has_are_the_cause() -> None:
    """16 stages of 64 ranks are 1,024; the kinds of context parallelism were blamed, of which the default is legal."""
    with pytest.raises(NoPlanError) as caught:
        asked("recipe=deepseek_v3", "gpus=512", "pin.pp=16", "pin.ep=64", "pin.tp=1")
    why, _, proposed = str(caught.value).partition(RELAX)
    assert why.endswith(": pin.pp=16 x pin.ep=64 = 1,024 does not divide the 512 GPUs")
    assert "leave out pin.pp (pin.pp=" in proposed
    assert "leave out pin.ep (pin.ep=" in proposed


def test_another_value_of_a_choice_whose_default_is_tried_is_never_the_cause() -> None:
    with pytest.raises(NoPlanError) as caught:
        asked("recipe=llama3_70b", "gpus=64", "engine=megatron", "pin.cp=4", "pin.tp=8", "pin.recompute=mla_up_proj")
    why = str(caught.value).partition(RELAX)[0]
    assert "mla_up_proj" in why
    assert "cp_comm_type" not in why
    with pytest.raises(NoPlanError, match=r"megatron has zero_stage 0, 1, and 2, 3 with megatron_fsdp; to relax: ") as caught:
        asked("recipe=qwen3_30b_a3b", "gpus=16", "cluster=dgx_h100", "engine=megatron", "pin.zero_stage=3", "pin.ep=8")
    assert "expert_order" not in str(caught.value)


def test_where_host_memory_is_what_lacks_least_it_is_said_with_the_plan_and_how_much_would_do() -> None:
    """The bytes of a GPU were named, of a plan that lacks more of them."""
    words = ("recipe=llama3_8b", "cluster=dgx_h100", "gpus=8", "model.num_layers=472")
    with pytest.raises(NoPlanError) as caught:
        asked(*words)
    why, _, proposed = str(caught.value).partition(RELAX)
    said = r"no plan fits for .*: offload_optimizer needs 242\.1 GiB of host memory a rank, of 238\.4 GiB \(cluster\.host_memory\); "
    assert re.fullmatch(said + r"nearest: megatron_deepspeed .* zero_stage=3 .*offload .*", why)
    assert re.search(r"gpus=16 \(.*\), or cluster\.host_memory=262GB \(megatron_deepspeed .* zero_stage=3 .*about", proposed)
    refused = caught.value.refused
    assert isinstance(refused, Refused)
    assert refused.choice in why
    assert asked(*words, "cluster.host_memory=262GB").strategy.offload_optimizer
    with pytest.raises(NoPlanError, match=r"of host memory a rank, of 241\.2 GiB"):
        asked(*words, "cluster.host_memory=259GB")
    with pytest.raises(NoPlanError, match=r"no legal plan .* or cluster\.host_memory=262GB \("):
        asked(*words, "engine=megatron_deepspeed", "pin.offload=true", "pin.zero_stage=3")
    with pytest.raises(NoPlanError) as caught:  # where a GPU's own memory lacks less
        asked(*words, "pin.offload=false")
    assert "host" not in str(caught.value).partition(RELAX)[0]


EXPERTS = ("recipe=qwen3_30b_a3b", "gpus=16", "cluster=dgx_h100", "engine=megatron", "pin.tp=2", "pin.ep=4", "pin.pp=2")


@pytest.mark.parametrize("more", [(), ("pin.cp=1", "pin.etp=1"), ("pin.cp=1", "pin.etp=1", "pin.dp=4", "pin.micro_batch_size=1")])
@pytest.mark.parametrize(
    ("pins", "named"),
    [
        (("pin.sequence_parallel=false",), ["experts_sp"]),
        (("pin.zero_stage=3",), ["zero_stage"]),
        (("pin.vpp=7", "pin.schedule=1f1b"), ["schedule"]),
        (("pin.zero_stage=3", "pin.sequence_parallel=false"), ["zero_stage", "experts_sp"]),
    ],
)
def test_the_rules_that_are_named_are_those_without_which_there_is_a_plan(
    pins: tuple[str, ...], named: list[str], more: tuple[str, ...]
) -> None:
    """Degrees that nobody asked for (cp=2, etp=64) were blamed, whatever the pins broke."""
    with pytest.raises(NoPlanError) as caught:
        asked(*EXPERTS, *pins, *more)
    why = str(caught.value).partition(RELAX)[0]
    assert sorted(re.findall(r"illegal by rule (\w+)", why)) == sorted(named)
    choices = {key.removeprefix("pin.").partition("=")[0] for key in (*EXPERTS, *pins, *more)}
    for branch in re.findall(r"megatron ((?:\w+=\S+ ?)+): illegal", why):
        assert len({word.partition("=")[0] for word in branch.split()} - choices) <= 1, branch


def test_a_time_that_is_proposed_is_of_a_plan_as_cautious_as_those_of_a_search() -> None:
    """It was that of a plan with a chance of 17% of running out of memory, 271 s in place of 325 s."""
    words = ("recipe=llama3_8b", "cluster=dgx_h200", "gpus=32", "engine=megatron", "train.seq_length=1048576", "pin.tp=1", "pin.pp=1",
             "model.max_position_embeddings=1048576", "train.global_batch_size=4", "search.prefer=fastest")  # fmt: skip
    with pytest.raises(NoPlanError, match=r"no plan fits") as caught:
        asked(*words, "pin.cp=8")
    ((pin, seconds),) = re.findall(r"leave out pin\.cp \((pin\.cp=\d+): .*?, about ([\d.]+) s a step\)", str(caught.value))
    assert asked(*words, pin).prediction.step_time_s <= float(seconds) * 1.005


def test_what_there_is_without_a_pin_is_a_fast_plan_whose_value_may_be_typed() -> None:
    """It was the plan of fewest bytes: tp 64 over 8 nodes."""
    words = ("recipe=llama3_70b", "gpus=64")
    with pytest.raises(NoPlanError, match=r"pin\.dp=3 does not divide the 64 GPUs") as caught:
        asked(*words, "pin.dp=3")
    (pin,) = re.findall(r"leave out pin\.dp \((pin\.dp=\d+): megatron tp", str(caught.value))
    best, typed = (plan.predicted.step_time_s for plan in (asked(*words), asked(*words, pin)) if plan.predicted is not None)
    assert typed < 1.2 * best


LONG = (
    *("recipe=llama3_8b", "task=sft", "gpus=32", "cluster=dgx_h100", "train.seq_length=1048576"),
    *("model.max_position_embeddings=1048576", "train.global_batch_size=32"),
)
"""Supervised samples of a million tokens, which no rank can hold without options that save memory."""
IN_FP32 = (
    *("recipe=qwen3_8b_sft", "gpus=8", "cluster=dgx_h100", "engine=deepspeed", "model.max_position_embeddings=1048576"),
    *("train.precision=fp32", "train.global_batch_size=8"),
)


def test_options_that_save_memory_are_searched_where_nothing_fits_without() -> None:
    """It was "needs 2138 GiB", with the pins to type. The plan is the fastest of all that pins of these options give."""
    best = asked(*LONG, "data.packing=false", "engine=deepspeed")
    assert best.offload_activations
    by_pins = []
    for mlp, logits, offload in product((1, 8, 64), (1, 8, 64), ("false", "true")):
        with contextlib.suppress(NoPlanError):
            by_pins.append(asked(*LONG, "data.packing=false", "engine=deepspeed", f"pin.tiled_mlp={mlp}", f"pin.tiled_logits={logits}",
                                 f"pin.offload_activations={offload}"))  # fmt: skip
    assert best.prediction.step_time_s == pytest.approx(min(plan.prediction.step_time_s for plan in by_pins), rel=1e-9)


def test_they_stay_out_of_the_search_where_a_plan_fits_without() -> None:
    plain = asked("recipe=llama3_8b", "gpus=8", "engine=deepspeed")
    assert not any(getattr(plain, choice.name) != choice.default for choice in LAST_RESORTS)


def test_samples_that_nobody_asked_to_pack_are_padded_where_packed_ones_fit_nowhere() -> None:
    """In fp32 there is no flash attention, without which Ulysses has no packed samples."""
    words = [*IN_FP32, "train.seq_length=524288", "launch=none"]
    settings, found = planned(recipe.load(words, machine(), list(ENGINES)), Planner.plan)
    swept = point(lambda _: recipe.load(words, machine(), list(ENGINES)), {})
    assert swept.answer is not None, swept.why
    assert swept.answer.plan.candidate == found.plan.candidate
    assert settings.training.packing is False
    assert found.plan.training.packing is False
    with pytest.raises(NoPlanError, match=r"to relax: data\.packing=false \(deepspeed "):
        planned(recipe.load([*words, "data.packing=true"], machine(), list(ENGINES)), Planner.plan)


def test_a_million_tokens_of_packed_samples_are_divided() -> None:
    """Without context parallelism packed samples took 1178 s a step, padded ones 773 s."""
    words = (
        "recipe=llama3_8b_128k",
        "task=sft",
        "gpus=64",
        "cluster=dgx_h100",
        "train.seq_length=1048576",
        "model.max_position_embeddings=1048576",
    )
    unasked, padded = asked(*words), asked(*words, "data.packing=false")
    assert unasked.training.packing
    assert unasked.cp > 1
    assert unasked.prediction.step_time_s < 1.03 * padded.prediction.step_time_s
    assert asked(*LONG, "data.packing=true", "engine=deepspeed").cp > 1


def test_the_most_that_fits_is_of_padded_samples_where_packed_ones_end() -> None:
    words = [*IN_FP32, "largest=seq_length", "launch=none"]

    def most(*more: str) -> int:
        def load(keys: Mapping[str, Any]) -> Settings:
            return recipe.load([*words, *more, *(f"{k}={v}" for k, v in keys.items())], machine(), list(ENGINES))

        found, _ = answered(load, load({}), {})
        return found.plan.training.seq_length

    assert most() > 1.5 * most("data.packing=true")


def test_the_refusal_is_of_the_space_with_the_options_that_save_memory() -> None:
    words = ("recipe=llama3_8b_128k", "gpus=8", "engine=deepspeed", "train.seq_length=1048576", "model.max_position_embeddings=1048576")
    words = (*words, "train.global_batch_size=1", "pin.cp=8", "pin.zero_stage=3", "pin.offload=false", "memory.limit_gib=40")
    with pytest.raises(NoPlanError, match=r"nearest: deepspeed .*tiled_mlp=64 tiled_logits=64 offload_activations"):
        asked(*words)


def test_a_rule_is_named_though_every_branch_that_it_cut_has_an_option_that_is_not_the_default() -> None:
    found, decided = plan(megatron_like(**LEAN)).candidate, ("tp", "moe_token_dispatcher_type")
    cut = Outcome(candidate=found, decided=decided, reason="illegal by rule stages (ours): why", rule="stages")
    assert _why_illegal([cut], Pins(tp=2), 8).endswith(": illegal by rule stages (ours): why")
