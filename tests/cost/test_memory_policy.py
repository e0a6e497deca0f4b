"""One value says how much of a GPU's memory a plan may use, at which chance of running out."""

from __future__ import annotations

import pytest
from cost_cases import a100, gpt
from msgspec.structs import replace

from orchestrator.cost.calibration import Calibration
from orchestrator.cost.memory_policy import USUAL_RISK, chance, policy, reserve_alone, within
from orchestrator.cost.uncertainty import Situation, chance_of_not_fitting, kept_free, situation
from orchestrator.errors import InputError, NoPlanError
from orchestrator.model.families import describe
from orchestrator.model.training import Training
from orchestrator.strategy.layout import FittedOn
from orchestrator.strategy.pins import MemoryLimit

H100 = Situation(generation="9", experts=False, eight_bit=False)
ASKED = MemoryLimit(limit=80_000, reserve=None)
FITTED = Calibration(memory_margin=0.063)


def test_the_usual_risk_comes_first_and_then_what_the_engines_own_peaks_ask_for() -> None:
    usual, own = policy(ASKED, H100, FITTED).limits(ASKED)
    assert (usual.risk, own.risk) == (USUAL_RISK, None)
    assert usual.usable < own.usable == 80_000 - round(0.063 * 80_000)
    assert chance([usual.usable - 1], [80_000], H100) <= USUAL_RISK < chance([own.usable], [80_000], H100)
    assert policy(ASKED, H100, replace(FITTED, memory_margin=kept_free(USUAL_RISK, H100))).limits(ASKED)[0].risk is None, "as much free"


def test_what_the_user_says_counts_alone() -> None:
    (stated,) = policy(replace(ASKED, reserve=9), H100, FITTED).limits(replace(ASKED, reserve=9))
    assert stated.usable == 80_000 - 9
    (risky,) = policy(replace(ASKED, risk=0.3), H100, FITTED).limits(ASKED)
    assert (risky.risk, risky.margin) == (0.3, kept_free(0.3, H100))
    with pytest.raises(InputError, match=r"memory\.risk=1e-09: a risk of 1e-09 can't be told"):
        policy(replace(ASKED, risk=1e-9), H100, FITTED)


def test_on_the_cpu_nothing_is_published_and_the_reserve_counts() -> None:
    assert policy(ASKED, replace(H100, generation=""), FITTED) == reserve_alone(FITTED)


def test_the_users_own_peaks_count_until_it_is_extrapolated() -> None:
    own = Calibration(memory_margin=0.02, own_peaks=True, fitted=FittedOn(kinds=("dense 16-bit",), num_gpus=8, seq_length=2048))
    model, training = describe(gpt(), 2048), Training(global_batch_size=64, seq_length=2048)
    near, far = (situation(model, training, a100(gpus), own) for gpus in (16, 64))
    assert policy(ASKED, near, own) == reserve_alone(own)
    for now, constants in ((near, replace(own, own_peaks=False)), (far, own)):
        assert policy(ASKED, now, constants).kept[0] == (kept_free(USUAL_RISK, now), USUAL_RISK)


def test_the_rank_that_is_likeliest_to_run_out_counts() -> None:
    assert chance([30.0, 60.0], [40.0, 80.0], H100) == chance_of_not_fitting(30.0, 40.0, H100)
    assert chance([30.0, 79.0], [40.0, 80.0], H100) == chance_of_not_fitting(79.0, 80.0, H100)


def test_the_next_limit_is_taken_where_none_keeps_the_first() -> None:
    limits = [MemoryLimit(limit=8, reserve=reserve) for reserve in (4, 1)]

    def planned(need: int, limit: MemoryLimit) -> int:
        if need > limit.usable:
            raise NoPlanError(f"{need} of {limit.usable}")
        return limit.usable

    assert [within(limits, lambda limit, need=need: planned(need, limit)) for need in (3, 5)] == [4, 7]
    with pytest.raises(NoPlanError, match="8 of 7"):
        within(limits, lambda limit: planned(8, limit))
