"""A plan in the words of megatron-core's own classes, as plain data: what `engine.json` holds and our workers build from.

Data types are torch's names ("bfloat16"), activations those of `torch.nn.functional` ("gelu"), so that a worker maps them with getattr.
Field names are those of megatron-core 0.16.1: transformer/transformer_config.py, model_parallel_config.py,
distributed/distributed_data_parallel_config.py, optimizer/optimizer_config.py and the models' constructors.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import groupby
from math import lcm
from typing import Any, Final

from orchestrator.engines import megatron_parts
from orchestrator.errors import InputError
from orchestrator.model.parts.experts import Experts
from orchestrator.model.spec import Architecture, padded
from orchestrator.plan import LayerSpan, Plan
from orchestrator.strategy.axes.cp import inner_size
from orchestrator.strategy.megatron_layout import layout_string
from orchestrator.strategy.spec import RECOMPUTE_MODULES, Recompute

ENDS: Final = ("embedding", "head")
"""What Megatron does not count as a layer."""

TORCH_DTYPE: Final = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp8": "bfloat16"}
"""Parameters' data type by training precision; fp8 keeps bf16 parameters."""

MOMENT_DTYPE: Final = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "uint8"}
"""Moments of 8 bits are kept as bytes, with a scale (optimizer_config.py)."""

ACTIVATION: Final = {"gelu": "gelu", "geglu": "gelu", "swiglu": "silu", "relu": "relu"} | {
    "relu2": "squared_relu",
    "clamped_swiglu": "quick_gelu",
}
FUSABLE_ACTIVATIONS: Final = ("gelu", "geglu", "swiglu")
"""Activations that bias_activation_fusion takes: F.gelu, F.silu and quick_gelu only (transformer_config.py:1486), the last as
`fuses_activation` says."""

MODEL_CLASS: Final = {"decoder": "GPTModel", "encoder": "BertModel", "encoder_decoder": "T5Model"}

FSDP_STRATEGY: Final = {2: "optim_grads", 3: "optim_grads_params"}
"""Megatron-FSDP's --data-parallel-sharding-strategy by ZeRO stage."""

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


def chunk_lengths(plan: Plan, stage: int) -> list[int]:
    """Layers of a stage that one recompute setting counts apart: of each chunk, and in it of each kind."""
    chunks = [layers_of(plan, stage, chunk) for chunk in range(plan.vpp)]
    kinds = {span.kind for spans in chunks for span in spans}
    return [sum(span.count for span in spans if span.kind == kind) for spans in chunks for kind in sorted(kinds)]


def is_even(plan: Plan) -> bool:
    """Every chunk has as many layers as every other: what Megatron does when told nothing."""
    return len({count for row in layer_counts(plan) for count in row}) == 1


def layout(plan: Plan) -> str | None:
    """Megatron's pipeline layout string ("Et*7|t*9|t*9|t*7L"); None where the split is even."""
    return None if plan.pp == 1 or is_even(plan) else layout_string(plan.stages, plan.model.mtp_num_layers)


def span_stack(model: Architecture, kind: str) -> str:
    """Encoder and decoder are a block of their own in megatron-core; a decoder's kinds of layers share one."""
    return kind if model.stack == "encoder_decoder" else "block"


def _modes(spans: Sequence[LayerSpan]) -> list[Recompute]:
    return [span.recompute for span in spans for _ in range(span.count)]


def _full_block(modes: Sequence[Recompute]) -> int | None:
    """How many layers at the front are recomputed in full and the rest not at all; None: another pattern."""
    runs = [(mode, len(list(group))) for mode, group in groupby(modes)]
    if not runs:
        return 0
    if len(runs) == 1 and runs[0][0] in ("none", "full"):
        return runs[0][1] if runs[0][0] == "full" else 0
    if len(runs) == 2 and (runs[0][0], runs[1][0]) == ("full", "none"):
        return runs[0][1]
    return None


