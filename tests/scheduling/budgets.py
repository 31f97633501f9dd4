"""Budgets that know what they are told."""

from vllm_specinfer.scheduling.load_budget import LoadBudget


def a_budget(start, slope, draft, num_nodes=8):
    """A budget that knows these seconds; `draft` is that of an SSM's pass."""
    budget = LoadBudget(num_nodes)
    for n in range(1, 200):
        budget.observe_step(n % 64 + 1, start + slope * (n % 64 + 1), False)
        num_reqs, levels = n % 8 + 1, n % 5
        rows = num_reqs + 4 * levels
        budget.observe_draft(num_reqs, rows, levels, draft * (1 + levels))
    return budget
