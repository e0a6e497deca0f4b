"""A model described by its own code: built without weights or GPU, run once, written as a file that plans anywhere.

usage: python -m orchestrator.describe model.hf_config=FOLDER_OR_JSON|model.code=package.module:factory out=FILE [key=value ...]

  model.hf_config=PATH            a Hugging Face config.json, or the folder that it lies in: any architecture of transformers
  model.code=package.module:factory   in place of it: a function without arguments that gives (module, {argument of its forward: tensor of a
                                  batch of one}); the forward gives a loss, or an output that has one. It is called with the meta device as
                                  torch's default: integers, whose largest says what to draw, are made with device="cpu". A language model
                                  that takes input_ids and labels [1, tokens] is trained on text as its sample shows: labels that are the
                                  ids (the forward shifts them), the next id at each place, or -100 where nothing is masked
  out=FILE                        what to write; plan with model.description=FILE
  train.seq_length=N[,N...]       tokens of a sample; default: the longest that the configuration knows, 4096 at most; not for images
  train.decoder_seq_length=N      the same of a decoder beside an encoder; default: as long
  train.precision=bf16[,fp32]     fp16 and fp8 are as bf16; default: both

Planning needs only the file; this command needs torch and transformers.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import msgspec

from orchestrator.commands import arguments, command_of
from orchestrator.errors import InputError
from orchestrator.key import shown
from orchestrator.model.traced import Descriptions, Traced
from orchestrator.model.training import QUANTISED
from orchestrator.units import ITEMSIZE

PROGRAM: Final = "orchestrator.tracing"
TOLD_AFTER_S: float = 15.0
TOLD: Final = "recording the model by its own code, which no reader here knows: minutes where layers go token by token (Mamba's)"
"""What is said once a recording has taken TOLD_AFTER_S seconds."""
NEEDED: Final = ("torch", "transformers")
CACHE: Final = "ORCHESTRATOR_CACHE"
"""Folder of descriptions that were made on the way; else the user's cache."""
SHIPPED: Final = Path(__file__).parent / "recipes" / "descriptions"
LONGEST: Final = 4096
KEYS: Final = ("model.hf_config", "model.code", "out", "train.seq_length", "train.decoder_seq_length", "train.precision")
COMMAND: Final = "python -m orchestrator.describe"


def recorded_itemsize(precision: str) -> int:
    """Bytes of an activation's element, by which descriptions are told apart: fp8 is a format of the inputs of products only."""
    return 2 if precision in (*QUANTISED, "mxfp8") else ITEMSIZE[precision]


def config_text(path: str) -> str:
    """The config.json at this path, or in this folder. Raises InputError."""
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    try:
        text = file.read_text()
        if not isinstance(json.loads(text), dict):
            raise ValueError("it is no object")
    except (OSError, ValueError) as error:
        raise InputError("model.hf_config", shown(path), f"can't be read as a config.json: {error}") from None
    return text


def describe(source: dict[str, str], seq_length: int | None, decoder_seq_length: int | None, itemsize: int) -> Traced:
    """The model of `source` ({"config": text} or {"code": ...}) recorded in a process of its own. Raises InputError."""
    if not all("code" not in source or part for part in source.get("code", "").partition(":")):
        raise InputError("model.code", source["code"], "is not package.module:factory")
    lacking = [name for name in NEEDED if find_spec(name) is None]
    if lacking:
        kind = json.loads(source.get("config", "{}")).get("model_type")
        key, value = ("model.code", source["code"]) if "code" in source else ("model.hf_config", str(kind))
        why = f"has no reader here, and to describe it by its own code {' and '.join(lacking)} must be installed"
        given = f"{key}={source.get('code', 'PATH')} train.seq_length={seq_length}"
        raise InputError(key, value, f"{why}; where they are, run {COMMAND} {given} out=FILE, and plan with model.description=FILE")
    request = source | {"seq_length": seq_length, "decoder_seq_length": decoder_seq_length, "itemsize": itemsize}
    with tempfile.TemporaryDirectory(prefix="orchestrator-describe-") as folder:
        asked, answer = Path(folder) / "request.json", Path(folder) / "answer.json"
        asked.write_text(json.dumps(request))
        # A CPU is enough, and a GPU that is looked for costs seconds.
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        status, said = _waited_for([sys.executable, "-m", PROGRAM, str(asked), str(answer)], environment)
        if status or not answer.exists():
            last = next((line for line in reversed(said.splitlines()) if line.strip()), f"status {status}")
            raise InputError("model.hf_config" if "config" in source else "model.code", None, f"can't be described: {last}")
        found = json.loads(answer.read_bytes())
    if "error" in found:
        raise InputError(**found["error"])
    return msgspec.convert(found["traced"], Traced)


