"""What every engine declares, as one value (`Engine`): what it can run, how it is priced, how a plan becomes the job that runs it, and what
must be installed there. Pure: nothing of an engine's own packages is imported."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal

from orchestrator.hardware.spec import Cluster, Software
from orchestrator.job import Job
from orchestrator.model.spec import Architecture
from orchestrator.model.training import Training
from orchestrator.plan import Plan
from orchestrator.strategy.capabilities import Capabilities, Traits
from orchestrator.values import Value


class Requirements(Value, frozen=True, kw_only=True):
    """What must be there where ranks run. `modules`: what they import. `versions`: by distribution whose behaviour a plan for this cluster
    counts on, its version, or "" for any; the worker refuses a node that has another (workers/preflight.py)."""

    modules: tuple[str, ...]
    versions: Callable[[Cluster], dict[str, str]] = lambda cluster: {}

    def lacking(self, missing: Collection[str]) -> tuple[str, ...]:
        """The required modules that are in `missing`."""
        return tuple(name for name in self.modules if name in missing)


class Entry(Value, frozen=True, kw_only=True):
    """A program of the user's own in place of our worker. `arguments`: the user's, which come last; `without`: flags of ours that it does
    not get; `exit_minutes`: what the job's time limit leaves it, None: there is no limit; `trial_steps`: of a run that is only measured
    (tune=), which takes so many and leaves nothing behind, None: it trains."""

    program: str
    arguments: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    launcher: Literal["torchrun", "deepspeed"] = "torchrun"
    exit_minutes: int | None = None
    trial_steps: int | None = None


class Program(Value, frozen=True, kw_only=True):
    """The engine's own program, which entry= starts in place of our worker, and what it can be told."""

    arguments: str
    """The file of the run folder that holds its arguments."""
    capabilities: Callable[[Software], Capabilities]
    """Capabilities of the plans that these arguments can say."""
    why_never: Callable[[Architecture, Training, Software], str | None]
    """Why they can say no plan for this model and training with this software; None: they can."""
    why_not: Callable[[Plan], str | None]
    """Why they can't say this plan; None: they can."""
    words: Callable[[Plan], Sequence[str]]
    """The arguments that say a plan which it can be told."""
    beside: Callable[[Job, Plan, Plan], Job]
    """The job of a plan that they can't say, with the arguments of another plan (the last) in its folder, and a note that says so."""
    of_documents: Callable[[Plan], Sequence[str] | None]
    """The arguments by which it divides a corpus, where it does so by whole documents; None: this plan's program does not."""


class OwnLoop(Value, frozen=True, kw_only=True):
    """The engine's own training loop, which a program of orchestrator/programs starts in our worker's place (program=own)."""

    name: str
    """How screens call it: transformers' Trainer."""
    why_not: Callable[[Plan], str | None]
    """Why it can't run this plan as it is, with what the plan's run asks for; None: it can."""
    job: Callable[[Plan, Job, int | None, int | None], Job]
    """The job with it in the worker's place. Then, as of `Entry`: exit_minutes, trial_steps."""
    trained_by: Callable[[Plan, Job], str] | None = None
    """How screens call what trains this job, where that is not always the loop itself (TRL's SFTTrainer)."""
    modules: tuple[str, ...] = ()
    """What it imports beside the engine's requirements."""
    checkout: str | None = None
    """A variable that names a folder which has the modules in their place."""
    install: str = ""
    """What to install, or name, where they lack."""
    checkpoints: str | None = None
    """How the names of its checkpoints begin, where our worker can't read them, nor it our worker's."""
    why_no_resume: Callable[[Plan, Plan], str | None] = lambda before, now: None
    """Why it can't read a checkpoint of the first plan under the second; None: it can."""
    is_instrument: bool = False
    """Whether it is the engine's only program, also under program=instrument: there is no worker of ours."""
    why_absent: Callable[[Plan], str | None] = lambda plan: None
    """Why the software that the plan is for has it not, a checkout aside; None: it has."""


class Engine(Value, frozen=True, kw_only=True):
    """`capabilities`: what it can run with this software; `traits`: how it is priced; `translate`: a plan as the job that runs it, which
    names the worker that each rank starts; `requirements`: what must be installed there; `passes`: the groups of keys that reach its
    configuration as they are (passthrough.py), each with the sections of that configuration that this engine has."""

    name: str
    capabilities: Callable[[Software], Capabilities]
    traits: Callable[[Software], Traits]
    translate: Callable[[Plan], Job]
    requirements: Requirements
    passes: Mapping[str, tuple[str, ...]] = {}
    program: Program | None = None
    own_loop: OwnLoop | None = None
    entry: Callable[[Plan, Job, Entry], Job] | None = None
    """The job with a user's own program in our worker's place; raises InputError where it can't be started with the plan. None: with no
    plan of this engine."""
    copied: str = ""
    """What a program imports from orchestrator.programs that is a copy of this engine's there: it is of this engine, and loads and exports
    weights as that does."""
    why_no_exchange: Callable[[Architecture, str | None], str | None] = lambda architecture, model_type: (
        "this engine's worker neither loads nor writes checkpoints of Hugging Face's"
    )
    """Why weights can't go between this engine's model of this architecture and transformers'; None: they can. `model_type`: of the
    checkpoint to load, None: none is loaded."""
    reshardable: Callable[[Plan], bool] = lambda plan: True
    """Whether the worker reads this plan's checkpoints into other layouts, numbers of ranks and ZeRO stages."""
    saves_beside: Callable[[Plan], bool] = lambda plan: False
    """Whether the worker can write this plan's checkpoints beside the training."""
    why_no_resume: Callable[[Plan, Plan], str | None] = lambda before, now: None
    """Why the worker can't read a checkpoint of the first plan, which this engine wrote, under the second; None: it can."""
