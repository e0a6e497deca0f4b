"""How report.html sets its tables and marks its pictures: what a reader's eye goes by."""

from __future__ import annotations

import re
from typing import Any

import pytest
from msgspec.structs import replace
from report_plans import PLAN, SLOWER, llama

from orchestrator.cost.schedule.timeline import Slot
from orchestrator.cost.step import Played
from orchestrator.report import page
from orchestrator.report.after import After
from orchestrator.report.budget import budget
from orchestrator.report.kept import Drawn, digest
from orchestrator.report.trace import folded
from orchestrator.strategy.pins import MemoryLimit
from orchestrator.units import GIB

LIMIT = MemoryLimit(limit=80 * GIB, reserve=0)
QUANTITY = re.compile(r"(at least )?[+-]?[\d.,]+( ?(s|ms|us|GiB|MiB|B|%))?( \([\d.]+%\))?")
POINTS = (
    ("near", 12.0, 70.0 * GIB, "priced", "the plan"),
    ("far", 13.0, 50.0 * GIB, "priced", "8.3% slower"),
    ("slow", 20.0, 33.0 * GIB, "slower", "its bound"),
    ("large", 5.0, 95.0 * GIB, "lacks memory", "too large"),
)


def shown(**fields: Any) -> page.Shown:
    return page.Shown(plan=PLAN, model=llama(), costs=None, limit=LIMIT, **fields)  # type: ignore[arg-type]


AFTER = After(steps=(4,), ranks=1, causes={"compute": (1.0, 2.0)}, slow_ranks=(), slow_links=(), constants={})
ROWS = [{"step": step, "step_time_s": 15.0, "peak_memory_bytes": 77 * GIB} for step in range(9)]
TABLES = {
    "memory": lambda: page.memory_table(shown()),
    "causes": lambda: page.cause_table(PLAN),
    "ranks": lambda: page.rank_table(shown()),
    "candidates": lambda: page.candidates_section(Drawn(plan=digest(PLAN), total=9, points=POINTS, ruled=(("megatron", "heads", 3),)), ""),
    "measured": lambda: page.measured_section(shown(rows=ROWS, after=AFTER), None),
}


@pytest.mark.parametrize("name", TABLES)
def test_quantities_stand_under_each_other_on_the_right_and_words_on_the_left(name: str) -> None:
    """But for what a row is called by, in the first column."""
    text = TABLES[name]()
    found = 0
    for body in re.findall(r"<table>.*?</table>", text):
        heads = [("number" in marks) for marks in re.findall(r"<th( [^>]*)>", body)]
        for row in re.findall(r"<tr>(.*?)</tr>", body):
            for index, (marks, cell) in enumerate(re.findall(r"<td([^>]*)>(.*?)</td>", row)):
                right = "number" in marks
                assert right == (index > 0 and QUANTITY.fullmatch(cell) is not None), (name, cell)
                assert right == heads[index]
                found += 1
    assert found > 3


def glyphs(plot: Any) -> dict[str, Any]:
    return {one.name or one.glyph.name: one.glyph for one in plot.renderers}


