"""The engines' refusals as rules that the planner applies before anything is priced.

Each names the engine's own rule (its id in the tables of facts, the file and line of megatron-core 0.16.1, Megatron-LM core_v0.16.1 or
DeepSpeed 0.19.8) and says in numbers what is wrong. `needs` lists what a check reads, in the decision tree's words, so that the tree can
cut as soon as that much is fixed; "model" is what is given: model, training and cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final

from orchestrator.hardware.spec import Software
from orchestrator.model.parts.experts import Experts
from orchestrator.model.spec import Architecture
from orchestrator.strategy.axes.cp import inner_size
from orchestrator.strategy.capabilities import Rule, Situation
from orchestrator.strategy.spec import PP_BEFORE_DP, RANK_ORDER, RECOMPUTE_MODULES, Candidate, Recompute, said_options

Check = Callable[[Candidate, Situation], str | None]

MEGATRON_ORDERS: Final = (RANK_ORDER, PP_BEFORE_DP)
"""What initialize_model_parallel is given (training/initialize.py:378)."""

ENDS: Final = ("embedding", "head")
"""What Megatron does not count as a layer."""

MIN_BF16_COMPUTE_CAPABILITY: Final = 8.0
"""Ampere is the first GPU with bf16 arithmetic (CUDA C programming guide, "Arithmetic Instructions")."""


def fused_attention(software: Software) -> bool:
    """Whether megatron-core's layers keep no scores: with Transformer Engine. Its own DotProductAttention (models/backends.py:113) makes
    them all, and the flash-attn package serves its inference alone (transformer/attention.py:94)."""
    return software.transformer_engine


PINNED_WITH_FUSED_ATTENTION: Final[tuple[Recompute, ...]] = ("selective",)
"""Megatron's --recompute-activations drops the scores. Fused attention keeps none, only their logsumexp: 0.1% of a layer, for the whole
attention again (transformer_config.py:1224 says that it is needless)."""


def pipelined_layers(situation: Situation) -> int:
    """Transformer layers that a pipeline may divide."""
    architecture = situation.model.architecture
    return architecture.num_layers + architecture.decoder_num_layers


def sequence_lengths(situation: Situation) -> dict[str, int]:
    """By the name of the key that sets it."""
    lengths = {"seq_length": situation.model.seq_length}
    if situation.model.decoder_seq_length:
        lengths["decoder_seq_length"] = situation.model.decoder_seq_length
    return lengths


def _divides(part: int, name: str, whole: int, whole_name: str) -> str | None:
    return None if whole % part == 0 else f"{name}={part} does not divide {whole_name}={whole}"


# What is given: model, training, cluster.


def precision(engine: str, precisions: Collection[str]) -> Check:
    def check(_: Candidate, situation: Situation) -> str | None:
        wanted, gpu = situation.training.precision, situation.cluster.gpu
        if wanted not in precisions:
            return f"{engine} offers precision {', '.join(precisions)} here, not {wanted}"
        if situation.cluster.is_cpu:
            return f"{wanted} does not run on a CPU" if wanted in ("fp16", "fp8") else None
        if wanted == "bf16" and float(gpu.compute_capability) < MIN_BF16_COMPUTE_CAPABILITY:
            return f"{gpu.name} has compute capability {gpu.compute_capability}: bf16 needs {MIN_BF16_COMPUTE_CAPABILITY}; use fp16"
        return None

    return check


def positions(_: Candidate, situation: Situation) -> str | None:
    available = situation.model.architecture.max_position_embeddings
    for name, length in sequence_lengths(situation).items():
        if length > available:
            return f"{name}={length} is above max_position_embeddings={available}"
    return None


def head_width(_: Candidate, situation: Situation) -> str | None:
    a = situation.model.architecture
    if a.kv_channels is not None:
        return None
    return _divides(a.num_attention_heads, "num_attention_heads", a.hidden_size, "hidden_size")


def head_groups(_: Candidate, situation: Situation) -> str | None:
    a = situation.model.architecture
    return _divides(a.query_groups, "num_query_groups", a.num_attention_heads, "num_attention_heads")


def no_query_groups(_: Candidate, situation: Situation) -> str | None:
    a = situation.model.architecture
    if a.stack == "decoder" or a.query_groups == a.num_attention_heads:
        return None
    return f"num_query_groups={a.query_groups} of {a.num_attention_heads} heads: megatron-core's {a.family} has no grouped queries"


def position_kind(_: Candidate, situation: Situation) -> str | None:
    a = situation.model.architecture
    kinds = {
        "decoder": ("learned_absolute", "rope", "none"),
        "encoder": ("learned_absolute", "rope"),
        "encoder_decoder": ("learned_absolute", "rope", "relative"),
    }[a.stack]
    if a.position_embedding in kinds:
        return _rotary_base(a)
    return f"position_embedding={a.position_embedding}: megatron-core's {a.family} has {', '.join(kinds)}"


ROTARY_BASE: Final = 10000
"""RotaryEmbedding's default. BertModel and T5Model give it no other, and no scaling (bert_model.py:118, t5_model.py:206)."""


