"""A shell script, or one command line, that starts a program of Megatron-LM (or of Megatron-DeepSpeed): finds the command that trains,
reads its flags as the model, the training and the parallel layout (audit/megatron.py), and writes another layout's flags into the text."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Mapping, Sequence
from functools import cache, partial
from itertools import pairwise
from typing import Any, Final, NamedTuple

from msgspec.structs import replace

from orchestrator.audit import accelerate, fsdp, megatron, megatron_yaml, overrides, shell, trainer
from orchestrator.audit.document import File, Given, content_of, opened
from orchestrator.audit.hugging_face import beside_file, named_ds_config
from orchestrator.audit.reading import LISTS, READ, Reading, Setup, Source, older_fork
from orchestrator.audit.rollouts import NOT_PRICED
from orchestrator.audit.shell import Script, Span, Word
from orchestrator.engines.megatron_versions import RELEASES
from orchestrator.engines.passthrough import FIELD_OF, flags, older_flags
from orchestrator.errors import InputError, nearest
from orchestrator.key import MAX_DIGITS
from orchestrator.recipe.sources import read_text
from orchestrator.words import megatron as words
from orchestrator.words.terms import MOST, kind_in, kinds
from orchestrator.words.tools import BRIDGE, MS_SWIFT

PROGRAM: Final = re.compile(r"[\w./${}-]*\w+\.py$")
PROGRAM_WORD: Final = re.compile(r"pretrain_(gpt|bert|t5|mamba|vlm|ict|vision\w*|retro|llama\w*)")
STACK: Final = {"bert": "bert", "t5": "t5"}
"""Kinds of model by the program's name (pretrain_bert.py); others are decoders."""
LAUNCHER: Final = {
    "nodes": ("--nnodes", "--num_nodes", "--nodes", "-N", "--num_machines"),
    "ranks": ("--nproc_per_node", "--nproc-per-node", "--num_gpus", "--gpus-per-node", "--ntasks-per-node"),
    "all": ("--num_processes",),
}
"""Words of torchrun, deepspeed, accelerate and sbatch that say how many nodes there are, how many ranks on each, or how many ranks in
all."""
SEVERAL_WORDS: Final = ("step_batch_size_schedule", "rampup_batch_size")
"""Flags whose one value has blanks, also where a script's variables have lost its quotes."""
ENOUGH: Final = 3
"""A command with fewer known flags trains nothing."""
PROGRAMS: Final = ("trl", "llamafactory-cli")
"""Commands that take such a file and are no Python file."""


class Flag(NamedTuple):
    """A flag of the command line with its values, and where they stand."""

    name: str
    values: tuple[Word, ...]
    word: Word


class Line(NamedTuple):
    """The words that start the training: of the launcher, and of the program."""

    launcher: tuple[str, ...]
    flags: tuple[Flag, ...]
    program: str


def known_flags() -> dict[str, tuple[str, str]]:
    """Destination and kind by flag, of all releases that plans are made for, and of older programs."""
    found = dict(older_flags())
    for destination, (flag, kind) in flags().items():
        found.setdefault(flag, (destination, "list" if destination in SEVERAL_WORDS else kind))
    return found


@cache
def choices() -> dict[str, tuple[str, ...]]:
    """The words of which Megatron's parser takes one, by flag, those of all releases; without flags that some release gives any text."""
    kinds = [dict(flags(release.version).values()) for release in RELEASES]
    every = {flag: [of[flag] for of in kinds if flag in of] for flag in dict(flags().values())}
    together = {flag: "|".join(of) for flag, of in every.items() if all("|" in one for one in of)}
    return {flag: tuple(dict.fromkeys(several.split("|"))) for flag, several in together.items()}


def not_taken(line: Line) -> list[str]:
    """The flags at which Megatron's parser stops: their value is none of its choices, a sentence each."""
    said = [(flag.name, flag.values[0].text.strip("'\"")) for flag in line.flags if flag.values and flag.name in choices()]
    return [
        f"{name} {text}: Megatron's parser takes {', '.join(choices()[name])}"
        for name, text in said
        if text not in choices()[name] and not text.startswith("$") and "<" not in text
    ]


