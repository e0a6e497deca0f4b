"""Every source is predicted without itself, and judged by intervals that know nothing of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from io import StringIO

import msgspec
import pytest
from rich.console import Console

from orchestrator.calibrate.pricing import Pricer, zero_shot
from orchestrator.cost.calibration import ANY_ENGINE, CalibrationFile, Constant
from orchestrator.model.lora import Lora
from orchestrator.units import GIB
from tests.validation.engines import ENGINES
from tests.validation.fitting import calibrate
from tests.validation.groups import GROUPS
from tests.validation.left_out import cells_of, constants_of, coverage, errors_of, judged, left_out, products_without, ran_out, regrets
from tests.validation.runs import Run
from tests.validation.test_validate import only


def runs_of(table: str, slower: float, count: int = 12) -> list[Run]:
    """Of one source, each as much slower than the datasheet says, whose peaks are 40 GiB."""
    (run,) = only({"peak_memory_gib": "40"})
    score = Pricer(zero_shot).score(run)
    assert score is not None
    return [replace(run, table=table, run_id=f"{table}/{i}", time_s=slower * score[0], memory_bytes=40 * GIB) for i in range(count)]


def nothing(runs: Sequence[Run]) -> Sequence[CalibrationFile]:
    return ()


def test_constants_for_a_source_are_fitted_without_it() -> None:
    runs = [*runs_of("a", 1.0), *runs_of("b", 1.5), *runs_of("c", 2.0)]
    asked: list[set[str]] = []

    def fit(rest: Sequence[Run]) -> Sequence[CalibrationFile]:
        asked.append({run.table for run in rest})
        return ()

    found = left_out(runs, fit)
    assert asked == [{"b", "c"}, {"a", "c"}, {"a", "b"}]
    assert {one.run.table: round(one.seconds or 0.0, 6) for one in found} == {"a": 1.0, "b": 1.5, "c": 2.0}
    assert {one.situation.beyond for one in found} == {("engine",)}


def test_an_engine_has_the_constants_of_another_one_that_they_are_fitted_with() -> None:
    """Megatron-LM of 2021 and of 2022 share a fit on A100: where all runs of one are left out, the other's say what both take."""
    group = next(group for group in GROUPS if "megatron_lm_2022" in group.engines)
    (run,) = only({"engine": "NeMo"})
    given = replace(run, engine=ENGINES["megatron_lm_2022"], gpu=group.gpus[0])
    constant = Constant(value=0.123, unit="share", origin="fitted")
    file = CalibrationFile(engine="megatron_lm_2021", gpu=group.gpus[0], traits="", fitted_on="10 runs", fitted_runs=10,
                           constants={"gemm_efficiency": constant}, fitted_median_error=0.0, held_out_runs=0, held_out_median_error=None,
                           interval=None)  # fmt: skip
    assert constants_of([file])(given).gemm_efficiency == 0.123
    assert constants_of([file])(replace(given, engine=ENGINES["nemo"])).gemm_efficiency != 0.123


def test_constants_are_the_packages_where_an_engine_has_none_on_the_gpu() -> None:
    """Its own on the nearest GPU, else the products that any engine's runs tell, on the GPU itself or on the nearest."""
    (run,) = only({"engine": "NeMo", "gpu": "B300"})

    def file(engine: str, gpu: str, value: float) -> CalibrationFile:
        constants = {name: Constant(value=value, unit="share", origin="fitted") for name in ("gemm_efficiency", "overlap_efficiency")}
        return CalibrationFile(engine=engine, gpu=gpu, traits="", fitted_on="10 runs", fitted_runs=10, constants=constants,
                               fitted_median_error=0.0, held_out_runs=0, held_out_median_error=None, interval=None)  # fmt: skip

    near, products = file("nemo", "B200", 0.4), file(ANY_ENGINE, "B300", 0.5)
    faster = 1.1**0.66  # B300's power over B200's
    assert constants_of([near])(run).gemm_efficiency == pytest.approx(0.4 * faster, rel=1e-5)
    assert constants_of([near])(run).overlap_efficiency == 0.4
    assert constants_of([near])(run).fitted is None
    assert constants_of([near, products])(run).gemm_efficiency == 0.5
    other = replace(run, engine=ENGINES["fsdp_torchtitan"], traits=ENGINES["fsdp_torchtitan"].traits)
    assert constants_of([near])(other) == zero_shot(other)
    assert constants_of([near, products])(other).gemm_efficiency == 0.5
    assert constants_of([file(ANY_ENGINE, "B200", 0.4)])(other).gemm_efficiency == pytest.approx(0.4 * faster, rel=1e-5)
    everything = {file.gpu for file in products_without("none")}
    assert everything - {file.gpu for file in products_without("megatron_lm_readme_tables")} == {"A100-SXM-80GB"}


