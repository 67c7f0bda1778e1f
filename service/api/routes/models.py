"""``/v1/models``: the models of the catalogue."""

from typing import Annotated

from fastapi import APIRouter, Path

from service.api.dependencies import BackendsDependency, ReadAccess
from service.api.openapi import INVALID_ID, WITH_KEY, described
from service.api.schemas import ModelList, ModelObject
from service.errors import NotFoundError

router = APIRouter(prefix="/v1/models", tags=["Models"], responses=WITH_KEY)


@router.get("", operation_id="listModels", summary="List the models", description="List the models of the catalogue.")
def list_models(backends: BackendsDependency, _access: ReadAccess) -> ModelList:
    """List the models of the catalogue."""
    created = int(backends.catalogue_changed_at.timestamp())
    return ModelList(data=[ModelObject(id=model_id, created=created) for model_id in backends.catalogue])


# The id of a model can contain slashes.
@router.get(
    "/{model_id:path}",
    operation_id="retrieveModel",
    summary="Retrieve a model",
    description="Return one model of the catalogue.",
    responses=described({400: INVALID_ID, 404: "The model does not exist (`model_not_found`)."}),
)
def retrieve_model(
    backends: BackendsDependency,
    _access: ReadAccess,
    model_id: Annotated[str, Path(description="The `id` of a model; it can contain slashes.")],
) -> ModelObject:
    """Return one model of the catalogue."""
    if model_id not in backends.catalogue:
        raise NotFoundError(f"The model '{model_id}' does not exist.", param="model", code="model_not_found")
    return ModelObject(id=model_id, created=int(backends.catalogue_changed_at.timestamp()))
