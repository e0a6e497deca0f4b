"""Sequences of items: what is read, what is left out, and how it is ranked; small recipes learn what their data hold."""

from __future__ import annotations

import json
import subprocess
import sys
from math import log2
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from orchestrator.errors import InputError  # noqa: E402
from orchestrator.workers import interactions, traced_data  # noqa: E402

pytestmark = pytest.mark.engines
CSV = "userId,movieId,rating,timestamp\n7,30,5,3\n7,10,4,1\n8,10,3,9\n7,20,2,2\n"


def test_a_csv_is_read_by_user_in_order_of_time(tmp_path: Path) -> None:
    path = tmp_path / "ratings.csv"
    path.write_text(CSV)
    # Items are numbered as they come: 30, 10, 20.
    assert interactions.read(path) == [[1, 2, 0], [1]]


@pytest.mark.parametrize(
    ("text", "message"),
    [("user,time\n1,2\n", "has no column item"), ("user,item,time\n1,2,then\n", "'then' is no time")],
)
def test_a_bad_csv_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        interactions.read(path)


def test_the_last_item_is_never_trained_on_and_every_sample_predicts_as_many() -> None:
    found = interactions.Interactions([[0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1]], length=8, seed=1)
    for epoch in range(5):
        for user in range(2):
            sample = found.masked(user, epoch)
            assert (sample["labels"] != -100).sum() == found.count == 2
            assert found.sequences[user][-1] + interactions.FIRST_ITEM not in sample["labels"]
            assert ((sample["input_ids"] == interactions.MASK) == (sample["labels"] != -100)).all()
    held = found.left_out(0, 0)
    assert held["input_ids"].tolist() == [0, 0, 2, 3, 4, 5, 6, interactions.MASK]
    assert held["target"] == 5 + interactions.FIRST_ITEM


def test_ranks_are_counted_among_all_items() -> None:
    """Three items rank above the first user's, none above the second's; by popularity they stand at places 0 and 12."""
    logits = torch.zeros(2, 4, 22)
    logits[0, -1, [2, 3, 4]], logits[0, -1, 5] = 2.0, 1.0
    logits[1, -1, 9] = 3.0
    batch = {"target": torch.tensor([5, 9]), "popularity_rank": torch.tensor([0, 12])}
    found = {name: float(value) for name, value in interactions.scores(batch, logits).items()}
    assert found == pytest.approx({"samples": 2, "hr_10": 2, "ndcg_10": 1 / log2(5) + 1, "popularity_hr_10": 1, "popularity_ndcg_10": 1.0})


def test_images_of_an_npz_fit_the_model(tmp_path: Path) -> None:
    from orchestrator import recipe
    from orchestrator.detect import Machine

    path = tmp_path / "digits.npz"
    np.savez(path, images=np.random.default_rng(0).random((6, 8, 8)), labels=np.arange(6))
    settings = recipe.load(["recipe=vit_tiny", f"data={path}"], Machine(host_memory=2**34), ("deepspeed",))
    assert settings.architecture.traced is not None
    take, count = traced_data.images(settings.architecture.traced, path)
    assert count == 6
    assert take(3, 0)["pixel_values"].shape == (1, 16, 16)
    assert take(3, 0)["labels"] == 3
    assert abs(take(3, 0)["pixel_values"].mean()) < 1e-5


@pytest.mark.full
@pytest.mark.engines
@pytest.mark.parametrize("name", ["vit_tiny", "swin_tiny", "bert4rec_tiny"])
def test_small_recipes_learn_what_their_data_hold(name: str, tmp_path: Path) -> None:
    """Images to 90%; items left out are among the first ten twice as often as by popularity."""
    out = tmp_path / "run"
    words = [f"recipe={name}", f"out={out}", "launch=local"]
    subprocess.run([sys.executable, "-m", "orchestrator.run", *words], check=True, capture_output=True, cwd=Path(__file__).parents[2])
    last = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
    if name == "bert4rec_tiny":
        assert last["valid_hr_10"] >= 2 * last["valid_popularity_hr_10"] > 0
        assert last["valid_ndcg_10"] >= 2 * last["valid_popularity_ndcg_10"] > 0
    else:
        assert last["valid_accuracy"] >= 0.9
