"""One folder an engine: what it can run, how it behaves, what it needs, and the translation of a plan into its job."""

from __future__ import annotations

from typing import Final

from orchestrator.engines.deepspeed import ENGINE as DEEPSPEED
from orchestrator.engines.engine import Engine, Requirements
from orchestrator.engines.megatron import ENGINE as MEGATRON
from orchestrator.engines.megatron_deepspeed import ENGINE as MEGATRON_DEEPSPEED
from orchestrator.extensions import Extensible

__all__ = ["ENGINES", "Engine", "Requirements"]

ENGINES: Final = Extensible("orchestrator.engines", Engine, {engine.name: engine for engine in (MEGATRON, MEGATRON_DEEPSPEED, DEEPSPEED)})
"""Engines by name. A new engine is a folder with an `ENGINE` and its name in this line, or another package's entry point."""
