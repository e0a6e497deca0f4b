"""What is legal: the rules that follow from an engine's declared capabilities and from arithmetic, and then the engine's own.

Nothing that a field of `Capabilities` says is written as a rule by hand. Where an engine has a rule of its own that says the same (its
file and line), `Capabilities.sources` names it, and the report shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from msgspec.structs import replace

from orchestrator.hardware.spec import Cluster
from orchestrator.model.architecture import Architecture
from orchestrator.model.training import QUANTISED, Training
from orchestrator.strategy.capabilities import Capabilities, Rule
from orchestrator.strategy.choices import shown
from orchestrator.strategy.megatron_layout import divided_layers
from orchestrator.strategy.spec import CHOICES, PINNED_ONLY, Candidate, Recompute, ZeroStage
from orchestrator.strategy.workload import Workload

PLANNER: Final = "planner"
"""The source of a rule for which the engine names none."""
AXES: Final = ("pp", "tp", "cp", "ep", "etp", "dp", "vpp")
MIN_BF16_COMPUTE_CAPABILITY: Final = 8.0
"""First compute capability with bf16 arithmetic: Ampere's (CUDA C programming guide, "Arithmetic Instructions")."""
NOT_ON_CPUS: Final = ("fp16", *QUANTISED)

OF_THEIR_OWN: Final = (
    *AXES,
    *("rank_order", "zero_stage", "zero_shard_size", "sequence_parallel", "micro_batch_size", "microbatch_group_size_per_vp_stage"),
    *("offload_optimizer", "recompute"),
)
"""Choices with a rule of their own below; the values of any other that is searched stand in `Capabilities.options`."""

Check = Callable[[Candidate, Workload], str | None]


def _of_one_length(candidate: Candidate, _: Workload) -> str | None:
    return "tp_comm_overlap: its buffers are of one length, and samples of rollouts are not" if candidate.strategy.tp_comm_overlap else None


OF_ONE_LENGTH: Final = Rule(id="rollout_buffers", engine_rule=PLANNER, check=_of_one_length, needs=("tp_comm_overlap",))
"""Rule of plans for programs of reinforcement learning: neither verl nor NeMo-RL makes user buffers (no call of initialize_ub), and
slime's are of seq_length alone (backends/megatron_utils/initialize.py:95)."""


def stages_offered(capabilities: Capabilities, candidate: Candidate) -> tuple[ZeroStage, ...]:
    """The ZeRO stages that the engine has for this pipeline, or by Megatron's FSDP."""
    if candidate.strategy.megatron_fsdp:
        return capabilities.fsdp_zero_stages
    return capabilities.zero_stages if candidate.mesh.pp == 1 else capabilities.zero_stages_with_pipeline


LEFT_OUT: Final = {
    "vision": "model.vision=null plans the text model alone",
    "mtp": "model.mtp_num_layers=0 plans the model without its prediction heads",
}
"""How a user plans a model without a part of it that some engines have not."""


def lacking_parts(capabilities: Capabilities, architecture: Architecture) -> list[str]:
    """Parts of the model that the engine neither runs nor plans."""
    if capabilities.parts is None:
        return []
    return [word for word in architecture.features() if word not in capabilities.parts and word not in capabilities.planned_parts]


def plan_only(capabilities: Capabilities, architecture: Architecture, training: Training | None = None) -> str | None:
    """What is lacking to train this model, or adapters beside it, under this engine, which plans it; None: nothing."""
    words = (*architecture.features(), *(("lora",) if training is not None and training.lora is not None else ()))
    return next((capabilities.planned_parts[word] for word in words if word in capabilities.planned_parts), None)


