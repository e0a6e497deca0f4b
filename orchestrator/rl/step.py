"""One step as phases on GPUs: what each takes, what it waits for, and when it runs, for one placement of generation and training."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Mapping, Sequence
from heapq import heapreplace
from math import ceil
from statistics import fmean
from typing import Final, Literal

from msgspec.structs import replace

from orchestrator.cost.calibration import Calibration
from orchestrator.hardware.spec import Cluster
from orchestrator.model.training import Lengths, Training
from orchestrator.plan import Plan
from orchestrator.rl.generation import Generation, dealt
from orchestrator.rl.job import BY_A_REFERENCE, RlJob, RlKeys
from orchestrator.rl.lengths import drawn, squares
from orchestrator.rl.programs import PROGRAMS
from orchestrator.units import GB
from orchestrator.values import Value

Pool = Literal["all", "generation", "training"]
Model = Literal["policy", "reference", "critic", "reward", "teacher"]
Plans = Mapping[Model, Plan]
"""The policy's plan, and those of models that are not of its size."""

REFIT_RATE: Final = 21 * GB
REFIT_S: Final = 2.5
"""Bytes/s at which the whole model passes each GPU that trains and generates, tensor by tensor gathered, renamed and loaded, and seconds
beside. Fitted: to verl's under Megatron, 3 s of a 7B, 4.5 to 8.5 of Qwen3-30B-A3B, 6.2 of a 32B and 25 of Qwen3-235B (`reshard` in
github:ISEEKYAN/verl_megatron_practice); NeMo RL 0.3 has 5 s for Llama 3.1 8B and 14 for 70B (issue 959)."""
STATES: Final = ("weights", "gradients", "optimizer")
"""Causes of a training plan's memory that go to the host's memory while others use the GPU."""
PCIE_6: Final = 128 * GB
"""Bytes/s of the fastest PCIe link; a faster one is NVLink-C2C, by which a GPU reads memory that is not pinned too."""
KEPT: Final = ("weights", "optimizer")
"""Causes of those states that are copied: gradients are allocated anew."""
WEIGHTS: Final = ("weights",)
GENERATED, FORWARDED, UPDATED = 32, 48, 60
"""Bytes of a padded token that pass the driver: ids of prompts, responses and both, mask and positions as int64; with the response's mask,
and its log-probabilities and entropies back; with those, scores, rewards, advantages and returns, in fp32 (verl 0.5, protocol.py)."""
UPDATED_MODELS: Final[dict[str, Model]] = {"update critic": "critic", "update": "policy"}
"""Passes that train, after all that go forward alone, each of its model."""
ONCE: Final = ("optimizer", "dp", "overhead")
"""Causes of a training step's seconds that hardly depend on its tokens."""
GENERATION_OFF: Final = (0.81, 1.21)
PASSES_OFF: Final = (0.69, 1.28)
"""The ends of the 90% interval of measured seconds over predicted ones, of generation and of passes: quantiles (cost/uncertainty.py, TAIL)
of 16 and 55 published phases that nothing was fitted to, each of their sources with the same weight (tests/rl/test_verl_phases.py)."""
TRANSFER_OFF: Final = (0.4, 2.4)
"""The ends of measured over predicted seconds of weights that are moved: verl's under FSDP, and NeMo RL 0.3's run again (issue 959)."""
LOGIT_BYTES: Final = 4
"""Bytes of a rank's logit more than in a pretraining's loss: log-probabilities and entropy have an fp32 copy of their own (verl,
utils/megatron/tensor_parallel.py, vocab_parallel_entropy, where github:verl-project/verl issue 5840 runs out of memory)."""
PACKED: Final = 8192
"""Samples that are packed one by one."""
ROUNDED: Final = 64
"""Sequences are a multiple of so many tokens, as kernels like them."""


class Phase(Value, frozen=True, kw_only=True):
    """A part of a step: of which model, over how many tokens, on which GPUs, after which others, and when."""

    name: str
    model: Model
    tokens: float
    pool: Pool
    gpus: int
    after: tuple[str, ...]
    seconds: float
    off: tuple[float, float] = (1.0, 1.0)
    """The ends of the 90% interval of its seconds, over them."""
    starts_s: float = 0.0
    """Seconds from the step's beginning, of phases that wait for none from when their GPUs are free."""

    @property
    def ends_s(self) -> float:
        return self.starts_s + self.seconds


