"""Scripts and command lines of Megatron-LM become plans, and their changes are diffs that say what they say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from msgspec.structs import replace

import orchestrator as so
from orchestrator.audit import changes, formats, megatron, script, shell
from orchestrator.audit.audit import Audit
from orchestrator.audit.reading import LISTS, Setup
from orchestrator.engines import ENGINES
from orchestrator.engines.megatron_parts import config_fields
from orchestrator.errors import InputError
from orchestrator.plan import Plan
from orchestrator.planning import Planner

SAMPLES = Path(__file__).parent / "samples"
MODEL = "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 2048 --max-position-embeddings 2048"
REST = "--micro-batch-size 1 --global-batch-size 256 --train-iters 100 --lr 1e-4 --bf16 --tokenizer-type GPT2BPETokenizer"

NOT_COMPARED = ("model", "predicted", "rejected", "run", "calibration", "prices", "extra")
BY_MEANING = ("family", "name", "pattern", "mixer", "feed_forward", "num_query_groups", "kv_channels", "rotary_base", "rotary_percent")
"""Fields of a model that can be written in several ways, or that name it."""


def differences(one: Plan, other: Plan) -> list[str]:
    """Fields in which two plans differ, names aside; a model's layers count, not how its pattern is written."""
    found = [name for name in Plan.__struct_fields__ if name not in NOT_COMPARED and getattr(one, name) != getattr(other, name)]
    a, b = one.model, other.model
    found += [f"model.{name}" for name in a.__struct_fields__ if name not in BY_MEANING and getattr(a, name) != getattr(b, name)]
    same = (list(a.each_layer()), a.query_groups, a.head_dim) == (list(b.each_layer()), b.query_groups, b.head_dim)
    rotary = [(m.rotary_base, m.rotary_percent) if m.position_embedding == "rope" else None for m in (a, b)]
    found += [] if same and rotary[0] == rotary[1] else ["model's layers"]
    assert one.predicted is not None
    assert other.predicted is not None
    close = other.predicted.step_time_s == pytest.approx(one.predicted.step_time_s, rel=1e-9)
    return found + ([] if close else ["step_time_s"])


def audited(tmp_path: Path, words: str, **keys: object) -> Audit:
    file = tmp_path / "train.sh"
    file.write_text(f"torchrun pretrain_gpt.py {words}\n")
    return so.audit(file, **{"gpus": 16, "cluster": "dgx_h100", **keys})


# ------------------------------------------------------------------------------------------------------------ reading bash


def words_of(text: str) -> list[str]:
    return [word.text for command in shell.read(text).commands for word in command]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("A=8\necho $A ${A} ${B:-3} $((A*2+$A))", ["echo", "8", "8", "3", "24"]),
        ("A=(x 'y z')\nA+=(w)\necho ${A[@]}", ["echo", "x", "y", "z", "w"]),
        ("A=(x 'y z')\necho \"${A[@]}\"", ["echo", "x", "y z"]),
        ("A=\"--b 1 \\\n  --c 2\"\necho $A", ["echo", "--b", "1", "--c", "2"]),
        ("A=1\nif [ $A -gt 2 ]; then B=x; elif [ $A -eq 1 ]; then B=y; else B=z; fi\necho $B", ["echo", "y"]),
        ("if [[ -z \"$A\" ]]; then echo no; else echo yes; fi", ["echo", "no"]),
        ("case big in small) echo s;; b*) echo b;; esac", ["echo", "b"]),
        ("f() { echo $1; }\nf 3", ["echo", "3", "f", "3"]),
        ("export A=2 B=$A\necho $A # $B\n", ["echo", "2"]),
    ],
)  # fmt: skip
def test_bash_is_read_without_running_it(text: str, words: list[str]) -> None:
    assert words_of(text) == words


def test_what_cannot_be_decided_is_said_with_its_line() -> None:
    found = shell.read('A=1\nif [ -f "$X" ]; then\n  A=2\nfi\nfor i in 4 5; do\n  echo $i\ndone\n')
    assert [note.split(":")[0] for note in found.notes] == ["line 2", "line 5"]
    assert found.variables["A"][0].text == "1"


@pytest.mark.parametrize("end", ["\\", "\\\n", "\\\n\n"])
def test_a_last_line_that_goes_on_with_nothing_is_bash(end: str) -> None:
    found = shell.read(f"echo a \\\n b {end}")
    assert ([word.text for word in found.commands[0]], found.notes, found.broken) == (["echo", "a", "b"], (), "")


def test_a_here_document_goes_to_its_file() -> None:
    assert shell.read('S=1\ncat <<EOT > ds.json\n{"stage": $S}\nEOT\n').files == {"ds.json": '{"stage": 1}\n'}


# -------------------------------------------------------------------------------------------------------------- the sample


def test_a_script_becomes_its_plan() -> None:
    found = so.audit(SAMPLES / "pretrain_gpt.sh", cluster="dgx_h100")
    assert found.plan is not None
    plan = found.plan
    assert (plan.world_size, plan.tp, plan.pp, plan.dp, plan.zero_stage, plan.num_microbatches) == (32, 8, 2, 2, 1, 128)
    assert (plan.model.ffn_hidden_size, plan.model.vocab_size, plan.model.activation, plan.model.tie_embeddings) == (
        11008,
        32000,
        "swiglu",
        False,
    )
    assert {span.recompute for stage in plan.stages for span in stage.layers if span.kind == "decoder"} == {"full"}
    assert found.legal
    assert found.fits
    assert repr(found) == f"<Audit of {SAMPLES / 'pretrain_gpt.sh'}: fits>"


