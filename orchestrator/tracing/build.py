"""A model from its Hugging Face configuration or from the user's own code."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import msgspec
import torch
import transformers
from transformers.initialization import no_init_weights
from transformers.modeling_utils import local_torch_dtype
from transformers.models.auto import modeling_auto

from orchestrator.errors import InputError, nearest
from orchestrator.model.traced import Feed
from orchestrator.tracing.feeds import IGNORED, MASKED_EVERY

DESCRIBED: Final = "described"
"""The name under which transformers gets our recording attention."""
TASKS: Final = (
    modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
    modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    modeling_auto.MODEL_FOR_MASKED_LM_MAPPING,
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING,
    modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
    modeling_auto.MODEL_MAPPING,
)
"""transformers' tables of classes for a configuration that names none: the first that has one for it is taken. A bare model comes last: it
has no loss."""
LEFT_OUT: Final = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")
"""Shares of layers that a step leaves out."""
SPELLINGS: Final[tuple[dict[str, str], ...]] = ({"experts_implementation": "grouped_mm"}, {})
"""Experts whose shapes don't depend on the routing, where the class has them."""


class Source(NamedTuple):
    """Where a model comes from: a configuration's fields, or package.module:factory."""

    config: str = ""
    code: str = ""


def config_of(text: str) -> Any:
    """transformers' configuration of these fields. Raises InputError."""
    fields = json.loads(text)
    if "model_type" not in fields:
        raise InputError("model.hf_config.model_type", None, "is missing: it names the architecture")
    try:
        config = transformers.AutoConfig.for_model(**fields)
    except (ValueError, TypeError, KeyError) as error:
        known, version = transformers.models.auto.configuration_auto.CONFIG_MAPPING, f"transformers {transformers.__version__}"
        if fields["model_type"] not in known:
            near = nearest(str(fields["model_type"]), known)
            why = f"is no architecture of {version}{f', did you mean {near}' if near else ''}; code of your own is taken by model.code="
            raise InputError("model.hf_config.model_type", fields["model_type"], why) from None
        raise InputError("model.hf_config.model_type", fields["model_type"], f"{version}: {error}") from None
    config.architectures = fields.get("architectures")
    return config


def check_same_everywhere(config: Any) -> None:
    """Raises InputError for what would make the training depend on how the batch is laid out."""
    for name in LEFT_OUT:
        share = getattr(config, name, 0.0) or 0.0
        if share > 0:
            why = "leaves out layers at random, on each rank others, which no engine here reduces; write 0 into the config.json"
            raise InputError(f"model.hf_config.{name}", share, why)
    if getattr(config, "ctc_loss_reduction", "mean") == "sum" and class_of(config).__name__.endswith("ForCTC"):
        why = "makes the loss depend on the micro-batch, which is a plan's choice; write mean into the config.json"
        raise InputError("model.hf_config.ctc_loss_reduction", "sum", why)


def class_of(config: Any) -> Any:
    """The class that the configuration names, or the first of TASKS. Raises InputError."""
    for name in getattr(config, "architectures", None) or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    for mapping in TASKS:
        if type(config) in mapping:
            found = mapping[type(config)]
            return found[0] if isinstance(found, tuple) else found
    raise InputError("model.hf_config.model_type", config.model_type, "transformers has no model class for it")


def unfilled(cls: Any, config: Any, words: dict[str, Any]) -> torch.nn.Module:
    """The model of this class, in which nothing is drawn."""
    with no_init_weights():
        model = cls._from_config(config, **words)
    model.tie_weights()
    return model


def from_config(
    text: str, dtype: torch.dtype, attentions: tuple[str, ...], make: Callable[[Any, Any, dict[str, Any]], torch.nn.Module] = unfilled
) -> tuple[torch.nn.Module, str]:
    """The model as `make` makes it of class, configuration and keywords, with the first of these attentions that it takes. Raises
    InputError."""
    last: Exception | None = None
    for attention in attentions:
        for more in SPELLINGS:
            config = config_of(text)
            cls = class_of(config)
            try:
                return make(cls, config, {"attn_implementation": attention, "dtype": dtype, **more}).train(), attention
            except (ValueError, TypeError, KeyError, AttributeError, ImportError, RuntimeError, AssertionError) as error:
                _check_padding(config)
                last = error if last is None or isinstance(error, ImportError) else last  # a missing library is why all of them fail
    raise InputError("model.hf_config", cls.__name__, f"can't be built: {type(last).__name__}: {' '.join(str(last).split())}")


def from_source(source: Source, dtype: torch.dtype, attentions: tuple[str, ...]) -> tuple[torch.nn.Module, tuple[Feed, ...], str]:
    """(the model, what the user's own code is fed, the attention taken: the first where the code is the user's). Raises InputError."""
    if source.code:
        return *from_code(source.code, dtype), attentions[0]
    model, attention = from_config(source.config, dtype, attentions)
    return model, (), attention


