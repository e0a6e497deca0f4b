"""Models described by their own code: parameters, products and saved bytes against torch's own counts and against our readers."""

from __future__ import annotations

import json
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import msgspec
import numpy as np
import pytest
from architectures import CASES, Case, of, own_module

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch.utils.flop_counter import FlopCounterMode  # noqa: E402
from transformers.initialization import no_init_weights  # noqa: E402

from orchestrator import recipe  # noqa: E402
from orchestrator.detect import Machine  # noqa: E402
from orchestrator.errors import InputError  # noqa: E402
from orchestrator.model import families  # noqa: E402
from orchestrator.model.hugging_face import hugging_face  # noqa: E402
from orchestrator.model.spec import Attention, Gemm, ModelSpec  # noqa: E402
from orchestrator.model.traced import Traced  # noqa: E402
from orchestrator.recipe.whole_data import check_bytes  # noqa: E402
from orchestrator.tracing import build, feeds  # noqa: E402
from orchestrator.tracing.trace import described  # noqa: E402
from orchestrator.units import GIB  # noqa: E402

pytestmark = pytest.mark.engines
COVERING = ("t5", "swin", "mixtral")
"""A bias that learns, stages of different width, experts; the others are for .ci/full."""


@cache
def trace(name: str) -> Traced:
    case = CASES[name]
    return described(build.Source(config=case.config), case.seq_length, case.decoder_seq_length, 4)


def products(described: Traced | ModelSpec, *, visible: bool = False) -> float:
    """Forward FLOPs, attention over all pairs of a query and a key, as torch's counter has them, or over the `visible` ones."""
    total = 0.0
    for run in described.runs:
        for op in run.layer.ops:
            if isinstance(op, Gemm):
                total += run.count * 2 * op.tokens * op.k * op.n
            elif isinstance(op, Attention):
                total += run.count * 4 * op.query_len * op.key_len * op.heads * op.head_dim * (op.visible if visible else 1)
    return total


def really_run(case: Case) -> tuple[int, int]:
    """(parameters, forward FLOPs by torch's FlopCounterMode) of the model on the CPU, attention and experts one operation at a time."""
    config = build.config_of(case.config)
    cls = build.class_of(config)
    with no_init_weights():
        # torch counts no grouped products.
        experts = {"experts_implementation": "eager"} if "num_experts_per_tok" in case.fields else {}
        model = cls._from_config(config, attn_implementation="eager", dtype=torch.float32, **experts)
    model.tie_weights()
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.02)
    fed = feeds.feeds_of(model, config, case.seq_length, case.decoder_seq_length)
    batch = feeds.stacked(fed, [feeds.sample(fed, np.random.default_rng(0))])
    with FlopCounterMode(display=False) as counter:
        model.train()(**{name: torch.from_numpy(array) for name, array in batch.items()}, **feeds.fixed_arguments(model))
    return sum(parameter.numel() for parameter in model.parameters()), counter.get_total_flops()


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in COVERING else pytest.mark.full) for name in CASES])
def test_forty_architectures_have_the_parameters_and_products_that_torch_counts(name: str) -> None:
    traced = trace(name)
    parameters, flops = really_run(CASES[name])
    assert sum(run.count * run.layer.parameters for run in traced.runs) == parameters
    assert products(traced) == pytest.approx(flops, rel=0.01)
    assert traced.blocks, "no repeated blocks"


def test_forty_architectures_are_listed() -> None:
    assert len(CASES) >= 40


