"""A node's health, looked at beside a training."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from orchestrator import health

GPU = """<?xml version="1.0" ?><!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd"><nvidia_smi_log><attached_gpus>2</attached_gpus>
<gpu id="00000000:1B:00.0"><product_name>NVIDIA H100 80GB HBM3</product_name>
<ecc_errors><volatile><sram_correctable>3</sram_correctable><sram_uncorrectable_parity>0</sram_uncorrectable_parity>
<dram_uncorrectable>{errors}</dram_uncorrectable></volatile></ecc_errors>
<remapped_rows><remapped_row_pending>{pending}</remapped_row_pending><remapped_row_failure>{failure}</remapped_row_failure></remapped_rows>
<clocks_{word}_reasons><clocks_{word}_reason_gpu_idle>Active</clocks_{word}_reason_gpu_idle>
<clocks_{word}_reason_hw_thermal_slowdown>{slow}</clocks_{word}_reason_hw_thermal_slowdown></clocks_{word}_reasons>
<temperature><gpu_temp>91 C</gpu_temp></temperature></gpu>
<gpu id="00000000:43:00.0"><product_name>NVIDIA A10</product_name><ecc_errors><volatile><dram_uncorrectable>N/A</dram_uncorrectable>
</volatile></ecc_errors></gpu></nvidia_smi_log>"""
WELL = {"errors": 0, "pending": "No", "failure": "No", "slow": "Not Active", "word": "event"}


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ({"errors": 2}, "uncorrected memory errors: dram_uncorrectable 2"),
        ({"pending": "Yes"}, "reset the GPU when nothing runs on it"),
        ({"failure": "Yes"}, "the GPU is to be exchanged"),
        ({"slow": "Active"}, "its clocks are held down: hw thermal slowdown, at 91 C"),
        ({"slow": "Active", "word": "throttle"}, "hw thermal slowdown"),
    ],
)
def test_each_fault_of_a_gpu_is_one_line_with_its_place(fault: dict[str, object], said: str) -> None:
    (line,) = health.gpu_faults(GPU.format(**{**WELL, **fault}))
    assert line.startswith("GPU 0 (NVIDIA H100 80GB HBM3, 00000000:1B:00.0): ")
    assert said in line


def test_nothing_is_said_of_gpus_that_are_well() -> None:
    assert list(health.gpu_faults(GPU.format(**WELL))) == []


def test_a_port_that_is_down_beside_one_that_is_up_is_named(tmp_path: Path) -> None:
    for name, state in (("mlx5_0", "4: ACTIVE\n"), ("mlx5_1", "1: DOWN\n")):
        (tmp_path / name / "ports" / "1").mkdir(parents=True)
        (tmp_path / name / "ports" / "1" / "state").write_text(state)
    assert list(health.ports(tmp_path)) == ["mlx5_1 port 1 is DOWN, and other ports are active"]
    (tmp_path / "mlx5_0" / "ports" / "1" / "state").write_text("1: DOWN\n")
    assert list(health.ports(tmp_path)) == [], "no cables: a node without this network"


def test_little_memory_is_said() -> None:
    assert list(health.memory("MemTotal: 1000 kB\nMemAvailable: 900 kB\n")) == []
    assert "20.0 KiB of 1000.0 KiB" in next(health.memory("MemTotal: 1000 kB\nMemAvailable: 20 kB\n"))


def test_a_run_that_makes_no_steps_is_said_until_it_has_ended(tmp_path: Path) -> None:
    rows = [{"step": step, "step_time_s": 2.0} for step in range(1, 6)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 6, ')
    now = time.time()
    os.utime(tmp_path / "metrics.jsonl", (now - 100, now - 100))
    assert list(health.progress(tmp_path, now)) == []
    assert list(health.progress(tmp_path, now + 200)) == [f"{tmp_path}: step 5 was 300 s ago, and a step takes 2 s"]
    (tmp_path / "status.json").write_text("{}")
    assert list(health.progress(tmp_path, now + 200)) == []


def test_a_loss_that_rises_is_said_of_a_run_that_goes_on_and_of_one_that_has_ended(tmp_path: Path) -> None:
    """5.5 to 307 and back to 25.8 was "Finished", and nothing wrong was found."""
    losses = [5.545, 5.544, 26.1, 124.6, 307.0, *(25.8 for _ in range(55))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"step": step, "loss": loss}) + "\n" for step, loss in enumerate(losses)))
    for _ in range(2):
        (said,) = health.progress(tmp_path, time.time())
        assert "the loss is 25.8 in the last 10 steps, and was 5.54: the training may diverge" in said
        (tmp_path / "status.json").write_text("{}")
    falls = [{"loss": 6.0 / (1 + step / 50) + (step % 7) / 10} for step in range(400)]
    assert health.rising(falls) == ""
    assert health.rising([{"loss": 0.003 * (1 + step % 5)} for step in range(100)]) == "", "small losses differ by times, and by little"
    assert "has diverged" in health.rising([{"loss": 5.0}, {"loss": float("nan")}])


def test_how_far_a_run_is_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({"training": {"steps": 4000}, "predicted": {"step_time_s": 0.221}}))
    assert health.where(tmp_path, 0.0) == "step 0 of 4,000"
    rows = [{"step": step, "step_time_s": 0.599, "loss": 5.2} for step in range(1, 70)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    far, now = "step 69 of 4,000, loss 5.2, 599 ms a step (predicted 221 ms)", 1.8e9
    ends = time.strftime("%Y-%m-%d %H:%M", time.localtime(now + 3931 * 0.599))
    assert health.where(tmp_path, now) == f"{far}, ends about {ends}, saves and evaluations apart"
    health.main([str(tmp_path)])
    assert f"health: {tmp_path}: {far}, ends about " in capsys.readouterr().err
    (tmp_path / "status.json").write_text(json.dumps({"status": "finished"}))
    assert health.where(tmp_path, now) == f"{far}, finished"
    (tmp_path / "status.json").write_text(json.dumps({"status": "failed", "error": "RuntimeError: no GPU"}))
    assert health.where(tmp_path, now) == f"{far}, failed: RuntimeError: no GPU"


def test_the_command_imports_no_engine_and_ends_with_one_where_something_is_wrong(tmp_path: Path) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\ncat <<'END'\n{GPU.format(**{**WELL, 'errors': 7})}\nEND\n")
    smi.chmod(0o755)
    code = "import sys; from orchestrator import health; s = health.main([]); print(sorted({'torch'} & {*sys.modules})); sys.exit(s)"
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "health: GPU 0 (NVIDIA H100 80GB HBM3, 00000000:1B:00.0): uncorrected memory errors: dram_uncorrectable 7\n" in done.stdout
    assert done.stdout.endswith("[]\n"), "it runs beside a training: it must take no memory of its GPU"
    assert health.main(["a", "b"]) == 2
    assert health.main([str(tmp_path / "nothing")]) == 2
