"""A user's own DeepSpeed script asks for its ds_config, and trains under it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import orchestrator as so

TRAIN: dict[str, Any] = {"global_batch_size": 8, "seq_length": 32, "precision": "fp32"}
CONFIG = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 64, "n_positions": 32}

SCRIPT = """\
import json, os, sys, deepspeed, torch
from transformers import GPT2Config, GPT2LMHeadModel
import orchestrator as so

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
torch.manual_seed(0)
config = GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=64, n_positions=32, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(config)
found = so.ds_config_for(model, cluster="cpu", train={"global_batch_size": 8, "seq_length": 32, "precision": "fp32", "lr": 1e-2})
deepspeed.init_distributed("gloo")
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=found)
tokens = torch.arange(32).repeat(engine.train_micro_batch_size_per_gpu(), 1)
losses = []
for _ in range(4 * engine.gradient_accumulation_steps()):
    loss = engine(input_ids=tokens, labels=tokens).loss
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
with open("out.json", "w") as file:
    json.dump({"losses": losses, "found": found}, file)
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.engines
def test_a_script_trains_under_the_ds_config_that_it_asks_for(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29577", "DS_ACCELERATOR": "cpu"}
    path = os.pathsep.join(filter(None, (str(Path(so.__file__).parents[1]), os.environ.get("PYTHONPATH"))))
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, env={**os.environ, **ranks, "PYTHONPATH": path}, capture_output=True,
                          text=True, timeout=500, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads((tmp_path / "out.json").read_text())
    assert told["found"]["train_batch_size"] == 8
    assert told["losses"][-1] < told["losses"][0]
    assert told["found"] == so.ds_config_for(CONFIG, gpus=1, cluster="cpu", train={**TRAIN, "lr": 1e-2})


def test_every_rank_gets_the_same_and_the_trainer_fills_in_its_own() -> None:
    keys: dict[str, Any] = {"gpus": 4, "cluster": "cpu", "train": TRAIN}
    found = so.ds_config_for(CONFIG, **keys)
    assert found == so.ds_config_for(CONFIG, **keys)
    assert found["train_batch_size"] == found["train_micro_batch_size_per_gpu"] * found["gradient_accumulation_steps"] * 4
    assert "tensor_parallel" not in found
    filled = so.ds_config_for(CONFIG, trainer=True, **keys)
    assert filled["train_batch_size"] == "auto"
    for name in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        assert filled[name] == found[name], "the Trainer's script says these itself"


class Checkpointing:
    """A module as transformers' are."""

    config = CONFIG
    is_activation_checkpointing = True


def test_the_plan_recomputes_as_the_module_does(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    real = so.api.plan

    def plan(**keys: Any) -> so.Answer:
        asked.append(keys)
        return real(**keys)

    monkeypatch.setattr(so.api, "plan", plan)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for model in (Checkpointing(), CONFIG):
        so.ds_config_for(model, cluster="cpu", train=TRAIN)
    so.ds_config_for(Checkpointing(), cluster="cpu", train=TRAIN, pin={"recompute": "none"}, gpus=4)
    assert [(keys["pin.recompute"], str(keys["gpus"])) for keys in asked] == [("full", "2"), ("none", "2"), ("none", "4")]


@pytest.mark.parametrize(
    ("model", "keys", "message"),
    [
        (3, {}, "model=int: has no configuration of transformers"),
        ("nowhere", {}, "model=nowhere: can't be read"),
        ({}, {}, "model"),
        pytest.param({"model_type": "no_such"}, {}, "model", marks=pytest.mark.engines),  # imports transformers, as those do
        (CONFIG, {"engine": "megatron"}, "engine=megatron: is not for ds_config_for"),
        (CONFIG, {"recipe": "gpt_tiny"}, "recipe=gpt_tiny: is not for ds_config_for"),
        (CONFIG, {"train": {"global_batch_size": 8}}, "train.seq_length"),
        (CONFIG, {"train": {**TRAIN, "seq_length": 64}}, "train.seq_length=64: is beyond"),
        (CONFIG, {"gpus": "two"}, "gpus=two: is not a whole number"),
        (CONFIG, {"gpu": 2}, "gpu=2: is no key; did you mean gpus"),
        (CONFIG, {"launch": "local"}, "launch=local: is for a run"),
    ],
)
def test_what_can_not_be_asked_is_one_error(model: object, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(so.InputError) as refused:
        so.ds_config_for(model, **{"gpus": 2, "cluster": "cpu", "train": TRAIN, **keys})
    assert message in str(refused.value)
