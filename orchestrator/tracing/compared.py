"""A partition, compared with the whole model by numbers: the same configuration at small width, divided over two, must give the whole
model's loss and gradients. What does not stays whole."""

from __future__ import annotations

import copy
import json
import math
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import gcd
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from orchestrator.errors import InputError
from orchestrator.model.traced import Divided, Feed
from orchestrator.tracing import build, feeds
from orchestrator.tracing.partition import Pair, Partition, Roles, shown

TP: Final = 2
LARGEST: Final = 60_000_000
"""Parameters of a model that is compared as it is, where a smaller one can't be built."""
TOKENS: Final = 32
LAYERS: Final = 4
VOCABULARY: Final = 512
TOLERANCE: Final = 1e-4
"""Relative difference of the loss up to which two models compute the same."""
GRADIENT_TOLERANCE: Final = 1e-3
"""Difference of a gradient up to which two models compute the same, as a share of its parameter's largest gradient."""
SMALL: Final = 1e-3
"""Share of the model's largest gradient below which a gradient is rounding (a bias of keys has none at all)."""
DEPTHS: Final = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers"),
    "depth",
)
HEADS: Final = (
    *("num_attention_heads", "num_key_value_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"),
    "decoder_attention_heads",
)
WIDTHS: Final = ("hidden_size", "d_model", "n_embd", "dim", "word_embed_proj_dim", "embedding_size", "embed_dim")
"""Fields of widths that are divided as the heads are: a head's width stays."""
INNER: Final = (
    *("intermediate_size", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim", "n_inner", "hidden_dim", "moe_intermediate_size"),
    "shared_expert_intermediate_size",
)
"""Fields of feed-forward networks' widths, which are as narrow as halving makes them."""
NARROW: Final = 64
VOCABULARIES: Final = ("vocab_size",)
ATTRIBUTES: Final = (
    *("n_heads", "inner_dim", "num_heads", "num_kv", "num_attention_heads", "num_attn_heads", "all_head_size", "embed_dim", "hidden_size"),
    *("num_key_value_heads", "num_kv_heads", "kv_n_heads", "d_model", "num_attention_heads_per_partition"),
    *("num_multi_query_groups_per_partition", "hidden_size_per_partition"),
)
"""Attributes of modules that hold divided weights, which AutoTP divides with them (deepspeed/module_inject/auto_tp.py,
update_mp_params)."""
KEY_VALUE_HEADS: Final = (
    *("num_key_value_heads", "num_kv_heads", "multi_query_group_num", "n_head_kv", "kv_n_heads", "num_attention_heads", "n_heads"),
    "attention_heads",
)
"""Fields for the number of key and value heads, by which AutoTP cuts every width, in its order (deepspeed/module_inject/tp_shard.py)."""


def checked(source: build.Source, found: Partition, seq_length: int | None, decoder_seq_length: int | None) -> Partition:
    """What of it two ranks compute as one does."""
    if not found.pairs:
        return found
    found, why = _even(source, found), ""
    for text in _smaller(source.config) if source.config else ("",):
        try:
            return _compared(source, text, found, seq_length, decoder_seq_length)
        except _CantCompareError as error:
            why = why or str(error)
    return Partition((), (*found.undivided, f"all linears: {why}"))


class _CantCompareError(Exception):
    """Raised for a model that can't be built or run as small as it should."""


def unfit(source: build.Source, model: nn.Module) -> str:
    """Why AutoTP takes no model of this class, however its linears are divided; "" where it does."""
    asked = getattr(model, "get_input_embeddings", None)
    if asked is not None:
        try:
            asked()
        except NotImplementedError:
            name = type(model).__name__
            return f"AutoTP asks for the input embedding (deepspeed/module_inject/auto_tp.py:821), which {name} does not name"
    heads = _key_value_heads(build.config_of(source.config)) if source.config else None
    if heads is not None and not isinstance(heads, int):
        return "AutoTP needs one number of heads (deepspeed/module_inject/tp_shard.py), this model has one a stage"
    if heads == 1:
        return "AutoTP cuts every width by heads of keys and values (deepspeed/module_inject/tp_shard.py), of which there is one"
    return ""


def _key_value_heads(config: Any) -> Any:
    text = getattr(config, "text_config", None) or config
    return next((getattr(text, name) for name in KEY_VALUE_HEADS if getattr(text, name, None) is not None), None)


def _even(source: build.Source, found: Partition) -> Partition:
    """The partition whose tp must divide the key and value heads, too."""
    heads = _key_value_heads(build.config_of(source.config)) if source.config else None
    heads = heads if isinstance(heads, int) and heads > 1 else 0
    pairs = tuple(pair._replace(units=gcd(pair.units, heads)) for pair in found.pairs)
    return Partition(pairs, found.undivided)


# ------------------------------------------------------------------------------------------------ smaller models


def _smaller(text: str) -> Iterator[str]:
    """Configurations of the same model: narrow and shallow, shallow, and as it is."""
    fields = json.loads(text)
    whole = build.config_of(text).to_dict() | {"architectures": fields.get("architectures")}  # with what it leaves to defaults
    for each, narrow in ((whole, True), (fields, True), (whole, False)):
        yield json.dumps(_shrunk(each, narrow), default=str)
    yield text


def _shrunk(fields: Mapping[str, Any], narrow: bool) -> dict[str, Any]:
    heads = [fields[name] for name in HEADS if isinstance(fields.get(name), int) and fields[name] > 0]
    divisor = max(1, gcd(*heads) // TP) if heads and narrow else 1
    widths = [fields[name] for name in (*HEADS, *WIDTHS) if isinstance(fields.get(name), int)]
    while divisor > 1 and any(width % divisor for width in widths):
        divisor -= 1
    found: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, dict):
            found[name] = _shrunk(value, narrow)
        elif name in DEPTHS and isinstance(value, int):
            found[name] = min(value, LAYERS)
        elif name == "layer_types" and isinstance(value, list):
            found[name] = value[:LAYERS]
        elif name in VOCABULARIES and isinstance(value, int) and not _special(fields, VOCABULARY):
            found[name] = min(value, VOCABULARY)
        elif name in (*HEADS, *WIDTHS) and isinstance(value, int):
            found[name] = value // divisor
        elif name in INNER and isinstance(value, int) and narrow:
            found[name] = _halved(value)
        else:
            found[name] = value
    return found


def _halved(width: int) -> int:
    """A width that is halved as often as it stays even enough and is not narrower than `NARROW`.

    >>> _halved(18944), _halved(11008)
    (74, 86)
    """
    while width >= 2 * NARROW and width % 4 == 0:
        width //= 2
    return width


def _special(fields: Mapping[str, Any], vocabulary: int) -> bool:
    """Whether a token that the configuration names lies beyond."""
    tokens = (value for name, value in fields.items() if name.endswith(("token_id", "token_index")))
    return any(isinstance(value, int) and value >= vocabulary for value in tokens)


# ------------------------------------------------------------------------------------------------ the comparison


def _compared(source: build.Source, text: str, found: Partition, seq_length: int | None, decoder_seq_length: int | None) -> Partition:
    small = source._replace(config=text)
    try:
        model, batch = _built(small, seq_length, decoder_seq_length)
        whole = _whole(model, batch)
    except InputError as error:
        raise _CantCompareError(f"it can't be built small enough to compare: {error.why}") from None
    except Exception as error:  # the model's own code raises what it likes
        raise _CantCompareError(f"it can't be run on the CPU to compare: {type(error).__name__}: {str(error)[:200]}") from None
    pairs = list(found.pairs)
    kept = found
    if _difference(model, batch, pairs, whole) is None:
        return kept
    for pair in pairs:
        wrong = _difference(model, batch, [pair], whole)
        if wrong is not None:
            kept = kept.without(pair, wrong)
    wrong = _difference(model, batch, kept.pairs, whole) if kept.pairs else None
    return kept if wrong is None else Partition((), (*kept.undivided, f"all linears: {wrong}"))


def _built(source: build.Source, seq_length: int | None, decoder_seq_length: int | None) -> tuple[nn.Module, dict[str, Any]]:
    """The model on the CPU with weights that are all different, and a batch of two."""
    with torch.device("meta"):
        model, fed, _ = build.from_source(source, torch.float32, ("sdpa", "eager"))
        if source.config:
            fed = _feeds(model, build.config_of(source.config), seq_length, decoder_seq_length)
    size = sum(parameter.numel() for parameter in model.parameters())
    if size > LARGEST:
        raise _CantCompareError(f"its smallest form has {size:,} parameters, more than are compared on a CPU ({LARGEST:,})")
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, _, _ = build.from_source(source, torch.float32, ("sdpa", "eager"))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.normal_(0.0, 0.1 if parameter.dim() > 1 else 0.2)
                if name.endswith("weight") and parameter.dim() == 1:
                    parameter.add_(1.0)
    rng = np.random.default_rng(0)
    batch = feeds.stacked(fed, [feeds.sample(fed, rng) for _ in range(2)])
    given: dict[str, Any] = {name: torch.from_numpy(array) for name, array in batch.items()}
    return model.eval(), given | feeds.fixed_arguments(model)


def _feeds(model: nn.Module, config: Any, seq_length: int | None, decoder_seq_length: int | None) -> tuple[Feed, ...]:
    short, decoder = (min(length, TOKENS) if length else None for length in (seq_length, decoder_seq_length))
    try:
        return feeds.feeds_of(model, config, short, decoder)
    except InputError:  # an image's tokens alone are more
        return feeds.feeds_of(model, config, seq_length, decoder_seq_length)


def _loss(out: Any) -> torch.Tensor:
    if isinstance(out, torch.Tensor):
        return out.float().mean()
    loss = out.get("loss") if isinstance(out, dict) else getattr(out, "loss", None)
    if loss is None:
        loss = next(value for value in out.values() if isinstance(value, torch.Tensor)).float().square().mean()
    return loss.float().reshape(())


Whole = tuple[float, dict[str, torch.Tensor]]
"""Loss and gradients, by parameter's name, of a model on one process."""


def _whole(model: nn.Module, batch: Mapping[str, Any]) -> Whole:
    model.zero_grad()
    loss = _loss(model(**batch))
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    if not math.isfinite(float(loss)):
        raise _CantCompareError("its loss is not finite at small width")
    return float(loss), gradients


class _Meeting:
    """The place where ranks, which are threads, give what they have and get the sum."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(TP, timeout=60)
        self.given: list[torch.Tensor] = [torch.empty(0)] * TP

    def sum(self, rank: int, mine: torch.Tensor) -> torch.Tensor:
        self.given[rank] = mine
        self.barrier.wait()
        total = self.given[0] + self.given[1]
        self.barrier.wait()
        return total


class _Handed(torch.autograd.Function):
    """Gives its input back as AutoTP's all-reduce does: a tensor that the model must not change in place."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


class _Share(nn.Module):
    """A rank's part of a linear: of its output, or where `summed` is given, of its input, and that sums the ranks' outputs."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, summed: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> None:
        super().__init__()
        self.weight, self.summed = nn.Parameter(weight), summed
        self.bias = None if bias is None else nn.Parameter(bias)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        if self.summed is None:
            return F.linear(given, self.weight, self.bias)
        out: torch.Tensor = _Handed.apply(self.summed(F.linear(given, self.weight)))
        return out if self.bias is None else out + self.bias


def _difference(model: nn.Module, batch: Mapping[str, Any], pairs: Sequence[Pair], whole: Whole) -> str | None:
    """How two ranks under these pairs differ from one process; None: not at all."""
    divided = [each for pair in pairs for each in pair.divided]
    meeting = _Meeting()
    try:
        ranks = [_divided(model, divided, rank, meeting) for rank in range(TP)]
    except _CantCompareError as error:
        return str(error)
    losses: list[Any] = [None] * TP
    wrong: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                losses[rank] = _loss(ranks[rank](**batch))
        except BaseException as error:
            wrong.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(TP)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first = next((error for error in wrong if not isinstance(error, threading.BrokenBarrierError)), None)
    if first is not None:
        return f"divided over two it fails: {type(first).__name__}: {' '.join(str(first).split())[:160]}"
    if wrong or any(loss is None for loss in losses):
        return "divided over two its ranks do not meet"
    loss, gradients = whole
    if abs(float(losses[0]) - loss) > TOLERANCE * abs(loss):
        return f"divided over two its loss at small width is {float(losses[0]):.6g} in place of {loss:.6g}"
    try:
        losses[0].backward()
    except RuntimeError as error:
        return f"divided over two it fails: {' '.join(str(error).split())[:160]}"
    roles = Roles(divided)
    named = [dict(each.named_parameters()) for each in ranks]
    least = SMALL * max(float(each.abs().max()) for each in gradients.values())
    for name, expected in gradients.items():
        shares = [_gradient(each[name]) for each in named]
        if shares[0].shape == expected.shape:
            total = shares[0] + shares[1]
        else:
            linear = name.rpartition(".")[0]
            total = _joined(shares, roles.of_linear(linear), _parts(model, divided, linear))
        if (total - expected).abs().max() > GRADIENT_TOLERANCE * max(float(expected.abs().max()), least):
            return f"divided over two the gradient of {shown(name)} is another"
    return None


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _parts(model: nn.Module, divided: Sequence[Divided], name: str) -> tuple[int, ...]:
    """Widths of the parts of this linear's output at the small model's width."""
    spec = next(each for each in divided if each.by != "summed" and re.fullmatch(each.pattern, name))
    width = model.get_submodule(name).weight.shape[0]
    total = sum(spec.parts)
    return tuple(part * width // total for part in spec.parts) if spec.parts else (width,)


def _joined(shares: Sequence[torch.Tensor], by: str, parts: Sequence[int]) -> torch.Tensor:
    if by == "row":
        return torch.cat(list(shares), dim=1)
    split = [share.split([part // TP for part in parts], dim=0) for share in shares]
    return torch.cat([torch.cat([each[index] for each in split], dim=0) for index in range(len(parts))], dim=0)


def _divided(model: nn.Module, divided: Sequence[Divided], rank: int, meeting: _Meeting) -> nn.Module:
    """One rank's copy of the model, with the linears divided."""
    mine, roles = copy.deepcopy(model), Roles(divided)
    cut: set[str] = set()
    for name, module in list(mine.named_modules()):
        by = roles.of_linear(name)
        if by is None:
            continue
        if type(module) is not nn.Linear:
            raise _CantCompareError("it is no plain linear at small width")
        bias = None if module.bias is None else module.bias.detach()
        owner, _, own = name.rpartition(".")
        if by == "row":
            if module.in_features % TP:
                raise _CantCompareError(f"{TP} does not divide its input at small width")
            new = _Share(module.weight.detach().chunk(TP, dim=1)[rank].clone(), bias, partial(meeting.sum, rank))
        else:
            parts = _parts(model, divided, name)
            if any(part % TP for part in parts):
                raise _CantCompareError(f"{TP} does not divide its output at small width")
            weight = torch.cat([part.chunk(TP, dim=0)[rank] for part in module.weight.detach().split(list(parts), dim=0)], dim=0)
            bias = None if bias is None else torch.cat([part.chunk(TP)[rank] for part in bias.split(list(parts))])
            new = _Share(weight.clone(), bias)
        setattr(mine.get_submodule(owner), own, new)
        cut.add(name)
    if not cut:
        raise _CantCompareError("no linear at small width has its name")
    for name, module in mine.named_modules():
        prefix = f"{name}." if name else ""
        if not name or name in cut or not any(each.startswith(prefix) for each in cut):
            continue
        own_parameters = [p for each in (module, *module.children()) for p in each.parameters(recurse=False)]
        if any(p.dim() >= 3 for p in own_parameters):
            continue
        for attribute in ATTRIBUTES:
            value = getattr(module, attribute, None)
            if isinstance(value, int) and not isinstance(value, bool):
                setattr(module, attribute, value // TP)
    return mine
