"""A measured run as a value, and which of them no constant is fitted on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Final, Literal

from msgspec.structs import replace

from orchestrator.calibrate import runs as calibrate
from orchestrator.cost.calibration import Calibration
from orchestrator.cost.price import CostModel
from orchestrator.strategy.layout import Prediction
from tests.validation.engines.engine import MeasuredEngine, MemoryOf

MemoryKind = Literal["allocated", "reserved", "process"]
OUTSIDE_TENSORS: Final[dict[str, tuple[str, ...]]] = {
    "allocated": ("context", "fragmentation"),
    "reserved": ("context",),
    "process": (),
}
"""Causes of memory that a kind of measurement doesn't see: max_memory_allocated only tensors, a reservation not the context."""


@dataclass(frozen=True, kw_only=True)
class Unusable:
    """A row that can't be priced, and why."""

    table: str
    run_id: str
    why: str


@dataclass(frozen=True, kw_only=True)
class ExpertsRun:
    """How the experts of a run were computed, beside what a strategy says; None: the source is silent."""

    overlaps: bool | None = None
    """Whether their traffic ran beside the passes of another micro-batch."""
    graph: Literal["none", "routers", "whole"] | None = None
    """What of a layer was replayed as CUDA graphs: nothing, all up to the dispatch, or the whole iteration."""
    balanced: bool | None = None
    """Whether routing was forced to be even, or made so by dropping and padding."""
    capacity: bool = False
    """Whether an expert takes no more than a share of the tokens that is known beforehand."""

    def constants(self, calibration: Calibration) -> Calibration:
        """The constants for this run: its host waits for the dispatch unless the experts' shares are known."""
        return replace(calibration, expert_sync_s=0.0) if self.capacity else calibration


@cache
def _of_experts(experts: ExpertsRun, calibration: Calibration) -> Calibration:
    return experts.constants(calibration)


@dataclass(frozen=True, kw_only=True)
class Run(calibrate.Run):
    """A published run, as its source says it.

    `time_s`, `memory_bytes`: measured, None where not printed or not to be trusted. `memory_of`: the rank that was
    looked at; `memory_kind`: tensors alone, the allocator's reservation, or the whole process. `fits`: False for a run that went out of
    memory (or crashed, where the source can't tell), None where nothing is known.
    """

    table: str
    sweep_id: str
    engine: MeasuredEngine
    precision: str
    kind: Literal["dense", "moe"]
    memory_of: MemoryOf = "max"
    memory_kind: MemoryKind = "process"
    fits: bool | None = None
    experts: ExpertsRun = ExpertsRun()
    illegal: str = ""
    """Why the engine can't run this at all, by its own rules; empty: it can."""

    @property
    def has_experts(self) -> bool:
        return self.kind == "moe"

    @property
    def cost(self) -> type[CostModel]:
        return self.engine.cost

    def constants(self, calibration: Calibration) -> Calibration:
        if self.engine.constants_in is not None:
            calibration = self.engine.constants_in(self.candidate, self.cluster, calibration)
        return _of_experts(self.experts, calibration) if self.kind == "moe" else calibration

    def peak_bytes(self, prediction: Prediction) -> float:
        """Bytes of the predicted peak as the run's source measured it: its rank, and the kind of memory that it looked at."""
        stages = {"first": prediction.by_stage[:1], "last": prediction.by_stage[-1:], "max": prediction.by_stage}[self.memory_of]
        return calibrate.peak_without(stages, OUTSIDE_TENSORS[self.memory_kind])

    @property
    def group(self) -> tuple[str, int, int, str, int, str]:
        """Rows that may be ranked against each other."""
        return (
            self.sweep_id,
            self.num_gpus,
            self.training.seq_length,
            self.precision,
            self.training.global_batch_size,
            self.model.architecture.name + f"/{self.model.architecture.num_layers}/{self.model.architecture.num_attention_heads}",
        )


DOUBTED_GPUS: Final = 512
"""nanotron's runs on this many GPUs have more unexplained scatter than signal (measurements README): neither fitted on nor summed up."""
READ_ONLY: Final = frozenset(
    (
        *("bridge_perf_settings", "bridge_perf_superseded", "bridge_qwen35_h100", "bridge_verification_cards"),
        *("expert_recipes_bridge", "expert_recipes_megatron", "finetune_memory", "geodesic_gh200_nemotron3", "megatron_moe_modelzoo"),
        *("long_context_trl", "mlperf_training_logs_amd", "mlperf_training_logs_new", "simumax_b200"),
    )
)
"""Tables of experts, long sequences, LoRA and memory whose new columns are not priced yet: their rows are priced where they can be, shown
apart, and neither fitted on nor summed up."""


def doubted(run: Run) -> bool:
    """Whether this run is one of nanotron's largest."""
    return run.engine.name == "nanotron" and run.num_gpus >= DOUBTED_GPUS


def small_experts(run: Run) -> bool:
    """Whether this is a functional test of Megatron's experts: models of 1 to 4 GiB, whose peaks say whether each tensor is counted, and
    nothing of how far off a model's are that fills a GPU."""
    return run.table == "megatron_lm_functional_goldens" and run.kind == "moe"


def counts(run: Run) -> bool:
    """Whether this run is fitted on, or judged among all."""
    return run.table not in READ_ONLY and not doubted(run) and not small_experts(run)


HELD_OUT: Final[tuple[tuple[str, str], ...]] = (
    ("nanotron_ultrascale_playbook", "3B"),
    ("nanotron_ultrascale_playbook", "1B_n16nodes"),
    ("nanotron_ultrascale_playbook", "80B_n32nodes"),
    ("nanotron_ultrascale_playbook", "n64nodes"),
    ("bigscience_bloom176b_prequel", "h12288"),
    ("bigscience_bloom176b_prequel", "h13312"),
    ("bigscience_v100", "52B"),
    ("mosaicml_llm_foundry", "_3b_"),
    ("mosaicml_llm_foundry", "_70b_"),
    ("megatron_lm_readme_tables", "3.6B"),
    ("megatron_lm_readme_tables", "18B"),
    ("megatron_lm_readme_tables", "76B"),
    ("megatron_lm_readme_tables", "310B"),
    ("megatron_lm_readme_tables", "1T"),
    ("calculon_validation_seqsel", "530B"),
    ("mlperf_training_logs", "llama31_405b"),
    ("nvidia_dgxc_benchmarking", "405b"),
    ("nvidia_dgxc_benchmarking", "Nemotron4"),
    ("nvidia_megatron_bridge_perf", "LLAMA3_8B"),
    ("nvidia_megatron_bridge_perf", "DeepSeekV3 ("),
    ("nvidia_megatron_bridge_perf", "Qwen3_30B_a3B ("),
    ("nvidia_nemo_perf_docs", "70B"),
    ("internevo_train_performance", "n128"),
    ("internevo_train_performance", "n512"),
    ("torchtitan_benchmarks", "70B"),
    ("megatron_lm_functional_goldens", "15b"),
    ("megatron_lm_functional_goldens", "t5"),
)
"""Whole sweeps and whole models that no constant was fitted on: (table, a word of the sweep's or the model's name)."""


NVFP4: Final = "nvfp4"
"""The label of runs whose products are in NVFP4, on which no constant is fitted."""


def held_out(run: Run) -> bool:
    """Whether this run is kept out of fitting."""
    if run.precision == NVFP4:
        return True
    text = f"{run.sweep_id} {run.model.architecture.name}"
    return any(table == run.table and word in text for table, word in HELD_OUT)
