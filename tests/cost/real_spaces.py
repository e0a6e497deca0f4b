"""Candidates of the engines' own spaces for published models, a few of each, with options that are pinned."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from orchestrator import detect, planning, recipe
from orchestrator.engines import ENGINES
from orchestrator.planning import Planner
from orchestrator.search.question import PlannedEngine
from orchestrator.strategy.spec import Candidate
from orchestrator.strategy.tree import Tree

OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"overlap_moe_expert_parallel_comm": True, "delay_wgrad_compute": True, "overlap_grad_reduce": False},
    {"moe_token_dispatcher_type": "flex", "moe_shared_expert_overlap": True, "tp_comm_overlap": True},
    {"cuda_graph_impl": "local", "moe_token_dispatcher_type": "allgather"},
    {"tiled_mlp": 4, "tiled_logits": 4, "offload_activations": True},
)
"""Of prices, whatever the engine."""
WORDS: tuple[tuple[str, ...], ...] = (
    ("recipe=deepseek_v3", "gpus=512"),
    ("recipe=mixtral_8x7b", "gpus=64"),
    ("recipe=qwen3_next_80b_a3b", "gpus=64", "train.precision=fp8"),
    ("recipe=llama3_70b", "gpus=64"),
    ("recipe=llama3_70b_lora", "gpus=32"),
    ("recipe=t5_11b", "gpus=32"),
)


def name_of(words: tuple[str, ...]) -> str:
    return words[0].partition("=")[2]


def asked(*words: str) -> planning.Space:
    return Planner(recipe.load(list(words), detect.machine(), list(ENGINES))).space(top_k=2)


def candidates(space: planning.Space, engine: PlannedEngine, seed: object, meshes: int = 4, each: int = 2) -> Iterator[Candidate]:
    """A few legal ones, drawn; none where the engine has no such precision."""
    rng = random.Random(str(seed))
    tree = Tree(engine.capabilities, space.workload, space.settings.pins)
    shapes = list(tree.shapes(lambda _: None))
    for shape in rng.sample(shapes, min(meshes, len(shapes))):
        leaves = [leaf.candidate for leaf in tree.below(shape, lambda _: None)]
        for leaf in rng.sample(leaves, min(each, len(leaves))):
            yield replace(leaf, strategy=replace(leaf.strategy, **rng.choice(OPTIONS)))
