"""A plan as the argument list of Megatron-LM's own programs, for use by hand, of the release that the plan is for (megatron_versions.py).

A test compares every emitted flag with what each release's parser has.
"""

from __future__ import annotations

import shlex
from typing import Final

from orchestrator.engines import megatron_parts
from orchestrator.engines.megatron_versions import names as flag_kinds
from orchestrator.engines.megatron_versions import release_of
from orchestrator.engines.passthrough import flags_of, with_flags
from orchestrator.engines.transformer_config import common_recompute, padded_vocab_size, settings, vocab_divisor
from orchestrator.hardware.spec import Software
from orchestrator.model.shared import SENTINELS
from orchestrator.model.spec import Architecture
from orchestrator.model.training import Training
from orchestrator.plan import Plan
from orchestrator.units import format_bytes, format_seconds
from orchestrator.words import megatron as words

Flag = tuple[str, ...]
"""A flag of a command line and its values."""

ROPE_SCALING_FACTOR: Final = 8.0
"""GPTModel's default (models/gpt/gpt_model.py:105): gpt_builders.py gives it no --rope-scaling-factor."""


def megatron_lm(software: Software) -> str:
    """What the arguments are for, with the release's tag."""
    return f"Megatron-LM, tag {release_of(software.megatron_core).tag}"


def program_of(plan: Plan) -> str:
    """The program of the planned release that trains such a model, as a path in Megatron-LM's checkout."""
    return release_of(plan.cluster.software.megatron_core).programs[plan.model.stack]


def why_not(plan: Plan) -> str | None:
    """Why Megatron's command line can't say this plan of megatron-core's own training loop; None: it can."""
    said = megatron_lm(plan.cluster.software)
    if plan.zero_stage >= 2 and not plan.megatron_fsdp:
        return f"{said} has no zero_stage={plan.zero_stage} with these groups (its FSDP is another engine)"
    if plan.zero_stage >= 1 and plan.training.optimizer == "sgd":
        return f"{said}'s distributed optimizer takes Adam only"
    reason = why_never(plan.model, plan.training, plan.cluster.software)
    if reason is None and common_recompute(plan) is None:
        return f"{said} has one recompute setting for all stages, and the plan's differ"
    return reason


def why_never(model: Architecture, training: Training, software: Software) -> str | None:
    """Why no plan for this model and training can be said to the release of this software; None: some can."""
    said = megatron_lm(software)
    if model.activation not in words.WITHOUT_SWITCH and not any(term.to(model.activation) for term in words.ACTIVATION):
        return f"{said} has no flag for activation={model.activation}; model.activation=gelu is what its programs train without one"
    if training.grad_accum_dtype != training.grad_reduce_dtype:
        return f"{said} sums and reduces gradients in one type"
    return _why_not_training(training, said) or _why_not_model(model, software)


def _why_not_training(training: Training, said: str) -> str | None:
    if training.lora is not None:
        return f"{said} has no adapters (lora.rank={training.lora.rank}), which write={training.lora.write} is told"
    if training.task == "sft":
        return f"{said} reads chats by its own --sft; engine=megatron with program=own trains on data= as it is"
    if training.seed < 1:
        return f"{said} takes no seed={training.seed} (training/initialize.py, _set_random_seed)"
    if training.warmup >= training.steps:
        asked = f"train.warmup={training.warmup} of train.steps={training.steps}"
        return f"{said} ends the warm-up before the last step (core/optimizer_param_scheduler.py:157): {asked}"
    return None


def _why_not_model(model: Architecture, software: Software) -> str | None:
    """What the programs take on their command line and never give to the model: it would be another one, silently."""
    said, script = megatron_lm(software), release_of(software.megatron_core).programs[model.stack]
    if not megatron_parts.by_program(model, software.megatron_core):
        return f"{script} of {said} trains no such model; {megatron_parts.plan_only(model, software.megatron_core)}"
    if megatron_parts.latent_attention(model) is not None and not software.transformer_engine:
        return f"{script} of {said} needs Transformer Engine for latent attention: megatron-core's own attention has one width for all"
    if not {*megatron_parts.BY_PROGRAM}.isdisjoint(model.features()) and not software.transformer_engine:
        return f"{script} of {said} needs Transformer Engine for a gated delta net, gates of attention and zero-centered norms"
    # Latent attention has YaRN's flags (arguments.py:2735-2740), by which it stretches positions itself.
    if "latent_yarn" not in model.features() and model.rope_scaling_factor not in (None, ROPE_SCALING_FACTOR):
        return f"{script} of {said} scales rotary positions by {ROPE_SCALING_FACTOR:g}, not {model.rope_scaling_factor:g}"
    if model.stack == "encoder_decoder" and model.decoder_num_layers != model.num_layers:
        layers = f"{model.num_layers}, not {model.decoder_num_layers}"
        return f"{script} of {said} builds as many decoder layers as encoder layers, {layers}"
    if model.stack == "encoder" and model.position_embedding != "learned_absolute":
        return f"{script} of {said} has learned positions, not {model.position_embedding}"
    return None


