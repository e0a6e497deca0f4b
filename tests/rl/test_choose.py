"""Which placement is chosen, and that nothing faster was left out."""

from __future__ import annotations

from itertools import pairwise

import pytest
from msgspec.structs import replace
from rl_cases import SMALL, asker

from orchestrator.asking import reinforcement
from orchestrator.asking.reinforcement import MICRO_BATCH_TOKENS
from orchestrator.errors import NoPlanError
from orchestrator.rl.choose import ASLEEP, Question, divisions, fastest, fastest_generation, layouts
from orchestrator.rl.generation import generation, room
from orchestrator.rl.step import STATES, Step, loss_bytes, states_bytes, step


def asked(question: Question, **keys: object) -> Question:
    return replace(question, job=replace(question.job, keys=replace(question.job.keys, **keys)))


@pytest.mark.parametrize(("recipe", "gpus"), [("qwen3_8b", 8), ("qwen3_8b", 32), ("qwen3_30b_a3b", 16)])
def test_a_division_is_as_fast_as_the_best_of_all(recipe: str, gpus: int) -> None:
    ask = asker(f"recipe={recipe}", f"gpus={gpus}", "cluster=dgx_h100")
    question = asked(ask.question, staleness=1)
    every: list[Step] = []
    for size in divisions(question.cluster):
        made, _ = fastest_generation(question, size, question.job.keys.memory_share * question.cluster.gpu.memory)
        try:
            plan = ask(gpus - size, 0.0)
        except NoPlanError:
            continue
        assert made is not None
        every.append(step(question.job, question.cluster, question.calibration, made, {"policy": plan}, colocated=False, offloads=False))
    chosen = fastest(asked(question, placement="split"), ask)
    assert chosen.best.seconds == min(one.seconds for one in every)
    both = fastest(question, ask)
    assert both.best.seconds == min(one.seconds for one in (chosen.best, *both.others, both.best))


