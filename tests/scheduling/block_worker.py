"""A scheduler with vLLM's blocks, and a worker that only remembers what it has written.

Dimension legend: S request slots, B blocks of one request's table.
"""

import functools
import random
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from vllm import EngineArgs, SamplingParams
from vllm.config import VllmConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from tests.conftest import LLAMA, write_model
from vllm_specinfer.hooks import speculative_config
from vllm_specinfer.scheduling import blocks, invariants
from vllm_specinfer.scheduling.async_scheduler import specinfer_scheduler
from vllm_specinfer.scheduling.draft_trees import DraftTrees
from vllm_specinfer.scheduling.scheduler import SpecInferScheduler

BLOCK_SIZE, NUM_NODES, MAX_LEN, SLOTS = 4, 6, 40, 4
# For about half of what the running requests can come to want.
NUM_BLOCKS = 22
GARBAGE = None


@functools.cache
def vllm_config(lookup: bool = False) -> VllmConfig:
    """A config of an SSM, or a lookup, whose models are never loaded."""
    with tempfile.TemporaryDirectory() as folder:
        target, ssm = (write_model(Path(folder) / name, LLAMA) for name in "ts")
        config = EngineArgs(
            model=target,
            skip_tokenizer_init=True,
            max_model_len=MAX_LEN,
            max_num_seqs=SLOTS,
            max_num_batched_tokens=48,
            block_size=BLOCK_SIZE,
            enable_prefix_caching=True,
            speculative_config={
                "method": "specinfer",
                "model": "suffix" if lookup else ssm,
                "num_speculative_tokens": NUM_NODES,
            },
        ).create_engine_config()
        assert config.use_v2_model_runner
    speculative_config._switch_runner_off()
    init_none_hash(sha256)
    return config


def make_scheduler(
    asynchronous: bool = False,
    max_num_tokens: int = 48,
    lookup: bool = False,
    checked: bool | None = True,
) -> SpecInferScheduler:
    """A scheduler of NUM_BLOCKS blocks, less vLLM's null block.

    Args:
        asynchronous: It schedules a step before the one before has ended.
        max_num_tokens: Rows of a step.
        lookup: Trees come from a lookup, not from an SSM.
        checked: Every step is; None for what the environment says.
    """
    config = vllm_config(lookup)
    config.scheduler_config.max_num_scheduled_tokens = max_num_tokens
    config.scheduler_config.async_scheduling = asynchronous
    config.cache_config.num_gpu_blocks = NUM_BLOCKS
    spec = FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    speculative_config._switch_runner_on()
    scheduler = specinfer_scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            NUM_BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)]
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
    )
    # It lives in the tests' own process, whose later engines may be plain ones.
    speculative_config._switch_runner_off()
    if checked is not None:
        scheduler._checked = checked
    return scheduler


