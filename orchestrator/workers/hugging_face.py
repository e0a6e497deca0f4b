"""Hugging Face models from engine.json: built whole or in ZeRO-3 partitions, filled with weights that depend on the seed alone, and run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from math import log, prod, sqrt
from typing import Any, Final

import torch
import torch.nn.functional as F
import transformers
from transformers.initialization import no_init_weights

from orchestrator.tracing.dtype import default_dtype
from orchestrator.workers import lora
from orchestrator.workers.batch import Batch
from orchestrator.workers.blocks import BLOCK_ELEMENTS, block_seed

STD = 0.02
"""Standard deviation of weights: `initializer_range` of GPT-2, Llama, Qwen and BERT."""


ZERO_CENTERED = ("gemma3_text",)
"""Models whose norms multiply by 1 + weight (modeling_gemma3.py, Gemma3RMSNorm)."""


def model_class(fields: dict[str, Any]) -> Any:
    """The class of transformers that `engine.json`'s "model" names."""
    return getattr(transformers, fields["model_class"])


def config_of(fields: dict[str, Any]) -> Any:
    """transformers' configuration of `engine.json`'s "model"."""
    config = getattr(transformers, fields["config_class"])(**fields["config"], attn_implementation=fields["attn_implementation"])
    # T5Config of transformers 5 ties whatever it is told (configuration_t5.py); the plan counts an untied head as parameters.
    config.tie_word_embeddings = fields["config"]["tie_word_embeddings"]
    return config


def build_model(fields: dict[str, Any]) -> torch.nn.Module:
    """The model of `engine.json`'s "model", unfilled, on the default device: under `deepspeed.zero.Init` in partitions."""
    config = config_of(fields)
    with default_dtype(getattr(torch, fields["dtype"])), no_init_weights():
        model = model_class(fields)(config)
    # no_init_weights leaves out the ties as well.
    model.tie_weights()
    if "lora" in fields:
        lora.put_in(model, fields["lora"])
    if fields["gradient_checkpointing"]:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def restore_rotary_frequencies(model: torch.nn.Module) -> None:
    """Makes the frequencies of rotary positions anew in fp32, in which the layers compute cosine and sine (modeling_llama.py,
    LlamaRotaryEmbedding.forward): DeepSpeed casts every buffer to the training dtype, and zero.Init makes them in it, and bf16 has 8 bits
    for frequencies that are multiplied by thousands of positions."""
    for module in model.modules():
        names = [name for name, _ in module.named_buffers(recurse=False) if name.endswith("inv_freq")]
        if names:  # several where kinds of layers have frequencies of their own (modeling_gemma3.py)
            with default_dtype(torch.float32):
                fresh = type(module)(config=module.config)
            for name in (*names, "original_inv_freq"):
                if hasattr(module, name):
                    setattr(module, name, getattr(fresh, name).to(getattr(module, name).device))


# ---------------------------------------------------------------------------------------------------------------- weights


def initialise(model: torch.nn.Module, seed: int, device: torch.device, *, adapters_alone: bool = False) -> None:
    """Fill every parameter of a whole or partitioned model in place, before AutoTP cuts it; `adapters_alone`: LoRA's, beside weights that
    are loaded. The other weights are the same with adapters as without.

    A parameter's values depend on the seed and its name. A ZeRO-3 partition is a range of the flat parameter: each rank draws the blocks
    that its range touches, so that nobody holds a whole weight. Drawn on `device`, which decides the numbers, wherever the model is. The
    distribution is transformers' own (`_init_weights` of each model).
    """
    deviations = DEVIATIONS.get(model.config.model_type, _plain)(model.config)
    norms = {id(p) for module in model.modules() if "Norm" in type(module).__name__ for p in module.parameters(recurse=False)}
    with torch.no_grad():
        for full_name, parameter in model.named_parameters():
            name, shape = lora.base_name(full_name), tuple(getattr(parameter, "ds_shape", parameter.shape))
            if adapters_alone and not lora.is_adapter(name):
                continue
            for values, start in local_ranges(parameter):
                if lora.is_adapter(name):
                    bound = lora.bound(name, shape)
                    _fill(values, start, prod(shape), partial(_uniform, bound=bound), (seed, name), device)
                elif (own := _of_state_space(model.config, name)) is not None:
                    _fill(values, start, prod(shape), own, (seed, name), device)
                elif name.endswith("bias"):
                    values.zero_()
                elif id(parameter) in norms:
                    values.fill_(0.0 if model.config.model_type in ZERO_CENTERED else 1.0)
                else:
                    _fill(values, start, prod(shape), partial(torch.Tensor.normal_, mean=0.0, std=deviations(name)), (seed, name), device)


def local_ranges(parameter: torch.nn.Parameter) -> Iterator[tuple[torch.Tensor, int]]:
    """(flat values held here, where they begin in the flat parameter), without the padding of the last partition. hpZ's second copy is made
    from the first in the first forward pass; what was copied of the unfilled weights goes."""
    partition = getattr(parameter, "ds_tensor", None)
    if partition is None:
        yield parameter.data.view(-1), 0
        return
    import torch.distributed as dist

    start = partition.numel() * dist.get_rank(parameter.ds_process_group)
    real = min(partition.numel(), max(0, prod(parameter.ds_shape) - start))
    yield partition.data[:real], start
    if getattr(parameter, "ds_secondary_tensor", None) is not None:
        parameter.ds_secondary_tensor = None


