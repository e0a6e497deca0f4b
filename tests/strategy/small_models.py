"""Small models built by hand for the search's tests: the families room is not needed to judge a search."""

from __future__ import annotations

from orchestrator.hardware.spec import Cluster, Gpu, Level
from orchestrator.model.spec import (
    Architecture,
    Attention,
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
from orchestrator.model.training import Training
from orchestrator.units import GB, GIB, TFLOPS, US


def block(kind: str, hidden: int, heads: int, seq: int) -> LayerSpec:
    """A pre-norm transformer layer without biases and dropout."""
    tokens = seq * hidden
    return LayerSpec(
        kind=kind,
        weights=(
            Weight(name="norm", shape=(2 * hidden,), kind="norm"),
            Weight(name="qkv", shape=(3 * hidden, hidden), split=0),
            Weight(name="proj", shape=(hidden, hidden), split=1),
            Weight(name="fc1", shape=(4 * hidden, hidden), split=0),
            Weight(name="fc2", shape=(hidden, 4 * hidden), split=1),
        ),
        ops=(
            Pointwise(name="norm1", elements=tokens, moved=4, saves=(Saved(name="x", elements=tokens, group="norm"),)),
            Enter(elements=tokens),
            Gemm(name="qkv", tokens=seq, k=hidden, n=3 * hidden, split="column", saves=(Saved(name="qkv_in", elements=tokens),)),
            Attention(
                name="core_attention",
                query_len=seq,
                key_len=seq,
                heads=heads,
                kv_heads=heads,
                head_dim=hidden // heads,
                causal=True,
                saves=(
                    Saved(name="qkv", elements=3 * tokens, shard="tp", group="core_attention"),
                    Saved(name="scores", elements=heads * seq * seq, shard="tp", group="core_attention", quadratic=True),
                ),
            ),
            Gemm(name="proj", tokens=seq, k=hidden, n=hidden, split="row", saves=(Saved(name="ctx", elements=tokens, shard="tp"),)),
            Exit(elements=tokens),
            Enter(elements=tokens),
            Gemm(name="fc1", tokens=seq, k=hidden, n=4 * hidden, split="column", saves=(Saved(name="fc1_in", elements=tokens),)),
            Pointwise(
                name="gelu",
                elements=4 * tokens,
                moved=4,
                shard="tp",
                saves=(Saved(name="gelu_in", elements=4 * tokens, shard="tp", group="mlp"),),
            ),
            Gemm(name="fc2", tokens=seq, k=4 * hidden, n=hidden, split="row", saves=(Saved(name="fc2", elements=4 * tokens, shard="tp"),)),
            Exit(elements=tokens),
        ),
        input_elements=tokens,
        output_elements=tokens,
    )


def gpt(layers: int, hidden: int = 64, heads: int = 4, seq: int = 32, vocab: int = 512) -> ModelSpec:
    """Embedding, `layers` decoder layers, head."""
    tokens = seq * hidden
    architecture = Architecture(
        family="gpt",
        name=f"gpt_{layers}x{hidden}",
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        ffn_hidden_size=4 * hidden,
        vocab_size=vocab,
        max_position_embeddings=seq,
    )
    embedding = LayerSpec(
        kind="embedding",
        weights=(Weight(name="word_embeddings", shape=(vocab, hidden), split=0, kind="embedding", pad_to=128),),
        ops=(Pointwise(name="lookup", elements=tokens, moved=4),),
        input_elements=seq,
        output_elements=tokens,
        recomputable=False,
    )
    head = LayerSpec(
        kind="head",
        weights=(
            Weight(name="norm", shape=(hidden,), kind="norm"),
            Weight(name="output", shape=(vocab, hidden), split=0, kind="embedding", pad_to=128, tied=True),
        ),
        ops=(Gemm(name="logits", tokens=seq, k=hidden, n=vocab, split="column", pad_to=128, saves=(Saved(name="h", elements=tokens),)),),
        input_elements=tokens,
        output_elements=1,
        recomputable=False,
    )
    runs = (
        LayerRun(layer=embedding, count=1),
        LayerRun(layer=block("decoder", hidden, heads, seq), count=layers),
        LayerRun(layer=head, count=1),
    )
    return ModelSpec(architecture=architecture, seq_length=seq, runs=runs)


def training(global_batch_size: int = 16, seq: int = 32) -> Training:
    return Training(global_batch_size=global_batch_size, seq_length=seq)


def cluster(num_gpus: int, gpus_per_node: int = 8, memory: int = 80 * GIB, bandwidth: float = 300 * GB) -> Cluster:
    """A100-like nodes on InfiniBand."""
    gpu = Gpu(
        name="test",
        memory=memory,
        peak_flops={"bf16": 312 * TFLOPS, "fp16": 312 * TFLOPS, "fp32": 19.5 * TFLOPS},
        memory_bandwidth=2000 * GB,
        compute_capability="8.0",
        source="invented for tests",
    )
    levels = (
        Level(name="nvlink", size=gpus_per_node, bandwidth=bandwidth, latency=5 * US),
        Level(name="infiniband", size=1 << 20, bandwidth=25 * GB, latency=10 * US),
    )
    return Cluster(
        name="test",
        gpu=gpu,
        num_gpus=num_gpus,
        gpus_per_node=gpus_per_node,
        levels=levels,
        host_bandwidth=25 * GB,
        host_memory=128 * GIB,
    )
