"""What single settings gained in published runs, beside what the prices say: graphs, dispatchers, overlaps, offload.

    python -m tests.benchmarks.published_gains runs=MEASUREMENTS

A pair is two configurations of one table that name the same value in every column but those of one setting below and of what was
measured, so that nothing but that setting, and what the notes say, is otherwise; runs of one configuration count once, by their geometric
mean. A gain is the logarithm of the ratio of times, from the setting's plainer value to the other. Pairs that are nearer than `NOISE` say
nothing of the sign. Then the steps of one campaign, each of which changed one thing of the step before it (`LADDER`). Half a minute of one
core.
"""

from __future__ import annotations

import csv
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from statistics import median

from orchestrator.commands import arguments, command_of
from tests.validation.__main__ import price_all
from tests.validation.metrics import Priced
from tests.validation.pricing import named
from tests.validation.tables import load

SETTINGS = {
    "graphs": ("cuda_graph",), "dispatcher": ("dispatcher",), "overlap": ("a2a_overlap", "delay_wgrad"), "offload": ("offload",),
    "overlap tp": ("tp_comm_overlap",),
}  # fmt: skip
"""Settings and their columns. No table has one for buckets."""
MEASURED = frozenset(
    (
        *("run_id", "sweep_id", "source", "status", "step_time_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "flop_formula", "derived"),
        *("peak_memory_gib", "peak_memory_kind", "peak_memory_reserved_gib", "model_tflops_check", "notes", "source_ref", "not_stated"),
    )
)
"""Columns in which rows of one configuration may differ."""
PLAIN = ("", "0", "no", "none", "alltoall")
NOISE = 0.02
"""By so much two runs of one configuration differ in the median (`again` among the pairs of validate's report)."""

CAMPAIGN = "geodesic_gh200_nemotron3"
LADDER = (
    ("E-001", "E-004", "parameters gathered beside forward"), ("E-004", "E-008", "gradients in 16 bits"),
    ("E-008", "E-009", "experts not recomputed"), ("E-010", "E-016", "routing forced to be even"), ("E-018", "E-022", "scans in 16 bits"),
    ("E-023", "E-024", "dense layers in FP8"), ("E-024", "E-028", "HybridEP"), ("E-044-6933820", "E-044-6933731", "exchange beside passes"),
    ("E-024", "E-025", "micro-batch 2 and experts offloaded"), ("E-001", "E-005", "HybridEP beside blocking copies"),
    ("E-004", "E-007", "scans in 16 bits, which its authors doubt"), ("E-015-6932314", "E-015-6932313", "micro-batch 2"),
    ("E-010", "E-011", "nothing recomputed"), ("E-028", "E-035-6932739", "graphs of Mamba"),
)  # fmt: skip
"""Steps of Geodesic's pretraining campaign (its log by experiments): the parent's and the child's runs, by what is in their names."""

Columns = tuple[tuple[str, str], ...]


def configurations(folder: Path) -> dict[tuple[str, Columns], list[str]]:
    """The runs of each configuration: its table, and its values by column."""
    found: dict[tuple[str, Columns], list[str]] = defaultdict(list)
    for path in sorted(folder.glob("*.csv")):
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                if row.get("status") == "ok":
                    columns = tuple((name, value or "") for name, value in row.items() if name not in MEASURED)
                    found[path.stem, columns].append(row["run_id"])
    return found


def setting(one: Columns, other: Columns) -> str | None:
    """The only setting in which two configurations of a table differ; None: there is none, or they differ in more."""
    columns = {name for (name, value), (_, another) in zip(one, other, strict=True) if value != another}
    return next((name for name, of in SETTINGS.items() if columns and columns <= {*of}), None)


def plainness(columns: Columns, of: str) -> tuple[bool, int]:
    values = [value.lower() for name, value in columns if name in SETTINGS[of]]
    return any(value not in PLAIN for value in values), sum(len(value.split("+")) for value in values)


def run(words: Sequence[str]) -> None:
    """Prints each pair, and how many have the right sign and half of the measured gain."""
    folder = Path(arguments(words, ("runs",), required=("runs",))["runs"])
    published = configurations(folder)
    switched = {column for columns in SETTINGS.values() for column in columns}
    alike: dict[tuple[str, Columns], list[Columns]] = defaultdict(list)
    for table, columns in published:
        alike[table, tuple(pair for pair in columns if pair[0] not in switched)].append(columns)
    pairs = [
        (table, of, sorted((one, other), key=lambda columns: plainness(columns, of)))
        for (table, _), members in alike.items()
        for one, other in combinations(members, 2)
        if (of := setting(one, other)) is not None
    ]
    wanted = {(table, run_id) for table, _, both in pairs for columns in both for run_id in published[table, columns]}
    runs, unusable = load(folder)
    priced, failed = price_all([one for one in runs if (one.table, one.run_id) in wanted and one.time_s is not None], named(None))
    by_id = {(row.run.table, row.run.run_id): row for row in priced}
    whys = {(row.table, row.run_id): row.why for row in [*unusable, *failed]}
    counted = right = half = 0
    without: Counter[str] = Counter()
    print(f"{'setting':10} {'measured':>8} {'predicted':>9}")
    for table, of, both in pairs:
        rows = [[by_id[table, run_id] for run_id in published[table, columns] if (table, run_id) in by_id] for columns in both]
        ids = [published[table, columns][0] for columns in both]
        if not all(rows):
            without[f"{of} of {table}: {next((whys[table, each] for each in ids if (table, each) in whys), 'no time')}"] += 1
            continue
        measured, predicted = gain(*rows, "measured"), gain(*rows, "predicted")
        told = abs(measured) > NOISE
        counted, right = counted + told, right + (told and measured * predicted > 0)
        half += told and predicted / measured >= 0.5
        print(f"{of:10} {measured:+8.1%} {predicted:+9.1%}  {table}: {ids[0]} -> {ids[1]}{'' if told else ' (noise)'}")
    print(f"{counted} pairs apart by more than {NOISE:.0%}: {right} with the right sign, {half} with half of the measured gain or more")
    for why, count in sorted(without.items()):
        print(f"{count} pairs not priced: {why}")
    ladder(price_all([one for one in runs if one.table == CAMPAIGN and one.time_s is not None], named(None))[0])


def ladder(priced: Sequence[Priced]) -> None:
    """Prints the steps of the campaign, how many have the right sign, and the median of predicted over measured gain."""
    told: list[float] = []
    for parent, child, what in LADDER:
        rows = [[row for row in priced if f"{name}-" in f"{row.run.run_id}-"] for name in (parent, child)]
        if all(rows):
            measured, predicted = gain(*rows, "measured"), gain(*rows, "predicted")
            told += [predicted / measured] if abs(measured) > NOISE else []
            print(f"{measured:+8.1%} {predicted:+9.1%}  {what}{'' if abs(measured) > NOISE else ' (noise)'}")
    if told:
        right = sum(ratio > 0 for ratio in told)
        print(f"{len(told)} steps of {CAMPAIGN}: {right} with the right sign, predicted over measured {median(told):.2f} in the median")


def gain(plain: Sequence[Priced], other: Sequence[Priced], of: str) -> float:
    """By how much faster the second is, as the logarithm of the ratio of mean times."""
    means = [
        sum(math.log(row.time_s if of == "predicted" else row.run.time_s or math.nan) for row in rows) / len(rows)
        for rows in (plain, other)
    ]
    return means[0] - means[1]


main = command_of(__doc__, run)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
