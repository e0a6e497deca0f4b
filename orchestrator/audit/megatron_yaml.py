"""Files of programs around Megatron (words/tools.py): each kind has a `Tool`, by which its settings get Megatron's own names;
audit/megatron.py makes of these the model, the training and the parallel layout (`Setup`), and `read` gives them with a function that
writes another setup into the file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from msgspec.structs import replace

from orchestrator.audit import bridge_recipe, megatron
from orchestrator.audit.document import INTERPOLATION, Content, File, Given, leaves, merged, named_model, resolved
from orchestrator.audit.reading import Lists, Reading, Setup, Source, listed
from orchestrator.audit.rollouts import of_a_policy, otherwise
from orchestrator.engines.megatron.capabilities import NAME as MEGATRON
from orchestrator.engines.passthrough import FIELD_OF, megatron_kind
from orchestrator.errors import InputError
from orchestrator.model.lora import ALL, MCORE_BRIDGE, MEGATRON_LINEARS
from orchestrator.strategy.legality import OF_ONE_LENGTH
from orchestrator.words import terms, tools
from orchestrator.words.megatron import ALIASES
from orchestrator.words.terms import NOTHING, Kind, Table, Term, kind_in, same, section
from orchestrator.words.tools import BRIDGE, EXPERT_TP, MS_SWIFT, NEMO, NEMO2, NEMO_RL, VERL, VERL_SFT, Seen, Tool
from orchestrator.words.trainer import FREEZES, IMAGE_PIXELS

TUNES_ALL: Final = (("tuner_type", "full"), ("train_type", "full"))
"""ms-swift's setting for weights that are trained as they are, which is its own under Megatron."""
MISSING: Final = "???"
"""OmegaConf's for a value that must be given."""
MORE: Final = ("activation_func", "gated_linear_unit", "share_embeddings_and_output_weights", "use_megatron_fsdp", "use_torch_fsdp2")
"""Fields of TransformerConfig and Bridge that Megatron-LM has no flag of."""
SWIFTS: Final = ("tuner_type", "train_type", "lora_", "target_modules", "target_regex", "modules_to_save", "use_rslora", "adapters",
                 "ref_adapters", "mcore_adapter", "mcore_ref_adapter", "freeze_vit=True", "freeze_aligner=True")  # fmt: skip
"""How lines begin on ms-swift's adapters, which are on the language model alone where the other parts are frozen, its own default."""


# ------------------------------------------------------------------------------------------------------------------ reading


def tool_of(content: Mapping[str, Any]) -> Tool | None:
    """The tool of a file, told by its sections; None: it is none of the four, or a recipe of this package."""
    sections = {name: value for name, value in content.items() if isinstance(value, dict)}
    if "actor_rollout_ref" in sections:
        return VERL
    if "engine" in sections and "optim" in sections:
        return VERL_SFT
    if isinstance(sections.get("policy", {}).get("megatron_cfg"), dict):
        return NEMO_RL
    if "micro_batch_size" in content and {"model", "max_length", "tuner_type", "tensor_model_parallel_size"} & {*content}:
        return MS_SWIFT
    if "language_model" in sections or "model_parallel" in sections:
        return tools.MEGATRON_LM
    model = sections.get("model", {})
    trainer = sections.get("trainer", {})
    if "strategy" in trainer or ("config" in model and "trainer" in sections):
        return NEMO2
    if "trainer" in sections and "model" in sections:
        return NEMO
    if "train" in sections or "ddp" in sections or "scheduler" in sections:
        ours = {*sections.get("train", {})} & {"steps", "seq_length", "precision", "tokens", "warmup"}
        return None if ours or isinstance(content.get("recipe"), str) else BRIDGE
    return None