WITH_READER = {
    "llama": of(
        "llama",
        {
            "hidden_size": 1024,
            "num_hidden_layers": 2,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "intermediate_size": 2816,
            "vocab_size": 8000,
            "max_position_embeddings": 2048,
        },
        seq=1024,
    ),
    "gpt2": of(
        "gpt2",
        {
            "n_embd": 1024,
            "n_layer": 2,
            "n_head": 16,
            "n_positions": 1024,
            "vocab_size": 8000,
            "activation_function": "gelu",
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
        seq=1024,
    ),
    "bert": of(
        "bert",
        {
            "hidden_size": 1024,
            "num_hidden_layers": 2,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
            "vocab_size": 8000,
            "max_position_embeddings": 512,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        },
        "BertForMaskedLM",
        seq=512,
    ),
    "t5": of(
        "t5",
        {"d_model": 1024, "d_kv": 64, "d_ff": 4096, "num_layers": 3, "num_heads": 16, "vocab_size": 8000, "dropout_rate": 0.0},
        seq=512,
        dec=128,
    ),
    "qwen3": of(
        "qwen3",
        {
            "hidden_size": 1024,
            "num_hidden_layers": 2,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 3072,
            "vocab_size": 8000,
            "max_position_embeddings": 2048,
        },
        seq=1024,
    ),
}


@pytest.mark.parametrize("name", WITH_READER)
def test_a_description_agrees_with_the_reader(name: str) -> None:
    """Parameters exactly, products to 1%, bytes that a layer saves to 5%."""
    case = WITH_READER[name]
    traced = described(build.Source(config=case.config), case.seq_length, case.decoder_seq_length, 2)
    ours = families.describe(families.of_traced(traced, name), case.seq_length, case.decoder_seq_length)
    read = families.from_hf_config(json.loads(case.config), name)
    theirs = hugging_face(families.describe(read, case.seq_length, case.decoder_seq_length))
    assert ours.parameters == theirs.parameters
    assert products(ours, visible=True) == pytest.approx(products(theirs, visible=True), rel=0.01)
    flash = name != "t5"
    last = {run.layer.input_elements: run.layer for run in ours.runs if run.layer.recomputable}  # a first block may have more: T5's
    for run in theirs.runs:
        if run.layer.recomputable:
            mine = last[run.layer.input_elements].saved_bytes(flash_attention=flash)
            assert mine == pytest.approx(run.layer.saved_bytes(flash_attention=flash), rel=0.05), run.layer.kind


def branching() -> object:
    """A user's module whose way depends on the numbers."""

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) if x.sum() > 0 else x

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList(Block() for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x.square().mean()

    return Model(), {"x": torch.zeros(1, 4, 8)}


@pytest.mark.skipif(find_spec("timm") is not None, reason="timm is there")
def test_a_class_whose_library_is_missing_is_refused_by_the_name_of_both() -> None:
    """Whatever else its class doesn't take: DETR knows no attention by name and no experts."""
    text = json.dumps({"model_type": "detr", "architectures": ["DetrForObjectDetection"]})
    with pytest.raises(InputError, match=r"DetrForObjectDetection: .* built: ImportError: TimmBackbone requires the timm") as error:
        described(build.Source(config=text), 1024, None, 2)
    assert "\n" not in str(error.value)


def test_a_padding_token_beyond_the_vocabulary_is_named() -> None:
    """GLM-4's own is 151329, whatever the vocabulary is cut down to."""
    fields = {"model_type": "glm4", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16, "vocab_size": 100}
    with pytest.raises(InputError, match=r"model.hf_config.pad_token_id=151329: .* is no token of vocab_size=100; write one"):
        build.from_config(json.dumps(fields), torch.float32, ("eager",))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"layerdrop": 0.1}, "model.hf_config.layerdrop=0.1: leaves out layers at random"),
        ({"ctc_loss_reduction": "sum"}, "model.hf_config.ctc_loss_reduction=sum: makes the loss depend on the micro-batch"),
    ],
)
def test_what_would_make_the_training_depend_on_the_layout_is_refused(more: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        described(build.Source(config=json.dumps(CASES["wav2vec2"].fields | more)), None, None, 4)


def test_keys_that_an_indexer_chooses_are_said_to_be_known_to_no_price() -> None:
    """DeepSeek-V3.2: its own code wants a mask, which a recording has not."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 2, "n_routed_experts": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 8, "kv_lora_rank": 8, "index_n_heads": 2, "index_topk": 4}
    config = json.dumps({"model_type": "deepseek_v32", "vocab_size": 64, "n_group": 1, "topk_group": 1, **sizes, **heads})
    with pytest.raises(InputError, match=r"index_topk=4\), .* no price knows: with model_type=deepseek_v3 the file is the same model"):
        described(build.Source(config=config), 16, None, 2)


def test_what_depends_on_the_data_is_refused_by_the_name_of_the_module() -> None:
    with pytest.raises(InputError, match=r"model.code=Model: can't be traced: blocks.0 \(Block\): what it computes depends on the data"):
        described(build.Source(code=f"{__name__}:branching"), 1, None, 4)


def test_a_module_of_ones_own_gives_a_loss_and_integers_with_values() -> None:
    with pytest.raises(InputError, match=r"model.code=.*:without_loss: its forward gives no loss to train by"):
        described(build.Source(code=f"{__name__}:without_loss"), 1, None, 4)
    with pytest.raises(InputError, match=r"y has integers, .*: make it with device='cpu'"):
        described(build.Source(code=f"{__name__}:without_values"), 1, None, 4)


def without_loss() -> object:
    """As own_module, less the loss."""
    model, given = own_module()
    return torch.nn.Sequential(torch.nn.Sequential(*model.blocks)), {"input": given["x"]}


def without_values() -> object:
    """As own_module, with labels on the default device."""
    model, given = own_module()
    return model, {**given, "y": torch.tensor([7])}


def test_a_module_of_ones_own_is_described() -> None:
    traced = described(build.Source(code="architectures:own_module"), 1, None, 4)
    (run,) = [run for run in traced.runs if run.layer.recomputable]
    assert run.count == 3
    assert run.layer.parameters == 8 * 16 + 16 + 16 * 8 + 8
    assert [(op.tokens, op.k, op.n) for op in run.layer.ops if isinstance(op, Gemm)] == [(1, 8, 16), (1, 16, 8)]
    # The input of the block, and ReLU's output, which is the second linear's input too.
    assert run.layer.saved_bytes(itemsize=4) == 4 * (8 + 16)
    assert [feed.high for feed in traced.feeds if feed.name == "y"] == [8]


def speaker(labels: list[int]) -> object:
    """A user's language model with these labels for the ids 1 to 8."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = torch.nn.Embedding(300, 8)
            self.blocks = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(8, 8)) for _ in range(3))

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            x = self.words(input_ids)
            for block in self.blocks:
                x = block(x)
            return torch.nn.functional.cross_entropy((x @ self.words.weight.T).flatten(0, 1), labels.flatten())

    return Model(), {name: torch.tensor([ids], device="cpu") for name, ids in (("input_ids", list(range(1, 9))), ("labels", labels))}


