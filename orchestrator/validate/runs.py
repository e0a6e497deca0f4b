"""Measured runs: a row of a table becomes what the cost model prices, "as it was run", or a reason why it can't be used.

The schema is that of `shared/measurements/README.md`: one CSV a source, the same columns everywhere, a blank is not stated. What a blank
stands for is decided here, by source, and only where the source's engine has one default; otherwise the row says what it lacks.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from math import ceil
from pathlib import Path
from typing import Final, Literal, NamedTuple

from orchestrator.errors import InputError
from orchestrator.hardware.spec import Cluster
from orchestrator.model.architecture import Run as LayerRun
from orchestrator.model.families import describe
from orchestrator.model.parts.experts import Experts
from orchestrator.model.parts.latent_attention import LatentAttention
from orchestrator.model.spec import Architecture, ModelSpec
from orchestrator.model.training import Dtype, Precision, Training
from orchestrator.strategy.layout import Stage
from orchestrator.strategy.spec import Candidate, Mesh, Recompute, Strategy, ZeroStage
from orchestrator.units import GIB
from orchestrator.validate import layout, networks

COLUMNS = ("run_id", "num_gpus", "status", "tp", "pp", "micro_batch_size", "global_batch_size")
"""A CSV without these is no table of runs (the folder also holds other measurements)."""

MEGATRON_VOCAB = 51200
"""GPT-2's 50257 padded to 128 x 8 and more, as the Megatron papers state."""
GPT2_VOCAB = 50257
MEGATRON_DROPOUT = 0.1
"""Megatron's default for hidden states and attention (arguments.py), which the functional goldens and BigScience's scripts leave as it
is: V100 peaks without recompute need dropout's masks and outputs (34 s b h + 5 a s^2 b a layer)."""
NEMOTRON_VOCAB = 256000
T5_DECODER_LENGTH = 128
"""Megatron's functional T5 tests: --decoder-seq-length 128."""
T5_VOCAB = 29056
"""BertWordPieceCase, padded, with extra ids."""
INTERNEVO_MULTIPLE = 256
"""InternEvo's MLP rounds its width up to a multiple of this (multiple_of): 8/3 of 4096 are 10922, as its table has it, and InternLM-7B's
11008 (its config.json)."""
NEMO_INTERLEAVE = 6
"""GPT-3 175B in NVIDIA's published configurations: 6 chunks a stage (NeMo and MLPerf)."""

ENGINES: tuple[tuple[str, str], ...] = (
    ("nanotron", "nanotron"),
    ("fsdp(composer)", "fsdp_composer"),
    ("torchtitan", "fsdp_torchtitan"),
    ("pytorch fsdp2 (nemo automodel)", "fsdp_automodel"),
    ("internevo fsdp", "internevo_fsdp"),
    ("internevo", "internevo"),
    ("hf trainer + deepspeed", "deepspeed"),
    ("deepspeed zero-3", "deepspeed"),
    ("megatron-deepspeed 3d", "megatron_deepspeed"),
    ("megatron-fsdp", "megatron_fsdp"),
    ("nemo", "nemo"),
    ("bridge", "nemo"),
    ("megatron-core", "megatron"),
    ("megatron-lm", "megatron_lm"),
    ("megatron", "megatron"),
)
"""A printed engine's name contains the words on the left; the traits on the right; the first that fits is taken."""

MemoryOf = Literal["first", "last", "max"]
MemoryKind = Literal["allocated", "reserved", "process"]


