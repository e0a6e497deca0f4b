"""What all models under a DeepSpeed engine share: joining, the plan's view of it, norms, and checkpoints.

DeepSpeed's own files are those of one layout. It offers each parameter's fp32 weight and moments whole, though (utils/tensor_fragment.py);
data-parallel ranks take turns in writing them by their places in the whole model, and put their own parts back when they load.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from orchestrator.errors import InputError
from orchestrator.plan import Plan
from orchestrator.plan.check import bound_to_layout, has_states_by_place

from orchestrator.cpu import eager  # noqa: F401  # isort: skip  (before DeepSpeed)
from orchestrator.workers import distributed, parts
from orchestrator.workers.checkpoint import Saved, layout
from orchestrator.workers.groups import MODEL, REPLICAS, Groups
from orchestrator.workers.parts import WEIGHT, Parts, Place
from orchestrator.workers.saving import Snapshot

TAG = "state"
"""DeepSpeed's name for the folder inside a checkpoint."""
CLIP_EPSILON = 1e-6
"""Number that is added to the norm which gradients are clipped by: torch's clip_grad_norm_, megatron-core's and DeepSpeed's."""

UNCLIPPED = 1e30
"""A bound that clips nothing: stage 0 computes no norm unless it clips."""
STATES = "states"
"""The folder inside a checkpoint that holds weights and moments by place."""
MOMENTS = ("exp_avg", "exp_avg_sq")
COUNTED = ("params", "step")
"""What a group of an optimizer's parameters has beside settings."""
ACCUMULATED = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def import_deepspeed(device: torch.device) -> Any:
    """Imports DeepSpeed, made ready for this device before it looks at the machine itself."""
    if device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    if device.type == "cpu":
        # Otherwise init_distributed compiles a shared-memory all-reduce, for a minute (comm/torch.py); gloo does the same.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def join(plan: Plan, device: torch.device) -> Any:
    """DeepSpeed, in the process group that there is, which must be the plan's. Its own reports (ds.steps_per_print,
    ds.wall_clock_breakdown) go into the log where the user has keys of `ds.*`, else its errors alone. Raises InputError."""
    ranks = dist.get_world_size() if dist.is_initialized() else None
    if ranks != plan.world_size:
        why = "there is no process group" if ranks is None else f"the process group has {ranks} ranks"
        raise InputError("world_size", plan.world_size, f"{why}: DeepSpeed would train as if it were alone")
    if plan.run.trace_routing:
        raise InputError("train.trace_routing", "true", f"engine={plan.engine} has no routers of megatron-core that are listened to")
    deepspeed = import_deepspeed(device)
    deepspeed.utils.logging.set_log_level_from_string("info" if plan.extra.get("ds") else "error")
    deepspeed.init_distributed("nccl" if device.type == "cuda" else "gloo", verbose=False)
    return deepspeed


