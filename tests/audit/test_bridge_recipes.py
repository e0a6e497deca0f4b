"""Recipes of Megatron-Bridge by name: what their functions set below the file, followed in their source."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import orchestrator as so
from orchestrator.audit import bridge_recipe, formats
from orchestrator.errors import InputError

SOURCE = {
    "recipes/common.py": '''
from megatron.bridge.training.config import ConfigContainer, GPTDatasetConfig, SchedulerConfig, TrainingConfig
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.bridge.training.mixed_precision import bf16_mixed

def _optimizer(lr, *, precision="bf16-mixed"):
    return OptimizerConfig(lr=lr, bf16=precision == "bf16-mixed"), SchedulerConfig()

def _common() -> ConfigContainer:
    opt, schedule = _optimizer(3e-4)
    cfg = ConfigContainer(
        model=None,
        train=TrainingConfig(train_iters=1000, global_batch_size=32, micro_batch_size=2, manual_gc_eval=100),
        optimizer=opt,
        ddp=DistributedDataParallelConfig(overlap_grad_reduce=True, use_distributed_optimizer=True),
        dataset=GPTDatasetConfig(seq_length=4096),
    )
    return cfg
''',
    "training/mixed_precision.py": '''
class MixedPrecisionConfig:
    bf16: bool = False

@register
def bf16_mixed():
    return MixedPrecisionConfig(bf16=True, grad_reduce_in_fp32=True)
''',
    "recipes/eight/h100/eight.py": '''
from megatron.bridge import AutoBridge
from megatron.bridge.recipes.common import _common

LAYOUTS = {(2, 1): None}

def _frozen(model, vision: bool = True) -> None:
    """Changes what is given."""
    if vision:
        model.freeze_vision_model = True
    else:
        model.freeze_language_model = True
    if torch.cuda.get_device_properties(0).major == 10:
        model.moe_token_dispatcher_type = "flex"

def eight_pretrain_16gpu_h100_bf16_config(scheme="none"):
    cfg = _common()
    hf_path = "Qwen/Qwen3-8B"
    cfg.model = AutoBridge.from_hf_pretrained(hf_path).to_megatron_provider(load_weights=False)
    cfg.model.tensor_model_parallel_size = 4 if scheme == "none" else 1
    cfg.model.pipeline_model_parallel_size = 2
    cfg.model.pipeline_model_parallel_layout = LAYOUTS[(cfg.model.pipeline_model_parallel_size, 1)]
    cfg.model.sequence_parallel = cfg.model.tensor_model_parallel_size > 1
    cfg.model.cuda_graph_warmup_steps = 3
    cfg.ddp.average_in_collective = True
    _frozen(cfg.model)
    cfg.mixed_precision = bf16_mixed()
    return cfg
''',
    "recipes/eight/eight.py": '''
from .h100.eight import eight_pretrain_16gpu_h100_bf16_config as eight_pretrain_config
''',
    "peft/lora.py": '''
class PEFT:
    pass

@dataclass
class LoRA(PEFT):
    dim: int = 32

@dataclass
class DoRA(PEFT):
    dim: int = 32
''',
    "recipes/eight/tuned.py": '''
from megatron.bridge.peft.lora import PEFT, DoRA, LoRA
from megatron.bridge.recipes.eight.eight import eight_pretrain_config

def default_peft_config(peft_scheme, **kwargs):
    if isinstance(peft_scheme, PEFT):
        return peft_scheme
    if isinstance(peft_scheme, str):
        if peft_scheme.lower() == "lora":
            return LoRA(**kwargs)
        if peft_scheme.lower() == "dora":
            return DoRA(**kwargs)

def eight_peft_config(peft_scheme="lora"):
    cfg = eight_pretrain_config()
    cfg.peft = default_peft_config(peft_scheme)
    if isinstance(peft_scheme, str) and peft_scheme.lower() in ["lora", "dora"]:
        cfg.peft.dim = 8
        cfg.peft.target_modules = ["linear_qkv", "linear_proj"]
    return cfg

def eight_plain_peft_config(peft_scheme="lora"):
    cfg = eight_pretrain_config()
    cfg.peft = default_peft_config(peft_scheme)
    return cfg
''',
    "perf_recipes/eight.py": '''
from megatron.bridge.recipes.eight.eight import eight_pretrain_config

def _perf(cfg):
    cfg.train.global_batch_size *= 2
    cfg.train.micro_batch_size = 1
    cfg.model.freeze_vision_model = False

def eight_pretrain_8gpu_b300_bf16_config():
    cfg = eight_pretrain_config("other")
    _perf(cfg)
    cfg.comm_overlap = CommOverlapConfig(tp_comm_overlap=True)
    return cfg
''',
}  # fmt: skip
COMMAND = "torchrun --nproc_per_node=8 scripts/training/run_recipe.py --recipe {} {}\n"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A source of recipes as Bridge writes them."""
    for path, text in SOURCE.items():
        file = tmp_path / "src/megatron/bridge" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (tmp_path / "tutorials").mkdir()
    return tmp_path


