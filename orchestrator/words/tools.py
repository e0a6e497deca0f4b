"""Languages of programs that people start around Megatron-core: settings of a file by path, as Megatron's own names (words/megatron.py).
`engines/tools.py` says a plan in them, `audit/megatron_yaml.py` reads a user's file. Each table names the release it was read from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any, Final, NamedTuple

from orchestrator.model.shared import GATED
from orchestrator.words import megatron as words
from orchestrator.words.megatron import ALIASES
from orchestrator.words.terms import NOTHING, Kind, Table, Term, kinds, named, same, section, short_type

Content = dict[str, Any]
Seen = dict[str, tuple[str, Any]]
"""The settings of a file, by Megatron's name (flag or field): their path in the file ("model.num_layers") and their value."""


class Tool(NamedTuple):
    """Where a kind of file has which of Megatron's settings."""

    kind: str
    """The kind of file, in words."""
    table: Table
    """Terms from a path of the file to Megatron's name."""
    sections: tuple[str, ...]
    """Sections whose settings have Megatron's own names, also such as no plan says."""
    others: tuple[str, ...] = ()
    """Sections of data, logs, checkpoints and tools."""
    own: frozenset[str] = frozenset()
    """Names in `sections` that mean something else than Megatron's."""
    known: Mapping[str, Kind] = {}
    """Names in `sections` that are none of Megatron's."""
    adapt: Callable[[Seen, Content], None] = lambda seen, content: None
    """Rewrites in place what the file says in several settings, from those seen so far and the whole file."""
    made: Mapping[str, Any] = {}
    """Defaults of the program, by Megatron's name."""
    homes: tuple[tuple[str, str], ...] = ()
    """Patterns of Megatron's names that are not in the table, with the section in which such a setting is written, the first that fits."""
    release: str = ""
    """What the table was read from; "": nothing is written for it."""
    start: str = ""
    """How a written file is used."""
    beside: Mapping[str, Any] = {}
    """What a written file says whatever the plan, by path."""
    off: Mapping[str, Any] = {}
    """Words for settings that are off, where a null would not say it."""
    nulls: bool = True
    """Whether a null in the file is read as one: else what is null is left out, as the program's defaults are."""
    nodes: tuple[str, str] | None = None
    """Paths of the number of nodes and of the GPUs of each."""

    def place(self, path: str) -> tuple[str | None, str]:
        """The section of Megatron's settings in which a path is, and its name there; (None, the path): it is in none."""
        section = max((one for one in self.sections if not one or path.startswith(f"{one}.")), key=len, default=None)
        return section, path.removeprefix(f"{section}.") if section else path

    def terms(self, field: str) -> Table:
        """Where and how a setting of Megatron's is written; none: the file has no place for it."""
        if found := [term for term in self.table if term.ours == field and ".encoder." not in term.theirs]:
            return found
        home = next((section for pattern, section in self.homes if fnmatchcase(field, pattern)), None)
        name = IN_YAML.get(field, field)
        return [] if home is None else [Term(f"{home}.{name}" if home else name, field)]


