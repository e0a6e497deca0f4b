"""Supervised samples: which tokens have a loss, how samples lie in sequences, and that packed and padded ones train the same."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chats import FORGETFUL, VOCABULARY, write_chats, write_tokenizer
from msgspec.structs import replace
from test_hf_parity import hf_plan
from worker_plans import LLAMA, MIXTRAL, QWEN3_MOE, make_plan
from worker_pool import Pool

from orchestrator.chats import Chat, Encoded, Pair, encoded
from orchestrator.errors import InputError
from orchestrator.model.architecture import Architecture
from orchestrator.model.packing import pack
from orchestrator.plan import Plan, RunSettings, to_json
from orchestrator.workers import sft
from orchestrator.workers.data import Specials, load_tokenizer

pytestmark = pytest.mark.engines

MODEL = replace(LLAMA, vocab_size=VOCABULARY + 1, max_position_embeddings=256)
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "So long."},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def learnt(tokenizer: Any, encoded: Encoded) -> str:
    return str(tokenizer.decode([token for token, answer in zip(*encoded, strict=True) if answer]))


def test_answers_alone_are_learnt_with_the_template_s_end_of_them(tokenizer: str) -> None:
    loaded, _ = load_tokenizer(tokenizer)
    (encoded,) = sft.encode_chat(loaded, Chat(CHAT, (2, 4), {}), "here")
    assert loaded.decode(encoded[0]) == loaded.apply_chat_template(CHAT, tokenize=False)
    assert learnt(loaded, encoded) == "Hello.<|im_end|>\nSo long.<|im_end|>\n"


def test_a_template_that_rewrites_earlier_answers_makes_a_sample_of_each(tmp_path: Path) -> None:
    loaded, _ = load_tokenizer(write_tokenizer(tmp_path, FORGETFUL))
    found = sft.encode_chat(loaded, Chat(CHAT, (2, 4), {}), "here")
    assert [learnt(loaded, encoded) for encoded in found] == ["Hello.<|im_end|>\n", "So long.<|im_end|>\n"]
    assert "old\nHello." in loaded.decode(found[1][0])


def test_a_completion_is_learnt_with_the_end_of_its_document(tokenizer: str) -> None:
    loaded, specials = load_tokenizer(tokenizer)
    [(ids, answer)] = encoded(Pair("2+2=", "4"), None, partial(sft.tokens_of, loaded), specials.eod, "here")
    assert (loaded.decode(ids), answer) == ("2+2=4<|endoftext|>", [False] * 4 + [True, True])
    assert encoded(Pair("2+2=", "4"), None, None, 256, "here") == [([*b"2+2=4", 256], answer)]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "is not JSON"),
        ('{"text": "a"}', "is no sample of task=sft"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "no message of the assistant"),
    ],
)
def test_a_line_that_is_no_sample_is_named(line: str, why: str, tokenizer: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "a", "completion": "b"}\n' + line + "\n")
    with pytest.raises(InputError, match=why) as error:
        sft.encode(path, *load_tokenizer(tokenizer))
    assert error.value.value == f"{path}:2"


def test_a_chat_without_a_template_is_refused(tmp_path: Path) -> None:
    path = Path(write_chats(tmp_path / "chats.jsonl", 1))
    with pytest.raises(InputError, match="has no chat template"):
        sft.encode(path, None, Specials.of_bytes())


def test_packing_loses_no_sample_and_no_sequence_is_too_long() -> None:
    draw = np.random.default_rng(1)
    for _ in range(20):
        lengths = draw.integers(1, 101, size=200).tolist()
        found = pack(lengths, 100)
        assert sorted(i for inside in found for i in inside) == list(range(200))
        assert max(sum(lengths[i] for i in inside) for inside in found) <= 100
        assert len(found) <= 11 / 9 * -(-sum(lengths) // 100) + 1  # Johnson 1974


def plan_of(data: str, tokenizer: str, *, packing: bool, batch: int, model: Architecture = MODEL, **fields: Any) -> Plan:
    run = RunSettings(data=data, tokenizer=tokenizer)
    usual: dict[str, Any] = {"task": "sft", "packing": packing, "global_batch_size": batch, "seq_length": 192, "steps": 3}
    return hf_plan(model, run=run, **(usual | fields))


def samples_of(plan: Plan, cache: Path) -> sft.SupervisedSamples:
    return sft.opened(plan, cache, build=True, wait=lambda: None)[0]


def test_each_packed_sample_counts_from_zero_and_learns_what_it_learns_alone(tokenizer: str, tmp_path: Path) -> None:
    """By sample: the same ids under the same positions, the same labels and mask, and padding learns nothing."""
    data = write_chats(tmp_path / "chats.jsonl", 50)
    alone, packed = (samples_of(plan_of(data, tokenizer, packing=p, batch=4), tmp_path) for p in (False, True))
    assert alone.num_samples == 50
    assert packed.num_samples <= 35
    by_sample = {inside[0]: alone.sequence(i) for i, inside in enumerate(alone.sequences)}
    for number, inside in enumerate(packed.sequences):
        row, at = packed.sequence(number), 0
        for sample in inside:
            size = len(packed.samples.sample(sample, 192)[0])
            for name in ("tokens", "positions", "loss_mask"):
                np.testing.assert_array_equal(row[name][at : at + size], by_sample[sample][name][:size])
            np.testing.assert_array_equal(row["labels"][at : at + size - 1], row["tokens"][at + 1 : at + size])
            assert not row["loss_mask"][at + size - 1], "the last token of a sample predicts nothing"
            at += size
        assert not row["loss_mask"][at:].any()
        if at < 192:
            assert row["positions"][at] == 0


def test_each_packed_sample_is_padded_to_what_a_ring_divides(tokenizer: str, tmp_path: Path) -> None:
    data = write_chats(tmp_path / "chats.jsonl", 50)
    plan = plan_of(data, tokenizer, packing=True, batch=4)
    assert plan.sample_multiple == 1
    ring = samples_of(replace(plan, cp=4), tmp_path)
    assert sorted(i for inside in ring.sequences for i in inside) == list(range(50))
    for number, inside in enumerate(ring.sequences):
        row = ring.sequence(number)
        bounds = [*np.flatnonzero(row["positions"] == 0), 192]
        assert not any(bound % 8 for bound in bounds)
        for sample, begin in zip(inside, bounds, strict=False):
            ids = ring.samples.sample(sample, 192)[0]
            np.testing.assert_array_equal(row["tokens"][begin : begin + len(ids)], ids)
        assert row["real"].sum() == sum(len(ring.samples.sample(sample, 192)[0]) for sample in inside)


def test_ranks_share_a_global_batch_and_its_token_count(tokenizer: str, tmp_path: Path) -> None:
    data = write_chats(tmp_path / "chats.jsonl", 40)
    whole = plan_of(data, tokenizer, packing=True, batch=8, micro_batch_size=8)
    one = samples_of(whole, tmp_path)
    halved = samples_of(plan_of(data, tokenizer, packing=True, batch=8, dp=2, micro_batch_size=2), tmp_path)
    for step in range(6):
        (batch,) = one.microbatches(step)
        parts = [halved.microbatches(step, rank) for rank in (0, 1)]
        together = np.concatenate([parts[rank][m]["tokens"] for m in range(2) for rank in (0, 1)])
        assert sorted(together.tolist()) == sorted(batch["tokens"].tolist())
        assert batch["loss_scale"][0] == pytest.approx(1 / batch["loss_mask"].sum())
        assert parts[0][0]["loss_scale"][0] == pytest.approx(4 * batch["loss_scale"][0])


def test_ranks_get_as_much_attention_to_compute_as_each_other_from_the_same_steps(tokenizer: str, tmp_path: Path) -> None:
    """By rank and step: the sums of squares of the samples' lengths. data.balance=step leaves each step's sequences what they are;
    data.balance=epoch has every sequence once an epoch, beside others with as much to compute."""
    sizes = np.random.default_rng(0).lognormal(3.5, 0.8, size=300).clip(4, 180).astype(int)
    data = tmp_path / "pairs.jsonl"
    data.write_text("".join(json.dumps({"prompt": "p", "completion": "c" * int(size)}) + "\n" for size in sizes))
    found = {
        balance: samples_of(plan_of(str(data), tokenizer, packing=True, batch=8, dp=2, micro_batch_size=1, balance=balance), tmp_path)
        for balance in ("none", "step", "epoch")
    }
    steps = found["none"].num_samples // 8
    apart = {}
    for balance, samples in found.items():
        work = np.asarray([[samples.work[place] for place in samples.places(step)] for step in range(steps)])
        ranks = work.reshape(steps, 4, 2).sum(axis=1)
        apart[balance] = (ranks.max(axis=1) / ranks.mean(axis=1)).mean(), (work.std(axis=1) / work.mean(axis=1)).mean()
    assert [sorted(found["step"].places(step)) for step in range(steps)] == [sorted(found["none"].places(step)) for step in range(steps)]
    assert apart["step"][0] - 1 < (apart["none"][0] - 1) / 3
    assert apart["epoch"][0] < apart["none"][0]
    assert apart["epoch"][1] < apart["none"][1] / 2
    once = [place for step in range(steps) for place in found["epoch"].places(step)]
    assert len({*once}) == 8 * steps, "no sequence comes twice in an epoch"


def test_a_cut_that_leaves_no_answer_drops_the_sample_and_says_so(tokenizer: str, tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    rows = [{"prompt": "p" * 40, "completion": "c"}, {"prompt": "p", "completion": "c" * 60}, {"prompt": "p", "completion": "c"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = samples_of(plan_of(str(path), tokenizer, packing=True, batch=2, seq_length=32), tmp_path)
    assert (found.cut, found.dropped, sorted(i for inside in found.sequences for i in inside)) == (2, 1, [1, 2])
    assert "2 samples are cut at train.seq_length=32, 1 of them before any answer" in found.said()


def measured(pool: Pool, plan: Plan, cache: Path) -> dict[str, Any]:
    found: dict[str, Any] = pool.run("hf_cases.hf_parity", plan.world_size, to_json(plan), str(cache))[0]
    return found


LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2 zero2": {"dp": 2, "zero_stage": 2},
    "dp2 zero3 checkpointing": {"dp": 2, "zero_stage": 3, "recompute": ["full"]},
    "ulysses2 zero1": {"cp": 2, "zero_stage": 1},
    "lora": {"dp": 2, "zero_stage": 2},
    "mixtral dp2 zero2": {"dp": 2, "zero_stage": 2},
    "mixtral dp2 ep2 zero1": {"dp": 2, "ep": 2, "zero_stage": 1},
    "mixtral dp2 ep2 zero3 checkpointing": {"dp": 2, "ep": 2, "zero_stage": 3, "recompute": ["full"]},
    "qwen3_moe dp2 ep2 zero2": {"dp": 2, "ep": 2, "zero_stage": 2},
}
EXPERTS = {"mixtral": MIXTRAL, "qwen3_moe": QWEN3_MOE}


@pytest.mark.parametrize("layout", [pytest.param(name, marks=pytest.mark.full if name != "dp2 zero2" else ()) for name in LAYOUTS])
def test_packed_on_ranks_equals_padded_on_one_process(layout: str, pool: Pool, tokenizer: str, tmp_path: Path) -> None:
    """A step takes the whole epoch, so that the same samples are in it however they lie: losses and gradients are equal, and so they are
    with other answers per rank. Ulysses pads."""
    from orchestrator.model.lora import Lora

    data = write_chats(tmp_path / "chats.jsonl", 16)
    more: dict[str, Any] = {"lora": Lora(rank=4)} if layout == "lora" else {}
    if layout.split(maxsplit=1)[0] in EXPERTS:
        more["model"] = replace(EXPERTS[layout.split(maxsplit=1)[0]], vocab_size=MODEL.vocab_size, max_position_embeddings=256)
    alone = plan_of(data, tokenizer, packing=False, batch=16, micro_batch_size=16, **more)
    expected = measured(pool, alone, tmp_path)
    packing = "cp" not in LAYOUTS[layout]
    packed = plan_of(data, tokenizer, packing=True, batch=2, **more)
    rows = samples_of(packed, tmp_path).num_samples if packing else 16
    if packing and rows % 2:
        pytest.skip("an odd number of sequences")
    found = measured(pool, plan_of(data, tokenizer, packing=packing, batch=rows, **LAYOUTS[layout], **more), tmp_path)
    np.testing.assert_allclose(found["losses"], expected["losses"], rtol=0, atol=1e-4)
    np.testing.assert_allclose(found["norms"], expected["norms"], rtol=1e-4)
    for name, gradient in expected["gradients"].items():
        np.testing.assert_allclose(found["gradients"][name], gradient, rtol=0, atol=1e-4 * np.abs(gradient).max(), err_msg=name)


COUNT = 26
OF_MEGATRON: dict[str, dict[str, Any]] = {
    "dp2 zero1": {"dp": 2, "zero_stage": 1, "micro_batch_size": 2},
    "tp2 sp": {"tp": 2, "sequence_parallel": True},
    "pp2 vpp1": {"pp": 2},
    "cp2": {"cp": 2, "micro_batch_size": 4},
    "packed dp2 zero1": {"dp": 2, "zero_stage": 1},
    "packed tp2 sp pp2 recomputed": {"tp": 2, "pp": 2, "sequence_parallel": True, "recompute": ["full", "none"]},
    "packed cp2 tp2 sp": {"cp": 2, "tp": 2, "sequence_parallel": True, "micro_batch_size": 1},
    "packed cp4": {"cp": 4, "micro_batch_size": 1},
}


@pytest.mark.parametrize("layout", OF_MEGATRON)
def test_chats_from_the_same_weights_have_the_same_losses_under_megatron(layout: str, pool: Pool, tokenizer: str, tmp_path: Path) -> None:
    """Micro-batches and ranks have answers of other lengths each: the mean is over all of a global batch. Of packed samples a step takes
    the whole epoch, so that it has the same ones however they lie."""
    import torch
    import transformers

    from orchestrator.engines.hf_config import config_keywords

    torch.manual_seed(3)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**config_keywords(MODEL))).save_pretrained(tmp_path / "base")
    run = RunSettings(data=write_chats(tmp_path / "chats.jsonl", COUNT), tokenizer=tokenizer, init_from=str(tmp_path / "base"))
    packing = layout.startswith("packed")
    settings: dict[str, Any] = {
        "task": "sft",
        "packing": False,
        "seq_length": 192,
        "global_batch_size": COUNT if packing else 8,
        "steps": 3,
    }
    expected = measured(pool, hf_plan(MODEL, run=run, **settings, lr=3e-3, micro_batch_size=2, clip=1.0), tmp_path)
    if packing:
        settings |= {"packing": True, "global_batch_size": 2}
        found = samples_of(make_plan(MODEL, run=run, **settings, cp=OF_MEGATRON[layout].get("cp", 1)), tmp_path)
        settings["global_batch_size"] = found.num_samples
        assert found.num_samples == 10
    plan = make_plan(MODEL, run=run, **settings, lr=3e-3, **OF_MEGATRON[layout])
    found = pool.run("parity", plan.world_size, to_json(plan), str(tmp_path))[0]
    np.testing.assert_allclose(found["losses"], expected["losses"], rtol=0, atol=1e-4)
    np.testing.assert_allclose(found["norms"], expected["norms"], rtol=1e-4)


def test_experts_are_balanced_over_tokens_that_are_no_padding(pool: Pool, tokenizer: str, tmp_path: Path) -> None:
    """The first gradients are those of transformers' own loss under an attention mask, which leaves padding out of both."""
    import torch
    import transformers

    from orchestrator.engines.hf_config import config_keywords

    model = replace(MIXTRAL, vocab_size=MODEL.vocab_size, max_position_embeddings=256)
    model = replace(model, feed_forward=replace(model.feed_forward, aux_loss_coeff=0.5))
    data = write_chats(tmp_path / "chats.jsonl", 8)
    plan = plan_of(data, tokenizer, packing=False, batch=8, micro_batch_size=8, model=model, steps=1)
    found = measured(pool, plan, tmp_path)
    (batch,) = samples_of(plan, tmp_path).microbatches(0)
    assert 0 < batch["real"].mean() < 1
    reference = transformers.MixtralForCausalLM(transformers.MixtralConfig(**config_keywords(model)))
    reference.load_state_dict({name: torch.from_numpy(weight) for name, weight in found["weights"].items()}, strict=False)
    labels = torch.where(torch.from_numpy(batch["loss_mask"]) > 0, torch.from_numpy(batch["labels"]), -100)
    given = {"attention_mask": torch.from_numpy(batch["real"]).long(), "output_router_logits": True}
    reference(input_ids=torch.from_numpy(batch["tokens"]), labels=labels, shift_labels=labels, **given).loss.backward()
    for name, parameter in reference.named_parameters():
        expected = parameter.grad.numpy()
        np.testing.assert_allclose(found["gradients"][name], expected, rtol=0, atol=1e-4 * np.abs(expected).max(), err_msg=name)


