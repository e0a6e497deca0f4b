"""trace.json: a step as it was simulated, in the format of Chrome's tracing."""

from __future__ import annotations

import json

import pytest
from msgspec.structs import replace
from report_plans import PLAN

from orchestrator.cost.schedule.timeline import Slot
from orchestrator.cost.step import Played
from orchestrator.report.trace import bars, trace_json


def step(passes: int, stages: int = 1) -> Played:
    """Each stage runs so many passes of a second each; then its reduction of .5 s times the stage, an update of 1 s and .25 s once."""
    lane = [Slot("backward" if n % 2 else "forward", n // 2, 0, float(n), n + 1.0) for n in range(passes)]
    return Played([lane] * stages, tuple(0.5 * stage for stage in range(stages)), passes + 2.0, 1.0, 0.25)


@pytest.mark.parametrize(("passes", "most", "drawn"), [(20, 8, 8), (20, 12, 12), (20, 1, 4), (20, 20, 20), (9, 8, 8)])
def test_the_middle_of_a_long_step_is_one_bar_that_says_how_many_passes(passes: int, most: int, drawn: int) -> None:
    found = list(bars(step(passes), most))
    own = [bar for bar in found if bar.kind in ("forward", "backward")]
    steady = [bar for bar in found if bar.kind == "steady"]
    assert len(own) == drawn
    assert [bar.label for bar in steady] == ([f"{passes - drawn} passes like these"] if passes > drawn else [])
    for bar in steady:
        assert (bar.begin_s, bar.end_s) == (drawn // 2, passes - drawn // 2), "from the last one before to the first one behind"
    assert own[0].begin_s == 0
    assert max(bar.end_s for bar in own) == passes
    assert [bar.kind for bar in found[-2:]] == ["optimizer", "once"]


def test_many_stages_share_what_may_be_drawn() -> None:
    found = list(bars(step(20, stages=3), 24))
    for stage in range(3):
        mine = [bar for bar in found if bar.stage == stage]
        assert sum(bar.kind in ("forward", "backward") for bar in mine) == 8
        (reduction,) = [bar for bar in mine if bar.kind == "reduction"] if stage else [None]
        assert reduction is None or (reduction.begin_s, reduction.end_s) == (20, 20 + 0.5 * stage)
    assert not [bar for bar in bars(step(4)._replace(once_s=0.0), 24) if bar.kind == "once"]


def test_events_are_microseconds_of_one_process_with_a_thread_a_stage() -> None:
    one = replace(PLAN, pp=2, vpp=1)
    found = json.loads(trace_json(one, step(4, stages=2)))
    assert found["displayTimeUnit"] == "ms"
    named, timed = ([event for event in found["traceEvents"] if event["ph"] == kind] for kind in ("M", "X"))
    assert {event["pid"] for event in (*named, *timed)} == {0}
    assert [(event["tid"], event["args"]["name"]) for event in named if event["name"] == "thread_name"] == [(0, "stage 0"), (1, "stage 1")]
    assert {event["tid"] for event in named if event["name"] == "process_name"} == {0}
    passes = [event for event in timed if event["tid"] == 1 and event["cat"] in ("forward", "backward")]
    assert [(event["ts"], event["dur"]) for event in passes] == [(n * 1e6, 1e6) for n in range(4)]
    assert [(event["ts"], event["dur"]) for event in timed if event["cat"] == "once"] == [(7e6, 0.25e6)] * 2
    assert not any("args" in event for event in timed)
    chunked = json.loads(trace_json(replace(one, vpp=2), step(4, stages=2)))["traceEvents"]
    assert {event["cat"] for event in chunked if "chunk" in event.get("args", {})} == {"forward", "backward"}
