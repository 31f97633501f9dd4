"""Lookups on the device and on the host, side by side over random texts."""

from types import SimpleNamespace

import numpy as np
import torch

SEEDS = range(18)
NUM_SLOTS, MAX_LEN = 3, 60
# Of the first of two texts the last tokens, what has ended, what is looked up, and what
# differs from `both`: what random texts seldom decide.
RUN = [*range(10, 50)]
MANY = {"n": 20}
RARE = {
    "shorter than a match": ([9], [[9, 1, 2, 3, 4], [8, 1, 2, 3, 5]], [1, 2, 3], {}),
    "longer than a match counts": ([], [[*RUN, 4], [*RUN[5:], 5]], RUN, {}),
    "as likely as the last": ([], [[1, 2, 3, 4], [1, 2, 3, 5]], [1, 2, 3], {"n": 1}),
    "more places than count": ([], [], [t for i in RUN[:19] for t in (i, 1, 2)], MANY),
    "in the older texts alone": ([], [RUN[:9], RUN[20:]], RUN[:5], {"size": 60}),
    "shorter in newer texts": ([], [RUN, [0, 12, 13, 14, 7]], RUN[:5], {"size": 90}),
    "a full generation": ([], [RUN[:9], RUN[9:18], RUN[18:27]], RUN[:5], {"size": 40}),
    "a loop": ([], [], 9 * [1, 2, 3], MANY),
    "no token": ([], [[1, 2, 3, 99, 4], [1, 2, 3, 4, 5]], [1, 2, 3], {"vocab_size": 9}),
}
RARE["a private text"] = *RARE["as likely as the last"][:3], {"num_private": 1}
# How long texts without a match, before, at and behind the blocks of a scan are.
LENGTHS = [0, 1, 2, 15, 16, 17, 33, MAX_LEN]


def outputs(
    device: str = "cpu",
) -> tuple[list, list, list, dict[str, tuple[dict, dict]]]:
    """Let texts start, grow and be looked up."""
    from vllm_specinfer.kernels.triton import matches, places, texts

    matches.BLOCK = places.BLOCK = texts.BLOCK = 16
    found = [found for seed in SEEDS for found in searches(seed, device)]
    ngrams = [found for seed in SEEDS for found in ngram_searches(seed, device)]
    past = [past_texts(device, *case) for case in ((), ([],), ([1],), ([0, 1],))]
    rare = {name: both(device, *case[:3], **case[3]) for name, case in RARE.items()}
    return found, past, ngrams, rare


def both(
    device: str,
    before: list[int],
    past: list[list[int]],
    own: list[int],
    n: int = 8,
    size: int = 400,
    vocab_size: int | None = None,
    num_private: int = 0,
) -> tuple[dict, dict]:
    """What the device and the host find in one text after the others.

    Args:
        device: Where.
        before: What the row before the texts ends with.
        past: Texts that have ended, in their order.
        own: The text.
        n: Nodes of a tree.
        size: Tokens of past texts.
        vocab_size: Other tokens are none.
        num_private: So many of the past texts, the first ones, are nobody else's.
    """
    from vllm_specinfer.drafting.lookup import LookupSource
    from vllm_specinfer.drafting.suffix import Suffixes
    from vllm_specinfer.drafting.text_copies import TextCopies, Texts
    from vllm_specinfer.options import SuffixSource

    host = Suffixes(SuffixSource(size), 2, n)
    source = LookupSource(host, vocab_size)
    tokens = torch.zeros(2, MAX_LEN, dtype=torch.int32, device=device)
    lengths = torch.tensor([MAX_LEN, 0], dtype=torch.int32, device=device)
    tokens[0, MAX_LEN - len(before) :] = torch.tensor(before)
    source.capture(TextCopies(Texts(tokens, lengths)))
    for i, text in enumerate((*past, own)):
        if i:
            source.end(1, None)
        source.start(1, SimpleNamespace(is_private=i < num_private))
        tokens[1, : len(text)] = torch.tensor(text)
        lengths[1] = len(text)
        source.has_read(1, np.array(text, np.int32))
    slots = torch.tensor([0, 1])
    source.on_device.fill((1.0, 0.0), slots.numpy())
    grows = torch.tensor([False, True], device=device)
    found = source.on_device.find(slots.to(device), grows)
    nodes = source._known(host.find(1, np.array(own, np.int32)))
    return paths_on_device(found, 1), paths_on_host(nodes, (1.0, 0.0))


