"""Fits of time over the context length T: a T + b T^2 and T^p, with standard errors."""

import math
from dataclasses import dataclass

import numpy as np

EXPONENT_POINTS = 4
"""The exponent is fitted to this many of the longest lengths, because overhead dominates at short ones."""


@dataclass(frozen=True)
class Growth:
    """Fitted coefficients. Standard errors are None if there are no more points than coefficients."""

    a: float
    a_error: float | None
    b: float
    b_error: float | None
    exponent: float
    exponent_error: float | None
    exponent_from: int
    """Shortest length in the fit of the exponent."""


def fit_growth(lengths: list[int], times: list[float]) -> Growth | None:
    """Fits the time of one sequence, in any unit, over its length. Returns None for fewer than two lengths.

    Minimizes the squares of relative deviations, because the times span orders of magnitude.
    """
    if len(lengths) < 2:
        return None
    T, y = np.array(lengths, float), np.array(times, float)
    (a, b), (a_error, b_error) = _least_squares(np.stack([T / y, T**2 / y], axis=1), np.ones_like(y))
    T, y = T[-EXPONENT_POINTS:], y[-EXPONENT_POINTS:]
    (_, exponent), (_, error) = _least_squares(np.stack([np.ones_like(T), np.log(T)], axis=1), np.log(y))
    return Growth(a, a_error, b, b_error, exponent, error, int(T[0]))


def _least_squares(columns: np.ndarray, target: np.ndarray) -> tuple[list[float], list[float | None]]:
    """Returns coefficients and their standard errors; columns is (points, coefficients)."""
    scale = np.linalg.norm(columns, axis=0)  # T and T^2 differ by orders of magnitude
    columns = columns / scale
    coefficients = np.linalg.lstsq(columns, target, rcond=None)[0]
    spare = len(target) - len(coefficients)
    if not spare:
        return (coefficients / scale).tolist(), [None] * len(coefficients)
    variance = np.square(target - columns @ coefficients).sum() / spare
    errors = np.sqrt(variance * np.diag(np.linalg.inv(columns.T @ columns)))
    return (coefficients / scale).tolist(), (errors / scale).tolist()


def where_equal(lengths: list[int], first: list[float], second: list[float]) -> float | None:
    """Length at which `first` exceeds `second`, interpolated linearly in log-log space.

    Returns None if that is at none of the lengths, or already at the first.
    """
    gaps = [math.log(a / b) for a, b in zip(first, second, strict=True)]
    for n in range(len(gaps) - 1):
        if gaps[n] < 0 <= gaps[n + 1]:
            share = -gaps[n] / (gaps[n + 1] - gaps[n])
            return lengths[n] * (lengths[n + 1] / lengths[n]) ** share
    return None
