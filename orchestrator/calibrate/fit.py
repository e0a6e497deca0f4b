"""Least squares in the logarithm of step times: a few named constants of an (engine, GPU), from measured runs.

The residual of a run is log(predicted / measured), with a soft loss so that runs with a cause of their own don't pull, beside a weak pull
of every constant to where it started (its datasheet value): a constant that the runs say nothing about stays. Trust-region reflective
(scipy.optimize.least_squares) within bounds, in the constants' logarithms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import exp, log
from typing import Final, NamedTuple

import numpy as np
from msgspec.structs import replace

from orchestrator.calibrate.pricing import Choose, Pricer, one_value, zero_shot
from orchestrator.calibrate.runs import Run
from orchestrator.cost.calibration import AT_ITS_BOUND, MOST_OF_A_CPU, Calibration, most
from orchestrator.errors import OrchestratorError

Group = tuple[str, str]
"""(engine, GPU) whose runs are fitted together."""
SOFT: Final = 0.08
"""Residuals beyond this (8%) count linearly, not squared."""
PRIOR: Final = 0.15
"""Weight of a constant's distance from its start against a run's residual: ten runs that ask for 10% outweigh it."""
SPAN: Final = 5.0
"""A constant may move this many times up or down unless `BOUNDS` says otherwise."""
MAX_STEPS: Final = 25
DIFFERENCE: Final = 0.02
"""Relative step of the numeric derivatives, in the scaled constants."""
BOUNDS: Final[Mapping[str, tuple[float, float]]] = {
    "gemm_efficiency": (0.3, 1.0),
    "fp8_efficiency": (0.5, 1.0),
    "attention_efficiency": (0.05, 0.8),
    "attention_backward_efficiency": (0.05, 0.7),
    "tp_overlap": (0.05, 0.85),
    "inner_efficiency": (0.2, 1.0),
    "outer_efficiency": (0.2, 1.0),
    "outer_scaling": (0.02, 1.0),
    "overlap_efficiency": (0.2, 1.0),
    "pointwise_factor": (0.6, 5.0),
    "loss_factor": (0.1, 1.5),
    "microbatch_overhead_s": (1e-5, 0.3),
    "collective_overhead_s": (2e-5, 0.05),
    "core_share": (0.1, 1.0),
    "layer_floor_s": (1e-5, 0.05),
    "expert_sync_s": (1e-4, 0.05),
    "expert_quantise_s": (1e-5, 0.05),
    "expert_efficiency": (0.2, 1.0),
}
"""What a constant can be at all. A share that is not here ends at 1 too."""
AT_BOUND: Final = 0.005
"""Relative distance from a bound, as a share of the way from one bound to the other in the logarithm, below which a constant lies at its
bound, and some cost is missing."""
STARTS: Final[Mapping[str, float]] = {
    "tp_overlap": 0.5,
    "layer_floor_s": 4e-3,
    "layers_per_message": 2.0,
    "expert_sync_s": 2e-3,
    "expert_quantise_s": 2e-3,
}
"""Values at which the search starts for constants whose default is off."""

HOST: Final = "op_overhead_s"
SLOWER_HOSTS: Final = (1.0, 8.0, 64.0)
"""Multiples of the host's time to launch an operation from which one's own runs are fitted (8: a stock stack's, `calibration.STOCK_HOST`).
Where kernels hide the launches no small change of it shows, so that a slow host would never be found from a fast one."""
ANY_HOST: Final[Mapping[str, tuple[float, float]]] = {**BOUNDS, HOST: (1e-6, 5e-3)}
"""The bounds with it."""
CPU_BOUNDS: Final[Mapping[str, tuple[float, float]]] = {
    **ANY_HOST,
    "gemm_efficiency": (0.01, MOST_OF_A_CPU),
    "memory_efficiency": (0.005, MOST_OF_A_CPU),
    "attention_efficiency": (0.01, MOST_OF_A_CPU),
    "attention_backward_efficiency": (0.01, MOST_OF_A_CPU),
}
"""What a constant of ranks on cores can be: one machine's may be much faster than another's, and other work may use them too."""


class Fitted(NamedTuple):
    """Constants by name, and the runs' median error with them."""

    constants: dict[str, float]
    median_error: float
    runs: int
    at_bound: frozenset[str] = frozenset()

    def origin(self, name: str) -> str:
        """How a constant came to its value."""
        return AT_ITS_BOUND if name in self.at_bound else "fitted"


def chooser(constants: Mapping[Group, Mapping[str, float]]) -> Choose[Run]:
    """Datasheet constants, replaced for the groups that are given."""

    def make(run: Run) -> Calibration:
        return replace(zero_shot(run), **constants.get((run.traits.engine, run.gpu), {}))

    return one_value(make)


def fit(
    runs: Sequence[Run],
    names: Sequence[str],
    fixed: Mapping[str, float] | None = None,
    progress: Callable[[int], None] | None = None,
    *,
    prior: float = PRIOR,
    bounds: Mapping[str, tuple[float, float]] = BOUNDS,
    hosts: Sequence[float] = (1.0,),
) -> Fitted:
    """One set of constants for all these runs' groups: the nearest of the searches that begin at `hosts` times the host's time to launch.
    Raises OrchestratorError where scipy is missing or no run has a time."""
    try:
        from scipy.optimize import least_squares
    except ImportError:
        raise OrchestratorError("calibrate needs scipy: pip install 'strategy-orchestrator[calibrate]'") from None
    timed = [run for run in runs if run.time_s is not None]
    if not timed:
        raise OrchestratorError("no run with a step time to fit to")
    groups = sorted({(run.traits.engine, run.gpu) for run in timed})
    fixed = dict(fixed or {})
    base = replace(zero_shot(timed[0]), **fixed)
    start = np.array([max(STARTS.get(name, 0.0), 0.0) or float(getattr(base, name)) for name in names])
    low = np.array([bounds.get(name, (value / SPAN, value * SPAN))[0] for name, value in zip(names, start, strict=True)])
    high = np.array([bounds.get(name, (value / SPAN, value * SPAN))[1] for name, value in zip(names, start, strict=True)])
    high = np.array([min(bound, *(most(name, gpu) for _, gpu in groups)) for name, bound in zip(names, high, strict=True)])
    start = np.clip(start, low * 1.001, high * 0.999)
    evaluations = 0

    def residuals(scaled: np.ndarray) -> np.ndarray:
        nonlocal evaluations
        evaluations += 1
        if progress is not None:
            progress(evaluations)
        values = low * (high / low) ** scaled
        constants = {**fixed, **{name: float(value) for name, value in zip(names, values, strict=True)}}
        pricer = Pricer(chooser(dict.fromkeys(groups, constants)))
        off = []
        for run in timed:
            score = pricer.score(run)
            off.append(log(score[0] / run.time_s) if score is not None and run.time_s else 0.0)
        return np.concatenate([np.array(off), prior * np.log(values / start)])

    if not names:
        errors = residuals(np.zeros(0))
        return Fitted(fixed, float(np.median([abs(exp(error) - 1) for error in errors])), len(timed))
    begins = [np.array([value * (times if name == HOST else 1.0) for name, value in zip(names, start, strict=True)]) for times in hosts]
    searches = [
        least_squares(
            residuals,
            np.log(np.clip(begin, low * 1.001, high * 0.999) / low) / np.log(high / low),
            bounds=(0.0, 1.0),
            loss="soft_l1",
            f_scale=SOFT,
            diff_step=DIFFERENCE,
            max_nfev=MAX_STEPS,
        )
        for begin in (begins if HOST in names else begins[:1])
    ]
    found = min(searches, key=lambda one: float(one.cost))
    values = low * (high / low) ** found.x
    errors = residuals(found.x)[: len(timed)]
    constants = {**fixed, **{name: float(value) for name, value in zip(names, values, strict=True)}}
    at_bound = frozenset(name for name, where in zip(names, found.x, strict=True) if not AT_BOUND < where < 1 - AT_BOUND)
    return Fitted(constants, float(np.median([abs(exp(error) - 1) for error in errors])), len(timed), at_bound)
