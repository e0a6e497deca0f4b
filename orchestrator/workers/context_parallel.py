"""Megatron's context parallelism as a worker has to feed it: which tokens of a sequence a rank holds, and what its share of the loss is.

A causal sequence of s tokens is cut into 2 cp chunks; rank r holds chunks r and 2 cp - 1 - r, in this order ("zigzag"), so that all ranks
attend to equally many keys. That is the order in which Transformer Engine's attention and megatron-core's rotary embedding
(models/common/embeddings/rope_utils.py:49) take a rank's tokens to be; megatron-core's own cut is utils.get_batch_on_this_cp_rank.
Of packed samples each is cut so for itself (Transformer Engine's thd_get_partitioned_indices), for which each is padded to a multiple of
2 cp tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from orchestrator.workers.batch import Batch
from orchestrator.workers.groups import Groups


def zigzag(rank: int, size: int, bounds: Sequence[int]) -> torch.Tensor:
    """The places in a sequence that rank `rank` of `size` holds. `bounds`: where its samples begin, and where the last ends.

    >>> [zigzag(rank, 2, (0, 8)).tolist() for rank in range(2)], [zigzag(rank, 2, (0, 8, 12)).tolist() for rank in range(2)]
    ([[0, 1, 6, 7], [2, 3, 4, 5]], [[0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10]])
    """
    places = []
    for begin, end in pairwise(bounds):
        chunk = (end - begin) // (2 * size)
        places += [torch.arange(begin + index * chunk, begin + (index + 1) * chunk) for index in (rank, 2 * size - 1 - rank)]
    return torch.cat(places)


def sample_bounds(positions: torch.Tensor) -> torch.Tensor | None:
    """Where the samples of one packed sequence begin, and where the last ends, by positions [1, s] that count from 0 in each; None where
    every sequence is one sample."""
    begins = (positions[0] == 0).nonzero().flatten()
    if len(positions) > 1 or len(begins) == 1:
        return None
    return torch.cat([begins, begins.new_tensor([positions.shape[1]])]).int()


def cut(batch: Batch, groups: Groups, bounds: torch.Tensor | None = None) -> Batch:
    """This rank's part of each sequence, or of each sample of a packed one: of tokens, labels, positions and loss masks [b, s] alike."""
    if groups.size("cp") == 1:
        return batch
    length = next(tensor.shape[1] for tensor in batch.values() if tensor.dim() > 1)
    places = zigzag(groups.rank("cp"), groups.size("cp"), (0, length) if bounds is None else bounds.tolist())
    return {name: tensor.index_select(1, places.to(tensor.device)) if tensor.dim() > 1 else tensor for name, tensor in batch.items()}


def loss_and_log(batch: Batch, losses: torch.Tensor, groups: Groups) -> tuple[torch.Tensor, torch.Tensor]:
    """What megatron-core's schedules take, and what they collect, from losses by token [b, s / cp] of this rank's part.

    The first is this rank's summand of the mean over the whole sequences' predicted tokens, of which ranks may have different numbers, or
    of `mean_loss` of supervised samples. The
    schedule multiplies it by cp (pipeline_parallel/schedules.py:268), DDP's mean over dp x cp divides by that again. The second is cp
    times as large: its mean over dp x cp is the loss of the batch.
    """
    losses = losses.float()
    mask = batch.get("loss_mask", torch.ones_like(losses))
    if "loss_scale" in batch:
        loss = (losses * mask).sum() * batch["loss_scale"][0]
    else:
        predicted = mask.sum()
        groups.sum("cp", predicted)
        loss = (losses * mask).sum() / predicted
    return loss, loss.detach() * groups.size("cp")
