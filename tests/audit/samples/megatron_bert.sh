#!/bin/bash
torchrun --nproc_per_node=8 pretrain_bert.py --num-layers=24 --hidden-size=1024 --num-attention-heads=16 --seq-length=512 \
    --max-position-embeddings=512 --micro-batch-size=4 --global-batch-size=32 --train-iters=1000000 --lr=1e-4 --fp16 \
    --vocab-file=bert-vocab.txt --vocab-size 30522 --data-path=my-bert_text_sentence --recompute-activations --use-legacy-models
