"""The rules that follow from what an engine declares (strategy/legality.py): each refuses what its field excludes, by its name, and nothing
else."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import pytest
from msgspec.structs import replace
from small_engines import deepspeed_like, megatron_like
from small_models import cluster, gpt, training

from orchestrator.strategy.capabilities import Capabilities
from orchestrator.strategy.legality import (
    AXES,
    OF_THEIR_OWN,
    broken_rule,
    derived_rules,
    gradient_dtype,
    lacking_parts,
    plan_only,
    precision_here,
    rules_of,
    types_of_gpu,
    types_order,
)
from orchestrator.strategy.spec import CHOICES, PINNED_ONLY, PP_BEFORE_DP, RANK_ORDER, Candidate, Mesh, Strategy
from orchestrator.strategy.workload import Workload

LAYERS, GPUS, BATCH = 12, 8, 16
OTHER_OPTIONS = tuple(choice for choice in CHOICES if choice.searched and choice.name not in OF_THEIR_OWN)
GIVEN = Workload(model=gpt(LAYERS), training=training(BATCH), cluster=cluster(GPUS))


def able(**changes: Any) -> Capabilities:
    """An engine that has everything, with no rules of its own."""
    everything: dict[str, Any] = {
        "axes": AXES, "zero_stages": (0, 1, 2, 3), "zero_stages_with_pipeline": (0, 1, 2, 3), "zero_shard_stages": (1, 3),
        "fsdp_zero_stages": (2, 3), "pinned_options": tuple(choice.name for choice in PINNED_ONLY), "microbatch_groups": True,
        "offload_optimizer": True, "precision_aware_optimizer": True, "precisions": ("bf16", "fp16", "fp32", "fp8"),
        "rank_orders": (RANK_ORDER, PP_BEFORE_DP), "rules": (), "options": {"tp_comm_overlap": (False, True)},
    }  # fmt: skip
    return megatron_like(**(everything | changes))


def chosen(**values: Any) -> Candidate:
    """A candidate for GIVEN's 8 GPUs and 16 samples: data parallelism over what the other degrees leave."""
    degrees = {name: values.pop(name) for name in ("tp", "pp", "cp", "ep", "etp", "dp", "order") if name in values}
    used = degrees.get("tp", 1) * degrees.get("pp", 1) * degrees.get("cp", 1)
    mesh = Mesh(**({"dp": max(1, GPUS // used)} | degrees))
    own = {name: values.pop(name) for name in Candidate.__struct_fields__ if name in values}
    micro = own.get("micro_batch_size", 1)
    usual = {"micro_batch_size": micro, "num_microbatches": max(1, BATCH // (mesh.dp * micro))}
    if own.get("vpp", 1) > 1:
        usual["schedule"] = "interleaved"
    return Candidate(engine="megatron", strategy=Strategy(mesh=mesh, **values), **(usual | own))


def broken(capabilities: Capabilities, candidate: Candidate, given: Workload = GIVEN) -> dict[str, str]:
    """Every derived rule that the candidate breaks, with the reason."""
    answers = {rule.id: rule.check(candidate, given) for rule in derived_rules(capabilities, given)}
    return {name: why for name, why in answers.items() if why is not None}


@dataclass(frozen=True)
class Case:
    """`choices` are legal for an engine that has everything; the engine that lacks `lacks` refuses them by this rule alone."""

    rule: str
    choices: dict[str, Any]
    lacks: dict[str, Any]
    says: str
    train: dict[str, Any] = field(default_factory=dict)


PIPELINE = {"pp": 2}
INTERLEAVED = {"pp": 2, "vpp": 2}
CASES = [
    Case("unsuited", {}, {"parts": ("mlp",)}, "megatron has no attention; of parts of models it has mlp"),
    Case("unsuited", {}, {"precisions": ("fp32",)}, "megatron has no precision bf16; it has fp32"),
    Case("unsuited", {}, {"optimizers": ("sgd",)}, "megatron has no optimizer adamw; it has sgd"),
    Case("optimizer_dtypes", {}, {"precision_aware_optimizer": False}, "megatron has no precision_aware_optimizer",
         {"precision_aware_optimizer": True, "exp_avg_dtype": "bf16"}),
    *(
        Case(f"axis_{name}", {name: 2} | {"vpp": {"pp": 2}, "dp": {"tp": 4}}.get(name, {}),
             {"axes": tuple(other for other in AXES if other != name)}, f"megatron has no {name}")
        for name in AXES
    ),
    Case("stages", {"pp": 8}, {"uneven_stages": False}, "12 layers do not split evenly over pp=8"),
    Case("chunks", {"pp": 4, "vpp": 2}, {"uneven_stages": False}, "12 layers do not split evenly over pp=4 x vpp=2"),
    Case("schedule", PIPELINE | {"schedule": "deepspeed_1f1b"}, {"schedules": ("1f1b", "interleaved")},
         "megatron has the schedules 1f1b, interleaved, not deepspeed_1f1b"),
    Case("microbatch_groups", INTERLEAVED | {"microbatch_group_size_per_vp_stage": 4}, {"microbatch_groups": False},
         "megatron has no groups of micro-batches"),
    Case("rank_order", {"order": PP_BEFORE_DP}, {"rank_orders": (RANK_ORDER,)}, "rank order tp-cp-ep-pp-dp: megatron has tp-cp-ep-dp-pp"),
    Case("options", {"cross_entropy_loss_fusion": True}, {"pinned_options": ()},
         "cross_entropy_loss_fusion=true: no option of engine=megatron"),
    Case("option_tp_comm_overlap", {"tp": 2, "sequence_parallel": True, "tp_comm_overlap": True}, {"options": {}},
         "megatron has tp_comm_overlap false"),
    Case("zero_stage", {"zero_stage": 2}, {"zero_stages": (0, 1)}, "megatron has zero_stage 0, 1, and 2, 3 with megatron_fsdp"),
    Case("zero_stage", PIPELINE | {"zero_stage": 2}, {"zero_stages_with_pipeline": (1,), "fsdp_zero_stages": ()},
         "megatron has zero_stage 1 with a pipeline"),
    Case("zero_stage", {"zero_stage": 3, "megatron_fsdp": True}, {"fsdp_zero_stages": (2,)},
         "megatron has zero_stage 2 with megatron_fsdp"),
    Case("zero_shard_size", {"zero_stage": 3, "zero_shard_size": 2}, {"zero_shard_stages": (1,)},
         "zero_shard_size=2 with zero_stage=3: megatron has it with zero_stage 1"),
    Case("zero_shard_size", {"zero_stage": 1, "zero_shard_size": 2}, {"zero_shard_stages": ()},
         "megatron shards over the whole data-parallel group"),
    Case("sequence_parallel", {"tp": 2, "sequence_parallel": True}, {"sequence_parallel": False}, "megatron has no sequence parallelism"),
    Case("offload", {"offload_optimizer": True}, {"offload_optimizer": False}, "megatron has no optimizer offload"),
    Case("recompute", {"recompute": "selective"}, {"recompute": ("none", "full")}, "megatron has recompute none, full"),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.rule}-{case.says}")
def test_what_is_not_declared_is_refused_by_the_rule_of_its_name_alone(case: Case) -> None:
    given = replace(GIVEN, training=replace(GIVEN.training, **case.train))
    everything = able(schedules=("1f1b", "interleaved", "deepspeed_1f1b"))
    candidate = chosen(**case.choices)
    assert broken(everything, candidate, given) == {}
    refused = broken(replace(everything, **case.lacks), candidate, given)
    assert [*refused] == [case.rule]
    assert case.says in refused[case.rule]


TOGETHER = {
    "chunks": ({"pp": 2, "vpp": 2}, {"schedules": ("1f1b",)}, {"chunks", "schedule"}),
    "megatron_fsdp": ({"zero_stage": 2, "megatron_fsdp": True}, {"fsdp_zero_stages": ()}, {"megatron_fsdp", "zero_stage"}),
}
"""What two rules say together: the schedule of the chunks is lacking too, the stages of the FSDP too."""


@pytest.mark.parametrize("name", TOGETHER)
def test_what_two_fields_exclude_is_refused_by_both(name: str) -> None:
    choices, lacks, rules = TOGETHER[name]
    assert broken(able(), chosen(**choices)) == {}
    assert {*broken(able(**lacks), chosen(**choices))} == rules


ARITHMETIC = [
    ("data_parallel", {"dp": 3, "num_microbatches": 5}, "dp=3 does not divide global_batch_size=16"),
    ("mesh", {"dp": 4}, "tp x pp x cp x dp = 4, not the 8 GPUs"),
    ("batch", {"micro_batch_size": 4, "num_microbatches": 1}, "micro_batch_size=4 x dp=8 does not divide global_batch_size=16"),
    ("batch", {"num_microbatches": 3}, "micro_batch_size=1 x num_microbatches=3 x dp=8 = 24 is not global_batch_size=16"),
    ("chunks", {"vpp": 2, "schedule": "interleaved"}, "vpp=2 needs a pipeline"),
    ("chunks", {"pp": 8, "vpp": 2}, "pp=8 x vpp=2 chunks for 12 layers"),
    ("schedule", {"pp": 2, "schedule": "interleaved"}, "schedule=interleaved: vpp=1 runs 1f1b"),
    ("microbatch_groups", {"pp": 2, "microbatch_group_size_per_vp_stage": 4}, "needs vpp above 1"),
    ("sequence_parallel", {"sequence_parallel": True}, "sequence parallelism needs tp > 1"),
]


@pytest.mark.parametrize(("rule", "choices", "says"), ARITHMETIC, ids=lambda value: value if isinstance(value, str) else "")
def test_arithmetic_is_judged_of_every_engine(rule: str, choices: dict[str, Any], says: str) -> None:
    found = broken(able(), chosen(**choices))
    assert says in found[rule]


@pytest.mark.parametrize(
    ("train", "capability", "rule", "says"),
    [
        ({"precision": "bf16"}, "7.0", "precision_here", "test has compute capability 7.0: bf16 needs 8.0; use fp16"),
        ({"grad_reduce_dtype": "fp16"}, "8.0", "grad_dtype", "grad_reduce_dtype=fp16 with precision bf16: bf16 or fp32"),
        ({"exp_avg_dtype": "bf16"}, "8.0", "optimizer_dtypes", "exp_avg_dtype=bf16 needs precision_aware_optimizer=true"),
    ],
)
def test_types_are_judged_of_every_engine(train: dict[str, Any], capability: str, rule: str, says: str) -> None:
    gpu = replace(GIVEN.cluster.gpu, compute_capability=capability)
    given = replace(GIVEN, training=replace(GIVEN.training, **train), cluster=replace(GIVEN.cluster, gpu=gpu))
    assert broken(able(), chosen(), given) == {rule: says}


def test_every_derived_rule_is_refused_by_in_some_case() -> None:
    names = {rule.id for rule in derived_rules(able(), GIVEN)}
    of_types = {"precision_here", "grad_dtype"}
    options = {f"option_{choice.name}" for choice in OTHER_OPTIONS}
    assert names == {case.rule for case in CASES} | {*TOGETHER} | {rule for rule, *_ in ARITHMETIC} | of_types | options


def test_an_option_is_the_engines_where_it_is_declared_and_stays_at_its_default_elsewhere() -> None:
    """Each one that only a pin sets, and each that is searched with no rule of its own."""
    for choice in OTHER_OPTIONS:
        (value, *_) = [True] if choice.type is bool else [value for value in choice.type.__args__ if value != choice.default]
        assert [*broken(able(options={}), chosen(**{choice.name: value}))] == [f"option_{choice.name}"]
        assert broken(able(options={choice.name: (choice.default, value)}), chosen(**{choice.name: value})) == {}
    for choice in PINNED_ONLY:
        numbers = {bool: [not choice.default], int: [2]}
        others = numbers.get(choice.type) or [value for value in choice.type.__args__ if value != choice.default]
        fsdp = {"zero_stage": 2} if choice.name == "megatron_fsdp" else {}
        for value in others:
            candidate = chosen(**{choice.name: value}, **fsdp)
            assert broken(able(), candidate) == {}
            rest = tuple(other.name for other in PINNED_ONLY if other != choice)
            assert [*broken(able(pinned_options=rest), candidate)] == ["options"], choice.name
        assert broken(able(pinned_options=()), chosen()) == {}


def test_parts_that_are_planned_only_are_neither_refused_nor_trained() -> None:
    architecture = GIVEN.model.architecture
    planned = able(parts=("mlp",), planned_parts={"attention": "not trained yet"})
    assert lacking_parts(planned, architecture) == []
    assert plan_only(planned, architecture)
    assert not plan_only(able(), architecture)
    assert lacking_parts(able(parts=None), architecture) == []


def test_the_engines_own_rule_is_named_and_its_own_rules_come_last() -> None:
    capabilities = deepspeed_like(sources={"axis_vpp": "pipe/module.py:1"})
    candidate = chosen(pp=2, vpp=2)
    found = broken_rule(capabilities, candidate, GIVEN)
    assert found is not None
    assert (found[0].id, found[0].engine_rule, found[1]) == ("axis_vpp", "pipe/module.py:1", "deepspeed has no vpp")
    assert rules_of(capabilities, GIVEN)[-1] in capabilities.rules
    assert all(rule.engine_rule == "planner" for rule in derived_rules(able(), GIVEN))


# --------------------------------------------------------------------------------------------------------------- laws


def drawn(rng: random.Random) -> Candidate:
    """Legal or not; most choices are the usual ones."""

    def one(usual: Any, *others: Any) -> Any:
        return usual if rng.random() < 0.75 else rng.choice(others)

    return chosen(
        tp=one(1, 2, 4), pp=one(1, 2, 3, 4, 16), cp=one(1, 2), ep=one(1, 2), etp=one(1, 2), vpp=one(1, 2, 3),
        schedule=one("1f1b", "interleaved", "deepspeed_1f1b"), order=one(RANK_ORDER, PP_BEFORE_DP), zero_stage=one(0, 1, 2, 3),
        zero_shard_size=one(None, 2), sequence_parallel=one(False, True), offload_optimizer=one(False, True),
        micro_batch_size=one(1, 2, 3), microbatch_group_size_per_vp_stage=one(None, 4), recompute=one("none", "selective", "full"),
        tp_comm_overlap=one(False, True), megatron_fsdp=one(False, True),
    )  # fmt: skip


def test_a_rule_reads_what_it_says_that_it_needs_and_no_more() -> None:
    """The tree judges a rule once these choices are made: two candidates that agree in them, and in what only a pin sets, get one answer.
    The rule of the batch is the one that says which number of micro-batches there is."""
    rng = random.Random(5)
    candidates = [drawn(rng) for _ in range(4000)]
    values: dict[str, Any] = {choice.name: choice.of for choice in CHOICES}
    values["num_microbatches"] = attrgetter("num_microbatches")
    said = {name: [of(candidate) for candidate in candidates] for name, of in values.items()}
    pinned = tuple(choice.name for choice in PINNED_ONLY)
    for capabilities in (able(), megatron_like(), deepspeed_like()):
        for rule in rules_of(capabilities, GIVEN):
            names = (*rule.needs, *pinned, *(("num_microbatches",) if rule.id == "batch" else ()))
            answers = defaultdict(set)
            for key, candidate in zip(zip(*(said[name] for name in names if name in said), strict=True), candidates, strict=True):
                answers[key].add(rule.check(candidate, GIVEN))
            assert all(len(found) == 1 for found in answers.values()), rule.id


def test_modes_of_recompute_stand_beside_each_other_as_the_engine_says() -> None:
    """In a job the layers that are recomputed in full have others beside them that aren't; no other mode has."""
    modes = ("none", "selective", "full")
    assert megatron_like(recompute_varies="stage").beside(modes) == megatron_like(recompute_varies="layer").beside(modes) == [modes]
    assert megatron_like(recompute_varies="job").beside(modes) == [("none", "full"), ("selective",)]
    assert megatron_like(recompute_varies="never").beside(modes) == [("none",), ("selective",), ("full",)]
    assert megatron_like(recompute_varies="job").beside(("selective",)) == [("selective",)]


def test_an_engine_with_more_refuses_nothing_that_one_with_less_takes() -> None:
    """Each field alone, from an engine that has little to one that has all."""
    rng = random.Random(7)
    candidates = [drawn(rng) for _ in range(1500)]
    most = able(schedules=("1f1b", "interleaved", "deepspeed_1f1b"))
    least = deepspeed_like(
        engine="megatron", axes=("pp", "dp"), zero_stages=(0,), zero_stages_with_pipeline=(0,), offload_optimizer=False,
        recompute=("none",), sequence_parallel=False, rules=(),
    )  # fmt: skip
    fields = [name for name in Capabilities.__struct_fields__ if getattr(most, name) != getattr(least, name)]
    assert len(fields) >= 12
    taken = [{candidate for candidate in candidates if not broken(least, candidate)}]
    grown = least
    for name in rng.sample(fields, len(fields)):
        grown = replace(grown, **{name: getattr(most, name)})
        taken.append({candidate for candidate in candidates if not broken(grown, candidate)})
        assert taken[-2] <= taken[-1], name
    assert 0 < len(taken[0]) < len(taken[-1])


@pytest.mark.parametrize("uneven", [True, False])
def test_embedding_and_head_may_have_stages_and_chunks_of_their_own_where_stages_are_uneven(uneven: bool) -> None:
    """12 layers: 14 stages at most, or 7 of two chunks; where all must have as many, a divisor of 12."""
    engine = able(uneven_stages=uneven)
    for pp in range(1, 30):
        refused = broken(engine, chosen(pp=pp))
        assert ("stages" in refused) == (pp > 14 if uneven else 12 % pp > 0)
        for vpp in (2, 3) if pp > 1 else ():
            refused = broken(engine, chosen(pp=pp, vpp=vpp))
            assert ("chunks" in refused) == (pp * vpp > 14 if uneven else 12 % (pp * vpp) > 0)


@pytest.mark.parametrize(
    ("sizes", "pp", "fits"),
    [((8, 16), 1, False), ((8, 16), 2, False), ((8, 16), 3, True), ((8, 16), 4, False), ((8, 16), 6, True), ((4, 4, 8), 2, False),
     ((4, 4, 8), 4, True), ((4, 8, 4), 4, True), ((4, 2, 2), 4, True), ((4, 2, 2), 2, False)],
)  # fmt: skip
def test_a_stage_has_gpus_of_one_type(sizes: tuple[int, ...], pp: int, fits: bool) -> None:
    """Whether the types' borders are borders of stages, and so of all groups of ranks but the pipeline's."""
    parts = tuple(replace(cluster(size, gpus_per_node=size), name=f"part{size}") for size in sizes)
    mixed = replace(cluster(sum(sizes)), parts=parts)
    why = types_of_gpu(chosen(pp=pp, dp=sum(sizes) // pp), replace(GIVEN, cluster=mixed))
    assert (why is None) == fits
    if pp == 1:
        assert "all axes of parallelism but pp have GPUs of two types" in str(why)
    elif not fits:
        assert f"one of its stages of {sum(sizes) / pp:g} GPUs has GPUs of two types" in str(why)


@pytest.mark.parametrize(("capability", "precision", "runs"), [("7.5", "bf16", False), ("8.0", "bf16", True), ("7.5", "fp16", True)])
def test_bf16_is_arithmetic_from_ampere_on(capability: str, precision: str, runs: bool) -> None:
    here = replace(GIVEN.cluster, gpu=replace(GIVEN.cluster.gpu, compute_capability=capability))
    given = replace(GIVEN, cluster=here, training=replace(GIVEN.training, precision=precision))
    assert (precision_here(chosen(), given) is None) == runs


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32", "fp8", "nvfp4"])
def test_gradients_are_fp32_or_as_wide_as_the_weights(precision: Any) -> None:
    own = {"fp8": "bf16", "nvfp4": "bf16"}.get(precision, precision)
    for dtype in ("bf16", "fp16", "fp32"):
        for name in ("grad_accum_dtype", "grad_reduce_dtype"):
            other = {"grad_accum_dtype": "fp32", "grad_reduce_dtype": "fp32"} | {name: dtype}
            why = gradient_dtype(chosen(), replace(GIVEN, training=replace(GIVEN.training, precision=precision, **other)))
            assert (why is None) == (dtype in ("fp32", own))
            assert why is None or name in why


@pytest.mark.parametrize("name", ["exp_avg_dtype", "exp_avg_sq_dtype"])
def test_narrow_moments_need_the_optimizer_that_knows_of_them(name: str) -> None:
    """Either of the two."""
    plain = replace(GIVEN, training=replace(GIVEN.training, **{name: "bf16"}))
    assert broken(able(), chosen(), plain) == {"optimizer_dtypes": f"{name}=bf16 needs precision_aware_optimizer=true"}
    aware = replace(plain, training=replace(plain.training, precision_aware_optimizer=True))
    assert broken(able(), chosen(), aware) == {}


def test_on_several_types_of_gpu_a_stages_ranks_are_neighbours() -> None:
    mixed = replace(GIVEN, cluster=replace(GIVEN.cluster, parts=(GIVEN.cluster, GIVEN.cluster)))
    assert types_order(chosen(pp=2), mixed) is None
    assert "tp-cp-ep-pp-dp spreads a stage over GPUs of several types" in str(types_order(chosen(pp=2, order=PP_BEFORE_DP), mixed))
