"""Reads a batch's input file as a stream and tells all that is wrong with it. Pure; memory does not grow with it.

The error codes are OpenAI's: https://platform.openai.com/docs/guides/batch and what its API was seen to answer.
Line numbers are physical and count from 1; a blank line has a number and is no request.
"""

from service.input_file.errors import MAX_LISTED_ERRORS, InputError
from service.input_file.reading import MAX_EMBEDDING_INPUTS, InputFacts, read_input_file
from service.input_file.requests import embedding_inputs

__all__ = [
    "MAX_EMBEDDING_INPUTS",
    "MAX_LISTED_ERRORS",
    "InputError",
    "InputFacts",
    "embedding_inputs",
    "read_input_file",
]
