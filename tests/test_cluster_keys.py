"""Keys of Slurm, containers, variables and programs of one's own: what they are taken for."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from orchestrator.detect import Machine
from orchestrator.errors import InputError
from orchestrator.recipe import Settings, load, resolved_yaml

ENGINES = ["megatron", "megatron_deepspeed", "deepspeed"]
WORDS = ("recipe=gpt_tiny", "launch=slurm", "launch.wait=true", "env.NCCL_DEBUG=INFO", "env.X=1:2", "slurm.requeue=2", "slurm.style=srun",
         "container.image=a.sif", "entry=train.py", "entry.args=--a 'b c'", "entry.without=--async-save",
         "train.step_timeout_s=60")  # fmt: skip


def settings(*words: str) -> Settings:
    return load(words, Machine(), ENGINES)


def test_they_stand_beside_the_keys_that_they_belong_to() -> None:
    found = settings(*WORDS)
    assert (found.launch, found.wait, found.env) == ("slurm", True, {"NCCL_DEBUG": "INFO", "X": "1:2"})
    assert (found.entry, found.entry_args, found.entry_without) == (str(Path("train.py").absolute()), ("--a", "b c"), ("--async-save",))
    assert (found.slurm, found.container) == ({"requeue": "2", "style": "srun"}, {"image": "a.sif"})
    assert found.run.step_timeout_s == 60


def test_the_resolved_recipe_says_them_again(tmp_path: Path) -> None:
    found = settings(*WORDS)
    path = tmp_path / "config.yaml"
    path.write_text(resolved_yaml(found))
    again = settings(f"recipe={path}", "launch=slurm", "launch.wait=true")
    for name in ("env", "entry", "entry_args", "entry_without", "slurm", "container", "run"):
        assert getattr(again, name) == getattr(found, name), name
    assert yaml.safe_load(path.read_text())["env"] == {"NCCL_DEBUG": "INFO", "X": "1:2"}


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("env=x", "is a group of keys; write env.NAME=value"),
        ("launch.wait=maybe", "is neither"),
        ("launch.watch=true", "is no key; did you mean launch.wait"),
        ("entry.args=--a", "is for a program of your own: name it with entry=PATH"),
        ("train.step_timeout_s=-1", "must be at least 0"),
        ("container.img=x", "is no key; did you mean container.image"),
    ],
)
def test_what_they_can_not_be_is_refused(word: str, why: str) -> None:
    with pytest.raises(InputError) as refused:
        settings("recipe=gpt_tiny", word)
    assert refused.value.key == word.partition("=")[0]
    assert why in str(refused.value)
