"""Buckets and sections of ds_config.json."""

from __future__ import annotations

import json
from typing import Any

from hand_plans import GPT, LLAMA, LLAMA3_8B, make_plan, training_for
from msgspec.structs import replace

from orchestrator.engines import ds_config
from orchestrator.model.lora import Lora
from orchestrator.plan import Plan

# ---- sizes


def test_buckets_are_even_and_no_larger_than_what_is_trained() -> None:
    assert [ds_config._even(elements) for elements in (0, 1, 2, 7)] == [0, 2, 2, 8]

    def third(plan: Plan) -> list[int]:
        found = ds_config.buckets(plan)
        names = ("reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size", "stage3_max_live_parameters")
        return [found[f"zero_optimization.{name}"] for name in names]

    h, f, kv, v, layers = 64, 192, 32, 512, 8  # a vocabulary of 500 is padded to a multiple of 128
    layer = h * h * 2 + 2 * h * kv + 3 * h * f + 2 * h
    total = layers * layer + 2 * v * h + h
    assert third(make_plan("deepspeed", LLAMA, zero_stage=3)) == [total, total, layer, max(3 * layer, v * h + layer)]
    large = 4096 * 4096 * 2 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096
    live = max(3 * large, 128256 * 4096 + large)
    assert third(make_plan("deepspeed", LLAMA3_8B, zero_stage=3)) == [50_000_000, 50_000_000, 50_000_000, live]
    assert third(make_plan("deepspeed", LLAMA, tp=2, zero_stage=3))[2] == (layer - 2 * h) // 2 + 2 * h
    adapted = make_plan("deepspeed", LLAMA, zero_stage=3, training=training_for(LLAMA, lora=Lora(rank=3)))
    # q, o: h x h; k, v: h x kv; gate, up, down: h x f; an adapter has 3 rows of each side.
    trained = layers * 3 * (2 * (h + h) + 2 * (h + kv) + 3 * (h + f))
    bucket = third(adapted)[0]
    assert 0 < bucket <= trained
    assert bucket % (3 * layers) == 0


ZERO = {
    "stage", "overlap_comm", "contiguous_gradients", "reduce_scatter", "reduce_bucket_size", "allgather_bucket_size",
}  # fmt: skip
ZERO3 = ZERO | {
    "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold", "stage3_max_live_parameters", "stage3_max_reuse_distance",
    "sub_group_size", "stage3_gather_16bit_weights_on_model_save",
}  # fmt: skip


