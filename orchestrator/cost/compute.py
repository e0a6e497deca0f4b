"""Seconds of one layer on one rank for one micro-batch: matrix products by shape, attention, memory-bound operations, launches."""

from __future__ import annotations

from typing import Final, NamedTuple, get_args

from orchestrator.cost import quantised
from orchestrator.cost.calibration import Calibration
from orchestrator.errors import InputError
from orchestrator.hardware.spec import Gpu
from orchestrator.model.ops import Shard
from orchestrator.model.routing import times
from orchestrator.model.spec import Attention, DeltaRule, Gemm, LayerSpec, Pointwise, Scan, padded
from orchestrator.model.training import QUANTISED
from orchestrator.strategy.axes import cp, tp
from orchestrator.strategy.capabilities import StateBytes, Traits
from orchestrator.strategy.spec import Strategy
from orchestrator.units import ITEMSIZE

FLASH_BACKWARD_FLOPS = 2.5
"""FLOPs of flash attention's backward over its forward's: it recomputes the scores, five matrix products against two (arXiv 2307.08691,
section 3.1.2)."""
GEMM_BACKWARD_FLOPS = 2.0
"""FLOPs of a GEMM's backward over its forward's: gradient of the input and of the weight, one product each of the forward's size."""
BACKWARD_LAUNCHES = 2.0
"""Kernels that autograd launches in backward for each of the forward's, about."""
QUANTISING_LAUNCHES = 2
"""Kernels more that a product in 8 or 4 bits launches beside itself: the largest value of its input, and the cast by it (Transformer
Engine, pytorch/csrc/extensions/cast.cpp). Weights are cast once a step, with the first micro-batch."""
SCAN_LAUNCHES = 4
"""Kernels of a state space's forward beside the first (cumulated steps, the chunks' states, their passing on, C B, the output)."""
UNFUSED_LAUNCHES = 5
"""Kernels of one sample's unfused attention in forward (megatron-core 0.16.1, transformer/dot_product_attention.py): two batched products,
the mask, the softmax, the copy that puts heads side by side."""
REPEATED_LAUNCHES = 2
"""Kernels that repeat keys and values there, where several heads share them."""
RECURRENT = (Scan, DeltaRule)
SHARDS: Final = get_args(Shard)
TENSOR_CORE_ELEMENTS = 8
"""16-bit elements in the 16 bytes that a tensor-core load wants aligned."""
SUMMED_APART = 4.0
"""Bytes more of an element of 2 bytes, forward as backward, where putting tokens in their experts' order and back is not one kernel each
(Megatron-core's default, moe_permute_fusion=False, and all that it has without Transformer Engine): a token's copies are added up in
memory, whose sum each of them reads and writes (moe/moe_utils.py of 0.16.1: scatter_add_ at :461, and index_select at :375, whose backward
is torch's index_add_), and not in registers.
All else moves as much as Transformer Engine's kernels do, the sum's first zeros in place of its one write; chunks are cut and joined by
one copy (:505). How much more than those bytes the additions take, and the host with a view for each chunk, was not measured."""
FULL_PRECISION_MOVED = 2
"""Bytes of an element for which `Pointwise.moved` counts."""


def activation_itemsize(precision: str) -> int:
    """Bytes of an activation: fp8 and nvfp4 are formats of GEMM inputs only, the tensors between them stay bf16."""
    return 2 if precision in QUANTISED else ITEMSIZE[precision]


class Seconds(NamedTuple):
    """Compute of one pass, by what bounds it, and the host's time to launch it."""

    gemm: float
    attention: float
    memory_bound: float
    launch: float

    @property
    def compute(self) -> float:
        return self.gemm + self.attention + self.memory_bound


class LayerSeconds(NamedTuple):
    """Compute of a layer's two passes, for one micro-batch."""

    forward: Seconds
    backward: Seconds


def peak_flops(gpu: Gpu, precision: str) -> float:
    """Raises InputError where the GPU has no fast path for the precision."""
    if precision not in gpu.peak_flops:
        raise InputError("train.precision", precision, f"{gpu.name} has no peak FLOP/s for it", gpu.peak_flops)
    return gpu.peak_flops[precision]


OPERAND_BYTES: Final = {"fp8": 1.0, "nvfp4": 4.5 / 8}
"""Bytes of an element that a product reads, by precision, scales included; what it writes is 16 bits wide. A precision that is not listed
is read as wide as activations."""


