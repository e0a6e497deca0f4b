"""What fitting promises: planted constants come back, and it says what it can't do."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from orchestrator.calibrate import __main__
from orchestrator.calibrate.__main__ import main
from orchestrator.calibrate.files import margins, measured_of, with_margin
from orchestrator.calibrate.fit import ANY_HOST, SLOWER_HOSTS, chooser, fit
from orchestrator.calibrate.pricing import Pricer, zero_shot
from orchestrator.calibrate.runs import SEVERAL, load
from orchestrator.cost.calibration import (
    CARRIES_OVER,
    SHARES,
    UNITS,
    Calibration,
    CalibrationFile,
    Constant,
    datasheet,
    digest,
    found,
    priced,
    read_file,
    unit,
)
from orchestrator.engines import ENGINES as PLANNED_ENGINES
from orchestrator.errors import InputError, OrchestratorError
from orchestrator.hardware.spec import Software
from orchestrator.model.lora import Lora
from orchestrator.plan import Plan, to_json
from tests.validation.runs import Run
from tests.validation.test_validate import only

PLANTED = {"gemm_efficiency": 0.55, "pointwise_factor": 1.6}
SPREAD: tuple[dict[str, str], ...] = (
    {},
    {"hidden_size": "4096", "ffn_hidden_size": "16384", "micro_batch_size": "1"},
    {"tp": "1", "pp": "1", "dp": "8", "micro_batch_size": "4"},
    {"tp": "1", "pp": "1", "dp": "8", "seq_length": "8192", "micro_batch_size": "1"},
    {"tp": "4", "pp": "1", "dp": "2", "micro_batch_size": "8"},
    {"hidden_size": "1024", "num_attention_heads": "8", "ffn_hidden_size": "2816", "tp": "1", "pp": "2", "dp": "4"},
)


def planted_runs() -> list[Run]:
    """Runs whose times are the model's own under the planted constants."""
    runs = only(*SPREAD)
    pricer = Pricer(chooser({(run.engine.name, run.gpu): PLANTED for run in runs}))
    made = []
    for run in runs:
        score = pricer.score(run)
        assert score is not None
        made.append(replace(run, time_s=score[0]))
    return made


def test_planted_constants_are_recovered() -> None:
    found = fit(planted_runs(), tuple(PLANTED), prior=0.01)
    assert found.median_error < 0.005
    for name, value in PLANTED.items():
        assert found.constants[name] == pytest.approx(value, rel=0.05), name


def test_a_constant_that_no_run_speaks_of_stays_where_it_was() -> None:
    found = fit(planted_runs(), (*PLANTED, "host_efficiency"))
    assert found.constants["host_efficiency"] == pytest.approx(Calibration().host_efficiency, rel=0.01)


def test_a_slow_host_is_found_though_kernels_hide_a_fast_one() -> None:
    """Thirty times the time to launch, in runs whose kernels hide the datasheet's: no small change of it shows in any of them."""
    narrow = {"engine": "Megatron-core", "tp": "1", "pp": "1", "dp": "8", "hidden_size": "1024", "num_attention_heads": "8"}
    runs = only({**narrow, "micro_batch_size": "1"}, {**narrow, "micro_batch_size": "4"})
    host = zero_shot(runs[0]).op_overhead_s
    slowed = Pricer(chooser({(run.engine.name, run.gpu): {"op_overhead_s": 30 * host} for run in runs}))
    timed = [replace(run, time_s=(slowed.score(run) or (0.0, 0.0))[0]) for run in runs]
    names = ("gemm_efficiency", "pointwise_factor", "op_overhead_s", "microbatch_overhead_s")
    assert fit(timed, names).median_error > 0.2
    found = fit(timed, names, bounds=ANY_HOST, hosts=SLOWER_HOSTS)
    assert found.median_error < 0.1
    assert found.constants["op_overhead_s"] == pytest.approx(30 * host, rel=0.3)


