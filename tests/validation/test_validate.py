"""What the loader, the metrics and the command of validation promise."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from orchestrator.calibrate.pricing import Pricer, zero_shot
from orchestrator.cost.calibration import ANY_ENGINE, PRODUCTS, calibrated, datasheet, digest, shipped
from orchestrator.cost.price import CostModel
from orchestrator.engines import ENGINES as PLANNED_ENGINES
from orchestrator.errors import InputError
from orchestrator.hardware.catalog import GPUS
from orchestrator.model.ops import Dispatch, Gemm, Pointwise
from tests.validation import accuracy, recovery
from tests.validation.__main__ import main
from tests.validation.engines import ENGINES, nanotron
from tests.validation.groups import CARRIED, GROUPS
from tests.validation.metrics import Priced, measured_beside, report_of, summary, sweeps
from tests.validation.page import BEGIN, END
from tests.validation.pricing import named, price_runs, shipped_file
from tests.validation.runs import READ_ONLY, Run, Unusable, counts, held_out
from tests.validation.tables import load, read_rows

ROW = {
    "run_id": "a",
    "sweep_id": "s",
    "model_name": "llama-like",
    "num_layers": "8",
    "hidden_size": "2048",
    "num_attention_heads": "16",
    "ffn_hidden_size": "8192",
    "vocab_size": "32000",
    "seq_length": "2048",
    "gpu": "H100-SXM-80GB",
    "gpus_per_node": "8",
    "num_gpus": "8",
    "engine": "nanotron",
    "precision": "bf16",
    "tp": "2",
    "pp": "2",
    "dp": "2",
    "zero_stage": "1",
    "recompute": "none",
    "micro_batch_size": "2",
    "global_batch_size": "32",
    "status": "ok",
    "step_time_s": "1.0",
}


def rows_of(*changes: Mapping[str, str]) -> list[dict[str, str]]:
    return [{**ROW, "run_id": f"row{index}", **change} for index, change in enumerate(changes)]


def only(*changes: Mapping[str, str], table: str = "t") -> list[Run]:
    runs = [run for run in read_rows(table, rows_of(*changes)) if isinstance(run, Run)]
    assert len(runs) == len(changes)
    return runs


def write_csv(path: Path, rows: Sequence[Mapping[str, str]]) -> Path:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, columns)
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_a_row_is_priced_as_it_was_run() -> None:
    run = only({})[0]
    assert (run.candidate.mesh.tp, run.candidate.mesh.pp, run.candidate.mesh.dp) == (2, 2, 2)
    assert run.candidate.num_microbatches == 8
    assert run.time_s == 1.0
    assert [sum(span.count for span in stage.layers) for stage in run.stages] == [6, 4]  # embedding and 5 layers; 3 layers and head
    assert run.fits is True


def test_a_run_is_read_as_its_releases_recipe_ran_it_where_the_page_says_otherwise() -> None:
    """An older heading: else the same five measurements count for two numbers of chunks, and neither is ever shown slower. A proxy's
    tokenizer: else the last stage has a head of two and a half times its work."""
    shape = {"engine": "NeMo megatron-core", "num_layers": "24", "vpp": "12", "global_batch_size": "64", "dp": "", "vocab_size": "128256"}
    pages = ("dgxc-v25.01.1-nemo_megatron_README_175b.md-L52-c0", "dgxc-v25.02-nemo_megatron_README_175b.md-L61-c0")
    older, later = only(*({**shape, "run_id": page} for page in pages), table="nvidia_dgxc_benchmarking")
    assert (older.candidate.vpp, later.candidate.vpp) == (12, 6)
    named = (
        "dgxc-v25.02-llama3.1_README_405b.md-L52-c0",
        "dgxc-v25.04-llama3.1_README.md-L110-c3",
        "mlperf-v5.0-NVIDIA-eos-llama31_405b-0",
    )
    runs = only(*({**shape, "run_id": name} for name in named), table="nvidia_dgxc_benchmarking")
    assert [run.model.architecture.vocab_size for run in runs] == [50257, 128256, 32000]


def test_a_logs_one_micro_batch_holds_all_samples_that_its_gpus_take() -> None:
    """MLPerf's GPT-OSS on 8 GPUs: gradient_accumulation_steps is 1, of 24 samples and of 16; on 512 a whole iteration is replayed."""
    shape = {"engine": "NeMo/Megatron core", "model_name": "GPT-OSS 20B", "tp": "1", "pp": "1", "dp": "", "micro_batch_size": "1"}
    experts = {"num_experts": "32", "moe_router_topk": "4", "moe_ffn_hidden_size": "2880", "ep": "1"}
    runs = only(
        *(
            {**shape, **experts, "run_id": f"mlperf-v6.0-gptoss-{name}", "num_gpus": gpus, "global_batch_size": batch}
            for name, gpus, batch in (("theia_ngpu8", "8", "24"), ("tyche-hsg_ngpu8", "8", "16"), ("theia_ngpu512", "512", "512"))
        ),
        table="mlperf_training_logs_new",
    )
    assert [(run.candidate.micro_batch_size, run.candidate.num_microbatches) for run in runs] == [(3, 1), (2, 1), (1, 1)]
    assert [run.experts.graph for run in runs] == ["whole"] * 3
    assert {run.model.architecture.vocab_size for run in runs} == {128256}
    for run, rows in zip(runs, (1.5, 1.5, 7.0), strict=True):
        layers = [each.layer for each in run.model.runs if "expert" in each.layer.kind]
        assert layers
        for layer in layers:
            computed = {op.name: op.routing.busiest for op in layer.ops if isinstance(op, Gemm | Pointwise) and op.routing is not None}
            assert set(computed) == {"mlp.permute", "mlp.experts.linear_fc1", "mlp.experts.activation", "mlp.experts.linear_fc2"}
            assert all(dict(busiest)[8] == dict(busiest)[1] == rows for busiest in computed.values()), "whole buffers"
            (sent,) = (op.routing for op in layer.ops if isinstance(op, Dispatch))
            assert sent is None, "its row says nothing of the routing: even, whatever the buffers"


