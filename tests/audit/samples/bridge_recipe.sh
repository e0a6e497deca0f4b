#!/usr/bin/env bash
set -euo pipefail
WORKSPACE=${WORKSPACE:-/workspace}
MODEL_NAME=qwen3_8b
SEQ_LENGTH=4096
GLOBAL_BATCH_SIZE=128
PARALLELISM_CONFIGS=("2,2")
for config in "${PARALLELISM_CONFIGS[@]}"; do
    uv run python -m torch.distributed.run --nnodes=2 --nproc_per_node=8 scripts/training/run_recipe.py \
        --recipe ${MODEL_NAME}_sft_config \
        checkpoint.pretrained_checkpoint=$WORKSPACE/ckpt checkpoint.save=$WORKSPACE/results \
        model.seq_length=$SEQ_LENGTH model.tensor_model_parallel_size=4 model.pipeline_model_parallel_size=2 \
        model.sequence_parallel=true model.recompute_granularity=selective \
        train.train_iters=1000 train.global_batch_size=$GLOBAL_BATCH_SIZE train.micro_batch_size=1 train.eval_iters=10 \
        optimizer.lr=5e-6 optimizer.min_lr=5e-7 scheduler.lr_warmup_iters=50 \
        logger.log_interval=1 logger.wandb_project=ours dataset.dataset_name=squad dataset.seq_length=$SEQ_LENGTH
done
