"""The worker on a CPU."""

import time
from typing import Any

from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_specinfer.hooks import cpu_linear, cpu_v2
from vllm_specinfer.kernels.cpu import compiler, huge_pages, linear
from vllm_specinfer.ranks import of_first_rank
from vllm_specinfer.scheduling import start_costs
from vllm_specinfer.worker import TreeWorker


class SpecInferCPUWorker(TreeWorker, CPUWorker):
    """vLLM's CPU worker with Model Runner V2."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        cpu_v2.enable_in_worker()
        cpu_linear.install()
        compiler.launch_from_cpp(vllm_config.compilation_config)
        # Nothing is compiled when it first runs. vLLM 0.33 would run the largest steps.
        vllm_config.kernel_config.enable_jit_warmup = False
        super().__init__(vllm_config, *args, **kwargs)

    def register_attention(self) -> None:
        """Replace CPU_ATTN."""
        from vllm_specinfer.attention import cpu

        cpu.register()

    @property
    def attention_summary(self) -> str:
        """The backend, and whether the C++ kernels are there."""
        from vllm_specinfer.kernels.cpu import extension

        if extension.load():
            return "CPU_ATTN, C++ kernels"
        return "CPU_ATTN, plain torch without C++ kernels"

    def copy_weights_again(self) -> None:
        """As `TreeWorker`; a head that is tied, when it is used."""
        super().copy_weights_again()
        linear.drop_copies(self.model_runner.get_model())

    def save_sharded_state(self, *args: Any, **kwargs: Any) -> None:
        """Refused: nobody else could read what is saved.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(
            "weights must be saved without method specinfer on a CPU: its linear "
            "layers keep them in the order in which they are read"
        )

    save_tensorized_model = save_sharded_state

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """K/V lie in huge pages."""
        with huge_pages.Zeros():
            super().initialize_from_config(kv_cache_config)

    def compile_or_warm_up_model(self) -> Any:
        """Where the budget goes by what steps cost, measure it."""
        times = super().compile_or_warm_up_model()
        speculator = self.model_runner.speculator
        # With adapters every made-up pass makes some up, too, which takes its time.
        measures = self.vllm_config.lora_config is None
        # Replicas that external launchers start wait for each other in every pass, and
        # each would stop by its own clock.
        measures &= self.vllm_config.parallel_config.data_parallel_size == 1
        if measures and speculator.budget.learns:
            scheduler = self.vllm_config.scheduler_config
            most = scheduler.max_num_seqs * (speculator.num_speculative_steps + 1)
            most = min(most, scheduler.max_num_batched_tokens)
            start_costs.measure(speculator.budget, self.time_pass, most)
        return times

    def time_pass(self, rows: int) -> tuple[float, float]:
        """Seconds of the target and of the SSMs for a pass of made-up tokens.

        All ranks get the first one's: it decides how many passes there are.
        """
        started = time.perf_counter()
        # Experts are chosen by the tokens.
        self.model_runner._dummy_run(rows, randomize_inputs=True)
        seconds = time.perf_counter() - started
        ssms = self.model_runner.speculator.dummy_seconds
        return of_first_rank((seconds - ssms, ssms))
