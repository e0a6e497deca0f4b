"""Laws of the price: it sums up, it is deterministic, its floors are floors, more never costs less where it can't."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from cost_cases import DEEPSPEED, MEGATRON, UNFUSED, a100, candidate, cost_model, gpt, stages
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from orchestrator.cost import calibration
from orchestrator.cost.calibration import CPU, Calibration, datasheet
from orchestrator.cost.network import Network
from orchestrator.cost.stage import StageCost
from orchestrator.cost.step import Transfers, step_seconds
from orchestrator.errors import InputError
from orchestrator.hardware.catalog import GPUS
from orchestrator.hardware.collectives import Link
from orchestrator.hardware.spec import Gpu
from orchestrator.model.families import describe
from orchestrator.model.spec import Enter, Exit
from orchestrator.strategy.axes import cp, dp, ep, tp
from orchestrator.strategy.spec import RECOMPUTE_MODULES, RECOMPUTE_ORDER, Candidate, Mesh, Strategy
from orchestrator.units import GB, GBIT

MODEL = gpt(num_layers=12)


@st.composite
def cases(draw: st.DrawFn) -> tuple[dict[str, Any], list[int], list[Any], int]:
    """A candidate's fields, layers by virtual stage, recompute by virtual stage, vpp."""
    pp = draw(st.sampled_from([1, 1, 2, 3, 4]))
    vpp = draw(st.sampled_from([1, 1, 2])) if pp > 1 else 1
    chunks = pp * vpp
    cuts = sorted(draw(st.lists(st.integers(0, MODEL.num_layers), min_size=chunks - 1, max_size=chunks - 1)))
    counts = [b - a for a, b in zip([0, *cuts], [*cuts, MODEL.num_layers], strict=True)]
    strongest = draw(st.sampled_from(RECOMPUTE_ORDER))
    allowed = RECOMPUTE_ORDER[: RECOMPUTE_ORDER.index(strongest) + 1]
    modes = [draw(st.sampled_from(allowed)) for _ in range(chunks)]
    t = draw(st.sampled_from([1, 2, 4, 8]))
    fields: dict[str, Any] = {
        "tp": t,
        "pp": pp,
        "cp": draw(st.sampled_from([1, 1, 2])),
        "dp": draw(st.sampled_from([1, 2, 3, 8])),
        "zero_stage": draw(st.sampled_from([0, 1, 2, 3])),
        "sequence_parallel": t > 1 and draw(st.booleans()),
        "recompute": strongest,
        "micro_batch_size": draw(st.sampled_from([1, 2, 4])),
        "num_microbatches": pp * draw(st.integers(1, 6)),
        "overlap_grad_reduce": draw(st.booleans()),
        "vpp": vpp,
    }
    return fields, counts, modes, vpp


TRAITS = replace(DEEPSPEED, bucket_elements=10**6, bucket_copies=2, overlaps_param_gather=True)


@given(cases())
def test_causes_sum_to_the_step_and_the_score_is_the_price(case: tuple[dict[str, Any], list[int], list[Any], int]) -> None:
    fields, counts, modes, vpp = case
    model = cost_model(MODEL, traits=TRAITS)
    layers = stages(model.model, counts, modes, vpp)
    prediction = model.price(candidate(**fields), layers)
    assert sum(prediction.by_cause.values()) == pytest.approx(prediction.step_time_s)
    assert min(prediction.by_cause.values()) >= -1e-9 * prediction.step_time_s
    assert model.score(candidate(**fields), layers) == (prediction.step_time_s, prediction.peak_memory_bytes)
    assert cost_model(MODEL, traits=TRAITS).price(candidate(**fields), layers) == prediction  # no cache changes a price


@given(cases())
@settings(max_examples=300)
def test_floors_are_below_every_split_and_recompute(case: tuple[dict[str, Any], list[int], list[Any], int]) -> None:
    fields, counts, modes, vpp = case
    model = cost_model(MODEL, traits=TRAITS)
    cand = candidate(**fields)
    seconds, nbytes = model.score(cand, stages(model.model, counts, modes, vpp))
    assert model.time_floor(cand) <= seconds * (1 + 1e-9)
    assert model.memory_floor(cand) <= nbytes * (1 + 1e-9)