class Rates(NamedTuple):
    """FLOP/s of aligned GEMMs in the compute precision, of those that tensor cores can't load, bytes/s, and bytes of an element that a
    product writes and reads."""

    peak: float
    unaligned: float
    bandwidth: float
    itemsize: int
    operand: float

    @classmethod
    def of(cls, gpu: Gpu, precision: str, calibration: Calibration) -> Rates:
        peak = peak_flops(gpu, precision) * (calibration.fp8_efficiency if precision in QUANTISED else 1.0)
        itemsize = activation_itemsize(precision)
        operand = OPERAND_BYTES.get(precision, itemsize)
        return cls(peak, min(peak, gpu.peak_flops.get("fp32", peak)), gpu.memory_bandwidth, itemsize, operand)


EXPOSED_EPILOGUE = 0.33
"""Share of the bytes of an epilogue that adds to what is there (a weight's gradient of all micro-batches) which no product hides: what the
weight's gradient took longer than forward and the input's gradient of the same shape, against those bytes' time, in SimuMax's measurements
of single products with up to 6,000 tokens: .28 in the median of 171 on B200, .37 of 57 on A100 (configs/system/)."""


def gemm_seconds(
    m: float, k: float, n: float, rates: Rates, calibration: Calibration, *, batched: bool = False, added_to: float = 0.0
) -> float:
    """Seconds of (m x k) @ (k x n), m the token dimension: roofline of FLOPs at an efficiency that saturates in each dimension, and of
    bytes (Williams et al., "Roofline", CACM 2009). `added_to`: bytes that an epilogue reads and writes, which adds the product to what is
    there. A feature dimension that is no multiple of 16 bytes slows tensor cores down, and keeps the `batched` GEMMs of attention off them:
    they run at the fp32 rate (BigScience's heads of 108 and 150 show it within 15%)."""
    return _gemm(m, k, n, rates, calibration, added_to, batched=batched)[1]


def _gemm(m: float, k: float, n: float, rates: Rates, c: Calibration, added_to: float, *, batched: bool = False) -> tuple[float, float]:
    """`gemm_seconds` of the product that adds to nothing, and of the one that does."""
    shape = (1 + c.gemm_half_tokens / m) * (1 + c.gemm_half_features / k) * (1 + c.gemm_half_features / n)
    peak = rates.peak
    if k % TENSOR_CORE_ELEMENTS or n % TENSOR_CORE_ELEMENTS:
        peak = rates.unaligned if batched else max(rates.unaligned, rates.peak / c.misaligned_gemm)
    flops = 2 * m * k * n * shape / (peak * c.gemm_efficiency)
    bandwidth = rates.bandwidth * c.memory_efficiency
    nbytes = (m * k + k * n + m * n) * rates.itemsize
    added = max(flops + EXPOSED_EPILOGUE * added_to / bandwidth, (nbytes + added_to) / bandwidth)
    return max(flops, nbytes / bandwidth), added


def grouped_seconds(groups: float, m: float, k: float, n: float, rates: Rates, calibration: Calibration, *, added_to: float = 0.0) -> float:
    """`groups` products of (m x k) @ (k x n), one an expert; `added_to`: as for `gemm_seconds`, of the weight's gradient
    (k x n). They follow each other on few streams: tiles of the next fill the last wave of the one before, so that few rows cost no FLOPs.
    On Blackwell nothing hides the reading of the next one's weights: FLOPs' time and bytes' time add up, within 10% in the median of the
    108 shapes (20 to 256 experts, 128 to 9,832 rows each) that SimuMax measured on B200 (configs/system/b200_bf16_ceperm.json,
    group_matmul), the roofline of plain products within 14%, 21% too short for the weight's gradient. On Hopper the roofline holds
    (`grouped_bytes_exposed`)."""
    c = calibration
    shape = (1 + c.gemm_half_features / k) * (1 + c.gemm_half_features / n)
    flops = 2 * m * k * n * shape / (rates.peak * c.gemm_efficiency)
    written = k * n if added_to else m * n
    read = m * k + k * n + m * n - written
    moved = (read * rates.operand + written * rates.itemsize + added_to) / (rates.bandwidth * c.memory_efficiency)
    return groups * max(flops + c.grouped_bytes_exposed * moved, moved) / c.expert_efficiency


