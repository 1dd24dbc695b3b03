"""Where a text ends because of a stop string, and what may be shown before that is known. Knows characters, not why a
request has these stop strings; a stop *token* (EOS) is the engine's business.
"""

from collections.abc import Sequence

from jpaged.tokenizer.detokenize import IncrementalDetokenizer
from jpaged.tokenizer.protocol import Tokenizer


class StopChecker:
    """Releases text as early as can be: it holds back only what may still become a stop string.

    Of several stop strings the one that ends first counts; of those that end at the same character, the longest. How
    the text was cut into pieces makes no difference.

    One Knuth–Morris–Pratt automaton per stop string: its state is how many characters of the string the text so far
    ends with. So a character costs amortised O(1) per stop string, and the longest state is what must be held back.

    Args:
      stop: the stop strings, none of them empty.
      include_stop: leave the stop string at the end of the text.

    Raises:
      ValueError: a stop string is empty.
    """

    def __init__(self, stop: Sequence[str], include_stop: bool = False):
        if isinstance(stop, str) or not all(stop):
            raise ValueError(f"{stop=} must be a sequence of strings, none of them empty; try stop=('\\n',)")
        self._stop = tuple(stop)
        self._include = include_stop
        self._failure = [_failure_table(string) for string in self._stop]
        self._states = [0] * len(self._stop)
        self._held = ""
        self.hit: str | None = None  # the stop string that ended the text

    def push(self, text: str, *, may_hit: bool = True) -> str:
        """Takes the next piece and returns what may be shown now: nothing more once a stop string was hit. Where
        `may_hit` is false, stop strings that end in this piece do not count; they may still begin in it."""
        if self.hit is not None or not self._stop:
            return text if self.hit is None else ""
        text, begin = self._held + text, len(self._held)
        for position in range(begin, len(text)):
            self._advance(text[position], may_hit)
            if self.hit is not None:
                self._held = ""
                return text[: position + 1 - (0 if self._include else len(self.hit))]
        shown = len(text) - max(self._states)
        self._held = text[shown:]
        return text[:shown]

    def finish(self) -> str:
        """The text has ended: what was held back is no stop string after all."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str, may_hit: bool) -> None:
        for index, string in enumerate(self._stop):
            state = self._states[index]
            while state and string[state] != character:
                state = self._failure[index][state]
            state += string[state] == character
            if state == len(string):
                if may_hit and (self.hit is None or len(string) > len(self.hit)):
                    self.hit = string
                state = self._failure[index][state]
            self._states[index] = state


def _failure_table(string: str) -> list[int]:
    """Entry n: the length of the longest proper suffix of string[:n] that is also a prefix of it."""
    table = [0, 0]
    for position in range(1, len(string)):
        length = table[position]
        while length and string[length] != string[position]:
            length = table[length]
        table.append(length + (string[length] == string[position]))
    return table


class TextStream:
    """The text of one generated sequence, token by token, up to its stop string.

    Args:
      tokenizer: gives each id its bytes.
      stop: stop strings, none of them empty; see `StopChecker`.
      include_stop: leave the stop string at the end of the text.
      min_tokens: stop strings that end in the first so many tokens do not count (as in vLLM).
      skip_special_tokens: leave special tokens out of the text, so that no stop string can match them.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
    ):
        self._characters = IncrementalDetokenizer(tokenizer, skip_special_tokens, continues=True)
        self._stop = StopChecker(stop, include_stop)
        self._min_tokens = min_tokens
        self.num_tokens = 0  # how many were taken; after a hit, the last of them is the one that completed it

    @property
    def stop_hit(self) -> str | None:
        """The stop string that ended the text, or None."""
        return self._stop.hit

    def push(self, token_id: int) -> tuple[str, bool]:
        """Takes one token: the text that may be shown now, and whether the text has ended at a stop string. Further
        tokens are then neither taken nor counted."""
        if self._stop.hit is not None:
            return "", True
        self.num_tokens += 1
        piece = self._stop.push(self._characters.add((token_id,)), may_hit=self.num_tokens > self._min_tokens)
        return piece, self._stop.hit is not None

    def finish(self) -> str:
        """The rest of the text when it ended for another reason; nothing after a stop string, and none begins here."""
        return self._stop.push(self._characters.finish(), may_hit=False) + self._stop.finish()