def test_nothing_is_left_out() -> None:
    """Every flag is in the plan, or in one of the lists that are shown."""
    found = so.audit(SAMPLES / "pretrain_gpt.sh", cluster="dgx_h100").reading
    assert found.unknown == ("--not-a-flag 3",)
    assert "--manual-gc" in found.slower
    assert any(flag.startswith("--save") for flag in found.beside)
    assert any("Llama2Tokenizer" in what for what in found.assumed)
    text = (SAMPLES / "pretrain_gpt.sh").read_text()
    line = script.training_line(shell.read(text), text)
    used = {flag.name for flag in line.flags} - {said.split()[0] for name in LISTS.values() for said in getattr(found, name)}
    silent = (
        "num-layers hidden-size num-attention-heads seq-length max-position-embeddings swiglu normalization position-embedding-type "
        "disable-bias-linear untie-embeddings-and-output-weights ffn-hidden-size attention-dropout hidden-dropout tokenizer-type bf16 "
        "use-distributed-optimizer pipeline-model-parallel-size tensor-model-parallel-size micro-batch-size global-batch-size "
        "train-iters lr recompute-granularity recompute-method recompute-num-layers"
    )
    assert used == {f"--{name}" for name in silent.split()}


def test_a_change_is_a_diff_of_the_same_file_and_means_what_it_says() -> None:
    found = so.audit(SAMPLES / "pretrain_gpt.sh", cluster="dgx_h100")
    rows = [*found.changes, *([found.together] if found.together else [])]
    assert len(rows) == 4
    assert found.step_time_s is not None
    for row in rows:
        assert row.text is not None, row.what
        assert row.judged.step_time_s < found.step_time_s
        again = formats.read(row.text, "x.sh")
        assert found.judge.judged(again.reading.setup).plan == row.judged.plan
        assert again.reading.unknown == found.reading.unknown
        assert row.diff.count("\n-") + row.diff.count("\n+") >= 1
    assert found.together is not None
    assert found.together.judged.step_time_s < min(row.judged.step_time_s for row in found.changes)


# -------------------------------------------------------------------------------------------------------------- round trip


OLDER = {"cluster.software.megatron_core": "0.16.1"}
"""Later releases have no program for BERT and T5 (Python 3.12 and later install one)."""


@pytest.mark.parametrize(
    "keys",
    [
        {"recipe": "llama3_8b", "gpus": 16},
        {"recipe": "gpt3_175b", "gpus": 128},
        {"recipe": "mixtral_8x7b", "gpus": 64, "engine": "megatron"},
        {"recipe": "t5_large", "gpus": 16, "engine": "megatron", "model.activation": "gelu", **OLDER},
        {"recipe": "bert_large", "gpus": 8, "engine": "megatron", **OLDER},
        {"recipe": "qwen3_8b", "gpus": 16, "pin.recompute": "selective"},
        {"recipe": "gpt_tiny", "gpus": 4, "engine": "megatron", "cluster": "cpu"},
        {"recipe": "llama3_8b_128k", "gpus": 16, "engine": "megatron"},
        {"recipe": "llama3_8b", "gpus": 64, "pin.pp": 4, "pin.tp": 2, "train.precision": "fp8"},
        {"recipe": "qwen3_next_80b_a3b", "engine": "megatron", "pin.tp": 1, "pin.pp": 8, "pin.ep": 8},
        {"recipe": "gpt_tiny", "gpus": 4, "engine": "megatron", "model.activation": "relu2"},
    ],
)
def test_a_plan_comes_back_as_itself_from_its_own_arguments(keys: dict[str, object], tmp_path: Path) -> None:
    """But for what Megatron-LM's command line can't say (segment embeddings), which recipe= says."""
    answer = so.plan(**keys)
    program = ENGINES[answer.plan.engine].program
    assert program is not None
    plan = Planner(answer.settings).for_program(answer.found) or answer.plan
    assert program.why_not(plan) is None
    (file,) = [file for file in answer.job().files if file.path == program.arguments]
    (tmp_path / file.path).write_text(file.content)
    found = so.audit(tmp_path / file.path, recipe=keys["recipe"], gpus=plan.world_size, cluster=plan.cluster.name,
                     **{name: value for name, value in keys.items() if name in (*OLDER, "model.activation")})  # fmt: skip
    assert found.plan is not None
    assert found.problem == ""
    assert found.reading.unknown == ()
    assert differences(plan, found.plan) == []


# ----------------------------------------------------------------------------------------------------------- what is wrong


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("--tensor-model-parallel-size 3", "gpus=16: is no multiple of tp x pp x cp = 3 x 1 x 1 = 3"),
        ("--pipeline-model-parallel-size 16 --num-layers-per-virtual-pipeline-stage 3", "num_layers=32"),
        ("--tensor-model-parallel-size 0", "tp=0: must be at least 1"),
        ("--context-parallel-size 0", "cp=0: must be at least 1"),
        ("--tensor-model-parallel-size 8 --micro-batch-size 3", "is no multiple of dp x micro-batch = 2 x 3"),
        ("--num-query-groups 8 --group-query-attention --context-parallel-size 2 --seq-length 2047 --max-position-embeddings 2047", "2047"),
    ],
)
def test_a_rule_that_is_broken_is_named(words: str, problem: str, tmp_path: Path) -> None:
    found = audited(tmp_path, f"{MODEL} {REST} {words}")
    assert not found.legal
    assert problem in found.problem


