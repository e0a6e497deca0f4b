"""A plan in the words of `transformers.Trainer` and of accelerate: trainer.yaml, accelerate.yaml, and the ds_config that both fill."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import yaml

from orchestrator.engines.ds_config import STEPS_WHEN_BUILT, ds_config, dumps
from orchestrator.engines.hf_config import attention_implementation
from orchestrator.engines.megatron_args import shape
from orchestrator.engines.passthrough import with_ds
from orchestrator.errors import InputError
from orchestrator.job import File
from orchestrator.model.lora import ALL
from orchestrator.plan import Plan
from orchestrator.strategy.choices import shown
from orchestrator.strategy.spec import DEEPSPEED_OPTIONS, DEFAULTS
from orchestrator.words import trainer as words
from orchestrator.words.terms import say

DS_CONFIG: Final = "ds_config.auto.json"
TRAINER: Final = "trainer.yaml"
ACCELERATE: Final = "accelerate.yaml"

TRAINER_HEAD: Final = """\
# The plan as arguments of transformers.Trainer: HfArgumentParser(TrainingArguments).parse_yaml_file("trainer.yaml")
# Started in this folder, by torchrun with {ranks} ranks. orchestrator/engines/BY_HAND.md has the lines around it.
"""
ACCELERATE_HEAD: Final = """\
# accelerate launch --config_file accelerate.yaml train.py, in this folder{nodes}.
# What the script gives, by the numbers in trainer.yaml: batch, optimizer (norms and biases don't decay), the learning rate's schedule.
"""


def for_trainer(plan: Plan, more: Mapping[str, Any] = {}) -> dict[str, Any]:
    """`ds_config` with "auto" for the batch, which the Trainer and accelerate fill, and without an optimizer: given one,
    transformers hands DeepSpeed all parameters as one group, and norms and biases would decay (integrations/deepspeed.py,
    deepspeed_optim_sched). Theirs has the plan's two groups."""
    config = ds_config(plan, more)
    config.pop("optimizer", None)
    config.pop("sequence_parallel_size", None)  # the Trainer's ParallelismConfig has it
    config |= {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
    if plan.tp > 1:
        # The Trainer would fill it with micro * accumulation * world: tp times the samples that are there.
        del config["train_batch_size"]
    if plan.offload_optimizer and plan.cluster.is_cpu:
        config["zero_force_ds_cpu_optimizer"] = False  # else accelerate puts DeepSpeed's own Adam in torch's place, which is compiled first
    return with_ds(config, plan)


def schedule(plan: Plan) -> tuple[str, dict[str, float | str]] | None:
    """transformers' name of the plan's learning-rate schedule and its arguments; None: it has none with the plan's rate in every step.
    Its linear one ends at 0, and of those that end elsewhere only the cosine knows the rate it begins with under DeepSpeed."""
    training = plan.training
    if training.schedule == "cosine":
        return "cosine_with_min_lr", {"min_lr_rate": training.min_lr / training.lr}
    if training.schedule == "constant" or training.min_lr == training.lr:
        return ("constant_with_warmup" if training.warmup else "constant"), {}
    if training.min_lr or (training.schedule == "wsd" and training.decay not in words.DECAYS):
        return None
    if training.schedule == "wsd":
        return "warmup_stable_decay", {"num_decay_steps": training.decay_length, "decay_type": words.DECAYS[training.decay]}
    return ("inverse_sqrt" if training.schedule == "inverse_square_root" else "linear"), {}


def why_not_alone(plan: Plan) -> str | None:
    """Why the files alone don't make the Trainer and accelerate train this plan; None: they do."""
    if plan.cp > 1:
        return "under Ulysses they divide the batch by all ranks, and DeepSpeed's gradients are too large by their number in a sequence"
    if plan.ep > 1:
        return "they make no groups for AutoEP's experts"
    added = [name for name in DEEPSPEED_OPTIONS if getattr(plan, name) != DEFAULTS[name]]
    if added:
        return f"they don't call DeepSpeed's functions for {', '.join(added)}"
    if schedule(plan) is None:
        asked = f"train.decay={plan.training.decay}" if not plan.training.min_lr else "that ends at train.min_lr"
        return f"transformers has no {plan.training.schedule} schedule {asked}"
    return None


def told(plan: Plan) -> str:
    """Pins that leave this plan out, and hold a search to what programs around the Trainer can be told, as the end of a reason; "" where
    none does."""
    pins: dict[str, object] = {"cp": 1} if plan.cp > 1 else {}
    pins |= {"ep": 1} if plan.ep > 1 else {}
    pins |= {name: DEFAULTS[name] for name in DEEPSPEED_OPTIONS if getattr(plan, name) != DEFAULTS[name]}
    pins |= {"recompute": "full"} if plan.strategy.recompute not in ("none", "full") else {}
    pins |= {"tp": 1} if plan.tp > 1 and plan.zero_stage == 3 else {}
    said = " ".join(f"pin.{name}={shown(value)}" for name, value in pins.items())
    return f"; {said} plans without" if said else ""


def trainer_arguments(plan: Plan) -> dict[str, Any]:
    """TrainingArguments by name, without a schedule where transformers has none."""
    training, run, named, checkpointing = plan.training, plan.run, schedule(plan), plan.strategy.recompute == "full"
    arguments: dict[str, Any] = {
        "output_dir": "trainer",
        "deepspeed": DS_CONFIG,
        **say(words.SIZES, plan),
        "optim": training.optimizer if training.optimizer != "adamw" else "adamw_torch" if plan.cluster.is_cpu else "adamw_torch_fused",
        **say(words.RATE, plan),
        **({} if named is None else {"lr_scheduler_type": named[0], "lr_scheduler_kwargs": named[1]}),
        **say(words.OPTIMIZER, plan),
        "gradient_checkpointing": checkpointing,
        "logging_steps": 1,
        "save_strategy": "steps" if run.save_every else "no",
        "report_to": "none",
    }
    if run.save_every:
        arguments |= {"save_steps": run.save_every} | ({"save_total_limit": run.keep_last} if run.keep_last else {})
    if checkpointing:
        # MatMul8bitLt holds its input outside of what torch's other function drops (bitsandbytes 0.50, autograd/_functions.py:187).
        arguments["gradient_checkpointing_kwargs"] = {"use_reentrant": training.lora is not None and training.lora.bits == 8}
    if plan.cluster.is_cpu:
        arguments["use_cpu"] = True
    return arguments


def accelerate_config(plan: Plan) -> dict[str, Any]:
    """What `accelerate launch` reads. Precision stands in the ds_config alone (utils/dataclasses.py, _deepspeed_config_checks). On a CPU
    cluster it does not say so: accelerate would leave DeepSpeed out (commands/launch.py, launch_command)."""
    return {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {
            "deepspeed_config_file": DS_CONFIG,
            "deepspeed_multinode_launcher": "standard",
            "zero3_init_flag": plan.zero_stage == 3,
        },
        "num_machines": shape(plan)[0],
        "num_processes": plan.world_size,
        "main_training_function": "main",
    }


def trainer_files(plan: Plan, more: Mapping[str, Any]) -> list[File]:
    """The files of a plan, whether they alone train it or not. `more`: as `ds_config`."""
    accelerate = accelerate_config(plan)
    nodes = ", on every node with --machine_rank and --main_process_ip" if accelerate["num_machines"] > 1 else ""
    heads = {
        TRAINER: TRAINER_HEAD.format(ranks=plan.world_size),
        ACCELERATE: ACCELERATE_HEAD.format(nodes=nodes),
    }
    said = {TRAINER: trainer_arguments(plan), ACCELERATE: accelerate}
    files = [File(path=DS_CONFIG, content=dumps(for_trainer(plan, more)))]
    return files + [File(path=path, content=heads[path] + yaml.safe_dump(content, sort_keys=False)) for path, content in said.items()]


def notes(plan: Plan) -> list[str]:
    """What a script has to add to the files."""
    if (reason := why_not_alone(plan)) is not None:
        return [f"{TRAINER} and {ACCELERATE} alone do not train this plan: {reason}. orchestrator/programs/hugging_face.py adds that."]
    notes = []
    if plan.zero_stage == 0 and plan.training.precision != "fp32":
        notes.append(f"{TRAINER}: {STEPS_WHEN_BUILT}.")
    if plan.model.stack == "encoder":
        off = f"{plan.dp * plan.num_microbatches} times too large"
        notes.append(f"{TRAINER}: trainer.model_accepts_loss_kwargs = False before train(), or BERT's loss and gradients are {off}.")
    if any(part.aux_loss_coeff for part in plan.model.experts):
        notes.append(f"{TRAINER}: the loss that balances experts is the model's to add: output_router_logits=true in its configuration.")
    if plan.training.freeze:
        notes.append(f"{TRAINER}: {', '.join(plan.training.freeze)} (train.freeze) is the script's to freeze, by requires_grad_(False).")
    if plan.training.lora is not None:
        bits = plan.training.lora.bits
        loads = ", over weights that it loads by BitsAndBytesConfig"
        packed = "" if bits is None else f"{loads} in 4 bits, nf4 and doubly quantised" if bits == 4 else f"{loads}(load_in_8bit=True)"
        notes.append(f"{TRAINER}: the adapters are the script's to put in (peft's get_peft_model){packed}.")
    return notes


AROUND_HEAD: Final = """\
# {model} on {ranks} GPUs, a plan for engine={engine}, for {program.release}.
# Start: {program.start}.
"""
LEFT_OUT: Final = ("output_dir", "logging_steps", "save_strategy", "save_steps", "save_total_limit", "report_to", "use_cpu")
"""Arguments that are the user's own in a program around the Trainer."""


def check_decoder(plan: Plan, name: str, *, sees: bool = False) -> None:
    """Raises InputError for a plan that is not of a text decoder, which files of other programs are of alone. `sees`: whether this one has
    recipes of models that look at images."""
    if plan.model.stack != "decoder":
        raise InputError("write", name, f"trains decoders, and {plan.model.name} is an {plan.model.stack.replace('_', '-')}")
    if plan.model.vision is not None and not sees:
        why = f"gets text here, and {plan.model.name} looks at images; ds_config.json and trainer.yaml are for a script of yours"
        raise InputError("write", name, why)


def not_told(plan: Plan, *, names_weights: bool = False) -> list[str]:
    """What a file for a program of others does not say, in lines: answers of weight 0, and, unless it `names_weights`, what to begin
    with."""
    count = 0 if plan.training.lengths is None else plan.training.lengths.unlearnt
    begins = None if names_weights else plan.run.init_from
    return [
        *([f"The data has {count:,} answers of weight 0, which this program does not know: it trains on them too."] if count else []),
        *([f"It begins with the weights in {json.dumps(begins)} (model.init_from) where you name that folder to it."] if begins else []),
    ]


def around(plan: Plan, name: str) -> File:
    """The plan as a file of a program around the Trainer, its ds_config in it. Raises InputError for what it can't be told."""
    program, training = words.AROUND[name], plan.training
    if (reason := why_not_alone(plan)) is not None:
        raise InputError("write", name, f"trains by the Trainer, which can't be told this plan: {reason}{told(plan)}")
    check_decoder(plan, name)
    if (varying := plan.strategy.recompute) not in ("none", "full"):
        raise InputError("write", name, f"recomputes all layers or none, and the plan has recompute={varying}{told(plan)}")
    ds = for_trainer(plan)
    if plan.tp > 1 and plan.zero_stage == 3:
        raise InputError("write", name, f"has DeepSpeed divide layers up to ZeRO stage 2, and the plan has tp={plan.tp} with 3{told(plan)}")
    if plan.tp > 1:  # as LLaMA-Factory's examples/deepspeed/ds_z2_autotp_config.json
        ds["tensor_parallel"] = {"autotp_size": plan.tp}
    said = {**trainer_arguments(plan), "deepspeed": ds, "max_length": training.seq_length,
            "finetuning_type": "full" if training.lora is None else "lora"}  # fmt: skip
    if (lora := training.lora) is not None:
        whole = {"llama_factory": "all", "axolotl": None}.get(name, "all-linear")
        said |= {"lora_rank": lora.rank, "lora_alpha": lora.alpha or 2 * lora.rank, "lora_dropout": lora.dropout}
        said["lora_target"] = whole if lora.targets == (ALL,) else list(lora.targets)
        said |= {"lora_target_linear": True} if name == "axolotl" and lora.targets == (ALL,) else {}
    if name == "axolotl":
        said["finetuning_type"] = None if lora is None else "lora"
    if lora is not None and lora.bits:
        said |= words.FROZEN[lora.bits][name]
    said |= {program.keeps: varying == "none"} if program.keeps else {}
    said |= dict(program.says.get(training.task, {}))
    said |= dict.fromkeys(program.packs, bool(training.packing)) if training.task == "sft" else {}
    attention, (setting, values) = attention_implementation(plan), program.attention
    if training.packing and program.packs_by_flash and attention == "sdpa":
        raise InputError("write", name, "packs samples by flash attention alone, which the plan has not; data.packing=false pads them")
    said |= {setting: values.get(attention, attention)} if attention != "eager" else {}
    content = {program.names.get(key, key): value for key, value in said.items() if key not in LEFT_OUT}
    head = AROUND_HEAD.format(model=plan.model.name, ranks=plan.world_size, engine=plan.engine, program=program)
    head += "".join(f"# {line}\n" for line in not_told(plan))
    return File(path=f"{name}.yaml", content=head + yaml.safe_dump(content, sort_keys=False, width=10**6))
