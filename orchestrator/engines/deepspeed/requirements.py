"""What ranks of DeepSpeed over transformers' models need."""

from __future__ import annotations

from typing import Final

from orchestrator.engines.engine import Requirements

NAME: Final = "deepspeed"
REQUIREMENTS: Final = Requirements(
    modules=("torch", "deepspeed", "transformers"),
    versions=lambda cluster: {"deepspeed": cluster.software.deepspeed, "transformers": ""},
)
