"""Laws that every family keeps, and refusals by key, value and choices."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from orchestrator.errors import InputError
from orchestrator.model.families import FAMILIES, describe, from_hf_config
from orchestrator.model.families.gpt import GELU_NAMES, UNGATED
from orchestrator.model.parts.attention import GroupedQueryAttention
from orchestrator.model.spec import Architecture

BASE: dict[str, Any] = {
    "name": "x",
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "ffn_hidden_size": 256,
    "vocab_size": 260,
    "max_position_embeddings": 64,
}
GPT = Architecture(family="gpt", **BASE)
BERT = Architecture(family="bert", **BASE, num_token_types=2)
T5 = Architecture(family="t5", **BASE, decoder_num_layers=3)
LLAMA = Architecture(
    family="llama",
    **BASE,
    position_embedding="rope",
    normalization="RMSNorm",
    activation="swiglu",
    add_bias_linear=False,
    tie_embeddings=False,
)
KINDS = {
    "gpt": ["embedding", "decoder", "head"],
    "llama": ["embedding", "decoder", "head"],
    "bert": ["embedding", "encoder", "head"],
    "t5": ["embedding", "encoder", "decoder", "head"],
}


@st.composite
def architectures(draw: st.DrawFn) -> Architecture:
    base = draw(st.sampled_from((GPT, BERT, T5, LLAMA)))
    heads = draw(st.sampled_from((4, 8, 16)))
    return replace(
        base,
        num_layers=draw(st.integers(1, 200)),
        decoder_num_layers=draw(st.integers(1, 50)) if base.family == "t5" else 0,
        num_attention_heads=heads,
        num_query_groups=draw(st.sampled_from((None, 2, 4))) if base.family in ("gpt", "llama") else None,
        hidden_size=heads * draw(st.sampled_from((8, 16))),
        ffn_hidden_size=draw(st.integers(1, 20)) * 48,
        vocab_size=draw(st.integers(1, 100_000)),
        tie_embeddings=draw(st.booleans()),
        hidden_dropout=draw(st.sampled_from((0.0, 0.1))),
        attention_dropout=draw(st.sampled_from((0.0, 0.1))),
    )


def test_gpt2_has_every_activation_without_a_gate() -> None:
    """By transformers' own name (ACT2FN), which is ours; each GELU is one."""
    sizes = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": 64, "vocab_size": 260}
    read = {name: from_hf_config(sizes | {"activation_function": name}, "x").activation for name in (*UNGATED, *GELU_NAMES)}
    assert read == {name: name for name in UNGATED} | dict.fromkeys(GELU_NAMES, "gelu")
    assert {"relu", "relu2", "quick_gelu"} <= {*UNGATED}


@settings(max_examples=60, deadline=None)
@given(architectures(), st.integers(1, 64), st.sampled_from((1, 2, 4)))
def test_runs_add_up_and_ranks_hold_the_model_between_them(a: Architecture, seq_length: int, tp: int) -> None:
    spec = describe(a, seq_length, 16 if a.family == "t5" else None)
    assert [run.layer.kind for run in spec.runs] == KINDS[a.family]
    assert sum(run.count for run in spec.runs) == len(list(spec.layers())) == spec.num_layers == a.num_layers + a.decoder_num_layers + 2
    assert spec.parameters == sum(layer.parameters for layer in spec.layers())
    for run in spec.runs:
        layer = run.layer
        assert layer.recomputable == (layer.kind in ("encoder", "decoder"))
        assert len({weight.name for weight in layer.weights}) == len(layer.weights)
        assert tp * layer.local_parameters(tp, with_tied=False) >= layer.parameters
        for sequence_parallel in (False, True):
            ranks = tp * layer.saved_bytes(tp, sequence_parallel=sequence_parallel)
            assert ranks >= layer.saved_bytes()
    for before, after in zip(list(spec.layers())[:-1], list(spec.layers())[1:], strict=True):
        if (before.kind, after.kind) != ("encoder", "decoder"):
            assert before.output_elements == after.input_elements


@pytest.mark.parametrize("architecture", [GPT, BERT, LLAMA, T5], ids=lambda a: a.family)
def test_a_tied_head_is_counted_once(architecture: Architecture) -> None:
    lengths = (32, 16 if architecture.family == "t5" else None)
    tied = describe(replace(architecture, tie_embeddings=True), *lengths)
    untied = describe(replace(architecture, tie_embeddings=False), *lengths)
    t5_bias = 260 if architecture.family == "t5" else 0
    assert untied.parameters - tied.parameters == 260 * 64 - t5_bias
    head = tied.kind("head")
    assert head.local_parameters(2) - head.local_parameters(2, with_tied=False) == 192 * 64  # 260 padded to 384


