"""Models whose layers have one part (Nemotron-H) under Megatron: stages by the letters of the pattern, and what releases refuse."""

from __future__ import annotations

import json
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import megatron.core
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "model"))
from published_counts import PUBLISHED

import orchestrator as so
from orchestrator import api
from orchestrator.engines import ENGINES
from orchestrator.engines.megatron.own import why_not_own
from orchestrator.engines.megatron_versions import release_of
from orchestrator.errors import InputError, NoPlanError
from orchestrator.hardware.spec import Software
from orchestrator.plan.check import check_plan
from orchestrator.report.text import unasked_text
from orchestrator.strategy.layout import ENDS
from orchestrator.strategy.legality import why_not_stages

NANO = PUBLISHED["Nemotron-3-Nano-30B-A3B"][0]
LARGE = NANO | {
    **{"hidden_size": 8192, "intermediate_size": 32768, "num_attention_heads": 64, "num_key_value_heads": 8, "mamba_num_heads": 256},
    **{"ssm_state_size": 256, "num_hidden_layers": 118, "max_position_embeddings": 8192},
    "hybrid_override_pattern": "M-M-M-M*-" + 9 * "M-M-M-M-M*-" + "M-M-M-M-M-",
}
"""Nemotron-H-56B (examples/rl/model_configs/nemotron5_56b.sh of Megatron-LM, core_v0.16.1)."""
EVEN = "Et*59|t*59L"
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
    uneven = {"layout": "Et*10|t*20|t*10|t*12L", "pp": 4, "tp": 2, "ep": 8}
    with pytest.raises(
        InputError, match=r"pin.layout=.*as many in all but the first and the last \(core/ssm/mamba_block.py:172-221 of 0.16.1"
    ):
        api.plan(**config, **OLD, engine="megatron", pin=uneven)
    api.plan(**config, **OLD, engine="megatron", pin=uneven | {"layout": "Et*10|t*15|t*15|t*12L"})
    plan = api.plan(**config, **NEW, engine="megatron", pin=uneven).plan
    with pytest.raises(InputError, match=r"stages=\[10, 20, 10, 12\]: stages of such a model have a layer each"):
        check_plan(plan, ENGINES["megatron"].capabilities(Software(megatron_core="0.16.1")))
    for release in (OLD, NEW):
        match = r"80GB: megatron pp=2 tp=4 ep=8 vpp=2: illegal by rule hybrid_chunks .*: vpp=2 with layers of one part[^;]*; to relax"
        with pytest.raises(NoPlanError, match=match):
            api.plan(**config, **release, engine="megatron", pin={"pp": 2, "tp": 4, "ep": 8, "vpp": 2})


def test_bridge_is_told_stages_in_the_pattern_also_of_a_plan_for_the_first_release(tmp_path: Path) -> None:
    """Nemotron-H-56B on GPUs of 80 GB. Bridge's recipes have hybrid_layer_pattern, and no rank starts where its older name stands beside
    it (Megatron-Bridge 0.4.2 to 0.7, finalize of its provider)."""
    (tmp_path / "56b.json").write_text(json.dumps(LARGE))
    few = {"tp": 8, "micro_batch_size": 1, "recompute": "none"}
    found = api.plan(**{"model.hf_config": str(tmp_path / "56b.json")}, **WORK, **OLD, engine="megatron", pin={"pp": 8} | few)
    sizes = [sum(span.count for span in stage.layers if span.kind not in ENDS) for stage in found.plan.stages]
    assert len({*sizes[1:-1]}) == 1 < len({*sizes}), "118 layers: not even"
    said = found.written("bridge")["bridge.py"]
    pattern = next(line for line in said.splitlines() if "hybrid_layer_pattern" in line).split("'")[1]
    assert pattern.replace("|", "") == LARGE["hybrid_override_pattern"]
    assert [len(part) for part in pattern.split("|")] == sizes
    assert "recipe.model.num_layers_in_first_pipeline_stage = None\n" in said
    assert "recipe.model.num_layers_in_last_pipeline_stage = None\n" in said
    assert "recipe.model.pipeline_model_parallel_layout = None" in said
    assert "hybrid_override_pattern" not in "".join(found.written("bridge").values())
    even = api.plan(**{"model.hf_config": str(tmp_path / "56b.json")}, **WORK, **OLD, engine="megatron", pin={"layout": EVEN} | few)
    assert "recipe.model.num_layers_in_first_pipeline_stage = None" in even.written("bridge")["bridge.py"]
    unsaid = found.written("nemo")["nemo.py"] + found.written("verl")["verl.yaml"]
    assert "hybrid_override_pattern" not in unsaid, "the model is the recipe's own"


