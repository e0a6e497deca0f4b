"""The process groups of one rank, which all that is shared between engines asks in the same way: the loop, the preflight, checkpoints.

An engine on megatron-core's layers hands over megatron-core's groups (megatron_groups.py); any other makes them with torch (`of_plan`).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

import torch
import torch.distributed as dist

from orchestrator.plan import Plan
from orchestrator.strategy.spec import Mesh

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


def ranks_of(mesh: Mesh, axes: tuple[str, ...]) -> list[list[int]]:
    """Every group of these axes, each in order of rank, in the order of their first ranks (experts' axes aside).

    >>> ranks_of(Mesh(tp=2, dp=2, pp=2), ("tp",))
    [[0, 1], [2, 3], [4, 5], [6, 7]]
    >>> ranks_of(Mesh(tp=2, dp=2, pp=2), ("tp", "pp"))
    [[0, 1, 4, 5], [2, 3, 6, 7]]
    >>> ranks_of(Mesh(tp=2, dp=2, pp=2, order=("tp", "cp", "ep", "pp", "dp")), ("dp",))
    [[0, 4], [1, 5], [2, 6], [3, 7]]
    """

    def places(names: tuple[str, ...]) -> list[int]:
        steps = [[index * mesh.stride(name) for index in range(mesh.degree(name))] for name in names]
        return sorted(sum(step) for step in product(*steps))

    others = tuple(name for name in AXES if name not in axes)
    return [[first + step for step in places(axes)] for first in places(others)]


def of_plan(plan: Plan) -> Groups:
    """The plan's groups, made with torch. A collective of the whole world, which must be joined (distributed.join)."""
    mesh, mine = plan.candidate.mesh, dist.get_rank()
    made: dict[str, dist.ProcessGroup] = {}
    for kind in KINDS:
        found = ranks_of(mesh, tuple(kind.split("-")))
        if len(found[0]) == 1:
            continue
        for ranks in found:
            group = dist.group.WORLD if len(found) == 1 else dist.new_group(ranks)
            if mine in ranks:
                assert group is not None
                made[kind] = group
    return Groups(made)