def local_gemm(op: Gemm, strategy: Strategy, micro_batch_size: int) -> tuple[float, float, float]:
    """(m, k, n) on one rank: tokens over cp (and over tp where a replicated GEMM follows sequence parallelism), n or k over tp; the
    vocabulary is padded as the weights are. Of experts: the tokens of all of the rank's, of the rank that gets most."""
    mesh = strategy.mesh
    m = op.tokens * micro_batch_size / mesh.cp
    k, n = float(op.k), float(op.n)
    if op.pad_to and op.split == "column":
        n = float(padded(op.n, op.pad_to, mesh.tp))
    if op.experts:
        if op.routing is not None:
            m *= times(op.routing.busiest, mesh.ep)
        m *= mesh.etp / mesh.tp  # every rank sends its share of the tokens; balanced, it gets as many back, and those of its etp group
        k, n = (k, n / mesh.etp) if op.split == "column" else (k / mesh.etp, n)
    elif op.split == "column":
        n /= mesh.tp
    elif op.split == "row":
        k /= mesh.tp
    elif strategy.sequence_parallel:
        m /= mesh.tp
    return m, k, n


QUANTISED_BYTES: Final = 2.0 + 1.0
"""Bytes moved for each element that an FP8 product takes: read in 16 bits and written along its rows (Transformer Engine, common/cast).
Forward takes the input, backward the output's gradient."""
TURNED_BYTES: Final = 1.0
"""Bytes moved more for each element of an FP8 product that has a weight's gradient, which sums over the other dimension: the same kernel
writes the tensor along its columns too (common/transpose/cast_transpose.h)."""
TRANSPOSED_BYTES: Final = 1.0 + 1.0
"""Bytes moved for each element in place of `TURNED_BYTES` where the tensor is gathered over tensor-parallel ranks after the cast: Hopper's
FP8 products want both operands along the dimension that they sum over, so that a kernel of its own transposes the whole
(pytorch/module/base.py, grad_output_preprocess)."""
NVFP4_BYTES: Final = 2.0 + 2.0 + 2 * 4.5 / 8
"""Bytes moved for each element that an NVFP4 product takes: read for the tensor's maximum (two levels of scales), read again and written
along rows and columns, 4 bits and a scale of 8 for each 16 elements (Transformer Engine, pytorch/csrc/quantizer.cpp, NVFP4Quantizer:
nvte_hadamard_transform_amax, then the cast)."""
GATHERED_FP8_BYTES: Final = 1.0
"""Bytes of an element that tensor-parallel ranks gather for an FP8 product: it is cast before (Transformer Engine, pytorch/distributed.py,
_all_gather_fp8, _all_gather_mxfp8). Sums travel in 16 bits."""


def quantised_bytes(op: Gemm, strategy: Strategy, precision: str, gpu: Gpu, *, gathered: bool) -> float:
    """Bytes moved to quantise each element of a product's input, or of its output's gradient, as the product takes it. `gathered`: under
    sequence parallelism a rank casts its own share to FP8, which is then gathered."""
    if op.pad_to or op.wide or precision not in QUANTISED:
        return 0.0
    if precision == "nvfp4":
        return NVFP4_BYTES
    shared = strategy.mesh.tp if gathered and strategy.sequence_parallel and not op.experts else 1
    if op.frozen:
        return QUANTISED_BYTES / shared
    if shared > 1 and not gpu.has_mxfp8:
        return QUANTISED_BYTES / shared + TRANSPOSED_BYTES
    return (QUANTISED_BYTES + TURNED_BYTES) / shared


def gathered_bytes(layer: LayerSpec, precision: str, gpu: Gpu) -> tuple[float, float] | None:
    """Bytes of an element that tensor-parallel ranks gather for one product, and of an output's gradient, which two products take: with
    scales of blocks (Blackwell) it comes along rows and along columns. None: as wide as activations, for the vocabulary's projection, and
    for products with adapters, which take the same input in 16 bits (pytorch/module/layernorm_linear.py, return_layernorm_output_gathered).
    None for NVFP4, too: its gathers are narrow, but wait for a maximum over all ranks and turn the columns afterwards, which nothing that
    was measured tells apart."""
    if precision != "fp8" or any(isinstance(op, Gemm) and op.pad_to for op in layer.ops):
        return None
    if any(weight.frozen for weight in layer.weights) and not all(weight.frozen for weight in layer.weights):
        return None
    return GATHERED_FP8_BYTES, (2 if gpu.has_mxfp8 else 1) * GATHERED_FP8_BYTES


