"""A Hugging Face model under a DeepSpeed engine: ZeRO 0 to 3, AutoTP, AutoEP, Ulysses, hpZ, offload. What DeepSpeed would do otherwise than
the plan is mended, and the loss is the plan's."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from transformers.integrations import is_tensorboard_available

from orchestrator.plan import Plan
from orchestrator.workers import auto_ep, host_activations, hugging_face, lora, tiles
from orchestrator.workers.batch import Batch, mean_loss
from orchestrator.workers.checkpoint import FOLDER, Saved
from orchestrator.workers.deepspeed_states import DeepSpeedStates
from orchestrator.workers.groups import REPLICAS, Groups
from orchestrator.workers.hf_files import copy_generation, copy_tokenizer, let_others_read, special_tokens
from orchestrator.workers.parts import Place
from orchestrator.workers.saving import Snapshot

BIAS: Final = "e_score_correction_bias"
"""The end of the name of the buffer by which a router balances its experts' load (DeepSeek-V3, GLM-4.5)."""
BIASES: Final = "biases.pt"
"""The file in a checkpoint of a run that has the routers' biases, which are no parameters: they don't move, but a run that goes on may not
begin with the checkpoint that they are from."""
Shapes = dict[str, tuple[int, ...]]


def whole_shapes(model: torch.nn.Module) -> Shapes:
    """The shape of each parameter, also of one that ZeRO-3 has divided."""
    return {name: tuple(getattr(parameter, "ds_shape", parameter.shape)) for name, parameter in model.named_parameters()}


def tag_sliced_parameters(model: torch.nn.Module, before: Shapes) -> None:
    """AutoTP tags the weights of the linears that it cuts, but not T5's relative bias, of which each rank gets its heads: the gradient
    norm would count those of rank 0 only. `before`: the shapes before AutoTP."""
    for name, shape in whole_shapes(model).items():
        if shape != before[name]:
            model.get_parameter(name).tensor_model_parallel = True


def summed_over_sequence(plan: Plan) -> int:
    """How many ranks' gradients DeepSpeed adds up where it should take their mean. Under Ulysses it divides by the data-parallel ranks
    alone, not by those of a sequence (stage_1_and_2.py:1508, engine.py:3884), but at stage 3 by all (reduce_scatter_coalesced, called at
    stage3.py:1931). Adam hides the factor, clipping does not."""
    return plan.cp if plan.zero_stage < 3 else 1


def ulysses(plan: Plan, attention: str) -> Any:
    """What makes accelerate put DeepSpeed's exchange of sequence shards for heads around this attention."""
    from accelerate import ParallelismConfig
    from accelerate.utils import DeepSpeedSequenceParallelConfig

    length = plan.training.seq_length
    handler = DeepSpeedSequenceParallelConfig(sp_seq_length=length, sp_seq_length_is_variable=False, sp_attn_implementation=attention)
    return ParallelismConfig(sp_size=plan.cp, dp_shard_size=plan.dp, sp_handler=handler)


def complete(arguments: Any, plan: Plan, engine: dict[str, Any], *, evaluates: bool) -> None:
    """Sets what trainer.yaml says otherwise in transformers' TrainingArguments, for use by hand. `evaluates`: whether there are samples to
    evaluate on."""
    run, traced = plan.run, plan.model.traced
    arguments.output_dir = FOLDER
    arguments.activation_checkpointing = arguments.gradient_checkpointing = False  # two names of what the model has already
    arguments.remove_unused_columns, arguments.logging_nan_inf_filter, arguments.disable_tqdm = False, False, True
    arguments.report_to = ["tensorboard"] * is_tensorboard_available() + ["wandb"] * bool(run.wandb)
    os.environ |= {f"WANDB_{name.upper()}": value for name, value in run.wandb.items()}
    os.environ["TENSORBOARD_LOGGING_DIR"] = "tensorboard"
    if plan.cp > 1:
        arguments.parallelism_config = ulysses(plan, engine["model"]["attn_implementation"])
    if traced is not None:
        names = [feed.name for feed in traced.feeds]
        arguments.label_names = ["labels"] if "labels" in names else names[:1]  # by which the Trainer knows that there is a loss
    if evaluates:
        arguments.eval_strategy, arguments.eval_steps = "steps", run.eval_every
        arguments.per_device_eval_batch_size = plan.micro_batch_size