def test_every_family_says_the_same_name_as_its_key() -> None:
    assert {name: family.name for name, family in FAMILIES.items()} == {name: name for name in FAMILIES}
    types = [model_type for family in FAMILIES.values() for model_type in family.hf_model_types]
    assert len(types) == len(set(types))


BAD: list[tuple[Architecture, dict[str, Any], str]] = [
    (GPT, {"family": "rnn"}, f"model.family=rnn: is not known; choose one of {', '.join(FAMILIES)}"),
    (GPT, {"num_layers": 0}, "model.num_layers=0: must be above 0"),
    (GPT, {"hidden_size": -64}, "model.hidden_size=-64: must be above 0"),
    (GPT, {"num_attention_heads": 5}, "model.num_attention_heads=5: does not divide hidden_size=64; give kv_channels"),
    (GPT, {"num_query_groups": 3}, "model.num_query_groups=3: does not divide num_attention_heads=4"),
    (GPT, {"hidden_dropout": 1.0}, "model.hidden_dropout=1.0: must be a probability below 1"),
    (GPT, {"decoder_num_layers": 2}, "model.decoder_num_layers=2: must be 0: the gpt family has one stack, num_layers"),
    (GPT, {"num_token_types": 2}, "model.num_token_types=2: is not in the gpt family; choose one of 0"),
    (
        GPT,
        {"position_embedding": "relative"},
        "model.position_embedding=relative: is not in the gpt family; choose one of learned_absolute, rope, none",
    ),
    (LLAMA, {"activation": "gelu"}, "model.activation=gelu: is not in the llama family; choose one of swiglu, geglu"),
    (BERT, {"activation": "swiglu"}, "model.activation=swiglu: is not in the bert family; choose one of gelu"),
    (T5, {"decoder_num_layers": 0}, "model.decoder_num_layers=0: must be above 0: the t5 family has a decoder"),
    (T5, {"num_query_groups": 2}, "model.num_query_groups=2: cross-attention takes num_attention_heads=4 groups only"),
    (T5, {"decoder_num_layers": -1}, "model.decoder_num_layers=-1: must not be negative"),
]


@pytest.mark.parametrize(("architecture", "change", "message"), BAD, ids=[next(iter(change)) for _, change, _ in BAD])
def test_an_architecture_that_is_none_is_refused(architecture: Architecture, change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        describe(replace(architecture, **change), 32, 16 if architecture.family == "t5" else None)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("architecture", "lengths", "message"),
    [
        (GPT, (65, None), "train.seq_length=65: is beyond the learned positions, max_position_embeddings=64"),
        (GPT, (0, None), "train.seq_length=0: must be above 0"),
        (GPT, (32, 16), "train.decoder_seq_length=16: the gpt family has no decoder; leave it out"),
        (T5, (32, None), "train.decoder_seq_length: is missing: the t5 family has a decoder"),
    ],
)
def test_a_length_that_the_model_can_not_take_is_refused(architecture: Architecture, lengths: Any, message: str) -> None:
    with pytest.raises(InputError) as error:
        describe(architecture, *lengths)
    assert str(error.value) == message


def test_rotary_positions_have_no_longest_sequence() -> None:
    assert describe(LLAMA, 65).seq_length == 65


LLAMA_CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}


def test_a_llama_config_becomes_the_recipes_architecture() -> None:
    a = from_hf_config(LLAMA_CONFIG, "llama")
    assert (a.family, a.num_layers, a.query_groups, a.rotary_base, a.rope_scaling_factor) == ("llama", 32, 8, 500000, 8.0)
    assert (a.activation, a.normalization, a.add_bias_linear, a.tie_embeddings) == ("swiglu", "RMSNorm", False, False)
    assert describe(a, 8192).parameters == 8_030_261_248
    long = from_hf_config(LLAMA_CONFIG | {"rope_theta": 2804339835.0}, "llama")  # gradientai's Llama-3-8B-Instruct-Gradient-1048k
    assert long.rotary_base == 2804339835


def test_transformers_5_writes_the_rope_elsewhere() -> None:
    fields = {key: value for key, value in LLAMA_CONFIG.items() if not key.startswith("rope_")}
    parameters = LLAMA_CONFIG["rope_scaling"] | {"rope_theta": 500000.0}
    assert from_hf_config(fields | {"rope_parameters": parameters}, "llama") == from_hf_config(LLAMA_CONFIG, "llama")


