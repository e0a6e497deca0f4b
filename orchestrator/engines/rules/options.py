"""What the user chooses of Megatron's own ways (`strategy.spec.PINNED_ONLY`)."""

from __future__ import annotations

from itertools import pairwise
from typing import Final

from orchestrator.engines.megatron_versions import flex_backend
from orchestrator.engines.rules.rule import refused, rule
from orchestrator.engines.rules.zero import host_states, lacks_host
from orchestrator.strategy.axes.cp import inner_size
from orchestrator.strategy.offloading import MODULES, OF_EXPERTS, offloaded, without_use
from orchestrator.strategy.spec import Candidate
from orchestrator.strategy.workload import Workload
from orchestrator.units import ITEMSIZE


@rule("user_buffers_mxfp8", "Transformer Engine, pytorch/module/base.py: fill_userbuffers_buffer_for_all_gather",
      "model tp cp tp_comm_overlap micro_batch_size", "tp_comm_overlap precision=fp8 fp8_recipe=mxfp8")  # fmt: skip
def whole_blocks(candidate: Candidate, workload: Workload) -> str | None:
    """Whether a rank's part of the tokens is whole blocks of scales."""
    tokens = workload.model.seq_length * candidate.micro_batch_size // (candidate.mesh.cp * candidate.mesh.tp)
    return f"tp_comm_overlap with fp8_recipe=mxfp8: {tokens} tokens a rank are no multiple of 128" if tokens % 128 else None


@rule("cp_comm", "cp_comm: core/extensions/transformer_engine.py:1228-1252; Transformer Engine, attn_forward_func_with_cp: windows",
      "model cp_comm_type tp cp")  # fmt: skip
def cp_kind(candidate: Candidate, workload: Workload) -> str | None:
    strategy, mesh, a = candidate.strategy, candidate.mesh, workload.model.architecture
    kind, shards = strategy.cp_comm_type, mesh.cp
    if mesh.cp == 1:
        return None if kind == "p2p" else f"cp_comm_type={kind} needs cp above 1"
    if workload.cluster.is_cpu:
        return None if kind == "all_gather" else f"cp_comm_type={kind} is Transformer Engine's, on GPUs; the worker has all_gather on a CPU"
    if kind in ("p2p", "a2a+p2p") and "window" in a.features():
        return f"cp={mesh.cp} with cp_comm_type={kind}: Transformer Engine has windows with a2a and all_gather alone"
    if kind in ("p2p", "all_gather"):
        return None
    if kind == "a2a+p2p":
        shards = inner_size(mesh, workload.cluster.levels[0].size)
        if shards in (1, mesh.cp):
            return f"cp_comm_type={kind}: cp={mesh.cp} with tp={mesh.tp} is not of several inner network domains and within each"
    for name, heads in (("num_attention_heads", a.num_attention_heads), ("num_query_groups", a.query_groups)):
        if heads / mesh.tp % shards:
            return f"cp_comm_type={kind}: {shards} ranks do not divide {name}/tp={heads / mesh.tp:g}"
    return None


DEEP_EP_RANKS: Final = (2, 4, 8, 16, 24, 32, 64, 128, 144, 160)
"""Sizes of groups that DeepEP has settings for (v1.2.1, deep_ep/buffer.py:232, config_map)."""
DEEP_EP_NODE: Final = 8
"""GPUs of a node in groups that are larger (csrc/deep_ep.cpp:30, NUM_MAX_NVL_PEERS)."""


