"""YAML of Megatron's programs: Megatron-Bridge's ConfigContainer and its overrides, NeMo's Hydra configurations and NeMo 2's recipes, and
Megatron-LM's --yaml-cfg. Each kind of file has a `Schema`, by which its settings get Megatron's own names; audit/megatron.py makes of these
the model, the training and the parallel layout (`Setup`), and `read` gives them with a function that writes another setup into the file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any, Final, NamedTuple

from orchestrator.audit import megatron
from orchestrator.audit.document import INTERPOLATION, Content, Given, changed, leaves, resolved
from orchestrator.audit.megatron import ALIASES
from orchestrator.audit.reading import Lists, Reading, Setup, Source, listed
from orchestrator.engines.megatron.capabilities import NAME as MEGATRON
from orchestrator.engines.passthrough import FIELD_OF, megatron_kind
from orchestrator.errors import InputError
from orchestrator.model.shared import GATED
from orchestrator.words import megatron as words
from orchestrator.words.terms import NOTHING, Kind, Table, Term, kinds, named

MISSING: Final = "???"
"""OmegaConf's for a value that must be given."""
Seen = dict[str, tuple[str, Any]]
"""The settings of a file, by Megatron's name (flag or field): their path in the file ("model.num_layers") and their value."""


class Schema(NamedTuple):
    """Where a kind of file has which of Megatron's settings."""

    kind: str
    """The kind of file, in words."""
    table: Table
    """Terms from a path of the file to Megatron's name, where it is not the path's own or the value is said otherwise."""
    sections: tuple[str, ...]
    """Sections whose settings have Megatron's own names."""
    homes: tuple[tuple[str, str], ...]
    """Patterns of Megatron's names with the section in which such a setting is written, the first that fits."""
    others: tuple[str, ...] = ()
    """Sections of data, logs, checkpoints and tools."""
    known: Mapping[str, Kind] = {}
    """Names in `sections` that are none of Megatron's."""
    adapt: Callable[[Seen, Content], None] = lambda seen, content: None
    """Rewrites in place what the file says in several settings, from those seen so far and the whole file."""
    made: Mapping[str, Any] = {}
    """Defaults of the program, by Megatron's name."""

    def place(self, path: str) -> tuple[str | None, str]:
        """The section of Megatron's settings in which a path is, and its name there; (None, the path): it is in none."""
        section = max((one for one in self.sections if not one or path.startswith(f"{one}.")), key=len, default=None)
        return section, path.removeprefix(f"{section}.") if section else path

    def term(self, field: str) -> Term:
        """Where and how a setting is written that the file does not have yet."""
        for term in self.table:
            if term.ours == field and ".encoder." not in term.theirs:
                return term
        name = IN_YAML.get(field, field)
        home = next(section for pattern, section in self.homes if fnmatchcase(field, pattern))
        return Term(f"{home}.{name}" if home else name, field)


IN_YAML: Final = {flag: field for field, flag in ALIASES.items()}
"""TransformerConfig's names of settings whose flags are called otherwise, by the flag's."""
DATA_PARALLEL: Final = ("overlap_grad_reduce", "overlap_param_gather", "use_distributed_optimizer")


def _activation(seen: Seen) -> None:
    """Reads TransformerConfig's two fields as one of our activations."""
    func = next((seen[name] for name in ("activation_func._target_", "activation_func") if name in seen), None)
    gated = seen.pop("gated_linear_unit", ("", False))[1]
    for name in ("activation_func._target_", "activation_func._call_", "activation_func"):
        seen.pop(name, None)
    if func is not None and (word := activation_of(func[1], bool(gated))) is not None:
        seen["activation"] = (func[0], word)


def activation_of(func: Any, gated: bool) -> str | None:
    """An activation of ours, by the function's name in torch or Megatron and whether a gate multiplies it; None: there is none.

    >>> activation_of("torch.nn.functional.silu", True), activation_of("squared_relu", False), activation_of("relu", False)
    ('swiglu', 'relu2', 'relu')
    """
    word = str(func).rpartition(".")[2].removeprefix("fast-").replace("-", "_").replace("swish", "silu")
    if gated and word in words.FUNCTION.values():
        return next((ours for ours, name in words.FUNCTION.items() if name == word and ours in GATED), None)
    return words.activation({word: True})


