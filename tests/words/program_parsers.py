"""Hands written files to the parser or configuration classes of the program that they are for, in an interpreter that has these:

    python program_parsers.py PROGRAM CHECKOUTS FOLDER FILE...

prints a JSON object a file, with what the program has then of it, and ends with the program's error where it refuses one. FOLDER is for
what has to be there beside: a model's configuration. What a parser imports and does not call (kernels, servers, loggers) is absent."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import json
import os
import runpy
import shlex
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

PROGRAM, CHECKOUTS, FOLDER, *FILES = sys.argv[1:] if __name__ == "__main__" else ("", "", "")


class Anything(type):
    """A class for which every name is one more."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (), {})

    def __call__(cls, *args: Any, **keys: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not keys else cls  # a decorator, or a call on import


class Module(types.ModuleType):
    __version__ = "2.10.0"
    __libsndfile_version__ = "1.2"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (), {})


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the named packages, and what is in them, as modules without content."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        inside = any(fullname == name or fullname.startswith(f"{name}.") for name in self.names)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if inside else None

    def create_module(self, spec: Any) -> Any:
        return Module(spec.name)

    def exec_module(self, module: Any) -> None:
        module.__path__ = []


def absent(*names: str) -> None:
    sys.meta_path.insert(0, Absent(*names))


def without_init(root: str, *names: str) -> None:
    """Packages of this folder, whose own __init__.py would import all that they have."""
    for name in names:
        module = types.ModuleType(name)
        module.__path__ = [os.path.join(root, *name.split("."))]
        sys.modules[name] = module
        parent, _, last = name.rpartition(".")
        if parent in sys.modules:
            setattr(sys.modules[parent], last, module)


def of_python_3_12() -> None:
    """What programs for Python 3.12 take from typing, under 3.11."""
    import typing_extensions

    for name in ("override", "TypedDict", "NotRequired"):
        setattr(typing, name, getattr(typing_extensions, name))


def ranks_of(file: str) -> int:
    """GPUs of the plan, by the file's header."""
    return int(Path(file).read_text().partition(" on ")[2].split()[0])


def of_transformer_engine() -> None:
    """An Adam by whose arguments Megatron finds whether Transformer Engine, which is absent, keeps states in other types."""
    optimizers: Any = importlib.import_module("transformer_engine.pytorch.optimizers")

    class FusedAdam:
        def __init__(self, params, exp_avg_dtype, exp_avg_sq_dtype, master_weight_dtype, use_decoupled_grad, store_param_remainders): ...

    optimizers.FusedAdam = FusedAdam


def at_ranks(number: int, file: str) -> None:
    """The environment of the first of so many ranks, with what the file's header asks for."""
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(number), "LOCAL_WORLD_SIZE": "8", "MASTER_ADDR": "127.0.0.1"}
    for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "NVTE_CPU_OFFLOAD_V1"):
        os.environ.pop(name, None)
    _, _, said = Path(file).read_text().partition("# Environment of every rank: ")
    os.environ |= dict(word.split("=") for word in said.partition("\n")[0].rstrip(".").split())


def on_gpus_of(file: str) -> None:
    """Programs ask the GPU, which is not there, for what it is: gpu.json beside the file has it."""
    import torch

    gpu = SimpleNamespace(**json.loads(Path(file).with_name("gpu.json").read_text()))
    torch.cuda.get_device_properties = lambda *_: gpu
    torch.cuda.get_device_capability = lambda *_: (gpu.major, gpu.minor)


def command_of(file: str) -> list[str]:
    return shlex.split(Path(file).read_text().replace("\\\n", " "), comments=True)


def content(file: str) -> dict[str, Any]:
    import yaml

    found: dict[str, Any] = yaml.safe_load(Path(file).read_text())
    return found


def model() -> str:
    from transformers import Qwen3Config

    Qwen3Config(num_hidden_layers=24, hidden_size=512, architectures=["Qwen3ForCausalLM"]).save_pretrained(f"{FOLDER}/model")
    return f"{FOLDER}/model"


def axolotl() -> Iterator[dict[str, Any]]:
    from axolotl.utils.config import validate_config
    from axolotl.utils.dict import DictDefault

    for file in FILES:
        said = content(file)
        cfg = validate_config(DictDefault(said | {"base_model": model(), "datasets": [{"path": "x", "type": "alpaca"}]}))
        yield {
            "unknown": [name for name, value in said.items() if value is not None and name not in cfg],
            "micro": cfg.micro_batch_size,
            "accumulation": cfg.gradient_accumulation_steps,
            "lr": cfg.learning_rate,
            "stage": cfg.deepspeed["zero_optimization"]["stage"],
            "apart": cfg.attn_decontaminates_packing,
        }


