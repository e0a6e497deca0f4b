"""Closed forms: Korthikanti's activations, bytes per parameter by engine, ZeRO's shares; and what a stage's peak is made of."""

from __future__ import annotations

from typing import Any

import pytest
from cost_cases import DEEPSPEED, GPT3_175B, MEGATRON, UNFUSED, a100, candidate, cost_model, gpt, stages
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from orchestrator import api
from orchestrator.cost import states as state
from orchestrator.cost.calibration import Calibration, datasheet
from orchestrator.cost.compute import quantised_bytes
from orchestrator.engines import ENGINES
from orchestrator.hardware.catalog import GPUS
from orchestrator.hardware.spec import Software
from orchestrator.model.families import describe
from orchestrator.model.ops import Gemm
from orchestrator.model.training import Training
from orchestrator.strategy.capabilities import StateBytes, Traits
from orchestrator.strategy.spec import Mesh, Recompute, Strategy
from orchestrator.units import GIB, MIB
from tests.validation.engines.megatron import FUSED_LOSS_LOGITS

S, H, A = 2048, 1024, 16


def saved(recompute: Recompute, *, flash: bool = False, b: int = 4, **strategy: object) -> float:
    model = cost_model(traits=MEGATRON if flash else UNFUSED)
    return model.layer(candidate(micro_batch_size=b, **strategy), "decoder", recompute).saved_bytes


@given(b=st.integers(1, 8), t=st.sampled_from([1, 2, 4, 8]))
def test_activations_match_korthikanti_table_2(b: int, t: int) -> None:
    """arXiv 2205.05198, table 2, bytes per layer."""
    sbh, attention = S * b * H, 5 * A * S / H
    assert saved("none", b=b) == sbh * (34 + attention)
    assert saved("none", b=b, tp=t) == sbh * (10 + 24 / t + attention / t)
    assert saved("none", b=b, tp=t, sequence_parallel=True) == sbh * (34 / t + attention / t)
    assert saved("selective", b=b, tp=t, sequence_parallel=True) == sbh * 34 / t
    assert saved("full", b=b, tp=t) == sbh * 2
    assert saved("full", b=b, tp=t, sequence_parallel=True) == sbh * 2 / t


def test_context_parallelism_divides_all_of_it() -> None:
    for mode in ("none", "selective", "full"):
        assert saved(mode, cp=4) == saved(mode) / 4


def test_flash_attention_drops_the_quadratic_term() -> None:
    """What stays beside 34 sbh is the logsumexp: 4 bytes a head and row (arXiv 2307.08691)."""
    assert saved("none", flash=True, b=1) == S * H * 34 + 4 * A * S
    assert saved("selective", flash=True, b=1) == S * H * 34


def bytes_per_parameter(zero_stage: int, d: int, traits: object = MEGATRON, precision: str = "bf16", **strategy: object) -> float:
    model = cost_model(traits=traits, precision=precision)  # type: ignore[arg-type]
    cost = model.layer(candidate(dp=d, zero_stage=zero_stage, **strategy), "decoder", "none")
    return cost.static_bytes / cost.parameters


@given(d=st.integers(1, 1024))
def test_megatron_holds_18_bytes_a_parameter_and_6_plus_12_over_d_with_its_distributed_optimizer(d: int) -> None:
    """theoretical_memory_usage.py:182."""
    assert bytes_per_parameter(0, d) == 18
    assert bytes_per_parameter(1, d) == pytest.approx(6 + 12 / d)


def test_plain_sgd_keeps_no_moments() -> None:
    cost = cost_model(optimizer="sgd").layer(candidate(), "decoder", "none")
    assert cost.static_bytes == 10 * cost.parameters


def test_the_optimizer_is_sharded_over_context_parallel_ranks_too() -> None:
    assert bytes_per_parameter(1, 4, cp=2) == 6 + 12 / 8


