"""A user's own DeepSpeed script: a small network under the ds_config.json that it is given."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import deepspeed
import torch

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiled at the first use otherwise (55 s)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed", required=True)
    parser.add_argument("--hidden", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--local_rank", type=int)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    deepspeed.init_distributed("gloo")
    model = torch.nn.Linear(arguments.hidden, 1)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=arguments.deepspeed)
    losses = []
    for _ in range(arguments.steps * engine.gradient_accumulation_steps()):
        inputs = torch.ones(engine.train_micro_batch_size_per_gpu(), arguments.hidden)
        loss = ((engine(inputs) - 1) ** 2).mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    Path(f"user-{os.environ['RANK']}.json").write_text(json.dumps([engine.zero_optimization_stage(), *losses]))
    sys.stdout.flush()
    os._exit(0)  # a thread of gloo's may abort a Python that closes (orchestrator/workers/distributed.py: leave)


if __name__ == "__main__":
    main()
