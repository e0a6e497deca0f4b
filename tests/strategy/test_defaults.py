"""What nobody declared or chose is not there: no axis, no option, no traffic that hides, no bytes. The few defaults that are something say
which engine has it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from orchestrator.cost.profile import LayerProfile, Profile
from orchestrator.strategy.axes.traffic import Traffic
from orchestrator.strategy.capabilities import Capabilities, StateBytes, Traits
from orchestrator.strategy.layerwise import LayerChoice
from orchestrator.strategy.pins import Pins
from orchestrator.strategy.spec import ENGINE_OPTIONS, Candidate, Mesh, Strategy, option_words

SOMETHING: dict[type, dict[str, Any]] = {
    Traits: {
        "gradient_buffer": "fixed",
        "reduces_every_microbatch_from_stage": 2,  # ZeRO-2's definition: a gradient is gone once it is reduced
        "weight_gathers_per_microbatch": 2,  # ZeRO-3: forward and backward
        "overlaps_grad_reduce": True,
        "overlaps_param_gather": True,
        "bucket_itemsize": 2,  # bf16
        "message_parameters": (0, 0),
        "flash_attention": True,
        "fused_permutations": True,
        "logits_bytes": 8.0,  # 16 bits, their fp32 copy, 16 bits of softmax
        "fp32_gradient_fusion": True,
        "layers": "megatron",
        "context_parallel": "ring",
    },
    Capabilities: {"least_sequence_part": 1, "tasks": ("pretrain",)},
    StateBytes: {},
    Traffic: {"hidden": "nothing", "count": 1},
    Profile: {"backward_of_forward": 2.0, "states_per_weight": 4.0},  # two products of the forward's size; weight, gradient, two moments
    LayerProfile: {"reductions": 2},  # attention's and the MLP's
    Pins: {},
}


@pytest.mark.parametrize("struct", SOMETHING, ids=lambda struct: struct.__name__)
def test_what_is_not_said_is_nothing(struct: type[msgspec.Struct]) -> None:
    something = dict(SOMETHING[struct])
    for field in msgspec.structs.fields(struct):
        default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        if default is not msgspec.NODEFAULT:
            expected = something.pop(field.name, None)
            assert default == expected or (expected is None and default in (0, None, False, "", (), {}))
    assert something == {}


def test_a_mesh_that_nobody_divides_is_one_rank_and_a_candidate_one_pass_after_the_other() -> None:
    mesh = Mesh()
    assert [mesh.degree(axis) for axis in ("tp", "pp", "cp", "ep", "etp", "dp")] == [1] * 6
    assert mesh.world_size == mesh.expert_dp == 1
    strategy = Strategy(mesh=mesh)
    assert option_words(strategy) == []
    assert (strategy.zero_stage, strategy.zero_shard_size, strategy.recompute) == (0, None, "none")
    assert not any((strategy.sequence_parallel, strategy.offload_optimizer))
    assert (strategy.tiled_mlp, strategy.tiled_logits) == (1, 1)
    assert {"overlap_grad_reduce", "overlap_param_gather", "tiled_mlp", "tiled_logits"} <= {*ENGINE_OPTIONS}
    candidate = Candidate(engine="x", strategy=strategy, micro_batch_size=1, num_microbatches=1)
    assert (candidate.vpp, candidate.microbatch_group_size_per_vp_stage, candidate.schedule) == (1, None, "1f1b")
    assert candidate.label() == "x tp=1 pp=1 dp=1 zero_stage=0 mbs=1"
    assert LayerChoice(tp=2) == LayerChoice(tp=2, zero3=False, recompute=False)
