"""nanotron, as Hugging Face's playbook of 2025 ran it on 8 to 512 H100."""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from orchestrator.cost import schedule
from orchestrator.cost.calibration import Calibration
from orchestrator.cost.price import CostModel
from orchestrator.hardware.spec import Cluster
from orchestrator.model.architecture import Architecture
from orchestrator.strategy.capabilities import StateBytes, Traits
from orchestrator.strategy.layout import Prediction, Stage
from orchestrator.strategy.spec import Candidate
from tests.validation.engines.engine import EAGER, FP32_STATES, HOPPERS_FLASH_2, MeasuredEngine, Split, all_stages, with_separate_gate

STATES: Final = StateBytes(weight=2, gradient=4, master=4, moments=8, backward=2)
"""Bytes per parameter with accumulate_grad_in_fp32: bf16 weights, a whole fp32 gradient buffer at every ZeRO stage, fp32 master and Adam
(optim/gradient_accumulator.py); ZeRO-1 shards master and moments. In backward the bf16 gradients as well."""
LOGITS: Final = 9.0
"""Bytes per logit of nanotron's loss: bf16 logits 2, fp32 copy 4, fp32 softmax kept for backward 4 (parallel/tensor_parallel/functional.py)
are 10; its peaks with pp=1 ask for 8 to 9.5 beside `allocator_slack`."""
HOST: Final = {"layer_floor_s": 4e-3}
"""A layer's forward and backward are never faster than its Python."""

PIPELINE_LAYER_FLOOR_S: Final = 2.45e-3
"""Seconds that come to `layer_floor_s` for every tensor-parallel rank, where the stages of a pipeline lie on different nodes and tp > 1:
fitted to 296 runs."""
STALL_S: Final = 0.5
"""Seconds for which a micro-batch's transfers over one stage border block a stage where they stall: about half a second, in whole sweeps
on EFA. An engine's trait: nothing of the network explains it."""
WIDE_DOMAINS: Final = 2
"""Nodes beyond which tensor parallelism stalls the pipeline's transfers (all such runs)."""
MANY_MICROBATCHES: Final = 8
"""Micro-batches beyond which those of a pipeline that leaves a node stall where the optimizer isn't sharded (30 of 37 runs; 1 of 15 with
fewer; of all others 41 of 353)."""


def leaves_node(candidate: Candidate, cluster: Cluster) -> bool:
    """Whether the pipeline does."""
    mesh = candidate.mesh
    return mesh.pp > 1 and mesh.stride("pp") * mesh.pp > cluster.levels[0].size


def constants_in(candidate: Candidate, cluster: Cluster, constants: Calibration) -> Calibration:
    """The floor and the stall of a pipeline between nodes, which a stage meets at each of its borders."""
    mesh, domain = candidate.mesh, cluster.levels[0].size
    if mesh.pp == 1:
        return constants
    leaves = leaves_node(candidate, cluster)
    floor = constants.layer_floor_s + (PIPELINE_LAYER_FLOOR_S * mesh.tp if leaves and mesh.tp > 1 else 0.0)
    whole = candidate.strategy.zero_stage == 0 and mesh.dp > 1 and candidate.num_microbatches > MANY_MICROBATCHES
    stalls = mesh.tp > WIDE_DOMAINS * domain or (whole and leaves)
    blocked = STALL_S * min(2, mesh.pp - 1) if stalls else 0.0
    return replace(constants, layer_floor_s=floor, microbatch_overhead_s=constants.microbatch_overhead_s + blocked)


GATHERED_TOKEN_BYTES: Final = 12800.0
"""Bytes per token and layer of gathered inputs that stay allocated until their backward, on every tensor-parallel rank: its asynchronous
gathers are not made again. 153 published peaks with pp=1 and tp > 1, the same from 1B to 80B."""
RELEASED: Final = 0.7
"""Share of those that the allocator can give back where memory ends: runs with more need than that crashed."""
YOUNGEST_GIVEN_BACK: Final = 1.8
"""Micro-batches in flight, the youngest, whose gathered inputs are given back between the borders of a pipeline over nodes, where the
device waits for the host: measured 0.1 of all are left at pp=2, 0.55 at 4, 0.9 at 16."""
WIDE_SHARE: Final = 0.1
"""Share of those gathered inputs that is left where tensor parallelism spans more than two nodes."""


