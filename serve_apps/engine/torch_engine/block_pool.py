"""Which blocks of the KV cache belong to whom; pure bookkeeping, the keys and values are elsewhere.

Paged memory and the sharing of equal prefixes after vLLM (Kwon et al., SOSP 2023): a sequence's tokens lie in
blocks of equal size, in any places. A full block is known by a digest of all tokens up to its end, so that a
later sequence that begins with the same tokens takes the block as it is. Blocks that nobody uses keep what
they hold until their place is needed; the one that was left longest ago goes first.
"""

from __future__ import annotations

import heapq
from array import array
from collections import OrderedDict
from collections.abc import Sequence as Ints
from hashlib import blake2b

Digest = bytes

_START: Digest = b""


def digest(before: Digest, tokens: Ints[int]) -> Digest:
    """Of a block's tokens and everything before them; `before` is the digest of the block in front."""
    return blake2b(before + array("q", tokens).tobytes(), digest_size=16).digest()


def start_of(cache_salt: str) -> Digest:
    """What stands in front of the first block of sequences with this salt; it is no block's digest."""
    if not cache_salt:
        return _START
    return blake2b(cache_salt.encode(errors="surrogatepass"), digest_size=16, person=b"cache salt").digest()


class BlockPool:
    """Hands out blocks 0 … num_blocks - 1, and finds those that hold a prefix.

    Args:
        num_blocks: how many there are.
        block_size: tokens of one block.
        caching: whether full blocks are kept for others.
    """

    def __init__(self, num_blocks: int, block_size: int, caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._caching = caching
        self._users = [0] * num_blocks
        self._digests: list[Digest | None] = [None] * num_blocks
        self._by_digest: dict[Digest, int] = {}
        # The lowest comes first: blocks in use stay close together, and attention reads them in long runs.
        self._empty = list(range(num_blocks))
        self._unused: OrderedDict[int, None] = OrderedDict()
        """Blocks that hold something and that nobody uses, longest unused first."""

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now."""
        return len(self._empty) + len(self._unused)

    @property
    def num_used(self) -> int:
        """Blocks that sequences hold."""
        return self.num_blocks - self.num_free

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that so many tokens take."""
        return -(-num_tokens // self.block_size)

    def find(self, digests: Ints[Digest]) -> list[int]:
        """The blocks that hold the longest known prefix of a sequence with these digests."""
        found = []
        for key in digests:
            block = self._by_digest.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def num_unused(self, blocks: Ints[int]) -> int:
        """How many of these blocks `num_free` counts, which taking them would lower."""
        return sum(self._users[block] == 0 for block in blocks)

    def take(self, blocks: Ints[int]) -> None:
        """Use blocks that `find` has found."""
        for block in blocks:
            self._users[block] += 1
            self._unused.pop(block, None)

    def allocate(self) -> int:
        """A block to write to.

        Raises:
            LookupError: every block is in use.
        """
        if self._empty:
            block = heapq.heappop(self._empty)
        elif self._unused:
            block, _ = self._unused.popitem(last=False)
            self._forget(block)
        else:
            raise LookupError("every block of the KV cache is in use")
        self._users[block] = 1
        return block

    def seal(self, block: int, key: Digest) -> None:
        """Say what a full block holds; from now on nobody writes to it."""
        if self._caching and key not in self._by_digest:
            self._digests[block] = key
            self._by_digest[key] = block

    def release(self, blocks: Ints[int]) -> None:
        """Use a sequence's blocks no more; those at its end are given away first."""
        for block in reversed(blocks):
            self._users[block] -= 1
            if self._users[block]:
                continue
            if self._digests[block] is None:
                heapq.heappush(self._empty, block)
            else:
                self._unused[block] = None

    def forget(self) -> None:
        """Nothing that was written until now may be found again (the model has changed)."""
        for block in range(self.num_blocks):
            self._forget(block)
        for block in self._unused:
            heapq.heappush(self._empty, block)
        self._unused.clear()

    def _forget(self, block: int) -> None:
        key = self._digests[block]
        if key is not None:
            self._digests[block] = None
            del self._by_digest[key]


class Digests:
    """The digests of one sequence's full blocks, made as its tokens come."""

    def __init__(self, block_size: int, start: Digest = _START) -> None:
        self._block_size = block_size
        self._start = start
        self._digests: list[Digest] = []

    def upto(self, tokens: Ints[int], num_tokens: int) -> list[Digest]:
        """Of the blocks that the first `num_tokens` of `tokens` fill."""
        full = num_tokens // self._block_size
        while len(self._digests) < full:
            at = len(self._digests) * self._block_size
            before = self._digests[-1] if self._digests else self._start
            self._digests.append(digest(before, tokens[at : at + self._block_size]))
        return self._digests[:full]
