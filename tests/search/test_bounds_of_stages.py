from __future__ import annotations

import contextlib

import pytest
from instances import Instance

from orchestrator.errors import NoPlanError
from orchestrator.search import inner
from orchestrator.search.partition import Way
from orchestrator.search.planner import search


def test_a_stage_is_never_faster_than_the_capacity_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every way that fits, against the closed form over counts; and the most layers for its time hold its layers."""
    made = inner.Inner.ways
    seen = 0

    def checked(self: inner.Inner, p: int, start: int, sizes: tuple[int, ...]) -> list[Way]:
        nonlocal seen
        found = made(self, p, start, sizes)
        if self.capacity is not None:
            capacity, layers = self.capacity, sum(sizes)
            for way in found:
                assert capacity.seconds(p, layers) <= way.work_s * (1 + 1e-9)
                assert capacity.most(p, way.work_s) >= layers
                seen += 1
        return found

    monkeypatch.setattr(inner.Inner, "ways", checked)
    for seed in range(0, 80, 2):
        instance = Instance(seed)
        with contextlib.suppress(NoPlanError):
            search(instance.workload, instance.planned_engines, instance.settings)
    assert seen > 100
