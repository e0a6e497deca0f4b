"""What Megatron's CUDA graphs take (`strategy.graphs`)."""

from __future__ import annotations

from typing import Final

from orchestrator.engines.megatron_versions import release_of
from orchestrator.engines.rules.rule import first, rule
from orchestrator.model.parts.mlp import Mlp
from orchestrator.strategy.graphs import by_layer, graphed_modules
from orchestrator.strategy.spec import RECOMPUTE_MODULES, Candidate
from orchestrator.strategy.workload import Workload

SOURCE: Final = "core/transformer/transformer_config.py:1716-1829"
GRAPHS: Final = "cuda_graph_impl cuda_graph_modules"


@rule("cuda_graphs", SOURCE, GRAPHS)
def cuda_graphs(candidate: Candidate, workload: Workload) -> str | None:
    """Whether graphs are for this machine, release and model."""
    strategy, cluster, a = candidate.strategy, workload.cluster, workload.model.architecture
    impl, said = strategy.cuda_graph_impl, f"cuda_graph_impl={strategy.cuda_graph_impl}"
    if strategy.cuda_graph_modules is not None and not by_layer(strategy):
        return f"cuda_graph_modules={strategy.cuda_graph_modules} with {said}: modules are for graphs of layers"
    if impl == "none":
        return None
    if not cluster.software.transformer_engine or cluster.is_cpu:
        return f"{said} needs Transformer Engine's random numbers, on GPUs"
    if not a.experts:
        return None
    fixed = (part.pad_to_capacity or part.rank_capacity_factor is not None for part in a.experts)
    if impl == "full_iteration" and not all(fixed):
        # ours: nothing asks for it, and the copy of the experts' counts to the host ends the capture (moe/token_dispatcher.py:672)
        return f"{said} with experts: a graph has as many tokens in every step: it needs their rank_capacity_factor, or pad_to_capacity"
    return None


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


@rule(
    "cuda_graph_overlap",
    "core/transformer/transformer_config.py:1898-1920; core/transformer/transformer_layer.py:1262 and training/arguments.py:1829 of 0.19",
    f"{GRAPHS} overlap_moe_expert_parallel_comm delay_wgrad_compute moe_shared_expert_overlap",
    where="cuda_graph_impl overlap_moe_expert_parallel_comm",
)
def beside_overlap(candidate: Candidate, workload: Workload) -> str | None:
    """Whether the graphs go with the exchange of tokens beside another micro-batch, and with weight gradients that it delays."""
    strategy, a, software = candidate.strategy, workload.model.architecture, workload.cluster.software
    said, modules = f"cuda_graph_impl={strategy.cuda_graph_impl} with overlap_moe_expert_parallel_comm", graphed_modules(strategy, a)
    release = release_of(software.megatron_core)
    if strategy.cuda_graph_impl != "transformer_engine" and not release.overlaps_experts_in_any_graph:
        return f"{said}: Megatron-core {release.version} has it with transformer_engine"
    if strategy.cuda_graph_impl == "transformer_engine" and (not modules or {"moe", "mlp"} & {*modules}):
        return f"{said}: feed-forwards can't be graphs, which run apart from their layer"
    inside = "attn" in modules or (
        "moe_router" in modules and any(part.shared_ffn_hidden_size for part in a.experts) and not strategy.moe_shared_expert_overlap
    )
    if not strategy.delay_wgrad_compute or not inside:
        return None
    if not software.apex:
        return f"{said} and delay_wgrad_compute: needs Apex, whose kernel adds a graph's weight gradients up where they are"
    if "attn" in modules and (a.add_bias_linear or a.add_qkv_bias):
        return f"{said} and delay_wgrad_compute: attention has biases"
    return None


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


GRAPH_RULES: Final = (cuda_graphs, modules_fit, beside_overlap, beside_recompute)
"""Rules of CUDA graphs."""
