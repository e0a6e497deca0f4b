"""Questions to the planner and their answers, as values: one plan, many plans side by side, the least GPUs, the most that fits.

`orchestrator.api` is the Python interface over it, `orchestrator.console` the commands. Nothing here prints.
"""
