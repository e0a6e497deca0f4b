"""A user's own DeepSpeed script: what it is given, and what of DeepSpeed's config the user keeps."""

from __future__ import annotations

import json
from typing import Any

import pytest

import orchestrator as so
from orchestrator.engines.deepspeed.entry import DS_CONFIG, MONITOR, start
from orchestrator.engines.engine import Entry
from orchestrator.errors import InputError
from orchestrator.job import File, Job
from orchestrator.plan import Plan

CONFIG = {"train_batch_size": 8, "wall_clock_breakdown": False}
OTHER = File(path="plan.json", content='{"a": 1}')


@pytest.fixture(scope="module")
def plan() -> Plan:
    return so.plan(recipe="gpt_tiny", gpus=2, cluster="cpu", engine="deepspeed", pin={"tp": 1}).plan


def started(plan: Plan, config: dict[str, Any] = CONFIG, **entry: Any) -> Job:
    files = (File(path=DS_CONFIG[1], content=json.dumps(config)), OTHER)
    job = Job(
        name="x", module="ours", arguments=("--ours",), files=files, environment={"A": "1"}, num_nodes=1, ranks_per_node=2, backend="gloo"
    )
    return start(plan, job, Entry(program="train.py", **entry))


def test_deepspeed_writes_its_times_unless_the_user_said_otherwise(plan: Plan) -> None:
    config, other = started(plan).files
    assert json.loads(config.content) == MONITOR | CONFIG, "the user's own wall_clock_breakdown stays"
    assert other == OTHER


def test_a_trial_is_measured_whatever_the_user_said_and_tells_no_one_else(plan: Plan) -> None:
    mine = CONFIG | {"wandb": {"enabled": True}, "tensorboard": {"enabled": True}}
    config, _ = started(plan, mine, trial_steps=3).files
    assert json.loads(config.content) == MONITOR | {"train_batch_size": 8}
    config, _ = started(plan, mine).files
    assert json.loads(config.content) == MONITOR | mine


def test_plans_can_not_be_told_apart_by_a_script_that_never_sees_them(plan: Plan) -> None:
    for words in (("--deepspeed_config", "mine.json"), ("--deepspeed_config=../ds_config.json",)):
        with pytest.raises(InputError, match=r"is the same for all plans that tune= tries; theirs: ds_config\.json"):
            started(plan, arguments=words, trial_steps=3)
        assert started(plan, arguments=words).arguments == words
    ours = ("--deepspeed", "--deepspeed_config", "./ds_config.json")
    assert started(plan, arguments=ours, trial_steps=3).arguments == ours


def test_the_script_gets_the_config_before_the_users_arguments(plan: Plan) -> None:
    job = started(plan, arguments=("--hidden", "4"), launcher="deepspeed")
    assert (job.program, job.arguments, job.launcher) == ("train.py", (*DS_CONFIG, "--hidden", "4"), "deepspeed")
    assert job.environment["A"] == "1"
    own = started(plan, arguments=("--deepspeed", "--deepspeed_config=mine.json"))
    assert own.arguments == ("--deepspeed", "--deepspeed_config=mine.json")


def test_words_that_are_ours_or_megatrons_are_refused(plan: Plan) -> None:
    with pytest.raises(InputError, match=r"entry\.args=--deepspeed: is ours"):
        started(plan, arguments=("--deepspeed",))
    with pytest.raises(InputError, match="is for Megatron's programs"):
        started(plan, without=("--async-save",))