ODD = replace(
    datasheet(a100(), MEGATRON),
    layer_floor_s=2e-3,
    tp_overlap=0.3,
    overlap_efficiency=1.0,
    overlap_slowdown=0.9,
    outer_scaling=0.4,
)
"""Every term that the datasheet leaves out is in."""


@given(cases())
@settings(max_examples=150)
def test_floors_and_sums_hold_under_fitted_constants_too(case: tuple[dict[str, Any], list[int], list[Any], int]) -> None:
    fields, counts, modes, vpp = case
    model = cost_model(MODEL, traits=TRAITS, calibration=ODD)
    cand, layers = candidate(**fields), stages(cost_model(MODEL).model, counts, modes, vpp)
    prediction = model.price(cand, layers)
    assert model.score(cand, layers) == (prediction.step_time_s, prediction.peak_memory_bytes)
    assert model.time_floor(cand) <= prediction.step_time_s * (1 + 1e-9)
    assert model.memory_floor(cand) <= prediction.peak_memory_bytes * (1 + 1e-9)
    assert sum(prediction.by_cause.values()) == pytest.approx(prediction.step_time_s)
    assert min(prediction.by_cause.values()) >= -1e-9 * prediction.step_time_s
    for stage in prediction.by_stage:
        assert sum(stage.memory_by_cause.values()) == pytest.approx(stage.peak_memory_bytes)


@given(cases(), st.sampled_from(RECOMPUTE_ORDER))
@settings(max_examples=150)
def test_the_causes_of_a_layer_sum_to_its_passes(case: tuple[dict[str, Any], list[int], list[Any], int], mode: Any) -> None:
    """What a recompute runs again is traffic that is waited for, traffic that hides and compute: each stands in its cause."""
    layer = cost_model(MODEL, traits=TRAITS, calibration=ODD).layer(candidate(**case[0]), "decoder", mode)
    assert sum(layer.by_cause.values()) == pytest.approx(layer.seconds)
    assert min(layer.by_cause.values()) >= 0.0


@pytest.mark.parametrize("counts", [[1, 3], [3, 1]])
def test_the_causes_of_a_step_are_the_busiest_stages(counts: list[int]) -> None:
    model = cost_model()
    cand = candidate(pp=2, dp=2, num_microbatches=4)
    prediction = model.price(cand, stages(model.model, counts))
    layer, embedding, head = (model.layer(cand, kind, "none").by_cause["gemm"] for kind in ("decoder", "embedding", "head"))
    most = max(counts[0] * layer + embedding, counts[1] * layer + head)
    assert prediction.by_cause["gemm"] == pytest.approx(4 * most)


def test_floors_are_near_the_price_of_an_even_plan() -> None:
    """A floor of 0 would be sound too: these prune."""
    model = cost_model(gpt(num_layers=24, hidden_size=4096, num_attention_heads=32, ffn_hidden_size=16384))
    cand = candidate(tp=2, pp=4, dp=2, num_microbatches=64)
    seconds, nbytes = model.score(cand, stages(model.model, [6, 6, 6, 6]))
    assert model.time_floor(cand) > 0.75 * seconds
    assert model.memory_floor(cand) > 0.7 * nbytes


@given(cases(), st.floats(1, 20), st.sampled_from(["inner", "outer"]))
def test_a_faster_link_is_never_slower(case: tuple[dict[str, Any], list[int], list[Any], int], faster: float, level: str) -> None:
    fields, counts, modes, vpp = case
    speeds = {"inner": 300 * GB, "outer": 200 * GBIT}
    # Traffic that hides costs compute (overlap_slowdown < 1), so that hiding more is never worse.
    before = cost_model(MODEL, traits=TRAITS, cluster=a100(**speeds))
    speeds[level] *= faster
    after = cost_model(MODEL, traits=TRAITS, cluster=a100(**speeds))
    layers = stages(before.model, counts, modes, vpp)
    assert after.score(candidate(**fields), layers)[0] <= before.score(candidate(**fields), layers)[0] * (1 + 1e-9)


@given(cases(), st.integers(1, 4))
def test_more_micro_batches_never_take_less_time(case: tuple[dict[str, Any], list[int], list[Any], int], more: int) -> None:
    fields, counts, modes, vpp = case
    model = cost_model(MODEL, traits=TRAITS)
    layers = stages(model.model, counts, modes, vpp)
    few = model.score(candidate(**fields), layers)[0]
    fields["num_microbatches"] += more * fields["pp"]
    assert model.score(candidate(**fields), layers)[0] > few


