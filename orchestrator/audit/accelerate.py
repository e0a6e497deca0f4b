"""accelerate's configuration (`accelerate config`): DeepSpeed's, Megatron-LM's and FSDP's plugins and plain data parallelism, read into a
setup, and written again. The model, the sequence and the batch are keys beside it: the script has them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from msgspec.structs import replace

from orchestrator.audit import hugging_face, megatron
from orchestrator.audit.deepspeed import BY_THE_MODEL
from orchestrator.audit.document import Content, File, Given
from orchestrator.audit.megatron_yaml import typed
from orchestrator.audit.reading import Reading, Setup, Source, changes
from orchestrator.engines.megatron.capabilities import NAME as MEGATRON
from orchestrator.errors import InputError
from orchestrator.words.terms import Table, Term, kinds, named

PREFIX: Final = "megatron_lm_config.megatron_lm_"
PLUGIN: Final = named(
    "tp_degree=tensor_model_parallel_size pp_degree=pipeline_model_parallel_size sequence_parallelism=sequence_parallel "
    "gradient_clipping=clip_grad recompute_granularity recompute_method recompute_num_layers recompute_activations "
    "use_distributed_optimizer expert_model_parallel_size expert_tensor_parallel_size context_parallel_size "
    "decoder_last_pipeline_num_layers num_layers_per_virtual_pipeline_stage use_custom_fsdp use_precision_aware_optimizer",
    PREFIX,
)
"""Settings of accelerate's Megatron-LM plugin, by Megatron's own names (utils/dataclasses.py, MegatronLMPlugin)."""
PLUGIN_DEFAULTS: Final = {
    "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1, "context_parallel_size": 2,
}  # fmt: skip
"""What the plugin takes where the file does not say (MegatronLMPlugin.__post_init__, accelerate 1.15.0)."""
KINDS: Final = (
    kinds("accelerate")
    | dict.fromkeys((term.theirs.partition(".")[2] for term in PLUGIN), "result")
    | {f"megatron_lm_{name}": kind for name, kind in kinds("accelerate_megatron").items()}
)
"""Settings of accelerate 1.15 (commands/config/config_args.py and cluster.py, commands/launch.py), with what each does that is not read."""
ONE_SAMPLE: Final = "micro-batches of 1: the training script says them; pin.micro_batch_size= does too"
ALONE: Final = ("NO", "MULTI_GPU", "MULTI_CPU")


def is_accelerate(content: Mapping[str, Any]) -> bool:
    """Whether a mapping is accelerate's."""
    return "distributed_type" in content or ("compute_environment" in content and "num_processes" in content)


def read(file: File) -> Source:
    """The reading of accelerate's configuration. Raises InputError."""
    content = file.content
    kind = str(content.get("distributed_type", "NO")).upper().replace("FALSE", "NO")
    given = Given({key: value for key, value in content.items() if value != {}})
    given.take("distributed_type")
    processes = given.number("num_processes")
    precision = str(given.get("mixed_precision", "no")).lower().replace("false", "no")
    if precision not in ("no", "bf16", "fp16", "fp8"):
        raise InputError("mixed_precision", precision, "is not known", ("no", "bf16", "fp16", "fp8"))
    if kind == "MEGATRON_LM":
        reading = _megatron(given, precision)
    elif kind in ("DEEPSPEED", "FSDP", *ALONE):
        reading = _ranks(given, kind, precision, content, file.name)
    else:
        raise InputError("distributed_type", kind, "is not planned for", ("DEEPSPEED", "MEGATRON_LM", "FSDP", *ALONE))
    if processes is not None:
        reading = replace(reading, keys={**reading.keys, "gpus": processes})
    return Source(file.text, hugging_face.sorted_out(given, KINDS, reading), partial(_changes, kind, content), file.change)


