"""What every run gives alike, hung into Megatron's training loop: metrics.jsonl, timers.jsonl, the marker of checkpoints, first weights
that the layout doesn't change, preflight, watchdog, and the exit statuses of known failures."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NoReturn

import torch

from orchestrator.plan import Plan
from orchestrator.workers import data, distributed, metrics, runs
from orchestrator.workers.megatron_saves import Saves
from orchestrator.workers.runs import OUT, as_rank, read_plan
from orchestrator.workers.watchdog import Watchdog

CHECKOUT: Final = "MEGATRON_LM"
"""The variable that names a checkout."""
KINDS: Final = {"decoder": "gpt", "encoder": "bert", "encoder_decoder": "t5"}
"""What Megatron-LM calls a stack in the names of its programs."""


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

    def body(plan: Plan, engine: dict[str, Any], device: torch.device, watchdog: Watchdog) -> None:
        hooks = Hooks(plan, engine, device, watchdog)
        # launch.sh says --continue where a run goes on; Megatron's --load does so in any case.
        sys.argv = [word for word in sys.argv if word != "--continue"] + hooks.saves.resumed()
        data.write_indexed(plan, OUT, sys.argv)
        hooks.install()
        checkout = os.environ.get(CHECKOUT)
        try:
            if checkout and plan.training.task == "pretrain":
                sys.argv[0] = str(program_of(Path(checkout).resolve(), KINDS[plan.model.stack]))
                runpy.run_path(sys.argv[0], run_name="__main__")
            else:
                train()
        except SystemExit as end:  # Megatron's way to stop before the last step
            if end.code:
                raise
        hooks.close()

    as_rank(body)


def summed(losses: dict[str, torch.Tensor]) -> torch.Tensor | None:
    """What Megatron reports as the loss on the last stage, a mean over all replicas; None elsewhere."""
    return next((each.sum() for each in losses.values()), None)


class Hooks:
    """The hooks of one rank. Megatron has hooks for the model alone (training/models/base.py, pre_wrap_hooks), from 0.19 on; its loop's
    functions are looked up in its module, and wrapped there."""

    def __init__(self, plan: Plan, engine: dict[str, Any], device: torch.device, watchdog: Watchdog) -> None:
        self.plan, self.engine, self.device, self.watchdog = plan, engine, device, watchdog
        self.rows, self.saves, self.done = metrics.Rows(plan, device, OUT, watchdog), Saves(plan, OUT), 0
        self.chunks: list[Any] = []
        """The chunks of the model that this rank trains, as Megatron has wrapped them."""
        self.places: list[Any] = []
        """The weights of this rank by their places in the whole model; none where nothing is exported."""

    def install(self) -> None:
        from megatron.training import argument_utils, arguments, training

        from orchestrator.workers import megatron_checkpoints

        if not self.plan.run.async_save:
            megatron_checkpoints.keep_results_here()
        if self.plan.cluster.is_cpu:
            from orchestrator.cpu import training as cpu_training

            cpu_training.start_without_cuda()
        of_loop: dict[str, Callable[..., Any]] = {
            "initialize_megatron": self._initialised, "get_model": self._filled, "load_checkpoint": self._loaded,
            "save_checkpoint": self._saved, "train_step": self._step, "evaluate": self._evaluated,
        }  # fmt: skip
        of_arguments: dict[str, Callable[..., Any]] = {
            "gpt_config_from_args": self._configured, "core_transformer_config_from_args": self._transformer,
        }  # fmt: skip
        for module, hooks in ((training, of_loop), (argument_utils, of_arguments), (arguments, of_arguments)):
            for name, hook in hooks.items():
                if hasattr(module, name):
                    setattr(module, name, partial(hook, getattr(module, name)))

    # ------------------------------------------------------------------------------------------------------- before the first step

    def _initialised(self, initialise: Any, *args: Any, **kwargs: Any) -> Any:
        """Looks whether the process groups, which are there now, are as fast as planned."""
        from orchestrator.workers import megatron_groups

        done = initialise(*args, **kwargs)
        runs.look_at_groups(self.plan, megatron_groups.current(), self.device, self.watchdog)
        return done

    def first_weights(self, chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
        """Fills the chunks with the weights of model.init_from, or those that depend on the seed alone, in any layout: runs can be
        compared."""
        from orchestrator.workers import models

        for chunk in chunks:
            self.places += models.first_weights([chunk], chunk.config, self.plan)
        return chunks

    def _filled(self, get_model: Any, provider: Any, *args: Any, **kwargs: Any) -> Any:
        return get_model(lambda *inner, **more: self.first_weights([provider(*inner, **more)])[0], *args, **kwargs)

    def _configured(self, configure: Any, *args: Any, **kwargs: Any) -> Any:
        model = configure(*args, **kwargs)
        model.pre_wrap_hooks.append(self.first_weights)
        return model

    def _transformer(self, configure: Any, *args: Any, **kwargs: Any) -> Any:
        from orchestrator.workers import models

        return models.complete(configure(*args, **kwargs), self.plan, self.engine)

    def _loaded(self, load: Any, model: Any, optimizer: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        """Loads a checkpoint under the plan's settings."""
        from orchestrator.workers import megatron_checkpoints

        with megatron_checkpoints.loading(optimizer, scheduler, self.plan, self.saves.source()):
            return load(model, optimizer, scheduler, *args, **kwargs)

    # -------------------------------------------------------------------------------------------------------------------- a step

    def _step(self, step: Any, forward: Any, batches: Any, model: Any, optimizer: Any, scheduler: Any, config: Any, passes: Any,
              *args: Any, **kwargs: Any) -> Any:  # fmt: skip
        """Megatron's train_step, measured; its row of metrics.jsonl. Raises NonFiniteLossError."""
        from megatron.training import get_args

        self.saves.mark()
        arguments = get_args()
        done = int(arguments.curr_iteration)
        self.rows.begin(done)
        lr = max(group["lr"] / group.get("lr_mult", 1.0) for group in optimizer.param_groups)
        self.chunks, timed = model, self.rows.timed(passes, "passes", "update")
        losses, *rest = answer = step(forward, batches, model, optimizer, scheduler, config, timed, *args, **kwargs)
        self.done = done + 1
        loss = self.rows.end(self.done, summed(losses))
        self.rows.keep(self.done, loss, None if rest[4] is None else float(rest[4]), lr)
        if not (arguments.do_valid and (self.done == arguments.train_iters or self.done % arguments.eval_interval == 0)):
            self.rows.write()
        return answer

    def _evaluated(self, evaluate: Any, *args: Any, **kwargs: Any) -> Any:
        """The row that waits gets the loss of the first set that is evaluated on."""
        answer = evaluate(*args, **kwargs)
        loss, *_ = metrics.agree(summed(answer[0] or {}), None, self.device, stop=False)
        if self.rows.row:
            self.rows.row["valid_loss"] = metrics.finite(loss)
            self.rows.write()
        return answer

    # --------------------------------------------------------------------------------------------------------------- checkpoints

    def _saved(self, save: Any, step: int, *args: Any, **kwargs: Any) -> Any:
        """Writes a checkpoint. Raises CheckpointError."""
        with self.saves.of(step):
            return save(step, *args, **kwargs)

    def close(self) -> None:
        """Ends the run's files, and writes a Hugging Face checkpoint of the weights once all steps are done. All ranks call this."""
        from orchestrator.workers import megatron_checkpoints

        self.saves.close()
        self.rows.close()
        if (folder := self.rows.exports(self.done)) is not None:
            megatron_checkpoints.export(self.chunks, self.places, self.plan, self.engine, folder)
