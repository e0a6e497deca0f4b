"""Which calibration file an engine is priced with, and what of it holds: a file, a folder, the package's, none."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from cost_cases import MEGATRON, a100
from msgspec.structs import replace

from orchestrator.cost import calibration
from orchestrator.cost.calibration import (
    ANY_ENGINE,
    AT_ITS_BOUND,
    CARRIES_OVER,
    DATASHEET,
    PRODUCTS,
    SHIPPED,
    Calibrated,
    Calibration,
    CalibrationFile,
    Constant,
    datasheet,
    digest,
    found,
    held,
    joined,
    moved,
    own,
    packaged,
    priced,
    read_file,
    shipped,
)
from orchestrator.errors import InputError
from orchestrator.hardware.catalog import GPUS

OTHER = replace(MEGATRON, engine="deepspeed", overlaps_param_gather=False)
A100 = "A100-SXM-80GB"


def file(engine: str = "megatron", gpu: str = A100, traits: str = digest(MEGATRON), **constants: float) -> CalibrationFile:
    return CalibrationFile(
        engine=engine,
        gpu=gpu,
        traits=traits,
        fitted_on="own runs",
        constants={name: Constant(value=value, unit="share", origin="fitted") for name, value in constants.items()},
        fitted_runs=3,
        fitted_median_error=0.0,
        held_out_runs=0,
        held_out_median_error=None,
        interval=(0.9, 1.1),
    )


def written(folder: Path, *files: CalibrationFile) -> Path:
    for one in files:
        (folder / f"{one.engine}-{one.gpu}.json").write_bytes(msgspec.json.encode(one))
    return folder


def choose(choice: str | None, folder: Path | None = None) -> list[Calibrated | None]:
    return found(choice, a100(8), [MEGATRON, OTHER], folder)


def test_a_folder_may_have_files_of_some_of_the_engines_and_must_have_one(tmp_path: Path) -> None:
    """The other keeps the package's, with the products of the user's own."""
    written(tmp_path, file(gemm_efficiency=0.5, overlap_efficiency=0.3))
    for found_by in (choose(str(tmp_path)), choose(None, tmp_path)):
        first, second = found_by
        assert first is not None
        assert second is not None
        assert first.source == str(tmp_path / f"megatron-{A100}.json")
        assert first.file.values() == {"gemm_efficiency": 0.5, "overlap_efficiency": 0.3}
        assert second.file.values()["gemm_efficiency"] == 0.5
        assert second.file.values().get("overlap_efficiency") != 0.3
        assert second.source == first.source
    empty = tmp_path / "none"
    empty.mkdir()
    with pytest.raises(InputError, match=f"holds none of megatron-{A100}.json, deepspeed-{A100}.json"):
        choose(str(empty))
    assert choose(None, empty) == choose(SHIPPED), "nothing was asked for"


def test_a_file_is_for_its_engine_on_its_gpu(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_bytes(msgspec.json.encode(file(gemm_efficiency=0.5)))
    first, second = choose(str(path))
    assert first is not None
    assert second is not None
    assert (first.source, first.file.values()) == (str(path), {"gemm_efficiency": 0.5})
    assert second.file.values()["gemm_efficiency"] == 0.5
    for wrong in (file(gpu="B200"), file(engine="nanotron")):
        path.write_bytes(msgspec.json.encode(wrong))
        with pytest.raises(InputError, match=f"is for {wrong.engine} on {wrong.gpu}; this plans megatron or deepspeed on {A100}"):
            choose(str(path))
    path.write_text("{}")
    with pytest.raises(InputError, match="is no calibration"):
        choose(str(path))
    with pytest.raises(InputError, match="can't be read"):
        read_file(tmp_path / "missing.json")
    assert own(tmp_path, MEGATRON, "B200") is None


def test_datasheets_and_the_packages_files_are_what_they_are_called() -> None:
    assert choose(DATASHEET) == [None, None]
    plain = choose(SHIPPED)
    assert choose(None) == plain
    assert [one.source for one in plain if one is not None] == [""] * sum(one is not None for one in plain)
    named = next(one for one in plain if one is not None).file
    by_name = found(f"{named.engine}-{named.gpu}", a100(8), [replace(MEGATRON, engine=named.engine)], None)
    assert by_name[0] is not None
    assert by_name[0].source == ""
    assert shipped("no_such", A100) is None
    assert calibration.file_named("megatron") is None
    assert calibration.file_named(f"a/megatron-{A100}") is None


def test_of_a_file_for_other_traits_what_says_nothing_of_the_engine_holds() -> None:
    """A share of the GPU's products carries over; what an engine hides does not, nor does the interval of its runs."""
    one = file(traits="0" * 12, gemm_efficiency=0.5, overlap_efficiency=0.3)
    kept = held(one, MEGATRON)
    assert kept.values() == {"gemm_efficiency": 0.5}
    assert kept.interval is None
    assert kept.carried_from == "other traits of megatron"
    assert "without overlap_efficiency" in kept.fitted_on
    assert held(file(gemm_efficiency=0.5, overlap_efficiency=0.3), MEGATRON).interval == (0.9, 1.1)
    carried = replace(one, carried_from="nanotron")
    assert held(carried, MEGATRON) is carried
    assert "overlap_efficiency" not in CARRIES_OVER
    assert {"gemm_efficiency", "memory_efficiency", "latency_factor", "core_share"} <= CARRIES_OVER.keys()