def read(text: str, name: str = "") -> Source:
    """The script with what it says and how it is edited. Raises InputError where nothing in it trains."""
    script = shell.read(text, name)
    try:
        return _source(script)
    except InputError as error:
        if not script.broken:
            raise
        raise InputError(error.key, error.value, f"{error.why}; {name or 'the script'}: {script.broken}") from None


def _source(script: Script) -> Source:
    """The source of a script that was read. Raises InputError where nothing in it trains."""
    if (words := overrides.found_in(script)) is not None:
        if (program := fsdp.program_of(words.content)) is not None:
            return _with_gpus(fsdp.read(words, program), words.command, script)
        tool = megatron_yaml.tool_of(words.content) or (BRIDGE if "--recipe" in " ".join(words.command) else None)
        if tool is not None:
            return _with_gpus(megatron_yaml.read(words, tool), words.command, script)
    if (words := overrides.swifts_flags(script)) is not None:
        by_megatron = words.command[-2].rpartition("/")[2] == "megatron"
        if (tool := MS_SWIFT if by_megatron else megatron_yaml.tool_of(words.content)) is not None:
            return _with_gpus(megatron_yaml.read(words, tool), words.command, script)
    if (words := words or overrides.trainers_flags(script) or _configured(script)) is not None:
        return _with_gpus(_under_accelerate(trainer.read(words), words.command, script.name), words.command, script)
    line = training_line(script, script.text)
    change = partial(_edited, script.text, line)
    return Source(script.text, reading_of(line, script), lambda before, after, gpus: megatron.flags_changed(before, after), change)


def _configured(script: Script) -> File | None:
    """The settings of a command whose program reads the Trainer's arguments from a file (`sft.py --config sft.yaml`), with its flags over
    them; None: there is no such command. Raises InputError where the file is not here."""
    for command in script.commands:
        texts = [one.text for one in command]
        for index, word in enumerate(command):
            file = word.text.removeprefix("--config=")
            behind = [text.rpartition("/")[2] for text in texts[:index]]
            starts = next((i for i, text in enumerate(behind) if text.endswith(".py") or text in PROGRAMS), None)
            of_a_flag = file.startswith("-") or (texts[index - 1].startswith("-") and texts[index - 1] != "--config")
            if starts is None or not file.endswith((".yaml", ".yml", ".json")) or of_a_flag:
                continue
            if (path := beside_file(file, script.name)) is None:
                raise InputError("audit", file, "is what the script's command reads, and is not here: put it there, or audit that file")
            content = content_of(read_text(path), str(path))
            if not trainer.is_trainer(content):
                continue
            said = overrides.flags_of(script, command[starts + 1 :], texts[: starts + 1])
            given = {key: value for key, value in said.content.items() if key != "config"}
            return said._replace(content=content | given)
    return None


def _under_accelerate(source: Source, launcher: Sequence[str], name: str) -> Source:
    """The source with the ZeRO stage, offload and ranks of the file that `accelerate launch --config_file` names. Raises InputError."""
    flags = [part for word in launcher for part in word.split("=", 1)]
    file = next((value for flag, value in pairwise(flags) if flag == "--config_file"), None)
    if file is None or "accelerate" not in {word.rpartition("/")[2] for word in launcher}:
        return source
    path = beside_file(file, name)
    if path is None:
        return replace(source, reading=replace(source.reading, missing=("--config_file", file)))
    of = accelerate.read(opened(path.read_text(), str(path))).reading
    chosen: dict[str, Any] = {field: getattr(of.setup, field) for field in ("zero_stage", "offload_optimizer", "zero_shard_size")}
    if of.setup.recompute == "full":
        chosen["recompute"] = "full"
    reading = source.reading.divided_by(file) if of.setup.zero_stage or of.missing else source.reading
    places = accelerate.places(of, path.name)
    if "recompute" in places and source.reading.setup.recompute == "full":
        places["recompute"] = f"gradient_checkpointing here and {places['recompute']}"
    said = [line for line in of.assumed if line.startswith("FSDP's")]
    reading = replace(reading, setup=replace(reading.setup, **chosen), missing=of.missing, fsdp=of.fsdp,
                      elsewhere=reading.elsewhere | places, assumed=(*reading.assumed, *said), unpriced=(*reading.unpriced, *of.unpriced),
                      keys={**reading.keys, **{k: v for k, v in of.keys.items() if k == "gpus"}})  # fmt: skip
    return replace(source, reading=reading)


