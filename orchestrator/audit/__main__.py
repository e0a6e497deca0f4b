"""usage: python -m orchestrator audit FILE [key=value ...] [--json]

Whether the configuration that you have is any good: FILE becomes a plan. Legal, or the rule that it breaks; fits, or what is missing; the
predicted time; then the three changes that gain most, each alone and together, as a diff of the same file. Nothing of FILE is run.

  python -m orchestrator audit train_gpt3.sh gpus=1024 cluster=dgx_a100_80gb
  python -m orchestrator audit ds_config.json recipe=llama3_8b gpus=16 train.seq_length=4096
  python -m orchestrator audit sft.yaml model.hf_config=config.json gpus=8

FILE, known by what is in it:
  a shell script or a line that starts Megatron-LM's or Megatron-DeepSpeed's programs, or Megatron-LM's --yaml-cfg
  YAML whose keys are Megatron-LM's flags, as Megatron-MoE-ModelZoo has it
  a ds_config.json (the model and the sequence are keys beside it; pin.recompute=full where the model checkpoints activations)
  arguments of Hugging Face's Trainer, YAML or JSON, as TRL, alignment-handbook and LLaMA-Factory have them, or behind the program of
  a shell script (deepspeed, torchrun, accelerate launch with its --config_file), whose program may read them from a file (--config)
  Axolotl's and ms-swift's configurations, ms-swift's commands (swift sft, megatron sft), slime's
  accelerate's configuration: its DeepSpeed, Megatron-LM and FSDP plugins (FSDP is priced as the ZeRO stage that shards the same)
  Megatron-Bridge's configuration or overrides, NeMo's configurations and NeMo 2's recipes, NeMo-RL's and verl's: as YAML, as words
  (path=value) of a command in a shell script, or as Python that sets the fields of a recipe (cfg.model.tensor_model_parallel_size = 2)
Keys stand over what FILE says; what it does not say (gpus=, cluster=, model.vocab_size=, recipe= or model.hf_config= for the model) is
assumed, and said, or asked for; a model that it names and a recipe describes (Qwen/Qwen3-8B) is that recipe's. pin.* over its choices.

  --json     the audit as JSON on standard output
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from orchestrator import api
from orchestrator.audit.text import show
from orchestrator.commands import command, say_json, usage, without_json
from orchestrator.console.plans import topic
from orchestrator.errors import InputError
from orchestrator.recipe import read_arguments
from orchestrator.screen import screen


def main(words: Sequence[str]) -> int:
    """Runs the command. Returns 0 for a file that is legal and fits, 1 for one that is not, 2 for one that can't be read."""
    return command(words, lambda: usage(__doc__), _audit, topic=topic)


def _audit(words: Sequence[str]) -> int:
    words, as_json = without_json(words)
    files = [word for word in words if "=" not in word]
    if len(files) != 1:
        raise InputError("audit", " ".join(files) or None, "needs one FILE")
    if files[0].startswith("-"):
        raise InputError(files[0], None, "is no option of audit", ["--json", "--help"])
    found = api.audit(files[0], **read_arguments([word for word in words if "=" in word]))
    if as_json:
        say_json(found.summary())
    else:
        show(screen(), found)
    return 0 if found.legal and found.fits else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
