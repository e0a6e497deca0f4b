"""What frozen weights that bitsandbytes 0.50 holds in few bits (`Lora.bits`) take beside the products themselves, counted from its source
(autograd/_functions.py, MatMul4Bit and MatMul8bitLt; backends/cuda/ops.py, backends/default/ops.py)."""

from __future__ import annotations

from typing import Final, NamedTuple

from orchestrator.hardware.spec import Gpu
from orchestrator.model.lora import NF4_BYTES
from orchestrator.model.spec import Gemm, LayerSpec
from orchestrator.strategy.spec import Strategy
from orchestrator.units import ITEMSIZE

HALF: Final = 2
"""Bytes of an element of fp16, which LLM.int8 casts its inputs to (_functions.py:140) and its outputs from (cuda/ops.py:210)."""
INT8_LAUNCHES: Final = (17, 3)
"""Kernels beside a product in 8 bits, forward and backward: the cast; |A|, its comparison with 6.0, whether any is larger, of all and of
each column, and the columns' numbers in two (cuda/ops.py:230); the quantisation, and outliers set to 0 (:239, :252); the scaling and the
cast back (:195, :210); of outliers the inputs, the weights, which are scaled in two and cast, and their product (default/ops.py:78). In
backward the cast of weights, of their scales, and the scaling (_functions.py:237)."""
BLACKWELL_ULTRA: Final = "10.3"
"""Compute capability of B300 and GB300."""
INT8_SLOWDOWN: Final = 2250 / 150
"""How many times as long as in 16 bits a product takes in 8 on Blackwell Ultra, whose INT8 is cut: 2.25 PFLOP/s and 0.15 POP/s, dense
(NVIDIA's Blackwell architecture technical brief, table of system specifications). On others int8 tensor cores are no slower."""


class Moved(NamedTuple):
    """Bytes that the two passes move beside a product's own."""

    forward: float
    backward: float


def moved(op: Gemm, m: float, k: float, n: float, precision: str, weight: float) -> Moved:
    """Bytes beside the product of m x k by k x n. `weight`: bytes of one in the training's type. In 4 bits weights are made 16 before each
    product. In 8 bits, whose products are priced at the rate of 16 or by `int8_slowdown`, inputs are cast, searched for
    outliers (|A| read and written, compared, looked through in all and by column) and quantised, the sums of 32 bits are scaled and cast,
    and what outliers add is added, as if every product had some: models from 6.7B on have (arXiv 2208.07339, section 4). Before backward's
    product weights are cast, and scaled in place."""
    if op.bits is None:
        return Moved(0.0, 0.0)
    if op.bits == 4:
        unpacked = (NF4_BYTES + weight) * k * n
        return Moved(unpacked, unpacked)
    itemsize = ITEMSIZE[precision]
    cast = 0 if precision == "fp16" else itemsize + HALF
    searched, taken = 2 * HALF + HALF + 1 + 1 + 1, HALF + 1
    scaled = 4 + HALF
    return Moved(m * k * (cast + searched + taken) + m * n * (scaled + cast + 2 * itemsize), (1 + weight + 2 * weight) * k * n)


def int8_slowdown(op: Gemm, gpu: Gpu) -> float:
    """How many times as long as in 16 bits the product takes forward, where it is one of 8 bits; backward's is one of 16."""
    return INT8_SLOWDOWN if op.bits == 8 and gpu.compute_capability == BLACKWELL_ULTRA else 1.0


def working(
    layer: LayerSpec, strategy: Strategy, micro_batch_size: int, precision: str, weight: float, recomputed: bool
) -> tuple[float, float]:
    """Bytes (forward, backward) that are alive while the layer's largest product is made, beside its input and output. In 4 bits one weight
    is made 16 bits at a time; in 8 bits that is in backward, and forward, or backward where it is `recomputed`, has the input's casts or
    the quantised input with the sums of 32 bits and their fp16."""
    ops = [op for op in layer.ops if isinstance(op, Gemm) and op.bits is not None]
    unpacked = max((op.k * op.n for op in ops), default=0) * weight
    if all(op.bits == 4 for op in ops):
        return unpacked, unpacked
    half = 0 if precision == "fp16" else HALF  # is the input, or the output, itself
    tokens = micro_batch_size / strategy.mesh.cp
    forward = tokens * max(op.tokens * max((half + HALF + 1) * op.k, op.k + (4 + half) * op.n) for op in ops)
    return forward, max(unpacked, forward if recomputed else 0.0)
