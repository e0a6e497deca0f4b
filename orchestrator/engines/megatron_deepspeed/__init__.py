"""megatron-core's groups, layers and 1F1B under DeepSpeed's ZeRO: stages 0 to 3 without a pipeline, stage 1 with one."""

from orchestrator.engines.megatron_deepspeed.capabilities import ENGINE

__all__ = ["ENGINE"]
