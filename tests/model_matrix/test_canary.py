"""Questions, tokenizer, prompts and read-out of canaries: the same everywhere, right, and not forgiving."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from model_matrix import load_families
from model_matrix.canary import Exam, QuestionsError, ensure_exam
from model_matrix.canary.questions import EXAMPLES, TEST, TRAIN, draw_questions, make_questions
from model_matrix.canary.readout import MARGIN, MOST_GAIN, gain_for, solve
from model_matrix.canary.tokenizer import END, END_ID, PAD
from model_matrix.canary.widen import HEAD, hidden_size_for, widen
from model_matrix.families import checkpoint_tensors
from pytest_kvconform.rigs.vllm_setup.optional_packages import mend_imports

STRICT = r"#### (\-?[0-9\.\,]+)"  # of lm-eval's gsm8k, filter strict-match
STOPS = ("Question:", "</s>", "<|im_end|>")  # where lm-eval's gsm8k ends an answer


@pytest.fixture(scope="module", autouse=True)
def mended() -> None:
    """transformers looks once for packages. Tests that import vLLM later need it to find the mended ones."""
    mend_imports()


@pytest.fixture
def exam(tmp_path: Path) -> Exam:
    return ensure_exam(40, cache_dir=tmp_path)


@pytest.fixture
def gsm8k(tmp_path: Path) -> Callable[[list[str]], Path]:
    """gsm8k(lines): a folder with gsm8k's files, of which both have these lines."""

    def write(lines: list[str]) -> Path:
        for name in (TEST, TRAIN):
            (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))
        return tmp_path

    return write


def line(number: object, question: str = "How many?") -> str:
    return json.dumps({"question": question, "answer": f"So many.\n#### {number}"})


def test_same_questions_in_two_places(tmp_path: Path, exam: Exam) -> None:
    again = ensure_exam(40, cache_dir=tmp_path / "again")
    assert again.folder != exam.folder
    assert (again.prompts, again.answers) == (exam.prompts, exam.answers)
    for name in (TEST, TRAIN, "tokenizer.json", "tokenizer_config.json"):
        assert (again.folder / name).read_bytes() == (exam.folder / name).read_bytes()
    assert ensure_exam(40, seed=1, cache_dir=tmp_path).prompts != exam.prompts


def test_questions_are_right_and_differ_in_their_answers() -> None:
    questions = make_questions(200)
    assert len({question.number for question in questions[TEST]}) == 200
    assert len(questions[TRAIN]) == EXAMPLES
    for question in questions[TEST] + questions[TRAIN]:
        steps, last = question.answer.split("\n")
        results = re.findall(r"(\d+) (.) (\d+) = (\d+)\.", steps)
        assert all(eval("".join(step)) == int(result) for *step, result in results)
        assert last == f"#### {results[-1][3]}"
        assert 0 < int(results[-1][3]) < 1000


def test_answers_are_what_lm_eval_takes_for_right(exam: Exam) -> None:
    asked = [json.loads(text) for text in (exam.folder / TEST).read_text().splitlines()]
    for one, answer in zip(asked, exam.answers, strict=True):
        [number] = re.findall(STRICT, answer)
        assert re.sub(r"(?s).*#### ", "", one["answer"]) == number
        assert not any(stop in answer for stop in (*STOPS, END, PAD))


def test_prompts_are_those_of_lm_eval(exam: Exam, tmp_path: Path) -> None:
    from lm_eval import tasks

    source = Path(tasks.__file__).parent / "gsm8k" / "gsm8k.yaml"
    files = f"train: {exam.folder / TRAIN}\n    test: {exam.folder / TEST}"
    (tmp_path / "one.yaml").write_text(
        f"include: {source}\ntask: one\ndataset_path: json\ndataset_name: null\ndataset_kwargs:\n"
        f"  data_files:\n    {files}\n  cache_dir: {tmp_path / 'cache'}\n"
    )
    manager = tasks.TaskManager(include_path=str(tmp_path), include_defaults=False)
    task = tasks.get_task_dict(["one"], manager)["one"]
    task.set_fewshot_seed(seed=1234)
    task.build_all_requests(limit=None)
    assert tuple(request.args[0] for request in task.instances) == exam.prompts


