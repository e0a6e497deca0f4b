"""The plan as an expert reads it: tables (rich) of what was chosen, what it costs by cause, what nearly won, and what was refused."""

from __future__ import annotations

import io
import sys
from collections.abc import Collection, Mapping, Sequence
from itertools import groupby, takewhile

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from orchestrator.cost.memory_policy import USUAL_RISK
from orchestrator.cost.uncertainty import BEYOND, pairs_of
from orchestrator.hardware.catalog import between_slots
from orchestrator.hardware.spec import Cluster
from orchestrator.model.packing import waits
from orchestrator.model.routing import Unevenness, times
from orchestrator.model.spec import ModelSpec
from orchestrator.model.training import EIGHT_BIT, Training
from orchestrator.plan import Plan, Prediction, Stage
from orchestrator.report.budget import budget
from orchestrator.strategy.capabilities import Capabilities
from orchestrator.strategy.choices import line, shown
from orchestrator.strategy.divisible import batches, counts, left_over
from orchestrator.strategy.layout import ENDS
from orchestrator.strategy.pins import MemoryLimit
from orchestrator.strategy.spec import OUTER_CHOICES, PUBLISHED, RANK_ORDER, option_words, unusual
from orchestrator.units import GB, TFLOPS, format_amount, format_bytes, format_count, format_seconds

WIDTH = 100
"""Columns that every terminal and log has."""
PIPE_WIDTH = 120
"""What commands print with where their output is no terminal (screen.FILE_WIDTH)."""
SHOWN_SHARE = 0.005
"""Causes below half a percent of the total are added up in one line."""
CAUSES_IN_A_DIFFERENCE = 3
CAUSES_IN_A_LINE = 5
NOISE = 1e-9
"""A cause with less than this share of the total is the rounding of a difference."""
GFLOPS = TFLOPS / 1000
MESH_AXES = ("tp", "pp", "vpp", "cp", "ep", "etp", "dp")


def as_text(renderable: RenderableType, width: int = WIDTH) -> str:
    """The plain text of a table, without colours and without blanks at the ends of lines, as a log or a test wants it."""
    text = io.StringIO()
    Console(file=text, width=width, color_system=None, force_terminal=False, highlight=False).print(renderable)
    return "".join(f"{line.rstrip()}\n" for line in text.getvalue().splitlines())


def _table(*columns: tuple[str, bool], title: str = "") -> Table:
    """Columns as (heading, whether it holds numbers)."""
    table = Table(box=box.SIMPLE_HEAD, title=Text(title, style="bold") if title else None, title_justify="left", pad_edge=False)
    for heading, numeric in columns:
        table.add_column(heading, justify="right" if numeric else "left", no_wrap=numeric, overflow="fold")
    return table


class Fitting:
    """The first of several tables that the terminal has room for, without words cut in two (`wrapped` False: without a second line for any
    cell); else the last. rich by itself narrows columns to nothing, names of rows first."""

    def __init__(self, *tables: RenderableType, wrapped: bool = True) -> None:
        self.tables = tables
        self.wrapped = wrapped

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        free = options.update(max_width=sys.maxsize)
        sizes = ((table, Measurement.get(console, free, table)) for table in self.tables)
        fits = (table for table, size in sizes if (size.minimum if self.wrapped else size.maximum) <= options.max_width)
        yield next(fits, self.tables[-1])


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"


def _whole_percent(share: float) -> str:
    """The share without digits behind the point, or with so many that there are two.

    >>> _whole_percent(0.487), _whole_percent(0.0123)
    ('49%', '1.2%')
    """
    return f"{format_amount(100 * share, 2)}%"


def ranges(kind: str, first: int, count: int) -> str:
    """Layers of a kind as first and last number.

    >>> ranges("decoder", 4, 3), ranges("decoder", 4, 1)
    ('decoder 4-6', 'decoder 4')
    """
    return f"{kind} {first}" if count == 1 else f"{kind} {first}-{first + count - 1}"


def stage_layers(stage: Stage) -> str:
    """What a stage holds, neighbouring spans of one kind as one: "embedding, decoder 0-6"; chunks apart from each other by " | ", those
    that follow each other at one distance shortened: "decoder 4 | 8 ... 76 (19 chunks)"."""
    chunks: list[list[tuple[str, int, int]]] = []
    for _, spans in groupby(stage.layers, key=lambda span: span.chunk):
        runs = [(kind, list(members)) for kind, members in groupby(spans, key=lambda span: span.kind)]
        chunks.append([(kind, run[0].first, sum(span.count for span in run)) for kind, run in runs])
    said: list[str] = []
    while chunks:
        regular = _regular(chunks)
        if regular < SHORTENED:
            parts = [kind if kind in ENDS else ranges(kind, first, count) for kind, first, count in chunks.pop(0)]
            said.append(", ".join(parts) or "-")
            continue
        firsts = [first for ((_, first, _),) in chunks[:regular]]
        ((kind, _, count),) = chunks[0]
        one, two, last = (ranges(kind, first, count) for first in (firsts[0], firsts[1], firsts[-1]))
        said.append(f"{one} | {two.removeprefix(kind).strip()} ... {last.removeprefix(kind).strip()} ({regular} chunks)")
        del chunks[:regular]
    return " | ".join(said)