class Step(Value, frozen=True, kw_only=True):
    """A step of training under one placement. `colocated`: all phases on all GPUs; else generation has GPUs of its own, and takes weights
    `staleness` steps old."""

    colocated: bool
    staleness: int
    offloads: bool
    """Whether the training's states are in host memory while samples are generated."""
    generation: Generation | None
    """None: responses are given."""
    plans: Plans
    generation_gpus: int
    training_gpus: int
    phases: tuple[Phase, ...]
    seconds: float
    interval: tuple[float, float]
    """90% interval of `seconds`."""
    tokens: float
    """Tokens of prompts and responses of a step."""

    @property
    def training(self) -> Plan:
        """The policy's plan."""
        return self.plans["policy"]

    @property
    def gpus(self) -> int:
        return self.training_gpus if self.colocated else self.generation_gpus + self.training_gpus

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second of all GPUs together, prompts included."""
        return self.tokens / self.seconds

    def of(self, name: str) -> float:
        """Seconds of the phase with this name; 0 where there is none."""
        return sum(phase.seconds for phase in self.phases if phase.name == name)


def longest(job: RlJob) -> int:
    """Tokens of the longest sequence that there can be, rounded up."""
    return ceil(job.longest / ROUNDED) * ROUNDED


def batch(job: RlJob, training: Training, gpus: int) -> Training:
    """The training with one update's samples packed into sequences of the longest one's length; as many more of them as it takes for every
    data-parallel size to have as many, as far as there are samples."""
    whole = [job.prompt_length + length for length in drawn(job.responses, job.sequences, 0)]
    of_update = whole[: ceil(len(whole) / job.keys.updates)]
    length = longest(job)
    unit = max(divisor for divisor in range(1, gpus + 1) if gpus % divisor == 0 and (divisor <= len(of_update)))
    count = ceil(bins(of_update, length) / unit) * unit
    found = Lengths(samples=len(whole), mean=fmean(whole), mean_square=squares(whole), longest=max(whole), cut=0, lost=0.0)
    return replace(training, seq_length=length, global_batch_size=count, packing=True, lengths=found)


def bins(lengths: Sequence[int], size: int) -> int:
    """Sequences of `size` tokens that samples of these lengths fill, the longest first, each where it leaves least room (best-fit
    decreasing, within 11/9 of the fewest; Johnson, 1973); of very many, as the first of them do.

    >>> bins([3, 3, 2, 2, 2], 6)
    2
    """
    room: list[int] = []
    some = sorted(lengths[:PACKED], reverse=True)
    for length in some:
        at = bisect_left(room, length)
        insort(room, (room.pop(at) if at < len(room) else size) - length)
    return ceil(len(room) * len(lengths) / len(some))


class Packed(Value, frozen=True, kw_only=True):
    """One update's samples as the plan's ranks get them: micro-batches of each, and the shares of their tokens that samples fill, in the
    mean and on the rank that has most."""

    microbatches: int
    share: float
    fullest: float


def packed_for(job: RlJob, plan: Plan) -> Packed:
    """An update's samples packed for this plan: every data-parallel rank has as many micro-batches, which need not be full, and tokens as
    even as whole samples let them be, or as the program deals them."""
    training = plan.training
    every = [job.prompt_length + length for length in drawn(job.responses, job.sequences, 0)]
    size = ceil(job.sequences / job.keys.updates)
    whole = every[:size]
    each = plan.dp * plan.micro_batch_size
    microbatches = max(1, ceil(bins(whole, training.seq_length) / each))
    room = microbatches * plan.micro_batch_size * training.seq_length
    updates = [every[first : first + size] for first in range(0, len(every), size)]
    fullest = busiest(whole, plan.dp) if PROGRAMS[job.keys.program].balances_updates else fmean(
        max(map(sum, dealt(update, plan.dp))) * len(whole) / len(update) for update in updates
    )  # fmt: skip
    return Packed(microbatches=microbatches, share=sum(whole) / plan.dp / room, fullest=fullest / room)


def busiest(lengths: Sequence[int], ranks: int) -> int:
    """Tokens of the rank that gets most, where each sample, the longest first, goes to the one that has fewest so far.

    >>> busiest([5, 4, 3, 3], 2), busiest([9, 1, 1], 2)
    (8, 9)
    """
    held = [0] * ranks
    for length in sorted(lengths, reverse=True):
        heapreplace(held, held[0] + length)
    return max(held)


def update_seconds(plan: Plan, packed: Packed) -> float:
    """Seconds of one update with these micro-batches, on the rank with most tokens, for which the others wait: what grows with
    micro-batches and tokens as in the plan's own step, its pipeline filled and drained once; what comes once a step as it is there."""
    fixed = sum(plan.prediction.by_cause.get(cause, 0.0) for cause in ONCE)
    drained = (plan.pp - 1) / plan.vpp
    grown = packed.fullest * (packed.microbatches + drained) / (plan.num_microbatches + drained)
    return fixed + grown * (plan.prediction.step_time_s - fixed)


