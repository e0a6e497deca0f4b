"""The site's file: under the user's own recipe and words, over the package's recipes."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator import recipe, run
from orchestrator.detect import Machine
from orchestrator.errors import InputError


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "site.yaml"
    path.write_text("cluster: dgx_b200\nslurm: {account: abc, partition: big}\ncluster.price_per_gpu_hour: 3\n")
    monkeypatch.setenv("ORCHESTRATOR_SITE", str(path))
    return path


def settings(*words: str) -> recipe.Settings:
    return recipe.load(words, Machine(host_memory=2**34), ["megatron"])


def test_it_stands_over_the_package_and_under_the_user(site: Path, tmp_path: Path) -> None:
    found = settings("recipe=llama3_8b", "gpus=16", "slurm.partition=small")
    assert (found.cluster.name, found.slurm.account, found.slurm.partition, found.price_per_gpu_hour) == ("dgx_b200", "abc", "small", 3.0)
    mine = tmp_path / "mine.yaml"
    mine.write_text("recipe: llama3_8b\ncluster: dgx_a100_80gb\n")
    assert settings(f"recipe={mine}", "gpus=16").cluster.name == "dgx_a100_80gb"


def test_a_saved_plan_keeps_its_cluster(site: Path, tmp_path: Path) -> None:
    assert run.main(["recipe=gpt_tiny", "gpus=4", "cluster=cpu", "launch=none", f"out={tmp_path / 'run'}"]) == 0
    found = settings(f"plan={tmp_path / 'run' / 'plan.json'}")
    assert (found.cluster.name, found.slurm.account) == ("cpu", "abc")


@pytest.mark.parametrize(("text", "said"), [("train: {lr: 1}", "train.lr=1: is a run's own"), ("gpu: 1", "gpu=1: is no key")])
def test_what_a_site_can_not_say_is_refused_with_the_file(site: Path, text: str, said: str) -> None:
    site.write_text(text + "\n")
    with pytest.raises(InputError) as refused:
        settings("recipe=gpt_tiny", "gpus=2")
    assert said in str(refused.value)
    assert str(site) in str(refused.value)


def test_a_file_that_is_named_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORCHESTRATOR_SITE", "/nowhere.yaml")
    with pytest.raises(InputError, match=r"ORCHESTRATOR_SITE=/nowhere\.yaml: no such file"):
        settings("recipe=gpt_tiny", "gpus=2")
