"""A report of a run takes its candidates from the page that the run left, where plan and price are the same; else it searches."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import orchestrator as so
from orchestrator import planning
from orchestrator.__main__ import main
from orchestrator.console.report import of_run
from orchestrator.pictures import PAGE, VARIABLE, drawable
from orchestrator.report.kept import Drawn, digest, drawn_in, element

pytestmark = pytest.mark.skipif(not drawable(), reason="no bokeh")


def test_no_search_is_done_where_the_page_has_the_candidates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    run = tmp_path / "run"
    answer = so.plan(recipe="gpt_tiny", gpus=4, cluster="cpu")
    answer.write(run)
    assert not (run / PAGE).exists()  # drawing takes longer than most plans
    assert main(["report", str(run)]) == 0
    first = (run / PAGE).read_text()
    kept = drawn_in(first, answer.plan)
    assert kept is not None
    assert kept.total == len(answer.found.outcomes)
    assert min(point[1] for point in kept.points if point[3] == "priced") == answer.step_time_s

    def no_search(*_: object, **__: object) -> None:
        raise AssertionError("searched")

    monkeypatch.setattr(planning.Planner, "fastest", no_search)
    assert main(["report", str(run)]) == 0
    again = drawn_in((run / PAGE).read_text(), answer.plan)
    assert again == kept
    (run / PAGE).unlink()
    with pytest.raises(AssertionError, match="searched"):
        of_run(run)


def test_a_run_that_has_exported_its_weights_is_reported_compared_and_priced_anew(tmp_path: Path) -> None:
    (tmp_path / "w").mkdir()
    so.plan(recipe="gpt_tiny", gpus=2, cluster="cpu", **{"model.export_to": str(tmp_path / "w")}).write(tmp_path / "run")
    (tmp_path / "w" / "config.json").write_text("{}")
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    for words in (["report", str(tmp_path / "run")], ["compare", str(tmp_path / "run"), str(tmp_path / "other")]):
        assert main(words) == 0
    assert main(["run", f"plan={tmp_path / 'run' / 'plan.json'}", f"out={tmp_path / 'again'}"]) == 2, "a start writes there"


def test_candidates_of_another_plan_or_price_are_not_taken(tmp_path: Path) -> None:
    one, other = (so.plan(recipe="gpt_tiny", gpus=4, cluster="cpu", pin={"tp": tp}).plan for tp in (1, 2))
    page = element(Drawn(plan=digest(one), total=3, points=(("a</script>", 1.0, 2.0, "priced", "why"),), ruled=()))
    assert page.count("</script>") == 1
    found = drawn_in(page, one)
    assert found is not None
    assert found.points[0][0] == "a</script>"
    assert drawn_in(page, other) is None
    assert drawn_in("<html></html>", one) is None
    assert drawn_in('<script type="application/octet-stream" id="candidates">{</script>', one) is None
