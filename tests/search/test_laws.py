"""Laws over the real engines' whole spaces: what can only help never makes the plan slower.

Random models of every family on random clusters of two network levels, all three engines with their own rules and all_traits and constants
drawn around the datasheet's, memory from too little to ample. The engines' spaces have everything: both rank orders, recompute of modules,
DeepSpeed's pipeline, optimizer offload, hpZ.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from instances import planned_engines
from msgspec.structs import replace
from small_models import cluster

from orchestrator.cost.calibration import Calibration, datasheet
from orchestrator.engines import ENGINES
from orchestrator.errors import NoPlanError
from orchestrator.hardware.spec import Cluster
from orchestrator.model.families import describe
from orchestrator.model.spec import Architecture, ModelSpec
from orchestrator.model.training import Training
from orchestrator.plan import Plan
from orchestrator.search.planner import search
from orchestrator.search.question import SearchSettings
from orchestrator.strategy.capabilities import Capabilities, Traits
from orchestrator.strategy.pins import MemoryLimit, Pins
from orchestrator.strategy.spec import RANK_ORDER
from orchestrator.strategy.workload import Workload
from orchestrator.units import GB, GIB, MIB

SEEDS, MORE = [*range(7), *range(8, 16)], [7, *range(16, 1000)]
SLACK = 1e-9
"""Relative: the same terms added in another order."""

OPTIONS: tuple[dict[str, Any], ...] = (
    *({"cuda_graph_impl": "local"}, {"tp_comm_overlap": True}, {"overlap_grad_reduce": False}, {"overlap_param_gather": False}),
    *({"zero_shard_size": 2}, {"cp": 2}, {"megatron_fsdp": True}),
)
"""What is not searched but taken as it is pinned."""


class Question(NamedTuple):
    model: ModelSpec
    training: Training
    cluster: Cluster
    engines: tuple[tuple[Capabilities, Traits], ...]
    calibrations: tuple[Calibration, ...]
    limit: MemoryLimit
    pins: Pins = Pins()

    @property
    def workload(self) -> Workload:
        return Workload(model=self.model, training=self.training, cluster=self.cluster)

    def plan(self) -> Plan | None:
        try:
            settings = SearchSettings(pins=self.pins, limit=self.limit, top_k=1)
            return search(self.workload, planned_engines(self.engines, *self.calibrations), settings).plan
        except NoPlanError:
            return None

    def seconds(self) -> float:
        """Infinite where there is no plan."""
        plan = self.plan()
        if plan is None:
            return math.inf
        assert plan.predicted is not None
        return plan.predicted.step_time_s


def architecture(rng: random.Random) -> Architecture:
    family = rng.choice(["gpt", "gpt", "llama", "llama", "bert", "t5"])
    heads = rng.choice([4, 6, 8])
    hidden = heads * rng.choice([16, 32, 64])
    fields: dict[str, Any] = {"ffn_hidden_size": 4 * hidden}
    if family == "llama":
        fields = {"ffn_hidden_size": 3 * hidden, "activation": "swiglu", "normalization": "RMSNorm", "position_embedding": "rope"}
        fields |= {"add_bias_linear": False, "tie_embeddings": rng.random() < 0.5, "num_query_groups": rng.choice([heads, heads // 2])}
    if family == "bert":
        fields["num_token_types"] = 2
    if family == "t5":
        fields["decoder_num_layers"] = rng.randint(1, 4)
    return Architecture(
        family=family,  # type: ignore[arg-type]
        name=f"{family}_random",
        num_layers=rng.randint(2, 12) if family != "t5" else rng.randint(1, 4),
        hidden_size=hidden,
        num_attention_heads=heads,
        vocab_size=rng.choice([512, 4096, 32000]),
        max_position_embeddings=512,
        **fields,
    )


def question(seed: int) -> Question:
    rng = random.Random(seed)
    shape = architecture(rng)
    seq = rng.choice([32, 128, 512])
    asked = Training(
        global_batch_size=rng.choice([4, 8, 12, 16, 24]),
        seq_length=seq,
        decoder_seq_length=seq // 2 if shape.family == "t5" else None,
        precision=rng.choice(["bf16", "bf16", "fp32", "fp16"]),
    )
    gpus = rng.choice([2, 4, 6, 8, 8, 12, 16])
    node = rng.choice([n for n in (1, 2, 3, 4, 6, 8) if gpus % n == 0])
    where = cluster(gpus, gpus_per_node=node, bandwidth=rng.choice([50, 300]) * GB)
    names = list(ENGINES) if rng.random() < 0.5 else [rng.choice(list(ENGINES))]
    engines = tuple((ENGINES[name].capabilities(where.software), ENGINES[name].traits(where.software)) for name in names)
    changes: dict[str, Any] = {
        "context_bytes": rng.choice([0.0, 4.0 * MIB]),
        "communicator_bytes": 0.0,
        "workspace_bytes": 0.0,
        "step_overhead_s": rng.choice([0.0, 1e-4]),
        "microbatch_overhead_s": rng.choice([0.0, 1e-5, 1e-4]),
        "op_overhead_s": rng.choice([0.0, 1e-6]),
        "collective_launch_s": rng.choice([0.0, 1e-5]),
        "overlap_efficiency": rng.choice([0.0, 0.8, 1.0]),
        "host_adam_bandwidth": rng.choice([20, 200]) * GB,
        "core_share": rng.choice([1.0, 1.0, 0.5]),
    }
    calibrations = tuple(replace(datasheet(where, traits), **changes) for _, traits in engines)
    limit = MemoryLimit(limit=80 * GIB, reserve=0)
    options = Pins(**rng.choice(OPTIONS)) if "megatron" in names and rng.random() < 0.3 else Pins()
    ample = Question(describe(shape, seq, asked.decoder_seq_length), asked, where, engines, calibrations, limit, options)
    best = ample.plan()
    if best is None:
        return ample
    assert best.predicted is not None
    share = rng.choice([0.2, 0.4, 0.6, 0.8, 0.9, 1.0])
    return ample._replace(limit=MemoryLimit(limit=int(share * best.predicted.peak_memory_bytes) + MIB // 64, reserve=0))


def faster_link(q: Question, rng: random.Random) -> Question:
    """One level is faster, never faster than the one inside it."""
    levels = list(q.cluster.levels)
    index = rng.randrange(len(levels))
    most = math.inf if index == 0 else levels[index - 1].bandwidth
    least = 0.0 if index == 0 else levels[index - 1].latency
    now = levels[index]
    if rng.random() < 0.7:
        levels[index] = replace(now, bandwidth=min(most, now.bandwidth * rng.choice([1.01, 1.3, 2.0, 10.0])))
    else:
        levels[index] = replace(now, latency=max(least, now.latency * rng.choice([0.9, 0.5, 0.1])))
    return q._replace(cluster=replace(q.cluster, levels=tuple(levels)))


def faster_gpu(q: Question, rng: random.Random) -> Question:
    gpu, factor = q.cluster.gpu, rng.choice([1.05, 1.5, 4.0])
    if rng.random() < 0.5:
        gpu = replace(gpu, peak_flops={precision: factor * peak for precision, peak in gpu.peak_flops.items()})
    else:
        gpu = replace(gpu, memory_bandwidth=factor * gpu.memory_bandwidth)
    return q._replace(cluster=replace(q.cluster, gpu=gpu))


def faster_host(q: Question, rng: random.Random) -> Question:
    return q._replace(cluster=replace(q.cluster, host_bandwidth=rng.choice([1.1, 3.0]) * q.cluster.host_bandwidth))


def more_memory(q: Question, rng: random.Random) -> Question:
    return q._replace(limit=replace(q.limit, limit=int(q.limit.limit * rng.choice([1.001, 1.05, 1.2, 1.5, 3.0]))))


def fewer_capabilities(capabilities: Capabilities, rng: random.Random) -> Capabilities:
    """Without one thing that the engine has."""
    zero = rng.choice(capabilities.zero_stages)
    mode = rng.choice(capabilities.recompute[1:])
    axis = rng.choice(capabilities.axes)
    schedule = rng.choice([name for name in capabilities.schedules if name != "1f1b"] or ["1f1b"])
    changes: list[dict[str, Any]] = [
        {"recompute": tuple(other for other in capabilities.recompute if other != mode)},
        {"axes": tuple(other for other in capabilities.axes if other not in {axis, "vpp" if axis == "pp" else axis})},
        {
            "zero_stages": tuple(stage for stage in capabilities.zero_stages if stage != zero),
            "zero_stages_with_pipeline": tuple(stage for stage in capabilities.zero_stages_with_pipeline if stage != zero),
        },
        {"sequence_parallel": False},
        {"uneven_stages": False},
        {"offload_optimizer": False},
        {"zero_shard_groups": False},
        {"rank_orders": (RANK_ORDER,)},
        {"recompute_by_layer": ()},
        {"recompute_varies": "never", "recompute_by_layer": ()},
    ]
    if schedule != "1f1b":
        changes.append({"schedules": tuple(name for name in capabilities.schedules if name != schedule)})
    changes = [change for change in changes if any(getattr(capabilities, name) != value for name, value in change.items())]
    return replace(capabilities, **rng.choice(changes))


def an_extra_capability(q: Question, rng: random.Random) -> tuple[Question, Question]:
    """(with fewer, as it was)."""
    engines = list(q.engines)
    if len(engines) > 1 and rng.random() < 0.3:
        gone = rng.randrange(len(engines))
        rest = tuple(index for index in range(len(engines)) if index != gone)
        return q._replace(engines=tuple(engines[i] for i in rest), calibrations=tuple(q.calibrations[i] for i in rest)), q
    index = rng.randrange(len(engines))
    engines[index] = fewer_capabilities(engines[index][0], rng), engines[index][1]
    return q._replace(engines=tuple(engines)), q


def pinned(q: Question, rng: random.Random) -> tuple[Question, Question]:
    """(with a pin, as it was)."""
    pins: list[dict[str, Any]] = [
        *({axis: degree} for axis in ("tp", "pp", "dp") for degree in (1, 2, 4)),
        *({"zero_stage": stage} for stage in range(4)),
        *({"micro_batch_size": size} for size in (1, 2)),
        *({"recompute": mode} for mode in ("none", "selective", "mlp", "full")),
        *({"vpp": degree} for degree in (1, 2)),
        *({"rank_order": order} for order in ("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp")),
        *({name: flag} for name in ("sequence_parallel", "offload") for flag in (False, True)),
        *({"schedule": name} for name in ("1f1b", "interleaved", "deepspeed_1f1b")),
    ]
    return q._replace(pins=replace(q.pins, **rng.choice(pins))), q


LAWS = {
    "more memory": lambda q, rng: (q, more_memory(q, rng)),
    "a faster link": lambda q, rng: (q, faster_link(q, rng)),
    "a faster GPU": lambda q, rng: (q, faster_gpu(q, rng)),
    "a faster host": lambda q, rng: (q, faster_host(q, rng)),
    "an extra capability": an_extra_capability,
    "a free choice": pinned,
}
"""Each gives (less, more) for a question."""


def broken(seed: int) -> list[str]:
    """The laws that this seed's question breaks, with what it takes."""
    q = question(seed)
    before = q.seconds()
    found = []
    for name, law in LAWS.items():
        less, more = law(q, random.Random(f"{seed} {name}"))
        slow, fast = (before if side is q else side.seconds() for side in (less, more))
        if fast > slow * (1 + SLACK):
            found.append(f"seed {seed}: {name} takes {fast} s, without it {slow} s")
    return found


