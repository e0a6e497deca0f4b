"""What the user chooses of an engine's ways is kept through the search, priced, checked, and refused where it can't be."""

from __future__ import annotations

from typing import Any

import pytest
from hand_plans import LLAMA3_8B, cluster
from msgspec.structs import replace

from orchestrator.cost.calibration import Calibration
from orchestrator.engines import ENGINES
from orchestrator.errors import InputError, NoPlanError
from orchestrator.model.families import describe
from orchestrator.model.training import Training
from orchestrator.plan import Plan, from_json, to_json
from orchestrator.plan.check import check_fits, check_plan
from orchestrator.search.planner import search
from orchestrator.search.question import PlannedEngine, SearchSettings
from orchestrator.strategy.pins import MemoryLimit, Pins
from orchestrator.strategy.spec import option_words
from orchestrator.strategy.workload import Workload
from orchestrator.units import GIB

MEGATRON = ENGINES["megatron"]
CLUSTER = cluster(num_gpus=16)
CAPABILITIES = MEGATRON.capabilities(CLUSTER.software)
PLANNED = PlannedEngine(capabilities=CAPABILITIES, traits=MEGATRON.traits(CLUSTER.software), calibration=Calibration())
LIMIT = MemoryLimit(limit=79 * GIB, reserve=4 * GIB)


def planned(*, limit: MemoryLimit = LIMIT, training: dict[str, Any] | None = None, **pins: Any) -> Plan:
    batch = Training(**{"global_batch_size": 32, "seq_length": 8192, **(training or {})})
    model = describe(LLAMA3_8B, batch.seq_length, None)
    workload = Workload(model=model, training=batch, cluster=CLUSTER)
    found = search(workload, [PLANNED], SearchSettings(pins=Pins(**pins), limit=limit, top_k=1)).plan
    check_plan(found, CAPABILITIES)
    check_fits(found, limit)
    return found


def seconds(plan: Plan) -> float:
    assert plan.predicted is not None
    return plan.predicted.step_time_s


def test_nothing_of_it_is_chosen_unasked() -> None:
    assert option_words(planned()) == []


@pytest.mark.parametrize(
    ("pins", "holds"),
    [
        ({"tp_comm_overlap": True}, lambda plan: plan.sequence_parallel and 1 < plan.tp <= 8),
        ({"cuda_graph_impl": "local"}, lambda plan: plan.strategy.recompute != "full"),
        ({"megatron_fsdp": True}, lambda plan: plan.zero_stage in (2, 3) and plan.pp == 1),
        ({"megatron_fsdp": True, "zero_stage": 3}, lambda plan: plan.zero_stage == 3),
        ({"zero_shard_size": 8}, lambda plan: plan.zero_stage == 1 and plan.dp * plan.cp > 8),
        ({"cp": 2, "cp_comm_type": "a2a"}, lambda plan: plan.tp * 2 <= 8),
        ({"reduce_scatter_with_fp32_accumulation": True}, lambda plan: plan.zero_stage == 1 and plan.zero_shard_size is None),
        ({"microbatch_group_size_per_vp_stage": 5}, lambda plan: plan.vpp > 1 and plan.pp <= 5),
        ({"overlap_grad_reduce": False}, lambda plan: not plan.strategy.overlap_grad_reduce),
        ({"recompute": "mlp"}, lambda plan: {span.recompute for _, span in plan.spans() if span.kind == "decoder"} == {"mlp"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_a_pinned_option_is_the_plans(pins: dict[str, Any], holds: Any) -> None:
    plan = planned(**pins)
    assert all(getattr(plan, name) == value for name, value in pins.items() if name != "recompute")
    assert holds(plan)
    assert from_json(to_json(plan)) == plan


def test_overlapping_tensor_parallel_traffic_makes_the_best_such_plan_faster() -> None:
    plain, hidden = (planned(tp=4, sequence_parallel=True, tp_comm_overlap=on) for on in (False, True))
    assert seconds(hidden) < seconds(plain)


def test_the_precision_aware_optimizer_makes_room() -> None:
    """Without sharding (dp=1) 8 bytes fewer a parameter with 16-bit moments."""
    pins: dict[str, Any] = {"tp": 8, "pp": 2, "dp": 1, "zero_stage": 1, "recompute": "none", "micro_batch_size": 1, "vpp": 1}
    narrow = {"precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
    peaks = [planned(training=training, **pins).predicted.peak_memory_bytes for training in ({}, narrow)]  # type: ignore[union-attr]
    assert peaks[0] - peaks[1] > 2 * 8e9 / 16


def test_where_nothing_fits_the_narrower_optimizer_is_proposed() -> None:
    pins: dict[str, Any] = {"tp": 8, "pp": 2, "zero_stage": 1, "recompute": "full", "micro_batch_size": 1, "vpp": 1}
    needed = planned(**pins, tp_comm_overlap=False).predicted.peak_memory_bytes  # type: ignore[union-attr]
    with pytest.raises(NoPlanError, match=r"train\.precision_aware_optimizer=true \(megatron tp=8 pp=2"):
        planned(limit=MemoryLimit(limit=int(needed * 0.95), reserve=0), tp=8, zero_stage=1, tp_comm_overlap=False)


def test_an_edited_plan_is_judged_by_the_same_rules() -> None:
    plan = planned(tp=1, pp=1)
    for change, key in (({"tp_comm_overlap": True}, "tp_comm_overlap"), ({"megatron_fsdp": True}, "zero_stage"), ({"zero_shard_size": 3},
                        "zero_shard_size"), ({"moe_token_dispatcher_type": "flex"}, "moe_token_dispatcher_type")):  # fmt: skip
        with pytest.raises(InputError, match=key):
            check_plan(replace(plan, **change), CAPABILITIES)
