"""report.html: the plan in pictures, each beside a table with the same numbers, in one file that needs no network.

Bokeh draws (extra `[report]`): its one script of 1.3 MB is inside the page, and pictures can be pointed at and zoomed. Tables are plain
HTML.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final

from orchestrator.cost.memory_policy import LIKELY
from orchestrator.cost.price import CostModel, Played
from orchestrator.model.spec import ModelSpec
from orchestrator.plan import Plan
from orchestrator.report.after import NAMES, After
from orchestrator.report.budget import Budget, budget, budget_text
from orchestrator.report.kept import Drawn, Point, digest, element
from orchestrator.report.measured import Row, measured_peak_memory, measured_step_time
from orchestrator.report.text import (
    NOISE,
    cause_name,
    choice,
    fullest,
    placement,
    rank_name,
    ranks_of,
    size_text,
    speed_text,
    stage_layers,
    stage_recompute,
)
from orchestrator.report.trace import MOST_EVENTS, Bar, bars, folded
from orchestrator.strategy.pins import MemoryLimit
from orchestrator.strategy.spec import Candidate
from orchestrator.strategy.tree import LEVELS, Outcome
from orchestrator.units import GIB, format_amount, format_bytes, format_seconds
from orchestrator.values import Value

if TYPE_CHECKING:
    from bokeh.plotting import figure as Figure

MOST_BARS: Final = 8_000
LINED: Final = 1_500
"""Bars with an edge: of more the edges would hide the bars."""
MOST_RANKS: Final = 2_048
MOST_POINTS: Final = 1_200
MOST_MOMENTS: Final = 600
MOST_ROWS: Final = 60
STAGE_COLOURS: Final = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#b07aa1", "#9c755f", "#edc948", "#ff9da7", "#86bcb6")
KIND_COLOURS: Final = {
    "forward": "#4e79a7", "backward": "#59a14f", "steady": "#9db8a5", "reduction": "#e15759", "optimizer": "#b07aa1", "once": "#9c755f",
    "send_activation": "#edc948", "receive_activation": "#edc948", "send_gradient": "#f28e2b", "receive_gradient": "#f28e2b",
    "exchange_next": "#ff9da7", "exchange_previous": "#ff9da7",
}  # fmt: skip
KIND_WORDS: Final = {
    "send_activation": "activations sent while both sides wait", "receive_activation": "activations sent while both sides wait",
    "send_gradient": "gradients sent while both sides wait", "receive_gradient": "gradients sent while both sides wait",
    "exchange_next": "both exchanged", "exchange_previous": "both exchanged", "steady": "folded: passes like those beside them",
    "reduction": "gradient reduction that nothing hides", "once": "once a step",
}  # fmt: skip
CAUSE_COLOURS: Final = {
    "weights": "#4e79a7", "gradients": "#76b7b2", "optimizer": "#b07aa1", "activations": "#59a14f", "transient": "#f28e2b",
    "fragmentation": "#edc948", "buffers": "#9c755f", "context": "#bab0ac",
}  # fmt: skip
POINT_COLOURS: Final = {"priced": "#17652b", "slower": "#4e79a7", "lacks memory": "#a3161f"}
STYLE: Final = "\n" + files("orchestrator.report").joinpath("report.css").read_text(encoding="utf-8")


class Shown(Value, frozen=True, kw_only=True):
    """What a report is of. `outcomes`: of the search, none for a saved plan; `rows`: of metrics.jsonl, none before the run."""

    plan: Plan
    model: ModelSpec
    limit: MemoryLimit
    costs: CostModel
    outcomes: Sequence[Outcome] = ()
    drawn: Drawn | None = None
    """Candidates as an earlier page has them, in place of the outcomes."""
    floor: Callable[[Candidate], float] | None = None
    """Bytes that a choice can't go below."""
    rows: Sequence[Mapping[str, Any]] = ()
    after: After | None = None
    """Where the run's steps went; None: nothing was measured."""
    budget: Budget | None = None
    """What the training takes; None: by the plan alone, with no price and no failures."""
    chance: float | None = None
    """The chance that the plan runs out of memory, 0 to 1; None: it is not known."""