def unsuited(capabilities: Capabilities, workload: Workload) -> str | None:
    """Why this engine can't run this model and training at all, by its fields alone; None: it can."""
    training = workload.training
    lacking = lacking_parts(capabilities, workload.model.architecture)
    if lacking:
        has = f"of parts of models it has {', '.join(capabilities.parts or ())}{capabilities.beyond_parts}"
        has = "; ".join((*(LEFT_OUT[word] for word in lacking if word in LEFT_OUT), has))
        return f"{capabilities.engine} has no {' and no '.join(lacking)}; {has}"
    given = (("precision", training.precision, capabilities.precisions), ("optimizer", training.optimizer, capabilities.optimizers))
    for name, value, known in given:
        if value not in known:
            return f"{capabilities.engine} has no {name} {value}; it has {', '.join(known)}"
    if training.task not in capabilities.tasks:
        return f"{capabilities.engine} has no task={training.task}; engine=deepspeed and engine=megatron have"
    if training.lora is not None and not capabilities.lora and "lora" not in capabilities.planned_parts:
        return f"{capabilities.engine} has no adapters (lora.rank={training.lora.rank}); engine=deepspeed trains them, megatron plans them"
    return None


def overlaps_unasked(capabilities: Capabilities, cluster: Cluster, model: Architecture) -> bool:
    """Whether `tp_comm_overlap` is searched: on GPUs with NVSwitch's multicast, without which Transformer Engine's user buffers start only
    with UB_SKIPMC=1, over CUDA IPC, of which no published run is known; not where a tower's linears have other shapes."""
    searched = True in capabilities.options.get("tp_comm_overlap", ())
    return searched and cluster.gpu.has_multicast and "vision" not in model.features()


def rules_of(capabilities: Capabilities, workload: Workload) -> tuple[Rule, ...]:
    """All rules of an engine for this model, training and cluster: first those that follow, then its own."""
    return (*derived_rules(capabilities, workload), *capabilities.rules)


def broken_rule(capabilities: Capabilities, candidate: Candidate, workload: Workload) -> tuple[Rule, str] | None:
    """The first rule that the candidate breaks, with the reason; None: legal."""
    for rule in rules_of(capabilities, workload):
        why = rule.check(candidate, workload)
        if why is not None:
            return rule, why
    return None


def even_between(capabilities: Capabilities, architecture: Architecture) -> str | None:
    """The engine's rule by which every stage of this model has a layer, and all but the first and the last as many; None: it has none."""
    return next((capabilities.even_between[part] for part in architecture.features() if part in capabilities.even_between), None)


def why_not_stages(capabilities: Capabilities, architecture: Architecture, sizes: Sequence[int]) -> str | None:
    """Why this engine has no stages, or chunks, of so many layers of this model; None: it has."""
    if not capabilities.uneven_stages and len({*sizes}) > 1:
        return f"{capabilities.engine} needs as many layers in every stage"
    source = even_between(capabilities, architecture)
    if source is not None and (min(sizes) < 1 or len({*sizes[1:-1]}) > 1):
        others = "".join(f"; any are cluster.software.megatron_core={version}'s" for version in capabilities.later_releases)
        return f"stages of such a model have a layer each, and as many in all but the first and the last ({source}){others}"
    return None


def legal_modes(rules: Sequence[Rule], candidate: Candidate, workload: Workload, modes: Sequence[Recompute]) -> tuple[Recompute, ...]:
    """The recompute modes among `modes` with which the candidate breaks none of the rules; none where it breaks one whatever the mode."""
    if any(rule.check(candidate, workload) is not None for rule in rules if "recompute" not in rule.needs):
        return ()
    about_modes = [rule for rule in rules if "recompute" in rule.needs]
    given = [(mode, replace(candidate, strategy=replace(candidate.strategy, recompute=mode))) for mode in modes]
    return tuple(mode for mode, each in given if all(rule.check(each, workload) is None for rule in about_modes))


