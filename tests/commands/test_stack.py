"""The first steps of a run say which stack its nodes have."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from orchestrator import recipe
from orchestrator.detect import Machine
from orchestrator.engines import ENGINES
from orchestrator.pictures import stack_lines
from orchestrator.plan import Plan
from orchestrator.planning import Planner
from orchestrator.recipe import Settings

SHAPE = ("recipe=qwen3_8b", "gpus=8", "pin.mbs=1", "pin.pp=1", "pin.cp=1", "engine=megatron", "train.global_batch_size=64")


def planned(*words: str, tp: int = 8) -> tuple[Settings, Plan]:
    settings = recipe.load([*SHAPE, f"pin.tp={tp}", *words], Machine(), list(ENGINES))
    plan = Planner(settings).searched().plan
    return settings, plan


def steps(seconds: float, count: int = 10) -> list[dict[str, float]]:
    """Rows of metrics.jsonl: three steps of warming up, then alike ones."""
    return [{"step": step, "step_time_s": 5 * seconds if step < 3 else seconds} for step in range(count)]


def test_ten_steps_tell_a_stack_that_was_planned_for_wrongly_from_the_right_one() -> None:
    """Of tp 8 on narrow layers, which the host bounds: priced under the stack that is said, the measured step is right."""
    tuned, plan = planned("cluster=dgx_h100")
    stock, there = planned("cluster=dgx_h100", "cluster.stack=stock")
    fast, slow = plan.prediction.step_time_s, there.prediction.step_time_s
    assert slow > 1.5 * fast
    assert stack_lines(tuned, plan, steps(slow))[0].endswith("plan with cluster.stack=stock")
    assert stack_lines(stock, there, steps(fast))[0].endswith("plan with cluster.stack=tuned")
    assert stack_lines(tuned, plan, steps(1.02 * fast)) == stack_lines(stock, there, steps(0.97 * slow)) == []
    assert stack_lines(tuned, plan, []) == stack_lines(tuned, replace(plan, predicted=None), steps(slow)) == []


def test_where_the_gpu_bounds_the_steps_they_say_nothing_of_the_stack() -> None:
    settings, plan = planned("cluster=dgx_h100", tp=2)
    assert stack_lines(settings, plan, steps(1.5 * plan.prediction.step_time_s)) == []


def test_a_plan_for_nodes_that_nobody_spoke_of_says_what_its_prices_take_them_for(capsys: pytest.CaptureFixture[str]) -> None:
    from orchestrator.__main__ import main

    assert main(["plan", *SHAPE, "cluster=aws_p5"]) == 0
    assert "a stock stack, unless cluster.stack=tuned" in " ".join(capsys.readouterr().out.split())
    assert main(["plan", *SHAPE, "cluster=dgx_h100"]) == 0
    assert "stack" not in capsys.readouterr().out


def test_a_plan_for_geforce_cards_says_that_their_traffic_passes_the_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from orchestrator.__main__ import main

    def said(gpu: str, bandwidth: str) -> str:
        level = f"{{name: slots, size: node, bandwidth: {bandwidth}, latency: 5 us}}"
        text = f"gpu: {gpu}\ngpus_per_node: 4\nlevels: [{level}]\nhost_bandwidth: pcie\nhost_memory: 64 GB\n"
        (tmp_path / "c.yaml").write_text(text)
        assert main(["plan", "recipe=gpt_tiny", f"cluster={tmp_path / 'c.yaml'}", "gpus=4"]) == 0
        return " ".join(capsys.readouterr().out.split())

    assert "; 18.9 GB/s among GPUs, as RTX-4090 has no peer-to-peer, unless cluster.levels.slots.bandwidth=" in said("RTX-4090", "pcie")
    assert "peer-to-peer" not in said("RTX-4090", "25 GB/s")
    assert "peer-to-peer" not in said("RTX-A6000", "pcie")
