"""Runs and recipes of experts: what is read of them, and how they are judged."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from orchestrator.calibrate.pricing import Pricer, zero_shot
from orchestrator.cost.calibration import Calibration
from orchestrator.cost.compute import layer_seconds
from orchestrator.cost.price import CostModel
from orchestrator.model.ops import Op, Scan
from orchestrator.model.parts.experts import Experts
from orchestrator.model.parts.latent_attention import LatentAttention
from orchestrator.model.parts.vision import Images
from tests.validation import mixtures, recipes
from tests.validation.__main__ import main
from tests.validation.networks import cluster
from tests.validation.pricing import named, price_runs
from tests.validation.rows import SkipError
from tests.validation.runs import ExpertsRun, Run, counts
from tests.validation.tables import SETTINGS, load, read_rows, recompute_of, with_states
from tests.validation.uneven import drawn, spread_of

ROW = {
    **{"run_id": "a", "sweep_id": "s", "model_name": "own (4 layers)", "num_layers": "4", "hidden_size": "5120"},
    **{"num_attention_heads": "128", "num_query_groups": "128", "ffn_hidden_size": "12288", "vocab_size": "102400"},
    **{"seq_length": "4096", "num_experts": "160"},
    **{"moe_router_topk": "6", "moe_ffn_hidden_size": "1536", "shared_expert_ffn_hidden_size": "3072", "num_dense_layers": "1"},
    **{"mla": "1536/512/128/64/128", "gpu": "B200", "gpus_per_node": "8", "num_gpus": "16", "engine": "megatron-core (TE 2.11)"},
    **{"precision": "bf16", "tp": "1", "pp": "2", "ep": "4", "etp": "2", "dp": "8", "zero_stage": "1", "recompute": "none"},
    **{"micro_batch_size": "1", "global_batch_size": "32", "status": "ok", "step_time_s": "1.0"},
}


def only(**changes: str) -> Run:
    (run,) = read_rows("t", [{**ROW, **changes}])
    assert isinstance(run, Run), run
    return run


def write_csv(path: Path, rows: Sequence[Mapping[str, str]]) -> Path:
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(dict.fromkeys(key for row in rows for key in row)))
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_a_row_describes_its_own_experts_and_latent_attention() -> None:
    run = only()
    a = run.model.architecture
    assert a.experts == (Experts(num_experts=160, topk=6, ffn_hidden_size=1536, shared_ffn_hidden_size=3072),)
    assert a.mixer == LatentAttention(q_lora_rank=1536, kv_lora_rank=512, qk_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    assert [count for _, count in a.layer_runs()] == [1, 3]
    assert (run.candidate.mesh.ep, run.candidate.mesh.etp) == (4, 2)


@pytest.mark.parametrize(
    ("said", "experts"),
    [
        ({"a2a_overlap": "1", "cuda_graph": "none"}, ExpertsRun(overlaps=True, graph="none")),
        ({"a2a_overlap": "no", "cuda_graph": "transformer_engine: moe_router+moe_preprocess"}, ExpertsRun(overlaps=False, graph="routers")),
        ({"cuda_graph": "local: full_iteration", "routing": "forced balance"}, ExpertsRun(graph="whole", balanced=True)),
        ({"routing": "real router, dropless"}, ExpertsRun(balanced=False)),
        ({"routing": "padded to capacity 1.0, group-limited"}, ExpertsRun(balanced=True, capacity=True)),
        ({"dispatcher": "hybridep, static capacity 1.05"}, ExpertsRun(capacity=True)),
        ({"dispatcher": "hybridep"}, ExpertsRun()),
    ],
)
def test_how_experts_ran_is_read_where_it_is_said(said: dict[str, str], experts: ExpertsRun) -> None:
    assert only(**said).experts == experts


def test_what_a_card_promises_of_its_memory_is_not_taken_for_a_measurement() -> None:
    """A peak that a card's metrics print counts tensors alone; a text only says below how much it stays."""
    printed = only(peak_memory_gib="44.252", peak_memory_kind="peak allocated, GiB (card metric)")
    assert (printed.memory_bytes, printed.memory_kind) == (44.252 * 2**30, "allocated")
    assert only(peak_memory_gib="65", peak_memory_kind="peak allocated, GiB, from the text").memory_bytes is None


def test_what_rank_0_had_allocated_is_tensors_alone_and_what_is_either_is_not() -> None:
    kinds = {
        kind: only(peak_memory_gib="72", peak_memory_kind=kind).memory_kind
        for kind in ("max allocated, rank 0", "torch max allocated or reserved")
    }
    assert list(kinds.values()) == ["allocated", "reserved"]


