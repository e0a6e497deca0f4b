"""Intervals hold what they promise for sources that they know nothing of, widen away from what was measured, and so does memory's risk."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from cost_cases import DEEPSPEED, MEGATRON, a100, gpt
from msgspec.structs import replace

from orchestrator.cost import uncertainty
from orchestrator.cost.calibration import Calibration, calibrated, datasheet, found, priced
from orchestrator.cost.uncertainty import (
    Cell,
    Ratios,
    Situation,
    chance_of_not_fitting,
    interval,
    kept_free,
    situation,
)
from orchestrator.hardware.catalog import GPUS
from orchestrator.hardware.spec import Part, slowest
from orchestrator.model.families import describe, from_hf_config
from orchestrator.model.lora import Lora
from orchestrator.model.training import Training
from orchestrator.strategy.layout import FittedOn

H100 = Situation(generation="9", experts=False, eight_bit=False)
TRAINING = Training(global_batch_size=64, seq_length=2048)
MODEL = describe(gpt(), 2048)
LORA = replace(TRAINING, lora=Lora(rank=16))


def width(now: Situation) -> float:
    found = interval(now, Calibration())
    assert found is not None
    low, high = found
    assert low <= 1 <= high
    return high / low


def test_an_interval_widens_with_each_kind_of_extrapolation_that_the_published_runs_show_to_be_worse() -> None:
    known = width(H100)
    assert known < width(replace(H100, beyond=("engine",))) < width(replace(H100, beyond=("engine", "gpu")))
    assert width(replace(H100, experts=True)) > 0.95 * known  # as wide: real routing is priced
    assert width(replace(H100, generation="8")) < width(replace(H100, generation="12", beyond=("engine", "gpu")))


def test_runs_of_a_stock_stack_count_most_for_a_stock_stack() -> None:
    """Strangers' runs of dense models on H100 and H200, of which the package has 33, are next to what is predicted for such nodes; with
    them are two of adapters, of NVIDIA's functional cards."""
    stock = replace(H100, stock=True)
    theirs = [cell for cell in uncertainty.known().cells if cell.situation.stock and not cell.situation.experts]
    assert sum(len(cell.seconds) for cell in theirs) == 33 + 2
    assert width(stock) < width(H100)
    cluster = replace(a100(8), stack="stock")
    assert situation(MODEL, TRAINING, cluster, calibrated(cluster, MEGATRON)).stock


def test_an_interval_is_wider_for_layers_that_are_run_operation_by_operation() -> None:
    """Published runs of transformers' own modules, LoRA's and ZeRO-3's on V100, took up to eight times as long as predicted."""
    for now in (H100, replace(H100, generation="8"), replace(H100, beyond=("engine",))):
        assert width(replace(now, transformers=True)) > 1.2 * width(now)
    model, cluster = describe(gpt(), 2048), a100(8)
    assert situation(model, TRAINING, cluster, calibrated(cluster, DEEPSPEED), transformers=True).transformers


def test_a_generation_whose_published_runs_are_predicted_badly_is_said_to_be() -> None:
    """V100's runs by constants that knew none: off by 20% in the median, most of them slower; Ampere's by 5%. Their peaks are within 15%
    since DeepSpeed's bucket is priced."""
    said = uncertainty.poorly_predicted(replace(H100, generation="7"))
    assert said.startswith("published runs on GPUs of this generation took 1.2 times as long as predicted, in the median")
    assert "tune=5" in said
    assert [uncertainty.poorly_predicted(replace(H100, generation=other)) for other in ("8", "9", "10", "")] == [""] * 4


def test_an_unseen_gpu_has_nearly_the_spread_of_whole_sources() -> None:
    """Where nothing is near, everything is as far."""
    cells = (
        Cell(situation=H100, seconds=(1.0,) * 50),
        Cell(situation=replace(H100, generation="8"), seconds=(0.5,) * 25 + (2.0,) * 25),
    )
    far = Situation(generation="12", experts=False, eight_bit=False, beyond=("engine", "gpu"))
    assert interval(far, Calibration(), cells) == (0.5, 2.0)
    assert interval(H100, Calibration(), cells[:1]) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("fitted", "changes", "found"),
    [
        (FittedOn(kinds=("dense 16-bit",), num_gpus=32, seq_length=1024), {}, ()),
        (FittedOn(kinds=("dense 16-bit",), num_gpus=31, seq_length=1023), {}, ("scale", "sequence length")),
        (FittedOn(kinds=("dense 8-bit",), num_gpus=64, seq_length=2048), {}, ("precision",)),
        (FittedOn(kinds=("dense 16-bit",), num_gpus=64, seq_length=2048), {"precision": "fp8"}, ("precision",)),
        (None, {}, ("engine",)),
    ],
)
def test_what_lies_outside_of_the_fitted_runs_is_named(fitted: FittedOn | None, changes: dict[str, object], found: tuple[str, ...]) -> None:
    training = msgspec.convert({**msgspec.to_builtins(TRAINING), **changes}, Training)
    assert situation(MODEL, training, a100(64), Calibration(fitted=fitted)).beyond == found


