"""How many parameters a rank has of a layer: with and without what other stages share, frozen and trained."""

from __future__ import annotations

import pytest
from cost_cases import DEEPSPEED, MEGATRON, a100, cost_model, gpt
from msgspec.structs import replace

from orchestrator.cost.calibration import datasheet
from orchestrator.cost.price import CostModel
from orchestrator.cost.replicas import ReplicaPrices
from orchestrator.errors import InputError
from orchestrator.model.families import describe
from orchestrator.model.hugging_face import hugging_face
from orchestrator.model.lora import Lora, trainable_parameters, with_lora
from orchestrator.strategy.spec import Candidate, Mesh, Strategy

TRANSFORMERS = replace(DEEPSPEED, layers="hugging_face")


def prices(costs: CostModel) -> ReplicaPrices:
    return ReplicaPrices(costs.workload, costs.network)


def test_nothing_is_frozen_where_all_is_trained() -> None:
    costs = cost_model()
    for layer in costs.workload.kinds.values():
        assert prices(costs).frozen_parameters(layer, 1, with_tied=True) == 0


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("rank", [4, 16])
def test_what_is_not_frozen_of_a_model_with_adapters_is_trained(tp: int, rank: int) -> None:
    """Of the whole model on one rank, the adapters alone; on each of two, half of the weights and more than half of the adapters."""
    model, lora = gpt(position_embedding="learned_absolute"), Lora(rank=rank)
    costs = cost_model(model, traits=TRANSFORMERS, lora=lora)
    of, counts = prices(costs), costs.workload.counts
    pairs = [
        (counts[kind], of.dense_parameters(layer, tp, with_tied=False), of.frozen_parameters(layer, tp, with_tied=False))
        for kind, layer in costs.workload.kinds.items()
    ]
    trained = sum(count * (dense - frozen) for count, dense, frozen in pairs)
    whole = trainable_parameters(with_lora(hugging_face(describe(model, 2048)), lora))
    if tp == 1:
        assert trained == whole
    else:
        assert whole / 2 < trained < whole
    assert all(0 <= frozen <= dense for _, dense, frozen in pairs)


def test_a_head_that_shares_its_weights_has_them_only_on_another_stage() -> None:
    costs = cost_model(gpt())
    head = costs.workload.kinds["head"]
    both = [prices(costs).dense_parameters(head, 1, with_tied=tied) for tied in (True, False)]
    assert both[0] - both[1] == 51200 * 1024


def test_a_stage_that_the_engine_has_not_is_named() -> None:
    costs = cost_model(traits=MEGATRON)
    with pytest.raises(InputError, match="megatron does not have it"):
        prices(costs).states_of(Strategy(mesh=Mesh(dp=2), zero_stage=3))


def test_without_adapters_gradients_travel_as_the_constants_say() -> None:
    c = replace(datasheet(a100(), MEGATRON), layers_per_message=3.0)
    assert cost_model(calibration=c).workload.calibration.layers_per_message == 3.0
    with_adapters = cost_model(traits=TRANSFORMERS, lora=Lora(rank=4)).workload.calibration.layers_per_message
    assert with_adapters > 3.0, "adapters are small: those of many layers fill one message"


def test_megatrons_frozen_weights_have_no_states_and_its_adapters_all() -> None:
    """A rank of tp 2, dp 4: 2 bytes of every frozen weight; 2 and 4 of an adapter's and a quarter of 12, by the distributed optimizer."""
    costs = cost_model(gpt(position_embedding="rope"), lora=Lora(rank=16, targets=("linear_qkv", "linear_fc2")))
    layer, strategy = costs.workload.kinds["decoder"], Strategy(mesh=Mesh(tp=2, dp=4), zero_stage=1, sequence_parallel=True)
    of = prices(costs)
    frozen = of.frozen_parameters(layer, 2, with_tied=True)
    adapters = of.dense_parameters(layer, 2, with_tied=True) - frozen
    assert adapters == 16 * (1024 + 3072 + 4096 + 1024) / 2
    assert frozen == pytest.approx(12 * 1024**2 / 2, rel=0.002)
    candidate = Candidate(engine="megatron", strategy=strategy, micro_batch_size=1, num_microbatches=2)
    assert costs.layer_static_bytes(candidate, "decoder") == 2 * frozen + adapters * (6 + 12 / 4)
    plain = cost_model(gpt(position_embedding="rope"))
    adapted, whole = (one.layer(candidate, "decoder", "none").by_cause["gemm"] for one in (costs, plain))
    assert 2 / 3 < adapted / whole < 0.85, "no products for weights' gradients, and the adapters'"
