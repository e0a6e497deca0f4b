"""One file an engine: what it can run, how it behaves, and the translation of a plan into its job."""

from __future__ import annotations

from typing import Final

from orchestrator.engines import deepspeed, megatron, megatron_deepspeed
from orchestrator.engines.engine import Engine

__all__ = ["ENGINES", "Engine"]

ENGINES: Final[dict[str, Engine]] = {engine.name: engine for engine in (megatron.ENGINE, megatron_deepspeed.ENGINE, deepspeed.ENGINE)}
"""A new engine is a file with an `ENGINE` and its name in this line."""
