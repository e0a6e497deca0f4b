"""Random numbers in blocks that depend on a key alone, so that ranks draw the same numbers wherever a tensor is cut."""

from __future__ import annotations

import hashlib

BLOCK_ELEMENTS = 2**22
"""Elements drawn at once: 16 MiB in fp32, small beside any model and large enough to keep a GPU busy."""


def block_seed(*key: object) -> int:
    """The seed of the generator of one block, 63 bits.

    >>> block_seed(1234, "wte.weight", 0) == block_seed(1234, "wte.weight", 0) != block_seed(1234, "wte.weight", 1)
    True
    """
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
