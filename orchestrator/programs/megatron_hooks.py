"""What every run gives alike, hung into Megatron's training loop: metrics.jsonl, timers.jsonl, the marker of checkpoints, first weights
that the layout doesn't change, preflight, watchdog, and the exit statuses of known failures."""

from __future__ import annotations

import math
import os
import runpy
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NoReturn

import torch
from torch.distributed.checkpoint.api import CheckpointException

from orchestrator.errors import InputError
from orchestrator.plan import Plan, from_json, to_json
from orchestrator.workers import checkpoint, data, distributed, loop, saving, unpickling
from orchestrator.workers.parts import Place
from orchestrator.workers.step_timers import NoTimers, StepTimers
from orchestrator.workers.watchdog import Watchdog

CHECKOUT: Final = "MEGATRON_LM"
"""The variable that names a checkout."""
KINDS: Final = {"decoder": "gpt", "encoder": "bert", "encoder_decoder": "t5"}
"""What Megatron-LM calls a stack in the names of its programs."""
CONTINUE: Final = "--continue"
"""launch.sh says it where a run goes on; Megatron's --load does so in any case."""
ITERATION: Final = "iter_"
TRACKER: Final = "latest_checkpointed_iteration.txt"
"""Names that Megatron's checkpoints have (training/checkpointing.py, get_checkpoint_name and get_checkpoint_tracker_filename)."""
ENCODED: Final = "data/"
"""How the prefixes of corpora begin that are made of the plan's text in the run's folder (engines/megatron/own.py)."""
OUT: Final = Path()
"""Ranks run in the run's folder."""


def read_plan() -> Plan:
    path = OUT / "plan.json"
    return from_json(path.read_bytes(), str(path))


def program_of(checkout: Path, kind: str) -> Path:
    """Megatron-LM's program that trains models of this kind: pretrain_KIND.py at its top, or in examples/KIND, where BERT's and T5's are
    from 0.18 on."""
    name = f"pretrain_{kind}.py"
    return next((path for path in (checkout / name, checkout / "examples" / kind / name) if path.is_file()), checkout / name)


def prepare() -> None:
    """Prepares what must be there before Megatron is imported: the checkout's comes first; a machine without a GPU gets what Megatron lacks
    there. Ends the process where there is no training loop."""
    sys.path = [folder for folder in sys.path if not Path(folder or ".", "megatron.py").is_file()]  # this program, which is no package
    checkout = os.environ.get(CHECKOUT)
    if checkout:
        sys.path.insert(0, str(Path(checkout).resolve()))
    if find_spec("megatron.training") is None:
        has = f"{CHECKOUT}={checkout}" if checkout else "the installed megatron-core"
        why = f"{has} has no megatron/training: install megatron-core>=0.19, or name a checkout of Megatron-LM with env.{CHECKOUT}=PATH"
        print(f"ProgramError: {why}", file=sys.stderr, flush=True)
        distributed.leave(1)
    if read_plan().cluster.is_cpu:
        from orchestrator.cpu import training as cpu_training

        cpu_training.apply()


def run(train: Callable[[], None]) -> NoReturn:
    """`train`, or the program of the checkout in its place, as one rank of the job; ends the process."""

    def program() -> None:
        plan = read_plan()
        engine = loop.read_engine(OUT) if (OUT / "engine.json").exists() else {}  # our worker has none for what it can't train

        def body(job: distributed.Job, watchdog: Watchdog) -> None:
            watchdog.phase("building the model", loop.BUILD_S if plan.run.step_timeout_s else 0.0)
            sys.argv = [word for word in sys.argv if word != CONTINUE] + resumed(plan)
            data.write_indexed(plan, OUT, [word for word in sys.argv if word.startswith(ENCODED)])
            hooks = Hooks(plan, engine, job.device, watchdog)
            hooks.install()
            try:
                checkout = os.environ.get(CHECKOUT)
                if checkout:
                    sys.argv[0] = str(program_of(Path(checkout).resolve(), KINDS[plan.model.stack]))
                    runpy.run_path(sys.argv[0], run_name="__main__")
                else:
                    train()
            except SystemExit as end:  # Megatron's way to stop before the last step
                if end.code:
                    raise
            hooks.close()

        loop.as_rank(plan, OUT, engine.get("requires", {}), body)

    loop.recorded(program)


def resumed(plan: Plan) -> list[str]:
    """Arguments that name the checkpoint of train.resume=, where this run has none of its own yet. Raises InputError."""
    if plan.run.resume is None or _iteration() is not None:
        return []
    saved = checkpoint.find(plan.run.resume)
    if not saved.folder.name.startswith(ITERATION):
        why = "was not written by Megatron's own training loop: program=instrument continues it"
        raise InputError("train.resume", saved.folder, why)
    # The plan has the schedule: a user may change it on purpose (train.change=).
    return ["--load", str(saved.folder.parent), "--ckpt-step", str(saved.step), "--override-opt_param-scheduler"]