def _waited_for(command: list[str], environment: dict[str, str]) -> tuple[int, str]:
    """(The command's exit status, what it wrote to standard error). After TOLD_AFTER_S standard error says what takes so long."""
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as run:
        try:
            try:
                _, said = run.communicate(timeout=TOLD_AFTER_S)
            except subprocess.TimeoutExpired:
                print(TOLD, file=sys.stderr, flush=True)
                _, said = run.communicate()
        except BaseException:
            run.kill()
            raise
    return run.returncode, said


def cached(source: dict[str, str], seq_length: int | None, decoder_seq_length: int | None, itemsize: int) -> Traced:
    """What `describe` returns, made once for a configuration and kept in the user's cache. The user's own code may change, and is described
    each time."""
    if "code" in source:
        return describe(source, seq_length, decoder_seq_length, itemsize)
    code = hashlib.sha256(b"".join(file.read_bytes() for file in recording_files())).hexdigest()
    asked = json.dumps([source, seq_length, decoder_seq_length, itemsize, *map(_version, NEEDED), code])
    file = cache_folder() / f"{hashlib.sha256(asked.encode()).hexdigest()[:32]}.json"
    try:
        return msgspec.json.decode(file.read_bytes(), type=Traced)
    except (OSError, msgspec.DecodeError, msgspec.ValidationError):
        pass
    traced = describe(source, seq_length, decoder_seq_length, itemsize)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        beside = file.with_suffix(f".{os.getpid()}")
        beside.write_bytes(msgspec.json.encode(traced))
        beside.replace(file)
    except OSError:  # a cache that can't be written costs seconds next time
        pass
    return traced


def cache_folder() -> Path:
    named = os.environ.get(CACHE)
    root = os.environ.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
    return Path(named) if named else Path(root) / "orchestrator" / "descriptions"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def recording_files() -> list[Path]:
    """Files of the package whose code records a model: another version of them may record otherwise."""
    folder = Path(__file__).parent
    return [*sorted((folder / "tracing").glob("*.py")), *(folder / "model" / name for name in ("traced.py", "ops.py", "layer.py"))]


def read_descriptions(path: str) -> Descriptions:
    """A file that this command wrote, or one of the package's by its name. Raises InputError."""
    shipped = SHIPPED / f"{path}.json"
    try:
        return msgspec.json.decode((shipped if shipped.is_file() else Path(path)).read_bytes(), type=Descriptions)
    except OSError as error:
        raise InputError("model.description", shown(path), f"can't be read: {error.strerror}") from None
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise InputError("model.description", shown(path), f"is no file of {COMMAND}: {error}") from None


# ------------------------------------------------------------------------------------------------ the command


def _numbers(given: dict[str, str], key: str) -> list[int]:
    words = [word for word in given.get(key, "").split(",") if word]
    if not all(word.isdigit() and int(word) > 0 for word in words):
        raise InputError(key, given[key], "needs whole numbers above 0 with a comma between them")
    return [int(word) for word in words]


def _default_length(config: dict[str, Any]) -> int:
    text = config.get("text_config") or config
    return min(LONGEST, int(text.get("max_position_embeddings") or text.get("n_positions") or LONGEST))


def _describe(words: Sequence[str]) -> None:
    given = arguments(words, KEYS, ["out"])
    if ("model.hf_config" in given) == ("model.code" in given):
        raise InputError("model.hf_config", given.get("model.hf_config"), "or model.code=: give one of the two")
    out = Path(given["out"])
    if out.exists():
        raise InputError("out", shown(str(out)), "is there already; name a new file")
    precisions = given.get("train.precision", "bf16,fp32").split(",")
    for name in precisions:
        if name not in ITEMSIZE:
            raise InputError("train.precision", name, "is not known", ITEMSIZE)
    source: dict[str, str] = {"code": given["model.code"]} if "model.code" in given else {"config": config_text(given["model.hf_config"])}
    lengths = _numbers(given, "train.seq_length")
    if not lengths:
        lengths = [_default_length(json.loads(source["config"]))] if "config" in source else [1]
    decoder = _numbers(given, "train.decoder_seq_length")
    found: list[Traced] = []
    for itemsize in dict.fromkeys(map(recorded_itemsize, precisions)):
        for length in lengths:
            traced = cached(source, length, decoder[0] if decoder else length, itemsize)
            if traced not in found:
                found.append(traced)
                print(_line(traced))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(msgspec.json.encode(Descriptions(traced=tuple(found))))
    print(f"wrote {out}; plan with model.description={out}")


def _line(traced: Traced) -> str:
    parameters = sum(run.count * run.layer.parameters for run in traced.runs)
    kinds = ", ".join(f"{run.count} x {run.layer.kind}" for run in traced.runs if run.layer.recomputable)
    length = f"{traced.seq_length} tokens" + (f" and {traced.decoder_seq_length}" if traced.decoder_seq_length else "")
    assumed = f"; assumed of the data: {', '.join(traced.assumed)}" if traced.assumed else ""
    return f"{traced.model_class}, {length} in {8 * traced.itemsize} bits: {parameters:,} parameters; {kinds}{assumed}"


main = command_of(__doc__, _describe)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