@pytest.mark.parametrize(
    ("said", "moments"),
    [
        ("adam, states fp32", None),
        ("adam, states float32+float32+float32", ("fp32", "fp32")),
        ("adam, states float32+bfloat16+bfloat16", ("bf16", "bf16")),
        ("adam, precision aware: fp16 main parameters, bf16 gradients and moments", ("bf16", "bf16")),
    ],
)
def test_the_dtypes_of_the_optimizers_states_are_read_where_a_source_prints_them(said: str, moments: tuple[str, str] | None) -> None:
    training = only(optimizer=said).training
    assert ((training.exp_avg_dtype, training.exp_avg_sq_dtype) if training.precision_aware_optimizer else None) == moments


def test_a_moments_dtype_that_megatron_has_not_leaves_the_row_out() -> None:
    with pytest.raises(SkipError, match=r"int4 is none of float32, bfloat16, float16, uint8"):
        with_states(only().training, "adam, states float32+int4+bfloat16")


def test_the_host_waits_unless_it_need_not_and_traffic_hides_only_where_it_was_made_to() -> None:
    base = Calibration(expert_sync_s=2e-3)
    assert ExpertsRun(overlaps=True).constants(base) == base
    assert ExpertsRun(capacity=True).constants(base).expert_sync_s == 0.0
    strategies = [only(**said).candidate.strategy for said in ({"a2a_overlap": "1", "delay_wgrad": "1"}, {"a2a_overlap": "0"}, {})]
    assert [one.overlap_moe_expert_parallel_comm for one in strategies] == [True, False, False]
    assert [one.delay_wgrad_compute for one in strategies] == [True, False, False]


def test_the_combined_schedule_of_2025_held_what_it_had_passed_until_the_chunks_end() -> None:
    """(3 x 6 + 5) hidden states of 16 bits a token, in each layer of experts of the fullest chunk: four rows of Qwen3 30B on H200 took 36
    to 39% more than predicted without, and 1 to 3% less or more with it. Megatron-core 0.16.1 gives each layer back when it is passed."""
    nemo = {"engine": "megatron-core (Megatron-Bridge)", "a2a_overlap": "yes", "etp": "1", "dispatcher": "alltoall"}
    alone = {**nemo, "pp": "1", "dp": "16"}
    chunks = {**nemo, "num_layers": "8", "num_dense_layers": "0", "pp": "2", "vpp": "2"}

    def peak(software: str, said: dict[str, str]) -> float:
        (priced,) = price_runs([only(**said, software=software)], named("shipped"))
        assert priced.prediction is not None, priced
        return max(stage.memory_by_cause["transient"] for stage in priced.prediction.by_stage)

    for said, layers in ((alone, 3), (chunks, 2)):
        more = peak("NeMo 25.11.01, NCCL 2.29.3", said) - peak("NeMo 26.04", said)
        assert more == pytest.approx(layers * (3 * 6 + 5) * 5120 * 4096 * 2)
    off = {**alone, "a2a_overlap": "no"}
    assert peak("NeMo 25.11.01", off) == peak("NeMo 26.04", off)


def test_activations_in_host_memory_take_as_long_as_their_link() -> None:
    """Of all layers but the last, there and back: Qwen3 8B on 16 H100 took 6.3 and 7.9 s a step with them and 1.9 without."""
    dense = {
        "num_experts": "",
        "num_dense_layers": "",
        "mla": "",
        "num_query_groups": "8",
        "ep": "1",
        "etp": "1",
        "num_attention_heads": "32",
    }
    said = {**dense, "gpu": "H100-SXM-80GB", "pp": "1", "dp": "16", "num_layers": "16", "hidden_size": "4096"}
    here, there = (next(iter(price_runs([only(**said, offload=text)], named("shipped")))) for text in ("", "activations"))
    assert here.prediction is not None
    assert there.prediction is not None
    assert there.run.memory_bytes is there.run.fits is None
    cost = CostModel(here.run.workload, here.run.engine.traits, named("shipped")(here.run)).layer(here.run.candidate, "decoder", "none")
    link = here.run.cluster.host_bandwidth * 0.8
    moved = 2 * here.run.candidate.num_microbatches * 15 * cost.saved_bytes / link
    assert here.prediction.step_time_s < moved < there.prediction.step_time_s < 1.2 * moved


