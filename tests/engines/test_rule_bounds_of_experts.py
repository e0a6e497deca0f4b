"""Rules about experts, ZeRO, pipelines and supervised samples: what is just inside their bounds, and what is just outside."""

from __future__ import annotations

from typing import Any

from hand_plans import BERT, GPT, LLAMA, T5
from msgspec.structs import replace
from test_rule_bounds import LATENT, MOE, SIX, held, pattern, with_host
from test_rules import RULES, workload

from orchestrator.engines.deepspeed import experts as autoep
from orchestrator.engines.deepspeed import fine_tuning as sft
from orchestrator.engines.hf_config import class_of
from orchestrator.engines.rules import experts, pipeline, zero
from orchestrator.hardware.spec import Software
from orchestrator.model.families import describe
from orchestrator.model.lora import Lora
from orchestrator.model.parts.mamba2 import Mamba2
from orchestrator.model.parts.part import Nothing
from orchestrator.model.traced import Feed, Traced

FOUR = replace(SIX, num_experts=4)


def test_experts_are_divided_evenly_over_ranks_that_there_are() -> None:
    held(
        experts.experts,
        (LLAMA, {}, None),
        (MOE, {"ep": 2}, None),
        (MOE, {"ep": 6}, None),
        (LLAMA, {"ep": 2}, "ep=2: a dense model"),
        (MOE, {"ep": 4}, "ep=4 does not divide num_experts=6"),
        (pattern({"feed_forward": SIX}, {"feed_forward": FOUR}), {"ep": 2}, None),
        (pattern({"feed_forward": SIX}, {"feed_forward": FOUR}), {"ep": 6}, "ep=6 does not divide num_experts=4"),
    )
    held(
        RULES["experts_etp"],
        (LLAMA, {}, None),
        (MOE, {"etp": 32}, None),
        (LLAMA, {"etp": 2}, "etp=2: a dense model"),
        (MOE, {"etp": 64}, "etp=64 does not divide the experts' ffn_hidden_size=32"),
    )
    held(
        RULES["experts_ep1"],
        (LLAMA, {"tp": 2}, None),
        (MOE, {"tp": 2, "etp": 2}, None),
        (MOE, {"tp": 2, "ep": 2}, None),
        (MOE, {}, None),
        (MOE, {"tp": 2}, "ep=1 with etp=1 and tp=2"),
    )
    held(
        experts.experts_fold,
        (MOE, {"ep": 8}, None),
        (MOE, {"ep": 2, "etp": 4}, None),
        (MOE, {"ep": 16, "cp": 2}, None),
        (MOE, {"ep": 16}, "ep*etp=16 does not divide tp*cp*dp=8"),
        (MOE, {"ep": 16, "tp": 2}, None),
    )
    held(
        RULES["experts_sp"],
        (LLAMA, {"tp": 2}, None),
        (MOE, {}, None),
        (MOE, {"tp": 2, "sequence_parallel": True}, None),
        (MOE, {"tp": 2}, "tp=2: experts with tensor parallelism"),
    )
    biased = replace(MOE, add_bias_linear=True)
    held(
        RULES["experts_biases"],
        (biased, {}, None),
        (MOE, {"tp": 2}, None),
        (replace(LLAMA, add_bias_linear=True), {"tp": 2}, None),
        (biased, {"tp": 2}, "tp=2 etp=1 with biases"),
        (biased, {"etp": 2}, "tp=1 etp=2 with biases"),
    )


def test_kinds_of_experts_are_those_that_a_router_can_learn() -> None:
    def with_scores(**fields: Any) -> Any:
        return replace(LLAMA, feed_forward=replace(SIX, **fields))

    one, several = "topk=1 with scores made to sum to one", "sigmoid scores that are not made to sum to one"
    held(
        experts.expert_kinds,
        (LLAMA, {}, None),
        (MOE, {}, None),
        (with_scores(topk=1), {}, one),
        (with_scores(topk=1, normalized=False), {}, None),
        (with_scores(topk=1, score="sigmoid", normalized=False), {}, None),
        (with_scores(topk=1, score="sigmoid"), {}, None),
        (with_scores(score="sigmoid", normalized=False), {}, several),
        (with_scores(score="sigmoid"), {}, None),
        (with_scores(normalized=False), {}, None),
        (with_scores(expert_bias=True), {}, "experts.expert_bias=true with score=softmax"),
        (with_scores(expert_bias=True, score="sigmoid"), {}, None),
        (with_scores(num_experts=8, groups=4, group_topk=2), {}, None),
        (with_scores(num_experts=8, groups=4, group_topk=3), {}, "experts.group_topk=3 above topk=2: megatron-core values a group by"),
        (pattern({"feed_forward": SIX}, {"feed_forward": FOUR}), {}, "2 kinds of experts in one model: megatron-core has one"),
    )


