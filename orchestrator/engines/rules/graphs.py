"""What Megatron's CUDA graphs take (`strategy.graphs`)."""

from __future__ import annotations

from typing import Final

from orchestrator.engines.rules.rule import first, refused, rule
from orchestrator.model.parts.mlp import Mlp
from orchestrator.strategy.graphs import by_layer, graphed_modules
from orchestrator.strategy.spec import RECOMPUTE_MODULES, Candidate
from orchestrator.strategy.workload import Workload

SOURCE: Final = "core/transformer/transformer_config.py:1716-1829"
GRAPHS: Final = "cuda_graph_impl cuda_graph_modules"


@rule("cuda_graph_modules", SOURCE, f"{GRAPHS} moe_token_dispatcher_type overlap_moe_expert_parallel_comm", "cuda_graph_impl")
def modules_fit(candidate: Candidate, workload: Workload) -> str | None:
    """Whether the model has what is to be a graph, and may have it as one."""
    strategy, a = candidate.strategy, workload.model.architecture
    modules = graphed_modules(strategy, a)
    experts = {"moe", "moe_router", "moe_preprocess"} & {*modules}
    dense = any(isinstance(layer.feed_forward, Mlp) for layer in a.kinds_of_layers())
    refused = (
        (experts and not a.experts, "a dense model has no experts"),
        ("mamba" in modules and "mamba2" not in a.features(), "this model has no state spaces"),
        ("mlp" in modules and a.experts and not dense, "all layers of this model have experts"),
        ("moe" in modules and not all(part.pad_to_capacity for part in a.experts), "moe needs experts that pad to a capacity"),
        (
            "moe_preprocess" in modules
            and strategy.moe_token_dispatcher_type == "alltoall"
            and any(part.capacity_factor is not None and not part.pad_to_capacity for part in a.experts),
            "moe_preprocess waits for the host where an all-to-all sends no more than a capacity",
        ),
    )
    return next((f"cuda_graph_modules={'+'.join(modules)}: {why}" for holds, why in refused if holds), None)


@rule("cuda_graph_recompute", SOURCE, f"{GRAPHS} overlap_moe_expert_parallel_comm moe_token_dispatcher_type recompute", "cuda_graph_impl")
def beside_recompute(candidate: Candidate, workload: Workload) -> str | None:
    """Whether the graphs can compute again what this mode drops."""
    strategy, a = candidate.strategy, workload.model.architecture
    said = f"cuda_graph_impl={strategy.cuda_graph_impl} with recompute={strategy.recompute}"
    if strategy.recompute == "full" and by_layer(strategy):
        return f"{said}: graphs of layers take recompute of modules only"
    again, held = RECOMPUTE_MODULES.get(strategy.recompute, ()), graphed_modules(strategy, a)
    experts_again = "mlp" in again and bool(a.experts) and not strategy.overlap_moe_expert_parallel_comm
    if strategy.cuda_graph_impl == "transformer_engine" and experts_again and "moe_router" in held:
        return f"{said}: computing experts again covers their router's graph"
    graphed = {"core_attn": "attn", "mlp": "mlp"}
    dropouts = (("core_attn", "attention", a.attention_dropout), ("mlp", "hidden", a.hidden_dropout))
    return first(
        f"{said} and {name}_dropout={dropout}: a graph can't draw again what it dropped"
        for module, name, dropout in dropouts
        if dropout and module in again and (not held or graphed[module] in held or (module == "mlp" and "moe" in held and experts_again))
    )


IMPL: Final = "cuda_graph_impl={strategy.cuda_graph_impl}"
GRAPH_RULES: Final = (
    refused("cuda_graphs", SOURCE, GRAPHS, "",
            ("cuda_graph_modules cuda_graph_impl=none|full_iteration",
             f"cuda_graph_modules={{strategy.cuda_graph_modules}} with {IMPL}: modules are for graphs of layers"),
            ("cuda_graph_impl !te", f"{IMPL} needs Transformer Engine's random numbers, on GPUs"),
            # ours: nothing asks for it, and the copy of the experts' counts to the host ends the capture (moe/token_dispatcher.py:672)
            ("cuda_graph_impl=full_iteration experts_vary", f"{IMPL} with experts: a graph has as many tokens in every step: it needs "
             "their rank_capacity_factor, or pad_to_capacity")),
    modules_fit,
    # Whether the graphs go with the exchange of tokens beside another micro-batch, and with weight gradients that it delays.
    refused("cuda_graph_overlap", "core/transformer/transformer_config.py:1898-1920; core/transformer/transformer_layer.py:1262 and "
            "training/arguments.py:1829 of 0.19", f"{GRAPHS} overlap_moe_expert_parallel_comm delay_wgrad_compute "
            "moe_shared_expert_overlap", "cuda_graph_impl overlap_moe_expert_parallel_comm",
            *((facts, f"{IMPL} with overlap_moe_expert_parallel_comm{why}") for facts, why in (
                ("!cuda_graph_impl=transformer_engine !release.overlaps_experts_in_any_graph",
                 ": Megatron-core {release.version} has it with transformer_engine"),
                *((f"cuda_graph_impl=transformer_engine {held}", ": feed-forwards can't be graphs, which run apart from their layer")
                  for held in ("!graphed", "graphed.moe", "graphed.mlp")),
                *((f"delay_wgrad_compute {held} !software.apex",
                   " and delay_wgrad_compute: needs Apex, whose kernel adds a graph's weight gradients up where they are")
                  for held in ("graphed.attn", "graphed.moe_router experts.shared_ffn_hidden_size !moe_shared_expert_overlap")),
                *((f"delay_wgrad_compute graphed.attn {biases}", " and delay_wgrad_compute: attention has biases")
                  for biases in ("add_bias_linear", "add_qkv_bias")),
            ))),
    beside_recompute,
)  # fmt: skip
"""Rules of CUDA graphs."""
