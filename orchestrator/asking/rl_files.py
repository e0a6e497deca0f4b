"""A step of task=rl as files of a program that runs it: the training half by words/tools.py, the other half by words/rollouts.py."""

from __future__ import annotations

from typing import Any, Final

import yaml
from msgspec.structs import replace

from orchestrator.engines import tools
from orchestrator.engines.deepspeed.capabilities import NAME as DEEPSPEED
from orchestrator.errors import InputError
from orchestrator.hardware.spec import Cluster
from orchestrator.job import File
from orchestrator.model.training import Training
from orchestrator.plan import Plan
from orchestrator.rl import text
from orchestrator.rl.choose import Chosen, Question, priced_as
from orchestrator.rl.job import WRITTEN, RlJob, check_updates
from orchestrator.rl.programs import PROGRAMS
from orchestrator.rl.step import Step, longest
from orchestrator.words.rollouts import LANGUAGES, Rollout
from orchestrator.words.terms import nested, say

UNSAID: Final = 20
"""Steps of a training that nobody has said (Training.steps)."""


def rl_file(question: Question, chosen: Chosen, name: str) -> File:
    """The file of the program of this name, with its own price of the step. Raises InputError for what it can't be told."""
    job, cluster = question.job, question.cluster
    check_asked(job, chosen.best.training.training, name)
    check_told(chosen.best, name)
    language, plan = LANGUAGES[name], chosen.best.training
    written = tools.written(plan, name)
    settings = {path: value for path, value in written.settings.items() if path not in language.dropped}
    settings = _moved(settings, language.moved)
    if plan.training.steps == UNSAID:
        settings.pop(language.steps, None)
    step = rollout(job, chosen.best, plan, cluster)
    said = say(language.table, step)
    start, unsaid = language.start, written.unsaid
    if job.keys.algorithm == "ppo" and name != "slime":
        found, lacking = critic(job, chosen.best, cluster, name)
        settings, said = _moved(found | settings, language.ppo), _moved(said, language.ppo)
        unsaid = (*unsaid, *(f"the critic's {one}" for one in lacking if one not in unsaid))
        for there, here in language.ppo:
            start = start.replace(there, here)
    own = name == job.keys.program
    said_of = text.lines(chosen if own else replace(chosen, best=priced_as(question, chosen.best, name)))[:5]
    lines = [f"{plan.model.name} on {chosen.best.gpus} GPUs. Start: {start}."]
    lines += [line for line in said_of if own or not line.startswith("why: ")]  # the others' prices are not this program's
    lines.append(
        f"Prompts have {step.prompt_length} tokens at most: leave longer ones out of the data, or plan with rl.max_prompt_length=."
    )
    if name == "slime":
        said |= {} if plan.training.steps == UNSAID else {"num-rollout": plan.training.steps}
        return slime_file(replace(written, settings=settings), chosen.best, said, lines)
    if unsaid:
        lines.append(f"Can't be said there: {', '.join(unsaid)}.")
    head = "".join(f"# {line}\n" for line in lines)
    return File(path=f"{name}_rl.yaml", content=head + yaml.safe_dump(nested(settings | said), sort_keys=False, width=10**6))


