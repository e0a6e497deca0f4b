"""The language of transformers.Trainer: settings by the names of TrainingArguments (transformers 5, training_args.py)."""

from __future__ import annotations

from typing import Final

from orchestrator.words.terms import NOTHING, Table, Term, switch

SIZES: Final[Table] = (
    Term("max_steps", "training.steps", back=lambda steps: int(steps) if int(steps) > 0 else NOTHING),
    Term("per_device_train_batch_size", "micro_batch_size", default=8, back=int, least=1),
    Term("gradient_accumulation_steps", "num_microbatches", default=1, back=int, least=1),
)
RATE: Final[Table] = (Term("learning_rate", "training.lr", default=5e-5, back=float),)
OPTIMIZER: Final[Table] = (
    Term("warmup_steps", "training.warmup", back=lambda steps: NOTHING),
    Term("weight_decay", "training.weight_decay", default=0.0, back=float),
    Term("adam_beta1", "training.betas", default=0.9, to=lambda betas: betas[0], back=float),
    Term("adam_beta2", "training.betas", default=0.999, to=lambda betas: betas[1], back=float),
    Term("adam_epsilon", "training.eps", default=1e-8, back=float),
    Term("max_grad_norm", "training.clip", default=1.0, back=float),
    switch("bf16", "training.precision", "bf16")._replace(unless=NOTHING),
    switch("fp16", "training.precision", "fp16")._replace(unless=NOTHING),
    Term("seed", "training.seed", back=int),
)
"""Settings of a training. A warm-up may be a share too, which is the reader's to judge, and two settings make one pair of betas."""
SCHEDULES: Final = {
    "cosine_with_min_lr": "cosine", "linear": "linear", "constant": "constant", "constant_with_warmup": "constant",
    "inverse_sqrt": "inverse_square_root", "warmup_stable_decay": "wsd",
}  # fmt: skip
"""Schedules of plans by lr_scheduler_type (transformers/optimization.py)."""
DECAYS: Final = {"linear": "linear", "cosine": "cosine", "minus_sqrt": "1-sqrt"}
"""The Trainer's names of how a rate falls after it was stable (transformers/optimization.py, get_wsd_schedule)."""
PLAN: Final[Table] = (*SIZES, *RATE, *OPTIMIZER)
