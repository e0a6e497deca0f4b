"""The planner from Python: the same keys, the same errors, no printing.

>>> import orchestrator as so
>>> plan = so.plan(recipe="gpt_tiny", gpus=4, cluster="cpu")
>>> plan.plan.world_size, plan.plan.tp * plan.plan.pp * plan.plan.dp
(4, 4)
>>> so.plan(recipe="gpt_tiny", gpus=4, cluster="cpu", pin={"tp": 2}).plan.tp
2
>>> so.plan(recipe="gpt_tiny", gpu=4)
Traceback (most recent call last):
orchestrator.errors.InputError: gpu=4: is no key; did you mean gpus?

A key of a group is a mapping, or one name in quotes: `train={"tokens": "1T"}` or `**{"train.tokens": "1T"}`.
"""

from __future__ import annotations

import functools
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from orchestrator import detect, recipe
from orchestrator.asking import questions, reinforcement
from orchestrator.asking.answer import Answer
from orchestrator.asking.grid import Load, Point, Sweep
from orchestrator.asking.grid import sweep as all_points
from orchestrator.asking.reinforcement import RlAnswer
from orchestrator.engines import ENGINES
from orchestrator.engines.deepspeed.capabilities import NAME as DEEPSPEED
from orchestrator.errors import InputError, LaunchError, NoPlanError, OrchestratorError
from orchestrator.key import put_once, shown
from orchestrator.launch.program_metrics import rows_of
from orchestrator.model.families import has_reader
from orchestrator.model.parts.vision import part_of_weight
from orchestrator.model.training import SEEING
from orchestrator.plan import Plan, to_json
from orchestrator.planning import Planner
from orchestrator.recipe import Settings
from orchestrator.recipe.keys import GROUPS
from orchestrator.recipe.layers import flatten, group_of, leaves
from orchestrator.recipe.whole_data import check_first_texts
from orchestrator.report.comparison import Comparison, compared, measured_in
from orchestrator.report.text import explanation_text
from orchestrator.search.explain import Explanation
from orchestrator.strategy.layerwise import NAME as LAYERWISE
from orchestrator.strategy.pins import Pins

if TYPE_CHECKING:
    from orchestrator.audit.audit import Audit

__all__ = [
    "Answer",
    "Comparison",
    "Explanation",
    "InputError",
    "LaunchError",
    "NoPlanError",
    "OrchestratorError",
    "Plan",
    "Point",
    "RlAnswer",
    "Settings",
    "Sweep",
    "audit",
    "compare",
    "ds_config_for",
    "explain",
    "plan",
    "plan_rl",
    "sweep",
]  # fmt: skip

STARTS: Final = ("launch", "launch.wait", "out", "tune")
"""Keys of a run: a plan is asked for here, and nothing is written or started."""

MICRO_BATCHES: Final = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
"""Keys of a ds_config that a script of the Trainer has to say as the plan does."""
ALONE: Final = {"pin.tp": "1", "pin.cp": "1"}
"""The script's sampler gives every rank data of its own, unless its writer says otherwise."""


@functools.cache
def _machine() -> detect.Machine:
    return detect.machine()


def loader(keys: Mapping[str, Any], instead: str) -> Load:
    """A function that reads the settings of these keys with others over them, each by full name or as a mapping of its group; it raises
    InputError, and so does this. `instead`: what writes or starts."""
    said = {name: value for name, value in keys.items() if not (value == {} and name in GROUPS)}  # train=more, of which there is none
    tree = twice_refused(recipe.as_texts(said))
    for name in STARTS:
        if name in tree:
            raise InputError(name, shown(tree[name]), f"is for a run: {instead}")

    def load(over: Mapping[str, Any]) -> Settings:
        settings = recipe.load_tree({**tree, **recipe.as_texts(dict(over))}, _machine(), [*ENGINES, LAYERWISE], plans_only=True)
        if settings.engine == LAYERWISE:
            raise InputError("engine", LAYERWISE, "is planned by python -m orchestrator.run", ["auto", *ENGINES])
        if settings.reads_texts:
            check_first_texts(settings.run)
        return settings

    return load


