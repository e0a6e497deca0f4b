"""Readers of models, one file each, and the two ways in: a Hugging Face config becomes an architecture, an architecture layers."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from typing import Any, Final

from msgspec.structs import replace

from orchestrator.errors import InputError
from orchestrator.extensions import Extensible
from orchestrator.model.architecture import Architecture
from orchestrator.model.describe import layers
from orchestrator.model.families import vision_language
from orchestrator.model.families.check import check_architecture, check_lengths
from orchestrator.model.families.hf import KEY, Family, HfConfig
from orchestrator.model.parts.vision import Images
from orchestrator.model.spec import Gemm, ModelSpec, Op, Pointwise
from orchestrator.model.traced import FAMILY, Traced
from orchestrator.model.training import Training


def _found() -> dict[str, Family]:
    """Each `Family` that a file in this folder has, by name."""
    modules = [import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__)]
    found = {each.name: each for module in modules for each in vars(module).values() if isinstance(each, Family)}
    return dict(sorted(found.items()))


FAMILIES: Final = Extensible("orchestrator.families", Family, _found())
"""Families of models by name. A new one is a `Family` in a file of this folder, and nothing else; or another package's entry point."""


def describe(architecture: Architecture, seq_length: int, decoder_seq_length: int | None = None, images: Images | None = None) -> ModelSpec:
    """The layers of this architecture for sequences of these lengths, in tokens, with these images in each.

    Raises InputError for an unknown family, an architecture that is not one, or a length that it can't take.
    """
    if architecture.traced is not None:
        return _recorded(architecture, architecture.traced, seq_length, decoder_seq_length)
    family = _family(architecture.family)
    check_architecture(architecture, family)
    check_lengths(architecture, seq_length, decoder_seq_length)
    return layers(architecture, seq_length, decoder_seq_length, images)


def describe_for(architecture: Architecture, training: Training) -> ModelSpec:
    """The layers for the sequences and images of this training. Raises InputError as `describe`."""
    images = None
    if training.images is not None and training.image_tokens is not None:
        images = Images(count=training.images, tokens=training.image_tokens)
    return describe(architecture, training.seq_length, training.decoder_seq_length, images)


def _recorded(a: Architecture, traced: Traced, seq_length: int, decoder_seq_length: int | None) -> ModelSpec:
    """Layers that were recorded at these lengths."""
    traced.check_lengths(seq_length, decoder_seq_length)
    runs = tuple(replace(run, layer=replace(run.layer, ops=tuple(_with_loss(run.layer.ops)))) for run in traced.runs)
    return ModelSpec(architecture=a, seq_length=seq_length, decoder_seq_length=decoder_seq_length, runs=runs, edges=traced.edges)


def _with_loss(ops: Iterable[Op]) -> Iterator[Op]:
    """The recorded operations, of which the memory-bound ones behind the product that makes the logits get the role "loss"."""
    behind = False
    for op in ops:
        behind = behind or (isinstance(op, Gemm) and bool(op.pad_to))
        yield replace(op, role="loss") if behind and isinstance(op, Pointwise) else op


