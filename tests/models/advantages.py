"""Naive models of advantages: the sums of the papers, one step at a time, for one window."""

import numpy as np


def _rows(reward, value, next_value):
    """Returns the number of rows that have an advantage, and the value after each."""
    after = value[1:] if next_value is None else next_value
    return (len(reward) - 1 if next_value is None else len(reward)), after


def gae(reward, terminated, truncated, value, next_value, discount, lambda_):
    """Equation 16 of Schulman et al., as a sum of errors that ends with the episode."""
    rows, after = _rows(reward, value, next_value)
    advantage = np.zeros(rows)
    for start in range(rows):
        factor = 1.0
        for t in range(start, rows):
            following = 0.0 if terminated[t] else discount[t] * after[t]
            advantage[start] += factor * (reward[t] + following - value[t])
            if terminated[t] or truncated[t]:
                break
            factor *= discount[t] * lambda_
    return advantage, value[:rows] + advantage


def vtrace(
    reward, terminated, truncated, value, next_value, ratio, discount, lambda_, rho_clip, c_clip
):
    """Equation 1 of Espeholt et al., as a sum of errors that ends with the episode."""
    rows, after = _rows(reward, value, next_value)
    target = np.array(value[:rows], float)
    for start in range(rows):
        factor = 1.0
        for t in range(start, rows):
            following = 0.0 if terminated[t] else discount[t] * after[t]
            error = min(rho_clip, ratio[t]) * (reward[t] + following - value[t])
            target[start] += factor * error
            if terminated[t] or truncated[t]:
                break
            factor *= discount[t] * lambda_ * min(c_clip, ratio[t])
    advantage = np.zeros(rows)
    for t in range(rows):
        if terminated[t]:
            following = 0.0
        elif truncated[t] or t == rows - 1:
            following = discount[t] * after[t]
        else:
            following = discount[t] * target[t + 1]
        advantage[t] = min(rho_clip, ratio[t]) * (reward[t] + following - value[t])
    return advantage, target
