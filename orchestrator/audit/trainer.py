"""Arguments of Hugging Face's Trainer in a YAML or JSON file, as TRL, alignment-handbook and LLaMA-Factory keep them: read into a setup,
and written again. The model is a key beside it, unless it is a folder here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from msgspec.structs import replace

from orchestrator.audit import hugging_face
from orchestrator.audit.around_trainer import GROUPS, TUNES, around, as_trainers
from orchestrator.audit.deepspeed import without_stage_3
from orchestrator.audit.document import AUTO, Content, File, Given
from orchestrator.audit.reading import LISTS, Reading, Setup, Source, axolotls_experts, changes
from orchestrator.audit.rollouts import otherwise
from orchestrator.errors import InputError
from orchestrator.strategy.capabilities import StateBytes
from orchestrator.words import deepspeed as ds_words
from orchestrator.words import trainer as words
from orchestrator.words.terms import Term, always, kinds, nested, say, section
from orchestrator.words.trainer import AROUND, Around

MICRO, STEPS = "per_device_train_batch_size", "gradient_accumulation_steps"
KINDS: Final = kinds("trainer", "trainer_older", "around_trainer")
"""Fields of TrainingArguments (transformers 5; a test compares) and of older versions, and settings of the programs around the Trainer
(TRL, alignment-handbook, LLaMA-Factory, transformers' examples), with what each does."""
LOADED: Final = ("torch_dtype", "dtype", "model_init_kwargs.torch_dtype", "model_init_kwargs.dtype")
"""The type in which weights are loaded, as TRL, ms-swift and scripts around the Trainer have it."""
LLAMA_FACTORYS: Final = {"finetuning_type", "cutoff_len", "pure_bf16"}
"""Settings by which a file is LLaMA-Factory's."""
LLAMA_FACTORYS_OWN: Final = {"stage", "cutoff_len"}
"""Settings that no other program has."""
ENOUGH: Final = {STEPS, "num_train_epochs", "num_epochs", "micro_batch_size"}
"""Settings of which one, beside a rate, says that a file has such arguments."""
FILLED: Final = ("packing", "neat_packing", "sample_packing", "pad_to_sequence_len", "pad_to_max_length")
"""Switches with which every sequence is as long as the longest may be."""
LENGTHS: Final = ("max_seq_length", "max_length", "cutoff_len", "block_size", "model_max_length")
IN_16_BITS: Final = tuple(StateBytes(weight=2, gradient=2, master=0, moments=4, step=step) for step in (0, 2))
IN_32_BITS: Final = tuple(StateBytes(weight=4, gradient=4, master=0, moments=8, backward=2, step=step) for step in (0, 4))
"""Bytes per parameter of torch's data parallelism by the type of the weights; the second of each are of torch's AdamW without fused=True,
whose step has a square root of every second moment (torch/optim/adamw.py, _multi_tensor_adamw). In fp32 autocast keeps the 16-bit copies of
weights from forward to backward."""
KEEPS: Final = AROUND["llama_factory"].keeps
OF_A_SECTION: Final = tuple(
    term for term in ds_words.PLAN if term.ours in ("zero_stage", "offload_optimizer", "tp") and term not in ds_words.OTHERWISE
)
"""What a ds_config inside of such a file says of a setup."""
QUANTISED: Final = ("quantization_bit", "quant_bits")
TRAINED: Final = ("lora_r", "lora_rank")


def is_trainer(content: Mapping[str, Any]) -> bool:
    """Whether a mapping has the Trainer's arguments."""
    return MICRO in content or "base_model" in content or ("learning_rate" in content and ENOUGH & {*content} != set())


def read(file: File) -> Source:
    """The reading of arguments of Hugging Face's Trainer. Raises InputError."""
    content = file.content
    if "dist_config" in content and "model_class" in content:
        raise InputError("audit", file.name, "is of LLaMA-Factory's v1, a preview; its files with stage and finetuning_type are read")
    program = around(content)
    given = content if program is None else as_trainers(content, program)
    reading, ds = _reading(given, file.name, program)
    if program is AROUND["ms_swift"] and TUNES.isdisjoint(content):
        reading = replace(reading, assumed=(*reading.assumed, "finetuning_type=lora: ms-swift's own where the file does not say"))
    names = {} if program is None else program.names
    theirs = {field: tuple(_named(line, names) for line in getattr(reading, field)) for field in {"assumed", *LISTS.values()}}
    theirs["assumed"] = (*file.notes, *theirs["assumed"])
    reading = replace(reading, longest=_named(reading.longest, names), otherwise=otherwise(content, file.command), **theirs)

    def change(values: Mapping[str, Any]) -> str | None:
        return file.change({names.get(path, path): value for path, value in values.items()})

    where = ds if ds == "fsdp" or isinstance(content.get(ds), str | dict) else ""
    return Source(file.text, reading, partial(_changes, given, program, where), change)


def _named(line: str, names: Mapping[str, str]) -> str:
    """What is said of a file, with the names that its program has in place of the Trainer's."""
    return re.sub(r"\w+", lambda word: names.get(word[0], word[0]), line)


def _reading(content: Content, name: str, program: Around | None) -> tuple[Reading, str]:
    """The reading, and where the ZeRO stage stands: "deepspeed", "fsdp", or "" for nowhere in this file. Raises InputError."""
    if "tensor_model_parallel_size" in content:
        why = "is Megatron's, behind a Trainer: no format is read yet that has both"
        raise InputError("tensor_model_parallel_size", content["tensor_model_parallel_size"], why)
    flat = {key: value for key, value in content.items() if not (key == "deepspeed" and isinstance(value, dict))}
    if isinstance(flat.get("fsdp_config"), str):
        flat["fsdp_config"] = hugging_face.named_ds_config(flat["fsdp_config"], "fsdp_config", name)[0] or flat["fsdp_config"]
    given = Given(flat)
    assumed: list[str] = []
    named, missing, where = None, None, ""
    ds: Content = {}
    said = given.read(*words.PLAN)
    said["training.betas"] = [given.read(term)["training.betas"] for term in words.OPTIMIZER if term.ours == "training.betas"]
    plain = not content.get("deepspeed") and not flat.get("fsdp")
    loaded = next((str(value) for name in LOADED if (value := given.values.get(name)) is not None), "")
    given.take(*LOADED)
    if given.truth("pure_bf16") or (plain and loaded == "bfloat16"):
        said["training.precision"] = "bf16"
    said.setdefault("training.precision", "fp32")
    by_path = {term.theirs: term.to(said[term.ours]) for term in ds_words.PLAN if term.ours in said}
    if MICRO not in flat:
        assumed.append(f"{MICRO}=8: TrainingArguments' own")
    sharded = given.get("fsdp")
    host: tuple[str, ...] = ()
    recomputes = bool(sharded) and any(given.truth(f"fsdp_config.{name}") for name in hugging_face.CHECKPOINTS)
    if content.get("deepspeed"):
        given.used.add("deepspeed")
        ds, named, missing = hugging_face.named_ds_config(content["deepspeed"], "deepspeed", name)
        where = "" if named else "deepspeed"
        kind = ", with DeepSpeed"
    elif sharded:
        parts = [str(word) for word in (sharded if isinstance(sharded, list) else str(sharded).split())]
        strategy = next((word for word in parts if word.lower() in hugging_face.SHARDED), "full_shard")
        ds, host, said_so = hugging_face.fsdp(given, strategy, parts)
        where = "fsdp"
        assumed.append(said_so)
        kind = ", with FSDP"
    else:
        ds = hugging_face.zero(0)
        assumed.append("no deepspeed and no fsdp: priced as data parallelism alone, unless accelerate's own file says more")
        kind = ""
    kind = ("arguments of Hugging Face's Trainer" if program is None else program.kind) + kind
    reading = hugging_face.as_ds(ds, by_path, kind, named, assumed, "deepspeed.")
    both = all(str(given.values.get(name)).lower() == "true" for name in ("bf16", "fp16"))  # transformers 5.23, training_args.py
    if _is_llama_factorys(content, program):
        checkpoints = not given.truth(KEEPS)
        if KEEPS not in given.values:
            given.assumed.append(f"{KEEPS}=false: LLaMA-Factory's own, so that all layers are recomputed")
        given.used.add("gradient_checkpointing")
    else:
        checkpoints = given.truth("gradient_checkpointing") or recomputes
        if program is None and "gradient_checkpointing" not in given.values and not recomputes:
            given.assumed.append("gradient_checkpointing=false: TrainingArguments' own; TRL's configurations have true")
    keys = {**reading.keys, **_keys(given, said)}
    reentrant = "gradient_checkpointing_kwargs.use_reentrant"
    if keys.get("lora.bits") == 8 and checkpoints and not given.truth(reentrant, program is not None and program.reentrant):
        given.assumed.append(f"{reentrant}=true: with false bitsandbytes keeps the inputs of all 8-bit linears, too")
    sizes = {axis: next((size for path in names if (size := given.number(path))), 1) for axis, names in GROUPS.items()}
    sizes = {axis: size for axis, size in sizes.items() if size > 1}
    setup = replace(reading.setup, recompute="full" if checkpoints else "none", **sizes)
    own = plain and "lora.rank" not in keys
    states, unsaid = _states(given, program, said["training.precision"], loaded) if own else (None, ())
    ep = (Given(content).number("expert_parallel_size") or 1) if program is AROUND["axolotl"] else 1
    about = [line for line in reading.assumed if not line.startswith("recompute=")]
    longest = next((name for name in LENGTHS if given.values.get(name) is not None), "")
    if longest == "block_size" or any(str(given.values.get(name)).lower() == "true" for name in FILLED):
        longest = ""
    reading = replace(reading, keys=keys, setup=setup, missing=missing, assumed=tuple(about), longest=longest, states=states,
                      model=str(given.values.get("model_name_or_path") or ""), fsdp=where == "fsdp",
                      copies=plain and program is not AROUND["ms_swift"],  # which has groups of its own
                      added=(axolotls_experts(ep, Given(content).number("dp_shard_size") or 1),) if ep > 1 else (),
                      broken=("bf16 and fp16: TrainingArguments takes one of them",) if both else (),
                      unpriced=(*host, *reading.unpriced, *unsaid), **_seeing(given, program))  # fmt: skip
    return hugging_face.sorted_out(given, KINDS if program is None else KINDS | kinds("axolotl", "ms_swift"), reading), where


def _is_llama_factorys(content: Content, program: Around | None) -> bool:
    """Whether arguments with the Trainer's own names are LLaMA-Factory's."""
    return program is None and not LLAMA_FACTORYS.isdisjoint(content)


def _states(given: Given, program: Around | None, precision: str, loaded: str) -> tuple[StateBytes | None, tuple[str, ...]]:
    """(What each parameter takes without DeepSpeed and FSDP, settings that would change it and that the file does not say). `loaded`: the
    type in which the file says that weights are loaded, or ""."""
    foreach = given.values.get("optim") == "adamw_torch"
    own = program is not None and program.loads_16_bits
    if precision == "bf16" and (given.truth("pure_bf16") or loaded in ("bfloat16", AUTO) or (own and not loaded)):
        given.assumed.append("weights are loaded in bf16 and trained so: gradients and moments too, without an fp32 copy of any")
        if program is AROUND["axolotl"] and not {"cut_cross_entropy", *words.FLASH} & given.used:
            given.assumed.append(
                "attn_implementation is not said: without flash attention embeddings and head stay in fp32, priced as bf16"
            )
        return IN_16_BITS[foreach], ()
    if precision not in ("bf16", "fp16") or own:
        return None, ()
    if loaded or _is_llama_factorys(given.values, program):  # which casts to fp32 (model/adapter.py:349)
        return IN_32_BITS[foreach], ()
    given.assumed.append("torch_dtype=float32, as TRL loads weights; transformers 5 by itself takes the checkpoint's type")
    return IN_32_BITS[foreach], ("torch_dtype (the file does not say it)",)


def _keys(given: Given, said: Mapping[str, Any]) -> dict[str, Any]:
    """The keys train.* and lora.* of a recipe, and the model where it is here. Raises InputError."""
    keys: dict[str, Any] = {}
    lengths = [name for name in LENGTHS if given.values.get(name) is not None]
    if lengths:
        keys["train.seq_length"] = given.number(lengths[0])
        given.assumed.append(f"every sequence has {lengths[0]} = {keys['train.seq_length']} tokens")
    if steps := said.get("training.steps"):
        keys["train.steps"] = steps
        ratio = given.number("warmup_ratio", float) or 0.0
        keys["train.warmup"] = min(steps, int(given.number("warmup_steps", float) or 0) or round(ratio * steps))
    keys["train.schedule"] = words.SCHEDULES.get(str(given.get("lr_scheduler_type", "linear")), "cosine")  # of the others the nearest
    if keys["train.schedule"] == "wsd":
        shape, length = given.get("lr_scheduler_kwargs.decay_type", "linear"), given.number("lr_scheduler_kwargs.num_decay_steps")
        keys["train.decay"] = next((ours for ours, theirs in words.DECAYS.items() if theirs == shape), "linear")
        keys |= {"train.decay_steps": length} if length else {}
    least = given.number("lr_scheduler_kwargs.min_lr_rate", float)
    if least is not None:
        keys["train.min_lr"] = least * said["training.lr"]
    given.take("warmup_ratio", "warmup_steps", "num_train_epochs")
    if "training.seed" in said:
        keys["seed"] = said["training.seed"]
    given.take(*(name for name, values in words.FLASH.items() if given.values.get(name) in values))
    if given.values.get("optim") in words.ADAMW:
        given.take("optim")
    if str(given.values.get("optim")) in words.BITSANDBYTES:
        keys["train.optimizer"] = words.BITSANDBYTES[given.get("optim")]
    folder = given.get("model_name_or_path")
    if folder is not None and (Path(str(folder)) / "config.json").is_file():
        keys["model.hf_config"] = str(Path(str(folder)) / "config.json")
    elif folder is not None:
        given.assumed.append(f"the model that you give: model_name_or_path={folder} is no folder here")
    rank = next((given.number(name) for name in TRAINED if given.values.get(name) is not None), None)
    own = "finetuning_type" not in given.values and not LLAMA_FACTORYS_OWN.isdisjoint(given.values)
    given.assumed += ["finetuning_type=lora: LLaMA-Factory's own where the file does not say"] if own else []
    tuned = str(given.get("finetuning_type", "lora" if given.truth("use_peft", rank is not None) or own else "full"))
    if tuned not in ("lora", "oft", "freeze"):
        given.take("lora_r", "lora_rank", "lora_alpha", "lora_dropout", "lora_target", "lora_target_modules")
        return keys
    if tuned != "lora":
        raise InputError("finetuning_type", tuned, "can't be priced", ["full", "lora"])
    keys["lora.rank"] = rank or 8
    if given.values.get("lora_alpha") is not None:
        keys["lora.alpha"] = given.number("lora_alpha", float)
    bits = next((given.number(name) for name in QUANTISED if given.values.get(name) is not None), 4 * given.truth("load_in_4bit", False))
    if bits or given.truth("load_in_8bit", False):
        bits, method = bits or 8, str(given.get("quantization_method", given.get("quant_method", "bnb")))
        if bits not in words.FROZEN or method not in ("bnb", "bitsandbytes"):
            raise InputError("quantization", bits, "of the frozen weights can't be priced", ["4 or 8 bits of bitsandbytes"])
        keys["lora.bits"] = bits
        given.take("bnb_4bit_quant_type", "bnb_4bit_use_double_quant", "quantization_type", "double_quantization", "bnb_4bit_quant_storage")
        given.take("bnb_4bit_compute_dtype")
    keys["lora.dropout"] = given.number("lora_dropout", float) or 0.0
    named = given.get("lora_target_modules", given.get("lora_target", "all-linear"))
    targets = [str(one) for one in named] if isinstance(named, list) else [one.strip() for one in str(named).split(",")]
    keys["lora.targets"] = "all-linear" if targets == ["all"] else ",".join(targets)
    return keys


def _seeing(given: Given, program: Around | None) -> dict[str, Any]:
    """What the file says for a model that looks at images, as `Reading` has it, of settings that stay where they are listed until it is
    known that the model does."""
    swifts = program is AROUND["ms_swift"] or "freeze_vit" in given.values
    of, own = Given(given.values), "ms_swift" if swifts else "llama_factory" if "stage" in given.values else ""
    pixels = next((of.number(name) for name in words.IMAGE_PIXELS if of.values.get(name) is not None), words.MOST_PIXELS.get(own))
    return {"freezes": of.truths(words.FREEZES.get(own, ())), "image_pixels": pixels}


def _changes(content: Content, program: Around | None, where: str, before: Setup, after: Setup, gpus: int) -> dict[str, Any] | None:
    """New values of the file for another setup, by path; None: this file can't say the change."""
    table = [Term(MICRO, "micro_batch_size"), Term("gradient_checkpointing", "recompute", to=lambda mode: mode == "full")]
    if _is_llama_factorys(content, program):
        table[1] = Term(KEEPS, "recompute", to=lambda mode: mode == "none")
    # What has neither becomes DeepSpeed's, which a section of theirs then says; not where accelerate's file has divided the states before.
    asks = not content.get("deepspeed") and not content.get("fsdp") and after.zero_stage > 0 and not before.zero_stage
    if where == "deepspeed" or asks:
        table += [term._replace(theirs=f"deepspeed.{term.theirs}", when=always) for term in OF_A_SECTION]
    elif where == "fsdp" and (named := [name for name in hugging_face.RESHARDS if name in section(content, "fsdp_config")]):
        table.append(Term(f"fsdp_config.{named[0]}", "zero_stage", to={3: True, 2: False}.get))
    elif where == "fsdp" and isinstance(written := content["fsdp"], str) and after.zero_stage in (2, 3):
        old = next((word for word in written.split() if word.lower() in hugging_face.SHARDED), "full_shard")
        table.append(Term("fsdp", "zero_stage", to=lambda stage: written.replace(old, "full_shard" if stage == 3 else "shard_grad_op")))
    in_section = {term.ours for term in table}
    if where or asks or after.tp * after.cp == gpus:  # copies have no other groups beside them
        own = {} if program is None else program.groups
        groups = {
            axis: next((name for name in names if content.get(name) is not None), own.get(axis, "")) for axis, names in GROUPS.items()
        }
        table += [Term(name, axis) for axis, name in groups.items() if name and (axis not in in_section or name in content)]
    values = changes(table, before, after)
    if values is None or after.recompute not in ("none", "full"):
        return None
    if where == "deepspeed":
        values |= {f"deepspeed.{path}": value for path, value in without_stage_3(content["deepspeed"], before, after).items()}
    elif asks:  # the Trainer fills the section's other settings
        filled = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
        switches = [f"{name}.enabled" for name in ("bf16", "fp16") if content.get(name)]
        said = {path: value for path, value in values.items() if not path.startswith("deepspeed.")}
        values = {**said, "deepspeed": nested(dict.fromkeys((*filled, *switches), AUTO) | say(OF_A_SECTION, after))}
    samples = int(content.get(STEPS) or 1) * before.micro_batch_size * after.tp * after.cp
    shared = after.micro_batch_size * before.tp * before.cp
    if samples % shared:
        return None
    if samples // shared != int(content.get(STEPS) or 1):
        values[STEPS] = samples // shared
    return {MICRO: values[MICRO], STEPS: samples // shared} | values if MICRO in values else values
