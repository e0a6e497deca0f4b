"""A plan in the words of megatron-core's own classes, as plain data: what `engine.json` holds and our workers build from.

Data types are torch's names ("bfloat16"), activations those of `torch.nn.functional` ("gelu"), so that a worker maps them with getattr.
Field names are those of megatron-core 0.16.1: transformer/transformer_config.py, model_parallel_config.py,
distributed/distributed_data_parallel_config.py, optimizer/optimizer_config.py and the models' constructors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from itertools import takewhile
from math import lcm
from typing import Any, Final

from orchestrator.engines import megatron_parts
from orchestrator.engines.megatron_versions import Release, flex_backend, names, release_of
from orchestrator.errors import InputError
from orchestrator.model.parts.experts import Experts
from orchestrator.model.spec import Architecture, padded
from orchestrator.model.training import QUANTISED
from orchestrator.plan import LayerSpan, Plan
from orchestrator.strategy.axes.cp import inner_size
from orchestrator.strategy.graphs import graphed_modules
from orchestrator.strategy.megatron_layout import layout_string
from orchestrator.strategy.spec import PP_BEFORE_DP, RECOMPUTE_MODULES, Recompute
from orchestrator.words import megatron as words
from orchestrator.words.terms import LONG_TYPES, NOTHING, Table, Term, flags, only, say, unsaid

ENDS: Final = ("embedding", "head")
"""What Megatron does not count as a layer."""

TORCH_DTYPE: Final = LONG_TYPES | dict.fromkeys(QUANTISED, "bfloat16")
"""Parameters' data type by training precision; those of products alone keep bf16 parameters."""

FUSABLE_ACTIVATIONS: Final = ("gelu", "geglu", "swiglu")
"""Activations that bias_activation_fusion takes: F.gelu, F.silu and quick_gelu only (transformer_config.py:1486), the last as
`fuses_activation` says."""

MODEL_CLASS: Final = {"decoder": "GPTModel", "encoder": "BertModel", "encoder_decoder": "T5Model"}

DDP_MIN_BUCKET_ELEMENTS: Final = 40_000_000
DDP_BUCKET_ELEMENTS_PER_RANK: Final = 1_000_000
"""Buckets grow with the group, so that each rank's share does not fall into the network's latency (distributed_data_parallel.py:64-80)."""


def padded_vocab_size(plan: Plan) -> int:
    """The vocabulary as it is allocated, the same under every tp that divides make_vocab_size_divisible_by."""
    return padded(plan.model.vocab_size, plan.model.make_vocab_size_divisible_by, plan.tp)


def vocab_divisor(plan: Plan) -> int:
    """Megatron's --make-vocab-size-divisible-by for that size: it pads to a multiple of this times tp (tokenizer.py:117), which would be
    another vocabulary, and another loss, at each tp, were this constant."""
    return lcm(plan.model.make_vocab_size_divisible_by, plan.tp) // plan.tp


def layers_of(plan: Plan, stage: int, chunk: int) -> tuple[LayerSpan, ...]:
    """The transformer layers of one chunk, without embedding and head."""
    return tuple(span for span in plan.stages[stage].chunk(chunk) if span.kind not in ENDS)


def layer_counts(plan: Plan) -> list[list[int]]:
    """Number of transformer layers by [chunk][stage]."""
    return [[sum(span.count for span in layers_of(plan, stage, chunk)) for stage in range(plan.pp)] for chunk in range(plan.vpp)]


def layout(plan: Plan) -> str | None:
    """Megatron's pipeline layout string ("Et*7|t*9|t*9|t*7L"); None where every chunk has as many layers as every other: what Megatron does
    when told nothing."""
    is_even = len({count for row in layer_counts(plan) for count in row}) == 1
    return None if plan.pp == 1 or is_even else layout_string(plan.stages, plan.model.mtp_num_layers)


def _full_block(modes: Sequence[Recompute]) -> int | None:
    """How many layers at the front are recomputed in full and the rest not at all; None: another pattern."""
    front = len([*takewhile(lambda mode: mode == "full", modes)])
    return front if {*modes[front:]} <= {"none"} else None


NO_RECOMPUTE: Final[dict[str, Any]] = dict.fromkeys(
    ("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules")
)


