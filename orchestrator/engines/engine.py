"""What an engine is to the rest of the house: three pure functions and a name."""

from __future__ import annotations

from collections.abc import Callable

from orchestrator.hardware.spec import Software
from orchestrator.job import Job
from orchestrator.plan import Plan
from orchestrator.strategy.capabilities import Capabilities, Traits
from orchestrator.values import Value


class Engine(Value, frozen=True, kw_only=True):
    """`capabilities`: what it can run with this software; `traits`: how it is priced; `translate`: a plan as the job that runs it."""

    name: str
    capabilities: Callable[[Software], Capabilities]
    traits: Callable[[Software], Traits]
    translate: Callable[[Plan], Job]
