#!/usr/bin/env bash
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
MODEL_NAME=llama3_8b
CLI_OVERRIDES=" \
    checkpoint.pretrained_checkpoint=/workspace/models/$MODEL_NAME \
    train.train_iters=1000 train.global_batch_size=32 train.micro_batch_size=1 \
    scheduler.lr_warmup_iters=50 optimizer.lr=1e-4 \
    model.tensor_model_parallel_size=2 model.pipeline_model_parallel_size=1 model.sequence_parallel=True \
    dataset.seq_length=4096 model.seq_length=4096 peft.dim=16 peft.alpha=32 peft.target_modules=[linear_qkv,linear_proj]
"
srun bash -c "uv run --no-sync python /opt/Megatron-Bridge/scripts/training/run_recipe.py --recipe ${MODEL_NAME}_finetune_config \
    --peft_scheme lora $CLI_OVERRIDES"
