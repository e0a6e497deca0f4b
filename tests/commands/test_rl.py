"""task=rl from the command line and from Python."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec.structs import replace

import orchestrator as so
from orchestrator.__main__ import main

WORDS = ("task=rl", "recipe=qwen3_8b", "gpus=8", "cluster=dgx_h100", "rl.prompts=32", "rl.samples=8", "rl.prompt_length=200")
LENGTHS = ("rl.response_length=800+500", "rl.max_response_length=4096")


def test_the_screen_says_who_has_which_gpus_and_what_the_next_node_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *WORDS, *LENGTHS, "rl.program=verl"]) == 0
    said = capsys.readouterr().out
    for word in ("placement: colocated on 8 GPUs", "why: ", "split, ", "generation: ", "sequences at once", "training: megatron ", "step: ",
                 "tokens/s (90%: ", "update ", "the next node: ", "rl.staleness=1", "\nsoftware   megatron-core 0."):  # fmt: skip
        assert word in said, word
    longest = "prompts 200 tokens in the mean, the longest too: rl.max_prompt_length= plans for longer ones"
    assert f"\nlengths: {longest}; responses 800 in the mean, 4,096 at most\n" in said


def test_lengths_and_packages_of_every_model_are_said() -> None:
    found = so.plan_rl(recipe="qwen3_8b", gpus=8, cluster="dgx_h100", rl={
        "prompts": 32, "samples": 8, "prompt_length": 200, "max_prompt_length": 1000, "response_length": "800",
        "max_response_length": 4096})  # fmt: skip
    lines = str(found).splitlines()
    assert "lengths: prompts 200 tokens in the mean, 1,000 at most; responses 800 in the mean, 4,096 at most" in lines
    plans = found.step.plans | {"reference": replace(found.plan, moe_token_dispatcher_type="flex")}
    other = replace(found, chosen=replace(found.chosen, best=replace(found.step, plans=plans)))
    (said,) = [line for line in str(other).splitlines() if line.startswith("software   ")]
    assert said.startswith("software   megatron-core 0.")
    assert "; on every node DeepEP or HybridEP (deep_ep): cluster.software.deep_ep=false plans without" in said


def test_what_decides_is_said_of_every_placement(capsys: pytest.CaptureFixture[str]) -> None:
    """Copies of states where one pool of GPUs does all, waiting where there are two; and when prices can't tell."""
    assert main(["plan", *WORDS, *LENGTHS]) == 0
    (why,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("why: "))
    assert "states and weights on their way" in why or ("that generate wait" in why and "that train wait" in why)
    near = int(why.partition("(+")[2].partition("%")[0]) < 10
    assert ("closer than prices tell apart" in why) == near


def test_json_has_the_phases_and_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *WORDS, *LENGTHS, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    found = so.plan_rl(recipe="qwen3_8b", gpus=8, cluster="dgx_h100", rl={
        "prompts": 32, "samples": 8, "prompt_length": 200, "response_length": "800+500", "max_response_length": 4096})  # fmt: skip
    assert answer["seconds"] == found.step_time_s
    assert [phase["name"] for phase in answer["phases"]] == [phase.name for phase in found.step.phases]
    assert answer["plan"]["training"]["packing"] is True
    assert answer["tokens_per_s_90"][0] < answer["tokens_per_s"] < answer["tokens_per_s_90"][1]


