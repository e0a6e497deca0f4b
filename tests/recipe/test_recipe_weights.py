"""model.init_from and model.export_to: what is taken, and what is refused before anything is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from orchestrator import recipe
from orchestrator.detect import Machine
from orchestrator.engines import ENGINES
from orchestrator.engines.hf_config import config_keywords, export_fields
from orchestrator.errors import InputError
from orchestrator.model.families import from_hf_config
from orchestrator.model.spec import Architecture
from orchestrator.recipe import Settings

GPT2 = {"model_type": "gpt2", "n_layer": 4, "n_embd": 128, "n_head": 4, "n_positions": 128, "vocab_size": 260}
BERT = {
    "model_type": "bert",
    "num_hidden_layers": 4,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "intermediate_size": 512,
    "max_position_embeddings": 128,
    "vocab_size": 260,
    "layer_norm_eps": 1e-5,
}
WITHOUT_RECIPE = ("cluster=cpu", "gpus=2", "train.global_batch_size=8", "train.seq_length=64", "train.precision=fp32")


def checkpoint(folder: Path, **changes: Any) -> Path:
    """A config.json, and a file where weights would be: the planner reads none."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(GPT2 | changes))
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def load(*words: str) -> Settings:
    return recipe.load(words, Machine(), list(ENGINES))


def test_a_checkpoint_of_the_recipes_model_is_taken_and_written_out_again(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "gpt")
    settings = load("recipe=gpt_tiny", f"model.init_from={folder}", f"model.export_to={tmp_path / 'new' / 'deep'}")
    assert settings.run.init_from == str(folder)
    assert settings.run.export_to == str(tmp_path / "new" / "deep")
    assert not (tmp_path / "new").exists()
    again = tmp_path / "again.yaml"
    again.write_text(recipe.resolved_yaml(settings))
    assert load(f"recipe={again}").run == settings.run


def test_without_a_recipe_the_checkpoint_is_the_model(tmp_path: Path) -> None:
    settings = load(f"model.init_from={checkpoint(tmp_path / 'mine')}", *WITHOUT_RECIPE)
    assert (settings.recipe, settings.architecture.num_layers, settings.architecture.hidden_size) == ("mine", 4, 128)


def test_dropout_may_differ(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "gpt", resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.0)
    assert load("recipe=gpt_tiny", f"model.init_from={folder}").architecture.hidden_dropout == 0.0


@pytest.mark.parametrize(
    ("field", "theirs", "key", "here"),
    [
        ("n_layer", 5, "model.num_layers", 4),
        ("n_embd", 64, "model.hidden_size", 128),
        ("n_head", 8, "model.num_attention_heads", 4),
        ("vocab_size", 300, "model.vocab_size", 260),
        ("n_positions", 64, "model.max_position_embeddings", 128),
        ("n_inner", 100, "model.ffn_hidden_size", 512),
        ("activation_function", "relu", "model.activation", "gelu"),
        ("layer_norm_epsilon", 1e-6, "model.norm_epsilon", 1e-5),
        ("tie_word_embeddings", False, "model.tie_embeddings", True),
    ],
)
def test_another_model_is_refused_with_field_and_both_values(field: str, theirs: Any, key: str, here: Any, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "gpt", **{field: theirs})
    with pytest.raises(InputError) as raised:
        load("recipe=gpt_tiny", f"model.init_from={folder}")
    assert (raised.value.key, raised.value.value) == (key, here)
    assert f"model.init_from={folder} has" in str(raised.value)


def test_another_family_is_refused(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "bert")
    (folder / "config.json").write_text(json.dumps(BERT))
    with pytest.raises(InputError, match=r"model\.family=gpt: the checkpoint .* has bert"):
        load("recipe=gpt_tiny", f"model.init_from={folder}")


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    cases: dict[str, str] = {}
    cases["nowhere"] = "no such folder"
    (tmp_path / "file").write_text("x")
    cases["file"] = "a folder is needed"
    (tmp_path / "empty").mkdir()
    cases["empty"] = "config.json can't be read"
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    cases["broken"] = "is not JSON"
    (tmp_path / "list").mkdir()
    (tmp_path / "list" / "config.json").write_text("[]")
    cases["list"] = "is not a JSON object"
    checkpoint(tmp_path / "unknown", model_type="mamba")
    cases["unknown"] = "model_type"
    (checkpoint(tmp_path / "no_weights") / "model.safetensors").unlink()
    cases["no_weights"] = "holds no weights"
    for name, why in cases.items():
        with pytest.raises(InputError, match=why) as raised:
            load("recipe=gpt_tiny", f"model.init_from={tmp_path / name}")
        assert raised.value.key == "model.init_from", name
    for name in ("nowhere", "file", "empty", "broken", "list"):  # without a recipe its config.json is the model
        with pytest.raises(InputError, match=cases[name]) as raised:
            load(f"model.init_from={tmp_path / name}")
        assert raised.value.key == "model.init_from", name


