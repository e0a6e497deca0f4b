"""tune=K on a machine that is made up: the cost model with constants that the planner does not know says what its ranks time."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace
from scipy.stats import spearmanr

from orchestrator import recipe, run, tuning
from orchestrator.cost.calibration import Calibration
from orchestrator.cost.price import CostModel
from orchestrator.detect import Machine
from orchestrator.engines import ENGINES
from orchestrator.errors import InputError, LaunchError
from orchestrator.launch import local
from orchestrator.plan import Plan, to_json
from orchestrator.planning import Planner
from orchestrator.recipe import Settings
from orchestrator.report import after
from orchestrator.search.planner import reprice
from orchestrator.strategy.spec import twins
from orchestrator.tuning import Trial
from orchestrator.units import format_amount

WORDS = ("recipe=gpt_tiny", "gpus=4", "cluster=cpu", "engine=megatron", "calibration=datasheet")
Tried = Callable[[Settings, Plan, str, Path, int], Trial]


def settings_of(out: Path, *words: str) -> Settings:
    return recipe.load([*WORDS, f"out={out}", *words], Machine(), [*ENGINES])


def truth(constants: Calibration) -> Calibration:
    """A machine whose network is twelve times slower than planned, and whose products take twice as long."""
    return replace(
        constants, gemm_efficiency=constants.gemm_efficiency / 2, memory_efficiency=constants.memory_efficiency / 2,
        op_overhead_s=2 * constants.op_overhead_s, microbatch_overhead_s=2 * constants.microbatch_overhead_s,
        inner_efficiency=constants.inner_efficiency / 12, p2p_efficiency=constants.p2p_efficiency / 12,
        collective_overhead_s=12 * constants.collective_overhead_s,
    )  # fmt: skip


def really(plan: Plan, settings: Settings) -> Plan:
    """The plan as it goes on that machine."""
    cost = Planner(replace(settings, calibration="datasheet")).prices_for(plan.engine).costs(plan)
    return reprice(plan, cost.traits, truth(cost.calibration))


def rows(plan: Plan, priced: CostModel) -> list[dict[str, object]]:
    """What each rank's timers say of such a step."""
    causes = after.predicted_causes(plan, priced.calibration.step_overhead_s)
    mesh = plan.mesh
    found = []
    for rank in range(plan.world_size):
        own = after.alone_seconds(plan, priced, after.stage_of(plan, rank)) * plan.num_microbatches
        traffic = []
        for axis in ("tp", "cp", "pp", "dp"):
            first = rank - rank // mesh.stride(axis) % mesh.degree(axis) * mesh.stride(axis)
            ranks = [first + index * mesh.stride(axis) for index in range(mesh.degree(axis))]
            if causes[axis]:
                traffic += [{"step": step, "phase": "passes", "ranks": ranks, "operation": "all_reduce", "count": 1, "bytes": 1,
                             "transfer_s": causes[axis], "waiting_s": 0.0} for step in range(2)]  # fmt: skip
        passes = own + sum(causes[axis] for axis in ("tp", "cp", "pp", "dp"))
        phases = [{"data": 0.0, "passes": passes, "update": causes["optimizer"], "agree": 0.0}] * 2
        found.append({"rank": rank, "host": "here", "steps": [4, 5], "microbatches": plan.num_microbatches, "peak_memory_bytes": 0,
                      "phases": phases, "traffic": traffic})  # fmt: skip
    return found


def machine(seen: list[Plan], ends: Callable[[int], str | None] = lambda number: None) -> Tried:
    """A trial on the machine that is made up; `ends`: how the trial of this number ends, None: well."""

    def tried(settings: Settings, plan: Plan, how: str, folder: Path, number: int) -> Trial:
        seen.append(plan)
        why = ends(number)
        if why == "interrupted":
            (folder / "logs").mkdir(parents=True, exist_ok=True)  # what a trial leaves that was cut off
            raise KeyboardInterrupt
        folder.mkdir(parents=True, exist_ok=True)
        found = really(plan, settings)
        assert found.predicted is not None
        (folder / "plan.json").write_text(to_json(plan))
        seconds = found.predicted.step_time_s
        steps = [{"step": step + 1, "step_time_s": seconds, "loss": 2.0} for step in range(settings.tune_steps)]
        outcome = local.Outcome(status="failed" if why else "finished", exit_status=1 if why else 0, started="", ended="",
                                last_line=why, rows=() if why else tuple(steps))  # fmt: skip
        if not why:
            cost = Planner(replace(settings, calibration="datasheet")).prices_for(plan.engine).costs(plan)
            lines = rows(found, CostModel(cost.workload, cost.traits, truth(cost.calibration)))
            (folder / "timers.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
            (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in steps))
        local.write_status(folder, outcome)
        return tuning._trial(folder)

    return tried


