"""Plans are written in the words of programs around Megatron, by fields that these have, and come back by `audit` as themselves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from msgspec.structs import replace
from test_drawn_plans import drawn, lost
from tool_fields import FILE, table

import orchestrator as so
from orchestrator.audit import formats
from orchestrator.engines import tools
from orchestrator.engines.megatron_versions import names
from orchestrator.errors import InputError
from orchestrator.plan import Plan
from orchestrator.units import format_seconds
from orchestrator.words.tools import TOOLS

FOLDER = os.environ.get("PUBLISHED", "")
FIELDS: dict[str, dict[str, str]] = json.loads(FILE.read_text())
NO_CLASS = {
    "bridge": {"tokenizer.vocab_size", "tokenizer.tokenizer_type"},  # read alone
    "nemo": {"optim.lr_scheduler._target_", "trainer.max_steps"},  # a class, and Lightning's own
    # algorithms/sft.py, megatron/setup.py
    "nemo_rl": {
        "sft.max_num_steps",
        "sft.seed",
        *(f"policy.megatron_cfg.{name}" for name in ("moe_permute_fusion", "moe_router_load_balancing_type")),
    },
    "ms_swift": set(),
    "slime": set(),
    "verl": {"trainer.total_training_steps"},  # trainer/config/ppo_trainer.yaml
}
"""What is no field of a declared class."""
LOST = {
    "use_distributed_optimizer": {"zero_stage"},
    "moe_token_dispatcher_type": set(),  # which slime's file says, and slime changes
    "cuda_graph_impl": {"cuda_graph_impl", "cuda_graph_modules"},
    "num_distributed_optimizer_instances": {"zero_shard_size"},
    "use_tp_pp_dp_mapping": {"rank_order"},
    "use_megatron_fsdp": {"megatron_fsdp", "zero_stage"},
    "recompute_num_layers": {"layers of stages"},
    "transformer_impl": {"layers of stages"},  # recompute of norms, which Transformer Engine's linears have in them
    "num_virtual_stages_per_pipeline_rank": {"vpp", "schedule", "layers of stages", "microbatch_group_size_per_vp_stage"},
    "reduce_scatter_with_fp32_accumulation": {"reduce_scatter_with_fp32_accumulation"},
}
"""What of a plan is lost with a setting that can't be said."""


@pytest.mark.parametrize("tool", [tool for tool in TOOLS if tool != "slime"])
def test_every_path_is_a_field_of_the_program(tool: str) -> None:
    missing = set()
    for path in {term.theirs for term in TOOLS[tool].table}:
        section = max((one for one in FIELDS[tool] if not one or path.startswith(f"{one}.")), key=len, default=None)
        has = [] if section is None else FIELDS[tool][section].split()
        fields = {name for one in has for name in (names(one[1:], "0.19.2") if one.startswith("@") else [one])}
        if path.removeprefix(f"{section}.") not in fields:
            missing.add(path)
    assert missing == NO_CLASS[tool]


@pytest.mark.full
@pytest.mark.skipif(not FOLDER, reason="PUBLISHED names no folder of checkouts")
def test_the_listed_fields_are_those_of_the_sources() -> None:
    assert table(Path(FOLDER)) == FIELDS


def told(plan: Plan, tool: str) -> tools.Written | None:
    """The plan in the tool's words; None: it refuses the plan, and says why."""
    with suppress(InputError):
        return tools.written(plan, tool)
    return None


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("number", [12, pytest.param(150, marks=pytest.mark.full)])
def test_a_drawn_plan_comes_back_but_for_what_the_file_says_it_can_t(tool: str, number: int) -> None:
    found = 0
    for plan in drawn(10 * number, "0.19.2", seed=number):
        if found < number and (written := told(plan, tool)) is not None:
            found += 1
            file = tools.files(plan, written)[0]
            unsaid = {one.partition("=")[0] for one in written.unsaid}
            missing = set(lost(plan, formats.read(file.content, file.path).reading))
            assert missing <= set().union(*(LOST.get(name, {tools.OURS.get(name)}) for name in unsaid)), file.content
            assert all(name in file.content for name in unsaid)
    assert found == number


