"""Measures a cluster by parts of the model that is to be trained there, in minutes, without a training run.

    python -m orchestrator.profile recipe=gpt_tiny gpus=4 [launch=local|slurm] out=FOLDER

Takes the keys of `python -m orchestrator.run`. On all GPUs of the job: collectives at every group size and network level that a plan could
use, over the planned backend; a stage of two of the model's layers under the engine's own classes, forward, backward and update, at every
tp and several micro-batches, all ranks at once, with a fake process group in place of traffic. In rounds, each with all of it once, beside
work that is always the same, so that a machine whose speed drifts is told from a slow case. A layer that takes the same work under two
layouts must take as long in both, or nothing is concluded. Writes into FOLDER: cluster.yaml, the
cluster with the network's measured figures; ENGINE-GPU.json, a calibration of what layers, launches, collectives and the update take, each
with how far its rounds were apart; profile.json, every figure with its spread and how often it was measured. Plan with

    python -m orchestrator.run recipe=... engine=ENGINE cluster=FOLDER/cluster.yaml calibration=FOLDER/ENGINE-GPU.json
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace as replaced
from pathlib import Path
from statistics import median
from typing import Any, Final

from msgspec.structs import replace

from orchestrator import detect, recipe
from orchestrator.calibrate.files import interval_of, measured_of, ratios
from orchestrator.calibrate.fit import BOUNDS, CPU_BOUNDS, Fitted, fit
from orchestrator.calibrate.runs import METRICS, PLAN, WARM_UP, Run
from orchestrator.calibrate.runs import load as load_runs
from orchestrator.commands import command_of
from orchestrator.cost.calibration import CalibrationFile, Constant, digest, unit
from orchestrator.engines import ENGINES
from orchestrator.errors import InputError, LaunchError, NoPlanError
from orchestrator.folder import held, write_folder
from orchestrator.hardware.spec import Cluster
from orchestrator.job import File
from orchestrator.launch import local, render, slurm
from orchestrator.plan import Plan, to_json
from orchestrator.planning import Planner
from orchestrator.profile.measured import (
    Wire,
    core_share,
    figure,
    layer_s,
    level_of,
    of_case,
    of_rounds,
    reference,
    spread,
    steady,
    together,
    wire,
)
from orchestrator.recipe import Settings
from orchestrator.recipe.cluster_fields import SOFTWARE
from orchestrator.strategy.pins import Pins
from orchestrator.units import KIB, MIB, format_seconds
from orchestrator.values import indented

LAYERS: Final = 2
"""Layers of the models that are measured: a stage's time is linear in their number."""
MICRO_BATCHES: Final = (1, 4, 16)
SIZES: Final = (4 * KIB, 256 * KIB, 4 * MIB)
"""Bytes of a collective: latency alone, the activations of a small model, a bucket of gradients."""
PRIOR: Final = 0.05
"""Weight of the prior in the fit, as little as calibrate's benchmark gives it: a profile's cases are many repetitions each."""
NOWHERE: Final = 1e-15
"""Seconds of a hop, and of a byte, of the network that cases are priced with: there was none."""
CPU_NAMES: Final[tuple[str, ...]] = ("gemm_efficiency", "memory_efficiency", "op_overhead_s")
GPU_NAMES: Final[tuple[str, ...]] = ("gemm_efficiency", "gemm_half_tokens", "pointwise_factor", "op_overhead_s")
"""Constants that the cases settle on a CPU and on a GPU; the collectives and the update have closed forms. What a micro-batch takes beside
its layers (microbatch_overhead_s) no case tells from their launches: all have as many layers."""
ATTENTION: Final = ("attention_efficiency", "attention_backward_efficiency")
"""Constants that cases settle too where a kernel computes attention as a whole."""
SHORTER: Final = 2
"""How many times shorter the sequences of one case are, and how many times more they are than those of the case of as many tokens before
it: all but attention takes as long in both."""

AGAIN: Final = "again"
"""The case of a layer's work under a second layout."""
ALIKE: Final = 0.15
"""How far a layer's seconds under two layouts may be apart, as a share: as far as a prediction after a profile may be off."""


def case_of(load: Any, words: Sequence[str], pins: Pins) -> Plan | None:
    """The plan with these keys and pins; None: none is legal and fits."""
    try:
        asked = load(words)
        return Planner(replace(asked, pins=pins)).fastest().plan
    except (NoPlanError, InputError):
        return None