def test_a_model_cut_down_to_fit_on_few_gpus_is_no_production_configuration() -> None:
    shape = {"engine": "NeMo megatron-core", "model_name": "Llama 3.1 405b", "vpp": "7", "pp": "1", "tp": "8", "dp": "1"}
    whole, proxy = only(*({**shape, "num_layers": layers} for layers in ("126", "7")), table="nvidia_dgxc_benchmarking")
    assert recovery.configurations([whole, proxy]) == [whole]


def test_a_configuration_is_shown_slower_by_a_published_run_of_the_same_training_divided_as_our_best() -> None:
    """Nemotron-4 15B: NVIDIA's own later configuration is ours, 4% faster; of another batch it says nothing."""
    shape = {"engine": "NeMo", "num_gpus": "8", "hidden_size": "2048", "num_layers": "8", "model_name": "Llama-like", "pp": "1"}
    theirs = {**shape, "tp": "4", "dp": "2", "step_time_s": "1.04"}
    ours = {**shape, "tp": "2", "dp": "4", "step_time_s": "1.0"}
    runs = only(theirs, ours, {**ours, "global_batch_size": "64", "step_time_s": "0.5"}, table="nvidia_dgxc_benchmarking")
    asked = recovery.question_of(runs[0])
    assert recovery.fastest(runs, asked, runs[0].candidate) == 1.04
    assert recovery.fastest(runs, asked, runs[1].candidate) == 1.0
    assert recovery.fastest(runs[:1], asked, runs[1].candidate) is None
    found = [
        recovery.Recovered(label="", legal=True, why="", fits=True, ratio=ratio, best="", slower=slower)
        for ratio, slower in ((1.0, None), (1.09, 0.04), (1.09, -0.04), (1.09, None))
    ]
    figures = recovery.figures(found)
    assert (figures["within_5"], figures["within_5_or_shown_slower"]) == (0.25, 0.5)


