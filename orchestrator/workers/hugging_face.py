"""Hugging Face models from engine.json: built whole or in ZeRO-3 partitions, with weights of transformers' own drawing or of a checkpoint,
and run."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
import transformers
from safetensors import SafetensorError
from torch.nn.utils.parametrize import is_parametrized
from transformers.initialization import no_init_weights

from orchestrator.errors import InputError
from orchestrator.model.parts.vision import part_of_weight
from orchestrator.plan import Plan
from orchestrator.workers import lora
from orchestrator.workers.batch import Batch
from orchestrator.workers.hf_files import CONFIG, KEY

ACTIVATIONS: Final = ("activation_function", "hidden_act", "feed_forward_proj")
"""The config fields that name an activation. The planner knows one GELU, transformers several."""


def model_class(fields: dict[str, Any]) -> Any:
    """The class of transformers that `engine.json`'s "model" names."""
    return getattr(transformers, fields["model_class"])


def match_activation(fields: dict[str, Any], folder: str) -> None:
    """Takes the checkpoint's own activation in `engine.json`'s "model"."""
    before, config = json.loads(Path(folder, CONFIG).read_text()), fields["config"]
    config |= {name: before[name] for name in ACTIVATIONS if name in before and name in config}


def config_of(fields: dict[str, Any]) -> Any:
    """transformers' configuration of `engine.json`'s "model"."""
    config = getattr(transformers, fields["config_class"])(**fields["config"], attn_implementation=fields["attn_implementation"])
    # T5Config of transformers 5 ties whatever it is told (configuration_t5.py); the plan counts an untied head as parameters.
    config.tie_word_embeddings = fields["config"]["tie_word_embeddings"]
    return config


def build_model(fields: dict[str, Any]) -> torch.nn.Module:
    """The model of `engine.json`'s "model", whole and unfilled, on the default device."""
    with zero_init(None), no_init_weights():
        model = model_class(fields)._from_config(config_of(fields), dtype=getattr(torch, fields["dtype"]))
    model.tie_weights()  # which no_init_weights leaves out as well
    return prepared(model, fields)


def prepared(model: Any, fields: dict[str, Any]) -> torch.nn.Module:
    """The model with LoRA's adapters, what is frozen, and recompute, as `engine.json`'s "model" has them, for training."""
    for name, parameter in model.named_parameters() if fields.get("freeze") else ():
        parameter.requires_grad_(part_of_weight(name) not in fields["freeze"])
    if "lora" in fields:
        lora.put_in(model, fields["lora"])
    if fields["gradient_checkpointing"]:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    return model


def first_model(plan: Plan, engine: dict[str, Any], device: torch.device) -> torch.nn.Module:
    """The model of engine.json with the weights of model.init_from=, else as transformers draws them, the same whatever the layout;
    adapters as peft draws them. At stage 3 a weight is divided as soon as its module is built; AutoTP and AutoEP cut a whole model in host
    memory. Raises InputError."""
    fields, source, seed = engine["model"], plan.run.init_from, plan.training.seed
    kind, dtype, place = model_class(fields), getattr(torch, fields["dtype"]), torch.device("cpu" if plan.tp * plan.ep > 1 else device)
    torch.manual_seed(seed)
    with zero_init(engine["ds_config"] if fields["zero_init"] else None):
        if source:
            match_activation(fields, source)
            model, missing, _ = from_folder(kind, source, config_of(fields), {"dtype": dtype})
            for name in missing[:1]:  # transformers would draw it
                raise InputError(KEY, source, f"has no tensor {name}")
        else:
            with contextlib.nullcontext() if fields["zero_init"] else place:
                model = drawn(kind, config_of(fields), {"dtype": dtype})
    torch.manual_seed(seed)  # at stage 3 one rank alone has drawn
    model = prepared(model, fields)
    torch.manual_seed(seed)
    return model


