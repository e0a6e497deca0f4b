"""Where rules begin to refuse: the last that is legal and the first that is not."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from small_models import gpt
from test_legality import GIVEN, able, broken, chosen

from orchestrator.hardware.spec import Part
from orchestrator.model.lora import Lora
from orchestrator.model.spec import Edge, LayerRun
from orchestrator.model.training import QUANTISED
from orchestrator.strategy.capabilities import Capabilities
from orchestrator.strategy.legality import precision_here, types_of_gpu, types_order, unsuited
from orchestrator.strategy.megatron_layout import even_chunks, first_layers, pieces, spread
from orchestrator.strategy.spec import PP_BEFORE_DP, RANK_ORDER, Candidate, Mesh, Strategy
from orchestrator.strategy.workload import Workload

EVEN = able(uneven_stages=False)


@pytest.mark.parametrize(
    ("rule", "capabilities", "last", "first"),
    [
        ("stages", able(), {"pp": 14}, {"pp": 15}),  # 12 layers, embedding and head
        ("stages", EVEN, {"pp": 12}, {"pp": 14}),
        ("stages", EVEN, {"pp": 4}, {"pp": 5}),
        ("stages", EVEN, {"pp": 1}, {"pp": 8}),
        ("chunks", able(), {"pp": 7, "vpp": 2}, {"pp": 5, "vpp": 3}),
        ("chunks", EVEN, {"pp": 3, "vpp": 2}, {"pp": 3, "vpp": 3}),
        ("chunks", able(), {"pp": 2, "vpp": 2}, {"pp": 1, "vpp": 2}),
        ("schedule", able(), {"pp": 2, "schedule": "1f1b"}, {"pp": 2, "vpp": 2, "schedule": "1f1b"}),
        ("schedule", able(schedules=("1f1b", "deepspeed_1f1b")), {"pp": 2, "schedule": "deepspeed_1f1b"}, {"schedule": "deepspeed_1f1b"}),
        ("microbatch_groups", able(), {"pp": 2, "vpp": 2, "microbatch_group_size_per_vp_stage": 4},
         {"pp": 2, "microbatch_group_size_per_vp_stage": 4}),
        ("sequence_parallel", able(), {"tp": 2, "sequence_parallel": True}, {"tp": 1, "sequence_parallel": True}),
        ("data_parallel", able(), {"dp": 8}, {"dp": 5}),
        ("mesh", able(), {"tp": 2, "pp": 2, "cp": 2, "dp": 1}, {"tp": 2, "pp": 2, "cp": 2, "dp": 2}),
        ("batch", able(), {"micro_batch_size": 2}, {"micro_batch_size": 4, "num_microbatches": 1}),
        ("axis_ep", able(axes=("tp", "pp", "cp", "dp")), {"ep": 1}, {"ep": 2}),
        ("axis_vpp", able(axes=("tp", "pp", "cp", "dp", "ep", "etp")), {"pp": 2}, {"pp": 2, "vpp": 2}),
        ("zero_stage", able(zero_stages=(0, 1, 2), zero_stages_with_pipeline=(0,)), {"zero_stage": 2}, {"zero_stage": 3}),
        ("zero_stage", able(zero_stages=(0, 1), zero_stages_with_pipeline=(0, 2)), {"pp": 2, "zero_stage": 2}, {"pp": 1, "zero_stage": 2}),
        ("zero_shard_size", able(), {"zero_stage": 1, "zero_shard_size": 2}, {"zero_stage": 2, "zero_shard_size": 2}),
    ],
)  # fmt: skip
def test_a_rule_begins_where_it_says(rule: str, capabilities: Capabilities, last: dict[str, Any], first: dict[str, Any]) -> None:
    assert rule not in broken(capabilities, chosen(**last))
    assert rule in broken(capabilities, chosen(**first))


def test_each_stage_has_gpus_of_one_type() -> None:
    """8 + 16 of 24: those numbers of stages, by the types of each stage's ranks."""
    cluster = replace(GIVEN.cluster, num_gpus=24)
    parts = tuple(Part(gpu=replace(cluster.gpu, name=name), num_gpus=n, levels=cluster.levels) for name, n in (("a", 8), ("b", 16)))
    given = replace(GIVEN, cluster=replace(cluster, parts=parts))
    types = "a" * 8 + "b" * 16
    for pp in (1, 2, 3, 4, 6, 8, 12, 24):
        size = 24 // pp
        mixed = any(len({*types[stage * size : (stage + 1) * size]}) > 1 for stage in range(pp))
        why = types_of_gpu(chosen(pp=pp, dp=size), given)
        assert (why is not None) == mixed, pp
        if why is not None:
            assert why.startswith(f"pp={pp}: ")
            assert ("all axes of parallelism but pp" in why) == (pp == 1)
            assert (f"one of its stages of {size} GPUs has" in why) == (pp > 1)
    assert types_order(chosen(order=RANK_ORDER), given) is None
    assert "tp-cp-ep-pp-dp spreads a stage" in (types_order(chosen(order=PP_BEFORE_DP), given) or "")


