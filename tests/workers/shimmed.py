"""Imported before DeepSpeed by the ranks' fork server: DeepSpeed keeps torch.tensor as it finds it, and puts that back after each ZeRO-3
model (partition_parameters.py:253, :676)."""

from orchestrator.workers import cpu_shims

cpu_shims.apply()