def critic(job: RlJob, step: Step, cluster: Cluster, name: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """(settings of the critic, by its own plan and with the program's own way to learn; what can't be said of it)."""
    language, plan = LANGUAGES[name], step.plans.get("critic", step.training)
    written = tools.written(plan, name)
    policys, its = language.critic
    found = {
        its + path.removeprefix(policys): value
        for path, value in written.settings.items()
        if path.startswith(policys) and path not in language.dropped and not path.endswith(language.learning)
    }
    away = replace(rollout(job, step, plan, cluster), offloads=job.keys.offload is not False)
    return _moved(found, language.critic_moved) | say(language.critic_table, away), written.unsaid


def _moved(settings: dict[str, Any], moved: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    """The settings with sections that are called otherwise, (there, here)."""
    for there, here in moved:
        settings = {here + path.removeprefix(there) if path.startswith(there) else path: value for path, value in settings.items()}
    return settings


def slime_file(written: tools.Written, step: Step, said: dict[str, Any], lines: list[str]) -> File:
    """slime's command: Megatron-LM's flags, and its own behind them; train_async.py generates a step ahead."""
    flags = [f"--{flag}" if value is True else f"--{flag} {value}" for flag, value in said.items() if value not in (None, False)]
    (file,) = tools.files(step.training, written, lines)
    content = "".join(line for line in file.content.splitlines(keepends=True) if not line.startswith("# Start: slime.sh"))
    content = content.replace('  "$@"', "".join(f"  {flag} \\\n" for flag in flags) + '  "$@"')
    return File(path="slime_rl.sh", content=content.replace("train.py", "train_async.py") if step.staleness else content)


def check_asked(job: RlJob, training: Training, name: str) -> tuple[File, ...]:
    """No file yet. Raises InputError for a job that the program of this name can't be told, however its steps are planned."""
    keys = job.keys
    if name not in LANGUAGES or name not in PROGRAMS:
        raise InputError("write", name, "is no program that is told both halves of task=rl", LANGUAGES)
    if training.lora is not None:
        raise InputError("write", name, "is told AdamW of all weights, and the plan has adapters")
    if keys.algorithm == "dpo":
        why = "verl and slime have no DPO, and NeMo RL's takes no packed samples (algorithms/dpo.py)"
        raise InputError("write", name, f"is written for rl.algorithm=grpo or ppo: {why}")
    if keys.algorithm not in WRITTEN:
        raise InputError("write", name, f"is written for rl.algorithm=grpo or ppo, and {keys.algorithm} has settings of its own")
    if keys.critic is not None and name == "slime":
        raise InputError("rl.critic", keys.critic, "is not told to slime: its critic is of the policy's size and layout")
    if keys.reward != "rule":
        raise InputError("write", name, "is written for rl.reward=rule: a reward model has settings of its own")
    check_updates(keys, name)
    if name == "verl" and keys.placement == "split":
        raise not_colocated(name)
    if name in ("nemo_rl", "slime") and keys.epochs > 1 and (name, keys.algorithm) != ("nemo_rl", "ppo"):
        raise InputError("write", name, f"trains on a step's samples once, and rl.epochs={keys.epochs}")
    return ()


def not_colocated(name: str) -> InputError:
    """The error for a split placement, of a program whose colocated one alone is written."""
    why = "is written for rl.placement=colocated: its asynchronous trainers have files of their own"
    return InputError("write", name, why, ["nemo_rl", "slime"])


def check_told(step: Step, name: str) -> None:
    """Raises InputError for a step that the program of this name can't be told."""
    if name == "verl" and not step.colocated:
        raise not_colocated(name)
    if name in PROGRAMS and PROGRAMS[name].always_offloads and step.colocated and not step.offloads:
        raise InputError("write", name, "has training's states in host memory while it generates on the same GPUs: rl.offload=true")
    if name == "slime" and step.staleness > 1:
        raise InputError("write", name, f"generates one step ahead (train_async.py), and rl.staleness={step.staleness}")


def rollout(job: RlJob, step: Step, plan: Plan, cluster: Cluster) -> Rollout:
    """The step's other half as programs count it, beside this plan of a model that is trained."""
    keys, made = job.keys, step.generation
    assert made is not None
    node = min(cluster.gpus_per_node, cluster.num_gpus)
    whole = not step.colocated and step.generation_gpus % node == 0
    kept: dict[str, Any] = {"generation_nodes": None, "generation_gpus_per_node": None}
    if not step.colocated:
        kept = {
            "generation_nodes": step.generation_gpus // node if whole else None,
            "generation_gpus_per_node": node if whole else step.generation_gpus,
        }
    used = made.cache_bytes + made.weight_bytes + PROGRAMS[keys.program].engine.workspace
    return Rollout(
        algorithm=keys.algorithm,
        prompts=job.prompts,
        samples=job.samples,
        response_length=job.responses.longest,
        prompt_length=longest(job) - job.responses.longest,
        sequence_length=longest(job),
        update_prompts=job.prompts / keys.updates,
        update_samples=job.sequences // keys.updates,
        epochs=keys.epochs,
        micro_batch_tokens=plan.micro_batch_size * plan.training.seq_length,
        rank_tokens=plan.micro_batch_size * plan.training.seq_length // plan.cp,
        fsdp=plan.engine == DEEPSPEED,
        reference=keys.reference,
        others_offload=keys.offload is not False,
        tp=made.layout.tp,
        dp=made.layout.dp,
        expert_parallel=made.layout.gpus if made.layout.dp > 1 else 1,
        engine_gpus=made.layout.gpus,
        memory=int(100 * used / cluster.gpu.memory) / 100,
        static_memory=int(100 * (made.cache_bytes + made.weight_bytes) / cluster.gpu.memory) / 100,
        concurrency=keys.concurrency,
        offloads=step.offloads,
        colocated=step.colocated,
        generation_gpus=None if step.colocated else step.generation_gpus,
        nodes=cluster.num_gpus // node,
        gpus_per_node=node,
        staleness=step.staleness,
        **kept,
    )
