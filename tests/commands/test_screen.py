"""What plan and run print unasked: the plan, its time, memory and risk, alternatives of other kinds, what to do next, in under 40 lines;
and that what is printed can be typed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import orchestrator as so
from orchestrator import recipe
from orchestrator.__main__ import main
from orchestrator.detect import Machine
from orchestrator.engines.megatron_versions import release_of
from orchestrator.errors import InputError
from orchestrator.model.training import Training
from orchestrator.plan import RunSettings, Source, from_json
from orchestrator.recipe import KEYS
from orchestrator.recipe.documents import FIELDS, HEADER
from orchestrator.recipe.whole_data import passes
from orchestrator.report.text import choice
from orchestrator.screen import FILE_WIDTH, next_text
from orchestrator.strategy.spec import OUTER_CHOICES

CASES = (
    ["recipe=llama3_70b", "gpus=64"],
    ["recipe=deepseek_v3", "gpus=512", "cluster=dgx_h100", "cluster.price_per_gpu_hour=2"],
    ["recipe=qwen3_235b_a22b", "gpus=256"],
    ["recipe=qwen3_next_80b_a3b", "gpus=64", "cluster=dgx_h100"],
    ["recipe=gpt_tiny", "gpus=4", "cluster=cpu"],
    ["recipe=t5_large", "gpus=1", "cluster=dgx_h100"],
    ["recipe=llama3_8b", "train.tokens=1T", "cluster=dgx_h100", "target.days=10"],
)
ROW = re.compile(r"^ +(\d) +(\S.*?)  +[\d.]+ \w+ +[\d.]+ .iB", re.MULTILINE)


@pytest.mark.parametrize("words", CASES, ids=lambda words: words[0])
def test_a_screen_has_what_a_user_asks_first_in_under_forty_lines(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words]) == 0
    said = capsys.readouterr().out
    assert sum(max(1, -(-len(line) // FILE_WIDTH)) for line in said.splitlines()) < 40, "as a terminal of 120 columns wraps them"
    starts = ["parallel", "predicted", "time", "memory", *(["risk:"] if "cluster=cpu" not in words else []), "training:", "Next:"]
    places = [re.search(rf"^{start}", said, re.MULTILINE) for start in starts]
    assert all(places)
    assert [place.start() for place in places if place] == sorted(place.start() for place in places if place)
    plans = [plan for _, plan in ROW.findall(said)]
    assert len(plans) == 4, "the plan, and three of other kinds"
    meshes = {tuple(word for word in plan.split() if re.match(r"(tp|pp|cp|ep|dp|mbs)=|\w+speed$|megatron$", word)) for plan in plans}
    assert len(meshes) == 4


def test_a_run_says_as_little_and_verbose_says_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["recipe=llama3_70b", "gpus=64", "launch=none"]
    assert main(["run", *words, f"out={tmp_path / 'brief'}"]) == 0
    brief = capsys.readouterr().out
    assert main(["run", *words, "verbose=true", f"out={tmp_path / 'all'}"]) == 0
    whole = capsys.readouterr().out
    assert len(brief.splitlines()) < 40 < len(whole.splitlines())
    assert "verbose=true" in brief
    assert "verbose=true" not in whole
    for only in ("recompute   forward", "Data parallelism alone", "choices had to be priced", "left as they are unless pinned"):
        assert only in whole
        assert only not in brief


def test_overlap_that_the_plan_has_is_not_said_to_need_a_pin() -> None:
    said = str(so.plan(recipe="llama3_70b", gpus=64, verbose=True))
    assert "left as they are unless pinned: overlap_grad_reduce=true, overlap_param_gather=true" in said
    assert "only with a pin" not in said


@pytest.mark.parametrize("take", [1, 2, 4])
def test_each_row_of_the_table_is_taken_by_its_number(take: int, tmp_path: Path) -> None:
    keys = {"recipe": "llama3_70b", "gpus": 64, "cluster": "dgx_h100"}
    first, taken = so.plan(**keys), so.plan(**keys, take=take)
    plans = [first.plan, *first.found.alternatives]
    assert taken.plan.candidate == plans[take - 1].candidate
    assert {plan.candidate for plan in taken.found.alternatives} == {plan.candidate for plan in plans} - {taken.plan.candidate}
    (row,) = (line for line in str(taken).splitlines() if line.rstrip().endswith("chosen"))
    assert row.split()[0] == str(take), "the table numbers them as before"
    folder = taken.write(tmp_path / "run")
    assert from_json((folder / "plan.json").read_text(), "plan.json").candidate == plans[take - 1].candidate
    assert so.plan(recipe=str(folder / "config.yaml")).plan.candidate == plans[take - 1].candidate, "config.yaml gives the same plan"


def test_what_was_not_asked_for_is_beside_the_fastest_whichever_row_is_taken() -> None:
    keys = {"recipe": "llama3_70b", "gpus": 256, "cluster": "dgx_a100_80gb"}
    first, second = (so.plan(**keys, take=take) for take in (1, 2))
    gains = [[(one.key, one.plan.prediction.step_time_s) for one in answer.found.unasked] for answer in (first, second)]
    assert gains[0] == gains[1] != [], "none is credited with what take=1 has without it"
    seconds, of = gains[0][0][1], (first.plan.prediction.step_time_s, second.plan.prediction.step_time_s)
    assert of[0] < of[1]
    assert f": {100 * (seconds / of[0] - 1):+.1f}% beside the fastest of the table, " in str(second)
    assert "Another of the table is proven the fastest of the plans" in str(second)
    assert "Proven the fastest of the plans" in str(first)


def test_a_plan_written_without_a_run_mounts_what_its_ranks_read(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("words\n" * 1000)
    keys = {"recipe": "llama3_8b", "gpus": 8, "cluster": "dgx_h100", "data": str(corpus), "container": {"image": "a/b"}}
    said = so.plan(**keys, write="kubernetes")
    folder = said.write(tmp_path / "run")
    assert f"{corpus}:{corpus}:ro" in (folder / "job.sbatch").read_text()
    assert str(corpus) in (folder / "kubernetes.yaml").read_text()
    assert f"data: {corpus}, byte by byte, as tokenizer= is not given; about " in str(said)


def test_how_often_each_source_is_passed_is_said_before_the_start(tmp_path: Path) -> None:
    """A blend of 5 MB of text was planned for 50B tokens without a word on its 9,000 epochs."""
    for name, size in (("web.jsonl", 3_200_000), ("math.jsonl", 400_000)):
        (tmp_path / name).write_text('{"text": "%s"}\n' % ("a" * (size - 13)))
    keys = {"recipe": "llama3_8b", "gpus": 8, "cluster": "dgx_h100", "train": {"tokens": "10B", "warmup": 0}}
    said = str(so.plan(**keys, data={"blend": f"0.9 {tmp_path / 'web.jsonl'} 0.1 {tmp_path / 'math.jsonl'}"}))
    assert "; about 2,813 epochs of web.jsonl, 2,501 epochs of math.jsonl" in said
    assert (
        "warning: web.jsonl is passed about 2,813 times, math.jsonl is passed about 2,501 times: tokens that are seen more than 4" in said
    )
    few = str(so.plan(**keys | {"train": {"steps": 1, "global_batch_size": 8, "warmup": 0}}, data=str(tmp_path / "web.jsonl")))
    assert "; about 0.02 epochs of web.jsonl" in few
    assert "warning: web.jsonl" not in few


def test_what_fine_tuning_begins_with_and_what_is_cut_off_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Adapters of a frozen 70B of random weights had a job.sbatch without a word, and a mean of cut samples none on what was cut."""
    lengths, out = tmp_path / "lengths.txt", tmp_path / "out"
    lengths.write_text("1000\n3000\n6000\n" * 20)
    sft = ["task=sft", f"data.lengths={lengths}", "train.seq_length=4000", "train.global_batch_size=8", "train.steps=10", "train.warmup=0"]
    on_gpus = ["plan", "recipe=llama3_8b", "gpus=8", "cluster=dgx_h100", "engine=deepspeed", *sft]
    assert main([*on_gpus, "lora.rank=8", f"out={out}"]) == 0
    said = capsys.readouterr().out
    random = "weights: none named (model.init_from=CHECKPOINT), so they are random"
    learns_nothing = f"{random}: adapters beside frozen random weights learn nothing\n"
    assert said.count(f"\n{learns_nothing}") == said.count(f"\nnote: {learns_nothing}") == 1
    assert "samples: 2,667 tokens in the mean, 6,000 at most; 20% of all tokens are cut off at train.seq_length=4000, the mean is" in said
    assert len(said.splitlines()) < 40
    elsewhere = "/not_mounted_here/weights"
    for words, line in (
        (on_gpus, f"\n{random}\n"),
        ([*on_gpus[: -len(sft)], "lora.rank=8"], f"\n{learns_nothing}"),
        ([*on_gpus, f"model.init_from={elsewhere}"], None),
        (["plan", "recipe=llama_tiny", "gpus=2", "cluster=cpu", "task=sft", "data.lengths=40+0"], None),
        (on_gpus[: -len(sft)], None),
    ):
        assert main(words) == 0
        said = capsys.readouterr().out
        assert line in said if line else "weights: none named" not in said
        assert "are cut off" in said if sft[-1] in words else "are cut off" not in said


