"""What a user gives the engine directly: `megatron.<field or flag>=...` and `ds.<path>=...`.

An engine says which of the two groups it takes (`Engine.passes`). A name must be one that the planned megatron-core, Megatron-LM's parser
(megatron_versions.py) or DeepSpeed 0.19.8 knows (known.json; a test compares it with the installed engines), its text must be a value of
that field's type, and where the plan decides the same thing it must say the same: the plan was priced and checked with its own value. The
plan carries them in `extra`, so that it reproduces.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Final

from orchestrator.engines import megatron_parts
from orchestrator.engines.megatron_versions import RELEASES, by_name, content, names, release_of
from orchestrator.engines.transformer_config import NO_RECOMPUTE, PLAN, recompute_fields
from orchestrator.errors import InputError, nearest
from orchestrator.key import parse_as
from orchestrator.plan import Plan
from orchestrator.words import deepspeed as ds_words
from orchestrator.words import megatron as words
from orchestrator.words.terms import LONG_TYPES, SHORT_TYPES, put, short_type

MEGATRON, DS = "megatron", "ds"
GROUPS: Final = (MEGATRON, DS)
SECTIONS: Final = ("transformer_config", "ddp", "optimizer")
"""Sections of megatron-core's configuration: the layers', its data parallelism's, its optimizer's. An engine that brings the latter two
itself has the first alone."""
Passes = Mapping[str, Sequence[str]]
"""The groups of keys that an engine takes (`Engine.passes`), each with its sections."""

FLAG_OF: Final = {
    "bucket_size": "ddp_bucket_size",
    "average_in_collective": "ddp_average_in_collective",
    "pad_buckets_for_high_nccl_busbw": "ddp_pad_buckets_for_high_nccl_busbw",
    "check_for_nan_in_grad": "check_for_nan_in_loss_and_grad",
    "reduce_scatter_with_fp32_accumulation": "ddp_reduce_scatter_with_fp32_accumulation",
    "num_moe_experts": "num_experts",
    "fp8_param": "fp8_param_gather",
}
"""Fields whose flag has another name (Megatron-LM: training/training.py get_model, arguments.py core_transformer_config_from_args)."""
FIELD_OF: Final = {flag: field for field, flag in FLAG_OF.items()}

TUPLES: Final = ("window_size",)
"""Flags that take numbers in one word with commas (arguments.py, tuple_type)."""

OPEN_SECTIONS: Final = (
    "activation_checkpointing", "aio", "autotuning", "checkpoint", "comet", "compression_training", "curriculum_learning",
    "data_efficiency", "data_types", "datastates", "eigenvalue", "elasticity", "expert_parallel", "flops_profiler", "hybrid_engine",
    "nebula", "optimizer", "pipeline", "progressive_layer_drop", "scheduler", "sparse_attention", "tensor_parallel.tp", "timers",
    "torch_autocast", "weight_quantization", "zero_optimization.leaf_module", "zero_optimization.zenflow",
)  # fmt: skip
"""Sections of a ds_config whose members DeepSpeed does not declare in one place: any name below them is taken."""

NAME: Final = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*\Z")
NUMBERS: Final = {"bool": bool, "int": int, "float": float}
TYPES: Final = LONG_TYPES | {name: name for name in SHORT_TYPES}


# ------------------------------------------------------------------------------------------------------------ what is known


@cache
def fields(version: str | None = None) -> dict[str, dict[str, str]]:
    """The fields of megatron-core's configuration by section: name and kind. `version`: None for all that some release has."""
    versions = [version] if version is not None else [release.version for release in RELEASES]
    return {section: {name: kind for one in versions for name, kind in names(section, one).items()} for section in SECTIONS}


@cache
def flags(version: str | None = None) -> dict[str, tuple[str, str]]:
    """Megatron-LM's flags by destination: the flag and its kind ("true" and "false": without a value, and what it sets). `version`: None
    for all that some release has."""
    versions = [version] if version is not None else [release.version for release in RELEASES]
    return {destination: (flag, kind) for one in versions for destination, flag, kind in _by_flag(names("flags", one))}


