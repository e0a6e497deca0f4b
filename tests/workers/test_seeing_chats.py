"""Chats with pictures train on two ranks to what transformers' own processor, model and loss compute on one process."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from image_chats import IMAGE, write_chats, write_processor
from test_seeing import plan_of
from worker_pool import Pool

from orchestrator.engines import ENGINES
from orchestrator.errors import InputError
from orchestrator.model.schedule import learning_rate
from orchestrator.plan import Plan, to_json
from orchestrator.recipe import supervised
from orchestrator.workers import hugging_face, seeing_chats
from orchestrator.workers.deepspeed_states import parameter_groups

pytest.importorskip("transformers")
sys.path.append(str(Path(__file__).parents[1] / "model"))
from vision_language import TINY

pytestmark = pytest.mark.engines
WAYS = {"llava": ("pin.zero_stage=3", "pin.micro_batch_size=2"), "gemma3": ("pin.zero_stage=1", "pin.micro_batch_size=4", "train.eps=1e-4")}


def tuned(kind: str, gpus: int, folder: Path, *more: str, length: int = 96) -> Plan:
    words = ("task=sft", f"data={write_chats(folder / 'chats')}", f"tokenizer={write_processor(kind, folder / 'processor')}")
    return plan_of(kind, gpus, folder, *words, *more, length=length)


def plain(plan: Plan, kind: str, folder: Path) -> list[float]:
    """The losses of all steps: each chat by transformers' processor alone, whole batches in transformers' loss, AdamW."""
    from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor

    fields = json.loads(next(file.content for file in ENGINES["deepspeed"].translate(plan).files if file.path == "engine.json"))
    model: Any = AutoModelForImageTextToText.from_config(AutoConfig.for_model(**json.loads(json.dumps(TINY[kind])))).float()
    model.load_state_dict(hugging_face.first_model(plan, fields, torch.device("cpu")).state_dict())
    samples, _ = seeing_chats.opened(plan, folder / "cache", build=True, wait=lambda: None)
    processor: Any = AutoProcessor.from_pretrained(plan.run.tokenizer)
    lines = Path(plan.run.data or "").read_text().splitlines()
    training, losses = plan.training, []
    optimizer = torch.optim.AdamW(parameter_groups(model), betas=training.betas, eps=training.eps, weight_decay=training.weight_decay)
    for step in range(training.steps):
        rows, labels = [], []
        for place in samples.places(step):
            [number] = samples.sequences[place]
            (messages, *_), images = seeing_chats.chat_of(lines[number].encode(), "here")
            texts = [processor.apply_chat_template(messages[:upto], tokenize=False, add_generation_prompt=upto == 1) for upto in (1, 2)]
            seen = [seeing_chats.opened_image(image, Path(plan.run.data or "").parent, "here") for image in images]
            asked, whole = (processor(text=[text], images=[seen], return_tensors="pt") for text in texts)
            rows.append(whole)
            learnt = whole["input_ids"][0].clone()
            learnt[: asked["input_ids"].shape[1]] = -100
            labels.append(learnt)
        longest = max(len(one) for one in labels)
        read = [row["input_ids"][0] for row in rows]
        ids, targets = (
            torch.stack([torch.nn.functional.pad(one, (0, longest - len(one)), value=fill) for one in several])
            for several, fill in ((read, 201), (labels, -100))
        )
        more = {"token_type_ids": (ids == IMAGE).long()} if kind == "gemma3" else {}
        loss = model(input_ids=ids, labels=targets, pixel_values=torch.cat([row["pixel_values"] for row in rows]), **more).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), training.clip)
        losses.append(loss.item())
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(training, step)
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=() if kind == "llava" else pytest.mark.full) for kind in WAYS])
def test_two_ranks_train_on_chats_with_pictures_as_transformers_alone(kind: str, pool: Pool, tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText, AutoProcessor

    plan = tuned(kind, 2, tmp_path, *WAYS[kind], f"model.export_to={tmp_path / 'tuned'}")
    assert (plan.world_size, plan.training.packing, plan.training.images) == (2, False, 2)
    alone = plain(tuned(kind, 1, tmp_path, "pin.zero_stage=1", *WAYS[kind][2:]), kind, tmp_path)
    together: dict[str, Any] = pool.run("traced_cases.trained", 2, to_json(plan), str(tmp_path / "cache"))[0]
    assert together["losses"] == pytest.approx(alone, abs=1e-5)
    assert len(set(together["losses"])) == 4
    assert type(AutoProcessor.from_pretrained(tmp_path / "tuned")) is type(AutoProcessor.from_pretrained(plan.run.tokenizer))
    assert AutoModelForImageTextToText.from_pretrained(tmp_path / "tuned").config.model_type == kind


def test_answers_alone_are_learnt_and_pixels_are_those_of_the_processor(tmp_path: Path) -> None:
    plan = tuned("gemma3", 1, tmp_path)
    samples, _ = seeing_chats.opened(plan, tmp_path / "cache", build=True, wait=lambda: None)
    assert samples.said().endswith("36 images")
    processor = samples.eye.processor
    for index in (0, 1, 12):
        found = samples.sequence(index)
        learnt = processor.tokenizer.decode(found["labels"][found["loss_mask"] > 0])
        assert learnt.startswith("A cat")
        assert learnt.endswith(".</s>")
        images = 1 + index % 2
        assert found["pixel_values"].shape[0] == images
        assert int((found["tokens"] == IMAGE).sum()) == int(found["token_type_ids"].sum()) == 4 * images
        assert found["tokens"][int(found["real"].sum()) - 1] == processor.tokenizer.eos_token_id
    again = seeing_chats.opened(plan, tmp_path / "cache", build=False, wait=lambda: None)[0]  # what the first rank of a node has made
    np.testing.assert_array_equal(again.sequence(5)["pixel_values"], samples.sequence(5)["pixel_values"])


def test_a_chat_of_several_answers_is_one_sample_whose_answers_are_learnt(tmp_path: Path) -> None:
    eye = seeing_chats.Eye(write_processor("llava", tmp_path), IMAGE)
    write_chats(tmp_path / "chats", 2)
    said = ("What", "A cat.", "And this", "A dog.")
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]
    messages[2]["content"] = [{"type": "text", "text": "And this"}, {"type": "image", "image": "1_1.png"}]
    messages[0]["content"] = [{"type": "image", "path": "0_0.png"}, {"type": "text", "text": "What"}]
    chat, images = seeing_chats.chat_of(json.dumps({"messages": messages}).encode(), "here")
    assert images == ["0_0.png", "1_1.png"]
    opened = [seeing_chats.opened_image(image, tmp_path / "chats", "here") for image in images]
    [((ids, answer), count)] = eye.encode(chat, opened, "here")
    assert count == 2
    assert ids.count(IMAGE) == 32
    assert eye.processor.tokenizer.decode([token for token, learnt in zip(ids, answer, strict=True) if learnt]) == "A cat.</s>A dog.</s>"


@pytest.mark.parametrize(
    ("sample", "why"),
    [
        ({"prompt": "a", "completion": "b"}, "is no chat, which a model that looks at images is tuned on"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, "has no image"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}, {"role": "assistant", "content": "b"}], "images": ["a", "b"]},
            "has 2 images and 1 places for them",
        ),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "images": ["no.png"]},
            "its image no.png can't be read",
        ),
    ],
)
def test_a_line_that_can_t_be_trained_on_is_named(sample: dict[str, Any], why: str, tmp_path: Path) -> None:
    eye = seeing_chats.Eye(write_processor("llava", tmp_path / "processor"), IMAGE)
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(sample) + "\n")
    with pytest.raises(InputError, match=why) as error:
        seeing_chats.encoded(path, eye)
    assert error.value.value == f"{path}:1"


def test_a_folder_without_a_processor_and_chats_that_are_too_long_are_refused(tmp_path: Path) -> None:
    from chats import write_tokenizer

    with pytest.raises(InputError, match="has a tokenizer alone"):
        seeing_chats.Eye(write_tokenizer(tmp_path / "text"), IMAGE)
    with pytest.raises(InputError, match="makes of an image no token 77, by which the model knows it"):
        seeing_chats.encoded(Path(write_chats(tmp_path / "chats", 1)), seeing_chats.Eye(write_processor("llava", tmp_path / "llava"), 77))
    plan = tuned("llava", 1, tmp_path, length=60)
    found, _ = seeing_chats.opened(plan, tmp_path / "cache", build=True, wait=lambda: None)
    assert 0 < found.left_out < 24
    assert found.said().endswith(f"{found.left_out} are longer than train.seq_length=60 and left out")


def test_tools_and_weights_of_a_chat_with_pictures_are_those_of_any_chat(tmp_path: Path) -> None:
    """Its lengths too are counted before a plan as they are trained on: an image counts as its tokens, and no place for it is written. Its
    first token begins before the answer."""
    folder = write_processor("llava", tmp_path / "processor", "A")
    eye = seeing_chats.Eye(folder, IMAGE)
    write_chats(tmp_path / "chats", 2)
    template = (
        "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}{{ m.role }}: "
        "{% for c in m.content %}{% if c.type == 'image' %}<image>{% else %}{{ c.text }}{% endif %}{% endfor %}</s>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    eye.processor.chat_template = template
    (Path(folder) / "chat_template.jinja").write_text(template)
    said = ("What", "A cow.", "No", "A cat.")
    messages: list[dict[str, Any]] = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]
    messages[1]["weight"] = 0
    line = json.dumps({"messages": messages, "images": ["0_0.png"], "tools": [{"name": "zoom"}]})
    path = tmp_path / "chats" / "one.jsonl"
    path.write_text(line + "\n")
    found = seeing_chats.encoded(path, eye)
    ids, answer = found["ids"], found["answer"]
    text = eye.processor.tokenizer.decode(ids)
    assert "zoom" in text
    assert "A cow." in text
    assert eye.processor.tokenizer.decode(ids[answer]) == " A cat.</s>"
    counted = supervised.counted(str(path), folder, int((ids == IMAGE).sum()))
    assert [one.tokens for one in counted.samples] == [len(ids)]
    assert counted.samples[0].learnt(10**6) == int(answer[1:].sum())
    words = "{{ c.text }}{% endif %}{% endfor %}"
    eye.processor.chat_template = template.replace(words, f"{{% generation %}}{words}".replace("{% endif", "{% endgeneration %}{% endif"))
    found = seeing_chats.encoded(path, eye)
    ids, answer = found["ids"], found["answer"]
    assert eye.processor.tokenizer.decode(ids[answer]) == " A cat.", "what the template marks, without the end"