def _rotary_base(a: Architecture) -> str | None:
    if a.position_embedding != "rope" or a.stack == "decoder":
        return None
    if a.rotary_base != ROTARY_BASE:
        return f"rotary_base={a.rotary_base}: megatron-core's {a.family} has {ROTARY_BASE}"
    return None if a.rope_scaling_factor is None else f"rope_scaling_factor={a.rope_scaling_factor:g}: megatron-core's {a.family} has none"


def relative_attention(_: Candidate, situation: Situation) -> str | None:
    cluster = situation.cluster
    if situation.model.architecture.position_embedding != "relative" or (cluster.software.transformer_engine and not cluster.is_cpu):
        return None
    return "position_embedding=relative needs Transformer Engine's attention, on GPUs: megatron-core's own takes no bias"


def megatron_gradient_dtype(_: Candidate, situation: Situation) -> str | None:
    training = situation.training
    if training.grad_accum_dtype != training.grad_reduce_dtype:
        return (
            f"grad_accum_dtype={training.grad_accum_dtype} and grad_reduce_dtype={training.grad_reduce_dtype}: Megatron sums and "
            "reduces in one buffer of one type"
        )
    return gradient_dtype(_, situation)


def gradient_dtype(_: Candidate, situation: Situation) -> str | None:
    training = situation.training
    allowed = {"fp32", "bf16" if training.precision == "fp8" else training.precision}
    for name, dtype in (("grad_accum_dtype", training.grad_accum_dtype), ("grad_reduce_dtype", training.grad_reduce_dtype)):
        if dtype not in allowed:
            return f"{name}={dtype} with precision {training.precision}: {' or '.join(sorted(allowed))}"
    return None


MIN_FP8_COMPUTE_CAPABILITY: Final = {"delayed": 8.9, "tensorwise": 8.9, "blockwise": 9.0, "mxfp8": 10.0}
"""From which GPU on Transformer Engine has the recipe (its pytorch/fp8.py, check_fp8_support and its like)."""
FP8_MULTIPLES: Final = {"delayed": (8, 16), "tensorwise": (8, 16), "blockwise": (8, 16), "mxfp8": (32, 32)}
"""What tokens and features of an FP8 product must be multiples of (Transformer Engine's assert_dim_for_fp8_exec, MXFP8's blocks)."""


def fp8(_: Candidate, situation: Situation) -> str | None:
    training, cluster = situation.training, situation.cluster
    if training.precision != "fp8":
        return None
    if not cluster.software.transformer_engine or cluster.is_cpu:
        return "precision=fp8 needs Transformer Engine, on GPUs"
    recipe, has = training.fp8_recipe or "delayed", cluster.gpu.compute_capability
    least = MIN_FP8_COMPUTE_CAPABILITY[recipe]
    return None if float(has) >= least else f"fp8_recipe={recipe} needs compute capability {least}; {cluster.gpu.name} has {has}"


def fp8_features(candidate: Candidate, situation: Situation) -> str | None:
    training, a, tp = situation.training, situation.model.architecture, candidate.mesh.tp
    if training.precision != "fp8":
        return None
    unit = FP8_MULTIPLES[training.fp8_recipe or "delayed"][1]
    heads_in = a.num_attention_heads * a.head_dim
    widths = {
        "hidden_size": a.hidden_size,
        f"ffn_hidden_size/tp={tp}": a.ffn_hidden_size * (2 if a.gated else 1) / tp,
        f"num_attention_heads*kv_channels/tp={tp}": heads_in / tp,
        f"(num_attention_heads + 2*num_query_groups)*kv_channels/tp={tp}": (heads_in + 2 * a.query_groups * a.head_dim) / tp,
    }
    return next((f"fp8 products need widths that are multiples of {unit}: {k} is {v:g}" for k, v in widths.items() if v % unit), None)