@pytest.mark.parametrize(("recipe", "longest"), [("qwen3_8b", 800), ("llama3_8b", 7900)])
def test_no_micro_batch_of_more_tokens_would_be_faster(recipe: str, longest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are most of what a search would look at."""
    words = (f"recipe={recipe}", "gpus=16", "cluster=dgx_h100")
    of = (*SMALL[:3], f"rl.response_length={longest // 4}+{longest // 4}", f"rl.max_response_length={longest}")
    plan = asker(*words, of=of)(16, 0.0)
    assert plan.micro_batch_size * plan.training.seq_length <= max(MICRO_BATCH_TOKENS, plan.training.seq_length)
    monkeypatch.setattr(reinforcement, "MICRO_BATCH_TOKENS", 10**9)
    assert asker(*words, of=of)(16, 0.0).prediction.step_time_s == pytest.approx(plan.prediction.step_time_s, rel=0.01)


def test_brute_force_over_a_small_space_agrees() -> None:
    """All layouts of generation beside each of eight of training, with states that stay or go; the planner's own is within a percent."""
    words = ("recipe=qwen3_8b", "gpus=8", "cluster=dgx_h100", "rl.program=verl", "rl.placement=colocated")
    question = asker(*words).question
    job, gpu, every = question.job, question.cluster.gpu, []
    for tp, pp in ((1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1), (4, 2), (8, 1)):
        plan = asker(*words, f"pin.tp={tp}", f"pin.pp={pp}")(8, ASLEEP)
        for offloads in (False, True):
            kept = question.calibration.context_bytes + (0.0 if offloads else states_bytes(plan, STATES))
            for decoder in layouts(question, 8):
                found = room(decoder, job, min(job.keys.memory_share * gpu.memory, gpu.memory - kept))
                if not found.lacking:
                    made = generation(decoder, job, 8, found)
                    every.append(step(job, question.cluster, question.calibration, made, {"policy": plan}, colocated=True,
                                      offloads=offloads).seconds)  # fmt: skip
    best = fastest(question, asker(*words)).best
    assert len(every) > 50
    assert min(every) == pytest.approx(best.seconds, rel=0.01)
    assert max(every) > 1.5 * best.seconds


def test_divisions_of_many_gpus_are_whole_engines_of_large_models() -> None:
    cluster = asker("recipe=deepseek_v3", "gpus=512", "cluster=dgx_h100", of=(*SMALL[:4], "rl.max_response_length=3800")).question.cluster
    assert divisions(cluster) == list(range(32, 512, 32))


def test_phases_of_one_pool_follow_each_other_and_what_they_wait_for() -> None:
    ask = asker("recipe=qwen3_8b", "gpus=8", "cluster=dgx_h100", "rl.algorithm=ppo", "rl.reference=true", "rl.reward=model")
    for one in (fastest(ask.question, ask).best, fastest(asked(ask.question, placement="split"), ask).best):
        phases = {phase.name: phase for phase in one.phases}
        assert {"generate", "reward", "values", "update critic", "reference log-probabilities"} <= {*phases}
        for phase in one.phases:
            assert all(phase.starts_s >= phases[name].ends_s - 1e-9 for name in phase.after)
        for pool in {phase.pool for phase in one.phases}:
            mine = sorted((phase for phase in one.phases if phase.pool == pool), key=lambda phase: phase.starts_s)
            assert all(later.starts_s >= before.ends_s - 1e-9 for before, later in pairwise(mine))
        assert one.seconds == max(phase.ends_s for phase in one.phases)
        assert one.interval[0] < one.seconds < one.interval[1]


@pytest.mark.parametrize(
    ("algorithm", "passes"),
    [
        ("grpo", {"old log-probabilities"}),
        ("ppo", {"old log-probabilities", "values", "update critic"}),
        ("online_dpo", {"reference log-probabilities"}),
        ("distill", {"teacher log-probabilities"}),
    ],
)
def test_an_algorithm_has_its_own_passes(algorithm: str, passes: set[str]) -> None:
    ask = asker("recipe=qwen3_8b", "gpus=8", "cluster=dgx_h100", f"rl.algorithm={algorithm}", "rl.placement=colocated")
    phases = {phase.name: phase for phase in fastest(ask.question, ask).best.phases}
    assert {*phases} - {"transfer", "offload", "onload", "generate", "update"} == passes
    assert passes - {"update critic"} <= {*phases["update"].after}


def test_a_critic_of_its_own_is_trained_by_its_own_plan() -> None:
    words = ("recipe=qwen3_8b", "gpus=8", "cluster=dgx_h100", "rl.algorithm=ppo", "rl.placement=colocated")
    short = (*SMALL[:3], "rl.response_length=400+200", "rl.max_response_length=760")  # GPT-2 has 1,024 positions
    same, small = (fastest(ask.question, ask).best for ask in (asker(*words, of=short), asker(*words, "rl.critic=gpt2_xl", of=short)))
    assert same.of("update critic") > same.of("update")  # its states come from the host and go
    assert small.of("update critic") < same.of("update critic") / 3
    assert small.of("update") == same.of("update")
    assert {*small.plans} == {"policy", "critic"}


def test_pairs_that_are_given_are_a_reference_pass_and_an_update() -> None:
    given = ("rl.prompts=64", "rl.samples=2", "rl.prompt_length=200", "rl.response_length=800+500", "rl.max_response_length=4096")
    ask = asker("recipe=qwen3_8b", "gpus=8", "cluster=dgx_h100", "rl.algorithm=dpo", of=given)
    best = fastest(ask.question, ask).best
    assert [(phase.name, phase.model) for phase in best.phases] == [("reference log-probabilities", "reference"), ("update", "policy")]
    assert best.generation is None
    assert best.tokens / 128 == pytest.approx(1000, rel=0.15)
    online = asker("recipe=qwen3_8b", "gpus=8", "cluster=dgx_h100", "rl.algorithm=online_dpo", "rl.placement=colocated", of=given)
    assert best.of("update") == pytest.approx(fastest(online.question, online).best.of("update"), rel=0.05)


def test_side_by_side_a_step_takes_as_long_as_its_longer_half() -> None:
    ask = asker("recipe=qwen3_8b", "gpus=16", "cluster=dgx_h100")
    one = fastest(asked(ask.question, placement="split", staleness=1), ask).best
    training = sum(phase.seconds for phase in one.phases if phase.pool == "training")
    assert one.seconds == pytest.approx(one.of("transfer") + max(one.of("generate"), training))
    later = fastest(asked(ask.question, placement="split"), ask).best
    assert later.seconds > one.seconds


def test_updates_and_epochs_are_paid_for() -> None:
    plain, four, twice = (
        fastest(ask.question, ask).best.of("update")
        for ask in (
            asker("recipe=qwen3_8b", "gpus=8", "cluster=dgx_h100", word) for word in ("rl.updates=1", "rl.updates=4", "rl.epochs=2")
        )
    )
    assert twice == pytest.approx(2 * plain)
    assert plain < four < 1.5 * plain


def test_what_does_not_fit_is_said_with_numbers() -> None:
    ask = asker("recipe=llama3_70b", "gpus=2", "cluster=dgx_h100", of=(*SMALL[:4], "rl.max_response_length=4000"))
    with pytest.raises(NoPlanError, match="no placement fits"):
        fastest(ask.question, ask)


def test_a_node_more_goes_where_it_shortens_the_step_most() -> None:
    ask = asker("recipe=qwen3_8b", "gpus=32", "cluster=dgx_h100")
    for staleness in (0, 1):
        found = fastest(asked(ask.question, placement="split", staleness=staleness), ask)
        best, second = found.grown
        assert best.seconds <= second.seconds <= found.best.seconds * (1 + 1e-9)
    training = sum(phase.seconds for phase in found.best.phases if phase.pool == "training")
    assert best.half == ("generation" if found.best.of("generate") > training else "training")


def test_the_interval_holds_every_draw_of_the_lengths() -> None:
    """A few long responses: the slowest engine is another one in each draw."""
    ask = asker("recipe=qwen3_8b", "gpus=8", "cluster=dgx_h100", of=(*SMALL[:3], "rl.response_length=500+1500", SMALL[4]))
    wide = fastest(ask.question, ask).best
    alone = asker("recipe=qwen3_8b", "gpus=8", "cluster=dgx_h100", of=(*SMALL[:3], "rl.response_length=500+0", SMALL[4]))
    narrow = fastest(alone.question, alone).best
    ratios = [next(phase.off for phase in one.phases if phase.name == "generate") for one in (wide, narrow)]
    assert ratios[0][0] < ratios[1][0]
    assert ratios[0][1] > ratios[1][1]


def test_what_shares_its_gpus_has_samples_of_its_own_step() -> None:
    """rl.staleness=1 changes nothing of a colocated step."""
    ask = asker("recipe=qwen3_8b", "gpus=16", "cluster=dgx_h100")
    plain, stale = (fastest(asked(ask.question, staleness=staleness), ask) for staleness in (0, 1))
    together = [[one.seconds for one in (found.best, *found.others) if one.colocated] for found in (plain, stale)]
    assert sorted(together[0]) == sorted(together[1])


def test_states_that_the_hosts_memory_does_not_hold_stay_on_the_gpu() -> None:
    ask = asker("recipe=qwen3_8b", "gpus=8", "cluster=dgx_h100", "rl.program=verl")
    question = asked(ask.question, placement="colocated")
    poor = replace(question, cluster=replace(question.cluster, host_memory=2**30))
    assert {one.offloads for one in (fastest(question, ask).best, *fastest(question, ask).others)} == {False, True}
    assert not fastest(poor, ask).best.offloads
    assert not fastest(poor, ask).others


def test_a_plan_leaves_room_for_the_losss_own_copy_of_the_logits() -> None:
    """On a limit that the plan fills to the last GiB, the next one is taken."""
    ask = asker("recipe=qwen3_8b", "gpus=8", "cluster=dgx_h100", "memory.reserve_gib=0")
    peak = ask(8, 0.0).prediction.peak_memory_bytes
    tight = asker("recipe=qwen3_8b", "gpus=8", "cluster=dgx_h100", "memory.reserve_gib=0", f"memory.limit_gib={peak / 2**30 + 0.01}")
    plan = tight(8, 0.0)
    assert plan.prediction.by_stage[-1].peak_memory_bytes + loss_bytes(plan) <= peak + 0.02 * 2**30
