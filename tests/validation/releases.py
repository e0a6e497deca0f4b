"""What NVIDIA's own recipes set where its performance pages print nothing (Megatron-Bridge's of DeepSeek-V3), or something else.

A page names its container's release, the degrees and the batch. The recipe of that release (NVIDIA-NeMo/Megatron-Bridge, the tag beside
it; scripts/performance/configs/deepseek/deepseek_workload_base_configs.py, at v0.1.0rc4 scripts/performance/run_script.py:55-103) says
besides how tokens are sent, whether that ran beside another micro-batch, what is recomputed and what is replayed as CUDA graphs. A row
whose degrees are no recipe's of its release gets nothing. 26.08 is left out: its recipes (src/megatron/bridge/perf_recipes) leave graphs
to helpers.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple


class Recipe(NamedTuple):
    """A release's recipe. `degrees`: tp, pp, vpp, ep and samples a micro-batch; `sets`: by column of bridge_perf_settings.csv."""

    releases: tuple[str, ...]
    gpu: str
    degrees: tuple[int, int, int, int, int]
    sets: dict[str, str]


FROM_TAG: Final = {
    "25.09": "v0.1.0rc4", "25.11": "v0.2.0", "26.02": "v0.3.0", "26.02.01": "v0.3.1", "26.04": "v0.4.1", "26.04.01": "v0.4.2",
    "26.06": "v0.5.0", "26.06.01": "v0.5.1",
}  # fmt: skip
"""The tag whose recipes a release's container has."""
LAYOUT: Final = {"pipeline_layout": "Et*4|(t*4|)*14tmL"}
GRAPHS: Final = {"cuda_graph": "transformer_engine", "cuda_graph_scope": "attn+moe_router+moe_preprocess"}
WHOLE: Final = {"cuda_graph": "full_iteration"}
HYBRID: Final = {"dispatcher": "flex", "flex_backend": "hybridep", "shared_expert_overlap": "0", "a2a_overlap": "0", "forced_balance": "1"}
DEEP: Final = HYBRID | {"flex_backend": "deepep", "a2a_overlap": "1"}
ALL_TO_ALL: Final = {"dispatcher": "alltoall", "shared_expert_overlap": "1", "a2a_overlap": "0"}
UP, MLP, UP_MLP, NOTHING = ({"recompute_effective": modules} for modules in ("mla_up_proj", "mlp", "mla_up_proj+mlp", "none"))

RECIPES: Final = (
    Recipe(("25.09",), "H100", (2, 8, 4, 64, 1), DEEP | UP_MLP | {"pipeline_layout": "Et|(tt|)*30mL", "cuda_graph": "none"}),
    Recipe(("25.09",), "B200", (1, 16, 1, 8, 1), ALL_TO_ALL | UP | {"cuda_graph": "none"}),
    Recipe(("25.09",), "GB200", (1, 4, 4, 64, 1), ALL_TO_ALL | UP | {"cuda_graph": "none"}),
    Recipe(("25.11",), "B200", (1, 16, 1, 8, 1), ALL_TO_ALL | UP | {"forced_balance": "1"}),
    Recipe(("25.11",), "GB200", (1, 4, 4, 64, 1), HYBRID | UP | GRAPHS),
    Recipe(("26.02", "26.02.01"), "GB200", (1, 4, 4, 64, 1), HYBRID | UP | GRAPHS),
    Recipe(("26.02", "26.02.01", "26.04", "26.04.01"), "GB300", (1, 2, 8, 32, 2), HYBRID | UP | LAYOUT),
    Recipe(("26.02", "26.02.01", "26.04"), "B300", (1, 16, 1, 8, 1), HYBRID | UP),
    Recipe(("26.02", "26.02.01", "26.04"), "B200", (1, 16, 1, 8, 1), HYBRID | UP),
    Recipe(("26.04", "26.04.01"), "GB200", (1, 4, 4, 64, 1), HYBRID | MLP | GRAPHS),
    Recipe(("26.04.01",), "B200", (1, 8, 2, 32, 1), DEEP | UP_MLP | LAYOUT | GRAPHS),
    Recipe(("26.04.01", "26.06"), "B300", (1, 8, 1, 8, 2), HYBRID | UP | GRAPHS),
    Recipe(("26.06", "26.06.01"), "GB300", (1, 2, 8, 32, 1), HYBRID | NOTHING | LAYOUT | WHOLE | {"a2a_overlap": "1"}),
    Recipe(("26.06", "26.06.01"), "GB200", (1, 4, 4, 64, 1), HYBRID | UP | WHOLE | {"a2a_overlap": "1"}),
)
"""Megatron-Bridge's recipes of DeepSeek-V3 by release. At 25.09 tokens are dropped on Blackwell (`apply_moe_token_drop`), and only H100
sends by DeepEP; at 25.11 B200 names no flexible dispatcher, and Bridge's DeepSeek-V3 then has all-to-all beside its shared experts
(models/deepseek/deepseek_provider.py:74-76)."""


def recipe_of(row: dict[str, str]) -> dict[str, str] | None:
    """What the release's recipe sets for this row of the performance pages; None: the page is of another model, or the layout another."""
    release = re.match(r"release=([\d.]+)", row.get("notes", ""))
    if release is None or not row.get("model_name", "").startswith("DeepSeekV3"):
        return None
    degrees = tuple(row.get(name) or "1" for name in ("tp", "pp", "vpp", "ep", "micro_batch_size"))
    for recipe in RECIPES:
        here = release[1] in recipe.releases and row.get("gpu", "").split("-")[0] == recipe.gpu
        if here and degrees == tuple(map(str, recipe.degrees)):
            return recipe.sets
    return None


