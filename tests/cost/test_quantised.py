"""What frozen weights in few bits take beside their products, by hand from bitsandbytes 0.50's source."""

from __future__ import annotations

from typing import Literal

import pytest
from cost_cases import DEEPSPEED, a100, cost_model, gpt
from msgspec.structs import replace

from orchestrator.cost.layer import LayerPrices
from orchestrator.cost.price import CostModel
from orchestrator.cost.quantised import Moved, moved, working
from orchestrator.hardware.catalog import GPUS
from orchestrator.model.lora import NF4_BYTES, Lora
from orchestrator.model.ops import Gemm
from orchestrator.strategy.spec import Mesh, Strategy

TRANSFORMERS = replace(DEEPSPEED, layers="hugging_face")
M, K, N = 2048, 4096, 1024


def priced(bits: Literal[4, 8] | None) -> CostModel:
    return cost_model(gpt(position_embedding="learned_absolute"), traits=TRANSFORMERS, lora=Lora(rank=4, bits=bits))


def test_4_bits_are_made_16_before_either_product() -> None:
    one = (NF4_BYTES + 2) * K * N
    assert moved(Gemm(name="a", tokens=M, k=K, n=N, frozen=True, bits=4), M, K, N, "bf16", 2) == Moved(one, one)


@pytest.mark.parametrize(("precision", "of_input", "of_output"), [("bf16", 16, 14), ("fp16", 12, 10)])
def test_8_bits_move_inputs_and_outputs_forward_and_weights_backward(precision: str, of_input: int, of_output: int) -> None:
    """Each element of the input: cast 2 + 2 (fp16: none), absolute 2 + 2, compared 2 + 1, looked through 1 + 1, quantised 2 + 1; of the
    output: scaled 4 + 2, cast 2 + 2, added to 2 + 2; each weight: cast 1 + 2, scaled 2 + 2."""
    found = moved(Gemm(name="a", tokens=M, k=K, n=N, frozen=True, bits=8), M, K, N, precision, 2)
    assert found == Moved(of_input * M * K + of_output * M * N, 7 * K * N)


def test_8_bits_need_the_sums_of_32_bits_forward_and_one_weight_in_16_backward() -> None:
    costs = priced(8)
    layer = costs.workload.kinds["decoder"]
    ops = [op for op in layer.ops if isinstance(op, Gemm) and op.bits == 8]
    wide = max(ops, key=lambda op: op.n)
    weight = 2 * max(op.k * op.n for op in ops)
    forward = 2 * wide.tokens * (wide.k + 6 * wide.n)
    one_rank = Strategy(mesh=Mesh())
    assert working(layer, one_rank, 2, "bf16", 2, False) == (forward, weight)
    assert working(layer, one_rank, 2, "bf16", 2, True) == (forward, max(forward, weight))
    assert working(priced(4).workload.kinds["decoder"], one_rank, 2, "bf16", 2, True) == (weight, weight)
    assert working(priced(None).workload.kinds["decoder"], one_rank, 2, "bf16", 2, True) == (0, 0)


def test_a_layer_of_8_bits_holds_less_and_launches_more_than_one_of_16() -> None:
    one_rank = Strategy(mesh=Mesh())
    layers = [(LayerPrices(costs.workload, costs.network), costs.workload.kinds["decoder"]) for costs in (priced(8), priced(None))]
    eight, sixteen = (prices.of(layer, "full", one_rank, 1) for prices, layer in layers)
    assert eight.weight_bytes < 0.6 * sixteen.weight_bytes
    assert eight.by_cause["overhead"] > sixteen.by_cause["overhead"]
    assert eight.saved_bytes == sixteen.saved_bytes


@pytest.mark.parametrize(("gpu", "times"), [("H100-SXM-80GB", 1.0), ("B200", 1.0), ("B300", 15.0), ("GB300", 15.0)])
def test_products_of_8_bits_are_slower_where_int8_is_cut(gpu: str, times: float) -> None:
    one_rank = Strategy(mesh=Mesh())
    seconds = []
    for bits in (8, None):
        cluster = replace(a100(8), gpu=GPUS[gpu])
        costs = cost_model(
            gpt(position_embedding="learned_absolute"),
            cluster=cluster,
            traits=TRANSFORMERS,
            lora=Lora(rank=4, bits=bits),  # type: ignore[arg-type]
        )
        layer = LayerPrices(costs.workload, costs.network).of(costs.workload.kinds["decoder"], "none", one_rank, 1)
        seconds.append(layer.by_cause["gemm"])
    assert 1 + 0.25 * (times - 1) <= seconds[0] / seconds[1] <= 1 + 0.55 * (times - 1), "the frozen linears, forward"
