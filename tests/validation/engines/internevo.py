"""InternEvo, whose table of 2024 has ZeRO-1 over all of data parallelism or within a node."""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from orchestrator.strategy.capabilities import StateBytes, Traits
from tests.validation.engines.engine import EAGER, FP32_STATES, MeasuredEngine, all_stages

STATES: Final = StateBytes(weight=2, gradient=2, master=4, moments=8, step=4)
"""Bytes per parameter of HybridZeroOptimizer: 16-bit weights and gradients, fp32 master and Adam sharded over the zero1 group."""
INTERNEVO: Final = MeasuredEngine(
    traits=Traits(
        engine="internevo",
        constants=EAGER,  # dropout, norms of fp32 copies and residuals apart, the first two once more in backward (modeling_internlm.py)
        states=all_stages(STATES, FP32_STATES),
        gradient_bytes_on_wire="weight",
        reduce_scatter_from_stage=1,
        fp32_gradient_fusion=False,
    ),
    printed=("internevo",),
)
INTERNEVO_FSDP: Final = replace(INTERNEVO, traits=replace(INTERNEVO.traits, engine="internevo_fsdp"), printed=("internevo fsdp",))