def answer(**keys: Any) -> so.Answer:
    return so.plan(recipe="llama3_8b", cluster="dgx_h100", **{"gpus": 16, **keys})


def test_what_a_program_can_t_be_told_is_one_error() -> None:
    for keys, tool, message in (
        ({"engine": "deepspeed"}, "bridge", "can't be told a plan for engine=deepspeed; choose one of engine=megatron"),
        ({"engine": "megatron", "train.schedule": "wsd"}, "nemo", "has no place for lr_decay_style=WSD, which changes what is trained"),
        (
            {"engine": "megatron", "train.schedule": "linear"},
            "nemo",
            "has no place for lr_decay_style=linear, which changes what is trained",
        ),
        ({"engine": "megatron"}, "axolotl", "can't be told a plan for engine=megatron; choose one of engine=deepspeed"),
        ({"engine": "megatron"}, "flax", "written=flax: is no program that is written for; choose one of bridge, nemo"),
    ):
        with pytest.raises(InputError, match=message):
            answer(**keys).written(tool)
    with pytest.raises(InputError, match=r"write=flax: is no scheduler or program that is written for.* verl"):
        answer(write="flax")


def test_programs_that_can_t_be_told_are_all_named_with_the_write_that_works(tmp_path: Path) -> None:
    """Nothing was written for three of which one could not be told, and the error did not say so, nor of the second that could not."""
    told = answer(engine="megatron", write="bridge,llama_factory,verl", pin={"tp": 2, "pp": 1, "cp": 1})
    with pytest.raises(InputError) as caught:
        told.write(tmp_path / "out")
    said = "write=llama_factory: can't be told a plan for engine=megatron"
    assert str(caught.value) == f"{said}; nothing is written, write=bridge,verl would be; choose one of engine=deepspeed"
    more = replace(told, settings=replace(told.settings, write=("llama_factory", "nemo", "kubernetes")))
    with pytest.raises(InputError) as caught:
        more.write(tmp_path / "out")
    assert str(caught.value) == (
        f"write=llama_factory,kubernetes: {said}; choose one of engine=deepspeed; "
        "write=kubernetes: needs container.image=, the image that the pods run; nothing is written, write=nemo would be"
    )
    assert not (tmp_path / "out").exists()


def test_files_are_as_their_programs_ask() -> None:
    """ms-swift's own reader makes a null the word None, Bridge wants both lengths of a sequence alike."""
    assert "null" not in answer(engine="megatron").written("ms_swift")["ms_swift.yaml"]
    text = answer(engine="megatron").written("bridge")["bridge.py"]
    assert {"    recipe.model.seq_length = 8192", "    recipe.dataset.seq_length = 8192"} <= {*text.splitlines()}


def test_bridges_file_says_adapters_and_the_others_refuse_them() -> None:
    """LoRA by Megatron's names, CanonicalLoRA by transformers', which no word of a command makes; peft/lora.py's fields."""
    fused = answer(engine="megatron", **{"lora.rank": 16, "lora.targets": "linear_qkv,linear_proj", "lora.alpha": 32})
    text, words = fused.written("bridge").values()
    assert "\nfrom megatron.bridge.peft.lora import LoRA\n" in text
    assert "def override(recipe):\n    recipe.peft = LoRA()\n" in text
    said = {"target_modules": "['linear_qkv', 'linear_proj']", "dim": "16", "alpha": "32", "dropout": "0.0"}
    assert all(f"    recipe.peft.{name} = {value}\n" in text for name, value in said.items())
    assert " 'peft.target_modules=[linear_qkv,linear_proj]' " in words
    assert (
        "plan only: our worker puts no adapters beside Megatron's linears, which Megatron-Bridge and ms-swift do (write=bridge, ms_swift)"
        in (fused.job().without_worker)
    )
    text, words = answer(engine="megatron", **{"lora.rank": 16, "lora.targets": "q_proj,o_proj,up_proj"}).written("bridge").values()
    assert "recipe.peft = CanonicalLoRA()\n" in text
    assert "recipe.peft.target_modules = ['linear_q', 'linear_proj', 'linear_fc1_up']\n" in text
    assert "# bridge.py alone can say: peft=CanonicalLoRA(...).\n" in words
    assert "peft." not in words.partition("torchrun")[2]
    with pytest.raises(InputError, match=r"write=verl: is not told adapters here \(lora.rank=16\); write=bridge is"):
        fused.written("verl")
    with pytest.raises(InputError, match=r"write=ms_swift: is not told adapters here \(lora.rank=16\); lora.bridge=mcore-bridge plans its"):
        fused.written("ms_swift")