def permutations(layer: LayerSpec, strategy: Strategy) -> int:
    """How often tokens are put in order on their way to experts (and back). With an all-to-all by the rank that they go to, and on their
    arrival, from several ranks, by expert, where a rank has more than one (mcore moe/token_dispatcher.py:775, sort_chunks_by_idxs);
    otherwise once."""
    by_rank = strategy.moe_token_dispatcher_type == "alltoall" and strategy.mesh.ep > 1
    return 2 if by_rank and any(isinstance(op, Gemm) and op.experts > strategy.mesh.ep for op in layer.ops) else 1


def layer_seconds(
    layer: LayerSpec,
    strategy: Strategy,
    micro_batch_size: int,
    precision: str,
    gpu: Gpu,
    traits: Traits,
    states: StateBytes,
    calibration: Calibration,
    domain: int = 1,
) -> LayerSeconds:
    """Seconds of a layer's forward and backward without traffic, recompute or ZeRO. `domain`: GPUs of the innermost network level."""
    c, mesh = calibration, strategy.mesh
    itemsize, narrow = activation_itemsize(precision), precision in QUANTISED
    rates = Rates.of(gpu, precision, c)
    # fp8 is for the layers' linears: attention and the vocabulary's projection stay in bf16 (Megatron's output layer is none of TE's).
    wide_rates = Rates.of(gpu, "bf16", c) if narrow else rates
    memory = gpu.memory_bandwidth * c.memory_efficiency
    f_gemm = f_attention = f_memory = b_gemm = b_attention = b_memory = 0.0
    one_by_one, kernels, in_8_bits = 0.0, 0.0, 0  # products that the host launches expert by expert; all kernels; products in 8 bits
    parts = {shard: mesh.cp * tp.share(shard, strategy) for shard in SHARDS}
    for op in layer.ops:
        if isinstance(op, Gemm):
            m, k, n = local_gemm(op, strategy, micro_batch_size)
            groups = op.experts / mesh.ep if op.experts else 1.0
            op_rates = wide_rates if op.pad_to or op.wide else rates
            # The weight's gradient is added to what the micro-batches before left: read and written by the GEMM's epilogue, or by a
            # kernel of its own that reads the fresh gradient too.
            accumulate = 2 * states.gradient * k * n
            if op.experts:
                forward = grouped_seconds(groups, m / groups, k, n, op_rates, c)
                to_weight = grouped_seconds(groups, m / groups, k, n, op_rates, c, added_to=accumulate)
                one_by_one += groups
            else:
                forward, to_weight = _gemm(m, k, n, op_rates, c, accumulate)
            f_gemm += forward * quantised.int8_slowdown(op, gpu) if op.bits else forward
            in_8_bits += op.bits == 8
            if narrow:
                f_memory += quantised_bytes(op, strategy, precision, gpu, gathered=op.split == "column") * m * k / memory
                b_memory += quantised_bytes(op, strategy, precision, gpu, gathered=op.split == "row") * m * n / memory
            if op.frozen:
                b_gemm += 0.0 if op.forward_only else forward
                beside = quantised.moved(op, m, k, n, precision, states.weight)
                f_memory, b_memory = f_memory + beside.forward / memory, b_memory + beside.backward / memory
            elif traits.fp32_gradient_fusion:
                b_gemm += forward + to_weight
            else:
                b_gemm += GEMM_BACKWARD_FLOPS * forward
                b_memory += groups * (accumulate + 2 * states.weight * k * n) / memory
        elif isinstance(op, Pointwise):
            elements = op.elements * micro_batch_size / parts[op.shard] * itemsize / FULL_PRECISION_MOVED
            if op.routing is not None:
                elements *= times(op.routing.busiest, mesh.ep)
            moved, back = op.moved, op.moved * c.pointwise_backward if op.moved_backward is None else op.moved_backward
            if op.role == "permute":
                fused = strategy.moe_permute_fusion and traits.fused_permutations
                times_moved, apart = permutations(layer, strategy), 0.0 if fused else SUMMED_APART
                moved, back = times_moved * moved + apart, times_moved * back + apart
            factor = c.loss_factor if op.role == "loss" else c.pointwise_factor
            f_memory += elements * moved * factor / memory
            b_memory += elements * back * factor / memory
        elif isinstance(op, tp.BORDERS):
            continue
        elif isinstance(op, Attention):
            seconds = _attention(op, strategy, micro_batch_size, wide_rates, traits, c, domain)
            f_attention += seconds[0]
            b_attention += 0.0 if op.forward_only else seconds[1]
            kernels += (op.alone - 1) * (UNFUSED_LAUNCHES + REPEATED_LAUNCHES * (op.heads > op.kv_heads))
        elif isinstance(op, RECURRENT):
            seconds = _scan(op, strategy, micro_batch_size, wide_rates, c)
            f_attention += seconds[0]
            b_attention += seconds[1]
            kernels += SCAN_LAUNCHES * isinstance(op, Scan)
        kernels += 1
    if narrow and not one_by_one:  # a layer of experts has it in `expert_quantise_s`, which was fitted to such layers
        kernels += QUANTISING_LAUNCHES * sum(isinstance(op, Gemm) and not (op.pad_to or op.wide) for op in layer.ops)
    launches = kernels * c.op_overhead_s + one_by_one * c.grouped_launch_s
    forward_more, backward_more = (count * (c.op_overhead_s * in_8_bits) for count in quantised.INT8_LAUNCHES)
    if layer.forward_only:
        return LayerSeconds(Seconds(f_gemm, f_attention, f_memory, launches + forward_more), Seconds(0.0, 0.0, 0.0, 0.0))
    return LayerSeconds(
        Seconds(f_gemm, f_attention, f_memory, launches + forward_more),
        Seconds(b_gemm, b_attention, b_memory, BACKWARD_LAUNCHES * launches + backward_more),
    )