def test_epochs_are_of_samples_that_somebody_counted() -> None:
    """data.lengths= as a mean says no number: 287 epochs were warned of."""
    keys = {"recipe": "qwen3_8b_sft", "gpus": 8, "cluster": "dgx_h100", "train": {"steps": 10000}}
    said = str(so.plan(**keys, data={"lengths": "900+600"}))
    assert "epochs" not in said


def test_an_index_counts_its_own_tokens_and_a_tokenizer_s_are_of_four_bytes(tmp_path: Path) -> None:
    prefix = tmp_path / "ids"
    prefix.with_suffix(".bin").write_bytes(bytes(4 * 2048))
    prefix.with_suffix(".idx").write_bytes(HEADER + FIELDS.pack(1, 4, 1, 2))
    (tmp_path / "a.txt").write_bytes(b"a" * 4096)
    training = Training(global_batch_size=8, seq_length=256, steps=3, lr=1.0)
    assert passes(RunSettings(data=str(prefix)), training) == {str(prefix): 3.0}
    assert passes(RunSettings(data=str(prefix), split=(50.0, 50.0, 0.0)), training) == {str(prefix): 6.0}
    text = str(tmp_path / "a.txt")
    assert passes(RunSettings(data=text), training) == {text: 1.5}
    assert passes(RunSettings(data=text, tokenizer="/llama"), training) == {text: 6.0}
    both = (Source(weight=1.0, path=text), Source(weight=3.0, path=str(prefix)))
    assert passes(RunSettings(blend=both, tokenizer="/llama"), training) == {text: 1.5, str(prefix): 2.25}
    assert passes(RunSettings(data=str(tmp_path / "elsewhere.jsonl")), training) == {}
    assert passes(RunSettings(), training) == {}


