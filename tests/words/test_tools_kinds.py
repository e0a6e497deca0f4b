"""Every setting of the tools around has one kind, and nothing that costs time or memory is called harmless."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path

import pytest

from orchestrator.words import terms

LISTED: dict[str, dict[str, str]] = json.loads((Path(terms.__file__).parent / "names.json").read_text())
COSTLY = (
    "offload", "checkpointing", "fusion", "fused", "graph", "compile", "quant", "8bit", "4bit", "liger", "flash", "packing", "overlap",
    "bucket_", "fp8_param", "dynamo", "parallel_split", "layerwise", "optim", "tf32", "full_determinism",
)  # fmt: skip
"""What stands in the names of settings that cost."""
NAMED_SO = {
    "offload_params", "cpu_offload", "activation_checkpointing", "gradient_checkpointing", "offload_optimizer_device",  # which are read
    "eval_packing", "ckpt_parallel_save_optim", "ckpt_include_optimizer", "setup_optimizers", "no_load_optim", "no_save_optim",
    "use_distributed_optimizer", "trackio_bucket_id", "cpu_offloading_num_layers",  # which means nothing without cpu_offloading
}  # fmt: skip


@pytest.mark.parametrize("tool", LISTED)
def test_every_setting_has_one_kind(tool: str) -> None:
    assert LISTED[tool].keys() - {"time", "buffers"} == {"cost", "result", "harmless"}
    for one, other in combinations(LISTED[tool].values(), 2):
        assert {*one.split()}.isdisjoint(other.split())


@pytest.mark.parametrize("tool", [*LISTED][2:])
def test_nothing_that_costs_is_called_harmless(tool: str) -> None:
    free = {*LISTED[tool]["harmless"].split(), *LISTED[tool]["result"].split()} - NAMED_SO
    assert sorted(name for name in free if any(part in name for part in COSTLY)) == []
