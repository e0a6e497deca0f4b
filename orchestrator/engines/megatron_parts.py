"""Which parts of models megatron-core 0.16.1's layers have and our workers train, in the words of `Architecture.features`."""

from __future__ import annotations

from typing import Final

TRAINED: Final = ("attention", "mlp", "llama3_rope", "encoder", "encoder_decoder", "relative_bias")
"""Each with a test of parity against one process (tests/workers)."""
