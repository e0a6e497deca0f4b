#!/usr/bin/env bash
set -xeuo pipefail
project_name='ours'
NNODES=${NNODES:-4}
max_prompt_length=$((1024 * 2))
max_response_length=$((1024 * 6))
train_prompt_bsz=256
n_resp_per_prompt=8
train_prompt_mini_bsz=64
offload=True
gen_tp=2
train_tp=4
train_pp=2
use_dynamic_bsz=True
actor_ppo_max_token_len=$((max_prompt_length + max_response_length))

python3 -m verl.trainer.main_ppo --config-path=config --config-name='ppo_megatron_trainer.yaml' \
    algorithm.adv_estimator=grpo \
    data.train_files=/data/train.parquet data.val_files=/data/test.parquet data.truncation='left' \
    data.train_batch_size=${train_prompt_bsz} data.max_prompt_length=${max_prompt_length} data.max_response_length=${max_response_length} \
    actor_rollout_ref.model.path=ours/eight-billion \
    actor_rollout_ref.actor.use_dynamic_bsz=${use_dynamic_bsz} \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=${actor_ppo_max_token_len} \
    actor_rollout_ref.actor.ppo_mini_batch_size=${train_prompt_mini_bsz} \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 \
    actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.optim.lr_warmup_steps=10 actor_rollout_ref.actor.optim.clip_grad=1.0 \
    actor_rollout_ref.actor.megatron.param_offload=${offload} \
    actor_rollout_ref.actor.megatron.optimizer_offload=${offload} \
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=${train_tp} \
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=${train_pp} \
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full \
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_method=uniform \
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_num_layers=1 \
    actor_rollout_ref.actor.kl_loss_coef=0.0 actor_rollout_ref.actor.entropy_coeff=0 actor_rollout_ref.actor.loss_agg_mode="token-mean" \
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.gpu_memory_utilization=0.80 actor_rollout_ref.rollout.n=${n_resp_per_prompt} \
    actor_rollout_ref.rollout.tensor_model_parallel_size=${gen_tp} actor_rollout_ref.rollout.temperature=1.0 \
    trainer.logger='["console","wandb"]' trainer.project_name="${project_name}" trainer.n_gpus_per_node=8 trainer.nnodes="${NNODES}" \
    trainer.save_freq=10 trainer.total_epochs=10 $@
