# TRL's own script under accelerate
accelerate launch --config_file accelerate_fsdp.yaml trl/scripts/sft.py \
    --model_name_or_path ours/eight-billion \
    --dataset_name ours/chats \
    --learning_rate 2.0e-5 --num_train_epochs 1 --packing --max_length 2048 \
    --per_device_train_batch_size 2 --gradient_accumulation_steps 8 --gradient_checkpointing \
    --attn_implementation flash_attention_2 --bf16 \
    --eos_token '<|im_end|>' --eval_strategy steps --eval_steps 100 --output_dir out --push_to_hub
