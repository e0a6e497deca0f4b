"""Files that task=rl writes, taken by the own classes of the programs that they are for.

PUBLISHED names a folder with checkouts of verl-project+verl and NVIDIA-NeMo+RL at the commits that words/rollouts.py names. Beside this
project's packages: pip install hydra-core ray tensordict codetiming orjson for verl, and what nemo_rl/algorithms/ppo.py imports (ray
torchdata pyzmq nvidia-ml-py uvicorn fastapi mlflow-skinny wandb swanlab matplotlib prometheus_client datasets soundfile aiohttp
'transformers<5.12').
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import orchestrator as so

FOLDER = os.environ.get("PUBLISHED", "")
JOBS = {
    "on-policy": {},
    "a reference": {"reference": True, "updates": 4},
    "a critic": {"algorithm": "ppo", "critic": "gpt2_xl", "epochs": 2, "updates": 4},
    "a critic of its size": {"algorithm": "ppo", "reference": True},
    "FSDP": {},
    "FSDP, a critic": {"algorithm": "ppo"},
    "context parallelism": {},
}
TOLD = {"FSDP": "deepspeed", "FSDP, a critic": "deepspeed"}
RL = {"prompts": 32, "samples": 8, "prompt_length": 200, "response_length": "400+200", "max_response_length": 760, "placement": "colocated"}
VERL = """
import sys
import hydra
from omegaconf import OmegaConf
from verl.utils.config import omega_conf_to_dataclass
with hydra.initialize_config_dir(sys.argv[1], version_base=None):
    whole = hydra.compose("verl_rl", ["actor_rollout_ref.model.path=model", "critic.model.path=model"])
OmegaConf.set_struct(whole, False)
whole.critic.model = {"path": "model"}  # its class reads the model's files
OmegaConf.resolve(whole)
made = omega_conf_to_dataclass(whole.actor_rollout_ref.actor), omega_conf_to_dataclass(whole.actor_rollout_ref.rollout)
of_engine = made[0].megatron.tensor_model_parallel_size if hasattr(made[0], "megatron") else made[0].fsdp_config.param_offload
print(*(type(one).__name__ for one in made), of_engine, made[1].n)
if whole.algorithm.adv_estimator == "gae":
    critic = omega_conf_to_dataclass(whole.critic)
    print(type(critic).__name__, critic.megatron.tensor_model_parallel_size if hasattr(critic, "megatron") else critic.fsdp.param_offload)
"""
NEMO_RL = """
import sys
import typing
import typing_extensions
typing.TypedDict = typing_extensions.TypedDict  # pydantic asks for it before Python 3.12
from omegaconf import OmegaConf
from nemo_rl.utils.config import load_config, register_omegaconf_resolvers
register_omegaconf_resolvers()
whole = OmegaConf.to_container(load_config(sys.argv[1] + "/nemo_rl_rl.yaml"), resolve=True)
module = __import__(f"nemo_rl.algorithms.{'ppo' if 'ppo' in whole else 'grpo'}", fromlist=["MasterConfig"])
made = module.MasterConfig(**whole)
engine = "megatron_cfg" if made.policy["megatron_cfg"]["enabled"] else "dtensor_cfg"
print(type(made).__name__, *(value for name, value in made.policy[engine].items() if name.startswith("tensor_")))
print(made.policy["train_global_batch_size"])
if "ppo" in whole:
    print(made.value[engine]["enabled"], made.ppo.num_prompts_per_step, made.ppo.ppo_epochs)
