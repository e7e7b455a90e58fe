"""Streaming text: the pieces join to the whole text, characters are never cut, stop strings never leak."""

from hypothesis import given
from hypothesis import strategies as st

from distdec.detokenize import TextStream


def decode_bytes(ids):
    """One token a byte; 256 is a special token without text."""
    return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


def stream(ids, stop=(), decode=decode_bytes):
    text = TextStream(decode, stop)
    pieces = [text.push(i) for i in ids]
    pieces.append(text.finish())
    assert "".join(pieces) == text.text
    return text, pieces


@given(st.text(max_size=30))
def test_pieces_join_to_the_whole_text(whole):
    text, pieces = stream(whole.encode())
    assert text.text == whole
    assert not any("\ufffd" in piece for piece in pieces if "\ufffd" not in whole)


def test_a_character_of_several_tokens_appears_once_whole():
    _, pieces = stream("a\u00e9\U0001f600b".encode())
    assert [piece for piece in pieces if piece] == ["a", "\u00e9", "\U0001f600", "b"]


def test_an_incomplete_character_at_the_end_is_shown_as_such():
    assert stream(b"ab\xe2\x82")[0].text == "ab\ufffd"


def test_special_tokens_have_no_text():
    assert stream([256, *b"hi", 256, *b" you", 256])[0].text == "hi you"


def test_a_tokenizer_that_drops_the_first_space_keeps_those_between_words():
    words = {1: " one", 2: " two", 3: " three"}
    text, _ = stream([1, 2, 3], decode=lambda ids: "".join(words[i] for i in ids).lstrip(" "))
    assert text.text == "one two three"


@given(st.text("ab#", max_size=25), st.lists(st.text("ab#", min_size=1, max_size=4), min_size=1, max_size=3))
def test_text_ends_before_the_first_stop_string(whole, stop):
    text = TextStream(decode_bytes, stop)
    out = ""
    for token in whole.encode():
        out += text.push(token)
        assert not any(s in out for s in stop)
        if text.stopped:
            break
    out += text.finish()
    # one token a character, so the text is cut at the first moment that a stop string is complete
    ends = [n for n in range(1, len(whole) + 1) if any(whole[:n].endswith(s) for s in stop)]
    if not ends:
        assert out == whole
        assert not text.stopped
    else:
        seen = whole[: ends[0]]
        assert out == seen[: min(seen.find(s) for s in stop if s in seen)]
        assert text.stopped


def test_what_might_become_a_stop_string_is_held_back_and_then_given_out():
    text = TextStream(decode_bytes, ["###"])
    assert [text.push(i) for i in b"x##y##"] == ["x", "", "", "##y", "", ""]
    assert text.finish() == "##"


def test_nothing_follows_a_stop_string():
    text = TextStream(decode_bytes, ["."])
    assert [text.push(i) for i in b"a.b"] == ["a", "", ""]
    assert text.finish() == ""
    assert text.text == "a"
