"""Imported once, in the fork server of own_ranks.py: all that a rank of transformers' Trainer imports."""

import torch

from orchestrator.workers.deepspeed_states import import_deepspeed

import_deepspeed(torch.device("cpu"))

import deepspeed.module_inject.auto_ep_layer  # noqa: E402  (these, and TensorBoard, at a first use, each rank anew)
import deepspeed.runtime.superoffload.superoffload_stage3  # noqa: E402, F401
import torch.utils.tensorboard  # noqa: E402
import transformers.integrations.deepspeed  # noqa: E402
import transformers.models.llama.modeling_llama  # noqa: E402, F401
from transformers import HfArgumentParser, Trainer, TrainingArguments  # noqa: E402, F401

import orchestrator.programs.hugging_face_chats  # noqa: E402
import orchestrator.programs.hugging_face_hooks  # noqa: E402
import orchestrator.workers.hf_model  # noqa: E402, F401
