"""A setup with its model and training as a `Plan`, checked by the engine's rules and priced as every plan is."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import Final

from msgspec.structs import replace

from orchestrator.audit.reading import Reading, Setup
from orchestrator.engine_prices import EnginePrices
from orchestrator.engines import ENGINES
from orchestrator.engines.deepspeed.capabilities import NAME as DEEPSPEED
from orchestrator.engines.megatron_versions import flex_backend
from orchestrator.engines.rules.model import UNPLANNED
from orchestrator.errors import InputError
from orchestrator.model.describe import with_tower_first
from orchestrator.model.spec import ModelSpec
from orchestrator.plan import Plan
from orchestrator.plan.check import check_plan
from orchestrator.planning import Planner
from orchestrator.recipe import Settings
from orchestrator.search.question import PlannedEngine
from orchestrator.strategy.capabilities import StateBytes
from orchestrator.strategy.divisible import multiples
from orchestrator.strategy.layout import ENDS
from orchestrator.strategy.legality import lacking_parts
from orchestrator.strategy.megatron_layout import chunk_sizes, layout_string, stages_of, transformer_layers
from orchestrator.strategy.pins import MemoryLimit
from orchestrator.strategy.spec import DEFAULTS, Recompute, options_of
from orchestrator.values import Value
from orchestrator.words.megatron import EXPERT_PARALLEL

OF_EXPERTS: Final = tuple(term.ours for term in EXPERT_PARALLEL[2:])
EVERY: Final = 1 << 62
"""Parameters that no model has."""


class Judged(Value, frozen=True, kw_only=True):
    """A setup as a plan with its price, and the rule that it breaks ("": none)."""

    setup: Setup
    plan: Plan
    rule: str
    limit: MemoryLimit
    chance: float | None
    """The chance of running out of memory, 0 to 1; None on the CPU, of which nothing is published."""

    @property
    def step_time_s(self) -> float:
        return self.plan.prediction.step_time_s

    @property
    def peak_memory_bytes(self) -> float:
        return self.plan.prediction.peak_memory_bytes

    @property
    def lacking_bytes(self) -> float:
        """Bytes of the fullest rank above what is usable; 0: it fits."""
        return max(0.0, self.peak_memory_bytes - self.limit.usable)

    @property
    def rank(self) -> tuple[bool, float, float]:
        """The less the better: what breaks a rule comes last, then what lacks memory, by how much, then the step."""
        return (bool(self.rule), self.lacking_bytes, self.step_time_s)


class Judge:
    """Builds and prices setups of the file that was read, for one model, training and cluster. Layers that two setups share are priced
    once."""

    def __init__(self, settings: Settings, setup: Setup, reading: Reading) -> None:
        self.settings, engine = settings, setup.engine
        planner = Planner(settings)
        prices = planner.prices_for(engine)
        traits = prices.traits if reading.logits_bytes is None else replace(prices.traits, logits_bytes=reading.logits_bytes)
        self.prices = EnginePrices(settings, traits, prices.fitted, prices.kept)
        able = ENGINES[engine].capabilities(settings.cluster.software)
        self.workload = planner.workload
        self.model = with_tower_first(self.workload.model) if traits.tower_first else self.workload.model
        ours = ""  # what the file's own plan has that its engine runs and this planner doesn't plan
        with suppress(InputError):  # of what is no plan
            own = built(setup, settings, self.model).candidate
            ours = next((why for rule in able.rules if rule.id == UNPLANNED and (why := rule.check(own, self.workload))), "")
        rules = tuple(rule for rule in reading.kept(able.rules) if not ours or rule.id != UNPLANNED)
        self.engine = self.prices.engine(replace(able, rules=rules))
        self.plain = self.engine
        if reading.states is not None and settings.training.precision != "fp32":
            self.plain = replaced(self.engine, reading.states)
        self.limit = self.prices.limits[0]
        self.lacking = lacking = lacking_parts(able, settings.architecture) if engine == DEEPSPEED else []
        has = f"{settings.architecture.name} has {', '.join(lacking)}, of which this planner knows nothing under engine={engine}"
        self.untold = f"{has if lacking else ours}: its own limit, no verdict on the file" if lacking or ours else ""
        """Why the engine's rules say nothing of this model; "": they do."""

    def judged(self, setup: Setup) -> Judged:
        """Raises InputError for a setup that is no plan at all: degrees that don't divide the GPUs, the batch or the layers."""
        plan = built(setup, self.settings, self.model)
        rule = ""
        try:
            if not self.lacking:
                check_plan(plan, self.engine.capabilities)
        except InputError as error:
            rule = str(error)
        try:
            engine = self.engine if setup.zero_stage else self.plain
            predicted = engine.costs(self.workload).price(plan.candidate, plan.stages)
        except (KeyError, ZeroDivisionError, ValueError) as error:
            raise InputError("audit", None, rule or f"has no price: {error}") from None
        plan = replace(plan, predicted=predicted, calibration=self.engine.calibration.name)
        chance = None if self.settings.cluster.is_cpu else self.prices.chance_of(plan)
        return Judged(setup=setup, plan=plan, rule=rule, limit=self.limit, chance=chance)