def _scan(op: Scan | DeltaRule, strategy: Strategy, micro_batch_size: int, rates: Rates, c: Calibration) -> tuple[float, float]:
    """Seconds (forward, backward) of a state space, or of a delta rule: its products at the efficiency of flash attention's, whose kernels
    they are like (small products of tiles that stay on the chip), or the time of its bytes, as long as that is more; a delta rule's at the
    rate of other memory-bound operations."""
    share = micro_batch_size / (strategy.mesh.tp * strategy.mesh.cp)
    moved = rates.itemsize * share / (rates.bandwidth * (c.scan_efficiency if isinstance(op, Scan) else c.memory_efficiency))
    forward = sum(op.products) * share / (rates.peak * c.attention_efficiency)
    backward = op.backward_flops * share / (rates.peak * c.attention_backward_efficiency)
    return max(forward, op.elements * moved), max(backward, op.backward_elements * moved)


def _attention(
    op: Attention, strategy: Strategy, micro_batch_size: int, rates: Rates, traits: Traits, c: Calibration, domain: int
) -> tuple[float, float]:
    """Seconds (forward, backward) of attention. Heads over tp, pairs of queries and keys over cp: a rank that exchanged sequence shards for
    heads has long sequences of few heads; one that passes keys on has a kernel for each part of them, whose results it adds up; one that
    gathers them has a kernel for each of its two chunks."""
    mesh, itemsize = strategy.mesh, rates.itemsize
    memory = rates.bandwidth * c.memory_efficiency
    heads = max(1.0, op.heads / (1 if op.whole else mesh.tp)) * micro_batch_size
    queries = op.query_len / mesh.cp
    pairs = queries * op.key_len * heads
    flops = 4 * pairs * op.head_dim
    if traits.flash_attention:
        flops *= op.visible
        inner, steps = cp.cut(strategy, traits.context_parallel, domain)
        saturation = 1 + c.attention_half_length / cp.kernel_length(op, mesh, inner, steps)
        per_flop = saturation / rates.peak
        forward = flops * per_flop / c.attention_efficiency
        backward = FLASH_BACKWARD_FLOPS * flops * per_flop / c.attention_backward_efficiency
        moved = (2 * queries + 2 * op.key_len) * heads * op.head_dim * itemsize / memory
        merged = cp.merged_bytes(op, strategy, micro_batch_size, itemsize, steps)
        return max(forward, moved) + merged[0] / memory, max(backward, 2 * moved) + merged[1] / memory
    scores = gemm_seconds(queries, op.head_dim, op.key_len, rates, c, batched=True) * heads
    values = gemm_seconds(queries, op.key_len, op.head_dim, rates, c, batched=True) * heads
    scale = itemsize / FULL_PRECISION_MOVED
    forward = scores + values + pairs * c.unfused_forward_bytes * scale / memory
    backward = GEMM_BACKWARD_FLOPS * (scores + values) + pairs * c.unfused_backward_bytes * scale / memory
    return forward, backward
