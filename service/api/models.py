"""The routes of ``/v1/models``."""

from datetime import datetime

from fastapi import APIRouter

from service.api.authentication import ReadAccess
from service.api.parts import PartsDependency
from service.api.schemas import ModelList, ModelObject
from service.errors import NotFoundError

router = APIRouter(prefix="/v1/models")


def _model_object(model_id: str, since: datetime) -> ModelObject:
    return ModelObject(id=model_id, created=int(since.timestamp()))


@router.get("")
def list_models(parts: PartsDependency, _access: ReadAccess) -> ModelList:
    """Lists the models of the catalogue."""
    return ModelList(data=[_model_object(model_id, since) for model_id, since in parts.models.items()])


# A model's id may hold slashes.
@router.get("/{model_id:path}")
def retrieve_model(parts: PartsDependency, _access: ReadAccess, model_id: str) -> ModelObject:
    """Tells about one model."""
    if model_id not in parts.models:
        raise NotFoundError(f"The model '{model_id}' does not exist.", param="model", code="model_not_found")
    return _model_object(model_id, parts.models[model_id])
