"""Recipes of models that are described by their own code plan without torch, and what is said beside a description is not ignored."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator import planning, recipe
from orchestrator.detect import Machine
from orchestrator.engines import ENGINES
from orchestrator.errors import InputError
from orchestrator.model.families import describe
from orchestrator.recipe.resolved import resolved_yaml
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
    plan = planning.fastest(recipe.load([f"recipe={name}"], NO_GPU, NAMES)).plan
    assert plan.engine == "deepspeed"
    assert plan.predicted is not None


def test_stages_of_different_width_have_widths_of_their_own() -> None:
    settings = recipe.load(["recipe=swin_huge_32_analytic"], NO_GPU, NAMES)
    model = describe(settings.architecture, settings.training.seq_length)
    widths = [run.layer.output_elements for run in model.runs if run.layer.recomputable]
    assert sorted({*widths}, reverse=True) == [3136 * 320, 784 * 640, 196 * 1280, 49 * 2560]


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
