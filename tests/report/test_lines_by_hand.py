"""Lines of the report about failures, risk, sweeps and memory, with numbers worked out by hand."""

from __future__ import annotations

from math import exp, expm1, sqrt

import pytest
from msgspec.structs import replace
from report_plans import PLAN, PREDICTED

from orchestrator.plan import RunSettings
from orchestrator.report import comparison as sweep
from orchestrator.report import failures, memory
from orchestrator.report import memory as risk
from orchestrator.report.budget import Budget, budget, budget_text
from orchestrator.report.text import as_text
from orchestrator.strategy.capabilities import StateBytes
from orchestrator.strategy.pins import MemoryLimit
from orchestrator.units import GIB

LIMIT = MemoryLimit(limit=80 * GIB, reserve=8 * GIB)


def squeezed(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


# ---- checkpoints and failures


def test_a_checkpoint_holds_weights_and_states_and_a_restart_loses_half_an_interval() -> None:
    assert failures.checkpoint_bytes(10, StateBytes(weight=2, gradient=4, master=8, moments=16)) == 260
    saving = replace(PLAN, run=RunSettings(save_every=100))
    assert failures.checkpoint_text(PLAN, 1.0, True) == failures.checkpoint_text(replace(saving, predicted=None), 1.0, True) == ""
    said = failures.checkpoint_text(saving, 3 * GIB, True)
    assert said.startswith(
        "one every 100 steps, of up to 3.0 GiB: a later run of engine=megatron may have other GPUs, tp, pp, cp, ep, dp and"
    )
    assert said.endswith("; another engine takes the weights; a restart loses 10 minutes on average"), "half of 100 steps of 12 s"
    eight = replace(saving, training=replace(saving.training, optimizer="adamw_8bit"))
    alone = "with train.optimizer=adamw_8bit a later run must have this layout on 64 ranks; "
    assert alone in failures.checkpoint_text(eight, 3 * GIB, False)


def test_failures_cost_by_the_nodes_that_a_job_needs() -> None:
    """8 nodes of 800 hours each: one failure in 100 hours; 360 GB at 6 GB/s take a minute to save, and a restart 6 and one."""
    of = failures.Failures(mtbf_hours=800.0, storage_bandwidth=6e9, restart_s=360.0)
    saving = replace(PLAN, run=RunSettings(save_every=300))
    said = failures.failures_text(saving, 360e9, of)
    head, own, best = said.split("; ")[0], said.split("; ")[2], said.split("; ")[3]
    assert head == "one in 4.17 days (800 hours of a node, over 8 nodes)"
    assert said.split("; ")[1] == "a save takes 60 s, a restart 7 minutes"
    mtbf, save, restart = 360_000.0, 60.0, 420.0

    def share(steps: int) -> float:
        return steps * 12.0 / (mtbf * exp(restart / mtbf) * expm1((steps * 12.0 + save) / mtbf))

    assert own.startswith(f"with train.save_every=300, {100 * share(300):.1f}% of the time trains, the training takes ")
    ratio = save / (2 * mtbf)
    steps = round((sqrt(2 * save * mtbf) * (1 + sqrt(ratio) / 3 + ratio / 9) - save) / 12.0)
    assert best.startswith(f"best is train.save_every={steps} (Daly 2006): {100 * share(steps):.1f}% of the time trains")
    one = replace(PLAN, world_size=8)
    assert failures.failures_text(one, 360e9, of).startswith("one in 33.3 days; a save takes"), "one node"
    assert "with train.save_every" not in failures.failures_text(one, 360e9, of)
    assert failures.failures_text(replace(PLAN, world_size=9), 360e9, of).startswith("one in 16.7 days (800 hours of a node, over 2 nodes)")
    often = failures.failures_text(PLAN, 1.0, failures.Failures(mtbf_hours=1e-3, storage_bandwidth=1e9, restart_s=1.0))
    assert "best is train.save_every=1 (" in often, "after every step at the least"
    never = failures.failures_text(PLAN, 1e12, failures.Failures(mtbf_hours=1e-9, storage_bandwidth=1.0, restart_s=1.0))
    assert never.endswith("less than 1e-06 of the time trains: failures come before a restart and a save are done")
    with pytest.raises(ValueError, match="no prediction"):
        failures.failures_text(replace(PLAN, predicted=None), 1.0, of)


# ---- risk


def test_a_chance_is_said_with_what_it_rests_on() -> None:
    by = "by the peaks of all published runs, each predicted without its own source"
    plain = f"risk: 3.2% chance of running out of memory, {by}"
    assert risk.risk_text(0.0321, LIMIT) == plain
    fitted = replace(LIMIT, margin=0.1)
    assert risk.risk_text(0.0321, fitted) == f"{plain} (the reserve goes by this engine's fitted ones)"
    assert risk.risk_text(0.0321, fitted, own_peaks=True) == f"{plain} (the reserve goes by those of your own runs)"
    assert risk.risk_text(0.0321, replace(fitted, risk=0.05)) == plain, "the reserve is by that chance"
    no = "has at most 5%, so that the reserve alone is kept free"
    assert risk.risk_text(0.0321, LIMIT, ()) == f"{plain}; no plan searched on these GPUs {no}"
    assert risk.risk_text(0.0321, LIMIT, ("tp",)) == f"{plain}; no plan searched under these pins {no}"
    assert [risk.risk_key(chance) for chance in (0.001, 0.0512, 0.0999, 0.1, 0.1001, 0.2725)] == [
        "0.1%",
        "5.2%",
        "10%",
        "10%",
        "11%",
        "28%",
    ]


# ---- sweeps


def rows(price: float | None) -> list[sweep.Row]:
    of = Budget(steps=14400, tokens=100, seconds=7200.0, num_gpus=4, power_w=None, price_per_gpu_hour=price, off=(0.8, 2.0),
                tokens_per_s_per_gpu=500.0)  # fmt: skip
    return [
        sweep.Row(keys={"gpus": "4"}, plan="tp=2", budget=of, headroom=0.125, on_front=True),
        sweep.Row(keys={"gpus": "8"}, why="none fits"),
        sweep.Row(keys={"gpus": "2"}, plan="tp=1", budget=replace(of, price_per_gpu_hour=None, seconds=21600.0, off=None), headroom=0.5),
    ]  # fmt: skip


def test_a_sweep_has_a_row_a_combination_and_a_cost_where_there_is_a_price() -> None:
    priced = squeezed(as_text(sweep.sweep_table(("gpus",), rows(3.0)), 200))
    assert any(line.split() == ["gpus", "step", "tokens/s", "training", "GPU-hours", "cost", "free"] for line in priced)
    at = priced.index("4 500 ms 2K 2 hours 8 24 12.5% *")
    assert priced[at + 1] == "400 ms to 1 s 1K to 2.5K 1.6 to 4 6 to 16 19 to 48", "its 90% interval, which has another unit"
    assert "2 1.5 s 2K 6 hours 24 50.0%" in priced, "no price, no cost, not on the front; no interval where there is none"
    assert priced[-4:-1] == ["gpus=4: tp=2", "gpus=8: none: none fits", "gpus=2: tp=1"]
    assert priced[-1].startswith("2 of 3 have a plan; *: no other is better in training time, ")
    plain = squeezed(as_text(sweep.sweep_table(("gpus",), rows(None)), 200))
    assert "4 500 ms 2K 2 hours 8 12.5% *" in plain
    assert not any("cost" in line for line in plain[:-1])
    alike = squeezed(as_text(sweep.sweep_table(("gpus",), [replace(row, on_front=True) for row in rows(3.0)]), 200))
    assert not any("*" in line for line in alike), "a mark on every row says nothing"
    assert alike[-1].startswith("2 of 3 have a plan; none is better than another in training time, ")


def test_a_sweep_that_a_terminal_has_no_room_for_cuts_no_word_and_leaves_out_what_others_say() -> None:
    names = ("gpus", "cluster")
    wide = [replace(row, keys={**row.keys, "cluster": "azure_nd_h100_v5"}) for row in rows(3.0)]
    for width, missing in ((110, ()), (90, ("tokens/s",)), (75, ("tokens/s", "GPU-hours"))):
        lines = as_text(sweep.sweep_table(names, wide), width).splitlines()
        head = next(line.split() for line in lines if "cluster" in line)
        assert [one for one in ("gpus", "cluster", "step", "tokens/s", "training", "GPU-hours", "cost") if one not in missing] == [
            word for word in head if word != "free"
        ]
        assert sum(line.split()[1:2] == ["azure_nd_h100_v5"] for line in lines) == 3


# ---- budgets


def test_a_budget_is_steps_times_seconds_on_its_gpus() -> None:
    of = budget(PLAN, 2.0)
    seconds = PLAN.training.steps * 12.0
    assert (of.seconds, of.num_gpus, of.tokens) == (seconds, 64, PLAN.training.steps * 512 * 8192)
    assert (of.days, of.gpu_hours, of.cost) == (seconds / 86400, 64 * seconds / 3600, 2 * 64 * seconds / 3600)
    assert of.energy_kwh == pytest.approx(0.7 * of.gpu_hours)
    both = budget(replace(PLAN, training=replace(PLAN.training, decoder_seq_length=100)))
    assert both.tokens == PLAN.training.steps * 512 * 8292
    unknown = replace(of, power_w=None, price_per_gpu_hour=None)
    assert (unknown.energy_kwh, unknown.cost) == (None, None)
    assert "kWh" not in budget_text(unknown)
    for hours, said in ((999, "999 kWh"), (1000, "1 MWh"), (2500, "2.5 MWh")):
        one = Budget(steps=1, tokens=1, seconds=hours * 3600.0, num_gpus=1, power_w=1000.0, price_per_gpu_hour=None)
        assert f", {said} (at the 1000 W a GPU of its datasheet)" in budget_text(one)
    assert "GPU-hours" in budget_text(of)
    assert "rank-hours" in budget_text(of, "rank")


# ---- memory


def test_a_choice_that_does_not_fit_says_by_what() -> None:
    table = squeezed(as_text(memory.memory_table("dp", PREDICTED, LIMIT)))
    assert "memory of dp" in table
    order = [line.partition(" ")[0] for line in table if line.partition(" ")[0] in PREDICTED.by_stage[0].memory_by_cause]
    assert order == ["activations", "gradients", "optimizer", "weights", "logits", "buffers"], "the largest first"
    assert "needs 70.0 GiB" in table
    assert "usable 72.0 GiB" in table
    assert "fits" in table
    less = squeezed(as_text(memory.memory_table("dp", PREDICTED, replace(LIMIT, reserve=20 * GIB))))
    assert "lacks 10.0 GiB" in less
    assert memory.verdict(72 * GIB, LIMIT) == "fits"
    assert memory.verdict(72 * GIB + GIB, LIMIT) == "lacks 1.0 GiB"
    assert PREDICTED.by_stage[PREDICTED.fullest].peak_memory_bytes == 70 * GIB


def test_data_parallelism_alone_stands_beside_the_plan() -> None:
    other = replace(PREDICTED, by_stage=(replace(PREDICTED.by_stage[0], peak_memory_bytes=100 * GIB),))
    given = [("megatron", 1, other, ""), ("deepspeed", 3, None, "refused by a rule")]
    table = squeezed(as_text(memory.data_parallel_table(PLAN, given, LIMIT), 200))
    assert table[0] == "Data parallelism alone (tp=1 pp=1 dp=64, mbs=1, all recomputed) against 72.0 GiB usable"
    assert "the plan 8.0 GiB 16.0 GiB 12.0 GiB 32.0 GiB 2.0 GiB 70.0 GiB fits" in table, "logits and buffers are the rest"
    assert "megatron ZeRO-1 8.0 GiB 16.0 GiB 12.0 GiB 32.0 GiB 32.0 GiB 100.0 GiB 28.0 GiB" in table
    assert table[-1] == "deepspeed ZeRO-3: refused by a rule"
    narrow = squeezed(as_text(memory.data_parallel_table(PLAN, given[:1], LIMIT), 60))
    assert "the plan 70.0 GiB fits" in narrow
    with pytest.raises(ValueError, match="no prediction"):
        memory.data_parallel_table(replace(PLAN, predicted=None), [], LIMIT)
