"""Muon for the matrices of layers, AdamW for all else, as one optimizer."""

import contextlib
from typing import Any

import torch
from torch import nn

from vllm_specinfer.tuning.precision import InFloat32, fast_dtype


class MuonAdamW(torch.optim.Optimizer):
    """Steps of both, with one state; a learning rate that suits AdamW suits both."""

    def __init__(self, module: nn.Module, lr: float, weight_decay: float) -> None:
        """Sort the parameters of a module.

        Args:
            module: Its linear layers' weights are Muon's, but for an output head's,
                whose rows are tokens.
            lr: Learning rate.
            weight_decay: Of all parameters.
        """
        learning = [p for p in module.parameters() if p.requires_grad]
        matrices = {m.weight for m in module.modules() if isinstance(m, nn.Linear)}
        head = getattr(module, "get_output_embeddings", lambda: None)()
        if head is not None:
            matrices -= {head.weight}
        kinds = {
            torch.optim.AdamW: ([p for p in learning if p not in matrices], {}),
            torch.optim.Muon: (
                [p for p in learning if p in matrices],
                {"adjust_lr_fn": "match_rms_adamw"},
            ),
        }
        self._parts = [
            kind(params, lr=lr, weight_decay=weight_decay, **options)
            for kind, (params, options) in kinds.items()
            if params
        ]
        super().__init__([part.param_groups[0] for part in self._parts], {})

    def step(self, closure: None = None) -> Any:
        """One step of each; a closure is refused."""
        if closure is not None:
            raise ValueError("closure must be None; got a function")
        for part, group in zip(self._parts, self.param_groups, strict=True):
            # Loading a checkpoint replaces both.
            part.param_groups, part.state = [group], self.state
            # Muon's products are of bfloat16 (torch/optim/_muon.py).
            slow = fast_dtype(group["params"][0].device) == torch.float32
            with InFloat32() if slow else contextlib.nullcontext():
                part.step()