def twice_refused(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The keys as texts by full name. Raises InputError for a key in two spellings."""
    found: dict[str, Any] = {}
    for name, text in leaves(tree):
        put_once(found, name, text)
    return found


def plan(**keys: Any) -> Answer:
    """The fastest plan for these keys; with target.* that of the least GPUs, with largest= that of the most that fits; with plan=PATH a
    saved one, priced anew. Raises InputError for a key that can't be taken, NoPlanError where nothing fits."""
    load = loader(keys, "Answer.write(folder) writes, python -m orchestrator.run starts")
    return questions.answered(load, load({}), keys)[0]


def plan_rl(**keys: Any) -> RlAnswer:
    """The fastest placement of a step of reinforcement learning for these keys, rl.* among them. Raises InputError, NoPlanError.

    >>> found = plan_rl(recipe="qwen3_8b", gpus=8, cluster="dgx_h100", rl={
    ...     "prompts": 64, "samples": 8, "prompt_length": 200, "response_length": 800, "max_response_length": 4096})
    >>> found.step.colocated, found.step.gpus, found.plan.engine
    (False, 8, 'megatron')
    """
    settings = loader({"task": "rl", **keys}, "python -m orchestrator plan prints it whole with --json")({})
    if settings.reinforcement is None:
        raise InputError("task", shown(keys["task"]), "is planned by plan", ["rl"])
    return reinforcement.answered(settings)


def sweep(**keys: Any) -> Sweep:
    """A plan for every combination of the keys whose value is a list. Raises InputError.

    >>> found = sweep(recipe="gpt_tiny", cluster="cpu", gpus=[2, 4])
    >>> [point.keys["gpus"] for point in found.points], len(found.front) >= 1
    (['2', '4'], True)
    """
    lists = {name: [str(recipe.as_texts(value)) for value in values] for name, values in keys.items() if isinstance(values, list)}
    single = {name: value for name, value in keys.items() if name not in lists}
    if not lists:
        raise InputError("gpus", None, "no key has a list of values; give one two, as in gpus=[8, 16]")
    return all_points(loader(single, "Answer.write(folder) writes, python -m orchestrator.run starts"), lists)


def ds_config_for(model: Any, *, trainer: bool = False, **keys: Any) -> dict[str, Any]:
    """The ds_config of the fastest plan for a model that a script has already, for `deepspeed.initialize(config=)` or, with `trainer`,
    `TrainingArguments(deepspeed=)`, which then have its train_micro_batch_size_per_gpu and gradient_accumulation_steps as
    per_device_train_batch_size and gradient_accumulation_steps, and fill in the rest. Every rank that asks gets the same.

    model: a module of transformers, its configuration, a mapping, or a folder or config.json. keys: of a run, as `plan` takes them;
    train.global_batch_size and train.seq_length are needed. gpus: else WORLD_SIZE of the launcher, or what this machine has. The plan
    recomputes and freezes what the module does (`gradient_checkpointing_enable()`; parts of one that looks at images), and gives every rank
    data of its own, unless pin.* and train.freeze say otherwise.
    Raises InputError, and NoPlanError where nothing fits.

    >>> config = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 512, "n_positions": 128}
    >>> found = ds_config_for(config, gpus=4, cluster="cpu", train={"global_batch_size": 16, "seq_length": 128, "precision": "fp32"})
    >>> found["train_micro_batch_size_per_gpu"] * found["gradient_accumulation_steps"] * 4
    16
    """
    tree = twice_refused(recipe.as_texts(keys))
    for name in ("recipe", "plan", "engine", "model.hf_config"):
        if name in tree:
            raise InputError(name, shown(tree[name]), "is not for ds_config_for: the model is given, and the engine is DeepSpeed")
    if "gpus" not in tree and os.environ.get("WORLD_SIZE"):
        tree["gpus"] = os.environ["WORLD_SIZE"]
    pins = {**ALONE, "pin.recompute": recompute_of(model)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config_of(model)), encoding="utf-8")
        of = {"engine": DEEPSPEED, "model.hf_config": str(path), "name": "in_a_script", **frozen_of(model)}
        answer = plan(**{**pins, **of, **tree})
    return {**answer.ds_config(trainer=trainer), **{name: answer.ds_config()[name] for name in MICRO_BATCHES}}


def explain(answer: Answer, **pins: Any) -> str:
    """Why the plan does not have these choices, alone or together: the best plan that has them, and what it costs more, by cause.

    >>> explain(plan(recipe="gpt_tiny", gpus=4, cluster="cpu"), tp=3)  # doctest: +ELLIPSIS
    'Why not tp=3? ...'
    """
    if not pins:
        raise InputError("explain", None, "needs a choice, as in tp=8")
    asked = Pins(**group_of(flatten({"explain": recipe.as_texts(pins)}, ""), "explain"))
    settings, limit, pinned = answer.settings, answer.found.limit, answer.settings.pins.given()
    return "\n".join(
        explanation_text(answer.plan, one.question, one.plan, one.why, pinned, Planner(settings).chance_beside(limit, one.plan))
        for one in Planner(settings).explained(asked, limit)
    )


