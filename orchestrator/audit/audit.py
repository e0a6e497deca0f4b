"""The answer to "is what I have any good?": a file's reading, its plan, what it would take, and the changes that gain most."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from contextlib import suppress
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Final, Self

import msgspec

from orchestrator import recipe
from orchestrator.audit import changes, formats
from orchestrator.audit.build import Judge, Judged, setup_of
from orchestrator.audit.changes import RECOMPUTE
from orchestrator.audit.deepspeed import BESIDE_STATES, freed_by
from orchestrator.audit.reading import LISTS, Reading, Setup, Source, differing
from orchestrator.cost.memory_policy import LIKELY
from orchestrator.detect import Machine
from orchestrator.engines import ENGINES
from orchestrator.engines.megatron.capabilities import NAME as MEGATRON
from orchestrator.engines.megatron_args import one_connection
from orchestrator.errors import InputError, NoPlanError
from orchestrator.model.parts.vision import Vision
from orchestrator.plan import Plan
from orchestrator.planning import Planner, without_gc
from orchestrator.recipe import Settings
from orchestrator.recipe.clusters import on_hub, read_named, stored
from orchestrator.recipe.layers import flatten
from orchestrator.recipe.read import Tree
from orchestrator.recipe.sources import read_text
from orchestrator.report.budget import budget
from orchestrator.strategy.pins import Pins
from orchestrator.strategy.spec import CHOICES, OFFERED
from orchestrator.words.tools import BRIDGE_FREEZES
from orchestrator.words.trainer import FREEZES, IMAGE_PIXELS

HAS_BF16: Final = 8.0
"""Compute capability from which a GPU multiplies bf16 as fast as fp16 (NVIDIA's A100 and later)."""
ASSUMED_CLUSTER: Final = "dgx_h100"
PADDED: Final = "model.make_vocab_size_divisible_by"
"""A key that may follow a change of tp, by which Megatron pads the vocabulary."""
BY_PIN: Final = {choice.pin: choice.name for choice in CHOICES}
HEAVIER: Final = re.compile(r"attention[-_]backend\b|attn_implementation\W+eager\b|modules_to_save\b|additional_target\b")
"""Settings without a price that take gigabytes: attention that keeps its scores (flash kernels' is priced), and whole modules that are
trained beside adapters, embeddings mostly."""
REFUSED: Final = ("plan", "resume", "profile", "largest", "target", "explain", "entry", "out", "launch")
"""Keys and groups that ask for something else."""
FREEZING: Final = (
    *((name, part) for rows in FREEZES.values() for name, part, _ in rows),
    *((path.rpartition(".")[2], part) for path, part in BRIDGE_FREEZES.items()),
)
"""Settings that freeze a part of a model that looks at images, by their last names, and the part."""
TAKEN: Final = "the model: "
"""How the line begins that names the recipe whose architecture is taken."""
OF_A_MODEL: Final = frozenset({"recipe", "model.num_layers", "model.hf_config", "model.description", "model.code"})
"""Keys of which one says the model."""
NO_GPUS: Final = InputError("gpus", None, "is missing: the file does not say how many; gpus=N does")


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One or more choices changed: `what` in words, its price, and the file with it. `text` None: the file can't say it in its places;
    `elsewhere`: what something beside the file says, and which."""

    what: str
    setup: Setup
    judged: Judged
    text: str | None
    diff: str
    elsewhere: str = ""


class Audit:
    """What is found about one file. `judged` None: it is no plan at all, for the reason in `problem`."""

    def __init__(self, name: str, source: Source, settings: Settings, setup: Setup) -> None:
        self.name, self.source, self.settings, self.setup = name, source, settings, setup
        self.judge = Judge(settings, setup, source.reading)
        self.problem = ""
        self.judged: Judged | None = None
        try:
            self.judged = self.judge.judged(setup)
            plan = self.judged.plan
            self.problem = next(iter(source.reading.broken), self.judged.rule) or self._miscounted(plan) or self._wrong_queues(plan)
            if source.reading.otherwise:
                self.judged = msgspec.structs.replace(self.judged, chance=None)
        except InputError as error:
            self.problem = str(error)

    @classmethod
    def of(cls, path: str | Path, tree: Tree, machine: Machine) -> Self:
        """The audit of a file. `tree`: a run's keys as texts, over what the file says; pin.* over its choices. Raises InputError for a
        file that can't be read."""
        for name in tree:
            if name.partition(".")[0] in REFUSED:
                raise InputError(name, None, "is not for audit, which judges the file as it is")
        if Path(path).is_dir():
            raise InputError("audit", str(path), "is a folder; give a file")
        try:
            text = read_text(Path(path))
        except InputError as error:
            raise InputError("audit", str(path), error.why) from None
        source = formats.read(text, str(path))
        try:
            settings, assumed = settings_of(source.reading, tree, machine)
        except InputError as error:
            unread = next((line for line in source.reading.assumed if " is not read (" in line), "")
            if not unread or error.value is not None:
                raise
            raise InputError(error.key, None, f"{error.why}; {unread}") from None
        if settings.architecture.vision is not None:
            source = msgspec.structs.replace(source, reading=of_images(source.reading, settings.architecture.vision))
            settings, assumed = settings_of(source.reading, tree, machine)
        if missing := source.reading.missing:
            if settings.pins.zero_stage is None:
                why = (
                    f"is not here, and says the ZeRO stage: put it beside {Path(path).name}, or say pin.zero_stage= (and pin.offload=true)"
                )
                raise InputError(*missing, why)
            assumed.append(f"{'='.join(missing)} is not here: it says no more than the pins")
        reading, more = divided(source.reading, settings)
        if not settings.architecture.experts:
            reading = msgspec.structs.replace(reading, setup=msgspec.structs.replace(reading.setup, etp=1))
        elif "lora.rank" in reading.keys and reading.setup.engine != MEGATRON:
            more = [*more, "adapters are on the attention's linears and dense layers': transformers 5 has no linears in experts"]
        said = {f"{name.removeprefix('model.')}=" for name in reading.weak if name in tree or {"recipe", "model.hf_config"} & {*tree}}
        pinned_here = [f"pin.{name}=" for name in settings.pins.given()]
        kept = [line for line in reading.assumed if not line.startswith(tuple(said)) and not any(pin in line for pin in pinned_here)]
        if settings.pins.zero_stage:
            reading = msgspec.structs.replace(reading, assumed=tuple(kept)).divided_by(f"pin.zero_stage={settings.pins.zero_stage}")
            kept = [*reading.assumed]
        if any(line.startswith(TAKEN) for line in assumed):
            kept = [line for line in kept if not line.startswith("the model that you give")]
        images = settings.training.image_tokens
        if images and not any(name in tree or name in reading.keys for name in ("train.images", "train.image_tokens")):
            said_so = any(line.startswith("every sample has one image") for line in kept)
            kept += [] if said_so else [f"every sample has one image of {images} tokens: train.images=, train.image_tokens= say others"]
        longest = "" if "train.seq_length" in tree else reading.longest
        if reading.longest and not longest:
            kept = [line for line in kept if not line.startswith("every sequence has ")]
        reading = msgspec.structs.replace(reading, assumed=(*kept, *assumed, *more), longest=longest)
        source = msgspec.structs.replace(source, reading=reading)
        return cls(str(path), source, settings, pinned(reading.setup, settings.pins))

    @property
    def reading(self) -> Reading:
        return self.source.reading

    @property
    def plan(self) -> Plan | None:
        """The file's plan with its prediction; None: the file's numbers make no plan."""
        return None if self.judged is None else self.judged.plan

    @property
    def remarks(self) -> tuple[str, ...]:
        """What the file's plan has that is legal and hardly meant, a sentence each."""
        plan = self.plan
        if plan is None:
            return ()
        inner, gpu = plan.cluster.levels[0], plan.cluster.gpu
        found = []
        if plan.tp > inner.size:
            found.append(f"tp={plan.tp} is wider than the {inner.size} GPUs of {inner.name}: every layer's exchange leaves it")
        if plan.training.precision == "fp16" and not plan.cluster.is_cpu and float(gpu.compute_capability) >= HAS_BF16:
            found.append(f"fp16 on {gpu.name}: as fast as bf16, with a loss scale and steps that it skips")
        return tuple(found)

    def _miscounted(self, plan: Plan) -> str:
        """Why DeepSpeed refuses its batch, micro-batch and accumulation on these GPUs; "": it doesn't, or a key replaces one."""
        steps, said = self.reading.steps, self.reading.setup
        own = (said.tp, said.cp, said.micro_batch_size) == (plan.tp, plan.cp, plan.micro_batch_size)
        if not own or self._counts(self.reading, plan):
            return ""
        return (
            f"train_batch_size={plan.global_batch_size}: is not train_micro_batch_size_per_gpu x gradient_accumulation_steps x "
            f"data-parallel ranks = {plan.micro_batch_size} x {steps} x {plan.dp}"
        )

    def _wrong_queues(self, plan: Plan) -> str:
        """Why Megatron refuses this CUDA_DEVICE_MAX_CONNECTIONS (training/arguments.py:687 and 951, core_v0.16.1); "": it doesn't."""
        said = self.reading.queues
        if said and said != "1" and one_connection(plan):
            return f"CUDA_DEVICE_MAX_CONNECTIONS={said}: Megatron asserts 1 under tensor or context parallelism before Blackwell"
        return "CUDA_DEVICE_MAX_CONNECTIONS=1: Megatron-FSDP asserts more, or none" if said == "1" and plan.megatron_fsdp else ""

    @property
    def untold(self) -> str:
        """Why nobody here knows whether the engine's rules are kept; "": they are known, or one is broken."""
        return "" if self.problem else self.judge.untold

    @property
    def legal(self) -> bool | None:
        """Whether the engine's rules are kept; `problem` says which is not. None: it can't be told, for the reason in `untold`."""
        return None if self.untold else not self.problem

    @property
    def fits(self) -> bool | None:
        """Whether the fullest rank has the memory, as a plan would need it; None: there is no plan, or it lacks some by a price that knows
        nothing of settings which may change that (`not_priced`), that says so with a chance below LIKELY (`Judged.chance`), or that is of
        samples whose lengths nobody says (`Reading.longest`); or it has the memory by the price of a part of the job
        (`Reading.otherwise`), or by one that knows nothing of settings which take gigabytes (`heavier`)."""
        if self.judged is None:
            return None
        if not self.judged.lacking_bytes:
            return None if self.reading.otherwise or self.heavier else True
        return None if self.not_priced or self.reading.longest or (self.judged.chance or 1.0) < LIKELY else False

    @property
    def heavier(self) -> tuple[str, ...]:
        """Settings of the file that take gigabytes of which the prediction knows nothing."""
        return tuple(one for one in self.reading.unpriced if HEAVIER.search(one))

    @property
    def not_priced(self) -> tuple[str, ...]:
        """Settings of the file that may take or save memory of which the prediction knows nothing; those that free a few causes alone only
        where these could make up for what is lacking."""
        found = (*self.reading.unpriced, *self.reading.unknown)
        if self.judged is None:
            return found
        stage = self.judged.plan.prediction.by_stage[self.tightest_stage or 0]
        freed = {one: freed_by(one) for one in found}
        causes = {cause for of_one in freed.values() for cause in of_one or ()}
        if stage.peak_phase == "step" and causes & {*BESIDE_STATES}:
            causes.add("transient")
        if self.judged.lacking_bytes <= sum(stage.memory_by_cause[cause] for cause in causes):
            return found
        return tuple(one for one in found if freed[one] is None)

    @property
    def step_time_s(self) -> float | None:
        return None if self.judged is None else self.judged.step_time_s

    @property
    def tightest_stage(self) -> int | None:
        """The pipeline stage whose ranks are fullest; None: there is no plan."""
        return None if self.plan is None else self.plan.prediction.fullest

    @cached_property
    def _found(self) -> tuple[tuple[Judged, ...], Judged | None]:
        if self.reading.otherwise:  # a change that fits and gains by the price of a part may do neither
            return (), None
        with without_gc():
            return changes.best_changes(self.setup, None if self.problem else self.judged, self.judge)

    @cached_property
    def changes(self) -> tuple[Change, ...]:
        """The three that gain most, each alone; of a file that breaks a rule those that mend it."""
        return tuple(islice(filter(self._mends, map(self._change, self._found[0])), changes.SHOWN))

    @cached_property
    def together(self) -> Change | None:
        """What the same choices give together; None: no more than the best alone."""
        change = None if self._found[1] is None else self._change(self._found[1])
        return None if change is None or not self._mends(change) else change

    @cached_property
    def fastest(self) -> Plan | None:
        """The fastest plan of a search over everything, of this engine or another, with what only the user may ask for (`Choice.offered`)
        where the file asks for it and that is faster; None: nothing fits."""
        found = [self._overall, self.fastest_here]  # this engine may plan the model where only another trains it here
        return min(filter(None, found), key=lambda plan: plan.prediction.step_time_s, default=None)

    @cached_property
    def fastest_here(self) -> Plan | None:
        """The fastest plan of the file's own engine alone, with what the file asks for; None: none fits."""
        own = self.setup.engine
        return self._overall if self._overall is not None and self._overall.engine == own else self._searched(own)

    @cached_property
    def _overall(self) -> Plan | None:
        return self._searched(None)

    def _searched(self, engine: str | None) -> Plan | None:
        asked = {choice.pin: value for choice, value in OFFERED if getattr(self.setup, choice.name) == value}
        found = []
        for pins in ({}, asked) if asked else ({},):
            settings = msgspec.structs.replace(self.settings, pins=msgspec.structs.replace(self.settings.pins, **pins))
            with suppress(NoPlanError, InputError):
                planner = Planner(settings if engine is None else msgspec.structs.replace(settings, engine=engine))
                found.append(planner.fastest(planner.space(top_k=1, prunings=self.reading.rules)).plan)
        return min(found, key=lambda plan: plan.prediction.step_time_s, default=None)

    @cached_property
    def searched(self) -> Change | None:
        """`fastest_here` as a change of the file; None: there is none, or it gains nothing over the changes of `together` and `changes`."""
        if self.reading.otherwise or self.fastest_here is None:
            return None
        judged = next(changes.legal_setups(self.judge, [setup_of(self.fastest_here, self.setup.experts)]), None)
        shown = [change.judged for change in filter(None, (*self.changes, self.together))]
        best = min([*shown, *([self.judged] if self.judged and not self.problem else [])], key=changes.RANK, default=None)
        if judged is None or not changes.is_better(judged, best):
            return None
        change = self._change(judged)
        return change if self._mends(change) else None

    def _mends(self, change: Change) -> bool:
        """Whether the file is legal with the change, as far as it can say it: rules may be broken in what no choice says."""
        if not self.problem:
            return True
        reading = self.reading if change.text is None else self._read(change.text)
        return not reading.broken and self._counts(reading, change.judged.plan)

    def _change(self, judged: Judged) -> Change:
        setup, places, text = judged.setup, self._places, None
        moved, away = differing(self.setup, setup), tuple[str, ...]()
        by_pattern = setup.layout is not None and "single_part_layers" in judged.plan.model.features()
        for away in () if by_pattern else dict.fromkeys(((), (*self.reading.elsewhere,), (*places,))):
            text = self._edited(setup, away)
            if text is not None:
                break
        same = text == self.source.text
        beyond = moved if same else moved & {*away}
        said = {f"{changes.choice_text(name, setup)} is said by {places[name]}" for name in beyond & {*places}}
        if same and not said:
            text = None
        name = Path(self.name).name
        old, new = (one.splitlines(keepends=True) for one in (self.source.text, text or self.source.text))
        diff = (line.removesuffix("\n") + "\n" for line in difflib.unified_diff(old, new, name, name, n=1))
        what = changes.said(self.setup, setup)
        return Change(what=what, setup=setup, judged=judged, text=text, diff="".join(diff), elsewhere=", ".join(sorted(said)))

    @cached_property
    def _places(self) -> dict[str, str]:
        """Choices that something beside the file says, with what does: a pin, or a setting of a file that it names."""
        pins = {BY_PIN.get(pin, pin): f"pin.{pin}" for pin in self.settings.pins.given()}
        if "recompute" in pins:
            pins |= dict.fromkeys(RECOMPUTE, pins["recompute"])
        return {name: place for name, place in (self.reading.elsewhere | pins).items() if name in Setup.__struct_fields__}

    def _edited(self, setup: Setup, away: Iterable[str]) -> str | None:
        """The file's text with this setup but for the choices that are said away from it; None: it can't say that."""
        own = msgspec.structs.replace(setup, **{name: getattr(self.reading.setup, name) for name in away})
        text = self.source.edited(self.reading.setup, own, self.settings.cluster.num_gpus)
        return text if text is not None and self._says(text, setup, away) else None

    def _read(self, text: str) -> Reading:
        """The reading of the changed file, for the model that this one is for. Raises InputError."""
        reading, vision = formats.read(text, self.name).reading, self.settings.architecture.vision
        return divided(reading if vision is None else of_images(reading, vision), self.settings)[0]

    def _says(self, text: str, setup: Setup, away: Iterable[str]) -> bool:
        """Whether the changed file, read again, is this plan with what is said away from it, and otherwise what it was."""
        try:
            again = self._read(text)
            follow = (PADDED, *(("gpus",) if self.reading.steps else ()))
            before, after = ({name: value for name, value in one.keys.items() if name not in follow} for one in (self.reading, again))
            gpus = self.settings.cluster.num_gpus
            same = before == after and len({samples_of(one, one.setup, gpus) for one in (self.reading, again)}) == 1
            plan = self.judge.judged(setup).plan
            whole = msgspec.structs.replace(again.setup, **{name: getattr(setup, name) for name in away})
            return same and self._counts(again, plan) and self.judge.judged(whole).plan == plan
        except InputError:
            return False

    def _counts(self, reading: Reading, plan: Plan) -> bool:
        """Whether the file's accumulation is the plan's, where the batch is the file's own."""
        own = reading.keys.get("train.global_batch_size") == plan.global_batch_size
        return reading.steps in (None, plan.num_microbatches) or not own

    def summary(self) -> dict[str, Any]:
        """The audit as JSON has it."""
        plan = self.plan
        rows = filter(None, (*self.changes, self.together, self.searched))
        return {
            "file": self.name,
            "format": self.reading.format,
            "otherwise": self.reading.otherwise,
            "legal": self.legal,
            "problem": self.problem or self.untold,
            "fits": self.fits,
            "lacking_bytes": None if self.judged is None else self.judged.lacking_bytes,
            "step_time_s": self.step_time_s,
            "interval_s": plan.predicted.interval if plan and plan.predicted else None,
            "tokens_per_s_per_gpu": plan.predicted.tokens_per_s_per_gpu if plan and plan.predicted else None,
            "tokens_per_s_per_gpu_90": budget(plan).interval("tokens_per_s_per_gpu") if plan and plan.predicted else None,
            "peak_memory_bytes": None if self.judged is None else self.judged.peak_memory_bytes,
            "usable_memory_bytes": self.judge.limit.usable,
            "chance_of_not_fitting": None if self.judged is None else self.judged.chance,
            "tightest_stage": self.tightest_stage,
            **{name: list(getattr(self.reading, name)) for name in (*dict.fromkeys(LISTS.values()), "assumed")},
            "remarks": list(self.remarks),
            "changes": [{"what": row.what, "step_time_s": row.judged.step_time_s, "peak_memory_bytes": row.judged.peak_memory_bytes,
                         "fits": not row.judged.lacking_bytes, "chance_of_not_fitting": row.judged.chance, "diff": row.diff,
                         "not_in_diff": row.elsewhere}
                        for row in rows],
        }  # fmt: skip


def divided(reading: Reading, settings: Settings) -> tuple[Reading, list[str]]:
    """The reading with DeepSpeed's own micro-batch where the file leaves it out (runtime/config.py, _set_batch_related_parameters): the
    batch over accumulation steps and data-parallel ranks; and what is said of it."""
    if not reading.divided:
        return reading, []
    setup, steps = pinned(reading.setup, settings.pins), reading.steps or 1
    ranks, batch = max(1, settings.cluster.num_gpus // (setup.tp * setup.cp)), settings.training.global_batch_size
    micro = settings.pins.micro_batch_size or max(1, batch // (ranks * steps))
    over = f"{ranks} ranks" + (f" and {steps} accumulation steps" if steps > 1 else "")
    said = [f"micro-batches of {micro}: the file does not say; DeepSpeed's are the batch over {over}"]
    if steps > 1 and batch != micro * ranks * steps:
        said = [f"gradient_accumulation_steps={steps} is not kept: {batch} are no {steps} micro-batches of {micro} on {ranks} ranks"]
    elif settings.pins.micro_batch_size is not None:
        said = []
    return msgspec.structs.replace(reading, setup=msgspec.structs.replace(reading.setup, micro_batch_size=micro)), said


def of_images(reading: Reading, vision: Vision) -> Reading:
    """The reading for a model that looks at images: with the parts that the file freezes, and images of the largest size that it has."""
    parts = [part for part, frozen in reading.freezes.items() if frozen]
    adapted, keys, assumed = "lora.rank" in reading.keys, dict(reading.keys), reading.assumed
    swifts = "lora.bridge" in keys
    if swifts and (others := [part for part, frozen in reading.freezes.items() if frozen is (part == "language")]):
        line = f"lora.rank={keys['lora.rank']}: adapters are in {' and '.join(others)} too, without a price"
        if "language" in others:
            line = f"lora.rank={keys['lora.rank']}: no adapters are in the language model, which is priced with them"
        reading = msgspec.structs.replace(reading, unpriced=(*reading.unpriced, line))
    if adapted and reading.setup.engine == MEGATRON and not swifts:  # its rule `lora_bridge`
        keys = {name: value for name, value in keys.items() if not name.startswith("lora.")}
        why = "adapters of a model that looks at images, in the tower too: all weights are priced as trained"
        reading = msgspec.structs.replace(reading, unpriced=(*reading.unpriced, f"lora.rank={reading.keys['lora.rank']}: {why}"))
    if (reading.image_pixels or reading.image_tokens) and vision.image_tokens is None:
        most = f"{reading.image_tokens} tokens, the most that one may have"
        keys["train.image_tokens"] = reading.image_tokens
        if reading.image_pixels:
            keys["train.image_tokens"] = max(1, reading.image_pixels // (vision.patch_size * vision.spatial_merge_size) ** 2)
            most = f"{reading.image_pixels} pixels, the most that one may have: {keys['train.image_tokens']} tokens"
        assumed = (*assumed, f"every sample has one image of {most}")
    priced = {*IMAGE_PIXELS} if "train.image_tokens" in keys else {*()}
    keys |= {"train.freeze": ",".join(parts)} if parts and not adapted else {}  # all but adapters is frozen anyway
    priced |= {name for name, part in FREEZING if part in parts or not adapted}
    unpriced = tuple(one for one in reading.unpriced if one.partition("=")[0].rpartition(".")[2] not in priced)
    return msgspec.structs.replace(reading, keys=keys, assumed=assumed, unpriced=unpriced)


def settings_of(reading: Reading, tree: Tree, machine: Machine) -> tuple[Settings, list[str]]:
    """The file's keys under the user's, and what was assumed. Raises InputError."""
    engines = list(ENGINES)
    assumed: list[str] = []
    given = dict(tree)
    keys = dict(reading.keys)
    by_recipe = reading.filled and "recipe" in given
    if by_recipe:
        del keys["train.precision"]
    ours = None if OF_A_MODEL & {*keys, *given} else on_hub().get(reading.model.rstrip("/"))
    if ours is not None:
        of_recipe = flatten(read_named("recipe", ours, "models")[1], ours)
        keys = {name: one.text for name, one in of_recipe.items() if name.startswith("model.")} | keys
        given.setdefault("name", ours)
        assumed.append(f"{TAKEN}{reading.model} is recipe={ours}'s, by its name; recipe= or model.hf_config= says another")
    elif not OF_A_MODEL & {*keys, *given}:
        why = "is missing: the file does not say its layers, width and heads; recipe= or model.hf_config= does"
        near = near_recipe(reading.model)
        raise InputError("model", None, f"{why}; by its name {reading.model} is near recipe={near}" if near else why)
    if "recipe" in given and "model.num_layers" in keys:  # the recipe says what the file leaves open, no more
        known = recipe.load_tree({name: given[name] for name in ("recipe", "cluster", "gpus") if name in given}, machine, engines)
        for name in reading.weak:
            keys[name] = getattr(known.architecture, name.removeprefix("model."))
        keys.setdefault("model.num_token_types", known.architecture.num_token_types)
        keys["name"] = str(given.pop("recipe"))
    elif "recipe" not in given and "model.name" not in given and "model.hf_config" not in given:
        given.setdefault("name", "audited")
    if "model.hf_config" in given:
        keys = {name: value for name, value in keys.items() if not name.startswith("model.")}
    if "cluster" not in given and not machine.num_gpus:
        keys["cluster"] = ASSUMED_CLUSTER
    if reading.accumulation is not None and "train.global_batch_size" not in given:
        keys["train.global_batch_size"] = _batch(reading, given, keys, machine)
    if "train.lr" in keys:  # a recipe's own end of the rate may be above it
        keys.setdefault("train.min_lr", 0.0)
    try:
        settings = recipe.load_tree({**recipe.as_texts(keys), **given}, machine, engines)
        precision = settings.training.precision
        if any(keys.get(name, precision) != precision for name in reading.following):
            keys |= dict.fromkeys(reading.following, precision if precision in ("fp32", "fp16") else "bf16")
            settings = recipe.load_tree({**recipe.as_texts(keys), **given}, machine, engines)
    except InputError as error:
        if error.key == "gpus" and error.value is None:
            raise NO_GPUS from None
        raise
    if reading.filled and "train.precision" not in given:
        who = "the recipe's is taken" if by_recipe else "nobody says what the Trainer fills in; train.precision= does"
        assumed.append(f"train.precision={precision}: {reading.filled} is auto, and {who}")
    if "cluster" in keys and "cluster" not in given and settings.cluster.name == ASSUMED_CLUSTER:
        assumed.append(f"cluster={ASSUMED_CLUSTER}: the file does not say on what it runs; cluster= does")
    if not {"gpus", "cluster.num_gpus"} & {*keys, *given}:
        assumed.append(f"gpus={settings.cluster.num_gpus}: the file does not say how many; gpus= does")
    return settings, assumed


def near_recipe(model: str) -> str | None:
    """The recipe of which all words stand in a model's name in their order, that with the most of them; None: there is none.

    >>> near_recipe("meta-llama/Meta-Llama-3-8B"), near_recipe("Qwen/Qwen3-30B-A3B-Base"), near_recipe("some/Other-8B")
    ('llama3_8b', 'qwen3_30b_a3b', None)
    """

    def parts(name: str) -> list[str]:
        return re.findall(r"[a-z]+|\d+[a-z]?", name.lower())

    def stands(name: str) -> bool:
        left = iter(parts(model.rstrip("/").rpartition("/")[2]))
        return all(part in left for part in parts(name))

    return max(filter(stands, stored("models")), key=lambda name: len(parts(name)), default=None)


def samples_of(reading: Reading, setup: Setup, gpus: int) -> int | None:
    """Samples of a step, where the file says its micro-batches; None: it does not."""
    if reading.accumulation is None:
        return None
    return reading.accumulation * setup.micro_batch_size * (gpus // (setup.tp * setup.pp * setup.cp))


def _batch(reading: Reading, given: Tree, keys: Tree, machine: Machine) -> int:
    """The step's samples by the file's micro-batches and the number of GPUs. Raises InputError where nobody says how many."""
    said = given.get("gpus", keys.get("gpus", machine.num_gpus or None))
    if said is None:
        raise NO_GPUS
    try:
        gpus = int(str(getattr(said, "text", said)))
        degrees = {name: int(str(given[f"pin.{name}"])) for name in ("tp", "pp", "cp") if f"pin.{name}" in given}
    except ValueError:
        return 1  # what is no number is refused with the other keys
    return samples_of(reading, msgspec.structs.replace(reading.setup, **degrees), gpus) or 1


def pinned(setup: Setup, pins: Pins) -> Setup:
    """The setup with what pin.* says in its place."""
    found: dict[str, Any] = {}
    for pin, value in pins.given().items():
        name = BY_PIN.get(pin, pin)
        found[name] = tuple(value.split("-")) if name == "rank_order" else value
    if "recompute" in found:
        found["recompute_layers"] = None
    return msgspec.structs.replace(setup, **{name: value for name, value in found.items() if name in Setup.__struct_fields__})
