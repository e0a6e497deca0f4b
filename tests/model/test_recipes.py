"""Every model recipe describes a model, and the totals are the published ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from orchestrator.model.families import describe
from orchestrator.model.spec import Architecture, ModelSpec
from orchestrator.model.training import Training

FOLDER = Path(__file__).parents[2] / "recipes" / "models"
RECORDED = sorted(path.stem for path in FOLDER.glob("*.yaml") if "  description: " in path.read_text())
"""Recipes of layers that were recorded from the model's own code."""
BUILT_ON_OTHERS = sorted(path.stem for path in FOLDER.glob("*.yaml") if "\nrecipe:" in path.read_text())
"""Another task on the model of another recipe."""
RECIPES = sorted({path.stem for path in FOLDER.glob("*.yaml")} - {*RECORDED, *BUILT_ON_OTHERS})
WANTED = {
    *("gpt_tiny", "t5_tiny", "bert_tiny", "llama_tiny", "gpt2_xl", "gpt3_175b", "gpt3_1t"),
    *("llama2_7b", "llama2_70b", "llama3_8b", "llama3_70b", "llama3_405b"),
    *("t5_large", "t5_11b", "bert_large", "bert_huge_32", "bert_huge_48"),
}
T5_OUTPUT_BIAS = 32128
"""mcore's tied T5 head has an output bias (t5_model.py:62), the published model has none."""


def load(name: str) -> tuple[Architecture, Training, dict[str, Any]]:
    raw = msgspec.yaml.decode((FOLDER / f"{name}.yaml").read_bytes())
    architecture = msgspec.convert(raw["model"] | {"name": name}, Architecture)
    return architecture, msgspec.convert(raw["train"], Training), raw


def spec_of(name: str) -> ModelSpec:
    architecture, training, _ = load(name)
    return describe(architecture, training.seq_length, training.decoder_seq_length)


def test_the_recipes_that_the_product_promises_exist() -> None:
    assert set(RECIPES) >= WANTED


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_describes_a_model_and_names_its_source(name: str) -> None:
    architecture, training, raw = load(name)
    assert set(raw) == {"cluster", "gpus", "model", "train"}
    assert "name" not in raw["model"]
    assert (FOLDER.parent / "clusters" / f"{raw['cluster']}.yaml").exists()
    text = (FOLDER / f"{name}.yaml").read_text()
    assert text.startswith("# ")
    assert name.endswith("_tiny") or "arXiv" in text
    spec = describe(architecture, training.seq_length, training.decoder_seq_length)
    assert spec.num_layers == architecture.num_layers + architecture.decoder_num_layers + 2
    assert json.loads(msgspec.json.encode(architecture))["name"] == name
    assert 0 <= training.min_lr < training.lr
    assert 0 <= training.warmup < training.steps


@pytest.mark.parametrize("name", BUILT_ON_OTHERS)
def test_a_task_on_another_recipe_names_its_source_and_its_engine(name: str) -> None:
    raw = msgspec.yaml.decode((FOLDER / f"{name}.yaml").read_bytes())
    assert raw["recipe"] in RECIPES
    assert raw["engine"] == "deepspeed"
    assert "task" in raw or "lora" in raw
    assert "_tiny" in name or "arXiv" in (FOLDER / f"{name}.yaml").read_text()


def test_the_promised_fine_tunings_exist() -> None:
    assert set(BUILT_ON_OTHERS) >= {"qwen3_8b_sft", "llama3_70b_lora", "llama_tiny_sft", "llama_tiny_lora"}


@pytest.mark.parametrize("name", [name for name in RECIPES if name.endswith("_tiny")])
def test_a_tiny_recipe_splits_over_four_ranks(name: str) -> None:
    architecture, training, raw = load(name)
    assert raw["cluster"] == "cpu"
    assert training.precision == "fp32"
    assert not architecture.num_layers % 4
    assert not training.global_batch_size % raw["gpus"]
    for layer in spec_of(name).layers():
        assert layer.local_parameters(4) < layer.local_parameters(2) < layer.local_parameters(1)


# Name, published count, tolerance, source. Exact counts are the sums over the published checkpoints.
PUBLISHED = [
    ("gpt2_xl", 1_557_611_200, 0, "huggingface.co/openai-community/gpt2-xl, checkpoint"),
    ("gpt3_175b", 174_600e6, 0.0005, "arXiv 2005.14165, table D.1: 174,600M"),
    ("gpt3_1t", 1008.0e9, 0.001, "arXiv 2104.04473, table 1: 1008.0B"),
    ("llama2_7b", 6_738_415_616, 0, "huggingface.co/meta-llama/Llama-2-7b-hf, checkpoint"),
    ("llama2_70b", 68_976_648_192, 0, "huggingface.co/meta-llama/Llama-2-70b-hf, checkpoint"),
    ("llama3_8b", 8_030_261_248, 0, "huggingface.co/meta-llama/Meta-Llama-3-8B, checkpoint"),
    ("llama3_70b", 70_553_706_496, 0, "huggingface.co/meta-llama/Meta-Llama-3-70B, checkpoint"),
    ("llama3_405b", 405_853_388_800, 0, "huggingface.co/meta-llama/Llama-3.1-405B, checkpoint"),
    ("gpt_oss_120b", 116_829_156_672, 0, "huggingface.co/openai/gpt-oss-120b, checkpoint"),
    ("qwen3_next_80b_a3b", 79_674_391_296, 0, "huggingface.co/Qwen/Qwen3-Next-80B-A3B-Instruct, checkpoint without its prediction layer"),
    ("t5_large", 737_668_096 + T5_OUTPUT_BIAS, 0, "huggingface.co/google-t5/t5-large, checkpoint"),
    ("t5_11b", 11_307_321_344 + T5_OUTPUT_BIAS, 0, "huggingface.co/google-t5/t5-11b, checkpoint"),
    ("bert_large", 340e6, 0.015, "arXiv 1810.04805, section 3: 340M, pooler and next-sentence head included"),
    ("bert_huge_32", 672e6, 0.01, "arXiv 2211.13878, table 1: 672M"),
    ("bert_huge_48", 987e6, 0.01, "arXiv 2211.13878, table 1: 987M"),
]


@pytest.mark.parametrize(("name", "published", "tolerance"), [row[:3] for row in PUBLISHED], ids=[row[0] for row in PUBLISHED])
def test_totals_are_the_published_ones(name: str, published: float, tolerance: float) -> None:
    assert spec_of(name).parameters == pytest.approx(published, rel=tolerance, abs=0)


@pytest.mark.parametrize(("name", "layer_mb"), [("bert_large", 48.05), ("bert_huge_32", 76.98)])
def test_a_bert_layer_has_the_bytes_that_galvatron_calibrated(name: str, layer_mb: float) -> None:
    """fp32 MiB per layer of the VLDB'23 artifact (tools/Galvatron/bert/search_layerwise_hp_8gpus.py): measured there, 2.6% above."""
    mib = spec_of(name).kind("encoder").parameters * 4 / 2**20
    assert mib == pytest.approx(layer_mb, rel=0.03)