def fp8_tokens(candidate: Candidate, situation: Situation) -> str | None:
    training, mesh = situation.training, candidate.mesh
    if training.precision != "fp8":
        return None
    unit = FP8_MULTIPLES[training.fp8_recipe or "delayed"][0]
    parts = mesh.cp * (mesh.tp if candidate.strategy.sequence_parallel else 1)
    for name, length in sequence_lengths(situation).items():
        if length * candidate.micro_batch_size / parts % unit:
            tokens = length * candidate.micro_batch_size / parts
            return f"fp8 products need a multiple of {unit} tokens: {name}={length} x micro_batch_size over {parts} ranks is {tokens:g}"
    return None


def precision_aware(candidate: Candidate, situation: Situation) -> str | None:
    training, cluster = situation.training, situation.cluster
    if not training.precision_aware_optimizer:
        return narrow_moments(candidate, situation)
    if training.optimizer != "adamw":
        return f"precision_aware_optimizer with optimizer={training.optimizer}: it is an Adam"
    if training.precision == "fp32":
        return "precision_aware_optimizer with precision=fp32: there is no narrower copy of the weights"
    if not cluster.software.transformer_engine or cluster.is_cpu:
        return "precision_aware_optimizer needs Transformer Engine's Adam, on GPUs"
    if candidate.strategy.zero_stage == 0:
        return "precision_aware_optimizer needs the distributed optimizer, zero_stage=1"
    return None


def narrow_moments(_: Candidate, situation: Situation) -> str | None:
    training = situation.training
    for name, dtype in (("exp_avg_dtype", training.exp_avg_dtype), ("exp_avg_sq_dtype", training.exp_avg_sq_dtype)):
        if dtype != "fp32" and not training.precision_aware_optimizer:
            return f"{name}={dtype} needs precision_aware_optimizer=true"
    return None


def no_precision_aware(candidate: Candidate, situation: Situation) -> str | None:
    if situation.training.precision_aware_optimizer:
        return "precision_aware_optimizer is Megatron's: this engine has DeepSpeed's optimizer"
    return narrow_moments(candidate, situation)


# The mesh.


def rank_order(candidate: Candidate, _: Situation) -> str | None:
    order = candidate.mesh.order
    return None if order == RANK_ORDER else f"rank order {'-'.join(order)}: the workers build {'-'.join(RANK_ORDER)}"


def megatron_rank_order(candidate: Candidate, _: Situation) -> str | None:
    mesh = candidate.mesh
    if mesh.order not in MEGATRON_ORDERS:
        return f"rank order {'-'.join(mesh.order)}: Megatron has {' and '.join('-'.join(order) for order in MEGATRON_ORDERS)}"
    expert_dp = mesh.expert_dp if mesh.ep * mesh.etp > 1 else mesh.dp * mesh.cp  # Megatron's etp is tp where none is given
    if mesh.order != RANK_ORDER and mesh.pp > 1 and expert_dp != mesh.dp:
        return f"expert_dp={expert_dp} is not dp={mesh.dp}, which rank order {'-'.join(mesh.order)} with a pipeline needs"
    return None


def world_divides(candidate: Candidate, situation: Situation) -> str | None:
    mesh, world = candidate.mesh, situation.cluster.num_gpus
    return _divides(mesh.tp * mesh.pp * mesh.cp, "tp*pp*cp", world, "world_size")


def world_filled(candidate: Candidate, situation: Situation) -> str | None:
    mesh, world = candidate.mesh, situation.cluster.num_gpus
    return None if mesh.world_size == world else f"tp*cp*dp*pp={mesh.world_size} is not the world size {world}"


def no_experts(candidate: Candidate, _: Situation) -> str | None:
    mesh = candidate.mesh
    return None if mesh.ep == mesh.etp == 1 else f"ep={mesh.ep} etp={mesh.etp}: a dense model has no experts"


def experts(candidate: Candidate, situation: Situation) -> str | None:
    """As transformer/moe/experts.py and parallel_state.py divide them; our prices hold where no expert is cut (etp=1)."""
    counts = expert_counts(situation.model.architecture)
    if not counts:
        return no_experts(candidate, situation)
    mesh = candidate.mesh
    if mesh.etp != 1:
        return f"etp={mesh.etp}: experts are priced whole, etp=1"
    return next((why for count in counts if (why := _divides(mesh.ep, "ep", count, "num_experts"))), None)


def expert_counts(a: Architecture) -> list[int]:
    """Different numbers of experts of a model's layers."""
    parts = (layer.feed_forward for layer in a.kinds_of_layers())
    return sorted({part.num_experts for part in parts if isinstance(part, Experts)})


def experts_fold(candidate: Candidate, _: Situation) -> str | None:
    mesh = candidate.mesh
    return _divides(mesh.ep, "ep", mesh.tp * mesh.cp * mesh.dp, "tp*cp*dp")


