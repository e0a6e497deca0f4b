"""calibration= of a run: which prices it plans with, what it says and keeps of them; and what is kept free of the memory by them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from orchestrator import run
from orchestrator.cost.calibration import CalibrationFile, Constant, digest
from orchestrator.engines import ENGINES
from orchestrator.hardware.spec import Software
from orchestrator.plan import Plan, from_json

WORDS = ("recipe=llama2_7b", "gpus=8", "cluster=dgx_h100", "engine=megatron", "launch=none")
SHIPPED = "megatron-H100-SXM-80GB"
SOFTWARE = Software()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ORCHESTRATOR_CALIBRATIONS", raising=False)
    return tmp_path


def mine(path: Path, **constants: float) -> Path:
    """A calibration of megatron on H100 of the user's own."""
    file = CalibrationFile(
        engine="megatron",
        gpu="H100-SXM-80GB",
        traits=digest(ENGINES["megatron"].traits(SOFTWARE)),
        fitted_on="12 runs of own",
        constants={name: Constant(value=value, unit="share", origin="fitted") for name, value in constants.items()},
        fitted_runs=12,
        fitted_median_error=0.02,
        held_out_runs=0,
        held_out_median_error=None,
        interval=(0.9, 1.1),
    )
    path.write_bytes(msgspec.json.encode(file))
    return path


def planned(*words: str) -> Plan:
    out = words[-1].removeprefix("out=")
    assert run.main(words) == 0
    return from_json(Path(out, "plan.json").read_bytes())


def seconds(plan: Plan) -> float:
    assert plan.predicted is not None
    return plan.predicted.step_time_s


def test_a_run_plans_with_the_calibration_it_is_given(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = mine(folder / "mine.json", gemm_efficiency=0.2)
    slow = planned(*WORDS, "calibration=mine.json", "out=a")
    said = " ".join(capsys.readouterr().out.split())
    assert f"prices {SHIPPED} calibration, {path} (fitted on 12 runs of own)" in said
    usual = planned(*WORDS, "out=b")
    assert seconds(slow) > 2 * seconds(usual)
    assert slow.prices is not None
    assert slow.prices.constants == {"gemm_efficiency": 0.2}
    assert usual.prices is None
    assert planned(*WORDS, f"calibration={SHIPPED}", "out=c") == usual
    assert seconds(planned(*WORDS, "calibration=datasheet", "out=d")) != seconds(usual)
    assert seconds(planned("recipe=a/config.yaml", "launch=none", "out=e")) == seconds(slow)


def test_a_saved_plan_keeps_its_prices(folder: Path) -> None:
    path = mine(folder / "mine.json", gemm_efficiency=0.2)
    slow = planned(*WORDS, f"calibration={path}", "out=a")
    path.unlink()
    again = planned("plan=a/plan.json", "launch=none", "out=b")
    assert (again.predicted, again.prices) == (slow.predicted, slow.prices)
    usual = planned("plan=a/plan.json", "calibration=shipped", "launch=none", "out=c")
    assert usual.prices is None
    assert seconds(usual) < seconds(slow) / 2


def test_a_calibration_that_does_not_fit_is_refused_with_the_choices(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine(folder / "mine.json")
    assert run.main((*WORDS, "calibration=none.json", "out=a")) == 2
    assert "calibration=none.json: can't be read" in capsys.readouterr().err
    assert run.main(("recipe=llama2_7b", "gpus=8", "cluster=dgx_a100_80gb", "calibration=mine.json", "launch=none", "out=a")) == 2
    assert "is for megatron on H100-SXM-80GB; this plans" in capsys.readouterr().err
    assert not (folder / "a").exists()


@pytest.mark.parametrize("said", ["mine.json", "mine"])
def test_a_file_of_one_engine_prices_that_one_where_another_is_the_fastest(said: str, folder: Path) -> None:
    (folder / "mine").mkdir()
    for name in ("mine.json", f"mine/{SHIPPED}.json"):
        mine(folder / name, step_overhead_s=9.0)
    words = ("recipe=llama2_7b", "gpus=8", "cluster=dgx_h100", f"calibration={said}", "launch=none")
    plan = planned(*words, "out=a")
    assert plan.engine != "megatron"
    assert seconds(planned(*words, "engine=megatron", "out=b")) > seconds(plan)
    assert run.main((*words, f"engine={plan.engine}", "out=c")) == 2, "nothing is priced by the file then"


def test_what_is_kept_free_follows_from_measured_peaks(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """79.6 of 80 GB are the GPU's own figure in the catalog; a quarter of it stays free by this calibration, the user's GiB by memory."""
    path = mine(folder / "mine.json", memory_margin=0.25)
    planned(*WORDS, "verbose=true", f"calibration={path}", "out=a")
    said = " ".join(capsys.readouterr().out.split())
    assert "GiB reserve: 95% of measured peaks are at most 25.0% above their prediction)" in said
    planned(*WORDS, "verbose=true", f"calibration={path}", "memory.reserve_gib=3", "out=b")
    said = " ".join(capsys.readouterr().out.split())
    assert "less 3.0 GiB reserve)" in said
    plan = from_json(Path("a", "plan.json").read_bytes())
    assert plan.predicted is not None
    assert plan.predicted.peak_memory_bytes <= 0.75 * plan.cluster.gpu.memory


def test_the_users_own_peaks_count_in_place_of_published_ones(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A margin that own runs measured is what is kept free, less or more than published runs ask for; one that a file without own runs
    carries along (from timers of a run, say) is not theirs."""
    path = mine(folder / "mine.json", memory_margin=0.01)
    planned(*WORDS, "verbose=true", f"calibration={path}", "out=a")
    said = " ".join(capsys.readouterr().out.split())
    assert " reserve: 95% of measured peaks are at most 1.0% above their prediction)" in said
    assert "(the reserve goes by those of your own runs)" in said
    without = msgspec.structs.replace(msgspec.json.decode(path.read_bytes(), type=CalibrationFile), interval=None)
    path.write_bytes(msgspec.json.encode(without))
    planned(*WORDS, "verbose=true", f"calibration={path}", "out=b")
    said = " ".join(capsys.readouterr().out.split())
    assert "GiB reserve: at most 5% chance of running out (memory.risk))" in said
