"""A placement in words: who has which GPUs and why, the step's timeline, the rate, and what would shorten it."""

from __future__ import annotations

from typing import Any

import msgspec

from orchestrator.rl.choose import Chosen
from orchestrator.rl.generation import Generation
from orchestrator.rl.job import RlJob
from orchestrator.rl.step import Step
from orchestrator.units import format_amount, format_bytes, format_seconds

BAR = 40
"""Characters of the timeline."""
TAIL = 0.2
"""Share of a step from which its last few sequences are worth a word."""
CLEAR = 0.1
"""Share by which steps differ where the faster one is told surely: 13 of 14 published pairs (tests/rl/test_rl_pairs.py)."""
HOUR_S = 3600


def lines(chosen: Chosen, price_per_gpu_hour: float | None = None) -> list[str]:
    """What the screen says, line by line."""
    best, stale, price = chosen.best, chosen.stale, cost(chosen.best, price_per_gpu_hour)
    found = [
        f"placement: {placed(best)}",
        *([f"why: {why(chosen)}"] if best.generation else []),
        *([f"generation: {generated(best.generation)}"] if best.generation else []),
        f"training: {trained(best)}",
        f"step: {format_seconds(best.seconds)} (90%: {_ends(best)}), {rate(best)}",
        *timeline(best),
        *([f"the next node: {next_node(chosen)}"] if best.generation else []),
    ]
    if price is not None:
        found.append(f"cost: {format_amount(price)} a step (at {price_per_gpu_hour:g} a GPU-hour)")
    if stale is not None:
        gain = best.seconds / stale.seconds
        verdict = f"{format_amount(gain)} times as fast" if gain > 1 else f"no faster ({format_seconds(stale.seconds)})"
        found.append(f"rl.staleness=1 (samples one step old): {verdict}: {placed(stale)}, {format_seconds(stale.seconds)} a step")
    return found


def one_sample(job: RlJob) -> list[str]:
    """A line where a prompt's only response is compared with itself; verl takes that one's mean as 0 (trainer/ppo/core_algos.py)."""
    if job.samples > 1 or job.keys.algorithm != "grpo":
        return []
    return ["rl.samples=1: GRPO's advantage is a reward less its prompt's mean, zero of one: nothing is learnt (verl: the bare reward)"]


def lengths(job: RlJob) -> str:
    """How long prompts and responses are, with the longest, by which memory and what programs are told are reckoned."""
    responses, prompt = job.responses, job.keys.max_prompt_length
    most = "the longest too: rl.max_prompt_length= plans for longer ones" if prompt is None else f"{prompt:,} at most"
    prompts = f"prompts {job.prompt_length:,} tokens in the mean, {most}"
    return f"lengths: {prompts}; responses {responses.mean:,.0f} in the mean, {responses.longest:,} at most"


def placed(one: Step) -> str:
    """Which GPUs do what."""
    if one.generation is None:
        return f"training on {one.gpus} GPUs, responses are given"
    if one.colocated:
        states = "training's states in host memory meanwhile" if one.offloads else "training's states stay on them"
        return f"colocated on {one.gpus} GPUs, {states}"
    age = f"samples {one.staleness} step{'s' if one.staleness > 1 else ''} old" if one.staleness else "one after the other"
    return f"split, {one.generation_gpus} GPUs generate, {one.training_gpus} train, {age}"


def why(chosen: Chosen) -> str:
    """What the other placements would take and what costs them time, or why there are none."""
    best = chosen.best
    said = []
    for one in chosen.others:
        more = one.seconds / best.seconds - 1
        near = ", closer than prices tell apart" if more < CLEAR else ""
        said.append(f"{placed(one)}: {format_seconds(one.seconds)} (+{100 * more:.0f}%{near}), {lost(one)}")
    return "; ".join([*said, *chosen.why_not]) or "no other was asked for"


def lost(one: Step) -> str:
    """What a placement spends beside its passes: seconds that states and weights move, or that GPUs wait for each other."""
    if one.colocated:
        moved = sum(one.of(name) for name in ("transfer", "offload", "onload"))
        return f"{format_seconds(moved)} of it states and weights on their way"
    busy = {pool: sum(phase.seconds for phase in one.phases if phase.pool == pool) for pool in ("generation", "training")}
    idle = [f"the {gpus} that {what} wait {format_seconds(one.seconds - busy[pool])}" for pool, gpus, what in
            (("generation", one.generation_gpus, "generate"), ("training", one.training_gpus, "train"))]  # fmt: skip
    return " and ".join(idle)


