"""What DeepSpeed's stages 1 and 2 keep on the GPU of offloaded gradients: the tensor through which they are added up, and at stage 2 the
sums in fp32, are those of a real engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from cost_cases import a100, candidate
from msgspec.structs import replace

from orchestrator.cost.calibration import datasheet
from orchestrator.cost.memory import offloaded_gradient_bytes
from orchestrator.cost.states import state_bytes, states
from orchestrator.cost.workload import EngineWorkload, engine_workload
from orchestrator.engines import ENGINES
from orchestrator.hardware.spec import Software
from orchestrator.model.families import describe, from_hf_config
from orchestrator.model.training import Dtype, Training
from orchestrator.strategy.workload import Workload
from tests.ports import free_port

ROPE = {"num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
MODELS: dict[str, dict[str, Any]] = {
    "a gate is the largest": {**SIZES, **ROPE, "model_type": "llama", "intermediate_size": 512, "vocab_size": 384},
    "the embedding is": {**SIZES, **ROPE, "model_type": "llama", "intermediate_size": 128, "vocab_size": 1000},
    "gates with what they let through": {**SIZES, **ROPE, "model_type": "phi3", "intermediate_size": 512, "vocab_size": 384,
                                         "pad_token_id": 0},
    "all experts of a layer": {**SIZES, **ROPE, "model_type": "qwen3_moe", "moe_intermediate_size": 96, "num_experts": 8, "head_dim": 16,
                               "num_experts_per_tok": 2, "intermediate_size": 96, "vocab_size": 384, "decoder_sparse_step": 1},
}  # fmt: skip
SUMMED: tuple[Dtype, ...] = ("fp32", "bf16")
BUILT = """
import gc, json, os, sys
os.environ["DS_ACCELERATOR"] = "cpu"
from orchestrator.cpu import eager  # before the engines: a CPU compiles nothing
import deepspeed, torch, transformers
gc.freeze()  # DeepSpeed collects garbage while it makes an engine: not through all that was imported
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.logger.setLevel("ERROR")
found = {}
for name, config in json.loads(sys.argv[1]).items():
    for stage in (1, 2):
        fields = {key: value for key, value in config.items() if key != "model_type"}
        made = transformers.AutoConfig.for_model(config["model_type"], **fields)
        model = transformers.AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16)
        settings = {
            "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
            "zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu"}}, "zero_force_ds_cpu_optimizer": False,
        }
        for summed in ("fp32", "bf16"):
            config_of = settings | {"data_types": {"grad_accum_dtype": summed}}
            engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config_of)
            optimizer = engine.optimizer
            ids = torch.zeros(1, 8, dtype=torch.long)
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            partitions = [getattr(group, "flat_partition", None) for group in optimizer.averaged_gradients.values()]
            sums = sum(partition.nbytes for partition in partitions if partition is not None) / sum(p.numel() for p in model.parameters())
            found[f"{name}/{stage}/{summed}"] = [optimizer.temp_grad_buffer_for_gpu_offload.nbytes, sums if stage == 2 else 0]
print(json.dumps(found))
"""


def engine_priced(config: dict[str, Any], summed: Dtype = "fp32") -> EngineWorkload:
    architecture = from_hf_config(config, "small")
    workload = Workload(
        model=describe(architecture, 64),
        training=Training(global_batch_size=8, seq_length=64, grad_accum_dtype=summed),
        cluster=replace(a100(8), software=Software()),
    )
    traits = ENGINES["deepspeed"].traits(Software())
    return engine_workload(workload, traits, datasheet(workload.cluster, traits))


def priced(config: dict[str, Any], stage: int, **choices: Any) -> int:
    return offloaded_gradient_bytes(engine_priced(config), candidate(zero_stage=stage, **{"offload_optimizer": True} | choices))


def sums(config: dict[str, Any], stage: int, summed: Dtype) -> float:
    """Bytes of a parameter that a single rank's summed gradients take on the GPU at stage 2."""
    workload, strategy = engine_priced(config, summed), candidate(zero_stage=stage, offload_optimizer=True).strategy
    held = states(10**6, state_bytes(workload.traits, workload.training, strategy.zero_stage), strategy)
    return held.gradients / 10**6 if stage == 2 else 0.0


@pytest.mark.engines
def test_it_is_as_long_as_that_of_a_real_engine_whose_sums_in_fp32_stay_beside_it() -> None:
    environment = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", BUILT, json.dumps(MODELS)], capture_output=True, text=True, check=False,
        env=os.environ | environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    theirs = json.loads(done.stdout.splitlines()[-1])
    ours = {
        f"{name}/{stage}/{summed}": [priced(config, stage), sums(config, stage, summed)]
        for name, config in MODELS.items() for stage in (1, 2) for summed in SUMMED
    }  # fmt: skip
    assert {name: found[0] for name, found in ours.items()} == {name: found[0] for name, found in theirs.items()}
    assert {name: found[1] for name, found in ours.items()} == pytest.approx({name: found[1] for name, found in theirs.items()}, rel=1e-3)


def test_nothing_else_has_it() -> None:
    config = MODELS["the embedding is"]
    assert priced(config, 1) == priced(config, 2) == 2 * 1000 * 64
    assert priced(config, 3) == priced(config, 2, offload_optimizer=False) == 0
