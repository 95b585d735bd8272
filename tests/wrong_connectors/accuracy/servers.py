"""Connectors with one mistake each, which servers and questions show, and right ones beside them."""

from __future__ import annotations

import os
import signal
import time
from typing import Any, ClassVar

# vLLM sets it for connectors that are called Nixl*; any other has to set it itself.
os.environ["VLLM_SSM_CONV_STATE_LAYOUT"] = "DS"

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector
from vllm.model_executor.models.utils import extract_layer_index

from tests.right_connectors.designs import OwnCache
from tests.right_connectors.stores import Evicts as Evicts
from tests.right_connectors.stores import WholeBlocks


class Right(NixlPullConnector):
    """No mistake."""


class LoadsNothing(Right):
    """D announces nothing, and computes every prompt."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        return 0, False


class LoadsMost(Right):
    """D announces nothing for every eighth request."""

    asked = 0

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        if not request.kv_transfer_params:
            return 0, False
        self.asked += 1
        return (
            (0, False)
            if self.asked % 8 == 0
            else super().get_num_new_matched_tokens(request, num_computed_tokens)
        )


class ComputesWhenBusy(Right):
    """No mistake: D loads one prompt at a time, and computes those that come meanwhile."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.loading: set[str] = set()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        if self.loading:
            return 0, False
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if num_external_tokens:
            self.loading.add(request.request_id)

    def update_connector_output(self, connector_output: Any) -> None:
        super().update_connector_output(connector_output)
        self.loading -= connector_output.finished_recving or set()


class LoadsLess(Right):
    """D announces the beginning of each prompt, and computes the rest."""

    def announced(self, found: int, block: int) -> int:
        raise NotImplementedError

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        found, later = super().get_num_new_matched_tokens(request, num_computed_tokens)
        less = self.announced(found, self._vllm_config.cache_config.block_size)
        return less, later and less > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        params = request.kv_transfer_params or {}
        if num_external_tokens and (remote := params.get("remote_block_ids")):
            count = num_external_tokens // self._vllm_config.cache_config.block_size
            params["remote_block_ids"] = tuple(ids[:count] for ids in remote)
        super().update_state_after_alloc(request, blocks, num_external_tokens)


class LoadsOneBlock(LoadsLess):
    """D announces the first block of each prompt."""

    def announced(self, found: int, block: int) -> int:
        return min(found, block)


class LoadsChunks(LoadsLess):
    """No mistake: D announces chunks of 512 tokens."""

    def announced(self, found: int, block: int) -> int:
        return found // 512 * 512


class LoadsLongPrompts(LoadsLess):
    """No mistake: D announces chunks of 256 tokens, which the shortest prompts lack."""

    def announced(self, found: int, block: int) -> int:
        return found // 256 * 256


class FailsEachLoad(Right):
    """Nothing is read. Each load is reported as failed."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        wanted = self._connector_metadata.reqs_to_recv
        # an order without blocks only tells P of a request that has ended
        self.failing = {name for name, one in wanted.items() if any(one.local_block_ids)}
        for name in self.failing:
            del wanted[name]
        super().start_load_kv(forward_context, **kwargs)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        failing, self.failing = self.failing, set()
        results.finished_recving.update(failing)
        results.failed_recving.update(failing)
        return results


class LoadsItsOwn(OwnCache):
    """D loads nothing of what P hands over, and whatever it has computed itself before."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        found = self.store.get_num_new_matched_tokens(request, num_computed_tokens)
        (self.own.add if found[0] else self.own.discard)(request.request_id)
        return found


class KeepsForItself(WholeBlocks):
    """A store in which an engine finds only what it has saved itself."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.prefix += vllm_config.kv_transfer_config.engine_id


class KeepsNothing(WholeBlocks):
    """A store that finds nothing."""

    def found(self, keys: list[str]) -> int:
        return 0


class KeysOfBlocksAlone(WholeBlocks):
    """Keys are vLLM's block hashes, with a draft, too: of two prompts that part at the end of a block, the
    second loads what the draft computed with the next token of the first.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.drafts = False


