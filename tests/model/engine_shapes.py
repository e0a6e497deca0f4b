"""Run as a program: reads cases from stdin, builds the engines' own modules on the meta device, writes their parameter shapes to stdout.

megatron-core modules are built under a fake process group, one rank of each pipeline stage; Hugging Face models from their config.
Last, single layers are run on the CPU and what autograd keeps of them is weighed.
"""

from __future__ import annotations

import json
import math
import sys
import warnings
from typing import Any

warnings.filterwarnings("ignore")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state as ps  # noqa: E402
from megatron.core.fusions.fused_bias_geglu import quick_gelu  # noqa: E402
from megatron.core.models.bert.bert_layer_specs import LNImpl, bert_layer_local_spec  # noqa: E402
from megatron.core.models.bert.bert_model import BertModel  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.T5.t5_model import T5Model  # noqa: E402
from megatron.core.models.T5.t5_spec import decoder_model_with_local_spec, encoder_model_with_local_spec  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from orchestrator.cpu import shims  # noqa: E402

# Tied embeddings on two stages are moved to the GPU and summed while the model is built; a meta tensor stays where it is.
torch.Tensor.cuda = lambda self, *args, **kwargs: self

ACTIVATIONS = {
    "gelu": functional.gelu,
    "relu": functional.relu,
    "quick_gelu": quick_gelu,
    "swiglu": functional.silu,
    "geglu": functional.gelu,
    "reglu": functional.relu,
}


def config(a: dict[str, Any], case: dict[str, Any], num_layers: int) -> TransformerConfig:
    return TransformerConfig(
        num_layers=num_layers,
        hidden_size=a["hidden_size"],
        num_attention_heads=a["num_attention_heads"],
        num_query_groups=a["num_query_groups"],
        kv_channels=a["kv_channels"],
        ffn_hidden_size=a["ffn_hidden_size"],
        add_bias_linear=a["add_bias_linear"],
        add_qkv_bias=a["add_qkv_bias"],
        attention_output_gate=bool((a["mixer"] or {}).get("output_gate")),
        gated_linear_unit=a["activation"] in ("swiglu", "geglu", "reglu"),
        activation_func=ACTIVATIONS[a["activation"]],
        normalization=a["normalization"],
        tensor_model_parallel_size=case["tp"],
        pipeline_model_parallel_size=case["pp"],
        virtual_pipeline_model_parallel_size=case.get("vpp"),
        pipeline_model_parallel_layout=case.get("layout"),
        hidden_dropout=a["hidden_dropout"],
        attention_dropout=a["attention_dropout"],
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
    )


def build(a: dict[str, Any], case: dict[str, Any], vp_stage: int | None) -> torch.nn.Module:
    unit = math.lcm(a["make_vocab_size_divisible_by"], case["tp"])
    common = {
        "vocab_size": -(-a["vocab_size"] // unit) * unit,
        "max_sequence_length": a["max_position_embeddings"],
        "pre_process": ps.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        "post_process": ps.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        "share_embeddings_and_output_weights": a["tie_embeddings"],
        "position_embedding_type": a["position_embedding"],
    }
    main = config(a, case, a["decoder_num_layers"] or a["num_layers"])
    if a["family"] == "bert":
        return BertModel(main, a["num_token_types"], bert_layer_local_spec, **common, add_binary_head=False, vp_stage=vp_stage)
    if a["family"] == "t5":
        # The stock block specs take Transformer Engine's norm for the final norm and silently have none without it.
        encoder = TransformerBlockSubmodules([encoder_model_with_local_spec()] * a["num_layers"], layer_norm=LNImpl)
        decoder = TransformerBlockSubmodules([decoder_model_with_local_spec()] * a["decoder_num_layers"], layer_norm=LNImpl)
        return T5Model(main, config(a, case, a["num_layers"]), encoder, decoder, **common)
    spec = get_gpt_layer_local_spec(normalization=a["normalization"])
    return GPTModel(main, spec, **common, vp_stage=vp_stage)


def megatron(a: dict[str, Any], case: dict[str, Any]) -> list[list[dict[str, list[int]]]]:
    """Per pipeline stage, per chunk: shape by parameter name, on the last tensor-parallel rank."""
    world = case["tp"] * case["pp"] * 2
    stages = []
    for stage in range(case["pp"]):
        dist.init_process_group("fake", rank=stage * (world // case["pp"]) + case["tp"] - 1, world_size=world, store=FakeStore())
        ps.initialize_model_parallel(case["tp"], case["pp"], case.get("vpp"), create_gloo_process_groups=False)
        chunks = []
        for chunk in range(case.get("vpp") or 1):
            with torch.device("meta"):
                model = build(a, case, chunk if case.get("vpp") else None)
            chunks.append({name: list(parameter.shape) for name, parameter in model.named_parameters()})
        stages.append(chunks)
        ps.destroy_model_parallel()
        dist.destroy_process_group()
    return stages


def hugging_face(fields: dict[str, Any]) -> int:
    import transformers

    model_class, config_class = {
        "gpt2": (transformers.GPT2LMHeadModel, transformers.GPT2Config),
        "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig),
        "mistral": (transformers.MistralForCausalLM, transformers.MistralConfig),
        "qwen2": (transformers.Qwen2ForCausalLM, transformers.Qwen2Config),
        "t5": (transformers.T5ForConditionalGeneration, transformers.T5Config),
        "mt5": (transformers.MT5ForConditionalGeneration, transformers.MT5Config),
        "bert": (transformers.BertForMaskedLM, transformers.BertConfig),
    }[fields["model_type"]]
    with torch.device("meta"):
        model = model_class(config_class(**{key: value for key, value in fields.items() if key != "model_type"}))
    return sum(parameter.numel() for parameter in model.parameters())


def saved_by_a_layer(case: dict[str, Any]) -> int:
    """Bytes of the distinct storages, parameters aside, that autograd keeps for the first layer of `case["kind"]`, really run in fp32, of
    which no weight is trained where the case is `frozen`."""
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    ps.initialize_model_parallel(create_gloo_process_groups=False)
    model_parallel_cuda_manual_seed(1)
    model = build(case["architecture"], {"tp": 1, "pp": 1}, None)
    layer = getattr(model, case["kind"]).layers[0].train()
    tokens, context_tokens = case["tokens"], case["context_tokens"]
    hidden_size = case["architecture"]["hidden_size"]
    arguments: dict[str, Any] = {"attention_mask": torch.zeros(1, 1, tokens, tokens, dtype=torch.bool)}
    if context_tokens:
        arguments["context"] = torch.randn(context_tokens, 1, hidden_size)
        arguments["context_mask"] = torch.zeros(1, 1, tokens, context_tokens, dtype=torch.bool)
    model.requires_grad_(not case["frozen"])
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    hidden = torch.randn(tokens, 1, hidden_size, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = layer(hidden, **arguments)  # kept alive, so that no storage is used twice
    ps.destroy_model_parallel()
    dist.destroy_process_group()
    assert output[0].shape == hidden.shape
    return sum(kept.values())


if __name__ == "__main__":
    cases = json.load(sys.stdin)
    answer = {
        "megatron": [megatron(case["architecture"], case) for case in cases["megatron"]],
        "hugging_face": [hugging_face(fields) for fields in cases["hugging_face"]],
    }
    shims.apply()
    answer["saved"] = [saved_by_a_layer(case) for case in cases["saved"]]
    json.dump(answer, sys.stdout)
