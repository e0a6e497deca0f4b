"""Words of a command in a shell script that set a program's configuration: `path=value`, as verl, Megatron-Bridge and NeMo-RL take them,
and ms-swift's flags. They are found as settings by path, and changed where they stand."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Final

import yaml

from orchestrator.audit import bridge_recipe, shell
from orchestrator.audit.document import Content, File
from orchestrator.audit.shell import Script, Span, Word, edited
from orchestrator.engines.tools import word
from orchestrator.errors import InputError
from orchestrator.words import terms

PATH: Final = re.compile(r"[+]{0,2}([A-Za-z_]\w*(?:[.@/]\w+)*)=")
RUN_RECIPE: Final = {
    "max_steps": ("-ms", "train.train_iters"), "global_batch_size": ("-gb", "train.global_batch_size"),
    "micro_batch_size": ("-mb", "train.micro_batch_size"), "seq_length": ("-sl", "dataset.seq_length"),
    "tensor_model_parallel_size": ("-tp", "model.tensor_model_parallel_size"),
    "pipeline_model_parallel_size": ("-pp", "model.pipeline_model_parallel_size"),
    "context_parallel_size": ("-cp", "model.context_parallel_size"),
    "virtual_pipeline_model_parallel_size": ("-vp", "model.virtual_pipeline_model_parallel_size"),
    "expert_model_parallel_size": ("-ep", "model.expert_model_parallel_size"),
    "expert_tensor_parallel_size": ("-etp", "model.expert_tensor_parallel_size"),
    "lr": ("--lr", "optimizer.lr"), "min_lr": ("--min_lr", "optimizer.min_lr"),
    "warmup_iters": ("--warmup_iters", "scheduler.lr_warmup_iters"),
}  # fmt: skip
"""Flags of Megatron-Bridge's programs that stand for one such word (scripts/training/run_recipe.py, 067f987)."""
FLAGS: Final = {flag: path for name, (short, path) in RUN_RECIPE.items() for flag in (short, f"--{name}")}
ENOUGH: Final = 3
"""A command with fewer trains nothing."""
SCHEMES: Final = ("lora", "dora", "none")
OF_RECIPES: Final = {"peft": "lora", "lora": "lora", "dora": "dora"}
"""Kinds of adapters by the word in a recipe's name (scripts/training/recipe_metadata.py, infer_recipe_mode)."""
HYDRA: Final = frozenset({"actor_rollout_ref", "policy", "training"})
"""Sections of programs (verl, NeMo-RL, NeMo's launcher) whose overrides Hydra parses: with ++ it adds what its files lack."""
SWIFT: Final = ("swift", "megatron")
TRAINS: Final = ("sft", "pt", "rlhf")
OF_TRAINER: Final = "--per_device_train_batch_size"
"""A flag by which a command is known as one with the Trainer's arguments."""


def _adapters(words: Sequence[str]) -> str:
    """The kind of adapters that a program of Megatron-Bridge's is told to train, by a flag or its recipe's name, or "none"; "": not said.

    >>> _adapters(["run_recipe.py", "--recipe", "qwen3_8b_peft_1gpu_h100_bf16_config"]), _adapters(["--peft-scheme=dora"])
    ('lora', 'dora')
    """
    flags = {flag.replace("-", "_"): value for flag, value in pairwise(part for word in words for part in word.split("=", 1))}
    said = next((value for name in ("__mode", "__peft_scheme", "__peft") if (value := flags.get(name, "").lower()) in SCHEMES), "")
    of_recipe = bridge_recipe.NAME.fullmatch(flags.get("__recipe", ""))
    return said or (OF_RECIPES.get(of_recipe[1], "") if of_recipe else "")


def found_in(script: Script) -> File | None:
    """The overrides of the command that has most of them; None: none has enough."""
    words = max(script.lines(_are_several), key=lambda words: (_of_recipe(words), _count(words)))
    if _count(words) < ENOUGH and not _of_recipe(words):
        return None
    content: Content = {}
    places: dict[str, Word] = {}
    notes, others = [], []
    flag = ""
    for one in words:
        name, equals, _ = one.text.partition("=")
        path, value = FLAGS.get(flag), one.behind(0)
        flag = ""
        if name in FLAGS:
            flag, path, value = ("", FLAGS[name], one.behind(len(name) + 1)) if equals else (name, None, value)
        elif (match := PATH.match(one.text)) is not None and not match.group(1).isupper():  # else a variable of the environment
            path, value = match.group(1), one.behind(match.end())
        if path is None:
            others.append(one.text)
            continue
        if "$" in value.text:
            notes.append(f"{path} is {value.text}, which the script does not say: taken as if it were not there")
            continue
        terms.put(content, path, _value(value.text))
        places[path] = value
    if (scheme := _adapters(others)) and isinstance(content.get("peft", {}), dict):
        terms.put(content, "peft.scheme", scheme)
    more = "++" if not HYDRA.isdisjoint(content) else ""
    change = partial(changed, script.text, places, lambda path, value: shlex.quote(f"{more}{path}={value}"), {})
    return File(script.text, script.name, content, change, (*script.notes, *notes), others)