def drawn(kind: Any, config: Any, words: dict[str, Any]) -> Any:
    """The model of this class, configuration and keywords with weights as transformers draws them, in the order of a divided model
    (integrations/deepspeed.py, initialize_weights_zero3): torch's constructors draw none before."""
    from transformers.integrations import is_deepspeed_zero3_enabled

    if is_deepspeed_zero3_enabled():
        model = kind._from_config(config, **words)
        if any(map(is_parametrized, model.modules())):
            raise InputError("pin.zero_stage", 3, f"{kind.__name__} has weights by their norm, which transformers does not draw divided")
        return model
    with no_init_weights():
        model = kind._from_config(config, **words)
    if any(map(is_parametrized, model.modules())):  # a weight's norm is taken as its module is built (wav2vec2)
        return kind._from_config(config, **words)
    model.init_weights()
    return model


def from_folder(kind: Any, folder: str, config: Any, words: dict[str, Any]) -> tuple[Any, list[str], list[str]]:
    """(the model of this class, configuration and keywords with a checkpoint's weights, names that the checkpoint lacks, those that it has
    beside). Raises InputError for one that can't be read or is of other shapes."""
    try:
        model, told = kind.from_pretrained(folder, config=config, output_loading_info=True, local_files_only=True, **words)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise InputError(KEY, folder, " ".join(str(error).split())) from None
    return model, sorted(told["missing_keys"]), sorted(told["unexpected_keys"])


def without_batch(ds_config: dict[str, Any]) -> dict[str, Any]:
    """The configuration for zero.Init, which would check the batch against the whole world, even under Ulysses."""
    return {key: value for key, value in ds_config.items() if key != "train_batch_size"}


@contextlib.contextmanager
def zero_init(ds_config: dict[str, Any] | None) -> Iterator[None]:
    """Lets transformers divide a model as it builds it, by this configuration (modeling_utils.py, _from_config and from_pretrained); None:
    lets it build whole models, though the Trainer has told it of one."""
    from transformers.integrations import HfDeepSpeedConfig
    from transformers.integrations import deepspeed as known

    before = known._hf_deepspeed_config_weak_ref
    known.unset_hf_deepspeed_config()
    kept = HfDeepSpeedConfig(without_batch(ds_config)) if ds_config else None
    try:
        yield
    finally:
        del kept
        known._hf_deepspeed_config_weak_ref = before


def float_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the buffers in floating point, by transformers' names: frequencies of positions, the biases by which experts are balanced.
    What transformers calls gate is AutoEP's router."""
    return {name.replace(".router.", ".gate."): b.detach().clone() for name, b in model.named_buffers() if b.is_floating_point()}


def restore(model: torch.nn.Module, buffers: dict[str, torch.Tensor]) -> None:
    """Puts these buffers back as they were made, most in fp32: DeepSpeed casts all to the training's type, and bf16 has 8 bits for
    frequencies that are multiplied by thousands of positions."""
    for name, buffer in list(model.named_buffers()):
        value = buffers.get(name.replace(".router.", ".gate."))
        if value is not None:
            path, _, own = name.rpartition(".")
            setattr(model.get_submodule(path), own, value.to(buffer.device))


def losses(
    model: Callable[..., Any], stack: str, batch: Batch, *, balance: list[torch.Tensor] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(the loss by token [b, s] in fp32 of what this stack's sampler makes, the logits). `balance` gets the loss by which a model of
    experts balances their load, where it is a list."""
    if stack == "encoder_decoder":
        output = model(input_ids=batch["tokens"], decoder_input_ids=batch["decoder_tokens"], use_cache=False)
    elif stack == "encoder":
        output = model(input_ids=batch["tokens"])
    else:
        routed = {} if balance is None else {"output_router_logits": True}
        output = model(input_ids=batch["tokens"], position_ids=batch["positions"], use_cache=False, **routed)
        if balance is not None:
            balance.append(output.aux_loss if "real" not in batch else _balance_of(model, output.router_logits, batch["real"]))
    logits, labels = output.logits, batch["labels"]
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none").view_as(labels), logits


def _balance_of(model: Any, router_logits: Any, real: torch.Tensor) -> torch.Tensor:
    """The loss that balances the experts' load, over the tokens that are no padding: transformers leaves those out that an attention mask
    names, which no model gets here, since packed samples are told apart by their positions where there is none (masking_utils.py,
    find_packed_sequence_indices)."""
    bare = getattr(model, "module", model)
    found: torch.Tensor = sys.modules[type(bare).__module__].load_balancing_loss_func(
        router_logits, bare.num_experts, bare.num_experts_per_tok, real
    )
    return found
