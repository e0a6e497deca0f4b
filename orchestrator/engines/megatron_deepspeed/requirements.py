"""What ranks of DeepSpeed over megatron-core's layers need."""

from __future__ import annotations

from typing import Final

from orchestrator.engines.engine import Requirements
from orchestrator.engines.megatron_layers import layers_versions

NAME: Final = "megatron_deepspeed"
REQUIREMENTS: Final = Requirements(
    modules=("torch", "megatron.core", "deepspeed"),
    versions=lambda cluster: layers_versions(cluster) | {"deepspeed": cluster.software.deepspeed},
)