class Hooks:
    """The hooks of one rank. Megatron has hooks for the model alone (training/models/base.py, pre_wrap_hooks), from 0.19 on; its loop's
    functions are looked up in its module, and wrapped there."""

    def __init__(self, plan: Plan, engine: dict[str, Any], device: torch.device, watchdog: Watchdog) -> None:
        self.plan, self.engine, self.device, self.watchdog = plan, engine, device, watchdog
        self._aside_s = saving.limit_s(plan) + plan.run.step_timeout_s * (plan.run.eval_steps if plan.run.eval_every else 0)
        """Seconds that evaluation and a checkpoint behind a step may last; 0: for ever."""
        self.metrics: loop.Metrics | None = None
        self.timers: StepTimers | NoTimers = NoTimers()
        self.row: dict[str, Any] = {}
        """The row of metrics of the step before, while its evaluation is awaited."""
        self.saved = _iteration()
        self.done = 0
        self.chunks: list[Any] = []
        """The chunks of the model that this rank trains, as Megatron has wrapped them."""
        self.places: list[Place] = []
        """The weights of this rank by their places in the whole model; none where nothing is exported."""

    def install(self) -> None:
        from megatron.training import argument_utils, training

        if self.plan.cluster.is_cpu:
            from orchestrator.cpu import training as cpu_training

            cpu_training.start_without_cuda()
        self._around(training, "initialize_megatron", self._initialised)
        self._around(training, "get_model", self._filled)
        if hasattr(argument_utils, "gpt_config_from_args"):
            self._around(argument_utils, "gpt_config_from_args", self._configured)
        self._around(training, "load_checkpoint", self._loaded)
        self._around(training, "save_checkpoint", self._saved)
        self._around(training, "train_step", self._step)
        self._around(training, "evaluate", self._evaluated)

    def _around(self, module: Any, name: str, hook: Callable[..., Any]) -> None:
        inner = getattr(module, name)
        setattr(module, name, lambda *args, **kwargs: hook(inner, *args, **kwargs))

    # ------------------------------------------------------------------------------------------------------- before the first step

    def _initialised(self, initialise: Any, *args: Any, **kwargs: Any) -> Any:
        """Looks whether the process groups, which are there now, are as fast as planned."""
        from orchestrator.workers import megatron_groups, preflight

        done = initialise(*args, **kwargs)
        self.watchdog.phase("preflight of the groups", preflight.TIMEOUT_S)
        loop.look_at_groups(self.plan, megatron_groups.current(), self.device)
        self.watchdog.phase("building the model", loop.BUILD_S if self.plan.run.step_timeout_s else 0.0)
        return done

    def first_weights(self, chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
        """Fills the chunks with the weights of model.init_from, or those that depend on the seed alone, in any layout: runs can be
        compared."""
        from orchestrator.workers import hf_weights, weights

        self.places += weights.places(chunks) if self.plan.run.export_to else []
        for chunk in chunks:
            hf_weights.first_weights([chunk], chunk.config, self.plan)
            if self.plan.cluster.is_cpu:
                chunk.config.deallocate_pipeline_outputs = False  # gloo still reads what was sent
        return chunks

    def _filled(self, get_model: Any, provider: Any, *args: Any, **kwargs: Any) -> Any:
        return get_model(lambda *inner, **more: self.first_weights([provider(*inner, **more)])[0], *args, **kwargs)

    def _configured(self, configure: Any, *args: Any, **kwargs: Any) -> Any:
        model = configure(*args, **kwargs)
        model.pre_wrap_hooks.append(self.first_weights)
        return model

    def _loaded(self, load: Any, model: Any, optimizer: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        """Loads a checkpoint under the plan's settings. Transformer Engine's Adam is given states as they are, torch's not."""
        from orchestrator.workers import megatron_checkpoints, optimizer_formats

        megatron_checkpoints.prepare(optimizer)
        step, resume = _iteration(), self.plan.run.resume
        if step is None and resume is None:
            return load(model, optimizer, scheduler, *args, **kwargs)
        folder = OUT / checkpoint.FOLDER / f"{ITERATION}{step:07d}" if step is not None else checkpoint.find(str(resume)).folder
        written = folder / checkpoint.PLAN  # there is none yet where the run ended between Megatron's marker and ours
        before = from_json(written.read_bytes(), str(written)) if written.is_file() else self.plan
        other = (before.zero_stage == 0) != (self.plan.zero_stage == 0)
        kind = optimizer_formats.of_the_other_kind(optimizer) if other else nullcontext()
        # What Megatron itself lets torch read beside tensors is in core/safe_globals.py.
        with unpickling.refused(folder), megatron_checkpoints.with_settings_kept(optimizer, scheduler), kind:
            done = load(model, optimizer, scheduler, *args, **kwargs)
        megatron_checkpoints.count_steps_apart(optimizer)
        return done

    # -------------------------------------------------------------------------------------------------------------------- a step

    def _step(self, step: Any, forward: Any, data: Any, model: Any, optimizer: Any, scheduler: Any, config: Any, passes: Any, *args: Any,
              **kwargs: Any) -> Any:  # fmt: skip
        """Megatron's train_step, measured; its row of metrics.jsonl."""
        from megatron.training import get_args

        self.mark()
        self.write()
        args_of_run = get_args()
        done = int(args_of_run.curr_iteration)
        if self.metrics is None:
            self.metrics = loop.Metrics(self.plan, OUT, done, monitors=False)
            if self.plan.run.step_timers:
                self.timers = StepTimers(self.plan, self.device, OUT, done, loop.peak_memory)
        self.timers.begin(done)
        self.watchdog.phase(f"step {done + 1}")
        begin = time.perf_counter()
        lr = max(group["lr"] / group.get("lr_mult", 1.0) for group in optimizer.param_groups)

        def timed(*inner: Any, **more: Any) -> Any:
            self.timers.phase("passes")
            losses = passes(*inner, **more)
            self.timers.phase("update")
            return losses

        self.chunks = model
        losses, *rest = answer = step(forward, data, model, optimizer, scheduler, config, timed, *args, **kwargs)
        loop.synchronise(self.device)
        self.timers.phase("agree")
        grad_norm = rest[4]
        loss, peak = self._agreed(losses)
        seconds = time.perf_counter() - begin
        self.timers.end(done)
        norm = None if grad_norm is None else float(grad_norm)
        if not (math.isfinite(loss) and loop.norm_is_usable(norm, self.plan.training.precision)):
            raise loop.NonFiniteLossError(
                f"step {done + 1}: loss {loss:g}, gradient norm {norm}, lr {lr:g}; nothing was saved in this step"
            )
        self.done = done + 1
        training = self.plan.training
        tokens = self.plan.global_batch_size * (training.seq_length + (training.decoder_seq_length or 0))
        self.row = {"step": done + 1, "loss": loss, "grad_norm": norm, "lr": lr, "step_time_s": seconds, "tokens_per_s": tokens / seconds,
                    "peak_memory_bytes": peak}  # fmt: skip
        is_last = done + 1 == args_of_run.train_iters
        if not (args_of_run.do_valid and (is_last or (done + 1) % args_of_run.eval_interval == 0)):
            self.write()
        self.watchdog.phase(f"step {done + 1}: evaluation and checkpoint", self._aside_s)
        return answer

    def _agreed(self, losses: dict[str, torch.Tensor]) -> tuple[float, int]:
        """(loss, largest peak memory), the same on every rank: Megatron knows the mean over all replicas on the last stage."""
        values = torch.tensor([-math.inf, 0.0, loop.peak_memory(self.device)], dtype=torch.float64, device=self.device)
        if losses:
            mean = next(iter(losses.values())).detach().double().sum()
            values[0], values[1] = (mean, 0.0) if torch.isfinite(mean) else (-math.inf, 1.0)
        torch.distributed.all_reduce(values, op=torch.distributed.ReduceOp.MAX)
        loss, is_none, peak = values.tolist()
        return (math.nan if is_none else loss), int(peak)

    def _evaluated(self, evaluate: Any, *args: Any, **kwargs: Any) -> Any:
        """The row that waits gets the loss of the first set that is evaluated on."""
        answer = evaluate(*args, **kwargs)
        loss, _ = self._agreed(answer[0] or {})
        if self.row:
            self.row["valid_loss"] = loss if math.isfinite(loss) else None
            self.write()
        return answer

    def write(self) -> None:
        """The row of the step before, if it is still to be written."""
        row, self.row = self.row, {}
        if row and self.metrics is not None:
            self.metrics.write(**row)

    # --------------------------------------------------------------------------------------------------------------- checkpoints

    def _saved(self, save: Any, step: int, *args: Any, **kwargs: Any) -> Any:
        """Writes a checkpoint. Raises CheckpointError."""
        try:
            return save(step, *args, **kwargs)
        except (Exception, CheckpointException) as error:
            raise saving.failed(step, OUT, error) from error

    def mark(self) -> None:
        """Megatron has finished a checkpoint, which it may do beside the training: the run's marker names it."""
        step = _iteration() if torch.distributed.get_rank() == 0 else None
        if step is not None and step != self.saved:
            self.saved = step
            folder = OUT / checkpoint.FOLDER / f"{ITERATION}{step:07d}"
            (folder / checkpoint.PLAN).write_text(to_json(self.plan))
            checkpoint.mark(folder, step, self.plan)

    def close(self) -> None:
        self.mark()
        self.write()
        if self.metrics is not None:
            self.metrics.close()
        if self.plan.run.export_to and self.done == self.plan.training.steps:
            self.export(Path(self.plan.run.export_to))

    def export(self, folder: Path) -> None:
        """Writes a Hugging Face checkpoint of the weights as they are. All ranks call this."""
        from megatron.training.training import unwrap_model

        from orchestrator.workers import hf_weights, megatron_checkpoints, weights

        self.watchdog.phase("export", self._aside_s)
        megatron_checkpoints.gather_weights(self.chunks)
        found = [*self.places, *weights.balances(unwrap_model(self.chunks))]
        hf_weights.export(found, self.plan, folder, self.engine, lambda parameter: nullcontext())


def _iteration() -> int | None:
    """The iteration of the newest checkpoint of this run that Megatron has finished; None: there is none."""
    try:
        return int((OUT / checkpoint.FOLDER / TRACKER).read_text())
    except (OSError, ValueError):
        return None
