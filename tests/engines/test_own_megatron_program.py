"""Megatron-LM's own program in place of our worker: what it is started with, and whose words win."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from covering_plans import BERT, make_plan
from msgspec.structs import replace

from orchestrator.engines.engine import Entry
from orchestrator.engines.entry import timeout_minutes
from orchestrator.engines.megatron.entry import arguments, start, useful_flags
from orchestrator.engines.megatron.own import own_job, why_absent, why_not_own
from orchestrator.engines.megatron_args import megatron_flags
from orchestrator.errors import InputError
from orchestrator.hardware.catalog import GPUS
from orchestrator.job import Job
from orchestrator.launch.render import launch_sh
from orchestrator.model.training import Lora
from orchestrator.plan import Plan, RunSettings, Source

PLAN = make_plan(run=RunSettings(save_every=10))


JOB = Job(name="x", module="ours", arguments=(), files=(), environment={}, num_nodes=1, ranks_per_node=2, backend="gloo")


def words(plan: Plan = PLAN, **entry: Any) -> tuple[str, ...]:
    return arguments(plan, Entry(program="pretrain_gpt.py", **entry))


def names(plan: Plan, exit_minutes: int | None = None) -> set[str]:
    return {flag[0] for flag in useful_flags(plan, exit_minutes)}


def test_what_nobody_watches_saves_when_it_must_leave() -> None:
    saving = {"--exit-signal-handler", "--exit-signal"}
    assert saving <= names(PLAN)
    assert not saving & names(make_plan()), "without checkpoints there is nothing to go on from"
    assert ("--exit-duration-in-mins", "50") in useful_flags(PLAN, 50)
    for limit in (None, 0):
        assert "--exit-duration-in-mins" not in names(PLAN, limit)
    assert "--exit-duration-in-mins" not in names(make_plan(), 50)
    on_gpus = replace(PLAN, cluster=replace(PLAN.cluster, gpu=GPUS["H100-SXM-80GB"]))
    on_cpus = replace(PLAN, cluster=replace(PLAN.cluster, gpu=GPUS["cpu"]))
    beside = {"--async-save", "--use-persistent-ckpt-worker"}
    assert names(on_gpus) - names(on_cpus) == {"--log-straggler", *beside}, "what is started for it lacks megatron-core's shims"
    sharded, whole = (replace(on_gpus, zero_stage=stage) for stage in (1, 0))
    assert names(sharded) - names(whole) == {"--dist-ckpt-optim-fully-reshardable"}


@pytest.mark.parametrize(("seconds", "minutes"), [(30.0, 1), (60.0, 1), (61.0, 2), (1200.0, 20), (0.0, None)])
def test_a_collective_may_last_as_many_minutes_as_a_step_may(seconds: float, minutes: int | None) -> None:
    plan = replace(PLAN, run=replace(PLAN.run, step_timeout_s=seconds))
    assert timeout_minutes(plan) == minutes
    assert (("--distributed-timeout-minutes", str(minutes)) in useful_flags(plan)) == (minutes is not None)
    assert timeout_minutes(PLAN) is None, "the program's own where nothing was said"


def test_the_users_words_come_last_and_take_the_place_of_ours_where_they_decide_no_plan() -> None:
    ours = words()
    assert "--mock-data" in ours
    own = words(arguments=("--eval-interval=7", "--data-path", "mine", "--my-flag"))
    assert own[-4:] == ("--eval-interval=7", "--data-path", "mine", "--my-flag")
    assert "--eval-interval" in ours
    assert "--eval-interval" not in own
    assert "--mock-data" not in own, "the user's data are no mock"
    assert "--log-throughput" in ours
    less = words(without=("--log-throughput",))
    assert [word for word in ours if word != "--log-throughput"] == list(less)


def test_a_trial_takes_its_steps_of_the_whole_training_and_leaves_nothing_behind() -> None:
    mine = ("--save", "/there", "--split", "98,2,0", "--load=/there", "--log-interval", "100", "--profile", "--my-flag")
    whole = megatron_flags(make_plan())
    trial = arguments(make_plan(), Entry(program="pretrain_gpt.py", arguments=mine, without=("--log-throughput",), trial_steps=3))
    assert trial[-3:] == ("--split", "98,2,0", "--my-flag")
    pairs = list(itertools.pairwise(trial))
    assert ("--train-iters", "3") in pairs
    steps = next(flag[1] for flag in whole if flag[0] == "--train-iters")
    assert int(steps) > 3
    assert ("--lr-decay-iters", steps) in pairs
    assert ("--log-interval", "1") in pairs, "a line a step"
    assert not {"--save", "--load=/there", "--profile", "100"} & {*trial}
    for refused in (("--lr", "1"), ("--train-iters", "3")):
        with pytest.raises(InputError, match="the plan says"):
            words(arguments=refused, trial_steps=3)


def test_a_word_that_contradicts_the_plan_is_refused_with_what_the_plan_says() -> None:
    flag = next(flag for flag in megatron_flags(PLAN) if flag[0] == "--tensor-model-parallel-size")
    for said in ((flag[0], "2"), (f"{flag[0]}=2",)):
        with pytest.raises(InputError, match=f"the plan says {' '.join(flag)}") as error:
            words(arguments=said)
        assert (error.value.key, error.value.value) == ("entry.args", flag[0])
    with pytest.raises(InputError, match="is no flag that we add"):
        words(without=("--tensor-model-parallel-size",))


def test_deepspeeds_launcher_is_not_for_it() -> None:
    assert start(PLAN, JOB, Entry(program="pretrain_gpt.py")).arguments == words()
    with pytest.raises(InputError, match="starts DeepSpeed's scripts"):
        start(PLAN, JOB, Entry(program="pretrain_gpt.py", launcher="deepspeed"))


REFUSED: dict[str, tuple[Plan, str]] = {
    "routing": (make_plan(run=RunSettings(trace_routing=True)), "train.trace_routing"),
    "adapters": (replace(PLAN, training=replace(PLAN.training, lora=Lora(rank=4))), "LoRA"),
    "a vocabulary": (make_plan(model=BERT), "vocabulary file of BERT's"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_megatrons_own_loop_can_not_train_is_said(name: str) -> None:
    plan, said = REFUSED[name]
    assert said in str(why_not_own(plan))
    assert why_not_own(PLAN) is None


def test_megatrons_own_loop_gets_the_arguments_of_the_file_and_looks_at_the_loss_itself() -> None:
    own = own_job(PLAN, replace(JOB, without_worker="it has no such layers"))
    assert not own.without_worker, "what our worker can't train Megatron's loop may"
    assert own.module == "orchestrator.programs.megatron"
    assert own.program is None
    plan = make_plan(run=RunSettings(data="/a.idx"))
    of_file = [word for flag in megatron_flags(plan) for word in flag]
    assert list(own_job(plan, JOB).arguments[: len(of_file)]) == of_file
    assert own.arguments[-1] == "--no-check-for-nan-in-loss-and-grad"
    assert f"\n# {own.arguments[-1]}: all ranks look at each loss together" in launch_sh(own)


def test_text_is_read_as_the_corpora_that_the_ranks_make_of_it_each_share_one_of_its_own() -> None:
    sources = (Source(weight=0.25, path="/a.txt"), Source(weight=0.75, path="/b.jsonl"))
    blended = own_job(make_plan(run=RunSettings(blend=sources, split=(9, 1, 0), eval_every=2)), JOB).arguments
    at = blended.index("--train-data-path")
    assert blended[at + 1 : at + 5] == ("0.25", "data/train-0", "0.75", "data/train-1")
    assert blended[at + 5 : at + 10] == ("--valid-data-path", "0.25", "data/valid-0", "0.75", "data/valid-1")
    made_up = own_job(make_plan(run=RunSettings()), JOB).arguments
    assert made_up[made_up.index("--train-data-path") :][1:3] == ("1.0", "data/train-0")
    assert "--valid-data-path" not in made_up
    assert {"--mock-data", "--split"}.isdisjoint({*blended, *made_up})
    indexed = own_job(make_plan(run=RunSettings(data="/a.idx")), JOB).arguments
    assert "--split" in indexed
    assert indexed[indexed.index("--data-path") + 1] == "/a"


def test_the_wheel_has_a_loop_from_0_19_on() -> None:
    def of(version: str) -> Plan:
        cluster = replace(PLAN.cluster, software=replace(PLAN.cluster.software, megatron_core=version))
        return replace(PLAN, cluster=cluster)

    assert why_absent(of("0.19.0")) is None
    assert str(why_absent(of("0.16.1"))).startswith("megatron-core 0.16.1 has no training loop of its own: megatron-core>=0.19")


def test_recompute_that_differs_by_stage_is_left_to_engine_json() -> None:
    plan = make_plan(pp=2, recompute=[("full", 4), ("none", 0)])
    assert why_not_own(plan) is None
    job = own_job(plan, JOB)
    assert not [word for word in job.arguments if word.startswith("--recompute")]
    [file] = job.files  # of a model that our worker can't train: for any other it has one
    assert [stage["recompute_granularity"] for stage in json.loads(file.content)["per_stage"]] == ["full", None]
    assert own_job(plan, replace(JOB, files=(file,))).files == (file,)
    same = own_job(make_plan(pp=2, recompute=[("full", 4), ("full", 4)]), JOB).arguments
    assert same[same.index("--recompute-granularity") + 1] == "full"


def test_supervised_samples_are_read_by_the_program_and_have_one_mean() -> None:
    plan = replace(PLAN, training=replace(PLAN.training, task="sft", packing=False), run=RunSettings(data="chats.jsonl"))
    assert why_not_own(plan) is None
    words = own_job(plan, JOB).arguments
    assert "--calculate-per-token-loss" in words
    assert not {"--mock-data", "--data-path", "--train-data-path", "--split"} & {*words}


@pytest.mark.parametrize(("vocabulary", "said"), [(257, ("--padded-vocab-size", "384")), (256, None), (300, None)])
def test_a_vocabulary_that_ends_behind_a_multiple_says_its_padded_size(vocabulary: int, said: tuple[str, str] | None) -> None:
    """0.19's NullTokenizer has one id fewer than the one of before, which is a padding's length where it ends there."""
    plan = make_plan(model=replace(PLAN.model, vocab_size=vocabulary), run=RunSettings())
    flags = megatron_flags(plan)
    assert ("--vocab-size", str(vocabulary - 1)) in flags
    assert next((flag for flag in flags if flag[0] == "--padded-vocab-size"), None) == said
