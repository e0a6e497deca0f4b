"""The job of DeepSpeed's own pipeline says each layer's stage and recompute, and nothing else may."""

from __future__ import annotations

import json

import pytest
from covering_plans import DEEPSPEED
from hand_plans import GPT, make_plan
from msgspec.structs import replace

from orchestrator.engines import ENGINES
from orchestrator.errors import InputError
from orchestrator.plan import LayerSpan, Plan, Stage

OURS = "deepspeed_1f1b"


def engine_json(plan: Plan) -> dict[str, object]:
    files = {file.path: file.content for file in ENGINES[plan.engine].translate(plan).files}
    found: dict[str, object] = json.loads(files["engine.json"])
    return found


def test_every_layer_has_its_stage_and_what_of_it_is_recomputed() -> None:
    plan = replace(make_plan("megatron_deepspeed", GPT, pp=2), schedule=OURS)
    kind, count = plan.stages[0].layers[1].kind, GPT.num_layers
    modes = ["full", "none", "selective"]
    first = (plan.stages[0].layers[0], *(LayerSpan(kind=kind, first=n, count=1, recompute=mode) for n, mode in enumerate(modes)))
    rest = (LayerSpan(kind=kind, first=3, count=count - 3, recompute="full"), plan.stages[-1].layers[-1])
    found = engine_json(replace(plan, stages=(Stage(layers=first), Stage(layers=rest))))
    assert found["pipeline"] == {
        "bounds": [0, 4, count + 2],
        "recompute": [["full"], [], ["core_attn"], *([["full"]] * (count - 3))],
        "tied": True,
        "seq_length": plan.training.seq_length,
    }
    assert all(value is None for stage in found["per_stage"] for value in stage.values())  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", [name for name, plan in DEEPSPEED.items() if plan.schedule != OURS])
def test_plans_without_it_say_nothing_of_it(name: str) -> None:
    found = engine_json(DEEPSPEED[name])
    assert "pipeline" not in found
    assert "pipeline" not in found["ds_config"]  # type: ignore[operator]


@pytest.mark.parametrize(
    ("path", "value", "what"),
    [("activation_checkpoint_interval", 1, "stages.recompute"), ("stages", 4, "pp"), ("partition", "best", "stages")],
)
def test_deepspeeds_own_choice_of_stages_and_checkpoints_contradicts_the_plan(path: str, value: object, what: str) -> None:
    plan = replace(make_plan("megatron_deepspeed", GPT, pp=2), schedule=OURS, extra={"ds": {f"pipeline.{path}": value}})
    with pytest.raises(InputError, match=f"ds.pipeline.{path}=.*contradicts the plan's {what}"):
        engine_json(plan)
