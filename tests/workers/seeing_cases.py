"""A model that looks at images, trained by transformers and torch alone on what the Trainer's program is given."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch

from orchestrator.engines import ENGINES
from orchestrator.model.lora import Lora
from orchestrator.model.parts.vision import part_of_weight
from orchestrator.model.schedule import learning_rate
from orchestrator.plan import Plan
from orchestrator.workers import hugging_face, seeing
from orchestrator.workers.deepspeed_states import parameter_groups


def adapt(model: Any, lora: Lora) -> None:
    """Puts peft's adapters into all linears of the text model's layers, each by its whole name."""
    import peft

    layers = [(path, module) for path, module in model.named_modules() if ".language_model.layers." in path]
    linears = [path for path, module in layers if isinstance(module, torch.nn.Linear)]
    config = peft.LoraConfig(r=lora.rank, lora_alpha=int(lora.scaling * lora.rank), target_modules=linears, bias="none")
    peft.inject_adapter_in_model(config, model)


def plain(plan: Plan, config: dict[str, Any]) -> dict[str, Any]:
    """Losses and gradient norms of all steps, and the weights after the last, by name: the class that config.json names, whole batches,
    AdamW."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    fields = json.loads(next(file.content for file in ENGINES["deepspeed"].translate(plan).files if file.path == "engine.json"))
    ours = hugging_face.first_model(plan, fields, torch.device("cpu"))
    model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(**json.loads(json.dumps(config)))).float()
    if plan.training.lora is not None:
        adapt(model, plan.training.lora)
    model.load_state_dict(ours.state_dict())
    for name, parameter in model.named_parameters() if plan.training.lora is None else ():
        parameter.requires_grad_(part_of_weight(name) not in plan.training.freeze)
    training, samples = plan.training, seeing.ImageSamples(plan)
    optimizer = torch.optim.AdamW(parameter_groups(model), betas=training.betas, eps=training.eps, weight_decay=training.weight_decay)
    found: dict[str, Any] = {"losses": [], "norms": []}
    for step in range(training.steps):
        batch = samples.stack([samples.sample(step * plan.global_batch_size + i) for i in range(plan.global_batch_size)])
        loss = model(**{name: torch.as_tensor(np.asarray(array)) for name, array in batch.items()}).loss
        loss.backward()
        trained = [parameter for parameter in model.parameters() if parameter.grad is not None]
        found["norms"].append(float(torch.nn.utils.clip_grad_norm_(trained, training.clip)))
        found["losses"].append(float(loss))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(training, step)
        optimizer.step()
        optimizer.zero_grad()
    return found | {"weights": {name: parameter.detach() for name, parameter in model.named_parameters()}}
