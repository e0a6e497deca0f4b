"""The constants that nobody fitted lie where their sources put them. Ranges are the sources' own, or where one has a single figure a fifth
to either side of it; a constant that leaves its range needs another source."""

from __future__ import annotations

import pytest
from cost_cases import DEEPSPEED, MEGATRON, a100, cost_model
from msgspec.structs import replace

from orchestrator.cost.calibration import CPU, SHARES, Calibration, CalibrationFile, Constant, datasheet
from orchestrator.cost.compute import Rates, gemm_seconds, quantised_bytes
from orchestrator.cost.states import fp8_weight_bytes
from orchestrator.hardware.catalog import GPUS
from orchestrator.model.lora import Lora
from orchestrator.model.ops import Gemm
from orchestrator.model.training import Training
from orchestrator.strategy.spec import Mesh, Strategy
from orchestrator.units import GB, GIB, MIB, US

RANGES: dict[str, tuple[float, float]] = {
    "gemm_efficiency": (0.72, 0.82),  # cuBLAS bf16 on A100 255 of 312; FSDP runs ask for .72
    "gemm_half_tokens": (64, 128),  # half a tile to a tile
    "gemm_half_features": (64, 128),
    "misaligned_gemm": (1.5, 2.5),  # nanoGPT's 25% a step by the vocabulary alone
    "attention_efficiency": (0.55, 0.65),  # FlashAttention-2: 190 of 312
    "attention_backward_efficiency": (0.48, 0.58),  # 170 of 312
    "attention_half_length": (200, 350),
    "unfused_forward_bytes": (9, 13),  # write, read and write, read and write and a mask
    "unfused_backward_bytes": (13, 17),
    "memory_efficiency": (0.7, 0.92),  # STREAM-like kernels
    "scan_efficiency": (0.4, 0.55),  # with the convolutions' bytes and without, in torch's profile on GH200
    "pointwise_backward": (1.5, 2.0),
    "optimizer_efficiency": (0.6, 0.85),
    "pointwise_factor": (1.0, 1.0),
    "loss_factor": (1.0, 1.0),
    "fp8_efficiency": (0.75, 0.9),
    "mxfp8_slowdown": (1.04, 1.1),
    "fp8_saved_bytes": (1.0, 1.0),
    "user_buffers_overlap": (0.75, 0.95),
    "op_overhead_s": (5 * US, 20 * US),
    "collective_launch_s": (20 * US, 45 * US),
    "graph_launch_s": (10 * US, 80 * US),
    "microbatch_overhead_s": (200 * US, 500 * US),
    "layer_floor_s": (0.0, 0.0),
    "grouped_launch_s": (8.6 * US, 11 * US),
    "expert_sync_s": (1.5e-3, 2.5e-3),  # Nsight on H100: .62 ms of idling behind 1.4 ms of experts
    "expert_quantise_s": (1.5e-3, 2.2e-3),  # fitted on H100, B200 and GB200
    "delayed_wgrad_s": (6e-3, 8e-3),  # Bridge 26.02's Qwen3-30B on H100: 16.7 ms a layer in all
    "expert_overlap": (1.0, 1.0),
    "grouped_bytes_exposed": (1.0, 1.0),  # SimuMax's grouped products on B200
    "handed_on_s": (150 * US, 300 * US),  # Nsight: .67 ms an exchange of .43 ms of bytes
    "expert_efficiency": (1.0, 1.0),
    "step_overhead_s": (3e-3, 8e-3),
    "core_share": (1.0, 1.0),
    "inner_efficiency": (230 / 300, 240 / 300),  # nccl-tests
    "outer_efficiency": (0.7, 0.9),
    "outer_scaling": (0.05, 0.15),
    "p2p_efficiency": (0.6, 0.8),
    "latency_factor": (1.5, 2.5),
    "collective_overhead_s": (5 * US, 20 * US),
    "layers_per_message": (1.0, 1.0),
    "overlap_efficiency": (0.7, 0.9),
    "overlap_slowdown": (0.1, 0.2),
    "host_efficiency": (0.7, 0.9),
    "host_adam_bandwidth": (15 * GB, 25 * GB),
    "context_bytes": (0.5 * GB, 1.5 * GB),  # what published tools assume
    "communicator_bytes": (100 * MIB, 150 * MIB),
    "workspace_bytes": (32 * MIB, 96 * MIB),
    "allocator_slack": (0.01, 0.05),
    "memory_margin": (0.05, 0.1),
    "transient_activations": (2.0, 2.0),  # one gradient arrives, one leaves
}
BY_GPU: dict[str, dict[str, tuple[float, float]]] = {
    "V100-SXM2-16GB": {
        "gemm_efficiency": (95 / 125, 105 / 125), "attention_efficiency": (0.35, 0.45), "attention_backward_efficiency": (0.3, 0.4),
    },
    "H100-SXM-80GB": {
        "gemm_efficiency": (650 / 989, 750 / 989), "gemm_half_tokens": (100, 160), "gemm_half_features": (100, 160),
        "attention_efficiency": (0.5, 0.61), "attention_backward_efficiency": (0.42, 0.56), "attention_half_length": (300, 480),
        "op_overhead_s": (8 * US, 12 * US), "expert_overlap": (0.3, 0.45), "grouped_bytes_exposed": (0.0, 0.0),
    },
    "B200": {
        "gemm_efficiency": (1000 / 2250, 1150 / 2250), "gemm_half_tokens": (70, 110), "gemm_half_features": (70, 110),
        "attention_efficiency": (0.45, 0.55), "attention_backward_efficiency": (0.38, 0.48), "attention_half_length": (400, 640),
        "op_overhead_s": (7 * US, 11 * US), "inner_efficiency": (0.6, 0.74),
    },
}  # fmt: skip
"""What differs from an A100's."""
ON_CPU: dict[str, tuple[float, float]] = {
    "gemm_efficiency": (0.8, 1.0), "gemm_half_tokens": (8, 24), "gemm_half_features": (8, 24), "attention_efficiency": (0.4, 0.6),
    "attention_backward_efficiency": (0.4, 0.6), "attention_half_length": (16, 48), "memory_efficiency": (0.4, 0.6),
    "optimizer_efficiency": (0.4, 0.6), "op_overhead_s": (15 * US, 43 * US), "microbatch_overhead_s": (1e-3, 3e-3),
    "step_overhead_s": (7e-3, 13e-3), "core_share": (0.5, 0.5), "inner_efficiency": (1.0, 1.0), "outer_efficiency": (1.0, 1.0),
    "p2p_efficiency": (1.0, 1.0), "latency_factor": (1.0, 1.0), "collective_overhead_s": (200 * US, 1e-3), "collective_launch_s": (0, 0),
    "overlap_efficiency": (0, 0), "overlap_slowdown": (0, 0), "context_bytes": (442 * MIB, 640 * MIB),
    "communicator_bytes": (1 * MIB, 3 * MIB), "workspace_bytes": (0, 0),
}  # fmt: skip
"""gloo ranks, two to a core: traffic runs on the cores that compute, so nothing hides; a rank holds 442 to 640 MiB beside its tensors."""


