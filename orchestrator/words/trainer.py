"""The language of transformers.Trainer: settings by the names of TrainingArguments (transformers 5, training_args.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from orchestrator.model.training import EIGHT_BIT
from orchestrator.words.terms import NOTHING, Table, Term, switch

SIZES: Final[Table] = (
    Term("max_steps", "training.steps", back=lambda steps: int(steps) if int(steps) > 0 else NOTHING),
    Term("per_device_train_batch_size", "micro_batch_size", default=8, back=int, least=1),
    Term("gradient_accumulation_steps", "num_microbatches", default=1, back=int, least=1),
)
RATE: Final[Table] = (Term("learning_rate", "training.lr", default=5e-5, back=float),)
OPTIMIZER: Final[Table] = (
    Term("warmup_steps", "training.warmup", back=lambda steps: NOTHING),
    Term("weight_decay", "training.weight_decay", default=0.0, back=float),
    Term("adam_beta1", "training.betas", default=0.9, to=lambda betas: betas[0], back=float),
    Term("adam_beta2", "training.betas", default=0.999, to=lambda betas: betas[1], back=float),
    Term("adam_epsilon", "training.eps", default=1e-8, back=float),
    Term("max_grad_norm", "training.clip", default=1.0, back=float),
    switch("bf16", "training.precision", "bf16")._replace(unless=NOTHING),
    switch("fp16", "training.precision", "fp16")._replace(unless=NOTHING),
    Term("seed", "training.seed", back=int),
)
"""Settings of a training. A warm-up may be a share too, which is the reader's to judge, and two settings make one pair of betas."""
SCHEDULES: Final = {
    "cosine_with_min_lr": "cosine", "linear": "linear", "constant": "constant", "constant_with_warmup": "constant",
    "inverse_sqrt": "inverse_square_root", "warmup_stable_decay": "wsd",
}  # fmt: skip
"""Schedules of plans by lr_scheduler_type (transformers/optimization.py)."""
DECAYS: Final = {"linear": "linear", "cosine": "cosine", "minus_sqrt": "1-sqrt"}
"""The Trainer's names of how a rate falls after it was stable (transformers/optimization.py, get_wsd_schedule)."""
BITSANDBYTES: Final = {name: name for name in EIGHT_BIT} | {"adamw_bnb_8bit": "adamw_8bit"}
"""Optimizers of plans by the Trainer's names of bitsandbytes' (transformers/training_args.py, OptimizerNames)."""
ADAMW: Final = ("adamw_torch", "adamw_torch_fused", "adamw_hf")
"""The Trainer's names of torch's AdamW."""
FLASH: Final[Mapping[str, tuple[Any, ...]]] = {
    "attn_implementation": ("flash_attention_2", "flash_attention_3", "sdpa"),
    "attn_impl": ("flash_attn", "flash_attention_2", "flash_attention_3", "sdpa"),
    "flash_attn": ("fa2", "fa3", "sdpa", "auto"),
    "flash_attention": (True,),
    "sdp_attention": (True,),
}
"""Settings of these programs, with their values that keep no attention scores, as is priced."""
PLAN: Final[Table] = (*SIZES, *RATE, *OPTIMIZER)
FREEZES: Final[Mapping[str, tuple[tuple[str, str, bool], ...]]] = {
    "llama_factory": (
        ("freeze_vision_tower", "vision", True), ("freeze_multi_modal_projector", "projector", True),
        ("freeze_language_model", "language", False),
    ),
    "ms_swift": (("freeze_vit", "vision", True), ("freeze_aligner", "projector", True), ("freeze_llm", "language", False)),
}  # fmt: skip
"""The switches of programs that freeze a part of a model which looks at images, with the part, and what holds where the file says nothing
(LLaMA-Factory's hparams/finetuning_args.py, ms-swift's arguments/tuner_args.py)."""
IMAGE_PIXELS: Final = ("image_max_pixels", "max_pixels")
"""LLaMA-Factory's and ms-swift's setting of the pixels that an image has at most."""
MOST_PIXELS: Final[Mapping[str, int]] = {"llama_factory": 768 * 768}
"""What holds where the file says nothing (LLaMA-Factory's hparams/model_args.py:305); ms-swift's is the checkpoint's own processor's."""


