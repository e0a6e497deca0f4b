"""What is said after a run, of rows made by hand: a pipeline of two stages with two ranks each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from orchestrator import recipe
from orchestrator.detect import Machine
from orchestrator.engines import ENGINES
from orchestrator.hardware.catalog import GPUS
from orchestrator.pictures import SUGGESTED, after_lines
from orchestrator.planning import Planner
from orchestrator.report import after
from orchestrator.report.text import as_text
from orchestrator.search.planner import reprice
from orchestrator.units import GIB

SETTINGS = recipe.load(
    ["recipe=gpt_tiny", "gpus=4", "cluster=cpu", "engine=megatron", "pin.tp=2", "pin.pp=2", "calibration=datasheet"], Machine(), [*ENGINES]
)
PLAN = Planner(SETTINGS).fastest().plan
COST = Planner(SETTINGS).prices_for(PLAN.engine).costs(PLAN)


def group(step: int, ranks: tuple[int, ...], operation: str, seconds: float, waiting: float = 0.0) -> dict[str, Any]:
    return {"step": step, "phase": "passes", "ranks": ranks, "operation": operation, "count": 10, "bytes": 10 * 2**19,
            "transfer_s": seconds, "waiting_s": waiting}  # fmt: skip


def rows(compute: dict[int, float] | None = None, links: dict[tuple[int, ...], float] | None = None) -> list[dict[str, Any]]:
    """Of ranks that compute 100 ms in a step of 200, or as `compute` says, and wait for the rest; groups with 10 ms of transfers each."""
    found = []
    for rank in range(4):
        own = (compute or {}).get(rank, 0.1)
        near, far = ((0, 1) if rank < 2 else (2, 3)), (rank % 2, rank % 2 + 2)
        tp, pp = ((links or {}).get(pair, 0.01) for pair in (near, far))
        traffic = [
            one
            for step in range(2)
            for one in (group(step, near, "all_reduce", tp), group(step, far, "p2p", pp, 0.5 - own - tp - pp - 0.02))
        ]
        phases = [{"data": 0.01, "passes": 0.48, "update": 0.01, "agree": 0.0}] * 2
        found.append({"rank": rank, "host": f"n{rank // 2}", "steps": [4, 5], "microbatches": 4, "peak_memory_bytes": 0,
                      "phases": phases, "traffic": traffic})  # fmt: skip
    return found


def said(*given: Any) -> after.After:
    found = after.after(PLAN, COST, after.read(rows(*given)))
    assert found is not None
    return found


def test_the_step_is_divided_by_cause() -> None:
    found = said()
    measured = {name: pair[1] for name, pair in found.causes.items()}
    wanted = {"compute": 0.1, "tp": 0.01, "pp": 0.01, "waiting": 0.36, "optimizer": 0.01, "data": 0.01}
    assert measured == pytest.approx(wanted)
    assert sum(measured.values()) == pytest.approx(0.5)
    assert PLAN.predicted is not None
    assert sum(pair[0] for pair in found.causes.values()) == pytest.approx(PLAN.predicted.step_time_s)
    lines = found.lines()
    assert "measured 500 ms (steps 4 and 5, timers of 4 ranks); most by bubble, waiting +" in lines[0]
    assert lines[1:] == ["no rank and no link stands out"]
    assert "bubble, waiting" in as_text(after.after_table(found))


def test_a_bubble_that_is_rounding_is_none() -> None:
    """The predicted bubble is what the other causes leave of the step: 2e-16 s was printed as "2.22e-10 us"."""
    assert PLAN.predicted is not None
    for bubble, waiting in ((2.2e-16, 0.0), (-2.2e-16, 0.0), (1e-3, 1e-3)):
        plan = replace(PLAN, predicted=replace(PLAN.predicted, by_cause=PLAN.predicted.by_cause | {"bubble": bubble}))
        assert after.predicted_causes(plan, 0.0)["waiting"] == waiting


def test_a_rank_that_computes_longer_than_its_like_is_named_with_its_node() -> None:
    found = said({3: 0.4})
    assert found.lines()[1:] == [
        "slow rank: rank 3 on n1 computes 4.0 times as long as its like, 300 ms more in each step; the others wait for it"
    ]
    assert not found.constants


def test_a_rank_that_is_slow_in_one_step_alone_is_not_named() -> None:
    given = rows({3: 0.4})
    for one in given[3]["traffic"]:
        if one["step"] == 1 and one["operation"] == "p2p":
            one["waiting_s"] += 0.3
    found = after.after(PLAN, COST, after.read(given))
    assert found is not None
    assert not found.slow_ranks


def test_a_link_that_takes_longer_than_the_others_of_its_axis_is_named() -> None:
    found = said(None, {(0, 1): 0.1})
    (line,) = found.lines()[1:]
    assert line == "slow link: tp traffic between ranks 0 and 1 on n0 takes 10.0 times as long as others', 90 ms more in each step"


def test_what_a_run_suggests_predicts_its_computing_and_traffic() -> None:
    found = said()
    file = after.calibration_file(PLAN, COST, found)
    again = reprice(PLAN, COST.traits, file.calibration(COST.calibration))
    assert again.predicted is not None
    other = after.predicted_causes(again, COST.calibration.step_overhead_s)
    alone = sum(after.alone_seconds(again, COST, stage) for stage in range(2)) * PLAN.num_microbatches / 2
    factor = 0.1 / alone  # measured over predicted computing of all ranks
    assert other["compute"] == pytest.approx(found.causes["compute"][0] * factor, rel=0.02)
    assert found.suggests().startswith("gemm_efficiency ")
    assert after.SAID[0] in found.constants


@pytest.mark.parametrize("update", [0.012, 0.03])
def test_what_a_run_suggests_predicts_its_update(update: float) -> None:
    """The step's fixed 10 ms stay; what is left is the optimizer's memory traffic, at the share of memory speed that it then has."""
    given = rows()
    for row in given:
        row["phases"] = [phases | {"update": update} for phases in row["phases"]]
    found = after.after(PLAN, COST, after.read(given))
    assert found is not None
    was, now = found.constants["optimizer_efficiency"]
    fixed = COST.calibration.step_overhead_s
    assert now == pytest.approx(was * (found.causes["optimizer"][0] - fixed) / (update - fixed), rel=1e-5)
    again = reprice(PLAN, COST.traits, after.calibration_file(PLAN, COST, found).calibration(COST.calibration))
    assert after.predicted_causes(again, fixed)["optimizer"] == pytest.approx(update, rel=0.02)


def test_an_update_of_the_fixed_seconds_or_less_suggests_nothing_of_it() -> None:
    assert "optimizer_efficiency" not in said().constants


def test_axes_are_told_by_the_ranks_that_a_group_joins() -> None:
    wide = replace(PLAN, tp=1, pp=2, dp=2, world_size=4)

    def axis(ranks: Any, operation: str = "all_reduce") -> str:
        return after.axis_of(wide, after.read([rows()[0] | {"traffic": [group(0, ranks, operation, 0.01)]}])[0].traffic[0])

    assert [axis((0, 1)), axis((0, 2)), axis((2, 0), "p2p"), axis((0, 1, 2, 3))] == ["dp", "pp", "pp", "other"]
    assert axis({"first": 0, "size": 4, "stride": 1}) == "other"


def test_rows_of_some_ranks_alone_say_nothing() -> None:
    assert after.after(PLAN, COST, after.read(rows()[:3])) is None
    assert after.after(PLAN, COST, ()) is None


@pytest.mark.parametrize(("own", "named"), [(0.24, False), (0.26, True)])
def test_ranks_that_share_cores_are_slow_from_two_and_a_half_times_their_like(own: float, named: bool) -> None:
    """A rank computes `own` seconds where the others take 0.1."""
    assert bool(said({3: own}).slow_ranks) is named


@pytest.mark.parametrize(("own", "named"), [(0.14, False), (0.16, True)])
def test_gpus_are_slow_from_one_and_a_half_times_their_like(own: float, named: bool) -> None:
    on_gpus = replace(PLAN, cluster=replace(PLAN.cluster, gpu=GPUS["A100-SXM-80GB"]))
    (found,) = [after.slow_ranks(on_gpus, after.read(rows({3: own})))]
    assert [one.ranks for one in found] == ([(3,)] if named else [])
    for one in found:
        assert one.times == pytest.approx(own / 0.1)
        assert one.extra_s == pytest.approx(own - 0.1)


def test_a_slow_rank_that_hardly_costs_the_step_anything_is_not_named() -> None:
    """Three times 5 ms: 10 of 500 ms, below a twentieth; three times 15 ms: 30."""
    assert not said(dict.fromkeys(range(3), 0.005) | {3: 0.015}).slow_ranks
    assert [one.ranks for one in said(dict.fromkeys(range(3), 0.015) | {3: 0.045}).slow_ranks] == [(3,)]


def test_one_rank_alone_has_none_to_be_compared_with() -> None:
    assert after.slow_ranks(PLAN, after.read(rows({0: 0.4})[:1])) == []


def test_ranks_of_different_stages_are_compared_by_the_work_that_was_predicted_of_them() -> None:
    """The second stage has three times the work: three times as long is as it should be, and six times is twice that."""
    assert PLAN.predicted is not None
    first, second = PLAN.predicted.by_stage
    stages = (replace(first, forward_s=1.0, backward_s=3.0), replace(second, forward_s=6.0, backward_s=6.0))
    alone = replace(PLAN, tp=1, world_size=2, predicted=replace(PLAN.predicted, by_stage=stages))
    on_gpus = replace(alone, cluster=replace(PLAN.cluster, gpu=GPUS["A100-SXM-80GB"]))

    def named(second: float) -> list[after.Standing]:
        given = [row | {"rank": stage, "traffic": []} for stage, row in enumerate(rows()[:2])]
        for row, own in zip(given, (0.05, second), strict=True):
            row["phases"] = [{"passes": own, "update": 0.01}] * 2
        return after.slow_ranks(on_gpus, after.read(given))

    assert named(0.15) == []
    (one,) = named(0.30)
    assert (one.ranks, one.times, one.extra_s) == ((1,), pytest.approx(2.0), pytest.approx(0.15))
    assert [one.ranks for one in named(0.05)] == [(0,)], "a third of what it should take: the other one is slow by as much"


def test_a_link_that_is_slow_in_one_step_alone_is_not_named() -> None:
    given = rows(None, {(0, 1): 0.1})
    for row in given[:2]:
        for one in row["traffic"]:
            if one["step"] == 1 and one["operation"] == "all_reduce":
                one["transfer_s"] = 0.01
    found = after.after(PLAN, COST, after.read(given))
    assert found is not None
    assert not found.slow_links


def test_a_link_that_costs_much_in_both_steps_is_named_only_if_it_is_slow_in_both() -> None:
    """Five times what its like takes in one step, and 1.7 times in the other, which costs 40 of 500 ms there."""
    given = rows(None, dict.fromkeys([(0, 2), (1, 3), (2, 3)], 0.06) | {(0, 1): 0.3})
    assert [one.ranks for one in after.slow_links(PLAN, COST, after.read(given))] == [(0, 1)]
    for row in given[:2]:
        for one in row["traffic"]:
            if one["step"] == 1 and one["operation"] == "all_reduce":
                one["transfer_s"] = 0.1
    assert after.slow_links(PLAN, COST, after.read(given)) == []


def test_a_link_whose_like_took_no_time_is_not_slow() -> None:
    on_gpus = replace(PLAN, cluster=replace(PLAN.cluster, gpu=GPUS["A100-SXM-80GB"]))
    none = dict.fromkeys([(0, 2), (1, 3), (2, 3)], 0.0)
    assert after.slow_links(on_gpus, COST, after.read(rows(None, none | {(0, 1): 0.1}))) == []


def test_ranks_are_compared_with_those_of_their_own_stage() -> None:
    """Both ranks of the second stage take twice as long as those of the first, for the same predicted work: none of them stands out."""
    assert PLAN.predicted is not None
    alike = replace(PLAN, predicted=replace(PLAN.predicted, by_stage=(PLAN.predicted.by_stage[0],) * 2))
    on_gpus = replace(alike, cluster=replace(PLAN.cluster, gpu=GPUS["A100-SXM-80GB"]))
    assert after.slow_ranks(on_gpus, after.read(rows({2: 0.2, 3: 0.2}))) == []
    assert [one.ranks for one in after.slow_ranks(on_gpus, after.read(rows({2: 0.2, 3: 0.4})))] == [(3,)]


def test_a_rank_is_slow_from_the_bound_on() -> None:
    """1.5 times 1/2 s, which is 1/4 of a step of 5 s and so just a twentieth of it; in numbers that floating point has exactly."""
    on_gpus = replace(PLAN, cluster=replace(PLAN.cluster, gpu=GPUS["A100-SXM-80GB"]))

    def named(own: float, step: float) -> list[tuple[int, ...]]:
        given = [row | {"traffic": [], "phases": [{"passes": 0.5, "update": step - 0.5}] * 2} for row in rows()]
        given[3]["phases"] = [{"passes": own, "update": step - own}] * 2
        return [one.ranks for one in after.slow_ranks(on_gpus, after.read(given))]

    assert named(0.75, 4.0) == [(3,)]
    assert named(0.75, 5.0) == [(3,)]
    assert named(0.75, 5.25) == named(0.74, 4.0) == []


def test_groups_over_data_and_sequences_reduce_gradients_and_experts_travel_in_passes() -> None:
    """Ranks of tp 2, cp 2, dp 2: 0 and 1 are of one tp group, 0 and 2 of one cp group, 0 and 4 of one dp group."""
    wide = replace(PLAN, tp=2, cp=2, dp=2, pp=1, ep=1, world_size=8)

    def axis(plan: Any, ranks: tuple[int, ...], operation: str = "all_reduce", phase: str = "passes") -> str:
        one = group(0, ranks, operation, 0.01) | {"phase": phase}
        return after.axis_of(plan, after.read([rows()[0] | {"traffic": [one]}])[0].traffic[0])

    assert [axis(wide, ranks) for ranks in ((0, 1), (0, 2), (0, 4), (0, 2, 4, 6), (0, 1, 4, 5))] == ["tp", "cp", "dp", "dp", "other"]
    assert axis(wide, (0,)) == "other"
    experts = replace(wide, ep=2)
    assert axis(experts, (0, 1), "all_to_all") == axis(experts, (0, 1, 2, 3)) == "ep"
    assert axis(experts, (0, 1)) == "tp", "a sum over tp is not of experts"
    assert axis(experts, (0, 2), "all_to_all", "update") == "cp"
    assert axis(wide, (0, 1), "all_to_all") == "tp", "without experts there is nothing of theirs"


def test_constants_of_a_file_have_their_units() -> None:
    constants = {"gemm_efficiency": 0.5, "op_overhead_s": 1e-6, "latency_factor": 2.0}
    file = after.file_of(PLAN, COST, constants, "a run", runs=3)
    assert {name: one.unit for name, one in file.constants.items()} == {
        "gemm_efficiency": "share", "op_overhead_s": "s", "latency_factor": "ratio",
    }  # fmt: skip
    assert (file.fitted_runs, file.held_out_runs, file.fitted_median_error, file.held_out_median_error) == (3, 0, 0.0, None)
    assert after.own_constants(COST) == {}, "datasheet's"
    scaled = after._scaled(COST, ("gemm_efficiency",), ("op_overhead_s",), 0.5)
    assert scaled["op_overhead_s"] == pytest.approx(COST.calibration.op_overhead_s / 2)
    assert COST.cluster.is_cpu
    assert scaled["gemm_efficiency"] == 2 * COST.calibration.gemm_efficiency > 1, "the catalogue's CPU is no fast one"


def test_a_slow_link_that_hardly_costs_the_step_anything_is_not_named() -> None:
    """Ten times 2 ms is 18 of 500 ms, below a twentieth; ten times 3 ms is 27."""
    for usual, named in ((0.002, []), (0.003, [(0, 1)])):
        links = dict.fromkeys([(0, 2), (1, 3), (2, 3)], usual) | {(0, 1): 10 * usual}
        assert [one.ranks for one in said(None, links).slow_links] == named


def test_of_two_slow_links_the_dearer_stands_first() -> None:
    found = said(None, {(0, 1): 0.1, (0, 2): 0.15})
    assert [one.ranks for one in found.slow_links] == [(0, 2), (0, 1)]
    assert [one.axis for one in found.slow_links] == ["pp", "tp"]
    assert [one.extra_s for one in found.slow_links] == pytest.approx([0.14, 0.09])
    assert not found.constants, "what stands out is not to be learned"


def test_a_groups_transfers_count_once_however_many_ranks_tell_of_them() -> None:
    """Eight ranks in one group, evenly apart, of which each says 1 s; on a GPU's link it should take far less."""
    ranks = {"first": 0, "size": 4, "stride": 1}
    alone = replace(PLAN, tp=4, pp=1, cluster=replace(PLAN.cluster, gpu=GPUS["A100-SXM-80GB"]))
    given = rows()
    for row in given:
        row["traffic"] = [{**group(step, (), "all_reduce", 1.0), "ranks": ranks} for step in range(2)]
    read = after.read(given)
    (one,) = after.slow_links(alone, COST, read)
    assert (one.axis, one.ranks, one.hosts) == ("tp", (0, 1, 2, 3), ("n0", "n1"))
    priced = after.priced_seconds(COST, read[0].traffic[0])
    assert priced is not None
    assert one.times == pytest.approx(1.0 / priced)
    assert one.extra_s == pytest.approx(1.0 - priced)
    assert not after.slow_links(replace(alone, cluster=PLAN.cluster), COST, read), "on shared cores prices of traffic are not so sure"