def test_what_a_releases_recipe_sets_fills_the_blanks_where_page_and_recipe_agree(tmp_path: Path) -> None:
    rows = [{**ROW, "engine": "bridge", "run_id": name, "recompute": "", "etp": "", "ep": "8"} for name in ("agrees", "differs", "unknown")]
    settings = {"differs": "", "recompute_effective": "none", "dispatcher": "flex", "flex_backend": "hybridep", "a2a_overlap": "1"}
    settings |= {"etp": "1", "cuda_graph": "local", "cuda_graph_scope": "full_iteration", "fsdp": "0"}
    settings |= {"cpu_offload_layers": "", "forced_balance": "1"}
    write_csv(tmp_path / SETTINGS, [{"run_id": "agrees", **settings}, {"run_id": "differs", **settings, "differs": "global_batch"}])
    write_csv(tmp_path / "runs.csv", rows)
    found = {run.run_id: run for run in load(tmp_path / "runs.csv")[0]}
    assert found["agrees"].experts == ExpertsRun(overlaps=True, graph="whole", balanced=True)
    assert found["differs"].experts == found["unknown"].experts == ExpertsRun()


DEEPSEEK = {
    **{"run_id": "a", "sweep_id": "s", "model_name": "DeepSeekV3", "num_layers": "61", "hidden_size": "7168", "num_attention_heads": "128"},
    **{"num_query_groups": "MLA", "ffn_hidden_size": "18432", "vocab_size": "129280", "seq_length": "4096", "num_experts": "256"},
    **{"moe_router_topk": "8", "gpu": "GB200", "gpus_per_node": "4", "num_gpus": "256", "engine": "megatron-core (Megatron-Bridge)"},
    **{"precision": "MXFP8", "tp": "1", "pp": "4", "vpp": "4", "cp": "1", "ep": "64", "dp": "64", "zero_stage": "1"},
    **{"micro_batch_size": "1", "global_batch_size": "4096", "status": "ok", "step_time_s": "13.2", "recompute": ""},
    "notes": "release=26.06 NeMo Container; Pre-Training Performance",
}


@pytest.mark.parametrize(
    ("changes", "experts", "dispatcher", "recompute"),
    [
        ({}, ExpertsRun(overlaps=True, graph="whole", balanced=True), "flex", "mla_up_proj"),
        ({"notes": "release=26.04.01 NeMo"}, ExpertsRun(overlaps=False, graph="routers", balanced=True), "flex", "none"),
        ({"ep": "32"}, ExpertsRun(), "flex", "none"),
        ({"notes": "release=26.08 NeMo"}, ExpertsRun(), "flex", "none"),
    ],
)
def test_deepseeks_rows_get_what_the_recipe_of_their_release_sets(
    tmp_path: Path, changes: dict[str, str], experts: ExpertsRun, dispatcher: str, recompute: str
) -> None:
    """At 26.04.01 `mlp` is recomputed, which in Megatron is the dense layers' feed-forward alone."""
    write_csv(tmp_path / SETTINGS, [{"run_id": "other", "differs": "", "recompute_effective": "none"}])
    write_csv(tmp_path / "runs.csv", [{**DEEPSEEK, **changes}])
    (run,) = load(tmp_path / "runs.csv")[0]
    assert run.experts == experts
    assert run.candidate.strategy.moe_token_dispatcher_type == dispatcher
    assert {span.recompute for stage in run.stages for span in stage.layers} | {"none"} == {recompute, "none"}


@pytest.mark.parametrize(
    ("modules", "row", "mode"),
    [
        ("mla_up_proj+mlp", {"num_experts": "160"}, "mla_up_proj"),
        ("mla_up_proj+moe", {"num_experts": "160"}, "mla_up_proj+mlp"),
        ("mla_up_proj+mlp", {}, "mla_up_proj+mlp"),
        ("mla_up_proj+mlp", {"num_experts": "160", "a2a_overlap": "1"}, "mla_up_proj+mlp"),
        ("mla_up_proj+moe", {"num_experts": "160", "a2a_overlap": "1"}, "mla_up_proj"),
    ],
)
def test_mlp_is_recomputed_in_dense_layers_alone(modules: str, row: dict[str, str], mode: str) -> None:
    """A row's `mlp` is that of layers without experts; so is a plan's where the combined schedule runs, and nowhere else."""
    assert recompute_of({"recompute": modules, **row}) == (mode, 1.0)


@pytest.mark.parametrize(("gpus", "domain"), [(8, 72), (72, 72), (256, 64), (288, 72), (512, 64)])
def test_a_job_uses_as_many_gpus_of_every_rack(gpus: int, domain: int) -> None:
    assert cluster("t", "GB200", gpus, 4, "").levels[0].size == domain


@pytest.mark.parametrize(("gpu", "gbit"), [("B200", 400), ("GB200", 400), ("B300", 800), ("GB300", 800)])
def test_blackwell_ultra_has_twice_the_network(gpu: str, gbit: int) -> None:
    """A ConnectX-8 a GPU where B200 and GB200 have a ConnectX-7 (datasheets)."""
    assert cluster("t", gpu, 256, 8, "").levels[1].bandwidth == gbit * 1e9 / 8