@pytest.mark.parametrize(
    "script", ["{} {}", 'OPTS="{}"\n{} $OPTS', "OPTS=({})\n{} ${{OPTS[@]}}", "{} --pipeline-model-parallel-layout 'Et*15|t*17L' {}"]
)
def test_a_layout_is_written_so_that_a_shell_leaves_it_whole(script: str, tmp_path: Path) -> None:
    """Its bars were a pipe to the shell, so that no advice of a layout had a diff."""
    stages = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --use-distributed-optimizer"
    first, last = ("python pretrain_gpt.py " * (script[0] == "{"), "python pretrain_gpt.py " * (script[0] != "{"))
    file = tmp_path / "train.sh"
    file.write_text(script.format(f"{first}{stages}", f"{last}{MODEL} {REST}") + "\n")
    found = so.audit(file, gpus=8, cluster="dgx_h100")
    wanted = replace(found.setup, layout="Et*17|t*15L", first_layers=None, last_layers=None)
    text = found.source.edited(found.reading.setup, wanted, 8)
    assert text is not None
    assert found._says(text, wanted, ())
    (word,) = [line for line in text.split() if "Et*17" in line]
    assert (word.strip('"') == "'Et*17|t*15L'") is ('"' not in script)


def test_a_script_without_a_flag_of_an_activation_trains_gelu_whatever_the_recipe_has(tmp_path: Path) -> None:
    """t5_11b's script was priced with its recipe's relu, which keeps 7.8 GiB less a GPU than what Megatron-LM trains."""
    found = audited(tmp_path, f"{MODEL} {REST} --use-distributed-optimizer", gpus=8, recipe="llama3_8b")
    assert found.plan is not None
    assert found.plan.model.activation == "gelu"
    asked = audited(tmp_path, f"{MODEL} {REST} --use-distributed-optimizer", gpus=8, recipe="llama3_8b", **{"model.activation": "relu2"})
    assert asked.plan is not None
    assert asked.plan.model.activation == "relu2"


def test_full_recompute_without_method_and_number_of_layers_is_refused(tmp_path: Path) -> None:
    """transformer_config.py: recompute_method must be "block" or "uniform"; recompute_num_layers must be between 1 and the stage's."""
    full = f"{MODEL} {REST} --recompute-granularity full"
    for flags, lacking in (("--recompute-method block", "recompute_num_layers"), ("--recompute-num-layers 1", "recompute_method")):
        assert f"recompute_granularity=full needs {lacking}" in audited(tmp_path, f"{full} {flags}").problem
    assert audited(tmp_path, f"{full} --recompute-method uniform --recompute-num-layers 1").legal


def test_method_and_number_of_layers_are_refused_beside_selective_recompute(tmp_path: Path) -> None:
    """Megatron-LM: recompute method is not yet supported for selective recomputing granularity; recompute_num_layers must be None."""
    for flag in ("--recompute-method uniform", "--recompute-num-layers 1"):
        found = audited(tmp_path, f"{MODEL} {REST} --recompute-granularity selective {flag}")
        assert (
            found.problem
            == f"{flag[2:].partition(' ')[0].replace('-', '_')} is of recompute_granularity=full: Megatron refuses it beside selective"
        )
        (mended,) = [row for row in found.changes if row.what.startswith("recompute")]
        assert mended.text is not None, "it gains less than other choices, which leave the flag where it is"
        assert audited(tmp_path, mended.text).legal
    full = audited(tmp_path, f"{MODEL} {REST} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
    assert full.legal


def test_a_flag_that_megatrons_parser_does_not_know_is_no_plain_yes(tmp_path: Path) -> None:
    found = audited(tmp_path, f"{MODEL} {REST} --cross-entropy-loss-fussion")
    assert "legal      yes, but for what is unknown here\n" in str(found)
    said = (
        "--cross-entropy-loss-fussion (did you mean --cross-entropy-loss-fusion?): added by the program, as Megatron-LM's own parser stops"
    )
    assert any(line.startswith(said) for line in found.reading.assumed)
    assert "legal      yes\n" in str(audited(tmp_path, f"{MODEL} {REST} --cross-entropy-loss-fusion"))


def test_no_change_is_offered_that_leaves_a_file_illegal(tmp_path: Path) -> None:
    found = audited(
        tmp_path, f"{MODEL} {REST} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --train-samples 9"
    )
    assert "train_iters and train_samples: Megatron takes one of them" in found.problem
    assert (found.changes, found.together, found.searched) == ((), None, None)
    assert "\nNothing near mends it: no change of one choice is legal.\n" in str(found)


def test_what_lacks_memory_says_how_much_and_what_mends_it(tmp_path: Path) -> None:
    found = audited(tmp_path, f"{MODEL} {REST} --num-layers 40 --hidden-size 5120 --num-attention-heads 40")
    assert found.legal
    assert found.fits is False
    assert found.judged is not None
    assert found.judged.lacking_bytes > 0
    assert found.changes
    assert not found.changes[0].judged.lacking_bytes


def test_a_lack_by_a_price_that_lacks_a_setting_is_no_verdict(tmp_path: Path) -> None:
    words = f"{MODEL} {REST} --num-layers 40 --hidden-size 5120 --num-attention-heads 40"
    known, doubted = (audited(tmp_path, f"{words} {more}") for more in ("--save there", "--optimizer-offload-fraction 0.5 --nccl-ub"))
    assert (known.fits, doubted.fits) == (False, None)
    assert "DOES NOT FIT, lacks" in str(known)
    assert "DOES NOT FIT" not in str(doubted)
    assert "can't be told: by a price that knows nothing of --optimizer-offload-fraction and 1 more setting it lacks" in str(doubted)
    assert doubted.summary()["fits"] is None


LLAMA3_8B = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention --num-query-groups 8 "
    "--seq-length 8192 --max-position-embeddings 8192 --position-embedding-type rope --attention-dropout 0 --hidden-dropout 0 --swiglu "
    "--normalization RMSNorm --untie-embeddings-and-output-weights --disable-bias-linear --micro-batch-size 1 --global-batch-size 128 "
    "--lr 1e-4 --train-iters 100 --bf16 --grad-reduce-in-bf16 --context-parallel-size 2 --use-distributed-optimizer --vocab-size 128256 "
    "--overlap-grad-reduce --overlap-param-gather --tokenizer-type NullTokenizer --fp8-format hybrid"
)
"""What NVIDIA published on 8 H100 with 13,812 tokens a second and GPU (Megatron-LM, examples/llama/README.md), less FP8 weights."""


