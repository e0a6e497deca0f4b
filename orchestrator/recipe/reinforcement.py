"""task=rl: the samples of a step, from the rl.* keys and a file of lengths, and the training half as a training like any other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean, pstdev

import msgspec

from orchestrator.errors import InputError
from orchestrator.key import shown
from orchestrator.model.spec import Architecture
from orchestrator.model.training import Training
from orchestrator.recipe.layers import Flat, Given, fields_of, value_of
from orchestrator.recipe.lengths import said_lengths
from orchestrator.rl.job import BY_A_REFERENCE, GENERATES_NOTHING, Responses, RlJob, RlKeys, check_updates
from orchestrator.rl.programs import NEMO_RL, PROGRAMS
from orchestrator.rl.step import longest

TASK = "rl"
OF_THE_STEP = ("train.global_batch_size", "train.seq_length", "train.decoder_seq_length", "train.tokens", "data.packing", "data.balance")
"""Keys of a training that here follow from the samples."""
LEARNING = ("train.lr", "train.min_lr", "train.warmup", "train.schedule", "train.decay", "train.decay_steps", "train.steps")
"""Keys that a recipe of pretraining says for pretraining alone."""
USUAL = {"train.lr": 1e-6, "train.schedule": "constant"}
"""Values in place of those: verl's (trainer/config/optim/megatron.yaml)."""
NEEDED = ("prompts", "samples", "prompt_length", "response_length")
MOST_SAMPLES = 250_000
"""Samples of a step; each has a length that is drawn."""


def not_here() -> InputError:
    """The error that says where task=rl is planned."""
    return InputError("task", TASK, "is planned by python -m orchestrator plan, or orchestrator.plan_rl; here nothing generates")


def with_task(merged: Flat, layers: Sequence[Flat], *, known: bool) -> Flat:
    """The keys, of task=rl as those of a pretraining whose batch follows from the samples, and whose learning rate is that of tuning where
    no layer says another that is of this task. Raises InputError for rl.* without the task, for keys that the samples decide, and where who
    asks does not know the task. `layers`: what `merged` is made of, the command line last."""
    if value_of(merged, "task", None) != TASK:
        for name in merged:
            if name.startswith("rl."):
                raise InputError(name, shown(merged[name].text), "is of reinforcement learning: task=rl beside it")
        return merged
    if not known:
        raise not_here()
    of_task = [layer for layer in layers if layer is layers[-1] or value_of(layer, "task", None) == TASK]
    said = {name: value for layer in of_task for name, value in layer.items()}
    for name in OF_THE_STEP:
        if name in said:
            raise InputError(name, shown(said[name].text), "follows from rl.prompts, rl.samples, rl.updates and the lengths in task=rl")
    algorithm = value_of(merged, "rl.algorithm", RlKeys.algorithm)
    pair = {"rl.samples": Given(2, "2")} if algorithm in GENERATES_NOTHING and "rl.samples" not in merged else {}
    if lacking := [f"rl.{name}" for name in NEEDED if f"rl.{name}" not in merged | pair]:
        raise InputError(lacking[0], None, f"is missing: task=rl needs {'=, '.join(lacking)}=")
    if algorithm in BY_A_REFERENCE and value_of(merged, "rl.reference", None) is False:
        raise InputError("rl.reference", "false", f"is not possible: the loss of rl.algorithm={algorithm} compares with a reference")
    kept = {name: value for name, value in merged.items() if name not in OF_THE_STEP and (name in said or name not in LEARNING)}
    usual = {name: Given(value, str(value)) for name, value in USUAL.items() if name not in kept}
    return kept | usual | pair | {name: Given(1, "1") for name in ("train.global_batch_size", "train.seq_length")}