RECIPE = {
    **{"recipe_id": "good", "model": "qwen3_30b_a3b", "task": "pretrain", "gpu": "H100-SXM-80GB", "num_gpus": "16", "precision": "BF16"},
    **{"seq_length": "4096", "tp": "1", "pp": "1", "vpp": "", "cp": "1", "ep": "16", "etp": "1", "sequence_parallel": "0"},
    **{"micro_batch_size": "1", "global_batch_size": "64", "recompute_effective": "none", "dispatcher": "flex", "flex_backend": "hybridep"},
    **{"fsdp": "0", "optimizer_state_dtypes": "fp32", "cpu_offload_layers": ""},
}


def test_recipes_are_judged_or_say_why_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = ({}, {"recipe_id": "odd", "ep": "1", "etp": "2", "tp": "1"}, {"recipe_id": "large", "micro_batch_size": "4"})
    table = write_csv(tmp_path / "recipes.csv", [{**RECIPE, **change} for change in (*changes, {"recipe_id": "lora", "task": "lora"})])
    assert main([f"recipes={table}", f"report={tmp_path / 'report.json'}"]) == 0
    figures = json.loads((tmp_path / "report.json").read_text())["recipes"]
    assert (figures["recipes"], figures["judged"], figures["of_experts"]) == (4, 3, 3)
    assert figures["legal"] == pytest.approx(2 / 3)
    assert figures["not_judged"] == {"qwen3_30b_a3b: task lora is not planned": 1}
    said = capsys.readouterr().out.replace("\n", " ")
    assert "odd: ILLEGAL experts_ep1 (core/tensor_parallel/layers.py" in said
    judge = recipes.Judge(named(None))
    good, _, large = (judge.judge({**RECIPE, **change}) for change in changes)
    assert (good.legal, good.fits, large.fits) == (True, True, False)
    assert good.ratio is not None
    assert 0.5 < good.ratio < 2
    assert large.peak_gib > 80


def test_a_recipes_own_overlaps_are_judged_and_our_best_plan_may_have_the_exchanges_too() -> None:
    """The pinned overlap of the experts' exchange never makes our best plan slower: it is the better one of both."""
    plain, beside, exposed = ({**RECIPE, **more} for more in ({}, {"a2a_overlap": "1"}, {"overlap_grad_reduce": "0"}))
    strategies = [recipes.run_of(recipe).candidate.strategy for recipe in (plain, beside, exposed)]
    assert [one.overlap_moe_expert_parallel_comm for one in strategies] == [False, True, False]
    assert [one.overlap_grad_reduce for one in strategies] == [True, True, False]
    judge = recipes.Judge(named(None))
    without, with_overlap = judge.judge(plain), judge.judge(beside)
    assert without.legal
    assert with_overlap.legal
    assert "overlap_moe_expert_parallel_comm" in with_overlap.best
    assert "overlap_moe_expert_parallel_comm" not in without.best
    found = recipes.figures([without, with_overlap])
    ratios = [one.ratio for one in (without, with_overlap) if one.ratio is not None]
    assert found["experts_within_5"] == found["within_5"] == sum(ratio <= 1.05 for ratio in ratios) / 2


def test_a_table_that_is_none_of_recipes_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = write_csv(tmp_path / "other.csv", [{"recipe_id": "a"}])
    assert main([f"recipes={table}"]) != 0
    assert "is not a table of recipes: it lacks model" in capsys.readouterr().err.replace("\n", " ")


PAIRS = {  # by tokens of a sequence: cp, TFLOP/s with forced balance and without (Megatron-MoE-ModelZoo, best_practice/qwen3/readme.md)
    "16384": ("1", 295, 237),
    "32768": ("2", 335, 277),
    "65536": ("4", 368, 320),
    "131072": ("8", 389, 357),
}
ZOO = {
    **{"run_id": "zoo", "sweep_id": "s", "model_name": "Qwen3-235B-A22B", "gpu": "H100-SXM-80GB", "gpus_per_node": "8", "num_gpus": "256"},
    **{"engine": "megatron-core (Megatron-Bridge)", "precision": "bf16", "tp": "4", "pp": "8", "vpp": "4", "ep": "8", "zero_stage": "1"},
    **{"num_experts": "128", "moe_router_topk": "8", "num_layers": "94", "micro_batch_size": "1", "global_batch_size": "256"},
    **{
        "dispatcher": "deepep",
        "a2a_overlap": "0",
        "cuda_graph": "none",
        "recompute": "layernorm+moe",
        "status": "ok",
        "step_time_s": "1.0",
    },
}


