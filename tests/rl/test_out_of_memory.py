"""Published runs with their settings: those that ran out of memory are named, those that ran fit.

github:ISEEKYAN/verl_megatron_practice@dfd811a with the scripts beside its tables, and issues of verl-project/verl and OpenRLHF/OpenRLHF
by number. Sequences of a micro-batch are packed into one here: where it holds more tokens than the longest sample,
rl.max_response_length= says so. verl's FSDP is priced as ZeRO-3 with the tokens that a rank has of each micro-batch (its Ulysses size
times the tokens of a GPU, over that size). Lengths that a thread does not state change no state's bytes. `tests/rl/test_verl_phases.py`
has 35 more that ran.

Of the threads that issue 36 has from users, two say what ran out of memory (verl 3364) or can't be loaded (huggingface/trl 2814), and are
in `NOT_NAMED`, `UNTOLD` and `ASKED`. The others name no run that could be priced: verl 901 asks for the layout of a 7B with 32,000 tokens
on eight H100 and ran none; verl 1467 is a change in which a layout of Qwen3-235B is tried (tp=2, pp=2, ep=32) without GPUs or lengths;
NVIDIA-NeMo/RL 1130 says that tp=1, ep=8 fails for Qwen3-30B-A3B, and not how, on how many GPUs, with which lengths and micro-batches and
what share of generation; verl 5651 and NVIDIA-NeMo/RL 3150 could not be had.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
from rl_cases import asker

from orchestrator.errors import NoPlanError
from orchestrator.rl.choose import fastest
from orchestrator.rl.job import RlKeys
from orchestrator.rl.step import Step, others_bytes
from orchestrator.units import GIB

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
                        "the other models' states stay, 5"),
    # PPO of CodeLlama 13B on four A800, four models whole on each, no offloading
    "OpenRLHF 277": Run(f"{LLAMA_13B} {WHOLE} pin.offload=false gpus=4 cluster=dgx_a100_80gb cluster.gpu=A800-SXM-80GB gpus_per_node=4 "
                        "rl.prompts=1024", "needs 86"),
    # PPO of Llama 3 8B on eight H100, the actor's optimizer offloaded, and three more models whole. It ran 55 of the first 64 updates
    "OpenRLHF 519": Run(f"recipe=llama3_8b {PPO} gpus=8 cluster=dgx_h100 pin.zero_stage=2 pin.offload=true pin.recompute=full "
                        "pin.tiled_logits=1 rl.reward=model rl.prompts=1024 rl.response_length=600+200 rl.max_response_length=3584 "
                        "rl.offload=false", "no plan fits for llama3_8b on 8 x H100-SXM-80GB: needs 28"),
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


class Fits(NamedTuple):
    """A run out of memory that is said to fit: its words; GiB of a GPU that published figures and the programs' code allow at most beside
    what is priced; GiB that are left then."""

    words: str
    besides: float
    left: float


ASLEEP = 7.0
"""The most GiB that an engine without a fault was seen to keep while it sleeps (vllm-project/vllm 47654: Kimi-K2.6, tp=8 over two nodes of
GB200; NVIDIA-NeMo/RL 223: 2.4 at tp=2)."""
NOT_NAMED = {
    # GRPO of Qwen2.5 32B on eight H20, in the optimizer's step, with 3,072 tokens a sample too: its states are 68.7 GiB, 30.5 of them
    # moments that the first step makes. Transformer Engine's Adam, priced here, needs no more; torch's, if it was that (what could be
    # read of the log ends before its frames), the root of the second moments (torch/optim/adam.py, _foreach_sqrt): 15.3, less than the
    # 16.2 of a backward pass that are free by then
    "verl 3124": Fits(
        f"{QWEN_32B} gpus=8 cluster=dgx_h100 cluster.gpu=H20 engine=megatron pin.offload=false pin.tp=8 pin.pp=1 pin.recompute=none "
        "rl.prompts=512 rl.samples=5 rl.prompt_length=200 rl.response_length=500+400 rl.max_response_length=7984 rl.updates=2 "
        "rl.reference=true rl.tp=8 rl.offload=true rl.memory=0.6", ASLEEP, 1.6),
    # Qwen3-30B-A3B on 64 H20 with volcengine/verl's run_qwen3moe-30b_megatron_96gb.sh, where the error is a picture. The same script ran on
    # eight ("30B 21" above), where no state or activation is smaller
    "verl 3364, 64 H20": Fits(
        f"{A3B} {MCORE} pin.tp=1 pin.ep=8 pin.offload=true pin.recompute=none gpus=64 {H20} train.precision_aware_optimizer=true "
        "rl.max_response_length=10080 rl.memory=0.7", ASLEEP, 25.0),
}  # fmt: skip
"""Threads whose runs ran out of memory and are said to fit."""
H200 = f"{A3B} engine=megatron gpus=32 cluster=dgx_h100 cluster.gpu=H200 pin.micro_batch_size=1 pin.tp=4 pin.pp=2 pin.ep=2 " \
    "pin.offload=false pin.recompute=none rl.prompts=512 rl.samples=16 rl.prompt_length=1000 rl.response_length=3000+2000 " \
    "rl.max_response_length=11288 rl.memory=0.65"  # fmt: skip
UNTOLD = {
    "whole experts, states stay": Run(f"{H200} pin.etp=1 rl.offload=false", STAYS),
    "divided experts, verl's default, states stay": Run(f"{H200} pin.etp=4 rl.offload=false"),
    "whole experts, states go": Run(f"{H200} pin.etp=1 rl.offload=true"),
}
"""verl 3364: Qwen3-30B-A3B on 32 H200 with tp=4, pp=2, ep=2 and .65 of the memory for generation. What it does not say decides."""
QWEN_72B = QWEN.format(80, 8192, 29568, 64, 8)
ASKED = {
    # a 72B on GPUs of 40 GB, when TRL generated on one GPU
    "trl 2814": Run(f"{QWEN_72B} gpus=8 cluster=dgx_a100_40gb rl.prompts=64 rl.samples=8 rl.prompt_length=512 rl.response_length=600+200 "
                    "rl.max_response_length=1536 rl.generation_gpus=1 rl.tp=1", "1 GPUs generate: the weights take 135.4 GiB", "split"),
    "verl 901": Run(f"{QWEN_7B} model.max_position_embeddings=40960 gpus=8 cluster=dgx_h100 rl.prompts=64 rl.samples=8 "
                    "rl.prompt_length=512 rl.response_length=12000+8000 rl.max_response_length=32256"),
}  # fmt: skip
"""What threads ask about."""


def planned(words: str, placement: str = "colocated") -> Step:
    """The fastest step of the run. Raises NoPlanError."""
    of = tuple(word for word in words.split() if word.startswith("rl."))
    rest = [word for word in words.split() if not word.startswith("rl.")]
    ask = asker(*rest, "memory.reserve_gib=0", of=(*of, f"rl.placement={placement}"))
    return fastest(ask.question, ask).best


def holds(run: Run) -> None:
    """Asserts that the run is refused with its error, or planned where it has none."""
    if not run.error:
        planned(run.words, run.placement)
        return
    with pytest.raises(NoPlanError, match=run.error):
        planned(run.words, run.placement)


@pytest.mark.parametrize("name", RUNS)
def test_what_ran_out_of_memory_is_named_and_what_ran_fits(name: str) -> None:
    holds(RUNS[name])


def test_eleven_that_ran_out_of_memory_are_named() -> None:
    assert sum(bool(run.error) for run in RUNS.values()) == 11


@pytest.mark.parametrize("name", NOT_NAMED)
def test_sources_leave_room_in_what_is_not_named(name: str) -> None:
    run = NOT_NAMED[name]
    step = planned(run.words)
    others = 0.0 if step.offloads else others_bytes(step.plans, RlKeys(algorithm="ppo", reference=True, reward="model"))
    left = step.training.cluster.gpu.memory - step.training.prediction.peak_memory_bytes - others
    assert left / GIB - run.besides == pytest.approx(run.left, abs=0.3)


def test_the_root_of_torchs_adam_is_less_than_a_backward_pass_of_the_32b() -> None:
    plan = planned(NOT_NAMED["verl 3124"].words).training
    causes = plan.prediction.by_stage[0].memory_by_cause
    root = causes["gradients"]  # four bytes of a parameter, too
    assert root / GIB == pytest.approx(15.3, abs=0.1)
    assert root < causes["activations"] + causes["transient"]


@pytest.mark.parametrize("name", UNTOLD)
def test_what_a_thread_does_not_say_decides(name: str) -> None:
    holds(UNTOLD[name])


@pytest.mark.parametrize("name", ASKED)
def test_what_threads_ask_about_has_an_answer(name: str) -> None:
    holds(ASKED[name])
