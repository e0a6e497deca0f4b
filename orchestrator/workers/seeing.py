"""Models that look at images, under a DeepSpeed engine: transformers' class of engine.json with the loss of its own forward, and samples
that are drawn for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from orchestrator.model.parts.vision import Images, Vision
from orchestrator.plan import Plan
from orchestrator.workers.batch import Batch
from orchestrator.workers.hf_model import HuggingFaceModel
from orchestrator.workers.samples import Drawn

OUTSIDE: Final = -100
"""A label that transformers' losses leave out."""
JOINED: Final = ("pixel_values", "image_grid_thw")
"""Arguments in which the images of all samples follow each other."""


class ImageSamples(Drawn):
    """Drawn samples: images of random pixels, each behind a token of text, and more text after
    them; the text's ids are random, and alone predicted."""

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
        return found | arguments(self.vision, self.images, seen.astype(np.int64), rng)

    def stack(self, samples: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        return {name: (np.concatenate if name in JOINED else np.stack)([each[name] for each in samples]) for name in samples[0]}


def arguments(v: Vision, images: Images, types: np.ndarray, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """What the forward of such a model is given beside ids and labels; `types` [tokens]: 1 where a token is an image's."""
    if v.image_size is not None:
        pixels = rng.standard_normal((images.count, v.num_channels, v.image_size, v.image_size), dtype=np.float32)
        return {"pixel_values": pixels} | ({"token_type_ids": types} if v.model_type == "gemma3" else {})
    width = v.num_channels * v.temporal_patch_size * v.patch_size**2
    grid = np.array([(1, *(side * v.spatial_merge_size for side in images.grid))] * images.count, dtype=np.int64)
    pixels = rng.standard_normal((images.count * images.patches(v), width), dtype=np.float32)
    return {"mm_token_type_ids": types, "pixel_values": pixels, "image_grid_thw": grid}


class SeeingModel(HuggingFaceModel):
    """One rank of such a model."""

    def loss(self, batch: Batch) -> torch.Tensor:
        """The mean loss of the text of a micro-batch, of which every sample has as much."""
        dtype = next(self.model.parameters()).dtype
        given = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in batch.items()}
        output = self.engine(**given, use_cache=False)
        self.logits = output.logits
        found: torch.Tensor = output.loss.float()
        return found
