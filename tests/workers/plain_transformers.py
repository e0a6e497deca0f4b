"""The families in transformers alone, from given weights: what the deepspeed worker must compute, with no engine in it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import transformers
from worker_plans import samples_of

from orchestrator.engines.hf_config import config_keywords, model_classes
from orchestrator.model.schedule import learning_rate
from orchestrator.plan import Plan

IGNORED = -100
"""A label that transformers' losses leave out."""


def loss(model: Any, family: str, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """transformers' own loss; it shifts the labels of a causal model itself, so they are the tokens with the last label behind them."""
    labels = batch["labels"]
    if "loss_mask" in batch:
        labels = torch.where(batch["loss_mask"] > 0, labels, torch.full_like(labels, IGNORED))
    if family == "t5":
        return model(input_ids=batch["tokens"], decoder_input_ids=batch["decoder_tokens"], labels=labels).loss
    if family == "bert":
        return model(input_ids=batch["tokens"], attention_mask=torch.ones_like(labels), labels=labels).loss
    balanced = {"output_router_logits": True} if getattr(model.config, "router_aux_loss_coef", 0.0) else {}
    return model(input_ids=batch["tokens"], labels=labels, shift_labels=labels, **balanced).loss


def train(plan: Plan, weights: dict[str, np.ndarray], corpus: str) -> dict[str, Any]:
    """As hf_cases.hf_parity answers: losses, norms, first gradients."""
    training = plan.training
    config_class, model_class = model_classes(plan.model)
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**config_keywords(plan.model)))
    parameters = dict(model.named_parameters())
    assert parameters.keys() == weights.keys()
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(torch.from_numpy(weights[name]))
    decayed = [p for p in parameters.values() if p.dim() > 1]
    free = [p for p in parameters.values() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": training.weight_decay}, {"params": free, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=training.lr, betas=training.betas, eps=training.eps)
    return steps(model, plan, parameters, optimizer, corpus)


def steps(model: Any, plan: Plan, parameters: dict[str, torch.nn.Parameter], optimizer: Any, corpus: str) -> dict[str, Any]:
    """All steps of the plan on one process: losses, norms, first gradients of these parameters."""
    training, batches = plan.training, samples_of(plan, corpus)
    found: dict[str, Any] = {"losses": [], "norms": []}
    for step in range(training.steps):
        optimizer.zero_grad()
        (arrays,) = batches.microbatches(step)
        value = loss(model, plan.model.family, {name: torch.from_numpy(array) for name, array in arrays.items()})
        value.backward()
        if step == 0:
            found["gradients"] = {name: p.grad.numpy().copy() for name, p in parameters.items() if p.grad is not None}
        found["losses"].append(value.item())
        found["norms"].append(float(torch.nn.utils.clip_grad_norm_(parameters.values(), training.clip)))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(training, step)
        optimizer.step()
    return found
