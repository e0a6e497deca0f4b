"""What the pool's ranks run: whole cases through translate, engine.json and the workers' own functions."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedTensor, apply_factories
from megatron.core.distributed import param_and_grad_buffer
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from orchestrator.cpu import shims
from orchestrator.engines import ENGINES
from orchestrator.model.schedule import learning_rate
from orchestrator.plan import Plan, from_json
from orchestrator.programs import hugging_face, hugging_face_hooks, hugging_face_steps
from orchestrator.workers import (
    checkpoint,
    distributed,
    loop,
    megatron,
    megatron_deepspeed,
    megatron_groups,
    metrics,
    models,
    runs,
    saving,
    step_timers,
    weights,
)
from orchestrator.workers import groups as groups_room
from orchestrator.workers.deepspeed_states import forget_engine
from orchestrator.workers.samples import Samples

BUILD = {"megatron": megatron.build, "megatron_deepspeed": megatron_deepspeed.build, "deepspeed": hugging_face_steps.build}
Piece = tuple[str, tuple[int, ...], tuple[int, ...], np.ndarray]
"""Key, global shape, global offset, local values."""


def _shim_deepspeed() -> None:
    """DeepSpeed keeps torch's factories as it finds them when it is imported, here by the fork server and before the shims, and puts them
    back after each ZeRO-3 model (partition_parameters.py:253, :676): let it put back those with the shims."""
    parameters = sys.modules.get("deepspeed.runtime.zero.partition_parameters")
    for name in [name for name in vars(parameters) if name.startswith(KEPT)] if parameters else ():
        setattr(parameters, name, getattr(torch, name.removeprefix(KEPT)))


KEPT = "_orig_torch_"


@contextmanager
def group(rank: int, world_size: int, store: str) -> Iterator[None]:
    """A process group of its own for one case."""
    distributed.quiet()
    shims.apply()
    _shim_deepspeed()
    # Timers are numbered on, loop after loop: ranks that had a case alone before would look for the others under another number.
    vars(step_timers)["_calls"] = itertools.count()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=distributed.TIMEOUT)
    try:
        yield
    finally:
        _forget_trainers()
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        _forget_deepspeed()
        _forget_megatron()
        gc.collect()


TRAINERS: list[Any] = []
"""Of the case that runs."""


def _forget_trainers() -> None:
    """Hooks on gradients keep a model alive for ever (a cycle through torch's graph), and with it its groups, each of which has three
    threads of gloo's: models, engines and optimizers of the case are emptied."""
    while PROGRAMS:
        trainer = PROGRAMS.pop().trainer
        TRAINERS.extend([trainer.states] if hasattr(trainer, "states") else [])
    while TRAINERS:
        trainer = TRAINERS.pop()
        if trainer.plan.engine == "deepspeed":
            _forget_hugging_face(trainer)
        engine = getattr(trainer, "engine", None)
        owners = [*(getattr(trainer, "chunks", None) or [trainer.model]), engine, getattr(engine, "optimizer", None)]
        for module in [part for owner in owners for part in (owner.modules() if isinstance(owner, torch.nn.Module) else [owner])]:
            vars(module).clear() if module is not None else None
        vars(trainer).clear()


PROGRAMS: list[Any] = []
"""Runs of transformers' Trainer of the case that runs."""


def _forget_hugging_face(trainer: Any) -> None:
    """What DeepSpeed set in transformers' modules and in torch's for this model."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    trainer.engine.destroy()
    for name in ("sdpa", "flash_attention_2"):
        ALL_ATTENTION_FUNCTIONS._local_mapping.pop(name, None)


def _forget_megatron() -> None:
    """Sums of auxiliary losses by layer, which are as long as the first model of a process needs them, and the scatter that every model
    after one with reduce_scatter_with_fp32_accumulation takes (distributed/param_and_grad_buffer.py, a global of the module): ranks that
    had such a case and ranks that had not would wait for each other."""
    param_and_grad_buffer.dist_reduce_scatter_func = dist.reduce_scatter_tensor
    MTPLossLoggingHelper.tracker.clear()
    vars(moe_utils).get("_MOE_LAYER_WISE_LOGGING_TRACKER", {}).clear()  # 0.16
    with contextlib.suppress(ImportError):  # 0.19
        from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker

        destroy_moe_metrics_tracker()


def _forget_deepspeed() -> None:
    from deepspeed.runtime.zero import parameter_offload
    from deepspeed.runtime.zero.partition_parameters import Init

    # Groups are kept for the life of a process: ranks that had a case before would not make them anew while the others wait for them.
    forget_engine()
    # ZeRO-3 numbers parameters and modules on, engine after engine, and compares the numbers between ranks.
    Init.param_id = 0
    # It leaves its own linear in place of torch's (partition_parameters.py:412), which gives weight and bias their gradients in the other
    # order: a rank that had such a case among fewer ranks would fill its buckets in another order than the others do.
    torch.nn.functional.linear = getattr(Init, "linear_bk", torch.nn.functional.linear)
    parameter_offload.DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__[0][0] = 0
    parameter_offload.FWD_MODULE_STACK.clear()  # the last model of the case stays on it


def make_trainer(plan: Plan) -> Any:
    """A trainer from the files of the plan's job."""
    with tempfile.TemporaryDirectory() as folder:
        return build(plan, files_of(plan, Path(folder)))


def files_of(plan: Plan, folder: Path) -> Path:
    """The folder with the files of the plan's job, as this rank finds them."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in ENGINES[plan.engine].translate(plan).files:
        part = folder / f"{file.path}.{dist.get_rank()}"
        part.write_text(file.content)
        part.replace(folder / file.path)
    return folder


def build(plan: Plan, folder: Path) -> Any:
    """A trainer from the files in this folder."""
    with contextlib.chdir(folder):
        TRAINERS.append(BUILD[plan.engine](plan, runs.read_engine(folder), distributed.prepare_device(plan)))
    return TRAINERS[-1]


def open_samples(plan: Plan, cache: str) -> Samples:
    """What the run trains on."""
    return runs.open_samples(plan, Path(cache))[0]


def states_of(trainer: Any) -> Any:
    """What saves and exports: the Trainer's program has it beside its steps."""
    return getattr(trainer, "states", trainer)


@contextmanager
def program(plan: Plan, cache: str, out: Path) -> Iterator[Any]:
    """The run of transformers' Trainer in this folder, with `trainer`, before its first step."""
    with contextlib.chdir(files_of(plan, out)):
        Path(cache).mkdir(exist_ok=True)
        with contextlib.suppress(FileExistsError):  # another rank's
            Path("data").symlink_to(cache)
        run = hugging_face_hooks.Run(plan, runs.read_engine(Path()), distributed.prepare_device(plan), None)
        run.trainer = hugging_face.trainer(run, *runs.planned_samples(plan))
        PROGRAMS.append(run)
        yield run


def train_by_program(plan: Plan, cache: str, out: Path) -> list[dict[str, Any]]:
    """The rows of a run of transformers' Trainer, on every rank."""
    with program(plan, cache, out) as run:
        run.train(run.trainer)
        dist.barrier()
        rows = [json.loads(line) for line in Path("metrics.jsonl").read_text().splitlines()]
        return [row for row in rows if run.saved is None or row["step"] > run.saved.step]


def parity(plan_json: str, cache: str, with_weights: bool = False, masked: bool = False) -> dict[str, Any]:
    """Losses and gradient norms of all steps, gradients of the first (before clipping), weights before it where wanted. `masked`: with
    losses on some tokens only, of which every part of a sequence has another number."""
    plan = from_json(plan_json)
    trainer = make_trainer(plan)
    samples = open_samples(plan, cache)
    found: dict[str, Any] = {"losses": [], "norms": []}
    if with_weights:
        found["weights"] = pieces(trainer, lambda parameter: parameter.detach())
    for step in range(plan.training.steps):
        microbatches = loop.read(trainer, samples, step)
        for batch in microbatches if masked else ():
            batch["loss_mask"] = (batch["tokens"] % 3 == 0).float()
        local = trainer.forward_backward(microbatches)
        if step == 0:
            found["gradients"] = gradients(trainer)
        norm = trainer.update(learning_rate(plan.training, step))
        loss, _, _ = metrics.agree(local, trainer.groups, trainer.device, stop=False)
        found["losses"].append(loss)
        found["norms"].append(norm)
    return found


def live_behind_layers(plan_json: str, cache: str) -> list[int]:
    """Bytes of all tensors made in a step and alive behind each pair of a layer's forward and another one's backward pass, of Megatron's
    combined schedule."""
    from megatron.core.models.common.model_chunk_schedule_plan import TransformerLayerSchedulePlan as LayerPlan
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    made: dict[int, Any] = {}

    class Recorded(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            for tensor in tree_leaves(result):
                if isinstance(tensor, torch.Tensor):
                    storage = tensor.untyped_storage()
                    made[storage._cdata] = StorageWeakRef(storage)
            return result

    def live() -> int:
        gc.collect()
        there = [torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for ref in made.values() if not ref.expired()]
        return sum(storage.nbytes() for storage in there if storage is not None)

    plan = from_json(plan_json)
    trainer = make_trainer(plan)
    batches = loop.read(trainer, open_samples(plan, cache), 0)
    found, run = [], LayerPlan.run

    def counted(forward: Any, backward: Any, **given: Any) -> Any:
        result = run(forward, backward, **given)
        if forward is not None and backward is not None:
            found.append(live())
        return result

    LayerPlan.run = staticmethod(counted)
    try:
        with Recorded():
            trainer.forward_backward(batches)
    finally:
        LayerPlan.run = staticmethod(run)
    return found


def groups(plan_json: str) -> dict[str, list[int]]:
    """The ranks of this rank's groups by kind, as the worker has megatron-core make them. They are those that torch makes of the plan."""
    plan = from_json(plan_json)
    found = []
    for made in (megatron_groups.initialise(plan), groups_room.of_plan(plan)):
        of_several = [kind for kind in groups_room.KINDS if made.size(kind) > 1]
        found.append({kind: dist.get_process_group_ranks(made.group(kind)) for kind in of_several})
        assert all(ranks[made.rank(kind)] == dist.get_rank() for kind, ranks in found[-1].items())
    assert found[0] == found[1]
    return {axis: ranks for axis, ranks in found[0].items() if axis in groups_room.AXES}


def count_parameters(plan_json: str) -> int:
    """Of the model that the worker builds on this rank."""
    trainer = make_trainer(from_json(plan_json))
    chunks = trainer.chunks if isinstance(trainer, megatron.MegatronTrainer) else [trainer.model]
    return sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters())


def exchange(plan_json: str, batch: dict[str, np.ndarray], folder: str) -> list[np.ndarray]:
    """Logits of this rank's last stage with the weights that the plan loads, and after a step; both weights exported below `folder`."""
    plan = from_json(plan_json)
    trainer = make_trainer(plan)
    microbatch = loop.to_device(batch, trainer.device)
    seen: list[np.ndarray] = []
    if plan.engine == "deepspeed":
        trainer.model.register_forward_hook(lambda module, args, output: seen.append(output.logits.detach().float().numpy().copy()))
    for chunk in trainer.chunks if isinstance(trainer, megatron.MegatronTrainer) else [trainer.model]:
        head = getattr(models.bare(chunk), "output_layer", None)
        if head is not None:
            head.register_forward_hook(lambda module, args, output: seen.append(output[0].detach().float().transpose(0, 1).numpy().copy()))
    states_of(trainer).export(Path(folder) / "before")
    trainer.forward_backward([microbatch] * plan.num_microbatches)
    trainer.update(1e-2)
    states_of(trainer).export(Path(folder) / "after")
    before = len(seen)
    trainer.forward_backward([microbatch] * plan.num_microbatches)
    return [seen[0], seen[before]] if seen else []


def gradients(trainer: Any) -> list[Piece]:
    """This rank's whole gradients after the data-parallel reduction. A collective over the data-parallel group where they are sharded."""
    if isinstance(trainer, megatron.MegatronTrainer):
        if trainer.plan.zero_stage:
            for chunk in trainer.chunks:
                dense = parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=True)
                experts = parallel_state.get_expert_data_parallel_group()
                buffers = [(buffer, dense) for buffer in chunk.buffers] + [(buffer, experts) for buffer in chunk.expert_parallel_buffers]
                for buffer, group in buffers:
                    for bucket in buffer.buckets:
                        shards = bucket.grad_data.chunk(group.size())
                        mine = shards[group.rank()].clone()
                        dist.all_gather(list(shards), mine, group=group)
        return pieces(trainer, lambda parameter: parameter.main_grad)
    from deepspeed.utils import safe_get_full_grad

    return pieces(trainer, safe_get_full_grad)


