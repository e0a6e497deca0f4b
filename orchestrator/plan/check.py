"""Whether a plan that somebody wrote or edited is legal: every error names the key in plan.json."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from msgspec.structs import replace

from orchestrator.errors import InputError
from orchestrator.model.describe import with_tower_first
from orchestrator.model.families import describe_for
from orchestrator.model.parts.vision import part_of
from orchestrator.model.spec import ModelSpec
from orchestrator.plan.plan import Plan
from orchestrator.strategy.capabilities import Capabilities, Rule
from orchestrator.strategy.layout import LayerSpan, Stage
from orchestrator.strategy.legality import PLANNER, rules_of, unsuited, why_not_stages
from orchestrator.strategy.megatron_layout import held_first
from orchestrator.strategy.pins import MemoryLimit
from orchestrator.strategy.spec import OUTER_CHOICES, RECOMPUTE_ORDER
from orchestrator.strategy.tree import FIXED_WITH
from orchestrator.strategy.workload import Workload
from orchestrator.units import format_bytes

KEYS = frozenset({"num_microbatches", *(choice.name for choice in OUTER_CHOICES)})
"""Keys of plan.json that a rule may be about."""


def workload_of(plan: Plan) -> Workload:
    """What the plan is for, its model with the tower that looks at images on the first stage where no span of the plan is of it."""
    model = describe_for(plan.model, plan.training)
    if plan.model.vision is not None and all(part_of(span.kind) == "language" for _, span in plan.spans()):
        model = with_tower_first(model)
    return Workload(model=model, training=plan.training, cluster=plan.cluster)


def bound_to_layout(plan: Plan) -> str:
    """What keeps this plan of DeepSpeed's from having its states written by place in the whole model (workers/deepspeed_states.py),
    for any layout; "": nothing. Stage 0 in 16 bits and fp16 wrap optimizers that give no access to them, and of others than AdamW nobody
    has tried it; there DeepSpeed's own checkpoints are written, for one layout."""
    training = plan.training
    if training.optimizer != "adamw":
        return f"train.optimizer={training.optimizer}"
    if training.precision == "fp16":
        return "train.precision=fp16"
    return "" if plan.zero_stage or training.precision == "fp32" else f"zero_stage=0 in {training.precision}"


def has_states_by_place(plan: Plan) -> bool:
    """Whether a checkpoint of this plan of DeepSpeed's is for any layout (`bound_to_layout`)."""
    return not bound_to_layout(plan)


def check_plan(plan: Plan, capabilities: Capabilities) -> None:
    """Raises InputError for a plan that its engine, which can do this, can't run."""
    if plan.engine != capabilities.engine:
        raise InputError("engine", plan.engine, "is not known here", [capabilities.engine])
    workload = workload_of(plan)
    model = workload.model
    _check_numbers(plan)
    _check_rules(plan, capabilities, workload)
    _check_stages(plan, model, capabilities)
    for index, stage in enumerate(plan.stages):
        _check_recompute(f"stages[{index}].layers", stage, model, capabilities, plan.schedule)
    if capabilities.recompute_varies in ("never", "job"):
        _check_same_recompute(plan, model, capabilities.recompute_varies == "never")


def fits(plan: Plan, limit: MemoryLimit) -> bool:
    """Whether no stage of the plan is predicted to need more than its GPUs may use."""
    try:
        check_fits(plan, limit)
    except InputError:
        return False
    return True


def check_fits(plan: Plan, limit: MemoryLimit) -> None:
    """Raises InputError where a stage of the plan is predicted to need more than its GPUs may use."""
    peaks = [stage.peak_memory_bytes for stage in plan.prediction.by_stage]
    parts = [plan.cluster.part_of(index, plan.pp) for index in range(plan.pp)]
    rooms = [limit.usable_of(part) for part in parts]
    worst = max(range(plan.pp), key=lambda index: peaks[index] - rooms[index])
    if peaks[worst] > rooms[worst]:
        kept = (limit.parts[parts[worst]] if limit.parts else limit.limit) - rooms[worst]
        why = f"needs {format_bytes(peaks[worst])} of {format_bytes(rooms[worst])} ({format_bytes(kept)} kept free)"
        raise InputError("plan", plan.candidate.label(), why)


