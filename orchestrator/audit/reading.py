"""What a configuration says, whatever its format: the model and the training as a recipe's keys, and what was chosen (`Setup`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import msgspec

from orchestrator.engines.deepspeed.capabilities import NAME as DEEPSPEED
from orchestrator.engines.megatron_deepspeed.capabilities import NAME as MEGATRON_DEEPSPEED
from orchestrator.engines.rules.rule import NEVER_TRIED, refused, rule
from orchestrator.strategy.capabilities import Rule, StateBytes
from orchestrator.strategy.spec import RANK_ORDER, Candidate, Options, Recompute
from orchestrator.strategy.workload import Workload
from orchestrator.values import Value
from orchestrator.words.terms import Kind, Table, decided, differs


class Setup(Options, frozen=True, kw_only=True):
    """What a configuration chooses, in the words of plans. dp follows from the GPUs, the number of micro-batches from the batch."""

    engine: str
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    microbatch_group_size_per_vp_stage: int | None = None
    cp: int = 1
    ep: int = 1
    etp: int = 1
    experts: bool = False
    """Whether the model has any: whose recompute has a word of its own in Megatron."""
    micro_batch_size: int = 1
    rank_order: tuple[str, ...] = RANK_ORDER
    recompute: Recompute = "none"
    recompute_layers: int | None = None
    """Layers of each chunk that are recomputed, from the first on, with recompute=full; None: all."""
    stage_recompute: tuple[tuple[Recompute, int | None], ...] | None = None
    """Mode and layers of each stage, where they differ; None: as the two above say."""
    layout: str | None = None
    """Megatron's layout string; None: as `first_layers` and `last_layers` say, and the rest evenly."""
    first_layers: int | None = None
    last_layers: int | None = None
    """Transformer layers of the first and the last stage; None: an even share."""
    ends_count: tuple[bool, bool] = (False, False)
    """Whether embedding and loss count as a layer where layers are divided evenly."""
    by_deepspeed_pipeline: bool = False
    """Whether DeepSpeed's PipelineModule runs the stages."""


DEEPSPEEDS: Final = frozenset(
    {"offload_needs", "offload_ulysses", "gad_mix", "hpz", "autotp_family", "autotp_host", "autotp_x", "ulysses_family", "packed_ulysses",
     "experts_autotp", "quantised_linears", "lora_tp", "lora_hpz", "lora_offload"}
)  # fmt: skip
"""Rules of DeepSpeed's engine, by id, that say nothing of torch's FSDP."""


fsdp_offload = refused(
    "fsdp_offload", "axolotl/utils/schemas/validation.py:1127 (check_fsdp_offload_w_8bit_optimizer)", "offload_optimizer",
    "eight_bit offload_optimizer", "FSDP has parameters and gradients on the host, and the kernels of optimizer={training.optimizer}, "
    "bitsandbytes', are a GPU's",
)  # fmt: skip


@rule("copies_alone", "accelerate/parallelism_config.py:336 (tp_size and cp_size beside dp_replicate_size)", "tp cp dp zero_stage")
def copies_alone(candidate: Candidate, _: Workload) -> str | None:
    mesh = candidate.mesh
    if candidate.engine != DEEPSPEED or candidate.strategy.zero_stage or mesh.dp == 1 or mesh.tp * mesh.cp == 1:
        return None
    return f"tp={mesh.tp} cp={mesh.cp} with dp={mesh.dp} copies of the model: accelerate has both beside shards alone, by DeepSpeed or FSDP"


others_adapters = refused("lora_experts", NEVER_TRIED, "ep", "ep lora",
                          "ep={mesh.ep} with lora.rank={lora.rank}: nobody has tried AutoEP with adapters")  # fmt: skip
"""In place of the engine's rule, which is of its own runs: other programs leave experts, whose weights are no linears, without adapters."""


@rule("fork_sequence_parallel", "bigscience-workshop/Megatron-DeepSpeed, megatron/arguments.py: has no such flag", "sequence_parallel")
def older_fork(candidate: Candidate, _: Workload) -> str | None:
    own = candidate.engine == MEGATRON_DEEPSPEED and candidate.strategy.sequence_parallel
    return "sequence_parallel: BigScience's Megatron-DeepSpeed has no such flag" if own else None


