"""`plan`, `sweep` and `compare`: each takes the keys of a run, prints its answer on standard output, and everything else beside it."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from orchestrator import api, recipe
from orchestrator.asking import grid, questions, reinforcement
from orchestrator.asking.answer import Answer
from orchestrator.asking.grid import Load, Point, Sweep
from orchestrator.commands import INTERRUPTED, command, say_json, without_json
from orchestrator.engines import ENGINES
from orchestrator.errors import InputError, NoPlanError
from orchestrator.key import shown
from orchestrator.launch.program_metrics import rows_of
from orchestrator.plan import to_json
from orchestrator.planning import Planner, without_gc
from orchestrator.recipe import Settings
from orchestrator.recipe.read import key_and_value
from orchestrator.report.comparison import comparison_tables, measured_in, sweep_table
from orchestrator.report.memory import risk_key
from orchestrator.report.text import choice
from orchestrator.rl.job import GENERATES_NOTHING, WRITTEN
from orchestrator.screen import FILE_WIDTH, SearchProgress, next_text, not_here_text, notes_text, screen, show_found
from orchestrator.search.unasked import seconds_of
from orchestrator.strategy.legality import plan_only
from orchestrator.units import format_amount, format_seconds

SHOWN_TRIED: Final = 3
"""Numbers nearest to the answer that are listed without verbose=true."""

PLAN_HELP: Final = """\
usage: python -m orchestrator plan key=value ... [--json]

The fastest plan, what its training takes, and why; nothing is started, and nothing written but into out=.

  python -m orchestrator plan recipe=llama3_70b gpus=64 cluster=dgx_h100
  python -m orchestrator plan recipe=llama3_8b train.tokens=1T gpus=64 cluster.price_per_gpu_hour=2.5      days, GPU-hours, energy, cost
  python -m orchestrator plan recipe=llama3_8b train.tokens=1T cluster=dgx_h100 target.days=30             the least GPUs that do it
  python -m orchestrator plan recipe=llama3_8b train.tokens=1T gpus=128 target.cost=71000 cluster.price_per_gpu_hour=2.5   the soonest end
  python -m orchestrator plan recipe=llama3_8b gpus=16 largest=seq_length                                  the most that fits
  python -m orchestrator plan recipe=llama3_8b gpus=64 "cluster.levels.infiniband.bandwidth=200 Gbit/s"    another network
  python -m orchestrator plan plan=runs/first/plan.json explain.tp=8                                       why not that?
  python -m orchestrator plan task=rl recipe=qwen3_8b gpus=8 cluster=dgx_h100 rl.prompts=64 rl.samples=16 rl.prompt_length=200 \\
    rl.response_length=1500+1200 rl.max_response_length=8192       reinforcement learning: generation and training together

  --json     the plan and its figures, or the error, as JSON on standard output, messages on standard error
Every key of a run: python -m orchestrator run --help; some: --help pin, --help train, --help cluster
"""
SWEEP_HELP: Final = """\
usage: python -m orchestrator sweep key=value key=value,value ... [--json]

A plan for every combination of the keys that have several values, and which of them no other beats in training time, GPU-hours, cost and
the chance of running out of memory together (marked *, where that is not all of them).

  python -m orchestrator sweep recipe=llama3_8b gpus=8,16,32 cluster=dgx_h100,dgx_b200
  python -m orchestrator sweep recipe=llama3_70b gpus=64 train.global_batch_size=256,512,1024 pin.tp=4,8

Keys whose value has commas of its own (train.betas, data.split) take one value.
A price for each cluster: cluster=h100.yaml,b200.yaml, with lines like cluster: dgx_h100 (which it builds on) and price_per_gpu_hour: 2.5
Every key of a run: python -m orchestrator run --help; some: --help pin, --help train, --help cluster
"""
COMPARE_HELP: Final = """\
usage: python -m orchestrator compare RUN RUN [--json]
       python -m orchestrator compare key=value ... key=one,other [--json]

Two plans side by side: what was chosen, and where time and memory go, cause by cause. RUN is a run's folder or a plan.json; or one key has
two values.

  python -m orchestrator compare runs/first runs/second
  python -m orchestrator compare recipe=llama3_70b gpus=64 cluster=dgx_h100,dgx_b200
  python -m orchestrator compare recipe=llama3_70b gpus=64 pin.tp=4,8
