"""A plan for ranks of two types, with pipeline stages of different length, trains."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

CLUSTER = """
name: two_kinds
gpu:
- {type: cpu, gpus: 2}
- gpus: 2
  type: {name: cpu-slow, memory: 4 GiB, memory_bandwidth: 3 GB/s, compute_capability: 0.0,
         peak_flops: {fp32: 0.02 TFLOP/s, bf16: 0.08 TFLOP/s}}
gpus_per_node: 4
levels:
- {name: loopback, size: node, bandwidth: 1 GB/s, latency: 200 us}
host_bandwidth: 3 GB/s
host_memory: 4 GB
software: {transformer_engine: false, flash_attention: false, apex: false}
"""
RECIPE = ("recipe=gpt_tiny", "model.num_layers=8", "train.steps=4", "train.precision=fp32", "train.global_batch_size=8")


@pytest.mark.engines
@pytest.mark.full
def test_a_plan_for_two_types_has_the_losses_of_one_process(tmp_path: Path) -> None:
    """Two replicas of a pipeline whose second stage is on ranks with a third of the speed, and has fewer layers."""
    (tmp_path / "two.yaml").write_text(CLUSTER)
    losses = {}
    for name, more in (("two", ("gpus=4", "cluster=two.yaml", "pin.pp=2", "pin.micro_batch_size=1")), ("one", ("gpus=1", "cluster=cpu"))):
        command = [sys.executable, "-m", "orchestrator.run", *RECIPE, "engine=megatron", *more, f"out={name}"]
        done = subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        losses[name] = [json.loads(line)["loss"] for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        if name == "two":
            assert " cpu-slow " in done.stdout, "the table of stages says which type computes each"
    plan = json.loads((tmp_path / "two" / "plan.json").read_text())
    layers = [sum(span["count"] for span in stage["layers"] if span["kind"] == "decoder") for stage in plan["stages"]]
    assert (plan["pp"], plan["dp"]) == (2, 2)
    assert layers[0] > layers[1] > 0
    assert len(losses["two"]) == 4
    assert losses["two"] == pytest.approx(losses["one"], abs=1e-4)