def every_plan(settings: Settings) -> Sequence[Plan]:
    """The best plan of every outer choice, as it goes on that machine."""
    found = Planner(replace(settings, tune=None)).fastest(Planner(settings).space(top_k=1000))
    return [really(plan, settings) for plan in (found.plan, *found.alternatives)]


def seconds(plan: Plan) -> float:
    assert plan.predicted is not None
    return plan.predicted.step_time_s


def test_five_trials_find_the_fastest_plan_of_a_machine_that_the_prices_do_not_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = settings_of(tmp_path / "out", "tune=5")
    seen: list[Plan] = []
    monkeypatch.setattr(tuning, "tried", machine(seen))
    chosen, found = tuning.tuned(settings, "local", tmp_path / "out")
    plans = every_plan(settings)
    best = min(map(seconds, plans))
    assert seconds(plans[0]) > 1.02 * best  # what is planned without a trial is not
    assert seconds(really(found.plan, settings)) <= 1.02 * best
    said = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[0] for line in said[:10]] == [f"tune {number}/5" for number in range(1, 6) for _ in "ab"]
    assert all(line.endswith("; it runs now") for line in said[:10:2])
    assert all("measured" in line for line in said[1:10:2])
    assert "too close to tell; they run again, round 2 of at most 3" in said[10]
    assert all(", run 2: measured" in line for line in said[11:]), "whatever drifts here does so for all: then one is clearly ahead"
    assert len({plan.candidate for plan in seen}) == 5
    assert len({(plan.mesh, plan.micro_batch_size, plan.vpp) for plan in seen}) >= 4, "they differ in what prices are unsure of"
    assert len({plan.mesh for plan in seen}) > 1
    assert chosen.plan == found.plan
    assert found.plan.training == settings.training  # it is trained whole
    # and the prices have learned: they rank the others as that machine does
    cost = Planner(chosen).prices_for(found.plan.engine).costs(found.plan)
    learned = [seconds(reprice(plan, cost.traits, cost.calibration)) for plan in plans]
    assert spearmanr(learned, list(map(seconds, plans))).statistic > 0.9
    assert found.plan.prices is not None


def test_a_tune_that_was_cut_off_goes_on_with_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    settings = settings_of(out, "tune=4", "tune.rounds=1")
    first: list[Plan] = []
    monkeypatch.setattr(tuning, "tried", machine(first, lambda number: "interrupted" if number == 3 else None))
    with pytest.raises(KeyboardInterrupt):
        tuning.tuned(settings, "local", tuning.tune_folder(settings))
    assert len(tuning.read_trials(out)) == 2
    second: list[Plan] = []
    monkeypatch.setattr(tuning, "tried", machine(second))
    _, found = tuning.tuned(settings, "local", tuning.tune_folder(settings))
    assert len(second) == 2
    assert second[0].candidate == first[2].candidate
    assert min(trial.measured_s or 0.0 for trial in tuning.read_trials(out)) == pytest.approx(seconds(really(found.plan, settings)))
    with pytest.raises(InputError, match="holds a tune of other settings"):
        tuning.tune_folder(settings_of(out, "tune=4", "train.global_batch_size=32"))


def test_what_ends_badly_is_a_result_and_running_out_of_memory_bounds_what_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(tmp_path / "out", "tune=4")
    seen: list[Plan] = []
    ends = {1: "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", 2: "RuntimeError: not today"}
    monkeypatch.setattr(tuning, "tried", machine(seen, ends.get))
    _, found = tuning.tuned(settings, "local", tmp_path / "out")
    peaks = [plan.predicted.peak_memory_bytes for plan in seen if plan.predicted is not None]
    assert all(peak < peaks[0] for peak in peaks[1:])
    assert found.plan.candidate in {plan.candidate for plan in seen[2:]}
    text = " ".join(after_text(tuning.read_trials(tmp_path / "out"), found.plan).split())
    assert "CUDA out of memory" in text
    assert "not today" in text
    assert "taken" in text


