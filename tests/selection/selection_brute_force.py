"""The definitions of docs/selectors.md, by loops in float64, without any code of the package.

Each takes one scope group as plain lists or float64 tensors and returns the *set of picks* in the
order in which they are taken, or a score per token.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def unit(rows: Tensor) -> Tensor:
    rows = rows.double()
    return torch.stack([row / row.norm() for row in rows]) if len(rows) else rows


def best(values: dict[int, float]) -> int:
    """Key of the highest value, the lowest key where equal."""
    return max(sorted(values), key=lambda key: values[key])


def top(scores: list[float], count: int) -> list[int]:
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:count]


def softmax(values: list[float]) -> list[float]:
    high = max(values)
    powers = [math.exp(value - high) for value in values]
    return [power / sum(powers) for power in powers]


def greedy_coverage(rows: list[list[float]], budget: int, weight: list[float]) -> list[int]:
    """Every gain summed anew for every pick."""
    n, picks = len(rows[0]), []
    for _ in range(budget):
        covered = [max([0.0] + [row[j] for j in picks]) for row in rows]
        gains = {
            j: weight[j] * sum(max(0.0, row[j] - c) for row, c in zip(rows, covered, strict=True))
            for j in range(n)
            if j not in picks
        }
        picks.append(best(gains))
    return picks


def mmtok_rows(x: Tensor, f: Tensor, z: Tensor) -> list[list[float]]:
    x, f, z, n = unit(x), unit(f), unit(z), len(x)
    rows = [
        [value / len(z) for value in softmax([float(q @ x[j]) / 0.01 for j in range(n)])] for q in z
    ]
    return rows + [
        [0.5 * value / n for value in softmax([float(f[i] @ f[j]) / 0.2 for j in range(n)])]
        for i in range(n)
    ]


def mmtok(x: Tensor, f: Tensor, z: Tensor, budget: int) -> list[int]:
    return greedy_coverage(mmtok_rows(x, f, z), budget, [1.0] * len(x))


def scope(x: Tensor, attention: Tensor, budget: int) -> list[int]:
    x, n = unit(x), len(x)
    rows = [[float(x[i] @ x[j]) for j in range(n)] for i in range(n)]
    return greedy_coverage(rows, budget, attention.double().tolist())


def relevance(x: Tensor, z: Tensor) -> list[float]:
    if len(z) == 0:
        return [1.0] * len(x)
    centre = z.double().mean(0)
    cosine = [float(row @ centre / centre.norm()) for row in unit(x)]
    low, high = min(cosine), max(cosine)
    return [(c - low + 1e-6) / (high - low + 1e-6) for c in cosine]


def dpp_kernel(x: Tensor, z: Tensor) -> Tensor:
    x, r = unit(x), [math.exp(0.5 * value) for value in relevance(x, z)]
    n = len(x)
    return torch.tensor(
        [
            [r[i] * (float(x[i] @ x[j]) if i != j else 1.0) * r[j] for j in range(n)]
            for i in range(n)
        ],
        dtype=torch.float64,
    )


def cdpruner(x: Tensor, z: Tensor, budget: int) -> list[int]:
    """Determinants themselves, by LU; by relevance once no token adds to the rank."""
    kernel, relevant, picks = dpp_kernel(x, z), relevance(x, z), []
    while len(picks) < budget:
        now = float(torch.linalg.det(kernel[picks][:, picks])) if picks else 1.0
        ratio = {}
        for j in range(len(x)):
            if j not in picks:
                grown = picks + [j]
                ratio[j] = float(torch.linalg.det(kernel[grown][:, grown])) / now
        ratio = {j: value for j, value in ratio.items() if value > 1e-5 * float(kernel[j, j])}
        if not ratio:
            break
        picks.append(best(ratio))
    rest = [j for j in top(relevant, len(x)) if j not in picks]
    return picks + rest[: budget - len(picks)]


def divprune(x: Tensor, budget: int) -> list[int]:
    x, n = unit(x), len(x)
    distance = [[1 - float(x[i] @ x[j]) for j in range(n)] for i in range(n)]
    picks = [
        best({i: min([math.inf] + [distance[i][j] for j in range(n) if j != i]) for i in range(n)})
    ]
    while len(picks) < budget:
        picks.append(
            best({i: min(distance[i][j] for j in picks) for i in range(n) if i not in picks})
        )
    return picks


def vispruner(f: Tensor, attention: Tensor, budget: int) -> list[int]:
    f, salience = unit(f), attention.double().tolist()
    important = top(salience, (budget + 1) // 2)
    left = [i for i in range(len(f)) if i not in important]
    keep = budget - len(important)
    step = max(1, math.ceil((len(left) - keep) / 32))
    while keep and len(left) > keep:
        first, second = left[::2], left[1::2]
        nearest = [max(float(f[i] @ f[j]) for j in second) for i in first]
        drop = {first[place] for place in top(nearest, min(step, len(left) - keep))}
        left = [i for i in left if i not in drop]
    return important + (left if keep else [])


def even(n: int, count: int) -> list[int]:
    """The `count` highest of 1 − frac(i·(√5−1)/2), i from 1."""
    return top([1 - math.modf((i + 1) * (math.sqrt(5) - 1) / 2)[0] for i in range(n)], count)


def shares(total: int, weights: list[float], caps: list[int]) -> list[int]:
    """Proportional, capped; what is over goes one by one to the largest remainder."""
    given = [0.0] * len(weights)
    open_ = set(range(len(weights)))
    while True:
        left = total - sum(given[i] for i in range(len(weights)) if i not in open_)
        for i in open_:
            given[i] = left * weights[i] / sum(weights[j] for j in open_)
        over = {i for i in open_ if given[i] >= caps[i]}
        if not over:
            break
        for i in over:
            given[i] = caps[i]
        open_ -= over
        if not open_:
            break
    whole = [math.floor(value) for value in given]
    while sum(whole) < total:
        whole[best({i: given[i] - whole[i] for i in range(len(whole))})] += 1
    return whole


def evs(x: Tensor, grid: list, kind: list, budget: int) -> list[int]:
    """Whole input or whole items; images keep their share, the videos compete for the rest."""
    x = unit(x)
    sizes = [t * h * w for t, h, w in grid]
    picks, change, start = [], {}, 0
    for (_, h, w), size, sort, share in zip(
        grid, sizes, kind, shares(budget, sizes, sizes), strict=True
    ):
        if sort == "image":
            picks += [start + i for i in even(size, share)]
        else:
            spread = even(h * w, h * w)
            for i in range(size):
                if i < h * w:
                    change[start + i] = 1000 - spread.index(i) / (h * w)
                else:
                    change[start + i] = 1 - float(x[start + i] @ x[start + i - h * w])
        start += size
    while len(picks) < budget:
        picks.append(best({i: value for i, value in change.items() if i not in picks}))
    return picks


def vidcom2(x: Tensor, grid: list, kind: list, budget: int) -> list[int]:
    """Whole input or whole items."""
    x = unit(x)
    sizes = [t * h * w for t, h, w in grid]
    picks, start = [], 0
    for (t, h, w), size, sort, share in zip(
        grid, sizes, kind, shares(budget, sizes, sizes), strict=True
    ):
        if sort == "image":
            picks += [start + i for i in even(size, share)]
        else:
            video = x[start : start + size]
            centre = video.mean(0) / video.mean(0).norm()
            frames = [video[k * h * w : (k + 1) * h * w] for k in range(t)]
            likeness = [sum(float(row @ centre) for row in frame) / (h * w) for frame in frames]
            unusual = softmax([-value / 0.01 for value in likeness])
            counts = shares(share, [1 + u - 1 / t for u in unusual], [h * w] * t)
            for k, (frame, count) in enumerate(zip(frames, counts, strict=True)):
                middle = frame.mean(0) / frame.mean(0).norm()
                score = [-float(row @ centre) - float(row @ middle) for row in frame]
                picks += [start + k * h * w + i for i in top(score, count)]
        start += size
    return picks