def escape(text: object) -> str:
    return html.escape(str(text))


def table(caption: str, heads: Sequence[str], rows: Iterable[Sequence[object]], numbers: Iterable[int] = ()) -> str:
    """A table that a screen reader can walk. `numbers`: columns that are aligned right."""
    right = set(numbers)
    mark = [' class="number"' if index in right else "" for index in range(len(heads))]
    head = "".join(f'<th scope="col"{mark[index]}>{escape(name)}</th>' for index, name in enumerate(heads))
    label = [f'{mark[index]} data-is="{escape(name)}"' for index, name in enumerate(heads)]
    body = "".join("<tr>" + "".join(f"<td{label[index]}>{escape(value)}</td>" for index, value in enumerate(row)) + "</tr>" for row in rows)
    inside = f"<caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    return f'<div class="wide"><table>{inside}</table></div>'


def report_html(shown: Shown) -> str:
    """The page as HTML. Raises ImportError without bokeh."""
    from bokeh.embed import components
    from bokeh.resources import INLINE

    step = shown.costs.played(shown.plan.candidate, shown.plan.stages)
    pictures = {"ranks": rank_picture(shown.plan), "timeline": timeline_picture(step), "memory": memory_picture(shown, step)}
    drawn = shown.drawn or drawn_of(shown)
    if drawn.points:
        pictures["candidates"] = candidate_picture(drawn.points, shown)
    measured = [float(row["step_time_s"]) for row in shown.rows if isinstance(row.get("step_time_s"), int | float)]
    if measured:
        pictures["measured"] = measured_picture(measured, shown.plan)
    script, divs = components(pictures)
    scripts = "".join(f"<script>{text}</script>" for text in INLINE.js_raw[:1])
    title = f"{shown.plan.model.name} on {shown.plan.cluster.types}"
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style>{scripts}{script}</head><body><main>",
        head(shown, title),
        section("The plan on the cluster", divs["ranks"], rank_words(shown.plan), rank_table(shown), stage_colours(shown.plan)),
        section("A step, stage by stage", divs["timeline"], timeline_words(step), timeline_table(shown, step), kind_colours(step)),
        section("Memory over the step", divs["memory"], MEMORY_WORDS, memory_table(shown), cause_colours(shown.plan)),
        f"<section><h2>Where the step goes</h2>{cause_table(shown.plan)}</section>",
    ]
    if drawn.points:
        parts.append(candidates_section(drawn, divs["candidates"]) + element(drawn))
    parts.append(measured_section(shown, divs.get("measured")))
    parts.append("</main></body></html>")
    return "\n".join(parts) + "\n"


def section(title: str, picture: str, words: str, numbers: str, legend: Iterable[tuple[str, str]] = ()) -> str:
    """A picture with a table of the same. `legend`: colours with what they are."""
    label = f"{title}: the table below has the same"
    return (
        f'<section><h2>{escape(title)}</h2><p class="soft">{escape(words)}</p>'
        f'<figure class="picture" role="img" aria-label="{escape(label)}">'
        f"{picture}{legend_of(legend)}</figure>{numbers}</section>"
    )


def legend_of(entries: Iterable[tuple[str, str]]) -> str:
    """Colours with their names in as many lines as the page's width needs; a picture's own legend would be cut."""
    return f'<p class="legend">{"".join(f"<span><i style=background:{colour}></i>{escape(name)}</span>" for colour, name in entries)}</p>'


def head(shown: Shown, title: str) -> str:
    plan, predicted = shown.plan, shown.plan.prediction
    stage, usable = fullest(plan, shown.limit)
    peak = predicted.by_stage[stage].peak_memory_bytes
    fits = peak <= usable
    room = f"{100 * (1 - peak / usable):.1f}% of it free" if fits else f"lacks {format_bytes(peak - usable)}"
    verdict = '<strong class="bad">does not fit</strong>'
    if fits or (shown.chance or 1.0) < LIKELY:
        verdict = '<strong class="good">fits</strong>' if fits else '<strong class="bad">may not fit</strong>'
    need = f"{format_bytes(peak)} of {format_bytes(usable)} usable"
    room += "" if shown.chance is None else f", {format_amount(100 * shown.chance, 2)}% chance of running out"
    takes = budget_text(shown.budget or budget(plan), rank_name(plan))
    return (
        f"<h1>{escape(title)}</h1><p><strong>{escape(takes)}</strong></p>"
        f"<p>{escape(speed_text(plan))}; {verdict}: {need}, {room}</p>"
        f'<p class="soft">{escape(size_text(shown.model))}; {escape(plan.engine)}: {escape(choice(plan))}. '
        f"Prices: {escape(plan.calibration)}.</p>"
    )