def generated(made: Generation) -> str:
    """How responses are made."""
    layout = f"tp={made.layout.tp}" + (f" dp={made.layout.dp}" if made.layout.dp > 1 else "")
    held = {
        "cache": f"as many as {format_bytes(made.cache_bytes)} of keys and values a GPU hold",
        "concurrency": "as rl.concurrency allows",
        "samples": "all that it has",
    }[made.limited_by]
    rest = f"{100 * made.tail_s / made.seconds:.0f}% of it with a tenth of them or fewer"
    return (
        f"{made.engines} engines of {layout}, {made.running} sequences at once{' a rank' if made.layout.dp > 1 else ''} ({held}); "
        f"{format_amount(made.tokens_per_s)} tokens/s, {rest}"
    )


def trained(one: Step) -> str:
    """The training half's layout."""
    plan = one.training
    degrees = " ".join(f"{name}={getattr(plan, name)}" for name in ("tp", "cp", "pp", "ep", "dp") if getattr(plan, name) > 1)
    modes = sorted({span.recompute for stage in plan.stages for span in stage.layers})
    recompute = "" if modes == ["none"] else f", recompute {'/'.join(modes)}"
    peak = format_bytes(plan.prediction.peak_memory_bytes)
    return (
        f"{plan.engine} {degrees or 'dp=1'} zero_stage={plan.zero_stage}, {plan.num_microbatches} micro-batches of "
        f"{plan.micro_batch_size * plan.training.seq_length:,} tokens an update{recompute}; {peak} a GPU"
    )


def rate(one: Step) -> str:
    """Tokens a second, with its interval."""
    low, high = one.tokens / one.interval[1], one.tokens / one.interval[0]
    return f"{format_amount(one.tokens_per_s)} tokens/s (90%: {format_amount(low)} to {format_amount(high)})"


def _ends(one: Step) -> str:
    return f"{format_seconds(one.interval[0])} to {format_seconds(one.interval[1])}"


def timeline(one: Step) -> list[str]:
    """A line a phase: when it runs, on which GPUs, and how long."""
    found = []
    width = max(len(phase.name) for phase in one.phases)
    for phase in one.phases:
        first = round(BAR * phase.starts_s / one.seconds)
        last = max(first + 1, round(BAR * phase.ends_s / one.seconds))
        bar = (" " * min(first, BAR - 1) + "#" * (last - first))[:BAR]
        who = "" if one.colocated else f" {phase.gpus} GPUs"
        share = 100 * phase.seconds / one.seconds
        found.append(f"  {phase.name:<{width}} |{bar:<{BAR}}| {format_seconds(phase.seconds)} {share:.0f}%{who}".rstrip())
    return found


def next_node(chosen: Chosen) -> str:
    """What a node more would make of the step, where it does most first."""
    best = chosen.best
    said = []
    for one in chosen.grown:
        gain = 100 * (1 - one.seconds / best.seconds)
        said.append(f"{one.gpus} GPUs for {one.half}: about {format_seconds(one.seconds)} a step (-{max(gain, 0):.0f}%)")
    tail = best.generation.tail_s if best.generation else 0.0
    if tail > TAIL * best.seconds:
        said.append(f"{format_seconds(tail)} of a step are its last few sequences, which no node shortens")
    return "; ".join(said)


def cost(one: Step, price_per_gpu_hour: float | None) -> float | None:
    """Price of a step; None without a price."""
    return None if price_per_gpu_hour is None else price_per_gpu_hour * one.gpus * one.seconds / HOUR_S


def summary(one: Step) -> dict[str, Any]:
    """A step as JSON has it, without its training half's plan."""
    figures = {name: value for name, value in msgspec.structs.asdict(one).items() if name != "plans"}
    found: dict[str, Any] = msgspec.to_builtins(figures)
    return {"tokens_per_s": one.tokens_per_s, "tokens_per_s_90": [one.tokens / one.interval[1], one.tokens / one.interval[0]], **found}
