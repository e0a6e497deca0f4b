#!/bin/bash
# Megatron-LM, experts: a vocabulary, merges and data that are not here, arguments in arrays, a batch that grows.
export CUDA_DEVICE_MAX_CONNECTIONS=1
CHECKPOINTS=${1:-/runs/experts}
VOCAB_FILE=/data/gpt2-vocab.json
MERGE_FILE=/data/gpt2-merges.txt
GPUS_PER_NODE=8
NUM_NODES=4

DISTRIBUTED_ARGS=(--nproc_per_node $GPUS_PER_NODE --nnodes $NUM_NODES --master_addr ${MASTER_ADDR:-localhost} --master_port 6000)
MODEL_ARGS=(
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention --num-query-groups 8
    --seq-length 4096 --max-position-embeddings 32768
    --swiglu --normalization RMSNorm --position-embedding-type rope --rotary-base 1000000
    --disable-bias-linear --untie-embeddings-and-output-weights
    --attention-dropout 0.0 --hidden-dropout 0.0
)
MOE_ARGS=(
    --num-experts 8 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2
    --moe-grouped-gemm --moe-token-dispatcher-type alltoall --expert-model-parallel-size 8
)
TRAINING_ARGS=(
    --micro-batch-size 1 --global-batch-size 256 --rampup-batch-size 64 64 100000 --train-samples 2000000
    --lr 1e-4 --min-lr 1e-5 --lr-decay-style cosine --lr-warmup-samples 50000
    --weight-decay 0.1 --clip-grad 1.0 --adam-beta1 0.9 --adam-beta2 0.95 --bf16
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
)
LOGS_ARGS=(--log-interval 10 --save-interval 500 --eval-interval 500 --eval-iters 10 --save "$CHECKPOINTS" --load "$CHECKPOINTS"
    --tensorboard-dir "${CHECKPOINTS}/tensorboard" --no-load-optim --wandb-project ${WANDB_PROJECT:-experts})

torchrun "${DISTRIBUTED_ARGS[@]}" pretrain_gpt.py "${MODEL_ARGS[@]}" "${MOE_ARGS[@]}" "${TRAINING_ARGS[@]}" "${LOGS_ARGS[@]}" \
    --vocab-file $VOCAB_FILE --merge-file $MERGE_FILE --data-path /data/my_text --split 949,50,1 \
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel --use-flash-attn
