"""Measures a cluster by parts of the model that is to be trained there, in minutes, without a training run.

    python -m orchestrator.profile recipe=gpt_tiny gpus=4 [launch=local|slurm] out=FOLDER

Takes the keys of `python -m orchestrator.run`. On all GPUs of the job: collectives at every group size and network level that a plan could
use, over the planned backend; a stage of two of the model's layers under the engine's own classes, forward, backward and update, at every
tp and several micro-batches, all ranks at once, with a fake process group in place of traffic. Writes into FOLDER: cluster.yaml, the
cluster with the network's measured figures; ENGINE-GPU.json, a calibration of what layers, launches, collectives and the update take;
profile.json, every figure with its spread and how often it was measured. Plan with

    python -m orchestrator.run recipe=... cluster=FOLDER/cluster.yaml calibration=FOLDER/ENGINE-GPU.json
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from orchestrator import detect, recipe
from orchestrator.calibrate.__main__ import interval_of, measured_of, ratios
from orchestrator.calibrate.fit import BOUNDS, fit
from orchestrator.commands import command, usage
from orchestrator.cost.calibration import CalibrationFile, Constant, digest
from orchestrator.engines import ENGINES
from orchestrator.errors import InputError, LaunchError, NoPlanError
from orchestrator.folder import held, write_folder
from orchestrator.hardware.spec import Cluster
from orchestrator.job import File
from orchestrator.launch import local, render, slurm
from orchestrator.plan import Plan, to_json
from orchestrator.planning import Planner
from orchestrator.profile.measured import Figure, Wire, core_share, figure, layers, level_of, together, wire
from orchestrator.recipe import Settings
from orchestrator.strategy.pins import Pins
from orchestrator.units import KIB, MIB, format_seconds
from orchestrator.validate import own

LAYERS: Final = 2
"""Layers of the models that are measured: a stage's time is linear in their number."""
MICRO_BATCHES: Final = (1, 4, 16)
SIZES: Final = (4 * KIB, 256 * KIB, 4 * MIB)
"""Bytes of a collective: latency alone, the activations of a small model, a bucket of gradients."""
PRIOR: Final = 0.05
"""Weight of the prior in the fit, as little as calibrate's benchmark gives it: a profile's cases are many repetitions each."""
NOWHERE: Final = 1e-15
"""Seconds of a hop, and of a byte, of the network that cases are priced with: there was none."""
CPU_NAMES: Final = ("gemm_efficiency", "memory_efficiency", "op_overhead_s", "microbatch_overhead_s")
GPU_NAMES: Final = ("gemm_efficiency", "gemm_half_tokens", "attention_efficiency", "pointwise_factor", "op_overhead_s")
"""Constants that the cases settle on a GPU; the collectives and the update have closed forms."""

LOADED: Final = {**BOUNDS, "gemm_efficiency": (0.01, 1.0), "memory_efficiency": (0.005, 1.0), "op_overhead_s": (1e-6, 5e-3)}
"""Bounds of the constants on a machine whose cores others use too."""


