# ms-swift with the Trainer
CUDA_VISIBLE_DEVICES=0,1,2,3 \
NPROC_PER_NODE=4 \
swift sft \
    --model ours/eight-billion \
    --tuner_type lora \
    --dataset 'ours/chats#20000' 'ours/self-cognition' \
    --torch_dtype bfloat16 \
    --num_train_epochs 1 \
    --per_device_train_batch_size 2 \
    --learning_rate 1e-4 \
    --lora_rank 8 --lora_alpha 32 --target_modules all-linear \
    --gradient_accumulation_steps 4 \
    --max_length 4096 --packing true --attn_impl flash_attn \
    --output_dir output --save_steps 50 --logging_steps 5 --warmup_ratio 0.05 --dataloader_num_workers 4 \
    --deepspeed zero2