# ------------------------------------------------------------------------------------------------------------------- Bridge

BRIDGE_PRECISION: Final = {"delayed": "delayed", "current": "tensorwise", "mxfp8": "mxfp8", "subchannel": "blockwise"}


def _bridge(seen: Seen, content: Content) -> None:
    mixed = content.get("mixed_precision")
    if isinstance(mixed, str):  # training/mixed_precision.py: bf16_with_fp8_current_scaling_mixed, ...
        seen["bf16" if "bf16" in mixed else "fp16"] = ("mixed_precision", True)
        if "fp8" in mixed:
            word = next((word for word in BRIDGE_PRECISION if word in mixed), "delayed")
            seen |= {"fp8": ("mixed_precision", "hybrid"), "fp8_recipe": ("mixed_precision", BRIDGE_PRECISION[word])}
        if "fp4" in mixed:
            seen["fp4"] = ("mixed_precision", "e2m1")
    elif "bf16" not in seen and "fp16" not in seen:
        seen["bf16"] = ("", True)
    _activation(seen)
    data = content.get("dataset")
    for name in ("seq_length", "sequence_length"):
        if isinstance(data, dict) and data.get(name) is not None:
            seen.setdefault("seq_length", (f"dataset.{name}", data[name]))


BRIDGE: Final = Schema(
    kind="Megatron-Bridge's configuration",
    table=[
        *named("vocab_size tokenizer_type", "tokenizer."),
        *named("tp_comm_overlap overlap_moe_expert_parallel_comm delay_wgrad_compute", "comm_overlap."),
    ],
    sections=("model", "train", "optimizer", "scheduler", "ddp", "dist", "rng", "mixed_precision"),
    homes=(*((name, "ddp") for name in DATA_PARALLEL), ("*batch_size", "train"), ("*", "model")),
    others=("checkpoint", "logger", "profiling", "ft", "straggler", "nvrx_straggler", "inprocess_restart", "validation", "dataset", "peft",
            "tokenizer", "rerun_state_machine", "env_vars", "tensor_inspect", "optimizer_config_override_provider"),
    known=kinds("bridge"),
    adapt=_bridge,
    made=dict.fromkeys(DATA_PARALLEL, True),
)  # fmt: skip
"""Megatron-Bridge's configuration (training/config.py, ConfigContainer; `made`: recipes/common.py)."""


# --------------------------------------------------------------------------------------------------------------------- NeMo

SCHEDULES: Final = {"CosineAnnealing": "cosine", "WarmupAnnealing": "linear"}
DISTRIBUTED: Final = ("mcore_distributed_optim", "distributed_fused_adam")


def _precision(word: Any) -> str:
    """The switch of Lightning's precision: bf16, fp16 or fp32."""
    said = str(word).lower()
    return "bf16" if "bf16" in said else "fp16" if said.startswith("16") else "fp32"


def _pair(betas: Any, index: int) -> Any:
    return betas[index] if isinstance(betas, list) and len(betas) == 2 else NOTHING