def test_values_of_the_training_that_nobody_gave_are_said_with_their_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"model_type": "gpt2", "n_layer": 4, "n_head": 4, "n_embd": 256, "n_positions": 512, "vocab_size": 1000}
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ["plan", f"model.hf_config={tmp_path / 'config.json'}", "gpus=8", "cluster=dgx_h100", "train.global_batch_size=16"]
    words += ["train.seq_length=512", "train.min_lr=1e-5"]
    assert main([*words, f"out={tmp_path / 'run'}"]) == 0
    said = "assumed: train.lr=0.0003 train.warmup=0 train.steps=20, as neither the recipe nor you gave them\n"
    assert said in capsys.readouterr().out
    assert main([*words, "train.lr=1e-4", "train.warmup=2", "train.tokens=1M"]) == 0
    assert main(["plan", f"plan={tmp_path / 'run' / 'plan.json'}"]) == 0
    assert "assumed:" not in capsys.readouterr().out


def test_a_plan_that_is_written_has_the_notes_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["recipe=llama3_70b", "gpus=64", "cluster=dgx_h100"]

    def notes(*command: str) -> list[str]:
        assert main([*command, *words, f"out={tmp_path / command[0]}"]) == 0
        said = capsys.readouterr().out
        assert "out=FOLDER" not in said, "it is written"
        return [line for line in said.splitlines() if line.startswith("note: ")]

    assert notes("plan") == notes("run", "launch=none") != []


def test_a_time_limit_and_requeues_that_end_before_the_training_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "recipe=llama3_8b", "gpus=16", "cluster=dgx_h100", "train.tokens=100B", "slurm.time=12:00:00", "train.save_every=100"]
    for requeue, often in ((0, ""), (3, " and slurm.requeue=3")):
        assert main([*words, f"slurm.requeue={requeue}", f"out={tmp_path / str(requeue)}"]) == 0
        said = capsys.readouterr().out
        part = re.search(rf"note: slurm.time=12:00:00{often} is (.*) of (.*) days that all steps take: slurm.requeue=(\d+) goes on", said)
        assert part is not None
        assert part[1] == ("12 hours" if not requeue else "2 days")
        assert float(part[2]) == pytest.approx(int(part[3]) / 2, abs=0.6)
    assert main([*words, f"slurm.requeue={part[3]}", f"out={tmp_path / 'whole'}"]) == 0
    assert "slurm.time=" not in capsys.readouterr().out
    assert main([*words[:-1], "train.save_every=0", f"out={tmp_path / 'unsaved'}"]) == 0
    assert f"slurm.requeue={part[3]} with train.save_every= goes on to the end" in capsys.readouterr().out


