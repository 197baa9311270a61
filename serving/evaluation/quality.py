"""Quality of scores against labels of 0 and 1.

log loss     -mean(y log p + (1 - y) log(1 - p)), p cut to [2^-24, 1 - 2^-24]
NE           normalized entropy: log loss over that of the labels' mean (He et al., 2014, "Practical
             Lessons from Predicting Clicks on Ads at Facebook"); lower is better
AUC          the chance that a random positive scores above a random negative, ties counting half
calibration  the sum of the scores over the sum of the labels
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_CUT = 2.0**-24


@dataclass(frozen=True)
class Quality:
    """Figures of a set of rows; None if undefined (no rows, or labels of one kind)."""

    rows: int
    positives: int
    log_loss: float | None
    ne: float | None
    auc: float | None
    calibration: float | None


def quality(labels: NDArray[Any], scores: NDArray[Any]) -> Quality:
    """labels [rows] of 0 and 1, scores [rows] probabilities."""
    rows, positives = len(labels), int(labels.sum())
    if rows == 0:
        return Quality(0, 0, None, None, None, None)
    y, p = labels.astype(np.float64), np.clip(scores.astype(np.float64), _CUT, 1 - _CUT)
    log_loss = float(-np.mean(y * np.log(p) + (1 - y) * np.log1p(-p)))
    calibration = float(scores.sum(dtype=np.float64) / positives) if positives else None
    if positives in (0, rows):
        return Quality(rows, positives, log_loss, None, None, calibration)
    mean = positives / rows
    background = -(mean * np.log(mean) + (1 - mean) * np.log1p(-mean))
    return Quality(rows, positives, log_loss, float(log_loss / background), auc(labels, scores), calibration)


def auc(labels: NDArray[Any], scores: NDArray[Any]) -> float:
    """Returns the area under the ROC curve, from the ranks of the positives; equal scores share their mean
    rank."""
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]
    is_positive = labels.astype(bool)
    positives = int(is_positive.sum())
    negatives = len(labels) - positives
    return float((ranks[is_positive].sum() - positives * (positives + 1) / 2) / (positives * negatives))
