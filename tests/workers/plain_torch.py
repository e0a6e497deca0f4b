"""The families in plain torch, from megatron-core's named weights: what the workers must compute, with no engine in it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from orchestrator.model.parts.attention import GroupedQueryAttention
from orchestrator.model.parts.latent_attention import LatentAttention
from orchestrator.model.schedule import learning_rate
from orchestrator.model.spec import Architecture
from orchestrator.plan import Plan

Weights = dict[str, torch.Tensor]
MTP_LOSS_SCALING = 0.1
"""megatron-core's default (transformer_config.py, mtp_loss_scaling_factor)."""


def norm(model: Architecture, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if model.normalization == "RMSNorm":
        return F.rms_norm(x, (model.hidden_size,), weight, model.norm_epsilon)
    return F.layer_norm(x, (model.hidden_size,), weight, bias, model.norm_epsilon)


def rotate(x: torch.Tensor, base: int) -> torch.Tensor:
    """Rotary embedding of [b, s, heads, width], halves apart (Su et al., arXiv 2104.09864)."""
    half = x.shape[-1] // 2
    angles = torch.outer(torch.arange(x.shape[1]).float(), base ** (-torch.arange(half).float() / half))
    cos, sin = angles.cos()[None, :, None, :], angles.sin()[None, :, None, :]
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, window: int | None = None, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """softmax(q k^T / sqrt(width)) v of [b, s, heads, width], heads joined. A token sees `window` tokens, itself included; `sinks` [heads]
    are logits that take their share of the softmax (GPT-OSS)."""
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    if window is not None:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).tril(-window), -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None, None].expand(*scores.shape[:-1], 1)], dim=-1)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1)[..., : k.shape[1]], v).flatten(2)


def self_attention(model: Architecture, x: torch.Tensor, w: Weights, layer: int, causal: bool) -> torch.Tensor:
    """The rows of linear_qkv are grouped: the queries of a group, its key, its value."""
    size, length, _ = x.shape
    groups, width = model.query_groups, model.head_dim
    per_group = model.num_attention_heads // groups
    qkv = linear(x, w, "self_attention.linear_qkv", layer).view(size, length, groups, per_group + 2, width)
    q = qkv[..., :per_group, :].reshape(size, length, groups * per_group, width)
    k, v = qkv[..., per_group, :], qkv[..., per_group + 1, :]
    if "self_attention.q_layernorm.weight" in w:
        q = F.rms_norm(q, (width,), w["self_attention.q_layernorm.weight"][layer], model.norm_epsilon)
        k = F.rms_norm(k, (width,), w["self_attention.k_layernorm.weight"][layer], model.norm_epsilon)
    if model.position_embedding == "rope":
        q, k = rotate(q, model.rotary_base), rotate(k, model.rotary_base)
    k, v = k.repeat_interleave(per_group, dim=2), v.repeat_interleave(per_group, dim=2)
    here = list(model.each_layer())[layer].mixer
    assert isinstance(here, GroupedQueryAttention)
    sinks = _row(w, "self_attention.core_attention.softmax_offset", layer)
    assert (sinks is not None) == here.sinks
    return linear(attend(q, k, v, causal=causal, window=here.window, sinks=sinks), w, "self_attention.linear_proj", layer)


def latent_attention(model: Architecture, x: torch.Tensor, w: Weights, layer: int, latent: LatentAttention) -> torch.Tensor:
    """DeepSeek-V2 (arXiv 2405.04434), section 2.1: of queries and keys the last `qk_rope_head_dim` are rotated, adjacent pairs of them, and
    these keys are the same for all heads."""
    heads, plain, rotated = model.num_attention_heads, latent.qk_head_dim, latent.qk_rope_head_dim
    name = "self_attention."
    if latent.q_lora_rank is None:
        q = linear(x, w, name + "linear_q_proj", layer)
    else:
        down = linear(x, w, name + "linear_q_down_proj", layer)
        down = F.rms_norm(down, (latent.q_lora_rank,), w[name + "q_layernorm.weight"][layer], model.norm_epsilon)
        q = linear(down, w, name + "linear_q_up_proj", layer)
    q_plain, q_rotated = q.view(*x.shape[:2], heads, plain + rotated).split([plain, rotated], dim=-1)
    down, k_rotated = linear(x, w, name + "linear_kv_down_proj", layer).split([latent.kv_lora_rank, rotated], dim=-1)
    down = F.rms_norm(down, (latent.kv_lora_rank,), w[name + "kv_layernorm.weight"][layer], model.norm_epsilon)
    kv = linear(down, w, name + "linear_kv_up_proj", layer).view(*x.shape[:2], heads, plain + latent.v_head_dim)
    k_plain, v = kv.split([plain, latent.v_head_dim], dim=-1)
    q_rotated, k_rotated = (
        rotate(torch.cat([part[..., 0::2], part[..., 1::2]], dim=-1), model.rotary_base) for part in (q_rotated, k_rotated[:, :, None, :])
    )
    q, k = torch.cat([q_plain, q_rotated], dim=-1), torch.cat([k_plain, k_rotated.expand_as(q_rotated)], dim=-1)
    return linear(attend(q, k, v, causal=True), w, name + "linear_proj", layer)


