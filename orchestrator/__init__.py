"""A strategy orchestrator for DeepSpeed and Megatron: search, translate, start."""

__version__ = "0.1.0"
