"""An engine is a folder: what differs from engine to engine is declared there (orchestrator/engines/engine.py), and nothing outside asks
which engine it is."""

from __future__ import annotations

import ast
from pathlib import Path

from orchestrator.engines import ENGINES

PACKAGE = Path(__file__).parents[2] / "orchestrator"

OTHER_THINGS = {
    "engines/engine.py": "DeepSpeed's launcher",
    "job.py": "DeepSpeed's launcher",
    "recipe/keys.py": "DeepSpeed's launcher, and the keys megatron.*",
    "recipe/cluster_fields.py": "a package of cluster.software",
    "engines/passthrough.py": "the keys megatron.*",
    "strategy/capabilities.py": "layers as megatron-core computes them",
    "data.py": "the package that indexes a corpus",
    "audit/script.py": "whose programs a script starts, and DeepSpeed's launcher",
    "audit/around_trainer.py": "the argument deepspeed= of programs around the Trainer",
    "audit/bridge_recipe.py": "the package megatron.bridge",
    "audit/fsdp.py": "verl's section megatron",
    "audit/overrides.py": "ms-swift's command megatron",
    "audit/trainer.py": "the Trainer's argument deepspeed=",
    "words/tools.py": "other programs' names of who trains, and of who shards",
    "workers/distributed.py": "names of loggers",
    "launch/deepspeed_csv.py": "a folder of logs",
    "workers/profiler.py": "DeepSpeed's package, whose groups are forgotten between cases",
}
"""Files outside the folders with a text that is an engine's name, and what they mean by it."""


def names_engines(source: str) -> bool:
    """Whether a text in it, of its own and not within a sentence, is an engine's name."""
    if not any(name in source for name in ENGINES.own):
        return False
    nodes = [*ast.walk(ast.parse(source))]
    pieces = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    return any(isinstance(node, ast.Constant) and node.value in ENGINES.own and id(node) not in pieces for node in nodes)


def outside() -> list[Path]:
    folders = {PACKAGE / "engines" / name for name in ENGINES.own}
    return [path for path in sorted(PACKAGE.rglob("*.py")) if not folders & {*path.parents}]


def test_every_engine_of_ours_is_a_folder() -> None:
    for name in ENGINES.own:
        assert {path.name for path in (PACKAGE / "engines" / name).iterdir()} >= {"__init__.py", "capabilities.py", "translate.py"}


def test_nothing_outside_asks_which_engine_it_is() -> None:
    found = {path.relative_to(PACKAGE).as_posix() for path in outside() if names_engines(path.read_text())}
    assert found == {*OTHER_THINGS}, "declare what differs in the engine's folder (engines/engine.py)"


def test_asking_is_found_in_every_form() -> None:
    assert names_engines('if plan.engine == "megatron": pass')
    assert names_engines('TAKEN = {"ds": ("deepspeed",)}')
    assert not names_engines('PLACE = f"deepspeed{SEPARATOR}comm"')
    assert not names_engines('"""engine=megatron is a word of a sentence."""')
