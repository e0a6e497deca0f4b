"""Every operation of a forward and backward pass on the meta device, by the part of the model that it belongs to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import prod
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from orchestrator.model.ops import Attention, Gemm, Op, Pointwise, Saved
from orchestrator.model.parts.attention import LOGSUMEXP_BYTES
from orchestrator.model.parts.part import MASK_BYTES
from orchestrator.tracing.attention import Call
from orchestrator.tracing.flow import NOWHERE, Flow, Sources, storage

aten = torch.ops.aten
PRODUCTS: Final = {"mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "convolution", "_convolution"}
FREE: Final = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh", "lift_fresh_copy", "detach", "alias"}
"""Operations that move nothing."""


class ValueAskedError(Exception):
    """The code asks for a number that depends on the data."""


def moved(tensor: torch.Tensor) -> int:
    """Bytes that are read or written: those of a broadcast tensor once."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def is_meta(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "meta"


class Part:
    """A stretch of the forward pass: a block, or what lies between two."""

    def __init__(self, path: str | None) -> None:
        self.path = path
        self.ops: list[Op] = []
        self.sources: list[Sources] = []
        """The sources of what each operation gives."""
        self.saved_sources: list[Sources] = []
        self.saves: list[tuple[int, Saved]] = []
        """What is kept for backward, each with how many operations were before it."""
        self.parameters: dict[str, torch.nn.Parameter] = {}
        self.again: dict[str, torch.nn.Parameter] = {}
        """Parameters of this part that an earlier part has too."""
        self.forward_bytes = self.backward_bytes = 0
        self.input_elements = self.output_elements = 0
        self.entered = 0
        """Identity of the storage of the tensor that enters this part."""
        self.width = 0
        """Last dimension of the tensor that enters this part."""
        self.edges: list[tuple[int, int]] = []
        """(index of the part that made it, elements) of tensors that enter beside that."""

    @property
    def empty(self) -> bool:
        return self.path is None and not self.parameters and not any(isinstance(op, Gemm | Attention) or op.elements for op in self.ops)


