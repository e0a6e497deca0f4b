"""What each part of a layer computes, moves and keeps for a token, in numbers worked out by hand: widths are small and all different."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from orchestrator.model.architecture import Architecture, Layer
from orchestrator.model.describe import layer_parts, transformer_layer
from orchestrator.model.families import describe
from orchestrator.model.hugging_face import divides_head, hugging_face, is_gpt2
from orchestrator.model.layer import LayerSpec
from orchestrator.model.ops import Attention, DeltaRule, Dispatch, Enter, Exit, Gemm, Op, Pointwise, Scan, Weight, padded
from orchestrator.model.parts import ends
from orchestrator.model.parts.attention import GroupedQueryAttention, core_attention, cross_attention
from orchestrator.model.parts.experts import Experts
from orchestrator.model.parts.gated_delta_net import GatedDeltaNet
from orchestrator.model.parts.latent_attention import LatentAttention
from orchestrator.model.parts.mamba2 import Mamba2
from orchestrator.model.parts.mlp import Mlp
from orchestrator.model.parts.part import Nothing, Part, norm, residual_add
from tests.validation.engines.engine import with_separate_gate

T = 7
LLAMA = Architecture(
    family="llama", name="x", num_layers=3, hidden_size=60, num_attention_heads=6, num_query_groups=3, kv_channels=8, ffn_hidden_size=50,
    vocab_size=101, max_position_embeddings=64, activation="swiglu", normalization="RMSNorm", position_embedding="rope",
    add_bias_linear=False, tie_embeddings=False, make_vocab_size_divisible_by=8,
)  # fmt: skip
GPT = replace(
    LLAMA, family="gpt", activation="gelu", normalization="LayerNorm", position_embedding="learned_absolute", add_bias_linear=True,
    hidden_dropout=0.1, attention_dropout=0.1, tie_embeddings=True,
)  # fmt: skip
"""60 wide; 6 heads of 8 are 48 of queries, 3 groups 24 of keys and 24 of values; the MLP is 50 wide."""


def computed(part: Part) -> list[tuple[Any, ...]]:
    """Operations in their order, per token."""
    return [row(op) for op in part.ops]


def row(op: Op) -> tuple[Any, ...]:
    match op:
        case Enter():
            return ("enter", op.elements / T)
        case Exit():
            return ("exit", op.elements / T)
        case Gemm():
            assert op.tokens % T == 0
            return (op.name.rpartition(".")[2], op.tokens // T, op.k, op.n, op.split)
        case Pointwise():
            return (op.name.rpartition(".")[2], op.elements / T, op.moved, op.shard)
        case Dispatch():
            return ("dispatch", op.elements / T, op.topk)
        case Attention():
            return ("attention", op.query_len, op.key_len, op.heads, op.kv_heads, op.head_dim, op.causal)
        case Scan():
            return ("scan", op.tokens, op.heads, op.head_dim, op.state, op.groups, op.chunk)
        case DeltaRule():
            return ("rule", op.tokens, op.heads, op.key_dim, op.value_dim, op.chunk)


def kept(part: Part) -> dict[str, tuple[float, str]]:
    """What stays for backward, per token, and the degree that divides it."""
    found = [saved for op in part.ops if not isinstance(op, Enter | Exit | Dispatch) for saved in op.saves]
    assert len({saved.name for saved in found}) == len(found)
    return {saved.name.partition(".")[2]: (saved.elements / T, saved.shard) for saved in found}


def shapes(weights: tuple[Weight, ...]) -> dict[str, tuple[tuple[int, ...], int | None]]:
    """Shape, and the dimension that tensor parallelism divides."""
    return {weight.name.partition(".")[2]: (weight.shape, weight.split) for weight in weights}


# ---- attention


def test_attention_projects_rotates_and_keeps_queries_keys_and_values() -> None:
    part = GroupedQueryAttention().part(LLAMA, T, causal=True)
    assert computed(part) == [
        ("enter", 60), ("linear_qkv", 1, 60, 96, "column"), ("rotary", 72, 4, "tp"), ("attention", 7, 7, 6, 3, 8, True),
        ("linear_proj", 1, 48, 60, "row"), ("exit", 60),
    ]  # fmt: skip
    assert kept(part) == {
        "linear_qkv.input": (60, "sequence"), "query": (48, "tp"), "key": (24, "tp"), "value": (24, "tp"), "softmax": (42, "tp"),
        "logsumexp": (6, "tp"), "linear_proj.input": (48, "tp"),
    }  # fmt: skip
    assert shapes(part.weights) == {"linear_qkv.weight": ((96, 60), 0), "linear_proj.weight": ((60, 48), 1)}
    for other in (replace(LLAMA, position_embedding="none"), LLAMA):
        without = GroupedQueryAttention(rotary=other is not LLAMA).part(other, T, causal=True)
        assert "rotary" not in [op.name.rpartition(".")[2] for op in without.ops if isinstance(op, Pointwise)]


def test_biases_sinks_and_gates_are_where_they_are_said() -> None:
    qkv = {"linear_qkv.bias": ((96,), 0)}
    for fields, more in (
        ({"add_qkv_bias": True}, qkv),
        ({"add_bias_linear": True}, qkv | {"linear_proj.bias": ((60,), None)}),
    ):
        part = GroupedQueryAttention().part(replace(LLAMA, **fields), T, causal=True)
        assert shapes(part.weights) == {"linear_qkv.weight": ((96, 60), 0), "linear_proj.weight": ((60, 48), 1)} | more
    sinks = GroupedQueryAttention(sinks=True).part(LLAMA, T, causal=True)
    assert shapes(sinks.weights)["core_attention.softmax_offset"] == ((6,), 0)
    gated = GroupedQueryAttention(output_gate=True).part(LLAMA, T, causal=True)
    assert computed(gated)[1] == ("linear_qkv", 1, 60, 144, "column")
    assert computed(gated)[4] == ("output_gate", 48, 6, "tp")
    assert {name: value for name, value in kept(gated).items() if "gate" in name} == {
        "output_gate.input": (48, "tp"), "output_gate.gate": (48, "tp"),
    }  # fmt: skip


def test_norms_of_queries_and_keys_keep_their_inputs_and_those_of_keys_are_no_more_than_groups() -> None:
    for kind, widths in (("head", (8, 8)), ("hidden", (48, 24)), ("l2", ())):
        part = GroupedQueryAttention(qk_norm=kind).part(LLAMA, T, causal=True)
        assert computed(part)[2:4] == [("q_layernorm", 48, 4, "tp"), ("k_layernorm", 24, 4, "tp")]
        assert kept(part)["q_layernorm.input"] == (48, "tp")
        assert kept(part)["k_layernorm.input"] == (24, "tp")
        found = [shape for name, (shape, split) in shapes(part.weights).items() if "layernorm" in name and split is None]
        assert found == [(width,) for width in widths]
        saved = {one.name.rpartition(".")[0].rpartition(".")[2]: one for op in part.ops if isinstance(op, Pointwise) for one in op.saves}
        assert [saved[name].local_elements(6) / T for name in ("q_layernorm", "k_layernorm")] == [8, 8], "three groups on six ranks: one"


def test_a_window_or_a_chunk_as_long_as_the_sequence_is_none() -> None:
    def core(**fields: int) -> Attention:
        return core_attention("a", LLAMA, T, T, causal=True, **fields)

    assert [core(window=window).window for window in (0, 1, 6, 7, 8)] == [0, 1, 6, 0, 0]
    assert [core(chunk=chunk).attended for chunk in (0, 1, 6, 7, 8)] == [0.0, 1.0, 6.0, 0.0, 0.0]
    dropped = core_attention("a", GPT, T, T, causal=True)
    assert {saved.name: (saved.elements, saved.itemsize, saved.quadratic) for saved in dropped.saves if "dropout" in saved.name} == {
        "a.dropout_mask": (6 * 7 * 7, 1, True), "a.dropout": (6 * 7 * 7, None, True),
    }  # fmt: skip
    assert {saved.name: saved.itemsize for saved in core().saves if saved.flash_only} == {"a.logsumexp": 4}


def test_cross_attention_takes_queries_of_one_side_and_keys_of_the_other() -> None:
    part = cross_attention(LLAMA, T, 5 * T)
    assert computed(part) == [
        ("enter", 60), ("linear_q", 1, 60, 48, "column"), ("enter", 300), ("linear_kv", 5, 60, 48, "column"),
        ("attention", 7, 35, 6, 3, 8, False), ("linear_proj", 1, 48, 60, "row"), ("exit", 60),
    ]  # fmt: skip
    found = kept(part)
    assert (found["linear_q.input"], found["query"], found["key"], found["value"]) == (
        (60, "sequence"),
        (48, "tp"),
        (120, "tp"),
        (120, "tp"),
    )
    assert shapes(part.weights) == {
        "linear_q.weight": ((48, 60), 0),
        "linear_kv.weight": ((48, 60), 0),
        "linear_proj.weight": ((60, 48), 1),
    }
    assert shapes(cross_attention(GPT, T, T).weights).keys() == {
        f"linear_{name}.{kind}" for name in ("q", "kv", "proj") for kind in ("weight", "bias")
    }


def test_latent_attention_goes_through_its_ranks() -> None:
    """6 heads of 5 and 2 rotary: 42 of queries; 6 times 5 and 4: 54 of keys and values, from a rank of 9; 2 rotary of all keys beside."""
    full = LatentAttention(kv_lora_rank=9, qk_head_dim=5, qk_rope_head_dim=2, v_head_dim=4)
    part = full.part(LLAMA, T, causal=True)
    assert computed(part) == [
        ("enter", 60), ("linear_kv_down_proj", 1, 60, 11, None), ("linear_q_proj", 1, 60, 42, "column"),
        ("linear_kv_up_proj", 1, 9, 54, "column"), ("rotary", 96, 4, "tp"), ("attention", 7, 7, 6, 6, 5, True),
        ("linear_proj", 1, 24, 60, "row"), ("exit", 60),
    ]  # fmt: skip
    assert kept(part) == {
        "linear_kv_down_proj.input": (60, "sequence"), "linear_q_proj.input": (60, "sequence"), "linear_kv_up_proj.input": (9, "sequence"),
        "query": (42, "tp"), "key_value": (66, "tp"), "linear_proj.input": (24, "tp"),
    }  # fmt: skip
    low = replace(full, q_lora_rank=13).part(LLAMA, T, causal=True)
    assert computed(low)[1:5] == [
        ("linear_q_down_proj", 1, 60, 13, None), ("linear_kv_down_proj", 1, 60, 11, None), ("linear_q_up_proj", 1, 13, 42, "column"),
        ("linear_kv_up_proj", 1, 9, 54, "column"),
    ]  # fmt: skip
    assert shapes(low.weights) == {
        "linear_q_down_proj.weight": ((13, 60), None), "linear_kv_down_proj.weight": ((11, 60), None),
        "linear_q_up_proj.weight": ((42, 13), 0), "linear_kv_up_proj.weight": ((54, 9), 0), "kv_layernorm.weight": ((9,), None),
        "q_layernorm.weight": ((13,), None), "linear_proj.weight": ((60, 24), 1),
    }  # fmt: skip


# ---- recurrences


def test_a_gated_delta_net_convolves_norms_repeats_and_gates() -> None:
    """2 heads of 5 are 10 of queries and 10 of keys; 4 heads of 3 are 12 of values: 10 + 10 + 12 + 12 + 4 + 4 = 52 are projected, 32 of
    them convolved; queries and keys are repeated to 4 heads each: 40."""
    net = GatedDeltaNet(num_key_heads=2, num_value_heads=4, key_head_dim=5, value_head_dim=3, conv_kernel=3)
    part = net.part(LLAMA, T, causal=True)
    assert computed(part) == [
        ("enter", 60), ("in_proj", 1, 60, 52, "column"), ("conv1d", 32, 4, "tp"), ("l2norm", 20, 4, "tp"), ("repeat", 40, 4, "tp"),
        ("rule", 7, 4, 5, 3, 64), ("out_norm", 12, 4, "tp"), ("gate", 12, 6, "tp"), ("out_proj", 1, 12, 60, "row"), ("exit", 60),
    ]  # fmt: skip
    assert kept(part) == {
        "in_proj.input": (60, "sequence"), "conv1d.input": (32, "tp"), "l2norm.input": (20, "tp"), "delta_rule.input": (52, "tp"),
        "delta_rule.inverse": (256, "tp"), "out_norm.input": (12, "tp"), "gate.input": (12, "tp"), "gate.normed": (12, "tp"),
        "out_proj.input": (12, "tp"),
    }  # fmt: skip
    assert shapes(part.weights) == {
        "in_proj.weight": ((52, 60), 0), "conv1d.weight": ((32, 1, 3), 0), "dt_bias": ((4,), 0), "A_log": ((4,), 0),
        "out_norm.weight": ((3,), None), "out_proj.weight": ((60, 12), 1),
    }  # fmt: skip
    assert [row[0] for row in computed(replace(net, num_key_heads=4).part(LLAMA, T, causal=True))].count("repeat") == 0


def test_mamba2_projects_convolves_scans_and_norms() -> None:
    """4 heads of 5 are 20 channels; 2 groups of 3 are 6 of B and 6 of C: 32 are convolved, and with the gate and the steps 56 projected."""
    mixer = Mamba2(num_heads=4, head_dim=5, state_size=3, num_groups=2, conv_kernel=2, chunk_size=16)
    part = mixer.part(LLAMA, T, causal=True)
    assert computed(part) == [
        ("enter", 60), ("in_proj", 1, 60, 56, "column"), ("conv1d", 32, 4, "tp"), ("scan", 7, 4, 5, 3, 2, 16), ("norm", 20, 4, "tp"),
        ("out_proj", 1, 20, 60, "row"), ("exit", 60),
    ]  # fmt: skip
    assert kept(part) == {
        "in_proj.input": (60, "sequence"), "scan.input": (56, "tp"), "scan.output": (20, "tp"), "norm.input": (20, "tp"),
        "out_proj.input": (20, "tp"),
    }  # fmt: skip
    assert shapes(part.weights) == {
        "in_proj.weight": ((56, 60), 0), "conv1d.weight": ((32, 1, 2), 0), "conv1d.bias": ((32,), 0), "dt_bias": ((4,), 0),
        "A_log": ((4,), 0), "D": ((4,), 0), "norm.weight": ((20,), 0), "out_proj.weight": ((60, 20), 1),
    }  # fmt: skip
    assert "conv1d.bias" not in shapes(replace(mixer, conv_bias=False).part(LLAMA, T, causal=True).weights)


# ---- feed-forwards


def test_an_mlp_has_twice_its_first_projection_where_it_is_gated() -> None:
    gated, plain = Mlp().part(LLAMA, T), Mlp().part(GPT, T)
    assert computed(gated) == [
        ("enter", 60), ("linear_fc1", 1, 60, 100, "column"), ("activation", 50, 6, "tp"), ("linear_fc2", 1, 50, 60, "row"), ("exit", 60),
    ]  # fmt: skip
    assert computed(plain)[1:4] == [
        ("linear_fc1", 1, 60, 50, "column"), ("activation", 50, 4, "tp"), ("linear_fc2", 1, 50, 60, "row"),
    ]  # fmt: skip
    assert kept(gated) == {"linear_fc1.input": (60, "sequence"), "activation.input": (100, "tp"), "linear_fc2.input": (50, "tp")}
    assert kept(plain) == {"linear_fc1.input": (60, "sequence"), "activation.input": (50, "tp"), "linear_fc2.input": (50, "tp")}
    assert "activation.input" not in kept(Mlp().part(replace(GPT, activation="relu"), T))
    assert shapes(plain.weights) == {
        "linear_fc1.weight": ((50, 60), 0), "linear_fc1.bias": ((50,), 0), "linear_fc2.weight": ((60, 50), 1),
        "linear_fc2.bias": ((60,), None),
    }  # fmt: skip
    assert computed(Mlp(ffn_hidden_size=33).part(LLAMA, T))[1] == ("linear_fc1", 1, 60, 66, "column")


def test_experts_compute_as_many_tokens_as_are_sent_to_them() -> None:
    """Each token goes to 2 of 5 experts of 11; the shared one is 17 wide."""
    part = Experts(num_experts=5, topk=2, ffn_hidden_size=11, shared_ffn_hidden_size=17).part(LLAMA, T)
    assert computed(part) == [
        ("router", 1, 60, 5, None), ("permute", 120, 8, "tp"), ("dispatch", 60, 2), ("linear_fc1", 2, 60, 22, "column"),
        ("activation", 22, 6, "tp"), ("linear_fc2", 2, 11, 60, "row"), ("enter", 60), ("linear_fc1", 1, 60, 34, "column"),
        ("activation", 17, 6, "tp"), ("linear_fc2", 1, 17, 60, "row"), ("exit", 60),
    ]  # fmt: skip
    assert kept(part) == {
        "router.input": (60, "sequence"), "permuted": (120, "tp"), "gate_up": (44, "tp"), "product": (22, "tp"),
        "shared_experts.gate_up": (34, "tp"), "shared_experts.product": (17, "tp"),
    }  # fmt: skip
    assert shapes(part.weights) == {
        "router.weight": ((5, 60), None),
        "experts.linear_fc1.weight": ((5, 22, 60), None), "experts.linear_fc2.weight": ((5, 60, 11), None),
        "shared_experts.linear_fc1.weight": ((34, 60), 0), "shared_experts.linear_fc2.weight": ((60, 17), 1),
    }  # fmt: skip
    grouped = [op.experts for op in part.ops if isinstance(op, Gemm)]
    assert grouped == [0, 5, 5, 0, 0]


def test_experts_have_their_biases_gates_and_capacity_where_they_are_said() -> None:
    plain = Experts(num_experts=5, topk=2, ffn_hidden_size=11)
    ungated = replace(LLAMA, activation="relu2")
    assert computed(plain.part(ungated, T))[3:6] == [
        ("linear_fc1", 2, 60, 11, "column"), ("activation", 22, 4, "tp"), ("linear_fc2", 2, 11, 60, "row"),
    ]  # fmt: skip
    assert len(computed(plain.part(LLAMA, T))) == 6, "no shared expert"
    biased = shapes(plain.part(replace(LLAMA, add_bias_linear=True), T).weights)
    assert (biased["experts.linear_fc1.bias"], biased["experts.linear_fc2.bias"]) == (((5, 22), None), ((5, 60), None))
    assert "router.bias" not in biased
    assert shapes(replace(plain, router_bias=True).part(LLAMA, T).weights)["router.bias"] == ((5,), None)
    gate = shapes(replace(plain, shared_ffn_hidden_size=4, shared_gate=True).part(LLAMA, T).weights)
    assert gate["shared_experts.gate_weight"] == ((1, 60), None)
    for factor, pad, share in ((0.5, False, 0.5), (2.0, False, 1.0), (2.0, True, 2.0), (0.5, True, 0.5), (None, False, 1.0)):
        found = computed(replace(plain, capacity_factor=factor, pad_to_capacity=pad).part(LLAMA, 2 * T))
        assert found[3][1] == 4 * share
        assert found[2][1] == 2 * 60 * share
    limits = [op.limit for fields in ({}, {"groups": 4, "group_topk": 2})
              for op in replace(plain, **fields).part(LLAMA, T).ops if isinstance(op, Dispatch)]  # fmt: skip
    assert limits == [(1, 1), (4, 2)]


# ---- norms, additions, ends


def test_a_norm_keeps_its_input_and_an_addition_its_mask() -> None:
    assert computed(norm("n", LLAMA, T)) == [("n", 60, 4, "sequence")]
    assert kept(norm("n", LLAMA, T)) == {"input": (60, "sequence")}
    assert [weight.shape for weight in norm("n", GPT, T).weights] == [(60,), (60,)]
    assert computed(residual_add("r", LLAMA, T)) == [("r", 60, 6, "sequence")]
    dropped = residual_add("r", GPT, T)
    assert computed(dropped) == [("r", 60, 7, "sequence")]
    (mask,) = [saved for op in dropped.ops if isinstance(op, Pointwise) for saved in op.saves]
    assert (mask.elements, mask.itemsize) == (60 * T, 1)


def test_embeddings_look_up_add_and_drop() -> None:
    assert computed(ends.embedding(LLAMA, T)) == [("word_embeddings", 60, 4, "none"), ("exit", 60)]
    bert = replace(GPT, family="bert", num_token_types=2)
    assert computed(ends.embedding(bert, T)) == [
        ("word_embeddings", 60, 4, "none"), ("exit", 60), ("position_embeddings", 60, 6, "none"), ("tokentype_embeddings", 60, 6, "none"),
        ("embedding_dropout", 60, 5, "sequence"),
    ]  # fmt: skip
    tables = {weight.name: (weight.shape, weight.local_shape(2)) for weight in ends.embedding(bert, T).weights}
    assert tables == {
        "word_embeddings.weight": ((101, 60), (52, 60)), "position_embeddings.weight": ((64, 60), (64, 60)),
        "tokentype_embeddings.weight": ((2, 60), (2, 60)),
    }  # fmt: skip
    relative = ends.embedding(replace(LLAMA, position_embedding="relative"), T).weights
    assert [weight.shape for weight in relative] == [(101, 60), (32, 6), (32, 6)]


def test_heads_multiply_by_the_padded_vocabulary_and_pay_for_their_loss() -> None:
    head = ends.vocabulary_head(LLAMA, T)
    assert computed(head) == [("enter", 60), ("output_layer", 1, 60, 101, "column"), ("cross_entropy", 101, 38, "tp")]
    assert [op.moved_backward for op in head.ops if isinstance(op, Pointwise)] == [14]
    assert [op.pad_to for op in head.ops if isinstance(op, Gemm)] == [8]
    assert [(weight.shape, weight.local_shape(4), weight.tied) for weight in head.weights] == [((101, 60), (26, 60), False)]
    tied = ends.vocabulary_head(GPT, T, bias=True)
    assert [(weight.shape, weight.local_shape(4), weight.tied) for weight in tied.weights] == [
        ((101, 60), (26, 60), True), ((101,), (26,), False),
    ]  # fmt: skip
    masked = ends.masked_head_transform(GPT, T)
    assert computed(masked) == [("dense", 1, 60, 60, None), ("gelu", 60, 4, "sequence")]
    assert [weight.shape for weight in masked.weights] == [(60, 60), (60,)]
    assert ends.embedding_copy(LLAMA).tied
    assert computed(ends.encoder_output(LLAMA, T)) == [("final_layernorm", 60, 4, "sequence"), ("encoder_output", 0, 0, "sequence")]
    entry = ends.prediction_entry("p", LLAMA, T)
    assert computed(entry) == [
        ("enorm", 60, 4, "sequence"), ("hnorm", 60, 4, "sequence"), ("enter", 120), ("eh_proj", 1, 120, 60, "column"), ("exit", 60),
    ]  # fmt: skip
    assert kept(entry) == {"enorm.input": (60, "sequence"), "hnorm.input": (60, "sequence"), "eh_proj.input": (120, "sequence")}


# ---- layers


@pytest.mark.parametrize(("placement", "order"), [("pre", "na+nm+"), ("post", "an+mn+"), ("both", "nan+nmn+")])
def test_norms_stand_before_or_after_each_part(placement: Any, order: str) -> None:
    """Norm, attention, MLP, addition."""
    a = replace(LLAMA, norm_placement=placement)
    part = layer_parts(a, a.common_layer, T, causal=True)
    words = {"core_attention": "a", "activation": "m", "_bda": "+", "layernorm": "n"}
    names = [op.name for op in part.ops if isinstance(op, Attention | Pointwise)]
    assert "".join(letter for name in names for word, letter in words.items() if name.endswith(word)) == order
    assert len([weight for weight in part.weights if "layernorm" in weight.name]) == order.count("n")


def test_a_layer_of_one_part_has_one_norm_and_one_addition() -> None:
    for mixer, feed in ((GroupedQueryAttention(), Nothing()), (Nothing(), Mlp())):
        part = layer_parts(LLAMA, Layer(mixer=mixer, feed_forward=feed), T, causal=True)
        names = [op.name for op in part.ops if isinstance(op, Pointwise)]
        assert sum("layernorm" in name for name in names) == sum("bda" in name for name in names) == 1
    crossed = transformer_layer("decoder", LLAMA, LLAMA.common_layer, T, causal=True, context_tokens=3)
    assert sum(isinstance(op, Attention) for op in crossed.ops) == 2
    assert (crossed.input_elements, crossed.output_elements, crossed.recomputable) == (60 * T, 60 * T, True)


def test_what_enters_and_leaves_each_layer_of_a_model() -> None:
    """An embedding takes ids and a head gives a loss; between them go vectors."""
    spec = describe(LLAMA, T)
    layers = [(run.layer, run.count) for run in spec.runs]
    assert [(one.kind, count, one.input_elements, one.output_elements, one.recomputable) for one, count in layers] == [
        ("embedding", 1, 0, 420, False), ("decoder", 3, 420, 420, True), ("head", 1, 420, 0, False),
    ]  # fmt: skip
    both = describe(replace(LLAMA, family="t5", num_query_groups=6, decoder_num_layers=2, position_embedding="relative"), T, 4)
    assert [(run.layer.kind, run.count, run.layer.input_elements, run.layer.output_elements) for run in both.runs] == [
        ("embedding", 1, 0, 420), ("encoder", 3, 420, 420), ("decoder", 2, 240, 240), ("head", 1, 240, 0),
    ]  # fmt: skip
    assert [(edge.source, edge.target, edge.elements) for edge in both.edges] == [("encoder", "decoder", 420)]
    assert next(op.elements for op in both.runs[0].layer.ops if isinstance(op, Pointwise)) == 60 * (T + 4)
    mtp = describe(replace(LLAMA, mtp_num_layers=2), T).runs[-1].layer
    assert sum(isinstance(op, Pointwise) and op.name == "cross_entropy" for op in mtp.ops) == 3
    assert [weight.name for weight in mtp.weights if weight.tied] == ["embedding.word_embeddings.weight"]
    tied = describe(replace(LLAMA, mtp_num_layers=1, tie_embeddings=True), T).runs[-1].layer
    assert [weight.name for weight in tied.weights if weight.tied] == ["output_layer.weight"]


# ---- the same in torch's own operations


def kernels(layer: LayerSpec, word: str) -> list[tuple[float, float]]:
    """(elements a token, bytes of each) of an operation's kernels that move something, and how many there are."""
    found = [op for op in layer.ops if isinstance(op, Pointwise) and op.name.endswith(word)]
    assert all(op.elements == op.moved == 0 for op in found[1:])
    return [(found[0].elements / T, found[0].moved), (len(found), 0)]