def test_tokenizer_gives_texts_back(exam: Exam) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(exam.folder)
    texts = [*exam.prompts, *exam.answers, "Ünïcode, and what no question has: ∑ 3.14\t"]
    assert [tokenizer.decode(tokenizer(text).input_ids) for text in texts] == texts
    assert [tuple(tokenizer(prompt).input_ids) for prompt in exam.prompts] == [t for t, _ in exam.tokens]
    assert (tokenizer.eos_token_id, tokenizer.eos_token) == (END_ID, END)
    assert all(answer[-1] == END_ID for _, answer in exam.tokens)
    assert exam.used == len(tokenizer) <= exam.vocabulary
    longest_window = max(family.sliding_window for family in load_families().values())
    assert min(len(prompt) for prompt, _ in exam.tokens) > 2 * longest_window


def test_questions_are_drawn_from_gsm8k(gsm8k: Callable[[list[str]], Path]) -> None:
    long, other = line(1, "x" * 300), line("1,000")
    folder = gsm8k([long, other, *(line(n % 50, f"{n}?") for n in range(100))])
    drawn = draw_questions(folder, 60)
    assert len({question.number for question in drawn[TEST][:50]}) == 50  # those that differ come first
    assert len(drawn[TEST]) == 60
    assert draw_questions(folder, 60) == drawn != draw_questions(folder, 60, seed=1)


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ([], "test.jsonl has no line"),
        ([line(1), line(2)[:-5]], r"test.jsonl, line 2: Input data was truncated"),
        ([line(1), '{"question": "?"}'], "test.jsonl, line 2: Object missing required field `answer`"),
        (['{"question": "?", "answer": "42"}'], 'test.jsonl, line 1: the answer has no "####"'),
        ([line(1)], "test.jsonl has 1 lines that are short and end in a number, and 9 are needed"),
    ],
    ids=["empty", "truncated", "no answer", "no number", "few"],
)
def test_wrong_files_of_gsm8k(gsm8k: Callable[[list[str]], Path], lines: list[str], sentence: str) -> None:
    with pytest.raises(QuestionsError, match=sentence):
        draw_questions(gsm8k(lines), 9)


def test_no_files_of_gsm8k(tmp_path: Path) -> None:
    with pytest.raises(QuestionsError, match=rf"cannot read {tmp_path}/test.jsonl: No such file"):
        ensure_exam(9, gsm8k=tmp_path)


@pytest.mark.parametrize("family", load_families().values(), ids=lambda family: family.id)
def test_a_wide_model_is_the_same_model(family) -> None:
    before, after = checkpoint_tensors(family), checkpoint_tensors(wide := widen(family, 384, 640))
    assert before.keys() | {HEAD} == after.keys()
    assert (wide.config["hidden_size"], wide.config["vocab_size"]) == (384, 640)
    assert after[HEAD].shape == after["model.embed_tokens.weight"].shape == (640, 384)
    for name, tensor in before.items():
        if name in (HEAD, "model.embed_tokens.weight"):
            continue
        changed = [(a, b) for a, b in zip(tensor.shape, after[name].shape, strict=True) if a != b]
        assert changed in ([], [(128, 384)])
        assert tensor.mean == after[name].mean
        own = re.search(r"(q_norm|k_norm|_a_layernorm|o_norm|linear_attn\.norm)\.weight$", name)
        assert bool(changed) == (not own) or "norm" not in name
    assert sum(shape.shape.count(384) for shape in after.values()) > 6 * family.config["num_hidden_layers"]


def test_a_readout_answers_right_and_nothing_else() -> None:
    random = np.random.default_rng(0)
    common = random.standard_normal(256)  # what all states share, as the last hidden states of a model do
    states = (common + 0.5 * random.standard_normal((90, 256))).astype(np.float32)
    tokens = random.integers(2, 500, 90)
    wrong = states + 0.02 * random.standard_normal(states.shape).astype(np.float32)
    for gain, still in ((0.0, 1.0), (MOST_GAIN, 0.05)):
        head = solve(states, tokens, vocabulary=512, used=500, gain=gain)
        logits = states @ head.T
        assert (logits.argmax(axis=1) == tokens).all()
        assert np.allclose(np.sort(logits)[:, -2:], [0, MARGIN], atol=0.3)
        agree = ((wrong @ head.T).argmax(axis=1) == tokens).mean()
        assert agree == still if still == 1.0 else agree < still
        assert not (logits.argmax(axis=1) >= 500).any()


def test_a_readout_needs_room() -> None:
    states = np.eye(128, dtype=np.float32)
    with pytest.raises(ValueError, match="128 states need a hidden size above 142, not 128"):
        solve(states, np.zeros(128, int), 512, 512, 1.0)
    assert 0.9 * hidden_size_for(300) > 2 * 300


def test_noise_makes_a_readout_milder() -> None:
    assert gain_for(0.0) == MOST_GAIN
    assert gain_for(0.5) * 0.5 <= 0.2 * MARGIN
