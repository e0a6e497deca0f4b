"""What Muon (Jordan, 2024; Kimi's at scale, arXiv 2502.16982) costs under Megatron-core: momentum alone for matrices, whose orthogonal part
is the update, and whole matrices on a rank where data parallelism divides the optimizer's states. Embedding, head and norms have Adam; the
few bytes of norms inside layers are counted as momentum's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heapify, heapreplace
from itertools import chain, repeat
from typing import Final, NamedTuple

from orchestrator.cost.compute import Rates, gemm_seconds
from orchestrator.cost.network import Network
from orchestrator.cost.replicas import own_bucket
from orchestrator.cost.workload import EngineWorkload
from orchestrator.model.spec import LayerSpec
from orchestrator.strategy.axes import dp
from orchestrator.strategy.axes.traffic import Operation, Traffic
from orchestrator.strategy.spec import Mesh, Strategy

PADDING_FLOOR: Final = 0.9
"""A bucket goes on until it holds this share of what it would take padded (core/optimizer/layer_wise_optimizer.py:323 of 0.19)."""
ELEMENT_BYTES: Final = 8 + 4 + (4 + 8) + (4 + 2) + (2 + 4) + 8
"""Bytes moved for each element of a matrix beside products and Adam's own: momentum read and written, Nesterov's sum written, its norm and
the division, the casts to bf16 and back, the scale (emerging_optimizers 0.3, orthogonalized_optimizer.py and muon_utils.py, unfused)."""
ITERATED: Final = ("bf16", "fp16", "fp32")
"""Precision of the products: bf16 under --muon-fp32-matmul-prec's default, "medium" (muon_utils.py, newton_schulz); else what there is."""


class Matrix(NamedTuple):
    """Equal matrices of a layer, whole: tensor parallelism divides dimension `split` over `ranks`."""

    rows: int
    columns: int
    copies: int
    split: int
    ranks: int


def padding(sizes: Sequence[int], ranks: int, bucket: float) -> float:
    """Elements of the buffer that holds matrices of these sizes, in backward's order, over the sum of the sizes: buckets are filled up to
    `bucket` elements, or until the largest matrix no longer outweighs them, and each rank's part is as long as the fullest
    (layer_wise_optimizer.py:196-371 of 0.19, LPT).

    >>> padding([4, 4, 4, 4], 4, 0.0), padding([8, 2, 2], 4, 0.0), padding([6], 1, 0.0)
    (1.0, 2.6666666666666665, 1.0)
    """
    buffered = held = largest = 0
    chunk: list[int] = []
    for index, size in enumerate(sizes):
        chunk.append(size)
        held, largest = held + size, max(largest, size)
        if held >= max(bucket, ranks * largest * PADDING_FLOOR) or index == len(sizes) - 1:
            loads = [0] * ranks
            heapify(loads)
            for one in sorted(chunk, reverse=True):
                heapreplace(loads, loads[0] + one)
            buffered += ranks * max(loads)
            chunk, held, largest = [], 0, 0
    return buffered / sum(sizes)