def test_pipelines_go_with_the_stages_of_zero_and_precisions_that_they_can_reduce() -> None:
    two = {"pp": 2, "dp": 4}
    own = two | {"schedule": "deepspeed_1f1b"}
    held(pipeline.t5_pipeline, (T5, {}, None), (LLAMA, two, None), (T5, two, "pp=2: Megatron has no pipeline for T5"))
    held(
        RULES["pp_zero_megatron"],
        (LLAMA, {"zero_stage": 0}, None),
        (LLAMA, two | {"zero_stage": 1}, None),
        (LLAMA, own | {"zero_stage": 0}, None),
        (LLAMA, two | {"zero_stage": 0}, "zero_stage=0 with schedule=1f1b"),
        (LLAMA, two | {"zero_stage": 2}, "zero_stage=2 with schedule=1f1b"),
    )
    half = workload(LLAMA, precision="fp16")
    held(RULES["pp_fp16"], (half, {}, None), (half, own, None), (LLAMA, two, None), (half, two, "precision=fp16 with sched"))
    held(
        RULES["pp_zero0"],
        (LLAMA, two | {"zero_stage": 0}, None),
        (LLAMA, own | {"zero_stage": 1}, None),
        (workload(LLAMA, precision="fp32"), own | {"zero_stage": 0}, None),
        (LLAMA, own | {"zero_stage": 0}, "zero_stage=0 with schedule=deepspeed_1f1b is offered in fp32 only, not in bf16"),
    )


def test_interleaving_takes_groups_of_micro_batches_that_fill_the_pipeline() -> None:
    """Four stages: 8 micro-batches in groups of 4 to 8; of a last group at least four must be left."""

    def given(microbatches: int, group: int | None = None, vpp: int = 2) -> dict[str, Any]:
        return {"pp": 4, "dp": 2, "vpp": vpp, "num_microbatches": microbatches, "microbatch_group_size_per_vp_stage": group}

    bound = "microbatch_group_size_per_vp_stage={} with pp=4 and num_microbatches=8: it must be pp to num_microbatches"
    held(
        pipeline.vpp_microbatches,
        (LLAMA, given(8), None),
        (LLAMA, given(6, vpp=1), None),
        (LLAMA, given(6), "pp=4 does not divide num_microbatches=6"),
        (LLAMA, given(8, 4), None),
        (LLAMA, given(8, 8), None),
        (LLAMA, given(9, 5), None),
        (LLAMA, given(8, 3), bound.format(3)),
        (LLAMA, given(8, 9), bound.format(9)),
        (LLAMA, given(8, 5), "microbatch_group_size_per_vp_stage=5 with pp=4 and num_microbatches=8: the last group has 3 micro-batches"),
    )


def test_states_are_divided_and_moved_where_the_optimizer_can() -> None:
    def instances(size: int | None, **more: Any) -> dict[str, Any]:
        return {"zero_stage": 1, "zero_shard_size": size} | more

    held(
        zero.optimizer_instances,
        (LLAMA, instances(None), None),
        (LLAMA, instances(4), None),
        (LLAMA, instances(8, cp=2), None),
        (LLAMA, instances(8), "zero_shard_size=8 must be below dp*cp=8"),
        (LLAMA, instances(3), "zero_shard_size=3 must be below"),
        (LLAMA, instances(3, zero_stage=2), "zero_shard_size=3 must be below"),  # HSDP, whose copies are as many
    )
    sgd = workload(LLAMA, optimizer="sgd")
    held(
        RULES["distopt_adam"],
        (sgd, {"zero_stage": 0}, None),
        (LLAMA, {"zero_stage": 1}, None),
        (sgd, {"zero_stage": 1}, "optimizer=sgd with zero_stage=1"),
    )
    held(
        RULES["gad_mix"],
        (LLAMA, {"zero_stage": 1}, None),
        (workload(LLAMA, grad_accum_dtype="bf16"), {"zero_stage": 0}, None),
        (LLAMA, {"zero_stage": 0}, "zero_stage=0 sums gradients in bf16; grad_accum_dtype=fp32 needs"),
        (workload(LLAMA, precision="fp32"), {"zero_stage": 0}, None),
    )
    away = {"offload_optimizer": True, "zero_stage": 1}
    held(
        RULES["offload_needs"],
        (workload(LLAMA, gpu="cpu"), {}, None),
        (LLAMA, away, None),
        (LLAMA, away | {"pp": 2, "schedule": "deepspeed_1f1b"}, None),
        (workload(LLAMA, gpu="cpu"), away, "offload_optimizer moves states out"),
        (LLAMA, away | {"zero_stage": 0}, "offload_optimizer needs"),
        (LLAMA, away | {"pp": 2}, "offload_optimizer with pp=2: never tried"),
        (sgd, away, "offload_optimizer with optimizer=sgd"),
    )