def _check_numbers(plan: Plan) -> None:
    for key in ("world_size", "tp", "pp", "vpp", "cp", "ep", "etp", "dp", "micro_batch_size", "num_microbatches", "global_batch_size"):
        if getattr(plan, key) < 1:
            raise InputError(key, getattr(plan, key), "must be at least 1")
    product = plan.tp * plan.pp * plan.cp * plan.dp
    if plan.world_size != product:
        degrees = f"{plan.tp} x {plan.pp} x {plan.cp} x {plan.dp} = {product}"
        raise InputError("world_size", plan.world_size, f"is not tp x pp x cp x dp = {degrees}")
    if plan.world_size != plan.cluster.num_gpus:
        raise InputError("world_size", plan.world_size, f"is not cluster.num_gpus={plan.cluster.num_gpus}")
    batch = plan.training.global_batch_size
    if plan.global_batch_size != batch:
        raise InputError("global_batch_size", plan.global_batch_size, f"is not training.global_batch_size={batch}")
    samples = plan.micro_batch_size * plan.num_microbatches * plan.dp
    if samples != plan.global_batch_size:
        parts = f"{plan.micro_batch_size} x {plan.num_microbatches} x {plan.dp}"
        why = f"is not micro_batch_size x num_microbatches x dp = {parts} = {samples}"
        raise InputError("global_batch_size", plan.global_batch_size, why)


def _check_rules(plan: Plan, capabilities: Capabilities, workload: Workload) -> None:
    why = unsuited(capabilities, workload)
    if why is not None:
        raise InputError("engine", plan.engine, why)
    fixed = workload.model.fixed_kinds
    modes = {span.recompute for stage in plan.stages for span in stage.layers if span.kind not in fixed}
    used = sorted(modes or {"none"}, key=RECOMPUTE_ORDER.index)
    strategy = plan.strategy
    by_mode = [replace(plan.candidate, strategy=replace(strategy, recompute=mode)) for mode in used]
    for rule in rules_of(capabilities, workload):
        about_modes = "recompute" in rule.needs
        for candidate in by_mode if about_modes else [plan.candidate]:
            why = rule.check(candidate, workload)
            if why is not None:
                source = "" if rule.engine_rule == PLANNER else f" (rule {rule.id}: {rule.engine_rule})"
                key = _key(rule)
                if about_modes:
                    raise InputError("stages.recompute", candidate.strategy.recompute, why + source)
                raise InputError(key, getattr(plan, key), why + source)


def _key(rule: Rule) -> str:
    """The key of plan.json that a rule is about: the last one that it reads; the engine where it reads none."""
    for name in reversed(rule.needs):
        key = name if name in KEYS else FIXED_WITH.get(name, name)
        if key in KEYS:
            return key
    return "engine"


def _check_stages(plan: Plan, model: ModelSpec, capabilities: Capabilities) -> None:
    if len(plan.stages) != plan.pp:
        raise InputError("stages", len(plan.stages), f"is not pp={plan.pp} stages")
    for index, stage in enumerate(plan.stages):
        for j, span in enumerate(stage.layers):
            where = f"stages[{index}].layers[{j}]"
            if not 0 <= span.chunk < plan.vpp:
                raise InputError(f"{where}.chunk", span.chunk, f"must be 0 to vpp-1={plan.vpp - 1}")
            if span.count < 1:
                raise InputError(f"{where}.count", span.count, "must be at least 1")
            if j and span.chunk < stage.layers[j - 1].chunk:
                raise InputError(f"{where}.chunk", span.chunk, "chunks must stand in order")
    _check_order(plan, model)
    inner = {run.layer.kind for run in model.runs[1:-1]}
    sizes = {
        (index, chunk): sum(span.count for span in stage.chunk(chunk) if span.kind in inner)
        for index, stage in enumerate(plan.stages)
        for chunk in range(plan.vpp)
    }
    if sizes[0, 0] < (held := held_first(model)):
        raise InputError("stages[0].layers", sizes[0, 0], f"must be {held} at least, to which the tower gives what it saw")
    if why := why_not_stages(capabilities, plan.model, [*sizes.values()]):
        raise InputError("stages", [*sizes.values()], why)


