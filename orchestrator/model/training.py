"""What decides convergence. The planner reads it and never changes it."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from orchestrator.key import Key, names
from orchestrator.model.lora import Lora
from orchestrator.values import Value

Precision = Literal["bf16", "fp16", "fp32", "fp8", "nvfp4"]
QUANTISED: Final = ("fp8", "nvfp4")
"""Formats of the linears' inputs alone: between them, and in weights and gradients, they are bf16."""
Dtype = Literal["fp32", "bf16", "fp16"]
MomentDtype = Literal["fp32", "bf16", "fp16", "fp8"]
Fp8Recipe = Literal["delayed", "tensorwise", "blockwise", "mxfp8"]


MuonTpMode = Literal["blockwise", "duplicated", "distributed"]
Task = Literal["pretrain", "sft"]
Optimizer = Literal["adamw", "sgd", "muon", "adamw_8bit", "paged_adamw_8bit"]
EIGHT_BIT: Final = ("adamw_8bit", "paged_adamw_8bit")
"""AdamW with moments of 8 bits, bitsandbytes'."""


SEEING: Final = ("vision", "projector", "language")
"""Parts of a model that looks at images: the tower with its patches, what makes tokens of its output, and the text model."""


class Lengths(Value, frozen=True, kw_only=True):
    """Lengths of supervised samples, in tokens, before anything is trained (recipe/supervised.py). `mean` and `mean_square` are of what is
    left of each sample at the training's sequence length."""

    samples: int
    mean: float
    mean_square: float
    longest: int
    """Tokens of the longest sample before any is cut."""
    cut: int
    """Samples longer than the training's sequences."""
    lost: float
    """Share of all tokens that is cut off."""
    sequences: tuple[int, ...] = ()
    """Sequences that packing makes of the samples, each padded to a multiple of 1, 2, 4, ... tokens; none: nobody packed them."""
    dropped: int = 0
    """Samples of which the cut leaves no answer: they are not trained on."""
    answers: int = 0
    """Tokens of all answers, before the cut; 0: not known."""
    answers_lost: int = 0
    """Tokens of answers that are cut off."""
    how: str = ""
    """What the numbers are, if not exact ones of all samples."""
    unlearnt: int = 0
    """Answers of weight 0, which have no loss."""
    merged: int = 0
    """Prompts whose end is inside a token that a completion goes on: "colour: " before "red" with a token " red"."""
    unused: tuple[str, ...] = ()
    """Columns and messages' fields of the data that nothing is done with."""
    loads: tuple[float, ...] = ()
    """What attention has to compute in packed sequences over their mean, from the least to the most, each of an equal share of the
    sequences; none: nobody packed them."""

    @property
    def attended(self) -> float:
        """Tokens of the sample that a token is in, in the mean over tokens: what attention inside packed samples costs is by this.

        >>> Lengths(samples=2, mean=20.0, mean_square=500.0, longest=30, cut=0, lost=0.0).attended  # 10 and 30
        25.0
        """
        return self.mean_square / self.mean

    def room(self, multiple: int) -> float:
        """Tokens that a sample takes of a packed sequence, in the mean, where each is padded to a multiple of so many.

        >>> Lengths(samples=2, mean=20.0, mean_square=500.0, longest=30, cut=0, lost=0.0).room(8)
        23.5
        """
        return self.mean + (multiple - 1) / 2

    def share(self, seq_length: int, multiple: int = 1) -> float:
        """Samples that a packed sequence holds, in the mean, where each is padded to a multiple of so many tokens.

        >>> Lengths(samples=40, mean=35.0, mean_square=1225.0, longest=35, cut=0, lost=0.0, sequences=(40,)).share(64)
        1.0
        """
        if not self.sequences:
            return seq_length / self.room(multiple)
        at = min((multiple - 1).bit_length(), len(self.sequences) - 1)
        return (self.samples - self.dropped) / self.sequences[at]

    def epoch(self, *, packing: bool) -> int:
        """Sequences in which every sample is once."""
        return self.sequences[0] if packing and self.sequences else self.samples - self.dropped


