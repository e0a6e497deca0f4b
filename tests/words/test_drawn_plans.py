"""Drawn legal plans come back from Megatron-LM's command line as themselves: layout, options, training and model."""

from __future__ import annotations

import json
import random
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec.structs import replace

from orchestrator.audit import formats, script
from orchestrator.audit.audit import settings_of
from orchestrator.audit.build import built
from orchestrator.audit.reading import Reading, Setup
from orchestrator.detect import Machine
from orchestrator.engines.megatron_args import megatron_args_sh
from orchestrator.engines.megatron_parts import latent_attention
from orchestrator.engines.passthrough import SECTIONS, _agree, decided_by
from orchestrator.engines.transformer_config import NO_RECOMPUTE, engine_fields, overlaps_gathering, overlaps_reduction, settings
from orchestrator.errors import InputError
from orchestrator.model.families import describe
from orchestrator.model.spec import padded
from orchestrator.plan import Plan
from orchestrator.strategy.graphs import graphed_modules
from orchestrator.words.terms import NOTHING, Term, put
from orchestrator.words.tools import BRIDGE, MEGATRON_LM, NEMO, NEMO2, Tool

TESTS = Path(__file__).parents[1]
sys.path += [str(TESTS / "engines"), str(TESTS / "megatron_lm")]
from thousand import random_plan  # noqa: E402

OF_ADAM = ("betas", "eps")
NO_CHOICE = ("predicted", "rejected", "run", "calibration", "prices", "extra", "stages", "model", "training", "cluster")
BY_EFFECT = (
    *("overlap_grad_reduce", "overlap_param_gather", "microbatch_group_size_per_vp_stage", "cuda_graph_modules"),
    "moe_permute_fusion",
)
"""A plan may have them where they mean nothing, or another's default."""


def permutes_fused(of: Plan | Setup, plan: Plan) -> bool:
    """Whether Transformer Engine's kernels permute tokens under a choice of this plan, or of what was read of it."""
    return of.moe_permute_fusion and bool(plan.model.experts) and plan.cluster.software.transformer_engine


BY_MEANING = ("family", "name", "pattern", "mixer", "feed_forward", "num_query_groups", "kv_channels", "rotary_base", "rotary_percent")
"""A model's fields that can be written in several ways, or that name it."""
UNIT = "make_vocab_size_divisible_by"
NOT_SAID = ("num_token_types", UNIT)
"""BERT's segments, which Megatron-LM's program has with its binary head alone; and a unit of padding, of which the padded size counts."""


def layers_of(plan: Plan) -> list[list[tuple[object, ...]]]:
    """Of each stage, one by one, however the plan puts them together."""
    return [[(span.kind, span.first + index, span.recompute, span.chunk) for span in stage.layers for index in range(span.count)]
            for stage in plan.stages]  # fmt: skip


def lost(plan: Plan, reading: Reading) -> list[str]:
    """What is read back otherwise than the plan has it."""
    found = [f"unknown {flag}" for flag in reading.unknown]
    given: Any = {"cluster": "dgx_h100", "gpus": str(plan.world_size)}
    if not (whole := "model.num_layers" in reading.keys):  # a file of overrides has its model elsewhere
        given |= {"recipe": "llama3_8b", "train.seq_length": str(plan.training.seq_length)}
    settings, _ = settings_of(reading, given, Machine())
    ours = replace(settings, architecture=plan.model, training=plan.training, cluster=plan.cluster, run=plan.run, extra=plan.extra)
    again = built(reading.setup, ours, describe(plan.model, plan.training.seq_length, plan.training.decoder_seq_length))
    found += [
        name for name in Plan.__struct_fields__ if name not in (*NO_CHOICE, *BY_EFFECT) and getattr(again, name) != getattr(plan, name)
    ]
    found += [of.__name__ for of in (overlaps_reduction, overlaps_gathering) if of(again) != of(plan)]
    found += [] if permutes_fused(again, plan) == permutes_fused(plan, plan) else ["moe_permute_fusion"]
    groups = [of.microbatch_group_size_per_vp_stage or of.pp for of in (again, plan)]
    found += ["microbatch_group_size_per_vp_stage"] if groups[0] != groups[1] else []
    found += [] if graphed_modules(again, plan.model) == graphed_modules(plan, plan.model) else ["cuda_graph_modules"]
    found += ["layers of stages"] if layers_of(again) != layers_of(plan) else []
    for name in plan.training.__struct_fields__:
        if not (name in OF_ADAM and plan.training.optimizer == "sgd") and f"train.{name}" in reading.keys:
            value = reading.keys[f"train.{name}"]
            if (tuple(value) if isinstance(value, list) else value) != getattr(plan.training, name):
                found.append(f"training.{name}")
    if not whole:
        return found
    one, other = settings.architecture, plan.model
    found += [
        f"model.{name}"
        for name in other.__struct_fields__
        if name not in (*BY_MEANING, *NOT_SAID) and f"model.{name}" not in reading.weak and getattr(one, name) != getattr(other, name)
    ]
    latent = latent_attention(other) is not None  # whose heads have no groups
    groups = [other.num_attention_heads if latent else of.query_groups for of in (one, other)]
    same = (list(one.each_layer()), groups[0], one.head_dim) == (list(other.each_layer()), groups[1], other.head_dim)
    units = (reading.keys[f"model.{UNIT}"], other.make_vocab_size_divisible_by)
    found += [UNIT] if len({padded(other.vocab_size, unit, plan.tp) for unit in units}) > 1 else []
    return found + ([] if same else ["model's layers"])


