"""Every message of the protocol, as a record with a schema. The receiver refuses what does not fit.

    Handoff        P's scheduler -> router -> D's scheduler   `kv_transfer_params` of a request
    Orders         scheduler -> its workers                   what is new in a step
    Ask, Challenge, Proof, Sealed   D's worker <-> P's side channel   the handshake, see handshake.py
    Leases         D's worker 0 -> P's workers                notification: leases to end, leases to renew

**The lease.** When P has computed a prompt its blocks stay, under a lease with a number that this engine
gives out once. The lease ends when D releases it or when its time is over. Then each worker of P writes the
number into its **ledger** (see leases.py) before it releases the blocks. The ledger is an array of int64 in
registered memory. D reads the lease's entry of it with NIXL, after the KV and without P's help. An entry
below the number proves that the lease was valid all the time. Otherwise the bytes that D read may belong to
another request.
"""

from typing import Annotated, Any

import msgspec

from reference_connector.boxes import Box
from reference_connector.options import Seconds
from reference_connector.plan import Table

VERSION = 4  # of all messages between engines
LONGEST = 1 << 20  # bytes of a message, unless a receiver allows more; longer ones are not decoded
LEDGER = 1 << 16  # entries. Two leases that share an entry can at worst make each other's loads fail
encode = msgspec.msgpack.encode

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
Block = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Blocks = Annotated[list[Block], msgspec.Meta(max_length=1 << 22)]
Token = Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]
Count = Annotated[int, msgspec.Meta(ge=1, lt=1 << 53)]
Random = Annotated[bytes, msgspec.Meta(max_length=32)]
Numbers = Annotated[list[Count], msgspec.Meta(max_length=1 << 16)]  # of leases


class BadParams(Exception):
    """`kv_transfer_params` that this connector cannot use. The message is one sentence."""

    def __init__(self, why: str):
        super().__init__(f"kv_transfer_params: {why}")


class Address(msgspec.Struct, frozen=True):
    """One life of one engine: after a restart the incarnation is different."""

    host: str
    port: int
    engine: str
    incarnation: str

    def __str__(self) -> str:
        return escaped(f"{self.engine} at {self.host}:{self.port}")


class Lease(msgspec.Struct, frozen=True):
    """A lease of P that D holds."""

    peer: Address
    number: int


class Handoff(msgspec.Struct, frozen=True, kw_only=True):
    """Where the KV of a request lies on P. P returns this, and D gets it. Keys that vLLM has are vLLM's."""

    do_remote_prefill: bool
    do_remote_decode: bool = False
    remote_engine_id: Name
    remote_incarnation: Name
    remote_request_id: Name
    remote_host: Name
    remote_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    remote_lease: Count
    remote_lease_duration: Seconds  # P's kv_lease_duration
    remote_num_tokens: Count  # tokens that P has computed: of a state, those that went into it
    # Of each group of P the block ids, and the token at which they begin.
    remote_block_ids: Annotated[list[Blocks], msgspec.Meta(min_length=1, max_length=256)]
    remote_first_tokens: Annotated[list[Token], msgspec.Meta(max_length=256)]
    # With a key, see trust/authentication.py: in seconds since 1970, and in hexadecimal digits.
    remote_expiry: Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)] = 0
    remote_signature: Annotated[str, msgspec.Meta(max_length=64)] = ""

    @property
    def lease(self) -> Lease:
        peer = Address(self.remote_host, self.remote_port, self.remote_engine_id, self.remote_incarnation)
        return Lease(peer, self.remote_lease)

    def __post_init__(self) -> None:
        if self.do_remote_decode:
            raise ValueError("do_remote_prefill and do_remote_decode cannot both be true")
        if len(self.remote_first_tokens) != len(self.remote_block_ids):
            raise ValueError("remote_block_ids and remote_first_tokens differ in length")
        if not any(self.remote_block_ids):
            raise ValueError("remote_block_ids has no block")

    @classmethod
    def read(cls, params: Any) -> "Handoff | None":
        """Of the params of a request on D; None if they describe no hand-over. Raises BadParams."""
        if not isinstance(params, dict) or not params.get("do_remote_prefill"):
            return None
        try:
            return msgspec.convert(params, cls)
        except (ValueError, TypeError) as error:
            raise BadParams(escaped(error)) from None


class GroupLoad(Table, frozen=True):
    """What D loads in one of its groups: tokens start to stop, into the blocks of a table."""

    start: int = 0
    stop: int = 0


class Load(msgspec.Struct, frozen=True):
    """One request to be loaded, by D's groups."""

    handoff: Handoff
    groups: list[GroupLoad]


class Orders(msgspec.Struct):
    """What a scheduler sends to its workers in a step."""

    loads: dict[str, Load] = {}  # by request
    leases: dict[int, str] = {}  # of this engine: number -> request; they begin on arrival
    releases: list[Lease] = []  # of peers
    renewals: list[Lease] = []


class Rank(msgspec.Struct, frozen=True):
    """What a worker publishes to its peers, as its handshake metadata."""

    agent: bytes  # NIXL's metadata
    place: tuple[str, int]  # of KV, see transport.py
    ledger: int  # address, in host memory
    boxes: tuple[Box, ...]


class Ask(msgspec.Struct, frozen=True, tag=True):
    version: int
    engine: Name  # the one in the Handoff that D received
    incarnation: Name
    random: Random  # new for each question


class Challenge(msgspec.Struct, frozen=True, tag=True):
    random: Random


class Proof(msgspec.Struct, frozen=True, tag=True):
    mac: Random


class Sealed(msgspec.Struct, frozen=True, tag=True):
    answer: bytes  # an Answer
    mac: Random


class Answer(msgspec.Struct, frozen=True, tag=True):
    ranks: Annotated[list[Rank], msgspec.Meta(min_length=1)]  # in their order
    identity: dict[str, str] = {}  # see trust/identity.py


class Refusal(msgspec.Struct, frozen=True, tag=True):
    sentence: Annotated[str, msgspec.Meta(max_length=1024)]


class Leases(msgspec.Struct, frozen=True, tag=True):
    released: Numbers = []  # not needed any more
    renewed: Numbers = []  # still needed


class BadMessage(Exception):
    """Bytes that are not one of the expected messages."""


def decode(data: bytes, kind: Any, longest: int = LONGEST) -> Any:
    """Decode a message of this type, or union of types. Raises BadMessage."""
    if len(data) > longest:
        raise BadMessage(f"it has {len(data)} bytes, and at most {longest} are read")
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (ValueError, RecursionError) as error:  # DecodeError and UnicodeDecodeError are ValueErrors
        raise BadMessage(escaped(error)) from None


def escaped(text: object) -> str:
    """Words that a peer or a client may have written, as a part of a line in a log."""
    return ascii(str(text))[1:-1][:300]