def forget_engine() -> None:
    """Lets the next engine of this process be of another plan: what DeepSpeed, AutoTP and accelerate keep for a process' life goes."""
    import deepspeed.comm.comm as deepspeed_comm
    from deepspeed.module_inject.layers import set_autotp_mode
    from deepspeed.runtime.tensor_parallel import init_utils
    from deepspeed.utils import groups as deepspeed_groups

    deepspeed_comm.cdb = None
    deepspeed_groups._release_process_group_references()
    set_autotp_mode(training=False)
    init_utils._TP_MODEL_INIT_ARGS = None
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def parameter_groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """The optimizer's groups of what is trained, as megatron-core groups it (optimizer/__init__.py:69): biases and norms don't decay. A
    partitioned parameter's own shape is flat. By the names DeepSpeed finds them when it takes experts out (moe/utils.py:103)."""
    decayed: list[torch.nn.Parameter] = []
    free: list[torch.nn.Parameter] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            (decayed if len(getattr(parameter, "ds_shape", parameter.shape)) > 1 else free).append(parameter)
    groups: list[dict[str, Any]] = [{"params": decayed, "name": "decayed"}, {"params": free, "name": "free", "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def require_as_planned(engine: Any, plan: Plan) -> None:
    """Raises InputError that names what a DeepSpeed engine does otherwise than the plan. Its configuration reads the world from whatever
    group there is: on any error it goes on with a world of one rank (deepspeed/runtime/config.py:455-475)."""
    training = plan.training
    clip = training.clip or (UNCLIPPED if plan.zero_stage == 0 else 0.0)
    pairs = {
        # Who shares ZeRO's states: the ranks of a sequence as well, which hold the same weights.
        "dp x cp": (engine.seq_dp_world_size, plan.dp * plan.cp),
        "zero_stage": (engine.zero_optimization_stage(), plan.zero_stage),
        "micro_batch_size": (engine.train_micro_batch_size_per_gpu(), plan.micro_batch_size),
        "num_microbatches": (engine.gradient_accumulation_steps(), plan.num_microbatches),
        "training.clip": (engine.gradient_clipping(), clip),
        "zero_shard_size": (engine.zero_hpz_partition_size(), plan.zero_shard_size or 1),
    }
    if plan.zero_stage >= 1:
        pairs["training.grad_accum_dtype"] = (engine.get_data_types()[1], ACCUMULATED[training.grad_accum_dtype])
    if plan.cp == 1:
        # Under Ulysses DeepSpeed has no group of data-parallel ranks alone.
        pairs["dp"] = (engine.dp_world_size, plan.dp)
    if engine.autotp_size() <= 1:
        # Micro-batch x accumulation x the world that its configuration saw, which under AutoTP is all ranks.
        pairs["global_batch_size"] = (engine.train_batch_size(), plan.global_batch_size)
    for key, (found, wanted) in pairs.items():
        if found != wanted:
            raise InputError(key, str(wanted), f"DeepSpeed took {found} in its place")


class DeepSpeedStates:
    """The model of one rank under a DeepSpeed engine, and its checkpoints."""

    plan: Plan
    device: torch.device
    groups: Groups
    model: torch.nn.Module
    places: list[Place]
    engine: Any
    engine_fields: dict[str, Any]
    """The content of engine.json."""

    def parameter_groups(self) -> list[dict[str, Any]]:
        """`parameter_groups` of this model; where DeepSpeed steps when it is built with a rate of 0, after which a schedule begins."""
        still = {"initial_lr": self.plan.training.lr, "lr": 0.0} if self.steps_when_built() else {}
        return [group | still for group in parameter_groups(self.model)]

    def steps_when_built(self) -> bool:
        """Whether DeepSpeed steps when it is built. At stage 0 in bf16 or fp16 it allocates Adam's state by a step with gradients of zero
        (initialize_optimizer_states in fp16/unfused_optimizer.py and fused_optimizer.py:125): it decays the weights once, and Adam's bias
        correction is one step ahead for ever. We give that step no learning rate, and forget its count."""
        return self.plan.zero_stage == 0 and self.plan.training.precision != "fp32"

    def take(self, engine: Any) -> None:
        """This model's engine, as DeepSpeed has made it. In fp32 at stage 0 norm and clipping are ours: DeepSpeed tells no norm
        (engine.py:3503), and clips by one that leaves out the later stages of its pipeline (clip_grad_norm_ in runtime/utils.py counts what
        is not cut on the first rank of TP x PP alone). Raises InputError where the engine is otherwise than the plan."""
        self.engine = engine
        require_as_planned(engine, self.plan)
        if self.steps_when_built():
            engine.optimizer.optimizer.state.clear()
        if self.plan.zero_stage == 0 and self.plan.training.precision == "fp32":
            engine.clip_fp32_gradients = self._clip

    def _clip(self) -> None:
        """Scales the gradients down to the plan's norm (0: leaves them as they are), and tells their norm before. Parts of a tensor count
        on every rank, copies once."""
        first, found = self.groups.rank("tp") == 0, [p for p in self.model.parameters() if p.grad is not None]
        cut = [p for p in found if first or getattr(p, "tensor_model_parallel", False)]
        counted = [p.grad for p in cut if not getattr(p, "ds_pipe_replicated", False)]
        square = sum((gradient.double().square().sum() for gradient in counted), torch.zeros((), dtype=torch.float64, device=self.device))
        self.groups.sum(MODEL, square)
        self.engine._global_grad_norm = norm = math.sqrt(float(square))
        most = self.plan.training.clip
        for parameter in found if most and norm > most else ():
            parameter.grad.mul_(most / (norm + CLIP_EPSILON))

    # --------------------------------------------------------------------------------------------------------------------- checkpoints

    def snapshot(self, folder: Path, step: int) -> Snapshot:
        """Begins a checkpoint: by places in the whole model where those can be had; else it is written as DeepSpeed does, for this
        layout only."""
        if has_states_by_place(self.plan):
            self._link()
            torch.save(distributed.generator_states(self.device), folder / f"generators-{dist.get_rank():06d}.pt")
            return parts.snapshot(self._shards(), folder / STATES)
        # Frozen weights are the base's, which is there anyway.
        trained = self.plan.training.lora is not None
        self.engine.save_checkpoint(str(folder), tag=TAG, client_state={"step": step}, save_latest=False, exclude_frozen_parameters=trained)
        return Snapshot()

    def load(self, saved: Saved) -> None:
        """Any layout, but for plans whose checkpoints are DeepSpeed's own; the generators only in the same. Rates, decay and betas stay the
        plan's, which train.change= may have changed, where DeepSpeed's own brings those that it was written with, in the groups of the
        optimizer (torch/optim/optimizer.py, load_state_dict). Raises InputError."""
        mine = layout(self.plan)
        if (saved.folder / STATES).is_dir() and has_states_by_place(self.plan):
            self._put_back(Parts(saved.folder / STATES), saved.step)
            if saved.layout == mine:
                path = saved.folder / f"generators-{dist.get_rank():06d}.pt"
                distributed.set_generator_states(torch.load(path, weights_only=True), self.device)
            return
        if saved.layout != mine:
            keys = [key for key in {**saved.layout, **mine} if saved.layout.get(key) != mine.get(key)]
            different = ", ".join(f"{key}={saved.layout.get(key)} (now {mine.get(key)})" for key in keys)
            bound = bound_to_layout(self.plan)
            why = f"was written with {different}; {f'with {bound} it' if bound else 'it'} goes on in the same layout only"
            raise InputError("train.resume", saved.folder, why)
        before = [{name: value for name, value in group.items() if name not in COUNTED} for group in self.engine.optimizer.param_groups]
        with torch.serialization.safe_globals(plain_records()):
            path, _ = self.engine.load_checkpoint(str(saved.folder), tag=TAG, load_module_strict=self.plan.training.lora is None)
        if path is None:
            raise InputError("train.resume", saved.folder, "holds nothing that DeepSpeed can load")
        for group, settings in zip(self.engine.optimizer.param_groups, before, strict=True):
            group |= settings

    def _by_parameter(self) -> list[tuple[torch.nn.Parameter, list[Place]]]:
        """The places of each trained parameter; frozen weights are the base's, which is there anyway."""
        found: dict[int, list[Place]] = {}
        for place in self.places:
            if place.parameter.requires_grad:
                found.setdefault(id(place.parameter), []).append(place)
        return [(places[0].parameter, places) for places in found.values()]

    def _shards(self) -> Iterator[tuple[Place, str, torch.Tensor]]:
        """Every parameter is made whole on all its data-parallel ranks, one after the other; one of them yields it. They all call this."""
        mine, ranks = self.groups.rank(REPLICAS), self.groups.size(REPLICAS)
        for turn, (parameter, places) in enumerate(self._by_parameter()):
            for kind in (WEIGHT, *MOMENTS):
                value = self._whole(parameter, kind)
                for place in places:
                    if place.first and turn % (ranks // place.divided) == mine // place.divided:
                        yield place, kind, place.of(value)

    def _whole(self, parameter: torch.nn.Parameter, kind: str) -> torch.Tensor:
        """A parameter's weight or moment in fp32."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        if self.plan.zero_stage == 0:  # a parameter that never had a gradient has no state
            return parameter.detach() if kind == WEIGHT else self.engine.optimizer.state[parameter].get(kind, torch.zeros_like(parameter))
        value = safe_get_full_fp32_param(parameter) if kind == WEIGHT else safe_get_full_optimizer_state(parameter, kind)
        assert value is not None
        return value

    def _link(self) -> None:
        """Tells stages 1 and 2 where each parameter's moments are. They do it themselves after the step of the first group of parameters,
        when the others have none yet (stage_1_and_2.py:2987)."""
        if self.plan.zero_stage in (1, 2):
            self.engine.optimizer._hp_optimizer_states_linked = False
            self.engine.optimizer._lazy_init_hp_params_optimizer_state()

    def _put_back(self, written: Parts, step: int) -> None:
        """Puts back what this layout needs. Optimizers make Adam's states in their first step; here they are made as they are after `step`
        steps: torch's counts them in a tensor, DeepSpeed's in an integer, FusedAdam in its groups."""
        wrapped, stage = self.engine.optimizer, self.plan.zero_stage
        adam = wrapped.optimizer if stage else wrapped
        masters = [master for group in adam.param_groups for master in group["params"]]
        in_tensor = type(adam).__module__.startswith("torch.")
        for master in wrapped.fp32_partitioned_groups_flat if stage == 3 else masters:
            counted = {"step": torch.tensor(float(step)) if in_tensor else step}
            adam.state[master] = counted | {kind: torch.zeros_like(master) for kind in MOMENTS}
        for group in adam.param_groups:
            if "step" in group:
                group["step"] = step
        self._link()
        for parameter, places in self._by_parameter():
            for kind in (WEIGHT, *MOMENTS):
                value = torch.zeros(tuple(getattr(parameter, "ds_shape", parameter.shape)))
                for place in places:
                    place.of(value).copy_(written.of(kind, place))
                with torch.no_grad():
                    self._set(parameter, kind, value)

    def _set(self, parameter: Any, kind: str, value: torch.Tensor) -> None:
        """Puts this rank's part of `value` into the optimizer, and a weight into the model as well."""
        import deepspeed

        optimizer, stage, name = self.engine.optimizer, self.plan.zero_stage, None if kind == WEIGHT else kind
        if stage == 0:
            (parameter if name is None else optimizer.state[parameter][kind]).copy_(value)
        elif stage < 3:
            parameter.set_full_hp_param(value, name)
        else:
            # DeepSpeed's own setter takes the last rank's padding for a part of the parameter (stage3.py:3196).
            target, _ = optimizer._get_fp32_opt_state_partition(parameter, False, name)
            mine = value.reshape(-1)[target.numel() * optimizer._get_param_partition_rank(parameter) :][: target.numel()]
            target.view(-1)[: mine.numel()].copy_(mine)
        if name is None and stage:
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0, enabled=stage == 3):
                parameter.copy_(value)


def plain_records() -> list[Any]:
    """The classes that DeepSpeed's own checkpoints hold beside tensors and plain values: records without code of their own."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]