def test_fp8_weights_make_room_for_a_run_that_its_authors_published(tmp_path: Path) -> None:
    wide, narrow = (audited(tmp_path, f"{LLAMA3_8B} {more}", gpus=8) for more in ("", "--fp8-param-gather"))
    assert (wide.fits, narrow.fits) == (None, True), "26% is no certainty"
    assert re.search(r"memory +may not fit, lacks .*; 26% chance of running out", str(wide))
    assert re.search(r"memory +fits: 61.8 GiB of .* usable, every rank; .*% chance of running out", str(narrow))
    assert narrow.reading.unpriced == ()
    assert narrow.step_time_s is not None
    assert 128 * 8192 / narrow.step_time_s / 8 == pytest.approx(13_812, rel=0.03)
    assert narrow.fastest is not None
    assert narrow.fastest.fp8_param_gather, "no search without it finds a plan that fits"


def test_the_fastest_of_all_plans_is_no_slower_than_the_changes_where_the_files_engine_only_plans(tmp_path: Path) -> None:
    """--apply-layernorm-1p: no worker of Megatron's layers trains it, which DeepSpeed's Hugging Face models do, but not in FP8."""
    for precision in ("", "--fp8-format hybrid"):
        found = audited(tmp_path, f"{LLAMA3_8B} --apply-layernorm-1p {precision} --context-parallel-size 2", gpus=8)
        assert found.fastest is not None
        fitting = [change.judged.step_time_s for change in found.changes if not change.judged.lacking_bytes]
        assert found.fastest.prediction.step_time_s <= 1.001 * min(fitting)


@pytest.mark.parametrize(
    ("before", "after", "where"),
    [
        ("--lr 1e-4", '"--lr 1e-4', "line 2: the quote that opens here is never closed"),
        ("A=1", 'A="--lr 1e-4', "line 1: the quote that opens here is closed by that of line 2, which opens another"),
    ],
)
def test_a_quote_that_is_not_closed_is_named_by_file_and_line(tmp_path: Path, before: str, after: str, where: str) -> None:
    script = f'A=1\nB="--train-iters 10"; torchrun pretrain_gpt.py --num-layers 2 {REST} $A $B\n'.replace(before, after, 1)
    (tmp_path / "train.sh").write_text(script)
    with pytest.raises(InputError) as caught:
        so.audit(tmp_path / "train.sh", cluster="dgx_h100")
    assert str(caught.value).endswith(f"; {tmp_path / 'train.sh'}: {where}")


HARMLESS = (
    "--attention-backend flash --use-flash-attn --manual-gc --manual-gc-interval 10 --profile --profile-step-start 4 --use-pytorch-profiler"
)


def test_what_takes_no_memory_leaves_the_verdict_on_memory_as_it_is(tmp_path: Path) -> None:
    """Profiles, garbage collection and the attention that every price has; what changes the result alone is no data and no log."""
    short = f"{LLAMA3_8B} --micro-batch-size 8"
    assert audited(tmp_path, short, gpus=8).fits is False
    found = audited(tmp_path, f"{short} {HARMLESS} --decoupled-lr 1e-5 --save here", gpus=8)
    assert found.fits is False
    assert "DOES NOT FIT" in str(found)
    assert (found.reading.unpriced, found.reading.unknown) == ((), ())
    assert found.reading.slower == (
        "--manual-gc", "--manual-gc-interval 10", "--profile", "--profile-step-start 4", "--use-pytorch-profiler"
    )  # fmt: skip
    assert "\nresult     1 setting of what is trained, without time or memory: --decoupled-lr 1e-5\n" in str(found)
    assert found.summary()["result"] == ["--decoupled-lr 1e-5"]
    assert "--save here" in found.reading.beside
    for slow in ("unfused", "local"):
        assert f"--attention-backend {slow}" in audited(tmp_path, f"{short} --attention-backend {slow}", gpus=8).reading.unpriced


@pytest.mark.parametrize(("more", "legal"), [("", False), ("--reuse-grad-buf-for-mxfp8-param-ag", True)])
def test_mxfp8_weights_are_gathered_in_the_gradients_buffer_alone(more: str, legal: bool, tmp_path: Path) -> None:
    words = f"{LLAMA3_8B} --fp8-format e4m3 --fp8-recipe mxfp8 --fp8-param-gather {more}"
    found = audited(tmp_path, words, gpus=8, cluster="dgx_b200")
    assert found.legal == legal, found.problem
    assert legal or "needs reuse_grad_buf_for_mxfp8_param_ag" in found.problem


def test_the_fullest_stages_ranks_are_those_that_are_there(tmp_path: Path) -> None:
    """One rank a stage was named "0, 8 ... 0"; ranks without GPUs had tokens of a GPU."""
    tiny = "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64"
    words = f"{tiny} {REST.replace('--bf16', '')} --pipeline-model-parallel-size 8"
    for gpus, ranks in ((8, {str(stage) for stage in range(8)}), (16, {f"{2 * stage} to {2 * stage + 1}" for stage in range(8)})):
        found = str(audited(tmp_path, words, gpus=gpus, cluster="cpu"))
        said = re.search(r"ranks of stage \d \((.*)\)", found)
        assert said is not None
        assert said.group(1) in ranks
        assert re.search(r"^predicted +.* tokens/s/rank.*; no interval", found, re.MULTILINE)


def test_pins_stand_over_the_file(tmp_path: Path) -> None:
    found = audited(tmp_path, f"{MODEL} {REST}", pin={"tp": 4, "recompute": "full"})
    assert found.plan is not None
    assert (found.plan.tp, found.plan.strategy.recompute) == (4, "full")