@cache
def drawn(number: int, version: str, seed: int) -> list[Plan]:
    draw = random.Random(seed)
    found: list[Plan] = []
    while len(found) < number:
        plan = random_plan(draw, version)
        if plan is not None:
            found.append(replace(plan, extra={}))  # a user's own flags may say another model
    return found


@pytest.mark.parametrize("version", ["0.16.1", "0.19.2"])
@pytest.mark.parametrize("number", [50, pytest.param(500, marks=pytest.mark.full)])
def test_a_drawn_plan_is_read_back_as_itself(version: str, number: int) -> None:
    for plan in drawn(number, version, seed=number):
        try:
            assert lost(plan, script.read(megatron_args_sh(plan)).reading) == []
        except InputError as error:
            raise AssertionError(megatron_args_sh(plan)) from error


FIRST_WORD = ("num_layers",)
"""An encoder-decoder's own field counts the decoder's layers, its flag the encoder's."""


@pytest.mark.parametrize("version", ["0.16.1", "0.19.2"])
@pytest.mark.parametrize("number", [50, pytest.param(500, marks=pytest.mark.full)])
def test_what_a_drawn_plan_says_may_be_said_again_and_nothing_else(version: str, number: int) -> None:
    """In engine.json and in the flags: a plan never contradicts itself."""
    for plan in drawn(number, version, seed=number):
        fields = engine_fields(plan, SECTIONS)
        for said in (settings(plan), *(fields[section] for section in SECTIONS), *fields["per_stage"][: plan.pp == 1]):
            for name, value in said.items():
                decided = decided_by("megatron", name, plan)
                if decided is not None and name not in (*FIRST_WORD, *(NO_RECOMPUTE if plan.pp > 1 else ())):
                    _agree(name, value, decided)
                    with pytest.raises(InputError, match="contradicts the plan's "):
                        _agree(name, "another", decided)


@pytest.mark.parametrize("version", ["0.16.1", "0.19.2"])
@pytest.mark.parametrize("number", [50, pytest.param(500, marks=pytest.mark.full)])
def test_a_drawn_plan_is_read_back_from_its_engine_json(version: str, number: int) -> None:
    for plan in drawn(number, version, seed=number):
        setup = formats.read(json.dumps(engine_fields(plan, SECTIONS), indent=1), "engine.json").reading.setup
        names = [name for name in Setup.__struct_fields__ if name in Plan.__struct_fields__ and name not in (*BY_EFFECT, *NOT_THERE)]
        means = [name for name in names if plan.model.experts or not name.startswith(("moe", "overlap_moe", "delay", "etp"))]
        assert {name: getattr(setup, name) for name in means} == {name: getattr(plan, name) for name in means}
        assert permutes_fused(setup, plan) == permutes_fused(plan, plan)
        assert graphed_modules(setup, plan.model) == graphed_modules(plan, plan.model)
        assert (setup.zero_shard_size or -1) == -plan.optimizer_instances


def yaml_of(plan: Plan, tool: Tool) -> str:
    """The plan, with its model, as a file of this tool."""
    content: dict[str, Any] = {"trainer": {}} if tool is NEMO else {}
    for name, value in (settings(plan) | {"vocab_size": plan.model.vocab_size}).items():
        for term in tool.terms(name) or [Term(f"{tool.sections[0]}.{name}", name)]:
            if value is not None and not (tool is NEMO and name in PAIRED):
                theirs = term.to(value)
                put(content, *((f"{tool.sections[0]}.{name}", value) if theirs is NOTHING else (term.theirs, theirs)))
    return str(yaml.safe_dump(content))


PAIRED = ("optimizer", "adam_beta1", "adam_beta2")
"""What NeMo has in one setting with another of them, and with the sharding of the optimizer's states."""


@pytest.mark.parametrize("tool", [BRIDGE, NEMO, NEMO2, MEGATRON_LM])
@pytest.mark.parametrize("number", [50, pytest.param(250, marks=pytest.mark.full)])
def test_a_drawn_plan_is_read_back_from_yaml(tool: Tool, number: int) -> None:
    for plan in drawn(number, "0.19.2", seed=number):
        if plan.model.stack == "decoder":  # of the others the program's name says which it is
            text = yaml_of(plan, tool)
            reading = formats.read(text, "plan.yaml").reading
            assert reading.format == tool.kind
            found = [what for what in lost(plan, reading) if not (tool is NEMO and what in NEMO_HAS_NOT)]
            assert found == [], text


NEMO_HAS_NOT = ("training.optimizer", "training.betas")
NOT_THERE = ("micro_batch_size", "rank_order", "zero_shard_size")
"""What only plan.json beside it says, and what both say as numbers of another kind."""
