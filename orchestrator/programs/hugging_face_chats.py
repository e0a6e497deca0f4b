"""TRL's SFTTrainer in transformers' Trainer's place: chats with TRL's loss and metrics, and data sets of one's own as TRL reads them."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from transformers import Trainer, default_data_collator

from orchestrator.workers.data import load_tokenizer
from orchestrator.workers.runs import PlannedSamples

NUMBER: Final = "number"
"""The one column of a data set of the plan's samples, which are read by it."""


def by_trl(planned: type[Any]) -> type[Any]:
    """This trainer with SFTTrainer in the Trainer's place."""
    from trl import SFTConfig, SFTTrainer

    return type(planned.__name__, (planned, Chats, SFTTrainer), {"arguments": SFTConfig})


class Chats(Trainer):
    """SFTTrainer where it trains otherwise than the plan says. The plan's samples are evaluated by the plan's loss: there TRL's is the mean
    of the micro-batches' means (sft_trainer.py, compute_loss)."""

    run: Any

    def __init__(self, *, args: Any, train_dataset: Any, eval_dataset: Any, data_collator: Any, **more: Any) -> None:
        plan = self.run.plan
        args.max_length = plan.training.seq_length
        args.router_aux_loss_coef = 0.0  # else a configuration's default balances experts, whatever the plan says (__init__)
        collate = None if isinstance(getattr(data_collator, "__self__", None), PlannedSamples) else data_collator
        given = {"train_dataset": rows_of(train_dataset, learnt=True), "eval_dataset": rows_of(eval_dataset, learnt=False)}
        super().__init__(args=args, processing_class=load_tokenizer(plan.run.tokenizer)[0], data_collator=collate, **given, **more)
        theirs: Any = self.data_collator  # type: ignore[has-type]
        self.data_collator = lambda rows: theirs(rows) if {"tokens", "position_ids"}.isdisjoint(rows[0]) else default_data_collator(rows)

    def _prepare_dataset(self, dataset: Any, *words: Any, **more: Any) -> Any:
        """The plan's samples are tokens, masked, packed and in their order."""
        return dataset if dataset.column_names == [NUMBER] else super()._prepare_dataset(dataset, *words, **more)

    def _send_telemetry(self) -> None:
        """TRL tells its makers of every run (base_trainer.py)."""

    def compute_loss(self, model: Any, inputs: Any, *words: Any, **more: Any) -> Any:
        """TRL's loss, with all tokens counted: without a mask TRL counts those of a micro-batch's first sequence alone."""
        if model.training and "attention_mask" not in inputs:
            self._total_train_tokens += inputs["position_ids"][1:].numel() * self.accelerator.num_processes
        return super().compute_loss(model, inputs, *words, **more)


def rows_of(samples: Any, *, learnt: bool) -> Any:
    """The plan's samples as a data set, each read when it is asked for; what is none of them as it is. `learnt`: by TRL's names, its
    labels where their tokens are."""
    if not isinstance(samples, PlannedSamples):
        return samples
    from datasets import Dataset

    return Dataset.from_dict({NUMBER: np.arange(len(samples))}).with_transform(Reading(samples, learnt=learnt))


class Reading:
    """What reads rows of a data set of the plan's samples, and is pickled without them: `datasets` does so to know it again
    (fingerprint.py), and took 12 s and 2 GB for 0.8 GB of them."""

    def __init__(self, samples: PlannedSamples, *, learnt: bool) -> None:
        self.samples, self.learnt = samples, learnt

    def __call__(self, rows: dict[str, list[int]]) -> dict[str, list[Any]]:
        found = [in_trls_words(self.samples[index]) if self.learnt else self.samples[index] for index in rows[NUMBER]]
        return {name: [row[name] for row in found] for name in found[0]}

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (f"planned samples, learnt={self.learnt}",)

    def __deepcopy__(self, memo: Any) -> Reading:
        return self


def in_trls_words(sample: dict[str, Any]) -> dict[str, Any]:
    """A sample as TRL takes it; -100 is the label of what has no loss, the first token of each packed sample among it."""
    labels = np.full_like(sample["labels"], -100)
    labels[1:] = np.where(sample["loss_mask"] > 0, sample["labels"], -100)[:-1]
    return {"input_ids": sample["tokens"], "labels": labels, "position_ids": sample["positions"]}