@given(cases())
def test_more_recompute_is_never_faster_and_never_saves_more(case: tuple[dict[str, Any], list[int], list[Any], int]) -> None:
    model = cost_model(MODEL, traits=UNFUSED)
    fields = {**case[0], "zero_stage": 0}
    costs = {mode: model.layer(candidate(**fields), "decoder", mode) for mode in RECOMPUTE_ORDER}
    for less, more in permutations(RECOMPUTE_ORDER, 2):
        if less == "none" or more == "full" or set(RECOMPUTE_MODULES.get(less, "?")) < set(RECOMPUTE_MODULES.get(more, ())):
            assert costs[less].backward_s <= costs[more].backward_s * (1 + 1e-12)
            assert costs[less].forward_s == costs[more].forward_s
            assert costs[less].saved_bytes >= costs[more].saved_bytes


def test_each_recomputed_module_drops_what_it_makes() -> None:
    """Korthikanti et al., section 4.1, in sbh: scores, their dropout and its mask 5as/h; GeLU's input and output 8 + 8; norms' outputs
    2 + 2. Fused with its norm, the MLP starts from the norm's input."""
    architecture = gpt()
    a, h, s = architecture.num_attention_heads, architecture.hidden_size, 1024
    for fused, in_mlp in ((False, 16), (True, 18)):
        model = cost_model(architecture, traits=replace(UNFUSED, fused_norms=fused), seq_length=s)
        saved = {mode: model.layer(candidate(), "decoder", mode).saved_bytes / (s * h) for mode in RECOMPUTE_ORDER}
        dropped = {mode: saved["none"] - there for mode, there in saved.items()}
        assert dropped["layernorm"] == pytest.approx(4)
        assert dropped["mlp"] == pytest.approx(in_mlp)
        assert dropped["selective"] == pytest.approx(5 * a * s / h)
        assert dropped["core_attn+layernorm+mlp"] == pytest.approx(20 + 5 * a * s / h)


def test_recomputing_the_mlp_repeats_its_products_and_its_share_of_the_traffic() -> None:
    model = cost_model(traits=UNFUSED)
    none, mlp, full = (
        model.layer(candidate(tp=2, dp=4, sequence_parallel=True), "decoder", mode).by_cause for mode in ("none", "mlp", "full")
    )
    assert full["tp"] - none["tp"] == pytest.approx(2 * (mlp["tp"] - none["tp"]))  # two of the layer's four borders
    assert mlp["recompute"] > none["gemm"] / 3 * 16 / 24 * 0.9  # 16 of the 24 h^2 of a forward's products
    assert mlp["recompute"] < full["recompute"]


@given(cases())
def test_a_higher_zero_stage_never_needs_more_state_memory(case: tuple[dict[str, Any], list[int], list[Any], int]) -> None:
    model = cost_model(MODEL, traits=DEEPSPEED)
    held = [
        model.layer(candidate(**{**case[0], "zero_stage": stage}), "decoder", "none").static_bytes for stage in (1, 2, 3)
    ]  # stage 0 accumulates in bf16: another engine path with other bytes
    assert held == sorted(held, reverse=True)


