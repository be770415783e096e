"""Families of loads of experts, by seed: what routers do and what is hard to even out."""

import numpy as np

SHAPES = ((64, 8), (128, 8), (256, 8), (256, 32), (256, 64), (128, 64), (512, 128))
ROWS_PER_RANK = 4096 * 8


def lognormal_shares(num_experts, max_vio, rng):
    """Shares of rows whose largest is 1 + max_vio times the mean."""
    normal, low, high = rng.standard_normal(num_experts), 0.0, 8.0
    for _ in range(60):
        middle = (low + high) / 2
        weights = np.exp(middle * normal)
        low, high = (
            (middle, high) if weights.max() < (1 + max_vio) * weights.mean() else (low, middle)
        )
    weights = np.exp(low * normal)
    return weights / weights.sum()


def zipf_shares(num_experts, exponent, rng):
    weights = (1 / np.arange(1, num_experts + 1) ** exponent)[rng.permutation(num_experts)]
    return weights / weights.sum()


def hot_rank_shares(num_experts, num_ranks, times_mean, inside, rng):
    homes = num_experts // num_ranks
    shares = np.full((num_ranks, homes), (num_ranks - times_mean) / (num_ranks - 1) / num_experts)
    weights = np.ones(homes) if inside == "even" else 1 / np.arange(1, homes + 1)
    shares[rng.integers(num_ranks)] = times_mean / num_ranks * weights / weights.sum()
    return shares.ravel() / shares.sum()


def few_shares(num_experts, few, rng):
    shares = np.zeros(num_experts)
    shares[rng.permutation(num_experts)[:few]] = 1 / few
    return shares


def families(num_experts, num_ranks, seed):
    """Pairs of a name, whose first word is the family, and rows [num_ranks, num_experts]."""

    def rows(shares):
        counts = [rng.multinomial(ROWS_PER_RANK, shares) for _ in range(num_ranks)]
        return np.array(counts, dtype=np.int64)

    for max_vio in (0.2, 1, 4):
        rng = np.random.default_rng(seed)
        yield f"lognormal {max_vio}", rows(lognormal_shares(num_experts, max_vio, rng))
    for exponent in (0.5, 1.0, 1.5):
        rng = np.random.default_rng(seed)
        yield f"zipf {exponent}", rows(zipf_shares(num_experts, exponent, rng))
    for times_mean in (1.6, 3.0):
        for inside in ("even", "zipf"):
            rng = np.random.default_rng(seed)
            shares = hot_rank_shares(num_experts, num_ranks, times_mean, inside, rng)
            yield f"hot {times_mean} {inside}", rows(shares)
    for few in (1, 2, 4, 8, num_ranks):
        rng = np.random.default_rng(seed)
        yield f"few {few}", rows(few_shares(num_experts, few, rng))