OF_MODEL: Final[Table] = (
    *named(
        "encoder_seq_length=seq_length seq_length data.seq_length_dec=decoder_seq_length bias=add_bias_linear qkv_bias=add_qkv_bias "
        "rotary_percentage=rotary_percent scale_positional_embedding=use_rope_scaling tokenizer.type=tokenizer_type "
        "tokenizer.vocab_size=vocab_size override_vocab_size=vocab_size activations_checkpoint_granularity=recompute_granularity "
        "activations_checkpoint_method=recompute_method activations_checkpoint_num_layers=recompute_num_layers "
        "activations_checkpoint_recompute=recompute_modules ub_tp_comm_overlap=tp_comm_overlap gradient_clip_val=clip_grad "
        "optim.lr=lr optim.weight_decay=weight_decay optim.overlap_grad_sync=overlap_grad_reduce "
        "optim.overlap_param_sync=overlap_param_gather optim.eps=adam_eps optim.sched.warmup_steps=lr_warmup_iters "
        "optim.sched.min_lr=min_lr"
    ),
    Term("activation", "activation", back=lambda word: activation_of(word, False) or NOTHING),
    Term("position_embedding_type", "position_embedding_type",
         back=lambda word: "learned_absolute" if word == "learned_parameters" else word),
    Term("optim.name", "use_distributed_optimizer", back=lambda word: word in DISTRIBUTED,
         to=lambda on: DISTRIBUTED[0] if on else "fused_adam"),
    Term("optim.name", "optimizer", back=lambda word: "sgd" if word == "sgd" else "adam" if "adam" in str(word) else word),
    Term("optim.betas", "adam_beta1", back=lambda betas: _pair(betas, 0)),
    Term("optim.betas", "adam_beta2", back=lambda betas: _pair(betas, 1)),
    Term("optim.sched.name", "lr_decay_style", back=lambda word: SCHEDULES.get(word, word)),
)  # fmt: skip
"""Terms below model (nlp/language_modeling/conf/megatron_gpt_config.yaml)."""
OF_STACK: Final[Table] = (
    *OF_MODEL,
    *named("num_layers hidden_size ffn_hidden_size num_attention_heads kv_channels normalization hidden_dropout attention_dropout"),
)
"""Terms below one of the stacks of T5."""


def _nemo(seen: Seen, content: Content) -> None:
    if precision := content.get("trainer", {}).get("precision"):
        seen[_precision(precision)] = ("trainer.precision", True)
    _, layers = seen.get("recompute_num_layers", ("", None))
    if layers in (0, "0") or seen.get("recompute_granularity", ("", ""))[1] == "selective":
        seen.pop("recompute_num_layers", None)
    if "untie_embeddings_and_output_weights" not in seen:
        seen.setdefault("share_embeddings_and_output_weights", ("", True))  # megatron_gpt_model.py's default


NEMO: Final = Schema(
    kind="NeMo's configuration",
    table=[
        *(term._replace(theirs=f"model.{term.theirs}") for term in OF_MODEL),
        *named("gradient_clip_val=clip_grad max_steps=train_iters", "trainer."),
        *(term._replace(theirs=f"model.{part}.{term.theirs}", ours=prefix + term.ours)
          for part, prefix in (("encoder", ""), ("decoder", "decoder_")) for term in OF_STACK),
    ],
    sections=("model",),
    homes=(("*", "model"),),
    others=("run", "trainer", "exp_manager", "hydra", "defaults", "model.data", "model.nsys_profile", "model.tokenizer", "cluster",
            "data_dir", "name", "restore_from_path", "model.optim", "model.encoder", "model.decoder"),
    known=kinds("nemo"),
    adapt=_nemo,
)  # fmt: skip


def _nemo2(seen: Seen, content: Content) -> None:
    plugin = content.get("trainer", {}).get("plugins")
    precision = content.get("trainer", {}).get("precision") or (plugin if isinstance(plugin, dict) else {}).get("precision")
    if precision and "bf16" not in seen and "fp16" not in seen:
        seen[_precision(precision)] = ("trainer.plugins.precision", True)
    _activation(seen)


NEMO2: Final = Schema(
    kind="NeMo 2's recipe",
    table=[
        *named("global_batch_size micro_batch_size seq_length", "data."),
        *named("warmup_steps=lr_warmup_iters min_lr", "optim.lr_scheduler."),
        *named("max_steps=train_iters", "trainer."),
        *named("grad_reduce_in_fp32 fp8 fp8_recipe", "trainer.plugins."),
    ],
    sections=("model.config", "trainer.strategy.ddp", "trainer.strategy", "optim.config"),
    homes=(*((name, "trainer.strategy.ddp") for name in DATA_PARALLEL), ("*parallel*", "trainer.strategy"), ("*", "model.config")),
    others=("trainer", "log", "resume", "data", "executor", "tokenizer", "model.tokenizer", "model.optim", "optim", "peft"),
    known=kinds("nemo2"),
    adapt=_nemo2,
)  # fmt: skip
"""NeMo 2's recipes (nemo/collections/llm/recipes), as nemo_run writes one with --to-yaml."""
MEGATRON_LM: Final = Schema(
    kind="Megatron-LM's --yaml-cfg",
    table=(),
    sections=("", "language_model", "model_parallel"),
    homes=(("*batch_size", ""), *((name, "") for name in DATA_PARALLEL), ("*_parallel_size", "model_parallel"), ("*", "language_model")),
    known=kinds("megatron_yaml_cfg"),
    adapt=lambda seen, content: _activation(seen),
)
"""Megatron-LM's --yaml-cfg (examples/gpt3/gpt_config.yaml, megatron/training/yaml_arguments.py)."""


