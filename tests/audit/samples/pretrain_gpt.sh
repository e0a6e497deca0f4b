#!/bin/bash
# A launch script as people write them: variables, arrays, a condition, a here document, a default.
#SBATCH --nodes=4
#SBATCH --gpus-per-node=8
NAME=$1
NUM_GPUS=$((8 * ${SLURM_NNODES:-4}))
TP=8
PP=${PP:-2}
PRECISION="bf16"

MODEL="--num-layers 32 --hidden-size 4096 \
    --num-attention-heads 32 \
    --seq-length 4096 --max-position-embeddings 4096"
ARGS=(
    --swiglu   # a comment
    --normalization RMSNorm
    --position-embedding-type rope --disable-bias-linear
    --untie-embeddings-and-output-weights
    --ffn-hidden-size 11008
    "--attention-dropout 0" "--hidden-dropout 0"
    --tokenizer-type Llama2Tokenizer
)
if [[ "$PRECISION" == "bf16" ]] && [ -n "$TP" ]; then
    ARGS+=(--bf16 --use-distributed-optimizer)
else
    ARGS+=(--fp16)
fi
case $PP in
    1) ;;
    *) ARGS+=(--pipeline-model-parallel-size $PP) ;;
esac
srun torchrun --nnodes 4 --nproc_per_node 8 pretrain_gpt.py $MODEL ${ARGS[@]} \
    --tensor-model-parallel-size ${TP} \
    --micro-batch-size 1 --global-batch-size 256 \
    --train-iters 1000 --lr 3e-4 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 \
    --save checkpoints/$NAME --manual-gc --not-a-flag 3
