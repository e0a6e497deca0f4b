"""Models that look at images, as Megatron-Bridge trains them: what its file says, and what Megatron's own classes say of their chunks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "audit"))
from test_around import SLIME, VERL

import orchestrator as so
from orchestrator import api
from orchestrator.audit import formats
from orchestrator.engines import ENGINES
from orchestrator.errors import InputError, NoPlanError
from orchestrator.plan import from_json, to_json
from orchestrator.plan.check import check_plan, workload_of

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


def test_a_tower_with_fewer_heads_than_the_text_is_planned_where_both_are_divided(tmp_path: Path) -> None:
    """Qwen3-VL-8B has 32 heads and its tower 16: the search ended in a division by 32 on 4 nodes."""
    tower = {**QWEN3_VL["vision_config"], "num_heads": 2}
    (tmp_path / "few.json").write_text(json.dumps({**QWEN3_VL, "vision_config": tower}))
    keys = {"train.seq_length": 2048, "train.global_batch_size": 64, "train.image_tokens": 256, "gpus": 8, "cluster": "dgx_h100"}
    found = api.plan(engine="megatron", **{"model.hf_config": str(tmp_path / "few.json")}, **keys)
    assert found.plan.tp <= 2
    with pytest.raises(NoPlanError, match=r"tp=4 does not divide the tower's num_attention_heads=2"):
        api.plan(engine="megatron", **{"model.hf_config": str(tmp_path / "few.json")}, **keys, pin={"tp": 4})


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


BRIDGE = """\
model: {tensor_model_parallel_size: 2, context_parallel_size: CP, FREEZES}
train: {global_batch_size: 64, micro_batch_size: 1}
dataset: {seq_length: 2048}
"""


def audited(folder: Path, cp: int = 1, freezes: str = "", **changes: Any) -> so.Audit:
    (folder / "config.json").write_text(json.dumps(QWEN3_VL | changes))
    (folder / "run.yaml").write_text(BRIDGE.replace("CP", str(cp)).replace("FREEZES", freezes))
    return api.audit(folder / "run.yaml", gpus=8, cluster="dgx_h100", **{"model.hf_config": str(folder / "config.json")})


def test_what_bridge_trains_and_is_not_planned_here_is_no_verdict_on_a_file(tmp_path: Path) -> None:
    alone = audited(tmp_path)
    assert alone.legal
    assert "every sample has one image of 256 tokens: train.images=, train.image_tokens= say others" in alone.reading.assumed
    deeper = audited(tmp_path, vision_config=QWEN3_VL["vision_config"] | {"depth": 24})
    assert deeper.step_time_s > alone.step_time_s > 0, "the tower is priced: it was no plan, for want of a price of its layers"
    divided = audited(tmp_path, cp=2)
    assert divided.legal is None
    assert divided.untold.startswith("cp=2 of qwen3_vl: every rank of a sequence looks at all of its images, which is not priced")
    assert divided.untold.endswith(": its own limit, no verdict on the file")
    assert divided.plan is not None
    assert divided.plan.cp == 2
    refused = audited(tmp_path, cp=2, vision_config=QWEN3_VL["vision_config"] | {"num_heads": 1})
    assert refused.legal is False
    assert "tp=2 does not divide the tower's num_attention_heads=1" in refused.problem


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.yaml", BRIDGE.replace("CP", "1").replace("FREEZES", "freeze_language_model: true")),
        ("verl.sh", f"{VERL.rstrip()} actor_rollout_ref.actor.freeze_vision_tower=True\n"),
        ("rl.yaml", "policy: {megatron_cfg: {enabled: true, freeze_config: {freeze_vision_model: true, freeze_language_model: false}}}\n"),
        ("slime.sh", f"{SLIME.rstrip()} --freeze-params-name-list embedding output_layer\n"),
        ("slime.sh", f"{SLIME.rstrip()} --only-train-params-name-list mlp\n"),
    ],
)
def test_what_a_program_around_megatron_freezes_is_said_to_take_less_memory_than_is_priced(name: str, text: str) -> None:
    """Frozen weights have neither gradients nor states: of verl's, NeMo-RL's and slime's it was said that only the result changes."""
    reading = formats.read(text, name).reading
    assert [one for one in reading.unpriced if "freeze" in one or "only-train" in one]
    assert not [one for one in (*reading.result, *reading.unknown) if "freeze" in one or "only-train" in one]


