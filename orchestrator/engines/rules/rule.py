"""How a rule of an engine's is written down, and what most of them ask."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial, wraps
from operator import attrgetter
from typing import Final

from msgspec.structs import replace

from orchestrator.model.training import EIGHT_BIT
from orchestrator.strategy.capabilities import Rule
from orchestrator.strategy.spec import CHOICES, ENGINE_OPTIONS, RECOMPUTE_MODULES, Candidate
from orchestrator.strategy.workload import Workload
from orchestrator.values import Value

Check = Callable[[Candidate, Workload], str | None]
Fact = Callable[[Candidate, Workload], bool]
NO_BALANCE: Final = "model.aux_loss_coeff=0"
"""How a user says that no loss balances experts; those who typed nothing have the model's own."""


def _is_chosen(value: Callable[[Candidate], object], default: object, candidate: Candidate, _: Workload) -> bool:
    return value(candidate) != default


def _recomputes(module: str, candidate: Candidate, _: Workload) -> bool:
    return module in RECOMPUTE_MODULES.get(candidate.strategy.recompute, ())


def _has_part(part: str, _: Candidate, workload: Workload) -> bool:
    return part in workload.model.architecture.features()


FACTS: Final[Mapping[str, Fact]] = {
    **{choice.name: partial(_is_chosen, attrgetter(choice.path), choice.default) for choice in CHOICES},
    "te": lambda _, workload: workload.cluster.software.transformer_engine and not workload.cluster.is_cpu,
    "cpu": lambda _, workload: workload.cluster.is_cpu,
    "lora": lambda _, workload: workload.training.lora is not None,
    "lora.bits": lambda _, workload: workload.training.lora is not None and workload.training.lora.bits is not None,
    "packing": lambda _, workload: bool(workload.training.packing),
    "sgd": lambda _, workload: workload.training.optimizer == "sgd",
    "eight_bit": lambda _, workload: workload.training.optimizer in EIGHT_BIT,
    "fp16": lambda _, workload: workload.training.precision == "fp16",
    "decoder": lambda _, workload: workload.model.architecture.stack == "decoder",
    "rope": lambda _, workload: workload.model.architecture.position_embedding == "rope",
    "biases": lambda _, workload: workload.model.architecture.add_bias_linear,
    "tied": lambda _, workload: workload.model.architecture.tie_embeddings,
    "traced": lambda _, workload: workload.model.architecture.traced is not None,
}
"""What rules are about, by name: a choice that is not at its default, and what stands here."""


@cache
def fact(where: str) -> Fact:
    """Whether all of these hold: names of FACTS, "recompute.mlp" for a module that is computed again, parts of a model (in the words of
    `Architecture.features`); with ! before a name, that it does not."""
    name, _, others = where.partition(" ")
    if others:
        one, rest = fact(name), fact(others)
        return lambda candidate, workload: one(candidate, workload) and rest(candidate, workload)
    if name.startswith("!"):
        other = fact(name[1:])
        return lambda candidate, workload: not other(candidate, workload)
    again = name.removeprefix("recompute.")
    return FACTS.get(name) or (partial(_recomputes, again) if again != name else partial(_has_part, name))


class Refusal(Value, frozen=True):
    """The check of a rule that forbids these facts together. `why`: the reason, in which {mesh.tp} is a field of the candidate's mesh, and
    so on: of its strategy, of the training, of its lora, of the model's architecture, {a}."""

    where: str
    why: str

    def __call__(self, candidate: Candidate, workload: Workload) -> str | None:
        """The reason where the facts hold, else None."""
        if not fact(self.where)(candidate, workload):
            return None
        training = {"training": workload.training, "lora": workload.training.lora, "a": workload.model.architecture}
        return self.why.format(mesh=candidate.mesh, strategy=candidate.strategy, vpp=candidate.vpp, **training)


def refused(id: str, engine_rule: str, needs: str, where: str, why: str) -> Rule:
    """The rule that forbids the facts `where` together, as `rule` and `Refusal` say."""
    option = next((name for name in where.split() if name in ENGINE_OPTIONS), "")
    return Rule(id=id, engine_rule=engine_rule, check=Refusal(where, why), needs=tuple(needs.split()), only_with=option)


def rule(id: str, engine_rule: str, needs: str, where: str = "") -> Callable[[Check], Rule]:
    """Makes a rule of the check below it. `engine_rule`: the engine's own, by its id in the tables of facts, file and line. `needs`: what
    the check reads, words in the decision tree's order, so that the tree can cut as soon as that much is fixed; "model" is what is given:
    model, training and cluster; `where`: facts without any of which it forbids nothing, so that the check is not asked."""

    def made(check: Check) -> Rule:
        @wraps(check)
        def asked(candidate: Candidate, workload: Workload) -> str | None:
            return check(candidate, workload) if fact(where)(candidate, workload) else None

        return replace(refused(id, engine_rule, needs, where, ""), check=asked if where else check)

    return made


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


MEGATRON_SOURCES: Final = {
    "precision_here": "DeepSpeed runtime/engine.py:2000 (fp16, bf16 on the device)",
    "axis_ep": "ep_basic: megatron/training/arguments.py:1025",
    "axis_etp": "ep_basic: megatron/training/arguments.py:1025",
    "mesh": "world_div: core/parallel_state.py:741, 744",
    "data_parallel": "gbs_div: core/num_microbatches_calculator.py:340",
    "batch": "gbs_div: core/num_microbatches_calculator.py:340; DeepSpeed's triangle: runtime/config.py:456-475",
    "sequence_parallel": "sp_needs_tp: core/model_parallel_config.py:409",
    "chunks": "vpp_needs_pp: core/parallel_state.py:746; ours: an empty stage (pp_layout allows it) only waits",
    "rank_order": "rank_order: core/parallel_state.py:808-816",
}
"""The engine's own rules that say what a field of `Capabilities` says, of every engine on megatron-core's layers (its `sources`)."""
DEEPSPEED_SOURCES: Final = {
    "grad_dtype": "data_types and communication_data_type: deepspeed/runtime/engine.py:1719,1799",
    "optimizer_dtypes": "pao: core/optimizer/optimizer_config.py:375-420 is Megatron's, deepspeed/runtime/engine.py has others",
    "options": "ours: Megatron's options, never tried under deepspeed/runtime/engine.py",
    "zero_stage": "stage_range: deepspeed/runtime/zero/config.py:81",
}
"""DeepSpeed's own rules that say what a field of `Capabilities` says, of both engines with its ZeRO."""
