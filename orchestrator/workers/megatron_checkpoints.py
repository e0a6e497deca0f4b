"""What megatron-core's checkpoints lack: results that stay in the rank that writes, and, where its distributed optimizer has torch's AdamW
(without Transformer Engine and Apex), states that can be loaded."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.optimizer import distrib_optimizer
from megatron.core.optimizer import optimizer as core_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from orchestrator.plan import Plan
from orchestrator.workers import checkpoint, hf_weights, models, optimizer_formats, unpickling, weights
from orchestrator.workers.parts import Place
from orchestrator.workers.runs import read_plan


def keep_results_here() -> None:
    """Spares a rank that writes by itself the server process for what it has written, which would import the program anew
    (dist_checkpointing/strategies/filesystem_async.py:51; :53 of 0.19)."""
    for name in ("_get_write_results_queue", "get_write_results_queue"):
        if hasattr(filesystem_async, name):
            setattr(filesystem_async, name, lambda *args: queue.Queue())


def _adams(optimizer: Any) -> list[DistributedOptimizer]:
    """The distributed optimizers over torch's own AdamW."""
    return [
        wrapped
        for wrapped in optimizer.chained_optimizers
        if isinstance(wrapped, DistributedOptimizer) and isinstance(wrapped.optimizer, torch.optim.AdamW)
    ]


RATES: Final = ("max_lr", "min_lr", "start_wd", "end_wd")
SETTINGS: Final = (*RATES, "betas", "eps")


@contextmanager
def loading(optimizer: Any, scheduler: Any, plan: Plan, folder: Path | None) -> Iterator[None]:
    """Inside, Megatron's own program loads the checkpoint in this folder, also of the plain optimizer into the distributed one or the other
    way round; None: there is none. Afterwards groups of parameters have the settings that they had before, as the plan says, not those that
    were saved: Megatron takes the saved ones for the rate (core/optimizer_param_scheduler.py, get_lr) and, from 0.19 on, finds no group
    whose rates differ (core/optimizer/optimizer.py:139). What Megatron lets torch read beside tensors is in core/safe_globals.py."""
    if folder is None:
        yield
        return
    # There is no plan yet where the run ended between Megatron's marker and ours.
    before_plan = read_plan(folder) if (folder / checkpoint.PLAN).is_file() else plan
    other_kind = (before_plan.zero_stage == 0) != (plan.zero_stage == 0)
    prepare(optimizer)
    before = [{name: group[name] for name in SETTINGS if name in group} for group in optimizer.param_groups]
    keys = {module: module.param_group_identifier_keys for module in (core_optimizer, distrib_optimizer)}
    for module, names in keys.items():
        module.param_group_identifier_keys = tuple(name for name in names if name not in RATES)
    try:
        with unpickling.refused(folder), optimizer_formats.of_the_other_kind(optimizer) if other_kind else nullcontext():
            yield
    finally:
        for module, names in keys.items():
            module.param_group_identifier_keys = names
    for group, settings in zip(optimizer.param_groups, before, strict=True):
        group.update(settings)
    scheduler.step(increment=0)
    count_steps_apart(optimizer)


def gather_weights(chunks: Sequence[Any]) -> None:
    """Gathers the last update's weights of a rank's wrapped chunks at once, where they would be gathered in the next forward pass."""
    for chunk in chunks:
        if chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)


def export(chunks: Sequence[Any], places: Sequence[Place], plan: Plan, engine: dict[str, Any], folder: Path) -> None:
    """Writes a Hugging Face checkpoint into the folder, from all ranks' wrapped chunks. `places`: those of a rank's before they were
    wrapped. All ranks call this."""
    gather_weights(chunks)
    found = [*places, *weights.balances([models.bare(chunk) for chunk in chunks])]
    hf_weights.export(found, plan, folder, engine, lambda parameter: nullcontext())


def prepare(optimizer: Any) -> None:
    """Prepares an optimizer for a checkpoint to be loaded: AdamW makes its state in the first step, but what is loaded is described by that
    state (distrib_optimizer.py:642); and the state is put back without the step count, which is asked for all the same
    (distrib_optimizer.py:940)."""
    for wrapped in _adams(optimizer):
        for parameter in (p for group in wrapped.optimizer.param_groups for p in group["params"]):
            zeros = torch.zeros_like(parameter)
            wrapped.optimizer.state[parameter] = {"step": torch.tensor(0.0), "exp_avg": zeros, "exp_avg_sq": zeros.clone()}
        wrapped._set_main_param_and_optimizer_states = partial(_set_with_step, wrapped, wrapped._set_main_param_and_optimizer_states)


def count_steps_apart(optimizer: Any) -> None:
    """Gives each parameter a step count of its own, after a checkpoint was loaded: there is one tensor for all parameters
    (distrib_optimizer.py:813), which would count every parameter's step."""
    for wrapped in _adams(optimizer):
        for values in wrapped.optimizer.state.values():
            values["step"] = values["step"].clone()


def _set_with_step(wrapped: Any, put: Any, model_parameter: Any, tensors: dict[str, torch.Tensor]) -> None:
    """`put(model_parameter, tensors)` with the step count that the state holds already."""
    group, order = wrapped.model_param_group_index_map[model_parameter]
    state = wrapped.optimizer.state[wrapped.optimizer.param_groups[group]["params"][order]]
    put(model_parameter, {"step": state["step"], **tensors})
