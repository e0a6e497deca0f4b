"""Initial weights that depend on the seed alone, not on how the model is cut over ranks.

megatron-core gives every parameter a global name, shape and offset (`sharded_state_dict`). Each block of rows of such a tensor has its own
generator, seeded by (seed, name, layer, block); a rank draws only the blocks that its shard touches, so no rank ever holds a whole
tensor of a large model. The distribution is megatron-core's: normal with `init_method_std`, divided by sqrt(2 * layers) for the
projections that write into the residual stream (transformer_config.py `output_layer_init_method`), ones for norms, zeros for biases.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from math import prod, sqrt
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

from orchestrator.workers.parts import Place

BLOCK_ELEMENTS = 2**22
"""Elements drawn at once: 16 MiB in fp32, small beside any model and large enough to keep a GPU busy."""
DRAWN_TOGETHER = 16
"""Normal numbers that torch computes together, from as many uniform ones (aten/src/ATen/native/cpu/DistributionTemplates.h,
normal_fill)."""
RESIDUAL_WEIGHTS = ("linear_proj.weight", "linear_fc2.weight")
BALANCE = "router.expert_bias"


def sharded_state(model: torch.nn.Module) -> dict[str, Any]:
    """Every tensor of a model chunk with its place in the whole model. The copy of the embedding in a stage of multi-token prediction asks
    for the group of its replicas (gpt_model.py:834)."""
    return model.sharded_state_dict(metadata={"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)})


def shards(models: Sequence[torch.nn.Module]) -> Iterator[ShardedTensor]:
    """Every floating-point tensor of these model chunks with its global name (`key`), `global_shape` and `global_offset`; `data` is
    the parameter's own storage."""
    for model in models:
        state = sharded_state(model)
        apply_factories(state)
        for shard in nested_values(state):
            if isinstance(shard, ShardedTensor) and shard.data is not None and shard.data.is_floating_point():
                yield shard


def places(models: Sequence[torch.nn.Module]) -> list[Place]:
    """Every shard of freshly built chunks of megatron-core that is a range of a parameter."""
    parameters = {p.untyped_storage().data_ptr(): p for model in models for p in model.parameters()}
    found = ((shard, parameters.get(shard.data.untyped_storage().data_ptr())) for shard in shards(models))
    return [_place(shard, parameter) for shard, parameter in found if parameter is not None]


def balances(models: Sequence[torch.nn.Module]) -> list[Place]:
    """The biases that balance the load of experts (router.py, expert_bias): buffers, which Float16Module replaces, so that they are asked
    for when they are needed."""
    return [_place(shard, shard.data) for shard in shards(models) if shard.key.endswith(BALANCE)]


def routers_with_bias(models: Sequence[torch.nn.Module]) -> list[tuple[torch.nn.Module, torch.Tensor]]:
    """Each router of experts that has such a bias, and the bias."""
    found = [(module, getattr(module, "expert_bias", None)) for model in models for module in model.modules()]
    return [(module, bias) for module, bias in found if bias is not None]


def _place(shard: ShardedTensor, whole: torch.Tensor) -> Place:
    lead = shard.prepend_axis_num
    *copies, dp_rank = shard.replica_id
    return Place(
        key=shard.key,
        index=tuple(shard.global_offset[:lead]),
        offset=tuple(shard.global_offset[lead:]),
        shape=tuple(shard.data.shape),
        global_shape=tuple(shard.global_shape[lead:]),
        parameter=whole,
        start=shard.data.storage_offset() - whole.storage_offset(),
        first=not any(copies),
        main=not any(copies) and dp_rank == 0,
    )


def initialise(models: Sequence[torch.nn.Module], config: Any, seed: int) -> None:
    """Fill every parameter of these model chunks in place. `config`: the TransformerConfig."""
    with torch.no_grad():
        for shard in shards(models):
            if shard.key.endswith("bias"):
                shard.data.zero_()
            elif "norm" in shard.key:
                shard.data.fill_(1.0)
            else:
                std = config.init_method_std
                if shard.key.endswith(RESIDUAL_WEIGHTS):
                    std /= sqrt(2 * config.num_layers)
                _fill_normal(shard, std, seed)


def block_seed(*key: object) -> int:
    """The seed of the generator of one block, 63 bits.

    >>> block_seed(1234, "wte.weight", 0) == block_seed(1234, "wte.weight", 0) != block_seed(1234, "wte.weight", 1)
    True
    """
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _fill_normal(shard: ShardedTensor, std: float, seed: int) -> None:
    """Normal numbers of this shard's place in the global tensor. The number of rows of a block depends on the inner dimensions only,
    so that a vocabulary padded to another length keeps its values."""
    lead = shard.prepend_axis_num
    offset, shape = shard.global_offset, shard.data.shape
    inner = tuple(shard.global_shape[lead + 1 :])
    rows = max(1, BLOCK_ELEMENTS // max(1, prod(inner)))
    first, last = offset[lead], offset[lead] + shape[0]
    inner_slices = tuple(slice(begin, begin + size) for begin, size in zip(offset[lead + 1 :], shape[1:], strict=True))
    generator = torch.Generator(device=shard.data.device)
    block = torch.empty((rows, *inner), dtype=torch.float32, device=shard.data.device)
    for index in range(first // rows, -(-last // rows)):
        begin, end = max(first, index * rows), min(last, (index + 1) * rows)
        generator.manual_seed(block_seed(seed, shard.key, tuple(offset[:lead]), index))
        _drawn(block, (end - index * rows) * prod(inner)).normal_(0.0, std, generator=generator)
        here = block[begin - index * rows : end - index * rows]
        shard.data[begin - first : end - first].copy_(here[(slice(None), *inner_slices)])


def _drawn(block: torch.Tensor, needed: int) -> torch.Tensor:
    """What to fill of the block where its first `needed` numbers are used. A CPU draws one number after the other, 16 at a time, so that
    the first are the same whatever follows, but for the last 16, which are drawn again where the length is not divisible; a GPU's
    depend on how many there are."""
    drawn = -(-needed // DRAWN_TOGETHER) * DRAWN_TOGETHER
    if block.device.type != "cpu" or drawn > block.numel() - DRAWN_TOGETHER:
        return block
    return block.view(-1)[:drawn]