def _check_padding(config: Any) -> None:
    """Raises InputError for a pad_token_id, said or the architecture's own, that is no row of the word embedding (torch asserts it)."""
    text = config.get_text_config()
    pad, rows = getattr(text, "pad_token_id", None), getattr(text, "vocab_size", None)
    if isinstance(pad, int) and isinstance(rows, int) and not -rows <= pad < rows:
        why = f"as {type(text).__name__} has it, is no token of vocab_size={rows}; write one that is, or null, into the config.json"
        raise InputError("model.hf_config.pad_token_id", pad, why)


def move_to_meta(model: torch.nn.Module) -> None:
    """Parameters that a class makes without asking for the default device (wav2vec2's `torch.Tensor(width)`)."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.device.type != "meta":
                setattr(module, name, torch.nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad))


def from_code(code: str, dtype: torch.dtype) -> tuple[torch.nn.Module, tuple[Feed, ...]]:
    """What the user's factory makes on the default device: (module, {argument: tensor of a batch of one}). The module's forward takes those
    by name and gives a loss, or an output with one. Raises InputError."""
    factory = _factory(code)
    with local_torch_dtype(dtype):
        made = factory()
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], torch.nn.Module) and isinstance(made[1], dict)):
        raise InputError("model.code", code, "must give (module, {argument of its forward: tensor of a batch of one})")
    model, sample = made
    return model.to(dtype).train(), tuple(_of_tokens(code, _feed(code, name, tensor), tensor, sample) for name, tensor in sample.items())


def loss_of(output: Any) -> torch.Tensor | None:
    """The loss among what a forward gives: a tensor of one number, an output's .loss or "loss", or the one number of a tuple, as of
    (loss, logits); None: there is none."""
    if isinstance(output, torch.Tensor):
        return output.float().reshape(()) if output.numel() == 1 else None
    if isinstance(output, tuple | list) and not hasattr(output, "loss"):
        numbers = [each for each in output if isinstance(each, torch.Tensor) and each.dim() == 0]
        return numbers[0].float() if len(numbers) == 1 else None
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    return None if loss is None else loss.float().reshape(())


def _of_tokens(code: str, feed: Feed, labels: torch.Tensor, sample: dict[str, torch.Tensor]) -> Feed:
    """Labels of a language model, as the sample has them: the ids themselves, which the forward shifts; the next one at each place; or the
    ids at some places and -100 at the others. Raises InputError where the ids are all one, so that the first two are the same."""
    ids = sample.get("input_ids")
    if feed.name != "labels" or ids is None or ids.shape != labels.shape or labels.dim() != 2 or labels.device != ids.device:
        return feed
    said, tokens = labels[0].tolist(), ids[0].tolist()
    copied = msgspec.structs.replace(feed, copies="input_ids", low=0, high=1)
    if said == tokens and len(set(tokens)) == 1 < len(tokens):
        why = f"input_ids and labels are {tokens[0]} throughout, which does not say whether its forward shifts the labels"
        raise InputError("model.code", code, f"{why}: give ids that differ; labels are the same where it does, else each next id")
    if said == tokens:
        return copied
    if said[:-1] == tokens[1:]:
        return msgspec.structs.replace(copied, ahead=1)
    if said.count(IGNORED) not in (0, len(said)):
        return msgspec.structs.replace(copied, every=MASKED_EVERY)
    return feed


def _factory(code: str) -> Callable[[], Any]:
    module, colon, name = code.partition(":")
    if not colon:
        raise InputError("model.code", code, "is not package.module:factory")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise InputError("model.code", code, f"can't be imported: {error}") from None


def _feed(code: str, name: str, tensor: Any) -> Feed:
    if not isinstance(tensor, torch.Tensor) or tensor.dim() < 1 or tensor.shape[0] != 1:
        raise InputError("model.code", code, f"{name} is no tensor of a batch of one")
    if tensor.dtype.is_floating_point:
        return Feed(name=name, shape=tuple(tensor.shape[1:]))
    if tensor.device.type == "meta":
        why = f"{name} has integers, which say what range to draw from; tensors are made without values here: make it with device='cpu'"
        raise InputError("model.code", code, why)
    return Feed(name=name, shape=tuple(tensor.shape[1:]), dtype="int64", high=int(tensor.max()) + 1)


def attend_by_name(forward: Callable[..., Any]) -> None:
    """Give transformers this function as the attention DESCRIBED; a name without a mask function gets no mask."""
    transformers.AttentionInterface.register(DESCRIBED, forward)