def test_an_export_goes_into_a_new_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("x")
    for name, why in {"file": "is a file", "full": "files in it", "file/below": "can't be made"}.items():
        with pytest.raises(InputError, match=why) as raised:
            load("recipe=gpt_tiny", f"model.export_to={tmp_path / name}")
        assert raised.value.key == "model.export_to"


def test_engines_say_why_they_exchange_no_weights() -> None:
    gpt, bert = from_hf_config(GPT2, "gpt"), from_hf_config(BERT, "bert")
    assert ENGINES["megatron"].why_no_exchange(gpt, None) is None
    assert "post-norm" in str(ENGINES["megatron"].why_no_exchange(bert, "bert"))
    assert ENGINES["megatron"].why_no_exchange(bert, "megatron-bert") is None
    assert export_fields(bert)["model_class"] == "MegatronBertForMaskedLM"
    t5 = load("recipe=t5_tiny").architecture
    assert "tied" in str(ENGINES["deepspeed"].why_no_exchange(replace(t5, tie_embeddings=False), None))
    assert "another function" in str(ENGINES["megatron"].why_no_exchange(t5, None))
    experts = load("recipe=mixtral_tiny").architecture
    assert ENGINES["deepspeed"].why_no_exchange(experts, None) is None


def changed(model: Architecture, **experts: Any) -> Architecture:
    return replace(model, feed_forward=replace(model.feed_forward, **experts))


def test_experts_are_exchanged_as_the_class_of_transformers_that_computes_them() -> None:
    mixtral, qwen = load("recipe=mixtral_tiny").architecture, load("recipe=qwen3_moe_tiny").architecture
    assert export_fields(mixtral)["model_class"] == "MixtralForCausalLM"
    assert export_fields(qwen)["model_class"] == "Qwen3MoeForCausalLM"
    why = ENGINES["megatron"].why_no_exchange
    assert why(mixtral, "mixtral") is None
    assert why(qwen, "qwen3_moe") is None
    assert "MixtralForCausalLM makes scores sum to one" in str(why(changed(mixtral, normalized=False), None))
    assert "does not scale scores" in str(why(changed(qwen, scaling=2.5), None))
    assert "no shared_experts" in str(why(changed(qwen, shared_ffn_hidden_size=96), None))
    grouped = changed(qwen, score="sigmoid", expert_bias=True, shared_ffn_hidden_size=96, groups=4, group_topk=2, topk=6)
    assert "values a group by its 2 best experts" in str(why(grouped, None))
    assert why(changed(grouped, topk=4), None) is None


def test_how_experts_are_balanced_may_differ_from_the_checkpoint(tmp_path: Path) -> None:
    mixtral = load("recipe=mixtral_tiny").architecture
    config = {"model_type": "mixtral"} | config_keywords(mixtral)
    folder = checkpoint(tmp_path / "weights", **config | {"router_aux_loss_coef": 0.5})
    words = ("recipe=mixtral_tiny", f"model.init_from={folder}")
    assert load(*words).run.init_from == str(folder)
    checkpoint(folder, **config | {"num_experts_per_tok": 1})
    with pytest.raises(InputError, match="the checkpoint"):
        load(*words)


def test_a_checkpoint_with_a_prediction_head_is_tuned_without_it(tmp_path: Path) -> None:
    """transformers saves num_nextn_predict_layers=1 of any DeepSeek-V3, and its class has no head (modeling_deepseek_v3.py:552)."""
    tiny = replace(load("recipe=deepseek_tiny").architecture, mtp_num_layers=0)
    config = {"model_type": "deepseek_v3"} | config_keywords(tiny)
    folder = checkpoint(tmp_path / "one", **config | {"num_nextn_predict_layers": 1})
    words = (f"model.init_from={folder}", *WITHOUT_RECIPE)
    assert load(*words).architecture.mtp_num_layers == 1
    way = "model.mtp_num_layers=0 plans the model without its prediction heads"
    assert way in str(ENGINES["megatron"].why_no_exchange(load(*words).architecture, "deepseek_v3"))
    assert load(*words, "model.mtp_num_layers=0").architecture.mtp_num_layers == 0
    checkpoint(folder, **config)
    with pytest.raises(InputError, match=r"model.mtp_num_layers=1: the checkpoint"):
        load(*words, "model.mtp_num_layers=1")
