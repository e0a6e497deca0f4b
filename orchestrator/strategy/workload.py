"""What is given before anything is chosen: the model, what decides its convergence, and the cluster that trains it."""

from __future__ import annotations

from orchestrator.hardware.spec import Cluster
from orchestrator.model.spec import ModelSpec
from orchestrator.model.training import Training
from orchestrator.values import Value


class Workload(Value, frozen=True, kw_only=True):
    """What is to be trained where: rules judge a candidate for it, prices are of it, and a search looks for its fastest plan."""

    model: ModelSpec
    """The model at the training's sequence lengths."""
    training: Training
    cluster: Cluster
