"""A CPU worker whose attention and commit are CUDA's."""

import gc
import itertools
import os
import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention import selector
from vllm.v1.attention.backends.registry import (
    AttentionBackendEnum,
    register_backend,
)
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu import cudagraph_utils, model_runner
from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager
from vllm.v1.worker.gpu.warmup import warmup_kernels
from vllm.v1.worker.workspace import init_workspace_manager

from tests.e2e.recorded_graphs import GRAPHS, recorded
from vllm_specinfer.attention.cuda import CUDATreeAttentionBackend
from vllm_specinfer.cpu_worker import SpecInferCPUWorker
from vllm_specinfer.device import Moment

# Nodes of the trees that `changing_sizes` gives.
SIZES = (5, 1, 0, 0, 8, 2, 3)


class InterpretedBackend(CUDATreeAttentionBackend):
    """CUDA's backend under the only name that the CPU platform chooses."""

    @staticmethod
    def get_name() -> str:
        """The name of the enum member."""
        return AttentionBackendEnum.CPU_ATTN.name


class StartsAsOnGPU(CPUWorker):
    """Starts in the order of vLLM's GPU worker.

    Attributes:
        warm_ups: Engines of the process with vLLM's defaults, graphs and asynchronous
            scheduling, that are still to be profiled and warmed up, which takes long.
    """

    warm_ups = 1

    def init_device(self) -> None:
        """With what lets captures lock their workspace."""
        super().init_device()
        init_workspace_manager(self.device)

    def determine_available_memory(self) -> int:
        """With a step of any number of rows, and a capture over a small KV cache, which
        is thrown away."""
        available, before = super().determine_available_memory(), set(GRAPHS)
        self.model_runner.profile_run()
        if self._warms_up:
            self.model_runner.profile_cudagraph_memory()
        self._profiled = weakref.WeakSet(set(GRAPHS) - before)
        return available

    def compile_or_warm_up_model(self) -> Any:
        """With made-up steps, then a capture of graphs."""
        kernels, warms_up = self.vllm_config.kernel_config, self._warms_up
        if warms_up:
            StartsAsOnGPU.warm_ups -= 1
            warmup_kernels(self.model_runner, self.execute_model, self.sample_tokens)
        if self._captures:
            self.model_runner.capture_model()
        # The CPU worker of 0.33 warms up itself, which a GPU's does not do here.
        kernels.enable_jit_warmup = False
        times = super().compile_or_warm_up_model()
        kernels.enable_jit_warmup = warms_up
        self._drawn_before = np.random.get_state()
        self._maybe_activate_jit_monitor()
        return times

    def _maybe_activate_jit_monitor(self) -> None:
        """What comes after the last warm-up; requests without a seed draw one."""
        state = np.random.get_state()[1:3]
        assert all(map(np.array_equal, state, self._drawn_before[1:3]))

    @property
    def _warms_up(self) -> bool:
        asynchronous = self.vllm_config.scheduler_config.async_scheduling
        return self._captures and asynchronous and self.warm_ups > 0

    @property
    def _captures(self) -> bool:
        return self.vllm_config.compilation_config.cudagraph_mode != CUDAGraphMode.NONE


class InterpretedWorker(SpecInferCPUWorker, StartsAsOnGPU):
    """Runs CUDA's path."""

    def register_attention(self) -> None:
        """Replace CPU_ATTN."""
        register_backend(
            AttentionBackendEnum.CPU_ATTN, f"{__name__}.{InterpretedBackend.__name__}"
        )
        selector._cached_get_attn_backend.cache_clear()

    def determine_available_memory(self) -> int:
        """Nobody keeps graphs of the small KV cache."""
        available = super().determine_available_memory()
        gc.collect()
        assert not self._profiled
        return available


