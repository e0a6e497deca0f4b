"""The engines of published runs, a file each. They are priced and fitted to; no plan is made for them."""

from __future__ import annotations

from typing import Final

from tests.validation.engines import adapters, bigscience, fsdp, hf_deepspeed, internevo, megatron, nanotron
from tests.validation.engines.engine import MeasuredEngine

ENGINES: Final[dict[str, MeasuredEngine]] = {
    engine.name: engine
    for engine in (
        nanotron.NANOTRON,
        *(fsdp.COMPOSER, fsdp.TORCHTITAN, fsdp.AUTOMODEL, fsdp.TRL),
        *(internevo.INTERNEVO_FSDP, internevo.INTERNEVO),
        *(hf_deepspeed.HF_DEEPSPEED, hf_deepspeed.HF_DEEPSPEED_UNFUSED, hf_deepspeed.HF_DEEPSPEED_TILED_LOSS),
        *(bigscience.BIGSCIENCE, bigscience.BIGSCIENCE_BF16),
        *(megatron.BRIDGE_FORK, megatron.BRIDGE_FORK_WIDE, megatron.NEMO_FSDP, megatron.NEMO, megatron.MEGATRON_LM_2021),
        *(megatron.MEGATRON_LM_2022, megatron.MEGATRON_LM_BIGSCIENCE),
        *(adapters.PEFT, adapters.LITGPT, adapters.LITGPT_FSDP, adapters.FSDP_QLORA),
        *(megatron.MEGATRON_CORE, megatron.MEGATRON_CORE_FUSED_LOSS, megatron.MEGATRON_CORE_UNFUSED),
        *(megatron.BRIDGE_LIBRARY, megatron.BRIDGE_LIBRARY_UNFUSED),
    )
}
"""Measured engines by name, in the order in which printed names are tried."""


def printed_as(text: str) -> MeasuredEngine | None:
    """The engine that a table prints so; None: none that is described.

    >>> [engine.name if engine else None for engine in map(printed_as, ("fsdp(composer)", "NeMo megatron-core", "TWIST"))]
    ['fsdp_composer', 'nemo', None]
    """
    lowered = text.lower()
    for engine in ENGINES.values():
        if any(words in lowered for words in engine.printed) and not any(words in lowered for words in engine.not_printed):
            return engine
    return None
