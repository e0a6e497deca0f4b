"""Which fields the programs have that plans are written for, of their sources: tool_fields.json, written anew by

    PUBLISHED=FOLDER python tests/words/tool_fields.py

where FOLDER has a checkout of each repository (owner+name, at the commit that tests/audit/published.csv names) and a wheel of
megatron-bridge 0.6.2, unpacked with the Megatron-LM that it has pinned."""

from __future__ import annotations

import ast
import json
import os
import re
import sys
from pathlib import Path
from typing import Final

import yaml

FILE: Final = Path(__file__).with_name("tool_fields.json")
BRIDGE, TRAINING = "megatron/bridge/training", "megatron/training/config"
VERL, NEMO_RL = "verl/workers/config", "nemo_rl/models/policy/__init__.py"
GENERATION: Final = "nemo_rl/models/generation"
STRATEGY: Final = "nemo/lightning/pytorch/strategies/megatron_strategy.py"
SECTIONS: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    "bridge": {
        "train": (f"{BRIDGE}/config.py TrainingConfig", f"{TRAINING}/training_config.py TrainingConfig"),
        "scheduler": (f"{BRIDGE}/config.py SchedulerConfig", f"{TRAINING}/training_config.py SchedulerConfig"),
        "dist": (f"{BRIDGE}/config.py DistributedInitConfig", f"{TRAINING}/common_config.py DistributedInitConfig"),
        "rng": (f"{TRAINING}/common_config.py RNGConfig",),
        "checkpoint": (f"{TRAINING}/training_config.py CheckpointConfig",),
        "dataset": (f"{BRIDGE}/config.py GPTDatasetConfig",),
        "mixed_precision": (f"{BRIDGE}/mixed_precision.py MixedPrecisionConfig",),
        "comm_overlap": (f"{BRIDGE}/comm_overlap.py CommOverlapConfig",),
        "model": ("@transformer_config", "megatron/bridge/models/hybrid/hybrid_provider.py HybridModelProvider"),
        "optimizer": ("@optimizer",),
        "ddp": ("@ddp",),
    },
    "nemo": {
        "trainer.strategy": (f"{STRATEGY} MegatronStrategy",),
        "trainer.plugins": ("nemo/lightning/pytorch/plugins/mixed_precision.py MegatronMixedPrecision",),
        "optim.lr_scheduler": ("nemo/lightning/pytorch/optim/lr_scheduler.py CosineAnnealingScheduler",),
        "data": ("nemo/collections/llm/gpt/data/mock.py MockDataModule",),
        "model.config": ("@transformer_config",),
        "optim.config": ("@optimizer",),
        "trainer.strategy.ddp": ("@ddp",),
    },
    "verl": {
        "actor_rollout_ref.actor": (f"{VERL}/actor.py ActorConfig",),
        "actor_rollout_ref.actor.megatron": (f"{VERL}/engine.py McoreEngineConfig", f"{VERL}/engine.py EngineConfig"),
        "actor_rollout_ref.actor.optim": (f"{VERL}/optimizer.py McoreOptimizerConfig", f"{VERL}/optimizer.py OptimizerConfig"),
        "actor_rollout_ref.actor.optim.override_optimizer_config": ("@optimizer",),
        "actor_rollout_ref.actor.megatron.override_transformer_config": ("@transformer_config",),
        "actor_rollout_ref.actor.megatron.override_ddp_config": ("@ddp",),
    },
    "ms_swift": {
        "": ("swift/megatron/arguments/megatron_args.py MegatronArguments", "swift/arguments/base_args/template_args.py TemplateArguments")
    },
    "nemo_rl": {
        "policy": (f"{NEMO_RL} PolicyConfig",),
        "policy.megatron_cfg": (f"{NEMO_RL} MegatronConfig",),
        "policy.megatron_cfg.fp8_cfg": (f"{NEMO_RL} Fp8Config",),
        "policy.megatron_cfg.distributed_data_parallel_config": (f"{NEMO_RL} MegatronDDPConfig",),
        "policy.megatron_cfg.scheduler": (f"{TRAINING}/training_config.py SchedulerConfig",),
        "policy.megatron_cfg.optimizer": ("@optimizer",),
        "policy.megatron_cfg.model_overrides": ("@transformer_config",),
    },
    "verl rollout": {
        "actor_rollout_ref.rollout": (f"{VERL}/rollout.py RolloutConfig",),
        "actor_rollout_ref.actor": (f"{VERL}/actor.py ActorConfig",),
        "actor_rollout_ref.actor.megatron": (f"{VERL}/engine.py McoreEngineConfig", f"{VERL}/engine.py EngineConfig"),
        "actor_rollout_ref.actor.fsdp_config": (f"{VERL}/engine.py FSDPEngineConfig", f"{VERL}/engine.py EngineConfig"),
        "actor_rollout_ref.ref.fsdp_config": (f"{VERL}/engine.py FSDPEngineConfig", f"{VERL}/engine.py EngineConfig"),
        "actor_rollout_ref.ref.megatron": (f"{VERL}/engine.py McoreEngineConfig", f"{VERL}/engine.py EngineConfig"),
        "critic.fsdp": (f"{VERL}/engine.py FSDPEngineConfig", f"{VERL}/engine.py EngineConfig"),
        "algorithm": ("verl/trainer/config/algorithm.py AlgoConfig",),
        "data": ("verl/trainer/config/data/legacy_data.yaml",),
        "trainer": ("verl/trainer/config/ppo_trainer.yaml trainer",),
        "critic": (f"{VERL}/critic.py McoreCriticConfig", f"{VERL}/critic.py CriticConfig"),
        "critic.megatron": (f"{VERL}/engine.py McoreEngineConfig", f"{VERL}/engine.py EngineConfig"),
        "critic.optim": (f"{VERL}/optimizer.py McoreOptimizerConfig", f"{VERL}/optimizer.py OptimizerConfig"),
    },
    "nemo_rl rollout": {
        "grpo": ("nemo_rl/algorithms/grpo.py GRPOConfig",),
        "grpo.async_grpo": ("nemo_rl/algorithms/grpo.py AsyncGRPOConfig",),
        "ppo": ("nemo_rl/algorithms/ppo.py PPOConfig",),
        "ppo.async_ppo": ("nemo_rl/algorithms/ppo.py AsyncPPOConfig",),
        "value": ("nemo_rl/models/value/config.py ValueConfig",),
        "value.sequence_packing": (f"{NEMO_RL} SequencePackingConfig",),
        "value.megatron_cfg": (f"{NEMO_RL} MegatronConfig",),
        "loss_fn": ("nemo_rl/algorithms/loss/loss_functions.py ClippedPGLossConfig",),
        "policy": (f"{NEMO_RL} PolicyConfig",),
        "policy.sequence_packing": (f"{NEMO_RL} SequencePackingConfig",),
        "policy.generation": (f"{GENERATION}/interfaces.py GenerationConfig", f"{GENERATION}/vllm/config.py VllmConfig"),
        "policy.generation.vllm_cfg": (f"{GENERATION}/vllm/config.py VllmSpecificArgs",),
        "policy.generation.colocated": (f"{GENERATION}/interfaces.py ColocationConfig",),
        "policy.generation.colocated.resources": (f"{GENERATION}/interfaces.py OptionalResourcesConfig",),
        "cluster": ("nemo_rl/distributed/virtual_cluster.py ClusterConfig",),
    },
    "slime rollout": {"": ("slime/utils/arguments.py --",)},
}
"""Classes by the section of a file whose settings are their fields: a path in the sources and a name; "@": Megatron-core's, by its section
in known.json."""


