"""How far each planned engine's predictions are to be trusted on each GPU that was measured, and where their constants are from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from orchestrator.cost.calibration import ANY_ENGINE, CalibrationFile, datasheet, digest, fitted_gpus, packaged
from orchestrator.cost.uncertainty import Situation, beyond, interval, known
from orchestrator.engines import ENGINES
from orchestrator.hardware.spec import Cluster
from orchestrator.model.training import Training
from orchestrator.strategy.capabilities import Traits
from tests.validation.runs import Run


def planned(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """A line for every planned engine and every GPU of the runs: `basis` (fitted on it, carried over from a named other engine, or from
    datasheets), `runs` and `median_error` (of those that the constants were fitted on, with these constants alone; None: none), the same
    of runs that nobody fitted, and `interval` of measured over predicted seconds, 90%, of a dense model in 16 bits on no more GPUs than
    were measured (cost/uncertainty.py)."""
    clusters: dict[str, Cluster] = {}
    for run in runs:
        if run.gpu != "cpu":
            clusters.setdefault(run.gpu, run.cluster)
    lines = []
    for name in sorted(ENGINES):
        for cluster in (clusters[gpu] for gpu in sorted(clusters)):
            known = packaged(name, cluster.gpu)
            lines.append(_line(ENGINES[name].traits(cluster.software), cluster, None if known is None else known.file))
    return lines


def _line(traits: Traits, cluster: Cluster, file: CalibrationFile | None) -> dict[str, Any]:
    base = datasheet(cluster, traits)
    fitted = (base if file is None else file.calibration(base)).fitted
    outside = beyond(fitted, replace(cluster, num_gpus=1), Training(global_batch_size=1, seq_length=1), False, known().gpus)
    now = Situation(
        generation=cluster.gpu.generation,
        experts=False,
        eight_bit=False,
        transformers=traits.layers == "hugging_face",
        beyond=outside,
    )
    line: dict[str, Any] = {"engine": traits.engine, "gpu": cluster.gpu.name, "basis": "from datasheets", "interval": interval(now, base)}
    none = {"runs": 0, "median_error": None, "held_out_runs": 0, "held_out_median_error": None}
    if file is None:
        return line | none
    judged = {
        "runs": file.fitted_runs,
        "median_error": file.fitted_median_error,
        "held_out_runs": file.held_out_runs,
        "held_out_median_error": file.held_out_median_error,
    }
    if file.gpu not in fitted_gpus(file.engine):
        alone = ", matrix products alone" if file.engine == ANY_ENGINE else ""
        return line | none | {"basis": f"the nearest GPU's: {file.carried_from}{alone}"}
    if not file.carried_from:
        same = "fitted on it" if file.traits == digest(traits) else "fitted on other traits of it"
        return line | judged | {"basis": same}
    if file.engine == ANY_ENGINE:
        return line | none | {"basis": f"from datasheets; matrix products carried over from {file.carried_from}"}
    return line | judged | {"basis": f"carried over from {file.carried_from}: {', '.join(sorted({*file.constants} - {'memory_margin'}))}"}
