"""What failures cost: the share of a job's time that trains, and the save interval with which that is largest.

Failures come independently, at a mean time between failures of the whole job M. A save stops the training for `save_s`, a failure costs
what was done since the last save and `restart_s`. J. W. Young, "A first order approximation to the optimum checkpoint interval",
Communications of the ACM 17 (1974); J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future
Generation Computer Systems 22 (2006).
"""

from __future__ import annotations

import math


def mtbf_of_job(node_mtbf_s: float, num_nodes: int) -> float:
    """Seconds between two failures of a job that needs all of its nodes.

    Llama 3: 419 unexpected interruptions in 54 days on 2,048 nodes (arXiv 2407.21783, section 3.3.4), 6,334 hours a node:

    >>> round(mtbf_of_job(6334 * 3600, 2048) / 3600, 1)
    3.1
    """
    return node_mtbf_s / num_nodes


def goodput(interval_s: float, save_s: float, restart_s: float, mtbf_s: float) -> float:
    """The share of the time that trains, with a save after each `interval_s` seconds of training.
    Daly's complete model: the work between two saves over the time that it takes with failures in work, save and restart.

    Failures are rare, and each 1,000 s of training save for 10: nearly 1000/1010.

    >>> round(goodput(1000, 10, 100, 1e9), 4), round(goodput(1000, 10, 100, 10_000), 4)
    (0.9901, 0.9316)
    """
    taken = mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1((interval_s + save_s) / mtbf_s)
    return interval_s / taken


def young(save_s: float, mtbf_s: float) -> float:
    """Seconds of training between saves that are best in the first order (Young 1974).

    >>> young(50, 10_000)
    1000.0
    """
    return math.sqrt(2 * save_s * mtbf_s)


def daly(save_s: float, mtbf_s: float) -> float:
    """Seconds of training between saves that are best in a higher order (Daly 2006); the mean time between failures itself where a save
    takes twice that or longer.

    >>> round(daly(50, 10_000)), daly(50, 20)
    (967, 20)
    >>> max(range(900, 1100), key=lambda interval_s: goodput(interval_s, 50, 300, 10_000))
    967
    """
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = save_s / (2 * mtbf_s)
    return young(save_s, mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s
