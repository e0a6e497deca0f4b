"""The process groups of one rank, which all that is shared between engines asks in the same way: the loop, the preflight, checkpoints.

An engine on megatron-core's layers hands over megatron-core's groups (megatron_groups.py); any other makes them with torch (`of_plan`).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from orchestrator.plan import Plan

AXES = ("tp", "pp", "cp", "dp")
REPLICAS = "dp-cp"
"""The ranks that hold the same part of the model: of other samples, or of other parts of the same sequences."""
MODEL = "tp-pp"
"""The ranks that hold one copy of the model together."""
KINDS = (*AXES, REPLICAS, MODEL)


class Groups:
    """The process groups of this rank by kind (an axis, REPLICAS, MODEL), each of the ranks that differ from it in those axes alone. A kind
    that is not there is this rank alone."""

    def __init__(self, by_kind: Mapping[str, dist.ProcessGroup]) -> None:
        self._by_kind = {kind: group for kind, group in by_kind.items() if dist.get_world_size(group) > 1}

    def group(self, kind: str) -> dist.ProcessGroup:
        """Raises KeyError where this rank is alone in it."""
        return self._by_kind[kind]

    def size(self, kind: str) -> int:
        return dist.get_world_size(self._by_kind[kind]) if kind in self._by_kind else 1

    def rank(self, kind: str) -> int:
        """This rank's place in its group of this kind, from 0."""
        return dist.get_rank(self._by_kind[kind]) if kind in self._by_kind else 0

    def sum(self, kind: str, tensor: torch.Tensor) -> None:
        """Sums a tensor over the group, in place."""
        if kind in self._by_kind:
            dist.all_reduce(tensor, group=self._by_kind[kind])

    def mean(self, kind: str, tensor: torch.Tensor) -> None:
        """Takes a tensor's mean over the group, in place."""
        self.sum(kind, tensor)
        tensor /= self.size(kind)

    def several(self) -> dict[str, dist.ProcessGroup]:
        """The axes that have more than this rank."""
        return {axis: self._by_kind[axis] for axis in AXES if axis in self._by_kind}


def of_plan(plan: Plan) -> Groups:
    """The plan's groups, by torch's device mesh. A collective of the whole world, which must be joined (distributed.join)."""
    axes, device = plan.candidate.mesh, "cpu" if plan.cluster.is_cpu else "cuda"
    slowest_first = sorted((axis for axis in AXES if axes.degree(axis) > 1), key=axes.stride, reverse=True)
    if not slowest_first:
        return Groups({})
    mesh = init_device_mesh(device, tuple(map(axes.degree, slowest_first)), mesh_dim_names=tuple(slowest_first))
    made = {axis: mesh.get_group(axis) for axis in slowest_first}
    for kind in (REPLICAS, MODEL):
        several = tuple(axis for axis in slowest_first if axis in kind.split("-"))
        if several:
            made[kind] = mesh[several]._flatten(kind).get_group() if len(several) > 1 else made[several[0]]
    return Groups(made)