def test_t5_versions_differ_in_gate_and_tie() -> None:
    config = {"model_type": "t5", "num_layers": 24, "d_model": 1024, "d_kv": 64, "d_ff": 2816, "num_heads": 16, "vocab_size": 32128}
    first = from_hf_config(config, "t5")
    assert (first.activation, first.tie_embeddings, first.decoder_num_layers, first.head_dim) == ("relu", True, 24, 64)
    v11 = from_hf_config(config | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}, "t5")
    assert (v11.activation, v11.tie_embeddings) == ("geglu", False)
    # google/t5-v1_1-large, checkpoint with its own lm_head
    assert describe(v11, 512, 128).parameters == 783_150_080


def test_what_a_config_does_not_say_is_its_own_models_default() -> None:
    """transformers' MT5Config and MistralConfig."""
    t5 = {"num_layers": 8, "d_model": 512, "d_kv": 64, "d_ff": 1024, "num_heads": 6, "vocab_size": 250112}
    assert from_hf_config(t5 | {"model_type": "mt5"}, "mt5").activation == "geglu"
    assert from_hf_config(t5 | {"model_type": "t5"}, "t5").activation == "relu"
    mistral = {key: value for key, value in LLAMA_CONFIG.items() if key != "num_key_value_heads"} | {"sliding_window": None}
    assert from_hf_config(mistral | {"model_type": "mistral"}, "mistral").query_groups == 8
    said = {key: value for key, value in mistral.items() if key != "sliding_window"} | {"model_type": "mistral"}
    assert from_hf_config(said, "mistral").mixer == GroupedQueryAttention(window=4096)
    assert from_hf_config(mistral | {"model_type": "mistral"}, "mistral").mixer is None
    assert from_hf_config(mistral, "llama").query_groups == 32


TYPES = ", ".join(model_type for family in FAMILIES.values() for model_type in family.hf_model_types)
BAD_CONFIGS: list[tuple[Any, str]] = [
    (["model_type"], "model.hf_config=x: must be a JSON object, not list"),
    ({}, f"model.hf_config.model_type: is missing; it is one of {TYPES}"),
    (
        {"model_type": "mamba"},
        f"model.hf_config.model_type='mamba': can't be expressed; choose one of {TYPES}",
    ),
    ({"model_type": "gpt2"}, "model.hf_config.n_embd: is missing; it is an integer above 0"),
    (LLAMA_CONFIG | {"hidden_size": "4096"}, "model.hf_config.hidden_size='4096': must be an integer above 0"),
    (LLAMA_CONFIG | {"hidden_size": True}, "model.hf_config.hidden_size=True: must be an integer above 0"),
    (LLAMA_CONFIG | {"hidden_size": float("nan")}, "model.hf_config.hidden_size=nan: must be an integer above 0"),
    (LLAMA_CONFIG | {"hidden_size": float("inf")}, "model.hf_config.hidden_size=inf: must be an integer above 0"),
    (LLAMA_CONFIG | {"num_hidden_layers": 1.5}, "model.hf_config.num_hidden_layers=1.5: must be an integer above 0"),
    (LLAMA_CONFIG | {"vocab_size": None}, "model.hf_config.vocab_size=None: must be an integer above 0"),
    (LLAMA_CONFIG | {"rms_norm_eps": "tiny"}, "model.hf_config.rms_norm_eps='tiny': must be a number of at least 0"),
    (LLAMA_CONFIG | {"hidden_act": "gelu"}, "model.hf_config.hidden_act='gelu': can't be expressed; choose one of silu"),
    (LLAMA_CONFIG | {"tie_word_embeddings": 1}, "model.hf_config.tie_word_embeddings=1: must be a truth value; choose one of true, false"),
    (
        LLAMA_CONFIG | {"rope_scaling": {"rope_type": "dynamic"}},
        "model.hf_config.rope_scaling.rope_type='dynamic': can't be expressed; choose one of default, llama3, linear, yarn, longrope",
    ),
    (LLAMA_CONFIG | {"rms_norm_eps": float("inf")}, "model.hf_config.rms_norm_eps=inf: must be a number of at least 0"),
    (
        LLAMA_CONFIG | {"rope_scaling": LLAMA_CONFIG["rope_scaling"] | {"high_freq_factor": 2.0}},
        "model.hf_config.rope_scaling.high_freq_factor=2.0: megatron-core's llama3 scaling fixes it (engine=deepspeed takes the model's "
        "own code: python -m orchestrator.describe, then model.description=); only 4.0 can be expressed",
    ),
    (LLAMA_CONFIG | {"rope_scaling": 8}, "model.hf_config.rope_scaling=8: must be an object"),
    (
        LLAMA_CONFIG | {"attention_bias": True},
        "model.hf_config.attention_bias=True: megatron-core has a bias on all linears or none, and mlp_bias=False; choose one of False",
    ),
    (LLAMA_CONFIG | {"num_attention_heads": 30}, "model.hf_config=x: makes model.num_attention_heads=30: does not divide hidden_size=4096"),
]