def llama_factory() -> Iterator[dict[str, Any]]:
    at_ranks(1, FILES[0])
    os.environ["MASTER_PORT"] = "0"
    from llamafactory.hparams.parser import get_train_args

    beside = {"dataset": "d", "template": "llama3", "output_dir": f"{FOLDER}/out", "use_cpu": True, "ddp_backend": "gloo"}
    for file in FILES:
        _, data, training, *_ = get_train_args(content(file) | beside | {"model_name_or_path": model()})
        yield {
            "micro": training.per_device_train_batch_size,
            "accumulation": training.gradient_accumulation_steps,
            "lr": training.learning_rate,
            "length": data.cutoff_len + bool(data.packing),  # hparams/data_args.py:189 takes one away, its packing gives one back
            "stage": training.hf_deepspeed_config.config["zero_optimization"]["stage"],
        }


def ms_swift() -> Iterator[dict[str, Any]]:
    absent("transformer_engine", "causal_conv1d", "fla", "mamba_ssm", "qwen_vl_utils", "zmq", "oss2")
    import swift.megatron.arguments.megatron_args as started
    from swift.arguments import SftArguments
    from swift.cli.main import parse_yaml_args
    from swift.megatron.arguments import MegatronSftArguments
    from swift.utils import parse_args
    from torch import distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    # The groups of Megatron's ranks, which are not there.
    started.initialize_megatron = lambda args, *_: vars(args).update(rank=0, world_size=int(os.environ["WORLD_SIZE"]))
    beside = ["--model", model(), "--model_type", "qwen3", "--template", "qwen3", "--dataset", "x", "--output_dir", f"{FOLDER}/out"]
    for file in FILES:
        said, words = content(file), [file]
        parse_yaml_args(words)
        megatron = "tensor_model_parallel_size" in said
        ranks = ranks_of(file) if megatron else 1
        at_ranks(ranks, file)
        distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
        if megatron:
            args, rest = parse_args(MegatronSftArguments, words + beside)
            yield {
                "unknown": rest,
                "micro": args.micro_batch_size,
                "batch": args.global_batch_size,
                "length": args.max_length,
                "lr": args.lr,
                "tp": args.tensor_model_parallel_size,
                "pp": args.pipeline_model_parallel_size,
            }
        else:
            args, rest = parse_args(SftArguments, [*words, *beside, "--use_cpu", "true"])
            yield {
                "unknown": rest,
                "micro": args.per_device_train_batch_size,
                "accumulation": args.gradient_accumulation_steps,
                "length": args.max_length,
                "lr": args.learning_rate,
                "stage": args.deepspeed["zero_optimization"]["stage"],
            }
        distributed.destroy_process_group()


def verl() -> Iterator[dict[str, Any]]:
    import hydra
    from verl.utils.config import omega_conf_to_dataclass

    for file in FILES:
        with hydra.initialize_config_dir(os.path.dirname(file), version_base=None):
            whole = hydra.compose(Path(file).stem, overrides=[f"actor_rollout_ref.model.path={model()}"])
        actor = omega_conf_to_dataclass(whole.actor_rollout_ref.actor)
        found = {"micro": actor.ppo_micro_batch_size_per_gpu, "batch": actor.ppo_mini_batch_size, "lr": actor.optim.lr}
        if actor.strategy == "megatron":
            sizes = actor.megatron
            found |= {"tp": sizes.tensor_model_parallel_size, "pp": sizes.pipeline_model_parallel_size}
        yield found


def nemo_rl() -> Iterator[dict[str, Any]]:
    of_python_3_12()
    absent(
        "zmq",
        "vllm",
        "sglang",
        "pynvml",
        "matplotlib",
        "math_verify",
        "nemo_automodel",
        "decord",
        "uvicorn",
        "fastapi",
        "nvtx",
        "wandb",
        "imageio",
        "soundfile",
        "sacrebleu",
        "librosa",
        "cv2",
        "mlflow",
        "swanlab",
        "prometheus_client",
    )
    from nemo_rl.algorithms.sft import MasterConfig
    from nemo_rl.utils.config import load_config, register_omegaconf_resolvers
    from omegaconf import OmegaConf

    register_omegaconf_resolvers()
    for file in FILES:
        policy = MasterConfig(**OmegaConf.to_container(load_config(file), resolve=True)).policy
        found = {
            "micro": policy["train_micro_batch_size"],
            "batch": policy["train_global_batch_size"],
            "length": policy["max_total_sequence_length"],
        }
        if policy["megatron_cfg"]["enabled"]:
            sizes = policy["megatron_cfg"]
            found |= {
                "tp": sizes["tensor_model_parallel_size"],
                "pp": sizes["pipeline_model_parallel_size"],
                "lr": sizes["optimizer"]["lr"],
            }
        else:
            found |= {"tp": policy["dtensor_cfg"]["tensor_parallel_size"], "lr": policy["optimizer"]["kwargs"]["lr"]}
        yield found


