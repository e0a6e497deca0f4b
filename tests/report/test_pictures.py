"""What is drawn: figures of report.html hold the plan's numbers, at places where they can be seen."""

from __future__ import annotations

import re
from functools import cache
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace
from report_plans import PLAN, PREDICTED, llama
from test_page_numbers import LIMIT, Costs, cells, outcomes, shown

import orchestrator as so
from orchestrator.planning import Planner
from orchestrator.report import page
from orchestrator.report.kept import Drawn, digest, drawn_in, element
from orchestrator.units import GIB

GLYPHS = ("Rect", "HBar", "VArea", "Line", "Scatter")


@cache
def small() -> tuple[page.Shown, Any]:
    """A pipeline of two stages with two ranks each."""
    answer = so.plan(recipe="gpt_tiny", gpus=4, cluster="cpu", engine="megatron", pin={"pp": 2, "tp": 2, "micro_batch_size": 2})
    costs = Planner(answer.settings).prices_of(answer.plan).costs(answer.plan)
    of = page.Shown(plan=answer.plan, model=llama(), limit=LIMIT, costs=costs)
    return of, costs.played(answer.plan.candidate, answer.plan.stages)


def columns(plot: Any, glyph: str) -> list[dict[str, list[Any]]]:
    """The data of each glyph of a kind."""
    return [
        {name: list(values) for name, values in one.data_source.data.items()} for one in plot.renderers if type(one.glyph).__name__ == glyph
    ]


def lines(plot: Any) -> list[float]:
    """Where the limits are drawn."""
    return [one.location for one in plot.center if type(one).__name__ == "Span"]