@pytest.mark.parametrize("seed", SEEDS)
def test_what_can_only_help_is_never_slower(seed: int) -> None:
    """More memory; a faster link, GPU or host; a capability or an engine more; a choice that is not pinned."""
    assert not broken(seed)


@pytest.mark.full
@pytest.mark.parametrize("seed", MORE)
def test_what_can_only_help_is_never_slower_on_more_instances(seed: int) -> None:
    assert not broken(seed)


REACHED: dict[str, Callable[[Plan], bool]] = {
    **{f"engine={name}": lambda plan, name=name: plan.engine == name for name in ENGINES},  # type: ignore[misc]
    **{name: lambda plan, name=name: plan.model.family == name for name in ("gpt", "llama", "bert", "t5")},  # type: ignore[misc]
    "pp": lambda plan: plan.pp > 1,
    "tp": lambda plan: plan.tp > 1,
    "rank_order": lambda plan: plan.rank_order != RANK_ORDER,
    "DeepSpeed's pipeline": lambda plan: plan.schedule == "deepspeed_1f1b",
    "offload": lambda plan: plan.offload_optimizer,
    "modules recomputed": lambda plan: any(span.recompute not in ("none", "selective", "full") for _, span in plan.spans()),
}


def test_the_questions_reach_every_engine_and_axis() -> None:
    """The first 96; some have no plan. As many are asked as it takes, those first that reached most when this was written."""
    missing = {"no plan", *REACHED}
    for seed in (11, 2, 6, 9, 20, 8, *range(96)):
        plan = question(seed).plan()
        missing -= {"no plan"} if plan is None else {name for name, reached in REACHED.items() if reached(plan)}
        if not missing:
            return
    raise AssertionError(f"never reached: {missing}")