def outside(found: Calibration, ranges: dict[str, tuple[float, float]]) -> dict[str, float]:
    values = {name: getattr(found, name) for name in ranges}
    return {name: value for name, value in values.items() if not ranges[name][0] * (1 - 1e-12) <= value <= ranges[name][1] * (1 + 1e-12)}


def numbers() -> set[str]:
    return {name for name in Calibration.__struct_fields__ if type(getattr(Calibration(), name)) is float}


def test_an_a100s_constants_are_where_their_sources_put_them() -> None:
    assert outside(Calibration(), RANGES) == {}
    assert numbers() - {*RANGES} == {"tp_overlap"}
    assert Calibration().tp_overlap < 0, "the engine's own"
    assert outside(datasheet(a100(), MEGATRON), RANGES) == {}


@pytest.mark.parametrize("name", BY_GPU)
def test_another_gpus_constants_are_an_a100s_but_where_its_own_sources_say_more(name: str) -> None:
    found = datasheet(replace(a100(), gpu=GPUS[name]), MEGATRON)
    assert outside(found, RANGES | BY_GPU[name]) == {}
    same = {constant for constant in numbers() if getattr(found, constant) == getattr(Calibration(), constant)}
    assert numbers() - same == {*BY_GPU[name]}


def test_on_a_stock_stack_the_host_alone_takes_longer() -> None:
    """And nothing does on ranks without a GPU, whose constants were measured as they are started."""
    cluster = replace(a100(), gpu=GPUS["H100-SXM-80GB"])
    tuned, stock = (datasheet(replace(cluster, stack=stack), MEGATRON) for stack in ("tuned", "stock"))
    assert (stock.op_overhead_s, stock.collective_launch_s) == pytest.approx((80 * US, 240 * US))
    assert replace(stock, op_overhead_s=tuned.op_overhead_s, collective_launch_s=tuned.collective_launch_s) == tuned
    cpu = replace(a100(4), gpu=replace(a100().gpu, name="cpu", peak_flops={"fp32": 1e11}), stack="stock")
    assert datasheet(cpu, MEGATRON) == datasheet(replace(cpu, stack="tuned"), MEGATRON)