def past_texts(device: str, *looked_up: list[int]) -> dict[tuple, float]:
    """What followed in two past texts, the first of which ended there.

    Before they became past ones all was forgotten, and then these looked up in again.
    """
    from vllm_specinfer.drafting.device_suffix import DeviceSuffixes
    from vllm_specinfer.drafting.text_copies import TextCopies, Texts

    tokens = torch.tensor([[7, 1, 2, 3], [1, 2, 3, 4], [5, 1, 2, 3]], dtype=torch.int32)
    lengths = torch.full((3,), 4, dtype=torch.int32)
    copies = TextCopies(Texts(tokens.to(device), lengths.to(device)))
    lookup = DeviceSuffixes(copies, 2, 30)
    for slots in looked_up:
        lookup.forget()
        lookup.fill((1.0, 0.0), np.array(slots, int))
    lookup.fill((1.0, 0.0), np.array([2]))
    lookup.end(0)
    lookup.end(1)
    slots, grows = torch.tensor([2]), torch.tensor([True])
    return paths_on_device(lookup.find(slots.to(device), grows.to(device)), 0)


def searches(seed: int, device: str) -> list[tuple[dict, dict]]:
    """What the device and the host find each time: paths and their log chances."""
    from vllm_specinfer.drafting.suffix import Suffixes
    from vllm_specinfer.drafting.text_copies import TextCopies, Texts
    from vllm_specinfer.options import SuffixSource

    rng = np.random.default_rng(seed)
    num_nodes = int(rng.choice([1, 3, 8, 20]))
    max_tokens = int(rng.choice([0, 50, 400]))
    host = Suffixes(SuffixSource(max_tokens), NUM_SLOTS, num_nodes)
    tokens = np.zeros((NUM_SLOTS, MAX_LEN), np.int32)
    lengths = np.zeros(NUM_SLOTS, np.int32)
    texts = Texts(*(torch.tensor(a, device=device) for a in (tokens, lengths)))
    lookup = host.for_device(TextCopies(texts))
    correction = [(1.0, 0.0), (0.5, 0.0), (1.0, 0.3)][seed % 3]
    vocab, results = int(rng.choice([2, 6, 40])), []
    # Since all was forgotten.
    looked_up = set(range(NUM_SLOTS))
    # What texts have in common.
    common = rng.integers(vocab, size=40)
    for step in range(16):
        slot = int(rng.integers(NUM_SLOTS))
        if step < NUM_SLOTS or rng.random() < 0.3:
            slot = step if step < NUM_SLOTS else slot
            if slot in looked_up:
                host.read(slot, tokens[slot, : lengths[slot]])
            host.start(slot)
            lookup.end(slot)
            lookup.start(slot)
            lengths[slot] = 0
            if rng.random() < 0.2:
                host.forget()
                lookup.forget()
                looked_up.clear()
        room = MAX_LEN - lengths[slot]
        new = rng.integers(vocab, size=20)
        if rng.random() < 0.8:
            new = common[int(rng.integers(40)) :]
        new = new[: min(room, int(rng.integers(1, 20)))]
        tokens[slot, lengths[slot] :][: len(new)] = new
        lengths[slot] += len(new)
        for kept, values in zip(texts, (tokens, lengths), strict=True):
            kept.copy_(torch.from_numpy(values))
        slots = torch.from_numpy(rng.permutation(NUM_SLOTS)[:2])
        grows = torch.tensor([True, step % 4 > 0])
        lookup.fill(correction, slots.numpy())
        looked_up.update(slots.tolist())
        found = lookup.find(slots.to(device), grows.to(device))
        for r, s in enumerate(slots.tolist()):
            nodes = host.find(s, tokens[s, : lengths[s]])
            results.append((
                paths_on_device(found, r),
                paths_on_host(nodes, correction) if grows[r] else {},
            ))  # fmt: skip
    return results


