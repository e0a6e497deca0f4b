"""Two sites with a slow link between them: a cluster whose outermost level is that link."""

from __future__ import annotations

import pytest
from instances import CALIBRATION, TRAITS
from small_models import gpt

import orchestrator as so
from orchestrator.cost.bounds import rounds
from orchestrator.cost.price import CostModel
from orchestrator.errors import InputError
from orchestrator.model.training import Training
from orchestrator.recipe.clusters import _texts, cluster_from
from orchestrator.report.text import placement
from orchestrator.strategy.megatron_layout import stages_of
from orchestrator.strategy.spec import Candidate, Mesh, Strategy
from orchestrator.strategy.workload import Workload


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
    cluster = cluster_from(_texts(slow(bandwidth, latency)), "two", "two", 16)
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
