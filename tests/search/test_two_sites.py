"""Two sites with a slow link between them: a cluster whose outermost level is that link."""

from __future__ import annotations

from typing import Any

import pytest
from instances import CALIBRATION, TRAITS
from msgspec.structs import replace
from small_models import gpt

import orchestrator as so
from orchestrator.cost.bounds import rounds
from orchestrator.cost.price import CostModel
from orchestrator.errors import InputError
from orchestrator.model.training import Training
from orchestrator.recipe.clusters import cluster_from
from orchestrator.recipe.read import as_texts
from orchestrator.report.text import placement
from orchestrator.strategy.layout import Stage
from orchestrator.strategy.megatron_layout import stages_of
from orchestrator.strategy.spec import Candidate, Mesh, Schedule, Strategy
from orchestrator.strategy.workload import Workload
from orchestrator.units import format_seconds


def sites(gpu: str | list[str] = "H100-SXM-80GB") -> dict[str, object]:
    """A node of eight GPUs on either side of 10 Gbit/s for each GPU, at 1 ms."""
    nvlink = {"name": "nvlink", "size": 8, "bandwidth": "450 GB/s", "latency": "1.9 us"}
    wan = {"name": "wan", "size": 16, "bandwidth": "10 Gbit/s", "latency": "1 ms"}
    return {"name": "two_sites", "gpu": gpu, "gpus_per_node": 8, "host_bandwidth": "pcie", "host_memory": "256 GB", "levels": [nvlink, wan]}


def test_only_the_pipeline_crosses_the_slow_link() -> None:
    """Its activations are the least that any axis sends; gradients and weights stay inside the sites."""
    answer = so.plan(recipe="llama3_8b", gpus=16, cluster=sites(), engine="megatron", train={"global_batch_size": 128})
    crossing = [part for part in placement(answer.plan).split(", ") if part.endswith(" on wan")]
    assert crossing == ["pp on wan"]
    across = so.plan(
        recipe="llama3_8b", gpus=16, cluster=sites(), engine="megatron", train={"global_batch_size": 128}, pin={"pp": 1, "tp": 1}
    )
    assert across.step_time_s > 1.2 * answer.step_time_s, "data parallelism over the link"


def test_one_site_is_named_where_it_is_faster_than_two_over_a_slow_link() -> None:
    """The batch divides 16 GPUs well, and 8 of one site need no link; over a fast one nothing else is searched for."""
    asked: dict[str, Any] = {"recipe": "llama3_8b", "engine": "megatron", "train": {"global_batch_size": 16, "seq_length": 2048}}
    one, two = (so.plan(**asked, gpus=gpus, cluster=slow("1 Gbit/s", "8 ms")) for gpus in (8, 16))
    assert one.step_time_s < two.step_time_s
    assert two.faster_on_fewer_gpus is not None
    assert two.faster_on_fewer_gpus.prediction == one.predicted
    assert two.summary()["faster_on_gpus"] == 8
    assert f"FEWER GPUs ARE FASTER: gpus=8 takes {format_seconds(one.step_time_s)} a step (-" in str(two)
    both = so.sweep(**asked, gpus=[8, 16], cluster=slow("1 Gbit/s", "8 ms"))
    assert [point.keys["gpus"] for point in both.front] == ["8"], "memory that is free on 16 makes up for neither time nor GPU-hours"
    assert two.headroom > one.headroom
    assert so.plan(**asked, gpus=16, cluster=slow("400 Gbit/s", "4 us")).faster_on_fewer_gpus is None
    nodes = slow("1 Gbit/s", "1 ms") | {"gpus_per_node": 4}
    assert so.plan(recipe="gpt_tiny", gpus=16, cluster=nodes, engine="megatron").summary()["faster_on_gpus"] < 8, "and halves of a site"


def test_two_types_of_gpu_are_refused_with_what_can_be_asked_for() -> None:
    with pytest.raises(InputError, match=r"are several types; cluster[.]mixed=slowest plans for what all of them can do"):
        so.plan(recipe="llama3_8b", gpus=16, cluster=sites(["H100-SXM-80GB", "A100-SXM-80GB"]))


def slow(bandwidth: str, latency: str) -> dict[str, object]:
    tree = sites()
    return {**tree, "levels": [tree["levels"][0], {"name": "wan", "size": 16, "bandwidth": bandwidth, "latency": latency}]}  # type: ignore[index]