SHORTENED = 4
"""Chunks at one distance from which on they are not listed one by one."""


def _regular(chunks: Sequence[Sequence[tuple[str, int, int]]]) -> int:
    """How many of the first chunks hold as many layers of one kind at one distance from each other."""
    if len(chunks) < 2 or len(chunks[0]) != 1 or len(chunks[1]) != 1:
        return 1
    ((kind, first, count),), ((_, second, _),) = chunks[:2]
    expected = ([(kind, first + number * (second - first), count)] for number in range(len(chunks)))
    return sum(1 for _ in takewhile(lambda pair: list(pair[0]) == pair[1], zip(chunks, expected, strict=True)))


def stage_recompute(stage: Stage) -> str:
    """ "full", "none", or how many transformer layers of each: "full 2 of 9"."""
    counts = recomputed([stage])
    total = sum(counts.values())
    if len(counts) <= 1:
        return next(iter(counts), "-")
    return ", ".join(f"{mode} {count} of {total}" for mode, count in counts.items() if mode != "none")


def placement(plan: Plan) -> str:
    """The innermost network level that holds a whole group of each axis, by the engine's rank order: "tp on nvlink, dp on infiniband"."""
    levels = plan.cluster.levels
    found = []
    for axis in plan.rank_order:
        degree = plan.mesh.degree(axis)
        if degree > 1:
            span = degree * (plan.etp if axis == "ep" else plan.mesh.stride(axis))
            level = next((level for level in levels if level.size >= plan.world_size or level.size % span == 0), levels[-1])
            found.append(f"{axis} on {level.name}")
    return ", ".join(found) or "one rank, no traffic"


def recomputed(stages: Sequence[Stage]) -> dict[str, int]:
    """Transformer layers by recompute mode; embedding and head don't count."""
    counts: dict[str, int] = {}
    for stage in stages:
        for span in stage.layers:
            if span.kind not in ENDS:
                counts[span.recompute] = counts.get(span.recompute, 0) + span.count
    return counts


def choice(plan: Plan, *, modes_said: bool = True) -> str:
    """The axes that are used, ZeRO, recompute: one line without the engine, in words that pin.* takes. What no pin says is put otherwise:
    "recompute in 3 of 80 layers (full)"."""
    parts = line(OUTER_CHOICES, [getattr(plan, choice.name) for choice in OUTER_CHOICES])
    counts = recomputed(plan.stages)
    total, modes = sum(counts.values()), {mode: count for mode, count in counts.items() if mode != "none"}
    several = len(modes) > 1
    if len(modes) == 1 and sum(modes.values()) == total:
        parts.append(f"recompute={next(iter(modes))}")
    elif modes:
        said = ", ".join(f"{count} {mode}" if several else mode for mode, count in modes.items())
        parts.append(f"recompute in {sum(modes.values())} of {total} layers" + (f" ({said})" if modes_said else ""))
    return " ".join(parts)


def size_text(model: ModelSpec) -> str:
    """Parameters, how many of them predict later tokens, which a model's name mostly leaves out (DeepSeek-V3's 671B), and how many a token
    goes through where it is sent to some of the experts."""
    predicting, active = model.prediction_parameters, model.active_parameters
    named = f" ({format_count(model.parameters - predicting)} and {format_count(predicting)} of multi-token prediction)"
    said = f", {format_count(active)} active" if active < model.parameters - predicting else ""
    return f"{format_count(model.parameters)} parameters{named if predicting else ''}{said}"