@pytest.mark.parametrize(
    ("name", "capability", "legal"),
    [
        ("cpu", "0", {"fp32", "bf16"}),
        ("V100", "7.0", {"fp32", "fp16", "fp8", "nvfp4"}),  # what has no peak there is refused by the hardware's own figures
        ("T4", "7.5", {"fp32", "fp16", "fp8", "nvfp4"}),
        ("A100", "8.0", {"fp32", "fp16", "bf16", "fp8", "nvfp4"}),
    ],
)
def test_a_precision_is_where_the_hardware_has_it(name: str, capability: str, legal: set[str]) -> None:
    gpu = replace(GIVEN.cluster.gpu, name=name, compute_capability=capability)
    where = replace(GIVEN.cluster, gpu=gpu)
    found = set()
    for precision in ("fp32", "fp16", "bf16", *QUANTISED):
        given = replace(GIVEN, cluster=where, training=replace(GIVEN.training, precision=precision))  # type: ignore[arg-type]
        if precision_here(chosen(), given) is None:
            found.add(precision)
    assert found == legal


def test_tasks_and_adapters_are_of_the_engines_that_have_them() -> None:
    def why(capabilities: Capabilities, **training: Any) -> str | None:
        return unsuited(capabilities, Workload(model=GIVEN.model, training=replace(GIVEN.training, **training), cluster=GIVEN.cluster))

    assert why(able(), lora=Lora(rank=8)) == "megatron has no adapters (lora.rank=8); engine=deepspeed trains them, megatron plans them"
    assert why(able(lora=True), lora=Lora(rank=8)) is None
    assert why(able()) is None
    assert why(able(tasks=())) == f"megatron has no task={GIVEN.training.task}; engine=deepspeed and engine=megatron have"


@pytest.mark.parametrize("layers", [1, 7, 12])
@pytest.mark.parametrize("vpp", [1, 2, 4])
def test_layers_are_spread_as_evenly_as_they_go(layers: int, vpp: int) -> None:
    """None is lost, none has two more than another; embedding's chunk and the last stage's last one have no extra layer."""
    for stage, pp in ((0, 1), (0, 4), (1, 4), (3, 4)):
        sizes = spread(layers, vpp, stage, pp)
        assert sum(sizes) == layers
        assert max(sizes) - min(sizes) <= 1
        ascending = stage == 0 and pp > 1
        assert list(sizes) == sorted(sizes, reverse=not ascending)
    for chunks in range(1, layers + 1):
        sizes = even_chunks(gpt(layers), chunks)
        assert sum(sizes) == layers
        assert max(sizes) - min(sizes) <= 1
        assert list(sizes) == sorted(sizes, reverse=True)


def test_pieces_of_layers_are_counted_within_their_kind_and_over_all_its_runs() -> None:
    model = gpt(4)
    first, decoder, last = model.runs
    other = replace(decoder.layer, kind="other")
    runs = (first, LayerRun(layer=decoder.layer, count=2), LayerRun(layer=other, count=3), LayerRun(layer=decoder.layer, count=4), last)
    mixed = replace(model, runs=runs)
    one_by_one = [("decoder", 0), ("decoder", 1), ("other", 0), ("other", 1), ("other", 2), *(("decoder", n) for n in range(2, 6))]
    for start in range(10):
        for end in range(start, 10):
            found = [(kind, low + i) for kind, low, count in pieces(mixed, start, end) for i in range(count)]
            assert found == one_by_one[start:end]
    assert pieces(mixed, 3, 3) == []


def test_of_a_chunk_the_first_layers_of_each_stack_are_recomputed() -> None:
    """Kinds that follow each other in a decoder are one stack; an encoder, whose output a decoder needs, is one of its own."""
    model = gpt(4)
    runs = [("dense", 2), ("experts", 5)]
    assert [first_layers(model, runs, n) for n in (0, 1, 2, 4, 9)] == [[0, 0], [1, 0], [2, 0], [2, 2], [2, 5]]
    assert [first_layers(model, runs[:1], n) for n in (0, 1, 9)] == [[0], [1], [2]]
    crossed = replace(model, edges=(Edge(name="e", source="encoder", target="decoder", elements=1),))
    assert first_layers(crossed, [("encoder", 3), ("decoder", 4)], 2) == [2, 2]
    assert first_layers(crossed, [("encoder", 3), ("decoder", 1), ("other", 4)], 2) == [2, 1, 1]


def test_a_chosen_mesh_says_what_it_is_made_of() -> None:
    candidate = Candidate(engine="x", strategy=Strategy(mesh=Mesh(tp=2, pp=3)), micro_batch_size=1, num_microbatches=1)
    assert candidate.mesh.world_size == 6
    assert [candidate.mesh.degree(axis) for axis in ("tp", "pp", "dp")] == [2, 3, 1]
    with pytest.raises(KeyError):
        candidate.mesh.stride("ep2")
