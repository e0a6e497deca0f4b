"""What is measured of a cluster becomes a calibration that gives it back."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from orchestrator import detect, recipe
from orchestrator.calibrate.pricing import Pricer
from orchestrator.calibrate.runs import METRICS, PLAN, Run, load
from orchestrator.cost.calibration import datasheet, read_file
from orchestrator.cost.compute import FLASH_BACKWARD_FLOPS
from orchestrator.engines import ENGINES
from orchestrator.errors import InputError, LaunchError
from orchestrator.hardware.collectives import COLLECTIVES, Link
from orchestrator.plan import to_json
from orchestrator.planning import Planner
from orchestrator.profile.__main__ import AGAIN, LAYERS, cases_of, check_layouts, conclude, groups_of, main, second_layout, without_network
from orchestrator.profile.measured import core_share, figure, level_of, together, wire
from orchestrator.recipe.clusters import load_cluster

KEYS = ["recipe=gpt_tiny", "gpus=4", "cluster=cpu", "engine=megatron"]


PRODUCT_S = 0.004
"""What the yardstick, and the product before each collective, takes."""
ROUNDS = 3
Slowness = Callable[[int], float]
"""Times what it takes else, of the n-th thing that is measured."""


def visits(bandwidth: float, hop_s: float, collective_s: float, slowness: Slowness = lambda number: 1.0) -> list[dict[str, Any]]:
    """Collectives between products, round by round, that take exactly what the cost model says of such a link."""
    link = Link(bandwidth=bandwidth, latency=hop_s)
    kinds = [(name, size, nbytes) for name in ("all_reduce", "all_gather", "reduce_scatter", "p2p") for size in (2, 4)
             for nbytes in (4096, 2**20, 2**24)]  # fmt: skip
    found = []
    for number, (name, size, nbytes) in enumerate(kinds * ROUNDS):
        slow = slowness(number)
        seconds = slow * (COLLECTIVES[name](nbytes, size, link) + collective_s + PRODUCT_S)
        found.append({"operation": name, "size": size, "stride": 1, "bytes": nbytes,
                      "seconds": [seconds] * 2, "products_s": [slow * PRODUCT_S] * 2})  # fmt: skip
    return found


def rows_of(*truth: float) -> list[dict[str, Any]]:
    return [row for row in together([{"collectives": visits(*truth)}] * 2, PRODUCT_S, by_cores=True) if row["operation"] != "p2p"]


@pytest.mark.parametrize("truth", [(1e9, 2e-4, 5e-4), (4.5e11, 2e-6, 1e-5), (5e10, 0.0, 3e-5)])
def test_a_links_figures_are_found_in_its_collectives(truth: tuple[float, float, float]) -> None:
    found = wire(rows_of(*truth))
    assert found[:3] == pytest.approx(truth, rel=1e-6, abs=1e-9)
    assert found.error < 1e-9


def test_no_figure_of_a_link_is_negative_however_odd_the_measurements() -> None:
    found = wire([{"operation": "all_reduce", "size": 2, "bytes": n, "seconds": [1e-3 / n]} for n in (8, 64, 1024)])
    assert min(found[:3]) >= 0
    assert found.error > 0.1, "and it says that they don't fit"
    with pytest.raises(ValueError, match="no collective"):
        wire([])


def test_a_collective_lasts_as_long_as_on_its_slowest_rank_less_the_products_between() -> None:
    ranks = [
        {"collectives": [{"operation": "p2p", "seconds": [1.0, 5.0], "products_s": [0.25, 0.25]}]},
        {"collectives": [{"operation": "p2p", "seconds": [2.0, 4.0], "products_s": [0.5, 0.5]}]},
    ]
    assert together(ranks, 0.5, by_cores=True) == [{"operation": "p2p", "seconds": [1.5, 4.5]}]
    assert together(ranks, 0.25, by_cores=True) == [{"operation": "p2p", "seconds": [0.75, 2.25]}], "the machine was half as fast as it is"
    assert together(ranks, 0.25, by_cores=False) == [{"operation": "p2p", "seconds": [1.5, 4.5]}], "a network is not"


def test_a_collective_lost_in_the_noise_of_products_settles_nothing() -> None:
    lost_row = {**visits(1e9, 2e-4, 5e-4)[0], "seconds": [0.9, 0.99, 1.1], "products_s": [1.0] * 3}
    (lost,) = together([{"collectives": [lost_row]}], 1.0, by_cores=True)
    assert lost["seconds"] == pytest.approx([0.0, 0.0, 0.1])
    assert wire([*rows_of(1e9, 2e-4, 5e-4), lost])[:3] == pytest.approx((1e9, 2e-4, 5e-4), rel=0.03)


def test_groups_cover_every_size_and_both_distances_and_lie_on_their_level() -> None:
    cluster = load_cluster("dgx_h100", 32)
    shapes = {(group["size"], group["stride"]) for group in groups_of(cluster, experts=True)}
    assert shapes == {(2, 1), (4, 1), (8, 1), (16, 1), (32, 1), (2, 16), (4, 8), (8, 4), (16, 2)}
    assert all("all_to_all" in group["operations"] for group in groups_of(cluster, experts=True))
    assert [level_of(cluster, *shape) for shape in ((8, 1), (2, 4), (16, 1), (4, 8), (32, 1))] == [0, 0, 1, 1, 1]


def over(words: Sequence[str], more: Sequence[str]) -> list[str]:
    """The words, of a key that both have those of `more`."""
    names = {word.partition("=")[0] for word in more}
    return [*(word for word in words if word.partition("=")[0] not in names), *more]


def asked(more: list[str]) -> recipe.Settings:
    return recipe.load(over(KEYS, more), detect.Machine(), [*ENGINES])


TRUTH = {"gemm_efficiency": 0.5, "memory_efficiency": 0.3, "op_overhead_s": 9e-5}
FASTER = {"gemm_efficiency": 2.5, "memory_efficiency": 1.6, "op_overhead_s": 3e-5}
"""Of cores that are faster than the catalogue's."""


