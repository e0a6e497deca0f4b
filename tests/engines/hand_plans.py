"""Plans made by hand: the search is not needed to test a translation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from orchestrator.engines import ENGINES
from orchestrator.engines import transformer_config as in_megatrons_words
from orchestrator.hardware.catalog import GPUS
from orchestrator.hardware.spec import Cluster, Gpu, Level, Software
from orchestrator.model.families import describe
from orchestrator.model.spec import Architecture
from orchestrator.model.training import Training
from orchestrator.plan import Plan
from orchestrator.strategy.megatron_layout import stages_of, transformer_layers
from orchestrator.strategy.spec import RANK_ORDER, Candidate, Mesh, Recompute, Strategy
from orchestrator.strategy.workload import Workload
from orchestrator.units import GB, GIB, US

FIRST = Software(megatron_core="0.16.1")
"""The release of the golden files, and the newest for Python 3.11; what later ones have otherwise is said in a test's own words."""
BARE = Software(megatron_core="0.16.1", transformer_engine=False, flash_attention=False, apex=False)

GPT = Architecture(
    family="gpt",
    name="gpt_small",
    num_layers=8,
    hidden_size=64,
    num_attention_heads=8,
    ffn_hidden_size=256,
    vocab_size=500,
    max_position_embeddings=128,
)
LLAMA = Architecture(
    family="llama",
    name="llama_small",
    num_layers=8,
    hidden_size=64,
    num_attention_heads=8,
    num_query_groups=4,
    ffn_hidden_size=192,
    vocab_size=500,
    max_position_embeddings=128,
    activation="swiglu",
    normalization="RMSNorm",
    position_embedding="rope",
    add_bias_linear=False,
    tie_embeddings=False,
)
BERT = Architecture(
    family="bert",
    name="bert_small",
    num_layers=8,
    hidden_size=64,
    num_attention_heads=8,
    ffn_hidden_size=256,
    vocab_size=500,
    max_position_embeddings=128,
    num_token_types=2,
)
T5 = Architecture(
    family="t5",
    name="t5_small",
    num_layers=4,
    decoder_num_layers=4,
    hidden_size=64,
    num_attention_heads=8,
    kv_channels=16,
    ffn_hidden_size=256,
    vocab_size=500,
    max_position_embeddings=128,
    activation="relu",
    normalization="RMSNorm",
    position_embedding="relative",
    add_bias_linear=False,
)
LLAMA3_8B = replace(
    LLAMA,
    name="llama3_8b",
    num_layers=32,
    hidden_size=4096,
    num_attention_heads=32,
    num_query_groups=8,
    ffn_hidden_size=14336,
    vocab_size=128256,
    max_position_embeddings=8192,
    rotary_base=500000,
)
SMALL = {model.family: model for model in (GPT, LLAMA, BERT, T5)}

CPU = Gpu(
    name="cpu",
    memory=4 * GIB,
    peak_flops={"fp32": 50e9, "bf16": 50e9},
    memory_bandwidth=10 * GB,
    compute_capability="0.0",
    source="a test",
)


def cluster(gpu: str = "H100-SXM-80GB", num_gpus: int = 8, software: Software | None = None) -> Cluster:
    """Nodes of 8, or a CPU machine."""
    device = CPU if gpu == "cpu" else GPUS[gpu]
    return Cluster(
        name=gpu,
        gpu=device,
        num_gpus=num_gpus,
        gpus_per_node=8,
        levels=(
            Level(name="node", size=8, bandwidth=450 * GB, latency=2 * US),
            Level(name="fabric", size=1 << 20, bandwidth=50 * GB, latency=4 * US),
        ),
        host_bandwidth=50 * GB,
        host_memory=128 * GIB,
        software=software or (BARE if gpu == "cpu" else FIRST),
    )


def training_for(model: Architecture, **changes: Any) -> Training:
    """64 samples of 64 tokens."""
    fields: dict[str, Any] = {"global_batch_size": 64, "seq_length": 64, "precision": "bf16"}
    if model.family == "t5":
        fields["decoder_seq_length"] = 32
    return Training(**(fields | changes))


def make_plan(
    engine: str = "megatron",
    model: Architecture = GPT,
    *,
    gpu: str = "H100-SXM-80GB",
    world: int = 8,
    software: Software | None = None,
    training: Training | None = None,
    tp: int = 1,
    pp: int = 1,
    vpp: int = 1,
    cp: int = 1,
    zero_stage: int = 1,
    micro_batch_size: int = 1,
    sizes: Sequence[int] | None = None,
    recompute: Sequence[tuple[Recompute, int]] | None = None,
    **more: Any,
) -> Plan:
    """A plan whose dp and num_microbatches follow. `sizes`: layers of each chunk (vpp-major); None: even."""
    training = training or training_for(model, precision="fp32" if gpu == "cpu" else "bf16")
    spec = describe(model, training.seq_length, training.decoder_seq_length)
    dp = world // (tp * pp * cp)
    sizes = sizes or [transformer_layers(spec) // (pp * vpp)] * (pp * vpp)
    return Plan(
        engine=engine,
        world_size=world,
        tp=tp,
        pp=pp,
        vpp=vpp,
        cp=cp,
        ep=more.pop("ep", 1),
        etp=1,
        dp=dp,
        zero_stage=zero_stage,  # type: ignore[arg-type]
        sequence_parallel=more.pop("sequence_parallel", False),
        micro_batch_size=micro_batch_size,
        num_microbatches=training.global_batch_size // (dp * micro_batch_size),
        global_batch_size=training.global_batch_size,
        schedule="interleaved" if vpp > 1 else "1f1b",
        rank_order=RANK_ORDER,
        stages=stages_of(spec, sizes, pp, recompute),
        model=model,
        training=training,
        cluster=cluster(gpu, world, software),
        **more,
    )


def workload_of(plan: Plan) -> Workload:
    spec = describe(plan.model, plan.training.seq_length, plan.training.decoder_seq_length)
    return Workload(model=spec, training=plan.training, cluster=plan.cluster)


def candidate(engine: str = "megatron", *, micro_batch_size: int = 1, num_microbatches: int = 8, vpp: int = 1, **fields: Any) -> Candidate:
    """A candidate from names of mesh and strategy fields together, and its schedule."""
    schedule = fields.pop("schedule", "interleaved" if vpp > 1 else "1f1b")
    group = fields.pop("microbatch_group_size_per_vp_stage", None)
    mesh = Mesh(**{name: fields.pop(name) for name in ("tp", "cp", "dp", "pp", "ep", "etp", "order") if name in fields})
    return Candidate(
        engine=engine,
        strategy=Strategy(mesh=mesh, **fields),
        micro_batch_size=micro_batch_size,
        num_microbatches=num_microbatches,
        vpp=vpp,
        microbatch_group_size_per_vp_stage=group,
        schedule=schedule,
    )


def engine_fields(plan: Plan) -> dict[str, Any]:
    """engine.json's content of an engine on megatron-core's layers, before a user's own values."""
    return in_megatrons_words.engine_fields(plan, ENGINES[plan.engine].passes["megatron"])