def test_ranks_without_gpus_have_pythons_and_gloos_constants() -> None:
    assert outside(CPU, ON_CPU) == {}
    cluster = replace(a100(4), gpu=replace(a100().gpu, name="cpu", peak_flops={"fp32": 1e11}))
    assert datasheet(cluster, replace(MEGATRON, layers="hugging_face")) == CPU
    megatrons = datasheet(cluster, MEGATRON)
    assert 358 * MIB <= megatrons.context_bytes <= 0.45 * GIB
    assert replace(megatrons, context_bytes=CPU.context_bytes) == CPU


def test_shares_are_shares() -> None:
    assert {"gemm_efficiency", "tp_overlap", "allocator_slack", "core_share", "memory_margin", "overlap_efficiency"} <= SHARES
    assert not {"overlap_slowdown", "outer_scaling", "latency_factor", "op_overhead_s", "name"} & SHARES
    for name in SHARES - {"tp_overlap"}:
        assert 0 <= getattr(Calibration(), name) <= 1
        assert 0 <= getattr(CPU, name) <= 1


def file(value: float, name: str = "gemm_efficiency", interval: tuple[float, float] | None = None) -> CalibrationFile:
    return CalibrationFile(
        engine="megatron",
        gpu="x",
        traits="0",
        fitted_on="x",
        constants={name: Constant(value=value, unit="", origin="fitted")},
        fitted_runs=1,
        fitted_median_error=0.0,
        held_out_runs=0,
        held_out_median_error=None,
        interval=interval,
    )


def test_a_files_share_is_from_nothing_to_all_and_its_interval_holds_the_prediction() -> None:
    for value in (1e-6, 0.5, 1.0):
        assert file(value).calibration(Calibration()).gemm_efficiency == value
    assert file(3.0, "latency_factor").calibration(Calibration()).latency_factor == 3.0, "no share"
    with pytest.raises(ValueError, match="times are divided by it"):
        file(0.0)
    for value in (-0.01, 1.01):
        with pytest.raises(ValueError, match="a share is between 0 and 1"):
            file(value)
    for interval in ((0.5, 1.0), (1.0, 2.0), (1.0, 1.0)):
        assert file(0.5, interval=interval).calibration(Calibration()).interval == interval
    for interval in ((0.5, 0.99), (1.01, 2.0)):
        with pytest.raises(ValueError, match="does not hold the prediction itself"):
            file(0.5, interval=interval)
    assert not file(0.5, interval=(0.9, 1.1)).calibration(Calibration()).own_peaks
    assert file(0.05, "memory_margin", (0.9, 1.1)).calibration(Calibration()).own_peaks
    assert not file(0.05, "memory_margin").calibration(Calibration()).own_peaks, "the package's own"