# ---------------------------------------------------------------------------------------------------------------- pictures


def blank(height: int, **more: Any) -> Figure:
    """A figure as wide as the page, without a background of its own."""
    from bokeh.plotting import figure

    plot = figure(height=height, sizing_mode="stretch_width", toolbar_location="above", **more)
    plot.background_fill_alpha = plot.border_fill_alpha = 0.0
    plot.outline_line_color = None
    plot.grid.grid_line_alpha = 0.35
    if plot.toolbar is not None:
        plot.toolbar.logo = None
    return plot


def coordinates(plan: Plan, rank: int) -> dict[str, int]:
    """A rank's place on each axis that has several.

    Ranks follow the plan's order of axes: rank = sum of place * stride.
    """
    mesh = plan.mesh
    axes = [axis for axis in plan.rank_order if axis != "ep" and mesh.degree(axis) > 1]
    return {axis: rank // mesh.stride(axis) % mesh.degree(axis) for axis in axes}


def rank_picture(plan: Plan) -> Figure:
    """A row a node, a square a rank, a colour a pipeline stage."""
    node = min(plan.cluster.gpus_per_node, plan.world_size)
    ranks = range(min(plan.world_size, MOST_RANKS))
    where = [coordinates(plan, rank) for rank in ranks]
    data = {
        "x": numbers(rank % node for rank in ranks),
        "y": numbers(rank // node for rank in ranks),
        "rank": numbers(ranks),
        "place": [", ".join(f"{axis} {index}" for axis, index in place.items()) or "the only one" for place in where],
        "colour": [STAGE_COLOURS[place.get("pp", 0) % len(STAGE_COLOURS)] for place in where],
        "alpha": numbers(0.55 + 0.45 * (place.get("tp", 0) % 2) for place in where),
    }
    rows = ranks[-1] // node + 1
    plot = blank(min(700, 90 + 14 * rows), tools="pan,wheel_zoom,reset", tooltips=[("rank", "@rank"), ("", "@place")],
                 x_axis_label=f"{rank_name(plan)} of a node", y_axis_label="node", y_range=(rows - 0.4, -0.6))  # fmt: skip
    plot.rect("x", "y", width=0.92, height=0.9, source=source(data), fill_color="colour", fill_alpha="alpha", line_color=None)
    plot.xaxis.ticker = list(range(node)) if node <= 16 else []
    plot.yaxis[0].ticker.min_interval = 1
    return plot


def numbers(values: Iterable[float]) -> Any:
    """The values as an array of 4 bytes each, in which the page keeps them, not in digits."""
    import numpy as np

    return np.fromiter(values, dtype=np.float32)


def source(data: Mapping[str, Any]) -> Any:
    from bokeh.models import ColumnDataSource

    return ColumnDataSource(dict(data))


def timeline_words(step: Played) -> str:
    """What the timeline shows, and what of the step is folded."""
    pale = " Every other chunk is pale." if any(slot.chunk for slot in step.lanes[0]) else ""
    fold = folded(step)
    middle = f" From {format_seconds(fold.begin_s)} to {format_seconds(fold.end_s)} it goes on like that, and is folded." if fold else ""
    return f"What is empty is the pipeline's bubble.{pale}{middle} The wheel zooms, and trace.json has the whole step."


def kind_colours(step: Played) -> list[tuple[str, str]]:
    """The colours of what is in the timeline, with their names."""
    kinds = dict.fromkeys([*(bar.kind for bar in bars(step, MOST_BARS)), *(["steady"] if folded(step) else [])])
    return [*{KIND_COLOURS[kind]: KIND_WORDS.get(kind, kind) for kind in KIND_COLOURS if kind in kinds}.items()]


def timeline_picture(step: Played) -> Figure:
    """A lane a stage, the first above; the long middle of the step is folded to a tenth of what is shown."""
    from bokeh.models import FixedTicker

    stages, fold = len(step.lanes), folded(step)
    at = fold.at if fold else float
    plot = blank(min(620, 110 + 26 * stages), tools="xpan,xwheel_zoom,xbox_zoom,reset,hover", x_range=(0, at(step.total_s)),
                 y_range=(stages - 0.4, -0.6), x_axis_label="seconds of the step", y_axis_label="stage", active_scroll=None,
                 tooltips=[("", "$name"), ("micro-batch", "@microbatch"), ("chunk", "@chunk"),
                           ("s", "@begin{0.0000} to @end{0.0000}")])  # fmt: skip
    by_kind: dict[str, list[Bar]] = {}
    for bar in bars(step, MOST_EVENTS if fold else MOST_BARS):
        if fold is None or not (fold.begin_s <= bar.begin_s and bar.end_s <= fold.end_s):
            by_kind.setdefault(bar.kind, []).append(bar)
    if fold is not None:
        by_kind["steady"] = [Bar(stage, "steady", "", fold.begin_s, fold.end_s) for stage in range(stages)]
        ticks = {0.0: 0.0} | {at(end): end for end in (fold.begin_s, fold.end_s, step.total_s)}
        plot.xaxis.ticker = FixedTicker(ticks=[*ticks])
        plot.xaxis.major_label_overrides = {place: f"{end:.3g}" for place, end in ticks.items()}
    for kind, drawn in by_kind.items():
        data = {
            "left": numbers(at(bar.begin_s) for bar in drawn),
            "right": numbers(at(bar.end_s) for bar in drawn),
            "begin": numbers(bar.begin_s for bar in drawn),
            "end": numbers(bar.end_s for bar in drawn),
            "y": numbers(bar.stage for bar in drawn),
            "microbatch": numbers(bar.microbatch for bar in drawn),
            "chunk": numbers(bar.chunk for bar in drawn),
            "alpha": numbers(1.0 - 0.5 * (bar.chunk % 2) for bar in drawn),
        }
        plot.hbar("y", left="left", right="right", height=0.84, source=source(data), fill_color=KIND_COLOURS[kind], fill_alpha="alpha",
                  line_color="white" if len(drawn) <= LINED else None, line_width=0.3, name=KIND_WORDS.get(kind, kind))  # fmt: skip
    plot.yaxis.ticker = list(range(stages)) if stages <= 32 else []
    return plot


MEMORY_WORDS: Final = "The fullest stage by cause, the others as lines; dashed: what may be used."


def cause_colours(plan: Plan) -> list[tuple[str, str]]:
    """The colours of the causes that a stage has, with their names."""
    return [(CAUSE_COLOURS[cause], cause_name(cause)) for cause in causes_of(plan)]


def causes_of(plan: Plan) -> list[str]:
    """The causes of memory that a stage of the plan has, in the order of their colours."""
    return [cause for cause in CAUSE_COLOURS if any(stage.memory_by_cause.get(cause) for stage in plan.prediction.by_stage)]


def moments(shown: Shown, step: Played, stage: int) -> list[tuple[float, float, dict[str, float]]]:
    """The stage's memory from pass to pass, thinned to what a picture shows: of neighbours the fullest stays."""
    plan = shown.plan
    sums = shown.costs.of_stage(plan.candidate, stage).sums(plan.candidate, plan.stages[stage].layers)
    rows = shown.costs.stage_memory(plan.candidate, stage).over_time(sums, step.lanes[stage])
    size = -(-len(rows) // MOST_MOMENTS)
    kept = []
    for start in range(0, len(rows), size):
        group = rows[start : start + size]
        fullest = max(group, key=lambda row: sum(row[2].values()))
        kept.append((group[0][0], group[-1][1], fullest[2]))
    return kept


def memory_picture(shown: Shown, step: Played) -> Figure:
    """The fullest stage by cause, the others as lines, and the limit."""
    from bokeh.models import Span

    fullest = shown.plan.prediction.fullest
    plot = blank(340, tools="xpan,xwheel_zoom,reset,hover", x_axis_label="seconds of the step", y_axis_label="GiB", active_scroll=None,
                 tooltips=[("", "$name"), ("GiB", "$snap_y{0.0}")])  # fmt: skip
    rows = moments(shown, step, fullest)
    time = numbers(edge for begin, end, _ in rows for edge in (begin, end))
    base = numbers(0.0 for _ in time)
    for cause in CAUSE_COLOURS:
        top = base + numbers(values.get(cause, 0.0) / GIB for *_, values in rows for _ in (0, 1))
        if (top > base).any():
            plot.varea(time, base, top, fill_color=CAUSE_COLOURS[cause], fill_alpha=0.75, name=cause_name(cause))
        base = top
    plot.line(time, base, line_color="#333333", line_width=1.5, name=f"stage {fullest}, the fullest")
    for stage in range(shown.plan.pp):
        if stage == fullest or (shown.plan.pp > 16 and stage % (shown.plan.pp // 8)):
            continue
        other = moments(shown, step, stage)
        plot.line(numbers(edge for begin, end, _ in other for edge in (begin, end)),
                  numbers(sum(values.values()) / GIB for *_, values in other for _ in (0, 1)), 
                  line_color=STAGE_COLOURS[stage % len(STAGE_COLOURS)], line_width=1, name=f"stage {stage}")  # fmt: skip
    plot.add_layout(Span(location=shown.limit.usable / GIB, dimension="width", line_color="#a3161f", line_dash="dashed"))
    plot.y_range.start = 0
    return plot


def drawn_of(shown: Shown) -> Drawn:
    """What a page draws of the search's outcomes."""
    counted: dict[tuple[str, str], int] = {}
    for outcome in shown.outcomes:
        if outcome.rule:
            key = (outcome.candidate.engine, outcome.reason or "")
            counted[key] = counted.get(key, 0) + 1
    ruled = sorted(((engine, why, count) for (engine, why), count in counted.items()), key=lambda row: -row[2])[:MOST_ROWS]
    return Drawn(plan=digest(shown.plan), total=len(shown.outcomes), points=tuple(candidate_points(shown)), ruled=tuple(ruled))


def candidate_points(shown: Shown) -> list[Point]:
    """(name, seconds, bytes, kind, why) of choices that can be drawn: priced ones, then those of which bounds are known, the
    nearest first."""
    priced, bounded, over = [], [], []
    for outcome in shown.outcomes:
        if outcome.decided != LEVELS:  # of a branch, some of its choices open
            continue
        name, why = outcome.candidate.label(), outcome.reason or ""
        if outcome.step_time_s is not None and outcome.peak_memory_bytes is not None:
            slower = shown.plan.predicted and outcome.step_time_s / shown.plan.predicted.step_time_s - 1
            said = f"{100 * slower:.1f}% slower" if slower else "the plan"
            priced.append((name, outcome.step_time_s, outcome.peak_memory_bytes, "priced", said))
        elif outcome.peak_memory_bytes is not None and shown.floor is not None and outcome.candidate.engine == shown.plan.engine:
            over.append((outcome.peak_memory_bytes, outcome.candidate, name, why))
        elif outcome.at_least_s is not None and shown.floor is not None:
            bounded.append((outcome.at_least_s, outcome, name, why))
    bounded.sort(key=lambda item: item[0])
    floor = shown.floor
    nearest = bounded[:MOST_POINTS] if floor is not None else []
    drawn = [(name, seconds, floor(outcome.candidate), "slower", why) for seconds, outcome, name, why in nearest if floor is not None]
    over.sort(key=lambda item: item[0])
    least = over[: MOST_POINTS // 3]
    lacking = [(name, shown.costs.time_floor(candidate), nbytes, "lacks memory", why) for nbytes, candidate, name, why in least]
    return [*sorted(priced, key=lambda point: point[1]), *drawn, *lacking]


def candidate_picture(points: Sequence[Point], shown: Shown) -> Figure:
    """Time against memory; a click says why it was not taken."""
    from bokeh.models import CustomJS, Span, TapTool

    plot = blank(420, tools="pan,wheel_zoom,box_zoom,reset,tap", x_axis_label="GiB at the peak (at least, where hollow)", y_axis_type="log",
                 y_axis_label="seconds a step (at least, where hollow)", tooltips=[("", "@name"), ("", "@why")],
                 active_scroll=None)  # fmt: skip
    for kind, colour in POINT_COLOURS.items():
        rows = [point for point in points if point[3] == kind]
        if not rows:
            continue
        words = {"name": [row[0] for row in rows], "why": [row[4] for row in rows]}
        held = source({"x": numbers(row[2] / GIB for row in rows), "y": numbers(row[1] for row in rows)} | words)
        plot.scatter("x", "y", source=held, size=10 if kind == "priced" else 6, line_color=colour, fill_color=colour,
                     fill_alpha=0.9 if kind == "priced" else 0.0, name=kind)  # fmt: skip
        code = """const i = held.selected.indices[0];
if (i !== undefined) document.getElementById("why").textContent = held.data.name[i] + ": " + held.data.why[i];"""
        held.selected.js_on_change("indices", CustomJS(args={"held": held}, code=code))
    plot.add_layout(Span(location=shown.limit.usable / GIB, dimension="height", line_color="#a3161f", line_dash="dashed"))
    plot.select_one(TapTool)
    return plot


def measured_picture(seconds: Sequence[float], plan: Plan) -> Figure:
    """Seconds of each step, and the predicted ones."""
    from bokeh.models import Span

    plot = blank(260, tools="pan,wheel_zoom,reset", x_axis_label="step", y_axis_label="seconds", active_scroll=None)
    plot.line(list(range(len(seconds))), list(seconds), line_width=1.5, line_color="#4e79a7")
    plot.add_layout(Span(location=plan.prediction.step_time_s, dimension="width", line_color="#a3161f", line_dash="dashed"))
    plot.y_range.start = 0
    return plot


# ------------------------------------------------------------------------------------------------------------------ tables


def rank_words(plan: Plan) -> str:
    shades = " Of two neighbours in tp one is pale." if plan.tp > 1 else ""
    more = f" The first {MOST_RANKS} of {plan.world_size} ranks." if plan.world_size > MOST_RANKS else ""
    return f"A square is a rank, a colour a pipeline stage.{shades} {placement(plan)}.{more}"


def stage_colours(plan: Plan) -> list[tuple[str, str]]:
    """Colours of the stages that have them; from the eleventh stage on they come again."""
    stages = [range(first, plan.pp, len(STAGE_COLOURS)) for first in range(min(plan.pp, len(STAGE_COLOURS)))]
    return [(STAGE_COLOURS[alike[0]], f"stage {', '.join(map(str, alike))}") for alike in stages]


def rank_table(shown: Shown) -> str:
    plan = shown.plan
    rows = [(index, ranks_of(plan, index), stage_layers(stage), stage_recompute(stage)) for index, stage in enumerate(plan.stages)]
    return table("Stages", ("stage", "ranks", "layers", "recompute"), rows)


def timeline_table(shown: Shown, step: Played) -> str:
    """A table of each stage: at work, waiting, and the most micro-batches in flight."""
    rows = []
    for index, lane in enumerate(step.lanes):
        busy = sum(slot.end_s - slot.begin_s for slot in lane)
        flight = shown.costs.stage_memory(shown.plan.candidate, index).flight
        waits = step.total_s - busy - step.exposed_s[index] - step.optimizer_s - step.once_s
        bubble = f"{format_seconds(waits)} ({100 * waits / step.total_s:.1f}%)" if waits > NOISE * step.total_s else "none"
        rows.append((index, format_seconds(busy), bubble, format_seconds(step.exposed_s[index]), flight))
    passes, update, once = map(format_seconds, (step.optimizer_begin_s, step.optimizer_s, step.once_s))
    words = f"Passes end at {passes}, the optimizer takes {update}, what each step has once (launches, tied weights) {once}"
    words += f", in all {step.total_s:.6g} s"
    unit = "chunks of micro-batches" if shown.plan.vpp > 1 else "micro-batches"
    return table(words, ("stage", "at work", "bubble", "reduction not hidden", f"most {unit} in flight"), rows, (1, 2, 3, 4))


def memory_table(shown: Shown) -> str:
    causes, rows = causes_of(shown.plan), []
    for index, stage in enumerate(shown.plan.prediction.by_stage):
        by_cause = [f"{stage.memory_by_cause.get(cause, 0.0) / GIB:.2f}" for cause in causes]
        rows.append((index, *by_cause, f"{stage.peak_memory_bytes / GIB:.2f}", stage.peak_phase))
    caption = f"GiB at each stage's peak; usable: {shown.limit.usable / GIB:.2f}"
    return table(caption, ("stage", *(cause_name(cause) for cause in causes), "peak", "in"), rows, range(1, len(causes) + 2))


def cause_table(plan: Plan) -> str:
    predicted = plan.prediction
    total = predicted.step_time_s
    rows = [(cause_name(name), format_seconds(seconds), f"{100 * seconds / total:.1f}%") for name, seconds in
            sorted(predicted.by_cause.items(), key=lambda item: -item[1]) if abs(seconds) > NOISE * total]  # fmt: skip
    return table(
        "Of the busiest stage; it adds up to the step",
        ("cause", "time", "share"),
        [*rows, ("total", format_seconds(total), "100.0%")],
        (1, 2),
    )


def candidates_section(drawn: Drawn, picture: str) -> str:
    rows = []
    for name, seconds, nbytes, kind, why in drawn.points[:MOST_ROWS]:
        rows.append((name, ("" if kind == "priced" else "at least ") + format_seconds(seconds), format_bytes(nbytes), why))
    ruled = drawn.ruled
    words = f"{drawn.total:,} choices; drawn are those whose time and memory are known, exactly or by a bound. candidates.csv has all."
    numbers = table(f"The nearest {len(rows)}", ("choice", "step", "memory", "why not"), rows, (1, 2))
    rules = table("Rules that cut branches, the most frequent first", ("engine", "why", "branches"), ruled, (2,)) if ruled else ""
    return (
        f'<section><h2>All candidates</h2><p class="soft">{escape(words)}</p>'
        '<figure class="picture" role="img" aria-label="Time against memory">'
        f"{picture}{legend_of((colour, kind) for kind, colour in POINT_COLOURS.items())}</figure>"
        '<p id="why" class="screen" aria-live="polite">A click on a point says why that choice was not taken.</p>'
        f'<div class="long">{numbers}{rules}</div></section>'
    )


def measured_section(shown: Shown, picture: str | None) -> str:
    """The section of predicted against measured step times, once there are measured steps."""
    rows: list[Row] = list(shown.rows)
    seconds, memory = measured_step_time(rows), measured_peak_memory(rows)
    predicted = shown.plan.predicted
    if seconds is None or predicted is None:
        return ""
    entries = [("step", format_seconds(predicted.step_time_s), format_seconds(seconds), f"{seconds / predicted.step_time_s:.2f}")]
    if memory is not None:
        ratio = f"{memory / predicted.peak_memory_bytes:.2f}"
        entries.append(("memory", format_bytes(predicted.peak_memory_bytes), format_bytes(memory), ratio))
    numbers = table("Median after warm-up", ("", "predicted", "measured", "measured / predicted"), entries, (1, 2, 3))
    figure = f'<figure class="picture" role="img" aria-label="Seconds of each step">{picture}</figure>' if picture else ""
    return f"<section><h2>Predicted and measured</h2>{figure}{numbers}{after_part(shown.after)}</section>"


def after_part(after: After | None) -> str:
    """The section on where the run's steps went, and on what stands out; "" where nothing was measured."""
    if after is None:
        return ""
    entries = [(NAMES[name], *(format_seconds(value) if value else "-" for value in pair)) for name, pair in after.causes.items()]
    said = "".join(f"<p>{escape(line)}</p>" for line in after.lines())
    return table("Where two of its steps went", ("", "predicted", "measured"), entries, (1, 2)) + said
