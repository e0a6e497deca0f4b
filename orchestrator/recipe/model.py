"""The model and the training of a run, from their keys."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import gcd, lcm
from pathlib import Path
from typing import Any, Final

import msgspec

from orchestrator.errors import InputError
from orchestrator.hardware.spec import Cluster
from orchestrator.key import shown
from orchestrator.model import families, routing
from orchestrator.model.lora import Lora
from orchestrator.model.parts.experts import Experts
from orchestrator.model.parts.vision import Vision
from orchestrator.model.spec import Architecture
from orchestrator.model.training import SEEING, Lengths, Training
from orchestrator.plan import RunSettings
from orchestrator.recipe import reinforcement, supervised
from orchestrator.recipe.clusters import stored
from orchestrator.recipe.described import TRACED, check_untouched
from orchestrator.recipe.layers import Flat, Given, fields_of, merge, recipe_layers, value_of
from orchestrator.recipe.lengths import said_lengths
from orchestrator.recipe.sources import data_settings, is_elsewhere, read_object, read_text
from orchestrator.values import defaults_of


def label_of(merged: Flat) -> str:
    """A name for a run without a recipe: model.name, the Hugging Face config's file (its folder where that is called config.json), the
    description's file, the class of model.code= or its module and function, or the family. Raises InputError."""
    if "model.name" in merged:
        return str(value_of(merged, "model.name", ""))
    config = value_of(merged, "model.hf_config", None)
    if config is not None:
        path, folder = Path(config), Path(config).parent.resolve()  # in Hugging Face's cache the file is a link to one without a name
        if folder.parent.name == "snapshots":
            folder = folder.parents[1]  # models--ORGANISATION--NAME
        return folder.name.rpartition("--")[2] or "model" if path.name == "config.json" else path.stem
    if "model.description" in merged:
        return Path(value_of(merged, "model.description", "")).stem
    if "model.code" in merged:
        module, _, factory = str(value_of(merged, "model.code", "")).rpartition(":")
        return factory if factory[:1].isupper() else f"{module.rpartition('.')[2]}.{factory}"  # many functions are called build
    if "model.family" in merged:
        return str(value_of(merged, "model.family", ""))
    raise InputError("recipe", None, "is missing: name one, or give model.hf_config=path/to/config.json", stored("models"))


def architecture_of(merged: Flat, label: str) -> Architecture:
    fields = fields_of(merged, Architecture)
    traced = fields.get("traced")
    if traced is not None:
        check_untouched(fields, traced, label)
        return msgspec.structs.replace(families.of_traced(traced, label), name=fields.get("name", label))
    path = value_of(merged, "model.hf_config", None)
    if path is not None:
        if Path(path).is_dir():
            raise InputError("model.hf_config", shown(path), "is a folder; give the path of its config.json")
        base = families.from_hf_config(read_object(Path(path), "model.hf_config", path), label)
        return msgspec.structs.replace(base, **fields)
    fields.setdefault("name", label)
    for name, default in defaults_of(Architecture).items():
        if default is msgspec.NODEFAULT and name not in fields:
            raise InputError(f"model.{name}", None, "is missing: the recipe has none, so give it (or model.hf_config)")
    return Architecture(**fields)


def leaves_images_out(merged: Flat, architecture: Architecture) -> bool:
    """Whether the model has a tower that looks at images, of which nothing is planned: no reader knows it, or model.vision=null says so."""
    path = value_of(merged, "model.hf_config", None)
    if path is None or architecture.vision is not None or architecture.traced is not None:
        return False
    return isinstance(read_object(Path(path), "model.hf_config", path).get("vision_config"), dict)


def read_otherwise(merged: Flat, architecture: Architecture) -> tuple[str, ...]:
    """What model.hf_config= says that its model type's reader leaves out, in sentences."""
    config = _config_read(merged, architecture)
    if config is None:
        return ()
    fields, head = families.not_read(config), families.without_head(config)
    found = [f"{', '.join(fields)}: of other kinds of models than its model_type, not read"] if fields else []
    if head is not None:
        found.append(f"architectures={head} has no head: planned with the vocabulary's, as in pretraining")
    return tuple(found)


