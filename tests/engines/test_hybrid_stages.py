"""Models whose layers have one part (Nemotron-H) under Megatron: stages by the letters of the pattern, and what releases refuse."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "model"))
from published_counts import PUBLISHED

import orchestrator as so
from orchestrator import api
from orchestrator.engines.megatron.own import why_not_own
from orchestrator.errors import InputError, NoPlanError
from orchestrator.report.text import unasked_text

NANO = PUBLISHED["Nemotron-3-Nano-30B-A3B"][0]
WORK: dict[str, Any] = {"gpus": 64, "cluster": "dgx_h100", "train": {"seq_length": 8192, "global_batch_size": 512}}
NEW, OLD = {"cluster.software.megatron_core": "0.19.2"}, {"cluster.software.megatron_core": "0.16.1"}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    at = tmp_path_factory.mktemp("nano") / "nano.json"
    at.write_text(json.dumps(NANO))
    return {"model.hf_config": str(at), **WORK}


@pytest.fixture(scope="module")
def megatrons(config: dict[str, Any]) -> so.Answer:
    """Megatron's plan under 0.19."""
    return api.plan(**config, **NEW, engine="megatron")


def test_bridge_is_told_the_stages_in_the_pattern_and_no_layout(config: dict[str, Any]) -> None:
    plan = api.plan(**config, **NEW, engine="megatron", pin={"pp": 2, "recompute": "full"})
    sizes = [sum(span.count for span in stage.layers if span.kind not in ("embedding", "head")) for stage in plan.plan.stages]
    assert len(set(sizes)) == 2, "stages of two lengths"
    said = plan.written("bridge")["bridge.py"]
    pattern = next(line for line in said.splitlines() if "hybrid_layer_pattern" in line).split("'")[1]
    assert pattern.replace("|", "") == NANO["hybrid_override_pattern"]
    assert [len(part) for part in pattern.split("|")] == sizes
    assert "recipe.model.pipeline_model_parallel_layout = None" in said
    assert "hybrid_layer_pattern" in plan.written("verl")["verl.yaml"].partition("Can't be said there: ")[2].splitlines()[0]


def test_stages_of_hybrids_need_a_release_that_lays_them_out_and_have_no_chunks(config: dict[str, Any]) -> None:
    with pytest.raises(NoPlanError, match=r"pp=2 with layers of one part: .*; 0\.16\.1 itself has even ones"):
        api.plan(**config, **OLD, engine="megatron", pin={"pp": 2, "tp": 4, "ep": 8})
    assert api.plan(**config, **OLD, engine="megatron").plan.pp == 1
    with pytest.raises(NoPlanError, match="vpp=2 with layers of one part: Megatron-Bridge's hybrid models have no interleaving"):
        api.plan(**config, **NEW, engine="megatron", pin={"pp": 2, "vpp": 2})


def test_an_engine_that_only_plans_a_model_is_said_where_it_is_faster(config: dict[str, Any], megatrons: so.Answer) -> None:
    plan = api.plan(**config, **NEW)
    assert plan.plan.engine == "deepspeed"
    first = plan.found.unasked[0]
    assert first.key == "engine=megatron"
    assert first.plan.prediction.step_time_s == megatrons.step_time_s < plan.step_time_s / 2
    assert "Not asked for: engine=megatron: -" in unasked_text(plan.plan, first.key, first.asks, first.plan)


def test_nothing_that_starts_is_written_for_a_model_that_nothing_here_trains(
    config: dict[str, Any], megatrons: so.Answer, tmp_path: Path
) -> None:
    """Megatron's own loop of 0.19 would take the arguments, and train another model: they have no word of its layers' kinds."""
    plan, job = megatrons, megatrons.job()
    assert (job.module, job.unstartable[:10]) == ("orchestrator.workers.megatron", "plan only:")
    assert (
        why_not_own(plan.plan)
        == f"pretrain_gpt.py of Megatron-LM, tag core_v0.19.0 trains no such model; {job.unstartable.split('; engine')[0]}"
    )
    made = plan.write(tmp_path / "out")
    assert not {"job.sbatch", "launch.sh", "engine.json", "megatron_args.sh"} & {path.name for path in made.iterdir()}
    with pytest.raises(InputError, match=r"write=pbs: is of a job that starts the training: plan only.*; entry=PROGRAM starts"):
        api.plan(**config, **NEW, engine="megatron", write="pbs", pin={"pp": 1, "tp": plan.plan.tp, "ep": plan.plan.ep}).write(
            tmp_path / "b"
        )
