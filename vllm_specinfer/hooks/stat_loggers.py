"""The trees' metrics stand beside vLLM's own, in `vllm serve` and in `LLM`.

Symptom: plugins can add a stat logger to `AsyncLLM` only, and its metrics are dropped
    when vLLM's Prometheus logger is made after it.
Removed when: vLLM loads stat logger plugins for `LLM` too, after its own loggers.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_specinfer.hooks import wrap

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def install() -> None:
    """Wrap ``StatLoggerManager.__init__`` once."""
    from vllm.v1.metrics.loggers import StatLoggerManager

    def make_loggers(
        original: Callable[..., None],
        self: StatLoggerManager,
        vllm_config: "VllmConfig",
        *args: Any,
        **kwargs: Any,
    ) -> None:
        original(self, vllm_config, *args, **kwargs)
        make = getattr(vllm_config.speculative_config, "make_stat_logger", None)
        if make is not None:
            self.stat_loggers.insert(0, make(vllm_config, self.engine_indexes))

    wrap(StatLoggerManager, "__init__", make_loggers)