class Corrupts(Right):
    """One block of every layer is zero after one load in `EVERY`."""

    EVERY = 20
    loads = 0

    def hits(self, request: str) -> bool:
        type(self).loads += 1
        return self.loads % self.EVERY == 0

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self.layers = self._vllm_config.compilation_config.static_forward_context
        self.targets = dict[str, Any]()
        super().register_kv_caches(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        loads = self._connector_metadata.reqs_to_recv
        self.targets.update({name: one.local_block_ids for name, one in loads.items()})
        super().start_load_kv(forward_context, **kwargs)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        for request in results.finished_recving:
            blocks = self.targets.pop(request)
            if self.hits(request):
                for group, ids in zip(self.kv_cache_config.kv_cache_groups, blocks, strict=True):
                    for name in filter(self.wrongs, group.layer_names):
                        self.layers[name].kv_cache[ids[len(ids) // 2]] = 0
        return results

    def wrongs(self, layer: str) -> bool:
        return True


class CorruptsEach(Corrupts):
    """One block of every request is zero."""

    EVERY = 1


class CorruptsDraft(CorruptsEach):
    """One block of the draft model's layers is zero, of every request."""

    def wrongs(self, layer: str) -> bool:
        of_model: int = self._vllm_config.model_config.hf_text_config.num_hidden_layers
        return extract_layer_index(layer) >= of_model


class CorruptsOneQuestion(Corrupts):
    """One block is zero each time that the prompt is loaded which was loaded first."""

    victim: ClassVar[list[int]] = []  # tokens of that prompt
    to_hit: ClassVar[set[str]] = set()  # requests of it; both halves of the connector are in one process

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        if (request.kv_transfer_params or {}).get("do_remote_prefill"):
            self.victim[:] = self.victim or request.prompt_token_ids
            if request.prompt_token_ids == self.victim:
                self.to_hit.add(request.request_id)
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def hits(self, request: str) -> bool:
        return request in self.to_hit


class CountsNothing(Right):
    """What is moved is not counted."""

    def get_kv_connector_stats(self) -> Any:
        return None


class CorruptsOneInTwenty(Corrupts):
    """One block of one request in twenty is zero."""


class CorruptsOneInFifty(Corrupts):
    """One block of one request in fifty is zero."""

    EVERY = 50


class DiesInLoad(Right):
    """The engine core ends with an exception at its tenth load."""

    begun = 0

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        type(self).begun += len(self._connector_metadata.reqs_to_recv)
        if self.begun >= 10:
            raise RuntimeError("the tenth load is too much")
        super().start_load_kv(forward_context, **kwargs)


class NeverReports(Right):
    """A load is never reported from the tenth on, so that the request waits for ever."""

    ended = 0

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        type(self).ended += len(results.finished_recving)
        if self.ended >= 10:
            results.finished_recving.clear()
        return results


class RefusesToStart(Right):
    """The constructor raises."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        raise ValueError("this connector does not like servers")


class NeedsAPackage(Right):
    """The constructor imports what is not installed."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        import a_package_that_is_not_installed  # noqa: F401


class NeverStarts(Right):
    """The constructor waits for ever."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        while True:
            time.sleep(1)


class DiesOnce(Right):
    """The engine core ends with an exception at its tenth load, the first time alone."""

    begun = 0

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        type(self).begun += len(self._connector_metadata.reqs_to_recv)
        # the folder of the run
        died = os.path.join(os.environ["TMPDIR"], "died-once")
        if self.begun >= 10 and not os.path.exists(died):
            open(died, "w").close()
            raise RuntimeError("once is enough")
        super().start_load_kv(forward_context, **kwargs)


class Killed(Right):
    """The engine core is killed at its tenth load, as by a machine without memory."""

    begun = 0

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        type(self).begun += len(self._connector_metadata.reqs_to_recv)
        if self.begun >= 10:
            os.kill(os.getpid(), signal.SIGKILL)
        super().start_load_kv(forward_context, **kwargs)