def _check_order(plan: Plan, model: ModelSpec) -> None:
    """Raises InputError unless every layer comes once, in the model's order: embedding first, head last, each kind counted from 0."""
    expected = [(run.layer.kind, run.count) for run in model.runs]
    done = {kind: 0 for kind, _ in expected}
    left = dict.fromkeys(done, 0)
    for kind, count in expected:
        left[kind] += count
    position, used = 0, 0
    for chunk in range(plan.vpp):
        for index, stage in enumerate(plan.stages):
            for j, span in enumerate(stage.layers):
                if span.chunk != chunk:
                    continue
                where = f"stages[{index}].layers[{j}]"
                if span.kind not in done:
                    raise InputError(f"{where}.kind", span.kind, "is no layer of this model", list(done))
                if position == len(expected):
                    raise InputError(f"{where}.kind", span.kind, f"stands behind the model's last layer ({expected[-1][0]})")
                kind, count = expected[position]
                if span.kind != kind:
                    raise InputError(f"{where}.kind", span.kind, f"{kind} layer {done[kind]} of {left[kind]} comes here")
                if span.first != done[kind]:
                    raise InputError(f"{where}.first", span.first, f"{kind} layer {done[kind]} comes here")
                if used + span.count > count:
                    raise InputError(
                        f"{where}.count", span.count, f"the model has {left[kind]} {kind} layers, {left[kind] - done[kind]} left"
                    )
                done[kind] += span.count
                used += span.count
                if used == count:
                    position, used = position + 1, 0
    if position < len(expected):
        kind = expected[position][0]
        raise InputError("stages", None, f"{left[kind] - done[kind]} of the model's {left[kind]} {kind} layers are in no stage")


def _check_recompute(where: str, stage: Stage, model: ModelSpec, capabilities: Capabilities, schedule: str) -> None:
    """Raises InputError where a layer of the stage is recomputed in a mode that the engine does not have there."""
    fixed = model.fixed_kinds
    for j, span in enumerate(stage.layers):
        if span.kind in fixed and span.recompute != "none":
            raise InputError(f"{where}[{j}].recompute", span.recompute, f"the {span.kind} is never recomputed", ["none"])
        if span.kind not in fixed and span.recompute not in capabilities.recompute:
            raise InputError(f"{where}[{j}].recompute", span.recompute, f"{capabilities.engine} has not", capabilities.recompute)
    if capabilities.recomputes_by_layer(schedule):
        return
    inside = [(j, span) for j, span in enumerate(stage.layers) if span.kind not in fixed]
    modes = {span.recompute for _, span in inside}
    if len(modes) > 1 and not modes <= {"none", "full"}:
        j = next(j for j, span in inside if span.recompute != inside[0][1].recompute)
        why = "one stage either recomputes the same modules of all its layers or its first layers fully (--recompute-method block)"
        raise InputError(f"{where}[{j}].recompute", stage.layers[j].recompute, why)
    encoder = {edge.source for edge in model.edges}
    _check_first_layers(where, (((span.chunk, span.kind in encoder), j, span) for j, span in inside), "a stage")


def _check_first_layers(where: str, spans: Iterable[tuple[object, int, LayerSpan]], of: str) -> None:
    """What is recomputed in full must be the first layers of each chunk, as many in all (--recompute-num-layers). `spans`: with the chunk
    that they are in and their index in `where`."""
    prefixes = []
    for _, group in groupby(spans, key=lambda item: item[0]):
        full = size = 0
        for _, j, span in group:
            if span.recompute == "full":
                if full != size:
                    raise InputError(f"{where}[{j}].recompute", "full", "the layers that are recomputed must be the chunk's first")
                full += span.count
            size += span.count
        prefixes.append((full, size))
    most = max((full for full, _ in prefixes), default=0)
    for full, size in prefixes:
        if full != min(most, size):
            why = f"recomputes {full} layers of a chunk and {most} of another: the number is one for {of} (--recompute-num-layers)"
            raise InputError(where, None, why)


def _check_same_recompute(plan: Plan, model: ModelSpec, whole: bool) -> None:
    """Raises InputError where layers have different modes of recompute; unless `whole`, the first so many of every chunk may be in full."""
    fixed = model.fixed_kinds
    inside = [(index, j, span) for index, stage in enumerate(plan.stages) for j, span in enumerate(stage.layers) if span.kind not in fixed]
    modes = {span.recompute for *_, span in inside}
    if not whole and modes == {"none", "full"}:
        encoder = {edge.source for edge in model.edges}
        _check_first_layers("stages", (((index, span.chunk, span.kind in encoder), j, span) for index, j, span in inside), "all stages")
    elif len(modes) > 1:
        raise InputError("stages", None, f"{plan.engine} recomputes all layers in the same way, not {' and '.join(sorted(modes))}")
