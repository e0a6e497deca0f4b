"""megatron-core's groups and generators, for the engines on its layers."""

from __future__ import annotations

import torch
from megatron.core import parallel_state, tensor_parallel

from orchestrator.plan import Plan
from orchestrator.workers.groups import MODEL, REPLICAS, Groups


def prepare(plan: Plan) -> None:
    """What megatron-core needs on a machine without a GPU (cpu/shims.py)."""
    if plan.cluster.is_cpu:
        from orchestrator.cpu import shims

        shims.apply()


def initialise(plan: Plan, hierarchical_sizes: list[int] | None = None) -> Groups:
    """megatron-core's groups in the plan's rank order, and the generator states that tensor-parallel ranks share and don't share.
    `hierarchical_sizes`: of the context-parallel groups within groups (engines/transformer_config.py)."""
    prepare(plan)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=plan.tp,
        pipeline_model_parallel_size=plan.pp,
        virtual_pipeline_model_parallel_size=plan.vpp if plan.vpp > 1 else None,
        context_parallel_size=plan.cp,
        hierarchical_context_parallel_sizes=hierarchical_sizes,
        expert_model_parallel_size=plan.ep,
        expert_tensor_parallel_size=plan.etp if plan.model.experts else None,
        num_distributed_optimizer_instances=plan.optimizer_instances,
        order="-".join(plan.rank_order),
        create_gloo_process_groups=False,
    )
    # Dropout differs between pipeline stages, as in Megatron's own training loop.
    seed = plan.training.seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    torch.manual_seed(seed)
    graphs = {"use_cudagraphable_rng": True} if plan.cuda_graph_impl != "none" else {}
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True, **graphs)
    return current()


def current() -> Groups:
    """The groups that megatron-core has now."""
    return Groups(
        {
            "tp": parallel_state.get_tensor_model_parallel_group(),
            "pp": parallel_state.get_pipeline_model_parallel_group(),
            "cp": parallel_state.get_context_parallel_group(),
            "dp": parallel_state.get_data_parallel_group(),
            REPLICAS: parallel_state.get_data_parallel_group(with_context_parallel=True),
            MODEL: parallel_state.get_model_parallel_group(),
        }
    )
