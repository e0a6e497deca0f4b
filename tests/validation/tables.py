"""Measured runs: a row of a table becomes what the cost model prices, "as it was run", or a reason why it can't be used.

The schema is that of `shared/measurements/README.md`: one CSV a source, the same columns everywhere, a blank is not stated. What a blank
stands for is decided here, by source, and only where the source's engine has one default; otherwise the row says what it lacks.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from msgspec.structs import replace

from orchestrator.errors import InputError
from orchestrator.model.architecture import Architecture
from orchestrator.model.describe import with_tower_first
from orchestrator.model.families import describe
from orchestrator.model.lora import Lora, with_lora
from orchestrator.model.spec import ModelSpec
from orchestrator.model.training import QUANTISED, Dtype, Precision, Training
from orchestrator.strategy.graphs import modules_of
from orchestrator.strategy.spec import RECOMPUTE_MODULES, Candidate, Dispatcher, Mesh, Recompute, Strategy, ZeroStage
from orchestrator.words.terms import SHORT_TYPES
from tests.validation import layout, networks, uneven
from tests.validation.engines import ENGINES, printed_as
from tests.validation.engines.engine import MeasuredEngine, MemoryOf
from tests.validation.fine_tuned import exchanged_over, lora_of, memory_unit, mixed_lengths, with_outputs_exchanged
from tests.validation.mixtures import IMAGES, golden, hybrid_of, with_shape
from tests.validation.models import T5_DECODER_LENGTH, architecture_of, measured_time
from tests.validation.releases import as_it_ran, recipe_of
from tests.validation.rows import SkipError, number, whole
from tests.validation.runs import NVFP4, ExpertsRun, MemoryKind, Run, Unusable

COLUMNS = ("run_id", "num_gpus", "status", "tp", "pp", "micro_batch_size", "global_batch_size")
"""A CSV without these is no table of runs (the folder also holds other measurements)."""

NEMO_INTERLEAVE = 6
"""Chunks a stage of GPT-3 175B in NVIDIA's published configurations (NeMo and MLPerf)."""


def load(where: str | Path) -> tuple[list[Run], list[Unusable]]:
    """Every row of a CSV, or of the CSVs of a folder. Raises InputError where there is no table of runs."""
    path = Path(where)
    if not path.exists():
        raise InputError("runs", where, "no such file or folder")
    tables: dict[str, list[dict[str, str]]] = {}
    for file in sorted(path.glob("*.csv")) if path.is_dir() else [path]:
        rows = _with_settings(_rows(file), file.parent / SETTINGS)
        missing = sorted({*COLUMNS} - (rows[0].keys() if rows else set()))
        if not missing:
            tables[file.stem] = rows
        elif not path.is_dir():
            raise InputError("runs", where, f"is not a table of runs: it lacks {', '.join(missing)}")
    if not tables:
        raise InputError("runs", where, "holds no CSV of runs")
    found = [run for table, rows in tables.items() for run in read_rows(table, rows)]
    return [run for run in found if isinstance(run, Run)], [run for run in found if isinstance(run, Unusable)]


@cache
def _model(
    architecture: Architecture, seq_length: int, decoder_seq_length: int | None, engine: str, lora: Lora | None, exchanged: int
) -> ModelSpec:
    """One value for all rows of a model, its adapters and an engine, so that they share a cost model."""
    images = None if architecture.vision is None else IMAGES
    model = with_tower_first(describe(architecture, seq_length, decoder_seq_length, images))
    layers = ENGINES[engine].layers
    model = model if layers is None else layers(model)
    if lora is None or ENGINES[engine].adapts != "megatron-core":
        return model
    return with_outputs_exchanged(with_lora(model, lora, modules=False), exchanged)


SHARED: Final[dict[Any, Any]] = {}
"""Values that rows have in common, so that equal ones are one."""