def test_of_runs_in_8_bits_alone_no_share_of_16_is_fitted() -> None:
    """They tell how fast their products are, and not which share of it is 8 bits'; with one in 16 bits both are told."""
    fast = [replace(run, time_s=0.5 * (run.time_s or 0.0)) for run in runs_of("a", 1.0)]
    eight = [replace(run, engine=ENGINES["nemo"], training=msgspec.structs.replace(run.training, precision="fp8")) for run in fast]
    console = Console(file=StringIO())
    alone, both = (calibrate(runs, console, everything=True)[0] for runs in (eight, [*eight, replace(fast[0], engine=ENGINES["nemo"])]))
    assert "gemm_efficiency" not in alone.constants
    assert {"gemm_efficiency", "fp8_efficiency"} <= {*both.constants}


def test_an_interval_knows_nothing_of_the_source_that_it_is_judged_on() -> None:
    """The slowest is outside of what the two others span, the middle one inside."""
    held = coverage(left_out([*runs_of("a", 1.0), *runs_of("b", 1.5), *runs_of("c", 2.0)], nothing))
    assert [held[table].share for table in ("a", "b", "c")] == [1.0, 1.0, 0.0]
    assert held[""].runs == 36
    assert round(held[""].share, 3) == 0.667


def test_a_source_alone_on_its_gpu_is_as_one_on_a_gpu_that_nobody_measured() -> None:
    found = left_out(runs_of("a", 1.0), nothing)
    assert {one.situation.beyond for one in found} == {("engine", "gpu")}
    (cell,) = cells_of(found)
    assert cell.seconds == (1.0,) * 12
    assert errors_of(found).gpus == (found[0].run.gpu,)


def test_runs_of_adapters_are_in_cells_of_their_own() -> None:
    """Whatever the engine's constants were fitted to: no published run of LoRA is among that."""
    plain = runs_of("a", 1.0)
    adapters = [replace(run, training=msgspec.structs.replace(run.training, lora=Lora(rank=8))) for run in plain]
    whole, own = cells_of(left_out([*plain, *adapters], nothing))
    assert own.situation == msgspec.structs.replace(whole.situation, beyond=(*whole.situation.beyond, "adapters"))
    assert (len(whole.seconds), len(own.seconds)) == (12, 12)


def test_runs_that_are_said_to_fit_and_run_out_are_counted() -> None:
    runs = [*runs_of("a", 1.0, 200), *runs_of("b", 1.0, 4)]
    out, accepted = ran_out(left_out(runs, nothing), risk=0.9)
    assert (out, accepted) == (0, 204)
    broken = [replace(run, fits=False) if run.table == "b" else run for run in runs]
    assert ran_out(left_out(broken, nothing), risk=0.9) == (4, 204)
    assert list(judged(left_out(broken, nothing)))[-3].startswith("said to fit")


def test_what_is_ranked_first_is_held_beside_the_fastest_of_its_sweep() -> None:
    """Of three micro-batches, measured in the order that is opposite to the predicted one."""
    runs = only(*({"micro_batch_size": size} for size in ("1", "2", "4")))
    plain = left_out([replace(run, time_s=1.0) for run in runs], nothing)
    predicted = sorted(plain, key=lambda one: -(one.seconds or 0.0))  # measured over predicted: the fastest first
    found = left_out([replace(one.run, time_s=seconds) for one, seconds in zip(predicted, (4.0, 2.0, 1.0), strict=True)], nothing)
    assert regrets(found) == (0.75, 0.0, 1)
    assert regrets(found[:2]) == (0.5, 0.0, 1)
    assert regrets([]) == (0.0, 0.0, 0)
    lines = list(judged(found))
    assert lines[-2].startswith("ranked among those with a chance of 5% or less: the first 0.00% behind"), "no other table says any chance"
    assert lines[-1] == "ranked among all: the first 75.00% behind the fastest, the best of three 0.00%, in the mean of 1 sweeps"
    errors = sorted(abs(1 / (one.seconds or 1.0) - 1) for one in found)
    assert f"all: 3 runs, {errors[1]:.2%} off in the median" in lines[1]