def derived_rules(capabilities: Capabilities, workload: Workload) -> tuple[Rule, ...]:
    """The rules that follow from the fields of `capabilities`, and from arithmetic."""

    def rule(name: str, check: Check, *needs: str) -> Rule:
        return Rule(id=name, engine_rule=capabilities.sources.get(name, PLANNER), check=check, needs=needs)

    of, parts = _Offers(capabilities), workload.cluster.parts
    return (
        rule("unsuited", lambda _, given: unsuited(capabilities, given), "model"),
        rule("precision_here", precision_here, "model"),
        rule("grad_dtype", gradient_dtype, "model"),
        rule("optimizer_dtypes", of.optimizer_dtypes, "model"),
        *(rule(f"axis_{name}", of.axis(name), name) for name in AXES),
        *_arithmetic(rule, workload),
        *_pipeline(rule, capabilities, workload),
        rule("rank_order", of.rank_order, "rank_order"),
        *((rule("types_of_gpu", types_of_gpu, "cluster", "pp"), rule("types_order", types_order, "rank_order")) if parts else ()),
        rule("megatron_fsdp", of.fsdp, "megatron_fsdp"),
        rule("options", of.pinned_options, *(choice.name for choice in PINNED_ONLY)),
        *(
            rule(f"option_{choice.name}", of.searched_option(choice.name, choice.default), choice.name)
            for choice in CHOICES
            if choice.searched and choice.name not in OF_THEIR_OWN
        ),
        rule("zero_stage", of.zero_stage, "pp", "zero_stage"),
        rule("zero_shard_size", of.zero_shard_size, "zero_stage", "zero_shard_size"),
        rule("sequence_parallel", of.sequence_parallel, "tp", "sequence_parallel"),
        rule("offload", of.offload, "offload_optimizer"),
        rule("recompute", of.recompute, "recompute"),
    )


# What is given.


def precision_here(_: Candidate, workload: Workload) -> str | None:
    """Whether the hardware has the precision, whichever engine computes."""
    wanted, gpu = workload.training.precision, workload.cluster.gpu
    if workload.cluster.is_cpu:
        return f"{wanted} does not run on a CPU" if wanted in NOT_ON_CPUS else None
    if wanted == "bf16" and float(gpu.compute_capability) < MIN_BF16_COMPUTE_CAPABILITY:
        return f"{gpu.name} has compute capability {gpu.compute_capability}: bf16 needs {MIN_BF16_COMPUTE_CAPABILITY}; use fp16"
    return None


def gradient_dtype(_: Candidate, workload: Workload) -> str | None:
    """Refuses to sum or reduce gradients in a type that is neither fp32 nor the weights'."""
    training = workload.training
    allowed = {"fp32", "bf16" if training.precision in QUANTISED else training.precision}
    for name, dtype in (("grad_accum_dtype", training.grad_accum_dtype), ("grad_reduce_dtype", training.grad_reduce_dtype)):
        if dtype not in allowed:
            return f"{name}={dtype} with precision {training.precision}: {' or '.join(sorted(allowed))}"
    return None


# The mesh.


def _arithmetic(rule: Callable[..., Rule], workload: Workload) -> tuple[Rule, ...]:
    """The degrees multiply to the GPUs, the micro-batches to the global batch."""
    world, batch = workload.cluster.num_gpus, workload.training.global_batch_size

    def mesh(candidate: Candidate, _: Workload) -> str | None:
        size = candidate.mesh.world_size
        return None if size == world else f"tp x pp x cp x dp = {size}, not the {world} GPUs"

    def data_parallel(candidate: Candidate, _: Workload) -> str | None:
        dp = candidate.mesh.dp
        return None if batch % dp == 0 else f"dp={dp} does not divide global_batch_size={batch}"

    def batches(candidate: Candidate, _: Workload) -> str | None:
        mbs, m, dp = candidate.micro_batch_size, candidate.num_microbatches, candidate.mesh.dp
        if mbs * m * dp == batch:
            return None
        if batch % (mbs * dp):
            return f"micro_batch_size={mbs} x dp={dp} does not divide global_batch_size={batch}"
        return f"micro_batch_size={mbs} x num_microbatches={m} x dp={dp} = {mbs * m * dp} is not global_batch_size={batch}"

    return (
        rule("data_parallel", data_parallel, "training", "dp"),
        rule("mesh", mesh, "pp", "tp", "cp", "dp"),
        rule("batch", batches, "dp", "micro_batch_size"),
    )