@pytest.mark.parametrize(("stage", "volume"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_zero_moves_2_psi_at_stages_0_to_2_and_3_psi_at_stage_3(stage: int, volume: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """arXiv 1910.02054, section 7: with one micro-batch and 16-bit gradients, in elements per rank, times (n-1)/n."""
    n = 8
    monkeypatch.setattr(Network, "link", lambda *_: Link(bandwidth=1.0, latency=0.0))  # seconds are bytes
    quiet = replace(datasheet(a100(), DEEPSPEED), collective_overhead_s=0.0, op_overhead_s=0.0)
    alone = replace(DEEPSPEED, overlaps_grad_reduce=False)
    model = cost_model(traits=alone, calibration=quiet)
    strategy = {"zero_stage": stage, "overlap_param_gather": False, "overlap_grad_reduce": False}
    cost = model.layer(candidate(dp=n, **strategy), "decoder", "none")
    moved = cost.sync_s + cost.gather_s + cost.by_cause["dp"]
    assert moved == pytest.approx(volume * (n - 1) / n * cost.parameters * 2)


def test_zero_2_reduces_and_zero_3_gathers_twice_in_every_micro_batch() -> None:
    strategy = Strategy(mesh=Mesh(dp=8), zero_stage=2)
    assert [(t.operation, t.when) for t in dp.traffic(1, 1, strategy, DEEPSPEED)] == [
        ("reduce_scatter", "backward"),
        ("all_gather", "step"),
    ]
    third = [(t.operation, t.when) for t in dp.traffic(1, 1, replace(strategy, zero_stage=3), DEEPSPEED)]
    assert third == [("reduce_scatter", "backward"), ("all_gather", "forward"), ("all_gather", "backward")]
    reduces = replace(DEEPSPEED, reduce_scatter_from_stage=2)
    first = [(t.operation, t.when) for t in dp.traffic(1, 1, replace(strategy, zero_stage=1), reduces)]
    assert first == [("all_reduce", "step"), ("all_gather", "step")]


def test_hpz_gathers_in_backward_inside_its_group() -> None:
    strategy = Strategy(mesh=Mesh(dp=64), zero_stage=3, zero_shard_size=8)
    sizes = {t.when: t.size for t in dp.traffic(1, 1, strategy, DEEPSPEED) if t.operation == "all_gather"}
    assert sizes == {"forward": 64, "backward": 8}


def test_tensor_parallel_traffic_is_megatrons() -> None:
    """Two all-reduces of s b h a pass, or with sequence parallelism two all-gathers and two reduce-scatters, and two more all-gathers in
    backward for the weight gradients (layers.py:478-549): x = 2 s b h bytes."""
    layer = describe(gpt(), 2048).kind("decoder")
    x = 2048 * 1024 * 2 * 4
    plain = list(tp.traffic(layer, Strategy(mesh=Mesh(tp=4)), 4, 2))
    assert [(t.when, t.operation, t.nbytes) for t in plain if t.when == "forward"] == [("forward", "all_reduce", x)] * 2
    assert [(t.when, t.operation, t.nbytes) for t in plain if t.when == "backward"] == [("backward", "all_reduce", x)] * 2
    woven = [(t.when, t.operation) for t in tp.traffic(layer, Strategy(mesh=Mesh(tp=4), sequence_parallel=True), 4, 2)]
    assert {kind: woven.count(kind) for kind in set(woven)} == {
        ("forward", "all_gather"): 2,
        ("forward", "reduce_scatter"): 2,
        ("backward", "all_gather"): 4,
        ("backward", "reduce_scatter"): 2,
    }
    assert list(tp.traffic(layer, Strategy(mesh=Mesh(dp=4)), 4, 2)) == []


def test_context_parallel_rings_pass_keys_and_values() -> None:
    """cp-1 steps of 2 s/cp b kv_heads head_dim elements, twice that in backward."""
    layer = describe(gpt(num_query_groups=4), 2048).kind("decoder")
    forward, backward = cp.traffic(layer, Strategy(mesh=Mesh(cp=4)), 2, 2)
    assert (forward.count, forward.nbytes) == (3, 2 * 2048 / 4 * 4 * 64 * 2 * 2)
    assert backward.nbytes == 2 * forward.nbytes


def test_expert_tokens_go_out_and_back() -> None:
    forward, backward = ep.traffic(2048 * 1024, 2, Strategy(mesh=Mesh(dp=8, ep=4, tp=2)), 1, 2)
    assert (forward.count, forward.size, forward.nbytes) == (2, 4, 2048 * 1024 * 2 * 2 / 2)
    assert backward.count == 2


def test_an_all_reduce_engine_pays_more_than_a_reduce_scatter_one() -> None:
    full = replace(MEGATRON, reduce_scatter_from_stage=2)
    cand = candidate(dp=8, zero_stage=1, overlap_grad_reduce=False, overlap_param_gather=False)
    costs = [cost_model(traits=traits).layer(cand, "decoder", "none") for traits in (MEGATRON, full)]
    assert costs[0].sync_s < costs[1].sync_s
    assert costs[0].gather_s == costs[1].gather_s


def test_recompute_repeats_forward_traffic() -> None:
    model = cost_model()
    cand = candidate(tp=4)
    none, full = (model.layer(cand, "decoder", mode) for mode in ("none", "full"))
    assert full.by_cause["tp"] == pytest.approx(1.5 * none.by_cause["tp"])
    assert full.backward_s == pytest.approx(none.backward_s + none.forward_s)


def test_tied_embeddings_cost_an_all_reduce_only_with_a_pipeline() -> None:
    tied, untied = cost_model(gpt()), cost_model(gpt(tie_embeddings=False))
    counts = [2, 2]
    one, two = candidate(dp=2), candidate(pp=2)
    assert tied.price(one, stages(tied.model, [4])).by_cause.get("pp", 0.0) == 0.0
    assert tied.price(two, stages(tied.model, counts)).by_cause["pp"] > untied.price(two, stages(untied.model, counts)).by_cause["pp"]


def test_offload_trades_time_for_memory() -> None:
    model = cost_model(traits=DEEPSPEED)
    here, there = candidate(dp=8, zero_stage=2), candidate(dp=8, zero_stage=2, offload_optimizer=True)
    layers = stages(model.model, [4])
    assert model.score(here, layers)[0] < model.score(there, layers)[0]
    assert model.score(here, layers)[1] > model.score(there, layers)[1]


def test_an_offloaded_update_takes_the_hosts_time_and_two_ways_over_its_link() -> None:
    """Of a rank's share, at ZeRO-1 over 4: fp32 gradient 4 and weight 2 bytes over the link; Adam reads the gradient twice, reads and
    writes 12 bytes of states and writes the weight, 34 in all; the device clears its own 4 bytes a parameter."""
    constants = replace(datasheet(a100(), MEGATRON), host_efficiency=0.5, host_adam_bandwidth=10 * GB, optimizer_efficiency=0.5)
    model = cost_model(calibration=constants)
    layer = model.layer(candidate(dp=4, zero_stage=1, offload_optimizer=True), "decoder", "none")
    share = layer.parameters / 4
    clears = layer.parameters * 4 / (model.cluster.gpu.memory_bandwidth * 0.5)
    assert layer.optimizer_s == pytest.approx(share * 6 / (32 * GB * 0.5) + share * 34 / (10 * GB) + clears)
    stays = model.layer(candidate(dp=4, zero_stage=1), "decoder", "none")
    assert stays.optimizer_s == pytest.approx(share * 34 / (model.cluster.gpu.memory_bandwidth * 0.5) + clears)


def test_an_engines_floor_is_a_third_forward_and_two_thirds_backward() -> None:
    """And a layer that is made again runs its forward's launches twice. Embedding and head have no such floor."""
    model = cost_model(calibration=replace(datasheet(a100(), MEGATRON), layer_floor_s=3.0))
    for mode, backward in (("none", 2.0), ("full", 3.0)):
        layer = model.layer(candidate(), "decoder", mode)
        assert (layer.forward_s, layer.backward_s) == pytest.approx((1.0, backward))
    assert model.layer(candidate(), "head", "none").seconds < 1.0


def test_small_work_is_bound_by_launches() -> None:
    model = cost_model(gpt(hidden_size=64, num_attention_heads=4, ffn_hidden_size=256), seq_length=64)
    cost = model.layer(candidate(), "decoder", "none")
    kernels = sum(not isinstance(op, Enter | Exit) for op in model.model.kind("decoder").ops)
    assert cost.forward_s == pytest.approx(kernels * model.calibration.op_overhead_s)
    assert cost.by_cause["overhead"] > 0.5 * (cost.forward_s + cost.backward_s)


def test_a_stage_or_precision_that_is_not_there_is_refused() -> None:
    with pytest.raises(InputError, match=r"pin\.zero_stage=3: megatron does not have it"):
        cost_model().layer(candidate(zero_stage=3), "decoder", "none")
    with pytest.raises(InputError, match=r"train\.precision=fp8: A100-SXM-80GB has no peak"):
        cost_model(precision="fp8").layer(candidate(), "decoder", "none")
    with pytest.raises(KeyError):
        cost_model().layer(candidate(), "swin", "none")


def test_throughput_counts_the_whole_batch() -> None:
    model = cost_model()
    prediction = model.price(candidate(dp=4, micro_batch_size=2, num_microbatches=8), stages(model.model, [4]))
    assert prediction.tokens_per_s_per_gpu * prediction.step_time_s * 4 == pytest.approx(64 * 2048)


def test_every_family_is_priced_in_full_precision_on_gloo_ranks() -> None:
    cluster = replace(a100(4), gpu=replace(a100().gpu, name="cpu", peak_flops={"fp32": 1e11}))
    transformers = replace(MEGATRON, layers="hugging_face")
    assert datasheet(cluster, transformers) == CPU
    assert replace(datasheet(cluster, MEGATRON), context_bytes=CPU.context_bytes) == CPU
    assert datasheet(cluster, MEGATRON).context_bytes < CPU.context_bytes  # transformers is loaded too
    model = cost_model(gpt(num_layers=2, hidden_size=64, num_attention_heads=4, ffn_hidden_size=256), cluster=cluster, precision="fp32")
    assert model.price(candidate(tp=2, dp=2), stages(model.model, [2])).step_time_s > 0


def test_every_constant_has_its_reason() -> None:
    """Each field of Calibration has a docstring line after it."""
    source = Path(calibration.__file__).read_text()
    body = source[source.index("class Calibration") : source.index("_BY_GENERATION")].splitlines()
    fields = [i for i, line in enumerate(body) if line.startswith("    ") and ": " in line and " = " in line and '"""' not in line]
    undocumented = [body[i].split(":")[0].strip() for i in fields if not body[i + 1].strip().startswith('"""')]
    assert undocumented in ([], ["name"])
    assert len(fields) == len(Calibration.__struct_fields__)


def test_a_layer_is_priced_once_whatever_the_number_of_micro_batches() -> None:
    model = cost_model()
    cand: Candidate = candidate(tp=2)
    first = model.layer(cand, "decoder", "none")
    assert model.layer(replace(cand, num_microbatches=99), "decoder", "none") is first


def test_a_shard_group_scatters_inside_and_reduces_between() -> None:
    """Stage 1 over groups of 8 of 64 ranks: the states are divided by 8, what crosses between the groups is an eighth."""
    strategy = Strategy(mesh=Mesh(dp=64), zero_stage=1, zero_shard_size=8)
    traffic = [(t.operation, t.nbytes, t.size, t.stride) for t in dp.traffic(2.0, 4.0, strategy, MEGATRON)]
    assert traffic == [("reduce_scatter", 4.0, 8, 1), ("all_reduce", 0.5, 8, 8), ("all_gather", 2.0, 8, 1)]
    assert dp.share("optimizer", strategy) == 8
    assert dp.share("optimizer", replace(strategy, zero_shard_size=None)) == 64


def grids(gpus: int, batch: int) -> dict[int, float]:
    """Seconds of a step by tensor-parallel degree, for every grid of data and tensor parallelism over the GPUs, at a fixed batch."""
    cluster = a100(gpus, outer=25 * GBIT)
    model = cost_model(gpt(num_layers=24, hidden_size=2048, ffn_hidden_size=8192), cluster=cluster, global_batch_size=batch)
    seconds = {}
    for degree in (1, 2, 4, 8, 16):
        replicas = gpus // degree
        if replicas and batch % replicas == 0:
            shape = candidate(tp=degree, dp=replicas, sequence_parallel=degree > 1, num_microbatches=1, micro_batch_size=batch // replicas)
            seconds[degree] = model.score(shape, stages(model.model, [24]))[0]
    return seconds


def test_the_cheapest_grid_is_often_neither_pure_model_nor_pure_batch() -> None:
    """Gholami et al., "Integrated Model, Batch and Domain Parallelism" (arXiv 1712.04432): at a fixed batch, over a slow network
    (25 Gbit/s a GPU here), the best grid moves inwards once the processes leave the node."""
    best = {}
    for gpus in (8, 16, 32, 64):
        seconds = grids(gpus, 64)
        assert 1 in seconds  # pure batch parallelism is possible
        best[gpus] = min(seconds, key=seconds.__getitem__)
    assert best[8] == 1
    assert all(1 < best[gpus] < gpus for gpus in (16, 32, 64))


@pytest.mark.parametrize(
    ("stage", "batch", "itemsize", "copies"), [(3, 64, 4, 2.0), (3, 8, 4, 2.0), (2, 64, 2, 2 - 1 / 8), (2, 8, 2, 0.0), (1, 64, 2, 0.0)]
)
def test_deepspeeds_sums_beside_an_offloaded_optimizer_go_over_the_hosts_link_in_every_micro_batch(
    stage: int, batch: int, itemsize: int, copies: float
) -> None:
    """8 ranks, 8 micro-batches or one: an eighth of the gradients comes up and goes down, in fp32 at stage 3 and in bf16 at stage 2,
    where the first micro-batch's go down alone. Backward takes what is longer."""
    traits, choices = replace(DEEPSPEED, bucket_elements=500_000_000), {"dp": 8, "zero_stage": stage, "num_microbatches": batch // 8}
    slow, fast = (
        cost_model(cluster=replace(a100(), host_bandwidth=rate), traits=traits, global_batch_size=batch, grad_accum_dtype="fp32")
        for rate in (1e6, 1e15)
    )
    offloaded, stays = candidate(**choices, offload_optimizer=True), candidate(**choices)
    here, there = (model.layer(offloaded, "decoder", "none") for model in (slow, fast))
    carried = copies * itemsize * here.parameters / 8 / (1e6 * slow.calibration.host_efficiency)
    assert (here.forward_s, here.backward_s) == pytest.approx((there.forward_s, max(carried, there.backward_s)))
    assert slow.layer(stays, "decoder", "none").backward_s == pytest.approx(there.backward_s), "nothing is carried that stays"


def test_a_bubble_costs_nothing_where_ranks_share_cores() -> None:
    """Four stages on the cores of two ranks, 8 micro-batches: the work of all over the cores in place of (8 + 3) / 8 of it; with 2 micro-
    batches a rank is alone on its cores most of the time, and those bound it: half its time while all work."""
    quiet = {"op_overhead_s": 0.0, "collective_launch_s": 0.0, "microbatch_overhead_s": 0.0, "step_overhead_s": 0.0, "latency_factor": 0.0}
    alone = replace(datasheet(a100(), MEGATRON), **quiet, collective_overhead_s=0.0, p2p_efficiency=1e9, gemm_half_tokens=0.0)
    for m, share in ((8, 8 / 11), (2, 0.5)):
        passes = []
        for core_share in (1.0, 0.5):
            cost = cost_model(MODEL, global_batch_size=m, calibration=replace(alone, core_share=core_share))
            four = candidate(pp=4, num_microbatches=m)
            passes.append(cost.layer(four, "decoder", "none"))
            one = cost.layer(candidate(num_microbatches=m), "decoder", "none")
        assert passes[1].forward_s == pytest.approx(share * passes[0].forward_s)
        assert passes[1].backward_s == pytest.approx(share * passes[0].backward_s)
        assert sum(passes[1].by_cause.values()) == pytest.approx(share * sum(passes[0].by_cause.values()))
        assert one.forward_s == pytest.approx(passes[0].forward_s)


def test_a_step_on_shared_cores_is_never_shorter_than_all_the_work_over_the_cores() -> None:
    """Two stages of four layers each, whose passes take 2/3 as long as with all cores busy, 2 micro-batches: 1F1B waits for as long as that
    saves; four chunks a stage wait a quarter of it, and the cores have work all the time."""
    for vpp, schedule in ((1, "1f1b"), (4, "interleaved")):
        shape = candidate(pp=2, num_microbatches=2, vpp=vpp, schedule=schedule)
        passes = StageCost(forward_s=(0.1 / vpp,) * vpp, backward_s=(0.2 / vpp,) * vpp, exposed_s=0.0, optimizer_s=0.0, peak_bytes=0.0)
        assert step_seconds(shape, [passes, passes], Transfers(schedule, 0.0, active=2 / 3), 0.0) == pytest.approx(2 * 0.3 * 3 / 2)
    assert step_seconds(shape, [passes, passes], Transfers(schedule, 0.0), 0.0) < 0.7


@pytest.mark.parametrize("gpu", GPUS.values(), ids=lambda gpu: gpu.name)
def test_by_a_datasheet_attention_is_never_nearer_the_peak_than_products_nor_its_backward_than_its_forward(gpu: Gpu) -> None:
    """Softmax is no matrix product, and the backward pass computes the scores again."""
    found = datasheet(replace(a100(8), gpu=gpu), MEGATRON)
    assert 0 < found.attention_backward_efficiency <= found.attention_efficiency <= found.gemm_efficiency <= 1