class Training(Value, frozen=True, kw_only=True):
    """`seq_length` in tokens (an encoder's, in an encoder-decoder); `clip` 0: no clipping.

    `grad_accum_dtype` is what micro-batches are summed in, `grad_reduce_dtype` what crosses the data-parallel network.
    """

    global_batch_size: Annotated[int, Key("train.global_batch_size", "of one step", unit="sequences", low=1, high=10**9)]
    seq_length: Annotated[int, Key("train.seq_length", "of a sequence (an encoder's)", unit="tokens", low=1, high=10**9)]
    decoder_seq_length: Annotated[
        int | None, Key("train.decoder_seq_length", "of a decoder's sequence (t5)", unit="tokens", low=1, high=10**9)
    ] = None
    images: Annotated[int | None, Key(
        "train.images", "of a sample, for a model that looks at images; each tile counts", unit="images", default="1", low=1,
        high=10**6)] = None  # fmt: skip
    """Images of a sample; None: the model looks at none."""
    image_tokens: Annotated[
        int | None,
        Key("train.image_tokens", "of a sequence that one image takes, with those of the text seq_length in all", unit="tokens",
            default="what the tower makes of its size of image, else 256", low=1, high=10**6),
    ] = None  # fmt: skip
    """Tokens of a sequence that one image takes; None: the model looks at none."""
    freeze: Annotated[
        tuple[str, ...],
        Key("train.freeze", "what is not trained of a model that looks at images: vision, projector, language", type=str, read=names),
    ] = ()
    """Parts that are not trained, of `SEEING`."""
    precision: Annotated[Precision, Key(
        "train.precision", "of the matrix products; mxfp8 (fp8 with train.fp8_recipe=mxfp8) and nvfp4 are Blackwell's",
        type=Literal[Precision, "mxfp8"])] = "bf16"  # fmt: skip
    fp8_recipe: Annotated[
        Fp8Recipe | None, Key("train.fp8_recipe", "how FP8 tensors are scaled; default: tensorwise before Blackwell, mxfp8 on it")
    ] = None
    """How FP8 tensors are scaled: by the maxima of steps before, by their own, by blocks, by 32 elements (Blackwell's hardware). None where
    precision is not fp8."""
    optimizer: Annotated[Optimizer, Key(
        "train.optimizer", "which; muon, of matrices, beside AdamW for the rest, is megatron's; adamw_8bit is bitsandbytes' (deepspeed), "
        "paged_adamw_8bit with its moments in pages that may go to host memory")] = "adamw"  # fmt: skip
    muon_momentum: Annotated[float, Key("train.muon_momentum", "of muon", low=0, below=1)] = 0.95
    muon_num_ns_steps: Annotated[
        int, Key("train.muon_num_ns_steps", "of muon: Newton-Schulz iterations of an update", unit="iterations", low=1, high=64)
    ] = 5
    muon_tp_mode: Annotated[MuonTpMode, Key(
        "train.muon_tp_mode", "of muon under tp: blockwise orthogonalises each rank's part alone, which is another update at each tp; the "
        "others the whole, on every rank or together")] = "duplicated"  # fmt: skip
    lr: Annotated[float, Key("train.lr", "peak learning rate", above=0, high=1)] = 3e-4
    min_lr: Annotated[float, Key("train.min_lr", "at the end of the schedule", low=0)] = 0.0
    schedule: Annotated[
        Literal["cosine", "linear", "constant", "inverse_square_root", "wsd"],
        Key("train.schedule", "after the warm-up; wsd: stable, then decay in train.decay_steps"),
    ] = "cosine"
    decay_steps: Annotated[int | None, Key(
        "train.decay_steps", "the last ones, in which schedule=wsd decays", unit="steps", default="a tenth of train.steps", low=1,
        high=10**12)] = None  # fmt: skip
    decay: Annotated[Literal["linear", "cosine", "minus_sqrt", "exponential"], Key("train.decay", "how schedule=wsd decays")] = "linear"
    """How the rate falls in those steps, as Megatron's --lr-wsd-decay-style (core/optimizer_param_scheduler.py, get_lr)."""
    warmup: Annotated[
        int, Key("train.warmup", "in which the rate rises from 0 (in the first step) to lr", unit="steps", low=0, high=10**12)
    ] = 0
    """Steps of the warm-up: step s, counted from 0, has the rate lr * s / warmup, so that the first is at 0 and step `warmup` at `lr`."""
    betas: Annotated[tuple[float, float], Key("train.betas", "of adamw", low=0, below=1)] = (0.9, 0.95)
    eps: Annotated[float, Key("train.eps", "of adamw", above=0)] = 1e-8
    weight_decay: Annotated[float, Key("train.weight_decay", "decoupled", low=0)] = 0.1
    clip: Annotated[float, Key("train.clip", "global gradient norm; 0: none", low=0)] = 1.0
    grad_reduce_dtype: Annotated[Dtype, Key("train.grad_reduce_dtype", "what crosses the data-parallel network")] = "fp32"
    grad_accum_dtype: Annotated[Dtype, Key("train.grad_accum_dtype", "what micro-batches are summed in")] = "fp32"
    precision_aware_optimizer: Annotated[bool, Key(
        "train.precision_aware_optimizer", "Transformer Engine's Adam, whose states take fewer bytes (megatron)", offered=True,
        asks="needs Transformer Engine's Adam")] = False  # fmt: skip
    """Transformer Engine's Adam that keeps of its fp32 weights only the 16 bits which the bf16 ones lack, reads gradients in their own
    type, and may keep moments in fewer bits (Megatron's --use-precision-aware-optimizer)."""
    exp_avg_dtype: Annotated[MomentDtype, Key("train.exp_avg_dtype", "of Adam's first moment, with precision_aware_optimizer")] = "fp32"
    exp_avg_sq_dtype: Annotated[MomentDtype, Key("train.exp_avg_sq_dtype", "of its second moment")] = "fp32"
    task: Annotated[Task, Key(
        "task", "pretrain: text; sft: data= is a jsonl of chats or prompts and completions, and answers alone have a loss; rl: on samples "
        "of its own, generated and trained on by turns (rl.*; planned, not started)", type=Literal[Task, "rl"])] = "pretrain"  # fmt: skip
    packing: Annotated[
        bool | None,
        Key("data.packing", "of task=sft: several samples in a sequence, none sees another", type=bool, default="where the plan can"),
    ] = None
    """Whether supervised samples share sequences; None: there are none. `global_batch_size` counts sequences."""
    balance: Annotated[Literal["step", "none", "epoch"], Key(
        "data.balance", "what of packed samples the ranks of a step get: the step's sequences so that all have as much attention to "
        "compute; as they are drawn; or steps of sequences with as much each, which changes what is learnt together",
        type=Literal["step", "none", "epoch"])] = "step"  # fmt: skip
    lengths: Lengths | None = None
    """Lengths of the supervised samples in tokens; None: there are no such samples, or they were not read."""
    lora: Lora | None = None
    """Adapters that are trained in place of the weights; None: all weights are."""
    steps: Annotated[int, Key("train.steps", "to train", unit="steps", low=1, high=10**12)] = 20
    seed: Annotated[int, Key("seed", "of weights and data", low=0, high=2**31 - 1)] = 1234

    @property
    def decay_length(self) -> int:
        """The number of steps in which schedule=wsd decays.

        >>> Training(global_batch_size=1, seq_length=1, schedule="wsd", steps=500).decay_length
        50
        """
        return self.decay_steps or max(1, self.steps // 10)
