"""The repeated blocks of a model: what pipelines cut between and recompute drops whole."""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn

HEAVY = 0.001
"""Share of the model's parameters below which a list of modules is no stack of blocks."""
Form = tuple[str, tuple[tuple[str, torch.Size], ...]]


def form(module: nn.Module) -> Form:
    """The class of a module with the names and shapes of its parameters (whole ones, where ZeRO has divided them)."""
    shapes = tuple((name, torch.Size(getattr(p, "ds_shape", p.shape))) for name, p in module.named_parameters())
    return type(module).__name__, shapes


def numel(module: nn.Module) -> int:
    return sum(getattr(p, "ds_numel", p.numel()) for p in module.parameters())


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Blocks by path: the children of the outermost lists in which a form repeats. A list of unlike modules is entered where they have
    such lists themselves (Swin's stages), and is a list of blocks where they are of one class (hybrid models)."""
    total = numel(model)
    found: dict[str, nn.Module] = {}

    def visit(module: nn.Module, prefix: str) -> None:
        for name, child in module.named_children():
            path = f"{prefix}.{name}" if prefix else name
            members = [(index, each) for index, each in child.named_children() if numel(each)]
            if isinstance(child, nn.ModuleList | nn.Sequential) and len(members) > 1 and numel(child) > HEAVY * total:
                forms = Counter(form(each) for _, each in members)
                classes = {type(each) for _, each in members}
                repeated = max(forms.values()) > 1 and len(classes) <= 2
                alike = len(classes) == 1 and isinstance(child, nn.ModuleList) and not any(_has_stack(each) for _, each in members)
                if repeated or alike:
                    found.update({f"{path}.{index}": each for index, each in members})
                    continue
            visit(child, path)

    visit(model, "")
    return found


def _has_stack(module: nn.Module) -> bool:
    return any(isinstance(child, nn.ModuleList) and len(child) > 0 for child in module.modules())