def types_of_gpu(candidate: Candidate, workload: Workload) -> str | None:
    """Whether each pipeline stage, and so each group of tp, cp, ep and dp, has GPUs of one type: all copies of a stage then take as long.

    A cluster of 8 + 16 GPUs has 3, 6, 12 or 24 stages.
    """
    cluster, pp = workload.cluster, candidate.mesh.pp
    size, begin = cluster.num_gpus / pp, 0
    for part in cluster.parts[:-1]:
        begin += part.num_gpus
        if begin % size:
            several = "all axes of parallelism but pp have" if pp == 1 else f"one of its stages of {size:g} GPUs has"
            return f"pp={pp}: {several} GPUs of two types ({cluster.types}); a stage, with its tp, cp, ep and dp groups, has one"
    return None


def types_order(candidate: Candidate, workload: Workload) -> str | None:
    """Whether neighbouring ranks, which are of one type, are of one pipeline stage."""
    order = candidate.mesh.order
    name = "-".join(order)
    return None if order[-1] == "pp" else f"rank order {name} spreads a stage over GPUs of several types ({workload.cluster.types})"


def _pipeline(rule: Callable[..., Rule], capabilities: Capabilities, workload: Workload) -> tuple[Rule, ...]:
    """The rules about stages, virtual stages and schedules."""
    layers = divided_layers(workload.model)
    engine, schedules = capabilities.engine, capabilities.schedules
    flat = [name for name in schedules if name != "interleaved"]

    def stages(candidate: Candidate, _: Workload) -> str | None:
        pp = candidate.mesh.pp
        if not capabilities.uneven_stages and layers % pp:
            return f"{layers} layers do not split evenly over pp={pp}"
        return None if pp <= layers + 2 else f"pp={pp} stages for {layers} layers"

    def chunks(candidate: Candidate, _: Workload) -> str | None:
        pp, vpp = candidate.mesh.pp, candidate.vpp
        if vpp > 1 and "interleaved" not in schedules:
            return f"{engine} has no interleaved schedule"
        if vpp > 1 and pp == 1:
            return f"vpp={vpp} needs a pipeline"
        if vpp > 1 and not capabilities.uneven_stages and layers % (pp * vpp):
            return f"{layers} layers do not split evenly over pp={pp} x vpp={vpp}"
        return None if pp * vpp <= layers + 2 else f"pp={pp} x vpp={vpp} chunks for {layers} layers"

    def schedule(candidate: Candidate, _: Workload) -> str | None:
        name, vpp = candidate.schedule, candidate.vpp
        if name not in schedules:
            return f"{engine} has the schedules {', '.join(schedules)}, not {name}"
        if (name == "interleaved") != (vpp > 1):
            return f"schedule={name}: vpp={vpp} runs {'interleaved' if vpp > 1 else ' or '.join(flat)}"
        if candidate.mesh.pp == 1 and name != flat[0]:
            return f"schedule={name} needs pp above 1"
        return None

    def groups(candidate: Candidate, _: Workload) -> str | None:
        group, vpp = candidate.microbatch_group_size_per_vp_stage, candidate.vpp
        if group is None:
            return None
        if not capabilities.microbatch_groups:
            return f"microbatch_group_size_per_vp_stage={group}: {engine} has no groups of micro-batches"
        return f"microbatch_group_size_per_vp_stage={group} needs vpp above 1" if vpp == 1 else None

    return (
        rule("stages", stages, "model", "pp"),
        rule("chunks", chunks, "model", "pp", "vpp"),
        rule("schedule", schedule, "pp", "vpp", "schedule"),
        rule("microbatch_groups", groups, "vpp", "microbatch_group_size_per_vp_stage"),
    )


# What the engine offers.