def cases_of(settings: Settings, load: Any) -> dict[str, Plan]:
    """Plans of the cut model on all GPUs, by name: every tp that the engine takes, each micro-batch that fits."""
    found: dict[str, Plan] = {}
    gpus = settings.cluster.num_gpus
    for tp in (n for n in range(1, min(gpus, settings.cluster.levels[0].size) + 1) if gpus % n == 0):
        for size in MICRO_BATCHES:
            batch = size * gpus // tp * 2
            pins = Pins(tp=tp, pp=1, cp=1, vpp=1, micro_batch_size=size, recompute="none", zero_stage=0)
            try:
                asked = load([f"model.num_layers={LAYERS}", f"train.global_batch_size={batch}"])
                found[f"tp{tp}_mbs{size:03d}"] = Planner(replace(asked, pins=pins)).fastest().plan
            except (NoPlanError, InputError):
                continue  # tp does not divide the heads, say, or so much does not fit
    if not found:
        raise NoPlanError("no part of the model can be measured here: no tp and micro-batch size is legal and fits")
    return found


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
    flags = ", ".join(f"{name}: {str(getattr(software, name)).lower()}" for name in ("transformer_engine", "flash_attention", "apex"))
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
    job = ENGINES[name].translate(first)
    files = [File(path="plan.json", content=to_json(first)), *job.files]
    for case, plan in plans.items():
        translated = ENGINES[name].translate(plan)
        engine = next(file for file in translated.files if file.path == "engine.json")
        files += [
            File(path=f"cases/{case}/plan.json", content=to_json(plan)),
            File(path=f"cases/{case}/module", content=translated.module),
            replace(engine, path=f"cases/{case}/engine.json"),
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
    conclude(settings, name, plans, ranks, out, when)
    print(f"Measured in {format_seconds(time.monotonic() - begin)}: {out}")
    print(f"Plan with cluster={out / 'cluster.yaml'} calibration={out / f'{name}-{settings.cluster.gpu.name}.json'}")


def conclude(
    settings: Settings, engine: str, plans: Mapping[str, Plan], ranks: Sequence[Mapping[str, Any]], out: Path, when: str
) -> CalibrationFile:
    """Writes cluster.yaml, the calibration and profile.json; the calibration."""
    cluster = settings.cluster
    rows = together(ranks)
    by_level: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        by_level.setdefault(level_of(cluster, row["size"], row["stride"]), []).append(row)
    wires = {index: wire([row for row in mine if row["operation"] != "p2p"]) for index, mine in by_level.items()}
    measured = measured_cluster(cluster, wires)
    fixed: dict[str, float] = {"collective_overhead_s": 0.0, "collective_launch_s": 0.0, "core_share": 1.0}
    for case, plan in plans.items():
        micro = layers(ranks)[case]
        updates = [seconds for rank in ranks for seconds in rank["cases"][case]["update_s"]]
        step = median(micro) * plan.num_microbatches + median(updates)
        folder = out / "cases" / case
        (folder / own.METRICS).write_text("".join(json.dumps({"step": i, "step_time_s": step}) + "\n" for i in range(own.WARM_UP + 1)))
        (folder / own.PLAN).write_text(to_json(without_network(plan)))
    runs = own.load(out / "cases")
    found = fit(runs, CPU_NAMES if cluster.is_cpu else GPU_NAMES, fixed, prior=PRIOR, bounds=LOADED if cluster.is_cpu else BOUNDS)
    off = ratios(runs, found.constants)
    constants = {name: value for name, value in found.constants.items() if name not in fixed}
    constants["core_share"] = core_share(ranks) if cluster.is_cpu else 1.0
    if wires:
        messages = [row for row in rows if row["operation"] == "p2p"]
        inner = wires[0]
        constants |= {
            "collective_overhead_s": inner.collective_s,
            "latency_factor": 1.0,
            "inner_efficiency": 1.0,
            "outer_efficiency": 1.0,
            "p2p_efficiency": message_share(messages, inner),
        }
    units = {"_s": "s", "_efficiency": "share", "core_share": "share"}
    file = CalibrationFile(
        engine=engine,
        gpu=cluster.gpu.name,
        traits=digest(ENGINES[engine].traits(cluster.software)),
        fitted_on=f"a profile of {cluster.num_gpus} ranks, {len(runs)} cases of {LAYERS} layers, {when}",
        constants={
            key: Constant(value=float(f"{value:.6g}"), unit=next((u for end, u in units.items() if key.endswith(end)), "ratio"),
                          origin="measured by orchestrator.profile")
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
    (out / f"{engine}-{cluster.gpu.name}.json").write_text(msgspec.json.format(msgspec.json.encode(file), indent=1).decode() + "\n")
    (out / "profile.json").write_text(json.dumps(everything(plans, ranks, rows, wires, found.median_error, when), indent=1) + "\n")
    return file


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

    def as_dict(one: Figure) -> dict[str, float]:
        return one._asdict()

    return {
        "when": when,
        "ranks": len(ranks),
        "load": os.getloadavg()[0],
        "seconds": max(rank["seconds"] for rank in ranks),
        "levels": {str(index): found._asdict() for index, found in wires.items()},
        "collectives": [{**{key: row[key] for key in ("operation", "size", "stride", "bytes")}, **as_dict(figure(row["seconds"]))}
                        for row in rows],
        "layers": {
            case: {
                "micro_batch_s": as_dict(figure(layers(ranks)[case])),
                "layer_forward_s": median([rank["cases"][case]["layer_forward_s"] for rank in ranks]),
                "update_s": as_dict(figure([s for rank in ranks for s in rank["cases"][case]["update_s"]])),
            }
            for case in plans
        },
        "layers_median_error": error,
        "alone_micro_batch_s": as_dict(figure(ranks[0]["alone"]["microbatch_s"])),
    }  # fmt: skip


def main(words: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    return command(words, lambda: usage(__doc__), run)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
