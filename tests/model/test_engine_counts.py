"""Parameter shapes and counts equal those of the engines' own modules, exactly."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import pytest

from orchestrator.model.families import describe, from_hf_config
from orchestrator.model.lora import frozen_layer
from orchestrator.model.parts.attention import GroupedQueryAttention
from orchestrator.model.spec import Architecture, LayerSpec, ModelSpec

pytestmark = pytest.mark.engines

SMALL: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 8, "ffn_hidden_size": 192, "max_position_embeddings": 48}


def gpt(**fields: Any) -> Architecture:
    return Architecture(**({"family": "gpt", "name": "gpt", "num_layers": 8, "vocab_size": 50257} | SMALL | fields))


def llama(**fields: Any) -> Architecture:
    rope: dict[str, Any] = {"position_embedding": "rope", "normalization": "RMSNorm", "activation": "swiglu"}
    plain: dict[str, Any] = {"add_bias_linear": False, "tie_embeddings": False}
    return Architecture(**({"family": "llama", "name": "llama", "num_layers": 8, "vocab_size": 32000} | SMALL | rope | plain | fields))


def bert(**fields: Any) -> Architecture:
    return Architecture(**({"family": "bert", "name": "bert", "num_layers": 8, "vocab_size": 30522, "num_token_types": 2} | SMALL | fields))


def t5(**fields: Any) -> Architecture:
    return Architecture(**({"family": "t5", "name": "t5", "num_layers": 3, "decoder_num_layers": 2, "vocab_size": 384} | SMALL | fields))


RELATIVE: dict[str, Any] = {"position_embedding": "relative", "normalization": "RMSNorm", "add_bias_linear": False, "activation": "relu"}

CASES: list[tuple[Architecture, dict[str, Any]]] = [
    (gpt(), {"tp": 1, "pp": 1}),
    (gpt(), {"tp": 2, "pp": 2}),
    (gpt(), {"tp": 8, "pp": 8}),
    (gpt(), {"tp": 4, "pp": 4, "vpp": 2}),
    (gpt(vocab_size=260), {"tp": 2, "pp": 2, "layout": "Et*3|t*5L"}),
    (gpt(), {"tp": 1, "pp": 4, "layout": "Et|t*2|t*4|tL"}),
    (gpt(), {"tp": 2, "pp": 2, "layout": "E|t*3|t*4|tL", "vpp": 2}),
    (gpt(tie_embeddings=False), {"tp": 2, "pp": 1}),
    (gpt(tie_embeddings=False, add_bias_linear=False), {"tp": 4, "pp": 2}),
    (gpt(kv_channels=24, num_query_groups=4, position_embedding="none"), {"tp": 4, "pp": 1}),
    (gpt(make_vocab_size_divisible_by=1000, activation="relu", position_embedding="rope"), {"tp": 2, "pp": 4}),
    (llama(), {"tp": 1, "pp": 1}),
    (llama(num_query_groups=2), {"tp": 2, "pp": 2}),
    (llama(num_query_groups=2), {"tp": 4, "pp": 1}),
    (llama(num_query_groups=2), {"tp": 8, "pp": 2, "vpp": 4}),
    (llama(num_query_groups=1, kv_channels=32), {"tp": 4, "pp": 1}),
    (llama(add_qkv_bias=True, tie_embeddings=True), {"tp": 2, "pp": 1}),
    (llama(add_qkv_bias=True, tie_embeddings=True), {"tp": 2, "pp": 2}),
    (llama(add_bias_linear=True, activation="geglu", num_query_groups=4), {"tp": 4, "pp": 2}),
    (gpt(activation="reglu"), {"tp": 2, "pp": 1}),
    (gpt(activation="quick_gelu"), {"tp": 2, "pp": 1}),
    (llama(num_query_groups=2, mixer=GroupedQueryAttention(output_gate=True)), {"tp": 2, "pp": 1}),
    (bert(), {"tp": 1, "pp": 1}),
    (bert(), {"tp": 4, "pp": 2}),
    (bert(tie_embeddings=False, num_token_types=0), {"tp": 2, "pp": 1}),
    (bert(add_bias_linear=False, position_embedding="rope"), {"tp": 2, "pp": 4}),
    (bert(), {"tp": 2, "pp": 4, "vpp": 2}),
    (t5(), {"tp": 1, "pp": 1}),
    (t5(), {"tp": 4, "pp": 1}),
    (t5(tie_embeddings=False, activation="geglu"), {"tp": 2, "pp": 1}),
    (t5(**RELATIVE), {"tp": 2, "pp": 1}),
    (t5(**RELATIVE, kv_channels=24, tie_embeddings=False), {"tp": 8, "pp": 1}),
    (t5(position_embedding="rope"), {"tp": 2, "pp": 1}),
]

DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
TOKENS, CONTEXT_TOKENS = 16, 24
# Architecture, kind of layer, norms in it.
SAVED: list[tuple[Architecture, str, int]] = [
    (gpt(), "decoder", 2),
    (gpt(**DROPOUT), "decoder", 2),
    (gpt(attention_dropout=0.1, add_bias_linear=False, kv_channels=24), "decoder", 2),
    (gpt(mixer=GroupedQueryAttention(output_gate=True)), "decoder", 2),
    (bert(**DROPOUT), "encoder", 2),
    (t5(), "encoder", 2),
    (t5(hidden_dropout=0.1, activation="relu"), "decoder", 3),
]

KEPT = [(*case, frozen) for frozen in (False, True) for case in SAVED if case[2] != 3 or not frozen]
"""A decoder that looks at an encoder is in no model of which a part can be frozen (train.freeze)."""

HUGGING_FACE: list[dict[str, Any]] = [
    {"model_type": "gpt2", "n_layer": 48, "n_embd": 1600, "n_head": 25, "n_positions": 1024, "vocab_size": 50257},
    {"model_type": "gpt2", "n_layer": 3, "n_embd": 96, "n_head": 4, "n_inner": 100, "n_positions": 77, "vocab_size": 301},
    {
        "model_type": "llama",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "rope_theta": 500000.0,
    },
    {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 100,
        "num_attention_heads": 4,
        "head_dim": 24,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
        "vocab_size": 301,
        "max_position_embeddings": 64,
    },
    {
        "model_type": "mistral",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 100,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "sliding_window": None,
        "vocab_size": 301,
        "max_position_embeddings": 64,
    },
    {
        "model_type": "qwen2",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 100,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "vocab_size": 301,
        "max_position_embeddings": 64,
    },
    {"model_type": "t5", "num_layers": 24, "d_model": 1024, "d_kv": 64, "d_ff": 4096, "num_heads": 16, "vocab_size": 32128},
    {"model_type": "t5", "num_layers": 24, "d_model": 1024, "d_kv": 128, "d_ff": 65536, "num_heads": 128, "vocab_size": 32128},
    {
        "model_type": "t5",
        "num_layers": 4,
        "num_decoder_layers": 2,
        "d_model": 64,
        "d_kv": 24,
        "d_ff": 100,
        "num_heads": 4,
        "vocab_size": 301,
        "feed_forward_proj": "gated-gelu",
    },
    {
        "model_type": "bert",
        "num_hidden_layers": 24,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
        "vocab_size": 30522,
        "max_position_embeddings": 512,
    },
]


def spec_of(architecture: Architecture) -> ModelSpec:
    return describe(architecture, 32, 16 if architecture.family == "t5" else None)


@pytest.fixture(scope="module")
def engines() -> dict[str, Any]:
    """Everything built in one process, as importing megatron-core takes longer than building the models."""
    cases = {
        "megatron": [mesh | {"architecture": msgspec.to_builtins(architecture)} for architecture, mesh in CASES],
        "hugging_face": HUGGING_FACE,
        "saved": [
            {
                "architecture": msgspec.to_builtins(architecture),
                "kind": kind,
                "tokens": TOKENS,
                "context_tokens": CONTEXT_TOKENS if norms == 3 else 0,
                "frozen": frozen,
            }
            for architecture, kind, norms, frozen in KEPT
        ],
    }
    program = Path(__file__).with_name("engine_shapes.py")
    done = subprocess.run([sys.executable, program], input=json.dumps(cases), capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def our_name(parameter: str, family: str) -> tuple[str, str, int]:
    """(layer kind, weight name, layer index in the chunk) of a megatron-core parameter."""
    in_layer = re.fullmatch(r"(encoder|decoder)\.layers\.(\d+)\.(.+)", parameter)
    if in_layer:
        return in_layer[1], in_layer[3], int(in_layer[2])
    if parameter.startswith("embedding.") or "relative_pos_emb" in parameter:
        return "embedding", parameter.removeprefix("embedding."), 0
    return "head", parameter if family == "t5" else re.sub(r"^(encoder|decoder)\.", "", parameter), 0


def local_shapes(layer: LayerSpec, tp: int, *, with_tied: bool) -> dict[str, list[int]]:
    return {weight.name: list(weight.local_shape(tp)) for weight in layer.weights if with_tied or not weight.tied}


@pytest.mark.parametrize("index", range(len(CASES)), ids=[f"{a.family}-{i}" for i, (a, _) in enumerate(CASES)])
def test_every_weight_of_every_rank_is_megatron_cores(engines: dict[str, Any], index: int) -> None:
    architecture, mesh = CASES[index]
    spec, tp, pp, vpp = spec_of(architecture), mesh["tp"], mesh["pp"], mesh.get("vpp", 1)
    layers_seen = 0
    for stage, chunks in enumerate(engines["megatron"][index]):
        for chunk, parameters in enumerate(chunks):
            theirs: dict[tuple[str, int], dict[str, list[int]]] = {}
            for parameter, shape in parameters.items():
                kind, name, position = our_name(parameter, architecture.family)
                theirs.setdefault((kind, position), {})[name] = shape
            first, last = (stage, chunk) == (0, 0), (stage, chunk) == (pp - 1, vpp - 1)
            assert ("embedding" in {kind for kind, _ in theirs}) == first
            assert ("head" in {kind for kind, _ in theirs}) == last
            for (kind, position), shapes in theirs.items():
                assert shapes == local_shapes(spec.kind(kind), tp, with_tied=not first), (stage, chunk, kind, position)
            total = sum(prod(shape) for shape in parameters.values())
            assert total == sum(spec.kind(kind).local_parameters(tp, with_tied=not first) for kind, _ in theirs)
            layers_seen += len(theirs) - first - last
    assert layers_seen == spec.num_layers - 2


@pytest.mark.parametrize("index", range(len(HUGGING_FACE)), ids=[f"{c['model_type']}-{i}" for i, c in enumerate(HUGGING_FACE)])
def test_totals_are_hugging_faces(engines: dict[str, Any], index: int) -> None:
    """Exactly, but for the output bias that megatron-core's tied T5 head has (t5_model.py:62) and Hugging Face's has not."""
    config = HUGGING_FACE[index]
    spec = spec_of(from_hf_config(config, "theirs"))
    t5_bias = config["vocab_size"] if config["model_type"] == "t5" and spec.architecture.tie_embeddings else 0
    assert spec.parameters == engines["hugging_face"][index] + t5_bias


@pytest.mark.parametrize("index", range(len(KEPT)), ids=[f"{a.family}-{kind}-{i}-{frozen}" for i, (a, kind, _, frozen) in enumerate(KEPT)])
def test_a_layer_keeps_for_backward_what_we_count(engines: dict[str, Any], index: int) -> None:
    """Bytes that autograd really keeps of megatron-core's layer with unfused attention, to the byte.

    Added here is what the model leaves out on purpose (two fp32 statistics per token and LayerNorm, the boolean attention masks, the
    encoder's output, counted once for all layers) and what a CPU does: its dropout masks have the dtype of the tensor.
    """
    architecture, kind, norms, frozen = KEPT[index]
    cross = norms == 3
    spec = describe(architecture, CONTEXT_TOKENS if cross else TOKENS, TOKENS if architecture.family == "t5" else None)
    layer = frozen_layer(spec.kind(kind)) if frozen else spec.kind(kind)
    masks = sum(saved.elements for saved in layer.saved(flash_attention=False) if saved.itemsize == 1)
    left_out = 2 * 4 * TOKENS * norms + TOKENS * TOKENS
    if cross:
        left_out += TOKENS * CONTEXT_TOKENS + 4 * CONTEXT_TOKENS * architecture.hidden_size
    assert engines["saved"][index] == layer.saved_bytes(flash_attention=False, itemsize=4) + 3 * masks + left_out