def test_an_nvfp4_row_is_priced_by_its_own_peak_and_passes_and_no_constant_is_fitted_on_it() -> None:
    """Its products take half of FP8's seconds on GB200, a third on GB300; quantising takes 1.125 bytes an element more, and no tp traffic
    hides."""
    shape = {"hidden_size": "8192", "ffn_hidden_size": "28672", "num_attention_heads": "64", "seq_length": "8192"}
    base = {**shape, "engine": "megatron-core (Megatron-Bridge)"}
    alone = {**base, "tp": "1", "pp": "1", "dp": "8", "micro_batch_size": "1"}
    causes = {}
    for gpu, precision in (("GB200", "FP8"), ("GB200", "NVFP4"), ("GB300", "FP8"), ("GB300", "NVFP4")):
        (run,) = only({**alone, "gpu": gpu, "precision": precision})
        assert held_out(run) == (precision == "NVFP4")
        assert any(group.has(run) for group in GROUPS) == (precision == "FP8")
        prediction = Pricer(zero_shot).price(run).prediction
        assert prediction is not None
        causes[gpu, precision] = prediction.by_cause
    halved, third = (causes[gpu, "NVFP4"]["gemm"] / causes[gpu, "FP8"]["gemm"] for gpu in ("GB200", "GB300"))
    assert 0.5 < halved < 0.6  # the vocabulary's product stays bf16
    assert 1 / 3 < third < 0.5
    # 8 layers of 4 micro-batches: inputs of 8192 (q, k, v), 8192, 8192 and 28672 columns forward, gradients of as many as their outputs
    (run,) = only({**alone, "gpu": "GB200", "precision": "NVFP4"})
    columns = sum(part.count * (op.k + op.n) for part in run.model.runs for op in part.layer.ops if isinstance(op, Gemm) and not op.pad_to)
    more = causes["GB200", "NVFP4"]["memory_bound"] - causes["GB200", "FP8"]["memory_bound"]
    assert more == pytest.approx(4 * 8192 * columns * 1.125 / (run.cluster.gpu.memory_bandwidth * 0.8), rel=0.01)
    (run,) = only({**base, "gpu": "GB200", "precision": "NVFP4"})
    constants = [replace(zero_shot(run), tp_overlap=overlap) for overlap in (0.85, 0.0)]
    hidden, whole = (CostModel(run.workload, run.engine.traits, each).price(run.candidate, run.stages) for each in constants)
    assert hidden == whole


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"seq_length": ""}, "seq_length is not stated"),
        ({"tp": "two"}, "tp=two is no number"),
        ({"num_gpus": "6", "dp": ""}, "tp x pp x cp = 4 does not divide num_gpus=6"),
        ({"dp": "4"}, "dp=4 is not num_gpus / (tp x pp x cp) = 2"),
        ({"global_batch_size": "30"}, "micro_batch_size x dp = 4 does not divide global_batch_size=30"),
        ({"gpu": "Gaudi2"}, "GPU Gaudi2 is not known"),
        ({"engine": "torch"}, "engine torch has no traits"),
        ({"num_experts": "8"}, "the experts of llama-like are not described"),
        ({"precision": "NVFP4"}, "H100-SXM-80GB has no nvfp4"),
        ({"precision": "NVFP4 (bf16 tail)", "gpu": "B200"}, "some layers are NVFP4, some bf16"),
        ({"status": "hang"}, "status hang"),
        ({"num_attention_heads": "17", "hidden_size": "2176"}, "tp=2 does not divide num_attention_heads=17"),
        ({"step_time_s": ""}, "neither time nor memory can be compared"),
        ({"notes": "INCONSISTENT_BATCH"}, "batch is inconsistent (source's note)"),
        ({"step_time_s": "-1"}, "step_time_s=-1 is not above zero"),
        ({"recompute": "selective (mla_up_proj)"}, "recompute selective (mla_up_proj) is not priced"),
    ],
)
def test_what_a_row_lacks_is_its_reason(change: dict[str, str], why: str) -> None:
    (found,) = read_rows("t", rows_of(change))
    assert isinstance(found, Unusable)
    assert why in found.why


def test_tflops_are_turned_into_seconds_by_the_printed_formula() -> None:
    change = {
        "engine": "megatron-lm",
        "model_name": "GPT",
        "gpu": "A100-SXM-80GB",
        "precision": "fp16",
        "vocab_size": "",
        "zero_stage": "",
        "step_time_s": "",
        "tflops_per_gpu": "100",
        "flop_formula": "hardware incl. recompute: 96BsLh^2(1+s/6h+V/16lh)",
    }
    run = only(change)[0]
    flops = 96 * 32 * 2048 * 8 * 2048**2 * (1 + 2048 / (6 * 2048) + 51200 / (16 * 8 * 2048))
    assert run.time_s == pytest.approx(flops / (100e12 * 8))


