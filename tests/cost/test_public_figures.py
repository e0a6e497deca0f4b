"""The constants that nobody fitted, by what they make of products, kernels and collectives that were measured in public."""

from __future__ import annotations

import math

import pytest
from cost_cases import MEGATRON, MEGATRON_FP32, MEGATRON_MIXED, a100, candidate, cost_model, describe, gpt
from msgspec.structs import replace

from orchestrator.cost.calibration import CPU, SHARES, Calibration, datasheet
from orchestrator.cost.compute import LayerSeconds, Rates, gemm_seconds, layer_seconds
from orchestrator.cost.layer import CHECKPOINTS_ON_GPU, FORWARD_SHARE
from orchestrator.cost.network import Network
from orchestrator.cost.profile import LayerProfile, Profile
from orchestrator.cost.workload import DDP_BUCKET
from orchestrator.hardware.catalog import GPUS
from orchestrator.hardware.spec import Gpu
from orchestrator.model.ops import Attention, Exit, Op, Pointwise
from orchestrator.strategy.axes.traffic import Traffic
from orchestrator.strategy.spec import Mesh, Strategy
from orchestrator.units import GB, GIB, MIB, TFLOPS, US

PLAIN = Calibration()
LAYER = describe(gpt(), 2048).kind("decoder")


def of(gpu: str) -> Calibration:
    return datasheet(replace(a100(), gpu=GPUS[gpu]), MEGATRON)


def alone(op: Op, gpu: Gpu, c: Calibration) -> LayerSeconds:
    precision = "bf16" if "bf16" in gpu.peak_flops else "fp16"
    return layer_seconds(replace(LAYER, ops=(op,)), Strategy(mesh=Mesh()), 1, precision, gpu, MEGATRON, MEGATRON_MIXED, c)


@pytest.mark.parametrize(
    ("gpu", "precision", "least", "most"),
    [
        ("V100-SXM2-32GB", "fp16", 92, 105),  # cuBLAS 95 to 105
        ("A100-SXM-80GB", "bf16", 225, 255),  # 240 in training, cuBLAS alone 255
        ("H100-SXM-80GB", "bf16", 640, 750),  # power bounds it to 650 to 750
        ("B200", "bf16", 1000, 1150),
    ],
)
def test_a_large_product_reaches_what_is_measured_and_a_small_one_much_less(gpu: str, precision: str, least: float, most: float) -> None:
    """TFLOP/s of 16,384 x 16,384 x 16,384; of 128 rows, which fill few multiprocessors, less than two thirds of it."""
    c, rates = of(gpu), Rates.of(GPUS[gpu], precision, of(gpu))
    n = 16384

    def reached(m: int) -> float:
        return 2 * m * n * n / gemm_seconds(m, n, n, rates, c) / TFLOPS

    assert least <= reached(n) <= most
    assert 0.25 * reached(n) < reached(128) < 0.67 * reached(n)


@pytest.mark.parametrize(
    ("gpu", "forward", "backward"),
    [
        ("A100-SXM-80GB", (180, 200), (155, 185)),  # FlashAttention-2, figures 5 and 6: 190 and 170
        ("H100-SXM-80GB", (480, 600), (420, 550)),
        ("B200", (1000, 1300), (850, 1100)),
        ("V100-SXM2-32GB", (35, 60), (30, 55)),
    ],
)
def test_attention_over_a_long_sequence_reaches_what_is_measured(
    gpu: str, forward: tuple[float, float], backward: tuple[float, float]
) -> None:
    s, heads, width = 16384, 16, 128
    found = alone(
        Attention(name="a", query_len=s, key_len=s, heads=heads, kv_heads=heads, head_dim=width, causal=False), GPUS[gpu], of(gpu)
    )
    flops = 4 * s * s * heads * width / TFLOPS
    assert forward[0] <= flops / found.forward.attention <= forward[1]
    assert backward[0] <= 2.5 * flops / found.backward.attention <= backward[1]