@pytest.mark.parametrize(
    ("text", "keys", "message"),
    [
        ("", {}, "is empty"),
        ("echo hello\n", {}, "no command with Megatron-LM's flags"),
        (f"python pretrain_gpt.py {MODEL} {REST}", {"gpus": None}, "gpus: is missing"),
        (f"python pretrain_gpt.py {MODEL} {REST} --hidden-size many", {}, "hidden-size=many: is no whole number"),
        ("python pretrain_gpt.py --num-layers 4 --micro-batch-size 1 --lr 1 --bf16", {}, "hidden_size: is missing"),
        (f"python pretrain_mamba.py {MODEL} {REST}", {}, "can't be described"),
        (f"python pretrain_gpt.py {MODEL} {REST} --hybrid-override-pattern M-M", {}, "Mamba"),
        (f"python pretrain_gpt.py {MODEL} {REST}", {"gpu": 4}, "did you mean gpus"),
        (f"python pretrain_gpt.py {MODEL} {REST}", {"largest": "seq_length"}, "is not for audit"),
        (f"python pretrain_gpt.py {MODEL} {REST}", {"pin": {"tp": "x"}}, "pin.tp=x"),
        (f"python pretrain_gpt.py {MODEL} {REST} --num-experts 8 --moe-layer-freq foo(3)", {}, "is no list of layers"),
        (f"python pretrain_gpt.py {MODEL} {REST} --num-experts 8 --moe-layer-freq '([1]*'", {}, "is no list of layers"),
        (f"python pretrain_gpt.py {MODEL} {REST} --num-attention-heads 48", {}, "num_attention_heads"),
    ],
)
def test_a_file_that_cannot_be_audited_is_one_error(text: str, keys: dict[str, object], message: str, tmp_path: Path) -> None:
    file = tmp_path / "train.sh"
    file.write_text(text)
    given = {name: value for name, value in {"gpus": 16, "cluster": "dgx_h100", **keys}.items() if value is not None}
    with pytest.raises(so.InputError, match=message.replace("(", r"\(")):
        so.audit(file, **given)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("kind", ["aux_loss", "seq_aux_loss", "global_aux_loss", "none"])
def test_the_loss_that_balances_experts_is_read_as_it_is_said(tmp_path: Path, score: str, kind: str) -> None:
    experts = "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 2048 --swiglu --disable-bias-linear --moe-aux-loss-coeff 1e-3"
    router = f"--moe-router-score-function {score} --moe-router-load-balancing-type {kind}"
    found = audited(tmp_path, f"{MODEL} {REST} {experts} {router} --use-distributed-optimizer", gpus=8)
    assert found.plan is not None
    said = config_fields(found.plan.model)
    assert (said["moe_router_load_balancing_type"], said["moe_aux_loss_coeff"]) == (kind, 0.0 if kind == "none" else 1e-3)


def test_overlaps_of_the_experts_exchange_are_read_and_priced(tmp_path: Path) -> None:
    """Neither is among what the prediction knows nothing of; a rule of theirs that the line breaks is named."""
    experts = "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 2048 --swiglu --disable-bias-linear --expert-model-parallel-size 4"
    line = f"{MODEL} {REST} {experts} --moe-token-dispatcher-type alltoall --use-distributed-optimizer"
    overlaps = "--overlap-moe-expert-parallel-comm --delay-wgrad-compute"
    plain, beside = (audited(tmp_path, f"{line} {more}", gpus=8) for more in ("", overlaps))
    setup = beside.reading.setup
    assert (setup.overlap_moe_expert_parallel_comm, setup.delay_wgrad_compute) == (True, True)
    assert not plain.reading.setup.overlap_moe_expert_parallel_comm
    assert not any("overlap_moe" in said or "delay_wgrad" in said for said in beside.reading.unpriced)
    assert plain.plan.predicted is not None
    assert beside.plan.predicted is not None
    assert beside.plan.predicted.by_cause["ep"] < plain.plan.predicted.by_cause["ep"]


@pytest.mark.parametrize("path", ["nowhere.sh", "."])
def test_a_path_that_is_no_file_is_one_error(path: str) -> None:
    with pytest.raises(so.InputError, match="audit="):
        so.audit(path, gpus=8)


# ---------------------------------------------------------------------------------------------------- sizes and commands

LINE = "pretrain_gpt.py --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
LINE += "--vocab-size 99 --micro-batch-size 1 --global-batch-size 32 --bf16 --lr 1e-4 "


@pytest.mark.parametrize(
    "flag",
    ["seq-length 0", "num-layers-per-virtual-pipeline-stage 0", "pipeline-model-parallel-size 0", "tensor-model-parallel-size 0",
     "tensor-model-parallel-size -2", "micro-batch-size 0", "context-parallel-size 0"],
)  # fmt: skip
def test_a_size_of_nothing_is_no_legal_plan(flag: str, tmp_path: Path) -> None:
    file = tmp_path / "a.sh"
    file.write_text(f"{LINE} --{flag}\n")
    name, value = flag.split()
    said = ""
    try:
        said = so.audit(file, cluster="dgx_h100", gpus=8).problem
    except InputError as error:
        said = str(error)
    assert f"={value}: must be at least" in said
    assert "divisible" not in said, name


@pytest.mark.parametrize("path", ["train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"])
def test_a_size_of_nothing_is_no_ds_config(path: str) -> None:
    with pytest.raises(InputError, match=f"{path}=0: must be at least 1"):
        formats.read(json.dumps({"train_batch_size": 32, path: 0}), "a.json")


