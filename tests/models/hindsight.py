"""The goals that hindsight may give a transition, and how often, listed one by one."""

from collections import Counter


def goal_distribution(strategy, achieved, length, row, t, discount=1.0):
    """The probability of each new goal of step ``t`` of episode ``row``, by the achieved goals."""
    if strategy == "geometric":
        weights = [discount**k for k in range(length[row] - t)]
        return {achieved[row][t + k]: w / sum(weights) for k, w in enumerate(weights)}
    if strategy == "final":
        choices = [achieved[row][length[row] - 1]]
    elif strategy == "future":
        choices = [achieved[row][step] for step in range(t, length[row])]
    elif strategy == "episode":
        choices = [achieved[row][step] for step in range(length[row])]
    else:
        choices = [
            goals[step] for goals, n in zip(achieved, length, strict=True) for step in range(n)
        ]
    return {goal: count / len(choices) for goal, count in Counter(choices).items()}
