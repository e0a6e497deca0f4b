"""BERT as Megatron trains it: pre-norm encoder, segment embeddings, language-model head with a dense layer of its own.

Against Hugging Face's post-norm BertForMaskedLM the total is the same: its embedding norm has the size of our final norm. The
binary (next-sentence) head and its pooler are not built (`--bert-no-binary-head`).
"""

from __future__ import annotations

from orchestrator.model.families.blocks import READ, WRITE, Part, embedding, head, linear_weights, norm, transformer_layer, vocabulary_head
from orchestrator.model.families.family import Family
from orchestrator.model.families.gpt import GELU_NAMES
from orchestrator.model.families.hf import HfConfig
from orchestrator.model.spec import Architecture, Gemm, LayerRun, ModelSpec, Pointwise, Saved


def head_transform(a: Architecture, tokens: int) -> Part:
    """Dense and GELU, replicated over tp (mcore bert_lm_head.py:33); under sequence parallelism each rank does its tokens."""
    h = a.hidden_size
    elements = tokens * h
    dense_input = Saved(name="lm_head.dense.input", elements=elements, group="norm")
    gelu_input = Saved(name="lm_head.gelu.input", elements=elements, group="mlp")
    return Part(
        weights=linear_weights("lm_head.dense", h, h, None, bias=True),
        ops=(
            Gemm(name="lm_head.dense", tokens=tokens, k=h, n=h, saves=(dense_input,)),
            Pointwise(name="lm_head.gelu", elements=elements, moved=READ + WRITE, saves=(gelu_input,)),
        ),
    )


def describe(a: Architecture, seq_length: int, decoder_seq_length: int | None = None) -> ModelSpec:
    """Embedding, `num_layers` bidirectional encoder layers, head with the final norm, its transform and an output bias."""
    return ModelSpec(
        architecture=a,
        seq_length=seq_length,
        runs=(
            LayerRun(layer=embedding(a, seq_length), count=1),
            LayerRun(layer=transformer_layer("encoder", a, seq_length, causal=False), count=a.num_layers),
            LayerRun(
                layer=head(
                    a,
                    seq_length,
                    norm("final_layernorm", a, seq_length),
                    head_transform(a, seq_length),
                    norm("lm_head.layer_norm", a, seq_length),
                    vocabulary_head(a, seq_length, bias=True),
                ),
                count=1,
            ),
        ),
    )


def from_hf_config(config: HfConfig, name: str) -> Architecture:
    """A config.json of BERT."""
    config.choice("hidden_act", GELU_NAMES, "gelu")
    config.choice("position_embedding_type", ("absolute",), "absolute")
    config.refuse_unless("is_decoder", False, "the bert family is an encoder")
    return Architecture(
        family="bert",
        name=name,
        num_layers=config.integer("num_hidden_layers"),
        hidden_size=config.integer("hidden_size"),
        num_attention_heads=config.integer("num_attention_heads"),
        ffn_hidden_size=config.integer("intermediate_size"),
        vocab_size=config.integer("vocab_size"),
        max_position_embeddings=config.integer("max_position_embeddings"),
        num_token_types=config.integer("type_vocab_size", 2),
        norm_epsilon=config.number("layer_norm_eps", 1e-12),
        tie_embeddings=config.flag("tie_word_embeddings", True),
        hidden_dropout=config.number("hidden_dropout_prob", 0.1),
        attention_dropout=config.number("attention_probs_dropout_prob", 0.1),
    )


FAMILY = Family(
    name="bert",
    describe=describe,
    from_hf_config=from_hf_config,
    hf_model_types=("bert", "megatron-bert"),
    choices={"position_embedding": ("learned_absolute", "rope"), "activation": ("gelu",)},
)
