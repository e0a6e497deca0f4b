from __future__ import annotations

import pytest
from msgspec.structs import replace
from small_models import gpt

from orchestrator.errors import InputError
from orchestrator.model.spec import ModelSpec
from orchestrator.strategy.layout import LayerSpan, Stage
from orchestrator.strategy.megatron_layout import chunk_sizes, compress, expand, layout_string, stages_of


def parse_layout(text: str, model: ModelSpec, pp: int, vpp: int) -> tuple[Stage, ...]:
    """The stages that a layout string describes, nothing recomputed."""
    return stages_of(model, chunk_sizes(text, model, pp, vpp), pp)


def test_a_layout_becomes_stages() -> None:
    stages = parse_layout("Et*7|t*9|t*9|t*7L", gpt(32), 4, 1)
    assert [sum(s.count for s in stage.layers) for stage in stages] == [8, 9, 9, 8]
    assert stages[1].layers == (LayerSpan(kind="decoder", first=7, count=9),)
    assert stages[3].layers[-1].kind == "head"


def test_chunks_stand_vpp_major() -> None:
    """chunk[v][p] = stages[v*pp + p] (megatron: pipeline_parallel_layer_layout.py:60-66)."""
    stages = parse_layout("Et|tt|ttt|ttL", gpt(8), 2, 2)
    assert stages[0].chunk(1) == (LayerSpan(kind="decoder", first=3, count=3, chunk=1),)
    assert stages[1].chunk(0) == (LayerSpan(kind="decoder", first=1, count=2, chunk=0),)


@pytest.mark.parametrize("text", ["Et*7|t*9|t*9|t*7L", "E|t*16|t*16|L", "Et|t*15||t*16L"])
def test_string_to_stages_and_back(text: str) -> None:
    model = gpt(32)
    assert layout_string(parse_layout(text, model, 4, 1)) == text
    assert layout_string(parse_layout(text, model, 2, 2)) == text


@pytest.mark.engines
@pytest.mark.parametrize("text", ["Ettt|(tt|)*29,t|L", "(Et|)*1t*4|(tt)*2L", "E|t,t,t|L"])
def test_the_grammar_is_megatrons(text: str) -> None:
    core = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout")
    letters = {"embedding": "E", "decoder": "t", "loss": "L"}
    theirs = core.PipelineParallelLayerLayout.parse_str_to_list(text)
    assert expand(text) == tuple("".join(letters[kind.name] for kind in chunk) for chunk in theirs)
    again = core.PipelineParallelLayerLayout.parse_str_to_list(compress(expand(text)))
    assert again == theirs


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("Et*7|t*9|t*9|t*6L", "drops 1"),
        ("Et*7|t*9|t*9|t*8L", "1 too many"),
        ("Et*16|t*16L", "2 chunks"),
        ("t*8|t*8|t*8|t*8L", "embedding"),
        ("Et*8|t*8|t*8L|t*8", "end with the loss"),
        ("Et*8|t*8|x|t*16L", "'x' is no part"),
        ("", "has 1 chunks"),
        ("Et*99999999999|t|t|tL", "unrolls to more"),
        ("Et*8|t*8|m|t*16L", "has 1 layers of multi-token prediction (m); the model has 0"),
        ("Et*8|t*8|t*8|t*8L*2", "loss (L) exactly once"),
        ("tEt*7|t*8|t*8|t*8L", "start with"),
        ("|Et*16|t*8|t*8L", "belongs to the first chunk"),
        ("Et*8|t*12|t*12L|", "the loss (L) to the last"),
    ],
)
def test_a_bad_layout_is_refused(text: str, why: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_layout(text, gpt(32), 4, 1)
    assert caught.value.key == "pin.layout"
    assert why in str(caught.value)


def test_a_prediction_layer_stands_before_the_loss_and_is_counted() -> None:
    model = replace(gpt(8), architecture=replace(gpt(8).architecture, mtp_num_layers=2))
    stages = parse_layout("Et*5|t*3mmL", model, 2, 1)
    assert [span.kind for span in stages[1].layers] == ["decoder", "head"]
    assert layout_string(stages, 2) == "Et*5|t*3m*2L"
    bad = (("Et*5|t*3L", "has 0 layers of multi-token prediction"), ("Et*5m*2|t*3L", "in the last chunk, right before the loss"))
    for text, why in bad:
        with pytest.raises(InputError) as caught:
            parse_layout(text, model, 2, 1)
        assert why in str(caught.value)


def test_recompute_takes_the_first_layers_of_each_chunk() -> None:
    """Megatron's `block` method: counts are per (virtual) stage (transformer_block.py:532-560)."""
    stages = stages_of(gpt(8), (2, 2, 2, 2), 2, [("full", 1), ("none", 0)])
    assert [(s.first, s.count, s.recompute, s.chunk) for s in stages[0].layers if s.kind == "decoder"] == [
        (0, 1, "full", 0),
        (1, 1, "none", 0),
        (4, 1, "full", 1),
        (5, 1, "none", 1),
    ]
    assert {s.recompute for s in stages[1].layers} == {"none"}
