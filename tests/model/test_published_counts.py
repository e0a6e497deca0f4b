"""Parameter counts of published models equal their checkpoints', and transformers' own modules', to the last parameter."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from published_counts import PUBLISHED

from orchestrator.model.families import describe, from_hf_config


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_checkpoints(name: str) -> None:
    config, published = PUBLISHED[name]
    if published is not None:
        assert describe(from_hf_config(config, name), 1024).parameters == published


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Mixtral-8x7B", 12.9),
        ("Qwen3-30B-A3B", 3.3),
        ("Qwen3-235B-A22B", 22.0),
        ("DeepSeek-V3", 37.0),
        ("Kimi-K2", 32.0),
        ("Qwen3-8B", 8.19),
    ],
)
def test_a_token_goes_through_the_parameters_that_model_cards_say(name: str, billions: float) -> None:
    """Which count the embedding or leave it out."""
    spec = describe(from_hf_config(PUBLISHED[name][0], name), 1024)
    assert spec.active_parameters == pytest.approx(billions * 1e9, rel=0.03)
    assert (spec.active_parameters == spec.parameters) == (name == "Qwen3-8B")


@pytest.mark.engines
@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_of_transformers(name: str) -> None:
    """As it builds the model on the meta device; what it writes of its config is read like the published one."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config, _ = PUBLISHED[name]
    theirs = AutoConfig.for_model(**config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(theirs)
    total = sum(parameter.numel() for parameter in model.parameters())
    assert describe(from_hf_config(config, name), 1024).parameters == total
    written = from_hf_config(theirs.to_dict(), name)  # transformers builds no heads of multi-token prediction, whatever its config says
    assert describe(replace(written, mtp_num_layers=0), 1024).parameters == total


def test_a_prediction_head_is_one_more_layer_two_norms_and_a_projection() -> None:
    """DeepSeek-V3: 11.6 billion (arXiv 2412.19437, section 2.2: embedding and output matrix are the main model's)."""
    config, published = PUBLISHED["DeepSeek-V3"]
    a = from_hf_config(config | {"num_nextn_predict_layers": 1}, "x")
    spec = describe(a, 1024)
    layer = spec.kind("latent_experts_decoder").parameters
    assert spec.parameters - (published or 0) == layer + 3 * 7168 + 2 * 7168 * 7168
