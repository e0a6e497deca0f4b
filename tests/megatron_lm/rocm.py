"""Whether the Megatron of a checkout takes the arguments of written plans: its own parser and validate_args, and AMD's checks behind them.

    [PRIMUS=CHECKOUT] python tests/megatron_lm/rocm.py CHECKOUT FOLDER...

Prints JSON by folder: `unknown`, the flags that its parser hasn't, and `refused`, what it says of the rest; null: nothing. `PRIMUS` names a
checkout of AMD-AGI/Primus, which runs NVIDIA's Megatron-LM on AMD's GPUs and checks its arguments anew
(primus/backends/megatron/patches/args/rocm_arg_validation.py); its own settings are its modules' defaults.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from flags import parser_of
from thousand import Megatron, words_of

MODULES = ("trainer_base", "primus_megatron_module", "primus_turbo")
"""Files of primus/configs/modules/megatron with Primus' defaults; what Megatron has too is left as the plan says it."""


def checked_by_primus(args: argparse.Namespace, checkout: Path) -> None:
    """Raises what AMD's own check of these arguments raises."""
    sys.path.insert(0, str(checkout))
    from primus.backends.megatron.patches.args.rocm_arg_validation import validate_args_on_rocm

    for module in MODULES:
        settings = yaml.safe_load((checkout / "primus" / "configs" / "modules" / "megatron" / f"{module}.yaml").read_text())
        for name, value in settings.items():
            if not hasattr(args, name):
                setattr(args, name, value)
    validate_args_on_rocm(args)


def taken(megatron: Megatron, known: set[str], folder: Path, primus: str | None) -> dict[str, Any]:
    """What this Megatron says of the plan in this folder."""
    from orchestrator.engines import ENGINES
    from orchestrator.plan import from_json

    plan = from_json((folder / "plan.json").read_text())
    with tempfile.TemporaryDirectory() as there:
        words = words_of((folder / "megatron_args.sh").read_text(), Path(there))
    unknown = [word for word in words if word.startswith("--") and word.split("=")[0] not in known]
    said, refused = io.StringIO(), None
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            args = megatron.read(words, plan, dict(ENGINES["megatron"].translate(plan).environment), known_alone=bool(unknown))
            megatron.transformer_config(args)
            if primus:
                checked_by_primus(args, Path(primus).resolve())
    except (Exception, SystemExit) as error:
        refused = f"{type(error).__name__}: {said.getvalue()[-300:] if isinstance(error, SystemExit) else error}"
    return {"unknown": unknown, "refused": refused}


def main(checkout: str, folders: Sequence[str]) -> None:
    there = str(Path(checkout).resolve())
    with contextlib.redirect_stdout(io.StringIO()):
        known = {text for action in parser_of(there)._actions for text in action.option_strings}
    megatron = Megatron(there)
    print(json.dumps({folder: taken(megatron, known, Path(folder), os.environ.get("PRIMUS")) for folder in folders}, indent=1))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