def read(file: File, tool: Tool) -> Source:
    """What the file says, and how it is edited. Raises InputError for a value of the wrong type, and for models that can't be described."""
    content, said, command = resolved(file.content), file.notes, file.command
    recipe, model = bridge_recipe.named(command) if tool is BRIDGE else "", named_model(content)
    found = None
    if recipe:
        found, about = _of_recipe(recipe, file.name, str(section(content, "peft").get("scheme", "")))
        said = [about, *said]
    if found is not None:
        content, model = merged(found.content, content), model or found.model
    seen, lists, notes = _seen(content, tool)
    path, length = seen.get("seq_length", ("", None))
    longest = path if path == "max_length" and not content.get("packing") else ""  # ms-swift's samples, each as long as it is
    if longest:
        notes.append(f"every sequence has {path} = {length} tokens: shorter samples take less")
    policy = of_a_policy(content)
    freezes, pixels = dict[str, bool](), None
    if tool is BRIDGE:
        freezes = {tools.BRIDGE_FREEZES[path]: value is True for path, value in leaves(content) if path in tools.BRIDGE_FREEZES}
        parts = () if found is not None else frozen_by(command)[1]
        if left := [part for part in parts if part not in freezes]:
            notes.append(f"{recipe} freezes {' and '.join(left)} of its model, where the file does not say")
            freezes |= dict.fromkeys(left, True)
    elif tool is MS_SWIFT:
        freezes, pixels = Given(content).truths(FREEZES["ms_swift"]), Given(content).number(IMAGE_PIXELS[1])
    reading = _reading(seen, lists, [*said, *policy, *notes], tool, content, whole=tool not in (BRIDGE, NEMO2) or found is not None)
    reading = replace(reading, longest=longest, added=(*reading.added, *((OF_ONE_LENGTH,) if policy else ())), freezes=freezes,
                      image_pixels=pixels, model=model, otherwise=otherwise(content, command))  # fmt: skip

    def values(before: Setup, after: Setup, gpus: int) -> dict[str, Any] | None:
        changes: dict[str, Any] = {}
        fields = megatron.fields_changed(before, after)
        for field, value in fields.items():
            path, there = seen.get(field, ("", None))
            if value is None and not tool.nulls and fields.get(megatron.NEEDED.get(field, ""), NOTHING) is None:
                continue  # it does nothing then
            if field == EXPERT_TP in tool.made:
                value = after.etp
            if not path and value is None:
                continue
            found = [term for term in tool.table if (term.theirs, term.ours) == (path, field)] or tool.terms(field)
            if not path and not found:
                return None
            to = found[0].to if found else same
            off = NOTHING if value is not None or tool.nulls else tool.off.get(field, NOTHING)
            changes[path or found[0].theirs] = to(False if value is None and isinstance(there, bool) else value) if off is NOTHING else off
        return changes

    return Source(file.text, reading, values, file.change)


def _of_recipe(recipe: str, name: str, scheme: str) -> tuple[bridge_recipe.Set | None, str]:
    """(What a recipe of Bridge sets that Megatron, freezes or the price know; None: its source is not here. A line on it)."""
    root = bridge_recipe.source_of(name)
    found = None if root is None or "$" in recipe else bridge_recipe.read(root, recipe, scheme)
    if found is None:
        why = "Megatron-Bridge is not installed here, nor is the file in its checkout" if root is None else f"{root} has none of that name"
        why = "the script does not say which it is" if "$" in recipe else why
        return None, f"the recipe {recipe} is not read ({why}): what it sets may be other than what is assumed here"

    def counts(path: str) -> bool:
        known = bool(_terms(path, BRIDGE)) or path in tools.BRIDGE_FREEZES or path.startswith("peft.")
        return known or _kind(path, BRIDGE) in ("cost", "buffers")

    content: Content = {}
    for path, value in leaves(found.content):
        if value is not None and counts(path):
            terms.put(content, path, value)
    if isinstance(peft := content.get("peft"), dict):
        peft.setdefault("dim", RANK)
    open_ = [path for path in found.unknown if counts(path)]
    left = f"; only running it tells {', '.join(open_)}" if open_ else ""
    return found._replace(content=content), f"the recipe {recipe} of {root}: what it sets holds where the file says nothing{left}"


