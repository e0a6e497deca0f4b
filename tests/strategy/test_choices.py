"""A choice is declared once: whatever lists choices has each of them, with its type, default and text."""

from __future__ import annotations

import typing

import msgspec
import pytest

from orchestrator.plan import Plan, json_schema
from orchestrator.plan.check import KEYS as PLAN_KEYS
from orchestrator.recipe.help import help_text
from orchestrator.recipe.keys import KEYS
from orchestrator.report.candidates import COLUMNS
from orchestrator.strategy.choices import Choice
from orchestrator.strategy.pins import Pins
from orchestrator.strategy.spec import CHOICES, OUTER_CHOICES, Candidate, Mesh, Strategy
from orchestrator.strategy.tree import GIVEN, LEVELS

CANDIDATE = Candidate(engine="megatron", strategy=Strategy(mesh=Mesh()), micro_batch_size=1, num_microbatches=1)


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: choice.name)
def test_every_list_has_every_choice(choice: Choice) -> None:
    assert choice.doc
    assert choice.type is not None
    assert choice.of(CANDIDATE) == (1 if choice.default is None and choice.type is int else choice.default)
    assert getattr(Pins(), choice.pin) is None
    for group in ("pin", "explain"):
        assert KEYS[f"{group}.{choice.pin}"].type == choice.pin_type | None
    assert f"  pin.{choice.pin} " in help_text([])
    assert choice.doc in help_text([])
    assert choice.name in COLUMNS
    assert (choice.name in LEVELS) + (choice.name in GIVEN) + bool(choice.fixed_with) == 1


@pytest.mark.parametrize("choice", OUTER_CHOICES, ids=lambda choice: choice.name)
def test_every_choice_but_a_layers_is_a_field_of_the_plan(choice: Choice) -> None:
    assert typing.get_type_hints(Plan)[choice.name] == choice.type
    field = json_schema()["$defs"]["Plan"]["properties"][choice.name]
    assert field["description"].startswith(choice.doc)
    assert choice.name in PLAN_KEYS


def test_names_are_distinct_and_a_line_says_what_is_not_as_by_itself() -> None:
    for names in ([choice.name for choice in CHOICES], [choice.pin for choice in CHOICES], [choice.short for choice in CHOICES]):
        assert len(set(names)) == len(names)
    assert CANDIDATE.label() == "megatron tp=1 pp=1 dp=1 zero_stage=0 mbs=1"
    full = msgspec.structs.replace(
        CANDIDATE,
        strategy=Strategy(
            mesh=Mesh(tp=2, dp=8, order=("tp", "cp", "ep", "pp", "dp")),
            **{"zero_stage": 3, "zero_shard_size": 4, "sequence_parallel": True, "offload_optimizer": True, "cuda_graph_impl": "local"},
        ),
        schedule="deepspeed_1f1b",
    )
    said = "megatron tp=2 pp=1 dp=8 deepspeed_1f1b rank_order=tp-cp-ep-pp-dp zero_stage=3 zero_shard_size=4 sp offload"
    assert full.label() == f"{said} cuda_graph_impl=local mbs=1"
