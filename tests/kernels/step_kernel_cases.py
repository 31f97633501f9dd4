"""Random inputs for every step kernel, run through vLLM's own launch code.

The same functions run with the package's replacements in the test process, and with
vLLM's Triton kernels under Triton's interpreter (`interpreter.outputs_of`).
"""

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import torch

M = 6  # request rows
V = 2100  # more than one block of every kernel but the 8192-wide ones
LEN = 40  # max_model_len

Outputs = dict[str, torch.Tensor]
CASES: dict[str, Callable[[np.random.Generator], Outputs]] = {}


def case(function: Callable[[np.random.Generator], Outputs]) -> Callable:
    CASES[function.__name__] = function
    return function


def run(name: str) -> list[Outputs]:
    """The outputs of a case on three seeds."""
    return [CASES[name](np.random.default_rng((seed, len(name)))) for seed in range(3)]


def _i32(values: object) -> torch.Tensor:
    return torch.tensor(np.asarray(values), dtype=torch.int32)


def _ints(rng: np.random.Generator, low: int, high: int, *size: int) -> torch.Tensor:
    return _i32(rng.integers(low, high, size))


def _f32(values: object) -> torch.Tensor:
    return torch.tensor(np.asarray(values), dtype=torch.float32)


def _logits(rng: np.random.Generator, rows: int) -> torch.Tensor:
    logits = _f32(rng.normal(0, 6, (rows, V)))
    logits[:, rng.integers(0, V, 50)] = -float("inf")
    return logits


def _requests(rng: np.random.Generator, count: int) -> torch.Tensor:
    return _i32(rng.permutation(M)[:count])


def _cu(lengths: object) -> torch.Tensor:
    return _i32(np.concatenate([[0], np.cumsum(lengths)]))