def test_a_kernel_that_copies_reaches_four_fifths_of_the_memorys_speed() -> None:
    """STREAM-like kernels 85 to 92%, short ones less; the optimizer's many small tensors a little less still."""
    c, gpu = PLAIN, GPUS["A100-SXM-80GB"]
    elements = 2**28
    found = alone(Pointwise(name="x", elements=elements, moved=4.0, shard="none"), gpu, c)
    assert 0.75 <= 4 * elements / found.forward.memory_bound / gpu.memory_bandwidth <= 0.92
    assert 3 / 2 <= found.backward.memory_bound / found.forward.memory_bound <= 2, "reads two tensors and writes one, at most"
    assert 0.6 <= c.optimizer_efficiency < c.memory_efficiency


def collective(operation: str, nbytes: float, size: int, gpus: int = 64) -> float:
    item = Traffic(axis="dp", operation=operation, nbytes=nbytes, size=size, stride=1, when="backward", hidden="nothing")  # type: ignore[arg-type]
    return Network(a100(gpus), PLAIN, MEGATRON).seconds(item)


def test_a_large_all_reduce_has_nccls_bus_bandwidth() -> None:
    """nccl-tests on 8 A100 of an NVSwitch: 230 to 240 of 300 GB/s. Over nodes of 25 GB/s a GPU: most of it, and less the more there are."""
    bus = 2 * 7 / 8 * 4e9 / collective("all_reduce", 4e9, 8) / GB
    assert 228 <= bus <= 242
    far = [2 * (n - 1) / n * 40e9 / collective("all_reduce", 40e9, n, n) / GB for n in (16, 64, 512)]
    assert far[0] > far[1] > far[2]
    assert 0.7 * 200 <= far[0] <= 0.9 * 200
    assert 0.6 * far[0] <= far[2] <= 0.8 * far[0], "a few per cent for each doubling"


def test_a_small_collective_takes_tens_of_microseconds() -> None:
    """An all-reduce of 8 bytes over 8 A100 takes 20 to 50 us in nccl-tests; one over two ranks is no faster than its launch."""
    assert 20 * US <= collective("all_reduce", 8, 8) <= 50 * US
    assert 10 * US <= collective("all_reduce", 8, 2) <= 25 * US


def test_a_message_reaches_less_than_a_ring() -> None:
    """One pair of channels."""
    link = Network(a100(), PLAIN, MEGATRON).pair_link(0, 1, 1)
    ring = Network(a100(), PLAIN, MEGATRON).link(8, 1)
    assert 0.6 * 300 * GB <= link.bandwidth < ring.bandwidth


@pytest.mark.parametrize("gpu", sorted(GPUS))
def test_shares_are_shares_and_launches_a_few_microseconds(gpu: str) -> None:
    if gpu == "cpu":
        return
    c = of(gpu)
    assert all(0 <= getattr(c, name) <= 1 for name in SHARES - {"tp_overlap"})
    assert 5 * US <= c.op_overhead_s <= 20 * US, "PyTorch's dispatch of a module"
    assert 8.6 * US <= c.grouped_launch_s <= 11 * US, "SimuMax, 36 shapes on B200"
    assert 10 * US < c.graph_launch_s < 100 * US, "cudaGraphLaunch takes 10 us, the copies of inputs more"
    assert c.op_overhead_s < c.collective_launch_s < 5 * c.op_overhead_s
    assert c.step_overhead_s < 0.01
    assert c.microbatch_overhead_s < 0.1 * c.step_overhead_s
    assert c.attention_backward_efficiency < c.attention_efficiency


def test_memory_that_nothing_of_the_model_takes() -> None:
    """An empty process on a GPU: 0.5 to 1.5 GB. cuBLASLt's workspace of 32 MiB, and Transformer Engine's of as much. NCCL, which has a few
    communicators: 0.2 to 1 GB in all."""
    assert 0.5 * GB <= PLAIN.context_bytes <= 1.5 * GB
    assert PLAIN.workspace_bytes == 2 * 32 * MIB
    assert 0.2 * GB <= 5 * PLAIN.communicator_bytes <= GB
    assert 0.3 * GIB <= CPU.context_bytes <= 0.9 * GIB, "torch and an engine imported"


