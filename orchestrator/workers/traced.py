"""Models of any architecture under a DeepSpeed engine: built from their Hugging Face configuration or the user's own code, with the loss of
their own forward. ZeRO 0 to 3, checkpointing of their repeated blocks."""

from __future__ import annotations

import contextlib
import io
import re
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from orchestrator.errors import InputError
from orchestrator.model.traced import Traced
from orchestrator.plan import Plan
from orchestrator.tracing import build, feeds
from orchestrator.tracing.blocks import find_blocks
from orchestrator.tracing.feeds import IGNORED
from orchestrator.workers import hf_checkpoint, hugging_face, traced_data, traced_weights
from orchestrator.workers.batch import Batch, mean_loss
from orchestrator.workers.deepspeed_trainer import DeepSpeedTrainer
from orchestrator.workers.groups import REPLICAS, Groups
from orchestrator.workers.parts import Place
from orchestrator.workers.sft import SupervisedBatches


def recompute_blocks(model: nn.Module) -> None:
    """Makes each repeated block keep its inputs alone, and compute the rest again in backward. What is replaced is the whole call: hooks by
    which ZeRO-3 gathers the block's weights belong to it."""
    classes: dict[type, type] = {}
    for block in find_blocks(model).values():
        plain = type(block)
        if plain not in classes:
            classes[plain] = type(plain.__name__, (plain,), {"__call__": _recomputed(plain), "__module__": plain.__module__})
        block.__class__ = classes[plain]


def _recomputed(plain: Any) -> Any:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        run: Any = plain.__call__
        if not (self.training and torch.is_grad_enabled()):
            return run(self, *args, **kwargs)
        return checkpoint(run, self, *args, use_reentrant=False, **kwargs)

    return call


def lengthen_scalars(model: nn.Module) -> None:
    """Gives each parameter without dimensions one (CLIP's logit_scale): DeepSpeed flattens parameters by their first dimension
    (runtime/engine.py:2059)."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.dim() == 0 and not hasattr(parameter, "ds_id"):
                setattr(module, name, nn.Parameter(parameter.data.reshape(1), requires_grad=parameter.requires_grad))


def parts_of(traced: Traced, name: str) -> tuple[int, ...]:
    """Widths of the parts of a fused linear's parameter, each of which tensor parallelism divides; () where it has none."""
    linear = name.rpartition(".")[0]
    return next((each.parts for each in traced.divided if each.by == "column" and re.fullmatch(each.pattern, linear)), ())


def places(model: nn.Module, groups: Groups, whole: dict[str, tuple[int, ...]], traced: Traced) -> list[Place]:
    """Every parameter, whole, in ZeRO-3's partitions or in AutoTP's parts. `whole`: shapes before AutoTP."""
    replica, tp_rank = groups.rank(REPLICAS), groups.rank("tp")
    found = []
    for name, parameter in model.named_parameters():
        shape, global_shape = tuple(getattr(parameter, "ds_shape", parameter.shape)), whole[name]
        cut = [dim for dim, size in enumerate(global_shape) if shape[dim] != size]
        first = bool(cut) or tp_rank == 0
        pieces = parts_of(traced, name) if cut else ()
        start = begin = 0
        for piece in pieces or (global_shape[cut[0]] if cut else 0,):
            offset, local = [0] * len(shape), list(shape)
            if cut:
                local[cut[0]] = piece // groups.size("tp")
                offset[cut[0]] = begin + tp_rank * local[cut[0]]
            about = {"key": name, "index": (), "offset": tuple(offset), "shape": tuple(local), "global_shape": global_shape}
            found.append(Place(parameter=parameter, start=start, first=first, main=first and replica == 0, **about))
            start, begin = start + prod(local), begin + piece
    return found


