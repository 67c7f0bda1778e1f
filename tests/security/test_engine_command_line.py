"""The table of unsafe engine arguments, and the parser of the engine server, against the vLLM that is installed."""

import pytest

from ray_job.engines.engine_server import import_vllm, option_parser
from service.unsafe_engine_args import FORBIDDEN, UNSAFE

# Importing vLLM warns of torch's own deprecations.
pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("default")]

# Arguments of vLLM 0.19, which the image for V100 has, that newer versions lack.
OLDER = {"logits_processor_pattern"}


def test_shortened_option_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for options in (["--trust-remote-cod"], ["--middlewar", "os.system"], ["--enable-log-req"]):
        with pytest.raises(SystemExit):
            import_vllm(["--model", "/m", *options])
        assert "unrecognized arguments" in capsys.readouterr().err


def test_table_has_vllms_own_names() -> None:
    options = option_parser()._option_string_actions
    nested = {"reasoning_parser_plugin"}
    unknown = {
        name
        for name in {*UNSAFE, *FORBIDDEN} - OLDER - nested
        if f"--{name.replace('_', '-')}" not in options and name != "config"
    }
    assert unknown == set()


def test_every_option_that_names_code_is_in_the_table() -> None:
    names = {option.removeprefix("--").replace("-", "_") for option in option_parser()._option_string_actions}
    marks = ("plugin", "_cls", "trust_", "middleware", "logits_processors", "_transfer_config", "allowed_media")
    found = {name for name in names if any(mark in name for mark in marks) and not name.startswith("no_")}
    assert found - {*UNSAFE, *FORBIDDEN} == {"max_lora_cls_labels"}  # a number
