"""How a request ends: EOS, stop ids, stop strings, lengths; and what its text and tokens then hold."""

import pytest

from miro_cy import SamplingParams


def run(speaker, answer, **params):
    ids = speaker.say(answer)
    params = SamplingParams(**{"temperature": 0, "max_tokens": len(ids), **params})
    whole = speaker.engine.generate(speaker.prompt, params)
    streamed = list(speaker.engine.stream(speaker.prompt, params))
    assert "".join(event.text for event in streamed) == whole.text
    assert [token for event in streamed for token in event.tokens] == whole.tokens
    assert [event.finish_reason for event in streamed[:-1]] == [None] * (len(streamed) - 1)
    last = streamed[-1]
    assert (last.finish_reason, last.stop, last.usage) == (whole.finish_reason, whole.stop, whole.usage)
    assert whole.usage.completion_tokens == len(whole.tokens)
    assert whole.usage.prompt_tokens == speaker.n_prompt
    return whole


def test_length(speaker):
    whole = run(speaker, "hello world", max_tokens=3)
    assert whole.tokens == speaker.answer[:3]
    assert whole.text == speaker.engine.detokenize(whole.tokens)
    assert (whole.finish_reason, whole.stop) == ("length", None)


def test_eos_ends_and_is_in_the_tokens_only(speaker):
    answer = [
        *speaker.engine.tokenizer.encode("hello"),
        speaker.token("<|im_end|>"),
        *speaker.engine.tokenizer.encode("x"),
    ]
    whole = run(speaker, answer, logprobs=1)
    assert whole.tokens == answer[:-1]
    assert (whole.text, whole.finish_reason, whole.stop) == ("hello", "stop", None)
    assert len(whole.logprobs) == len(whole.tokens)


def test_eos_as_the_first_token(speaker):
    whole = run(speaker, "<|im_end|>hello")
    assert (whole.text, whole.finish_reason) == ("", "stop")
    assert whole.tokens == [speaker.token("<|im_end|>")]


def test_ignore_eos_goes_on_and_does_not_mask(speaker):
    answer = speaker.say("hello<|im_end|> wo<|im_end|>")
    whole = run(speaker, answer, ignore_eos=True)
    assert whole.tokens == answer
    assert (whole.text, whole.finish_reason) == ("hello wo", "length")


def test_stop_token_ids_end_under_ignore_eos_too(speaker):
    stop = speaker.token("!")
    whole = run(speaker, "hello<|im_end|>!hello", ignore_eos=True, stop_token_ids=[stop])
    assert (whole.text, whole.finish_reason, whole.stop) == ("hello", "stop", stop)
    assert whole.tokens[-1] == stop


def test_eos_named_as_a_stop_token(speaker):
    eos = speaker.token("<|im_end|>")
    whole = run(speaker, "hello<|im_end|>x", stop_token_ids=[eos], ignore_eos=True)
    assert (whole.text, whole.finish_reason, whole.stop) == ("hello", "stop", eos)


@pytest.mark.parametrize(
    ("answer", "stops", "text", "stop"),
    [
        ("hello world, hello", ["wor"], "hello ", "wor"),
        ("hello world", ["o w"], "hell", "o w"),
        ("hello world", ["hello world"], "", "hello world"),
        ("hello world", ["zzz", "d"], "hello worl", "d"),
        ("hello world", ["lo", "hel"], "", "hel"),
        ("aaab", ["aab"], "a", "aab"),
        ("naïve café", ["é"], "naïve caf", "é"),
        ("日本語です", ["語"], "日本", "語"),
        ("one\n\ntwo", ["\n\n"], "one", "\n\n"),
    ],
)
def test_stop_strings_across_tokens(speaker, answer, stops, text, stop):
    whole = run(speaker, answer, stop=stops)
    assert (whole.text, whole.finish_reason, whole.stop) == (text, "stop", stop)
    assert whole.tokens == speaker.answer[: len(whole.tokens)]
    assert stop in speaker.engine.detokenize(whole.tokens)


def test_the_beginning_of_a_stop_string_is_not_lost_at_the_end(speaker):
    for answer, reason in (("hello wo", "length"), ("hello wo<|im_end|>", "stop")):
        whole = run(speaker, answer, stop=["world"])
        assert (whole.text, whole.finish_reason, whole.stop) == ("hello wo", reason, None)


def test_a_stop_string_in_the_prompt_does_not_count(speaker):
    whole = run(speaker, "llo", stop=["hello", "he"])
    assert (whole.text, whole.finish_reason) == ("llo", "length")


def test_no_event_splits_a_character(speaker):
    text = "日本語 🙂 naïve"
    speaker.say(text)
    params = SamplingParams(temperature=0, max_tokens=len(speaker.answer))
    pieces = [event.text for event in speaker.engine.stream(speaker.prompt, params)]
    assert "".join(pieces) == text
    assert "�" not in "".join(pieces)


def test_a_character_cut_off_by_the_length_is_replaced(speaker):
    speaker.say("a🙂")
    whole = run(speaker, speaker.answer[:3])
    assert whole.text == "a�"


def test_max_tokens_zero_computes_nothing(speaker):
    whole = run(speaker, "hello", max_tokens=0, logprobs=2)
    assert (whole.text, whole.tokens, whole.finish_reason, whole.logprobs) == ("", [], "length", [])


def test_max_tokens_one(speaker):
    whole = run(speaker, "hello wo", max_tokens=1)
    assert (whole.tokens, whole.finish_reason) == (speaker.answer[:1], "length")


def test_max_tokens_none_is_what_the_context_leaves(speaker):
    whole = run(speaker, [speaker.token("a")] * 1000, max_tokens=None)
    assert len(whole.tokens) == speaker.engine.context - speaker.n_prompt
    assert whole.finish_reason == "length"
