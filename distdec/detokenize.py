"""Turn token ids into text as they arrive, and stop at the strings a request names."""

from collections.abc import Callable, Sequence


class TextStream:
    """Text of one growing sequence of tokens.

    A token may end inside a character, and a tokenizer may write a token differently at the start of a text. So a new
    token is decoded together with the few tokens before it, and held back while it ends in an incomplete character.
    Text that could be the beginning of a stop string is held back too, until it is certain.

    Args:
        decode: from token ids to text, special tokens left out.
        stop: strings that end the text; none of them is ever part of it.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()) -> None:
        self.decode = decode
        self.stop = tuple(stop)
        self.text = ""
        self.stopped = False
        self._ids: list[int] = []
        # ids[:_start] are done with; ids[_start:_read] are context whose text is already in `text` or held back
        self._start = 0
        self._read = 0
        self._held = ""

    def push(self, token_id: int) -> str:
        """Take one token and return the text that is now certain. Empty once a stop string was met."""
        if self.stopped:
            return ""
        self._ids.append(token_id)
        before = self.decode(self._ids[self._start : self._read])
        now = self.decode(self._ids[self._start :])
        if now.endswith("\ufffd") or len(now) <= len(before):
            return ""
        self._start, self._read = self._read, len(self._ids)
        return self._emit(now[len(before) :], last=False)

    def finish(self) -> str:
        """Return what was held back; call it once, after the last token."""
        if self.stopped:
            return ""
        before = self.decode(self._ids[self._start : self._read])
        rest = self.decode(self._ids[self._start :])[len(before) :]
        self._start = self._read = len(self._ids)
        return self._emit(rest, last=True)

    def _emit(self, piece: str, last: bool) -> str:
        piece = self._held + piece
        found = [at for at in (piece.find(text) for text in self.stop) if at >= 0]
        if found:
            self.stopped = True
            self._held = ""
            piece = piece[: min(found)]
        else:
            keep = 0 if last else self._ambiguous(piece)
            self._held = piece[len(piece) - keep :]
            piece = piece[: len(piece) - keep]
        self.text += piece
        return piece

    def _ambiguous(self, piece: str) -> int:
        """Return how many characters at the end of `piece` could begin a stop string.

        Example: stop "###", piece "end ##": 2.
        """
        longest = 0
        for text in self.stop:
            for count in range(min(len(text) - 1, len(piece)), longest, -1):
                if text.startswith(piece[-count:]):
                    longest = count
                    break
        return longest
