"""Numbers that are the engines' own, against the files of the installed engines. They are read, not imported, which is quick."""

from __future__ import annotations

import ast
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from orchestrator.cost.workload import DDP_BUCKET
from orchestrator.engines import ds_config, hf_config, megatron_args, transformer_config
from orchestrator.engines.rules import model as model_rules
from orchestrator.model.architecture import Architecture
from orchestrator.model.parts import ends
from orchestrator.model.parts.experts import Experts
from orchestrator.model.parts.mamba2 import Mamba2
from orchestrator.model.training import Training

INSTALLED = all(find_spec(name) is not None for name in ("megatron", "deepspeed", "transformers"))
pytestmark = pytest.mark.skipif(not INSTALLED, reason="the engines are not installed")


@cache
def text(package: str, path: str) -> str:
    found = find_spec(package)
    assert found is not None
    assert found.submodule_search_locations is not None
    return (Path(next(iter(found.submodule_search_locations))) / path).read_text()


def literal(node: ast.expr | None) -> Any:
    """The value of a plain default, also inside of field(default=...) or pydantic's Field(pp_int(...)); None for what is none."""
    if isinstance(node, ast.Call):
        named = [keyword.value for keyword in node.keywords if keyword.arg == "default"]
        inner = [*node.args, *named]
        return literal(inner[0]) if inner else None
    try:
        return None if node is None else ast.literal_eval(node)
    except ValueError:
        return None


@cache
def defaults(package: str, path: str, name: str) -> dict[str, Any]:
    """Of a class's fields, or of its __init__'s arguments."""
    tree = ast.parse(text(package, path))
    (found,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    fields = {
        row.target.id: literal(row.value) for row in found.body if isinstance(row, ast.AnnAssign) and isinstance(row.target, ast.Name)
    }
    for row in found.body:
        if isinstance(row, ast.FunctionDef) and row.name == "__init__":
            with_default = row.args.args[-len(row.args.defaults) :] if row.args.defaults else []
            fields |= {arg.arg: literal(value) for arg, value in zip(with_default, row.args.defaults, strict=True)}
    return fields


def of_fields(struct: Any) -> dict[str, Any]:
    return dict(zip(struct.__struct_fields__[-len(struct.__struct_defaults__) :], struct.__struct_defaults__, strict=True))


TRANSFORMER = ("megatron", "core/transformer/transformer_config.py", "TransformerConfig")


def test_deepspeeds_loss_scaling_is_its_own_written_out() -> None:
    own = defaults("deepspeed", "runtime/precision_config.py", "DeepSpeedFP16Config")
    said = {path.removeprefix("fp16."): value for path, value in ds_config.LOSS_SCALE.items()}
    assert said == {name: own[name] for name in said}
    assert len(said) == 5


def test_deepspeeds_buckets_are_its_own_for_prefetching() -> None:
    own = defaults("deepspeed", "runtime/zero/config.py", "DeepSpeedZeroConfig")
    assert own["prefetch_bucket_size"] == ds_config.PREFETCH_ELEMENTS == ds_config.BUCKET_ELEMENTS
    assert f'"sub_group_size": {int(own["sub_group_size"]):_}' in Path(ds_config.__file__).read_text()


def test_what_stays_gathered_is_the_trainers_choice() -> None:
    (times,) = re.findall(r"(\d+) \* hidden_size,", text("transformers", "integrations/deepspeed.py"))
    assert int(times) == ds_config.PERSISTENCE_PER_HIDDEN


def test_megatrons_buckets_grow_with_the_group() -> None:
    found = re.findall(r"max\((\d+), (\d+) \* dp_group.size\(\)\)", text("megatron", "core/distributed/distributed_data_parallel.py"))
    ours = transformer_config.DDP_MIN_BUCKET_ELEMENTS, transformer_config.DDP_BUCKET_ELEMENTS_PER_RANK
    assert [tuple(map(int, pair)) for pair in found] == [ours]
    assert ours[0] == DDP_BUCKET


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("norm_epsilon", "layernorm_epsilon"),
        ("zero_centered_norm", "layernorm_zero_centered_gamma"),
        ("add_bias_linear", "add_bias_linear"),
        ("add_qkv_bias", "add_qkv_bias"),
        ("num_query_groups", "num_query_groups"),
        ("kv_channels", "kv_channels"),
        ("normalization", "normalization"),
    ],
)
def test_an_architecture_that_says_nothing_is_megatrons(ours: str, theirs: str) -> None:
    assert of_fields(Architecture)[ours] == defaults(*TRANSFORMER)[theirs]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("score", "moe_router_score_function"),
        ("bias_update_rate", "moe_router_bias_update_rate"),
        ("aux_loss_coeff", "moe_aux_loss_coeff"),
        ("expert_bias", "moe_router_enable_expert_bias"),
        ("capacity_factor", "moe_expert_capacity_factor"),
        ("pad_to_capacity", "moe_pad_expert_input_to_capacity"),
        ("shared_gate", "moe_shared_expert_gate"),
        ("groups", "moe_router_num_groups"),
        ("group_topk", "moe_router_group_topk"),
        ("scores_on_input", "moe_apply_probs_on_input"),
    ],
)
def test_experts_that_say_nothing_are_megatrons(ours: str, theirs: str) -> None:
    assert of_fields(Experts)[ours] == defaults(*TRANSFORMER)[theirs]


