"""A benchmark, not a test: what only a GPU can tell of the planner's constants, in the first minutes on a machine that has one.

    python tests/benchmarks/first_gpu.py [out=FOLDER] [minutes=9] [only=kernels,layers,...] [device=cuda|cpu]

Run it from a checkout, with torch, megatron-core and deepspeed there (transformer_engine too, for FP8 and the fused layers). Parts, in the
order of what the shipped constants need most; each is a process of its own with a limit, and its result is in FOLDER/first_gpu.json as soon
as it ends. After `minutes` nothing more is begun; the same command with the same out= goes on with what is missing.

  kernels     products of Llama 3 8B's shapes, a copy, what the host takes to launch a small operation, the same as a CUDA graph, and
              copies from and to pinned host memory, each way and both at once (offload)
  layers      2 and 6 layers of Llama 3 8B and of Qwen3-30B-A3B with 16 experts, at 4,096 tokens (the device's time) and at 128 (the
              host's), in BF16 and FP8, eager and captured, with delayed weight gradients: the engine's own classes by
              orchestrator.workers.rehearsal
  rehearsals  the fullest and slowest stage of three recipes alone, peak and seconds beside the predicted
  profile     python -m orchestrator.profile of Llama 3 8B's shape
  programs    twenty steps of each engine at one rank, with timers and checkpoints, ten more from the last one, and once with the
              optimizer's states in host memory

`only` takes parts, or single cases by name. What a case can't do is written with the reason.
A machine that reaches no package registry gets what is missing by tests/benchmarks/first_gpu.sh.
python -m orchestrator.calibrate runs=FOLDER/first_gpu.json reads the layers' cases.
device=cpu is a dry run with tiny models: it shows that every part starts and writes, and measures nothing of use.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from shutil import which
from statistics import median
from typing import Any, Final

from orchestrator.commands import arguments, command, usage
from orchestrator.errors import InputError
from orchestrator.plan import from_json

PACKAGES: Final = ("torch", "triton", "megatron-core", "transformer-engine", "flash-attn", "deepspeed", "transformers")
DENSE: Final = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 32768, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "max_position_embeddings": 8192, "tie_word_embeddings": False,
}  # fmt: skip
"""Llama 3 8B with a small vocabulary: its layers are what is measured."""
EXPERTS: Final = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "num_experts": 16, "num_experts_per_tok": 8, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "vocab_size": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}  # fmt: skip
"""Qwen3-30B-A3B with the 16 experts that a rank of eight has."""
TINY: Final = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512}
TINY_EXPERTS: Final = {**TINY, "moe_intermediate_size": 64, "head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2}
LAYERS: Final = (2, 6)
STEPS: Final = 8
RECIPES: Final = (("llama3_8b", "8"), ("qwen3_30b_a3b", "16"), ("llama3_70b", "64"))
"""Recipes of which stages are rehearsed, and for how many GPUs they are planned: the device need not have the others."""
LIMIT_S: Final = 240.0
"""Of one process."""


def kernels(device: str) -> list[dict[str, Any]]:
    """Rows {what, value, unit}: medians of repeated operations on the first device."""
    import torch

    cuda = device == "cuda"
    half = torch.bfloat16

    def seconds(work: Callable[[], Any], repeats: int = 20) -> float:
        for _ in range(3):
            work()
        found = []
        for _ in range(repeats):
            if cuda:
                torch.cuda.synchronize()
            begin = time.perf_counter()
            work()
            if cuda:
                torch.cuda.synchronize()
            found.append(time.perf_counter() - begin)
        return median(found)

    rows: list[dict[str, Any]] = []
    scale = 1 if cuda else 16
    for tokens, width, out in product((512 // scale, 4096 // scale), (4096 // scale,), (4096 // scale, 6144 // scale, 28672 // scale)):
        a, b = torch.randn(tokens, width, dtype=half, device=device), torch.randn(width, out, dtype=half, device=device)
        rows.append({"what": f"product {tokens}x{width}x{out} bf16", "value": 2 * tokens * width * out / seconds(lambda a=a, b=b: a @ b),
                     "unit": "FLOP/s"})  # fmt: skip
    source = torch.empty((1 << 30) // scale**2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    rows.append(
        {"what": "copy, bytes read and written", "value": 2 * source.numel() / seconds(lambda: target.copy_(source)), "unit": "B/s"}
    )
    small = torch.ones(64, device=device)

    def launches() -> None:
        for _ in range(200):
            small.add_(1.0)

    rows.append({"what": "a small operation, eager", "value": seconds(launches) / 200, "unit": "s"})
    if cuda:
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            launches()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph):
            launches()
        rows.append({"what": "a small operation, in a CUDA graph", "value": seconds(graph.replay) / 200, "unit": "s"})
        host = [torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        there = [torch.empty(1 << 28, dtype=torch.uint8, device=device) for _ in range(2)]
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]

        def move(to_device: bool, to_host: bool) -> None:
            if to_device:
                with torch.cuda.stream(streams[0]):
                    there[0].copy_(host[0], non_blocking=True)
            if to_host:
                with torch.cuda.stream(streams[1]):
                    host[1].copy_(there[1], non_blocking=True)

        for what, ways in (("to the device", (True, False)), ("to the host", (False, True)), ("both ways at once, each", (True, True))):
            rows.append({"what": f"pinned memory, {what}", "value": (1 << 28) / seconds(lambda ways=ways: move(*ways)), "unit": "B/s"})
    return rows


def layer_cases(device: str) -> Iterator[tuple[str, dict[str, Any], list[str]]]:
    """(name, Hugging Face configuration, keys) of each rehearsed plan: every layer number and length of a kind before the next kind."""
    tokens = (4096, 128) if device == "cuda" else (128, 32)
    kinds = (("bf16", []), ("graphs", ["pin.cuda_graph_impl=local"]), ("fp8", ["train.precision=fp8"]))
    delayed = ["pin.overlap_moe_expert_parallel_comm=true", "pin.delay_wgrad_compute=true"]
    for model, config, tiny in (("dense", DENSE, TINY), ("experts", EXPERTS, TINY_EXPERTS)):
        more = [] if model == "dense" else [("delayed_bf16", delayed), ("delayed_fp8", [*delayed, "train.precision=fp8"])]
        for (kind, words), length, layers in product([*kinds, *more], tokens, LAYERS):
            if device == "cpu" and kind != "bf16":
                continue  # these need a GPU: nothing to start
            base = {**config, **(tiny if device == "cpu" else {}), "num_hidden_layers": layers}
            yield f"{model}_{kind}_{length}_{layers}", base, [f"train.seq_length={length}", *words]


def orchestrator(words: Sequence[str], log: Path) -> tuple[int, str]:
    """Exit status and last line of a command of the package. A process that outlives its limit has status 124."""
    return process([sys.executable, "-m", *words], log)


def process(words: Sequence[str], log: Path) -> tuple[int, str]:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as stream:
        try:
            status = subprocess.run(words, stdout=stream, stderr=subprocess.STDOUT, timeout=LIMIT_S, check=False).returncode
        except subprocess.TimeoutExpired:
            return 124, f"not through after {LIMIT_S:.0f} s"
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return status, next((line for line in reversed(lines) if line.startswith("error")), lines[-1] if lines else "")


def measured_layers(name: str, config: dict[str, Any], words: Sequence[str], device: str, out: Path) -> dict[str, Any]:
    """One rehearsed plan: seconds of a micro-batch, of a layer's forward pass and of the update, peak bytes, beside the predicted."""
    folder = out / "layers" / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    path = folder.parent / f"{name}.config.json"
    path.write_text(json.dumps(config))
    precision = [] if any(word.startswith("train.precision") for word in words) or device == "cpu" else ["train.precision=bf16"]
    keys = [f"model.hf_config={path}", "gpus=1", "engine=megatron", "train.global_batch_size=4", "pin.micro_batch_size=1",
            "pin.recompute=none", "launch=none", *precision, *words, f"out={folder}"]  # fmt: skip
    where = ["cluster=cpu"] if device == "cpu" else []
    status, said = orchestrator(["orchestrator.run", *keys, *where], out / "layers" / f"{name}.plan.log")
    if not (folder / "plan.json").is_file():
        return {"refused": said, "status": status}
    written = folder / "rehearsed.json"
    steps = ["--plan", str(folder / "plan.json"), "--rank", "0", "--steps", str(STEPS), "--out", str(written)]
    status, said = orchestrator(["orchestrator.workers.rehearsal", *steps], folder / "rehearsal.log")
    if status or not written.is_file():
        return {"refused": said, "status": status}
    (result,) = json.loads(written.read_text())
    text = (folder / "plan.json").read_text()
    plan = from_json(text)
    step_s = median(result["microbatch_s"]) * plan.num_microbatches + median(result["update_s"])
    predicted = plan.predicted
    beside = {} if predicted is None else {"predicted_step_s": predicted.step_time_s, "predicted_peak_bytes": predicted.peak_memory_bytes}
    return {**result, **beside, "plan": json.loads(text), "metrics": [{"step": step, "step_time_s": step_s} for step in range(STEPS)]}


