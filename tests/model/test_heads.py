"""A configuration that says what no reader has is not read as if it did not say it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import InputError
from orchestrator.model import families
from orchestrator.recipe import described

LLAMA = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 320,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize("head", ["LlamaForSequenceClassification", "LlamaForTokenClassification", "LlamaForQuestionAnswering"])
def test_another_head_is_recorded_from_its_own_code_and_no_reader_takes_it(head: str, tmp_path: Path) -> None:
    config = LLAMA | {"architectures": [head]}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert described._unread(str(path))
    with pytest.raises(InputError, match="its layers are recorded from its own code") as error:
        families.from_hf_config(config, "tiny")
    assert (error.value.key, error.value.value) == ("model.hf_config.architectures", head)


@pytest.mark.parametrize("named", [None, [], ["LlamaForCausalLM"], ["LlamaModel"]])
def test_a_head_over_a_vocabulary_is_read(named: Any) -> None:
    config = LLAMA if named is None else LLAMA | {"architectures": named}
    assert families.has_reader(config)
    assert families.from_hf_config(config, "tiny").num_layers == 2


def test_quantised_weights_are_refused_with_what_to_take_instead() -> None:
    config = LLAMA | {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    with pytest.raises(
        InputError,
        match=r"take the config\.json of the checkpoint before it, and lora\.rank= for less memory; to train from",
    ) as error:
        families.from_hf_config(config, "tiny")
    assert (error.value.key, error.value.value) == ("model.hf_config.quantization_config", "gptq")