def test_layers_of_linear_attention_are_outside_of_runs_that_had_none() -> None:
    fitted = FittedOn(kinds=("dense 16-bit",), num_gpus=64, seq_length=2048)
    nine: dict[str, object] = {
        **{"model_type": "qwen3_5_text", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 16, "head_dim": 256},
        **{"num_key_value_heads": 4, "vocab_size": 248320, "intermediate_size": 12288, "max_position_embeddings": 262144},
    }
    mamba: dict[str, object] = {"model_type": "mamba2", "num_hidden_layers": 4, "hidden_size": 512, "num_heads": 16, "head_dim": 64,
                                "vocab_size": 1024}  # fmt: skip
    for model in (describe(from_hf_config(config, "x"), 2048) for config in (nine, mamba)):
        assert situation(model, TRAINING, a100(64), Calibration(fitted=fitted)).beyond == ("linear attention",)
        assert situation(model, TRAINING, a100(64), Calibration()).beyond == ("engine", "linear attention")
        own = replace(fitted, kinds=(*fitted.kinds, "linear attention"))
        assert situation(model, TRAINING, a100(64), Calibration(fitted=own)).beyond == ()
    assert width(H100) < width(replace(H100, beyond=("linear attention",)))


def test_training_adapters_is_a_situation_of_its_own_until_own_runs_had_them() -> None:
    """No constant is fitted to a published run of LoRA, whatever its engine; a user's own may be."""
    fitted = FittedOn(kinds=("dense 16-bit",), num_gpus=64, seq_length=2048)
    assert situation(MODEL, LORA, a100(64), Calibration(fitted=fitted)).beyond == ("adapters",)
    assert situation(MODEL, LORA, a100(64), Calibration()).beyond == ("engine", "adapters")
    assert situation(MODEL, TRAINING, a100(64), Calibration(fitted=fitted)).beyond == ()
    own = Calibration(interval=(0.98, 1.02), fitted=fitted)
    wide = interval(situation(MODEL, LORA, a100(64), own), own)
    assert wide is not None
    assert wide[1] / wide[0] > 1.5
    had = replace(own, fitted=replace(fitted, kinds=("adapters", *fitted.kinds)))
    assert interval(situation(MODEL, LORA, a100(64), had), had) == (0.98, 1.02)


def test_runs_of_adapters_count_most_for_adapters() -> None:
    """The 104 timed rows of LoRA stand in cells of their own, of which a plan of whole training has half the weight; where few of them are
    near, its interval is wider than that of whole training."""
    cells = [cell for cell in uncertainty.known().cells if "adapters" in cell.situation.beyond]
    assert sum(len(cell.seconds) for cell in cells) == 104
    mlperfs = next(cell for cell in cells if cell.situation.generation == "9" and cell.situation.eight_bit)
    assert uncertainty.weight(mlperfs.situation, replace(H100, eight_bit=True)) == 1 / 2
    assert uncertainty.weight(mlperfs.situation, replace(H100, eight_bit=True, beyond=("adapters",))) == 1
    assert width(replace(H100, beyond=("adapters",))) > width(H100)
    assert width(replace(H100, experts=True, beyond=("adapters",))) > width(replace(H100, experts=True))


def test_a_peak_knows_nothing_of_adapters() -> None:
    for now in (H100, replace(H100, transformers=True, beyond=("engine",))):
        adapted = replace(now, beyond=("adapters", *now.beyond))
        assert kept_free(0.05, adapted) == kept_free(0.05, now)
        assert chance_of_not_fitting(70.0, 80.0, adapted) == chance_of_not_fitting(70.0, 80.0, now)


def test_a_gpu_that_no_source_measured_is_named() -> None:
    workstation = replace(a100(8), gpu=GPUS["L40S"])
    assert situation(MODEL, TRAINING, workstation, datasheet(workstation, MEGATRON)).beyond == ("engine", "gpu")
    assert situation(MODEL, TRAINING, a100(8), calibrated(a100(8), MEGATRON)).beyond == ()
    assert situation(MODEL, TRAINING, a100(8), calibrated(a100(8), DEEPSPEED)).beyond == ()
    assert situation(MODEL, TRAINING, a100(8), calibrated(a100(8), replace(DEEPSPEED, engine="another"))).beyond == ("engine",)