class Muon:
    """Prices of Muon for one workload and network."""

    def __init__(self, workload: EngineWorkload, network: Network) -> None:
        self._workload, self._network = workload, network
        self._padding: dict[tuple[Mesh, bool, int | None], float] = {}
        precision = next((name for name in ITERATED if name in workload.cluster.gpu.peak_flops), workload.training.precision)
        self._rates = Rates.of(workload.cluster.gpu, precision, workload.calibration)

    def has(self, layer: LayerSpec) -> bool:
        """Whether it trains the layer's matrices."""
        return self._workload.training.optimizer == "muon" and layer.recomputable

    def growth(self, strategy: Strategy, *, experts: bool) -> float:
        """What the buffers of weights, gradients and states of matrices take over their own size at ZeRO-1, 1 at stage 0: no rank holds a
        part of a matrix. By the stage's layers in the mean; interleaving's chunks, each with buckets of its own, take more yet."""
        mesh = strategy.mesh
        if strategy.zero_stage == 0:
            return 1.0
        found = self._padding.get((mesh, experts, strategy.ddp_bucket_size))
        if found is None:
            w = self._workload
            ranks = mesh.expert_dp if experts else dp.ranks(strategy)
            layers = [(layer, max(1, round(w.counts[kind] / mesh.pp))) for kind, layer in w.kinds.items() if layer.recomputable]
            of_layer = [[m.rows * m.columns // m.ranks for m in matrices(layer, mesh, experts=experts) for _ in range(m.copies)]
                        for layer, _ in layers]  # fmt: skip
            sizes = [*chain.from_iterable(chain.from_iterable(repeat(one, n)) for one, (_, n) in zip(of_layer, layers, strict=True))]
            bucket = strategy.ddp_bucket_size or own_bucket(w.traits, dp.ranks(strategy))
            found = padding(sizes, ranks, bucket) if sizes and ranks > 1 else 1.0
            self._padding[mesh, experts, strategy.ddp_bucket_size] = found
        return found

    def update_s(self, layer: LayerSpec, strategy: Strategy, *, experts: bool) -> float:
        """Seconds of a step in which the fullest rank orthogonalises its matrices of a layer, beside the reading and writing of states that
        any optimizer has."""
        w, mesh = self._workload, strategy.mesh
        moved = w.cluster.gpu.memory_bandwidth * w.calibration.optimizer_efficiency
        seconds = 0.0
        for matrix in matrices(layer, mesh, experts=experts):
            for part in self._parts(matrix):
                seconds += part.copies * (self._iterations_s(part, mesh) + part.rows * part.columns / part.ranks * ELEMENT_BYTES / moved)
        if strategy.zero_stage == 0:
            return seconds
        ranks = mesh.expert_dp if experts else dp.ranks(strategy)
        return seconds * self.growth(strategy, experts=experts) / ranks

    def _parts(self, matrix: Matrix) -> Iterator[Matrix]:
        """What is orthogonalised by itself: queries, keys and values of a fused projection (muon_split_qkv), else the matrix."""
        a = self._workload.model.architecture
        queries, keys = a.num_attention_heads * a.head_dim, a.query_groups * a.head_dim
        if matrix.rows == queries + 2 * keys and matrix.columns == a.hidden_size and matrix.split == 0:
            yield matrix._replace(rows=queries)
            yield matrix._replace(rows=keys, copies=2 * matrix.copies)
        else:
            yield matrix

    def _iterations_s(self, matrix: Matrix, mesh: Mesh) -> float:
        """Seconds of one matrix's Newton-Schulz iterations, three products each (muon_utils.py, newton_schulz_step and newton_schulz_tp):
        of the rank's part alone (blockwise), of the whole on every rank after an all-gather in fp32 (duplicated), or of the rank's part
        along the divided dimension, the Gram matrix summed in bf16 in every iteration (distributed)."""
        training, ranks = self._workload.training, matrix.ranks
        sizes = [matrix.rows, matrix.columns]
        if training.muon_tp_mode == "blockwise":
            sizes[matrix.split] //= ranks
        short, long = sorted(sizes)
        traffic: list[tuple[Operation, float, int]] = []
        if ranks > 1 and training.muon_tp_mode == "duplicated":
            traffic.append(("all_gather", 4.0 * short * long, 1))
        elif ranks > 1 and training.muon_tp_mode == "distributed":
            short, long = sizes[1 - matrix.split], sizes[matrix.split] // ranks
            traffic.append(("all_reduce", 2.0 * short * short, training.muon_num_ns_steps))
        products = ((short, long, short), (short, short, short), (short, short, long))
        seconds = training.muon_num_ns_steps * sum(gemm_seconds(*one, self._rates, self._workload.calibration) for one in products)
        for operation, nbytes, count in traffic:
            item = Traffic(axis="tp", operation=operation, nbytes=nbytes, size=ranks, stride=mesh.stride("tp"), when="step", count=count)
            seconds += self._network.seconds(item, 1.0)
        return seconds


def matrices(layer: LayerSpec, mesh: Mesh, *, experts: bool) -> Iterator[Matrix]:
    """The matrices that a rank holds a part of: the layer's own, or its experts', one by one (Megatron's grouped linears have a weight for
    each), whose first dimension is taken to be what their tensor parallelism divides."""
    for weight in layer.weights:
        if experts and weight.kind == "expert" and len(weight.shape) == 3:
            count, rows, columns = weight.shape
            yield Matrix(rows, columns, count // mesh.ep, 0, mesh.etp)
        elif not experts and weight.kind == "dense" and len(weight.shape) == 2:
            rows, columns = weight.padded_shape(mesh.tp)
            yield Matrix(rows, columns, 1, weight.split or 0, 1 if weight.split is None else mesh.tp)
