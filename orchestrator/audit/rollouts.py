"""Jobs of reinforcement learning, of which an audit prices the update of the policy, and of preferences, of which it prices less than a
step."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, get_args

from orchestrator.rl.job import Algorithm
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
    policy = section(content, "policy")
    rolled = section(content, "grpo") or section(content, "ppo") or section(content, "distillation")
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


PAIRS: Final = ("dpo", "ipo", "cpo", "simpo", "orpo", "rm", "reward")
"""Trainings of which a sample is a chosen and a rejected response."""
REFERRED: Final = ("dpo", "ipo", "kto", "bco")
"""Trainings with a reference model."""
GENERATED: Final = ("ppo", "grpo", "gdpo", "rloo", "gkd", "online_dpo", "xpo", "nash_md")
"""Trainings with generation in a step."""
ALIKE: Final = ("sft", "pt", "pretrain")
"""Trainings that are priced as they are."""
PROGRAM: Final = re.compile(rf"(?:^|[_/])({'|'.join(sorted({*PAIRS, *REFERRED, *GENERATED, 'prm'}, key=len, reverse=True))})(?:[_.]\w*)?$")
"""A word of a command that names such a training: trl/scripts/dpo.py, run_orpo.py, the second of `trl dpo`."""


def otherwise(content: Mapping[str, Any], command: Sequence[str] = ()) -> str:
    """What a step has that the price of supervised training knows nothing of, by settings of LLaMA-Factory, Axolotl, ms-swift, TRL and
    NeMo-RL or the `command` in front of them; "": it is supervised training.

    >>> otherwise({"stage": "kto"})[:36]
    'stage=kto: a reference model passes '
    >>> otherwise({"stage": "dpo", "pref_loss": "orpo"})[10:80]
    'pref_loss=orpo: a sample is a chosen and a rejected response, twice th'
    >>> otherwise({"beta": 0.1}, ("accelerate", "launch", "trl/scripts/dpo.py"))[:39]
    'dpo.py: a sample is a chosen and a reje'
    >>> otherwise({"stage": "sft", "beta": 0.1}), otherwise({"learning_rate": 0.1}, ("torchrun", "sft.py"))
    ('', '')
    """
    named = {name: str(content[name]).lower() for name in ("stage", "rlhf_type", "rl") if isinstance(content.get(name), str)}
    named |= {"reward_model": "reward"} if content.get("reward_model") is True else {}
    named |= {name: name for name in ("dpo", "rm") if section(content, name) and section(content, "policy")}
    said, kind = next(((name if name == kind else f"{name}={kind}", kind) for name, kind in named.items()), ("", ""))
    perhaps = ""
    if not named:
        word, found = next(((word, match) for word in command if (match := PROGRAM.search(word))), ("", None))
        said, kind = (word.rpartition("/")[2], found.group(1)) if found else ("", "")
        if "rlhf" in command:
            said, kind = "rlhf_type=dpo", "dpo"  # ms-swift's own where nothing is said
        elif not kind and content.get("beta") is not None and not isinstance(content["beta"], dict):
            said, kind = f"beta={content['beta']}", "dpo" if content.get("num_generations") is None else "grpo"
            perhaps = " (ORPO and CPO, whose files look alike, have none)" if kind == "dpo" else ""
    if kind == "dpo" and (loss := str(content.get("pref_loss")).lower()) in PAIRS and loss not in REFERRED:
        said, kind = f"{said} pref_loss={loss}", loss
    if not kind or kind in ALIKE or of_a_policy(content):
        return ""
    more = ["a sample is a chosen and a rejected response, twice the time and activations of one"] if kind in PAIRS else []
    reference = f"a reference model passes them too, with weights of its own unless adapters are trained{perhaps}"
    if str(content.get("precompute_ref_log_probs")).lower() == "true":
        reference = "a reference model passes all samples before the first step (precompute_ref_log_probs)"
    more += [reference] if kind in REFERRED else []
    more += ["generation, rewards and other models are not in it"] if kind in GENERATED else []
    whole = f" (plan task=rl rl.algorithm={kind} prices the whole job)" if kind in get_args(Algorithm) else ""
    return f"{said}: {'; '.join(more or ['its loss takes what nobody here knows'])}. Priced is supervised training alone{whole}"
