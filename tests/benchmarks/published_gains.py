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

Of several values of one setting the plainest and the strongest are one pair; what was measured twice counts once, by the mean. A gain is
the logarithm of the ratio of times, from the setting's plainer value to the other; below `NOISE` it says nothing of the sign. Pairs are
looked for among the tables' rows (the same value in every column but those of one setting and of what was measured), in threads and
documents (`TOLD`), and among the steps of one campaign, each of which changed one thing of the step before it (`LADDER`), of which those of
a setting count. Half a minute of one core.
"""

from __future__ import annotations

import csv
import math
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from statistics import geometric_mean as mean
from statistics import median
from typing import NamedTuple

from msgspec.structs import replace as struct_replace

from orchestrator.commands import arguments, command_of
from orchestrator.hardware.spec import Stack
from tests.validation.__main__ import price_all
from tests.validation.metrics import Priced
from tests.validation.pricing import named
from tests.validation.runs import Run
from tests.validation.tables import UNFUSED, load, read_row

Columns = tuple[tuple[str, str], ...]
Row = dict[str, str]

SETTINGS = {
    "graphs": ("cuda_graph",), "dispatcher": ("dispatcher",), "overlap": ("a2a_overlap", "delay_wgrad"), "offload": ("offload",),
    "overlap tp": ("tp_comm_overlap",),
}  # fmt: skip
"""Settings and their columns. No table has one for buckets."""
UNREAD = {"tp_comm_overlap": "tp_comm_overlap", "shared_expert_overlap": "moe_shared_expert_overlap"}
"""Overlaps by their column, which `tables.strategy_of` doesn't read: NeMo's constants have the first (engines/megatron.py),
and the second is said of four timed rows, each priced 1 to 3% further below its time with it."""
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
    only the ratio counts. `stock`: started from a library's recipe in a container as it comes, not as a vendor's benchmark is."""

    of: str
    base: tuple[str, str]
    both: Row
    plain: Row
    other: Row
    seconds: tuple[float, float]
    where: str
    stock: bool = False


QWEN = ("bridge_verification_cards", "bcard-qwen3-30b-a3b-pretrain_performance-H100-20147p29")
BY_NCCL = {"dispatcher": "alltoall", "cuda_graph": "none", "a2a_overlap": "0"}
APART = {"notes": UNFUSED}
DEEPSEEK = ("nvidia_megatron_bridge_perf", "mbridge-performance-summary-archive-L631")
OF_14_LAYERS = {
    "num_layers": "14", "mtp_layers": "1", "seq_length": "2048", "num_gpus": "64", "precision": "bf16", "tp": "1", "pp": "4", "vpp": "2",
    "ep": "16", "dp": "16", "global_batch_size": "256", "recompute": "full", "pipeline_layout": "Ett|(tt|)*6mL", "dispatcher": "alltoall",
    "routing": "forced balance", "a2a_overlap": "no",
}  # fmt: skip
GPT_OSS = ("bridge_verification_cards", "bcard-gpt-oss-20b-sft-H100-6618p85")
OF_20B = {
    "task": "pretrain", "num_gpus": "16", "tp": "2", "pp": "4", "ep": "4", "dp": "2", "global_batch_size": "4", "seq_length": "4096",
    "sequence_parallel": "yes",
}  # fmt: skip
OF_120B = {
    "model_name": "openai/gpt-oss-120b", "num_layers": "36", "num_experts": "128", "gpu": "GB200", "gpu_memory_gb": "192",
    "gpus_per_node": "4", "num_gpus": "64", "interconnect": "NVL72", "ep": "64", "dp": "64", "micro_batch_size": "4",
    "global_batch_size": "1280", "seq_length": "4096", "recompute": "moe_act", "a2a_overlap": "yes", "routing": "forced balance",
    "task": "pretrain", "dispatcher": "alltoall",
}  # fmt: skip
"""Its recompute has layernorm too, which is no mode with moe_act that is priced."""
OF_235B = {
    "model_name": "Qwen/Qwen3-235B-A22B", "num_layers": "94", "hidden_size": "4096", "num_attention_heads": "64", "num_query_groups": "4",
    "ffn_hidden_size": "12288", "moe_ffn_hidden_size": "1536", "micro_batch_size": "1",
}  # fmt: skip
ON_B200 = {"gpu": "B200", "gpu_memory_gb": "180", "num_gpus": "64", "pp": "8", "vpp": "4", "ep": "8", "dp": "8"} | BY_NCCL
OFFLOADED = {"recompute": "full uniform 1", "routing": "real router", "tp": "2", "pp": "2", "ep": "4", "dp": "4", "global_batch_size": "8",
             "sequence_parallel": "yes", "dispatcher": "deepep"}  # fmt: skip
