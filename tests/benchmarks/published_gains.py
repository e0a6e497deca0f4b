"""What single settings gained in published runs, beside what the prices say: graphs, dispatchers, overlaps, offload, buckets.

    python -m tests.benchmarks.published_gains runs=MEASUREMENTS

A pair counts where all of this holds, and counts then whatever comes out (the rule was written before the pairs of 2026-11-29 were priced):

1. Both sides are steps of training that the same people timed on the same machines with the same releases. Both figures are printed
   (seconds, tokens/s or TFLOP/s), and their authors have not taken the change back.
2. The source says that they differ in one setting: CUDA graphs, the tokens' dispatcher, an overlap of traffic (experts', tensor
   parallelism's, gradients', gathered parameters'), an offload, the gradients' buckets, gathers in FP8. What the engine's own checks demand
   with it (a static capacity and its fuser with whole graphs, chunks with the experts' overlap in a pipeline) is part of it.
3. All that a price needs is printed, or is in the recipe or script that the source names, and nothing that it prints contradicts it.
4. Engine and libraries are as they are released for such machines.
5. Nothing else that is known decided a run's time (`CONFOUNDED`, `why_not`): its allocator at the end of its memory, say.

Of several values of one setting the plainest and the strongest are one pair; what was measured twice counts once, by the mean. A gain is the
logarithm of the ratio of times, from the setting's plainer value to the other; below `NOISE` it says nothing of the sign. Pairs are looked
for among the tables' rows (the same value in every column but those of one setting and of what was measured), told in threads and documents
(`TOLD`), and among the steps of one campaign, each of which changed one thing of the step before it (`LADDER`), of which those of a setting
count. Half a minute of one core.
"""

from __future__ import annotations

import csv
import math
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import NamedTuple

from orchestrator.commands import arguments, command_of
from tests.validation.__main__ import price_all
from tests.validation.metrics import Priced
from tests.validation.pricing import named
from tests.validation.tables import load, read_row

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

RETRIES = 10
"""Retries of the allocator in a run above which its memory decides its time, and no setting."""
PATCHED = "a combined schedule that no release has, and steps of 44 s or 23 s by which stream frees memory (qwen35-h100-campaign.md)"
CONFOUNDED = {
    "bq35-overlap": PATCHED,
    "bq35-shared-overlap": PATCHED,
    "ph200-3188": "its tensors leave the graphs no room: with one module more (ph200-3181) it ran out of memory in capture",
}
"""Runs that more than the setting decided, by id; in numbers in tests/validation/README.md."""


class Told(NamedTuple):
    """A pair of which no table has rows: those of `base` with what `both` and then `plain` or `other` change, and their seconds, of which
    only the ratio counts."""

    of: str
    base: tuple[str, str]
    both: dict[str, str]
    plain: dict[str, str]
    other: dict[str, str]
    seconds: tuple[float, float]
    where: str


QWEN = ("bridge_verification_cards", "bcard-qwen3-30b-a3b-pretrain_performance-H100-20147p29")
BY_NCCL = {"dispatcher": "alltoall", "cuda_graph": "none", "a2a_overlap": "0"}
DEEPSEEK = ("nvidia_megatron_bridge_perf", "mbridge-performance-summary-archive-L631")
OF_14_LAYERS = {
    "num_layers": "14", "mtp_layers": "1", "seq_length": "2048", "num_gpus": "64", "precision": "bf16", "tp": "1", "pp": "4", "vpp": "2",
    "ep": "16", "dp": "16", "global_batch_size": "256", "recompute": "full", "pipeline_layout": "Ett|(tt|)*6mL", "dispatcher": "alltoall",
    "routing": "forced balance", "a2a_overlap": "no",
}  # fmt: skip
LLAMA = ("nvidia_megatron_bridge_perf", "mbridge-performance-summary-archive-L206")
GPT_OSS = ("bridge_verification_cards", "bcard-gpt-oss-20b-sft-H100-6618p85")
OF_120B = {
    "model_name": "openai/gpt-oss-120b", "num_layers": "36", "num_experts": "128", "gpu": "GB200", "gpu_memory_gb": "192",
    "gpus_per_node": "4", "num_gpus": "64", "interconnect": "NVL72", "ep": "64", "dp": "64", "micro_batch_size": "4",
    "global_batch_size": "1280", "seq_length": "4096", "recompute": "moe_act", "a2a_overlap": "yes", "routing": "forced balance",
    "task": "pretrain", "dispatcher": "alltoall",
}  # fmt: skip
"""Its recompute has layernorm too, which is no mode with moe_act that is priced."""
TOLD = (
    Told("overlap", QWEN, BY_NCCL, {}, {"a2a_overlap": "1"}, (41.25, 31.31), "Megatron-Bridge 3862"),
    Told("overlap", QWEN, BY_NCCL | {"a2a_overlap": "1"}, {}, {"delay_wgrad": "1"}, (31.31, 31.2), "Megatron-Bridge 3862"),
    Told("graphs", QWEN, BY_NCCL, {}, {"cuda_graph": "transformer_engine: attn+moe_router+moe_preprocess"}, (41.36, 42.0),
         "Megatron-Bridge 3868"),
    Told("overlap", DEEPSEEK, OF_14_LAYERS, {}, {"a2a_overlap": "yes"}, (3.044, 2.839), "Megatron-LM 6429"),
    Told("graphs", LLAMA, {"cuda_graph": "none", "recompute": "none"}, {}, {"cuda_graph": "transformer_engine: attn+mlp"}, (1.07, 1.0),
         "Megatron-Bridge 4080: about 7%"),
    Told("dispatcher", GPT_OSS, OF_120B, {}, {"dispatcher": "hybridep"}, (1 / 423.6, 1 / 406.6), "Megatron-Bridge 3561"),
    Told("dispatcher", GPT_OSS, OF_120B | {"precision": "fp8_mx"}, {}, {"dispatcher": "hybridep"}, (1 / 438.5, 1 / 431.0),
         "Megatron-Bridge 3561"),
)  # fmt: skip
"""Threads of these repositories, and what Megatron-Bridge's skills say of them."""

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