def recompute_fields(plan: Plan, stage: int) -> dict[str, Any]:
    """Recompute of one stage in TransformerConfig's words; one setting serves all chunks of the rank.

    Every rank builds its own TransformerConfig, so stages may differ. Within a chunk (an encoder-decoder's encoder and decoder are two)
    megatron-core can recompute the first N layers in full ("block", transformer_block.py:532-560) or the same modules of all of them,
    nothing else. Raises InputError for another pattern.
    """
    stacks = [span_stack(plan.model, span.kind) for chunk in range(plan.vpp) for span in layers_of(plan, stage, chunk)]
    chunks = [
        _modes([span for span in layers_of(plan, stage, chunk) if span_stack(plan.model, span.kind) == stack])
        for chunk in range(plan.vpp)
        for stack in dict.fromkeys(stacks)
    ]
    used = {mode for modes in chunks for mode in modes}
    off: dict[str, Any] = {
        "recompute_granularity": None, "recompute_method": None, "recompute_num_layers": None, "recompute_modules": None,
    }  # fmt: skip
    if used <= {"none"} or plan.schedule == "deepspeed_1f1b":
        return off  # DeepSpeed's pipeline has a list of its layers (ds_pipeline.py)
    if len(used) == 1 and (modules := RECOMPUTE_MODULES.get(*used)) is not None:
        return off | {"recompute_granularity": "selective", "recompute_modules": recompute_modules(plan, modules)}
    blocks = [_full_block(modes) for modes in chunks]
    wanted = max((block for block in blocks if block is not None), default=0)
    if None in blocks or any(block != min(wanted, len(modes)) for block, modes in zip(blocks, chunks, strict=True)):
        raise InputError(
            f"stages[{stage}].recompute",
            " ".join(",".join(modes) for modes in chunks),
            "megatron-core recomputes the first N layers of every chunk in full, or the same modules in all of a stage, nothing else",
        )
    return off | {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": wanted}


def recompute_modules(plan: Plan, modules: Sequence[str]) -> list[str]:
    """These modules to recompute by Megatron's names. megatron-core calls the feed-forward "moe" in layers with experts, whose forward does
    the recompute (transformer_layer.py:445, moe/moe_layer.py:432). The combined 1F1B calls that layer's parts instead
    (fine_grained_callables.py:509): there `mlp` is that of layers without experts alone."""
    experts = plan.model.experts and not plan.overlap_moe_expert_parallel_comm
    return [*modules, "moe"] if experts and "mlp" in modules else list(modules)


def common_fields(plan: Plan, *, own_ddp: bool) -> dict[str, Any]:
    """TransformerConfig's arguments that all ranks share. `own_ddp`: gradients are summed by megatron-core's own data parallelism. An
    encoder-decoder's encoder takes the same with `encoder_num_layers`."""
    model, training, software = plan.model, plan.training, plan.cluster.software
    on_cpu = plan.cluster.is_cpu
    te = software.transformer_engine and not on_cpu
    apex = software.apex and not on_cpu
    dtype = TORCH_DTYPE[training.precision]
    latent = megatron_parts.latent_attention(model) is not None
    fields: dict[str, Any] = {
        "num_layers": model.decoder_num_layers if model.stack == "encoder_decoder" else model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_query_groups": model.num_attention_heads if latent else model.query_groups,
        "kv_channels": model.head_dim,
        "ffn_hidden_size": model.ffn_hidden_size,
        "normalization": model.normalization,
        "layernorm_epsilon": model.norm_epsilon,
        "gated_linear_unit": model.gated,
        "activation_func": ACTIVATION[model.activation],
        "add_bias_linear": model.add_bias_linear,
        "add_qkv_bias": model.add_qkv_bias,
        "hidden_dropout": model.hidden_dropout,
        "attention_dropout": model.attention_dropout,
        "bf16": training.precision in ("bf16", "fp8"),
        "fp16": training.precision == "fp16",
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "tensor_model_parallel_size": plan.tp,
        "pipeline_model_parallel_size": plan.pp,
        "virtual_pipeline_model_parallel_size": plan.vpp if plan.vpp > 1 else None,
        "context_parallel_size": plan.cp,
        "expert_model_parallel_size": plan.ep,
        "sequence_parallel": plan.sequence_parallel,
        "pipeline_model_parallel_layout": layout(plan),
        # Interleaving over two stages is silently wrong with batched sends (README "silently wrong" 1); the CLI does the same for any pp.
        "overlap_p2p_comm": plan.vpp > 1,
        "batch_p2p_comm": plan.vpp == 1,
        # Needs Apex' fused_weight_gradient_mlp_cuda (tensor_parallel/layers.py:925); DeepSpeed reads param.grad, which it leaves empty.
        "gradient_accumulation_fusion": apex and own_ddp and not plan.megatron_fsdp,
        "bias_activation_fusion": not on_cpu and fuses_activation(model),
        "bias_dropout_fusion": not on_cpu,
        # That kernel has the causal mask only: it would forget a window, and is asked before it (fusions/fused_softmax.py:245).
        "masked_softmax_fusion": apex and "window" not in model.features(),
        "persist_layer_norm": apex,
        # Latent attention's fused rotation knows YaRN's frequencies alone (transformer_config.py:2068).
        "apply_rope_fusion": te and model.position_embedding == "rope" and not latent,
        "attention_softmax_in_fp32": True,
        "use_cpu_initialization": on_cpu,
        "transformer_impl": implementation(plan),
    }
    if plan.microbatch_group_size_per_vp_stage is not None:
        fields["microbatch_group_size_per_vp_stage"] = plan.microbatch_group_size_per_vp_stage
    if plan.cp > 1:
        fields["cp_comm_type"] = plan.cp_comm_type
    sizes = hierarchical_sizes(plan)
    if sizes is not None:
        fields["hierarchical_context_parallel_sizes"] = sizes
    if plan.tp_comm_overlap:
        fields["tp_comm_overlap"] = True
    if plan.cuda_graph_impl != "none":
        fields["cuda_graph_impl"] = plan.cuda_graph_impl
    if plan.fp8_param_gather:
        fields["fp8_param"] = True
    return fields | megatron_parts.config_fields(model) | expert_parallel_fields(plan) | fp8_fields(plan)


def fuses_activation(model: Architecture) -> bool:
    """Whether one kernel adds the bias and computes the activation on a GPU. That of quick_gelu weighs by the router's scores as well,
    which experts alone have, and shared ones have not (transformer/mlp.py:171-206); Megatron-LM takes none without a bias then."""
    if model.activation == "clamped_swiglu":
        parts = [layer.feed_forward for layer in model.each_layer()]
        return model.add_bias_linear and all(isinstance(part, Experts) and not part.shared_ffn_hidden_size for part in parts)
    return model.activation in FUSABLE_ACTIVATIONS and (model.gated or model.add_bias_linear)


GROUPED_COMPUTE_CAPABILITY: Final = 8.0
"""First compute capability of the GPUs on which one kernel multiplies the tokens of all experts."""


OVERLAPS: Final = ("moe_shared_expert_overlap", "overlap_moe_expert_parallel_comm", "delay_wgrad_compute")


def expert_parallel_fields(plan: Plan) -> dict[str, Any]:
    """How experts are divided and computed; empty in a dense model. Products of all experts at once are Transformer Engine's, from Ampere
    on (training/arguments.py:852)."""
    if not plan.model.experts:
        return {}
    te = implementation(plan) == "transformer_engine"
    return {name: True for name in OVERLAPS if getattr(plan, name)} | {
        "expert_tensor_parallel_size": plan.etp,
        "moe_token_dispatcher_type": plan.moe_token_dispatcher_type,
        "moe_grouped_gemm": te and float(plan.cluster.gpu.compute_capability) >= GROUPED_COMPUTE_CAPABILITY,
        "moe_permute_fusion": te,
    }


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


def model_fields(plan: Plan) -> dict[str, Any]:
    """Arguments of GPTModel, BertModel or T5Model beside the config, the specs, pre_process, post_process and vp_stage."""
    model = plan.model
    fields: dict[str, Any] = {
        "vocab_size": padded_vocab_size(plan),
        "max_sequence_length": model.max_position_embeddings,
        "position_embedding_type": model.position_embedding,
        "share_embeddings_and_output_weights": model.tie_embeddings,
        "parallel_output": True,
    }
    if model.position_embedding == "rope":
        fields["rotary_percent"] = model.rotary_percent
        if model.stack == "decoder":
            fields["rotary_base"] = model.rotary_base
            fields["rope_scaling"] = model.rope_scaling_factor is not None
            if model.rope_scaling_factor is not None:
                fields["rope_scaling_factor"] = model.rope_scaling_factor
    if model.stack == "encoder":
        fields["num_tokentypes"] = model.num_token_types
        fields["add_binary_head"] = False
    return fields


def ddp_fields(plan: Plan) -> dict[str, Any]:
    """The arguments of DistributedDataParallelConfig. Overlap needs a second stream to run on: not on a CPU."""
    shared = plan.dp * plan.cp > 1
    can_overlap = shared and not plan.cluster.is_cpu
    overlap = can_overlap and plan.overlap_grad_reduce
    sharded = plan.zero_stage >= 1
    more: dict[str, Any] = {}
    if plan.optimizer_instances > 1:
        more["num_distributed_optimizer_instances"] = plan.optimizer_instances
    if plan.megatron_fsdp:
        more |= {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": FSDP_STRATEGY[plan.zero_stage]}
    if plan.delay_wgrad_compute:
        more["delay_wgrad_compute"] = True
    if plan.reduce_scatter_with_fp32_accumulation:
        more["reduce_scatter_with_fp32_accumulation"] = True
    if plan.fp8_param_gather:
        more |= {"fp8_param_gather": True} | ({"reuse_grad_buf_for_mxfp8_param_ag": True} if gathers_in_gradients(plan) else {})
    return more | {
        "grad_reduce_in_fp32": plan.training.grad_reduce_dtype == "fp32",
        "overlap_grad_reduce": overlap,
        # The gathers are started by the hooks of the overlapped reduction (arguments.py:597).
        "overlap_param_gather": overlap and sharded and plan.overlap_param_gather,
        "use_distributed_optimizer": sharded,
        # Under dynamic loss scaling an overflow is a step to skip, not an error (Megatron-LM's arguments.py does the same).
        "check_for_nan_in_grad": plan.training.precision != "fp16",
        "bucket_size": max(DDP_MIN_BUCKET_ELEMENTS, DDP_BUCKET_ELEMENTS_PER_RANK * plan.dp * plan.cp) if overlap else None,
        "average_in_collective": False,
    }


def optimizer_fields(plan: Plan) -> dict[str, Any]:
    """The arguments of OptimizerConfig. Adam's weight decay is decoupled (AdamW)."""
    training = plan.training
    overlap = ddp_fields(plan)["overlap_param_gather"]
    more: dict[str, Any] = {"fp8_recipe": fp8_fields(plan)["fp8_recipe"]} if training.precision == "fp8" else {}
    if gathers_in_gradients(plan):
        more["reuse_grad_buf_for_mxfp8_param_ag"] = True
    if training.precision_aware_optimizer:
        more |= {
            "use_precision_aware_optimizer": True,
            "main_grads_dtype": TORCH_DTYPE[training.grad_reduce_dtype],
            "exp_avg_dtype": MOMENT_DTYPE[training.exp_avg_dtype],
            "exp_avg_sq_dtype": MOMENT_DTYPE[training.exp_avg_sq_dtype],
        }
    return more | {
        "optimizer": "adam" if training.optimizer == "adamw" else "sgd",
        "lr": training.lr,
        "min_lr": training.min_lr,
        "weight_decay": training.weight_decay,
        "adam_beta1": training.betas[0],
        "adam_beta2": training.betas[1],
        "adam_eps": training.eps,
        "decoupled_weight_decay": True,
        "sgd_momentum": 0.0,
        "clip_grad": training.clip,
        "bf16": training.precision in ("bf16", "fp8"),
        "fp16": training.precision == "fp16",
        "params_dtype": TORCH_DTYPE[training.precision],
        "use_distributed_optimizer": plan.zero_stage >= 1,
        "overlap_param_gather": overlap,
    }


def module_fields(plan: Plan) -> dict[str, Any]:
    """Which class and which layer specs: what is not an argument of either."""
    fields: dict[str, Any] = {"class": MODEL_CLASS[plan.model.stack], "implementation": implementation(plan)}
    if plan.model.stack == "encoder_decoder":
        fields["encoder_num_layers"] = plan.model.num_layers
        fields["decoder_num_layers"] = plan.model.decoder_num_layers
    return fields


def engine_fields(plan: Plan, sections: Collection[str]) -> dict[str, Any]:
    """The content of engine.json: what workers build from and tests check.

    "transformer_config": arguments common to all ranks; "per_stage": what each pipeline stage adds or changes; "module": class and
    layer specs; "model": constructor arguments; "ddp" and "optimizer": megatron-core's own data parallelism and optimizer, where the
    engine's `sections` have them.
    """
    return {
        "engine": plan.engine,
        "module": module_fields(plan),
        "transformer_config": common_fields(plan, own_ddp="ddp" in sections),
        "per_stage": [recompute_fields(plan, stage) for stage in range(plan.pp)],
        "model": model_fields(plan),
        "ddp": ddp_fields(plan) if "ddp" in sections else None,
        "optimizer": optimizer_fields(plan) if "optimizer" in sections else None,
    }
