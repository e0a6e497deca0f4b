"""The fastest placement of a step: each way to divide the GPUs, with the fastest layout of generation and the planner's own plan for the
rest.

Generation is priced for every layout that is legal on every division; plans are asked for around the one that looks best (`split`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import ceil, exp, log
from typing import Final, Literal

from msgspec.structs import replace

from orchestrator.cost.calibration import Calibration
from orchestrator.errors import InputError, NoPlanError
from orchestrator.hardware.spec import Cluster
from orchestrator.model.spec import Architecture
from orchestrator.plan import Plan
from orchestrator.rl.decode import Decoder, Layout, MeasuredDecoder, layout_refused
from orchestrator.rl.generation import Generation, Room, generation, room
from orchestrator.rl.job import GENERATES_NOTHING, RlJob
from orchestrator.rl.programs import PROGRAMS
from orchestrator.rl.step import STATES, Model, Plans, Step, forwards, others_bytes, states_bytes, step, transfer_seconds
from orchestrator.strategy.capabilities import Traits
from orchestrator.units import GIB, format_bytes
from orchestrator.values import Value

Ask = Callable[[int, float, Model], Plan]
"""The fastest plan of a model's training on so many GPUs, with so many bytes of each kept free for others. Raises NoPlanError, InputError
where there is none."""

ASLEEP: Final = 2.4 * GIB
"""Bytes of a GPU that an engine keeps while it sleeps: its context, CUDA graphs and communicators (vLLM: .8 GiB at tp=1, 2.4 at tp=2;
github:NVIDIA-NeMo/RL issue 223; 7.0 of a model of 1T at tp=8 over two nodes, github:vllm-project/vllm issue 47654)."""


MOST_DIVISIONS: Final = 16
"""Divisions of the GPUs into two pools that are tried: by nodes, of large clusters by several."""


SAVED: Final = 0.9
"""Share of the GPU-seconds of a training that it needs at least on fewer GPUs: with less traffic between them, and less memory."""
DRAWS: Final = 8
"""Draws of the lengths that the interval of the fastest step holds."""


class Question(Value, frozen=True, kw_only=True):
    """What a choice is made for."""

    job: RlJob
    architecture: Architecture
    cluster: Cluster
    calibration: Calibration
    traits: Traits


def aged(question: Question, staleness: int) -> Question:
    """The question with samples of this age: what shares its GPUs with training has samples of its own step."""
    return replace(question, job=replace(question.job, keys=replace(question.job.keys, staleness=staleness)))


class Grown(Value, frozen=True, kw_only=True):
    """What `gpus` GPUs more would make of the step, given to one half, or to both where they share all GPUs. No plan is asked for: training
    is taken to need as many GPU-seconds as before."""

    half: Literal["both", "generation", "training"]
    gpus: int
    seconds: float


class Chosen(Value, frozen=True, kw_only=True):
    """The fastest step, the best of each other placement, and why there is none of one."""

    best: Step
    others: tuple[Step, ...]
    why_not: tuple[str, ...] = ()
    stale: Step | None = None
    """The fastest step with samples one step old, where on-policy was asked; None: there is none."""
    grown: tuple[Grown, ...] = ()
    """What a node more would do, the best first."""


def layouts(question: Question, gpus: int) -> Iterator[Decoder]:
    """Decoders of every layout that an engine may have on these GPUs, with rl.tp= and rl.dp= of that one alone."""
    keys, cluster, a = question.job.keys, question.cluster, question.architecture
    engine = replace(PROGRAMS[keys.program].engine, eager=keys.eager)
    for layout in asked_layouts(question, gpus):
        if gpus % layout.gpus == 0 and layout_refused(a, layout) is None:
            decoder = Decoder(a, cluster, question.calibration, question.traits, layout, engine)
            yield decoder if keys.measured is None else MeasuredDecoder(decoder, keys.measured)


def asked_layouts(question: Question, gpus: int) -> Iterator[Layout]:
    """Layouts that are tried on these GPUs, legal or not: powers of two and all of them, tp within a node."""
    keys, cluster, a = question.job.keys, question.cluster, question.architecture
    sizes = [size for size in range(1, gpus + 1) if gpus % size == 0 and (size & (size - 1) == 0 or size == gpus)]
    for tp in [keys.tp] if keys.tp else [size for size in sizes if size <= cluster.gpus_per_node]:
        for dp in [keys.dp] if keys.dp else [size for size in sizes if size == 1 or a.experts]:
            yield Layout(tp=tp, dp=dp)


def check_layout(question: Question, gpus: int) -> None:
    """Raises InputError where rl.tp= or rl.dp= leaves no layout on so many GPUs, with the reason of the first."""
    keys = question.job.keys
    if (keys.tp or keys.dp) and not any(layouts(question, gpus)):
        first = next(asked_layouts(question, gpus))
        why = layout_refused(question.architecture, first) or f"an engine of {first.gpus} does not divide {gpus} GPUs"
        raise InputError("rl.tp" if keys.tp else "rl.dp", keys.tp or keys.dp, f"is refused for generation: {why}")


def fastest_generation(question: Question, gpus: int, memory: float) -> tuple[Generation | None, str]:
    """(the fastest generation on these GPUs with so many bytes of each, why there is none)."""
    best: Generation | None = None
    nearest: tuple[float, Room] | None = None
    for decoder in layouts(question, gpus):
        found = room(decoder, question.job, memory)
        if found.lacking:
            if nearest is None or decoder.weight_bytes < nearest[0]:
                nearest = (decoder.weight_bytes, found)
            continue
        one = generation(decoder, question.job, gpus, found)
        if best is None or one.seconds < best.seconds * (1 - 1e-9):
            best = one
    if best is not None:
        return best, ""
    return None, f"no engine that was asked for divides {gpus} GPUs" if nearest is None else nearest[1].lacking


def divisions(cluster: Cluster) -> list[int]:
    """GPUs that generation may have of its own: nodes, or inside one node powers of two and their complements."""
    total, node = cluster.num_gpus, cluster.gpus_per_node
    if total > node:
        each = max(1, total // node // MOST_DIVISIONS) * node
        return list(range(each, total, each))
    return sorted({size for power in range(total.bit_length()) for size in (1 << power, total - (1 << power)) if 0 < size < total})


def training(question: Question, ask: Ask, gpus: int, reserved: float) -> Plans:
    """The training half on so many GPUs with so many bytes of each kept free, and room for the states of the step's other models where
    rl.offload=false has them stay. Raises NoPlanError, InputError."""
    keys, memory = question.job.keys, question.cluster.gpu.memory
    models: tuple[Model, ...] = ("policy", *(model for _, model in forwards(keys) if model in question.job.models))
    plans: Plans = {model: ask(gpus, reserved, model) for model in models}
    others = others_bytes(plans, keys) if keys.offload is False else 0.0
    if reserved + others >= memory:
        raise NoPlanError(f"the other models' states stay, {format_bytes(others)} of a GPU's {format_bytes(memory)}: rl.offload=true")
    return {**plans, "policy": ask(gpus, reserved + others, "policy")} if others else plans


def colocated(question: Question, ask: Ask) -> tuple[list[Step], str]:
    """(steps with all phases on all GPUs, the training's states in host memory meanwhile or not; why there are none)."""
    cluster, keys = question.cluster, question.job.keys
    try:
        plans = training(question, ask, cluster.num_gpus, ASLEEP)
    except (NoPlanError, InputError) as error:
        return [], str(error)
    found, why = [], ""
    share = keys.memory_share * cluster.gpu.memory
    states = states_bytes(plans["policy"], STATES)
    fits_host = states <= cluster.host_memory
    either = (True,) if PROGRAMS[keys.program].always_offloads else (False, True)
    for offloads in either if keys.offload is None else (keys.offload,):
        if offloads and not fits_host:
            host = format_bytes(cluster.host_memory)
            lacking = f"the training's states, {format_bytes(states)} a GPU, are more than its {host} of host memory"
            why = f"{why}; {lacking}" if why else lacking
            continue
        kept = question.calibration.context_bytes
        if not offloads:
            kept += states + (others_bytes(plans, keys) if keys.offload is False else 0.0)
        if keys.memory is not None and share + kept > cluster.gpu.memory:
            made, lacking = None, (
                f"generation takes rl.memory={keys.memory:g}, {format_bytes(share)} of a GPU, what stays on it {format_bytes(kept)}: more "
                f"than its {format_bytes(cluster.gpu.memory)}"
            )  # fmt: skip
        else:
            made, lacking = fastest_generation(question, cluster.num_gpus, min(share, cluster.gpu.memory - kept))
        why = lacking or why
        if made is not None:
            found.append(_step(question, made, plans, is_colocated=True, offloads=offloads))
    return found, why


def split(question: Question, ask: Ask, sizes: list[int], whole: Step | None) -> tuple[Step | None, str]:
    """(the fastest step with generation on GPUs of its own, why there is none). `whole`: a step with all phases on all GPUs. The division
    that looks best is tried until the next one looks no faster than the best that was: generation is priced for all, and of training the
    GPU-seconds are known that it needs on the numbers of GPUs that were tried."""
    made: list[tuple[int, Generation]] = []
    why = "no division of the GPUs is left"
    for size in sizes:
        found, lacking = fastest_generation(question, size, question.job.keys.memory_share * question.cluster.gpu.memory)
        if found is None:
            why = f"{size} GPUs generate: {lacking}"
        else:
            made.append((size, found))
    total = question.cluster.num_gpus
    known = {} if whole is None else {total: trains(whole)}
    """Seconds of training by its GPUs; infinite where it does not fit."""
    best: Step | None = None
    while made:

        def looks(division: tuple[int, Generation]) -> float:
            """Seconds that a step with this division takes at least, by what is known of training."""
            size, found = division
            training = gpu_seconds(known, total - size) / (total - size)
            moved = transfer_seconds(found, question.cluster, question.calibration, colocated=False)
            return moved + (max(found.seconds, training) if question.job.keys.staleness else found.seconds + training)

        next_one = min(made, key=looks) if known else made[len(made) // 2]
        if best is not None and looks(next_one) >= best.seconds:
            break
        made.remove(next_one)
        size, found = next_one
        try:
            one = _step(question, found, training(question, ask, total - size, 0.0), is_colocated=False, offloads=False)
        except (NoPlanError, InputError) as error:
            why = f"{total - size} GPUs train: {error}"
            made = [(other, found) for other, found in made if other < size]  # the others leave fewer
            continue
        known[total - size] = trains(one)
        if best is None or one.seconds < best.seconds:
            best = one
    return best, why


def gpu_seconds(known: Mapping[int, float], gpus: int) -> float:
    """GPU-seconds that training takes on so many GPUs at least: between two numbers whose seconds are `known` a power of the GPUs, beside
    them as on the nearest, of which `SAVED` may be enough on fewer; 0 where nothing is known.

    >>> gpu_seconds({32: 10.0, 8: 80.0}, 16), gpu_seconds({32: 10.0, 8: 80.0}, 64), gpu_seconds({}, 64)
    (452.5..., 320.0, 0.0)
    """
    below, above = max((one for one in known if one <= gpus), default=0), min((one for one in known if one >= gpus), default=0)
    if below and above > below:
        share = log(gpus / below) / log(above / below)
        return exp((1 - share) * log(known[below] * below) + share * log(known[above] * above))
    nearest = below or above
    return known.get(nearest, 0.0) * nearest * (SAVED if nearest > gpus else 1.0)


def trains(found: Step) -> float:
    """Seconds of a step's phases of training."""
    return sum(phase.seconds for phase in found.phases if phase.name not in ("generate", "transfer", "offload", "onload"))


def _step(question: Question, made: Generation | None, plans: Plans, *, is_colocated: bool, offloads: bool) -> Step:
    return step(question.job, question.cluster, question.calibration, made, plans, colocated=is_colocated, offloads=offloads)


def _generates(question: Question, found: Step) -> tuple[Generation, Decoder, Room]:
    """How a step generates: as priced, the engine, and its room."""
    made = found.generation
    assert made is not None
    decoder = next(one for one in layouts(question, found.generation_gpus) if one.layout == made.layout)
    return made, decoder, room(decoder, question.job, made.cache_bytes + decoder.weight_bytes + decoder.engine.workspace)


def priced_as(question: Question, found: Step, program: str) -> Step:
    """A step of the same layout and plans, with the seconds that this program takes."""
    own = aged(question, found.staleness)
    own = replace(own, job=replace(own.job, keys=replace(own.job.keys, program=program)))
    _, decoder, fitting = _generates(own, found)
    made = generation(decoder, own.job, found.generation_gpus, fitting)
    return over_draws(own, _step(own, made, found.plans, is_colocated=found.colocated, offloads=found.offloads))


def over_draws(question: Question, found: Step) -> Step:
    """The step with an interval that holds what other draws of the lengths make of it too."""
    made, decoder, fitting = _generates(question, found)
    seconds = [generation(decoder, question.job, found.generation_gpus, fitting, seed).seconds for seed in range(DRAWS)]
    draws = (min(seconds) / made.seconds, max(seconds) / made.seconds)
    return step(
        question.job, question.cluster, question.calibration, made, found.plans, colocated=found.colocated, offloads=found.offloads,
        draws=draws,
    )  # fmt: skip


def grown(question: Question, found: Step) -> tuple[Grown, ...]:
    """What a node more, or as many as an engine has, would make of this step, the best first."""
    made, training = found.generation, trains(found)
    assert made is not None
    node = ceil(made.layout.gpus / question.cluster.gpus_per_node) * question.cluster.gpus_per_node
    memory = made.cache_bytes + made.weight_bytes + PROGRAMS[question.job.keys.program].engine.workspace
    more, _ = fastest_generation(question, found.generation_gpus + node, memory)
    generated = made.seconds if more is None else min(made.seconds, more.seconds)
    trained = training * found.training_gpus / (found.training_gpus + node)
    if found.colocated:
        seconds = found.seconds - (made.seconds - generated) - (training - trained)
        return (Grown(half="both", gpus=node, seconds=seconds),)

    def with_halves(generation_s: float, training_s: float) -> float:
        """Seconds of the step with these of its halves."""
        if found.staleness:
            return found.of("transfer") + max(generation_s, training_s)
        return found.seconds - (made.seconds - generation_s) - (training - training_s)

    each = (
        Grown(half="generation", gpus=node, seconds=with_halves(generated, training)),
        Grown(half="training", gpus=node, seconds=with_halves(made.seconds, trained)),
    )
    return tuple(sorted(each, key=lambda one: one.seconds))


def fastest(question: Question, ask: Ask) -> Chosen:
    """The fastest placement. Raises NoPlanError where neither fits."""
    keys, cluster = question.job.keys, question.cluster
    if keys.algorithm in GENERATES_NOTHING:
        plans = training(question, ask, cluster.num_gpus, 0.0)
        return Chosen(best=_step(question, None, plans, is_colocated=True, offloads=False), others=())
    check_layout(question, keys.generation_gpus or cluster.num_gpus)
    steps: list[Step] = []
    why: list[str] = []
    stale: Step | None = None
    if keys.placement != "split":
        both, lacking = colocated(aged(question, 0), ask)
        steps += both
        why += [f"colocated: {lacking}"] if lacking and not both else []
    if keys.placement != "colocated" and cluster.num_gpus > 1:
        sizes = divisions(cluster) if keys.generation_gpus is None else [keys.generation_gpus]
        whole = steps[0] if steps else None
        if not keys.staleness:
            stale, _ = split(aged(question, 1), ask, sizes, whole)
            if stale is not None and whole is not None:  # there is no gain where one half waits for the other: one division says how much
                sizes = [stale.generation_gpus]
        apart, lacking = split(question, ask, sizes, whole)
        steps += [apart] if apart is not None else []
        why += [f"split: {lacking}"] if apart is None else []
    if not steps:
        lacking = "; ".join(why) or "one GPU can't be divided"
        raise NoPlanError(f"no placement fits {question.architecture.name} on {cluster.types}: {lacking}")
    steps.sort(key=lambda one: one.seconds)
    of_best = aged(question, steps[0].staleness)
    best = over_draws(of_best, steps[0])
    return Chosen(best=best, others=tuple(steps[1:]), why_not=tuple(why), stale=stale, grown=grown(of_best, best))
