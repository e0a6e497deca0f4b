"""Peculiarities of measured engines: outside of the cost model's core, and only where the engine has them."""

from __future__ import annotations

import pytest

from orchestrator.calibrate.pricing import Pricer, zero_shot
from orchestrator.cost.calibration import datasheet, shipped
from orchestrator.cost.price import CostModel
from orchestrator.model.ops import Pointwise
from orchestrator.units import GB
from tests.validation.engines import ENGINES, nanotron, printed_as
from tests.validation.pricing import named
from tests.validation.runs import Run
from tests.validation.test_validate import only

NODES = {"num_gpus": "32", "gpus_per_node": "8"}


@pytest.mark.parametrize(
    ("change", "floors", "blocked"),
    [
        ({"tp": "2", "pp": "1", "dp": "4"}, 0, 0),  # no pipeline
        ({"tp": "2", "pp": "2", "dp": "2"}, 0, 0),  # a pipeline inside a node
        ({**NODES, "tp": "4", "pp": "4", "dp": "2"}, 4, 0),  # over nodes: a floor for each tensor-parallel rank
        ({**NODES, "tp": "1", "pp": "4", "dp": "8", "zero_stage": "0", "micro_batch_size": "1", "global_batch_size": "128"}, 0, 2),
        ({**NODES, "tp": "1", "pp": "2", "dp": "16", "zero_stage": "0", "micro_batch_size": "1", "global_batch_size": "256"}, 0, 1),
        ({**NODES, "tp": "1", "pp": "4", "dp": "8", "zero_stage": "0", "micro_batch_size": "1", "global_batch_size": "64"}, 0, 0),  # few
        ({**NODES, "tp": "1", "pp": "4", "dp": "8", "zero_stage": "1", "micro_batch_size": "1", "global_batch_size": "128"}, 0, 0),
        ({"num_gpus": "64", "tp": "32", "pp": "2", "dp": "1", "num_attention_heads": "32"}, 32, 1),  # tensor parallelism over four nodes
    ],
)
def test_nanotron_is_slower_where_its_pipeline_leaves_a_node(change: dict[str, str], floors: int, blocked: int) -> None:
    (run,) = only(change)
    plain = zero_shot(run)
    inside = nanotron.constants_in(run.candidate, run.cluster, plain)
    assert inside.layer_floor_s == pytest.approx(plain.layer_floor_s + floors * nanotron.PIPELINE_LAYER_FLOOR_S)
    assert inside.microbatch_overhead_s == pytest.approx(plain.microbatch_overhead_s + blocked * nanotron.STALL_S)


def kept(run: Run) -> list[float]:
    prediction = Pricer(zero_shot).price(run).prediction
    assert prediction is not None
    plain = CostModel(run.workload, run.engine.traits, datasheet(run.cluster, run.engine.traits))
    peaks = [stage.peak_memory_bytes for stage in plain.price(run.candidate, run.stages).by_stage]
    gathered = [stage.memory_by_cause["gathered"] for stage in prediction.by_stage]
    both = [peak + held for peak, held in zip(peaks, gathered, strict=True)]
    assert [stage.peak_memory_bytes for stage in prediction.by_stage] == pytest.approx(both)
    assert prediction.peak_memory_bytes == max(stage.peak_memory_bytes for stage in prediction.by_stage)
    return gathered


def test_nanotron_keeps_so_many_bytes_per_token_and_layer_in_flight_whatever_the_width() -> None:
    """A stage of 5 layers with two micro-batches in flight, one of 3 with one; two samples of 2048 tokens each."""
    row = {"sequence_parallel": "yes"}
    narrow, wide, alone, without = only(
        row, {**row, "hidden_size": "4096", "num_attention_heads": "32"}, {**row, "tp": "1", "dp": "4"}, {"sequence_parallel": "no"}
    )
    token = nanotron.GATHERED_TOKEN_BYTES * 2 * 2048
    assert kept(narrow) == pytest.approx([token * 5 * 2, token * 3])
    layers = [sum(span.count for span in stage.layers if span.kind == "decoder") for stage in wide.stages]
    assert kept(wide) == pytest.approx([token * layers[0] * 2, token * layers[1]])
    assert kept(alone) == kept(without) == [0.0, 0.0]


def test_where_memory_ends_the_allocator_gives_most_of_them_back() -> None:
    row = {"sequence_parallel": "yes", "num_layers": "64", "hidden_size": "4096", "num_attention_heads": "32", "pp": "1", "dp": "4"}
    (run,) = only({**row, "micro_batch_size": "8", "global_batch_size": "32"})
    wanted = nanotron.GATHERED_TOKEN_BYTES * 8 * 2048 * 64
    assert kept(run) == pytest.approx([(1 - nanotron.RELEASED) * wanted])


