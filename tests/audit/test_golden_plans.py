"""Every plan of the golden files comes back as itself from its own files."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from orchestrator.audit import formats
from orchestrator.audit.build import built, setup_of
from orchestrator.audit.reading import Setup
from orchestrator.detect import Machine
from orchestrator.engines import ENGINES
from orchestrator.model.families import describe
from orchestrator.plan import Plan
from orchestrator.recipe import load_tree

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))
from covering_plans import ALL

DS_CONFIG, ENGINE = "ds_config.json", "engine.json"
TINY = load_tree({"recipe": "gpt_tiny", "gpus": "2", "cluster": "cpu"}, Machine(), list(ENGINES))


def layers_of(plan: Plan) -> list[list[tuple[object, ...]]]:
    """Of each stage, one by one, however the plan puts them together."""
    return [[(span.kind, span.first + index, span.recompute, span.chunk) for span in stage.layers for index in range(span.count)]
            for stage in plan.stages]  # fmt: skip


def without_recompute(plan: Plan) -> Plan:
    stages = tuple(replace(stage, layers=tuple(replace(span, recompute="none") for span in stage.layers)) for stage in plan.stages)
    return replace(plan, stages=stages)


def files_of(plan: Plan) -> dict[str, str]:
    """Those that say the plan, with their text."""
    program = ENGINES[plan.engine].program
    named = [DS_CONFIG if not plan_has_layers(plan) else ENGINE]
    if program is not None and program.why_not(plan) is None:
        named.append(program.arguments)
    return {file.path: file.content for file in ENGINES[plan.engine].translate(plan).files if file.path in named}


def plan_has_layers(plan: Plan) -> bool:
    """Whether its workers build Megatron's layers."""
    return any(file.path == ENGINE and '"transformer_config": {' in file.content for file in ENGINES[plan.engine].translate(plan).files)


def check_builds(plan: Plan, setup: Setup) -> None:
    """The plan of this setup is the plan."""
    settings = replace(TINY, architecture=plan.model, training=plan.training, cluster=plan.cluster, run=plan.run, extra=plan.extra)
    found = built(setup, settings, describe(plan.model, plan.training.seq_length, plan.training.decoder_seq_length))
    differing = {field for field in Plan.__struct_fields__ if getattr(found, field) != getattr(plan, field)}
    assert differing <= {"stages", *NOT_SAID}
    assert layers_of(found) == layers_of(plan)


@pytest.mark.parametrize("name", ALL)
def test_a_golden_plan_comes_back_as_itself(name: str) -> None:
    plan = ALL[name]
    files = files_of(plan)
    assert files
    for path, content in files.items():
        reading = formats.read(content, path).reading
        assert reading.unknown == ()
        setup = reading.setup
        if path == DS_CONFIG:  # does not say whether the model recomputes
            setup = replace(setup, recompute=plan.strategy.recompute)
        elif plan.pp > 1 and '"ds_config": {' in content:  # does not say who runs the stages, nor what they recompute: plan.json does
            setup = replace(setup, by_deepspeed_pipeline=plan.schedule == "deepspeed_1f1b")
            plan = without_recompute(plan)
        elif path == ENGINE:  # nor, where Megatron trains, what a micro-batch is
            setup = replace(setup, micro_batch_size=plan.micro_batch_size)
        check_builds(plan, setup)
        for key, value in reading.keys.items():
            group, _, field = key.partition(".")
            if group == "train" and hasattr(plan.training, field) and not (field in OF_ADAM and plan.training.optimizer == "sgd"):
                expected = getattr(plan.training, field)
                assert (tuple(value) if isinstance(value, list) else value) == expected, field


@pytest.mark.parametrize("name", ALL)
def test_a_plans_choices_make_the_plan_again(name: str) -> None:
    """What a search finds is told as changes of a file by them."""
    check_builds(ALL[name], setup_of(ALL[name], bool(ALL[name].model.experts)))


NOT_SAID = ("predicted", "rejected", "run", "calibration", "prices", "extra")
"""Fields that are no choice."""
OF_ADAM = ("betas", "eps")