def test_tokens_per_second_are_turned_into_seconds() -> None:
    run = only({"step_time_s": "", "tokens_per_s_per_gpu": "4096"})[0]
    assert run.time_s == pytest.approx(32 * 2048 / (4096 * 8))


def test_stages_hold_all_layers_once_and_in_order() -> None:
    run = only({"pp": "4", "dp": "1", "num_layers": "14", "engine": "NeMo megatron-core", "vpp": "2", "tp": "2"})[0]
    seen = [(span.kind, span.first, span.count) for chunk in range(2) for stage in run.stages for span in stage.chunk(chunk)]
    decoder = [(first, count) for kind, first, count in seen if kind == "decoder"]
    assert seen[0][0] == "embedding"
    assert seen[-1][0] == "head"
    assert [first for first, _ in decoder] == [sum(count for _, count in decoder[:i]) for i in range(len(decoder))]
    assert sum(count for _, count in decoder) == 14
    assert [count for _, count in decoder] == [1, 2, 2, 2, 2, 2, 2, 1]  # embedding and head count as layers where that divides


def test_nanotron_gives_the_head_its_share_and_can_not_build_an_empty_stage() -> None:
    counts, head, complete = nanotron.split_by_cost(16, 67.1, 268.4, 4)
    assert (sum(counts), head, complete) == (16, 3, True)
    assert "without a block" in only({"pp": "8", "tp": "1", "dp": "1", "num_layers": "2"})[0].illegal


def test_our_own_predictions_have_no_error() -> None:
    """Rows whose time and memory are what the model says are reproduced exactly: nothing is lost between table and price."""
    plain = only({}, {"tp": "1", "dp": "4"}, {"pp": "1", "dp": "4"}, {"micro_batch_size": "4"})
    rows = []
    for run in plain:
        prediction = Pricer(zero_shot).price(run).prediction
        assert prediction is not None
        stage = prediction.by_stage[0]
        reserved = stage.peak_memory_bytes - stage.memory_by_cause["context"]
        rows.append(measured_beside(replace_run(run, prediction.step_time_s, reserved), prediction))
    figures = summary(rows)
    assert figures["time_median_ape"] == pytest.approx(0, abs=1e-12)
    assert figures["memory_median_ape"] == pytest.approx(0, abs=1e-12)
    assert figures["spearman"] == 1.0
    assert figures["top1_regret"] == 0.0


def replace_run(run: Run, time_s: float, memory_bytes: float | None = None) -> Run:
    from dataclasses import replace as copy

    return copy(run, time_s=time_s, memory_bytes=memory_bytes, memory_kind="reserved", memory_of="first")


def priced(run: Run, measured: float, predicted: float, *, needed: float = 1.0, fits: bool = True) -> Priced:
    from dataclasses import replace as copy

    run = copy(run, time_s=measured if fits else None, fits=fits)
    return Priced(run=run, time_s=predicted, memory_bytes=1.0, needed_bytes=needed, limit_bytes=2.0)


def test_regret_and_ranks_are_those_of_the_row_ranked_first() -> None:
    runs = only({}, {"tp": "1", "dp": "4"}, {"micro_batch_size": "4"})
    rows = [priced(runs[0], 1.0, 3.0), priced(runs[1], 2.0, 1.0), priced(runs[2], 4.0, 2.0)]
    (sweep,) = sweeps(rows)
    assert sweep.regrets["top1_regret"] == 0.5  # ranked first took 2 s where 1 s was possible
    assert sweep.regrets["top3_regret"] == 0.0
    assert sweep.spearman == -0.5
    assert sweep.regrets["baseline_smallest_top1_regret"] == 0.5  # tp=1 pp=2 is the smallest


def test_rows_of_another_batch_are_not_ranked_together() -> None:
    runs = only({}, {"global_batch_size": "64", "tp": "1", "dp": "4"})
    assert sweeps([priced(runs[0], 1.0, 1.0), priced(runs[1], 2.0, 2.0)]) == []