def _expanded(rng: np.random.Generator, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of two requests: request rows [rows] and places within them [rows]."""
    first = rows // 2
    requests = _requests(rng, 2).tolist()
    counts = (first, rows - first)
    return (
        _i32(np.repeat(requests, counts)),
        _i32(np.concatenate([np.arange(count) for count in counts])),
    )


def _rows(rng: np.random.Generator, rows: int) -> torch.Tensor:
    return _ints(rng, 0, M, rows)


# buffer_utils


@case
def apply_write(rng: np.random.Generator) -> Outputs:
    from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor

    out: Outputs = {}
    for dtype in (torch.int32, torch.int64, torch.float32):
        staged = StagedWriteTensor((M, LEN), dtype, torch.device("cpu"))
        # Rows of their own: writes have no order on a GPU.
        for row in rng.permutation(M)[:5].tolist():
            start = int(rng.integers(0, LEN - 8))
            values = rng.integers(1, 99, rng.integers(1, 8)).tolist()
            staged.stage_write(row, start, values)
        staged.apply_write()
        out[str(dtype)] = staged.gpu
    flat = StagedWriteTensor(M, torch.int32, torch.device("cpu"))
    for row in rng.permutation(M)[:3].tolist():
        flat.stage_write_elem(row, int(rng.integers(1, 99)))
    flat.apply_write()
    return out | {"flat": flat.gpu}


def _block_tables(rng: np.random.Generator, groups: int) -> object:
    from vllm.v1.worker.gpu.block_table import BlockTables

    tables = BlockTables(
        block_sizes=[4, 8][:groups],
        max_num_reqs=M,
        max_num_batched_tokens=64,
        max_num_blocks_per_group=[LEN // 4, LEN // 8][:groups],
        device=torch.device("cpu"),
        slot_mapping_enabled=[True, bool(rng.integers(0, 2))][:groups],
    )
    for request in range(M):
        count = int(rng.integers(1, 5))
        for overwrite in (True, False):
            ids = tuple(rng.integers(1, 99, count).tolist() for _ in range(groups))
            if overwrite or count * 2 <= LEN // 8:
                tables.append_block_ids(request, ids, overwrite)
        tables.apply_staged_writes()
    return tables


@case
def apply_write_groups(rng: np.random.Generator) -> Outputs:
    tables = _block_tables(rng, 2)
    return {f"group {i}": table.gpu for i, table in enumerate(tables.block_tables)}


# block_table


@case
def gather_block_tables(rng: np.random.Generator) -> Outputs:
    out: Outputs = {}
    for groups in (1, 2):
        tables = _block_tables(rng, groups)
        requests = _requests(rng, 4)
        gathered = tables.gather_block_tables(requests, 4)
        for i, table in enumerate(gathered):
            out[f"{groups} groups, {i}"] = table.clone()
    return out


@case
def compute_slot_mappings(rng: np.random.Generator) -> Outputs:
    out: Outputs = {}
    for name, lengths in (("decode", [1] * 4), ("mixed", [5, 1, 7, 2])):
        tables = _block_tables(rng, 2)
        requests = _requests(rng, 4)
        requests[int(rng.integers(0, 4))] = -1
        pos = torch.cat(
            [torch.arange(n) + int(rng.integers(0, LEN - 8)) for n in lengths]
        )
        tables.compute_slot_mappings(requests, _cu(lengths), pos, sum(lengths))
        out[name] = tables.slot_mappings
    return out


# input_batch


@case
def prepare_prefill_inputs(rng: np.random.Generator) -> Outputs:
    from vllm.v1.worker.gpu.input_batch import prepare_prefill_inputs

    out: Outputs = {}
    for lookahead in (1, 3):
        input_ids = _ints(rng, 0, V, 40)
        following = _ints(rng, 0, V, lookahead, M)
        prefill = _ints(rng, 8, 20, M)
        computed = _ints(rng, 0, 12, M)
        lengths = rng.integers(1, 6, 4)
        requests = _requests(rng, 4)
        for request, length in zip(requests.tolist(), lengths, strict=True):
            if computed[request] < prefill[request]:
                computed[request] = min(
                    int(computed[request]), int(prefill[request] - length)
                )
        prepare_prefill_inputs(
            input_ids,
            following,
            requests,
            _cu(lengths),
            _ints(rng, 0, V, M, LEN),
            prefill,
            computed,
        )
        out[f"ids {lookahead}"] = input_ids
        out[f"next {lookahead}"] = following
    return out


@case
def apply_prompt_embeds(rng: np.random.Generator) -> Outputs:
    from vllm.v1.worker.gpu.model_states.prompt_embeds import PromptEmbedsState

    out: Outputs = {}
    for dtype in (torch.float32, torch.bfloat16):
        state = PromptEmbedsState(M, 7, dtype, torch.device("cpu"))
        requests, lengths = _requests(rng, 4), rng.integers(1, 6, 4)
        # Prompts that end inside a step and behind it, with ids among them; none.
        for request, length in zip(requests.tolist()[:3], (4, 20, 20), strict=True):
            is_id = None if request % 2 else torch.from_numpy(rng.random(length) < 0.4)
            request_data = SimpleNamespace(
                req_id=str(request),
                prompt_embeds=_f32(rng.normal(size=(length, 7))),
                prompt_is_token_ids=is_id,
            )
            state.add_request(request, request_data)
        state.apply_staged_writes()
        embeds = _f32(rng.normal(size=(30, 7))).to(dtype)
        batch = SimpleNamespace(
            num_reqs=4,
            num_scheduled_tokens=lengths,
            idx_mapping=requests,
            query_start_loc=_cu(lengths),
        )
        state.apply(batch, _ints(rng, 0, 6, M), embeds)
        out[str(dtype)] = embeds
    return out


@case
def prepare_pos_seq_lens(rng: np.random.Generator) -> Outputs:
    from vllm.v1.worker.gpu.input_batch import prepare_pos_seq_lens

    out: Outputs = {}
    for name, lengths in (("decode", [1] * 4), ("mixed", rng.integers(1, 7, 4))):
        pos = torch.full((40,), -1)
        seq_lens = _ints(rng, 1, 9, M)
        prepare_pos_seq_lens(
            _requests(rng, 4), _cu(lengths), _ints(rng, 0, 30, M), pos, seq_lens
        )
        out[f"pos {name}"] = pos
        out[f"lens {name}"] = seq_lens
    return out


@case
def prepare_rope_positions(rng: np.random.Generator) -> Outputs:
    from vllm.v1.worker.gpu.mm.rope import RopeState

    state = RopeState(3, M, 40, 20, torch.device("cpu"))
    state.prefill_positions.gpu[:] = _ints(rng, 0, 30, 3 * M, 20)
    state.prefill_delta.gpu[:] = _ints(rng, -9, 9, M)
    # The first two are in their prefills, in a piece and at the end; others behind.
    requests = _requests(rng, 4)
    prefill, computed = torch.full((2, M), 9, dtype=torch.int32)
    computed[requests.long()] = _i32([0, 5, 9, 12])
    starts = _cu([5, 4, 1, 6])
    state.prepare_positions(requests, starts, prefill, computed)
    return {"positions": state.get_positions(int(starts[-1]))}


@case
def combine_sampled_and_draft_tokens(rng: np.random.Generator) -> Outputs:
    from vllm.v1.worker.gpu.input_batch import combine_sampled_and_draft_tokens

    out: Outputs = {}
    for new in (1, 0):
        for name, num_drafts in (("plain", [0] * 5), ("drafts", [0, 3, 2, 1, 3])):
            if new == 0 and name == "plain":
                num_drafts = [1] * 5
            num_drafts = np.asarray(num_drafts)
            lengths = num_drafts + new + rng.integers(0, 3, 5)
            lengths[0] = 6  # a prefill chunk
            input_ids = _ints(rng, 0, V, 40)
            prefill = _ints(rng, 4, 12, M)
            seq_lens = _ints(rng, 6, 18, 5)
            indices = combine_sampled_and_draft_tokens(
                input_ids,
                _requests(rng, 5),
                _ints(rng, 0, V, M, 1).long(),
                _cu(lengths),
                seq_lens,
                prefill,
                _ints(rng, 0, V, M, 3).long(),
                _cu(num_drafts + new),
                int((num_drafts + new).sum()),
                new,
            )
            out[f"ids {new} {name}"] = input_ids
            out[f"indices {new} {name}"] = indices
    return out


@case
def get_num_sampled_and_rejected(rng: np.random.Generator) -> Outputs:
    from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected

    logits = rng.integers(1, 5, 5)
    sampled, rejected = get_num_sampled_and_rejected(
        _i32([rng.integers(1, n + 1) for n in logits]),
        _ints(rng, 3, 9, 5),
        _cu(logits),
        _requests(rng, 5),
        _ints(rng, 3, 9, M),
    )
    return {"sampled": sampled, "rejected": rejected}


@case
def post_update(rng: np.random.Generator) -> Outputs:
    from vllm.v1.worker.gpu.input_batch import post_update

    out: Outputs = {}
    for most in (1, 4):
        requests = _requests(rng, 5)
        state = {
            "computed": _ints(rng, 5, 20, M),
            "last": _ints(rng, 0, V, M, 1).long(),
            "tokens": _ints(rng, 0, V, M, LEN),
            "total": _ints(rng, 5, 20, M),
            "bins": _ints(rng, 0, 3, M, V),
        }
        lengths = rng.integers(most, most + 3, 5)
        sampled = torch.tensor(rng.integers(0, 9, (5, most)))
        post_update(
            requests,
            state["computed"],
            state["last"],
            state["bins"],
            sampled,
            _ints(rng, 0, most + 1, 5),
            _ints(rng, 0, most + 1, 5),
            _cu(lengths),
            state["tokens"],
            state["total"],
        )
        out |= {f"{key} {most}": v for key, v in state.items()}
    return out


@case
def expand_idx_mapping(rng: np.random.Generator) -> Outputs:
    from vllm.v1.worker.gpu.input_batch import expand_idx_mapping

    counts = rng.integers(1, 6, 4)
    mapping, pos = expand_idx_mapping(
        _requests(rng, 4), int(counts.sum()), _cu(counts), 6
    )
    return {"mapping": mapping, "pos": pos}


# sample


@case
def temperature(rng: np.random.Generator) -> Outputs:
    from vllm.v1.worker.gpu.sample.gumbel import apply_temperature

    logits = _logits(rng, 5)
    apply_temperature(logits, _rows(rng, 5), _f32([0.0, 1.0, 0.3, 0.7, 1.9, 0.9]))
    return {"logits": logits}


@case
def min_p(rng: np.random.Generator) -> Outputs:
    from vllm.v1.worker.gpu.sample.min_p import apply_min_p

    logits = _logits(rng, 5)
    apply_min_p(logits, _rows(rng, 5), _f32([0.0, 0.1, 0.02, 1.0, 0.5, 0.001]))
    return {"logits": logits}


_SEED = np.iinfo(np.int64)


def _seeds(rng: np.random.Generator) -> torch.Tensor:
    return torch.tensor(rng.integers(_SEED.min, _SEED.max, M))


@case
def gumbel_sample(rng: np.random.Generator) -> Outputs:
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

    out: Outputs = {}
    temps = _f32([0.0, 1.0, 0.5, 2.5, 1.0, 0.8])
    for scale in (False, True):
        rows = 12
        # Flat logits, so that the noise decides.
        logits = _f32(rng.normal(0, 1, (rows, V)))
        requests = _rows(rng, rows)
        pos = torch.tensor(rng.integers(0, 9000, rows))
        requests[1] = -1
        out[f"sampled {scale}"] = gumbel_sample(
            logits, requests, temps, _seeds(rng), pos, scale, False
        )
    logits = _logits(rng, 6).bfloat16()
    out["bfloat16"] = gumbel_sample(
        logits, _i32(range(6)), temps, _seeds(rng), torch.arange(6), False, False
    )
    return out


@case
def gumbel_greedy(rng: np.random.Generator) -> Outputs:
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

    logits = _f32(rng.integers(0, 4, (M, V)))  # ties everywhere
    requests = _i32([0, 1, 2, -1, 4, 5])
    return {
        "sampled": gumbel_sample(
            logits,
            requests,
            torch.zeros(M),
            _seeds(rng),
            torch.arange(M),
            apply_temperature=False,
            is_drafting=False,
        )
    }


@case
def gumbel_noise(rng: np.random.Generator) -> Outputs:
    """The noise of single tokens: one finite logit a row, its noised value kept."""
    from vllm.v1.worker.gpu.sample import gumbel

    rows, blocks = 64, -(-V // 1024)
    logits = torch.full((rows, V), -float("inf"))
    logits[torch.arange(rows), torch.tensor(rng.integers(0, V, rows))] = 0.0
    argmax = torch.zeros(rows, blocks, dtype=torch.int64)
    value = torch.zeros(rows, blocks)
    gumbel._gumbel_sample_kernel[(rows, blocks)](
        argmax,
        argmax.stride(0),
        value,
        value.stride(0),
        None,
        0,
        0,
        None,
        None,
        0,
        logits,
        logits.stride(0),
        _rows(rng, rows),
        _seeds(rng),
        torch.tensor(rng.integers(0, 1 << 20, rows)),
        torch.ones(M),
        V,
        BLOCK_SIZE=1024,
        IS_DRAFTING=False,
        APPLY_TEMPERATURE=False,
        USE_FP64=False,
        PER_TOKEN_COL=False,
    )
    return {"~values": value.amax(dim=-1)}


def _token_sets(rng: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    words = rng.integers(-(2**31), 2**31, (M, -(-V // 32)))
    words &= rng.integers(-(2**31), 2**31, words.shape)
    counts = _ints(rng, 0, 3, M, V) * _ints(rng, 0, 2, M, V)
    return _i32(words), counts


@case
def penalties(rng: np.random.Generator) -> Outputs:
    from vllm.v1.worker.gpu.sample.penalties import apply_penalties

    logits = _logits(rng, 8)
    requests, pos = _expanded(rng, 8)
    requests[0] = 0  # the row without penalties
    pos[0] = 0
    tokens = _ints(rng, 0, 20, 8)
    tokens[3] = -1  # a placeholder draft
    apply_penalties(
        logits,
        requests,
        tokens,
        pos,
        _f32([1.0, 1.5, 1.0, 0.7, 1.2, 1.0]),
        _f32([0.0, 0.0, 0.5, 0.25, -0.4, 0.0]),
        _f32([0.0, 0.0, 0.0, 0.75, 0.3, -0.5]),
        *_token_sets(rng),
    )
    return {"logits": logits}


@case
def bincount(rng: np.random.Generator) -> Outputs:
    from vllm.v1.worker.gpu.sample.penalties import bincount

    masks, counts = _token_sets(rng)
    prefill = _ints(rng, 10, LEN, M)
    prompt = torch.minimum(prefill, _ints(rng, 5, LEN, M))
    bincount(
        _requests(rng, 3).long(),
        _ints(rng, 0, V, M, LEN) % _ints(rng, 8, V, 1),
        prompt,
        prefill,
        masks,
        counts,
        int(prefill.max()),
    )
    return {"masks": masks, "counts": counts}


@case
def bias(rng: np.random.Generator) -> Outputs:
    from vllm.v1.worker.gpu.sample.logit_bias import apply_logit_bias

    def distinct(size: int) -> torch.Tensor:
        return _i32([rng.permutation(V)[:size] for _ in range(M)])

    out: Outputs = {}
    for check in (False, True):
        logits = _logits(rng, 12)
        allowed = distinct(16)
        stops = distinct(8)
        # Nothing but stop tokens left: request 3 restores them, request 4 does not.
        stops[3:5, :4] = allowed[3:5, :4]
        apply_logit_bias(
            logits,
            _i32(list(range(M)) * 2),
            _ints(rng, 0, 20, 12).long(),
            _i32([0, 5, 0, 3, 4, 0]),
            allowed,
            _i32([0, 0, 7, 2, 0, 1]),
            distinct(16),
            _f32(rng.normal(0, 5, (M, 16))),
            _i32([0, 12, 12, 30, 30, 12]),
            _i32([0, 2, 0, 4, 4, 3]),
            _i32([0, 0, 0, 1, 0, 1]),
            stops,
            check,
        )
        out[f"logits {check}"] = logits
    return out


@case
def bad_words(rng: np.random.Generator) -> Outputs:
    from vllm.v1.worker.gpu.sample.bad_words import apply_bad_words

    logits = _f32(rng.normal(0, 1, (8, V)))
    requests, pos = _expanded(rng, 8)
    words = 5
    lengths = rng.integers(1, 4, (M, words))
    offsets = np.zeros((M, words + 1), np.int32)
    offsets[:, 1:] = np.cumsum(lengths, axis=1)
    num_words = _ints(rng, 0, words + 1, M)
    num_words[requests[0]] = words
    prompt = _ints(rng, 1, 5, M)
    apply_bad_words(
        logits,
        requests,
        _ints(rng, 0, 2, M, 20),  # two tokens, so that most words match
        _i32(offsets),
        num_words,
        _ints(rng, 0, 2, M, LEN),
        prompt,
        prompt + _ints(rng, 0, 5, M),
        _ints(rng, 0, 2, 8),
        pos,
        words,
    )
    return {"logits": logits}


@case
def thinking_budget(rng: np.random.Generator) -> Outputs:
    from vllm.v1.worker.gpu.sample.thinking_budget import apply_thinking_budget

    rows = 40
    logits = _f32(rng.normal(0, 1, (rows, V)))
    requests, pos = _expanded(rng, rows)
    caches = [_i32([-1] * M), _i32([-1] * M), _i32([0] * M)]
    budget = _ints(rng, -1, 4, M)
    # Three tokens only, so that the markers occur in most places.
    tokens, drafts = _ints(rng, 0, 3, M, LEN), _ints(rng, 0, 3, rows)
    total = _ints(rng, 0, 12, M)
    for grown in (2, 0, 1):
        # Later calls find the caches of the one before, which may be ahead of them.
        apply_thinking_budget(
            logits,
            _i32(np.unique(requests)),
            requests,
            budget,
            tokens,
            total + 5 * grown * (total > 0),
            drafts,
            pos,
            *caches,
            _i32([1, 0]),
            _i32([0, 1]),
            _i32([2, 0, 2]),
        )
    return {"logits": logits, **{f"cache{i}": c for i, c in enumerate(caches)}}


@case
def topk_log_softmax(rng: np.random.Generator) -> Outputs:
    from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs

    logits = _logits(rng, 4)
    ids = torch.tensor(rng.integers(0, V, (4, 6)))
    return {
        "~float32": compute_token_logprobs(logits, ids),
        "~bfloat16": compute_token_logprobs(logits.bfloat16(), ids),
    }


@case
def ranks_and_token_ids(rng: np.random.Generator) -> Outputs:
    from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores

    out: Outputs = {}
    num_rows = M + 3  # several of a request
    logits = _logits(rng, num_rows).bfloat16()
    # A sampled token is possible; vLLM's kernel miscounts the rank of others.
    sampled = torch.tensor(
        [rng.choice(row.isfinite().nonzero()[:, 0]) for row in logits]
    )
    state = SimpleNamespace(
        num_token_ids=SimpleNamespace(gpu=_i32([0, 3, 0, 8, 1, 0])),
        token_ids=SimpleNamespace(gpu=_ints(rng, 0, V, M, 16)),
    )
    # Distinct per row, so that the order of the best tokens is defined.
    logits = logits.float() + _f32(rng.permutation(num_rows * V).reshape(-1, V)) * 1e-4
    for num, most in ((4, 0), (4, 8), (0, 8)):
        scores = compute_topk_scores(
            logits,
            num,
            sampled,
            logprob_token_ids_state=state,
            expanded_idx_mapping=_rows(rng, num_rows),
            max_per_req_token_ids=most,
        )
        out[f"ids {num} {most}"] = scores.logprob_token_ids
        out[f"~logprobs {num} {most}"] = scores.logprobs
        out[f"ranks {num} {most}"] = scores.selected_token_ranks
    return out


@case
def prompt_logprobs_token_ids(rng: np.random.Generator) -> Outputs:
    from vllm.v1.worker.gpu.sample.prompt_logprob import get_prompt_logprobs_token_ids

    lengths = rng.integers(1, 8, 4)
    return {
        "ids": get_prompt_logprobs_token_ids(
            int(lengths.sum()),
            _cu(lengths),
            _requests(rng, 4),
            _ints(rng, 0, 20, M),
            _ints(rng, 0, V, M, LEN),
        )
    }


@case
def apply_grammar_bitmask(rng: np.random.Generator) -> Outputs:
    from vllm.v1.worker.gpu.structured_outputs import _apply_grammar_bitmask_kernel

    out: Outputs = {}
    for dtype in (torch.float32, torch.bfloat16):
        stride = 4
        # Request 1 has fewer rows than masks: the surplus mask is not applied.
        cu_logits = _cu([2, 1, 3])
        mapping = _i32([0, 1, stride, stride + 1, 2 * stride + 2])
        logits = _logits(rng, 6).to(dtype)
        masks = _i32(rng.integers(-(2**31), 2**31, (5, -(-V // 32))))
        _apply_grammar_bitmask_kernel[(5, -(-V // 8192))](
            logits,
            logits.stride(0),
            mapping,
            cu_logits,
            masks,
            masks.stride(0),
            V,
            MASK_STRIDE=stride,
            BLOCK_SIZE=8192,
        )
        out[str(dtype)] = logits
    return out


@case
def num_nans(rng: np.random.Generator) -> Outputs:
    from vllm.v1.worker.gpu.metrics.logits import get_num_nans

    logits = _logits(rng, 4)
    logits[torch.tensor(rng.random((4, V)) < 0.01)] = float("nan")
    return {"nans": get_num_nans(logits)}


def outputs() -> dict[str, list[Outputs]]:
    """Of all cases."""
    return {name: run(name) for name in CASES}