def _by_flag(kinds: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """(destination, flag, kind) of flags as known.json names them: destination, or destination=flag."""
    for name, kind in kinds.items():
        destination, _, flag = name.partition("=")
        yield destination, flag or "--" + destination.replace("_", "-"), kind


@cache
def older_flags() -> dict[str, tuple[str, str]]:
    """Flags of Megatron-LM before 0.16 and of Megatron-DeepSpeed, with what they set and its kind."""
    return {flag: (destination, kind) for destination, flag, kind in _by_flag(by_name(content("known.json")["older_flags"]))}


@cache
def paths() -> dict[str, str]:
    """DeepSpeed's declared keys by path, with their kinds."""
    sections = {section: by_name(kinds) for section, kinds in content("known.json")["ds"].items()}
    return {f"{section}.{name}" if section else name: kind for section, names in sections.items() for name, kind in names.items()}


def megatron_kind(name: str, version: str | None = None) -> str | None:
    """The kind of a field, or of what its flag sets; None: unknown. `version`: None for all that some release has."""
    for section in SECTIONS:
        if name in fields(version)[section]:
            return fields(version)[section][name]
    kind = flags(version)[name][1] if name in flags(version) else None
    return {"true": "bool", "false": "bool", "both": "bool", "list": "any"}.get(kind, kind) if kind else None


# ------------------------------------------------------------------------------------------------------------------ reading


def read(group: str, name: str, value: Any) -> tuple[str, Any]:
    """(name, value) of one key as the plan carries it. `value`: text, a list of texts (YAML), or None. Raises InputError.

    >>> read("megatron", "init-method-std", "0.01"), read("megatron", "no-bias-dropout-fusion", "true")
    (('init_method_std', 0.01), ('bias_dropout_fusion', False))
    >>> read("ds", "zero_optimization.overlap_comm", "false")
    ('zero_optimization.overlap_comm', False)
    """
    key = f"{group}.{name}"
    if group == DS:
        found = typed(key, _ds_kind(key, name), value)
        _refuse_auto(key, found)
        return name, found
    canonical, negated = _canonical(name)
    known = megatron_kind(canonical)
    if known is None:
        everything = [*{n for s in SECTIONS for n in fields()[s]}, *flags()]
        close = nearest(canonical, everything)
        of = " or ".join(release.version for release in RELEASES)
        raise InputError(key, value, f"is no field or flag of Megatron-core {of}{f'; did you mean {group}.{close}?' if close else ''}")
    found = typed(key, known, value)
    return canonical, (not found if negated else found)


def _canonical(name: str) -> tuple[str, bool]:
    """A field's or destination's name, and whether the flag that was written says the opposite of it."""
    plain = name.replace("-", "_")
    for destination, (flag, kind) in flags().items():
        if flag.removeprefix("--").replace("-", "_") == plain and destination != plain:
            return FIELD_OF.get(destination, destination), kind == "false"
    return FIELD_OF.get(plain, plain), False


def _ds_kind(key: str, path: str) -> str:
    if not NAME.match(path):
        raise InputError(key, None, "is no path of a ds_config (zero_optimization.overlap_comm)")
    known = [*paths(), *OPEN_SECTIONS]
    inside = [name for name in known if name.startswith(f"{path}.")]
    if path in paths() and not inside and path not in OPEN_SECTIONS:
        return paths()[path]
    if any(path.startswith(f"{section}.") for section in OPEN_SECTIONS):
        return "any"
    if inside or path in OPEN_SECTIONS:
        raise InputError(key, None, f"is a section; write {key}.KEY=value", [name.removeprefix(f"{path}.") for name in inside])
    close = nearest(path, known) or next((name for name in known if name.rpartition(".")[2] == path.rpartition(".")[2]), None)
    raise InputError(key, None, f"is no key of DeepSpeed 0.19.8{f'; did you mean {DS}.{close}?' if close else ''}")


def typed(key: str, kind: str, value: Any) -> Any:
    """The value that a text stands for. Raises InputError."""
    optional, kind = kind.endswith("?"), kind.removesuffix("?")
    if value is None or (isinstance(value, str) and value.lower() in ("null", "none", "~") and (optional or kind == "any")):
        return None
    if kind == "any":
        return _any(value)
    if not isinstance(value, str):
        raise InputError(key, value, "needs one value, not a list or a group of keys")
    if kind in NUMBERS:
        return parse_as(key, NUMBERS[kind], value)
    if kind == "dtype":
        if value not in TYPES:
            raise InputError(key, value, "is no data type", TYPES)
        return TYPES[value]
    if "|" in kind and value not in kind.split("|"):
        raise InputError(key, value, "is not known", kind.split("|"))
    return value


def _any(value: Any) -> Any:
    """JSON where the text is some; a,b is a list."""
    if isinstance(value, list):
        return [_any(item) for item in value]
    if not isinstance(value, str):
        return value
    try:
        found = json.loads(value.lower() if value.lower() in ("true", "false") else value)
    except ValueError:
        return [_any(part) for part in value.split(",")] if "," in value else value
    return value if isinstance(found, float) and not math.isfinite(found) else found


# ----------------------------------------------------------------------------------------------------- what the plan decides

DECIDED: Final = {
    MEGATRON: {term.theirs: term for term in reversed(PLAN) if term.ours},
    DS: {term.theirs: term for term in ds_words.PLAN},
}
"""Terms of what a plan decides, by group and name."""


def decided_by(group: str, name: str, plan: Plan) -> tuple[str, Any] | None:
    """The plan's field that decides a setting of this group, and what the engine would be told; None: the plan says nothing of it."""
    if group == MEGATRON and name in words.EXPERT_SETTINGS:
        return "model.feed_forward", megatron_parts.config_fields(plan.model).get(name)
    if group == MEGATRON and name in NO_RECOMPUTE:  # one value where all stages say the same, else all of them
        found = [recompute_fields(plan, stage)[name] for stage in range(plan.pp)]
        return "stages.recompute", found[0] if all(value == found[0] for value in found) else found
    term = DECIDED[group].get(name)
    return None if term is None else (term.ours, term.value(plan))


def _distributed_activations(plan: Plan) -> str | None:
    """What a plan lacks for Megatron to distribute saved activations (arguments.py:884, transformer_config.py:1187); None: nothing."""
    if plan.tp == 1:
        return "tp=2 or more"
    if plan.sequence_parallel:
        return "sequence_parallel=false"
    whole = all(recompute_fields(plan, stage)["recompute_granularity"] == "full" for stage in range(plan.pp))
    return None if whole else "recompute=full on every stage"


def reaches(passes: Passes, extra: dict[str, dict[str, Any]]) -> bool:
    """Whether an engine that passes these groups has all that these values are for."""
    return all(group in passes for group, values in extra.items() if values)


def check_reached(engine: str, extra: dict[str, dict[str, Any]], all_passes: Mapping[str, Passes]) -> None:
    """Raises InputError for the first value that this engine has no configuration for, with the engines that have. `all_passes`: by
    engine."""
    for group, values in extra.items():
        if values and group in GROUPS and group not in all_passes.get(engine, {}):
            name, value = next(iter(values.items()))
            others = [other for other, passes in all_passes.items() if group in passes]
            raise InputError(f"{group}.{name}", _said(value), f"does not reach engine={engine}", others)


def check(plan: Plan, passes: Passes) -> None:
    """Raises InputError where a name is unknown, the plan's engine, which passes these groups, has no such configuration, or the plan
    decides otherwise."""
    for group in plan.extra:
        if group not in GROUPS:
            raise InputError("extra", group, "is no group of the plan's pass-through", GROUPS)
    check_reached(plan.engine, plan.extra, {plan.engine: passes})
    for name, value in plan.extra.get(MEGATRON, {}).items():
        _check_megatron(plan, name, value, passes[MEGATRON])
    for path, value in plan.extra.get(DS, {}).items():
        key = f"{DS}.{path}"
        _check_type(key, _ds_kind(key, path), value)
        _refuse_auto(key, value)
        for section, field in ds_words.WHOLE_SECTIONS.items():
            if path.startswith(f"{section}."):
                raise InputError(key, _said(value), f"contradicts the plan: {field} decides it; change that")
        _agree(key, value, decided_by(DS, path, plan))


def _check_megatron(plan: Plan, name: str, value: Any, sections: Sequence[str]) -> None:
    key = f"{MEGATRON}.{name}"
    version = _version(plan)
    kind = megatron_kind(name, version)
    if megatron_kind(name) is None or name in FIELD_OF:
        canonical, _ = read(MEGATRON, name, _said(value))  # says what is near
        raise InputError(key, _said(value), f"is called {canonical} in a plan")
    if kind is None:
        has = [release.version for release in RELEASES if megatron_kind(name, release.version) is not None]
        planned = f"Megatron-core {version}, which the plan is for (cluster.software.megatron_core)"
        why = f"is no field or flag of {planned}; {', '.join(has)} has it"
        raise InputError(key, _said(value), why)
    _check_type(key, kind, value)
    _agree(key, value, decided_by(MEGATRON, name, plan))
    if name == "distribute_saved_activations" and value and (lacking := _distributed_activations(plan)):
        raise InputError(key, _said(value), f"is refused by Megatron: it needs {lacking}")
    if name == words.HYBRID_CP and value:
        raise InputError(key, _said(value), f"{words.NO_HYBRID_CP}; pin.cp= divides every sample alike")
    known = fields(version)
    if not any(name in known[section] for section in sections) and any(name in known[section] for section in SECTIONS):
        why = f"is of Megatron's data parallelism or optimizer, and engine={plan.engine} has DeepSpeed's; {DS}.* reaches those"
        raise InputError(key, _said(value), why)


PYTHON: Final[dict[str, tuple[type, ...]]] = {"bool": (bool,), "int": (int,), "float": (float, int), "any": (object,)}


def _check_type(key: str, kind: str, value: Any) -> None:
    """Raises InputError for a value that is none of its type, in a plan that a hand may have changed."""
    plain = kind.removesuffix("?")
    if value is None and (kind.endswith("?") or plain == "any"):
        return
    if not isinstance(value, PYTHON.get(plain, (str,))) or (isinstance(value, bool) and plain not in ("bool", "any")):
        raise InputError(key, _said(value), f"is no value of its type, {plain}")
    if isinstance(value, str) and plain != "any":
        typed(key, kind, value)


def _agree(key: str, value: Any, decided: tuple[str, Any] | None) -> None:
    if decided is not None and value != decided[1]:
        field, there = decided
        raise InputError(key, _said(value), f"contradicts the plan's {field}, for which it would be {_said(there)}; change that one")


def _refuse_auto(key: str, value: Any) -> None:
    """DeepSpeed drops an "auto" that no Hugging Face Trainer fills in, and takes its default (engines README, silently wrong 10)."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for item in inside:
        _refuse_auto(key, item)
    if value == "auto":
        raise InputError(key, "auto", "is filled in by the Hugging Face Trainer alone; write the value")


def _said(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


# ------------------------------------------------------------------------------------------------------------------ applying


def _version(plan: Plan) -> str:
    """Version of the release that the plan is made for."""
    return release_of(plan.cluster.software.megatron_core).version


def with_megatron(engine: dict[str, Any], plan: Plan, sections: Sequence[str]) -> dict[str, Any]:
    """engine.json with the user's fields in every one of its `sections` that has them."""
    extra = plan.extra.get(MEGATRON, {})
    changed = dict(engine)
    for section in sections:
        more = {name: value for name, value in extra.items() if name in fields(_version(plan))[section]}
        if more:
            changed[section] = engine[section] | more
    return changed


def _destination(plan: Plan, name: str) -> str:
    """The flag's destination of a field: bias_activation_fusion has one flag for each activation (arguments.py:1335)."""
    if name == "bias_activation_fusion":
        return "bias_swiglu_fusion" if plan.model.activation == "swiglu" else "bias_gelu_fusion"
    return FLAG_OF.get(name, name)


def flag_of(name: str, value: Any, version: str) -> tuple[str, ...] | None:
    """A setting by its flag's destination as that release's command line says it; None: by leaving the flag out."""
    flag, kind = flags(version)[name]
    if kind in ("true", "false"):
        return (flag,) if value is (kind == "true") else None
    if kind == "both":
        return (flag if value else flag.replace("--", "--no-", 1),)
    if value is None:
        return None
    items = value if isinstance(value, list) and kind == "list" else [value]
    if isinstance(value, list) and kind != "list":
        items = [",".join(map(str, value)) if name in TUPLES else megatron_parts.pattern(value)]
    return flag, *(_word(item) for item in items)


def flags_of(settings: Mapping[str, Any], version: str) -> list[tuple[str, ...]]:
    """Settings by the names of fields, as that release's command line says them.

    >>> flags_of({"tensor_model_parallel_size": 2, "add_bias_linear": False, "add_qkv_bias": False}, "0.16.1")
    [('--tensor-model-parallel-size', '2'), ('--disable-bias-linear',)]
    """
    found = [flag_of(FLAG_OF.get(name, name), value, version) for name, value in settings.items()]
    return [flag for flag in found if flag is not None]


def with_flags(found: Sequence[tuple[str, ...]], plan: Plan) -> tuple[tuple[str, ...], ...]:
    """The argument list with the user's flags: in the place of ours, or at the end."""
    changed = {flag[0]: flag for flag in found}
    for name, value in plan.extra.get(MEGATRON, {}).items():
        destination = _destination(plan, name)
        if destination not in flags(_version(plan)) or decided_by(MEGATRON, name, plan):
            continue
        flag = flag_of(destination, value, _version(plan))
        if flag is None:
            changed.pop(flags(_version(plan))[destination][0], None)
        else:
            changed[flag[0]] = flag
    return tuple(changed.values())


def _word(value: Any) -> str:
    return short_type(value) if isinstance(value, str) else json.dumps(value)


def with_ds(config: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """A ds_config with the user's values at their paths. What the plan decides stands there already, or is left out for a reason."""
    changed: dict[str, Any] = json.loads(json.dumps(config))
    for path, value in plan.extra.get(DS, {}).items():
        if path not in DECIDED[DS]:
            put(changed, path, value)
    return changed


def notes(plan: Plan) -> tuple[str, ...]:
    """Which of the user's names reach one of the worker and the argument list alone."""
    extra = plan.extra.get(MEGATRON, {})
    by_hand = [name for name in extra if not any(name in fields(_version(plan))[section] for section in SECTIONS)]
    worker = [name for name in extra if _destination(plan, name) not in flags(_version(plan))]
    found = []
    if by_hand:
        found.append(f"megatron_args.sh alone has {', '.join(by_hand)}: flags of Megatron-LM's programs, no fields that our worker sets.")
    if worker:
        found.append(f"Our worker alone has {', '.join(worker)}: Megatron-LM has no flag for it.")
    return tuple(found)