class Around(NamedTuple):
    """A program around the Trainer: which arguments it calls otherwise, and what it takes by itself."""

    kind: str
    release: str
    start: str
    names: Mapping[str, str]
    """Names of the program by the Trainer's."""
    defaults: Mapping[str, Any] = {}
    """Values by the Trainer's names where the file does not say them."""
    says: Mapping[str, Mapping[str, Any]] = {}
    """What a written file says of a plan's task beside the plan."""
    reentrant: bool = False
    """Whether it recomputes by torch's reentrant function where nothing is said; transformers 5 does not."""
    keeps: str = ""
    """The switch by which it keeps activations; without it every layer is recomputed, whatever gradient_checkpointing says."""
    loads_16_bits: bool = False
    """Whether all weights are trained in the 16 bits of the training, in which they are loaded, where neither DeepSpeed nor FSDP keeps
    fp32 ones. Both programs of which that is so train in bf16 where nothing is said."""
    groups: Mapping[str, str] = {}
    """Settings of the sizes of groups of ranks, by axis."""
    packs: tuple[str, ...] = ()
    """The program's switches for several supervised samples in a sequence, of which none sees another with the attention beside them."""
    attention: tuple[str, Mapping[str, str]] = ("attn_implementation", {})
    """The setting of the attention, and the program's values by transformers' where they differ."""
    packs_by_flash: bool = False
    """Whether it packs by flash attention alone, and stops without."""


FROZEN: Final[Mapping[int, Mapping[str, Mapping[str, Any]]]] = {
    4: {
        "llama_factory": {"quantization_bit": 4, "quantization_type": "nf4", "double_quantization": True},
        "axolotl": {"finetuning_type": "qlora", "load_in_4bit": True},
        "ms_swift": {"quant_bits": 4, "quant_method": "bnb", "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    },
    8: {
        "llama_factory": {"quantization_bit": 8},
        "axolotl": {"load_in_8bit": True},
        "ms_swift": {"quant_bits": 8, "quant_method": "bnb"},
    },
}
"""How each program is told of frozen weights in few bits, by `Lora.bits`: NF4, with scales that are quantised too, and LLM.int8."""
AROUND: Final[Mapping[str, Around]] = {
    "llama_factory": Around(
        kind="arguments of Hugging Face's Trainer",
        release="LLaMA-Factory 0.9.6.dev0, ff6d4d1 (src/llamafactory/hparams)",
        start="FORCE_TORCHRUN=1 llamafactory-cli train RUN/llama_factory.yaml, with your model_name_or_path, dataset and template in it",
        names={"max_length": "cutoff_len"},
        says={"sft": {"stage": "sft", "do_train": True}, "pretrain": {"stage": "pt", "do_train": True}},
        reentrant=True,  # hparams/model_args.py:149
        keeps="disable_gradient_checkpointing",  # model/model_utils/checkpointing.py:184
        packs=("packing", "neat_packing"),  # the second keeps samples apart (data/collator.py)
        attention=("flash_attn", {"flash_attention_2": "fa2"}),
    ),
    "axolotl": Around(
        kind="Axolotl's configuration",
        release="Axolotl 0.18.0, 067b021 (src/axolotl/utils/schemas)",
        start="axolotl train RUN/axolotl.yaml, with your base_model and datasets in it",
        names={
            "per_device_train_batch_size": "micro_batch_size", "max_length": "sequence_len", "optim": "optimizer",
            "lr_scheduler_type": "lr_scheduler", "num_train_epochs": "num_epochs", "model_name_or_path": "base_model",
            "lora_rank": "lora_r", "finetuning_type": "adapter", "lora_target": "lora_target_modules",
        },
        defaults={"per_device_train_batch_size": 1, "lr_scheduler_type": "cosine"},
        reentrant=True,  # utils/config/__init__.py:383
        loads_16_bits=True,  # utils/config/__init__.py:191, loaders/model.py:611; bf16 is auto (utils/schemas/config.py:559)
        groups={"cp": "context_parallel_size", "tp": "tensor_parallel_size"},
        packs=("sample_packing",),
    ),
    "ms_swift": Around(
        kind="ms-swift's arguments for the Trainer",
        release="ms-swift 4.6.0.dev0, 3602360 (swift/arguments)",
        start="swift sft (swift pt for text) RUN/ms_swift.yaml, with your model and dataset in it",
        names={"model_name_or_path": "model", "finetuning_type": "tuner_type", "lora_target": "target_modules"},
        defaults={"per_device_train_batch_size": 1, "gradient_checkpointing": True, "lr_scheduler_type": "cosine",
                  "finetuning_type": "lora", "lora_alpha": 32, "lora_dropout": 0.05},
        loads_16_bits=True,  # arguments/base_args/model_args.py:120, _init_torch_dtype: of a checkpoint in bf16
        groups={"cp": "sequence_parallel_size"},
        packs=("packing",),
        attention=("attn_impl", {"flash_attention_2": "flash_attn"}),
        packs_by_flash=True,  # arguments/sft_args.py:185, _check_padding_free
    ),
}  # fmt: skip
"""Programs for which a plan of DeepSpeed's is written, by the name that `write=` takes."""
