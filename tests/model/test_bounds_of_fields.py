"""What an architecture may say: each field on both sides of its bound, and parts that go together or don't."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from orchestrator.errors import InputError
from orchestrator.model.architecture import Architecture, Run
from orchestrator.model.families import FAMILIES, describe, from_hf_config, has_reader, of_traced, other_head
from orchestrator.model.families.check import check_architecture, check_lengths
from orchestrator.model.families.decoder import rope, windowed
from orchestrator.model.families.hf import HfConfig
from orchestrator.model.hugging_face import hugging_face
from orchestrator.model.layer import LayerRun, LayerSpec
from orchestrator.model.lora import Lora, check_targets, linear_names, target_names, trainable_parameters, with_lora
from orchestrator.model.ops import Enter, Exit, Gemm, Pointwise, Weight
from orchestrator.model.parts.attention import GroupedQueryAttention
from orchestrator.model.parts.experts import Experts
from orchestrator.model.parts.gated_delta_net import GatedDeltaNet
from orchestrator.model.parts.mamba2 import Mamba2
from orchestrator.model.parts.mlp import Mlp
from orchestrator.model.parts.part import Nothing
from orchestrator.model.traced import Descriptions, Feed, Traced

LLAMA = Architecture(
    family="llama",
    name="x",
    num_layers=4,
    hidden_size=64,
    num_attention_heads=8,
    num_query_groups=4,
    ffn_hidden_size=96,
    vocab_size=100,
    max_position_embeddings=64,
    activation="swiglu",
    normalization="RMSNorm",
    position_embedding="rope",
    add_bias_linear=False,
    tie_embeddings=False,
)
GPT = replace(
    LLAMA,
    family="gpt",
    activation="gelu",
    normalization="LayerNorm",
    position_embedding="learned_absolute",
    add_bias_linear=True,
    num_query_groups=None,
)
BERT = replace(GPT, family="bert")
T5 = replace(LLAMA, family="t5", position_embedding="relative", num_query_groups=None, decoder_num_layers=2, activation="relu")
MAMBA = Mamba2(num_heads=8, head_dim=4, state_size=4, num_groups=2)
NET = GatedDeltaNet(num_key_heads=2, num_value_heads=4)
SIX = Experts(num_experts=6, topk=2, ffn_hidden_size=32)


def refused(a: Architecture) -> str:
    """What is said against it; "" of a sound one."""
    try:
        check_architecture(a, FAMILIES[a.family])
    except InputError as error:
        return str(error)
    return ""


def test_the_models_of_this_file_are_sound() -> None:
    for a in (LLAMA, GPT, BERT, T5, replace(LLAMA, feed_forward=SIX), replace(LLAMA, mixer=MAMBA), replace(LLAMA, mixer=NET)):
        assert refused(a) == ""


def test_counts_are_above_nothing_and_shares_below_one() -> None:
    for name in (
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "ffn_hidden_size",
        "vocab_size",
        "max_position_embeddings",
        "num_query_groups",
        "kv_channels",
        "norm_epsilon",
        "rotary_base",
        "rope_scaling_factor",
        "make_vocab_size_divisible_by",
    ):
        for value in (0, -1):
            assert refused(replace(LLAMA, **{name: value})) == f"model.{name}={value}: must be above 0"
    assert refused(replace(LLAMA, rope_scaling_factor=0.5)) == refused(replace(LLAMA, kv_channels=1)) == ""
    for name in ("decoder_num_layers", "num_token_types", "mtp_num_layers"):
        assert refused(replace(LLAMA, **{name: -1})) == f"model.{name}=-1: must not be negative"
    for name in ("hidden_dropout", "attention_dropout"):
        assert refused(replace(LLAMA, **{name: 0.99})) == ""
        for value in (-0.1, 1.0):
            assert refused(replace(LLAMA, **{name: value})) == f"model.{name}={value}: must be a probability below 1"
    assert refused(replace(LLAMA, rotary_percent=1e-3)) == ""
    for value in (0.0, 1.01):
        assert refused(replace(LLAMA, rotary_percent=value)).startswith(f"model.rotary_percent={value}: must be above 0 and at most 1")


def test_heads_and_stacks_fit_together() -> None:
    assert refused(replace(LLAMA, num_attention_heads=12, kv_channels=8)) == ""
    for a, why in (
        (replace(LLAMA, num_attention_heads=12), "model.num_attention_heads=12: does not divide hidden_size=64; give kv_channels"),
        (replace(LLAMA, num_query_groups=3), "model.num_query_groups=3: does not divide num_attention_heads=8"),
        (replace(T5, decoder_num_layers=0), "model.decoder_num_layers=0: must be above 0: the t5 family has a decoder"),
        (replace(T5, num_query_groups=4), "model.num_query_groups=4: cross-attention takes num_attention_heads=8 groups only"),
        (replace(LLAMA, decoder_num_layers=1), "model.decoder_num_layers=1: must be 0: the llama family has one stack, num_layers"),
        (replace(BERT, mixer=MAMBA), "model.mixer="),
        (replace(BERT, mtp_num_layers=1), "model.mtp_num_layers=1: is for decoders"),
        (replace(T5, pattern=(Run(layers=1),)), "model.pattern="),
        (replace(BERT, feed_forward=SIX), "model.feed_forward=experts: is for"),
        (replace(LLAMA, pattern=(Run(layers=1), Run(layers=0))), "model.pattern[1].layers=0: must be above 0"),
        (replace(LLAMA, position_embedding="learned_absolute"), "model.position_embedding=learned_absolute: is not in the llama family"),
    ):
        assert refused(a).startswith(why), refused(a)


def test_parts_are_sound_by_themselves() -> None:
    def mixer(part: Any) -> str:
        return refused(replace(LLAMA, mixer=part))

    def feed(**fields: Any) -> str:
        return refused(replace(LLAMA, feed_forward=replace(SIX, **fields)))

    assert mixer(GroupedQueryAttention(window=1)) == mixer(GroupedQueryAttention(chunk=1)) == ""
    for value in (0, -1):
        assert mixer(GroupedQueryAttention(window=value)) == f"model.attention.window={value}: must be above 0"
        assert feed(ffn_hidden_size=value) == f"model.experts.ffn_hidden_size={value}: must be above 0"
    assert mixer(GroupedQueryAttention(window=4, chunk=4)) == "model.attention.chunk=4: with window=4: a layer has one of them"
    assert feed(shared_ffn_hidden_size=0) == feed(aux_loss_coeff=0.0) == ""
    assert feed(shared_ffn_hidden_size=-1) == "model.experts.shared_ffn_hidden_size=-1: must be above 0"
    assert feed(num_experts=64, topk=6, groups=16, group_topk=2) == feed(num_experts=64, topk=6, groups=8, group_topk=8) == ""
    few = feed(num_experts=64, topk=6, groups=16, group_topk=1)
    assert few == "model.experts.group_topk=1: leaves 4 experts, 4 in a group, of which a token takes topk=6"
    assert feed(num_experts=64, topk=6, groups=8, group_topk=9) == "model.experts.group_topk=9: is above groups=8"
    assert mixer(replace(MAMBA, num_groups=3)) == "model.mamba2.num_groups=3: does not divide num_heads=8"
    assert mixer(replace(NET, num_key_heads=3)) == "model.gated_delta_net.num_key_heads=3: does not divide num_value_heads=4"
    assert refused(replace(LLAMA, mixer=Nothing(), feed_forward=Nothing())).startswith("model.mixer=none: with feed_forward none")
    assert refused(replace(LLAMA, mixer=Nothing())) == refused(replace(LLAMA, feed_forward=Nothing())) == ""
    for fields, why in (
        ({"topk": 6}, ""),
        ({"topk": 7}, "model.experts.topk=7: is above num_experts=6"),
        ({"groups": 3, "group_topk": 1}, ""),
        ({"groups": 3}, "model.experts.group_topk: goes with groups=3: give both or none"),
        ({"group_topk": 3}, "model.experts.group_topk=3: goes with groups=None: give both or none"),
        ({"groups": 4, "group_topk": 1}, "model.experts.groups=4: does not divide num_experts=6"),
        ({"capacity_factor": 3.0}, ""),
        ({"capacity_factor": 3.1}, "model.experts.capacity_factor=3.1: must be above 0 and at most"),
        ({"pad_to_capacity": True}, "model.experts.pad_to_capacity=true: needs capacity_factor"),
        ({"pad_to_capacity": True, "capacity_factor": 1.0}, ""),
    ):
        said = feed(**fields)
        assert said.startswith(why), (fields, said)
        assert bool(said) is bool(why), fields


def test_lengths_are_of_the_stacks_that_there_are() -> None:
    for a, lengths, why in (
        (LLAMA, (65, None), ""),
        (GPT, (64, None), ""),
        (GPT, (65, None), "train.seq_length=65: is beyond the learned positions"),
        (GPT, (0, None), "train.seq_length=0: must be above 0"),
        (T5, (8, 1), ""),
        (T5, (8, 0), "train.decoder_seq_length=0: must be ab"),
        (T5, (8, None), "train.decoder_seq_length: is missing: the t5 family has a decoder"),
        (LLAMA, (8, 8), "train.decoder_seq_length=8: the llama family has no decoder; leave it out"),
    ):
        try:
            check_lengths(a, *lengths)
            said = ""
        except InputError as error:
            said = str(error)
        assert said.startswith(why), (a.family, lengths, said)
        assert bool(said) is bool(why), (a.family, lengths, said)


# ---- Hugging Face's fields


def test_fields_of_a_config_are_of_their_type() -> None:
    config = HfConfig(
        {"one": 1, "zero": 0, "half": 0.5, "whole": 2.0, "no": None, "true": True, "word": "a", "minus": -1, "inf": float("inf")}
    )
    assert [config.integer(name) for name in ("one", "whole")] == [1, 2]
    assert config.integer("absent", 7) == 7
    assert [config.optional_integer(name) for name in ("one", "no", "absent")] == [1, None, None]
    assert config.optional_integer("absent", 3) == 3
    assert [config.number(name) for name in ("zero", "half", "one")] == [0.0, 0.5, 1.0]
    assert config.flag("true", False) is True
    assert config.flag("absent", False) is False
    assert config.choice("word", ("a", "b")) == config.choice("absent", ("a", "b"), "a") == "a"
    config.refuse_unless("absent", 1, "")
    config.refuse_unless("no", 1, "")
    config.refuse_unless("one", 1, "")
    wrong = [
        *((config.integer, name) for name in ("zero", "half", "no", "true", "word", "minus", "inf", "absent")),
        *((config.number, name) for name in ("minus", "no", "true", "word", "inf", "absent")),
        (config.optional_integer, "zero"),
    ]
    for read, name in wrong:
        with pytest.raises(InputError, match=rf"model.hf_config.{name}"):
            read(name)
    for asked in (
        lambda: config.flag("one", True),
        lambda: config.choice("one", (True, 2)),
        lambda: config.choice("absent", ("a",)),
        lambda: config.refuse_unless("one", 2, "why"),
        lambda: config.section("one"),
    ):
        with pytest.raises(InputError, match=r"model\.hf_config\."):
            asked()
    assert config.section("no") is config.section("absent") is None


def test_rotary_positions_are_said_in_the_old_and_in_the_new_way() -> None:
    def found(**fields: Any) -> dict[str, Any]:
        return rope(HfConfig({"max_position_embeddings": 64, **fields}), 500)

    assert found() == {"rotary_base": 500}
    assert (
        found(rope_theta=7) == found(rope_parameters={"rope_theta": 7}) == found(rope_parameters=None, rope_theta=7) == {"rotary_base": 7}
    )
    assert found(rope_theta=7, rope_scaling={"type": "linear", "factor": 2}) == {
        "rotary_base": 7,
        "rope_scaling_type": "linear",
        "rope_scaling_factor": 2.0,
    }
    llama3 = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    assert found(rope_scaling=llama3)["rope_scaling_type"] == "llama3"
    for name, value in (("low_freq_factor", 2.0), ("high_freq_factor", 1.0), ("original_max_position_embeddings", 4096)):
        with pytest.raises(InputError, match=name):
            found(rope_scaling=llama3 | {name: value})
    longrope = {"rope_type": "longrope"}
    assert found(rope_scaling=longrope | {"factor": 3})["rope_scaling_factor"] == 3.0
    assert found(rope_scaling=longrope | {"original_max_position_embeddings": 16})["rope_scaling_factor"] == 4.0
    assert found(rope_scaling=longrope, original_max_position_embeddings=32)["rope_scaling_factor"] == 2.0
    with pytest.raises(InputError, match="rope_type"):
        found(rope_scaling={"rope_type": "dynamic"})
    assert windowed(HfConfig({"num_hidden_layers": 3}), lambda index: index == 1) == [False, True, False]
    assert windowed(HfConfig({"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}), bool) == [True, False]


def test_a_head_that_is_no_vocabulary_has_no_reader() -> None:
    for named, head in (
        (None, None),
        ([], None),
        (["BertModel"], None),
        (["GPT2LMHeadModel"], None),
        (["T5ForConditionalGeneration"], None),
        (["BertForSequenceClassification"], "BertForSequenceClassification"),
        ("BertForMaskedLM", None),
        ([3], None),
    ):
        config = {"model_type": "bert", "architectures": named}
        assert other_head(config) == head
        assert has_reader(config) is (head is None)
    assert has_reader({"model_type": "unheard"}) is False
    for config, why in (
        (
            {"model_type": "bert", "architectures": ["BertForTokenClassification"]},
            "model.hf_config.architectures=BertForTokenClassification",
        ),
        (
            {"model_type": "bert", "quantization_config": {"quant_method": "fp8"}},
            "model.hf_config.quantization_config=fp8: is of",
        ),
        ({"model_type": "bert", "quantization_config": {}}, "model.hf_config.quantization_config=quantised: is of quantised"),
        ({"model_type": "bert", "quantization_config": "int8"}, "model.hf_config.quantization_config=int8: is of quantised"),
        ([], "model.hf_config=x: must be a JSON object, not list"),
    ):
        with pytest.raises(InputError) as caught:
            from_hf_config(config, "x")  # type: ignore[arg-type]
        assert str(caught.value).startswith(why)


# ---- recorded models


def layer(kind: str, recomputable: bool = True, tied: bool = False) -> LayerSpec:
    return LayerSpec(
        kind=kind,
        weights=(Weight(name="w", shape=(2,), tied=tied),),
        ops=(),
        input_elements=1,
        output_elements=1,
        recomputable=recomputable,
    )


SIZES: dict[str, Any] = {
    "seq_length": 8,
    "itemsize": 2,
    "hidden_size": 66,
    "ffn_hidden_size": 9,
    "max_position_embeddings": 7,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "vocab_size": 11,
}


def recorded(**fields: Any) -> Traced:
    return Traced(**({"model_class": "NewForCausalLM", "config": "{}", "feeds": (), "runs": ()} | SIZES | fields))


def test_a_recorded_model_says_its_sizes_as_an_architecture() -> None:
    runs = (LayerRun(layer=layer("a"), count=3), LayerRun(layer=layer("b", False), count=5), LayerRun(layer=layer("c"), count=2))
    a = of_traced(recorded(runs=runs), "mine")
    assert (a.num_layers, a.hidden_size, a.num_attention_heads, a.query_groups, a.head_dim) == (5, 66, 4, 2, 16)
    assert (a.ffn_hidden_size, a.vocab_size, a.max_position_embeddings, a.tie_embeddings) == (9, 11, 7, False)
    assert (a.make_vocab_size_divisible_by, a.position_embedding, a.name) == (1, "none", "mine")
    assert of_traced(recorded(runs=runs[1:2]), "x").num_layers == 1, "no block that is recomputed is one layer"
    assert of_traced(recorded(num_attention_heads=67), "x").head_dim == 1
    assert of_traced(recorded(runs=(LayerRun(layer=layer("a", tied=True), count=1),)), "x").tie_embeddings
    assert describe(a, 8).seq_length == 8
    for lengths, why in (
        ((9, None), "train.seq_length=9: the model's description is of train.seq_length=8"),
        ((8, 4), "train.decoder_seq_length=4: the model's description has none"),
    ):
        with pytest.raises(InputError) as caught:
            describe(a, *lengths)
        assert str(caught.value).startswith(why)
    with pytest.raises(InputError, match=r"the input of NewForCausalLM has one size, which makes train.seq_length=8; leave it out"):
        recorded(fixed_length=True).check_lengths(9, None)
    assert recorded(runs=runs).blocks == ("a", "c")


def test_what_a_recorded_model_reads_follows_from_what_it_is_fed() -> None:
    ids, labels = Feed(name="input_ids", shape=(8,), dtype="int64", high=50), Feed(name="labels", shape=(8,), dtype="int64")
    text, masked = replace(labels, copies="input_ids"), replace(labels, copies="input_ids", every=7)
    pixels, label = Feed(name="pixel_values", shape=(3, 4, 4)), replace(labels, shape=())
    decoder = replace(ids, name="decoder_input_ids")
    for feeds, more, stack in (
        ((ids, text), {}, "decoder"),
        ((ids, masked), {}, "encoder"),
        ((ids, decoder, replace(labels, copies="decoder_input_ids")), {}, "encoder_decoder"),
        ((ids, labels), {}, None),
        ((ids,), {}, None),
        ((pixels, label), {}, None),
        ((pixels, labels), {}, None),
        ((ids, label), {"model_class": "NewForSequenceClassification"}, None),
        ((ids, text), {"model_class": "New"}, None),
        ((ids, text), {"model_class": "New", "config": ""}, "decoder"),
        ((replace(ids, values=(1,)), text), {}, None),
        ((ids, replace(text, joined=True)), {}, None),
    ):
        assert recorded(feeds=feeds, **more).text_stack == stack, (feeds, more)
    assert recorded(feeds=(ids,)).token_ids == 50
    assert recorded(feeds=(replace(ids, values=(1,)),)).token_ids == recorded().token_ids == 0
    drawn = of_traced(recorded(feeds=(pixels, label)), "mine").why_drawn
    assert drawn is not None
    assert drawn.startswith("NewForCausalLM takes pixel_values, labels, which no data here")
    assert recorded(biased_attention=True).features() == ("traced", "attention_bias")
    assert recorded().features() == ("traced",)


def test_a_description_is_found_by_its_lengths_and_its_precision() -> None:
    two, four, fixed = recorded(), recorded(itemsize=4), recorded(itemsize=4, seq_length=3, fixed_length=True)
    found = Descriptions(traced=(two, four))
    assert [found.of(8, None, itemsize) for itemsize in (2, 4, 1)] == [two, four, None]
    assert found.of(9, None, 2) is found.of(8, 1, 2) is None
    assert Descriptions(traced=(fixed,)).of(None, None, 4) == fixed


# ---- adapters


def test_adapters_train_rank_times_both_sides_of_each_linear_that_they_are_on() -> None:
    """q, o: 64 x 64; k, v: 64 x 32; gate, up: 64 x 96; down: 96 x 64; four layers."""
    sides = {"q_proj": 128, "k_proj": 96, "v_proj": 96, "o_proj": 128, "gate_proj": 160, "up_proj": 160, "down_proj": 160}
    model = hugging_face(describe(LLAMA, 8))
    for targets in (("all-linear",), ("q_proj",), ("q_proj", "v_proj"), ("o_proj", "down_proj")):
        lora = Lora(rank=3, targets=targets)
        wanted = sum(side for name, side in sides.items() if name in targets or "all-linear" in targets)
        assert trainable_parameters(with_lora(model, lora)) == 4 * 3 * wanted
        assert target_names(LLAMA, lora) == tuple(name for name in sides if name in targets or "all-linear" in targets)
    assert (Lora(rank=4).scaling, Lora(rank=4, alpha=2.0).scaling) == (2.0, 0.5)


def test_the_names_of_linears_are_those_of_the_class() -> None:
    for a, names in (
        (GPT, ("c_attn", "c_proj", "c_fc")),
        (BERT, ("query", "key", "value", "dense")),
        (T5, ("q", "k", "v", "o", "wi", "wo")),
        (replace(T5, activation="geglu"), ("q", "k", "v", "o", "wi_0", "wi_1", "wo")),
        (replace(LLAMA, family="phi3"), ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
        (replace(LLAMA, activation="relu2"), ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj")),
    ):
        assert tuple(dict.fromkeys(name for found in linear_names(a).values() for name in found)) == names
    check_targets(LLAMA, Lora(rank=4, targets=("all-linear", "q_proj")))
    for targets, why in (
        (("q_prj",), "lora.targets=q_prj: is no linear of transformers' llama models; did you mean q_proj?"),
        ((), "lora.targets=: names no linear"),
        (("q_proj", "x"), "lora.targets=x: is no linear"),
    ):
        with pytest.raises(InputError) as caught:
            check_targets(LLAMA, Lora(rank=4, targets=targets))
        assert str(caught.value).startswith(why), str(caught.value)
    assert isinstance(LLAMA.common_layer.feed_forward, Mlp)


def test_ranks_sum_an_adapters_rank_where_it_meets_a_divided_side() -> None:
    """After A of a linear divided by rows, before B of one divided by columns: rank elements a token; a whole linear sums nothing."""
    model = with_lora(hugging_face(describe(LLAMA, 8)), Lora(rank=3))
    ops = [type(op).__name__ + ("" if not hasattr(op, "name") else f" {op.name.rpartition('.')[2]}") for op in model.kind("decoder").ops]
    sums = [op.elements for op in model.kind("decoder").ops if isinstance(op, Enter | Exit)]
    assert sums.count(8 * 3) == 7, "five by columns, two by rows"
    for index, name in enumerate(ops):
        if name == "Gemm lora_B":
            assert ops[index - 1] in ("Enter", "Exit")
        if name == "Gemm lora_A":
            assert ops[index + 1] in ("Enter", "Exit")
    split = {op.name: op.split for op in model.kind("decoder").ops if isinstance(op, Gemm)}
    assert (split["self_attention.linear_proj.o_proj.lora_A"], split["self_attention.linear_proj.o_proj.lora_B"]) == ("row", None)
    assert (split["self_attention.linear_qkv.q_proj.lora_A"], split["self_attention.linear_qkv.q_proj.lora_B"]) == (None, "column")
    shapes = {weight.name: (weight.shape, weight.split) for weight in model.kind("decoder").weights if "lora" in weight.name}
    assert shapes["mlp.linear_fc2.down_proj.lora_A.weight"] == ((3, 96), 1)
    assert shapes["mlp.linear_fc2.down_proj.lora_B.weight"] == ((64, 3), None)
    assert shapes["mlp.linear_fc1.gate_proj.lora_B.weight"] == ((96, 3), 0)
    added = [
        (op.elements, op.moved, op.shard) for op in model.kind("decoder").ops if isinstance(op, Pointwise) and op.name.endswith("_add")
    ]
    assert added[0] == (8 * 64, 10, "tp"), "times alpha / rank 2 + 2, added 2 + 2 + 2"
    assert [op.moved_backward for op in model.kind("embedding").ops if isinstance(op, Pointwise)] == [0.0]
    assert not any(isinstance(op, Enter | Exit) for op in model.kind("head").ops)
    dropped = with_lora(hugging_face(describe(LLAMA, 8)), Lora(rank=3, dropout=0.1)).kind("decoder")
    masks = [saved for saved in dropped.saved(flash_attention=True) if saved.name.endswith("dropout.mask")]
    assert len(masks) == 7
    assert (masks[0].elements, masks[0].itemsize) == (8 * 64, 1)
    assert all(weight.frozen for weight in dropped.weights if "lora" not in weight.name)


FUSED = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


def test_megatrons_products_have_one_adapter_each() -> None:
    """QKV 64 to 128, the projection 64 to 64, both sides of the gate 64 to 192, back 96 to 64."""
    model = with_lora(describe(LLAMA, 8), Lora(rank=3, targets=FUSED), modules=False)
    assert trainable_parameters(model) == 4 * 3 * (64 + 128 + 64 + 64 + 64 + 192 + 96 + 64)
    assert any(isinstance(op, Enter) for op in model.kind("head").ops), "its head stays divided"