def frozen_by(words: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """The first of the words that is a recipe of Megatron-Bridge which freezes parts of its model, and the parts.

    >>> frozen_by(("run_recipe.py", "--recipe", "qwen35_vl_27b_pretrain_mock_config"))
    ('qwen35_vl_27b_pretrain_mock_config', ('vision',))
    """
    named = [word.removeprefix("--recipe=") for word in words]
    return next(((name, parts) for name in named for pattern, parts in tools.BRIDGE_FROZEN if re.fullmatch(pattern, name)), ("", ()))


def _terms(path: str, tool: Tool) -> Table:
    """The terms of a setting of the file; none where nobody here knows it as one of Megatron's."""
    if found := [term for term in tool.table if term.theirs == path]:
        return found
    section, name = tool.place(path)
    if section is None or name in tool.own:
        return ()
    name = ALIASES.get(name, FIELD_OF.get(name, name))
    return [Term(path, name)] if megatron_kind(name) is not None or name in ALIASES.values() or name.startswith(MORE) else ()


def _kind(path: str, tool: Tool) -> Kind | None:
    """What a setting does that is none of Megatron's; None: nobody knows that the tool has it."""
    section, name = tool.place(path)
    found = [of for one in (name, *name.split(".")) if (of := kind_in(tool.known, one))]
    if found:
        return "cost" if "cost" in found else found[0]
    known = name in megatron.DEFAULTS or name.rpartition(".")[2] in ("_target_", "_call_", "_factory_")
    known = known or bool(section and "." in name and tool is BRIDGE)
    return "harmless" if known or any(path == one or path.startswith(f"{one}.") for one in tool.others) else None


def _seen(content: Content, tool: Tool) -> tuple[Seen, Lists, list[str]]:
    """Settings by Megatron's name; the others as "path=value", by what they do ("unknown", "unpriced", "beside"); and notes on values that
    the file only refers to. Raises InputError for a value of the wrong type."""
    seen: Seen = {}
    others: dict[str, tuple[str, Kind | None, Any]] = {}
    notes: list[str] = []
    off = tuple(path.removesuffix("enabled") for path, value in leaves(content) if path.endswith(".enabled") and value is False)
    for path, value in leaves(content):
        if value in (None, {}, []):
            continue
        if path.startswith(off):  # of what is not used
            others[path] = f"{path}={value}", "harmless", value
            continue
        table = _terms(path, tool)
        if table and isinstance(value, str) and (INTERPOLATION in value or value == MISSING):
            notes.append(f"{path} is {value}, which this file does not say: taken as if it were not there")
            continue
        found = {term.ours: term.back(value) for term in table if term.ours not in seen}
        seen |= {name: (path, typed(path, name, one)) for name, one in found.items() if one is not NOTHING}
        if not found or NOTHING in found.values():
            none = table or (path, value) in TUNES_ALL
            others[path] = f"{path}={value}", "harmless" if none else _kind(path, tool), value
    tool.adapt(seen, content)
    read = {path for path, _ in seen.values()}
    return seen, listed(other for path, other in others.items() if path not in read), notes


def typed(path: str, name: str, value: Any) -> Any:
    """The value with the type that Megatron's setting `name` has; the file has it at `path`. Raises InputError."""
    kind = (megatron_kind(name) or "any").removesuffix("?")
    if kind not in ("int", "float", "bool") or isinstance(value, list):
        return value
    if kind == "bool":
        return Given({path: value}).truth(path)
    if isinstance(value, bool):
        raise InputError(path, value, "is no number")
    number = Given({path: value}).number(path, float)
    if kind == "int" and number != int(number) and not name.startswith("lr_"):
        raise InputError(path, value, "is no whole number")
    return int(number) if kind == "int" else number if isinstance(value, str) else value


def _reading(seen: Seen, lists: Lists, notes: list[str], tool: Tool, content: Content, *, whole: bool) -> Reading:
    """All that the file says, sorted into a recipe's keys, the setup, and settings that neither has (`Reading`). `whole`: the content has
    what a recipe below the file sets. Raises InputError."""
    fields = {name: value for name, (_, value) in seen.items()}
    model = section(content, "model")
    stack = "t5" if tool is NEMO and isinstance(model.get("encoder"), dict) else "bert" if "bert_binary_head" in model else ""
    if stack == "t5":
        fields.setdefault("decoder_seq_length", fields.get("seq_length"))
    made = {name: value for name, value in tool.made.items() if name not in fields}
    if not megatron.has_experts(fields, seen):  # who has none is told nothing of these
        fields |= {name: made.pop(name) for name in (EXPERT_TP, tools.PERMUTE_FUSION) if name in made}
    for name, value in made.items():
        of = "of all but deepseek_v2's, olmoe's, glm_45v's and qwen3_vl's, which have tp's" if (name, tool) == (EXPERT_TP, BRIDGE) else ""
        notes.append(f"{name}={str(value).lower()}: the recipes' own {of or 'where the file does not say'}")
    fields |= made
    if fields.get("optimizer_cpu_offload") and tool is not tools.MEGATRON_LM:
        fields.setdefault(megatron.OFFLOADED, 0.0)  # the class's default is none of it (core/optimizer/optimizer_config.py)
    samples, tensors = section(model, "data").get("seq_length"), model.get("encoder_seq_length")
    apart = ""
    if tool is NEMO and isinstance(samples, int) and isinstance(tensors, int) and samples != tensors:
        apart = (
            f"model.data.seq_length={samples} beside model.encoder_seq_length={tensors}: NeMo makes samples of the former, and stages of a "
            "pipeline wait for the latter (megatron_gpt_model.py:1673 and 767)"
        )
        if fields.get("pipeline_model_parallel_size") in (None, 1):
            fields["seq_length"] = samples
            notes.append(f"{apart}: priced with the former")
            apart = ""
    f = megatron.Fields({name: value for name, value in fields.items() if value is not None})
    f.broken += ([apart] if apart else []) + (megatron.of_full(f) if tool is not NEMO else [])
    missing = next((name for name in megatron.WHOLE if not fields.get(name)), None)
    if missing and tool in (NEMO, tools.MEGATRON_LM):  # these say the whole model
        raise InputError(missing, None, "is missing: the configuration does not say it")
    if tool is NEMO and model.get("mm_cfg"):
        raise InputError("model.mm_cfg", None, "a model of several modalities can't be described here")
    keys = megatron.part_keys(f, stack, seen) if missing else megatron.model_keys(f, stack) | megatron.training_keys(f, stack)
    setup = megatron.setup_of(f, MEGATRON)
    if (gpus := gpus_of(content, tool)) is not None:
        keys["gpus"] = gpus
    read, written = {path for name, (path, _) in seen.items() if name in f.used}, dict(leaves(content))
    said = {name: f"{path}={written.get(path, value)}" for name, (path, value) in seen.items() if path and path not in read}
    adapted, unpriced, taken = swifts_adapters(content) if tool is MS_SWIFT else adapters_of(content, tool, whole=whole)
    keys |= adapted
    notes += taken
    if adapted:
        own = tuple(path for of, path in ADAPTERS if of is tool) or SWIFTS
        lists |= {of: tuple(one for one in lines if not one.startswith(own)) for of, lines in lists.items()}
        if content.get("bridge_backend") == "megatron-bridge":
            f.broken.append("bridge_backend=megatron-bridge with adapters: ms-swift trains them by mcore-bridge alone")
    lists["unpriced"] += unpriced
    return megatron.reading_of(f, tool.kind, keys, setup, said, assumed=notes, **lists)


SCHEMES: Final = {"lora": 32, "vlm_lora": 32, "vlmlora": 32, "dora": 64, "canonical_lora": 32, "canonicallora": 32}
"""Kinds of Megatron-Bridge's adapters as its recipes, its classes and verl call them, with the alpha that each has by itself."""
ADAPTERS: Final = (
    (BRIDGE, "peft"), (NEMO2, "peft"), (VERL, "actor_rollout_ref.model.lora"), (VERL_SFT, "model.lora"),
    (NEMO_RL, "policy.megatron_cfg.peft"),
)  # fmt: skip
"""Where files of programs that train them by Bridge, or by NeMo 2's classes from which Bridge's are, have them."""
RANK: Final = 32
"""The rank of Bridge's adapters where nothing is said."""
OFF: Final = ("none", "null", "false")
"""Words for no adapters."""
SIDES: Final = {
    "linear_q": "q_proj", "linear_k": "k_proj", "linear_v": "v_proj", "linear_fc1_gate": "gate_proj", "linear_fc1_up": "up_proj",
}  # fmt: skip
"""CanonicalLoRA's names of linears that are one in megatron-core, and transformers'."""
WHOLE: Final = {"linear_proj": "o_proj", "linear_fc2": "down_proj"}
FUSED: Final = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
"""The linears that get adapters where nothing is said."""
PRICED: Final = {
    "a2a_experimental": False, "sequence_parallel_input_regather": False, "normalize_moe_lora": False, "share_expert_adapters": True,
    "experts_shared_outer_loras": False, "exclude_modules": None, "freeze_vision_model": True, "freeze_vision_projection": True,
    "freeze_language_model": True,
}  # fmt: skip
"""Fields of adapters that change bytes or seconds, with the values that are priced."""


def adapters_of(content: Content, tool: Tool, *, whole: bool) -> tuple[dict[str, Any], tuple[str, ...], tuple[str, ...]]:
    """The keys lora.* for adapters of Megatron-Bridge, what of them has no price, and what is taken where the file does not say it.
    `whole`: the content has what a recipe below the file sets."""
    path = next((path for of, path in ADAPTERS if of is tool), "")
    peft: Any = content.get("peft") if path in ("peft", "") else section(content, path)
    if tool in (VERL, VERL_SFT):
        peft = {**peft, "dim": peft["rank"]} if peft.get("rank") else None
    elif tool is NEMO_RL and not peft.get("enabled"):
        return {}, (), ()
    if not peft or str(peft).lower() in OFF:
        return {}, (), ()
    given = peft if isinstance(peft, dict) else {"scheme": peft}
    scheme = str(given.get("scheme", given.get("type", given.get("_target_", "lora")))).rpartition(".")[2].lower()
    if scheme in OFF:
        return {}, (), ()
    own = (*SIDES, *WHOLE) if scheme.startswith("canonical") else FUSED
    names = given.get("target_modules") or own
    found = {str(name): str(name).rpartition(".")[2].lstrip("*") for name in names} if isinstance(names, list | tuple) else {}
    known = [name for name in found.values() if name in SIDES or name in MEGATRON_LINEARS.values()]
    if not path or scheme not in SCHEMES or not known:
        return {}, (f"{path or 'peft'}={' '.join(str(peft).split())[:80]}: all weights are priced as trained",), ()
    several = not SIDES.keys().isdisjoint(known)
    keys = {
        "lora.rank": given.get("dim", RANK),
        "lora.alpha": given.get("alpha", SCHEMES[scheme]),
        "lora.targets": ",".join(SIDES.get(name) or WHOLE.get(name, name) if several else name for name in known),
        "lora.dropout": given.get("dropout") or 0.0,
    }
    unpriced = [f"{path}.target_modules={pattern}: " + ("in every layer" if name in known else "without a price")
                for pattern, name in found.items() if pattern != name or name not in known]  # fmt: skip
    unpriced += [f"{path}.{name}={given[name]}" for name, value in PRICED.items() if name in given and given[name] not in (value, [])]
    if scheme == "dora":
        unpriced.append(f"{path}.scheme=dora: priced as LoRA, without the norms of adapted weights that it takes in each pass")
    assumed = []
    if not whole and "_target_" not in given:  # a class has its own; a recipe that is not read may set others
        if "dim" not in given:
            unpriced.append(f"{path}.dim={RANK}: the class's own; a recipe that is not read may set another")
        if not given.get("target_modules"):
            assumed.append(f"{path}.target_modules={','.join(own)}: the class's own where the file does not say")
    return keys, tuple(unpriced), tuple(assumed)


def swifts_adapters(content: Content) -> tuple[dict[str, Any], tuple[str, ...], tuple[str, ...]]:
    """The keys lora.* by ms-swift's flags (3602360, swift/megatron/arguments/megatron_args.py, MegatronTunerMixin), and what `adapters_of`
    gives beside them. Raises InputError for a value of the wrong type."""
    given = Given(content)
    kind = str(content.get("tuner_type") or content.get("train_type") or "full")
    loaded = [name for name in ("adapters", "mcore_adapter", "ref_adapters", "mcore_ref_adapter") if content.get(name)]
    if kind == "full" and not loaded:
        return {}, (), ()
    said = content.get("target_modules") or ALL
    names = [str(name) for name in said] if isinstance(said, list) else [str(said)]
    known = [name for name in names if name in MEGATRON_LINEARS.values()]
    every = ALL in names or not known or bool(content.get("target_regex"))
    rank = given.number("lora_rank") or 8
    alpha = given.number("lora_alpha", float)
    keys = {
        "lora.rank": rank,
        "lora.alpha": (32 if alpha is None else alpha) * (rank**0.5 if given.truth("use_rslora") else 1),
        "lora.targets": ALL if every else ",".join(known),
        "lora.dropout": 0.05 if (dropout := given.number("lora_dropout", float)) is None else dropout,
        "lora.bridge": MCORE_BRIDGE,
    }
    left = ("target_regex", "modules_to_save", "lora_bias", "lora_dtype", *loaded)
    values = {name: content[name] for name in left if content.get(name) not in (None, "none", [])}
    unpriced = [f"target_modules={name}" for name in names if name not in (*known, ALL)] + [f"{name}={values[name]}" for name in values]
    if kind == "lora_llm":
        unpriced.append("tuner_type=lora_llm: trains what looks at images, priced as frozen")
    elif kind not in ("full", "lora"):
        unpriced.append(f"tuner_type={kind}: priced as LoRA")
    own = {"lora_rank": rank, "lora_dropout": keys["lora.dropout"], "target_modules": ALL}
    unsaid = [
        f"{name}={value}" for name, value in own.items() if content.get(name) is None and not (name == "target_modules" and not every)
    ]
    return keys, tuple(unpriced), (f"{' '.join(unsaid)}: ms-swift's own where the file does not say",) if unsaid else ()


def gpus_of(content: Content, tool: Tool) -> int | None:
    """Nodes times devices; None: the file does not say."""
    found = dict(leaves(content))
    nodes, devices = (found.get(path) for path in tool.nodes or ("", ""))
    nodes = 1 if nodes is None else nodes
    return nodes * devices if isinstance(nodes, int) and isinstance(devices, int) and devices > 0 else None