def recompute_fields(plan: Plan, *stages: int) -> dict[str, Any]:
    """Recompute of these stages in TransformerConfig's words; one setting serves all chunks of their ranks.

    Every rank builds its own TransformerConfig, so stages may differ. Within a chunk (an encoder-decoder's encoder and decoder are two)
    megatron-core can recompute the first N layers in full ("block", transformer_block.py:532-560) or the same modules of all of them,
    nothing else; several stages may differ in N where their chunks are shorter than the largest N. Raises InputError for another pattern.
    """
    # Encoder and decoder are a block of their own in megatron-core; a decoder's kinds of layers share one.
    apart = plan.model.stack == "encoder_decoder"
    spans = [layers_of(plan, stage, chunk) for stage in stages for chunk in range(plan.vpp)]
    blocks_of = dict.fromkeys(apart and span.kind for chunk in spans for span in chunk)
    chunks = [[span.recompute for span in chunk if not kind or span.kind == kind for _ in range(span.count)]
              for chunk in spans for kind in blocks_of]  # fmt: skip
    used = {mode for modes in chunks for mode in modes}
    off = NO_RECOMPUTE
    if used <= {"none"} or plan.schedule == "deepspeed_1f1b":
        return off  # DeepSpeed's pipeline has a list of its layers (ds_config.py)
    if len(used) == 1 and (modules := RECOMPUTE_MODULES.get(*used)) is not None:
        return off | {"recompute_granularity": "selective", "recompute_modules": recompute_modules(plan, modules)}
    blocks = [_full_block(modes) for modes in chunks]
    wanted = max((block for block in blocks if block is not None), default=0)
    if None in blocks or any(block != min(wanted, len(modes)) for block, modes in zip(blocks, chunks, strict=True)):
        raise InputError(
            f"stages[{stages[0]}].recompute",
            " ".join(",".join(modes) for modes in chunks),
            "megatron-core recomputes the first N layers of every chunk in full, or the same modules in all of a stage, nothing else",
        )
    return off | {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": wanted}


def common_recompute(plan: Plan) -> dict[str, Any] | None:
    """The one setting of the command line that recomputes on every stage what the plan does; None: there is none."""
    with suppress(InputError):
        return recompute_fields(plan, *range(plan.pp))
    return None


def recompute_modules(plan: Plan, modules: Sequence[str]) -> list[str]:
    """These modules to recompute by Megatron's names. megatron-core calls the feed-forward "moe" in layers with experts, whose forward does
    the recompute (transformer_layer.py:445, moe/moe_layer.py:432). The combined 1F1B calls that layer's parts instead
    (fine_grained_callables.py:509): there `mlp` is that of layers without experts alone."""
    experts = plan.model.experts and not plan.overlap_moe_expert_parallel_comm
    return [*modules, "moe"] if experts and "mlp" in modules else list(modules)


def fuses_activation(model: Architecture) -> bool:
    """Whether one kernel adds the bias and computes the activation on a GPU. That of quick_gelu weighs by the router's scores as well,
    which experts alone have, and shared ones have not (transformer/mlp.py:171-206); Megatron-LM takes none without a bias then."""
    if model.activation == "clamped_swiglu":
        parts = [layer.feed_forward for layer in model.each_layer()]
        return model.add_bias_linear and all(isinstance(part, Experts) and not part.shared_ffn_hidden_size for part in parts)
    return model.activation in FUSABLE_ACTIVATIONS and (model.gated or model.add_bias_linear)


def _release(plan: Plan) -> Release:
    return release_of(plan.cluster.software.megatron_core)


def _has_whole_graphs(plan: Plan) -> bool:
    return _release(plan).full_iteration_is_an_impl


def graph_impl(plan: Plan) -> str:
    """Who makes the plan's CUDA graphs, as the planned release calls it."""
    return "local" if plan.cuda_graph_impl == "full_iteration" and not _has_whole_graphs(plan) else plan.cuda_graph_impl


def graph_scope(plan: Plan) -> list[str] | None:
    """What the plan's CUDA graphs hold, by the planned release's names; None: whole layers, or nothing need be said."""
    if plan.cuda_graph_impl == "full_iteration":
        return None if _has_whole_graphs(plan) else ["full_iteration"]
    return [*graphed_modules(plan, plan.model)] or None


GROUPED_COMPUTE_CAPABILITY: Final = 8.0
"""First compute capability of the GPUs on which one kernel multiplies the tokens of all experts."""


def hierarchical_sizes(plan: Plan) -> list[int] | None:
    """Context-parallel ranks that exchange heads, and groups of them that pass on keys and values; None for another kind."""
    if plan.cp_comm_type != "a2a+p2p":
        return None
    inner = inner_size(plan.mesh, plan.cluster.levels[0].size)
    return [inner, plan.cp // inner]


FP8_FORMAT: Final = {"delayed": "hybrid", "tensorwise": "hybrid", "blockwise": "e4m3", "mxfp8": "e4m3"}
"""Types of FP8 tensors: gradients as e5m2 ("hybrid") where one scale serves a whole tensor; blocks need no wider range."""
DELAYED_SCALING: Final = {"fp8_amax_history_len": 1024, "fp8_amax_compute_algo": "max"}
"""Transformer Engine's own defaults of delayed scaling; megatron-core's look at one step only."""


def fp8_fields(plan: Plan) -> dict[str, Any]:
    """FP8 in TransformerConfig's words; empty in another precision."""
    training = plan.training
    if training.precision != "fp8":
        return {}
    recipe = training.fp8_recipe or "delayed"
    return {"fp8": FP8_FORMAT[recipe], "fp8_recipe": recipe} | (DELAYED_SCALING if recipe == "delayed" else {})


def gathers_in_gradients(plan: Plan) -> bool:
    """Whether updated weights travel in the gradients' buffer, in 16 bits: those in MXFP8, which Transformer Engine can't keep in a buffer
    of Megatron's (pytorch/tensor/utils.py, replace_raw_data)."""
    return plan.fp8_param_gather and plan.training.fp8_recipe == "mxfp8" and not plan.megatron_fsdp


def implementation(plan: Plan) -> str:
    """Which layer specs to build: Transformer Engine's where it is installed, else megatron-core's own."""
    return "transformer_engine" if plan.cluster.software.transformer_engine and not plan.cluster.is_cpu else "local"


def overlaps_reduction(plan: Plan) -> bool:
    """Whether gradients are reduced beside the backward pass: there is something to reduce, and a second stream, which a CPU has not."""
    return plan.dp * plan.cp > 1 and not plan.cluster.is_cpu and plan.overlap_grad_reduce


def overlaps_gathering(plan: Plan) -> bool:
    """Whether weights are gathered beside the forward pass, which the hooks of the overlapped reduction start (arguments.py:597)."""
    return overlaps_reduction(plan) and plan.zero_stage >= 1 and plan.overlap_param_gather


def _has(part: str) -> Callable[[Plan], bool]:
    return lambda plan: part in plan.model.features()


_is_t5, _is_bert, _has_experts, _is_latent = map(_has, ("encoder_decoder", "encoder", "experts", "latent_attention"))


def _has_rope(plan: Plan) -> bool:
    return plan.model.position_embedding == "rope"


def _stretches(plan: Plan) -> bool:
    """Whether GPTModel stretches rotary positions: latent attention does so itself, by YaRN (megatron_parts.PARTS)."""
    return _has_rope(plan) and "latent_yarn" not in plan.model.features()


def _has_adam(plan: Plan) -> bool:
    return plan.training.optimizer != "sgd"


def _is_grouped(plan: Plan) -> bool:
    return plan.model.query_groups != plan.model.num_attention_heads


def _query_groups(plan: Plan) -> int:
    """Latent attention has none."""
    return plan.model.num_attention_heads if _is_latent(plan) else plan.model.query_groups


def _has_te(plan: Plan) -> bool:
    return plan.cluster.software.transformer_engine and not plan.cluster.is_cpu


def _has_apex(plan: Plan) -> bool:
    return plan.cluster.software.apex and not plan.cluster.is_cpu


def _is_bf16(plan: Plan) -> bool:
    return plan.training.precision in ("bf16", *QUANTISED)


def _lacks_fused_kernel(plan: Plan) -> bool:
    """Whether Megatron-LM would by default ask for a fused activation that there is no kernel of."""
    model = plan.model
    return model.add_bias_linear and model.activation in ("relu2", "clamped_swiglu") and not fuses_activation(model)


def _recompute(name: str) -> Term:
    return Term(name, "stages.recompute", unless=None, of=lambda plan: (common_recompute(plan) or NO_RECOMPUTE)[name])


SEQUENCE_PARALLEL, CP_COMM_TYPE, TP_COMM_OVERLAP, FP32_ACCUMULATION, FP8_PARAM, GRAD_REDUCE, PARAM_GATHER, *MORE = words.OPTIONS
*EXPERT_PARALLEL, PERMUTE_FUSION = words.EXPERT_PARALLEL

ARCHITECTURE: Final[Table] = (
    Term("encoder_num_layers", "model.num_layers", when=_is_t5),
    Term("decoder_num_layers", "model.decoder_num_layers", when=_is_t5),
    Term("encoder_seq_length", "training.seq_length", when=_is_t5),
    Term("decoder_seq_length", "training.decoder_seq_length", when=_is_t5),
    Term("num_layers", "model.num_layers", when=lambda plan: not _is_t5(plan)),
    Term("seq_length", "training.seq_length", when=lambda plan: not _is_t5(plan)),
    *words.SHAPE,
    Term("kv_channels", "model.kv_channels", of=lambda plan: plan.model.head_dim),
    # Without the first the second is forgotten (arguments.py:1348).
    Term("group_query_attention", "model.num_query_groups", of=_is_grouped, unless=False, when=lambda plan: not _is_latent(plan)),
    Term("num_query_groups", "model.num_query_groups", of=_query_groups,
         when=lambda plan: _is_grouped(plan) and not _is_latent(plan)),
    *words.NORM,
    *only(_has_rope, words.ROPE),
    Term("use_rope_scaling", "model.rope_scaling_factor", unless=False, to=lambda factor: factor is not None, when=_stretches),
    Term("rope_scaling_factor", "model.rope_scaling_factor", unless=None, when=_stretches),
    *words.ACTIVATION,
    *words.BIASES,
    *words.TIED,
)  # fmt: skip
"""What a plan's model is, in the order of the command line, but for its parts (`megatron_parts.config_fields`). `ours` is the plan's field,
which the user's own values may not contradict; "" where the plan decides nothing."""
CHOICES: Final[Table] = (
    Term("bert_binary_head", "", of=lambda plan: False, when=_is_bert),
    *words.DROPOUT,
    Term("make_vocab_size_divisible_by", "model.make_vocab_size_divisible_by", of=vocab_divisor),
    Term("attention_softmax_in_fp32", "", of=lambda plan: True),
    *words.SIZES,
    *only(_has_experts, EXPERT_PARALLEL),
    Term("moe_flex_dispatcher_backend", "", of=lambda plan: flex_backend(plan.cluster.gpu),
         when=lambda plan: plan.moe_token_dispatcher_type == "flex"),
    # HybridEP's buffers of one size want the experts' products in Transformer Engine's fuser (transformer_config.py:1699 of 0.19).
    Term("use_transformer_engine_op_fuser", "", unless=False,
         of=lambda plan: any(part.rank_capacity_factor is not None for part in plan.model.experts)),
    # Products of all experts at once are Transformer Engine's, from Ampere on (training/arguments.py:852).
    Term("moe_grouped_gemm", "", when=_has_experts,
         of=lambda plan: _has_te(plan) and float(plan.cluster.gpu.compute_capability) >= GROUPED_COMPUTE_CAPABILITY),
    PERMUTE_FUSION._replace(unless=NOTHING, of=lambda plan: plan.moe_permute_fusion and _has_te(plan), when=_has_experts),
    SEQUENCE_PARALLEL._replace(unless=NOTHING),
    # The layout gives the number of chunks as well; other pipeline flags are refused beside it (arguments.py:503-527).
    Term("pipeline_model_parallel_layout", "stages", of=layout),
    Term("num_virtual_stages_per_pipeline_rank", "vpp", to=lambda vpp: vpp if vpp > 1 else None, when=lambda plan: layout(plan) is None),
    Term("microbatch_group_size_per_vp_stage", "microbatch_group_size_per_vp_stage",
         of=lambda plan: plan.microbatch_group_size_per_vp_stage or plan.pp,
         when=lambda plan: plan.microbatch_group_size_per_vp_stage is not None),
    CP_COMM_TYPE._replace(when=lambda plan: plan.cp > 1),
    Term("hierarchical_context_parallel_sizes", "cp_comm_type", unless=None, of=hierarchical_sizes),
    TP_COMM_OVERLAP,
    Term("cuda_graph_impl", "cuda_graph_impl", unless="none", of=graph_impl),
    Term("cuda_graph_scope", "cuda_graph_modules", unless=None, of=graph_scope, when=lambda plan: not _has_whole_graphs(plan)),
    Term("cuda_graph_modules", "cuda_graph_modules", unless=None, of=graph_scope, when=_has_whole_graphs),
    # What inference does to experts in graphs, which a release asserts of trainings too (training/arguments.py:1158).
    Term("moe_pad_experts_for_cuda_graph_inference", "", unless=False,
         of=lambda plan: plan.ep > 1 and graph_impl(plan) == "local" and _release(plan).pads_inference_in_graphs),
    # Graphs can't replay Megatron's own random numbers (cuda_graphs.py:1406).
    Term("te_rng_tracker", "", of=lambda plan: plan.cuda_graph_impl != "none"),
    # A check copies to the host, which ends the capture of a step (training/arguments.py:725).
    Term("check_for_nan_in_loss_and_grad", "", unless=True, of=lambda plan: plan.cuda_graph_impl != "full_iteration"),
    Term("use_tp_pp_dp_mapping", "rank_order", to=lambda order: order == PP_BEFORE_DP),
    Term("num_distributed_optimizer_instances", "zero_shard_size", unless=1, of=lambda plan: plan.optimizer_instances),
    FP32_ACCUMULATION,
    FP8_PARAM,
    Term("reuse_grad_buf_for_mxfp8_param_ag", "fp8_param_gather", unless=False, of=gathers_in_gradients),
    Term("optimizer_offload_fraction", "offload_optimizer", of=lambda plan: 1.0, when=lambda plan: plan.offload_optimizer),
    Term("fine_grained_activation_offloading", "offload_modules", unless=False, to=bool, back=lambda said: NOTHING),
    Term("offload_modules", "offload_modules", unless=None, to=lambda modules: modules and modules.split("+"), back="+".join),
    *flags("use_megatron_fsdp=megatron_fsdp"),
    Term("data_parallel_sharding_strategy", "zero_stage", unless="no_shard",
         of=lambda plan: words.FSDP_STRATEGIES[plan.zero_stage] if plan.megatron_fsdp else "no_shard"),
    Term("ckpt_format", "", of=lambda plan: "fsdp_dtensor", when=lambda plan: plan.megatron_fsdp),
    Term("use_distributed_optimizer", "zero_stage", to=lambda stage: stage >= 1),
    GRAD_REDUCE._replace(of=overlaps_reduction, unless=NOTHING),
    PARAM_GATHER._replace(of=overlaps_gathering, unless=NOTHING),
    *MORE,
    *map(_recompute, ("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules")),
    *words.BATCH,
    Term("global_batch_size", "global_batch_size"),
    Term("train_iters", "training.steps"),
    Term("fp16", "training.precision", to=lambda precision: precision == "fp16"),
    Term("bf16", "training.precision", of=_is_bf16),
    Term("fp8", "training.precision", unless=None, of=lambda plan: fp8_fields(plan).get("fp8")),
    Term("fp8_recipe", "training.fp8_recipe", unless=None, of=lambda plan: fp8_fields(plan).get("fp8_recipe")),
    *(Term(name, "", unless=None, of=lambda plan, name=name: fp8_fields(plan).get(name)) for name in DELAYED_SCALING),  # type: ignore[misc]
    Term("fp4", "training.precision", unless=None, to=lambda precision: "e2m1" if precision == "nvfp4" else None),
    Term("fp4_recipe", "training.precision", unless=None, to=lambda precision: "nvfp4" if precision == "nvfp4" else None),
    Term("grad_reduce_in_bf16", "training.grad_reduce_dtype", to=lambda dtype: dtype == "bf16", when=_is_bf16),
    Term("accumulate_allreduce_grads_in_fp32", "training.grad_reduce_dtype", to=lambda dtype: dtype == "fp32",
         when=lambda plan: plan.training.precision == "fp16"),
    Term("optimizer", "training.optimizer", to=lambda name: "adam" if name == "adamw" else name),
    *only(lambda plan: plan.training.optimizer == "muon", words.MUON),
    *only(_has_adam, (*words.BETAS, *words.EPSILON)),
    *only(lambda plan: plan.training.precision_aware_optimizer, words.PRECISION_AWARE),
    Term("sgd_momentum", "", of=lambda plan: 0.0, when=lambda plan: not _has_adam(plan)),
    *words.SCHEDULE,
    # What Megatron turns on by default and this software can't do.
    Term("transformer_impl", "", of=implementation),
    # AMD's images turn flash attention off in Transformer Engine (NVTE_FLASH_ATTN=0), beside which Megatron's default stops the ranks
    # (models/common/language_module/language_module.py:140).
    Term("attention_backend", "", of=lambda plan: "fused", when=lambda plan: plan.cluster.gpu.vendor == "amd" and _has_te(plan)),
    Term("spec", "", of=lambda plan: "local", when=lambda plan: plan.model.stack == "encoder" and not _has_te(plan)),
    # Needs Apex' fused_weight_gradient_mlp_cuda (tensor_parallel/layers.py:925).
    Term("gradient_accumulation_fusion", "", of=lambda plan: _has_apex(plan) and not plan.megatron_fsdp),
    # That kernel has the causal mask only: it would forget a window, and is asked before it (fusions/fused_softmax.py:245).
    Term("masked_softmax_fusion", "", of=lambda plan: _has_apex(plan) and "window" not in plan.model.features()),
    Term("no_persist_layer_norm", "", of=lambda plan: not _has_apex(plan)),
    # Latent attention's fused rotation knows YaRN's frequencies alone (transformer_config.py:2068).
    Term("apply_rope_fusion", "", of=lambda plan: _has_te(plan) and not _is_latent(plan)),
    Term("distributed_backend", "", of=lambda plan: "gloo", when=lambda plan: plan.cluster.is_cpu),
    # The first is of every activation but SwiGLU (arguments.py:1335).
    Term("bias_gelu_fusion", "", of=lambda plan: not plan.cluster.is_cpu and not _lacks_fused_kernel(plan)),
    Term("bias_swiglu_fusion", "", of=lambda plan: not plan.cluster.is_cpu),
    Term("bias_dropout_fusion", "", of=lambda plan: not plan.cluster.is_cpu),
)  # fmt: skip
"""What else it says there, but for its data. Many are fields of megatron-core's configurations too."""
FIELDS: Final[Table] = (
    Term("num_layers", "model.num_layers", of=lambda plan: plan.model.decoder_num_layers if _is_t5(plan) else plan.model.num_layers),
    Term("num_query_groups", "model.num_query_groups", of=_query_groups),
    Term("gated_linear_unit", "model.activation", of=lambda plan: plan.model.gated),
    Term("activation_func", "", of=lambda plan: words.FUNCTION[plan.model.activation]),
    Term("params_dtype", "training.precision", to=TORCH_DTYPE.get),
    Term("pipeline_dtype", "training.precision", to=TORCH_DTYPE.get),
    Term("expert_model_parallel_size", "ep"),
    Term("virtual_pipeline_model_parallel_size", "vpp", to=lambda vpp: vpp if vpp > 1 else None),
    # Interleaving over two stages is silently wrong with batched sends (README "silently wrong" 1); the CLI does the same for any pp.
    Term("overlap_p2p_comm", "vpp", to=lambda vpp: vpp > 1),
    Term("batch_p2p_comm", "vpp", to=lambda vpp: vpp == 1),
    Term("bias_activation_fusion", "", of=lambda plan: not plan.cluster.is_cpu and fuses_activation(plan.model)),
    Term("apply_rope_fusion", "", of=lambda plan: _has_te(plan) and _has_rope(plan) and not _is_latent(plan)),
    Term("persist_layer_norm", "", of=_has_apex),
    Term("use_cpu_initialization", "", of=lambda plan: plan.cluster.is_cpu),
    Term("grad_reduce_in_fp32", "training.grad_reduce_dtype", to=lambda dtype: dtype == "fp32"),
    # Under dynamic loss scaling an overflow is a step to skip, not an error (Megatron-LM's arguments.py does the same).
    Term("check_for_nan_in_grad", "", of=lambda plan: plan.training.precision != "fp16" and plan.cuda_graph_impl != "full_iteration"),
    FP8_PARAM._replace(theirs="fp8_param_gather"),  # of data parallelism; one flag sets both (arguments.py:1331)
    Term("average_in_collective", "", of=lambda plan: False),
    *words.BETAS,
    *words.EPSILON,
    Term("decoupled_weight_decay", "training.optimizer", of=lambda plan: True),  # AdamW
    Term("sgd_momentum", "", of=lambda plan: 0.0),
)  # fmt: skip
"""What its classes are told beside, or otherwise than the programs, which work these out."""
OTHERWISE: Final[Table] = (
    *unsaid("num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage decoder_first_pipeline_num_layers "
            "decoder_last_pipeline_num_layers", "stages", None),
    *unsaid("account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split", "stages", False),
    *unsaid("num_layers_per_virtual_pipeline_stage", "vpp", None),
    *unsaid("use_torch_fsdp2", "zero_stage", False),
    *unsaid("enable_cuda_graph external_cuda_graph", "cuda_graph_impl", False),
    *unsaid("rampup_batch_size", "global_batch_size", None),
    *unsaid("train_samples", "training.steps", None),
    *unsaid("lr_warmup_fraction", "training.warmup", None),
    *unsaid("lr_warmup_samples", "training.warmup", 0),
    *unsaid("main_params_dtype", "training.precision_aware_optimizer", "float32"),
    Term("vocab_size", "model.vocab_size"),
    Term("padded_vocab_size", "model.vocab_size", of=padded_vocab_size),
)  # fmt: skip
"""Settings of what a plan decides and says in other words, or with its data."""
MODEL: Final[Table] = (
    Term("vocab_size", "model.vocab_size", of=padded_vocab_size),
    Term("max_sequence_length", "model.max_position_embeddings"),
    Term("position_embedding_type", "model.position_embedding"),
    Term("share_embeddings_and_output_weights", "model.tie_embeddings"),
    Term("parallel_output", "", of=lambda plan: True),
    Term("rotary_percent", "model.rotary_percent", when=_has_rope),
    *only(lambda plan: _has_rope(plan) and plan.model.stack == "decoder", (
        Term("rotary_base", "model.rotary_base"),
        Term("rope_scaling", "model.rope_scaling_factor", to=lambda factor: factor is not None),
        Term("rope_scaling_factor", "model.rope_scaling_factor", unless=None),
    )),
    Term("num_tokentypes", "model.num_token_types", when=_is_bert),
    Term("add_binary_head", "", of=lambda plan: False, when=_is_bert),
)  # fmt: skip
"""Arguments of GPTModel, BertModel or T5Model beside the config, the specs, pre_process, post_process and vp_stage."""
MODULE: Final[Table] = (
    Term("class", "", of=lambda plan: MODEL_CLASS[plan.model.stack]),
    Term("implementation", "", of=implementation),
    *ARCHITECTURE[:2],
)
"""Which class and which layer specs: what is not an argument of either."""
PLAN: Final[Table] = (*ARCHITECTURE, *CHOICES, *FIELDS, *OTHERWISE)


def settings(plan: Plan) -> dict[str, Any]:
    """What Megatron-LM's programs are told of a plan, but for its data, by the names of fields and in the order of the command line."""
    parts = megatron_parts.config_fields(plan.model)
    of_parts = {name: value for name, value in parts.items() if name not in megatron_parts.SAID_OF_EVERY_MODEL}
    return say(ARCHITECTURE, plan) | of_parts | say(CHOICES, plan)


def engine_fields(plan: Plan, sections: Collection[str]) -> dict[str, Any]:
    """The content of engine.json: what workers build from and tests check.

    "transformer_config": arguments common to all ranks, of which an encoder-decoder's encoder has `encoder_num_layers`; "per_stage": what
    each pipeline stage adds or changes; "module": class and layer specs; "model": constructor arguments; "ddp" and "optimizer":
    megatron-core's own data parallelism and optimizer, where the engine's `sections` have them.
    """
    said = settings(plan) | say(FIELDS, plan)
    known = {section: names(section, plan.cluster.software.megatron_core) for section in ("transformer_config", "ddp", "optimizer")}
    found = {section: {name: said[name] for name in said if name in known[section]} if section in sections else None for section in known}
    layers = {name: value for name, value in (found["transformer_config"] or {}).items() if name not in NO_RECOMPUTE}
    layers |= {"activation_func": said["activation_func"]} | megatron_parts.config_fields(plan.model)
    if "ddp" not in sections:  # DeepSpeed reads param.grad, which it leaves empty
        layers["gradient_accumulation_fusion"] = False
    return {
        "engine": plan.engine,
        "module": say(MODULE, plan),
        "transformer_config": layers,
        "per_stage": [recompute_fields(plan, stage) for stage in range(plan.pp)],
        "model": say(MODEL, plan),
        "ddp": found["ddp"],
        "optimizer": found["optimizer"],
    }
