"""Every message of the protocol, as a record with a schema. What does not fit its schema is refused where it arrives.

    Handoff            P's scheduler -> router -> D's scheduler   `kv_transfer_params` of a request
    Orders             scheduler -> its workers                   what is new in a step
    Ask, Answer        D's worker -> P's side channel and back    the handshake, once per peer: who is there and where its memory lies
    Leases             D's worker 0 -> P's workers                notification: leases that are not needed any more, or still are
    Query              D's worker -> one of P's                   notification, with the option integrity: what should I have read?

**The lease.** When P has computed a prompt its blocks stay, under a lease with a number that this engine gives out once. The lease ends
when D releases it or when its time is over, and then each worker of P writes the number into its **ledger** (entry number % length)
before it lets the blocks go. So D can look there after it has read: an entry below the number proves that the blocks were P's all the time,
and any other that what was read may be somebody else's.

The ledger is the first part of a worker's **board**, an array of int64 in registered memory that D reads with NIXL and without P's help.
The second part are answers to queries: the ticket, which P writes last and D reads first; the digest, zeros if there is none; one unused.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from reference_connector.boxes import Box

VERSION = 1  # of all that is said between engines
LEDGER = (
    1 << 16
)  # entries of the ledger. Two leases that share one can at worst end each other's loads with an error
ANSWERS, ANSWER = (
    1 << 12,
    4,
)  # how many, numbers each. Of two queries that share one the first may have to ask again

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
Block = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Count = Annotated[int, msgspec.Meta(ge=1, lt=1 << 40)]


class BadParams(Exception):
    """`kv_transfer_params` that this connector cannot use. The message is one sentence."""


class Address(msgspec.Struct, frozen=True):
    """One life of one engine: after a restart the incarnation is another one."""

    host: str
    port: int
    engine: str
    incarnation: str


class Lease(msgspec.Struct, frozen=True):
    """What D holds of P."""

    peer: Address
    number: int


class Handoff(msgspec.Struct, frozen=True, kw_only=True):
    """What P answers for a request and D is given: where the KV of how many tokens lies. Keys are vLLM's own where it has them."""

    do_remote_prefill: bool
    do_remote_decode: bool = False
    remote_engine_id: Name
    remote_incarnation: Name
    remote_request_id: Name
    remote_host: Name
    remote_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    remote_lease: Count
    remote_num_tokens: Count  # tokens that P has computed: of a state, those it has seen
    remote_block_ids: Annotated[
        list[list[Block]], msgspec.Meta(min_length=1, max_length=256)
    ]  # of each group of P
    remote_first_tokens: list[
        Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]
    ]  # the token at which each of these lists begins

    @property
    def lease(self) -> Lease:
        return Lease(
            Address(self.remote_host, self.remote_port, self.remote_engine_id, self.remote_incarnation),
            self.remote_lease,
        )


def read_params(params: Any) -> Handoff | None:
    """The hand-over that `kv_transfer_params` of a request on D describe; None if they are about something else. Raises BadParams."""
    if not isinstance(params, dict) or not params.get("do_remote_prefill"):
        return None
    try:
        handoff = msgspec.convert(params, Handoff)
    except (ValueError, TypeError) as error:
        raise BadParams(f"kv_transfer_params: {error}") from None
    if handoff.do_remote_decode:
        raise BadParams("kv_transfer_params: do_remote_prefill and do_remote_decode cannot both be true")
    if len(handoff.remote_first_tokens) != len(handoff.remote_block_ids):
        raise BadParams(
            "kv_transfer_params: remote_block_ids and remote_first_tokens have different numbers of groups"
        )
    if not any(handoff.remote_block_ids):
        raise BadParams("kv_transfer_params: remote_block_ids has no block")
    return handoff


class Part(msgspec.Struct, frozen=True):
    """What D needs in one of its groups: tokens start to stop, into blocks[i] from token first + i * (tokens per block) on."""

    start: int = 0
    stop: int = 0
    blocks: list[int] = []
    first: int = 0


class Load(msgspec.Struct, frozen=True):
    """One request to be loaded, by D's groups."""

    handoff: Handoff
    parts: list[Part]


class Orders(msgspec.Struct):
    """What a scheduler tells its workers in a step."""

    loads: dict[str, Load] = {}  # by request
    leases: dict[int, str] = {}  # of this engine: number -> request. They begin when a worker hears of them
    releases: list[Lease] = []  # of peers
    renewals: list[Lease] = []


class Card(msgspec.Struct, frozen=True):
    """One worker, as its peers know it."""

    agent: bytes  # NIXL's metadata
    place: tuple[str, int]  # of KV, see transport.py
    board: int  # address, in host memory
    boxes: tuple[Box, ...]


class Ask(msgspec.Struct, frozen=True, tag=True):
    version: int
    engine: str  # the one that D has been told about
    incarnation: str


class Answer(msgspec.Struct, frozen=True, tag=True):
    cards: Annotated[list[Card], msgspec.Meta(min_length=1)]  # one a rank, in their order


class Refusal(msgspec.Struct, frozen=True, tag=True):
    sentence: str


class Leases(msgspec.Struct, frozen=True, tag=True):
    released: list[int] = []  # they have served their purpose
    renewed: list[int] = []  # they are still needed


class Query(msgspec.Struct, frozen=True, tag=True):
    ticket: Annotated[
        int, msgspec.Meta(ge=1, lt=1 << 62)
    ]  # a random number, from which the place of the answer follows
    runs: bytes  # int64 [2, n]: addresses, lengths


Notice = Leases | Query


class BadMessage(Exception):
    """Bytes that are none of the messages that were expected."""


encode = msgspec.msgpack.encode


def decode(data: bytes, kind: Any) -> Any:
    """A message of this type, or union of types. Raises BadMessage."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (ValueError, RecursionError) as error:  # DecodeError and UnicodeDecodeError are ValueErrors
        raise BadMessage(str(error)) from None
