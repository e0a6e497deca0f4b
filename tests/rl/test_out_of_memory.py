"""Published runs with their settings: those that ran out of memory are named, those that ran fit.

github:ISEEKYAN/verl_megatron_practice@dfd811a with the scripts beside its tables, and issues of verl-project/verl and OpenRLHF/OpenRLHF
by number. Sequences of a micro-batch are packed into one here: where it holds more tokens than the longest sample,
rl.max_response_length= says so. verl's FSDP is priced as ZeRO-3 with the tokens that a rank has of each micro-batch (its Ulysses size
times the tokens of a GPU, over that size). Lengths that a thread does not state change no state's bytes. `tests/rl/test_verl_phases.py`
has 35 more that ran.
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
WHOLE = f"{PPO} pin.zero_stage=2 pin.recompute=full rl.reward=model rl.response_length=600+200 rl.max_response_length=1536 " \
    "rl.offload=false"  # fmt: skip
LLAMA_13B = "recipe=llama2_7b model.num_layers=40 model.hidden_size=5120 model.ffn_hidden_size=13824 model.num_attention_heads=40 " \
    "model.num_query_groups=40"  # fmt: skip
LONG = f"{QWEN_7B} model.max_position_embeddings=65536 engine=deepspeed pin.tp=1 pin.cp=1 pin.micro_batch_size=1 pin.zero_stage=3 " \
    "pin.recompute=full pin.offload=false pin.tiled_logits=1 pin.tiled_mlp=1 gpus=12 cluster=dgx_h100 cluster.gpu=H20 gpus_per_node=4 " \
    "rl.samples=8 rl.prompts=8 rl.prompt_length=13024 rl.response_length=6000+4000 rl.generation_gpus=4 rl.tp=4"  # fmt: skip
RUNS |= {
    # PPO of Llama 3 8B on four A40, four models whole on each
    "OpenRLHF 858": Run(f"recipe=llama3_8b {WHOLE} gpus=4 cluster=aws_g6e cluster.gpu=A40 gpus_per_node=4 rl.prompts=4",
                        "the other models' states stay, 4"),
    # PPO of CodeLlama 13B on four A800, four models whole on each, no offloading
    "OpenRLHF 277": Run(f"{LLAMA_13B} {WHOLE} pin.offload=false gpus=4 cluster=dgx_a100_80gb cluster.gpu=A800-SXM-80GB gpus_per_node=4 "
                        "rl.prompts=1024", "needs 86"),
    # GRPO of Qwen2.5 7B, samples of 26,048 tokens, the actor on eight H20: a micro-batch of one ran, of two did not
    "OpenRLHF 908, one": Run(f"{LONG} rl.max_response_length=13024", placement="split"),
    "OpenRLHF 908, two": Run(f"{LONG} rl.max_response_length=39072", "8 GPUs train: no plan fits", "split"),
}  # fmt: skip
VERL = "rl.prompts=512 rl.samples=16 rl.prompt_length=160 rl.response_length=1000+750 rl.offload=true rl.program=verl cluster=dgx_h100"
FSDP = f"{VERL} engine=deepspeed pin.zero_stage=3 pin.recompute=full pin.offload=false pin.tp=1 pin.cp=1 pin.micro_batch_size=1 " \
    "rl.updates=16 rl.memory=0.8"  # fmt: skip
MCORE = f"{VERL} engine=megatron pin.micro_batch_size=1 pin.pp=1 rl.tp=4"
HALF, ALL = f"{MCORE} pin.recompute=none rl.memory=0.5", f"{MCORE} pin.tp=1 pin.ep=8 pin.recompute=full rl.memory=0.5"
TEN, THIRTY = "rl.max_response_length=8192", "rl.max_response_length=30560"
"""Tokens of a micro-batch, less a prompt's and rounded."""
QWEN_14B, QWEN3_14B = QWEN.format(48, 5120, 13824, 40, 8), QWEN.format(40, 5120, 17408, 40, 8)
A3B, A22B = "recipe=qwen3_30b_a3b", "recipe=qwen3_235b_a22b"
H20 = "cluster.gpu=H20"
RUNS |= {f"verl {name}": Run(words) for name, words in {
    "7B 2, 14": f"{QWEN_7B} {FSDP} gpus=8 rl.max_response_length=20320 rl.tp=4",
    "7B 10, 15": f"{QWEN_7B} {FSDP} gpus=32 rl.max_response_length=20320 rl.tp=1",
    "14B 2, 3": f"{QWEN_14B} {FSDP} gpus=32 {H20} rl.max_response_length=20480 rl.tp=4",
    "14B 4, 5, 6": f"{QWEN3_14B} {FSDP} gpus=32 {H20} rl.max_response_length=20480 rl.tp=2",
    "32B 2, 3": f"{QWEN_32B} {FSDP} gpus=64 {H20} rl.max_response_length=20480 rl.tp=4",
    "32B 4": f"{QWEN_32B} {FSDP} pin.zero_shard_size=32 gpus=64 {H20} rl.max_response_length=20480 rl.tp=4",
    "32B 5": f"{QWEN_32B} {FSDP} gpus=32 {H20} rl.max_response_length=20480 rl.tp=4",
    "30B 2": f"{A3B} {FSDP} gpus=64 rl.max_response_length=20320 rl.tp=4",
    "30B 12, 13, 15": f"{A3B} {ALL} gpus=32 {THIRTY}",
    "30B 17": f"{A3B} {ALL} gpus=32 {H20} {TEN}",
    "30B 18": f"{A3B} {ALL} gpus=32 {H20} {THIRTY}",
    "30B 19": f"{A3B} {HALF} pin.tp=2 pin.cp=2 pin.ep=8 gpus=32 {H20} {TEN}",
    "30B 20": f"{A3B} {HALF} pin.tp=4 pin.ep=4 gpus=32 {H20} {TEN}",
    "30B 21": f"{A3B} {MCORE} pin.tp=1 pin.ep=8 pin.offload=true train.precision_aware_optimizer=true gpus=8 {H20} {TEN} "
    "rl.memory=0.7",
    "235B 2": f"{A22B} {VERL} engine=megatron pin.micro_batch_size=1 pin.tp=4 pin.pp=8 pin.ep=32 pin.recompute=full gpus=256 "
    "pin.layout=Et*11|t*12|t*12|t*12|t*12|t*12|t*12|t*11L rl.max_response_length=8192 rl.tp=16 rl.memory=0.7",
    "235B 3": f"{A22B} {VERL} engine=megatron pin.micro_batch_size=1 pin.tp=1 pin.pp=8 pin.vpp=2 pin.ep=8 pin.recompute=full gpus=128 "
    "rl.max_response_length=8192 rl.tp=16 rl.memory=0.6",
}.items()}  # fmt: skip
NOT_NAMED = {
    # GRPO of Qwen2.5 32B on eight H20, in the optimizer's step: torch's Adam has 15 GiB of its own there, and Transformer Engine's,
    # priced here, has not. With them its states are 84 GiB of 95; the thread does not print what else was allocated
    "verl 3124": f"{QWEN_32B} gpus=8 cluster=dgx_h100 cluster.gpu=H20 engine=megatron pin.offload=false pin.tp=8 pin.pp=1 "
    "pin.recompute=none rl.prompts=512 rl.samples=5 rl.prompt_length=200 rl.response_length=500+400 rl.max_response_length=7984 "
    "rl.updates=2 rl.reference=true rl.tp=8 rl.offload=true rl.memory=0.6",
    # PPO of Llama 3 8B on eight H100: 24.7 GiB and three more models whole, 69.6 of 79.1. It ran 55 of the first 64 updates with the same
    # states: what grew is the allocator's, by samples of other lengths and Hugging Face's generate
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
        planned(run.words, run.placement)
        return
    with pytest.raises(NoPlanError, match=run.error):
        planned(run.words, run.placement)


def test_ten_that_ran_out_of_memory_are_named() -> None:
    assert sum(bool(run.error) for run in RUNS.values()) == 10


@pytest.mark.parametrize("name", NOT_NAMED)
def test_two_threads_are_not_named_yet(name: str) -> None:
    planned(NOT_NAMED[name])