def _with_gpus(source: Source, launcher: Sequence[str], script: Script) -> Source:
    """The source with the number of GPUs that the launcher says, where the settings don't."""
    gpus, keys = gpus_of(launcher, script), source.reading.keys
    begins = SWIFTS_COMMAND.search(source.text)  # behind it others may export what was trained
    said = {name: int(number) for name, number in ENVIRONMENT.findall(source.text[: begins and begins.end()])}
    if gpus is None and "NPROC_PER_NODE" in said:
        gpus = said.get("NNODES", 1) * said["NPROC_PER_NODE"]
    reading = replace(source.reading, keys=keys if gpus is None else {"gpus": gpus, **keys})
    if reading.image_pixels is None and (of_images := {*IMAGES} & {*said}):
        reading = replace(reading, **{IMAGES[name]: said[name] for name in of_images})
    return replace(source, reading=reading)


def training_line(script: Script, text: str) -> Line:
    """The command with most known flags; where none has enough, the flags of all variables together. Raises InputError."""
    known = known_flags()

    def flags_among(words: Sequence[Word]) -> int:
        return sum(word.text.partition("=")[0] in known for word in words)

    *commands, every = script.lines(re.compile(r"[ \n]--").search)
    best = max(commands, key=flags_among, default=every)
    best = every if flags_among(best) < ENOUGH else best
    if flags_among(best) < ENOUGH:
        why = "no command with Megatron-LM's flags, nor with the Trainer's arguments or a file of them, was found in this script"
        raise InputError("audit", None, f"{why}; audit takes {READ}")
    program = next((word.text for word in best if PROGRAM.search(word.text) or PROGRAM_WORD.search(word.text)), "")
    at = next((index for index, word in enumerate(best) if word.text == program), None)
    if not program:
        said = PROGRAM_WORD.search(text)
        program = said.group() if said else ""
    launcher = tuple(word.text for word in best[: at or 0])
    return Line(launcher, tuple(_flags(best[0 if at is None else at + 1 :], known)), program)


def is_flag(text: str) -> bool:
    """Whether a word is a flag: two hyphens and more behind them.

    >>> is_flag("--lr"), is_flag("-1"), is_flag("1e-4")
    (True, False, False)
    """
    return text.startswith("--") and len(text) > 2


def _flags(words: Sequence[Word], known: Mapping[str, tuple[str, str]]) -> list[Flag]:
    found: list[Flag] = []
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        if not is_flag(word.text):
            continue
        name, equals, value = word.text.partition("=")
        kind = known.get(name, ("", "any"))[1]
        values = [Word((shell.Piece(value),))] if equals else []
        while not equals and index < len(words) and not is_flag(words[index].text) and kind not in ("true", "false", "both"):
            values.append(words[index])
            index += 1
            if kind not in ("list", "any") or PROGRAM.match(words[index - 1].text):
                break
        found.append(Flag(name, tuple(values), word))
    return found


def _value(kind: str, flag: Flag) -> Any:
    """The value of a flag as Megatron would have it. Raises InputError for what is no value of that kind, ValueError for a variable that
    nobody set."""
    if kind in ("true", "false"):
        return kind == "true"
    if kind == "both":
        return not flag.name.startswith("--no-")
    texts = [value.text.strip("'\"") for value in flag.values]
    if any(text.startswith("$") or "<" in text for text in texts):
        raise ValueError(" ".join(texts))
    if kind == "list":
        return texts
    text = texts[0] if texts else ""
    try:
        if kind.startswith("int"):
            if any(len(one) > MAX_DIGITS for one in texts):
                raise ValueError
            return [int(one.replace("_", "")) for one in texts] if len(texts) > 1 else int(text.replace("_", "").replace(",", ""))
        if kind.startswith("float"):
            if not abs(float(text)) <= MOST:
                raise ValueError
            return float(text)
    except ValueError:
        raise InputError(flag.name.removeprefix("--"), text, f"is no {'whole ' if kind.startswith('int') else ''}number") from None
    return text


