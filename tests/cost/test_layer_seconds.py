"""A layer's compute, one operation at a time, by its formula: over tensor and context parallelism and the samples of a micro-batch."""

from __future__ import annotations

from itertools import product

import pytest
from msgspec.structs import replace

from orchestrator.cost.calibration import Calibration
from orchestrator.cost.compute import LayerSeconds, Rates, gemm_seconds, grouped_seconds, layer_seconds, local_gemm
from orchestrator.hardware.catalog import GPUS
from orchestrator.model.ops import Attention, DeltaRule, Enter, Exit, Gemm, Op, Pointwise, Scan
from orchestrator.strategy.capabilities import Traits
from orchestrator.strategy.spec import Mesh, Strategy
from tests.cost.cost_cases import MEGATRON, MEGATRON_MIXED, UNFUSED, describe, gpt

PEAK, MEMORY = 1e14, 1e12
GPU = replace(GPUS["A100-SXM-80GB"], peak_flops={"fp32": PEAK / 16, "fp16": PEAK, "bf16": PEAK}, memory_bandwidth=MEMORY)
SLOW_MEMORY, FAST_MEMORY = replace(GPU, memory_bandwidth=1e6), replace(GPU, memory_bandwidth=1e24)
SHARES = Calibration(
    gemm_efficiency=0.8, attention_efficiency=0.6, attention_backward_efficiency=0.5, memory_efficiency=0.4, gemm_half_tokens=0.0,
    gemm_half_features=0.0, attention_half_length=0.0, op_overhead_s=1e-3, scan_efficiency=0.3,
)  # fmt: skip
GRID = list(product((1, 2, 4), (1, 2), (1, 3)))
"""tp, cp, samples of a micro-batch."""
LAYER = describe(gpt(), 2048).kind("decoder")


def seconds(op: Op, tp: int, cp: int, samples: int, gpu: object = GPU, traits: Traits = MEGATRON, c: Calibration = SHARES) -> LayerSeconds:
    strategy = Strategy(mesh=Mesh(tp=tp, cp=cp), cp_comm_type="a2a")
    return layer_seconds(replace(LAYER, ops=(op,)), strategy, samples, "bf16", gpu, traits, MEGATRON_MIXED, c, 8)  # type: ignore[arg-type]


@pytest.mark.parametrize(("tp", "cp", "samples"), GRID)
def test_a_state_space_takes_its_products_or_its_bytes(tp: int, cp: int, samples: int) -> None:
    """Heads over tp, tokens over cp; backward makes C B and the chunks' states again, and its bytes are its own kernels'."""
    op = Scan(name="scan", tokens=4096, heads=64, head_dim=64, state=128, groups=8, chunk=256)
    share = samples / (tp * cp)
    computed, moved = seconds(op, tp, cp, samples, FAST_MEMORY), seconds(op, tp, cp, samples, SLOW_MEMORY)
    assert computed.forward.attention == pytest.approx(sum(op.products) * share / (0.6 * PEAK))
    assert computed.backward.attention == pytest.approx((2 * sum(op.products) + op.products[0] + op.products[2]) * share / (0.5 * PEAK))
    assert moved.forward.attention == pytest.approx(2 * op.elements * share / (0.3 * 1e6))
    assert moved.backward.attention == pytest.approx(2 * op.backward_elements * share / (0.3 * 1e6))
    assert op.backward_elements > 3 * op.elements
    assert computed.forward.launch == pytest.approx(5e-3), "five kernels"


@pytest.mark.parametrize(("tp", "cp", "samples"), GRID)
def test_a_delta_rule_takes_its_products_or_its_bytes(tp: int, cp: int, samples: int) -> None:
    """At flash attention's shares, and those of other memory-bound operations."""
    op = DeltaRule(name="rule", tokens=4096, heads=32, key_dim=128, value_dim=128, chunk=64)
    share = samples / (tp * cp)
    computed, moved = seconds(op, tp, cp, samples, FAST_MEMORY), seconds(op, tp, cp, samples, SLOW_MEMORY)
    assert computed.forward.attention == pytest.approx(sum(op.products) * share / (0.6 * PEAK))
    assert computed.backward.attention == pytest.approx(op.backward_flops * share / (0.5 * PEAK))
    assert moved.forward.attention == pytest.approx(2 * op.elements * share / (0.4 * 1e6))
    assert moved.backward.attention == pytest.approx(2 * moved.forward.attention)