@dataclass(frozen=True, kw_only=True)
class Unusable:
    """A row that can't be priced, and why."""

    table: str
    run_id: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Run:
    """A measured run as the cost model prices it.

    `time_s`, `memory_bytes`: measured, None where not printed or not to be trusted. `memory_of`: the rank that was
    looked at; `memory_kind`: tensors alone, the allocator's reservation, or the whole process. `fits`: False for a run that went out of
    memory (or crashed, where the source can't tell), None where nothing is known.
    """

    table: str
    run_id: str
    sweep_id: str
    traits: str
    gpu: str
    precision: str
    kind: Literal["dense", "moe"]
    model: ModelSpec
    training: Training
    cluster: Cluster
    candidate: Candidate
    stages: tuple[Stage, ...]
    time_s: float | None
    memory_bytes: float | None
    memory_of: MemoryOf = "max"
    memory_kind: MemoryKind = "process"
    fits: bool | None = None
    illegal: str = ""
    """Why the engine can't run this at all, by its own rules; empty: it can."""

    @property
    def num_gpus(self) -> int:
        return self.candidate.mesh.world_size

    @property
    def group(self) -> tuple[str, int, int, str, int, str]:
        """Rows that may be ranked against each other."""
        return (
            self.sweep_id,
            self.num_gpus,
            self.training.seq_length,
            self.precision,
            self.training.global_batch_size,
            self.model.architecture.name + f"/{self.model.architecture.num_layers}/{self.model.architecture.num_attention_heads}",
        )


class _SkipError(Exception):
    """The reason why a row can't be used."""


def load(where: str | Path) -> tuple[list[Run], list[Unusable]]:
    """Every row of a CSV, or of the CSVs of a folder. Raises InputError where there is no table of runs."""
    path = Path(where)
    if path.is_dir():
        files = sorted(path.glob("*.csv"))
    elif path.is_file():
        files = [path]
    else:
        raise InputError("runs", where, "no such file or folder")
    runs: list[Run] = []
    unusable: list[Unusable] = []
    tables = 0
    for file in files:
        rows = _rows(file)
        if not rows or not set(COLUMNS) <= rows[0].keys():
            if path.is_file():
                missing = sorted(set(COLUMNS) - (rows[0].keys() if rows else set()))
                raise InputError("runs", where, f"is not a table of runs: it lacks {', '.join(missing)}")
            continue
        tables += 1
        for run in read_rows(file.stem, rows):
            if isinstance(run, Run):
                runs.append(run)
            else:
                unusable.append(run)
    if not tables:
        raise InputError("runs", where, "holds no CSV of runs")
    return runs, unusable


@cache
def _model(architecture: Architecture, seq_length: int, decoder_seq_length: int | None) -> ModelSpec:
    """One value for all rows of a model, so that they share a cost model."""
    return describe(architecture, seq_length, decoder_seq_length)


@cache
def _same_training(value: Training) -> Training:
    return value


@cache
def _same_cluster(value: Cluster) -> Cluster:
    return value