# ------------------------------------------------------------------------------------------------------------------ reading


def schema_of(content: Mapping[str, Any]) -> Schema | None:
    """The schema of a file, told by its sections; None: it is none of the four, or a recipe of this package."""
    sections = {name: value for name, value in content.items() if isinstance(value, dict)}
    if "language_model" in sections or "model_parallel" in sections:
        return MEGATRON_LM
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


def read(text: str, name: str, content: Content, schema: Schema) -> Source:
    """The file `name` with this text and content: what it says, and how it is edited. Raises InputError for a value of the wrong type, and
    for models that can't be described."""
    seen, lists, notes = _seen(resolved(content), schema)
    reading = _reading(seen, lists, notes, schema, content)

    def edited(before: Setup, after: Setup, gpus: int) -> str | None:
        changes: dict[str, Any] = {}
        for field, value in megatron.fields_changed(before, after).items():
            path, there = seen.get(field, ("", None))
            term = next((term for term in schema.table if (term.theirs, term.ours) == (path, field)), None) or schema.term(field)
            if path or value is not None:
                changes[path or term.theirs] = term.to(False if value is None and isinstance(there, bool) else value)
        return changed(text, name, changes)

    return Source(text=text, reading=reading, edited=edited)


def _terms(path: str, schema: Schema) -> Table:
    """The terms of a setting of the file; none where nobody here knows it as one of Megatron's."""
    if terms := [term for term in schema.table if term.theirs == path]:
        return terms
    section, name = schema.place(path)
    if section is None:
        return ()
    name = ALIASES.get(name, FIELD_OF.get(name, name))
    return [Term(path, name)] if megatron_kind(name) is not None or name in ALIASES.values() or name.startswith(MORE) else ()


MORE: Final = ("activation_func", "gated_linear_unit", "share_embeddings_and_output_weights", "use_megatron_fsdp", "use_torch_fsdp2")
"""Fields of TransformerConfig and Bridge that Megatron-LM has no flag of."""


def _kind(path: str, schema: Schema) -> Kind | None:
    """What a setting does that is none of Megatron's; None: nobody knows that the tool has it."""
    section, name = schema.place(path)
    if found := schema.known.get(name) or schema.known.get(name.split(".")[0]) or schema.known.get(name.rpartition(".")[2]):
        return found
    known = name in megatron.DEFAULTS or name.rpartition(".")[2] in ("_target_", "_call_", "_factory_")
    known = known or bool(section and "." in name and schema is BRIDGE)
    return "harmless" if known or any(path == one or path.startswith(f"{one}.") for one in schema.others) else None


def _seen(content: Content, schema: Schema) -> tuple[Seen, Lists, list[str]]:
    """Settings by Megatron's name; the others as "path=value", by what they do ("unknown", "unpriced", "beside"); and notes on values that
    the file only refers to. Raises InputError for a value of the wrong type."""
    seen: Seen = {}
    others: dict[str, tuple[str, Kind | None, Any]] = {}
    notes: list[str] = []
    for path, value in leaves(content):
        if value in (None, {}, []):
            continue
        table = _terms(path, schema)
        if table and isinstance(value, str) and (INTERPOLATION in value or value == MISSING):
            notes.append(f"{path} is {value}, which this file does not say: taken as if it were not there")
            continue
        found = {term.ours: term.back(value) for term in table if term.ours not in seen}
        seen |= {name: (path, typed(path, name, one)) for name, one in found.items() if one is not NOTHING}
        if not found or NOTHING in found.values():
            others[path] = f"{path}={value}", "harmless" if table else _kind(path, schema), value
    schema.adapt(seen, content)
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