def test_what_a_recipe_sets_holds_where_the_file_says_nothing(checkout: Path) -> None:
    """A command of one word of its own was "no command"; with three it was audited as tp 1, pp 1."""
    file = checkout / "tutorials" / "run.sh"
    file.write_text(COMMAND.format("eight_pretrain_config", "train.global_batch_size=64"))
    found = so.audit(file, cluster="dgx_h100")
    assert found.plan is not None
    plan = found.plan
    assert (plan.world_size, plan.tp, plan.pp, plan.micro_batch_size, plan.global_batch_size) == (8, 4, 2, 2, 64)
    assert (plan.sequence_parallel, plan.training.seq_length, plan.model.name) == (True, 4096, "qwen3_8b")
    assert found.reading.freezes == {"vision": True}
    assert found.reading.unpriced == ("model.freeze_vision_model=True",), "which a model that looks at images prices"
    line = next(line for line in found.reading.assumed if line.startswith("the recipe "))
    assert line.endswith("what it sets holds where the file says nothing; only running it tells model.moe_token_dispatcher_type")
    assert not [line for line in found.reading.assumed if line.startswith(("tensor_model", "micro_batch", "pipeline_model"))]
    change = next(change for change in found.changes if "tp 4 ->" in change.what)
    assert f"+{COMMAND.format('eight_pretrain_config', 'train.global_batch_size=64').strip()} " in change.diff


ADAPTERS: list[tuple[str, dict[str, Any], list[str]]] = [
    ("eight_peft_config", {"lora.rank": 8, "lora.alpha": 32, "lora.targets": "linear_qkv,linear_proj"}, []),
    ("eight_peft_config peft.dim=4 peft.alpha=8", {"lora.rank": 4, "lora.alpha": 8}, []),
    ("eight_plain_peft_config", {"lora.rank": 32, "lora.targets": "linear_qkv,linear_proj,linear_fc1,linear_fc2", "lora.dropout": 0.0}, []),
    ("eight_peft_config --mode dora", {"lora.rank": 8, "lora.alpha": 64}, ["peft.scheme=dora: priced as LoRA, without the norms"]),
    (
        "eight_peft_config 'peft.target_modules=[\"*.layers.0.*.linear_qkv\",router,linear_fc2]' peft.a2a_experimental=true",
        {"lora.targets": "linear_qkv,linear_fc2"},
        ["peft.target_modules=*.layers.0.*.linear_qkv: in every", "peft.target_modules=router: without", "peft.a2a_experimental=True"],
    ),
    ("eight_peft_config 'peft.target_modules=[linear_q,linear_v,linear_proj]'", {"lora.targets": "q_proj,v_proj,o_proj"}, []),
    ("eight_peft_config 'peft.target_modules=[router]'", {}, ["peft={'scheme': 'lora', 'dim': 8, 'target_modules': ['router']}: all"]),
]


@pytest.mark.parametrize(("words", "keys", "unpriced"), ADAPTERS)
def test_the_adapters_of_a_recipe_are_priced(words: str, keys: dict[str, Any], unpriced: list[str], checkout: Path) -> None:
    """They were priced as full fine-tuning, whatever their kind."""
    file = checkout / "tutorials" / "run.sh"
    file.write_text(COMMAND.format(words, "train.global_batch_size=64"))
    reading = formats.read(file.read_text(), str(file)).reading
    assert {name: reading.keys.get(name) for name in keys} == keys
    assert bool(keys) == ("lora.rank" in reading.keys)
    said = [line for line in reading.unpriced if line.startswith("peft")]
    assert [line[: len(start)] for line, start in zip(said, unpriced, strict=True)] == unpriced
    assert not [line for line in reading.beside if line.startswith("peft.")] or not keys


