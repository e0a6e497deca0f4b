"""How unevenly published runs sent tokens to their experts, where nothing forced them to be even.

No source prints a trace. What is known are pairs of runs that differ in nothing else, and how much longer the real one took:

- Qwen3-30B-A3B from scratch on 16 H100, ep 16: 21% and 26% (Megatron-Bridge's cards of 2026-07-21 and 07-26, item pretrain beside
  pretrain_performance);
- Qwen3-235B-A22B on 256 H100, ep 8, 16,384 to 131,072 tokens: 24, 21, 15 and 9% (yanring/Megatron-MoE-ModelZoo at 020b813,
  best_practice/qwen3/readme.md, "forced balance" beside "dropless");
- Mixtral 8x22B from a checkpoint on 128 H100, ep 8: 4.5% (megatron_moe_modelzoo).

So a layer's experts get loads that are spread lognormally, and it lies at random which of them stand on one rank.
"""

from __future__ import annotations

import random
from functools import cache
from typing import Final

from msgspec.structs import replace

from orchestrator.model.architecture import Architecture
from orchestrator.model.parts.experts import Experts
from orchestrator.model.routing import Routing, measured
from tests.validation.mixtures import plain_name

FROM_SCRATCH: Final = 0.8
"""Standard deviation of the logarithm of an expert's load in a router's first hundreds of steps: least squares of the six pairs of Qwen3,
whose real steps are within 6% of their forced ones times the predicted loss. By the 30B's two alone it is .73, by the 235B's four above .9.
Qwen3 has an auxiliary loss of .001; GPT-OSS is trained without any (Megatron-Bridge, perf_recipes/gpt_oss/common.py), so that its routers
are no evener than that."""
TRAINED: Final = 0.05
"""Standard deviation of the logarithm of an expert's load in a router that comes from a checkpoint, by Mixtral's pair (--finetune --load in
its script's model_configs)."""
BY_BIAS: Final = ("deepseek_v3", "moonlight", "kimi_k2", "glm_4_5", "glm4_5")
"""Models whose routers a bias keeps even from the start (DeepSeek-V3, section 2.1.2): taken for as even as a trained one."""
FROM_CHECKPOINT: Final = ("mzoo-mixtral",)
"""Beginnings of the run_id of rows whose pretraining begins with a checkpoint."""
LAYERS: Final = 48
"""Layers whose loads are drawn."""


def spread_of(row: dict[str, str]) -> float:
    """Standard deviation of the logarithm of the loads of a row's experts; 0 where routing is even, or nothing is said of it.

    >>> spread_of({"model_name": "Qwen3-30B-A3B", "routing": "real router"})
    0.8
    >>> spread_of({"model_name": "Qwen3-30B-A3B", "routing": "real router", "task": "sft"})
    0.05
    >>> spread_of({"model_name": "Qwen3-30B-A3B", "routing": "forced balance"})
    0.0
    """
    if "real" not in row.get("routing", ""):
        return 0.0
    trained = row.get("task", "") not in ("", "pretrain") or row.get("run_id", "").startswith(FROM_CHECKPOINT)
    return TRAINED if trained or plain_name(row.get("model_name", "")).startswith(BY_BIAS) else FROM_SCRATCH


@cache
def drawn(spread: float, num_experts: int, topk: int) -> Routing:
    """Loads so spread, the same ones every time. An expert gets each token once at most.

    >>> drawn(0.8, 128, 8).busiest[0], [round(times, 2) for parts, times in drawn(0.8, 128, 8).busiest if parts in (8, 16)]
    ((1, 1.0), [1.35, 1.7])
    """
    source = random.Random(0)
    rows = []
    for _ in range(LAYERS):
        loads = [source.lognormvariate(0.0, spread) for _ in range(num_experts)]
        mean = sum(loads) / num_experts
        rows.append((0, [min(load / mean, num_experts / topk) for load in loads]))
    return measured(f"loads spread by {spread:g}", rows, None)


def routed(architecture: Architecture, row: dict[str, str]) -> Architecture:
    """The architecture with its experts' routing as uneven as the row's was, and with the buffer that its ranks compute (`rank_capacity`),
    where a whole iteration is one CUDA graph."""
    spread, rows = spread_of(row), float(row.get("rank_capacity") or 0) or None
    if not spread and rows is None:
        return architecture

    def uneven(part: Experts) -> Experts:
        routing = drawn(spread, part.num_experts, part.topk) if spread else None
        return replace(part, routing=routing, rank_capacity_factor=rows)

    return architecture.with_experts(uneven)
