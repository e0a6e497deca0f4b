"""A stage of a megatron-core model as layers of DeepSpeed's PipelineModule: embedding, transformer layers, head."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from megatron.core import tensor_parallel

from orchestrator.workers.batch import Batch, mean_loss

TIED = "embedding"
"""DeepSpeed's key of the weight that embedding and head share."""
CORE_ATTENTION, NORMS, MLP = "core_attn", "layernorm", "mlp"
"""megatron-core's names of what of a layer can be recomputed alone (transformer_config.py:411)."""


@dataclass(frozen=True, kw_only=True)
class Stack:
    """What megatron-core's model classes name differently. `inputs`: what of a batch the embedding takes."""

    block: str
    inputs: Callable[[Batch], tuple[torch.Tensor, ...]]
    embed: Callable[..., torch.Tensor]
    sees_all: bool
    """Whether attention looks both ways: its kernel then wants a mask that hides nothing."""


def _embed_gpt(embedding: torch.nn.Module, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return embedding(tokens, positions)


def _embed_bert(embedding: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    # Without segment embeddings megatron-core takes no segment ids (language_model_embedding.py:137).
    return embedding(tokens, positions, tokentype_ids=torch.zeros_like(tokens) if embedding.num_tokentypes else None)


_GPT = Stack(block="decoder", inputs=lambda batch: (batch["tokens"], batch["positions"]), embed=_embed_gpt, sees_all=False)
STACKS = {
    "decoder": _GPT,
    "encoder": Stack(block="encoder", inputs=lambda batch: (batch["tokens"],), embed=_embed_bert, sees_all=True),
}


class Embedding(torch.nn.Module):
    """Tokens to hidden states [s, b, h]; [s/tp, b, h] under sequence parallelism."""

    def __init__(self, model: torch.nn.Module, kind: Stack) -> None:
        super().__init__()
        self.embedding, self._embed = model.embedding, kind.embed

    def forward(self, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return self._embed(self.embedding, *inputs)


class Layer(torch.nn.Module):
    """Transformer layer `index` of this stage, hidden states to hidden states. `recompute`: what of it is computed again in backward:
    nothing, "full", or modules by megatron-core's names."""

    def __init__(self, model: torch.nn.Module, kind: Stack, index: int, recompute: Sequence[str], seq_length: int) -> None:
        super().__init__()
        block = getattr(model, kind.block)
        self.layer, self.config, self.seq_length = block.layers[index], block.config, seq_length
        # Of the mask, where there is one: BertModel asks for all, or for one that holds for every token.
        self._rows = {"b1ss": seq_length, "b11s": 1}[model.attn_mask_dimensions] if kind.sees_all else 0
        # Frequencies are no parameters, and the same on all layers: not registered here.
        self._rotary = (model.rotary_pos_emb,) if model.position_embedding_type == "rope" else ()
        self._whole = "full" in recompute
        recompute_modules(self.layer, recompute)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._whole and torch.is_grad_enabled():
            return tensor_parallel.checkpoint(self._run, False, hidden)
        return self._run(hidden)

    def _run(self, hidden: torch.Tensor) -> torch.Tensor:
        """The layer's output for `hidden`, run as TransformerBlock.forward runs it (transformer_block.py)."""
        rotary = self._rotary[0](self.seq_length) if self._rotary else None
        mask = None
        if self._rows:
            # True is hidden; nothing of our batches is padding.
            mask = torch.zeros((hidden.shape[1], 1, self._rows, self.seq_length), dtype=torch.bool, device=hidden.device)
        parallel = self.config.sequence_parallel
        with tensor_parallel.get_cuda_rng_tracker().fork() if parallel else contextlib.nullcontext():
            hidden, _ = self.layer(hidden_states=hidden, attention_mask=mask, rotary_pos_emb=rotary)
        return hidden


def recompute_modules(layer: torch.nn.Module, modules: Sequence[str]) -> None:
    """Recompute these modules of one TransformerLayer and no others: what its constructor reads from the whole stage's configuration
    (transformer_layer.py:379-447, attention.py:328)."""
    layer.self_attention.checkpoint_core_attention = CORE_ATTENTION in modules
    layer.recompute_input_layernorm = NORMS in modules and bool(list(layer.input_layernorm.parameters()))
    layer.recompute_pre_mlp_layernorm = NORMS in modules and bool(list(layer.pre_mlp_layernorm.parameters()))
    layer.recompute_mlp = MLP in modules


class Head(torch.nn.Module):
    """Hidden states to this rank's logits [s, b, v/tp]."""

    def __init__(self, model: torch.nn.Module, kind: Stack) -> None:
        super().__init__()
        self.final_layernorm = getattr(model, kind.block).final_layernorm
        self.lm_head = getattr(model, "lm_head", None)
        self.output_layer = model.output_layer

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.final_layernorm is not None:
            hidden = self.final_layernorm(hidden)
        if self.lm_head is not None:
            hidden = self.lm_head(hidden_states=hidden)
        logits, _ = self.output_layer(hidden)
        return logits


def loss(model: torch.nn.Module, logits: torch.Tensor, target: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The micro-batch's mean loss. `target`: labels, and the loss mask where there is one."""
    batch = dict(zip(("labels", "loss_mask"), target, strict=False))
    return mean_loss(batch, model.compute_language_model_loss(batch["labels"], logits))


def target(batch: Batch) -> tuple[torch.Tensor, ...]:
    return tuple(batch[name] for name in ("labels", "loss_mask") if name in batch)


class Pipeline(PipelineModule):
    """DeepSpeed's pipeline with the plan's own stages."""

    def __init__(self, bounds: Sequence[int], **more: Any) -> None:
        self._bounds = list(bounds)
        super().__init__(partition_method="uniform", activation_checkpoint_interval=0, **more)

    def _partition_layers(self, method: str = "uniform") -> None:
        """Partitions the layers as the plan says, in place of a partitioning by number or size: layers bounds[stage] to bounds[stage + 1]
        of embedding, layers, head."""
        self.parts = self._bounds
        stage = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])


def pipeline(model: torch.nn.Module, stack: str, fields: dict[str, Any], topology: PipeModelDataParallelTopology, stage: int) -> Pipeline:
    """The PipelineModule around `model`, this rank's stage of a megatron-core model. `fields`: engine.json's "pipeline"."""
    kind, bounds = STACKS[stack], fields["bounds"]
    # The layers of the stages before, without the embedding.
    before = max(0, bounds[stage] - 1)
    layers = [
        LayerSpec(Layer, model, kind, index - before, recompute, fields["seq_length"])
        for index, recompute in enumerate(fields["recompute"])
    ]
    first: LayerSpec = LayerSpec(Embedding, model, kind)
    last: LayerSpec = LayerSpec(Head, model, kind)
    if fields["tied"]:
        first = TiedLayerSpec(TIED, Embedding, model, kind, tied_weight_attr="embedding.word_embeddings.weight")
        last = TiedLayerSpec(TIED, Head, model, kind, tied_weight_attr="output_layer.weight")
    made = Pipeline(bounds, layers=[first, *layers, last], topology=topology, loss_fn=partial(loss, model))
    if {id(p) for p in made.parameters()} != {id(p) for p in model.parameters()}:
        raise RuntimeError(f"stage {stage}: the pipeline's layers hold other parameters than the model")
    return made