@pytest.mark.parametrize("tokens", PAIRS)
def test_what_real_routing_takes_longer_than_forced_balance_is_predicted(tokens: str) -> None:
    """Of a step, within 7% of what was measured; with even routing it is 8 to 20% too short."""
    cp, forced, real = PAIRS[tokens]
    found = read_rows("t", [{**ZOO, "seq_length": tokens, "cp": cp, "routing": routing} for routing in ("forced balance", "real router")])
    even, uneven = (outcome.prediction.step_time_s for outcome in price_runs(found, named(None)) if outcome.prediction)
    assert uneven / even == pytest.approx(forced / real, rel=0.07)
    assert forced / real / (uneven / even) < 0.6 * (forced / real - 1) + 1  # nearer than without


def test_routers_of_a_checkpoint_or_with_a_bias_are_nearly_even() -> None:
    row = {"model_name": "Qwen3-30B-A3B", "routing": "real router"}
    loads = [
        dict(drawn(spread_of({**row, **change}), 128, 8).busiest)[16]
        for change in ({}, {"task": "sft"}, {"model_name": "moonshotai/Moonlight-16B-A3B"}, {"run_id": "mzoo-mixtral-real"})
    ]
    assert loads[0] > 1.4
    assert max(loads[1:]) < 1.05


def test_a_recipe_that_forces_no_balance_is_judged_with_uneven_routing() -> None:
    """The more ranks hold the experts, the busier is the busiest."""
    runs = {(forced, ep): recipes.run_of({**RECIPE, "forced_balance": forced, "ep": ep}) for forced in ("1", "0", "") for ep in ("8", "16")}
    seconds = [outcome.prediction.step_time_s for outcome in price_runs(runs.values(), named(None)) if outcome.prediction]
    forced8, forced16, real8, real16, blank8, blank16 = seconds
    assert 1.05 < real8 / forced8 < real16 / forced16 < 1.5
    assert (blank8, blank16) == (forced8, forced16)  # nothing is made of a blank


def test_a_recipe_is_shown_slower_by_a_published_run_of_the_same_training_divided_as_our_best() -> None:
    """With experts the micro-batch is part of the division: Qwen3-30B on 8 B200 took 27 s one by one, 10 s with four."""
    of = {**ZOO, "model_name": "Qwen3-30B-A3B", "num_layers": "48", "gpu": "B200", "num_gpus": "8", "tp": "1", "pp": "1", "vpp": ""}
    of |= {"global_batch_size": "512", "seq_length": "4096", "precision": "fp8", "recompute": "none"}
    told = (("a", "1", "28.2"), ("b", "1", "27.1"), ("c", "4", "9.7"))
    rows = [{**of, "run_id": name, "micro_batch_size": size, "step_time_s": time} for name, size, time in told]
    other = {**rows[0], "global_batch_size": "1024", "step_time_s": "1.0"}
    runs = [run for run in read_rows("t", [*rows, other]) if isinstance(run, Run)]
    assert len(runs) == 4
    one, four, eight = (replace(runs[0].candidate, micro_batch_size=size) for size in (1, 4, 8))
    assert [recipes.fastest(runs, runs[0], candidate) for candidate in (one, four, eight)] == [27.1, 9.7, None]


def test_recipes_that_repeat_one_for_fewer_gpus_are_counted_apart() -> None:
    few, many, larger, other = (
        {**RECIPE, "recipe_id": name, **more}
        for name, more in (("few", {}), ("many", {"num_gpus": "64"}), ("larger", {"num_gpus": "64", "ep": "8"}), ("b200", {"gpu": "B200"}))
    )
    rows = [many, few, larger, other]
    assert [recipes.copied_from(row, rows) for row in rows] == ["few", "", "", ""]

    def judged(ratio: float, slower: float | None = None, copy_of: str = "") -> recipes.Judged:
        return recipes.Judged(recipe="r", experts=True, judged=True, legal=True, why="", ratio=ratio, slower=slower, copy_of=copy_of)

    found = recipes.figures([judged(1.0), judged(1.2), judged(1.3, 0.4), judged(1.3, -0.4), judged(1.2, None, "few")])
    assert (found["experts_within_5"], found["experts_within_5_or_shown_slower"]) == (0.2, 0.4)
    assert (found["experts_copied"], found["experts_not_copied_within_5_or_shown_slower"]) == (1, 0.5)


