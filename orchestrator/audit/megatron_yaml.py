"""YAML of Megatron's programs: Megatron-Bridge's ConfigContainer and its overrides, NeMo's Hydra configurations and NeMo 2's recipes, and
Megatron-LM's --yaml-cfg. Each kind of file has a `Schema`, by which its settings get Megatron's own names; audit/megatron.py makes of these
the model, the training and the parallel layout (`Setup`), and `read` gives them with a function that writes another setup into the file."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, NamedTuple

from msgspec.structs import replace

from orchestrator.audit import megatron
from orchestrator.audit.document import INTERPOLATION, Content, changed, leaves, resolved
from orchestrator.audit.reading import Reading, Setup, Source, names
from orchestrator.engines.megatron.requirements import NAME as MEGATRON
from orchestrator.engines.passthrough import FIELD_OF, flags, megatron_kind
from orchestrator.errors import InputError
from orchestrator.words import megatron as words

MISSING: Final = "???"
"""OmegaConf's for a value that must be given."""
Seen = dict[str, tuple[str, Any]]
"""The settings of a file, by Megatron's name (flag or field): their path in the file ("model.num_layers") and their value."""


class Schema(NamedTuple):
    """Where a kind of file has which of Megatron's settings."""

    kind: str
    """The kind of file, in words."""
    names: Mapping[str, str]
    """Paths whose name is not Megatron's own, with that."""
    sections: tuple[str, ...]
    """Sections whose settings have Megatron's own names."""
    others: tuple[str, ...]
    """Sections of data, logs, checkpoints and tools."""
    known: Collection[str] = ()
    """Names of settings in `sections` that are known beside Megatron's."""
    adapt: Callable[[Seen, Content], None] = lambda seen, content: None
    """Rewrites in place what the file says in another way than Megatron, from the settings seen so far and the whole file."""
    write: Callable[[str, Any], Any] = lambda path, value: value
    """The value that the file has at a path for one of Megatron's."""
    made: Mapping[str, Any] = {}
    """Defaults of the program, by Megatron's name."""


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
    for one in ("dataset.seq_length", "dataset.sequence_length"):
        value = dict(leaves(content)).get(one)
        if value is not None:
            seen.setdefault("seq_length", (one, value))


