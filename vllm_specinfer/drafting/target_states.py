"""What a head reads of the target where only the device knows which rows stay."""

from typing import NamedTuple

import torch


class TargetStates(NamedTuple):
    """The target's states of a verified step with R requests, on the device.

    Attributes:
        states: [rows, D] of all rows.
        first: [R] row of each request's root, or of its prompt's last token.
        path: [R, N] accepted rows below it, from depth 1 down; any behind them.
    """

    states: torch.Tensor
    first: torch.Tensor
    path: torch.Tensor

    def of(self, requests: torch.Tensor) -> "TargetStates":
        """Of these requests."""
        return self._replace(first=self.first[requests], path=self.path[requests])

    def last(self, num_new: torch.Tensor, window: int) -> torch.Tensor:
        """The states of the rows that stay, the last one last.

        Args:
            num_new: [R] how many stay: the root and what was accepted.
            window: T, at least as many.

        Returns:
            [R, T, D]; before a request's first one, any.
        """
        places = torch.arange(-window, 0, device=num_new.device) + num_new[:, None]
        below = (places - 1).clamp(0, self.path.shape[1] - 1)
        below = self.path.long().gather(1, below)
        rows = torch.where(places > 0, below, 0)
        return self.states[self.first.long()[:, None] + rows]
