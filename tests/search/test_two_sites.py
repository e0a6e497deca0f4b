"""Two sites with a slow link between them: a cluster whose outermost level is that link."""

from __future__ import annotations

import pytest

import orchestrator as so
from orchestrator.errors import InputError
from orchestrator.report.text import placement


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