def slime() -> Iterator[dict[str, Any]]:
    absent("sglang", "sglang_router", "wandb", "zmq", "nvtx", "transformer_engine")
    from slime.utils.arguments import parse_args

    for file in FILES:
        on_gpus_of(file)
        words = command_of(file)[2:-1]
        at_ranks(ranks_of(file), file)
        sys.argv = ["train.py", "--debug-train-only", "--rollout-batch-size", "8", "--num-rollout", "3", *words]
        args = parse_args()
        known = {name.replace("_", "-") for name in vars(args)}
        found = {
            "micro": args.micro_batch_size,
            "batch": args.global_batch_size,
            "lr": args.lr,
            "tp": args.tensor_model_parallel_size,
            "pp": args.pipeline_model_parallel_size,
            "length": args.seq_length,
        }
        unknown = [
            word for word in words if word.startswith("--") and word[2:] not in known and not word.startswith(("--no-", "--disable-"))
        ]
        yield found | {"unknown": [word for word in unknown if word not in OTHERWISE_CALLED]}


OTHERWISE_CALLED = (
    "--untie-embeddings-and-output-weights",
    "--norm-epsilon",
    "--apply-layernorm-1p",
    "--fp8-format",
    "--microbatch-group-size-per-virtual-pipeline-stage",
)
"""Flags of Megatron-LM whose settings have another name."""


def layers_of(settings: dict[str, Any]) -> int:
    """Of a model that the layout of stages fits: all that it names, or 32."""
    import re

    layout = settings.get("pipeline_model_parallel_layout")
    return sum(int(number or 1) for number in re.findall(r"t(?:\*(\d+))?", layout)) if layout else 32


def experts_of(settings: dict[str, Any]) -> dict[str, Any]:
    """Those of a model that the plan divides, or none."""
    return {"num_moe_experts": 16 if settings.get("expert_model_parallel_size", 1) > 1 else None}


def of_recipe(file: str) -> dict[str, Any]:
    """What a written file sets of a recipe's model, by name."""
    lines = [line.strip().partition(" = ") for line in Path(file).read_text().splitlines() if " = " in line]
    return {
        path.rpartition(".")[2]: eval(value)
        for path, _, value in lines
        if path.startswith(("recipe.model.", "recipe.trainer.strategy")) and not value.startswith(("torch", "run."))
    }


def bridge() -> Iterator[dict[str, Any]]:
    of_python_3_12()
    absent(
        "wandb",
        "transformer_engine",
        "modelopt",
        "megatron.energon",
        "webdataset",
        "mlflow",
        "comet_ml",
        "nvidia_resiliency_ext",
        "flashinfer",
        "qwen_vl_utils",
        "timm",
        "open_clip",
        "fla",
        "diffusers",
        "mistral_common",
        "nvdlfw_inspect",
    )
    import dataclasses

    of_transformer_engine()
    without_init(f"{CHECKOUTS}/bridge", "megatron.bridge.recipes")
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.bridge.recipes.common import _pretrain_common
    from megatron.bridge.training.comm_overlap import CommOverlapConfig
    from megatron.bridge.training.config import runtime_config_update
    from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides

    def recipe(*, overlap: bool = False) -> Any:
        made = _pretrain_common()
        made.comm_overlap = CommOverlapConfig(tp_comm_overlap=True) if overlap else None
        heads = {"hidden_size": 4096, "num_attention_heads": 32, **experts_of(said)}
        made.model = GPTModelProvider(num_layers=layers_of(said), vocab_size=1000, attention_dropout=0.0, seq_length=8192, **heads)
        return made

    for file in FILES:
        said = of_recipe(file)
        at_ranks(ranks_of(file), file)
        on_gpus_of(file)
        before = recipe()
        config = runpy.run_path(file)["override"](recipe())
        sections = [field.name for field in dataclasses.fields(config)]
        unknown = [
            f"{section}.{name}"
            for section in sections
            for name in vars(getattr(config, section, None) or SimpleNamespace())
            if section not in ("comm_overlap", "mixed_precision") and name not in vars(getattr(before, section))
        ]
        runtime_config_update(config)
        config.validate()
        words = command_of(str(Path(file).with_name("bridge.sh")))
        words = [word for word in words if "=" in word and not word.startswith("-")]
        process_config_with_overrides(by_words := recipe(), cli_overrides=words)
        process_config_with_overrides(over := recipe(overlap=True), cli_overrides=words)
        assert over.comm_overlap is None
        for one in (by_words, over):
            runtime_config_update(one)
        yield {
            "unknown": unknown,
            "micro": config.train.micro_batch_size,
            "batch": config.train.global_batch_size,
            "lr": config.optimizer.lr,
            "tp": config.model.tensor_model_parallel_size,
            "pp": config.model.pipeline_model_parallel_size,
            "length": config.model.seq_length,
            "by words": [by_words.train.micro_batch_size, by_words.model.seq_length],
        }


