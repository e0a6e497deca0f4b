"""Runs transformers' Trainer on a plan, as one rank: torchrun starts this in a run's folder, beside its trainer.yaml.

    torchrun --nproc-per-node 8 -m orchestrator.programs.hugging_face

To train with a callback, a metric, a loss or a data set of your own copy this file, change `trainer`, and start it with entry=FILE.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from orchestrator.programs import hugging_face_hooks as hooks  # isort: skip  (before DeepSpeed)
import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import HfArgumentParser, Trainer, TrainingArguments
from transformers.modeling_outputs import CausalLMOutput

from orchestrator.model.schedule import learning_rate
from orchestrator.programs.hugging_face_chats import by_trl
from orchestrator.workers.batch import RankBatches
from orchestrator.workers.deepspeed_states import UNCLIPPED
from orchestrator.workers.hf_model import complete, summed_over_sequence
from orchestrator.workers.runs import PlannedSamples, trains_by_trl


class PlannedTrainer(Trainer):
    """The Trainer where it trains otherwise than the plan says, a method for each correction."""

    arguments: type[TrainingArguments] = TrainingArguments
    optimizer: Any
    lr_scheduler: Any

    def __init__(self, run: hooks.Run, **more: Any) -> None:
        self.run, self.plan = run, run.plan
        super().__init__(**more)
        if not self.is_deepspeed_enabled:  # accelerate/state.py, PartialState: nothing else tells
            raise RuntimeError("accelerate leaves DeepSpeed out: is ACCELERATE_USE_CPU set?")
        # A model that takes **kwargs is taken for one that divides its loss by all labels of the global batch (trainer.py, __init__). BERT
        # does not, and its gradients would be too large by ranks and micro-batches.
        self.model_accepts_loss_kwargs &= self.plan.model.stack != "encoder" and self.plan.cp == 1

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Weights decay by their shape. transformers goes by names (trainer.py, get_decay_parameter_names), and takes T5's
        relative_attention_bias for a bias."""
        if self.optimizer is None:
            kind, settings = self.get_optimizer_cls_and_kwargs(self.args, self.model)
            self.optimizer = kind(self.states.parameter_groups(), **settings | {"weight_decay": self.args.weight_decay})
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None, last_epoch: int = -1) -> Any:
        """The plan's schedule, of which transformers has some alone (its linear one ends at 0)."""
        if self.lr_scheduler is None:
            training = self.plan.training
            self.lr_scheduler = LambdaLR(optimizer or self.optimizer, lambda step: learning_rate(training, step) / training.lr, last_epoch)
        return self.lr_scheduler

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        """What DeepSpeed makes otherwise than the plan is mended (workers/hf_model.py, corrected). A checkpoint is read into any layout
        and ZeRO stage, where DeepSpeed's own is of one (integrations/deepspeed.py, deepspeed_load_checkpoint)."""
        self.states = self.run.kind(self.plan, self.run.engine, self.run.device, self.run.groups, self.model)
        if self.plan.zero_stage == 0 and not self.plan.training.clip:  # there DeepSpeed tells a norm only where it clips
            self.accelerator.deepspeed_plugin.deepspeed_config["gradient_clipping"] = UNCLIPPED
        with self.states.corrected():
            prepared = super()._prepare_for_training(max_steps, train_dataloader, None)
        self.states.take(engine := self.model_wrapped)
        engine.step = self.run.rows.timed(engine.step, "update")  # which accelerate calls (utils/deepspeed.py, backward)
        if self.run.saved is not None:
            self.states.load(self.run.saved)
            self.lr_scheduler = None
            self.create_scheduler(max_steps, last_epoch=self.run.saved.step - 1)
        return prepared

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Writes weights and moments by their places in the whole model, once the step's row is written: a run that is killed goes on
        behind it."""
        self.run.rows.write()
        self.run.saves.save(self.states, self.state.global_step)

    def _get_dataloader(self, dataset: Any, description: str, batch_size: int, *words: Any, **more: Any) -> DataLoader[Any]:
        """Samples in the plan's order, those of a data set of one's own drawn anew in each epoch, the same for all ranks of a sequence.
        DeepSpeed's own adapter for Ulysses would shift labels once more, and lose the last of each sequence
        (runtime/sequence_parallel/ulysses_sp.py, UlyssesSPDataLoaderAdapter)."""
        self.accelerator.deepspeed_ulysses_dl_adapter = lambda loader, model: loader
        planned, trains = isinstance(dataset, PlannedSamples), description == "Training"
        seed = self.args.seed if trains and not planned and self.args.train_sampling_strategy != "sequential" else None
        mine = RankBatches(len(dataset), batch_size, self.run.groups.rank("dp"), self.plan.dp, seed, whole=not trains)
        workers = {"num_workers": self.args.dataloader_num_workers, "pin_memory": self.args.dataloader_pin_memory}
        workers["generator"] = torch.Generator()  # reading draws nothing of what dropout goes on from
        return DataLoader(dataset, batch_sampler=mine, collate_fn=dataset.collate if planned else self.data_collator, **workers)

    def get_batch_samples(self, *words: Any) -> Any:
        """A step begins before the Trainer tells so, as it reads its micro-batches (trainer.py, _run_epoch)."""
        self.run.rows.begin(self.state.global_step)
        return super().get_batch_samples(*words)

    def _prepare_inputs(self, inputs: Any) -> Any:
        """In 16 bits, as the Trainer gives DeepSpeed all numbers (trainer.py, _prepare_input), a step's mean would be off by 1/256."""
        exact = {"loss_scale": inputs["loss_scale"].to(self.args.device)} if "loss_scale" in inputs else {}
        return super()._prepare_inputs(inputs) | exact

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        """The plan's samples have the plan's loss: means are those of the global batch, whatever the layout and the answers' lengths, and
        experts are balanced over tokens that are no padding. A data set of one's own has the model's. Under Ulysses transformers'
        (integrations/deepspeed.py, deepspeed_sp_compute_loss) has gradients that are too large by the ranks of a sequence."""
        outputs: Any
        if self._planned(inputs):
            loss = self.states.loss(inputs)
            outputs = CausalLMOutput(loss=loss, logits=self.states.logits)
        elif self.plan.cp > 1:
            outputs = model(**self.states.part(inputs))
            loss = outputs.loss
        else:
            found = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            loss, outputs = found if return_outputs else (found, None)
        if model.training:
            balance = self.states.balance
            loss = (loss if balance is None else loss + balance) / summed_over_sequence(self.plan)
        return (loss, outputs) if return_outputs else loss

    def _planned(self, inputs: Any) -> bool:
        return "tokens" in inputs or self.plan.model.traced is not None or self.plan.model.vision is not None

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """What is reported is the loss of what is predicted, without that by which experts are balanced, as Megatron's is."""
        with self.states.around_passes():
            loss = super().training_step(model, inputs, None if self._planned(inputs) else num_items_in_batch)
        balance = 0.0 if self.states.balance is None else self.states.balance.detach()
        return loss * summed_over_sequence(self.plan) - balance / self.args.gradient_accumulation_steps

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes the whole model, also of AutoTP's parts, of which Trainer.save_model writes none."""
        if output_dir is not None:
            self.states.export(Path(output_dir))


def trainer(run: hooks.Run, training: PlannedSamples, valid: PlannedSamples | None) -> Trainer:
    """The Trainer of the plan on these samples (valid: to evaluate on, or None), with the run's callback."""
    kind = by_trl(PlannedTrainer) if trains_by_trl(run.plan) else PlannedTrainer
    [arguments] = HfArgumentParser(kind.arguments).parse_yaml_file("trainer.yaml")  # before the model, which ZeRO-3 divides
    complete(arguments, run.plan, run.engine, evaluates=valid is not None)
    model = run.kind.first(run.plan, run.engine, run.device)
    return kind(run, model=model, args=arguments, train_dataset=training, eval_dataset=valid, callbacks=[run])


if __name__ == "__main__":
    hooks.run(trainer)