def forward_seconds(plan: Plan, packed: Packed, updates: int) -> float:
    """Seconds of one forward pass over the samples of all updates: their micro-batches one after the other through the slowest stage, and
    through the other stages once."""
    by_stage = [packed.share * stage.forward_s for stage in plan.prediction.by_stage]
    return packed.microbatches * updates * max(by_stage) + sum(by_stage) - max(by_stage)


def forwards(keys: RlKeys) -> list[tuple[str, Model]]:
    """The passes over a step's samples that go forward alone, in order, each of its model."""
    learns = keys.algorithm in ("grpo", "ppo")
    each: list[tuple[str, Model, bool]] = [
        ("reward", "reward", keys.reward == "model"),
        ("reference log-probabilities", "reference", keys.reference or keys.algorithm in BY_A_REFERENCE),
        ("teacher log-probabilities", "teacher", keys.algorithm == "distill"),
        ("old log-probabilities", "policy", learns),
        ("values", "critic", keys.algorithm == "ppo"),
    ]
    return [(name, model) for name, model, used in each if used]


def states_bytes(plan: Plan, causes: Collection[str]) -> float:
    """Bytes by these causes on the rank that has most of them."""
    return max(sum(stage.memory_by_cause.get(cause, 0.0) for cause in causes) for stage in plan.prediction.by_stage)


def others_bytes(plans: Plans, keys: RlKeys) -> float:
    """Bytes of a training GPU for the models of a step beside the policy: weights, and a critic's states."""
    others = {model for _, model in forwards(keys)} - {"policy"}
    return sum(states_bytes(plans.get(model, plans["policy"]), STATES if model == "critic" else WEIGHTS) for model in others)


def loss_bytes(plan: Plan) -> float:
    """Bytes of the last stage's ranks for a log-probability's loss beside that of a pretraining."""
    tokens = plan.micro_batch_size * plan.training.seq_length / plan.cp
    return LOGIT_BYTES * tokens * plan.model.vocab_size / plan.tp


def transfer_seconds(generation: Generation, cluster: Cluster, calibration: Calibration, *, colocated: bool) -> float:
    """Seconds until every engine has the new weights: the whole model passes each of its GPUs, which keeps its part, on the same GPUs by
    gathering, else by a broadcast over the network's outermost level that the job has."""
    level = next((level for level in cluster.levels if cluster.num_gpus <= level.size), cluster.levels[-1])
    link = level.bandwidth * (calibration.inner_efficiency if level is cluster.levels[0] else calibration.outer_efficiency)
    return REFIT_S + generation.model_bytes / min(REFIT_RATE, link) if colocated else generation.model_bytes / link