ITERATIONS: Final = {"vocab_size": "128256", "cuda_graph": "local: full_iteration"}
ONCE_A_STEP: Final = {"recompute": "full", "zero_stage": "1"}
"""FSDP2 that keeps gathered weights and whole gradients from the first micro-batch to the last (reshard_after_forward false, and
components/moe/fsdp_mixin.py): its traffic is ZeRO-1's."""
RAN_OTHERWISE: Final[tuple[tuple[str, dict[str, str]], ...]] = (
    (r"dgxc-v25\.02-nemo_megatron_README_175b", {"vpp": "6"}),
    (r"dgxc-v(24\.11\.1|25\.01\.1|25\.02)-llama3\.1_README_405b", {"vocab_size": "50257"}),
    (r"mlperf-v5\..*-llama31_405b-", {"vocab_size": "32000"}),
    (r"bcard-qwen3-30b-a3b-pretrain-GB200", {"delay_wgrad": "1"}),
    (r"mlperf-v6\.0-gptoss-theia_ngpu8$", ITERATIONS | {"micro_batch_size": "3", "rank_capacity": "1.5"}),
    (r"mlperf-v6\.0-gptoss-tyche-hsg_ngpu8$", ITERATIONS | {"micro_batch_size": "2", "rank_capacity": "1.5"}),
    (r"mlperf-v6\.0-gptoss-\w+-?\w*_ngpu72$", ITERATIONS | {"rank_capacity": "2"}),
    (r"mlperf-v6\.0-gptoss-theia_ngpu512$", ITERATIONS | {"rank_capacity": "7"}),
    (r"(mlperf-v6\.0-gptoss-|gpt_oss_20b_pretrain_)", {"vocab_size": "128256"}),
    (r"automodel-L19$", ONCE_A_STEP | {"mtp_layers": "0", "vpp": "4"}),
    (r"automodel-L20$", ONCE_A_STEP | {"mtp_layers": "0"}),
    (r"automodel-L(21|22)$", ONCE_A_STEP),
    (r"automodel-L25$", {"recompute": "full", "zero_shard_size": ""}),
)
"""What ran, where a row's table says otherwise, by how its run_id begins.

NVIDIA/dgxc-benchmarking: the heading of v25.02's tables of GPT-3 175B says VP=12, which v25.01.1's recipe sets
(nemo_megatron/gpt3_175b_hydra.yaml:57); v25.02's recipe sets 6, and v25.04 prints the same ten times under VP 6. Until v25.02 its Llama 3.1
405B "uses the GPT2BPETokenizer as a proxy" (llama3.1/README_405b.md:127, llama3.1_405b.yaml:93), which gives NeMo's model its vocabulary;
from v25.04 on Llama's own (llama3.1/pretrain_llama31.py, hf_tokenizer). MLPerf's Llama 3.1 405B has Mixtral's tokenizer and a vocabulary of
32,000 (mlcommons/training, large_language_model_pretraining/nemo/README.md:107 and 123). Its GPT-OSS 20B has Llama 3's, as
Megatron-Bridge's recipes of the same layouts (src/megatron/bridge/perf_recipes/gpt_oss/common.py, _apply_gpt_oss_20b_common_configs). On
8 GPUs its logs say gradient_accumulation_steps 1 (result_0.txt beside the times), and its configurations' names 2x4x3 and 2x4x2 (nodes,
GPUs of each, samples of each: implementations/theia_ngpu8_ngc26.04_nemo/README). Megatron-Bridge's cards of Qwen3-30B with real routing on
GB200 delay weight gradients (src/megatron/bridge/recipes/qwen/gb200/qwen3_moe.py). All five configurations of its program that can be read
replay whole iterations (config_common_cg.sh, which each sources), so that a rank's experts have buffers of a fixed size: 7 even shares on
512 GPUs (config_GB300_128x4x1xtp2pp1cp4ep8.sh); 1.5 on 8 (not NVIDIA's own, but three of Inventec, config_*_1x8x3xtp1pp1cp1ep1_mxfp8.sh,
and one of two nodes); and 2 where none says it (config_common_cg.sh), as is supposed of the 72, whose own can't be read. AutoModel's own
configurations of its page's runs (NVIDIA-NeMo/Automodel at 8d9bfb90e, examples/benchmark/configs; of Llama 3 70B at 2013a4dd6) checkpoint
every layer, of experts gather weights and reduce gradients once a step (`ONCE_A_STEP`), and have no multi-token prediction; the one on
1,024 GPUs has four layers a stage (layers_per_stage), 16 of 61, where the page repeats the other's VP 8."""


def as_it_ran(row: dict[str, str]) -> dict[str, str]:
    """The row with what ran in place of what its table says.

    >>> as_it_ran({"run_id": "dgxc-v25.02-nemo_megatron_README_175b.md-L61-c0", "vpp": "12"})["vpp"]
    '6'
    >>> as_it_ran({"run_id": "dgxc-v25.01.1-nemo_megatron_README_175b.md-L52-c0", "vpp": "12"})["vpp"]
    '12'
    """
    run = row.get("run_id", "")
    return next(({**row, **ran} for begins, ran in RAN_OTHERWISE if re.match(begins, run)), row)