WHOLE: Final = ("num_layers", "hidden_size", "num_attention_heads")
"""A file without one of these says a part of a model: overrides of a recipe that has the rest."""
SIMPLE: Final = ("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "num_query_groups", "vocab_size", "hidden_dropout",
                 "attention_dropout")  # fmt: skip
"""What is taken of the model from such a file: settings that a recipe has under the same name."""


def _reading(seen: Seen, lists: Lists, notes: list[str], schema: Schema, content: Content) -> Reading:
    """All that the file says, sorted into a recipe's keys, the setup, and settings that neither has (`Reading`). Raises InputError."""
    fields = {name: value for name, (_, value) in seen.items()}
    model = content.get("model")
    model = model if isinstance(model, dict) else {}
    stack = "t5" if schema is NEMO and isinstance(model.get("encoder"), dict) else "bert" if "bert_binary_head" in model else ""
    if stack == "t5":
        fields.setdefault("decoder_seq_length", fields.get("seq_length"))
    made = {name: value for name, value in schema.made.items() if name not in fields}
    notes += [f"{name}={str(value).lower()}: the recipes' own where the file does not say" for name, value in made.items()]
    fields |= made
    if fields.get("optimizer_cpu_offload") and schema is not MEGATRON_LM:
        fields.setdefault(megatron.OFFLOADED, 0.0)  # the class's default is none of it (core/optimizer/optimizer_config.py)
    f = megatron.Fields({name: value for name, value in fields.items() if value is not None})
    whole = all(fields.get(name) for name in WHOLE)
    if not whole and schema in (NEMO, MEGATRON_LM):  # these say the whole model
        missing = next(name for name in WHOLE if not fields.get(name))
        raise InputError(missing, None, "is missing: the configuration does not say it")
    if schema is NEMO and model.get("mm_cfg"):
        raise InputError("model.mm_cfg", None, "a model of several modalities can't be described here")
    if whole:
        keys = megatron.model_keys(f, stack) | megatron.training_keys(f, stack)
    else:
        f.assumed.append("the model that you give: the file does not say its layers, width and heads")
        f.given.setdefault("seq_length", 1)
        trained = megatron.training_keys(f, stack).items()
        keys = {f"model.{name}": f.get(name) for name in SIMPLE if name in fields}
        keys |= {name: value for name, value in trained if name not in SAID_BY or not fields.keys().isdisjoint(SAID_BY[name])}
        sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "micro_batch_size")
        f.assumed += [f"{name}=1: the file does not say" for name in sizes if name not in fields]
    setup = megatron.setup_of(f, MEGATRON)
    if (gpus := gpus_of(content)) is not None:
        keys["gpus"] = gpus
    said = {name: f"{path}={value}" for name, (path, value) in seen.items() if path and name != "fp32"}
    if content.get("peft"):
        lists["unpriced"] += (f"peft={' '.join(str(content['peft']).split())[:80]}: all weights are priced as trained",)
    return megatron.reading_of(f, schema.kind, keys, setup, said, assumed=notes, **lists)


SAID_BY: Final[dict[str, tuple[str, ...]]] = {
    "train.lr": ("lr",), "train.min_lr": ("lr",), "train.steps": ("train_iters", "train_samples"), "train.schedule": ("lr_decay_style",),
    "train.warmup": ("train_iters", "train_samples"), "train.betas": ("adam_beta1", "adam_beta2"), "train.eps": ("adam_eps",),
    "train.weight_decay": ("weight_decay",), "train.clip": ("clip_grad",), "train.optimizer": ("optimizer",), "seed": ("seed",),
    "train.seq_length": ("seq_length", "max_position_embeddings"),
}  # fmt: skip
"""Settings that a file of overrides leaves to its recipe, by what would say them."""


def gpus_of(content: Content) -> int | None:
    """Nodes times devices; None: the file does not say."""
    trainer = content.get("trainer")
    if not isinstance(trainer, dict):
        return None
    nodes, devices = trainer.get("num_nodes", 1), trainer.get("devices")
    return nodes * devices if isinstance(nodes, int) and isinstance(devices, int) and devices > 0 else None
