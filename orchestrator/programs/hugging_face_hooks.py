"""Gives a run of transformers' Trainer what every run has: checkpoints with marker and digests, resume, preflight, watchdog, and the
exit statuses of known failures; metrics, timers and the stop before the time limit are hugging_face_callback.py's."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import torch

from orchestrator.plan import Plan, from_json
from orchestrator.workers import checkpoint, distributed, groups, loop, saving, unpickling
from orchestrator.workers.deepspeed import HuggingFaceTrainer
from orchestrator.workers.deepspeed_trainer import import_deepspeed, set_log_level
from orchestrator.workers.watchdog import Watchdog

if TYPE_CHECKING:
    from transformers import Trainer, TrainingArguments

OUT: Final = Path()
"""Ranks run in the run's folder."""


def prepare() -> None:
    """Makes DeepSpeed ready for this machine before it is imported."""
    plan = from_json((OUT / "plan.json").read_bytes(), "plan.json")
    import_deepspeed(torch.device("cpu" if plan.cluster.is_cpu else "cuda"))
    set_log_level(plan)


def run(train: Callable[[Run], None]) -> NoReturn:
    """Runs `train` as one rank of the job; ends the process."""

    def program() -> None:
        plan, engine = from_json((OUT / "plan.json").read_bytes(), "plan.json"), loop.read_engine(OUT)

        def body(job: distributed.Job, watchdog: Watchdog) -> None:
            import deepspeed

            deepspeed.init_distributed("nccl" if job.device.type == "cuda" else "gloo", verbose=False)
            run = Run(plan, engine, job.device, watchdog)
            loop.look_at_groups(plan, run.groups, job.device)
            watchdog.phase("building the model", loop.BUILD_S if plan.run.step_timeout_s else 0.0)
            train(run)

        loop.as_rank(plan, OUT, engine.get("requires", {}), body)

    loop.recorded(program)


class States(HuggingFaceTrainer):
    """The model under DeepSpeed as our worker has it: what is corrected, the loss of the plan's samples, and states that are saved and
    read as there: each goes on from the other's checkpoints. The Trainer makes `engine`."""

    def __init__(self, run: Run, model: torch.nn.Module) -> None:
        self.plan, self.device, self.groups, self.model, self.engine_fields = run.plan, run.device, run.groups, model, run.engine
        self.generators: dict[str, Any] | None = None
        """The generators' states to go on with, once the first samples are read, which draws from them."""

    def _set_generator_states(self, states: dict[str, Any]) -> None:
        self.generators = states

    def set_generators(self) -> None:
        """Lets dropout go on from the checkpoint's generators, if it has some for this layout; the second time does nothing."""
        if self.generators is not None:
            distributed.set_generator_states(self.generators, self.device)
        self.generators = None


class Run:
    """One rank of the run: what its plan says beside the Trainer's own arguments."""

    def __init__(self, plan: Plan, engine: dict[str, Any], device: torch.device, watchdog: Watchdog) -> None:
        self.plan, self.engine, self.device, self.watchdog = plan, engine, device, watchdog
        self.groups = groups.of_plan(plan)
        self.saved, self.saves = loop.saved_before(plan, OUT, "--continue" in sys.argv), saving.Saves(plan, OUT)
        self.stopped = False
        """Whether the run was asked to end before its last step."""
        self.write_row: Callable[[], None] = lambda: None
        """Writes the row of metrics.jsonl that waits for its evaluation; the callback sets it."""

    def complete(self, arguments: TrainingArguments) -> None:
        """Sets what belongs to the run's folder, whatever trainer.yaml says for use by hand: samples come in the plan's order."""
        from transformers.integrations import is_tensorboard_available

        run = self.plan.run
        arguments.output_dir = str(OUT / checkpoint.FOLDER)
        arguments.train_sampling_strategy, arguments.remove_unused_columns = "sequential", False
        arguments.logging_nan_inf_filter, arguments.disable_tqdm = False, True
        arguments.report_to = ["tensorboard"] if is_tensorboard_available() else []
        os.environ["TENSORBOARD_LOGGING_DIR"] = str(OUT / "tensorboard")
        if run.wandb:
            arguments.report_to.append("wandb")
            os.environ |= {f"WANDB_{name.upper()}": value for name, value in run.wandb.items()}
        if self.plan.cp > 1:
            arguments.parallelism_config = self._ulysses()
        if run.eval_every and (run.valid or run.split):
            arguments.eval_strategy, arguments.eval_steps = "steps", run.eval_every
            arguments.per_device_eval_batch_size = self.plan.micro_batch_size

    def _ulysses(self) -> Any:
        """What makes accelerate put DeepSpeed's exchange of sequence shards for heads around the attention."""
        from accelerate import ParallelismConfig
        from accelerate.utils import DeepSpeedSequenceParallelConfig

        length, attention = self.plan.training.seq_length, self.engine["model"]["attn_implementation"]
        handler = DeepSpeedSequenceParallelConfig(sp_seq_length=length, sp_seq_length_is_variable=False, sp_attn_implementation=attention)
        return ParallelismConfig(sp_size=self.plan.cp, dp_shard_size=self.plan.dp, sp_handler=handler)

    def samples(self, kind: Any) -> tuple[Any, Any]:
        """Data sets of this kind to train on, and to evaluate on or None."""
        plan = self.plan
        train, valid = loop.planned_batches(plan, 0, OUT / "data")
        training = kind(plan, train, plan.training.steps * plan.global_batch_size)
        if valid is None or not plan.run.eval_every:
            return training, None
        most = max(1, valid.num_samples // plan.global_batch_size)
        return training, kind(plan, valid, min(plan.run.eval_steps, most) * plan.global_batch_size)

    def train(self, trainer: Trainer) -> None:
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