def test_printed_names_are_told_apart() -> None:
    names = {
        "Megatron-DeepSpeed 3D (1F1B)": "bigscience_2022",
        "HF Trainer + DeepSpeed ZeRO-3": "hf_trainer_deepspeed",
        "InternEvo fsdp": "internevo_fsdp",
        "InternEvo": "internevo",
        "megatron-core (Megatron-Bridge) megatron-fsdp": "nemo_megatron_fsdp",
        "megatron-core (Megatron-Bridge)": "nemo",
        "megatron-core 0.16.1": "megatron_core_tests",
        "megatron-lm 23e00ed0 (TE 2.11)": "megatron_core_tests",
        "megatron-lm (SP + selective recompute)": "megatron_lm_2021",
        "pytorch FSDP2 (NeMo AutoModel)": "fsdp_automodel",
    }
    assert {text: engine.name for text in names if (engine := printed_as(text))} == names
    for text in ("Habana Megatron-DeepSpeed", "new Megatron-DeepSpeed (SP+FA)", "ColossalAI"):
        assert printed_as(text) is None, text


def test_rows_of_one_printed_name_are_of_the_engine_that_their_kernels_and_precision_say() -> None:
    pipeline = {"engine": "Megatron-DeepSpeed 3D", "tp": "1", "dp": "4"}
    trainer = {"engine": "HF Trainer + DeepSpeed ZeRO-3", "tp": "1", "pp": "1", "dp": "8", "zero_stage": "3"}
    core, library = {"engine": "megatron-core"}, {"engine": "megatron-core (library recipe, not a performance one)"}
    adapters = {"engine": "litgpt", "tp": "1", "pp": "1", "dp": "8"}
    paper = {"engine": "megatron-lm", "precision": "fp16"}
    runs = only(
        *({**pipeline, "precision": "fp16"}, {**pipeline, "precision": "bf16"}),
        *(trainer, {**trainer, "flash_attention": "no"}, {**trainer, "engine": "DeepSpeed ZeRO-3 + Liger"}),
        *(core, {**core, "notes": "attention-backend=unfused"}, {**core, "notes": "cross-entropy-loss-fusion=True"}),
        *(library, {**library, "notes": "attention-backend=unfused"}),
        *(adapters, {**adapters, "engine": "litgpt, FSDP", "zero_stage": "3"}),
        *({**paper, "source": source} for source in ("SC21 Table 1", "tab5 of arXiv 2205.05198", "bigscience gpt2 V100 experiments")),
        *({"engine": "megatron-core (fork of Megatron-Bridge)", "notes": notes} for notes in ("posture 0", "posture 6: SSM state in bf16")),
    )
    assert [run.engine.name for run in runs] == [
        *("bigscience_2022", "bigscience_2022_bf16"),
        *("hf_trainer_deepspeed", "hf_trainer_deepspeed_unfused", "hf_trainer_deepspeed_tiled_loss"),
        *("megatron_core_tests", "megatron_core_tests_unfused", "megatron_core_tests_fused_loss"),
        *("bridge_library", "bridge_library_unfused"),
        *("litgpt", "litgpt_fsdp"),
        *("megatron_lm_2021", "megatron_lm_2022", "megatron_lm_bigscience"),
        *("bridge_fork_wide_scans", "bridge_fork"),
    ]
    assert [run.candidate.strategy.grad_reduce_dtype for run in (*runs[:2], *runs[-5:-2])] == ["fp16", "fp32", "fp16", "fp32", "fp32"]
    assert {engine.name for engine in ENGINES.values() if engine.printed} | {run.engine.name for run in runs} == ENGINES.keys()


OLD_PIPELINE = {"engine": "megatron-lm", "precision": "fp16", "num_gpus": "16", "tp": "4", "pp": "4", "dp": "1", "num_layers": "16"}


def test_megatrons_old_chunks_wait_for_what_they_send_and_receive() -> None:
    """Behind a forward and a backward pass both ways at once: half a message for each of the two, and the gathering of its own parts, over
    the slower of the stage's borders; the schedule then has no transfers of its own."""
    row = {**OLD_PIPELINE, "micro_batch_size": "1", "global_batch_size": "16"}
    (run,) = only({**row, "vpp": "2"})
    model = Pricer(zero_shot).model(run)
    plain = CostModel(run.workload, run.engine.traits, model.calibration)
    assert model.hop_seconds(run.candidate) == (0.0,) * 8
    sends, gather = model.border_seconds(run.candidate)
    for index, stage in enumerate(run.stages):
        ours, theirs = model.stage(run.candidate, stage, index), plain.stage(run.candidate, stage, index)
        waits = max(sends[index - 1], sends[index]) / 2 + gather
        assert ours.forward_s == pytest.approx([seconds + waits for seconds in theirs.forward_s])
        assert ours.backward_s == pytest.approx([seconds + waits for seconds in theirs.backward_s])
    assert gather > 0.0
    alone, shared = only({**row, "vpp": "1"}, {**row, "vpp": "1", "tp": "1", "num_gpus": "4"})
    whole = CostModel(alone.workload, alone.engine.traits, model.calibration)
    quarter, gathered = model.border_seconds(alone.candidate)
    latency = model.pair_link(0, 8, 4).latency + model.calibration.collective_overhead_s
    assert (quarter[1] - latency) * 4 == pytest.approx(whole.hop_seconds(alone.candidate)[1] - latency)
    assert model.hop_seconds(alone.candidate) == pytest.approx([send + gathered for send in quarter])
    assert Pricer(zero_shot).model(shared).border_seconds(shared.candidate)[1] == 0.0


