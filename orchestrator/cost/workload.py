"""What is priced: a workload as one engine computes it, how that engine behaves, and the constants."""

from __future__ import annotations

from math import inf
from typing import Final

from msgspec.structs import replace

from orchestrator.cost.calibration import Calibration
from orchestrator.cost.compute import activation_itemsize
from orchestrator.cost.states import BLOCK_SCALE, fp8_weight_bytes
from orchestrator.hardware.spec import Cluster
from orchestrator.model.describe import with_tower_first
from orchestrator.model.freezing import with_frozen
from orchestrator.model.hugging_face import hugging_face, on_host
from orchestrator.model.lora import trainable_parameters, with_lora
from orchestrator.model.packing import packed
from orchestrator.model.spec import LayerSpec, ModelSpec
from orchestrator.model.training import Training
from orchestrator.strategy.capabilities import Traits
from orchestrator.strategy.workload import Workload
from orchestrator.units import ITEMSIZE
from orchestrator.values import Value

DDP_BUCKET: Final = 40_000_000
"""Elements of one message of gradients where an engine says nothing else: the least that megatron-core's DistributedDataParallel gathers
(core/distributed/distributed_data_parallel.py, bucket_size: the larger of this and 1,000,000 a rank)."""


class EngineWorkload(Value, frozen=True, kw_only=True):
    """A workload with what prices of one engine need beside it; the same for every candidate of that engine."""

    model: ModelSpec
    training: Training
    cluster: Cluster
    traits: Traits
    calibration: Calibration
    kinds: dict[str, LayerSpec]
    """The model's layers by kind."""
    counts: dict[str, int]
    """Number of the model's layers by kind."""
    itemsize: int
    """Bytes of an activation's element."""
    weight_itemsize: int
    """Bytes of a weight's element as it is gathered."""
    fp8_copies: float
    """Bytes per weight of the FP8 copies that stay beside it."""
    has_tied: bool
    """Whether embedding and head share weights."""
    trainable: float
    """Parameters of the whole model that are trained beside frozen ones; infinite where none is frozen."""
    loads: tuple[float, ...]
    """What attention has to compute in packed sequences over their mean (`Lengths.loads`), where it computes no more of them than their
    samples; none elsewhere."""


def engine_workload(workload: Workload, traits: Traits, calibration: Calibration) -> EngineWorkload:
    """The workload with the engine's own way to compute its layers, traits and constants with what this model and GPU change in them."""
    model, training, cluster = workload.model, workload.training, workload.cluster
    modules = traits.layers == "hugging_face" and model.architecture.traced is None
    if modules:
        model = on_host(hugging_face(model)) if cluster.is_cpu else hugging_face(model)
    loads: tuple[float, ...] = ()
    if training.packing and training.lengths is not None and model.architecture.traced is None:
        kernels = cluster.software.flash_attention
        share = training.lengths.share(training.seq_length)
        model = packed(model, training.lengths.attended, share, kernels=kernels, masked=modules)
        loads = training.lengths.loads if kernels or not modules else ()
    if training.lora is not None and model.architecture.traced is None:
        model = with_lora(model, training.lora, modules=modules)
    if training.freeze:
        model = with_frozen(model, training.freeze, modules=modules)
    if traits.tower_first:
        model = with_tower_first(model)
    if set(model.architecture.features()) & set(traits.unfused_attention):
        traits = replace(traits, flash_attention=False)
    if training.fp8_recipe in ("delayed", "tensorwise") and cluster.gpu.has_mxfp8:
        calibration = replace(calibration, fp8_efficiency=calibration.fp8_efficiency * calibration.mxfp8_slowdown)
    if training.fp8_recipe in ("mxfp8", "blockwise") and traits.fp8_weight_copies:
        calibration = replace(calibration, fp8_saved_bytes=calibration.fp8_saved_bytes + BLOCK_SCALE)
    if training.precision == "nvfp4":  # Transformer Engine's overlap has none (Megatron-Bridge, llama3_llm_pretrain.py: tp_comm_overlap)
        calibration = replace(calibration, tp_overlap=0.0, user_buffers_overlap=0.0)
    counts: dict[str, int] = {}
    for run in model.runs:
        counts[run.layer.kind] = counts.get(run.layer.kind, 0) + run.count
    kinds = {run.layer.kind: run.layer for run in model.runs}
    trainable = inf if training.lora is None and not training.freeze else trainable_parameters(model)
    if training.lora is not None:
        calibration = replace(calibration, layers_per_message=_adapters_per_message(model, trainable, traits, calibration))
    return EngineWorkload(
        model=model,
        training=training,
        cluster=cluster,
        traits=traits,
        calibration=calibration,
        kinds=kinds,
        counts=counts,
        itemsize=activation_itemsize(training.precision),
        weight_itemsize=ITEMSIZE["fp32" if training.precision == "fp32" else "bf16"],
        fp8_copies=fp8_weight_bytes(training, cluster.gpu) if traits.fp8_weight_copies else 0.0,
        has_tied=any(weight.tied for layer in kinds.values() for weight in layer.weights),
        trainable=trainable,
        loads=loads,
    )


def _adapters_per_message(model: ModelSpec, trainable: float, traits: Traits, calibration: Calibration) -> float:
    """Layers whose adapters' gradients, or weights, travel together: as many as a bucket holds."""
    layers = sum(run.count for run in model.runs if run.layer.recomputable)
    held = (traits.bucket_elements or DDP_BUCKET) * layers / max(trainable, 1)
    return max(calibration.layers_per_message, min(float(layers), held))