def _rows(file: Path) -> list[dict[str, str]]:
    try:
        with file.open(newline="", encoding="utf-8") as stream:
            return [{key: value or "" for key, value in row.items() if key is not None} for row in csv.DictReader(stream)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError("runs", file, f"can't be read: {error}") from None


def read_rows(table: str, rows: Iterable[dict[str, str]]) -> Iterator[Run | Unusable]:
    """Rows of one table in order."""
    for row in rows:
        try:
            yield read_row(table, row)
        except _SkipError as skip:
            yield Unusable(table=table, run_id=row.get("run_id", ""), why=str(skip))


def _int(row: dict[str, str], key: str, default: int | None = None) -> int:
    text = row.get(key, "").strip()
    if not text:
        if default is None:
            raise _SkipError(f"{key} is not stated")
        return default
    try:
        value = float(text)
    except ValueError:
        raise _SkipError(f"{key}={text} is no number") from None
    if value != int(value) or value < 1:
        raise _SkipError(f"{key}={text} is no positive whole number")
    return int(value)


def _float(row: dict[str, str], key: str) -> float | None:
    text = row.get(key, "").strip()
    try:
        value = float(text) if text else None
    except ValueError:
        raise _SkipError(f"{key}={text} is no number") from None
    if value is not None and not 0 < value < float("inf"):
        raise _SkipError(f"{key}={text} is not above zero")
    return value


def read_row(table: str, row: dict[str, str]) -> Run:
    """One row. Raises _SkipError with the reason."""
    status = row.get("status", "")
    notes = row.get("notes", "")
    if status not in ("ok", "oom", "crashed/oom"):
        raise _SkipError(f"status {status or 'blank'}")
    said = f"{notes} {row.get('model_name', '')} {row.get('sweep_id', '')}"
    for word, why in DOUBTFUL:
        if word in said:
            raise _SkipError(why)
    key = networks.gpu_key(row.get("gpu", ""))
    if key is None:
        raise _SkipError(f"GPU {row.get('gpu') or 'not stated'} is not known")
    traits = traits_name_of(row.get("engine", ""))
    precision, label = precision_of(row)
    if precision not in networks.gpu(key).peak_flops:
        raise _SkipError(f"{key} has no {precision}")
    if traits == "megatron" and any(
        word in notes for word in ("attention-backend=unfused", "attention-backend=local", "transformer-impl=local")
    ):
        traits = "megatron_unfused"
    elif traits == "megatron" and "cross-entropy-loss-fusion=True" in notes:
        traits = "megatron_fused_loss"
    if traits == "deepspeed" and row.get("flash_attention", "").startswith("no"):
        traits = "deepspeed_unfused"
    if traits == "deepspeed" and "liger" in row.get("engine", "").lower():
        traits = "deepspeed_tiled_loss"
    architecture = architecture_of(table, row)
    seq_length = _int(row, "seq_length")
    decoder = T5_DECODER_LENGTH if architecture.family == "t5" else None
    tp, pp, cp, vpp, ep = (_int(row, "tp"), _int(row, "pp"), _int(row, "cp", 1), _int(row, "vpp", 1), _int(row, "ep", 1))
    per_node = _int(row, "gpus_per_node", 8)
    known_time = status == "ok" and bool(row.get("global_batch_size")) and bool(row.get("num_gpus"))
    zero_stage = zero_of(traits, row)
    num_gpus = world_of(row, traits, tp * pp * cp, zero_stage)
    if num_gpus % (tp * pp * cp):
        raise _SkipError(f"tp x pp x cp = {tp * pp * cp} does not divide num_gpus={num_gpus}")
    dp = num_gpus // (tp * pp * cp)
    if row.get("dp") and row.get("num_gpus") and _int(row, "dp") != dp:
        raise _SkipError(f"dp={row['dp']} is not num_gpus / (tp x pp x cp) = {dp}")
    mbs = _int(row, "micro_batch_size")
    memory_only_batch = mbs * dp * pp  # enough micro-batches for the first stage to hold its full share
    gbs = _int(row, "global_batch_size", memory_only_batch)
    if not row.get("num_gpus") and gbs % (mbs * dp):
        gbs = memory_only_batch
    if gbs % (mbs * dp):
        raise _SkipError(f"micro_batch_size x dp = {mbs * dp} does not divide global_batch_size={gbs}")
    microbatches = gbs // (mbs * dp)
    if traits == "nemo" and not row.get("vpp") and pp > 1 and architecture.name.startswith("GPT-3") and microbatches % pp == 0:
        vpp = NEMO_INTERLEAVE
    if pp == 1:
        vpp = 1
    recompute, share = recompute_of(row)
    sequence_parallel = tp > 1 and (
        row.get("sequence_parallel", "").startswith("yes") or (not row.get("sequence_parallel") and traits in SP_DEFAULT)
    )
    reduce_dtype: Dtype = "bf16" if traits in BF16_REDUCE or "MP Mode=PURE" in notes else "fp32"
    if traits == "megatron_deepspeed" and precision == "fp16":
        reduce_dtype = "fp16"
    elif traits == "megatron_deepspeed":
        traits = "megatron_deepspeed_bf16"
    training = Training(
        global_batch_size=gbs,
        seq_length=seq_length,
        decoder_seq_length=decoder,
        precision=precision,
        grad_reduce_dtype=reduce_dtype,
        grad_accum_dtype="bf16" if reduce_dtype == "bf16" and traits == "nemo" else "fp32",  # one buffer of one type
    )
    shard = _int(row, "zero_shard_size", dp * cp)
    strategy = Strategy(
        mesh=Mesh(tp=tp, cp=cp, dp=dp, pp=pp, ep=ep),
        zero_stage=zero_stage,
        zero_shard_size=shard if shard < dp * cp else None,
        sequence_parallel=sequence_parallel,
        recompute=recompute,
        offload_optimizer="offload" in row.get("engine", "") or any(words in notes for words in OFFLOADED),
        grad_reduce_dtype=reduce_dtype,
    )
    candidate = Candidate(
        engine=traits,
        strategy=strategy,
        micro_batch_size=mbs,
        num_microbatches=microbatches,
        vpp=vpp,
        schedule="interleaved" if vpp > 1 else DEEPSPEED_SCHEDULE if traits.startswith("megatron_deepspeed") else "1f1b",
    )
    try:
        model = _model(architecture, seq_length, decoder)
    except (KeyError, ValueError, OverflowError) as error:
        raise _SkipError(f"model: {error}") from None
    for name, count in (("num_attention_heads", architecture.num_attention_heads), ("ffn_hidden_size", architecture.ffn_hidden_size)):
        if count % tp:
            raise _SkipError(f"tp={tp} does not divide {name}={count}")
    body = sum(run.count for run in model.runs if run.layer.recomputable)
    if body < pp * vpp and traits != "nanotron":
        raise _SkipError(f"{body} layers on {pp * vpp} pipeline chunks")
    head, illegal = None, ""
    if traits == "nanotron":
        counts, head, complete = layout.nanotron_stages(body, *nanotron_costs(architecture), pp)
        illegal = "" if complete else f"nanotron leaves a stage of pp={pp} without a block"
    else:
        counts = layout.even_counts(body, pp * vpp)
    time_s = measured_time(row, architecture, gbs, seq_length, num_gpus) if known_time else None
    if table == "megatron_lm_functional_goldens":
        time_s = None
    memory = _float(row, "peak_memory_gib") if status == "ok" and "not a measured allocator peak" not in notes else None
    fits = None if status != "ok" and "NOT_OOM?" in notes else status == "ok"
    if not row.get("recompute") and traits not in KEEPS_ALL:
        memory = fits = None  # what is kept is not known
    if status == "ok" and time_s is None and memory is None:
        raise _SkipError("neither time nor memory can be compared")
    kind = row.get("peak_memory_kind", "")
    return Run(
        table=table,
        run_id=row["run_id"],
        sweep_id=row.get("sweep_id") or table,
        traits=traits,
        gpu=key,
        precision=label,
        kind="moe" if row.get("num_experts") else "dense",
        model=model,
        training=_same_training(training),
        cluster=_same_cluster(networks.cluster(table, key, num_gpus, per_node, interconnect_of(row))),
        candidate=candidate,
        stages=layout.stages_of(model, counts, pp=pp, vpp=vpp, recompute=recompute, full_layers=share, head=head),
        illegal=illegal,
        time_s=time_s,
        memory_bytes=memory * GIB if memory else None,
        memory_of=memory_of(table, traits, kind),
        memory_kind="process" if "nvidia-smi" in kind else "allocated" if "max_memory_allocated" in kind else "reserved",
        fits=fits,
    )


SLOW_DAYS: Final = ("Notes=05-26", "Notes=05-28")
"""On these the same run of BigScience's Megatron-LM on V100 took 1.7 times as long as on the days before, between and after (their
runs with ZeRO-3 did not). Chosen after the times were seen, of runs kept out too: what is said of V100 rests on it."""


def interconnect_of(row: dict[str, str]) -> str:
    """The printed network, and whether the day was one of a slow one."""
    slow = any(day in row.get("notes", "") for day in SLOW_DAYS) and "section=Megatron;" in row.get("notes", "")
    return row.get("interconnect", "") + (f" ({networks.SLOW_DAY})" if slow else "")


def memory_of(table: str, traits: str, kind: str) -> MemoryOf:
    """The rank whose memory a source shows. BigScience's V100 peaks grow with the micro-batch without the logits of a last stage."""
    if "last rank" in kind:
        return "last"
    return "first" if traits == "nanotron" or "embedding" in kind or table == "bigscience_v100" else "max"


OFFLOADED: Final = ("offload=full CPU offload", "Opt Offl=Y")
"""How BigScience's notes say that optimizer states were on the host."""
DEEPSPEED_SCHEDULE: Final = "deepspeed_1f1b"
"""Megatron-DeepSpeed runs its pipeline by DeepSpeed's instructions."""


DOUBTFUL: tuple[tuple[str, str], ...] = (
    ("INCONSISTENT_BATCH", "batch is inconsistent (source's note)"),
    ('variant "gqa', "GQA8 variant, not comparable to the rest"),
    ("GQA8 variant", "GQA8 variant, not comparable to the rest"),
    ("async(no CUDA_LAUNCH_BLOCKING)=no", "run with CUDA_LAUNCH_BLOCKING"),
    ("may hang", "a run that hangs"),
    ("Fine-Tuning (LoRA)", "LoRA: the base is frozen"),
    ("_LoRA", "LoRA: the base is frozen"),
    ("_LORA", "LoRA: the base is frozen"),
    ("_lora", "LoRA: the base is frozen"),
    ("_SFT", "fine-tuning on packed sequences"),
    ("assumed for 20B", "settings assumed, not printed"),
    ("_resume", "the peak has the loading of a checkpoint in it"),
    ("grpo", "reinforcement learning, not pretraining"),
    ("mimo/", "vision-language model"),
    ("rowwise", "rowwise scaling"),
    ("is-hybrid-model", "hybrid Mamba model"),
    ("defer-embedding-wgrad-compute=True", "the vocabulary's weight gradients are made after the pipeline, which is not priced"),
    ("multi-latent-attention", "multi-latent attention"),
)
"""A word in notes, model or sweep, and why such a row is not priced."""

SP_DEFAULT = frozenset({"nemo", "megatron_fsdp", "fsdp_torchtitan", "fsdp_automodel"})
"""Engines whose recipes turn sequence parallelism on with tp > 1."""
KEEPS_ALL = frozenset({"nemo", "megatron", "megatron_lm", "megatron_unfused", "megatron_fused_loss"})
"""Engines whose recipes say so where they recompute; elsewhere a blank leaves memory open."""
BF16_REDUCE = frozenset({"nemo", "fsdp_torchtitan_bf16"})
"""Engines whose published recipes reduce gradients in bf16 (NeMo: grad_reduce_in_fp32=False)."""
ZERO_DEFAULT: dict[str, ZeroStage] = {
    "nemo": 1,
    "megatron_deepspeed": 1,
    "megatron_lm": 0,
    "megatron": 0,
    "megatron_unfused": 0,
    "megatron_fused_loss": 0,
    "megatron_fsdp": 3,
    "deepspeed": 3,
    "deepspeed_unfused": 3,
    "deepspeed_tiled_loss": 3,
}
"""What a blank zero_stage stands for."""


def traits_name_of(engine: str) -> str:
    """The traits that prices an engine by its printed name. Raises _SkipError.

    >>> traits_name_of("fsdp(composer)"), traits_name_of("NeMo megatron-core"), traits_name_of("Megatron-DeepSpeed 3D (1F1B)")
    ('fsdp_composer', 'nemo', 'megatron_deepspeed')
    """
    lowered = engine.lower()
    for words, name in ENGINES:
        if words in lowered and "habana" not in lowered:
            return name
    raise _SkipError(f"engine {engine or 'not stated'} has no traits")


def precision_of(row: dict[str, str]) -> tuple[Precision, str]:
    """Compute precision and the label it is reported under ("not stated" where the source is silent)."""
    text = row.get("precision", "").lower()
    if "fp4" in text:
        raise _SkipError("NVFP4 is not priced")
    if "fp8" in text or "float8" in text:
        return "fp8", "fp8"
    if "bf16" in text or "bfloat16" in text:
        return "bf16", "bf16"
    if "fp16" in text or "float16" in text:
        return "fp16", "fp16"
    if text:
        raise _SkipError(f"precision {text} is not known")
    key = networks.gpu_key(row.get("gpu", "")) or ""
    if key.startswith("V100"):
        return "fp16", "not stated"
    return ("fp8" if "MLPerf" in row.get("source", "") else "bf16"), "not stated"  # NVIDIA's MLPerf recipes are FP8 where they say it


def zero_of(traits: str, row: dict[str, str]) -> ZeroStage:
    text = row.get("zero_stage", "").strip()
    if text in ("0", "1", "2", "3"):
        return int(text)  # type: ignore[return-value]
    if text:
        raise _SkipError(f"zero_stage={text}")
    if traits not in ZERO_DEFAULT:
        raise _SkipError("zero_stage is not stated")
    return ZERO_DEFAULT[traits]


def world_of(row: dict[str, str], traits: str, model_parallel: int, zero_stage: int) -> int:
    """num_gpus; where it is blank and memory does not depend on it (nothing sharded over dp) one replica. A golden run with a sharded
    optimizer prints its steady allocation, from which dp follows: 6 + 12/dp bytes per parameter."""
    if row.get("num_gpus"):
        return _int(row, "num_gpus")
    if zero_stage == 0:
        return model_parallel
    if "steady mem-allocated" in row.get("peak_memory_kind", "") and row.get("hidden_size") == "6144":
        return model_parallel * GOLDEN_15B_DP
    if "steady mem-allocated" in row.get("peak_memory_kind", ""):
        return model_parallel * GOLDEN_DP
    raise _SkipError("num_gpus is not stated")


GOLDEN_15B_DP = 16
"""gpt3_15b_8t_release: 12.3 GiB steady for 1.95e9 parameters a rank = 6.8 bytes each = 6 + 12/16."""
GOLDEN_DP = 2
"""Megatron's functional tests run on one node of 8; most leave a data-parallel size of 2."""


def recompute_of(row: dict[str, str]) -> tuple[Recompute, float]:
    """The mode and the share of layers it applies to. torchtitan's selective modes recompute about half of the layers' matmuls."""
    text = row.get("recompute", "").lower()
    if text in ("", "none"):
        return "none", 1.0
    if text == "full":
        return "full", 1.0
    if text in ("selective (op)", "selective (every 2nd layer)"):
        return "full", 0.5
    if text in ("selective", "selective (core_attn)"):
        return "selective", 1.0
    raise _SkipError(f"recompute {text} is not priced")


def architecture_of(table: str, row: dict[str, str]) -> Architecture:
    """The model that a row describes, with its family's facts."""
    name = row.get("model_name", "")
    lowered = name.lower()
    notes = row.get("notes", "")
    if row.get("num_experts"):
        return mixture_of(row)
    hidden = _int(row, "hidden_size")
    if lowered.startswith(("t5/", "t5")):
        family = "t5"
    elif lowered.startswith(("bert/", "bert")):
        family = "bert"
    elif "swiglu=True" in notes or any(word in lowered for word in ("llama", "qwen", "internlm")):
        family = "llama"
    else:
        family = "gpt"
    heads = _int(row, "num_attention_heads", heads_default(hidden) if "bigscience" in table else None)
    layers = _int(row, "num_layers", 12 if family == "t5" else None)
    golden = table == "megatron_lm_functional_goldens"
    nemotron = "nemotron4" in lowered or "15b_8t" in lowered
    golden_vocab = T5_VOCAB if family in ("t5", "bert") else NEMOTRON_VOCAB if nemotron else GPT2_VOCAB
    vocab = _int(row, "vocab_size", golden_vocab if golden else MEGATRON_VOCAB)
    tied = not ("untie-embeddings" in notes or nemotron)
    if family == "llama":
        tied = "nanotron" in row.get("engine", "") and _int(row, "ffn_hidden_size") < 10000
    rope = "position-embedding-type=rope" in notes or nemotron or family == "llama"
    megatrons = any(name in row.get("engine", "").lower() for name in ("megatron-lm", "megatron-deepspeed"))
    dropout = MEGATRON_DROPOUT if (golden and hidden <= 1024) or megatrons else 0.0
    mpt = "mosaic" in table
    kv = re.search(r"kv-channels=(\d+)", notes)
    groups = _int(row, "num_query_groups", heads)
    ffn = _int(row, "ffn_hidden_size", 4 * hidden)
    if "internevo" in row.get("engine", "").lower():
        ffn = ceil(ffn / INTERNEVO_MULTIPLE) * INTERNEVO_MULTIPLE
    display = "GPT-3 175B" if layers == 96 and hidden == 12288 and family == "gpt" else name
    return Architecture(
        family=family,
        name=display or "unnamed",
        num_layers=layers,
        decoder_num_layers=layers if family == "t5" else 0,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_query_groups=groups,
        kv_channels=int(kv.group(1)) if kv else None,
        ffn_hidden_size=ffn,
        vocab_size=vocab,
        max_position_embeddings=_int(row, "seq_length"),
        activation="swiglu" if family == "llama" else "gelu",  # squared ReLU keeps two tensors as GELU does
        normalization="RMSNorm" if family == "llama" else "LayerNorm",
        position_embedding="relative" if family == "t5" and "relative" in notes else "rope" if rope else "learned_absolute",
        add_bias_linear=family not in ("llama",) and not nemotron and not mpt,
        tie_embeddings=tied,
        hidden_dropout=dropout,
        attention_dropout=dropout,
        num_token_types=2 if family == "bert" else 0,
    )


class Mixture(NamedTuple):
    """What the tables leave out of a model of experts: widths of an expert and of the shared ones, layers without experts, a head's width,
    whether its attention is DeepSeek-V3's."""

    expert: int
    shared: int = 0
    dense_layers: int = 0
    kv_channels: int | None = None
    latent: bool = False


LATENT: Final = LatentAttention(q_lora_rank=1536, kv_lora_rank=512, qk_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
MIXTURES: Final = {
    "qwen3_30b_a3b": Mixture(768, kv_channels=128),
    "qwen3_moe_30b": Mixture(768, kv_channels=128),
    "qwen3_235b_a22b": Mixture(1536, kv_channels=128),
    "qwen3_moe_235b": Mixture(1536, kv_channels=128),
    "deepseek_v3": Mixture(2048, shared=2048, dense_layers=3, latent=True),
    "kimi_k2": Mixture(2048, shared=2048, dense_layers=1, latent=True),
    "gpt_oss_20b": Mixture(2880, kv_channels=64),
    "gpt_oss_120b": Mixture(2880, kv_channels=64),
    "mixtral_8x7b": Mixture(14336),
    "mixtral_8x22b": Mixture(16384),
    "grok1": Mixture(32768),
}
"""What the tables leave out of published models, by the name's beginning: their config.json (Hugging Face; xai-org/grok-1's run.py). The
windows of GPT-OSS's attention are not described."""


def plain_name(name: str) -> str:
    """Lower case, one underscore where words part.

    >>> plain_name("Qwen3 30B-A3B"), plain_name("DeepSeekV3 (w/ MTP)"), plain_name("DeepSeek V3 671B"), plain_name("Grok-1 314B")
    ('qwen3_30b_a3b', 'deepseek_v3_(w/_mtp)', 'deepseek_v3_671b', 'grok1_314b')
    """
    words = re.sub(r"[ _-]+", "_", name.lower())
    return words.replace("deepseekv3", "deepseek_v3").replace("grok_1", "grok1")


def mixture_of(row: dict[str, str]) -> Architecture:
    """A mixture of experts that is known by name."""
    name = row.get("model_name", "")
    facts = next((facts for words, facts in MIXTURES.items() if plain_name(name).startswith(words)), None)
    if facts is None:
        raise _SkipError(f"the experts of {name or 'this model'} are not described")
    heads, layers = _int(row, "num_attention_heads"), _int(row, "num_layers")
    experts = Experts(
        num_experts=_int(row, "num_experts"),
        topk=_int(row, "moe_router_topk"),
        ffn_hidden_size=facts.expert,
        shared_ffn_hidden_size=facts.shared,
    )
    dense = (LayerRun(layers=facts.dense_layers),) if facts.dense_layers else ()
    return Architecture(
        family="llama",
        name=name,
        num_layers=layers,
        hidden_size=_int(row, "hidden_size"),
        num_attention_heads=heads,
        num_query_groups=None if "MLA" in row.get("num_query_groups", "") else _int(row, "num_query_groups", heads),
        kv_channels=facts.kv_channels,
        ffn_hidden_size=_int(row, "ffn_hidden_size"),
        vocab_size=_int(row, "vocab_size"),
        max_position_embeddings=_int(row, "seq_length"),
        activation="swiglu",
        normalization="RMSNorm",
        position_embedding="rope",
        add_bias_linear=False,
        tie_embeddings=False,
        mixer=LATENT if facts.latent else None,
        pattern=(*dense, LayerRun(layers=layers - facts.dense_layers, feed_forward=experts)),
    )


def heads_default(hidden: int) -> int:
    """Heads where a BLOOM candidate's table prints none: 96 where it divides (the section's other rows), else 64."""
    return 96 if hidden % 96 == 0 else 64


def nanotron_costs(architecture: Architecture) -> tuple[float, float]:
    """Parameters of a layer and of the head, by which nanotron balances its stages (models/llama.py, get_block_compute_costs)."""
    hidden, width = architecture.hidden_size, architecture.num_attention_heads * architecture.head_dim
    return 4.0 * width * hidden + 3.0 * architecture.ffn_hidden_size * hidden, float(architecture.vocab_size * hidden)


def measured_time(row: dict[str, str], architecture: Architecture, gbs: int, seq: int, num_gpus: int) -> float | None:
    """Seconds a step: as printed, or from tokens/s, or from TFLOP/s through the formula that the source prints."""
    step = _float(row, "step_time_s")
    if step is not None:
        return step
    tokens = _float(row, "tokens_per_s_per_gpu")
    if tokens is not None:
        return gbs * seq / (tokens * num_gpus)
    tflops = _float(row, "tflops_per_gpu")
    if tflops is None:
        return None
    flops = printed_flops(row.get("flop_formula", ""), architecture, gbs, seq)
    return None if flops is None else flops / (tflops * 1e12 * num_gpus)


def printed_flops(formula: str, architecture: Architecture, gbs: int, seq: int) -> float | None:
    """FLOPs of a step as the source counts them; None: the formula is not known.

    Narayanan et al. 2021 (SC21): 96 B s L h^2 (1 + s/6h + V/16Lh), recompute included. BigScience's older scripts: 8 x parameters
    without embeddings x tokens.
    """
    layers, hidden = architecture.num_layers, architecture.hidden_size
    if "96BsLh^2(1+s/6h+V/16lh)" in formula or "Megatron formu" in formula:
        return 96.0 * gbs * seq * layers * hidden**2 * (1 + seq / (6 * hidden) + architecture.vocab_size / (16 * layers * hidden))
    if "older approx" in formula:
        return 8.0 * 12 * layers * hidden**2 * gbs * seq
    return None


HELD_OUT: tuple[tuple[str, str], ...] = (
    ("nanotron_ultrascale_playbook", "3B"),
    ("nanotron_ultrascale_playbook", "1B_n16nodes"),
    ("nanotron_ultrascale_playbook", "80B_n32nodes"),
    ("nanotron_ultrascale_playbook", "n64nodes"),
    ("bigscience_bloom176b_prequel", "h12288"),
    ("bigscience_bloom176b_prequel", "h13312"),
    ("bigscience_v100", "52B"),
    ("mosaicml_llm_foundry", "_3b_"),
    ("mosaicml_llm_foundry", "_70b_"),
    ("megatron_lm_readme_tables", "3.6B"),
    ("megatron_lm_readme_tables", "18B"),
    ("megatron_lm_readme_tables", "76B"),
    ("megatron_lm_readme_tables", "310B"),
    ("megatron_lm_readme_tables", "1T"),
    ("calculon_validation_seqsel", "530B"),
    ("mlperf_training_logs", "llama31_405b"),
    ("nvidia_dgxc_benchmarking", "405b"),
    ("nvidia_dgxc_benchmarking", "Nemotron4"),
    ("nvidia_megatron_bridge_perf", "LLAMA3_8B"),
    ("nvidia_megatron_bridge_perf", "DeepSeekV3 ("),
    ("nvidia_megatron_bridge_perf", "Qwen3_30B_a3B ("),
    ("nvidia_nemo_perf_docs", "70B"),
    ("internevo_train_performance", "n128"),
    ("internevo_train_performance", "n512"),
    ("torchtitan_benchmarks", "70B"),
    ("megatron_lm_functional_goldens", "15b"),
    ("megatron_lm_functional_goldens", "t5"),
)
"""Whole sweeps and whole models that no constant was fitted on: (table, a word of the sweep's or the model's name)."""


def held_out(run: Run) -> bool:
    """Whether this run is kept out of fitting."""
    text = f"{run.sweep_id} {run.model.architecture.name}"
    return any(table == run.table and word in text for table, word in HELD_OUT)
