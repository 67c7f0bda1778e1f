"""The step out of ``validating``: reads the input file."""

from typing import Final

from ray_job.contract.object_keys import file_key
from service.errors import ObjectNotFoundError
from service.input_file import InputError, InputFacts, read_input_file
from service.reconciler.context import Context, utc_now
from service.reconciler.records import Batch, accept, input_file_problem, refuse

MODEL_UNAVAILABLE: Final = "model_unavailable"


def validate(context: Context, batch: Batch) -> None:
    """Accepts the batch, or fails it with everything that is wrong with its input file.

    Raises:
        ObjectStoreError, LauncherError: store or launcher cannot be reached; the batch stays as it is.
    """
    problem = input_file_problem(context.pool, batch)
    if problem is None:
        try:
            facts = _read(context, batch)
        except ObjectNotFoundError:
            problem = InputError(
                code="invalid_request",
                message=f"The content of the input file '{batch.input_file_id}' is gone. Upload it again.",
                param="file_id",
            )
        else:
            if facts.error_count:
                refuse(context.pool, batch, facts.errors, facts.error_count, utc_now())
                return
            problem = _model_problem(context, facts)
            if problem is None:
                accept(context.pool, batch, facts, utc_now())
                return
    refuse(context.pool, batch, [problem], 1, utc_now())


def _model_problem(context: Context, facts: InputFacts) -> InputError | None:
    """Why no job of the batch's model can run; None where one can."""
    model = context.catalogue.models[facts.model or ""]
    reason = context.launcher.refusal(model.spec)
    if not reason:
        return None
    message = f"The model '{model.id}' cannot run here: {reason}."
    return InputError(code=MODEL_UNAVAILABLE, message=message, param="body.model")


def _read(context: Context, batch: Batch) -> InputFacts:
    chunks = context.store.read(file_key(batch.input_file_id))
    return read_input_file(chunks, endpoint=batch.endpoint, models=context.catalogue.models)