def of_traced(traced: Traced, name: str) -> Architecture:
    """A recorded model as an architecture: its flat fields say what the recording tells of its sizes."""
    return Architecture(
        family=FAMILY,
        name=name,
        num_layers=max(1, sum(run.count for run in traced.runs if run.layer.recomputable)),
        hidden_size=traced.hidden_size,
        num_attention_heads=traced.num_attention_heads,
        num_query_groups=traced.num_query_groups,
        kv_channels=max(1, traced.hidden_size // traced.num_attention_heads),
        ffn_hidden_size=traced.ffn_hidden_size,
        vocab_size=traced.vocab_size,
        max_position_embeddings=traced.max_position_embeddings,
        position_embedding="none",
        make_vocab_size_divisible_by=1,
        tie_embeddings=any(weight.tied for run in traced.runs for weight in run.layer.weights),
        traced=traced,
    )


def has_reader(config: Mapping[str, Any]) -> bool:
    """Whether a family reads Hugging Face configurations of this kind: it knows the layers, and the model ends in a vocabulary.

    >>> has_reader({"model_type": "bert"}), has_reader({"model_type": "bert", "architectures": ["BertForSequenceClassification"]})
    (True, False)
    """
    kind = config.get("model_type")
    found = other_head(config) is None and any(kind in family.hf_model_types for family in FAMILIES.values())
    return found and (kind not in vision_language.VISION or vision_language.knows(config))


VOCABULARY_HEADS: Final = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForPreTraining", "ForConditionalGeneration", "WithLMHeadModel")


def other_head(config: Mapping[str, Any]) -> str | None:
    """transformers' class of a model that ends in something else than a vocabulary, as its configuration names it; None: no such."""
    named = config.get("architectures")
    first = named[0] if isinstance(named, list) and named and isinstance(named[0], str) else ""
    return first if "For" in first and not first.endswith(VOCABULARY_HEADS) else None


def _check_complete(config: Mapping[str, Any]) -> None:
    """Raises InputError for what a configuration says that no reader has."""
    head, quantised = other_head(config), config.get("quantization_config")
    if quantised is not None:
        method = quantised.get("quant_method", "quantised") if isinstance(quantised, Mapping) else quantised
        why = "is of quantised weights, which are neither planned nor trained here; take the config.json of the checkpoint before it"
        why += ", and lora.rank= for less memory; to train from scratch, a copy of the file without this field"
        raise InputError(f"{KEY}.quantization_config", method, why)
    if head is not None:
        why = "ends in no vocabulary; give its config.json as model.hf_config= alone, and its layers are recorded from its own code"
        raise InputError(f"{KEY}.architectures", head, why)


def from_hf_config(config: Mapping[str, Any], name: str) -> Architecture:
    """The architecture of a Hugging Face config.json. Raises InputError that names the field, its value and the choices.

    >>> config = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": 128, "vocab_size": 260}
    >>> from_hf_config(config, "tiny").ffn_hidden_size
    256
    """
    if not isinstance(config, Mapping):
        raise InputError(KEY, name, f"must be a JSON object, not {type(config).__name__}")
    _check_complete(config)
    by_type = {model_type: family for family in FAMILIES.values() for model_type in family.hf_model_types}
    fields = HfConfig(config)
    family = by_type[fields.choice("model_type", by_type)]
    architecture = family.from_hf_config(fields, name)
    try:
        check_architecture(architecture, family)
    except InputError as error:
        raise InputError(KEY, name, f"makes {error}") from None
    return architecture


OF_KINDS: Final = ("num_experts", "num_local_experts", "n_routed_experts", "kv_lora_rank", "sliding_window", "num_nextn_predict_layers",
                   "linear_num_value_heads", "ssm_state_size")  # fmt: skip
"""Fields of a config.json that make layers of another kind: experts, latent attention, windows, further heads, scans."""


class _Seen(dict[str, Any]):
    """A config.json that keeps which of its fields were asked for."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        super().__init__(fields)
        self.asked: set[object] = set()

    def get(self, key: str, default: Any = None, /) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)


def without_head(config: Mapping[str, Any]) -> str | None:
    """transformers' class of a model without any head (an embedding model), which is planned with the vocabulary's; None: no such.

    >>> [without_head({"architectures": [name]}) for name in ("BertModel", "GPT2LMHeadModel", "LlamaForCausalLM")]
    ['BertModel', None, None]
    """
    named = config.get("architectures")
    first = str(named[0]) if isinstance(named, list) and named else ""
    return first if first.endswith("Model") and not first.endswith(VOCABULARY_HEADS) else None


def not_read(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The fields of other kinds of models, as "name=value", that the model type's reader does not look at, as transformers' class doesn't.

    >>> not_read({"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": 128, "vocab_size": 260, "num_experts": 8})
    ('num_experts=8',)
    """
    seen = _Seen(config)
    from_hf_config(seen, "model")
    named = [name for name in OF_KINDS if config.get(name) and name not in seen.asked]
    if config.get("use_sliding_window") is False:
        named = [name for name in named if name != "sliding_window"]
    return tuple(f"{name}={config[name]}" for name in named)


def _family(name: str) -> Family:
    if name not in FAMILIES:
        raise InputError("model.family", name, "is not known", FAMILIES)
    return FAMILIES[name]