def _prefix(path: str) -> str:
    return path.removesuffix(".bin").removesuffix(".idx")


def reads_indexed_data(plan: Plan) -> bool:
    """Whether all sources are in Megatron's own format, which is what its programs read; the recipe gives those their suffix."""
    run = plan.run
    sources: list[str | None] = [source.path for source in run.blend] if run.blend else [run.data]
    sources += [run.valid] if run.valid else []
    return all(path is not None and path.endswith((".bin", ".idx")) for path in sources)


def _data(plan: Plan) -> list[Flag]:
    model, run = plan.model, plan.run
    indexed = reads_indexed_data(plan)
    flags: list[Flag] = []
    if indexed:
        sources = [part for source in run.blend for part in (repr(source.weight), _prefix(source.path))] or [_prefix(run.data or "")]
        flags += [("--train-data-path" if run.valid else "--data-path", *sources)]
        flags += [("--valid-data-path", _prefix(run.valid))] if run.valid else []
    if model.stack != "decoder":
        if model.stack == "encoder_decoder":
            flags += [("--vocab-extra-ids", str(SENTINELS))]
        # The vocabulary file decides nothing of the model's size.
        flags += [("--tokenizer-type", "BertWordPieceLowerCase"), ("--padded-vocab-size", str(padded_vocab_size(plan)))]
    elif indexed and run.tokenizer is not None:
        flags += [("--tokenizer-type", "HuggingFaceTokenizer"), ("--tokenizer-model", run.tokenizer)]
        # Without it the tokenizer's own count is padded (tokenizer.py:111), which is not the model's.
        flags += [("--padded-vocab-size", str(padded_vocab_size(plan)))]
    else:
        if not indexed:
            flags += [("--mock-data",)]
        # NullTokenizer's vocabulary is one larger than this, but in 0.19 (core/tokenizers/text/libraries/null_tokenizer.py:52; there :18).
        # Padding makes the same of both, unless there is none.
        flags += [("--tokenizer-type", "NullTokenizer"), ("--vocab-size", str(model.vocab_size - 1))]
        if (model.vocab_size - 1) % (vocab_divisor(plan) * plan.tp) == 0:
            flags += [("--padded-vocab-size", str(padded_vocab_size(plan)))]
    if not (indexed and run.valid):
        # Megatron divides whole documents, and never ends where a share above 0 gets none (gpt_dataset.py, _get_num_epochs).
        flags += [("--split", ",".join(f"{share:g}" for share in (*run.split, 0, 0)[:3]) if run.split else "100,0,0")]
    # Megatron divides by the interval even where nothing is evaluated (training/training.py:3307), and has none by default.
    flags += [("--eval-interval", str(run.eval_every or plan.training.steps))]
    flags += [("--eval-iters", str(run.eval_steps if run.eval_every else 0)), ("--log-interval", "1")]
    flags += [("--tensorboard-dir", "tensorboard")]
    if run.wandb:
        names = {"project": "--wandb-project", "entity": "--wandb-entity", "name": "--wandb-exp-name"}
        # Megatron asks for a name where there is a project (global_vars.py).
        flags += [(names[key], value) for key, value in ({"name": model.name} | run.wandb).items()]
    if run.save_every:
        # Where there is none yet Megatron says so and begins at the first step (training/checkpointing.py, load_checkpoint).
        flags += [("--save", "checkpoints"), ("--load", "checkpoints"), ("--save-interval", str(run.save_every))]
        flags += [] if plan.megatron_fsdp else [("--ckpt-format", "torch_dist")]
    return flags


def megatron_flags(plan: Plan) -> tuple[Flag, ...]:
    """The argument list, flag by flag. Only for a plan that `why_not` has nothing against."""
    return with_flags([*flags_of(settings(plan), plan.cluster.software.megatron_core), *_data(plan)], plan)


