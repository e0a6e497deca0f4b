"""MLPs and the vocabulary's projection over a piece of each sequence at a time, by DeepSpeed's ALST (arXiv 2506.13996;
runtime/sequence_parallel/ulysses_sp.py): what a piece computes is forgotten, and computed again when its gradient is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F

from orchestrator.workers.batch import Batch, mean_loss


def tile_mlps(model: torch.nn.Module, pieces: int) -> None:
    """Every layer's MLP in so many pieces, which must divide the tokens of a sequence on a rank: backward cuts samples and tokens together
    by torch.chunk, which else makes fewer pieces, and the last is never said to be ready (TiledMLP.backward)."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP

    def tiled(self: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        if x.shape[-2] % pieces:
            raise ValueError(f"{pieces} pieces do not divide {x.shape[-2]} tokens")
        return TiledMLP.apply(type(self).forward, self, x, pieces, list(self.parameters()))

    for name, module in model.named_modules():
        if name.endswith(".mlp"):
            module.forward = MethodType(tiled, module)


class TiledHead:
    """A causal language model's head and loss in so many pieces of each sequence."""

    def __init__(self, model: Any, pieces: int) -> None:
        self.head, self.pieces, self._left_out = model.get_output_embeddings(), pieces, False
        project = self.head.forward

        def forward(hidden: torch.Tensor) -> torch.Tensor:
            return hidden if self._left_out else project(hidden)

        self.head.forward = forward

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Makes the model give hidden states in place of logits, inside of the `with`."""
        self._left_out = True
        try:
            yield
        finally:
            self._left_out = False

    def mean_loss(self, batch: Batch, hidden: torch.Tensor) -> torch.Tensor:
        """`batch.mean_loss` of the tokens' losses: a sum over pieces of what each token's loss counts."""
        from deepspeed.runtime.sequence_parallel.ulysses_sp import sequence_tiled_compute

        labels = batch["labels"]
        ones = torch.ones(labels.shape, device=hidden.device, requires_grad=True)
        with torch.enable_grad():
            (share,) = torch.autograd.grad(mean_loss(batch, ones), ones)

        def piece(hidden: torch.Tensor, labels: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
            losses = F.cross_entropy(self.head(hidden).float().flatten(0, 1), labels.flatten(), reduction="none")
            return (losses * share.flatten()).sum()

        return sequence_tiled_compute(
            piece,
            hidden.shape[1],
            self.pieces,
            {"hidden": hidden, "labels": labels, "share": share},
            {},
            "hidden",
            compute_params=list(self.head.parameters()),
            output_unshard_dimension=0,
            output_reduction="sum",
        )
