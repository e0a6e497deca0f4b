"""Which samples of a data set of one's own are in the micro-batches of a rank."""

from __future__ import annotations

import pytest
from accelerate.data_loader import skip_first_batches
from torch.utils.data import DataLoader

from orchestrator.workers.batch import RankBatches

pytestmark = pytest.mark.engines


def read(seed: int | None = None, *, epoch: int = 0, count: int = 200, ranks: int = 2, whole: bool = False) -> list[list[list[int]]]:
    """By rank its micro-batches of 16."""
    found = []
    for rank in range(ranks):
        batches = RankBatches(count, 16, rank, ranks, seed, whole=whole)
        batches.set_epoch(epoch)
        found.append([*DataLoader(range(count), batch_sampler=batches, collate_fn=list)])
    return found


def test_ranks_take_micro_batches_in_turn_and_evaluation_has_all_samples(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = read(whole=True)
    assert [sample for pair in zip(first, second, strict=True) for batch in pair for sample in batch] == [*range(200)]
    assert [len(batch) for batch in first] == [16] * 6 + [4]
    assert [len(batches) for batches in read()] == [6, 6]
    assert not capsys.readouterr().err
    first, second = read(whole=True, count=3)
    assert (first, second) == ([[0]], [[1]])
    assert capsys.readouterr().err == "evaluation leaves out the last 1 of 3 samples, fewer than 2 ranks\n"


def test_an_epoch_s_order_is_drawn_and_is_the_same_after_a_resume() -> None:
    both = [sample for batches in read(seed=1) for batch in batches for sample in batch]
    assert len({*both}) == 192
    assert both != sorted(both)
    assert read(seed=1) == read(seed=1) != read(seed=1, epoch=1)
    batches = RankBatches(200, 16, 0, 2, seed=1)
    loader = skip_first_batches(DataLoader(range(200), batch_sampler=batches, collate_fn=list), 4)
    loader.batch_sampler.batch_sampler.set_epoch(1)  # as the Trainer does (trainer.py, _run_epoch)
    assert [*loader] == read(seed=1, epoch=1)[0][4:]
