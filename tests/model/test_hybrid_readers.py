"""Mamba-2, Nemotron-H and Llama 4: which layers their configurations make, what their parts keep and compute, and what is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from published_counts import LLAMA4_VISION, PUBLISHED

from orchestrator.errors import InputError
from orchestrator.model.architecture import Architecture
from orchestrator.model.families import describe, from_hf_config
from orchestrator.model.flops import forward_flops
from orchestrator.model.hugging_face import hugging_face
from orchestrator.model.ops import Attention, Gemm, Scan
from orchestrator.model.parts.experts import Experts

NANO, SCOUT, MAVERICK = (PUBLISHED[name][0] for name in ("Nemotron-3-Nano-30B-A3B", "Llama-4-Scout", "Llama-4-Maverick"))
TINY = {"model_type": "mamba2", "num_hidden_layers": 1, "vocab_size": 64, "hidden_size": 64, "num_heads": 8, "head_dim": 16} | {
    "state_size": 32, "n_groups": 2, "chunk_size": 64,
}  # fmt: skip


def kinds(config: dict[str, Any], seq_length: int = 1024) -> list[tuple[str, int]]:
    runs = describe(from_hf_config(config, "x"), seq_length).runs
    return [(run.layer.kind, run.count) for run in runs[1:-1]]


def test_a_layer_of_nemotron_h_has_one_norm_and_one_part() -> None:
    spec = describe(from_hf_config(NANO, "x"), 1024)
    for kind, first in (("mamba2_decoder", "mixer.in_proj"), ("attention_decoder", "self_attention"), ("experts_decoder", "mlp.router")):
        layer = spec.kind(kind)
        assert [weight.shape for weight in layer.weights if weight.name.endswith("layernorm.weight")] == [(2688,)]
        assert next(op.name for op in layer.ops if isinstance(op, Gemm)).startswith(first)
    assert sum(count for kind, count in kinds(NANO) if kind == "attention_decoder") == 6


def test_a_pattern_and_transformers_own_list_say_the_same() -> None:
    words = {"M": "linear_attention", "*": "full_attention", "E": "moe", "-": "mlp"}
    listed = [words[letter] for letter in NANO["hybrid_override_pattern"]]
    other = {key: value for key, value in NANO.items() if key != "hybrid_override_pattern"} | {"layers_block_type": listed}
    assert from_hf_config(other, "x") == from_hf_config(NANO, "x")


def test_maverick_has_experts_in_every_second_layer_and_no_positions_in_every_fourth() -> None:
    layers = list(from_hf_config(MAVERICK, "x").each_layer())
    assert [isinstance(layer.feed_forward, Experts) for layer in layers[:4]] == [False, True, False, True]
    assert [getattr(layer.mixer, "rotary", None) for layer in layers] == [True, True, True, False] * 12
    assert {getattr(layer.mixer, "chunk", None) for layer in layers[3::4]} == {None}


def test_a_multimodal_llama_4_is_planned_by_its_text() -> None:
    whole = {"model_type": "llama4", "text_config": SCOUT, "vision_config": {"hidden_size": 1408}}
    assert from_hf_config(whole, "x") == from_hf_config(SCOUT, "x")


def test_attention_in_chunks_computes_pairs_within_a_chunk() -> None:
    """Of 16,384 tokens in chunks of 8,192 causal attention sees a quarter of all pairs, full attention a half."""
    spec = describe(from_hf_config(SCOUT, "x"), 16384)
    visible = {run.layer.kind: op.visible for run in spec.runs for op in run.layer.ops if isinstance(op, Attention)}
    assert visible == {"chunk8192_experts_decoder": 0.25, "experts_decoder": 0.5}


def test_transformers_llama_4_computes_every_expert_on_every_token() -> None:
    """Sixteen experts of which a token visits one: the experts' products are 16 times as large, all others stay."""
    spec = describe(from_hf_config(SCOUT, "x"), 1024)
    chosen, computed = (found.kind("experts_decoder") for found in (spec, hugging_face(spec)))
    experts = 2 * 1024 * 3 * 5120 * 8192
    assert forward_flops(computed) - forward_flops(chosen) == 15 * experts