MODULES = {"cuda_graph": "transformer_engine: attn+moe_router+moe_preprocess"}
WHOLE = {"cuda_graph": "local: full_iteration"}
IN_MXFP8 = ("megatron_moe_modelzoo", "mrecipe-9c5258f-qwen3_30b_gb200_mxfp8_16GPU_TP1PP1EP16_partial_cg")
IN_HOST = {"notes": "offload=full CPU offload"}
BY_DEEPSPEED = ("bigscience_v100", "bsgpt2-L480")
OF_QWEN_1B = {
    "model_name": "Qwen2.5-1.5B", "num_layers": "28", "hidden_size": "1536", "num_attention_heads": "12", "num_query_groups": "2",
    "ffn_hidden_size": "8960", "vocab_size": "151936", "seq_length": "512", "gpu": "A100-SXM-40GB", "gpu_memory_gb": "40",
    "gpus_per_node": "8", "num_gpus": "2", "interconnect": "", "precision": "bf16", "dp": "2", "zero_stage": "2", "micro_batch_size": "4",
    "global_batch_size": "8", "recompute": "none", "flash_attention": "yes",
}  # fmt: skip
ON_256_H100 = {
    "num_gpus": "256", "tp": "2", "pp": "8", "vpp": "4", "ep": "32", "dp": "16", "global_batch_size": "2048", "sequence_parallel": "yes",
    "recompute": "moe_act", "dispatcher": "deepep", "cuda_graph": "none", "a2a_overlap": "0", "pipeline_layout": "Ett|(ttt|)*30ttL",
}  # fmt: skip
"""Its recompute has layernorm too, as that of `OF_120B`."""
BY_TITAN = "torchtitan_benchmarks"
ASYNC, TITAN = {"tp_comm_overlap": "1"}, "torchtitan benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md"
ON_MI355X = {
    "gpu": "MI355X", "gpu_memory_gb": "288", "interconnect": "", "engine": "Primus (Megatron-LM)", "precision": "bf16", "tp": "1",
    "vpp": "", "vocab_size": "102400", "moe_router_topk": "6", "recompute": "none", "routing": "forced balance", "dispatcher": "alltoall",
    "cuda_graph": "none", "ep": "8",
} | APART  # fmt: skip
OF_V2 = {
    "model_name": "DeepSeek-V2", "num_layers": "60", "hidden_size": "5120", "num_attention_heads": "128", "ffn_hidden_size": "12288",
    "num_experts": "160", "num_gpus": "32", "pp": "4", "dp": "8", "micro_batch_size": "1", "global_batch_size": "256",
}  # fmt: skip
OF_V2_LITE = {
    "model_name": "DeepSeek-V2-Lite", "num_layers": "27", "hidden_size": "2048", "num_attention_heads": "16", "ffn_hidden_size": "10944",
    "num_experts": "64", "num_gpus": "8", "pp": "1", "dp": "8", "micro_batch_size": "12", "global_batch_size": "768",
}  # fmt: skip
SHARED_BESIDE = {"shared_expert_overlap": "1"}
FIGURES = "AMD-AGI/Primus examples/moe_package, figures 6 and 7"
TOLD = (
    Told("overlap", QWEN, {"a2a_overlap": "0"}, {}, {"a2a_overlap": "1"}, (24.7138, mean((21.0725, 20.992))), "Megatron-Bridge 5094"),
    Told("overlap", QWEN, BY_NCCL | APART, {}, {"a2a_overlap": "1"}, (41.25, 31.31), "Megatron-Bridge 3862"),
    Told("overlap", QWEN, BY_NCCL | APART | {"a2a_overlap": "1"}, {}, {"delay_wgrad": "1"}, (31.31, 31.2), "Megatron-Bridge 3862"),
    Told("overlap", DEEPSEEK, OF_14_LAYERS, {}, {"a2a_overlap": "yes"}, (3.044, 2.839), "Megatron-LM 6429"),
    Told("overlap", QWEN, OF_235B | ON_B200, {}, {"a2a_overlap": "1", "delay_wgrad": "1"}, (16.0, 17.2), "Megatron-Bridge 1760, bf16"),
    Told("graphs", QWEN, BY_NCCL, {}, MODULES, (41.36, 42.0), "Megatron-Bridge 3868"),
    Told("graphs", GPT_OSS, OF_20B, {}, MODULES, (mean((0.467, 0.52)), mean((0.391, 0.399))), "Megatron-Bridge 2960", stock=True),
    Told("graphs", IN_MXFP8, {}, MODULES, WHOLE, (1 / mean((514, 480.3)), 1 / mean((646.8, 598.1))), "Megatron-LM 5289 and 5728"),
    Told("graphs", IN_MXFP8, OF_235B | {"num_gpus": "128", "ep": "64", "dp": "128", "global_batch_size": "8192", "a2a_overlap": "yes",
         "delay_wgrad": "1"}, MODULES, WHOLE, (1 / 876.2, 1 / 1208.3), "Megatron-LM 5728"),
    Told("dispatcher", GPT_OSS, OF_120B, {}, {"dispatcher": "hybridep"}, (1 / 423.6, 1 / 406.6), "Megatron-Bridge 3561"),
    Told("dispatcher", GPT_OSS, OF_120B | {"precision": "fp8_mx"}, {}, {"dispatcher": "hybridep"}, (1 / 438.5, 1 / 431.0),
         "Megatron-Bridge 3561"),
    Told("offload", QWEN, BY_NCCL | OFFLOADED, {}, IN_HOST, (0.996, 4.189), "Megatron-Bridge 3062", stock=True),
    Told("offload", BY_DEEPSPEED, OF_QWEN_1B, {}, IN_HOST, (0.24, 1.365), "DeepSpeed blogs/zenflow-corebinding", stock=True),
    Told("overlap", QWEN, OF_235B | ON_256_H100, {}, {"a2a_overlap": "1"}, (19.7, 17.6), "Megatron-MoE-ModelZoo examples/qwen3/readme.md"),
    Told("overlap tp", (BY_TITAN, "tt-f64cdc19"), {}, {}, ASYNC, (1 / 4378, 1 / 4809.4), f"{TITAN}, 8B"),
    Told("overlap tp", (BY_TITAN, "tt-dec6f58f"), {}, {}, ASYNC, (1 / 5078.1, 1 / 5570.1), f"{TITAN}, 8B in FP8"),
    Told("overlap tp", (BY_TITAN, "tt-0322bdda"), {"precision": "bf16 compile"}, {}, ASYNC, (1 / 597.3, 1 / 652.4), f"{TITAN}, 70B"),
    Told("overlap tp", (BY_TITAN, "tt-0322bdda"), {}, {}, ASYNC, (1 / mean((829, 809.8)), 1 / mean((876, 942.4))),
         f"{TITAN} and llama3_h100_202412, 70B in FP8"),
    Told("dispatcher", DEEPSEEK, ON_MI355X | OF_V2, SHARED_BESIDE, {"dispatcher": "deepep"}, (1 / 1989.6, 1 / 2202.9),
         f"{FIGURES}, DeepSeek-V2"),
    Told("dispatcher", DEEPSEEK, ON_MI355X | OF_V2_LITE, SHARED_BESIDE, {"dispatcher": "deepep"}, (1 / 31095.1, 1 / 35150.6),
         f"{FIGURES}, V2-Lite"),
)  # fmt: skip
"""Threads and files of these repositories, the recipes that they name, and what Megatron-Bridge's skills say of them."""

