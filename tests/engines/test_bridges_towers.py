"""Models that look at images, as Megatron-Bridge trains them: what its file says, and what Megatron's own classes say of their chunks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator import api
from orchestrator.engines import ENGINES
from orchestrator.errors import InputError, NoPlanError
from orchestrator.plan import from_json, to_json
from orchestrator.plan.check import check_plan

QWEN3_VL: dict[str, Any] = {
    "model_type": "qwen3_vl",
    "text_config": {
        **{"model_type": "qwen3_vl_text", "num_hidden_layers": 8, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 1024},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 8192},
    },
    "vision_config": {"depth": 3, "hidden_size": 128, "num_heads": 4, "out_hidden_size": 256, "deepstack_visual_indexes": [1, 2]},
}


def planned(folder: Path, **more: Any) -> api.Answer:
    (folder / "config.json").write_text(json.dumps(QWEN3_VL))
    keys = {
        "model.hf_config": str(folder / "config.json"),
        "train.seq_length": 2048,
        "train.global_batch_size": 64,
        "train.image_tokens": 256,
    }
    return api.plan(engine="megatron", gpus=8, cluster="dgx_h100", **keys, **more)


def test_bridges_file_trains_what_its_recipes_freeze_and_fuses_no_rotary_embedding(tmp_path: Path) -> None:
    answer = planned(tmp_path, **{"pin.pp": 2, "train.images": 2})
    text, words = answer.written("bridge").values()
    assert "\n# The images are those of the recipe's data set: the plan is for 2 of 256 tokens a sample.\n" in text
    for name in ("freeze_language_model", "freeze_vision_model", "freeze_vision_projection", "apply_rope_fusion"):
        assert f"    recipe.model.{name} = False\n" in text
        assert f" model.{name}=false " in words
    assert "enable_in_batch_packing" not in text
    assert "write=bridge" in answer.job().without_worker
    tuned = planned(tmp_path, task="sft")
    assert tuned.plan.prediction.step_time_s == planned(tmp_path).plan.prediction.step_time_s
    assert "    recipe.dataset.enable_in_batch_packing = False\n" in tuned.written("bridge")["bridge.py"]
    with pytest.raises(NoPlanError, match=r"data\.packing=true of qwen3_vl"):
        planned(tmp_path, task="sft", **{"data.packing": True})
    with pytest.raises(InputError, match="write=ms_swift: gets text here"):
        answer.written("ms_swift")


@pytest.mark.engines
def test_megatron_builds_no_chunk_without_its_number_which_bridge_keeps_of_qwen3_vl(tmp_path: Path) -> None:
    """Megatron-Bridge 067f987, models/qwen_vl/qwen3_vl_provider.py:155."""
    import torch
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    sizes: dict[str, Any] = {"num_layers": 8, "hidden_size": 64, "num_attention_heads": 4, "pipeline_model_parallel_size": 2}
    sizes["pipeline_dtype"] = torch.bfloat16
    config = TransformerConfig(**sizes, virtual_pipeline_model_parallel_size=2)
    with pytest.raises(AssertionError, match="vp_stage must be provided"):
        get_transformer_layer_offset(config, None, 1)
    assert get_transformer_layer_offset(config, 1, 1) == 6
    assert get_transformer_layer_offset(TransformerConfig(**sizes), None, 1) == 4
    with pytest.raises(NoPlanError, match="vpp=2 of qwen3_vl"):
        planned(tmp_path, **{"pin.pp": 2, "pin.vpp": 2})


def test_layers_that_are_given_what_the_tower_saw_stand_on_the_first_stage(tmp_path: Path) -> None:
    """The tower of three images takes as long as all other stages: left to its price the first stage would have no layer beside it."""
    heavy = {"train.images": 7, "pin.pp": 4, "pin.micro_batch_size": 1, "pin.tp": 1}
    plan = planned(tmp_path, **heavy).plan
    assert sum(span.count for span in plan.stages[0].layers if span.kind == "decoder") == 2
    with pytest.raises(InputError, match="has 1 transformer layers in the first stage, where those must stand that the tower gives to: 2"):
        planned(tmp_path, **heavy, **{"pin.layout": "Et|t*2|t*2|t*3L"})
    changed = json.loads(to_json(plan))
    changed["stages"][0]["layers"][1]["count"] = 1
    changed["stages"][1]["layers"][0] |= {"first": 1, "count": changed["stages"][1]["layers"][0]["count"] + 1}
    with pytest.raises(InputError, match="must be 2 at least, to which the tower gives what it saw"):
        check_plan(from_json(json.dumps(changed)), ENGINES["megatron"].capabilities(plan.cluster.software))