def replaced(engine: PlannedEngine, states: StateBytes) -> PlannedEngine:
    """The engine, whose stage 0 is torch's data parallelism with these states: more than one rank have a copy of all gradients in its
    buckets (torch/nn/parallel/distributed.py, gradient_as_bucket_view=False)."""
    traits = replace(
        engine.traits,
        states=engine.traits.states | {"mixed/0": states},
        gradient_buffer="fixed",
        bucket_elements=EVERY,
        bucket_copies=1,
        bucket_itemsize=int(states.gradient),
    )
    return PlannedEngine(capabilities=engine.capabilities, traits=traits, calibration=engine.calibration, policy=engine.policy)


def built(setup: Setup, settings: Settings, model: ModelSpec) -> Plan:
    """Raises InputError for degrees that don't divide what they must."""
    training, cluster = settings.training, settings.cluster
    world, batch = cluster.num_gpus, training.global_batch_size
    ranks = setup.tp * setup.pp * setup.cp
    for name in ("tp", "pp", "vpp", "cp", "ep", "etp", "micro_batch_size"):
        if getattr(setup, name) < 1:
            raise InputError(name, getattr(setup, name), "must be at least 1")
    if world % ranks:
        raise InputError("gpus", world, f"is no multiple of tp x pp x cp = {setup.tp} x {setup.pp} x {setup.cp} = {ranks}")
    dp = world // ranks
    if batch % (dp * setup.micro_batch_size):
        what = f"dp x micro-batch = {dp} x {setup.micro_batch_size}"
        near = " and ".join(map(str, multiples(batch, dp * setup.micro_batch_size)))
        raise InputError("global_batch_size", batch, f"is no multiple of {what}; the nearest: {near}")
    copies = setup.zero_shard_size
    if copies is not None and copies < 0:  # so many optimizer instances
        if dp * setup.cp % -copies:
            raise InputError("num_distributed_optimizer_instances", -copies, f"does not divide dp x cp = {dp * setup.cp}")
        copies = dp * setup.cp // -copies
    overlaps = dp * setup.cp > 1 and not cluster.is_cpu
    pinned = ENGINES[setup.engine].capabilities(cluster.software).pinned_options
    own = "overlap_grad_reduce" in pinned
    reduce = setup.overlap_grad_reduce or (own and not overlaps)
    gather = setup.overlap_param_gather or (own and (not overlaps or not setup.zero_stage or not setup.overlap_grad_reduce))
    options = options_of(setup) | {"overlap_grad_reduce": reduce, "overlap_param_gather": gather, "zero_shard_size": copies}
    if not settings.architecture.experts:  # a file of overrides does not say whether its model has any
        options |= {name: DEFAULTS[name] for name in OF_EXPERTS}
    itself = setup.moe_token_dispatcher_type == "flex" and flex_backend(cluster.gpu) == "hybridep"
    if "moe_permute_fusion" not in pinned or cluster.is_cpu or itself:  # where it does nothing (rule permute_fusion)
        options["moe_permute_fusion"] = DEFAULTS["moe_permute_fusion"]
    if not any(part.shared_ffn_hidden_size for part in settings.architecture.experts):
        options["moe_shared_expert_overlap"] = False
    options |= {} if setup.cp > 1 else {"cp_comm_type": "p2p"}
    schedule = "interleaved" if setup.vpp > 1 else "deepspeed_1f1b" if setup.by_deepspeed_pipeline and setup.pp > 1 else "1f1b"
    layers = transformer_layers(model)
    by_stage = [(mode, layers if count is None else count) for mode, count in setup.stage_recompute or ()]
    by_stage = by_stage or [(setup.recompute, setup.recompute_layers or layers)] * setup.pp
    return Plan(
        engine=setup.engine,
        world_size=world,
        **{name: getattr(setup, name) for name in ("tp", "pp", "vpp", "cp", "ep", "micro_batch_size", "rank_order")},
        etp=setup.etp if settings.architecture.experts else 1,
        microbatch_group_size_per_vp_stage=setup.microbatch_group_size_per_vp_stage if setup.vpp > 1 else None,
        dp=dp,
        num_microbatches=batch // (dp * setup.micro_batch_size),
        global_batch_size=batch,
        schedule=schedule,  # type: ignore[arg-type]
        stages=stages_of(model, chunks(setup, model), setup.pp, by_stage),
        model=settings.architecture,
        training=training,
        cluster=cluster,
        run=settings.run,
        extra=settings.extra,
        **options,
    )