def test_experts_without_more_are_routed_by_plain_scores() -> None:
    said = of_fields(Experts)
    assert said["scaling"] == 1, "none is what Megatron's default says"
    assert defaults(*TRANSFORMER)["moe_router_topk_scaling_factor"] is None
    assert said["shared_ffn_hidden_size"] == 0
    assert defaults(*TRANSFORMER)["moe_shared_expert_intermediate_size"] is None


def test_a_state_space_that_says_nothing_is_the_papers() -> None:
    """Convolution and chunk as transformers' Mamba2Config, heads in one group as in mamba-ssm."""
    own = defaults("transformers", "models/mamba2/configuration_mamba2.py", "Mamba2Config")
    said = of_fields(Mamba2)
    assert (said["conv_kernel"], said["chunk_size"], said["conv_bias"]) == (own["conv_kernel"], own["chunk_size"], own["use_conv_bias"])
    assert said["conv_kernel"] == defaults("megatron", "core/ssm/mamba_mixer.py", "MambaMixer")["d_conv"]
    assert said["num_groups"] == 1


def test_training_that_says_nothing_has_megatrons_optimizer_but_for_the_second_beta() -> None:
    own, said = defaults("megatron", "core/optimizer/optimizer_config.py", "OptimizerConfig"), of_fields(Training)
    assert said["betas"][0] == own["adam_beta1"]
    assert 0.9 < said["betas"][1] < own["adam_beta2"], "0.95, as large language models are trained since GPT-3"
    assert said["eps"] == own["adam_eps"]
    assert said["clip"] == own["clip_grad"]


def test_rotary_positions_are_megatrons() -> None:
    own = defaults("megatron", "core/models/common/embeddings/rotary_pos_embedding.py", "RotaryEmbedding")
    assert of_fields(Architecture)["rotary_base"] == own["rotary_base"] == model_rules.ROTARY_BASE
    assert of_fields(Architecture)["rotary_percent"] == 1
    gpt = defaults("megatron", "core/models/gpt/gpt_model.py", "GPTModel")
    assert gpt["rope_scaling_factor"] == megatron_args.ROPE_SCALING_FACTOR
    assert gpt["rotary_percent"] == 1


def test_relative_positions_are_t5s() -> None:
    own = defaults("megatron", "core/models/T5/t5_model.py", "T5Model")
    theirs = defaults("transformers", "models/t5/configuration_t5.py", "T5Config")
    for each in (own, theirs):
        assert each["relative_attention_num_buckets"] == ends.RELATIVE_BUCKETS
        assert each["relative_attention_max_distance"] == ends.RELATIVE_MAX_DISTANCE


def test_deepseeks_latent_norms_and_groups_are_its_modules_own() -> None:
    own = defaults("transformers", "models/deepseek_v3/modeling_deepseek_v3.py", "DeepseekV3RMSNorm")
    assert own["eps"] == hf_config.LATENT_EPSILON
    best = re.findall(r"\.topk\((\d+), dim=-1\)\[0\]", text("transformers", "models/deepseek_v3/modeling_deepseek_v3.py"))
    assert best == [str(hf_config.GROUP_SCORES)]
