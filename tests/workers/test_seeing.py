"""Models that look at images train on drawn ones under the Trainer on two ranks to what transformers and torch alone compute on one
process, from a config.json of each kind, whole or with parts frozen."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from worker_pool import Pool

from orchestrator import recipe
from orchestrator.detect import Machine
from orchestrator.engines import ENGINES
from orchestrator.plan import Plan, to_json
from orchestrator.planning import Planner
from orchestrator.units import GIB

pytest.importorskip("transformers")
sys.path.append(str(Path(__file__).parents[1] / "model"))
from seeing_cases import plain
from vision_language import TINY

pytestmark = pytest.mark.engines
NO_GPU = Machine(host_memory=16 * GIB)
TOLERANCE = 1e-5
WAYS: dict[str, tuple[str, ...]] = {
    "qwen2_5_vl": ("pin.zero_stage=3", "pin.recompute=full", "train.images=2", "train.image_tokens=12"),
    "llava": ("pin.zero_stage=1",),
    "gemma3": ("pin.zero_stage=3", "train.eps=1e-4"),
    "internvl": ("pin.zero_stage=2", "pin.recompute=full", "train.images=2"),
    "qwen2_vl": ("pin.zero_stage=1", "train.image_tokens=16"),
    "qwen3_vl": ("pin.zero_stage=3", "train.image_tokens=16"),
}
"""Gemma 3's projector begins at zero: with a usual epsilon Adam would divide gradients of its tower that are rounding by their own size."""
FROZEN = {
    "llava": ("pin.zero_stage=3", "train.freeze=vision,language"),
    "qwen2_5_vl": ("pin.zero_stage=1", "train.image_tokens=16", "train.freeze=vision"),
}
ALWAYS = ("qwen2_5_vl", "llava")
"""The others are for .ci/full."""


def plan_of(name: str, gpus: int, folder: Path, *more: str, length: int = 48) -> Plan:
    path = folder / f"{name}.json"
    path.write_text(json.dumps(TINY[name]))
    words = (
        *("engine=deepspeed", "cluster=cpu", f"gpus={gpus}", "train.precision=fp32", "train.global_batch_size=8", "train.steps=4"),
        *("train.lr=1e-3", f"train.seq_length={length}", f"model.hf_config={path}", *more),
    )
    return Planner(recipe.load(words, NO_GPU, tuple(ENGINES))).fastest().plan


ADAPTED = {
    "qwen2_5_vl": ("pin.zero_stage=3", "pin.recompute=full", "train.image_tokens=16", "lora.rank=4"),
    "llava": ("pin.zero_stage=1", "lora.rank=4"),
    "internvl": ("pin.zero_stage=2", "lora.rank=4"),
}


def assert_same(name: str, way: tuple[str, ...], pool: Pool, folder: Path) -> dict[str, Any]:
    plan = plan_of(name, 2, folder, *way)
    assert (plan.engine, plan.world_size) == ("deepspeed", 2)
    one = plan_of(name, 1, folder, *(word for word in way if not word.startswith("pin.")), "pin.zero_stage=1")
    alone = plain(one, TINY[name])
    together: dict[str, Any] = pool.run("traced_cases.trained", 2, to_json(plan), str(folder))[0]
    assert together["losses"] == pytest.approx(alone["losses"], abs=TOLERANCE)
    assert together["norms"] == pytest.approx(alone["norms"], rel=1e-4)
    assert len(set(together["losses"])) == 4
    return together


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.full) for name in WAYS])
def test_two_ranks_train_to_the_losses_of_transformers_on_one_process(name: str, pool: Pool, tmp_path: Path) -> None:
    assert_same(name, WAYS[name], pool, tmp_path)


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name == "llava" else pytest.mark.full) for name in FROZEN])
def test_what_is_frozen_stays_as_it_is_on_two_ranks(name: str, pool: Pool, tmp_path: Path) -> None:
    assert_same(name, FROZEN[name], pool, tmp_path)


GOES_ON = {
    "llava": ("llava", "pin.zero_stage=3"),
    "qwen2_5_vl": ("qwen2_5_vl", "pin.zero_stage=1", "train.image_tokens=16"),
    "llava, tower frozen": ("llava", "pin.zero_stage=2", "train.freeze=vision"),
}


@pytest.mark.parametrize("case", [pytest.param(case, marks=() if case == "llava" else pytest.mark.full) for case in GOES_ON])
def test_a_run_goes_on_from_its_checkpoint_and_its_weights_load_in_plain_transformers(case: str, pool: Pool, tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText

    name, stage, *more = GOES_ON[case]
    plan = plan_of(name, 2, tmp_path, stage, *more, "train.save_every=2", f"model.export_to={tmp_path / 'weights'}")
    found = pool.run("traced_cases.resumed", 2, to_json(plan), str(tmp_path / "cache"), str(tmp_path / "runs"))[0]
    assert found["again"] == pytest.approx(found["whole"][2:], abs=1e-6)
    loaded, told = AutoModelForImageTextToText.from_pretrained(tmp_path / "weights", output_loading_info=True)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    alone = plain(plan_of(name, 1, tmp_path, *more, "pin.zero_stage=1"), TINY[name])["weights"]
    for path, parameter in loaded.named_parameters():  # four steps of Adam move a weight by up to 4e-3
        torch.testing.assert_close(parameter.float(), alone[path], atol=2e-4, rtol=0.0)


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name == "llava" else pytest.mark.full) for name in ADAPTED])
def test_adapters_of_the_text_model_train_beside_a_frozen_tower_as_peft_has_them(name: str, pool: Pool, tmp_path: Path) -> None:
    assert_same(name, ADAPTED[name], pool, tmp_path)
