"""Attention as flash kernels see it: shapes are recorded, scores never exist, queries, keys, values and output are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode


class Call(NamedTuple):
    """One call for a batch of one: heads, lengths, widths of a head of keys and of values."""

    heads: int
    kv_heads: int
    query_len: int
    key_len: int
    key_dim: int
    value_dim: int
    causal: bool
    window: int
    biased: bool
    dropout: float


Note = Callable[[Call, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, bool], None]
"""Called in each forward with queries, keys, values, output, and whether something else is given head by head (a bias, sinks)."""


class Opaque(torch.autograd.Function):
    """What flash attention keeps, without its statistics, and gradients of the right shapes. q [b, h, s, d], k and v [b, g, t, d]."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        b, h, s, _ = q.shape
        out = q.new_empty(b, s, h, v.shape[-1])
        ctx.save_for_backward(q, k, v, out)
        ctx.bias = None if bias is None or not bias.requires_grad else bias.shape
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, _ = ctx.saved_tensors
        bias = None if ctx.bias is None else grad.new_empty(ctx.bias)
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), bias


def attend(
    note: Note,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: Any,
    causal: bool,
    window: int,
    dropout: float,
    more: Iterable[Any] = (),
) -> Any:
    """The output [b, s, h, d]. `more`: other arguments of the call."""
    learned = bias if isinstance(bias, torch.Tensor) and bias.is_floating_point() and bias.requires_grad else None
    h, s, t = q.shape[1], q.shape[2], k.shape[2]
    batches = q.shape[0]  # windows of Swin are a batch of their own
    call = Call(batches * h, batches * k.shape[1], s, t, q.shape[3], v.shape[3], causal and s > 1, window, learned is not None, dropout)
    out = Opaque.apply(q, k, v, learned)
    masked = isinstance(bias, torch.Tensor) and bias.dim() == 4 and bias.shape[1] == h > 1
    note(call, q, k, v, out, masked or any(isinstance(each, torch.nn.Parameter) for each in more))
    return out


def transformers_attention(note: Note) -> Callable[..., Any]:
    """A function that transformers' AttentionInterface can call, which records attention as `note` says."""

    def forward(
        module: Any, query: Any, key: Any, value: Any, attention_mask: Any = None, scaling: Any = None, dropout: float = 0.0, **more: Any
    ) -> tuple[Any, None]:
        causal = more.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        window = more.get("sliding_window") or getattr(module, "sliding_window", None) or 0
        window = int(window) if causal else 0
        return attend(note, query, key, value, attention_mask, bool(causal), window, dropout, more.values()), None

    return forward


class FusedAttention(TorchFunctionMode):
    """torch's own scaled_dot_product_attention, in models that call it themselves; and its loss of a connectionist temporal classification,
    which has no shapes without numbers: it keeps the log probabilities, which are kept anyway."""

    def __init__(self, note: Note) -> None:
        super().__init__()
        self.note = note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.ctc_loss and args[0].device.type == "meta":
            return args[0].mean()
        if func is not torch.nn.functional.scaled_dot_product_attention or args[0].device.type != "meta":
            return func(*args, **kwargs)
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        given = dict(zip(names, args, strict=False)) | kwargs
        q, k, v = given["query"], given["key"], given["value"]
        if q.dim() != 4:
            return func(*args, **kwargs)
        out = attend(self.note, q, k, v, given.get("attn_mask"), bool(given.get("is_causal", False)), 0, float(given.get("dropout_p", 0.0)))
        return out.transpose(1, 2)