assert made.policy["sequence_packing"]["train_mb_tokens"] >= made.policy["max_total_sequence_length"], "its packer refuses a longer sample"
"""


@pytest.mark.full
@pytest.mark.skipif(not FOLDER, reason="PUBLISHED names no folder of checkouts")
@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize(("name", "checkout", "program"), [("verl", "verl-project+verl", VERL), ("nemo_rl", "NVIDIA-NeMo+RL", NEMO_RL)])
def test_a_programs_own_classes_take_the_file(job: str, name: str, checkout: str, program: str, tmp_path: Path) -> None:
    pins = {"recompute": "full", "tp": 2} if job not in TOLD else {"recompute": "full", "tp": 1, "zero_stage": 3}
    pins |= {"cp": 2} if job == "context parallelism" else {}
    found = so.plan_rl(
        recipe="qwen3_8b", gpus=8, cluster="dgx_h100", rl=RL | JOBS[job], write=name, pin=pins, engine=TOLD.get(job, "megatron")
    )
    (file,) = found.written(name).items()
    text = file[1].replace("/opt/nemo-rl", str(Path(FOLDER, checkout)))
    (tmp_path / file[0]).write_text(text)
    ran = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], env=os.environ | {"PYTHONPATH": str(Path(FOLDER, checkout))}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    if "No module named" in ran.stderr:
        pytest.skip(ran.stderr.splitlines()[-1])
    assert ran.returncode == 0, ran.stderr[-2000:]
    said = ran.stdout.split()
    if name == "verl" and job in TOLD:
        assert said[:4] == ["FSDPActorConfig", "RolloutConfig", str(found.step.offloads), "8"]
        assert said[4:6] == (["FSDPCriticConfig", "True"] if "critic" in job else [])
    elif name == "verl":
        assert said[:4] == ["McoreActorConfig", "RolloutConfig", "2", "8"]
        assert said[4:6] == (["McoreCriticConfig", "1" if JOBS[job].get("critic") else "2"] if "critic" in job else [])
    else:
        updates = JOBS[job].get("updates", 1)
        assert said[:3] == ["MasterConfig", "1" if job in TOLD else "2", str(256 // updates)]
        assert said[3:] == (["True", "32", str(JOBS[job].get("epochs", 1))] if "critic" in job else [])


def test_tokens_of_a_micro_batch_are_a_ranks_for_verl_and_whole_for_nemo_rl() -> None:
    pins = {"recompute": "full", "tp": 1, "cp": 2}
    told: dict[str, str] = {}
    for name in ("verl", "nemo_rl"):
        found = so.plan_rl(recipe="qwen3_8b", gpus=8, cluster="dgx_h100", rl=RL, write=name, pin=pins, engine="megatron")
        told |= found.written(name)
    tokens = found.plan.micro_batch_size * found.plan.training.seq_length
    assert f"ppo_max_token_len_per_gpu: {tokens // 2}\n" in told["verl_rl.yaml"]
    assert f"train_mb_tokens: {tokens}\n" in told["nemo_rl_rl.yaml"]
    assert f"max_total_sequence_length: {found.plan.training.seq_length}\n" in told["nemo_rl_rl.yaml"]


@pytest.mark.parametrize(("longest", "least"), [(None, 200), (1000, 1000)])
def test_the_longest_prompt_and_the_longest_response_fit_into_a_micro_batch(longest: int | None, least: int) -> None:
    """verl asserts it of every sample (utils/seqlen_balancing.py), and refuses prompts over data.max_prompt_length as it reads them."""
    asked = {"recipe": "qwen3_8b", "gpus": 8, "cluster": "dgx_h100", "pin": {"recompute": "full", "cp": 2}, "engine": "megatron"}
    found = so.plan_rl(**asked, rl=RL | ({} if longest is None else {"max_prompt_length": longest}), write="verl")
    (text,) = found.written("verl").values()
    told = yaml.safe_load(text)
    prompt, response = told["data"]["max_prompt_length"], told["data"]["max_response_length"]
    assert least <= prompt < least + 64
    assert 2 * told["actor_rollout_ref"]["actor"]["ppo_max_token_len_per_gpu"] >= prompt + response >= least + 760
    assert f"# Prompts have {prompt} tokens at most: " in text
    with pytest.raises(so.InputError, match=r"rl\.max_prompt_length=100: is below the mean, rl\.prompt_length=200"):
        so.plan_rl(**asked, rl=RL | {"max_prompt_length": 100})


def test_fsdp_of_verl_is_told_its_own_offloads() -> None:
    found = so.plan_rl(recipe="qwen3_8b", gpus=8, cluster="dgx_h100", rl=RL, write="verl", pin={"recompute": "full"}, engine="deepspeed")
    (text,) = found.written("verl").values()
    assert "megatron:" not in text
    assert "param_offload" in text.partition("fsdp_config:")[2]


def test_an_update_is_planned_with_one_recompute_setting_which_all_programs_can_be_told() -> None:
    """A 32B on 64 GPUs, whose fastest plan recomputes some layers in some stages alone."""
    more = {"prompts": 64, "samples": 16, "prompt_length": 512, "response_length": "4000+3000", "max_response_length": 16384}
    sizes = {"num_layers": 64, "hidden_size": 5120, "num_attention_heads": 64, "num_query_groups": 8, "ffn_hidden_size": 25600}
    for name in ("verl", "nemo_rl", "slime"):
        found = so.plan_rl(recipe="qwen3_8b", model=sizes, gpus=64, cluster="dgx_h100", rl=more, write=name)
        assert len(found.written(name)) == 1
