"""What images cost: the tower works on patches; what is frozen has neither gradients nor optimizer states, and no backward pass where
nothing below it is trained."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from orchestrator import recipe
from orchestrator.cost.calibration import Calibration
from orchestrator.cost.workload import engine_workload
from orchestrator.detect import Machine
from orchestrator.engines import ENGINES
from orchestrator.engines.deepspeed.trainer_files import around
from orchestrator.engines.tools import written
from orchestrator.errors import InputError, NoPlanError
from orchestrator.model.families import describe_for
from orchestrator.model.flops import forward_flops, model_flops_per_sample
from orchestrator.model.layer import LayerSpec
from orchestrator.model.lora import trainable_parameters
from orchestrator.model.spec import ModelSpec
from orchestrator.plan import Plan, from_json, to_json
from orchestrator.plan.check import check_plan, workload_of
from orchestrator.planning import Planner
from orchestrator.recipe import resuming
from orchestrator.screen import data_text

NO_GPU = Machine(host_memory=2**40)
CLIP = {
    **{"model_type": "clip_vision_model", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24},
    **{"num_attention_heads": 16, "image_size": 336, "patch_size": 14},
}
LLAVA = {"model_type": "llava", "text_config": {"model_type": "llama", "vocab_size": 32064, "max_position_embeddings": 4096},
         "vision_config": CLIP}  # fmt: skip
PINS = ("pin.zero_stage=2", "pin.micro_batch_size=1", "pin.recompute=none")


def settings_of(folder: Path, *words: str, config: dict[str, Any] = LLAVA) -> recipe.Settings:
    path = folder / "llava.json"
    path.write_text(json.dumps(config))
    given = (f"model.hf_config={path}", "cluster=dgx_h100", "gpus=8", "train.global_batch_size=64", "train.seq_length=4096")
    engine = () if any(word.startswith("engine=") for word in words) else ("engine=deepspeed",)
    return recipe.load((*given, *engine, *words), NO_GPU, tuple(ENGINES))


def plan_of(folder: Path, *words: str, config: dict[str, Any] = LLAVA) -> Plan:
    return Planner(settings_of(folder, *PINS, *words, config=config)).fastest().plan


@cache
def fitted() -> Calibration:
    return (
        Planner(recipe.load(("recipe=llama_tiny", "engine=deepspeed", "gpus=2"), NO_GPU, tuple(ENGINES)))
        .prices([ENGINES["deepspeed"]])[0]
        .fitted
    )


def priced_model(plan: Plan) -> ModelSpec:
    """The model as the engine computes it."""
    return engine_workload(workload_of(plan), ENGINES["deepspeed"].traits(plan.cluster.software), fitted()).model


def layers_of(plan: Plan) -> dict[str, LayerSpec]:
    return {run.layer.kind: run.layer for run in priced_model(plan).runs}


def test_twice_the_images_are_twice_the_towers_work_in_the_same_sequence(tmp_path: Path) -> None:
    one, two = (workload_of(plan_of(tmp_path, f"train.images={images}")).model for images in (1, 2))
    for kind in ("patches", "vision", "projector"):
        assert forward_flops(two.kind(kind)) == 2 * forward_flops(one.kind(kind)), kind
    assert two.kind("decoder") == one.kind("decoder")


def test_an_image_more_takes_time_and_memory(tmp_path: Path) -> None:
    one, four = (plan_of(tmp_path, f"train.images={images}").prediction for images in (1, 4))
    assert four.step_time_s > one.step_time_s
    assert four.peak_memory_bytes > one.peak_memory_bytes


def test_a_frozen_tower_has_no_states_and_no_backward_pass(tmp_path: Path) -> None:
    """CLIP's large tower at 336 pixels: 303,507,456 weights; in bf16 under ZeRO-2 on 8 ranks Adam's states and the fp32 weights are 12
    bytes of each over 8."""
    whole, frozen = plan_of(tmp_path), plan_of(tmp_path, "train.freeze=vision")
    tower = sum(run.count * run.layer.parameters for run in workload_of(whole).model.runs if run.layer.kind in ("patches", "vision"))
    assert tower == 303_507_456 - 2 * 1024  # the norm behind its last layer stands with the projector
    optimizer = [plan.prediction.by_stage[0].memory_by_cause["optimizer"] for plan in (whole, frozen)]
    assert optimizer[0] - optimizer[1] == pytest.approx(12 * tower / 8, rel=1e-3)
    assert frozen.prediction.step_time_s < whole.prediction.step_time_s
    assert frozen.prediction.peak_memory_bytes < whole.prediction.peak_memory_bytes
    layers = layers_of(frozen)
    assert [kind for kind, layer in layers.items() if layer.forward_only] == ["patches", "vision"]
    assert not any(weight.frozen for weight in layers["projector"].weights)
    models = [priced_model(plan) for plan in (whole, frozen)]
    less = sum(run.count * forward_flops(run.layer) for run in models[0].runs if run.layer.kind in ("patches", "vision"))
    assert model_flops_per_sample(models[0]) - model_flops_per_sample(models[1]) == pytest.approx(2 * less)


def test_what_is_above_something_trained_has_the_gradients_of_its_inputs(tmp_path: Path) -> None:
    """The text model frozen: its layers pass gradients to the projector, its embedding to nothing."""
    layers = layers_of(plan_of(tmp_path, "train.freeze=vision,language"))
    assert [kind for kind, layer in layers.items() if layer.forward_only] == ["embedding", "patches", "vision"]
    assert all(weight.frozen for kind in ("decoder", "head", "vision") for weight in layers[kind].weights)
    assert not any(weight.frozen for weight in layers["projector"].weights)
    above = layers_of(plan_of(tmp_path, "train.freeze=projector"))["projector"]
    assert not above.forward_only
    assert all(weight.frozen for weight in above.weights)


def test_beside_adapters_the_tower_is_passed_forward_alone(tmp_path: Path) -> None:
    """Rank 8 in the seven linears of each of 32 layers, 4 x (4096 + 4096) + 3 x (4096 + 11008) elements wide: 19,988,480 weights."""
    plan = plan_of(tmp_path, "lora.rank=8")
    layers = layers_of(plan)
    assert [kind for kind, layer in layers.items() if layer.forward_only] == ["patches", "vision", "projector"]
    assert trainable_parameters(priced_model(plan)) == 8 * 32 * (4 * 8192 + 3 * 15104) == 19_988_480
    assert plan.prediction.step_time_s < plan_of(tmp_path, "train.freeze=vision").prediction.step_time_s


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("train.freeze=tower",),
            "train.freeze=tower: is no part of a model that looks at images; choose one of vision, projector, language",
        ),
        (("train.freeze=vision", "lora.rank=8"), "train.freeze=vision: is said by lora.rank= already: all but the adapters is frozen"),
        (("train.freeze=vision,projector,language",), "train.freeze=vision,projector,language: leaves nothing to train"),
        (("train.images=8",), "train.seq_length=4096: is too short for train.images=8 of 576 tokens"),
        (("train.image_tokens=100",), "train.image_tokens=100: is 576 for every image of llava, which are of 336 pixels a side"),
    ],
)
def test_images_that_can_not_be_are_refused(words: tuple[str, ...], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as raised:
        settings_of(tmp_path, *words)
    assert message in str(raised.value)


@pytest.mark.parametrize("word", ["train.images=2", "train.image_tokens=9", "train.freeze=vision"])
def test_images_of_a_model_that_sees_none_are_refused(word: str) -> None:
    with pytest.raises(InputError) as raised:
        recipe.load(("recipe=llama3_8b", word, "gpus=8", "cluster=dgx_h100"), NO_GPU, tuple(ENGINES))
    assert str(raised.value) == f"{word}: is of a model that looks at images, and llama3_8b looks at none"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("engine=megatron",), "model.vision of llava: Megatron-Bridge has Megatron's layers in the towers of qwen3_vl, qwen3_vl_moe"),
        (("engine=megatron_deepspeed",), "megatron_deepspeed has no vision; model.vision=null plans the text model alone"),
        (("lora.rank=8", "lora.bits=4"), "lora.bits=4 of llava, which looks at images"),
        (("task=sft", "data.packing=true"), "data.packing=true of llava, which looks at images"),
        (("pin.tp=2",), "AutoTP was never tried with transformers' LlavaForConditionalGeneration, which looks at images"),
        (("pin.cp=2",), "can't be run under DeepSpeed's Ulysses"),
    ],
)
def test_what_no_engine_trains_of_such_a_model_says_why(words: tuple[str, ...], message: str, tmp_path: Path) -> None:
    with pytest.raises(NoPlanError) as raised:
        Planner(settings_of(tmp_path, *words)).fastest()
    assert message in str(raised.value)


QWEN3_VL: dict[str, Any] = {
    "model_type": "qwen3_vl",
    "text_config": {
        **{"model_type": "qwen3_vl_text", "num_hidden_layers": 36, "hidden_size": 4096, "intermediate_size": 12288, "vocab_size": 151936},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262144},
    },
    "vision_config": {"depth": 27, "hidden_size": 1152, "num_heads": 16, "out_hidden_size": 4096, "deepstack_visual_indexes": [8, 16, 24]},
}
"""Qwen3-VL-8B."""


def test_a_tower_under_megatron_is_a_part_of_the_first_stage(tmp_path: Path) -> None:
    """It is divided by tp with the text model's layers and takes its states and seconds there, where fewer layers stand in return; a saved
    plan has it there too."""
    pins = ("engine=megatron", "pin.tp=2", "pin.pp=2", "pin.micro_batch_size=1", "pin.recompute=none", "train.image_tokens=1024")
    pins = (*pins, "train.images=3")
    whole, text = (
        Planner(settings_of(tmp_path, *words, config=QWEN3_VL)).fastest().plan for words in (pins, (*pins[:5], "model.vision=null"))
    )
    model, alone = workload_of(whole).model, workload_of(text).model
    tower = sum(run.count * run.layer.parameters for run in describe_for(whole.model, whole.training).runs[1:4])
    assert [run.layer.kind for run in model.runs] == ["embedding", "decoder", "head"] == [run.layer.kind for run in alone.runs]
    assert model.runs[0].layer.parameters == alone.runs[0].layer.parameters + tower == 151_936 * 4096 + tower
    assert model.runs[1:] == alone.runs[1:]
    assert model_flops_per_sample(model) == model_flops_per_sample(describe_for(whole.model, whole.training))
    costs, without = (Planner(settings_of(tmp_path, *pins, config=QWEN3_VL)).prices_of(plan).costs(plan) for plan in (whole, text))
    embedding, plain = (each.layer(whole.candidate, "embedding", "none") for each in (costs, without))
    shared = sum(prod(weight.local_shape(2)) for weight in model.runs[0].layer.weights) - 151_936 * 4096 / 2
    assert tower / 2 < shared < 0.52 * tower, "all but patches, their positions, norms and some biases"
    assert embedding.forward_s > plain.forward_s + 27 * 0.00005
    ahead, before = (sum(span.count for span in plan.stages[0].layers if span.kind == "decoder") for plan in (whole, text))
    assert ahead < before
    check_plan(from_json(to_json(whole)), ENGINES["megatron"].capabilities(whole.cluster.software))
    job = ENGINES["megatron"].translate(whole)
    assert "our worker builds no tower" in job.without_worker


def test_the_text_model_alone_is_planned_where_that_is_said(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, "engine=megatron", "model.vision=null")
    assert settings.unseen
    plan = Planner(settings).fastest().plan
    assert (plan.engine, plan.model.vision, plan.training.images) == ("megatron", None, None)
    assert not settings_of(tmp_path).unseen


def test_a_tower_that_no_reader_has_is_said_to_be_left_out(tmp_path: Path) -> None:
    text = {"model_type": "llama4_text", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 8, "vocab_size": 256,
            "num_local_experts": 2, "intermediate_size": 64, "intermediate_size_mlp": 64, "max_position_embeddings": 8192}  # fmt: skip
    whole = {"model_type": "llama4", "text_config": text, "vision_config": {"hidden_size": 64}}
    assert settings_of(tmp_path, config=whole).unseen
    assert not settings_of(tmp_path, config=text).unseen


def test_a_plan_that_recomputes_passes_its_own_check(tmp_path: Path) -> None:
    """Patches and projector stand between what is recomputed, and never are."""
    plan = Planner(settings_of(tmp_path, "pin.recompute=full", "pin.zero_stage=3", "pin.micro_batch_size=2")).fastest().plan
    modes = {span.kind: span.recompute for _, span in plan.spans()}
    assert modes == {"embedding": "none", "patches": "none", "vision": "full", "projector": "none", "decoder": "full", "head": "none"}
    check_plan(from_json(to_json(plan)), ENGINES["deepspeed"].capabilities(plan.cluster.software))


def test_a_run_does_not_go_on_with_another_part_frozen(tmp_path: Path) -> None:
    """The checkpoint has no states of the optimizer for what was frozen."""
    plan = plan_of(tmp_path, "train.freeze=vision")
    saved = resuming.Checkpoint(folder=tmp_path, run=tmp_path, step=1, engine="deepspeed", plan=plan)
    resuming.check_changes(saved, plan.model, plan.training, plan.run)
    with pytest.raises(InputError) as raised:
        resuming.check_changes(saved, plan.model, replace(plan.training, freeze=("projector",)), plan.run)
    assert "train.freeze=projector (was vision): the optimizer's states in the checkpoint are of the other" in str(raised.value)


def test_a_plan_with_images_is_read_back(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "train.images=2", "train.freeze=vision")
    assert from_json(to_json(plan)) == plan
    assert (plan.training.images, plan.training.image_tokens) == (2, 576)
    assert replace(plan.training, images=None, image_tokens=None, freeze=()) == replace(
        plan_of(tmp_path).training, images=None, image_tokens=None
    )


@pytest.mark.parametrize(("name", "write"), [("llama_factory", around), ("ms_swift", around), ("verl", written)])
def test_no_file_is_written_for_a_program_that_would_train_on_text(name: str, write: Callable[[Plan, str], Any], tmp_path: Path) -> None:
    with pytest.raises(InputError) as raised:
        write(plan_of(tmp_path), name)
    assert str(raised.value).startswith(f"write={name}: gets text here, and llava looks at images")


def test_the_files_say_what_is_frozen_and_what_a_script_has_to_freeze(tmp_path: Path) -> None:
    job = ENGINES["deepspeed"].translate(plan_of(tmp_path, "train.freeze=vision,language"))
    engine = json.loads(next(file.content for file in job.files if file.path == "engine.json"))
    assert engine["model"]["freeze"] == ["vision", "language"]
    assert engine["model"]["model_class"] == "LlavaForConditionalGeneration"
    said = [note for note in job.notes if "train.freeze" in note]
    assert said == ["trainer.yaml: vision, language (train.freeze) is the script's to freeze, by requires_grad_(False)."]


def test_a_kind_for_which_no_images_are_drawn_is_planned_and_says_so(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, config=LLAVA | {"model_type": "llava_next"})
    assert ENGINES["deepspeed"].translate(plan).without_worker.startswith("our program draws no images for llava_next, only for llava, ")


def test_a_start_on_gpus_asks_for_a_program_where_no_data_is_read(tmp_path: Path) -> None:
    assert data_text(settings_of(tmp_path)).endswith("a start on GPUs asks for entry=PROGRAM or data.made_up=true")