def test_what_expr_and_echo_print_is_known() -> None:
    """Also in backticks; of other commands it is said that the script does not say it."""
    text = "N=$(expr 5 + 5)\nM=`expr 2 \\* 4`\nH=$(echo 640)\nB=`cat size`\n"
    text += "pretrain_gpt.py --num-layers $N --num-attention-heads $M --hidden-size $H --micro-batch-size $B --seq-length 32\n"
    script_read = shell.read(text)
    flags = {flag.name: flag.values[0].text for flag in script.training_line(script_read, text).flags}
    assert flags == {
        "--num-layers": "10",
        "--num-attention-heads": "8",
        "--hidden-size": "640",
        "--micro-batch-size": "$(cat",
        "--seq-length": "32",
    }
    found = script.reading_of(script.training_line(script_read, text), script_read)
    assert any("--micro-batch-size is $(cat" in line for line in found.assumed)


EXPERTS = {"num_experts": 8}
PAIRED = EXPERTS | {"overlap_moe_expert_parallel_comm": True}


@pytest.mark.parametrize(
    ("modules", "given", "mode", "note"),
    [
        ("mlp", {}, "mlp", ""),
        ("mlp,moe", EXPERTS, "mlp", ""),
        ("moe", EXPERTS, "mlp", "moe without mlp"),
        ("mlp", EXPERTS, "none", "mlp without moe"),
        ("mlp", PAIRED, "mlp", ""),
        ("mla_up_proj,moe", PAIRED, "mla_up_proj", "moe does nothing"),
    ],
)
def test_mlp_and_moe_of_megatron_are_told_apart(modules: str, given: dict[str, object], mode: str, note: str) -> None:
    """`mlp` is the feed-forward of layers without experts, `moe` that of the others, which the combined schedule does not compute again."""
    f = megatron.Fields({"recompute_granularity": "selective", "recompute_modules": modules, **given})
    assert megatron.recompute_of(f) == (mode, None)
    assert [note in one for one in f.assumed] == ([True] if note else [])


LATENT = EXPERTS | {"multi_latent_attention": True}


@pytest.mark.parametrize("latent", [False, True])
def test_user_buffers_that_megatron_turns_off_are_read_as_off(latent: bool) -> None:
    given = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "tp_comm_overlap": True, "num_layers": 4}
    f = megatron.Fields(given | ({"multi_latent_attention": True} if latent else {}))
    assert megatron.setup_of(f, "megatron").tp_comm_overlap is not latent
    assert any(line.startswith("tp_comm_overlap does nothing with multi_latent_attention") for line in f.assumed) is latent


@pytest.mark.parametrize(
    ("modules", "given", "mode", "unpriced", "idle"),
    [
        ("mlp moe mla_up_proj layernorm", LATENT, "mla_up_proj+mlp", ["layernorm"], False),
        ("mla_up_proj shared_experts", LATENT, "mla_up_proj", ["shared_experts"], False),
        ("layernorm mlp", {}, "mlp", [], True),
        ("layernorm mlp", {"transformer_impl": "local"}, "layernorm+mlp", [], False),
        ("core_attn mlp", {}, "mlp", [], False),
        ("core_attn", {}, "selective", [], False),
    ],
)
def test_modules_that_no_mode_has_leave_the_most_that_one_has(
    modules: str, given: dict[str, object], mode: str, unpriced: list[str], idle: bool
) -> None:
    f = megatron.Fields({"recompute_granularity": "selective", "recompute_modules": modules.split(), **given})
    assert megatron.recompute_of(f) == (mode, None)
    assert f.unpriced == [f"recompute_modules={name}" for name in unpriced]
    assert f.slower == ["recompute_modules=core_attn"] * (modules == "core_attn mlp"), "flash attention keeps no scores: time alone"
    assert [one for one in f.assumed if "layernorm does nothing" in one] == f.assumed[-1:] * idle


def test_by_hand_names_every_module_that_megatron_recomputes() -> None:
    """It had layernorm as priced, which audit and the rule of Transformer Engine's norms had not."""
    text = (Path(megatron.__file__).parents[1] / "engines/BY_HAND.md").read_text()
    priced, _, without = next(line for line in text.splitlines() if line.startswith("| `pin.recompute=")).partition(
        "seconds and traffic again; not"
    )
    assert all(f"`{name}`" in without for name in ("shared_experts", "gdn_norm_out", "layernorm"))
    assert all(name in priced for name in megatron.RECOMPUTED[:-2])


def test_what_lacks_memory_without_a_module_that_has_no_price_is_no_verdict(tmp_path: Path) -> None:
    """As NVIDIA's script of DeepSeek-V3 on Megatron's FSDP recomputes norms beside experts."""
    words = (
        f"{MODEL} {REST} --disable-bias-linear --micro-batch-size 16 --num-experts 8 --recompute-granularity selective --recompute-modules"
    )
    found = {modules: audited(tmp_path, f"{words} --recompute-modules {modules}", gpus=8) for modules in ("mlp moe", "mlp moe layernorm")}
    assert [one.fits for one in found.values()] == [False, None]
    assert {one.plan.strategy.recompute for one in found.values() if one.plan} == {"mlp"}
    assert all(one.legal for one in found.values())


@pytest.mark.parametrize(("experts", "paired", "words"), [(True, False, ["mlp", "moe"]), (True, True, ["mlp"]), (False, False, ["mlp"])])
def test_a_change_to_mlp_is_written_in_megatrons_modules(experts: bool, paired: bool, words: list[str]) -> None:
    before = Setup(engine="megatron", experts=experts, overlap_moe_expert_parallel_comm=paired)
    assert megatron.flags_changed(before, replace(before, recompute="mlp"))["--recompute-modules"] == words


def test_transposed_weights_that_fsdp_keeps_are_read_and_priced(tmp_path: Path) -> None:
    words = f"{LLAMA3_8B} --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --use-distributed-optimizer"
    words = f"{words} --fp8-format hybrid --fp8-recipe delayed --fp8-param-gather"
    plain, kept = (audited(tmp_path, f"{words} {more}", gpus=8) for more in ("", "--keep-fp8-transpose-cache"))
    assert kept.reading.unpriced == plain.reading.unpriced
    assert kept.plan.keep_fp8_transpose_cache
    assert not plain.plan.keep_fp8_transpose_cache