def audit(path: str | Path, **keys: Any) -> Audit:
    """Whether a configuration is any good: a script of Megatron-LM, a ds_config.json, YAML of accelerate, the Trainer, Megatron-Bridge or
    NeMo. Keys stand over what the file says. Raises InputError for a file that can't be read.

    >>> import tempfile
    >>> words = "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 512 --max-position-embeddings 512"
    >>> with tempfile.NamedTemporaryFile("w", suffix=".sh") as script:
    ...     _ = script.write(f"torchrun pretrain_gpt.py {words} --micro-batch-size 1 --global-batch-size 16 --bf16 --train-iters 9")
    ...     script.flush()
    ...     found = audit(script.name, gpus=8, cluster="dgx_h100")
    >>> found.legal, found.fits, found.changes[0].what
    (True, True, 'micro_batch_size 1 -> 2')
    """
    from orchestrator.audit.text import PrintedAudit

    return PrintedAudit.of(path, twice_refused(recipe.as_texts(keys)), _machine())


def compare(one: Answer | Plan | str | Path, other: Answer | Plan | str | Path) -> Comparison:
    """Two plans, cause by cause: answers, plans, or paths of plan.json or of a run's folder, whose measured steps stand beside. Raises
    InputError."""
    (first, chance), (second, others) = _plan_of(one), _plan_of(other)
    folders = [plan_file(given).parent if isinstance(given, str | Path) else None for given in (one, other)]
    first_run, second_run = (None if folder is None else measured_in(rows_of(folder / "metrics.jsonl")) for folder in folders)
    shares = (one.budget.goodput if isinstance(one, Answer) else None, other.budget.goodput if isinstance(other, Answer) else None)
    return compared(first, second, (chance, others), (first_run, second_run), shares)


def _plan_of(given: Answer | Plan | str | Path) -> tuple[Plan, float | None]:
    """The plan that is given, with its chance of running out of memory, where that is known."""
    if isinstance(given, Plan):
        if given.predicted is not None:
            return given, None
        raise InputError("plan", to_json(given)[:20], "has no prediction")
    answer = given if isinstance(given, Answer) else plan(plan=str(plan_file(given)))
    return answer.plan, None if answer.plan.cluster.is_cpu else answer.chance_of_not_fitting


def plan_file(path: str | Path) -> Path:
    """A run's folder stands for its plan.json."""
    return Path(path) / "plan.json" if Path(path).is_dir() else Path(path)


def config_of(model: Any) -> dict[str, Any]:
    """A model's configuration as config.json has it: of a module of transformers, of its configuration, of a mapping, or of a folder or
    config.json. Raises InputError for anything else.

    >>> config_of({"model_type": "gpt2"})
    {'model_type': 'gpt2'}
    """
    if isinstance(model, str | Path):
        path = Path(model) / "config.json" if Path(model).is_dir() else Path(model)
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputError("model", path, f"can't be read: {getattr(error, 'strerror', None) or 'is no JSON'}") from None
        if not isinstance(found, dict):
            raise InputError("model", path, "is no configuration")
        return found
    config = model if isinstance(model, Mapping) else getattr(model, "config", model)
    if isinstance(config, Mapping):
        return dict(config)
    to_dict = getattr(config, "to_dict", None)
    if not callable(to_dict):
        why = "has no configuration of transformers; python -m orchestrator.describe makes a file of it, for model.description="
        raise InputError("model", type(model).__name__, why)
    written: dict[str, Any] = json.loads(json.dumps(to_dict(), default=str))
    return written


def frozen_of(model: Any) -> dict[str, str]:
    """The key train.freeze, of parts of a module that looks at images in which nothing is trained now (`requires_grad_(False)`); {} where
    there are none."""
    config = {} if not hasattr(model, "named_parameters") else config_of(model)
    if "vision_config" not in config or not has_reader(config):
        return {}
    trained = {part_of_weight(name) for name, parameter in model.named_parameters() if parameter.requires_grad}
    frozen = [part for part in SEEING if part not in trained]
    return {"train.freeze": ",".join(frozen)} if frozen and trained else {}


def recompute_of(model: Any) -> str:
    """Whether a module recomputes its layers now (`gradient_checkpointing_enable()`), as pin.recompute has it."""
    name = next((one for one in ("is_activation_checkpointing", "is_gradient_checkpointing") if hasattr(type(model), one)), "")
    return "full" if name and getattr(model, name) is True else "none"
