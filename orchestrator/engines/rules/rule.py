"""How a rule of an engine's is written down, and what most of them ask."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from orchestrator.strategy.capabilities import Rule
from orchestrator.strategy.spec import Candidate
from orchestrator.strategy.workload import Workload

Check = Callable[[Candidate, Workload], str | None]
NO_BALANCE: Final = "model.aux_loss_coeff=0"
"""How a user says that no loss balances experts; those who typed nothing have the model's own."""


def rule(id: str, engine_rule: str, needs: str, only_with: str = "") -> Callable[[Check], Rule]:
    """Makes a rule of the check below it. `engine_rule`: the engine's own, by its id in the tables of facts, file and line. `needs`: what
    the check reads, words in the decision tree's order, so that the tree can cut as soon as that much is fixed; "model" is what is given:
    model, training and cluster; `only_with`: an option at whose default the check forbids nothing, which it then isn't asked about."""
    return lambda check: Rule(id=id, engine_rule=engine_rule, check=check, needs=tuple(needs.split()), only_with=only_with)


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