def shifting() -> object:
    return speaker(list(range(1, 9)))


def shifted() -> object:
    return speaker([*range(2, 9), 0])


def masked() -> object:
    return speaker([-100, 2, *[-100] * 6])


def other() -> object:
    return speaker([5] * 8)


def test_a_users_sample_says_what_the_labels_of_its_text_are() -> None:
    found = {name: described(build.Source(code=f"{__name__}:{name}"), 1, None, 4) for name in ("shifting", "shifted", "masked", "other")}
    assert {name: traced.text_stack for name, traced in found.items()} == {
        "shifting": "decoder",
        "shifted": "decoder",
        "masked": "encoder",
        "other": None,
    }
    drawn = feeds.sample(found["shifted"].feeds, np.random.default_rng(0))
    assert drawn["labels"].tolist() == [*drawn["input_ids"][1:], -100]


class Paired(torch.nn.Module):
    """`shifting`'s model, whose forward gives (logits, loss)."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.words, self.blocks, self.loss = model.words, model.blocks, model.forward

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.words(input_ids) @ self.words.weight.T, self.loss(input_ids, labels)


def paired() -> object:
    model, given = shifting()  # type: ignore[misc]
    return Paired(model), given


def test_a_forward_that_gives_its_loss_beside_other_tensors_is_taken() -> None:
    plain, pair = (described(build.Source(code=f"{__name__}:{name}"), 1, None, 4) for name in ("shifting", "paired"))
    assert [run.layer.parameters for run in pair.runs if run.layer.recomputable] == [
        run.layer.parameters for run in plain.runs if run.layer.recomputable
    ]
    one, other = torch.tensor(1.5), torch.ones(2, 3)
    assert build.loss_of((one, other)) == build.loss_of((other, one)) == build.loss_of({"loss": one}) == build.loss_of(one) == 1.5
    assert [build.loss_of(wrong) for wrong in (other, (other, other), (one, one), {"logits": one}, ())] == [None] * 5


def alike() -> object:
    model, _ = shifting()
    return model, {name: torch.zeros(1, 8, dtype=torch.long, device="cpu") for name in ("input_ids", "labels")}


def test_a_sample_of_one_id_does_not_say_whether_the_forward_shifts() -> None:
    """Trained on the ids themselves a model that does not shift learns to copy, and its loss falls to nothing."""
    with pytest.raises(InputError, match=r"input_ids and labels are 0 throughout, .* whether its forward shifts the labels"):
        described(build.Source(code=f"{__name__}:alike"), 1, None, 4)


def narrow() -> object:
    """As `shifting`, with logits for 200 of the 300 ids."""
    model, given = shifting()

    class Narrow(type(model)):
        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            x = self.words(input_ids[:, :])
            for block in self.blocks:
                x = block(x)
            return torch.nn.functional.cross_entropy((x @ self.words.weight[:200].T).flatten(0, 1), labels.flatten())

    model.__class__ = Narrow
    return model, given


def untold() -> object:
    """As `shifting`, whose ids are numbers to it."""
    model, given = shifting()

    class Untold(type(model)):
        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            x = input_ids[..., None] * self.words.weight[0]
            for block in self.blocks:
                x = block(x)
            return torch.nn.functional.cross_entropy((x @ self.words.weight.T).flatten(0, 1), labels.flatten())

    model.__class__ = Untold
    return model, given


def test_a_users_module_takes_the_ids_of_its_embedding_not_of_its_sample(tmp_path: Path) -> None:
    found = {name: described(build.Source(code=f"{__name__}:{name}"), 1, None, 4) for name in ("shifting", "narrow", "untold")}
    assert {name: (traced.vocab_size, traced.token_ids) for name, traced in found.items()} == {
        "shifting": (300, 300),
        "narrow": (200, 200),
        "untold": (1, 9),
    }
    text = tmp_path / "a.txt"
    text.write_text("some text")
    words = [
        "name=mine",
        "cluster=cpu",
        "gpus=1",
        "train.precision=fp32",
        "train.seq_length=8",
        "train.global_batch_size=8",
        f"data={text}",
    ]
    settings = {}
    for name in ("shifting", "narrow"):
        model = f"model.traced={msgspec.json.encode(found[name]).decode()}"
        settings[name] = recipe.load([*words, model], Machine(host_memory=GIB), ("deepspeed",))
    check_bytes(settings["shifting"].run, 300)
    with pytest.raises(InputError, match=r"model.vocab_size=200: is too small: .* is read byte by byte, which takes 257 ids"):
        check_bytes(settings["narrow"].run, settings["narrow"].architecture.vocab_size)
    with pytest.raises(InputError, match=r"data=.*: .*:untold was not seen to look input_ids up in an embedding"):
        recipe.load([*words, f"model.traced={msgspec.json.encode(found['untold']).decode()}"], Machine(host_memory=GIB), ("deepspeed",))


@pytest.mark.parametrize(("more", "stack"), [({}, None), ({"is_decoder": True}, "decoder")])
def test_an_encoder_is_no_model_of_next_tokens_unless_it_is_made_one(more: dict[str, bool], stack: str | None) -> None:
    fields = CASES["roberta"].fields | {"architectures": ["RobertaForCausalLM"], **more}
    traced = described(build.Source(config=json.dumps(fields)), 64, None, 4)
    assert traced.text_stack == stack


def test_images_need_no_sequence_length_to_be_divided() -> None:
    assert described(build.Source(config=CASES["vit"].config), None, None, 4) == trace("vit")


def test_a_description_survives_its_file() -> None:
    traced = trace("t5")
    assert msgspec.json.decode(msgspec.json.encode(traced), type=Traced) == traced
