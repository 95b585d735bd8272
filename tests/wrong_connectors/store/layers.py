"""Stores that load and save layer by layer: right ones, and wrong ones with one mistake each."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from tests.wrong_connectors.store import stores

PACE_S = 0.003  # for which a layer is loading


class Right(stores.Right):
    """Loads all layers in start_load_kv, and saves each one in save_kv_layer, as ExampleConnector."""


class LoadsByLayer(stores.Right):
    """Begins in start_load_kv, and waits for each layer in its hook, as LMCacheConnectorV1 with
    use_layerwise.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.loaded: dict[str, threading.Event] = {}  # by layer, in the order of the model

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        layers = {name: layer.kv_cache for name, layer in forward_context.no_compile_layers.items()}
        requests = [r for r in self._get_connector_metadata().requests if not r.is_store]
        self.loaded = {name: threading.Event() for name in layers} if requests else {}
        events = dict(self.loaded)

        def load() -> None:
            for name in layers:
                self.before(name)
                for request in requests:
                    self.load(name, request, layers)
                events[name].set()

        if requests:
            self.thread = threading.Thread(target=load, daemon=True)
            self.thread.start()

    def before(self, layer: str) -> None:
        """What the thread does before it loads a layer."""
        time.sleep(PACE_S)

    def wait_for_layer_load(self, layer_name: str) -> None:
        self.wait(list(self.loaded), layer_name)

    def wait(self, layers: list[str], layer: str) -> None:
        """Wait for a layer, of all that are loading."""
        if layers:
            self.loaded[layer].wait()


class SavesByLayer(stores.Right):
    """Copies each layer in the background from its hook on, and wait_for_save waits for all of them, as
    MoRIIOConnector when it writes.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.saving: list[threading.Thread] = []

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        metadata = self._get_connector_metadata()

        def save() -> None:
            self.save(metadata, layer_name, kv_layer, attn_metadata)

        self.saving.append(threading.Thread(target=save, daemon=True))
        self.saving[-1].start()

    def save(self, metadata: Any, layer: str, kv_layer: torch.Tensor, attn_metadata: Any) -> None:
        """Save one layer of the requests of a step."""
        for request in metadata.requests:
            if request.is_store:
                file = self._generate_filename_debug(layer, request.token_ids, request.mm_hashes)
                blocks, offsets = (
                    request.slot_mapping // self._block_size,
                    request.slot_mapping % self._block_size,
                )
                self.write(file, kv_layer[blocks, :, offsets])

    def write(self, file: str, rows: torch.Tensor) -> None:
        import safetensors.torch

        safetensors.torch.save_file({"kv_cache": rows.clone()}, file)

    def wait_for_save(self) -> None:
        for thread in self.saving:
            thread.join()
        self.saving.clear()


class NoLayerHooks(SavesByLayer):
    """Loads in start_load_kv and saves in wait_for_save, and needs no layer hooks: as
    MooncakeStoreConnector.
    """

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return False

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.caches = kv_caches

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        for name, cache in self.caches.items():
            self.save(self._get_connector_metadata(), name, cache, None)


# ---- one mistake each --------------------------------------------------------------------------------------


class LoadsLate(LoadsByLayer):
    """Loads are so slow that a layer is loaded only when its hook waits for it, or after its hook: when the
    hook of the next layer is called, or wait_for_save.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.due: dict[str, threading.Event] = {}  # by layer, in the order of the model

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.due = {name: threading.Event() for name in forward_context.no_compile_layers}
        super().start_load_kv(forward_context, **kwargs)

    def before(self, layer: str) -> None:
        self.due[layer].wait()

    def wait_for_layer_load(self, layer_name: str) -> None:
        for name in itertools.takewhile(layer_name.__ne__, self.due):
            self.due[name].set()
        super().wait_for_layer_load(layer_name)

    def wait_for(self, layer: str) -> None:
        """Wait for one layer."""
        self.due[layer].set()
        self.loaded[layer].wait()

    def wait_for_save(self) -> None:
        if self.loaded:
            for event in self.due.values():
                event.set()
            self.thread.join()
        super().wait_for_save()


class WaitsForTheLayerBefore(LoadsLate):
    """Each layer waits for the one before it."""

    def wait(self, layers: list[str], layer: str) -> None:
        if layers and layer != layers[0]:
            self.wait_for(layers[layers.index(layer) - 1])


class NeverWaitsForTheLast(LoadsLate):
    """The last layer does not wait."""

    def wait(self, layers: list[str], layer: str) -> None:
        if layers and layer != layers[-1]:
            self.wait_for(layer)


class WaitsInTheFirstOnly(LoadsLate):
    """The first layer waits, and all others take what there is."""

    def wait(self, layers: list[str], layer: str) -> None:
        if layers and layer == layers[0]:
            self.wait_for(layer)


class LoadsWithoutPiecewise(NoLayerHooks, LoadsLate):
    """Layers wait in their hook, and requires_piecewise_for_cudagraph returns False."""

    def wait(self, layers: list[str], layer: str) -> None:
        if layers:
            self.wait_for(layer)


class SavesWithoutPiecewise(SavesByLayer):
    """Layers are saved in their hook, and requires_piecewise_for_cudagraph returns False."""

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return False


class SavesInTheNextStep(SavesByLayer):
    """save_kv_layer remembers where the layer lies, and the copy is made in the next step, when the blocks of
    a request that has ended are free.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.later: list[Callable[[], None]] = []

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        metadata = self._get_connector_metadata()
        self.later.append(lambda: self.save(metadata, layer_name, kv_layer, attn_metadata))

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if finished_req_ids:
            for save in self.later:
                save()
            self.later.clear()
        return None, None


class SavesTheNextLayer(SavesByLayer):
    """In the hook of a layer it saves the next layer, which the forward has not reached."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        names = list(self.caches)
        after = names[(names.index(layer_name) + 1) % len(names)]
        super().save_kv_layer(after, self.caches[after], attn_metadata)
        self.wait_for_save()

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.caches = kv_caches