class Recorder(TorchDispatchMode):
    """Counts what runs, for a batch of one. `answer_values`: whether code that asks for a tensor's number gets one, noted in `assumed`;
    otherwise it raises ValueAskedError."""

    def __init__(self, model: torch.nn.Module, itemsize: int, answer_values: bool) -> None:
        super().__init__()
        self.itemsize, self.answer_values = itemsize, answer_values
        self.names = {storage(parameter): name for name, parameter in model.named_parameters()}
        self.of_name = dict(model.named_parameters())
        self.flow = Flow(model)
        self.constants = {*self.names, *(storage(buffer) for buffer in model.buffers())}
        self.owner: dict[str, int] = {}
        self.parts: list[Part] = [Part(None)]
        self.current: int = 0
        self.backward = False
        self.assumed: Counter[str] = Counter()
        self.biased = False
        self.rows: dict[int, int] = {}
        """Rows of the tables in which the numbers of a tensor, by its storage, are looked up: of the smallest."""
        self.classes = 0
        """Classes that the last cross entropy tells apart; 0: there was none."""
        self._derived: dict[int, str] = {}
        """Storages that are a parameter's in another type or layout."""
        self._kept: set[int] = set()
        self._alive: list[Any] = []
        """A storage's address must not come back."""
        self._maker: dict[int, int] = {}

    # ------------------------------------------------------------------------------------------------ parts

    @property
    def part(self) -> Part:
        return self.parts[self.current]

    def begin(self, path: str | None) -> int:
        self.parts.append(Part(path))
        self.current = len(self.parts) - 1
        return self.current

    def maker(self, tensor: torch.Tensor) -> int | None:
        """Index of the part that made this tensor; None: no part did."""
        return self._maker.get(storage(tensor))

    def use(self, name: str, part: int) -> None:
        """A parameter is used in a part."""
        if self.owner.setdefault(name, part) == part:
            self.parts[part].parameters[name] = self.of_name[name]
        else:
            self.parts[part].again[name] = self.of_name[name]

    # ------------------------------------------------------------------------------------------------ saved tensors

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        key = storage(tensor)
        if tensor.device.type == "meta" and key not in self.constants and key not in self._derived and key not in self._kept:
            self._kept.add(key)
            self._alive.append(tensor)
            nbytes = tensor.untyped_storage().nbytes()
            size = tensor.element_size()
            itemsize = None if size == self.itemsize and tensor.is_floating_point() else size
            maker = self._maker.get(key)
            # What enters a part belongs to it; anything else to the part that made it, however many later ones keep it too.
            part = self.part if maker is None or key == self.part.entered else self.parts[maker]
            saved = Saved(name=f"saved_{len(part.saves)}", elements=nbytes // size, itemsize=itemsize, shard="none")
            part.saves.append((len(part.ops), saved))
            part.saved_sources.append(self.flow.of(tensor))
        return tensor

    # ------------------------------------------------------------------------------------------------ operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = func._overloadpacket
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if any(map(is_meta, leaves)):
            answered, value = self._answer(packet, args, kwargs)
            if answered:
                return value
            if any(leaf.device.type == "cpu" and leaf.dim() for leaf in leaves):
                args, kwargs = tree_map_only(torch.Tensor, lambda t: t.to("meta") if t.device.type == "cpu" else t, (args, kwargs))
        name = packet.__name__
        out = self._grouped(args) if name == "_grouped_mm" else func(*args, **kwargs)
        sources = NOWHERE
        if not self.backward:
            used = [self.names.get(storage(t)) or self._derived.get(storage(t)) for t in leaves]
            given = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
            sources = self.flow.step(name, args, leaves, given, [weight for weight in used if weight])
            self._look_up(name, args)
        if any(map(is_meta, tree_leaves((args, kwargs, out)))):
            self._count(func, name, args, kwargs, out, sources)
        return out

    def _look_up(self, name: str, args: Any) -> None:
        """Notes a table's rows, or the classes of a cross entropy."""
        if name == "nll_loss_forward":
            self.classes = args[0].shape[-1]
        elif name in ("embedding", "index"):
            indices = args[1] if name == "embedding" else args[1][0]
            if indices is not None and storage(args[0]) in self.names:
                rows = args[0].shape[0]
                self.rows[storage(indices)] = min(rows, self.rows.get(storage(indices), rows))

    def _answer(self, packet: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
        """(whether this asks what a tensor without numbers can't say, what it is told)."""
        if packet is aten.histc:  # only its shape counts: tokens by expert
            return True, args[0].new_empty(kwargs.get("bins", args[1] if len(args) > 1 else 100))
        if packet is aten.masked_select:  # all of it, as where nothing is padded
            return True, args[0].new_empty(args[0].numel())
        asks = packet in (aten._local_scalar_dense, aten.item, aten.equal, aten.is_nonzero, aten.nonzero, aten._is_all_true)
        if not asks:
            return False, None
        if not self.answer_values:
            raise ValueAskedError(packet.__name__)
        self.assumed[packet.__name__] += 1
        if packet is aten.nonzero:
            return True, args[0].new_empty((args[0].numel(), args[0].dim()), dtype=torch.long)
        if packet is aten._is_all_true:
            return True, torch.ones((), dtype=torch.bool)
        return True, packet is aten.equal

    @staticmethod
    def _grouped(args: Any) -> torch.Tensor:
        """The shape of a grouped product: rows x (k, n) an expert; or, of the weights' gradient, (k x rows) x (rows x n) by expert."""
        a, b = args[0], args[1]
        if a.dim() == 2 and b.dim() == 3:
            return a.new_empty(a.shape[0], b.shape[2])
        groups = args[2].shape[0]
        return a.new_empty(groups, a.shape[-2], b.shape[-1])

    def _count(self, func: Any, name: str, args: Any, kwargs: Any, out: Any, sources: Sources) -> None:
        ins = {storage(t): t for t in tree_leaves((args, kwargs)) if is_meta(t)}
        outs = [t for t in tree_leaves(out) if is_meta(t)]
        inplace = func._schema.name.endswith("_") and not func._schema.name.endswith("__")
        if name in FREE or not outs or (not inplace and all(storage(t) in ins for t in outs)):
            return  # nothing moves: a new tensor without content, or a view
        used = [self.names.get(key) or self._derived.get(key) for key in ins]
        weights = [weight for weight in used if weight]
        for tensor in outs:
            self._alive.append(tensor.untyped_storage())
            self._maker[storage(tensor)] = self.current
            if (
                weights
                and len(weights) == len(ins)
                and not inplace
                and not self.backward
                and tensor.numel() == prod(self.of_name[weights[0]].shape)
            ):
                self._derived[storage(tensor)] = weights[0]
        if not self.backward:
            for weight in weights:
                self.use(weight, self.current)
        if name in PRODUCTS or name == "convolution_backward":
            if not self.backward:
                self._add(self._product(name, args, out, weights), sources)
            return
        nbytes = sum(map(moved, ins.values())) + sum(map(moved, outs))
        if self.backward:
            self.part.backward_bytes += nbytes
            return
        self.part.forward_bytes += nbytes
        elements = max(t.numel() for t in (*ins.values(), *outs))
        # `moved` counts in a 2-byte dtype.
        per_element = nbytes / max(1, elements) * 2 / self.itemsize
        self._add(Pointwise(name=name, elements=elements, moved=per_element, shard="none"), sources)

    def _add(self, op: Op, sources: Sources) -> None:
        self.part.ops.append(op)
        self.part.sources.append(sources)

    def _product(self, name: str, args: Any, out: Any, weights: list[str]) -> Gemm:
        """A matrix product, called after the parameter in it."""
        if name in ("addmm", "baddbmm"):
            args = args[1:]
        a, b = args[0], args[1]
        experts = 0
        if name in ("convolution", "_convolution"):
            tokens, k, n = out.numel() // b.shape[0], prod(b.shape[1:]), b.shape[0]
            if args[6]:  # transposed: every element of the input meets a whole kernel
                tokens, k, n = a.numel() // b.shape[0], b.shape[0], prod(b.shape[1:])
        elif name == "_grouped_mm":
            tokens, k, n, experts = a.shape[-2], a.shape[-1], out.shape[-1], b.shape[0] if b.dim() == 3 else 0
        elif name in ("bmm", "baddbmm"):
            tokens, k, n = a.shape[0] * a.shape[1], a.shape[2], b.shape[2]
            experts = b.shape[0] if weights else 0
        else:
            tokens, k, n = a.shape[0], a.shape[1], b.shape[1]
        return Gemm(name=weights[0] if weights else name, tokens=tokens, k=k, n=n, experts=experts)

    def attention(self, call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, by_head: bool) -> None:
        """Records one call of attention in the forward pass."""
        sources = self.flow.attend(q, k, v, out, by_head)
        rows = call.heads * call.query_len
        scores = rows * call.key_len
        saves = [
            Saved(name="softmax", elements=scores, shard="none", group="core_attention", quadratic=True),
            Saved(name="logsumexp", elements=rows, shard="none", itemsize=LOGSUMEXP_BYTES, group="core_attention", flash_only=True),
        ]
        if call.dropout:
            saves += [
                Saved(name="dropout_mask", elements=scores, shard="none", itemsize=MASK_BYTES, quadratic=True),
                Saved(name="dropout", elements=scores, shard="none", quadratic=True),
            ]
        self.biased |= call.biased
        self._add(
            Attention(
                name="attention",
                query_len=call.query_len,
                key_len=call.key_len,
                heads=call.heads,
                kv_heads=call.kv_heads,
                head_dim=(call.key_dim + call.value_dim) // 2,
                causal=call.causal and call.query_len == call.key_len,
                window=call.window if call.causal and call.window < call.key_len else 0,
                saves=tuple(saves),
            ),
            sources,
        )


def floats(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a value through which gradients flow."""
    for leaf in tree_leaves(value):
        if is_meta(leaf) and leaf.is_floating_point() and leaf.requires_grad:
            yield leaf