def test_runs_without_times_are_refused() -> None:
    with pytest.raises(OrchestratorError, match="no run with a step time"):
        fit([replace(run, time_s=None) for run in only({})], ("gemm_efficiency",))


def own_run(folder: Path, run: Run, seconds: list[float]) -> Plan:
    """A run folder as our workers leave it."""
    candidate, mesh = run.candidate, run.candidate.mesh
    plan = Plan(
        engine="megatron",
        world_size=run.num_gpus,
        tp=mesh.tp,
        pp=mesh.pp,
        vpp=1,
        cp=1,
        ep=1,
        etp=1,
        dp=mesh.dp,
        zero_stage=0,
        sequence_parallel=False,
        micro_batch_size=candidate.micro_batch_size,
        num_microbatches=candidate.num_microbatches,
        global_batch_size=run.training.global_batch_size,
        schedule="1f1b",
        rank_order=mesh.order,
        stages=run.stages,
        model=run.model.architecture,
        training=run.training,
        cluster=run.cluster,
    )
    folder.mkdir()
    (folder / "plan.json").write_text(to_json(plan))
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"step": i, "step_time_s": s}) + "\n" for i, s in enumerate(seconds)))
    return plan


def test_our_own_runs_are_read_without_their_warm_up(tmp_path: Path) -> None:
    run = only({})[0]
    own_run(tmp_path / "a", run, [9.0, 5.0, 1.0, 1.1, 0.9])
    own_run(tmp_path / "b", run, [9.0])
    (read,) = load(tmp_path)
    assert read.time_s == 1.0
    assert read.candidate.mesh == run.candidate.mesh
    assert read.traits == PLANNED_ENGINES["megatron"].traits(run.cluster.software)


def test_a_file_of_several_runs_is_read_as_their_folders_are(tmp_path: Path) -> None:
    plan = own_run(tmp_path / "a", only({})[0], [9.0, 5.0, 1.0, 1.1, 0.9])
    metrics = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    file = tmp_path / "first_gpu.json"
    file.write_text(json.dumps({"runs": [{"name": "a", "plan": json.loads(to_json(plan)), "metrics": metrics}]}))
    assert load(file) == load(tmp_path)
    assert SEVERAL in __main__.__doc__
    file.write_text(json.dumps({"runs": [{"name": "a", "metrics": metrics}]}))
    with pytest.raises(InputError, match=r'is no file of runs, \{"runs": \[\{"name": NAME, "plan": .*"metrics": .*\}: KeyError: .plan.'):
        load(file)


