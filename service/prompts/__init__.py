"""Counting of prompt tokens as a model's engine counts them, without the engine and its weights.

``rendering`` turns a request into prompts, and ``counting`` counts their tokens with the model's own tokenizer.
What an engine would do with a request that these modules do not know in every detail is not guessed: such a request
is not counted.
"""

from service.prompts.counting import PromptCount, PromptCounter

__all__ = ["PromptCount", "PromptCounter"]