class Worker:
    """Keeps, by KV slot, the prefix whose K/V the target has written there."""

    def __init__(self) -> None:
        self.slots: dict[str, int] = {}
        self.tokens: dict[str, list[int]] = {}
        # How many of them have their K/V.
        self.computed: dict[str, int] = {}
        self.kv: list = [GARBAGE] * (NUM_BLOCKS * BLOCK_SIZE)
        self.table = np.zeros((SLOTS, 2 * MAX_LEN // BLOCK_SIZE), np.int32)
        # As vLLM's: [1, S] blocks held, and per group a table [S, B].
        self.tables = SimpleNamespace(
            num_blocks=SimpleNamespace(np=np.zeros((1, SLOTS), np.int32)),
            block_tables=[SimpleNamespace(gpu=torch.from_numpy(self.table))],
        )

    def begin(self, output: SchedulerOutput) -> None:
        """Follow the scheduler's requests and blocks, as vLLM's runner does."""
        blocks.shorten(self.tables, self.slots, getattr(output, "kept_blocks", {}))
        for req_id in output.finished_req_ids | output.preempted_req_ids:
            self.slots.pop(req_id, None)
        for new in output.scheduled_new_reqs:
            free = set(range(SLOTS)) - set(self.slots.values())
            self.slots[new.req_id] = min(free)
            self.tokens[new.req_id] = list(new.prefill_token_ids)
            self.computed[new.req_id] = new.num_computed_tokens
            self.tables.num_blocks.np[0, self.slots[new.req_id]] = 0
            self._append(new.req_id, new.block_ids[0])
        cached = output.scheduled_cached_reqs
        for req_id, ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if ids is not None:
                self._append(req_id, ids[0])
        invariants.check_tables(
            self.tables, self.slots, getattr(output, "block_ids", {})
        )

    def run(self, req_id: str, num_rows: int, emitted: list[int]) -> None:
        """Run a request's rows, keep those of its text.

        Args:
            req_id: The request.
            num_rows: Its rows: of its text, or its last token's and nodes'.
            emitted: Tokens of accepted nodes and the one after; none inside a prompt.
        """
        text, num_computed = self.tokens[req_id], self.computed[req_id]
        for position in range(num_computed):
            written = self.kv[self._slot(req_id, position)]
            assert written == text[: position + 1], f"{req_id} lost {position}"
        end = num_computed + num_rows
        text += emitted
        num_valid = min(len(text) - 1, end) if emitted else end
        for position in range(num_computed, end):
            valid = position < num_valid
            found = text[: position + 1] if valid else GARBAGE
            self.kv[self._slot(req_id, position)] = found
        self.computed[req_id] = num_valid

    def draft(self, req_id: str) -> None:
        """An SSM reads the next token, too, and drafts in all slots that are left."""
        num_valid = self.computed[req_id]
        held = int(self.tables.num_blocks.np[0, self.slots[req_id]]) * BLOCK_SIZE
        for position in range(num_valid, min(max(held, num_valid + 1), MAX_LEN)):
            self.kv[self._slot(req_id, position)] = GARBAGE

    def _slot(self, req_id: str, position: int) -> int:
        slot = self.slots[req_id]
        held = self.tables.num_blocks.np[0, slot]
        assert position < held * BLOCK_SIZE, f"{req_id} has no slot for {position}"
        block = self.table[slot, position // BLOCK_SIZE]
        return int(block) * BLOCK_SIZE + position % BLOCK_SIZE

    def _append(self, req_id: str, ids: list[int]) -> None:
        slot = self.slots[req_id]
        start = self.tables.num_blocks.np[0, slot]
        self.table[slot, start : start + len(ids)] = ids
        self.tables.num_blocks.np[0, slot] += len(ids)


class Engine:
    """Steps of a scheduler and its worker, all chances drawn from a seed."""

    def __init__(self, scheduler: SpecInferScheduler, seed: int) -> None:
        self.scheduler = scheduler
        self.worker = Worker()
        self.rng = random.Random(seed)
        self.num_requests = 0
        self.preemptions = 0

    def add(self, length: int, text: int, max_tokens: int) -> None:
        """A request with the first tokens of one of few texts."""
        tokens = random.Random(text).choices(range(100), k=length)
        self.num_requests += 1
        request = Request(
            str(self.num_requests),
            tokens,
            SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            None,
            block_hasher=get_request_block_hasher(BLOCK_SIZE, sha256),
        )
        self.scheduler.add_request(request)

    def abort(self, number: int) -> None:
        """One of the live requests leaves, if there is one."""
        live = sorted(self.scheduler.requests)
        if live:
            self.scheduler.finish_requests(
                live[number % len(live)], RequestStatus.FINISHED_ABORTED
            )

    def step(self, most_nodes: int) -> None:
        """A step with random acceptance; the next trees have few or many nodes."""
        scheduler = self.scheduler
        lookahead = scheduler.num_lookahead_tokens
        fits = scheduler._slots.missing(scheduler.running, lookahead) <= 0
        told_before = set(scheduler.reset_preempted_req_ids)
        output = scheduler.schedule()
        preempted = output.preempted_req_ids - told_before
        assert not (fits and preempted), "vLLM took more blocks than foreseen"
        self.preemptions += len(preempted)
        self.worker.begin(output)
        emitted = {}
        for req_id, num_rows in output.num_scheduled_tokens.items():
            request = scheduler.requests[req_id]
            computed = request.num_computed_tokens - num_rows
            assert self.worker.computed[req_id] == computed
            drafts = output.scheduled_spec_decode_tokens.get(req_id, [])
            emitted[req_id] = self._run(request, num_rows, len(drafts))
            self.worker.draft(req_id)
        scheduler.update_from_output(output, output_of(emitted))
        most_nodes = min(most_nodes, output.num_spec_tokens_to_schedule)
        trees = {r: [7] * self.rng.randint(0, most_nodes) for r in emitted}
        parents = [[-1] * len(tree) for tree in trees.values()]
        scheduler.update_draft_token_ids(
            DraftTrees(list(trees), list(trees.values()), parents)
        )

    def _run(self, request: Request, num_rows: int, num_nodes: int) -> list[int]:
        """Run rows of a request; what it emits."""
        emitted = []
        if not request.is_prefill_chunk:
            accepted = min(num_nodes, self.rng.choice([0, 0, 1, 2, num_nodes]))
            emitted = self.rng.choices(range(100), k=accepted + 1)
        self.worker.run(request.request_id, num_rows, emitted)
        return emitted


class AsyncEngine(Engine):
    """Schedules a step before the scheduler hears of the one before."""

    def __init__(self, scheduler: SpecInferScheduler, seed: int) -> None:
        super().__init__(scheduler, seed)
        # Steps that have run; requests of the last one, and the nodes of their trees.
        self.outputs: list[tuple[SchedulerOutput, ModelRunnerOutput]] = []
        self.drafts: list[str] = []
        self.trees: dict[str, int] = {}

    def step(self, most_nodes: int) -> None:
        """As `Engine.step`; trees are drafted when the next step is there."""
        scheduler = self.scheduler
        told_before = set(scheduler.reset_preempted_req_ids)
        output = scheduler.schedule()
        self.preemptions += len(output.preempted_req_ids - told_before)
        for req_id in self.drafts:
            self.worker.draft(req_id)
        trees = {r: self.rng.randint(0, most_nodes) for r in self.drafts}
        self.worker.begin(output)
        emitted = {}
        for req_id, num_rows in output.num_scheduled_tokens.items():
            scheduled = len(output.scheduled_spec_decode_tokens.get(req_id, []))
            nodes = min(scheduled, trees.get(req_id, 0))
            request = scheduler.requests[req_id]
            emitted[req_id] = self._run(request, num_rows - scheduled + nodes, nodes)
        self.drafts = list(emitted)
        self.outputs.append((output, output_of(emitted)))
        if len(self.outputs) == 2 or not emitted:
            scheduler.update_from_output(*self.outputs.pop(0))


def output_of(emitted: dict[str, list[int]]) -> ModelRunnerOutput:
    """What a worker returns of a step."""
    ids = {req_id: i for i, req_id in enumerate(emitted)}
    return ModelRunnerOutput(list(ids), ids, list(emitted.values()))