def experts_sequence(candidate: Candidate, situation: Situation) -> str | None:
    if candidate.mesh.tp == 1 or candidate.strategy.sequence_parallel or not expert_counts(situation.model.architecture):
        return None
    return f"tp={candidate.mesh.tp}: experts with tensor parallelism train with sequence_parallel=true only"


def heads(candidate: Candidate, situation: Situation) -> str | None:
    return _divides(candidate.mesh.tp, "tp", situation.model.architecture.num_attention_heads, "num_attention_heads")


def groups(candidate: Candidate, situation: Situation) -> str | None:
    tp, a = candidate.mesh.tp, situation.model.architecture
    if a.query_groups % tp and tp % a.query_groups:
        return f"tp={tp} neither divides num_query_groups={a.query_groups} nor is a multiple of it"
    return _divides(
        tp, "tp", (a.num_attention_heads + 2 * a.query_groups) * a.head_dim, "(num_attention_heads + 2*num_query_groups)*kv_channels"
    )


def ffn(candidate: Candidate, situation: Situation) -> str | None:
    return _divides(candidate.mesh.tp, "tp", situation.model.architecture.ffn_hidden_size, "ffn_hidden_size")


def sp_needs_tp(candidate: Candidate, _: Situation) -> str | None:
    strategy = candidate.strategy
    return "sequence_parallel needs tp above 1" if strategy.sequence_parallel and strategy.mesh.tp == 1 else None


def sp_sequence(candidate: Candidate, situation: Situation) -> str | None:
    mesh = candidate.mesh
    if not candidate.strategy.sequence_parallel:
        return None
    for name, length in sequence_lengths(situation).items():
        if length % (mesh.cp * mesh.tp):
            return f"sequence_parallel: tp*cp={mesh.tp * mesh.cp} does not divide {name}={length}"
    return None


def sp_norm(candidate: Candidate, situation: Situation) -> str | None:
    cluster, a = situation.cluster, situation.model.architecture
    if not candidate.strategy.sequence_parallel or cluster.is_cpu:
        return None
    if a.stack == "encoder":
        # Its head takes Apex' norm or torch's, never Transformer Engine's (models/bert/bert_lm_head.py:5-16).
        return None if cluster.software.apex else "sequence_parallel with bert needs Apex for the norm of its head"
    if cluster.software.transformer_engine:
        return None
    if a.normalization == "LayerNorm" and cluster.software.apex:
        return None
    return f"sequence_parallel with {a.normalization} needs Transformer Engine" + (" or Apex" if a.normalization == "LayerNorm" else "")


def cp_attention(candidate: Candidate, situation: Situation) -> str | None:
    cluster = situation.cluster
    if candidate.mesh.cp == 1 or (cluster.software.transformer_engine and not cluster.is_cpu):
        return None
    return f"cp={candidate.mesh.cp} needs Transformer Engine's attention, on GPUs"


def cp_sequence(candidate: Candidate, situation: Situation) -> str | None:
    cp = candidate.mesh.cp
    if cp == 1:
        return None
    return _divides(2 * cp, "2*cp", situation.model.seq_length, "seq_length")


def cp_family(candidate: Candidate, situation: Situation) -> str | None:
    a = situation.model.architecture
    if candidate.mesh.cp == 1 or a.stack == "decoder":
        return None
    return f"cp={candidate.mesh.cp}: nobody has tried context parallelism with {a.family} in Megatron"


def no_cp(candidate: Candidate, _: Situation) -> str | None:
    return None if candidate.mesh.cp == 1 else f"cp={candidate.mesh.cp}: this engine mode has no context parallelism"


def t5_pipeline(candidate: Candidate, situation: Situation) -> str | None:
    if candidate.mesh.pp == 1 or situation.model.architecture.stack != "encoder_decoder":
        return None
    return f"pp={candidate.mesh.pp}: Megatron has no pipeline for T5"


def stages_have_layers(candidate: Candidate, situation: Situation) -> str | None:
    chunks, layers = candidate.mesh.pp * candidate.vpp, pipelined_layers(situation)
    if chunks <= layers + 2:
        return None
    return f"pp*vpp={chunks} pipeline chunks for {layers} layers, embedding and head: some would be empty"


def vpp_needs_pp(candidate: Candidate, _: Situation) -> str | None:
    return "vpp above 1 needs pp above 1" if candidate.vpp > 1 and candidate.mesh.pp == 1 else None


