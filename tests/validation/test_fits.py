"""What the engines of published runs keep in memory, by their own code, where prices once said that runs which ran do not fit."""

from __future__ import annotations

import pytest

from orchestrator.units import GIB
from tests.validation.metrics import Priced, measured_beside
from tests.validation.pricing import named, price_runs
from tests.validation.runs import Run
from tests.validation.tables import NOT_PRINTED
from tests.validation.test_validate import only


def priced(run: Run) -> tuple[Priced, dict[str, float]]:
    """The run beside its prediction, and the bytes of its fullest stage by cause."""
    ((_, prediction, why),) = price_runs([run], named("shipped"))
    assert prediction is not None, why
    fullest = max(prediction.by_stage, key=lambda stage: stage.peak_memory_bytes)
    assert sum(fullest.memory_by_cause.values()) == pytest.approx(fullest.peak_memory_bytes)
    return measured_beside(run, prediction), fullest.memory_by_cause


MPT = {
    "model_name": "MPT-760m",
    "engine": "fsdp(composer)", "num_layers": "24", "hidden_size": "1536", "num_attention_heads": "12", "ffn_hidden_size": "6144",
    "vocab_size": "50368", "gpu": "A100-SXM-40GB", "precision": "bf16", "tp": "1", "pp": "1", "dp": "8", "zero_stage": "3",
    "recompute": "none", "micro_batch_size": "12", "global_batch_size": "384",
}  # fmt: skip


def test_mpts_fused_loss_keeps_four_bytes_a_logit() -> None:
    wide, narrow = only(MPT, {**MPT, "vocab_size": "25216"})
    (_, more), (_, less) = priced(wide), priced(narrow)
    logits = 12 * 2048 * (50368 - 25216)
    assert more["transient"] - less["transient"] == pytest.approx(4 * logits, rel=0.01)


HUGGING = {
    "model_name": "GPT-52B",
    "engine": "HF Trainer + DeepSpeed ZeRO-3", "num_layers": "64", "hidden_size": "8192", "num_attention_heads": "64",
    "ffn_hidden_size": "32768", "vocab_size": "50257", "seq_length": "1024", "gpu": "V100-SXM2-32GB", "gpus_per_node": "4",
    "num_gpus": "64", "interconnect": "Omni-Path", "precision": "fp16", "tp": "1", "pp": "1", "dp": "64", "zero_stage": "3",
    "recompute": "full", "flash_attention": "no", "micro_batch_size": "8", "global_batch_size": "512",
}  # fmt: skip


def test_auto_buckets_are_as_long_as_the_square_of_the_hidden_size() -> None:
    (run,) = only(HUGGING)
    found, causes = priced(run)
    layer = 12 * 8192**2 + 13 * 8192  # GPT-2's weights and biases
    square = 8192**2
    assert causes["buffers"] == pytest.approx(2 * 2 * square + 2 * (10**9 - layer) + run_workspace(run), rel=0.01)
    assert found.predicted_to_fit


def run_workspace(run: Run) -> float:
    return named("shipped")(run).workspace_bytes


BLOOM = {
    "model_name": "GPT-194B-bloom-candidate",
    "engine": "Megatron-DeepSpeed 3D (1F1B)", "num_layers": "78", "hidden_size": "14336", "num_attention_heads": "112",
    "ffn_hidden_size": "57344", "vocab_size": "250880", "gpu": "A100-SXM-80GB", "num_gpus": "384", "precision": "fp16", "tp": "8",
    "pp": "6", "dp": "8", "zero_stage": "1", "recompute": "full", "flash_attention": "no", "global_batch_size": "2048",
}  # fmt: skip


def test_unused_blocks_are_freed_where_a_gpu_is_full_and_nowhere_else() -> None:
    few, many, too_many = (priced(run) for run in only(*({**BLOOM, "micro_batch_size": size} for size in ("4", "8", "16"))))
    full = many[0].limit_bytes
    per_sequence = (few[1]["activations"] + few[1]["transient"]) / 4
    slack = few[1]["fragmentation"] / (few[1]["activations"] + few[1]["transient"])
    assert 0.1 < slack < 0.15
    assert many[0].needed_bytes == full
    assert 0 < many[1]["fragmentation"] < 8 * per_sequence * slack
    assert many[0].predicted_to_fit
    assert too_many[1]["fragmentation"] == 0
    assert not too_many[0].predicted_to_fit
    assert too_many[0].needed_bytes > full + GIB


def test_nothing_is_judged_of_memory_where_a_page_prints_no_recompute() -> None:
    nemo = {"engine": "megatron-core (Megatron-Bridge)", "gpu": "GB300", "recompute": "", "zero_stage": "1", "precision": "MXFP8"}
    silent, other = only({**nemo, "notes": f"release=26.02; {NOT_PRINTED}"}, {**nemo, "recompute": "none", "notes": NOT_PRINTED})
    assert silent.fits is None
    assert other.fits is True
