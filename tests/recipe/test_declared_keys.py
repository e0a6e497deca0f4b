"""What follows from a key's one declaration: the schema of a recipe, what is offered unasked, where a wrong value stands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
import yaml

from orchestrator import recipe, run
from orchestrator.detect import Machine
from orchestrator.errors import InputError
from orchestrator.job import ContainerOptions, SlurmOptions
from orchestrator.key import declared
from orchestrator.model.lora import Lora
from orchestrator.model.spec import Architecture
from orchestrator.model.training import Training
from orchestrator.plan import RunSettings
from orchestrator.recipe.keys import KEYS, Actions
from orchestrator.recipe.layers import flatten
from orchestrator.strategy.spec import OFFERED, PINNED_ONLY

SHIPPED = sorted(Path("recipes/models").glob("*.yaml"))
SCHEMA = recipe.recipe_schema()
CHECK = jsonschema.Draft202012Validator(SCHEMA)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_recipe_is_of_the_schema(path: Path) -> None:
    assert not [error.message for error in CHECK.iter_errors(yaml.safe_load(path.read_text()))]


def test_a_resolved_configuration_is_of_the_schema() -> None:
    words = (
        "recipe=gpt_tiny",
        "gpus=4",
        "data.blend=1 LICENSE 2 README.md",
        "launch.wait=true",
        "megatron.init_method_std=0.02",
        "slurm.gres=none",
    )
    resolved = recipe.resolved_yaml(recipe.load(words, Machine(host_memory=2**34), ["megatron"]))
    assert not [error.message for error in CHECK.iter_errors(yaml.safe_load(resolved))]


@pytest.mark.parametrize(
    "wrong",
    [{"train": {"lr": -1.0}}, {"train": {"learning_rate": 1.0}}, {"gpu": 4}, {"gpus": 0}, {"launch": "docker"}, {"pin": {"zero_stage": 5}},
     {"model": {"feed_forward": {"kind": "expert"}}}, {"slurm": {"partitions": "a"}}, {"train.lr": 0}, {"train": {"betas": [0.9]}}],
)  # fmt: skip
def test_what_a_recipe_can_not_say_is_not_of_the_schema(wrong: dict[str, Any]) -> None:
    assert not CHECK.is_valid(wrong)
    with pytest.raises(InputError):
        flatten(json.loads(json.dumps(wrong), parse_float=str, parse_int=str), "")


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--schema"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(SCHEMA))


def test_every_field_that_a_user_may_set_is_a_key() -> None:
    """None of them is forgotten in a list, as there is none; those that only the program fills in are named here."""
    filled_in = {"planner", "blend", "split", "lora", "lengths"}
    for struct in (Training, Lora, Architecture, RunSettings, SlurmOptions, ContainerOptions):
        fields = {info.name for info in msgspec.structs.fields(struct)}
        assert fields - {key.field for key in KEYS.values() if key.owner is struct} <= filled_in
        assert all(KEYS[key.name] is key for key in declared(struct) if not key.aliases)  # its annotations are evaluated once


def test_a_wrong_value_of_a_file_is_named_with_the_file(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("recipe: gpt_tiny\nslurm: {nodes: two}\n")
    with pytest.raises(InputError) as refused:
        recipe.load([f"recipe={mine}"], Machine(host_memory=2**34), ["megatron"])
    assert str(refused.value) == f"{mine}: slurm.nodes=two: is not a whole number, nor the least and the most: 8-16"


def test_what_is_offered_unasked_stands_where_it_is_declared() -> None:
    """All that only a pin takes, but for what is on by itself, for what graphs hold: all they can, and for what is priced by its bytes
    alone, which are more, and a size that Megatron has one of itself for."""
    on = {
        "overlap_grad_reduce",
        "overlap_param_gather",
        "cuda_graph_modules",
        "cross_entropy_loss_fusion",
        "ddp_bucket_size",
        "keep_fp8_transpose_cache",
        "moe_permute_fusion",
    }
    offered = {choice.name for choice, _ in OFFERED}
    assert offered == {choice.name for choice in PINNED_ONLY} - on | {"moe_token_dispatcher_type", "zero_shard_size", "tp_comm_overlap"}
    assert [key.name for key in declared(Training) if key.offered is not None] == ["train.precision_aware_optimizer"]


MAY_BE_NONE = {
    "seed", "slurm.requeue", "model.decoder_num_layers", "model.mtp_num_layers", "model.num_token_types", "train.keep_last",
    "train.eval_every", "train.save_every", "train.keep_every", "train.warmup", "rl.staleness",
}  # fmt: skip


def test_counts_begin_at_one_but_for_those_of_which_there_may_be_none_and_end_at_a_round_number() -> None:
    """Powers of ten, the 64 plans that tune tries and runs of one at most, and the seeds of 31 bits that numpy and Megatron take."""
    for key in KEYS.values():
        if key.low is not None:
            wanted = 0 if key.name in MAY_BE_NONE or "float" in str(key.type) else 1
            assert key.low == (2 if key.name == "tune.steps" else wanted), key.name
        if key.name == "slurm.warning_s":
            assert key.high == 65535  # sbatch's own, --signal
        elif key.high is not None and key.name != "train.lr":  # which is no count
            assert key.high in {64, 2**31 - 1, *(10**power for power in (3, 6, 9, 12, 18))}, key.name
        assert key.above in (None, 0), key.name
        assert key.below in (None, 1), key.name
    assert KEYS["seed"].high == 2**31 - 1


def test_what_is_not_said_is_trained_as_gpt_3_was_from_megatrons_seed() -> None:
    """Adam's betas, epsilon, decay and clipping: Brown et al., arXiv 2005.14165, appendix B; the seed and the padded vocabulary:
    megatron/training/arguments.py, --seed and --make-vocab-size-divisible-by."""
    training = Training(global_batch_size=8, seq_length=64)
    assert (training.betas, training.eps, training.weight_decay, training.clip) == ((0.9, 0.95), 1e-8, 0.1, 1.0)
    assert (training.seed, training.warmup, training.min_lr, training.schedule) == (1234, 0, 0.0, "cosine")
    plain = Architecture(
        family="gpt",
        name="x",
        num_layers=1,
        hidden_size=8,
        num_attention_heads=1,
        ffn_hidden_size=8,
        vocab_size=8,
        max_position_embeddings=8,
    )
    assert (plain.make_vocab_size_divisible_by, plain.rotary_base, plain.rotary_percent, plain.norm_epsilon) == (128, 10_000, 1.0, 1e-5)
    assert (plain.hidden_dropout, plain.attention_dropout) == (0.0, 0.0)


def test_a_restart_takes_five_minutes_and_a_step_that_lasts_half_an_hour_is_stuck_unless_said() -> None:
    assert (Actions().restart_s, Actions().tune_steps, Actions().tune_rounds) == (5 * 60, 10, 3)
    assert RunSettings().step_timeout_s == 30 * 60
    assert (RunSettings().eval_every, RunSettings().save_every, RunSettings().keep_last, RunSettings().keep_every) == (0, 0, 0, 0)