# ---- DeepSpeed's AutoEP


def test_autoep_takes_the_experts_that_it_is_told_of() -> None:
    mixtral = replace(LLAMA, family="mixtral", feed_forward=SIX)
    latent = replace(LATENT, norm_epsilon=1e-6, feed_forward=replace(SIX, score="sigmoid", expert_bias=True, shared_ffn_hidden_size=32))
    for a, preset in ((mixtral, "mixtral"), (latent, "deepseek_v3")):
        assert autoep.PRESETS[class_of(a).model] == preset
    assert autoep.balance(mixtral) == autoep.balance(LLAMA) == {}
    assert autoep.balance(replace(mixtral, feed_forward=replace(SIX, aux_loss_coeff=0.25))) == {"expert_balance": 0.25}
    sigmoid = replace(SIX, score="sigmoid", aux_loss_coeff=0.25)
    assert autoep.balance(replace(mixtral, feed_forward=sigmoid)) == {}
    held(
        RULES["expert_balance"],
        (LLAMA, {}, None),
        (MOE, {}, None),
        (replace(MOE, feed_forward=replace(SIX, aux_loss_coeff=0.25)), {}, None),
        (replace(MOE, feed_forward=replace(sigmoid, aux_loss_coeff=0.0)), {}, None),
        (
            replace(MOE, feed_forward=sigmoid),
            {},
            "model.aux_loss_coeff=0.25: transformers' MixtralForCausalLM has no loss that balances experts; model.aux_loss_coeff=0 leaves",
        ),
        (
            replace(MOE, feed_forward=replace(SIX, aux_loss_coeff=0.25, aux_loss_over="sequence")),
            {},
            "model.aux_loss_coeff=0.25: transformers' losses balance experts within a micro-batch, this model's within a sequence; ",
        ),
    )
    held(
        RULES["capacity"],
        (LLAMA, {}, None),
        (MOE, {}, None),
        (replace(MOE, feed_forward=replace(SIX, capacity_factor=1.5)), {}, "experts.capacity_factor=1.5: transformers' experts"),
    )
    held(RULES["autoep_class"], (mixtral, {"ep": 2}, None), (LLAMA, {"ep": 2}, None), (replace(mixtral, add_qkv_bias=True), {}, None))


def test_autoep_goes_with_the_choices_that_were_tried() -> None:
    stages = [(MOE, {"ep": 2, "zero_stage": stage}, None) for stage in (1, 2, 3)]
    held(
        RULES["autoep"],
        *stages,
        (MOE, {"zero_stage": 0, "offload_optimizer": True}, None),
        (MOE, {"ep": 2, "zero_stage": 0}, "zero_stage=0 with ep=2"),
        (MOE, {"ep": 2, "zero_stage": 2, "cp": 2}, None),
        (MOE, {"ep": 2, "zero_stage": 3, "cp": 2}, "zero_stage=3 with ep=2 and cp=2"),
        (MOE, {"ep": 2, "zero_stage": 3, "zero_shard_size": 2}, "zero_shard_size=2 with ep=2"),
        (MOE, {"ep": 2, "zero_stage": 2, "offload_optimizer": True}, "offload_optimizer with ep=2"),
    )
    held(
        RULES["experts_autotp"],
        (LLAMA, {"tp": 2}, None),
        (MOE, {"ep": 2}, None),
        (MOE, {"tp": 2}, "tp=2 with experts: AutoTP refuses tr"),
        (MOE, {"tp": 2, "ep": 2, "zero_stage": 2}, "tp=2 with ep=2 and zero_stage=2: DeepSpeed clips"),
        (MOE, {"tp": 2, "ep": 2, "zero_stage": 3}, "tp=2 with experts: AutoTP refuses transformers' own plan of them, and no"),
    )
    half = workload(MOE, precision="fp16")
    held(RULES["autoep_fp16"], (half, {}, None), (MOE, {"ep": 2}, None), (half, {"ep": 2}, "ep=2 with precision fp16"))
    adapted, attention = workload(MOE, lora=Lora(rank=4)), Lora(rank=4, targets=("q_proj", "k_proj", "v_proj", "o_proj"))
    held(
        RULES["lora_experts"],
        (MOE, {}, None),
        (workload(LLAMA, lora=Lora(rank=4)), {}, None),
        (adapted, {}, "lora.targets=all-linear: the weights of transformers' experts are no linears"),
        (workload(MOE, lora=attention), {}, None),
        (workload(MOE, lora=replace(attention, targets=("q_proj", "up_proj"))), {}, "lora.targets=q_proj,up_proj: the weights of"),
        (workload(replace(LATENT, feed_forward=SIX), lora=attention), {}, "lora.rank=4: adapters beside the linears of latent attention"),
    )
    adapted = workload(MOE, lora=attention)
    held(RULES["lora_autoep"], (adapted, {}, None), (adapted, {"ep": 2}, "ep=2 with lora.rank=4"))
    n = describe(LLAMA, 64).parameters
    given, full = workload(MOE), workload(MOE, precision="fp32")
    held(
        autoep.built_in_host_memory,
        (with_host(given, 2 * n), {"ep": 2, "zero_stage": 1}, None),
        (with_host(given, 2 * n - 1), {"ep": 2, "zero_stage": 1}, "ep=2 zero_stage=1: AutoEP builds the whole model in host memory"),
        (with_host(given, 0), {"zero_stage": 1}, None),
        (with_host(given, 0), {"ep": 2, "zero_stage": 3}, None),
        (with_host(full, 4 * n), {"ep": 2, "zero_stage": 1}, None),
        (with_host(full, 4 * n - 1), {"ep": 2, "zero_stage": 1}, "ep=2 zero_stage=1: AutoEP builds"),
    )


