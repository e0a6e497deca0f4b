"""plan, sweep and compare, and the same from Python: what they answer, print and refuse."""

from __future__ import annotations

import html
import json
import pickle
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import orchestrator as so
from orchestrator import api
from orchestrator.__main__ import COMMANDS, main
from orchestrator.asking import grid, questions
from orchestrator.asking.grid import beats, figures, unbeaten
from orchestrator.console.plans import tried_lines
from orchestrator.cost.uncertainty import pairs_of
from orchestrator.hardware.catalog import GPUS, POWER_W
from orchestrator.plan import from_json
from orchestrator.planning import Planner
from orchestrator.report.budget import budget
from orchestrator.units import format_count, format_seconds

TINY = ("recipe=gpt_tiny", "cluster=cpu")
LLAMA: dict[str, Any] = {"recipe": "llama3_8b", "cluster": "dgx_h100"}


def said(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> str:
    assert main(words) == status
    output = capsys.readouterr()
    assert "defect" not in output.err
    return output.out if status == 0 else output.err


# -------------------------------------------------------------------------------------------------------------- Python


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = (
        "import sys, orchestrator; heavy = {'torch', 'rich', 'yaml', 'msgspec', 'omegaconf', 'orchestrator.api'} & set(sys.modules);"
        "assert not heavy, heavy; import orchestrator.plan\n"
        "assert orchestrator.plan(recipe='gpt_tiny', gpus=2, cluster='cpu').step_time_s > 0;"
        "assert not {'torch', 'orchestrator.audit.audit'} & set(sys.modules); assert orchestrator.Audit.__name__ == 'Audit'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_plan_from_python_is_the_command_s(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = so.plan(recipe="gpt_tiny", gpus=4, cluster="cpu")
    assert capsys.readouterr().out == ""
    told = json.loads(said(capsys, "plan", *TINY, "gpus=4", "--json"))
    assert told["search_complete"]
    assert told["assumed"] == ""
    assert told["step_time_s"] == answer.step_time_s
    assert from_json(json.dumps(told["plan"])) == answer.plan
    assert answer.headroom == pytest.approx(1 - answer.peak_memory_bytes / answer.found.limit.usable)
    assert not list(folder.iterdir())


def test_what_engines_are_told_can_be_read_from_a_plan() -> None:
    megatron = so.plan(**LLAMA, gpus=8, engine="megatron")
    words = megatron.megatron_args()
    assert words[words.index("--micro-batch-size") + 1] == str(
        (Planner(megatron.settings).for_program(megatron.found) or megatron.plan).micro_batch_size
    )
    with pytest.raises(so.InputError, match=r"engine=megatron: has no ds_config.json"):
        megatron.ds_config()
    deepspeed = so.plan(**LLAMA, gpus=8, engine="deepspeed")
    assert deepspeed.ds_config()["zero_optimization"]["stage"] == deepspeed.plan.zero_stage
    with pytest.raises(so.InputError, match="engine=deepspeed: has no arguments of Megatron-LM"):
        deepspeed.megatron_args()


def test_why_not_is_answered_for_a_found_and_for_a_saved_plan(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = so.plan(recipe="gpt_tiny", gpus=4, cluster="cpu")
    why = so.explain(answer, tp=4, pp=1)
    assert why.startswith(("Why not tp=4 pp=1? ", "Why not tp=4? "))
    out = answer.write("run")
    assert (out / "plan.json").is_file()
    assert "Why not tp=3? " in said(capsys, "plan", f"plan={out / 'plan.json'}", "explain.tp=3")
    with pytest.raises(so.InputError, match=r"explain\.tq=2: is no key"):
        so.explain(answer, tq=2)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"recipe": "gpt_tiny", "gpu": 4}, "gpu=4: is no key; did you mean gpus?"),
        ({"recipe": "gpt_tiny", "out": "x"}, "out=x: is for a run: "),
        ({"recipe": "gpt_tiny", "train": {"lr": 1}, "train.lr": 2}, "train.lr=2: is given twice, first as train.lr=1"),
        ({"recipe": "gpt_tiny", "gpus": 2, "engine": "layerwise"}, "engine=layerwise: is planned by python -m orchestrator.run"),
        ({"recipe": "gpt_tiny", "gpus": "four"}, "gpus=four: is not a whole number"),
    ],
)
def test_bad_keys_from_python_get_the_command_s_messages(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(so.InputError) as refused:
        so.plan(**keys)
    assert str(refused.value).startswith(message)


# ------------------------------------------------------------------------------------------------------------- budgets


def test_days_gpu_hours_energy_and_cost_are_of_the_whole_training() -> None:
    """1,000 steps at t seconds on 8 GPUs of 700 W at 2 an hour."""
    answer = so.plan(**LLAMA, gpus=8, train={"steps": 1000, "warmup": 0}, **{"cluster.price_per_gpu_hour": 2})
    t = answer.step_time_s
    assert answer.days == pytest.approx(1000 * t / 86400)
    assert answer.gpu_hours == pytest.approx(8 * 1000 * t / 3600)
    assert answer.energy_kwh == pytest.approx(answer.gpu_hours * 0.7)
    assert answer.cost == pytest.approx(answer.gpu_hours * 2)
    assert budget(answer.plan).cost is None
    assert "8,388,608" not in str(answer)
    assert "1,000 steps, " in str(answer)


def test_the_power_of_every_gpu_of_the_catalog_is_known() -> None:
    assert {name for name in GPUS if name != "cpu"} <= set(POWER_W)


# ----------------------------------------------------------------------------------------------------------- questions


def test_the_least_gpus_reach_the_target_and_fewer_of_those_tried_do_not() -> None:
    load = api.loader({**LLAMA, "train.tokens": "100B", "target.days": 8}, "")
    answer, tried = questions.answered(load, load({}), {})
    assert answer.days <= 8
    assert answer.plan.world_size % 8 == 0
    fewer = [point for point in tried if int(point.keys["gpus"]) < answer.plan.world_size]
    assert fewer
    assert all(point.answer is None or point.answer.days > 8 for point in fewer)
    assert answer.plan == so.plan(**LLAMA, gpus=answer.plan.world_size, **{"train.tokens": "100B"}).plan


def test_a_cost_alone_asks_for_the_soonest_end_within_it(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It was 4 GPUs, the least that keep it, which take 30 times as long."""
    keys = {**LLAMA, "train.tokens": "1T", "cluster.price_per_gpu_hour": 2.5, "engine": "megatron", "pin.cp": 1, "pin.pp": 1}
    costs = {gpus: so.plan(**keys, gpus=gpus).cost for gpus in (64, 128)}
    assert costs[64] is not None
    assert costs[128] is not None
    assert costs[64] < costs[128]
    assert so.plan(**keys, gpus=128, **{"target.cost": costs[128] * 1.001}).plan.world_size == 128
    load = api.loader({**keys, "gpus": 128, "target.cost": costs[128] * 0.999}, "")
    answer, tried = questions.answered(load, load({}), {"gpus": 128})
    assert 64 <= answer.plan.world_size < 128
    assert answer.cost is not None
    assert answer.cost <= costs[128] * 0.999
    within = [point.answer for point in tried if point.answer is not None and not point.why]
    assert answer.days == pytest.approx(min(each.days for each in within))
    assert {72, 96, 120} <= {int(point.keys["gpus"]) for point in tried}, "and those between 64 and 128"
    days = answer.days * 2.2
    both = so.plan(**keys, gpus=128, **{"target.cost": costs[128] * 1.001, "target.days": days})
    assert both.plan.world_size < answer.plan.world_size, "with days: the least that do it"
    with pytest.raises(so.NoPlanError, match=r"target\.cost=9: not reached with up to 128 GPUs \(\d+ GPUs: cost \d"):
        so.plan(**keys, gpus=128, **{"target.cost": 9})
    words = ["recipe=llama3_8b", "cluster=dgx_h100", "train.tokens=1T", "gpus=16", "cluster.price_per_gpu_hour=2.5", "target.cost=1e6"]
    assert main(["plan", *words]) == 0
    assert "gpus=16: the soonest end within the cost, of 5 tried:" in capsys.readouterr().out
    monkeypatch.setattr(questions, "MOST_GPUS", 16)
    assert main(["plan", *words[:3], *words[4:]]) == 0
    assert re.search(r"gpus=16: the soonest end within the cost, of \d tried \(without gpus= 16 at most\):", capsys.readouterr().out)
    assert main(["plan", *words[:3], "gpus=24", *words[4:]]) == 0
    assert "at most" not in capsys.readouterr().out


def test_fewer_gpus_that_the_batch_divides_better_are_named_where_they_are_faster(capsys: pytest.CaptureFixture[str]) -> None:
    """15 nodes leave 15 over of a batch of 512, 14 leave 7; of 16 nothing is left over, and no other number is searched."""
    there, here = (so.plan(**LLAMA, gpus=gpus, engine="megatron") for gpus in (112, 120))
    faster = here.faster_on_fewer_gpus
    assert faster is not None
    assert (faster.world_size, faster.prediction) == (112, there.plan.prediction)
    assert here.summary()["faster_on_gpus"] == 112
    assert there.step_time_s < here.step_time_s
    assert main(["plan", "recipe=llama3_8b", "cluster=dgx_h100", "engine=megatron", "gpus=120"]) == 0
    saved = 100 * (1 - there.step_time_s / here.step_time_s)
    takes = format_seconds(there.step_time_s)
    assert f"FEWER GPUs ARE FASTER: gpus=112 takes {takes} a step (-{saved:.1f}%)\n" in capsys.readouterr().out
    assert so.plan(**LLAMA, gpus=128, engine="megatron").summary()["faster_on_gpus"] is None


def test_a_target_beyond_the_gpus_that_may_be_had_is_no_plan() -> None:
    with pytest.raises(so.NoPlanError, match=r"target\.days=0\.5: not reached with up to 8 GPUs \(8 GPUs: \d"):
        so.plan(**LLAMA, gpus=8, **{"train.tokens": "100B", "target.days": 0.5})


def test_all_gpus_that_may_be_had_are_tried_where_they_are_no_power_of_two() -> None:
    days = so.plan(**LLAMA, gpus=24, **{"train.tokens": "100B"}).days
    found = so.plan(**LLAMA, gpus=24, **{"train.tokens": "100B", "target.days": 1.01 * days})
    assert found.plan.world_size == 24


def test_a_target_asks_how_many_gpus_of_a_model_that_no_recipe_has(tmp_path: Path) -> None:
    config = {"model_type": "gpt2", "n_embd": 1024, "n_layer": 12, "n_head": 16, "vocab_size": 50257, "n_positions": 1024}
    (tmp_path / "config.json").write_text(json.dumps(config))
    train = {"global_batch_size": 64, "seq_length": 1024, "tokens": "10B"}
    keys = {"model.hf_config": str(tmp_path / "config.json"), "cluster": "dgx_h100", "train": train}
    assert so.plan(**keys, **{"target.days": 1}).days <= 1
    with pytest.raises(so.InputError, match="gpus: is missing"):
        so.plan(**keys)


def test_no_target_is_reached_with_fewer_gpus_than_it_takes_at_their_peak() -> None:
    """A bound: the fastest plan of any size needs at least as many."""
    one, other = (so.plan(**LLAMA, gpus=gpus, **{"target.tokens_per_s": 1.0}) for gpus in (8, 32))
    for answer in (one, other):
        assert questions.needed_at_peak(answer) <= answer.plan.world_size * (answer.mfu or 0)


def test_the_largest_batch_without_accumulation_has_no_more_micro_batches_than_stages() -> None:
    answer = so.plan(recipe="gpt_tiny", gpus=4, cluster="cpu", largest="global_batch_size", **{"memory.limit_gib": 0.6})
    assert answer.plan.num_microbatches <= answer.plan.pp
    assert answer.plan.training.global_batch_size > 16


def test_the_most_layers_fit_and_a_share_more_do_not() -> None:
    keys: dict[str, Any] = {"recipe": "gpt_tiny", "gpus": 2, "cluster": "cpu", "memory.limit_gib": 0.6}
    answer = so.plan(**keys, largest="num_layers")
    layers = answer.plan.model.num_layers
    assert layers > 4
    assert so.plan(**keys, model={"num_layers": layers}).plan.model == answer.plan.model
    with pytest.raises(so.NoPlanError):
        so.plan(**keys, model={"num_layers": layers + max(1, layers // questions.SHARE) + 1})


def test_the_longest_sequence_and_the_largest_batch_need_none_to_begin_with(tmp_path: Path) -> None:
    """train.seq_length= was asked for, which is what was asked."""
    config = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "vocab_size": 1000, "max_position_embeddings": 512,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    keys: dict[str, Any] = {"model": {"hf_config": str(tmp_path / "config.json")}, "gpus": 2, "cluster": "cpu"}
    longest = so.plan(**keys, largest="seq_length", train={"global_batch_size": 4})
    assert longest.plan.training.seq_length == 512
    most = so.plan(**keys, largest="global_batch_size", train={"seq_length": 512}, **{"memory.limit_gib": 0.6})
    assert most.plan.global_batch_size > 4
    with pytest.raises(so.InputError, match=r"train\.seq_length: is missing"):
        so.plan(**keys, largest="global_batch_size")


def test_the_longest_sequence_is_held_by_the_models_positions_as_train_seq_length_is() -> None:
    """It went beyond them without a word, where train.seq_length= was refused."""
    keys: dict[str, Any] = {"recipe": "llama_tiny", "gpus": 2, "cluster": "cpu", "largest": "seq_length"}
    longest = so.plan(recipe="llama_tiny", gpus=2, cluster="cpu").plan.model.max_position_embeddings
    load = api.loader(keys, "")
    answer, tried = questions.answered(load, load({}), {})
    assert answer.plan.training.seq_length == longest
    assert f"is beyond model.max_position_embeddings={longest}; raise that" in tried[-1].why
    assert tried_lines(answer, tried)[0].startswith(f"train.seq_length={longest}: the most that fits (a rule ends it, not memory), of ")
    further = so.plan(**keys, model={"max_position_embeddings": 2 * longest})
    assert further.plan.training.seq_length == 2 * longest


@pytest.mark.parametrize("command", ["plan", "run"])
def test_a_value_for_the_engine_that_the_plan_decides_otherwise_is_refused_by_every_command(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    out = ("launch=none",) if command == "run" else ()
    text = said(capsys, command, *TINY, "gpus=2", "engine=megatron_deepspeed", "ds.zero_optimization.stage=3", *out, status=2)
    assert "error: ds.zero_optimization.stage=3: contradicts the plan's zero_stage, for which it would be " in text


# --------------------------------------------------------------------------------------------------------------- sweep


def test_a_sweep_plans_for_every_combination_as_plan_does() -> None:
    found = so.sweep(recipe="gpt_tiny", cluster="cpu", gpus=[2, 4], **{"train.global_batch_size": [16, 32]})
    assert [point.keys for point in found.points][:2] == [
        {"gpus": "2", "train.global_batch_size": "16"},
        {"gpus": "2", "train.global_batch_size": "32"},
    ]
    last = found.points[-1].answer
    assert last is not None
    alone = so.plan(recipe="gpt_tiny", cluster="cpu", gpus=4, train={"global_batch_size": 32})
    assert (last.plan.candidate, last.plan.stages, last.plan.predicted) == (alone.plan.candidate, alone.plan.stages, alone.plan.predicted)


def test_a_notebook_shows_a_line_and_takes_flat_records() -> None:
    found = so.sweep(recipe="llama3_8b", cluster="dgx_h100", gpus=[8, 12])
    assert repr(found) == "<Sweep of 2 points, 1 with a plan>"
    first, second = found.table()
    assert (first["gpus"], second["gpus"]) == (8, 12)
    assert first["step_time_s"] > 0
    assert "whole number of nodes" in second["why"]
    assert not any(isinstance(value, dict | list) for value in first.values())
    shown = repr(found.points[0].answer)
    assert shown.startswith("<Answer llama3_8b, 8 x H100-SXM-80GB: megatron tp=")
    assert len(shown) < 300


def test_a_length_that_changes_the_tokens_of_a_step_says_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "mine.yaml").write_text("recipe: gpt_tiny\ntrain: {seq_length: 64}\n")
    batch = so.plan(recipe="gpt_tiny", gpus=2, cluster="cpu").plan.global_batch_size
    kept = f"batch: a step has 1,024 tokens, 0.5 times those of sequences of 128 tokens: train.global_batch_size={batch} counts sequences; "
    for words, line in (
        (("recipe=gpt_tiny", "train.seq_length=64"), kept + "32 of them have 2,048"),
        (("recipe=mine.yaml",), kept + "32 of them have 2,048"),
        (("recipe=mine.yaml", "train.seq_length=128"), ""),
        (("recipe=gpt_tiny", "train.seq_length=64", "train.global_batch_size=32"), ""),
        (("recipe=mine.yaml", "train.global_batch_size=32"), ""),
    ):
        lines = said(capsys, "plan", *words, "gpus=2", "cluster=cpu").splitlines()
        assert [each for each in lines if each.startswith("batch: ")] == [line] * bool(line), words


def test_a_batch_that_changes_the_tokens_of_a_training_says_so_and_how_to_keep_them(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tokens are what a training fixes: twice the batch at the recipe's steps is twice the days."""
    tiny = so.plan(recipe="gpt_tiny", gpus=2, cluster="cpu").plan.training
    step, batch = tiny.global_batch_size * tiny.seq_length, 2 * tiny.global_batch_size
    kept = tiny.steps * step
    line = f"steps: train.steps={tiny.steps} was said for steps of {step:,} tokens: {format_count(2 * kept)} in all now, 2 times the "
    line += f"{format_count(kept)} of then; train.tokens={kept} keeps those"
    larger = f"train.global_batch_size={batch}"
    for words, expected in (
        ((larger,), line),
        ((larger, f"train.steps={tiny.steps}"), ""),
        ((larger, f"train.tokens={kept}"), ""),
        ((larger, f"train.seq_length={tiny.seq_length // 2}"), ""),
        (("train.steps=7",), ""),
    ):
        lines = said(capsys, "plan", "recipe=gpt_tiny", *words, "gpus=2", "cluster=cpu").splitlines()
        assert [each for each in lines if each.startswith("steps: ")] == [expected] * bool(expected), words
    same = so.plan(recipe="gpt_tiny", gpus=2, cluster="cpu", train={"global_batch_size": batch, "tokens": kept})
    assert same.plan.training.steps * 2 == tiny.steps


def test_a_plan_goes_through_a_pickle_as_processes_send_it() -> None:
    for keys in (LLAMA | {"gpus": 8}, {"recipe": "qwen3_moe_tiny", "gpus": 4, "cluster": "cpu", "pin.zero_stage": 1}):
        answer = so.plan(**keys)
        again = pickle.loads(pickle.dumps(answer))
        assert again.found.searched == answer.found.searched != ()  # rules are the engine's own functions
        assert again == answer
        assert (again.plan, again.found.outcomes, str(again)) == (answer.plan, answer.found.outcomes, str(answer))
        assert again != so.plan(**keys, **{"pin.tp": 2})
        assert str(so.explain(again, tp=2)) == str(so.explain(answer, tp=2))


def test_no_point_beats_one_of_the_front_and_one_of_the_front_beats_or_equals_every_other() -> None:
    found = so.sweep(**LLAMA, gpus=[8, 16, 24, 32])
    front = [figures(point.answer) for point in found.front if point.answer]
    rest = [figures(point.answer) for point in found.points if point.answer and point not in found.front]
    assert front
    margin = pairs_of(found.front[0].answer.plan.model).half if found.front[0].answer else 0.0
    assert not any(beats(a, b, margin) for a in front for b in front)
    assert all(any(beats(a, b, margin) for a in front) for b in rest)


def test_a_row_that_is_faster_by_less_than_prices_tell_and_twice_as_dear_is_not_on_the_front() -> None:
    assert unbeaten([(100.0, 10.0), (99.9, 20.0)], 0.033) == {0}
    assert unbeaten([(100.0, 10.0), (90.0, 20.0)], 0.033) == {0, 1}, "10% faster is worth knowing"
    assert unbeaten([(100.0, 10.0), (100.0, 10.0)], 0.033) == {0, 1}, "neither beats the other"
    circle = [(1.0, 1.03, 1.06), (1.06, 1.0, 1.03), (1.03, 1.06, 1.0)]
    assert [beats(circle[a], circle[b], 0.035) for a, b in ((0, 1), (1, 2), (2, 0))] == [True] * 3
    assert unbeaten(circle, 0.035) == {0, 2}, "some row is named: one of a circle, and what it does not beat"


def test_what_has_no_plan_is_a_row_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "sweep", "recipe=llama3_8b", "cluster=dgx_h100", "gpus=8,12")
    assert "none: gpus=12: is no whole number of nodes of 8" in " ".join(text.split())
    assert "1 of 2 have a plan" in text
    assert not [line for line in text.splitlines() if line != line.rstrip()]


def test_a_row_without_a_price_is_no_cheaper_for_it(folder: Path) -> None:
    """Of clusters of which one has a price the others counted as free."""
    Path("priced.yaml").write_text("cluster: cpu\nprice_per_gpu_hour: 2\n")
    found = so.sweep(recipe="gpt_tiny", gpus=2, cluster=["priced.yaml", "cpu"])
    priced, other = (point.answer for point in found.points)
    assert priced
    assert other
    assert (priced.settings.price_per_gpu_hour, other.cost, len(found.front)) == (2, None, 2)
    assert "GPU-hours, not cost, and the chance of" in " ".join(str(found).split())


def test_an_interrupted_sweep_shows_what_it_has(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In Python Ctrl-C is raised, as everywhere."""
    plan = grid.point

    def until_sixteen(load: grid.Load, keys: Mapping[str, str]) -> grid.Point:
        if keys["gpus"] == "16":
            raise KeyboardInterrupt
        return plan(load, keys)

    monkeypatch.setattr(grid, "point", until_sixteen)
    assert main(("sweep", "recipe=llama3_8b", "cluster=dgx_h100", "gpus=8,16,32")) == 130
    output = capsys.readouterr()
    assert output.err == "interrupted: 1 of 3 combinations were planned for\n"
    assert "1 of 1 have a plan" in output.out
    with pytest.raises(KeyboardInterrupt):
        so.sweep(**LLAMA, gpus=[8, 16])


def test_a_question_is_no_setting_of_a_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    """One plan a point is made: what asks for another number of GPUs, or another length, would be passed over."""
    text = said(capsys, "sweep", *TINY, "gpus=2,4", "target.days=3", status=2)
    assert "target.days=3.0: is a question that python -m orchestrator plan answers" in text
    with pytest.raises(so.InputError, match="largest=seq_length: is a question"):
        so.sweep(recipe="gpt_tiny", cluster="cpu", gpus=[2, 4], largest="seq_length")


# ------------------------------------------------------------------------------------------------------------- compare


def test_two_plans_are_compared_cause_by_cause_to_the_last_second(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = (so.plan(recipe="gpt_tiny", gpus=4, cluster="cpu", pin={"tp": tp}) for tp in (1, 2))
    found = so.compare(one, other)
    assert repr(found).startswith("<Comparison of ")
    assert len(repr(found)) < 200
    assert sum(pair[0] for pair in found.seconds.values()) == pytest.approx(one.step_time_s)
    assert sum(pair[1] for pair in found.seconds.values()) == pytest.approx(other.step_time_s)
    for name, answer in (("a", one), ("b", other)):
        answer.write(name)
    told = json.loads(said(capsys, "compare", "plan=a,b/plan.json", "--json"))
    assert (told["one"]["step_time_s"], told["other"]["step_time_s"]) == (one.step_time_s, other.step_time_s)
    assert json.loads(said(capsys, "compare", "a", "b/plan.json", "--json")) == told
    text = said(capsys, "compare", *TINY, "gpus=4", "pin.tp=1,2")
    assert "pin.tp=2" in text
    assert "tp traffic" in text
    assert "step measured" not in text
    for name, seconds in (("a", (9.0, 2.0, 2.0, 3.0)), ("b", (9.0, 1.0, 1.0))):
        lines = (json.dumps({"step": step, "step_time_s": one, "peak_memory_bytes": 2**30}) for step, one in enumerate(seconds))
        (folder / name / "metrics.jsonl").write_text("\n".join(lines))
    told = json.loads(said(capsys, "compare", "a", "b", "--json"))
    assert told["measured"] == [
        {"steps": 2, "step_time_s": 2.5, "peak_memory_bytes": 2**30},
        {"steps": 2, "step_time_s": 1.0, "peak_memory_bytes": 2**30},
    ]
    assert told["difference_measured"] == pytest.approx(-0.6)
    assert so.compare(folder / "a", "b").difference_measured == told["difference_measured"]
    text = said(capsys, "compare", "a", "b")
    assert re.search(r"step measured +2.5 s, median of 2 +1 s, median of 2\n", text)
    assert "; measured -60.0%" in text
    assert "1.0 GiB" in text.partition("memory measured")[2].splitlines()[0]


# ------------------------------------------------------------------------------------------------------------ commands


def test_a_folder_for_gpus_without_data_says_on_what_it_would_train(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Who submits its job.sbatch is asked by nobody."""
    words = ("recipe=gpt_tiny", "gpus=8", "cluster=dgx_h100", "launch=none")
    note = "note: started as it is, this folder trains on Python's own sources"
    assert note in said(capsys, *words, "out=here")
    assert note not in said(capsys, *words, "out=trial", "data.made_up=true")


def test_the_list_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    listed = said(capsys)
    assert all(f"\n  {name} " in listed for name in COMMANDS)
    for name in ("plan", "sweep", "compare", "run"):
        assert f"orchestrator{'.' if name == 'run' else ' '}{name} key=value" in said(capsys, name, "--help")


def test_words_without_a_command_are_a_run_s(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "Not started: launch=none." in said(capsys, *TINY, "gpus=2", "launch=none", "out=here")
    assert (folder / "here" / "plan.json").is_file()


REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "unknown command": (("plam",), "error: plam: is no command; did you mean plan?"),
    "plan: unknown key": (("plan", *TINY, "gpu=2"), "error: gpu=2: is no key; did you mean gpus?"),
    "plan: launch": (("plan", *TINY, "launch=local"), "error: launch=local: is for a run: "),
    "plan: out twice": (("plan", *TINY, "out=a", "out=b"), "error: out=a,b: needs one folder"),
    "plan: out that exists": (("plan", *TINY, "gpus=2", "out=/"), "error: out=/: is a folder with files in it"),
    "plan: no number": (("plan", *TINY, "target.days=soon"), "error: target.days=soon: is not a finite number"),
    "plan: a cost without a price": (("plan", *TINY, "gpus=2", "target.cost=5"), "error: target.cost=5: needs cluster.price_per_gpu_hour"),
    "plan: two questions": (("plan", *TINY, "gpus=2", "target.days=5", "largest=num_layers"), "error: largest=num_layers: is another"),
    "plan: largest what": (("plan", *TINY, "gpus=2", "largest=width"), "error: largest=width: is not known; choose one of seq_length"),
    "plan: write without a folder": (
        ("plan", *TINY, "gpus=2", "write=pbs"),
        "error: write=pbs: writes into a folder: out=FOLDER beside it",
    ),
    "plan: a list": (("plan", *TINY, "gpus=2,4"), "error: gpus=2,4: is not a whole number"),
    "sweep: no list": (("sweep", *TINY, "gpus=2"), "error: gpus: no key has several values; sweep needs one"),
    "sweep: a value twice": (("sweep", *TINY, "gpus=2,2"), "error: gpus=2,2: has a value twice"),
    "sweep: an empty value": (("sweep", *TINY, "gpus=2,"), "error: gpus=2,: has a value twice, or none"),
    "sweep: a key twice": (("sweep", *TINY, "gpus=2,4", "gpus=8"), "error: gpus=2,4: is given twice"),
    "sweep: unknown key": (("sweep", *TINY, "gpus=2,4", "gpu=8"), "error: gpu=8: is no key; did you mean gpus?"),
    "sweep: unknown key with a list": (("sweep", *TINY, "pin.tq=2,4"), "error: pin.tq=2,4: is no key"),
    "sweep: too many": (("sweep", *TINY, f"gpus={','.join(map(str, range(1, 2100)))}"), "points with the others; at most 2,000"),
    "sweep: nothing fits": (
        ("sweep", *TINY, "gpus=2,4", "memory.limit_gib=0.001"),
        "error: none of 2 combinations has a plan; gpus=2: no plan fits",
    ),
    "sweep: out": (("sweep", *TINY, "gpus=2,4", "out=x"), "error: out=x: is for a run: "),
    "compare: one": (("compare", *TINY, "gpus=2"), "error: gpus: no key has several values; compare needs one"),
    "compare: three": (("compare", *TINY, "gpus=2,4,8"), "error: gpus=2,4,8: compare takes two values of one key"),
    "compare: two keys": (("compare", *TINY, "gpus=2,4", "pin.tp=1,2"), "compare takes two values of one key"),
    "compare: one folder": (("compare", "a"), "error: a: is not key=value, and compare takes two folders of runs"),
    "compare: no such plan": (("compare", "plan=a.json,b.json"), "error: plan=a.json: can't be read: No such file"),
    "compare: one has no plan": (("compare", *TINY, "gpus=4", "pin.tp=2,3"), "error: pin.tp=3: has no plan: "),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_can_not_be_asked_gets_one_clear_message(case: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words, message = REFUSED[case]
    error = said(capsys, *words, status=2)
    assert message in error
    assert error.count("\n") == 1
    assert not list(folder.iterdir())


def test_lists_are_not_made_of_values_with_commas_of_their_own() -> None:
    words = ["train.betas=0.8,0.9", "data.split=99,1,0", "slurm.nodelist=a,b", 'model.pattern=[{"layers": 1}, {"layers": 2}]']
    assert grid.varied(words) == (words, {})
    assert grid.varied(["cluster.levels.nvlink.bandwidth=1 GB/s,2 GB/s", "pin.tp=1,2", "train.tokens=1T,2T"])[1].keys() == {
        "cluster.levels.nvlink.bandwidth",
        "pin.tp",
        "train.tokens",
    }


def test_a_notebook_shows_what_the_commands_print(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = so.sweep(recipe="gpt_tiny", cluster="cpu", gpus=[2, 4])
    assert said(capsys, "sweep", *TINY, "gpus=2,4").startswith(str(found))
    assert "2 of 2 have a plan; none is better than another in training time," in " ".join(str(found).split()), "all would be marked"
    assert "*" not in str(found)
    assert dir(so) == sorted(["__version__", *so.__all__]), "no name of its own making"
    one, other = (point.answer for point in found.points)
    assert one is not None
    assert other is not None
    compared = so.compare(one, other)
    for shown in (found, compared, one):
        assert shown._repr_html_() == f"<pre>{html.escape(str(shown))}</pre>"
        assert not [line for line in str(shown).splitlines() if line != line.rstrip()]
    assert "step time" in str(compared)


def test_host_memory_a_warm_up_and_experts_that_are_hardly_meant_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    def lines(*words: str) -> list[str]:
        text = said(capsys, "plan", "recipe=llama3_8b", "gpus=8", "cluster=dgx_h100", *words).splitlines()
        return [line for line in text if line.startswith(("cluster.host_memory", "warm-up"))]

    assert lines("train.tokens=500B") == []
    small, long = lines("train.tokens=100B", "cluster.host_memory=256 MB")
    assert small.startswith("cluster.host_memory: 244.1 MiB is of one GPU (1.9 GiB a node of 8): hardly any machine has that")
    assert long == "warm-up: the rate rises for 8,000 of 23,842 steps, 34% of the training (train.warmup=)"
    unbalanced = ("recipe=qwen3_30b_a3b", "gpus=16", "model.aux_loss_coeff=0", "engine=megatron")
    assert "experts: no loss and no bias balances their load" in said(capsys, "plan", "cluster=dgx_h100", *unbalanced)
    (node,) = lines("train.tokens=500B", "cluster.host_memory=2 TB")
    assert "1862.6 GiB is of one GPU (14901.2 GiB a node of 8)" in node


def test_days_and_a_cost_are_reached_between_numbers_of_which_one_is_too_few_and_the_next_too_dear() -> None:
    """480 samples divide badly by 64: 32 GPUs take 9.7 hours, 64 cost 765, and it was said that up to 16,384 reach neither."""
    asked = {"recipe": "gpt2_xl", "cluster": "dgx_h100", "engine": "megatron", "train": {"global_batch_size": 480, "tokens": "50B"}}
    asked |= {"cluster.price_per_gpu_hour": 2}
    found = so.plan(**asked, target={"days": 0.375, "cost": 650})
    assert (found.plan.world_size, found.days < 0.375) == (40, True)
    assert found.cost is not None
    assert found.cost < 650
    with pytest.raises(so.NoPlanError, match=r"not reached with up to 64 GPUs \(40 GPUs: cost 6\d\d"):
        so.plan(**asked, target={"days": 0.375, "cost": 600}, gpus=64)


def test_a_plan_that_no_engine_here_trains_says_so_before_it_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It was said behind out= alone. A soft cap is in no engine's layers."""
    config = {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "hidden_size": 256, "intermediate_size": 1024,
              "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 1024,
              "max_position_embeddings": 512, "sliding_window": 256, "attn_logit_softcapping": 50.0,
              "query_pre_attn_scalar": 64}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = [f"model.hf_config={tmp_path / 'config.json'}", "gpus=8", "cluster=dgx_h100", "train.seq_length=512"]
    assert main(["plan", *words, "train.global_batch_size=64"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("plan only: ")]
    assert line == "plan only: Megatron-core has no soft cap of attention's scores"


def test_an_empty_group_of_keys_from_python_says_nothing() -> None:
    """`train=more` of a loop, whose `more` is empty at times."""
    assert so.plan(recipe="gpt_tiny", gpus=2, cluster="cpu", train={}).plan == so.plan(recipe="gpt_tiny", gpus=2, cluster="cpu").plan
    with pytest.raises(so.InputError, match=r"foo=\{\}: is no key"):
        so.plan(recipe="gpt_tiny", gpus=2, cluster="cpu", foo={})
