"""Validation of a batch's input file. Pure, and streaming: memory does not grow with the file.

Where an error is found: ``reading`` (the file as a whole, and the order of the checks), ``json_lines`` (a line that is
not JSON), ``requests`` (the fields of one request).

The error codes are OpenAI's: https://platform.openai.com/docs/guides/batch and the observed answers of its API.
Line numbers count physical lines from 1; a blank line has a number but is not a request.
"""

from service.input_file.errors import MAX_LISTED_ERRORS, InputError
from service.input_file.reading import (
    MAX_EMBEDDING_INPUTS,
    FileFinder,
    InputFacts,
    LineConsumer,
    LineFiles,
    read_input_file,
)
from service.input_file.requests import embedding_inputs

__all__ = [
    "MAX_EMBEDDING_INPUTS",
    "MAX_LISTED_ERRORS",
    "FileFinder",
    "InputError",
    "InputFacts",
    "LineConsumer",
    "LineFiles",
    "embedding_inputs",
    "read_input_file",
]
