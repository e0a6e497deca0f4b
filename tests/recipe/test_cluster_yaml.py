"""What a cluster's YAML is taken for: its levels, links, types and capabilities, and each thing that can be wrong in it alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from orchestrator.detect import Machine
from orchestrator.errors import InputError
from orchestrator.hardware.catalog import GPUS
from orchestrator.hardware.collectives import exchange_link, link_for
from orchestrator.hardware.spec import Cluster, Software
from orchestrator.key import BYTES, FLOPS, RATES, SECONDS, quantity
from orchestrator.recipe.clusters import changed_cluster, cluster_from, gpu_tree, load_cluster, resized, stored
from orchestrator.recipe.settings import load

H100, A100 = "H100-SXM-80GB", "A100-SXM-80GB"
NODE = {"name": "nvlink", "size": "node", "bandwidth": "nvlink", "latency": "2 us"}
NET = {"name": "ib", "size": "unlimited", "bandwidth": "400 Gbit/s", "latency": "0 s"}
TREE: dict[str, Any] = {
    "gpu": H100, "gpus_per_node": "8", "levels": [NODE, NET], "host_bandwidth": "pcie", "host_memory": "1 GB",
}  # fmt: skip
OWN = {"name": "X1", "memory": "40 GiB", "memory_bandwidth": "1.5 TB/s", "peak_flops": {"bf16": "200 TFLOP/s"}}
TWO = f"8 x {H100} + 16 x {A100}"
BOTH = f"8 x {H100} + 8 x MI300X"


def cluster(gpus: int = 16, node: int | None = None, mixed: str | None = None, **fields: Any) -> Cluster:
    return cluster_from(TREE | fields, "c", "c.yaml", gpus, node, mixed)


def refusal(gpus: int = 16, node: int | None = None, mixed: str | None = None, **fields: Any) -> str:
    with pytest.raises(InputError) as caught:
        cluster(gpus, node, mixed, **fields)
    return str(caught.value)


def level(size: Any, **fields: Any) -> dict[str, Any]:
    return {"name": f"l{size}", "size": str(size), "bandwidth": "1 GB/s", "latency": "1 us"} | fields


# ---- quantities


@pytest.mark.parametrize(
    ("text", "units", "value"),
    [("1.9 us", SECONDS, 1.9e-6), ("7 ns", SECONDS, 7e-9), ("3 ms", SECONDS, 3e-3), ("2s", SECONDS, 2.0), ("800 Mbit/s", RATES, 1e8),
     ("1 Tbit/s", RATES, 1.25e11), ("3 KB/s", RATES, 3e3), ("3 MB/s", RATES, 3e6), ("1 KiB", BYTES, 1024), ("1 MiB", BYTES, 1024**2),
     ("2 MB", BYTES, 2e6), ("1 TB", BYTES, 1e12), ("5 GFLOP/s", FLOPS, 5e9), ("5 PFLOP/s", FLOPS, 5e15), ("3 FLOP/s", FLOPS, 3.0)],
)  # fmt: skip
def test_units_are_si_and_bits_an_eighth_of_bytes(text: str, units: dict[str, float], value: float) -> None:
    assert quantity("x", text, units) == value


def test_nothing_is_a_latency_and_no_rate() -> None:
    assert quantity("x", "0 us", SECONDS, zero=True) == 0.0
    for text, zero in (("0 us", False), ("-1 us", True), ("-1 us", False)):
        with pytest.raises(InputError, match="must be above 0"):
            quantity("x", text, SECONDS, zero=zero)
    with pytest.raises(InputError) as caught:
        quantity("bandwidth", None, RATES)
    assert str(caught.value).startswith("bandwidth: needs a number and a unit, such as 4 Tbit/s")
    for wrong in ("4", "4 parsec", 4, "GB/s", "x GB/s", "1 2 GB/s"):
        with pytest.raises(InputError, match="bandwidth="):
            quantity("bandwidth", wrong, RATES)


# ---- levels


def test_levels_hold_the_job_from_the_inside_out() -> None:
    found = cluster(24, 6, levels=[level("node"), level(12), level("unlimited")])
    assert [one.size for one in found.levels] == [6, 12, 24]
    assert [one.size for one in cluster(8, levels=[level("node"), level(16), level("unlimited")]).levels] == [8, 16, 16]
    assert [one.size for one in cluster(4, levels=[level(2), level("node"), level("unlimited")]).levels] == [2, 8, 8]
    assert cluster(16).levels[1].latency == 0.0
    assert cluster(16, levels=[level("node", source="a lab"), NET]).levels[0].source == "a lab"
    assert cluster(16).levels[0].source == ""


def test_a_rack_is_cut_to_whole_nodes_alike_where_every_level_outside_it_is_as_large_as_the_job() -> None:
    """Racks of 72 in nodes of 8: 256 GPUs are 4 times 64. With a level of a stated size outside, which 64 need not divide, racks stay."""
    rack = [level("node"), level(72)]
    assert [one.size for one in cluster(256, levels=[*rack, level("unlimited")]).levels] == [8, 64, 256]
    assert [one.size for one in cluster(256, levels=[*rack, level(288), level("unlimited")]).levels] == [8, 72, 288, 288]
    assert [one.size for one in cluster(288, levels=[*rack, level(288)]).levels] == [8, 72, 288]
    assert [one.size for one in cluster(72, levels=rack).levels] == [8, 72]
    assert [one.size for one in cluster(256, levels=[level(4), level("node"), level("unlimited")]).levels] == [4, 8, 256], "no rack"


@pytest.mark.parametrize(
    ("levels", "why"),
    [
        ([], "c.yaml: levels: needs a list of network levels, from the inside out"),
        ("x", "c.yaml: levels: needs a list of network levels"),
        (None, "c.yaml: levels: is missing"),
        ([level("node"), "x"], "c.yaml: levels[1]=x: must be a mapping with name, size, bandwidth, latency, source"),
        ([level(3), level("node"), NET], "c.yaml: levels[1].size=8: must be a multiple of the level inside it (3)"),
        ([level("all")], "c.yaml: levels[0].size=all: is no size; choose one of a number of GPUs, node, unlimited"),
        ([level(0)], "c.yaml: levels[0].size=0: must be at least 1"),
        ([level("-8")], "c.yaml: levels[0].size=-8: is no size"),
        ([NODE | {"size": None}], "c.yaml: levels[0]: size: is missing"),
        ([NODE, NET | {"bandwidth": "0 GB/s"}], "c.yaml: levels[1].bandwidth=0 GB/s: must be above 0"),
        ([NODE, NET | {"latency": "-1 us"}], "c.yaml: levels[1].latency=-1 us: must be above 0"),
        ([NODE, NET | {"bandwidth": ["1 GB/s"]}], "c.yaml: levels[1].bandwidth=1 GB/s: is a list of 1 for 1 type of GPU"),
        ([NODE, NET | {"bandwidth": ["1 GB/s", "2 GB/s"]}], "is a list of 2 for 1 type of GPU"),
    ],
)  # fmt: skip
def test_levels_that_are_none_are_refused_by_their_place(levels: Any, why: str) -> None:
    said = refusal(levels=levels)
    assert why in said
    assert said.startswith("c.yaml: levels")


def test_a_job_is_whole_nodes_unless_it_is_less_than_one() -> None:
    assert cluster(3).num_gpus == 3
    assert cluster(24).num_nodes == 3
    assert refusal(20).startswith("gpus=20: is no whole number of nodes of 8: gpus=16 and gpus=24 are; gpus_per_node=N says how many")
    assert cluster(20, 4).gpus_per_node == 4
    assert refusal(16, levels=[NODE]).startswith("gpus=16: is more than the outermost network level of c.yaml holds (8)")
    assert cluster(8, levels=[NODE]).levels[-1].size == 8


# ---- links


@pytest.mark.parametrize(
    ("text", "value"),
    [("nvlink", GPUS[H100].nvlink), ("pcie", GPUS[H100].pcie), ("pcie / 2", GPUS[H100].pcie / 2), ("pcie/4", GPUS[H100].pcie / 4),
     ("nvlink / 3", GPUS[H100].nvlink / 3), ("5 GB/s", 5e9)],
)  # fmt: skip
def test_a_link_is_the_gpus_own_or_a_part_of_it(text: str, value: float) -> None:
    assert cluster(host_bandwidth=text).host_bandwidth == value


@pytest.mark.parametrize("text", ["pcie / 0", "pcie / 10", "pcies", "xnvlink", 5, ["pcie"]])
def test_what_is_no_link_needs_a_number_and_a_unit(text: Any) -> None:
    assert "c.yaml: host_bandwidth=" in refusal(host_bandwidth=text)


def test_a_link_that_a_gpu_has_not_is_refused_by_its_name() -> None:
    assert "levels[0].bandwidth=nvlink: is not known of A100-PCIE-40GB: give a number and a unit, such as 63 GB/s" in refusal(
        gpu="A100-PCIE-40GB"
    )


# ---- several types


def test_each_type_has_its_own_links_and_all_have_the_least_in_common() -> None:
    levels = [NODE, NET | {"bandwidth": ["400 Gbit/s", "200 Gbit/s"]}]
    found = cluster(24, gpu=TWO, levels=levels)
    assert found.mixed
    assert [(part.gpu.name, part.num_gpus, [one.bandwidth for one in part.levels]) for part in found.parts] == [
        (H100, 8, [450e9, 50e9]), (A100, 16, [300e9, 25e9]),
    ]  # fmt: skip
    assert [one.bandwidth for one in found.levels] == [300e9, 25e9]
    assert found.host_bandwidth == min(GPUS[H100].pcie, GPUS[A100].pcie)
    one = cluster(16, gpu=f"16 x {A100}")
    assert (one.parts, one.mixed, one.gpu) == ((), False, GPUS[A100])
    listed = cluster(24, gpu=[{"type": H100, "gpus": "8"}, {"type": A100, "gpus": "16"}], levels=levels)
    assert listed == found
    slow = cluster(16, gpu=[H100, A100], mixed="slowest")
    assert (slow.parts, slow.mixed, slow.gpu.peak_flops) == ((), True, GPUS[A100].peak_flops)
    assert cluster(16, gpu=[A100]).mixed is False


@pytest.mark.parametrize(
    ("gpus", "gpu", "mixed", "why"),
    [
        (16, TWO, None, f"gpus=16: the cluster's types are 8 x {H100} + 16 x {A100} = 24 GPUs; cluster.gpu= says other numbers"),
        (24, TWO, "refuse", f"c.yaml: gpu={TWO}: are several types; mixed=refuse was said"),
        (16, [H100, A100], None, f"c.yaml: gpu={H100}, {A100}: are several types; cluster.mixed=slowest plans for what all of them can do"),
        (16, H100, "stages", f"c.yaml: gpu={H100}: mixed=stages needs how many there are of each type: 8 x"),
        (16, [H100, A100], "stages", f"c.yaml: gpu={H100}, {A100}: mixed=stages needs how many there are of each type: 8 x"),
        (16, f"8 x {H100} + {A100}", None, f"{A100} is not such as 8 x H100"),
        (16, f"8 x {H100} + 8 x {H100}", None, f"c.yaml: gpu={H100}, {H100}: has a type twice: count its GPUs together"),
        *((16, gpu, mixed, f"c.yaml: gpu={H100}, MI300X: no one job can have NVIDIA's {H100} and AMD's MI300X: NCCL and RCCL don't reach")
          for gpu, mixed in ((BOTH, None), (BOTH, "stages"), (BOTH, "slowest"), ([H100, "MI300X"], None), ([H100, "MI300X"], "slowest"))),
        (16, f"8 x {H100} + 8 x cpu", None, f"c.yaml: gpu={H100}, cpu: are ranks with and without a GPU"),
        (16, f"0 x {H100} + 8 x {A100}", None, "c.yaml: gpu=0: must be at least 1"),
        (16, [{"type": H100, "gpus": "8"}, A100], None, f"c.yaml: gpu[1]={A100}: must be a mapping with type, gpus, as the others are"),
        (16, [{"type": H100, "gpus": "8"}, {"type": A100}], None, "c.yaml: gpu[1]: gpus: is missing"),
        (16, [{"type": H100, "gpu": "8"}], None, "c.yaml: gpu[0]: gpu: is no key here; did you mean gpus; choose one of type, gpus"),
        (16, [{"type": H100, "gpus": "0"}], None, "c.yaml: gpu[0].gpus=0: must be at least 1"),
        (16, "H20O", None, "c.yaml: gpu=H20O: is not in the catalog; did you mean H20"),
        (16, 5, None, "c.yaml: gpu=5: must be a catalog name or the figures; choose one of name, memory"),
        (16, OWN | {"peak_flops": {}}, None, "c.yaml: gpu.peak_flops={}: needs a figure by precision; choose one of fp32, tf32"),
        (16, OWN | {"peak_flops": "5"}, None, "c.yaml: gpu.peak_flops=5: needs a figure by precision"),
        (16, OWN | {"peak_flops": {"int8": "1 TFLOP/s"}}, None, "c.yaml: gpu.peak_flops: int8: is no key here"),
        (16, {name: value for name, value in OWN.items() if name != "memory"}, None, "c.yaml: gpu: memory: is missing"),
        (16, OWN | {"compute_capability": "-1"}, None, "c.yaml: gpu.compute_capability=-1: must be at least 0"),
    ],
)  # fmt: skip
def test_types_that_can_not_be_planned_are_refused(gpus: int, gpu: Any, mixed: str | None, why: str) -> None:
    assert why in refusal(gpus, mixed=mixed, gpu=gpu, levels=[level("node"), level("unlimited")])


def test_ranks_without_a_gpu_may_be_of_several_kinds() -> None:
    slow = gpu_tree(msgspec.structs.replace(GPUS["cpu"], name="cpu-slow", memory=2**30))
    found = cluster(4, 4, gpu=[{"type": "cpu", "gpus": "2"}, {"type": slow, "gpus": "2"}], levels=[level("node")], host_bandwidth="1 GB/s")
    assert [part.gpu.name for part in found.parts] == ["cpu", "cpu-slow"]
    assert found.is_cpu


@pytest.mark.parametrize(
    ("peaks", "capability"),
    [("nvfp4", "10.0"), ("fp8", "8.9"), ("bf16", "8.0"), ("fp16", "7.0"), ("tf32", "0.0"), ("fp32", "0.0")],
)
def test_a_gpu_of_ones_own_has_the_capability_of_its_best_precision(peaks: str, capability: str) -> None:
    gpu = OWN | {"peak_flops": {"fp32": "1 TFLOP/s", peaks: "2 TFLOP/s"}}
    found = cluster(gpu=gpu, levels=[level("node"), level("unlimited")], host_bandwidth="1 GB/s").gpu
    assert found.compute_capability == capability
    assert (found.memory, found.memory_bandwidth, found.peak_flops[peaks]) == (40 * 2**30, 1.5e12, 2e12)
    assert (found.pcie, found.nvlink, found.source) == (0.0, 0.0, "c.yaml")
    linked = cluster(gpu=gpu | {"pcie": "2 GB/s", "nvlink": "0 B/s", "source": "a sheet", "compute_capability": "9.0"},
                     levels=[level("node"), level("unlimited")]).gpu  # fmt: skip
    assert (linked.pcie, linked.nvlink, linked.source, linked.compute_capability) == (2e9, 0.0, "a sheet", "9.0")


# ---- software


def test_software_is_what_is_said_else_what_the_gpu_can_have() -> None:
    base = Software(megatron_core="0.15.0")
    for gpu, fused in ((H100, True), ("V100-SXM2-32GB", False)):
        found = cluster_from(TREE | {"gpu": gpu}, "c", "c", 8, software=base).software
        assert (found.megatron_core, found.transformer_engine, found.flash_attention, found.apex) == ("0.15.0", fused, fused, True)
    said = cluster(software={"deepspeed": "0.18.0", "apex": "false"}).software
    assert (said.deepspeed, said.apex, said.transformer_engine) == ("0.18.0", False, True)
    assert refusal(software="x").startswith("c.yaml: software=x: must be a mapping; choose one of megatron_core")
    assert refusal(software={"apexx": "true"}).startswith(
        "c.yaml: software: apexx: is no key here; did you mean apex; choose one of megatron_core"
    )
    assert refusal(software={"megatron_core": "new"}).startswith("c.yaml: software.megatron_core=new: ")


# ---- written, read, changed


def test_a_cluster_is_named_by_its_yaml_or_its_file() -> None:
    assert (cluster().name, cluster(name="mine").name) == ("c", "mine")
    assert refusal(levelz=3).startswith("c.yaml: levelz: is no key here; did you mean levels; choose one of name")
    assert refusal(zzz=3).startswith("c.yaml: zzz: is no key here; choose one of")
    for name in ("gpu", "gpus_per_node", "host_bandwidth", "host_memory"):
        assert refusal(**{name: None}).startswith(f"c.yaml: {name}: is missing")


def test_another_size_and_another_field_leave_the_rest() -> None:
    whole = cluster(24, gpu=TWO)
    for one in (cluster(16), whole, cluster(16, gpu=[H100, A100], mixed="slowest")):
        assert resized(one, one.num_gpus) == one
        changed = changed_cluster(one, {"host_memory": "2 GB"})
        assert changed == msgspec.structs.replace(one, host_memory=2 * 10**9)
    assert resized(cluster(16), 4).num_gpus == 4
    racks = cluster(256, levels=[level("node"), level(72), level("unlimited")])
    grown = resized(racks, 288)
    assert [one.size for one in racks.levels] == [8, 64, 256]
    assert grown == cluster(288, levels=[level("node"), level(72), level("unlimited")]), "unlimited stays so, and racks have 72 again"
    with pytest.raises(InputError, match=r"gpus=16: is more than the outermost .* holds \(8\); cluster\.levels\.l8\.size=16, if"):
        resized(cluster(8, levels=[level(8)]), 16)
    assert changed_cluster(cluster(16), {"gpu.memory": "64 GiB"}).gpu.memory == 64 * 2**30


# ---- stacks


def test_a_stack_that_nobody_spoke_of_is_stock_and_survives_a_change_of_size() -> None:
    assert cluster().stack == "stock"
    tuned = cluster(stack="tuned")
    assert (tuned.stack, resized(tuned, 8).stack) == ("tuned", "tuned")
    assert "c.yaml: stack=slow: is not known; choose one of tuned, stock" in refusal(stack="slow")


def test_of_the_packages_clusters_those_of_benchmarks_that_constants_rest_on_are_tuned() -> None:
    tuned = {name for name in stored("clusters") if load_cluster(name, 4 if name == "cpu" else 8).stack == "tuned"}
    laboratories = {"cpu", "rtx_titan_8", "v100_16gb", "v100_16gb_x4"}
    assert tuned == laboratories | {name for name in stored("clusters") if name.startswith(("dgx_", "gb200_", "gb300_"))}


# ---- meshes


def test_in_a_mesh_a_group_has_the_links_of_its_own_pairs() -> None:
    """Two of eight have one link of seven; an exchange among four three; the others of the node are another matter beyond it."""
    plain, mesh = (cluster(levels=[{**NODE, "bandwidth": "448 GB/s", "mesh": text}, NET]) for text in ("false", "true"))
    for size, share in ((8, 1), (4, 3 / 7), (2, 1 / 7)):
        for link in (link_for, exchange_link):
            assert link(mesh, size, 1).bandwidth == pytest.approx(share * link(plain, size, 1).bandwidth)
    assert link_for(mesh, 2, 8) == link_for(plain, 2, 8)
    assert resized(mesh, 8).levels[0].mesh
    assert "levels[0].mesh=perhaps" in refusal(levels=[{**NODE, "mesh": "perhaps"}, NET])


def test_clusters_say_where_gpus_cannot_send_by_themselves() -> None:
    """AWS' EFA, Google's TCPXO and HPE's Slingshot; Google's newer machines and all others have NVIDIA's cards. Who has made DeepEP run
    there says so by a key."""
    names = {name for name in stored("clusters") if not all(level.ibgda for level in load_cluster(name, 4 if name == "cpu" else 8).levels)}
    others = {"gcp_a3_mega", "gh200_slingshot", "mi250x_frontier"}
    assert names == others | {name for name in stored("clusters") if name.startswith("aws_")}
    plain, efa = (cluster(levels=[NODE, {**NET, "ibgda": text}]) for text in ("true", "false"))
    assert (plain.levels[-1].ibgda, efa.levels[-1].ibgda, efa.levels[0].ibgda) == (True, False, True)
    assert not resized(efa, 8).levels[-1].ibgda
    assert "levels[1].ibgda=perhaps" in refusal(levels=[NODE, {**NET, "ibgda": "perhaps"}])


def test_amds_gpus_of_ones_own_say_their_vendor() -> None:
    here = {"levels": [{**NODE, "bandwidth": "448 GB/s"}, NET], "host_bandwidth": "63 GB/s"}
    own = cluster(gpu={**OWN, "vendor": "amd", "compute_capability": "9.4"}, **here)
    assert (own.gpu.generation, resized(own, 8).gpu.vendor) == ("amd9", "amd")
    assert "gpu.vendor=intel" in refusal(gpu={**OWN, "vendor": "intel"}, **here)


def test_a_yaml_may_build_on_another_cluster_and_has_its_own_price(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep of clusters had one price for all of them."""
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text("cluster: dgx_h100\nprice_per_gpu_hour: 2.5\nmtbf: 2000\nstorage: 40 GB/s\nhost_memory: 128 GB\n")
    Path("b.yaml").write_text("cluster: a.yaml\nprice_per_gpu_hour: 3\n")
    words = ["recipe=gpt_tiny", "gpus=8", "train.precision=bf16"]
    one, other, over = (load([*words, f"cluster={said}"], Machine(), ["megatron"]) for said in ("a.yaml", "b.yaml", "dgx_h100"))
    assert (one.price_per_gpu_hour, one.mtbf_hours, one.storage_bandwidth) == (2.5, 2000, 40e9)
    assert (other.price_per_gpu_hour, other.mtbf_hours, other.cluster.name) == (3, 2000, "b")
    assert (over.price_per_gpu_hour, over.mtbf_hours) == (None, None)
    assert other.cluster == msgspec.structs.replace(load_cluster("dgx_h100", 8), name="b", host_memory=128_000_000_000)
    said = load([*words, "cluster=a.yaml", "cluster.price_per_gpu_hour=9", "target.cost=5"], Machine(), ["megatron"])
    assert said.price_per_gpu_hour == 9, "what is said stands over the YAML"
    for text, message in (
        ("cluster: dgx_h10", "c.yaml: cluster=dgx_h10: is not known; did you mean dgx_h100"),
        ("cluster: c.yaml", "c.yaml: cluster=c.yaml: is built on itself"),
        ("cluster: {gpu: cpu}", 'c.yaml: cluster={"gpu": "cpu"}: must be the name or path of the cluster that this one builds on'),
        ("cluster: dgx_h100\nprice_per_gpu_hour: -1", "c.yaml: cluster.price_per_gpu_hour=-1: must be above 0"),
        ("cluster: dgx_h100\nprice_gpu_hour: 5", "c.yaml: price_gpu_hour: is no key here; did you mean price_per_gpu_hour; choose one of"),
        ("cluster: dgx_h100\nmtbf: 5", "cluster.mtbf=5: needs cluster.storage= beside it"),
    ):
        Path("c.yaml").write_text(text)
        with pytest.raises(InputError) as caught:
            load([*words, "cluster=c.yaml"], Machine(), ["megatron"])
        assert str(caught.value).startswith(message)