BRIDGE: Final = Schema(
    kind="Megatron-Bridge's configuration",
    names={
        "tokenizer.vocab_size": "vocab_size", "tokenizer.tokenizer_type": "tokenizer_type",
        "comm_overlap.tp_comm_overlap": "tp_comm_overlap",
        "comm_overlap.overlap_moe_expert_parallel_comm": "overlap_moe_expert_parallel_comm",
        "comm_overlap.delay_wgrad_compute": "delay_wgrad_compute",
        "model.virtual_pipeline_model_parallel_size": "virtual_pipeline_model_parallel_size",
    },
    sections=("model", "train", "optimizer", "scheduler", "ddp", "dist", "rng", "mixed_precision"),
    others=("checkpoint", "logger", "profiling", "ft", "straggler", "nvrx_straggler", "inprocess_restart", "validation", "dataset", "peft",
            "tokenizer", "rerun_state_machine", "env_vars", "tensor_inspect", "optimizer_config_override_provider"),
    known=names("bridge"),
    adapt=_bridge,
    made={"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True},
)  # fmt: skip
"""Megatron-Bridge's configuration (training/config.py, ConfigContainer; `made`: recipes/common.py)."""


# --------------------------------------------------------------------------------------------------------------------- NeMo

NEMO_SCHEDULES: Final = {"CosineAnnealing": "cosine", "WarmupAnnealing": "linear"}
DISTRIBUTED: Final = ("distributed_fused_adam", "mcore_distributed_optim")
STACKS: Final = {"encoder": "", "decoder": "decoder_"}


def _nemo(seen: Seen, content: Content) -> None:
    _trainer(seen, content)
    model = content.get("model", {})
    said = {name: seen[name][1] for name in seen}
    if "position_embedding_type" in said and said["position_embedding_type"] not in ("learned_absolute", "rope", "relative"):
        seen["position_embedding_type"] = (seen["position_embedding_type"][0], {"learned_parameters": "learned_absolute"}.get(
            said["position_embedding_type"], said["position_embedding_type"]))  # fmt: skip
    if "nemo_activation" in said:
        path, word = seen.pop("nemo_activation")
        word = str(word).removeprefix("fast-").replace("-", "_")
        if word in megatron.ACTIVATIONS:
            seen[word] = (path, True)
        elif word != "gelu":
            seen["nemo_activation"] = (path, word)
    if "nemo_optimizer" in said:
        path, word = seen.pop("nemo_optimizer")
        seen["use_distributed_optimizer"] = (path, word in DISTRIBUTED)
        seen["optimizer"] = (path, "sgd" if word == "sgd" else "adam" if "adam" in str(word) else word)
    betas = model.get("optim", {}).get("betas") if isinstance(model.get("optim"), dict) else None
    if isinstance(betas, list) and len(betas) == 2:
        seen |= {f"adam_beta{index + 1}": ("model.optim.betas", beta) for index, beta in enumerate(betas)}
    if "lr_decay_style" in said:
        seen["lr_decay_style"] = (seen["lr_decay_style"][0], NEMO_SCHEDULES.get(said["lr_decay_style"], said["lr_decay_style"]))
    if said.get("recompute_num_layers") in (0, "0") or said.get("recompute_granularity") == "selective":
        seen.pop("recompute_num_layers", None)
    if "share_embeddings_and_output_weights" not in said:
        seen["share_embeddings_and_output_weights"] = ("", True)  # megatron_gpt_model.py's default


def _trainer(seen: Seen, content: Content) -> None:
    """Reads GPUs and precision of Lightning's trainer."""
    trainer = content.get("trainer", {})
    precision = str(trainer.get("precision", "")).lower()
    if precision:
        kind = "bf16" if "bf16" in precision else "fp16" if precision.startswith("16") else ""
        seen |= {kind: ("trainer.precision", True)} if kind else {"fp32": ("trainer.precision", True)}


def _nemo_write(path: str, value: Any) -> Any:
    if path == "model.optim.name":
        return "mcore_distributed_optim" if value else "fused_adam"
    return value


NEMO_NAMES: Final = {
    "encoder_seq_length": "seq_length", "seq_length": "seq_length", "bias": "add_bias_linear", "activation": "nemo_activation",
    "rotary_percentage": "rotary_percent", "activations_checkpoint_granularity": "recompute_granularity",
    "activations_checkpoint_method": "recompute_method", "activations_checkpoint_num_layers": "recompute_num_layers",
    "activations_checkpoint_recompute": "recompute_modules",
    "virtual_pipeline_model_parallel_size": "virtual_pipeline_model_parallel_size", "ub_tp_comm_overlap": "tp_comm_overlap",
    "optim.name": "nemo_optimizer", "optim.lr": "lr", "optim.weight_decay": "weight_decay",
    "optim.overlap_grad_sync": "overlap_grad_reduce",
    "optim.overlap_param_sync": "overlap_param_gather", "optim.eps": "adam_eps", "optim.sched.name": "lr_decay_style",
    "optim.sched.warmup_steps": "lr_warmup_iters", "optim.sched.min_lr": "min_lr", "tokenizer.type": "tokenizer_type",
    "tokenizer.vocab_size": "vocab_size", "override_vocab_size": "vocab_size", "data.seq_length_dec": "decoder_seq_length", "seed": "seed",
    "share_embeddings_and_output_weights": "share_embeddings_and_output_weights", "num_moe_experts": "num_experts",
    "expert_model_parallel_size": "expert_model_parallel_size", "scale_positional_embedding": "use_rope_scaling",
    "qkv_bias": "add_qkv_bias", "fp8_recipe": "fp8_recipe",
}  # fmt: skip
"""Settings below model in NeMo 1 with Megatron's names (nlp/language_modeling/conf/megatron_gpt_config.yaml)."""
NEMO: Final = Schema(
    kind="NeMo's configuration",
    names={**{f"model.{name}": theirs for name, theirs in NEMO_NAMES.items()}, "trainer.gradient_clip_val": "clip_grad",
           "trainer.max_steps": "train_iters", "model.gradient_clip_val": "clip_grad",
           **{f"model.{part}.{name}": f"{prefix}{theirs}" for part, prefix in STACKS.items() for name, theirs in (
               *NEMO_NAMES.items(), *((one, one) for one in ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads",
                                                           "kv_channels", "normalization", "position_embedding_type", "hidden_dropout",
                                                           "attention_dropout")))}},
    sections=("model",),
    others=("run", "trainer", "exp_manager", "hydra", "defaults", "model.data", "model.nsys_profile", "model.tokenizer", "cluster",
            "data_dir", "name", "restore_from_path", "model.optim", "model.encoder", "model.decoder"),
    known=names("nemo"),
    adapt=_nemo,
    write=_nemo_write,
)  # fmt: skip
UNPRICED_TOO: Final = ("use_flash_attention", "transformer_engine", "bias_activation", "bias_dropout_add", "fsdp", "megatron_amp",
                       "reduce_amax", "use_emha", "activations_checkpoint_layers", "num_micro_batches_with",
                       "grad_allreduce_chunk")  # fmt: skip
