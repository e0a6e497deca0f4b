"""Both halves of task=rl in the words of programs that run them: every path is a field of theirs."""

from __future__ import annotations

import json
import os
import shlex
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from tool_fields import FILE

import orchestrator as so
from orchestrator.errors import InputError
from orchestrator.words.rollouts import LANGUAGES

FOLDER = os.environ.get("PUBLISHED", "")
FIELDS: dict[str, dict[str, str]] = json.loads(FILE.read_text())
NO_CLASS = {
    "verl": set(),
    "nemo_rl": {"defaults", "policy.generation.vllm_kwargs.max_num_seqs"},  # utils/config.py; vLLM's own arguments
    "slime": {"sglang-dp-size", "sglang-enable-dp-attention", "sglang-ep-size", "sglang-max-running-requests",
              "sglang-mem-fraction-static"},  # SGLang's ServerArgs, server_args.py
}  # fmt: skip
"""What is no field of a declared class."""
RL = {"prompts": 32, "samples": 8, "prompt_length": 200, "response_length": "800+500", "max_response_length": 4096}


@pytest.mark.parametrize("program", LANGUAGES)
def test_every_path_is_a_field_of_the_program(program: str) -> None:
    missing, sections = set(), FIELDS[f"{program} rollout"]
    for path in {term.theirs for term in (*LANGUAGES[program].table, *LANGUAGES[program].critic_table)}:
        section = max((one for one in sections if not one or path.startswith(f"{one}.")), key=len, default=None)
        if section is None or path.removeprefix(f"{section}.") not in sections[section].split():
            missing.add(path)
    assert missing == NO_CLASS[program]


def test_slime_has_megatrons_flags_and_its_own(tmp_path: Path) -> None:
    split = {"placement": "split", "generation_gpus": 4, "staleness": 1, "updates": 2, "tp": 2, "reference": True}
    found = so.plan_rl(recipe="qwen3_8b", gpus=8, cluster="dgx_h100", rl=RL | split, pin={"recompute": "full"}, write="slime")
    (text,) = found.written("slime").values()
    words = shlex.split(text, comments=True)
    said = dict(pairwise(words))
    assert words[:2] == ["python3", "train_async.py"]
    assert (said["--rollout-num-gpus"], said["--rollout-num-gpus-per-engine"], said["--actor-num-gpus-per-node"]) == ("4", "2", "4")
    assert (said["--global-batch-size"], said["--rollout-batch-size"], said["--n-samples-per-prompt"]) == ("128", "32", "8")
    assert words.count("--global-batch-size") == 1
    assert not {"--train-iters", "--lr-decay-iters", "--num-rollout"} & {*words}  # nobody said how many
    assert int(said["--max-tokens-per-gpu"]) * found.plan.cp == found.plan.micro_batch_size * found.plan.training.seq_length
    assert {"--use-dynamic-batch-size", "--balance-data", "--use-kl-loss"} <= {*words}
    assert "--colocate" not in words
    assert found.settings.reinforcement is not None
    assert found.settings.reinforcement.keys.program == "slime"


def test_policies_of_experts_are_trained_without_the_pretrainings_balancing_loss() -> None:
    """verl turns it off ("hurts perf in RL", models/mcore/config_converter.py:204), NeMo RL's and slime's own files have none."""
    for program in LANGUAGES:
        found = so.plan_rl(recipe="qwen3_30b_a3b", gpus=32, cluster="dgx_h100", rl=RL | {"placement": "colocated"}, write=program,
                           pin={"recompute": "full"})  # fmt: skip
        (text,) = found.written(program).values()
        assert "aux_loss" not in text.replace("-", "_"), program


def test_slime_offloads_what_shares_its_gpus() -> None:
    found = so.plan_rl(recipe="qwen3_8b", gpus=8, cluster="dgx_h100", rl=RL | {"placement": "colocated"}, write="slime",
                       pin={"recompute": "full"}, train={"steps": 50})  # fmt: skip
    assert found.step.offloads
    (text,) = found.written("slime").values()
    assert "  --colocate \\\n" in text
    assert "  --num-rollout 50 \\\n" in text
    stays = so.plan_rl(recipe="qwen3_8b", gpus=8, cluster="dgx_h100", rl=RL | {"placement": "colocated", "offload": False},
                       pin={"recompute": "full"})  # fmt: skip
    with pytest.raises(InputError, match=r"rl\.offload=true"):
        stays.written("slime")


@pytest.mark.parametrize(("engine", "section"), [("megatron", "megatron"), ("deepspeed", "fsdp_config")])
@pytest.mark.parametrize("offload", [None, False])
def test_verl_s_reference_is_where_the_plan_has_it(engine: str, section: str, offload: bool | None) -> None:
    """In host memory, else beside generation: verl's follows the policy's under Megatron, and stays under FSDP
    (trainer/config/ref/megatron_ref.yaml, dp_ref.yaml)."""
    asked = {"placement": "colocated", "reference": True} | ({} if offload is None else {"offload": offload})
    found = so.plan_rl(recipe="qwen3_8b", gpus=8, cluster="dgx_h100", engine=engine, rl=RL | asked, write="verl", pin={"recompute": "full"})
    said = yaml.safe_load(found.written("verl")["verl_rl.yaml"])["actor_rollout_ref"]
    assert said["ref"] == {section: {"param_offload": offload is None}}
    without = so.plan_rl(recipe="qwen3_8b", gpus=8, cluster="dgx_h100", engine=engine, rl=RL | {"placement": "colocated"}, write="verl",
                         pin={"recompute": "full"})  # fmt: skip
    assert "ref" not in yaml.safe_load(without.written("verl")["verl_rl.yaml"])["actor_rollout_ref"]


@pytest.mark.full
@pytest.mark.skipif(not FOLDER, reason="PUBLISHED names no folder of checkouts")
def test_verl_s_own_configuration_takes_both_halves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Composed by Hydra over verl's checkout, whose packages' own imports (Ray) are left out."""
    hydra = pytest.importorskip("hydra", reason="Hydra is not installed: pip install hydra-core, for this test alone")
    for name in ("verl", "verl.trainer"):
        package = ModuleType(name)
        package.__path__ = [str(Path(FOLDER) / "verl-project+verl" / name.replace(".", "/"))]
        monkeypatch.setitem(sys.modules, name, package)
    found = so.plan_rl(recipe="qwen3_8b", gpus=8, cluster="dgx_h100", rl=RL | {"placement": "colocated"}, write="verl",
                       pin={"recompute": "full"})  # fmt: skip
    (tmp_path / "verl_rl.yaml").write_text(found.written("verl")["verl_rl.yaml"])
    with hydra.initialize_config_dir(str(tmp_path), version_base=None):
        whole = hydra.compose("verl_rl")
    assert (whole.data.train_batch_size, whole.actor_rollout_ref.rollout.n, whole.trainer.n_gpus_per_node) == (32, 8, 8)
    assert whole.actor_rollout_ref.actor.strategy == "megatron"