def test_squares_of_ranks_are_apart_and_fill_most_of_the_place() -> None:
    (square,) = [one.glyph for one in page.rank_picture(PLAN).renderers]
    assert 0.8 < square.width < 1
    assert 0.8 < square.height < 1
    assert [page.rank_picture(replace(PLAN, world_size=n, dp=n // 16)).height for n in (16, 64, 128)] == sorted(
        {page.rank_picture(replace(PLAN, world_size=n, dp=n // 16)).height for n in (16, 64, 128)}
    ), "higher with each node"


def step(passes: int, stages: int, chunks: int = 1) -> Played:
    lane = [Slot("forward", n, n % chunks, float(n), n + 1.0) for n in range(passes)]
    return Played([lane] * stages, (0.0,) * stages, float(passes), 1.0, 0.0)


@pytest.mark.parametrize(("passes", "edge"), [(page.LINED, "white"), (page.LINED + 1, None)])
def test_many_bars_have_no_edges_that_would_hide_them(passes: int, edge: str | None) -> None:
    plot = page.timeline_picture(step(passes, 1))
    assert glyphs(plot)["forward"].line_color == edge
    assert plot.renderers[0].glyph.height < 1


def test_chunks_of_a_stage_are_told_apart_and_lanes_have_names_while_there_is_room() -> None:
    plot = page.timeline_picture(step(4, 3, chunks=2))
    alpha = list(plot.renderers[0].data_source.data["alpha"])[:4]
    assert alpha[0] == alpha[2] > alpha[1] == alpha[3] > 0.3
    assert plot.yaxis[0].ticker.ticks == [0, 1, 2]
    assert len(page.timeline_picture(step(1, 32)).yaxis[0].ticker.ticks) == 32
    assert len(page.timeline_picture(step(1, 33)).yaxis[0].ticker.ticks) == 0
    heights = [page.timeline_picture(step(1, stages)).height for stages in (1, 4, 16, 64)]
    assert heights == sorted(heights)
    assert 100 < heights[0] < heights[1]
    assert heights[3] <= 700, "no higher than a screen"


def test_what_is_known_by_a_bound_alone_is_hollow_and_small() -> None:
    plot = page.candidate_picture(POINTS, shown())
    marks = {one.data_source.data["name"][0]: one for one in plot.renderers}
    assert {*marks} == {"near", "slow", "large"}
    for name, one in marks.items():
        exact = name == "near"
        assert (one.glyph.fill_alpha > 0.5) == exact
        assert (one.glyph.fill_alpha == 0) != exact
    assert marks["near"].glyph.size > marks["slow"].glyph.size == marks["large"].glyph.size
    assert len({one.glyph.line_color for one in marks.values()}) == 3
    assert list(marks["near"].data_source.data["x"]) == [70.0, 50.0]
    assert list(marks["near"].data_source.data["y"]) == [12.0, 13.0]


def test_pictures_have_no_ground_of_their_own() -> None:
    """The page is dark where its reader's system is."""
    plot = page.timeline_picture(step(4, 3))
    assert plot.background_fill_alpha == plot.border_fill_alpha == 0
    assert 0 < plot.grid[0].grid_line_alpha < 1
    assert page.measured_picture([1.0], SLOWER).height > 100


def pipeline(microbatches: int, stages: int = 2) -> Played:
    """1F1B with passes of 1 s: `stages - stage` forward passes first, then a forward and a backward one in turn."""
    lanes = []
    for stage in range(stages):
        actions = ["forward"] * (stages - stage)
        actions += ["backward", "forward"] * (microbatches - stages + stage) + ["backward"] * (stages - stage)
        lanes.append([Slot(action, 0, 0, float(stage + n), stage + n + 1.0) for n, action in enumerate(actions)])
    end = 2.0 * microbatches + stages - 1
    return Played(lanes, (0.0,) * stages, end, 1.0, 0.0)


def test_the_middle_of_a_long_step_is_folded_between_its_first_passes_and_its_end() -> None:
    """Of 256 micro-batches stripes were left."""
    long = pipeline(256)
    fold = folded(long)
    assert fold is not None
    assert (fold.begin_s, fold.end_s) == pytest.approx((4.0, 508.0), abs=0.01), (
        "two forward passes, a backward one, a period of 2 s; and so to the end"
    )
    plot = page.timeline_picture(long)
    drawn = {one.name: one.data_source.data for one in plot.renderers}
    steady = drawn[page.KIND_WORDS["steady"]]
    assert [float(end) for end in steady["end"]] == pytest.approx([fold.end_s, fold.end_s])
    shown_s = plot.x_range.end
    assert shown_s == pytest.approx((long.total_s - fold.end_s + fold.begin_s) * 1.12), "the fold takes a tenth of the picture"
    assert all(
        0 <= left <= right <= shown_s + 1e-4 for data in drawn.values() for left, right in zip(data["left"], data["right"], strict=True)
    )
    assert len(drawn["forward"]["left"]) < 20
    assert [*plot.xaxis[0].major_label_overrides.values()] == ["0", "4", "508", "514"]
    assert "From 4 s to 508 s it goes on like that, and is folded" in page.timeline_words(long)
    assert (page.KIND_COLOURS["steady"], page.KIND_WORDS["steady"]) in page.kind_colours(long)
    short = pipeline(4)
    assert folded(short) is None
    assert "folded" not in page.timeline_words(short)
    assert page.timeline_picture(short).x_range.end == short.total_s


def test_the_axis_of_one_node_counts_nodes_alone() -> None:
    """Tenths of a node were printed over each other."""
    assert page.rank_picture(replace(PLAN, world_size=8, dp=1, tp=2)).yaxis[0].ticker.min_interval == 1


def test_each_colour_and_shade_is_named_below_its_picture_where_lines_can_break() -> None:
    assert page.stage_colours(replace(PLAN, pp=12))[:3] == [
        (page.STAGE_COLOURS[0], "stage 0, 10"), (page.STAGE_COLOURS[1], "stage 1, 11"), (page.STAGE_COLOURS[2], "stage 2"),
    ]  # fmt: skip
    assert "Of two neighbours in tp one is pale" in page.rank_words(PLAN)
    assert "pale" not in page.rank_words(replace(PLAN, tp=1))
    assert "Every other chunk is pale" in page.timeline_words(step(4, 3, chunks=2))
    assert [name for _, name in page.cause_colours(PLAN)] == ["weights", "gradients", "optimizer", "activations", "buffers"]
    text = page.section("t", "", "", "", page.stage_colours(PLAN))
    assert all(f"<span><i style=background:{colour}></i>{name}</span>" in text for colour, name in page.stage_colours(PLAN))
    for plot in (page.candidate_picture(POINTS, shown()), page.timeline_picture(step(4, 3))):
        assert not plot.legend, "a picture's own legend is cut on a narrow page"


def test_a_narrow_page_turns_rows_into_lists() -> None:
    assert "@media (max-width: 40rem)" in page.STYLE
    assert "td::before { content: attr(data-is)" in page.STYLE


def test_days_and_money_stand_first() -> None:
    first, second, *_ = page.head(replace(shown(), budget=budget(shown().plan, 2.0)), "t").split("<p>")[1:]
    assert "minutes" in first
    assert "cost" in first
    assert "a step" in second
