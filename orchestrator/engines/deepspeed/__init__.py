"""Hugging Face models under DeepSpeed alone: ZeRO 0 to 3, AutoTP, Ulysses, AutoEP, hpZ, optimizer offload."""

from __future__ import annotations

from typing import Final

from orchestrator.engines.deepspeed.capabilities import NAME, REQUIREMENTS, capabilities, traits
from orchestrator.engines.deepspeed.chats import own_job, trained_by
from orchestrator.engines.deepspeed.entry import start
from orchestrator.engines.deepspeed.translate import PASSES, translate, why_no_exchange
from orchestrator.engines.ds_states import why_no_resume
from orchestrator.engines.engine import Engine, OwnLoop
from orchestrator.plan import trl
from orchestrator.plan.check import has_states_by_place

ENGINE: Final = Engine(
    name=NAME,
    capabilities=capabilities,
    traits=traits,
    translate=translate,
    requirements=REQUIREMENTS,
    passes=PASSES,
    own_loop=OwnLoop(
        name=trl.TRAINER,
        trained_by=trained_by,
        why_not=lambda plan: None,
        job=own_job,
        modules=("accelerate",),
        install="pip install -e '.[engines]'",
        why_no_resume=why_no_resume,
        is_instrument=True,
    ),
    entry=start,
    copied="hugging_face_hooks",
    why_no_exchange=why_no_exchange,
    reshardable=has_states_by_place,
    saves_beside=has_states_by_place,
    why_no_resume=why_no_resume,
)
