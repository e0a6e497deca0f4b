"""Gives a run of transformers' Trainer what every run has: checkpoints with marker and digests, resume, preflight, watchdog, and the
exit statuses of known failures; metrics, timers and the stop before the time limit are hugging_face_callback.py's."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import torch

from orchestrator.errors import InputError
from orchestrator.plan import Plan, from_json
from orchestrator.workers import as_planned, checkpoint, distributed, groups, hugging_face, loop, saving, unpickling
from orchestrator.workers.batch import Batch
from orchestrator.workers.deepspeed_trainer import import_deepspeed, set_log_level
from orchestrator.workers.hf_model import HuggingFaceModel
from orchestrator.workers.watchdog import NoWatchdog, Watchdog

if TYPE_CHECKING:
    from transformers import TrainingArguments

OUT: Final = Path()
"""Ranks run in the run's folder."""


def run(trainer: Callable[[Run], Any]) -> NoReturn:
    """Trains with this Trainer as one rank of the job; ends the process."""

    def program() -> None:
        plan, engine = from_json((OUT / "plan.json").read_bytes(), "plan.json"), loop.read_engine(OUT)

        def body(job: distributed.Job, watchdog: Watchdog) -> None:
            run = Run(plan, engine, job.device, watchdog)
            loop.look_at_groups(plan, run.groups, job.device)
            watchdog.phase("building the model", loop.BUILD_S if plan.run.step_timeout_s else 0.0)
            run.train(trainer(run))

        loop.as_rank(plan, OUT, engine.get("requires", {}), body)

    loop.recorded(program)