def per_layer(cases: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Seconds of one layer, forward and backward, of each kind and length: the difference of two numbers of layers."""
    found = {}
    for name, few in cases.items():
        kind, _, layers = name.rpartition("_")
        many = cases.get(f"{kind}_{LAYERS[1]}", {})
        if layers == str(LAYERS[0]) and "microbatch_s" in few and "microbatch_s" in many:
            found[kind] = (median(many["microbatch_s"]) - median(few["microbatch_s"])) / (LAYERS[1] - LAYERS[0])
    return found


def commands_of(device: str, out: Path) -> Iterator[tuple[str, str, list[str]]]:
    """(part, name, words) of the commands of the package that are run as a user would."""
    small = out / "small.json"
    small.write_text(json.dumps({**DENSE, **(TINY if device == "cpu" else {}), "num_hidden_layers": 2}))
    here = ["cluster=cpu"] if device == "cpu" else []
    shape = [
        f"model.hf_config={small}",
        "gpus=1",
        f"train.seq_length={128 if device == 'cpu' else 2048}",
        "train.global_batch_size=8",
        *here,
    ]
    if device == "cuda":
        for recipe, gpus in RECIPES:
            words = [f"recipe={recipe}", f"gpus={gpus}", "cluster=dgx_h100", "rehearse=true", "launch=none"]
            yield "rehearsals", recipe, ["orchestrator.run", *words, f"out={out / 'rehearsals' / recipe}"]
    yield "profile", "profile", ["orchestrator.profile", *shape, "engine=megatron", "launch=local", f"out={out / 'profile'}"]
    for engine, pins in (("megatron", []), ("deepspeed", []), ("deepspeed", ["pin.offload=true", "pin.zero_stage=1"])):
        name = f"{engine}{'_offload' if pins else ''}"
        words = [*shape, f"engine={engine}", "launch=local", "data.made_up=true", *pins]
        folder = out / "programs" / name
        yield "programs", name, ["orchestrator.run", *words, "train.steps=20", "train.save_every=20", f"out={folder}"]
        if not pins:
            again = ["train.steps=30", "train.change=steps", f"resume={folder}", f"out={folder}_resumed"]
            yield "programs", f"{name}_resumed", ["orchestrator.run", *words, *again]


def result_of(name: str, words: Sequence[str], out: Path) -> dict[str, Any]:
    """What a command left in its folder: its end, its steps, and what it wrote of a rehearsal or profile."""
    begin = time.monotonic()
    status, said = orchestrator(words, out / "logs" / f"{name}.log")
    folder = Path(next(word for word in words if word.startswith("out=")).removeprefix("out="))
    found: dict[str, Any] = {"words": list(words), "status": status, "said": said, "seconds": time.monotonic() - begin}
    for file in ("status.json", "profile.json", *(str(path.relative_to(folder)) for path in sorted(folder.glob("rehearsal/*.json")))):
        if (folder / file).is_file():
            found[file] = json.loads((folder / file).read_text())
    for file in ("metrics.jsonl", "timers.jsonl"):
        if (folder / file).is_file():
            found[file] = [json.loads(line) for line in (folder / file).read_text().splitlines()]
    return found


def installed(device: str) -> dict[str, Any]:
    """Versions of the packages that measurements depend on (None: not there), and the device's own words."""
    found: dict[str, Any] = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    if device == "cuda":
        asked = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,clocks.max.sm,power.limit", "--format=csv,noheader"]
        found["gpu"] = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    return found


PARTS: Final = ("kernels", "layers", "rehearsals", "profile", "programs")


def run(words: Sequence[str]) -> int:
    """Exit status: 1 where nothing could be measured."""
    given = arguments(words, ("out", "minutes", "only", "device"))
    device, only = given.get("device", "cuda"), given.get("only", ",".join(PARTS)).split(",")
    if device not in ("cuda", "cpu"):
        raise InputError("device", device, "is no device here", ["cuda", "cpu"])
    if device == "cuda" and which("nvidia-smi") is None:
        raise InputError("device", device, "has no driver here: no nvidia-smi; device=cpu is a dry run")
    try:
        until = time.monotonic() + 60 * float(given.get("minutes", "9"))
    except ValueError:
        raise InputError("minutes", given["minutes"], "is no number of minutes") from None
    out = Path(given.get("out") or tempfile.mkdtemp(prefix="first_gpu_")).resolve()
    out.mkdir(parents=True, exist_ok=True)
    file = out / "first_gpu.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {"when": time.strftime("%Y-%m-%d"), "device": device}
    found["installed"] = installed(device)
    found["missing"] = [package for package, there in found["installed"].items() if there is None]
    print(f"in {out}; not installed: {', '.join(found['missing']) or 'nothing'}", flush=True)

    def keep(part: str, name: str, result: dict[str, Any]) -> None:
        found.setdefault(part, {})[name] = result
        found["runs"] = [{"name": name, **case} for name, case in found.get("layers", {}).items() if "plan" in case]
        found["layer_s"] = per_layer(found.get("layers", {}))
        file.write_text(json.dumps(found, indent=1) + "\n")
        print(f"{part} {name}: {result.get('refused') or result.get('said') or 'measured'}", flush=True)

    waiting: list[tuple[str, str, Callable[[], dict[str, Any]]]] = []
    inner = [sys.executable, __file__, f"device={device}", "only=kernels", "inner=true"]
    waiting.append(("kernels", "kernels", lambda: measured_kernels(inner, out)))
    for name, config, keys in layer_cases(device):
        waiting.append(("layers", name, lambda name=name, config=config, keys=keys: measured_layers(name, config, keys, device, out)))
    for part, name, keys in commands_of(device, out):
        waiting.append((part, name, lambda name=name, keys=keys: result_of(name, keys, out)))
    for word in only:
        if word not in {*PARTS, *(name for _, name, _ in waiting)}:
            raise InputError("only", word, "is no part and no case", [*PARTS, *(name for _, name, _ in waiting if name not in PARTS)])
    for part, name, measure in waiting:
        if {part, name} & {*only} and name not in found.get(part, {}):
            if time.monotonic() > until:
                print(f"out of time before {part} {name}; the same command with out={out} goes on", flush=True)
                break
            keep(part, name, measure())
    for kind, seconds in found.get("layer_s", {}).items():
        print(f"a layer, forward and backward, {kind} tokens: {1e3 * seconds:.3f} ms")
    return 0 if any(part in found for part in PARTS) else 1


def measured_kernels(words: Sequence[str], out: Path) -> dict[str, Any]:
    status, said = process(words, out / "logs" / "kernels.log")
    return {"rows": json.loads(said)} if status == 0 else {"refused": said, "status": status}


if __name__ == "__main__":
    if "inner=true" in sys.argv:
        print(json.dumps(kernels("cpu" if "device=cpu" in sys.argv else "cuda")))
    else:
        sys.exit(command(sys.argv[1:], lambda: usage(__doc__), run))