def _ranks(given: Given, kind: str, precision: str, content: Content, name: str) -> Reading:
    """The reading of a configuration for DeepSpeed, FSDP or DDP. Raises InputError."""
    assumed, named, missing, ds, steps = list[str](), None, None, hugging_face.zero(0), 1
    by_path: dict[str, Any] = {"bf16.enabled": precision in ("bf16", "fp8"), "fp16.enabled": precision == "fp16",
                               "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0}  # fmt: skip
    setup: dict[str, Any] = {}
    host: tuple[str, ...] = ()
    if kind == "DEEPSPEED":
        if file := (content.get("deepspeed_config") or {}).get("deepspeed_config_file"):
            given.take("deepspeed_config.deepspeed_config_file")
            ds, named, missing = hugging_face.named_ds_config(file, "deepspeed_config_file", name)
        else:
            stage = given.number("deepspeed_config.zero_stage")
            if stage is None:
                stage = 2
                assumed.append("ZeRO stage 2: the plugin's own where the file does not say")
            ds = hugging_face.zero(stage, given.get("deepspeed_config.offload_optimizer_device", "none") != "none")
            steps = given.number("deepspeed_config.gradient_accumulation_steps") or 1
            by_path["gradient_clipping"] = given.number("deepspeed_config.gradient_clipping", float) or 1.0
    elif kind == "FSDP":
        given.take("fsdp_config.fsdp_version")
        ds, host, said = hugging_face.fsdp(given, given.get("fsdp_config.fsdp_sharding_strategy"))
        assumed.append(said)
        if any(given.truth(f"fsdp_config.{name}") for name in hugging_face.CHECKPOINTS):
            setup["recompute"] = "full"
    else:
        assumed.append("priced as DeepSpeed's ZeRO-0: data parallelism alone")
    tp, cp, sp, shard, copies = (
        given.number(f"parallelism_config.parallelism_config_{size}_size") or 1 for size in ("tp", "cp", "sp", "dp_shard", "dp_replicate")
    )
    if copies > 1 and shard > 1:
        setup["zero_shard_size"] = shard
    assumed += [ONE_SAMPLE] if steps == 1 else []
    reading = hugging_face.as_ds(ds, by_path, f"accelerate's configuration, {kind}", named, assumed)
    own = reading.keys if named and ds else {"train.precision", "train.grad_reduce_dtype", "train.grad_accum_dtype", "train.clip"}
    keys = {key: value for key, value in reading.keys.items() if key in own} | ({"train.precision": "fp8"} if precision == "fp8" else {})
    kept = [line for line in reading.assumed if not (line.startswith("recompute=") and kind == "FSDP")]
    setup |= {"tp": tp if reading.setup.tp == 1 else reading.setup.tp, "cp": cp * sp if reading.setup.cp == 1 else reading.setup.cp}
    return replace(reading, keys=keys, setup=replace(reading.setup, **setup), accumulation=None, missing=missing,
                   steps=None if steps == 1 else steps, divided=steps > 1, assumed=tuple(kept), unpriced=(*host, *reading.unpriced),
                   fsdp=kind == "FSDP", elsewhere=reading.elsewhere if kind == "FSDP" else reading.elsewhere | BY_THE_MODEL)  # fmt: skip


def places(reading: Reading, name: str) -> dict[str, str]:
    """Choices that the file of this reading says for a command that names it, with their place there."""
    if reading.fsdp:
        return {"recompute": f"fsdp_config.{hugging_face.CHECKPOINTS[0]} in {name}"} if reading.setup.recompute == "full" else {}
    said = {choice: place for choice, place in reading.elsewhere.items() if choice not in BY_THE_MODEL}
    own = {"zero_stage": "zero_stage", "offload_optimizer": "offload_optimizer_device"} if reading.setup.zero_stage else {}
    return {choice: f"deepspeed_config.{field} in {name}" for choice, field in own.items()} | said


def _megatron(given: Given, precision: str) -> Reading:
    """The reading of a configuration for the Megatron-LM plugin. Raises InputError."""
    said = {term.ours: (term.theirs, given.get(term.theirs)) for term in PLUGIN}
    made = {name: value for name, value in PLUGIN_DEFAULTS.items() if said[name][1] is None}
    assumed = [
        ONE_SAMPLE,
        *(f"{name}={value}: the plugin's own where the file does not say (accelerate 1.15)" for name, value in made.items()),
    ]
    fields: dict[str, Any] = made | {name: typed(path, name, value) for name, (path, value) in said.items() if value is not None}
    steps = given.number(f"{PREFIX}num_micro_batches")
    if steps is not None:
        assumed.append(f"num_micro_batches={steps} follows from train.global_batch_size= and pin.micro_batch_size=")
    f = megatron.Fields(fields)
    setup = replace(megatron.setup_of(f, MEGATRON), micro_batch_size=1)
    keys = {"train.precision": "fp32" if precision == "no" else precision, "train.clip": float(fields.get("clip_grad", 1.0))}
    keys |= given.read(*(Term(f"{PREFIX}{name}", f"model.{name}", back=float) for name in ("hidden_dropout", "attention_dropout")))
    return Reading(format="accelerate's configuration, MEGATRON_LM", keys=keys, setup=setup, broken=tuple(f.broken),
                   unpriced=tuple(f.unpriced), assumed=(*assumed, *f.assumed))  # fmt: skip


def _table(kind: str, content: Content) -> Table:
    """Where a configuration of this kind has what it chooses; nothing where another file has it."""
    section = content.get("deepspeed_config") or {}
    if kind == "DEEPSPEED" and not section.get("deepspeed_config_file"):
        return (
            Term("deepspeed_config.zero_stage", "zero_stage"),
            Term("deepspeed_config.offload_optimizer_device", "offload_optimizer", to=lambda on: "cpu" if on else "none"),
        )
    if kind != "FSDP":
        return ()
    later = "fsdp_reshard_after_forward" in (content.get("fsdp_config") or {})
    return (
        Term("fsdp_config.fsdp_reshard_after_forward", "zero_stage", to=lambda stage: stage == 3)
        if later
        else Term("fsdp_config.fsdp_sharding_strategy", "zero_stage", to={3: "FULL_SHARD", 2: "SHARD_GRAD_OP"}.get),
        Term("fsdp_config.fsdp_activation_checkpointing", "recompute", to=lambda mode: mode == "full"),
        Term("fsdp_config.fsdp_offload_params", "offload_optimizer"),
    )


def _changes(kind: str, content: Content, before: Setup, after: Setup, gpus: int) -> dict[str, Any] | None:
    """New values of the file for another setup, by path; None: this file can't say the change."""
    if kind == "FSDP" and (after.recompute not in ("none", "full") or after.zero_stage not in (2, 3)):
        return None
    if kind != "MEGATRON_LM":
        values = changes(_table(kind, content), before, after)
        section = content.get("deepspeed_config") or {}
        on_host = str(section.get("offload_param_device", "none")) != "none"
        if values is not None and kind == "DEEPSPEED" and on_host and before.zero_stage == 3 != after.zero_stage:
            values["deepspeed_config.offload_param_device"] = "none"
        return values
    paths = {term.ours: term.theirs for term in PLUGIN}
    fields = megatron.fields_changed(before, after)
    if any(value is not None and name not in paths for name, value in fields.items()):
        return None
    return {paths[name]: value for name, value in fields.items() if name in paths}
