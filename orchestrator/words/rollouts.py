"""What programs of reinforcement learning are told beside the training half (words/tools.py): samples, generation and placement. The
subject of its tables is a `Rollout`; each names the release it was read from."""

from __future__ import annotations

from typing import Final, NamedTuple

from orchestrator.values import Value
from orchestrator.words.terms import Table, Term, fixed, named


class Rollout(Value, frozen=True, kw_only=True):
    """A step's samples, the engines that generate them, and where, as programs count them."""

    algorithm: str
    prompts: int
    samples: int
    response_length: int
    """Tokens at which a response is cut off."""
    prompt_length: int
    """Tokens of the longest prompt for which a sequence has room."""
    sequence_length: int
    """Tokens of the longest sequence, which a micro-batch has one of at least."""
    update_prompts: float
    """Prompts of an update, with their samples."""
    update_samples: int
    epochs: int
    micro_batch_tokens: int
    """Tokens of a micro-batch."""
    rank_tokens: int
    """Tokens of a micro-batch on one rank: its share of each sequence under context parallelism."""
    fsdp: bool
    """Whether the model is trained by the program's FSDP, not by Megatron."""
    reference: bool
    others_offload: bool
    """Whether weights of models that only go forward are in host memory while another computes."""
    tp: int
    dp: int
    expert_parallel: int
    """GPUs of an engine over which experts are divided as wholes; 1: each is divided by tp."""
    engine_gpus: int
    memory: float
    static_memory: float
    """Share of a GPU for weights and cache alone."""
    concurrency: int
    offloads: bool
    colocated: bool
    nodes: int
    gpus_per_node: int
    generation_gpus: int | None
    """GPUs that generate alone; None: those that train."""
    generation_nodes: int | None
    """Nodes that generate alone; None: they are not whole nodes, or none does."""
    generation_gpus_per_node: int | None
    staleness: int


class Language(NamedTuple):
    """How a program is told a rollout, and how its file is started."""

    table: Table
    start: str
    moved: tuple[tuple[str, str], ...] = ()
    """Sections of the training half's settings that are called otherwise here, (there, here)."""
    dropped: tuple[str, ...] = ()
    """Settings of the training half in whose place the table has others."""
    steps: str = ""
    """Path of the number of steps, which is said where the user says it."""
    critic: tuple[str, str] = ("", "")
    """Sections of the policy's settings and of the critic's, which has the same ones."""
    critic_moved: tuple[tuple[str, str], ...] = ()
    """Sections of the critic's that are called otherwise than the policy's, (there, here)."""
    critic_table: Table = ()
    """What is said of the critic's rollout beside its training, with rl.algorithm=ppo."""
    learning: tuple[str, ...] = ()
    """Ends of the paths by which the policy alone learns: a critic's are the program's own."""
    ppo: tuple[tuple[str, str], ...] = ()
    """What is called otherwise with rl.algorithm=ppo, (there, here), also in `start`."""


def _sleeping(megatron: str, fsdp: str) -> Table:
    """Where verl is told that states go to host memory while others use the GPU, with each of its engines."""
    return [
        *(
            Term(f"{megatron}.{states}_offload", "offloads", when=lambda rollout: not rollout.fsdp)
            for states in ("param", "grad", "optimizer")
        ),
        *(Term(f"{fsdp}.{states}_offload", "offloads", when=lambda rollout: rollout.fsdp) for states in ("param", "optimizer")),
    ]