def step(
    job: RlJob,
    cluster: Cluster,
    calibration: Calibration,
    generation: Generation | None,
    plans: Plans,
    *,
    colocated: bool,
    offloads: bool,
    draws: tuple[float, float] = (1.0, 1.0),
) -> Step:
    """The step's timeline. `cluster` has all GPUs; `draws`: the ends of generation's seconds by other draws of the lengths, over these."""
    keys = job.keys
    staleness = keys.staleness
    plan = plans["policy"]
    responses = generation.tokens if generation else float(sum(drawn(job.responses, job.sequences, 0)))
    tokens = responses + job.sequences * job.prompt_length
    program = PROGRAMS[keys.program]
    link = cluster.host_bandwidth * calibration.host_efficiency
    copies = link if cluster.host_bandwidth > PCIE_6 else min(link, program.copy_rate)
    each_phase = offloads and program.copies_each_phase
    generated_on: Pool = "all" if colocated else "generation"
    trained_on: Pool = "all" if colocated else "training"
    made_on = generation.engines * generation.layout.gpus if generation else 0
    gpus = {"all": plan.world_size, "training": plan.world_size, "generation": made_on}
    found: list[Phase] = []

    def add(name: str, model: Model, pool: Pool, seconds: float, *after: str, off: tuple[float, float], of: float = tokens) -> None:
        found.append(Phase(name=name, model=model, tokens=of, pool=pool, gpus=gpus[pool], after=after, seconds=seconds, off=off))

    def around(model: Model, causes: Collection[str], token_bytes: int) -> float:
        """Seconds of a phase beside its pass: states that are in host memory come and go, samples are handed out and back."""
        comes = each_phase if model == "policy" else keys.offload is not False
        copied = 2 * states_bytes(plans.get(model, plan), causes) if comes else 0.0
        handed = job.sequences * longest(job) * token_bytes
        return copied / (copies if program.copies_each_phase else link) + handed / program.driver_rate

    if generation:
        moved = transfer_seconds(generation, cluster, calibration, colocated=colocated) + around("policy", WEIGHTS, 0)
        add("transfer", "policy", generated_on, moved, of=0.0, off=TRANSFER_OFF)
        once = states_bytes(plan, KEPT) / copies if colocated and offloads and not each_phase else 0.0
        if once:
            add("offload", "policy", "all", once, "transfer", of=0.0, off=TRANSFER_OFF)
        add("generate", "policy", generated_on, generation.seconds + around("policy", (), GENERATED), found[-1].name, of=responses,
            off=(GENERATION_OFF[0] * draws[0], GENERATION_OFF[1] * draws[1]))  # fmt: skip
        if once:
            add("onload", "policy", "all", once, "generate", of=0.0, off=TRANSFER_OFF)
    learns = samples = tuple(phase.name for phase in found[-1:])
    for name, model in forwards(keys):
        of_model = plans.get(model, plan)
        forward = forward_seconds(of_model, packed_for(job, of_model), keys.updates)
        add(name, model, trained_on, forward + around(model, WEIGHTS, FORWARDED), *samples, off=_off(of_model))
        learns += (name,)
    for name, model in UPDATED_MODELS.items():
        if model == "policy" or keys.algorithm == "ppo":
            of_model = plans.get(model, plan)
            update = update_seconds(of_model, packed_for(job, of_model)) * keys.updates * keys.epochs
            add(name, model, trained_on, update + around(model, KEPT, UPDATED), *learns, off=_off(of_model))
    phases, seconds = timeline(found, staleness)
    low, high = (timeline([replace(phase, seconds=phase.seconds * phase.off[end]) for phase in found], staleness)[1] for end in (0, 1))
    return Step(
        colocated=colocated,
        staleness=staleness,
        offloads=offloads,
        generation=generation,
        plans=plans,
        generation_gpus=gpus["generation"],
        training_gpus=plan.world_size,
        phases=phases,
        seconds=seconds,
        interval=(low, high),
        tokens=tokens,
    )


def _off(plan: Plan) -> tuple[float, float]:
    """The ends of the 90% interval of a pass over its seconds: those of published phases and the plan's own step; half and twice where
    nothing like it was measured."""
    ends, seconds = plan.prediction.interval, plan.prediction.step_time_s
    return (min(PASSES_OFF[0], ends[0] / seconds), max(PASSES_OFF[1], ends[1] / seconds)) if ends else (0.5, 2.0)


def timeline(phases: list[Phase], staleness: int) -> tuple[tuple[Phase, ...], float]:
    """(the phases with their starts, seconds of the step). Phases of one pool run one after the other. On-policy each also waits for those
    that it is after; with samples of earlier steps the pools run side by side, and wait for each other at the transfer of weights alone."""
    free: dict[str, float] = {}
    ends: dict[str, float] = {}
    pools = {phase.name: phase.pool for phase in phases}
    found: list[Phase] = []
    for phase in phases:
        here = free.get(phase.pool, 0.0)
        waited = [ends[name] for name in phase.after if not staleness or pools[name] == phase.pool]
        if staleness:  # what it learns from was generated in a step before
            waited.append(ends.get("transfer", 0.0))
        start = max([here, *waited])
        found.append(replace(phase, starts_s=start))
        free[phase.pool] = ends[phase.name] = start + phase.seconds
    return tuple(found), max(phase.ends_s for phase in found)
