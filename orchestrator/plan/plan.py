"""The plan: a frozen value, written to and read from JSON without loss. It holds all that translation and a worker need."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from typing import Annotated, Any, Final, Literal

import msgspec

from orchestrator.errors import InputError
from orchestrator.hardware.spec import Cluster
from orchestrator.key import Key, names
from orchestrator.model.spec import Architecture
from orchestrator.model.training import Training
from orchestrator.strategy.axes.dp import divides_states
from orchestrator.strategy.layout import FittedOn, LayerSpan, Prediction, Stage
from orchestrator.strategy.spec import OUTER_CHOICES, RECOMPUTE_ORDER, Candidate, Mesh, Options, Recompute, Schedule, Strategy, options_of
from orchestrator.values import Value, indented

VERSION = 1


class Reason(Value, frozen=True, kw_only=True):
    """Why a choice was not taken."""

    choice: str
    why: str


class Source(Value, frozen=True, kw_only=True):
    """A part of a blend: its samples come `weight` / (sum of weights) of the time. `path` as `RunSettings.data`."""

    weight: float
    path: str


LONG_S: Final = 3600.0
"""Seconds of a training beyond which it keeps its last step unasked, and is told how often to save."""


class RunSettings(Value, frozen=True, kw_only=True):
    """What a run does that changes no plan: its data, evaluation, checkpoints and monitors. A field is what its key says."""

    data: Annotated[str | None, Key(
        "data", "text, jsonl or a Megatron .bin/.idx prefix", default="Python's own sources, byte by byte", path=True,
        aliases=("data.train",))] = None  # fmt: skip
    blend: tuple[Source, ...] = ()
    """Weighted sources in place of `data`."""
    valid: Annotated[str | None, Key("data.valid", "a source to evaluate on", path=True)] = None
    """Path of a source to evaluate on; None: the second share of `split`, where it has one."""
    split: tuple[float, ...] = ()
    """Shares of each source, front to back, for training, evaluation and, left alone, a test; empty: all of it is trained on."""
    eval_every: Annotated[int, Key("train.eval_every", "between evaluations; 0: none", unit="steps", low=0, high=10**12)] = 0
    eval_steps: Annotated[int, Key("train.eval_steps", "of an evaluation, at most", unit="global batches", low=1, high=10**9)] = 10
    """Global batches of an evaluation, at most: no sample is taken twice."""
    tokenizer: Annotated[
        str | None, Key("tokenizer", "folder of a Hugging Face tokenizer", default="bytes", path=True, aliases=("data.tokenizer",))
    ] = None
    save_every: Annotated[int, Key("train.save_every", "between checkpoints; 0: none", unit="steps", low=0, high=10**12,
        default="0, or one at the end of a training of over an hour")] = 0  # fmt: skip
    async_save: Annotated[bool, Key("train.async_save", "checkpoints are written beside the training, from a copy in host memory")] = False
    keep_last: Annotated[int, Key("train.keep_last", "newest checkpoints to keep; 0: all", low=0, high=10**9)] = 0
    keep_every: Annotated[
        int, Key("train.keep_every", "between checkpoints that are kept for ever; 0: none", unit="steps", low=0, high=10**12)
    ] = 0
    trace_routing: Annotated[
        bool, Key("train.trace_routing", "write routing.jsonl, the tokens by expert of every step, which model.routing= takes (megatron)")
    ] = False
    step_timers: Annotated[bool, Key(
        "train.step_timers", "time two steps by cause on every rank: timers.jsonl, from which report= says after a run what was slow, and "
        "tune= learns")] = True  # fmt: skip
    resume: Annotated[
        str | None,
        Key("train.resume", "run or checkpoint folder to continue from; alone it brings its run's recipe", path=True, aliases=("resume",)),
    ] = None
    change: Annotated[
        tuple[str, ...], Key("train.change", "settings that shall differ from the checkpoint's: lr,steps", type=str, read=names)
    ] = ()
    init_from: Annotated[
        str | None, Key("model.init_from", "folder of a Hugging Face checkpoint to begin with", default="weights of the seed", path=True)
    ] = None
    export_to: Annotated[
        str | None, Key("model.export_to", "new folder for a Hugging Face checkpoint of the last weights", default="none", path=True)
    ] = None
    merge_lora: Annotated[
        bool, Key("lora.merge", "model.export_to gets the whole model with the adapters added to its weights, not peft's adapter alone")
    ] = False
    wandb: Annotated[
        dict[str, str],
        Key("wandb.project", "project of Weights & Biases", type=str),
        Key("wandb.entity", "entity of Weights & Biases", type=str),
        Key("wandb.name", "name of Weights & Biases", type=str),
    ] = msgspec.field(default_factory=dict)
    """Names of Weights & Biases: project, and as wanted entity and name; empty: not used."""
    step_timeout_s: Annotated[float, Key("train.step_timeout_s", "after which a part of a step has hung; 0: never", unit="s", low=0)] = (
        1800.0
    )
    """Seconds that a part of a step may last before the ranks are ended as hung; 0: for ever. By default what a collective may last."""


class Prices(Value, frozen=True, kw_only=True):
    """The user's own calibration as the plan was priced with it (cost.calibration): where its file was, what it was fitted on, its
    constants and interval."""

    source: str
    fitted_on: str
    constants: dict[str, float]
    interval: tuple[float, float] | None = None
    measured: FittedOn | None = None

    @property
    def own_peaks(self) -> bool:
        """Whether the memory margin is by measured peaks of the user's own runs, which alone have an interval."""
        return self.interval is not None and "memory_margin" in self.constants