def fields(root: Path, where: str) -> list[str]:
    """The annotated fields of a class, or the arguments of its __init__; those of Megatron-core's classes by their section alone; the keys
    of a YAML's section; with "--" a command's flags."""
    if where.startswith("@"):
        return [where]
    path, _, name = where.partition(" ")
    found = next(root.glob(f"*/{path}"))
    if path.endswith(".yaml"):
        said = yaml.safe_load(found.read_text())
        return sorted(said[name] if name else said)
    if name == "--":
        return sorted(set(re.findall(r'"--([\w-]+)"', found.read_text())))
    (node,) = (node for node in ast.walk(ast.parse(found.read_text())) if isinstance(node, ast.ClassDef) and node.name == name)
    own = [one.target.id for one in node.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)]
    made = [one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"]
    return sorted({*own, *(argument.arg for one in made for argument in (*one.args.args[1:], *one.args.kwonlyargs))})


def table(root: Path) -> dict[str, dict[str, str]]:
    return {
        tool: {section: " ".join(sorted({name for where in classes for name in fields(root, where)})) for section, classes in of.items()}
        for tool, of in SECTIONS.items()
    }


if __name__ == "__main__":
    FILE.write_text(json.dumps(table(Path(os.environ["PUBLISHED"])), indent=1) + "\n")
    sys.exit(0)
