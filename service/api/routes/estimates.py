"""``GET /v1/estimates/{model}``: what a client needs to estimate a batch before it sends anything of it."""

import dataclasses
import json
from typing import Annotated, Any

from fastapi import APIRouter, Path

from service.api.dependencies import BackendsDependency, ReadAccess
from service.api.openapi import INVALID_ID, WITH_KEY, described
from service.api.schemas import Answer
from service.errors import NotFoundError
from service.model_reports import read_prompt_rules, read_rates

router = APIRouter(prefix="/v1/estimates", tags=["Models"], responses=WITH_KEY)


class EstimateBasis(Answer):
    """Facts of the server about the tokens and the speed of a model."""

    model: str
    """The `id` of the model."""
    concurrency: int
    """The most engines that answer one batch."""
    gpus_per_engine: int
    """GPUs of one engine; 0 on CPUs."""
    rates: dict[str, float | None]
    """What batches of the model take: seconds per row and token, of the rest, and the share of the allowed output."""
    prompt_rules: dict[str, Any] | None
    """The tokenizer, chat templates and limits of the model; null before its first batch has ended."""


# The id of a model can contain slashes.
@router.get(
    "/{model_id:path}",
    operation_id="retrieveEstimateBasis",
    summary="Retrieve what estimates of a model are made from",
    description="Return the tokenizer and the measured speed of a model, from which `cloister validate --estimate` "
    "estimates a batch on the client's side.",
    responses=described({400: INVALID_ID, 404: "The model does not exist (`model_not_found`)."}),
)
def retrieve_estimate_basis(
    backends: BackendsDependency,
    _access: ReadAccess,
    model_id: Annotated[str, Path(description="The `id` of a model; it can contain slashes.")],
) -> EstimateBasis:
    """Return the tokenizer and the measured speed of a model."""
    model = backends.catalogue.get(model_id)
    if model is None:
        raise NotFoundError(f"The model '{model_id}' does not exist.", param="model", code="model_not_found")
    rules = read_prompt_rules(backends.store, model.spec)
    return EstimateBasis(
        model=model.id,
        concurrency=model.spec.concurrency,
        gpus_per_engine=model.spec.num_gpus,
        rates=dataclasses.asdict(read_rates(backends.pool, model.spec)),
        prompt_rules=json.loads(rules) if rules else None,
    )
