"""What each engine keeps, sends and offers, as its own papers and code say."""

from __future__ import annotations

from typing import Any

from orchestrator.engines import ENGINES
from orchestrator.hardware.spec import Software
from orchestrator.strategy.capabilities import StateBytes

ALL, NONE = Software(), Software(transformer_engine=False, flash_attention=False, apex=False)
MEGATRON, OVER, HF = ("megatron", "megatron_deepspeed", "deepspeed")


def traits(engine: str, software: Software = ALL) -> Any:
    return ENGINES[engine].traits(software)


def capabilities(engine: str, software: Software = ALL) -> Any:
    return ENGINES[engine].capabilities(software)


def test_gradients_are_scattered_from_the_stage_that_keeps_a_share_of_them() -> None:
    """Megatron's distributed optimizer is stage 1 and scatters; DeepSpeed's stage 1 all-reduces, and stage 2 scatters every micro-batch."""
    assert [traits(engine).reduce_scatter_from_stage for engine in (MEGATRON, OVER, HF)] == [1, 2, 2]
    assert [traits(engine).reduces_every_microbatch_from_stage for engine in (MEGATRON, OVER, HF)] == [2, 2, 2]
    assert [traits(engine).weight_gathers_per_microbatch for engine in (MEGATRON, OVER, HF)] == [2, 2, 2], "forward and backward"
    assert [traits(engine).gradient_buffer for engine in (MEGATRON, OVER, HF)] == [
        "grad_reduce_dtype",
        "grad_accum_dtype",
        "grad_accum_dtype",
    ]


def test_deepspeed_has_two_buckets_of_its_size_and_megatron_sums_in_place() -> None:
    for engine in (OVER, HF):
        found = traits(engine)
        assert (found.bucket_elements, found.bucket_copies, found.bucket_itemsize) == (50_000_000, 2, 2)
        assert found.live_parameter_elements == 50_000_000
        assert not found.overlaps_grad_reduce
        assert not found.overlaps_param_gather
        assert not found.fp32_gradient_fusion
    found = traits(MEGATRON)
    assert (found.bucket_elements, found.bucket_copies, found.live_parameter_elements) == (0, 0, 0)
    assert found.overlaps_grad_reduce
    assert found.overlaps_param_gather
    assert found.message_parameters == (40_000_000, 1_000_000)


def test_kernels_are_fused_where_their_packages_are() -> None:
    for engine in (MEGATRON, OVER):
        for software, fused in ((), True), ((NONE,), False):
            found = traits(engine, *software)
            assert (found.flash_attention, found.fused_norms, found.fused_permutations) == (fused, fused, fused)
        assert traits(engine).gathers_few_query_groups
        assert traits(engine).layers == "megatron"
    assert (traits(MEGATRON).fp32_gradient_fusion, traits(MEGATRON, NONE).fp32_gradient_fusion) == (True, False)
    assert traits(MEGATRON).overlaps_input_gradient
    assert traits(MEGATRON).fp8_weight_copies
    found = traits(HF)
    assert (found.layers, found.context_parallel, found.tp_overlap) == ("hugging_face", "all_to_all", 0.0)
    assert found.logits_bytes == 2 + 4 + 4 + 4, "16-bit logits, log_softmax, its gradient, fp32 logits"
    assert traits(MEGATRON).logits_bytes == 2 + 4 + 2, "compute dtype, fp32 copy, saved softmax in place"
    assert found.unfused_attention == ("encoder_decoder", "attention_bias")
    assert traits(HF, NONE).flash_attention, "torch has one of its own"


def test_states_are_those_of_adam_in_mixed_precision() -> None:
    """ZeRO (arXiv 1910.02054, section 3.1): 2 and 2 bytes and 12 of the optimizer; fp32 sums are 2 more, and fp32 has no master copy but in
    ZeRO's shards."""
    adam = {"master": 4, "moments": 8}
    assert traits(MEGATRON).states["mixed/1"] == StateBytes(weight=2, gradient=4, **adam)
    assert traits(MEGATRON).states["fp32/1"] == StateBytes(weight=4, gradient=4, master=0, moments=8)
    for stage in range(4):
        assert traits(MEGATRON).states[f"mixed/{stage}"] == traits(MEGATRON).states["mixed/0"]
        for engine in (OVER, HF):
            mixed, full = (traits(engine).states[f"{kind}/{stage}"] for kind in ("mixed", "fp32"))
            assert (mixed.weight, mixed.gradient, mixed.master, mixed.moments) == (2, 2 if stage == 0 else 4, 4, 8)
            assert (mixed.step, mixed.backward) == ((0, 2) if stage == 1 else (4, 0))
            assert (full.weight, full.gradient, full.master, full.moments) == (4, 4, 4 if stage else 0, 8)
            assert (full.step, full.backward) == (4 if stage else 0, 0)


def test_each_engine_offers_what_it_has() -> None:
    wanted: dict[str, dict[str, Any]] = {
        MEGATRON: {
            "axes": ("pp", "vpp", "tp", "cp", "ep", "etp", "dp"), "zero_stages": (0, 1), "zero_stages_with_pipeline": (0, 1),
            "fsdp_zero_stages": (2, 3), "zero_shard_stages": (1, 2, 3), "schedules": ("1f1b", "interleaved"), "sequence_parallel": True,
            "uneven_stages": True, "microbatch_groups": True, "offload_optimizer": False, "precision_aware_optimizer": True,
            "least_sequence_part": 2048, "recompute_varies": "stage", "lora": False, "tasks": ("pretrain", "sft"),
            "precisions": ("bf16", "fp16", "fp32", "fp8", "nvfp4"),
        },
        OVER: {
            "axes": ("pp", "tp", "dp"), "zero_stages": (0, 1, 2, 3), "zero_stages_with_pipeline": (0, 1), "fsdp_zero_stages": (),
            "schedules": ("1f1b", "deepspeed_1f1b"), "sequence_parallel": True, "uneven_stages": True, "offload_optimizer": True,
            "recompute_by_layer": ("deepspeed_1f1b",), "lora": False, "precisions": ("bf16", "fp16", "fp32"),
        },
        HF: {
            "axes": ("tp", "cp", "ep", "dp"), "zero_stages": (0, 1, 2, 3), "zero_stages_with_pipeline": (), "zero_shard_stages": (3,),
            "schedules": ("1f1b",), "sequence_parallel": False, "uneven_stages": False, "offload_optimizer": True,
            "recompute": ("none", "full"), "recompute_varies": "never", "lora": True, "tasks": ("pretrain", "sft"),
            "zero_shard_groups": True, "precisions": ("bf16", "fp16", "fp32"),
        },
    }  # fmt: skip
    for engine, fields in wanted.items():
        found = capabilities(engine)
        assert {name: getattr(found, name) for name in fields} == fields, engine
    for engine in (MEGATRON, OVER):
        assert capabilities(engine).pinned_recompute == ("selective",), "fused attention keeps no scores"
        assert capabilities(engine, NONE).pinned_recompute == ()
