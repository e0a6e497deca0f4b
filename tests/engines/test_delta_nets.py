"""Gated delta nets and gated attention: what Megatron's fields and flags say of them, who trains them, and who says that it does not."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from hand_plans import LLAMA, make_plan, workload_of
from msgspec.structs import replace

from orchestrator.engines import ENGINES
from orchestrator.engines.megatron_args import why_never
from orchestrator.engines.megatron_parts import by_program, config_fields
from orchestrator.engines.megatron_versions import release_of
from orchestrator.engines.passthrough import flags_of
from orchestrator.hardware.spec import Software
from orchestrator.model.architecture import Architecture, Run
from orchestrator.model.families import from_hf_config
from orchestrator.model.parts.attention import GroupedQueryAttention
from orchestrator.model.parts.gated_delta_net import GatedDeltaNet
from orchestrator.plan import Plan
from orchestrator.strategy.legality import broken_rule, plan_only, unsuited

FLAGS = {"0.16.1": "megatron_flags.csv", "0.19.2": "megatron_flags_0.19.csv"}
NET = GatedDeltaNet(num_key_heads=4, num_value_heads=8, key_head_dim=16, value_head_dim=32, conv_kernel=3)
GATED = GroupedQueryAttention(qk_norm="head", output_gate=True)


def model(*runs: int) -> Architecture:
    """Layers with a gated delta net and layers with attention, by turns."""
    pattern = tuple(Run(layers=layers, mixer=GATED if index % 2 else NET) for index, layers in enumerate(runs))
    return replace(LLAMA, pattern=pattern, rotary_percent=0.25, zero_centered_norm=True)


def plan_for(version: str, a: Architecture, **choices: Any) -> Plan:
    return make_plan("megatron", a, software=Software(megatron_core=version), **{"tp": 2, "sequence_parallel": True, **choices})


def test_every_fourth_layer_with_attention_is_a_number_other_orders_a_list() -> None:
    assert config_fields(model(3, 1)) == {
        "qk_layernorm": True, "experimental_attention_variant": "gated_delta_net", "linear_attention_freq": 4, "linear_conv_kernel_dim": 3,
        "linear_key_head_dim": 16, "linear_value_head_dim": 32, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
        "attention_output_gate": True, "layernorm_zero_centered_gamma": True,
    }  # fmt: skip
    assert config_fields(model(2, 1, 4, 1))["linear_attention_freq"] == [1, 1, 0, 1, 1, 1, 1, 0]
    assert config_fields(model(8))["linear_attention_freq"] == [1] * 8
    assert ("--linear-attention-freq", "([1]*2+[0]*1+[1]*4+[0]*1)") in flags_of(config_fields(model(2, 1, 4, 1)), "0.16.1")
    assert ("--apply-layernorm-1p",) in flags_of(config_fields(model(3, 1)), "0.16.1")


@pytest.mark.parametrize("version", FLAGS)
def test_megatrons_own_program_gets_flags_that_its_parser_has(version: str) -> None:
    with (Path(__file__).parent / FLAGS[version]).open(newline="") as stream:
        known = {row[0] for row in csv.reader(stream)}
    job = ENGINES["megatron"].translate(plan_for(version, model(3, 1)))
    (file,) = job.files
    lines = [line.split() for line in file.content.splitlines() if line.startswith("  --")]
    assert {line[0] for line in lines} <= known
    assert ["--experimental-attention-variant", "'gated_delta_net'"] in lines
    assert ["--linear-attention-freq", "'4'"] in lines
    assert ["--attention-output-gate"] in lines
    assert ["--linear-num-value-heads", "'8'"] in lines


@pytest.mark.parametrize("version", FLAGS)
def test_a_plan_says_in_one_line_that_our_worker_lacks_the_part_and_megatrons_program_has_it(version: str) -> None:
    job = ENGINES["megatron"].translate(plan_for(version, model(3, 1)))
    assert job.without_worker.startswith("plan only: ")
    assert "GatedDeltaNet needs flash-linear-attention, whose kernels run on GPUs alone" in job.without_worker
    assert "; Megatron's own program has: entry=PATH/pretrain_gpt.py; engine=deepspeed trains it described by" in job.without_worker
    assert "\n" not in job.without_worker


def test_without_transformer_engine_nothing_is_written() -> None:
    plan = plan_for("0.16.1", model(3, 1))
    bare = replace(plan.cluster.software, transformer_engine=False)
    job = ENGINES["megatron"].translate(replace(plan, cluster=replace(plan.cluster, software=bare)))
    assert job.files == ()
    assert any("needs Transformer Engine for a gated delta net" in note for note in job.notes)
    assert "needs Transformer Engine" in (why_never(plan.model, plan.training, bare) or "")
    assert why_never(plan.model, plan.training, plan.cluster.software) is None


def test_the_program_trains_what_the_worker_plans() -> None:
    ours, own = ENGINES["megatron"].capabilities(Software()), ENGINES["megatron"].program
    assert own is not None
    capped = replace(LLAMA, mixer=GroupedQueryAttention(softcap=50.0))
    nets, caps = (workload_of(make_plan("megatron", a)) for a in (model(3, 1), capped))
    assert plan_only(ours, model(3, 1))
    assert unsuited(ours, nets) is None
    assert unsuited(own.capabilities(Software()), nets) is None
    assert unsuited(own.capabilities(Software()), caps) is not None
    assert [by_program(a, "0.16.1") for a in (LLAMA, model(3, 1), capped)] == [True, True, False]


@pytest.mark.parametrize("engine", ["deepspeed", "megatron_deepspeed"])
def test_an_engine_without_the_part_says_so_in_one_line(engine: str) -> None:
    said = unsuited(ENGINES[engine].capabilities(Software()), workload_of(make_plan("megatron", model(3, 1)))) or ""
    assert said.startswith(f"{engine} has no gated_delta_net and no")
    assert said.endswith("python -m orchestrator.describe") is (engine == "deepspeed")
    assert "\n" not in said


@pytest.mark.parametrize("version", FLAGS)
def test_a_model_of_qwen3_nexts_shape_is_legal_and_its_arguments_are_written(version: str) -> None:
    config = {
        **{"model_type": "qwen3_next", "num_hidden_layers": 8, "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4},
        **{"head_dim": 8, "vocab_size": 500, "max_position_embeddings": 128, "num_experts": 8, "num_experts_per_tok": 2},
        **{"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
        **{"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "intermediate_size": 96},
    }
    plan = plan_for(version, from_hf_config(config, "x"), ep=2)
    capabilities = ENGINES["megatron"].capabilities(plan.cluster.software)
    assert broken_rule(capabilities, plan.candidate, workload_of(plan)) is None
    (file,) = ENGINES["megatron"].translate(plan).files
    for flag in ("--moe-shared-expert-gate", "--experimental-attention-variant", "--rotary-percent", "--num-experts"):
        assert f"  {flag}" in file.content


@pytest.mark.engines
def test_megatrons_own_configuration_takes_the_fields_and_reads_the_order_from_them() -> None:
    """Of the installed release, whose module itself needs flash-linear-attention."""
    import megatron.core
    from megatron.core.models.gpt.experimental_attention_variant_module_specs import get_linear_attention_pattern
    from megatron.core.transformer import TransformerConfig

    for a, order in ((model(3, 1), [1, 1, 1, 0] * 2), (model(2, 1, 4, 1), [1, 1, 0, 1, 1, 1, 1, 0])):
        sizes = {"num_layers": 8, "hidden_size": 64, "num_attention_heads": 8, "kv_channels": 8}
        config = TransformerConfig(**sizes, normalization="RMSNorm", **config_fields(a))
        assert get_linear_attention_pattern(config) == order
    with pytest.raises(AssertionError, match=r"linear_num_key_heads.* must be a multiple of .*tensor_model_parallel_size"):
        TransformerConfig(**sizes, **config_fields(model(3, 1)), tensor_model_parallel_size=8)
    if release_of(megatron.core.__version__).delta_net_divides_sequences:
        TransformerConfig(**sizes, **config_fields(model(3, 1)), context_parallel_size=2)
        with pytest.raises(AssertionError, match=r"linear_num_key_heads.* must be a multiple of .*context_parallel_size"):
            TransformerConfig(**sizes, **config_fields(model(3, 1)), context_parallel_size=8)
    else:
        with pytest.raises(AssertionError, match="does not support context parallel"):
            TransformerConfig(**sizes, **config_fields(model(3, 1)), context_parallel_size=2)
