"""Jobs of reinforcement learning and what is asked of them, small enough to reckon by hand."""

from __future__ import annotations

from msgspec.structs import replace

from orchestrator import recipe
from orchestrator.asking.reinforcement import Asker
from orchestrator.detect import Machine
from orchestrator.engines import ENGINES
from orchestrator.rl.choose import Question
from orchestrator.rl.job import Responses, RlJob, RlKeys
from orchestrator.units import GIB

SMALL = ("rl.prompts=32", "rl.samples=8", "rl.prompt_length=200", "rl.response_length=800+500", "rl.max_response_length=4096")


def asker(*words: str, of: tuple[str, ...] = SMALL) -> Asker:
    """The planner for a job on these words."""
    tree = recipe.read_arguments(["task=rl", *of, *words])
    settings = recipe.load_tree(tree, Machine(host_memory=16 * GIB), list(ENGINES), plans_only=True)
    assert settings.reinforcement is not None
    return Asker(settings, settings.reinforcement)


def question(*words: str, of: tuple[str, ...] = SMALL) -> Question:
    return asker(*words, of=of).question


def job(prompts: int, samples: int, prompt: int, length: int, **keys: object) -> RlJob:
    """Responses of one length."""
    responses = Responses(mean=length, spread=0, longest=length)
    return RlJob(keys=replace(RlKeys(), **keys), prompts=prompts, samples=samples, prompt_length=prompt, responses=responses)