@pytest.mark.parametrize("targets", ["all-linear", "linear_qkv,linear_proj"])
def test_ms_swifts_file_says_its_own_adapters_and_comes_back(targets: str) -> None:
    """lora.bridge=mcore-bridge, whose alpha and rank are whole numbers there (swift/megatron/arguments/megatron_args.py)."""
    planned = answer(engine="megatron", **{"lora.rank": 16, "lora.targets": targets, "lora.alpha": 32, "lora.bridge": "mcore-bridge"})
    text = planned.written("ms_swift")["ms_swift.yaml"]
    assert {"tuner_type: lora", "lora_rank: 16", "lora_alpha: 32", "lora_dropout: 0.0"} <= {*text.splitlines()}
    assert "checkpoint.pretrained" not in text
    reading = formats.read(text, "ms_swift.yaml").reading
    found = {name: value for name, value in reading.keys.items() if name.startswith("lora.")}
    assert found == {"lora.rank": 16, "lora.alpha": 32, "lora.targets": targets, "lora.dropout": 0.0, "lora.bridge": "mcore-bridge"}
    assert not [line for line in (*reading.unpriced, *reading.unknown) if "lora" in line]
    with pytest.raises(
        InputError, match=r"write=bridge: is not told adapters here \(lora.rank=16\); lora.bridge=megatron-bridge plans its"
    ):
        planned.written("bridge")


@pytest.mark.parametrize("coefficient", [0.0, 0.003])
def test_the_loss_that_balances_experts_is_told_to_whoever_trains_by_it(coefficient: float) -> None:
    """Bridge's Qwen3-MoE has .001 whatever is planned (models/qwen/qwen3_moe_bridge.py:65), ms-swift none; verl is of policies."""
    kind = "aux_loss" if coefficient else "none"
    keys = {"engine": "megatron", "model.aux_loss_coeff": coefficient, "pin.recompute": "full"}
    found = so.plan(recipe="qwen3_30b_a3b", cluster="dgx_h100", gpus=16, **keys).plan
    for tool in ("bridge", "nemo", "nemo_rl", "ms_swift"):
        said = {path.rpartition(".")[2]: value for path, value in tools.written(found, tool).settings.items()}
        assert (said["moe_router_load_balancing_type"], said["moe_aux_loss_coeff"]) == (kind, coefficient), tool
    assert "moe_aux_loss_coeff" not in str(tools.written(found, "verl").settings)
    assert "moe_aux_loss_coeff" not in tools.written(answer(engine="megatron").plan, "bridge").settings


def test_bridges_command_starts_on_several_nodes_with_the_weights_that_are_named(tmp_path: Path) -> None:
    """torchrun on each node, by launch.sh's variables; on one it needs none. Bridge takes Hugging Face's folder; to the others a line says
    it."""
    words = answer(engine="megatron").written("bridge")["bridge.sh"]
    assert "\n# On every node: RECIPE=NAME NODE_RANK=<0..1> MASTER_ADDR=<host of node 0> bash bridge.sh\n" in words
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "torchrun").write_text('#!/bin/sh\nprintf "%s\\n" "$@" | grep -B9 -A2 run_recipe\n')
    (tmp_path / "bin" / "torchrun").chmod(0o755)
    (tmp_path / "bridge.sh").write_text(words)
    said = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "RECIPE": "r", "MASTER_ADDR": "n0"}
    run = partial(subprocess.run, ["bash", tmp_path / "bridge.sh"], capture_output=True, text=True, check=False)
    for variable in ("NODE_RANK", "SLURM_NODEID"):
        assert run(env={**said, variable: "1"}).stdout.split() == [
            "--nproc_per_node=8", "--nnodes=2", "--node_rank=1", "--master_addr=n0", "--master_port=29500",
            "scripts/training/run_recipe.py", "--recipe", "r",
        ]  # fmt: skip
    assert "NODE_RANK is not set: the number of this node, from 0" in run(env=said).stderr
    found = so.audit(tmp_path / "bridge.sh", recipe="llama3_8b", cluster="dgx_h100").plan
    assert found is not None
    assert found.world_size == 16
    plan = answer(engine="megatron", gpus=8).plan
    plan = replace(plan, run=replace(plan.run, init_from="/w/a b"))
    code, words = (file.content for file in tools.files(plan, tools.written(plan, "bridge")))
    assert "    recipe.checkpoint.pretrained_checkpoint = '/w/a b'\n" in code
    assert """ 'checkpoint.pretrained_checkpoint="/w/a b"' """ in words
    assert '\ntorchrun --nproc_per_node="${RANKS_PER_NODE:-8}" \\\n  scripts/training/run_recipe.py' in words
    (other,) = tools.files(plan, tools.written(plan, "verl"))
    assert '\n# It begins with the weights in "/w/a b" (model.init_from) where you name that folder to it.\n' in other.content


