"""Pieces of a sequence (DeepSpeed's ALST): what they leave out of memory and what they take once more.

Measured on a CPU (resident memory of one process, Llama of 4 layers, h 256, f 4096, 16,000 ids, 2,048 tokens, fp32, 8 pieces each): the
MLPs' take 507 MiB less (496 by the count below), the logits' 262 MiB less (9.6 bytes a logit; 14 are counted, of 16-bit training)."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from orchestrator import planning, recipe
from orchestrator.cost.price import CostModel
from orchestrator.detect import machine
from orchestrator.engines import ENGINES
from orchestrator.errors import InputError, NoPlanError
from orchestrator.plan import Plan
from orchestrator.strategy.layout import Prediction

TOKENS, HIDDEN, FFN, VOCABULARY, LAYERS = 8192, 4096, 14336, 128256, 32
"""Llama 3 8B, of which each rank has a sequence."""


@pytest.fixture(scope="module")
def asked() -> tuple[Plan, CostModel]:
    given = ["recipe=llama3_8b", "gpus=8", "engine=deepspeed", "pin.tp=1", "pin.cp=1", "launch=none"]
    settings = recipe.load(given, machine(), list(ENGINES))
    asked = planning.question(settings, top_k=1)
    return planning.fastest(settings, asked).plan, asked.planned[0].costs(asked.workload)


def price(asked: tuple[Plan, CostModel], recompute: Any = "none", **options: int) -> tuple[Any, Any]:
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
    given = ["recipe=llama3_8b", "gpus=8", "launch=none", *words]
    settings = recipe.load(given, machine(), list(ENGINES))
    plan = planning.fastest(settings).plan
    assert plan.predicted is not None
    return plan.predicted


ALIKE = (
    *("engine=deepspeed", "pin.zero_stage=3", "pin.micro_batch_size=1", "pin.recompute=none"),
    *("pin.tp=1", "pin.cp=1", "pin.offload=false"),
)


def test_pieces_fit_where_the_whole_does_not() -> None:
    with pytest.raises(NoPlanError):
        predicted(*ALIKE)
    predicted(*ALIKE, "pin.tiled_logits=8", "pin.tiled_mlp=8")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("engine=deepspeed", "pin.tiled_mlp=3"), "does not divide"),
        (("engine=deepspeed", "pin.tiled_logits=8", "pin.tp=2"), "AutoTP"),
        (("engine=megatron", "pin.tiled_mlp=2"), "no option"),
        (("engine=deepspeed", "pin.tiled_logits=2", "lora.rank=8"), "adapters"),
    ],
)
def test_what_pieces_can_not_do_is_said(words: tuple[str, ...], why: str) -> None:
    with pytest.raises((NoPlanError, InputError), match=why):
        predicted(*words)
