"""What adapters change in a model's description: against torch's own saved tensors, and by hand."""

from __future__ import annotations

from typing import Any

import pytest
from llama import LLAMA3_8B
from msgspec.structs import replace

from orchestrator.errors import InputError
from orchestrator.model.families import describe
from orchestrator.model.flops import model_flops_per_sample
from orchestrator.model.hugging_face import hugging_face
from orchestrator.model.lora import NF4_BYTES, Lora, check_targets, linear_names, packed_bytes, trainable_parameters, with_lora
from orchestrator.model.ops import Gemm, Pointwise
from orchestrator.model.spec import ModelSpec

MB = 1e6


def described(lora: Lora | None) -> ModelSpec:
    model = hugging_face(describe(LLAMA3_8B, 4096))
    return model if lora is None else with_lora(model, lora)


MEASURED = [
    (None, 823, 2420),
    (Lora(rank=16), 754, 4182),
    (Lora(rank=16, targets=("q_proj", "v_proj")), 603, 2630),
]
"""One layer of Llama 3 8B at 4,096 tokens in bf16 under transformers 5.23 and peft 0.21, recorded on torch's meta device: MB saved for
backward, MB moved by pointwise operations in forward."""


@pytest.mark.parametrize(("lora", "saved", "moved"), MEASURED, ids=["full", "all-linear", "q and v"])
def test_a_layer_keeps_and_moves_the_bytes_that_were_recorded(lora: Lora | None, saved: float, moved: float) -> None:
    layer = described(lora).kind("decoder")
    assert layer.saved_bytes() / MB == pytest.approx(saved, rel=0.005)
    assert sum(op.moved * op.elements for op in layer.ops if isinstance(op, Pointwise)) / MB == pytest.approx(moved, rel=0.005)


def test_adapters_on_all_linears_of_llama3_8b_have_the_parameters_that_peft_prints() -> None:
    """r=16: 41,943,040 (peft's print_trainable_parameters for Llama-3-8B, all-linear); q and v alone: 6,815,744."""
    assert trainable_parameters(described(Lora(rank=16))) == 41_943_040
    assert trainable_parameters(described(Lora(rank=16, targets=("q_proj", "v_proj")))) == 6_815_744


def test_a_frozen_product_has_two_of_three_parts_of_its_flops() -> None:
    """Forward and the gradient of the input: without attention, four sixths."""
    full, adapted = (model_flops_per_sample(described(lora)) for lora in (None, Lora(rank=1, targets=("v_proj",))))
    attention = 3 * 32 * 4 * 4096**2 * 4096 * 0.5
    assert (adapted - attention) / (full - attention) == pytest.approx(2 / 3, rel=1e-3)


def test_frozen_linears_of_4_bits_have_the_bytes_that_bitsandbytes_makes_of_them() -> None:
    """A weight of 4096 x 4096, quantised by bitsandbytes 0.50.2 with compress_statistics: 8,388,608 bytes of pairs, 262,144 of scales,
    4,096 of theirs. The head stays as it is."""
    assert 4096 * 4096 * NF4_BYTES == 8_388_608 + 262_144 + 4_096
    model = described(Lora(rank=16, targets=("q_proj",), bits=4))
    packed = {op.name for run in model.runs for op in run.layer.ops if isinstance(op, Gemm) and op.bits == 4}
    plain = {op.name for run in described(None).runs for op in run.layer.ops if isinstance(op, Gemm) and run.layer.recomputable}
    assert packed == plain


def test_frozen_linears_of_8_bits_have_the_bytes_that_bitsandbytes_makes_of_them() -> None:
    """A weight of 1024 outputs and 4096 inputs, quantised by bitsandbytes 0.50.2 (Int8Params): 4,194,304 bytes and 4,096 of scales, one of
    each output."""
    assert 1024 * 4096 * packed_bytes(8, 4096) == 4_194_304 + 4_096


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_linears_of_8_bits_keep_their_inputs_with_and_without_adapters(dropout: float) -> None:
    """MatMul8bitLt holds its input for backward. With adapters on q alone that is in all linears what only adapters kept in 16 bits: the
    inputs of q k v, o, gate up and down, each once; dropped copies for adapters come on top."""
    lora = Lora(rank=16, targets=("q_proj",), dropout=dropout)
    eight, sixteen = (described(replace(lora, bits=bits)).kind("decoder") for bits in (8, None))
    more = 4096 * (4096 + 14336) + (4096 * 4096 if dropout else 0)  # gate up and down; q k v, which q's adapter keeps without dropout
    assert eight.saved_bytes() - sixteen.saved_bytes() == 2 * more


def test_dropout_keeps_a_copy_of_its_own_for_each_adapter() -> None:
    """Without dropout q, k and v share their input; with it each keeps what dropout left, and the mask of one byte an element."""
    plain, dropped = (described(Lora(rank=16, dropout=p)).kind("decoder") for p in (0.0, 0.1))
    inputs = 4096 * (6 * 4096 + 14336)  # q, k, v, o, gate, up; down
    shared = 4096 * (2 * 4096 + 14336)  # q k v; gate up; down (o's input is the attention's output, kept anyway)
    assert dropped.saved_bytes() - plain.saved_bytes() == inputs * (2 + 1) - shared * 2


@pytest.mark.parametrize("changes", [{"targets": ("qproj",)}, {"targets": ("c_attn",)}, {"targets": ()}])
def test_a_target_that_is_no_linear_is_refused_with_the_choices(changes: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="all-linear, q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj") as error:
        check_targets(LLAMA3_8B, Lora(rank=4, **changes))
    assert error.value.key == "lora.targets"


def test_every_name_is_one_of_the_layer() -> None:
    names = {name for linears in linear_names(LLAMA3_8B).values() for name in linears}
    weights = [weight.name for weight in described(Lora(rank=2)).kind("decoder").weights if "lora_A" in weight.name]
    assert sorted(name.split(".")[-3] for name in weights) == sorted(names)
