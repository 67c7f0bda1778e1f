"""Estimate of a batch on the client's side, with the tokenizer and the rates of the server."""

import dataclasses
import json
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from ray_job.contract.job_spec import ModelSpec
from ray_job.contract.prompt_rules import PromptRules, PromptRulesError
from service.client.exit_codes import CommandError
from service.db.rows import record
from service.estimates import Rates, estimate_batch
from service.input_file import InputFacts
from service.prompts import PromptCounter

if TYPE_CHECKING:
    from openai import OpenAI


class Preflight:
    """Facts of the server about the model of a file.

    Args:
        client: a client of the server.
    """

    def __init__(self, client: "OpenAI") -> None:
        self._client = client

    def find_counter(self, model_id: str) -> PromptCounter | None:
        """Fetch what the server knows about a model, and return its counter, if it knows the tokenizer.

        Raises:
            CommandError: the answer is not that of a cloister of this version.
            openai.APIError: the server is unreachable, or does not know the model.
        """
        basis: Any = self._client.get(f"/estimates/{quote(model_id)}", cast_to=object)
        try:
            gpus = int(basis["gpus_per_engine"])
            self._model = ModelSpec(
                id=model_id,
                source="",
                accelerator="gpu" if gpus else "cpu",
                tensor_parallel_size=max(1, gpus),
                concurrency=int(basis["concurrency"]),
            )
            self._rates = record(Rates, basis["rates"])
            rules = basis["prompt_rules"]
            return PromptCounter(PromptRules.from_json(json.dumps(rules).encode())) if rules else None
        except (PromptRulesError, KeyError, TypeError, ValueError) as error:
            raise CommandError(
                f"the server's answer about the model {model_id!r} cannot be used ({type(error).__name__}): use a "
                "`cloister` of the server's version, or leave out --estimate"
            ) from error

    def estimate(self, facts: InputFacts) -> dict[str, Any]:
        """Return the estimate of a valid file, as ``x_cloister`` of its batch will show it."""
        estimate = dataclasses.asdict(estimate_batch(self._model, facts.total, facts.tokens, self._rates))
        del estimate["most_output"]
        return estimate


def print_estimate(estimate: dict[str, Any], lines: int) -> None:
    """Print an estimate for people."""
    if estimate["input_tokens"] is None:
        print("estimate: unknown. The model's tokenizer is known after its first batch; images are not counted.")
        return
    counted = "exact" if estimate["sampled_lines"] == lines else f"from {estimate['sampled_lines']:,} lines"
    parts = [f"{estimate['input_tokens']:,} input tokens ({counted})"]
    if estimate["output_tokens"] is not None:
        parts.append(f"{estimate['output_tokens']:,} output tokens")
    if estimate["duration_s"] is not None:
        parts += [f"{estimate['duration_s']:,.0f} s", f"{estimate['gpu_seconds']:,.0f} GPU seconds"]
    else:
        parts.append("duration unknown before a batch of the model is measured")
    print(f"estimate: {', '.join(parts)}")
