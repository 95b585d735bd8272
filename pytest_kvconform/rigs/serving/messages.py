"""Records that travel between pytest and the processes of the serving rig."""

from __future__ import annotations

from typing import Any

import msgspec

TASK = "kvconform_gsm8k"  # lm-eval's name of the task that asks the questions
AGAIN = 1_000_000  # more than any data set has questions


class ServerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One OpenAI-compatible vLLM server."""

    role: str  # "P", "D", or "B": a baseline without the connector
    checkpoint: str  # folder with the checkpoint and its tokenizer
    port: int
    tensor_parallel: int
    dtype: str
    block_size: int | None  # tokens; None: as vLLM chooses
    num_blocks: int | None  # of the pool; None: as memory allows
    max_model_len: int  # tokens of a prompt and its answer
    max_seqs: int  # requests at once
    kv_transfer_config: dict[str, Any] | None  # fields of KVTransferConfig; None: no connector
    environment: dict[str, str]
    records: str  # file to which the server appends a `Prompt` for each request
    engine_arguments: dict[str, Any] = {}  # further fields of EngineArgs, which win


class Prompt(msgspec.Struct, frozen=True):
    """Where the tokens of one prompt came from, as vLLM counts them (v1/metrics/stats.py: PrefillStats)."""

    id: str  # of the request
    prompt: int  # tokens
    external: int  # of these, loaded by the connector
    local: int  # of these, in the engine's own prefix cache
    computed: int  # of these, computed by the engine


class Questions(msgspec.Struct, frozen=True, kw_only=True):
    """What lm-eval asks: its own gsm8k, on data of the hub or of two files."""

    task: str  # folder with the file kvconform_gsm8k.yaml
    data: str  # where the questions come from, for people
    count: int  # questions that are asked, the first ones of the data; 0: all
    look: int = 0  # 1 and more: the same questions again
    varied: bool = False  # with other examples each time; a canary knows the answers to some prompts alone
    longest_answer: int  # tokens that an answer has at most
    alone: tuple[int, ...] = ()  # of the `count` questions these alone are asked; empty: all
    times: int = 1  # how often each of them is asked, of `alone` only


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One run of lm-eval against one address."""

    url: str  # of the server, without /v1
    model: str  # name under which the server serves
    questions: Questions
    at_once: int  # requests
    request_s: float  # deadline of one request
    # cache_salt of the requests, so that no run finds what another left in a prefix cache; "": none
    salt: str = ""
    online: bool = False  # the questions come from the hub
    headers: dict[str, str] = {}  # of each request


class Answer(msgspec.Struct, frozen=True):
    """The answer to one question, as lm-eval judges it."""

    question: int  # lm-eval's doc_id, plus AGAIN times the number of earlier looks
    text: str  # as generated
    strict: bool  # right by lm-eval's filter strict-match
    flexible: bool  # right by flexible-extract


class Answers(msgspec.Struct, frozen=True, kw_only=True):
    """All answers of one run of lm-eval."""

    answers: tuple[Answer, ...]  # by question
    texts: dict[int, tuple[str, ...]] = {}  # question that was asked alone -> all its answers
    unanswered: tuple[str, ...] = ()  # why requests failed, in the order of time
    seconds: float = 0.0
    # tokens of each prompt, as the servers counted them; None: the answer does not tell
    prompts: tuple[int | None, ...] = ()