def swifts_flags(script: Script) -> File | None:
    """The flags of ms-swift's command (`swift sft --tuner_type lora`), as its YAML has them; None: there is no such command."""
    for words in script.lines(_are_several)[:-1]:
        texts = [one.text for one in words]
        at = next((i for i in range(len(texts) - 1) if texts[i].rpartition("/")[2] in SWIFT and texts[i + 1] in TRAINS), None)
        if at is not None:
            if at + 2 < len(texts) and texts[at + 2].endswith((".yaml", ".yml", ".json")):
                raise InputError("audit", texts[at + 2], "is what the script's command reads: audit that file")
            return flags_of(script, words[at + 2 :], texts[: at + 2])
    return None


def trainers_flags(script: Script) -> File | None:
    """The flags of a command that gives Hugging Face's Trainer its arguments (`deepspeed train.py --per_device_train_batch_size 2`), as its
    YAML has them; None: there is no such command."""
    for words in script.lines(_are_several)[:-1]:
        texts = [one.text for one in words]
        if any(text.partition("=")[0].replace("-", "_") == OF_TRAINER.replace("-", "_") for text in texts):
            at = next((i for i, text in enumerate(texts) if text.endswith(".py")), 0)
            return flags_of(script, words[at + 1 :], texts[: at + 1])
    return None


def flags_of(script: Script, words: Sequence[Word], launcher: Sequence[str]) -> File:
    """The flags of a command whose words they are, behind its launcher's, as YAML has them."""
    given: dict[str, list[Word]] = {}
    flag, flagged = "", dict[str, Word]()
    for one in words:
        name, equals, _ = one.text.partition("=")
        if name.startswith("--"):
            flag = name.removeprefix("--").replace("-", "_")
            flagged[flag] = one
            given[flag] = [Word((shell.Piece(one.text[len(name) + 1 :]),))] if equals else []
        elif flag:
            given[flag].append(one)
    content: Content = {}
    notes = []
    for name, values in given.items():
        said = [value.text for value in values]
        if any("$" in text for text in said) and name != "deepspeed":
            notes.append(f"--{name} is {' '.join(said)}, which the script does not say: taken as if it were not there")
            continue
        found = [_value(text) for text in said]
        content[name] = True if not found else found[0] if len(found) == 1 else found
    places = {name: values[0].behind(0) for name, values in given.items() if len(values) == 1}
    bare = {name: flagged[name].behind(0) for name, values in given.items() if not values}
    change = partial(changed, script.text, places, lambda path, value: f"--{path} {shlex.quote(value)}", bare)
    return File(script.text, script.name, content, change, (*script.notes, *notes), launcher)


def _are_several(text: str) -> bool:
    """Whether it is words in one, as `CMD="... a.b=1 c.d=2"` has them."""
    return len(re.findall(r"(?:^|\s)[+]{0,2}[\w.]+=|\s--?\w", text)) > 1


def _count(words: Sequence[Word]) -> int:
    """Words that set a path of at least two names."""
    return sum(bool((match := PATH.match(one.text)) and "." in match.group(1)) for one in words)


def _of_recipe(words: Sequence[Word]) -> bool:
    """Whether the words start Megatron-Bridge's run_recipe.py on a recipe, which says the rest."""
    return any("run_recipe" in one.text for one in words) and bool(bridge_recipe.named([one.text for one in words]))


def _value(text: str) -> Any:
    """The value of such a word: YAML, but that Hydra's dictionaries need no blank behind a colon.

    >>> _value("{dim:16,of:{alpha: 8}}"), _value("[a,b]"), _value("1e-5x")
    ({'dim': 16, 'of': {'alpha': 8}}, ['a', 'b'], '1e-5x')
    """
    if text.startswith("{"):
        text = re.sub(r"([{,]\s*\w+):(?=\S)", r"\1: ", text)
    try:
        return yaml.safe_load(text) if text else None
    except yaml.YAMLError:
        return text


def changed(
    text: str, places: dict[str, Word], said: Callable[[str, str], str], bare: Mapping[str, Word], changes: Mapping[str, Any]
) -> str | None:
    """The script with these values by path, or with more words behind the last; None: one stands in several pieces. `said`: a setting as
    such a word; `bare`: flags without a value."""
    edits: list[tuple[Span, bytes]] = []
    added = ""
    for path, value in changes.items():
        new = word(value)
        if path in bare and (span := bare[path].own() or bare[path].used()) is not None:
            edits.append((span, said(path, new).encode()))
        elif path not in places:
            added += " " + said(path, new)
        elif (span := places[path].own() or places[path].used()) is None or shlex.quote(new) != new:
            return None
        else:
            edits.append((span, new.encode()))
    if added:
        last = next((span for place in reversed(places.values()) if (span := place.own() or place.used()) is not None), None)
        if last is None:
            return None
        edits.append(((last[1], last[1]), added.encode()))
    return edited(text, edits)
