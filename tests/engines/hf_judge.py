"""Run as a program: reads cases from stdin; builds each model on the meta device, reads each ds_config with DeepSpeed's own code."""

from __future__ import annotations

import json
import os
import sys
import warnings
from types import SimpleNamespace
from typing import Any

warnings.filterwarnings("ignore")
os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed.comm.comm as ds_comm  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from deepspeed.runtime.config import DeepSpeedConfig  # noqa: E402
from deepspeed_world import World  # noqa: E402


def parameters(fields: dict[str, Any]) -> int:
    config = getattr(transformers, fields["config_class"])(**fields["config"])
    with torch.device("meta"):
        model = getattr(transformers, fields["model_class"])(config)
    return sum(parameter.numel() for parameter in model.parameters())


def read(case: dict[str, Any]) -> dict[str, Any]:
    ds_comm.cdb = World(case["world"])
    mpu = SimpleNamespace(get_data_parallel_world_size=lambda: case["dp"])
    config = DeepSpeedConfig(case["config"], mpu=mpu)
    # Without an mpu, as in a script of the user's own, the batch is checked against the world: AutoTP's is left out of the config.
    by_hand = DeepSpeedConfig(case["config"]).train_batch_size if "train_batch_size" in case["config"] else None
    return {
        "by_hand": by_hand,
        "train_batch_size": config.train_batch_size,
        "micro_batch_size": config.train_micro_batch_size_per_gpu,
        "num_microbatches": config.gradient_accumulation_steps,
        "zero_stage": config.zero_optimization_stage,
        "clip": config.gradient_clipping,
        "hpz": config.zero_config.zero_hpz_partition_size,
        "autotp": config.tensor_parallel_config.autotp_size,
    }


if __name__ == "__main__":
    answers = {}
    for name, case in json.load(sys.stdin).items():
        answers[name] = {"parameters": parameters(case["model"])}
        if "config" in case:
            answers[name]["deepspeed"] = read(case)
    print("ANSWERS", json.dumps(answers))