class InterpretedRank(InterpretedWorker):
    """One rank of several, in a fork of its own, by a clock of its own.

    Attributes:
        counts: What it has done.
    """

    counts: "Counts"
    warm_ups = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        seconds = random.Random(os.getpid()).random
        Moment.seconds_since = lambda *_: seconds()  # as long as the process lives
        super().__init__(*args, **kwargs)


class Counts(NamedTuple):
    """What engines that take CUDA's path have done.

    Attributes:
        launches: Of each kernel.
        steps: As `counted` gives them, of waits.
        passes: As `named` gives them.
    """

    launches: dict[str, int]
    steps: list[dict[str, Any]]
    passes: list[str]


@contextmanager
def cuda_path(
    mode: str = "FULL_AND_PIECEWISE", worker: type[CPUWorker] = InterpretedWorker
) -> Iterator[Counts]:
    """Engines of this process take CUDA's path; `interpreter.prepare` was called.

    Args:
        mode: Of their CUDA graphs; vLLM's default on a GPU.
        worker: What runs.
    """
    from tests.e2e.device_guard import guarded
    from vllm_specinfer import config

    name, launches = f"{__name__}.{worker.__name__}", {}
    with (
        mock.patch.object(config, "CPU_WORKER", name),
        # vLLM's K/V write asks for it to choose its launch.
        mock.patch.object(torch.cuda, "get_device_capability", lambda _: (9, 0)),
        graphs_in_mode(CUDAGraphMode[mode]),
        recorded(),
        named() as passes,
        guarded(launches) as guard,
        counted(lambda: guard.num_reads) as steps,
    ):
        yield Counts(launches, steps, passes)


@contextmanager
def graphs_in_mode(mode: CUDAGraphMode) -> Iterator[None]:
    """CUDA graphs, which vLLM switches off on a CPU."""
    check = CpuPlatform.check_and_update_config

    def checked(cls: type, vllm_config: VllmConfig) -> None:
        check(vllm_config)
        if spec := vllm_config.speculative_config:
            scheduler = vllm_config.scheduler_config
            most = scheduler.max_num_seqs * (spec.num_speculative_tokens + 1)
            most = min(most, scheduler.max_num_batched_tokens)
            compilation = vllm_config.compilation_config
            compilation.cudagraph_mode = mode
            compilation.cudagraph_capture_sizes = sorted({1, 2, min(8, most), most})
            compilation.max_cudagraph_capture_size = most

    normalize = "_normalize_piecewise_cudagraph_mode"
    with (
        mock.patch.object(CpuPlatform, "check_and_update_config", classmethod(checked)),
        # Nothing is compiled; "pieces" between attention are launched as they come.
        mock.patch.object(VllmConfig, normalize, lambda *_, **__: None),
        mock.patch.object(model_runner, "has_compiled_submodule", lambda _: True),
        mock.patch.object(cudagraph_utils, "has_compiled_submodule", lambda _: True),
    ):
        yield


