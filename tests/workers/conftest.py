"""One pool of ranks for all worker tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
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
