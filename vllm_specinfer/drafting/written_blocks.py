"""Which tokens the K/V that an SSM has in each block belongs to.

vLLM's prefix cache vouches for the target's K/V alone. An SSM that sat out a request
(no draft paid, a lookup knew better) wrote nothing into its blocks, or not all of it.
"""

from collections.abc import Sequence

import numpy as np

_UNKNOWN = 0


class WrittenBlocks:
    """Remembers, per block, a digest of the prefix that the SSM completed it for."""

    def __init__(self, num_blocks: int, block_size: int, max_num_reqs: int) -> None:
        """Know nothing about any block.

        Args:
            num_blocks: Blocks of the KV cache group of the SSM's layers.
            block_size: Tokens of one.
            max_num_reqs: Request slots.
        """
        self._digests = np.full(num_blocks, _UNKNOWN, np.int64)
        self._block_size = block_size
        # By slot: the digests of the request's prefixes that end with a block.
        self._chains: list[list[int]] = [[] for _ in range(max_num_reqs)]

    def start(self, slot: int, blocks: Sequence[int], tokens: Sequence[int]) -> int:
        """A request starts in a slot with cached blocks.

        Nothing is known any more of the others of its blocks: the SSM may write there
        until it has completed them.

        Args:
            slot: Its slot.
            blocks: All of its blocks, in order.
            tokens: Its cached tokens; they fill the first blocks.

        Returns:
            How many of these tokens the SSM's K/V in the blocks is of.
        """
        self._chains[slot] = []
        chain = self._chain(slot, np.array(tokens, np.int32))
        known = self._digests[list(blocks[: len(chain)])] == chain
        num_known = int(np.logical_and.accumulate(known).sum())
        self.forget(blocks[num_known:])
        return num_known * self._block_size

    def are_known(self, blocks: np.ndarray) -> np.ndarray:
        """Bool of the same shape: whether the SSM has completed these blocks."""
        return self._digests[blocks] != _UNKNOWN

    def forget(self, blocks: Sequence[int]) -> None:
        """Know nothing about these blocks again: a request has got them."""
        self._digests[list(blocks)] = _UNKNOWN

    def forget_all(self) -> None:
        """Know nothing about any block again."""
        self._digests[:] = _UNKNOWN

    def complete(self, slot: int, blocks: np.ndarray, tokens: np.ndarray) -> None:
        """The SSM's K/V of all these tokens of a request is in its blocks."""
        chain = self._chain(slot, tokens)
        self._digests[blocks[: len(chain)]] = chain

    def _chain(self, slot: int, tokens: np.ndarray) -> list[int]:
        """Digests of those prefixes of the tokens [int32] that end with a block.

        Those of cached tokens may be known that are none of these yet.
        """
        chain, size = self._chains[slot], self._block_size
        for i in range(len(chain), len(tokens) // size):
            block = tokens[i * size : (i + 1) * size].tobytes()
            chain.append(hash((chain[-1] if chain else _UNKNOWN, block)))
        return chain[: len(tokens) // size]
