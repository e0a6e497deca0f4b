"""What packing changes in a model's attention, against pairs counted one by one."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from test_lora import LLAMA3_8B

import orchestrator
from orchestrator.cost.calibration import datasheet
from orchestrator.cost.workload import engine_workload
from orchestrator.engines import ENGINES
from orchestrator.model.families import describe
from orchestrator.model.ops import Attention
from orchestrator.model.packing import packed, sample_notes, waits
from orchestrator.model.parts.attention import GroupedQueryAttention
from orchestrator.model.spec import ModelSpec
from orchestrator.plan.check import workload_of
from orchestrator.recipe import supervised

SAMPLES = [100, 300, 24, 600]
LENGTH = sum(SAMPLES)


def attention(model: ModelSpec) -> Attention:
    return next(op for op in model.runs[1].layer.ops if isinstance(op, Attention))


def test_packed_samples_cost_the_pairs_inside_them() -> None:
    """Half of the sum of squares, in the limit of long samples, against half of the square of the sequence."""
    found = supervised.lengths(SAMPLES, LENGTH)
    op = attention(packed(describe(LLAMA3_8B, LENGTH), found.attended, kernels=True))
    assert op.visible * LENGTH**2 == pytest.approx(sum(n * n for n in SAMPLES) / 2)


def test_a_window_is_no_wider_for_it() -> None:
    """Samples of 512 tokens on average under a window of 64: nearly all of the window's pairs are there."""
    windowed = describe(replace(LLAMA3_8B, mixer=GroupedQueryAttention(window=64)), 1024)
    assert attention(packed(windowed, 512.0, kernels=True)).visible == attention(windowed).visible


def test_without_kernels_for_it_every_pair_is_computed_and_a_mask_is_held() -> None:
    model = packed(describe(LLAMA3_8B, LENGTH), 10.0, kernels=False)
    assert attention(model).visible == 1.0
    plain = describe(LLAMA3_8B, LENGTH).kind("embedding").saved_bytes()
    assert model.kind("embedding").saved_bytes() - plain == LENGTH**2


def test_on_a_cpu_packing_costs_no_attention_where_all_pairs_are_computed_anyway() -> None:
    """Torch's kernel takes 512 keys at once: a sequence of 512 computes all pairs whether a mask or causality hides half of them, one of
    1,024 three quarters; megatron-core's is not that one. On a GPU half of them is computed."""

    def shares(cluster: str, engine: str) -> list[float]:
        found = []
        for length in (512, 1024):
            lengths = {"train.seq_length": str(length), "model.max_position_embeddings": str(length)}
            plan = orchestrator.plan(recipe="llama_tiny", gpus="2", cluster=cluster, engine=engine, **lengths).plan
            traits = ENGINES[engine].traits(plan.cluster.software)
            found.append(attention(engine_workload(workload_of(plan), traits, datasheet(plan.cluster, traits)).model).visible)
        return found

    assert shares("cpu", "deepspeed") == [1.0, 0.75]
    assert shares("cpu", "megatron") == shares("dgx_h100", "deepspeed") == [0.5, 0.5]


def test_samples_that_attend_one_after_the_other_cost_and_keep_all_their_pairs() -> None:
    """Without flash attention and without a mask: megatron-core on CPU ranks."""
    found = supervised.lengths(SAMPLES, LENGTH)
    whole, op = (
        attention(describe(LLAMA3_8B, LENGTH)),
        attention(packed(describe(LLAMA3_8B, LENGTH), found.attended, kernels=False, masked=False)),
    )
    assert op.query_len * op.key_len == pytest.approx(sum(n * n for n in SAMPLES), rel=1e-3)
    kept, before = (sum(one.elements for one in each.saves if one.quadratic) for each in (op, whole))
    assert kept / before == pytest.approx(sum(n * n for n in SAMPLES) / LENGTH**2, rel=1e-3)