def test_runs_are_fitted_to_and_judged_by_any_constants(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own_run(tmp_path / "a", only({})[0], [9.0, 5.0, 1.0, 1.1, 0.9])
    mine = tmp_path / "mine.json"
    assert main([f"runs={tmp_path}", f"out={mine}"]) == 0
    assert "too few to tell them apart" in capsys.readouterr().out
    file = msgspec.json.decode(mine.read_bytes(), type=CalibrationFile)
    assert (file.engine, file.gpu, file.fitted_runs) == ("megatron", "H100-SXM-80GB", 1)
    assert file.measured is not None
    assert file.measured.parameters == (only({})[0].model.parameters,) * 2, "of a user's own runs, which are mostly of one model"
    assert all(constant.unit for constant in file.constants.values())
    errors = {}
    for calibration in (mine, "datasheet"):
        assert main([f"runs={tmp_path}", f"calibration={calibration}"]) == 0
        said = capsys.readouterr().out
        assert "a: measured 1 s, predicted" in said
        errors[calibration] = float(said.split("median error ")[1].split("%")[0])
    assert errors[mine] < errors["datasheet"]


def test_runs_of_two_engines_are_two_files_which_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After minutes of fitting out=x.json was refused, a folder was written without a word, and megatron's file judged no run at all."""
    monkeypatch.chdir(tmp_path)
    run = only({"tp": "1", "pp": "1", "dp": "8"})[0]
    Path("runs").mkdir()
    for name, engine, seconds in (("a", "megatron", [9.0, 5.0, 1.0]), ("b", "deepspeed", [9.0, 5.0, 2.0]), ("short", "megatron", [9.0])):
        plan = own_run(Path("runs", name), run, seconds)
        Path("runs", name, "plan.json").write_text(to_json(msgspec.structs.replace(plan, engine=engine)))
    own_run(Path("runs", "never"), run, [])
    Path("runs", "never", "metrics.jsonl").unlink()
    assert main(["runs=runs", "out=mine.json"]) == 2
    both = "deepspeed on H100-SXM-80GB, megatron on H100-SXM-80GB"
    assert capsys.readouterr().err.startswith(f"error: out=mine.json: is one file, and the runs are of 2 kinds: {both}; out=mine takes")
    assert main(["runs=runs", "out=mine"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("left out, without a step after the first 2 (warm-up): short, never\n")
    assert said.endswith(f"Written to mine: {both}. Next: plan with calibration=mine\n")
    file = "mine/megatron-H100-SXM-80GB.json"
    assert main(["runs=runs", f"calibration={file}"]) == 0
    said = capsys.readouterr().out
    assert "\na: measured 1 s, predicted" in said
    assert f"\nb: not priced: calibration={file}: is for megatron on H100-SXM-80GB; this plans deepspeed on H100-SXM-80GB\n" in said
    assert "\n1 of 2 runs priced" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "runs: is missing"),
        (["runs=/no/such"], "no such file or folder"),
        (["runs={here}", "all=true"], "all"),
        (
            ["runs={empty}"],
            'holds no run with a step time; a run\'s folder has plan.json and metrics.jsonl, a file of several runs (.json) is {"runs": [',
        ),
        (["runs={here}", "out=/proc/no/x.json"], "can't be written"),
        (["runs={here}", "out=x.json", "calibration=datasheet"], "out=x.json: has no part in calibration="),
        (["runs={here}", "calibration=none"], "calibration=none"),
    ],
)
def test_bad_words_are_one_message_and_status_2(words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own_run(tmp_path / "a", only({})[0], [9.0, 5.0, 1.0])
    (tmp_path / "empty").mkdir()
    assert main([word.format(here=tmp_path / "a", empty=tmp_path / "empty") for word in words]) == 2
    assert message in capsys.readouterr().err


def test_metrics_that_no_run_writes_are_refused(tmp_path: Path) -> None:
    own_run(tmp_path / "a", only({})[0], [1.0])
    (tmp_path / "a" / "metrics.jsonl").write_text("{broken\n")
    with pytest.raises(InputError, match="is not what a run writes"):
        load(tmp_path)


def test_units_are_known() -> None:
    assert unit("outer_scaling") == "exponent"
    assert unit("context_bytes") == "bytes"


SOFTWARE = Software()
MEGATRON = PLANNED_ENGINES["megatron"].traits(SOFTWARE)
DEEPSPEED = PLANNED_ENGINES["deepspeed"].traits(SOFTWARE)


def own_file(engine: str, gpu: str, **constants: float) -> CalibrationFile:
    """A user's calibration, fitted for the traits of Megatron here."""
    return CalibrationFile(
        engine=engine,
        gpu=gpu,
        traits=digest(MEGATRON),
        fitted_on="ten runs",
        constants={name: Constant(value=value, unit="share", origin="fitted") for name, value in constants.items()},
        fitted_runs=10,
        fitted_median_error=0.0,
        held_out_runs=0,
        held_out_median_error=None,
        interval=None,
    )


def test_a_users_own_calibration_comes_before_the_shipped_one(tmp_path: Path) -> None:
    run = only({})[0]
    traits = MEGATRON
    (before,) = found(None, run.cluster, [traits], None)
    assert before is not None
    assert before.source == ""
    path = tmp_path / f"megatron-{run.gpu}.json"
    path.write_bytes(msgspec.json.encode(own_file("megatron", run.gpu, gemm_efficiency=0.123)))
    for choice, folder in ((None, tmp_path), (str(tmp_path), None), (str(path), None)):
        (mine,) = found(choice, run.cluster, [traits], folder)
        assert mine is not None
        assert (mine.source, priced(run.cluster, traits, mine).gemm_efficiency) == (str(path), 0.123)
    assert found("shipped", run.cluster, [traits], tmp_path) == [before]
    assert found("datasheet", run.cluster, [traits], tmp_path) == [None]
    assert found(f"megatron-{run.gpu}", run.cluster, [traits], tmp_path) == [before]
    assert found(None, run.cluster, [traits], tmp_path / "none") == [before]


def test_a_users_matrix_products_are_every_engines(tmp_path: Path) -> None:
    run = only({})[0]
    engines = [MEGATRON, DEEPSPEED, msgspec.structs.replace(DEEPSPEED, engine="without-runs")]
    path = tmp_path / f"megatron-{run.gpu}.json"
    path.write_bytes(msgspec.json.encode(own_file("megatron", run.gpu, gemm_efficiency=0.123, inner_efficiency=0.5)))
    shipped = [priced(run.cluster, engine, known) for engine, known in zip(engines, found(None, run.cluster, engines, None), strict=True)]
    known = found(str(path), run.cluster, engines, None)
    assert all(each is not None and each.source == str(path) for each in known)  # so plan.json keeps them
    mine = [priced(run.cluster, engine, each) for engine, each in zip(engines, known, strict=True)]
    assert [constants.gemm_efficiency for constants in mine] == [0.123] * 3
    assert [constants.inner_efficiency for constants in mine] == [0.5, shipped[1].inner_efficiency, shipped[2].inner_efficiency]


def test_a_calibration_for_something_else_is_refused(tmp_path: Path) -> None:
    run = only({})[0]
    path = tmp_path / "mine.json"
    cases = {
        "{": "is no calibration",
        msgspec.json.encode(own_file("megatron", run.gpu)).decode(): "is for megatron on H100-SXM-80GB; this plans deepspeed on",
        msgspec.json.encode(own_file("deepspeed", "B200")).decode(): "is for deepspeed on B200",
    }
    for text, why in cases.items():
        path.write_text(text)
        with pytest.raises(InputError, match=why):
            found(str(path), run.cluster, [DEEPSPEED], None)
    with pytest.raises(InputError, match=r"holds none of deepspeed-H100-SXM-80GB\.json"):
        found(str(tmp_path), run.cluster, [DEEPSPEED], None)
    with pytest.raises(InputError, match="can't be read"):
        found(str(tmp_path / "none.json"), run.cluster, [DEEPSPEED], None)
    with pytest.raises(InputError, match="constants that are not known: speed"):
        own_file("megatron", run.gpu, speed=1.0).calibration(datasheet(run.cluster, MEGATRON))


def test_a_file_says_whether_its_runs_trained_adapters() -> None:
    (run,) = only({})
    adapted = replace(run, training=msgspec.structs.replace(run.training, lora=Lora(rank=8)))
    assert measured_of([run]).kinds == ("dense 16-bit",)
    assert measured_of([run, adapted]).kinds == ("adapters", "dense 16-bit")


def test_what_measured_peaks_exceed_is_kept_free() -> None:
    """Nineteen peaks in twenty are within the margin, and an engine with few of them takes that of all."""
    base = only({"peak_memory_gib": "40"})[0]
    prediction = Pricer(chooser({})).price(base).prediction
    assert prediction is not None
    predicted = base.peak_bytes(prediction)
    runs = [replace(base, memory_bytes=predicted / (1 - 0.002 * n)) for n in range(101)]
    found_margins = margins(runs, [], lambda run: run.engine.name)
    assert found_margins["nanotron"].value == pytest.approx(0.19, abs=1e-3)
    file = own_file("never measured", base.gpu)
    assert with_margin(file, found_margins).values() == {"memory_margin": found_margins[""].value}
    assert margins(runs[:5], [], lambda run: run.engine.name) == {}


def test_a_file_that_was_fitted_for_other_traits_is_carried_over_by_name(tmp_path: Path) -> None:
    """Say Transformer Engine was installed since: what the GPU and the network do holds, what the engine's kernels do does not."""
    run = only({})[0]
    others = msgspec.structs.replace(MEGATRON, fused_norms=not MEGATRON.fused_norms)
    path = tmp_path / f"megatron-{run.gpu}.json"
    file = own_file("megatron", run.gpu, gemm_efficiency=0.5, inner_efficiency=0.6, pointwise_factor=3.0)
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(file, interval=(0.99, 1.01))))
    for choice, folder in ((str(path), None), (None, tmp_path)):
        (same,) = found(choice, run.cluster, [MEGATRON], folder)
        (known,) = found(choice, run.cluster, [others], folder)
        assert same is not None
        assert known is not None
        assert same.file.values() == file.values()
        assert known.file.values() == {"gemm_efficiency": 0.5, "inner_efficiency": 0.6}
        constants = priced(run.cluster, others, known)
        assert constants.pointwise_factor == datasheet(run.cluster, others).pointwise_factor
        assert "carried over from other traits of megatron" in constants.name
        assert f"({digest(MEGATRON)}, here {digest(others)}) without pointwise_factor" in constants.fitted_on
        assert (constants.interval, constants.fitted) == (None, None)


