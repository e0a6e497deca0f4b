"""What follows from several choices at once: kernels, padding, recompute, data; what is refused and noted. Single choices: tests/words."""

from __future__ import annotations

from typing import Any

import pytest
from hand_plans import BARE, BERT, GPT, LLAMA, T5, engine_fields, make_plan, training_for
from msgspec.structs import replace

from orchestrator.cost.replicas import own_bucket
from orchestrator.engines import ENGINES, megatron_args, megatron_parts
from orchestrator.engines import transformer_config as tc
from orchestrator.errors import InputError
from orchestrator.hardware.spec import Software
from orchestrator.model.architecture import Architecture
from orchestrator.model.parts.attention import GroupedQueryAttention
from orchestrator.model.parts.experts import Experts
from orchestrator.model.parts.latent_attention import LatentAttention
from orchestrator.plan import LayerSpan, Plan, RunSettings, Source
from orchestrator.words.terms import say

WAS = "-"
"""A field or flag that is not there."""
SIX = Experts(num_experts=6, topk=2, ffn_hidden_size=32)


def differences(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """What the second has in place of the first."""
    names = [*one, *(name for name in other if name not in one)]
    return {name: other.get(name, WAS) for name in names if one.get(name, WAS) != other.get(name, WAS)}


def flags(plan: Plan) -> dict[str, Any]:
    """Values by flag; True of a flag without any."""
    return {name: values[0] if len(values) == 1 else values or True for name, *values in megatron_args.megatron_flags(plan)}


def llama(**choices: Any) -> Plan:
    return make_plan(model=LLAMA, **choices)


def trained(a: Architecture = LLAMA, **fields: Any) -> Plan:
    return make_plan(model=a, training=training_for(a, **fields))


def test_models() -> None:
    base = make_plan(model=LLAMA)
    rotary = say(tc.MODEL, make_plan(model=replace(LLAMA, rope_scaling_factor=8.0)))
    assert (rotary["rope_scaling"], rotary["rope_scaling_factor"], rotary["rotary_base"]) == (True, 8.0, 10000)
    assert say(tc.MODEL, base)["rope_scaling"] is False
    assert {"rotary_percent", "rotary_base", "rope_scaling"}.isdisjoint(say(tc.MODEL, make_plan(model=GPT)))
    bert = say(tc.MODEL, make_plan(model=replace(BERT, position_embedding="rope")))
    assert (bert["num_tokentypes"], bert["add_binary_head"]) == (2, False)
    assert {"rotary_base", "rope_scaling"}.isdisjoint(bert)
    assert say(tc.MODULE, make_plan(model=T5)) == {
        "class": "T5Model", "implementation": "transformer_engine", "encoder_num_layers": 4, "decoder_num_layers": 4,
    }  # fmt: skip
    assert say(tc.MODULE, base) == {"class": "GPTModel", "implementation": "transformer_engine"}


def test_a_vocabulary_is_padded_once_however_it_is_divided() -> None:
    """500 to a multiple of 128; of 1, as it stands; tp=3 makes the multiple 384."""
    for unit, tp, size, divisor in (
        (128, 1, 512, 128),
        (128, 2, 512, 64),
        (128, 3, 768, 128),
        (1, 1, 500, 1),
        (1, 3, 501, 1),
        (6, 4, 504, 3),
    ):
        plan = make_plan(model=replace(LLAMA, make_vocab_size_divisible_by=unit), tp=tp, world=12)
        assert (tc.padded_vocab_size(plan), tc.vocab_divisor(plan)) == (size, divisor)
        assert -(-500 // (divisor * tp)) * divisor * tp == size, "as Megatron pads: to a multiple of this times tp"


def test_fused_kernels_are_those_that_software_and_machine_have() -> None:
    names = ("gradient_accumulation_fusion", "bias_activation_fusion", "bias_dropout_fusion", "masked_softmax_fusion", "persist_layer_norm",
             "apply_rope_fusion", "use_cpu_initialization", "transformer_impl")  # fmt: skip

    def found(plan: Plan) -> list[Any]:
        return [engine_fields(plan)["transformer_config"][name] for name in names]

    te, local = "transformer_engine", "local"
    windowed = replace(LLAMA, mixer=GroupedQueryAttention(window=8))
    assert found(llama()) == [True, True, True, True, True, True, False, te]
    assert found(llama(software=BARE)) == [False, True, True, False, False, False, False, local]
    assert found(llama(software=replace(BARE, apex=True))) == [True, True, True, True, True, False, False, local]
    assert found(llama(software=Software(), gpu="cpu")) == [False, False, False, False, False, False, True, local]
    assert found(make_plan(model=windowed)) == [True, True, True, False, True, True, False, te]
    assert found(make_plan(model=GPT))[5] is False, "no rotary positions"
    assert found(make_plan(model=replace(GPT, add_bias_linear=False)))[1] is False, "no bias to fuse"
    assert found(make_plan(model=replace(GPT, activation="relu")))[1] is False
    assert engine_fields(make_plan("megatron_deepspeed", LLAMA))["transformer_config"]["gradient_accumulation_fusion"] is False
    off = {"--no-gradient-accumulation-fusion": True, "--no-masked-softmax-fusion": True, "--no-persist-layer-norm": True}
    assert differences(flags(llama()), flags(llama(software=BARE))) == off | {"--transformer-impl": local, "--no-rope-fusion": True}
    assert differences(flags(llama()), flags(llama(software=replace(BARE, transformer_engine=True)))) == off
    assert "--spec" not in flags(make_plan(model=BERT))
    assert flags(make_plan(model=BERT, software=BARE))["--spec"] == local


def test_experts() -> None:
    base = make_plan(model=replace(LLAMA, feed_forward=SIX))
    for gpu, software, grouped, fused in (
        ("V100-SXM2-16GB", Software(), False, True), ("A100-SXM-40GB", Software(), True, True), ("H200", BARE, False, False),
    ):  # fmt: skip
        fields = engine_fields(make_plan(model=base.model, gpu=gpu, software=software))["transformer_config"]
        assert (fields["moe_grouped_gemm"], fields["moe_permute_fusion"]) == (grouped, fused)
    apart = make_plan(model=base.model, moe_permute_fusion=False)
    assert engine_fields(apart)["transformer_config"]["moe_permute_fusion"] is False
    assert differences(flags(apart), flags(base)) == {"--moe-permute-fusion": True}
    overlapped = make_plan(model=base.model, overlap_moe_expert_parallel_comm=True)
    assert tc.recompute_modules(base, ("mlp",)) == ["mlp", "moe"]
    assert tc.recompute_modules(overlapped, ("mla_up_proj", "mlp")) == ["mla_up_proj", "mlp"], "its schedule calls no layer of experts"
    assert tc.recompute_modules(base, ("core_attn",)) == tc.recompute_modules(llama(), ("core_attn",)) == ["core_attn"]
    assert tc.recompute_modules(llama(), ("mlp",)) == ["mlp"]
    assert megatron_parts.pattern([1]) == "([1]*1)"


# ---- recompute


def recomputed(*stages: list[tuple[str, int]], model: Architecture = LLAMA, vpp: int = 1) -> Plan:
    """Runs of (mode, layers) by stage, or by chunk of one stage."""
    plan = make_plan(model=model, pp=1 if vpp > 1 else len(stages), world=8)
    spans: list[list[LayerSpan]] = []
    first = 0
    for number, runs in enumerate(stages):
        found = []
        for mode, count in runs:
            found.append(LayerSpan(kind="decoder", first=first, count=count, recompute=mode, chunk=number if vpp > 1 else 0))  # type: ignore[arg-type]
            first += count
        spans.append(found)
    if vpp > 1:
        spans = [[span for found in spans for span in found]]
    return replace(plan, vpp=vpp, stages=tuple(replace(plan.stages[0], layers=tuple(found)) for found in spans))


def test_a_stage_recomputes_its_first_layers_or_the_same_modules_in_all() -> None:
    def block(number: int | None) -> dict[str, Any]:
        return {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": number, "recompute_modules": None}

    def fields(*stages: list[tuple[str, int]], **more: Any) -> dict[str, Any]:
        return tc.recompute_fields(recomputed(*stages, **more), 0)

    off = dict.fromkeys(("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules"))
    assert fields([("none", 8)]) == off
    assert fields([("full", 8)]) == block(8)
    assert fields([("full", 3), ("none", 5)]) == block(3)
    assert fields([("full", 2), ("none", 4)], [("full", 1)], vpp=2) == block(2), "the second chunk has one layer only"
    assert fields([("full", 1)], [("full", 2), ("none", 4)], vpp=2) == block(2)
    selective = off | {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    assert fields([("selective", 8)]) == selective
    for wrong, more in (
        ([[("none", 1), ("full", 7)]], {}), ([[("full", 1), ("none", 3)], [("none", 4)]], {"vpp": 2}),
        ([[("none", 4)], [("full", 1), ("none", 3)]], {"vpp": 2}), ([[("full", 2), ("none", 2)], [("full", 1), ("none", 3)]], {"vpp": 2}),
        ([[("full", 1), ("none", 1), ("full", 6)]], {}), ([[("selective", 4), ("none", 4)]], {}), ([[("full", 4), ("selective", 4)]], {}),
    ):  # fmt: skip
        with pytest.raises(InputError, match=r"stages\[0\].recompute="):
            fields(*wrong, **more)


def test_the_command_line_says_one_recompute_for_all_stages() -> None:
    def said(*stages: list[tuple[str, int]]) -> Any:
        found = tc.common_recompute(recomputed(*stages))
        return None if found is None else {name: value for name, value in found.items() if value is not None}

    block = {"recompute_granularity": "full", "recompute_method": "block"}
    assert said([("none", 4)], [("none", 4)]) == {}
    assert said([("full", 2), ("none", 2)], [("full", 2), ("none", 2)]) == block | {"recompute_num_layers": 2}
    assert said([("full", 3), ("none", 1)], [("full", 2)]) == block | {"recompute_num_layers": 3}, "the second stage has two layers"
    assert said([("full", 3), ("none", 1)], [("full", 2), ("none", 2)]) is None
    assert said([("full", 1), ("none", 3)], [("none", 4)]) is None
    assert said([("selective", 4)], [("none", 4)]) is None
    assert said([("selective", 4)], [("selective", 4)])["recompute_modules"] == ["core_attn"]


# ---- data


def running(**fields: Any) -> Plan:
    return replace(llama(), run=RunSettings(**fields))


def test_data_is_megatrons_own_where_all_of_it_is() -> None:
    text, indexed = "/a.txt", "/x.idx"
    blend = (Source(weight=0.7, path=indexed), Source(weight=0.3, path=indexed))
    mixed = (Source(weight=0.7, path=indexed), Source(weight=0.3, path=text))
    for fields, whole in (
        ({}, False), ({"data": text}, False), ({"data": indexed}, True), ({"data": "/x.bin"}, True), ({"blend": blend}, True),
        ({"blend": mixed}, False), ({"data": indexed, "valid": text}, False), ({"data": indexed, "valid": indexed}, True),
    ):  # fmt: skip
        assert megatron_args.reads_indexed_data(running(**fields)) is whole, fields  # type: ignore[arg-type]
    mock = "megatron_args.sh uses mock data: Megatron reads only its own indexed format."
    for fields, told in (
        ({}, False), ({"data": text}, True), ({"data": indexed}, False), ({"blend": mixed}, True), ({"blend": blend}, False),
    ):  # fmt: skip
        assert (mock in megatron_args.notes(running(**fields))) is told, fields  # type: ignore[arg-type]


def test_flags_of_data_evaluation_and_saving() -> None:
    base, indexed = running(), "/x.idx"
    own = {"--mock-data": WAS, "--data-path": "/x"}
    blend = (Source(weight=0.7, path=indexed), Source(weight=0.3, path="/y.bin"))
    tokens = {"--tokenizer-type": "HuggingFaceTokenizer", "--vocab-size": WAS, "--tokenizer-model": "/t", "--padded-vocab-size": "512"}
    for fields, said in (
        ({"data": indexed}, own),
        ({"blend": blend}, own | {"--data-path": ["0.7", "/x", "0.3", "/y"]}),
        (
            {"data": indexed, "valid": "/v.idx"},
            {"--mock-data": WAS, "--train-data-path": "/x", "--valid-data-path": "/v", "--split": WAS},
        ),
        ({"data": indexed, "split": (9.0, 1.0)}, own | {"--split": "9,1,0"}),
        ({"split": (9.0, 0.5, 0.5)}, {"--split": "9,0.5,0.5"}),
        ({"data": indexed, "tokenizer": "/t"}, own | tokens),
        ({"tokenizer": "/t"}, {}),
        ({"eval_every": 5, "eval_steps": 3}, {"--eval-interval": "5", "--eval-iters": "3"}),
        ({"eval_steps": 3}, {}),
        ({"save_every": 4}, {"--save": "checkpoints", "--load": "checkpoints", "--save-interval": "4", "--ckpt-format": "torch_dist"}),
        ({"wandb": {"project": "p"}}, {"--wandb-project": "p", "--wandb-exp-name": LLAMA.name}),
        ({"wandb": {"project": "p", "name": "n", "entity": "e"}}, {"--wandb-project": "p", "--wandb-exp-name": "n", "--wandb-entity": "e"}),
    ):
        assert differences(flags(base), flags(running(**fields))) == said, fields  # type: ignore[arg-type]
    fsdp = replace(llama(megatron_fsdp=True, zero_stage=3), run=RunSettings(save_every=4))
    assert flags(fsdp)["--ckpt-format"] == "fsdp_dtensor"


# ---- what the command line can't say


def test_a_command_line_is_refused_for_each_thing_that_it_can_not_say() -> None:
    def why(plan: Plan) -> str:
        return megatron_args.why_not(plan) or ""

    assert why(llama()) == why(llama(zero_stage=0)) == why(llama(zero_stage=3, megatron_fsdp=True)) == ""
    assert why(make_plan(model=LLAMA, zero_stage=0, training=training_for(LLAMA, optimizer="sgd"))) == ""
    differing = recomputed([("selective", 4)], [("none", 4)])
    for plan, said in (
        (llama(zero_stage=2), "has no zero_stage=2 with these groups"),
        (make_plan(model=LLAMA, training=training_for(LLAMA, optimizer="sgd")), "distributed optimizer takes Adam only"),
        (trained(grad_reduce_dtype="bf16"), "sums and reduces gradients in one type"),
        (trained(seed=0), "takes no seed=0"),
        (
            trained(warmup=20),
            "ends the warm-up before the last step (core/optimizer_param_scheduler.py:157): train.warmup=20 of",
        ),
        (differing, "has one recompute setting for all stages, and the plan's differ"),
        (make_plan(model=replace(T5, activation="geglu")), "has no flag for activation=geglu"),
    ):
        assert said in why(plan), said
    assert why(trained(seed=1)) == why(trained(warmup=19)) == ""
    parts = replace(LLAMA, family="gpt_oss", activation="clamped_swiglu", feed_forward=SIX, mixer=GroupedQueryAttention(sinks=True))
    stretched = {"rope_scaling_factor": 40.0, "rope_scaling_type": "yarn"}
    assert "scales rotary positions by 8, not 40" in why(make_plan(model=replace(LLAMA, rope_scaling_factor=40.0)))
    latent = LatentAttention(kv_lora_rank=16, qk_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, q_lora_rank=32, yarn_mscale=1.0)
    deepseek = make_plan(model=replace(LLAMA, mixer=latent, **stretched))
    assert why(deepseek) == ""
    said = dict(flag for flag in megatron_args.megatron_flags(deepseek) if len(flag) == 2)
    assert (said["--rope-type"], said["--rotary-scaling-factor"]) == ("yarn", "40.0"), "as NVIDIA's own files of DeepSeek-R1 say it"
    assert "--rope-scaling-factor" not in said
    for version in ("0.16.1", "0.19.2"):
        assert why(make_plan(model=parts, software=Software(megatron_core=version))) == "", "every release has sinks and the clamp"


def test_a_bucket_s_size_is_said_where_it_is_pinned_and_a_cpu_overlaps_nothing() -> None:
    """Otherwise it is Megatron's own, which the price has: the larger of 40 million and a million a rank (distributed_data_parallel.py)."""

    def ddp(**choices: Any) -> Any:
        return engine_fields(llama(**choices))["ddp"]

    assert "bucket_size" not in ddp(world=8)
    assert ddp(world=8, ddp_bucket_size=7)["bucket_size"] == 7
    traits = ENGINES["megatron"].traits(Software())
    assert [own_bucket(traits, ranks) for ranks in (8, 40, 64, 128)] == [40_000_000, 40_000_000, 64_000_000, 128_000_000]
    assert ddp(world=2, cp=2)["overlap_grad_reduce"] is True, "gradients are summed over cp too"
    assert ddp(gpu="cpu")["overlap_grad_reduce"] is ddp(world=1)["overlap_grad_reduce"] is False


def test_nodes_are_filled_and_one_connection_is_for_older_gpus() -> None:
    assert [megatron_args.shape(llama(world=world)) for world in (4, 8, 16)] == [(1, 4), (1, 8), (2, 8)]
    for choices, asserted in (
        ({"tp": 2}, True), ({"cp": 2}, True), ({}, False), ({"tp": 2, "gpu": "B200"}, False), ({"tp": 2, "gpu": "cpu"}, False),
        ({"tp": 2, "megatron_fsdp": True, "zero_stage": 3}, False), ({"tp": 2, "overlap_moe_expert_parallel_comm": True}, False),
    ):  # fmt: skip
        assert megatron_args.one_connection(llama(**choices)) is asserted, choices  # type: ignore[arg-type]
    assert megatron_args.predicted_line(llama()) == []


def test_notes_say_what_a_command_line_does_otherwise_and_no_more() -> None:
    def told(plan: Plan) -> list[str]:
        words = {"has no mock data": "mock", "without segment embeddings": "segments", "uses mock data": "text",
                 "itself needs GPUs": "cpu"}  # fmt: skip
        return [short for note in megatron_args.notes(plan) for word, short in words.items() if word in note]

    assert told(llama()) == []
    assert told(make_plan(model=BERT)) == ["mock", "segments"]
    assert told(make_plan(model=replace(BERT, num_token_types=0))) == ["mock"]
    assert told(make_plan(model=T5)) == ["mock"]
    assert told(make_plan(model=replace(LLAMA, family="mistral", num_token_types=2))) == [], "segments are BERT's"
    assert told(make_plan(model=LLAMA, gpu="cpu")) == ["cpu"]
    assert told(running(data="/a.txt")) == ["text"]