def test_a_tower_that_bridge_freezes_is_priced_so_and_written_so(tmp_path: Path) -> None:
    """Without gradients, states, saved activations and a backward pass."""
    trained, frozen = audited(tmp_path), audited(tmp_path, freezes="freeze_vision_model: true, freeze_vision_projection: false")
    assert trained.plan is not None
    assert frozen.plan is not None
    assert (trained.plan.training.freeze, frozen.plan.training.freeze) == ((), ("vision",))
    assert (frozen.legal, frozen.reading.unpriced) == (True, ())
    (before,), (after,) = (plan.prediction.by_stage for plan in (trained.plan, frozen.plan))
    model = workload_of(trained.plan).model
    tower = sum(
        weight.local_numel(2)
        for weight in model.runs[0].layer.weights
        if weight.name.split(".")[0] in ("patches", "vision", "vision_window")
    )
    assert tower > 3 * 12 * 128**2 / 2
    assert before.memory_by_cause["weights"] == after.memory_by_cause["weights"]
    assert before.memory_by_cause["gradients"] - after.memory_by_cause["gradients"] == pytest.approx(4 * tower, rel=1e-6)
    assert before.memory_by_cause["optimizer"] - after.memory_by_cause["optimizer"] == pytest.approx(12 * tower / 4, rel=1e-6)
    assert after.memory_by_cause["activations"] < before.memory_by_cause["activations"]
    assert frozen.step_time_s < trained.step_time_s
    assert audited(tmp_path, freezes="freeze_language_model: false").step_time_s == trained.step_time_s
    plan = planned(tmp_path, **{"train.freeze": "vision,projector"})
    text = plan.written("bridge")["bridge.py"]
    for name, value in (("language_model", False), ("vision_model", True), ("vision_projection", True)):
        assert f"    recipe.model.freeze_{name} = {value}\n" in text
    assert plan.peak_memory_bytes < 0.9 * planned(tmp_path).peak_memory_bytes


def test_a_text_that_bridge_freezes_hands_gradients_to_the_projector_and_has_none(tmp_path: Path) -> None:
    """The projector alone is trained, as Bridge's recipes that pretrain Qwen3-VL do: the backward pass goes through every stage."""
    frozen = audited(tmp_path, freezes="freeze_language_model: true, freeze_vision_model: true")
    trained = audited(tmp_path)
    assert frozen.plan is not None
    assert trained.plan is not None
    assert (frozen.legal, frozen.reading.unpriced, frozen.plan.training.freeze) == (True, (), ("language", "vision"))
    first = workload_of(frozen.plan).model.runs[0].layer
    projector = sum(weight.local_numel(2) for weight in first.weights if weight.name.split(".")[0] == "projector")
    (before,), (after,) = (plan.prediction.by_stage for plan in (trained.plan, frozen.plan))
    assert before.memory_by_cause["weights"] == after.memory_by_cause["weights"]
    assert after.memory_by_cause["gradients"] == pytest.approx(4 * projector, rel=1e-6)
    assert after.memory_by_cause["optimizer"] == pytest.approx(12 * projector / 4, rel=1e-6)
    assert 0 < after.memory_by_cause["activations"] < before.memory_by_cause["activations"]
    assert frozen.step_time_s < trained.step_time_s
    pins = {"pin.pp": 2, "pin.tp": 1, "pin.micro_batch_size": 4, "pin.zero_stage": 1}
    answer = planned(tmp_path, **pins, **{"train.freeze": "vision,language"})
    last = answer.plan.prediction.by_stage[1].memory_by_cause
    assert (last["gradients"], last["optimizer"]) == (0, 0), "nothing of the last stage is trained"
    assert last["activations"] > 0
    text = answer.written("bridge")["bridge.py"]
    for name, value in (("language_model", True), ("vision_model", True), ("vision_projection", False)):
        assert f"    recipe.model.freeze_{name} = {value}\n" in text


STAGE = """
import json, sys
import torch
import torch.distributed as dist
from orchestrator.cpu import eager, shims  # before Megatron: a CPU compiles nothing

shims.apply()
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
parallel_state.initialize_model_parallel()
model_parallel_cuda_manual_seed(1)
sizes = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "hidden_dropout": 0.0, "attention_dropout": 0.0}
found = []
for trained in (True, False):
    torch.manual_seed(1)
    config = TransformerConfig(**sizes, use_cpu_initialization=True, gradient_accumulation_fusion=False)
    stage = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=128, max_sequence_length=32, pre_process=False, post_process=False)
    stage.requires_grad_(trained)
    wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=True), stage)
    settings = OptimizerConfig(optimizer="adam", lr=1e-3, use_distributed_optimizer=True, params_dtype=torch.float32)
    optimizer = get_megatron_optimizer(settings, [wrapped])
    wrapped.zero_grad_buffer()
    optimizer.zero_grad()
    received = torch.randn(32, 1, 64, requires_grad=True)
    stage.set_input_tensor(received)
    sent = wrapped(torch.zeros(1, 32, dtype=torch.long), torch.arange(32)[None], torch.zeros(1, 1, 32, 32, dtype=torch.bool))
    (sent * torch.arange(64.0)).sum().backward()
    wrapped.finish_grad_sync()
    stepped = optimizer.step()[0]
    found.append([sum(buffer.numel for buffer in wrapped.buffers), received.grad.flatten().tolist(), stepped])
json.dump(found, sys.stdout)
"""


@pytest.mark.engines
def test_a_stage_of_megatron_with_nothing_to_train_hands_gradients_on() -> None:
    """Its own data parallelism and distributed optimizer: no buffer of gradients, a step of nothing, the gradient of what it received."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", STAGE], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    trained, frozen = json.loads(done.stdout[done.stdout.index("[[") :])
    assert trained[0] > 2 * 12 * 64**2
    assert frozen[0] == 0
    assert frozen[1] == pytest.approx(trained[1], rel=1e-4, abs=1e-3)
    assert max(map(abs, frozen[1])) > 1
    assert trained[2]
    assert frozen[2]