def _fill(values: torch.Tensor, start: int, total: int, draw: Callable[..., Any], key: tuple[int, str], device: torch.device) -> None:
    """Numbers `start` onwards of the `total` that belong to `key`. A block is always drawn whole: its numbers depend on its length. `draw`
    fills a tensor in place, from `generator`."""
    generator = torch.Generator(device=device)
    end = start + values.numel()
    for index in range(start // BLOCK_ELEMENTS, -(-end // BLOCK_ELEMENTS)):
        generator.manual_seed(block_seed(*key, index))
        begin = index * BLOCK_ELEMENTS
        block = torch.empty(min(BLOCK_ELEMENTS, total - begin), dtype=torch.float32, device=device)
        draw(block, generator=generator)
        low, high = max(start, begin), min(end, begin + BLOCK_ELEMENTS)
        values[low - start : high - start].copy_(block[low - begin : high - begin])


def _uniform(block: torch.Tensor, *, bound: float, generator: torch.Generator) -> None:
    block.uniform_(-bound, bound, generator=generator)


STATE_SPACES: Final = ("mamba2", "nemotron_h")


def _of_state_space(config: Any, name: str) -> Callable[..., Any] | None:
    """How a parameter of a Mamba-2 layer is drawn that is drawn otherwise than a linear's weight (modeling_mamba2.py and
    modeling_nemotron_h.py, _init_weights); None: it is not. Nemotron-H's projection back is divided by the root of the number of layers."""
    if config.model_type not in STATE_SPACES or ".mixer." not in name:
        return None
    own, last = config.model_type == "mamba2", name.rpartition(".mixer.")[2]
    if last in DRAWN:
        return DRAWN[last](config)
    if last == "conv1d.weight" and own:
        return partial(_uniform, bound=config.conv_kernel**-0.5)
    if last == "out_proj.weight":
        inner = config.num_heads * config.head_dim if own else config.mamba_num_heads * config.mamba_head_dim
        scale = 1.0 if own else sqrt(config.num_hidden_layers)
        return partial(_uniform, bound=inner**-0.5 / scale)
    return None


def _decays(block: torch.Tensor, *, generator: torch.Generator) -> None:
    """Fills a state space's decays with the logarithms of 1, 2, 3 and so on."""
    block.copy_(torch.arange(1, block.numel() + 1, dtype=block.dtype).log())


def _ones(block: torch.Tensor, *, generator: torch.Generator) -> None:
    block.fill_(1.0)


def _steps(block: torch.Tensor, *, low: float, high: float, floor: float, generator: torch.Generator) -> None:
    """What softplus makes steps of, whose logarithms are even."""
    block.uniform_(log(low), log(high), generator=generator).exp_().clamp_(min=floor)
    block.add_(torch.log(-torch.expm1(-block)))


DRAWN: dict[str, Callable[[Any], Callable[..., Any]]] = {
    "A_log": lambda config: _decays,
    "D": lambda config: _ones,
    "dt_bias": lambda config: partial(_steps, low=config.time_step_min, high=config.time_step_max, floor=config.time_step_floor),
}


def _gpt2(config: Any) -> Callable[[str], float]:
    """Standard deviation of a weight of GPT-2 by its name (modeling_gpt2.py): what writes into the residual stream is divided by sqrt(2 *
    layers)."""
    return lambda name: STD / sqrt(2 * config.n_layer) if name.endswith("c_proj.weight") else STD


def _t5(config: Any) -> Callable[[str], float]:
    """Standard deviation of a weight of T5 by its name (modeling_t5.py): T5 does not scale its scores, the queries' weights do."""
    by_name = {
        "shared": 1.0,
        "lm_head": 1.0,
        "q": (config.d_model * config.d_kv) ** -0.5,
        "k": config.d_model**-0.5,
        "v": config.d_model**-0.5,
        "o": (config.num_heads * config.d_kv) ** -0.5,
        "wi": config.d_model**-0.5,
        "wi_0": config.d_model**-0.5,
        "wi_1": config.d_model**-0.5,
        "wo": config.d_ff**-0.5,
        "relative_attention_bias": config.d_model**-0.5,
    }
    return lambda name: by_name[name.split(".")[-2]]


def _plain(config: Any) -> Callable[[str], float]:
    return lambda name: STD


DEVIATIONS: dict[str, Callable[[Any], Callable[[str], float]]] = {
    "gpt2": _gpt2,
    "mamba2": lambda config: lambda name: float(config.initializer_range),
    "t5": _t5,
}
"""Standard deviation by parameter name, by `model_type`; those that are not here have one for all."""


# ---------------------------------------------------------------------------------------------------------------- running


def losses(model: Callable[..., Any], stack: str, batch: Batch, *, balance: list[torch.Tensor] | None = None) -> torch.Tensor:
    """The loss by token [b, s], in fp32, of what this stack's sampler makes. `balance` gets the loss by which a model of experts balances
    their load, where it is a list."""
    if stack == "encoder_decoder":
        output = model(input_ids=batch["tokens"], decoder_input_ids=batch["decoder_tokens"], use_cache=False)
    elif stack == "encoder":
        output = model(input_ids=batch["tokens"])
    else:
        routed = {} if balance is None else {"output_router_logits": True}
        output = model(input_ids=batch["tokens"], position_ids=batch["positions"], use_cache=False, **routed)
        if balance is not None:
            balance.append(output.aux_loss if "real" not in batch else _balance_of(model, output.router_logits, batch["real"]))
    logits, labels = output.logits, batch["labels"]
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)


def _balance_of(model: Any, router_logits: Any, real: torch.Tensor) -> torch.Tensor:
    """The loss that balances the experts' load, over the tokens that are no padding: transformers leaves those out that an attention mask
    names, which no model gets here, since packed samples are told apart by their positions where there is none (masking_utils.py,
    find_packed_sequence_indices)."""
    bare = getattr(model, "module", model)
    found: torch.Tensor = sys.modules[type(bare).__module__].load_balancing_loss_func(
        router_logits, bare.num_experts, bare.num_experts_per_tok, real
    )
    return found