ACTOR, REF = "actor_rollout_ref.actor", "actor_rollout_ref.ref"
VERL: Final = Language(
    table=[
        *named("train_batch_size=prompts max_prompt_length=prompt_length max_response_length=response_length", "data."),
        Term("algorithm.adv_estimator", "algorithm", to={"grpo": "grpo", "ppo": "gae"}.get),
        fixed("actor_rollout_ref.rollout.name", "vllm"),
        *named("n=samples tensor_model_parallel_size=tp data_parallel_size=dp expert_parallel_size=expert_parallel "
               "gpu_memory_utilization=memory max_num_seqs=concurrency", "actor_rollout_ref.rollout."),
        Term(f"{ACTOR}.ppo_mini_batch_size", "update_prompts", to=int),
        *named("ppo_max_token_len_per_gpu=rank_tokens ppo_epochs=epochs use_kl_loss=reference", f"{ACTOR}."),
        fixed(f"{ACTOR}.use_dynamic_bsz", True),
        *_sleeping(f"{ACTOR}.megatron", f"{ACTOR}.fsdp_config"),
        # Under Megatron it follows the policy's where nothing says it, under FSDP it stays (config/ref/megatron_ref.yaml, dp_ref.yaml).
        Term(f"{REF}.megatron.param_offload", "others_offload", when=lambda rollout: rollout.reference and not rollout.fsdp),
        Term(f"{REF}.fsdp_config.param_offload", "others_offload", when=lambda rollout: rollout.reference and rollout.fsdp),
        *named("nnodes=nodes n_gpus_per_node=gpus_per_node", "trainer."),
    ],
    start="python -m verl.trainer.main_ppo --config-path RUN --config-name verl_rl, with your model, data and rewards behind it",
    dropped=(f"{ACTOR}.ppo_micro_batch_size_per_gpu",),
    steps="trainer.total_training_steps",
    critic=(f"{ACTOR}.", "critic."),
    critic_moved=(("critic.fsdp_config.", "critic.fsdp."),),
    critic_table=[
        fixed("critic.use_dynamic_bsz", True),
        Term("critic.ppo_max_token_len_per_gpu", "rank_tokens"),
        *_sleeping("critic.megatron", "critic.fsdp"),
    ],
    learning=("optim.lr", "optim.min_lr", "optim.lr_decay_style", "optim.lr_decay_steps", "optim.lr_warmup_steps",
              "optim.weight_decay", "ppo_mini_batch_size"),
)  # fmt: skip
"""verl 0.10.0.dev, 1dda039 (trainer/config/ppo_trainer.yaml, rollout/rollout.yaml, actor/actor.yaml, engine/megatron.yaml)."""
NEMO_RL_CONFIGS: Final = {"grpo": "grpo_math_1B.yaml", "ppo": "ppo_math_1B_megatron.yaml"}
GENERATION, ASYNC = "policy.generation", "grpo.async_grpo"
NEMO_RL: Final = Language(
    table=[
        Term("defaults", "algorithm", to=lambda algorithm: f"/opt/nemo-rl/examples/configs/{NEMO_RL_CONFIGS[algorithm]}"),
        *named("num_prompts_per_step=prompts num_generations_per_prompt=samples", "grpo."),
        *named("train_global_batch_size=update_samples max_total_sequence_length=sequence_length", "policy."),
        fixed("policy.sequence_packing.enabled", True),
        *named("train_mb_tokens=micro_batch_tokens logprob_mb_tokens=micro_batch_tokens", "policy.sequence_packing."),
        Term(f"{GENERATION}.max_new_tokens", "response_length"),
        *named("tensor_parallel_size=tp expert_parallel_size=expert_parallel gpu_memory_utilization=memory", f"{GENERATION}.vllm_cfg."),
        Term(f"{GENERATION}.vllm_cfg.async_engine", "staleness", to=bool),
        Term(f"{GENERATION}.vllm_kwargs.max_num_seqs", "concurrency"),
        Term(f"{GENERATION}.colocated.enabled", "colocated"),
        *named("num_nodes=generation_nodes gpus_per_node=generation_gpus_per_node", f"{GENERATION}.colocated.resources."),
        *(Term(f"{ASYNC}.{name}", "staleness", to=bool) for name in ("enabled", "in_flight_weight_updates")),
        Term(f"{ASYNC}.max_trajectory_age_steps", "staleness", to=lambda steps: max(1, steps)),
        Term("loss_fn.use_importance_sampling_correction", "staleness", to=bool),
        Term("loss_fn.reference_policy_kl_penalty", "reference", to=lambda used: 0.01 if used else 0.0),
        Term("ppo.ppo_epochs", "epochs", when=lambda rollout: rollout.algorithm == "ppo"),
        Term("ppo.skip_reference_policy_logprobs_calculation", "reference", to=lambda used: not used,
             when=lambda rollout: rollout.algorithm == "ppo"),
        *named("num_nodes=nodes gpus_per_node", "cluster."),
    ],
    start="uv run examples/run_grpo.py --config RUN/nemo_rl_rl.yaml, over the file that `defaults` names, with your model and data "
    "behind it",
    # "none" there, whatever the model's: it makes logprobs of the two halves differ.
    dropped=("policy.megatron_cfg.moe_router_load_balancing_type", "policy.megatron_cfg.model_overrides.moe_aux_loss_coeff"),
    moved=(("sft.", "grpo."),),
    steps="grpo.max_num_steps",
    critic=("policy.", "value."),
    critic_table=[
        *named("train_global_batch_size=update_samples max_total_sequence_length=sequence_length", "value."),
        fixed("value.sequence_packing.enabled", True),
        *named("train_mb_tokens=micro_batch_tokens logprob_mb_tokens=micro_batch_tokens", "value.sequence_packing."),
    ],
    learning=("optimizer.lr", "optimizer.min_lr", "optimizer.weight_decay", "scheduler.lr_decay_style", "scheduler.lr_decay_iters",
              "scheduler.lr_warmup_iters"),
    ppo=(("grpo.async_grpo.", "ppo.async_ppo."), ("grpo.", "ppo."), ("run_grpo.py", "run_ppo.py")),
)  # fmt: skip
"""NeMo-RL 0.6.0, 7ea279a (examples/configs/grpo_math_1B.yaml, ppo_math_1B_megatron.yaml); a penalty of .01 is the former's own."""
SLIME: Final = Language(
    table=[
        *named("rollout-batch-size=prompts n-samples-per-prompt=samples rollout-max-response-len=response_length "
               "global-batch-size=update_samples advantage-estimator=algorithm use-kl-loss=reference max-tokens-per-gpu=rank_tokens "
               "rollout-num-gpus-per-engine=engine_gpus sglang-max-running-requests=concurrency sglang-mem-fraction-static=static_memory "
               "colocate=colocated"),
        *(fixed(name, True) for name in ("use-dynamic-batch-size", "balance-data")),
        Term("rollout-num-gpus", "generation_gpus", unless=None),
        *(Term(name, "dp", when=lambda rollout: rollout.dp > 1) for name in ("sglang-dp-size",)),
        Term("sglang-enable-dp-attention", "dp", to=bool, when=lambda rollout: rollout.dp > 1),
        Term("sglang-ep-size", "expert_parallel", unless=1),
    ],
    start="slime_rl.sh with your data's, rewards' and checkpoint's arguments behind it, where ray runs. The model's are in it: those of "
    "slime's scripts/models behind it would take the plan's place",
    # Without a balancing loss, as every file of slime's scripts/models has it, whatever the recipe of pretraining says.
    dropped=("global_batch_size", "micro_batch_size", "train_iters", "lr_decay_iters", "moe_router_load_balancing_type",
             "moe_aux_loss_coeff"),
)  # fmt: skip
"""slime, 624b824 (slime/utils/arguments.py; slime/backends/sglang_utils/arguments.py passes SGLang's own arguments on with `sglang-`)."""
LANGUAGES: Final = {"verl": VERL, "nemo_rl": NEMO_RL, "slime": SLIME}
"""Programs that are told both halves, by the name that `write=` takes."""