def sized(size: int, dp: int) -> list[str]:
    """The keys of a case of micro-batches of `size`, of which each of `dp` replicas has two in a step."""
    return [f"model.num_layers={LAYERS}", f"train.global_batch_size={2 * size * dp}"]


def cases_of(settings: Settings, load: Any) -> dict[str, Plan]:
    """Plans of the cut model on all GPUs, by name: every tp that the engine takes, each micro-batch that fits, and the first of them with
    as many tokens in shorter sequences. Raises NoPlanError."""
    found: dict[str, Plan | None] = {}
    gpus = settings.cluster.num_gpus
    for tp in (n for n in range(1, min(gpus, settings.cluster.levels[0].size) + 1) if gpus % n == 0):
        for size in MICRO_BATCHES:
            words, pins = sized(size, gpus // tp), Pins(tp=tp, pp=1, cp=1, vpp=1, micro_batch_size=size, recompute="none", zero_stage=0)
            plan, is_first = case_of(load, words, pins), not any(found.values())
            found[f"tp{tp}_mbs{size:03d}"] = plan  # None: tp does not divide the heads, say, or so much does not fit
            if plan is not None and is_first:
                more = size * SHORTER
                words = [*sized(more, gpus // tp), f"train.seq_length={settings.training.seq_length // SHORTER}"]
                found[f"tp{tp}_mbs{more:03d}_short"] = case_of(load, words, replace(pins, micro_batch_size=more))
    cases = {name: plan for name, plan in found.items() if plan is not None}
    if not cases:
        raise NoPlanError("no part of the model can be measured here: no tp and micro-batch size is legal and fits")
    return cases


def second_layout(settings: Settings, load: Any, first: Plan) -> Plan | None:
    """A plan whose ranks do the same layers' work as `first`'s, laid out otherwise: a pipeline of two such stages, or where the engine has
    none, or there is one GPU, the optimizer's states divided. None: neither is legal."""
    dp = settings.cluster.num_gpus // first.tp
    for pp, zero_stage in ((2, 0), (1, 1)):
        pins = Pins(tp=first.tp, pp=pp, cp=1, vpp=1, micro_batch_size=first.micro_batch_size, recompute="none", zero_stage=zero_stage)
        batch = first.micro_batch_size * max(1, dp // pp) * 2
        found = case_of(load, [f"model.num_layers={LAYERS * pp}", f"train.global_batch_size={batch}"], pins)
        if found is not None:
            return found
    return None


def groups_of(cluster: Cluster, *, experts: bool) -> list[dict[str, Any]]:
    """Every group size that divides the GPUs: neighbours, and as far apart as ranks of such a group can be."""
    gpus = cluster.num_gpus
    shapes = {(n, stride) for n in range(2, gpus + 1) if gpus % n == 0 for stride in (1, gpus // n)}
    names = ["all_reduce", "all_gather", "reduce_scatter", "p2p", *(["all_to_all"] if experts else [])]
    return [{"size": size, "stride": stride, "operations": names, "bytes": list(SIZES)} for size, stride in sorted(shapes)]


def without_network(plan: Plan) -> Plan:
    """The plan on a network that takes no time, as its case was measured."""
    levels = tuple(replace(level, bandwidth=1 / NOWHERE, latency=NOWHERE) for level in plan.cluster.levels)
    return replace(plan, cluster=replace(plan.cluster, levels=levels))


def measured_cluster(cluster: Cluster, wires: Mapping[int, Wire]) -> Cluster:
    """The cluster with the measured figures of its levels."""
    levels = list(cluster.levels)
    for index, found in wires.items():
        levels[index] = replace(levels[index], bandwidth=min(found.bandwidth, 1e15), latency=max(found.hop_s, 1e-9))
    return replace(cluster, levels=tuple(levels))


def cluster_yaml(cluster: Cluster, settings: Settings, wires: Mapping[int, Wire], rows: int, when: str) -> str:
    """The cluster with measured levels, for cluster=FILE."""
    gpu = cluster.gpu.name
    lines = [
        f"# Measured by python -m orchestrator.profile on {when}, {settings.cluster.num_gpus} ranks, {rows} kinds of collectives; each",
        "# repetition and its spread: profile.json beside this file.",
        f"gpu: {gpu}",
        f"gpus_per_node: {cluster.gpus_per_node}",
        "levels:",
    ]
    for index, level in enumerate(cluster.levels):
        said = f"measured, median error {100 * wires[index].error:.0f}%" if index in wires else level.source or "not measured"
        size = str(level.size) if level.size < cluster.num_gpus or index == 0 else "unlimited"
        lines.append(f"- {{name: {level.name}, size: {size}, bandwidth: {level.bandwidth / 1e9:.6g} GB/s, "
                     f"latency: {level.latency * 1e6:.6g} us, source: '{said}'}}")  # fmt: skip
    software = settings.cluster.software
    flags = ", ".join(f"{name}: {str(getattr(software, name)).lower()}" for name in SOFTWARE[2:])
    lines += [
        f"host_bandwidth: {cluster.host_bandwidth / 1e9:.6g} GB/s",
        f"host_memory: {cluster.host_memory / 1e9:.6g} GB",
        f"software: {{{flags}}}",
    ]
    return "\n".join(lines) + "\n"


def start(settings: Settings, job: Any, out: Path) -> None:
    """Runs the ranks to their end. Raises LaunchError."""
    if settings.launch == "slurm" and not slurm.in_allocation():
        submitted = slurm.submit(out, settings.slurm)
        print(submitted, flush=True)
        outcome = slurm.follow(submitted, out)
    elif slurm.in_allocation():
        outcome = slurm.start_in_allocation(job, out)
    else:
        outcome = local.start(job, out)
    if outcome.status != "finished":
        raise LaunchError(f"profile: {outcome.status}: {outcome.last_line}; log: {outcome.log}")


def run(words: Sequence[str]) -> None:
    """Runs the command with these words. Raises InputError, NoPlanError, LaunchError."""
    machine = detect.machine()

    def load(more: Sequence[str]) -> Settings:
        kept = [word for word in words if word.partition("=")[0] not in {one.partition("=")[0] for one in more}]
        return recipe.load([*kept, *more], machine, [*ENGINES])

    settings = load([])
    if settings.launch == "none":
        raise InputError("launch", "none", "measures nothing", ["local", "slurm"])
    with held(settings) as out:
        measure(settings, load, out)


def measure(settings: Settings, load: Callable[[Sequence[str]], Settings], out: Path) -> None:
    """Starts the ranks that measure, in a folder of their own, and writes what follows. Raises InputError, NoPlanError, LaunchError."""
    name = settings.engine if settings.engine != "auto" else Planner(settings).engines[0].name
    plans = cases_of(settings, lambda more: load([*more, f"engine={name}"]))
    first = next(iter(plans.values()))
    again = second_layout(settings, lambda more: load([*more, f"engine={name}"]), first)
    job = ENGINES[name].translate(first)
    files = [File(path="plan.json", content=to_json(first)), *job.files]
    for case, plan in (plans | ({AGAIN: again} if again else {})).items():
        translated = ENGINES[name].translate(plan)
        files += [
            File(path=f"cases/{case}/plan.json", content=to_json(plan)),
            File(path=f"cases/{case}/module", content=translated.module),
            *(replace(file, path=f"cases/{case}/{file.path}") for file in translated.files),
        ]
    experts = bool(settings.architecture.experts)
    files.append(File(path="groups.json", content=json.dumps(groups_of(settings.cluster, experts=experts), indent=1) + "\n"))
    job = render.with_environment(replace(job, module="orchestrator.workers.profiler"), settings.env)
    options = render.with_whole_nodes(job, settings.slurm, settings.cluster.gpus_per_node)
    files += render.files(job, slurm=replace(options, python=options.python or sys.executable, planner=sys.executable))
    write_folder(out, files)
    print(settings.why_cluster)
    print(f"measuring collectives and {len(plans)} cases of {LAYERS} layers of {settings.recipe} on {name}'s classes: a minute or some; "
          f"what the ranks say: {out / 'logs'}", flush=True)  # fmt: skip
    begin, when = time.monotonic(), time.strftime("%Y-%m-%d")
    start(settings, job, out)
    ranks = [json.loads(path.read_text()) for path in sorted((out / "measured").glob("rank-*.json"), key=lambda path: len(path.name))]
    file = conclude(settings, name, plans, ranks, out, when)
    low, high = (json.loads((out / "profile.json").read_text())["speed"][end] for end in ("low", "high"))
    spreads = ", ".join(f"{name} {one.value:.3g} (±{one.spread:.0%})" if one.spread < 1 else f"{name} lost in the noise"
                        for name, one in file.constants.items() if one.spread)  # fmt: skip
    print(f"Measured in {format_seconds(time.monotonic() - begin)}: {out}")
    print(f"Its constants give {len(plans)} cases' seconds back within {file.fitted_median_error:.0%} in the median"
          f"{'' if file.fitted_median_error < ALIKE else ', so predictions will be off by as much'}")  # fmt: skip
    print(f"The machine's speed was {low:.0%} to {high:.0%} of its median, which is divided out. Between rounds: {spreads}")
    print(f"Plan with engine={name} cluster={out / 'cluster.yaml'} calibration={out / f'{name}-{settings.cluster.gpu.name}.json'}")


def conclude(
    settings: Settings, engine: str, plans: Mapping[str, Plan], ranks: Sequence[Mapping[str, Any]], out: Path, when: str
) -> CalibrationFile:
    """Writes cluster.yaml, the calibration and profile.json; the calibration."""
    cluster = settings.cluster
    usual, count = reference(ranks), len(ranks[0]["alone"])
    rows = together(ranks, usual, by_cores=cluster.is_cpu)
    steps = {case: steps_of(ranks, case, plan, usual) for case, plan in plans.items()}
    for case, plan in plans.items():
        folder = out / "cases" / case
        line = json.dumps({"step_time_s": median(steps[case])}) + "\n"
        (folder / METRICS).write_text(line * (WARM_UP + 1))
        (folder / PLAN).write_text(to_json(without_network(plan)))
    runs = load_runs(out / "cases")
    found, wires = constants_of(cluster, runs, rows)
    by_round = []
    for round_ in range(count):
        each = [replaced(run, time_s=steps[run.run_id][round_]) for run in runs]
        part = [{**row, "seconds": row["seconds"][round_ * len(row["seconds"]) // count :][: len(row["seconds"]) // count]} for row in rows]
        by_round.append(constants_of(cluster, each, part)[0].constants)
    measured = measured_cluster(cluster, wires)
    constants = dict(found.constants)
    constants["core_share"] = core_share(ranks, usual) if cluster.is_cpu else 1.0
    as_it_was = {case: steps_of(ranks, case, plan, None) for case, plan in plans.items()}
    off = [
        ratio
        for round_ in range(count)
        for ratio in ratios([replaced(run, time_s=as_it_was[run.run_id][round_]) for run in runs], found.constants | WITHOUT_NETWORK)
    ]
    told = everything(plans, ranks, rows, wires, found.median_error, when)
    (out / "profile.json").write_text(json.dumps(told, indent=1) + "\n")
    check_layouts(told["layer_under_two_layouts_s"], out)
    file = CalibrationFile(
        engine=engine,
        gpu=cluster.gpu.name,
        traits=digest(ENGINES[engine].traits(cluster.software)),
        fitted_on=f"a profile of {cluster.num_gpus} ranks, {len(runs)} cases of {LAYERS} layers, {when}",
        constants={
            key: Constant(value=float(f"{value:.6g}"), unit=unit(key), origin="measured by orchestrator.profile",
                          spread=spread([each[key] for each in by_round]) if key in by_round[0] else 0.0)
            for key, value in constants.items()
        },
        fitted_runs=len(runs),
        fitted_median_error=found.median_error,
        held_out_runs=0,
        held_out_median_error=None,
        interval=interval_of(off, []),
        measured=replace(measured_of(runs), num_gpus=cluster.num_gpus),
    )  # fmt: skip
    (out / "cluster.yaml").write_text(cluster_yaml(measured, settings, wires, len(rows), when))
    (out / f"{engine}-{cluster.gpu.name}.json").write_text(indented(file))
    return file


WITHOUT_NETWORK: Final = {"collective_overhead_s": 0.0, "collective_launch_s": 0.0, "core_share": 1.0, "step_overhead_s": 0.0}
"""Constants of cases: there was no network, the ranks' shared cores are in what was measured, and a case's step is its passes and the
update alone."""


def steps_of(ranks: Sequence[Mapping[str, Any]], case: str, plan: Plan, usual: float | None) -> list[float]:
    """Seconds of a case's step in each round: at the usual speed of the machine, or (None) at what it was."""
    micro, update = (
        of_rounds(ranks, case, what, usual)
        if usual is not None
        else [[seconds for one in round_ for seconds in one[what]] for round_ in zip(*(rank["cases"][case] for rank in ranks), strict=True)]
        for what in ("microbatch_s", "update_s")
    )
    return [median(passes) * plan.num_microbatches + median(updates) for passes, updates in zip(micro, update, strict=True)]


def constants_of(cluster: Cluster, runs: Sequence[Run], rows: Sequence[Mapping[str, Any]]) -> tuple[Fitted, dict[int, Wire]]:
    """The constants that cases and collectives ask for, and the network's levels."""
    by_level: dict[int, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_level.setdefault(level_of(cluster, row["size"], row["stride"]), []).append(row)
    wires = {index: wire([row for row in mine if row["operation"] != "p2p"]) for index, mine in by_level.items()}
    names, bounds = (CPU_NAMES, CPU_BOUNDS) if cluster.is_cpu else (GPU_NAMES, BOUNDS)
    names += ATTENTION if runs[0].traits.flash_attention else ()
    found = fit(runs, names, WITHOUT_NETWORK, prior=PRIOR, bounds=bounds)
    constants = {name: found.constants[name] for name in names}
    if wires:
        constants |= {
            "collective_overhead_s": wires[0].collective_s,
            "latency_factor": 1.0,
            "inner_efficiency": 1.0,
            "outer_efficiency": 1.0,
            "p2p_efficiency": message_share([row for row in rows if row["operation"] == "p2p"], wires[0]),
        }
    return found._replace(constants=constants), wires


def check_layouts(seconds: Mapping[str, Sequence[float]], out: Path) -> None:
    """Raises LaunchError where a layer's work took longer in every round under one of two layouts than under the other: it is the same."""
    ratios = [one / other for one, other in zip(*seconds.values(), strict=True)] if seconds else []
    if ratios and (min(ratios) > 1 + ALIKE or max(ratios) < 1 / (1 + ALIKE)):
        said = " and ".join(f"{format_seconds(median(each))} in {case}" for case, each in seconds.items())
        raise LaunchError(f"profile: the same layer took {said}, which must be within {ALIKE:.0%}: something else used the machine, and no "
                          f"calibration was written; {out / 'profile.json'} has all figures. Run it again")  # fmt: skip


def message_share(rows: Sequence[Mapping[str, Any]], inner: Wire) -> float:
    """The share of the level's bandwidth that one message reaches; at most all of it."""
    largest = max(row["bytes"] for row in rows)
    times = [median(row["seconds"]) for row in rows if row["bytes"] == largest]
    moving = max(median(times) - inner.hop_s - inner.collective_s, median(times) / 10)
    return float(min(1.0, largest / moving / inner.bandwidth))


def everything(
    plans: Mapping[str, Plan],
    ranks: Sequence[Mapping[str, Any]],
    rows: Sequence[Mapping[str, Any]],
    wires: Mapping[int, Wire],
    error: float,
    when: str,
) -> dict[str, Any]:
    """The content of profile.json as a dictionary."""
    usual = reference(ranks)
    speeds = [usual / seconds for rank in ranks for rounds in rank["cases"].values() for one in rounds for seconds in one["yardstick_s"]]
    both = [case for case in (next(iter(plans)), AGAIN) if case in ranks[0]["cases"]]

    return {
        "when": when,
        "ranks": len(ranks),
        "load": os.getloadavg()[0],
        "seconds": max(rank["seconds"] for rank in ranks),
        "levels": {str(index): found._asdict() for index, found in wires.items()},
        "collectives": [{**{key: row[key] for key in ("operation", "size", "stride", "bytes")}, **figure(row["seconds"])._asdict()}
                        for row in rows],
        "layers": {
            case: {
                "micro_batch_s": figure(of_case(ranks, case, "microbatch_s", usual))._asdict(),
                "layer_forward_s": median(found) if (found := layer_s(ranks, case, usual)) else None,
                "update_s": figure(of_case(ranks, case, "update_s", usual))._asdict(),
            }
            for case in plans
        },
        "layers_median_error": error,
        "layer_under_two_layouts_s": {case: layer_s(ranks, case, usual) for case in both} if len(both) > 1 else {},
        "speed": figure(speeds)._asdict(),
        "alone_micro_batch_s": figure([s for one in ranks[0]["alone"] for s in steady(one, "microbatch_s", usual)])._asdict(),
    }  # fmt: skip


main = command_of(__doc__, run)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
