"""Initial weights depend on the seed, not on how a tensor is cut."""

from __future__ import annotations

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from orchestrator.workers import weights

pytestmark = pytest.mark.engines


def shard(shape: tuple[int, ...], *offsets: tuple[int, int, int], key: str = "layer.weight", lead: int = 0) -> ShardedTensor:
    """The part of a tensor at (axis, index, parts) of each offset; `shape` is the part's."""
    return ShardedTensor.from_rank_offsets(key, torch.zeros(shape), *offsets, prepend_axis_num=lead)


def filled(part: ShardedTensor, seed: int = 1) -> torch.Tensor:
    weights._fill_normal(part, 0.02, seed)
    return part.data


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rows of twenty columns, so that parts begin and end inside blocks."""
    monkeypatch.setattr(weights, "BLOCK_ELEMENTS", 60)


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_rows_cut_over_ranks_are_the_rows_of_the_whole(parts: int) -> None:
    whole = filled(shard((40, 20)))
    pieces = [filled(shard((40 // parts, 20), (0, rank, parts))) for rank in range(parts)]
    torch.testing.assert_close(torch.cat(pieces), whole, rtol=0, atol=0)


@pytest.mark.parametrize("parts", [2, 5])
def test_columns_cut_over_ranks_are_the_columns_of_the_whole(parts: int) -> None:
    whole = filled(shard((40, 20)))
    pieces = [filled(shard((40, 20 // parts), (1, rank, parts))) for rank in range(parts)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=0, atol=0)


def test_more_padding_changes_no_row_before_it() -> None:
    torch.testing.assert_close(filled(shard((64, 20)))[:40], filled(shard((40, 20))), rtol=0, atol=0)


def test_layers_names_and_seeds_differ() -> None:
    layers = [filled(shard((4, 20), (0, layer, 3), lead=1)) for layer in range(3)]
    others = [filled(shard((4, 20), key="other.weight")), filled(shard((4, 20)), seed=2), filled(shard((4, 20)))]
    values = [tensor.flatten().tolist() for tensor in [*layers, *others]]
    assert len({tuple(row) for row in values}) == len(values)


@pytest.mark.parametrize("length", [2**16, 1000, 60, 15])
@pytest.mark.parametrize("needed", [1, 7, 16, 20, 45, 100, 990, 8321])
def test_the_first_numbers_of_a_block_are_the_same_drawn_alone(needed: int, length: int) -> None:
    """What is not used of a block is not drawn on a CPU: 4 million numbers a parameter where a small model needs a thousand."""
    whole, part = torch.empty(length), torch.empty(length)
    whole.normal_(0.0, 0.02, generator=torch.Generator().manual_seed(3))
    weights._drawn(part, needed).normal_(0.0, 0.02, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(part[:needed], whole[:needed], rtol=0, atol=0)
    assert weights._drawn(part, needed).numel() < needed + 32


def test_the_distribution_is_the_asked_one() -> None:
    values = filled(shard((2000, 20)))
    assert abs(values.mean()) < 3e-4
    assert values.std() == pytest.approx(0.02, rel=0.02)
    assert len(set(values[:, 0].tolist())) == 2000
