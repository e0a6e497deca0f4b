"""What checkpoints allow, what failures cost, and the same training on other GPUs: the keys and the lines of the report."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

import orchestrator as so
from orchestrator import folder
from orchestrator.asking.grid import figures
from orchestrator.errors import InputError, NoPlanError
from orchestrator.report.failures import daly, goodput, young
from orchestrator.units import format_amount

LLAMA = {"recipe": "llama3_8b", "cluster": "dgx_h100", "gpus": 32}
PARAMETERS = 8_030_261_248
"""Of Llama 3 8B."""


def simulated(interval_s: float, save_s: float, restart_s: float, mtbf_s: float, intervals: int) -> float:
    """The share of the time that trains, failure by failure: what is done since the last save is lost, a restart may fail too."""
    moments = random.Random(17)
    clock, failure = 0.0, moments.expovariate(1 / mtbf_s)
    for _ in range(intervals):
        while failure < clock + interval_s + save_s:
            clock = failure
            failure = clock + moments.expovariate(1 / mtbf_s)
            while failure < clock + restart_s:
                clock, failure = failure, failure + moments.expovariate(1 / mtbf_s)
            clock += restart_s
        clock += interval_s + save_s
    return intervals * interval_s / clock


@pytest.mark.parametrize(
    ("interval_s", "save_s", "restart_s", "mtbf_s"), [(1000, 50, 300, 10_000), (300, 5, 600, 4000), (4000, 100, 10, 8000)]
)
def test_goodput_is_what_a_simulation_of_failures_gives(interval_s: float, save_s: float, restart_s: float, mtbf_s: float) -> None:
    expected = simulated(interval_s, save_s, restart_s, mtbf_s, 100_000)
    assert goodput(interval_s, save_s, restart_s, mtbf_s) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(("save_s", "mtbf_s"), [(5, 5000), (50, 10_000), (400, 4000)])
def test_dalys_interval_is_the_best_and_youngs_is_near(save_s: float, mtbf_s: float) -> None:
    best = max(range(10, 4000), key=lambda interval_s: goodput(interval_s, save_s, 300, mtbf_s))
    assert daly(save_s, mtbf_s) == pytest.approx(best, rel=0.005)
    assert goodput(young(save_s, mtbf_s), save_s, 300, mtbf_s) > 0.99 * goodput(best, save_s, 300, mtbf_s)


def test_the_plan_says_what_its_checkpoints_allow_and_what_failures_cost() -> None:
    answer = so.plan(
        **LLAMA, verbose=True, engine="megatron", train={"save_every": 100}, **{"cluster.mtbf": 6334, "cluster.storage": "20 GB/s"}
    )
    lines = {line.partition(":")[0]: line for line in str(answer).splitlines()}
    checkpoints = lines["checkpoints"]
    assert "one every 100 steps, of up to 104.7 GiB" in checkpoints, "8.03e9 parameters of 14 bytes"
    assert "a later run of engine=megatron may have other GPUs, tp, pp, cp, ep, dp and ZeRO stage" in checkpoints
    assert "one in 66 days (6334 hours of a node, over 4 nodes); a save takes 5.62 s" in lines["failures"]
    assert "with train.save_every=100, " in lines["failures"]
    assert "(Daly 2006)" in lines["failures"]


def test_days_cost_and_targets_have_the_failures_that_are_stated() -> None:
    """A target was "reached" by days without failures, beside a line that said more; scripts saw none of them."""
    stated = {"cluster.mtbf": 200, "cluster.storage": "2GB/s", "cluster.price_per_gpu_hour": 2, "train.save_every": 500}
    answer, plain = so.plan(**LLAMA, **stated), so.plan(**LLAMA, **{"cluster.price_per_gpu_hour": 2, "train.save_every": 500})
    share = answer.budget.goodput
    assert share is not None
    assert share < 0.99
    for name in ("days", "gpu_hours", "energy_kwh", "cost"):
        assert getattr(answer, name) == pytest.approx(getattr(plain, name) / share)
    assert (answer.step_time_s, answer.tokens_per_s) == (plain.step_time_s, plain.tokens_per_s)
    assert (answer.summary()["goodput"], plain.summary()["goodput"]) == (share, None)
    assert f"with failures and train.save_every=500 ({100 * share:.1f}% of the time trains)" in str(answer)
    unsaved = so.plan(**LLAMA, **{key: value for key, value in stated.items() if key != "train.save_every"})
    best = re.search(r"best is train.save_every=(\d+) ", str(unsaved))
    assert best is not None
    assert f"with failures and train.save_every={best[1]} (" in str(unsaved)
    between = (plain.days * answer.days) ** 0.5
    with pytest.raises(NoPlanError, match="not reached"):
        so.plan(**LLAMA, **stated, **{"target.days": between})
    other = so.plan(**{**LLAMA, "gpus": 16}, **stated)
    assert [one["days"] for one in so.compare(other, answer).summary().values() if isinstance(one, dict) and "days" in one] == [
        other.days, answer.days,
    ]  # fmt: skip
    swept = so.sweep(**{**LLAMA, "gpus": [16, 32]}, **stated)
    assert [figures(point.answer)[0] for point in swept.points if point.answer] == [other.budget.whole_s, answer.budget.whole_s]
    for days in (f"{format_amount(other.days)} days", f"{format_amount(answer.days)} days"):
        assert days in str(swept)
    assert f"here {format_amount(answer.days)} days" in str(so.plan(**LLAMA, **stated, **{"explain.gpus": 16}))


def test_a_plan_whose_checkpoints_are_for_one_layout_says_so() -> None:
    answer = so.plan(**LLAMA, engine="deepspeed", train={"save_every": 100, "precision": "fp16"})
    assert "with train.precision=fp16 a later run must have this layout on 32 ranks" in str(answer)


@pytest.mark.parametrize(
    ("more", "nbytes"),
    [
        ({}, PARAMETERS * 14),
        ({"train.optimizer": "adamw_8bit"}, PARAMETERS * (2 + 4 + 2 * (1 + 4 / 256))),
        ({"train.optimizer": "paged_adamw_8bit"}, PARAMETERS * (2 + 4 + 2 * (1 + 4 / 256))),
        ({"train.optimizer": "sgd"}, PARAMETERS * 6),
        # Rank 8 on q, k, v, o, gate, up and down of 32 layers: 8 x (in + out) each.
        ({"lora.rank": 8}, 14 * 32 * 8 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336))),
        ({"lora.rank": 8, "lora.bits": 4}, 14 * 32 * 8 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336))),
    ],
)
def test_a_checkpoint_is_as_large_as_what_is_trained_and_its_optimizers_states(more: dict[str, Any], nbytes: float) -> None:
    """It was 14 bytes of each parameter whatever was trained, and so were the interval, the time of a save and the disk."""
    found = so.plan(**LLAMA, engine="deepspeed", **{"pin.zero_stage": 3}, **more)
    assert folder.saved_bytes(found.plan) == pytest.approx(nbytes, rel=1e-6)


def test_muons_checkpoint_has_one_moment_of_each_matrix() -> None:
    found = so.plan(**LLAMA, engine="megatron", **{"train.optimizer": "muon", "pin.overlap_grad_reduce": False})
    ends = 2 * 128256 * 4096 + 4096
    assert folder.saved_bytes(found.plan) == 14 * ends + 10 * (PARAMETERS - ends)


def test_what_losing_a_node_costs_is_the_best_plan_without_it() -> None:
    lost = so.plan(**{**LLAMA, "gpus": 16}, engine="megatron")
    answer = so.plan(**LLAMA, engine="megatron", **{"explain.gpus": 16})
    other = answer.found.elsewhere
    assert other is not None
    assert other.plan is not None
    assert other.plan.predicted == lost.predicted
    assert other.refused is None
    assert other.chance == pytest.approx(lost.chance_of_not_fitting)
    line = next(line for line in str(answer).splitlines() if line.startswith("With gpus=16: megatron"))
    assert "(+100.0% by the number of GPUs alone)" in line
    assert "checkpoints of this plan go there whole" in line


def test_where_no_plan_uses_all_gpus_that_are_left_fewer_are_used() -> None:
    """7 divides neither the batch nor the heads, and there are fewer layers."""
    answer = so.plan(recipe="llama_tiny", gpus=8, engine="megatron", **{"explain.gpus": 7})
    other = answer.found.elsewhere
    assert other is not None
    assert other.plan is not None
    assert other.plan.world_size < 7
    assert "dp=7 does not divide" in other.why
    assert f"With gpus=7 {other.plan.world_size} of them are best used: megatron" in str(answer)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"cluster.mtbf": 100}, "needs cluster.storage="),
        ({"cluster.restart_s": 100}, "cluster.mtbf= beside it"),
        ({"cluster.storage": "20"}, "needs a number and a unit"),
        ({"explain.gpus": 12}, "is no whole number of nodes"),
        ({"explain.gpus": 0}, "must be at least 1"),
    ],
)
def test_what_can_not_be_answered_is_refused(keys: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        so.plan(**LLAMA, **keys)
