"""Exact shares of a difference, and factorial effects, from all 2^k combinations.

A game is an array of shape (2^k, ...): bit i of the first index says whether the i-th
property is changed. Other axes (seeds) are carried along.
"""

from __future__ import annotations

import itertools
from math import factorial

import numpy as np


def players(game: np.ndarray) -> int:
    """k of a game of 2^k combinations.

    Raises:
        ValueError: if its length is no power of two, from 2 on.
    """
    k = len(game).bit_length() - 1
    if len(game) != 2**k or k < 1:
        raise ValueError(f"game: expected 2^k combinations, got {len(game)}")
    return k


def shapley(game: np.ndarray) -> np.ndarray:
    """Shapley values: the mean gain of each property over all orders of changing them.

    φ_i = Σ_S |S|! (k − |S| − 1)! / k! · (v(S ∪ i) − v(S)) over S without i; they sum to
    v(all) − v(none).

    Args:
        game: shape (2^k, ...).

    Returns:
        Shape (k, ...).

    Example:
        >>> shapley(np.array([0.0, 1.0, 2.0, 5.0])).tolist()
        [2.0, 3.0]
    """
    k = players(game)
    found = np.zeros((k, *game.shape[1:]))
    for i in range(k):
        for mask in range(2**k):
            if not mask >> i & 1:
                size = mask.bit_count()
                weight = factorial(size) * factorial(k - size - 1) / factorial(k)
                found[i] += weight * (game[mask | 1 << i] - game[mask])
    return found


def interactions(game: np.ndarray) -> dict[tuple[int, int], np.ndarray]:
    """Shapley interaction index of every pair: what two changes do beyond their sum.

    I_ij = Σ_S |S|! (k − |S| − 2)! / (k − 1)! · (v(S∪ij) − v(S∪i) − v(S∪j) + v(S))
    over S without i and j (Grabisch and Roubens, 1999).

    Args:
        game: shape (2^k, ...).

    Returns:
        By pair, in the shape of one combination.
    """
    k, found = players(game), {}
    for i, j in itertools.combinations(range(k), 2):
        one, two = 1 << i, 1 << j
        total = np.zeros(game.shape[1:])
        for mask in range(2**k):
            if not mask & (one | two):
                size = mask.bit_count()
                weight = factorial(size) * factorial(k - size - 2) / factorial(k - 1)
                total += weight * (
                    game[mask | one | two]
                    - game[mask | one]
                    - game[mask | two]
                    + game[mask]
                )
        found[i, j] = total
    return found


def contrasts(game: np.ndarray) -> dict[tuple[int, ...], np.ndarray]:
    """Main effects and interactions of a 2^k factorial, as ±1 contrasts.

    The effect of the factors T is 2^{1−k} Σ_S v(S) Π_{i∈T} (+1 if i∈S else −1): a main
    effect is the mean with the factor on minus that with it off, an interaction of two
    is half of how much one changes the effect of the other.

    Args:
        game: shape (2^k, ...).

    Returns:
        By the factors, main effects first, in the shape of one combination.
    """
    k, found = players(game), {}
    for order in range(1, k + 1):
        for chosen in itertools.combinations(range(k), order):
            signs = [
                np.prod([1 if mask >> i & 1 else -1 for i in chosen])
                for mask in range(2**k)
            ]
            found[chosen] = np.tensordot(signs, game, axes=1) / 2 ** (k - 1)
    return found
