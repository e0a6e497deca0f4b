"""Expert recovery: what do we plan where an expert's configuration was published?

Given only model, GPUs, batch, sequence and precision of a production configuration (NVIDIA's tables and MLPerf's logs), the planner is
asked for its plan. Is the published one legal for Megatron, does it fit by our memory, how far is its predicted time from our best? The
best is what a user gets unasked: sure to fit as usual, where a plan is; a published one may be faster by filling memory further.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from orchestrator.calibrate.pricing import Choose
from orchestrator.cost.calibration import Calibration
from orchestrator.cost.memory_policy import policy
from orchestrator.cost.price import CostModel
from orchestrator.cost.uncertainty import situation
from orchestrator.engines import ENGINES
from orchestrator.errors import OrchestratorError
from orchestrator.model.training import QUANTISED
from orchestrator.search.planner import search
from orchestrator.search.question import PlannedEngine, SearchSettings
from orchestrator.strategy.capabilities import Capabilities, Traits
from orchestrator.strategy.legality import broken_rule
from orchestrator.strategy.pins import MemoryLimit
from orchestrator.strategy.spec import Candidate
from orchestrator.strategy.workload import Workload
from tests.validation.runs import Run

TABLES = ("mlperf_training_logs", "nvidia_dgxc_benchmarking", "nvidia_megatron_bridge_perf", "nvidia_nemo_perf_docs")
ENGINE = "megatron"
LAYERS_405B = 126
CLOSE = 1.05
"""`within_5`: the published configuration's predicted time over our best's."""


@dataclass(frozen=True, kw_only=True)
class Recovered:
    """One published configuration. `ratio`: its predicted time over our best plan's; None where there is none. `slower`: how much longer,
    as a share, its fastest run took than a published run of the same training divided as our best plan is; None where there is none."""

    label: str
    legal: bool
    why: str
    fits: bool
    ratio: float | None
    best: str
    slower: float | None = None

    @property
    def shown_slower(self) -> bool:
        """Whether published runs agree that our best's division is the faster one."""
        return self.slower is not None and self.slower > 0


def configurations(runs: Sequence[Run]) -> list[Run]:
    """The published configurations of NeMo and Megatron, each once."""
    seen: dict[object, Run] = {}
    for run in published(runs):
        seen.setdefault((question_of(run), run.candidate), run)
    return list(seen.values())


def published(runs: Sequence[Run]) -> list[Run]:
    """Runs of NeMo and Megatron as they are recommended."""
    return [run for run in runs if run.table in TABLES and run.engine.name == "nemo" and run.kind == "dense" and not proxy(run)]


def proxy(run: Run) -> bool:
    """Whether this is Llama 3.1 405B with layers left out, which NVIDIA divides on 32, 96 and 192 GPUs as the whole model: "not realistic
    and were created to allow fit of Llama model to smaller number of GPUs than intended" (NVIDIA/dgxc-benchmarking at v25.02,
    llama3.1/README_405b.md:74)."""
    architecture = run.model.architecture
    return run.table == "nvidia_dgxc_benchmarking" and "405b" in architecture.name and architecture.num_layers < LAYERS_405B


def question_of(run: Run) -> object:
    """What was trained, and on what: by size, since tables name one model in several ways."""
    shape = replace(run.model.architecture, name="")
    return shape, run.model.seq_length, run.gpu, run.num_gpus, run.training.precision, run.training.global_batch_size


def fastest(runs: Sequence[Run], question: object, candidate: Candidate) -> float | None:
    """Seconds of the fastest published run of this question that is divided as this choice is: tp, cp, pp and its chunks, whatever its
    micro-batch. None: there is none."""
    seconds = [
        run.time_s
        for run in published(runs)
        if run.time_s is not None
        and question_of(run) == question
        and (run.candidate.mesh, run.candidate.vpp) == (candidate.mesh, candidate.vpp)
    ]
    return min(seconds, default=None)


def megatron_capabilities(capabilities: Capabilities) -> Capabilities:
    """Megatron's own rules: without what only our worker can't do (FP8, context parallelism), which the capabilities say in rules of
    their own."""
    rules = tuple(rule for rule in capabilities.rules if not rule.id.endswith("_worker"))
    options = capabilities.options | {"tp_comm_overlap": (False,)}  # which the constants of a measured engine have (`tp_overlap`)
    return replace(capabilities, precisions=tuple({*capabilities.precisions, *QUANTISED}), options=options, rules=rules)


def planned_engine(workload: Workload, capabilities: Capabilities, traits: Traits, calibration: Calibration) -> PlannedEngine:
    """The engine as a user has it: our best plan runs out of memory with a chance of 5% at most, where there is such a plan."""
    now = situation(workload.model, workload.training, workload.cluster, calibration)
    asked = MemoryLimit(limit=workload.cluster.gpu.memory, reserve=None)
    return PlannedEngine(capabilities=capabilities, traits=traits, calibration=calibration, policy=policy(asked, now, calibration))


def recover(run: Run, choose: Choose[Run], runs: Sequence[Run] = ()) -> Recovered:
    """Plans the model of this run anew, both priced by the same traits and constants. `runs`: all that were published."""
    engine = ENGINES[ENGINE]
    cluster = replace(run.cluster, num_gpus=run.num_gpus)
    capabilities = megatron_capabilities(engine.capabilities(cluster.software))
    traits = run.engine.traits
    calibration = choose(run)
    workload = replace(run.workload, cluster=cluster)
    candidate = replace(run.candidate, engine=ENGINE)
    broken = broken_rule(capabilities, candidate, workload)
    model = CostModel(workload, traits, calibration)
    as_published = model.price(candidate, run.stages)
    mesh = candidate.mesh
    label = f"{run.model.architecture.name} on {run.num_gpus} {run.gpu} {run.precision} "
    label += f"tp={mesh.tp} pp={mesh.pp} cp={mesh.cp} vpp={candidate.vpp} mbs={candidate.micro_batch_size}"
    slower = None
    try:
        planned = planned_engine(workload, capabilities, traits, calibration)
        found = search(workload, [planned], SearchSettings(top_k=1))
    except OrchestratorError as error:
        best, ratio = f"no plan: {error}", None
    else:
        best = found.plan.candidate.label()
        ratio = as_published.step_time_s / found.plan.prediction.step_time_s
        theirs, ours = (fastest(runs, question_of(run), one) for one in (candidate, found.plan.candidate))
        alike = (mesh, candidate.vpp) == (found.plan.candidate.mesh, found.plan.candidate.vpp)
        slower = None if theirs is None or ours is None or alike else theirs / ours - 1
    return Recovered(
        label=label,
        legal=broken is None,
        why="" if broken is None else f"{broken[0].id}: {broken[1]}",
        fits=as_published.peak_memory_bytes <= cluster.gpu.memory,
        ratio=ratio,
        best=best,
        slower=slower,
    )


def figures(found: Sequence[Recovered]) -> dict[str, float | int | None]:
    """The figures that the report has as `recovery`."""
    ratios = [one.ratio for one in found if one.ratio is not None]
    close = sum(one.ratio is not None and (one.ratio <= CLOSE or one.shown_slower) for one in found)
    return {
        "configurations": len(found),
        "legal": sum(one.legal for one in found) / len(found) if found else None,
        "fits": sum(one.fits for one in found) / len(found) if found else None,
        "within_5": sum(ratio <= CLOSE for ratio in ratios) / len(ratios) if ratios else None,
        "within_5_or_shown_slower": close / len(ratios) if ratios else None,
        "median_ratio": sorted(ratios)[len(ratios) // 2] if ratios else None,
    }
