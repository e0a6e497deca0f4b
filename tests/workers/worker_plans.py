"""Plans of small models, made by hand: what the worker tests train."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from orchestrator.detect import machine
from orchestrator.hardware.spec import Cluster, Gpu, Level, Software
from orchestrator.model.architecture import Run
from orchestrator.model.parts.attention import GroupedQueryAttention
from orchestrator.model.parts.experts import Experts
from orchestrator.model.parts.latent_attention import LatentAttention
from orchestrator.model.spec import Architecture
from orchestrator.model.training import Training
from orchestrator.plan import LayerSpan, Plan, RunSettings, Stage
from orchestrator.strategy.spec import ENGINE_OPTIONS, RANK_ORDER

if TYPE_CHECKING:
    from orchestrator.workers.samples import Samples

CPU = Cluster(
    name="cpu",
    gpu=Gpu(name="cpu", memory=4 * 2**30, peak_flops={"fp32": 5e10}, memory_bandwidth=3e9, compute_capability="0.0", source="test"),
    num_gpus=8,
    gpus_per_node=8,
    levels=(Level(name="loopback", size=8, bandwidth=1e9, latency=2e-4),),
    host_bandwidth=3e9,
    host_memory=2**32,
    software=Software(
        megatron_core=machine({}).megatron_core or Software().megatron_core, transformer_engine=False, flash_attention=False, apex=False
    ),
)

GPT = Architecture(
    family="gpt",
    name="gpt_test",
    num_layers=4,
    hidden_size=32,
    num_attention_heads=4,
    ffn_hidden_size=64,
    vocab_size=260,
    max_position_embeddings=32,
)
LLAMA = Architecture(
    family="llama",
    name="llama_test",
    num_layers=4,
    hidden_size=32,
    num_attention_heads=4,
    num_query_groups=2,
    ffn_hidden_size=48,
    vocab_size=260,
    max_position_embeddings=32,
    activation="swiglu",
    normalization="RMSNorm",
    position_embedding="rope",
    add_bias_linear=False,
    tie_embeddings=False,
)
QWEN3 = replace(LLAMA, family="qwen3", name="qwen3_test", kv_channels=12, mixer=GroupedQueryAttention(qk_norm="head"))
MIXTRAL = replace(LLAMA, family="mixtral", name="mixtral_test", feed_forward=Experts(num_experts=4, topk=2, ffn_hidden_size=40))
QWEN3_MOE = replace(
    QWEN3,
    family="qwen3_moe",
    name="qwen3_moe_test",
    mixer=GroupedQueryAttention(qk_norm="head"),
    feed_forward=Experts(num_experts=8, topk=3, ffn_hidden_size=24, normalized=True),
)
DEEPSEEK_LIKE = replace(
    LLAMA,
    family="deepseek",
    name="deepseek_like_test",
    pattern=(
        Run(layers=1),
        Run(
            layers=3,
            feed_forward=Experts(
                num_experts=8, topk=4, ffn_hidden_size=24, shared_ffn_hidden_size=40, score="sigmoid", scaling=2.5, groups=4, group_topk=2,
                expert_bias=True, bias_update_rate=0.01, aux_loss_coeff=0.01,
            ),
        ),
    ),
)  # fmt: skip
LATENT = LatentAttention(q_lora_rank=16, kv_lora_rank=8, qk_head_dim=10, qk_rope_head_dim=4, v_head_dim=6)
DEEPSEEK = replace(DEEPSEEK_LIKE, name="deepseek_test", mixer=LATENT)
PREDICTING = replace(DEEPSEEK, name="predicting_test", mtp_num_layers=1)
PREDICTING_TWICE = replace(LLAMA, name="predicting_twice_test", mtp_num_layers=2)
LATENT_DENSE = replace(LLAMA, name="latent_test", num_query_groups=None, mixer=replace(LATENT, q_lora_rank=None))
WINDOWED = replace(
    LLAMA,
    name="windowed_test",
    activation="clamped_swiglu",
    pattern=(Run(layers=1, mixer=GroupedQueryAttention(window=5, sinks=True)), Run(layers=1, mixer=GroupedQueryAttention(sinks=True))),
)
GPT_OSS_LIKE = replace(
    WINDOWED,
    name="gpt_oss_like_test",
    add_bias_linear=True,
    feed_forward=Experts(num_experts=4, topk=2, ffn_hidden_size=24, router_bias=True),
)
BERT = Architecture(
    family="bert",
    name="bert_test",
    num_layers=4,
    hidden_size=32,
    num_attention_heads=4,
    ffn_hidden_size=64,
    vocab_size=260,
    max_position_embeddings=32,
    num_token_types=2,
)
T5 = Architecture(
    family="t5",
    name="t5_test",
    num_layers=2,
    decoder_num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    ffn_hidden_size=64,
    vocab_size=384,
    max_position_embeddings=32,
)
MODELS = {model.family: model for model in (GPT, LLAMA, BERT, T5, QWEN3)}
EXPERT_MODELS = {
    model.name: model
    for model in (MIXTRAL, QWEN3_MOE, DEEPSEEK_LIKE, DEEPSEEK, LATENT_DENSE, PREDICTING, PREDICTING_TWICE, WINDOWED, GPT_OSS_LIKE)
}


def spans(model: Architecture, split: list[list[int]], recompute: list[Any]) -> tuple[Stage, ...]:
    """Stages from layers by [stage][chunk], embedding first and head last. `recompute` by stage: a mode, or how many layers at the front of
    each chunk are recomputed in full."""
    pp, vpp = len(split), len(split[0])
    if model.family == "t5":
        layers = [
            LayerSpan(kind="encoder", first=0, count=model.num_layers, recompute=recompute[0]),
            LayerSpan(kind="decoder", first=0, count=model.decoder_num_layers, recompute=recompute[0]),
        ]
        return (Stage(layers=(LayerSpan(kind="embedding", first=0, count=1), *layers, LayerSpan(kind="head", first=0, count=1))),)
    kind = "encoder" if model.family == "bert" else "decoder"
    found: list[list[LayerSpan]] = [[] for _ in range(pp)]
    at = 0
    for chunk in range(vpp):
        for stage in range(pp):
            if stage == chunk == 0:
                found[stage].append(LayerSpan(kind="embedding", first=0, count=1, chunk=chunk))
            count, mode = split[stage][chunk], recompute[stage]
            front = min(mode, count) if isinstance(mode, int) else 0
            if front:
                found[stage].append(LayerSpan(kind=kind, first=at, count=front, recompute="full", chunk=chunk))
            if count > front:
                rest = "none" if isinstance(mode, int) else mode
                found[stage].append(LayerSpan(kind=kind, first=at + front, count=count - front, recompute=rest, chunk=chunk))
            at += count
            if stage == pp - 1 and chunk == vpp - 1:
                found[stage].append(LayerSpan(kind="head", first=0, count=1, chunk=chunk))
    return tuple(Stage(layers=tuple(layers)) for layers in found)


def make_plan(
    model: Architecture = GPT,
    engine: str = "megatron",
    *,
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    cp: int = 1,
    cp_comm_type: Any = "p2p",
    vpp: int = 1,
    ep: int = 1,
    etp: int = 1,
    zero_stage: Any = 0,
    sequence_parallel: bool = False,
    micro_batch_size: int | None = None,
    split: list[list[int]] | None = None,
    recompute: list[Any] | None = None,
    offload_optimizer: bool = False,
    zero_shard_size: int | None = None,
    microbatch_group_size_per_vp_stage: int | None = None,
    rank_order: tuple[str, ...] = RANK_ORDER,
    run: RunSettings | None = None,
    pipeline_schedule: Any = None,
    **more: Any,
) -> Plan:
    """A plan of one of these models; `split`: layers by [stage][chunk]; more keywords: options of the engine, and fields of Training.
    Unless `micro_batch_size` is given, a rank has two micro-batches in a step, so that gradients are summed over some, and a pipeline
    four."""
    options = {name: more.pop(name) for name in (*ENGINE_OPTIONS, "moe_token_dispatcher_type", "moe_shared_expert_overlap") if name in more}
    settings: dict[str, Any] = {
        "global_batch_size": 8,
        "seq_length": 32,
        "decoder_seq_length": 16 if model.family == "t5" else None,
        "precision": "fp32",
        "lr": 1e-2,
        "warmup": 2,
        "steps": 4,
        "clip": 1.0,
        "seed": 7,
    }
    train = Training(**(settings | more))
    if micro_batch_size is None:
        size, rest = divmod(train.global_batch_size, dp * (2 if pp == 1 else 4))
        micro_batch_size = size if size and not rest else 1
    split = split or [[model.num_layers // (pp * vpp)] * vpp for _ in range(pp)]
    return Plan(
        engine=engine,
        world_size=tp * pp * cp * dp,
        tp=tp,
        pp=pp,
        vpp=vpp,
        microbatch_group_size_per_vp_stage=microbatch_group_size_per_vp_stage,
        cp=cp,
        cp_comm_type=cp_comm_type,
        ep=ep,
        etp=etp,
        dp=dp,
        zero_stage=zero_stage,
        sequence_parallel=sequence_parallel,
        offload_optimizer=offload_optimizer,
        zero_shard_size=zero_shard_size,
        micro_batch_size=micro_batch_size,
        num_microbatches=train.global_batch_size // (dp * micro_batch_size),
        global_batch_size=train.global_batch_size,
        schedule=pipeline_schedule or ("interleaved" if vpp > 1 else "1f1b"),
        rank_order=rank_order,
        **options,
        stages=spans(model, split, recompute or ["none"] * pp),
        model=model,
        training=train,
        cluster=CPU,
        run=run or RunSettings(),
    )


def samples_of(plan: Plan, cache: str | Path) -> Samples:
    """What a run trains on, opened by a process that is alone."""
    from orchestrator.workers import data
    from orchestrator.workers.samples import TextSamples

    corpus = data.open_corpus(plan, Path(cache), build=True, wait=lambda: None)
    return TextSamples(plan, corpus.train, corpus.specials)
