"""Saved tensors against Korthikanti et al. (arXiv 2205.05198), table 2, and what follows from attention, dropout and gates."""

from __future__ import annotations

from typing import Any

import pytest
from llama import LLAMA3_8B
from msgspec.structs import replace

from orchestrator.model.families import describe
from orchestrator.model.spec import Architecture, Attention, Gemm, LayerSpec, Pointwise

S, H, A = 2048, 12288, 96
"""Sequence length, hidden size, heads of the paper's 175B model."""
GPT = Architecture(
    family="gpt",
    name="gpt",
    num_layers=4,
    hidden_size=H,
    num_attention_heads=A,
    ffn_hidden_size=4 * H,
    vocab_size=51200,
    max_position_embeddings=S,
    hidden_dropout=0.1,
    attention_dropout=0.1,
)
LLAMA = replace(LLAMA3_8B, num_layers=4)


def decoder(architecture: Architecture, **changes: Any) -> LayerSpec:
    return describe(replace(architecture, **changes), S).kind("decoder")


@pytest.mark.parametrize("t", [1, 2, 8, 32])
def test_activations_match_korthikanti_table_2(t: int) -> None:
    layer = decoder(GPT)
    assert layer.saved_bytes(flash_attention=False) == S * H * (34 + 5 * A * S / H)
    assert layer.saved_bytes(t, flash_attention=False) == S * H * (10 + 24 / t + 5 * A * S / (H * t))
    assert layer.saved_bytes(t, sequence_parallel=True, flash_attention=False) == S * H / t * (34 + 5 * A * S / H)
    selective = {"without": ("core_attention",), "flash_attention": False}
    assert layer.saved_bytes(t, **selective) == S * H * (10 + 24 / t)
    assert layer.saved_bytes(t, sequence_parallel=True, **selective) == S * H * 34 / t
    assert 2 * layer.input_elements == 2 * S * H  # full recompute: the layer's input only


def test_flash_attention_keeps_a_logsumexp_in_place_of_the_scores() -> None:
    layer = decoder(GPT)
    assert layer.saved_bytes() == S * H * 34 + 4 * A * S
    assert layer.saved_bytes(without=("core_attention",)) == S * H * 34


def test_without_dropout_masks_and_the_second_copy_of_the_scores_vanish() -> None:
    assert decoder(GPT, hidden_dropout=0.0).saved_bytes() == S * H * 32 + 4 * A * S
    no_attention_dropout = decoder(GPT, attention_dropout=0.0)
    assert no_attention_dropout.saved_bytes(flash_attention=False) == S * H * 34 + 2 * A * S * S
    without = decoder(GPT, hidden_dropout=0.0, attention_dropout=0.0).saved(flash_attention=False)
    assert not any(saved.itemsize == 1 or saved.name.endswith("dropout") for saved in without)  # a mask has a byte an element


def test_a_gated_mlp_saves_gate_up_and_product() -> None:
    saved = {s.name: s for s in decoder(LLAMA).saved(flash_attention=True)}
    assert saved["mlp.activation.input"].elements == 2 * S * 14336
    assert saved["mlp.linear_fc2.input"].elements == S * 14336
    assert decoder(LLAMA).saved_bytes(without=("mlp",)) == decoder(LLAMA).saved_bytes() - 2 * 3 * S * 14336


def test_relu_keeps_its_output_only() -> None:
    assert decoder(GPT).saved_bytes() - decoder(GPT, activation="relu").saved_bytes() == 8 * S * H


@pytest.mark.parametrize(("tp", "groups_kept"), [(1, 8), (4, 2), (8, 1), (16, 1), (32, 1)])
def test_keys_of_few_query_groups_are_not_divided_below_one_group(tp: int, groups_kept: int) -> None:
    saved = {s.name: s for s in decoder(LLAMA).saved(flash_attention=True)}
    assert saved["self_attention.key"].local_elements(tp) == S * 128 * groups_kept
    assert saved["self_attention.query"].local_elements(tp) == S * 4096 / tp


def test_context_parallelism_divides_all_that_is_saved() -> None:
    assert decoder(LLAMA).saved_bytes(2, cp=4) == decoder(LLAMA).saved_bytes(2) / 4


def test_cross_attention_sees_both_lengths() -> None:
    t5 = Architecture(
        family="t5",
        name="t5",
        num_layers=2,
        decoder_num_layers=3,
        hidden_size=64,
        num_attention_heads=4,
        ffn_hidden_size=256,
        vocab_size=384,
        max_position_embeddings=512,
    )
    spec = describe(t5, 512, 128)
    attentions = [op for op in spec.kind("decoder").ops if isinstance(op, Attention)]
    assert [(op.query_len, op.key_len, op.causal) for op in attentions] == [(128, 128, True), (128, 512, False)]
    assert spec.kind("encoder").input_elements == spec.edges[0].elements == 512 * 64
    assert spec.kind("decoder").input_elements == 128 * 64
    assert (spec.edges[0].source, spec.edges[0].target) == ("encoder", "decoder")
    context = [saved.name for run in spec.runs for saved in run.layer.saved(flash_attention=True) if saved.elements == 512 * 64]
    assert context.count("encoder_output") == 1  # once for all decoder layers, not once a layer


def test_every_gemm_has_its_weight() -> None:
    """k and n of each GEMM are the dimensions of a weight, and each matrix but a lookup table is multiplied."""
    for architecture, lengths in ((GPT, (S, None)), (LLAMA, (S, None))):
        for layer in describe(architecture, *lengths).layers():
            gemms = sorted((op.n, op.k) for op in layer.ops if isinstance(op, Gemm))
            matrices = sorted(w.shape for w in layer.weights if len(w.shape) == 2 and layer.kind != "embedding")
            assert gemms == matrices


def test_the_head_saves_no_logits() -> None:
    """The loss's tensors are the engine's: Traits.logits_bytes counts them."""
    head = describe(LLAMA, S).kind("head")
    assert sum(saved.elements for saved in head.saved(flash_attention=True)) == 2 * S * 4096
    assert [op.elements for op in head.ops if isinstance(op, Pointwise) and op.name == "cross_entropy"] == [S * 128256]
