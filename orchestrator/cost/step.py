"""The seconds of a step: the simulated schedule of its stages, what of the gradient reduction nothing hides, then the optimizer; and those
seconds itemised."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from orchestrator.cost import schedule, uncertainty
from orchestrator.cost.layer import LayerCost
from orchestrator.cost.memory import StageMemory
from orchestrator.cost.network import Network
from orchestrator.cost.replicas import ReplicaPrices
from orchestrator.cost.schedule.one_f_one_b import HalfDuplex1F1B, OneFOneB
from orchestrator.cost.stage import StageCost, StageSums
from orchestrator.cost.workload import EngineWorkload
from orchestrator.hardware.collectives import COLLECTIVES
from orchestrator.hardware.spec import Cluster
from orchestrator.model.flops import model_flops_per_sample
from orchestrator.strategy.layout import LayerSpan, Prediction, Stage, StagePrediction
from orchestrator.strategy.spec import Candidate

COMPUTE_CAUSES = ("gemm", "attention", "memory_bound")
CAUSES = (*COMPUTE_CAUSES, "recompute", "overhead", "offload", "tp", "cp", "ep", "pp", "dp", "overlap", "bubble", "optimizer")
"""Keys of `Prediction.by_cause`, in the order of tables."""
ROUNDING = 1e-9
"""Relative slack of a limit: the same terms, added in another order."""


def simulated_schedule(cluster: Cluster, candidate: Candidate) -> str:
    """The name in `schedule.names` of the candidate's schedule as the backend runs it: gloo on ranks without a GPU, else NCCL."""
    return HalfDuplex1F1B.name if cluster.is_cpu and candidate.schedule == OneFOneB.name else candidate.schedule


class Transfers(NamedTuple):
    """The transfers between stages. `schedule`: its name in `schedule.names`; `hops`: seconds of a transfer from a chunk of layers to the
    next, one number or one a border; `busy_s`: seconds of a step for which the busiest link carries them. `active`: the factor on passes
    that have cores of waiting stages too (`LayerPrices.active_share`)."""

    schedule: str
    hops: float | Sequence[float]
    busy_s: float = 0.0
    active: float = 1.0

    def least_s(self, costs: Sequence[StageCost], num_microbatches: int) -> float:
        """Seconds that no schedule's passes undercut: the busiest link's, and where ranks share cores all the work over all the cores."""
        if self.active == 1.0:
            return self.busy_s
        work = sum([sum(cost.forward_s) + sum(cost.backward_s) for cost in costs])
        return max(self.busy_s, num_microbatches * work / (len(costs) * self.active))


def step_seconds(candidate: Candidate, costs: Sequence[StageCost], moving: Transfers, once_s: float, upper: float = float("inf")) -> float:
    """Seconds of a step with these costs, one a stage. `once_s`: what comes once a step for all stages. A stage exposes its reduction when
    it is through; the update begins when all are, and lasts as long as the slowest one's. `upper`: where the step takes longer, the answer
    may be any seconds above it that the step does not undercut."""
    forward = tuple([cost.forward_s[chunk] for chunk in range(candidate.vpp) for cost in costs])
    backward = tuple([cost.backward_s[chunk] for chunk in range(candidate.vpp) for cost in costs])
    hops = moving.hops if isinstance(moving.hops, float) else tuple(moving.hops)
    passes = moving.schedule, forward, backward, hops
    shape = candidate.num_microbatches, candidate.vpp, candidate.microbatch_group_size_per_vp_stage
    update = max(cost.optimizer_s for cost in costs)
    if upper == float("inf"):
        ends = _ends(*passes, *shape)
    else:
        latest = [(upper - update - once_s - cost.exposed_s) * (1 + ROUNDING) for cost in costs]
        ends = schedule.finish_times(*passes, *shape, limits=latest)
    finished = max(end + cost.exposed_s for end, cost in zip(ends, costs, strict=True))
    return max(finished, moving.least_s(costs, candidate.num_microbatches)) + update + once_s


_ends = lru_cache(maxsize=64)(schedule.finish_times)
"""`schedule.finish_times`, kept: a plan is priced with one option after the other, few of which change what a pass takes."""


def once_seconds(workload: EngineWorkload, network: Network, replicas: ReplicaPrices, candidate: Candidate) -> float:
    """Seconds that a step takes once, whatever its stages: the step's overhead, and the all-reduce of tied embeddings between first and
    last stage."""
    seconds = workload.calibration.step_overhead_s
    mesh = candidate.mesh
    if mesh.pp > 1 and workload.has_tied:
        tied = sum(w.local_numel(mesh.tp) for layer in workload.kinds.values() for w in layer.weights if w.tied)
        link = network.link(2, mesh.stride("pp") * (mesh.pp - 1))
        seconds += COLLECTIVES["all_reduce"](tied * replicas.wire_itemsize(candidate.strategy), 2, link)
    return seconds


