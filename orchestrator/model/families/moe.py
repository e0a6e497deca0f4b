"""Mixtures of experts as megatron-core builds them: Qwen3's (grouped queries) and DeepSeek-V3's (latent attention, a shared expert, first
layers dense). Described for pricing measured runs; no engine here trains them yet, so they are no entry of `FAMILIES`.

Experts are divided by ep alone (etp = 1), as in NVIDIA's published recipes.
"""

from __future__ import annotations

from orchestrator.model.families import blocks
from orchestrator.model.families.blocks import READ, WRITE, Part
from orchestrator.model.spec import (
    Architecture,
    Attention,
    Dispatch,
    Enter,
    Exit,
    Gemm,
    LayerRun,
    LayerSpec,
    ModelSpec,
    Pointwise,
    Saved,
    Weight,
)

PERMUTED_MOVED = 2 * (READ + WRITE)
"""Bytes per element that go to their experts' order and back (token_dispatcher.py: permute, unpermute)."""


class MoeArchitecture(Architecture, frozen=True, kw_only=True):
    """`num_layers` counts all transformer layers, the `dense_layers` first of which have a plain MLP of `ffn_hidden_size`.

    `kv_lora_rank` above 0: latent attention (arXiv 2405.04434, section 2.1) with `q_lora_rank` and `rope_head_dim`; `kv_channels` is then
    the width of a head without its rotary part, and of its values.
    """

    num_experts: int
    moe_router_topk: int
    moe_ffn_hidden_size: int
    shared_ffn_hidden_size: int = 0
    dense_layers: int = 0
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    rope_head_dim: int = 0


def latent_attention(a: MoeArchitecture, tokens: int) -> Part:
    """Queries, keys and values through low-rank projections (mcore transformer/multi_latent_attention.py); heads are divided by tp."""
    name, h, heads = "self_attention", a.hidden_size, a.num_attention_heads
    width = a.head_dim + a.rope_head_dim
    q, kv = heads * width, heads * 2 * a.head_dim
    down = a.kv_lora_rank + a.rope_head_dim

    def linear(part: str, k: int, n: int, split: str | None) -> tuple[Weight, Gemm]:
        weight = Weight(name=f"{name}.{part}.weight", shape=(n, k), split={"column": 0, "row": 1, None: None}[split])
        saved = Saved(name=f"{name}.{part}.input", elements=tokens * k, shard="sequence" if split != "row" else "tp", group="attention")
        return weight, Gemm(name=f"{name}.{part}", tokens=tokens, k=k, n=n, split=split, saves=(saved,))  # type: ignore[arg-type]

    made = [linear("q_down", h, a.q_lora_rank, None), linear("kv_down", h, down, None)]
    made += [linear("q_up", a.q_lora_rank, q, "column"), linear("kv_up", a.kv_lora_rank, kv, "column")]
    out = linear("linear_proj", heads * a.head_dim, h, "row")
    saves = (
        Saved(name=f"{name}.query", elements=tokens * q, shard="tp", group="attention"),
        Saved(name=f"{name}.key_value", elements=tokens * (q + heads * a.head_dim), shard="tp", group="attention"),
    )
    core = Attention(
        name=f"{name}.core_attention",
        query_len=tokens,
        key_len=tokens,
        heads=heads,
        kv_heads=heads,
        head_dim=(width + a.head_dim) // 2,  # scores over the whole width, values over the plain one
        causal=True,
        saves=saves,
    )
    rotary = Pointwise(name=f"{name}.rotary", elements=tokens * (q + kv), moved=READ + WRITE, shard="tp")
    return Part(
        weights=tuple(weight for weight, _ in (*made, out)),
        ops=(Enter(elements=tokens * h), *(gemm for _, gemm in made), rotary, core, out[1], Exit(elements=tokens * h)),
    )