def test_in_backward_a_gradient_arrives_and_another_leaves() -> None:
    """So much more of the largest saved tensor than with one."""
    found = []
    for count in (1.0, PLAIN.transient_activations):
        costs = cost_model(calibration=replace(datasheet(a100(), MEGATRON), transient_activations=count))
        found.append(costs.layer(candidate(), "decoder", "none").transient_backward_bytes)
    kept = [saved for op in LAYER.ops for saved in getattr(op, "saves", ()) if not saved.quadratic]
    assert found[1] - found[0] == pytest.approx(max(saved.elements * (saved.itemsize or 2) for saved in kept))


def test_hidden_traffic_costs_some_of_the_compute_and_not_all_hides() -> None:
    """Galvatron measures compute 1.3 times as long beside traffic; an engine cannot hide more traffic than it has compute."""
    assert 0.1 <= PLAIN.overlap_slowdown <= 0.3
    assert 0.7 <= PLAIN.overlap_efficiency < 1
    assert 0.7 <= PLAIN.user_buffers_overlap < 1
    assert (CPU.overlap_efficiency, CPU.overlap_slowdown) == (0.0, 0.0), "gloo's copies run on the cores that compute"
    assert PLAIN.tp_overlap < 0, "each engine's own"
    assert PLAIN.core_share == 1, "a GPU's cores are its own"
    assert CPU.core_share == 1 / 2, "two ranks to a core"


def test_what_a_plain_engine_moves_is_what_is_counted() -> None:
    assert (PLAIN.pointwise_factor, PLAIN.loss_factor, PLAIN.expert_efficiency, PLAIN.fp8_saved_bytes) == (1, 1, 1, 1)
    assert PLAIN.layer_floor_s == 0, "what only a measured engine has"
    assert PLAIN.layers_per_message == 1


def test_a_vocabulary_that_tensor_cores_cannot_load_takes_about_twice_as_long() -> None:
    """nanoGPT's 50,257 ids against 50,304: its author saw the step a quarter faster, of which the head is less than half."""
    rates = Rates.of(GPUS["A100-SXM-80GB"], "bf16", PLAIN)
    odd, even = (gemm_seconds(8192, 768, n, rates, PLAIN) for n in (50257, 50304))
    assert 1.7 <= odd / even <= 2.3


def test_unfused_scores_are_moved_so_often() -> None:
    """Forward: written, read and written by the scaled softmax, read by dropout, which writes a mask and the result. Backward: dropout
    reads gradient and mask and writes, softmax reads output and gradient and writes, and one copy of the scores' gradient."""
    assert PLAIN.unfused_forward_bytes == 2 + (2 + 2) + (2 + 2 + 1)
    assert PLAIN.unfused_backward_bytes == (2 + 1 + 2) + (2 + 2 + 2) + (2 + 2)


def test_a_measured_model_has_what_an_unmeasured_one_would() -> None:
    """Of a profile that says only what it must: two products of the same size backward for each forward, Adam's states in fp32 beside
    weights and gradients, and as many all-reduces as a layer of the same kind leaves by."""
    whole = Profile(name="x", layers=())
    states = MEGATRON_FP32
    assert whole.states_per_weight == (states.weight + states.gradient + states.master + states.moments) / states.weight
    assert whole.backward_of_forward == 2
    assert (whole.other_state_bytes, whole.other_saved_bytes) == (0, 0)
    layer = LayerProfile(kind="d", count=1, parameter_bytes=1.0, forward_s={1: 6.0, 4: 2.0}, saved_bytes={1: 1.0}, output_bytes=1.0)
    assert layer.reductions == sum(isinstance(op, Exit) for op in LAYER.ops)
    assert (layer.forward(1), layer.forward(2), layer.forward(4)) == (6.0, 3.0, 2.0)


def test_backward_launches_what_forward_does_not() -> None:
    assert pytest.approx(2 * FORWARD_SHARE) == 1 - FORWARD_SHARE
    assert CHECKPOINTS_ON_GPU == 1 + 2, "the last one, and two on their way"
    assert math.isclose(DDP_BUCKET, 40e6)
