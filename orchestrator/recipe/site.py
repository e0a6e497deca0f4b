"""The site's file: what every run on this cluster has in common, said once (partition, account, image, price of a GPU-hour)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from orchestrator.errors import InputError
from orchestrator.key import shown
from orchestrator.recipe.clusters import stored
from orchestrator.recipe.keys import FREE_WITH_PLAN, KEYS
from orchestrator.recipe.layers import Flat, flatten
from orchestrator.recipe.read import read_yaml

VARIABLE: Final = "ORCHESTRATOR_SITE"
USUAL: Final = "~/.config/orchestrator/site.yaml"
OF_A_RUN: Final = ("recipe", "name", "plan", "model", "train", "pin", "explain", "profile", "seed", "target", "largest", "out")
"""Keys and groups that say what is trained, which no site decides."""


def is_shipped(given: Flat, layers: Sequence[Flat]) -> bool:
    """Whether the lowest layer is a recipe of the package, over which the site's file stands; a user's own recipe stands over it."""
    return len(layers) > 1 or str(given["recipe"].value) in (*stored("models"), *stored("profiles"))


def site_layer(*, with_plan: bool = False) -> Flat:
    """The keys of the site's file; none where there is no file. `with_plan`: without the cluster and engine, which a saved plan has. Raises
    InputError for a file that is named and not there, and for keys of a run."""
    named = os.environ.get(VARIABLE)
    path = Path(named or USUAL).expanduser()
    if not path.is_file():
        if named:
            raise InputError(VARIABLE, shown(named), "no such file")
        return {}
    flat = flatten(read_yaml(path), str(path))
    for name, given in flat.items():
        if name.partition(".")[0] in OF_A_RUN:
            raise InputError(f"{path}: {name}", shown(given.text), "is a run's own: say it in a recipe or on the command line")
    of_plan = [name for name in flat if with_plan and name in KEYS and KEYS[name].owner not in FREE_WITH_PLAN]
    of_plan += [name for name in flat if with_plan and ((name not in KEYS and name.startswith("cluster.")) or name == "engine")]
    return {name: given for name, given in flat.items() if name not in of_plan}
