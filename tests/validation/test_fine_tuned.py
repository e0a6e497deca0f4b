"""Rows of LoRA: which are priced, as what, and what their engines have of their own."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from orchestrator.calibrate.pricing import Pricer, zero_shot
from orchestrator.model.hugging_face import hugging_face
from orchestrator.model.lora import trainable_parameters, with_lora
from orchestrator.units import GIB
from tests.validation.metrics import measured_beside, table_of
from tests.validation.runs import Run, Unusable
from tests.validation.tables import read_rows

ROW = {
    **{"run_id": "row", "status": "ok", "task": "lora", "model_name": "Llama-2-7B", "num_layers": "32", "hidden_size": "4096"},
    **{"num_attention_heads": "32", "ffn_hidden_size": "11008", "vocab_size": "32000", "seq_length": "1304", "gpu": "A100-SXM-40GB"},
    **{"num_gpus": "1", "tp": "1", "pp": "1", "micro_batch_size": "1", "global_batch_size": "128", "precision": "bf16-true"},
    **{"recompute": "none", "lora_dim": "8", "lora_targets": "query, value", "peak_memory_gib": "19.84", "engine": "litgpt"},
}
FSDP = {"engine": "litgpt, FSDP", "num_gpus": "2", "zero_stage": "3", "recompute": "full", "peak_memory_kind": "torch peak of a GPU"}


def read(change: Mapping[str, str]) -> Run | Unusable:
    return next(read_rows("finetune_memory", [{**ROW, **change}]))


def run_of(change: Mapping[str, str]) -> Run:
    run = read(change)
    assert isinstance(run, Run), run
    return run


def test_a_row_of_adapters_is_priced_with_these_adapters_and_shown_apart() -> None:
    """litgpt prints 4,194,304 trainable parameters: rank 8 on queries and values of 32 layers of width 4,096."""
    run = run_of({})
    lora = run.training.lora
    assert lora is not None
    assert lora.targets == ("q_proj", "v_proj")
    assert trainable_parameters(with_lora(hugging_face(run.model), lora)) == 4_194_304
    prediction = Pricer(zero_shot).price(run).prediction
    assert prediction is not None
    assert table_of(measured_beside(run, prediction)) == "finetune_memory:lora"


def test_fsdp_without_sync_keeps_whole_gradients_of_the_frozen_blocks_too() -> None:
    """2 bytes for each of the 6.48e9 parameters of 32 blocks, on each of 2 GPUs; with one micro-batch a step nothing is kept whole."""
    price = Pricer(zero_shot).price
    several, one = (price(run_of({**FSDP, "global_batch_size": batch})).prediction for batch in ("128", "2"))
    assert several is not None
    assert one is not None
    assert several.by_stage[0].memory_by_cause["gradients"] == pytest.approx(2 * 32 * 202.5e6, rel=0.001)
    assert one.by_stage[0].memory_by_cause["gradients"] < 0.01 * GIB


def test_sources_gigabytes_and_kinds_of_memory_are_told_apart() -> None:
    kind = "G as printed: 10^9 bytes or 1,000 MiB"
    run = run_of({"engine": "transformers + peft", "peak_memory_kind": kind, "lora_targets": "c_attn, c_proj, w1, w2"})
    assert run.memory_bytes == 19.84e9
    assert run.memory_kind == "process"
    prediction = Pricer(zero_shot).price(run).prediction
    assert prediction is not None
    assert run.peak_bytes(prediction) == prediction.peak_memory_bytes
    assert run_of({"peak_memory_kind": "torch peak of a GPU"}).memory_kind == "allocated"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"precision": "bf16, int4 base"}, "the frozen weights are quantised"),
        ({"lora_targets": "c_attn, embedding and output"}, "embedding and output are trained whole"),
        ({"lora_targets": ""}, "targets of LoRA are not stated"),
        ({"offload": "parameters to CPU"}, "offload of parameters to CPU"),
        ({"task": "full"}, "task full"),
        ({"engine": "nanotron", "zero_stage": "0"}, "LoRA under nanotron"),
        (
            {"engine": "ms-swift on transformers", "peak_memory_kind": "as swift prints it, of a run over mixed lengths"},
            "over samples of many lengths",
        ),
    ],
)
def test_a_row_that_is_none_of_our_plans_says_why(change: dict[str, str], why: str) -> None:
    found = read(change)
    assert isinstance(found, Unusable)
    assert why in found.why


def test_adapters_of_megatrons_linears_travel_in_one_message() -> None:
    """MLPerf's rank 16 on attention of Llama 2 70B: 44.6 million trained, little more than a bucket of 40 million, of 80 layers."""
    shape = {"num_layers": "80", "hidden_size": "8192", "num_attention_heads": "64", "num_query_groups": "8", "ffn_hidden_size": "28672"}
    more = {"engine": "NeMo (Megatron core)", "gpu": "GB200", "num_gpus": "512", "gpus_per_node": "4", "cp": "8", "lora_dim": "16"}
    run = run_of({**shape, **more, "lora_targets": "attention (qkv, proj)", "seq_length": "8192", "global_batch_size": "64"})
    assert trainable_parameters(run.model) == 80 * 16 * (8192 + 10240 + 8192 + 8192)
    model = Pricer(zero_shot).model(run)
    assert model.calibration.layers_per_message == pytest.approx(80 * 40e6 / 44_564_480)