def schedule_fits(candidate: Candidate, _: Situation) -> str | None:
    wanted = "interleaved" if candidate.vpp > 1 else "1f1b"
    return None if candidate.schedule == wanted else f"schedule={candidate.schedule}: vpp={candidate.vpp} runs {wanted}"


def deepspeed_schedules(candidate: Candidate, _: Situation) -> str | None:
    """megatron-core's 1F1B, or with a pipeline DeepSpeed's own."""
    if candidate.schedule == "deepspeed_1f1b" and candidate.vpp == 1:
        return None if candidate.mesh.pp > 1 else "schedule=deepspeed_1f1b needs pp above 1"
    return schedule_fits(candidate, _)


def megatron_pipeline_zero(candidate: Candidate, _: Situation) -> str | None:
    """Over megatron-core's schedule, which calls autograd itself, DeepSpeed's engine at stage 1 is told when to reduce; stage 0 is not."""
    stage = candidate.strategy.zero_stage
    if candidate.mesh.pp == 1 or candidate.schedule == "deepspeed_1f1b" or stage == 1:
        return None
    return f"zero_stage={stage} with schedule={candidate.schedule}: megatron-core's pipeline goes with zero_stage 1 under DeepSpeed"


def megatron_pipeline_fp16(candidate: Candidate, situation: Situation) -> str | None:
    if candidate.mesh.pp == 1 or candidate.schedule == "deepspeed_1f1b" or situation.training.precision != "fp16":
        return None
    return f"precision=fp16 with schedule={candidate.schedule}: DeepSpeed scales the loss in its own backward, which this one never calls"


def deepspeed_pipeline_zero(candidate: Candidate, situation: Situation) -> str | None:
    """At stage 0 bf16 gets BF16_Optimizer, which is stage 1 with bf16 sums, and fp16 is clipped by each stage's own norm."""
    strategy, precision = candidate.strategy, situation.training.precision
    if candidate.schedule != "deepspeed_1f1b" or strategy.zero_stage > 0 or precision == "fp32":
        return None
    return f"zero_stage=0 with schedule=deepspeed_1f1b is offered in fp32 only, not in {precision}: take zero_stage=1"


def no_vpp(candidate: Candidate, _: Situation) -> str | None:
    return None if candidate.vpp == 1 else f"vpp={candidate.vpp}: DeepSpeed's ZeRO under an interleaved schedule is not offered"


def vpp_microbatches(candidate: Candidate, _: Situation) -> str | None:
    if candidate.vpp == 1:
        return None
    return _divides(candidate.mesh.pp, "pp", candidate.num_microbatches, "num_microbatches")


def batch_divides(candidate: Candidate, situation: Situation) -> str | None:
    per_round = candidate.micro_batch_size * candidate.mesh.dp
    return _divides(per_round, "micro_batch_size*dp", situation.training.global_batch_size, "global_batch_size")


def batch_filled(candidate: Candidate, situation: Situation) -> str | None:
    samples = candidate.num_microbatches * candidate.micro_batch_size * candidate.mesh.dp
    wanted = situation.training.global_batch_size
    if samples == wanted:
        return None
    return f"num_microbatches*micro_batch_size*dp={samples} is not global_batch_size={wanted}"


# ZeRO and what goes with it.


def zero_offered(stages: Collection[int], fsdp: Collection[int] = ()) -> Check:
    """`fsdp`: the stages of Megatron-FSDP."""

    def check(candidate: Candidate, _: Situation) -> str | None:
        stage, offered = candidate.strategy.zero_stage, fsdp if candidate.strategy.megatron_fsdp else stages
        more = f", and {', '.join(map(str, fsdp))} with megatron_fsdp" if fsdp and offered is stages else ""
        return None if stage in offered else f"zero_stage={stage}: this engine mode has {', '.join(map(str, offered))}{more}"

    return check


def zero_with_pipeline(stages: Collection[int]) -> Check:
    def check(candidate: Candidate, _: Situation) -> str | None:
        stage, pp = candidate.strategy.zero_stage, candidate.mesh.pp
        if pp == 1 or stage in stages:
            return None
        return f"zero_stage={stage} with pp={pp}: a pipeline goes with zero_stage {', '.join(map(str, stages))} only"

    return check


# Recompute.


def recompute_mlp(candidate: Candidate, situation: Situation) -> str | None:
    mode = candidate.strategy.recompute
    if "mlp" not in RECOMPUTE_MODULES.get(mode, ()) or not situation.model.architecture.add_bias_linear:
        return None
    return f"recompute={mode} with add_bias_linear: the MLP's checkpoint gives its bias back as an output, and backward never ends"


