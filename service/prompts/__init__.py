"""Counting of prompt tokens as a model's engine counts them, without the engine and its weights.

    file_count ─▶ counting ─▶ rendering     lines of a file ─▶ tokens of a request ─▶ prompts of a request

What an engine would do with a request that these modules do not know in every detail is not guessed: such a request
is not counted.
"""

from service.prompts.counting import PromptCount, PromptCounter
from service.prompts.file_count import FileCount, TokenCount

__all__ = ["FileCount", "PromptCount", "PromptCounter", "TokenCount"]
