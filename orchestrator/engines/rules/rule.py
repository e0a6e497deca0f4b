"""How a rule of an engine's is written down, and what most of them ask."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from orchestrator.strategy.capabilities import Rule
from orchestrator.strategy.spec import Candidate
from orchestrator.strategy.workload import Workload

Check = Callable[[Candidate, Workload], str | None]


def rule(id: str, engine_rule: str, needs: str) -> Callable[[Check], Rule]:
    """Makes a rule of the check below it. `engine_rule`: the engine's own, by its id in the tables of facts, file and line. `needs`: what
    the check reads, words in the decision tree's order, so that the tree can cut as soon as that much is fixed; "model" is what is given:
    model, training and cluster."""
    return lambda check: Rule(id=id, engine_rule=engine_rule, check=check, needs=tuple(needs.split()))


def sequence_lengths(workload: Workload) -> dict[str, int]:
    """Tokens of each sequence of a sample, by the name of the key that sets it."""
    lengths = {"seq_length": workload.model.seq_length}
    if workload.model.decoder_seq_length:
        lengths["decoder_seq_length"] = workload.model.decoder_seq_length
    return lengths


def first(whys: Iterable[str | None]) -> str | None:
    """The first reason; None: there is none."""
    return next((why for why in whys if why is not None), None)


def divides_sequences(part: int, name: str, workload: Workload) -> str | None:
    """Why `part` does not divide the tokens of each sequence; None where it does."""
    return first(divides(part, name, length, key) for key, length in sequence_lengths(workload).items())


def divides(part: int, name: str, whole: int, whole_name: str) -> str | None:
    """Why `part` does not divide `whole`, with both names; None where it does."""
    return None if whole % part == 0 else f"{name}={part} does not divide {whole_name}={whole}"
