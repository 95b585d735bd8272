"""What a server counts, read from its own /metrics."""

from __future__ import annotations

import http.client
import re
import urllib.error
import urllib.request

import msgspec

SOURCE = "vllm:prompt_tokens_by_source_total"
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


class Counters(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over all requests that a server has answered."""

    external: int  # prompt tokens that the connector loaded
    local: int  # prompt tokens in the engine's own prefix cache
    computed: int  # prompt tokens that the engine computed
    moved: dict[str, int] = {}  # the connector's own metrics of bytes -> bytes
    generated: int = 0  # tokens of answers
    accepted: int = 0  # of these, drafted before, and accepted by the model
    # Draft tokens. After a load vLLM counts placeholders, too, which the model cannot accept
    # (v1/core/sched/scheduler.py: pad_spec_decode).
    drafted: int = 0

    def since(self, before: Counters) -> Counters:
        """What was added since an earlier look."""
        return Counters(
            external=self.external - before.external,
            local=self.local - before.local,
            computed=self.computed - before.computed,
            moved={name: count - before.moved.get(name, 0) for name, count in self.moved.items()},
            generated=self.generated - before.generated,
            accepted=self.accepted - before.accepted,
            drafted=self.drafted - before.drafted,
        )

    def __add__(self, more: Counters) -> Counters:
        return Counters(
            external=self.external + more.external,
            local=self.local + more.local,
            computed=self.computed + more.computed,
            moved={name: count + more.moved.get(name, 0) for name, count in self.moved.items()},
            generated=self.generated + more.generated,
            accepted=self.accepted + more.accepted,
            drafted=self.drafted + more.drafted,
        )


def read_counters(text: str) -> Counters:
    """Read the text of /metrics. Values of several engines of one server are added."""
    from prometheus_client.parser import text_string_to_metric_families

    by_source: dict[str, int] = {}
    sums: dict[str, int] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == SOURCE:
                source = sample.labels.get("source", "")
                by_source[source] = by_source.get(source, 0) + int(sample.value)
            elif sample.name in (GENERATED, ACCEPTED, DRAFTED) or is_bytes_moved(sample.name):
                sums[sample.name] = sums.get(sample.name, 0) + int(sample.value)
    return Counters(
        external=by_source.get("external_kv_transfer", 0),
        local=by_source.get("local_cache_hit", 0),
        computed=by_source.get("local_compute", 0),
        generated=sums.pop(GENERATED, 0),
        accepted=sums.pop(ACCEPTED, 0),
        drafted=sums.pop(DRAFTED, 0),
        moved=sums,
    )


def read_block_size(text: str) -> int:
    """The tokens of a block, from the text of /metrics; 0: it does not tell."""
    from prometheus_client.parser import text_string_to_metric_families

    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == CONFIG and (size := sample.labels.get("block_size", "")).isdigit():
                return int(size)
    return 0


def is_bytes_moved(name: str) -> bool:
    """Whether the name of a metric tells that it counts bytes which a connector moved."""
    return bool(_BYTES.match(name) or _BYTES_FIRST.match(name))


def get(url: str, seconds: float) -> str:
    """Return the body that an address answers with. Raises Unreachable."""
    try:
        with _direct.open(url, timeout=seconds) as answer:
            body: bytes = answer.read()
            return body.decode("utf-8", "replace")
    except urllib.error.HTTPError as error:
        error.close()
        raise Refused(f"{url} answers {error.code} {error.reason}", error.code) from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise Unreachable(f"{url} does not answer: {reason}") from None