class Run:
    """One rank of the run: what its plan says beside the Trainer's own arguments."""

    def __init__(self, plan: Plan, engine: dict[str, Any], device: torch.device, watchdog: Watchdog | NoWatchdog) -> None:
        self.plan, self.engine, self.device, self.watchdog = plan, engine, device, watchdog
        if plan.run.trace_routing:
            raise InputError("train.trace_routing", "true", "engine=deepspeed has no routers of megatron-core")
        as_planned.require_ranks(plan)
        deepspeed = import_deepspeed(device)
        set_log_level(plan)
        deepspeed.init_distributed("nccl" if device.type == "cuda" else "gloo", verbose=False)
        self.groups = groups.of_plan(plan)
        self.saved, self.saves = loop.saved_before(plan, OUT, "--continue" in sys.argv), saving.Saves(plan, OUT)
        self.scores: Callable[[Any], dict[str, float]] | None = None
        """What is said of what was held out, beside its loss."""
        self.reads = True
        """Whether this process reads the samples; else who measures it gives them to it."""
        self.stopped = False
        """Whether the run was asked to end before its last step."""
        self.write_row: Callable[[], None] = lambda: None
        """Writes the row of metrics.jsonl that waits for its evaluation; the callback sets it."""

    def complete(self, arguments: TrainingArguments, *, evaluates: bool) -> None:
        """Sets what belongs to the run's folder, whatever trainer.yaml says for use by hand: samples come in the plan's order, and layers
        are recomputed as `first_model` has them. `evaluates`: whether there are samples to evaluate on."""
        from transformers.integrations import is_tensorboard_available

        run = self.plan.run
        arguments.output_dir, arguments.gradient_checkpointing = str(OUT / checkpoint.FOLDER), False
        arguments.train_sampling_strategy, arguments.remove_unused_columns = "sequential", False
        arguments.logging_nan_inf_filter, arguments.disable_tqdm = False, True
        arguments.report_to = ["tensorboard"] if is_tensorboard_available() else []
        os.environ["TENSORBOARD_LOGGING_DIR"] = str(OUT / "tensorboard")
        if run.wandb:
            arguments.report_to.append("wandb")
            os.environ |= {f"WANDB_{name.upper()}": value for name, value in run.wandb.items()}
        if self.plan.cp > 1:
            arguments.parallelism_config = self._ulysses()
        if (traced := self.plan.model.traced) is not None:
            names = [feed.name for feed in traced.feeds]
            arguments.label_names = ["labels"] if "labels" in names else names[:1]  # by which the Trainer knows that there is a loss
        if evaluates:
            arguments.eval_strategy, arguments.eval_steps = "steps", run.eval_every
            arguments.per_device_eval_batch_size = self.plan.micro_batch_size

    def _ulysses(self) -> Any:
        """What makes accelerate put DeepSpeed's exchange of sequence shards for heads around the attention."""
        from accelerate import ParallelismConfig
        from accelerate.utils import DeepSpeedSequenceParallelConfig

        length, attention = self.plan.training.seq_length, self.engine["model"]["attn_implementation"]
        handler = DeepSpeedSequenceParallelConfig(sp_seq_length=length, sp_seq_length_is_variable=False, sp_attn_implementation=attention)
        return ParallelismConfig(sp_size=self.plan.cp, dp_shard_size=self.plan.dp, sp_handler=handler)

    def first_model(self) -> torch.nn.Module:
        """The model with its first weights. Raises InputError."""
        if self.plan.model.traced is not None:
            from orchestrator.workers import traced

            return traced.first_model(self.plan, self.engine, self.device)
        model: Any = hugging_face.first_model(self.plan, self.engine, self.device)
        if "expert_balance" in self.engine["model"]:
            model.config.output_router_logits, model.config.router_aux_loss_coef = True, self.engine["model"]["expert_balance"]
        return model

    def states(self, model: torch.nn.Module) -> HuggingFaceModel:
        """The model as DeepSpeed shall have it, with the plan's loss and checkpoints."""
        kind = HuggingFaceModel
        if self.plan.model.traced is not None:
            from orchestrator.workers import traced

            kind = traced.DescribedModel
        return kind(self.plan, self.engine, self.device, self.groups, model)

    def samples(self, kind: Any) -> tuple[Any, Any]:
        """Data sets of this kind to train on, and to evaluate on or None."""
        plan = self.plan
        train, valid = loop.open_samples(plan, OUT / "data") if self.reads else (None, None)
        training = kind(plan, train, plan.training.steps * plan.global_batch_size)
        if valid is None or not plan.run.eval_every:
            return training, None
        if (traced := plan.model.traced) is not None and traced.classifies:
            from orchestrator.workers.traced import scores

            self.scores = scores
        return training, kind(plan, valid, loop.eval_steps(plan, valid) * plan.global_batch_size)

    def train(self, trainer: Any) -> None:
        """Trains from the first step or the checkpoint's, and exports. Raises NonFiniteLossError, CheckpointError."""
        from transformers.trainer import TRAINER_STATE_NAME
        from transformers.trainer_callback import TrainerState

        self.trainer = trainer
        if self.saved is None:
            trainer.train()
        else:
            with unpickling.refused(self.saved.folder), tempfile.TemporaryDirectory() as folder:
                state = TrainerState(global_step=self.saved.step, train_batch_size=self.plan.micro_batch_size)
                state.compute_steps(trainer.args, self.plan.training.steps)
                state.save_to_json(str(Path(folder, TRAINER_STATE_NAME)))
                trainer.train(resume_from_checkpoint=folder)
        self.saves.wait()
        if self.plan.run.export_to and not self.stopped:
            self.watchdog.phase("export", saving.limit_s(self.plan))
            trainer.save_model(self.plan.run.export_to)


class Steps:
    """The Trainer's steps one at a time, as a worker's trainer takes them, for who measures them."""

    def __init__(self, trainer: Callable[[Run], Any], plan: Plan, engine: dict[str, Any], device: torch.device) -> None:
        run = Run(plan, engine, device, NoWatchdog())
        run.reads = False
        self.plan, self.device, self.groups, self.trainer = plan, device, run.groups, trainer(run)
        self.trainer._prepare_for_training(plan.training.steps, self.trainer.get_train_dataloader(), None)
        self.model, self.engine, self.states = self.trainer.model, self.trainer.model_wrapped, self.trainer.states
        # accelerate calls it once the last micro-batch has been backward (utils/deepspeed.py, backward).
        self._step, self.engine.step = self.engine.step, lambda *words, **more: None

    def forward_backward(self, batches: Sequence[Batch]) -> torch.Tensor:
        """Computes the gradients of the micro-batches' mean loss, which it returns."""
        self.trainer.current_gradient_accumulation_steps = len(batches)
        losses: list[torch.Tensor] = []
        for batch in batches:
            self.trainer.accelerator.gradient_state._set_sync_gradients(len(losses) + 1 == len(batches))
            losses.append(self.trainer.training_step(self.engine, batch))
        return torch.stack(losses).sum()

    def update(self, lr: float) -> float | None:
        """Clips, steps and clears; returns the gradients' global norm before clipping, where DeepSpeed tells one."""
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr
        self._step()
        norm = self.engine.get_global_grad_norm()
        return None if norm is None else float(norm)
