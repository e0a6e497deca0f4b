"""Imported once, in the fork server of own_ranks.py: all that a rank of Megatron's own program, or of our worker, imports."""

from orchestrator.cpu import training

training.apply()

import megatron.training.training  # noqa: E402, F401
from megatron.training import argument_utils, arguments  # noqa: E402, F401

import orchestrator.programs.megatron_hooks  # noqa: E402
import orchestrator.workers.megatron  # noqa: E402, F401