GOLDEN = {
    **{"run_id": "g", "sweep_id": "mlm_moe", "model_name": "moe/gpt3_mcore_te_tp2_pp1_te_8experts_etp1_ep4", "num_layers": "12"},
    **{"hidden_size": "512", "num_attention_heads": "8", "num_query_groups": "8", "seq_length": "1024", "num_experts": "8"},
    **{"moe_router_topk": "2", "gpu": "H100-SXM-80GB", "gpus_per_node": "8", "num_gpus": "8", "engine": "megatron-core (mcore)"},
    **{"precision": "bf16", "tp": "2", "pp": "1", "cp": "1", "ep": "4", "zero_stage": "0", "sequence_parallel": "yes", "recompute": "none"},
    **{"micro_batch_size": "4", "global_batch_size": "32", "status": "ok", "peak_memory_gib": "3.74"},
    **{"peak_memory_kind": "torch.cuda.max_memory_allocated of the logging rank (last rank)"},
    "notes": "expert-tensor-parallel-size=1; attention-backend=unfused; moe-token-dispatcher-type=alltoall",
}


def test_a_functional_test_of_experts_is_read_by_its_flags_and_judged_apart() -> None:
    (run,) = read_rows("megatron_lm_functional_goldens", [GOLDEN])
    assert isinstance(run, Run), run
    assert run.model.architecture.experts[0].ffn_hidden_size == 2048
    assert (run.candidate.mesh.etp, run.candidate.strategy.moe_token_dispatcher_type) == (1, "alltoall")
    (outcome,) = price_runs([run], named(None))
    assert outcome.prediction is not None
    assert run.memory_bytes is not None
    assert run.peak_bytes(outcome.prediction) == pytest.approx(run.memory_bytes, rel=0.06)
    assert not counts(run)


QWEN35 = {
    **RECIPE,
    **{"recipe_id": "hybrid", "model": "qwen35_vl_35b_a3b", "gpu": "GB200", "num_gpus": "8", "ep": "8", "micro_batch_size": "2"},
    **{"global_batch_size": "480", "forced_balance": "1"},
}


def test_a_recipe_whose_steps_are_graphs_is_legal_where_its_experts_compute_a_buffer() -> None:
    """Bridge's for GB200 and later; what is sent to them otherwise is counted on the host, which ends the capture."""
    graph = {"gpu": "GB200", "num_gpus": "8", "ep": "8", "cuda_graph": "full_iteration", "cuda_graph_scope": ""}
    buffered, counted = (
        recipes.Judge(named(None)).judge({**RECIPE, **graph, "dispatcher": kind, "flex_backend": backend})
        for kind, backend in (("flex", "hybridep"), ("alltoall", ""))
    )
    assert (buffered.legal, counted.legal) == (True, False)
    assert "rank_capacity_factor" in counted.why


def test_a_recipe_of_a_model_with_vision_is_judged_whole() -> None:
    """Qwen3.5-35B-A3B: 34,660,610,688 parameters of text, a layer of multi-token prediction and the tower, 35,951,822,704 as published; an
    image of 64 tokens in a sample, on the first stage."""
    run = recipes.run_of(QWEN35)
    a = run.model.architecture
    assert run.model.parameters == 34_660_610_688 + 844_640_768 + 446_571_248 == 35_951_822_704
    assert run.model.images == Images(count=1, tokens=64)
    embedding = run.model.runs[0].layer
    assert embedding.parameters == 248_320 * 2048 + 446_571_248
    text = recipes.run_of({**QWEN35, "model": "qwen35_35b_a3b"})
    assert text.model.parameters == 34_660_610_688 + 844_640_768
    assert run.model.runs[1:] == text.model.runs[1:]
    assert [type(layer.mixer).__name__ for layer in list(a.each_layer())[:4]] == ["GatedDeltaNet"] * 3 + ["GroupedQueryAttention"]
    (same,) = read_rows("t", [{**ROW, **dict.fromkeys(SILENT, ""), "model_name": "Qwen/Qwen3.5-35B-A3B"}])
    assert isinstance(same, Run), same
    assert same.model.architecture.pattern == a.pattern
    judged = recipes.Judge(named(None)).judge(QWEN35)
    assert (judged.judged, judged.legal, judged.sees) == (True, True, True)
    assert recipes.figures([judged])["with_vision"] == 1


