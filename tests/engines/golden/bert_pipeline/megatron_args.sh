# Arguments of pretrain_bert.py of Megatron-LM, tag core_v0.16.1, for 8 ranks. Source this file in bash, then for example:
#   CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun --nnodes 1 --nproc-per-node 8 pretrain_bert.py "${MEGATRON_ARGS[@]}"
# pretrain_bert.py has no mock data: add --data-path and --vocab-file of an indexed corpus and its vocabulary, and --legacy-tokenizer, without which BertWordPieceLowerCase fetches its vocabulary from the Hugging Face Hub in place of the file's.
# megatron_args.sh trains without segment embeddings: pretrain_bert.py has them with its binary head alone.
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
  --bert-no-binary-head
  --attention-dropout '0.0'
  --hidden-dropout '0.0'
  --make-vocab-size-divisible-by '64'
  --attention-softmax-in-fp32
  --tensor-model-parallel-size '2'
  --pipeline-model-parallel-size '2'
  --context-parallel-size '1'
  --sequence-parallel
  --use-distributed-optimizer
  --overlap-grad-reduce
  --overlap-param-gather
  --micro-batch-size '1'
  --global-batch-size '64'
  --train-iters '20'
  --bf16
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
  --transformer-impl 'transformer_engine'
  --tokenizer-type 'BertWordPieceLowerCase'
  --padded-vocab-size '512'
  --split '100,0,0'
  --eval-interval '20'
  --eval-iters '0'
  --log-interval '1'
  --tensorboard-dir 'tensorboard'
)