def test_a_digest_is_of_the_traits_and_not_of_the_name() -> None:
    assert digest(msgspec.structs.replace(MEGATRON, engine="another")) == digest(MEGATRON)
    assert digest(msgspec.structs.replace(MEGATRON, bucket_copies=7)) != digest(MEGATRON)
    assert digest(msgspec.structs.replace(MEGATRON, tp_overlap=0.0)) == digest(MEGATRON), "a default is no change"


@pytest.mark.parametrize("name", sorted(SHARES))
def test_no_share_above_one_is_loaded(name: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_bytes(msgspec.json.encode(own_file("megatron", "B200", **{name: 1.0})).replace(b"1.0", b"1.914", 1))
    with pytest.raises(InputError, match=rf"{name} is 1\.914, a share is between 0 and 1"):
        read_file(path)


def test_what_is_said_of_constants_is_of_ones_that_there_are() -> None:
    assert CARRIES_OVER.keys() | SHARES | UNITS.keys() <= {*Calibration.__struct_fields__}


def test_a_file_without_the_prediction_in_its_interval_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    text = json.loads(msgspec.json.encode(own_file("megatron", "B200")))
    path.write_text(json.dumps({**text, "interval": [1.03, 1.19]}))
    with pytest.raises(InputError, match=r"1\.03 to 1\.19 does not hold the prediction itself"):
        read_file(path)
    del text["traits"]
    path.write_text(json.dumps(text))
    with pytest.raises(InputError, match="older than files that name their traits: calibrate again"):
        read_file(path)


def test_runs_of_an_engine_with_other_traits_are_not_fitted_together(tmp_path: Path) -> None:
    run = only({})[0]
    plan = own_run(tmp_path / "a", run, [1.0] * 4)
    own_run(tmp_path / "b", run, [1.0] * 4)
    software = msgspec.structs.replace(plan.cluster.software, transformer_engine=not plan.cluster.software.transformer_engine)
    other = msgspec.structs.replace(plan, cluster=msgspec.structs.replace(plan.cluster, software=software))
    (tmp_path / "b" / "plan.json").write_text(to_json(other))
    with pytest.raises(InputError, match=r"megatron has other traits there than in .*; put the runs of each into a folder of their own"):
        load(tmp_path)


def test_a_fit_ends_at_the_bound_of_a_share_and_says_so() -> None:
    """Runs on a network twice as fast as its datasheet: no share explains them."""
    runs = [replace(run, time_s=(run.time_s or 1.0) / 30) for run in planted_runs()]
    found_constants = fit(runs, ("gemm_efficiency",), prior=0.001)
    assert found_constants.constants["gemm_efficiency"] == pytest.approx(1.0, rel=0.01)
    assert found_constants.at_bound == {"gemm_efficiency"}