def test_what_every_price_takes_for_granted_is_not_called_unpriced(tmp_path: Path) -> None:
    words = f"{LLAMA3_8B} --num-experts 8 --moe-router-topk 2 --bf16 --moe-grouped-gemm --moe-permute-fusion"
    found = audited(tmp_path, words, gpus=8)
    assert not [said for said in (*found.reading.unpriced, *found.reading.beside) if "--moe-" in said]


def test_permutations_are_of_several_kernels_unless_a_script_says_otherwise(tmp_path: Path) -> None:
    """Megatron's own default (transformer_config.py:708 of 0.16.1); what does nothing, with HybridEP, is the plans' default."""
    words = f"{LLAMA3_8B} --num-experts 8 --moe-router-topk 2 --bf16 --moe-grouped-gemm --expert-model-parallel-size 8"
    words = f"{words} --moe-token-dispatcher-type"
    plain, fused = (audited(tmp_path, f"{words} alltoall {more}", gpus=8) for more in ("", "--moe-permute-fusion"))
    assert [one.plan.moe_permute_fusion for one in (plain, fused)] == [False, True]
    assert plain.plan.predicted.step_time_s > fused.plan.predicted.step_time_s
    (other,) = changes.alternatives(plain.setup, plain.judge)["moe_permute_fusion"]
    assert megatron.flags_changed(plain.setup, other) == {"--moe-permute-fusion": []}
    itself = audited(tmp_path, f"{words} flex --moe-flex-dispatcher-backend hybridep", gpus=8, cluster="dgx_b200")
    assert (itself.plan.moe_permute_fusion, itself.problem) == (True, "")
    assert not audited(tmp_path, f"{LLAMA3_8B} --bf16", gpus=8).problem


@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("windows", ["2", "([1]*1+[0]*1)"])
def test_windows_and_experts_of_some_layers_make_one_pattern(experts: bool, windows: str) -> None:
    line = "torchrun pretrain_gpt.py --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 1 "
    line += f"--max-position-embeddings 64 --window-size 127,0 --window-attn-skip-freq '{windows}' "
    line += "--num-experts 4 --moe-layer-freq '([0]*1+[1]*3)' " if experts else ""
    keys = script.read(line).reading.keys
    plain, windowed = {"kind": "attention"}, {"kind": "attention", "window": 128}
    assert keys["model.mixer"] == plain
    assert [(run["layers"], run["mixer"]) for run in keys["model.pattern"]] == [(1, windowed), (1, plain)] * 2
    assert ["feed_forward" in run for run in keys["model.pattern"]] == [False, experts, experts, experts]
    assert "model.feed_forward" not in keys
    assert script.read(line.replace(f" --window-attn-skip-freq '{windows}'", "")).reading.keys["model.mixer"] == windowed


def test_a_vocabulary_that_the_user_gives_is_not_assumed(tmp_path: Path) -> None:
    said = [audited(tmp_path, f"{MODEL} {REST}", **keys).reading.assumed for keys in ({}, {"model": {"vocab_size": 50304}})]
    assert [any("vocab_size" in line for line in lines) for lines in said] == [True, False]


@pytest.mark.parametrize(
    ("named", "size", "of"),
    [
        ("--tokenizer-model meta-llama/Meta-Llama-3-8B", 128256, "recipe=llama3_8b's, by meta-llama/Meta-Llama-3-8B"),
        ("--tokenizer-model some/model-7b", 50257, "GPT-2's, as tokenizer_model=some/model-7b is not read"),
        ("", 50257, "GPT-2's, as tokenizer_type=HuggingFaceTokenizer is not read"),
    ],
)
def test_the_vocabulary_of_a_tokenizer_of_the_hub_is_one_line(named: str, size: int, of: str) -> None:
    """It was "the tokenizer's is not in the file", whatever it was, and Llama 3's 50,257 tokens."""
    line = f"torchrun pretrain_gpt.py {MODEL} {REST}".replace("GPT2BPETokenizer", f"HuggingFaceTokenizer {named}")
    reading = script.read(line).reading
    assert reading.keys["model.vocab_size"] == size
    said = f"vocab_size={size}: {of}; model.vocab_size=, or --vocab-size in a script, says another"
    assert [one for one in reading.assumed if "vocab_size" in one] == [said]


def test_a_variable_that_says_how_large_the_cluster_is_is_no_place_for_a_change(tmp_path: Path) -> None:
    """As in Megatron-LM's examples/gptoss/02_train.sh."""
    file = tmp_path / "train.sh"
    sizes = "GPUS_PER_NODE=8\nWORLD_SIZE=$(($GPUS_PER_NODE*1))\nPP_SIZE=${WORLD_SIZE}\n"
    line = f"torchrun --nproc_per_node $GPUS_PER_NODE pretrain_gpt.py {MODEL} {REST} --pipeline-model-parallel-size $PP_SIZE\n"
    file.write_text(sizes + line)
    source = formats.read(file.read_text(), str(file))
    assert (source.reading.keys["gpus"], source.reading.setup.pp) == (8, 8)
    text = source.edited(source.reading.setup, replace(source.reading.setup, pp=1), 8)
    assert text == (sizes + line).replace("PP_SIZE=${WORLD_SIZE}", "PP_SIZE=1")


