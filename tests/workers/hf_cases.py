"""What the pool's ranks run of the Trainer, step by step: whole tensors by their names in transformers, and the bytes that a rank holds."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from worker_cases import make_trainer, open_samples

from orchestrator.model.schedule import learning_rate
from orchestrator.plan import from_json
from orchestrator.workers import loop, metrics

Named = dict[str, np.ndarray]


def hf_parity(plan_json: str, cache: str) -> dict[str, Any]:
    """As worker_cases.parity, with whole gradients and weights by name; on text or supervised samples."""
    plan = from_json(plan_json)
    trainer = make_trainer(plan)
    if plan.offload_activations:
        copying(trainer.states.host_activations)
    samples = open_samples(plan, cache)
    found: dict[str, Any] = {"losses": [], "norms": []}
    found["weights"] = _whole(trainer, _weights(trainer))
    for step in range(plan.training.steps):
        local = trainer.forward_backward(loop.read(trainer, samples, step))
        if step == 0:
            found["gradients"] = _whole(trainer, _gradients(trainer))
        found["norms"].append(trainer.update(learning_rate(plan.training, step)))
        loss, _, _ = metrics.agree(local, trainer.groups, trainer.device, stop=False)
        found["losses"].append(loss)
    if plan.offload_activations:
        assert trainer.states.host_activations._cpu_buffer_pool_count > 0, "nothing went to host memory"
    found["buffers"] = {name: buffer.numpy() for name, buffer in trainer.model.named_buffers() if buffer.dtype == torch.float32}
    return found if dist.get_rank() == 0 else {}


def copying(checkpoints: Any) -> Any:
    """DeepSpeed's offload that copies here too, where it would leave everything on a device without streams."""
    checkpoints._should_skip = lambda tensor: False
    checkpoints.use_pin_memory = False
    return checkpoints


def _weights(trainer: Any) -> dict[str, torch.Tensor]:
    import deepspeed

    found = {}
    for name, parameter in trainer.model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=trainer.plan.zero_stage == 3):
            found[name] = parameter.detach().clone().float()
    return found


def _gradients(trainer: Any) -> dict[str, torch.Tensor]:
    from deepspeed.utils import safe_get_full_grad

    trained = ((name, parameter) for name, parameter in trainer.model.named_parameters() if parameter.requires_grad)
    return {name: safe_get_full_grad(parameter).float() for name, parameter in trained}


def _whole(trainer: Any, local: dict[str, torch.Tensor]) -> Named:
    """Tensor-parallel parts put together along the dimension that is smaller than the whole's."""
    if trainer.plan.ep > 1:
        return _whole_by_places(trainer, local)
    shapes = _shapes(trainer.plan)
    whole = {}
    for name, tensor in local.items():
        cut = [d for d, size in enumerate(shapes[name]) if tensor.shape[d] != size]
        if cut:
            parts = [torch.empty_like(tensor) for _ in range(trainer.plan.tp)]
            dist.all_gather(parts, tensor.contiguous(), group=trainer.groups.group("tp"))
            tensor = torch.cat(parts, dim=cut[0])
        whole[name] = tensor.numpy().copy()
    return whole


def _whole_by_places(trainer: Any, local: dict[str, torch.Tensor]) -> Named:
    """The ranks' parts of experts put together where the worker says that they stand."""
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    mine = [(p.key, p.global_shape, p.offset, p.of(local[names[id(p.parameter)]]).numpy()) for p in trainer.states.places]
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, mine)
    whole: Named = {}
    for key, shape, offset, values in (piece for answer in answers for piece in answer):
        target = whole.setdefault(key, np.full(shape, np.nan, dtype=np.float32))
        target[tuple(slice(begin, begin + size) for begin, size in zip(offset, values.shape, strict=True))] = values
    return whole


def _shapes(plan: Any) -> dict[str, tuple[int, ...]]:
    import json

    from orchestrator.engines import ENGINES
    from orchestrator.workers import hugging_face

    engine = json.loads(next(file.content for file in ENGINES["deepspeed"].translate(plan).files if file.path == "engine.json"))
    with torch.device("meta"):
        model = hugging_face.build_model(engine["model"] | {"gradient_checkpointing": False})
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def state_bytes(plan_json: str, cache: str) -> dict[str, int]:
    """Bytes of model states that this rank's tensors hold after two steps, by kind. Gradients are counted before the update. Frozen weights
    are a kind of their own, where there are any."""
    plan = from_json(plan_json)
    trainer = make_trainer(plan)
    samples = open_samples(plan, cache)
    for step in range(2):
        trainer.forward_backward(loop.read(trainer, samples, step))
        gradients = _gradient_bytes(trainer)
        trainer.update(1e-3)
    found = {"weights": _weight_bytes(trainer, True), "gradients": gradients, "optimizer": _optimizer_bytes(trainer)}
    frozen = _weight_bytes(trainer, False)
    return found | ({"frozen": frozen} if frozen else {})


def _weight_bytes(trainer: Any, trained: bool) -> int:
    held = [getattr(p, "ds_tensor", p) for p in trainer.model.parameters() if p.requires_grad == trained]
    return _storage_bytes(held)


def _gradient_bytes(trainer: Any) -> int:
    """Every place where DeepSpeed keeps gradients between backward and update."""
    optimizer, parameters = trainer.engine.optimizer, list(trainer.model.parameters())
    held = [p.grad for p in parameters if p.grad is not None]
    for name in ("averaged_gradients", "fp32_groups_gradients_flat", "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"):
        held += list(_tensors(getattr(optimizer, name, None)))
    held += [p.grad_accum for p in parameters if getattr(p, "grad_accum", None) is not None]
    return _storage_bytes(held)


def _optimizer_bytes(trainer: Any) -> int:
    """Master weights and the moments; what torch's AdamW steps on, unless that is the model's own parameter."""
    inner = trainer.engine.optimizer.optimizer if hasattr(trainer.engine.optimizer, "optimizer") else trainer.engine.optimizer
    own = {id(p) for p in trainer.model.parameters()}
    held = [p for group in inner.param_groups for p in group["params"] if id(p) not in own]
    # Stage 3 shows them to the inner optimizer only while it steps.
    held += list(_tensors(getattr(trainer.engine.optimizer, "fp32_partitioned_groups_flat", [])))
    held += list(_tensors(list(inner.state.values())))
    return _storage_bytes(held)


def _tensors(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)


def _storage_bytes(tensors: Any) -> int:
    """Each storage once: views of one flat buffer are one."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors if tensor.numel()}
    return sum(storages.values())