"""NeMo's own that take time or memory."""


def _nemo2(seen: Seen, content: Content) -> None:
    _trainer(seen, content)
    plugin = content.get("trainer", {}).get("plugins")
    precision = str((plugin if isinstance(plugin, dict) else {}).get("precision", ""))
    if precision and "bf16" not in seen and "fp16" not in seen:
        seen["bf16" if "bf16" in precision else "fp16"] = ("trainer.plugins.precision", True)
    _activation(seen)


NEMO2: Final = Schema(
    kind="NeMo 2's recipe",
    names={
        "data.global_batch_size": "global_batch_size", "data.micro_batch_size": "micro_batch_size", "data.seq_length": "seq_length",
        "trainer.max_steps": "train_iters", "optim.lr_scheduler.warmup_steps": "lr_warmup_iters", "optim.lr_scheduler.min_lr": "min_lr",
        "trainer.plugins.grad_reduce_in_fp32": "grad_reduce_in_fp32", "trainer.plugins.fp8": "fp8",
        "trainer.plugins.fp8_recipe": "fp8_recipe",
        "model.config.num_moe_experts": "num_experts",
    },
    sections=("model.config", "trainer.strategy.ddp", "trainer.strategy", "optim.config"),
    others=("trainer", "log", "resume", "data", "executor", "tokenizer", "model.tokenizer", "model.optim", "optim", "peft"),
    known=names("nemo2"),
    adapt=_nemo2,
)  # fmt: skip
"""NeMo 2's recipes (nemo/collections/llm/recipes), as nemo_run writes one with --to-yaml."""
MEGATRON_LM: Final = Schema(
    kind="Megatron-LM's --yaml-cfg",
    names={},
    sections=("", "language_model", "model_parallel"),
    others=(),
    known=names("megatron_yaml_cfg"),
    adapt=lambda seen, content: _activation(seen),
)  # fmt: skip
"""Megatron-LM's --yaml-cfg (examples/gpt3/gpt_config.yaml, megatron/training/yaml_arguments.py)."""


def _activation(seen: Seen) -> None:
    """TransformerConfig's two fields as the flags' one."""
    func = next((seen[name] for name in ("activation_func._target_", "activation_func") if name in seen), None)
    gated = seen.pop("gated_linear_unit", ("", False))[1]
    seen.pop("activation_func._target_", None)
    seen.pop("activation_func._call_", None)
    seen.pop("activation_func", None)
    if func is None:
        return
    word = str(func[1]).rpartition(".")[2]
    if word == "swiglu" or (gated and word in ("silu", "swish")):
        seen["swiglu"] = (func[0], True)
    elif gated and word in ("gelu", "geglu"):
        seen["geglu"] = (func[0], True)
    elif word in megatron.ACTIVATIONS:
        seen[word] = (func[0], True)