def test_an_export_from_scratch_ends_as_its_tokenizer_says_and_can_be_read(tokenizer: str, tmp_path: Path) -> None:
    import torch
    import transformers

    from orchestrator.workers import hf_files

    fields = {"config_class": "LlamaConfig", "model_class": "LlamaForCausalLM"}
    hf_files.write_config(fields, {"hidden_size": 32, "eos_token_id": None}, tmp_path, torch.float32, RunSettings(tokenizer=tokenizer))
    wanted = transformers.AutoTokenizer.from_pretrained(tokenizer).eos_token_id
    assert wanted is not None
    assert json.loads((tmp_path / "config.json").read_text())["eos_token_id"] == wanted
    assert transformers.AutoTokenizer.from_pretrained(tmp_path).eos_token_id == wanted
    hf_files.save_tensors({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    assert (tmp_path / "model.safetensors").stat().st_mode == (tmp_path / "config.json").stat().st_mode


def test_an_export_of_weights_without_a_tokenizer_has_the_one_that_was_read_with(tokenizer: str, tmp_path: Path) -> None:
    import torch
    import transformers

    from orchestrator.workers import hf_files

    fields = {"config_class": "LlamaConfig", "model_class": "LlamaForCausalLM"}
    base, new, old = (tmp_path / name for name in ("base", "new", "old"))
    base.mkdir()
    (base / "config.json").write_text(json.dumps({"eos_token_id": 2, "pad_token_id": 7}))
    (base / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "eos_token_id": [2, 9]}))
    for out, run in ((new, RunSettings(init_from=str(base), tokenizer=tokenizer)), (old, RunSettings(init_from=str(base)))):
        out.mkdir()
        hf_files.write_config(fields, {"hidden_size": 32}, out, torch.float32, run)
    given, read = (transformers.AutoTokenizer.from_pretrained(folder) for folder in (tokenizer, new))
    assert read.apply_chat_template(CHAT, tokenize=False) == given.apply_chat_template(CHAT, tokenize=False)
    written, before = (json.loads((out / "config.json").read_text()) for out in (new, old))
    assert (written["eos_token_id"], before["eos_token_id"]) == (given.eos_token_id, 2)
    assert written["pad_token_id"] == before["pad_token_id"] == 7
    sampled, sampled_before = (json.loads((out / "generation_config.json").read_text()) for out in (new, old))
    assert sampled == {"temperature": 0.6, "eos_token_id": given.eos_token_id}
    assert sampled_before == {"temperature": 0.6, "eos_token_id": [2, 9]}
    assert sorted(path.name for path in old.iterdir()) == ["config.json", "generation_config.json"]
    (base / "config.json").write_text(json.dumps({"eos_token_id": [2, given.eos_token_id]}))
    assert hf_files.special_tokens(RunSettings(init_from=str(base), tokenizer=tokenizer)) == {"eos_token_id": [2, given.eos_token_id]}


@pytest.mark.full
def test_one_command_trains_on_fifty_chats_and_exports_a_model_with_its_tokenizer(tokenizer: str, tmp_path: Path) -> None:
    """On two gloo ranks, from the recipe; what it exports answers in plain transformers."""
    import transformers

    from orchestrator import run

    data, out = write_chats(tmp_path / "chats.jsonl", 50), tmp_path / "model"
    words = ["recipe=llama_tiny_sft", f"data={data}", f"tokenizer={tokenizer}", f"model.export_to={out}", f"out={tmp_path / 'run'}"]
    assert run.main([*words, "train.steps=6", "train.warmup=1"]) == 0
    losses = [json.loads(line)["loss"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0] - 0.5
    loaded = transformers.AutoTokenizer.from_pretrained(out)
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == loaded.eos_token_id
    prompt = loaded.apply_chat_template([{"role": "user", "content": "1+2?"}], add_generation_prompt=True, return_tensors="pt")
    ids = prompt if hasattr(prompt, "shape") else prompt["input_ids"]
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert model.generate(ids, max_new_tokens=4, do_sample=False).shape[1] == ids.shape[1] + 4
