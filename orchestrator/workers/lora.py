"""LoRA's adapters in transformers' models, by peft: put in, filled, and written in peft's format or added to the weights.

peft puts them into the model in place, so that its class stays: a linear becomes `base_layer`, `lora_A.default` and `lora_B.default`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from math import prod, sqrt
from pathlib import Path
from typing import Any, Final

import torch

from orchestrator.workers import parts

ADAPTER: Final = "default"
BASE: Final = ".base_layer"
FILES: Final = ("adapter_config.json", "adapter_model.safetensors")
"""Files of an adapter as peft names them (utils/constants.py)."""
PREFIX: Final = "base_model.model."
"""The beginning of every name in peft's files."""


def config(fields: dict[str, Any], source: str | None) -> Any:
    """peft's LoraConfig for the section "lora" of engine.json."""
    import peft

    keywords = {name: value for name, value in fields.items() if name != "merge"}
    return peft.LoraConfig(**keywords, bias="none", base_model_name_or_path=source)


def put_in(model: torch.nn.Module, fields: dict[str, Any]) -> None:
    """Puts adapters, of the base's data type, into the model; all else is frozen."""
    import peft

    peft.inject_adapter_in_model(config(fields, None), model, ADAPTER)
    for parameter in model.parameters():
        if parameter.requires_grad and hasattr(model, "dtype"):
            parameter.data = parameter.data.to(model.dtype)


@contextlib.contextmanager
def seen_into() -> Iterator[None]:
    """Lets AutoTP find the linears inside of peft's: it takes every module with a two-dimensional `weight` for a linear
    (module_inject/auto_tp.py:1079), and peft's has such a property, that of its base."""
    from peft.tuners.lora.layer import Linear

    def hidden(_: Any) -> Any:
        raise AttributeError("weight")

    Linear.weight = property(hidden)  # type: ignore[assignment]
    try:
        yield
    finally:
        del Linear.weight  # its base class' is found again


def base_name(name: str) -> str:
    """A weight's name in the model without adapters.

    >>> base_name("model.layers.0.self_attn.q_proj.base_layer.weight")
    'model.layers.0.self_attn.q_proj.weight'
    """
    return name.replace(f"{BASE}.", ".")


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name is an adapter's."""
    return ".lora_A." in name or ".lora_B." in name


def bound(name: str, shape: tuple[int, ...]) -> float:
    """An adapter's first values are uniform between -bound and bound: A's as peft's kaiming_uniform_(a=sqrt(5)), 1 / sqrt(in), B's zero
    (peft/tuners/lora/layer.py, reset_lora_parameters)."""
    return 1 / sqrt(prod(shape[1:])) if ".lora_A." in name else 0.0


def peft_name(name: str) -> str:
    """An adapter's name in peft's files.

    >>> peft_name("model.layers.0.self_attn.q_proj.lora_A.default.weight")
    'base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight'
    """
    return PREFIX + name.replace(f".{ADAPTER}.", ".")


def scalings(model: torch.nn.Module) -> dict[str, tuple[str, str, float]]:
    """For each adapted weight, by its name: the names of its A and B, and what their product is multiplied by."""
    found = {}
    for name, module in model.named_modules():
        if hasattr(module, "lora_A") and ADAPTER in getattr(module, "scaling", {}):
            a, b = (f"{name}.lora_{letter}.{ADAPTER}.weight" for letter in "AB")
            found[f"{name}{BASE}.weight"] = (a, b, float(module.scaling[ADAPTER]))
    return found


def transposed(model: torch.nn.Module, name: str) -> bool:
    """Whether a weight is kept (in, out), as GPT-2's are."""
    return bool(getattr(model.get_submodule(name.removesuffix(f"{BASE}.weight")), "fan_in_fan_out", False))


Gathered = Callable[[list[torch.nn.Parameter]], Any]
Whole = Callable[[str, torch.Tensor], torch.Tensor]


def merged(model: torch.nn.Module, gathered: Gathered, whole: Whole) -> Iterator[tuple[str, torch.Tensor]]:
    """(name in the model without adapters, W + scaling B A) one after the other; the sum is taken in fp32. `gathered`: a context in which
    partitioned parameters are whole; `whole`: joins tensor-parallel ranks' parts of a named one. All ranks go through it together."""
    parameters, adapted = dict(model.named_parameters()), scalings(model)
    for name, parameter in parameters.items():
        if is_adapter(name):
            continue
        a, b, scaling = adapted.get(name, ("", "", 0.0))
        pair = [parameters[a], parameters[b]] if a else []
        with torch.no_grad(), gathered([parameter, *pair]):
            tensor = whole(name, parameter.detach().clone())
            if pair:
                delta = scaling * (whole(b, pair[1].detach()).float() @ whole(a, pair[0].detach()).float())
                tensor = (tensor.float() + (delta.T if transposed(model, name) else delta)).to(tensor.dtype)
        yield base_name(name), tensor.cpu()


def adapters(model: torch.nn.Module, gathered: Gathered, whole: Whole) -> Iterator[tuple[str, torch.Tensor]]:
    """(name in peft's files, whole tensor), as `merged`."""
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            with torch.no_grad(), gathered([parameter]):
                tensor = whole(name, parameter.detach().clone())
            yield peft_name(name), tensor.cpu()


def write_adapters(named: Iterator[tuple[str, torch.Tensor]], fields: dict[str, Any], source: str | None, folder: Path) -> None:
    """Writes peft's two files; the configuration last, and with it the adapters are whole."""

    folder.mkdir(parents=True, exist_ok=True)
    parts.save_tensors({name: tensor.contiguous() for name, tensor in named}, folder / FILES[1], {"format": "pt"})
    described = config(fields, source)
    described.inference_mode = True
    described.save_pretrained(str(folder))
    with contextlib.suppress(FileNotFoundError):  # peft sorts no sets: the same adapters, the same file
        path = folder / FILES[0]
        content = json.loads(path.read_text())
        content["target_modules"] = sorted(content["target_modules"])
        path.write_text(json.dumps(content, indent=2, sort_keys=True))
