"""Each release of Megatron-core is planned for by its own table, and a version that no table has is said."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hand_plans import BERT, make_plan
from msgspec.structs import replace

from orchestrator import recipe
from orchestrator.detect import Machine
from orchestrator.engines import ENGINES, passthrough
from orchestrator.engines.megatron_args import why_not
from orchestrator.engines.megatron_versions import RELEASES, Release, content, number, release_of, unknown
from orchestrator.errors import InputError
from orchestrator.hardware.spec import Software
from orchestrator.plan import Plan

ROOT = Path(__file__).resolve().parents[2]
OLD, NEW = "0.16.1", "0.19.2"


def of_version(plan: Plan, megatron_core: str) -> Plan:
    software = replace(plan.cluster.software, megatron_core=megatron_core)
    return replace(plan, cluster=replace(plan.cluster, software=software))


def files_of(plan: Plan) -> dict[str, str]:
    return {file.path: file.content for file in ENGINES[plan.engine].translate(plan).files}


@pytest.mark.parametrize("engine", ["megatron", "megatron_deepspeed"])
@pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.version)
def test_each_file_says_for_which_version_it_is(engine: str, release: Release) -> None:
    plan = of_version(make_plan(engine, tp=2), release.version)
    files = files_of(plan)
    requires = json.loads(files["engine.json"])["requires"]
    assert requires["megatron-core"] == release.version
    assert set(release.modules) <= set(requires)
    if engine == "megatron":
        assert f"of Megatron-LM, tag {release.tag}, for " in files["megatron_args.sh"].splitlines()[0]


@pytest.mark.parametrize("engine", ["megatron", "megatron_deepspeed"])
def test_a_version_that_no_release_has_is_said_in_one_line(engine: str) -> None:
    """It is planned as the nearest, and its ranks must have it, not the nearest."""
    plan = make_plan(engine, tp=2)
    job = ENGINES[engine].translate(of_version(plan, "0.18.2"))
    (said,) = (note for note in job.notes if "is not known here" in note)
    assert said == "Megatron-core 0.18.2 is not known here (0.16.1, 0.19.0, 0.19.1, 0.19.2 are): planned by what 0.19.2 has."
    assert json.loads(next(file.content for file in job.files if file.path == "engine.json"))["requires"]["megatron-core"] == "0.18.2"
    for known in (OLD, "0.19.0", NEW, "0.19.2+local"):
        assert not any("is not known here" in note for note in ENGINES[engine].translate(of_version(plan, known)).notes)
        assert unknown(known) is None


@pytest.mark.parametrize(
    ("version", "nearest"), [("0.15.0", OLD), ("0.16.9", OLD), ("0.17.1", OLD), ("0.18.0", NEW), ("0.20.0", NEW), ("1.0", NEW)]
)
def test_the_nearest_release_is_taken(version: str, nearest: str) -> None:
    assert release_of(version).version == nearest


@pytest.mark.parametrize("text", ["new", "", "0", "0.x.1", "v0.16.1"])
def test_a_text_that_is_no_version_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="is no version"):
        release_of(text)


NEW_NAME, GONE_NAME = "moe_paged_stash", "moe_use_legacy_grouped_gemm"


@pytest.mark.parametrize(("name", "has", "lacks"), [(NEW_NAME, NEW, OLD), (GONE_NAME, OLD, NEW), ("lion_beta1", NEW, OLD)])
def test_a_users_value_is_refused_where_the_planned_version_has_no_such_name(name: str, has: str, lacks: str) -> None:
    value = "0.9" if name == "lion_beta1" else "true"
    plan = replace(make_plan("megatron", tp=2), extra={"megatron": dict([passthrough.read("megatron", name, value)])})
    flag = "--" + name.replace("_", "-")
    assert flag in files_of(of_version(plan, has))["megatron_args.sh"]
    with pytest.raises(InputError) as caught:
        files_of(of_version(plan, lacks))
    said = f"is no field or flag of Megatron-core {lacks}, which the plan is for (cluster.software.megatron_core); {has} has it"
    assert said in str(caught.value)


def test_a_value_that_only_a_later_version_takes_is_refused_before() -> None:
    name = "moe_router_score_function"
    kinds = {version: passthrough.megatron_kind(name, version) for version in (OLD, NEW)}
    assert passthrough.typed(f"megatron.{name}", kinds[NEW], "sqrtsoftplus") == "sqrtsoftplus"
    with pytest.raises(InputError, match="choose one of softmax, sigmoid"):
        passthrough.typed(f"megatron.{name}", kinds[OLD], "sqrtsoftplus")


def test_a_program_is_named_where_its_release_has_it() -> None:
    """pretrain_bert.py and pretrain_t5.py moved to examples/ with 0.18, beside which Python finds no megatron."""
    plan = of_version(make_plan("megatron", model=BERT), NEW)
    assert why_not(plan) is None
    assert " PYTHONPATH=. torchrun --nnodes 1 --nproc-per-node 8 examples/bert/pretrain_bert.py " in files_of(plan)["megatron_args.sh"]
    old = files_of(of_version(plan, OLD))["megatron_args.sh"]
    assert "PYTHONPATH" not in old
    assert " torchrun --nnodes 1 --nproc-per-node 8 pretrain_bert.py " in old
    assert "--legacy-tokenizer" not in files_of(plan)["megatron_args.sh"], "0.19 has no such flag"
    assert "and --legacy-tokenizer" in old


def test_what_is_planned_by_default_is_what_the_image_and_new_pythons_have() -> None:
    """Cluster files say no version: the newest that the rules were read for, which docker/ builds and setup.cfg installs from 3.12 on."""
    newest = RELEASES[-1]
    assert Software().megatron_core == newest.version
    assert f"ARG MEGATRON_LM_TAG={newest.tag}\n" in (ROOT / "docker" / "Dockerfile.megatron").read_text()
    low, high = re.search(r'megatron-core>=([\d.]+),<([\d.]+); python_version >= "3.12"', (ROOT / "setup.cfg").read_text()).groups()
    assert number(low) <= number(newest.version) < number(high)


def test_in_an_image_the_engines_are_the_images() -> None:
    """Else those of this machine, where it has any."""
    here = Machine(megatron_core=OLD)
    words, image = ["recipe=gpt3_175b", "gpus=64", "cluster=dgx_h100"], ["container.image=/images/mcore.sqsh"]
    planned = {
        name: recipe.load(words + more, machine, [*ENGINES]).cluster.software.megatron_core
        for name, more, machine in (("here", [], here), ("image", image, here), ("nowhere", [], Machine()))
    }
    assert planned == {"here": OLD, "image": NEW, "nowhere": NEW}


def test_no_default_that_changed_decides_what_a_plan_decides() -> None:
    """A flag whose default is another in a later release stands in the argument list wherever the plan counts on it."""
    changed = {name for release in RELEASES if release.names for section in content(release.names)["defaults"].values() for name in section}
    assert "data_parallel_sharding_strategy" in changed
    plan = of_version(make_plan("megatron", zero_stage=3, megatron_fsdp=True), NEW)
    decided = changed & set(passthrough.DECIDED["megatron"]) - {"cuda_graph_scope"}  # the older name of cuda_graph_modules
    assert decided == {"data_parallel_sharding_strategy"}
    assert all("--" + name.replace("_", "-") in files_of(plan)["megatron_args.sh"] for name in decided)
