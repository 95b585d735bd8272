"""The KV memory of a live engine: words of tokens and states, written by the engine, compared after loads."""

from __future__ import annotations

import numpy as np
import torch

from pytest_kvconform.kvspace.pools.addresses import ATTENTION, FOREIGN, STATE, Array
from pytest_kvconform.kvspace.pools.regions import state_rows, token_parts, token_rows
from pytest_kvconform.kvspace.pools.words import decode
from pytest_kvconform.rigs.bytes.memory import Memory, _pages, regions_of
from pytest_kvconform.rigs.scheduler.worker_half import WorkerHalf


class WordMemory(Memory):
    """`Memory` of the byte rig without a shadow: it may be larger than the machine's memory."""

    def __init__(self, half: WorkerHalf, caches: dict[str, torch.Tensor], conv: str):
        backends = {name: layer.backend.get_name() for name, layer in half.layers.items()}
        count = half.kv_config.num_blocks
        self.regions = regions_of(half.geometry, caches, backends, count, 1, 0, conv)
        self.num_blocks, self.engine, self.rank = count, 0, 0
        whole = next(iter(caches.values())).untyped_storage()
        self.device = torch.empty(0, dtype=torch.uint8, device=whole.device).set_(
            whole, 0, (whole.nbytes(),), (1,)
        )
        on_gpu = self.device.is_cuda
        self.storage = np.zeros(whole.nbytes(), dtype=np.uint8) if on_gpu else self.device.numpy()
        self.shadow = self.storage[:0]
        self.pages = _pages(caches, count)
        self.dirty = np.zeros(count, dtype=bool)

    def zero(self, blocks: Array) -> None:
        """Fill whole blocks with zeros, as vLLM does before a new owner writes into them."""
        for page in self.page_views(self.storage):
            page[blocks] = 0
        self.flush(blocks)

    def lose(self) -> None:
        """Fill all blocks but the null block with zeros."""
        self.zero(np.arange(1, self.num_blocks))

    def copy(self, source: Array, target: Array) -> None:
        """Copy whole blocks, as a prefix cache hit that ends within a block makes vLLM do."""
        self.fetch(source)
        for page in self.page_views(self.storage):
            page[target] = page[source]
        self.flush(target)

    def write(self, layer: str, blocks: Array, tokens: Array, owner: int, engine: int) -> None:
        """Write the words of `tokens` (positions) of one owner, computed by `engine`, into `blocks`."""
        real = blocks != 0
        blocks, tokens = blocks[real], tokens[real]
        (region,) = self.regions[layer]
        self.fetch(blocks)
        parts = token_parts(tokens, np.full(len(tokens), owner))
        self.write_tokens((self.storage,), region, blocks, tokens, parts, engine, 0)
        self.flush(blocks)

    def write_slot(self, layer: str, slot: int, owner: int, tokens: int, engine: int) -> None:
        """Write the state after `tokens` tokens into a slot."""
        at = np.array([slot])
        self.fetch(at)
        for region in self.regions[layer]:
            self.write_state((self.storage,), region, slot, owner, tokens, engine)
        self.flush(at)

    def wrong_token(self, layer: str, blocks: Array, tokens: Array, owner: int, engine: int) -> str:
        """Compare words. Returns "" or one sentence about the first token that is wrong."""
        real = blocks != 0
        blocks, tokens = blocks[real], tokens[real]
        (region,) = self.regions[layer]
        self.fetch(blocks)
        view, ratio = region.wide(self.storage), self.ratio(layer)
        size = region.block_size
        found = view[blocks * ratio + tokens % (size * ratio) // size, tokens % size]
        parts = token_parts(tokens, np.full(len(tokens), owner))
        due = np.ascontiguousarray(token_rows(region, parts, engine, 0)).view(found.dtype)
        if np.array_equal(found, due):
            return ""
        first = int(np.argmax((found != due).reshape(len(tokens), -1).any(axis=1)))
        row = np.ascontiguousarray(found[first]).view(np.uint8).reshape(*region.shape[2:])
        word = row.reshape(-1, region.width)[:, :8].copy().view(np.uint64)[:, 0]
        want = np.ascontiguousarray(due[first]).view(np.uint8).reshape(-1, region.width)[:, :8]
        bad = int(np.argmax(word != want.copy().view(np.uint64)[:, 0]))
        return f"token {tokens[first]} in block {blocks[first]} of {layer} is {_content(word[bad : bad + 1])}"

    def wrong_slot(self, layer: str, slot: int, owner: int, tokens: int, engine: int) -> str:
        """Compare a state. Returns "" or one sentence about the slot."""
        self.fetch(np.array([slot]))
        for region in self.regions[layer]:
            found = region.of(self.storage)[slot]
            if not np.array_equal(found, state_rows(region, owner, tokens, engine)):
                size = min(8, region.width)
                word = np.zeros(8, dtype=np.uint8)
                word[:size] = found[0, :size]
                what = _content(word.view(np.uint64), size)
                return f"the state after {tokens} tokens in block {slot} of {layer} is {what}"
        return ""


def _content(word: Array, size: int = 8) -> str:
    """What a word tells about itself."""
    found = decode(word, size)[0]
    if found["kind"] == FOREIGN:
        return "zeros, as before the first write" if not word.any() else "no word that an engine has written"
    who = f"of request {found['owner']}, computed by engine {found['engine']}"
    if found["kind"] == STATE:
        return f"the state after {found['token']} tokens {who}"
    return f"token {found['token']} {who}" if found["kind"] == ATTENTION else "no word of a token"
