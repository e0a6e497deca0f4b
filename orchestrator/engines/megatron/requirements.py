"""What ranks of megatron-core need."""

from __future__ import annotations

from typing import Final

from orchestrator.engines.engine import Requirements
from orchestrator.engines.megatron_layers import layers_versions

NAME: Final = "megatron"
REQUIREMENTS: Final = Requirements(modules=("torch", "megatron.core"), versions=layers_versions)
