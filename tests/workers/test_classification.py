"""Sequence and token classification of recorded models, on labelled texts: ranks train as one process does, however labels fall on them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from chats import VOCABULARY, write_tokenizer
from worker_pool import Pool

from orchestrator import recipe
from orchestrator.detect import Machine
from orchestrator.engines import ENGINES
from orchestrator.errors import InputError
from orchestrator.model.traced import Traced
from orchestrator.plan import Plan, to_json
from orchestrator.planning import Planner
from orchestrator.units import GIB

pytest.importorskip("transformers")
from orchestrator.tracing import build
from orchestrator.tracing.feeds import IGNORED
from orchestrator.tracing.trace import described
from orchestrator.workers.traced_text import Texts

pytestmark = pytest.mark.engines
LENGTH = 24
LABELS = {"id2label": {"0": "low", "1": "high", "2": "mixed"}, "label2id": {"low": 0, "high": 1, "mixed": 2}}
COMMON = {"vocab_size": VOCABULARY + 1, "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
COMMON |= LABELS
BERT = COMMON | {
    "model_type": "bert", "max_position_embeddings": 64, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "pad_token_id": 0,
}  # fmt: skip
LLAMA = COMMON | {
    "model_type": "llama", "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": VOCABULARY, "classifier_dropout": 0.0,
}  # fmt: skip
CASES = {
    "bert sequences": (BERT, "BertForSequenceClassification"),
    "llama tokens": (LLAMA, "LlamaForTokenClassification"),
    "llama sequences": (LLAMA, "LlamaForSequenceClassification"),
    "bert tokens": (BERT, "BertForTokenClassification"),
}


def recorded(case: str) -> Traced:
    config, head = CASES[case]
    return described(build.Source(config=json.dumps(config | {"architectures": [head]})), LENGTH, None, 4)


def write_texts(path: Path, *, words: bool, count: int = 24) -> str:
    """Words of letters from the first half of the alphabet are low, of the second high; between 1 and 7, of which some are cut off."""
    draw = random.Random(3)
    rows: list[dict[str, Any]] = []
    for _ in range(count):
        kinds = [draw.randrange(2) for _ in range(draw.randrange(1, 8))]
        spelled = ["".join(draw.choice(("abcdefghijklm", "nopqrstuvwxyz")[kind]) for _ in range(4)) for kind in kinds]
        if words:
            rows.append({"tokens": spelled, "labels": kinds})
        else:
            rows.append({"text": " ".join(spelled), "label": "mixed" if len(set(kinds)) == 2 else ("low", "high")[kinds[0]]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def plan_of(case: str, data: str, tokenizer: str, gpus: int, *more: str) -> Plan:
    words = (
        *("engine=deepspeed", "cluster=cpu", f"gpus={gpus}", "train.precision=fp32", "train.global_batch_size=8", "train.steps=4"),
        *("train.lr=1e-2", "train.warmup=0", f"train.seq_length={LENGTH}", "name=classifier", f"data={data}", f"tokenizer={tokenizer}"),
        f"model.traced={msgspec.json.encode(recorded(case)).decode()}",
    )
    return Planner(recipe.load((*words, *more), Machine(host_memory=16 * GIB), tuple(ENGINES))).fastest().plan


@pytest.mark.parametrize("case", [pytest.param(name, marks=() if name == "llama tokens" else pytest.mark.full) for name in CASES])
def test_two_ranks_train_to_the_losses_of_one_process(case: str, pool: Pool, tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    data = write_texts(tmp_path / "texts.jsonl", words="tokens" in case)
    alone = plan_of(case, data, tokenizer, 1, "pin.micro_batch_size=8", "train.eval_every=4")
    together = plan_of(case, data, tokenizer, 2, "pin.micro_batch_size=2", "pin.zero_stage=2", "train.eval_every=4")
    expected = pool.run("traced_cases.trained", 1, to_json(alone), str(tmp_path))[0]
    found = pool.run("traced_cases.trained", 2, to_json(together), str(tmp_path))[0]
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-4)
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-3)
    assert expected["losses"][-1] < expected["losses"][0]
    if "sequences" in case:
        assert found["accuracy"] == pytest.approx(expected["accuracy"])


def test_a_word_s_label_stands_on_its_first_token_and_padding_is_masked(tmp_path: Path) -> None:
    path = tmp_path / "words.jsonl"
    path.write_text(json.dumps({"tokens": ["ab", "c"], "labels": ["low", 1]}) + "\n")
    (sample,) = Texts(recorded("bert tokens"), path, write_tokenizer(tmp_path / "tokenizer")).samples
    used = int(sample["attention_mask"].sum())
    labels = sample["labels"].tolist()
    assert [label for label in labels if label != IGNORED] == [0, 1]
    assert labels[0] == 0
    assert set(labels[used:]) == {IGNORED}
    np.testing.assert_array_equal(sample["attention_mask"], [1] * used + [0] * (LENGTH - used))


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"text": "a", "label": 3}, "has label 3; the model has num_labels=3"),
        ({"text": "a", "label": "good"}, "has label good"),
        ({"text": "a"}, "is no labelled text"),
        ({"text": 1, "label": 0}, "is no labelled text"),
    ],
)
def test_a_line_that_can_not_be_learnt_is_named(row: dict[str, Any], why: str, tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text(json.dumps({"text": "a", "label": 0}) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(InputError, match=why) as error:
        Texts(recorded("bert sequences"), path, write_tokenizer(tmp_path / "tokenizer"))
    assert error.value.value == f"{path}:2"


def test_a_table_of_texts_is_read_as_its_lines_are(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    rows = [("ab, c", "high"), ('a "d"', "0")]
    (tmp_path / "a.csv").write_text('text,label\n"ab, c",high\n"a ""d""",0\n')
    lines = [json.dumps({"text": text, "label": int(label) if label.isdecimal() else label}) for text, label in rows]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    table, listed = (Texts(recorded("bert sequences"), tmp_path / name, tokenizer).samples for name in ("a.csv", "a.jsonl"))
    assert len(table) == 2
    for one, other in zip(table, listed, strict=True):
        assert all((one[name] == other[name]).all() for name in other)
    (tmp_path / "b.csv").write_text("text,label\na,none\n")
    with pytest.raises(InputError, match="has label none") as error:
        Texts(recorded("bert sequences"), tmp_path / "b.csv", tokenizer)
    assert error.value.value == f"{tmp_path / 'b.csv'}:2"


def test_texts_need_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is missing"):
        Texts(recorded("bert sequences"), tmp_path / "texts.jsonl", None)
