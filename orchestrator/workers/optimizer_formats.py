"""Megatron's optimizers in a checkpoint, as another layout asks for them.

The plain optimizer and the distributed one write the same moments and master weights under other names (optimizer.py:800 and :1012,
distrib_optimizer.py:1404). And experts that are divided over ranks have an optimizer of their own, chained to the others' one
(optimizer.py:1184), while undivided ones share theirs: what is no tensor then lies one level deeper. Tensors are named by their parameters
either way.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

FORMAT = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
"""The distributed optimizer's checkpoint that any other layout can load (distrib_optimizer.py:1192), with the names of a lone optimizer's
tensors in chained ones (optimizer.py:1198)."""
MASTER = {True: "optimizer.state.param.", False: "optimizer.state.fp32_param."}
"""What the keys of master weights begin with, by whether the optimizer is the distributed one. In fp32 the plain one has none."""


def _each(state: dict[Any, Any], optimizer: Any) -> Iterator[tuple[dict[Any, Any], Any]]:
    """Each chained optimizer with its state; a lone one has all of it."""
    chained = optimizer.chained_optimizers
    for index, wrapped in enumerate(chained):
        yield (state if len(chained) == 1 else state[index]), wrapped


def ask(state: dict[Any, Any], optimizer: Any) -> None:
    """Change what `optimizer` (a ChainedOptimizer) asks a checkpoint of the other kind for: in place, before it is read. In fp32 a shard's
    master weights are the weights themselves, which nobody has to read twice."""
    for mine, wrapped in _each(state, optimizer):
        distributed = isinstance(wrapped, DistributedOptimizer)
        if distributed and not wrapped.config.bf16 and not wrapped.config.fp16:
            for tensors in mine["param_state"].values():
                del tensors["param"]
        for base in nested_values(mine):
            if isinstance(base, ShardedBase) and base.key.startswith(MASTER[distributed]):
                base.key = MASTER[not distributed] + base.key.removeprefix(MASTER[distributed])


@contextmanager
def of_the_other_kind(optimizer: Any) -> Iterator[None]:
    """Inside, Megatron's own loader (training/checkpointing.py, load_checkpoint) reads a checkpoint of the plain optimizer into the
    distributed one, or the other way round. `optimizer`: a ChainedOptimizer."""
    shard, load, described = optimizer.sharded_state_dict, optimizer.load_state_dict, dist_checkpointing.load_content_metadata

    def asked(*args: Any, **kwargs: Any) -> Any:
        state = shard(*args, **kwargs)
        ask(state, optimizer)
        return state

    dist_checkpointing.load_content_metadata = lambda *args, **kwargs: (described(*args, **kwargs) or {}) | FORMAT
    optimizer.sharded_state_dict = asked
    optimizer.load_state_dict = lambda state: load(read(state, optimizer))
    try:
        yield
    finally:
        dist_checkpointing.load_content_metadata = described
        del optimizer.sharded_state_dict, optimizer.load_state_dict


def read(state: dict[Any, Any], optimizer: Any) -> dict[Any, Any]:
    """What was read, as `optimizer` (a ChainedOptimizer) loads it: tensors and the count of steps are the checkpoint's, settings are the
    plan's. The model's weights must have been loaded."""
    step, scaler = _step(state), _scaler(state)
    found = [_read(mine, wrapped, step) | scaler for mine, wrapped in _each(state, optimizer)]
    return found[0] if len(found) == 1 else dict(enumerate(found))


def _step(written: dict[Any, Any]) -> float | None:
    """How many steps were done, which torch's Adam has in its state and others in their groups; None: an optimizer that does not count."""
    if "common_step" in written:
        return float(written["common_step"])
    for group in written.get("param_groups", ()):
        if "step" in group:
            return float(group["step"])
    return next((step for value in written.values() if isinstance(value, dict) and (step := _step(value)) is not None), None)


def _scaler(written: dict[Any, Any]) -> dict[str, Any]:
    """The scale of losses, of which chained optimizers have equal ones; empty without fp16."""
    part = written if "grad_scaler" in written else written.get(0, {})
    return {name: value for name, value in part.items() if name == "grad_scaler"}


def _read(state: dict[Any, Any], wrapped: Any, step: float | None) -> dict[str, Any]:
    """What is read into one optimizer that is not chained, in the format that it takes."""
    inner = wrapped.optimizer
    in_state = isinstance(inner, torch.optim.Adam | torch.optim.AdamW)
    groups = [{name: value for name, value in group.items() if name not in ("params", "step")} for group in inner.param_groups]
    if isinstance(wrapped, DistributedOptimizer):
        if step is not None:
            groups = [group | {"step": step if in_state else int(step)} for group in groups]
        parameters = [parameter for buffer in wrapped.buffers for parameter in buffer.param_index_map]
        for tensors, parameter in zip(state["param_state"].values(), parameters, strict=True):
            tensors.setdefault("param", parameter.detach())
        found = {"optimizer": {"param_groups": groups}, "param_state": state["param_state"]}
        return found | {"param_state_sharding_type": FORMAT["distrib_optim_sharding_type"]}
    mine = state if "fp32_from_fp16_params" not in state else state["optimizer"]
    groups = [group | {"params": asked["params"]} for group, asked in zip(groups, mine["param_groups"], strict=True)]
    values = {name: value for name, value in mine["state"].items() if name != "common_step"}
    if step is not None and in_state:
        values["common_step"] = torch.tensor(step)
    elif step is not None:
        groups = [group | {"step": int(step)} for group in groups]
    found = {"state": values, "param_groups": groups}
    if "fp32_from_fp16_params" in state:
        found = {"optimizer": found, "fp32_from_fp16_params": state["fp32_from_fp16_params"]}
    return found