def ngram_searches(seed: int, device: str) -> list[tuple[list, list]]:
    """What both find each time: depth, parent, token and log chance of each node."""
    from vllm_specinfer.drafting.lookup import LookupSource
    from vllm_specinfer.drafting.ngram import Ngrams
    from vllm_specinfer.drafting.text_copies import TextCopies, Texts
    from vllm_specinfer.options import NgramSource

    rng = np.random.default_rng(seed)
    least = int(rng.integers(1, 4))
    most = least + int(rng.choice([0, 1, 4, MAX_LEN]))
    lookup = Ngrams(NgramSource(least, most), int(rng.integers(1, 9)))
    vocab = int(rng.choice([2, 3, 6]))
    source = LookupSource(lookup, [None, vocab, vocab - 1][seed % 3])
    source.calibration.distrust = [0.0, -0.5, 0.3][seed % 3]
    num_slots = len(LENGTHS)
    tokens = rng.integers(vocab, size=(num_slots, MAX_LEN))
    tokens = tokens.astype(np.int32)
    lengths = torch.zeros(num_slots, dtype=torch.int32, device=device)
    texts = Texts(torch.from_numpy(tokens).to(device), lengths)
    source.capture(TextCopies(texts))
    source.on_device.fill(source.calibration.line, np.arange(num_slots))
    results, of_slot = [], rng.permutation(LENGTHS)
    for _ in range(3):
        lengths.copy_(torch.from_numpy(of_slot))
        slots = rng.permutation(num_slots)
        grows = rng.random(num_slots) < 0.8
        slots[~grows] = 0  # as padding has it
        step = SimpleNamespace(
            growing=np.arange(num_slots),
            slots=slots,
            num_tokens=np.maximum(of_slot[slots], 1),  # the host sees no empty text
            all_token_ids=tokens,
            tests_draws=False,
        )
        expected = source.propose(step).candidates
        found = source.on_device.find(
            torch.from_numpy(slots).to(device), torch.from_numpy(grows).to(device)
        )
        for r in range(num_slots):
            chain = nodes_of(expected, r) if grows[r] else []
            results.append((nodes_of(found, r), chain))
        of_slot = np.minimum(of_slot + rng.integers(9, size=num_slots), MAX_LEN)
        if rng.random() < 0.5:
            # Another request's text takes a slot.
            slot = int(rng.integers(num_slots))
            source.on_device.start(slot)
            tokens[slot] = rng.permutation(tokens[slot])
            texts.tokens[slot].copy_(torch.from_numpy(tokens[slot]))
    return results


def nodes_of(candidates, r: int) -> list[tuple]:
    """Column, parent, token and score of one request's candidates."""
    scores = candidates.scores[r].tolist()
    parents, tokens = candidates.parents[r].tolist(), candidates.tokens[r].tolist()
    return [
        (column, parents[column], tokens[column], scores[column])
        for column in np.flatnonzero(np.isfinite(scores)).tolist()
    ]


def paths_on_device(found, r: int) -> dict[tuple, float]:
    """Of the candidates of one request."""
    scores, paths = found.scores[r].tolist(), {-1: ()}
    parents, tokens = found.parents[r].tolist(), found.tokens[r].tolist()
    for column in np.flatnonzero(np.isfinite(scores)).tolist():
        paths[column] = (*paths[parents[column]], tokens[column])
    del paths[-1]
    return {path: scores[column] for column, path in paths.items()}


def paths_on_host(nodes, correction: tuple[float, float]) -> dict[tuple, float]:
    """Of lookup nodes."""
    paths, scores = {-1: ()}, {-1: 0.0}
    for node, (parent, token, chance) in enumerate(nodes):
        paths[node] = (*paths[parent], token)
        own = np.log(chance) * correction[0] - correction[1]
        scores[node] = float(scores[parent] + own)
    return {paths[node]: scores[node] for node in range(len(nodes))}