def model_type(merged: Flat, architecture: Architecture) -> str | None:
    """The model_type of model.hf_config=, where a reader read it."""
    config = _config_read(merged, architecture)
    return None if config is None else config.get("model_type")


def _config_read(merged: Flat, architecture: Architecture) -> Mapping[str, Any] | None:
    path = value_of(merged, "model.hf_config", None)
    return None if path is None or architecture.traced is not None else read_object(Path(path), "model.hf_config", path)


def model_of(name: str) -> Architecture:
    """The model of another recipe. Raises InputError."""
    label, layers = recipe_layers({"recipe": Given(name, name)})
    return architecture_of(merge(layers), label or name)


def with_balance(architecture: Architecture, coefficient: float | None) -> Architecture:
    """The architecture with model.aux_loss_coeff= in every layer of experts; None: as it is. Raises InputError where there are none."""
    if coefficient is None:
        return architecture
    if not architecture.experts:
        raise InputError("model.aux_loss_coeff", coefficient, "is of experts, and the model has none")
    return architecture.with_experts(lambda part: msgspec.structs.replace(part, aux_loss_coeff=coefficient))


def with_routing(architecture: Architecture, text: str | None) -> Architecture:
    """The architecture with model.routing= in every layer of experts. Raises InputError where there are none, or it is neither a number nor
    a trace."""
    if text is None:
        return architecture
    if not architecture.experts:
        raise InputError(routing.KEY, shown(text), "is of experts, and the model has none")
    try:
        skew: float | None = float(text)
    except ValueError:
        skew = None
    lines = "" if skew is not None else _trace(text)

    def uneven(part: Experts) -> Experts:
        if skew is not None:
            found = routing.stated(skew, part.num_experts, part.topk, part.capacity_factor)
        else:
            found = routing.trace(lines, text, part.num_experts, part.capacity_factor)
        return msgspec.structs.replace(part, routing=found)

    return architecture.with_experts(uneven)


def _trace(path: str) -> str:
    try:
        return read_text(Path(path))
    except InputError as error:
        raise InputError(routing.KEY, shown(path), f"is no number, and as a trace: {error.why}") from None


