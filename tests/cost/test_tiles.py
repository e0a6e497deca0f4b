"""Pieces of a sequence and checkpoints in host memory (DeepSpeed's ALST): what they leave out of memory and what they take once more.

Measured on a CPU (resident memory of one process, Llama of 4 layers, h 256, f 4096, 16,000 ids, 2,048 tokens, fp32, 8 pieces each): the
MLPs' take 507 MiB less (496 by the count below), the logits' 262 MiB less (9.6 bytes a logit; 14 are counted, of 16-bit training)."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from orchestrator import recipe
from orchestrator.cost.price import CostModel
from orchestrator.detect import machine
from orchestrator.engines import ENGINES
from orchestrator.errors import InputError, NoPlanError
from orchestrator.model.families import describe
from orchestrator.plan import Plan
from orchestrator.planning import Planner
from orchestrator.strategy.layout import Prediction
from orchestrator.strategy.workload import Workload

TOKENS, HIDDEN, FFN, VOCABULARY, LAYERS = 8192, 4096, 14336, 128256, 32
"""Llama 3 8B, of which each rank has a sequence."""


@pytest.fixture(scope="module")
def asked() -> tuple[Plan, CostModel]:
    given = ["recipe=llama3_8b", "gpus=8", "engine=deepspeed", "pin.tp=1", "pin.cp=1", "launch=none"]
    settings = recipe.load(given, machine(), list(ENGINES))
    asked = Planner(settings).space(top_k=1)
    return Planner(settings).fastest(asked).plan, asked.planned[0].costs(asked.workload)


def price(asked: tuple[Plan, CostModel], recompute: Any = "none", **options: Any) -> tuple[Any, Any]:
    """Of a layer and of the head."""
    plan, costs = asked
    candidate = plan.candidate
    strategy = replace(candidate.strategy, recompute=recompute, **options)
    samples = candidate.num_microbatches * candidate.micro_batch_size
    one = replace(candidate, strategy=strategy, micro_batch_size=1, num_microbatches=samples)
    return costs.layer(one, "decoder", recompute), costs.layer(one, "head", "none")


def test_an_mlp_in_pieces_keeps_its_input_alone(asked: tuple[Plan, CostModel]) -> None:
    """Gate, up, the activated gate and the product with it, of 2 bytes: gone between the passes, a piece of it there in backward."""
    whole, pieces = price(asked)[0], price(asked, tiled_mlp=8)[0]
    made = 4 * FFN * TOKENS * 2
    assert whole.saved_bytes - pieces.saved_bytes == made
    more = [cost.transient_backward_bytes - cost.transient_forward_bytes for cost in (pieces, whole)]
    assert more[0] - more[1] == pytest.approx(made / 8)


def test_an_mlp_in_pieces_is_computed_once_more(asked: tuple[Plan, CostModel]) -> None:
    """Also where the whole layer is; and weights' gradients are added up by piece."""
    for recompute in ("none", "full"):
        whole, pieces = price(asked, recompute)[0], price(asked, recompute, tiled_mlp=8)[0]
        products = 3 * 2 * HIDDEN * FFN * TOKENS
        least = products / asked[1].cluster.gpu.peak_flops["bf16"]
        assert least < pieces.seconds - whole.seconds < 5 * least


def test_full_recompute_makes_a_piece_of_an_mlp_at_a_time(asked: tuple[Plan, CostModel]) -> None:
    whole, pieces = price(asked, "full")[0], price(asked, "full", tiled_mlp=8)[0]
    assert pieces.saved_bytes == whole.saved_bytes
    assert whole.transient_backward_bytes - pieces.transient_backward_bytes > 4 * FFN * TOKENS * 2 * 7 / 8


def test_logits_in_pieces_take_a_piece_of_memory_and_a_third_product_more(asked: tuple[Plan, CostModel]) -> None:
    """14 bytes a logit at the loss's peak, 1/8 of them in 8 pieces; head products x 4/3, and weights' gradients added up by piece."""
    whole, pieces = price(asked)[1], price(asked, tiled_logits=8)[1]
    saved = whole.transient_backward_bytes - pieces.transient_backward_bytes
    assert saved == pytest.approx(14 * TOKENS * VOCABULARY * 7 / 8)
    assert 1.2 < pieces.seconds / whole.seconds < 1.6


def predicted(*words: str) -> Prediction:
    given = [*(() if words[0].startswith("recipe=") else ("recipe=llama3_8b", "gpus=8")), "launch=none", *words]
    settings = recipe.load(given, machine(), list(ENGINES))
    plan = Planner(settings).fastest().plan
    assert plan.predicted is not None
    return plan.predicted


