"""TRL's SFTTrainer in transformers' Trainer's place: chats with TRL's loss and metrics, and data sets of one's own as TRL reads them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers import Trainer

from orchestrator.workers.data import load_tokenizer
from orchestrator.workers.runs import PlannedSamples


def by_trl(planned: type[Any]) -> type[Any]:
    """This trainer with SFTTrainer in the Trainer's place."""
    from trl import SFTConfig, SFTTrainer

    return type(planned.__name__, (planned, Chats, SFTTrainer), {"arguments": SFTConfig})


class InTrlsWords(PlannedSamples):
    """The plan's samples to train on, as TRL takes them."""

    def collate(self, samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Labels are where their tokens are; -100 is that of what has no loss, the first token of each packed sample among it."""
        found = super().collate(samples)
        labels = F.pad(found["labels"], (1, 0), value=-100)[:, :-1]
        return {"input_ids": found["tokens"], "labels": labels, "position_ids": found["positions"]}


class Chats(Trainer):
    """SFTTrainer where it trains otherwise than the plan says. The plan's samples are evaluated by the plan's loss: there TRL's is the mean
    of the micro-batches' means (sft_trainer.py, compute_loss)."""

    run: Any

    def __init__(self, *, args: Any, train_dataset: Any, eval_dataset: Any, **more: Any) -> None:
        """TRL takes data sets of `datasets` alone: the plan's samples, which are masked, packed and in their order, come after it."""
        from datasets import Dataset

        args.max_length = self.run.plan.training.seq_length
        args.router_aux_loss_coef = 0.0  # else a configuration's default balances experts, whatever the plan says (__init__)
        given = {"train_dataset": train_dataset, "eval_dataset": eval_dataset}
        mine = {name: samples for name, samples in given.items() if isinstance(samples, PlannedSamples)}
        self.stand_in = Dataset.from_dict({"input_ids": [[0]]})
        tokenizer = load_tokenizer(self.run.plan.run.tokenizer)[0]
        super().__init__(args=args, processing_class=tokenizer, **given | dict.fromkeys(mine, self.stand_in), **more)
        if "train_dataset" in mine:
            mine["train_dataset"] = InTrlsWords(**vars(train_dataset))
        self.__dict__ |= mine

    def _prepare_dataset(self, dataset: Any, *words: Any, **more: Any) -> Any:
        return dataset if dataset is self.stand_in else super()._prepare_dataset(dataset, *words, **more)

    def _send_telemetry(self) -> None:
        """TRL tells its makers of every run (base_trainer.py)."""

    def compute_loss(self, model: Any, inputs: Any, *words: Any, **more: Any) -> Any:
        """TRL's loss, with all tokens counted: without a mask TRL counts those of a micro-batch's first sequence alone."""
        if model.training and "attention_mask" not in inputs:
            self._total_train_tokens += inputs["position_ids"][1:].numel() * self.accelerator.num_processes
        return super().compute_loss(model, inputs, *words, **more)
