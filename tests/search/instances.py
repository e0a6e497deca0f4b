"""Random small instances for the planner and its oracle, by seed."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

from msgspec.structs import replace
from small_engines import HEADS, INTERLEAVED, deepspeed_like, megatron_like
from small_models import cluster, gpt, training

from orchestrator.cost.calibration import Calibration
from orchestrator.cost.price import CostModel
from orchestrator.hardware.spec import Cluster
from orchestrator.model.spec import ModelSpec
from orchestrator.model.training import Training
from orchestrator.search.question import PlannedEngine, SearchSettings
from orchestrator.strategy.capabilities import Capabilities, StateBytes, Traits
from orchestrator.strategy.pins import MemoryLimit
from orchestrator.strategy.spec import PP_BEFORE_DP, RANK_ORDER, Candidate, Mesh, Recompute, Strategy
from orchestrator.strategy.workload import Workload
from orchestrator.units import GB, MIB

MIXED = StateBytes(weight=2, gradient=4, master=4, moments=8)
TRAITS = Traits(
    engine="megatron",
    states={f"{precision}/{stage}": MIXED for precision in ("mixed", "fp32") for stage in range(4)},
    gradient_bytes_on_wire="grad_reduce_dtype",
    reduce_scatter_from_stage=1,
)
CALIBRATION = Calibration(context_bytes=0.0, communicator_bytes=0.0, workspace_bytes=0.0, step_overhead_s=1e-5, microbatch_overhead_s=1e-6)
"""Without the fixed bytes and overheads that would drown a toy model's differences."""


def planned_engines(engines: Iterable[tuple[Capabilities, Traits]], *calibrations: Calibration) -> list[PlannedEngine]:
    """The engines as a search is given them: with the calibration of all, or one for each."""
    pairs = list(engines)
    each = calibrations * len(pairs) if len(calibrations) == 1 else calibrations
    return [PlannedEngine(capabilities=able, traits=traits, calibration=c) for (able, traits), c in zip(pairs, each, strict=True)]


class Instance:
    """A model, a training, a cluster, an engine and a memory limit that about half of the choices keep."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.seed = seed
        layers = rng.choice([2, 3, 4, 5])
        hidden = rng.choice([64, 128, 256])
        seq = rng.choice([32, 128])
        self.model: ModelSpec = gpt(layers, hidden=hidden, heads=4, seq=seq, vocab=rng.choice([128, 1024, 4096]))
        self.training: Training = training(rng.choice([2, 4, 6, 8]), seq=seq)
        gpus = rng.choice([1, 2, 2, 3, 4, 4])
        node = gpus if gpus < 4 or rng.random() < 0.5 else gpus // 2
        self.cluster: Cluster = cluster(gpus, gpus_per_node=node, bandwidth=rng.choice([5, 50, 300]) * GB)
        self.capabilities: Capabilities = self._engine(rng)
        self.traits: Traits = replace(TRAITS, engine=self.capabilities.engine, flash_attention=rng.random() < 0.5)
        self.calibration = replace(CALIBRATION, op_overhead_s=rng.choice([0.0, 1e-6]), overlap_efficiency=rng.choice([0.0, 0.8]))
        self.limit = self._limit(rng)

    @property
    def workload(self) -> Workload:
        return Workload(model=self.model, training=self.training, cluster=self.cluster)

    @property
    def settings(self) -> SearchSettings:
        return SearchSettings(limit=self.limit, top_k=1)

    @property
    def planned_engines(self) -> list[PlannedEngine]:
        return planned_engines(self.engines, self.calibration)

    @property
    def engines(self) -> list[tuple[Capabilities, Traits]]:
        return [(self.capabilities, self.traits)]

    def _engine(self, rng: random.Random) -> Capabilities:
        changes: dict[str, Any] = {"recompute": rng.choice([("none",), ("none", "full"), ("none", "selective", "full")])}
        if rng.random() < 0.3:
            changes["zero_stages"] = (0, 1, 2, 3)
            return deepspeed_like(**changes, recompute_varies=rng.choice(["never", "stage"]), uneven_stages=rng.random() < 0.5)
        changes["rules"] = (HEADS, INTERLEAVED)
        return megatron_like(**changes, uneven_stages=rng.random() < 0.8)

    def _limit(self, rng: random.Random) -> MemoryLimit:
        costs = CostModel(self.workload, self.traits, self.calibration)
        one = Candidate(
            engine=self.capabilities.engine,
            strategy=Strategy(mesh=Mesh(dp=self.cluster.num_gpus), recompute="full"),
            micro_batch_size=1,
            num_microbatches=1,
        )
        need = costs.memory_floor(one)
        return MemoryLimit(limit=int(need * rng.choice([0.3, 0.6, 0.9, 1.2, 2.0, 50.0])) + MIB, reserve=0)


MODULES: tuple[Recompute, ...] = ("none", "layernorm", "selective", "mlp", "layernorm+mlp", "core_attn+mlp", "full")


class Wide(Instance):
    """An instance of two nodes whose engine also has some of: a second rank order, modules of layers recomputed, DeepSpeed's own pipeline
    with each layer recomputed in its own way, optimizer offload, a second copy of ZeRO-3's weights inside a node."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        rng = random.Random(-seed - 1)
        gpus = rng.choice([4, 4, 6])
        self.model = gpt(rng.choice([2, 3, 4]), hidden=rng.choice([64, 256]), heads=4, seq=32, vocab=rng.choice([128, 4096]))
        self.training = training(rng.choice([4, 8, 12] if gpus == 4 else [6, 12]), seq=32)
        self.cluster = cluster(gpus, gpus_per_node=rng.choice([2, gpus // 2]), bandwidth=rng.choice([50, 300]) * GB)
        recompute = rng.choice([("none",), ("none", "full"), MODULES[::2], MODULES[:4]])
        if rng.random() < 0.5:
            orders = (RANK_ORDER, PP_BEFORE_DP)
            self.capabilities = megatron_like(recompute=recompute, rank_orders=orders, offload_optimizer=rng.random() < 0.3)
        else:
            axes = rng.choice([("tp", "pp", "dp"), ("tp", "pp", "dp"), ("dp",)])
            flat = ("1f1b", "deepspeed_1f1b") if rng.random() < 0.6 else ("1f1b",)
            self.capabilities = deepspeed_like(
                axes=axes,
                zero_stages=(0, 1, 2, 3) if "pp" in axes else (3,),
                recompute=recompute,
                recompute_varies="stage",
                recompute_by_layer=("deepspeed_1f1b",),
                uneven_stages=rng.random() < 0.7,
                schedules=flat,
                zero_stages_with_pipeline=(0, 1),
                zero_shard_groups=rng.random() < 0.7,
                zero_shard_stages=(3,),
                rules=(HEADS,),
            )
        self.traits = replace(self.traits, engine=self.capabilities.engine)
        self.limit = self._limit(rng)
