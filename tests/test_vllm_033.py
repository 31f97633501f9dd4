"""What vLLM 0.33 passes otherwise than 0.32, with doubles: there is no CPU build of it.

The lists of arguments are those of the 0.33.0 wheel (``data/vllm-0.33.json``).
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.worker.cpu_worker import CPUWorker  # noqa: F401  before vLLM's other one
from vllm.v1.worker.gpu.sample.sampler import Sampler

from vllm_specinfer import compat, seams
from vllm_specinfer.hooks import cpu_v2
from vllm_specinfer.kernels.cpu import block_tables, inputs
from vllm_specinfer.scheduling import scheduler
from vllm_specinfer.scheduling.grammar import bitmask_of_trees
from vllm_specinfer.tree.token_tree import ROOT, TokenTree
from vllm_specinfer.verify.stochastic import DrawTestingSampler
from vllm_specinfer.worker import TreeOutput

KERNELS = "vllm.v1.worker.gpu."


def arguments(name, **given):
    """Values by position for a kernel of 0.33, all parameters given."""
    names = seams.table("0.33")[KERNELS + name]["is"].removeprefix("def ").split(", ")
    assert given.keys() == set(names)
    return [given[name] for name in names]


@pytest.mark.parametrize("masks", [False, True])
def test_block_tables_are_gathered_without_blocks_that_left_the_window(masks):
    tables = torch.arange(1, 25, dtype=torch.int32).reshape(3, 8)
    gathered = torch.full((3, 8), -1, dtype=torch.int32)
    block_tables.gather_block_tables(
        *arguments(
            "block_table:_gather_block_tables_kernel",
            batch_idx_to_req_idx=torch.tensor([2, 0]),
            src_block_table_ptrs=torch.tensor([tables.data_ptr()]),
            dst_block_table_ptrs=torch.tensor([gathered.data_ptr()]),
            block_table_strides=torch.tensor([8]),
            num_blocks_ptr=torch.tensor([[8, 8, 4]]),
            num_blocks_stride=3,
            num_reqs=2,
            num_computed_tokens_ptr=torch.tensor([0, 0, 70]),
            sliding_window_reach_ptr=torch.tensor([20]),
            block_sizes_ptr=torch.tensor([16]),
            MASK_SLIDING_WINDOW=masks,
            BLOCK_SIZE=1024,
        )[:-2],
        MASK_SLIDING_WINDOW=masks,
        BLOCK_SIZE=1024,
    )
    first = [0, 0, 0, 20] if masks else [17, 18, 19, 20]
    assert gathered[0].tolist() == [*first, -1, -1, -1, -1]
    assert gathered[1].tolist() == list(range(1, 9))


def test_a_step_is_counted_where_the_runner_also_passes_drafts():
    totals, computed = torch.tensor([5, 3]), torch.tensor([4, 2], dtype=torch.int32)
    counts = torch.zeros(2, 9, dtype=torch.int32)
    given = dict(
        idx_mapping_ptr=torch.tensor([1]),
        num_computed_tokens_ptr=computed,
        last_sampled_tokens_ptr=torch.zeros(2, 1, dtype=torch.int64),
        output_bin_counts_ptr=counts,
        output_bin_counts_stride=9,
        sampled_tokens_ptr=torch.tensor([[7, 8, 0]]),
        sampled_tokens_stride=3,
        num_sampled_ptr=torch.tensor([2]),
        num_rejected_ptr=torch.tensor([1]),
        query_start_loc_ptr=torch.tensor([0, 3]),
        all_token_ids_ptr=torch.zeros(2, 8, dtype=torch.int32),
        all_token_ids_stride=8,
        total_len_ptr=totals,
        draft_tokens_ptr=None,
        draft_tokens_out_ptr=torch.zeros(2, 3),
        num_draft_tokens=0,
    )
    name = "input_batch:_post_update_kernel"
    inputs.post_update(*arguments(name, **given), num_warps=1)
    assert (totals.tolist(), computed.tolist()) == ([5, 5], [4, 4])
    assert counts[1, [7, 8]].tolist() == [1, 1] and counts.sum() == 2
    given["draft_tokens_ptr"] = torch.zeros(1, 3)
    with pytest.raises(ValueError, match="pipeline_parallel_size must be 1"):
        inputs.post_update(*arguments(name, **given), num_warps=1)


def test_the_sampler_of_draws_passes_every_flag_on(monkeypatch):
    passed = []

    def sample_random(
        self, logits, mapping, slots, pos, top_k, top_p, has_topp_only_rows, fused
    ):
        passed.append((top_k, top_p, has_topp_only_rows, fused))
        return logits.argmax(-1), logits

    monkeypatch.setattr(Sampler, "_sample_random", sample_random)
    states = SimpleNamespace(temperature=SimpleNamespace(np=np.ones(1)))
    sampler = DrawTestingSampler(SimpleNamespace(sampling_states=states))
    rows = torch.zeros(1, dtype=torch.int64)
    logits, k = torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([2])
    # Top-k is applied before the draws are tested, so the parent applies none, nor a
    # fused sampler.
    token, left = sampler._sample_random(
        logits, rows, rows.numpy(), rows, k, None, False, True
    )
    assert passed == [(None, None, False, False)]
    assert token.tolist() == [2] and left.isinf().tolist() == [[True, False, False]]


@pytest.mark.parametrize("stride", [None, 6])
def test_every_request_has_as_many_rows_of_grammars(stride):
    """0.33 has N + 1 rows for each, of which the first ones are a path's."""
    tree = TokenTree(np.array([5, 6, 7]), np.array([ROOT, 0, ROOT]))

    def grammar_bitmask(requests, ids, drafts):
        found = []
        for req_id in ids:
            path = drafts.get(req_id, [])
            rows = [[sum(path[:i])] for i in range(len(path) + 1)]
            found += rows + [[99]] * ((stride or 0) - len(rows))
        return np.array(found, np.int32)

    manager = SimpleNamespace(
        validate_tokens=lambda _, tokens: tokens,
        grammar_bitmask=grammar_bitmask,
        _get_constraint_bounds=lambda *_: SimpleNamespace(constraint_start=0),
    )
    thinks = SimpleNamespace(reasoning_ended=False)
    requests = [
        SimpleNamespace(request_id=name, structured_output_request=thinks)
        for name in "rs"
    ]
    rows = bitmask_of_trees(manager, requests, [tree, tree])
    for start in (0, stride or 4):
        assert rows[start:][:4].tolist() == [[0], [5], [11], [7]]
    assert len(rows) == 2 * (stride or 4)