class HuggingFaceModel(DeepSpeedStates):
    """One rank of such a model. DeepSpeed makes groups of its own, neighbours first: the same as those of the plan's order."""

    balance: torch.Tensor | None = None
    """The last micro-batch's loss of balance, times what it counts."""
    logits: torch.Tensor | None = None
    """The last micro-batch's logits; None under tiles."""
    tiled_head: tiles.TiledHead | None = None
    host_activations: Any = None

    def __init__(self, plan: Plan, engine: dict[str, Any], device: torch.device, groups: Groups, model: torch.nn.Module) -> None:
        self.plan, self.engine_fields, self.device, self.groups, self.model = plan, engine, device, groups, model

    @staticmethod
    def first(plan: Plan, engine: dict[str, Any], device: torch.device) -> torch.nn.Module:
        """The model with its first weights, before DeepSpeed has it. Raises InputError."""
        model: Any = hugging_face.first_model(plan, engine, device)
        if "expert_balance" in engine["model"]:
            model.config.output_router_logits, model.config.router_aux_loss_coef = True, engine["model"]["expert_balance"]
        return model

    @contextlib.contextmanager
    def corrected(self) -> Iterator[None]:
        """Around DeepSpeed's initialisation of `model`: mends what it would do otherwise than the plan, and adds what the plan asks of its
        functions. What AutoTP cuts counts on every rank in the gradient norm, buffers stay in the type that they were made in."""
        plan, model = self.plan, self.model
        whole, buffers = whole_shapes(model), hugging_face.float_buffers(model)
        with contextlib.ExitStack() as around:
            if plan.ep > 1:
                around.enter_context(auto_ep.prepared(plan))
            if plan.tp > 1 and plan.training.lora is not None:
                around.enter_context(lora.seen_into())
            yield
        if plan.tp > 1:
            tag_sliced_parameters(model, whole)
        if plan.ep > 1:
            auto_ep.require_layers(model, plan)
        hugging_face.restore(model, buffers)
        if plan.tiled_mlp > 1:
            tiles.tile_mlps(model, plan.tiled_mlp)
        if plan.tiled_logits > 1:
            self.tiled_head = tiles.TiledHead(model, plan.tiled_logits)
        if plan.offload_activations:
            self.host_activations = host_activations.checkpoints_on_host(model)
        self.places = self._places(whole)

    def _places(self, whole: Shapes) -> list[Place]:
        """The place in the whole model of every parameter, also in ZeRO-3's partitions, AutoTP's parts and AutoEP's layers."""
        replica, tp, tp_rank = self.groups.rank(REPLICAS), self.groups.size("tp"), self.groups.rank("tp")
        found, experts = [], auto_ep.parameters(self.model)
        for name, parameter in self.model.named_parameters():
            if name in experts:
                found.append(auto_ep.place(experts[name], parameter, whole, replica))
                continue
            shape, global_shape = tuple(getattr(parameter, "ds_shape", parameter.shape)), whole[name]
            cut = [dim for dim, size in enumerate(global_shape) if shape[dim] != size]
            first = bool(cut) or tp_rank == 0
            start = begin = 0
            for piece in (self._pieces(name) if cut else ()) or (global_shape[cut[0]] if cut else 0,):
                offset, local = [0] * len(shape), list(shape)
                if cut:
                    local[cut[0]] = piece // tp
                    offset[cut[0]] = begin + tp_rank * local[cut[0]]
                about = {"key": name, "index": (), "offset": tuple(offset), "shape": tuple(local), "global_shape": global_shape}
                found.append(Place(parameter=parameter, start=start, first=first, main=first and replica == 0, **about))
                start, begin = start + prod(local), begin + piece
        return found

    def _pieces(self, name: str) -> tuple[int, ...]:
        """Widths of the parts of a fused linear's parameter, each of which tensor parallelism divides; () where it has none."""
        return ()

    # ------------------------------------------------------------------------------------------------------------------- a micro-batch

    def around_passes(self) -> contextlib.AbstractContextManager[Any]:
        """What a micro-batch's forward and backward pass run in."""
        return contextlib.nullcontext() if self.host_activations is None else self.host_activations

    def loss(self, batch: Batch) -> torch.Tensor:
        """The loss of one micro-batch of the plan's samples."""
        mine = self.part(batch)
        if self.tiled_head is not None:
            with self.tiled_head.left_out():
                hidden = self.engine(input_ids=mine["tokens"], position_ids=mine["positions"], use_cache=False).logits
            return self.tiled_head.mean_loss(mine, hidden)
        found: list[torch.Tensor] = []
        coefficient = self.engine_fields["model"].get("expert_balance", 0.0) if self.model.training else 0.0
        stack = self.plan.model.stack
        losses, self.logits = hugging_face.losses(self.engine, stack, mine, balance=found if coefficient else None)
        self.balance = coefficient * found[0] if found else None
        return mean_loss(mine, losses)

    def part(self, batch: Batch) -> Batch:
        """This rank's part of each sequence under Ulysses, with its positions; every part predicts as many tokens, or "loss_scale" evens
        them out."""
        if self.plan.cp == 1:
            return batch
        rank = self.groups.rank("cp")
        parts = {name: tensor.chunk(self.plan.cp, dim=1)[rank].contiguous() for name, tensor in batch.items() if tensor.dim() > 1}
        return parts | {name: tensor * self.plan.cp for name, tensor in batch.items() if name == "loss_scale"}

    # --------------------------------------------------------------------------------------------------------------------- checkpoints

    def snapshot(self, folder: Path, step: int) -> Snapshot:
        found = super().snapshot(folder, step)
        biases = {name: value.cpu() for name, value in hugging_face.float_buffers(self.model).items() if name.endswith(BIAS)}
        if biases and dist.get_rank() == 0:
            torch.save(biases, folder / BIASES)
        return found

    def load(self, saved: Saved) -> None:
        super().load(saved)
        if (path := saved.folder / BIASES).is_file():
            hugging_face.restore(self.model, torch.load(path, weights_only=True))

    def export(self, folder: Path) -> None:
        """Writes a Hugging Face checkpoint as transformers does, with the tokenizer's files; of a model with LoRA peft's adapter, or on
        request the sum of both. Rank 0 has the whole model in host memory."""
        adapted, run, state = self.engine_fields["model"].get("lora"), self.plan.run, self._whole_state()
        if dist.get_rank() == 0 and adapted and not adapted["merge"]:
            lora.write(state, adapted, run.init_from, folder)
        elif dist.get_rank() == 0:
            with hugging_face.zero_init(None), torch.device("meta"):
                whole: Any = self._uncut()
            state = lora.merged(whole, adapted, state) if adapted else state
            buffers = {name.replace(".router.", ".gate."): buffer.detach().cpu() for name, buffer in self.model.named_buffers()}
            state |= {name: buffer for name, buffer in buffers.items() if name in whole.state_dict()}
            whole.save_pretrained(folder, state_dict=state)
            copy_generation(run, folder)
            for path in folder.glob("*.safetensors"):
                let_others_read(path)
        if dist.get_rank() == 0:
            copy_tokenizer(run, folder)
        dist.barrier()

    def _whole_state(self) -> dict[str, torch.Tensor]:
        """On rank 0 every weight whole, by its name in transformers, in host memory; {} elsewhere. All ranks call this."""
        import deepspeed

        layers = {id(p): layer for layer in auto_ep.layers(self.model).values() for p in layer.experts.parameters()}
        by_parameter: dict[int, list[Place]] = {}
        for place in self.places:
            by_parameter.setdefault(id(place.parameter), []).append(place)
        if self.plan.zero_stage == 3:  # after an evaluation the first weights of the next pass are under way, which can't be made whole
            self.engine.empty_partition_cache()
        found: dict[str, torch.Tensor] = {}
        for mine in by_parameter.values():
            parameter: Any = mine[0].parameter
            with torch.no_grad(), deepspeed.zero.GatheredParameters([parameter], enabled=self.plan.zero_stage == 3):
                parts = [parameter.detach().clone()]
            layer, shape = layers.get(id(parameter)), parts[0].shape
            cut = [0] if layer is not None else [dim for dim, size in enumerate(mine[0].global_shape) if shape[dim] != size]
            if cut:
                group = self.groups.group("tp") if layer is None else layer.ep_group
                mine_alone, parts = parts[0].contiguous(), [torch.empty_like(parts[0]) for _ in range(dist.get_world_size(group))]
                dist.all_gather(parts, mine_alone, group=group)
            for place in mine if dist.get_rank() == 0 else ():  # the first of its group
                target = found.setdefault(place.key, torch.empty(place.global_shape, dtype=parts[0].dtype))
                for number, part in enumerate(parts):
                    begin = [
                        at + number * size * (dim in cut) for dim, (at, size) in enumerate(zip(place.offset, place.shape, strict=True))
                    ]
                    target[tuple(slice(at, at + size) for at, size in zip(begin, place.shape, strict=True))] = place.of(part)
        return found

    def _uncut(self) -> torch.nn.Module:
        """The model as it is exported, without adapters, that nothing has cut."""
        fields, config = self.engine_fields["model"], self.engine_fields["model"]["config"] | special_tokens(self.plan.run)
        plain = {name: value for name, value in fields.items() if name != "lora"}
        return hugging_face.build_model(plain | {"gradient_checkpointing": False, "config": config})
