"""Learning rates, buckets and sections of ds_config.json, against DeepSpeed's own rules written out here."""

from __future__ import annotations

from math import cos, floor, pi
from typing import Any

import pytest
from hand_plans import GPT, LLAMA, LLAMA3_8B, make_plan, training_for
from msgspec.structs import replace

from orchestrator.engines import ds_config
from orchestrator.model.lora import Lora
from orchestrator.plan import Plan

PEAK = 0.5


def plan(schedule: str = "cosine", warmup: int = 0, steps: int = 20, min_lr: float = 0.05, **more: Any) -> Plan:
    training = training_for(LLAMA, lr=PEAK, schedule=schedule, warmup=warmup, steps=steps, min_lr=min_lr)
    return make_plan("deepspeed", LLAMA, training=training, **more)


def ours(plan: Plan) -> list[float]:
    """The rate of each step as README says it: linear from 0 to the peak, then the schedule, which is at min_lr after the last step."""
    t = plan.training
    rates = []
    for step in range(t.steps):
        done = (step - t.warmup) / (t.steps - t.warmup)
        shape = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + cos(pi * done)) / 2}[t.schedule]
        rates.append(t.lr * step / t.warmup if step < t.warmup else t.min_lr + (t.lr - t.min_lr) * shape)
    return rates


def theirs(plan: Plan) -> list[float]:
    """The rates that DeepSpeed's classes make of the file (runtime/lr_schedules.py of 0.19): the optimizer's own rate, unless the class
    begins at -1 and sets the first one; then one step of the class after each of training."""
    config = ds_config.by_hand(plan)
    first = config["optimizer"]["params"]["lr"]
    schedule = config.get("scheduler")
    if schedule is None:
        return [first] * plan.training.steps
    p = schedule["params"]
    begin = p.get("last_batch_iteration", -1)
    warmup = max(2, p.get("warmup_num_steps", 1000))

    def one_cycle(at: int) -> float:
        up, down = p["cycle_first_step_size"], p["cycle_second_step_size"]
        if at >= up + down:
            return float(p["cycle_min_lr"])
        ratio = up / (up + down)
        x = (at + 1) / (up + down)
        x -= floor(x)
        factor = x / ratio if x <= ratio else (x - 1) / (ratio - 1)
        return float(p["cycle_min_lr"] + (p["cycle_max_lr"] - p["cycle_min_lr"]) * factor)

    def warm_up(at: int) -> float:
        return float(p["warmup_min_lr"] + (p["warmup_max_lr"] - p["warmup_min_lr"]) * min(1.0, at / warmup))

    def warm_cosine(at: int) -> float:
        low = p.get("warmup_min_ratio", 0.0)
        if at < 0:
            return 0.0
        if at < warmup:
            return float(first * (low + (1 - low) * at / warmup))
        done = min(1.0, (at - warmup + 1) / max(1, p["total_num_steps"] - warmup))
        return float(first * (p["cos_min_ratio"] + (1 - p["cos_min_ratio"]) * (1 + cos(pi * done)) / 2))

    assert p.get("warmup_type", "linear") == "linear", "DeepSpeed's default is logarithmic"
    assert p.get("cycle_momentum", False) is False, "the default would move Adam's betas"
    at = {"OneCycle": one_cycle, "WarmupLR": warm_up, "WarmupCosineLR": warm_cosine}[schedule["type"]]
    start = {"OneCycle": p.get("cycle_min_lr"), "WarmupLR": p.get("warmup_min_lr"), "WarmupCosineLR": 0.0}[schedule["type"]]
    return [first if begin >= 0 else start, *(at(begin + step) for step in range(1, plan.training.steps))]