def axolotls_experts(ep: int, shards: int) -> Rule:
    """What Axolotl's expert parallelism asks for: groups of `ep` ranks beside `shards` parts of FSDP's that fill the GPUs between them."""

    @rule("axolotl_experts", "axolotl 067b021, integrations/expert_parallel/plugin.py:266-339, shard.py:192", "model tp cp dp")
    def check(candidate: Candidate, workload: Workload) -> str | None:
        mesh, said = candidate.mesh, f"expert_parallel_size={ep}"
        if mesh.tp > 1:
            return f"{said} with tensor_parallel_size={mesh.tp}: Axolotl has not both"
        if ep * shards != mesh.dp:
            beside = f" x context_parallel_size={mesh.cp}" if mesh.cp > 1 else ""
            return f"{said} x dp_shard_size={shards}{beside} must be the {mesh.dp * mesh.cp} GPUs"
        odd = (part.num_experts for part in workload.model.architecture.experts if part.num_experts % ep)
        return next((f"{said} does not divide the {experts} experts of a layer" for experts in odd), None)

    return check


class Reading(Value, frozen=True, kw_only=True):
    """A configuration as it was read. Nothing of it is left out: each setting is in one of these."""

    format: str
    """What the file is, in words."""
    keys: dict[str, Any]
    """The keys model.* and train.* of a recipe, and gpus where the file says how many."""
    weak: frozenset[str] = frozenset()
    """The keys that the file does not say: the format's defaults, or what was assumed."""
    setup: Setup
    accumulation: int | None = None
    """Micro-batches of a step, where the file says them in place of the batch."""
    steps: int | None = None
    """Micro-batches of a step that DeepSpeed counts where the file says the batch too: the three numbers must be one for the GPUs."""
    filled: str = ""
    """The setting that leaves the precision to others ("bf16.enabled": "auto"), so that a recipe's is taken; "": there is none."""
    following: frozenset[str] = frozenset()
    """Keys of gradients' types that the file does not say: they are of the precision, whoever says that."""
    divided: bool = False
    """Whether the micro-batch is the batch over `steps` and the ranks: DeepSpeed's own division where a file leaves it out."""
    added: tuple[Rule, ...] = ()
    """Rules of the file's own beside the engine's: of a batch that grows, or of another program."""
    states: StateBytes | None = None
    """What stage 0 holds of each parameter in 16 bits, where torch's data parallelism runs it on weights as they were loaded; None: as the
    engine has it."""
    elsewhere: dict[str, str] = msgspec.field(default_factory=dict)
    """Choices that a DeepSpeed configuration says which the file names, with their place there."""
    queues: str = ""
    """CUDA_DEVICE_MAX_CONNECTIONS as a script that starts Megatron-LM sets it; "": it does not."""
    missing: tuple[str, str] | None = None
    """(Key, value) of a DeepSpeed configuration that the file names and that is not here: without it nobody knows the ZeRO stage."""
    freezes: dict[str, bool] = msgspec.field(default_factory=dict)
    """Parts of a model that looks at images (train.freeze), and whether the file freezes them, where it says."""
    image_pixels: int | None = None
    """Pixels that an image has at most, for such a model; None: the file does not say."""
    image_tokens: int | None = None
    """Tokens that it has at most; None: the file does not say, or by its pixels."""
    model: str = ""
    """The model that the file names and does not describe; "" where it names none."""
    fsdp: bool = False
    """Whether torch's FSDP divides the states, for which prices of DeepSpeed's ZeRO stand: its rules don't."""
    copies: bool = False
    """Whether transformers' Trainer has a copy of the model on every rank, as the file has neither DeepSpeed nor FSDP."""
    longest: str = ""
    """The setting that says the longest sample that is let in, where samples keep their own lengths and nobody says those: every one is
    priced as that long. "" where all are."""
    otherwise: str = ""
    """What a step has beside supervised training, of which alone the price knows: no chance of running out and no change is told. ""
    where it is nothing."""
    logits_bytes: float | None = None
    """Bytes per logit at the loss's peak, where the program's loss is another than the engine's; None: the engine's."""
    broken: tuple[str, ...] = ()
    """Rules of the engine that the file breaks in what no plan says."""
    unknown: tuple[str, ...] = ()
    """Settings that nobody here knows."""
    unpriced: tuple[str, ...] = ()
    """Settings that take time or memory of which the prediction knows nothing."""
    slower: tuple[str, ...] = ()
    """Settings that take time of which the prediction knows nothing, and no memory: profiles, checks, garbage collection."""
    result: tuple[str, ...] = ()
    """Settings that change what is trained, and neither time nor memory: rates of some layers, first weights."""
    beside: tuple[str, ...] = ()
    """Settings that change neither: data, logs, checkpoints."""
    assumed: tuple[str, ...] = ()
    """What the file does not say, and what was taken."""

    @property
    def rules(self) -> tuple[Rule, ...]:
        """Rules that the file's own settings add to the engine's."""
        return (*self.added, *(rule for holds, rule in ((self.fsdp, fsdp_offload), (self.copies, copies_alone)) if holds))

    def divided_by(self, what: str) -> Reading:
        """The reading where something beside the file (`what`) divides the states over ranks: what it says of whole copies is left out."""
        if not self.copies and self.states is None:
            return self
        said = f"{what}: as DeepSpeed divides the states, with an fp32 copy of every weight that is trained"
        kept = [line for line in self.assumed if not line.startswith(OF_COPIES)]
        unpriced = tuple(one for one in self.unpriced if not one.startswith("torch_dtype"))
        return msgspec.structs.replace(self, states=None, copies=False, assumed=(*kept, said), unpriced=unpriced)

    def kept(self, rules: Iterable[Rule]) -> tuple[Rule, ...]:
        """The engine's rules that are the file's, and its own."""
        others = {others_adapters.id: others_adapters} if "lora.rank" in self.keys else {}
        return (*(others.get(rule.id, rule) for rule in rules if not (self.fsdp and rule.id in DEEPSPEEDS)), *self.rules)


