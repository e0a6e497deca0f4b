"""How a rule of an engine's is written down, and what most of them ask."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache, wraps
from math import prod
from operator import attrgetter
from typing import Any, Final

from msgspec.structs import replace

from orchestrator.engines.hf_config import class_of, takes_flash_attention
from orchestrator.engines.megatron_parts import delta_nets, mixers
from orchestrator.engines.megatron_versions import flex_backend, release_of
from orchestrator.hardware.spec import Cluster
from orchestrator.model.parts.experts import Experts
from orchestrator.model.parts.mamba2 import Mamba2
from orchestrator.model.spec import Architecture, ModelSpec
from orchestrator.model.training import EIGHT_BIT, Training
from orchestrator.strategy.capabilities import Rule
from orchestrator.strategy.graphs import graphed_modules
from orchestrator.strategy.spec import CHOICES, ENGINE_OPTIONS, RECOMPUTE_MODULES, Candidate, Mesh
from orchestrator.strategy.workload import Workload
from orchestrator.values import Value

Check = Callable[[Candidate, Workload], str | None]
Fact = Callable[[Candidate, Workload], bool]
NEVER_TRIED: Final = "ours: nobody has tried it"
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
    "experts_vary": lambda _, given: any(
        not part.pad_to_capacity and part.rank_capacity_factor is None for part in given.model.architecture.experts
    ),
    "one_expert_a_rank": lambda it, given: any(part.num_experts == it.mesh.ep for part in given.model.architecture.experts),
    "etp_beside_tp": lambda candidate, _: candidate.mesh.etp != candidate.mesh.tp,
    "two_lengths": lambda _, given: given.model.decoder_seq_length not in (None, given.model.seq_length),
    "tp_beyond_inner": lambda candidate, workload: candidate.mesh.tp > workload.cluster.levels[0].size,
    "hybridep": lambda _, workload: flex_backend(workload.cluster.gpu) == "hybridep",
}
"""What rules are about that follows from several fields, by the word for it."""
NAMED: Final[Mapping[str, Callable[[str, Candidate, Workload], bool]]] = {
    "recompute": lambda module, it, _: module in RECOMPUTE_MODULES.get(it.strategy.recompute, ()),
    "offloads": lambda module, it, _: module in (it.strategy.offload_modules or "").split("+"),
    "graphed": lambda module, it, given: any(module in ("", held) for held in graphed_modules(it.strategy, given.model.architecture)),
    "release": lambda field, _, given: bool(getattr(release_of(given.cluster.software.megatron_core), field)),
    "hf": lambda names, _, given: class_of(given.model.architecture).model in names.split("|"),
    "older": lambda than, _, given: float(given.cluster.gpu.compute_capability) < float(than),
}
"""Facts of what a word names behind its dot or its =: recompute.mlp, hf=GPT2LMHeadModel."""
CHOSEN: Final = {choice.name: choice for choice in CHOICES}


@cache
def fact(where: str) -> Fact:
    """Whether all of these words hold; none always does. tp: the choice is not at its default, or the switch is on. lora: the training or
    the model has a value in this field, or in a field of it (lora.bits). zero_stage=3, optimizer=sgd|muon: that is its value, or one of
    these. recompute.mlp: the module is computed again. offloads.attn_proj: what it keeps goes to the host. graphed.attn: CUDA graphs hold
    it; graphed: any module. release.divides_muon: the planned release of Megatron has it. software.apex: the cluster's has it.
    experts.score=sigmoid: some of the model's experts have. hf=GPT2LMHeadModel: transformers' class of the model. older=7.5: the GPU's
    compute capability is less. mamba2: the model has the part (in the words of `Architecture.features`). te, cpu: as FACTS say. With !
    before a word: it does not hold."""
    word, _, others = where.partition(" ")
    if others:
        one, rest = fact(word), fact(others)
        return lambda candidate, workload: one(candidate, workload) and rest(candidate, workload)
    if word.startswith("!"):
        other = fact(word[1:])
        return lambda candidate, workload: not other(candidate, workload)
    name, _, text = word.partition("=")
    said = text.split("|") if text else []
    first, _, inner = name.partition(".")
    if name in CHOSEN:
        of_candidate, default = attrgetter(CHOSEN[name].path), CHOSEN[name].default
        off = False if default is True else default
        return lambda candidate, _: str(of_candidate(candidate)) in said if said else of_candidate(candidate) != off
    if first in NAMED:
        return lambda candidate, workload: NAMED[first](inner or text, candidate, workload)
    if first == "experts" and inner:
        experts_have = attrgetter(inner)
        return lambda _, workload: any(
            str(experts_have(part)) in said if said else bool(experts_have(part)) for part in workload.model.architecture.experts
        )
    if name in FACTS:
        return FACTS[name]
    structs = {"training": Training, "model.architecture": Architecture, "cluster": Cluster}
    if (place := next((path for path, struct in structs.items() if first in struct.__struct_fields__), None)) is not None:
        of_workload = attrgetter(f"{place}.{name}")
        return lambda _, workload: str(of_workload(workload)) in said if said else bool(of_workload(workload))
    return lambda _, workload: not name or name in workload.model.architecture.features()


NUMBERS: Final[Mapping[str, Callable[[ModelSpec], Iterable[int]]]] = {
    "seq_length": lambda model: [model.seq_length],
    "decoder_seq_length": lambda model: [model.decoder_seq_length] if model.decoder_seq_length else [],
    "num_query_groups": lambda model: [model.architecture.query_groups],
    "(num_attention_heads + 2*num_query_groups)*kv_channels": lambda model: [
        (model.architecture.num_attention_heads + 2 * model.architecture.query_groups) * model.architecture.head_dim
    ],
    "num_experts": lambda model: sorted(part.num_experts for part in model.architecture.experts),
    "the experts' ffn_hidden_size": lambda model: [part.ffn_hidden_size for part in model.architecture.experts],
    "the tower's num_attention_heads": lambda model: [tower.num_attention_heads] if (tower := model.architecture.vision) else [],
    "the tower's ffn_hidden_size": lambda model: [tower.ffn_hidden_size] if (tower := model.architecture.vision) else [],
    "mamba2.num_groups": lambda model: [mixer.num_groups for mixer in mixers(Mamba2, model.architecture.kinds_of_layers())],
    "gated_delta_net.num_key_heads": lambda model: [mixer.num_key_heads for mixer in delta_nets(model.architecture)],
}
"""What a model has one or several of, by the words for it; other numbers are fields of the mesh or of the architecture."""
SEQUENCES: Final = ("seq_length", "decoder_seq_length")
"""Tokens of each sequence of a sample, by the keys that set them."""


@cache
def numbers(words: str) -> Callable[[Candidate, Workload], Iterable[int]]:
    """What these words count: one of NUMBERS, or a product of fields and whole numbers (2*cp)."""

    def factor(word: str, candidate: Candidate, workload: Workload) -> int:
        of = candidate.mesh if word in Mesh.__struct_fields__ else workload.model.architecture
        return int(word) if word.isdecimal() else int(getattr(of, word))

    if words in NUMBERS:
        return lambda _, workload: NUMBERS[words](workload.model)
    factors = words.split("*")
    return lambda candidate, workload: [prod(factor(word, candidate, workload) for word in factors)]


class Undivided(Value, frozen=True):
    """The case in which `part` does not divide `whole`, or one of several; both are what `numbers` counts. `or_multiple`: nor is a multiple
    of it; `begins`: how the reason begins."""

    part: str
    whole: str
    or_multiple: bool = False
    begins: str = ""

    def __call__(self, candidate: Candidate, workload: Workload) -> str | None:
        """The reason; None: it divides."""
        [part] = numbers(self.part)(candidate, workload)
        does, end = ("neither divides", " nor is a multiple of it") if self.or_multiple else ("does not divide", "")
        for whole in numbers(self.whole)(candidate, workload):
            if whole % part and not (self.or_multiple and part % whole == 0):
                return f"{self.begins}{self.part}={part} {does} {self.whole}={whole}{end}"
        return None


class Refusal(Value, frozen=True):
    """The check of a rule that refuses what has the facts `where` and those of one of its cases, each with the reason, or of which a case,
    a check of its own, says a reason. In a text {mesh.tp} is a field of the mesh, and so on for candidate, strategy, training, lora,
    software, gpu, release, the cluster's {inner} level, the model's architecture {a}, its first kind of experts {e} and its class in
    transformers {hf}."""

    where: str
    cases: tuple[tuple[str, str] | Check, ...]

    def __call__(self, candidate: Candidate, workload: Workload) -> str | None:
        """The first reason; None: there is none."""
        if self.where and not fact(self.where)(candidate, workload):
            return None
        for case in self.cases:
            if callable(case):
                if why := case(candidate, workload):
                    return why
            elif fact(case[0])(candidate, workload):
                training, cluster, a = workload.training, workload.cluster, workload.model.architecture
                named: dict[str, Any] = {"training": training, "lora": training.lora, "software": cluster.software, "gpu": cluster.gpu}
                named |= {"inner": cluster.levels[0], "e": next(iter(a.experts), None), "hf": class_of(a) if "{hf." in case[1] else None}
                named["release"] = release_of(cluster.software.megatron_core) if "{release." in case[1] else None
                return case[1].format(candidate=candidate, strategy=candidate.strategy, mesh=candidate.mesh, a=a, **named)
        return None


def refused(id: str, engine_rule: str, needs: str, where: str, *cases: tuple[str, str] | Check | str) -> Rule:
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


def first(whys: Iterable[str | None]) -> str | None:
    """The first reason; None: there is none."""
    return next((why for why in whys if why is not None), None)


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
