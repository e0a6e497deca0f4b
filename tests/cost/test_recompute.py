"""What of a layer a recompute mode runs again, operation by operation, and what it does not keep."""

from __future__ import annotations

import pytest
from cost_cases import describe, gpt

from orchestrator.cost.recompute import again, dropped, one_of, tiled
from orchestrator.model.ops import Gemm, Pointwise
from orchestrator.model.spec import LayerSpec
from orchestrator.strategy.spec import RECOMPUTE_MODULES, RECOMPUTE_ORDER, Mesh, Recompute, Strategy

LAYER = describe(gpt(), 2048).kind("decoder")
HEAD = describe(gpt(), 2048).kind("head")
MLP = ["Enter", "mlp.linear_fc1", "mlp.activation", "mlp.linear_fc2", "Exit"]


def names(layer: LayerSpec | None) -> list[str] | None:
    return None if layer is None else [getattr(op, "name", type(op).__name__) for op in layer.ops]


@pytest.mark.parametrize(
    ("mode", "again_plain", "more_fused"),
    [
        ("none", None, []),
        ("full", None, []),
        ("selective", ["self_attention.core_attention"], []),
        ("layernorm", ["input_layernorm", "pre_mlp_layernorm"], []),
        ("mlp", MLP, ["pre_mlp_layernorm"]),
        ("core_attn+mlp", ["self_attention.core_attention", *MLP], ["pre_mlp_layernorm"]),
        ("layernorm+mlp", ["input_layernorm", "pre_mlp_layernorm", *MLP], []),
        ("moe_act", [], []),
    ],
)
def test_a_mode_runs_its_modules_again_and_transformer_engines_mlp_its_norm_too(
    mode: Recompute, again_plain: list[str] | None, more_fused: list[str]
) -> None:
    """In the layer's order; the MLP with the borders of its tensor-parallel region. All and nothing are no matter of modules."""
    assert names(again(LAYER, mode, fused_norms=False)) == again_plain
    found = names(again(LAYER, mode, fused_norms=True))
    assert found == again_plain or (found is not None and sorted(found) == sorted([*(again_plain or []), *more_fused]))
    assert more_fused == [] or found != again_plain


def test_modes_of_several_modules_drop_what_each_drops() -> None:
    """And with fused norms the one that the MLP begins with."""
    single: dict[str, set[str]] = {
        "core_attn": {"core_attention"}, "layernorm": {"norm", "mlp_norm"}, "mlp": {"mlp", "expert_activation"},
        "moe_act": {"expert_activation"}, "mla_up_proj": {"up_projected"},
    }  # fmt: skip
    for mode in RECOMPUTE_ORDER:
        modules = RECOMPUTE_MODULES.get(mode, ())
        expected = set[str]().union(*(single[module] for module in modules))
        assert {*dropped(mode, fused_norms=False)} == expected
        assert {*dropped(mode, fused_norms=True)} == expected | ({"mlp_norm"} if "mlp" in modules else set())


def test_pieces_of_a_sequence_are_of_the_mlp_or_of_the_logits_and_their_loss() -> None:
    mesh = Mesh()
    assert tiled(LAYER, Strategy(mesh=mesh)) is None
    assert tiled(HEAD, Strategy(mesh=mesh)) is None
    for strategy, layer, inside in (
        (Strategy(mesh=mesh, tiled_mlp=4), LAYER, MLP),
        (Strategy(mesh=mesh, tiled_logits=4), HEAD, [name for name in names(HEAD) or () if name in ("output_layer", "cross_entropy")]),
    ):
        found = tiled(layer, strategy)
        assert found is not None
        part, pieces = found
        assert pieces == 4
        assert names(part) == inside
        assert len(inside) >= 2
        for whole, piece in zip(part.ops, one_of(part, pieces).ops, strict=True):
            if isinstance(whole, Gemm):
                assert isinstance(piece, Gemm)
                assert (piece.tokens, piece.k, piece.n) == (whole.tokens // 4, whole.k, whole.n)
            elif isinstance(whole, Pointwise):
                assert isinstance(piece, Pointwise)
                assert piece.elements == whole.elements // 4
            else:
                assert piece == whole
    assert tiled(HEAD, Strategy(mesh=mesh, tiled_mlp=4)) is None
    assert tiled(LAYER, Strategy(mesh=mesh, tiled_logits=4)) is None