def notes(plan: Plan) -> tuple[str, ...]:
    """What someone who uses the file by hand should know."""
    found = []
    if plan.model.stack != "decoder":
        legacy = "legacy_tokenizer" in flag_kinds("flags", plan.cluster.software.megatron_core)
        hub = "BertWordPieceLowerCase fetches its vocabulary from the Hugging Face Hub"
        found.append(
            f"{program_of(plan)} has no mock data: add --data-path and --vocab-file of an indexed corpus and its vocabulary, "
            + (f"and --legacy-tokenizer, without which {hub} in place of the file's." if legacy else f"for which {hub} too.")
        )
    if plan.model.stack == "encoder" and plan.model.num_token_types:
        found.append("megatron_args.sh trains without segment embeddings: pretrain_bert.py has them with its binary head alone.")
    if (plan.run.data is not None or plan.run.blend) and not reads_indexed_data(plan):
        found.append("megatron_args.sh uses mock data: Megatron reads only its own indexed format.")
    if plan.cluster.is_cpu:
        found.append(f"{megatron_lm(plan.cluster.software)} itself needs GPUs: here megatron_args.sh is for reading.")
    return tuple(found)


FIRST_WITHOUT_MAX_CONNECTIONS: Final = 10.0
"""Compute capability of Blackwell, from which kernels of several streams keep their order without it (arguments.py:927-953)."""


def one_connection(plan: Plan) -> bool:
    """Whether Megatron asserts CUDA_DEVICE_MAX_CONNECTIONS=1, one queue: communication is started before the GEMM that hides it (rules
    cuda_conn_1 and, without it, cuda_conn_fsdp; for the experts' exchange beside another micro-batch arguments.py:940 warns alone)."""
    older = float(plan.cluster.gpu.compute_capability) < FIRST_WITHOUT_MAX_CONNECTIONS
    return (plan.tp > 1 or plan.cp > 1) and older and not several_connections(plan) and not plan.cluster.is_cpu


def several_connections(plan: Plan) -> bool:
    """Whether CUDA_DEVICE_MAX_CONNECTIONS=1 is refused or serialises what the plan runs side by side; unset is enough."""
    return plan.megatron_fsdp or plan.overlap_moe_expert_parallel_comm


def switches(plan: Plan) -> dict[str, str]:
    """Transformer Engine's variables that the plan's options need, by name."""
    offloads, copies = plan.offload_modules is not None, plan.tp_comm_overlap and not plan.cluster.gpu.has_multicast
    return ({"NVTE_CPU_OFFLOAD_V1": "1"} if offloads else {}) | ({"UB_SKIPMC": "1"} if copies else {})  # arguments.py:1226; base.py:220


def predicted_line(plan: Plan) -> list[str]:
    """What these arguments are predicted to take, as the file's header says it; nothing for a plan without prediction."""
    predicted = plan.predicted
    if predicted is None:
        return []
    interval = f" (90%: {' to '.join(map(format_seconds, predicted.interval))})" if predicted.interval else ""
    took = f"{format_seconds(predicted.step_time_s)} a step{interval}, {format_bytes(predicted.peak_memory_bytes)} at the peak"
    return [f"# Predicted: {took} ({plan.calibration} calibration): {plan.candidate.label()}."]


def megatron_args_sh(plan: Plan) -> str:
    """A bash array, every value quoted, to be sourced."""
    script, said = program_of(plan), megatron_lm(plan.cluster.software)
    nodes, ranks = shape(plan)
    variables = "CUDA_DEVICE_MAX_CONNECTIONS=1 " if one_connection(plan) else ""
    variables += "".join(f"{name}={value} " for name, value in switches(plan).items())
    variables += "PYTHONPATH=. " if "/" in script else ""  # Python looks beside the script, where megatron/ is not
    lines = [
        f"# Arguments of {script} of {said}, for {plan.world_size} ranks. Source this file in bash, then for example:",
        f'#   {variables}torchrun --nnodes {nodes} --nproc-per-node {ranks} {script} "${{MEGATRON_ARGS[@]}}"',
        *predicted_line(plan),
        *(f"# {note}" for note in notes(plan)),
        "MEGATRON_ARGS=(",
        *("  " + " ".join([flag[0], *(quoted(value) for value in flag[1:])]) for flag in megatron_flags(plan)),
        ")",
    ]
    return "\n".join(lines) + "\n"


def quoted(value: str) -> str:
    """The value in single quotes, which are there even where a shell would need none.

    >>> print(quoted("t*9|t"), quoted("it's"))
    't*9|t' 'it'"'"'s'
    """
    text = shlex.quote(value)
    return text if text != value else f"'{value}'"


def shape(plan: Plan) -> tuple[int, int]:
    """(nodes, ranks on each) of this plan's world."""
    per_node = min(plan.cluster.gpus_per_node, plan.world_size)
    nodes = -(-plan.world_size // per_node)
    return nodes, plan.world_size // nodes
