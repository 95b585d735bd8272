"""Authentication: hand-overs that P signs, and engines that prove the key of their deployment.

All engines of a deployment have one secret key, which is never sent. P signs what it hands over, and D reads
the KV only if the signature is right: whoever writes `kv_transfer_params` without the key chooses neither the
host to which D connects nor the blocks that D reads. The signature covers every field of the Handoff, and
what a request must have in common on P and D (`_common`), so that a hand-over serves no other prompt.
docs/security.md tells against whom this helps, and against whom it does not.
"""

import hashlib
import hmac
import ipaddress
import os
import time
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from reference_connector.messages import VERSION, BadParams, Handoff, encode
from reference_connector.options import BadOption, Options

SHORTEST_KEY = 32  # bytes
THIS_MACHINE = ("localhost", "127.0.0.0/8", "::1")


@dataclass(frozen=True)
class Trust:
    """Whose KV an engine reads. What is empty is not checked."""

    key: bytes = field(default=b"", repr=False)  # of the deployment
    peers: tuple[str, ...] = ()  # names of hosts, addresses, networks like 10.0.0.0/8
    identity: Mapping[str, str] = field(default_factory=dict)  # of this engine, see identity.py
    may_differ: tuple[str, ...] = ()  # its facts that D does not compare

    def mac(self, purpose: str, *parts: Any) -> bytes:
        """An HMAC. What is made for one purpose does not fit another."""
        return hmac.digest(self.key, encode((VERSION, purpose, *parts)), hashlib.sha256)

    def fits(self, mac: bytes, purpose: str, *parts: Any) -> bool:
        return hmac.compare_digest(mac, self.mac(purpose, *parts))

    def sign(self, handoff: Handoff, request: Any, seconds: float) -> Handoff:
        """P's half: the hand-over of a request, signed, for so many seconds."""
        if not self.key:
            return handoff
        handoff = msgspec.structs.replace(handoff, remote_expiry=int(time.time() + seconds) + 1)
        mac = self.mac("hand-over", handoff, _common(handoff, request))
        return msgspec.structs.replace(handoff, remote_signature=mac.hex())

    def check(self, handoff: Handoff, request: Any) -> None:
        """D's half. Raises BadParams, with one sentence, for a hand-over that D must not read."""
        if self.peers and not any(_is_in(handoff.remote_host, peer) for peer in self.peers):
            raise BadParams(f"the option peers does not have {handoff.remote_host!r}")
        if not self.key:
            return
        unsigned = msgspec.structs.replace(handoff, remote_signature="")
        try:
            mac = self.mac("hand-over", unsigned, _common(handoff, request)).hex()
        except UnicodeEncodeError:
            raise BadParams("a text is not UTF-8") from None
        if not hmac.compare_digest(mac.encode(), handoff.remote_signature.encode(errors="replace")):
            raise BadParams("the signature is not one of this deployment's key, for these params and prompt")
        if (late := time.time() - handoff.remote_expiry) > 0:
            raise BadParams(f"they expired {late:.0f} s ago, by the clock of this host")


ANYBODY = Trust()


def trust(options: Options, host: str, identity: Mapping[str, str]) -> Trust:
    """Whom an engine that listens on `host` trusts. Raises BadOption."""
    key, peers, may_differ = options.key, options.peers, options.allow_different
    if key == "none":
        return Trust(b"", peers, identity, may_differ)
    if not key and any(_is_in(host, near) for near in THIS_MACHINE):
        return Trust(b"", peers or THIS_MACHINE, identity, may_differ)
    if not key:
        raise BadOption(
            f"other machines reach the side channel on {host}, and there is no key: set key to 'file:PATH' "
            "or 'env:NAME', or to 'none' to trust whoever reaches it"
        )
    kind, _, name = key.partition(":")
    if kind not in ("env", "file") or not name:
        raise BadOption("key is 'file:PATH', 'env:NAME' or 'none'")
    try:
        secret = Path(name).read_bytes() if kind == "file" else os.environb[name.encode()]
    except (OSError, KeyError):
        raise BadOption(f"the key cannot be read from {key!r}") from None
    if len(secret := secret.strip()) < SHORTEST_KEY:
        raise BadOption(f"the key in {key!r} is shorter than {SHORTEST_KEY} bytes")
    return Trust(secret, peers, identity, may_differ)


@lru_cache
def _is_in(host: str, peer: str) -> bool:
    """Whether a host is the one of a list's entry, or in its network. Names are not looked up."""
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(peer, strict=False)
    except ValueError:
        return host == peer


def _common(handoff: Handoff, request: Any) -> tuple[Any, ...]:
    """What changes the KV of a request: its tokens that P has computed, images, adapter and cache salt."""
    tokens = min(handoff.remote_num_tokens, request.num_prompt_tokens)
    embeds, lora = getattr(request, "prompt_embeds", None), getattr(request, "lora_request", None)
    return (
        tokens,
        array("q", (request.prompt_token_ids or ())[:tokens]).tobytes(),
        b"" if embeds is None else embeds[:tokens].float().numpy().tobytes(),
        [feature.identifier for feature in getattr(request, "mm_features", None) or ()],
        None if lora is None else lora.lora_name,
        getattr(request, "cache_salt", None),
    )
