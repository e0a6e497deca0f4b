"""LoRA's adapters in transformers' models, by peft: a linear becomes `base_layer`, `lora_A.default` and `lora_B.default`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch

from orchestrator.workers.hf_files import save_tensors

ADAPTER: Final = "default"
BASE: Final = ".base_layer"


def config(fields: dict[str, Any], source: str | None, *, used: bool = False) -> Any:
    """peft's LoraConfig for the section "lora" of engine.json. `used`: adapters that are read, not to be trained on."""
    import peft

    keywords = {name: value for name, value in fields.items() if name != "merge"}
    return peft.LoraConfig(**keywords, bias="none", base_model_name_or_path=source, inference_mode=used)


def put_in(model: Any, fields: dict[str, Any]) -> None:
    """Puts adapters, of the base's data type, into the model as the section "lora" of engine.json says; all else is frozen."""
    import peft

    peft.inject_adapter_in_model(config(fields, None), model, ADAPTER)
    for parameter in model.parameters():
        if parameter.requires_grad:
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


def merged(model: torch.nn.Module, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights of the model without adapters: W + scaling B A, summed in fp32. `state`: all whole weights by name."""
    found = {}
    for name, tensor in state.items():
        module = model.get_submodule(name.removesuffix(f"{BASE}.weight")) if name.endswith(f"{BASE}.weight") else None
        if module is not None:
            a, b = (state[name.replace(f"{BASE}.", f".lora_{letter}.{ADAPTER}.")] for letter in "AB")
            delta = module.scaling[ADAPTER] * (b.float() @ a.float())
            tensor = (tensor.float() + (delta.T if module.fan_in_fan_out else delta)).to(tensor.dtype)
        if ".lora_" not in name:
            found[name.replace(f"{BASE}.", ".")] = tensor
    return found


def write(state: dict[str, torch.Tensor], fields: dict[str, Any], source: str | None, folder: Path) -> None:
    """Writes the adapters among these weights as peft's PeftModel does (peft_model.py, save_pretrained)."""
    adapters = {f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}": tensor for name, tensor in state.items() if ".lora_" in name}
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(adapters, folder / "adapter_model.safetensors", {"format": "pt"})
    config(fields, source, used=True).save_pretrained(str(folder))
