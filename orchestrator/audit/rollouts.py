"""Jobs of reinforcement learning, of which an audit prices the update of the policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.words.terms import section

NOT_PRICED = "generation, log-probabilities, other models and their memory are not priced: plan task=rl prices the whole job"
"""What such a job does beside."""


def of_a_policy(content: Mapping[str, Any]) -> list[str]:
    """A sentence on what a step is where verl's or NeMo-RL's settings are of such a job; none where they are not.

    >>> of_verl = {"rollout": {"n": 5}, "actor": {"ppo_mini_batch_size": 256}}
    >>> of_a_policy({"actor_rollout_ref": of_verl, "data": {"train_batch_size": 1024}})[0][:65]
    'a step is an update of the policy, of which 4 follow a generation'
    >>> of_a_policy({"policy": {}, "sft": {"max_num_steps": 9}})
    []
    """
    policy, rolled = section(content, "policy"), section(content, "grpo") or section(content, "ppo")
    if section(content, "actor_rollout_ref.rollout"):
        prompts = section(content, "data").get("train_batch_size")
        mini = section(content, "actor_rollout_ref.actor").get("ppo_mini_batch_size")
    elif policy and rolled:
        prompts, each = rolled.get("num_prompts_per_step"), rolled.get("num_generations_per_prompt")
        prompts = prompts * each if isinstance(prompts, int) and isinstance(each, int) else None
        mini = policy.get("train_global_batch_size")
    else:
        return []
    count = ""
    if isinstance(prompts, int) and isinstance(mini, int) and 0 < mini < prompts:
        count = f", of which {prompts // mini} follow a generation"
    return [f"a step is an update of the policy{count}; {NOT_PRICED}"]
