"""Models of any architecture under a DeepSpeed engine: built from their Hugging Face configuration or the user's own code, with the loss of
their own forward. ZeRO 0 to 3, AutoTP, checkpointing of their repeated blocks."""

from __future__ import annotations

import contextlib
import re
from functools import cache
from typing import Any, Final

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from orchestrator.errors import InputError
from orchestrator.model.traced import Traced
from orchestrator.plan import Plan
from orchestrator.tracing import build, feeds
from orchestrator.tracing.blocks import find_blocks
from orchestrator.workers import hugging_face
from orchestrator.workers.batch import Batch, mean_loss
from orchestrator.workers.hf_files import KEY
from orchestrator.workers.hf_model import HuggingFaceModel

LISTED: Final = 6
"""Names of weights that are listed at most."""


def recompute_blocks(model: nn.Module) -> None:
    """Makes each repeated block keep its inputs alone, and compute the rest again in backward. What is replaced is the whole call: hooks by
    which ZeRO-3 gathers the block's weights belong to it."""
    for block in find_blocks(model).values():
        plain: Any = type(block)
        block.__class__ = _recomputed(plain)


@cache
def _recomputed(plain: Any) -> Any:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not (self.training and torch.is_grad_enabled()):
            return plain.__call__(self, *args, **kwargs)
        return checkpoint(plain.__call__, self, *args, use_reentrant=False, **kwargs)

    return type(plain.__name__, (plain,), {"__call__": call, "__module__": plain.__module__})


def lengthen_scalars(model: nn.Module) -> None:
    """Gives each parameter without dimensions one (CLIP's logit_scale): DeepSpeed flattens parameters by their first dimension
    (runtime/engine.py:2059)."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.dim() == 0 and not hasattr(parameter, "ds_id"):
                setattr(module, name, nn.Parameter(parameter.data.reshape(1), requires_grad=parameter.requires_grad))


def first_model(plan: Plan, engine: dict[str, Any], device: torch.device) -> nn.Module:
    """The model of engine.json with the weights of model.init_from= or as its own code draws them, for training; at stage 3 in partitions.
    Raises InputError."""
    fields, traced = engine["model"], plan.model.traced
    assert traced is not None
    dtype, ds_config = getattr(torch, fields["dtype"]), engine["ds_config"] if fields["zero_init"] else None
    # AutoTP cuts a whole model in host memory.
    place: Any = contextlib.nullcontext() if ds_config else torch.device("cpu" if plan.tp > 1 else device)
    torch.manual_seed(plan.training.seed)
    if traced.code:
        with deepspeed.zero.Init(config_dict_or_path=hugging_face.without_batch(ds_config)) if ds_config else place:
            model, _ = build.from_code(traced.code, dtype)
    else:
        build.class_of(build.config_of(traced.config))  # its module is imported before zero.Init changes torch
        with hugging_face.zero_init(ds_config):
            if plan.run.init_from:
                model, new, unused = loaded(traced, dtype, plan.run.init_from)
                if dist.get_rank() == 0:
                    print(f"weights of {plan.run.init_from}; new: {_listed(new)}; not used: {_listed(unused)}", flush=True)
            else:
                with place:
                    model, _ = build.from_config(traced.config, dtype, (traced.attention, "eager"), hugging_face.drawn)
    lengthen_scalars(model)
    if fields["gradient_checkpointing"]:
        recompute_blocks(model)
    return model


def loaded(traced: Traced, dtype: torch.dtype, folder: str) -> tuple[nn.Module, list[str], list[str]]:
    """The model with a checkpoint's weights; its weights that the checkpoint has not, which are drawn and must be a head's or a pooler's;
    and the checkpoint's that it has not. Raises InputError for a weight that is missing below the head, and for one of another shape."""
    told: list[list[str]] = []

    def made(cls: Any, config: Any, words: dict[str, Any]) -> nn.Module:
        model, *told[:] = hugging_face.from_folder(cls, folder, config, words)
        return model

    model, _ = build.from_config(traced.config, dtype, (traced.attention, "eager"), made)
    below, (new, unused) = f"{getattr(model, 'base_model_prefix', '')}.", told
    headless = not any(name.startswith(below) for name, _ in model.named_parameters())
    for name in new:
        if "pooler" not in name and (headless or name.startswith(below)):
            raise InputError(KEY, folder, f"has no tensor {name}")
    return model, new, unused


def _listed(names: list[str]) -> str:
    """How many names, and the first few.

    >>> _listed(["score.weight"]), _listed([])
    ('1 (score.weight)', 'none')
    """
    return f"{len(names)} ({', '.join(names[:LISTED])}{', ...' * (len(names) > LISTED)})" if names else "none"


class DescribedModel(HuggingFaceModel):
    """One rank of such a model. Its batches are `traced_data`'s, by the names of its forward's arguments."""

    first = staticmethod(first_model)

    def _pieces(self, name: str) -> tuple[int, ...]:
        assert self.plan.model.traced is not None
        linear, divided = name.rpartition(".")[0], self.plan.model.traced.divided
        return next((each.parts for each in divided if each.by == "column" and re.fullmatch(each.pattern, linear)), ())

    def loss(self, batch: Batch) -> torch.Tensor:
        more = feeds.fixed_arguments(self.model)
        if "loss_mask" in batch:
            self.logits = self.engine(input_ids=batch["tokens"], **more).logits
            by_token = nn.functional.cross_entropy(self.logits.float().flatten(0, 1), batch["labels"].flatten(), reduction="none")
            return mean_loss(batch, by_token.view_as(batch["labels"]))
        dtype = next(self.model.parameters()).dtype
        given = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in batch.items()}
        output = self.engine(**given, **more)
        self.logits = getattr(output, "logits", None)
        loss = build.loss_of(output)
        if loss is None:
            raise InputError("model", type(self.model).__name__, "its forward gives no loss for these arguments")
        return loss

    def _uncut(self) -> nn.Module:
        traced = self.plan.model.traced
        assert traced is not None
        return build.from_config(traced.config, next(self.model.parameters()).dtype, (traced.attention, "eager"))[0]
