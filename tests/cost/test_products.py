"""Matrix products: what FP8 moves to take its inputs, what tensor-parallel ranks gather for it, and what a weight's gradient waits for."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from orchestrator.cost.calibration import Calibration
from orchestrator.cost.compute import EXPOSED_EPILOGUE, Rates, gathered_bytes, gemm_seconds, quantised_bytes
from orchestrator.hardware.catalog import GPUS
from orchestrator.model.lora import frozen_layer
from orchestrator.model.spec import Gemm, Weight
from orchestrator.strategy.axes import tp
from orchestrator.strategy.spec import Mesh, Strategy
from tests.cost.cost_cases import describe, gpt

H100, B200 = GPUS["H100-SXM-80GB"], GPUS["B200"]
WOVEN = Strategy(mesh=Mesh(tp=4), sequence_parallel=True)
COLUMN = Gemm(name="fc1", tokens=2048, k=1024, n=4096, split="column")


@pytest.mark.parametrize(
    ("gpu", "strategy", "gathered", "moved"),
    [
        (H100, Strategy(mesh=Mesh()), False, 2 + 1 + 1),
        (H100, Strategy(mesh=Mesh(tp=4)), True, 2 + 1 + 1),  # every rank has the whole and casts it
        (H100, WOVEN, False, 2 + 1 + 1),
        (H100, WOVEN, True, (2 + 1) / 4 + 2),  # its share is cast, the gathered whole transposed
        (B200, WOVEN, True, (2 + 1 + 1) / 4),  # both copies are gathered
    ],
)
def test_fp8_casts_what_a_product_takes_and_transposes_what_was_gathered(
    gpu: object, strategy: Strategy, gathered: bool, moved: float
) -> None:
    assert quantised_bytes(COLUMN, strategy, "fp8", gpu, gathered=gathered) == moved  # type: ignore[arg-type]


def test_frozen_weights_have_no_copies_for_their_gradient_and_the_vocabulary_stays_wide() -> None:
    frozen, head = replace(COLUMN, frozen=True), replace(COLUMN, pad_to=128)
    assert quantised_bytes(frozen, Strategy(mesh=Mesh()), "fp8", H100, gathered=False) == 2 + 1
    assert quantised_bytes(head, Strategy(mesh=Mesh()), "fp8", H100, gathered=False) == 0
    assert quantised_bytes(COLUMN, Strategy(mesh=Mesh()), "bf16", H100, gathered=False) == 0


def test_fp8_halves_what_tensor_parallel_ranks_gather_and_not_what_they_sum_up() -> None:
    """Of two gathers in forward and four in backward, two of which are of an output's gradient, which Blackwell gathers twice."""
    layer = describe(gpt(), 2048).kind("decoder")
    x = 2048 * 1024

    def moved(gpu: object, precision: str) -> tuple[float, float]:
        items = list(tp.traffic(layer, WOVEN, 1, 2, gathered=gathered_bytes(layer, precision, gpu)))  # type: ignore[arg-type]
        sums = {
            operation: sum(item.nbytes for item in items if item.operation == operation) for operation in ("all_gather", "reduce_scatter")
        }
        return sums["all_gather"] / x, sums["reduce_scatter"] / x

    assert moved(H100, "bf16") == (6 * 2, 4 * 2)
    assert moved(H100, "fp8") == (6 * 1, 4 * 2)
    assert moved(B200, "fp8") == (4 * 1 + 2 * 2, 4 * 2)


def test_adapters_and_the_vocabulary_gather_in_16_bits() -> None:
    model = describe(gpt(), 2048)
    layer = model.kind("decoder")
    frozen = frozen_layer(layer)
    adapted = replace(frozen, weights=(*frozen.weights, Weight(name="lora_A", shape=(8, 1024))))
    assert gathered_bytes(adapted, "fp8", H100) is None
    assert gathered_bytes(frozen, "fp8", H100) == (1, 1), "nothing takes its input in 16 bits"
    heads = [run.layer for run in model.runs if any(isinstance(op, Gemm) and op.pad_to for op in run.layer.ops)]
    assert heads
    assert all(gathered_bytes(head, "fp8", H100) is None for head in heads)


def test_a_third_of_what_a_weights_gradient_is_added_to_is_not_hidden() -> None:
    """2 m k n FLOPs at the peak, and a third of 4 k n bytes: 8 s and 4 s of bytes, of which 1.32 show."""
    plain = Calibration(gemm_efficiency=1.0, gemm_half_tokens=0.0, gemm_half_features=0.0, memory_efficiency=1.0)
    rates = Rates(peak=2 * 64.0**3 / 8, unaligned=1.0, bandwidth=4 * 64.0**2 / 4, itemsize=0, operand=0)
    assert gemm_seconds(64, 64, 64, rates, plain) == 8
    assert gemm_seconds(64, 64, 64, rates, plain, added_to=4 * 64.0**2) == pytest.approx(8 + 4 * EXPOSED_EPILOGUE)
