"""verl's samples keep their own lengths, and its loss few bytes a logit: what the verdict on memory says of both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import orchestrator as so
from orchestrator.audit.audit import Audit
from orchestrator.units import GIB

QWEN2_7B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "max_position_embeddings": 32768,
    "tie_word_embeddings": False, "hidden_act": "silu", "rms_norm_eps": 1e-6,
}  # fmt: skip
PATHS = {
    "data.train_batch_size": 1024, "data.max_prompt_length": 1024, "data.max_response_length": 1024,
    "actor_rollout_ref.model.use_remove_padding": True, "actor_rollout_ref.actor.ppo_mini_batch_size": 256,
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 16, "actor_rollout_ref.actor.entropy_coeff": 0,
    "actor_rollout_ref.model.enable_gradient_checkpointing": True, "actor_rollout_ref.rollout.n": 5, "trainer.n_gpus_per_node": 8,
    "trainer.nnodes": 1,
}  # fmt: skip
"""What examples/grpo_trainer/run_qwen2-7b_math.sh says."""
LOGITS = 16 * 2048 * 152064
NAMED = "every sequence has data.max_prompt_length + data.max_response_length = 2048 tokens (use_remove_padding: shorter ones take less)"


def audited(tmp_path: Path, **changes: Any) -> Audit:
    keys = {name: changes.pop(name) for name in [*changes] if name.startswith("train.")}
    words = PATHS | {f"actor_rollout_ref.{name.replace('__', '.')}": value for name, value in changes.items()}
    line = " ".join(f"{name}={value}" for name, value in words.items())
    (tmp_path / "config.json").write_text(json.dumps(QWEN2_7B))
    (tmp_path / "run.sh").write_text(f"python3 -m verl.trainer.main_ppo {line}\n")
    return so.audit(tmp_path / "run.sh", cluster="dgx_h100", **{"model.hf_config": str(tmp_path / "config.json")}, **keys)


def peak(found: Audit) -> float:
    assert found.judged is not None
    return found.judged.peak_memory_bytes


def test_a_published_run_fits_as_its_loss_keeps_four_bytes_a_logit(tmp_path: Path) -> None:
    found = audited(tmp_path)
    assert found.fits is True
    assert NAMED in found.reading.assumed
    more = peak(audited(tmp_path, actor__entropy_coeff=0.01)) - peak(found)
    assert more == pytest.approx((14 - 4) * LOGITS, rel=0.03)


def test_what_lacks_memory_at_the_longest_samples_alone_is_no_verdict(tmp_path: Path) -> None:
    entropy = audited(tmp_path, actor__entropy_coeff=0.01)
    assert entropy.fits is None
    text = " ".join(str(entropy).split())
    assert "can't be told: with samples that all have the 2048 tokens of data.max_prompt_length + data.max_response_length it lacks" in text
    padded = audited(tmp_path, model__use_remove_padding=False)
    assert padded.fits is False, "every sample is filled to the longest"
    assert peak(padded) == pytest.approx(peak(entropy), abs=0.1 * GIB)


def test_lengths_that_are_said_are_the_verdict_s(tmp_path: Path) -> None:
    said = audited(tmp_path, actor__entropy_coeff=0.01, **{"train.seq_length": 2048})
    assert said.fits is False
    assert not any(line.startswith("every sequence has") for line in said.reading.assumed)
    by_tokens = audited(tmp_path, actor__use_dynamic_bsz=True, actor__ppo_max_token_len_per_gpu=32768, actor__entropy_coeff=0.01)
    assert by_tokens.fits is False, "the tokens of a pass are what they are, whatever the lengths"


def test_adapters_of_a_policy_are_priced_as_adapters_and_the_type_of_frozen_weights_leaves_doubt(tmp_path: Path) -> None:
    plain, tuned = audited(tmp_path), audited(tmp_path, model__lora_rank=64, model__lora_alpha=32)
    assert tuned.plan is not None
    assert tuned.plan.training.lora is not None
    assert (tuned.plan.training.lora.rank, tuned.plan.training.lora.alpha) == (64, 32)
    assert peak(tuned) < peak(plain) - 7.6e9 * 8 / 8, "no fp32 master, moments and gradients of 7.6B weights on eight ranks"
    assert any("model_dtype" in line for line in tuned.reading.unpriced)


@pytest.mark.parametrize("setting", ["use_liger", "enable_activation_offload", "tiled_mlp__enabled", "use_fused_kernels"])
def test_what_runs_a_models_layers_otherwise_is_said_to_be_unpriced(setting: str, tmp_path: Path) -> None:
    said = f"actor_rollout_ref.model.{setting.replace('__', '.')}=true"
    assert said in audited(tmp_path, **{f"model__{setting}": True}).reading.unpriced
    off = audited(tmp_path, **{f"model__{setting}": False}).reading
    assert not any(setting.split("__", maxsplit=1)[0] in line for line in off.unpriced)