@pytest.mark.parametrize(("pp", "vpp", "m", "group"), [(2, 2, 4, None), (2, 4, 8, None), (4, 2, 8, None), (4, 3, 10, 5), (4, 2, 9, 5)])
@pytest.mark.parametrize(("bandwidth", "latency"), [("1 Gbit/s", "5 ms"), ("400 Gbit/s", "4 us")])
def test_no_interleaved_schedule_is_faster_than_its_rounds(
    pp: int, vpp: int, m: int, group: int | None, bandwidth: str, latency: str
) -> None:
    """And over the slow link they are most of it: the bound leaves little to simulate."""
    training = Training(global_batch_size=m * (16 // pp), seq_length=32, precision="fp32")
    model = gpt(32, hidden=256, heads=4, seq=32, vocab=1024)
    cluster = cluster_from(as_texts(slow(bandwidth, latency)), "two", "two", 16)
    costs = CostModel(Workload(model=model, training=training, cluster=cluster), TRAITS, CALIBRATION)
    mesh = Mesh(pp=pp, dp=16 // pp)
    candidate = Candidate(
        engine="megatron",
        strategy=Strategy(mesh=mesh, zero_stage=1),
        micro_batch_size=1,
        num_microbatches=m,
        vpp=vpp,
        microbatch_group_size_per_vp_stage=group,
        schedule="interleaved",
    )
    chunks = [32 // (pp * vpp) + (index < 32 % (pp * vpp)) for index in range(pp * vpp)]
    seconds, _ = costs.score(candidate, stages_of(model, chunks, pp, [("none", 0)] * pp))
    floor = rounds(costs, candidate) + costs.once_seconds(candidate)
    assert floor <= seconds
    if latency == "5 ms":
        assert floor > 0.5 * seconds


def chunked(pp: int, vpp: int, m: int, bandwidth: str, latency: str) -> tuple[CostModel, Candidate, tuple[Stage, ...]]:
    """A model of 32 layers on 16 GPUs at two sites, in chunks."""
    training = Training(global_batch_size=m * (16 // pp), seq_length=32, precision="fp32")
    model = gpt(32, hidden=256, heads=4, seq=32, vocab=1024)
    cluster = cluster_from(as_texts(slow(bandwidth, latency)), "two", "two", 16)
    costs = CostModel(Workload(model=model, training=training, cluster=cluster), TRAITS, CALIBRATION)
    strategy = Strategy(mesh=Mesh(pp=pp, dp=16 // pp), zero_stage=1)
    schedule: Schedule = "interleaved" if vpp > 1 else "1f1b"
    candidate = Candidate(engine="megatron", strategy=strategy, micro_batch_size=1, num_microbatches=m, vpp=vpp, schedule=schedule)
    chunks = [32 // (pp * vpp)] * (pp * vpp)
    return costs, candidate, stages_of(model, chunks, pp, [("none", 0)] * pp)


def test_chunks_do_not_hide_what_a_slow_link_carries() -> None:
    """Two stages in two chunks send 32 x 256 x 4 bytes three times a micro-batch in each direction; at 1 Mbit/s nothing else matters. A
    pipeline without chunks sends them once, so that interleaving is no way around a slow link."""
    seconds = {}
    for vpp in (1, 2):
        costs, candidate, stages = chunked(2, vpp, 16, "1 Mbit/s", "1 us")
        seconds[vpp] = costs.score(candidate, stages)[0] - costs.once_seconds(candidate)
        if vpp == 2:
            carried = 16 * 3 * 32 * 256 * 4 / (1e6 / 8 * costs.calibration.p2p_efficiency)
            assert costs.busy_seconds(candidate) == pytest.approx(carried)
            assert carried <= seconds[2] < 1.1 * carried
            assert costs.played(candidate, stages).total_s == pytest.approx(costs.score(candidate, stages)[0])
    assert seconds[2] > 1.3 * seconds[1]


def test_over_gloo_sums_are_scattered_by_an_all_reduce_and_an_exchange_takes_two_transfers() -> None:
    """What CPU ranks do, and GPUs don't."""
    gpus = slow("1 Mbit/s", "1 us")
    tree = {**gpus, "gpu": "cpu", "host_bandwidth": "3 GB/s", "host_memory": "64 GB"}
    software = {"transformer_engine": False, "flash_attention": False, "apex": False}
    cluster = cluster_from(as_texts({**tree, "software": software}), "two", "two", 16)
    training = Training(global_batch_size=32, seq_length=32, precision="fp32")
    model = gpt(4, hidden=256, heads=4, seq=32, vocab=1024)
    found = {}
    for where in (cluster, cluster_from(as_texts(gpus), "two", "two", 16)):
        costs = CostModel(Workload(model=model, training=training, cluster=where), TRAITS, CALIBRATION)
        flat = Candidate(engine="megatron", strategy=Strategy(mesh=Mesh(dp=16), zero_stage=1), micro_batch_size=1, num_microbatches=2)
        piped = replace(flat, strategy=Strategy(mesh=Mesh(pp=2, dp=8), zero_stage=1), num_microbatches=4)
        kind = next(iter(costs.kinds))
        one = costs.layer(flat, kind, "none")
        found[where.is_cpu] = one.sync_s / one.gather_s, costs.schedule(piped)
    assert found[True][0] == pytest.approx(2 * found[False][0], rel=0.2)
    assert (found[True][1], found[False][1]) == ("1f1b_half_duplex", "1f1b")
