"""Megatron's own training loop, one rank of it: torchrun starts this in a run's folder with the arguments of its megatron_args.sh.

    torchrun --nproc-per-node 8 -m orchestrator.programs.megatron "${MEGATRON_ARGS[@]}"

`megatron.training` is that of the installed megatron-core (0.19 or later). Where the variable MEGATRON_LM names a checkout of Megatron-LM,
of any release, it is the checkout's, and in the place of what stands below its pretrain_gpt.py, pretrain_bert.py or pretrain_t5.py is run,
but for task=sft.
To train on another loss, data set or model copy this file, change it, and start it with entry=FILE.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

from orchestrator.programs import megatron_hooks as hooks
from orchestrator.workers.runs import planned_samples, read_plan

hooks.prepare()  # before Megatron is imported

import torch  # noqa: E402
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder  # noqa: E402
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset  # noqa: E402
from megatron.core.enums import ModelType  # noqa: E402
from megatron.core.parallel_state import get_context_parallel_group  # noqa: E402
from megatron.core.utils import get_batch_on_this_cp_rank  # noqa: E402
from megatron.training import get_args, get_tokenizer, pretrain  # noqa: E402
from megatron.training.utils import get_blend_and_blend_per_split  # noqa: E402

from orchestrator.workers.context_parallel import cut, sample_bounds  # noqa: E402
from orchestrator.workers.megatron_groups import current  # noqa: E402
from orchestrator.workers.models import packed_samples  # noqa: E402

INPUTS = {name: name for name in ("tokens", "position_ids", "attention_mask", "labels", "loss_mask")} | {"positions": "position_ids"}
"""What a data set calls what the model is given; supervised samples have the second name of positions."""


def loss(mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of one micro-batch on this rank: the sum over its tokens, their number, and what Megatron reports of both."""
    mask = mask.view(-1).float()
    summed, tokens = (losses.view(-1).float() * mask).sum(), mask.sum().detach().int()
    return summed, tokens, {"lm loss": torch.stack([summed.detach(), tokens])}


def forward_step(batches: Iterator[dict[str, Any]], model: torch.nn.Module, return_schedule_plan: bool = False) -> tuple[Any, Any]:
    """What the model makes of the next micro-batch, and the function that turns that into a loss. `return_schedule_plan`: the pass in
    parts, for --overlap-moe-expert-parallel-comm."""
    batch = {INPUTS[name]: value.cuda(non_blocking=True) for name, value in next(batches).items() if name in INPUTS}
    bounds = sample_bounds(batch["position_ids"]) if read_plan().training.packing else None
    if bounds is None:
        batch = get_batch_on_this_cp_rank(batch | {"cu_seqlens": None}, is_hybrid_cp=False, cp_group=get_context_parallel_group())
    else:  # Megatron's own asks Transformer Engine, which is only on GPUs
        batch = cut(batch, current(), bounds)
    run = model.build_schedule_plan if return_schedule_plan else model
    given = {"labels": batch["labels"], "loss_mask": batch["loss_mask"], "packed_seq_params": packed_samples(bounds)}
    return run(batch["tokens"], batch["position_ids"], batch.get("attention_mask"), **given), partial(loss, batch["loss_mask"])


def data_sets(samples: Sequence[int], vp_stage: int | None = None) -> Any:
    """For training, validation and test, each of so many samples, on every rank: the files are mapped, and nothing needs to be sent."""
    if read_plan().training.task == "sft":
        return (*planned_samples(read_plan(), *samples[:2]), None)
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    named_alike = {field.name for field in fields(GPTDatasetConfig) if field.init} & vars(args).keys()
    config = GPTDatasetConfig(
        **{name: getattr(args, name) for name in named_alike},
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        path_to_cache=args.data_cache_path,
        tokenizer=get_tokenizer(),
        create_attention_mask=args.create_attention_mask_in_dataloader,
    )
    return BlendedMegatronDatasetBuilder(MockGPTDataset if args.mock_data else GPTDataset, samples, lambda: True, config).build()


data_sets.is_distributed = True  # type: ignore[attr-defined]  # Megatron shall call it on every rank


def train() -> None:
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args  # as of 0.19
    from megatron.training.arguments import parse_and_validate_args

    args = parse_and_validate_args()
    pretrain(pretrain_cfg_container_from_args(args, gpt_config_from_args(args)), data_sets, ModelType.encoder_or_decoder, forward_step)


if __name__ == "__main__":
    hooks.run(train)
