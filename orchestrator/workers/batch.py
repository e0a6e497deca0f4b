"""A micro-batch on a rank's device, and its loss."""

from __future__ import annotations

import torch

Batch = dict[str, torch.Tensor]
"""What a family's sampler makes (data.py), by name: tokens and labels [b, s], ..."""


def mean_loss(batch: Batch, losses: torch.Tensor) -> torch.Tensor:
    """Mean over the predicted tokens of a micro-batch, in fp32. Every sample has as many (data.py), so means of parts are the whole's;
    where they have not (sft.py), "loss_scale" times the sum, so that the mean over all parts is the mean over their tokens."""
    losses = losses.float()
    if "loss_scale" in batch:
        return (losses * batch["loss_mask"]).sum() * batch["loss_scale"][0]
    if "loss_mask" not in batch:
        return losses.mean()
    return (losses * batch["loss_mask"]).sum() / batch["loss_mask"].sum()