class KeptGathers(CostModel):
    """The core's prices, with gathered inputs in the peaks."""

    def price(self, candidate: Candidate, stages: tuple[Stage, ...]) -> Prediction:
        plain = super().price(candidate, stages)
        by_stage = []
        for index, (stage, found) in enumerate(zip(stages, plain.by_stage, strict=True)):
            kept = self._kept_bytes(candidate, stage, index)
            firm = (1 - RELEASED) * kept
            held = firm + min(kept - firm, max(0.0, self.cluster.gpu.memory - found.peak_memory_bytes - firm))
            causes = {**found.memory_by_cause, "gathered": held}
            by_stage.append(replace(found, peak_memory_bytes=found.peak_memory_bytes + held, memory_by_cause=causes))
        return replace(plain, by_stage=tuple(by_stage), peak_memory_bytes=max(stage.peak_memory_bytes for stage in by_stage))

    def _kept_bytes(self, candidate: Candidate, stage: Stage, index: int) -> float:
        strategy, mesh, domain = candidate.strategy, candidate.mesh, self.cluster.levels[0].size
        if not strategy.sequence_parallel or mesh.tp == 1:
            return 0.0
        layers = sum(span.count for span in stage.layers if self.kinds[span.kind].recomputable and span.recompute != "full")
        flights = schedule.in_flight(candidate.schedule, mesh.pp, index, candidate.num_microbatches, candidate.vpp)
        share = 1.0
        if leaves_node(candidate, self.cluster):
            share = WIDE_SHARE if mesh.tp > WIDE_DOMAINS * domain else max(0.0, 1 - YOUNGEST_GIVEN_BACK / mesh.pp)
        tokens = self.training.seq_length * candidate.micro_batch_size / mesh.cp
        return share * GATHERED_TOKEN_BYTES * tokens * layers * flights


SHARE_MET: Final = 0.995
"""Share of what a stage should cost at which that is met. The times of the 8B with pp=16 and 32 are those of a head that is alone on its
stage, where the layers before it cost 0.998 of the shares up to there."""


def split(architecture: Architecture, num_layers: int, stages: int) -> Split:
    """The split of the layers over the stages by the parameters of a layer and of the head (models/llama.py, get_block_compute_costs)."""
    hidden, width = architecture.hidden_size, architecture.num_attention_heads * architecture.head_dim
    layer = 4.0 * width * hidden + 3.0 * architecture.ffn_hidden_size * hidden
    return split_by_cost(num_layers, layer, float(architecture.vocab_size * hidden), stages)


def split_by_cost(num_layers: int, layer_cost: float, head_cost: float, stages: int) -> Split:
    """The split that nanotron makes, which builds block after block; the block that brings the running cost to a stage's share still goes
    to that stage (nanotron/models/base.py, build_model). Only decoder layers and the head have a cost; the embedding comes first, final
    norm and head after the layers, then the cast to fp32 and the loss. A stage without any block can't be built. A share that is met
    (`SHARE_MET`) ends the stage: the 1B's head costs as much as four layers, and its peaks and times with pp=4 are those of five layers on
    the first stage.

    >>> split_by_cost(16, 671, 2684, 2), split_by_cost(16, 671, 2684, 4)
    (((10, 6), 1, True), ((5, 5, 5, 1), 3, True))
    >>> split_by_cost(16, 671, 2684, 16)[1:]
    (12, False)
    """
    blocks = [("embedding", 0.0), *[("layer", layer_cost)] * num_layers, ("norm", 0.0), ("head", head_cost), ("cast", 0.0), ("loss", 0.0)]
    total = num_layers * layer_cost + head_cost
    counts, held = [0] * stages, [0] * stages
    stage, head, running = 0, 0, 0.0
    for kind, cost in blocks:
        held[stage] += 1
        counts[stage] += kind == "layer"
        if kind == "head":
            head = stage
        running += cost
        if stage < stages - 1 and running >= SHARE_MET * total * (stage + 1) / stages:
            stage += 1
    return tuple(counts), head, all(held)


NANOTRON: Final = MeasuredEngine(
    traits=Traits(
        engine="nanotron",
        constants=EAGER | HOST | HOPPERS_FLASH_2,  # flash_attn_varlen_func (models/llama.py, CoreAttention)
        states=all_stages(STATES, FP32_STATES),
        gradient_bytes_on_wire="grad_accum_dtype",
        reduce_scatter_from_stage=1,
        overlaps_param_gather=False,
        logits_bytes=LOGITS,
        fp32_gradient_fusion=False,
    ),
    printed=("nanotron",),
    memory_of="first",
    layers=with_separate_gate,
    split=split,
    constants_in=constants_in,
    cost=KeptGathers,
)
