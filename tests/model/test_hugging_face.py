"""Layers in transformers' own operations, counted by hand from modeling_llama.py, modeling_gpt2.py and modeling_t5.py."""

from __future__ import annotations

from itertools import pairwise

import pytest
from llama import LLAMA3_8B
from msgspec.structs import replace

from orchestrator.model.architecture import Architecture
from orchestrator.model.families import describe
from orchestrator.model.flops import model_flops_per_sample
from orchestrator.model.hugging_face import hugging_face
from orchestrator.model.spec import Enter, Exit, Gemm, LayerSpec, Pointwise
from tests.validation.engines.engine import with_separate_gate

GPT = Architecture(
    family="gpt", name="gpt", num_layers=2, hidden_size=64, num_attention_heads=4, ffn_hidden_size=256, vocab_size=1000,
    max_position_embeddings=128, hidden_dropout=0.1,
)  # fmt: skip
T5 = replace(
    GPT, family="t5", name="t5", decoder_num_layers=2, activation="geglu", position_embedding="relative", normalization="RMSNorm",
    add_bias_linear=False,
)  # fmt: skip
PHI3 = replace(LLAMA3_8B, family="phi3", name="phi3")
MODELS = {a.name: describe(a, 128, 128 if a.family == "t5" else None) for a in (LLAMA3_8B, PHI3, GPT, T5)}


def kernels(layer: LayerSpec) -> dict[str, list[float]]:
    """By name the bytes per element that each kernel moves; those that stand for a launch alone move none."""
    found: dict[str, list[float]] = {}
    for op in layer.ops:
        if isinstance(op, Pointwise):
            found.setdefault(op.name, []).append(op.moved)
    return found


def test_a_llama_layer_has_its_linears_and_kernels_one_by_one() -> None:
    """q, k, v, o, gate, up and down; a norm is 8 kernels, the rotation of queries and keys 10, the gate's activation and product 2."""
    layer = hugging_face(MODELS["llama3_8b"]).kind("decoder")
    wide, narrow, inner = 4096, 1024, 14336
    gemms = [(op.name.rpartition(".")[2], op.k, op.n) for op in layer.ops if isinstance(op, Gemm)]
    assert gemms == [
        *[("linear_qkv", wide, n) for n in (wide, narrow, narrow)],
        ("linear_proj", wide, wide),
        *[("linear_fc1", wide, inner)] * 2,
        ("linear_fc2", inner, wide),
    ]
    assert kernels(layer) == {
        "input_layernorm": [36.0] + [0.0] * 7,
        "self_attention.rotary": [20.0] + [0.0] * 9,
        "self_attn_bda": [6.0],
        "pre_mlp_layernorm": [36.0] + [0.0] * 7,
        "mlp.activation": [10.0, 0.0],
        "mlp_bda": [6.0],
    }


@pytest.mark.parametrize("name", MODELS)
def test_under_autotp_each_divided_linear_reduces_its_own_gradient(name: str) -> None:
    """An Enter before each column of transformers' linears and before nothing else, an Exit behind each row (module_inject/layers.py)."""
    for run in hugging_face(MODELS[name]).runs:
        if run.layer.kind == "head":
            continue
        ops = run.layer.ops
        columns = [op for op in ops if isinstance(op, Gemm) and op.split == "column"]
        assert sum(isinstance(op, Enter) for op in ops) == len(columns)
        for op, behind in pairwise(ops):
            assert not isinstance(op, Enter) or (isinstance(behind, Gemm) and behind.split == "column")
            assert not (isinstance(op, Gemm) and op.split == "row") or isinstance(behind, Exit)


def test_embedding_and_a_tied_head_are_whole_on_every_rank_and_an_untied_head_gathers_its_logits() -> None:
    tied, untied = hugging_face(MODELS["gpt"]), hugging_face(MODELS["llama3_8b"])
    for model in (tied, untied):
        assert not any(isinstance(op, Exit) for op in model.kind("embedding").ops)
        assert not any(weight.pad_to for run in model.runs for weight in run.layer.weights)
        (loss,) = [op for op in model.kind("head").ops if isinstance(op, Pointwise) and op.name == "cross_entropy"]
        assert (loss.moved, loss.moved_backward, loss.shard) == (22.0, 30.0, "none")
    (head,) = [op for op in tied.kind("head").ops if isinstance(op, Gemm)]
    assert head.split is None
    assert not any(isinstance(op, Enter | Exit) for op in tied.kind("head").ops)
    enter, head, gathered = [op for op in untied.kind("head").ops if isinstance(op, Enter | Exit | Gemm)]
    assert isinstance(enter, Enter)
    assert isinstance(head, Gemm)
    assert isinstance(gathered, Exit)
    assert head.split == "column"
    assert gathered.elements == 128 * 128256 // 2, "an all-gather moves half the bytes of an all-reduce"


@pytest.mark.parametrize("name", MODELS)
def test_the_same_products_and_weights_are_computed(name: str) -> None:
    ours, theirs = MODELS[name], hugging_face(MODELS[name])
    assert model_flops_per_sample(theirs) == model_flops_per_sample(ours)
    bias = 1000 if name == "t5" else 0  # T5ForConditionalGeneration's head has none
    assert ours.parameters - theirs.parameters in (0, bias)
    for before, after in zip(ours.runs, theirs.runs, strict=True):
        assert (before.layer.kind, before.count) == (after.layer.kind, after.count)
        kept = [{saved.name for op in run.layer.ops for saved in getattr(op, "saves", ())} for run in (before, after)]
        assert kept[0] <= kept[1], "nothing that the fused layer keeps is let go"


def test_one_linear_stays_one_where_transformers_has_one() -> None:
    """GPT-2's c_attn and Phi-3's qkv_proj and gate_up_proj."""
    for name in ("gpt", "phi3"):
        ours, theirs = (
            [op.n for op in model.kind("decoder").ops if isinstance(op, Gemm)] for model in (MODELS[name], hugging_face(MODELS[name]))
        )
        assert ours == theirs
    layer = hugging_face(MODELS["gpt"]).kind("decoder")
    assert kernels(layer) == {
        "input_layernorm": [4.0],
        "self_attn_bda": [11.0, 0.0],
        "pre_mlp_layernorm": [4.0],
        "mlp.activation": [4.0],
        "mlp_bda": [11.0, 0.0],
    }, "fused LayerNorm and GELU; dropout and the residual's sum are two kernels"


def test_t5s_norm_keeps_its_input_twice_and_what_it_normalised() -> None:
    layer = hugging_face(MODELS["t5"]).kind("encoder")
    (norm,) = [op for op in layer.ops if isinstance(op, Pointwise) and op.name == "input_layernorm" and op.moved]
    assert [(saved.name.rpartition(".")[2], saved.itemsize) for saved in norm.saves] == [("input", 4), ("normalised", 2), ("narrow", 2)]
    (norm, _) = [op for op in hugging_face(MODELS["llama3_8b"]).kind("decoder").ops if isinstance(op, Pointwise) and op.moved == 36.0]
    assert [saved.itemsize for saved in norm.saves] == [4, 2]


def test_a_gate_of_two_kernels_keeps_the_activated_half_too() -> None:
    plain = MODELS["llama3_8b"]
    before, after = (
        sum(saved.elements for op in model.kind("decoder").ops for saved in getattr(op, "saves", ()))
        for model in (plain, with_separate_gate(plain))
    )
    assert after - before == 128 * 14336
    assert with_separate_gate(MODELS["gpt"]) is MODELS["gpt"], "without a gate there is nothing more to keep"
