"""What requests may ask beyond plain answers, held by each engine that is installed: prompts' own
log-probabilities, what is in the text, which tokens may come, structures, what was in the cache."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serve_apps.engine.protocol import AnswerError, Delta, PromptError, SamplingParams
from tests.serve_apps.engine.conftest import Asker, Reference
from tests.serve_apps.engine.test_conformance import ENGINES, PROMPT, PROMPTS, greedy, start

EOS = 0


@pytest.fixture(scope="module")
def reference(wide: Path) -> Reference:
    return Reference(wide)


@pytest.fixture(scope="module", params=ENGINES)
def asker(request: pytest.FixtureRequest, wide: Path) -> Iterator[Asker]:
    name, options = request.param
    asker = start(name, wide, **options)
    yield asker
    asker.close()


async def deltas(asker: Asker, prompt: list[int], params: SamplingParams) -> list[Delta]:
    asker._count += 1
    return [delta async for delta in asker.engine.generate(f"request-{asker._count}", prompt, params)]


def check_scores(reference: Reference, prompt: list[int], first: Delta, num_top: int) -> None:
    """The prompt's log-probabilities are those of a plain forward pass over it."""
    expected = reference.logprobs(prompt[:1], prompt[1:])
    assert [entry.token_id for entry in first.prompt_logprobs] == prompt[1:]
    for row, entry in zip(expected, first.prompt_logprobs, strict=True):
        own = row[entry.token_id]
        assert entry.logprob == pytest.approx(own.item(), abs=1e-3)
        assert entry.rank == (row >= own).sum()
        values, tokens = row.topk(num_top)
        assert [token for token, _ in entry.top[:num_top]] == tokens.tolist()
        assert [logprob for _, logprob in entry.top[:num_top]] == pytest.approx(values.tolist(), abs=1e-3)


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_the_logprobs_of_a_prompt_are_those_of_a_plain_forward_pass(
    max_tokens: int, asker: Asker, reference: Reference
) -> None:
    async def ask() -> list[list[Delta]]:
        params = greedy(max_tokens, prompt_logprobs=3, ignore_eos=True)
        # Twice, so that the second time everything but what is asked for would be in the cache.
        both = [await asyncio.gather(*(deltas(asker, one, params) for one in PROMPTS)) for _ in range(2)]
        return [*both[0], *both[1]]

    for prompt, gained in zip(PROMPTS * 2, asker.run(ask()), strict=True):
        check_scores(reference, prompt, gained[0], 3)
        assert all(not delta.prompt_logprobs for delta in gained[1:])
        tokens = [token for delta in gained for token in delta.token_ids]
        assert (
            tokens == reference.generate(prompt, max_tokens, eos=False)[:max_tokens]
            if max_tokens
            else not tokens
        )
        assert gained[-1].finish_reason == "length"
        assert max_tokens or not "".join(delta.text for delta in gained)


def test_no_alternatives_and_one_token_are_prompts_too(asker: Asker, reference: Reference) -> None:
    (first,) = asker.run(deltas(asker, PROMPT, greedy(0, prompt_logprobs=0)))
    check_scores(reference, PROMPT, first, 0)
    assert all(entry.top in ((), ((entry.token_id, entry.logprob),)) for entry in first.prompt_logprobs)
    (first,) = asker.run(deltas(asker, [9], greedy(0, prompt_logprobs=2)))
    assert first.prompt_logprobs == ()


def test_an_answer_says_how_much_of_its_prompt_was_in_the_cache(asker: Asker) -> None:
    prompt = [(7 * number) % 300 + 1 for number in range(150)]

    def cached() -> list[int | None]:
        return [delta.cached_tokens for delta in asker.run(deltas(asker, prompt, greedy(3, ignore_eos=True)))]

    assert cached() == [0, *[None] * 2]
    first, *others = cached()
    assert first is not None
    assert 64 <= first < 150
    assert others == [None] * 2
    (scored, *_) = asker.run(deltas(asker, prompt, greedy(2, prompt_logprobs=0)))
    assert scored.cached_tokens == 0