def recompute_norms(candidate: Candidate, situation: Situation) -> str | None:
    mode, cluster = candidate.strategy.recompute, situation.cluster
    if "layernorm" not in RECOMPUTE_MODULES.get(mode, ()) or not cluster.software.transformer_engine or cluster.is_cpu:
        return None
    return f"recompute={mode}: Transformer Engine's norms are part of the linears behind them, so that layernorm recomputes nothing"


def recompute_attention(candidate: Candidate, situation: Situation) -> str | None:
    mode, cluster = candidate.strategy.recompute, situation.cluster
    fused = fused_attention(cluster.software) and not cluster.is_cpu
    if not fused or mode == "selective" or "core_attn" not in RECOMPUTE_MODULES.get(mode, ()):
        return None
    rest = "+".join(module for module in RECOMPUTE_MODULES[mode] if module != "core_attn")
    return f"recompute={mode}: flash attention keeps no scores that core_attn could drop; take {rest}"


def recompute_rules() -> tuple[Rule, ...]:
    """Rules on the modules that are recomputed, shared by the engine modes that build megatron-core models."""
    return (
        rule(
            "recompute_mlp_bias",
            "recompute_sel: core/transformer/transformer_layer.py:719, core/tensor_parallel/random.py:496 (README, silently wrong 9)",
            recompute_mlp,
            "model",
            "recompute",
        ),
        rule("recompute_fused_norm", "recompute_sel: core/transformer/transformer_layer.py:384", recompute_norms, "software", "recompute"),
        rule(
            "recompute_flash",
            "ours: core/transformer/transformer_config.py:1224 (core_attn is needless with fused attention)",
            recompute_attention,
            "software",
            "recompute",
        ),
    )


def optimizer_instances(candidate: Candidate, _: Situation) -> str | None:
    strategy, mesh = candidate.strategy, candidate.mesh
    size, group = strategy.zero_shard_size, mesh.dp * mesh.cp
    if size is None:
        return None
    if strategy.zero_stage != 1:
        return f"zero_shard_size={size} with zero_stage={strategy.zero_stage}: instances are of the distributed optimizer, zero_stage=1"
    return None if size < group and group % size == 0 else f"zero_shard_size={size} must be below dp*cp={group} and divide it"


# What the user chooses of the engine's own ways (`ENGINE_OPTIONS`).


def tp_comm_overlap(candidate: Candidate, situation: Situation) -> str | None:
    strategy, cluster, tp = candidate.strategy, situation.cluster, candidate.mesh.tp
    if not strategy.tp_comm_overlap:
        return None
    if not cluster.software.transformer_engine or cluster.is_cpu:
        return "tp_comm_overlap needs Transformer Engine's user buffers, on GPUs"
    if not strategy.sequence_parallel:
        return "tp_comm_overlap needs sequence_parallel"
    inner = cluster.levels[0]
    return None if tp <= inner.size else f"tp_comm_overlap: tp={tp} reaches beyond the {inner.size} GPUs of {inner.name}"


def cuda_graphs(candidate: Candidate, situation: Situation) -> str | None:
    strategy, cluster = candidate.strategy, situation.cluster
    if strategy.cuda_graph_impl == "none":
        return None
    if not cluster.software.transformer_engine or cluster.is_cpu:
        return f"cuda_graph_impl={strategy.cuda_graph_impl} needs Transformer Engine's random numbers, on GPUs"
    if strategy.recompute == "full":
        return f"cuda_graph_impl={strategy.cuda_graph_impl} with recompute=full: graphs of layers take recompute of modules only"
    modules, a = RECOMPUTE_MODULES.get(strategy.recompute, ()), situation.model.architecture
    for module, name, dropout in (("core_attn", "attention", a.attention_dropout), ("mlp", "hidden", a.hidden_dropout)):
        if module in modules and dropout:
            return f"cuda_graph_impl={strategy.cuda_graph_impl} with recompute={strategy.recompute} and {name}_dropout={dropout}"
    return None


def cp_kind(candidate: Candidate, situation: Situation) -> str | None:
    strategy, mesh, a = candidate.strategy, candidate.mesh, situation.model.architecture
    kind, shards = strategy.cp_comm_type, mesh.cp
    if kind == "p2p" or (kind == "all_gather" and mesh.cp > 1):
        return None
    if mesh.cp == 1:
        return f"cp_comm_type={kind} needs cp above 1"
    if kind == "a2a+p2p":
        shards = inner_size(mesh, situation.cluster.levels[0].size)
        if shards in (1, mesh.cp):
            return f"cp_comm_type={kind}: cp={mesh.cp} with tp={mesh.tp} is not of several inner network domains and within each"
    for name, heads in (("num_attention_heads", a.num_attention_heads), ("num_query_groups", a.query_groups)):
        if heads / mesh.tp % shards:
            return f"cp_comm_type={kind}: {shards} ranks do not divide {name}/tp={heads / mesh.tp:g}"
    return None