def _rows(file: Path) -> list[dict[str, str]]:
    try:
        with file.open(newline="", encoding="utf-8") as stream:
            return [{key: value or "" for key, value in row.items() if key is not None} for row in csv.DictReader(stream)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError("runs", file, f"can't be read: {error}") from None


SETTINGS: Final = "bridge_perf_settings.csv"
"""The file beside a table that says by run_id what the release's own recipe sets where the table prints nothing."""


ACTIVATIONS, SOME_ACTIVATIONS = "activations", "activations of some layers"
"""What a row says of its offload: those of all layers but the last, or of as many as a recipe names."""


def _with_settings(rows: list[dict[str, str]], file: Path) -> list[dict[str, str]]:
    """The rows with what their recipe sets in the columns that they leave blank, where recipe and table agree on the rest."""
    if not rows or not file.is_file() or "run_id" not in rows[0]:
        return rows
    settings = {row["run_id"]: row for row in _rows(file) if not row.get("differs") and row.get("recompute_effective")}
    return [with_settings(row, settings.get(row.get("run_id", "")) or recipe_of(row)) for row in rows]


def with_settings(row: dict[str, str], settings: dict[str, str] | None) -> dict[str, str]:
    """The row with what `settings` say where it is blank. A recipe on Megatron's FSDP is another engine, of which later pages print
    nothing; one that offloads activations prints it nowhere either."""
    if settings is None:
        return row
    same = ("etp", "a2a_overlap", "delay_wgrad", "shared_expert_overlap", "capacity_factor", "pipeline_layout")
    more = {name: settings.get(name, "") for name in same} | as_printed(settings)
    more["offload"] = SOME_ACTIVATIONS if settings.get("cpu_offload_layers") else ""
    said = {**row, **{name: row.get(name) or value for name, value in more.items()}}
    if settings.get("fsdp") == "1" and "fsdp" not in row.get("engine", "").lower():
        said["engine"] = "megatron-fsdp (Megatron-Bridge)"
    return said


def as_printed(recipe: dict[str, str]) -> dict[str, str]:
    """What a recipe sets, as tables of runs print it: recompute, the tokens' dispatcher, CUDA graphs, the routers."""
    kind = recipe.get("dispatcher", "").replace("unset", "alltoall")
    return {
        "recompute": recipe.get("recompute_effective", ""),
        "dispatcher": recipe.get("flex_backend", "") if kind == "flex" else kind,
        "cuda_graph": ": ".join(text for text in (recipe.get("cuda_graph", ""), recipe.get("cuda_graph_scope", "")) if text),
        "routing": {"1": "forced balance", "0": "real router"}.get(recipe.get("forced_balance", ""), ""),
    }


def read_rows(table: str, rows: Iterable[dict[str, str]]) -> Iterator[Run | Unusable]:
    """The runs of one table, in order; a row that can't be used comes with its reason."""
    for row in rows:
        try:
            yield read_row(table, row)
        except SkipError as skip:
            yield Unusable(table=table, run_id=row.get("run_id", ""), why=str(skip))


def read_row(table: str, row: dict[str, str], *, measured: bool = True) -> Run:
    """The run of one row; `measured`: whether it must have a time or a peak. Raises SkipError with the reason."""
    row = with_shape(as_it_ran(row))
    _check_comparable(row)
    if table == "megatron_lm_functional_goldens" and row.get("num_experts"):
        row = golden(row)
    key, engine = gpu_of(row), engine_of(row)
    lora = lora_of(row, engine)
    precision, label = precision_of(row)
    if precision not in networks.gpu(key).peak_flops:
        raise SkipError(f"{key} has no {precision}")
    if engine.variant is not None:
        engine = ENGINES[engine.variant(row, precision)]
    if engine.cost_in is not None:
        engine = replace(engine, cost=engine.cost_in(row))
    architecture = uneven.routed(architecture_of(table, row), row)
    zero_stage = zero_of(engine, row)
    degrees = degrees_of(row, engine, architecture, zero_stage)
    training = training_of(row, engine, architecture, precision, lora, degrees.global_batch_size)
    recompute, share = recompute_of(row)
    strategy = strategy_of(row, engine, degrees, zero_stage, recompute, training.grad_reduce_dtype)
    candidate = Candidate(
        engine=engine.name,
        strategy=strategy,
        micro_batch_size=degrees.micro_batch_size,
        num_microbatches=degrees.num_microbatches,
        vpp=degrees.vpp,
        schedule="interleaved" if degrees.vpp > 1 else engine.schedule,
    )
    try:
        model = _model(architecture, training.seq_length, training.decoder_seq_length, engine.name, lora, exchanged_over(table, degrees.tp))
    except (KeyError, ValueError, OverflowError) as error:
        raise SkipError(f"model: {error}") from None
    split = split_of(row, engine, architecture, model, degrees)
    kind = row.get("peak_memory_kind", "")
    seen = seen_of(table, row, engine, architecture, training, degrees)
    if measured and row["status"] == "ok" and seen.time_s is None and seen.memory_bytes is None:
        raise SkipError("neither time nor memory can be compared")
    place = networks.cluster(table, key, degrees.num_gpus, whole(row, "gpus_per_node", 8), interconnect_of(row), tests_fine_tuning(row))
    return Run(
        table=table,
        run_id=row["run_id"],
        sweep_id=row.get("sweep_id") or table,
        traits=engine.traits,
        engine=engine,
        gpu=key,
        precision=label,
        kind="moe" if row.get("num_experts") else "dense",
        model=model,
        training=SHARED.setdefault(training, training),
        cluster=SHARED.setdefault(place, place),
        candidate=candidate,
        stages=layout.stages_of(
            model, split.counts, pp=degrees.pp, vpp=degrees.vpp, recompute=recompute, full_layers=share, head=split.head
        ),
        illegal=split.illegal,
        experts=experts_of(row),
        time_s=seen.time_s,
        memory_bytes=seen.memory_bytes,
        memory_of=memory_of(table, engine, kind),
        memory_kind=kind_of_memory(kind),
        fits=seen.fits,
    )


def _check_comparable(row: dict[str, str]) -> None:
    """Raises SkipError for a run that failed, or of which the source says something that no price is for."""
    status = row.get("status", "")
    if status not in ("ok", "oom", "crashed/oom"):
        raise SkipError(f"status {status or 'blank'}")
    said = f"{row.get('notes', '')} {row.get('model_name', '')} {row.get('sweep_id', '')}"
    known = hybrid_of(row.get("model_name", "")) is not None
    for word, why in DOUBTFUL:
        if word in said and not (why is FROZEN and row.get("task") == "lora") and not (why is HYBRID and known):
            raise SkipError(why)


def gpu_of(row: dict[str, str]) -> str:
    """The catalog's name of the GPU."""
    key = networks.gpu_key(row.get("gpu", ""))
    if key is None:
        raise SkipError(f"GPU {row.get('gpu') or 'not stated'} is not known")
    return key


def engine_of(row: dict[str, str]) -> MeasuredEngine:
    """The engine by the name that the source prints."""
    engine = printed_as(row.get("engine", ""))
    if engine is None:
        raise SkipError(f"engine {row.get('engine') or 'not stated'} has no traits")
    return engine


class Degrees(NamedTuple):
    """How a run was divided: ranks along each axis, and the batch in samples."""

    num_gpus: int
    tp: int
    pp: int
    cp: int
    dp: int
    vpp: int
    ep: int
    etp: int
    micro_batch_size: int
    global_batch_size: int

    @property
    def num_microbatches(self) -> int:
        return self.global_batch_size // (self.micro_batch_size * self.dp)


def degrees_of(row: dict[str, str], engine: MeasuredEngine, architecture: Architecture, zero_stage: ZeroStage) -> Degrees:
    """The degrees of a row, all of which divide what they must. Where no number of GPUs is printed the batch is what fills a pipeline."""
    tp, pp, cp, vpp, ep = (whole(row, "tp"), whole(row, "pp"), whole(row, "cp", 1), whole(row, "vpp", 1), whole(row, "ep", 1))
    etp = whole(row, "etp", 1) if row.get("num_experts") else 1
    if row.get("num_experts") and not row.get("ep") and zero_stage == 3:
        raise SkipError("ep is not stated, which says what FSDP shards of the experts")
    num_gpus = world_of(row, tp * pp * cp, zero_stage)
    if num_gpus % (tp * pp * cp):
        raise SkipError(f"tp x pp x cp = {tp * pp * cp} does not divide num_gpus={num_gpus}")
    dp = num_gpus // (tp * pp * cp)
    if row.get("dp") and row.get("num_gpus") and whole(row, "dp") != dp:
        raise SkipError(f"dp={row['dp']} is not num_gpus / (tp x pp x cp) = {dp}")
    mbs = whole(row, "micro_batch_size")
    memory_only_batch = mbs * dp * pp  # enough micro-batches for the first stage to hold its full share
    gbs = whole(row, "global_batch_size", memory_only_batch)
    if not row.get("num_gpus") and gbs % (mbs * dp):
        gbs = memory_only_batch
    if gbs % (mbs * dp):
        raise SkipError(f"micro_batch_size x dp = {mbs * dp} does not divide global_batch_size={gbs}")
    if dp * tp * cp % (ep * etp):
        raise SkipError(f"ep x etp = {ep * etp} does not divide tp x cp x dp = {tp * cp * dp}")
    for name, count in (("num_attention_heads", architecture.num_attention_heads), ("ffn_hidden_size", architecture.ffn_hidden_size)):
        if count % tp:
            raise SkipError(f"tp={tp} does not divide {name}={count}")
    turns = gbs // (mbs * dp) % pp == 0
    if engine.name == "nemo" and not row.get("vpp") and pp > 1 and architecture.name.startswith("GPT-3") and turns:
        vpp = NEMO_INTERLEAVE
    return Degrees(num_gpus, tp, pp, cp, dp, vpp if pp > 1 else 1, ep, etp, mbs, gbs)


def training_of(
    row: dict[str, str], engine: MeasuredEngine, architecture: Architecture, precision: Precision, lora: Lora | None, batch: int
) -> Training:
    """What decides a run's convergence; `batch`: samples of all replicas together."""
    reduce_dtype: Dtype = "bf16" if "MP Mode=PURE" in row.get("notes", "") else engine.reduce_dtype
    printed = GRADIENTS.get(row.get("grad_dtype", ""))
    training = Training(
        global_batch_size=batch,
        seq_length=whole(row, "seq_length"),
        decoder_seq_length=T5_DECODER_LENGTH if architecture.family == "t5" else None,
        precision=precision,
        fp8_recipe="blockwise" if "blockwise" in row.get("precision", "").lower() else None,
        grad_reduce_dtype=printed or reduce_dtype,
        grad_accum_dtype=printed or engine.accumulate_dtype,
        lora=lora,
        images=None if architecture.vision is None else IMAGES.count,
        image_tokens=None if architecture.vision is None else IMAGES.tokens,
    )
    return with_states(training, row.get("optimizer", ""))


GRADIENTS: Final[dict[str, Dtype]] = {"bf16": "bf16", "fp32": "fp32"}
"""What the column of the gradients' type says."""
STATES: Final = re.compile(r"(\w+)\+(\w+)\+(\w+)")
"""Dtypes of the master weights and both moments, as they are printed where the precision-aware optimizer is on."""


def with_states(training: Training, text: str) -> Training:
    """The training with the precision-aware optimizer where a source prints its dtypes, else as it was. Raises SkipError for a dtype that
    Megatron's has not.

    >>> plain = Training(global_batch_size=8, seq_length=64)
    >>> with_states(plain, "adam, states float32+bfloat16+uint8").exp_avg_sq_dtype, with_states(plain, "adam, states fp32") == plain
    ('fp8', True)
    """
    found = STATES.search(text)
    if found is not None:
        first, second = found.group(2), found.group(3)
    elif "precision aware" in text and "bf16 gradients and moments" in text:
        first, second = "bfloat16", "bfloat16"
    else:
        return training
    for name in (first, second):
        if name not in SHORT_TYPES:
            raise SkipError(f"optimizer={text}: {name} is none of {', '.join(SHORT_TYPES)}")
    moments: list[Any] = [SHORT_TYPES[name] for name in (first, second)]
    return replace(training, precision_aware_optimizer=True, exp_avg_dtype=moments[0], exp_avg_sq_dtype=moments[1])


UNFUSED: Final = "moe_permute_fusion=false"
"""What notes say of a run whose tokens were permuted by Megatron's own kernels."""


def strategy_of(
    row: dict[str, str], engine: MeasuredEngine, degrees: Degrees, zero_stage: ZeroStage, recompute: Recompute, reduce_dtype: Dtype
) -> Strategy:
    """The mesh and the options that a row says, or that are its engine's own where it says none."""
    notes, said = row.get("notes", ""), row.get("sequence_parallel", "")
    shard, ranks = whole(row, "zero_shard_size", degrees.dp * degrees.cp), degrees.dp * degrees.cp
    overlaps = bool(experts_of(row).overlaps)
    return Strategy(
        mesh=Mesh(tp=degrees.tp, cp=degrees.cp, dp=degrees.dp, pp=degrees.pp, ep=degrees.ep, etp=degrees.etp),
        zero_stage=zero_stage,
        zero_shard_size=shard if shard < ranks else None,
        sequence_parallel=degrees.tp > 1 and (said.startswith("yes") or (not said and engine.sequence_parallel)),
        recompute=recompute,
        offload_optimizer="offload" in row.get("engine", "") or any(words in notes for words in OFFLOADED),
        grad_reduce_dtype=reduce_dtype,
        offload_activations=row.get("offload") == ACTIVATIONS,
        overlap_grad_reduce="every overlap off" not in notes,
        overlap_param_gather=not any(words in notes for words in ("every overlap off", "parameter gather not overlapped")),
        moe_token_dispatcher_type=dispatcher_of(row, engine),
        overlap_moe_expert_parallel_comm=overlaps,
        delay_wgrad_compute=overlaps and row.get("delay_wgrad") == "1",
        moe_permute_fusion=UNFUSED not in notes,  # which recipes of Bridge have, and no row says not to
        cp_comm_type="a2a" if "cp a2a" in row.get("flash_attention", "") else engine.cp_comm_type,
        **graphs_of(row),
    )


def graphs_of(row: dict[str, str]) -> dict[str, Any]:
    """A row's CUDA graphs as options of a strategy; what a source doesn't say is none.

    >>> graphs_of({"cuda_graph": "transformer_engine: attn+moe_router"}), graphs_of({"cuda_graph": "local: full_iteration"})
    ({'cuda_graph_impl': 'transformer_engine', 'cuda_graph_modules': 'attn+moe_router'}, {'cuda_graph_impl': 'full_iteration'})
    """
    impl, _, modules = (part.strip().replace(" ", "_") for part in row.get("cuda_graph", "").lower().partition(":"))
    if "full_iteration" in (impl, modules):
        return {"cuda_graph_impl": "full_iteration"}
    if impl in ("", "none"):
        return {}
    return {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": modules_of(filter(None, modules.split("+")))}


class Split(NamedTuple):
    """Layers of each chunk of the pipeline, as `layout.stages_of` takes them with `head`; and why no pipeline runs so, or nothing."""

    counts: Sequence[int]
    head: int | None
    illegal: str


def split_of(row: dict[str, str], engine: MeasuredEngine, architecture: Architecture, model: ModelSpec, degrees: Degrees) -> Split:
    """Which layers are on which stage: the engine's own split, the printed one, or as even as it goes."""
    body, chunks = sum(run.count for run in model.runs if run.layer.recomputable), degrees.pp * degrees.vpp
    if engine.split is not None:
        counts, head, complete = engine.split(architecture, body, degrees.pp)
        return Split(counts, head, "" if complete else f"{engine.name} leaves a stage of pp={degrees.pp} without a block")
    if body < chunks:
        raise SkipError(f"{body} layers on {chunks} pipeline chunks")
    if row.get("pipeline_layout"):
        return Split(layout.counts_of(row["pipeline_layout"], body, chunks), None, "")
    return Split((layout.before_prediction if architecture.mtp_num_layers else layout.even_counts)(body, chunks), None, "")


class Seen(NamedTuple):
    """What was measured: seconds of a step, bytes at the peak, whether the run fitted; None where it is not said, or can't be compared."""

    time_s: float | None
    memory_bytes: float | None
    fits: bool | None


def seen_of(
    table: str, row: dict[str, str], engine: MeasuredEngine, architecture: Architecture, training: Training, degrees: Degrees
) -> Seen:
    """What was measured in a row's run: seconds of a step, peak bytes, and whether it fitted, each None where no prediction may be held
    against it. Raises SkipError."""
    ok, notes, experts = row["status"] == "ok", row.get("notes", ""), bool(row.get("num_experts"))
    time_s = None
    if ok and row.get("global_batch_size") and row.get("num_gpus") and table != "megatron_lm_functional_goldens":
        time_s = measured_time(row, architecture, training.global_batch_size, training.seq_length, degrees.num_gpus)
    if training.lora is not None and mixed_lengths(row):
        raise SkipError("what the allocator reserved over samples of many lengths, in their order")
    recipe_unknown = not row.get("recompute") and ((experts and table.startswith("nvidia")) or NOT_PRINTED in notes)
    kept_unknown = (
        (not row.get("recompute") and not engine.says_recompute)
        or row.get("offload") in (ACTIVATIONS, SOME_ACTIVATIONS)  # in host memory, and how much of them is not said
        or recipe_unknown
        or (training.lora is not None and training.precision in QUANTISED)  # whether frozen weights are kept in 8 bits alone
    )
    if kept_unknown:
        return Seen(time_s, None, None)
    kind = row.get("peak_memory_kind", "")
    measured = "not a measured allocator peak" not in notes and CEILING not in kind
    memory = number(row, "peak_memory_gib") if ok and measured else None
    unit = memory_unit(kind)
    return Seen(time_s, memory * unit if memory else None, None if not ok and "NOT_OOM?" in notes else ok)


NOT_PRINTED: Final = "recompute/offload/cuda-graph settings not in table"
"""Words of Megatron-Bridge's pages, which print neither recompute nor whether its FSDP trained, where no recipe of the release says so."""
CEILING: Final = "from the text"
"""Words of a verification card's memory that is what its text promises ("peak allocated memory remains below 65 GiB/GPU", as it promises
"at most 20.50 seconds" of a step that took 20.15: examples/model_verification_cards/qwen3-30b-a3b/card.yaml), not what was measured."""
SLOW_DAYS: Final = ("Notes=05-26", "Notes=05-28")
"""Words of the days on which the same run of BigScience's Megatron-LM on V100 took 1.7 times as long as on the days before, between and
after (their runs with ZeRO-3 did not). Chosen after the times were seen, of runs kept out too: what is said of V100 rests on it."""


def tests_fine_tuning(row: dict[str, str]) -> bool:
    """Whether a row's run only showed that fine-tuning works (`networks.FUNCTIONAL`)."""
    return networks.FUNCTIONAL in row.get("notes", "") and row.get("task", "") not in ("", "pretrain")


def interconnect_of(row: dict[str, str]) -> str:
    """The printed network, and whether the day was one of a slow one."""
    slow = any(day in row.get("notes", "") for day in SLOW_DAYS) and "section=Megatron;" in row.get("notes", "")
    return row.get("interconnect", "") + (f" ({networks.SLOW_DAY})" if slow else "")


ALLOCATED: Final = ("max_memory_allocated", "torch peak", "peak allocated", "max allocated, rank")
"""How sources call what PyTorch's tensors held at most."""


def kind_of_memory(kind: str) -> MemoryKind:
    """What a printed peak counts. Where a source says nothing (Qwen's README) it is what the card shows of the process."""
    if any(words in kind for words in ("nvidia-smi", "as printed", "the sum printed")):
        return "process"
    return "allocated" if any(words in kind for words in ALLOCATED) else "reserved"


def memory_of(table: str, engine: MeasuredEngine, kind: str) -> MemoryOf:
    """The rank whose memory a source shows. BigScience's V100 peaks grow with the micro-batch without the logits of a last stage."""
    if "last rank" in kind:
        return "last"
    return "first" if "embedding" in kind or table == "bigscience_v100" else engine.memory_of


OFFLOADED: Final = ("offload=full CPU offload", "Opt Offl=Y")
"""How BigScience's notes say that optimizer states were on the host."""


FROZEN: Final = "LoRA: the base is frozen, and neither rank nor targets are stated"
HYBRID: Final = "hybrid Mamba model"
DOUBTFUL: tuple[tuple[str, str], ...] = (
    ("INCONSISTENT_BATCH", "batch is inconsistent (source's note)"),
    ('variant "gqa', "GQA8 variant, not comparable to the rest"),
    ("GQA8 variant", "GQA8 variant, not comparable to the rest"),
    ("async(no CUDA_LAUNCH_BLOCKING)=no", "run with CUDA_LAUNCH_BLOCKING"),
    ("may hang", "a run that hangs"),
    ("Fine-Tuning (LoRA)", FROZEN),
    ("_LoRA", FROZEN),
    ("_LORA", FROZEN),
    ("_lora", FROZEN),
    ("_SFT", "fine-tuning on packed sequences"),
    ("assumed for 20B", "settings assumed, not printed"),
    ("_resume", "the peak has the loading of a checkpoint in it"),
    ("grpo", "reinforcement learning, not pretraining"),
    ("mimo/", "vision-language model"),
    ("rowwise", "rowwise scaling"),
    ("is-hybrid-model", HYBRID),
    ("defer-embedding-wgrad-compute=True", "the vocabulary's weight gradients are made after the pipeline, which is not priced"),
    ("multi-latent-attention", "multi-latent attention"),
)
"""A word in notes, model or sweep, and why such a row is not priced."""


PRINTED_PRECISIONS: Final[tuple[tuple[str, Precision], ...]] = (
    *(("fp8", "fp8"), ("float8", "fp8"), ("bf16", "bf16"), ("bfloat16", "bf16"), ("fp16", "fp16"), ("float16", "fp16")),
)
"""Words of a printed precision, the first of which that stands in it says what it is."""


def precision_of(row: dict[str, str]) -> tuple[Precision, str]:
    """Compute precision and the label it is reported under ("not stated" where the source is silent)."""
    text = row.get("precision", "").lower()
    if "fp4" in text:
        if "bf16 tail" in text:
            raise SkipError("some layers are NVFP4, some bf16, and the source does not say how many")
        return "nvfp4", NVFP4
    if "_fp4.sh" in row.get("notes", ""):
        return "nvfp4", NVFP4  # the table says FP8, the run's own configuration NVFP4
    for word, precision in PRINTED_PRECISIONS:
        if word in text:
            return precision, precision
    if text:
        raise SkipError(f"precision {text} is not known")
    key = networks.gpu_key(row.get("gpu", "")) or ""
    if key.startswith("V100"):
        return "fp16", "not stated"
    return ("fp8" if "MLPerf" in row.get("source", "") else "bf16"), "not stated"  # NVIDIA's MLPerf recipes are FP8 where they say it


def zero_of(engine: MeasuredEngine, row: dict[str, str]) -> ZeroStage:
    script = re.search(r"ZeRO-([0-3]) by the script", row.get("notes", ""))
    text = script.group(1) if script else row.get("zero_stage", "").strip()
    if text in ("0", "1", "2", "3"):
        return int(text)  # type: ignore[return-value]
    if text:
        raise SkipError(f"zero_stage={text}")
    if engine.zero_stage is None:
        raise SkipError("zero_stage is not stated")
    return engine.zero_stage


def world_of(row: dict[str, str], model_parallel: int, zero_stage: int) -> int:
    """GPUs of a row's run: num_gpus; where it is blank and memory does not depend on it (nothing sharded over dp) one replica. A golden run
    with a sharded optimizer prints its steady allocation, from which dp follows: 6 + 12/dp bytes per parameter. Raises SkipError where it
    can't be told."""
    if row.get("num_gpus"):
        return whole(row, "num_gpus")
    if zero_stage == 0:
        return model_parallel
    if "steady mem-allocated" in row.get("peak_memory_kind", ""):
        return model_parallel * (GOLDEN_15B_DP if row.get("hidden_size") == "6144" else GOLDEN_DP)
    raise SkipError("num_gpus is not stated")


GOLDEN_15B_DP = 16
"""Data parallelism of gpt3_15b_8t_release: 12.3 GiB steady for 1.95e9 parameters a rank = 6.8 bytes each = 6 + 12/16."""
GOLDEN_DP = 2
"""Data parallelism of Megatron's functional tests, which run on one node of 8: most leave a size of 2."""


DISPATCHERS: Final[tuple[tuple[str, Dispatcher], ...]] = (
    ("allgather", "allgather"),
    ("hybridep", "flex"),
    ("deepep", "flex"),
    ("flex", "flex"),
)
"""How a source calls what it is in Megatron's words; all else is its default."""


def dispatcher_of(row: dict[str, str], engine: MeasuredEngine) -> Dispatcher:
    """How tokens reach their experts. Dropped ones by all-to-all: Megatron drops with no other dispatcher than that and allgather."""
    text = row.get("dispatcher", "").lower()
    if not row.get("num_experts") or (not text and "drop" in row.get("model_name", "")):
        return "alltoall"
    if not text:
        return engine.dispatcher
    return next((kind for word, kind in DISPATCHERS if word in text), "alltoall")


def experts_of(row: dict[str, str]) -> ExpertsRun:
    """How the experts of a row ran beside what a strategy says."""
    overlap, graph = row.get("a2a_overlap", "").lower(), row.get("cuda_graph", "").lower()
    notes = row.get("notes", "").lower()
    if not overlap and notes.startswith(("overlap on", "overlap off")):
        overlap = "1" if notes.startswith("overlap on") else "0"
    return ExpertsRun(
        overlaps=None if not overlap else overlap.startswith(("1", "yes")),
        graph="whole" if "full_iteration" in graph else "routers" if "moe_router" in graph else "none" if graph == "none" else None,
        balanced=None if not row.get("routing") else "real" not in row["routing"],
        capacity=bool(row.get("capacity_factor"))
        or any(word in row.get("routing", "") for word in ("capacity", "drop,"))
        or "static capacity" in row.get("dispatcher", "")
        or "tokendrop" in row.get("model_name", ""),
    )


def recompute_of(row: dict[str, str]) -> tuple[Recompute, float]:
    """The mode and the share of layers it applies to. torchtitan's selective modes recompute about half of the layers' matmuls."""
    text = row.get("recompute", "").lower()
    if text in ("", "none"):
        return "none", 1.0
    if text in ("full", "full uniform 1", "full (offloaded)"):
        return "full", 1.0
    modules = set(text.split("+"))
    if row.get("num_experts") and experts_of(row).overlaps:  # which computes no experts again (fine_grained_callables.py:509)
        modules -= {"moe"}
    elif row.get("num_experts"):  # `mlp` is the dense layers' alone, `moe` the experts' (mcore transformer_layer.py:445, moe_layer.py:155)
        modules -= {"mlp"} | ({"shared_experts"} if "moe" in modules else set())  # `moe` computes the shared ones again too
        modules = {"mlp" if module == "moe" else module for module in modules}
    mode = next((mode for mode, of in RECOMPUTE_MODULES.items() if set(of) == modules), "none" if not modules else None)
    if mode is not None:
        return mode, 1.0
    if text in ("selective (op)", "selective (every 2nd layer)"):
        return "full", 0.5
    if text in ("selective", "selective (core_attn)", "core_attn", "core_attn (implied)"):
        return "selective", 1.0
    block = re.fullmatch(r"full,? block,? (\d+)(?: layers)?", text)  # of each chunk the first so many layers
    if block:
        chunks = whole(row, "pp") * whole(row, "vpp", 1)
        return "full", min(1.0, int(block.group(1)) * chunks / whole(row, "num_layers"))
    raise SkipError(f"recompute {text} is not priced")