@pytest.mark.parametrize(("layers", "pp"), [(3, 2), (6, 2), (4, 3), (7, 3), (8, 4), (9, 4), (7, 5)])
def test_the_stages_that_the_first_release_builds_are_those_that_are_legal(layers: int, pp: int, megatrons: so.Answer) -> None:
    """megatron-core 0.16.1's own validation and MambaStack, for all that can be said of a first and a last stage."""
    if release_of(megatron.core.__version__).lays_out_hybrids:
        pytest.skip("of 0.16.1, whose stack has no letters of stages")
    said = [None, *range(layers + 1)]
    built = {sizes for first in said for last in said if (sizes := stack_sizes(layers, pp, first, last)) and sum(sizes) == layers}
    able = ENGINES["megatron"].capabilities(Software(megatron_core="0.16.1"))
    whole = [cuts for cuts in product(range(layers + 1), repeat=pp) if sum(cuts) == layers]
    assert built == {sizes for sizes in whole if why_not_stages(able, megatrons.plan.model, sizes) is None}
    with pytest.raises(AssertionError, match="does not currently support"):
        stack_sizes(layers, 2, None, None, vpp=2)


class Group(NamedTuple):
    """A rank's place in a group of ranks."""

    place: int
    ranks: int

    def rank(self) -> int:
        return self.place

    def size(self) -> int:
        return self.ranks


def stack_sizes(layers: int, pp: int, first: int | None, last: int | None, vpp: int | None = None) -> tuple[int, ...] | None:
    """Layers of each stage of 0.16.1's MambaStack; None: its configuration refuses these sizes."""
    from megatron.core.ssm.mamba_block import MambaStack, MambaStackSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

    given = {"num_layers": layers, "hidden_size": 8, "num_attention_heads": 1, "pipeline_dtype": torch.float32}
    given |= {"num_layers_in_first_pipeline_stage": first, "num_layers_in_last_pipeline_stage": last}
    try:
        made = TransformerConfig(**given, pipeline_model_parallel_size=pp, virtual_pipeline_model_parallel_size=vpp)
    except ValueError:
        return None
    groups = [SimpleNamespace(pp=Group(rank, pp), tp=Group(0, 1)) for rank in range(pp)]
    stacks = [MambaStack(made, MambaStackSubmodules(), hybrid_override_pattern="M" * layers, post_process=False, pg_collection=group)
              for group in groups]  # fmt: skip
    return tuple(len(stack.layers) for stack in stacks)


def test_an_engine_that_only_plans_a_model_is_said_where_it_is_faster(config: dict[str, Any], megatrons: so.Answer) -> None:
    plan = api.plan(**config, **NEW)
    assert plan.plan.engine == "deepspeed"
    first = plan.found.unasked[0]
    assert first.key == "engine=megatron"
    assert first.plan.prediction.step_time_s == megatrons.step_time_s < plan.step_time_s / 2
    assert "Not asked for: engine=megatron: -" in unasked_text(plan.plan, first.key, first.asks, first.plan)


def test_an_engine_that_only_plans_a_model_is_said_where_no_other_has_a_plan_that_fits(tmp_path: Path) -> None:
    """Nothing but that no plan fits was said of Llama 4 Maverick on 512 H100, and engine=megatron had one of 2 seconds."""
    (tmp_path / "maverick.json").write_text(json.dumps(PUBLISHED["Llama-4-Maverick"][0]))
    asked = {"model.hf_config": str(tmp_path / "maverick.json"), "gpus": 512, "cluster": "dgx_h100"}
    asked |= {"train.seq_length": 4096, "train.global_batch_size": 1024}
    with pytest.raises(
        NoPlanError, match=r"^no plan fits .*deepspeed.*; engine=megatron has a plan \(\d\.\d+ s a step\) for programs of your own"
    ):
        so.plan(**asked)
    assert so.plan(**asked, engine="megatron").headroom > 0


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
