"""The text of --help: keys with type and default, recipes, clusters, engines, examples."""

from __future__ import annotations

import typing
from collections.abc import Sequence
from typing import Any, Literal

from orchestrator.key import is_structured, options_of
from orchestrator.recipe.clusters import stored
from orchestrator.recipe.keys import KEYS, OPEN_GROUPS, group_of

HEAD = """\
usage: python -m orchestrator.run key=value ...

Finds the fastest plan for a transformer on a cluster, writes everything that training needs, and starts it where it can.

  python -m orchestrator.run recipe=gpt_tiny gpus=4                  trains on 4 ranks, without a GPU
  python -m orchestrator.run recipe=t5_large gpus=16                 plans for the recipe's cluster
  python -m orchestrator.run recipe=llama3_70b gpus=64 cluster=dgx_h100 pin.tp=8 launch=none
  python -m orchestrator.run recipe=my.yaml cluster=my_cluster.yaml out=runs/first
  python -m orchestrator.run model.hf_config=path/config.json train.global_batch_size=512 train.seq_length=4096 cluster=dgx_h100 gpus=32
  python -m orchestrator.run plan=runs/first/plan.json               checks, prices and starts a saved plan

  ORCHESTRATOR_SITE or ~/.config/orchestrator/site.yaml: keys of every run here (cluster, slurm.account, price), over the
  package's recipes and under your own

  --help     this text           --cfg   prints the resolved configuration and ends
  --schema   prints the JSON Schema of a recipe, with which an editor completes and checks one
  --version  the version         ORCHESTRATOR_DEBUG=1 in the environment: tracebacks
"""

WIDTH = 30


def help_text(engines: Sequence[str]) -> str:
    lines = [HEAD, "keys:"]
    group = ""
    for key in KEYS.values():
        if group_of(key, KEYS) != group:
            group = group_of(key, KEYS)
            lines.append(f"{group}.*:")
        default = f" [{key.default}]" if key.default else ""
        what = f"{kind(key.type)}{f' of {key.unit}' if key.unit else ''}"
        lines.append(f"  {key.name:<{WIDTH}} {what}: {key.help}{default}")
    lines += [f"{name}.*:\n  {name + '.NAME':<{WIDTH}} text: {open_group.help}" for name, open_group in OPEN_GROUPS.items()]
    lines += [
        "",
        f"recipes:  {', '.join(stored('models'))}",
        f"clusters: {', '.join(stored('clusters'))}",
        f"engines:  {', '.join(['auto', *engines])}",
    ]
    return "\n".join(lines)


NAMES = {int: "number", float: "number", str: "text", bool: "true or false"}


def kind(of: Any) -> str:
    """A type as a user reads it.

    >>> kind(int | None), kind(Literal["a", "b"] | None)
    ('number', 'a|b')
    """
    if is_structured(of):
        return "mapping or list (YAML, or JSON)"
    first = next(option for option in options_of(of) if option is not type(None))
    if typing.get_origin(first) is Literal:
        return "|".join(map(str, typing.get_args(first)))
    if typing.get_origin(first) is tuple:
        parts = [NAMES[part] for part in typing.get_args(first) if part is not Ellipsis]
        return ",".join(parts)
    if first is dict or typing.get_origin(first) is dict:
        return "mapping (YAML only)"
    return NAMES[first]
