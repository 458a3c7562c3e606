"""The arithmetic of the evaluation: answers, prompts, resuming, the score."""

import json
from decimal import Decimal

import pytest
from eval_gsm8k import interval, score
from gsm8k import Problem, chat_prompt, completion_prompt, extract_answer, read_problems
from results_file import ResultsFile

SETTINGS = {"model": "m", "num_shots": 4}


@pytest.mark.parametrize(
    "text, answer",
    [
        ("5 + 5 = 10.\n#### 42", "42"),
        ("#### 1,234", "1234"),
        ("#### $18", "18"),
        ("#### 18.", "18"),
        ("####18.00", "18"),
        ("#### -3", "-3"),
        ("#### -$1,234,567.50.", "-1234567.5"),
        ("#### 42\n\nQuestion: 7 apples\n#### 7", "42"),
        ("#### The answer is 42 apples", "42"),
        ("It is 9 apples.\n#### \nnone", "9"),
        ("He has 3 and then 4, so 7 apples.", "7"),
        ("That makes $1,250.", "1250"),
        ("12-5", "5"),
        ("5 - 3 = 2.", "2"),
        ("x = -4", "-4"),
        ("1,2,3", "3"),
        ("a half is 0.5", "0.5"),
        ("50%", "50"),
        ("(12)-5", "5"),
    ],
)
def test_the_answer_is_the_number_after_the_mark_or_the_last_one(text, answer):
    assert extract_answer(text) == Decimal(answer)


@pytest.mark.parametrize("text", ["", "no number", "####"])
def test_no_number_is_no_answer(text):
    assert extract_answer(text) is None


def test_prompts_show_the_worked_examples_without_calculator_notes():
    shot, problem = Problem("2 + 2?", "2+2=<<2+2=4>>4\n#### 4"), Problem("3 + 3?", "#### 6")
    assert completion_prompt([shot], problem) == "Question: 2 + 2?\nAnswer: 2+2=4\n#### 4\n\nQuestion: 3 + 3?\nAnswer:"
    turns = [(message["role"], message["content"]) for message in chat_prompt([shot], problem)[1:]]
    assert turns == [("user", "2 + 2?"), ("assistant", "2+2=4\n#### 4"), ("user", "3 + 3?")]


def test_data_of_another_kind_is_refused_with_its_line(tmp_path):
    path = tmp_path / "test.jsonl"
    path.write_text('{"question": "q", "answer": "#### 1"}\n{"question": "q"}\n')
    with pytest.raises(ValueError, match="line 2"):
        read_problems(path)


def test_a_second_run_finds_what_the_first_one_did(tmp_path):
    path = tmp_path / "results.jsonl"
    with ResultsFile(path, SETTINGS) as results:
        results.add(3, {"correct": True})
        assert len(path.read_text().splitlines()) == 1  # there before the file is closed
    with ResultsFile(path, SETTINGS) as results:
        assert results.results[3]["correct"]
        results.add(1, {"correct": False})
    assert [json.loads(line)["index"] for line in path.read_text().splitlines()] == [3, 1]


@pytest.mark.parametrize("tail", [b'{"index": 4, "corr', '{"text": "é'.encode()[:-1], b"{"])
def test_a_half_written_last_line_is_dropped(tmp_path, tail):
    path = tmp_path / "results.jsonl"
    with ResultsFile(path, SETTINGS) as results:
        results.add(3, {"correct": True, "text": "naïve\u2028\n"})
    whole = path.read_bytes()
    path.write_bytes(whole + tail)
    with ResultsFile(path, SETTINGS) as results:
        assert list(results.results) == [3] and path.read_bytes() == whole
        results.add(4, {"correct": False})
    with ResultsFile(path, SETTINGS) as results:
        assert list(results.results) == [3, 4]


def test_results_of_other_settings_are_refused(tmp_path):
    path = tmp_path / "results.jsonl"
    with ResultsFile(path, SETTINGS) as results:
        results.add(0, {"correct": True})
    with pytest.raises(ValueError, match="num_shots 4, now 8"):
        ResultsFile(path, {**SETTINGS, "num_shots": 8})


@pytest.mark.parametrize("line", ["hello", "[]", "{}", '{"index": 1}'])
def test_a_file_of_something_else_is_left_alone(tmp_path, line):
    path = tmp_path / "notes.txt"
    path.write_text(line + "\nunfinished")
    with pytest.raises(ValueError, match="line 1"):
        ResultsFile(path, SETTINGS)
    assert path.read_text() == line + "\nunfinished"


def test_the_interval_is_wilsons():
    assert interval(10, 100) == pytest.approx((0.0552, 0.1744), abs=1e-3)
    assert interval(0, 20) == pytest.approx((0.0, 0.161), abs=1e-3)
    assert interval(20, 20)[1] == pytest.approx(1.0)
    assert score([{"correct": True}, {"correct": False}]).startswith("GSM8K: 1 of 2 right, 50.0%")
