"""What users took, in order: sequences of items for BERT4Rec (arXiv 1904.06690), the last of each user left out and ranked."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
import torch

from orchestrator.errors import InputError
from orchestrator.model.traced import Traced
from orchestrator.plan import Plan
from orchestrator.workers.batch import Batch

PAD, MASK, FIRST_ITEM = 0, 1, 2
"""Token ids of padding, of the mask and of the first item."""
SHARE: Final = 0.2
"""Share of a sequence's items that are masked in training (the paper's for MovieLens)."""
FEWEST: Final = 5
"""Users who took fewer items are left out (the paper, section 4.1)."""
TOP: Final = 10
COLUMNS: Final = {"user": ("user", "userid", "user_id"), "item": ("item", "movieid", "movie_id", "item_id"), "time": ("time", "timestamp")}
"""Names of a CSV's columns, in any case."""
USERS, ITEMS, TAKEN = 512, 100, 40
"""Users, items and items taken by each user of the generated interactions."""
FOLLOWED: Final = 0.9
"""Share of generated steps that go to what follows the item before; the others go anywhere, popular items first."""


def generated(seed: int) -> list[list[int]]:
    """Generated interactions: for each user the items taken, numbered from 0. Each item has one that mostly follows it, a permutation of
    all."""
    rng = np.random.default_rng(seed)
    follows = rng.permutation(ITEMS)
    weight = 1.0 / np.arange(1, ITEMS + 1)
    weight /= weight.sum()
    found = []
    for _ in range(USERS):
        item = int(rng.choice(ITEMS, p=weight))
        taken = [item]
        for _ in range(TAKEN - 1):
            item = int(follows[item]) if rng.random() < FOLLOWED else int(rng.choice(ITEMS, p=weight))
            taken.append(item)
        found.append(taken)
    return found


def read(path: Path) -> list[list[int]]:
    """Items, numbered from 0, by user in order of time. Raises InputError that names file, line and column."""
    by_user: dict[str, list[tuple[float, int]]] = {}
    numbers: dict[str, int] = {}
    for number, (user, item, time) in enumerate(_rows(path), start=2):
        try:
            at = float(time)
        except ValueError:
            raise InputError("data", f"{path}:{number}", f"{time!r} is no time: a number is needed") from None
        by_user.setdefault(user, []).append((at, numbers.setdefault(item, len(numbers))))
    return [[item for _, item in sorted(taken, key=lambda pair: pair[0])] for taken in by_user.values()]


def _rows(path: Path) -> Iterator[tuple[str, str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        rows = csv.DictReader(file)
        names = {name.strip().lower(): name for name in rows.fieldnames or ()}
        columns = []
        for column, known in COLUMNS.items():
            name = next((names[each] for each in known if each in names), None)
            if name is None:
                raise InputError("data", path, f"has no column {column}: its first line is {', '.join(names)}", known)
            columns.append(name)
        for row in rows:
            user, item, time = (row[name] for name in columns)
            yield user, item, time


class Interactions:
    """Samples by user number: `masked` to train on, without each user's last item, and `left_out` to rank that. Every training sample
    predicts as many items as any other, so that the mean loss does not depend on how a batch is cut."""

    def __init__(self, sequences: list[list[int]], length: int, seed: int) -> None:
        self.sequences, self.length, self.seed = sequences, length, seed
        self.items = 1 + max(map(max, sequences))
        shortest = min(len(taken) for taken in sequences) - 1
        self.count = max(1, min(round(SHARE * length), shortest))
        counts = np.bincount(np.concatenate([taken[:-1] for taken in sequences]), minlength=self.items)
        # The most popular first; equal ones in the order of their numbers.
        order = np.argsort(-counts, kind="stable")
        self.popularity_rank = np.empty(self.items, dtype=np.int64)
        self.popularity_rank[order] = np.arange(self.items)

    def __len__(self) -> int:
        return len(self.sequences)

    def masked(self, user: int, epoch: int) -> dict[str, np.ndarray]:
        """A user's sequence with masked items, others in each epoch; the last item always, as the one that is left out will be (the paper,
        section 3.6)."""
        ids = self._padded(self.sequences[user][:-1])
        rng = np.random.default_rng((self.seed, user, epoch))
        places = np.flatnonzero(ids != PAD)
        chosen = rng.choice(places[:-1], size=self.count - 1, replace=False)
        return self._hidden(ids, np.append(chosen, places[-1]))

    def left_out(self, user: int, epoch: int) -> dict[str, np.ndarray]:
        ids = self._padded(self.sequences[user])
        target = self.sequences[user][-1]
        found = self._hidden(ids, np.asarray([self.length - 1]))
        return found | {"target": np.asarray(target + FIRST_ITEM), "popularity_rank": np.asarray(self.popularity_rank[target])}

    def _padded(self, taken: list[int]) -> np.ndarray:
        """The last `length` items, PAD before them."""
        ids = np.full(self.length, PAD, dtype=np.int64)
        last = taken[-self.length :]
        ids[self.length - len(last) :] = np.asarray(last) + FIRST_ITEM
        return ids

    def _hidden(self, ids: np.ndarray, places: np.ndarray) -> dict[str, np.ndarray]:
        labels = np.full_like(ids, -100)
        labels[places] = ids[places]
        tokens = ids.copy()
        tokens[places] = MASK
        return {"input_ids": tokens, "labels": labels}


def opened(plan: Plan, traced: Traced) -> Interactions:
    """The interactions of data=, or generated ones. Raises InputError."""
    sequences = generated(plan.training.seed) if plan.run.data is None else read(Path(plan.run.data))
    kept = [taken for taken in sequences if len(taken) >= FEWEST]
    if not kept:
        raise InputError("data", plan.run.data, f"has no user with {FEWEST} interactions")
    found = Interactions(kept, traced.seq_length, plan.training.seed)
    if found.items + FIRST_ITEM > traced.vocab_size:
        why = f"has {found.items} items; the model's vocab_size={traced.vocab_size} has room for {traced.vocab_size - FIRST_ITEM}"
        raise InputError("data", plan.run.data, why)
    return found


def scores(batch: Batch, logits: torch.Tensor) -> dict[str, torch.Tensor]:
    """Sums over a micro-batch's users: whether the item left out is among the ten that the model, or popularity, ranks first (HR@10), and
    1/log2(2 + rank) where it is (NDCG@10 of one relevant item)."""
    last = logits[:, -1, FIRST_ITEM:]
    target = batch["target"] - FIRST_ITEM
    of_target = last.gather(1, target[:, None])
    ranks = {"": (last > of_target).sum(dim=1), "popularity_": batch["popularity_rank"]}
    found = {"samples": torch.tensor(len(target), device=logits.device)}
    for name, rank in ranks.items():
        hit = (rank < TOP).double()
        found |= {f"{name}hr_10": hit.sum(), f"{name}ndcg_10": (hit / torch.log2(2.0 + rank.double())).sum()}
    return found