LORA = {"lora.rank": 16, "lora.alpha": 32, "lora.targets": "linear_qkv,linear_proj"}
OWN = {"lora.rank": 32, "lora.alpha": 32, "lora.targets": "linear_qkv,linear_proj,linear_fc1,linear_fc2", "lora.dropout": 0.0}
"""Those of Bridge's class LoRA."""
UNREAD: list[tuple[str, dict[str, Any], bool]] = [
    ("train.py peft.dim=16 peft.alpha=32 'peft.target_modules=[linear_qkv,linear_proj]'", LORA, True),
    ("train.py peft=\"{'dim': 16, 'alpha': 32, 'target_modules': ['linear_qkv', 'linear_proj']}\"", LORA, True),
    ("train.py 'peft={dim:16,alpha:32,target_modules:[linear_qkv,linear_proj]}'", LORA, True),
    ("train.py --peft lora peft.alpha=8", OWN | {"lora.alpha": 8}, False),
    ("run_recipe.py --recipe eight_finetune_config --peft-scheme lora", OWN, False),
    ("run_recipe.py --recipe eight_peft_1gpu_h100_bf16_config", OWN, False),
    ("run_recipe.py --model eight --mode dora", OWN | {"lora.alpha": 64}, False),
    ("run_recipe.py --recipe eight_finetune_config peft=lora", OWN, False),
    ("run_recipe.py --recipe eight_peft_config --peft none", {}, True),
    ("run_recipe.py --recipe eight_finetune_config peft=none", {}, True),
]


@pytest.mark.parametrize(("words", "keys", "told"), UNREAD)
def test_the_adapters_of_a_command_are_priced_where_its_recipe_is_not_here(words: str, keys: dict[str, Any], told: bool) -> None:
    """Without a rank, or in Hydra's own dictionaries, they were priced as full fine-tuning; --peft none was unpriced. A rank that only the
    recipe may say leaves what does not fit untold."""
    batch = "train.global_batch_size=64 train.micro_batch_size=1 dataset.seq_length=4096"
    reading = formats.read(f"torchrun --nproc_per_node=8 {words} {batch}\n", "run.sh").reading
    found = {name: value for name, value in reading.keys.items() if name.startswith("lora.")}
    assert {name: found.get(name) for name in keys} == keys
    assert bool(keys) == bool(found)
    assert not [line for line in reading.unpriced if "all weights" in line]
    assert any(line.startswith("peft.dim=32: the class's own; a recipe") for line in reading.unpriced) is not told


def test_nemo_rls_adapters_under_megatron_are_bridges() -> None:
    """policy.megatron_cfg.peft (nemo_rl/models/policy/__init__.py, MegatronPeftConfig), off by its own `enabled`."""
    policy = "{{train_global_batch_size: 64, megatron_cfg: {{enabled: true, peft: {{enabled: {}, dim: 8, exclude_modules: []}}}}}}"
    on, off = (formats.read(f"policy: {policy.format(word)}", "sft.yaml").reading for word in ("true", "false"))
    assert {name: value for name, value in on.keys.items() if name.startswith("lora.")} == OWN | {"lora.rank": 8}
    assert not [line for line in (*on.unpriced, *on.unknown) if "peft" in line]
    assert "lora.rank" not in off.keys


def test_nemo_2s_adapters_are_those_that_bridges_are_made_of() -> None:
    """nemo/collections/llm/peft/lora.py: its class's own fields where the file does not say them."""
    text = "trainer: {strategy: {tensor_model_parallel_size: 2}}\ndata: {global_batch_size: 64, micro_batch_size: 1, seq_length: 4096}\n"
    reading = formats.read(text + "peft: {_target_: nemo.collections.llm.peft.LoRA, dim: 16}\n", "nemo.yaml").reading
    assert {name: value for name, value in reading.keys.items() if name.startswith("lora.")} == OWN | {"lora.rank": 16}
    assert not [line for line in (*reading.unpriced, *reading.beside) if "peft" in line]


def test_verls_adapters_under_megatron_are_bridges() -> None:
    """verl/workers/config/megatron_peft.py hands model.lora to Bridge's create_peft; rank 0 is none."""
    actor = "{{strategy: megatron, ppo_mini_batch_size: 64, megatron: {{tensor_model_parallel_size: 2}}}}"
    policy = f"actor_rollout_ref: {{{{model: {{{{lora: {{}}}}}}, actor: {actor}}}}}"
    reading = formats.read(policy.format("{type: canonical_lora, rank: 16, alpha: 64, a2a_experimental: true}"), "verl.yaml").reading
    keys = {name: value for name, value in reading.keys.items() if name.startswith("lora.")}
    linears = "q_proj,k_proj,v_proj,gate_proj,up_proj,o_proj,down_proj"
    assert keys == {"lora.rank": 16, "lora.alpha": 64, "lora.targets": linears, "lora.dropout": 0.0}
    assert [line for line in (*reading.unpriced, *reading.beside) if ".lora." in line] == [
        "actor_rollout_ref.model.lora.a2a_experimental=True"
    ]
    assert "lora.rank" not in formats.read(policy.format("{rank: 0}"), "verl.yaml").reading.keys
    alone = "{model: {lora: {rank: 8, alpha: 16}}, engine: {tensor_model_parallel_size: 2}, optim: {lr: 1e-5}, data: {train_batch_size: 8}}"
    assert formats.read(alone, "sft.yaml").reading.keys["lora.rank"] == 8, "verl's supervised training, by its engine"


