"""A CPU worker whose attention and commit are CUDA's."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from vllm.config import CUDAGraphMode
from vllm.v1.attention import selector
from vllm.v1.attention.backends.registry import (
    AttentionBackendEnum,
    register_backend,
)
from vllm.v1.worker.gpu.warmup import warmup_kernels

from vllm_specinfer.attention.cuda import CUDATreeAttentionBackend
from vllm_specinfer.cpu_worker import SpecInferCPUWorker


class InterpretedBackend(CUDATreeAttentionBackend):
    """CUDA's backend under the only name that the CPU platform chooses."""

    @staticmethod
    def get_name() -> str:
        """The name of the enum member."""
        return AttentionBackendEnum.CPU_ATTN.name


class InterpretedWorker(SpecInferCPUWorker):
    """Runs CUDA's path.

    Attributes:
        warm_ups: Engines of the process that are still to be warmed up.
    """

    # One that waits for the step before and one that does not; half a minute each.
    warm_ups = 2

    def register_attention(self) -> None:
        """Replace CPU_ATTN."""
        register_backend(
            AttentionBackendEnum.CPU_ATTN, f"{__name__}.{InterpretedBackend.__name__}"
        )
        selector._cached_get_attn_backend.cache_clear()

    def compile_or_warm_up_model(self) -> Any:
        """As vLLM's GPU worker: made-up steps, after a capture of graphs."""
        self.model_runner.model_state.prepare_dummy_inputs(1, 1)
        speculator = self.model_runner.speculator
        speculator.init_cudagraph_manager(CUDAGraphMode.FULL_DECODE_ONLY)
        with torch.inference_mode():
            speculator.capture()
        if InterpretedWorker.warm_ups:
            InterpretedWorker.warm_ups -= 1
            warmup_kernels(self.model_runner, self.execute_model, self.sample_tokens)
        return super().compile_or_warm_up_model()


class Counts(NamedTuple):
    """What engines that take CUDA's path have done.

    Attributes:
        launches: Of each kernel.
        steps: As `counted` gives them, of waits.
        passes: As `graphs_replayed` gives them.
    """

    launches: dict[str, int]
    steps: list[dict[str, Any]]
    passes: list[str]


@contextmanager
def cuda_path() -> Iterator[Counts]:
    """Engines of this process take CUDA's path; `interpreter.prepare` was called."""
    from tests.e2e.device_guard import guarded
    from vllm_specinfer import config

    worker, launches = f"{__name__}.{InterpretedWorker.__name__}", {}
    with (
        mock.patch.object(config, "CPU_WORKER", worker),
        # vLLM's K/V write asks for it to choose its launch.
        mock.patch.object(torch.cuda, "get_device_capability", lambda _: (9, 0)),
        positions_as_captured(),
        graphs_replayed() as passes,
        guarded(launches) as guard,
        counted(lambda: guard.num_reads) as steps,
    ):
        yield Counts(launches, steps, passes)


@contextmanager
def graphs_replayed() -> Iterator[list[str]]:
    """Graphs that launch once more what was captured; which passes were one."""
    from vllm_specinfer.drafting import ahead, ssm

    run_rows, passes = ssm.NeuralSSM._run_rows, []
    look_up = ahead.AheadDrafter.look_up

    def captured(launch: Callable, *_: Any) -> tuple[Any, Callable[[], None]]:
        outputs = launch()

        def replay() -> None:
            passes.append("graph")
            for kept, output in zip(outputs, launch(), strict=True):
                kept.copy_(output)

        return outputs, replay

    def run(self: ssm.NeuralSSM, rows: ssm.PassRows, *args: Any) -> torch.Tensor:
        num_replays = len(passes)
        hidden = run_rows(self, rows, *args)
        if len(passes) == num_replays:
            passes.append("level" if rows.is_tree.any() else "catch-up")
        return hidden

    def looked_up(self: ahead.AheadDrafter, slots: Any) -> Any:
        passes.append("look-up")
        return look_up(self, slots)

    with (
        mock.patch.object(ahead.AheadDrafter, "look_up", looked_up),
        mock.patch.object(ssm, "captured", captured),
        mock.patch.object(ssm.NeuralSSM, "_run_rows", run),
    ):
        yield passes


@contextmanager
def ssms_now_and_then() -> Iterator[None]:
    """Static budgets ask SSMs in two of four steps."""
    from vllm_specinfer.scheduling.budget import Budget

    answers = itertools.cycle([True, True, False, False])
    with mock.patch.object(Budget, "drafts", lambda *_, **__: next(answers)):
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
        speculator = self.model_runner.speculator
        sizes = getattr(speculator._ahead, "sizes", None)
        step = {"ahead": bool(sizes), "launch": counter() - before}
        found.append({**step, "looks_up": bool(speculator.sources.lookups)})
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


@contextmanager
def positions_as_captured() -> Iterator[None]:
    """Fail where a pass gets its positions from elsewhere than a graph would."""
    from vllm_specinfer.model_state import TreeModelState

    prepare_inputs = TreeModelState.prepare_inputs

    def prepared(self: Any, *args: Any) -> dict[str, Any]:
        inputs = prepare_inputs(self, *args)
        if self._captured:
            assert inputs["positions"].data_ptr() == self._positions.data_ptr()
        return inputs

    with mock.patch.object(TreeModelState, "prepare_inputs", prepared):
        yield
