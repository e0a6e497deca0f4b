"""Published runs with their settings: those that ran out of memory are named, those that ran fit.

github:ISEEKYAN/verl_megatron_practice@dfd811a, grpo_qwen2.5_7b.csv (the script beside it: GRPO_7B/qwen2.5_7b_megatron_vllm_benchmark.sh);
issues of verl-project/verl and OpenRLHF/OpenRLHF by number. Sequences of a micro-batch are packed into one here; lengths that a thread
does not state change no state's bytes. `tests/rl/test_verl_phases.py` has 17 more that ran.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
from rl_cases import asker

from orchestrator.errors import NoPlanError
from orchestrator.rl.choose import fastest

QWEN = "recipe=qwen3_8b model.vocab_size=152064 model.num_layers={} model.hidden_size={} model.ffn_hidden_size={} " \
    "model.num_attention_heads={} model.num_query_groups={}"  # fmt: skip
QWEN_7B, QWEN_32B = QWEN.format(28, 3584, 18944, 28, 4), QWEN.format(64, 5120, 27648, 40, 8)
LLAMA_3B = "recipe=llama3_8b model.num_layers=28 model.hidden_size=3072 model.num_attention_heads=24 model.tie_embeddings=true"
VERL_7B = f"{QWEN_7B} gpus=8 cluster=dgx_h100 engine=megatron pin.offload=false rl.prompts=512 rl.samples=16 rl.prompt_length=160 " \
    "rl.response_length=546+410 rl.max_response_length=8192 rl.updates=16 rl.reference=true rl.tp=1"  # fmt: skip
PPO = "engine=deepspeed pin.tp=1 pin.micro_batch_size=1 rl.algorithm=ppo rl.reference=true rl.samples=1 rl.prompt_length=512"


class Run(NamedTuple):
    """A run's words; what the error says, "" where it ran."""

    words: str
    error: str = ""
    placement: str = "colocated"


STAYS = "generation takes rl.memory="
RUNS = {
    "row 2": Run(f"{VERL_7B} pin.tp=4 pin.recompute=none rl.offload=false rl.memory=0.6"),
    "row 3": Run(f"{VERL_7B} pin.tp=4 pin.cp=2 pin.recompute=none rl.offload=false rl.memory=0.6"),
    "row 6": Run(f"{VERL_7B} pin.tp=2 pin.cp=2 pin.recompute=none rl.offload=true rl.memory=0.5"),
    "row 8": Run(f"{VERL_7B} pin.tp=4 pin.recompute=none rl.offload=true rl.memory=0.6"),
    "row 9": Run(f"{VERL_7B} pin.tp=2 pin.recompute=none rl.offload=true rl.memory=0.6"),
    "row 12": Run(f"{VERL_7B} pin.tp=2 pin.recompute=full rl.offload=true rl.memory=0.6"),
    "row 4": Run(f"{VERL_7B} pin.tp=2 pin.cp=2 pin.recompute=none rl.offload=false rl.memory=0.8", STAYS),
    "row 5": Run(f"{VERL_7B} pin.tp=2 pin.cp=2 pin.recompute=none rl.offload=false rl.memory=0.5", STAYS),
    "row 10": Run(f"{VERL_7B} pin.tp=2 pin.recompute=none rl.offload=false rl.memory=0.6", STAYS),
    "row 11": Run(f"{VERL_7B} pin.tp=2 pin.recompute=full rl.offload=false rl.memory=0.6", STAYS),
    # PPO of Llama 3.2 3B on four A10 (21.99 GiB), nothing offloaded
    "verl 1141": Run(f"{LLAMA_3B} {PPO} gpus=4 cluster=aws_g6e gpus_per_node=4 memory.limit_gib=21.99 pin.offload=false pin.zero_stage=3 "
                     "rl.prompts=64 rl.response_length=200+20 rl.max_response_length=256 rl.offload=false rl.memory=0.4",
                     "no plan fits"),
    # PPO of Llama 3 8B on eight A100 of 40 GB: actor, critic, reference and reward whole on each GPU
    "OpenRLHF 398": Run(f"recipe=llama3_8b {PPO} gpus=8 cluster=dgx_a100_40gb pin.zero_stage=2 pin.recompute=full rl.reward=model "
                        "rl.prompts=512 rl.response_length=600+200 rl.max_response_length=3584 rl.offload=false",
                        "the other models' states stay, 4"),
    # GRPO of Qwen2.5 7B: the actor on two RTX 6000 Ada
    "OpenRLHF 901": Run(f"{QWEN_7B} engine=deepspeed pin.tp=1 pin.micro_batch_size=1 pin.zero_stage=2 pin.offload=false gpus=4 "
                        "pin.recompute=none cluster=aws_g6e cluster.gpu=RTX-6000-Ada gpus_per_node=4 rl.prompts=256 rl.samples=8 "
                        "rl.prompt_length=512 rl.response_length=100 rl.max_response_length=1538 rl.generation_gpus=2",
                        "2 GPUs train: no plan fits", "split"),
}  # fmt: skip
NOT_NAMED = {
    # GRPO of Qwen2.5 32B on eight H20: torch's Adam has 16 GB of its own in a step, which TE's, priced here, has not
    "verl 3124": f"{QWEN_32B} gpus=8 cluster=dgx_h100 cluster.gpu=H20 engine=megatron pin.offload=false pin.tp=8 pin.pp=1 "
    "pin.recompute=none rl.prompts=512 rl.samples=5 rl.prompt_length=200 rl.response_length=500+400 rl.max_response_length=7984 "
    "rl.updates=2 rl.reference=true rl.tp=8 rl.offload=true rl.memory=0.6",
    # PPO of Llama 3 8B on eight H100, after some updates: HF's generate, and four models whole on each GPU
    "OpenRLHF 519": f"recipe=llama3_8b {PPO} gpus=8 cluster=dgx_h100 pin.zero_stage=2 pin.offload=true pin.recompute=full "
    "rl.reward=model rl.prompts=1024 rl.response_length=600+200 rl.max_response_length=3584 rl.offload=false",
}
"""Threads whose runs ran out of memory and are said to fit."""


def planned(words: str, placement: str = "colocated") -> None:
    """Plans the run. Raises NoPlanError."""
    of = tuple(word for word in words.split() if word.startswith("rl."))
    rest = [word for word in words.split() if not word.startswith("rl.")]
    ask = asker(*rest, "memory.reserve_gib=0", of=(*of, f"rl.placement={placement}"))
    fastest(ask.question, ask)


@pytest.mark.parametrize("name", RUNS)
def test_what_ran_out_of_memory_is_named_and_what_ran_fits(name: str) -> None:
    run = RUNS[name]
    if not run.error:
        planned(run.words)
        return
    with pytest.raises(NoPlanError, match=run.error):
        planned(run.words, run.placement)


@pytest.mark.parametrize("name", NOT_NAMED)
def test_two_threads_are_not_named_yet(name: str) -> None:
    planned(NOT_NAMED[name])
