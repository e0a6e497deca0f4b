"""What fitting to published runs promises."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from orchestrator.cost.calibration import CalibrationFile
from tests.calibrate.test_calibrate import SPREAD, planted_runs
from tests.validation.fitting import main
from tests.validation.pricing import named
from tests.validation.runs import held_out
from tests.validation.test_validate import only, rows_of, write_csv


def test_the_command_writes_a_file_that_validation_takes(tmp_path: Path) -> None:
    runs = planted_runs()
    rows = [{**row, "step_time_s": repr(run.time_s)} for row, run in zip(rows_of(*SPREAD), runs, strict=True)]
    table = write_csv(tmp_path / "mine.csv", [{**row, "gpu": "A100-SXM-80GB"} for row in rows])
    assert main([f"runs={table}", f"out={tmp_path / 'out'}"]) == 0
    (path,) = (tmp_path / "out").glob("*.json")
    file = msgspec.json.decode(path.read_bytes(), type=CalibrationFile)
    assert (file.engine, file.gpu, file.fitted_runs) == ("nanotron", "A100-SXM-80GB", 6)
    assert all(constant.unit for constant in file.constants.values())
    run = only({"gpu": "A100-SXM-80GB"})[0]
    calibration = named(str(path))(run)
    assert calibration.gemm_efficiency == file.constants["gemm_efficiency"].value
    assert calibration.name == "nanotron-A100-SXM-80GB"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "runs: is missing"),
        (["runs=/no/such"], "no such file or folder"),
        (["runs={here}", "all=yes"], "all=yes: is neither; choose one of true, false"),
    ],
)
def test_bad_words_are_one_message_and_status_2(words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here = write_csv(
        tmp_path / "runs.csv", rows_of({"engine": "deepspeed zero-3", "gpu": "A100-SXM-80GB", "tp": "1", "pp": "1", "dp": "8"})
    )
    assert main([word.format(here=here) for word in words]) == 2
    assert message in capsys.readouterr().err


def test_fewer_runs_than_constants_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"engine": "deepspeed zero-3", "gpu": "A100-SXM-80GB", "tp": "1", "pp": "1", "dp": "8"}
    assert main([f"runs={write_csv(tmp_path / 'runs.csv', rows_of(row))}"]) == 0
    assert "too few to tell them apart" in capsys.readouterr().out


def test_whole_sweeps_are_kept_out() -> None:
    kept = only({"model_name": "llama-like-3B"}, table="nanotron_ultrascale_playbook")[0]
    used = only({"model_name": "llama-like-8B"}, table="nanotron_ultrascale_playbook")[0]
    assert held_out(kept)
    assert not held_out(used)
