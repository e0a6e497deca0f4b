from __future__ import annotations

import contextlib
import random

import pytest
from instances import Instance

from orchestrator.cost.schedule import finish_times
from orchestrator.errors import NoPlanError
from orchestrator.search import inner
from orchestrator.search.interleaved import interleaved_floor
from orchestrator.search.planner import search
from orchestrator.strategy.pins import Pins


@pytest.mark.parametrize("seed", range(200))
def test_an_interleaved_schedule_is_never_faster_than_its_floor(seed: int) -> None:
    rng = random.Random(seed)
    pp, vpp = rng.choice([2, 3, 4, 6]), rng.choice([2, 3, 4])
    m = pp * rng.choice([1, 1, 2, 3, 5])
    uneven = rng.random() < 0.5
    forward = [rng.random() + 0.1 if uneven else rng.choice([1.0, 1.0, 1.0, 2.0]) for _ in range(pp * vpp)]
    backward = [rng.random() + 0.1 if uneven else 2 * seconds for seconds in forward]
    hops = [rng.choice([0.0, 0.01, 0.1, 0.5, 2.0])] * (pp * vpp)
    ends = finish_times("interleaved", forward, backward, hops, m, vpp)
    assert interleaved_floor(forward, backward, hops, m, pp, vpp) <= ends[0] * (1 + 1e-12)


@pytest.mark.parametrize(("pp", "vpp", "m"), [(2, 2, 2), (4, 2, 4), (4, 2, 16), (4, 4, 8), (8, 3, 8)])
@pytest.mark.parametrize("hop", [0.0, 0.2])
def test_the_floor_of_equal_chunks_is_their_schedule(pp: int, vpp: int, m: int, hop: float) -> None:
    """Transfers over all vpp x pp borders included."""
    chunks = pp * vpp
    seconds = finish_times("interleaved", [1.0] * chunks, [2.0] * chunks, hop, m, vpp)[0]
    assert interleaved_floor([1.0] * chunks, [2.0] * chunks, [hop] * chunks, m, pp, vpp) == pytest.approx(seconds, rel=0.02)


def test_a_stage_is_never_faster_than_the_capacity_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every option that fits, against the closed form over counts; and the most layers for its time hold its layers."""
    made = inner.Inner.options
    seen = 0

    def checked(self: inner.Inner, p: int, start: int, sizes: tuple[int, ...]) -> list[inner.Option]:
        nonlocal seen
        found = made(self, p, start, sizes)
        if self._one_kind and self.pp > 1:
            capacity, layers = self._capacity(), sum(sizes)
            for option in found:
                assert capacity.seconds(p, layers) <= option.work * (1 + 1e-9)
                assert capacity.most(p, option.work) >= layers
                seen += 1
        return found

    monkeypatch.setattr(inner.Inner, "options", checked)
    for seed in range(0, 80, 2):
        instance = Instance(seed)
        with contextlib.suppress(NoPlanError):
            search(instance.model, instance.training, instance.cluster, instance.engines, Pins(), instance.limit, instance.calibration)
    assert seen > 100