def test_a_recipe_with_adapters_takes_less_than_one_without(checkout: Path) -> None:
    def audited(recipe: str) -> Any:
        file = checkout / "tutorials" / "run.sh"
        file.write_text(COMMAND.format(recipe, "train.global_batch_size=64"))
        found = so.audit(file, cluster="dgx_h100")
        assert found.plan is not None
        assert found.legal
        return found.plan.prediction

    whole, adapted = audited("eight_pretrain_config"), audited("eight_peft_config")
    assert adapted.step_time_s < 0.9 * whole.step_time_s
    assert whole.peak_memory_bytes - adapted.peak_memory_bytes > 16 * 8.2e9 / 8, "a rank of tp 4, pp 2, dp 1: no states but the adapters'"


def test_a_recipe_of_a_recipe_is_followed_and_python_says_it_too(checkout: Path) -> None:
    file = checkout / "run.py"
    file.write_text("cfg = eight_pretrain_8gpu_b300_bf16_config()\ncfg.train.train_iters = 5\ncfg.model.pipeline_model_parallel_size = 1\n")
    reading = formats.read(file.read_text(), str(file)).reading
    setup = reading.setup
    assert (setup.tp, setup.pp, setup.micro_batch_size) == (1, 1, 1)
    assert reading.freezes == {"vision": False}
    assert (reading.keys["train.global_batch_size"], reading.keys["train.steps"]) == (64, 5)


@pytest.mark.parametrize(
    ("recipe", "why"),
    [
        ("eight_pretrain_config", "Megatron-Bridge is not installed here, nor is the file in its checkout"),
        ("$NAME", "the script does not say which it is"),
    ],
)
def test_a_recipe_that_is_not_here_is_said_not_to_be_read(recipe: str, why: str, tmp_path: Path) -> None:
    file = tmp_path / "run.sh"
    file.write_text(COMMAND.format(recipe, "train.train_iters=5"))
    with pytest.raises(InputError, match=r"global_batch_size.* is missing.*the recipe .* is not read \(") as error:
        so.audit(file, cluster="dgx_h100", **{"model.hf_config": str(_config(tmp_path))})
    assert why in str(error.value)
    given: dict[str, Any] = {"train.global_batch_size": 8, "train.seq_length": 1024}
    found = so.audit(file, cluster="dgx_h100", **given, **{"model.hf_config": str(_config(tmp_path))})
    assert found.reading.assumed[0].startswith(f"the recipe {recipe} is not read ({why})")


def _config(folder: Path) -> Path:
    file = folder / "config.json"
    file.write_text(
        '{"model_type": "llama", "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "intermediate_size": 1024,'
        ' "vocab_size": 32000, "max_position_embeddings": 4096}'
    )
    return file


PUBLISHED = {
    "qwen35_vl_35b_a3b_pretrain_8gpu_gb300_bf16_config": {"ep": 8, "micro": 8, "batch": 512, "length": 4096, "frozen": False},
    "qwen35_vl_122b_a10b_pretrain_128gpu_h100_fp8cs_config": {"tp": 2, "pp": 8, "vpp": 2, "ep": 16, "batch": 1024, "frozen": False},
    "qwen35_vl_27b_sft_config": {"tp": 4, "pp": 4, "micro": 4, "frozen": False},
    "qwen3_vl_8b_pretrain_mock_config": {"tp": 4, "frozen": True},
    "qwen3_235b_a22b_pretrain_256gpu_gb300_fp8mx_config": {"pp": 4, "ep": 32, "micro": 2, "batch": 8192},
    "deepseek_v3_pretrain_config": {"tp": 2, "pp": 16, "ep": 64, "stages": 16},
}  # fmt: skip
PATHS = {
    "tp": "tensor_model_parallel_size", "pp": "pipeline_model_parallel_size", "vpp": "virtual_pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size", "length": "seq_length", "frozen": "freeze_vision_model",
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("name", PUBLISHED)
def test_bridges_own_recipes_are_followed(name: str) -> None:
    """Megatron-Bridge 067f987, below the folder that PUBLISHED names."""
    root = Path(os.environ["PUBLISHED"]) / "NVIDIA-NeMo+Megatron-Bridge/src/megatron/bridge"
    found = bridge_recipe.read(root, name)
    assert found is not None
    model, train, want = found.content["model"], found.content["train"], dict(PUBLISHED[name])
    assert {key: train[f"{word}_batch_size"] for key, word in (("micro", "micro"), ("batch", "global")) if key in want} == {
        key: want.pop(key) for key in ("micro", "batch") if key in want
    }
    if stages := want.pop("stages", None):
        assert len(model["pipeline_model_parallel_layout"]) == stages
    assert {key: model[PATHS[key]] for key in want} == want
    assert found.model
