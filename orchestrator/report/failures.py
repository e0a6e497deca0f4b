"""What checkpoints hold and allow, what failures cost, and what the training would be on another number of GPUs: lines of a report.

Failures come independently, at a mean time between failures of the whole job M. A save stops the training for `save_s`, a failure costs
what was done since the last save and `restart_s`. J. W. Young, "A first order approximation to the optimum checkpoint interval",
Communications of the ACM 17 (1974); J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future
Generation Computer Systems 22 (2006).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from orchestrator.plan import LONG_S, Plan
from orchestrator.plan.check import bound_to_layout
from orchestrator.report.budget import Budget, budget, format_time
from orchestrator.report.text import choice, difference
from orchestrator.strategy.capabilities import StateBytes
from orchestrator.units import format_amount, format_bytes, format_seconds
from orchestrator.values import Value


def mtbf_of_job(node_mtbf_s: float, num_nodes: int) -> float:
    """Seconds between two failures of a job that needs all of its nodes.

    Llama 3: 419 unexpected interruptions in 54 days on 2,048 nodes (arXiv 2407.21783, section 3.3.4), 6,334 hours a node:

    >>> round(mtbf_of_job(6334 * 3600, 2048) / 3600, 1)
    3.1
    """
    return node_mtbf_s / num_nodes


def goodput(interval_s: float, save_s: float, restart_s: float, mtbf_s: float) -> float:
    """The share of the time that trains, with a save after each `interval_s` seconds of training.
    Daly's complete model: the work between two saves over the time that it takes with failures in work, save and restart.

    Failures are rare, and each 1,000 s of training save for 10: nearly 1000/1010.

    >>> round(goodput(1000, 10, 100, 1e9), 4), round(goodput(1000, 10, 100, 10_000), 4)
    (0.9901, 0.9316)
    """
    try:
        return interval_s / (mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1((interval_s + save_s) / mtbf_s))
    except OverflowError:  # failures come so fast that no restart ends
        return 0.0


def young(save_s: float, mtbf_s: float) -> float:
    """Seconds of training between saves that are best in the first order (Young 1974).

    >>> young(50, 10_000)
    1000.0
    """
    return math.sqrt(2 * save_s * mtbf_s)


def daly(save_s: float, mtbf_s: float) -> float:
    """Seconds of training between saves that are best in a higher order (Daly 2006); the mean time between failures itself where a save
    takes twice that or longer.

    >>> round(daly(50, 10_000)), daly(50, 20)
    (967, 20)
    >>> max(range(900, 1100), key=lambda interval_s: goodput(interval_s, 50, 300, 10_000))
    967
    """
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = save_s / (2 * mtbf_s)
    return young(save_s, mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s


HOUR_S = 3600.0
LEAST_SHARE = 1e-6
"""A share of the time that trains, below which no length of the training is told."""


def checkpoint_bytes(parameters: int, states: StateBytes) -> float:
    """Bytes of weights, master weights and moments of the whole model: what an engine's checkpoint holds at most, whatever the layout.

    >>> checkpoint_bytes(10**9, StateBytes(weight=2, gradient=4, master=4, moments=8)) / 1e9
    14.0
    """
    return parameters * (states.weight + states.master + states.moments)


def checkpoint_text(plan: Plan, nbytes: float, reshardable: bool) -> str:
    """What later changes a checkpoint of this plan allows, and what is lost where the run restarts; "" without checkpoints."""
    every = plan.run.save_every
    if not every or plan.predicted is None:
        return ""
    if reshardable:
        allows = f"a later run of engine={plan.engine} may have other GPUs, tp, pp, cp, ep, dp and ZeRO stage"
    else:
        allows = f"with {bound_to_layout(plan)} a later run must have this layout on {plan.world_size} ranks"
    lost = format_time(every * plan.predicted.step_time_s / 2)
    size = format_bytes(nbytes)
    return f"one every {every:,} steps, of up to {size}: {allows}; another engine takes the weights; a restart loses {lost} on average"


class Failures(Value, frozen=True, kw_only=True):
    """What a user states of the cluster: hours between two failures of one node, bytes/s of the storage for all ranks together, and seconds
    from a failure to the first step without the reading of the checkpoint."""

    mtbf_hours: float
    storage_bandwidth: float
    restart_s: float


def best_interval(plan: Plan, nbytes: float, of: Failures) -> int:
    """Steps between checkpoints that are best under these failures (Daly), one at the least."""
    nodes = -(-plan.world_size // plan.cluster.gpus_per_node)
    return max(1, round(daly(nbytes / of.storage_bandwidth, mtbf_of_job(of.mtbf_hours * HOUR_S, nodes)) / plan.prediction.step_time_s))


def saves_on_its_way(plan: Plan) -> bool:
    """Whether the plan saves before the last step."""
    return 0 < plan.run.save_every < plan.training.steps


def steps_between_saves(plan: Plan, nbytes: float, of: Failures) -> int:
    """Steps after which the plan saves; where it does not but at its end, those that are best."""
    return plan.run.save_every if saves_on_its_way(plan) else best_interval(plan, nbytes, of)


def goodput_of(plan: Plan, nbytes: float, of: Failures, steps: int) -> float:
    """The share of the time that trains with a save of so many bytes after each `steps` steps, at least LEAST_SHARE."""
    nodes = -(-plan.world_size // plan.cluster.gpus_per_node)
    save_s = nbytes / of.storage_bandwidth
    mtbf_s = mtbf_of_job(of.mtbf_hours * HOUR_S, nodes)
    return max(LEAST_SHARE, goodput(steps * plan.prediction.step_time_s, save_s, of.restart_s + save_s, mtbf_s))


def unsaved_text(plan: Plan, nbytes: float, of: Failures | None, requeue: int) -> str:
    """What a plan without checkpoints, or with one at its end alone, loses, and an interval for them: the best one where failures are
    stated, else an hour. "" where the training takes up to an hour and is put back into no queue (`requeue` times)."""
    if plan.predicted is None or saves_on_its_way(plan):
        return ""
    step_s = plan.predicted.step_time_s
    takes = plan.training.steps * step_s
    if takes <= LONG_S and not requeue:
        return ""
    last = f"{plan.run.export_to} gets the last weights alone" if plan.run.export_to else "nor of the last step"
    none = f"no checkpoint is written in {format_time(takes)} of training, {last}"
    if plan.run.save_every:
        none = f"the last step of {format_time(takes)} of training has the only checkpoint, and a run that is killed before has none"
    again = f"; after a failure slurm.requeue={requeue} begins at the first step again" if requeue else ""
    every = max(1, round(HOUR_S / step_s)) if of is None else best_interval(plan, nbytes, of)
    apart = "one an hour" if of is None and every > 1 else f"one in {format_time(every * step_s)}{' (Daly 2006)' if of else ''}"
    proposed = f"train.save_every={every} writes {apart}, of up to {format_bytes(nbytes)}, and the last"
    return f"train.save_every={plan.run.save_every}: {none}{again}; {proposed}"


def failures_text(plan: Plan, nbytes: float, of: Failures, done: int = 0) -> str:
    """The goodput at the plan's save interval, and at the best one."""
    nodes = -(-plan.world_size // plan.cluster.gpus_per_node)
    mtbf_s = mtbf_of_job(of.mtbf_hours * HOUR_S, nodes)
    save_s = nbytes / of.storage_bandwidth
    restart_s = of.restart_s + save_s
    several = f" ({of.mtbf_hours:g} hours of a node, over {nodes} nodes)" if nodes > 1 else ""
    parts = [f"one in {format_time(mtbf_s)}{several}; a save takes {format_seconds(save_s)}, a restart {format_time(restart_s)}"]

    def said(steps: int) -> str:
        share = goodput_of(plan, nbytes, of, steps)
        if share <= LEAST_SHARE:
            return f"less than {LEAST_SHARE:g} of the time trains: failures come before a restart and a save are done"
        takes = budget(plan, done=done).said("seconds", format_time, times=1 / share)
        return f"{100 * share:.1f}% of the time trains, the training takes {takes}"

    if plan.run.save_every:
        parts.append(f"with train.save_every={plan.run.save_every}, {said(plan.run.save_every)}")
    best = best_interval(plan, nbytes, of)
    parts.append(f"best is train.save_every={best} (Daly 2006): {said(best)}")
    return "; ".join(parts)


def elsewhere_text(
    plan: Plan,
    gpus: int,
    other: Plan | None,
    why: str,
    refused: str | None,
    chance: float | None = None,
    takes_of: Callable[[Plan], Budget] = budget,
) -> str:
    """What the same training would be on so many GPUs, by its best plan there. `takes_of`: what a plan's training takes."""
    if other is None:
        return f"With gpus={gpus} there is no plan: {why}"
    seconds = format_seconds(other.prediction.step_time_s)
    alone = 100 * (plan.world_size / other.world_size - 1)
    idle = "" if other.world_size == gpus else f" {other.world_size} of them are best used"
    took, takes = (takes_of(one).said("whole_s", format_time) for one in (plan, other))
    route = "checkpoints of this plan go there whole" if refused is None else f"no checkpoint of this plan goes there: it {refused}"
    costs = f"{seconds} a step, {difference(plan.prediction, other.prediction)} ({alone:+.1f}% by the number of GPUs alone)"
    costs += "" if chance is None else f", {format_amount(100 * chance, 2)}% chance of running out of memory"
    return f"With gpus={gpus}{idle}: {other.engine} {choice(other)}, {costs}; the training takes {takes}, here {took}; {route}"
