"""The engines' own code as the judge: every plan builds from Megatron's classes at its world size, every ds_config is read by DeepSpeed,
and what our rules refuse for a reason of the engine's does not build."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from covering_plans import ALL, DEEPSPEED
from hand_plans import BARE, CPU, GPT, LLAMA, SMALL, engine_fields, make_plan, training_for, workload_of
from msgspec.structs import replace

from orchestrator import run
from orchestrator.engines import ENGINES
from orchestrator.engines.transformer_config import layer_counts
from orchestrator.model.families import describe
from orchestrator.plan import Plan, from_json
from orchestrator.strategy.legality import broken_rule, rules_of
from orchestrator.strategy.tree import divisors

pytestmark = [pytest.mark.engines, pytest.mark.xdist_group("built")]  # one `answers`

RANDOM_PLANS = 40
SEED = 7


def bare(plan: Plan) -> Plan:
    """The same plan on a machine without GPU, Transformer Engine and Apex, as this one: only fused kernels differ, and what the second
    alone has, FP8 and the precision-aware optimizer (test_new_gpu_choices.py)."""
    plain = {"precision_aware_optimizer": False, "exp_avg_dtype": "fp32", "exp_avg_sq_dtype": "fp32", "fp8_recipe": None}
    training = replace(plan.training, **plain, precision="bf16" if plan.training.precision == "fp8" else plan.training.precision)
    return replace(plan, cluster=replace(plan.cluster, gpu=CPU, software=BARE), training=training, fp8_param_gather=False)


def as_case(plan: Plan) -> dict[str, Any]:
    plan = bare(plan)
    job = ENGINES[plan.engine].translate(plan)
    files = {file.path: json.loads(file.content) for file in job.files if file.path in ("engine.json", "ds_config.json")}
    if plan.cp > 1:
        # A plan that passed the rules has Transformer Engine's attention. The local one stands in: no weights either, whole sequences.
        files["engine.json"]["transformer_config"]["context_parallel_size"] = 1
    plain = json.loads(msgspec.json.encode(plan))
    return {"plan": plain, "engine": files["engine.json"], "by_hand": files.get("ds_config.json")}


def unchecked_case(plan: Plan) -> dict[str, Any]:
    """Without the translation's own refusals."""
    plan = bare(plan)
    return {"plan": json.loads(msgspec.json.encode(plan)), "engine": engine_fields(plan) | {"ds_config": None}, "by_hand": None}


def random_legal_plans() -> dict[str, Plan]:
    """Plans that pass all rules, with stages and recompute of every shape that the values can say; the same ones in every run."""
    rng = random.Random(SEED)
    found: dict[str, Plan] = {}
    while len(found) < RANDOM_PLANS:
        engine = rng.choice(("megatron", "megatron_deepspeed"))
        model = SMALL[rng.choice(list(SMALL))]
        world = rng.choice((1, 2, 4, 6, 8, 12, 16, 32))
        tp, pp, vpp = rng.choice(divisors(world)), rng.choice(divisors(world)), rng.choice((1, 1, 2, 3))
        training = training_for(model, global_batch_size=rng.choice((48, 64, 96)), precision=rng.choice(("bf16", "fp32")))
        if world % (tp * pp) or (vpp > 1 and pp == 1):
            continue
        layers = model.num_layers + model.decoder_num_layers
        cuts = sorted(rng.randint(0, layers) for _ in range(pp * vpp - 1))
        sizes = [end - start for start, end in zip([0, *cuts], [*cuts, layers], strict=True)]
        mode = rng.choice(("none", "selective", "full"))
        micro_batch_size = rng.choice((1, 2))
        dp = world // (tp * pp)
        if training.global_batch_size % (dp * micro_batch_size):
            continue
        plan = make_plan(
            engine,
            model,
            gpu="H100-SXM-80GB",
            world=world,
            training=training,
            tp=tp,
            pp=pp,
            vpp=vpp,
            zero_stage=rng.choice((0, 1, 2, 3)),
            micro_batch_size=micro_batch_size,
            sequence_parallel=rng.choice((True, False)),
            sizes=sizes,
            recompute=[(mode, layers if mode == "selective" else rng.randint(1, layers)) for _ in range(pp)],  # type: ignore[misc]
        )
        plan = replace(plan, cluster=replace(plan.cluster, gpus_per_node=world))
        if broken_rule(ENGINES[engine].capabilities(plan.cluster.software), plan.candidate, workload_of(plan)) is None:
            found[f"{len(found)}: {plan.candidate.label()} {model.family} {sizes}"] = plan
    return found


def with_degrees(plan: Plan, **degrees: int) -> Plan:
    return replace(plan, **degrees)