def dispatcher(candidate: Candidate, situation: Situation) -> str | None:
    kind = candidate.strategy.moe_token_dispatcher_type
    if kind == "alltoall" or "experts" in situation.model.architecture.features():
        return None
    return f"moe_token_dispatcher_type={kind}: a dense model has no experts"


def megatron_fsdp(candidate: Candidate, situation: Situation) -> str | None:
    strategy, mesh = candidate.strategy, candidate.mesh
    if not strategy.megatron_fsdp:
        return None
    if situation.cluster.is_cpu:
        return "megatron_fsdp needs GPUs"
    if mesh.pp > 1:
        return f"megatron_fsdp with pp={mesh.pp}: its mesh has no pipeline"
    return None if situation.training.optimizer == "adamw" else f"megatron_fsdp with optimizer={situation.training.optimizer}: Adam only"


def fp32_accumulation(candidate: Candidate, _: Situation) -> str | None:
    strategy = candidate.strategy
    if not strategy.reduce_scatter_with_fp32_accumulation:
        return None
    given = f"reduce_scatter_with_fp32_accumulation with zero_stage={strategy.zero_stage}"
    if strategy.zero_stage != 1 or strategy.megatron_fsdp:
        return f"{given}: it takes the place of the reduce-scatter of Megatron's distributed optimizer, zero_stage=1"
    if strategy.zero_shard_size is not None:
        return f"{given} and zero_shard_size={strategy.zero_shard_size}: Megatron has it for one instance of the optimizer"
    return None


def no_options(candidate: Candidate, _: Situation) -> str | None:
    said = said_options(candidate.strategy)
    return f"{', '.join(said)}: an option of engine=megatron" if said else None


def option_rules() -> tuple[Rule, ...]:
    """Rules on what the user chooses of Megatron's own ways."""
    return (
        rule(
            "tp_comm_overlap",
            "tp_comm_overlap: megatron/training/arguments.py:915; training/initialize.py _initialize_tp_communicators",
            tp_comm_overlap,
            "tp_comm_overlap",
            "tp",
            "sequence_parallel",
        ),
        rule("cuda_graphs", "core/transformer/transformer_config.py:1780-1829", cuda_graphs, "cuda_graph_impl", "recompute"),
        rule("cp_comm", "cp_comm: core/extensions/transformer_engine.py:1228-1252", cp_kind, "cp_comm_type", "tp", "cp"),
        rule("dispatcher", "moe_disp: core/transformer/transformer_config.py:1063-1095", dispatcher, "moe_token_dispatcher_type"),
        rule(
            "fp32_accumulation",
            "core/distributed/param_and_grad_buffer.py:158-165",
            fp32_accumulation,
            "reduce_scatter_with_fp32_accumulation",
            "zero_stage",
            "zero_shard_size",
        ),
        rule("mfsdp", "mfsdp: core/distributed/fsdp/mcore_fsdp_adapter.py:363-402", megatron_fsdp, "megatron_fsdp", "pp"),
    )


def no_shard_group(candidate: Candidate, _: Situation) -> str | None:
    size = candidate.strategy.zero_shard_size
    return None if size is None else f"zero_shard_size={size}: this engine mode shards over the whole data-parallel group"


def distributed_adam(candidate: Candidate, situation: Situation) -> str | None:
    optimizer, stage = situation.training.optimizer, candidate.strategy.zero_stage
    if stage == 0 or optimizer == "adamw":
        return None
    return f"optimizer={optimizer} with zero_stage={stage}: Megatron's distributed optimizer takes Adam only"


def no_offload(candidate: Candidate, _: Situation) -> str | None:
    return "offload_optimizer is not offered by this engine mode" if candidate.strategy.offload_optimizer else None


def offload(candidate: Candidate, situation: Situation) -> str | None:
    strategy = candidate.strategy
    if not strategy.offload_optimizer:
        return None
    if situation.cluster.is_cpu:
        return "offload_optimizer moves states out of a GPU's memory: here there is none"
    if strategy.zero_stage == 0:
        return "offload_optimizer needs zero_stage 1 or above"
    if strategy.mesh.pp > 1 and candidate.schedule != "deepspeed_1f1b":
        return f"offload_optimizer with pp={strategy.mesh.pp}: never tried under Megatron's pipeline schedule"
    if situation.training.optimizer != "adamw":
        return f"offload_optimizer with optimizer={situation.training.optimizer}: DeepSpeed offloads Adam"
    return None