@pytest.mark.parametrize(("config", "message"), BAD_CONFIGS, ids=range(len(BAD_CONFIGS)))
def test_a_config_that_can_not_be_expressed_is_refused_by_field(config: Any, message: str) -> None:
    with pytest.raises(InputError) as error:
        from_hf_config(config, "x")
    assert str(error.value).startswith(message)
    assert error.value.key.startswith("model.hf_config")


DEEPSEEK_CONFIG: dict[str, Any] = {
    **{"model_type": "deepseek_v3", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4},
    **{"vocab_size": 512, "max_position_embeddings": 163840, "q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 16},
    **{"qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}
DEEPSEEK_ROPE = {
    **{"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1},
    **{"mscale": 1.0, "mscale_all_dim": 1.0},
}


@pytest.mark.parametrize(
    ("kind", "said", "coefficient", "over"),
    [
        ("deepseek_v2", {"aux_loss_alpha": 0.003, "seq_aux": True}, 0.003, "sequence"),
        ("deepseek_v2", {"aux_loss_alpha": 0.003, "seq_aux": False}, 0.003, "micro_batch"),
        ("deepseek_v2", {}, 0.001, "sequence"),
        ("deepseek_v2", {"aux_loss_alpha": 0.0}, 0.0, "micro_batch"),
        ("deepseek_v3", {"aux_loss_alpha": 0.001, "seq_aux": True}, 0.001, "sequence"),
        ("deepseek_v3", {"aux_loss_alpha": 0.001, "seq_aux": False}, 0.001, "micro_batch"),
        ("deepseek_v3", {}, 0.0, "sequence"),
    ],
)
def test_deepseeks_loss_of_balance_is_its_own_codes(kind: str, said: dict[str, Any], coefficient: float, over: str) -> None:
    """modeling_deepseek.py beside DeepSeek-V2's weights, MoEGate: alpha and seq_aux; V3's bias balances without."""
    (experts,) = from_hf_config(DEEPSEEK_CONFIG | {"model_type": kind, "first_k_dense_replace": 0, **said}, "x").experts
    assert (experts.aux_loss_coeff, experts.balanced_over) == (coefficient, over)


def test_deepseeks_own_yarn_is_told_from_any_other() -> None:
    """DeepSeek-V3's config.json trains; Kimi K2's betas, or a mscale of cosines alone, are planned alone."""
    words = {"latent_yarn", "yarn_rope"}

    def found(**changes: Any) -> set[str]:
        return words & {*from_hf_config(DEEPSEEK_CONFIG | {"rope_scaling": DEEPSEEK_ROPE | changes}, "deepseek").features()}

    assert found() == {"latent_yarn"}
    assert found(beta_fast=1) == found(original_max_position_embeddings=8192) == found(mscale=0.7, mscale_all_dim=0.0) == {"yarn_rope"}
    assert not words & {*from_hf_config(DEEPSEEK_CONFIG, "deepseek").features()}


def test_megatrons_command_line_says_deepseeks_yarn_as_its_fields_do() -> None:
    from orchestrator.engines.megatron_parts import config_fields
    from orchestrator.engines.passthrough import flags_of

    fields = config_fields(from_hf_config(DEEPSEEK_CONFIG | {"rope_scaling": DEEPSEEK_ROPE}, "deepseek"))
    said = {flag[0]: flag[1:] for flag in flags_of(fields, "0.16.1")}
    assert (said["--rope-type"], said["--rotary-scaling-factor"]) == (("yarn",), ("40.0",))
    assert (said["--mscale"], said["--mscale-all-dim"]) == (("1.0",), ("1.0",))


@pytest.mark.parametrize("where", ["section", "beside it"])
def test_a_long_sequence_is_so_many_times_that_of_which_the_frequencies_were_made(where: str) -> None:
    """Phi-3's config.json: 131,072 positions, frequencies made for 4,096; no factor of its own."""
    scaling: dict[str, Any] = {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}
    config: dict[str, Any] = {
        "model_type": "phi3", "vocab_size": 32064, "hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 256, "max_position_embeddings": 131072, "rope_scaling": scaling,
    }  # fmt: skip
    (scaling if where == "section" else config)["original_max_position_embeddings"] = 4096
    found = from_hf_config(config, "x")
    assert (found.rope_scaling_type, found.rope_scaling_factor) == ("longrope", 32.0)
    scaling["factor"] = 8.0
    assert from_hf_config(config, "x").rope_scaling_factor == 8.0
