"""One run of lm-eval in a child of the zygote: its own gsm8k, through its own `local-completions`."""

from __future__ import annotations

import asyncio
import importlib
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from pytest_kvconform.rigs.serving.messages import AGAIN, TASK, Answer, Answers, Job, Questions

SEED = 1234  # lm-eval's default for the choice of examples
OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")  # variables, and constants of these packages
STRICT, FLEXIBLE = "strict-match", "flexible-extract"  # the filters of lm-eval's gsm8k
MOST_UNANSWERED = 3  # failed requests after which no further question is asked


def serve(connection: Connection, job: Job) -> None:
    """Run the job. Sends ("answered", count, how many requests there are) while it runs, the first time with
    a count of 0. Then it sends ("done", Answers) or ("failed", why).
    """
    try:
        if job.online:
            go_online()
        connection.send(("done", evaluate(job, lambda *counts: connection.send(("answered", *counts)))))
    except Exception as error:
        import traceback

        traceback.print_exc()
        connection.send(("failed", type(error).__name__, str(error)))


def go_online() -> None:
    """Let this process ask the hub. The zygote, which has imported these packages, never does."""
    for module in map(importlib.import_module, ("datasets.config", "huggingface_hub.constants")):
        for name in OFFLINE:
            os.environ.pop(name, None)
            if hasattr(module, name):
                setattr(module, name, False)


def evaluate(job: Job, progress: Callable[[int, int], None]) -> Answers:
    """Ask the questions and return the answers as lm-eval judges them."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    model = _model(job)
    answered, asked, unanswered = [0], [0], list[str]()
    ask = model.amodel_call

    turn = asyncio.Semaphore(job.at_once)  # lm-eval begins all calls at once, and lets them wait later

    async def amodel_call(*args: Any, **kwargs: Any) -> Any:
        async with turn:
            return await ask_unless_in_vain(*args, **kwargs)

    async def ask_unless_in_vain(*args: Any, **kwargs: Any) -> Any:
        if len(unanswered) >= MOST_UNANSWERED:
            return [""]
        try:
            found = await ask(*args, **kwargs)
        except Exception as error:  # lm-eval would end the whole run, and tell of no question
            unanswered.append(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
            return [""]
        answered[0] += 1
        progress(answered[0], asked[0])
        return found

    generate = model.generate_until

    def generate_until(requests: list[Any], **kwargs: Any) -> Any:
        asked[0] = len(requests)  # the data may have fewer questions than are to be asked
        progress(0, asked[0])
        return generate(requests, **kwargs)

    model.amodel_call, model.generate_until = amodel_call, generate_until
    prompts = _note_prompts(model)
    texts = _ask_alone(model, job.questions) if job.questions.alone else {}
    extra = {"max_gen_toks": job.questions.longest_answer} if job.questions.longest_answer else {}
    began = time.monotonic()
    results = simple_evaluate(
        model=model,
        tasks=[TASK],
        task_manager=TaskManager(include_path=job.questions.task, include_defaults=False),
        limit=job.questions.count or None,
        fewshot_random_seed=SEED + job.questions.look * job.questions.varied,
        gen_kwargs=extra | ({"cache_salt": job.salt} if job.salt else {}),
        log_samples=True,
        bootstrap_iters=0,
        verbosity="WARNING",
    )
    return Answers(
        answers=() if texts else _answers(results["samples"][TASK], AGAIN * job.questions.look),
        texts=texts,
        unanswered=tuple(unanswered),
        seconds=time.monotonic() - began,
        prompts=tuple(prompts),
    )


def _model(job: Job) -> Any:
    """lm-eval's local-completions. It sends no seed: see `EngineProcess.add`."""
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    model = LocalCompletionsAPI(
        base_url=f"{job.url}/v1/completions",
        model=job.model,
        tokenizer_backend=None,
        tokenized_requests=False,
        num_concurrent=max(2, job.at_once),  # with one, lm-eval sends no requests of its asynchronous kind
        max_retries=1,
        timeout=max(1, job.request_s),  # lm-eval rounds down, and 0 is no deadline
        header=job.headers or None,
    )
    model._seed = None
    return model


def _note_prompts(model: Any) -> list[int | None]:
    """Let lm-eval note how many tokens each prompt has, and return the list to which it adds them."""
    parse, prompts = model.parse_generations, list[int | None]()

    def parse_generations(outputs: Any, **kwargs: Any) -> Any:
        for output in outputs if isinstance(outputs, list) else [outputs]:
            usage = output.get("usage")
            tokens = usage.get("prompt_tokens") if isinstance(usage, dict) else None
            prompts.append(tokens if isinstance(tokens, int) else None)
        return parse(outputs, **kwargs)

    model.parse_generations = parse_generations
    return prompts


def _ask_alone(model: Any, questions: Questions) -> dict[int, tuple[str, ...]]:
    """Let lm-eval ask some questions alone, several times. Returns the dict to which it adds their answers.

    lm-eval makes the prompts of all questions: the examples that it draws for one depend on those before.
    """
    ask, texts = model.generate_until, dict[int, tuple[str, ...]]()

    def generate_until(requests: list[Any], **kwargs: Any) -> list[str]:
        chosen = [one for one in requests if one.doc_id in questions.alone]
        found = ask(chosen * questions.times, **kwargs)
        texts.update((one.doc_id, tuple(found[place :: len(chosen)])) for place, one in enumerate(chosen))
        return [texts[one.doc_id][0] if one.doc_id in texts else "" for one in requests]

    model.generate_until = generate_until
    return texts


def _answers(samples: list[dict[str, Any]], offset: int) -> tuple[Answer, ...]:
    """One Answer a question, from lm-eval's samples, of which there is one for each filter."""
    by_question: dict[int, dict[str, dict[str, Any]]] = {}
    for sample in samples:
        by_question.setdefault(sample["doc_id"], {})[sample["filter"]] = sample
    return tuple(
        Answer(
            question=number + offset,
            text=filters[STRICT]["resps"][0][0],
            strict=bool(filters[STRICT]["exact_match"]),
            flexible=bool(filters[FLEXIBLE]["exact_match"]),
        )
        for number, filters in sorted(by_question.items())
    )
