"""A model as its own code computes it: layers that were recorded while the model ran once on torch's meta device, for one sample of these
lengths in this precision (orchestrator/tracing makes it, `python -m orchestrator.describe` writes it). Pure numbers here."""

from __future__ import annotations

from typing import Final, Literal

from orchestrator.errors import InputError
from orchestrator.model.layer import Edge, LayerRun
from orchestrator.values import Value

FAMILY = "traced"
"""Family of the architectures whose layers were recorded from the model's own code instead of made by a reader."""
LANGUAGE_MODELS: Final = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration")
"""How transformers' classes end whose labels are the ids of their text."""


class Feed(Value, frozen=True, kw_only=True, omit_defaults=True):
    """One argument of the model's forward, for one sample: float numbers are drawn from N(0, 1), integers from range(low, high)."""

    name: str
    shape: tuple[int, ...]
    """Size of the argument for one sample, without the batch; () is one number a sample."""
    dtype: Literal["float", "int64", "bool"] = "float"
    low: int = 0
    high: int = 1
    values: tuple[int, ...] = ()
    """What is in it, row by row, in place of drawn numbers."""
    copies: str = ""
    """The feed whose numbers it has: labels of a language model are its tokens."""
    every: int = 0
    """Period in which it keeps one number of the feed that it copies; the others are -100, which losses leave out. 0: it keeps all."""
    ahead: int = 0
    """How many places ahead (0 or 1) its numbers stand in the feed that it copies; the last one is -100 then."""
    joined: bool = False
    """The samples' first dimensions follow each other in place of a batch dimension (patches of Qwen-VL)."""


class Divided(Value, frozen=True, kw_only=True, omit_defaults=True):
    """Parameters whose names are alike, as tensor parallelism takes them: a pair of linears is divided by the columns of the first (their
    output) and the rows of the second (its input), so that one all-reduce after it makes the sum."""

    pattern: str
    """Regular expression of a whole name: of a linear ("column", "row") or of a parameter ("summed"). Numbers are any numbers."""
    by: Literal["column", "row", "summed"]
    """How the parameters are divided: by columns, by rows, or "summed": whole on every rank, but each has only its share of the gradient
    (the norm of each head)."""
    parts: tuple[int, ...] = ()
    """Widths of what a fused output is taken apart into, each of which is divided."""


class Traced(Value, frozen=True, kw_only=True, omit_defaults=True):
    """What was recorded, and from what it is built again."""

    model_class: str
    """The class of the model: transformers', or the one that the user's factory makes."""
    config: str = ""
    """The Hugging Face config.json, as text."""
    code: str = ""
    """The model as package.module:factory, in place of `config`."""
    attention: str = "sdpa"
    """transformers' implementation that this model takes: sdpa or eager."""
    seq_length: int
    """Tokens of a sample; of a model whose input has a fixed size, those that enter its first block."""
    decoder_seq_length: int | None = None
    fixed_length: bool = False
    """Whether the input has the same size whatever train.seq_length (images)."""
    itemsize: int
    """Bytes of an activation's element in the precision it was recorded in: 2 or 4."""
    hidden_size: int
    num_attention_heads: int = 1
    num_query_groups: int = 1
    ffn_hidden_size: int
    vocab_size: int = 1
    max_position_embeddings: int
    biased_attention: bool = False
    """Scores are added a tensor that learns (T5, Swin): no flash kernel computes that."""
    feeds: tuple[Feed, ...]
    runs: tuple[LayerRun, ...]
    edges: tuple[Edge, ...] = ()
    divided: tuple[Divided, ...] = ()
    """The partition that was found by following the data from linear to linear; `runs` has it as splits and shards."""
    tp_divides: int = 1
    """What a tensor-parallel size must divide: heads and widths of all that is divided."""
    undivided: tuple[str, ...] = ()
    """What stays whole under tensor parallelism, and why."""
    no_autotp: str = ""
    """Why DeepSpeed can't divide this model whatever its partition; "" where it can."""
    assumed: tuple[str, ...] = ()
    """Values that the model's code asked of tensors which have none, with what it was told."""

    @property
    def blocks(self) -> tuple[str, ...]:
        """Kinds of its repeated blocks."""
        return tuple(dict.fromkeys(run.layer.kind for run in self.runs if run.layer.recomputable))

    @property
    def token_ids(self) -> int:
        """How many ids its tokens may have; 0 where it takes none."""
        return next((feed.high for feed in self.feeds if feed.name == "input_ids" and not feed.values), 0)

    @property
    def text_stack(self) -> Literal["decoder", "encoder", "encoder_decoder"] | None:
        """The stack of layers that it learns from text as: each token from those before it, masked ones, or spans that its encoder lacks.
        None where its arguments aren't those of a language model."""
        fed = {feed.name: feed for feed in self.feeds}
        labels = fed.get("labels")
        known = not self.config or self.model_class.endswith(LANGUAGE_MODELS)
        if labels is None or not known or any(feed.values or feed.joined for feed in self.feeds):
            return None
        if fed.keys() == {"input_ids", "labels"} and labels.copies == "input_ids" and not fed["input_ids"].values:
            return "encoder" if labels.every else "decoder"
        if fed.keys() == {"input_ids", "decoder_input_ids", "labels"} and labels.copies == "decoder_input_ids":
            return "encoder_decoder"
        return None

    def features(self) -> tuple[str, ...]:
        """The features that an engine's capabilities must name to train a recorded model."""
        return (FAMILY, "attention_bias") if self.biased_attention else (FAMILY,)

    def check_lengths(self, seq_length: int, decoder_seq_length: int | None) -> None:
        """Raises InputError where the description is of other lengths."""
        given = (("seq_length", seq_length, self.seq_length), ("decoder_seq_length", decoder_seq_length, self.decoder_seq_length))
        for name, here, described in given:
            if here != described:
                if self.fixed_length:
                    why = f"the input of {self.model_class} has one size, which makes train.{name}={described}; leave it out"
                else:
                    said = "has none" if described is None else f"is of train.{name}={described}"
                    why = f"the model's description {said}; describe it anew: python -m orchestrator.describe --help"
                raise InputError(f"train.{name}", here, why)


class Descriptions(Value, frozen=True, kw_only=True):
    """The content of a description file: the same model at several lengths and precisions."""

    orchestrator_description: Literal[1] = 1
    traced: tuple[Traced, ...]

    def of(self, seq_length: int | None, decoder_seq_length: int | None, itemsize: int) -> Traced | None:
        """The one for these lengths and bytes of an activation's element."""
        for found in self.traced:
            lengths = (found.seq_length, found.decoder_seq_length)
            if found.itemsize == itemsize and (found.fixed_length or lengths == (seq_length, decoder_seq_length)):
                return found
        return None