def test_ranks_evenly_apart_are_those() -> None:
    assert after.read([rows()[0] | {"traffic": [{**group(0, (), "all_reduce", 1.0), "ranks": {"first": 3, "size": 3, "stride": 2}}]}])[
        0
    ].traffic[0].members == (3, 5, 7)


def test_a_long_group_is_named_by_its_first_eight_ranks() -> None:
    one = after.Standing(axis="dp", ranks=tuple(range(8)), hosts=("a", "b"), times=2.0, extra_s=0.5)
    assert "between ranks 0, 1, 2, 3, 4, 5, 6, 7 on a, b takes 2.0 times" in one.said()
    assert "ranks 0, 1, 2, 3, 4, 5, 6, 7, ... on" in replace(one, ranks=tuple(range(9))).said()
    assert "ranks 0, 1, 2 on" in replace(one, ranks=(0, 1, 2)).said()


def test_what_held_a_rank_up_is_not_its_own_and_never_more_than_the_phase() -> None:
    (row, *_) = after.read(rows())
    assert row.held(0, "passes") == pytest.approx(0.38)
    assert row.own(0, "passes") == pytest.approx(0.1)
    assert row.own(0, "update") == 0.01
    assert row.own(0, "no such phase") == 0.0
    late = replace(row, phases=({"passes": 0.2}, {"passes": 0.2}))
    assert late.own(0, "passes") == 0.0
    assert row.step_s(1) == pytest.approx(0.5)


