"""Token count of an input file, during its validation.

Every line of a file of at most 10,000 lines and 16 MB is counted. Of a larger file about 1,000 lines are, or fewer with
about 0.5 MB, which are chosen by their number: the same file has the same count. Their tokens are scaled by bytes.
A line that could be longer than the model accepts is always counted, up to 16 MB of such lines.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from service.prompts.counting import PromptCount, PromptCounter

WHOLE_LINES: Final = 10_000
WHOLE_BYTES: Final = 16 << 20
SAMPLE_LINES: Final = 1_000
SAMPLE_BYTES: Final = 500_000
LONG_LINES_BYTES: Final = 16 << 20
# The line with number n is in the sample if n * SPREAD modulo 2**32, a number without a pattern, is below a threshold.
SPREAD: Final = 2_654_435_761
RANGE_MASK: Final = 0xFFFF_FFFF
_NO_LIMIT: Final = 1 << 62

FindCounter = Callable[[str], PromptCounter | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCount:
    """Tokens of a file.

    Attributes:
        input_tokens: tokens of all prompts; exact if every line was counted.
        most_output: the most tokens that the engine may generate for all lines, scaled in the same way.
        lines: lines that were counted.
    """

    input_tokens: int
    most_output: int
    lines: int


@dataclass(slots=True, kw_only=True)
class FileCount:
    """Counts the tokens of a file's lines, one after the other.

    Args:
        find_counter: returns the counter of a model, or None if its tokenizer is unknown.
        endpoint: the endpoint of every line.
        size_bytes: the size of the file.
        line_count: about the number of its lines.

    Attributes:
        threshold: see ``SPREAD``.
        longest_uncounted: lines with more bytes are always counted.
        most_tokens: the largest ``max_tokens`` that the model accepts.
        seen_bytes: the bytes of all valid lines so far.
    """

    find_counter: FindCounter
    endpoint: str
    size_bytes: int
    line_count: int
    threshold: int = 0
    longest_uncounted: int = _NO_LIMIT
    most_tokens: int = _NO_LIMIT
    seen_bytes: int = 0
    _counter: PromptCounter | None = None
    _has_model: bool = False
    _is_countable: bool = True
    _long_bytes: int = 0
    _sample: list[int] = field(default_factory=lambda: [0, 0, 0, 0])
    _long: list[int] = field(default_factory=lambda: [0, 0, 0, 0])

    def set_model(self, model_id: str) -> None:
        """Begin to count, once the file's model is known."""
        if self._has_model:
            return
        self._has_model = True
        self._counter = counter = self.find_counter(model_id)
        if counter is None:
            return
        is_whole = self.line_count <= WHOLE_LINES and self.size_bytes <= WHOLE_BYTES
        share = min(SAMPLE_LINES / max(1, self.line_count), SAMPLE_BYTES / max(1, self.size_bytes))
        self.threshold = RANGE_MASK + 1 if is_whole else int(share * (RANGE_MASK + 1))
        self.most_tokens = counter.max_model_len
        if counter.max_prompt_tokens is not None:
            # A token has at least one byte, and a template adds about as much to each prompt as to an empty one.
            empty = counter.count(
                self.endpoint, {"messages": [{"role": "user", "content": ""}], "prompt": "", "input": ""}
            )
            self.longest_uncounted = max(0, counter.max_prompt_tokens - (empty.tokens if empty else 0))

    def add(self, number: int, size_bytes: int, body: Mapping[str, Any]) -> PromptCount | None:
        """Count a valid line if it is in the sample or could be too long.

        Returns:
            Its count; None if it was not counted.
        """
        self.seen_bytes += size_bytes
        is_long = size_bytes > self.longest_uncounted and self._long_bytes + size_bytes <= LONG_LINES_BYTES
        if self._counter is None or not (is_long or number * SPREAD & RANGE_MASK < self.threshold):
            return None
        self._long_bytes += is_long * size_bytes
        count = self._counter.count(self.endpoint, body)
        if count is None:
            self._is_countable = False
            return None
        sums = self._long if is_long else self._sample
        for position, value in enumerate((1, size_bytes, count.tokens, count.most_output)):
            sums[position] += value
        return count

    def limits(self, count: PromptCount | None, body: Mapping[str, Any]) -> tuple[str, int, int] | None:
        """Return what of a line is too long for its model, with its tokens and their limit; None if nothing is."""
        most = self._counter.max_prompt_tokens if self._counter else None
        if count is not None and most is not None and count.longest > most:
            return "prompt", count.longest, most
        for name in ("max_completion_tokens", "max_tokens"):
            value = body.get(name)
            if type(value) is int:
                return (name, value, self.most_tokens) if value > self.most_tokens else None
        return None

    def result(self) -> TokenCount | None:
        """Return the tokens of the file; None if its model's tokenizer is unknown or a line cannot be counted."""
        long_lines, long_bytes, long_tokens, long_output = self._long
        lines, size_bytes, tokens, output = self._sample
        rest_bytes = self.seen_bytes - long_bytes
        if self._counter is None or not self._is_countable or (rest_bytes and not size_bytes):
            return None
        scale = rest_bytes / size_bytes if size_bytes else 0
        return TokenCount(
            input_tokens=long_tokens + (tokens if rest_bytes == size_bytes else round(tokens * scale)),
            most_output=long_output + (output if rest_bytes == size_bytes else round(output * scale)),
            lines=long_lines + lines,
        )
