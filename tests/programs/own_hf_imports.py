"""Imported once, in the fork server of own_ranks.py: all that a rank of transformers' Trainer imports."""

import torch

from orchestrator.workers.deepspeed_states import import_deepspeed

import_deepspeed(torch.device("cpu"))

import transformers.integrations.deepspeed  # noqa: E402, F401
from transformers import HfArgumentParser, Trainer, TrainingArguments  # noqa: E402, F401

import orchestrator.programs.hugging_face_hooks  # noqa: E402, F401
