"""Sentences of README, docs and docstrings are plain: short, and without dialect. Known exceptions may only fall."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest
from paths import ROOT

sys.path.insert(0, str(ROOT / "docs"))
import plain_words


def test_no_file_holds_more_sentences_to_mend_than_it_may() -> None:
    """Rewrite what `python docs/plain_words.py FILE` prints; after a rewrite `--keep` lowers the numbers."""
    assert plain_words.too_many() == {}


def test_pages_have_no_more_words_than_they_may() -> None:
    """Drop what no reader of a page needs; `python docs/plain_words.py --words` says where the words are."""
    assert plain_words.too_wordy() == {}


def test_a_page_with_too_many_words_is_found(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    for page in plain_words.PAGES_OF_USERS:
        (tmp_path / page).write_text("one two\n")
    (tmp_path / "docs" / "plain_words.toml").write_text('[words]\n"all" = 12\n"of users" = 11\n')
    assert plain_words.too_wordy(tmp_path) == {"of users": (12, 11)}


def test_the_list_of_exceptions_holds_no_file_that_is_gone() -> None:
    assert [name for name in plain_words.allowed() if not (ROOT / name).exists()] == []


@pytest.mark.parametrize(
    ("sentence", "why"),
    [
        ("imports zmq, as no room does", "the word 'as no room does'"),
        ("One that none is sent is not served.", "the word 'one that none'"),
        ("Of eight requests at once bits are common.", "starts with 'Of'"),
        ("What no session asks for stays.", "starts with 'What'"),
        ("Those in use.", "starts with 'Those'"),
        ("word " * 26, "26 words"),
        ("It is made, was kept and is found.", "a chain of passive verbs"),
    ],
)
def test_sentences_that_must_be_read_twice_are_found(sentence: str, why: str) -> None:
    assert why in plain_words.faults(sentence)


@pytest.mark.parametrize(
    "sentence", ["The host sends one message.", "What does it cost?", "The row is copied and then is sent."]
)
def test_plain_sentences_pass(sentence: str) -> None:
    assert plain_words.faults(sentence) == []


def test_strings_below_constants_and_fields_are_read(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text('"""One."""\nA = 1\n"""Of one."""\nclass B:\n    b: int\n    """What b is."""\n')
    found = [sentence for sentence, _ in plain_words.found_in(tmp_path / "one.py")]
    assert found == ["Of one.", "What b is."]


def test_code_tables_and_generated_parts_are_no_prose() -> None:
    page = (
        "One.\n\n```\nOf code\n```\n| Of | a |\n<!-- generated: a -->\nOf these.\n<!-- end -->\n* Two `Of x`. Three.\n"
    )
    assert list(plain_words.sentences(page)) == ["One.", "Two Code.", "Three."]


def test_hard_passages_that_were_rewritten_do_not_return() -> None:
    """docs/log/rewritten.toml keeps them, with what the pages say now."""
    kept = tomllib.loads((ROOT / "docs" / "log" / "rewritten.toml").read_text())["passage"]
    assert len(kept) == 10
    now = {path: " ".join(path.read_text().split()) for path in plain_words.files()}
    assert [passage["before"] for passage in kept if any(passage["before"] in text for text in now.values())] == []
    assert [passage["after_in"] for passage in kept if not (ROOT / passage["after_in"]).is_file()] == []