@rule(
    "dispatcher",
    "moe_disp: core/transformer/transformer_config.py:1063-1095, moe/token_dispatcher.py:1346; DeepEP v1.2.1 deep_ep/buffer.py:232, "
    "csrc/kernels/ibgda_device.cuh; hybrid-ep csrc/hybrid_ep/backend/hybrid_ep_backend.cuh:15 (mlx5dv); issues 369 and 759, and 3343 of "
    "Megatron-Bridge",
    "moe_token_dispatcher_type ep etp",
    where="moe_token_dispatcher_type",
)
def dispatcher(candidate: Candidate, workload: Workload) -> str | None:
    kind = candidate.strategy.moe_token_dispatcher_type
    if not workload.model.architecture.experts:
        return f"moe_token_dispatcher_type={kind}: a dense model has no experts"
    if kind == "allgather":
        return None
    cluster, said = workload.cluster, f"moe_token_dispatcher_type={kind}"
    if cluster.is_cpu:
        return f"{said} needs DeepEP's kernels, on GPUs"
    if cluster.gpu.vendor == "amd":
        return f"{said}: DeepEP needs NVIDIA's GPUs (its README), not {cluster.gpu.name}"
    ranks, inside = candidate.mesh.etp * candidate.mesh.ep, cluster.levels[0].size
    if ranks == 1:
        return f"{said}: etp*ep=1, where it has nothing to exchange"
    backend = {"deepep": "DeepEP", "hybridep": "HybridEP"}[flex_backend(cluster.gpu)]
    beyond = next((level.name for below, level in pairwise(cluster.levels) if ranks > below.size and not level.ibgda), None)
    if beyond is not None:
        return f"{said}: etp*ep={ranks} goes over {beyond}, and {backend} as it is released over NVIDIA's network cards alone (ibgda)"
    if backend != "DeepEP":
        return None
    if any(part.pad_to_capacity for part in workload.model.architecture.experts):
        return f"{said}: DeepEP does not pad experts to their capacity"
    if ranks not in DEEP_EP_RANKS:
        return f"{said}: etp*ep={ranks}, and DeepEP takes {', '.join(map(str, DEEP_EP_RANKS))}"
    if ranks > inside and (ranks < DEEP_EP_NODE or inside % DEEP_EP_NODE):
        return f"{said}: etp*ep={ranks} on nodes of {inside}, and DeepEP goes beyond a node from nodes of {DEEP_EP_NODE} alone"
    return None


def idle_offload(candidate: Candidate, workload: Workload) -> str | None:
    """Why an offload of these modules does nothing; None: each keeps something that could be offloaded."""
    unused = without_use(tuple(run.layer for run in workload.model.runs), candidate.strategy.offload_modules or "")
    said = f"offload_modules={unused} does nothing: no layer of this model keeps anything there under Transformer Engine"
    return said if unused else None


def offload_beyond_host(candidate: Candidate, workload: Workload) -> str | None:
    """Why a rank's part of host memory can't hold what the first stage offloads in 16 bits, of a micro-batch for each stage; ours."""
    strategy, mesh, mbs = candidate.strategy, candidate.mesh, candidate.micro_batch_size
    modules, sp = strategy.offload_modules or "", strategy.sequence_parallel
    parts = (
        (run.count, offloaded(run.layer, modules, mesh.tp, mesh.cp, sequence_parallel=sp, micro_batch_size=mbs))
        for run in workload.model.runs
    )
    elements = sum(
        count * tensor.local_elements(mesh.tp, sequence_parallel=sp, cp=mesh.cp)
        for count, part in parts for op in part.ops for tensor in op.saves
    )  # fmt: skip
    needed = elements * mbs * ITEMSIZE["bf16"] * min(mesh.pp, candidate.num_microbatches) / mesh.pp
    needed += host_states(candidate, workload) if strategy.offload_optimizer else 0.0
    return lacks_host(f"offload_modules={modules}", needed, workload.cluster)


