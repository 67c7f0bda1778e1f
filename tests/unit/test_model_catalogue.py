from pathlib import Path
from typing import Any

import pytest
import yaml

from service.errors import SettingsError
from service.model_catalogue import (
    PriceSection,
    accelerator_table,
    catalogue_yaml,
    load_catalogue,
    parse_accelerators,
    parse_catalogue,
    parse_catalogue_file,
    parse_models,
)


def model(**changes: Any) -> dict[str, Any]:
    return {"id": "demo", "source": "/models/demo"} | changes


def errors(*models: Any) -> str:
    with pytest.raises(SettingsError) as caught:
        parse_catalogue({"models": list(models)})
    return str(caught.value)


def test_short_entry_gets_defaults() -> None:
    demo = parse_catalogue({"models": [model()]})["demo"]
    assert (demo.id, demo.spec.engine, demo.spec.part_rows) == ("demo", "direct", 256)
    assert demo.endpoints == ("/v1/chat/completions", "/v1/completions")
    assert demo.limits.max_requests == 50_000


def test_engine_arguments_reach_the_job_spec() -> None:
    entry = model(engine_args={"max_model_len": 2048}, tensor_parallel_size=2, request_timeout_s=60)
    demo = parse_catalogue({"models": [entry]})["demo"]
    assert demo.spec.engine_args == {"max_model_len": 2048}
    assert (demo.spec.tensor_parallel_size, demo.spec.request_timeout_s) == (2, 60)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"engine": "fast"}, "models[0].engine: input should be 'direct', 'processor', 'serve' or 'http', not 'fast'"),
        ({"engine_arg": {}}, "models[0].engine_arg: is not a known key; did you mean 'engine_args'?"),
        ({"limits": {"max_request": 1}}, "models[0].limits.max_request: is not a known key; did you mean"),
        ({"limits": {"max_requests": 50_001}}, "models[0].limits.max_requests: input should be less than or equal"),
        ({"source": None}, "models[0].source: is required"),
        ({"endpoints": ["/v1/chat"]}, "models[0].endpoints[0]: input should be '/v1/chat/completions'"),
        ({"batch_size": "64"}, "models[0].batch_size: input should be a valid integer, not '64'"),
        ({"request_timeout_s": 0}, "models[0].request_timeout_s: input should be greater than or equal to 1"),
        ({"engine": "http"}, "models[0].base_url: the http engine needs the URL"),
        ({"base_url": "http://x/v1"}, "models[0].base_url: belongs to the http engine only"),
        ({"engine_args": {"model": "x"}}, "models[0].engine_args.model: set source of the model instead"),
        (
            {"accelerator": "v100", "engine_args": {"dtype": "bfloat16"}},
            "models[0].engine_args.dtype: bfloat16 needs compute capability 8.0; v100 has 7.0. Use float16.",
        ),
        (
            {"accelerator": "v100", "engine_args": {"quantization": "fp8"}},
            "models[0].engine_args.quantization: fp8 needs compute capability 7.5; v100 has 7.0. Use one of gptq,",
        ),
        (
            {"accelerator": "t4", "engine_args": {"dtype": "BF16"}},
            "models[0].engine_args.dtype: BF16 needs compute capability 8.0; t4 has 7.5. Use float16.",
        ),
        ({"accelerator": "l40"}, "models[0].accelerator: 'l40' is not a known accelerator; did you mean 'l40s'?"),
        (
            {"accelerator": "gaudi"},
            "models[0].accelerator: 'gaudi' is not a known accelerator; known accelerators:",
        ),
        (
            {"accelerator": "v100", "engine_args": {"kv-cache-dtype": "fp8_e5m2"}},
            "models[0].engine_args.kv_cache_dtype: fp8_e5m2 needs compute capability 8.0",
        ),
    ],
)
def test_wrong_entry_is_reported_with_its_path(changes: dict[str, Any], expected: str) -> None:
    assert expected in errors(model(**changes))


def test_all_errors_are_in_one_message() -> None:
    message = errors(
        model(engine="x"), {"source": "y"}, model(accelerator="v100", engine_args={"dtype": "bfloat16"}), "text"
    )
    for path in (
        "models[0].engine:",
        "models[1].id: is required",
        "models[2].engine_args.dtype:",
        "models[3]: must be",
    ):
        assert path in message


def test_duplicate_id_is_an_error() -> None:
    assert "models[1].id: 'demo' is the id of models[0] too" in errors(model(), model())


@pytest.mark.parametrize("content", ["", "models: []", "- x", "models: {a: 1}"])
def test_file_without_models_is_an_error(tmp_path: Path, content: str) -> None:
    path = tmp_path / "models.yaml"
    path.write_text(content)
    with pytest.raises(SettingsError, match=r"models\.yaml is wrong"):
        load_catalogue(path)