def reading_of(line: Line, script: Script) -> Reading:
    """What the flags of a training command say. Raises InputError for a value of the wrong type, and for models that can't be described."""
    known = known_flags()
    given: dict[str, Any] = {}
    said: dict[str, str] = {}
    others: dict[str, list[str]] = {name: [] for name in LISTS.values()}
    by_rollout: dict[str, int] = {}
    assumed: list[str] = list(script.notes)
    longest = ""
    for flag in line.flags:
        shown = " ".join([flag.name, *(value.text for value in flag.values)])
        positive = flag.name.replace("--no-", "--", 1)
        if flag.name not in known and known.get(positive, ("", ""))[1] != "both":
            of_slime = kind_in(kinds("slime"), flag.name.removeprefix("--").replace("-", "_"))
            others[LISTS[of_slime]].append(shown)
            if flag.values and flag.values[0].text.isdecimal() and len(flag.values[0].text) <= MAX_DIGITS:
                by_rollout[flag.name] = int(flag.values[0].text)
            continue
        destination, kind = known.get(flag.name) or known[positive]
        destination = words.ALIASES.get(destination, FIELD_OF.get(destination, destination))
        try:
            given[destination] = _value(kind, flag)
            said[destination] = shown
        except ValueError as error:
            if destination in ENTERING:
                assumed.append(f"{flag.name} is {error}, which the script does not say: taken as if the flag were not there")
            said.setdefault(destination, shown)
            given.setdefault(destination, None)
    if by_slime := any(found for name, found in others.items() if name != LISTS[None]):
        assumed.append(f"a step is an update of the policy; {NOT_PRICED}")
        given = {"use_distributed_optimizer": True, "bf16": not given.get("fp16")} | given  # _set_default_megatron_args
        prompts, samples, steps = (by_rollout.get(name) for name in OF_A_ROLLOUT)
        if prompts and samples and steps:
            given.setdefault("global_batch_size", prompts * samples // steps)
        if "seq_length" not in given and any(given.get(name) for name in megatron.WHOLE):
            most = [by_rollout.get(name, 0) for name in LONGEST_OF_A_ROLLOUT]
            given |= {"seq_length": sum(most) if most[0] else OF_SLIME}
            given.setdefault("max_position_embeddings", MANY_POSITIONS)
            longest = LONGEST_OF_A_ROLLOUT[0] if most[0] else "--seq-length"
            of = f"as {longest} lets in" if most[0] else f"slime's own {longest} where the file does not say it"
            assumed.append(f"every sequence has {given['seq_length']} tokens: {of}; samples keep theirs")
        size = _samples_of_a_pass(given, by_rollout) if any(flag.name == WITH_TOKENS for flag in line.flags) else None
        if size is not None:
            given["micro_batch_size"], longest = size, "" if size > 1 else longest
            said["micro_batch_size"] = f"{BY_TOKENS} {by_rollout[BY_TOKENS]}"
            read = {WITH_TOKENS, said["micro_batch_size"]}
            others = {name: [shown for shown in listed if shown not in read] for name, listed in others.items()}
            assumed.append(f"a pass has {size} of them, by {BY_TOKENS}, which changes below call --micro-batch-size")
    fields = megatron.Fields({name: value for name, value in given.items() if value is not None})
    trains = PROGRAM_WORD.search(line.program)
    of = trains.group(1) if trains else ""
    stack = STACK.get(of, "")
    hybrid = given.get("hybrid_override_pattern") or given.get("hybrid_layer_pattern")
    if of in ("vlm", "ict", "retro") or of.startswith("vision") or (of == "mamba" and not hybrid):
        raise InputError("audit", line.program, "trains a model that can't be described here")
    if of == "gpt" and hybrid:
        raise InputError("audit", line.program, f"builds no Mamba layers, and has a pattern of them, {hybrid}")
    if not stack and {"encoder_num_layers", "decoder_num_layers"} <= fields.given.keys():
        stack = "t5"
    engine = "megatron" if not given.get("deepspeed") and given.get("zero_stage") is None else "megatron_deepspeed"
    if any(name in fields.given for name in megatron.WHOLE):
        keys = megatron.model_keys(fields, stack) | megatron.training_keys(fields, stack)
        fields.weak.discard("model.activation")  # the programs train GELU where no flag says another, whatever a recipe has
        if fields.given.get("num_moe_experts") and not fields.given.get("moe_grouped_gemm") and engine == "megatron":
            others["slower"].append(ONE_BY_ONE)
    else:  # another file's, that this one sources
        keys = megatron.part_keys(fields, stack, [*fields.given])
    setup, missing = megatron.setup_of(fields, engine), None
    fields.broken += megatron.not_both(fields)
    if engine != "megatron":
        setup, missing = _with_deepspeed(setup, fields, given, script, said.get("deepspeed_config", ""))
    nodes, ranks = (by_rollout.get(name) for name in ACTORS)
    if (gpus := nodes * ranks if nodes and ranks else gpus_of(line.launcher, script)) is not None:
        keys["gpus"] = gpus
    kind = "Megatron-DeepSpeed" if engine != "megatron" else "slime" if by_slime else "Megatron-LM"
    if kind == "Megatron-LM" and (left := [flag.partition(" ")[0] for flag in others[LISTS[None]]]):
        near = [f"{flag}{f' (did you mean {meant}?)' if (meant := nearest(flag, known)) else ''}" for flag in left]
        assumed.append(f"{', '.join(near)}: added by the program, as Megatron-LM's own parser stops at a flag that it does not know")
    if kind == "Megatron-LM":
        fields.broken += not_taken(line)
    found = megatron.reading_of(fields, f"{kind} command line", keys, setup, said, **others, assumed=assumed)
    named = next((flag.values[0].text for flag in line.flags if flag.name == "--hf-checkpoint" and flag.values), "")
    queues = "".join(word.text for word in script.variables.get("CUDA_DEVICE_MAX_CONNECTIONS", ()))
    queues = queues if queues.isdecimal() and kind == "Megatron-LM" else ""
    added = (*found.added, *((older_fork,) if any(flag.name in BIGSCIENCES for flag in line.flags) else ()))
    return replace(found, missing=missing, model=named, longest=longest, queues=queues, added=added)


def _samples_of_a_pass(given: Mapping[str, Any], by_rollout: Mapping[str, int]) -> int | None:
    """Samples of a micro-batch that slime fills by tokens, a power of two that divides what a replica has of a batch; None: there is no
    telling, as the file lacks what decides it."""
    tokens = by_rollout.get(BY_TOKENS)
    cp, seq_length = given.get("context_parallel_size") or 1, given.get("seq_length")
    if tokens is None or not isinstance(cp, int) or not isinstance(seq_length, int) or seq_length < 1:
        return None
    size = 1 << max(1, tokens * cp // seq_length).bit_length() - 1
    ranks, batch = (by_rollout.get(ACTORS[0]) or 0) * (by_rollout.get(ACTORS[1]) or 0), given.get("global_batch_size")
    of = [given.get(name) or 1 for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size")]
    if isinstance(batch, int) and all(isinstance(one, int) for one in of) and (replicas := ranks // (of[0] * of[1] * cp)):
        while size > 1 and batch % (size * replicas):
            size //= 2
    return size


ONE_BY_ONE: Final = "no --moe-grouped-gemm: a rank's experts run one by one, priced as one product"
"""Megatron-LM's default (core/models/gpt/moe_module_specs.py, SequentialMLP)."""
BIGSCIENCES: Final = ("--embed-layernorm", "--sync-tp-duplicated-parameters", "--kill-switch-path")
"""Flags of BigScience's fork of Megatron-DeepSpeed alone."""
OF_A_ROLLOUT: Final = ("--rollout-batch-size", "--n-samples-per-prompt", "--num-steps-per-rollout")
"""slime's flags of which the first two's product over the third is the batch of a step (slime/utils/arguments.py:1972)."""
LONGEST_OF_A_ROLLOUT: Final = ("--rollout-max-response-len", "--rollout-max-prompt-len")
WITH_TOKENS: Final = "--use-dynamic-batch-size"
BY_TOKENS: Final = "--max-tokens-per-gpu"
"""slime's flags by which a pass has samples of at most so many tokens a rank of a sequence (slime/utils/dp_schedule.py:120)."""
OF_SLIME: Final = 4096
"""The sequence that slime's Megatron is told of where nobody says one (slime/backends/megatron_utils/arguments.py:165)."""
MANY_POSITIONS: Final = 1 << 20
"""Positions of a model whose samples are of any length: rotary ones have no table."""
ENVIRONMENT: Final = re.compile(r"^\s*(?:export\s+)?(NNODES|NPROC_PER_NODE|MAX_PIXELS|IMAGE_MAX_TOKEN_NUM)=(\d{1,8})\b", re.MULTILINE)
"""ms-swift's, in front of the command."""
SWIFTS_COMMAND: Final = re.compile(r"\b(?:swift|megatron)\s+(?:sft|pt|rlhf)\b")
IMAGES: Final = {"MAX_PIXELS": "image_pixels", "IMAGE_MAX_TOKEN_NUM": "image_tokens"}
"""What an image may have at most, of Qwen's models until 2.5 and after (swift/model/models/qwen.py:752)."""
ACTORS: Final = ("--actor-num-nodes", "--actor-num-gpus-per-node")
"""slime's flags of how many GPUs train (slime/utils/arguments.py)."""
ENTERING: Final = frozenset(
    {"num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "seq_length", "max_position_embeddings", "micro_batch_size",
     "moe_layer_freq",
     "global_batch_size", "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "vocab_size",
     "expert_model_parallel_size", "num_layers_per_virtual_pipeline_stage", "zero_stage", "num_query_groups", "lr", "train_iters"}
)  # fmt: skip
"""Settings that decide the plan: it is said where a variable hides them."""


def _with_deepspeed(
    setup: Setup, fields: megatron.Fields, given: Mapping[str, Any], script: Script, flag: str
) -> tuple[Setup, tuple[str, str] | None]:
    """The setup with what DeepSpeed's own configuration adds to it; flag and path of that, where it is not here and nothing else says the
    stage. `flag`: how the script says it."""
    path = given.get("deepspeed_config") or flag.removeprefix("--deepspeed_config ")
    content: dict[str, Any] = {}
    if path and str(path) not in script.files:
        content = named_ds_config(path, "--deepspeed_config", script.name)[0]
    elif path:
        with contextlib.suppress(InputError):  # a variable in it that nobody set: as if it were another file
            content = content_of(script.files[str(path)], f"{path}.json")
    ds = Given(content)
    fields.used |= {"deepspeed", "deepspeed_config", "zero_stage", "no_pipeline_parallel", "pp_partition_method"}
    missing = ("--deepspeed_config", str(path)) if path and not content else None
    if missing and given.get("zero_stage") is not None:
        fields.assumed.append(f"--deepspeed_config {path} is not here: --zero-stage says its stage, and nothing its offload")
        missing = None
    said = ds.number("zero_optimization.stage")
    stage = int(given.get("zero_stage") or 0) if said is None else said
    offload = ds.get("zero_optimization.offload_optimizer.device", "none") != "none"
    pipeline = setup.pp > 1 and not given.get("no_pipeline_parallel")
    if pipeline and stage == 0 and (given.get("bf16") or ds.get("bf16.enabled")):
        stage = 1
        fields.assumed.append("ZeRO stage 0 in bf16 is priced as 1: DeepSpeed's BF16_Optimizer shares the optimizer's states too")
    setup = replace(setup, zero_stage=stage, offload_optimizer=offload, by_deepspeed_pipeline=pipeline, overlap_grad_reduce=True,
                    overlap_param_gather=True, vpp=1)  # fmt: skip
    return setup, missing


def gpus_of(launcher: Sequence[str], script: Script) -> int | None:
    """Nodes times ranks on each, from the launcher's words and #SBATCH lines; None: they don't say."""
    found: dict[str, int] = {}
    words = [*script.sbatch, *(w for command in script.commands if command[0].text in ("sbatch", "srun", "torchrun", "deepspeed")
                               for one in command for w in one.text.split("=")), *launcher]  # fmt: skip
    flat = [part for word in words for part in (word.split("=") if word.startswith("-") else [word])]
    for what, names in LAUNCHER.items():
        for index, word in enumerate(flat[:-1]):
            if word in names and flat[index + 1].isdecimal():
                found[what] = int(flat[index + 1])
    gres = next((re.fullmatch(r"gpu:(?:\w+:)?(\d+)", word) for word in flat if word.startswith("gpu:")), None)
    if gres:
        found["ranks"] = int(gres.group(1))
    if "all" in found:
        return found["all"]
    if "ranks" in found:
        return found.get("nodes", 1) * found["ranks"]
    said = {name: int(value[0].text) for name, value in script.variables.items() if len(value) == 1 and value[0].text.isdecimal()}
    return next((said[name] for name in ("WORLD_SIZE", "NUM_GPUS", "NGPUS") if name in said), None)


# -------------------------------------------------------------------------------------------------------------------- editing


def _edited(text: str, line: Line, changes: Mapping[str, list[str] | None]) -> str | None:
    """The script with other flags; None: the place of one can't be found there."""
    source = text.encode()
    edits: list[tuple[Span, bytes]] = []
    added: list[str] = []
    for name, values in changes.items():
        there = next((flag for flag in line.flags if flag.name == name), None)
        if there is None and values is not None:
            added += [name, *values]
        if there is None or values == []:
            continue
        one = values is not None and len(there.values) == len(values) == 1
        span = there.values[0].own() or there.values[0].used() if one else _whole(there, source)
        if span is None:
            return None
        edits.append((span, _as_words([] if values is None else values if one else [name, *values], text, source, span[0])))
    if added:
        at = _anchor(line, source)
        if at is None:
            return None
        edits.append(((at, at), b" " + _as_words(added, text, source, at)))
    return shell.edited(text, edits)


def _as_words(words: Sequence[str], text: str, source: bytes, at: int) -> bytes:
    """What a script says for these words at this place: what a shell would take apart (a layout's bars) in quotes, but inside of some."""
    place = len(source[:at].decode())
    quoted = any(found.start() < place < found.end() and found[0][0] in "'\"" for found in shell.QUOTED.finditer(text))
    return " ".join(words if quoted else map(shlex.quote, words)).encode()


def _whole(flag: Flag, source: bytes) -> Span | None:
    """The span from the flag to its last value with the quotes around that: where they stand together, or else where they are expanded;
    None: they stand apart there too."""
    for place in (Word.own, Word.used):
        first, last = place(flag.word), place(flag.values[-1] if flag.values else flag.word)
        if first is None or last is None or last[1] < first[0]:
            continue
        quote = source[last[0] - 1 : last[0]]
        end = last[1] + (quote in (b"'", b'"') and source[last[1] : last[1] + 1] == quote)
        if place is Word.used or len(source[first[0] : end].split()) == 1 + len(flag.values):
            return first[0], end
    return None


def _anchor(line: Line, source: bytes) -> int | None:
    """Place in a command line where a new flag goes: behind a flag of parallelism, else behind any flag with one value; None: it has
    none."""
    spans = []
    for flag in line.flags:
        span = _whole(flag, source)
        if span is not None and span[1] - span[0] < 200 and len(flag.values) == 1:
            spans.append((("parallel" in flag.name) + (flag.name == "--tensor-model-parallel-size"), span[1]))
    return max(spans, key=lambda item: item[0])[1] if spans else None
