"""Muon and AdamW as one."""

import copy

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_specinfer.tuning.optimizer import MuonAdamW


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(8, 6)
        self.layer, self.norm = nn.Linear(6, 6, bias=False), nn.LayerNorm(6)
        self.head = nn.Linear(6, 8, bias=False)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)

    def get_output_embeddings(self):
        return self.head

    def forward(self, ids):
        return self.head(self.frozen(self.norm(self.layer(self.embed(ids)))))


def steps(model, optimizers, seeds):
    for seed in seeds:
        torch.manual_seed(seed)
        model(torch.randint(8, (5,))).logsumexp(-1).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def same(one, other):
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_matrices_of_layers_are_muons_and_all_else_is_adamws(monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    ours, theirs = Model(), Model()
    steps(ours, [MuonAdamW(ours, lr=0.1, weight_decay=0.01)], range(4))
    others = [theirs.embed.weight, *theirs.norm.parameters(), theirs.head.weight]
    muon = torch.optim.Muon(
        [theirs.layer.weight],
        lr=0.1,
        weight_decay=0.01,
        adjust_lr_fn="match_rms_adamw",
    )
    adamw = torch.optim.AdamW(others, lr=0.1, weight_decay=0.01)
    steps(theirs, [muon, adamw], range(4))
    assert same(ours, theirs) and not same(ours, Model())


def test_training_goes_on_from_a_checkpoint():
    whole = Model()
    optimizer = MuonAdamW(whole, lr=0.1, weight_decay=0.01)
    steps(whole, [optimizer], range(3))
    kept = copy.deepcopy((whole.state_dict(), optimizer.state_dict()))
    steps(whole, [optimizer], range(3, 6))
    resumed = Model()
    resumed.load_state_dict(kept[0])
    optimizer = MuonAdamW(resumed, lr=0.7, weight_decay=0.3)
    optimizer.load_state_dict(kept[1])
    steps(resumed, [optimizer], range(3, 6))
    assert same(whole, resumed)


class Dtypes(TorchDispatchMode):
    """Of the operands of all products inside."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.found |= {a.dtype for a in args if torch.is_tensor(a)}
        return func(*args, **(kwargs or {}))


def orthogonalised(gradient):
    """Five steps of the Newton-Schulz iteration of Muon, in float64."""
    x = gradient.double() / gradient.norm()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


def test_products_are_of_what_the_device_multiplies_quickest(monkeypatch):
    start, found = Model(), {}
    for dtype in (torch.bfloat16, torch.float32):
        fast = dtype == torch.bfloat16
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda f=fast: f)
        model = Model()
        optimizer = MuonAdamW(model, lr=0.1, weight_decay=0)
        model(torch.arange(5)).logsumexp(-1).sum().backward()
        with Dtypes() as dtypes:
            optimizer.step()
        assert dtypes.found == {dtype}
        assert model.layer.weight.grad.dtype == model.layer.weight.dtype
        found[dtype] = model.layer.weight.detach() - start.layer.weight.detach()
    wanted = -0.1 * 0.2 * 6**0.5 * orthogonalised(model.layer.weight.grad)
    for dtype, error in ((torch.bfloat16, 5e-3), (torch.float32, 1e-6)):
        torch.testing.assert_close(found[dtype].double(), wanted, rtol=0, atol=error)
