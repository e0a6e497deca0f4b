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
from orchestrator.model.ops import Enter, Exchange, Exit, Gemm, Pointwise
from orchestrator.model.parts.experts import Experts
from orchestrator.model.parts.latent_attention import LatentAttention
from orchestrator.model.spec import Architecture, ModelSpec

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


def of_megatron(a: Architecture, lora: Lora) -> ModelSpec:
    return with_lora(describe(a, 4096), lora, modules=False)


LLAMA2_70B = replace(LLAMA3_8B, num_layers=80, hidden_size=8192, num_attention_heads=64, num_query_groups=8, ffn_hidden_size=28672)


def test_an_adapter_of_megatrons_one_linear_is_smaller_than_three_of_transformers() -> None:
    """Rank 16 on attention of Llama 2 70B: queries, keys and values are 10,240 wide together, and take 8,192 once, or each."""
    fused = of_megatron(LLAMA2_70B, Lora(rank=16, targets=("linear_qkv", "linear_proj")))
    assert trainable_parameters(fused) == 80 * 16 * (8192 + 10240 + 8192 + 8192) == 44_564_480
    several = Lora(rank=16, targets=("q_proj", "k_proj", "v_proj", "o_proj"))
    ours = trainable_parameters(with_lora(hugging_face(describe(LLAMA2_70B, 4096)), several))
    assert trainable_parameters(of_megatron(LLAMA2_70B, several)) == ours == 65_536_000


def test_bridges_adapters_are_divided_whole_and_take_gathered_inputs() -> None:
    """peft/utils.py, ParallelLinearAdapter: both matrices are divided by tp, A beside rows by inputs; an input that is gathered is kept as
    it is, of rows each rank's own; the frozen linear keeps none and has the gradient of its input alone."""
    layer = of_megatron(LLAMA3_8B, Lora(rank=16, targets=("linear_fc1", "linear_fc2"))).kind("decoder")
    weights = {weight.name: weight for weight in layer.weights if not weight.frozen}
    assert {name.removeprefix("mlp.linear_"): weight.split for name, weight in weights.items()} == {
        **{"fc1.linear_fc1.lora_A.weight": 0, "fc1.linear_fc1.lora_B.weight": 0},
        **{"fc2.linear_fc2.lora_A.weight": 1, "fc2.linear_fc2.lora_B.weight": 0},
    }
    assert [weight.local_shape(2) for weight in weights.values()] == [(8, 4096), (14336, 16), (16, 7168), (2048, 16)]
    kept = {saved.name: (saved.elements, saved.shard) for op in layer.ops if isinstance(op, Gemm) for saved in op.saves}
    kept = {name.removeprefix("mlp."): of for name, of in kept.items() if name.startswith("mlp.")}
    rank = 4096 * 16, "none"
    inputs = {"linear_fc1.input": (4096 * 4096, "none"), "linear_fc2.input": (4096 * 14336, "tp")}
    assert kept == inputs | {f"linear_{fc}.linear_{fc}.lora_B.input": rank for fc in ("fc1", "fc2")}
    assert [(op.of, op.elements, op.shared) for op in layer.ops if isinstance(op, Exchange)] == [
        *(("input", 4096 * 4096, True), ("columns", 4096 * 16, False), ("rows", 4096 * 16, False), ("output", 4096 * 4096, False)),
    ]
    assert all(op.wide != op.frozen for op in layer.ops if isinstance(op, Gemm)), "adapters have 16 bits in FP8's training"
    embedding = of_megatron(LLAMA3_8B, Lora(rank=16)).kind("embedding")
    assert embedding.forward_only


