"""A checkpoint of Megatron's plain optimizer for its distributed one, and the other way: the same moments and master weights under other
names (optimizer.py:800 and :1012, distrib_optimizer.py:1404)."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

MASTER = {True: "optimizer.state.param.", False: "optimizer.state.fp32_param."}
"""What the keys of master weights begin with, by whether the optimizer is the distributed one. In fp32 the plain one has none."""


def ask(state: dict[str, Any], wrapped: Any) -> None:
    """Change what `wrapped` asks a checkpoint of the other kind for: in place, before it is read. In fp32 a shard's master weights are the
    weights themselves, which nobody has to read twice."""
    distributed = isinstance(wrapped, DistributedOptimizer)
    if distributed and not wrapped.config.bf16 and not wrapped.config.fp16:
        for tensors in state["param_state"].values():
            del tensors["param"]
    for base in nested_values(state):
        if isinstance(base, ShardedBase) and base.key.startswith(MASTER[distributed]):
            base.key = MASTER[not distributed] + base.key.removeprefix(MASTER[distributed])


def read(state: dict[str, Any], wrapped: Any) -> dict[str, Any]:
    """What was read for `ask`, as `wrapped` loads it. The model's weights must have been loaded."""
    counts_in_state = isinstance(wrapped.optimizer, torch.optim.Adam | torch.optim.AdamW)
    if isinstance(wrapped, DistributedOptimizer):
        written = state if "param_groups" in state else state["optimizer"]
        step = written["state"].get("common_step")
        groups = [{name: value for name, value in group.items() if name != "params"} for group in written["param_groups"]]
        if step is not None:
            groups = [group | {"step": float(step)} for group in groups]
        parameters = [parameter for buffer in wrapped.buffers for parameter in buffer.param_index_map]
        for tensors, parameter in zip(state["param_state"].values(), parameters, strict=True):
            tensors.setdefault("param", parameter.detach())
        found = {"optimizer": {"param_groups": groups}, "param_state": state["param_state"]}
        found["param_state_sharding_type"] = "fully_reshardable"
    else:
        mine = state if "fp32_from_fp16_params" not in state else state["optimizer"]
        written_groups = state["optimizer"]["param_groups"]
        groups = [theirs | {"params": group["params"]} for theirs, group in zip(written_groups, mine["param_groups"], strict=True)]
        values = dict(mine["state"])
        if counts_in_state:
            values["common_step"] = torch.tensor(float(groups[0]["step"]))
            groups = [{name: value for name, value in group.items() if name != "step"} for group in groups]
        found = {"state": values, "param_groups": groups}
        if "fp32_from_fp16_params" in state:
            found = {"optimizer": found, "fp32_from_fp16_params": state["fp32_from_fp16_params"]}
    if "grad_scaler" in state:
        found["grad_scaler"] = state["grad_scaler"]
    return found