class TracedTrainer(DeepSpeedTrainer):
    """One rank of such a model. Its batches are `traced_data`'s, by the names of its forward's arguments."""

    def __init__(self, plan: Plan, engine: dict[str, Any], device: torch.device) -> None:
        super().__init__(plan, engine, device)
        if plan.model.traced is None:
            raise InputError("model", plan.model.name, "has no description")
        self.traced: Traced = plan.model.traced
        with contextlib.redirect_stdout(io.StringIO()):
            self.model = model = self._build(engine["model"])
        lengthen_scalars(model)
        if engine["model"]["gradient_checkpointing"]:
            recompute_blocks(model)
        self.more = feeds.fixed_arguments(model)
        buffers = hugging_face.float_buffers(model)
        whole = {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in model.named_parameters()}
        self._initialise_engine(model, None)
        hugging_face.restore(model, buffers)
        for name, parameter in model.named_parameters():
            if tuple(getattr(parameter, "ds_shape", parameter.shape)) != whole[name]:
                parameter.tensor_model_parallel = True  # the norm counts every rank's part
        self.places = places(model, self.groups, whole, self.traced)
        self.sums: dict[str, torch.Tensor] = {}

    def _build(self, fields: dict[str, Any]) -> nn.Module:
        """The model of these fields, with the weights of model.init_from= or as its own code draws them; at stage 3 in partitions."""
        dtype, traced, source = getattr(torch, fields["dtype"]), self.traced, self.plan.run.init_from
        # AutoTP cuts a whole model in host memory.
        place: Any = contextlib.nullcontext() if fields["zero_init"] else torch.device("cpu" if self.plan.tp > 1 else self.device)
        ds_config = self._ds_config(self.engine_fields["ds_config"]) if fields["zero_init"] else None
        torch.manual_seed(self.plan.training.seed)
        if traced.code:
            divided = self.deepspeed.zero.Init(config_dict_or_path=hugging_face.without_batch(ds_config)) if ds_config else place
            with divided:
                model, _ = build.from_code(traced.code, dtype)
            return model
        build.class_of(build.config_of(traced.config))  # its module is imported before zero.Init changes torch
        with hugging_face.zero_init(ds_config):
            if source:
                model, new, unused = traced_weights.loaded(traced, dtype, source)
                if dist.get_rank() == 0:
                    print(f"weights of {source}; new: {_listed(new)}; not used: {_listed(unused)}", flush=True)
                return model
            with place:
                return traced_weights.drawn(traced, dtype)

    def open_batches(self, cache: Path) -> tuple[traced_data.AnyBatches, traced_data.AnyBatches | None]:
        """What is trained on, and what is evaluated on."""
        found, valid = traced_data.opened(self.plan, self.groups.rank("dp"), cache)
        if isinstance(found, SupervisedBatches) and dist.get_rank() == 0:
            print(found.said(), flush=True)
        return found, valid

    def _output(self, batch: Batch) -> Any:
        dtype = next(self.model.parameters()).dtype
        given = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in batch.items() if name not in SCORING}
        return self.engine(**given, **self.more)

    def _loss(self, batch: Batch) -> torch.Tensor:
        if "loss_mask" in batch:
            logits = self.engine(input_ids=batch["tokens"], **self.more).logits.float().flatten(0, 1)
            by_token = nn.functional.cross_entropy(logits, batch["labels"].flatten(), reduction="none")
            return mean_loss(batch, by_token.view_as(batch["labels"]))
        output = self._output(batch)
        if not self.model.training:
            self._score(batch, output)
        if isinstance(output, torch.Tensor):
            return output.float()
        if "loss_scale" in batch:
            logits, labels = output.logits.float().flatten(0, 1), batch["labels"].flatten()
            return nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum") * batch["loss_scale"][0]
        loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
        if loss is None:
            raise InputError("model", self.traced.model_class, "its forward gives no loss for these arguments")
        return loss.float().reshape(())

    def _score(self, batch: Batch, output: Any) -> None:
        """Sums of what `scores` tells, of one micro-batch."""
        logits = getattr(output, "logits", None)
        if logits is None:
            return
        for name, value in traced_data.scores(batch, logits.float()).items():
            self.sums[name] = self.sums.get(name, torch.zeros((), dtype=torch.float64, device=self.device)) + value.double()

    def scores(self) -> dict[str, float]:
        """Shares of the samples that were evaluated since the last call, over all ranks, by score."""
        if not self.sums:
            return {}
        names = sorted(self.sums)
        values = torch.stack([self.sums[name] for name in names])
        dist.all_reduce(values)
        self.sums = {}
        found = dict(zip(names, values.tolist(), strict=True))
        count = found.pop("samples")
        return {name: total / count for name, total in found.items()}

    def export(self, folder: Path) -> None:
        """Writes a checkpoint that transformers' own class loads. Rank 0 has the whole model in host memory."""
        state = hf_checkpoint.whole_state(self.model, self.places, self.plan, self.groups)
        if dist.get_rank() == 0:
            with torch.device("meta"):
                whole, _ = build.from_config(self.traced.config, next(self.model.parameters()).dtype, (self.traced.attention, "eager"))
            hf_checkpoint.write(whole, state, self.model, folder, self.plan.run)
        dist.barrier()


def _listed(names: list[str]) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more if names else "none"


LISTED = 6
SCORING = ("loss_scale",)
"""What a batch has for the loss alone."""