def pieces(trainer: Any, value: Any) -> list[Piece]:
    """value(parameter) of every parameter of this rank, placed in the whole model by megatron-core's own names and offsets."""
    if isinstance(trainer, megatron.MegatronTrainer):
        chunks, whole = [models.bare(chunk) for chunk in trainer.chunks], nullcontext()
    else:
        import deepspeed

        chunks = [trainer.model]
        whole = deepspeed.zero.GatheredParameters(list(trainer.model.parameters())) if trainer.plan.zero_stage == 3 else nullcontext()
    found = []
    with torch.no_grad():
        parameters = {id(p): value(p) for chunk in chunks for p in chunk.parameters()}
        with whole:
            for chunk in chunks:
                state = weights.sharded_state(chunk)
                for base in nested_values(state):
                    if isinstance(base, ShardedBase) and isinstance(getattr(base, "data", None), torch.Tensor):
                        base.data = parameters[id(base.data)].float() if id(base.data) in parameters else None  # a buffer
                apply_factories(state)
                for shard in nested_values(state):
                    if isinstance(shard, ShardedTensor) and shard.data is not None:
                        found.append((shard.key, tuple(shard.global_shape), tuple(shard.global_offset), shard.data.clone().numpy()))
    return found


def train_and_save(plan_json: str, cache: str, out: str) -> list[float]:
    """The real loop with its evaluations and checkpoints, continued where the plan says so; losses."""
    plan = from_json(plan_json)
    if plan.engine == "deepspeed":
        return [row["loss"] for row in train_by_program(plan, cache, Path(out))]
    trainer = make_trainer(plan)
    samples, valid = runs.open_samples(plan, Path(cache))
    first_step = 0
    if plan.run.resume:
        saved = checkpoint.find(plan.run.resume)
        trainer.load(saved)
        first_step = saved.step
    Path(out).mkdir(parents=True, exist_ok=True)
    return loop.train(trainer, samples, Path(out), first_step, valid=valid)