def rl_job(merged: Flat, architecture: Architecture, model_of: Callable[[str], Architecture]) -> RlJob | None:
    """What task=rl asks; None for another task. `model_of`: the model of a recipe. Raises InputError."""
    if value_of(merged, "task", None) != TASK:
        return None
    written = [name for name in PROGRAMS if name in (value_of(merged, "write", None) or ())]
    keys = RlKeys(**{"program": written[0] if len(written) == 1 else NEMO_RL, **fields_of(merged, RlKeys)})
    assert keys.prompts and keys.samples and keys.prompt_length  # noqa: PT018
    assert keys.response_length
    if architecture.vision is not None:
        why = f"prices samples of text, and {architecture.name} looks at images; model.vision=null plans its text model alone"
        raise InputError("task", TASK, why)
    if architecture.traced is not None or architecture.stack != "decoder":
        raise InputError("task", TASK, f"generates with a decoder whose layers a reader knows, and {architecture.name} is none")
    positions = architecture.max_position_embeddings
    prompt = "prompt_length" if keys.max_prompt_length is None else "max_prompt_length"
    longest_prompt: int = getattr(keys, prompt)
    if longest_prompt < keys.prompt_length:
        raise InputError("rl.max_prompt_length", longest_prompt, f"is below the mean, rl.prompt_length={keys.prompt_length}")
    room = positions - longest_prompt
    if room < 1:
        raise InputError(f"rl.{prompt}", longest_prompt, f"leaves nothing of model.max_position_embeddings={positions}")
    cut = keys.max_response_length
    if cut is not None and cut > room:
        raise InputError(
            "rl.max_response_length", cut, f"is beyond the {room} that rl.{prompt}={longest_prompt} leaves of "
            f"model.max_position_embeddings={positions}"
        )  # fmt: skip
    if keys.prompts * keys.samples > MOST_SAMPLES:
        why = f"makes {keys.prompts * keys.samples:,} samples with rl.prompts={keys.prompts}; a step has at most {MOST_SAMPLES:,}"
        raise InputError("rl.samples", keys.samples, why)
    if keys.updates > keys.prompts * keys.samples:
        raise InputError("rl.updates", keys.updates, f"is more than the {keys.prompts * keys.samples} samples of a step")
    check_updates(keys, keys.program)
    if keys.algorithm == "distill" and keys.reward != "rule":
        raise InputError("rl.reward", keys.reward, "is not asked for: rl.algorithm=distill learns from a teacher")
    if keys.algorithm == "online_dpo" and keys.samples == 1:
        raise InputError("rl.samples", 1, "makes no pair: rl.algorithm=online_dpo compares responses to one prompt")
    if keys.algorithm in GENERATES_NOTHING:
        if keys.samples != 2:
            raise InputError("rl.samples", keys.samples, f"is no pair of responses, which rl.algorithm={keys.algorithm} compares", ["2"])
        usual, generates = RlKeys(), ("placement", "generation_gpus", "staleness", "tp", "dp", "memory", "concurrency", "measured", "eager")
        for name in (*generates, "reward"):
            if getattr(keys, name) != getattr(usual, name):
                raise InputError(f"rl.{name}", getattr(keys, name), f"is of generation: rl.algorithm={keys.algorithm} has none")
    if keys.generation_gpus is not None and keys.placement != "split":
        raise InputError("rl.generation_gpus", keys.generation_gpus, "is of generation on GPUs of its own: rl.placement=split beside it")
    if keys.staleness and keys.placement == "colocated":
        raise InputError("rl.staleness", keys.staleness, "needs generation beside training: rl.placement=split or auto")
    if keys.measured is not None and keys.tp is None:
        raise InputError("rl.measured", None, "is of one engine: say its rl.tp= beside it")
    uses = {"critic": keys.algorithm == "ppo", "reward": keys.reward == "model", "teacher": keys.algorithm == "distill"}
    said = {"critic": keys.critic, "reward": keys.reward_model, "teacher": keys.teacher}
    for model, label in said.items():
        if label is not None and not uses[model]:
            key = "reward_model" if model == "reward" else model
            needs = {"critic": "rl.algorithm=ppo", "reward": "rl.reward=model", "teacher": "rl.algorithm=distill"}[model]
            raise InputError(f"rl.{key}", label, f"is no model of this step: {needs} has one")
    models = {model: model_of(label) for model, label in said.items() if label is not None}
    return RlJob(
        keys=keys, models=models, prompts=keys.prompts, samples=keys.samples, prompt_length=keys.prompt_length,
        responses=responses(keys.response_length, cut or room, capped=cut is not None),
    )  # fmt: skip


def responses(text: str, longest_response: int, *, capped: bool) -> Responses:
    """Lengths from MEAN, MEAN+SPREAD or a file with a length a line (or the last column of a CSV). `capped`: whether longer ones are cut
    off by rl.max_response_length and not by the model's positions. Raises InputError."""
    name = "rl.response_length"
    said = said_lengths(name, text)
    if isinstance(said, list):
        over = max(said)
        if over > longest_response and not capped:
            raise InputError(
                name, shown(text), f"has {over} tokens, and the prompt leaves {longest_response} of the model's positions; "
                "rl.max_response_length= cuts longer ones"
            )  # fmt: skip
        kept = tuple(min(value, longest_response) for value in said)
        return Responses(mean=fmean(kept), spread=pstdev(kept), longest=min(over, longest_response), values=kept)
    mean, spread = said
    if mean > longest_response:
        what = "rl.max_response_length" if capped else "what the prompt leaves of the model's positions"
        raise InputError(name, shown(text), f"is a mean above {what}, {longest_response}")
    return Responses(mean=mean, spread=spread, longest=longest_response if spread else round(mean))


def at_length(job: RlJob | None, training: Training) -> Training:
    """The training with sequences of the longest sample."""
    return training if job is None else msgspec.structs.replace(training, seq_length=longest(job))
