"""Models that look at images, under a DeepSpeed engine: transformers' class of engine.json with the loss of its own forward, and samples
that are drawn for it."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
import torch.nn.functional as F

from orchestrator.model.parts.vision import Images, Vision
from orchestrator.plan import Plan
from orchestrator.workers.batch import Batch, mean_loss
from orchestrator.workers.hf_model import HuggingFaceModel
from orchestrator.workers.samples import Drawn

OUTSIDE: Final = -100
"""A label that transformers' losses leave out."""
JOINED: Final = ("pixel_values", "image_grid_thw")
"""Arguments in which the images of all samples follow each other."""
SHOWN: Final = (*JOINED, "mm_token_type_ids", "token_type_ids")
"""Arguments by which a model knows images."""


class ImageSamples(Drawn):
    """Drawn samples: images of random pixels, each behind a token of text, and more text after
    them; the text's ids are random, and alone predicted."""

    joined = JOINED

    def __init__(self, plan: Plan, first: int = 0) -> None:
        super().__init__(plan, first)
        vision, training = plan.model.vision, plan.training
        assert vision is not None
        assert training.images is not None
        assert training.image_tokens is not None
        self.vision, self.images = vision, Images(count=training.images, tokens=training.image_tokens)
        self.ids = min(plan.model.vocab_size, vision.image_token_id) or plan.model.vocab_size

    def sample(self, ordinal: int) -> dict[str, np.ndarray]:
        rng = self.generator(ordinal)
        length, seen = self.plan.training.seq_length, np.zeros(self.plan.training.seq_length, dtype=bool)
        for place in range(self.images.count):
            begin = place * (1 + self.images.tokens) + 1
            seen[begin : begin + self.images.tokens] = True
        ids = rng.integers(0, self.ids, size=length, dtype=np.int64)
        ids[seen] = self.vision.image_token_id
        found = {"input_ids": ids, "labels": np.where(seen, OUTSIDE, ids)}
        return found | types_for(self.vision, seen.astype(np.int64)) | pixels(self.vision, self.images, rng)


def types_for(v: Vision, types: np.ndarray) -> dict[str, np.ndarray]:
    """The argument by which such a model knows the tokens of images, 1 in `types` [tokens]; none: by their id alone."""
    if v.image_size is None:
        return {"mm_token_type_ids": types}
    return {"token_type_ids": types} if v.model_type == "gemma3" else {}


def pixels(v: Vision, images: Images, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Random images, as the forward of such a model is given them."""
    if v.image_size is not None:
        return {"pixel_values": rng.standard_normal((images.count, v.num_channels, v.image_size, v.image_size), dtype=np.float32)}
    width = v.num_channels * v.temporal_patch_size * v.patch_size**2
    grid = np.array([(1, *(side * v.spatial_merge_size for side in images.grid))] * images.count, dtype=np.int64)
    return {"pixel_values": rng.standard_normal((images.count * images.patches(v), width), dtype=np.float32), "image_grid_thw": grid}


class SeeingModel(HuggingFaceModel):
    """One rank of such a model."""

    def loss(self, batch: Batch) -> torch.Tensor:
        """The mean loss of the text of a micro-batch, of which every drawn sample has as much; of chats that of the answers."""
        dtype = next(self.model.parameters()).dtype
        chats = "tokens" in batch
        shown = {"input_ids": batch["tokens"]} | {name: batch[name] for name in SHOWN if name in batch} if chats else batch
        given = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in shown.items()}
        output = self.engine(**given, use_cache=False)
        self.logits = output.logits
        if chats:
            labels = batch["labels"]
            losses = F.cross_entropy(output.logits.float().flatten(0, 1), labels.flatten(), reduction="none")
            return mean_loss(batch, losses.view_as(labels))
        found: torch.Tensor = output.loss.float()
        return found