def test_an_architecture_of_one_part_layers_is_written_and_read_without_loss() -> None:
    a = from_hf_config(NANO, "x")
    assert msgspec.json.decode(msgspec.json.encode(a), type=Architecture) == a


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (NANO | {"hybrid_override_pattern": "MEX"}, "hybrid_override_pattern=X: is no kind of layer; choose one of M, *, -, E"),
        (NANO | {"hybrid_override_pattern": "MEM"}, "num_hidden_layers=52: is not the 3 layers of hybrid_override_pattern"),
        (NANO | {"moe_latent_size": 512}, "moe_latent_size=512: experts on a latent vector can't be planned"),
        (NANO | {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers=1: prediction layers of several parts"),
        (NANO | {"mlp_hidden_act": "silu"}, "mlp_hidden_act='silu': can't be expressed; choose one of relu2"),
        (TINY | {"num_heads": 4}, "num_heads=4: times head_dim=16 is not expand times hidden_size=64"),
        (TINY | {"n_groups": 3}, "mamba2.num_groups=3: does not divide num_heads=8"),
        (TINY | {"time_step_limit": [0.0, 1.0]}, "time_step_limit=[0.0, 1.0]: published models have [0, Infinity]"),
        ({"model_type": "llama4"}, "text_config: is missing: a multimodal Llama 4 has one"),
        (SCOUT | {"no_rope_layers": [1, 0]}, "no_rope_layers=[1, 0]: must be a list of 48 numbers"),
        (SCOUT | {"layer_types": ["full_attention"] * 48}, "must be chunked where no_rope_layers is 1, and full elsewhere"),
    ],
)
def test_what_can_not_be_expressed_is_refused_by_field(config: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as raised:
        from_hf_config(config, "x")
    assert message in str(raised.value)


@pytest.mark.engines
@pytest.mark.parametrize(("tokens", "sizes"), [(512, {}), (1024, {"num_heads": 4, "head_dim": 32, "state_size": 16, "chunk_size": 32})])
def test_transformers_scan_computes_and_keeps_what_is_said_of_it(tokens: int, sizes: dict[str, int]) -> None:
    """In torch's own operations: FLOPs but for what goes from chunk to chunk, and the convolution's; bytes kept within 2%."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import Mamba2Config, Mamba2ForCausalLM

    config = TINY | sizes
    layer = hugging_face(describe(from_hf_config(config, "x"), tokens)).kind("mamba2_decoder")
    scan = next(op for op in layer.ops if isinstance(op, Scan))
    given = {name: value for name, value in config.items() if name != "model_type"}
    mixer = Mamba2ForCausalLM(Mamba2Config(**given, pad_token_id=None)).to(torch.bfloat16).train().backbone.layers[0].mixer
    held = {parameter.untyped_storage().data_ptr() for parameter in mixer.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if (place := tensor.untyped_storage().data_ptr()) not in held:
            kept.setdefault(place, tensor)
        return tensor

    with FlopCounterMode(display=False) as counter, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        mixer(torch.randn(1, tokens, 64, dtype=torch.bfloat16, requires_grad=True))
    channels, chunks = scan.heads * scan.head_dim, tokens // scan.chunk
    convolution = 2 * (tokens + 3) * 4 * (channels + 2 * from_groups(config))
    linears = sum(2 * op.tokens * op.k * op.n for op in layer.ops if isinstance(op, Gemm))
    passed_on = 2 * (chunks + 1) ** 2 * channels * scan.state
    assert counter.get_total_flops() == linears + convolution + sum(scan.products) + passed_on
    own = sum(saved.elements * (saved.itemsize or 2) for op in layer.ops if isinstance(op, Gemm | Scan) for saved in op.saves)
    assert own == pytest.approx(sum(tensor.untyped_storage().nbytes() for tensor in kept.values()), rel=0.02)


def from_groups(config: dict[str, Any]) -> int:
    return int(config["n_groups"] * config["state_size"])


@pytest.mark.engines
def test_text_and_vision_of_llama_4_are_its_checkpoint() -> None:
    import torch
    from transformers import Llama4Config, Llama4ForConditionalGeneration

    vision = {"hidden_size": 1408, "image_size": 336, "vision_output_dim": 4096, "projector_input_dim": 4096, "projector_output_dim": 4096}
    text = {name: value for name, value in SCOUT.items() if name != "model_type"}
    with torch.device("meta"):
        model = Llama4ForConditionalGeneration(Llama4Config(text_config=text, vision_config=vision))
    assert sum(parameter.numel() for parameter in model.parameters()) == (PUBLISHED["Llama-4-Scout"][1] or 0) + LLAMA4_VISION
