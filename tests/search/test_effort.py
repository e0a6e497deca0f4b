"""What searches may take, counted: calls of what is dear, and of all functions together (effort.json).

Bounds, caches and shortcuts leave the answer as it is: without a count nothing notices when one stops working. After a change that is worth
it `UPDATE_GOLDEN=1 python -m pytest tests/search/test_effort.py` writes the ceilings anew, 3% above what is taken; the commit says why.
"""

from __future__ import annotations

import cProfile
import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType

import pytest
from layerwise_instances import medium_of
from test_layerwise import measured

from orchestrator import recipe
from orchestrator.detect import Machine
from orchestrator.engines import ENGINES
from orchestrator.planning import Planner
from orchestrator.search.layerwise import layerwise
from orchestrator.search.planner import search
from orchestrator.strategy.pins import MemoryLimit
from orchestrator.units import GIB, MIB

ROOMS = ("/orchestrator/search/", "/orchestrator/cost/", "/orchestrator/strategy/")
EVERYTHING = "calls"


def forget() -> None:
    """What functions of these rooms keep of searches before, so that the count is the same after any other test."""
    for name, module in [*sys.modules.items()]:
        if any(room.replace("/", ".").strip(".") in name for room in ROOMS):
            for value in vars(module).values():
                for kept in (value, *(vars(value).values() if isinstance(value, type) else ())):
                    if hasattr(kept, "cache_clear"):
                        kept.cache_clear()


def calls(work: Callable[[], object]) -> Counter[str]:
    """Of functions with a name in these rooms, by class and name; and of all together."""
    forget()
    counter = cProfile.Profile(builtins=False)
    counter.runcall(work)
    found = Counter[str]()
    for entry in counter.getstats():
        code = entry.code
        if isinstance(code, CodeType) and code.co_name[0] != "<" and any(room in code.co_filename for room in ROOMS):
            found[code.co_qualname] += entry.callcount
            found[EVERYTHING] += entry.callcount
    return found


FILE = Path(__file__).with_name("effort.json")
CEILINGS: dict[str, dict[str, dict[str, int]]] = json.loads(FILE.read_text())
SLACK = 1.03
MACHINE = Machine(host_memory=64 * GIB, megatron_core="0.16.1")
"""Wherever it runs: what is counted depends on a host's memory and on the engines' releases."""


def planned(words: str) -> Counter[str]:
    """Of a search for the plan that these words ask for."""
    space = Planner(recipe.load(words.split(), MACHINE, list(ENGINES))).space()
    return calls(lambda: search(space.workload, space.planned, space.settings))


def planned_by_layers(what: str) -> Counter[str]:
    """Of a layer-wise search: measured prices of eight layers in so many MiB, or made-up ones on so many stages."""
    of, size = what.split()
    if of == "measured":
        return calls(lambda: layerwise(measured(8, 32), 32, MemoryLimit(limit=int(size) * MIB, reserve=0)))
    prices, batch, limit = medium_of({1: 0, 2: 1, 4: 0}[int(size)], int(size))
    return calls(lambda: layerwise(prices, batch, limit, pp=int(size)))


KINDS: dict[str, Callable[[str], Counter[str]]] = {"planned": planned, "layerwise": planned_by_layers}


@pytest.mark.parametrize(("kind", "what"), [(kind, what) for kind, asked in CEILINGS.items() for what in asked])
def test_a_search_takes_no_more_than_that(kind: str, what: str) -> None:
    """Of hundreds of outer choices few are priced layer by layer, fewer solved, and a few dozen partitions simulated; of all stages that
    could be part of a layer-wise plan few are solved, and few prices of a byte tried for each."""
    ceilings, took = CEILINGS[kind][what], KINDS[kind](what)
    if os.environ.get("UPDATE_GOLDEN"):
        ceilings.update({name: int(SLACK * took[name]) for name in ceilings})
        FILE.write_text(json.dumps(CEILINGS, indent=1) + "\n")
    assert {name: took[name] for name, most in ceilings.items() if took[name] > most} == {}
