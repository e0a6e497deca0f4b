"""Languages of programs whose trainers shard by torch's FSDP2: settings of a file by path, as those of the ds_config that shares the same
between ranks (words/deepspeed.py): stage 3, or 2 where weights are not sharded again after a forward pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from orchestrator.words.terms import Table, Term, named


class Sharded(NamedTuple):
    """Where a program has which setting. `recompute`, `length` and `steps`: paths of the switch for activations, of the tokens of a sample
    (several are added up) and of the steps; `samples`: of what the batch is to be multiplied by."""

    kind: str
    release: str
    start: str
    table: Table
    recompute: str
    length: tuple[str, ...]
    steps: str
    nodes: tuple[str, str]
    samples: str = ""
    tokens: tuple[str, str] = ("", "")
    """Paths of a switch by which a pass has as many samples as tokens allow, and of these; it is on where `by_tokens` says so."""
    by_tokens: bool = False
    unpadded: tuple[str, str] = ("", "")
    """Paths of a switch, on by default, by which sequences keep their own lengths and the loss its logits (`UNPADDED_LOGITS`), and of the
    weight of an entropy, with which it keeps more."""
    beside: Mapping[str, Any] = {}
    """What a written file says whatever the plan, by path."""
    recomputes: bool = False
    """Whether activations are computed again where the file does not say."""
    others: tuple[str, ...] = ()
    """Sections of data, logs, checkpoints and generation."""
    model: str = ""
    """The section of the model: of adapters, and of what its layers are run by."""


def _stage(path: str) -> Term:
    return Term(path, "zero_optimization.stage", to=lambda stage: stage == 3, back=lambda again: 3 if again else 2)


def _offload(path: str) -> Term:
    return Term(
        path, "zero_optimization.offload_optimizer.device", to=lambda device: device == "cpu", back=lambda on: "cpu" if on else "none"
    )


def _type(path: str) -> Table:
    return [
        Term(path, "bf16.enabled", to=lambda on: "bfloat16" if on else "float16", back=lambda said: "bf" in str(said)),
        Term(path, "fp16.enabled", to=lambda on: "float16" if on else "bfloat16", back=lambda said: str(said) in ("float16", "fp16")),
    ]


UNPADDED_LOGITS: Final = 4.0
"""Bytes per logit of verl's loss over unpadded sequences without an entropy: the 16-bit logits, in whose place flash-attn's cross entropy
writes their gradient, and what the division by the temperature makes of that (workers/engine/fsdp/transformer_impl.py, div_ and
inplace_backward; utils/torch_functional.py, logprobs_from_logits_flash_attn)."""
ADAM: Final = "lr=optimizer.params.lr weight_decay=optimizer.params.weight_decay betas=optimizer.params.betas"
EPS: Final = "eps=optimizer.params.eps"
ACTOR: Final = "actor_rollout_ref.actor"
VERL: Final = Sharded(
    kind="verl's configuration for FSDP",
    release="verl 0.10.0.dev, 1dda039 (verl/workers/config/engine.py, FSDPEngineConfig; optimizer.py)",
    start="python -m verl.trainer.main_ppo --config-path RUN --config-name verl, with your data, model and rewards behind it. A sequence "
    "is data.max_prompt_length and data.max_response_length; ppo_mini_batch_size counts prompts, each of rollout.n responses",
    table=[
        *named("ppo_mini_batch_size=train_batch_size ppo_micro_batch_size_per_gpu=train_micro_batch_size_per_gpu", f"{ACTOR}."),
        *named("ulysses_sequence_parallel_size=sequence_parallel_size", f"{ACTOR}."),
        *named("ulysses_sequence_parallel_size=sequence_parallel_size", f"{ACTOR}.fsdp_config."),
        _stage(f"{ACTOR}.fsdp_config.reshard_after_forward"),
        _offload(f"{ACTOR}.fsdp_config.offload_policy"),
        *_type(f"{ACTOR}.fsdp_config.dtype"),
        *named(f"{ADAM} clip_grad=gradient_clipping", f"{ACTOR}.optim."),
        *named(EPS, f"{ACTOR}.optim.override_optimizer_config."),
    ],
    recompute="actor_rollout_ref.model.enable_gradient_checkpointing",
    recomputes=True,
    length=("data.max_prompt_length", "data.max_response_length"),
    steps="trainer.total_training_steps",
    nodes=("trainer.nnodes", "trainer.n_gpus_per_node"),
    samples="actor_rollout_ref.rollout.n",
    tokens=(f"{ACTOR}.use_dynamic_bsz", f"{ACTOR}.ppo_max_token_len_per_gpu"),
    unpadded=("actor_rollout_ref.model.use_remove_padding", f"{ACTOR}.entropy_coeff"),
    beside={
        "hydra.searchpath": ["pkg://verl.trainer.config"], "defaults": ["ppo_trainer", "_self_"], f"{ACTOR}.strategy": "fsdp2",
        f"{ACTOR}.fsdp_config.strategy": "fsdp2", "actor_rollout_ref.rollout.n": 1, f"{ACTOR}.use_dynamic_bsz": False,
    },
    others=("data", "algorithm", "reward", "reward_model", "custom_reward_function", "critic", "trainer", "global_profiler", "ray_kwargs",
            "actor_rollout_ref.rollout", "actor_rollout_ref.ref", "hydra", "defaults"),
    model="actor_rollout_ref.model",
)  # fmt: skip
NEMO_RL: Final = Sharded(
    kind="NeMo-RL's configuration for FSDP",
    release="NeMo-RL 0.6.0, 7ea279a (nemo_rl/models/policy/__init__.py, DTensorConfig)",
    start="uv run examples/run_sft.py --config RUN/nemo_rl.yaml, over the file that `defaults` names, with your model and data behind it",
    table=[
        *named("train_global_batch_size=train_batch_size train_micro_batch_size=train_micro_batch_size_per_gpu", "policy."),
        *named("tensor_parallel_size=tensor_parallel.autotp_size context_parallel_size=sequence_parallel_size", "policy.dtensor_cfg."),
        _offload("policy.dtensor_cfg.cpu_offload"),
        *_type("policy.precision"),
        *named(f"{ADAM} {EPS}", "policy.optimizer.kwargs."),
        *named("max_grad_norm=gradient_clipping", "policy."),
    ],
    recompute="policy.dtensor_cfg.activation_checkpointing",
    length=("policy.max_total_sequence_length",),
    steps="sft.max_num_steps",
    nodes=("cluster.num_nodes", "cluster.gpus_per_node"),
    beside={
        "defaults": "/opt/nemo-rl/examples/configs/sft.yaml", "policy.dtensor_cfg.enabled": True, "policy.megatron_cfg.enabled": False,
        "policy.optimizer.name": "torch.optim.AdamW",
    },
    others=("sft", "grpo", "dpo", "ppo", "rm", "distillation", "checkpointing", "data", "env", "logger", "cluster", "loss_fn", "teacher",
            "policy.tokenizer", "policy.generation", "policy.megatron_cfg", "policy.scheduler", "value", "reward_model", "defaults",
            "data_plane"),
)  # fmt: skip
VERL_SFT: Final = VERL._replace(
    table=[
        *named("train_batch_size micro_batch_size_per_gpu=train_micro_batch_size_per_gpu", "data."),
        *named("ulysses_sequence_parallel_size=sequence_parallel_size", "engine."),
        _stage("engine.reshard_after_forward"),
        _offload("engine.offload_policy"),
        *_type("engine.dtype"),
        *named(f"{ADAM} clip_grad=gradient_clipping", "optim."),
        *named(EPS, "optim.override_optimizer_config."),
    ],
    recompute="model.enable_gradient_checkpointing",
    length=("data.max_length",),
    samples="",
    tokens=("data.use_dynamic_bsz", "data.max_token_len_per_gpu"),
    unpadded=("model.use_remove_padding", ""),
    by_tokens=True,
    others=("data", "trainer", "checkpoint", "hydra", "defaults", "profiler"),
    model="model",
)
"""verl's supervised training, which is read alone."""
SHARDED: Final[Mapping[str, Sharded]] = {"verl": VERL, "nemo_rl": NEMO_RL}
"""Programs for which a plan of DeepSpeed's is written as FSDP's, by the name that `write=` takes."""