@pytest.mark.parametrize(("tp", "cp", "samples"), GRID)
def test_flash_attention_takes_its_visible_pairs_or_its_bytes(tp: int, cp: int, samples: int) -> None:
    """4 s^2 h forward, half of it under a causal mask, 2.5 times that backward (Dao 2023); queries, keys, values and the output pass
    through memory once, and twice in backward."""
    s, heads, d = 4096, 16, 128
    share = samples / (tp * cp)
    for causal, visible in ((False, 1.0), (True, 0.5)):
        op = Attention(name="a", query_len=s, key_len=s, heads=heads, kv_heads=4, head_dim=d, causal=causal)
        computed, moved = seconds(op, tp, cp, samples, FAST_MEMORY), seconds(op, tp, cp, samples, SLOW_MEMORY)
        flops = 4 * s * s * heads * d * visible * share
        assert computed.forward.attention == pytest.approx(flops / (0.6 * PEAK))
        assert computed.backward.attention == pytest.approx(2.5 * flops / (0.5 * PEAK))
        assert moved.forward.attention == pytest.approx(2 * (2 * s / cp + 2 * s) * heads * d * samples / tp / (0.4 * 1e6))
        assert moved.backward.attention == pytest.approx(2 * moved.forward.attention)
    fewer = Attention(name="a", query_len=s, key_len=s, heads=2, kv_heads=2, head_dim=d, causal=True)
    one = seconds(replace(fewer, heads=1, kv_heads=1), 1, cp, samples)
    assert seconds(fewer, 4, cp, samples).forward.attention == pytest.approx(one.forward.attention), "a rank has a head at least"


@pytest.mark.parametrize(("tp", "cp", "samples"), GRID)
def test_unfused_attention_moves_its_scores(tp: int, cp: int, samples: int) -> None:
    """11 and 15 bytes a score beside two batched products, whose backward is twice as long; a mask saves nothing."""
    s, heads, d = 1024, 16, 64
    scores = s * s * heads * samples / (tp * cp)
    op = Attention(name="a", query_len=s, key_len=s, heads=heads, kv_heads=heads, head_dim=d, causal=True)
    found = seconds(op, tp, cp, samples, traits=UNFUSED)
    alone = seconds(op, tp, cp, samples, traits=UNFUSED, c=replace(SHARES, unfused_forward_bytes=0.0, unfused_backward_bytes=0.0))
    more = [(a.attention - b.attention) * 0.4 * MEMORY / scores for a, b in zip(found, alone, strict=True)]
    assert more == pytest.approx([11.0, 15.0])
    assert alone.backward.attention == pytest.approx(2 * alone.forward.attention)
    rates = Rates.of(GPU, "bf16", SHARES)
    shapes = ((s / cp, d, s), (s / cp, s, d))
    products = sum(gemm_seconds(*shape, rates, SHARES, batched=True) for shape in shapes) * heads * samples / tp
    assert alone.forward.attention == pytest.approx(products)


@pytest.mark.parametrize(("tp", "cp", "samples"), GRID)
def test_a_pointwise_operation_moves_the_bytes_of_its_share(tp: int, cp: int, samples: int) -> None:
    c = replace(SHARES, pointwise_factor=1.5, loss_factor=0.2, pointwise_backward=1.75)
    for shard, ways in (("tp", tp), ("sequence", 1), ("none", 1)):
        op = Pointwise(name="x", elements=2**20, moved=6.0, shard=shard)  # type: ignore[arg-type]
        found = seconds(op, tp, cp, samples, c=c)
        moved = 6 * 2**20 * samples / (cp * ways)
        assert found.forward.memory_bound == pytest.approx(1.5 * moved / (0.4 * MEMORY))
        assert found.backward.memory_bound == pytest.approx(1.75 * found.forward.memory_bound)
        loss = seconds(replace(op, role="loss", moved_backward=9.0), tp, cp, samples, c=c)
        assert loss.forward.memory_bound == pytest.approx(0.2 * moved / (0.4 * MEMORY))
        assert loss.backward.memory_bound == pytest.approx(1.5 * loss.forward.memory_bound)
        assert (found.forward.launch, found.backward.launch) == (1e-3, 2e-3), "backward launches two for each"
        assert found.forward.compute == found.forward.memory_bound