Row = dict[str, str]


def rows_of(folder: Path) -> dict[tuple[str, str], Row]:
    """The rows of runs that ran, by table and run."""
    found = dict[tuple[str, str], Row]()
    for path in sorted(folder.glob("*.csv")):
        with path.open(newline="", encoding="utf-8") as file:
            rows = [{name: value or "" for name, value in row.items()} for row in csv.DictReader(file)]
            found |= {(path.stem, row["run_id"]): row for row in rows if row.get("status") == "ok"}
    return found


def configurations(rows: dict[tuple[str, str], Row]) -> dict[tuple[str, Columns], list[str]]:
    """The runs of each configuration: its table, and its values by column. HybridEP is one dispatcher, whether "flex" stands before it."""
    found: dict[tuple[str, Columns], list[str]] = defaultdict(list)
    for (table, run_id), row in rows.items():
        columns = tuple((name, value.replace("flex hybridep", "hybridep")) for name, value in row.items() if name not in MEASURED)
        found[table, columns].append(run_id)
    return found


def why_not(row: Row) -> str:
    """What decided a run's time beside its settings; "" where nothing is known to have."""
    retries = re.search(r"(\d+) (?:allocator )?retries", row.get("notes", ""))
    return f"{retries[0]}" if retries and int(retries[1]) > RETRIES else CONFOUNDED.get(row["run_id"], "")


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
    by_run = rows_of(folder)
    published = configurations(by_run)
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
        sound = [[row for row in each if not why_not(by_run[table, row.run.run_id])] for each in rows]
        why = next((why_not(by_run[table, each[0].run.run_id]) for each, left in zip(rows, sound, strict=True) if each and not left), "")
        rows = [left or each for each, left in zip(rows, sound, strict=True)]
        ids = [published[table, columns][0] for columns in both]
        if not all(rows):
            without[f"{of} of {table}: {next((whys[table, each] for each in ids if (table, each) in whys), 'no time')}"] += 1
            continue
        measured, predicted = gain(*rows, "measured"), gain(*rows, "predicted")
        told = abs(measured) > NOISE and not why
        counted, right = counted + told, right + (told and measured * predicted > 0)
        half += told and predicted / measured >= 0.5
        said = why or ("" if told else "noise")
        print(f"{of:10} {measured:+8.1%} {predicted:+9.1%}  {table}: {ids[0]} -> {ids[1]}{f' ({said})' if said else ''}")
    for pair in TOLD:
        measured, predicted = told_gain(pair, by_run[pair.base])
        told = abs(measured) > NOISE
        counted, right = counted + told, right + (told and measured * predicted > 0)
        half += told and predicted / measured >= 0.5
        print(f"{pair.of:10} {measured:+8.1%} {predicted:+9.1%}  {pair.where}{'' if told else ' (noise)'}")
    print(f"{counted} pairs apart by more than {NOISE:.0%}: {right} with the right sign, {half} with half of the measured gain or more")
    for why, count in sorted(without.items()):
        print(f"{count} pairs not priced: {why}")
    ladder(price_all([one for one in runs if one.table == CAMPAIGN and one.time_s is not None], named(None))[0])


def told_gain(pair: Told, base: Row) -> tuple[float, float]:
    """(measured, predicted) gain of a pair without rows."""
    given = (base | {"notes": "", "peak_memory_gib": ""} | pair.both | each for each in (pair.plain, pair.other))
    runs = [
        read_row(pair.base[0], row | {"step_time_s": str(seconds), "tokens_per_s_per_gpu": "", "tflops_per_gpu": ""})
        for row, seconds in zip(given, pair.seconds, strict=True)
    ]
    plain, other = price_all(runs, named(None))[0]
    return gain([plain], [other], "measured"), gain([plain], [other], "predicted")


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
