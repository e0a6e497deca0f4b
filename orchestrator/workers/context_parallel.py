"""Megatron's context parallelism as a worker has to feed it: which tokens of a sequence a rank holds, and what its share of the loss is.

A causal sequence of s tokens is cut into 2 cp chunks; rank r holds chunks r and 2 cp - 1 - r, in this order ("zigzag"), so that all ranks
attend to equally many keys. That is the order in which Transformer Engine's attention and megatron-core's rotary embedding
(models/common/embeddings/rope_utils.py:49) take a rank's tokens to be; megatron-core's own cut is utils.get_batch_on_this_cp_rank.
"""

from __future__ import annotations

import torch

from orchestrator.workers.batch import Batch
from orchestrator.workers.groups import Groups


def zigzag(rank: int, size: int, length: int) -> torch.Tensor:
    """The places in a sequence of `length` tokens that rank `rank` of `size` holds.

    >>> [zigzag(rank, 2, 8).tolist() for rank in range(2)]
    [[0, 1, 6, 7], [2, 3, 4, 5]]
    """
    chunk = length // (2 * size)
    return torch.cat([torch.arange(index * chunk, (index + 1) * chunk) for index in (rank, 2 * size - 1 - rank)])


def cut(batch: Batch, groups: Groups) -> Batch:
    """This rank's part of each sequence: of tokens, labels, positions and loss masks [b, s] alike."""
    if groups.size("cp") == 1:
        return batch
    return {
        name: tensor.index_select(1, zigzag(groups.rank("cp"), groups.size("cp"), tensor.shape[1]).to(tensor.device))
        for name, tensor in batch.items()
        if tensor.dim() > 1
    } | {name: tensor for name, tensor in batch.items() if tensor.dim() == 1}


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
