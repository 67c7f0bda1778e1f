"""Engine arguments of a model that run code, open connections or log prompts."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from service.doctor.findings import Result
from service.doctor.pod import check_models
from service.errors import SettingsError
from service.model_catalogue import load_catalogue, parse_catalogue
from service.unsafe_engine_args import FORBIDDEN, UNSAFE

SAFE: dict[str, Any] = {
    "dtype": "float16",
    "max_model_len": 8192,
    "load_format": "safetensors",
    "distributed_executor_backend": "mp",
    "compilation_config": {"cudagraph_mode": "FULL"},
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 4},
    "structured_outputs_config": {"backend": "xgrammar"},
    "trust_remote_code": False,
    "enable_log_requests": False,
}


def catalogue(arguments: dict[str, Any], **entry: Any) -> Any:
    return parse_catalogue({"models": [{"id": "demo", "source": "/models/demo", "engine_args": arguments, **entry}]})


def refusal(arguments: dict[str, Any], **entry: Any) -> str:
    with pytest.raises(SettingsError) as caught:
        catalogue(arguments, **entry)
    return str(caught.value)


def test_usual_arguments_are_accepted() -> None:
    assert catalogue(SAFE)["demo"].spec.engine_args == SAFE


@pytest.mark.parametrize("name", sorted(UNSAFE))
def test_unsafe_argument_is_refused_unless_it_is_acknowledged(name: str) -> None:
    message = refusal({name: "x"})
    assert f"models[0].engine_args.{name}: {UNSAFE[name]}" in message
    assert "unsafe_engine_args" in message
    assert catalogue({name: "x"}, unsafe_engine_args=[name])["demo"].unsafe_engine_args == (name,)
    other = next(each for each in UNSAFE if each != name)
    assert f"engine_args.{name}:" in refusal({name: "x", other: "x"}, unsafe_engine_args=[other])


@pytest.mark.parametrize("name", sorted(FORBIDDEN))
def test_argument_that_logs_prompts_or_fetches_media_is_never_allowed(name: str) -> None:
    assert f"models[0].engine_args.{name}: {FORBIDDEN[name]}" in refusal({name: True})
    assert f"models[0].engine_args.{name}: {FORBIDDEN[name]}" in refusal({name: True}, unsafe_engine_args=[name])
    assert f"models[0].unsafe_engine_args: {name}" in refusal({}, unsafe_engine_args=[name])


@pytest.mark.parametrize(
    ("arguments", "place"),
    [
        ({"trust-remote-code": True}, "trust_remote_code"),
        ({"Trust_Remote_Code": True}, "Trust_Remote_Code"),
        ({"trust_remote_code": "true"}, "trust_remote_code"),
        ({"hf_overrides.auto_map": "x"}, "hf_overrides.auto_map"),
        (
            {"structured_outputs_config": {"reasoning_parser_plugin": "/x.py"}},
            "structured_outputs_config.reasoning_pars",
        ),
        (
            {"structured_outputs_config": '{"reasoning-parser-plugin": "/x.py"}'},
            "structured_outputs_config.reasoning-parser-plugin",
        ),
        (
            {"structured_outputs_config.reasoning_parser_plugin": "/x.py"},
            "structured_outputs_config.reasoning_parser_p",
        ),
        ({"load_format": "pt"}, "load_format"),
        ({"load_format": "a_loader_of_a_plugin"}, "load_format"),
        (
            {"speculative_config": {"draft_load_config": {"load_format": "npcache"}}},
            "speculative_config.draft_load_conf",
        ),
        ({"distributed_executor_backend": "os.system"}, "distributed_executor_backend"),
        ({"allowed_media_domains": []}, "allowed_media_domains"),
        ({"allowed_media_domains": None}, "allowed_media_domains"),
        ({"dtype=float16 --trust-remote-code": ""}, "dtype=float16"),
        ({"trust_remote_code=true": ""}, "trust_remote_code=true"),
        ({"": "--trust-remote-code"}, ""),
        ({"dtype": "--trust-remote-code"}, "dtype"),
        ({"cudagraph_capture_sizes": [1, "--trust-remote-code"]}, "cudagraph_capture_sizes"),
        ({"dtype": "-O3"}, "dtype"),
    ],
)
def test_unsafe_argument_in_disguise_is_refused(arguments: dict[str, Any], place: str) -> None:
    assert f"models[0].engine_args.{place}" in refusal(arguments)


def test_acknowledging_what_is_unknown_or_not_set_is_an_error() -> None:
    assert "models[0].unsafe_engine_args: 'dtype'" in refusal({"dtype": "float16"}, unsafe_engine_args=["dtype"])
    assert "models[0].unsafe_engine_args: 'worker_cls'" in refusal({}, unsafe_engine_args=["worker_cls"])


def test_doctor_warns_of_each_acknowledged_argument(tmp_path: Path) -> None:
    entry = {"id": "demo", "source": "/m", "engine_args": {"trust_remote_code": True, "worker_cls": "a.B"}}
    path = tmp_path / "models.yaml"
    path.write_text(yaml.safe_dump({"models": [entry | {"unsafe_engine_args": ["trust_remote_code", "worker_cls"]}]}))
    models, *warnings = check_models(load_catalogue(path))
    assert models.result == Result.OK
    assert [each.result for each in warnings] == [Result.WARNING] * 2
    for name, warning in zip(("trust_remote_code", "worker_cls"), warnings, strict=True):
        assert warning.check == "engine arguments of demo"
        assert name in warning.message
        assert UNSAFE[name] in warning.message