def test_a_gpu_without_a_file_has_the_nearest_ones() -> None:
    """An H200 is the H100's chip. A B300 is another than the B200, at more power. An H20, of a seventh of the peak, and what has no NVLink
    have none."""
    near, source = packaged("megatron", GPUS["H200"]), shipped("megatron", "H100-SXM-80GB")
    assert near is not None
    assert source is not None
    there = near.file
    assert (there.gpu, there.carried_from, there.measured) == ("H200", "nemo on H100-SXM-80GB", None)
    assert there.values()["gemm_efficiency"] == source.values()["gemm_efficiency"]
    at_bound = {name for name, constant in source.constants.items() if constant.origin.startswith(AT_ITS_BOUND)}
    assert at_bound
    assert there.constants.keys() == source.constants.keys() - at_bound
    assert packaged("megatron", GPUS["H20"]) is packaged("megatron", GPUS["L40S"]) is None
    products = packaged("deepspeed", GPUS["H200"])
    assert products is not None
    assert products.file.engine == ANY_ENGINE
    assert products.file.constants.keys() <= {*PRODUCTS}
    b200 = shipped("megatron", "B200")
    assert b200 is not None
    values = moved(b200, GPUS["B200"], GPUS["B300"]).values()
    assert values["gemm_efficiency"] == pytest.approx(b200.values()["gemm_efficiency"] * 1.1**0.66, rel=1e-5)
    assert values["pointwise_factor"] == b200.values()["pointwise_factor"]


def test_traits_are_told_apart_by_what_is_not_the_default_whatever_the_engine_is_called() -> None:
    assert digest(MEGATRON) == digest(replace(MEGATRON, engine="other", bucket_itemsize=2))
    assert digest(MEGATRON) != digest(replace(MEGATRON, bucket_itemsize=4))
    assert digest(replace(MEGATRON, tp_overlap=1)) == digest(replace(MEGATRON, tp_overlap=1.0))  # type: ignore[arg-type]
    assert len(digest(MEGATRON)) == 12


def test_a_price_is_the_datasheets_but_for_what_a_file_has() -> None:
    base = datasheet(a100(8), MEGATRON)
    assert priced(a100(8), MEGATRON, None) == base
    mine = priced(a100(8), MEGATRON, Calibrated(file(gemm_efficiency=0.5)))
    assert (mine.gemm_efficiency, mine.memory_efficiency) == (0.5, base.memory_efficiency)
    assert (mine.name, mine.fitted_on, mine.interval) == (f"megatron-{A100}", "own runs", (0.9, 1.1))
    anybodys = priced(a100(8), MEGATRON, Calibrated(replace(file(gemm_efficiency=0.5), engine=ANY_ENGINE, carried_from="x")))
    assert anybodys.name == "datasheet with matrix products carried over from x"
    carried = priced(a100(8), MEGATRON, Calibrated(replace(file(gemm_efficiency=0.5), carried_from="x")))
    assert carried.name == f"megatron-{A100} (carried over from x)"
    with pytest.raises(InputError, match="has constants that are not known: no_such"):
        priced(a100(8), MEGATRON, Calibrated(file(no_such=1.0)))


def test_of_two_types_what_is_between_them_is_the_worse_and_what_bounds_read_the_better() -> None:
    one = Calibration(name="a", p2p_efficiency=0.5, microbatch_overhead_s=2.0, step_overhead_s=1.0, memory_margin=0.1, gemm_efficiency=0.5)
    other = Calibration(
        name="b", p2p_efficiency=0.8, microbatch_overhead_s=1.0, step_overhead_s=3.0, memory_margin=0.2, gemm_efficiency=0.9
    )
    for parts in ((one, other), (other, one)):
        both = joined(parts)
        assert both.parts == parts
        assert both.name == " + ".join(part.name for part in parts)
        assert (both.p2p_efficiency, both.microbatch_overhead_s) == (0.5, 1.0)
        assert (both.step_overhead_s, both.memory_margin) == (3.0, 0.2)
        assert both.gemm_efficiency == parts[0].gemm_efficiency
        assert (both.interval, both.own_peaks, both.fitted) == (None, False, None)
    assert GPUS[A100].name == A100
