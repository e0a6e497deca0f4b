"""What a user writes around our ds_config: a plain script, the HF Trainer, accelerate. Prints its losses and what the engine read.

Usage: hand_program.py MODE CONFIG; MODE: plain, trainer, accelerate.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
import torch.distributed as dist
import transformers

from orchestrator.workers import distributed

# Only to save the minute in which DeepSpeed compiles an all-reduce over shared memory.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

STEPS, LENGTH, VOCABULARY = 6, 32, 128
SAMPLES = 96
"""Fewer than the vocabulary: the first token tells them apart."""


def make_model() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=2, n_embd=64, n_head=4, n_positions=64, vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(config)


def samples(count: int) -> list[dict[str, torch.Tensor]]:
    """Counting upwards: learnt in a few steps."""
    rows = [(torch.arange(LENGTH) + 3 * i) % VOCABULARY for i in range(count)]
    return [{"input_ids": row, "labels": row} for row in rows]


def tell(engine: Any, losses: list[float], seen: list[int]) -> None:
    """`seen`: which samples this rank trained on, by their first token."""
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, seen)
    if dist.get_rank() == 0:
        read = {
            "zero_stage": engine.zero_optimization_stage(),
            "clip": engine.gradient_clipping(),
            "train_batch_size": engine.train_batch_size(),
            "micro_batch_size": engine.train_micro_batch_size_per_gpu(),
            "num_microbatches": engine.gradient_accumulation_steps(),
            "lr": engine.config["optimizer"]["params"]["lr"],
            "dp": engine.dp_world_size,
        }
        print("RESULT", json.dumps({"losses": losses, "seen": by_rank, **read}), flush=True)
    dist.barrier()


def plain(path: str) -> None:
    deepspeed.init_distributed("gloo", verbose=False)
    model = make_model()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=path)
    losses, seen = [], []
    rows = samples(STEPS * engine.train_batch_size())
    for step in range(STEPS):
        total = 0.0
        for index in range(engine.gradient_accumulation_steps()):
            size = engine.train_micro_batch_size_per_gpu()
            start = ((step * engine.gradient_accumulation_steps() + index) * dist.get_world_size() + dist.get_rank()) * size
            batch = torch.stack([row["input_ids"] for row in rows[start : start + size]])
            seen += batch[:, 0].tolist()
            loss = engine(input_ids=batch, labels=batch).loss
            engine.backward(loss)
            engine.step()
            total += loss.item() / engine.gradient_accumulation_steps()
        losses.append(total)
    tell(engine, losses, seen)


def trainer(path: str) -> None:
    # The arguments that the file was made for; transformers compares them with it, or fills "auto" with them.
    wanted = json.loads(os.environ["HAND_ARGUMENTS"])
    arguments = transformers.TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        deepspeed=path,
        max_steps=STEPS,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        **wanted,
    )
    seen: list[int] = []

    class Watched(transformers.Trainer):
        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            seen.extend(inputs["input_ids"][:, 0].tolist())
            return super().training_step(model, inputs, *args, **kwargs)

    run = Watched(model=make_model(), args=arguments, train_dataset=samples(SAMPLES))
    run.train()
    losses = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    tell(run.model_wrapped, losses, seen)


def accelerate(path: str) -> None:
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin, DummyOptim, DummyScheduler, InitProcessGroupKwargs

    wanted = json.loads(os.environ["HAND_ARGUMENTS"])
    plugin = DeepSpeedPlugin(hf_ds_config=path, gradient_accumulation_steps=wanted["gradient_accumulation_steps"])
    # Without a GPU accelerate starts no backend by itself, and every rank would train on all samples.
    accelerator = Accelerator(deepspeed_plugin=plugin, kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])
    model = make_model()
    optimizer = DummyOptim(model.parameters(), lr=wanted["learning_rate"], weight_decay=wanted["weight_decay"])
    size = wanted["per_device_train_batch_size"]
    loader: Any = torch.utils.data.DataLoader(samples(SAMPLES), batch_size=size)
    if "scheduler" in plugin.deepspeed_config:
        scheduler = DummyScheduler(optimizer, total_num_steps=STEPS, warmup_num_steps=wanted["warmup_steps"])
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    else:
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    count = accelerator.gradient_accumulation_steps
    seen: list[int] = []
    micro = []
    for _, batch in zip(range(STEPS * count), loader, strict=False):
        seen += batch["input_ids"][:, 0].tolist()
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        micro.append(loss.item())
    losses = [sum(micro[at : at + count]) / count for at in range(0, len(micro), count)]
    tell(model, losses, seen)


if __name__ == "__main__":
    mode, config = sys.argv[1:]
    {"plain": plain, "trainer": trainer, "accelerate": accelerate}[mode](config)
    distributed.leave(0)
