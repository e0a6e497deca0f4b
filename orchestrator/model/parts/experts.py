"""Experts (Switch Transformers, arXiv 2101.03961; DeepSeekMoE, arXiv 2401.06066): a router, MLPs of which each token visits a few, and one
that all tokens visit."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import ceil
from typing import Final, Literal

from orchestrator.model.ops import Dispatch, Enter, Exit, Gemm, Op, Pointwise, Saved, Weight
from orchestrator.model.parts.mlp import activation_moved
from orchestrator.model.parts.part import READ, WRITE, Part
from orchestrator.model.routing import Routing, buffered
from orchestrator.model.shared import Shared
from orchestrator.values import Value

PERMUTED_MOVED: Final = 2 * (READ + WRITE)
"""Bytes per element that go to their experts' order and back (mcore transformer/moe/token_dispatcher.py: permute, unpermute)."""


BalancedOver = Literal["micro_batch", "sequence", "global_batch"]
USUALLY_OVER: Final[dict[str, BalancedOver]] = {"softmax": "micro_batch", "sigmoid": "sequence"}
"""Tokens among which experts are balanced where nobody says it, by the router's score (DeepSeek-V3, section 2.1.2)."""


class Experts(Value, frozen=True, kw_only=True, tag="experts", tag_field="kind", omit_defaults=True):
    """Activation and biases are the architecture's. Experts are divided by ep, and each of them by etp."""

    num_experts: int
    topk: int
    """Experts that a token goes to."""
    ffn_hidden_size: int
    """Width of one expert's MLP."""
    shared_ffn_hidden_size: int = 0
    """Width of all shared experts together; 0: there are none."""
    shared_gate: bool = False
    """The shared experts' output is multiplied by a gate of its own (Qwen1.5-MoE, Qwen2-MoE)."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    """Function that makes the router's scores of its logits."""
    normalized: bool = True
    """The chosen experts' scores are made to sum to one."""
    scaling: float = 1.0
    """Factor of the chosen experts' scores."""
    groups: int | None = None
    """Experts stand in groups of which a token chooses `group_topk` first (DeepSeek-V2 and V3); None: all in one."""
    group_topk: int | None = None
    expert_bias: bool = False
    """Scores are corrected by a bias for each expert that balances their load; it is chosen with, not trained (DeepSeek-V3), and no
    parameter here: checkpoints store it beside."""
    bias_update_rate: float = 1e-3
    """Change of `expert_bias` in a step (DeepSeek-V3, section 4.2)."""
    aux_loss_coeff: float = 0.0
    """Coefficient of the loss that balances the experts' load (Switch Transformers, section 2.2)."""
    aux_loss_over: BalancedOver | None = None
    """Tokens among which that loss balances it; None: as `USUALLY_OVER` says."""
    capacity_factor: float | None = None
    """The most tokens that an expert takes of a rank's micro-batch, as a multiple of its even share; the others pass it by (GShard,
    arXiv 2006.16668, section 2.2). None: all that are sent to it, which is called dropless."""
    pad_to_capacity: bool = False
    """Whether every expert computes as many tokens as it could take, zeros where fewer come: shapes that don't depend on the routing."""
    rank_capacity_factor: float | None = None
    """Rows of the buffer that a rank's experts compute, whatever comes, as a multiple of its even share; tokens beyond pass them by
    (Megatron-core 0.19's moe_expert_rank_capacity_factor, of HybridEP). None: as many as come."""
    router_bias: bool = False
    """The router's linear has a bias that is trained (GPT-OSS)."""
    scores_on_input: bool = False
    """Scores multiply what an expert is given, not what it makes of it (Llama 4)."""
    routing: Routing | None = None
    """How unevenly tokens are sent to them, where that is known; prices take it, the training doesn't."""

    @property
    def label(self) -> str:
        return "experts"

    def features(self, a: Shared) -> Iterator[str]:
        """The features that an engine's capabilities must name to train these experts."""
        yield "experts"
        words = (
            ("shared_experts", bool(self.shared_ffn_hidden_size)),
            ("shared_expert_gate", self.shared_gate),
            ("sigmoid_router", self.score == "sigmoid"),
            ("grouped_router", self.groups is not None),
            ("expert_bias", self.expert_bias),
            ("rank_capacity", self.rank_capacity_factor is not None),
            ("router_bias", self.router_bias),
            ("scores_on_input", self.scores_on_input),
            ("expert_mlp_bias", a.add_bias_linear),
        )
        yield from (word for word, used in words if used)

    @property
    def balanced(self) -> bool:
        """Whether a loss or a bias balances the experts' load."""
        return bool(self.aux_loss_coeff) or self.expert_bias

    @property
    def balanced_over(self) -> BalancedOver:
        """Tokens among which `aux_loss_coeff` balances the load."""
        return self.aux_loss_over or USUALLY_OVER[self.score]

    @property
    def computed_share(self) -> float:
        """Tokens that experts compute, of those that are sent to them where routing is even.

        >>> Experts(num_experts=8, topk=2, ffn_hidden_size=4, capacity_factor=1.25, pad_to_capacity=True).computed_share
        1.25
        """
        if self.capacity_factor is None:
            return 1.0
        return self.capacity_factor if self.pad_to_capacity else min(1.0, self.capacity_factor)

    def part(self, a: Shared, tokens: int) -> Part:
        """Router, all-to-all, the experts' MLPs as grouped products, and the shared expert beside them."""
        h, f, experts = a.hidden_size, self.ffn_hidden_size, self.num_experts
        n = 2 * f if a.gated else f
        share, uneven = self.computed_share, None if self.pad_to_capacity else self.routing
        routed = ceil(tokens * self.topk * share)
        rows = uneven if self.rank_capacity_factor is None else buffered(self.rank_capacity_factor, experts)
        grouped = partial(Gemm, tokens=routed, experts=experts, routing=rows)
        activation = partial(Pointwise, moved=activation_moved(a), shard="tp")
        # The norm's output, which the router's product needs in backward (mcore transformer/moe/moe_utils.py, RouterGatingLinearFunction);
        # a checkpoint of the experts keeps it too, as its input.
        scored = Saved(name="mlp.router.input", elements=tokens * h, group="norm")
        kept = Saved(name="moe.permuted", elements=routed * h, shard="tp", group="mlp")
        act_input = Saved(name="moe.gate_up", elements=routed * n, shard="tp", group="mlp")
        product = Saved(name="moe.product", elements=routed * f, shard="tp", group="expert_activation")
        weights = [
            Weight(name="mlp.router.weight", shape=(experts, h)),
            Weight(name="mlp.experts.linear_fc1.weight", shape=(experts, n, h), kind="expert"),
            Weight(name="mlp.experts.linear_fc2.weight", shape=(experts, h, f), kind="expert"),
        ]
        if self.router_bias:
            weights.append(Weight(name="mlp.router.bias", shape=(experts,)))
        if a.add_bias_linear:
            weights += [
                Weight(name="mlp.experts.linear_fc1.bias", shape=(experts, n), kind="expert"),
                Weight(name="mlp.experts.linear_fc2.bias", shape=(experts, h), kind="expert"),
            ]
        ops: list[Op] = [
            Gemm(name="mlp.router", role="router", tokens=tokens, k=h, n=experts, saves=(scored,)),
            Pointwise(name="mlp.permute", role="permute", elements=routed * h, moved=PERMUTED_MOVED, shard="tp", routing=rows),
            Dispatch(elements=ceil(tokens * h * share), topk=self.topk, routing=uneven, limit=(self.groups or 1, self.group_topk or 1)),
            grouped(name="mlp.experts.linear_fc1", role="routed_fc1", k=h, n=n, split="column", saves=(kept,)),
            activation(name="mlp.experts.activation", role="routed_activation", elements=routed * f, saves=(act_input,), routing=rows),
            grouped(name="mlp.experts.linear_fc2", role="routed_fc2", k=f, n=h, split="row", saves=(product,)),
        ]
        if self.shared_ffn_hidden_size:
            s = self.shared_ffn_hidden_size
            width = 2 * s if a.gated else s
            weights += [
                Weight(name="mlp.shared_experts.linear_fc1.weight", shape=(width, h), split=0),
                Weight(name="mlp.shared_experts.linear_fc2.weight", shape=(h, s), split=1),
            ]
            if self.shared_gate:
                weights.append(Weight(name="mlp.shared_experts.gate_weight", shape=(1, h)))
            # As an MLP of their own, with its tensor-parallel region (mcore transformer/moe/shared_experts.py: SharedExpertMLP is an MLP).
            gate_up = Saved(name="mlp.shared_experts.gate_up", elements=tokens * width, shard="tp", group="mlp")
            product = Saved(name="mlp.shared_experts.product", elements=tokens * s, shard="tp", group="mlp")
            ops += [
                Enter(elements=tokens * h),
                Gemm(name="mlp.shared_experts.linear_fc1", role="shared_fc1", tokens=tokens, k=h, n=width, split="column"),
                activation(name="mlp.shared_experts.activation", role="shared_activation", elements=tokens * s, saves=(gate_up,)),
                Gemm(name="mlp.shared_experts.linear_fc2", role="shared_fc2", tokens=tokens, k=s, n=h, split="row", saves=(product,)),
                Exit(elements=tokens * h),
            ]
        return Part(tuple(weights), tuple(ops))
