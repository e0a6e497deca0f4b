"""Which ranks share a group, by numbering all of them: strides of axes, copies of weights, shares of states."""

from __future__ import annotations

from itertools import pairwise, product

import pytest

from orchestrator.strategy.axes import dp
from orchestrator.strategy.spec import PP_BEFORE_DP, RANK_ORDER, Mesh, Strategy

MESHES = [
    Mesh(tp=tp, cp=cp, dp=copies, pp=pp, order=order)
    for tp, cp, copies, pp, order in product(
        (1, 2, 4), (1, 2), (1, 3, 4), (1, 2), (RANK_ORDER, PP_BEFORE_DP, ("cp", "tp", "ep", "dp", "pp"))
    )
]


def coordinates(mesh: Mesh) -> list[dict[str, int]]:
    """Of each rank its place on each axis, the first axis of the order the fastest."""
    axes = [axis for axis in mesh.order if axis != "ep"]
    found = []
    for places in product(*(range(mesh.degree(axis)) for axis in reversed(axes))):
        found.append(dict(zip(axes, reversed(places), strict=True)))
    return found


def groups(mesh: Mesh, *axes: str) -> list[list[int]]:
    """Ranks that differ on these axes alone."""
    by_others: dict[tuple[int, ...], list[int]] = {}
    for rank, place in enumerate(coordinates(mesh)):
        key = tuple(value for axis, value in sorted(place.items()) if axis not in axes)
        by_others.setdefault(key, []).append(rank)
    return list(by_others.values())


@pytest.mark.parametrize("order", {mesh.order for mesh in MESHES})
def test_neighbours_on_an_axis_are_a_stride_apart(order: tuple[str, ...]) -> None:
    for mesh in (mesh for mesh in MESHES if mesh.order == order):
        assert len(coordinates(mesh)) == mesh.world_size
        for axis in ("tp", "cp", "dp", "pp"):
            for ranks in groups(mesh, axis):
                assert len(ranks) == mesh.degree(axis)
                assert all(b - a == mesh.stride(axis) for a, b in pairwise(ranks))


def test_ranks_with_the_same_weights_are_those_of_dp_and_cp_and_the_nearest_two_are_a_stride_apart() -> None:
    for mesh in MESHES:
        size, stride = dp.group(Strategy(mesh=mesh))
        ranks = groups(mesh, "dp", "cp")[0]
        assert size == len(ranks)
        assert stride == min((b - a for a, b in pairwise(ranks)), default=1)


def test_each_stage_divides_one_state_more_over_the_ranks_that_have_copies() -> None:
    for mesh in MESHES:
        copies = mesh.dp * mesh.cp
        for stage in (0, 1, 2, 3):
            strategy = Strategy(mesh=mesh, zero_stage=stage)  # type: ignore[arg-type]
            shares = [dp.share(state, strategy) for state in ("optimizer", "gradient", "weight")]
            assert shares == [copies if stage >= first else 1 for first in (1, 2, 3)]
    part = [dp.share(state, Strategy(mesh=Mesh(dp=8), zero_stage=2, zero_shard_size=2)) for state in ("optimizer", "gradient", "weight")]
    assert part == [2, 2, 1]
    assert dp.shard_size(Strategy(mesh=Mesh(dp=2), zero_stage=1, zero_shard_size=8)) == 2, "no more than there are"
    assert dp.share("optimizer", Strategy(mesh=Mesh(dp=8), zero_stage=3, zero_shard_size=2)) == 8, "hpZ's copy is a second one"


def test_experts_fold_over_the_ranks_of_a_stage() -> None:
    for mesh in (Mesh(tp=2, cp=2, dp=4, ep=4, etp=2), Mesh(tp=4, dp=2, ep=8), Mesh(dp=8, pp=2, ep=2)):
        assert mesh.ep * mesh.etp * mesh.expert_dp * mesh.pp == mesh.world_size