def test_a_users_own_runs_make_the_interval_until_it_is_extrapolated() -> None:
    own = Calibration(interval=(0.98, 1.02), fitted=FittedOn(kinds=("dense 16-bit",), num_gpus=8, seq_length=2048))
    near, far = situation(MODEL, TRAINING, a100(16), own), situation(MODEL, TRAINING, a100(64), own)
    assert interval(near, own) == (0.98, 1.02)
    wide = interval(far, own)
    assert wide is not None
    assert wide[0] < 0.98
    assert wide[1] > 1.02
    old = replace(own, fitted=None)  # a file from before files said what they were fitted on
    assert interval(situation(MODEL, TRAINING, a100(64), old), old) == (0.98, 1.02)


def test_own_runs_of_one_model_say_nothing_of_one_eight_times_as_large() -> None:
    """Ten runs of 8B on 32 GPUs gave 70B an interval of 1%, their own residual."""
    seen = FittedOn(kinds=("dense 16-bit",), num_gpus=64, seq_length=2048, parameters=(MODEL.parameters, MODEL.parameters))
    own = Calibration(interval=(0.99, 1.01), fitted=seen)
    assert interval(situation(MODEL, TRAINING, a100(64), own), own) == (0.99, 1.01)
    for smallest, largest in ((MODEL.parameters // 8, MODEL.parameters // 3), (MODEL.parameters * 3, MODEL.parameters * 8)):
        other = replace(own, fitted=replace(seen, parameters=(smallest, largest)))
        now = situation(MODEL, TRAINING, a100(64), other)
        assert now.beyond == ("size",)
        wide = interval(now, other)
        assert wide is not None
        assert wide[0] < 0.9
        assert wide[1] > 1.1
    between = replace(own, fitted=replace(seen, parameters=(MODEL.parameters // 8, MODEL.parameters * 8)))
    assert situation(MODEL, TRAINING, a100(64), between).beyond == ()


def test_the_chance_of_not_fitting_falls_with_the_room_that_is_left_and_is_never_none() -> None:
    chances = [chance_of_not_fitting(peak, 80.0, H100) for peak in (20.0, 60.0, 70.0, 76.0, 80.0, 90.0, 160.0)]
    assert chances == sorted(chances)
    assert 0 < chances[0] < 0.01
    assert 0.3 < chances[4] < 0.8, "a prediction of all there is fits about half the time"
    assert chances[-1] > 0.98


@pytest.mark.parametrize("risk", [0.01, 0.05, 0.2])
def test_what_is_kept_free_for_a_risk_leaves_that_risk(risk: float) -> None:
    share = kept_free(risk, H100)
    assert 0 <= share < 1
    assert chance_of_not_fitting(80.0 * (1 - share), 80.0, H100) <= risk
    assert share <= kept_free(risk / 2, H100)
    if share:
        assert chance_of_not_fitting(80.0 * (1 - share) * 1.02, 80.0, H100) > risk


def test_what_is_kept_free_is_the_least_that_leaves_the_risk() -> None:
    """By trying every measured ratio in turn, which the search for it does not."""
    values = uncertainty.ratios(H100, "bytes")
    for risk in (0.002, 0.05, 0.3, 0.99):
        ratios = [1.0, *(value for value in values.values if value > 1)]
        first = next(ratio for ratio in ratios if values.share_above(ratio * (1 + 1e-9)) <= risk)
        assert kept_free(risk, H100) == 1 - 1 / (first * (1 + 1e-9))


def test_a_risk_that_nobody_measured_is_refused() -> None:
    for risk in (0.0, 1e-6, 1.0):
        with pytest.raises(ValueError, match="can't be told from"):
            kept_free(risk, H100)


def test_the_packages_errors_are_ratios_around_one_of_many_sources() -> None:
    errors = uncertainty.known()
    assert len(errors.cells) > 20
    assert {"A100-SXM-80GB", "H100-SXM-80GB", "B200", "V100-SXM2-32GB"} <= {*errors.gpus} <= {*GPUS}
    for cell in errors.cells:
        for ratios in (cell.seconds, cell.bytes):
            assert list(ratios) == sorted(ratios)
            assert all(ratio > 0 for ratio in ratios)
    size = Path(uncertainty.__file__).with_name("errors.json").stat().st_size
    assert size < 40_000, "every plan reads it"


def test_quantiles_of_equal_weights_are_hazens() -> None:
    """R. Hyndman and Y. Fan, "Sample quantiles in statistical packages", 1996, type 5: linear between the middles of n equal steps, the
    least value below the first of them and the largest above the last."""
    values = [1.3, 0.7, 1.0, 2.0, 0.9]
    shares = np.linspace(0, 1, 21)
    found = [Ratios((value, 3.0) for value in values).quantile(float(share)) for share in shares]
    assert found == pytest.approx(list(np.quantile(values, shares, method="hazen")))
    assert Ratios([(1.5, 1.0)]).quantile(0.2) == Ratios([(1.5, 1.0)]).quantile(0.9) == 1.5


def test_a_weight_of_two_is_two_runs() -> None:
    """Between the middles of unequal weights a quantile is not that of the runs counted singly, but a share of the weight is."""
    weighted, single = Ratios([(0.8, 1.0), (1.2, 2.0), (1.5, 1.0)]), Ratios([(0.8, 1.0), (1.2, 1.0), (1.2, 1.0), (1.5, 1.0)])
    for value in (0.5, 0.8, 1.0, 1.2, 1.4, 1.5):
        assert weighted.share_above(value) == pytest.approx(single.share_above(value))
    assert [single.share_above(value) for value in (0.5, 0.8, 0.9, 1.2, 1.3, 1.5)] == pytest.approx([1, 1, 0.75, 0.75, 0.25, 0.25])
    assert single.share_above(1.6) == 1 / 5, "the next run may be above all four"
    assert weighted.quantile(0.5) == 1.2


def test_each_difference_halves_a_runs_weight_and_two_of_them_count_twice() -> None:
    other = {"generation": "8", "transformers": True, "experts": True, "eight_bit": True, "stock": True, "beyond": ("scale", "engine")}
    shares = {name: uncertainty.weight(H100, replace(H100, **{name: value})) for name, value in other.items()}
    assert shares == {"generation": 1 / 4, "transformers": 1 / 4, "experts": 1 / 2, "eight_bit": 1 / 2, "stock": 1 / 2, "beyond": 1 / 4}
    every = replace(H100, **other)
    assert uncertainty.weight(H100, every) == uncertainty.weight(every, H100) == 1 / 512
    assert uncertainty.weight(every, every) == 1
    assert uncertainty.weight(replace(H100, beyond=("scale",)), replace(H100, beyond=("scale", "gpu"))) == 1 / 2


def test_a_cell_of_few_runs_weighs_less_than_one_of_many_and_never_more_than_its_share() -> None:
    """n runs have n/(n + 20) of the weight that a cell of very many has: 20 half of it, 180 nine tenths."""
    cells = (Cell(situation=H100, bytes=(1.0,) * 20), Cell(situation=H100, bytes=(2.0,) * 180))
    assert chance_of_not_fitting(10.0, 15.0, H100, cells) == pytest.approx(0.9 / (0.5 + 0.9))


def test_on_the_cpu_only_own_runs_make_an_interval() -> None:
    cpu = replace(H100, generation="")
    assert interval(cpu, Calibration()) is None
    assert interval(replace(cpu, beyond=("scale",)), Calibration(interval=(0.9, 1.1))) == (0.9, 1.1)
    assert uncertainty.poorly_predicted(cpu) == ""
    assert interval(H100, Calibration(), ()) is None


def test_each_type_of_gpu_has_the_constants_of_its_own_runs_or_the_datasheets() -> None:
    """Of a cluster of A100, for which there is a file, and of L40S, for which there is none."""
    here = a100(16)
    parts = tuple(Part(gpu=GPUS[name], num_gpus=8, levels=here.levels) for name in ("A100-SXM-80GB", "L40S"))
    mixed = replace(here, gpu=slowest([part.gpu for part in parts]), parts=parts)
    fitted, other = priced(mixed, MEGATRON, found("shipped", mixed, [MEGATRON], None)[0]).parts
    assert fitted == calibrated(here, MEGATRON)
    assert fitted.fitted_on
    assert other == datasheet(mixed.views()[1], MEGATRON)
    assert [part.fitted_on for part in priced(mixed, MEGATRON, None).parts] == ["", ""]


def test_an_interval_leaves_out_a_little_less_at_either_end_than_a_ninety_percent_one_would() -> None:
    """Of one source's evenly spread ratios: 96% are inside, since sources differ more than the runs of one."""
    cells = (Cell(situation=H100, seconds=tuple(0.5 + i / 1000 for i in range(1001))),)
    found = interval(H100, Calibration(), cells)
    assert found is not None
    assert 0.95 < found[1] - found[0] <= 0.97
    assert found[0] - 0.5 == pytest.approx(1.5 - found[1], abs=0.002)
