"""The ds_config files work unchanged by hand: in a plain script, under the deepspeed launcher, in the HF Trainer, with accelerate."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from ports import free_port
from worker_plans import GPT, make_plan

from orchestrator.engines import ENGINES
from orchestrator.plan import Plan

pytestmark = [pytest.mark.engines, pytest.mark.full]

PROGRAM = Path(__file__).parent / "hand_program.py"
STEPS = 6
TIMEOUT_S = 600.0
"""Of one program: two ranks import everything, which on a busy machine takes minutes."""
PLAN = make_plan(
    GPT,
    "deepspeed",
    dp=2,
    zero_stage=2,
    micro_batch_size=2,
    global_batch_size=8,
    steps=STEPS,
    warmup=2,
    lr=3e-3,
    clip=0.5,
    weight_decay=0.01,
)
PLANS = {"zero2": PLAN, "zero3": replace(PLAN, zero_stage=3)}


def arguments(plan: Plan) -> dict[str, Any]:
    """The plan in the words of TrainingArguments."""
    training = plan.training
    return {
        "per_device_train_batch_size": plan.micro_batch_size,
        "gradient_accumulation_steps": plan.num_microbatches,
        "learning_rate": training.lr,
        "adam_beta1": training.betas[0],
        "adam_beta2": training.betas[1],
        "adam_epsilon": training.eps,
        "weight_decay": training.weight_decay,
        "max_grad_norm": training.clip,
        "warmup_steps": training.warmup,
    }


def start(command: list[str], plan: Plan, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "HAND_ARGUMENTS": json.dumps(arguments(plan)),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def run(command: list[str], plan: Plan, folder: Path) -> dict[str, Any]:
    """What rank 0 tells."""
    for file in ENGINES["deepspeed"].translate(plan).files:
        (folder / file.path).write_text(file.content)
    done = start(command, plan, folder)
    line = next((line for line in done.stdout.splitlines() if "RESULT " in line), None)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert line is not None
    found: dict[str, Any] = json.loads(line[line.index("RESULT ") + 7 :])
    return found


def torchrun(plan: Plan, *words: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={plan.world_size}", str(PROGRAM), *words]


def deepspeed_launcher(plan: Plan, *words: str) -> list[str]:
    return ["deepspeed", "--no_local_rank", f"--num_gpus={plan.world_size}", f"--master_port={free_port()}", str(PROGRAM), *words]


def assert_read_as_meant(found: dict[str, Any], plan: Plan) -> None:
    assert (found["zero_stage"], found["clip"], found["dp"]) == (plan.zero_stage, plan.training.clip, plan.dp)
    assert found["train_batch_size"] == plan.global_batch_size
    assert (found["micro_batch_size"], found["num_microbatches"]) == (plan.micro_batch_size, plan.num_microbatches)
    assert found["lr"] == plan.training.lr
    assert len(found["losses"]) == STEPS
    # Every rank trains on its own samples, and no sample comes twice.
    together = [sample for rank in found["seen"] for sample in rank]
    assert len(together) == len(set(together)) == STEPS * plan.global_batch_size
    assert found["losses"][-1] < found["losses"][0]


@pytest.mark.parametrize("stage", PLANS)
def test_a_plain_script_takes_the_file_under_torchrun_and_under_the_deepspeed_launcher(stage: str, tmp_path: Path) -> None:
    plan = PLANS[stage]
    found = run(torchrun(plan, "plain", "ds_config.json"), plan, tmp_path)
    assert_read_as_meant(found, plan)
    launched = run(deepspeed_launcher(plan, "plain", "ds_config.json"), plan, tmp_path)
    assert launched["losses"] == pytest.approx(found["losses"], abs=1e-5)


@pytest.mark.parametrize("file", ["ds_config.json", "ds_config.auto.json"])
@pytest.mark.parametrize("stage", PLANS)
def test_the_trainer_takes_the_file(stage: str, file: str, tmp_path: Path) -> None:
    plan = PLANS[stage]
    assert_read_as_meant(run(torchrun(plan, "trainer", file), plan, tmp_path), plan)


@pytest.mark.parametrize("file", ["ds_config.json", "ds_config.auto.json"])
@pytest.mark.parametrize("stage", PLANS)
def test_accelerate_takes_the_file(stage: str, file: str, tmp_path: Path) -> None:
    plan = PLANS[stage]
    assert_read_as_meant(run(torchrun(plan, "accelerate", file), plan, tmp_path), plan)


def test_the_trainer_names_what_its_arguments_say_otherwise(tmp_path: Path) -> None:
    """What decides convergence stands in both files: a Trainer that was told otherwise stops."""
    other = replace(PLAN, training=replace(PLAN.training, betas=(0.8, 0.9)))
    for file in ENGINES["deepspeed"].translate(PLAN).files:
        (tmp_path / file.path).write_text(file.content)
    for file in ("ds_config.json", "ds_config.auto.json"):
        done = start(torchrun(PLAN, "trainer", file), other, tmp_path)
        assert done.returncode != 0
        assert "adam_beta1+adam_beta2" in done.stderr