def test_files_say_what_their_programs_check() -> None:
    """Queues of the GPU, which ms-swift and slime make one; slime's older flags, of which it passes over those that it does not know; CUDA
    graphs that Bridge and NeMo 2 refuse; an overlap that no word can make where Bridge's recipe has none."""
    both = {"engine": "megatron", "cluster.software.megatron_core": "0.19.2"}
    several = answer(**both, **{"pin.megatron_fsdp": True})
    assert "\n# Environment of every rank: CUDA_DEVICE_MAX_CONNECTIONS=32.\n" in several.written("ms_swift")["ms_swift.yaml"]
    one = answer(**both, **{"pin.tp": 2, "pin.megatron_fsdp": False})
    assert "\n# Environment of every rank: CUDA_DEVICE_MAX_CONNECTIONS=1.\n" in one.written("nemo")["nemo.py"]
    command = one.written("bridge")["bridge.sh"]
    assert " comm_overlap=null " in command
    assert "comm_overlap.tp" not in command
    assert " model.tp_comm_overlap=" in command
    graphs = answer(**both, **{"pin.cuda_graph_impl": "local", "pin.cuda_graph_modules": "attn", "pin.megatron_fsdp": False})
    words = graphs.written("slime")["slime.sh"]
    assert "--cuda-graph-scope attn" in words
    assert "--cuda-graph-modules" not in words
    for name in ("bridge", "nemo"):
        text = graphs.written(name)[f"{name}.py"]
        assert "\n# Can't be said there: cuda_graph_impl=local, cuda_graph_modules=['attn']" in text
        assert "    recipe.model.config.cuda_graph_impl = 'none'\n".replace("config." if name == "bridge" else "", "") in text


def test_what_can_t_be_said_has_its_price_in_the_header() -> None:
    pins = {"pin.rank_order": "tp-cp-ep-pp-dp", "pin.pp": 2, "pin.tp_comm_overlap": False}
    text = answer(engine="megatron", **pins).written("verl")["verl.yaml"]
    (line,) = [line for line in text.splitlines() if line.startswith("# Can't be said there")]
    assert line == "# Can't be said there: use_tp_pp_dp_mapping=True."
    assert "\n# pin.rank_order=tp-cp-ep-dp-pp plans without: " in text