def test_lengths_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("sample,length\n" + "\n".join(f"{index},{400 + index}" for index in range(800)))
    found = so.plan_rl(recipe="qwen3_8b", gpus=8, cluster="dgx_h100", rl={
        "prompts": 32, "samples": 8, "prompt_length": 200, "response_length": str(path)})  # fmt: skip
    assert found.step.tokens / 256 == pytest.approx(200 + 800, rel=0.05)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ((*WORDS, "rl.response_length=800", "rl.max_response_length=50000"), "rl.max_response_length=50000: is beyond the 40760 that"),
        ((*WORDS, "rl.response_length=5000", "rl.max_response_length=4096"), "is a mean above rl.max_response_length, 4096"),
        ((*WORDS[:4], "rl.prompts=1000000", "rl.samples=3", "rl.prompt_length=200", *LENGTHS), "rl.samples=3: makes 3,000,000 samples"),
        ((*WORDS, *LENGTHS, "rl.updates=257"), "rl.updates=257: is more than the 256 samples of a step"),
        ((*WORDS, *LENGTHS, "rl.updates=3"), "rl.updates=3: does not divide the 256 samples of a step"),
        ((*WORDS, *LENGTHS, "rl.updates=64", "rl.program=verl"), "rl.updates=64: does not divide the 32 prompts of a step"),
        ((*WORDS, "rl.response_length=none.csv"), "rl.response_length=none.csv: is no mean, no mean+deviation, and as a file"),
        (WORDS, "rl.response_length: is missing: task=rl needs rl.response_length=\n"),
        ((*WORDS[:4], "rl.samples=2"), "rl.prompts: is missing: task=rl needs rl.prompts=, rl.prompt_length=, rl.response_length=\n"),
        ((*WORDS[:4], "rl.algorithm=dpo"), "rl.prompts: is missing: task=rl needs rl.prompts=, rl.prompt_length=, rl.response_length=\n"),
        (
            (*WORDS[:5], WORDS[6], *LENGTHS, "rl.algorithm=dpo", "rl.reference=false"),
            "rl.reference=false: is not possible: the loss of rl.",
        ),
        ((*WORDS, *LENGTHS, "train.global_batch_size=64"), "train.global_batch_size=64: follows from rl.prompts"),
        ((*WORDS[1:4], "rl.prompts=32"), "rl.prompts=32: is of reinforcement learning: task=rl beside it"),
        ((*WORDS[:5], "rl.samples=1", WORDS[6], *LENGTHS, "rl.algorithm=online_dpo"), "rl.samples=1: makes no pair"),
        ((*WORDS, *LENGTHS, "rl.algorithm=dpo"), "rl.samples=8: is no pair of responses"),
        ((*WORDS[:5], "rl.samples=2", WORDS[6], *LENGTHS, "rl.algorithm=dpo", "rl.tp=2"), "rl.tp=2: is of generation: rl.algorithm=dpo"),
        ((*WORDS, *LENGTHS, "rl.teacher=qwen3_8b"), "rl.teacher=qwen3_8b: is no model of this step: rl.algorithm=distill has one"),
        ((*WORDS, *LENGTHS, "rl.algorithm=distill", "rl.reward=model"), "rl.reward=model: is not asked for"),
        ((*WORDS, *LENGTHS, "rl.generation_gpus=4"), "rl.placement=split beside it"),
        ((*WORDS, *LENGTHS, "rl.staleness=1", "rl.placement=colocated"), "rl.staleness=1: needs generation beside training"),
        ((*WORDS, *LENGTHS, "rl.tp=3"), "rl.tp=3: is refused for generation: tp=3 does not divide num_attention_heads=32"),
        ((*WORDS, *LENGTHS, "rl.measured=7ms,9ms,4", "rl.tp=1"), "rl.measured=7ms,9ms,4: is not three numbers"),
        ((*WORDS, *LENGTHS, "rl.measured=7ms,9ms@64,40000"), "rl.measured: is of one engine: say its rl.tp= beside it"),
        ((*WORDS, *LENGTHS, "explain.tp=8"), "explain.tp=8: is not answered beside task=rl"),
        ((*WORDS, *LENGTHS, "verbose=true"), "verbose=true: is not answered beside task=rl"),
        ((*WORDS, *LENGTHS, "largest=seq_length"), "largest=seq_length: is not answered beside task=rl"),
        ((*WORDS[:3], "cluster=cpu", *WORDS[4:], *LENGTHS), "cluster=cpu: has no GPU"),
        ((*WORDS, *LENGTHS, "write=verl"), "write=verl: writes into a folder: out=FOLDER beside it"),
        ((*WORDS, *LENGTHS, "write=verl", "out=here", "lora.rank=8", "engine=deepspeed"), "write=verl: is told AdamW of all weights"),
        ((*WORDS, *LENGTHS, "write=verl", "out=here", "rl.placement=split"), "write=verl: is written for rl.placement=colocated"),
        ((*WORDS, *LENGTHS, "write=bridge", "out=here"), "write=bridge: is no program that is told both halves of task=rl"),
        (
            (*WORDS, *LENGTHS, "write=verl,pbs", "out=here"),
            "told both halves of task=rl; nothing is written, write=verl would be; choose one of",
        ),
        ((*WORDS, *LENGTHS, "rl.placement=split", "rl.generation_gpus=8"), "rl.generation_gpus=8: leaves none of the 8 GPUs for training"),
    ],
)
def test_what_can_not_be_is_one_error(words: tuple[str, ...], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words]) == 2
    said = capsys.readouterr()
    assert error in said.err
    assert said.err.count("\n") == 1
    assert not said.out


