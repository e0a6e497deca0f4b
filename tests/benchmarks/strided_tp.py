"""Where tensor parallelism over the slower network level would win (the paper's tree has it: TP outside of DP in a stage).

    python tests/benchmarks/strided_tp.py

The layer-wise runtime's capabilities, one strategy for all layers, on clusters of two network levels: the best plan where TP takes adjacent
ranks against the best where it may also take those apart. An analytic study; nothing is run.

On 2026-11-20, at adfebc6, 166 cases that have a plan (6 recipes x 4 clusters x 1 or 8 samples a GPU x pp=1 or free x all or half of the
memory; 2 CPU minutes):

* with pp free it never wins: a pipeline over the slow level is cheaper than TP over it in every case;
* with pp=1 it wins in 4: bert_huge_32 by 5.5% and t5_large by 6.5% on 2 x 8 TITAN RTX (12.5 Gbit/s a GPU between the nodes) at 1 sample a
  GPU, where a step is one micro-batch and its gradients outweigh its activations, with all and with half of the memory.

So engine=layerwise, which searches pp, keeps TP on adjacent ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from msgspec.structs import replace

from orchestrator.commands import arguments, command, usage
from orchestrator.cost.calibration import datasheet
from orchestrator.detect import machine
from orchestrator.engines import ENGINES
from orchestrator.engines.rules.mesh import MESH_RULES
from orchestrator.errors import NoPlanError
from orchestrator.model.families import describe
from orchestrator.plan import Plan
from orchestrator.recipe import load
from orchestrator.search.planner import search
from orchestrator.search.question import PlannedEngine, SearchSettings
from orchestrator.strategy.capabilities import Capabilities
from orchestrator.strategy.layerwise import NAME, TRAITS
from orchestrator.strategy.spec import RANK_ORDER
from orchestrator.strategy.workload import Workload

RECIPES = ("llama2_7b", "gpt2_xl", "bert_huge_32", "t5_large", "llama3_8b", "llama2_70b")
CLUSTERS = (("rtx_titan_8", 16), ("dgx_a100_80gb", 16), ("dgx_h100", 32), ("gb200_nvl72", 144))
STRIDED = ("dp", "cp", "ep", "tp", "pp")
SHAPES = tuple(rule for rule in MESH_RULES if rule.id in ("heads_tp", "groups_tp", "ffn_tp"))
"""What a TP degree must divide."""

LAYERWISE = Capabilities(
    engine=NAME,
    parts=None,
    axes=("pp", "tp", "dp"),
    zero_stages=(0, 3),
    zero_stages_with_pipeline=(0, 3),
    sequence_parallel=True,
    recompute=("none", "full"),
    recompute_varies="layer",
    uneven_stages=True,
    schedules=("1f1b",),
    offload_optimizer=False,
    precisions=("bf16", "fp16", "fp32"),
    optimizers=("adamw",),
    rank_orders=(RANK_ORDER,),
    rules=SHAPES,
)
"""What a layer-wise runtime could run."""


def best(words: list[str], pp: int | None, share: float, orders: tuple[tuple[str, ...], ...]) -> Plan:
    """The best plan with `share` of the memory."""
    settings = load(words, machine(), list(ENGINES))
    training = settings.training
    model = describe(settings.architecture, training.seq_length, training.decoder_seq_length)
    engine = replace(LAYERWISE, rank_orders=orders)
    limit = replace(settings.limit, limit=int(settings.limit.limit * share))
    planned = PlannedEngine(capabilities=engine, traits=TRAITS, calibration=datasheet(settings.cluster, TRAITS))
    asked = SearchSettings(pins=replace(settings.pins, pp=pp), limit=limit, top_k=1)
    return search(Workload(model=model, training=training, cluster=settings.cluster), [planned], asked).plan


def seconds(plan: Plan) -> float:
    assert plan.predicted is not None
    return plan.predicted.step_time_s


def main(words: Sequence[str]) -> None:
    arguments(words, ())
    cases = won = 0
    for recipe in RECIPES:
        for cluster, gpus in CLUSTERS:
            for batch in (gpus, 8 * gpus) if recipe != "llama2_70b" else (gpus,):
                words = [f"recipe={recipe}", f"cluster={cluster}", f"gpus={gpus}", f"train.global_batch_size={batch}"]
                words += ["train.precision=fp16", "train.grad_reduce_dtype=fp32"] if cluster == "rtx_titan_8" else []
                for pp, share in ((1, 1.0), (1, 0.5), (None, 1.0), (None, 0.5)):
                    try:
                        near = best(words, pp, share, (RANK_ORDER,))
                        both = best(words, pp, share, (RANK_ORDER, STRIDED))
                    except NoPlanError:
                        continue
                    cases += 1
                    if seconds(near) > seconds(both) * (1 + 1e-9):
                        won += 1
                        gain = seconds(near) / seconds(both) - 1
                        where = f"{recipe} {cluster} x {gpus} batch {batch} pp={pp or 'free'} memory x {share}"
                        print(f"{where}: {gain:.1%}: {both.candidate.label()} instead of {near.candidate.label()}", flush=True)
    print(f"TP over the slower level wins in {won} of {cases} cases")


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:], lambda: usage(__doc__), main))
