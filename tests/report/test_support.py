"""What an engine is said to do with an axis: the first reason against it, or none where one of the axis's choices is legal somewhere."""

from __future__ import annotations

from typing import Any

import pytest
import support_table as table
from msgspec.structs import replace
from report_plans import CLUSTER, PLAN, TRAINING, llama
from support_table import AXES, FILES, candidate, markdown, refusal

from orchestrator.engines import ENGINES
from orchestrator.strategy.capabilities import Capabilities
from orchestrator.strategy.workload import Workload

NODE = replace(CLUSTER, num_gpus=8)
WORKLOAD = Workload(model=llama(), training=TRAINING, cluster=NODE)
BY_NAME = {axis.name: axis for axis in AXES}
MEGATRON = ENGINES["megatron"].capabilities(NODE.software)


def why(axis: str, **changes: Any) -> tuple[str, str] | None:
    return refusal(replace(MEGATRON, **changes), BY_NAME[axis], [WORKLOAD])


def test_ranks_that_no_axis_takes_are_data_parallel() -> None:
    found = candidate("megatron", 8, 64, {"tp": 2, "pp": 2, "vpp": 2, "schedule": "interleaved"})
    assert (found.mesh.tp, found.mesh.pp, found.mesh.dp, found.vpp) == (2, 2, 2, 2)
    assert (found.micro_batch_size, found.num_microbatches, found.strategy.zero_stage) == (1, 32, 1)
    assert candidate("megatron", 8, 64, {"ep": 4}).mesh.dp == 8, "expert parallelism divides ranks that are there already"
    assert candidate("megatron", 8, 64, {"zero_stage": 0}).strategy.zero_stage == 0


@pytest.mark.parametrize(
    "axis", ["tp", "tp with sequence parallelism", "pp, megatron-core's 1F1B", "pp, interleaved (vpp)", "uneven stages"]
)
def test_what_an_engine_has_is_not_refused(axis: str) -> None:
    assert why(axis) is None


def test_a_schedule_that_an_engine_lacks_is_said_with_those_that_it_has() -> None:
    assert why("pp, interleaved (vpp)", schedules=("1f1b",)) == ("schedules", "megatron has the schedules 1f1b")
    assert why("tp", schedules=("1f1b",)) is None
    assert why("pp, DeepSpeed's PipelineModule") == ("schedules", f"megatron has the schedules {', '.join(MEGATRON.schedules)}")


def test_what_no_candidate_says_is_asked_of_the_capabilities() -> None:
    assert why("uneven stages", uneven_stages=False) == ("capabilities", "megatron has no uneven stages")
    assert why("recompute that differs by stage", recompute_varies="never") == (
        "capabilities",
        "megatron has no recompute that differs by stage",
    )


def test_one_workload_in_which_it_is_legal_is_enough_and_else_the_first_reason_counts() -> None:
    odd = replace(WORKLOAD, training=replace(TRAINING, global_batch_size=3))
    assert refusal(MEGATRON, BY_NAME["tp"], [odd, WORKLOAD]) is None
    first = refusal(MEGATRON, BY_NAME["tp"], [odd])
    assert first is not None
    assert first[0] != "unsuited"
    assert refusal(MEGATRON, BY_NAME["tp"], [odd, odd]) == first
    never: Capabilities = replace(MEGATRON, tasks=())
    assert (refusal(never, BY_NAME["tp"], [WORKLOAD]) or ("",))[0] == "unsuited"


def test_a_cell_names_the_shortest_test_that_trained_it() -> None:
    text = markdown(
        [MEGATRON], {"llama": [WORKLOAD], "gpt": [WORKLOAD]}, {"a long name": PLAN, "short": PLAN, "of another": replace(PLAN, engine="x")}
    )
    rows = {
        cells[1].strip(): [cell.strip() for cell in cells[2:-1]]
        for cells in (line.split("|") for line in text.splitlines())
        if len(cells) > 3
    }
    assert rows["tp"] == ["trains exactly (`short`)", f"{FILES} (trained with llama)"]
    assert rows["cp"] == [f"{FILES} (no training has it)"] * 2
    assert rows["pp, DeepSpeed's PipelineModule"] == ["refused because schedules"] * 2
    assert text.endswith(".\n")
    assert "*schedules*: megatron has the schedules" in text


def test_a_plans_recompute_is_that_of_its_layers_whatever_stands_at_the_ends() -> None:
    """Four of the first stage's layers in full, its embedding and the last one's head in none."""
    assert table._modes(PLAN) == [("full",) * 4 + ("none",) * 16, *[("none",) * 20] * 3]
    assert table._recomputes("selective", "full")(PLAN)
    assert not table._recomputes("selective")(PLAN)
    assert table._sizes(PLAN) == [20] * 4
