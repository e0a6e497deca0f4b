"""How far a predicted difference between two published runs can be trusted."""

from __future__ import annotations

import math

import pytest

from tests.validation import page, pairs
from tests.validation.metrics import Priced
from tests.validation.runs import Run
from tests.validation.tables import read_rows

ROW = {
    **{"run_id": "a", "sweep_id": "s", "model_name": "own", "num_layers": "4", "hidden_size": "4096", "num_attention_heads": "32"},
    **{"num_query_groups": "8", "ffn_hidden_size": "14336", "vocab_size": "128256", "seq_length": "8192", "gpu": "H100-SXM-80GB"},
    **{"gpus_per_node": "8", "num_gpus": "8", "engine": "nemo", "precision": "bf16", "tp": "2", "pp": "1", "dp": "4", "recompute": "none"},
    **{"micro_batch_size": "1", "global_batch_size": "32", "status": "ok", "step_time_s": "1.0", "zero_stage": "1"},
}


def priced(measured: float, predicted: float, **changes: str) -> Priced:
    """A run that took so many seconds beside a prediction of so many."""
    (run,) = read_rows("t", [{**ROW, **changes, "step_time_s": str(measured)}])
    assert isinstance(run, Run), run
    return Priced(run=run, time_s=predicted, memory_bytes=0.0, needed_bytes=0.0, limit_bytes=1.0)


def test_a_difference_is_off_by_what_the_ratios_differ_by_and_who_is_named_is_counted() -> None:
    """Of three runs divided differently: measured 1, 1.2 and .9, predicted 1, 1.1 and 1.05. The first two are in the right order; the last
    is said to be slower than the first, and is faster."""
    rows = [priced(1.0, 1.0), priced(1.2, 1.1, tp="4", dp="2"), priced(0.9, 1.05, tp="1", dp="8")]
    divided = pairs.figures(rows)["divided"]
    errors = sorted(abs(math.log(a / b)) for a, b in ((1.2, 1.1), (1.05, 0.9), (1.2 / 0.9, 1.1 / 1.05)))
    assert divided["pairs"] == divided["clear"] == 3
    assert divided["median"] == pytest.approx(errors[1])
    assert divided["nine_of_ten"] == pytest.approx(errors[2])
    assert divided["clear_named"] == pytest.approx(2 / 3)


def test_a_difference_below_a_twentieth_need_not_be_named() -> None:
    divided = pairs.figures([priced(1.0, 1.0), priced(1.04, 0.9, tp="4", dp="2")])["divided"]
    assert (divided["pairs"], divided["clear"], divided["clear_named"]) == (1, 0, None)


@pytest.mark.parametrize("other", [{"gpu": "A100-SXM-80GB"}, {"global_batch_size": "64"}, {"sweep_id": "z"}, {"seq_length": "4096"}])
def test_runs_of_another_training_cluster_or_source_are_not_held_beside_each_other(other: dict[str, str]) -> None:
    found = pairs.figures([priced(1.0, 1.0), priced(2.0, 1.0, tp="4", dp="2", **other), priced(3.0, 1.0, **other)])
    assert (found["divided"]["pairs"], found["again"]["pairs"]) == (1, 0)  # the two others, with each other


def test_a_configuration_measured_again_says_how_far_measurements_agree() -> None:
    found = pairs.figures([priced(1.0, 5.0), priced(1.03, 1.0), priced(9.0, 9.0, recompute="full")])
    assert found["divided"]["pairs"] == 0
    assert found["again"]["pairs"] == 1
    assert found["again"]["median"] == pytest.approx(math.log(1.03))


def test_the_page_says_both_for_dense_models_and_for_experts() -> None:
    rows = [
        priced(1.0, 1.0),
        priced(1.2, 1.1, tp="4", dp="2"),
        priced(1.25, 1.1, tp="4", dp="2"),
        priced(7.0, 1.0, engine="fsdp_torchtitan"),
    ]
    assert page.pairs_table(pairs.report(rows)).rows == [
        ["dense", "2", "12.8%", "12.8%", "100% of 2", "1", "4.1%", "4.1%"],
        ["experts", "0", "-", "-", "-", "0", "-", "-"],
    ]


EXPERTS = {
    **{
        "num_experts": "8",
        "moe_router_topk": "2",
        "moe_ffn_hidden_size": "1024",
        "ep": "4",
        "routing": "real router",
        "tp": "1",
        "dp": "8",
    },
}


def test_a_configuration_with_real_routing_that_is_measured_again_counts_once() -> None:
    """Measured 1.0 and 1.21 s, predicted 1.1 s: 10 and 9% off each, and nothing in the mean; another 2 s, predicted 1. Forced balance
    and dense models are no part of it."""
    rows = [
        priced(1.0, 1.1, **EXPERTS),
        priced(1.21, 1.1, **EXPERTS),
        priced(2.0, 1.0, **{**EXPERTS, "ep": "8"}),
        priced(9.0, 1.0, **{**EXPERTS, "routing": "forced balance"}),
        priced(9.0, 1.0),
    ]
    found = pairs.real_routing(rows)
    assert found["runs"] == {"count": 3, "median": pytest.approx(0.1), "within_20": pytest.approx(2 / 3)}
    assert found["configurations"] == {"count": 2, "median": pytest.approx(0.5), "within_20": 0.5}
    assert page.routing_table(found).markdown().splitlines()[-1] == "| configurations | 2 | 50.0% | 50% |"
    assert pairs.real_routing([])["runs"] == {"count": 0, "median": None, "within_20": None}
