"""What the user could have asked for of the engine's own ways, priced on the plan as it is."""

from __future__ import annotations

from typing import Any, Final

from msgspec.structs import replace

from orchestrator.cost.calibration import Calibration
from orchestrator.cost.mixed import cost_model
from orchestrator.errors import InputError
from orchestrator.key import declared
from orchestrator.model.training import Training
from orchestrator.plan import Plan
from orchestrator.plan.check import check_plan, workload_of
from orchestrator.strategy.capabilities import Capabilities, Traits
from orchestrator.strategy.choices import shown
from orchestrator.strategy.layout import Prediction
from orchestrator.strategy.spec import CHOICES
from orchestrator.values import Value

OFFERED: Final[tuple[tuple[str, dict[str, Any]], ...]] = (
    *((f"pin.{choice.pin}={shown(choice.offered)}", {choice.name: choice.offered}) for choice in CHOICES if choice.offered is not None),
    *(
        (f"{key.name}={shown(key.offered)}", {"training": {key.field: key.offered}})
        for key in declared(Training)
        if key.offered is not None
    ),
)
"""Key with value, and the fields of a plan that it sets: what the declarations of choices and settings offer."""
WORTH_S, WORTH_BYTES = 0.01, 0.02
"""Share of the step or of the peak that is worth a line."""


class Unasked(Value, frozen=True, kw_only=True):
    """A key with its value, and what the plan would take with it."""

    key: str
    predicted: Prediction


def unasked(plan: Plan, capabilities: Capabilities, traits: Traits, calibration: Calibration) -> tuple[Unasked, ...]:
    """The choices that the plan's engine can take as it is, and that make this plan faster or smaller."""
    found = []
    now = plan.predicted
    for key, changes in OFFERED if now is not None else ():
        assert now is not None
        training = replace(plan.training, **changes.get("training", {}))
        other = replace(plan, training=training, **{name: value for name, value in changes.items() if name != "training"})
        if other == plan:
            continue
        try:
            check_plan(other, capabilities)
        except InputError:
            continue
        price = cost_model(workload_of(other), traits, calibration).price(other.candidate, other.stages)
        faster = price.step_time_s < now.step_time_s * (1 - WORTH_S)
        smaller = price.peak_memory_bytes < now.peak_memory_bytes * (1 - WORTH_BYTES) and price.step_time_s <= now.step_time_s
        if faster or smaller:
            found.append(Unasked(key=key, predicted=price))
    return tuple(found)