def cross_attention(model: Architecture, x: torch.Tensor, context: torch.Tensor, w: Weights, layer: int) -> torch.Tensor:
    """The rows of linear_kv: the key of a head, its value."""
    heads, width = model.num_attention_heads, model.head_dim
    q = linear(x, w, "cross_attention.linear_q", layer).view(*x.shape[:2], heads, width)
    kv = linear(context, w, "cross_attention.linear_kv", layer).view(*context.shape[:2], heads, 2, width)
    return linear(attend(q, kv[..., 0, :], kv[..., 1, :], causal=False), w, "cross_attention.linear_proj", layer)


def mlp(model: Architecture, x: torch.Tensor, w: Weights, layer: int) -> torch.Tensor:
    x = linear(x, w, "mlp.linear_fc1", layer)
    if model.activation == "swiglu":
        gate, up = x.chunk(2, dim=-1)
        x = F.silu(gate) * up
    elif model.activation == "clamped_swiglu":
        gate, up = x.chunk(2, dim=-1)
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        x = gate * torch.sigmoid(1.702 * gate) * (up + 1)
    else:
        x = F.gelu(x)
    return linear(x, w, "mlp.linear_fc2", layer)


def linear(x: torch.Tensor, w: Weights, name: str, layer: int) -> torch.Tensor:
    return F.linear(x, w[name + ".weight"][layer], _row(w, name + ".bias", layer))


def _row(w: Weights, name: str, layer: int) -> torch.Tensor | None:
    return w[name][layer] if name in w else None


def one_layer(
    model: Architecture, x: torch.Tensor, w: Weights, layer: int, *, causal: bool, context: torch.Tensor | None = None
) -> torch.Tensor:
    latent = model.common_layer.mixer
    first, second, cross = "self_attention.linear_qkv.layer_norm_", "mlp.linear_fc1.layer_norm_", "pre_cross_attn_layernorm."
    if isinstance(latent, LatentAttention):
        first, second = "input_layernorm.", "pre_mlp_layernorm."
    normed = norm(model, x, w[first + "weight"][layer], _row(w, first + "bias", layer))
    if isinstance(latent, LatentAttention):
        x = x + latent_attention(model, normed, w, layer, latent)
    else:
        x = x + self_attention(model, normed, w, layer, causal)
    if context is not None:
        normed = norm(model, x, w[cross + "weight"][layer], _row(w, cross + "bias", layer))
        x = x + cross_attention(model, normed, context, w, layer)
    return x + mlp(model, norm(model, x, w[second + "weight"][layer], _row(w, second + "bias", layer)), w, layer)


def layers(
    model: Architecture, x: torch.Tensor, weights: Weights, side: str, count: int, *, causal: bool, context: torch.Tensor | None = None
) -> torch.Tensor:
    """Pre-norm layers of one side ("encoder", "decoder") and its final norm."""
    w = {name.removeprefix(f"{side}.layers."): tensor for name, tensor in weights.items() if name.startswith(f"{side}.")}
    for layer in range(count):
        x = one_layer(model, x, w, layer, causal=causal, context=context)
    return norm(model, x, w[f"{side}.final_layernorm.weight"], w.get(f"{side}.final_layernorm.bias"))


def embed(model: Architecture, w: Weights, tokens: torch.Tensor) -> torch.Tensor:
    x = w["embedding.word_embeddings.weight"][tokens]
    if model.position_embedding == "learned_absolute":
        x = x + w["embedding.position_embeddings.weight"][: tokens.shape[1]]
    return x + w["embedding.tokentype_embeddings.weight"][0] if model.num_token_types else x