def test_transformers_layers_are_separate_linears_and_kernels() -> None:
    layer = hugging_face(describe(LLAMA, T)).kind("decoder")
    assert [row(op) for op in layer.ops if isinstance(op, Gemm | Enter | Exit)] == [
        ("enter", 60), ("linear_qkv", 1, 60, 48, "column"), ("enter", 60), ("linear_qkv", 1, 60, 24, "column"), ("enter", 60),
        ("linear_qkv", 1, 60, 24, "column"), ("linear_proj", 1, 48, 60, "row"), ("exit", 60), ("enter", 60),
        ("linear_fc1", 1, 60, 50, "column"), ("enter", 60), ("linear_fc1", 1, 60, 50, "column"), ("linear_fc2", 1, 50, 60, "row"),
        ("exit", 60),
    ]  # fmt: skip
    assert [len(op.saves) for op in layer.ops if isinstance(op, Gemm)] == [1, 0, 0, 1, 1, 0, 1], "one input is kept once"
    assert kernels(layer, "input_layernorm") == [(60, 36), (8, 0)]
    assert kernels(layer, "rotary") == [(72, 20), (10, 0)]
    assert kernels(layer, "mlp.activation") == [(50, 10), (2, 0)]
    assert kernels(layer, "self_attn_bda") == [(60, 6), (1, 0)]
    saved = {one.name: (one.elements / T, one.itemsize) for one in layer.saved(flash_attention=True)}
    assert saved["input_layernorm.input"] == (60, 4)
    assert saved["input_layernorm.normalised"] == (60, 2)
    assert (saved["mlp.activation.input"], saved["mlp.activation.output"]) == ((100, None), (50, None))
    plain = hugging_face(describe(GPT, T)).kind("decoder")
    assert [row(op)[3] for op in plain.ops if isinstance(op, Gemm)] == [96, 60, 50, 60], "GPT-2's are one"
    assert kernels(plain, "self_attn_bda") == [(60, 11), (2, 0)]
    assert kernels(plain, "input_layernorm") == [(60, 4), (1, 0)]
    phi = hugging_face(describe(replace(LLAMA, family="phi3"), T)).kind("decoder")
    assert [row(op)[3] for op in phi.ops if isinstance(op, Gemm)] == [96, 60, 100, 60]


