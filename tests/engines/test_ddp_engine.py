"""An engine from another package (tests/engines/ddp_engine: torch's DistributedDataParallel) is found by its entry point, planned, priced,
started and measured, on a machine without Megatron and DeepSpeed; and engine=deepspeed on one without Megatron."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from without import SITECUSTOMIZE, WITHOUT

SOURCE = Path(__file__).parent / "ddp_engine"
ROOT = Path(__file__).parents[2]
STEPS = 6
WORDS = ("recipe=gpt_tiny", f"train.steps={STEPS}", "train.warmup=2", "train.global_batch_size=8")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of packages with ddp-engine in it, as an installer leaves it: the modules, and the metadata of its pyproject.toml."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(SOURCE / "ddp_engine", folder / "ddp_engine")
    project = tomllib.loads((SOURCE / "pyproject.toml").read_text())["project"]
    about = folder / f"ddp_engine-{project['version']}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {where}" for name, where in points.items())]
    (about / "entry_points.txt").write_text("\n".join(lines) + "\n")
    (folder / "sitecustomize.py").write_text(SITECUSTOMIZE)
    return folder


def run(site: Path, without: str, *words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(site), str(ROOT))), WITHOUT: without}
    command = [sys.executable, "-m", "orchestrator.run", *words]
    return subprocess.run(command, cwd=site, env=environment, capture_output=True, text=True, check=False, timeout=300)


def metrics(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_an_engine_of_another_package_is_a_choice_and_is_searched(site: Path, tmp_path: Path) -> None:
    said = run(site, "", "recipe=gpt_tiny", "engine=nobody")
    assert said.returncode
    assert "ddp" in said.stderr
    replicas = "pin.tp=1", "pin.pp=1"  # a pipeline is faster than all that it and deepspeed have: they are cut without a price
    done = run(site, "", "recipe=gpt_tiny", "gpus=4", "launch=none", f"out={tmp_path / 'auto'}", *replicas)
    assert done.returncode == 0, done.stderr
    with (tmp_path / "auto" / "candidates.csv").open(newline="") as file:
        priced = {row["engine"] for row in csv.DictReader(file) if row["step_time_s"]}
    assert {"ddp", "deepspeed"} <= priced


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("pin.tp=2", "ddp has no tp"),
        ("pin.zero_stage=1", "ddp has zero_stage 0"),
        ("train.precision=bf16", "ddp has no precision bf16; it has fp32"),
        ("ds.steps_per_print=1", "does not reach engine=ddp; choose one of megatron_deepspeed, deepspeed"),
        ("model.export_to=there", "neither loads nor writes checkpoints"),
    ],
)
def test_what_it_does_not_offer_is_refused(site: Path, word: str, why: str) -> None:
    done = run(site, "", "recipe=gpt_tiny", "gpus=2", "engine=ddp", "launch=none", word)
    assert done.returncode
    assert why in done.stderr


@pytest.mark.engines
def test_it_trains_on_two_ranks_as_in_one_process_without_megatron_and_deepspeed(site: Path, tmp_path: Path) -> None:
    found = {}
    for ranks in (2, 1):
        out = tmp_path / str(ranks)
        done = run(site, "megatron deepspeed", *WORDS, f"gpus={ranks}", "engine=ddp", f"out={out}")
        assert done.returncode == 0, done.stdout + done.stderr
        assert "measured / predicted" in done.stdout
        found[ranks] = metrics(out)
        assert json.loads((out / "plan.json").read_text())["predicted"]["step_time_s"] > 0
    assert [row["step"] for row in found[2]] == list(range(1, STEPS + 1))
    for name in ("loss", "grad_norm"):
        assert [row[name] for row in found[2]] == pytest.approx([row[name] for row in found[1]], abs=1e-4)
    assert found[2][-1]["loss"] < found[2][0]["loss"] - 0.3


@pytest.mark.engines
def test_deepspeed_needs_no_megatron(site: Path, tmp_path: Path) -> None:
    """With its checkpoints, which keep generator states and places in the whole model."""
    words = (*WORDS, "gpus=2", "engine=deepspeed", "pin.zero_stage=2", f"train.save_every={STEPS}")
    done = run(site, "megatron", *words, f"out={tmp_path / 'out'}")
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [row["loss"] for row in metrics(tmp_path / "out")]
    assert len(losses) == STEPS
    assert losses[-1] < losses[0] - 0.3


@pytest.mark.engines
@pytest.mark.parametrize(
    ("engine", "without"), [("megatron", "megatron.core"), ("ddp", "transformers"), ("megatron_deepspeed", "deepspeed")]
)
def test_what_the_chosen_engine_lacks_is_said_before_a_search(site: Path, engine: str, without: str) -> None:
    done = run(site, without.partition(".")[0], "recipe=gpt_tiny", "gpus=2", f"engine={engine}", "launch=local")
    assert done.returncode
    assert f"launch=local: {without} is not installed" in done.stderr
