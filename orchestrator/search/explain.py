"""Why the plan is not another one: the best plan with a choice pinned, what forbids it, and what data parallelism alone would need."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from orchestrator.errors import InputError, NoPlanError
from orchestrator.plan import Plan
from orchestrator.search.planner import search
from orchestrator.search.question import Engines, SearchSettings
from orchestrator.search.refuse import RELAX, Refused, at_its_leanest
from orchestrator.strategy.choices import shown
from orchestrator.strategy.legality import unsuited
from orchestrator.strategy.megatron_layout import transformer_layers
from orchestrator.strategy.pins import Pins
from orchestrator.strategy.spec import ZeroStage
from orchestrator.strategy.tree import Outcome, Tree, divisors
from orchestrator.strategy.workload import Workload
from orchestrator.values import Value


class Explanation(Value, frozen=True, kw_only=True):
    """The answer for one pin, or for several together.

    `question` is "tp=4". `plan`: the plan that is taken with it, which may be the chosen one; None: there is none, and `why` has the rule
    or the memory that forbids it. `refused`: then the plan that lacks least memory, if a legal one was too large.
    """

    question: str
    plan: Plan | None = None
    why: str = ""
    refused: Refused | None = None


Plainer = Callable[[SearchSettings, Plan], Plan | None]
"""The plan that is taken in place of the fastest one (the last) of a search with these settings; None: there is none."""


def explain(
    questions: Pins, workload: Workload, engines: Engines, settings: SearchSettings, plainer: Plainer = lambda *_: None
) -> tuple[Explanation, ...]:
    """An answer for each field of `questions` that is set, the others as the settings pin them, and where there are several one for all of
    them together. One search each, and what is taken of it is the plan that the pin itself would give."""
    asked, pins = questions.given(), settings.pins
    answers = []
    for changes in [*({name: value} for name, value in asked.items()), *([asked] if len(asked) > 1 else [])]:
        question = " ".join(f"{name}={shown(value)}" for name, value in changes.items())
        try:
            held = replace(settings, pins=replace(pins, **changes), top_k=1)
            found = search(workload, engines, held)
            answers.append(Explanation(question=question, plan=plainer(held, found.plan) or found.plan))
        except NoPlanError as error:
            refused = error.refused if isinstance(error.refused, Refused) else None
            alone = replace(pins, **dict.fromkeys(changes)) == Pins()  # there is no other pin to leave out
            why = str(error).split(RELAX)[0] if alone else str(error)
            answers.append(Explanation(question=question, why=why, refused=refused))
        except InputError as error:  # a layout that is not this model's
            answers.append(Explanation(question=question, why=error.why))
    return tuple(answers)


def narrower_tp(plan: Plan) -> int | None:
    """The largest tp that divides the plan's and lies inside the innermost network level; None where the plan's does.

    Tensor parallelism over a slower level is priced by bandwidth and latency like every group, but only nanotron's published runs have it
    (and a few on A100): elsewhere nothing has checked that price, so the plan is shown beside the best one without it.
    """
    inner = plan.cluster.levels[0].size
    if plan.tp <= inner:
        return None
    return max(tp for tp in divisors(plan.tp) if tp <= inner)


class DataParallel(Value, frozen=True, kw_only=True):
    """Data parallelism alone (tp=1 pp=1 cp=1) at a ZeRO stage, with the fewest bytes: one sample at a time, the strongest recompute.
    `least`: its price; None: no legal choice, because of `why`."""

    engine: str
    zero_stage: ZeroStage
    least: Refused | None = None
    why: str = ""


def data_parallelism_alone(workload: Workload, engines: Engines) -> tuple[DataParallel, ...]:
    """What every ZeRO stage of every engine that has the model would need on a GPU without tensor, pipeline or context parallelism."""
    rows = []
    for engine in engines:
        capabilities = engine.capabilities
        if unsuited(capabilities, workload) is not None:
            continue
        costs = engine.costs(workload)
        for stage in capabilities.zero_stages:
            cuts: list[Outcome] = []
            pins = Pins(tp=1, pp=1, cp=1, zero_stage=stage, micro_batch_size=1, offload=False)
            leaf = next(Tree(capabilities, workload, pins).leaves(cuts.append), None)
            if leaf is not None:
                least = at_its_leanest(costs, costs.model, leaf.candidate, [transformer_layers(costs.model)])
                rows.append(DataParallel(engine=engine.name, zero_stage=stage, least=least))
            else:
                rows.append(DataParallel(engine=engine.name, zero_stage=stage, why=cuts[-1].reason or ""))
    return tuple(rows)
