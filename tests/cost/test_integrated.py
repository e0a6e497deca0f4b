"""The claim of "Integrated Model, Batch and Domain Parallelism in Training Neural Networks" (Gholami et al., arXiv 1712.04432): for a
fixed batch the cheapest grid of P processors is often neither pure model nor pure batch parallelism."""

from __future__ import annotations

import pytest
from cost_cases import MEGATRON

from orchestrator.cost.calibration import datasheet
from orchestrator.cost.price import CostModel
from orchestrator.hardware.catalog import GPUS
from orchestrator.hardware.spec import Cluster, Level
from orchestrator.model.families import describe
from orchestrator.model.spec import Architecture
from orchestrator.model.training import Training
from orchestrator.strategy.layout import LayerSpan, Stage
from orchestrator.strategy.spec import Candidate, Mesh, Strategy
from orchestrator.strategy.workload import Workload
from orchestrator.units import GB, GIB, US

BATCH = 32
MODEL = Architecture(
    family="gpt",
    name="gpt2_xl with 32 heads",
    num_layers=48,
    hidden_size=1600,
    num_attention_heads=32,
    ffn_hidden_size=6400,
    vocab_size=50257,
    max_position_embeddings=1024,
)
STAGES = (
    Stage(
        layers=(
            LayerSpan(kind="embedding", first=0, count=1),
            LayerSpan(kind="decoder", first=0, count=48),
            LayerSpan(kind="head", first=0, count=1),
        )
    ),
)


def grids(processors: int) -> dict[int, float]:
    """Predicted seconds of a step by model-parallel size; batch parallelism takes the rest, up to one sample each."""
    cluster = Cluster(
        name="a100",
        gpu=GPUS["A100-SXM-80GB"],
        num_gpus=processors,
        gpus_per_node=8,
        levels=(
            Level(name="nvlink", size=8, bandwidth=300 * GB, latency=1.9 * US),
            Level(name="ib", size=1024, bandwidth=25 * GB, latency=4 * US),
        ),
        host_bandwidth=25 * GB,
        host_memory=128 * GIB,
    )
    training = Training(global_batch_size=BATCH, seq_length=1024)
    traits = MEGATRON
    model = CostModel(Workload(model=describe(MODEL, 1024), training=training, cluster=cluster), traits, datasheet(cluster, traits))
    found = {}
    for tp in (1, 2, 4, 8, 16, 32):
        dp = processors // tp
        if tp > processors or dp > BATCH:
            continue
        strategy = Strategy(mesh=Mesh(tp=tp, dp=dp), sequence_parallel=tp > 1)
        candidate = Candidate(engine="megatron", strategy=strategy, micro_batch_size=BATCH // dp, num_microbatches=1)
        found[tp] = model.score(candidate, STAGES)[0]
    return found


CHEAPEST = {2: 1, 4: 1, 8: 1, 16: 2, 32: 4, 64: 4, 128: 16, 256: 16}
"""P: the cheapest model-parallel size. Predicted milliseconds of a step, columns model-parallel 1 to 32, batch 32:

      P     1     2     4     8    16    32
      2   911  1004
      4   488   523   629
      8   277   283   330   447
     16   185   170   188   244   507
     32   164   147   141   146   279   505
     64     -   139   131   133   166   293
    128     -     -   131   131   109   187
    256     -     -     -   134    96   134
"""


@pytest.mark.parametrize(("processors", "model_parallel"), CHEAPEST.items())
def test_the_cheapest_grid_of_a_fixed_batch(processors: int, model_parallel: int) -> None:
    seconds = grids(processors)
    assert min(seconds, key=lambda tp: seconds[tp]) == model_parallel


def test_neither_pure_model_nor_pure_batch_parallelism_is_cheapest_in_most_rows() -> None:
    cheapest = {processors: min(seconds := grids(processors), key=seconds.__getitem__) for processors in CHEAPEST}
    mixed = [1 < model_parallel < processors for processors, model_parallel in cheapest.items()]
    assert sum(mixed) > len(mixed) / 2