def test_missing_or_unparsable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="Set CLOISTER_MODELS"):
        load_catalogue(tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_text("a: [")
    with pytest.raises(SettingsError, match="is not YAML"):
        load_catalogue(tmp_path / "bad.yaml")


RTX = {"memory_mib": 48_510, "compute_capability": "8.9"}


def test_accelerators_of_the_file_extend_the_table() -> None:
    catalogue = parse_catalogue({"accelerators": {"rtx": RTX}, "models": [model(accelerator="rtx")]})
    assert catalogue["demo"].spec.accelerator == "rtx"


def test_row_of_the_file_gets_its_image_variant_from_the_compute_capability() -> None:
    own, wrong = parse_accelerators({"new": RTX, "old": RTX | {"compute_capability": 7.0}})
    rows = accelerator_table(own)
    assert wrong == []
    assert (rows["new"].image_variant, rows["old"].image_variant) == ("cuda13", "v100")
    assert (rows["new"].resource, rows["new"].memory_mib) == ("nvidia.com/gpu", 48_510)


def test_written_catalogue_has_the_keys_that_were_set() -> None:
    own, _ = parse_accelerators({"rtx": RTX})
    entry = model(accelerator="rtx", weights_gib=15, engine_args={"seed": 1})
    entries, wrong = parse_models([entry], accelerator_table(own))
    assert wrong == []
    assert yaml.safe_load(catalogue_yaml(entries, own)) == {"models": [entry], "accelerators": {"rtx": RTX}}
    assert "accelerators" not in catalogue_yaml(entries, {})


def test_price_of_an_accelerator_is_that_of_its_models() -> None:
    prices = {"a10g": {"per_gpu_hour": 1.006, "currency": "USD"}}
    entries = [model(accelerator="a10g"), model(id="other")]
    catalogue = parse_catalogue({"models": entries, "prices": prices})
    assert catalogue["demo"].price == PriceSection(per_gpu_hour=1.006, currency="USD")
    assert catalogue["other"].price is None


@pytest.mark.parametrize(
    ("prices", "problem"),
    [
        ({"a11g": {"per_gpu_hour": 1, "currency": "USD"}}, "prices.a11g: 'a11g' is not a known accelerator; did"),
        ({"cpu": {"per_gpu_hour": 1, "currency": "USD"}}, "prices.cpu: 'cpu' is not a known accelerator"),
        ({"a10g": {"per_gpu_hour": -1, "currency": "USD"}}, "prices.a10g.per_gpu_hour: "),
        ({"a10g": {"per_gpu_hour": 1, "currency": "dollar"}}, "prices.a10g.currency: "),
        ({"a10g": {"per_gpu_hour": 1}}, "prices.a10g.currency: is required"),
        ({"a10g": 1}, "prices.a10g: must be a mapping"),
        (
            {"a10g": {"per_gpu_hour": 1, "currency": "USD"}, "l4": {"per_gpu_hour": 1, "currency": "EUR"}},
            "prices.l4.currency: must be USD as for the others, not EUR; convert the price",
        ),
    ],
)
def test_wrong_price_is_refused(prices: dict[str, Any], problem: str) -> None:
    with pytest.raises(SettingsError) as caught:
        parse_catalogue({"models": [model()], "prices": prices})
    assert problem in str(caught.value)


DIGEST = f"sha256:{'5f' * 32}"


def test_pinned_model_is_a_directory_of_the_pods_of_jobs() -> None:
    spec = parse_catalogue({"models": [model(source=None, digest=DIGEST)]})["demo"].spec
    assert (spec.digest, spec.source) == (DIGEST, f"/models/{'5f' * 32}")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"digest": DIGEST}, "models[0].digest: names the model, and so does source; set one of them"),
        ({"digest": "latest", "source": None}, "models[0].digest: string should match pattern"),
        (
            {"digest": DIGEST, "source": None, "engine": "http", "base_url": "http://x/v1"},
            "models[0].digest: the http engine loads no model",
        ),
    ],
)
def test_wrong_digest_is_reported(changes: dict[str, Any], expected: str) -> None:
    assert expected in errors(model(**changes))


def test_catalogue_allows_no_models_at_run_time_by_default() -> None:
    assert not parse_catalogue_file({"models": [model()]}).at_run_time.allow
    with pytest.raises(SettingsError, match=r"models_at_run_time\.allow: input should be a valid boolean"):
        parse_catalogue_file({"models": [model()], "models_at_run_time": {"allow": "yes"}})