@pytest.fixture(scope="module")
def concluded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return profiled(tmp_path_factory.mktemp("profile"))


def profiled(out: Path, num_ranks: int = 4, slowness: Sequence[Slowness] = (lambda number: 1.0,), again: float = 1.0,
             uneven: float = 1.0, truth: Mapping[str, float] = TRUTH, more: Sequence[str] = ()) -> Path:  # fmt: skip
    """A profile of ranks that take exactly what the cost model says with other constants than it starts from, `truth`; `slowness`: of a
    host, which each has as many of the ranks; `again`: times what layers take under another layout; `uneven`: what they take in the second
    round while the yardstick does not; `more`: keys of what is profiled."""
    wanted = [*more, *([] if num_ranks == 4 else [f"gpus={num_ranks}"])]
    settings = asked(wanted)
    plans = cases_of(settings, lambda words: asked(over(wanted, words)))
    truth = {**truth, "collective_overhead_s": 0.0, "step_overhead_s": 0.0}  # passes and the update are all that is measured

    def constants(run: Run) -> Any:
        base = datasheet(run.cluster, run.traits)
        return type(base)(**{name: truth.get(name, getattr(base, name)) for name in base.__struct_fields__})

    takes = {}
    for case, plan in plans.items():
        folder = out / "cases" / case
        folder.mkdir(parents=True)
        (folder / PLAN).write_text(to_json(without_network(plan)))
        (folder / METRICS).write_text('{"step_time_s": 1}\n' * 3)
        (run,) = load(folder)
        price = Pricer(constants).price(run).prediction
        assert price is not None
        takes[case] = ((price.step_time_s - price.by_cause["optimizer"]) / plan.num_microbatches, price.by_cause["optimizer"], 1e-3)
    takes[AGAIN] = (takes[min(takes)][0], takes[min(takes)][1], 1e-3 * again)
    last, ranks = max(takes), []
    for number in range(num_ranks):
        slow = slowness[number * len(slowness) // num_ranks]
        traffic = visits(2e9, 1e-4, 6e-4, lambda at: max(each(at) for each in slowness)) if num_ranks > 1 else []
        cases: dict[str, list[dict[str, Any]]] = {case: [] for case in takes}
        alone, at = [], len(traffic)
        for round_ in range(ROUNDS):
            for case, (micro, update, layer) in takes.items():
                cases[case].append(rounds_of(micro * (uneven if round_ == 1 else 1.0), update, layer, slow(at)))
                at += 1
            alone.append(rounds_of(0.6 * takes[last][0], 0.0, 1e-3, slow(at)))
        for visit, row in enumerate(traffic):  # a rank whose own host is not slow waits for the others, and its own products are quick
            row["products_s"] = [PRODUCT_S * slow(visit)] * 2
        ranks.append({"collectives": traffic, "cases": cases, "alone": alone, "alone_case": last, "seconds": 12.0})
    conclude(settings, str(settings.engine), plans, ranks, out, "2026-11-22")
    return out


def rounds_of(microbatch_s: float, update_s: float, layer_s: float, slow: float) -> dict[str, Any]:
    return {"microbatch_s": [slow * microbatch_s] * 3, "update_s": [slow * update_s] * 3, "layer_forward_s": slow * layer_s,
            "yardstick_s": [slow * PRODUCT_S] * 3}  # fmt: skip


def test_a_host_that_is_half_as_fast_in_the_middle_of_a_profile_changes_no_constant_and_no_plan(concluded: Path, tmp_path: Path) -> None:
    """A quarter of all that is measured, from the end of the collectives on to the second round of layers, on one of two hosts."""
    hosts = (lambda number: 2.0 if 60 <= number < 84 else 1.0), (lambda number: 1.0)
    there = profiled(tmp_path / "slowed", slowness=hosts)
    for name, constant in read_file(concluded / "megatron-cpu.json").constants.items():
        assert read_file(there / "megatron-cpu.json").constants[name].value == pytest.approx(constant.value, rel=1e-3), name
    (usual,), (slowed,) = (load_cluster(str(out / "cluster.yaml"), 4).levels for out in (concluded, there))
    assert (slowed.bandwidth, slowed.latency) == pytest.approx((usual.bandwidth, usual.latency), rel=1e-3)
    chosen = [Planner(asked([f"cluster={out / 'cluster.yaml'}", f"calibration={out / 'megatron-cpu.json'}"])).fastest().plan.candidate
              for out in (concluded, there)]  # fmt: skip
    assert chosen[0] == chosen[1]
    told = json.loads((there / "profile.json").read_text())
    assert (told["speed"]["low"], told["speed"]["high"]) == (0.5, 1.0)
    interval = read_file(there / "megatron-cpu.json").interval
    assert interval is not None
    assert interval[1] > 1.5, "that the machine may be so slow is in the interval"


def test_what_rounds_do_not_agree_on_is_said_of_each_constant(tmp_path: Path) -> None:
    constants = read_file(profiled(tmp_path, uneven=1.3) / "megatron-cpu.json").constants
    assert constants["gemm_efficiency"].spread > 0.05
    assert constants["collective_overhead_s"].spread == pytest.approx(0.0, abs=1e-6)


def test_nothing_is_concluded_where_the_same_work_takes_longer_under_another_layout(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"the same layer took 1 ms in tp1_mbs001 and 1.3 ms in again, which must be within 15%"):
        profiled(tmp_path, again=1.3)
    assert (tmp_path / "profile.json").is_file()
    assert not (tmp_path / "megatron-cpu.json").exists()
    check_layouts({"tp1_mbs001": [1.0, 1.0, 1.0], AGAIN: [1.3, 1.1, 1.4]}, tmp_path)  # one round says that it is noise


@pytest.mark.parametrize(("engine", "divided"), [("megatron", (2, 0, 4)), ("deepspeed", (1, 1, 2))])
def test_the_second_layout_has_the_same_layers_on_a_rank(engine: str, divided: tuple[int, int, int]) -> None:
    words = [f"engine={engine}", *(["recipe=llama_tiny"] if engine == "deepspeed" else [])]
    first = next(iter(cases_of(asked(words), lambda more: asked([*words, *more])).values()))
    again = second_layout(asked(words), lambda more: asked([*words, *more]), first)
    assert again is not None
    assert (again.pp, again.zero_stage, again.model.num_layers) == divided
    assert (again.tp, again.micro_batch_size, again.num_microbatches) == (first.tp, first.micro_batch_size, first.num_microbatches)


def test_a_profile_gives_back_the_constants_that_made_it(concluded: Path) -> None:
    file = read_file(concluded / "megatron-cpu.json")
    for name, value in TRUTH.items():
        assert file.constants[name].value == pytest.approx(value, rel=0.15), name
    assert file.fitted_median_error < 0.02
    assert file.constants["core_share"].value == pytest.approx(0.6)
    assert file.constants["collective_overhead_s"].value == pytest.approx(6e-4, rel=1e-3)
    assert file.measured is not None
    assert file.measured.num_gpus == 4


def test_cores_faster_than_the_catalogues_are_found_so(tmp_path: Path) -> None:
    file = read_file(profiled(tmp_path, truth=FASTER) / "megatron-cpu.json")
    for name, value in FASTER.items():
        assert file.constants[name].value == pytest.approx(value, rel=0.15), name
    assert file.fitted_median_error < 0.02


def test_attention_of_a_kernel_is_told_from_products(tmp_path: Path) -> None:
    """Under an engine whose ranks on cores compute attention as a whole, from a start that is far off: forward and backward together, which
    is what cases measure. One case has shorter sequences."""
    truth = {"gemm_efficiency": 2.5, "attention_efficiency": 1.5, "attention_backward_efficiency": 1.5}
    more = ["engine=deepspeed", "train.seq_length=2048", "model.max_position_embeddings=2048"]
    constants = read_file(profiled(tmp_path, truth={**TRUTH, **truth}, more=more) / "deepspeed-cpu.json").constants

    def passes(forward: float, backward: float) -> float:
        return 1 / forward + FLASH_BACKWARD_FLOPS / backward

    found = passes(constants["attention_efficiency"].value, constants["attention_backward_efficiency"].value)
    assert found == pytest.approx(passes(1.5, 1.5), rel=0.1)
    lengths = {case: plan.training.seq_length for case, plan in cases_of(asked(more), lambda words: asked(over(more, words))).items()}
    assert {case: length for case, length in lengths.items() if length != 2048} == {"tp1_mbs002_short": 1024}


def test_a_profile_of_one_rank_has_no_network_to_say_anything_of(tmp_path: Path) -> None:
    constants = read_file(profiled(tmp_path, num_ranks=1) / "megatron-cpu.json").constants
    assert constants["gemm_efficiency"].value == pytest.approx(TRUTH["gemm_efficiency"], rel=0.15)
    assert not constants.keys() & {"collective_overhead_s", "latency_factor", "inner_efficiency", "p2p_efficiency"}


def test_a_run_takes_what_the_profile_writes(concluded: Path) -> None:
    settings = asked([f"cluster={concluded / 'cluster.yaml'}", f"calibration={concluded / 'megatron-cpu.json'}"])
    (level,) = settings.cluster.levels
    assert (level.bandwidth, level.latency) == pytest.approx((2e9, 1e-4), rel=1e-4)
    plan = Planner(settings).fastest().plan
    assert plan.calibration == "megatron-cpu"
    assert plan.prices is not None
    assert plan.prices.constants["core_share"] == pytest.approx(0.6)


def test_every_figure_has_its_spread_and_how_often_it_was_measured(concluded: Path) -> None:
    told = json.loads((concluded / "profile.json").read_text())
    for row in (*told["collectives"], *(case[key] for case in told["layers"].values() for key in ("micro_batch_s", "update_s"))):
        assert row["low"] <= row["value"] <= row["high"]
        assert row["repetitions"] >= 3
    assert figure([1.0, 2.0, 9.0]).value == 2.0


def test_cases_are_cut_to_few_layers_and_have_every_tp() -> None:
    plans = cases_of(asked([]), asked)
    assert {plan.tp for plan in plans.values()} == {1, 2, 4}
    assert {plan.model.num_layers for plan in plans.values()} == {LAYERS}
    assert {(plan.pp, plan.zero_stage) for plan in plans.values()} == {(1, 0)}


def test_ranks_with_devices_of_their_own_lose_nothing_together() -> None:
    ranks = [{"cases": {"a": [rounds_of(1.0, 0.1, 0.1, 1.0)]}, "alone": [rounds_of(1.1, 0.1, 0.1, 1.0)], "alone_case": "a"}] * 2
    assert core_share(ranks, PRODUCT_S) == 1.0


def test_nothing_is_measured_without_a_start(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*KEYS, "launch=none"]) == InputError("launch", "none", "measures nothing").status
    assert "launch=none: measures nothing" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.parametrize(("engine", "model"), [("megatron", "gpt_tiny"), ("megatron_deepspeed", "gpt_tiny"), ("deepspeed", "llama_tiny")])
def test_a_machine_is_measured_by_gloo_ranks(engine: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "profile"
    assert main([f"recipe={model}", "gpus=2", "cluster=cpu", f"engine={engine}", "launch=local", f"out={out}"]) == 0
    cluster, begun, *_ = capsys.readouterr().out.splitlines()
    assert cluster.startswith("cluster cpu, 2 gloo ranks")
    assert begun.startswith("measuring collectives and ")
    told = json.loads((out / "profile.json").read_text())
    assert told["seconds"] < 180
    assert {row["operation"] for row in told["collectives"]} == {"all_reduce", "all_gather", "reduce_scatter", "p2p"}
    file = read_file(out / f"{engine}-cpu.json")
    assert file.constants["gemm_efficiency"].value > 0
    assert file.fitted_median_error < 0.15
    assert any(constant.spread for constant in file.constants.values())
    assert len(told["layer_under_two_layouts_s"]) == 2
    assert {case.partition("_")[0] for case in told["layers"]} == {"tp1", "tp2"}
    assert load_cluster(str(out / "cluster.yaml"), 2).levels[0].bandwidth > 1e6
