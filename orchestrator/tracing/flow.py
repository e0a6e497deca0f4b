"""Follows from which linears each tensor comes without passing another linear, by which tensor parallelism is found (Tofu, arXiv
1807.08887, follows the data in the same way, over all operations)."""

from __future__ import annotations

from collections.abc import Iterable
from math import gcd
from typing import Any, Final

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

STREAM: Final = ""
"""What comes from embeddings, convolutions and inputs: the residual stream carries it, so that nothing that reads the stream is a row."""
CUTS: Final = ("split", "split_with_sizes", "slice", "unbind", "select")
FEW: Final = 4
"""Parts that a fused projection has at most."""
Sources = frozenset[str]
NOWHERE: Final[Sources] = frozenset()


def storage(tensor: torch.Tensor) -> int:
    """The identity of the memory that the tensor is in, as long as that is alive."""
    return tensor.untyped_storage()._cdata


class Flow:
    """Sources by storage, and what is seen of them on the way."""

    def __init__(self, model: nn.Module) -> None:
        self.linears = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
        """The linears that an engine can divide, which are plain ones, by name."""
        self.entering: dict[str, Sources] = {}
        """The sources of each linear's input, by the linear's name."""
        self.met: dict[str, Sources] = {}
        """The sources of what each parameter that is no linear's was combined with, by the parameter's name."""
        self.units: dict[str, int] = {}
        """The heads of the output of each linear that attention takes it from, by the linear's name."""
        self.by_head: dict[str, Sources] = {}
        """Why heads can't be divided: sources of attention that is given something head by head."""
        self.reduced: dict[str, int] = {}
        """Number of elements of each linear's input, by the linear's name."""
        self._of: dict[int, Sources] = {}
        self._owner: dict[int, str] = {}
        self._cuts: dict[str, list[tuple[str, tuple[int, ...], Any, list[tuple[int, ...]]]]] = {}
        self._alive: list[Any] = []
        self._handles = [hook for name, module in self.linears.items() for hook in self._follow(name, module)]
        for module in model.modules():
            depthwise = isinstance(module, nn.Conv1d) and module.groups > 1
            if isinstance(module, nn.Embedding | nn.Conv1d | nn.Conv2d | nn.Conv3d) and not depthwise:
                self._handles.append(module.register_forward_hook(lambda m, args, out: self.mark(out, frozenset({STREAM}))))

    def _follow(self, name: str, module: nn.Module) -> list[Any]:
        def before(_: Any, args: Any, kwargs: Any) -> None:
            given = next((leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)), None)
            if given is not None:
                self.entering[name] = self.entering.get(name, NOWHERE) | self.of(given)
                self.reduced[name] = given.numel()

        def after(_: Any, args: Any, kwargs: Any, out: Any) -> None:
            self.mark(out, frozenset({name}))
            self._owner[storage(out)] = name

        return [module.register_forward_pre_hook(before, with_kwargs=True), module.register_forward_hook(after, with_kwargs=True)]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def of(self, tensor: torch.Tensor) -> Sources:
        return self._of.get(storage(tensor), NOWHERE)

    def mark(self, tensor: Any, sources: Sources) -> None:
        if isinstance(tensor, torch.Tensor):
            self._alive.append(tensor.untyped_storage())  # or its address comes back
            self._of[storage(tensor)] = sources

    def step(self, name: str, args: Any, ins: Iterable[torch.Tensor], outs: Iterable[torch.Tensor], weights: Iterable[str]) -> Sources:
        """Follows one operation of the forward pass and returns the sources of what it gives. `weights`: parameters among its inputs."""
        ins, outs = list(ins), list(outs)
        sources = NOWHERE.union(*map(self.of, ins))
        for out in outs:
            self.mark(out, sources | self.of(out))
        if sources:
            for weight in weights:
                if weight.rpartition(".")[0] not in self.linears:
                    self.met[weight] = self.met.get(weight, NOWHERE) | sources
        if ins and name in CUTS and storage(ins[0]) in self._owner:
            seen = (name, tuple(ins[0].shape), args[1:], [tuple(out.shape) for out in outs])
            self._cuts.setdefault(self._owner[storage(ins[0])], []).append(seen)
        return sources

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, by_head: bool) -> Sources:
        """Follows one call of attention and returns the sources of what it gives; q [b, h, s, d], k and v [b, g, t, d]."""
        for tensor in (q, k, v):
            for source in self.of(tensor):
                self.units[source] = gcd(self.units.get(source, 0), tensor.shape[1])
        sources = self.of(q) | self.of(k) | self.of(v)
        self.mark(out, sources)
        if by_head:
            for source in sources:
                self.by_head[source] = sources
        return sources

    def width(self, linear: str) -> int:
        """Width of a linear's output."""
        return int(self.linears[linear].out_features)

    def parts(self, linear: str) -> tuple[int, ...]:
        """How the code takes the linear's output apart along its last dimension: widths in order; () where it does not."""
        n = self.width(linear)
        slices: set[tuple[int, int]] = set()
        for name, shape, args, outs in self._cuts.get(linear, ()):
            if name in ("split", "split_with_sizes") and shape[-1] == n and len(outs) > 1 and sum(out[-1] for out in outs) == n:
                return tuple(out[-1] for out in outs)
            if name == "slice" and shape[-1] == n and outs[0][-1] < n and args and args[0] in (len(shape) - 1, -1):
                slices.add(((args[1] if len(args) > 1 else 0) or 0, outs[0][-1]))
            if name in ("unbind", "select") and len(shape) >= 4 and shape[-1] != n:
                dim = (args[0] if args else 0) % len(shape)
                if torch.Size(shape[dim:]).numel() == n and 1 < shape[dim] <= FEW:
                    return (n // shape[dim],) * shape[dim]
        widths = tuple(width for _, width in sorted(slices))
        return widths if sum(widths) == n else ()