CAMPAIGN = "geodesic_gh200_nemotron3"
IN_TOLD = (CAMPAIGN, IN_MXFP8[0], QWEN[0])
"""Tables whose pairs are told here: their notes change more than their columns, or another source measured them again (the card of 20.1 s
differs from that of 25.1 in permutation, chunks and margins too: Megatron-Bridge 5123)."""
POSTURE_8, POSTURE_9 = "E-024 E-027", "E-028 E-030 E-039-6932856 E-041-6932890"
LADDER = (
    ("E-001", "E-004", "overlap", "parameters gathered beside forward"), ("E-004", "E-008", "", "gradients in 16 bits"),
    ("E-008", "E-009", "", "experts not recomputed"), ("E-010", "E-016", "", "routing forced to be even"),
    ("E-018", "E-022", "", "scans in 16 bits"), ("E-023", "E-024", "", "dense layers in FP8"),
    (POSTURE_8, POSTURE_9, "dispatcher", "HybridEP"), (POSTURE_8, "E-029", "buckets", "buckets of 128M parameters for 500M"),
    ("E-044-6933820", "E-044-6933731 E-044-6933837", "overlap", "exchange beside passes"),
    ("E-024", "E-025", "", "micro-batch 2 and experts offloaded"), ("E-001", "E-005", "dispatcher", "HybridEP beside blocking copies"),
    ("E-004", "E-007", "", "scans in 16 bits, which its authors doubt"), ("E-015-6932314", "E-015-6932313", "", "micro-batch 2"),
    ("E-010", "E-011", "", "nothing recomputed"), (POSTURE_9, "E-035-6932739", "graphs", "graphs of Mamba"),
    ("E-044-6933731 E-044-6933837", "E-046-6934039 E-046-6934180", "graphs", "graphs of Mamba beside the exchange"),
)  # fmt: skip
"""Steps of Geodesic's pretraining campaign (its log by experiments): the parent's and the child's runs, by what is in their names, the
setting that the step is of, where it is of one, and what it is."""


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


