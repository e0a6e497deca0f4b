"""What task=rl asks: the samples of a step, the algorithm, and what the user fixes of where its phases run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from orchestrator.errors import InputError
from orchestrator.key import Key, one_text, shown
from orchestrator.model.spec import Architecture
from orchestrator.values import Value

Algorithm = Literal["grpo", "ppo", "dpo", "online_dpo", "distill"]
GENERATES_NOTHING: Final = ("dpo",)
WRITTEN: Final = ("grpo", "ppo")
"""What verl's, NeMo RL's and slime's files are written for."""
BY_A_REFERENCE: Final = ("dpo", "online_dpo")
"""Algorithms whose loss takes a frozen model's log-probabilities, whatever rl.reference says."""
"""Algorithms that learn from given responses."""
Placement = Literal["auto", "colocated", "split"]
Reward = Literal["rule", "model"]
ProgramName = Literal["nemo_rl", "slime", "verl"]
MOST: Final = 10**9
USUAL_MEMORY: Final = 0.9
"""Share of a GPU that generation may use where nobody says one (vLLM's default)."""


class Measured(Value, frozen=True, kw_only=True):
    """Three numbers of an engine of one's own: seconds of a decoding step with one sequence and with `running` of them, and tokens/s of
    prefill of all its GPUs together."""

    alone_s: float
    running: int
    full_s: float
    prefill: float


def measured_of(name: str, text: Any) -> Measured:
    """Reads `7.1ms,19ms@256,40000`. Raises InputError."""
    said = [part.strip() for part in one_text(name, text).split(",")]
    try:
        alone, full, prefill = said
        step, _, running = full.partition("@")
        found = Measured(alone_s=_milliseconds(alone), running=int(running), full_s=_milliseconds(step), prefill=float(prefill))
    except ValueError:
        why = "is not three numbers: ms a step with one sequence, ms a step with N of them, tokens/s of prefill, as in 7.1ms,19ms@256,40000"
        raise InputError(name, shown(text), why) from None
    if not (0 < found.alone_s <= found.full_s and found.running > 1 and found.prefill > 0):
        raise InputError(name, shown(text), "needs positive numbers, more than one sequence, and a step with many no shorter than with one")
    return found


def _milliseconds(text: str) -> float:
    return float(text.removesuffix("ms")) / 1000


def _model(name: str) -> Key:
    """The key of a model beside the policy."""
    return Key(f"rl.{name}", "recipe of that model, trained or asked by a plan of its own", type=str, default="the policy's size")