def whole(answers: list[dict[str, Any]], name: str) -> dict[str, np.ndarray]:
    """Whole tensors by name from all ranks' pieces; tensors of one kind of layer come stacked."""
    tensors: dict[str, np.ndarray] = {}
    for answer in answers:
        for key, global_shape, offset, values in answer[name]:
            target = tensors.setdefault(key, np.full(global_shape, np.nan, dtype=np.float32))
            shape = (1,) * (len(global_shape) - values.ndim) + values.shape
            target[tuple(slice(begin, begin + size) for begin, size in zip(offset, shape, strict=True))] = values.reshape(shape)
    return tensors


def started_by_a_save(plan_json: str, cache: str, out: str) -> list[str]:
    """Train and save: names of the processes that were started meanwhile."""
    import multiprocessing.process

    started: list[str] = []
    start = multiprocessing.process.BaseProcess.start

    def counted(process: Any) -> None:
        started.append(process.name)
        start(process)

    plan = from_json(plan_json)
    trainer = make_trainer(plan)
    multiprocessing.process.BaseProcess.start = counted  # type: ignore[method-assign]
    try:
        loop.train(trainer, open_samples(plan, cache), Path(out))
    finally:
        multiprocessing.process.BaseProcess.start = start  # type: ignore[method-assign]
    return started


def save_with_little_disk(plan_json: str, cache: str, out: str, at_most: int) -> str:
    """Train one step and save, then another with files of at most so many bytes, which the kernel refuses as it does on a full disk: what
    the loop says."""
    import resource

    plan = from_json(plan_json)
    trainer = make_trainer(plan)
    Path(out).mkdir(parents=True, exist_ok=True)
    loop.train(trainer, open_samples(plan, cache), Path(out))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (at_most, hard))
    try:
        saves = saving.Saves(plan, Path(out))
        saves.save(trainer, plan.training.steps + 1)
        saves.wait()
    except saving.CheckpointError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    return ""