def test_crashes_are_judged_by_what_was_said_to_fit() -> None:
    runs = only({}, {"tp": "1", "dp": "4"}, {"micro_batch_size": "4"}, {"pp": "1", "dp": "4"})
    rows = [
        priced(runs[0], 1.0, 1.0),
        priced(runs[1], 1.0, 1.0, needed=3.0),
        priced(runs[2], 1.0, 1.0, needed=3.0, fits=False),
        priced(runs[3], 1.0, 1.0, fits=False),
    ]
    figures = summary(rows)
    assert (figures["oom_precision"], figures["oom_recall"], figures["ran_but_refused"]) == (0.5, 0.5, 0.5)


def test_the_report_has_the_promised_keys() -> None:
    runs = only({}, {"tp": "1", "dp": "4"})
    report = report_of([priced(run, 1.0, 1.1) for run in runs], [Unusable(table="t", run_id="x", why="because")])
    keys = {"rows_used", "time_median_ape", "time_within_20", "memory_median_ape", "memory_p95_under", "spearman", "top1_regret"}
    keys |= {"top3_regret", "oom_precision", "oom_recall"}
    assert keys <= report["tables"]["t"].keys()
    assert keys <= report["all"].keys()
    assert {"engine", "gpu", "precision", "kind", "length"} == report["by"].keys()
    assert keys <= report["by"]["engine"]["nanotron"].keys()
    assert report["unused"] == {"t": {"because": 1}}
    assert report["all"]["time_median_ape"] == pytest.approx(0.1)


def test_the_command_writes_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = write_csv(tmp_path / "runs.csv", rows_of({}, {"tp": "1", "dp": "4", "step_time_s": "1.2"}, {"gpu": "Gaudi2"}))
    status = main([f"runs={table}", f"report={tmp_path / 'r.json'}"])
    assert status == 0
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["tables"]["runs"]["rows_used"] == 2
    assert "GPU Gaudi2 is not known" in capsys.readouterr().out


def test_notes_of_offload_and_of_slow_days_are_read() -> None:
    v100 = {"gpu": "V100-SXM2-32GB", "precision": "fp16", "gpus_per_node": "4", "interconnect": "Omni-Path", "vocab_size": "51200"}
    hugging = {**v100, "engine": "HF Trainer + DeepSpeed ZeRO-3", "tp": "1", "pp": "1", "dp": "8", "zero_stage": "3"}
    plain, optimizer, full = only(
        {**hugging, "notes": "offload=; extra: Opt Offl=N; Par Offl=N; Notes=05-28;"},
        {**hugging, "notes": "offload=; extra: Opt Offl=Y; Par Offl=N;"},
        {**hugging, "notes": "offload=full CPU offload; extra: ;"},
    )
    assert [run.candidate.strategy.offload_optimizer for run in (plain, optimizer, full)] == [False, True, True]
    megatron = {**v100, "engine": "Megatron-LM", "zero_stage": ""}
    good, slow = only(*({**megatron, "notes": f"section=Megatron; offload=; extra: Notes={day}"} for day in ("05-27", "05-28")))
    assert slow.cluster.levels[1].bandwidth < good.cluster.levels[1].bandwidth == plain.cluster.levels[1].bandwidth


def test_internevos_width_is_that_of_the_model_not_of_its_ratio() -> None:
    """8/3 of 4096 are 10922, which no tensor core likes; InternLM-7B has 11008."""
    (run,) = only(
        {"engine": "InternEvo", "pp": "1", "dp": "4", "hidden_size": "4096", "num_attention_heads": "32", "ffn_hidden_size": "10922"}
    )
    assert run.model.architecture.ffn_hidden_size == 11008