def test_megatrons_old_pipelines_reduce_when_all_passes_are_over() -> None:
    pipeline, alone = only({**OLD_PIPELINE, "num_gpus": "32", "dp": "2"}, {**OLD_PIPELINE, "num_gpus": "8", "pp": "1", "dp": "2"})
    for run, waited in ((pipeline, True), (alone, False)):
        model = Pricer(zero_shot).model(run)
        sums = model.sums(run.candidate, run.stages[0].layers)
        assert sums.sync_s > 0.0
        assert (model.stage(run.candidate, run.stages[0], 0).exposed_s == pytest.approx(sums.sync_s + sums.gather_s)) is waited


LIBRARY = {"engine": "megatron-core (library recipe, not a performance one)", "tp": "8", "pp": "1", "dp": "1"}


def test_a_library_recipe_has_the_planned_engines_constants_and_leaves_rotary_positions_and_gates_to_torch() -> None:
    library, core = only({**LIBRARY, "model_name": "Llama"}, {**LIBRARY, "engine": "megatron-core", "model_name": "Llama"})
    carried = shipped("megatron", "H100-SXM-80GB")
    assert carried is not None
    assert named(None)(library) == carried.calibration(zero_shot(library))
    assert named(None)(core) == zero_shot(core)
    kept = [{op.role: op for op in run.model.kind("decoder").ops if isinstance(op, Pointwise)} for run in (library, core)]
    assert [(ops["rotary"].moved, ops["activation"].moved) for ops in kept] == [(24, 10), (4, 6)]
    assert [len(ops["activation"].saves) for ops in kept] == [2, 1]  # and keeps the activated gate


def test_a_table_of_third_parties_is_of_a_stock_stack_whose_host_bounds_narrow_layers() -> None:
    """No tensor parallelism makes a layer shorter than its launches; the same row of another table is bound by the GPU."""
    rows = [{**LIBRARY, "model_name": "Llama"}, {**LIBRARY, "model_name": "Llama", "tp": "4", "num_gpus": "4"}]
    stock, tuned = only(*rows, table="third_party_a"), only(*rows)
    assert [run.cluster.stack for run in (*stock, *tuned)] == ["stock", "stock", "tuned", "tuned"]
    seconds = [Pricer(named(None)).price(run).prediction.step_time_s for run in (*stock, *tuned)]  # type: ignore[union-attr]
    assert seconds[0] == pytest.approx(seconds[1], rel=0.02)
    assert seconds[0] > 2 * seconds[2]


def test_fine_tuning_that_its_source_calls_functional_is_of_a_stock_stack() -> None:
    """As a verification card's items of it are; those of pretraining took what a tuned stack takes."""
    functional = {"notes": "item peft; functional run, not tuned (checks on)"}
    lora = {"task": "lora", "engine": "NeMo", "lora_dim": "8", "lora_targets": "linear_qkv"}
    runs = only({**functional, **lora}, functional, {**lora, "notes": "tuned, mock data"})
    assert [run.cluster.stack for run in runs] == ["stock", "tuned", "tuned"]


def test_ethernet_without_rdma_is_as_slow_as_it_was_measured() -> None:
    said = {
        "interconnect": "VPC Ethernet between two nodes of one GPU, no RDMA",
        "num_gpus": "2",
        "gpus_per_node": "1",
        "tp": "1",
        "pp": "1",
    }
    (run,) = only({**LIBRARY, **said, "dp": "2"})
    cost = Pricer(zero_shot).model(run)
    assert cost.link(2, 1).bandwidth == pytest.approx(2.35 * GB)


def test_a_dense_qwen3_norms_queries_and_keys_and_a_note_may_tie_its_embeddings() -> None:
    row = {**LIBRARY, "model_name": "Qwen3-1.7B"}
    plain, tied, llama = only(
        row, {**row, "notes": "mean of iterations; tied embeddings; sizes as published"}, {**row, "model_name": "Llama"}
    )
    assert ["qk_norm" in run.model.architecture.features() for run in (plain, tied, llama)] == [True, True, False]
    assert [run.model.architecture.tie_embeddings for run in (plain, tied, llama)] == [False, True, False]