EXPERTS = replace(
    LLAMA3_8B, feed_forward=Experts(num_experts=8, topk=2, ffn_hidden_size=512, shared_ffn_hidden_size=1024),
    mixer=LatentAttention(q_lora_rank=None, kv_lora_rank=512, qk_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
)  # fmt: skip


def test_a_ranks_experts_share_an_adapter_and_latent_attentions_linears_have_their_own() -> None:
    """share_expert_adapters: one pair for all experts, on every rank; every linear of Megatron's under all-linear."""
    layer = next(run.layer for run in of_megatron(EXPERTS, Lora(rank=16)).runs if run.layer.dispatches)
    found = {weight.name.rpartition(".lora_")[0].rpartition(".")[0]: weight for weight in layer.weights if not weight.frozen}
    assert [name.partition(".")[2] for name in found] == [
        *("linear_kv_down_proj", "linear_q_proj", "linear_kv_up_proj", "linear_proj", "experts.linear_fc1", "experts.linear_fc2"),
        *("shared_experts.linear_fc1", "shared_experts.linear_fc2"),
    ]
    shared = [(weight.shape, weight.kind, weight.split) for weight in layer.weights if ".experts." in weight.name and not weight.frozen]
    assert shared == [((16, 4096), "dense", None), ((1024, 16), "dense", None), ((16, 512), "dense", None), ((4096, 16), "dense", None)]
    products = [op for op in layer.ops if isinstance(op, Gemm) and op.role == "routed_fc1"]
    assert [(op.tokens, op.n, op.experts) for op in products] == [(8192, 1024, 8), (8192, 16, 0), (8192, 1024, 0)]
    router = next(op for op in layer.ops if isinstance(op, Gemm) and op.role == "router")
    assert router.frozen
    assert router.saves, "its function keeps the input, whatever is trained"


def test_ms_swifts_adapters_are_divided_as_their_linears_and_each_expert_has_its_own() -> None:
    """mcore-bridge 1.6.5, tuners/lora.py: A of a linear divided by columns is whole on every rank (parallel_mode="duplicated"), and so is B
    of one divided by rows; grouped linears beside experts; Megatron's linears under all-linear."""
    layer = next(run.layer for run in of_megatron(EXPERTS, Lora(rank=16, bridge="mcore-bridge")).runs if run.layer.dispatches)
    found = {weight.name: (weight.shape, weight.split, weight.kind) for weight in layer.weights if not weight.frozen}
    named = "mlp.experts.linear_fc1.linear_fc1"
    assert found[f"{named}.lora_A.weight"] == ((8, 16, 4096), None, "expert")
    assert found[f"{named}.lora_B.weight"] == ((8, 1024, 16), None, "expert")
    assert [op.experts for op in layer.ops if isinstance(op, Gemm) and op.role == "routed_fc1"] == [8, 8, 8]
    dense = of_megatron(LLAMA3_8B, Lora(rank=16, bridge="mcore-bridge")).kind("decoder")
    held = {weight.name.partition(".linear")[2]: weight.local_shape(2) for weight in dense.weights if not weight.frozen}
    assert held == {
        **{"_qkv.linear_qkv.lora_A.weight": (16, 4096), "_qkv.linear_qkv.lora_B.weight": (3072, 16)},
        **{"_proj.linear_proj.lora_A.weight": (16, 2048), "_proj.linear_proj.lora_B.weight": (4096, 16)},
        **{"_fc1.linear_fc1.lora_A.weight": (16, 4096), "_fc1.linear_fc1.lora_B.weight": (14336, 16)},
        **{"_fc2.linear_fc2.lora_A.weight": (16, 7168), "_fc2.linear_fc2.lora_B.weight": (4096, 16)},
    }
    assert not [op for op in dense.ops if isinstance(op, Exchange)]
    small = [(type(op).__name__, op.elements) for op in dense.ops if isinstance(op, Enter | Exit) and op.elements == 4096 * 16]
    assert [kind for kind, _ in small] == ["Enter", "Exit", "Enter", "Exit"], "ranks exchange what is between the matrices alone"


def test_megatrons_names_are_told_from_transformers() -> None:
    with pytest.raises(InputError, match=r"lora.targets=q_proj: lora.bridge=mcore-bridge has Megatron's linears"):
        check_targets(LLAMA3_8B, Lora(rank=4, targets=("q_proj",), bridge="mcore-bridge"))
    check_targets(LLAMA3_8B, Lora(rank=4, targets=("linear_qkv", "linear_fc2")))
    with pytest.raises(InputError, match="linear_qkv are Megatron's linears, the others transformers'"):
        check_targets(LLAMA3_8B, Lora(rank=4, targets=("linear_qkv", "o_proj")))
