# Arguments of pretrain_gpt.py of Megatron-LM, tag core_v0.16.1, for 4 ranks. Source this file in bash, then for example:
#   torchrun --nnodes 1 --nproc-per-node 4 pretrain_gpt.py "${MEGATRON_ARGS[@]}"
# megatron_args.sh recomputes on every stage as much as the plan does on the stage that recomputes most: the command line has one setting for all. Our worker follows the plan.
# Megatron-LM, tag core_v0.16.1 itself needs GPUs: here megatron_args.sh is for reading.
MEGATRON_ARGS=(
  --num-layers '8'
  --seq-length '64'
  --max-position-embeddings '128'
  --hidden-size '64'
  --ffn-hidden-size '256'
  --num-attention-heads '8'
  --kv-channels '8'
  --normalization 'LayerNorm'
  --norm-epsilon '1e-05'
  --position-embedding-type 'learned_absolute'
  --attention-dropout '0.0'
  --hidden-dropout '0.0'
  --make-vocab-size-divisible-by '64'
  --attention-softmax-in-fp32
  --tensor-model-parallel-size '2'
  --pipeline-model-parallel-size '2'
  --context-parallel-size '1'
  --recompute-granularity 'full'
  --recompute-method 'block'
  --recompute-num-layers '4'
  --micro-batch-size '1'
  --global-batch-size '64'
  --train-iters '20'
  --optimizer 'adam'
  --adam-beta1 '0.9'
  --adam-beta2 '0.95'
  --adam-eps '1e-08'
  --lr '0.0003'
  --min-lr '0.0'
  --lr-decay-style 'cosine'
  --lr-decay-iters '20'
  --lr-warmup-iters '0'
  --weight-decay '0.1'
  --clip-grad '1.0'
  --seed '1234'
  --transformer-impl 'local'
  --no-gradient-accumulation-fusion
  --no-masked-softmax-fusion
  --no-persist-layer-norm
  --no-rope-fusion
  --distributed-backend 'gloo'
  --no-bias-gelu-fusion
  --no-bias-swiglu-fusion
  --no-bias-dropout-fusion
  --mock-data
  --tokenizer-type 'NullTokenizer'
  --vocab-size '499'
  --split '100,0,0'
  --eval-interval '20'
  --eval-iters '0'
  --log-interval '1'
  --tensorboard-dir 'tensorboard'
)
