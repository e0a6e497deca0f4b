"""What an engine is to the rest of the house: pure functions, what it needs installed, and a name."""

from __future__ import annotations

from collections.abc import Callable, Collection

from orchestrator.hardware.spec import Cluster, Software
from orchestrator.job import Job
from orchestrator.model.spec import Architecture
from orchestrator.plan import Plan
from orchestrator.strategy.capabilities import Capabilities, Traits
from orchestrator.values import Value


class Requirements(Value, frozen=True, kw_only=True):
    """What must be there where ranks run. `modules`: what they import. `versions`: by distribution whose behaviour a plan for this cluster
    counts on, its version, or "" for any; the worker refuses a node that has another (workers/preflight.py)."""

    modules: tuple[str, ...]
    versions: Callable[[Cluster], dict[str, str]] = lambda cluster: {}

    def lacking(self, missing: Collection[str]) -> tuple[str, ...]:
        """Those of them that are in `missing`."""
        return tuple(name for name in self.modules if name in missing)


class Engine(Value, frozen=True, kw_only=True):
    """`capabilities`: what it can run with this software; `traits`: how it is priced; `translate`: a plan as the job that runs it, which
    names the worker that each rank starts; `requirements`: what must be installed there."""

    name: str
    capabilities: Callable[[Software], Capabilities]
    traits: Callable[[Software], Traits]
    translate: Callable[[Plan], Job]
    requirements: Requirements
    why_no_exchange: Callable[[Architecture, str | None], str | None] = lambda architecture, model_type: (
        "this engine's worker neither loads nor writes checkpoints of Hugging Face's"
    )
    """Why weights can't go between this engine's model of this architecture and transformers'; None: they can. `model_type`: of the
    checkpoint to load, None: none is loaded."""
