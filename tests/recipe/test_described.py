"""Recipes of models that are described by their own code plan without torch, and what is said beside a description is not ignored."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import msgspec
import pytest

from orchestrator import describe as model_recording
from orchestrator import recipe
from orchestrator.describe import SHIPPED, read_descriptions, recording_files
from orchestrator.detect import Machine
from orchestrator.engines import ENGINES
from orchestrator.errors import InputError
from orchestrator.model.families import describe
from orchestrator.model.traced import Feed
from orchestrator.planning import Planner
from orchestrator.recipe.resolved import resolved_yaml
from orchestrator.recipe.whole_data import trained_on
from orchestrator.units import GIB

NO_GPU = Machine(host_memory=64 * GIB)
NAMES = (*ENGINES, "layerwise")
PUBLISHED = {"vit_huge_32_analytic": 632, "vit_huge_48_analytic": 947, "swin_huge_32_analytic": 701, "swin_huge_48_analytic": 1016}
"""Millions of parameters: Galvatron (arXiv 2211.13878), table 1."""
LAYERS = {"vit_huge_32_analytic": 32, "vit_huge_48_analytic": 48, "swin_huge_32_analytic": 32, "swin_huge_48_analytic": 48}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_papers_vision_models_have_their_published_size(name: str) -> None:
    settings = recipe.load([f"recipe={name}"], NO_GPU, NAMES)
    model = describe(settings.architecture, settings.training.seq_length)
    assert model.parameters // 10**6 == PUBLISHED[name]
    assert sum(run.count for run in model.runs if run.layer.recomputable) == LAYERS[name]


@pytest.mark.parametrize("name", ["vit_huge_32_analytic", "swin_huge_32_analytic"])
def test_the_papers_vision_models_plan_for_deepspeed(name: str) -> None:
    plan = Planner(recipe.load([f"recipe={name}"], NO_GPU, NAMES)).fastest().plan
    assert plan.engine == "deepspeed"
    assert plan.predicted is not None


def test_tensor_parallelism_is_considered_for_what_is_shipped() -> None:
    """Each description says what can be divided and what not; ViT-Huge's plan with tp=2 is slower than the one that is chosen."""
    shipped = {path.stem: read_descriptions(path.stem).traced for path in SHIPPED.glob("*.json")}
    assert all(traced.divided or traced.no_autotp for found in shipped.values() for traced in found)
    words = ["recipe=vit_huge_32_analytic", "engine=deepspeed"]
    chosen, pinned = (Planner(recipe.load([*words, *more], NO_GPU, NAMES)).fastest().plan for more in ([], ["pin.tp=2"]))
    assert (chosen.tp, pinned.tp) == (1, 2)
    assert chosen.predicted is not None
    assert pinned.predicted is not None
    assert pinned.predicted.step_time_s > chosen.predicted.step_time_s


def test_stages_of_different_width_have_widths_of_their_own() -> None:
    settings = recipe.load(["recipe=swin_huge_32_analytic"], NO_GPU, NAMES)
    model = describe(settings.architecture, settings.training.seq_length)
    widths = [run.layer.output_elements for run in model.runs if run.layer.recomputable]
    assert sorted({*widths}, reverse=True) == [3136 * 320, 784 * 640, 196 * 1280, 49 * 2560]


def test_a_kept_description_is_made_anew_where_the_code_that_records_has_changed() -> None:
    package = SHIPPED.parents[1]
    assert {*recording_files()} >= {*(package / "tracing").glob("*.py"), package / "model" / "ops.py"}
    assert package / "tracing" / "recorder.py" in recording_files()


