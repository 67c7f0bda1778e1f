"""Names, keys and fingerprints that the service and the infrastructure program derive alike."""

import pytest

from ray_job.contract.job_spec import ModelSpec
from ray_job.contract.rayjobs import RayJobNameError, model_fingerprint, rayjob_name, template_key


def test_rayjob_is_named_after_its_job() -> None:
    assert rayjob_name("job_0f3c") == "job-0f3c"
    assert rayjob_name("b" * 47) == "b" * 47


@pytest.mark.parametrize("job_id", ["b" * 48, "1batch", "Batch", "batch-", ""])
def test_job_id_that_cannot_be_a_name_is_refused(job_id: str) -> None:
    with pytest.raises(RayJobNameError, match="at most 47 lower case letters"):
        rayjob_name(job_id)


def test_template_key_is_readable_and_unique() -> None:
    key = template_key("Org/Llama-3.1")
    assert key.startswith("org-llama-3.1-")
    assert len(key) == len("org-llama-3.1-0123456789.json")
    assert template_key("org-llama-3.1") != key
    assert len(template_key("x" * 200)) == 60 + len("-0123456789.json")


def test_template_key_of_a_name_without_letters_is_its_digest() -> None:
    assert len(template_key("日本")) == len("0123456789.json")


def test_fingerprint_changes_with_the_model() -> None:
    one = ModelSpec(id="m", source="s")
    assert model_fingerprint(one) == model_fingerprint(ModelSpec(source="s", id="m"))
    assert model_fingerprint(one) != model_fingerprint(ModelSpec(id="m", source="s", batch_size=32))
    assert len(model_fingerprint(one)) == 32