IN_YAML: Final = {flag: field for field, flag in ALIASES.items()}
"""TransformerConfig's names of settings whose flags are called otherwise, by the flag's."""
EXPERT_TP: Final = "expert_tensor_parallel_size"
"""The experts' own tp, for which Megatron takes tp where nothing says it, and some of these programs 1."""
PERMUTE_FUSION: Final = "moe_permute_fusion"
DATA_PARALLEL: Final = ("overlap_grad_reduce", "overlap_param_gather", "use_distributed_optimizer")
SIZES: Final = (
    "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size expert_model_parallel_size expert_tensor_parallel_size "
    "virtual_pipeline_model_parallel_size=num_virtual_stages_per_pipeline_rank sequence_parallel"
)
"""Sizes of the parallel groups, as TransformerConfig has them; like those below "theirs=ours", or one where both are the same."""
STAGES: Final = (
    "num_layers_in_first_pipeline_stage=decoder_first_pipeline_num_layers account_for_embedding_in_pipeline_split "
    "num_layers_in_last_pipeline_stage=decoder_last_pipeline_num_layers account_for_loss_in_pipeline_split "
    "pipeline_model_parallel_layout microbatch_group_size_per_vp_stage"
)
RECOMPUTE: Final = "recompute_granularity recompute_method recompute_num_layers recompute_modules"
FUSIONS: Final = (
    "apply_rope_fusion gradient_accumulation_fusion masked_softmax_fusion bias_dropout_fusion moe_permute_fusion moe_grouped_gemm"
)
LAYERS: Final = (
    f"{RECOMPUTE} {FUSIONS} cp_comm_type hierarchical_context_parallel_sizes cuda_graph_impl cuda_graph_modules moe_token_dispatcher_type "
    "moe_shared_expert_overlap attention_softmax_in_fp32 transformer_impl fine_grained_activation_offloading offload_modules"
)
"""What a plan chooses of TransformerConfig's fields beside sizes, stages, precision and overlaps."""
BALANCE: Final = "moe_router_load_balancing_type moe_aux_loss_coeff"
"""The loss that balances experts, which a plan's training says, and programs' recipes have otherwise (Megatron-Bridge's
models/qwen/qwen3_moe_bridge.py:65: 0.001, whatever a config.json says). Programs of reinforcement learning leave it out by themselves."""
OVERLAPS: Final = "tp_comm_overlap overlap_moe_expert_parallel_comm delay_wgrad_compute"
FP8: Final = "fp8 fp8_recipe fp8_param fp8_amax_history_len fp8_amax_compute_algo"
DDP: Final = (
    "overlap_grad_reduce overlap_param_gather num_distributed_optimizer_instances data_parallel_sharding_strategy "
    "reduce_scatter_with_fp32_accumulation fp8_param_gather=fp8_param reuse_grad_buf_for_mxfp8_param_ag bucket_size"
)
"""Fields of DistributedDataParallelConfig that a plan chooses."""
STATES: Final = ("main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
OPTIMIZER: Final = (
    "optimizer lr min_lr weight_decay adam_beta1 adam_beta2 adam_eps clip_grad sgd_momentum use_precision_aware_optimizer "
    "optimizer_cpu_offload optimizer_offload_fraction use_distributed_optimizer"
)
"""Fields of OptimizerConfig that a plan chooses, but for the types of its states."""
SCHEDULE: Final = "lr_decay_style lr_decay_iters lr_warmup_iters lr_wsd_decay_style lr_wsd_decay_iters"


def at(index: int, path: str, ours: str) -> Term:
    """A setting that is one of the numbers of a list."""

    def back(numbers: Any) -> Any:
        return numbers[index] if isinstance(numbers, list) and len(numbers) > index else NOTHING

    return Term(path, ours, to=lambda number: {index: number}, back=back)


def states(section: str, to: Callable[[str], Any] = lambda name: f"torch.{name}") -> Table:
    """The types of Adam's states; OptimizerConfig's are torch's."""
    return [Term(f"{section}.{name}" if section else name, name, to=to, back=str) for name in STATES]


def typed_by(path: str, bf16: str, fp16: str) -> Table:
    """One setting for the type of a training, with its words for both."""
    return [
        Term(path, "bf16", to=lambda on: bf16 if on else fp16, back=lambda said: "bf" in str(said)),
        Term(path, "fp16", to=lambda on: fp16 if on else bf16, back=lambda said: str(said) in (fp16, "fp16", "16")),
    ]


def reduced_in_fp32(path: str) -> Table:
    """The switch of DistributedDataParallelConfig in whose place the programs have one flag for bf16 and one for fp16."""
    return [
        Term(path, "grad_reduce_in_bf16", to=lambda on: not on, back=lambda said: not said),
        Term(path, "accumulate_allreduce_grads_in_fp32", back=bool),
    ]


def _activation(seen: Seen) -> None:
    """Reads TransformerConfig's two fields as one of our activations."""
    func = next((seen[name] for name in ("activation_func._target_", "activation_func") if name in seen), None)
    gated = seen.pop("gated_linear_unit", ("", False))[1]
    for name in ("activation_func._target_", "activation_func._call_", "activation_func"):
        seen.pop(name, None)
    if func is not None and (word := activation_of(func[1], bool(gated))) is not None:
        seen["activation"] = (func[0], word)


def activation_of(func: Any, gated: bool) -> str | None:
    """An activation of ours, by the function's name in torch or Megatron and whether a gate multiplies it; None: there is none.

    >>> activation_of("torch.nn.functional.silu", True), activation_of("squared_relu", False), activation_of("relu", False)
    ('swiglu', 'relu2', 'relu')
    """
    word = str(func).rpartition(".")[2].removeprefix("fast-").replace("-", "_").replace("swish", "silu")
    if gated and word in words.FUNCTION.values():
        return next((ours for ours, name in words.FUNCTION.items() if name == word and ours in GATED), None)
    return words.activation({word: True})


# ------------------------------------------------------------------------------------------------------------------- Bridge

BRIDGE_PRECISION: Final = {"delayed": "delayed", "current": "tensorwise", "mxfp8": "mxfp8", "subchannel": "blockwise"}


def _bridge(seen: Seen, content: Content) -> None:
    mixed = content.get("mixed_precision")
    if isinstance(mixed, str):  # training/mixed_precision.py: bf16_with_fp8_current_scaling_mixed, ...
        seen["bf16" if "bf16" in mixed else "fp16"] = ("mixed_precision", True)
        if "fp8" in mixed:
            word = next((word for word in BRIDGE_PRECISION if word in mixed), "delayed")
            seen |= {"fp8": ("mixed_precision", "hybrid"), "fp8_recipe": ("mixed_precision", BRIDGE_PRECISION[word])}
        if "fp4" in mixed:
            seen["fp4"] = ("mixed_precision", "e2m1")
    elif "bf16" not in seen and "fp16" not in seen:
        seen["bf16"] = ("", True)
    _activation(seen)
    data = content.get("dataset")
    for name in ("seq_length", "sequence_length"):
        if isinstance(data, dict) and data.get(name) is not None:
            seen.setdefault("seq_length", (f"dataset.{name}", data[name]))


BRIDGE_FREEZES: Final[Mapping[str, str]] = {
    "model.freeze_language_model": "language", "model.freeze_vision_model": "vision", "model.freeze_vision_projection": "projector",
}  # fmt: skip
"""The switches of Bridge's models that look at images which freeze a part, with the part (train.freeze)."""
BRIDGE_FROZEN: Final[tuple[tuple[str, tuple[str, ...]], ...]] = (
    (r"qwen35_vl_27b_pretrain_\w*mock_config", ("vision",)), (r"qwen35_vl_\w+_pretrain_\w*mock_config", ("vision", "language")),
    (r"qwen3_vl_\w+_pretrain_\w*config", ("vision", "language")),
)  # fmt: skip
"""Bridge's recipes that freeze parts where a file says nothing, by a pattern of their names, the first that holds, and the parts
(067f987: recipes/qwen_vl/h100/qwen35_vl.py, qwen3_vl.py; perf_recipes/qwen_vl/common.py trains Qwen3.5's, and leaves Qwen3-VL's)."""
BRIDGE: Final = Tool(
    kind="Megatron-Bridge's configuration",
    table=[
        *named("vocab_size tokenizer_type", "tokenizer."),
        *named("seq_length", "dataset."),
        # ConfigContainer.validate wants both lengths alike.
        *named(f"seq_length {SIZES} {STAGES} {LAYERS} {BALANCE} hybrid_layer_pattern", "model."),
        *named(f"{OVERLAPS} overlap_grad_reduce overlap_param_gather", "comm_overlap."),
        *named("micro_batch_size global_batch_size train_iters", "train."),
        *named(OPTIMIZER, "optimizer."),
        *states("optimizer"),
        *named(SCHEDULE, "scheduler."),
        *named(f"{DDP} use_distributed_optimizer use_megatron_fsdp", "ddp."),
        *named("use_megatron_fsdp use_tp_pp_dp_mapping", "dist."),
        *named("seed te_rng_tracker", "rng."),
        *named("ckpt_format", "checkpoint."),
        *named(f"bf16 fp16 {FP8} reuse_grad_buf_for_mxfp8_param_ag", "mixed_precision."),
        *reduced_in_fp32("mixed_precision.grad_reduce_in_fp32"),
    ],
    sections=("model", "train", "optimizer", "scheduler", "ddp", "dist", "rng", "mixed_precision"),
    others=("checkpoint", "logger", "profiling", "ft", "straggler", "nvrx_straggler", "inprocess_restart", "validation", "dataset", "peft",
            "tokenizer", "rerun_state_machine", "env_vars", "tensor_inspect", "optimizer_config_override_provider", "comm_overlap",
            "train.manual_gc_eval"),
    own=frozenset({"manual_gc_eval"}),  # steps here, and Megatron's switch
    known=kinds("bridge"),
    adapt=_bridge,
    made=dict.fromkeys((*DATA_PARALLEL, PERMUTE_FUSION), True) | {EXPERT_TP: 1},  # the latter in 28 of 32 files of recipes with experts
    release="Megatron-Bridge 0.6.2 (training/config.py, ConfigContainer; training/mixed_precision.py, comm_overlap.py)",
    start="override(recipe's ConfigContainer), or the words of bridge.sh behind scripts/training/run_recipe.py --recipe NAME",
)  # fmt: skip
"""Megatron-Bridge's configuration (training/config.py, ConfigContainer; `made`: recipes/common.py, and of the permutation what its bridges
give models with experts, models/qwen/qwen3_moe_bridge.py:68 say)."""


# --------------------------------------------------------------------------------------------------------------------- NeMo

SCHEDULES: Final = {"CosineAnnealing": "cosine", "WarmupAnnealing": "linear"}
DISTRIBUTED: Final = ("mcore_distributed_optim", "distributed_fused_adam")


def _precision(word: Any) -> str:
    """The switch of Lightning's precision: bf16, fp16 or fp32."""
    said = str(word).lower()
    return "bf16" if "bf16" in said else "fp16" if said.startswith("16") else "fp32"


OF_MODEL: Final[Table] = (
    *named(
        "encoder_seq_length=seq_length seq_length data.seq_length_dec=decoder_seq_length bias=add_bias_linear qkv_bias=add_qkv_bias "
        "rotary_percentage=rotary_percent scale_positional_embedding=use_rope_scaling tokenizer.type=tokenizer_type "
        "tokenizer.vocab_size=vocab_size override_vocab_size=vocab_size activations_checkpoint_granularity=recompute_granularity "
        "activations_checkpoint_method=recompute_method activations_checkpoint_num_layers=recompute_num_layers "
        "activations_checkpoint_recompute=recompute_modules ub_tp_comm_overlap=tp_comm_overlap gradient_clip_val=clip_grad "
        "optim.lr=lr optim.weight_decay=weight_decay optim.overlap_grad_sync=overlap_grad_reduce "
        "optim.overlap_param_sync=overlap_param_gather optim.eps=adam_eps optim.sched.warmup_steps=lr_warmup_iters "
        "optim.sched.min_lr=min_lr"
    ),
    Term("activation", "activation", back=lambda word: activation_of(word, False) or NOTHING),
    Term("position_embedding_type", "position_embedding_type",
         back=lambda word: "learned_absolute" if word == "learned_parameters" else word),
    Term("optim.name", "use_distributed_optimizer", back=lambda word: word in DISTRIBUTED,
         to=lambda on: DISTRIBUTED[0] if on else "fused_adam"),
    Term("optim.name", "optimizer", back=lambda word: "sgd" if word == "sgd" else "adam" if "adam" in str(word) else word),
    at(0, "optim.betas", "adam_beta1"),
    at(1, "optim.betas", "adam_beta2"),
    Term("optim.sched.name", "lr_decay_style", back=lambda word: SCHEDULES.get(word, word)),
)  # fmt: skip
"""Terms below model (nlp/language_modeling/conf/megatron_gpt_config.yaml)."""
OF_STACK: Final[Table] = (
    *OF_MODEL,
    *named("num_layers hidden_size ffn_hidden_size num_attention_heads kv_channels normalization hidden_dropout attention_dropout"),
)
"""Terms below one of the stacks of T5."""


def _nemo(seen: Seen, content: Content) -> None:
    if precision := content.get("trainer", {}).get("precision"):
        seen[_precision(precision)] = ("trainer.precision", True)
    _, layers = seen.get("recompute_num_layers", ("", None))
    if layers in (0, "0") or seen.get("recompute_granularity", ("", ""))[1] == "selective":
        seen.pop("recompute_num_layers", None)
    if "untie_embeddings_and_output_weights" not in seen:
        seen.setdefault("share_embeddings_and_output_weights", ("", True))  # megatron_gpt_model.py's default


NEMO: Final = Tool(
    kind="NeMo's configuration",
    table=[
        *(term._replace(theirs=f"model.{term.theirs}") for term in OF_MODEL),
        *named("gradient_clip_val=clip_grad max_steps=train_iters", "trainer."),
        *(term._replace(theirs=f"model.{part}.{term.theirs}", ours=prefix + term.ours)
          for part, prefix in (("encoder", ""), ("decoder", "decoder_")) for term in OF_STACK),
    ],
    sections=("model",),
    homes=(("*", "model"),),
    others=("run", "trainer", "exp_manager", "hydra", "defaults", "model.data", "model.nsys_profile", "model.tokenizer", "cluster",
            "data_dir", "name", "restore_from_path", "model.optim", "model.encoder", "model.decoder"),
    known=kinds("nemo"),
    adapt=_nemo,
    nodes=("trainer.num_nodes", "trainer.devices"),
)  # fmt: skip


def _nemo2(seen: Seen, content: Content) -> None:
    plugin = content.get("trainer", {}).get("plugins")
    precision = content.get("trainer", {}).get("precision") or (plugin if isinstance(plugin, dict) else {}).get("precision")
    if precision and "bf16" not in seen and "fp16" not in seen:
        seen[_precision(precision)] = ("trainer.plugins.precision", True)
    _activation(seen)


ANNEALING: Final = {"cosine": "CosineAnnealingScheduler"}
"""Schedules by the classes of nemo/lightning/pytorch/optim/lr_scheduler.py: that which begins and ends where the plan says."""


def _annealed(scheduler: Any) -> Any:
    return next((style for style, name in ANNEALING.items() if name in str(scheduler)), NOTHING)


NEMO2: Final = Tool(
    kind="NeMo 2's recipe",
    table=[
        *named("global_batch_size micro_batch_size seq_length", "data."),
        Term("optim.lr_scheduler._target_", "lr_decay_style", to=lambda style: ANNEALING.get(style, NOTHING), back=_annealed),
        *named("warmup_steps=lr_warmup_iters max_steps=lr_decay_iters min_lr", "optim.lr_scheduler."),
        *named("max_steps=train_iters", "trainer."),
        *typed_by("trainer.plugins.precision", "bf16-mixed", "16-mixed"),
        *named("fp8 fp8_recipe fp8_params=fp8_param fp8_amax_history_len fp8_amax_compute_algo reuse_grad_buf_for_mxfp8_param_ag",
               "trainer.plugins."),
        *reduced_in_fp32("trainer.plugins.grad_reduce_in_fp32"),
        *named(f"{SIZES} {STAGES} use_tp_pp_dp_mapping num_distributed_optimizer_instances", "trainer.strategy."),
        *named("use_te_rng_tracker=te_rng_tracker", "trainer.strategy."),
        Term("trainer.strategy.fsdp", "use_megatron_fsdp", to=lambda on: "megatron" if on else None, back=lambda said: said == "megatron"),
        *named(f"{DDP} use_distributed_optimizer", "trainer.strategy.ddp."),
        # Its Megatron-core checks by these before the strategy sets the former and the plugin the latter.
        *named("tensor_model_parallel_size context_parallel_size expert_model_parallel_size expert_tensor_parallel_size", "model.config."),
        *named("sequence_parallel bf16 fp16", "model.config."),
        *named(f"{LAYERS.replace(' cuda_graph_modules', '')} {OVERLAPS} {BALANCE}", "model.config."),  # it has no such field
        *named(f"{OPTIMIZER.replace('min_lr ', '')} bf16 fp16", "optim.config."),
        *states("optim.config"),
    ],
    sections=("model.config", "trainer.strategy.ddp", "trainer.strategy", "optim.config"),
    others=("trainer", "log", "resume", "data", "executor", "tokenizer", "model.tokenizer", "model.optim", "optim", "peft"),
    known=kinds("nemo2"),
    adapt=_nemo2,
    # recipes/optim/adam.py, in all recipes; the classes of Qwen3, DeepSeek and GPT-OSS, not of Mixtral (gpt/model/qwen3.py:65)
    made={"lr_decay_style": "cosine", PERMUTE_FUSION: True},
    nodes=("trainer.num_nodes", "trainer.devices"),
    release="NeMo 2.6, 8cfedd7 (nemo/lightning/pytorch/strategies/megatron_strategy.py, plugins/mixed_precision.py)",
    start="override(pretrain_recipe()) before nemo_run starts it",
    beside={"optim.lr_scheduler.constant_steps": 0},
)  # fmt: skip
"""NeMo 2's recipes (nemo/collections/llm/recipes), as nemo_run writes one with --to-yaml."""
MEGATRON_LM: Final = Tool(
    kind="Megatron-LM's --yaml-cfg",
    table=(),
    sections=("", "language_model", "model_parallel"),
    homes=(("*batch_size", ""), *((name, "") for name in DATA_PARALLEL), ("*_parallel_size", "model_parallel"), ("*", "language_model")),
    known=kinds("megatron_yaml_cfg"),
    adapt=lambda seen, content: _activation(seen),
)
"""Megatron-LM's --yaml-cfg (examples/gpt3/gpt_config.yaml, megatron/training/yaml_arguments.py)."""


# --------------------------------------------------------------------------------------------------------------------- verl


def _verl(seen: Seen, content: Content) -> None:
    data = section(content, "data")
    parts = [data.get(name) for name in ("max_prompt_length", "max_response_length")]
    if all(isinstance(part, int) for part in parts):  # a sequence is a prompt and its response, or what a text may have at most
        seen.setdefault("seq_length", ("data.max_response_length", sum(parts)))
    responses = section(content, "actor_rollout_ref.rollout").get("n")
    of = section(content, ACTOR)
    tokens = of.get("ppo_max_token_len_per_gpu")
    _, length = seen.get("seq_length", ("", None))
    if of.get("use_dynamic_bsz") and isinstance(tokens, int) and isinstance(length, int):  # as many samples as these tokens are
        cp = seen.get("context_parallel_size", ("", 1))[1]
        samples = max(1, tokens * int(cp) // length)
        seen["micro_batch_size"] = f"{ACTOR}.ppo_max_token_len_per_gpu", 1 << samples.bit_length() - 1  # a power of two divides batches
    path, batch = seen.get("global_batch_size", ("", None))
    if isinstance(responses, int) and isinstance(batch, int):  # of prompts, of which each has so many responses (workers/engine_workers.py)
        seen["global_batch_size"] = path, batch * responses


def verl(actor: str, engine: str, batch: str, micro: str, **more: Any) -> Tool:
    """verl's configuration for Megatron. `actor`: above the optimizer; `engine`: of workers/config/engine.py's McoreEngineConfig; `batch`
    and `micro`: of the samples of a step, and of a pass."""
    layers, ddp, optim = f"{engine}.override_transformer_config", f"{engine}.override_ddp_config", f"{actor}optim"
    return Tool(
        kind="verl's configuration for Megatron",
        table=[
            Term(batch, "global_batch_size"),
            Term(micro, "micro_batch_size"),
            *named("total_training_steps=train_iters", "trainer."),
            *named(f"{SIZES} use_distributed_optimizer use_megatron_fsdp seed", f"{engine}."),
            *typed_by(f"{engine}.dtype", "bfloat16", "float16"),
            *named(f"{STAGES} {LAYERS} {OVERLAPS} {FP8}", f"{layers}."),
            *named(DDP.replace("num_distributed_optimizer_instances ", ""), f"{ddp}."),
            *reduced_in_fp32(f"{ddp}.grad_reduce_in_fp32"),
            *named("optimizer lr min_lr weight_decay clip_grad lr_decay_style lr_wsd_decay_style", f"{optim}."),
            *named("lr_decay_steps=lr_decay_iters lr_warmup_steps=lr_warmup_iters lr_wsd_decay_steps=lr_wsd_decay_iters", f"{optim}."),
            *named("use_precision_aware_optimizer", f"{optim}."),
            *states(optim, _in_short),
            at(0, f"{optim}.betas", "adam_beta1"),
            at(1, f"{optim}.betas", "adam_beta2"),
            *named("adam_eps sgd_momentum optimizer_cpu_offload optimizer_offload_fraction", f"{optim}.override_optimizer_config."),
            *named("reuse_grad_buf_for_mxfp8_param_ag", f"{optim}.override_optimizer_config."),
        ],
        sections=(engine, layers, ddp, optim, f"{optim}.override_optimizer_config"),
        others=("data", "algorithm", "reward", "reward_model", "custom_reward_function", "critic", "trainer", "global_profiler",
                "actor_rollout_ref.rollout", "actor_rollout_ref.ref", "actor_rollout_ref.model", "hydra", "defaults", "model", "checkpoint",
                "transfer_queue", "distillation", "profiler", "ray_kwargs"),
        known=kinds("verl"),
        adapt=_verl,
        made={
            "sequence_parallel": True, "use_distributed_optimizer": True, "bf16": True, "moe_token_dispatcher_type": "alltoall",
            "overlap_grad_reduce": False, "overlap_param_gather": False,
        },
        nodes=("trainer.nnodes", "trainer.n_gpus_per_node"),
        **more,
    )  # fmt: skip


def _in_short(name: str) -> Any:
    """A type as verl's PrecisionType takes it; NOTHING: it has none of 8 bits."""
    return NOTHING if short_type(name) == "fp8" else short_type(name)


ACTOR: Final = "actor_rollout_ref.actor"
VERL: Final = verl(
    f"{ACTOR}.", f"{ACTOR}.megatron", f"{ACTOR}.ppo_mini_batch_size", f"{ACTOR}.ppo_micro_batch_size_per_gpu",
    release="verl 0.10.0.dev, 1dda039 (verl/workers/config/engine.py, optimizer.py; workers/engine/megatron/transformer_impl.py)",
    start="python -m verl.trainer.main_ppo --config-path RUN --config-name verl, with your data, model and rewards behind it. A sequence "
    "is data.max_prompt_length and data.max_response_length; ppo_mini_batch_size counts prompts, each of rollout.n responses",
    beside={
        "hydra.searchpath": ["pkg://verl.trainer.config"], "defaults": ["ppo_trainer", {"override model_engine": "megatron"}, "_self_"],
        "actor_rollout_ref.rollout.n": 1, f"{ACTOR}.use_dynamic_bsz": False,
    },
)  # fmt: skip
VERL_SFT: Final = verl("", "engine", "data.train_batch_size", "data.micro_batch_size_per_gpu")
"""verl's supervised training (trainer/config/sft_trainer_engine.yaml), which is read alone."""


# ------------------------------------------------------------------------------------------------------------------ NeMo-RL


def _nemo_rl(seen: Seen, content: Content) -> None:
    """What `activation_checkpointing` turns on (models/megatron/setup.py, _apply_performance_config), and FP8's switch."""
    path, recomputes = seen.pop("activation_checkpointing", ("", False))
    if not recomputes:
        for name in RECOMPUTE.split():
            seen.pop(name, None)
    elif seen.setdefault("recompute_granularity", (path, "full"))[1] == "full":
        seen |= {"recompute_method": (path, "uniform"), "recompute_num_layers": (path, 1)}
        seen.pop("recompute_modules", None)
    if not seen.pop("fp8_enabled", ("", False))[1]:
        for name in FP8.split():
            seen.pop(name, None)


NEMO_RL: Final = Tool(
    kind="NeMo-RL's configuration for Megatron",
    table=[
        *named("train_global_batch_size=global_batch_size train_micro_batch_size=micro_batch_size max_total_sequence_length=seq_length",
               "policy."),
        *typed_by("policy.precision", "bfloat16", "float16"),
        *named("max_num_steps=train_iters seed", "sft."),
        *named(SIZES.replace("virtual_pipeline_model_parallel_size=num_virtual_stages_per_pipeline_rank ", ""), "policy.megatron_cfg."),
        *named("num_layers_in_first_pipeline_stage=decoder_first_pipeline_num_layers", "policy.megatron_cfg."),
        *named("num_layers_in_last_pipeline_stage=decoder_last_pipeline_num_layers", "policy.megatron_cfg."),
        Term("policy.megatron_cfg.activation_checkpointing", "activation_checkpointing"),
        *named("recompute_granularity recompute_modules moe_token_dispatcher_type moe_shared_expert_overlap moe_permute_fusion",
               "policy.megatron_cfg."),
        *named("moe_grouped_gemm apply_rope_fusion gradient_accumulation_fusion cuda_graph_impl", "policy.megatron_cfg."),
        *named("cuda_graph_modules transformer_impl fine_grained_activation_offloading offload_modules", "policy.megatron_cfg."),
        *named("pipeline_model_parallel_layout account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split",
               "policy.megatron_cfg.model_overrides."),
        *named(f"cp_comm_type hierarchical_context_parallel_sizes masked_softmax_fusion bias_dropout_fusion {OVERLAPS} moe_aux_loss_coeff",
               "policy.megatron_cfg.model_overrides."),
        *named("moe_router_load_balancing_type", "policy.megatron_cfg."),
        *named(f"{OPTIMIZER} bf16 fp16", "policy.megatron_cfg.optimizer."),
        *states("policy.megatron_cfg.optimizer", same),
        *named(SCHEDULE, "policy.megatron_cfg.scheduler."),
        *named("overlap_grad_reduce overlap_param_gather data_parallel_sharding_strategy",
               "policy.megatron_cfg.distributed_data_parallel_config."),
        *reduced_in_fp32("policy.megatron_cfg.distributed_data_parallel_config.grad_reduce_in_fp32"),
        Term("policy.megatron_cfg.fp8_cfg.enabled", "fp8_enabled"),
        *named("fp8 fp8_recipe fp8_param", "policy.megatron_cfg.fp8_cfg."),
    ],
    sections=("policy.megatron_cfg", "policy.megatron_cfg.model_overrides", "policy.megatron_cfg.optimizer",
              "policy.megatron_cfg.scheduler", "policy.megatron_cfg.distributed_data_parallel_config", "policy.megatron_cfg.fp8_cfg"),
    others=("sft", "grpo", "dpo", "ppo", "rm", "distillation", "checkpointing", "data", "env", "logger", "cluster", "loss_fn", "teacher",
            "policy.tokenizer", "policy.generation", "policy.dtensor_cfg", "policy.optimizer", "policy.scheduler", "value", "reward_model",
            "policy.megatron_cfg.env_vars", "policy.megatron_cfg.checkpoint", "defaults", "data_plane"),
    known=kinds("nemo_rl"),
    adapt=_nemo_rl,
    made={
        "use_distributed_optimizer": True, "bf16": True, "moe_token_dispatcher_type": "alltoall", "overlap_grad_reduce": True,
        "overlap_param_gather": True, "grad_reduce_in_bf16": True, "use_precision_aware_optimizer": True, EXPERT_TP: 1,
        PERMUTE_FUSION: True,
    },
    release="NeMo-RL 0.6.0, 7ea279a (nemo_rl/models/policy/__init__.py, MegatronConfig; nemo_rl/models/megatron/setup.py)",
    start="uv run examples/run_sft.py --config RUN/nemo_rl.yaml, over the file that `defaults` names, with your model and data behind "
    "it. With context parallelism it wants policy.sequence_packing.enabled=true",
    beside={
        "defaults": "/opt/nemo-rl/examples/configs/sft.yaml", "policy.dtensor_cfg.enabled": False, "policy.megatron_cfg.enabled": True,
        "policy.optimizer": None,
    },
    off={**dict.fromkeys(("recompute_granularity", "recompute_modules", "fp8", "cuda_graph_modules"), NOTHING),
         EXPERT_TP: 1},  # its classes take no null there (MasterConfig)
    nodes=("cluster.num_nodes", "cluster.gpus_per_node"),
)  # fmt: skip
"""NeMo-RL's configuration (examples/configs/sft.yaml, of which `made` are the defaults). It builds one model chunk a stage."""

# ------------------------------------------------------------------------------------------------------------------ ms-swift


def _swift(seen: Seen, content: Content) -> None:
    if "fp16" in seen and seen["fp16"][1]:
        seen["bf16"] = seen["fp16"][0], False
    if seen.get("recompute_granularity", ("", ""))[1] == "none":
        del seen["recompute_granularity"]
    elif "recompute_granularity" not in seen:
        seen["recompute_granularity"] = "", "selective"
    if seen.get("use_megatron_fsdp", ("", False))[1]:
        seen.setdefault("data_parallel_sharding_strategy", ("", "optim_grads_params"))


MS_SWIFT: Final = Tool(
    kind="ms-swift's arguments for Megatron",
    table=[
        *named(f"{SIZES} {RECOMPUTE} cp_comm_type moe_token_dispatcher_type moe_shared_expert_overlap moe_grouped_gemm moe_permute_fusion"),
        *named("decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers account_for_embedding_in_pipeline_split"),
        *named("account_for_loss_in_pipeline_split pipeline_model_parallel_layout microbatch_group_size_per_vp_stage"),
        *named("apply_rope_fusion gradient_accumulation_fusion masked_softmax_fusion bias_dropout_fusion attention_softmax_in_fp32"),
        *named(BALANCE),
        *named("tp_comm_overlap overlap_grad_reduce overlap_param_gather use_megatron_fsdp data_parallel_sharding_strategy"),
        *named(f"micro_batch_size global_batch_size train_iters max_length=seq_length seed te_rng_tracker {OPTIMIZER} {SCHEDULE}"),
        *states("", short_type),
        *named("bf16 fp16 accumulate_allreduce_grads_in_fp32 fp8_format=fp8 fp8_recipe fp8_param_gather=fp8_param"),
        *named("fp8_amax_history_len fp8_amax_compute_algo"),
    ],
    sections=("",),
    others=("dataset", "model", "ENV", "template"),
    own=frozenset({"loss_scale", "model_type"}),
    known=kinds("ms_swift"),
    adapt=_swift,
    made={
        "bf16": True, "use_distributed_optimizer": True, "moe_token_dispatcher_type": "alltoall", "overlap_grad_reduce": False,
        "overlap_param_gather": False, EXPERT_TP: 1, "global_batch_size": 16,
    },
    off={"recompute_granularity": "none"},
    nulls=False,  # swift/cli/main.py makes it the word None of a command line
    release="ms-swift 4.6.0.dev0, 3602360 (swift/megatron/arguments/megatron_args.py)",
    start="megatron sft RUN/ms_swift.yaml, with NNODES, NPROC_PER_NODE and the like set, and with your --model and --dataset",
)  # fmt: skip
"""ms-swift's Megatron-SWIFT: flags of `megatron sft` and the like, or the same in YAML."""

SLIME: Final = Tool(
    kind="slime command line",
    table=(),
    sections=(),
    release="slime, 624b824 (slime/utils/arguments.py; slime/backends/megatron_utils/arguments.py)",
    start="slime.sh with your rollout's, data's and checkpoint's arguments behind it, where ray runs; it counts its steps by rollouts",
)
"""slime, which takes Megatron-LM's own flags."""
TOOLS: Final[Mapping[str, Tool]] = {"bridge": BRIDGE, "nemo": NEMO2, "nemo_rl": NEMO_RL, "verl": VERL, "ms_swift": MS_SWIFT, "slime": SLIME}
"""Tools for which a plan of Megatron's is written, by the name that `write=` takes."""
