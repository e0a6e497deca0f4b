"""gpt and llama in plain torch, from megatron-core's named weights: what the workers must compute, with no engine in it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from orchestrator.model.spec import Architecture
from orchestrator.plan import Plan
from orchestrator.workers.schedule import learning_rate

Weights = dict[str, torch.Tensor]


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


def attention(model: Architecture, x: torch.Tensor, w: Weights, layer: int) -> torch.Tensor:
    """Causal; the rows of linear_qkv are grouped: the queries of a group, its key, its value."""
    size, length, _ = x.shape
    groups, width = model.query_groups, model.head_dim
    per_group = model.num_attention_heads // groups
    qkv = F.linear(x, w["self_attention.linear_qkv.weight"][layer], _row(w, "self_attention.linear_qkv.bias", layer))
    qkv = qkv.view(size, length, groups, per_group + 2, width)
    q = qkv[..., :per_group, :].reshape(size, length, groups * per_group, width)
    k, v = qkv[..., per_group, :], qkv[..., per_group + 1, :]
    if model.position_embedding == "rope":
        q, k = rotate(q, model.rotary_base), rotate(k, model.rotary_base)
    k, v = k.repeat_interleave(per_group, dim=2), v.repeat_interleave(per_group, dim=2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / width**0.5
    scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -torch.inf)
    mixed = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).reshape(size, length, -1)
    return F.linear(mixed, w["self_attention.linear_proj.weight"][layer], _row(w, "self_attention.linear_proj.bias", layer))


def mlp(model: Architecture, x: torch.Tensor, w: Weights, layer: int) -> torch.Tensor:
    x = F.linear(x, w["mlp.linear_fc1.weight"][layer], _row(w, "mlp.linear_fc1.bias", layer))
    if model.activation == "swiglu":
        gate, up = x.chunk(2, dim=-1)
        x = F.silu(gate) * up
    else:
        x = F.gelu(x)
    return F.linear(x, w["mlp.linear_fc2.weight"][layer], _row(w, "mlp.linear_fc2.bias", layer))


def _row(w: Weights, name: str, layer: int) -> torch.Tensor | None:
    return w[name][layer] if name in w else None


def loss(model: Architecture, weights: Weights, batch: dict[str, np.ndarray]) -> torch.Tensor:
    """Mean cross-entropy of the next token over the real vocabulary."""
    w = {name.removeprefix("decoder.layers."): tensor for name, tensor in weights.items()}
    tokens, labels = torch.from_numpy(batch["tokens"]), torch.from_numpy(batch["labels"])
    x = w["embedding.word_embeddings.weight"][tokens]
    if model.position_embedding == "learned_absolute":
        x = x + w["embedding.position_embeddings.weight"][: tokens.shape[1]]
    for layer in range(model.num_layers):
        first, second = "self_attention.linear_qkv.layer_norm_", "mlp.linear_fc1.layer_norm_"
        x = x + attention(model, norm(model, x, w[first + "weight"][layer], _row(w, first + "bias", layer)), w, layer)
        x = x + mlp(model, norm(model, x, w[second + "weight"][layer], _row(w, second + "bias", layer)), w, layer)
    x = norm(model, x, w["decoder.final_layernorm.weight"], w.get("decoder.final_layernorm.bias"))
    output = w["embedding.word_embeddings.weight" if model.tie_embeddings else "output_layer.weight"]
    return F.cross_entropy(F.linear(x, output[: model.vocab_size]).flatten(0, 1), labels.flatten())


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
        value = loss(model, weights, whole)
        value.backward()
        if step == 0:
            found["gradients"] = {name: t.grad.numpy().copy() for name, t in weights.items() if t.grad is not None}
        found["losses"].append(value.item())
        found["norms"].append(float(torch.nn.utils.clip_grad_norm_(weights.values(), training.clip or torch.inf)))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(training, step)
        optimizer.step()
    return found
