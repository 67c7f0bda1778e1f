from pathlib import Path
from typing import Any

import pytest

from service.errors import SettingsError
from service.model_catalogue import load_catalogue, parse_catalogue


def model(**changes: Any) -> dict[str, Any]:
    return {"id": "demo", "source": "/models/demo"} | changes


def errors(*models: Any) -> str:
    with pytest.raises(SettingsError) as caught:
        parse_catalogue({"models": list(models)})
    return str(caught.value)


def test_a_short_entry_gets_defaults() -> None:
    demo = parse_catalogue({"models": [model()]}).models["demo"]
    assert (demo.id, demo.spec.lane, demo.spec.batch_size) == ("demo", "direct", 64)
    assert demo.endpoints == ("/v1/chat/completions", "/v1/completions")
    assert demo.limits.max_requests == 50_000


def test_engine_arguments_reach_the_job_spec() -> None:
    demo = parse_catalogue({"models": [model(engine_args={"max_model_len": 2048}, tensor_parallel_size=2)]})
    assert demo.models["demo"].spec.engine_args == {"max_model_len": 2048}
    assert demo.models["demo"].spec.tensor_parallel_size == 2


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"lane": "fast"}, "models[0].lane: input should be 'direct', 'processor', 'serve' or 'http', not 'fast'"),
        ({"engine_arg": {}}, "models[0].engine_arg: there is no such key; did you mean 'engine_args'?"),
        ({"limits": {"max_request": 1}}, "models[0].limits.max_request: there is no such key; did you mean"),
        ({"limits": {"max_requests": 50_001}}, "models[0].limits.max_requests: input should be less than or equal"),
        ({"source": None}, "models[0].source: is required"),
        ({"endpoints": ["/v1/chat"]}, "models[0].endpoints[0]: input should be '/v1/chat/completions'"),
        ({"batch_size": "64"}, "models[0].batch_size: input should be a valid integer, not '64'"),
        ({"lane": "http"}, "models[0].base_url: the http lane needs the URL"),
        ({"base_url": "http://x/v1"}, "models[0].base_url: belongs to the http lane only"),
        ({"engine_args": {"model": "x"}}, "models[0].engine_args.model: set models[0].source instead"),
        (
            {"accelerator": "v100", "engine_args": {"dtype": "bfloat16"}},
            "models[0].engine_args.dtype: a v100 cannot compute in bfloat16; use float16",
        ),
        ({"accelerator": "v100", "engine_args": {"quantization": "fp8"}}, "models[0].engine_args.quantization: a v100"),
        (
            {"accelerator": "v100", "engine_args": {"kv-cache-dtype": "fp8_e5m2"}},
            "models[0].engine_args.kv_cache_dtype: a v100",
        ),
    ],
)
def test_a_wrong_entry_is_told_with_its_path(changes: dict[str, Any], expected: str) -> None:
    assert expected in errors(model(**changes))


def test_all_errors_come_in_one_message() -> None:
    message = errors(
        model(lane="x"), {"source": "y"}, model(accelerator="v100", engine_args={"dtype": "bfloat16"}), "text"
    )
    for path in ("models[0].lane:", "models[1].id: is required", "models[2].engine_args.dtype:", "models[3]: must be"):
        assert path in message


def test_an_id_that_stands_there_twice_is_an_error() -> None:
    assert "models[1].id: 'demo' stands there 2 times" in errors(model(), model())


@pytest.mark.parametrize("content", ["", "models: []", "- x", "models: {a: 1}"])
def test_a_file_without_models_is_an_error(tmp_path: Path, content: str) -> None:
    path = tmp_path / "models.yaml"
    path.write_text(content)
    with pytest.raises(SettingsError, match=r"models\.yaml is wrong"):
        load_catalogue(path)


def test_a_file_that_is_not_there_or_no_yaml_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="Set CLOISTER_MODELS"):
        load_catalogue(tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_text("a: [")
    with pytest.raises(SettingsError, match="is not YAML"):
        load_catalogue(tmp_path / "bad.yaml")