def illegal_plans() -> dict[str, tuple[Plan, str]]:
    """What Megatron itself refuses (illegal_top15), beside the rule of ours that must refuse it before."""
    four = make_plan(world=16, tp=2, pp=2)
    grouped = replace(LLAMA, num_attention_heads=24, num_query_groups=6, hidden_size=192)
    vpp = make_plan(model=replace(GPT, num_layers=6), pp=2, vpp=3, training=training_for(GPT, global_batch_size=12))
    return {
        "world": (replace(make_plan(world=8, tp=4), world_size=10, cluster=replace(four.cluster, num_gpus=10)), "mesh"),
        "heads": (make_plan(world=12, tp=3, training=training_for(GPT, global_batch_size=48)), "heads_tp"),
        "groups": (make_plan(model=grouped, world=8, tp=4), "groups_tp"),
        "ffn": (make_plan(model=replace(GPT, ffn_hidden_size=250), tp=4), "ffn_tp"),
        "sp without tp": (make_plan(sequence_parallel=True), "sequence_parallel"),
        "batch": (replace(make_plan(), global_batch_size=100, training=training_for(GPT, global_batch_size=100)), "batch"),
        "cp without transformer engine": (make_plan(cp=2, software=BARE), "cp_te"),
        "vpp without pp": (replace(make_plan(), vpp=2, schedule="interleaved"), "chunks"),
        "micro-batches of an interleaved schedule": (replace(vpp, num_microbatches=3), "vpp_M"),
    }


RANDOM = random_legal_plans()
ILLEGAL = illegal_plans()
INTERLEAVED = [(pp, m, group) for pp in (2, 3, 4) for m in range(1, 10) for group in (None, *(range(1, m + 2) if m in (6, 9) else ()))]


RECIPES = {"t5_large": 16, "llama3_70b": 64, "gpt3_175b": 1024}


@cache
def searched() -> dict[str, Plan]:
    """What the command writes for these recipes and numbers of GPUs."""
    plans = {}
    with tempfile.TemporaryDirectory() as folder:
        for recipe, gpus in RECIPES.items():
            out = Path(folder) / recipe
            assert run.main([f"recipe={recipe}", f"gpus={gpus}", "launch=none", f"out={out}"]) == 0
            plans[recipe] = from_json((out / "plan.json").read_text())
    return plans


@cache
def answers() -> dict[str, Any]:
    """All plans judged in one process."""
    cases = {name: as_case(plan) for name, plan in (ALL | RANDOM).items()}
    cases |= {f"illegal {name}": unchecked_case(plan) for name, (plan, _) in ILLEGAL.items()}
    cases |= {f"interleaved {pp} {m} {group}": {"pp": pp, "num_microbatches": m, "group": group} for pp, m, group in INTERLEAVED}
    zero0 = as_case(make_plan("megatron_deepspeed", zero_stage=0))
    zero0["by_hand"]["data_types"] = {"grad_accum_dtype": "fp32"}
    cases["illegal sums at stage 0"] = zero0
    cases |= {f"searched {recipe}": as_case(plan) for recipe, plan in searched().items()}
    program = Path(__file__).parent / "build_ranks.py"
    done = subprocess.run(
        [sys.executable, str(program)], input=json.dumps(list(cases.values())), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("ANSWERS "))
    return dict(zip(cases, json.loads(line.removeprefix("ANSWERS ")), strict=True))


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_the_search_chooses_for_large_models_builds(recipe: str) -> None:
    """From the shell to Megatron's own classes: the plans of issue 2."""
    plan, answer = searched()[recipe], answers()[f"searched {recipe}"]
    assert "error" not in answer, answer
    assert built_chunks(answer) == expected_chunks(plan)
    assert plan.world_size == RECIPES[recipe]


def built_chunks(answer: dict[str, Any]) -> list[list[tuple[int, bool, bool]]]:
    return [[(chunk["layers"], chunk["embedding"], chunk["head"]) for chunk in chunks] for chunks in answer["stages"]]


def expected_chunks(plan: Plan) -> list[list[tuple[int, bool, bool]]]:
    counts = layer_counts(plan)
    last = (plan.vpp - 1, plan.pp - 1)
    return [
        [(counts[chunk][stage], (chunk, stage) == (0, 0), (chunk, stage) == last) for chunk in range(plan.vpp)] for stage in range(plan.pp)
    ]


@pytest.mark.parametrize("name", [*ALL, *RANDOM])
def test_megatron_builds_the_stages_that_the_plan_says(name: str) -> None:
    """A candidate that passes all rules builds."""
    plan, answer = (ALL | RANDOM)[name], answers()[name]
    assert "error" not in answer, answer
    assert built_chunks(answer) == expected_chunks(plan)
    assert answer["num_microbatches"] == plan.num_microbatches


@pytest.mark.parametrize("name", [*ALL, *RANDOM])
def test_our_layers_have_as_many_parameters_as_megatrons(name: str) -> None:
    """Per rank, tied copies included: what the planner counts is what is built."""
    plan = (ALL | RANDOM)[name]
    spec = describe(plan.model, plan.training.seq_length, plan.training.decoder_seq_length)
    for stage, chunks in zip(plan.stages, answers()[name]["stages"], strict=True):
        kinds = {span.kind for span in stage.layers}
        both = {"embedding", "head"} <= kinds and plan.pp == 1
        ours = sum(spec.kind(span.kind).local_parameters(plan.tp, with_tied=not both) * span.count for span in stage.layers)
        assert sum(chunk["parameters"] for chunk in chunks) == ours


