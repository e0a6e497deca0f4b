"""What a model is fed: arguments by the names in its forward's signature, and batches of them that depend on the seed alone."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from transformers.models.auto import modeling_auto

from orchestrator.errors import InputError
from orchestrator.model.traced import LANGUAGE_MODELS, Feed

MASKED_EVERY: Final = 7
"""A masked language model predicts one token in so many, which is 14%, as BERT's 15% (arXiv 1810.04805)."""
IMAGE: Final = 224
"""Pixels of an image's side where the configuration says none."""
PATCHES: Final = 32
"""Patches of an image's side for models that take any (Qwen-VL)."""
SAMPLES_OF_SOUND: Final = 16_000
"""Numbers of an input of sound: a second of it at 16 kHz."""
SPOKEN: Final = 12
"""Letters in it, of which 0 is none."""
TOKENS: Final = "input_ids"
"""The argument that takes token ids."""
BOXES: Final = ("ForObjectDetection", "ForSegmentation")
"""How classes end whose labels are lists of boxes: they are recorded without a loss."""


def takes_tokens(model: torch.nn.Module) -> bool:
    """Whether its input is as long as the user says."""
    return "input_ids" in inspect.signature(model.forward).parameters


def feeds_of(model: Any, config: Any, seq_length: int | None, decoder_seq_length: int | None) -> tuple[Feed, ...]:
    """Arguments of the forward for one sample; `seq_length` None: of a model without tokens. Raises InputError where it needs one that we
    don't know."""
    names = inspect.signature(model.forward).parameters
    text = config.get_text_config()
    vision = getattr(config, "vision_config", None) or config
    vocab = int(getattr(text, "vocab_size", 0) or getattr(config, "vocab_size", 0) or 2)
    kind = type(model).__name__
    if seq_length is None:
        if "input_ids" in names:
            raise InputError("train.seq_length", None, f"is missing: {kind} takes tokens")
        seq_length = 0
    found: list[Feed] = []
    image_tokens: tuple[int, int] | None = None  # (id, how many)
    if "pixel_values" in names and "image_grid_thw" in names:
        merged = PATCHES // int(getattr(vision, "spatial_merge_size", 2))
        width = int(getattr(vision, "in_channels", getattr(vision, "in_chans", 3))) * vision.temporal_patch_size * vision.patch_size**2
        found.append(Feed(name="pixel_values", shape=(PATCHES * PATCHES, width), joined=True))
        found.append(Feed(name="image_grid_thw", shape=(1, 3), dtype="int64", values=(1, PATCHES, PATCHES), joined=True))
        image_tokens = (int(config.image_token_id), merged * merged)
        if "mm_token_type_ids" in names:
            marks = (1,) * image_tokens[1] + (0,) * (seq_length - image_tokens[1])
            found.append(Feed(name="mm_token_type_ids", shape=(seq_length,), dtype="int64", values=marks))
    elif "pixel_values" in names:
        size = getattr(vision, "image_size", None) or IMAGE
        height, width = (size, size) if isinstance(size, int) else tuple(size)
        found.append(Feed(name="pixel_values", shape=(int(getattr(vision, "num_channels", 3)), height, width)))
        token = getattr(config, "image_token_id", getattr(config, "image_token_index", None))
        if token is not None and "input_ids" in names:
            image_tokens = (int(token), _image_tokens(config, vision, height, width))
    if "input_features" in names and hasattr(config, "num_mel_bins"):
        found.append(Feed(name="input_features", shape=(config.num_mel_bins, 2 * config.max_source_positions)))
    if "input_values" in names:
        found.append(Feed(name="input_values", shape=(SAMPLES_OF_SOUND,)))
    tokens: Feed | None = None
    if "input_ids" in names:
        tokens = Feed(name="input_ids", shape=(seq_length,), dtype="int64", high=vocab)
        if image_tokens is not None:
            token, count = image_tokens
            if count >= seq_length:
                raise InputError("train.seq_length", seq_length, f"is too short: an image of {kind} takes {count} of its tokens")
            others = tuple((7 * place) % max(1, min(vocab, token)) for place in range(seq_length - count))
            tokens = Feed(name="input_ids", shape=(seq_length,), dtype="int64", values=(token,) * count + others)
        found.append(tokens)
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in names:
        if decoder_seq_length is None:
            raise InputError("train.decoder_seq_length", None, f"is missing: {kind} has a decoder")
        found.append(Feed(name="decoder_input_ids", shape=(decoder_seq_length,), dtype="int64", high=vocab))
    if "labels" in names and not kind.endswith(BOXES):
        found.append(_labels(kind, config, found, tokens, vocab))
    elif "return_loss" in names:
        pass  # its loss is over the batch; `fixed_arguments`
    _check_known(names, found, kind)
    return tuple(found)