def test_mixtures_are_known_by_name_however_it_is_written() -> None:
    moe = {"engine": "NeMo", "pp": "1", "dp": "4", "num_experts": "128", "moe_router_topk": "8", "num_query_groups": "4"}
    written, spaced = only({**moe, "model_name": "Qwen3_235B_a22B"}, {**moe, "model_name": "Qwen3 235B-A22B"})
    assert written.model.runs == spaced.model.runs
    (other,) = read_rows("t", rows_of({**moe, "model_name": "another"}))
    assert isinstance(other, Unusable)
    assert "the experts of another are not described" in other.why


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "runs: is missing"),
        (["runs=/no/such"], "no such file or folder"),
        (["run=x"], "did you mean runs"),
        (["runs=a", "runs=b"], "is given twice"),
        (["runs"], "runs: is not key=value"),
        (["runs="], "needs a value"),
        (["runs={here}", "recovery=yes"], "recovery=yes: is neither; choose one of true, false"),
        (["runs={here}", "calibration=/no/such.json"], "calibration=/no/such.json: can't be read"),
        (["runs={here}", "report=/no/such/folder/r.json"], "report=/no/such/folder/r.json: can't be written"),
        (["runs={other}"], "is not a table of runs: it lacks"),
        (["runs={binary}"], "can't be read"),
    ],
)
def test_bad_words_are_one_message_and_status_2(words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    places = {"here": write_csv(tmp_path / "runs.csv", rows_of({})), "other": tmp_path / "o.csv", "binary": tmp_path / "b.csv"}
    places["other"].write_text("a,b\n1,2\n")
    places["binary"].write_bytes(b"\xff\xfe\x00\x01")
    assert main([word.format(**places) for word in words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_a_folder_without_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no CSV of runs"):
        load(tmp_path)


def test_shipped_constants_are_found_by_engine_and_gpu() -> None:
    run = only({})[0]
    file = shipped_file("nanotron", "H100-SXM-80GB")
    assert file is not None
    calibration = named(None)(run)
    assert calibration.gemm_efficiency == file.constants["gemm_efficiency"].value
    assert calibration.fitted == file.measured is not None
    assert shipped_file("nanotron", "B200") is None
    unknown = replace(run.engine.traits, engine="unheard-of")
    elsewhere = replace(run.cluster, gpu=GPUS["L40S"])
    assert calibrated(elsewhere, unknown) == datasheet(elsewhere, unknown)


def test_no_measured_engine_has_a_planned_ones_name_and_none_is_planned_with() -> None:
    assert not ENGINES.keys() & PLANNED_ENGINES.keys()
    for name in ENGINES:
        assert shipped(name, "H100-SXM-80GB") is None
        assert shipped(name, "A100-SXM-80GB") is None
    assert {engine.resembles for engine in ENGINES.values()} <= {"", *PLANNED_ENGINES}


def test_what_was_measured_of_bigsciences_pipeline_is_not_planned_with() -> None:
    """Its 17 ms a micro-batch and its fabric are not ours; the products are the GPU's."""
    run = only({"gpu": "A100-SXM-80GB"})[0]
    cluster = run.cluster
    theirs = shipped_file("bigscience_2022", "A100-SXM-80GB")
    assert theirs is not None
    assert theirs.values()["microbatch_overhead_s"] > 0.01
    traits = PLANNED_ENGINES["megatron_deepspeed"].traits(cluster.software)
    ours = calibrated(cluster, traits)
    plain = datasheet(cluster, traits)
    assert ours.gemm_efficiency == theirs.values()["gemm_efficiency"]
    for name in ("microbatch_overhead_s", "p2p_efficiency", "inner_efficiency", "latency_factor", "overlap_efficiency"):
        assert getattr(ours, name) == getattr(plain, name) != theirs.values()[name], name


def test_every_carried_constant_has_its_reason_and_no_other_is_carried() -> None:
    for carry in CARRIED:
        for gpu in carry.gpus:
            file, source = shipped(carry.to, gpu), shipped_file(carry.source, gpu)
            assert file is not None
            assert source is not None
            assert file.carried_from == carry.source
            assert file.traits == digest(ENGINES[carry.source].traits)
            assert {*file.constants} - {"memory_margin"} == {*carry.why} & {*source.constants}
            for name, why in carry.why.items():
                if name in file.constants:
                    assert file.constants[name].value == source.constants[name].value
                    assert file.constants[name].origin.endswith(f"({carry.source}); carried over: {why}")
            assert file.measured == (None if carry.to == ANY_ENGINE else source.measured)


def test_boundaries_that_deepspeed_partitions_cross_the_network_in_parts() -> None:
    """BigScience's pipeline: an eighth of the tensor over the slow link with tp=8, then a gather over the fast one."""
    rows = {"engine": "Megatron-DeepSpeed 3D", "precision": "fp16", "gpu": "A100-SXM-80GB", "num_gpus": "16", "tp": "8", "dp": "1"}
    (run,) = only(rows)
    hops = []
    for cost in (run.engine.cost, CostModel):
        model = cost(run.workload, run.engine.traits, zero_shot(run))
        hops.append(model.hop_seconds(run.candidate)[0])
    parted, whole = hops
    nbytes = 2 * 2048 * 2048 * 2
    c = zero_shot(run)
    inner, outer = run.cluster.levels
    saved = nbytes * 7 / 8 / (outer.bandwidth * c.p2p_efficiency)
    gather = nbytes * 7 / 8 / (inner.bandwidth * c.inner_efficiency)
    steps = 7 * inner.latency * c.latency_factor + c.collective_overhead_s
    assert whole - parted == pytest.approx(saved - gather - steps, rel=1e-6)


def test_tables_that_are_only_read_change_no_figure() -> None:
    rows = [{"engine": "NeMo", "step_time_s": "1.0"}, {"engine": "NeMo", "step_time_s": "2.0", "tp": "1", "dp": "4"}]
    table = sorted(READ_ONLY)[0]
    fitted, read = only(*rows), only(*rows, table=table)
    assert [counts(run) for run in (*fitted, *read)] == [True, True, False, False]
    report = report_of([priced(run, 1.0, 1.1) for run in (*fitted, *read)], [])
    assert report["tables"][f"{table}:not_fitted"]["rows_used"] == report["all"]["rows_used"] == 2


def test_unknown_columns_and_tasks_of_newer_tables_do_not_break() -> None:
    (plain,) = only({"etp": "2", "lora_dim": "16", "window_every_other": "yes", "task": "pretrain"})
    assert plain.time_s == 1.0
    (tuned,) = read_rows("t", rows_of({"task": "lora"}))
    assert isinstance(tuned, Unusable)
    assert tuned.why == "LoRA under nanotron is not priced"


@pytest.mark.parametrize("gpu", ["A100-SXM-80GB", "H100-SXM-80GB", "B200", "V100-SXM2-32GB"])
def test_engines_that_one_search_compares_have_the_same_matrix_products(gpu: str) -> None:
    cluster = replace(only({})[0].cluster, gpu=GPUS[gpu])
    found = [calibrated(cluster, engine.traits(cluster.software)) for engine in PLANNED_ENGINES.values()]
    assert len({constants.gemm_efficiency for constants in found}) == 1
    assert len({constants.fp8_efficiency for constants in found}) == 1


def test_a_prediction_from_datasheets_has_a_wider_interval_than_one_from_fitted_constants_and_says_why() -> None:
    run = only({"engine": "NeMo"})[0]
    ((_, prediction, _),) = price_runs([run], named("shipped"))
    assert prediction is not None
    assert prediction.interval is not None
    low, high = prediction.interval
    assert low <= prediction.step_time_s <= high
    ((_, plain, _),) = price_runs([run], named("datasheet"))
    assert plain is not None
    assert plain.interval is not None
    wide = plain.interval[1] / plain.interval[0]
    assert wide > high / low
    assert (prediction.beyond, plain.beyond) == ((), ("no run of this engine on this GPU was fitted",))


PACKAGE = Path(__file__).parents[2] / "orchestrator"
PLANNED, MEASURED = ([*(folder / "calibrations").glob("*.json")] for folder in (PACKAGE / "cost", Path(__file__).parent))


@pytest.mark.parametrize("path", [*PLANNED, *MEASURED], ids=lambda path: path.stem)
def test_every_shipped_calibration_says_what_it_is_of(path: Path) -> None:
    """Loading it checks that no share is above 1 and that its interval holds the prediction."""
    text = json.loads(path.read_text())
    file = (shipped if path in PLANNED else shipped_file)(text["engine"], text["gpu"])
    assert file is not None
    assert path.stem == f"{file.engine}-{file.gpu}"
    assert file.fitted_runs > 0
    assert file.fitted_on
    for name, constant in file.constants.items():
        assert constant.unit, name
        assert constant.origin, name
        assert constant.unit != "share" or 0 <= constant.value <= 1, name
    if path in PLANNED:
        assert file.carried_from in ENGINES
        assert file.engine in (ANY_ENGINE, *PLANNED_ENGINES)
        assert file.engine != ANY_ENGINE or file.constants.keys() <= {*PRODUCTS}
    else:
        assert file.traits == digest(ENGINES[file.engine].traits), "python -m tests.validation.fitting again"


def test_the_readme_states_what_the_report_says() -> None:
    root = Path(__file__).resolve().parents[2]
    first, second = (
        " ".join((root / path).read_text(encoding="utf-8").split()) for path in ("README.md", "orchestrator/calibrate/README.md")
    )
    folder = root / "orchestrator" / "cost" / "calibrations" / "report"
    page = (folder / "README.md").read_text(encoding="utf-8")
    report = json.loads((folder / "validation.json").read_text(encoding="utf-8"))
    tables = report["held_out"]["tables"]
    for table in ("megatron_lm_readme_tables", "nvidia_dgxc_benchmarking", "bigscience_bloom176b_prequel", "nanotron_ultrascale_playbook"):
        figure = f"{tables[table]['time_median_ape']:.1%}"
        assert figure in second, table
        assert f"| {table} | {tables[table]['rows_used']} | {figure} |" in page
    assert f"5% of the rows take over {report['all']['memory_p95_under']:.1%} more than predicted" in first
    assert f"5% of the rows take over {report['all']['memory_p95_under']:.1%} more than predicted" in second
    assert f"{report['recovery']['within_5']:.0%} are predicted within 5%" in second
    assert f"{report['held_out']['all']['interval_coverage']:.0%} of the runs kept out" in second


def test_every_planned_engine_says_where_its_constants_are_from() -> None:
    runs = only({"engine": "NeMo"}, {"engine": "NeMo", "gpu": "A100-SXM-80GB"}, {"engine": "NeMo", "gpu": "H100-SXM-96GB"})
    lines = {(line["engine"], line["gpu"]): line for line in accuracy.planned(runs)}
    assert {engine for engine, _ in lines} == {*PLANNED_ENGINES}
    file = shipped("megatron", "H100-SXM-80GB")
    assert file is not None
    megatron = lines["megatron", "H100-SXM-80GB"]
    assert megatron["basis"].startswith("carried over from nemo: attention_backward_efficiency, attention_efficiency")
    assert megatron["runs"] == file.fitted_runs
    assert megatron["interval"][1] / megatron["interval"][0] < 2.2, "of an engine whose constants were fitted there"
    alone = lines["deepspeed", "A100-SXM-80GB"]
    assert alone["basis"] == "from datasheets; matrix products carried over from megatron_lm_2021"
    assert alone["runs"] == 0
    assert alone["interval"][1] > lines["megatron", "A100-SXM-80GB"]["interval"][1]
    near = lines["megatron", "H100-SXM-96GB"]
    assert near["basis"] == "the nearest GPU's: nemo on H100-SXM-80GB"
    assert near["runs"] == 0
    assert near["interval"][1] / near["interval"][0] > megatron["interval"][1] / megatron["interval"][0]


def test_a_pages_tables_are_written_between_their_marks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = write_csv(tmp_path / "runs.csv", rows_of({}, {"tp": "1", "dp": "4", "step_time_s": "1.2"}))
    page = tmp_path / "page.md"
    page.write_text("no marks")
    assert main([f"runs={table}", f"page={page}"]) == 2
    assert "page=all rows: has no place" in capsys.readouterr().err
    names = ("planned engines", "pairs", "real routing", "kept out", "all rows", "datasheets")
    page.write_text("\n".join(f"before {name}\n{BEGIN.format(name)}\nold\n{END.format(name)}\nafter {name}" for name in names))
    assert main([f"runs={table}", f"page={page}"]) == 0
    text = page.read_text()
    assert "old" not in text
    assert all(f"before {name}" in text and f"after {name}" in text for name in names)
    assert "| megatron | H100-SXM-80GB | carried over from nemo" in text
    assert "| runs | 2 |" in text
