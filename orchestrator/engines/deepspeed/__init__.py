"""Hugging Face models under DeepSpeed alone: ZeRO 0 to 3, AutoTP, Ulysses, hpZ, optimizer offload."""

from orchestrator.engines.deepspeed.capabilities import ENGINE

__all__ = ["ENGINE"]