@pytest.mark.parametrize("name", [*DEEPSPEED, *(name for name, plan in RANDOM.items() if plan.engine == "megatron_deepspeed")])
def test_deepspeed_reads_the_config_as_it_is_meant(name: str) -> None:
    plan, answer = (ALL | RANDOM)[name], answers()[name]
    assert "error" not in answer, answer
    mixed = plan.training.precision != "fp32"
    for read in (answer["deepspeed"], answer["by_hand"]):
        assert read["world_size"] == plan.dp
        assert read["train_batch_size"] == plan.global_batch_size
        assert (read["micro_batch_size"], read["num_microbatches"]) == (plan.micro_batch_size, plan.num_microbatches)
        assert (read["clip"], read["zero_stage"]) == (plan.training.clip, plan.zero_stage)
        assert read["grad_accum_dtype"] == (plan.training.grad_accum_dtype if mixed and plan.zero_stage else None)
        assert read["offload"] == plan.offload_optimizer
        assert read["communication_data_type"] == {"fp32": "torch.float32", "bf16": "torch.bfloat16"}[plan.training.grad_reduce_dtype]


def deepspeed_plans() -> list[str]:
    """Those that a CPU can initialise: small, and not in fp16."""
    plans = {name: plan for name, plan in (DEEPSPEED | RANDOM).items() if plan.engine == "megatron_deepspeed"}
    return [name for name, plan in plans.items() if plan.model.hidden_size <= 64 and plan.training.precision != "fp16"]


@pytest.mark.parametrize("name", deepspeed_plans())
def test_deepspeeds_engine_takes_model_groups_and_config(name: str) -> None:
    """deepspeed.initialize on rank 0 of the planned world; the optimizer around the model is the one that the traits prices."""
    plan, found = (ALL | RANDOM)[name], answers()[name]
    assert "error" not in found, found
    mixed = plan.training.precision != "fp32"
    if plan.zero_stage == 3:
        expected = "DeepSpeedZeroOptimizer_Stage3"
    elif plan.zero_stage == 1 and mixed and plan.training.grad_accum_dtype == "fp32":
        expected = "BF16_Optimizer"
    elif plan.zero_stage:
        expected = "DeepSpeedZeroOptimizer"
    else:
        expected = "FP16_UnfusedOptimizer" if mixed else "AdamW"
    assert found["optimizer"] == expected
    assert found["schedule"] == "NoneType", "a script gives it"


def test_deepspeed_refuses_fp32_sums_at_stage_0_as_our_rule_does() -> None:
    """Rule gad_mix."""
    assert "unsupported mix" in answers()["illegal sums at stage 0"]["error"]


@pytest.mark.parametrize("name", ILLEGAL)
def test_what_megatron_refuses_our_rules_refuse_before(name: str) -> None:
    plan, rule = ILLEGAL[name]
    rules = {rule.id: rule for rule in rules_of(ENGINES["megatron"].capabilities(plan.cluster.software), workload_of(plan))}
    assert rules[rule].check(plan.candidate, workload_of(plan)) is not None
    if rule != "vpp_M":  # Megatron sees that only in the first step
        assert "error" in answers()[f"illegal {name}"]


@pytest.mark.parametrize(("pp", "microbatches", "group"), INTERLEAVED)
def test_the_interleaved_schedule_refuses_what_our_rule_refuses(pp: int, microbatches: int, group: int | None) -> None:
    """Rule vpp_M against the schedule itself."""
    plan = make_plan(
        world=pp, pp=pp, vpp=2, sizes=[1] * (2 * pp - 1) + [9 - 2 * pp], training=training_for(GPT, global_batch_size=microbatches)
    )
    plan = replace(plan, microbatch_group_size_per_vp_stage=group)
    rules = {rule.id: rule for rule in ENGINES["megatron"].capabilities(BARE).rules}
    refused = rules["vpp_M"].check(plan.candidate, workload_of(plan)) is not None
    assert refused == answers()[f"interleaved {pp} {microbatches} {group}"]


def test_a_random_plan_is_not_one_shape() -> None:
    """The property is worth something only if the draws cover what may differ."""
    plans = list(RANDOM.values())
    assert {plan.engine for plan in plans} == {"megatron", "megatron_deepspeed"}
    assert {plan.model.family for plan in plans} == set(SMALL)
    assert {plan.zero_stage for plan in plans} == {0, 1, 2, 3}
    assert any(plan.vpp > 1 for plan in plans)
    assert any(plan.sequence_parallel for plan in plans)
    assert any(len({count for row in layer_counts(plan) for count in row}) > 1 for plan in plans)
