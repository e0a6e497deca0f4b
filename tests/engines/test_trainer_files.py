"""trainer.yaml, accelerate.yaml and the ds_config that both fill: the plan in the words of transformers and accelerate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hand_plans import BERT, GPT, LLAMA, make_plan, training_for
from test_deepspeed import MIXTRAL

from orchestrator.audit import formats
from orchestrator.engines import ENGINES
from orchestrator.engines.deepspeed.trainer_files import around
from orchestrator.errors import InputError
from orchestrator.job import Job
from orchestrator.model.lora import Lora
from orchestrator.plan import Plan, RunSettings

FULL = [("full", 8)]
NAMES = ("ds_config.auto.json", "trainer.yaml", "accelerate.yaml")


def job_of(plan: Plan) -> Job:
    return ENGINES["deepspeed"].translate(plan)


def files_of(plan: Plan) -> dict[str, str]:
    return {file.path: file.content for file in job_of(plan).files}


def said(plan: Plan, path: str) -> dict[str, Any]:
    text = files_of(plan)[path]
    found: dict[str, Any] = json.loads(text) if path.endswith(".json") else yaml.safe_load(text)
    return found


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_ds_config_for_both_is_the_plans_but_for_optimizer_and_batch(stage: int) -> None:
    for given in ({}, {"tp": 2}, {"offload_optimizer": True}):
        plan = make_plan("deepspeed", LLAMA, zero_stage=stage, **(given if stage < 3 else {}))
        auto, raw = said(plan, "ds_config.auto.json"), said(plan, "ds_config.json")
        batch = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        assert [auto.pop(name) for name in batch if name in raw] == ["auto"] * (2 if plan.tp > 1 else 3)
        assert auto == {name: value for name, value in raw.items() if name not in (*batch, "optimizer")}


def test_offload_on_a_cpu_keeps_the_optimizer_that_is_given() -> None:
    """accelerate would put DeepSpeed's own in its place, which is compiled first."""
    plan = make_plan("deepspeed", LLAMA, gpu="cpu", zero_stage=2, offload_optimizer=True, training=training_for(LLAMA, precision="fp32"))
    assert said(plan, "ds_config.auto.json")["zero_force_ds_cpu_optimizer"] is False


def test_the_arguments_are_the_plans() -> None:
    training = training_for(
        LLAMA, lr=0.25, min_lr=0.05, schedule="cosine", warmup=3, betas=(0.8, 0.7), eps=1e-6, weight_decay=0.3, clip=0.5, seed=7
    )
    run = RunSettings(save_every=4, keep_last=2)
    plan = make_plan("deepspeed", LLAMA, training=training, micro_batch_size=2, recompute=FULL, run=run)
    assert said(plan, "trainer.yaml") == {
        "output_dir": "trainer", "deepspeed": "ds_config.auto.json", "max_steps": training.steps, "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": plan.num_microbatches, "optim": "adamw_torch_fused", "learning_rate": 0.25,
        "lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.2}, "warmup_steps": 3, "weight_decay": 0.3,
        "adam_beta1": 0.8, "adam_beta2": 0.7, "adam_epsilon": 1e-6, "max_grad_norm": 0.5, "bf16": True, "fp16": False, "seed": 7,
        "gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}, "logging_steps": 1,
        "save_strategy": "steps", "save_steps": 4, "save_total_limit": 2, "report_to": "none",
    }  # fmt: skip
    sgd = said(make_plan("deepspeed", LLAMA, training=training_for(LLAMA, optimizer="sgd"), gpu="cpu"), "trainer.yaml")
    assert (sgd["optim"], sgd["use_cpu"], sgd["save_strategy"]) == ("sgd", True, "no")


@pytest.mark.parametrize("optimizer", ["adamw_8bit", "paged_adamw_8bit"])
def test_adam_of_8_bits_is_the_trainers_and_read_back(optimizer: Any, tmp_path: Path) -> None:
    plan = make_plan("deepspeed", LLAMA, zero_stage=2, training=training_for(LLAMA, optimizer=optimizer))
    assert said(plan, "trainer.yaml")["optim"] == optimizer
    config = said(plan, "ds_config.json")
    assert "optimizer" not in config
    assert config["zero_allow_untested_optimizer"] is True
    assert "bitsandbytes" in said(plan, "engine.json")["requires"]
    for name, content in files_of(plan).items():
        (tmp_path / name).write_text(content)
    read = formats.read(files_of(plan)["trainer.yaml"], str(tmp_path / "trainer.yaml")).reading
    assert read.keys["train.optimizer"] == optimizer
    assert not any(setting.startswith("optim=") for setting in read.unpriced)
    named = formats.read("per_device_train_batch_size: 1\noptim: adamw_bnb_8bit\n", str(tmp_path / "own.yaml")).reading
    assert named.keys["train.optimizer"] == "adamw_8bit"


