"""Models, clusters and all_traits that the cost tests price."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from msgspec.structs import replace

from orchestrator.cost.calibration import Calibration, datasheet
from orchestrator.cost.price import CostModel
from orchestrator.hardware.catalog import GPUS
from orchestrator.hardware.spec import Cluster, Level
from orchestrator.model.families import describe
from orchestrator.model.spec import Architecture, ModelSpec
from orchestrator.model.training import Training
from orchestrator.strategy.capabilities import StateBytes, Traits
from orchestrator.strategy.layout import LayerSpan, Stage
from orchestrator.strategy.spec import RECOMPUTE_ORDER, Candidate, Mesh, Recompute, Strategy
from orchestrator.strategy.workload import Workload
from orchestrator.units import GB, GBIT, GIB, US

settings.register_profile("cost", deadline=None, derandomize=True, max_examples=40)
settings.load_profile("cost")
"""Two cores are shared: no deadline; the same examples every time."""

MEGATRON_MIXED = StateBytes(weight=2, gradient=4, master=4, moments=8)
MEGATRON_FP32 = StateBytes(weight=4, gradient=4, master=0, moments=8)
MEGATRON = Traits(
    engine="megatron",
    states={"mixed/0": MEGATRON_MIXED, "mixed/1": MEGATRON_MIXED, "fp32/0": MEGATRON_FP32, "fp32/1": MEGATRON_FP32},
    gradient_bytes_on_wire="grad_reduce_dtype",
    reduce_scatter_from_stage=1,
)
UNFUSED = replace(MEGATRON, flash_attention=False)
DEEPSPEED = Traits(
    engine="megatron_deepspeed",
    states={
        **{f"fp32/{stage}": MEGATRON_FP32 for stage in range(4)},
        "mixed/0": StateBytes(weight=2, gradient=2, master=4, moments=8, step=4),
        **{f"mixed/{stage}": StateBytes(weight=2, gradient=4, master=4, moments=8) for stage in (1, 2, 3)},
    },
    gradient_bytes_on_wire="weight",
    reduce_scatter_from_stage=1,
    overlaps_param_gather=False,
    fp32_gradient_fusion=False,
)


def gpt(**changes: Any) -> Architecture:
    """A GPT with 4 layers of 1024, dropout on: the layer of Korthikanti's table."""
    facts: dict[str, Any] = {
        **{"family": "gpt", "name": "gpt", "num_layers": 4, "hidden_size": 1024, "num_attention_heads": 16, "ffn_hidden_size": 4096},
        **{"vocab_size": 51200, "max_position_embeddings": 2048, "hidden_dropout": 0.1, "attention_dropout": 0.1},
    }
    return Architecture(**{**facts, **changes})


GPT3_175B = gpt(name="gpt3_175b", num_layers=96, hidden_size=12288, num_attention_heads=96, ffn_hidden_size=49152)


def a100(num_gpus: int = 64, *, inner: float = 300 * GB, outer: float = 200 * GBIT, gpus_per_node: int = 8) -> Cluster:
    """DGX A100: NVLink 3, one HDR port a GPU."""
    return Cluster(
        name="dgx_a100",
        gpu=GPUS["A100-SXM-80GB"],
        num_gpus=num_gpus,
        gpus_per_node=gpus_per_node,
        levels=(
            Level(name="nvlink", size=gpus_per_node, bandwidth=inner, latency=2 * US),
            Level(name="infiniband", size=gpus_per_node * 10_000, bandwidth=outer, latency=4 * US),
        ),
        host_bandwidth=32 * GB,
        host_memory=128 * GIB,
    )


def cost_model(
    model: ModelSpec | Architecture | None = None,
    *,
    cluster: Cluster | None = None,
    traits: Traits = MEGATRON,
    calibration: Calibration | None = None,
    modes: tuple[Recompute, ...] = RECOMPUTE_ORDER,
    **training: Any,
) -> CostModel:
    """A cost model with the datasheet's constants, for a GPT of 4 layers on an A100 cluster unless told otherwise."""
    seq_length = training.pop("seq_length", 2048)
    spec = model if isinstance(model, ModelSpec) else describe(model or gpt(), seq_length)
    cluster = cluster or a100()
    return CostModel(
        Workload(model=spec, training=Training(**{"global_batch_size": 64, "seq_length": seq_length, **training}), cluster=cluster),
        traits,
        calibration or datasheet(cluster, traits),
        modes,
    )


def candidate(*, micro_batch_size: int = 1, num_microbatches: int = 8, vpp: int = 1, schedule: str = "", **strategy: Any) -> Candidate:
    """A candidate from mesh degrees and strategy fields in one list."""
    degrees = {axis: strategy.pop(axis) for axis in ("tp", "cp", "ep", "etp", "dp", "pp") if axis in strategy}
    return Candidate(
        engine="megatron",
        strategy=Strategy(mesh=Mesh(**degrees), **strategy),
        micro_batch_size=micro_batch_size,
        num_microbatches=num_microbatches,
        vpp=vpp,
        schedule=schedule or ("interleaved" if vpp > 1 else "1f1b"),  # type: ignore[arg-type]
    )


def stages(model: ModelSpec, counts: list[int], recompute: Recompute | list[Recompute] = "none", vpp: int = 1) -> tuple[Stage, ...]:
    """`counts` decoder layers by virtual stage (chunk after chunk), embedding first and head last."""
    pp = len(counts) // vpp
    modes = recompute if isinstance(recompute, list) else [recompute] * len(counts)
    spans: list[list[LayerSpan]] = [[] for _ in range(pp)]
    first = 0
    for index, (count, mode) in enumerate(zip(counts, modes, strict=True)):
        stage, chunk = index % pp, index // pp
        if index == 0:
            spans[stage].append(LayerSpan(kind="embedding", first=0, count=1))
        if count:
            spans[stage].append(LayerSpan(kind="decoder", first=first, count=count, recompute=mode, chunk=chunk))
        if index == len(counts) - 1:
            spans[stage].append(LayerSpan(kind="head", first=0, count=1, chunk=chunk))
        first += count
    assert first == sum(run.count for run in model.runs if run.layer.kind == "decoder")
    return tuple(Stage(layers=tuple(layers)) for layers in spans)
