"""The files by hand train the plan: the programs of BY_HAND.md, as they stand there, have the losses of the plan's run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec.structs import replace
from ports import free_port
from worker_plans import GPT, LLAMA, make_plan

from orchestrator.engines import ENGINES
from orchestrator.plan import Plan, RunSettings, to_json

pytestmark = [pytest.mark.engines, pytest.mark.full]

PROGRAM = Path(__file__).parent / "hand_program.py"
STEPS = 10
TIMEOUT_S = 600.0
"""Of one program: two ranks import everything, which on a busy machine takes minutes."""


def plan_of(model: Any = LLAMA, **more: Any) -> Plan:
    """The default recipe: a cosine after a warm-up, weight decay 0.1."""
    settings: dict[str, Any] = {
        "dp": 2,
        "micro_batch_size": 2,
        "steps": STEPS,
        "warmup": 3,
        "lr": 3e-3,
        "schedule": "cosine",
        "weight_decay": 0.1,
    }
    return make_plan(model, "deepspeed", **(settings | more))


PLANS = {
    "zero0": plan_of(),
    "zero1": plan_of(zero_stage=1, min_lr=3e-4),
    "zero2": plan_of(zero_stage=2, min_lr=3e-4, clip=0.5),
    "zero3": plan_of(zero_stage=3),
    "gpt_zero2": plan_of(GPT, zero_stage=2, schedule="linear"),
    "recomputed": plan_of(zero_stage=2, recompute=["full"], warmup=0),
    "tp2": plan_of(tp=2, dp=1, zero_stage=1),
}
SHORT = {name: PLANS[name] for name in ("zero0", "gpt_zero2", "zero3")}


def start(command: list[str], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    given = os.environ | {
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        **environment,
    }
    return subprocess.run(command, cwd=folder, env=given, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def torchrun(plan: Plan, *words: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={plan.world_size}", *words]


@pytest.fixture(scope="module")
def first_weights(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A checkpoint of the plan's model by its name."""
    import torch
    import transformers

    made: dict[str, Path] = {}

    def of(plan: Plan) -> Path:
        name = plan.model.name
        if name not in made:
            fields = json.loads(next(file.content for file in ENGINES["deepspeed"].translate(plan).files if file.path == "engine.json"))[
                "model"
            ]
            torch.manual_seed(3)
            config = getattr(transformers, fields["config_class"])(**fields["config"])
            made[name] = tmp_path_factory.mktemp(name)
            getattr(transformers, fields["model_class"])(config).save_pretrained(made[name])
        return made[name]

    return of


@pytest.fixture(scope="module")
def run(first_weights: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A plan's folder after its run in it, and the losses of that, by the plan's name."""
    ran: dict[str, tuple[Path, list[float]]] = {}

    def of(name: str) -> tuple[Path, list[float]]:
        if name not in ran:
            plan = replace(PLANS[name], run=RunSettings(init_from=str(first_weights(PLANS[name]))))
            folder = tmp_path_factory.mktemp(name)
            (folder / "plan.json").write_text(to_json(plan))
            for file in ENGINES["deepspeed"].translate(plan).files:
                (folder / file.path).write_text(file.content)
            done = start(torchrun(plan, "-m", "orchestrator.programs.hugging_face"), folder)
            assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
            rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
            with (folder / "trainer.yaml").open("a") as file:  # the data set has the plan's order, and labels that are shifted already
                file.write("train_sampling_strategy: sequential\nremove_unused_columns: false\n")
            ran[name] = folder, [row["loss"] for row in rows]
        return ran[name]

    return of


def told(done: subprocess.CompletedProcess[str]) -> list[float]:
    """The losses that rank 0 tells."""
    line = next((line for line in done.stdout.splitlines() if "RESULT " in line), None)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert line is not None
    found: list[float] = json.loads(line[line.index("RESULT ") + 7 :])
    return found


def assert_same(found: list[float], planned: list[float]) -> None:
    assert len(planned) == STEPS
    assert planned[-1] < planned[0] - 0.1, "nothing was learnt"
    assert found == pytest.approx(planned, abs=1e-6)


@pytest.mark.parametrize("name", PLANS)
def test_the_trainer_of_trainer_yaml_trains_the_plan(name: str, run: Any, first_weights: Any) -> None:
    folder, planned = run(name)
    weights = str(first_weights(PLANS[name]))
    assert_same(told(start(torchrun(PLANS[name], str(PROGRAM), weights, "trainer"), folder)), planned)


@pytest.mark.parametrize("name", SHORT)
def test_accelerate_launch_with_accelerate_yaml_trains_the_plan(name: str, run: Any, first_weights: Any) -> None:
    folder, planned = run(name)
    command = ["accelerate", "launch", "--config_file", "accelerate.yaml", f"--main_process_port={free_port()}"]
    assert_same(told(start([*command, str(PROGRAM), str(first_weights(PLANS[name])), "accelerate"], folder)), planned)


@pytest.mark.parametrize("name", SHORT)
def test_a_loop_around_deepspeed_initialize_trains_the_plan(name: str, run: Any, first_weights: Any) -> None:
    folder, planned = run(name)
    words = [str(PROGRAM), str(first_weights(PLANS[name])), "plain"]
    assert_same(told(start(torchrun(PLANS[name], *words), folder)), planned)
    if name == "gpt_zero2":
        launcher = ["deepspeed", "--no_local_rank", "--num_gpus=2", f"--master_port={free_port()}"]
        assert_same(told(start([*launcher, *words], folder)), planned)


@pytest.mark.parametrize("program", ["trainer", "accelerate"])
def test_a_run_that_accelerate_would_take_off_deepspeed_is_stopped(program: str, run: Any, first_weights: Any) -> None:
    """transformers/training_args.py, _setup_devices; accelerate/state.py, PartialState."""
    folder, _ = run("zero0")
    words = [str(PROGRAM), str(first_weights(PLANS["zero0"])), program]
    done = start(torchrun(PLANS["zero0"], *words), folder, ACCELERATE_USE_CPU="true")
    assert done.returncode != 0
    assert "accelerate leaves DeepSpeed out: is ACCELERATE_USE_CPU set?" in done.stderr


def test_the_trainer_names_what_is_said_otherwise_in_its_file(run: Any, first_weights: Any) -> None:
    """What stands in both files must be the same."""
    folder, _ = run("zero2")
    said = (folder / "trainer.yaml").read_text()
    other = yaml.safe_load(said) | {"max_grad_norm": 0.25}
    (folder / "trainer.yaml").write_text(yaml.safe_dump(other))
    done = start(torchrun(PLANS["zero2"], str(PROGRAM), str(first_weights(PLANS["zero2"])), "trainer"), folder)
    (folder / "trainer.yaml").write_text(said)
    assert done.returncode != 0
    assert "max_grad_norm" in done.stderr