def experts(a: MoeArchitecture, tokens: int) -> Part:
    """Router, all-to-all, the experts' gated MLPs as grouped products, and the shared expert beside them."""
    h, f, topk = a.hidden_size, a.moe_ffn_hidden_size, a.moe_router_topk
    routed = tokens * topk
    elements = tokens * h
    kept = Saved(name="moe.permuted", elements=routed * h, shard="tp", group="mlp")
    gate_up = Saved(name="moe.gate_up", elements=routed * 2 * f, shard="tp", group="mlp")
    product = Saved(name="moe.product", elements=routed * f, shard="tp", group="mlp")
    weights = (
        Weight(name="mlp.router.weight", shape=(a.num_experts, h)),
        Weight(name="mlp.experts.linear_fc1.weight", shape=(a.num_experts, 2 * f, h), kind="expert"),
        Weight(name="mlp.experts.linear_fc2.weight", shape=(a.num_experts, h, f), kind="expert"),
    )
    ops = (
        Gemm(name="mlp.router", tokens=tokens, k=h, n=a.num_experts),
        Pointwise(name="mlp.permute", elements=routed * h, moved=PERMUTED_MOVED, shard="tp"),
        Dispatch(elements=elements, topk=topk),
        Gemm(name="mlp.experts.linear_fc1", tokens=routed, k=h, n=2 * f, experts=a.num_experts, saves=(kept,)),
        Pointwise(name="mlp.experts.activation", elements=routed * f, moved=2 * READ + WRITE, shard="tp", saves=(gate_up,)),
        Gemm(name="mlp.experts.linear_fc2", tokens=routed, k=f, n=h, experts=a.num_experts, saves=(product,)),
    )
    if not a.shared_ffn_hidden_size:
        return Part(weights, ops)
    s = a.shared_ffn_hidden_size
    shared = (
        Weight(name="mlp.shared.linear_fc1.weight", shape=(2 * s, h), split=0),
        Weight(name="mlp.shared.linear_fc2.weight", shape=(h, s), split=1),
    )
    shared_ops = (
        Gemm(name="mlp.shared.linear_fc1", tokens=tokens, k=h, n=2 * s, split="column"),
        Pointwise(name="mlp.shared.activation", elements=tokens * s, moved=2 * READ + WRITE, shard="tp"),
        Gemm(name="mlp.shared.linear_fc2", tokens=tokens, k=s, n=h, split="row"),
    )
    return Part(weights + shared, (*ops, *shared_ops))


def layer(kind: str, a: MoeArchitecture, tokens: int, *, dense: bool) -> LayerSpec:
    """Pre-norm: attention, then a plain MLP or the experts."""
    elements = tokens * a.hidden_size
    attention = latent_attention(a, tokens) if a.kv_lora_rank else blocks.self_attention(a, tokens, causal=True)
    return blocks.layer(
        kind,
        blocks.norm("input_layernorm", a, tokens),
        attention,
        blocks.residual_add("self_attn_bda", a, tokens),
        blocks.norm("pre_mlp_layernorm", a, tokens),
        blocks.mlp(a, tokens) if dense else experts(a, tokens),
        blocks.residual_add("mlp_bda", a, tokens),
        input_elements=elements,
        output_elements=elements,
    )


def describe(a: MoeArchitecture, seq_length: int) -> ModelSpec:
    """Embedding, dense layers ("dense_decoder"), expert layers ("decoder"), head."""
    runs = [LayerRun(layer=blocks.embedding(a, seq_length), count=1)]
    if a.dense_layers:
        runs.append(LayerRun(layer=layer("dense_decoder", a, seq_length, dense=True), count=a.dense_layers))
    runs.append(LayerRun(layer=layer("decoder", a, seq_length, dense=False), count=a.num_layers - a.dense_layers))
    head = blocks.head(a, seq_length, blocks.norm("final_layernorm", a, seq_length), blocks.vocabulary_head(a, seq_length))
    return ModelSpec(architecture=a, seq_length=seq_length, runs=(*runs, LayerRun(layer=head, count=1)))
