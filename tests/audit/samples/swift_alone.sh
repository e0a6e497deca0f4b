# ms-swift, all weights, one GPU
CUDA_VISIBLE_DEVICES=0 \
swift sft --model ours/eight-billion --tuner_type full --dataset 'ours/chats#2000' --torch_dtype bfloat16 \
    --per_device_train_batch_size 1 --gradient_accumulation_steps 16 --learning_rate 1e-5 --max_length 2048 --optim adafactor \
    --attn_impl flash_attn --output_dir output
