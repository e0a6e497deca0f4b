"""What DeepSpeed over transformers' models can't do with supervised samples, or gets silently wrong."""

from __future__ import annotations

from typing import Final

from orchestrator.engines.rules.rule import NEVER_TRIED, refused, rule
from orchestrator.engines.rules.samples import decoder_only
from orchestrator.model.lora import linear_names
from orchestrator.strategy.spec import DEEPSPEED_OPTIONS, Candidate
from orchestrator.strategy.workload import Workload


@rule("lora_linears", "peft/tuners/lora/config.py, target_modules: names of transformers' linears", "model")
def linears(_: Candidate, workload: Workload) -> str | None:
    lora = workload.training.lora
    if lora is None or not (lora.fused or lora.bridge):
        return None
    if lora.bridge:
        return f"lora.bridge={lora.bridge}: is of megatron-core's linears (engine=megatron)"
    known = ", ".join(name for names in linear_names(workload.model.architecture).values() for name in names)
    return f"lora.targets={','.join(lora.fused)}: these are megatron-core's linears (engine=megatron); transformers has {known}"


OTHER_THAN_TEXT: Final = "task=sft of {a.traced.model_class}, whose layers were recorded: transformers' decoders of text alone have it"
INT8_FROM: Final = 7.5
"""First compute capability, Turing's, that LLM.int8 runs on."""


FINE_TUNING_RULES: Final = (
    decoder_only,
    refused("seeing", NEVER_TRIED, "model", "vision",
            ("packing", "data.packing=true of {a.vision.model_type}, which looks at images: data.packing=false"),
            ("lora lora.bits", "lora.bits={lora.bits} of {a.vision.model_type}, which looks at images: "
             "its adapters are trained beside 16-bit weights alone")),
    refused("recorded", "ours: linears and heads of a recorded model have no names here", "model", "traced",
            ("lora", "lora.rank={lora.rank} of {a.traced.model_class}, whose layers were recorded: only a reader's models have it"),
            ("task=sft !traced.text_stack=decoder", OTHER_THAN_TEXT),
            ("task=sft !traced.config", OTHER_THAN_TEXT),
            ("task=sft packing", "data.packing=true of {a.traced.model_class}, whose layers may mix packed samples: data.packing=false")),
    # transformers tells packed samples apart by their positions in attention's masks alone.
    refused("packed_states", "transformers/models/mamba2/modeling_mamba2.py: no positions", "model", "packing mamba2",
            "data.packing: a state space would carry one sample's state to the next; data.packing=false pads them instead"),
    refused("lora_states", NEVER_TRIED, "model", "lora mamba2",
            "lora.rank={lora.rank}: adapters beside the linears of Mamba-2 layers were never tried here"),
    linears,
    # Packed pairs have no columns, and scales of rows stay whole.
    refused("quantised_linears", "transformers/integrations/bitsandbytes.py:196; peft's docs, accelerate/deepspeed.md", "tp",
            "tp lora lora.bits",
            "tp={mesh.tp} with lora.bits={lora.bits}: AutoTP would cut packed weights, and knows nothing of their scales"),
    # A Linear8bitLt keeps its weight in its own state too, where nothing divides or frees it.
    refused("int8_zero3", "bitsandbytes/nn/modules.py:1159; LLaMA-Factory's model_utils/quantization.py:198", "zero_stage",
            "zero_stage=3 lora lora.bits=8",
            "zero_stage=3 with lora.bits=8: bitsandbytes keeps 8-bit weights beside what ZeRO-3 divides; 4 bits are divided"),
    refused("int8_gpu", "bitsandbytes' docs, installation: LLM.int8() needs Turing or newer", "model",
            f"lora lora.bits=8 !cpu older={INT8_FROM}", f"lora.bits=8 on {{gpu.name}}: LLM.int8 needs compute capability {INT8_FROM}, this "
            "has {gpu.compute_capability}; 4 bits run"),
    # What trains quantised weights is around the Trainer (trainer_files.why_not_alone).
    refused("quantised_programs", "ours: write=llama_factory, axolotl and ms_swift alone quantise weights, and train by the Trainer",
            f"cp {' '.join(DEEPSPEED_OPTIONS)}", "lora lora.bits",
            ("cp", "cp={mesh.cp} with lora.bits={lora.bits}: programs that quantise weights divide the batch by all ranks under Ulysses"),
            *((name, f"{name} with lora.bits={{lora.bits}}: programs that quantise weights don't call DeepSpeed's functions for it")
              for name in DEEPSPEED_OPTIONS)),
    # Ulysses drops the mask between samples, and gathers their positions, by which flash attention alone tells them apart.
    refused("packed_ulysses", "ulysses: deepspeed/runtime/sequence_parallel/ulysses_sp.py:296, :546", "cp", "cp packing !flash",
            "cp={mesh.cp} with data.packing: without flash attention samples would see each other; data.packing=false pads them instead"),
    # Flash attention tells samples apart by position ids in a batch of one sequence alone, and without a word not at all in others.
    refused("packed_flash", "transformers/modeling_flash_attention_utils.py:574", "micro_batch_size", "!micro_batch_size=1 packing flash",
            "micro_batch_size={candidate.micro_batch_size} with data.packing: flash attention would let packed samples see each other; "
            "1 sequence at a time"),
)  # fmt: skip
"""The rules for supervised samples and adapters."""
