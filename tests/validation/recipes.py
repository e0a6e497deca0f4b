"""Published recipes without times: is each legal for Megatron, does it fit, how near does it come to our best plan?

A recipe is a row of a table with the columns of expert_recipes_bridge.csv: a model's name, GPUs, precision and every degree. It is judged
as it is written. What a plan has no word for (CUDA graphs of whole iterations) is taken to be the same in our best plan, and NVFP4 is taken
for MXFP8. A recipe that does not force its routers to be even, and our best plan with it, are priced with uneven ones (uneven.py). Where
the recipe has the experts' exchange beside another micro-batch, our best plan is the better one of those with and without. A model with
vision has its tower, and one image in a sample, on the first stage (mixtures.py).
"""

from __future__ import annotations

import csv
import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple, get_args

from msgspec.structs import replace

from orchestrator.audit.megatron_yaml import frozen_by
from orchestrator.calibrate.pricing import Choose
from orchestrator.cost.price import CostModel
from orchestrator.engines import ENGINES
from orchestrator.errors import InputError, OrchestratorError
from orchestrator.hardware.spec import Software
from orchestrator.model.families import describe
from orchestrator.model.training import Fp8Recipe
from orchestrator.search.planner import search
from orchestrator.search.question import PlannedEngine, SearchSettings
from orchestrator.strategy.layout import Prediction
from orchestrator.strategy.legality import broken_rule
from orchestrator.strategy.pins import Pins
from orchestrator.strategy.spec import Candidate
from tests.validation.mixtures import with_shape
from tests.validation.recovery import CLOSE, ENGINE, megatron_capabilities, planned_engine, question_of
from tests.validation.rows import SkipError
from tests.validation.runs import Run
from tests.validation.tables import as_printed, read_row, with_states

COLUMNS: Final = ("recipe_id", "model", "gpu", "num_gpus", "precision", "tp", "pp", "micro_batch_size", "global_batch_size")
SOFTWARE: Final = Software(megatron_core="0.19.2")
"""What the recipes were written for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Judged:
    """One recipe. `why`: the rule that it breaks, or why it is not judged; `ratio`: its predicted seconds over our best plan's."""

    recipe: str
    experts: bool
    judged: bool
    legal: bool
    why: str
    peak_gib: float = 0.0
    fits: bool = False
    ratio: float | None = None
    best: str = ""
    slower: float | None = None
    """The share by which a published run that is divided as the recipe took longer than one that is divided as our best plan; None: one of
    both is missing, or they are divided alike."""
    sees: bool = False
    """Whether the recipe trains a vision tower too."""
    copy_of: str = ""
    """The recipe for fewer GPUs that it repeats on more copies of the model."""

    @property
    def close(self) -> bool:
        """Whether it is within 5% of our best plan, or published runs agree that our best's division is the faster one."""
        return self.ratio is not None and (self.ratio <= CLOSE or (self.slower is not None and self.slower > 0))