OFFLOAD: Final = "offload_modules={strategy.offload_modules}"
OFFLOAD_IN_GRAPHS: Final = f"{OFFLOAD} with cuda_graph_impl={{strategy.cuda_graph_impl}}"
SHARED_EXPERTS: Final = (
    "moe_shared_expert_overlap with moe_token_dispatcher_type={strategy.moe_token_dispatcher_type}: Megatron-core has it with"
)
BUFFERED: Final = "experts.rank_capacity_factor={e.rank_capacity_factor:g}"
BEYOND_ZERO_1: Final = (
    "reduce_scatter_with_fp32_accumulation with zero_stage={strategy.zero_stage}: it takes the place of the reduce-scatter of Megatron's "
    "distributed optimizer, zero_stage=1"
)
OF_FSDP_AND_FP8: Final = (
    "keep_fp8_transpose_cache with zero_stage={strategy.zero_stage} does nothing: it is of megatron_fsdp and fp8_param_gather "
    "with zero_stage=3"
)
OPTION_RULES: Final = (
    # Whether linears exchange by user buffers. Of latent attention's they know none: with the first, Megatron turns the overlap off in the
    # configuration that all layers share.
    refused("tp_comm_overlap", "tp_comm_overlap: megatron/training/arguments.py:915; training/initialize.py "
            "_initialize_tp_communicators; core/extensions/transformer_engine.py:531; Transformer Engine, pytorch/module/base.py "
            "fill_userbuffers_buffer_for_all_gather", "model tp sequence_parallel tp_comm_overlap", "tp_comm_overlap",
            ("!te", "tp_comm_overlap needs Transformer Engine's user buffers, on GPUs"),
            ("latent_attention",
             "tp_comm_overlap with latent attention does nothing: Megatron turns it off, as user buffers know none of its linears"),
            ("precision=fp8 fp8_recipe=blockwise",
             "tp_comm_overlap with fp8_recipe=blockwise: user buffers take no tensors that are scaled so"),
            ("two_lengths",
             "tp_comm_overlap: user buffers are for seq_length={training.seq_length} alone, not for decoder_seq_length too"),
            ("!sequence_parallel", "tp_comm_overlap needs sequence_parallel"),
            ("tp_beyond_inner", "tp_comm_overlap: tp={mesh.tp} reaches beyond the {inner.size} GPUs of {inner.name}")),
    whole_blocks,
    cp_kind,
    dispatcher,
    refused("rank_capacity", "core/transformer/transformer_config.py:1692-1706 (0.19)", "moe_token_dispatcher_type",
            "experts.rank_capacity_factor",
            ("!release.has_rank_capacity", f"{BUFFERED}: Megatron-core {{release.version}} has none"),
            *((facts, f"{BUFFERED} with moe_token_dispatcher_type={{strategy.moe_token_dispatcher_type}} on {{gpu.name}}: it is "
               "HybridEP's, which is flex from Blackwell on") for facts in ("!moe_token_dispatcher_type=flex", "cpu", "!hybridep"))),
    refused("shared_expert_overlap", "core/transformer/transformer_config.py:1090", "moe_shared_expert_overlap moe_token_dispatcher_type",
            "moe_shared_expert_overlap",
            ("!experts.shared_ffn_hidden_size", "moe_shared_expert_overlap: this model has no shared experts"),
            ("moe_token_dispatcher_type=allgather release.overlaps_shared_experts_with_flex", f"{SHARED_EXPERTS} alltoall and flex"),
            ("!moe_token_dispatcher_type=alltoall !release.overlaps_shared_experts_with_flex", f"{SHARED_EXPERTS} alltoall")),
    # Whether Megatron's combined 1F1B, a forward beside a backward pass layer by layer, takes this.
    refused("expert_overlap", "core/transformer/transformer_config.py:1852-1906",
            "overlap_moe_expert_parallel_comm moe_token_dispatcher_type moe_shared_expert_overlap megatron_fsdp ep etp pp vpp recompute",
            "overlap_moe_expert_parallel_comm",
            *((facts, f"overlap_moe_expert_parallel_comm: {why}") for facts, why in (
                ("!experts", "a dense model has no experts"),
                ("!ep", "with ep=1 tokens travel nowhere"),
                ("moe_token_dispatcher_type=allgather", "moe_token_dispatcher_type=allgather: Megatron-core has it with alltoall and flex"),
                ("release.overlap_needs_several_experts moe_token_dispatcher_type=alltoall !etp one_expert_a_rank", "ep={mesh.ep}, one "
                 "expert a rank: Megatron-core {release.version} frees tokens that backward needs; 0.19 and flex do not"),
                ("pp !vpp", "pp={mesh.pp} needs vpp above 1"),
                ("recompute=full", "recompute=full: it takes recompute of modules only"),
                ("recompute.mlp experts_alone",
                 "recompute={strategy.recompute}: it computes no experts again, and all layers of this model have them"),
                ("precision=fp32", "in fp32: Megatron-core has it for 16-bit models"),
                ("moe_shared_expert_overlap", "with moe_shared_expert_overlap: Megatron-core takes one of both"),
                ("mtp_num_layers !mtp_num_layers=1", "mtp_num_layers={a.mtp_num_layers}: it takes one"),
                ("mtp_num_layers !pp release.overlap_of_prediction_needs_pipeline",
                 "mtp_num_layers=1 with pp=1: Megatron-core {release.version} needs a pipeline for it"),
                ("megatron_fsdp !release.overlaps_experts_with_fsdp",
                 "with megatron_fsdp: Megatron-core {release.version} gathers weights by the layers' own calls, which it does not make"),
            ))),
    refused("delayed_weight_gradients", "core/transformer/transformer_config.py:1909; training/arguments.py:1209; Transformer Engine "
            "d0067d0, pytorch/module/_common.py:312", "delay_wgrad_compute overlap_moe_expert_parallel_comm", "delay_wgrad_compute",
            ("!overlap_moe_expert_parallel_comm", "delay_wgrad_compute needs overlap_moe_expert_parallel_comm"),
            ("!te", "delay_wgrad_compute needs Transformer Engine's linears, on GPUs"),
            ("lora", "delay_wgrad_compute with lora.rank={lora.rank}: Transformer Engine waits for gradients that frozen weights have not"),
            ("frozen_language",
             "delay_wgrad_compute with train.freeze=language: Transformer Engine waits for gradients that frozen weights have not")),
    # Whether tokens are permuted by Megatron's own kernels at all, fused or not.
    refused("permute_fusion", "core/transformer/moe/token_dispatcher.py:642, 838; _HybridEPManager asks for it nowhere (:978)",
            "moe_permute_fusion moe_token_dispatcher_type", "!moe_permute_fusion",
            ("!experts", "moe_permute_fusion=false does nothing: a dense model has no experts"),
            ("cpu", "moe_permute_fusion=false does nothing on a CPU: the fused kernels are Transformer Engine's"),
            ("moe_token_dispatcher_type=flex hybridep", "moe_permute_fusion=false does nothing with moe_token_dispatcher_type=flex on "
             "{gpu.name}: HybridEP puts tokens in order itself")),
    refused("fp32_accumulation", "core/distributed/param_and_grad_buffer.py:158-165",
            "reduce_scatter_with_fp32_accumulation zero_stage zero_shard_size", "reduce_scatter_with_fp32_accumulation",
            ("!zero_stage=1", BEYOND_ZERO_1),
            ("megatron_fsdp", BEYOND_ZERO_1),
            ("zero_shard_size", "reduce_scatter_with_fp32_accumulation with zero_stage={strategy.zero_stage} and "
             "zero_shard_size={strategy.zero_shard_size}: Megatron has it for one instance of the optimizer")),
    refused("fp8_weights", "core/transformer/transformer_config.py:1027; training/arguments.py:655", "fp8_param_gather zero_stage",
            "fp8_param_gather",
            ("!precision=fp8", "fp8_param_gather with precision={training.precision}: it keeps the weights of FP8 products"),
            ("!zero_stage", "fp8_param_gather with zero_stage=0: the distributed optimizer casts and gathers them")),
    # Where Megatron's FSDP gives no transposed FP8 weight back, or makes none, so that there is nothing to keep.
    refused("fp8_transposes",
            "core/distributed/fsdp/mcore_fsdp_adapter.py:161; fsdp/src/megatron_fsdp/mixed_precision.py:192, fully_shard.py:241",
            "keep_fp8_transpose_cache megatron_fsdp fp8_param_gather zero_stage", "keep_fp8_transpose_cache",
            *((facts, OF_FSDP_AND_FP8) for facts in ("!megatron_fsdp", "!fp8_param_gather", "!zero_stage=3")),
            ("fp8_recipe=mxfp8",
             "keep_fp8_transpose_cache with fp8_recipe=mxfp8 does nothing: both copies of MXFP8 weights are kept anyway"),
            ("gpu.has_mxfp8 !fp8_recipe=blockwise", "keep_fp8_transpose_cache on {gpu.name} does nothing: its products of "
             "fp8_recipe={training.fp8_recipe} take weights as they are")),
    refused("ddp_bucket", "core/distributed/distributed_data_parallel.py:65-69",
            "dp cp ddp_bucket_size overlap_grad_reduce megatron_fsdp", "ddp_bucket_size",
            *((facts, "ddp_bucket_size={strategy.ddp_bucket_size} does nothing: there is no overlap_grad_reduce with dp*cp above 1 on "
               "GPUs, without which all is one bucket") for facts in ("!overlap_grad_reduce", "cpu", "!dp !cp")),
            ("megatron_fsdp", "ddp_bucket_size={strategy.ddp_bucket_size} with megatron_fsdp: its units are of whole modules")),
    # Whether these modules can be offloaded, and keep anything that could be.
    refused("offloaded_modules",
            "core/transformer/transformer_config.py:1268-1292 (0.19: 1848-1917, 2596-2640); training/arguments.py:1222", "model tp pp cp "
            "micro_batch_size sequence_parallel recompute offload_optimizer offload_modules cuda_graph_impl cuda_graph_modules",
            "offload_modules",
            ("!te", f"{OFFLOAD} needs Transformer Engine's layers, on GPUs"),
            ("!decoder", f"{OFFLOAD}: only Megatron's GPTModel begins and ends an offload (models/gpt/gpt_model.py:457)"),
            ("offloads.attn_proj !offloads.core_attn",
             f"{OFFLOAD}: attn_proj takes what core_attn gives and keeps: Megatron takes it beside core_attn alone"),
            ("recompute=full", f"{OFFLOAD} with recompute=full, which keeps none of them"),
            # attention.py:1127: its checkpoint has no begin of what :1186 ends
            ("offloads.core_attn recompute.core_attn",
             f"{OFFLOAD} with recompute={{strategy.recompute}}: a core_attn that is computed again begins no offload"),
            *((f"{facts} recompute.mlp",
               f"{OFFLOAD} with recompute={{strategy.recompute}}: experts that are computed again keep nothing of {names}")
              for facts, names in (("offloads.expert_fc1 offloads.moe_act", "expert_fc1, moe_act"),
                                   *((f"offloads.{name}", name) for name in sorted(OF_EXPERTS)))),
            idle_offload,
            # ours: 0.16.1 asks for nothing, and its offload counts its passes in Python
            ("cuda_graph_impl !release.offloads_beside_graphs",
             f"{OFFLOAD_IN_GRAPHS}: Megatron-core {{release.version}} has no offload inside of graphs"),
            ("cuda_graph_impl=full_iteration",  # :2634, whose bound of copies in flight no plan says
             f"{OFFLOAD_IN_GRAPHS} needs fine_grained_offloading_max_inflight_offloads"),
            ("graphed.moe", f"{OFFLOAD_IN_GRAPHS} and moe among what they hold: experts that pad to a capacity aren't offloaded"),
            *((f"cuda_graph_impl=local {facts}", f"{OFFLOAD_IN_GRAPHS}: its graphs take an offload of {' and '.join(sorted(OF_EXPERTS))} "
               "alone, and graphs of modules") for facts in ("!graphed", *(f"offloads.{one}" for one in MODULES if one not in OF_EXPERTS))),
            offload_beyond_host),
    refused("mfsdp", "mfsdp: core/distributed/fsdp/mcore_fsdp_adapter.py:363-402", "megatron_fsdp pp", "megatron_fsdp",
            ("cpu", "megatron_fsdp needs GPUs"),
            ("pp", "megatron_fsdp with pp={mesh.pp}: its mesh has no pipeline"),
            ("!optimizer=adamw", "megatron_fsdp with optimizer={training.optimizer}: Adam only")),
)  # fmt: skip
"""Rules on what the user chooses of Megatron's own ways."""
