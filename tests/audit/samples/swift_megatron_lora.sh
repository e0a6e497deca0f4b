# ms-swift's adapters under Megatron, beside a model with experts
NPROC_PER_NODE=8 \
CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 \
megatron sft \
    --model ours/thirty-billion \
    --save_safetensors true --merge_lora false \
    --dataset 'ours/chats#2000' --load_from_cache_file true --split_dataset_ratio 0.01 \
    --tuner_type lora --lora_rank 8 --lora_alpha 32 --target_modules all-linear all-router \
    --tensor_model_parallel_size 4 --expert_tensor_parallel_size 1 --expert_model_parallel_size 8 --sequence_parallel true \
    --moe_permute_fusion true --moe_grouped_gemm true --micro_batch_size 8 --global_batch_size 16 --max_length 2048 \
    --recompute_granularity full --recompute_method uniform --recompute_num_layers 1 \
    --finetune true --cross_entropy_loss_fusion true --attention_backend flash \
    --lr 1e-4 --lr_warmup_fraction 0.05 --min_lr 1e-5 --num_train_epochs 1 --output_dir out --save_steps 200 \
    --no_save_optim true --no_save_rng true --dataset_num_proc 8