@pytest.mark.parametrize("timed", [True, False])
def test_plans_of_two_engines_teach_each_its_own_prices(timed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine that wins is not the first one's; or its ranks have no timers, and it keeps the prices that it had."""
    out = tmp_path / "out"
    words = [word for word in WORDS if not word.startswith("engine=")]
    settings = recipe.load([*words, f"out={out}", "tune=2"], Machine(), [*ENGINES])
    others = [Planner(recipe.load([*words, f"engine={name}"], Machine(), [*ENGINES])).fastest().plan for name in ("megatron", "deepspeed")]
    in_turn = sorted(others, key=lambda plan: -seconds(really(plan, settings)))
    assert in_turn[0].engine != in_turn[1].engine
    asked = iter(in_turn)
    monkeypatch.setattr(tuning, "next_plan", lambda *_: next(asked))
    run_it = machine([])

    def tried(settings: Settings, plan: Plan, how: str, folder: Path, number: int) -> Trial:
        trial = run_it(settings, plan, how, folder, number)
        if number == 2 and not timed:
            (folder / "timers.jsonl").unlink()
        return trial

    monkeypatch.setattr(tuning, "tried", tried)
    chosen, found = tuning.tuned(settings, "local", out)
    assert found.plan.candidate == in_turn[1].candidate
    assert (found.plan.prices is not None) == timed
    learned = {path.name: json.loads(path.read_text()) for path in (out / "tune").glob("*-cpu.json")}
    assert learned.keys() == {f"{plan.engine}-cpu.json" for plan in in_turn[: 2 if timed else 1]}
    assert all(file["engine"] == name.removesuffix("-cpu.json") and file["fitted_runs"] == 1 for name, file in learned.items())
    assert (chosen.calibration == str(out / "tune")) == timed


def noisy(lengthened: dict[tuple[int, int], float], seen: list[tuple[int, int]], ends: dict[tuple[int, int], str] | None = None) -> Tried:
    """A machine where a run takes longer than the plan does: by plan and run. One step of four is not disturbed."""
    plain = machine([])

    def tried(settings: Settings, plan: Plan, how: str, folder: Path, number: int) -> Trial:
        run_number = int(folder.name.partition(".")[2] or 1)
        seen.append((number, run_number))
        why = (ends or {}).get((number, run_number))
        if why == "interrupted":
            raise KeyboardInterrupt
        plain(settings, plan, how, folder, number)
        if why:
            local.write_status(folder, local.Outcome(status="failed", exit_status=1, started="", ended="", last_line=why, rows=()))
        metrics = folder / "metrics.jsonl"
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
        for line in lines[: -len(lines) // 4]:
            line["step_time_s"] *= lengthened.get((number, run_number), 1.0)
        metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return tuning._trial(folder)

    return tried


def test_plans_that_one_run_can_not_tell_apart_run_in_turn_until_one_is_clearly_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of five plans that which is the fastest is disturbed in its first run so much that another one looks faster."""
    out = tmp_path / "plain"
    monkeypatch.setattr(tuning, "tried", machine([]))
    tuning.tuned(settings_of(out, "tune=5", "tune.rounds=1"), "local", out)
    plain = tuning.read_trials(out)
    fastest, second = tuning.ranked(plain)[:2]
    assert second.measured_s is not None
    assert fastest.measured_s is not None

    seen: list[tuple[int, int]] = []
    factor = 1.1 * second.measured_s / fastest.measured_s
    monkeypatch.setattr(tuning, "next_plan", lambda settings, trials, without: plain[len(trials)].plan)
    monkeypatch.setattr(tuning, "tried", noisy({(fastest.number, 1): factor}, seen))
    out = tmp_path / "out"
    _, found = tuning.tuned(settings_of(out, "tune=5", "tune.rounds=5"), "local", out)
    assert found.plan.candidate == fastest.plan.candidate
    first = {trial.number: (trial.measured_s or 0.0) * (factor if trial == fastest else 1.0) for trial in plain}
    slowest_first = sorted(first, key=first.__getitem__, reverse=True)
    assert [one for one in seen if one[1] == 2] == [(number, 2) for number in slowest_first], "back"
    assert {number for number, run_number in seen if run_number == 3} == {fastest.number, second.number}, "the others are behind"
    said = capsys.readouterr().out
    numbers = ", ".join(map(str, sorted((fastest.number, second.number))))
    assert f"tune: plans {numbers} are too close to tell; they run again, round 3 of at most 5\n" in said
    assert "runs)" in after_text(tuning.read_trials(out), found.plan)

    monkeypatch.setattr(tuning, "tried", noisy({(fastest.number, 1): 1.5 * factor}, []))
    out = tmp_path / "once"
    _, found = tuning.tuned(settings_of(out, "tune=5", "tune.rounds=1"), "local", out)
    assert found.plan.candidate != fastest.plan.candidate, "one run of each is misled by more than the machine is known to drift"


def drifting(at: Sequence[float], seen: list[tuple[int, int]]) -> Tried:
    """A machine that takes `at` times as long, run after run; in the end as in its last."""

    def tried(settings: Settings, plan: Plan, how: str, folder: Path, number: int) -> Trial:
        slow = {(number, int(folder.name.partition(".")[2] or 1)): at[min(len(seen), len(at) - 1)]}
        return noisy(slow, seen)(settings, plan, how, folder, number)

    return tried


def test_a_machine_that_slows_down_by_a_third_between_two_plans_changes_nothing_of_what_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []
    for at in ((1.0,), (1.0, 1.28, 1.28, 1.28, 1.28, 1.28, 1.0, 1.28, 1.0, 1.28)):
        seen: list[tuple[int, int]] = []
        out = tmp_path / str(len(at))
        monkeypatch.setattr(tuning, "tried", drifting(at, seen))
        taken.append(tuning.tuned(settings_of(out, "tune=5", "tune.rounds=9"), "local", out)[1].plan.candidate)
    assert taken[0] == taken[1]


def test_of_plans_that_runs_can_not_tell_apart_price_says_which(tmp_path: Path) -> None:
    """Runs that scatter by a fifth show the dearer of two plans 1% ahead; where each round says so, it is taken, and where it is twice as
    fast with as much scatter."""
    settings = settings_of(tmp_path / "out", "tune=2")
    found = Planner(settings).fastest(Planner(settings).space(top_k=60))
    dearer = next(plan for plan in found.alternatives if 1.15 < seconds(plan) / seconds(found.plan) < 1.4)

    def taken(cheap: tuple[float, ...], dear: tuple[float, ...]) -> int:
        runs = zip((found.plan, dearer), (cheap, dear), strict=True)
        trials = [Trial(number=at, plan=plan, runs_s=each, peak_memory_bytes=None) for at, (plan, each) in enumerate(runs, 1)]
        one = tuning.likeliest(settings, trials, tuning.UNPUBLISHED)
        rows = [row for row in after_text(trials, one.plan).splitlines() if "dp=" in row]
        said = {trial.number: row for trial, row in zip(tuning.ranked(trials), rows, strict=True)}
        assert "taken" in said[one.number]
        assert ("price does" in said[one.number]) == (one != tuning.ranked(trials)[0])
        return one.number

    assert taken((1.0, 1.2, 1.01), (1.2, 1.0, 1.0)) == 1
    assert taken((1.0, 1.2, 1.01), (0.99, 1.19, 1.0)) == 2
    assert taken((1.0, 1.2, 1.01), (0.6, 0.5, 0.5)) == 2


def test_price_tells_plans_apart_that_share_most_of_what_it_may_be_wrong_in(tmp_path: Path) -> None:
    """The dearer by 5% is .5% ahead in runs that scatter by 2%: that is believed of another mesh, not of another ZeRO stage alone."""
    settings = settings_of(tmp_path / "out", "tune=2")
    cheap = Planner(settings).fastest(Planner(settings).space(top_k=60)).plan
    meshes = [replace(cheap, tp=2, dp=cheap.dp // 2), replace(cheap, zero_stage=2)]
    assert len({plan.candidate.mesh for plan in (cheap, *meshes)}) == 2
    assert meshes[1].candidate.micro_batch_size == cheap.candidate.micro_batch_size

    class Prices:
        """The cheap plan's seconds, 5% more for every other."""

        def priced(self, plan: Plan) -> Plan:
            dear = 1.0 if plan.candidate == cheap.candidate else 1.05
            return replace(cheap, predicted=replace(cheap.prediction, step_time_s=dear * seconds(cheap)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Planner, "prices_for", lambda *_: Prices())
        for other, taken in zip(meshes, (2, 1), strict=True):
            runs = zip((cheap, other), ((1.02, 1.0, 1.005), (1.0, 1.01, 1.0)), strict=True)
            trials = [Trial(number=at, plan=plan, runs_s=each, peak_memory_bytes=None) for at, (plan, each) in enumerate(runs, 1)]
            assert tuning.likeliest(settings, trials, tuning.UNPUBLISHED).number == taken


def test_one_replica_under_two_zero_stages_is_one_plan(tmp_path: Path) -> None:
    """Neither a search's best plans nor a tune's have it twice."""
    settings = settings_of(tmp_path / "out", "tune=5", "pin.dp=1")
    found = Planner(settings).fastest(Planner(settings).space(top_k=60))
    plans = [found.plan, *found.alternatives]
    one_replica = [replace(plan.candidate, strategy=replace(plan.candidate.strategy, zero_stage=0)) for plan in plans]
    assert len(one_replica) > 20
    assert len(set(one_replica)) == len(plans)
    trials = [Trial(number=number, plan=plan, runs_s=(1.0,), peak_memory_bytes=None) for number, plan in enumerate(plans[:2], 1)]
    other = replace(plans[0], zero_stage=1 - plans[0].zero_stage)
    trials.append(Trial(number=3, plan=other, runs_s=(1.0,), peak_memory_bytes=None))
    tried_next = tuning.next_plan(settings, trials, ())
    assert tried_next is not None
    assert not any(twins(tried_next.candidate, trial.plan.candidate) for trial in trials)


def test_where_it_stays_unclear_each_runs_as_often_as_said_there_and_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    settings = settings_of(out, "tune=2", "tune.rounds=4")
    monkeypatch.setattr(tuning, "tried", machine([]))
    one = tuning.next_plan(settings, [], ())
    monkeypatch.setattr(tuning, "next_plan", lambda *_: one)  # the same one twice: nothing tells them apart
    seen: list[tuple[int, int]] = []
    disturbed = {(number, run_number): 2.0 for number in (1, 2) for run_number in range(1, 5)}
    monkeypatch.setattr(tuning, "tried", noisy(disturbed, seen))
    tuning.tuned(settings, "local", out)
    assert seen == [(1, 1), (2, 1), (2, 2), (1, 2), (1, 3), (2, 3), (2, 4), (1, 4)]
    assert [len(trial.runs_s) for trial in tuning.read_trials(out)] == [4, 4]


def test_a_round_that_was_cut_off_goes_on_and_a_plan_whose_second_run_crashes_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    settings = settings_of(out, "tune=2", "tune.rounds=2")
    one = tuning.next_plan(settings, [], ())
    other = Planner(settings).fastest(Planner(settings).space(top_k=4)).alternatives[0]
    assert one is not None
    monkeypatch.setattr(tuning, "next_plan", lambda settings, trials, without: (one, other)[len(trials)])
    seconds_ = [seconds(really(plan, settings)) for plan in (one, other)]
    disturbed = {(number, 1): 1.5 * max(seconds_) / seconds_[number - 1] for number in (1, 2)}
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(tuning, "tried", noisy(disturbed, seen, {(1, 2): "interrupted"}))
    with pytest.raises(KeyboardInterrupt):
        tuning.tuned(settings, "local", tuning.tune_folder(settings))
    assert seen == [(1, 1), (2, 1), (2, 2), (1, 2)]
    seen.clear()
    monkeypatch.setattr(tuning, "tried", noisy(disturbed, seen, {(1, 2): "RuntimeError: not this time"}))
    _, found = tuning.tuned(settings, "local", tuning.tune_folder(settings))
    assert seen == [(1, 2)]
    assert found.plan.candidate == other.candidate
    bad = tuning.read_trials(out)[0]
    assert (bad.measured_s, bad.why) == (None, "failed: RuntimeError: not this time")


def test_where_prices_can_not_tell_plans_apart_a_tune_is_proposed_with_its_cost_beside_what_it_may_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    long = "train.steps=1000000"
    settings = settings_of(tmp_path / "out", long)
    found = Planner(settings).fastest(Planner(settings).space(top_k=2))
    alike = replace(found, alternatives=(found.plan,))
    hours = seconds(found.plan) * 4 / 3600
    saved = tuning.UNPUBLISHED / (2 * math.pi) ** 0.5  # the mean of what is above 0 of a normal distribution
    said = tuning.proposal(settings, alike, "local")
    assert said.startswith("Prices can't tell the first 2 plans apart: tune=2 measures them, for ")
    assert f"for {format_amount(2 * 3 * 10 * hours, 2)} rank-hours and their starts at most; it may save {100 * saved:.1f}%" in said
    assert said.endswith(f"{format_amount(saved * 1_000_000 * hours, 2)} rank-hours")
    assert "tune=2 in an salloc measures" in tuning.proposal(settings, alike, "slurm")
    assert not tuning.proposal(settings, alike, "none"), "nothing can start"
    assert not tuning.proposal(settings_of(tmp_path / "out", "tune=3", long), alike, "local"), "it is done"
    short = replace(found.plan, training=replace(found.plan.training, steps=100))
    assert not tuning.proposal(settings, replace(found, plan=short, alternatives=(short,)), "local"), "it costs more than it may save"
    slow = replace(found.plan, predicted=replace(found.plan.prediction, step_time_s=1.2 * seconds(found.plan)))
    assert not tuning.proposal(settings, replace(found, alternatives=(slow,)), "local"), "it is clear"
    monkeypatch.setattr(run, "follow", lambda *_: 0)
    assert run.main([*WORDS[:3], f"out={tmp_path / 'run'}", "launch=local", long]) == 0
    assert "plans apart: tune=" in capsys.readouterr().out


def after_text(trials: Sequence[Trial], taken: Plan) -> str:
    from orchestrator.report.text import as_text

    return as_text(tuning.tune_table(trials, taken), width=240)


def test_where_no_plan_runs_the_first_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_of(tmp_path / "out", "tune=2")
    monkeypatch.setattr(tuning, "tried", machine([], lambda number: f"RuntimeError: number {number}"))
    with pytest.raises(LaunchError, match="none of 2 plans ran to its end; the first: failed: RuntimeError: number 1"):
        tuning.tuned(settings, "local", tmp_path / "out")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("tune=0",), "tune=0: "),
        (("tune=3", "launch=none"), "tune=3: measures plans, and launch=none starts nothing"),
        (("tune.steps=5",), "tune.steps=5: is of the plans that tune=K tries"),
        (("tune.rounds=2",), "tune.rounds=2: is of the plans that tune=K tries"),
        (("tune=3", "engine=layerwise"), "tune=3: runs plans, and engine=layerwise starts nothing"),
        (("tune=3", "entry=no.py"), "tune=3: measures plans, and nothing starts here: there is no entry="),
        (("tune=3", "entry=no.py", "train.save_every=9", "train.async_save=true"), "train.async_save=true: is for our workers; entry="),
        (("tune=3", "cluster=dgx_h100"), "tune=3: measures plans, and nothing starts here: the plan needs 4 x H100"),
    ],
)
def test_what_can_not_be_tuned_is_refused(words: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = {word.partition("=")[0] for word in words}
    base = [word for word in (*WORDS, f"out={tmp_path / 'out'}") if word.partition("=")[0] not in given]
    assert run.main([*base, *words]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.engines
@pytest.mark.full
def test_two_plans_run_on_gloo_ranks_and_the_faster_is_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    words = ["recipe=gpt_tiny", "gpus=2", "cluster=cpu", "engine=megatron", "tune=2", "tune.steps=5", "train.steps=5", "launch=local"]
    assert run.main([*words, f"out={out}"]) == 0
    trials = tuning.read_trials(out)
    assert [trial.number for trial in trials] == [1, 2]
    best = min(trials, key=lambda trial: trial.measured_s or 0.0)
    assert json.loads((out / "plan.json").read_text())["prices"]["source"] == str(out / "tune" / "megatron-cpu.json")
    assert json.loads((out / "plan.json").read_text())["micro_batch_size"] == best.plan.micro_batch_size
    assert "taken" in capsys.readouterr().out
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 5
