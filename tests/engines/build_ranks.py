"""Run as a program: reads plans from stdin, builds each with Megatron's own classes on the meta device, one rank of every pipeline stage,
and lets DeepSpeed's own code read each ds_config. Writes one answer a plan to stdout.

One process serves all plans: importing the engines takes longer than all of the building.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import warnings
from typing import Any

warnings.filterwarnings("ignore")
os.environ["DS_ACCELERATOR"] = "cpu"

from orchestrator.cpu import eager  # noqa: E402, F401  # isort: skip  (before the engines: a CPU compiles nothing)
import deepspeed  # noqa: E402
import deepspeed.comm.comm as ds_comm  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from deepspeed.runtime.config import DeepSpeedConfig  # noqa: E402
from deepspeed.utils import groups as ds_groups  # noqa: E402
from deepspeed_world import World  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import DistributedDataParallelConfig  # noqa: E402
from megatron.core.enums import ModelType  # noqa: E402
from megatron.core.models import backends  # noqa: E402
from megatron.core.models.bert import bert_layer_specs, bert_lm_head  # noqa: E402
from megatron.core.models.bert.bert_model import BertModel  # noqa: E402
from megatron.core.models.gpt import GPTModel, gpt_layer_specs  # noqa: E402
from megatron.core.models.T5 import t5_spec  # noqa: E402
from megatron.core.models.T5.t5_model import T5Model  # noqa: E402
from megatron.core.num_microbatches_calculator import ConstantNumMicroBatchesCalculator  # noqa: E402
from megatron.core.optimizer import OptimizerConfig  # noqa: E402
from megatron.core.pipeline_parallel.schedules import forward_backward_pipelining_with_interleaving  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from megatron.core.transformer.torch_norm import WrappedTorchNorm  # noqa: E402
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

SMALL_HIDDEN = 64
"""Models that are built for real, with memory."""

# Otherwise init_distributed compiles a shared-memory all-reduce, for a minute.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.logger.setLevel("ERROR")
gc.freeze()  # an engine of DeepSpeed's collects garbage up to five times while it is made: not through all that was imported

# Tied embeddings on two stages are moved to the GPU and summed while the model is built; a meta tensor stays where it is.
torch.Tensor.cuda = lambda self, *args, **kwargs: self


class AnyNorm:
    """Transformer Engine's norm takes sequence parallelism, torch's refuses it; the weights are the same."""

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> torch.nn.Module:
        kind = torch.nn.LayerNorm if config.normalization == "LayerNorm" else torch.nn.RMSNorm
        return kind(hidden_size, eps=eps)


def replace_norms(module: Any, seen: set[int]) -> None:
    """In every layer spec and every module that names the norm."""
    for name, value in list(vars(module).items()):
        if value is WrappedTorchNorm or name == "LNImpl":
            setattr(module, name, AnyNorm)
        elif type(value).__module__.startswith("megatron.core") and hasattr(value, "__dict__") and id(value) not in seen:
            seen.add(id(value))
            replace_norms(value, seen)


def allow_sequence_parallel_norms() -> None:
    import megatron.core.transformer.transformer_block as block

    seen: set[int] = set()
    for module in (backends, gpt_layer_specs, bert_layer_specs, bert_lm_head, t5_spec):
        replace_norms(module, seen)
    block.LayerNormImpl = AnyNorm


def transformer_config(engine: dict[str, Any], stage: int, **more: Any) -> TransformerConfig:
    fields = engine["transformer_config"] | engine["per_stage"][stage] | more
    for name in ("params_dtype", "pipeline_dtype"):
        fields[name] = getattr(torch, fields[name])
    fields["activation_func"] = getattr(torch.nn.functional, fields["activation_func"])
    return TransformerConfig(**fields, perform_initialization=False)


def build(engine: dict[str, Any], stage: int, vp_stage: int | None) -> torch.nn.Module:
    config = transformer_config(engine, stage)
    module = engine["module"]
    fields = engine["model"] | {
        "pre_process": parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        "post_process": parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
    }
    if module["class"] == "GPTModel":
        spec = gpt_layer_specs.get_gpt_layer_local_spec(normalization=config.normalization)
        return GPTModel(config, spec, vp_stage=vp_stage, **fields)
    if module["class"] == "BertModel":
        spec = bert_layer_specs.bert_layer_local_spec
        return BertModel(config=config, transformer_layer_spec=spec, vp_stage=vp_stage, **fields)
    # The stock block specs take Transformer Engine's norm for the final norm and silently have none without it.
    encoder = [t5_spec.encoder_model_with_local_spec()] * module["encoder_num_layers"]
    decoder = [t5_spec.decoder_model_with_local_spec()] * module["decoder_num_layers"]
    return T5Model(
        config=config,
        encoder_config=transformer_config(engine, stage, num_layers=module["encoder_num_layers"]),
        transformer_encoder_layer_spec=TransformerBlockSubmodules(encoder, layer_norm=AnyNorm),
        transformer_decoder_layer_spec=TransformerBlockSubmodules(decoder, layer_norm=AnyNorm),
        **fields,
    )


def layers_of(model: torch.nn.Module) -> int:
    return sum(len(block.layers) for name in ("encoder", "decoder") if (block := getattr(model, name, None)) is not None)


def build_all(plan: dict[str, Any], engine: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Per stage, per chunk: layers, and whether embedding and head are there."""
    stages = []
    for stage in range(plan["pp"]):
        dist.init_process_group("fake", rank=stage * (plan["world_size"] // plan["pp"]), world_size=plan["world_size"], store=FakeStore())
        try:
            vpp = plan["vpp"] if plan["vpp"] > 1 else None
            parallel_state.initialize_model_parallel(
                plan["tp"], plan["pp"], vpp, context_parallel_size=plan["cp"], create_gloo_process_groups=False
            )
            assert parallel_state.get_data_parallel_world_size() == plan["dp"]
            chunks = []
            for chunk in range(plan["vpp"]):
                with torch.device("meta"):
                    model = build(engine, stage, chunk if vpp else None)
                chunks.append(
                    {
                        "layers": layers_of(model),
                        "embedding": hasattr(model, "embedding"),
                        "head": getattr(model, "output_layer", None) is not None and model.post_process,
                        "parameters": sum(parameter.numel() for parameter in model.parameters()),
                    }
                )
            stages.append(chunks)
        finally:
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()
    return stages


class ReachedError(Exception):
    """The schedule took its arguments and began."""


def begin(*_: Any) -> None:
    raise ReachedError


def interleaved_refuses(pp: int, num_microbatches: int, group: int | None) -> bool:
    """Whether megatron-core's interleaved schedule refuses so many micro-batches in groups of so many before its first forward pass."""
    dist.init_process_group("fake", rank=0, world_size=pp, store=FakeStore())
    zeros = torch.zeros
    torch.zeros = lambda *args, **more: zeros(*args, **more | {"device": "cpu"})
    try:
        parallel_state.initialize_model_parallel(1, pp, 2, create_gloo_process_groups=False)
        config = TransformerConfig(
            num_layers=2 * pp,
            hidden_size=8,
            num_attention_heads=1,
            pipeline_model_parallel_size=pp,
            virtual_pipeline_model_parallel_size=2,
            pipeline_dtype=torch.float32,
            microbatch_group_size_per_vp_stage=group,
            overlap_p2p_comm=True,
            batch_p2p_comm=False,
        )
        chunks = []
        for _ in range(2):
            chunks.append(torch.nn.Module())
            chunks[-1].config, chunks[-1].model_type = config, ModelType.encoder_or_decoder
            chunks[-1].set_input_tensor = lambda _: None
        forward_backward_pipelining_with_interleaving(
            forward_step_func=begin,
            data_iterator=[None, None],
            model=chunks,
            num_microbatches=num_microbatches,
            seq_length=8,
            micro_batch_size=1,
        )
    except ReachedError:
        return False
    except (ValueError, RuntimeError) as error:
        if "contiguous micro-batches" not in str(error):
            raise
        return True
    finally:
        torch.zeros = zeros
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    raise AssertionError("the schedule ran without a forward pass")


class Groups:
    """All that DeepSpeedConfig asks of an mpu."""

    def __init__(self, dp: int) -> None:
        self.dp = dp

    def get_data_parallel_world_size(self) -> int:
        return self.dp


def read_ds_config(plan: dict[str, Any], ds_config: dict[str, Any]) -> dict[str, Any]:
    ds_comm.cdb = World(plan["world_size"])
    try:
        config = DeepSpeedConfig(json.loads(json.dumps(ds_config)), mpu=Groups(plan["dp"]))
    finally:
        ds_comm.cdb = None
    zero = config.zero_config
    return {
        "train_batch_size": config.train_batch_size,
        "micro_batch_size": config.train_micro_batch_size_per_gpu,
        "num_microbatches": config.gradient_accumulation_steps,
        "clip": config.gradient_clipping,
        "grad_accum_dtype": config.grad_accum_dtype,
        "zero_stage": int(zero.stage),
        "overlap_comm": zero.overlap_comm,
        "reduce_bucket_size": zero.reduce_bucket_size,
        "offload": zero.offload_optimizer is not None,
        "world_size": config.world_size,
        "communication_data_type": str(config.communication_data_type),
    }


class AllGroups(Groups):
    """What DeepSpeed's engine asks of an mpu; "model parallel" is TP x PP."""

    get_model_parallel_group = staticmethod(parallel_state.get_model_parallel_group)
    get_tensor_model_parallel_group = staticmethod(parallel_state.get_tensor_model_parallel_group)
    get_tensor_model_parallel_rank = staticmethod(parallel_state.get_tensor_model_parallel_rank)
    get_tensor_model_parallel_world_size = staticmethod(parallel_state.get_tensor_model_parallel_world_size)
    get_data_parallel_group = staticmethod(parallel_state.get_data_parallel_group)
    get_data_parallel_rank = staticmethod(parallel_state.get_data_parallel_rank)

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank(self.get_model_parallel_group())

    def get_model_parallel_world_size(self) -> int:
        return dist.get_world_size(self.get_model_parallel_group())


def initialise_deepspeed(plan: dict[str, Any], engine: dict[str, Any], ds_config: dict[str, Any]) -> tuple[str, str]:
    """The names of the optimizer and the schedule that DeepSpeed wraps around rank 0's stage: it takes model, groups and config."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(plan["world_size"]), MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    dist.init_process_group("fake", rank=0, world_size=plan["world_size"], store=FakeStore())
    try:
        parallel_state.initialize_model_parallel(plan["tp"], plan["pp"], create_gloo_process_groups=False)
        deepspeed.init_distributed("gloo", verbose=False)
        model = build(engine, 0, None)
        wrapped, _, _, schedule = deepspeed.initialize(
            model=model, model_parameters=list(model.parameters()), mpu=AllGroups(plan["dp"]), config=json.loads(json.dumps(ds_config))
        )
        names = type(wrapped.optimizer).__name__, type(schedule).__name__
        wrapped.destroy()
        return names
    finally:
        ds_comm.cdb = None
        ds_groups._WORLD_GROUP = None
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def answer(case: dict[str, Any]) -> dict[str, Any]:
    plan, engine = case["plan"], case["engine"]
    try:
        found: dict[str, Any] = {"stages": build_all(plan, engine)}
        calculator = ConstantNumMicroBatchesCalculator(plan["global_batch_size"], plan["micro_batch_size"], plan["dp"], False, 0)
        found["num_microbatches"] = calculator.get()
        if engine["ddp"] is not None:
            DistributedDataParallelConfig(**engine["ddp"])
            OptimizerConfig(**engine["optimizer"] | {"params_dtype": getattr(torch, engine["optimizer"]["params_dtype"])})
        if engine["ds_config"] is not None:
            found["deepspeed"] = read_ds_config(plan, engine["ds_config"])
            found["by_hand"] = read_ds_config(plan, case["by_hand"])
            if plan["model"]["hidden_size"] <= SMALL_HIDDEN and plan["training"]["precision"] != "fp16":  # a CPU has no fp16
                found["optimizer"], found["schedule"] = initialise_deepspeed(plan, engine, case["by_hand"])
    except (AssertionError, ValueError, RuntimeError, TypeError, KeyError, AttributeError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return found


if __name__ == "__main__":
    allow_sequence_parallel_norms()
    answers = [answer(case) if "plan" in case else interleaved_refuses(**case) for case in json.load(sys.stdin)]
    sys.stdout.write("\nANSWERS " + json.dumps(answers) + "\n")