def test_a_recipe_of_qwen3_vl_trains_the_projector_alone() -> None:
    """Bridge's benchmarks unfreeze Qwen3.5's text and tower (perf_recipes/qwen_vl/common.py), not Qwen3-VL's, which its recipes freeze: the
    one in bf16 on GB300 was said to need 287 of its 276 GiB, and needs 157."""
    said = {"recipe_id": "qwen3_vl_30b_a3b_pretrain_8gpu_gb300_bf16", "model": "qwen3_vl_30b_a3b", "gpu": "GB300", "micro_batch_size": "8"}
    question = recipes.asked({**QWEN35, **said, "global_batch_size": "512"}, named(None))
    held = question.price.by_stage[0].memory_by_cause
    assert question.run.training.freeze == ("vision", "language")
    assert question.illegal == ""
    # Four mergers: each a norm of what it joins (the first of a patch, the others of four), a linear as wide, one as the text's vectors.
    joined, text = 4 * 1152, 2048
    projector = 4 * (joined * (joined + 1) + text * (joined + 1)) + 2 * (1152 + 3 * joined)
    assert held["gradients"] == pytest.approx(2 * projector)
    assert held["optimizer"] == pytest.approx(12 * projector / 8)
    trained = recipes.asked({**QWEN35, **said, "recipe_id": "all", "global_batch_size": "512"}, named(None)).price
    assert held["weights"] == trained.by_stage[0].memory_by_cause["weights"]
    assert held["gradients"] / trained.by_stage[0].memory_by_cause["gradients"] < 0.03
    assert question.price.peak_memory_bytes < 0.7 * trained.peak_memory_bytes
    assert question.price.step_time_s < trained.step_time_s


SILENT = (
    *("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "ffn_hidden_size", "vocab_size", "num_experts"),
    *("moe_router_topk", "moe_ffn_hidden_size", "shared_expert_ffn_hidden_size", "num_dense_layers", "mla"),
)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"model": "qwen35_vl_397b_a17b", "pp": "8"}, "its 60 layers are not as many on each of 8 stages"),
        ({"pp": "2", "vpp": "12"}, "the 20 layers of a stage are not as many in each of its 12 chunks"),
        ({"pp": "4", "layers_first_stage": "7"}, ""),
        ({"pp": "4", "layers_first_stage": "8"}, "its 32 layers are not as many on each of 3 stages"),
    ],
)
def test_a_recipe_without_a_layout_divides_its_layers_evenly_or_is_refused_by_megatrons_rule(changes: dict[str, str], why: str) -> None:
    run = recipes.run_of({**QWEN35, "num_gpus": "64", "global_batch_size": "512", "micro_batch_size": "1", **changes})
    assert why in run.illegal
    assert bool(run.illegal) == bool(why)
    if not why:
        assert [sum(span.count for span in stage.layers if "decoder" in span.kind) for stage in run.stages] == [7, 11, 11, 11]


QWEN_DIVISIONS = (
    ("35b_a3b", 1, 0, 0, 0), ("35b_a3b", 2, 0, 17, 23), ("35b_a3b", 2, 12, 0, 0), ("35b_a3b", 2, 10, 0, 0), ("122b_a10b", 4, 4, 0, 0),
    ("122b_a10b", 8, 2, 0, 0), ("397b_a17b", 8, 0, 0, 0), ("397b_a17b", 8, 4, 0, 0), ("397b_a17b", 8, 0, 4, 8), ("397b_a17b", 8, 4, 4, 8),
)  # fmt: skip
"""Sizes, pp, vpp, layers of the first and the last stage of the recipes of Qwen3.5, and as Megatron-Bridge's pull requests 5884 and 5893
mended them."""


@pytest.mark.engines
@pytest.mark.parametrize(("size", "pp", "vpp", "first", "last"), QWEN_DIVISIONS)
def test_a_division_is_refused_where_megatrons_own_allocator_refuses_it(size: str, pp: int, vpp: int, first: int, last: int) -> None:
    torch = pytest.importorskip("torch")
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig

    said = {name: str(value) if value else "" for name, value in (("vpp", vpp), ("layers_first_stage", first), ("layers_last_stage", last))}
    illegal = recipes.layout_of({"model": f"qwen35_vl_{size}", "pp": str(pp), **said})[1]
    config = TransformerConfig(
        num_layers=mixtures.QWEN35_SIZES[size][0], hidden_size=64, num_attention_heads=4, pipeline_model_parallel_size=pp,
        pipeline_dtype=torch.bfloat16, virtual_pipeline_model_parallel_size=vpp or None, num_layers_in_first_pipeline_stage=first or None,
        num_layers_in_last_pipeline_stage=last or None,
    )  # fmt: skip
    stages = [(rank, chunk) for rank in range(pp) for chunk in range(vpp or 1)]
    try:
        built = sum(get_num_layers_to_build(config, vp_stage=chunk if vpp else None, pp_rank=rank) for rank, chunk in stages)
    except AssertionError:
        assert illegal
    else:
        assert (illegal, built) == ("", config.num_layers)


