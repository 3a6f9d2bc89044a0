"""benchmarks/recall.py: prompts have the passkey at its depth, packed caches are read from the question on, and answers
are compared with the passkeys."""

from __future__ import annotations

from contextlib import contextmanager
from importlib import import_module
from types import SimpleNamespace

import pytest
from conftest import ROOT
from models import tiny
from specs import bare

torch = pytest.importorskip("torch")


@pytest.fixture
def recall(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return import_module("recall")


class Letters:
    """A tokenizer with one token for each ASCII character, 0 for a line feed. Texts start with BOS if there is one."""

    def __init__(self, bos_token_id=None):
        self.bos_token_id = bos_token_id

    def __call__(self, text, add_special_tokens=True, **_):
        start = [self.bos_token_id] if add_special_tokens and self.bos_token_id is not None else []
        return {"input_ids": start + [max(0, ord(c) - 31) for c in text]}

    def batch_decode(self, ids):
        return ["".join(chr(i + 31) if i else "\n" for i in row) for row in ids.tolist()]


@pytest.mark.parametrize("bos", [None, 95])
@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_passkeys_stand_at_their_depth(depth, bos, recall):
    tokenizer = Letters(bos)
    text = [64] * 500
    asked = recall.prompts(tokenizer, text, 300, depth, 3)
    length = 300 - len(recall.QUESTION) - recall.ANSWER
    assert asked.context.shape == (3, length) and len(set(asked.keys)) == 3
    assert tokenizer.batch_decode(asked.question) == [recall.QUESTION] * 3
    for row, key in zip(tokenizer.batch_decode(asked.context), asked.keys):
        begin = "~" if bos else ""
        hay = length - len(begin) - len(recall.PASSKEY.format(key=key))
        before = round(depth * hay)
        want = begin + "_" * before + recall.PASSKEY.format(key=key) + "_" * (hay - before)
        assert row == want and key.isdigit() and len(key) == 5
    again = recall.prompts(tokenizer, text, 300, depth, 3)
    assert again.keys == asked.keys and torch.equal(again.context, asked.context)
    with pytest.raises(ValueError, match="`length` must leave 1..500 tokens to the text, got 50"):
        recall.prompts(tokenizer, text, 50, depth, 1)


class Copier:
    """A model that answers a question with what follows "key is " in the texts of its cache, a list."""

    device = torch.device("cpu")

    def __init__(self, tokenizer):
        self.tokenizer, self.seen = tokenizer, []

    def forward(self, input_ids, past_key_values, use_cache, logits_to_keep):
        return self(input_ids, past_key_values, use_cache, logits_to_keep)

    def __call__(self, input_ids, past_key_values, use_cache, logits_to_keep):
        assert use_cache and logits_to_keep == 1
        past_key_values.append(input_ids)
        texts = self.tokenizer.batch_decode(torch.cat(past_key_values, 1))
        self.seen.append(input_ids.shape[1])
        keys = [f" {text.partition('key is ')[2][:5]}." + "-" * 9 for text in texts]
        said = [key[len(past_key_values) - 2] for key in keys]
        logits = torch.nn.functional.one_hot(torch.tensor([ord(c) - 31 for c in said]), 96).float()
        return SimpleNamespace(logits=logits[:, None])


def test_answers_are_generated_after_the_question(recall):
    tokenizer, entered = Letters(), []
    model = Copier(tokenizer)

    @contextmanager
    def reading():
        entered.append(list(model.seen))
        yield

    asked = recall.prompts(tokenizer, [64] * 500, 300, 0.5, 3)
    said = recall.answers(model, tokenizer, asked, [], reading())
    assert said == [f" {key}.-" for key in asked.keys]
    context, question = asked.context.shape[1], asked.question.shape[1]
    assert model.seen == [context, question] + [1] * (recall.ANSWER - 1) and entered == [[context]]


def test_every_cache_is_read(recall, monkeypatch):
    """On a model with random weights, our cache with every token exact answers like the full cache, and one of 1 bit
    does not. Each cache gets every prompt, in batches."""
    monkeypatch.setattr(recall, "text_of", lambda _: "_" * 300)
    model, tokenizer = tiny(), Letters()
    asked = recall.prompts(tokenizer, [64] * 300, 200, 0.5, 5)
    exact, coarse = bare(4, 4, sinks=256), bare(1, 1)
    with recall.plain_ways(model, tokenizer) as ways:
        full = ways[recall.FULL](asked)
        assert set(ways) == {recall.FULL, recall.FP8} and len(ways[recall.FP8](asked)) == 5
    with recall.packed_ways(model, tokenizer, {"exact": exact, "coarse": coarse}) as ways:
        assert ways["exact"](asked) == full != ways["coarse"](asked)
    monkeypatch.setattr(recall, "answers", lambda model, tokenizer, some, *_: [f" {key}!" for key in some.keys])
    found = recall.measure(model, tokenizer, {"exact": exact}, [150, 200], [0.0, 0.8], 5, 2)
    assert found == {
        (name, length, depth): [True] * 5
        for name in (recall.FULL, recall.FP8, "exact")
        for length in (150, 200)
        for depth in (0.0, 0.8)
    }


def test_specs_are_compared_on_the_same_texts(recall):
    hits = {("a", 64, 0.0): [True, True, False], ("b", 64, 0.0): [True, False, False],
            ("a", 64, 0.5): [False, True, True], ("b", 64, 0.5): [True, False, True]}  # fmt: skip
    assert list(recall.compared(hits, ["a", "b"])) == ["a finds 4 of 6 numbers, +1 +- 1.7 of b"]