class Pair(NamedTuple):
    """A pair that was priced, `why` it is not counted ("": it is), and where it is told."""

    of: str
    measured: float
    predicted: float
    where: str
    why: str = ""

    @property
    def counts(self) -> bool:
        return not self.why and abs(self.measured) > NOISE

    @property
    def has_half(self) -> bool:
        return self.predicted / self.measured >= 0.5

    def line(self) -> str:
        said = self.why or ("" if self.counts else "noise")
        return f"{self.of:10} {self.measured:+8.1%} {self.predicted:+9.1%}  {self.where}{f' ({said})' if said else ''}"


def run(words: Sequence[str]) -> None:
    """Prints each pair, and how many have the right sign and half of the measured gain."""
    folder = Path(arguments(words, ("runs",), required=("runs",))["runs"])
    by_run = rows_of(folder)
    runs, unusable = load(folder)
    whys = {(row.table, row.run_id): row.why for row in unusable}
    steps = climbed(price_all([one for one in runs if one.table == CAMPAIGN and one.time_s is not None], named(None))[0])
    found, without = of_tables(by_run, runs, whys)
    pairs = [*found, *(told_pair(pair, by_run[pair.base]) for pair in TOLD), *(step for step in steps if step.of)]
    print(f"{'setting':10} {'measured':>8} {'predicted':>9}")
    print(*(pair.line() for pair in pairs), sep="\n")
    told = [pair for pair in pairs if pair.counts]
    right, half = sum(pair.measured * pair.predicted > 0 for pair in told), sum(pair.has_half for pair in told)
    print(f"{len(told)} pairs apart by more than {NOISE:.0%}: {right} with the right sign, {half} with half of the measured gain or more")
    for why, count in sorted(without.items()):
        print(f"{count} pairs not priced: {why}")
    print(*(step.line() for step in steps if not step.of), sep="\n")
    told = [step for step in steps if step.counts]
    ratios = [step.predicted / step.measured for step in told]
    right = sum(ratio > 0 for ratio in ratios)
    print(f"{len(told)} steps of {CAMPAIGN}: {right} with the right sign, predicted over measured {median(ratios):.2f} in the median")