def test_quantised_tensors_take_the_bytes_of_their_formats() -> None:
    """NVFP4: 4 bits and a scale of 8 bits for each 16 elements, along rows and along columns; FP8 of delayed scaling on Hopper: one byte as
    it is and one transposed; on Blackwell both only where blocks have scales: MXFP8 one of 8 bits for each 32 elements."""
    hopper, blackwell = GPUS["H100-SXM-80GB"], GPUS["B200"]
    plain = Training(global_batch_size=8, seq_length=128)
    assert fp8_weight_bytes(plain, hopper) == 0.0
    assert fp8_weight_bytes(replace(plain, precision="nvfp4"), blackwell) == 2 * (4 + 8 / 16) / 8
    fp8 = replace(plain, precision="fp8")
    assert fp8_weight_bytes(fp8, hopper) == 2.0
    kept = {"delayed": 1.0, "tensorwise": 1.0, "mxfp8": 2 * (1 + 1 / 32), "blockwise": 2.0}
    assert {name: fp8_weight_bytes(replace(fp8, fp8_recipe=name), blackwell) for name in kept} == kept  # type: ignore[arg-type]
    gemm = Gemm(name="x", tokens=8, k=8, n=8, split="column")
    strategy = Strategy(mesh=Mesh(tp=4), sequence_parallel=True)
    cast = 2 + 1  # read in 16 bits, written along rows
    assert quantised_bytes(gemm, strategy, "fp8", hopper, gathered=True) == cast / 4 + (1 + 1), "transposed behind the gather"
    assert quantised_bytes(gemm, strategy, "fp8", blackwell, gathered=True) == (cast + 1) / 4
    assert quantised_bytes(gemm, strategy, "fp8", hopper, gathered=False) == cast + 1
    assert quantised_bytes(gemm, replace(strategy, sequence_parallel=False), "fp8", hopper, gathered=True) == cast + 1
    assert quantised_bytes(replace(gemm, frozen=True), strategy, "fp8", hopper, gathered=True) == cast / 4
    assert quantised_bytes(gemm, strategy, "bf16", hopper, gathered=True) == 0.0
    assert quantised_bytes(replace(gemm, pad_to=128), strategy, "fp8", hopper, gathered=True) == 0.0


def test_of_a_weights_gradient_a_third_of_the_epilogues_bytes_is_waited_for() -> None:
    """.28 in the median of 171 shapes on B200, .37 of 57 on A100; all of them where bytes are what the product takes."""
    c = Calibration(gemm_half_tokens=0.0, gemm_half_features=0.0)
    rates = Rates.of(GPUS["A100-SXM-80GB"], "bf16", c)
    nbytes = 1e6
    plain, added = (gemm_seconds(8192, 8192, 8192, rates, c, added_to=more) for more in (0.0, nbytes))
    assert 0.28 <= (added - plain) * rates.bandwidth * c.memory_efficiency / nbytes <= 0.37
    thin, more = (gemm_seconds(1, 8192, 8192, rates, c, added_to=more) for more in (0.0, nbytes))
    assert (more - thin) * rates.bandwidth * c.memory_efficiency == pytest.approx(nbytes)


def test_adapters_of_all_layers_travel_in_one_message_where_a_bucket_holds_them() -> None:
    """40 million elements, megatron-core's least bucket, or the engine's own; no fewer than the constants say, nor more than there are."""

    def layers(rank: int, bucket: int, least: float = 1.0) -> float:
        traits = replace(DEEPSPEED, layers="hugging_face", bucket_elements=bucket)
        c = replace(datasheet(a100(), traits), layers_per_message=least)
        return cost_model(traits=traits, calibration=c, lora=Lora(rank=rank)).workload.calibration.layers_per_message

    trained = cost_model(traits=replace(DEEPSPEED, layers="hugging_face"), lora=Lora(rank=64)).workload.trainable
    many = cost_model(traits=replace(DEEPSPEED, layers="hugging_face"), lora=Lora(rank=1024)).workload.trainable
    assert many > 40_000_000 > trained
    assert layers(64, 0) == 4.0
    assert layers(1024, 0) == pytest.approx(40_000_000 * 4 / many, rel=1e-9)
    assert layers(64, int(trained / 2)) == pytest.approx(2.0, rel=1e-3)
    assert layers(64, 10**12) == 4.0
    assert layers(64, 1) == 1.0
    assert layers(64, 1, 3.0) == 3.0