@contextmanager
def named() -> Iterator[list[str]]:
    """Names of the passes: graphs of drafting, of verification and in pieces, the
    others, and what memory is profiled by."""
    from vllm_specinfer.drafting import ahead, graphs, ssm
    from vllm_specinfer.verify.device_sampler import DeviceTreeSampler

    run_rows, passes = ssm.NeuralSSM._run_rows, []
    replay, look_up = graphs.Captured.replay, ahead.AheadDrafter.look_up
    run_fullgraph = ModelCudaGraphManager.run_fullgraph
    run_pieces = ModelCudaGraphManager.run_pw_graph
    profile = DeviceTreeSampler.profile

    def replayed(self: graphs.Captured) -> None:
        passes.append("graph")
        replay(self)

    def run(self: ssm.NeuralSSM, rows: ssm.PassRows, *args: Any) -> torch.Tensor:
        num_replays = len(passes)
        hidden = run_rows(self, rows, *args)
        if len(passes) == num_replays and self._graphs:
            passes.append("level" if rows.is_tree.any() else "catch-up")
        return hidden

    def looked_up(self: ahead.AheadDrafter, slots: Any) -> Any:
        passes.append("look-up")
        return look_up(self, slots)

    def verified(self: ModelCudaGraphManager, *args: Any) -> Any:
        passes.append("verification")
        return run_fullgraph(self, *args)

    def profiled(self: DeviceTreeSampler, logits: torch.Tensor) -> None:
        passes.append(f"profile of {len(logits)} rows")
        profile(self, logits)

    def in_pieces(self: ModelCudaGraphManager, *args: Any) -> Any:
        passes.append("pieces")
        return run_pieces(self, *args)

    with (
        mock.patch.object(ahead.AheadDrafter, "look_up", looked_up),
        mock.patch.object(DeviceTreeSampler, "profile", profiled),
        mock.patch.object(graphs.Captured, "replay", replayed),
        mock.patch.object(ssm.NeuralSSM, "_run_rows", run),
        mock.patch.object(ModelCudaGraphManager, "run_fullgraph", verified),
        mock.patch.object(ModelCudaGraphManager, "run_pw_graph", in_pieces),
    ):
        yield passes


@contextmanager
def resting_ssms(asks: str = "++--") -> Iterator[None]:
    """Static budgets ask SSMs in some steps.

    Args:
        asks: Whether they do, again and again.
    """
    from vllm_specinfer.scheduling.budget import Budget

    asks = itertools.cycle([step == "+" for step in asks])
    with mock.patch.object(Budget, "drafts", lambda *_, **__: next(asks)):
        yield


@contextmanager
def changing_sizes() -> Iterator[None]:
    """Static budgets give each tree another size."""
    from vllm_specinfer.scheduling.budget import Budget

    sizes = itertools.cycle(SIZES)

    def nodes(self: Budget, chances: np.ndarray, *_: Any) -> np.ndarray:
        return np.array([next(sizes) for _ in chances])

    with mock.patch.object(Budget, "nodes", nodes):
        yield


@contextmanager
def counted(counter: Callable[[], int]) -> Iterator[list[dict[str, Any]]]:
    """By how much a counter rises while steps are launched and verified.

    A step is `ahead` where the host does not know the trees that it verifies.
    """
    from vllm_specinfer.worker import TreeWorker

    execute, sample, found = TreeWorker.execute_model, TreeWorker.sample_tokens, []

    def executed(self: TreeWorker, *args: Any) -> Any:
        before = counter()
        output = execute(self, *args)
        runner = self.model_runner
        speculator, state = runner.speculator, runner.execute_model_state
        sizes = getattr(speculator._ahead, "sizes", None)
        step = {"ahead": bool(sizes), "launch": counter() - before}
        step["looks_up"] = bool(speculator.sources.lookups)
        step["asynchronous"] = self.vllm_config.scheduler_config.async_scheduling
        if state is not None:
            batch, dims = state.input_batch, runner.sampler.get_logprobs_dims
            heats = runner.sampler.sampling_states.temperature.np[batch.idx_mapping_np]
            # Nobody fetches the output of vLLM's warm-up.
            step["made_up"] = batch.req_ids[0].startswith("_warmup")
            step["tested"] = speculator._tests_draws and bool(heats.any())
            step["prefills"] = batch.has_prefill
            step["grammars"] = batch.has_structured_output_reqs
            step["logprobs"] = dims(batch.idx_mapping_np) is not None
            if runner.cudagraph_manager._graphs_captured:
                step["rows"] = batch.num_tokens
        found.append(step)
        return output

    def sampled(self: TreeWorker, *args: Any) -> Any:
        before = counter()
        output = sample(self, *args)
        found[-1]["verify"] = counter() - before
        return output

    with (
        mock.patch.object(TreeWorker, "execute_model", executed),
        mock.patch.object(TreeWorker, "sample_tokens", sampled),
    ):
        yield found