def unsharded_accumulation(candidate: Candidate, situation: Situation) -> str | None:
    training = situation.training
    if candidate.strategy.zero_stage > 0 or training.grad_accum_dtype == training.precision:
        return None
    return f"zero_stage=0 sums gradients in {training.precision}; grad_accum_dtype={training.grad_accum_dtype} needs zero_stage 1 or above"


def rule(id: str, engine_rule: str, check: Check, *needs: str) -> Rule:
    return Rule(id=id, engine_rule=engine_rule, check=check, needs=needs)


def given(engine: str, precisions: Collection[str]) -> tuple[Rule, ...]:
    """Rules on what is given, shared by the engine modes that build megatron-core models."""
    return (
        rule(
            "precision",
            "DeepSpeed runtime/engine.py:2000 (fp16, bf16 on the device); rule fp8: arguments.py:655-669",
            precision(engine, precisions),
            "model",
        ),
        rule("seq_pos", "seq_pos: megatron/training/arguments.py:830", positions, "model"),
        rule("hidden_heads", "hidden_heads: megatron/training/arguments.py:814", head_width, "model"),
        rule("head_groups", "core/tensor_parallel/utils.py divide(), transformer/attention.py:300", head_groups, "model"),
        rule("no_gqa", "bert: core/models/bert; cross attention: core/transformer/attention.py CrossAttention", no_query_groups, "model"),
        rule(
            "position_embedding",
            "models/gpt/gpt_model.py, models/bert/bert_model.py, models/T5/t5_model.py: position_embedding_type",
            position_kind,
            "model",
        ),
        rule("relative_te", "core/transformer/dot_product_attention.py:159 (attention_bias)", relative_attention, "model"),
    )


def mesh_rules(order: Callable[[Candidate, Situation], str | None] = rank_order) -> tuple[Rule, ...]:
    """Rules on the mesh that every engine mode with megatron-core models has. `order`: the check of the rank order."""
    return (
        rule("rank_order", "rank_order: core/parallel_state.py:808-816", order, "pp", "ep", "etp", "dp", "rank_order"),
        rule("experts", "ep_basic: megatron/training/arguments.py:1025; core/transformer/moe/moe_layer.py:103", experts, "ep", "etp"),
        rule("experts_fold", "core/parallel_state.py: expert groups fold over tp x cp x dp", experts_fold, "tp", "cp", "ep", "dp"),
        rule("experts_sp", "core/transformer/moe/moe_layer.py:380", experts_sequence, "tp", "sequence_parallel"),
        rule("heads_tp", "heads_tp: core/transformer/transformer_config.py:924", heads, "tp"),
        rule("groups_tp", "groups_tp: core/transformer/transformer_config.py:939", groups, "tp"),
        rule("ffn_tp", "ffn_tp: core/tensor_parallel/layers.py:842,1166", ffn, "tp"),
        rule("t5_pp", "t5_pp: pretrain_t5.py:108", t5_pipeline, "pp"),
        rule("world_div", "world_div: core/parallel_state.py:741", world_divides, "tp", "pp", "cp"),
        rule("world_filled", "world_div: dp is what is left, core/parallel_state.py:744", world_filled, "tp", "pp", "cp", "dp"),
        rule("sp_needs_tp", "sp_needs_tp: core/model_parallel_config.py:409", sp_needs_tp, "sequence_parallel", "tp"),
        rule("sp_seq_div", "sp_seq_div: core/tensor_parallel/mappings.py", sp_sequence, "sequence_parallel", "tp", "cp"),
        rule(
            "sp_norm_local",
            "sp_norm_local: core/transformer/torch_norm.py:28-33, core/models/bert/bert_lm_head.py:5-16",
            sp_norm,
            "sequence_parallel",
        ),
        rule(
            "stages_have_layers",
            "ours: pp_layout allows empty stages (pipeline_parallel_layer_layout.py:24-151), which only wait",
            stages_have_layers,
            "pp",
            "vpp",
        ),
        rule("gbs_div", "gbs_div: core/num_microbatches_calculator.py:340", batch_divides, "dp", "micro_batch_size"),
        rule(
            "gbs_filled",
            "gbs_div: core/num_microbatches_calculator.py:340; DeepSpeed's triangle: runtime/config.py:456-475",
            batch_filled,
            "dp",
            "micro_batch_size",
            "num_microbatches",
        ),
    )