def test_the_causes_that_are_named_are_the_three_largest_and_worth_a_twentieth() -> None:
    causes = {"compute": (1.0, 1.5), "tp": (0.5, 0.2), "dp": (0.1, 0.2), "pp": (0.2, 0.04), "data": (0.0, 0.06)}
    constants = {"gemm_efficiency": (0.5, 0.4), "p2p_efficiency": (1.0, 0.5)}
    one = after.After(steps=(4,), ranks=1, causes=causes, slow_ranks=(), slow_links=(), constants=constants)
    why = "most by compute +500 ms, tp traffic -300 ms, pp traffic -160 ms"
    assert one.lines() == [f"predicted 1.8 s, measured 2 s (step 4, timers of 1 rank); {why}"]
    assert one.suggests() == "gemm_efficiency 0.4 in place of 0.5"
    near = replace(one, causes={"compute": (1.0, 1.04)})
    assert near.lines()[0].endswith("timers of 1 rank)")
    assert near.suggests() == ""
    assert replace(one, causes={"compute": (1.0, 0.9)}).suggests()
    assert replace(one, steps=(4, 5), ranks=2).lines()[0].startswith("predicted 1.8 s, measured 2 s (steps 4 and 5, timers of 2 ranks)")
    assert replace(one, ranks=2).lines()[1:] == ["no rank and no link stands out"]