@pytest.mark.parametrize("warmup", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("schedule", ["constant", "linear"])
def test_linear_and_constant_rates_are_the_plans_in_every_step(schedule: str, warmup: int) -> None:
    for least in (0.0, 0.05, PEAK):
        one = plan(schedule, warmup, min_lr=least)
        assert theirs(one) == pytest.approx(ours(one), abs=1e-12), least
        assert ds_config.cosine_error(one) == 0


@pytest.mark.parametrize("steps", [2, 3, 20])
def test_a_cosine_without_a_warm_up_is_the_plans_in_every_step(steps: int) -> None:
    one = plan(warmup=0, steps=steps)
    assert theirs(one) == pytest.approx(ours(one), abs=1e-12)
    assert ds_config.cosine_error(one) == 0
    assert ds_config.first_rate(one) == PEAK


@pytest.mark.parametrize("warmup", [2, 3, 5, 10])
def test_a_cosine_after_a_warm_up_is_as_far_off_as_is_said(warmup: int) -> None:
    one = plan(warmup=warmup, steps=40)
    wrong = [abs(a - b) / PEAK for a, b in zip(theirs(one), ours(one), strict=True)]
    error = ds_config.cosine_error(one)
    assert error == pytest.approx((warmup - 1) / (warmup * (warmup + 1)))
    assert max(wrong[1:warmup]) == pytest.approx(error)
    assert max(wrong[1:]) <= error + 1e-12
    (note,) = [note for note in ds_config._schedule_notes(one) if "cosine" in note]
    assert f"its rates are up to {100 * error:.2g}% of lr off the plan's" in note


@pytest.mark.parametrize("steps", [2, 3, 20, 101])
def test_a_cosine_after_one_step_is_a_step_late_at_first_and_no_further_off_than_its_steepest_slope(steps: int) -> None:
    one = plan(warmup=1, steps=steps, min_lr=0.0)
    wrong = [abs(a - b) / PEAK for a, b in zip(theirs(one), ours(one), strict=True)]
    error = ds_config.cosine_error(one)
    assert error == pytest.approx(pi / 2 / (steps - 1))
    assert max(wrong[1:]) <= error + 1e-12
    assert steps < 20 or max(wrong[1:]) > error / 2


def test_a_rate_of_zero_and_a_file_that_the_trainer_refuses_are_said() -> None:
    def notes(*given: Any) -> list[str]:
        return ds_config._schedule_notes(plan(*given))

    assert notes("constant") == notes("linear") == notes("linear", 3) == []
    (zero, refused) = notes("constant", 3)
    assert "optimizer.params.lr is the first step's, 0" in zero
    assert f"write lr={PEAK} there" in zero
    assert "the HF Trainer looks for its own arguments" in refused
    assert ["HF Trainer" in note for note in notes("cosine")] == [True], "DeepSpeed counts two steps of a warm-up that the Trainer has not"
    assert ["no step at the peak" in note for note in notes("cosine", 3)] == [True]


# ---- sizes


def test_buckets_are_even_and_no_larger_than_what_is_trained() -> None:
    assert [ds_config._even(elements) for elements in (0, 1, 2, 7)] == [0, 2, 2, 8]
    small = ds_config.sizes(make_plan("deepspeed", LLAMA))
    h, f, kv, v, layers = 64, 192, 32, 512, 8  # a vocabulary of 500 is padded to a multiple of 128
    layer = h * h * 2 + 2 * h * kv + 3 * h * f + 2 * h
    assert small.layer == layer
    assert small.total == layers * layer + 2 * v * h + h == small.bucket
    assert small.largest_weight == v * h
    assert small.prefetch == layer
    assert small.live == max(3 * layer, v * h + layer)
    large = ds_config.sizes(make_plan("deepspeed", LLAMA3_8B))
    assert (large.bucket, large.prefetch) == (50_000_000, 50_000_000)
    assert large.live == max(3 * large.layer, 128256 * 4096 + large.layer)
    halves = ds_config.sizes(make_plan("deepspeed", LLAMA, tp=2))
    assert halves.layer == (layer - 2 * h) // 2 + 2 * h
    adapted = make_plan("deepspeed", LLAMA, training=training_for(LLAMA, lora=Lora(rank=3)))
    # q, o: h x h; k, v: h x kv; gate, up, down: h x f; an adapter has 3 rows of each side.
    trained = layers * 3 * (2 * (h + h) + 2 * (h + kv) + 3 * (h + f))
    found = ds_config.sizes(adapted)
    assert found.total <= trained
    assert found.total % (3 * layers) == 0
    assert found.bucket == found.total + found.total % 2


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


def test_the_trainer_fills_what_it_is_given_and_no_more() -> None:
    for stage in (1, 2, 3):
        of = make_plan("deepspeed", LLAMA, zero_stage=stage)
        raw, auto = ds_config.ds_config(of), ds_config.for_trainer(of)
        filled = {name for name, value in auto["zero_optimization"].items() if value == "auto"}
        more = {"stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"}
        assert filled == {"reduce_bucket_size"} | (more if stage == 3 else set())
        assert {name: value for name, value in auto["zero_optimization"].items() if name not in filled} == {
            name: value for name, value in raw["zero_optimization"].items() if name not in filled
        }
        assert auto["bf16"] == {"enabled": "auto"}
        assert {name for name, value in auto["optimizer"]["params"].items() if value == "auto"} == {"lr", "weight_decay"}
        assert auto["gradient_clipping"] == 1.0
        batch = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        assert [auto[name] for name in batch] == ["auto"] * 3
    divided = ds_config.for_trainer(make_plan("deepspeed", LLAMA, tp=2))
    assert divided["tensor_parallel"] == {"autotp_size": 2, "vocab_parallel_lm_head": False}
    assert "train_batch_size" not in divided
    assert "tensor_parallel" not in ds_config.for_trainer(make_plan("deepspeed", LLAMA))
    adapted = make_plan("deepspeed", LLAMA, tp=2, training=training_for(LLAMA, lora=Lora(rank=4)))
    section = ds_config.auto_tp(adapted)
    assert section["partition_config"]["use_default_specs"] is False
    assert [(spec["partition_type"], "lora_B" in spec["patterns"][0]) for spec in section["partition_config"]["layer_specs"]] == [
        ("column", True), ("row", False),
    ]  # fmt: skip


def test_notes_beside_the_files_name_ranks_and_pipelines() -> None:
    files, notes = ds_config.deepspeed_files(make_plan("deepspeed", GPT, world=8, tp=2))
    assert [file.path for file in files] == ["ds_config.json", "ds_config.auto.json"]
    assert notes[0] == "ds_config.json assumes 4 data-parallel ranks of 8."
    assert not any("pipeline" in note for note in notes)
    assert any("the HF Trainer has no pipeline" in note for note in ds_config.deepspeed_files(make_plan("deepspeed", GPT, pp=2))[1])
    assert ds_config.deepspeed_environment(make_plan("deepspeed", GPT, gpu="cpu")) == {"DS_ACCELERATOR": "cpu"}
    assert ds_config.deepspeed_environment(make_plan("deepspeed", GPT)) == {}