ALIKE = (
    *("engine=deepspeed", "pin.zero_stage=3", "pin.micro_batch_size=1", "pin.recompute=none"),
    *("pin.tp=1", "pin.cp=1", "pin.offload=false"),
)


def test_pieces_fit_where_the_whole_does_not() -> None:
    with pytest.raises(NoPlanError):
        predicted(*ALIKE, "pin.tiled_logits=1", "pin.tiled_mlp=1")
    predicted(*ALIKE, "pin.tiled_logits=8", "pin.tiled_mlp=8")


def test_checkpoints_in_host_memory_leave_three_on_the_gpu(asked: tuple[Plan, CostModel]) -> None:
    """The last layer's, and two that are being copied; backward copies them back beside compute that takes longer, on 50 GB/s."""
    here, there = price(asked, "full")[0], price(asked, "full", offload_activations=True)[0]
    assert here.saved_bytes == TOKENS * HIDDEN * 2
    assert LAYERS * there.saved_bytes == pytest.approx(3 * here.saved_bytes)
    assert here.transient_backward_bytes == there.transient_backward_bytes
    assert (here.forward_s, here.backward_s) == (there.forward_s, there.backward_s)


def test_without_recompute_nothing_leaves(asked: tuple[Plan, CostModel]) -> None:
    assert price(asked)[0] == price(asked, offload_activations=True)[0]


def test_a_slow_link_to_the_host_is_waited_for(asked: tuple[Plan, CostModel]) -> None:
    """64 MiB of each layer but the last at 0.8 of 1 GB/s: 81 ms in place of forward's, and of backward's."""
    plan, costs = asked
    slow = replace(costs.cluster, host_bandwidth=1e9)
    workload = Workload(model=describe(plan.model, TOKENS), training=costs.training, cluster=slow)
    here, there = (
        price((plan, CostModel(workload, costs.traits, costs.calibration)), "full", offload_activations=on)[0] for on in (False, True)
    )
    copied = TOKENS * HIDDEN * 2 * (1 - 1 / LAYERS) / (1e9 * costs.calibration.host_efficiency)
    assert (there.forward_s, there.backward_s) == pytest.approx((copied, copied))
    assert there.by_cause["offload"] == pytest.approx(2 * copied - here.seconds)


LONG = (
    *("recipe=llama3_8b_128k", "gpus=8", "engine=deepspeed", "train.seq_length=1048576", "model.max_position_embeddings=1048576"),
    *("train.global_batch_size=1", "pin.cp=8", "pin.zero_stage=3", "pin.recompute=full", "pin.tiled_logits=256"),
)


def test_checkpoints_in_host_memory_make_room_for_a_million_tokens() -> None:
    """Of Llama 3 8B on 8 H100: 131,072 tokens x 4,096 x 2 bytes x 29 of 32 layers less, 29 GiB, with fragmentation. Without pieces of the
    MLP only so (arXiv 2506.13996, table 1, whose optimizer is on the host: 1.1M tokens without, 2.4M with)."""
    here, there = (predicted(*LONG, "pin.tiled_mlp=64", *more) for more in ((), ("pin.offload_activations=true",)))
    assert 29 * 2**30 < here.peak_memory_bytes - there.peak_memory_bytes < 1.05 * 29 * 2**30
    assert there.step_time_s == pytest.approx(here.step_time_s)
    with pytest.raises(NoPlanError):
        predicted(*LONG, "pin.tiled_mlp=1", "pin.offload_activations=false")
    predicted(*LONG, "pin.tiled_mlp=1", "pin.offload_activations=true")


def test_a_plan_that_would_gain_by_it_says_so() -> None:
    """As fast, and 29 GiB less."""
    settings = recipe.load([*LONG, "launch=none", "pin.tiled_mlp=64"], machine(), list(ENGINES))
    (found,) = Planner(settings).searched().unasked
    assert found.key == "pin.offload_activations=true"
    assert found.plan.offload_activations
    assert found.asks.startswith("needs calls of DeepSpeed's")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("engine=deepspeed", "pin.tiled_mlp=3"), "does not divide"),
        (("engine=deepspeed", "pin.tiled_logits=8", "pin.tp=2"), "AutoTP"),
        (("engine=megatron", "pin.tiled_mlp=2"), "no option"),
        (("engine=megatron", "pin.offload_activations=true"), "no option"),
        (("engine=deepspeed", "pin.offload_activations=true", "pin.recompute=none"), "only full recompute keeps checkpoints"),
        (("engine=deepspeed", "pin.tiled_logits=2", "lora.rank=8"), "adapters"),
    ],
)
def test_what_pieces_can_not_do_is_said(words: tuple[str, ...], why: str) -> None:
    with pytest.raises((NoPlanError, InputError), match=why):
        predicted(*words)
