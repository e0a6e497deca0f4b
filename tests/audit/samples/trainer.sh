# A user's script with the Trainer's arguments, and the ds_config that it names
deepspeed --num_gpus=8 finetune.py --deepspeed deepspeed_configs/zero3_bf16.json --model_name_or_path ours/eight-billion \
    --model_max_length 4096 --per_device_train_batch_size 2 --gradient_accumulation_steps 4 --learning_rate 1e-5 --weight_decay 0. \
    --warmup_ratio 0.03 --lr_scheduler_type cosine --logging_steps 1 --bf16 True --tf32 True --gradient_checkpointing True \
    --save_strategy steps --save_steps 500 --save_total_limit 2 --output_dir out --data_path data.json
