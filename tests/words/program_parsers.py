"""Hands written files to the parser or configuration classes of the program that they are for, in an interpreter that has these:

    python program_parsers.py PROGRAM CHECKOUTS FOLDER FILE...

prints a JSON object a file, with what the program has then of it, and ends with the program's error where it refuses one. FOLDER is for
what has to be there beside: a model's configuration. What a parser imports and does not call (kernels, servers, loggers) is absent."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import os
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
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


def of_python_3_12() -> None:
    """What programs for Python 3.12 take from typing, under 3.11."""
    import typing_extensions

    for name in ("override", "TypedDict", "NotRequired"):
        setattr(typing, name, getattr(typing_extensions, name))


def at_ranks(number: int, *, fsdp: bool) -> None:
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(number), "LOCAL_WORLD_SIZE": "8", "MASTER_ADDR": "127.0.0.1"}
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "8" if fsdp else "1"


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
        }


def llama_factory() -> Iterator[dict[str, Any]]:
    at_ranks(1, fsdp=False)
    os.environ["MASTER_PORT"] = "0"
    from llamafactory.hparams.parser import get_train_args

    beside = {"dataset": "d", "template": "llama3", "output_dir": f"{FOLDER}/out", "use_cpu": True, "ddp_backend": "gloo"}
    for file in FILES:
        _, data, training, *_ = get_train_args(content(file) | beside | {"model_name_or_path": model()})
        yield {
            "micro": training.per_device_train_batch_size,
            "accumulation": training.gradient_accumulation_steps,
            "lr": training.learning_rate,
            "length": data.cutoff_len,
            "stage": training.hf_deepspeed_config.config["zero_optimization"]["stage"],
        }


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


if __name__ == "__main__":
    for found in globals()[PROGRAM]():
        print(f"TAKEN {json.dumps(found)}", flush=True)
