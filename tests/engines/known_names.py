"""What the installed engines call their fields: megatron-core's dataclasses and DeepSpeed's configuration models, as kinds of values."""

from __future__ import annotations

import dataclasses
import enum
import os
import types
import typing
from typing import Any

import torch

PLAIN = {bool: "bool", int: "int", float: "float", str: "str", torch.dtype: "dtype"}
MORE_THAN_ONE = "any"
"""Read as JSON where it is some, else as text."""


def kind(of: Any) -> str | None:
    """How text becomes a value of this type; "?" at the end: null is one too. None: no text can say it (functions, objects)."""
    optional = ""
    origin = typing.get_origin(of)
    if origin in (typing.Union, types.UnionType):
        options = [option for option in typing.get_args(of) if option is not type(None)]
        optional = "?" if len(options) < len(typing.get_args(of)) else ""
        if len(options) > 1:
            return MORE_THAN_ONE
        of, origin = options[0], typing.get_origin(options[0])
    if of in PLAIN:
        return PLAIN[of] + optional
    if origin is typing.Literal:
        return "|".join(map(str, typing.get_args(of))) + optional
    if origin in (list, tuple):
        return MORE_THAN_ONE
    if isinstance(of, enum.EnumMeta) and issubclass(of, int) and not issubclass(of, str):
        return "int" + optional
    if isinstance(of, enum.EnumMeta):
        return "|".join(of.__members__) + optional
    return None


def megatron() -> dict[str, dict[str, str]]:
    """Fields by name of megatron-core's three configuration classes."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    classes = {"transformer_config": TransformerConfig, "ddp": DistributedDataParallelConfig, "optimizer": OptimizerConfig}
    return {
        section: {field.name: said for field in dataclasses.fields(of) if field.init and (said := kind(field.type)) is not None}
        for section, of in classes.items()
    }


def deepspeed_sections() -> dict[str, dict[str, str]]:
    """Fields by name of DeepSpeed's sections that are models; an alias is what the JSON says."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.compile.config import CompileConfig
    from deepspeed.monitor.config import CSVConfig, TensorBoardConfig, WandbConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig, DeepSpeedZeroOffloadParamConfig

    models = {
        "zero_optimization": DeepSpeedZeroConfig,
        "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
        "zero_optimization.offload_param": DeepSpeedZeroOffloadParamConfig,
        "bf16": DeepSpeedBF16Config,
        "fp16": DeepSpeedFP16Config,
        "tensor_parallel": TPTrainingConfig,
        "compile": CompileConfig,
        "comms_logger": CommsLoggerConfig,
        "tensorboard": TensorBoardConfig,
        "wandb": WandbConfig,
        "csv_monitor": CSVConfig,
    }
    found: dict[str, dict[str, str]] = {}
    for section, model in models.items():
        found[section] = {}
        for name, info in model.model_fields.items():
            found[section][info.alias or name] = kind(info.annotation) or MORE_THAN_ONE
    return found
