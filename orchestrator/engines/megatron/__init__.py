"""megatron-core alone: tensor, pipeline, virtual pipeline, context and data parallelism, ZeRO-0 and the distributed optimizer (ZeRO-1)."""

from __future__ import annotations

from functools import partial
from typing import Final

from orchestrator.engines.engine import Engine, OwnLoop
from orchestrator.engines.megatron.capabilities import NAME, REQUIREMENTS, capabilities, traits
from orchestrator.engines.megatron.entry import start
from orchestrator.engines.megatron.own import CHECKOUT, INSTALL, OF_MEGATRON, own_job, why_absent, why_not_own
from orchestrator.engines.megatron.program import PROGRAM
from orchestrator.engines.megatron.translate import PASSES, translate
from orchestrator.engines.translation import why_no_exchange, why_other_samples

ENGINE: Final = Engine(
    name=NAME,
    capabilities=capabilities,
    traits=traits,
    translate=translate,
    requirements=REQUIREMENTS,
    passes=PASSES,
    program=PROGRAM,
    own_loop=OwnLoop(
        name="Megatron's own training loop",
        why_not=why_not_own,
        job=own_job,
        modules=("megatron.training",),
        checkout=CHECKOUT,
        install=INSTALL,
        checkpoints=OF_MEGATRON,
        why_absent=why_absent,
        why_no_resume=why_other_samples,
    ),
    entry=start,
    copied="megatron_hooks",
    why_no_exchange=partial(why_no_exchange, NAME),
    saves_beside=lambda plan: True,
    why_no_resume=why_other_samples,
)
