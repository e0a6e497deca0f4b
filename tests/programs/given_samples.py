"""pretrain_bert.py and pretrain_t5.py mask and corrupt by rules of their own. Here the i-th sample that their data sets give is the i-th
row of each array of a file, by the names that the data set's own samples have:

    SAMPLES=FILE.npz MEGATRON_LM=CHECKOUT torchrun --nproc-per-node 2 given_samples.py ...
"""

from __future__ import annotations

import os
from typing import Any

from orchestrator.programs import megatron_hooks as hooks

hooks.prepare()

import numpy as np  # noqa: E402
from megatron.core.datasets import bert_dataset, t5_dataset  # noqa: E402

arrays = dict(np.load(os.environ["SAMPLES"]))


def sample(self: Any, index: int) -> dict[str, Any]:
    return {name: rows[index] for name, rows in arrays.items()}


bert_dataset.BERTMaskedWordPieceDataset.__getitem__ = sample
t5_dataset.T5MaskedWordPieceDataset.__getitem__ = sample

if __name__ == "__main__":
    hooks.run(lambda: None)