def loss(model: Architecture, w: Weights, batch: dict[str, np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean cross-entropy of what is predicted over the real vocabulary; and the same with the losses of multi-token prediction."""
    tensors = {name: torch.from_numpy(array) for name, array in batch.items()}
    x = embed(model, w, tensors["tokens"])
    if model.family == "t5":
        context = layers(model, x, w, "encoder", model.num_layers, causal=False)
        x = embed(model, w, tensors["decoder_tokens"])
        x = layers(model, x, w, "decoder", model.decoder_num_layers, causal=True, context=context)
    elif model.family == "bert":
        x = layers(model, x, w, "encoder", model.num_layers, causal=False)
        x = F.gelu(F.linear(x, w["lm_head.dense.weight"], w["lm_head.dense.bias"]))
        x = norm(model, x, w["lm_head.layer_norm.weight"], w["lm_head.layer_norm.bias"])
    else:
        x = layers(model, x, w, "decoder", model.num_layers, causal=True)
    output = w["embedding.word_embeddings.weight" if model.tie_embeddings else "output_layer.weight"][: model.vocab_size]
    bias = w.get("output_layer.bias", w.get("lm_head.output_layer.bias"))
    mask = tensors.get("loss_mask", torch.ones(tensors["labels"].shape))

    def mean(hidden: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        logits = F.linear(hidden, output, None if bias is None else bias[: model.vocab_size])
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return (losses * mask.flatten()).sum() / mask.sum()

    predicted = mean(x, tensors["labels"], mask)
    further = torch.zeros(())
    tokens, labels = tensors["tokens"], tensors["labels"]
    for index in range(model.mtp_num_layers):
        tokens, labels, mask = (_next(given) for given in (tokens, labels, mask))
        x = prediction_layer(model, x, embed(model, w, tokens), w, index)
        further = further + mean(x, labels, mask)
    return predicted, predicted + MTP_LOSS_SCALING * further / max(1, model.mtp_num_layers)


def _next(given: torch.Tensor) -> torch.Tensor:
    """What stands one place further in each sequence; zero behind the last."""
    return F.pad(given[:, 1:], (0, 1))


def prediction_layer(model: Architecture, hidden: torch.Tensor, coming: torch.Tensor, weights: Weights, index: int) -> torch.Tensor:
    """DeepSeek-V3 (arXiv 2412.19437), section 2.2: norms of the hidden state and of the coming token's vector, one linear of both, a
    layer, a norm. [b, s, h]"""
    of = f"mtp.layers.{index}."
    w = {name.removeprefix(of): tensor for name, tensor in weights.items() if name.startswith(of)}
    both = [norm(model, coming, w["enorm.weight"], None), norm(model, hidden, w["hnorm.weight"], None)]
    x = F.linear(torch.cat(both, dim=-1), w["eh_proj.weight"])
    inside = next(name for name in w if ".self_attention." in name).partition(".")[0]
    layer = {name.removeprefix(f"{inside}."): tensor[None] for name, tensor in w.items() if name.startswith(f"{inside}.")}
    return norm(model, one_layer(model, x, layer, 0, causal=True), w["final_layernorm.weight"], None)


def train(plan: Plan, arrays: dict[str, np.ndarray], batches: Any) -> dict[str, Any]:
    """As worker_cases.parity answers: losses, norms, first gradients. `batches`: of one rank that takes the whole batch."""
    model, training = plan.model, plan.training
    weights = {name: torch.tensor(array, requires_grad=True) for name, array in arrays.items()}
    decayed = [t for name, t in weights.items() if name.endswith("weight") and "norm" not in name]
    free = [t for name, t in weights.items() if not (name.endswith("weight") and "norm" not in name)]
    groups = [{"params": decayed, "weight_decay": training.weight_decay}, {"params": free, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=training.lr, betas=training.betas, eps=training.eps)
    found: dict[str, Any] = {"losses": [], "norms": []}
    for step in range(training.steps):
        optimizer.zero_grad()
        microbatches = batches.microbatches(step)
        whole = {name: np.concatenate([batch[name] for batch in microbatches]) for name in microbatches[0]}
        value, with_further = loss(model, weights, whole)
        with_further.backward()
        if step == 0:
            found["gradients"] = {name: t.grad.numpy().copy() for name, t in weights.items() if t.grad is not None}
        found["losses"].append(value.item())
        found["norms"].append(float(torch.nn.utils.clip_grad_norm_(weights.values(), training.clip or torch.inf)))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(training, step)
        optimizer.step()
    return found