# ---- supervised samples


def test_samples_are_packed_where_none_sees_another() -> None:
    packed, padded = {"task": "sft", "packing": True}, {"task": "sft", "packing": False}
    states = replace(LLAMA, mixer=Mamba2(num_heads=8, head_dim=8, state_size=4), feed_forward=Nothing())
    held(
        sft.decoder_only,
        (workload(LLAMA, **packed), {}, None),
        (BERT, {}, None),
        (workload(BERT, **padded), {}, "task=sft is for decod"),
        (workload(T5, **padded), {}, "task=sft is for decoders: this model is an encoder-decoder"),
    )
    held(
        RULES["packed_ulysses"],
        (workload(LLAMA, **packed), {}, None),
        (workload(LLAMA, **padded), {"cp": 2}, None),
        (LLAMA, {"cp": 2}, None),
        (workload(LLAMA, **packed), {"cp": 2}, None),
        (workload(LLAMA, software=Software(flash_attention=False), **packed), {"cp": 2}, "cp=2 with data.packing: without flash attention"),
        (workload(LLAMA, precision="fp32", **packed), {"cp": 2}, "cp=2 with data.packing: without flash attention"),
    )
    several = {"micro_batch_size": 2}
    held(
        RULES["packed_flash"],
        (workload(LLAMA, **packed), {}, None),
        (workload(LLAMA, **padded), several, None),
        (workload(LLAMA, **packed), several, "micro_batch_size=2 with data.packing"),
        (workload(LLAMA, software=Software(flash_attention=False), **packed), several, None),
        (workload(LLAMA, gpu="V100-SXM2-16GB", **packed), several, None),
        (workload(LLAMA, precision="fp32", **packed), several, None),
        (workload(LLAMA, gpu="cpu", **packed), several, None),
    )
    held(
        RULES["packed_states"],
        (workload(states, **padded), {}, None),
        (states, {}, None),
        (workload(LLAMA, **packed), {}, None),
        (workload(states, **packed), {}, "data.packing: a state space"),
    )
    held(
        RULES["lora_states"],
        (states, {}, None),
        (workload(LLAMA, lora=Lora(rank=4)), {}, None),
        (workload(states, lora=Lora(rank=4)), {}, "lora.rank=4: adapters beside"),
    )


def test_recorded_models_are_fine_tuned_where_they_are_decoders_of_text() -> None:
    sizes: dict[str, Any] = {"seq_length": 64, "itemsize": 2, "hidden_size": 64, "ffn_hidden_size": 64, "max_position_embeddings": 64}
    ids = Feed(name="input_ids", shape=(64,), dtype="int64")
    labels = replace(ids, name="labels", copies="input_ids")
    text = Traced(model_class="NewForCausalLM", config="{}", feeds=(ids, labels), runs=(), **sizes)
    masked = replace(text, feeds=(ids, replace(labels, every=7)))

    def of(traced: Traced | None, **training: Any) -> Any:
        given = workload(LLAMA, **training)
        return replace(given, model=replace(given.model, architecture=replace(GPT, traced=traced)))

    held(
        RULES["recorded"],
        (of(None, task="sft", packing=True, lora=Lora(rank=4)), {}, None),
        (of(text), {}, None),
        (of(text, lora=Lora(rank=4)), {}, "lora.rank=4 of NewForCausalLM, whose layers were recorded: only a reader's"),
        (of(text, task="sft", packing=False), {}, None),
        (of(text, task="sft", packing=True), {}, "data.packing=true of NewForCausalLM"),
        (of(masked, task="sft", packing=False), {}, "task=sft of NewForCausalLM"),
        (of(replace(text, config=""), task="sft", packing=False), {}, "task=sft of NewForCausalLM"),
    )