def test_a_recipe_that_gathers_weights_in_fp8_keeps_no_others() -> None:
    """Current scaling on GB200: one byte a weight of the linears; the embedding, the output layer and the routers stay in bf16."""
    said = {**QWEN35, "gpu": "GB200", "precision": "FP8-CS", "fp8_recipe": "tensorwise"}
    held, bf16 = (
        recipes.asked({**said, "fp8_param_gather": gathers}, named(None)).price.by_stage[0].memory_by_cause["weights"] for gathers in "10"
    )
    assert 0.5 < held / bf16 < 0.65


HYBRID = {
    "model_name": "Nemotron-3-Nano-30B-A3B", "num_layers": "52", "hidden_size": "2688", "num_attention_heads": "", "ffn_hidden_size": "",
    "vocab_size": "131072", "num_experts": "128", "moe_router_topk": "6", "moe_ffn_hidden_size": "1856", "gpu": "GH200-96GB",
    "gpus_per_node": "4", "interconnect": "NVLink 4; Slingshot 11", "engine": "megatron-core (fork of Megatron-Bridge)", "tp": "1",
    "pp": "1", "dp": "16", "ep": "4", "etp": "1", "mla": "", "num_query_groups": "", "shared_expert_ffn_hidden_size": "",
    "grad_dtype": "fp32", "recompute": "core_attn+moe+shared_experts", "micro_batch_size": "1",
    "notes": "parameter gather not overlapped; is-hybrid-model",
}  # fmt: skip


def test_a_hybrid_of_state_spaces_and_experts_is_read_with_what_its_columns_say() -> None:
    """Gradients' type and the gather's overlap are columns and words of their own; the whole experts' layer has the shared ones too."""
    whole = only(**HYBRID)
    narrow = only(**{**HYBRID, "grad_dtype": "bf16", "recompute": "moe_act", "notes": "is-hybrid-model"})
    assert sum(run.count for run in whole.model.runs if "mamba2" in run.layer.kind) == 23
    assert [run.training.grad_reduce_dtype for run in (whole, narrow)] == ["fp32", "bf16"]
    assert [run.candidate.strategy.overlap_param_gather for run in (whole, narrow)] == [False, True]
    assert [run.candidate.strategy.recompute for run in (whole, narrow)] == ["core_attn+mlp", "moe_act"]
    assert whole.cluster.levels[1].bandwidth == 25e9
    slower, faster = (Pricer(zero_shot).price(run).prediction for run in (whole, narrow))
    assert slower is not None
    assert faster is not None
    assert slower.step_time_s > faster.step_time_s
    assert slower.by_stage[0].memory_by_cause["gradients"] == pytest.approx(2 * faster.by_stage[0].memory_by_cause["gradients"])


def seconds(run: Run, of: Callable[[Op], bool]) -> float:
    """Forward and backward of these operations in all layers, for one micro-batch, by datasheets."""
    found = 0.0
    for each in run.model.runs:
        layer, states = replace(each.layer, ops=tuple(filter(of, each.layer.ops))), run.traits.states["mixed/1"]
        strategy, precision, gpu = run.candidate.strategy, run.training.precision, run.cluster.gpu
        passes = layer_seconds(layer, strategy, 1, precision, gpu, run.traits, states, zero_shot(run))
        found += each.count * sum(one.compute for one in passes)
    return found


def test_experts_in_16_bits_beside_linears_in_8_take_their_own_time() -> None:
    """The other products get faster, the experts' take as long as in 16 bits."""
    wide, narrow = (only(**{**HYBRID, "precision": text}) for text in ("bf16", "fp8 current scaling (dense layers; experts bf16)"))

    def both(role: str) -> tuple[float, float]:
        return seconds(wide, lambda op: op.role == role), seconds(narrow, lambda op: op.role == role)

    assert both("routed_fc1")[0] == both("routed_fc1")[1] > 0
    assert both("shared_fc1")[0] > 1.2 * both("shared_fc1")[1] > 0


def test_scans_in_32_bits_take_twice_as_long() -> None:
    """Two forward passes and one backward, whose tensors of 16 bits are twice as wide, those of 32 are as they were; nothing more is kept.
    Without words for it a run of this fork has them."""
    wide, narrow = (only(**{**HYBRID, "notes": notes}) for notes in ("is-hybrid-model", "posture 6: SSM state in bf16"))
    alone = seconds(narrow, lambda op: isinstance(op, Scan))
    assert seconds(wide, lambda op: isinstance(op, Scan) or getattr(op, "name", "").endswith("scan.wide")) == pytest.approx(
        2.1 * alone, rel=0.1
    )
    slower, faster = (Pricer(zero_shot).price(run).prediction for run in (wide, narrow))
    assert slower is not None
    assert faster is not None
    assert slower.peak_memory_bytes == faster.peak_memory_bytes