def test_differences_of_the_table_have_their_sign() -> None:
    found = replace(said(), causes={"compute": (1.0, 1.5), "tp": (0.5, 0.0), "data": (0.0, 0.1)})
    text = [" ".join(line.split()) for line in as_text(after.after_table(found)).splitlines()]
    assert "compute 1 s 1.5 s +500 ms" in text
    assert "tp traffic 500 ms - -500 ms" in text
    assert "data - 100 ms +100 ms" in text


@pytest.mark.parametrize(
    ("steps", "why"),
    [
        ([9.0, 9.0, *[1.2] * 12], ""),
        ([9.0, 9.0, *[1.2] * 9], "2 steps were timed of 8 after warm-up, and 10 are needed to know what is usual"),
        ([9.0, 9.0, *[0.9] * 12], "the 2 timed steps took 1.2 s, the run's 900 ms"),
    ],
)
def test_constants_are_suggested_where_the_timed_steps_are_as_the_runs_are(steps: list[float], why: str, tmp_path: Path) -> None:
    settings = recipe.load(["recipe=gpt_tiny", "gpus=1", "cluster=cpu"], Machine(host_memory=64 * GIB), list(ENGINES))
    plan = Planner(settings).fastest().plan
    causes, constants = {"compute": (1.0, 1.2)}, {"gemm_efficiency": (0.5, 0.4)}
    found = after.After(steps=(4, 5), ranks=1, causes=causes, slow_ranks=(), slow_links=(), constants=constants)
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {n}, "step_time_s": {s}}}\n' for n, s in enumerate(steps, 1)))
    last = after_lines(settings, plan, tmp_path, found)[-1]
    assert (tmp_path / SUGGESTED).exists() == (not why)
    assert last.startswith(
        "it suggests gemm_efficiency 0.4 in place of 0.5: calibration=" if not why else f"it suggests no constants: {why}"
    )