def setup_of(plan: Plan, experts: bool) -> Setup:
    """What a plan chooses, as a setup of which `built` makes this plan. `experts`: as `Setup.experts`."""
    shared = {name: getattr(plan, name) for name in Setup.__struct_fields__ if name in Plan.__struct_fields__}
    inner = [[[span for span in stage.chunk(chunk) if span.kind not in ENDS] for chunk in range(plan.vpp)] for stage in plan.stages]
    sizes = [sum(span.count for span in spans) for stage in inner for spans in stage]
    same_sizes = len({*sizes}) == 1
    by_ends = "single_part_layers" in plan.model.features() and not same_sizes and len({*sizes[1:-1]}) <= 1  # which no layout says
    recompute: list[tuple[Recompute, int | None]] = []
    for stage in inner:
        mode: Recompute = next((span.recompute for spans in stage for span in spans if span.recompute != "none"), "none")
        first: Counter[tuple[int, str]] = Counter()  # an encoder and a decoder are recomputed each from its own first layer on
        for span in (span for spans in stage for span in spans if span.recompute != "none"):
            first[span.chunk, span.kind if plan.model.stack == "encoder_decoder" else ""] += span.count
        whole = all(span.recompute == mode for spans in stage for span in spans)
        recompute.append((mode, None if whole else max(first.values())))
    same = len({*recompute}) == 1
    return Setup(
        **shared,
        experts=experts,
        recompute=recompute[0][0] if same else "none",
        recompute_layers=recompute[0][1] if same else None,
        stage_recompute=None if same else tuple(recompute),
        layout=None if same_sizes or by_ends else layout_string(plan.stages, plan.model.mtp_num_layers),
        first_layers=sizes[0] if by_ends else None,
        last_layers=sizes[-1] if by_ends else None,
        by_deepspeed_pipeline=plan.schedule == "deepspeed_1f1b",
    )


def chunks(setup: Setup, model: ModelSpec) -> tuple[int, ...]:
    """Transformer layers of each chunk, chunk after chunk. Raises InputError where they don't divide so."""
    layers, pp, vpp = transformer_layers(model), setup.pp, setup.vpp
    if setup.layout is not None:
        return chunk_sizes(setup.layout, model, pp, vpp)
    first, last = setup.first_layers, setup.last_layers
    if setup.by_deepspeed_pipeline and layers % pp:  # "parameters" and "uniform" give the rest to some of the stages
        return tuple(layers // pp + (index < layers % pp) for index in range(pp))
    if first is not None or last is not None:
        between = pp - (first is not None) - (last is not None)
        rest = layers - (first or 0) - (last or 0)
        if rest < 0 or (between and rest % between) or (not between and rest):
            raise InputError("num_layers", layers, f"don't divide: first stage {first}, last stage {last}, {between} others")
        stage = [rest // between if between else 0] * pp
        if first is not None:
            stage[0] = first
        if last is not None:
            stage[-1] = last
        if any(size % vpp for size in stage):
            raise InputError("vpp", vpp, f"does not divide the stages' layers {stage}")
        return tuple(stage[p] // vpp for _ in range(vpp) for p in range(pp))
    counted = layers + sum(setup.ends_count)
    if counted % (pp * vpp):
        with_ends = f"with {sum(setup.ends_count)} ends " if any(setup.ends_count) else ""
        raise InputError("num_layers", layers, f"{with_ends}is no multiple of pp x vpp = {pp} x {vpp}")
    sizes = [counted // (pp * vpp)] * (pp * vpp)
    sizes[0] -= setup.ends_count[0]
    sizes[-1] -= setup.ends_count[1]
    return tuple(sizes)
