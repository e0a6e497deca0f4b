"""What layers are made of, one file a part: its own facts, its weights and operations, the words that say that an engine has it.

A mixer exchanges between tokens, a feed-forward works on each. A new one is a file here and its name in one of these lines; and, in each
engine that has it, one adapter (model/README.md).
"""

from __future__ import annotations

from orchestrator.model.parts.attention import GroupedQueryAttention
from orchestrator.model.parts.experts import Experts
from orchestrator.model.parts.gated_delta_net import GatedDeltaNet
from orchestrator.model.parts.latent_attention import LatentAttention
from orchestrator.model.parts.mamba2 import Mamba2
from orchestrator.model.parts.mlp import Mlp
from orchestrator.model.parts.part import Nothing

Mixer = GroupedQueryAttention | LatentAttention | Mamba2 | GatedDeltaNet | Nothing
FeedForward = Mlp | Experts | Nothing
