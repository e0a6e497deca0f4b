"""One rank of a plan, alone: the engine's own classes with a fake process group, whose collectives return at once.

    python -m orchestrator.workers.rehearsal --plan plan.json --rank 3 [--meta] [--steps 3] --out rehearsal-3.json

Builds what the rank builds in the whole run and takes its passes over its own micro-batches; what other ranks would have sent is whatever
lies in the buffer. Writes its peak memory, seconds of a micro-batch (forward and backward, no traffic), of a layer's forward and of the
update. With --meta it is built on the meta device alone, without memory, by engines on megatron-core's layers: which layers, embedding
and head it has, and how many parameters.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from orchestrator.plan import Plan, from_json
from orchestrator.workers import distributed, loop, metrics, runs

MOST_MICROBATCHES: Final = 8
"""The most micro-batches of a step that is not longer for the pipeline's sake: each is like the next."""

WITHOUT_KERNELS: Final = {"gradient_accumulation_fusion": False, "tp_comm_overlap": False, "fp8": None, "cuda_graph_impl": "none",
                          "perform_initialization": False}  # fmt: skip
"""Settings of a model that is built without memory: its compiled kernels are not looked for and nothing is filled, which changes no
weight."""


def join_alone(plan: Plan, rank: int) -> None:
    """The world of the plan, in which this process is `rank` and nobody else is there."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ.update(RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(plan.world_size), LOCAL_WORLD_SIZE="1")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    dist.init_process_group("fake", rank=rank, world_size=plan.world_size, store=FakeStore())


def microbatches(plan: Plan, engine: dict[str, Any]) -> int:
    """How many a rehearsed step has: enough for every stage to hold its full share, whole rounds of an interleaved schedule. An engine with
    a configuration of its own that says their number (gradient_accumulation_steps) gets all."""
    if engine.get("ds_config") is not None:
        return plan.num_microbatches
    rounds = -(-max(MOST_MICROBATCHES, 2 * plan.pp) // plan.pp) * plan.pp
    return min(plan.num_microbatches, rounds)


class LayerTimes:
    """Seconds of the forward passes of the model's largest list of like modules, its layers."""

    def __init__(self, trainer: Any, device: torch.device) -> None:
        self.seconds: list[float] = []
        self._device = device
        self._begun = 0.0
        lists = [
            module
            for chunk in modules_of(trainer)
            for module in chunk.modules()
            if isinstance(module, torch.nn.ModuleList) and len({type(child) for child in module}) == 1
        ]
        for layer in max(lists, key=lambda one: sum(p.numel() for p in one.parameters()), default=()):
            layer.register_forward_pre_hook(self._begin)
            layer.register_forward_hook(self._end)

    def _begin(self, *_: Any) -> None:
        distributed.synchronise(self._device)
        self._begun = time.perf_counter()

    def _end(self, *_: Any) -> None:
        distributed.synchronise(self._device)
        self.seconds.append(time.perf_counter() - self._begun)