class RlKeys(Value, frozen=True, kw_only=True):
    """The keys of task=rl as they are said; `rl_job` of the recipe makes the job of them."""

    prompts: Annotated[int | None, Key("rl.prompts", "of a step", type=int, low=1, high=MOST)] = None
    samples: Annotated[int | None, Key("rl.samples", "responses to each prompt", type=int, low=1, high=MOST)] = None
    prompt_length: Annotated[int | None, Key("rl.prompt_length", "of a prompt, in the mean", type=int, unit="tokens", low=1, high=MOST)] = (
        None
    )
    max_prompt_length: Annotated[
        int | None,
        Key("rl.max_prompt_length", "of the longest prompt", type=int, unit="tokens", default="rl.prompt_length", low=1, high=MOST),
    ] = None
    response_length: Annotated[str | None, Key(
        "rl.response_length",
        "of responses, in tokens: their mean (1060: the deviation is .75 of it), mean and standard deviation (1060+800), or a file with a "
        "length a line (lengths.csv)",
        type=str, path=True)] = None  # fmt: skip
    max_response_length: Annotated[int | None, Key(
        "rl.max_response_length", "where a response is cut off", type=int, unit="tokens", default="what the model's positions leave",
        low=1, high=MOST)] = None  # fmt: skip
    algorithm: Annotated[Algorithm, Key(
        "rl.algorithm",
        "grpo; ppo: with a critic; dpo: pairs of given responses, nothing is generated; online_dpo: pairs of the step's own "
        "samples; both by a reference; distill: by a teacher's log-probabilities")] = "grpo"  # fmt: skip
    critic: Annotated[str | None, _model("critic")] = None
    reward_model: Annotated[str | None, _model("reward_model")] = None
    teacher: Annotated[str | None, _model("teacher")] = None
    updates: Annotated[
        int, Key("rl.updates", "of the weights in a step: mini-batches that its samples are divided into", low=1, high=10**6)
    ] = 1
    epochs: Annotated[int, Key("rl.epochs", "passes of the updates over a step's samples", low=1, high=10**3)] = 1
    reference: Annotated[bool, Key("rl.reference", "a frozen reference model gives log-probabilities too, for a KL term")] = False
    reward: Annotated[Reward, Key("rl.reward", "rule: a function, beside generation; model: a reward model of the model's size")] = "rule"
    staleness: Annotated[
        int, Key("rl.staleness", "steps that samples may be older than the weights that learn from them; 0: on-policy", low=0, high=10**3)
    ] = 0
    placement: Annotated[Placement, Key(
        "rl.placement",
        "colocated: all phases one after the other on all GPUs; split: generation has GPUs of its own")] = "auto"  # fmt: skip
    generation_gpus: Annotated[int | None, Key(
        "rl.generation_gpus", "GPUs of generation, with rl.placement=split", type=int, default="searched", low=1,
        high=10**6)] = None  # fmt: skip
    tp: Annotated[int | None, Key("rl.tp", "tensor-parallel size of generation", type=int, default="searched", low=1, high=10**6)] = None
    dp: Annotated[int | None, Key(
        "rl.dp", "data-parallel size of an engine of generation, over which experts are divided too", type=int, default="searched",
        low=1, high=10**6)] = None  # fmt: skip
    memory: Annotated[float | None, Key(
        "rl.memory", "share of a GPU that generation takes (vLLM's gpu_memory_utilization)", type=float,
        default="what is free, 0.9 at most", above=0, below=1)] = None  # fmt: skip
    offload: Annotated[bool | None, Key(
        "rl.offload",
        "states go to the host's memory while others use the GPU; false: those of every model stay, references, critics and rewards too",
        type=bool, default="whichever is faster")] = None  # fmt: skip
    concurrency: Annotated[
        int, Key("rl.concurrency", "sequences that an engine runs at once, at most (vLLM's max_num_seqs)", low=1, high=10**6)
    ] = 1024
    program: Annotated[ProgramName, Key(
        "rl.program", "whose way of moving states and samples and of asking for log-probabilities is priced",
        default="the one of write=, or nemo_rl")] = "nemo_rl"  # fmt: skip
    eager: Annotated[bool, Key("rl.eager", "generation launches kernels one by one, without CUDA graphs (vLLM's enforce_eager)")] = False
    measured: Annotated[Measured | None, Key(
        "rl.measured",
        "three numbers of your own engine with rl.tp= (and rl.dp=) GPUs: ms a step with one sequence, ms with N of them, tokens/s of "
        "prefill: 7.1ms,19ms@256,40000", type=str, default="published runs of vLLM", read=measured_of)] = None  # fmt: skip

    @property
    def memory_share(self) -> float:
        """Share of a GPU that generation may use."""
        return self.memory or USUAL_MEMORY


def check_updates(keys: RlKeys, program: str) -> None:
    """Raises InputError for updates into which this program can't divide a step: verl divides prompts, the others samples."""
    prompts = keys.prompts or 0
    whole, of = (prompts, "prompts") if program == "verl" else (prompts * (keys.samples or 0), "samples")
    if whole % keys.updates:
        raise InputError("rl.updates", keys.updates, f"does not divide the {whole} {of} of a step")


class Responses(Value, frozen=True, kw_only=True):
    """How long responses are: `values` in tokens, of which as many are drawn as are needed, or without any a log-normal distribution of
    this mean and standard deviation; each at most `longest`."""

    mean: float
    spread: float
    longest: int
    values: tuple[int, ...] = ()


class RlJob(Value, frozen=True, kw_only=True):
    """What is asked, with the lengths read: one step takes `prompts` x `samples` sequences."""

    keys: RlKeys
    prompts: int
    samples: int
    prompt_length: int
    responses: Responses
    models: Mapping[str, Architecture] = {}
    """Models beside the policy that are not of its size: critic, reward, teacher."""

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that there can be."""
        return (self.keys.max_prompt_length or self.prompt_length) + self.responses.longest

    @property
    def sequences(self) -> int:
        return self.prompts * self.samples
