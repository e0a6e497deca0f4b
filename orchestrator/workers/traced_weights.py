"""Hugging Face checkpoints of models that were recorded from their own code."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from orchestrator.errors import InputError
from orchestrator.model.traced import Traced
from orchestrator.tracing import build
from orchestrator.workers import hugging_face
from orchestrator.workers.hf_files import KEY

POOLER = "pooler"
"""A part of the names of parameters that a base model has and a checkpoint of its language model lacks: they are drawn."""


def drawn(traced: Traced, dtype: torch.dtype) -> nn.Module:
    """The model as its class draws its weights."""
    return build.from_config(traced.config, dtype, (traced.attention, "eager"), hugging_face.drawn)[0]


def loaded(traced: Traced, dtype: torch.dtype, folder: str) -> tuple[nn.Module, list[str], list[str]]:
    """The model with a checkpoint's weights; its weights that the checkpoint has not, which are drawn and must be a head's; and the
    checkpoint's that it has not. Raises InputError for a weight that is missing below the head, and for one of another shape."""
    new: list[str] = []
    unused: list[str] = []

    def made(cls: Any, config: Any, words: dict[str, Any]) -> nn.Module:
        model, new[:], unused[:] = hugging_face.from_folder(cls, folder, config, words)
        return model

    model, _ = build.from_config(traced.config, dtype, (traced.attention, "eager"), made)
    below = f"{getattr(model, 'base_model_prefix', '')}."
    headless = not any(name.startswith(below) for name, _ in model.named_parameters())
    for name in new:
        if POOLER not in name and (headless or name.startswith(below)):
            raise InputError(KEY, folder, f"has no tensor {name}")
    return model, new, unused
