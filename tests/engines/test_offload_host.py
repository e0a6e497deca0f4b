"""The bytes of host memory that an offloaded optimizer takes under DeepSpeed are those of a real engine between two micro-batches."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from msgspec.structs import replace
from test_rules import candidate, workload

from orchestrator.engines.rules.zero import deepspeed_host_states
from orchestrator.model.families import describe, from_hf_config
from orchestrator.model.training import Dtype
from orchestrator.strategy.spec import ZeroStage
from tests.ports import free_port

CONFIG = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "intermediate_size": 128, "vocab_size": 1000, "max_position_embeddings": 64, "tie_word_embeddings": False, "rms_norm_eps": 1e-5,
}  # fmt: skip
BUILT = """
import gc, json, os, sys
os.environ["DS_ACCELERATOR"] = "cpu"
from orchestrator.cpu import eager  # before the engines: a CPU compiles nothing
import deepspeed, torch, transformers
gc.freeze()  # DeepSpeed collects garbage while it makes an engine: not through all that was imported
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.logger.setLevel("ERROR")
config, found = json.loads(sys.argv[1]), {}
for stage in (1, 2, 3):
    for summed in ("fp32", "bf16"):
        made = transformers.AutoConfig.for_model(config["model_type"], **{key: config[key] for key in config if key != "model_type"})
        model = transformers.AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16)
        settings = {
            "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, "bf16": {"enabled": True},
            "data_types": {"grad_accum_dtype": summed}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
            "zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu"}}, "zero_force_ds_cpu_optimizer": False,
        }
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
        optimizer = engine.optimizer
        for _ in range(2):
            ids = torch.zeros(1, 8, dtype=torch.long)
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            if stage == 3:
                masters = optimizer.fp32_partitioned_groups_flat
                others = [optimizer.grad_partitions_flat_buffer]
            else:
                masters = optimizer.single_partition_of_fp32_groups
                others = [*optimizer.param_buffer_of_bit16_for_cpu_offload_groups, *optimizer.accumulated_grads_in_cpu.values()]
            held = [*masters, *(master.grad for master in masters), *others]
            engine.step()
        moments = [state for states in optimizer.optimizer.state.values() for state in states.values() if torch.is_tensor(state)]
        found[f"{stage}/{summed}"] = sum(tensor.nbytes for tensor in (*held, *moments))
print(json.dumps(found))
"""


def needed(stage: ZeroStage, summed: Dtype, micro_batches: int = 2) -> float:
    given = workload(grad_accum_dtype=summed, global_batch_size=micro_batches)
    given = replace(given, model=describe(from_hf_config(CONFIG, "small"), 64))
    chosen = candidate(zero_stage=stage, offload_optimizer=True, num_microbatches=micro_batches, micro_batch_size=1, dp=1)
    return deepspeed_host_states(chosen, given)


@pytest.mark.engines
def test_a_real_engine_has_as_much_on_the_host() -> None:
    environment = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", BUILT, json.dumps(CONFIG)], capture_output=True, text=True, check=False,
        env=os.environ | environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    theirs = json.loads(done.stdout.splitlines()[-1])
    ours = {f"{stage}/{summed}": needed(stage, summed) for stage in (1, 2, 3) for summed in ("fp32", "bf16")}
    assert ours == pytest.approx(theirs, rel=1e-3)


def test_nothing_waits_for_a_second_micro_batch_where_there_is_none() -> None:
    parameters = describe(from_hf_config(CONFIG, "small"), 64).parameters
    assert needed(2, "bf16") - needed(2, "bf16", micro_batches=1) == 2 * parameters
    assert needed(2, "fp32") == needed(2, "fp32", micro_batches=1)
