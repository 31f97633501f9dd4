"""Layers that share another layer's K/V, in a group whose layers differ.

vLLM asks such a group for the spec of each layer, and the group knows of those alone
that have K/V of their own (vllm/v1/worker/gpu/attn_utils.py: init_attn_backend). An SSM
of other layers makes such groups, and so does a target with windows.
"""

from collections.abc import Mapping

from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheSpec,
    UniformTypeKVCacheSpecs,
)


class _Specs(dict[str, KVCacheSpec]):
    """Specs of layers; those that share K/V are found, but not counted."""

    def __init__(
        self, specs: Mapping[str, KVCacheSpec], shared: Mapping[str, str]
    ) -> None:
        super().__init__(specs)
        self._shared = shared

    def __missing__(self, name: str) -> KVCacheSpec:
        return self[self._shared[name]]


def let_groups_know(kv_cache_config: KVCacheConfig, shared: Mapping[str, str]) -> None:
    """Have every group find the spec of layers that share K/V.

    Args:
        kv_cache_config: Its groups, changed.
        shared: Whose K/V each such layer reads, by name.
    """
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        if shared and isinstance(spec, UniformTypeKVCacheSpecs):
            specs = _Specs(spec.kv_cache_specs, shared)
            object.__setattr__(spec, "kv_cache_specs", specs)