def test_only_allowed_tokens_come(asker: Asker, reference: Reference) -> None:
    allowed = (7, 40, 41, 200)
    for params in (
        greedy(12, allowed_token_ids=allowed),
        SamplingParams(max_tokens=12, seed=1, allowed_token_ids=allowed),
        SamplingParams(max_tokens=12, seed=1, top_p=0.5, top_k=9, allowed_token_ids=allowed),
    ):
        assert set(asker.run(asker.answer(PROMPT, params)).token_ids) <= set(allowed)
    answer = asker.run(asker.answer(PROMPT, greedy(12, allowed_token_ids=allowed)))
    expected: list[int] = []
    for _ in range(12):
        row = reference.logprobs([*PROMPT, *expected], [0])[0]
        expected.append(max(allowed, key=lambda token: row[token]))
    assert list(answer.token_ids) == expected
    assert asker.run(asker.answer(PROMPT, greedy(5, allowed_token_ids=(EOS,)))).token_ids == (EOS,)


def test_words_that_are_bad_do_not_come(asker: Asker, reference: Reference) -> None:
    free = asker.greedy(PROMPTS[1], 60, ignore_eos=True)
    tokenizer = reference.tokenizer
    # A word of one token, and one of several that the answer has as they are spelt.
    texts = [tokenizer.decode([token]) for token in free.token_ids]
    single = next(text for text in texts if text.strip() == text and "\ufffd" not in text and text)
    pairs = zip(texts, texts[1:], free.token_ids, free.token_ids[1:], strict=False)
    double, pair = next(
        (a + b, [x, y])
        for a, b, x, y in pairs
        if tokenizer.encode(a + b, add_special_tokens=False) == [x, y] and a.strip() and single not in (a, b)
    )
    for words in ((single,), (double,), (single, double)):
        answer = asker.greedy(PROMPTS[1], 60, ignore_eos=True, bad_words=words)
        assert answer.token_ids != free.token_ids
        assert len(answer.token_ids) == 60
        if single in words:
            assert tokenizer.encode(single, add_special_tokens=False)[0] not in answer.token_ids
        if double in words:
            both = list(zip(answer.token_ids, answer.token_ids[1:], strict=False))
            assert tuple(pair) not in both


def test_the_text_may_have_what_ended_it(asker: Asker, reference: Reference) -> None:
    whole = asker.greedy(PROMPTS[1], 60, ignore_eos=True)
    middle = len(whole.text) // 2
    stop = whole.text[middle : middle + 3]
    end = whole.text.index(stop)
    for include, text in ((False, whole.text[:end]), (True, whole.text[:end] + stop)):
        answer = asker.greedy(
            PROMPTS[1], 60, ignore_eos=True, stop=("never in there", stop), include_stop=include
        )
        assert (answer.text, answer.finish_reason) == (text, "stop")
    tokenizer = reference.tokenizer
    token = next(token for token in whole.token_ids[5:] if "\ufffd" not in tokenizer.decode([token]))
    before = asker.greedy(PROMPTS[1], 60, ignore_eos=True, stop_token_ids=(token,))
    after = asker.greedy(PROMPTS[1], 60, ignore_eos=True, stop_token_ids=(token,), include_stop=True)
    assert before.token_ids == after.token_ids
    assert after.text.startswith(before.text)
    assert whole.text.startswith(after.text.rstrip("\ufffd"))
    assert len(after.text) > len(before.text)


def test_special_tokens_are_text_where_they_are_asked_for(asker: Asker) -> None:
    """Under a bias that has the end of sequence come at once, and again."""
    forced = {"logit_bias": ((EOS, 100.0),), "max_tokens": 3}
    for asked, text in (
        ({"ignore_eos": True}, ""),
        ({"ignore_eos": True, "skip_special_tokens": False}, "<eos><eos><eos>"),
        ({"skip_special_tokens": False}, ""),
        ({"skip_special_tokens": False, "include_stop": True}, "<eos>"),
        ({"include_stop": True}, ""),
    ):
        params = SamplingParams(temperature=0.0, **forced, **asked)  # type: ignore[arg-type]
        answer = asker.run(asker.answer(PROMPT, params))
        assert answer.text.replace(" ", "") == text
        assert answer.finish_reason == ("length" if "ignore_eos" in asked else "stop")