class Played(NamedTuple):
    """A step as it goes: each stage's passes, then what of the gradient reduction nothing hides (one a stage, from its last pass on), the
    optimizer once all stages are through, and what comes once for all. It ends at `total_s`, the step's price."""

    lanes: list[list[schedule.Slot]]
    exposed_s: tuple[float, ...]
    optimizer_begin_s: float
    optimizer_s: float
    once_s: float

    @property
    def total_s(self) -> float:
        return self.optimizer_begin_s + self.optimizer_s + self.once_s


def played(candidate: Candidate, costs: Sequence[StageCost], moving: Transfers, once_s: float) -> Played:
    """The step of `step_seconds`, pass by pass."""
    forward = [cost.forward_s[chunk] for chunk in range(candidate.vpp) for cost in costs]
    backward = [cost.backward_s[chunk] for chunk in range(candidate.vpp) for cost in costs]
    by_border = [moving.hops] * len(forward) if isinstance(moving.hops, float) else [*moving.hops]
    shape = (candidate.num_microbatches, candidate.vpp, candidate.microbatch_group_size_per_vp_stage)
    lanes = schedule.timeline(moving.schedule, forward, backward, by_border, *shape)
    exposed = tuple(cost.exposed_s for cost in costs)
    through = max(lane[-1].end_s + seconds for lane, seconds in zip(lanes, exposed, strict=True))
    begin = max(through, moving.least_s(costs, candidate.num_microbatches))
    return Played(lanes, exposed, begin, max(cost.optimizer_s for cost in costs), once_s)


class StepPrice:
    """All that a step's itemisation reads: the stages with their costs, what crosses their borders, what comes once."""

    def __init__(
        self, workload: EngineWorkload, candidate: Candidate, costs: Sequence[StageCost], moving: Transfers, once_s: float
    ) -> None:
        self.workload, self.candidate, self.costs, self.moving, self.once_s = workload, candidate, costs, moving, once_s
        self.seconds = step_seconds(candidate, costs, moving, once_s)

    def busiest(self) -> int:
        """The stage with most work; the first of several."""
        m = self.candidate.num_microbatches
        works = [m * (sum(cost.forward_s) + sum(cost.backward_s)) + cost.exposed_s for cost in self.costs]
        return max(range(len(works)), key=lambda i: (works[i], -i))

    def by_cause(self, spans: Iterable[LayerSpan], layer: Callable[[LayerSpan], LayerCost]) -> dict[str, float]:
        """The step split by what the busiest stage, with these layers, spends it on: compute and traffic over all micro-batches, transfers
        (the step with them against the step without), the slowest update, and what waiting on the pipeline adds."""
        c, m = self.workload.calibration, self.candidate.num_microbatches
        causes = dict.fromkeys(CAUSES, 0.0)
        for span in spans:
            for cause, seconds in layer(span).by_cause.items():
                causes[cause] += m * span.count * seconds
        causes["overhead"] += m * self.candidate.vpp * c.microbatch_overhead_s + c.step_overhead_s
        causes["dp"] += self.costs[self.busiest()].exposed_s
        causes["optimizer"] = max(cost.optimizer_s for cost in self.costs)
        causes["pp"] = self.once_s - c.step_overhead_s
        without = step_seconds(self.candidate, self.costs, Transfers(self.moving.schedule, 0.0, active=self.moving.active), self.once_s)
        causes["pp"] += max(0.0, self.seconds - without)
        causes["bubble"] = self.seconds - sum(causes.values())
        return {cause: seconds for cause, seconds in causes.items() if seconds}


def prediction(
    step: StepPrice,
    stages: Sequence[Stage],
    sums: Sequence[StageSums],
    memories: Sequence[StageMemory],
    layer: Callable[[LayerSpan], LayerCost],
) -> Prediction:
    """What the report shows of a step."""
    w, candidate, total = step.workload, step.candidate, step.seconds
    by_stage = []
    for cost, added, memory in zip(step.costs, sums, memories, strict=True):
        phase, memory_by_cause = memory.itemised(added)
        by_stage.append(
            StagePrediction(
                forward_s=sum(cost.forward_s),
                backward_s=sum(cost.backward_s),
                peak_memory_bytes=cost.peak_bytes,
                memory_by_cause=memory_by_cause,
                peak_phase=phase,
            )
        )
    mesh = candidate.mesh
    samples = candidate.num_microbatches * candidate.micro_batch_size * mesh.dp
    now = uncertainty.situation(w.model, w.training, w.cluster, w.calibration, transformers=w.traits.layers == "hugging_face")
    interval, poor = uncertainty.interval(now, w.calibration), uncertainty.poorly_predicted(now)
    return Prediction(
        step_time_s=total,
        tokens_per_s_per_gpu=samples * w.model.tokens_per_sample / total / mesh.world_size,
        peak_memory_bytes=max(cost.peak_bytes for cost in step.costs),
        by_stage=tuple(by_stage),
        by_cause=step.by_cause(stages[step.busiest()].layers, layer),
        model_flops_per_gpu=samples * model_flops_per_sample(w.model) / total / mesh.world_size,
        interval=None if interval is None else (total * interval[0], total * interval[1]),
        beyond=() if interval is None else tuple(filter(None, [*(uncertainty.BEYOND[kind] for kind in now.beyond), poor])),
    )
