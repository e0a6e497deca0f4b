"""task=sft at the door: samples are looked at before anything is planned, and what can't be meant is one error."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from orchestrator import recipe
from orchestrator.__main__ import main
from orchestrator.detect import Machine
from orchestrator.errors import InputError
from orchestrator.planning import Planner, planned
from orchestrator.recipe import supervised, whole_data
from orchestrator.units import GIB

NO_GPU = Machine(host_memory=16 * GIB)
ENGINES = ("megatron", "deepspeed")


def settings(*words: str) -> recipe.Settings:
    return recipe.load(words, NO_GPU, ENGINES)


LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
    "num_hidden_layers": 2, "vocab_size": 300, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "hidden_act": "silu",
}  # fmt: skip


@pytest.fixture
def pairs(tmp_path: Path) -> str:
    """Ten samples of 20 to 200 bytes."""
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps({"prompt": "p" * (10 * n), "completion": "c" * (10 * n)}) + "\n" for n in range(1, 11)))
    return str(path)


def test_lengths_are_counted_and_packing_is_chosen(pairs: str) -> None:
    found = settings("recipe=llama_tiny", "task=sft", f"data={pairs}").training
    assert (found.task, found.packing, found.seq_length) == ("sft", True, 128)
    assert found.lengths is not None
    assert (found.lengths.samples, found.lengths.longest, found.lengths.cut) == (10, 201, 4)


def test_divided_sequences_are_packed_where_attention_tells_samples_apart(pairs: str) -> None:
    """Under Ulysses without flash attention it does not: nobody asked to pack, so they are padded."""
    words = ("recipe=llama_tiny", "task=sft", f"data={pairs}", "pin.cp=2", "gpus=2", "cluster=cpu")
    for engine, packing in (("megatron", True), ("deepspeed", False)):
        plan = planned(settings(*words, f"engine={engine}"), Planner.plan)[1].plan
        assert (plan.cp, plan.training.packing) == (2, packing)


def test_the_longest_sample_says_the_length_where_nothing_else_does(pairs: str, tmp_path: Path) -> None:
    text = Path("recipes/models/llama_tiny.yaml").read_text().replace("  seq_length: 128\n", "")
    mine = tmp_path / "mine.yaml"
    mine.write_text(text.replace("max_position_embeddings: 128", "max_position_embeddings: 4096"))
    assert settings(f"recipe={mine}", "task=sft", f"data={pairs}").training.seq_length == 256
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA))
    mine_by_config = (f"model.hf_config={config}", "task=sft", "train.global_batch_size=8", "gpus=2", "cluster=cpu")
    assert settings(*mine_by_config, f"data={pairs}").training.seq_length == 256
    assert settings(*mine_by_config, "data.lengths=300+0").training.seq_length == 320
    assert settings(*mine_by_config, "data.lengths=3000+0").training.seq_length == LLAMA["max_position_embeddings"] == 512
    with pytest.raises(InputError, match=r"train.seq_length: is missing: give it, or data= or data.lengths=, whose longest sample"):
        settings(*mine_by_config)


@pytest.mark.parametrize(
    ("words", "key", "why"),
    [
        (["data.packing=true"], "data.packing", "task=sft"),
        (["task=sft", "data=README.md"], "data", "is not a .jsonl of samples"),
        (["task=sft", "data.blend=0.5 README.md 0.5 setup.cfg"], "data.blend", "is for task=pretrain"),
        (["task=sft", "data.split=90,10"], "data.split", "data.valid="),
        (["data.lengths=900"], "data.lengths", "is of samples: task=sft"),
        (["task=sft", "data.lengths=0"], "data.lengths", "needs a mean above 0"),
        (["task=sft", "data.lengths=9+-1"], "data.lengths", "needs a mean above 0"),
        (["task=sft", "data.lengths=nowhere.csv"], "data.lengths", "is no mean, no mean.deviation, and as a file"),
        (["lora.alpha=4"], "lora.alpha", "give lora.rank= beside it"),
        (["lora.merge=true"], "lora.merge", "give lora.rank= beside it"),
        (["lora.rank=4", "lora.targets=q_prj"], "lora.targets", "did you mean q_proj"),
    ],
)
def test_what_can_not_be_meant_is_refused(words: list[str], key: str, why: str) -> None:
    with pytest.raises(InputError, match=why) as error:
        settings("recipe=llama_tiny", *words)
    assert error.value.key == key


def test_a_chat_needs_a_tokenizer(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}) + "\n")
    with pytest.raises(InputError, match="is a chat, which takes a tokenizer's chat template"):
        settings("recipe=llama_tiny", "task=sft", f"data={path}")


def test_each_kind_of_sample_has_its_texts() -> None:
    said = [{"role": "user", "content": "a"}, {"role": "tool", "content": None}, {"role": "assistant", "content": "b"}]
    assert supervised.texts_of(json.dumps({"messages": said, "prompt": 3}).encode(), "x") == ["a", "", "b"]
    both = {"messages": [], "prompt": "p", "completion": "c"}
    assert supervised.texts_of(json.dumps(both).encode(), "x", chats=False) == ["p", "c"], "an empty chat is none"
    assert supervised.texts_of(json.dumps({"messages": ["a"], "prompt": "p", "completion": "c"}).encode(), "x") == ["p", "c"]
    for wrong in ({"prompt": "p"}, {"prompt": "p", "completion": 1}, {"completion": "c"}, {"messages": "a"}, [1], "p", 3):
        with pytest.raises(InputError, match="is no sample of task=sft"):
            supervised.texts_of(json.dumps(wrong).encode(), "x")
    with pytest.raises(InputError, match="x:7: is not JSON"):
        supervised.texts_of(b"{", "x:7")


def test_blank_lines_are_none(tmp_path: Path) -> None:
    path = tmp_path / "gaps.jsonl"
    path.write_text('\n{"prompt": "p", "completion": "c"}\n  \n{"prompt": "p"}\n')
    with pytest.raises(InputError, match=r"gaps\.jsonl:4: is no sample"):
        supervised.counted(str(path), None)
    path.write_text("\n\n")
    with pytest.raises(InputError, match="has no sample"):
        supervised.counted(str(path), None)


def test_tokens_are_bytes_or_with_an_unread_tokenizer_a_quarter_of_them_and_the_templates(pairs: str) -> None:
    assert [one.tokens for one in supervised.counted(pairs, None).samples] == [20 * n + 1 for n in range(1, 11)]
    assert [one.tokens for one in supervised.counted(pairs, "nowhere").samples] == [2 * (math.ceil(10 * n / 4) + 5) for n in range(1, 11)]


def test_a_length_that_is_chosen_is_the_least_round_one_that_holds_all() -> None:
    for longest in (1, 63, 64, 65, 128, 1000):
        chosen = supervised.chosen_length([1, longest], 4096)
        assert longest <= chosen < longest + 64
        assert chosen % 64 == 0
    found = supervised.lengths([4, 8, 16], 8)
    assert (found.samples, found.mean, found.mean_square, found.longest, found.cut) == (3, 20 / 3, (16 + 64 + 64) / 3, 16, 1)
    assert found.lost == pytest.approx(8 / 28)


def test_lengths_are_said_before_there_are_samples(pairs: str, tmp_path: Path) -> None:
    """As a file they are what the same samples have; as mean and deviation they are a draw, the same every time."""
    words = ("recipe=llama_tiny", "task=sft", "train.seq_length=100")
    path = tmp_path / "lengths.csv"
    path.write_text("sample,tokens\n" + "".join(f"{n},{20 * n + 1}\n" for n in range(1, 11)))
    read = settings(*words, f"data={pairs}").training.lengths
    assert read is not None
    said = settings(*words, f"data.lengths={path}").training.lengths
    assert said is not None
    assert replace(said, **{name: getattr(read, name) for name in ("answers", "answers_lost", "dropped", "sequences", "loads")}) == read
    long = ("train.seq_length=8192", "model.max_position_embeddings=8192", "data.lengths=900+600")
    drawn = [settings("recipe=llama_tiny", "task=sft", *long).training.lengths for _ in range(2)]
    assert drawn[0] == drawn[1]
    assert drawn[0] is not None
    assert drawn[0].mean == pytest.approx(900, rel=0.03)
    assert drawn[0].mean_square == pytest.approx(900**2 + 600**2, rel=0.1)
    with pytest.raises(InputError, match="has lengths of its own"):
        settings(*words, f"data={pairs}", "data.lengths=900")


def test_what_packing_gains_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """The samples of a step by its seconds, packed and padded: each priced."""
    words = ["plan", "recipe=llama3_8b", "task=sft", "gpus=8", "cluster=dgx_h100", "train.global_batch_size=64", "data.lengths=1000+0"]
    assert main([*words, "data.packing=true"]) == 0
    said = capsys.readouterr().out
    assert "samples: 1,000 tokens in the mean, 1,000 at most; 8.0 share a sequence, " in said
    (gain,) = re.findall(r"sequence, ([\d.]+) times the samples a second", said)
    assert 8.0 < float(gain) < 12, "a token attends to its own sample alone"
    assert main([*words, "data.packing=false"]) == 0
    assert "88% of a sequence of 8,192 is padding" in capsys.readouterr().out


LONG = ("recipe=llama3_8b_128k", "task=sft", "train.seq_length=1048576", "model.max_position_embeddings=1048576", "gpus=64")


@pytest.mark.parametrize(("packing", "steps"), [(True, 30), (False, 30), (False, 30_000)])
def test_how_often_the_samples_are_seen_is_said(packing: bool, steps: int, pairs: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["recipe=llama_tiny", "task=sft", f"data={pairs}", "train.seq_length=100", f"train.steps={steps}", "train.global_batch_size=8"]
    found = settings(*words, f"data.packing={packing}").training.lengths
    assert found is not None
    assert main(["plan", *words, f"data.packing={packing}", "gpus=2", "cluster=cpu"]) == 0
    (said,) = re.findall(r"\ndata: .*; ([\d.,]+) epochs\n", capsys.readouterr().out)
    assert (found.samples, found.dropped, found.sequences[0]) == (10, 1, 8), "of the last the cut leaves no answer"
    assert float(said.replace(",", "")) == pytest.approx(steps * 8 / (8 if packing else 9), rel=0.05)


LLAVA = {
    "model_type": "llava", "image_token_index": 255,
    "text_config": {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
                    "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 1024},
    "vision_config": {"model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
                      "num_attention_heads": 4, "image_size": 28, "patch_size": 7, "hidden_act": "quick_gelu"},
}  # fmt: skip


def test_chats_with_images_are_as_long_as_their_images_and_not_packed(tmp_path: Path) -> None:
    """An image of LLaVA's 28 pixels is 16 tokens; four bytes of text count as one without a tokenizer.json, each message as 5 more."""
    (tmp_path / "config.json").write_text(json.dumps(LLAVA))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    parts = [{"type": "image"}, {"type": "text", "text": "8 bytes."}, {"type": "image", "image": "there.png"}]
    chat = [{"role": "user", "content": parts}, {"role": "assistant", "content": "4 by"}]
    plain = [{"role": "user", "content": "8 bytes."}, {"role": "assistant", "content": "4 by"}]
    data = tmp_path / "chats.jsonl"
    data.write_text(
        "".join(json.dumps(one) + "\n" for one in ({"messages": chat, "images": ["b.png"]}, {"messages": plain, "image": "b.png"}))
    )
    words = ("task=sft", f"data={data}", f"tokenizer={tmp_path}", "train.global_batch_size=8", "cluster=cpu", "gpus=2", "engine=deepspeed")
    seeing = settings(*words, f"model.hf_config={tmp_path / 'config.json'}").training
    assert seeing.lengths is not None
    assert (seeing.images, seeing.packing, seeing.seq_length, seeing.lengths.longest) == (2, False, 64, 2 * 16 + 2 + 1 + 2 * 5)
    assert seeing.lengths.mean == 45 - 8
    with pytest.raises(InputError, match=r"has samples with images, and .* looks at none"):
        settings(*words, "recipe=llama_tiny_sft")
    (tmp_path / "b.png").touch()
    with pytest.raises(InputError, match=r"chats\.jsonl:1: its image there\.png is not there"):
        whole_data.check_samples(str(data), chats=True)


