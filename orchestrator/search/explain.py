"""Why the plan is not another one: the best plan with one choice pinned, or what forbids it."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from orchestrator.cost.calibration import Calibration
from orchestrator.errors import NoPlanError
from orchestrator.hardware.spec import Cluster
from orchestrator.model.spec import ModelSpec
from orchestrator.model.training import Training
from orchestrator.plan import Plan
from orchestrator.search.planner import Engines, search
from orchestrator.strategy.pins import MemoryLimit, Pins
from orchestrator.values import Value


class Explanation(Value, frozen=True, kw_only=True):
    """The answer for one pin.

    `question` is "tp=4". `plan`: the best plan with it, which may be the chosen one; None: there is none, and `why` has the rule or the
    memory that forbids it.
    """

    question: str
    plan: Plan | None = None
    why: str = ""


def explain(
    questions: Pins,
    model: ModelSpec,
    training: Training,
    cluster: Cluster,
    engines: Engines,
    pins: Pins,
    limit: MemoryLimit,
    calibration: Calibration | Sequence[Calibration],
) -> tuple[Explanation, ...]:
    """An answer for each field of `questions` that is set, the others as pinned. One search each."""
    answers = []
    for name in questions.__struct_fields__:
        value = getattr(questions, name)
        if value is None:
            continue
        question = f"{name}={str(value).lower() if isinstance(value, bool) else value}"
        try:
            found = search(model, training, cluster, engines, replace(pins, **{name: value}), limit, calibration, top_k=1)
            answers.append(Explanation(question=question, plan=found.plan))
        except NoPlanError as error:
            answers.append(Explanation(question=question, why=str(error)))
    return tuple(answers)
