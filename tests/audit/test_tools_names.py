"""The settings that the audit knows of the Trainer and of accelerate are those that they have, and what they take by themselves is so."""

from __future__ import annotations

import dataclasses

import pytest

from orchestrator.audit import accelerate, trainer
from orchestrator.words.terms import kinds

pytestmark = [pytest.mark.full, pytest.mark.engines]


def test_every_training_argument_is_known() -> None:
    from transformers import TrainingArguments

    fields = {field.name for field in dataclasses.fields(TrainingArguments)}
    assert fields <= {*kinds("trainer", "trainer_older")}
    assert next(field.default for field in dataclasses.fields(TrainingArguments) if field.name == trainer.MICRO) == 8


def test_every_field_of_accelerate_s_configuration_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.utils import MegatronLMPlugin

    sections = {"deepspeed_config", "fsdp_config", "parallelism_config", "megatron_lm_config"}
    assert {field.name for field in dataclasses.fields(ClusterConfig)} - sections <= {*kinds("accelerate")}
    plugin = MegatronLMPlugin()
    for name, value in accelerate.PLUGIN_DEFAULTS.items():
        assert getattr(plugin, name) == value, name
    assert {term.theirs.removeprefix(accelerate.PREFIX) for term in accelerate.PLUGIN} <= {
        field.name for field in dataclasses.fields(MegatronLMPlugin)
    }