def test_every_rank_is_a_square_in_its_node_and_neighbours_of_a_tp_group_differ() -> None:
    (data,) = columns(page.rank_picture(PLAN), "Rect")
    assert [(int(x), int(y)) for x, y in zip(data["x"], data["y"], strict=True)] == [(rank % 8, rank // 8) for rank in range(64)]
    assert list(map(int, data["rank"])) == list(range(64))
    assert all(0 < alpha <= 1 for alpha in data["alpha"])
    assert all(data["alpha"][rank] != data["alpha"][rank + 1] for rank in range(64) if rank % 4 < 3), "tp is 4"
    colours = [data["colour"][rank] for rank in range(64)]
    assert [colours[16 * stage : 16 * stage + 16] for stage in range(4)] == [[colours[16 * stage]] * 16 for stage in range(4)]
    assert len({*colours}) == 4
    assert data["place"][0] == "tp 0, dp 0, pp 0"
    (one,) = columns(page.rank_picture(replace(PLAN, tp=1, pp=1, dp=1, world_size=1)), "Rect")
    assert one["place"] == ["the only one"]
    plot: Any = page.rank_picture(PLAN)
    assert (plot.y_range.start, plot.y_range.end) == (pytest.approx(7.6), pytest.approx(-0.6)), "eight nodes, the first above"
    assert plot.toolbar.logo is None
    (many,) = columns(page.rank_picture(replace(PLAN, tp=8, dp=128, world_size=4096)), "Rect")
    assert len(many["rank"]) == page.MOST_RANKS


def test_nodes_of_up_to_sixteen_ranks_are_numbered() -> None:
    for node, numbered in ((8, True), (16, True), (17, False)):
        plan = replace(PLAN, cluster=replace(PLAN.cluster, gpus_per_node=node))
        plot: Any = page.rank_picture(plan)
        assert (list(plot.xaxis[0].ticker.ticks) == list(range(node))) is numbered


def test_the_timeline_has_every_pass_in_its_lane() -> None:
    _, step = small()
    plot: Any = page.timeline_picture(step)
    drawn = columns(plot, "HBar")
    rows = [row for data in drawn for row in zip(data["y"], data["left"], data["right"], data["alpha"], strict=True)]
    slots = [(stage, slot.begin_s, slot.end_s) for stage, lane in enumerate(step.lanes) for slot in lane]
    found = sorted((int(y), float(left), float(right)) for y, left, right, _ in rows)
    for slot in slots:
        assert any(one[0] == slot[0] and one[1:] == pytest.approx(slot[1:], rel=1e-5, abs=1e-9) for one in found)
    assert all(0 < alpha <= 1 for *_, alpha in rows)
    assert (plot.x_range.start, plot.x_range.end) == (0, step.total_s)
    assert (plot.y_range.start, plot.y_range.end) == (pytest.approx(1.6), pytest.approx(-0.6))
    assert list(plot.yaxis[0].ticker.ticks) == [0, 1]
    assert {one.glyph.line_color for one in plot.renderers} == {"white"}
    assert {one.name for one in plot.renderers} >= {"forward", "backward"}


def test_chunks_of_a_stage_are_told_apart() -> None:
    slot = SimpleNamespace(action="forward", microbatch=0, begin_s=0.0, end_s=1.0)
    lane = [SimpleNamespace(**{**vars(slot), "chunk": chunk, "begin_s": float(chunk), "end_s": chunk + 1.0}) for chunk in range(4)]
    step: Any = SimpleNamespace(lanes=[lane], exposed_s=[0.0], optimizer_begin_s=4.0, optimizer_s=1.0, once_s=0.0, total_s=5.0)
    (forward, _) = columns(page.timeline_picture(step), "HBar")
    assert forward["alpha"] == [1.0, 0.5, 1.0, 0.5]
    assert forward["chunk"] == [0, 1, 2, 3]


def test_memory_is_stacked_by_cause_up_to_its_sum_under_the_limit() -> None:
    of, step = small()
    plot: Any = page.memory_picture(of, step)
    predicted = of.plan.predicted
    assert predicted is not None
    peaks = [stage.peak_memory_bytes / GIB for stage in predicted.by_stage]
    areas, curves = columns(plot, "VArea"), columns(plot, "Line")
    assert min(areas[0]["y1"]) == max(areas[0]["y1"]) == 0.0, "the lowest cause begins at nothing"
    for below, above in pairwise(areas):
        assert below["y2"] == above["y1"]
    assert curves[0]["y"] == areas[-1]["y2"]
    assert sorted(max(curve["y"]) for curve in curves) == pytest.approx(sorted(peaks), rel=1e-5)
    assert max(curves[0]["y"]) == pytest.approx(max(peaks), rel=1e-5), "the fullest"
    fullest = max(range(2), key=peaks.__getitem__)
    moments = page.moments(of, step, fullest)
    assert [float(time) for time in curves[0]["x"]] == pytest.approx([edge for begin, end, _ in moments for edge in (begin, end)], rel=1e-5)
    sums = [sum(causes.values()) / GIB for *_, causes in moments for _ in range(2)]
    assert [float(value) for value in curves[0]["y"]] == pytest.approx(sums, rel=1e-5), "as much at a pass's end as at its begin"
    assert lines(plot) == [of.limit.usable / GIB]
    assert plot.y_range.start == 0
    assert [one.name for one in plot.renderers if type(one.glyph).__name__ == "Line"] == [
        f"stage {fullest}, the fullest",
        f"stage {1 - fullest}",
    ]


def test_moments_are_thinned_to_what_is_drawn_and_the_fullest_of_neighbours_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    of, step = small()
    whole = page.moments(of, step, 0)
    monkeypatch.setattr(page, "MOST_MOMENTS", 10)
    thin = page.moments(of, step, 0)
    assert len(whole) > 10 >= len(thin) > 5
    size = -(-len(whole) // 10)
    assert len(thin) == -(-len(whole) // size)
    assert (thin[0][0], thin[-1][1]) == (whole[0][0], whole[-1][1])
    for index, (begin, end, causes) in enumerate(thin):
        group = whole[index * size : (index + 1) * size]
        assert (begin, end) == (group[0][0], group[-1][1])
        assert sum(causes.values()) == max(sum(other.values()) for *_, other in group)


def test_of_many_stages_every_eighth_part_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to 16 stages all are; of 32 every fourth, and the fullest."""
    monkeypatch.setattr(page, "moments", lambda shown, step, stage: [(0.0, 1.0, {"weights": float(stage + 1) * GIB})])
    for pp, drawn in ((16, range(16)), (17, (0, 2, 4, 6, 8, 10, 12, 14, 16)), (32, (*range(0, 32, 4), 31))):
        stages = tuple(replace(PREDICTED.by_stage[0], peak_memory_bytes=float(stage + 1)) for stage in range(pp))
        plot: Any = page.memory_picture(shown(replace(PLAN, pp=pp, predicted=replace(PREDICTED, by_stage=stages))), None)  # type: ignore[arg-type]
        heights = sorted(float(curve["y"][0]) - 1 for curve in columns(plot, "Line"))
        assert heights == list(map(float, drawn)), pp


def test_candidates_are_drawn_by_their_kind_over_gib_and_seconds() -> None:
    of = shown(outcomes=outcomes(), floor=lambda candidate: 33.0 * GIB)
    points = page.candidate_points(of)
    plot: Any = page.candidate_picture(points, of)
    drawn = columns(plot, "Scatter")
    kinds = ("priced", "slower", "lacks memory")
    assert [len(data["x"]) for data in drawn] == [sum(point[3] == kind for point in points) for kind in kinds]
    assert [float(x) for x in drawn[0]["x"]] == [70.0, 50.0]
    assert [float(y) for y in drawn[0]["y"]] == pytest.approx([12.0, 13.44])
    assert [float(x) for x in drawn[1]["x"]] == [33.0, 33.0]
    assert [one.glyph.fill_alpha > 0 for one in plot.renderers] == [True, False, False], "hollow: at least"
    assert drawn[0]["why"] == ["the plan", "12.0% slower"]
    assert lines(plot) == [LIMIT.usable / GIB]


def test_of_more_candidates_than_are_drawn_the_nearest_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three in all: of the bounded ones three, of those that lack memory a third of that."""
    monkeypatch.setattr(page, "MOST_POINTS", 3)
    many = [one for one in outcomes() for _ in range(4)]
    points = page.candidate_points(shown(outcomes=many, floor=lambda candidate: 33.0))
    assert [sum(point[3] == kind for point in points) for kind in ("priced", "slower", "lacks memory")] == [8, 3, 1]
    assert [point[1] for point in points if point[3] == "slower"] == [15.0] * 3
    assert Costs.time_floor(PLAN.candidate) == 5.0


def test_measured_steps_stand_beside_the_predicted_one() -> None:
    plot: Any = page.measured_picture([3.0, 2.0, 2.5], PLAN)
    (curve,) = columns(plot, "Line")
    assert (curve["x"], curve["y"]) == ([0, 1, 2], [3.0, 2.0, 2.5])
    assert lines(plot) == [PREDICTED.step_time_s]
    assert plot.y_range.start == 0


def test_a_cause_of_one_stage_alone_has_its_column() -> None:
    first, *rest = PREDICTED.by_stage
    more = replace(first, memory_by_cause=first.memory_by_cause | {"context": GIB})
    table = page.memory_table(shown(replace(PLAN, predicted=replace(PREDICTED, by_stage=(more, *rest)))))
    assert ">context<" in table
    assert ">context<" not in page.memory_table(shown())


# ---- the page


class Timed:
    """Costs of two stages: at most three micro-batches in flight on the first, two on the second."""

    @staticmethod
    def stage_memory(candidate: object, index: int) -> Any:
        return SimpleNamespace(flight=3 - index)


def played() -> Any:
    """A step of 10 s: 4 and 6 s at work, half a second of the first's reduction that nothing hides, an update of 1 s, .5 s once."""
    lanes = [[SimpleNamespace(begin_s=0.0, end_s=3.0), SimpleNamespace(begin_s=7.0, end_s=8.0)], [SimpleNamespace(begin_s=1.0, end_s=7.0)]]
    return SimpleNamespace(lanes=lanes, exposed_s=[0.5, 0.0], optimizer_begin_s=8.5, optimizer_s=1.0, once_s=0.5, total_s=10.0)


def test_each_stage_is_at_work_reduces_updates_or_waits() -> None:
    table = page.timeline_table(replace(shown(), costs=Timed()), played())  # type: ignore[arg-type]
    assert cells(table) == [["0", "4 s", "4 s (40.0%)", "500 ms", "3"], ["1", "6 s", "2.5 s (25.0%)", "0 us", "2"]]
    assert "Passes end at 8.5 s, the optimizer takes 1 s, what each step has once (launches, tied weights) 500 ms, in all 10 s" in table
    assert "most micro-batches in flight" in table
    chunks = page.timeline_table(replace(shown(replace(PLAN, vpp=2)), costs=Timed()), played())  # type: ignore[arg-type]
    assert "most chunks of micro-batches in flight" in chunks
    heads = re.findall(r'<th scope="col"( class="number")?>', table)
    assert [bool(mark) for mark in heads] == [False, True, True, True, True]
    full = played()
    full.exposed_s = [5.5, 0.0]
    assert cells(page.timeline_table(replace(shown(), costs=Timed()), full))[0][2] == "none", "rounding is no bubble"  # type: ignore[arg-type]


def test_a_page_has_its_candidates_and_its_measured_steps_where_there_are_some() -> None:
    of, _ = small()
    drawn = Drawn(plan="x", total=1, points=(("a", 1.0, 2.0 * GIB, "priced", "the plan"),), ruled=())
    bare, whole = page.report_html(of), page.report_html(replace(of, rows=[{"step": 0, "step_time_s": 1.0}] * 9, drawn=drawn))
    for text, more in ((bare, 0), (whole, 2)):
        assert text.startswith("<!doctype html>")
        assert text.endswith("</main></body></html>\n")
        assert text.count("<section>") == 4 + more
        for word in ("All candidates", "Predicted and measured", 'aria-label="Seconds of each step"'):
            assert (word in text) is bool(more), word


def test_what_a_page_keeps_is_read_back_for_its_own_plan_and_price() -> None:
    drawn = Drawn(plan=digest(PLAN), total=7, points=(("a</script>", 1.0, 2.0, "priced", "why"),), ruled=(("megatron", "r", 2),))
    kept = f"<html>{element(drawn)}</html>"
    assert drawn_in(kept, PLAN) == drawn
    other = replace(PLAN, predicted=replace(PREDICTED, step_time_s=11.0))
    assert digest(other) != digest(PLAN) != digest(replace(PLAN, engine="deepspeed"))
    assert digest(PLAN) == digest(replace(PLAN, calibration="another word"))
    assert drawn_in(kept, other) is None
    assert drawn_in("<html></html>", PLAN) is None
    broken = element(drawn).replace('candidates">', 'candidates">!!')
    assert drawn_in(broken, PLAN) is None
    assert drawn_in('<script type="application/octet-stream" id="candidates">aGVsbG8=</script>', PLAN) is None
