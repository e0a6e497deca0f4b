"""A micro-batch on a rank's device, and its loss."""

from __future__ import annotations

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