def answer_for_other_ranks(trainer: Any, plan: Plan) -> None:
    """Answers DeepSpeed for the ranks that are not there. Its pipeline asks the stage before for the shape of what it will send
    (runtime/pipe/engine.py, _recv_tensor_meta): hidden states of a micro-batch, sequence first. Under AutoTP it compares the first batch
    with another rank's (runtime/engine.py, check_dataloader_inputs_same_across_ranks): that is left out."""
    pipeline: Any = getattr(trainer, "engine", None)
    if getattr(pipeline, "first_dataloader_check", None) is not None:
        pipeline.first_dataloader_check.remove()
    if not hasattr(pipeline, "_recv_tensor_meta"):
        return
    shape = [plan.training.seq_length // (plan.tp if plan.sequence_parallel else 1), plan.micro_batch_size, plan.model.hidden_size]
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(plan.training.precision, torch.float32)
    pipeline._recv_tensor_meta = lambda stage: pipeline._allocate_or_extend_buffers(0, shape, dtype)


def modules_of(trainer: Any) -> list[torch.nn.Module]:
    """The model of this rank, chunk by chunk."""
    return list(getattr(trainer, "chunks", None) or [trainer.model])


def builder(module: str) -> Any:
    """What builds the trainer of one rank: `build` of a worker, or of what takes a program's steps one at a time (MODULE_steps.py)."""
    found = importlib.import_module(module)
    return found.build if hasattr(found, "build") else importlib.import_module(f"{module}_steps").build


def rehearse(
    plan: Plan, engine: dict[str, Any], folder: Path, module: str, out: Path, steps: int, together: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """What the rank measures of itself; the first step is not timed. `folder` has the job's files, `out` what is made of data;
    `together` is called before each step."""
    device = distributed.prepare_device(plan)
    build = builder(module)
    gc.freeze()  # what was imported stays: collections pass over it
    with contextlib.chdir(folder):
        trainer = build(plan, engine, device)
    samples, _ = runs.open_samples(plan, out / "data")
    answer_for_other_ranks(trainer, plan)
    count = microbatches(plan, engine)
    passes: list[float] = []
    updates: list[float] = []
    layers: LayerTimes | None = None
    for step in range(steps):
        if step == 1:
            layers = LayerTimes(trainer, device)
        mine = loop.read(trainer, samples, step)[:count]
        distributed.synchronise(device)
        together()
        begin = time.perf_counter()
        trainer.forward_backward(mine)
        distributed.synchronise(device)
        passed = time.perf_counter()
        trainer.update(plan.training.lr)
        distributed.synchronise(device)
        if step:
            passes.append((passed - begin) / count)
            updates.append(time.perf_counter() - passed)
    return {
        "microbatches": count,
        "microbatch_s": passes,
        "layer_forward_s": statistics.median(layers.seconds) if layers and layers.seconds else None,
        "update_s": updates,
        "peak_memory_bytes": metrics.peak_memory(device),
        "parameters": sum(p.numel() for chunk in modules_of(trainer) for p in chunk.parameters()),
    }


def built_without_memory(plan: Plan, engine: dict[str, Any]) -> dict[str, Any]:
    """The model of this rank on the meta device: chunks of megatron-core's classes, whose Transformer Engine layers, which need a GPU, are
    its own of the same weights; a Hugging Face model whole, as it is before DeepSpeed divides it."""
    if "transformer_config" not in engine:
        from orchestrator.workers import hugging_face

        with torch.device("meta"):
            model = hugging_face.build_model(engine["model"])
        return {"stage": 0, "parameters": sum(p.numel() for p in model.parameters()), "host_peak_bytes": metrics.host_peak()}
    from orchestrator.cpu import eager, shims  # noqa: F401
    from orchestrator.workers import megatron_groups
    from orchestrator.workers.models import build_chunks, transformer_config

    from megatron.core import parallel_state  # isort: skip

    if not torch.cuda.is_available():
        shims.apply()
    torch.cuda.current_device = lambda: torch.device("meta")  # where megatron-core allocates its weights
    engine = engine | {"module": engine["module"] | {"implementation": "local"}}
    megatron_groups.initialise(plan, engine["transformer_config"].get("hierarchical_context_parallel_sizes"))
    stage = parallel_state.get_pipeline_model_parallel_rank()
    with torch.device("meta"):
        chunks = build_chunks(plan.model.stack, transformer_config(engine, stage, **WITHOUT_KERNELS), engine)
    return {
        "stage": stage,
        "layers": sum(
            len(block.layers) for chunk in chunks for name in ("encoder", "decoder") if (block := getattr(chunk, name, None)) is not None
        ),
        "embedding": any(getattr(chunk, "embedding", None) is not None for chunk in chunks),
        "head": any(getattr(chunk, "output_layer", None) is not None and chunk.post_process for chunk in chunks),
        "parameters": sum(p.numel() for chunk in chunks for p in chunk.parameters()),
        "host_peak_bytes": metrics.host_peak(),
    }


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="One rank of a plan, alone.")
    parser.add_argument("--plan", type=Path, required=True, help="plan.json; engine.json lies beside it")
    parser.add_argument("--rank", type=int, action="append", required=True, help="may be given several times with --meta")
    parser.add_argument("--module", default="", help="the worker; without it that of the plan's engine")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--meta", action="store_true")
    parser.add_argument("--steps", type=int, default=3)
    given = parser.parse_args(words)
    distributed.quiet()
    if not torch.cuda.is_available():
        torch.set_num_threads(1)  # as torchrun sets it where it starts several ranks on a machine
    plan = from_json(given.plan.read_bytes(), str(given.plan))
    engine = runs.read_engine(given.plan.parent)
    found = []
    for rank in given.rank:
        join_alone(plan, rank)
        begin = time.perf_counter()
        if given.meta:
            result = built_without_memory(plan, engine)
            if "transformer_config" in engine:
                from megatron.core import parallel_state

                parallel_state.destroy_model_parallel()
        else:
            folder = given.plan.parent
            result = rehearse(plan, engine, folder, given.module or f"orchestrator.workers.{plan.engine}", folder, given.steps)
        found.append({"rank": rank, "seconds": time.perf_counter() - begin, **result})
        dist.destroy_process_group()
    given.out.write_text(json.dumps(found, indent=1) + "\n")
    sys.stdout.flush()
    distributed.leave(0)


if __name__ == "__main__":
    main()
