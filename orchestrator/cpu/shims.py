"""What megatron-core 0.16.1 needs to run on a machine without a GPU. Applied once, only where there is none.

megatron-core names the device "cuda" in literals and asks `torch.cuda` for devices, streams and generator states. Each shim below answers
one of these questions with the CPU and says where it is asked; nothing here changes arithmetic. On a GPU this file is not imported.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch

_applied = False

FACTORIES = ("zeros", "ones", "empty", "full", "tensor", "arange", "empty_like", "zeros_like")
"""torch functions that megatron-core calls with device="cuda"."""


def apply() -> None:
    """Apply every shim; a second call does nothing."""
    global _applied
    if _applied:
        return
    _applied = True
    for shim in (_devices, _factories, _moves, _streams, _generators, _tensor_types, _norms, _checkpoint_without_output):
        shim()
    for shim in (_router_product, _token_counts, _uneven_pieces, _unpinned, _gathering_attention, _expert_biases):
        shim()


def _devices() -> None:
    """Lets `device=torch.cuda.current_device()`, which stands in 30 places, name the CPU: tensor_parallel/mappings.py:91,
    distributed/param_and_grad_buffer.py:783."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda device=None: None


def on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The function of torch's with device="cuda" read as the CPU."""

    @functools.wraps(factory)
    def call(*args: Any, **kwargs: Any) -> torch.Tensor:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
            # models/common/embeddings/rotary_pos_embedding.py and utils.py:2117 pin what they build for the GPU.
            kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return call


def _factories() -> None:
    """`device="cuda"` in literals: pipeline_parallel/schedules.py:596,983,2138, optimizer/optimizer.py:473,481,485,907,
    optimizer/clip_grads.py:90,103,115, transformer/utils.py:35."""

    from torch.utils._device import _device_constructors

    _device_constructors()  # listed once, when `with torch.device(...)` is first used: by torch's own functions, which ours call
    for name in FACTORIES:
        setattr(torch, name, on_cpu(getattr(torch, name)))


def _moves() -> None:
    """`.cuda()` and `.to("cuda")` of tensors and modules: optimizer/optimizer.py:375,380, tensor_parallel/data.py:84,
    dist_checkpointing."""
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self
    move = torch.Tensor.to

    @functools.wraps(move)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and isinstance(args[0], str | torch.device) and str(args[0]).startswith("cuda"):
            args = ("cpu", *args[1:])
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return move(self, *args, **kwargs)

    torch.Tensor.to = to


class _Stream:
    """A stream or event where everything has happened already."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record_event(self, event: Any = None) -> _Stream:
        """transformer/moe/token_dispatcher.py:895 waits for the event that it is answered."""
        return event or _Stream()

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


def _streams() -> None:
    """torch.cuda streams around asynchronous copies and collectives: distributed/param_and_grad_buffer.py:417-422,
    dist_checkpointing/strategies/filesystem_async.py."""
    torch.cuda.Stream = torch.cuda.Event = _Stream
    torch.cuda.current_stream = torch.cuda.default_stream = lambda device=None: _Stream()
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    # The combined schedule keeps tensors for its streams and names its parts: pipeline_parallel/utils.py:212-264.
    torch.Tensor.record_stream = lambda self, stream: None
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *args: 0
    torch.cuda.nvtx.range = lambda *args: contextlib.nullcontext()


def _generators() -> None:
    """Dropout and recompute fork CUDA generator states (tensor_parallel/random.py:41-111,150-280): here the CPU generator's."""
    from megatron.core.tensor_parallel import random

    torch.cuda.manual_seed = torch.manual_seed
    torch.cuda.get_rng_state = lambda device="cuda": torch.get_rng_state()
    torch.cuda.set_rng_state = lambda new_state, device="cuda": torch.set_rng_state(new_state)
    random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    random._set_cuda_rng_state = lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(new_state)


def _tensor_types() -> None:
    """The optimizers sort parameters by `param.type() == "torch.cuda.FloatTensor"` (optimizer/optimizer.py:671,690,
    optimizer/distrib_optimizer.py:361,420): the CPU's types take those names."""
    tensor_type = torch.Tensor.type

    @functools.wraps(tensor_type)
    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = tensor_type(self, *args, **kwargs)
        if isinstance(answer, str) and answer.startswith("torch.") and not answer.startswith("torch.cuda."):
            return "torch.cuda." + answer.removeprefix("torch.")
        return answer

    torch.Tensor.type = type_


