"""Plans made by hand, with round numbers that a reader can follow."""

from __future__ import annotations

from msgspec.structs import replace

from orchestrator.hardware.spec import Cluster, Gpu, Level
from orchestrator.model.families import describe
from orchestrator.model.spec import Architecture, ModelSpec
from orchestrator.model.training import Training
from orchestrator.plan import LayerSpan, Plan, Prediction, Stage, StagePrediction
from orchestrator.units import GB, GIB, TFLOPS, US

LLAMA = Architecture(
    family="llama", name="llama3_70b", num_layers=80, hidden_size=8192, num_attention_heads=64, num_query_groups=8, ffn_hidden_size=28672,
    vocab_size=128256, max_position_embeddings=8192, activation="swiglu", normalization="RMSNorm", position_embedding="rope",
    add_bias_linear=False, tie_embeddings=False,
)  # fmt: skip
CLUSTER = Cluster(
    name="dgx_h100",
    gpu=Gpu(name="H100-SXM-80GB", memory=80 * GIB, peak_flops={"bf16": 989 * TFLOPS}, memory_bandwidth=3350 * GB, compute_capability="9.0",
            source="datasheet"),
    num_gpus=64, gpus_per_node=8, host_bandwidth=63 * GB, host_memory=256 * GB,
    levels=(Level(name="nvlink", size=8, bandwidth=450 * GB, latency=2 * US), Level(name="infiniband", size=10**6, bandwidth=50 * GB,
                                                                                    latency=4 * US)),
)  # fmt: skip
TRAINING = Training(global_batch_size=512, seq_length=8192)


def llama() -> ModelSpec:
    return describe(LLAMA, TRAINING.seq_length)


def _stage(index: int) -> Stage:
    span = LayerSpan(kind="decoder", first=20 * index, count=20)
    if index == 0:
        full = LayerSpan(kind="decoder", first=0, count=4, recompute="full")
        rest = LayerSpan(kind="decoder", first=4, count=16)
        return Stage(layers=(LayerSpan(kind="embedding", first=0, count=1), full, rest))
    return Stage(layers=(span, LayerSpan(kind="head", first=0, count=1))) if index == 3 else Stage(layers=(span,))


def _predicted_stage(peak: float) -> StagePrediction:
    causes = {"weights": 8.0, "gradients": 16.0, "optimizer": 12.0, "activations": peak - 38.0, "logits": 1.9, "buffers": 0.1}
    memory = {name: value * GIB for name, value in causes.items()}
    return StagePrediction(forward_s=0.0251, backward_s=0.0502, peak_memory_bytes=peak * GIB, memory_by_cause=memory, peak_phase="backward")


PREDICTED = Prediction(
    step_time_s=12.0, tokens_per_s_per_gpu=5461.3, peak_memory_bytes=70 * GIB, by_stage=tuple(map(_predicted_stage, (70, 60, 60, 58))),
    by_cause={"compute": 9.0, "tp_traffic": 1.5, "bubble": 1.0, "dp_traffic": 0.3, "optimizer": 0.15, "pp_traffic": 0.03, "latency": 0.02},
    model_flops_per_gpu=432.1 * TFLOPS,
)  # fmt: skip
PLAN = Plan(
    engine="megatron", world_size=64, tp=4, pp=4, vpp=1, cp=1, ep=1, etp=1, dp=4, zero_stage=1, sequence_parallel=True,
    micro_batch_size=1, num_microbatches=128, global_batch_size=512, schedule="1f1b", rank_order=("tp", "cp", "ep", "dp", "pp"),
    stages=tuple(_stage(index) for index in range(4)), predicted=PREDICTED, model=LLAMA, training=TRAINING, cluster=CLUSTER,
)  # fmt: skip
SLOWER = replace(
    PLAN, tp=8, dp=2, num_microbatches=256, schedule="1f1b",
    predicted=replace(PREDICTED, step_time_s=13.44, peak_memory_bytes=50 * GIB,
                      by_cause={**PREDICTED.by_cause, "tp_traffic": 3.3, "bubble": 0.64}),
)  # fmt: skip