def _facts(plan: Plan, model: ModelSpec) -> list[tuple[str, str]]:
    training, cluster = plan.training, plan.cluster
    lengths = f"{training.seq_length}" + (f" + {training.decoder_seq_length}" if training.decoder_seq_length else "")
    seen = ""
    if model.images is not None:
        images = model.images
        seen = f", {images.count} image{'s' * (images.count > 1)} of {images.tokens} tokens in each"
        seen += f"; frozen: {', '.join(training.freeze)}" if training.freeze else ""
    nodes = -(-plan.world_size // cluster.gpus_per_node)
    where = f"{plan.world_size} gloo ranks" if cluster.is_cpu and not cluster.parts else cluster.types
    if nodes > 1:
        where += f", {nodes} nodes of {cluster.gpus_per_node}"
    mesh = "  ".join(f"{axis} {getattr(plan, axis)}" for axis in MESH_AXES if getattr(plan, axis) > 1 or axis in ("tp", "pp", "dp"))
    zero = f"ZeRO-{plan.zero_stage}"
    if plan.zero_shard_size:
        zero += f" over groups of {plan.zero_shard_size}"
    features = [zero]
    if plan.sequence_parallel:
        features.append("sequence parallel, overlapped" if plan.tp_comm_overlap else "sequence parallel")
    if plan.offload_optimizer:
        features.append("optimizer offloaded")
    if plan.rank_order != RANK_ORDER:
        features.append(f"ranks in order {'-'.join(plan.rank_order)}")
    if plan.cp_comm_type != "p2p":
        features.append(f"keys and values by {plan.cp_comm_type}")
    features += option_words(plan)
    if plan.microbatch_group_size_per_vp_stage is not None:
        features.append(f"groups of {plan.microbatch_group_size_per_vp_stage} micro-batches")
    micro = f"dp {plan.dp} x {plan.num_microbatches} micro-batches of {plan.micro_batch_size}"
    pipeline = f", {plan.schedule} pipeline" if plan.pp > 1 else ""
    dtypes = f"gradients reduced in {training.grad_reduce_dtype}"
    precision = training.precision + (f" ({training.fp8_recipe})" if training.fp8_recipe else "")
    moments = f" (precision-aware, moments in {training.exp_avg_dtype} and {training.exp_avg_sq_dtype})"
    optimizer = training.optimizer + (moments if training.precision_aware_optimizer else "")
    return [
        ("model", f"{plan.model.name}, {size_text(model)}, sequences of {lengths} tokens{seen}"),
        ("cluster", f"{cluster.name}: {where}"),
        ("engine", plan.engine),
        ("parallel", f"{mesh}   ({'; '.join(features)})"),
        ("placement", placement(plan)),
        ("batch", f"{plan.global_batch_size} = {micro}{pipeline}"),
        ("numbers", f"{precision}, {optimizer}, {dtypes}"),
    ]


def plan_table(plan: Plan, model: ModelSpec, limit: MemoryLimit | None = None, *, brief: bool = False) -> RenderableType:
    """What was chosen: model, cluster, mesh, batch, and a row a stage; equal neighbouring stages share a row."""
    facts = Table.grid(padding=(0, 2))
    for name, value in _facts(plan, model):
        if brief and name in ("cluster", "engine", "placement"):
            continue
        value = f"{plan.engine}: {value}" if brief and name == "parallel" else value
        facts.add_row(Text(name, style="bold"), Text(value))
    if brief:
        counts = recomputed(plan.stages)
        sizes = stage_sizes(plan) or str(sum(counts.values()))
        modes = ", ".join(f"{mode} in {count}" for mode, count in counts.items() if mode != "none")
        facts.add_row(Text("layers", style="bold"), Text(f"{sizes}; recompute: {modes or 'none'}"))
        return facts
    columns = [("stage", False), *([("GPU", False)] if plan.cluster.parts else []), ("layers", False), ("recompute", False)]
    predicted = plan.predicted.by_stage if plan.predicted else ()
    if predicted:
        columns += [("forward", True), ("backward", True), ("memory", True)]
    stages = _table(*columns)
    rows = []
    for index, stage in enumerate(plan.stages):
        row = [stage_recompute(stage)]
        if predicted:
            cost = predicted[index]
            room = limit.usable_of(plan.cluster.part_of(index, plan.pp)) if limit else 1
            of_limit = f" ({_percent(cost.peak_memory_bytes / room)})" if limit else ""
            row += [format_seconds(cost.forward_s), format_seconds(cost.backward_s), format_bytes(cost.peak_memory_bytes) + of_limit]
        size = tuple((span.kind, span.count, span.recompute, span.chunk) for span in stage.layers)
        rows.append((size, row, index, stage))
    gpus = [[Text(plan.cluster.gpu_of(index, plan.pp).name)] if plan.cluster.parts else [] for index in range(len(plan.stages))]
    for (_, row, _), group in groupby(rows, key=lambda entry: (entry[0], entry[1], plan.cluster.part_of(entry[2], plan.pp))):
        members = list(group)
        first, last = members[0], members[-1]
        gpu = gpus[first[2]]
        if len(members) == 1:
            stages.add_row(str(first[2]), *gpu, Text(stage_layers(first[3])), *row)
        else:
            stages.add_row(f"{first[2]}-{last[2]}", *gpu, Text(f"{stage_layers(first[3])}  to  {stage_layers(last[3])}"), *row)
    caption = "forward and backward: one micro-batch on one stage" if predicted else ""
    return Group(facts, stages, Text(caption, style="dim")) if caption else Group(facts, stages)


def rank_name(plan: Plan) -> str:
    """What one rank is: a GPU, or just a rank where there are none."""
    return "rank" if plan.cluster.is_cpu else "GPU"


def ranks_of(plan: Plan, stage: int) -> str:
    """The ranks of a stage, as ranges."""
    stride, size = plan.mesh.stride("pp"), plan.world_size // plan.pp
    first = stage * stride
    if size == 1:
        return str(first)
    if stride == 1 and size > 2:
        return f"{first}, {first + plan.pp} ... {first + (size - 1) * plan.pp}"
    if stride == 1:
        return f"{first}, {first + plan.pp}"
    return f"{first} to {first + size - 1}" if stride == size else f"{first} to {first + stride - 1} of every {stride * plan.pp}"


def format_flops(flops: float) -> str:
    """FLOP/s in TFLOP/s, below one of those in GFLOP/s.

    >>> format_flops(432.1e12), format_flops(8.89e9), format_flops(1.4403e15)
    ('432 TFLOP/s', '8.89 GFLOP/s', '1,440 TFLOP/s')
    """
    return f"{format_amount(flops / TFLOPS)} TFLOP/s" if flops >= TFLOPS else f"{format_amount(flops / GFLOPS)} GFLOP/s"


def cause_name(cause: str) -> str:
    """A cause of step time in words.

    >>> cause_name("tp"), cause_name("memory_bound")
    ('tp traffic', 'memory bound')
    """
    return f"{cause} traffic" if cause in MESH_AXES else cause.replace("_", " ")


def _causes(heading: str, causes: dict[str, float], unit: str, total: float) -> Table:
    """Causes from the largest, each with its share; small ones as one line."""
    table = _table((heading, False), ("", True), ("", True))
    write = format_seconds if unit == "s" else format_bytes
    ordered = sorted(((name, value) for name, value in causes.items() if abs(value) > NOISE * total), key=lambda item: -item[1])
    large = [(name, value) for name, value in ordered if abs(value) >= SHOWN_SHARE * total]
    small = [value for _, value in ordered if abs(value) < SHOWN_SHARE * total]
    if len(small) == 1:
        large, small = ordered, []
    for name, value in large:
        table.add_row(Text(cause_name(name)), write(value), _percent(value / total))
    if small:
        table.add_row(f"{len(small)} more", write(sum(small)), _percent(sum(small) / total))
    table.add_section()
    table.add_row("total", write(total), "")
    return table


def _stack(cluster: Cluster) -> str:
    """The words that the nodes' software is taken to be as it comes, and traffic to pass the host's memory; "" where neither is."""
    stock = "; a stock stack, unless cluster.stack=tuned" if cluster.stack == "stock" and not cluster.is_cpu else ""
    slots = between_slots(cluster.gpu)
    staged = [level.name for level in cluster.levels if level.bandwidth == slots < cluster.gpu.pcie]
    if not staged:
        return stock
    said = f"{slots / GB:.1f} GB/s among GPUs, as {cluster.gpu.name} has no peer-to-peer"
    return f"{stock}; {said}, unless cluster.levels.{staged[0]}.bandwidth="


def _source(plan: Plan) -> str:
    """The file that a calibration of the user's own came from, and what it was fitted on; "" for one of ours."""
    return "" if plan.prices is None else f", {plan.prices.source} (fitted on {plan.prices.fitted_on})"


MFU_COUNTS = "MFU counts causal attention as half"
"""What MFU rests on (model/flops.py), which others count otherwise."""
TOO_MUCH = "no GPU does more than 100%: so far the prices are noise"


def speed_text(plan: Plan, *, brief: bool = False) -> str:
    """The step and its rates, each with its interval, and why that may be wide. Raises ValueError for a plan without prediction."""
    of, rank = budget(plan), rank_name(plan)
    parts = [of.said("step_s", format_seconds, " a step"), of.said("tokens_per_s_per_gpu", "{:,.0f}".format, f" tokens/s/{rank}")]
    if of.flops_per_gpu and not (brief and of.mfu):
        parts.append(of.said("flops_per_gpu", format_flops, f"/{rank}"))
    if of.mfu:
        parts.append(f"MFU {of.said('mfu', _whole_percent if brief else _percent)}")
    counted = MFU_COUNTS if of.mfu and not brief and plan.model.stack != "encoder" else ""
    why = "" if of.off else "no interval: no run like this was measured"
    beyond = TOO_MUCH if max(of.mfu or 0.0, *(of.interval("mfu") or (0.0,))) > 1.0 else ""
    return ", ".join(parts) + "".join(f"; {each}" for each in (counted, *plan.prediction.beyond, beyond, why) if each)


def _share_words(causes: dict[str, float], total: float) -> str:
    """The largest causes with their shares, in one line."""
    ordered = sorted(causes.items(), key=lambda item: -item[1])
    said = [f"{cause_name(name)} {_percent(value / total)}" for name, value in ordered[:CAUSES_IN_A_LINE]]
    rest = sum(value for _, value in ordered[CAUSES_IN_A_LINE:])
    return ", ".join([*said, *([f"{len(ordered) - CAUSES_IN_A_LINE} more {_percent(rest / total)}"] if rest > NOISE * total else [])])


def fullest(plan: Plan, limit: MemoryLimit) -> tuple[int, int]:
    """The stage that leaves the smallest share of its memory free, and the bytes that may be used there. Raises ValueError for a plan
    without prediction."""
    rooms = [limit.usable_of(plan.cluster.part_of(index, plan.pp)) for index in range(len(plan.prediction.by_stage))]
    taken = [stage.peak_memory_bytes / room for stage, room in zip(plan.prediction.by_stage, rooms, strict=True)]
    worst = taken.index(max(taken))
    return worst, rooms[worst]


def price_table(plan: Plan, limit: MemoryLimit | None = None, *, brief: bool = False) -> RenderableType:
    """Predicted step time and the peak memory of the fullest stage, each by cause. Raises ValueError for a plan without prediction."""
    predicted = plan.prediction
    lines = Table.grid(padding=(0, 2))
    lines.add_row(Text("predicted", style="bold"), speed_text(plan, brief=brief))
    if brief:
        lines.add_row(Text("time", style="bold"), _share_words(predicted.by_cause, predicted.step_time_s))
    time = _causes("step time", predicted.by_cause, "s", predicted.step_time_s)
    if not predicted.by_stage:
        return lines if brief else Group(lines, time)
    worst, room = fullest(plan, limit or MemoryLimit(limit=1, reserve=0))
    stage = predicted.by_stage[worst]
    memory_line = f"{format_bytes(stage.peak_memory_bytes)} at the peak of stage {worst}"
    if stage.peak_phase:
        memory_line += f" ({stage.peak_phase})"
    if limit:
        whole = limit.parts[plan.cluster.part_of(worst, plan.pp)] if limit.parts else limit.limit
        memory_line += f", {_percent(stage.peak_memory_bytes / room)} of {format_bytes(room)} usable"
        why = "" if limit.margin is None else f": 95% of measured peaks are at most {_percent(limit.margin)} above their prediction"
        if limit.risk is not None and limit.margin is not None:
            why = f": at most {100 * limit.risk:g}% chance of running out (memory.risk)"
        memory_line += "" if brief else f" ({format_bytes(whole)} less {format_bytes(whole - room)} reserve{why})"
    lines.add_row(Text("memory", style="bold"), memory_line)
    if brief:
        lines.add_row("", _share_words(stage.memory_by_cause, stage.peak_memory_bytes))
    lines.add_row(Text("prices", style="bold"), Text(f"{plan.calibration} calibration{_source(plan)}{_stack(plan.cluster)}"))
    if brief:
        return lines
    side_by_side = Table.grid(padding=(0, 6))
    side_by_side.add_row(time, _causes(f"memory of stage {worst}", stage.memory_by_cause, "bytes", stage.peak_memory_bytes))
    return Group(lines, side_by_side)


def difference(best: Prediction, other: Prediction, most: int = CAUSES_IN_A_DIFFERENCE) -> str:
    """Why another plan is slower, by cause, the largest first: "+12.0%: tp traffic +310 ms, bubble -95 ms".

    Causes that change by less than half a percent of the best step are left out.
    """
    slower = other.step_time_s / best.step_time_s - 1
    names = [*best.by_cause, *(name for name in other.by_cause if name not in best.by_cause)]
    changes = {name: other.by_cause.get(name, 0.0) - best.by_cause.get(name, 0.0) for name in names}
    ordered = sorted(changes.items(), key=lambda item: -abs(item[1]))
    largest = [(name, change) for name, change in ordered if abs(change) >= SHOWN_SHARE * best.step_time_s][:most]
    parts = [f"{cause_name(name)} {'+' if change > 0 else '-'}{format_seconds(abs(change))}" for name, change in largest]
    return f"{100 * slower:+.1f}%" + (": " + ", ".join(parts) if parts else "")


def layer_counts(plan: Plan) -> list[int]:
    """Transformer layers of each stage."""
    return [sum(span.count for span in stage.layers if span.kind not in ENDS) for stage in plan.stages]


def stage_sizes(plan: Plan) -> str:
    """Layers of each stage, equal neighbours together: "2 stages of 10, 11", "10, 11 by stage"; "" of one."""
    counts = layer_counts(plan)
    if len(counts) == 1:
        return ""
    runs = [(size, len(list(group))) for size, group in groupby(counts)]
    said = ", ".join(f"{times} stages of {size}" if times > 1 else str(size) for size, times in runs)
    return said if len(runs) < len(counts) else f"{said} by stage"


def alternatives_table(plan: Plan, others: Sequence[Plan], take: int = 1, *, brief: bool = False) -> RenderableType:
    """The best plans, each with the value of take= that plans or starts it: `plan`, which was taken, and what the `others` lose by. Plans
    without prediction are not shown."""
    title = "" if brief else "Alternatives"
    rest = [other for other in others if other.predicted is not None and other != plan]
    faster = any(other.prediction.step_time_s < plan.prediction.step_time_s for other in rest)
    by = "slower (+), faster (-)" if faster else "slower by"
    table = _table(("take=", True), ("plan", False), ("step", True), ("memory", True), (by, False), title=title)
    several_engines = len({other.engine for other in (plan, *others)}) > 1

    def name(entry: Plan) -> Text:
        sizes = "" if brief else stage_sizes(entry)
        engine = f"{entry.engine} " if several_engines else ""
        return Text(f"{engine}{choice(entry, modes_said=not brief)}{f'; layers: {sizes}' if sizes else ''}")

    for number, entry in enumerate([*rest[: take - 1], plan, *rest[take - 1 :]], 1):
        cost = entry.prediction
        why = "chosen" if entry is plan else difference(plan.prediction, cost, 1 if brief else CAUSES_IN_A_DIFFERENCE)
        style = "bold" if entry is plan else None
        table.add_row(
            str(number), name(entry), format_seconds(cost.step_time_s), format_bytes(cost.peak_memory_bytes), Text(why), style=style
        )
    return table if rest else Text("No plan of another kind is legal and fits.")


LEAST_SHARE = 0.0005
"""Share of a step's seconds below which a difference is not said in tenths of a percent."""


def difference_text(plan: Plan, by_price: Plan | None = None) -> str:
    """A sentence on how far off predicted differences are for models like this one, or on the fastest plan `by_price` where a plainer one
    was taken; "" where no run like it was measured."""
    if by_price is not None:
        share = 1 - by_price.prediction.step_time_s / plan.prediction.step_time_s
        faster = f"{100 * share:.1f}%" if share >= LEAST_SHARE else "less than 0.1%"
        return f"The fastest by price is {faster} faster, with {unusual_text(by_price)}: search.prefer=fastest"
    if plan.predicted is None or plan.predicted.interval is None or BEYOND["engine"] in plan.predicted.beyond:
        return ""
    return f"Half of the differences predicted between published runs are off by more than {_percent(pairs_of(plan.model).half)}"


def left_over_text(plan: Plan) -> str:
    """Which factor of the GPUs no data parallelism can have, and the batches and numbers of GPUs without one; "": there is none, or it
    divides the layers."""
    gpus, batch, layers = plan.world_size, plan.global_batch_size, plan.model.num_layers
    left = left_over(gpus, batch)
    if left == 1 or (layers % left == 0 and left < gpus):
        return ""
    ways = [] if plan.run.resume else [f"train.global_batch_size={' or '.join(map(str, batches(gpus, batch)))}"]
    if others := " or ".join(map(str, counts(gpus, plan.cluster.gpus_per_node, batch))):
        ways.append(f"gpus={others}{',' if ways else ''}")
    return (
        f"gpus={gpus} has the factor {left}, which global_batch_size={batch} has not: no data parallelism takes it, tp, pp or cp must; "
        f"{', or '.join(ways)} {'leaves' if ways else 'no other number leaves'} none"
    )


def fewer_text(plan: Plan, faster: Plan) -> str:
    """A sentence that names the number of GPUs of the `faster` plan, and what it saves of a step."""
    seconds, saved = faster.prediction.step_time_s, 1 - faster.prediction.step_time_s / plan.prediction.step_time_s
    return f"FEWER GPUs ARE FASTER: gpus={faster.world_size} takes {format_seconds(seconds)} a step ({-100 * saved:.1f}%)"


def software_text(plans: Sequence[Plan], requires: Mapping[str, str], *, assumed: bool) -> str:
    """The releases that these plans of one engine are for, as their files name them too, and what must be on the nodes that other plans do
    without; "" where there is neither. `requires`: versions by distribution ("": any); `assumed`: nobody said them."""
    releases = ", ".join(f"{name} {version}" for name, version in requires.items() if version)
    packages = (
        (
            any(plan.moe_token_dispatcher_type == "flex" for plan in plans),
            "DeepEP or HybridEP (deep_ep): cluster.software.deep_ep=false plans without",
        ),
        (any(plan.tp_comm_overlap for plan in plans), "Transformer Engine's user buffers: pin.tp_comm_overlap=false plans without"),
        (any(plan.training.optimizer == "muon" for plan in plans), "emerging_optimizers, which has Muon"),
        (any(plan.training.optimizer in EIGHT_BIT for plan in plans), "bitsandbytes, which has Adam of 8 bits"),
    )
    needs = "; ".join(f"on every node {name}" for needed, name in packages if needed)
    unsaid = "; assumed of the image: cluster.software.megatron_core= and .deepspeed= say what it has" if assumed else ""
    return f"software   {'; '.join(filter(None, (releases, needs)))}{unsaid}" if releases or needs else ""


def unusual_text(plan: Plan) -> str:
    """The plan's unusual choices with how many published runs have each: "cp_comm_type (7 of 1,714 published runs), etp (none)"."""
    first, *rest = [(one.name, one.seen or "none") for one in unusual(plan.candidate)]
    return ", ".join([f"{first[0]} ({first[1]} of {PUBLISHED:,} published runs)", *(f"{name} ({seen})" for name, seen in rest)])


APART = 1.02
"""Attention of the replica with the longest samples over the mean from which on it is said."""


def samples_text(plan: Plan, padded: Plan) -> str:
    """How long supervised samples are, and what packing them gains over `padded`, the same plan with a sequence for each. The plan must
    know their lengths."""
    training = plan.training
    assert training.lengths is not None
    found = training.lengths
    about = "about " * bool(found.how)
    what = f" ({found.how})" * bool(found.how)
    said = f"samples: {about}{found.mean:,.0f} tokens in the mean, {found.longest:,} at most{what}; "
    if found.cut:
        said += f"{100 * found.lost:.2g}% of all tokens are cut off at train.seq_length={training.seq_length}, the mean is of the rest; "
    if not training.packing:
        return f"{said}{100 * (1 - found.mean / training.seq_length):.0f}% of a sequence of {training.seq_length:,} is padding"
    share = found.share(training.seq_length, plan.sample_multiple)
    faster = share * padded.prediction.step_time_s / plan.prediction.step_time_s
    said += f"{about}{share:.1f} share a sequence, {faster:.1f} times the samples a second of padded ones under this plan"
    most = waits(found.loads, plan.dp, plan.num_microbatches, plan.micro_batch_size, training.balance)
    if most < APART or not plan.cluster.software.flash_attention:
        return said
    return f"{said}; {100 * (most - 1):.0f}% more attention than the mean on the replica with the longest (data.balance={training.balance})"


def proof(plan: Plan, at_least_s: float | None, searched: Sequence[Capabilities], *, brief: bool = False, taken: bool = True) -> str:
    """What is known of the best plan of the space that was searched, which the sentence names: plans of these engines under the pins and
    the memory limit, and what of theirs only a pin takes.

    `at_least_s`: seconds that none of them undercuts; None: not known. `taken`: whether this plan is the one that was taken.
    """
    if plan.predicted is None or at_least_s is None:
        return "Not proven: the search was ended early"
    gap = 1 - at_least_s / plan.predicted.step_time_s
    names = [capabilities.engine for capabilities in searched]
    engines = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    doubled = ", groups of pp micro-batches or of that doubled" if any(each.microbatch_groups for each in searched) else ""
    alternate, ends = _alternates(plan), len(plan.model.kinds_of_layers()) > 1 or plan.model.mtp_num_layers
    how = ", in one split" if alternate else ", fewer layers in the head's" if ends else ""
    even = f" (interleaved: chunks as even as they go{how}{doubled})" if plan.pp > 1 else ""
    space = f"plans of {engines} that were searched and fit{even}"
    least = max((capabilities.least_sequence_part for capabilities in searched if "cp" in capabilities.axes), default=0)
    short = f" or into parts of less than {least:,} tokens" if least > 1 else ""
    several = [f"cp of several samples at a time{short}"] if least else []
    values = [f"{name}={value}" for each in searched for name, found in each.pinned_values.items() for value in found]
    values = values if plan.model.experts else []
    kept = [f"{name}={shown(getattr(plan, name))}" for each in searched for name in each.pinned_options if name not in each.options]
    beside = f"; not searched, only pinned: {', '.join(dict.fromkeys([*several, *values]))}" if several or values else ""
    beside += f"; left as they are unless pinned: {', '.join(dict.fromkeys(kept))}" if kept else ""
    if brief:
        one_split = plan.vpp > 1 and alternate
        even = " (interleaved: chunks as even as they go; pin.layout= takes others)" if one_split else ""
        space, beside = f"plans of {engines} that were searched and fit{even}", ""
    if gap <= NOISE:
        return f"{'Proven the fastest' if taken else 'Another of the table is proven the fastest'} of the {space}{beside}"
    return f"Not proven the fastest: one of the {space} may be up to {_percent(gap)} faster{beside}"


def _alternates(plan: Plan) -> bool:
    """Whether layers of several kinds go on behind the stages' first chunks, so that the split of an interleaved plan is no choice
    (`megatron_layout.splits_vary`); told from a plan without chunks by its runs of layers."""
    *others, _ = plan.model.layer_runs()
    if plan.vpp == 1:
        return len(others) > 1
    first = sum(span.count for stage in plan.stages for span in stage.chunk(0) if span.kind not in ENDS)
    return sum(count for _, count in others) > first


def choices_text(total: int, priced: int) -> str:
    """How many of the choices a search had to look at closely.

    >>> choices_text(7775, 6), choices_text(5, 5)
    ('6 of 7,775 choices had to be priced: the others are ruled out by bounds or rules', '5 of 5 choices had to be priced')
    """
    others = ": the others are ruled out by bounds or rules" if priced < total else ""
    return f"{priced:,} of {total:,} choices had to be priced{others}"


def uneven_text(uneven: Unevenness) -> str:
    """What routing that is not even costs, and what copies of the hot experts would save."""
    found, n = uneven.routing, uneven.parts
    lost, saved = uneven.step_s - uneven.even_s, uneven.step_s - uneven.copied_s
    said = f"routing    {found.source}: "
    if n == 1:
        said += "experts are not divided over ranks (ep=1), so that none waits for another"
    else:
        said += (
            f"the busiest of {n} expert ranks gets {times(found.busiest, n):.2f} times its even share: {format_seconds(lost)} of the step "
            f"({_percent(lost / uneven.even_s)} more than with even routing). With a copy of one more expert a rank, hot ones first, it "
            f"would get {times(found.copied, n):.2f} times (FlexMoE), which saves {format_seconds(max(0.0, saved))} less what copies "
            "exchange; no engine here copies experts"
        )
    return said + (f". The capacity drops {_percent(found.dropped)} of what is sent" if found.dropped else "")


def batch_text(training: Training, before: int) -> str:
    """What a batch of sequences makes of a step's tokens where their length was changed from that `before`, and the batch was not."""
    batch, length = training.global_batch_size, training.seq_length
    same = max(1, round(batch * before / length))
    return (
        f"batch: a step has {format_amount(batch * length)} tokens, {length / before:.3g} times those of sequences of {before} tokens: "
        f"train.global_batch_size={batch} counts sequences; {same} of them have {format_amount(same * length)}"
    )


def steps_text(training: Training, before: int) -> str:
    """What a number of steps that was said for steps of `before` tokens makes of the tokens in all, now that a step has others."""
    step = training.global_batch_size * (training.seq_length + (training.decoder_seq_length or 0))
    kept = training.steps * before
    return (
        f"steps: train.steps={training.steps} was said for steps of {format_amount(before)} tokens: {format_count(training.steps * step)} "
        f"in all now, {step / before:.3g} times the {format_count(kept)} of then; train.tokens={kept} keeps those"
    )


def even_text(ep: int, *, brief: bool = False) -> str:
    """What even routing leaves out where `ep` expert ranks wait for each other: seven pairs of runs differ only in whether balance
    was forced, Mixtral's from a checkpoint and six of Qwen3's (Megatron-Bridge's performance cards; Megatron-MoE-ModelZoo)."""
    if brief:
        return f"routing    even over {ep} expert ranks; real routers took 4.5 to 26% longer: model.routing=2, or a trace, prices yours"
    return (
        f"routing    taken to be even over {ep} expert ranks. Real routers took longer than forced balance: 4.5% from a checkpoint, 9 to "
        "26% in the first hundreds of steps (seven published pairs); model.routing=2, or a trace, prices yours"
    )


def ahead_text(plan: Plan, key: str, without: Plan) -> str:
    """Why the plan has an option that nobody asked for: the fastest of those `without` is that much slower."""
    slower = _percent(without.prediction.step_time_s / plan.prediction.step_time_s - 1)
    return f"{key}: taken unasked, as the fastest plan without takes {slower} longer; {key.partition('=')[0]}=false leaves it out"


def unasked_text(plan: Plan, key: str, asks: str, other: Plan, *, taken: bool = True, modes_said: bool = True) -> str:
    """What the fastest plan, or another, takes with a choice that nobody asked for, and what that `asks` for. `taken`: whether the fastest
    is the one that was taken; `modes_said`: as of `choice`."""
    seconds, peak = other.prediction.step_time_s, format_bytes(other.prediction.peak_memory_bytes)
    gain = f"{100 * (seconds / plan.prediction.step_time_s - 1):+.1f}%"
    changed = [each for each in OUTER_CHOICES if getattr(other, each.name) != getattr(plan, each.name)]
    alike = len(changed) <= 1 and (other.engine, other.stages) == (plan.engine, plan.stages)
    which = ("this plan" if taken else "the table's fastest with it") if alike else f"{other.engine} {choice(other, modes_said=modes_said)}"
    if gain[1:] == "0.0%":
        gains = f"{peak} for {format_bytes(plan.prediction.peak_memory_bytes)}, no slower"
    else:
        gains = f"{gain}{'' if taken else ' beside the fastest of the table'}, {format_seconds(seconds)} and {peak}"
    return f"Not asked for: {key}: {gains} ({which}); {asks}"


def wide_tp_text(plan: Plan, other: Plan | None, why: str, risk: float | None = None) -> str:
    """What a plan whose tp is wider than the innermost network level is to be compared with. `risk`: as in `explanation_text`."""
    level = plan.cluster.levels[0].name
    said = f"tp {plan.tp} is wider than {level}, which few published runs have been: its price is less sure than the others'. "
    if other is None:
        return f"{said}Inside {level} there is no plan: {why}"
    costs = difference(plan.prediction, other.prediction)
    return f"{said}With pin.tp={other.tp}, {choice(other)} takes {format_seconds(other.prediction.step_time_s)}: {costs}{_riskier(risk)}"


def _riskier(risk: float | None) -> str:
    if risk is None:
        return ""
    return f"; none with it has at most a {100 * USUAL_RISK:g}% chance of running out of memory, this one {format_amount(100 * risk, 2)}%"


def explanation_text(
    chosen: Plan, question: str, plan: Plan | None, why: str, pinned: Collection[str] = (), risk: float | None = None
) -> str:
    """Why the chosen plan does not have a choice: `plan` is the best that has it; None: there is none, because of `why`. `pinned`: the
    choices that were fixed otherwise, "tp": a faster plan than the chosen one may be had without them. `risk`: the plan's chance of running
    out of memory, where it is above what is usual and the chosen one's is not."""
    if plan is None:
        return f"Why not {question}? {why}"
    best, with_it = chosen.prediction, plan.prediction
    if with_it.step_time_s <= best.step_time_s and plan.candidate == chosen.candidate:
        return f"Why not {question}? The plan has it"
    seconds, peak = format_seconds(with_it.step_time_s), format_bytes(with_it.peak_memory_bytes)
    than = difference(best, with_it)
    said = f"The best plan with it, {plan.engine} {choice(plan)}, takes {seconds} and {peak}: {than}"
    said += _riskier(risk)
    if risk is None and with_it.step_time_s < best.step_time_s:
        words = question.split()
        held = [name for name in (word.split("=")[0] for word in words) if name in pinned]
        if held:
            said += "; you fixed another: " + " ".join(f"pin.{name}={getattr(chosen, name)}" for name in held)
        else:
            said += "; the search takes it only where it is asked for: " + " ".join(f"pin.{word}" for word in words)
    return f"Why not {question}? {said}"