def test_a_product_takes_its_flops_at_an_efficiency_that_small_sides_lose() -> None:
    """Half of it where one side is as long as its half length; a third with two of them."""
    rates, full = Rates.of(FAST_MEMORY, "bf16", SHARES), 2 * 512 * 1024 * 2048 / (0.8 * PEAK)
    assert gemm_seconds(512, 1024, 2048, rates, SHARES) == pytest.approx(full)
    assert gemm_seconds(512, 1024, 2048, rates, replace(SHARES, gemm_half_tokens=512.0)) == pytest.approx(2 * full)
    halves = replace(SHARES, gemm_half_features=1024.0)
    assert gemm_seconds(512, 1024, 2048, rates, halves) == pytest.approx(2 * 1.5 * full)
    assert grouped_seconds(4, 512, 1024, 2048, rates, replace(halves, expert_efficiency=0.5)) == pytest.approx(4 * 2 * 2 * 1.5 * full)
    for k, n in ((1025, 2048), (1024, 2049)):
        plain = 2 * 512 * k * n / (0.8 * PEAK)
        assert gemm_seconds(512, k, n, rates, SHARES) == pytest.approx(2 * plain), "tensor cores load 8 elements at once"
        assert gemm_seconds(512, k, n, rates, SHARES, batched=True) == pytest.approx(16 * plain)


def test_a_product_takes_no_less_than_its_bytes() -> None:
    """Both operands and the result, 2 bytes each; an expert's follow each other, and nothing hides them."""
    rates = Rates.of(SLOW_MEMORY, "bf16", SHARES)
    elements = 512 * 1024 + 1024 * 2048 + 512 * 2048
    assert gemm_seconds(512, 1024, 2048, rates, SHARES) == pytest.approx(2 * elements / (0.4 * 1e6))
    assert gemm_seconds(512, 1024, 2048, rates, SHARES, added_to=1e6) == pytest.approx((2 * elements + 1e6) / (0.4 * 1e6))
    flops = 2 * 512 * 1024 * 2048 / (0.8 * PEAK)
    assert grouped_seconds(3, 512, 1024, 2048, rates, SHARES) == pytest.approx(3 * (2 * elements / (0.4 * 1e6) + flops))
    assert grouped_seconds(3, 512, 1024, 2048, rates, SHARES, added_to=1e6) == pytest.approx(
        3 * ((2 * elements + 1e6) / (0.4 * 1e6) + flops)
    )


def test_the_dimensions_on_a_rank() -> None:
    """Columns and rows over tp, tokens over cp; an expert's tokens are those that its etp group has of all, its sides over etp."""
    op = Gemm(name="x", tokens=4096, k=1024, n=2048, split="column")
    strategy = Strategy(mesh=Mesh(tp=4, cp=2))
    assert local_gemm(op, strategy, 3) == (6144, 1024, 512)
    assert local_gemm(replace(op, split="row"), strategy, 3) == (6144, 256, 2048)
    assert local_gemm(replace(op, split=None), strategy, 3) == (6144, 1024, 2048)
    assert local_gemm(replace(op, split=None), replace(strategy, sequence_parallel=True), 3) == (1536, 1024, 2048)
    assert local_gemm(replace(op, n=1000, pad_to=128), strategy, 1) == (2048, 1024, 1024 / 4)
    experts = replace(op, experts=8)
    folded = Strategy(mesh=Mesh(tp=4, dp=2, ep=4, etp=2))
    assert local_gemm(experts, folded, 1) == (2048, 1024, 1024)
    assert local_gemm(replace(experts, split="row"), folded, 1) == (2048, 512, 2048)