"""


def load_of(words: Sequence[str]) -> tuple[dict[str, Any], Load]:
    """The keys that are given, as a tree, and the settings of them with others over them. Raises InputError."""
    tree = recipe.read_arguments(words)
    return tree, api.loader(tree, "python -m orchestrator run writes and starts")


def topic(words: Sequence[str]) -> str:
    """What --help says of some topics. Raises InputError."""
    return recipe.topic_text(words, list(ENGINES))


def plan(words: Sequence[str]) -> int:
    """Runs the command `plan` and returns its exit status."""
    with without_gc():
        return command(words, lambda: PLAN_HELP, _plan, topic=topic)


def _plan(words: Sequence[str]) -> None:
    words, as_json = without_json(words)
    out = [word.partition("=")[2] for word in words if word.startswith("out=")]
    rest = [word for word in words if not word.startswith("out=")]
    if len(out) > 1 or "" in out:
        raise InputError("out", shown(",".join(out)), "needs one folder")
    tree, load = load_of(rest)
    settings = load({})
    if "write" in tree and not out:
        raise InputError("write", ",".join(settings.write), "writes into a folder: out=FOLDER beside it")
    if settings.reinforcement is not None:
        _plan_rl(settings, as_json=as_json, out=out)
        return
    with SearchProgress() as progress:
        answer, tried = questions.answered(load, settings, tree, progress.show, with_fuller=not as_json)
    if as_json:
        print(not_here_text(answer.settings), end="", file=sys.stderr)
        say_json({**answer.summary(), "tried": [point.summary() for point in tried], "plan": json.loads(answer.to_json())})
    else:
        print(answer.settings.why_cluster)
        for line in tried_lines(answer, tried, all_of_them=answer.settings.verbose):
            print(line)
        show_found(screen(), answer.settings, answer.found)
        for line in fuller_lines(answer):
            print(line)
        plan = answer.plan
        only = plan_only(ENGINES[plan.engine].capabilities(plan.cluster.software), plan.model, plan.training)
        if only is not None and not out:  # with a folder the notes say it
            print(textwrap.shorten(f"plan only: {only}", FILE_WIDTH - 1, placeholder=" ..."))
        print(next_text(answer.settings, "" if out else "out=FOLDER writes it"))
    if out:
        folder, job = answer.write_job(out[0])
        print(f"Written to {folder}\n{notes_text(answer.settings, answer.plan, job)}", end="", file=sys.stderr if as_json else sys.stdout)


def _plan_rl(settings: Settings, *, as_json: bool, out: Sequence[str]) -> None:
    """The answer to task=rl. Raises InputError, NoPlanError."""
    answer = reinforcement.answered(settings)
    if as_json:
        say_json({**answer.summary(), "plan": json.loads(to_json(answer.plan))})
    else:
        print(settings.why_cluster)
        print(answer)
        asks = "rl.tp=2 rl.placement=split asks for others"
        if (job := settings.reinforcement) is not None and job.keys.algorithm in WRITTEN:
            print(f"Next: write=verl,nemo_rl,slime out=FOLDER writes both halves for these programs; {asks}")
        elif job is not None and job.keys.algorithm not in GENERATES_NOTHING:
            print(f"Next: {asks}")
    if out:
        print(f"Written to {answer.write(out[0])}", file=sys.stderr if as_json else sys.stdout)


def fuller_lines(answer: Answer) -> list[str]:
    """The plan that fills memory up to the reserve, where that is faster by a percent, with the key that takes it."""
    fuller = answer.found.fuller
    fastest_s = min((answer.step_time_s, *(seconds_of(other) for other in answer.found.alternatives)))
    faster = 0.0 if fuller is None else 100 * (1 - fuller.prediction.step_time_s / fastest_s)
    if fuller is None or faster < 1:
        return []
    chance = Planner(answer.settings).chance_of_not_fitting(fuller)
    said = f"{format_seconds(fuller.prediction.step_time_s)} a step (-{faster:.1f}%), {format_amount(100 * chance, 2)}% chance"
    return [f"faster: memory.risk={risk_key(chance)}: {said}: {fuller.engine} {choice(fuller, modes_said=answer.settings.verbose)}"]


def tried_lines(answer: Answer, tried: Sequence[Point], *, all_of_them: bool = True) -> list[str]:
    """What a question of more or less found, and what it tried."""
    if not tried:
        return []
    key = next(iter(tried[0].keys))
    by_value = lambda point: int(point.keys[key])  # noqa: E731
    value = answer.plan.world_size if key == "gpus" else _value_of(answer, key)
    of_cost = any(point.answer is not None and point.answer.settings.targets.of_cost_alone for point in tried)
    of_target = "the soonest end within the cost" if of_cost else "the least that reaches the target"
    asked = of_target if key == "gpus" else "the most that fits"
    beyond = [point for point in tried if point.answer is None and int(point.keys[key]) > value]
    if key not in ("gpus", "train.global_batch_size") and beyond and not min(beyond, key=by_value).why.startswith("no plan fits"):
        asked += " (a rule ends it, not memory)"
    if key == "train.global_batch_size":
        asked += " without gradient accumulation"
    of_many = f"{len(tried)} tried"
    if key == "gpus" and of_cost and value == questions.MOST_GPUS == max(int(point.keys[key]) for point in tried):
        of_many += f" (without gpus= {value} at most)"
    lines = [f"{key}={value}: {asked}, of {of_many}:"]
    nearest = sorted(tried, key=lambda one: abs(int(one.keys[key]) - value))[: None if all_of_them else SHOWN_TRIED]
    for point in sorted(nearest, key=by_value):
        what = point.why.partition("; nearest")[0]
        if point.answer is not None and key == "gpus":
            of = point.answer.budget
            rates = f"{of.said('step_s', format_seconds, ' a step')}, {of.said('tokens_per_s', format_amount, ' tokens/s')}"
            misses = f": misses with {point.why}" if point.why else ""
            what = f"{rates}, {100 * point.answer.headroom:.1f}% of usable memory free{misses}"
        lines.append(f"  {point.keys[key]}: {what}")
    return lines


def _value_of(answer: Answer, key: str) -> int:
    group, _, name = key.partition(".")
    return int(getattr(answer.settings.architecture if group == "model" else answer.settings.training, name))


def sweep(words: Sequence[str]) -> int:
    """Runs the command `sweep` and returns its exit status."""
    return command(words, lambda: SWEEP_HELP, _sweep, topic=topic)


def _sweep(words: Sequence[str]) -> int:
    words, as_json = without_json(words)
    found, lists = swept(words, "sweep", lambda lists: None)
    status = INTERRUPTED if found.left else 0
    if found.left:
        print(f"interrupted: {len(found.points)} of {len(found.points) + found.left} combinations were planned for", file=sys.stderr)
    if as_json:
        say_json(found.summary())
        return status
    screen().print(sweep_table(list(lists), found.rows()))
    return status


def swept(words: Sequence[str], name: str, check: Callable[[Mapping[str, Sequence[str]]], None]) -> tuple[Sweep, dict[str, list[str]]]:
    """Every combination, planned for, with a bar on a terminal. Raises InputError."""
    plain, lists = grid.varied(words)
    for one, text in map(key_and_value, words):
        if one in ("write", "rehearse") or one.startswith("explain."):
            raise InputError(one, shown(text), f"is of one plan, and {name} makes several: plan takes it")
    if not lists:
        raise InputError("gpus", None, f"no key has several values; {name} needs one, as in gpus=8,16")
    check(lists)
    _, load = load_of(plain)
    with SearchProgress("planning") as progress:
        found = grid.sweep(load, lists, lambda done, total: progress.show(done, total, None), partial=True)
    for note in dict.fromkeys(not_here_text(point.answer.settings) for point in found.points if point.answer is not None):
        print(note, end="", file=sys.stderr)
    return found, lists


def compare(words: Sequence[str]) -> int:
    """Runs the command `compare` and returns its exit status."""
    return command(words, lambda: COMPARE_HELP, _compare, topic=topic)


def _compare(words: Sequence[str]) -> None:
    words, as_json = without_json(words)
    runs = [word for word in words if "=" not in word and not word.startswith("-")]
    if runs and len(runs) != 2:
        raise InputError(shown(runs[0]), None, "is not key=value, and compare takes two folders of runs")
    if runs:
        words = [*(word for word in words if word not in runs), f"plan={','.join(runs)}"]
    words = [_plan_files(word) for word in words]

    def one_pair(lists: Mapping[str, Sequence[str]]) -> None:
        if len(lists) != 1 or len(next(iter(lists.values()))) != 2:
            name, values = next(iter(lists.items()))
            raise InputError(name, ",".join(values), "compare takes two values of one key, and one of each other; sweep takes more")

    found, lists = swept(words, "compare", one_pair)
    if found.left:
        raise KeyboardInterrupt
    for point in found.points:
        if point.answer is None:
            name, value = next(iter(point.keys.items()))
            raise NoPlanError(point.why if name == "plan" else f"{name}={value}: has no plan: {point.why}")
    (key, (first, second)) = next(iter(lists.items()))
    one, other = (point.answer for point in found.points)
    assert one is not None
    assert other is not None
    comparison = api.compare(one, other)
    if key == "plan":
        rows = [rows_of(Path(path).with_name("metrics.jsonl")) for path in (first, second)]
        comparison = msgspec.structs.replace(comparison, measured=(measured_in(rows[0]), measured_in(rows[1])))
    if as_json:
        say_json(comparison.summary())
        return
    screen().print(comparison_tables(comparison, (f"{key}={first}", f"{key}={second}")))


def _plan_files(word: str) -> str:
    name, _, text = word.partition("=")
    return word if name != "plan" else f"plan={','.join(str(api.plan_file(path)) for path in text.split(','))}"