class Plan(Options, frozen=True, kw_only=True):
    """A strategy for a model on a cluster, with the declared options (strategy/spec.py). The JSON is flat where people read it."""

    version: Literal[1] = 1
    engine: str
    world_size: int
    tp: int
    pp: int
    vpp: int
    microbatch_group_size_per_vp_stage: int | None = None
    cp: int
    ep: int
    etp: int
    dp: int
    micro_batch_size: int
    num_microbatches: int
    global_batch_size: int
    schedule: Schedule
    rank_order: tuple[str, ...]
    stages: tuple[Stage, ...]
    predicted: Prediction | None = None
    rejected: tuple[Reason, ...] = ()
    model: Architecture
    training: Training
    cluster: Cluster
    run: RunSettings = RunSettings()
    calibration: str = "datasheet"
    prices: Prices | None = None
    """The constants of a calibration that does not come with the package; None: one that does."""
    extra: dict[str, dict[str, Any]] = msgspec.field(default_factory=dict)
    """What reaches the engine unchanged: "megatron": {field or flag: value}, "ds": {"zero_optimization.overlap_comm": value}."""

    @property
    def prediction(self) -> Prediction:
        """The prediction of a plan that is priced. Raises ValueError for one that is not."""
        if self.predicted is None:
            raise ValueError("the plan has no prediction")
        return self.predicted

    @property
    def mesh(self) -> Mesh:
        return Mesh(tp=self.tp, cp=self.cp, dp=self.dp, pp=self.pp, ep=self.ep, etp=self.etp, order=self.rank_order)

    @property
    def strategy(self) -> Strategy:
        """The part that all layers share; `recompute` is the strongest that any layer uses."""
        used = {span.recompute for stage in self.stages for span in stage.layers}
        strongest: Recompute = max(used, key=RECOMPUTE_ORDER.index, default="none")
        return Strategy(mesh=self.mesh, recompute=strongest, grad_reduce_dtype=self.training.grad_reduce_dtype, **options_of(self))

    @property
    def optimizer_instances(self) -> int:
        """Copies of the states, each divided over `zero_shard_size` ranks (Megatron's --num-distributed-optimizer-instances); hpZ's second
        copy of the weights is none."""
        shared = self.zero_shard_size if self.zero_stage and divides_states(self.strategy) else None
        return self.dp * self.cp // shared if shared else 1

    @property
    def sample_multiple(self) -> int:
        """Tokens to a multiple of which each of the samples in a packed sequence is padded: Megatron cuts each of them into 2 cp chunks
        (core/utils.py, get_thd_batch_on_this_cp_rank). Ulysses cuts the sequence, and would do without."""
        return 2 * self.cp if self.cp > 1 else 1

    @property
    def candidate(self) -> Candidate:
        return Candidate(
            engine=self.engine,
            strategy=self.strategy,
            micro_batch_size=self.micro_batch_size,
            num_microbatches=self.num_microbatches,
            vpp=self.vpp,
            microbatch_group_size_per_vp_stage=self.microbatch_group_size_per_vp_stage,
            schedule=self.schedule,
        )

    def spans(self) -> Iterator[tuple[int, LayerSpan]]:
        """(stage, span) in the order in which a micro-batch meets them: chunk after chunk, stage after stage."""
        for chunk in range(self.vpp):
            for index, stage in enumerate(self.stages):
                for span in stage.chunk(chunk):
                    yield index, span


def chosen(candidate: Candidate) -> dict[str, Any]:
    """The fields of a plan that say what was chosen: every choice but recompute, which its stages have."""
    return {choice.name: choice.of(candidate) for choice in OUTER_CHOICES} | {
        "engine": candidate.engine,
        "world_size": candidate.mesh.world_size,
        "num_microbatches": candidate.num_microbatches,
    }


_KEYS = tuple(dict.fromkeys(("version", "engine", "world_size", *(choice.name for choice in OUTER_CHOICES), *Plan.__struct_fields__)))
"""Keys of plan.json in the order in which it has them."""


def to_json(plan: Plan) -> str:
    """The plan as indented JSON: what was chosen first, floats exact."""
    return indented({name: getattr(plan, name) for name in _KEYS})


def from_json(text: str | bytes, where: str = "plan") -> Plan:
    """Read a plan. Raises InputError that names the place in the file."""
    try:
        plan = msgspec.json.decode(text, type=Plan)
    except msgspec.MsgspecError as error:
        raise InputError("plan", where, f"is not a plan of version {VERSION}: {error}") from None
    return plan


def json_schema() -> dict[str, Any]:
    """The JSON Schema of plan.json, each choice with its declaration's text."""
    schema = msgspec.json.schema(Plan)
    properties = schema["$defs"]["Plan"]["properties"]
    for choice in OUTER_CHOICES:
        properties[choice.name]["description"] = choice.doc + (f" ({choice.unit})" if choice.unit else "")
    return schema


def schema_text() -> str:
    """`json_schema` as it is written beside every plan.json. Making it anew would take a start 20 ms, so that it is a file here; a test
    holds it to `json_schema`."""
    return files(__package__).joinpath("plan.schema.json").read_text()
