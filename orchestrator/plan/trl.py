"""Which plans TRL's SFTTrainer trains as they are planned (programs/hugging_face_chats.py), and whether it is here."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Final

from orchestrator.plan.plan import Plan

FLAG: Final = "--trl"
"""The argument by which a rank of programs/hugging_face.py trains chats by SFTTrainer where TRL is installed."""
READ: Final = "1.16"
"""The release whose loss was read and is tested; setup.cfg, [sft]."""
TRAINER: Final = "transformers' Trainer"
NAME: Final = "TRL's SFTTrainer"
INSTALL: Final = "pip install -e '.[sft]'"


def why_not_trl(plan: Plan) -> str | None:
    """Why SFTTrainer would train this plan otherwise than planned, or not at all, with the line of TRL 1.16; None: it trains it."""
    balanced = any(part.aux_loss_coeff for part in plan.model.experts)
    refused = (
        (plan.training.task != "sft", "task=sft alone is for it"),
        (plan.model.traced is not None, "its loss is of models with a head of their own, and this one was described by its own code"),
        (plan.model.vision is not None, "the model looks at images, and its samples are made by the processor before"),
        (plan.run.tokenizer is None, "it needs tokenizer="),
        (plan.tp > 1, f"tp={plan.tp}: it multiplies by the head's weight itself, of which a rank has a part (trainer/utils.py:1633)"),
        (plan.cp > 1, f"cp={plan.cp}: its loss is transformers', with gradients too large by {plan.cp} (trainer/sft_trainer.py:1591)"),
        (plan.tiled_logits > 1, f"tiled_logits={plan.tiled_logits}: it has tiles of its own"),
        (balanced, "model.aux_loss_coeff: it balances experts over padding too, and reports the sum (trainer/utils.py:1682)"),
    )
    return next((why for holds, why in refused if holds), None)


def absent() -> str | None:
    """Why this machine has no TRL that is taken; None: it has."""
    try:
        found = version("trl")
    except PackageNotFoundError:
        return f"TRL is not installed here: {INSTALL}"
    return None if found.split(".")[:2] == READ.split(".") else f"TRL {found} is here, and {READ} was read: {INSTALL}"


def who(absent: str | None) -> str:
    """What trains chats that TRL can train, for a screen. `absent`: of `absent`, here or where ranks are."""
    return f"{NAME} (trl {version('trl')})" if absent is None else f"{TRAINER} ({absent} for its SFTTrainer)"