def test_what_a_file_of_overrides_does_not_say_is_asked_for_by_its_name(tmp_path: Path) -> None:
    file = tmp_path / "train.sh"
    file.write_text("python run_recipe.py model.tensor_model_parallel_size=2 train.global_batch_size=128 train.micro_batch_size=1\n")
    with pytest.raises(InputError, match=r"model: is missing: the file does not say its layers.*recipe= or model.hf_config= does"):
        so.audit(file, gpus=8)
    found = so.audit(file, recipe="llama3_8b", cluster="dgx_h100")
    assert f"gpus={found.settings.cluster.num_gpus}: the file does not say how many; gpus= does" in found.reading.assumed


@pytest.mark.parametrize("quote", ["'", '"', ""])
def test_a_flag_is_added_behind_the_quotes_of_a_value_and_goes_with_them(quote: str, tmp_path: Path) -> None:
    """As our own megatron_args.sh quotes values; in a command that is quoted as a whole a new flag stays inside."""
    q = quote
    words = f"{MODEL} {REST} --context-parallel-size {q}1{q} --tensor-model-parallel-size {q}2{q}"
    line = f"torchrun pretrain_gpt.py {words}"
    source = formats.read(line + "\n", "a.sh")
    setup = source.reading.setup
    assert source.edited(setup, replace(setup, tp_comm_overlap=True), 8) == f"{line} --tp-comm-overlap\n"
    full = formats.read(f"{line} --recompute-granularity {q}selective{q} --recompute-modules {q}core_attn{q}\n", "a.sh")
    assert full.edited(full.reading.setup, replace(full.reading.setup, recompute="none"), 8) == f"{line}\n"
    if quote != '"':
        whole = formats.read(f'bash -c "{line}"\n', "a.sh")
        assert whole.edited(setup, replace(setup, tp_comm_overlap=True), 8) == f'bash -c "{line} --tp-comm-overlap"\n'


def test_a_flag_of_an_array_that_is_expanded_in_a_text_goes_where_it_stands() -> None:
    """As Megatron-LM's examples/megatron_fsdp/sbatch_mfsdp_deepseek_v3.sh starts its program."""
    head = f"TP=${{TP:-1}}\nARGS=(\n    --tensor-model-parallel-size ${{TP}}\n    {MODEL} {REST}\n    --num-experts 8\n"
    tail = ')\nCMD="\ncd x;\npython pretrain_gpt.py ${ARGS[@]}"\nsrun bash -c "${CMD}"\n'
    source = formats.read(head + "    --expert-tensor-parallel-size 1\n" + tail, "a.sh")
    text = source.edited(source.reading.setup, replace(source.reading.setup, tp=8, etp=8), 8)
    assert text == (head + tail).replace("TP:-1", "TP:-8")


def test_a_strategy_of_megatrons_fsdp_is_said_to_do_nothing_without_it() -> None:
    sizes = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 --vocab-size 512"
    steps = (
        "--micro-batch-size 1 --global-batch-size 8 --train-iters 9 --lr 1e-4 --bf16 --data-parallel-sharding-strategy optim_grads_params"
    )
    for flags, stage, said in (("", 0, True), ("--use-distributed-optimizer", 1, True), ("--use-megatron-fsdp", 3, False)):
        reading = formats.read(f"torchrun pretrain_gpt.py {sizes} {steps} {flags}\n", "train.sh").reading
        assert reading.setup.zero_stage == stage
        assert any("does nothing without use_megatron_fsdp" in line for line in reading.assumed) is said


@pytest.mark.parametrize(("flags", "where"), [
    ("--no-gradient-accumulation-fusion", "unpriced"), ("--no-bias-dropout-fusion", "slower"), ("--no-rope-fusion", "slower"),
])  # fmt: skip
def test_a_kernel_that_is_off_and_on_in_the_price_is_said(flags: str, where: str) -> None:
    assert any(flags in line for line in getattr(formats.read(f"torchrun pretrain_gpt.py {MODEL} {REST} {flags}", "run.sh").reading, where))


def test_experts_that_run_one_by_one_are_said() -> None:
    slower = [
        formats.read(f"torchrun pretrain_gpt.py {MODEL} {REST} --num-experts 8 {flag}", "run.sh").reading.slower
        for flag in ("", "--moe-grouped-gemm")
    ]
    assert [any("experts run one by one" in line for line in lines) for lines in slower] == [True, False]


def test_attention_that_keeps_its_scores_is_no_flash_attention(tmp_path: Path) -> None:
    """Megatron's own is priced; Transformer Engine's unfused one is not, and no price without it says that a run fits."""
    words = LLAMA3_8B.replace(" --fp8-format hybrid", "")
    words = words.replace("--context-parallel-size 2 ", "--tensor-model-parallel-size 2 --sequence-parallel ")
    plain, own, unfused, flash = (
        audited(tmp_path, f"{words} {more}", gpus=32)
        for more in ("", "--transformer-impl local", "--attention-backend unfused", "--attention-backend flash")
    )
    assert (plain.fits, own.fits, unfused.fits, flash.fits) == (True, False, None, True)
    assert not own.reading.unpriced
    assert own.plan.prediction.peak_memory_bytes > 2 * plain.plan.prediction.peak_memory_bytes
    assert "usable, every rank, by a price that knows nothing of --attention-backend\n" in str(unfused)


def test_a_warm_up_that_does_not_end_is_refused_as_megatron_refuses_it(tmp_path: Path) -> None:
    """`assert self.lr_warmup_steps < self.lr_decay_steps`, when every rank has been set up."""
    for more in ("--train-iters 1000 --lr-warmup-iters 1000", "--train-iters 1000 --lr-decay-iters 100 --lr-warmup-iters 200"):
        assert "core/optimizer_param_scheduler.py:157" in audited(tmp_path, f"{LLAMA3_8B} {more}", gpus=32).problem
    for more in ("--train-iters 1000 --lr-warmup-iters 999", "--train-iters 1000 --lr-warmup-fraction 0.1", "--train-iters 1000"):
        assert not audited(tmp_path, f"{LLAMA3_8B} {more}", gpus=32).problem
