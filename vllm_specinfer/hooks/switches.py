"""vLLM knows this package's variables of the environment.

Symptom: vLLM warns of every variable whose name begins with VLLM_ and that it does not
    know, and with `fail_on_environ_validation` it does not start.
Removed when: vLLM lets plugins name theirs.
"""

import os

from vllm_specinfer.flags import SWITCHES


def install() -> None:
    """Name those that are set; all others stay out of vLLM's keys of compiled code."""
    from vllm.envs import environment_variables

    for name in SWITCHES:
        if name in os.environ:
            # Who wants its value reads it from the environment.
            environment_variables.setdefault(name, lambda: None)