def with_activation(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Plain fields, with Megatron's switch for the activation that they say.

    >>> with_activation({"gated_linear_unit": True, "activation_func": "silu"})
    {'swiglu': True}
    """
    seen: Seen = {name: (name, value) for name, value in fields.items()}
    _activation(seen)
    return {name: value for name, (_, value) in seen.items()}


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
    paths = {field: path for field, (path, _) in seen.items() if path}

    def edited(before: Setup, after: Setup, gpus: int) -> str | None:
        changes: dict[str, Any] = {}
        for field, value in megatron.fields_changed(before, after).items():
            path = paths.get(field) or paths.get(SAME.get(field, ""))
            if path is None and value is not None:
                path = _place(field, schema)
            if path is None:
                if value is not None:
                    return None
                continue
            there = seen.get(field) or seen.get(SAME.get(field, ""))
            if value is None and there is not None and isinstance(there[1], bool):
                value = False
            changes[path] = schema.write(path, value)
        return changed(text, name, changes)

    return Source(text=text, reading=reading, edited=edited)


SAME: Final = {
    "num_virtual_stages_per_pipeline_rank": "virtual_pipeline_model_parallel_size",
    "decoder_first_pipeline_num_layers": "num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage",
}
"""TransformerConfig's names of settings whose flags are called otherwise, by the flag's."""


def _place(field: str, schema: Schema) -> str | None:
    """Where a setting goes that the file does not have yet; None: nowhere that this knows."""
    field = SAME.get(field, field)
    back = {name: path for path, name in reversed(list(schema.names.items())) if ".encoder." not in path and ".decoder." not in path}
    if field in back:
        return back[field]
    ddp = ("overlap_grad_reduce", "overlap_param_gather", "use_distributed_optimizer")
    where = {
        BRIDGE.kind: "ddp" if field in ddp else "train" if field.endswith("batch_size") else "model",
        NEMO.kind: "model",
        NEMO2.kind: "trainer.strategy.ddp" if field in ddp else "trainer.strategy" if "parallel" in field else "model.config",
        MEGATRON_LM.kind: ""
        if field.endswith("batch_size") or field in ddp
        else "model_parallel"
        if "_parallel_size" in field
        else "language_model",
    }[schema.kind]
    return f"{where}.{field}" if where else field


def _seen(content: Content, schema: Schema) -> tuple[Seen, dict[str, list[str]], list[str]]:
    """Settings by Megatron's name; the others as "path=value", those that nobody here knows ("unknown") and those that cost nothing
    ("beside"); and notes on values that the file only refers to. Raises InputError for a value of the wrong type."""
    seen: Seen = {}
    lists: dict[str, list[str]] = {"unknown": [], "beside": []}
    notes: list[str] = []
    every = {FIELD_OF.get(name, name) for name in flags()}
    for path, value in leaves(content):
        if value in (None, {}, []):
            continue
        section = max((one for one in schema.sections if not one or path.startswith(f"{one}.")), key=len, default=None)
        last = path if not section else path.removeprefix(f"{section}.")
        name = schema.names.get(path)
        if name is None and section is not None:
            plain = FIELD_OF.get(last, last)
            name = (
                plain
                if plain in every or megatron_kind(plain) is not None or last.startswith(("activation_func", "gated_linear"))
                else None
            )
        if name is None:
            about = (
                last in schema.known or last.split(".")[0] in schema.known or last.rpartition(".")[2] in ("_target_", "_call_", "_factory_")
            )
            about = about or any(path == one or path.startswith(f"{one}.") for one in schema.others)
            about = about or (section is not None and "." in last and schema is BRIDGE)
            about = about or last in megatron.DEFAULTS or last in ("virtual_pipeline_model_parallel_size", "gradient_accumulation_fusion")
            if last in ALSO:
                seen.setdefault(ALSO[last], (path, value))
            else:
                lists["beside" if about else "unknown"].append(f"{path}={value}")
            continue
        if isinstance(value, str) and (INTERPOLATION in value or value == MISSING):
            notes.append(f"{path} is {value}, which this file does not say: taken as if it were not there")
            continue
        if name not in seen:
            seen[name] = (path, _typed(path, name, value))
        else:
            lists["beside"].append(f"{path}={value}")
    schema.adapt(seen, content)
    read = {path for path, _ in seen.values()}
    for kind, lines in lists.items():
        lists[kind] = [said for said in lines if said.partition("=")[0] not in read]
    return seen, lists, notes


ALSO: Final = {
    "virtual_pipeline_model_parallel_size": "virtual_pipeline_model_parallel_size",
    "num_layers_in_first_pipeline_stage": "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage": "num_layers_in_last_pipeline_stage",
    "share_embeddings_and_output_weights": "share_embeddings_and_output_weights",
    "add_qkv_bias": "add_qkv_bias",
    "use_megatron_fsdp": "use_megatron_fsdp",
    "use_torch_fsdp2": "use_torch_fsdp2",
}
"""TransformerConfig's and Bridge's fields that have no flag of that name."""


def _typed(path: str, name: str, value: Any) -> Any:
    """The value with the type that Megatron's setting `name` has; the file has it at `path`. Raises InputError."""
    kind = (megatron_kind(name) or "any").removesuffix("?")
    if kind == "int" and isinstance(value, str | float) and not isinstance(value, bool):
        try:
            number = float(value)
        except ValueError:
            raise InputError(path, value, "is no whole number") from None
        if number != int(number) and not name.startswith("lr_"):
            raise InputError(path, value, "is no whole number")
        return int(number)
    if kind in ("int", "float") and isinstance(value, dict | list | bool):
        if isinstance(value, list):
            return value
        raise InputError(path, value, "is no number")
    if kind == "float" and isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            raise InputError(path, value, "is no number") from None
    if kind == "bool" and not isinstance(value, bool):
        if str(value).lower() not in ("true", "false"):
            raise InputError(path, value, "is neither", ["true", "false"])
        return str(value).lower() == "true"
    return value


WHOLE: Final = ("num_layers", "hidden_size", "num_attention_heads")
"""A file without one of these says a part of a model: overrides of a recipe that has the rest."""
SIMPLE: Final = ("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "num_query_groups", "vocab_size", "hidden_dropout",
                 "attention_dropout")  # fmt: skip
"""What is taken of the model from such a file: settings that a recipe has under the same name."""


def _reading(seen: Seen, lists: dict[str, list[str]], notes: list[str], schema: Schema, content: Content) -> Reading:
    """All that the file says, sorted into a recipe's keys, the setup, and settings that neither has (`Reading`). Raises InputError."""
    fields = {name: value for name, (_, value) in seen.items()}
    model = content.get("model")
    model = model if isinstance(model, dict) else {}
    stack = "t5" if schema is NEMO and isinstance(model.get("encoder"), dict) else "bert" if "bert_binary_head" in model else ""
    if stack == "t5":
        fields.setdefault("decoder_seq_length", fields.get("seq_length"))
    for name, value in schema.made.items():
        if name not in fields:
            fields[name] = value
            notes.append(f"{name}={str(value).lower()}: the recipes' own where the file does not say")
    f = megatron.Fields({name: value for name, value in fields.items() if value is not None})
    whole = all(fields.get(name) for name in WHOLE)
    if not whole and schema in (NEMO, MEGATRON_LM):  # these say the whole model
        missing = next(name for name in WHOLE if not fields.get(name))
        raise InputError(missing, None, "is missing: the configuration does not say it")
    if schema is NEMO and model.get("mm_cfg"):
        raise InputError("model.mm_cfg", None, "a model of several modalities can't be described here")
    sequence = "seq_length" in fields or "max_position_embeddings" in fields
    if whole:
        keys = megatron.with_windows(megatron.model_keys(f, stack))
    else:
        keys = {f"model.{name}": f.get(name) for name in SIMPLE if name in fields}
        f.assumed.append("the model that you give: the file does not say its layers, width and heads")
        f.given.setdefault("seq_length", 1)
    trained = megatron.training_keys(f, stack)
    if not whole:
        trained = {
            name: value for name, value in trained.items() if SAID_BY.get(name) is None or any(one in fields for one in SAID_BY[name])
        }
        for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "micro_batch_size"):
            if name not in fields:
                f.assumed.append(f"{name}=1: the file does not say")
        if not sequence:
            trained.pop("train.seq_length", None)
    setup = megatron.setup_of(f, MEGATRON)
    keys |= trained
    gpus = gpus_of(content)
    if gpus is not None:
        keys["gpus"] = gpus
    silent = {name for name in seen if name in f.used or name == "fp32"}
    left = {name: f"{path}={value}" for name, (path, value) in seen.items() if name not in silent and path}
    unpriced = [said for name, said in left.items() if words.kind(name) == "cost"]
    more = [said for said in lists["beside"] if said.partition("=")[0].rpartition(".")[2].startswith(UNPRICED_TOO)]
    reading = Reading(
        format=schema.kind,
        keys=keys,
        weak=frozenset(f.weak),
        setup=setup,
        broken=tuple(f.broken),
        unknown=tuple(lists["unknown"]),
        unpriced=(*unpriced, *more),
        beside=(*(said for name, said in left.items() if said not in unpriced), *(said for said in lists["beside"] if said not in more)),
        assumed=(*notes, *f.assumed),
    )
    if content.get("peft"):
        return replace(reading, unpriced=(*reading.unpriced, f"peft={_one_line(content['peft'])}: all weights are priced as trained"))
    return reading


def _one_line(value: Any) -> str:
    return " ".join(str(value).split())[:80]


SAID_BY: Final[dict[str, tuple[str, ...]]] = {
    "train.lr": ("lr",), "train.min_lr": ("lr",), "train.steps": ("train_iters", "train_samples"), "train.schedule": ("lr_decay_style",),
    "train.warmup": ("train_iters", "train_samples"), "train.betas": ("adam_beta1", "adam_beta2"), "train.eps": ("adam_eps",),
    "train.weight_decay": ("weight_decay",), "train.clip": ("clip_grad",), "train.optimizer": ("optimizer",), "seed": ("seed",),
}  # fmt: skip
"""Settings that a file of overrides leaves to its recipe, by what would say them."""


def gpus_of(content: Content) -> int | None:
    """Nodes times devices; None: the file does not say."""
    trainer = content.get("trainer")
    if not isinstance(trainer, dict):
        return None
    nodes, devices = trainer.get("num_nodes", 1), trainer.get("devices")
    return nodes * devices if isinstance(nodes, int) and isinstance(devices, int) and devices > 0 else None
