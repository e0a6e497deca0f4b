"""megatron-core alone: tensor, pipeline, virtual pipeline, context and data parallelism, ZeRO-0 and the distributed optimizer (ZeRO-1)."""

from orchestrator.engines.megatron.capabilities import ENGINE

__all__ = ["ENGINE"]