def test_each_stage_of_zero_has_its_fields_and_no_other() -> None:
    def section(**more: Any) -> dict[str, Any]:
        found: dict[str, Any] = ds_config.ds_config(make_plan("deepspeed", LLAMA, **more))["zero_optimization"]
        return found

    assert section(zero_stage=0) == {"stage": 0}
    assert section(zero_stage=0, offload_optimizer=True) == {"stage": 0}
    for stage in (1, 2):
        found = section(zero_stage=stage)
        assert found.keys() == ZERO
        assert found["stage"] == stage
        assert found["contiguous_gradients"] is found["reduce_scatter"] is True
    third = section(zero_stage=3)
    assert third.keys() == ZERO3
    assert third["stage3_param_persistence_threshold"] == 10 * 64
    assert third["stage3_max_live_parameters"] == third["stage3_max_reuse_distance"] == 3 * third["stage3_prefetch_bucket_size"]
    assert third["sub_group_size"] == 10**9
    assert third["stage3_gather_16bit_weights_on_model_save"] is True
    assert section(zero_stage=3, zero_shard_size=4)["zero_hpz_partition_size"] == 4
    assert section(zero_stage=2, offload_optimizer=True)["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
    assert section(zero_stage=2, offload_optimizer=True, gpu="cpu")["offload_optimizer"] == {"device": "cpu", "pin_memory": False}
    assert section(zero_stage=1)["overlap_comm"] is True
    assert section(zero_stage=1, gpu="cpu")["overlap_comm"] is False
    assert section(zero_stage=1, pp=2)["overlap_comm"] is False


def test_precision_says_its_sums_where_the_states_are_divided() -> None:
    def config(stage: int, **fields: Any) -> dict[str, Any]:
        return ds_config.ds_config(make_plan("deepspeed", GPT, zero_stage=stage, training=training_for(GPT, **fields)))

    for precision, name in (("bf16", "bf16"), ("fp8", "bf16"), ("fp16", "fp16")):
        for stage in (0, 1, 3):
            found = config(stage, precision=precision, grad_accum_dtype="fp32", grad_reduce_dtype="bf16")
            assert {"bf16", "fp16"} & found.keys() == {name}
            assert found[name]["enabled"] is True
            assert found.get("data_types") == (None if stage == 0 else {"grad_accum_dtype": "fp32"})
            assert found["communication_data_type"] == "bf16"
    assert config(1, precision="fp16")["fp16"] == {
        "enabled": True, "loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1,
    }  # fmt: skip
    plain = config(1, precision="fp32")
    assert not {"bf16", "fp16", "data_types"} & plain.keys()


def test_the_optimizer_is_the_plans() -> None:
    training = training_for(GPT, lr=0.25, betas=(0.8, 0.7), eps=1e-6, weight_decay=0.3)

    def optimizer(plan: Plan) -> Any:
        return ds_config.ds_config(plan)["optimizer"]

    adam = optimizer(make_plan("deepspeed", GPT, training=training))
    assert adam == {"type": "AdamW", "params": {"lr": 0.25, "betas": [0.8, 0.7], "eps": 1e-6, "weight_decay": 0.3}}
    assert optimizer(make_plan("deepspeed", GPT, gpu="cpu"))["params"]["torch_adam"] is True
    sgd = replace(training, optimizer="sgd")
    for stage in (0, 1, 2):
        one = make_plan("deepspeed", GPT, training=sgd, zero_stage=stage)
        assert optimizer(one) == {"type": "SGD", "params": {"lr": 0.25, "momentum": 0.0, "weight_decay": 0.3}}
        assert ds_config.ds_config(one).get("zero_allow_untested_optimizer") == (True if stage else None)
    assert "zero_allow_untested_optimizer" not in ds_config.ds_config(make_plan("deepspeed", GPT))


def test_the_batch_is_said_in_all_three_fields_without_tensor_parallelism_and_in_two_with_it() -> None:
    one = ds_config.ds_config(make_plan("deepspeed", LLAMA, world=8, micro_batch_size=2))
    assert (one["train_batch_size"], one["train_micro_batch_size_per_gpu"], one["gradient_accumulation_steps"]) == (64, 2, 4)
    two = ds_config.ds_config(make_plan("deepspeed", LLAMA, world=8, tp=2))
    assert "train_batch_size" not in two
    assert (two["train_micro_batch_size_per_gpu"], two["gradient_accumulation_steps"]) == (1, 16)
    assert one["steps_per_print"] == 20
    assert one["gradient_clipping"] == 1.0


def test_the_file_leaves_the_schedule_and_the_two_groups_of_parameters_to_the_script_and_says_so() -> None:
    for name in ("cosine", "linear", "constant"):
        training = training_for(LLAMA, lr=0.5, schedule=name, warmup=3, min_lr=0.05)
        file, notes = ds_config.deepspeed_file(make_plan("deepspeed", LLAMA, training=training))
        config = json.loads(file.content)
        assert "scheduler" not in config
        assert config["optimizer"]["params"]["lr"] == 0.5
        assert any(
            "what a script gives itself is the learning rate's schedule" in note and "norms and biases don't decay" in note
            for note in notes
        )


def test_adapters_beside_autotp_name_how_both_halves_of_a_pair_are_divided() -> None:
    adapted = make_plan("deepspeed", LLAMA, tp=2, training=training_for(LLAMA, lora=Lora(rank=4)))
    section = ds_config.auto_tp(adapted)
    assert section["partition_config"]["use_default_specs"] is False
    assert [(spec["partition_type"], "lora_B" in spec["patterns"][0]) for spec in section["partition_config"]["layer_specs"]] == [
        ("column", True), ("row", False),
    ]  # fmt: skip


def test_notes_beside_the_file_name_ranks_stages_and_the_step_that_deepspeed_takes_when_it_is_built() -> None:
    def notes(*given: Any, **more: Any) -> str:
        schedule = more.pop("schedule", "1f1b")
        return "\n".join(ds_config.deepspeed_file(replace(make_plan(*given, **more), schedule=schedule))[1])

    assert notes("deepspeed", GPT, world=8, tp=2).startswith("ds_config.json assumes 4 data-parallel ranks of 8.\n")
    assert "says nothing of stages" in notes("megatron_deepspeed", GPT, pp=2, schedule="deepspeed_1f1b")
    bf16 = training_for(GPT, precision="bf16", grad_accum_dtype="bf16")
    assert "DeepSpeed steps once when it is built" in notes("deepspeed", GPT, training=bf16, zero_stage=0)
    assert "DeepSpeed steps once when it is built" not in notes("deepspeed", GPT, training=bf16, zero_stage=1)
    assert ds_config.deepspeed_environment(make_plan("deepspeed", GPT, gpu="cpu")) == {"DS_ACCELERATOR": "cpu"}
    assert ds_config.deepspeed_environment(make_plan("deepspeed", GPT)) == {}
