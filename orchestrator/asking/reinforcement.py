"""task=rl: the planner is asked for the training half on each number of GPUs that may have it, and the fastest placement is the answer."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from orchestrator import recipe
from orchestrator.asking.rl_files import check_asked, rl_file
from orchestrator.engines import ENGINES
from orchestrator.engines.megatron.capabilities import NAME as MEGATRON
from orchestrator.engines.rules.rule import rule
from orchestrator.errors import InputError, NoPlanError
from orchestrator.folder import new_folder, write_folder
from orchestrator.job import File, all_or_none
from orchestrator.plan import Plan, to_json
from orchestrator.planning import Found, Planner
from orchestrator.recipe import Settings
from orchestrator.recipe.model import padded_for_every_layout
from orchestrator.report.text import software_text
from orchestrator.rl import text
from orchestrator.rl.choose import Chosen, Question, fastest
from orchestrator.rl.job import RlJob
from orchestrator.rl.step import Model, Step, batch, loss_bytes
from orchestrator.search.planner import UNKNOWN, Bounds
from orchestrator.strategy.legality import OF_ONE_LENGTH, PLANNER
from orchestrator.strategy.pins import Pins
from orchestrator.strategy.spec import Candidate
from orchestrator.strategy.workload import Workload
from orchestrator.values import Printed, indented

USUAL_ENGINE = MEGATRON
"""What trains where engine= says nothing: verl, NeMo RL and slime have Megatron-core (or torch's FSDP) beside an engine of generation."""

MICRO_BATCH_TOKENS = 16384
"""Tokens from which a micro-batch gains nothing by another sample: its products have been at their fastest since fewer, and its activations
grow (verl's ppo_max_token_len_per_gpu, trainer/config/actor/actor.yaml)."""


@rule("full_micro_batch", PLANNER, "micro_batch_size")
def full_micro_batch(candidate: Candidate, workload: Workload) -> str | None:
    """Why this micro-batch is not tried, in tokens; None: it is."""
    length, samples = workload.training.seq_length, candidate.micro_batch_size
    if samples == 1 or samples * length <= MICRO_BATCH_TOKENS:
        return None
    return f"micro-batches of {samples} x {length} tokens are above {MICRO_BATCH_TOKENS}"


class RlAnswer(Printed, frozen=True, kw_only=True):
    """The fastest placement of a step of task=rl, and the best of the others."""

    settings: Settings
    chosen: Chosen

    @property
    def job(self) -> RlJob:
        """What was asked."""
        assert self.settings.reinforcement is not None
        return self.settings.reinforcement

    @property
    def step(self) -> Step:
        return self.chosen.best

    @property
    def plan(self) -> Plan:
        """The training half."""
        return self.step.training

    @property
    def step_time_s(self) -> float:
        return self.step.seconds

    @property
    def step_time_s_90(self) -> tuple[float, float]:
        """90% interval of the step's seconds."""
        return self.step.interval

    @property
    def cost(self) -> float | None:
        """Price of a step, in the currency of cluster.price_per_gpu_hour; None without that key."""
        return text.cost(self.step, self.settings.price_per_gpu_hour)

    @property
    def tokens_per_s(self) -> float:
        """Tokens of prompts and responses a second, of all GPUs together."""
        return self.step.tokens_per_s

    def __repr__(self) -> str:
        """One line: a notebook shows it, and the whole answer has pages."""
        return (
            f"<RlAnswer {self.settings.recipe}, {self.settings.cluster.types}: {text.placed(self.step)}, {self.step_time_s:.3g} s a step>"
        )

    def __str__(self) -> str:
        plan, plans = self.plan, list(self.step.plans.values())
        software = software_text(plans, ENGINES[plan.engine].requirements.versions(plan.cluster), assumed=self.settings.software_unsaid)
        said = [*text.lines(self.chosen, self.settings.price_per_gpu_hour), text.lengths(self.job), software, *text.one_sample(self.job)]
        return "\n".join(filter(None, said))

    def written(self, name: str) -> dict[str, str]:
        """The step in the words of a program, verl or nemo_rl: texts by the names of its files. Raises InputError for a step that this
        program can't be told."""
        file = rl_file(Asker(self.settings, self.job).question, self.chosen, name)
        return {file.path: file.content}

    def write(self, out: str | Path) -> Path:
        """The files of write=, and rl.json with all that was found, in a new or empty folder; the folder. Raises InputError."""
        files_of = lambda name: [File(path=path, content=text) for path, text in self.written(name).items()]  # noqa: E731
        written = all_or_none(self.settings.write, files_of)
        found = indented(self.summary())
        folder = new_folder(self.settings, str(out))
        write_folder(folder, [*written, File(path="rl.json", content=found), File(path="plan.json", content=to_json(self.plan))])
        return folder

    def summary(self) -> dict[str, Any]:
        """The figures as JSON has them, without the training half's plan."""
        return {
            "recipe": self.settings.recipe,
            "cluster": self.settings.cluster.name,
            "gpus": self.settings.cluster.num_gpus,
            **text.summary(self.step),
            "others": [text.summary(one) for one in self.chosen.others],
            "one_step_off": None if self.chosen.stale is None else text.summary(self.chosen.stale),
            "node_more": [msgspec.structs.asdict(one) for one in self.chosen.grown],
            "why_not": list(self.chosen.why_not),
        }


class Asker:
    """Asks for plans of one user's settings. Plans are kept: one question needs the same more than once."""

    def __init__(self, settings: Settings, job: RlJob) -> None:
        engine = USUAL_ENGINE if settings.engine == "auto" else settings.engine
        self.settings = msgspec.structs.replace(settings, engine=engine, reinforcement=None)
        self.job = job
        self._plans: dict[tuple[int, float, Model], Plan | InputError | NoPlanError] = {}

    def __call__(self, gpus: int, reserved: float, model: Model = "policy") -> Plan:
        """The fastest plan of this model on so many GPUs with so many bytes of each kept free. Raises InputError, NoPlanError."""
        found = self._plans.get((gpus, reserved, model))
        if found is None:
            try:
                found = self._planned(gpus, reserved, model)
            except (InputError, NoPlanError) as error:
                found = error
            self._plans[gpus, reserved, model] = found
        if isinstance(found, Exception):
            raise found
        return found

    def _planned(self, gpus: int, reserved: float, model: Model) -> Plan:
        """The fastest plan whose last stage has room for what this loss keeps beside that of a pretraining."""
        found = self._found(gpus, reserved, model)
        more = loss_bytes(found.plan)
        if found.plan.prediction.by_stage[-1].peak_memory_bytes + more > found.limit.usable:
            found = self._found(gpus, reserved + more, model, found.bounds)
        return found.plan

    def _found(self, gpus: int, reserved: float, model: Model, known: Bounds = UNKNOWN) -> Found:
        settings = self.settings
        if model != "policy":  # what is pinned is the policy's
            other = padded_for_every_layout(self.job.models[model], settings.cluster)
            settings = msgspec.structs.replace(settings, architecture=other, pins=Pins())
        limit = msgspec.structs.replace(settings.limit, limit=settings.limit.limit - round(reserved))
        training = batch(self.job, settings.training, gpus)
        cluster = recipe.resized(settings.cluster, gpus)
        planner = Planner(msgspec.structs.replace(settings, cluster=cluster, training=training, limit=limit))
        rules = (OF_ONE_LENGTH, *((full_micro_batch,) if settings.pins.micro_batch_size is None else ()))
        return planner.fastest(planner.space(top_k=1, prunings=rules).with_one_recompute().unproven(), known=known)

    @cached_property
    def question(self) -> Question:
        """What a placement is chosen for."""
        settings = self.settings
        traits = ENGINES[self.settings.engine].traits(settings.cluster.software)
        prices = Planner(settings).prices_for(settings.engine)
        return Question(
            job=self.job,
            architecture=settings.architecture,
            cluster=settings.cluster,
            calibration=prices.fitted,
            traits=traits,
        )


def answered(settings: Settings) -> RlAnswer:
    """The answer to task=rl. Raises InputError, NoPlanError."""
    job = settings.reinforcement
    assert job is not None
    check_alone(settings, job)
    asker = Asker(settings, job)
    return RlAnswer(settings=settings, chosen=fastest(asker.question, asker))


def check_alone(settings: Settings, job: RlJob) -> None:
    """Raises InputError for what is asked beside task=rl and is not answered there."""
    cluster = settings.cluster
    beside = {
        **{f"target.{name}": value for name, value in settings.targets.given().items()},
        "largest": settings.largest, "take": settings.take, "tune": settings.tune, "entry": settings.entry, "data": settings.run.data,
        "cluster.mtbf": settings.mtbf_hours, "verbose": "true" if settings.verbose else None,
        **{f"explain.{name}": value for name, value in settings.explain.given().items()}, "explain.gpus": settings.explain_gpus,
    }  # fmt: skip
    for name, value in beside.items():
        if value is not None:
            raise InputError(name, value, "is not answered beside task=rl: leave one of them out")
    all_or_none(settings.write, lambda name: check_asked(job, settings.training, name))
    if job.keys.generation_gpus is not None and job.keys.generation_gpus >= cluster.num_gpus:
        raise InputError("rl.generation_gpus", job.keys.generation_gpus, f"leaves none of the {cluster.num_gpus} GPUs for training")
    if cluster.is_cpu:
        raise InputError("cluster", cluster.name, "has no GPU: generation is priced by a GPU's memory and FLOPs")
    if cluster.parts:
        raise InputError("cluster", cluster.name, f"has {cluster.types}: task=rl is planned for GPUs of one type")