@pytest.mark.parametrize(("tp", "cp", "samples"), GRID)
def test_a_weights_gradient_is_added_by_the_product_or_by_a_kernel_of_its_own(tp: int, cp: int, samples: int) -> None:
    """Of 1024 x 2048 weights: fused the weight's product reads and writes 4 bytes each beside what any product does, else a kernel reads
    the fresh gradient of 2 bytes, which the product wrote, and reads and writes those 4. Frozen weights have no gradient."""
    op = Gemm(name="x", tokens=4096, k=1024, n=2048, split="column")
    weights = 1024 * 2048 / tp
    product = gemm_seconds(4096 * samples / cp, 1024, 2048 / tp, Rates.of(GPU, "bf16", SHARES), SHARES)
    added = gemm_seconds(4096 * samples / cp, 1024, 2048 / tp, Rates.of(GPU, "bf16", SHARES), SHARES, added_to=8 * weights)
    fused, plain = (seconds(op, tp, cp, samples, traits=replace(MEGATRON, fp32_gradient_fusion=fusion)) for fusion in (True, False))
    assert fused.forward.gemm == plain.forward.gemm == pytest.approx(product)
    assert fused.backward.gemm == pytest.approx(product + added)
    assert fused.backward.memory_bound == 0.0
    assert plain.backward.gemm == pytest.approx(2 * product)
    assert plain.backward.memory_bound == pytest.approx((8 + 2 + 2) * weights / (0.4 * MEMORY))
    frozen = seconds(replace(op, frozen=True), tp, cp, samples)
    assert (frozen.backward.gemm, frozen.backward.memory_bound) == pytest.approx((product, 0.0))


@pytest.mark.parametrize(("ep", "etp"), [(1, 1), (4, 1), (2, 2), (1, 2)])
def test_experts_have_a_product_each_of_their_share_of_the_rows_launched_one_by_one(ep: int, etp: int) -> None:
    """8 experts; 4096 tokens in all. A rank of 4 has those of 8 / ep, each as wide as etp leaves it."""
    op = Gemm(name="x", tokens=4096, k=1024, n=2048, split="column", experts=8)
    strategy = Strategy(mesh=Mesh(tp=1, dp=4, ep=ep, etp=etp))
    c = replace(SHARES, grouped_launch_s=1e-4)
    rates, here = Rates.of(GPU, "bf16", c), 8 / ep
    for fusion in (True, False):
        traits = replace(MEGATRON, fp32_gradient_fusion=fusion)
        found = layer_seconds(replace(LAYER, ops=(op,)), strategy, 1, "bf16", GPU, traits, MEGATRON_MIXED, c, 8)
        shape = (here, 4096 * etp / here, 1024, 2048 / etp)
        weights = here * 1024 * 2048 / etp
        forward, added = grouped_seconds(*shape, rates, c), grouped_seconds(*shape, rates, c, added_to=8 * 1024 * 2048 / etp)
        assert found.forward.gemm == pytest.approx(forward)
        assert found.backward.gemm == pytest.approx(forward + added if fusion else 2 * forward)
        assert found.backward.memory_bound == pytest.approx(0.0 if fusion else 12 * weights / (0.4 * MEMORY))
        assert (found.forward.launch, found.backward.launch) == pytest.approx((1e-3 + here * 1e-4, 2 * (1e-3 + here * 1e-4)))


def test_a_layer_is_the_sum_of_its_operations() -> None:
    """Each by itself, but for the borders of tensor-parallel regions, which are traffic and no launch."""
    strategy = Strategy(mesh=Mesh(tp=2))
    whole = layer_seconds(LAYER, strategy, 2, "bf16", GPU, MEGATRON, MEGATRON_MIXED, SHARES, 8)
    each = [seconds(op, 2, 1, 2) for op in LAYER.ops]
    for here, parts in ((whole.forward, [one.forward for one in each]), (whole.backward, [one.backward for one in each])):
        assert list(here) == pytest.approx([sum(values) for values in zip(*parts, strict=True)])
    assert whole.forward.launch == pytest.approx(1e-3 * sum(not isinstance(op, Enter | Exit) for op in LAYER.ops))


def test_a_product_in_8_bits_launches_two_casts_more_and_the_vocabularys_and_experts_none() -> None:
    gpu = replace(GPU, peak_flops={**GPU.peak_flops, "fp8": 2 * PEAK})
    plain = Gemm(name="x", tokens=4096, k=1024, n=2048, split="column")

    def launches(*ops: Op) -> float:
        shape = (Strategy(mesh=Mesh(tp=1)), 1, "fp8", gpu, MEGATRON, MEGATRON_MIXED, replace(SHARES, grouped_launch_s=0.0), 8)
        return layer_seconds(replace(LAYER, ops=ops), *shape).forward.launch

    assert launches(plain) == pytest.approx(3e-3)
    assert launches(replace(plain, pad_to=128)) == pytest.approx(1e-3)
    assert launches(plain, replace(plain, experts=8)) == pytest.approx(2e-3)  # `expert_quantise_s` is of the whole layer
