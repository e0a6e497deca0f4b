"""Settings as a YAML that gives the same plan again on any machine."""

from __future__ import annotations

import shlex
import sys
from typing import Any

import msgspec
import yaml

from orchestrator.recipe.clusters import to_tree
from orchestrator.recipe.machine import largest_gpu
from orchestrator.recipe.profiles import FAMILY
from orchestrator.recipe.settings import Settings
from orchestrator.recipe.starting import container_tree, slurm_tree
from orchestrator.units import GIB


def resolved_yaml(settings: Settings, plan_path: str | None = None) -> str:
    """The settings as a recipe: `recipe=config.yaml` gives the same plan on any machine. `plan_path`: the saved plan that was started."""
    training = msgspec.structs.asdict(settings.training)
    seed = training.pop("seed")
    lora, task, packing, balance, _ = (training.pop(name) for name in ("lora", "task", "packing", "balance", "lengths"))
    training["betas"] = list(training["betas"])
    reserve, limit = settings.limit.reserve, settings.limit.limit
    profile = {} if settings.profile is None else msgspec.to_builtins(settings.profile, str_keys=True)
    profile.pop("name", None)  # it is the recipe's
    names = ("save_every", "async_save", "keep_last", "keep_every", "trace_routing", "step_timers", "eval_every", "eval_steps",
             "step_timeout_s", "resume")  # fmt: skip
    unsaid = {"save_every"} if settings.saves_unsaid else set()
    run = {name: getattr(settings.run, name) for name in names if name not in unsaid} | {"change": ",".join(settings.run.change) or None}
    tree: dict[str, Any] = {
        "name": settings.recipe,
        "engine": settings.engine,
        "take": settings.take,
        "gpus": settings.cluster.num_gpus,
        "seed": seed,
        "data": settings.run.data,
        "data.blend": [[source.weight, source.path] for source in settings.run.blend] or None,
        "task": task,
        "data.packing": packing,
        "data.balance": balance if packing and task == "sft" else None,
        "data.lengths": settings.lengths,
        "data.valid": settings.run.valid,
        "data.split": list(settings.run.split) or None,
        "tokenizer": settings.run.tokenizer,
        "plan": plan_path,
        "profile": profile or None,
        "model": _model_tree(settings),
        "train": training | run,
        "lora": lora and msgspec.structs.asdict(lora) | {"targets": list(lora.targets), "merge": settings.run.merge_lora},
        "pin": msgspec.structs.asdict(settings.pins),
        "memory": {
            "limit_gib": None if limit == largest_gpu(settings.cluster).memory else limit / GIB,  # another cluster= has another
            "reserve_gib": reserve if reserve is None else reserve / GIB,
            "risk": settings.limit.risk,
        },
        "calibration": settings.calibration,
        "largest": settings.largest,
        "target": settings.targets.given(),
        "cluster.price_per_gpu_hour": settings.price_per_gpu_hour,
        "cluster.mtbf": settings.mtbf_hours,
        "cluster.storage": None if settings.storage_bandwidth is None else f"{settings.storage_bandwidth!r} B/s",
        "cluster.restart_s": settings.restart_s if settings.mtbf_hours is not None else None,
        "search": {"budget_s": settings.budget_s, "prefer": settings.prefer, "global_batch_size": "auto" if settings.open_batch else None},
        "program": None if settings.program == "auto" else settings.program,
        "entry": settings.entry,
        "entry.args": shlex.join(settings.entry_args) or None,
        "entry.without": shlex.join(settings.entry_without) or None,
        "entry.launcher": settings.entry_launcher if settings.entry else None,
        "entry.preflight": settings.entry_preflight if settings.entry else None,
        "wandb": settings.run.wandb,
        **{group: {name: "null" if value is None else value for name, value in values.items()} for group, values in settings.extra.items()},
        "write": ",".join(settings.write) or None,
        "slurm": slurm_tree(settings.slurm),
        "container": container_tree(settings.container),
        "env": settings.env,
        "cluster": to_tree(settings.cluster),
    }
    kept = {name: value for name, value in _without_none(tree).items() if value != {}}
    head = f"# {settings.why_cluster}\n# Run it again: python -m orchestrator.run recipe=THIS_FILE\n"
    return head + yaml.dump(kept, Dumper=_Dumper, sort_keys=False, width=sys.maxsize, allow_unicode=True)


def _model_tree(settings: Settings) -> dict[str, Any]:
    """The architecture and where weights come from and go to; nothing for a model that only a profile describes."""
    if settings.architecture.family == FAMILY:
        return {}
    tree: dict[str, Any] = msgspec.to_builtins(settings.architecture)
    if settings.architecture.traced is not None:  # one line of JSON: thousands of YAML's
        tree["traced"] = msgspec.json.encode(settings.architecture.traced).decode()
    return tree | {name: getattr(settings.run, name) for name in ("init_from", "export_to")}


def _without_none(tree: dict[str, Any]) -> dict[str, Any]:
    return {name: _without_none(value) if isinstance(value, dict) else value for name, value in tree.items() if value is not None}


class _Dumper(yaml.SafeDumper):
    """Writes numbers exactly, and so that parse() can read them."""


def _exact(value: float) -> str:
    """A float as repr writes it, with the point without which YAML takes it for a word.

    >>> _exact(1e-05), _exact(0.25)
    ('1.0e-05', '0.25')
    """
    text = repr(value)
    return text if "." in text else text.replace("e", ".0e")


_Dumper.add_representer(float, lambda dumper, value: dumper.represent_scalar("tag:yaml.org,2002:float", _exact(value)))
