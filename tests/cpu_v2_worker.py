"""A CPU worker on Model Runner V2 without speculation, to measure and test it."""

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_specinfer.hooks import cpu_v2


class CPUV2Worker(CPUWorker):
    """``CPUWorker`` whose step runs on the package's CPU kernels.

    Pass it as ``worker_cls`` after ``cpu_v2.enable_in_frontend()``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        cpu_v2.enable_in_worker()
        super().__init__(*args, **kwargs)
