"""One pool of ranks for all worker tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from worker_plans import MODELS, make_plan
from worker_pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    ranks = Pool()
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where the encoded default corpus is kept between cases."""
    return str(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def references(pool: Pool, corpus: str) -> dict[str, Any]:
    """Of each family: one process, one micro-batch of the whole batch."""
    from test_parity import measure

    return {
        family: measure(pool, corpus, make_plan(model, clip=2.0, lr=3e-3, micro_batch_size=8), with_weights=True)
        for family, model in MODELS.items()
    }
