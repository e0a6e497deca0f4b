"""What engine.json and Megatron-LM's flags say of fused activations is one thing."""

from __future__ import annotations

import pytest
from hand_plans import GPT, LLAMA, engine_fields, make_plan
from msgspec.structs import replace

from orchestrator.engines import megatron_args
from orchestrator.engines import passthrough as through
from orchestrator.errors import InputError
from orchestrator.model.architecture import Architecture
from orchestrator.model.parts.experts import Experts

EXPERTS = Experts(num_experts=8, topk=2, ffn_hidden_size=64)
GPT_OSS = replace(LLAMA, family="gpt_oss", activation="clamped_swiglu", add_bias_linear=True, feed_forward=EXPERTS)


@pytest.mark.parametrize(
    ("model", "fuses", "refused"),
    [
        (GPT_OSS, True, False),
        (replace(GPT_OSS, feed_forward=replace(EXPERTS, shared_ffn_hidden_size=64)), False, True),
        (replace(GPT_OSS, feed_forward=LLAMA.feed_forward), False, True),
        (replace(GPT_OSS, add_bias_linear=False), False, False),
        (replace(GPT, activation="relu2"), False, True),
        (replace(GPT, activation="relu2", add_bias_linear=False), False, False),
        (LLAMA, True, False),
    ],
)
def test_a_fused_activation_is_the_same_in_engine_json_and_in_the_flags(model: Architecture, fuses: bool, refused: bool) -> None:
    """Megatron-LM fuses where it may, gelu's flag being that of every activation but SwiGLU, and none but SwiGLU's without a bias."""
    plan = make_plan(model=model)
    assert engine_fields(plan)["transformer_config"]["bias_activation_fusion"] is fuses
    assert (("--no-bias-gelu-fusion",) in megatron_args.megatron_flags(plan)) is refused


def test_a_switch_of_the_activation_is_taken_beside_a_plan_that_has_it() -> None:
    for name, model in (("squared_relu", replace(GPT, activation="relu2")), ("swiglu", LLAMA), ("quick_geglu", GPT_OSS)):
        extra = {"megatron": {name: True}}
        through.check(replace(make_plan(model=model), extra=extra), {"megatron": through.SECTIONS})
        other = replace(make_plan(model=GPT), extra=extra)
        with pytest.raises(InputError, match=f"megatron.{name}=true: contradicts the plan's model.activation"):
            through.check(other, {"megatron": through.SECTIONS})
