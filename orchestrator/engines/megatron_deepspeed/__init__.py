"""megatron-core's groups, layers and 1F1B under DeepSpeed's ZeRO: stages 0 to 3 without a pipeline, stage 1 with one."""

from __future__ import annotations

from functools import partial
from typing import Final

from orchestrator.engines.ds_states import why_no_resume
from orchestrator.engines.engine import Engine
from orchestrator.engines.megatron_deepspeed.capabilities import NAME, REQUIREMENTS, capabilities, traits
from orchestrator.engines.megatron_deepspeed.translate import PASSES, translate
from orchestrator.engines.translation import why_no_exchange
from orchestrator.plan.check import has_states_by_place

ENGINE: Final = Engine(
    name=NAME,
    capabilities=capabilities,
    traits=traits,
    translate=translate,
    requirements=REQUIREMENTS,
    passes=PASSES,
    why_no_exchange=partial(why_no_exchange, NAME),
    reshardable=has_states_by_place,
    saves_beside=has_states_by_place,
    why_no_resume=why_no_resume,
)