def test_no_room_for_one_sequence_is_said_with_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    """15.3 GiB of weights and 4 of workspaces leave less of a quarter of an H100 than 4,296 tokens of 144 KiB take."""
    assert main(["plan", *WORDS, *LENGTHS, "rl.memory=0.245", "rl.tp=1"]) == 2
    said = capsys.readouterr()
    assert (
        "the weights take 15.3 GiB of a GPU, workspaces 4.0 GiB, one sequence of 4296 tokens 604.1 MiB: more than the 19.4 GiB" in said.err
    )
    assert said.err.count("\n") == 1
    assert not said.out
    words = ("recipe=llama3_70b", "gpus=1", "cluster=dgx_h100", *WORDS[4:], *LENGTHS, "rl.max_response_length=4096")
    assert main(["plan", "task=rl", *dict.fromkeys(words)]) == 2
    assert "no placement fits llama3_70b on 1 x H100-SXM-80GB" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["run", "sweep", "compare"])
def test_what_starts_or_compares_does_not_know_it(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    several = ("gpus=8",) if command == "run" else ("gpus=8,16",)
    words = [word for word in (*WORDS, *LENGTHS) if not word.startswith("gpus=")]
    assert main([command, *words, *several]) == 2
    assert "task=rl: is planned by python -m orchestrator plan" in capsys.readouterr().err


def test_numbers_of_ones_own_take_the_place_of_constants(capsys: pytest.CaptureFixture[str]) -> None:
    seconds = []
    for measured in ("5ms,10ms@64,40000", "10ms,20ms@64,40000"):
        assert main(["plan", *WORDS, *LENGTHS, "rl.tp=1", f"rl.measured={measured}", "--json"]) == 0
        seconds.append(json.loads(capsys.readouterr().out)["generation"]["seconds"])
    assert seconds[1] > 1.6 * seconds[0]


def written(tmp_path: Path, *words: str) -> dict[str, dict[str, Any]]:
    """The files of write=, by name."""
    assert main(["plan", *WORDS, *LENGTHS, *words, f"out={tmp_path / 'out'}"]) == 0
    return {path.stem: yaml.safe_load(path.read_text()) for path in (tmp_path / "out").glob("*.yaml")}


def test_both_halves_are_said_to_programs_that_run_them(tmp_path: Path) -> None:
    """The paths are those of verl's trainer/config and of NeMo-RL's examples/configs/grpo_math_1B.yaml."""
    files = written(
        tmp_path, "write=verl,nemo_rl", "rl.placement=colocated", "rl.updates=4", "rl.tp=2", "pin.tp=2", "pin.pp=1", "pin.recompute=full"
    )
    step = json.loads((tmp_path / "out" / "rl.json").read_text())
    plan = json.loads((tmp_path / "out" / "plan.json").read_text())
    tokens = plan["micro_batch_size"] * plan["training"]["seq_length"]
    actor, rollout = files["verl_rl"]["actor_rollout_ref"]["actor"], files["verl_rl"]["actor_rollout_ref"]["rollout"]
    assert files["verl_rl"]["data"] == {"train_batch_size": 32, "max_prompt_length": 256, "max_response_length": 4096}
    assert (actor["ppo_mini_batch_size"], actor["use_dynamic_bsz"], actor["ppo_max_token_len_per_gpu"]) == (8, True, tokens)
    assert (actor["megatron"]["tensor_model_parallel_size"], actor["megatron"]["param_offload"]) == (2, step["offloads"])
    assert (rollout["name"], rollout["n"], rollout["tensor_model_parallel_size"]) == ("vllm", 8, 2)
    assert "total_training_steps" not in files["verl_rl"]["trainer"]
    policy, grpo = files["nemo_rl_rl"]["policy"], files["nemo_rl_rl"]["grpo"]
    assert (grpo["num_prompts_per_step"], grpo["num_generations_per_prompt"]) == (32, 8)
    assert (policy["train_global_batch_size"], policy["sequence_packing"]["train_mb_tokens"]) == (64, tokens)
    assert policy["generation"]["colocated"] == {"enabled": True, "resources": {"num_nodes": None, "gpus_per_node": None}}
    share = policy["generation"]["vllm_cfg"]["gpu_memory_utilization"]
    assert share == rollout["gpu_memory_utilization"] == 0.9  # NeMo RL's states are in host memory meanwhile
    assert policy["megatron_cfg"]["optimizer"]["lr"] == actor["optim"]["lr"] == 1e-6  # the recipe's is of pretraining


def test_a_critic_has_its_own_plan_and_the_programs_way_to_learn(tmp_path: Path) -> None:
    """verl's trainer/config/critic/megatron_critic.yaml, NeMo-RL's examples/configs/ppo_math_1B_megatron.yaml."""
    ppo = ("rl.algorithm=ppo", "rl.critic=gpt2_xl", "rl.placement=colocated", "rl.updates=4", "rl.epochs=2", "pin.tp=2", "pin.pp=1",
           "rl.max_response_length=760", "rl.response_length=400+200")  # fmt: skip
    words = [*(word for word in LENGTHS if "length" not in word), *ppo, "write=verl,nemo_rl", "pin.recompute=full"]
    assert main(["plan", *WORDS, *words, f"out={tmp_path / 'out'}"]) == 0
    verl, nemo = (yaml.safe_load((tmp_path / "out" / f"{name}_rl.yaml").read_text()) for name in ("verl", "nemo_rl"))
    actor, critic = verl["actor_rollout_ref"]["actor"], verl["critic"]
    assert (verl["algorithm"]["adv_estimator"], actor["ppo_epochs"], critic["use_dynamic_bsz"]) == ("gae", 2, True)
    assert (actor["megatron"]["tensor_model_parallel_size"], critic["megatron"]["tensor_model_parallel_size"]) == (
        2,
        1,
    )  # pins: the policy's
    assert critic["megatron"]["optimizer_offload"] is True
    assert "lr" in actor["optim"]
    assert not {"lr", "min_lr", "weight_decay"} & {*critic["optim"]}
    assert "grpo" not in nemo
    assert (nemo["ppo"]["num_prompts_per_step"], nemo["ppo"]["ppo_epochs"], nemo["ppo"]["async_ppo"]["enabled"]) == (32, 2, False)
    value = nemo["value"]
    assert value["train_global_batch_size"] == nemo["policy"]["train_global_batch_size"] == 64
    assert value["sequence_packing"]["train_mb_tokens"] == critic["ppo_max_token_len_per_gpu"]
    assert (value["megatron_cfg"]["enabled"], value["megatron_cfg"]["tensor_model_parallel_size"]) == (True, 1)
    assert "lr" not in value["megatron_cfg"]["optimizer"]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("rl.algorithm=dpo", "rl.samples=2"), "verl and slime have no DPO, and NeMo RL's takes no packed samples"),
        (("rl.algorithm=distill", "rl.samples=8"), "is written for rl.algorithm=grpo or ppo, and distill has settings of its own"),
    ],
)
def test_what_a_program_does_not_have_is_not_written(
    words: tuple[str, ...], error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *WORDS[:5], WORDS[6], *LENGTHS, *words, "write=nemo_rl", f"out={tmp_path / 'out'}"]) == 2
    assert error in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_generation_on_gpus_of_its_own_is_said_to_nemo_rl(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    split = ("rl.placement=split", "rl.generation_gpus=4", "rl.staleness=1", "pin.recompute=full", "train.lr=3e-7", "train.steps=50")
    files = written(tmp_path, "write=nemo_rl", *split)
    generation, grpo = files["nemo_rl_rl"]["policy"]["generation"], files["nemo_rl_rl"]["grpo"]
    assert generation["colocated"] == {"enabled": False, "resources": {"num_nodes": None, "gpus_per_node": 4}}
    assert grpo["async_grpo"] == {"enabled": True, "in_flight_weight_updates": True, "max_trajectory_age_steps": 1}
    assert (grpo["max_num_steps"], files["nemo_rl_rl"]["policy"]["megatron_cfg"]["optimizer"]["lr"]) == (50, 3e-7)
    assert files["nemo_rl_rl"]["cluster"] == {"num_nodes": 1, "gpus_per_node": 8}
    assert main(["plan", *WORDS, *LENGTHS, *split, "write=verl", f"out={tmp_path / 'other'}"]) == 2
    assert "write=verl: is written for rl.placement=colocated" in capsys.readouterr().err


def test_each_file_has_the_price_of_its_own_program(tmp_path: Path) -> None:
    """All had nemo_rl's seconds, which rl.program=verl prices otherwise."""
    pins = ("rl.placement=colocated", "rl.tp=2", "rl.offload=true", "pin.tp=2", "pin.pp=1", "pin.recompute=full")
    written(tmp_path, *pins, "write=verl,nemo_rl,slime")
    said = {}
    for path in (tmp_path / "out").glob("*_rl.*"):
        (said[path.stem],) = (line.lstrip("# ") for line in path.read_text().splitlines() if line.startswith("# step: "))
    rl = {"prompts": 32, "samples": 8, "prompt_length": 200, "response_length": "800+500", "max_response_length": 4096}
    rl |= {"placement": "colocated", "tp": 2, "offload": True}
    for name in ("verl", "nemo_rl", "slime"):
        asked = so.plan_rl(
            recipe="qwen3_8b", gpus=8, cluster="dgx_h100", rl=rl | {"program": name}, pin={"tp": 2, "pp": 1, "recompute": "full"}
        )
        assert said[f"{name}_rl"] in str(asked).splitlines()
    assert len(set(said.values())) == 3


def test_one_response_to_a_prompt_is_said_to_teach_grpo_nothing() -> None:
    rl = {"prompts": 32, "samples": 1, "prompt_length": 200, "response_length": 800, "placement": "colocated"}
    grpo, ppo = (str(so.plan_rl(recipe="qwen3_8b", gpus=8, cluster="dgx_h100", rl=rl | {"algorithm": name})) for name in ("grpo", "ppo"))
    assert "rl.samples=1: GRPO's advantage is a reward less its prompt's mean, zero of one: nothing is learnt" in grpo
    assert "rl.samples=1" not in ppo


def test_a_recipe_of_ones_own_says_how_it_learns(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(
        "recipe: qwen3_8b\ntask: rl\ntrain: {lr: 2.0e-6}\nrl: {prompts: 32, samples: 8, prompt_length: 200, response_length: 800}\n"
    )
    found = so.plan_rl(recipe=str(mine), gpus=8, cluster="dgx_h100")
    assert (found.plan.training.lr, found.plan.training.schedule, found.plan.training.warmup) == (2e-6, "constant", 0)


def test_a_recipe_of_chats_is_generated_for_too() -> None:
    keys = {"prompts": 32, "samples": 8, "prompt_length": 200, "response_length": "800+500", "max_response_length": 4096}
    chats, plain = (so.plan_rl(recipe=recipe, gpus=8, cluster="dgx_h100", rl=keys) for recipe in ("qwen3_8b_sft", "qwen3_8b"))
    assert chats.step.tokens == plain.step.tokens


def test_an_engine_that_is_asked_for_is_tried_on_every_division_that_it_divides() -> None:
    found = so.plan_rl(recipe="qwen3_8b", gpus=8, cluster="dgx_h100", rl={
        "prompts": 32, "samples": 8, "prompt_length": 200, "response_length": 800, "tp": 4, "placement": "split",
        "staleness": 1})  # fmt: skip
    assert (found.step.generation.layout.tp, found.step.generation_gpus) == (4, 4)


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (("rl.samples=8",), "Next: write=verl,nemo_rl,slime out=FOLDER writes both halves for these programs; rl.tp=2 rl.placement=split"),
        (("rl.samples=2", "rl.algorithm=online_dpo"), "Next: rl.tp=2 rl.placement=split asks for others"),
        (("rl.algorithm=dpo",), ""),  # of pairs, whatever rl.samples is left out
    ],
)
def test_what_is_advised_next_is_taken(words: tuple[str, ...], advice: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Under dpo, write= (which refuses it) and choices of a generation that it has not were advised."""
    assert main(["plan", *WORDS[:5], WORDS[6], *LENGTHS, *words]) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Next: ")]
    assert [line.startswith(advice) for line in said] == [True] * bool(advice)
