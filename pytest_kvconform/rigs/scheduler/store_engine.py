"""An engine of the scheduler rig with a real worker half, mostly for stores.

What a store announces depends on what its workers have saved.

    side = start_engine_with_worker(rig)  # a step calls every hook of a worker, in vLLM's order
    side.add(rig.prompt(40))
    side.run()

    other = start_scheduler_half(rig, other="model")  # of an engine beside it, which finds what was saved

It has one rank and no model. Its KV memory holds nothing in particular: the byte rig compares bytes. vLLM and
torch are imported inside functions only: cases import this module.
"""

from __future__ import annotations

import copy
import functools
import time
from typing import Any

import numpy as np

from pytest_kvconform.result import Blocked
from pytest_kvconform.rigs.context import declared_addition
from pytest_kvconform.rigs.history import Recorder
from pytest_kvconform.rigs.processes.cores import Deadline
from pytest_kvconform.rigs.scheduler.rig import BLOCK, BLOCKS, Rig, Side, first_block, longer
from pytest_kvconform.rigs.scheduler.worker_half import WorkerHalf
from pytest_kvconform.rigs.vllm_setup.compat import pre_forward
from pytest_kvconform.rigs.vllm_setup.worker import forward_context

REQUEST_BLOCKS = 8  # blocks of a request, beyond what its connector's declaration adds to every prompt
ENCODER_TOKENS = 1024
EMBEDDING = 8  # numbers of a token
YES = "yes"
PAUSE_S = 0.002  # of a step without tokens: saves and loads go on in the background


def start_engine_with_worker(
    rig: Rig, recorder: Recorder | None = None, port: int = 0, role: str = "P"
) -> Side:
    """Start it. Raises Blocked if the worker half cannot run on this machine.

    `recorder`: of the calls of the worker half. `port`: number of its port.
    """
    half = WorkerHalf(rig, role, port=port, longest=longest_request(rig))
    half.construct()
    if recorder is not None:
        recorder.watch(half.connector)
    caches = half.allocate_kv_caches()
    half.register_kv_caches(caches)
    side = half.scheduler_side()
    half.set_handshake_metadata(side)
    side.worker = functools.partial(_step, half, side, caches)
    return side


def longest_request(rig: Rig) -> int:
    """Blocks of the longest request of an engine with a worker half."""
    return REQUEST_BLOCKS + declared_addition(rig.subject, BLOCK) // BLOCK


def workers_hear_of_ends(rig: Rig, role: str) -> bool:
    """Whether the connector of a role keeps the blocks of a request that it hands to nobody, and its worker
    half reports the end, see `worker_reports_an_end`. A worker half shows it, once for all cases that are
    forked from this host: the answer stands in a file.

    vLLM tells the workers of each end (SchedulerOutput.finished_req_ids), so metadata need not. Raises
    Blocked if the worker half cannot run on this machine.
    """
    known = rig.shared_file(f"{role}.hears")
    if not known.exists():
        known.write_text("")  # if a hook raises
        try:
            if worker_reports_an_end(rig, role, spare_port(rig, role)):
                known.write_text(YES)
        except Blocked as blocked:
            known.write_text(str(blocked))
    if (answer := known.read_text()) not in ("", YES):
        raise Blocked(answer)
    return bool(answer)


def worker_reports_an_end(rig: Rig, role: str, port: int) -> bool:
    """Whether the connector of a role keeps the blocks of a request that asks for no hand-over, until its
    worker half reports the request as sent. `port`: number of its port.
    """
    side = start_engine_with_worker(rig, port=port, role=role)
    id = side.add(rig.prompt(3 * BLOCK))
    side.run(lambda: not side.unfinished_requests())
    keeps = id in side.delayed_free_requests()
    for _ in rig.waits(Deadline(rig.settle_s)):
        if id not in side.delayed_free_requests():
            break
        side.step()
    reports = keeps and id not in side.delayed_free_requests()
    end_engine_with_worker(side)
    return reports


def end_in_worker(rig: Rig, role: str, prompt: tuple[int, ...], params: dict[str, Any]) -> str:
    """Return how a request with these params ends in an engine of this role that has a worker half, once for
    each params of a case: "error", "computed", "loaded", or "" if it does not end.

    The metadata of its steps may name no block: the scheduler half may let the worker half report the load as
    failed. Raises Blocked if the worker half cannot run on this machine.
    """
    if (known := rig.ends_in_worker.get(key := f"{role} {params}")) is not None:
        return known
    side = start_engine_with_worker(rig, port=spare_port(rig, role), role=role)
    try:
        id = side.add(prompt, params)
        for _ in rig.waits(Deadline(rig.settle_s)):
            if id in side.results:
                break
            side.step()
        if id not in side.results:
            rig.waited, end = True, ""
        elif side.results[id].finish == "error":
            end = "error"
        else:
            end = "loaded" if side.first_external_tokens(id) else "computed"
    finally:
        end_engine_with_worker(side)
    rig.ends_in_worker[key] = end
    return end


def spare_port(rig: Rig, role: str) -> int:
    """The number of the port of an engine with a worker half beside those of a case: P's or D's."""
    return len(rig.host.spec.ports) - (1 if role == "P" else 2)