@pytest.mark.parametrize(
    ("training", "resident", "sharded", "step"),
    [
        ({}, 6, 12, 0),
        ({"grad_reduce_dtype": "bf16", "grad_accum_dtype": "bf16"}, 4, 12, 4),
        ({"precision_aware_optimizer": True}, 6, 2 + 8, 0),
        ({"precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}, 6, 2 + 4, 0),
        (
            {
                **{"grad_reduce_dtype": "bf16", "grad_accum_dtype": "bf16", "precision_aware_optimizer": True},
                **{"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"},
            },
            *(4, 6, 0),
        ),
        ({"precision_aware_optimizer": True, "precision": "fp8", "fp8_recipe": "tensorwise", "exp_avg_dtype": "fp8"}, 6, 4 + 5, 0),
        ({"precision_aware_optimizer": True, "precision": "fp8", "fp8_recipe": "delayed", "exp_avg_dtype": "fp8"}, 6, 2 + 5, 0),
    ],
)
def test_narrow_gradients_and_moments_hold_the_tabled_bytes(training: dict[str, Any], resident: int, sharded: int, step: int) -> None:
    """Bytes per parameter under the distributed optimizer of d ranks: resident + sharded/d, and step/d while it steps
    (distrib_optimizer.py:797-806 and 2419, optimizer_config.py:192 and 352)."""
    traits = replace(MEGATRON, gradient_buffer="grad_reduce_dtype")
    states = state.state_bytes(traits, Training(global_batch_size=8, seq_length=8, **training), 1)
    assert states.weight + states.gradient == resident
    assert states.master + states.moments == sharded
    assert states.step == step


def test_moments_of_8_bits_are_bitsandbytes_own_with_a_scale_for_256_and_paged_ones_go_over_the_hosts_link() -> None:
    """2.03125 bytes a parameter, as init_state of bitsandbytes 0.50.2 makes them (tensors of 2^20 elements)."""
    layers = {
        name: cost_model(traits=DEEPSPEED, optimizer=name).layer(candidate(dp=4, zero_stage=2), "decoder", "none")
        for name in ("adamw", "adamw_8bit", "paged_adamw_8bit")
    }
    moments = {name: layer.optimizer_bytes * 4 / layer.parameters - 4 for name, layer in layers.items()}
    assert moments == {"adamw": 8.0, "adamw_8bit": 2.03125, "paged_adamw_8bit": 0.0}
    assert layers["adamw_8bit"].optimizer_s < layers["adamw"].optimizer_s
    cluster = a100()
    link = cluster.host_bandwidth * datasheet(cluster, DEEPSPEED).host_efficiency
    memory = cluster.gpu.memory_bandwidth * datasheet(cluster, DEEPSPEED).optimizer_efficiency
    more = layers["paged_adamw_8bit"].optimizer_s - layers["adamw_8bit"].optimizer_s
    assert more == pytest.approx(layers["adamw"].parameters / 4 * 2 * 2.03125 * (1 / link - 1 / memory))


def test_fp8_keeps_the_copies_of_weights_that_its_products_read() -> None:
    fp8 = {"precision": "fp8", "fp8_recipe": "tensorwise"}
    cluster = replace(a100(), gpu=GPUS["H100-SXM-80GB"])
    plain, copied = (
        cost_model(cluster=cluster, traits=replace(MEGATRON, fp8_weight_copies=copies), **fp8).layer(candidate(), "decoder", "none")
        for copies in (False, True)
    )
    assert copied.weight_bytes - plain.weight_bytes == 2 * plain.parameters
    batch = {"global_batch_size": 8, "seq_length": 8}
    training = {recipe: Training(**batch, **{**fp8, "fp8_recipe": recipe}) for recipe in ("tensorwise", "mxfp8")}
    assert [state.fp8_weight_bytes(training[recipe], GPUS["B200"]) for recipe in ("tensorwise", "mxfp8")] == [1.0, 2 + 2 / 32]


def test_fp8_weights_alone_take_no_bytes_in_16_bits_and_half_of_the_gather() -> None:
    """Megatron's --fp8-param-gather: the copies that FP8 products read are the weights (core/fp8_utils.py, modify_underlying_storage), fp32
    masters stay (distrib_optimizer.py, get_high_precision_init_val), MXFP8 is gathered in 16 bits through the gradients' buffer."""
    cards = {"delayed": "H100-SXM-80GB", "tensorwise": "B200", "mxfp8": "B200"}
    held = {"delayed": (4, 2), "tensorwise": (3, 1), "mxfp8": (4 + 2 / 32, 2 + 2 / 32)}
    for recipe, card in cards.items():
        costs = cost_model(
            cluster=replace(a100(), gpu=GPUS[card]),
            traits=replace(MEGATRON, fp8_weight_copies=True),
            precision="fp8",
            fp8_recipe=recipe,
        )
        wide, narrow = (candidate(dp=8, zero_stage=1, fp8_param_gather=on) for on in (False, True))
        plain, kept = (costs.layer(one, "decoder", "none") for one in (wide, narrow))
        assert (plain.weight_bytes / plain.parameters, kept.weight_bytes / kept.parameters) == held[recipe]
        assert (kept.gradient_bytes, kept.optimizer_bytes) == (plain.gradient_bytes, plain.optimizer_bytes)
        assert costs.layer_static_bytes(narrow, "decoder") == kept.static_bytes
        assert (kept.gather_s < 0.7 * plain.gather_s) == (recipe != "mxfp8")
        assert costs.layer(wide, "embedding", "none") == costs.layer(narrow, "embedding", "none")
    costs = cost_model(cluster=costs.cluster, traits=ENGINES["megatron"].traits(Software()), precision="fp8", fp8_recipe="mxfp8")
    sharded = [
        costs.layer(candidate(dp=8, zero_stage=3, megatron_fsdp=True, fp8_param_gather=on), "decoder", "none") for on in (False, True)
    ]
    assert sharded[1].weight_bytes == (2 + 2 / 32) * kept.parameters / 8, "FSDP divides both of MXFP8's"
    assert sharded[0].transient_forward_bytes - sharded[1].transient_forward_bytes == kept.parameters * (1 - 1 / 32), "gathered narrower"


def test_fsdp_keeps_a_byte_of_each_fp8_weight_whole_where_it_keeps_them_transposed() -> None:
    """core/distributed/fsdp/src/README.md, keep_fp8_transpose_cache: the number of parameters x 1 byte, of linears alone."""
    own = {"dp": 8, "zero_stage": 3, "megatron_fsdp": True, "fp8_param_gather": True}
    costs = cost_model(
        cluster=replace(a100(), gpu=GPUS["H100-SXM-80GB"]),
        traits=ENGINES["megatron"].traits(Software()),
        precision="fp8",
        fp8_recipe="delayed",
    )
    for kind, each in (("decoder", 1), ("embedding", 0)):
        plain, kept = (costs.layer(candidate(**own, keep_fp8_transpose_cache=on), kind, "none") for on in (False, True))
        assert kept.weight_bytes - plain.weight_bytes == each * plain.parameters
        assert (kept.seconds, kept.optimizer_bytes, kept.gather_s) == (plain.seconds, plain.optimizer_bytes, plain.gather_s)
    static = [costs.layer_static_bytes(candidate(**own, keep_fp8_transpose_cache=on), "decoder") for on in (False, True)]
    assert static[1] - static[0] == costs.layer(candidate(**own), "decoder", "none").parameters


def test_fp8_products_keep_a_byte_of_their_inputs_and_attention_its_output_besides() -> None:
    """Of a layer's linears in h per token: qkv 1, fc1 1, fc2 4 at one byte in place of two; the projection's 1 is a byte more."""
    hopper, blackwell = (replace(a100(), gpu=GPUS[name]) for name in ("H100-SXM-80GB", "B200"))
    saved = {}
    for precision in ("bf16", "fp8", "nvfp4"):
        saved[precision] = cost_model(cluster=blackwell, precision=precision).layer(candidate(), "decoder", "none").saved_bytes
    assert saved["bf16"] - saved["fp8"] == 2048 * 1024 * (1 + 1 + 4 - 1)
    assert saved["bf16"] - saved["nvfp4"] == 2048 * 1024 * ((1 + 1 + 4) * (2 - 4.5 / 8) - 4.5 / 8)  # 4 bits, and 8 for each 16 elements
    kept = replace(datasheet(hopper, MEGATRON), fp8_saved_bytes=2.0)  # torchao quantises what it kept in bf16
    assert cost_model(cluster=hopper, precision="fp8", calibration=kept).layer(candidate(), "decoder", "none").saved_bytes == saved["bf16"]


@given(d=st.integers(1, 1024))
def test_full_precision_holds_16_bytes_a_parameter(d: int) -> None:
    """4 weight, 4 gradient, 8 Adam: the weight is its own master."""
    assert bytes_per_parameter(0, d, precision="fp32") == 16
    assert bytes_per_parameter(1, d, precision="fp32") == pytest.approx(8 + 8 / d)


@given(n=st.integers(1, 256))
def test_deepspeed_holds_what_zero_promises(n: int) -> None:
    """arXiv 1910.02054, figure 1, with K = 12 and fp32 gradient accumulation."""
    assert bytes_per_parameter(0, n, DEEPSPEED) == 16
    assert bytes_per_parameter(1, n, DEEPSPEED) == pytest.approx(2 + 4 + 12 / n)
    assert bytes_per_parameter(2, n, DEEPSPEED) == pytest.approx(2 + (4 + 12) / n)
    assert bytes_per_parameter(3, n, DEEPSPEED) == pytest.approx((2 + 4 + 12) / n)


@given(n=st.integers(1, 256), b=st.tuples(*[st.integers(0, 8)] * 4))
def test_a_higher_zero_stage_never_holds_more_states(n: int, b: tuple[int, int, int, int]) -> None:
    per_parameter = StateBytes(weight=b[0], gradient=b[1], master=b[2], moments=b[3])
    held = [state.states(10**6, per_parameter, Strategy(mesh=Mesh(dp=n), zero_stage=stage)).resident for stage in (0, 1, 2, 3)]
    assert held == sorted(held, reverse=True)


def test_hpz_keeps_a_second_copy_of_the_weights_in_its_group() -> None:
    assert bytes_per_parameter(3, 64, DEEPSPEED, zero_shard_size=8) == pytest.approx(18 / 64 + 2 / 8)


def test_offload_takes_states_to_the_host() -> None:
    assert bytes_per_parameter(2, 8, DEEPSPEED, offload_optimizer=True) == 2 + 4 / 8, "sums in fp32 stay"
    assert bytes_per_parameter(2, 8, DEEPSPEED, precision="fp32", offload_optimizer=True) == 4
    assert bytes_per_parameter(3, 8, DEEPSPEED, offload_optimizer=True) == 2 / 8
    assert bytes_per_parameter(1, 8, DEEPSPEED, offload_optimizer=True) == 2 + 4


def test_logits_stand_on_the_last_stage_for_one_micro_batch() -> None:
    """The padded vocabulary over tp, `logits_bytes` each (cross_entropy.py:28)."""
    model = cost_model(gpt(vocab_size=50257))
    head = model.layer(candidate(tp=2, pp=2, micro_batch_size=3), "head", "none")
    padded = 50432  # 50257 up to a multiple of 128 x 2
    assert head.transient_backward_bytes >= 3 * S * padded / 2 * 8
    assert head.transient_backward_bytes < 1.1 * 3 * S * padded / 2 * 8
    fused = model.layer(candidate(tp=2, pp=2, micro_batch_size=3, cross_entropy_loss_fusion=True), "head", "none")
    more = fused.transient_backward_bytes - head.transient_backward_bytes
    assert more == pytest.approx(3 * S * padded / 2 * (FUSED_LOSS_LOGITS - 8), rel=0.01), "the loss whose peaks were published"


def test_recomputed_layers_live_one_at_a_time() -> None:
    model = cost_model(traits=UNFUSED)
    plain, full = (model.layer(candidate(), "decoder", mode) for mode in ("none", "full"))
    assert full.saved_bytes + full.transient_backward_bytes == pytest.approx(plain.saved_bytes + plain.transient_backward_bytes)
    layers = [4]
    peak = {mode: model.price(candidate(), stages(model.model, layers, mode)).peak_memory_bytes for mode in ("none", "full")}
    assert peak["none"] - peak["full"] > 2 * plain.saved_bytes


def test_stage_i_holds_pp_minus_i_micro_batches() -> None:
    model = cost_model(gpt(num_layers=8))
    cand = candidate(pp=4, num_microbatches=16)
    held = [stage.memory_by_cause["activations"] for stage in model.price(cand, stages(model.model, [2, 2, 2, 2])).by_stage]
    layer = model.layer(cand, "decoder", "none").saved_bytes
    assert held[1:3] == [3 * 2 * layer, 2 * 2 * layer]
    assert held[0] == 4 * (2 * layer + model.layer(cand, "embedding", "none").saved_bytes)


def test_interleaving_holds_more_as_korthikanti_says() -> None:
    """arXiv 2205.05198, section 4.2.3: 1 + (p-1)/(p v) of 1F1B's on the first stage."""
    model = cost_model(gpt(num_layers=16, hidden_dropout=0.0))
    plain, woven = candidate(pp=4, num_microbatches=16), candidate(pp=4, vpp=2, num_microbatches=16)
    held = [
        model.price(plain, stages(model.model, [4] * 4)).by_stage[0].memory_by_cause["activations"],
        model.price(woven, stages(model.model, [2] * 8, vpp=2)).by_stage[0].memory_by_cause["activations"],
    ]
    assert held[1] / held[0] == pytest.approx(1 + 3 / (4 * 2))


def test_causes_sum_to_the_peak_and_the_peak_is_the_fullest_phase() -> None:
    model = cost_model(traits=DEEPSPEED)
    for cand in (candidate(dp=4, zero_stage=3), candidate(dp=4, pp=2, zero_stage=1), candidate(tp=2, micro_batch_size=4, recompute="full")):
        counts = [4] if cand.mesh.pp == 1 else [2, 2]
        for stage in model.price(cand, stages(model.model, counts, cand.strategy.recompute)).by_stage:
            assert sum(stage.memory_by_cause.values()) == pytest.approx(stage.peak_memory_bytes)
            assert stage.peak_phase in ("forward", "backward", "step")


def test_buckets_and_prefetched_weights_are_counted_but_never_more_than_there_are() -> None:
    buckets = replace(DEEPSPEED, bucket_elements=10**6, bucket_copies=2, live_parameter_elements=10**7)
    huge = replace(DEEPSPEED, bucket_elements=10**12, bucket_copies=1)
    cand = candidate(dp=4, zero_stage=3)
    counts = [4]

    def buffers(traits: object, cand: object = cand) -> float:
        model = cost_model(traits=traits)  # type: ignore[arg-type]
        return model.price(cand, stages(model.model, counts)).by_stage[0].memory_by_cause["buffers"]  # type: ignore[arg-type]

    assert buffers(buckets) - buffers(DEEPSPEED) == 2 * 2 * 10**6 + 2 * 10**7
    parameters = describe(gpt(), S).parameters
    assert buffers(huge) - buffers(DEEPSPEED) == pytest.approx(2 * parameters, rel=0.01)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_deepspeed_fills_its_bucket_on_one_data_parallel_rank_too_but_gathers_nothing_there(stage: int) -> None:
    """DeepSpeed 0.19.8 has buckets under ZeRO whatever the group's size (runtime/zero/stage_1_and_2.py:3256, stage3.py:780), and a group of
    one takes its weights as they are (partition_parameters.py:904). Measured on CPU ranks: tests/workers/test_traced_peaks.py."""
    buckets = replace(DEEPSPEED, bucket_elements=10**6, bucket_copies=2, live_parameter_elements=10**7)

    def buffers(traits: Traits) -> float:
        model = cost_model(traits=traits)
        cand = candidate(zero_stage=stage)
        return model.price(cand, stages(model.model, [4])).by_stage[0].memory_by_cause["buffers"]

    assert buffers(buckets) - buffers(DEEPSPEED) == (2 * 2 * 10**6 if stage else 0)


def test_context_and_communicators_are_priced_not_reserved() -> None:
    free = replace(datasheet(a100(), MEGATRON), context_bytes=0.0, communicator_bytes=0.0)
    cand, counts = candidate(tp=2, pp=2, dp=2), [2, 2]
    priced, without = cost_model(), cost_model(calibration=free)
    difference = priced.price(cand, stages(priced.model, counts)).peak_memory_bytes - (
        without.price(cand, stages(without.model, counts)).peak_memory_bytes
    )
    c: Calibration = datasheet(a100(), MEGATRON)
    assert difference == pytest.approx(c.context_bytes + 4 * c.communicator_bytes, abs=MIB)  # tp, pp, dp, world


def test_gpt3_175b_fits_selene_as_published() -> None:
    """Korthikanti et al., table 5: 175B at tp 8, pp 8, micro-batch 1 runs with selective recompute on 80 GB A100s (figure 1 shows
    about 60 GB a GPU with it, over 80 without recompute at batch 64)."""
    model = cost_model(GPT3_175B, cluster=a100(), traits=UNFUSED, precision="fp16")
    cand = candidate(tp=8, pp=8, num_microbatches=64, sequence_parallel=True)
    peak = {m: model.price(cand, stages(model.model, [12] * 8, m)).peak_memory_bytes / GIB for m in ("none", "selective", "full")}
    assert 55 < peak["selective"] < 79
    assert peak["none"] > 80
    assert peak["full"] < peak["selective"]


@pytest.mark.parametrize("mode", ["none", "full"])
def test_zero_3_gathers_a_layer_at_a_time_and_its_gradients_beside_it(mode: Recompute) -> None:
    """2 bytes a parameter for the weights in both passes, and as many for the gradients before they are scattered in backward."""
    model = cost_model(traits=DEEPSPEED)
    divided, whole = (model.layer(candidate(dp=4, tp=2, zero_stage=stage), "decoder", mode) for stage in (3, 2))
    assert divided.parameters == whole.parameters
    assert divided.transient_forward_bytes - whole.transient_forward_bytes == 2 * divided.parameters
    assert divided.transient_backward_bytes - whole.transient_backward_bytes == 4 * divided.parameters
    assert divided.saved_bytes == whole.saved_bytes


@pytest.mark.parametrize("index", [0, 1])
def test_a_stages_border_buffers_are_there_as_long_as_any_chunk_has_a_micro_batch(index: int) -> None:
    """Over a step's passes: what the chunks in flight keep, and the buffers of groups of four micro-batches over two stages."""
    model = cost_model(gpt(num_layers=4))
    cand = replace(candidate(pp=2, vpp=2, num_microbatches=8), microbatch_group_size_per_vp_stage=4)
    split = stages(model.model, [1, 1, 1, 1], vpp=2)
    memory, sums = model.stage_memory(cand, index), model.sums(cand, split[index].layers)
    lane = [slot for slot in model.played(cand, split).lanes[index] if slot.action in ("forward", "backward")]
    assert memory.borders > 0
    counts = [0, 0]
    for slot, (_, _, causes) in zip(lane, memory.over_time(sums, lane), strict=False):
        counts[slot.chunk] += slot.action == "forward"
        kept = sum(count * saved for count, saved in zip(counts, sums.saved, strict=True))
        assert causes["activations"] == pytest.approx(kept + memory.borders)
        counts[slot.chunk] -= slot.action == "backward"
    assert counts == [0, 0]


def test_nvfp4_is_written_in_both_directions_with_a_scale_for_sixteen() -> None:
    """Each element is read twice in 16 bits, once for the tensor's maximum; 4 bits and a sixteenth of 8 are written along rows, and along
    columns. FP8 reads once and writes a byte each way, along rows alone where no weight's gradient wants it."""
    written = (4 + 8 / 16) / 8
    op = Gemm(name="x", tokens=64, k=64, n=64, split="column")
    strategy = Strategy(mesh=Mesh())
    assert quantised_bytes(op, strategy, "nvfp4", GPUS["B200"], gathered=False) == 2 * 2 + 2 * written
    assert quantised_bytes(op, strategy, "fp8", GPUS["B200"], gathered=False) == 2 + 2 * 1
    assert quantised_bytes(replace(op, frozen=True), strategy, "fp8", GPUS["B200"], gathered=False) == 2 + 1
    assert quantised_bytes(op, strategy, "bf16", GPUS["B200"], gathered=False) == 0


def test_hpz_keeps_a_second_copy_of_the_experts_weights_too() -> None:
    pins = {"ep": 1, "zero_stage": 3, "zero_shard_size": 8, "micro_batch_size": 1, "recompute": "full"}
    plan = api.plan(recipe="mixtral_8x7b", gpus=64, cluster="dgx_h100", engine="deepspeed", pin=pins).plan
    held = plan.prediction.by_stage[0].memory_by_cause["weights"]
    assert held == pytest.approx((2 / 64 + 2 / 8) * describe(plan.model, 4096).parameters, rel=0.01)