class _Offers:
    """Checks by the fields of an engine's capabilities."""

    def __init__(self, capabilities: Capabilities) -> None:
        self.has, self.engine = capabilities, capabilities.engine
        self.orders = " and ".join("-".join(order) for order in capabilities.rank_orders)
        self.lacking = [choice for choice in PINNED_ONLY if choice.name not in capabilities.pinned_options]

    def optimizer_dtypes(self, _: Candidate, workload: Workload) -> str | None:
        training = workload.training
        if training.precision_aware_optimizer:
            return None if self.has.precision_aware_optimizer else f"{self.engine} has no precision_aware_optimizer"
        for name, dtype in (("exp_avg_dtype", training.exp_avg_dtype), ("exp_avg_sq_dtype", training.exp_avg_sq_dtype)):
            if dtype != "fp32":
                return f"{name}={dtype} needs precision_aware_optimizer=true"
        return None

    def axis(self, name: str) -> Check:
        """The check of one axis."""
        offered = name in self.has.axes

        def check(candidate: Candidate, _: Workload) -> str | None:
            degree = candidate.vpp if name == "vpp" else candidate.mesh.degree(name)
            return None if degree == 1 or offered else f"{self.engine} has no {name}"

        return check

    def rank_order(self, candidate: Candidate, _: Workload) -> str | None:
        order = candidate.mesh.order
        return None if order in self.has.rank_orders else f"rank order {'-'.join(order)}: {self.engine} has {self.orders}"

    def zero_stage(self, candidate: Candidate, _: Workload) -> str | None:
        offered = stages_offered(self.has, candidate)
        if candidate.strategy.zero_stage in offered:
            return None
        known = ", ".join(map(str, offered)) or "none"
        if candidate.strategy.megatron_fsdp:
            return f"{self.engine} has zero_stage {known} with megatron_fsdp"
        fsdp = ", ".join(map(str, self.has.fsdp_zero_stages))
        more = f", and {fsdp} with megatron_fsdp" if fsdp else ""
        return f"{self.engine} has zero_stage {known}{' with a pipeline' if candidate.mesh.pp > 1 else ''}{more}"

    def fsdp(self, candidate: Candidate, _: Workload) -> str | None:
        return f"{self.engine} has no Megatron-FSDP" if candidate.strategy.megatron_fsdp and not self.has.fsdp_zero_stages else None

    def zero_shard_size(self, candidate: Candidate, _: Workload) -> str | None:
        size, stage, stages = candidate.strategy.zero_shard_size, candidate.strategy.zero_stage, self.has.zero_shard_stages
        if size is None or stage in stages:
            return None
        if not stages:
            return f"zero_shard_size={size}: {self.engine} shards over the whole data-parallel group"
        return f"zero_shard_size={size} with zero_stage={stage}: {self.engine} has it with zero_stage {', '.join(map(str, stages))}"

    def pinned_options(self, candidate: Candidate, _: Workload) -> str | None:
        values = ((choice, getattr(candidate.strategy, choice.name)) for choice in self.lacking)
        words = ", ".join(f"{choice.name}={shown(value)}" for choice, value in values if value != choice.default)
        return f"{words}: no option of engine={self.engine}" if words else None

    def searched_option(self, name: str, default: object) -> Check:
        """The check of one option that is searched."""
        offered = (*self.has.options.get(name, (default,)), *self.has.pinned_values.get(name, ()))

        def check(candidate: Candidate, _: Workload) -> str | None:
            value = getattr(candidate.strategy, name)
            return None if value in offered else f"{self.engine} has {name} {', '.join(map(shown, offered))}"

        return check

    def sequence_parallel(self, candidate: Candidate, _: Workload) -> str | None:
        if not candidate.strategy.sequence_parallel:
            return None
        if not self.has.sequence_parallel:
            return f"{self.engine} has no sequence parallelism"
        return None if candidate.mesh.tp > 1 else "sequence parallelism needs tp > 1"

    def offload(self, candidate: Candidate, _: Workload) -> str | None:
        able = self.has.offload_optimizer or "offload_optimizer" in self.has.pinned_values
        return f"{self.engine} has no optimizer offload" if candidate.strategy.offload_optimizer and not able else None

    def recompute(self, candidate: Candidate, _: Workload) -> str | None:
        mode = candidate.strategy.recompute
        return None if mode in self.has.recompute else f"{self.engine} has recompute {', '.join(self.has.recompute)}"
