"""One plan as an answer: its figures by name, its files, and why it is not another."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any, TextIO, cast

from orchestrator.engines import ENGINES
from orchestrator.engines.deepspeed.capabilities import NAME as DEEPSPEED
from orchestrator.engines.tools import NAMES
from orchestrator.errors import InputError
from orchestrator.folder import all_files, tool_files, training_budget, write_folder
from orchestrator.job import Job
from orchestrator.model.families import describe_for
from orchestrator.plan import Plan, to_json
from orchestrator.planning import Found, Planner
from orchestrator.recipe import Settings
from orchestrator.report.budget import Budget
from orchestrator.report.text import choice, fullest
from orchestrator.strategy.layout import Prediction
from orchestrator.units import format_bytes, format_seconds
from orchestrator.values import Printed

DS_CONFIG, FOR_TRAINER = "ds_config.json", "ds_config.auto.json"


def ninety(figure: str) -> property:
    """The 90% interval of this figure of the budget, as Budget.interval."""
    return property(lambda answer: answer.budget.interval(figure), doc="The 90% interval, (low, high); None: nothing like it was measured.")


class Answer(Printed, frozen=True, kw_only=True):
    """The fastest plan for the settings (or the saved one that they name), priced."""

    settings: Settings
    found: Found

    @property
    def plan(self) -> Plan:
        """The whole plan, as plan.json has it."""
        return self.found.plan

    @property
    def predicted(self) -> Prediction:
        """Time and memory by cause and stage."""
        return self.plan.prediction

    @property
    def step_time_s(self) -> float:
        return self.predicted.step_time_s

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second of all GPUs together."""
        return self.budget.tokens_per_s

    @property
    def peak_memory_bytes(self) -> float:
        """Bytes on the fullest rank."""
        return self.predicted.peak_memory_bytes

    @property
    def headroom(self) -> float:
        """The share of the usable memory that the fullest rank leaves free; below 0 where a saved plan does not fit."""
        stage, usable = fullest(self.plan, self.found.limit)
        return 1 - self.predicted.by_stage[stage].peak_memory_bytes / usable

    @property
    def chance_of_not_fitting(self) -> float:
        """The chance, 0 to 1, that the fullest rank takes more than a GPU has, by how far off published runs' peaks were; memory.risk=
        bounds it."""
        return Planner(self.settings).chance_of_not_fitting(self.plan)

    @property
    def faster_on_fewer_gpus(self) -> Plan | None:
        """A faster plan on fewer GPUs, as traffic or the batch may have it; None: fewer are slower, or nothing speaks for them."""
        return self.found.fewer

    @property
    def mfu(self) -> float | None:
        """Model FLOP/s of a GPU over its peak in this precision."""
        return self.budget.mfu

    @property
    def budget(self) -> Budget:
        """Days, GPU-hours, energy and cost of the training, or of what train.resume= leaves of it; with failures where cluster.mtbf= says
        how often they come."""
        return training_budget(self.settings, self.plan)

    @property
    def days(self) -> float:
        return self.budget.days

    @property
    def gpu_hours(self) -> float:
        return self.budget.gpu_hours

    @property
    def energy_kwh(self) -> float | None:
        """Kilowatt-hours by the power of the GPU's datasheet; None: it is not known."""
        return self.budget.energy_kwh

    @property
    def cost(self) -> float | None:
        """Price of the training as `budget`, in the currency of cluster.price_per_gpu_hour; None without that key."""
        return self.budget.cost

    step_time_s_90 = ninety("step_s")
    tokens_per_s_90 = ninety("tokens_per_s")
    mfu_90 = ninety("mfu")
    days_90 = ninety("days")
    gpu_hours_90 = ninety("gpu_hours")
    energy_kwh_90 = ninety("energy_kwh")
    cost_90 = ninety("cost")

    def job(self) -> Job:
        """The files, arguments and environment that training would start with. Raises InputError."""
        return Planner(self.settings).job(self.plan, Planner(self.settings).for_program(self.found))

    def ds_config(self, *, trainer: bool = False) -> dict[str, Any]:
        """DeepSpeed's configuration as a dictionary. `trainer`: with "auto" where Hugging Face's Trainer and accelerate fill in their own
        arguments. Raises InputError for a plan of an engine that has none."""
        path = FOR_TRAINER if trainer else DS_CONFIG
        content = next((file.content for file in self.job().files if file.path == path), None)
        if content is None:
            having = [DEEPSPEED] if trainer else [name for name, engine in ENGINES.items() if "ds" in engine.passes]
            raise InputError("engine", self.plan.engine, f"has no {path}", having)
        found: dict[str, Any] = json.loads(content)
        return found

    def megatron_args(self) -> list[str]:
        """Words for Megatron-LM's pretrain scripts: of the plan or, where its command line can't say that, of the fastest one that it can
        (`Planner.for_program`). Raises InputError where there is none."""
        program = ENGINES[self.plan.engine].program
        if program is None:
            having = [name for name, engine in ENGINES.items() if engine.program is not None]
            raise InputError("engine", self.plan.engine, "has no arguments of Megatron-LM", having)
        plan = Planner(self.settings).for_program(self.found) or self.plan
        reason = program.why_not(plan)
        if reason is not None:
            raise InputError("engine", self.plan.engine, f"Megatron-LM's command line can't say this plan: {reason}")
        return [*program.words(plan)]

    def written(self, name: str) -> dict[str, str]:
        """The plan in the words of a program that people start around Megatron or DeepSpeed, as `write=` takes their names: texts by the
        names of its files. Raises InputError for a plan that this program can't train.

        >>> import orchestrator as so
        >>> sorted(so.plan(recipe="llama3_8b", cluster="dgx_h100", gpus=8, engine="megatron").written("bridge"))
        ['bridge.py', 'bridge.sh']
        """
        if name not in NAMES:
            raise InputError("written", name, "is no program that is written for", NAMES)
        return {file.path: file.content for file in tool_files(self.settings, self.found, name)}

    def to_json(self) -> str:
        """The text of plan.json, from which plan=PATH gives the same plan."""
        return to_json(self.plan)

    def write(self, out: str | Path) -> Path:
        """All files of a run in a new or empty folder, which nothing starts; the folder. Raises InputError."""
        return self.write_job(out)[0]

    def write_job(self, out: str | Path) -> tuple[Path, Job]:
        """Writes as `write`; the folder, and the job that its files start. Raises InputError."""
        from orchestrator.folder import new_folder, with_outside

        folder = new_folder(self.settings, str(out))
        job = with_outside(self.job(), self.plan, folder)
        write_folder(folder, all_files(self.settings, self.found, job, folder, None))
        return folder, job

    def summary(self) -> dict[str, Any]:
        """The figures as JSON has them, without the plan."""
        of, other = self.budget, self.faster_on_fewer_gpus
        model = describe_for(self.plan.model, self.plan.training)
        return {
            "recipe": self.settings.recipe,
            "assumed": " ".join(f"train.{name}={getattr(self.plan.training, name):g}" for name in self.settings.assumed),
            "parameters": model.parameters,
            "active_parameters": model.active_parameters,
            "cluster": self.plan.cluster.name,
            "gpus": self.plan.world_size,
            "engine": self.plan.engine,
            "choice": choice(self.plan),
            "step_time_s": self.step_time_s,
            "interval_s": self.predicted.interval,
            "peak_memory_bytes": self.peak_memory_bytes,
            "usable_memory_bytes": self.found.limit.usable,
            "headroom": self.headroom,
            "chance_of_not_fitting": self.chance_of_not_fitting,
            "search_complete": self.found.complete,
            "faster_on_gpus": other and other.world_size,
            "steps": of.steps,
            "tokens": of.tokens,
            **of.figures(),
        }

    def __repr__(self) -> str:
        """One line: a notebook shows it, and the whole plan has megabytes."""
        plan = self.plan
        takes = f"{format_seconds(self.step_time_s)} a step, {format_bytes(self.peak_memory_bytes)} at the peak"
        return f"<Answer {self.settings.recipe}, {plan.cluster.types}: {plan.engine} {choice(plan)}, {takes}>"

    def __str__(self) -> str:
        """The report as the command prints it."""
        from rich.console import Console

        from orchestrator.screen import FILE_WIDTH, Trimmed, show_found

        text = io.StringIO()
        text.write(f"{self.settings.why_cluster}\n")
        show_found(Console(file=cast(TextIO, Trimmed(text)), width=FILE_WIDTH), self.settings, self.found)
        return text.getvalue()
