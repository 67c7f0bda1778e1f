"""Rules of the code that ruff lacks.

Its rules S, which are bandit's, already refuse shells, ``verify=False`` of HTTP clients, HTTP clients without a
timeout, unsafe parsers, and SQL composed of strings.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PATHS = [path for package in ("service", "ray_job", "infra") for path in sorted((ROOT / package).rglob("*.py"))]
LOG_LEVELS = {"debug", "info", "warning", "error", "exception", "critical"}
# Names of what clients send and get, and of keys.
CONTENT = {"body", "content", "completion", "messages", "payload", "prompt", "prompts", "api_key", "password", "token"}
# Calls that wait for ever without a timeout, and the position of their timeout.
WAITING = {"urlopen": 2, "create_connection": 1, "HTTPConnection": 2, "HTTPSConnection": 2}
UNVERIFIED = {"verify", "check_hostname"}


def name_of(node: ast.AST) -> str:
    """Return the last part of a dotted name; empty for anything else."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def is_composed(node: ast.expr) -> bool:
    """Return whether a text is made of parts that are no constants."""
    match node:
        case ast.JoinedStr():
            parts = [part.value for part in node.values if isinstance(part, ast.FormattedValue)]
            return not all(name_of(part).isupper() for part in parts)
        case ast.BinOp(left=left, op=ast.Add() | ast.Mod()):
            return isinstance(left, ast.Constant | ast.JoinedStr | ast.BinOp)
        case ast.Call(func=ast.Attribute(value=ast.Constant(), attr="format")):
            return True
    return False


def problems(tree: ast.AST) -> Iterator[str]:
    """Yield the rules that a module breaks, each with its line."""
    for node in ast.walk(tree):
        found = []
        if isinstance(node, ast.Call):
            found = list(call_problems(node, name_of(node.func)))
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant | ast.Attribute):
            targets = {name_of(target) for target in node.targets}
            is_off = isinstance(node.value, ast.Constant) and node.value.value is False
            if (targets & UNVERIFIED and is_off) or name_of(node.value) == "CERT_NONE":
                found = ["certificates"]
        yield from (f"{node.lineno}: {rule}" for rule in found if isinstance(node, ast.stmt | ast.expr))


def call_problems(call: ast.Call, name: str) -> Iterator[str]:
    """Yield the rules that a call breaks."""
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    if any(
        isinstance(value, ast.Constant) and value.value is False and key in UNVERIFIED
        for key, value in keywords.items()
    ):
        yield "certificates"
    if name in {"create_subprocess_shell", "getoutput", "getstatusoutput"}:
        yield "shell"
    if name in WAITING and "timeout" not in keywords and len(call.args) <= WAITING[name]:
        yield "timeout"
    if name in {"execute", "executemany"} and call.args and is_composed(call.args[0]):
        yield "SQL"
    owner = name_of(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    if name in LOG_LEVELS and owner.lstrip("_") in {"log", "logger", "logging"}:
        if call.args and is_composed(call.args[0]):
            yield "log of a composed text"
        values = [*call.args[1:], *keywords.values()]
        if CONTENT & (keywords.keys() | {name_of(value) for value in values}):
            yield "log of content"


@pytest.mark.parametrize(
    ("code", "rule"),
    [
        ("boto3.client('s3', verify=False)", "certificates"),
        ("context.check_hostname = False", "certificates"),
        ("context.verify_mode = ssl.CERT_NONE", "certificates"),
        ("asyncio.create_subprocess_shell(command)", "shell"),
        ("urllib.request.urlopen(url)", "timeout"),
        ("socket.create_connection((host, port))", "timeout"),
        ("http.client.HTTPSConnection(host, 443)", "timeout"),
        ("connection.execute(f'NOTIFY {channel}')", "SQL"),
        ("connection.execute('LISTEN ' + channel)", "SQL"),
        ("connection.execute('LISTEN {}'.format(channel))", "SQL"),
        ("_log.info(f'received {body}')", "log of a composed text"),
        ("logger.info('received', body=text)", "log of content"),
        ("logger.warning('received %s', line.prompt)", "log of content"),
    ],
)
def test_bad_code_is_found(code: str, rule: str) -> None:
    assert list(problems(ast.parse(code))) == [f"1: {rule}"]


@pytest.mark.parametrize(
    "code",
    [
        "boto3.client('s3', verify=bundle)",
        "socket.create_connection((host, port), timeout=5)",
        "connection.execute(f'LISTEN {CHANNEL}')",
        "connection.execute(query('audit_log'), values)",
        "logger.info('received', size_bytes=len(body))",
    ],
)
def test_good_code_is_accepted(code: str) -> None:
    assert not list(problems(ast.parse(code)))


def test_code_of_the_project_follows_the_rules() -> None:
    found = [f"{path.relative_to(ROOT)}:{each}" for path in PATHS for each in problems(ast.parse(path.read_text()))]
    assert not found