def test_epochs_become_steps_of_the_packing_that_is_drawn(pairs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Samples of 35 tokens don't share 64: 40 sequences an epoch, and as many where they are padded."""
    data = tmp_path / "same.jsonl"
    data.write_text((json.dumps({"prompt": "p" * 30, "completion": "c" * 4}) + "\n") * 40)
    words = ["recipe=llama_tiny", "task=sft", "train.seq_length=64", "train.global_batch_size=8", "train.warmup=2"]
    assert settings(*words, f"data={data}", "train.epochs=3").training.steps == 15
    assert settings(*words, f"data={data}", "train.epochs=0.3").training.steps == 2
    assert settings(*words, f"data={data}", "data.packing=false", "train.epochs=3").training.steps == 15
    wide = (f"data={pairs}", "train.seq_length=256", "model.max_position_embeddings=256", "train.global_batch_size=8", "train.epochs=8")
    few = ("recipe=llama_tiny", "task=sft", "train.warmup=2", *wide)
    pairs_alone, packed = (settings(*few, f"data.packing={on}") for on in ("false", "true"))
    assert (pairs_alone.training.steps, packed.training.steps) == (10, 5), "ten samples, in five sequences"
    resolved = recipe.resolved_yaml(packed)
    assert "steps: 5" in resolved
    assert "epochs:" not in resolved
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("35\n" * 40)
    assert settings(*words, f"data.lengths={lengths}", "train.epochs=3").training.steps == 15
    assert main(["plan", *words, f"data={data}", "train.epochs=3", "gpus=2", "cluster=cpu"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"\ndata: .*; 3 epochs\n", said)
    assert "1.0 share a sequence" in said
    assert "warning" not in said
    assert main(["plan", *words, f"data={data}", "train.steps=60", "gpus=2", "cluster=cpu"]) == 0
    assert re.search(r"; 12 epochs\nwarning: 12 epochs: samples are seen again", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("words", "key", "why"),
    [
        (["train.epochs=3"], "train.epochs", "counts samples: task=sft; train.tokens="),
        (["task=sft", "train.epochs=3"], "train.epochs", "needs samples to count"),
        (["task=sft", "train.epochs=3", "data.lengths=90+20"], "train.epochs", "needs samples to count"),
        (["task=sft", "train.epochs=3", "train.steps=3"], "train.epochs", "train.steps=3 is given too"),
        (["task=sft", "train.epochs=3", "train.tokens=1M"], "train.epochs", "train.tokens=1M is given too"),
        (["task=sft", "train.epochs=0"], "train.epochs", "must be above 0"),
    ],
)
def test_epochs_that_can_not_be_counted_are_refused(words: list[str], key: str, why: str) -> None:
    with pytest.raises(InputError, match=why) as error:
        settings("recipe=llama_tiny", *words)
    assert error.value.key == key


def test_a_length_that_leaves_no_answer_is_refused_before_a_start(tmp_path: Path) -> None:
    data = tmp_path / "long.jsonl"
    data.write_text(json.dumps({"prompt": "p" * 70, "completion": "c"}) + "\n")
    with pytest.raises(InputError, match=r"train\.seq_length=64: cuts off every answer of the data"):
        settings("recipe=llama_tiny", "task=sft", f"data={data}", "train.seq_length=64")


def test_an_id_that_the_model_has_not_is_refused_before_a_start(pairs: str) -> None:
    """A text byte by byte has ids up to 255: ranks found that once the job had started."""
    words = ("recipe=llama_tiny", "task=sft", f"data={pairs}", "gpus=2", "cluster=cpu")
    with pytest.raises(InputError, match=r"model.vocab_size=64: is too small: by the byte tokenizer data=.* has token id \d\d"):
        settings(*words, "model.vocab_size=64")


def test_epochs_of_samples_that_are_padded_after_all_are_counted_so(pairs: str) -> None:
    """Under Ulysses without flash attention none shares a sequence: an epoch is ten of them in place of five."""
    words = ("recipe=llama_tiny", "task=sft", f"data={pairs}", "pin.cp=2", "gpus=2", "cluster=cpu", "train.seq_length=256",
             "train.warmup=1", "model.max_position_embeddings=256", "train.global_batch_size=2", "train.epochs=2")  # fmt: skip
    for engine, steps in (("megatron", 5), ("deepspeed", 10)):
        assert planned(settings(*words, f"engine={engine}"), Planner.plan)[1].plan.training.steps == steps


def test_a_written_program_says_that_it_trains_on_answers_of_weight_0(tmp_path: Path) -> None:
    from orchestrator.engines.deepspeed.trainer_files import around

    data = tmp_path / "chats.jsonl"
    answers = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0}, {"role": "assistant", "content": "c"}]
    data.write_text(json.dumps({"messages": answers}) + "\n")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    words = ("recipe=llama_tiny", "task=sft", f"data={data}", f"tokenizer={tmp_path}", "gpus=2", "cluster=cpu", "engine=deepspeed",
             "data.packing=false", "train.epochs=2", "train.warmup=0")  # fmt: skip
    plan = planned(settings(*words), Planner.plan)[1].plan
    file = around(plan, "llama_factory")
    assert "# The data has 1 answers of weight 0, which this program does not know: it trains on them too.\n" in file.content
    assert f"max_steps: {plan.training.steps}" in file.content
