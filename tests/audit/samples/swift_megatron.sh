# ms-swift with Megatron
PYTORCH_CUDA_ALLOC_CONF='expandable_segments:True' \
NNODES=$WORLD_SIZE \
NODE_RANK=$RANK \
NPROC_PER_NODE=8 \
megatron sft \
    --model ours/eight-billion \
    --load_safetensors true --save_safetensors true \
    --dataset 'ours/chats#500' \
    --load_from_cache_file true \
    --tensor_model_parallel_size 4 --sequence_parallel true \
    --micro_batch_size 2 --global_batch_size 32 --packing true --max_length 8192 \
    --recompute_granularity full --recompute_method uniform --recompute_num_layers 1 \
    --finetune true --cross_entropy_loss_fusion true --attention_backend flash \
    --lr 1e-5 --lr_warmup_fraction 0.05 --min_lr 1e-6 --max_epochs 1 --save out --save_interval 200 \
    --num_workers 4 --no_save_optim true --no_save_rng true --dataset_num_proc 4
