"""What `vescale train` makes of data: packed rows, positions by document, and labels of what the assistant says."""

import copy
import fcntl
import json
import sys

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from vescale._training import tokens
from vescale._training.config import ConfigError, Data
from vescale._training.tokens import Bytes, rows_of

WORDS = ["<end>", "<user>", "<assistant>", "how", "are", "you", "well", "thanks", "and"]
CHAT = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


@pytest.fixture(scope="module")
def words():
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="and"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")
    made.chat_template = CHAT
    return made


def data(tmp_path, **more):
    return Data(cache=str(tmp_path / "cache"), **more)


def test_texts_are_packed_with_an_end_behind_each_document(tmp_path):
    for name, text in (("a", "abc"), ("b", "defgh")):
        (tmp_path / f"{name}.txt").write_text(text)
    rows = rows_of(data(tmp_path, text=f"{tmp_path}/*.txt", length=4, documents=True), Bytes(), 256)
    assert len(rows) == 2
    assert bytes(rows[0]["input_ids"].tolist()) == b"abc\0" and bytes(rows[1]["input_ids"].tolist()) == b"defg"
    assert torch.equal(rows[1]["labels"], rows[1]["input_ids"])
    across = rows_of(data(tmp_path, text=f"{tmp_path}/*.txt", length=7, documents=True), Bytes(), 256)
    assert across[0]["position_ids"].tolist() == [0, 1, 2, 3, 0, 1, 2]


def test_a_second_reading_is_of_the_cache_and_a_changed_file_is_not(tmp_path):
    (tmp_path / "a.txt").write_text("abcd")
    given = data(tmp_path, text=f"{tmp_path}/a.txt", length=2)

    class Counted(Bytes):
        calls = 0

        def __call__(self, texts, **more):
            Counted.calls += 1
            return super().__call__(texts, **more)

    for _ in range(2):
        assert rows_of(given, Counted(), 256)[0]["input_ids"].tolist() == [97, 98]
    assert Counted.calls == 1
    (tmp_path / "a.txt").write_text("xyzxyz")
    assert rows_of(given, Counted(), 256)[0]["input_ids"].tolist() == [120, 121] and Counted.calls == 2


def test_only_what_the_assistant_says_counts(tmp_path, words):
    turns = [("user", "how are you"), ("assistant", "well thanks"), ("user", "and you"), ("assistant", "well")]
    (tmp_path / "a.jsonl").write_text(
        json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]})
        + "\n\n"
        + json.dumps({"prompt": "how are you", "completion": "thanks"})
    )
    rows = rows_of(data(tmp_path, rows=f"{tmp_path}/*.jsonl", objective="sft", length=24), words, len(WORDS))
    shown = [WORDS[token] if token >= 0 else "-" for token in rows[0]["labels"].tolist()]
    assert " ".join(shown) == "- - - - - - well thanks <end> - - - - - well <end> - - - - - - thanks <end>"
    assert [WORDS[token] for token in rows[0]["input_ids"].tolist()][
        :6
    ] == "<user> how are you <end> <assistant>".split()


def test_another_chat_template_is_other_tokens(tmp_path, words):
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "how are you", "completion": "thanks"}))
    given = data(tmp_path, rows=f"{tmp_path}/*.jsonl", objective="sft", length=4)
    asked = copy.deepcopy(words)
    asked.chat_template = CHAT.replace("<end>", "and <end>")
    first, second = ([WORDS[one] for one in rows_of(given, by, 9)[1]["input_ids"]] for by in (words, asked))
    assert first == ["<end>", "<assistant>", "thanks", "<end>"] and second == ["and", "<end>", "<assistant>", "thanks"]


def test_documents_without_an_end_have_no_positions(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(40))
    with pytest.raises(ConfigError, match="needs a tokenizer with a token that ends a document"):
        rows_of(data(tmp_path, tokens=f"{tmp_path}/a.npy", length=4, documents=True), None, 40)


def test_a_process_that_writes_nothing_is_not_waited_for(tmp_path, monkeypatch):
    """Another open file holds the lock, as another process would."""
    (tmp_path / "a.txt").write_text("abcd")
    given = data(tmp_path, text=f"{tmp_path}/a.txt", length=2)
    rows_of(given, Bytes(), 256)
    (lock,) = (tmp_path / "cache").glob("*.lock")
    monkeypatch.setattr(tokens, "_SILENT_S", -1.0)
    with open(lock, "a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="and has written no token"):
            rows_of(given, Bytes(), 256)


def test_the_last_rows_are_held_out(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(40, dtype=np.uint32))
    train, rest = rows_of(data(tmp_path, tokens=f"{tmp_path}/a.npy", length=4), None, 40).parted(0.2)
    assert (len(train), len(rest)) == (8, 2)
    assert rest[0]["input_ids"].tolist() == [32, 33, 34, 35] and train[7]["input_ids"].tolist() == [28, 29, 30, 31]


@pytest.mark.parametrize(
    "more, says",
    [
        ({"text": "none/*.txt"}, "matches no file"),
        ({"rows": "none/*.jsonl"}, "this configuration needs datasets, which is not here"),
        ({"tokens": "none.npy"}, "cannot be read"),
        ({"tokens": "odd.npy"}, "holds float64 of shape (2, 2)"),
        ({"tokens": "few.npy", "length": 9}, "there are 3 tokens"),
        ({"tokens": "few.npy", "length": 1}, "token 300 has no row in the model's vocabulary of 256"),
        ({"rows": "a.jsonl", "length": 1}, "a row of the data has no text 'text'"),
        ({"text": "empty.txt", "length": 1}, "the data holds no token"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_data_that_cannot_be_trained_on(more, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)
    np.save("odd.npy", np.ones((2, 2)))
    np.save("few.npy", np.array([1, 300, 2]))
    (tmp_path / "a.jsonl").write_text('{"body": "x"}\n')
    (tmp_path / "empty.txt").write_text("")
    tokenizer = None if "tokens" in more else type("Endless", (Bytes,), {"eos_token_id": None})()
    with pytest.raises(ConfigError, match="vescale train") as caught:
        rows_of(data(tmp_path, **more), tokenizer, 256)
    assert says in str(caught.value)