def _labels(kind: str, config: Any, found: Sequence[Feed], tokens: Feed | None, vocab: int) -> Feed:
    if kind.endswith("ForCTC"):
        return Feed(name="labels", shape=(SPOKEN,), dtype="int64", low=1, high=vocab)
    like = next((feed for feed in found if feed.name == "decoder_input_ids"), tokens)
    if like is None or "Classification" in kind or "ForSequence" in kind:
        if "TokenClassification" in kind and like is not None:
            return Feed(name="labels", shape=like.shape, dtype="int64", high=config.num_labels)
        return Feed(name="labels", shape=(), dtype="int64", high=max(1, int(getattr(config, "num_labels", 2))))
    if "MaskedLM" in kind:
        return Feed(name="labels", shape=like.shape, dtype="int64", copies=like.name, every=MASKED_EVERY)
    if not kind.endswith(LANGUAGE_MODELS) or _sees_ahead(kind, config):
        return Feed(name="labels", shape=like.shape, dtype="int64", high=vocab)
    return Feed(name="labels", shape=like.shape, dtype="int64", copies=like.name)


def _sees_ahead(kind: str, config: Any) -> bool:
    """Whether tokens attend to those after them though the class is one of next tokens: an encoder that nobody made a decoder, and XLNet,
    which also takes labels as they are (modeling_xlnet.py)."""
    both = type(config) in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_encoder_decoder", False)
    return kind == "XLNetLMHeadModel" or (both and not getattr(config, "is_decoder", False))


def _check_known(names: Any, found: Sequence[Feed], kind: str) -> None:
    fed = {feed.name for feed in found}
    needed = [
        name
        for name, about in names.items()
        if about.default is about.empty and about.kind is about.POSITIONAL_OR_KEYWORD and name not in fed and name != "self"
    ]
    if needed:
        raise InputError("model.hf_config", kind, f"its forward needs {', '.join(needed)}, which we can't make up; use model.code=")


def _image_tokens(config: Any, vision: Any, height: int, width: int) -> int:
    """Tokens of one image among the text's (LLaVA: its patches, without the class token)."""
    given = getattr(config, "image_seq_length", None) or getattr(config, "mm_tokens_per_image", None)
    patch = getattr(vision, "patch_size", 16)
    return int(given) if given else (height // patch) * (width // patch)


def fixed_arguments(model: torch.nn.Module) -> dict[str, Any]:
    """Arguments of the model's forward that are no tensors, by name."""
    parameters = inspect.signature(model.forward).parameters
    found: dict[str, Any] = {}
    if "return_loss" in parameters and "labels" not in parameters:
        found["return_loss"] = True
    if "use_cache" in parameters:
        found["use_cache"] = False
    return found


READ: Final = ("mm_token_type_ids",)
"""Fixed arguments that transformers' own code reads in Python: where an image's tokens are."""
IGNORED: Final = -100
"""A label that transformers' losses leave out."""
TORCH: Final = {"int64": torch.int64, "bool": torch.bool}


def on_meta(feeds: Sequence[Feed], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """A batch of one without numbers; what is fixed, and looped over in Python (grids of patches), is real."""
    found = {}
    for feed in feeds:
        shape = feed.shape if feed.joined else (1, *feed.shape)
        if feed.values and (feed.joined or feed.name in READ):
            found[feed.name] = torch.tensor(feed.values).reshape(shape)
        else:
            found[feed.name] = torch.empty(shape, dtype=TORCH.get(feed.dtype, dtype), device="meta")
    return found


def sample(feeds: Sequence[Feed], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Numbers of one drawn sample, by argument."""
    found: dict[str, np.ndarray] = {}
    for feed in feeds:
        if feed.values:
            found[feed.name] = np.array(feed.values, dtype=np.int64).reshape(feed.shape)
        elif feed.copies:
            source = found[feed.copies].copy()
            if feed.every:
                source[np.arange(source.shape[-1]) % feed.every != 1 % feed.every] = IGNORED
            if feed.ahead:
                source = np.concatenate([source[1:], [IGNORED]])
            found[feed.name] = source
        elif feed.dtype == "float":
            found[feed.name] = rng.standard_normal(feed.shape, dtype=np.float32)
        else:
            found[feed.name] = rng.integers(feed.low, feed.high, size=feed.shape, dtype=np.int64)
    return found


def stacked(feeds: Sequence[Feed], samples: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Samples as a batch: [samples, ...], or one after the other where the feed is `joined`."""
    joined = {feed.name for feed in feeds if feed.joined}
    return {name: (np.concatenate if name in joined else np.stack)([each[name] for each in samples]) for name in samples[0]}