def read(path: str) -> list[dict[str, str]]:
    """The table's rows. Raises InputError where it is no table of recipes."""
    try:
        with Path(path).open(newline="", encoding="utf-8") as stream:
            rows = [{key: value or "" for key, value in row.items() if key is not None} for row in csv.DictReader(stream)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError("recipes", path, f"can't be read: {error}") from None
    lacking = [name for name in COLUMNS if not rows or name not in rows[0]]
    if lacking:
        raise InputError("recipes", path, f"is not a table of recipes: it lacks {', '.join(lacking)}")
    return rows


SPLIT: Final = "pipeline_split (core/transformer/transformer_block.py:151 and 170, core_v0.19.0)"


def layout_of(recipe: dict[str, str]) -> tuple[str, str]:
    """(Megatron's layout of a recipe that says how many layers its first or last stage has, why Megatron refuses its split), each empty
    where there is nothing to say: a recipe without layout has as many layers on every other stage, and in every chunk of a stage.

    >>> recipe = {"model": "qwen35_vl_35b_a3b", "pp": "2", "layers_first_stage": "17", "layers_last_stage": "23"}
    >>> layout_of(recipe)[0] == "E" + 17 * "t" + "|" + 23 * "t" + "L"
    True
    >>> layout_of({"model": "qwen35_vl_397b_a17b", "pp": "8", "vpp": "4"})[1].partition(": ")[2]
    'its 60 layers are not as many on each of 8 stages, and it gives no layout'
    """
    text = with_shape({**recipe, "model_name": recipe["model"]}).get("num_layers", "")
    pp, vpp = int(recipe["pp"]), int(recipe.get("vpp") or 1)
    if not text or pp == 1 or recipe.get("pipeline_layout"):
        return "", ""
    first, last = (int(recipe.get(name) or 0) for name in ("layers_first_stage", "layers_last_stage"))
    others, left = pp - bool(first) - bool(last), int(text) - first - last
    if others and left % others:
        return "", f"{SPLIT}: its {left} layers are not as many on each of {others} stages, and it gives no layout"
    middle = [left // others] * others if others else []
    stages = [*([first] if first else []), *middle, *([last] if last else [])]
    uneven = next((count for count in stages if count % vpp), None)
    if uneven is not None:
        return "", f"{SPLIT}: the {uneven} layers of a stage are not as many in each of its {vpp} chunks, and it gives no layout"
    if not first and not last:
        return "", ""
    chunks = "|".join("t" * (count // vpp) for _ in range(vpp) for count in stages)
    return f"E{chunks}L", ""


def run_of(recipe: dict[str, str]) -> Run:
    """The recipe as a run that nobody measured. Raises SkipError with the reason."""
    task = recipe.get("task") or "pretrain"
    if task not in ("pretrain", "sft"):
        raise SkipError(f"task {task} is not planned")
    split, illegal = layout_of(recipe)
    whole = "full_iteration" in (recipe.get("cuda_graph"), recipe.get("cuda_graph_scope"))
    row = {
        **recipe,
        **as_printed(recipe),
        "cuda_graph": f"{recipe.get('cuda_graph', '')}: {recipe.get('cuda_graph_scope', '')}",
        "pipeline_layout": recipe.get("pipeline_layout") or split,
        # What a rank's experts compute then is of one size, which the table does not say: even routing fills it.
        "rank_capacity": "1" if whole and recipe.get("dispatcher") == "flex" else "",
        "run_id": recipe["recipe_id"],
        "model_name": recipe["model"],
        "status": "ok",
        "engine": "megatron-fsdp" if recipe.get("fsdp") == "1" else "bridge",
        "precision": recipe["precision"].upper().replace("NVFP4", "MXFP8"),
        "sequence_parallel": "yes" if recipe.get("sequence_parallel") == "1" else "no",
        "zero_stage": "",
        "task": "",
        "gpus_per_node": "4" if recipe["gpu"].startswith(("GB", "VR")) else "8",
        "notes": "",
        "dp": "",
    }
    run = read_row("recipes", row, measured=False)
    training = with_states(run.training, recipe.get("optimizer_state_dtypes", ""))
    scaling = recipe.get("fp8_recipe", "")
    if training.precision == "fp8" and scaling in get_args(Fp8Recipe):
        training = replace(training, fp8_recipe=scaling)
    model = run.model
    if parts := frozen_by([f"{recipe['recipe_id']}_config"])[1]:  # a part is frozen before the tower becomes one of the embedding's
        training = replace(training, freeze=parts)
        model = describe(model.architecture, model.seq_length, images=model.images)
    cluster = replace(run.cluster, num_gpus=run.num_gpus, software=SOFTWARE)
    off = {name: False for name in ("overlap_grad_reduce", "overlap_param_gather") if recipe.get(name) == "0"}
    in_fp8 = recipe.get("fp8_param_gather") == "1" and training.precision == "fp8"
    candidate = replace(run.candidate, strategy=replace(run.candidate.strategy, fp8_param_gather=in_fp8, **off))
    return dataclasses.replace(run, model=model, training=training, cluster=cluster, candidate=candidate, illegal=illegal)


class Asked(NamedTuple):
    """A recipe as a question for the planner: the run, what was chosen in it, the rule that it breaks (or nothing), its price, and Megatron
    as our best plan has it, with the same traits and constants."""

    run: Run
    candidate: Candidate
    illegal: str
    price: Prediction
    engine: PlannedEngine

    @property
    def dispatched(self) -> Pins:
        """What a plan has in common with the recipe: its dispatcher."""
        return Pins(moe_token_dispatcher_type=self.candidate.strategy.moe_token_dispatcher_type)


def asked(recipe: dict[str, str], choose: Choose[Run]) -> Asked:
    """The recipe priced by the traits and constants of Bridge's runs: those of its own CUDA graphs and of its Transformer Engine without
    user buffers (`tp_comm_overlap` 0), for our best plan too, since layouts are compared. Raises SkipError with the reason."""
    run = run_of(recipe)
    capabilities = megatron_capabilities(ENGINES[ENGINE].capabilities(run.workload.cluster.software))
    candidate = replace(run.candidate, engine=ENGINE)
    if candidate.strategy.zero_stage == 3:
        candidate = replace(candidate, strategy=replace(candidate.strategy, megatron_fsdp=True))
    broken = broken_rule(capabilities, candidate, run.workload)
    constants = run.experts.constants(choose(run)) if run.kind == "moe" else choose(run)
    if recipe.get("tp_comm_overlap") == "0":
        constants = replace(constants, tp_overlap=0.0)
    traits = replace(run.engine.traits, tower_first=True)
    price = CostModel(run.workload, traits, constants).price(candidate, run.stages)
    rule = run.illegal or ("" if broken is None else f"{broken[0].id} ({broken[0].engine_rule}): {broken[1]}")
    return Asked(run, candidate, rule, price, planned_engine(run.workload, capabilities, traits, constants))


class Best(NamedTuple):
    """Our best plan: seconds and what it is; None with the reason as its label."""

    seconds: float | None
    label: str
    candidate: Candidate | None


def division(candidate: Candidate) -> object:
    """What a user would call another plan: degrees, chunks, micro-batch."""
    return candidate.mesh, candidate.vpp, candidate.micro_batch_size


def fastest(runs: Sequence[Run], of: Run, candidate: Candidate) -> float | None:
    """Seconds of the fastest published run that trains the same on the same GPUs and is divided as this choice is; None: there is none."""
    seconds = [
        run.time_s
        for run in runs
        if run.time_s is not None
        and run.kind == "moe"
        and run.engine.name == of.engine.name
        and question_of(run) == question_of(of)
        and division(run.candidate) == division(candidate)
    ]
    return min(seconds, default=None)


REPEATED: Final = (
    *("model", "task", "gpu", "precision", "seq_length", "tp", "pp", "vpp", "cp", "ep", "etp", "micro_batch_size", "recompute_effective"),
    *("dispatcher", "flex_backend", "a2a_overlap", "fsdp"),
)
"""What a recipe has in common with the one that it repeats on more GPUs."""


def copied_from(recipe: dict[str, str], rows: Sequence[dict[str, str]]) -> str:
    """The recipe for the fewest GPUs that differs from this one in the number of GPUs alone; nothing: there is none."""
    alike = [row for row in rows if all(row.get(name, "") == recipe.get(name, "") for name in REPEATED)]
    least = min(alike, key=lambda row: int(row["num_gpus"]), default=recipe)
    return least["recipe_id"] if int(least["num_gpus"]) < int(recipe["num_gpus"]) else ""


class Judge:
    """Keeps the best plan of every workload that it has planned. `published`: runs that may show which of two divisions is faster."""

    def __init__(self, choose: Choose[Run], published: Sequence[Run] = ()) -> None:
        self._choose = choose
        self._published = published
        self._best: dict[object, Best] = {}

    def judge(self, recipe: dict[str, str]) -> Judged:
        """The judgement of one recipe, priced by the traits and constants of Bridge's runs, recipe and best plan alike."""
        experts = bool(recipe.get("ep")) and bool(recipe.get("etp"))
        try:
            question = asked(recipe, self._choose)
        except SkipError as skip:
            return Judged(recipe=recipe["recipe_id"], experts=experts, judged=False, legal=False, why=f"{recipe['model']}: {skip}")
        run, candidate, price = question.run, question.candidate, question.price
        peak = price.peak_memory_bytes
        layers = run.model.architecture.num_layers
        offloaded = min(layers, int(recipe.get("cpu_offload_layers") or 0))
        if offloaded:  # the activations of so many layers are on the host
            kept = max(stage.memory_by_cause["activations"] for stage in price.by_stage)
            peak -= offloaded / layers * kept * (1 + question.engine.calibration.allocator_slack)
        best = self._best_of(question)
        slower = None
        if best.candidate is not None and division(best.candidate) != division(candidate):
            theirs, ours = (fastest(self._published, run, one) for one in (candidate, best.candidate))
            slower = None if theirs is None or ours is None else theirs / ours - 1
        return Judged(
            recipe=recipe["recipe_id"],
            experts=experts,
            judged=True,
            legal=not question.illegal,
            why=question.illegal,
            peak_gib=peak / 2**30,
            fits=peak <= run.cluster.gpu.memory,
            ratio=None if best.seconds is None else price.step_time_s / best.seconds,
            best=best.label,
            slower=slower,
            sees=run.model.architecture.vision is not None,
        )

    def _best_of(self, question: Asked) -> Best:
        """The fastest plan with the recipe's dispatcher."""
        strategy, pins = question.candidate.strategy, [question.dispatched]
        if strategy.overlap_moe_expert_parallel_comm:
            pins.append(replace(pins[0], overlap_moe_expert_parallel_comm=True, delay_wgrad_compute=strategy.delay_wgrad_compute))
        found = [self._planned(question, one) for one in pins]
        return min((one for one in found if one.seconds is not None), default=found[0], key=lambda one: one.seconds or 0.0)

    def _planned(self, question: Asked, pins: Pins) -> Best:
        run, engine = question.run, question.engine
        key = (run.workload, run.engine.name, pins, engine.calibration)
        if key not in self._best:
            try:
                found = search(run.workload, [engine], SearchSettings(top_k=1, pins=pins))
            except OrchestratorError as error:
                self._best[key] = Best(None, f"no plan: {error}", None)
            else:
                chosen = found.plan.candidate
                self._best[key] = Best(found.plan.prediction.step_time_s, chosen.label(), chosen)
        return self._best[key]


def share(of: Sequence[Judged], holds: Callable[[Judged], bool]) -> float | None:
    """The share of these recipes for which `holds` is true; None: there are none."""
    return sum(map(holds, of)) / len(of) if of else None


def figures(found: Sequence[Judged]) -> dict[str, float | int | dict[str, int] | None]:
    """`recipes` of the report: shares of those that are judged."""
    judged = [one for one in found if one.judged]
    ratios = sorted(one.ratio for one in judged if one.ratio is not None)
    of_experts = [one for one in judged if one.ratio is not None and one.experts]
    own = [one for one in of_experts if not one.copy_of]
    return {
        "recipes": len(found),
        "judged": len(judged),
        "of_experts": sum(one.experts for one in judged),
        "with_vision": sum(one.sees for one in judged),
        "legal": sum(one.legal for one in judged) / len(judged) if judged else None,
        "fits": sum(one.fits for one in judged) / len(judged) if judged else None,
        "within_5": sum(ratio <= CLOSE for ratio in ratios) / len(ratios) if ratios else None,
        "experts_within_5": share(of_experts, lambda one: one.ratio is not None and one.ratio <= CLOSE),
        "experts_within_5_or_shown_slower": share(of_experts, lambda one: one.close),
        "experts_copied": len(of_experts) - len(own),
        "experts_not_copied_within_5_or_shown_slower": share(own, lambda one: one.close),
        "median_ratio": ratios[len(ratios) // 2] if ratios else None,
        "not_judged": dict(Counter(one.why for one in found if not one.judged)),
    }