def test_a_recording_that_takes_long_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Mamba's layers without kernels go token by token: Jamba's took two minutes without a word."""
    source = {"config": json.dumps({"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 64})}
    quick = [sys.executable, "-S", "-c", "import sys; print('done', file=sys.stderr)"]
    assert model_recording._waited_for(quick, {**os.environ}) == (0, "done\n")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(model_recording, "TOLD_AFTER_S", 0.01)
    assert model_recording.describe(source, 16, 16, 2).model_class.startswith("GPT2")
    assert capsys.readouterr().err == f"{model_recording.TOLD}\n"


def test_a_resolved_recipe_gives_the_same_settings(tmp_path: Path) -> None:
    settings = recipe.load(["recipe=vit_tiny"], NO_GPU, NAMES)
    path = tmp_path / "config.yaml"
    path.write_text(resolved_yaml(settings))
    again = recipe.load([f"recipe={path}"], NO_GPU, NAMES)
    assert again.architecture == settings.architecture
    assert again.training == settings.training


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model.num_layers=7"], "model.num_layers=7: the layers of ViTForImageClassification are recorded, with 4"),
        (["train.precision=bf16", "cluster=dgx_h100"], "model.description=vit_tiny: is not of train.seq_length=None in 16 bits"),
        (["train.seq_length=9"], "train.seq_length=9: the input of ViTForImageClassification has one size"),
        (["model.code=nothing"], "model.code=nothing: is not package.module:factory"),
    ],
)
def test_what_contradicts_a_description_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(InputError) as caught:
        recipe.load(["recipe=vit_tiny", *words], NO_GPU, NAMES)
    assert message in str(caught.value)


TOKENS = Feed(name="input_ids", shape=(16,), dtype="int64", high=512)
DECODED = Feed(name="decoder_input_ids", shape=(16,), dtype="int64", high=512)
LABELS = Feed(name="labels", shape=(16,), dtype="int64", copies="input_ids")


def recorded(model_class: str, *feeds: Feed) -> str:
    """The layers of a model that is shipped, under another class with these arguments."""
    found = msgspec.structs.replace(read_descriptions("bert_tiny_classify").traced[0], model_class=model_class, feeds=feeds, config="{}")
    return f"model.traced={msgspec.json.encode(found).decode()}"


@pytest.mark.parametrize(
    ("model_class", "feeds", "stack"),
    [
        ("NewForCausalLM", (TOKENS, LABELS), "decoder"),
        ("NewForMaskedLM", (TOKENS, msgspec.structs.replace(LABELS, every=7)), "encoder"),
        ("NewForConditionalGeneration", (TOKENS, DECODED, msgspec.structs.replace(LABELS, copies=DECODED.name)), "encoder_decoder"),
        ("NewForPreTraining", (TOKENS, LABELS), None),
        ("NewForCausalLM", (TOKENS, Feed(name="labels", shape=(16,), dtype="int64", high=512)), None),
        ("NewForCausalLM", (TOKENS, Feed(name="pixel_values", shape=(3, 8, 8)), LABELS), None),
        ("NewModel", (TOKENS,), None),
    ],
)
def test_text_is_taken_by_what_the_forward_of_a_language_model_takes(model_class: str, feeds: tuple[Feed, ...], stack: str | None) -> None:
    words = [recorded(model_class, *feeds), "name=new", "cluster=cpu", "gpus=1", "train.precision=fp32", f"data={Path(__file__)}"]
    length = read_descriptions("bert_tiny_classify").traced[0].seq_length
    words += [f"train.seq_length={length}", "train.global_batch_size=8"]
    if stack is None:
        with pytest.raises(InputError, match=f"data=.*: {model_class} takes .* leave data out, and its batches are drawn"):
            recipe.load(words, NO_GPU, NAMES)
        return
    settings = recipe.load([*words, "data.split=9,1", "train.eval_every=1"], NO_GPU, NAMES)
    assert settings.architecture.traced is not None
    assert settings.architecture.traced.text_stack == stack
    with pytest.raises(InputError, match=r"train.eval_every=1: has nothing to evaluate on"):
        recipe.load([*words, "train.eval_every=1"], NO_GPU, NAMES)
    drawn = [word for word in words if not word.startswith("data=")]
    alone = recipe.load([*drawn, "train.eval_every=1"], NO_GPU, NAMES)
    assert alone.run.eval_every == 1, "batches that are drawn are held out by seed"
    assert trained_on(alone.run, alone.architecture) == "drawn batches, as data= is not given"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["recipe=vit_tiny", "data.split=9,1"],
            "data.split=9,1: is of text, and ViTForImageClassification is trained on none; without it train",
        ),
        (["recipe=vit_tiny", f"data.blend=1 {__file__}"], f"data.blend=.*{Path(__file__).name}.*: is of text, and ViTFor"),
        (["recipe=bert_tiny_classify", f"data.valid={__file__}"], "data.valid=.*: is of text, and BertFor"),
        (
            ["recipe=bert_tiny_classify", f"data={__file__}"],
            r"data=.*: BertFor.* a data set of your own is .* a program",
        ),
    ],
)
def test_text_beside_a_model_that_is_not_trained_on_it_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message.replace("(9.0, 1.0)", r"\(9.0, 1.0\)")):
        recipe.load(words, NO_GPU, NAMES)