READ: Final = (
    "a ds_config.json, accelerate's configuration, arguments of Hugging Face's Trainer, Megatron-Bridge's, NeMo's, NeMo-RL's or verl's "
    "YAML, or a shell script of Megatron-LM"
)
"""The formats, in words for an error."""
OF_COPIES: Final = ("no deepspeed and no fsdp", "weights are loaded in bf16", "torch_dtype=float32", "attn_implementation is not said")
"""How lines begin that are assumed of whole copies of the states."""


class Source(msgspec.Struct, frozen=True):
    """A file with its reading. `values`: its new values by path for a second setup in place of the first on so many GPUs, None where it has
    no place for them; `change`: its text with such values, None where they can't be said there."""

    text: str
    reading: Reading
    values: Callable[[Setup, Setup, int], Mapping[str, Any] | None]
    change: Callable[[Mapping[str, Any]], str | None]

    def edited(self, before: Setup, after: Setup, gpus: int) -> str | None:
        """Returns its text with the second setup in place of the first on so many GPUs; None: that can't be said there."""
        values = self.values(before, after, gpus)
        return None if values is None else self.change(values)


def differing(before: Setup, after: Setup) -> set[str]:
    """Fields in which two setups differ."""
    return {name for name in Setup.__struct_fields__ if getattr(before, name) != getattr(after, name)}


def changes(table: Table, before: Setup, after: Setup) -> dict[str, Any] | None:
    """New values of a file for another setup, by path; None: this table has no place for all that changes."""
    if not differing(before, after) <= {term.ours for term in table}:
        return None
    return {name: decided(table, name, after) for name in differs(table, before, after)}


def recipe_keys(said: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of a recipe, of what a table reads by a plan's attributes.

    >>> recipe_keys({"training.lr": 0.1, "model.num_layers": 4, "training.seed": 7, "tp": 2})
    {'train.lr': 0.1, 'model.num_layers': 4, 'seed': 7}
    """
    keys = {name.replace("training.", "train."): value for name, value in said.items() if "." in name}
    return {name.replace("train.seed", "seed"): value for name, value in keys.items()}


OFF: Final = (False, "no", "none", "NO", "NONE", "false")
"""Values of a setting that is not used."""
LISTS: Final[Mapping[Kind | None, str]] = {
    None: "unknown", "cost": "unpriced", "buffers": "unpriced", "time": "slower", "result": "result", "harmless": "beside"
}  # fmt: skip
"""The list of a Reading in which a setting is, by what it does; None: nobody knows."""
Lists = dict[str, tuple[str, ...]]
"""Settings by the list of a Reading in which they are."""


def listed(left: Iterable[tuple[str, Kind | None, Any]]) -> Lists:
    """The lists of a Reading, of settings that nothing else has: how each is said, what it does (None: nobody knows it), its value. One
    that costs is not priced, unless it is off."""
    lists: Lists = dict.fromkeys(LISTS.values(), ())
    for said, kind, value in left:
        lists[LISTS["harmless" if kind in ("cost", "buffers", "time") and value in OFF else kind]] += (said,)
    return lists