CHOICES = ("yes", "yes, but", "no", '"q" \\ \n', "鱼🎣 é")
STRUCTURES: list[tuple[dict[str, Any], Any]] = [
    ({"choice": CHOICES}, lambda text: text in CHOICES),
    ({"choice": ("a",)}, lambda text: text == "a"),
    ({"regex": r"[a-f]{2,4}-[0-9]{3}"}, lambda text: re.fullmatch(r"[a-f]{2,4}-[0-9]{3}", text)),
    ({"regex": "(鱼|é){3}"}, lambda text: re.fullmatch("(鱼|é){3}", text)),
    ({"grammar": 'root ::= "a" digit digit\ndigit ::= [0-9]'}, lambda text: re.fullmatch(r"a\d\d", text)),
    ({"grammar": 'start: "(" ("x" | start) ")"'}, lambda text: re.fullmatch(r"(\(+)x(\)+)", text)),
    ({"json_schema": '{"enum": [1, "b"]}'}, lambda text: json.loads(text) in (1, "b")),
]


@pytest.mark.parametrize(("form", "holds"), STRUCTURES, ids=[str(form) for form, _ in STRUCTURES])
def test_an_answer_that_ends_by_itself_is_what_was_asked_for(
    form: dict[str, Any], holds: Any, asker: Asker
) -> None:
    async def ask() -> list[Any]:
        asks = [SamplingParams(max_tokens=100, seed=seed, **form) for seed in range(4)]
        more = SamplingParams(max_tokens=100, seed=9, include_stop=True, skip_special_tokens=False, **form)
        return await asyncio.gather(
            *(asker.answer(PROMPT, one) for one in [greedy(100, **form), *asks, more])
        )

    for answer in asker.run(ask()):
        if answer.finish_reason == "stop":
            assert holds(answer.text.removesuffix("<eos>")), answer.text
        else:
            assert "grammar" in form, "only this one may go on for ever"


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"regex": "("}, "regex"),
        ({"regex": "(?=a)b"}, "regex"),
        ({"grammar": "no grammar"}, "grammar"),
        ({"grammar": 'start: <eos> "a"'}, "grammar"),
        ({"grammar": ""}, "grammar"),
        ({"choice": ("\ud800",)}, "choice"),
        ({"regex": "a", "choice": ("b",)}, "choice"),
        ({"allowed_token_ids": (5, 320)}, "allowed_token_ids"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
    ids=str,
)
def test_what_cannot_be_meant_is_refused(asked: dict[str, Any], field: str, asker: Asker) -> None:
    with pytest.raises(PromptError) as refused:
        asker.run(asker.answer(PROMPT, SamplingParams(**{"max_tokens": 5, **asked})))
    assert refused.value.field == field
    assert len(asker.greedy(PROMPT, 2).token_ids) == 2


@pytest.mark.parametrize(
    "asked",
    [
        {"allowed_token_ids": (34,), "bad_words": ("B",)},
        {"allowed_token_ids": (34,), "choice": ("yes",)},
    ],
    ids=str,
)
def test_an_answer_that_nothing_is_allowed_to_go_on_fails_alone(
    asked: dict[str, Any], asker: Asker, reference: Reference
) -> None:
    assert reference.tokenizer.encode("B") == [asked["allowed_token_ids"][0]] or "bad_words" not in asked

    async def ask() -> list[Any]:
        asks = [greedy(20, ignore_eos=True), greedy(20, **asked)]
        return await asyncio.gather(*(asker.answer(PROMPT, one) for one in asks), return_exceptions=True)

    good, bad = asker.run(ask())
    assert isinstance(bad, AnswerError)
    assert bad.own_fault
    assert list(good.token_ids) == reference.generate(PROMPT, 20, eos=False)


EXPLODING = [r"(a|b)*a(a|b){60}", r"((((a{99}){99}){99}){99}){99}", r"(.*a){25}x", r"(?:a?){5000}a{5000}"]


@pytest.mark.parametrize("regex", EXPLODING)
def test_an_expression_that_explodes_hurts_nobody(regex: str, asker: Asker, reference: Reference) -> None:
    async def ask() -> list[Any]:
        asks = [greedy(20, ignore_eos=True), SamplingParams(max_tokens=80, seed=1, regex=regex)]
        return await asyncio.gather(*(asker.answer(PROMPT, one) for one in asks), return_exceptions=True)

    good, bad = asker.run(ask(), 30)
    assert list(good.token_ids) == reference.generate(PROMPT, 20, eos=False)
    assert isinstance(bad, PromptError | AnswerError) or len(bad.token_ids) == 80