def _norms() -> None:
    """transformer/torch_norm.py:32 refuses sequence parallelism, because torch's norms don't carry the tag by which
    distributed/finalize_model_grads.py sums their gradients over the tensor-parallel group. This norm carries it."""
    from megatron.core.models import backends
    from megatron.core.models.bert import bert_layer_specs
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.models.T5 import t5_spec
    from megatron.core.transformer import torch_norm, transformer_block

    class TaggedNorm:
        def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> torch.nn.Module:
            kind = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
            norm = kind(hidden_size, eps=eps)
            for parameter in norm.parameters():
                parameter.sequence_parallel = config.sequence_parallel
            return norm

    original = torch_norm.WrappedTorchNorm
    for module in (torch_norm, backends, bert_layer_specs, gpt_layer_specs, t5_spec, transformer_block):
        for name, value in list(vars(module).items()):
            if value is original:
                setattr(module, name, TaggedNorm)
    _respec(bert_layer_specs, original, TaggedNorm)


def _respec(module: Any, old: type, new: type) -> None:
    """Specs made when their module was imported hold the old class."""
    for value in list(vars(module).values()):
        submodules = getattr(value, "submodules", None)
        for name, part in vars(submodules).items() if submodules is not None else ():
            if part is old:
                setattr(submodules, name, new)


def _checkpoint_without_output() -> None:
    """tensor_parallel/random.py:589 asks Transformer Engine for its FP8 state even where there is none."""
    from megatron.core.tensor_parallel import random

    if hasattr(random, "FP8GlobalStateManager"):
        return

    class NoFP8:
        is_fp8_enabled = staticmethod(lambda: False)

    random.FP8GlobalStateManager = NoFP8
    random.activation_recompute_forward = lambda *args, **kwargs: contextlib.nullcontext()
    random.fp8_autocast = lambda *args, **kwargs: contextlib.nullcontext()


def _router_product() -> None:
    """transformer/moe/moe_utils.py:1192 asks for Transformer Engine's product by a name that is bound only where that is installed."""
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def _token_counts() -> None:
    """transformer/moe/token_dispatcher.py:866 makes lists of the counts of tokens that it moves off a GPU; here they stay tensors, and
    tensor_parallel/mappings.py:444 hands them to a collective that wants integers."""
    import torch.distributed as dist

    exchange = dist.all_to_all_single

    def integers(counts: Any) -> list[int] | None:
        return None if counts is None else [int(count) for count in counts]

    @functools.wraps(exchange)
    def all_to_all_single(
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        return exchange(output, input, integers(output_split_sizes), integers(input_split_sizes), group, async_op)

    dist.all_to_all_single = all_to_all_single


def _uneven_pieces() -> None:
    """Expert tensor parallelism gathers and scatters pieces of different lengths (tensor_parallel/mappings.py:150,188), as NCCL can and
    gloo can't: here pieces are broadcast, and sums are made whole before they are cut."""
    import torch.distributed as dist

    even_gather, even_scatter = dist.all_gather, dist.reduce_scatter

    @functools.wraps(even_gather)
    def all_gather(tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
        if len({piece.shape for piece in tensor_list}) == 1:
            return even_gather(tensor_list, tensor, group=group, async_op=async_op)
        for rank, piece in zip(dist.get_process_group_ranks(group), tensor_list, strict=True):
            if rank == dist.get_rank():
                piece.copy_(tensor)
            dist.broadcast(piece, rank, group=group)
        return None

    @functools.wraps(even_scatter)
    def reduce_scatter(
        output: torch.Tensor, input_list: list[torch.Tensor], op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        if len({piece.shape for piece in input_list}) == 1:
            return even_scatter(output, input_list, op=op, group=group, async_op=async_op)
        whole = torch.cat([piece.contiguous() for piece in input_list])
        dist.all_reduce(whole, op=op, group=group)
        output.copy_(torch.split(whole, [len(piece) for piece in input_list])[dist.get_rank(group)])
        return None

    dist.all_gather, dist.reduce_scatter = all_gather, reduce_scatter


def _unpinned() -> None:
    """models/common/embeddings/rope_utils.py:63 pins a tensor that it makes on the CPU by name."""
    make = torch.tensor

    @functools.wraps(make)
    def tensor(*args: Any, **kwargs: Any) -> torch.Tensor:
        kwargs.pop("pin_memory", None)
        return make(*args, **kwargs)

    torch.tensor = tensor


def _expert_biases() -> None:
    """transformer/mlp.py:247 adds an expert's bias in place to what tensor_parallel/layers.py's RowParallelLinear hands through, a view
    that a function of autograd's own made, which torch refuses. Transformer Engine's layers have no such view."""
    from megatron.core.tensor_parallel.layers import RowParallelLinear

    plain = RowParallelLinear.forward

    @functools.wraps(plain)
    def forward(self: Any, input_: torch.Tensor) -> Any:
        output, bias = plain(self, input_)
        return (output.clone() if self.is_expert and bias is not None else output), bias

    RowParallelLinear.forward = forward


def _gathering_attention() -> None:
    """Puts an attention that gathers keys and values in the place of one that refuses context parallelism
    (transformer/dot_product_attention.py:57)."""
    from megatron.core.models import backends

    from orchestrator.cpu.attention import AllGatherAttention

    backends.LocalSpecProvider.core_attention = lambda self: AllGatherAttention
