"""What a server counts, read from its own /metrics."""

from __future__ import annotations

import http.client
import math
import re
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping

import msgspec

SOURCE = "vllm:prompt_tokens_by_source_total"
# values of its label `source`, all of which vLLM counts from the start (v1/metrics/stats.py:
# PromptTokenStats.ALL_SOURCES): what the connector loaded, the prefix cache had, and the engine computed
SOURCES = ("external_kv_transfer", "local_cache_hit", "local_compute")
# Of a connector's own metrics: bytes that were moved. vLLM's estimates of memory traffic are no such metric.
_BYTES = re.compile(r"vllm:(?!estimated_)\w*(transfer|xfer|load|recv|pull|read)\w*bytes\w*(_sum|_total)$")
_BYTES_FIRST = re.compile(
    r"vllm:(?!estimated_)\w*bytes\w*(transfer|xfer|load|recv|pull|read)\w*(_sum|_total)$"
)
GENERATED = "vllm:generation_tokens_total"
DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
CONFIG = "vllm:cache_config_info"  # whose labels are fields of vLLM's CacheConfig
# Neither lm-eval nor the router asks through a proxy: nor do we.
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Unreachable(Exception):
    """A server does not answer. The message is a whole sentence."""


class Refused(Unreachable):
    """A server answers with an HTTP error, `code`."""

    def __init__(self, message: str, code: int):
        super().__init__(message)
        self.code = code


class Uncounted(Unreachable):
    """A server answers, and its /metrics lack a metric. What is not counted is not zero."""


class Counters(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over all requests that a server has answered. None: the server does not count it."""

    external: int  # prompt tokens that the connector loaded
    local: int  # prompt tokens in the engine's own prefix cache
    computed: int  # prompt tokens that the engine computed
    moved: dict[str, int] = {}  # the connector's own metrics of bytes -> bytes
    generated: int | None = None  # tokens of answers
    accepted: int | None = None  # of these, drafted before, and accepted by the model
    # Draft tokens. After a load vLLM counts placeholders, too, which the model cannot accept
    # (v1/core/sched/scheduler.py: pad_spec_decode). vLLM counts drafts of engines alone that speculate
    # (v1/spec_decode/metrics.py: SpecDecodingProm).
    drafted: int | None = None

    def since(self, before: Counters) -> Counters:
        """What was added since an earlier look."""
        return Counters(
            external=self.external - before.external,
            local=self.local - before.local,
            computed=self.computed - before.computed,
            moved=grown(before.moved, self.moved),
            generated=_sum(self.generated, before.generated, -1),
            accepted=_sum(self.accepted, before.accepted, -1),
            drafted=_sum(self.drafted, before.drafted, -1),
        )

    def __add__(self, more: Counters) -> Counters:
        return Counters(
            external=self.external + more.external,
            local=self.local + more.local,
            computed=self.computed + more.computed,
            moved=added(self.moved, more.moved),
            generated=_sum(self.generated, more.generated),
            accepted=_sum(self.accepted, more.accepted),
            drafted=_sum(self.drafted, more.drafted),
        )


def _sum(one: int | None, other: int | None, sign: int = 1) -> int | None:
    return None if one is None or other is None else one + sign * other


def grown(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """By how much counters grew. One that was not there has counted nothing: Prometheus's begin at 0."""
    return {name: count - before.get(name, 0) for name, count in after.items()}


def added(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    """The sums of counters, each of which one of the two has, or both."""
    return {name: one.get(name, 0) + other.get(name, 0) for name in dict.fromkeys((*one, *other))}


def read_counters(text: str) -> Counters:
    """Read the text of /metrics. Values of several engines of one server are added. Raises Uncounted."""
    by_source: dict[str, int] = {}
    sums: dict[str, int] = {}
    for name, labels, value in _samples(text):
        if name == SOURCE and (source := labels.get("source")):
            by_source[source] = by_source.get(source, 0) + value
        elif name in (GENERATED, ACCEPTED, DRAFTED):
            sums[name] = sums.get(name, 0) + value
    if lacks := [source for source in SOURCES if source not in by_source]:
        of = f' of the source "{lacks[0]}"' if by_source else ""
        raise Uncounted(
            f"has no {SOURCE}{of}, and nothing else tells which tokens of prompts were loaded: start this "
            f"server without --disable-log-stats"
        )
    external, local, computed = (by_source[source] for source in SOURCES)
    return Counters(
        external=external,
        local=local,
        computed=computed,
        generated=sums.get(GENERATED),
        accepted=sums.get(ACCEPTED),
        drafted=sums.get(DRAFTED),
        moved=read_moved(text),
    )


def read_moved(text: str) -> dict[str, int]:
    """The connector's own metrics of bytes that it moved -> bytes, from the text of /metrics."""
    found: dict[str, int] = {}
    for name, _, value in _samples(text):
        if is_bytes_moved(name):
            found[name] = found.get(name, 0) + value
    return found


def read_block_size(text: str) -> int:
    """The tokens of a block, from the text of /metrics. Raises Uncounted."""
    for name, labels, _ in _samples(text):
        if name == CONFIG and (size := labels.get("block_size", "")).isdigit() and int(size):
            return int(size)
    raise Uncounted(
        f"has no {CONFIG} with a block_size, and nothing else tells which blocks of a prompt are whole: "
        "start this server without --disable-log-stats"
    )


def _samples(text: str) -> Iterator[tuple[str, dict[str, str], int]]:
    """Name, labels and value of each sample in the text of /metrics. What is no number is left out.

    Raises Uncounted.
    """
    from prometheus_client.parser import text_string_to_metric_families

    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if math.isfinite(sample.value):
                    yield sample.name, sample.labels, int(sample.value)
    except ValueError:
        raise Uncounted("is no text of Prometheus's metrics") from None


def is_bytes_moved(name: str) -> bool:
    """Whether the name of a metric tells that it counts bytes which a connector moved."""
    return bool(_BYTES.match(name) or _BYTES_FIRST.match(name))


def get(url: str, seconds: float, headers: Mapping[str, str] | None = None) -> str:
    """Return the body that an address answers with. `headers` go to no other address that it names.

    Raises Unreachable.
    """
    try:
        request = urllib.request.Request(url)
        for name, value in (headers or {}).items():
            request.add_unredirected_header(name, value)
        with _direct.open(request, timeout=seconds) as answer:
            body: bytes = answer.read()
            return body.decode("utf-8", "replace")
    except urllib.error.HTTPError as error:
        error.close()
        raise Refused(f"{url} answers {error.code} {error.reason}", error.code) from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise Unreachable(f"{url} does not answer: {reason}") from None