def start_scheduler_half(rig: Rig, other: str = "") -> Side:
    """Start the scheduler of a second engine, without a worker that takes steps.

    `other`: "model" or "dtype", in which the engine differs; "": in nothing.
    """
    import torch

    config = rig.host.vllm_config("P")
    config.model_config = copy.copy(config.model_config)
    if other == "model":
        config.model_config.model = config.model_config.served_model_name = "org/another-model"
    elif other == "dtype":  # of the same size, so that every byte would fit
        half = torch.float16
        config.model_config.dtype = half if config.model_config.dtype != half else torch.bfloat16
    first, blocks = first_block(rig.subject, 1), BLOCKS * longer(rig.subject)
    number = 2 if other else 1  # of its ports: a case has one engine that differs beside one that does not
    rig.take_ports(number, config)
    if rig.nursery is not None and rig.subject.asks_worker:
        rig.nursery.start("P", config, number)
    return Side(rig, "P", 1, config, rig.host.kv_config("P", config, first + blocks + 1), first)


def allow_images(side: Side) -> None:
    """Give the scheduler room for the output of an image encoder, as for a model that has one."""
    from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

    side.scheduler.max_num_encoder_input_tokens = ENCODER_TOKENS
    side.scheduler.encoder_cache_manager = EncoderCacheManager(ENCODER_TOKENS)


def request_fields(what: str, length: int) -> dict[str, dict[str, Any]]:
    """Fields of vLLM's EngineCoreRequest in which requests of the same tokens differ, by name.

    `what`: "salt", "lora", "image" or "embeddings". `length`: tokens of the prompt; those of an embedding are
    zeros.
    """
    import torch
    from vllm.lora.request import LoRARequest
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    if what == "salt":
        return {f"cache_salt={salt!r}": {"cache_salt": salt} for salt in ("user 1", "user 2")}
    if what == "lora":  # two adapters, and one of these names that was pointed to another path
        named = (("a", "/adapters/a"), ("b", "/adapters/b"), ("a", "/adapters/a-retrained"))
        return {
            f"LoRA {name!r} of {path}": {"lora_request": LoRARequest(name, number, path)}
            for number, (name, path) in enumerate(named, 1)
        }
    if what == "image":
        place = PlaceholderRange(offset=0, length=length // 2)
        return {
            f"the image {name}": {"mm_features": [MultiModalFeatureSpec(None, "image", name, place)]}
            for name in ("5eed0001", "5eed0002")
        }
    new = torch.Generator()
    new.seed()  # a fork has the random numbers of its parent
    return {
        f"embeddings {name}": {
            "prompt_token_ids": None,
            "prompt_embeds": torch.rand(length, EMBEDDING, generator=new, dtype=torch.bfloat16),
        }
        for name in ("a", "b")
    }


def end_engine_with_worker(side: Side) -> None:
    """Shut both halves down as vLLM does, workers first, so that another engine can start."""
    assert isinstance(side.worker, functools.partial)
    side.worker.args[0].shutdown()
    side.scheduler.shutdown()
    side.worker = side.scheduler.connector = side.connector = None


def _step(half: WorkerHalf, side: Side, caches: dict[str, Any], output: Any) -> Any:
    return step_of_worker(half, caches, output, slots_of(side, output))


def step_of_worker(half: WorkerHalf, caches: dict[str, Any], output: Any, slots: list[np.ndarray]) -> Any:
    """What a worker does in a step (v1/worker/gpu/model_runner.py), without its model. `slots`: `slots_of`.

    Returns vLLM's KVConnectorOutput.
    """
    from vllm.v1.kv_cache_interface import MambaSpec

    from pytest_kvconform.rigs.bytes.layers import metadata

    guard = half.recorder.call
    if not output.total_num_scheduled_tokens:
        time.sleep(PAUSE_S)
        return guard("a step without tokens", half.active.no_forward, output).kv_connector_output
    context = {
        name: metadata(half.layers[name].spec, slots[index])
        for index, group in enumerate(half.kv_config.kv_cache_groups)
        for name in group.layer_names
        if name in half.layers
    }
    with forward_context(context, half.config):
        guard("start_load_kv", pre_forward, half.active, output)
        for name, layer in half.layers.items():
            if not isinstance(layer.spec, MambaSpec):
                half.call_hook("wait_for_layer_load", name)
                half.call_hook("save_kv_layer", name, caches[name], context[name])
        guard("finish_forward", half.active.finish_forward)
    return guard("wait_for_save", half.active.post_forward, output.finished_req_ids)


def slots_of(side: Side, output: Any) -> list[np.ndarray]:
    """By KV cache group, the slot of each scheduled token: block times block size, and the place in it."""
    return [_slots(side, output, index) for index in range(len(side.group_sizes))]


def _slots(side: Side, output: Any, group: int) -> np.ndarray:
    size, found = side.group_sizes[group], [np.zeros(0, dtype=np.int64)]
    for id, count in output.num_scheduled_tokens.items():
        end, table = side.num_computed_tokens(id), np.array(side.blocks(id)[group])
        tokens = np.arange(end - count, end)
        found.append(table[tokens // size] * size + tokens % size)
    return np.concatenate(found)