@pytest.mark.parametrize(("cp", "padded"), [(1, ""), (2, ", each padded to a multiple of 4 tokens")])
def test_packed_samples_are_said(cp: int, padded: str) -> None:
    """By Megatron-Bridge's data set in its own words, which it refuses under context parallelism without the two of the loss
    (ConfigContainer.validate of 0.6.2); elsewhere in the header."""
    keys = {"task": "sft", "pin.cp": cp, "train.seq_length": 8192, "train.global_batch_size": 64}
    packed, alone = (answer(engine="megatron", **keys, **{"data.packing": packed}) for packed in (True, False))
    text, words = packed.written("bridge").values()
    assert f"\n# The plan packs samples{padded}: for a recipe whose data set packs them.\n" in text
    assert "    recipe.dataset.offline_packing_specs.packed_sequence_size = 8192\n" in text
    assert f"    recipe.dataset.offline_packing_specs.pad_seq_to_mult = {2 * cp if cp > 1 else 1}\n" in text
    assert f" dataset.offline_packing_specs.pad_seq_to_mult={2 * cp if cp > 1 else 1} " in words
    of_loss = ("recipe.model.calculate_per_token_loss = True", "recipe.ddp.average_in_collective = False")
    assert [line in text for line in of_loss] == [cp > 1] * 2
    plain = alone.written("bridge")["bridge.py"]
    assert "packs samples" not in plain
    assert "    recipe.dataset.enable_offline_packing = False\n" in plain
    assert [line in plain for line in of_loss] == [cp > 1] * 2
    elsewhere = packed.written("ms_swift")["ms_swift.yaml"]
    assert f"\n# The plan packs samples{padded}: the settings of your data set say it there.\n" in elsewhere


def test_the_run_s_folder_has_them(tmp_path: Path) -> None:
    folder = answer(engine="megatron", write="verl,bridge", **{"pin.tp_comm_overlap": False}).write(tmp_path / "run")
    assert {"verl.yaml", "bridge.py", "bridge.sh"} <= {path.name for path in folder.iterdir()}
    found = so.audit(folder / "bridge.sh", recipe="llama3_8b", cluster="dgx_h100", gpus=16)
    assert found.plan is not None
    head = (folder / "bridge.sh").read_text()
    assert f"this is the fastest that can, {format_seconds(found.plan.prediction.step_time_s)}." in head


def test_user_buffers_are_said_where_the_program_makes_them() -> None:
    plan = answer(engine="megatron").plan
    assert plan.tp_comm_overlap
    for name, makes in (("bridge", True), ("verl", False), ("nemo_rl", False), ("slime", False)):
        written = tools.written(plan, name)
        said = [value for path, value in written.settings.items() if path.replace("-", "_").endswith("tp_comm_overlap")]
        assert (True in said) is makes, name
        assert (written.pins.get("tp_comm_overlap") is False) is not makes, name


def test_another_plan_than_the_file_s_is_a_diff_in_its_own_words(tmp_path: Path) -> None:
    plan = answer(engine="megatron", **{"pin.recompute": "full", "pin.micro_batch_size": 1}).plan
    for tool, line in (("bridge", "+    recipe.train.micro_batch_size = 2"), ("verl", "+    ppo_micro_batch_size_per_gpu: 2")):
        file = tools.files(plan, tools.written(plan, tool))[0]
        (tmp_path / file.path).write_text(file.content)
        source = formats.read(file.content, str(tmp_path / file.path))
        text = source.edited(source.reading.setup, replace(source.reading.setup, micro_batch_size=2), 16)
        assert text is not None
        assert line[1:] in text.splitlines()
        assert sum(one != other for one, other in zip(text.splitlines(), file.content.splitlines(), strict=True)) == 1


@pytest.mark.full
@pytest.mark.skipif(not FOLDER, reason="PUBLISHED names no folder of checkouts")
@pytest.mark.parametrize("engine", ["megatron", "deepspeed"])
def test_verl_s_own_configuration_takes_the_file(engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Composed by Hydra over verl's checkout, whose packages' own imports (Ray) are left out."""
    hydra = pytest.importorskip("hydra", reason="Hydra is not installed: pip install hydra-core, for this test alone")
    for name in ("verl", "verl.trainer"):
        package = ModuleType(name)
        package.__path__ = [str(Path(FOLDER) / "verl-project+verl" / name.replace(".", "/"))]
        monkeypatch.setitem(sys.modules, name, package)
    plan = answer(engine=engine).plan
    (tmp_path / "verl.yaml").write_text(answer(engine=engine).written("verl")["verl.yaml"])
    with hydra.initialize_config_dir(str(tmp_path), version_base=None):
        actor = hydra.compose("verl").actor_rollout_ref.actor
    assert actor.strategy == ("megatron" if engine == "megatron" else "fsdp2")
    assert (actor.ppo_mini_batch_size, actor.optim.lr) == (plan.global_batch_size, plan.training.lr)