def training_of(merged: Flat, said: Collection[str] = ()) -> Training:
    """What the keys say of the training. `said`: those that no recipe says. Raises InputError."""
    fields = fields_of(merged, Training)
    first, *others = [f"train.{name}" for name in ("global_batch_size", "seq_length") if name not in fields] or [""]
    if first:
        raise InputError(first, None, f"is missing: the recipe has none, so give {' and '.join(['it', *others])}")
    tokens = value_of(merged, "train.tokens", None)
    if tokens is not None:
        samples = fields["global_batch_size"] * (fields["seq_length"] + (fields.get("decoder_seq_length") or 0))
        fields["steps"] = -(-tokens // samples)
    if fields.get("task") == reinforcement.TASK:
        del fields["task"]
    if fields.get("precision") == "mxfp8":
        if fields.setdefault("fp8_recipe", "mxfp8") not in (None, "mxfp8"):
            raise InputError("train.fp8_recipe", fields["fp8_recipe"], "contradicts train.precision=mxfp8")
        fields |= {"precision": "fp8", "fp8_recipe": "mxfp8"}
    training = Training(**fields, lora=_lora_of(merged))
    if training.min_lr > training.lr:
        raise InputError("train.min_lr", training.min_lr, f"is above train.lr={training.lr}")
    if training.warmup > training.steps:
        own = "" if "train.warmup" in said else f"; it is the recipe's own, train.warmup= says another: 0 to {training.steps}"
        raise InputError("train.warmup", training.warmup, f"is longer than the training, train.steps={training.steps}{own}")
    _check_schedule(training)
    return training


def _check_schedule(training: Training) -> None:
    """Raises InputError for a schedule that has no rates, and for settings of another than the training's."""
    if training.schedule == "inverse_square_root" and not training.warmup:
        why = "must be 1 at least with train.schedule=inverse_square_root: after it the rate is lr * sqrt(warmup / step)"
        raise InputError("train.warmup", training.warmup, why)
    if training.schedule != "wsd":
        for name, default in (("decay_steps", None), ("decay", "linear")):
            if getattr(training, name) != default:
                raise InputError(f"train.{name}", getattr(training, name), f"is for train.schedule=wsd, and it is {training.schedule}")
    elif training.warmup + training.decay_length > training.steps:
        why = f"is longer than what train.warmup={training.warmup} leaves of train.steps={training.steps}"
        raise InputError("train.decay_steps", training.decay_length, why)


LEAST: Final = {"train.seq_length": 128, "train.global_batch_size": 1}
"""Where largest= begins that no recipe begins."""


def with_sequence_length(merged: Flat, label: str) -> Flat:
    """The keys, and where no sequence length is given, one that holds the longest supervised sample, up to the model's positions; of what
    largest= asks for, which nobody needs to give, the least. Raises InputError."""
    asked = f"train.{value_of(merged, 'largest', None)}"
    if asked in LEAST and asked not in merged:
        return {**merged, asked: Given(LEAST[asked], str(LEAST[asked]))}
    if value_of(merged, "task", "pretrain") != "sft" or "train.seq_length" in merged:
        return merged
    data, said, path = data_settings(merged, RunSettings()), value_of(merged, "data.lengths", None), _samples_here(merged)
    if path is None and said is None:
        there = f"; data={data['data']} is not here" if data["data"] else ""
        raise InputError("train.seq_length", None, f"is missing: give it, or data= or data.lengths=, whose longest sample says it{there}")
    architecture = architecture_of(merged, label)
    per_image = tokens_of_an_image(architecture.vision, value_of(merged, "train.image_tokens", None))
    longest = supervised.counted(path, data["tokenizer"], per_image).longest if path else max(supervised.drawn_counts(said))
    length = supervised.chosen_length([longest], architecture.max_position_embeddings)
    return {**merged, "train.seq_length": Given(length, str(length))}


def with_epochs(merged: Flat, label: str) -> Flat:
    """The keys, with the steps that train.epochs= takes. Raises InputError where the samples can't be counted."""
    epochs = value_of(merged, "train.epochs", None)
    if epochs is None:
        return merged
    text = shown(merged["train.epochs"].text)
    if value_of(merged, "task", "pretrain") != "sft":
        raise InputError("train.epochs", text, "counts samples: task=sft; train.tokens= says how much of a text is trained on")
    data, said, path = data_settings(merged, RunSettings()), value_of(merged, "data.lengths", None), _samples_here(merged)
    if path is None and not (said and isinstance(said_lengths("data.lengths", said), list)):
        raise InputError("train.epochs", text, "needs samples to count: data= here, or data.lengths= as a file; else train.steps=")
    length, batch = (value_of(merged, f"train.{name}", None) for name in ("seq_length", "global_batch_size"))
    if length is None or batch is None:
        return merged  # training_of says so
    vision = architecture_of(merged, label).vision
    lengths = _lengths(path, data["tokenizer"], said, length, tokens_of_an_image(vision, value_of(merged, "train.image_tokens", None)))
    assert lengths is not None
    packing = value_of(merged, "data.packing", None)
    packing = TRACED not in merged and vision is None if packing is None else packing
    steps = supervised.steps_of(epochs, lengths, batch, packing=packing)
    return {**merged, "train.steps": Given(steps, str(steps))}


def with_samples(training: Training, merged: Flat) -> Training:
    """The training with the lengths of its supervised samples, and whether they are packed: wherever a reader knows the layers. Raises
    InputError."""
    said: str | None = value_of(merged, "data.lengths", None)
    balance = value_of(merged, BALANCE, None)
    if training.task == "pretrain":
        for name, value in (("data.packing", training.packing), (BALANCE, balance), ("data.lengths", said)):
            if value is not None:
                raise InputError(name, shown(value), "is of samples: task=sft")
        return training
    if balance is not None and training.packing is False:
        raise InputError(BALANCE, balance, "is of packed samples: padded ones have all as much to compute")
    data, path = data_settings(merged, RunSettings()), _samples_here(merged)
    if path is not None and said is not None:
        raise InputError("data.lengths", shown(said), f"is for a plan before there are samples: data={path} has lengths of its own")
    packing = value_of(merged, TRACED, None) is None if training.packing is None else training.packing
    lengths = _lengths(path, data["tokenizer"], said, training.seq_length)
    return msgspec.structs.replace(training, packing=packing, lengths=lengths)


def _lengths(path: str | None, tokenizer: str | None, said: str | None, seq_length: int, per_image: int = 0) -> Lengths | None:
    """The lengths of a file's samples, or of those that data.lengths= says; None: there is neither. Raises InputError."""
    if path is None:
        return None if said is None else supervised.lengths(supervised.drawn_counts(said), seq_length)
    found = supervised.counted(path, tokenizer, per_image)
    lengths = supervised.lengths([one.tokens for one in found.samples], seq_length, found)
    if lengths.dropped >= lengths.samples and not lengths.how:
        raise InputError("train.seq_length", seq_length, "cuts off every answer of the data")
    return lengths


def check_ids(architecture: Architecture, training: Training, merged: Flat) -> None:
    """Raises InputError for samples with a token id that the model has not, with which every rank would end once the job has started."""
    if training.lengths is None or architecture.vision is not None or (path := _samples_here(merged)) is None:
        return
    tokenizer = data_settings(merged, RunSettings())["tokenizer"]
    largest = max(one.largest_id for one in supervised.counted(path, tokenizer).samples)
    known = architecture.vocab_size if architecture.traced is None else architecture.traced.token_ids
    if largest >= known:
        by = f"tokenizer={tokenizer}" if tokenizer else "the byte tokenizer"
        raise InputError("model.vocab_size", known, f"is too small: by {by} data={path} has token id {largest}")


def tokens_of_an_image(vision: Vision | None, said: int | None) -> int:
    """Tokens of an image: the tower's own number, else `said`, else as many as are assumed; 0 of a model that looks at none."""
    return 0 if vision is None else vision.image_tokens or said or IMAGE_TOKENS


def with_images(training: Training, architecture: Architecture, merged: Flat) -> Training:
    """The training with the images of a sample, of a model that looks at some: of chats as many as the file's fullest has, where it is not
    said. Raises InputError for images or frozen parts of another model, for images that leave no text, and for parts that there aren't."""
    vision = architecture.vision
    if vision is None:
        for name in ("images", "image_tokens", "freeze"):
            if value := getattr(training, name):
                raise InputError(
                    f"train.{name}",
                    ",".join(value) if name == "freeze" else shown(value),
                    f"is of a model that looks at images, and {architecture.name} looks at none",
                )
        if training.lengths is not None and (path := _samples_here(merged)) and supervised.most_images(path):
            raise InputError("data", shown(path), f"has samples with images, and {architecture.name} looks at none")
        return training
    tokens = tokens_of_an_image(vision, training.image_tokens)
    if training.image_tokens not in (None, tokens):
        why = f"is {tokens} for every image of {vision.model_type}, which are of {vision.image_size} pixels a side; leave it out"
        raise InputError("train.image_tokens", training.image_tokens, why)
    if training.task == "sft":
        training = _chats_with_images(training, merged, tokens)
    images = training.images or 1
    if images * (tokens + 1) >= training.seq_length:
        why = f"is too short for train.images={images} of {tokens} tokens, each behind one of text, and more text"
        raise InputError("train.seq_length", training.seq_length, why)
    for part in training.freeze:
        if part not in SEEING:
            raise InputError("train.freeze", part, "is no part of a model that looks at images", SEEING)
    if training.freeze and training.lora is not None:
        raise InputError("train.freeze", ",".join(training.freeze), "is said by lora.rank= already: all but the adapters is frozen")
    if set(training.freeze) == set(SEEING):
        raise InputError("train.freeze", ",".join(training.freeze), "leaves nothing to train")
    return msgspec.structs.replace(training, images=images, image_tokens=tokens)


def _chats_with_images(training: Training, merged: Flat, tokens: int) -> Training:
    """The training on chats in which an image takes so many tokens: not packed unless that is said, which engines refuse then. Raises
    InputError."""
    packing, images, lengths = bool(value_of(merged, "data.packing", None)), training.images, training.lengths
    if path := _samples_here(merged):
        images = images or supervised.most_images(path)
        lengths = _lengths(path, data_settings(merged, RunSettings())["tokenizer"], None, training.seq_length, tokens)
    return msgspec.structs.replace(training, packing=packing, images=images, lengths=lengths)


def _samples_here(merged: Flat) -> str | None:
    """The file of supervised samples; None: there is none, or it is the cluster's. Raises InputError."""
    path = supervised.check_data(data_settings(merged, RunSettings()))
    return None if path is None or is_elsewhere(path) else path


BALANCE: Final = "data.balance"
IMAGE_TOKENS: Final = 256
"""Tokens of an image where nobody says how large it is: 448 x 448 pixels for Qwen2.5-VL, 512 x 512 for Qwen3-VL."""


def _lora_of(merged: Flat) -> Lora | None:
    """Adapters where a rank is given. Raises InputError for what is said of adapters without one."""
    fields = fields_of(merged, Lora)
    if fields.get("rank") is None:
        for name in ("targets", "alpha", "dropout", "bits", "bridge"):
            if fields.get(name) is not None:
                raise InputError(f"lora.{name}", shown(merged[f"lora.{name}"].text), "is of adapters: give lora.rank= beside it")
        return None
    return Lora(**{name: value for name, value in fields.items() if value is not None})


def padded_for_every_layout(architecture: Architecture, cluster: Cluster) -> Architecture:
    """The architecture with one size of the padded vocabulary under every tensor-parallel size that a search on this cluster compares: they
    divide the GPUs and the attention heads. Nothing changes where those are powers of two and the vocabulary is padded to a multiple of
    128."""
    unit = lcm(architecture.make_vocab_size_divisible_by, gcd(cluster.num_gpus, architecture.num_attention_heads))
    return msgspec.structs.replace(architecture, make_vocab_size_divisible_by=unit)


def check_positions(architecture: Architecture, training: Training) -> None:
    """Raises InputError for sequences longer than the stated range of rotary positions: beyond it the model is another one. (Learned ones:
    model/families/check.py.)"""
    longest = architecture.max_position_embeddings
    if architecture.position_embedding == "rope" and training.seq_length > longest:
        raise InputError(
            "train.seq_length", training.seq_length, f"is beyond model.max_position_embeddings={longest}; raise that if it is meant"
        )


def check_precision(training: Training, cluster: Cluster, said: str | None = None) -> None:
    """Raises InputError for a precision that the GPU has no tensor cores for, by the name that the user `said`: mxfp8 is one of FP8's
    scalings."""
    fast = [name for name in ("bf16", "fp16", "fp8", "nvfp4", "fp32") if name in cluster.gpu.peak_flops]
    if training.precision not in fast:
        raise InputError("train.precision", said or training.precision, f"{cluster.gpu.name} has no fast path for it", fast)


def with_fp8_recipe(training: Training, cluster: Cluster) -> Training:
    """The training with FP8's scaling, where it is left open: what NVIDIA's recipes take, mxfp8 on Blackwell and tensorwise before it."""
    if training.precision != "fp8":
        if training.fp8_recipe is not None:
            raise InputError("train.fp8_recipe", training.fp8_recipe, f"is for train.precision=fp8, not {training.precision}")
        return training
    if training.fp8_recipe is not None:
        return training
    return msgspec.structs.replace(training, fp8_recipe="mxfp8" if cluster.gpu.has_mxfp8 else "tensorwise")
