"""How a rule of an engine's is written down, and what most of them ask."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache, wraps
from operator import attrgetter
from typing import Final

from msgspec.structs import replace

from orchestrator.engines.hf_config import takes_flash_attention
from orchestrator.engines.megatron_versions import flex_backend, release_of
from orchestrator.model.parts.experts import Experts
from orchestrator.model.spec import Architecture
from orchestrator.model.training import EIGHT_BIT, Training
from orchestrator.strategy.capabilities import Rule
from orchestrator.strategy.spec import CHOICES, ENGINE_OPTIONS, RECOMPUTE_MODULES, Candidate
from orchestrator.strategy.workload import Workload
from orchestrator.values import Value

Check = Callable[[Candidate, Workload], str | None]
Fact = Callable[[Candidate, Workload], bool]
NO_BALANCE: Final = "model.aux_loss_coeff=0"
"""How a user says that no loss balances experts; those who typed nothing have the model's own."""
FACTS: Final[Mapping[str, Fact]] = {
    "te": lambda _, workload: workload.cluster.software.transformer_engine and not workload.cluster.is_cpu,
    "cpu": lambda _, workload: workload.cluster.is_cpu,
    "grouped": lambda _, given: given.model.architecture.query_groups != given.model.architecture.num_attention_heads,
    "mixed": lambda _, workload: len({layer.mixer for layer in workload.model.architecture.kinds_of_layers()}) > 1,
    "decoder": lambda _, workload: workload.model.architecture.stack == "decoder",
    "flash": lambda _, workload: takes_flash_attention(workload.cluster, workload.training),
    "eight_bit": lambda _, workload: workload.training.optimizer in EIGHT_BIT,
    "frozen_language": lambda _, workload: "language" in workload.training.freeze,
    "summed_otherwise": lambda _, workload: workload.training.grad_accum_dtype != workload.training.precision,
    "summed_and_reduced_otherwise": lambda _, workload: workload.training.grad_accum_dtype != workload.training.grad_reduce_dtype,
    "experts_alone": lambda _, workload: all(
        isinstance(layer.feed_forward, Experts) for layer in workload.model.architecture.kinds_of_layers()
    ),
    "one_expert_a_rank": lambda it, given: any(part.num_experts == it.mesh.ep for part in given.model.architecture.experts),
    "etp_beside_tp": lambda candidate, _: candidate.mesh.etp != candidate.mesh.tp,
    "has_mxfp8": lambda _, workload: workload.cluster.gpu.has_mxfp8,
    "hybridep": lambda _, workload: flex_backend(workload.cluster.gpu) == "hybridep",
}
"""What rules are about that follows from several fields, by the word for it."""
CHOSEN: Final = {choice.name: choice for choice in CHOICES}


@cache
def fact(where: str) -> Fact:
    """Whether all of these words hold; none always does. tp: the choice is not at its default, or the switch is on. lora: the training or
    the model has a value in this field, or in a field of it (lora.bits). zero_stage=3, optimizer=sgd: that is its value. recompute.mlp: the
    module is computed again. release.divides_muon: the planned release of Megatron has it. mamba2: the model has the part (in the words of
    `Architecture.features`). te, cpu: as FACTS say. With ! before a word: it does not hold."""
    word, _, others = where.partition(" ")
    if others:
        one, rest = fact(word), fact(others)
        return lambda candidate, workload: one(candidate, workload) and rest(candidate, workload)
    if word.startswith("!"):
        other = fact(word[1:])
        return lambda candidate, workload: not other(candidate, workload)
    name, _, said = word.partition("=")
    first, _, inner = name.partition(".")
    if name in CHOSEN:
        of_candidate, default = attrgetter(CHOSEN[name].path), CHOSEN[name].default
        off = False if default is True else default
        return lambda candidate, _: str(of_candidate(candidate)) == said if said else of_candidate(candidate) != off
    if first == "recompute":
        return lambda candidate, _: inner in RECOMPUTE_MODULES.get(candidate.strategy.recompute, ())
    if first == "release":
        return lambda _, workload: bool(getattr(release_of(workload.cluster.software.megatron_core), inner))
    if first in Training.__struct_fields__ or first in Architecture.__struct_fields__:
        of_workload = attrgetter(f"training.{name}" if first in Training.__struct_fields__ else f"model.architecture.{name}")
        return lambda _, workload: str(of_workload(workload)) == said if said else bool(of_workload(workload))
    return FACTS.get(name) or (lambda _, workload: not name or name in workload.model.architecture.features())


class Refusal(Value, frozen=True):
    """The check of a rule that refuses what has the facts `where` and those of one of its cases, each with the reason: in it {mesh.tp} is a
    field of the mesh, and so on for candidate, strategy, training, lora, software, gpu, release and the model's architecture {a}."""

    where: str
    cases: tuple[tuple[str, str], ...]

    def __call__(self, candidate: Candidate, workload: Workload) -> str | None:
        """The first reason; None: there is none."""
        if not fact(self.where)(candidate, workload):
            return None
        for also, why in self.cases:
            if fact(also)(candidate, workload):
                training, software = workload.training, workload.cluster.software
                release = release_of(software.megatron_core) if "{release." in why else None
                named = {"training": training, "lora": training.lora, "software": software, "gpu": workload.cluster.gpu, "release": release}
                chosen = {"candidate": candidate, "strategy": candidate.strategy, "mesh": candidate.mesh}
                return why.format(**chosen, **named, a=workload.model.architecture)
        return None


def refused(id: str, engine_rule: str, needs: str, where: str, *cases: tuple[str, str] | str) -> Rule:
    """The rule that forbids the facts `where` together, or with those of one of `cases`, as `rule` and `Refusal` say."""
    words = [word for word in where.split() if (name := word.removeprefix("!")) in ENGINE_OPTIONS]
    option = next((name for word in words if (CHOSEN[name := word.removeprefix("!")].default is True) == (word != name)), "")
    check = Refusal(where, tuple(("", case) if isinstance(case, str) else case for case in cases))
    return Rule(id=id, engine_rule=engine_rule, check=check, needs=tuple(needs.split()), only_with=option)


def rule(id: str, engine_rule: str, needs: str, where: str = "") -> Callable[[Check], Rule]:
    """Makes a rule of the check below it. `engine_rule`: the engine's own, by its id in the tables of facts, file and line. `needs`: what
    the check reads, words in the decision tree's order, so that the tree can cut as soon as that much is fixed; "model" is what is given:
    model, training and cluster; `where`: facts without any of which it forbids nothing, so that the check is not asked."""

    def made(check: Check) -> Rule:
        @wraps(check)
        def asked(candidate: Candidate, workload: Workload) -> str | None:
            return check(candidate, workload) if fact(where)(candidate, workload) else None

        return replace(refused(id, engine_rule, needs, where), check=asked if where else check)

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