def test_samples_that_are_computed_one_by_one_are_launched_one_by_one() -> None:
    """Two ranks on cores, 4 layers and 4 micro-batches: each sample that a sequence has more launches attention's two products, mask,
    softmax, copy and the keys and values of 2 groups of heads, and twice as many kernels in backward; with flash attention the kernels
    are as many for any number of samples."""
    keys = {"recipe": "llama_tiny", "task": "sft", "gpus": "2", "train.seq_length": "512", "model.max_position_embeddings": "512"}
    keys |= {"data.packing": "true", "pin.tp": "1", "pin.pp": "1", "pin.micro_batch_size": "1", "pin.recompute": "none"}
    keys |= {"train.global_batch_size": "8"}

    def launched(length: int, engine: str) -> tuple[float, float]:
        plan = orchestrator.plan(**keys, engine=engine, **{"data.lengths": f"{length}+1"}).plan
        constants = datasheet(plan.cluster, ENGINES[engine].traits(plan.cluster.software))
        assert plan.training.lengths is not None
        return plan.prediction.by_cause["overhead"] / constants.op_overhead_s, plan.training.lengths.share(512)

    (many, shorter), (few, longer) = launched(64, "megatron"), launched(256, "megatron")
    assert many - few == pytest.approx(4 * 4 * (shorter - longer) * 7 * 3)
    assert launched(64, "deepspeed")[0] == launched(256, "deepspeed")[0]


def test_the_replica_with_the_longest_samples_is_waited_for() -> None:
    """Attention alone takes longer, by the same draw for every rule: 8 replicas of one micro-batch can't be dealt otherwise, of 4 they
    can, and steps of like sequences have no longest. Padded samples have none either."""
    keys = {"recipe": "llama3_8b", "task": "sft", "gpus": "8", "cluster": "dgx_b200", "data.lengths": "2000+2500"}
    keys |= {"train.seq_length": "8192", "pin.tp": "1", "pin.pp": "1", "pin.cp": "1", "pin.micro_batch_size": "1", "pin.recompute": "none"}

    def attention_s(batch: int, **more: str) -> float:
        keys_of = keys | {"train.global_batch_size": str(batch), "engine": "megatron"} | more
        return orchestrator.plan(**keys_of).plan.prediction.by_cause["attention"] / batch

    each = {balance: [attention_s(batch, **{"data.balance": balance}) for batch in (8, 32)] for balance in ("none", "step", "epoch")}
    lengths = orchestrator.plan(**keys, engine="megatron").plan.training.lengths
    assert lengths is not None
    assert each["step"][0] == pytest.approx(each["none"][0])
    assert each["none"][0] == pytest.approx(waits(lengths.loads, 8, 1, 1, "none") * each["epoch"][0])
    assert each["none"][1] == pytest.approx(waits(lengths.loads, 8, 4, 1, "none") * each["epoch"][1])
    assert each["none"][0] > 1.5 * each["epoch"][0]
    assert each["step"][1] == pytest.approx(waits(lengths.loads, 8, 4, 1, "step") * each["epoch"][1])
    assert each["step"][1] - each["epoch"][1] < (each["none"][1] - each["epoch"][1]) / 3
    padded = [attention_s(batch, **{"data.packing": "false"}) for batch in (8, 32)]
    assert padded[0] == pytest.approx(padded[1])


def test_what_is_cut_off_is_told() -> None:
    found = supervised.lengths([100, 300, 700], 500)
    assert sample_notes(found, 500, packing=True)[-1] == (
        "train.seq_length=500 cuts 1 samples (33%) off: 18% of all tokens are lost; 700 would cut none."
    )
    assert sample_notes(found, 500, packing=False)[1] == "data.packing=false: 40% of a sequence of 500 is padding."
    assert len(sample_notes(supervised.lengths([100, 300], 500), 500, packing=True)) == 2
    padded = sample_notes(supervised.lengths([100, 300], 500), 500, packing=True, multiple=16)
    assert padded[1:] == [
        "data.packing: 2.0 samples share a sequence of 500, none sees another.",
        "data.packing: each is padded to a multiple of 16 tokens (2 cp), 3.6% of all.",
    ]
