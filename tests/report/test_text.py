"""The report reads as an expert expects; the whole text is a golden file, the claims are tests of their own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from report_plans import CLUSTER, PLAN, PREDICTED, SLOWER, TRAINING, llama
from rich.console import Group

from orchestrator import recipe
from orchestrator.detect import Machine
from orchestrator.model.families import describe
from orchestrator.plan import LayerSpan, Stage
from orchestrator.report.measured import comparison_table
from orchestrator.report.text import (
    WIDTH,
    alternatives_table,
    as_text,
    difference,
    placement,
    plan_table,
    price_table,
    size_text,
    stage_layers,
    stage_recompute,
)
from orchestrator.strategy.pins import MemoryLimit
from orchestrator.units import GIB

GOLDEN = Path(__file__).parent / "golden"
LIMIT = MemoryLimit(limit=80 * GIB, reserve=2 * GIB)


def lines(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


@pytest.mark.parametrize(("name", "brief"), [("llama3_70b", False), ("llama3_70b_brief", True)])
def test_the_whole_report_equals_the_golden_file(name: str, brief: bool) -> None:
    plan = replace(PLAN, predicted=replace(PREDICTED, interval=(11.2, 13.0)))
    parts = [plan_table(plan, llama(), LIMIT, brief=brief), price_table(plan, LIMIT, brief=brief),
             alternatives_table(plan, [SLOWER, replace(SLOWER, engine="deepspeed")], brief=brief)]  # fmt: skip
    text = "".join(line.rstrip() + "\n" for line in as_text(Group(*parts)).splitlines())
    golden = GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text)
    assert text == golden.read_text()


def test_no_line_is_wider_than_a_terminal() -> None:
    many = replace(PLAN, engine="megatron_deepspeed", zero_shard_size=8, offload_optimizer=True, vpp=2, schedule="interleaved")
    parts = Group(plan_table(many, llama(), LIMIT), price_table(many, LIMIT), alternatives_table(many, [SLOWER]))
    assert max(len(line) for line in as_text(parts).splitlines()) <= WIDTH


def test_facts_are_the_plans() -> None:
    text = lines(as_text(plan_table(PLAN, llama(), LIMIT)))
    assert "model llama3_70b, 70.6B parameters, sequences of 8192 tokens" in text
    assert "cluster dgx_h100: 64 x H100-SXM-80GB, 8 nodes of 8" in text
    assert "parallel tp 4 pp 4 dp 4 (ZeRO-1; sequence parallel)" in text
    assert "batch 512 = dp 4 x 128 micro-batches of 1, 1f1b pipeline" in text
    assert "0 embedding, decoder 0-19 full 4 of 20 25.1 ms 50.2 ms 70.0 GiB (89.7%)" in text
    assert "1-2 decoder 20-39 to decoder 40-59 none 25.1 ms 50.2 ms 60.0 GiB (76.9%)" in text


def test_each_choice_is_said_where_it_is_made() -> None:
    def told(**fields: Any) -> list[str]:
        return lines(as_text(plan_table(replace(PLAN, **fields), llama()), 200))

    plain = "parallel tp 4 pp 4 dp 4 (ZeRO-1; sequence parallel)"
    assert plain in told()
    for fields, said in (
        ({"tp": 1}, "parallel tp 1 pp 4 dp 4 (ZeRO-1; sequence parallel)"),
        ({"vpp": 2, "cp": 2, "ep": 2, "etp": 2}, "parallel tp 4 pp 4 vpp 2 cp 2 ep 2 etp 2 dp 4 (ZeRO-1; sequence parallel)"),
        ({"sequence_parallel": False}, "parallel tp 4 pp 4 dp 4 (ZeRO-1)"),
        ({"zero_stage": 3, "zero_shard_size": 8}, "parallel tp 4 pp 4 dp 4 (ZeRO-3 over groups of 8; sequence parallel)"),
        ({"offload_optimizer": True}, f"{plain[:-1]}; optimizer offloaded)"),
        ({"rank_order": ("tp", "cp", "ep", "pp", "dp")}, f"{plain[:-1]}; ranks in order tp-cp-ep-pp-dp)"),
        ({"cp_comm_type": "a2a"}, f"{plain[:-1]}; keys and values by a2a)"),
        ({"microbatch_group_size_per_vp_stage": 8}, f"{plain[:-1]}; groups of 8 micro-batches)"),
        ({"pp": 1}, "batch 512 = dp 4 x 128 micro-batches of 1"),
        ({"schedule": "interleaved"}, "batch 512 = dp 4 x 128 micro-batches of 1, interleaved pipeline"),
        ({"training": replace(TRAINING, decoder_seq_length=128)}, "model llama3_70b, 70.6B parameters, sequences of 8192 + 128 tokens"),
        ({"training": replace(TRAINING, precision="fp8", fp8_recipe="mxfp8")}, "numbers fp8 (mxfp8), adamw, gradients reduced in fp32"),
        ({"training": replace(TRAINING, precision_aware_optimizer=True, exp_avg_dtype="fp8")},
         "numbers bf16, adamw (precision-aware, moments in fp8 and fp32), gradients reduced in fp32"),
        ({"world_size": 8, "cluster": replace(CLUSTER, num_gpus=8)}, "cluster dgx_h100: 8 x H100-SXM-80GB"),
        ({"world_size": 9, "cluster": replace(CLUSTER, num_gpus=9)}, "cluster dgx_h100: 9 x H100-SXM-80GB, 2 nodes of 8"),
    ):  # fmt: skip
        assert said in told(**fields), fields  # type: ignore[arg-type]


def test_a_rank_without_a_gpu_is_not_called_one() -> None:
    cpu = replace(PLAN, cluster=replace(CLUSTER, gpu=replace(CLUSTER.gpu, name="cpu")))
    text = as_text(Group(plan_table(cpu, llama()), price_table(cpu), comparison_table(cpu, [{"step_time_s": 1.0, "tokens_per_s": 64.0}])))
    assert "64 gloo ranks" in text
    assert "tokens/s/rank" in text
    assert "GPU" not in text


def test_axes_lie_on_the_level_that_holds_their_group() -> None:
    assert placement(PLAN) == "tp on nvlink, dp on infiniband, pp on infiniband"
    pp_inside = replace(PLAN, rank_order=("tp", "cp", "ep", "pp", "dp"), tp=2, pp=4, dp=8)
    assert placement(pp_inside) == "tp on nvlink, pp on nvlink, dp on infiniband"
    assert placement(replace(PLAN, tp=1, pp=1, dp=1)) == "one rank, no traffic"
    experts = replace(PLAN, tp=1, pp=1, dp=PLAN.world_size, ep=8, etp=1)
    assert placement(experts) == "ep on nvlink, dp on infiniband", "8 neighbours share a layer's experts"
    assert placement(replace(experts, etp=2)).startswith("ep on infiniband"), "8 groups of 2 neighbours"
    six = replace(CLUSTER, gpus_per_node=6, levels=(replace(CLUSTER.levels[0], size=6), CLUSTER.levels[1]))
    assert placement(replace(PLAN, cluster=six, pp=1, dp=1)) == "tp on infiniband", "groups of 4 cross nodes of 6"


def test_time_and_memory_are_sorted_by_cause_with_their_shares() -> None:
    text = lines(as_text(price_table(PLAN, LIMIT)))
    assert "predicted 12 s a step, 5,461 tokens/s/GPU, 432 TFLOP/s/GPU, MFU 43.7%; MFU counts causal attention" in text
    assert "memory 70.0 GiB at the peak of stage 0 (backward), 89.7% of 78.0 GiB usable (80.0 GiB less 2.0" in text
    time = [line.split(" s ")[0] if " s " in line else line for line in text]
    order = [index for cause in ("compute 9", "tp traffic 1.5", "bubble 1") for index, line in enumerate(time) if line.startswith(cause)]
    assert order == sorted(order)
    assert len(order) == 3
    assert any(line.startswith("2 more 50 ms 0.4%") for line in text), "two causes below half a percent"
    assert any("activations 32.0 GiB 45.7%" in line for line in text)


def test_a_plan_without_prediction_has_no_price() -> None:
    with pytest.raises(ValueError, match="no prediction"):
        price_table(replace(PLAN, predicted=None))
    assert "memory" not in as_text(plan_table(replace(PLAN, predicted=None), llama()))


def test_the_interval_is_shown_once_there_is_one() -> None:
    assert "no interval: no run like" in as_text(price_table(PLAN))
    assert "12 s a step (90%: 11.2 to 13)" in as_text(price_table(replace(PLAN, predicted=replace(PREDICTED, interval=(11.2, 13.0)))))


def test_the_difference_names_what_it_comes_from() -> None:
    assert SLOWER.predicted is not None
    assert difference(PREDICTED, SLOWER.predicted) == "+12.0%: tp traffic +1.8 s, bubble -360 ms"
    assert difference(PREDICTED, PREDICTED) == "+0.0%"


def test_alternatives_name_the_engine_only_where_it_differs() -> None:
    assert "megatron" not in as_text(alternatives_table(PLAN, [SLOWER]))
    assert "megatron_deepspeed" in as_text(alternatives_table(PLAN, [replace(SLOWER, engine="megatron_deepspeed")]))
    assert "No plan of another kind" in as_text(alternatives_table(PLAN, []))
    assert "slower by" in as_text(alternatives_table(PLAN, [SLOWER]))
    faster = as_text(alternatives_table(SLOWER, [PLAN]))
    assert "slower by" not in faster
    assert "slower (+), faster (-)" in faster


def test_chunks_at_one_distance_are_shortened_and_others_listed() -> None:
    def chunks(*decoders: tuple[int, int]) -> Stage:
        spans = [LayerSpan(kind="decoder", first=first, count=count, chunk=chunk) for chunk, (first, count) in enumerate(decoders)]
        return Stage(layers=(LayerSpan(kind="embedding", first=0, count=1), *spans))

    assert stage_layers(chunks((0, 1), (4, 1), (8, 1), (12, 1), (16, 1))) == "embedding, decoder 0 | decoder 4 | 8 ... 16 (4 chunks)"
    assert stage_layers(chunks((0, 2), (4, 2), (8, 2), (12, 2), (16, 2))).endswith("decoder 0-1 | decoder 4-5 | 8-9 ... 16-17 (4 chunks)")
    assert stage_layers(chunks((0, 1), (4, 1), (8, 1), (12, 2))) == "embedding, decoder 0 | decoder 4 | decoder 8 | decoder 12-13"
    assert stage_layers(chunks((0, 1), (4, 1), (9, 1), (12, 1), (15, 1), (18, 1))).endswith("decoder 4 | decoder 9 | 12 ... 18 (4 chunks)")


def test_chunks_and_recompute_are_told_apart() -> None:
    spans = (
        LayerSpan(kind="embedding", first=0, count=1),
        LayerSpan(kind="decoder", first=0, count=2, recompute="full"),
        LayerSpan(kind="decoder", first=2, count=1),
        LayerSpan(kind="decoder", first=8, count=1, recompute="selective", chunk=1),
        LayerSpan(kind="head", first=0, count=1, chunk=1),
    )
    assert stage_layers(Stage(layers=spans)) == "embedding, decoder 0-2 | decoder 8, head"
    assert stage_recompute(Stage(layers=spans)) == "full 2 of 4, selective 1 of 4"
    assert stage_recompute(Stage(layers=spans[:1])) == "-"


def test_brackets_in_names_are_shown_as_they_are() -> None:
    odd = replace(PLAN, model=replace(PLAN.model, name="[red]x[/red]"))
    assert "[red]x[/red]" in as_text(plan_table(odd, llama()))


def test_groups_of_seven_on_one_node_stay_on_its_link() -> None:
    """A level that holds all ranks holds every group, whether or not its size is a multiple of the group's."""
    inner, outer = PLAN.cluster.levels
    seven = replace(PLAN, world_size=7, tp=1, pp=7, dp=1, cluster=replace(PLAN.cluster, num_gpus=7))
    assert inner.size == 8
    assert placement(seven) == f"pp on {inner.name}"
    assert placement(replace(seven, world_size=14, dp=2)) == f"dp on {inner.name}, pp on {outer.name}"


def test_a_size_says_what_of_it_predicts_later_tokens() -> None:
    """DeepSeek-V3 is known by its 671B, without its layer of multi-token prediction."""
    settings = recipe.load(["recipe=deepseek_v3", "gpus=512"], Machine(), [])
    assert size_text(describe(settings.architecture, 4096)) == "683B parameters (671B and 11.6B of multi-token prediction), 37.6B active"
    assert size_text(llama()) == "70.6B parameters"
