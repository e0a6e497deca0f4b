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
from orchestrator.workers import checkpoint, data, distributed, metrics, preflight, runs, saving, unpickling
from orchestrator.workers.groups import Groups
from orchestrator.workers.megatron_saves import Saves, own_checkpoint
from orchestrator.workers.runs import OUT, PlannedSamples, as_rank, read_plan
from orchestrator.workers.watchdog import Watchdog

CHECKOUT: Final = "MEGATRON_LM"
"""The variable that names a checkout."""
KINDS: Final = {"decoder": "gpt", "encoder": "bert", "encoder_decoder": "t5"}
"""What Megatron-LM calls a stack in the names of its programs."""
CONTINUE: Final = "--continue"
"""launch.sh says it where a run goes on; Megatron's --load does so in any case."""
ENCODED: Final = "data/"
"""How the prefixes of corpora begin that are made of the plan's text in the run's folder (engines/megatron/own.py)."""


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
        hooks.rows.phase("building the model", runs.BUILD_S)
        sys.argv = [word for word in sys.argv if word != CONTINUE] + hooks.saves.resumed()
        data.write_indexed(plan, OUT, [word for word in sys.argv if word.startswith(ENCODED)])
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


def supervised(train: int, valid: int, test: int) -> tuple[PlannedSamples, PlannedSamples | None, None]:
    """The supervised samples of data= and data.valid=, for so many sequences. Raises InputError."""
    plan = read_plan()
    training, held_out = runs.open_samples(plan, OUT / "data")
    mine = PlannedSamples(plan, training, train)
    if held_out is None:
        return mine, None, None
    return mine, PlannedSamples(plan, held_out, valid, runs.eval_steps(plan, held_out) * plan.global_batch_size), None


class Hooks:
    """The hooks of one rank. Megatron has hooks for the model alone (training/models/base.py, pre_wrap_hooks), from 0.19 on; its loop's
    functions are looked up in its module, and wrapped there."""

    def __init__(self, plan: Plan, engine: dict[str, Any], device: torch.device, watchdog: Watchdog) -> None:
        self.plan, self.engine, self.device, self.watchdog = plan, engine, device, watchdog
        self.rows = metrics.Rows(plan, device, OUT, watchdog)
        self.saves = Saves(plan, OUT)
        self.done = 0
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
        self.watchdog.phase("preflight of the groups", preflight.TIMEOUT_S)
        runs.look_at_groups(self.plan, megatron_groups.current(), self.device)
        self.rows.phase("building the model", runs.BUILD_S)
        return done

    def first_weights(self, chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
        """Fills the chunks with the weights of model.init_from, or those that depend on the seed alone, in any layout: runs can be
        compared. Ids that pad the vocabulary are taken out of the softmax, in which Megatron leaves them."""
        from orchestrator.workers import hf_weights, models, weights

        self.places += weights.places(chunks) if self.plan.run.export_to else []
        for chunk in chunks:
            hf_weights.first_weights([chunk], chunk.config, self.plan)
            if getattr(chunk, "output_layer", None) is not None:
                models.mask_padding(chunk.output_layer, self.plan.model.vocab_size)
            if self.plan.cluster.is_cpu:
                chunk.config.deallocate_pipeline_outputs = False  # gloo still reads what was sent
        return chunks

    def _filled(self, get_model: Any, provider: Any, *args: Any, **kwargs: Any) -> Any:
        return get_model(lambda *inner, **more: self.first_weights([provider(*inner, **more)])[0], *args, **kwargs)

    def _configured(self, configure: Any, *args: Any, **kwargs: Any) -> Any:
        model = configure(*args, **kwargs)
        model.pre_wrap_hooks.append(self.first_weights)
        return model

    def _transformer(self, configure: Any, *args: Any, **kwargs: Any) -> Any:
        """Megatron's TransformerConfig with what its command line has no word for: recompute by stage, relu, a checkpoint's GELU."""
        from orchestrator.workers import hf_weights, models

        config, plan = configure(*args, **kwargs), self.plan
        fields = self.engine.get("transformer_config", {})
        if fields and plan.run.init_from:
            hf_weights.match_activation(self.engine, Path(plan.run.init_from))
        if fields.get("activation_func") in ("relu", "gelu", "gelu_tanh"):
            config.activation_func = models.activation(fields["activation_func"])
            config.bias_activation_fusion = fields["bias_activation_fusion"]
        stage = torch.distributed.get_rank() // plan.mesh.stride("pp") % plan.pp
        for name, value in self.engine["per_stage"][stage].items() if self.engine else ():
            if value is not None or name == "recompute_granularity":
                setattr(config, name, value)
        return config

    def _loaded(self, load: Any, model: Any, optimizer: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        """Loads a checkpoint under the plan's settings."""
        from orchestrator.workers import megatron_checkpoints

        folder, resume = own_checkpoint(OUT), self.plan.run.resume
        if folder is None and resume is None:
            return load(model, optimizer, scheduler, *args, **kwargs)
        folder = folder or checkpoint.find(str(resume)).folder
        # There is no plan yet where the run ended between Megatron's marker and ours.
        before = read_plan(folder) if (folder / checkpoint.PLAN).is_file() else self.plan
        other_kind = (before.zero_stage == 0) != (self.plan.zero_stage == 0)
        # What Megatron itself lets torch read beside tensors is in core/safe_globals.py.
        with unpickling.refused(folder), megatron_checkpoints.loading(optimizer, scheduler, other_kind=other_kind):
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

        def timed(*inner: Any, **more: Any) -> Any:
            self.rows.timers.phase("passes")
            losses = passes(*inner, **more)
            self.rows.timers.phase("update")
            return losses

        self.chunks = model
        losses, *rest = answer = step(forward, batches, model, optimizer, scheduler, config, timed, *args, **kwargs)
        self.rows.agree()
        loss, peak = self._agreed(losses)
        self.done = done + 1
        seconds = self.rows.end(self.done)
        self.rows.row = metrics.row(self.plan, self.done, loss, None if rest[4] is None else float(rest[4]), lr, seconds, peak)
        if not (arguments.do_valid and (self.done == arguments.train_iters or self.done % arguments.eval_interval == 0)):
            self.rows.write()
        return answer

    def _agreed(self, losses: dict[str, torch.Tensor]) -> tuple[float, int]:
        """(loss, largest peak memory), the same on every rank: Megatron knows the mean over all replicas on the last stage."""
        mean = next((each.sum() for each in losses.values()), None)
        return metrics.agree(mean, Groups({}), self.device, stop=False)[:2]

    def _evaluated(self, evaluate: Any, *args: Any, **kwargs: Any) -> Any:
        """The row that waits gets the loss of the first set that is evaluated on."""
        answer = evaluate(*args, **kwargs)
        loss, _ = self._agreed(answer[0] or {})
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
        self.saves.close()
        self.rows.close()
        if not (self.plan.run.export_to and self.done == self.plan.training.steps):
            return
        from orchestrator.workers import megatron_checkpoints

        self.rows.phase("export", saving.limit_s(self.plan))
        megatron_checkpoints.export(self.chunks, self.places, self.plan, self.engine, Path(self.plan.run.export_to))