def test_a_long_training_keeps_its_last_step_unasked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["recipe=llama3_8b", "gpus=16", "cluster=dgx_h100", "train.warmup=0"]
    saved = (["train.steps=9000"], ["train.steps=20"], ["train.steps=9000", "train.save_every=0"])
    plan, short, none = (so.plan(**dict(word.split("=") for word in (*words, *more))).plan for more in saved)
    assert (plan.run.save_every, short.run.save_every, none.run.save_every) == (9000, 0, 0)
    assert main(["plan", *words, "train.steps=9000", f"out={tmp_path / 'plan'}"]) == 0
    said = capsys.readouterr().out
    assert re.search(
        r"note: train.save_every=9000: the last step of .* days of training has the only checkpoint, .* writes one an hour", said
    )
    assert "--save-interval '9000'" in (tmp_path / "plan" / "megatron_args.sh").read_text()
    assert "save_every" not in (tmp_path / "plan" / "config.yaml").read_text(), "the same again"


def test_a_long_training_that_never_saves_is_told_the_key_and_an_interval(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run of days without a checkpoint is lost whole at the first failure; one of seconds is not worth a word."""
    long = ["recipe=llama3_8b", "gpus=16", "cluster=dgx_h100", "train.tokens=100B"]
    never = "train.save_every=0"
    failing = ["cluster.mtbf=2000", "cluster.storage=50GB/s"]

    def notes(*words: str) -> list[str]:
        out = tmp_path / str(len(list(tmp_path.iterdir())))
        assert main(["run", *words, "launch=none", f"out={out}"]) == 0
        said = capsys.readouterr().out
        best.extend(re.findall(r"best is (train.save_every=\d+) ", said))
        return [line for line in said.splitlines() if line.startswith("note: train.save_every=0: no checkpoint is written in ")]

    best: list[str] = []
    (hourly,) = notes(*long, never)
    assert re.search(
        r" days of training, nor of the last step; train.save_every=\d+ writes one an hour, of up to .* GiB, and the last$", hourly
    )
    (stated,) = notes(*long, never, *failing, "slurm.requeue=2")
    assert "; after a failure slurm.requeue=2 begins at the first step again; " in stated
    assert f"; {best[0]} writes one in " in stated
    assert notes(*long, "train.save_every=500") == []
    assert notes(*long[:-1], "train.steps=20", "train.warmup=0") == []
    assert len(notes(*long[:-1], "train.steps=20", "train.warmup=0", "slurm.requeue=2")) == 1


@pytest.mark.parametrize("mark", [":", ","])
def test_a_folder_that_a_container_cannot_mount_is_refused(mark: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / f"a{mark}b"
    words = ["plan", "recipe=gpt_tiny", "gpus=8", "cluster=dgx_h100", f"out={out}"]
    assert main([*words, "container.image=a/b"]) == 2
    assert f'error: out={out}: has ":" or ",", at which the mounts of a container are divided' in capsys.readouterr().err
    assert not out.exists()
    assert main(words) == 0


@pytest.mark.parametrize("name", ["verl", "nemo_rl", "slime"])
def test_a_pretraining_in_the_words_of_rollouts_says_whose_rates_they_are(name: str) -> None:
    pretrained = so.plan(recipe="llama3_8b", gpus=8, cluster="dgx_h100", engine="megatron").written(name)
    assert all("are of the recipe's pretraining; an update after rollouts: python" in text for text in pretrained.values())


def test_gpus_that_a_batch_leaves_over_are_said_with_the_nearest_that_it_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    said = {
        ("gpus=72", "train.global_batch_size=512"): (
            "gpus=72 has the factor 9, which global_batch_size=512 has not: no data parallelism takes it, tp, pp or cp must; "
            "train.global_batch_size=504 or 576, or gpus=64 or 128, leaves none"
        ),
        ("gpus=64",): "",
        ("gpus=80",): "",  # five stages of 16 layers
    }
    for words, line in said.items():
        assert main(["plan", "recipe=llama3_70b", "cluster=dgx_h100", *words]) == 0
        printed = capsys.readouterr().out
        assert line in printed
        assert ("has the factor" in printed) == bool(line)


def test_a_number_that_is_in_no_table_is_refused() -> None:
    with pytest.raises(InputError, match=r"take=9: is more than the 4 that a search shows"):
        so.plan(recipe="llama3_70b", gpus=64, take=9)
    for beside in ("tune=3", "largest=seq_length", "target.days=3"):
        with pytest.raises(InputError, match="take=2: names one of a search's plans"):
            recipe.load(("recipe=llama3_70b", "gpus=64", "take=2", beside), Machine(), ("megatron",))


def test_a_table_of_many_plans_has_no_more_to_say() -> None:
    with pytest.raises(InputError, match="verbose=true: is for the screen of one plan"):
        so.sweep(recipe="gpt_tiny", gpus=[2, 4], cluster="cpu", verbose=True)


def test_two_rows_of_the_table_can_be_compared(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "recipe=llama3_70b", "gpus=64", "take=1,2"]) == 0
    assert "take=2 takes +" in capsys.readouterr().out


def test_each_name_that_a_plan_is_printed_with_is_a_pins() -> None:
    for each in OUTER_CHOICES:
        assert f"pin.{each.short}" in KEYS, each.name
        assert f"explain.{each.short}" in KEYS, each.name


@pytest.mark.parametrize("gpus", [8, 16, 64])
def test_every_word_of_a_printed_plan_can_be_typed_as_a_pin(gpus: int) -> None:
    """What no pin says (recompute in some layers) is in no word with an equals sign."""
    found = so.plan(recipe="llama3_8b", gpus=gpus, cluster="dgx_h100", engine="megatron")
    for plan in (found.plan, *found.found.alternatives):
        words = choice(plan).partition(" recompute in ")[0].split()
        pins = {f"pin.{word.partition('=')[0]}": word.partition("=")[2] or "true" for word in words}
        assert so.plan(recipe="llama3_8b", gpus=gpus, cluster="dgx_h100", engine="megatron", **pins).plan.candidate == plan.candidate


def test_a_program_of_ones_own_deals_samples_itself_and_the_price_says_how(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A copy of ours deals them as ours does."""
    words = ["recipe=llama3_8b", "gpus=8", "cluster=dgx_h100", "engine=deepspeed", "pin.zero_stage=3", "task=sft", "data.lengths=1000+800"]
    own = f"{tmp_path / 'own.py'} deals samples to ranks itself: the price has data.balance=step, none is as they are drawn"
    for text, more, is_said in (("import torch", [], True), ("import torch", ["data.balance=none"], False),
                                ("from orchestrator.programs import hugging_face_hooks", [], False)):  # fmt: skip
        (tmp_path / "own.py").write_text(text)
        assert main(["plan", *words, *more, f"entry={tmp_path / 'own.py'}"]) == 0
        assert (own in capsys.readouterr().out.splitlines()) is is_said


@pytest.mark.parametrize("release", ["0.16.1", "0.19.2"])
def test_screen_files_and_header_name_one_release_and_what_must_be_on_the_nodes(
    release: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["recipe=mixtral_8x7b", "gpus=64", "engine=megatron", "pin.dispatcher=flex", f"cluster.software.megatron_core={release}"]
    assert main(["plan", *words, f"out={tmp_path / 'run'}"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("software ")]
    assert line.split(maxsplit=1)[1].startswith(f"megatron-core {release}; on every node DeepEP or HybridEP (deep_ep): ")
    required = json.loads((tmp_path / "run" / "engine.json").read_text())["requires"]
    assert (required["megatron-core"], required["deep_ep"]) == (release, "")
    assert f"Megatron-LM, tag {release_of(release).tag}," in (tmp_path / "run" / "megatron_args.sh").read_text()


@pytest.mark.parametrize(("gpus", "asked"), [(1, None), (4, "explain.tp=4"), (6, "explain.tp=4"), (512, "explain.tp=8")])
def test_the_question_that_is_suggested_fits_the_gpus(gpus: int, asked: str | None) -> None:
    said = next_text(recipe.load(("recipe=gpt_tiny", "cluster=dgx_h100", f"gpus={gpus}"), Machine(), ("megatron",)))
    assert (f"; {asked} says why not that" in said) is (asked is not None)
    assert ("explain." in said) is (asked is not None)