def of_tables(by_run: dict[tuple[str, str], Row], runs: Sequence[Run], whys: dict[tuple[str, str], str]) -> tuple[list[Pair], Counter[str]]:
    """The pairs among rows of one table, and how many can't be priced, by why."""
    published = configurations({key: row for key, row in by_run.items() if key[0] not in IN_TOLD})
    switched = {column for columns in SETTINGS.values() for column in columns}
    alike: dict[tuple[str, Columns], list[Columns]] = defaultdict(list)
    for table, columns in published:
        alike[table, tuple(pair for pair in columns if pair[0] not in switched)].append(columns)
    both_of = [
        (table, of, sorted((one, other), key=lambda columns: plainness(columns, of)))
        for (table, _), members in alike.items()
        for one, other in combinations(members, 2)
        if (of := setting(one, other)) is not None
    ]
    wanted = {(table, run_id) for table, _, both in both_of for columns in both for run_id in published[table, columns]}
    priced, failed = price_all([one for one in runs if (one.table, one.run_id) in wanted and one.time_s is not None], named(None))
    by_id = {(row.run.table, row.run.run_id): row for row in priced}
    whys = whys | {(row.table, row.run_id): row.why for row in failed}
    without: Counter[str] = Counter()
    pairs = list[Pair]()
    for table, of, both in both_of:
        rows = [[by_id[table, run_id] for run_id in published[table, columns] if (table, run_id) in by_id] for columns in both]
        sound = [[row for row in each if not why_not(by_run[table, row.run.run_id])] for each in rows]
        why = next((why_not(by_run[table, each[0].run.run_id]) for each, left in zip(rows, sound, strict=True) if each and not left), "")
        rows = [left or each for each, left in zip(rows, sound, strict=True)]
        ids = [published[table, columns][0] for columns in both]
        if not all(rows):
            without[f"{of} of {table}: {next((whys[table, each] for each in ids if (table, each) in whys), 'no time')}"] += 1
            continue
        pairs.append(Pair(of, gain(*rows, "measured"), gain(*rows, "predicted"), f"{table}: {ids[0]} -> {ids[1]}", why))
    return pairs, without


def with_overlaps(row: Row, run: Run) -> Run:
    """The run with the overlaps that tables' rows aren't read for."""
    options = {option: True for column, option in UNREAD.items() if row.get(column) == "1"}
    return replace(run, candidate=struct_replace(run.candidate, strategy=struct_replace(run.candidate.strategy, **options)))


def told_pair(pair: Told, base: Row) -> Pair:
    """A pair without rows, with what is measured and predicted."""
    given = (base | {"notes": "", "peak_memory_gib": ""} | pair.both | each for each in (pair.plain, pair.other))
    stack: Stack = "stock" if pair.stock else "tuned"
    runs = [
        with_overlaps(row, read_row(pair.base[0], row | {"step_time_s": str(seconds), "tokens_per_s_per_gpu": "", "tflops_per_gpu": ""}))
        for row, seconds in zip(given, pair.seconds, strict=True)
    ]
    plain, other = price_all([replace(run, cluster=struct_replace(run.cluster, stack=stack)) for run in runs], named(None))[0]
    return Pair(pair.of, gain([plain], [other], "measured"), gain([plain], [other], "predicted"), pair.where)


def climbed(priced: Sequence[Priced]) -> list[Pair]:
    """The steps of the campaign; `of` "": of no setting that is looked for."""
    steps = list[Pair]()
    for parents, children, of, what in LADDER:
        rows = [
            [row for row in priced if any(f"{name}-" in f"{row.run.run_id}-" for name in names.split())] for names in (parents, children)
        ]
        if all(rows):
            where = f"{CAMPAIGN}: {parents.split()[0]} -> {children.split()[0]}, {what}"
            steps.append(Pair(of, gain(*rows, "measured"), gain(*rows, "predicted"), where))
    return steps


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