def test_transformers_heads_have_the_whole_vocabulary() -> None:
    """101 ids; divided by AutoTP where they are untied, and then gathered: half an all-reduce of them."""
    head = hugging_face(describe(LLAMA, T)).kind("head")
    assert [row(op) for op in head.ops if isinstance(op, Gemm | Enter | Exit)] == [
        ("enter", 60), ("output_layer", 1, 60, 101, "column"), ("exit", 101 * T // 2 / T),
    ]  # fmt: skip
    assert [padded(op.n, op.pad_to, 1) for op in head.ops if isinstance(op, Gemm)] == [101], "an odd vocabulary stays odd"
    assert [(weight.shape, weight.local_shape(1)) for weight in head.weights if weight.kind == "embedding"] == [((101, 60), (101, 60))]
    loss = next(op for op in head.ops if isinstance(op, Pointwise) and op.name == "cross_entropy")
    assert (loss.elements / T, loss.moved, loss.moved_backward, loss.shard) == (101, 22, 30, "none")
    for a in (GPT, replace(LLAMA, tie_embeddings=True)):
        tied = hugging_face(describe(a, T)).kind("head")
        assert [row(op) for op in tied.ops if isinstance(op, Gemm | Enter | Exit)] == [("output_layer", 1, 60, 101, None)]
        assert [weight.split for weight in tied.weights if weight.kind == "embedding"] == [None]
    assert not any(isinstance(op, Exit) for op in hugging_face(describe(LLAMA, T)).kind("embedding").ops)
    t5 = replace(LLAMA, family="t5", num_query_groups=6, decoder_num_layers=2, position_embedding="relative", tie_embeddings=True)
    megatron, theirs = (model.kind("head") for model in (describe(t5, T, 4), hugging_face(describe(t5, T, 4))))
    assert len(megatron.weights) - len(theirs.weights) == 1, "the head's bias"
    narrow = {one.name: one.itemsize for one in hugging_face(describe(t5, T, 4)).kind("encoder").saved(flash_attention=True)}
    assert [narrow[f"input_layernorm.{name}"] for name in ("input", "normalised", "narrow")] == [4, 2, 2]
    cross = hugging_face(describe(t5, T, 4)).kind("decoder").ops
    assert [op.n for op in cross if isinstance(op, Gemm) and op.name == "cross_attention.linear_kv"] == [48, 48]


def test_transformers_experts_and_states_keep_what_their_kernels_make() -> None:
    moe = replace(LLAMA, feed_forward=Experts(num_experts=5, topk=2, ffn_hidden_size=11))
    saved = {one.name: one.elements / T for one in hugging_face(describe(moe, T)).runs[1].layer.saved(flash_attention=True)}
    assert (saved["mlp.experts.activation.output"], saved["moe.output"]) == (22, 120)
    every = replace(moe, feed_forward=Experts(num_experts=5, topk=2, ffn_hidden_size=11, scores_on_input=True))
    grouped = [op.tokens / T for op in hugging_face(describe(every, T)).runs[1].layer.ops if isinstance(op, Gemm) and op.experts]
    assert grouped == [5, 5], "every token goes to every expert"
    mixer = Mamba2(num_heads=4, head_dim=5, state_size=3, num_groups=2, conv_kernel=2, chunk_size=2)
    states = replace(LLAMA, family="mamba2", position_embedding="none", mixer=mixer, feed_forward=Nothing())
    layer = hugging_face(describe(states, T)).runs[1].layer
    scan = next(op for op in layer.ops if isinstance(op, Scan))
    assert scan.groups == 4, "B and C are repeated for each head"
    kept = {one.name.rpartition(".")[2]: (one.elements, one.itemsize) for one in scan.saves}
    pairs, of_states, channels, chunks = 7 * 2 * 4, 7 * 4 * 3, 7 * 4 * 5, 4 * 4 * 5 * 3
    assert kept == {
        "input": (7 * 56, None), "convolved": (7 * 32, None), "pairs": (3 * pairs, 4), "states": (5 * of_states, 4),
        "channels": (10 * channels, 4), "chunks": (2 * chunks, 4),
    }  # fmt: skip
    assert kernels(layer, "scan.torch") == [((pairs + of_states + channels) / T, 48), (60, 0)]
    assert kernels(layer, "mixer.norm") == [(20, 46), (10, 0)]


def test_a_separate_gate_keeps_the_activated_gate() -> None:
    one, other = describe(LLAMA, T), with_separate_gate(describe(LLAMA, T))
    assert other.kind("decoder").saved_bytes() - one.kind("decoder").saved_bytes() == 2 * 50 * T
    assert with_separate_gate(describe(GPT, T)) == describe(GPT, T)
    assert [divides_head(a) for a in (LLAMA, GPT, replace(LLAMA, tie_embeddings=True), replace(GPT, tie_embeddings=False))] == [
        True, False, False, False,
    ]  # fmt: skip
    assert [is_gpt2(a) for a in (LLAMA, GPT, replace(GPT, family="bert"))] == [False, True, False]