def test_steps_inside_prompts_are_drafted_for(monkeypatch):
    """0.33 asks for no drafts there, and SSMs would read prompts at their ends."""
    found = {"can_skip_drafts": True, "dynamic_sd_lookup": [4]}
    given = SimpleNamespace(
        ssms=["an SSM"], batch_schedule=None, verification_rule="coupled"
    )
    options = SimpleNamespace(options=given)
    found["vllm_config"] = SimpleNamespace(speculative_config=options)
    found |= dict.fromkeys(
        ("kv_cache_manager", "max_model_len", "max_num_scheduled_tokens")
    )
    monkeypatch.setattr(Scheduler, "__init__", lambda self: vars(self).update(found))
    monkeypatch.setattr(scheduler, "SlotsOfTrees", lambda *_: None)
    monkeypatch.setattr(cpu_v2, "enable_in_frontend", lambda: None)
    assert not scheduler.SpecInferScheduler().can_skip_drafts


def test_a_steps_output_has_all_that_is_abstract_in_vllms():
    for release in compat.SUPPORTED:
        seam = seams.table(release)["vllm.v1.outputs:AsyncModelRunnerOutput"]["is"]
        methods = [part[:-2] for part in seam.split(", ") if part.endswith("()")]
        assert "get_output" in methods
        assert all(method in vars(TreeOutput) for method in methods)


def test_the_workers_own_check_for_triton_is_passed(monkeypatch):
    import vllm.v1.worker.gpu_worker as gpu_worker

    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    monkeypatch.setattr(gpu_worker, "HAS_TRITON", False, raising=False)
    cpu_v2.enable_in_worker()
    cpu_v2.disable_in_frontend()
    assert gpu_worker.HAS_TRITON
