"""Cases about the keys of a store: which prompts the store takes for the same prompt.

vLLM's own prefix cache shows what a key needs: generate_block_hash_extra_keys in v1/core/kv_cache_utils.py.
"""

from __future__ import annotations

import time
from typing import Any

from pytest_kvconform.case import case
from pytest_kvconform.result import Blocked, Evidence, NotApplicable
from pytest_kvconform.rigs.processes.cores import Deadline
from pytest_kvconform.rigs.scheduler.rig import Rig, Side
from pytest_kvconform.rigs.scheduler.store_engine import allow_images, request_fields, start_scheduler_half
from pytest_kvconform.suite.protocol._scenarios import token_count
from pytest_kvconform.suite.protocol.multi_connector import _dense
from pytest_kvconform.suite.protocol.stores.saved_prompts import ASKED, run_and_save, start_store

ENGINES = ("model", "dtype")
# variant -> what differs between two prompts of the same tokens, as the message names it
DIFFERENCES = {
    "salt": "cache_salt",
    "lora": "LoRA adapter",
    "image": "image",
    "embeddings": "prompt embeddings",
}
PROMPT = "3b+5"
ANSWER_S = 2.0  # seconds in which a scheduler half without workers may answer None
PAUSE_S = 0.005  # seconds between two questions


def _external_tokens(rig: Rig, side: Side, prompt: tuple[int, ...], fields: dict[str, Any]) -> int:
    """Run a request while the prefix cache is empty. Returns the tokens that were announced for it."""
    side.evict_prefix_cache()
    id = side.add(prompt, **fields)
    run_and_save(rig, side)
    return side.first_external_tokens(id)


@case("KV-STORE-004", applies=_dense, variants=lambda cell, matrix: tuple(DIFFERENCES), rig="scheduler")
def other_keys_match_nothing(rig: Rig, what: str) -> Evidence:
    """A store announces nothing for the same tokens with another salt, LoRA adapter, image or embedding."""
    side = start_store(rig)
    allow_images(side)
    prompt = rig.prompt(token_count(PROMPT, side.block_size))
    if what == "embeddings":
        prompt = (0,) * len(prompt)  # what vLLM has in the place of token ids
    keys: dict[str, dict[str, Any]] = {"nothing but its tokens": {}} | request_fields(what, len(prompt))
    saved: list[str] = []
    for name, fields in keys.items():
        external = _external_tokens(rig, side, prompt, fields)
        if external and saved:
            raise rig.violation(
                "",
                f"{external} of {len(prompt)} tokens were announced for a prompt with {name}, and the same "
                f"tokens were saved with {' and with '.join(saved)} only",
                diagnosis=f"the store takes prompts that differ in their {DIFFERENCES[what]} for the same",
                check=("does the key have all that vLLM's request.block_hashes depend on?",),
            )
        saved.append(name)
    again = [_external_tokens(rig, side, prompt, fields) for fields in keys.values()]
    if not any(again):
        raise NotApplicable(f"{rig.subject.connector} announced no token of prompts that it could save")
    return Evidence(looked_at=2 * len(keys), unit="requests", external_tokens=sum(again))


def _announced(rig: Rig, side: Side, prompt: tuple[int, ...]) -> int | None:
    """Return the tokens that a scheduler half announces for a prompt; None if it answers None for ANSWER_S,
    which announces neither tokens nor that there are none.
    """
    id, deadline = side.add(prompt), Deadline(rig.scaled_seconds(ANSWER_S))
    while (found := side.call_hook(ASKED, side.request(id), 0)[0]) is None and not deadline.over():
        time.sleep(PAUSE_S)
    return found


@case("KV-STORE-005", applies=_dense, variants=lambda cell, matrix: ENGINES, rig="scheduler")
def other_models_match_nothing(rig: Rig, what: str) -> Evidence:
    """The scheduler half of an engine with another model or dtype announces nothing of what was saved."""
    side = start_store(rig)
    prompt = rig.prompt(token_count(PROMPT, side.block_size))
    _external_tokens(rig, side, prompt, {})
    same = _announced(rig, start_scheduler_half(rig), prompt)
    if not same:
        of_prompt = (
            "no token of the prompt" if same == 0 else f"nothing of the prompt within {ANSWER_S:.0f} s"
        )
        raise NotApplicable(
            f"{rig.subject.connector} announced {of_prompt} on a second engine of the same model"
        )
    external = _announced(rig, start_scheduler_half(rig, other=what), prompt)
    if external is None:
        raise Blocked(
            f"on an engine with another {what} {ASKED} returns None for {ANSWER_S:.0f} s, and on one with "
            f"the same {what} it returned {same}: whether the store takes one for the other is not known"
        )
    if external:
        raise rig.violation(
            "",
            f"an engine has saved a prompt of {len(prompt)} tokens, and {external} tokens were announced on "
            f"an engine with another {what}",
            diagnosis=f"the store takes the KV of another {what} for its own",
            check=("does the key name the model, and the dtype of its KV cache?",),
        )
    return Evidence(looked_at=2, unit="engines", external_tokens=same)


@case("KV-STORE-006", applies=_dense, rig="scheduler")
def reset_store_forgets(rig: Rig, variant: None) -> Evidence:
    """After reset_cache has returned anything but False, nothing is announced of what was saved before."""
    side = start_store(rig)
    prompt = rig.prompt(token_count(PROMPT, side.block_size))
    _external_tokens(rig, side, prompt, {})
    before = _external_tokens(rig, side, prompt, {})
    if not before:
        raise NotApplicable(f"{rig.subject.connector} announced no token of a prompt that it could save")
    side.step()  # the last one of an engine that is paused: the workers are notified of the end
    side.reset_prefix_cache()
    returned = side.calls_of("reset_cache")[-1].result
    if returned is False:
        raise NotApplicable("reset_cache returned False: vLLM raises an error, and nothing was reset")
    if external := _external_tokens(rig, side, prompt, {}):
        raise rig.violation(
            "",
            f"reset_cache returned {returned!r}, and then {external} of {len(prompt)} tokens were announced "
            "for a prompt that was saved before",
            diagnosis="the store has forgotten nothing, and vLLM takes every answer but False for success",
            check=(
                "does the connector implement reset_cache? KVConnectorBase_V1's returns None",
                "does reset_cache empty the store itself, and not only what the scheduler half remembers?",
            ),
        )
    return Evidence(looked_at=3, unit="requests", external_tokens=before)
