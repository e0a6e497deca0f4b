"""Texts of each kind on both sides of what they may be, and where a user's own values go. What a plan decides: tests/words."""

from __future__ import annotations

from typing import Any

import pytest
from hand_plans import BERT, LLAMA, make_plan
from msgspec.structs import replace

from orchestrator.engines import passthrough as through
from orchestrator.errors import InputError
from orchestrator.hardware.spec import Software
from orchestrator.plan import Plan

BASE = make_plan(model=LLAMA)


def test_texts_are_taken_by_their_kind() -> None:
    taken: list[tuple[str, Any, Any]] = [
        ("int", "-3", -3), ("int", "+4", 4), ("int?", "null", None), ("int?", "~", None), ("int", None, None), ("float", "1e-3", 1e-3),
        ("float", "2", 2.0), ("float?", "None", None), ("bool", "True", True), ("bool", "FALSE", False), ("bool?", "null", None),
        ("dtype", "bf16", "bfloat16"), ("dtype", "float16", "float16"), ("dtype", "fp8", "uint8"), ("a|b", "b", "b"), ("str", "x", "x"),
        ("any", "null", None), ("any", "1,x", [1, "x"]), ("any", "[1, 2]", [1, 2]), ("any", "True", True), ("any", "word", "word"),
        ("any", '{"a": 1}', {"a": 1}), ("any", ["1", "x"], [1, "x"]), ("any", 5, 5), ("any", "NaN", "NaN"), ("any", "1.5", 1.5),
        ("any", "Infinity", "Infinity"), ("any", "false,1", [False, 1]),
    ]  # fmt: skip
    for kind, text, value in taken:
        found = through.typed("k", kind, text)
        assert (found, type(found)) == (value, type(value)), (kind, text)
    for kind, wrong, why in (
        ("int", "1.0", "is not a whole number"), ("int", "null", "is not a whole number"), ("int", "", "is empty"),
        ("float", "nan", "is not a finite number"), ("float", "inf", "is not a finite number"), ("float", "x", "is not a finite number"),
        ("bool", "1", "is neither; choose one of true, false"), ("dtype", "int8", "is no data type"), ("a|b", "c", "is not known; choose"),
        ("int", ["1"], "needs one value, not a list"), ("str", 5, "needs one value"), ("bool", True, "needs one value"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=why):
            through.typed("k", kind, wrong)


def test_values_of_a_plan_are_of_their_kind() -> None:
    for kind, value in (("bool", True), ("int", 3), ("float", 3), ("float", 0.5), ("any", None), ("any", True), ("any", [1]),
                        ("int?", None), ("a|b", "a"), ("dtype", "bfloat16"), ("str", "x")):  # fmt: skip
        through._check_type("k", kind, value)
    for kind, value in (("bool", 1), ("bool", "true"), ("int", True), ("int", 1.0), ("int", None), ("float", True), ("float", "1"),
                        ("str", 1), ("a|b", "c"), ("dtype", "int8"), ("str", True)):  # fmt: skip
        with pytest.raises(InputError):
            through._check_type("k", kind, value)
    for value in ("auto", {"a": "auto"}, [1, {"b": ["auto"]}]):
        with pytest.raises(InputError, match="is filled in by the Hugging Face Trainer alone"):
            through._refuse_auto("ds.x", value)
    for value in ("automatic", {"auto": 1}, [1, None], 5):
        through._refuse_auto("ds.x", value)


def test_paths_of_a_ds_config_are_known_open_or_sections() -> None:
    assert through._ds_kind("ds.x", "steps_per_print") == "int"
    for path in ("optimizer.params.foreach", "scheduler.params.x.y", "tensor_parallel.tp.tp_size", "zero_optimization.zenflow.topk"):
        assert through._ds_kind("ds.x", path) == "any"
    for path, why in (
        ("zero_optimization", "is a section; write ds.x.KEY=value; choose one of "), ("optimizer", "is a section"),
        ("tensor_parallel", "is a section"), ("a..b", "is no path of a ds_config"), (".a", "is no path"), ("a.", "is no path"),
        ("zero_optimization.stag", "did you mean ds.zero_optimization.stage?"), ("overlap_comm", "did you mean ds.zero_optimization.overl"),
        ("nothing_like_it_at_all", "is no key of DeepSpeed 0.19.8"),
    ):  # fmt: skip
        with pytest.raises(InputError) as caught:
            through._ds_kind("ds.x", path)
        assert why in str(caught.value), path


def test_what_megatron_needs_beside_a_value_is_said() -> None:
    full = [("full", 8)]
    some, two = [("full", 2), ("full", 1)], [("full", 2), ("none", 0)]
    for choices, lacking in (
        ({}, "tp=2 or more"), ({"tp": 2, "sequence_parallel": True}, "sequence_parallel=false"),
        ({"tp": 2}, "recompute=full on every stage"), ({"tp": 2, "recompute": full}, None), ({"tp": 2, "pp": 2, "recompute": some}, None),
        ({"tp": 2, "pp": 2, "recompute": two}, "recompute=full on every stage"),
    ):  # fmt: skip
        assert through._distributed_activations(make_plan(model=LLAMA, **choices)) == lacking, choices  # type: ignore[arg-type]


def with_extra(plan: Plan = BASE, **values: Any) -> Plan:
    return replace(plan, extra={"megatron": values})


def test_flags_of_values_take_the_place_of_ours_or_stand_at_the_end() -> None:
    ours = (("--lr", "0.1"), ("--bf16",), ("--seed", "1"))

    def found(plan: Plan) -> list[tuple[str, ...]]:
        return list(through.with_flags(ours, plan))

    assert found(BASE) == list(ours)
    assert found(with_extra(lr=0.5)) == list(ours), "what the plan decides stands there already"
    assert found(with_extra(init_method_std=0.02))[-1] == ("--init-method-std", "0.02")
    assert found(with_extra(log_throughput=True))[-1] == ("--log-throughput",)
    assert found(with_extra(log_throughput=False)) == list(ours)
    assert found(with_extra(bias_dropout_fusion=False))[-1] == ("--no-bias-dropout-fusion",)
    assert found(with_extra(bias_dropout_fusion=True)) == list(ours)
    assert found(with_extra(window_size=[8, 0]))[-1] == ("--window-size", "8,0")
    assert found(with_extra(moe_z_loss_coeff=None)) == list(ours)
    assert through.with_flags((("--moe-z-loss-coeff", "5"),), with_extra(moe_z_loss_coeff=None)) == ()
    assert through.with_flags((("--moe-z-loss-coeff", "5"), ("--x",)), with_extra(moe_z_loss_coeff=7.0)) == (
        ("--moe-z-loss-coeff", "7.0"),
        ("--x",),
    )
    assert found(with_extra(make_plan(model=LLAMA), bias_activation_fusion=False))[-1] == ("--no-bias-swiglu-fusion",)
    assert found(with_extra(make_plan(model=BERT), bias_activation_fusion=False))[-1] == ("--no-bias-gelu-fusion",)
    assert found(with_extra(batch_p2p_sync=False)) == list(ours), "no flag of it"
    assert through.notes(with_extra(init_method_std=0.02)) == ()
    assert [note.partition(":")[0] for note in through.notes(with_extra(log_throughput=True, batch_p2p_sync=False))] == [
        "megatron_args.sh alone has log_throughput", "Our worker alone has batch_p2p_sync",
    ]  # fmt: skip


def test_values_reach_the_sections_that_have_them() -> None:
    engine = {"transformer_config": {"a": 1}, "ddp": {"b": 2}, "optimizer": {"c": 3}}
    plan = with_extra(init_method_std=0.02, average_in_collective=True, log_throughput=True)
    found = through.with_megatron(engine, plan, through.SECTIONS)
    assert found == {
        "transformer_config": {"a": 1, "init_method_std": 0.02}, "ddp": {"b": 2, "average_in_collective": True}, "optimizer": {"c": 3},
    }  # fmt: skip
    assert engine["ddp"] == {"b": 2}
    assert through.with_megatron(engine, plan, ("transformer_config",))["ddp"] == {"b": 2}
    config = {"zero_optimization": {"stage": 1}}
    changed = through.with_ds(config, replace(BASE, extra={"ds": {"zero_optimization.overlap_comm": False, "comms_logger.enabled": True,
                                                                  "zero_optimization.stage": 3}}))  # fmt: skip
    assert changed == {"zero_optimization": {"stage": 1, "overlap_comm": False}, "comms_logger": {"enabled": True}}
    assert config == {"zero_optimization": {"stage": 1}}


def test_values_reach_engines_that_pass_their_group() -> None:
    passes = {"megatron": {"megatron": through.SECTIONS}, "both": {"megatron": ("transformer_config",), "ds": ()}}
    through.check_reached("both", {"ds": {"a": 1}, "megatron": {"b": 2}}, passes)
    through.check_reached("megatron", {"ds": {}, "other": {"a": 1}}, passes)
    with pytest.raises(InputError, match=r"ds\.a=1: does not reach engine=megatron; choose one of both"):
        through.check_reached("megatron", {"ds": {"a": 1}}, passes)
    assert through.reaches(passes["megatron"], {"ds": {}, "megatron": {"a": 1}})
    assert not through.reaches(passes["megatron"], {"ds": {"a": 1}})
    for version, known in (("0.16.1", True), ("0.19.2", True)):
        plan = make_plan(model=LLAMA, software=Software(megatron_core=version))
        through._check_megatron(replace(plan), "init_method_std", 0.1, through.SECTIONS)
        assert (through.megatron_kind("init_method_std", version) is not None) is known
    assert through.megatron_kind("no_such_field") is None