def nemo() -> Iterator[dict[str, Any]]:
    absent(
        "leptonai",
        "fabric",
        "paramiko",
        "invoke",
        "docker",
        "fastapi",
        "uvicorn",
        "transformer_engine",
        "wandb",
        "modelopt",
        "nvidia_resiliency_ext",
        "webdataset",
        "megatron.energon",
        "nemo.collections.llm.gpt.model",
        "nemo.collections.common",
        "nemo.lightning.ckpt_utils",
        "nemo.lightning.io",
        "nemo.lightning.pytorch.callbacks",
        "nemo.lightning.megatron_parallel",
        "nemo.lightning._strategy_lib",
        "nemo.utils.callbacks",
        "nemo.core",
        "nemo.utils.model_utils",
        "nemo.utils.exp_manager",
        "nemo.utils.app_state",
    )
    pytorch = "nemo.lightning.pytorch"
    without_init(
        f"{CHECKOUTS}/NVIDIA+NeMo",
        "nemo",
        "nemo.utils",
        "nemo.collections",
        "nemo.collections.llm",
        "nemo.collections.llm.gpt",
        "nemo.collections.llm.gpt.data",
        "nemo.collections.llm.recipes",
        "nemo.collections.llm.recipes.precision",
        "nemo.lightning",
        pytorch,
        f"{pytorch}.optim",
        f"{pytorch}.strategies",
        f"{pytorch}.plugins",
    )
    of_transformer_engine()
    import logging

    import nemo.lightning.io.mixin
    import nemo.lightning.megatron_parallel
    import nemo.utils

    nemo.lightning.io.IOMixin = nemo.lightning.io.mixin.IOMixin = type("IOMixin", (), {})
    nemo.lightning.megatron_parallel.CallbackMethods = type("CallbackMethods", (), {})
    nemo.utils.logging = logging
    import fiddle
    import nemo.lightning.pytorch.optim
    import nemo.lightning.pytorch.plugins
    import nemo_run as run
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig
    from nemo.lightning.pytorch.optim.lr_scheduler import CosineAnnealingScheduler
    from nemo.lightning.pytorch.optim.megatron import MegatronOptimizerModule
    from nemo.lightning.pytorch.strategies.megatron_strategy import MegatronStrategy

    nemo.lightning.pytorch.optim.CosineAnnealingScheduler = CosineAnnealingScheduler
    nemo.lightning.pytorch.plugins.MegatronDataSampler = object
    from nemo.collections.llm.gpt.data.mock import MockDataModule

    class Model:
        def __init__(self, config=None): ...

    class Trainer:  # Lightning's own takes these
        def __init__(self, num_nodes=1, devices=1, max_steps=1, strategy=None, plugins=None): ...

    for file in FILES:
        said = of_recipe(file)
        sizes = {"num_layers": layers_of(said), "hidden_size": 4096, "num_attention_heads": 32, **experts_of(said)}
        sizes |= {"attention_dropout": 0.0, "hidden_dropout": 0.0, "add_bias_linear": False}
        recipe = runpy.run_path(file)["override"](
            SimpleNamespace(
                model=run.Config(Model, config=run.Config(TransformerConfig, **sizes)),
                trainer=run.Config(Trainer, strategy=run.Config(MegatronStrategy, ddp=run.Config(DistributedDataParallelConfig))),
                optim=run.Config(MegatronOptimizerModule, config=run.Config(OptimizerConfig)),
                data=run.Config(MockDataModule),
            )
        )
        strategy = fiddle.build(recipe.trainer.strategy)
        for part in (recipe.model.config, recipe.trainer.plugins, recipe.optim.lr_scheduler):
            fiddle.build(part)
        yield {
            "micro": recipe.data.micro_batch_size,
            "batch": recipe.data.global_batch_size,
            "length": recipe.data.seq_length,
            "lr": fiddle.build(recipe.optim.config).lr,
            "tp": strategy.tensor_model_parallel_size,
            "pp": strategy.pipeline_model_parallel_size,
        }


if __name__ == "__main__":
    for found in globals()[PROGRAM]():
        print(f"TAKEN {json.dumps(found)}", flush=True)