def test_accelerate_starts_the_plans_ranks_and_divides_weights_as_they_are_read_where_the_plan_does() -> None:
    found = said(make_plan("deepspeed", LLAMA, world=16, zero_stage=3), "accelerate.yaml")
    assert (found["num_machines"], found["num_processes"]) == (2, 16)
    assert found["deepspeed_config"]["zero3_init_flag"] is True
    assert said(make_plan("deepspeed", LLAMA, zero_stage=2), "accelerate.yaml")["deepspeed_config"]["zero3_init_flag"] is False


@pytest.mark.parametrize("path", ["trainer.yaml", "accelerate.yaml"])
def test_audit_reads_back_what_is_said(path: str, tmp_path: Path) -> None:
    for given in ({}, {"recompute": FULL}, {"zero_stage": 3}, {"zero_stage": 2, "offload_optimizer": True}):
        training = training_for(LLAMA, min_lr=3e-5, warmup=2)
        plan = make_plan("deepspeed", LLAMA, training=training, micro_batch_size=2, **given)
        for name, content in files_of(plan).items():
            (tmp_path / name).write_text(content)
        reading = formats.read(files_of(plan)[path], str(tmp_path / path)).reading
        assert not reading.unknown
        assert (reading.setup.zero_stage, reading.setup.offload_optimizer) == (plan.zero_stage, plan.offload_optimizer)
        assert reading.keys["train.precision"] == training.precision
        assert reading.keys["train.clip"] == training.clip
        if path == "trainer.yaml":
            assert (reading.setup.micro_batch_size, reading.accumulation) == (2, plan.num_microbatches)
            assert reading.setup.recompute == ("full" if "recompute" in given else "none")
            for name in ("lr", "min_lr", "schedule", "warmup", "steps", "weight_decay", "eps"):
                assert reading.keys[f"train.{name}"] == pytest.approx(getattr(training, name)), name
            assert tuple(reading.keys["train.betas"]) == training.betas
        else:
            assert reading.keys["gpus"] == plan.world_size


@pytest.mark.parametrize(
    ("why", "plan"),
    [
        ("under Ulysses they divide the batch by all ranks", make_plan("deepspeed", LLAMA, cp=2)),
        ("no groups for AutoEP's experts", make_plan("deepspeed", MIXTRAL, ep=2, zero_stage=2)),
        ("don't call DeepSpeed's functions for tiled_mlp", make_plan("deepspeed", LLAMA, tiled_mlp=4)),
        (
            "no linear schedule that ends at train.min_lr",
            make_plan("deepspeed", GPT, training=training_for(GPT, schedule="linear", min_lr=1e-5)),
        ),
    ],
)
def test_of_a_plan_that_they_alone_would_not_train_a_note_says_why(why: str, plan: Plan) -> None:
    job = job_of(plan)
    assert {file.path for file in job.files} >= {*NAMES}, "the program reads them"
    (note,) = (note for note in job.notes if why in note)
    assert note.startswith("trainer.yaml and accelerate.yaml alone do not train this plan: ")


@pytest.mark.parametrize(
    ("pins", "plan"),
    [
        ("pin.cp=1", make_plan("deepspeed", LLAMA, cp=2)),
        ("pin.cp=1 pin.offload_activations=false", make_plan("deepspeed", LLAMA, cp=2, offload_activations=True)),
        ("pin.tiled_mlp=1", make_plan("deepspeed", LLAMA, tiled_mlp=4)),
        ("pin.ep=1", make_plan("deepspeed", MIXTRAL, ep=2, zero_stage=2)),
        ("pin.tp=1", make_plan("deepspeed", LLAMA, tp=2, zero_stage=3)),
    ],
)
def test_programs_that_can_not_be_told_a_plan_name_the_pins_without_it(pins: str, plan: Plan) -> None:
    with pytest.raises(InputError, match=f"write=axolotl: .*; {pins} plans without$"):
        around(plan, "axolotl")


def test_what_a_script_has_to_add_is_said() -> None:
    def notes(plan: Plan) -> str:
        return "\n".join(job_of(plan).notes)

    assert "adapters are the script's" in notes(make_plan("deepspeed", LLAMA, training=training_for(LLAMA, lora=Lora(rank=4))))
    assert "adapters" not in notes(make_plan("deepspeed", LLAMA))
    bert = make_plan("deepspeed", BERT, world=4)
    assert f"BERT's loss and gradients are {4 * bert.num_microbatches} times too large" in notes(bert)
    bf16 = training_for(GPT, precision="bf16", grad_accum_dtype="bf16")
    assert "trainer.yaml: at stage 0 in 16 bits" in notes(make_plan("deepspeed", GPT, training=bf16, zero_stage=0))
