"""The micro-batches of a rank: which samples are in them, and a micro-batch's loss."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

Batch = dict[str, torch.Tensor]
"""Tensors of one micro-batch of b samples of s tokens, by name: "tokens", "labels" and, where only some labels count, "loss_mask" [b, s];
"loss_scale" [1] where samples have different numbers of them."""


def mean_loss(batch: Batch, losses: torch.Tensor) -> torch.Tensor:
    """A micro-batch's loss in fp32 from those of its tokens [b, s]: the mean over the tokens that are predicted. In pretraining every
    sample has equally many, so that the mean over micro-batches and ranks is the global batch's. In fine-tuning they have not: there it is
    the sum times "loss_scale", which is made such that the same mean comes out."""
    losses = losses.float()
    if "loss_scale" in batch:
        return (losses * batch["loss_mask"]).sum() * batch["loss_scale"][0]
    if "loss_mask" not in batch:
        return losses.mean()
    return (losses * batch["loss_mask"]).sum() / batch["loss_mask"].sum()


class RankBatches:
    """The indices of one data-parallel rank's micro-batches of `size` samples out of `count`; those of all ranks follow each other in turn.
    `seed`: draws the samples' order anew in each epoch; None: as they are. `whole`: with the samples that fill no micro-batch of every
    rank, in a smaller one each; fewer than there are ranks are left out, which rank 0 says on standard error."""

    def __init__(self, count: int, size: int, rank: int, ranks: int, seed: int | None = None, *, whole: bool = False) -> None:
        self.count, self.seed, self.epoch = count, seed, 0
        rest = count % (size * ranks) // ranks if whole else 0
        sizes = [size] * (count // (size * ranks)) + [rest] * (rest > 0)
        self.spans = [(n * size * ranks + rank * of, of) for n, of in enumerate(sizes)]
        self.batch_sampler = self  # by this name the Trainer tells the epoch (trainer.py, _run_epoch)
        if whole and rank == 0 and (left := count - ranks * sum(sizes)):
            print(f"evaluation leaves out the last {left} of {count} samples, fewer than {ranks} ranks", file=sys.stderr)

    def set_epoch(self, epoch: int) -> None:
        """The epoch that is read next."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.spans)

    def __iter__(self) -> Iterator[list[int]]:
        order = list(range(self.count))
        if self.seed is not None:
            order = torch.randperm(self.count, generator=torch.Generator().manual_seed(self.seed + self.epoch)).tolist()
        return iter([order[first : first + of] for first, of in self.spans])
