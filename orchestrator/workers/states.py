"""A DeepSpeed run's weights and Adam moments by their places in the whole model, so that any layout and ZeRO stage can continue from them.

DeepSpeed's own files are those of one layout. It offers each parameter's fp32 weight and moments whole, though (utils/tensor_fragment.py);
data-parallel ranks take turns in writing them, and put their own parts back when they load.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

from orchestrator.plan import Plan
from orchestrator.workers import parts
from orchestrator.workers.groups import REPLICAS, Groups
from orchestrator.workers.parts import WEIGHT, Parts, Place
from orchestrator.workers.saving import Snapshot

FOLDER = "states"
"""The folder inside a checkpoint that holds weights and moments by place."""
MOMENTS = ("exp_avg", "exp_avg_sq")


def covers(plan: Plan) -> bool:
    """Whether this plan's states are all known here (engines/ds_states.py says the same to who plans; a test compares
    them). Stage 0 in 16 bits and fp16 wrap optimizers that have no such access, and a loss scale; there DeepSpeed's own checkpoints are
    written."""
    training = plan.training
    return training.optimizer == "adamw" and training.precision != "fp16" and (plan.zero_stage > 0 or training.precision == "fp32")


def snapshot(engine: Any, places: Sequence[Place], plan: Plan, groups: Groups, folder: Path) -> Snapshot:
    """What is left to do to write the states, of which it has copies in host memory, into the folder. All ranks call this."""
    _link(engine, plan)
    return parts.snapshot(_shards(engine, places, plan, groups), folder)


def _shards(engine: Any, places: Sequence[Place], plan: Plan, groups: Groups) -> Iterator[tuple[Place, str, torch.Tensor]]:
    """Every parameter is made whole on all its data-parallel ranks, one after the other; one of them yields it. Collective over them."""
    mine = groups.rank(REPLICAS)
    ranks = groups.size(REPLICAS)
    for turn, (parameter, found) in enumerate(_by_parameter(places)):
        for kind in (WEIGHT, *MOMENTS):
            value = _get(engine, parameter, kind, plan)
            for place in found:
                if place.first and turn % (ranks // place.divided) == mine // place.divided:
                    yield place, kind, place.of(value)


def load(engine: Any, places: Sequence[Place], plan: Plan, folder: Path, step: int) -> None:
    """Puts back what this layout needs of what all ranks wrote into this folder. `step`: of Adam."""
    written = Parts(folder)
    _make_states(engine, plan, step)
    for parameter, found in _by_parameter(places):
        for kind in (WEIGHT, *MOMENTS):
            value = torch.zeros(tuple(getattr(parameter, "ds_shape", parameter.shape)))
            for place in found:
                place.of(value).copy_(written.of(kind, place))
            _set(engine, parameter, kind, value, plan)


def _by_parameter(places: Sequence[Place]) -> list[tuple[torch.nn.Parameter, list[Place]]]:
    found: dict[int, tuple[torch.nn.Parameter, list[Place]]] = {}
    for place in places:
        if place.parameter.requires_grad:  # frozen weights are the base's, which is there anyway
            found.setdefault(id(place.parameter), (place.parameter, []))[1].append(place)
    return list(found.values())


def _get(engine: Any, parameter: torch.nn.Parameter, kind: str, plan: Plan) -> torch.Tensor:
    """The whole tensor of a parameter's weight or moment, in fp32."""
    if plan.zero_stage == 0:
        if kind == WEIGHT:
            return parameter.detach()
        # A parameter that never had a gradient has no state.
        return engine.optimizer.state[parameter].get(kind, torch.zeros_like(parameter))
    value = safe_get_full_fp32_param(parameter) if kind == WEIGHT else safe_get_full_optimizer_state(parameter, kind)
    assert value is not None
    return value


def _set(engine: Any, parameter: torch.nn.Parameter, kind: str, value: torch.Tensor, plan: Plan) -> None:
    """Puts this rank's part of `value` into the optimizer, and a weight into the model as well."""
    with torch.no_grad():
        if plan.zero_stage == 0:
            (parameter if kind == WEIGHT else engine.optimizer.state[parameter][kind]).copy_(value)
        elif plan.zero_stage < 3:
            parameter.set_full_hp_param(value, None if kind == WEIGHT else kind)
            if kind == WEIGHT:
                parameter.copy_(value)
        else:
            # DeepSpeed's own setter takes the last rank's padding for a part of the parameter (stage3.py:3196).
            optimizer = engine.optimizer
            target, _ = optimizer._get_fp32_opt_state_partition(parameter, False, None if kind == WEIGHT else kind)
            _fill(target, value, optimizer._get_param_partition_rank(parameter))
            if kind == WEIGHT:
                import deepspeed

                with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                    parameter.copy_(value)


def _fill(partition: torch.Tensor, value: torch.Tensor, rank: int) -> None:
    """Fills partition `rank` of the flat value; the last may be padded."""
    flat = value.reshape(-1)
    begin = min(partition.numel() * rank, flat.numel())
    end = min(begin + partition.numel(), flat.numel())
    partition.view(-1)[: end - begin].copy_(flat[begin:end])


def _make_states(engine: Any, plan: Plan, step: int) -> None:
    """Makes Adam's states, which optimizers make in their first step, as they are after `step` steps; the moments are filled later."""
    wrapped = engine.optimizer
    adam = wrapped.optimizer if plan.zero_stage else wrapped
    if plan.zero_stage == 3:
        masters = list(wrapped.fp32_partitioned_groups_flat)
    else:
        masters = [master for group in adam.param_groups for master in group["params"]]
    for master in masters:
        count = torch.tensor(float(step)) if _is_torch(adam) else step
        adam.state[master] = {"step": count} | {kind: torch.zeros_like(master) for kind in MOMENTS}
    for group in adam.param_groups:
        if "step" in group:  # DeepSpeed's FusedAdam counts there
            group["step"] = step
    _link(engine, plan)


def _link(engine: Any, plan: Plan) -> None:
    """Tell stages 1 and 2 where each parameter's moments are. They do it themselves after the step of the first group of parameters, when
    the others have none yet (stage_1_and_2.py:2987)."""
    if plan.zero_stage in (1, 2):
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()


def _is_torch(adam: Any) -> bool:
    """Whether an Adam is torch's own, which counts steps in a tensor; DeepSpeed's counts in an integer."""
    return type(adam).__module__.startswith("torch.")
