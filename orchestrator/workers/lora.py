"""LoRA's adapters in transformers' models, by peft: a linear becomes `base_layer`, `lora_A.default` and `lora_B.default`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch

from orchestrator.workers.hf_files import save_tensors

ADAPTER: Final = "default"


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


def merged(plain: Any, fields: dict[str, Any], state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights of the model without adapters, each with what its adapter adds. `plain`: this model, which may be on the meta device;
    `state`: all whole weights by name, with those of the section "lora" of engine.json."""
    import peft

    tuned = peft.LoraModel(plain, {ADAPTER: config(fields, None)}, ADAPTER)
    plain.load_state_dict(state, strict=False, assign=True)
    plain.tie_weights()
    found: dict[str, torch.Tensor] = tuned.merge_and_unload().state_dict()
    return found


def write(state: dict[str, torch.Tensor], fields: dict[str, Any], source: str | None, folder: Path) -> None:
    """Writes the adapters among these weights as peft's PeftModel does (peft_model.py, save_pretrained)."""
    adapters = {f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}": tensor for name, tensor in state.items() if ".lora_" in name}
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(adapters, folder / "adapter_model.safetensors", {"format": "pt"})
    config(fields, source, used=True).save_pretrained(str(folder))
